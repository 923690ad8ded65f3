"""Several defences, one after the other: each changes what the one before it left.

    u ← D_n(… D_2(D_1(u)))    at every hook: the records, each step's gradient, the update

Each has a memory, letters and randomness of its own: what one draws is the same whatever the others
do.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import nn

from leakgauge.defences.adaptive_clip import AdaptiveClip
from leakgauge.defences.dp_sgd import DpSgd
from leakgauge.papers import Paper
from leakgauge.tensors import seeded
from leakgauge.types import (
    Answer,
    Answered,
    Batch,
    BatchDefence,
    Defence,
    GradientDefence,
    Here,
    Memory,
    Named,
    Observation,
    Selective,
    UpdateDefence,
)


@dataclass(frozen=True)
class Chain:
    """Several defences, one after the other."""

    defences: tuple[Defence, ...]

    def __post_init__(self) -> None:
        if not self.defences:
            raise ValueError("defences must name at least one defence, got none")
        changed = False
        for one in self.parts:
            if changed and isinstance(one, DpSgd | AdaptiveClip):
                raise ValueError(
                    "dp-sgd and adaptive-clip compute the gradient of each record anew: name them "
                    "before a defence that changes the gradient of a step, not after it"
                )
            changed = changed or isinstance(one, GradientDefence)

    @property
    def parts(self) -> tuple[Defence, ...]:
        """The defences, those of a chain within one by one."""
        return tuple(
            part
            for one in self.defences
            for part in (one.parts if isinstance(one, Chain) else (one,))
        )

    @property
    def papers(self) -> tuple[Paper, ...]:
        return tuple(p for defence in self.defences for p in getattr(defence, "papers", ()))

    def announced(self) -> dict[str, object]:
        return {"defences": tuple(defence.announced() for defence in self.defences)}

    def check(self, model: nn.Module) -> None:
        for one in self.defences:
            if isinstance(one, Selective):
                one.check(model)

    def on_batch(self, batch: Batch, here: Here, rng: torch.Generator) -> Batch:
        for one, place, own in self._each(here, rng):
            if isinstance(one, BatchDefence):
                batch = one.on_batch(batch, place, own)
        return batch

    def on_gradient(self, gradient: Named, here: Here, rng: torch.Generator) -> Named:
        for one, place, own in self._each(here, rng):
            if isinstance(one, GradientDefence):
                gradient = one.on_gradient(gradient, place, own)
        return gradient

    def on_update(self, update: Named, here: Here, rng: torch.Generator) -> Named:
        for one, place, own in self._each(here, rng):
            if isinstance(one, UpdateDefence):
                update = one.on_update(update, place, own)
        return update

    def answered(self, seen: Observation) -> Answer:
        """Undo the last first; send candidates through all of them in their order."""
        answers: list[Answer] = []
        for one in reversed(self.defences):
            if isinstance(one, Answered):
                answers.insert(0, one.answered(seen))
                seen = replace(seen, update=answers[0].update)

        def through(update: Named) -> Named:
            for answer in answers:
                update = answer.through(update) if answer.through else update
            return update

        update = seen.update

        def again(rng: torch.Generator) -> Named:
            return self.on_update(update, Here(seen.setting), rng)

        return Answer(
            "; ".join(answer.words for answer in answers),
            update,
            restored=all(answer.restored for answer in answers),
            whole=len(answers) == len(self.defences) and all(answer.whole for answer in answers),
            through=through,
            again=again if any(answer.again for answer in answers) else None,
        )

    def _each(
        self, here: Here, rng: torch.Generator
    ) -> Iterator[tuple[Defence, Here, torch.Generator]]:
        """Each defence, what it sees, and what it draws from."""
        seed = int(torch.randint(2**62, (), generator=rng))
        for number, one in enumerate(self.defences):
            prefix = f"{number}/"
            among = here.among
            with _part(here.memory, prefix) as memory, _part(among.letters, prefix) as letters:
                place = replace(here, memory=memory, among=replace(among, letters=letters))
                yield one, place, seeded(seed, number)


@contextmanager
def _part(whole: Memory, prefix: str) -> Iterator[Memory]:
    """The entries below a prefix, as a memory of their own; what becomes of it is kept."""
    part = {k.removeprefix(prefix): v for k, v in whole.items() if k.startswith(prefix)}
    yield part
    for key in [k for k in whole if k.startswith(prefix)]:
        del whole[key]
    whole.update({prefix + key: value for key, value in part.items()})
