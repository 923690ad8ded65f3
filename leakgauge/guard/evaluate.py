"""Does the guard hold? Honest federations and every active attack, through the guard itself.

A *unit* of work is one federation: four clients, each with a guard and a store of its own, and
honest rounds in which every client checks the model, trains, and remembers. Where the unit says so,
each attack is also sent: to clients without a memory before the first round, and to clients that
remember honest rounds after the last. Other units measure the cost of a check beside a local epoch,
and set the guard's self-audit beside what the attacks recover. The last send models of a server
that has studied the guard, and count what it reads, also off an update with noise.

A finished unit is one line of OUT/records.jsonl; units that have a line are not run again.
"""

from __future__ import annotations

import copy
import hashlib
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from leakgauge import data as datasets
from leakgauge import metrics, models, threat
from leakgauge._version import __version__
from leakgauge.attacks.active import ACTIVE_ATTACKS
from leakgauge.config import build, choose
from leakgauge.defences import ClipAndNoise
from leakgauge.detectors import WarmUp, fires
from leakgauge.errors import InputError, NotApplicable
from leakgauge.fl import Scenario, aggregate, simulate, tampered, target
from leakgauge.fl.local import train, unnormalised
from leakgauge.fl.partition import Dirichlet, Iid, LabelSkew, Partition
from leakgauge.guard import findings
from leakgauge.guard.guard import Guard, Verdict
from leakgauge.guard.policy import Policy
from leakgauge.guard.studied import STUDIED, Host, Studied
from leakgauge.tensors import norm, parameters, subtract
from leakgauge.types import Batch, Dataset, LocalTraining, Target, ThreatModel

PROBED = 64  # records of which the attacks' recoveries are counted
CLIENTS = 4
EPOCH = 2000  # records of the local epoch that a check is compared with
RECOVERED = 50.0  # dB: an image that was read exactly
SEEN = 20.0  # dB: an image that can be recognised
NOISE = 0.1  # the norm of the noise on a studied update, over the update's own
Make = Callable[[], nn.Module]
Unit = Callable[[], dict[str, Any]]


# --- what is evaluated ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Data:
    """Images of the clients, and public ones that are no client's."""

    private: Dataset
    public: Dataset

    @property
    def shape(self) -> tuple[int, int, int]:
        channels, height, width = self.private.inputs.shape[1:]
        return channels, height, width


def load_data(quick: bool) -> Data:
    """CIFAR-10 where LEAKGAUGE_DATA is set; else the built-in photographs, every third public."""
    if os.environ.get("LEAKGAUGE_DATA") and not quick:
        test = datasets.load("cifar10", split="test")
        return Data(datasets.load("cifar10", split="train"), _part(test, torch.arange(6000)))
    whole = datasets.load("photos", size=16 if quick else 32, per_photo=200)
    third = torch.arange(len(whole)) % 3 == 0
    return Data(_part(whole, (~third).nonzero()[:, 0]), _part(whole, third.nonzero()[:, 0]))


def _part(whole: Dataset, index: Tensor) -> Dataset:
    return Dataset(whole.name, whole.inputs[index], whole.labels[index], whole.classes)


def strided(shape: tuple[int, int, int], classes: int, channels: int = 8) -> nn.Module:
    """Three strided convolutions with batch norm: small enough to train SEER on."""
    layers: list[nn.Module] = []
    inputs = shape[0]
    for outputs in (channels, 2 * channels, 4 * channels):
        layers += [nn.Conv2d(inputs, outputs, 3, stride=2, padding=1), nn.BatchNorm2d(outputs)]
        layers += [nn.ReLU()]
        inputs = outputs
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, classes))


def _named(name: str, shape: tuple[int, int, int], classes: int, **options: Any) -> nn.Module:
    """A network of `models`, with weights that depend on torch's global generator."""
    rng = torch.Generator().manual_seed(int(torch.randint(2**62, ())))
    return models.make(name, shape=shape, classes=classes, rng=rng, **options)


HOSTS: dict[str, Callable[..., nn.Module]] = {
    "mlp": partial(_named, "mlp", hidden=[512, 256]),
    "cnn": partial(_named, "cnn"),
    "resnet-bn": partial(_named, "resnet-10", width=0.25),
    "resnet-gn": partial(_named, "resnet-10", width=0.25, norm="group"),
    "vit": partial(_named, "vit-small", dim=64, depth=3, heads=4),
    "strided": strided,
}
OPTIMISERS: dict[str, dict[str, Any]] = {
    "sgd": {"lr": 0.05},
    "momentum": {"lr": 0.02, "momentum": 0.9},
    "adam": {"lr": 1e-3, "optimiser": "adam", "weight_decay": 1e-4},
}
PARTITIONS: dict[str, Partition] = {
    "iid": Iid(),
    "dirichlet": Dirichlet(0.5),
    "label-skew": LabelSkew(2),
}
Start = Literal["fresh", "pretrained", "zero-head"]


@dataclass(frozen=True)
class Variant:
    """An attack with its options, and the networks it is sent to."""

    attack: str
    hosts: tuple[str, ...]
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        chosen = ", ".join(f"{key} {value}" for key, value in self.options.items())
        return f"{self.attack} ({chosen})" if chosen else self.attack


ADAPTIVE = {"magnitudes": "independent", "amplitude": "host"}
DENSE, ALL = ("mlp", "cnn"), ("mlp", "cnn", "resnet-bn", "resnet-gn", "vit")
VARIANTS: tuple[Variant, ...] = (
    Variant("robbing-the-fed", DENSE),
    Variant("robbing-the-fed", DENSE, {"noise": 0.1, "functional": "random"}),
    Variant("robbing-the-fed", ALL, {"form": "block"}),
    Variant("trap-weights", DENSE),
    Variant("trap-weights", DENSE, ADAPTIVE),
    Variant("fishing", ALL),
    Variant("fishing", ALL, {"bias": 10.0, "row": 0.5}),
    Variant("fishing", ALL, {"camouflage": 0.2}),
    Variant("fishing", ALL, {"by": "feature"}),
    Variant("decepticons", ("vit",)),
    Variant("loki", ALL),
    Variant("seer", ("strided",)),
)
RECOVERIES: tuple[Variant, ...] = (
    Variant("robbing-the-fed", ("mlp",)),
    Variant("robbing-the-fed", ("cnn",)),
    Variant("trap-weights", ("mlp",)),
    Variant("trap-weights", ("cnn",)),
    Variant("trap-weights", ("mlp",), ADAPTIVE),
)


@dataclass(frozen=True)
class Federation:
    """One honest federation, and whether the attacks are sent to its clients too."""

    host: str
    optimiser: str = "momentum"
    partition: str = "dirichlet"
    start: Start = "fresh"
    epsilon: float | None = None  # of clip-and-noise on every update
    attacks: bool = False
    rounds: int = 5
    steps: int = 8
    batch: int = 32
    every: bool = False  # every policy of POLICIES, beside the one that is evaluated

    @property
    def id(self) -> str:
        noise = f"dp-{self.epsilon:g}" if self.epsilon else "plain"
        parts = (self.host, self.optimiser, self.partition, self.start, noise)
        return "/".join((*parts, f"{self.rounds}x{self.steps}x{self.batch}"))


POLICIES = {
    "warm-up": Policy(warm_up=WarmUp()),
    "head invariant": Policy(averaging="plain"),
}
"""What a client can add to the default."""


def federations(quick: bool) -> list[Federation]:
    if quick:
        return [
            Federation("mlp", attacks=True, rounds=2, steps=2),
            Federation("cnn", "adam", "iid", attacks=True, rounds=2, steps=2),
        ]
    hosts = [host for host in HOSTS if host != "strided"]
    pairs = [(o, p) for o in OPTIMISERS for p in PARTITIONS]
    pairs.sort(key=lambda pair: pair not in FIRST)
    plain = [
        Federation(host, optimiser, partition, attacks=(optimiser, partition) in ATTACKED)
        for optimiser, partition in pairs
        for host in hosts
    ]
    special = [Federation(host, start="pretrained", partition="iid", rounds=3) for host in hosts]
    special += [
        Federation(
            host, optimiser, partition, "zero-head", attacks=optimiser == "momentum", rounds=5
        )
        for optimiser, partition in (("momentum", "dirichlet"), ("adam", "label-skew"))
        for host in hosts
    ]
    noised = [
        Federation(host, epsilon=epsilon, rounds=3) for host in hosts for epsilon in (1e3, 1e5)
    ]
    # One step of eight records per round: the only training that SEER can read.
    joint = Federation("strided", "sgd", "iid", attacks=True, steps=1, batch=8, every=True)
    ahead = len(FIRST) * len(hosts)
    return [*plain[:ahead], *special, *plain[ahead:], *noised, joint]


ATTACKED = {("momentum", "dirichlet"), ("adam", "iid")}
FIRST = (("momentum", "dirichlet"), ("adam", "label-skew"))
"""What a part of the evaluation starts with: the usual, and the hardest."""


# --- one unit -------------------------------------------------------------------------------------


def play(case: Federation, data: Data, seed: int, policy: Policy) -> dict[str, Any]:
    """One federation, every client behind its own guard; its checks, benign and attacked."""
    rng = _rng(seed, case.id)
    training = _training(case, data.private)
    make = _maker(case, data)
    model = _started(make, case, data, rng)
    defence = ClipAndNoise(case.epsilon, norm=0.5) if case.epsilon else None
    shards = _shards(case, data.private, rng)
    chosen = {"": policy} | (POLICIES if case.every else {})
    benign: list[dict[str, Any]] = []
    attacked: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        guards = [
            {name: Guard(make, training, policy=p, store=Path(folder, f"{k}-{name}"),
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
            for k, mine in enumerate(guards):
                if case.partition == "dirichlet" and index == 1 + k % 3:
                    missed[k] = {name: count + 1 for name, count in missed[k].items()}
                    continue  # sits this round out
                truth = _draw(data.private, shards[k], case.batch * case.steps, rng)
                local = train(model, truth, training, rng, defence)
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
    classes, records = len(data.private.classes), case.batch * case.steps
    held = Target(model, data.shape, classes, training, records, CLIENTS, data.public)
    for variant in VARIANTS:
        if case.host not in variant.hosts:
            continue
        facts = {"attack": variant.name, "host": case.host, "round": index}
        try:
            sent = _attack(variant, data.public).tamper(held, rng)
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
        training = replace(_training(case, private), batch_size=len(batch), steps=1)
        round_ = simulate(Scenario(make, private, training), rng)
        attack = _attack(variant, data.public)
        sent = attack.tamper(target(round_, data.public), rng)
        round_ = tampered(round_, sent, rng)
        guess = attack.reconstruct(threat.observe(round_, ThreatModel(malicious=True)), rng)
        truth = round_.truths[0].inputs
        pairs = metrics.assign.optimal(guess.inputs, truth)
        scores = metrics.psnr(guess.inputs[pairs[pairs >= 0]], truth[pairs >= 0])
        guard = Guard(make, training, policy=policy, secret=f"{seed}/{run}".encode())
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
    training = replace(_training(Federation("mlp"), data.private), batch_size=PROBED, steps=1)
    training = case.training(training)

    def make() -> Host:
        return Host(case.kind, data.shape, classes)

    lines = []
    for run in range(3):
        rng = _rng(seed, name, run)
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(int(torch.randint(2**62, (), generator=rng)))
            model = make()
        few = _part(data.public, torch.arange(min(2000, len(data.public))))
        read = case.tamper(model, few, training, rng)
        batch = _draw(data.private, torch.arange(len(data.private)), PROBED, rng)
        update = train(model, batch, training, rng).update
        spread = NOISE * norm(update) / sum(v.numel() for v in update.values()) ** 0.5
        noised = {n: v + spread * torch.randn(v.shape, generator=rng) for n, v in update.items()}
        guard = Guard(make, training, policy=policy, secret=f"{seed}/{run}".encode())
        verdict = guard.check(model.state_dict(), batch, first=True)
        share = next((d.score for d in verdict.detections if d.test == "isolation"), 0.0)
        line: dict[str, Any] = {
            "decision": verdict.decision,
            "fired": [d.test for d in verdict.fired],
        }
        for word, sent in (("plain", update), ("noised", noised)):
            guess = unnormalised(read(sent).float(), training).clamp(0, 1)
            pairs = metrics.assign.optimal(guess, batch.inputs)
            psnr = metrics.psnr(guess[pairs[pairs >= 0]], batch.inputs[pairs >= 0])
            line |= {word: int((psnr > RECOVERED).sum()), f"{word}_seen": int((psnr > SEEN).sum())}
        lines.append(line | {"said": share * len(batch), "records": len(batch)})
    return {"kind": "studied", "attack": name, "runs": lines}


def cost(host: str, data: Data, seed: int, policy: Policy) -> dict[str, Any]:
    """CPU seconds of a check with a memory, and of one local epoch of 2000 records."""
    case, rng = Federation(host), _rng(seed, "cost", host)
    make = _maker(case, data)
    training = _training(case, data.private)
    model = _started(make, case, data, rng)
    records = min(EPOCH, len(data.private))
    truth = _draw(data.private, torch.arange(len(data.private)), records, rng)
    began = time.process_time()
    local = train(model, truth, replace(training, epochs=1), rng)
    epoch = (time.process_time() - began) * EPOCH / records
    held = _first(truth, case.batch * case.steps)
    guard = Guard(make, training, policy=policy, secret=b"cost")
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


def _training(case: Federation, private: Dataset) -> LocalTraining:
    """Normalised by the private set's own mean and spread; as many steps as the case says."""
    mean = tuple(round(v, 4) for v in private.inputs.mean((0, 2, 3)).tolist())
    std = tuple(round(v, 4) for v in private.inputs.std((0, 2, 3)).tolist())
    options = OPTIMISERS[case.optimiser]
    return LocalTraining(batch_size=case.batch, steps=case.steps, mean=mean, std=std, **options)


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
        central = replace(
            _training(case, data.public), batch_size=size, steps=100, order="shuffled"
        )
        local = train(model, public, central, rng)
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


# --- all units ------------------------------------------------------------------------------------


def units(
    data: Data, seed: int, quick: bool, policy: Policy, most: int | None = None
) -> dict[str, Unit]:
    """Every unit by its name; of the federations the first `most`."""
    todo: dict[str, Unit] = {}
    for name in STUDIED:
        todo[f"studied/{name}"] = partial(studied, name, data, seed, policy)
    for case in federations(quick)[:most]:
        todo[case.id] = partial(play, case, data, seed, policy)
    for variant in RECOVERIES:
        todo[f"recovery/{variant.name}/{variant.hosts[0]}"] = partial(
            recover, variant, data, seed, policy
        )
    for host in DENSE if quick else HOSTS:
        todo[f"cost/{host}"] = partial(cost, host, data, seed, policy)
    return todo


def run(
    out: Path,
    *,
    quick: bool = False,
    seed: int = 0,
    policy: Policy | None = None,
    most: int | None = None,
    progress: Callable[[int, int, str], None] | None = None,
) -> dict[str, Any]:
    """Run the units that OUT does not hold yet, and write result.json, table.md and figure.png."""
    policy = policy or Policy()
    data = load_data(quick)
    out.mkdir(parents=True, exist_ok=True)
    path = out / "records.jsonl"
    done = {line["id"]: line for line in _read(path)}
    todo = units(data, seed, quick, policy, most)
    run_ = hashlib.sha256(
        repr((__version__, policy, VARIANTS, STUDIED, quick)).encode()
    ).hexdigest()[:8]
    records = []
    for number, (name, unit) in enumerate(todo.items()):
        key = f"{data.private.name}/{run_}/{seed}/{name}"
        if progress:
            progress(number, len(todo), name)
        if key not in done:
            began = time.process_time()
            line: dict[str, Any] = {"id": key} | unit()
            line["cpu_seconds"] = time.process_time() - began
            with path.open("a", encoding="utf-8") as file:
                torn = file.tell() and not path.read_bytes().endswith(b"\n")  # by a crash
                file.write("\n" * bool(torn) + json.dumps(line, allow_nan=False) + "\n")
            done[key] = line
        records.append(done[key])
    facts = {"data": data.private.name, "seed": seed, "quick": quick, "version": __version__}
    result = findings.summarise(records, facts)
    findings.write(result, records, out)
    return result


def _read(path: Path) -> list[dict[str, Any]]:
    """The finished units. A last line that was cut off by a crash is run again."""
    if not path.exists():
        return []
    lines = []
    for text in path.read_text(encoding="utf-8").splitlines():
        try:
            lines.append(json.loads(text))
        except ValueError:
            continue
    return lines
