"""A trade-off as `leakgauge tradeoff` writes it, of any settings: for tests of what follows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from sample_result import rederive, rescored, sample, save

from leakgauge.audit.document import Comparison, Limit
from leakgauge.audit.results import Budget, Result, Times, Trained, Trial

ROUNDS = 20


def traded(
    folder: Path,
    accuracies: Mapping[str, Sequence[float]],
    leaking: Mapping[str, float],
    *,
    records: int = 20,
    limit: float = 0.2,
    text: str = "",
    every: int | None = None,
    spent: Mapping[str, Budget] | None = None,
) -> Result:
    """Settings with their accuracy for each seed, and the share of records that every attack
    recovers and recognises under each. Labels may be read."""
    seeds = max(len(values) for values in accuracies.values())
    names = tuple(accuracies)
    made = sample(folder, defences=names, attacks=("analytic", "inverting-gradients"),
                  seeds=seeds, records=records, pool=3, text=text)  # fmt: skip
    allowed = Limit(share=limit, found=limit, labels=1.0)
    audit = replace(made.plan.audit, limit=allowed)
    rounds = [ROUNDS] if every is None else [*range(every, ROUNDS, every), ROUNDS]
    trained = tuple(
        Trained(
            id=f"{name}{text}.seed{seed}",
            defence=name + text,
            seed=seed,
            status="done",
            error=None,
            times=Times(1.0, 1.0),
            rounds=tuple(rounds),
            accuracy=tuple(value * (i + 1) / len(rounds) for i in range(len(rounds))),
            records=400,
            chance=0.11,
            spent=(spent or {}).get(name),
        )
        for name, values in accuracies.items()
        for seed, value in enumerate(values)
    )
    result = replace(
        made,
        plan=replace(made.plan, audit=audit, tradeoff=Comparison(rounds=ROUNDS, every=every)),
        not_run=(),
        trials=tuple(_leaking(t, leaking[t.defence.removesuffix(text)]) if t.kind == "trial" else t
                     for t in made.trials),
        trained=trained,
    )  # fmt: skip
    result = rederive(result)
    save(folder, result)
    return result


def _leaking(trial: Trial, share: float) -> Trial:
    assert trial.score is not None
    count = trial.score.records
    hits = round(share * count)
    psnr = [30.0] * hits + [8.0] * (count - hits)
    return rescored(trial, labels=1.0, psnr=psnr, identified=[float(v > 20) for v in psnr])
