"""The guard: asked before local training whether the model that came is fit to be trained on.

    verdict = guard.check(state, batch)      # ACCEPT, EXPOSED, REJECT or INCONCLUSIVE
    if verdict.train:
        ...                                  # local training, as ever
        guard.remember(verdict, sent)        # the weights that go back to the server

It fails closed: a state that does not fit the client's own network is rejected before anything else
looks at it; a test that breaks and a score that is no number are REJECT, never ACCEPT; where what
the policy requires is missing, the verdict is INCONCLUSIVE. A mistake of the client's own (records
that its own network cannot take, a memory that cannot be read) says nothing about the model: it is
an error, raised before the model is looked at. The guard changes neither what it is given nor the
generators, modes and types of the process.

It is a tripwire for known attacks and broken models. What it samples is drawn from a secret of the
client, but a server that has studied it can still stay below its thresholds.
"""

from __future__ import annotations

import copy
import hashlib
import logging
import math
import random
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from leakgauge.detectors import fires, snapshots
from leakgauge.detectors._isolation import CROWD
from leakgauge.detectors._layers import digest, drawn
from leakgauge.errors import InputError, LeakGaugeError
from leakgauge.fl.local import outputs, ready
from leakgauge.guard import policy as policies
from leakgauge.guard import store as stores
from leakgauge.guard.policy import MEMORY, STRUCTURE, Policy
from leakgauge.guard.verdict import Decision, Verdict
from leakgauge.records import AS_THEY_ARE, Classes, Scale, record_of
from leakgauge.types import (
    Batch,
    Detection,
    Detector,
    History,
    LocalTraining,
    Named,
    Received,
    Setting,
)

SEED = 0  # of the client's own network
LOOKED_AT = 512  # records at most; the tests take what they need of them
ANCHORED = 20  # rounds after which the older model that drift is measured from is a new one
logger = logging.getLogger("leakgauge.guard")


@dataclass(frozen=True)
class _Checked:
    """A verdict with what is remembered once the client has trained."""

    verdict: Verdict
    state: Named = field(default_factory=dict)
    history: History | None = None
    snapshots: tuple[tuple[Mapping[str, tuple[float, float, float]], ...], ...] = ()


class Guard:
    """Tests the models that one client receives from one federation.

    `make_model()` builds the client's own network: its code, never the server's. `training` is what
    the client does with it (the probe takes as many records, in the same modes), `scale` how it
    normalises records before they enter the network. `store` is a
    folder that keeps the memory across restarts; without one it lasts as long as the guard.
    `secret` is what samples are drawn from: random, or that of the store; give it only to repeat an
    experiment.
    """

    def __init__(
        self,
        make_model: Callable[[], nn.Module],
        training: LocalTraining,
        *,
        scale: Scale = AS_THEY_ARE,
        policy: Policy | None = None,
        store: Path | str | None = None,
        secret: bytes | None = None,
    ):
        self.policy = policy or Policy()
        self.training, self.scale = training, scale
        with _undisturbed():
            try:
                fresh = copy.deepcopy(make_model())  # it may return the one that is being trained
            except LeakGaugeError:
                raise
            except Exception as error:
                raise InputError(
                    f"make_model() failed ({_words(error)}): it is called without arguments and "
                    "returns your own network."
                ) from error
        if not isinstance(fresh, nn.Module):
            raise InputError(
                f"make_model() gave a {type(fresh).__name__}, expected the client's own nn.Module."
            )
        self._make = make_model
        self._fresh = fresh.cpu()
        self._names = [n for n, p in fresh.named_parameters() if p.requires_grad]
        self._buffers = [n for n, b in fresh.named_buffers() if b.is_floating_point()]
        self._federation = stores.fingerprint(fresh.state_dict())
        self._store = None if store is None else Path(store)
        self._secret = secret or secrets.token_bytes(32)
        self._memory: History | None = None  # when there is no store
        self._last: _Checked | None = None

    @property
    def largest(self) -> int:
        """Bytes that a file of weights for this network may declare: twice those of its own in
        double precision, for names, headers and padding."""
        entries = self._fresh.state_dict().values()
        return 2 * sum(8 * int(value.numel()) for value in entries) + 2**20

    def check(
        self,
        state: Mapping[str, Any],
        batch: Batch | None = None,
        *,
        missed: int = 1,
        first: bool = False,
        restart: str | None = None,
    ) -> Verdict:
        """The verdict on a received `state` (a state_dict).

        `batch` holds records of the client as it trains on them, in [0, 1], best all that the next
        round trains on; `missed` counts the rounds since the last remembered one, by the client's
        own count: 1 when none was missed. `first` is the operator's word that this client has
        accepted no round before. `restart` is the operator's reason why this model may differ from
        the remembered ones (a restored checkpoint, pruning, a lost memory): tests against memory
        are then excused, and the reason is logged.
        """
        began = time.perf_counter()
        self._last = None
        if restart is not None and not restart.strip():
            raise InputError("restart: give the reason in words; it is logged.")
        with _undisturbed():
            history = self._history(missed)
            if first and history is not None:
                raise InputError(
                    f"this is said to be the first round, but the memory holds {history.rounds}: "
                    "leave first away, or give the reason of a restart."
                )
            batch = self._usable(batch)
            try:
                found = self._check(state, batch, history, first, restart)
            except Exception as error:
                broken = _broken("guard", f"the guard itself failed ({_words(error)})")
                found = _Checked(Verdict("REJECT", False, (broken,)))
        verdict = replace(
            found.verdict,
            rounds=history.rounds if history else 0,
            round=(history.rounds if history else 0) + (history.missed if history else 1),
            policy=policies.digest(self.policy, self.training, self.scale),
            override=restart,
            seconds=time.perf_counter() - began,
        )
        if restart is not None:
            self._log(verdict)
        if verdict.train:
            self._last = replace(found, verdict=verdict)
        return verdict

    def remember(self, verdict: Verdict, sent: Mapping[str, Tensor]) -> None:
        """Add the round of this verdict to the memory, once the client has trained.

        `sent` holds the weights that go back to the server, clipped and noised if that is done,
        best the whole state_dict: how far they moved is what the next round is measured by.
        """
        last = self._last
        if last is None or last.verdict is not verdict:
            raise InputError(
                "only the latest verdict can be remembered, once, and only if verdict.train: call "
                "check() on the model, train, then remember() with the verdict that it gave."
            )
        own = self._distances(last.state, sent)
        before = last.history
        if before is None or verdict.override is not None:
            taken = before or History({}, 0, {})
            new = History(last.state, taken.rounds + 1, own, last.state, own, 0)
            new = replace(new, digests=taken.digests, snapshots=last.snapshots)
        else:
            snaps = before.snapshots + last.snapshots
            new = replace(before, rounds=before.rounds + 1, own=own, snapshots=snaps, missed=1)
            again = bool(before.digests) and verdict.model == before.digests[-1]
            if not again:  # the same model twice is one step of the server's
                extra = {n: u * (before.missed - 1) for n, u in before.own.items()}
                since = {n: before.since.get(n, 0.0) + extra.get(n, 0.0) + own[n] for n in own}
                age = before.age + before.missed
                new = replace(new, state=last.state, since=since, age=age)
                if age >= ANCHORED:
                    new = replace(new, anchor=last.state, since=own, age=0)
        if verdict.model is not None and verdict.model not in new.digests[-1:]:
            new = replace(new, digests=(*new.digests, verdict.model))
        new = replace(new, secret=self._secret)
        if self._store is None:
            self._memory = new
        else:
            stores.add(self._store, self._federation, new, before.rounds if before else 0)
        self._last = None

    def _check(
        self,
        state: Any,
        batch: Batch | None,
        history: History | None,
        first: bool,
        restart: str | None,
    ) -> _Checked:
        tests = self.policy.tests(self.training)
        fresh = copy.deepcopy(self._fresh)
        received = Received(state, fresh, None, self.training, history=history)
        found = self._run("structure", STRUCTURE, received, "")
        kept: Named = {}
        if not any(map(fires, found)):
            try:
                own = fresh.state_dict()
                kept = {n: state[n].detach().cpu().to(own[n].dtype, copy=True) for n in own}
                model = copy.deepcopy(fresh)
                model.load_state_dict(kept, strict=True)
            except Exception as error:
                found += (_broken("structure", f"the model could not be loaded ({_words(error)})"),)
        if any(map(fires, found)):
            untested = dict.fromkeys(tests, "the model is broken")
            return _Checked(Verdict("REJECT", False, found, untested))

        mark = digest(kept)
        received = Received(state, fresh, model, self.training, batch, history, self._make)
        untested = {}
        taken: tuple[Any, ...] = ()
        for name, test in tests.items():
            if isinstance(test, str):
                untested[name] = test
                continue
            results = self._run(name, test, received, mark)
            if not results:
                untested[name] = _why(name, received)
            found += results
        if self.policy.warm_up != "off" and batch is not None:
            try:
                taken = (snapshots(model, batch, self.training),)
            except Exception as error:
                found += (_broken("warm_up", f"the test could not be made ({_words(error)})"),)
        untested |= self._gaps(found, batch, history)
        excused: tuple[str, ...] = ()
        if restart is not None:
            excused = tuple(d.test for d in found if fires(d) and d.test in MEMORY)
            found = tuple(replace(d, means="report") if d.test in MEMORY else d for d in found)
        bad = {d.means for d in found if fires(d)}
        missing = self._missing(batch, history, first or restart is not None, untested)
        refused = "exposed" in bad and self.policy.refuse_exposed
        decision: Decision = "EXPOSED" if "exposed" in bad else "ACCEPT"
        if "reject" in bad:
            decision = "REJECT"
        elif missing and not refused:
            decision = "INCONCLUSIVE"
        train = decision == "ACCEPT" or (decision == "EXPOSED" and not refused)
        looked = 0
        if batch is not None and self.policy.probe != "off":
            looked = self.policy.probe.wanted(batch, self.training)[1]
        told = None
        if batch is not None:
            told = _joined(_exposure(found, looked), self._counted(model, batch, looked))
        verdict = Verdict(
            decision,
            train,
            found,
            untested,
            missing,
            told,
            model=mark,
            excused=excused,
        )
        return _Checked(verdict, kept, history, taken)

    def _counted(self, model: nn.Module, batch: Batch, records: int) -> str | None:
        """Whether the exact separation can read the records of a round, by counting alone."""
        if batch.inputs.dim() != 4 or records < self.training.batch_size:
            return None
        from leakgauge.attacks.exposure import exposure  # here: a client starts without attacks

        try:
            setting = Setting(model, record_of(batch.inputs), Classes(int(batch.labels.max()) + 1))
            counted = exposure(setting, self.training, records)
        except Exception as error:  # whatever tracing meets in the user's code
            logger.debug("the exposure could not be counted: %s", _words(error))
            return None
        if not counted.exposed:
            return None
        return (
            f"by counting, {counted.layer} shows up to {counted.limit} records of an update to "
            f"exact separation, and yours has {counted.views}"
        )

    def _gaps(
        self, found: tuple[Detection, ...], batch: Batch | None, history: History | None
    ) -> dict[str, str]:
        """What tests that were made could not look at."""
        gaps = {one.test: one.reason for one in found if one.test == "coverage" and fires(one)}
        if batch is not None and self.policy.probe != "off":
            wanted, looked = self.policy.probe.wanted(batch, self.training)
            if looked < wanted:
                gaps["records"] = f"the probe saw {looked} of the {wanted} records of a round"
        if history is not None and not set(self._buffers) <= set(history.own):
            gaps["running statistics"] = "the weights that you last sent back held none of them"
        return gaps

    def _missing(
        self,
        batch: Batch | None,
        history: History | None,
        vouched: bool,
        untested: Mapping[str, str],
    ) -> dict[str, str]:
        """What the policy requires of an ACCEPT and is not there."""
        missing = {}
        if "batch" in self.policy.require and batch is None:
            missing["batch"] = (
                "no records of yours were given, so that nothing was probed: give some, or leave "
                '"batch" out of the policy\'s require'
            )
        if "memory" in self.policy.require and history is None and not vouched:
            missing["memory"] = (
                "there is no memory of an accepted round to compare with: say that this is the "
                "first one (first=True, --first), put the store back, or leave "
                '"memory" out of the policy\'s require'
            )
        if "coverage" in self.policy.require and "coverage" in untested:
            missing["coverage"] = untested["coverage"]
        return missing

    def _log(self, verdict: Verdict) -> None:
        entry = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "restart": verdict.override,
            "decision": verdict.decision,
            "excused": list(verdict.excused),
            "round": verdict.round,
            "model": verdict.model,
            "policy": verdict.policy,
        }
        logger.warning("restart of a guarded client: %s", entry)
        if self._store is not None:
            stores.log(self._store, entry)

    def _run(
        self, name: str, test: Detector, received: Received, mark: str
    ) -> tuple[Detection, ...]:
        """The detections of one test with the policy's thresholds. A test that breaks has fired.

        What it samples is drawn anew for every model, and known to nobody without the secret.
        """
        seed = hashlib.sha256(self._secret + f"{mark}/{name}".encode()).digest()
        rng = torch.Generator().manual_seed(int.from_bytes(seed[:7], "big"))
        try:
            found = test.inspect(received, rng)
            return tuple(
                replace(d, threshold=self.policy.thresholds.get(d.test, d.threshold)) for d in found
            )
        except (Exception, SystemExit) as error:
            return (_broken(name, f"the test could not be made ({_words(error)})"),)

    def _history(self, missed: int) -> History | None:
        found = self._memory
        if self._store is not None:
            found = stores.read(self._store, self._federation)
        if found is None:
            return None
        self._secret = found.secret or self._secret
        # Bounded, because what is tolerated grows with it.
        missed = min(max(int(missed), 1), self.policy.most_missed)
        return replace(found, missed=missed)

    def _usable(self, batch: Any) -> Batch | None:
        """The client's records, in an order drawn from its secret, one of each class first. What
        its own network cannot take is its own mistake."""
        if batch is None:
            return None
        advice = "give a Batch of records as you train on them: inputs in [0, 1], labels (N,)."
        if not (isinstance(getattr(batch, "inputs", None), Tensor)
                and isinstance(getattr(batch, "labels", None), Tensor)):  # fmt: skip
            raise InputError(f"your records are a {type(batch).__name__}: {advice}")
        inputs, labels = batch.inputs.detach().cpu(), batch.labels.detach().cpu()
        if not len(inputs) or len(inputs) != len(labels):
            raise InputError(f"your records: {len(inputs)} inputs, {len(labels)} labels; {advice}")
        if not torch.isfinite(inputs).all():
            raise InputError(f"your records hold NaN or infinite values; {advice}")
        if labels.dim() != 1 or labels.is_floating_point():
            raise InputError(f"your labels are not classes, one per record; {advice}")
        seed = int.from_bytes(hashlib.sha256(self._secret + b"records").digest()[:7], "big")
        rng = torch.Generator().manual_seed(seed)
        chosen = drawn(labels, LOOKED_AT, rng)
        inputs, labels = inputs[chosen], labels[chosen].long()
        try:
            inputs = record_of(inputs, self.scale).entering(inputs)
            model = ready(self._fresh, self.training)
            dtype = next((p.dtype for p in model.parameters()), torch.float32)
            few = inputs[:4].to(dtype) if inputs.is_floating_point() else inputs[:4]
            classes = outputs(model, {}, few, self.training).shape[-1]
        except Exception as error:
            raise InputError(
                f"your own network cannot run on your records ({_words(error)}); {advice}"
            ) from error
        if int(labels.max()) >= classes or int(labels.min()) < 0:
            raise InputError(
                f"your labels reach from {int(labels.min())} to {int(labels.max())}, but your "
                f"network has {classes} classes; {advice}"
            )
        return Batch(inputs, labels)

    def _distances(
        self, before: Mapping[str, Tensor], after: Mapping[str, Tensor]
    ) -> dict[str, float]:
        """How far each trainable parameter moved, and each running statistic that was sent."""
        sizes = {}
        what = "the weights that you send back"
        for name in (*self._names, *(n for n in self._buffers if n in after)):
            moved = after.get(name)
            if not isinstance(moved, Tensor) or moved.shape != before[name].shape:
                raise InputError(
                    f"{what}: expected a tensor {name!r} of shape {tuple(before[name].shape)}: "
                    "give the whole state_dict of the trained model."
                )
            sizes[name] = float((moved.detach().cpu().double() - before[name].double()).norm())
            if not math.isfinite(sizes[name]):
                raise InputError(f"{what}: {name!r} is not finite. Did local training diverge?")
        return sizes


def _broken(test: str, reason: str) -> Detection:
    return Detection(test, math.inf, 0.0, "reject", reason)


def _words(error: BaseException) -> str:
    text = str(error).splitlines()
    return f"{type(error).__name__}: {text[0][:300]}" if text else type(error).__name__


def _why(name: str, received: Received) -> str:
    """Why a test that is on said nothing."""
    if received.history is None and name in ("continuity", "replay", "head_invariant"):
        return "no round has been accepted yet"
    if received.batch is None and name in ("probe", "exact_d_snr", "warm_up"):
        return "no records were given"
    return "it does not apply to this network or moment"


def _joined(*parts: str | None) -> str | None:
    return "; ".join(part for part in parts if part) or None


def _exposure(found: tuple[Detection, ...], records: int) -> str | None:
    """The probe's isolation in words: what a reader of one step's update gets exactly."""
    for one in found:
        if one.test == "isolation" and math.isfinite(one.score):
            count = round(one.score * min(records, CROWD))
            if not count:
                return (
                    "the probe found no single record in the update; that is no proof that none "
                    "can be read from it"
                )
            if one.unit == "tokens":
                return (
                    f"about {one.score:.0%} of the positions (tokens, patches) of your records "
                    "could be read exactly"
                )
            return f"about {count} of your {records} images could be read exactly"
    return None


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Inside, a fixed seed and gradients; outside, nothing of the process has changed."""
    dtype, chance = torch.get_default_dtype(), random.getstate()
    numbers = np.random.get_state()  # noqa: NPY002  what make_model() draws from
    try:
        with (
            torch.random.fork_rng(devices=[]),
            torch.inference_mode(False),
            torch.enable_grad(),
        ):
            # torch.manual_seed would reseed the GPUs too.
            torch.default_generator.manual_seed(SEED)
            np.random.seed(SEED)  # noqa: NPY002
            random.seed(SEED)
            yield
    finally:
        torch.set_default_dtype(dtype)
        np.random.set_state(numbers)  # noqa: NPY002
        random.setstate(chance)
