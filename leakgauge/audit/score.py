"""Guess and truth meet here, and only here: every number beside what a guess without the update
scores."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from leakgauge import metrics
from leakgauge.audit.images import Panel
from leakgauge.audit.plan import Plan
from leakgauge.audit.results import LabelScore, Score, Scores
from leakgauge.errors import NotApplicable
from leakgauge.metrics.labels import chance, multiset_accuracy
from leakgauge.types import Batch, Reconstruction, Scorer


def scored(
    plan: Plan,
    guess: Reconstruction,
    truth: Batch,
    measures: Mapping[str, Scorer],
    rng: torch.Generator,
    raw: Tensor | None = None,
    prior: Tensor | None = None,
) -> tuple[Score, Panel]:
    """Everything measured on one guess, each number beside its no-information baseline, beside
    that of the `raw` guess if this one is restored, and beside that of what is shown without the
    update (`prior`). Each of them is paired with the truths by itself, by the same rule. And all
    pictures in the order of the truths."""
    audit = plan.document.audit
    others = _others(plan.data.inputs, truth.inputs, audit.gallery, rng)
    mean = metrics.baselines.mean_image(others).expand_as(truth.inputs)
    pair = metrics.assign.optimal if audit.assignment == "optimal" else metrics.assign.best_match
    chosen = metrics.baselines.random_images(others, len(truth), rng)
    gallery = torch.cat([truth.inputs, others])

    def measured(inputs: Tensor) -> Scores:
        return {name: tuple(m(inputs, truth.inputs).tolist()) for name, m in measures.items()}

    def held(guesses: Tensor) -> tuple[Tensor, Scores]:
        """In the order of the truths, and scored; a truth without a guess is scored as if nothing
        were known."""
        index = pair(guesses, truth.inputs)
        found = index >= 0
        placed = mean.clone()
        placed[found] = guesses[index[found]].to(placed)
        identified = metrics.reidentified(placed, torch.arange(len(truth)), gallery) * found
        return placed, measured(placed) | {"identified": tuple(identified.tolist())}

    paired, scores = held(guess.inputs)
    before, alone = (None if one is None else held(one) for one in (raw, prior))
    score = Score(
        records=len(truth),
        scores=scores,
        mean_image=measured(mean),
        random_image=measured(chosen),
        identified=1 / len(gallery),
        labels=_labels(guess.labels, truth.labels, plan),
        raw=before and before[1],
        prior_only=alone and alone[1],
    )
    return score, Panel(paired, truth.inputs, before and before[0], alone and alone[0])


def _others(inputs: Tensor, truths: Tensor, count: int, rng: torch.Generator) -> Tensor:
    """Up to `count` images of the set that are none of the truths."""
    kept: list[Tensor] = []
    seen = {truth.numpy().tobytes() for truth in truths}
    for i in torch.randperm(len(inputs), generator=rng).tolist():
        key = inputs[i].numpy().tobytes()
        if key not in seen:  # an image that stands twice could never be identified
            seen.add(key)
            kept.append(inputs[i])
        if len(kept) == count:
            break
    if not kept:
        raise NotApplicable(
            f"the data set holds no image beside the {len(truths)} attacked ones: scores need some "
            "for their baselines; use more data or fewer records"
        )
    return torch.stack(kept)


def _labels(guess: Tensor | None, truth: Tensor, plan: Plan) -> LabelScore | None:
    if guess is None:
        return None
    classes = len(plan.data.classes)
    frequency = plan.data.labels.bincount(minlength=classes) / len(plan.data)
    return LabelScore(
        truth=tuple(sorted(truth.tolist())),
        accuracy=multiset_accuracy(guess, truth, classes),
        random=chance(truth, torch.full((classes,), 1 / classes)),
        class_prior=chance(truth, frequency),
    )
