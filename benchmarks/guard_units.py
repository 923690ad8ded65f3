"""One unit of the guard's evaluation: a federation, what attacks recover, what a server reads that
has studied the guard, or what a check costs. Each is one function, which returns its record."""

from __future__ import annotations

import copy
import hashlib
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from guard_cases import (
    HOSTS,
    OPTIMISERS,
    PARTITIONS,
    POLICIES,
    VARIANTS,
    Data,
    Federation,
    Variant,
    part,
)
from guard_studied import STUDIED, Host, Studied
from torch import Tensor, nn

from leakgauge import metrics, threat
from leakgauge.attacks.active import ACTIVE_ATTACKS
from leakgauge.config import build, choose
from leakgauge.defences import ClipAndNoise
from leakgauge.detectors import fires
from leakgauge.errors import InputError, NotApplicable
from leakgauge.fl import Scenario, aggregate, setting, simulate, tampered, target
from leakgauge.fl.local import train
from leakgauge.guard import Guard, Policy, Verdict
from leakgauge.records import Scale, record_of
from leakgauge.tensors import norm, parameters, subtract
from leakgauge.types import Batch, Dataset, LocalTraining, Setting, Target, ThreatModel

CLIENTS = 4
PROBED = 64  # records of which the attacks' recoveries are counted
EPOCH = 2000  # records of the local epoch that a check is compared with
RECOVERED = 50.0  # dB: an image that was read exactly
SEEN = 20.0  # dB: an image that can be recognised
NOISE = 0.1  # the norm of the noise on a studied update, over the update's own
Make = Callable[[], nn.Module]


def play(case: Federation, data: Data, seed: int, policy: Policy) -> dict[str, Any]:
    """One federation, every client behind its own guard; its checks, benign and attacked."""
    rng = _rng(seed, case.id)
    training, scale = _training(case), _scale(data.private)
    make = _maker(case, data)
    model = _started(make, case, data, rng)
    defence = ClipAndNoise(case.epsilon, norm=0.5) if case.epsilon else None
    shards = _shards(case, data.private, rng)
    chosen = {"": policy} | (POLICIES if case.every else {})
    benign: list[dict[str, Any]] = []
    attacked: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        guards = [
            {name: Guard(make, training, scale=scale, policy=p, store=Path(folder, f"{k}-{name}"),
                         secret=f"{seed}/{k}".encode())
             for name, p in chosen.items()}
            for k in range(CLIENTS)
        ]  # fmt: skip
        missed = [dict.fromkeys(chosen, 1) for _ in guards]
        met: list[set[str]] = [set() for _ in guards]  # policies that have accepted a round
        for index in range(case.rounds):
            if case.attacks and index == 0:
                attacked += _attacked(case, model, data, shards, guards, missed, met, index, rng)
            trained, sizes = [], []
            own = _setting(model, data.private)
            for k, mine in enumerate(guards):
                if case.partition == "dirichlet" and index == 1 + k % 3:
                    missed[k] = {name: count + 1 for name, count in missed[k].items()}
                    continue  # sits this round out
                truth = _draw(data.private, shards[k], case.batch * case.steps, rng)
                local = train(own, truth, training, rng, defence)
                trained.append(local)
                sizes.append(len(truth))
                for name, guard in mine.items():
                    verdict = guard.check(
                        model.state_dict(), truth, missed=missed[k][name], first=name not in met[k]
                    )
                    benign.append(_line(verdict, policy=name, round=index, client=k))
                    if verdict.train:
                        met[k].add(name)
                        sent = subtract(parameters(model), local.update) | local.buffers
                        guard.remember(verdict, sent)
                    missed[k][name] = 1 if verdict.train else missed[k][name] + 1
            shares = aggregate.weights(sizes, "records")
            after, buffers = aggregate.merge(parameters(model), trained, shares, 1.0)
            model = copy.deepcopy(model)
            model.load_state_dict(after | buffers, strict=False)
        if case.attacks:
            attacked += _attacked(case, model, data, shards, guards, missed, met, case.rounds, rng)
    facts = {name: getattr(case, name) for name in ("host", "optimiser", "partition", "start")}
    return {"kind": "federation", **facts, "benign": benign, "attacked": attacked}


def _attacked(
    case: Federation,
    model: nn.Module,
    data: Data,
    shards: Sequence[Tensor],
    guards: Sequence[dict[str, Guard]],
    missed: Sequence[dict[str, int]],
    met: Sequence[set[str]],
    index: int,
    rng: torch.Generator,
) -> Iterator[dict[str, Any]]:
    """Every attack on this network, made from this model, checked by two of the clients."""
    training = guards[0][""].training
    records = case.batch * case.steps
    held = Target(_setting(model, data.private), training, records, CLIENTS, data.public)
    for variant in VARIANTS:
        if case.host not in variant.hosts:
            continue
        facts = {"attack": variant.name, "host": case.host, "round": index}
        try:
            sent = _attack(variant, data.public).prepare(held, rng)
        except (NotApplicable, InputError) as reason:  # such as too few public images
            yield facts | {"policy": "", "decision": None, "reason": str(reason)}
            continue
        models_ = sent.models * CLIENTS if len(sent.models) == 1 else sent.models
        for k in (0, 1):
            batch = _draw(data.private, shards[k], records, rng)
            state = models_[k].state_dict()
            for name, guard in guards[k].items():
                first = name not in met[k]
                verdict = guard.check(state, batch, missed=missed[k][name], first=first)
                yield _line(verdict, policy=name, client=k, **facts)


def recover(variant: Variant, data: Data, seed: int, policy: Policy) -> dict[str, Any]:
    """How many of 64 images the attack reads from one step, and how many the guard said."""
    lines = []
    case = Federation(variant.hosts[0])
    make = _maker(case, data)
    for run in range(3):
        rng = _rng(seed, variant.name, run)
        batch = _draw(data.private, torch.arange(len(data.private)), PROBED, rng)
        private = Dataset("batch", batch.inputs, batch.labels, data.private.classes)
        training = replace(_training(case), batch_size=len(batch), steps=1)
        scale = _scale(private)
        round_ = simulate(Scenario(make, private, training, scale=scale), rng)
        attack = _attack(variant, data.public)
        sent = attack.prepare(target(round_, data.public), rng)
        round_ = tampered(round_, sent, rng)
        seen = threat.observe(round_, ThreatModel(malicious=True), kept=sent.kept)
        guess = attack.reconstruct(seen, rng)
        truth = round_.truths[0].inputs
        pairs = metrics.assign.optimal(guess.inputs, truth)
        scores = metrics.psnr(guess.inputs[pairs[pairs >= 0]], truth[pairs >= 0])
        secret = f"{seed}/{run}".encode()
        guard = Guard(make, training, scale=scale, policy=policy, secret=secret)
        verdict = guard.check(sent.models[0].state_dict(), batch, first=True)
        share = next((d.score for d in verdict.detections if d.test == "isolation"), None)
        said = None if share is None else share * len(batch)
        count = int((scores > RECOVERED).sum())
        lines.append({"recovered": count, "said": said, "records": len(batch)})
    return {"kind": "recovery", "attack": variant.name, "host": case.host, "runs": lines}


def studied(name: str, data: Data, seed: int, policy: Policy) -> dict[str, Any]:
    """What a server that has studied the guard reads of 64 images, and what the guard says."""
    case: Studied = STUDIED[name]
    classes = len(data.private.classes)
    training = case.training(replace(_training(Federation("mlp")), batch_size=PROBED, steps=1))
    scale = _scale(data.private)
    record = record_of(data.private.inputs, scale)

    def make() -> Host:
        return Host(case.kind, data.shape, classes)

    lines = []
    for run in range(3):
        rng = _rng(seed, name, run)
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(int(torch.randint(2**62, (), generator=rng)))
            model = make()
        few = part(data.public, torch.arange(min(2000, len(data.public))))
        read = case.tamper(model, record.entering(few.inputs), training, rng)
        batch = _draw(data.private, torch.arange(len(data.private)), PROBED, rng)
        update = train(_setting(model, data.private), batch, training, rng).update
        spread = NOISE * norm(update) / sum(v.numel() for v in update.values()) ** 0.5
        noised = {n: v + spread * torch.randn(v.shape, generator=rng) for n, v in update.items()}
        secret = f"{seed}/{run}".encode()
        guard = Guard(make, training, scale=scale, policy=policy, secret=secret)
        verdict = guard.check(model.state_dict(), batch, first=True)
        share = next((d.score for d in verdict.detections if d.test == "isolation"), 0.0)
        line: dict[str, Any] = {
            "decision": verdict.decision,
            "fired": [d.test for d in verdict.fired],
        }
        for word, sent in (("plain", update), ("noised", noised)):
            guess = record.leaving(read(sent).float()).clamp(0, 1)
            pairs = metrics.assign.optimal(guess, batch.inputs)
            psnr = metrics.psnr(guess[pairs[pairs >= 0]], batch.inputs[pairs >= 0])
            line |= {word: int((psnr > RECOVERED).sum()), f"{word}_seen": int((psnr > SEEN).sum())}
        lines.append(line | {"said": share * len(batch), "records": len(batch)})
    return {"kind": "studied", "attack": name, "runs": lines}


def cost(host: str, data: Data, seed: int, policy: Policy) -> dict[str, Any]:
    """CPU seconds of a check with a memory, and of one local epoch of 2000 records."""
    case, rng = Federation(host), _rng(seed, "cost", host)
    make = _maker(case, data)
    training, scale = _training(case), _scale(data.private)
    model = _started(make, case, data, rng)
    records = min(EPOCH, len(data.private))
    truth = _draw(data.private, torch.arange(len(data.private)), records, rng)
    began = time.process_time()
    own = _setting(model, data.private)
    local = train(own, truth, replace(training, epochs=1), rng)
    epoch = (time.process_time() - began) * EPOCH / records
    held = _first(truth, case.batch * case.steps)
    guard = Guard(make, training, scale=scale, policy=policy, secret=b"cost")
    verdict = guard.check(model.state_dict(), held, first=True)
    if verdict.train:
        guard.remember(verdict, subtract(parameters(model), local.update) | local.buffers)
    checks = []
    for _ in range(3):
        began = time.process_time()
        guard.check(model.state_dict(), held, first=not verdict.train)
        checks.append(time.process_time() - began)
    weights = sum(p.numel() for p in model.parameters())
    return {"kind": "cost", "host": host, "epoch": epoch, "checks": checks, "weights": weights}


def _line(verdict: Verdict, **facts: Any) -> dict[str, Any]:
    """One check: scores that are no number, or beyond all, count as huge."""
    tests = {
        d.test: [d.score if abs(d.score) < 1e30 else 1e30, d.threshold, fires(d), d.means]
        for d in verdict.detections
    }
    return facts | {"decision": verdict.decision, "rounds": verdict.rounds, "tests": tests}


def _attack(variant: Variant, public: Dataset) -> Any:
    kind = choose(ACTIVE_ATTACKS, variant.attack, "active attack")
    options = dict(variant.options)
    if variant.attack in ("robbing-the-fed", "loki") and len(public) < 512:
        options["bins"] = 128  # each bin is a quantile of the public images
    return build(kind, options, variant.attack)


def _rng(*key: object) -> torch.Generator:
    digest = hashlib.sha256("/".join(map(str, key)).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))


def _training(case: Federation) -> LocalTraining:
    return LocalTraining(batch_size=case.batch, steps=case.steps, **OPTIMISERS[case.optimiser])


def _scale(records: Dataset) -> Scale:
    """By the set's own mean and spread."""
    mean = tuple(round(v, 4) for v in records.inputs.mean((0, 2, 3)).tolist())
    std = tuple(round(v, 4) for v in records.inputs.std((0, 2, 3)).tolist())
    return Scale(mean, std)


def _setting(model: nn.Module, records: Dataset) -> Setting:
    return setting(model, records.inputs, len(records.classes), _scale(records))


def _maker(case: Federation, data: Data) -> Make:
    def make() -> nn.Module:
        model = HOSTS[case.host](data.shape, len(data.private.classes))
        if case.start == "zero-head":
            head = [m for m in model.modules() if isinstance(m, nn.Linear)][-1]
            nn.init.zeros_(head.weight)
            nn.init.zeros_(head.bias)
        return model

    return make


def _started(make: Make, case: Federation, data: Data, rng: torch.Generator) -> nn.Module:
    """The global model of the first round: never the one that the clients build themselves."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(int(torch.randint(2**62, (), generator=rng)))
        model = make()
    if case.start == "pretrained":
        public = Batch(data.public.inputs, data.public.labels)
        size = min(64, len(public))
        central = replace(_training(case), batch_size=size, steps=100, order="shuffled")
        own = _setting(model, data.public)
        local = train(own, public, central, rng)
        state = subtract(parameters(model), local.update) | local.buffers
        model.load_state_dict(state)
    return model


def _shards(case: Federation, private: Dataset, rng: torch.Generator) -> list[Tensor]:
    """Each client's records. A draw that leaves a client fewer than it probes is drawn again."""
    while True:
        shards = PARTITIONS[case.partition].split(private, CLIENTS, rng)
        if min(map(len, shards)) >= min(PROBED, max(32, len(private) // (4 * CLIENTS))):
            return shards


def _draw(private: Dataset, shard: Tensor, count: int, rng: torch.Generator) -> Batch:
    chosen = shard[torch.randperm(len(shard), generator=rng)[:count]]
    return Batch(private.inputs[chosen], private.labels[chosen])


def _first(batch: Batch, count: int) -> Batch:
    return Batch(batch.inputs[:count], batch.labels[:count])
