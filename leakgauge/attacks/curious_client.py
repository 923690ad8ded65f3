"""Curious client — "Federated Learning Nodes Can Reconstruct Peers' Image Data", anonymous authors,
under double-blind review (2025).

A client that takes part in two consecutive rounds holds the weights W(t) and W(t+1), and with them
the mean of all updates. It plays the round as the training of one *super-client*: τ local steps on
all N images at once, and looks for images that lead to the same update:

    min_X ‖ Δ(X, Y) − (W(t) − W(t+1))/η_g ‖²,   Δ = Σ_{u<τ} Σ_l ∇ℓ(W(t,u); X_l, Y_l)       (Eq. 3)

by Adam with learning rate 0.1, images kept at 1/4 of the resolution and up-sampled bicubically. One
step is exact; beyond, true update and super-client differ by about η²·τ(τ−1)·(K−1)/N (Lemma 1; see
`diagnostics.divergence`).

What a client knows of itself is put to use:
- `own = "subtract"`: u = Σ w_k·u_k, so the others' mean is (u − w·u_own)/(1 − w), exactly, for any
  number of steps. It needs the client's weight w, which the number of records tells.
- `own = "candidates"`: without that weight, its records are in the super-client's batch as known
  candidates, and the others' are searched.
- `own = "ignore"`: all N images are searched, as in the paper.
- `lrs`, `counts`, `clients`: what it does not know it tries. Each candidate is searched for a while
  with its own images as if they were unknown; the one under which they come out best is taken.

What remains is first given to the exact recursion, and searched where that does not apply or finds
less than every image. Several rounds of the same records (`threat.rounds`) are matched together:
their distances add up. `explicit = true` plays every client by itself with its own labels: an upper
bound, as it needs to know which label belongs to which client.

A server behind secure aggregation runs the same attack, without records of its own.

Needs: the local training and the number of records, unless `counts` or `clients` are tried. Labels
are inferred from what is searched.
Differs from the paper: its own update is subtracted (`own = "ignore"` is the paper's); the distance
is divided by ‖u‖², which moves no minimum; labels by the rule `counts`; 300 iterations by default;
the best iterate by the objective is returned; small pictures keep at least 7 pixels per side.
Post-processing is the restorers' part.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, ClassVar, Literal, TypeAlias

import torch
from torch import Tensor

from leakgauge.attacks._engine import Engine, Replay
from leakgauge.attacks._labels import infer
from leakgauge.attacks._layers import told
from leakgauge.attacks._matching import Adam, LabelledSearch, match, shared
from leakgauge.attacks._objectives import Distance, cosine, relative_squared
from leakgauge.attacks._own import beside, left, others, resized, same_records, shows
from leakgauge.attacks._replays import Clients, Rounds
from leakgauge.attacks._spaces import SPACES, Beside, LowResolution, Space, SpaceName
from leakgauge.attacks.exact_recursion import ExactRecursion
from leakgauge.attacks.fedavg import dealt
from leakgauge.errors import InputError, NotApplicable, Withheld
from leakgauge.papers import Paper
from leakgauge.ranges import POSITIVE, count, option
from leakgauge.records import pictures
from leakgauge.tensors import spawned
from leakgauge.types import Knowledge, Observation, Reconstruction, Resources

NAME = "curious-client"
FACTOR = 4  # the paper's, of pictures of 128 × 128
LEAST = 7  # pixels per side that it leaves of smaller ones

PAPER = Paper(
    "curiousclient2025",
    "Authors, Anonymous",
    "Federated Learning Nodes Can Reconstruct Peers' Image Data",
    2025,
    "Under double-blind review",
    "https://anonymous.4open.science/r/curiousclient-5B6F",
)

DISTANCES: dict[str, Distance] = {"squared": relative_squared, "cosine": cosine}
Own: TypeAlias = Literal["subtract", "candidates", "ignore"]


@dataclass(frozen=True)
class CuriousClient(LabelledSearch):
    """Others' images from two global models (anonymous, 2025)."""

    papers: ClassVar[tuple[Paper, ...]] = (PAPER,)
    iterations: int = 300
    space: SpaceName | None = "low-resolution"
    factor: int | None = option(None, count(64))  # None: 4, or what leaves LEAST pixels per side
    lr: float = 0.1
    distance: Literal["squared", "cosine"] = "squared"
    own: Literal["auto"] | Own = "auto"
    rounds: Literal["auto", "last", "all"] = "auto"
    exact: bool = True
    explicit: bool = False
    lrs: tuple[float, ...] = option((), POSITIVE)
    counts: tuple[int, ...] = option((), count(100_000_000))
    clients: tuple[int, ...] = option((), count(1_000_000, 2))
    tries: int = option(100, count(10_000_000))

    def __post_init__(self) -> None:
        if self.counts and self.clients:
            raise InputError(
                "curious-client: counts and clients both say how many records are behind the "
                "update (clients: each as many as the attacker's own): give one of them"
            )

    @property
    def needs(self) -> frozenset[Knowledge]:
        needed = super().needs
        if self.counts or self.clients:
            needed -= {"records"}
        if self.counts or self.clients or self.lrs:
            needed |= {"own"}
        return needed | {"clients"} if self.explicit else needed

    def reconstruct(
        self, seen: Observation, rng: torch.Generator, resources: Resources | None = None
    ) -> Reconstruction:
        assumptions = self._assumptions(seen)
        tried = self.tries * len(assumptions) if len(assumptions) > 1 else 0
        stage = shared(resources, tried + self.iterations * self.restarts)
        seen, facts, notes = self._chosen(assumptions, rng, stage)
        told(seen, NAME)
        own = self._own(seen)
        facts["own"] = own
        seen, words = self._over(seen)
        view = others(seen) if own == "subtract" else seen
        notes += words
        if self.exact and own != "candidates" and seen.begin is None:
            found, words = solved(view, rng, stage(tried))
            if found is not None:
                return replace(found, notes=(*notes, *found.notes), facts=found.facts | facts)
            notes += words
        guess = self._searched(view, rng, stage(tried), known=own == "candidates")
        return replace(
            guess,
            iterations=guess.iterations + tried,
            notes=(*notes, *guess.notes),
            facts=guess.facts | facts | {"rounds": 1 + len(view.earlier)},
        )

    def _own(self, seen: Observation) -> Own:
        """What is done with the attacker's own part; nothing where it has none, as a server."""
        if seen.own is None or seen.own_update is None:
            return "ignore"
        if self.own == "auto":
            return "candidates" if seen.share is None else "subtract"
        return self.own

    def _assumptions(self, seen: Observation) -> list[Observation]:
        """What is observed, under everything that is tried for what is not known. Who has no images
        of its own to compare by takes what it is told, and a batch for all records."""
        if seen.training is None:
            raise Withheld(f"{NAME} needs 'training' in the observation")
        if not (self.lrs or self.counts or self.clients):
            return [seen]
        if seen.own is None:
            return [replace(seen, records=seen.records or seen.training.batch_size)]
        held = len(seen.own)
        counts = self.counts or tuple(k * held for k in self.clients)
        if small := [n for n in counts if n <= held]:
            raise InputError(
                f"{NAME}: counts are of all records behind the update, the attacker's own {held} "
                f"and others: expected more than {held}, got {small}"
            )
        return [
            assumed(seen, lr, records)
            for lr, records in product(self.lrs or (None,), counts or (None,))
        ]

    def _chosen(
        self,
        assumptions: list[Observation],
        rng: torch.Generator,
        stage: Callable[[int], Resources],
    ) -> tuple[Observation, dict[str, Any], list[str]]:
        """The assumption under which the attacker's own images come out best when they are searched
        as if they were unknown; every one is tried from the same start."""
        if len(assumptions) == 1:
            return assumptions[0], {}, []
        short = replace(self, iterations=self.tries, restarts=1)
        tried: list[dict[str, Any]] = []
        for number, one in enumerate(assumptions):
            assert one.own is not None
            images = one.own.inputs
            one = replace(one, earlier=(), begin=None)
            try:
                guess = short._searched(one, spawned(rng, "try"), stage(number * self.tries))
                error: float | None = shows(guess.inputs, images)
            except (NotApplicable, InputError):  # not with this learning rate, or so many records
                error = None
            assert one.training is not None
            tried.append({"lr": one.training.lr, "records": one.records, "own_mse": error})
        open_ = [i for i, one in enumerate(tried) if one["own_mse"] is not None]
        if not open_:
            raise NotApplicable(
                f"{NAME}: no search ended under any of {len(tried)} assumptions: try others"
            )
        best = min(open_, key=lambda i: tried[i]["own_mse"])
        note = (
            f"of {len(tried)} assumptions its own images came out best with learning rate "
            f"{tried[best]['lr']:g} and {tried[best]['records']} records"
        )
        return assumptions[best], {"tried": tried, "chosen": tried[best]}, [note]

    def _over(self, seen: Observation) -> tuple[Observation, list[str]]:
        """With those earlier rounds that are matched, too, and why not where they are not."""
        training, records = told(seen, NAME)
        if not seen.earlier or self.rounds == "last":
            return replace(seen, earlier=()), []
        if seen.answer is not None:
            reason = "the defence was answered for the last round alone"
        elif training.batch_size < records:
            reason = "records stand in other batches there"
        elif self.rounds == "all" or all(same_records(seen.own, e.own) for e in seen.earlier):
            return seen, []
        elif seen.own is None:
            reason = (
                "whether they held the same records is not known without records of its own (set "
                'rounds = "all" if they did)'
            )
        else:
            reason = "the attacker's own records were others there, so those of the others may be"
        return replace(seen, earlier=()), [f"earlier rounds are left aside: {reason}"]

    def _searched(
        self,
        seen: Observation,
        rng: torch.Generator,
        resources: Resources,
        *,
        known: bool = False,
    ) -> Reconstruction:
        """By matching the update of all records, of which the attacker's own may be `known`: what
        is returned is then of the others alone."""
        _, records = told(seen, NAME)
        labels = self._labels(seen, rng, known)
        space: Space = SPACES[self.space or "low-resolution"]()
        if isinstance(space, LowResolution):
            side = min(pictures(seen.record).shape[1:])
            space = LowResolution(self.factor or max(1, min(FACTOR, side // LEAST)))
        places = torch.arange(records)
        if known:
            assert seen.own is not None
            order = beside(seen, self.explicit)
            labels = torch.cat([labels, seen.own.labels])[order]
            space = Beside(space, seen.own.inputs, order)
            places = (order < records - len(seen.own)).nonzero().flatten()
        guess = match(
            seen,
            DISTANCES[self.distance],
            self,
            labels=labels,
            optimiser=Adam(self.lr),
            space=space,
            rng=rng,
            resources=resources,
            replay=self._replay(seen, resources),
        )
        return replace(guess, inputs=guess.inputs[places], labels=labels[places])

    def _labels(self, seen: Observation, rng: torch.Generator, known: bool) -> Tensor:
        """The labels of what is searched; of the others alone where the own records are known."""
        training, _ = told(seen, NAME)
        if self.explicit:
            if seen.clients is None:
                raise Withheld(f"{NAME}: explicit = true needs 'clients' in the observation")
            every = torch.cat([labels for _, labels in seen.clients])
        else:
            every = infer(seen, self.labels, rng)
        if known:
            assert seen.own is not None
            every = left(every, seen.own.labels)
        inferred = not self.explicit and self.labels != "known"
        return dealt(every, training.batch_size) if inferred else every

    def _replay(self, seen: Observation, resources: Resources) -> Replay | None:
        """What plays the round on candidates, where one super-client in one round is not all."""
        training, records = told(seen, NAME)
        if not self.explicit and not seen.earlier:
            return None
        how: dict[str, Any] = {
            "device": resources.device,
            "dtype": resources.dtype or torch.float32,
            "mode": self.derivative,
        }

        def played(one: Observation) -> Replay:
            if not self.explicit:
                return Engine(one, training, records, **how)
            assert seen.clients is not None
            return Clients(one, training, [(w, len(y)) for w, y in seen.clients], **how)

        parts = [played(one) for one in (seen, *seen.earlier)]
        return Rounds(parts) if seen.earlier else parts[0]


def assumed(seen: Observation, lr: float | None, records: int | None) -> Observation:
    """What is observed, if the learning rate and the number of records are these; None leaves them
    as they are known."""
    training, own = seen.training, seen.own
    assert training is not None
    assert own is not None
    if lr is not None:
        training = replace(training, lr=lr)
    share = seen.share
    if records is not None:
        # The batches that are known are those of so many records: all, or the client's own.
        training = resized(training, seen.records or len(own), records)
        share = len(own) / records
    return replace(
        seen,
        training=training,
        records=records or seen.records,
        share=share,
        earlier=tuple(assumed(one, lr, records) for one in seen.earlier),
    )


def solved(
    seen: Observation, rng: torch.Generator, resources: Resources
) -> tuple[Reconstruction | None, list[str]]:
    """What the exact recursion finds, if that is every image, and else why it is not taken. It may
    use half of the time."""
    seconds = None if resources.seconds is None else resources.seconds / 2
    given = replace(resources, progress=None, seconds=seconds)
    try:
        found = ExactRecursion().reconstruct(
            replace(seen, earlier=(), begin=None), spawned(rng, "exact"), given
        )
    except NotApplicable as reason:
        return None, [f"the exact recursion does not apply: {reason}"]
    met = found.facts["images_met"]
    if met < len(found.inputs):
        return None, [
            f"the exact recursion found {met} of {len(found.inputs)} images: all searched"
        ]
    return replace(found, notes=("by the exact recursion", *found.notes)), []
