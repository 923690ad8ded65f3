"""Guess and truth meet here, and only here: every number beside what a guess without the update
scores."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from leakgauge import metrics
from leakgauge.audit.plan import Plan
from leakgauge.audit.results import LabelScore, Score
from leakgauge.errors import NotApplicable
from leakgauge.metrics.labels import chance, multiset_accuracy
from leakgauge.types import Batch, Reconstruction, Scorer


def scored(
    plan: Plan,
    guess: Reconstruction,
    truth: Batch,
    measures: Mapping[str, Scorer],
    rng: torch.Generator,
    prior: Tensor | None = None,
) -> tuple[Score, Tensor]:
    """Everything measured on one guess, each number beside its no-information baseline (and that of
    a restorer's `prior` alone); and the guesses in the order of the truths."""
    audit = plan.document.audit
    others = _others(plan.data.inputs, truth.inputs, audit.gallery, rng)
    mean = metrics.baselines.mean_image(others).expand_as(truth.inputs)
    pair = metrics.assign.optimal if audit.assignment == "optimal" else metrics.assign.best_match
    index = pair(guess.inputs, truth.inputs)
    found = index >= 0

    def placed(guesses: Tensor, index: Tensor) -> Tensor:
        """In the order of the truths; one without a guess is scored as if nothing were known."""
        out = mean.clone()
        out[index >= 0] = guesses[index[index >= 0]].to(out)
        return out

    paired = placed(guess.inputs, index)
    chosen = metrics.baselines.random_images(others, len(truth), rng)
    gallery = torch.cat([truth.inputs, others])
    identified = metrics.reidentified(paired, torch.arange(len(truth)), gallery)

    def measured(inputs: Tensor) -> dict[str, tuple[float, ...]]:
        return {name: tuple(m(inputs, truth.inputs).tolist()) for name, m in measures.items()}

    score = Score(
        records=len(truth),
        scores=measured(paired) | {"identified": tuple((identified * found).tolist())},
        mean_image=measured(mean),
        random_image=measured(chosen),
        identified=1 / len(gallery),
        labels=_labels(guess.labels, truth.labels, plan),
        prior_only=None if prior is None else measured(placed(prior, pair(prior, truth.inputs))),
    )
    return score, paired


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
