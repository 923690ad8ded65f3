"""The guard: asked before local training whether the model that came is fit to be trained on.

    verdict = guard.check(state, batch)      # ACCEPT, EXPOSED or REJECT, with every score
    if verdict.train:
        ...                                  # local training, as ever
        guard.remember(verdict, sent)        # the weights that go back to the server

It fails closed: a state that does not fit the client's own network is rejected before anything else
looks at it; a test that breaks, a memory that cannot be read and a score that is no number are
REJECT, never an exception and never ACCEPT. It changes neither what it is given nor the generators,
modes and types of the process.
"""

from __future__ import annotations

import copy
import math
import random
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

from leakgauge.detectors import fires, snapshots
from leakgauge.errors import CheckpointError, InputError
from leakgauge.guard import store as stores
from leakgauge.guard.policy import STRUCTURE, Policy
from leakgauge.types import Batch, Detection, Detector, History, LocalTraining, Named, Received

Decision: TypeAlias = Literal["ACCEPT", "EXPOSED", "REJECT"]
SEED = 0
LOOKED_AT = 512  # records at most; the tests take what they need of them


@dataclass(frozen=True)
class Verdict:
    """What the guard found, test by test.

    `train` says whether the policy lets the client train on this model. `untested` names what could
    not be tested and why. `exposure` is what an honest-but-curious reader of the update could take
    from the probed records; None when no probe was made.
    """

    decision: Decision
    train: bool
    detections: tuple[Detection, ...]
    untested: Mapping[str, str] = field(default_factory=dict)
    exposure: str | None = None
    rounds: int = 0  # accepted before, with which it was compared
    seconds: float = 0.0

    @property
    def fired(self) -> tuple[Detection, ...]:
        """The detections that decided, gravest first."""
        bad = [d for d in self.detections if fires(d) and d.means != "report"]
        return tuple(sorted(bad, key=lambda d: d.means != "reject"))

    def __str__(self) -> str:
        if self.fired:
            return f"{self.decision}: {'; '.join(d.reason.rstrip('.') for d in self.fired)}."
        missing = f"; not tested: {', '.join(self.untested)}" if self.untested else ""
        return f"{self.decision}: {len(self.detections)} tests passed{missing}."

    def as_dict(self) -> dict[str, Any]:
        """For JSON, which knows no NaN and no infinity: they become text."""
        return {
            "decision": self.decision,
            "train": self.train,
            "summary": str(self),
            "detections": [
                {k: _plain(v) for k, v in asdict(d).items()} | {"fired": fires(d)}
                for d in self.detections
            ],
            "untested": dict(self.untested),
            "exposure": self.exposure,
            "rounds": self.rounds,
            "seconds": self.seconds,
        }


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
    the client does with it (the probe trains in the same modes). `store` is a folder that keeps the
    memory across restarts; without one it lasts as long as the guard.
    """

    def __init__(
        self,
        make_model: Callable[[], nn.Module],
        training: LocalTraining,
        *,
        policy: Policy | None = None,
        store: Path | str | None = None,
    ):
        self.policy = policy or Policy()
        self.training = training
        with _undisturbed():
            fresh = copy.deepcopy(make_model())  # it may return the one that is being trained
        if not isinstance(fresh, nn.Module):
            raise InputError(
                f"make_model() gave a {type(fresh).__name__}, expected the client's own nn.Module."
            )
        self._make = make_model
        self._fresh = fresh.cpu()
        self._names = [n for n, p in fresh.named_parameters() if p.requires_grad]
        self._federation = stores.fingerprint(fresh.state_dict())
        self._store = None if store is None else Path(store)
        self._memory: History | None = None  # when there is no store
        self._last: _Checked | None = None

    def check(
        self, state: Mapping[str, Any], batch: Batch | None = None, *, missed: int = 1
    ) -> Verdict:
        """The verdict on a received `state` (a state_dict). `batch` holds records of the client as
        it trains on them, in [0, 1]; `missed` counts the rounds since the last remembered one, by
        the client's own count: 1 when none was missed."""
        began = time.perf_counter()
        self._last = None
        with _undisturbed():
            try:
                found = self._check(state, batch, missed)
            except Exception as error:
                broken = _broken("guard", f"the guard itself failed ({_words(error)})")
                found = _Checked(Verdict("REJECT", False, (broken,)))
        found = replace(found, verdict=replace(found.verdict, seconds=time.perf_counter() - began))
        if found.verdict.train:
            self._last = found
        return found.verdict

    def remember(self, verdict: Verdict, sent: Mapping[str, Tensor]) -> None:
        """Add the round of this verdict to the memory, once the client has trained.

        `sent` holds the weights that go back to the server, clipped and noised if that is done: how
        far they moved is what the next round is measured by.
        """
        last = self._last
        if last is None or last.verdict is not verdict:
            raise InputError(
                "only the latest verdict can be remembered, once, and only if verdict.train: call "
                "check() on the model, train, then remember() with the verdict that it gave."
            )
        own = self._distances(last.state, sent, "the weights that you send back")
        before = last.history
        if before is None:
            new = History(last.state, 1, own, snapshots=last.snapshots)
        else:
            step = self._distances(before.state, last.state, "the accepted model")
            # Of several missed rounds each moved a part of the way.
            step = {name: size / before.missed for name, size in step.items()}
            new = History(
                last.state,
                before.rounds + 1,
                own,
                (*before.steps, step),
                snapshots=before.snapshots + last.snapshots,
            )
        if self._store is None:
            self._memory = new
        else:
            stores.add(self._store, self._federation, new, before.rounds if before else 0)
        self._last = None

    def _check(self, state: Any, batch: Any, missed: int) -> _Checked:
        tests = self.policy.tests(self.training)
        fresh = copy.deepcopy(self._fresh)
        received = Received(state, fresh, None, self.training)
        found = self._run("structure", STRUCTURE, received)
        kept: Named = {}
        if not any(map(fires, found)):
            try:
                kept = {n: state[n].detach().cpu().clone() for n in fresh.state_dict()}
                model = copy.deepcopy(fresh)
                model.load_state_dict(kept, strict=True)
            except Exception as error:
                found += (_broken("structure", f"the model could not be loaded ({_words(error)})"),)
        if any(map(fires, found)):
            untested = dict.fromkeys(tests, "the model is broken")
            return _Checked(Verdict("REJECT", False, found, untested))

        history: History | None = None
        try:
            history = self._history(missed)
        except Exception as error:
            words = str(error) if isinstance(error, CheckpointError) else _words(error)
            found += (_broken("memory", words),)
        try:
            batch = _shuffled(batch)
        except Exception as error:
            found += (_broken("batch", f"your own batch cannot be used ({_words(error)})"),)
            batch = None
        received = Received(kept, fresh, model, self.training, batch, history, self._make)
        untested = {}
        taken: tuple[Any, ...] = ()
        for name, test in tests.items():
            if isinstance(test, str):
                untested[name] = test
                continue
            results = self._run(name, test, received)
            if not results:
                untested[name] = _why(name, received)
            found += results
        if self.policy.warm_up != "off" and batch is not None:
            try:
                taken = (snapshots(model, batch, self.training),)
            except Exception as error:
                found += (_broken("warm_up", f"the test could not be made ({_words(error)})"),)
        bad = {d.means for d in found if fires(d)}
        decision: Decision = (
            "REJECT" if "reject" in bad else "EXPOSED" if "exposed" in bad else "ACCEPT"
        )
        train = decision == "ACCEPT" or (decision == "EXPOSED" and not self.policy.refuse_exposed)
        looked = 0 if batch is None or self.policy.probe == "off" else self.policy.probe.records
        exposure = None if batch is None else _exposure(found, min(len(batch), looked))
        rounds = history.rounds if history else 0
        verdict = Verdict(decision, train, found, untested, exposure, rounds)
        return _Checked(verdict, kept, history, taken)

    def _run(self, name: str, test: Detector, received: Received) -> tuple[Detection, ...]:
        """The detections of one test with the policy's thresholds. A test that breaks has fired."""
        try:
            found = test.inspect(received, torch.Generator().manual_seed(SEED))
            return tuple(
                replace(d, threshold=self.policy.thresholds.get(d.test, d.threshold)) for d in found
            )
        except Exception as error:
            return (_broken(name, f"the test could not be made ({_words(error)})"),)

    def _history(self, missed: int) -> History | None:
        found = self._memory
        if self._store is not None:
            found = stores.read(self._store, self._federation)
        # Bounded, because what is tolerated grows with it.
        missed = min(max(int(missed), 1), self.policy.most_missed)
        return None if found is None else replace(found, missed=missed)

    def _distances(
        self, before: Mapping[str, Tensor], after: Mapping[str, Tensor], what: str
    ) -> dict[str, float]:
        """How far each trainable parameter moved."""
        sizes = {}
        for name in self._names:
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


def _shuffled(batch: Any) -> Batch | None:
    """A fixed draw of the client's records: those at hand first may all be of one class."""
    if batch is None:
        return None
    inputs, labels = batch.inputs.detach().cpu(), batch.labels.detach().cpu()
    if not len(inputs) or len(inputs) != len(labels):
        raise InputError(f"{len(inputs)} inputs and {len(labels)} labels")
    rng = torch.Generator().manual_seed(SEED)
    chosen = torch.randperm(len(inputs), generator=rng)[:LOOKED_AT]
    inputs, labels = inputs[chosen], labels[chosen]
    if not torch.isfinite(inputs).all():
        raise InputError("it holds NaN or infinite values")
    return Batch(inputs, labels)


def _broken(test: str, reason: str) -> Detection:
    return Detection(test, math.inf, 0.0, "reject", reason)


def _words(error: Exception) -> str:
    text = str(error).splitlines()
    return f"{type(error).__name__}: {text[0][:300]}" if text else type(error).__name__


def _why(name: str, received: Received) -> str:
    """Why a test that is on said nothing."""
    if received.history is None and name in ("continuity", "head_invariant"):
        return "no round has been accepted yet"
    if received.batch is None and name in ("probe", "exact_d_snr", "warm_up"):
        return "no records were given"
    return "it does not apply to this network or moment"


def _exposure(found: tuple[Detection, ...], records: int) -> str | None:
    """The probe's isolation in words: what a reader of one step's update gets exactly."""
    for one in found:
        if one.test == "isolation" and math.isfinite(one.score):
            if "tokens" in one.reason:
                return f"about {one.score:.0%} of the tokens of your records could be read exactly"
            count = round(one.score * records)
            some = f"about {count}" if count else "none"
            return f"{some} of your {records} images could be read exactly"
    return None


def _plain(value: Any) -> Any:
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


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
