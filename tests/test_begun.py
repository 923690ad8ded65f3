"""Hybrids: any search begins where another attack ended, in code and in plans."""

from __future__ import annotations

import importlib
import json
import time
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import public_attack
import pytest
import torch
from nouns import setting
from torch import Tensor

from leakgauge import data, metrics, models, threat
from leakgauge.attacks import (
    ACTIVE_ATTACKS,
    ATTACKS,
    DLG,
    Begun,
    CoarseToFine,
    FedAvgEpochs,
    GradInversion,
    InvertingGradients,
    SmoothToSharp,
    _matching,
    begun,
    fedavg,
)
from leakgauge.attacks._labels import infer
from leakgauge.attacks._matching import Search, in_order
from leakgauge.attacks._spaces import SPACES, Generator, LowResolution, Pixels
from leakgauge.attacks.begun import parts
from leakgauge.audit import Store, cases, parse, references, run
from leakgauge.audit.bench import Bench
from leakgauge.audit.document import settings
from leakgauge.audit.forecast import Trying, forecast
from leakgauge.audit.schema import load
from leakgauge.errors import InputError, NotApplicable, PlanError, Withheld
from leakgauge.fl.local import train
from leakgauge.report import html
from leakgauge.restore import TotalVariation
from leakgauge.types import (
    Batch,
    Iterative,
    Knowledge,
    LocalTraining,
    Observation,
    PreparedAttack,
    Reconstruction,
    Resources,
    ThreatModel,
)

SEARCHES = sorted(name for name, one in ATTACKS.items() if issubclass(one, Search))


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def observed(records: int = 1, **training: Any) -> tuple[Observation, Batch]:
    """The update of a client that holds digits, each of its own class, and those digits."""
    digits = data.load("digits")
    rows = [int((digits.labels == k).nonzero()[3]) for k in (7, 2, 5, 0)[:records]]
    batch = Batch(digits.inputs[rows], digits.labels[rows])
    model = models.make(
        "lenet-zhu", shape=(1, 8, 8), classes=10, init="wide-uniform", rng=seeded(1)
    )
    how = LocalTraining(**{"lr": 0.1, "batch_size": records} | training)
    here = setting(model, batch)
    return Observation(here, train(here, batch, how, seeded()).update, how, records), batch


@dataclass(frozen=True)
class Known:
    """A first attack whose guess is known: `shown` in every pixel, plus noise of its generator."""

    needs: ClassVar[frozenset[Knowledge]] = frozenset({"records"})
    shown: float = 0.25
    guesses: int | None = None
    reason: str = ""

    def reconstruct(
        self, seen: Observation, rng: torch.Generator, resources: Resources | None = None
    ) -> Reconstruction:
        if self.reason:
            raise NotApplicable(self.reason)
        assert seen.begin is None
        assert seen.records is not None
        count = seen.records if self.guesses is None else self.guesses
        images = self.shown + 0.1 * torch.rand(count, *seen.record.shape, generator=rng)
        return Reconstruction(
            images, None, residual=0.75, differed=0.5, stopped="time", notes=("a note of Known",)
        )


@dataclass(frozen=True)
class Learned(Known):
    """The same, prepared before the round."""

    needs: ClassVar[frozenset[Knowledge]] = frozenset({"records", "public"})
    manipulates: ClassVar[bool] = False

    def prepare(self, target: Any, rng: torch.Generator, resources: Any = None) -> Any:
        if self.reason:
            raise NotApplicable(self.reason)
        return target, rng, resources


def guess_of(images: Tensor, labels: Tensor | None = None) -> Reconstruction:
    return Reconstruction(images, labels, 0.0)


# ---------------------------------------------------------------- every search takes a start


@pytest.fixture
def starts(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """The images with which each search of the matching loop began, restart by restart."""
    seen: list[Tensor] = []
    original = _matching._Problem.__post_init__

    def spy(problem: Any) -> None:
        original(problem)
        seen.append(problem.best_inputs.float())

    monkeypatch.setattr(_matching._Problem, "__post_init__", spy)
    return seen


def small(name: str, **options: Any) -> Any:
    short: dict[str, Any] = {"iterations": 2}
    if name == "curious-client":  # it searches, and every pixel
        short |= {"exact": False, "space": "pixels"}
    return ATTACKS[name](**short | options)  # type: ignore[call-arg]


def test_what_searches_is_found() -> None:
    others = {"analytic", "exact-recursion", "git", "lti", "separate-and-decode"}
    others |= {"fedinverse", "ggl", "gias", "guided-diffusion", "rog"}  # their own spaces
    assert set(SEARCHES) >= ATTACKS.keys() - others
    assert not set(SEARCHES) & others


@pytest.mark.parametrize("name", SEARCHES)
def test_every_search_begins_from_the_guess(name: str, starts: list[Tensor]) -> None:
    """From the truth, which no attack has, the first distance is next to nothing."""
    seen, truth = observed()
    lost = small(name).reconstruct(seen, seeded())
    near = small(name).reconstruct(
        replace(seen, begin=guess_of(truth.inputs, truth.labels)), seeded()
    )
    drawn, begun_ = starts[0], starts[len(starts) // 2]
    fitted = name in ("ci-net", "fedleak")  # they search the weights of a generator
    if fitted:
        assert metrics.psnr(begun_, truth.inputs).min() > 25
    else:
        assert torch.allclose(begun_, truth.inputs, atol=1e-6)
    assert metrics.psnr(drawn, truth.inputs).max() < 12
    if name != "dlg":  # whose labels are free
        assert near.distances[0] < (0.5 if fitted else 0.05) * lost.distances[0]
    assert seen.begin is None


@pytest.mark.parametrize("name", SEARCHES)
def test_the_search_draws_the_same_numbers_with_a_start(name: str) -> None:
    """Also where a restart follows: what it begins from is what it begins from alone."""
    seen, truth = observed()
    ends = []
    for begin in (None, guess_of(truth.inputs, truth.labels)):
        rng = seeded(3)
        small(name, restarts=2).reconstruct(replace(seen, begin=begin), rng)
        ends.append(rng.get_state())
    assert torch.equal(*ends)


def test_the_other_restarts_begin_as_the_search_does_alone(starts: list[Tensor]) -> None:
    seen, truth = observed()
    attack = InvertingGradients(iterations=2, restarts=3)
    alone = attack.reconstruct(seen, seeded())
    near = attack.reconstruct(replace(seen, begin=guess_of(truth.inputs)), seeded())
    assert torch.equal(starts[3], truth.inputs)
    assert torch.equal(torch.stack(starts[1:3]), torch.stack(starts[4:6]))
    assert near.objectives[1:] == alone.objectives[1:]
    assert near.objectives[0] < min(alone.objectives)


def test_later_stages_go_on_from_the_first(starts: list[Tensor]) -> None:
    seen, _ = observed()
    rough = torch.rand(1, 1, 8, 8, generator=seeded(2))
    begin = replace(seen, begin=guess_of(rough))
    for attack, stages in ((SmoothToSharp(iterations=6), 3), (CoarseToFine(iterations=6), 2)):
        starts.clear()
        attack.reconstruct(begin, seeded())
        assert len(starts) == stages
        assert torch.equal(starts[0], rough)
        assert not any(torch.equal(one, rough) for one in starts[1:])


def test_all_seeds_of_gradinversion_begin_from_the_guess(starts: list[Tensor]) -> None:
    seen, _ = observed()
    begin = replace(seen, begin=guess_of(torch.full((1, 1, 8, 8), 0.3)))
    GradInversion(iterations=8, seeds=2).reconstruct(begin, seeded())
    assert len(starts) == 8  # two seeds in four rounds
    assert all(torch.allclose(one, torch.tensor(0.3)) for one in starts[:2])
    assert not torch.allclose(starts[2], starts[3])  # the noise of the search parts them
    assert not torch.allclose(starts[2], torch.tensor(0.3))


def test_every_epoch_begins_from_the_guess_in_the_order_of_the_labels(
    starts: list[Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen, truth = observed(4, batch_size=2, epochs=3, order="shuffled")
    dealt = torch.tensor([0, 5, 2, 7])
    monkeypatch.setattr(fedavg, "infer", lambda *_: torch.tensor([0, 2, 5, 7]))
    begin = replace(seen, begin=guess_of(truth.inputs, truth.labels))
    guess = FedAvgEpochs(iterations=1).reconstruct(begin, seeded())
    assert torch.equal(guess.labels, dealt)  # type: ignore[arg-type]
    rows = [truth.labels.tolist().index(label) for label in dealt.tolist()]
    assert torch.equal(starts[0], truth.inputs[rows].repeat(3, 1, 1, 1))
    assert guess.inputs.shape == truth.inputs.shape


# ---------------------------------------------------------------- images stand at their labels


@pytest.mark.parametrize(
    ("own", "wanted", "order"),
    [
        ([3, 1, 2], [1, 2, 3], [1, 2, 0]),
        ([1, 1, 4], [1, 4, 1], [0, 2, 1]),
        ([7, 1, 8], [1, 2, 3], [1, 0, 2]),  # those wanted nowhere keep their order
        (None, [1, 2, 3], [0, 1, 2]),
        ([3, 1, 2], None, [0, 1, 2]),
        ([3, 1], [1, 2, 3], [0, 1, 2]),  # labels of a part say nothing
    ],
)
def test_images_take_the_place_of_their_label(
    own: list[int] | None, wanted: list[int] | None, order: list[int]
) -> None:
    images = torch.arange(3.0).view(3, 1, 1, 1)
    labels = [None if one is None else torch.tensor(one) for one in (own, wanted)]
    found = in_order(guess_of(images, labels[0]), labels[1])
    assert found.flatten().tolist() == order


def test_a_batch_begins_with_every_image_at_its_label(starts: list[Tensor]) -> None:
    seen, truth = observed(4)
    attack = InvertingGradients(iterations=1)
    wanted = infer(seen, "counts", seeded())
    assert wanted.tolist() == [0, 2, 5, 7]
    near = attack.reconstruct(replace(seen, begin=guess_of(*_pair(truth))), seeded())
    assert torch.equal(starts[0], truth.inputs[[3, 1, 2, 0]])
    assert near.residual < 1e-6


def _pair(batch: Batch) -> tuple[Tensor, Tensor]:
    return batch.inputs, batch.labels


# ---------------------------------------------------------------- every space


@pytest.mark.parametrize(
    ("space", "least"), [(Pixels(), 150.0), (LowResolution(), 18.0), (Generator(), 30.0)]
)
def test_a_space_shows_given_images(space: Any, least: float) -> None:
    images = data.load("photos", size=32).inputs[60:61]
    free = space.draw(tuple(images.shape), "normal", seeded())
    kept = [one.clone() for one in (*free, images)]
    found = space.encode(images, free)
    assert [one.shape for one in found] == [one.shape for one in free]
    assert not any(one.requires_grad for one in found)
    assert all(torch.equal(a, b) for a, b in zip((*free, images), kept, strict=True))
    shown = space.decode(found, (32, 32))
    assert metrics.psnr(shown, images).min() >= least
    assert metrics.psnr(space.decode(free, (32, 32)), images).max() < 14


@pytest.mark.parametrize("name", SPACES)
def test_a_search_begins_in_its_space(name: Any, starts: list[Tensor]) -> None:
    smooth = torch.linspace(0.2, 0.8, 8).view(1, 1, 1, 8).expand(1, 1, 8, 8)
    seen, _ = observed()
    attack = InvertingGradients(iterations=1, space=name)
    attack.reconstruct(replace(seen, begin=guess_of(smooth)), seeded())
    assert metrics.psnr(starts[0], smooth).min() > 20


# ---------------------------------------------------------------- the hybrid


def test_a_hybrid_is_its_first_attack_and_then_its_search(starts: list[Tensor]) -> None:
    seen, _ = observed()
    first, search = Known(), InvertingGradients(iterations=4, restarts=2)
    whole = begun(first, search)
    guess = whole.reconstruct(seen, seeded(5))
    start = first.reconstruct(seen, seeded(5))
    assert torch.equal(starts[0], start.inputs)  # the same as alone
    again = search.reconstruct(replace(seen, begin=start), seeded(5))
    assert torch.equal(guess.inputs, again.inputs)
    assert guess.objectives == again.objectives  # of the second restart, which draws its start, too
    assert guess.history == again.history
    assert guess.residual == again.residual


def test_it_says_where_it_began() -> None:
    seen, _ = observed()
    search = GradInversion(iterations=4)
    guess = begun(Known(), search, names=("known", "gradinversion")).reconstruct(seen, seeded())
    times = guess.facts.pop("times")
    assert times["begun_cpu_seconds"] >= 0
    assert guess.facts == {
        "derivative": guess.facts["derivative"],
        "begun_from": "known",
        "begun_residual": 0.75,
        "begun_distance": guess.distances[0],
    }
    assert guess.notes == (
        "its search begins from the guess of known",
        "known: a note of Known",
        "no batch-norm prior: statistics = 'none'",
    )
    assert (guess.differed, guess.stopped) == (0.5, "time")
    unnamed = begun(Known(), search).reconstruct(seen, seeded())
    assert unnamed.facts["begun_from"] == "Known"


def test_the_start_can_be_restored(starts: list[Tensor]) -> None:
    seen, _ = observed()
    flat = TotalVariation(weight=10.0)
    begun(Known(), InvertingGradients(iterations=1), flat).reconstruct(seen, seeded())
    start = Known().reconstruct(seen, seeded()).inputs
    assert float(start.std()) > 0.01
    assert float(starts[0].std()) < 1e-3
    assert torch.allclose(starts[0].mean(), start.mean(), atol=1e-3)


def test_hybrids_nest(starts: list[Tensor]) -> None:
    seen, _ = observed()
    inner = begun(Known(), InvertingGradients(iterations=3), names=("known", "ig"))
    whole = begun(inner, SmoothToSharp(iterations=6), names=("known+ig", "s2s"))
    assert whole.chain == ("known", "ig", "s2s")
    guess = whole.reconstruct(seen, seeded(4))
    assert torch.equal(starts[0], Known().reconstruct(seen, seeded(4)).inputs)
    assert torch.equal(starts[1], inner.reconstruct(seen, seeded(4)).inputs)
    assert guess.facts["begun_from"] == "known+ig"
    assert "known+ig: known: a note of Known" in guess.notes
    rngs = [seeded(7), seeded(8), seeded(9)]
    starts.clear()
    whole.reconstruct(seen, rngs[2], None, rngs[:2])  # each draws from its own
    assert torch.equal(starts[0], Known().reconstruct(seen, seeded(7)).inputs)


def test_it_needs_what_both_need() -> None:
    search = InvertingGradients(labels="known")
    assert begun(Known(), search).needs == {"records", "training", "labels", "weights"}
    assert begun(Learned(), search).needs == {"records", "training", "labels", "weights", "public"}
    with pytest.raises(Withheld, match="'public'"):
        threat.check("x", begun(Learned(), InvertingGradients()), ThreatModel(), public=False)


def test_it_is_prepared_exactly_when_its_first_attack_is() -> None:
    search = InvertingGradients()
    plain, learned = begun(Known(), search), begun(Learned(), search)
    assert not isinstance(plain, PreparedAttack)
    assert isinstance(learned, PreparedAttack)
    assert isinstance(begun(learned, SmoothToSharp()), PreparedAttack)
    target, rng, resources = object(), seeded(), Resources()
    assert learned.prepare(target, rng, resources) == (target, rng, resources)  # type: ignore
    assert not threat.manipulates(learned)
    assert not threat.manipulates(plain)
    trap = ACTIVE_ATTACKS["robbing-the-fed"]()
    assert threat.manipulates(begun(trap, search))
    assert parts(begun(learned, SmoothToSharp())) == (Learned(), search, SmoothToSharp())
    assert parts(search) == (search,)


def test_its_search_can_be_shortened_and_its_start_stays() -> None:
    for first in (Known(), Learned()):
        whole = begun(first, InvertingGradients(iterations=50, restarts=4), TotalVariation())
        assert isinstance(whole, Iterative)
        assert (whole.iterations, whole.restarts) == (50, 4)
        short = whole.shortened(3, 1)
        assert short == replace(whole, search=InvertingGradients(iterations=3, restarts=1))
        assert type(short) is type(whole)


def test_the_time_is_for_both(monkeypatch: pytest.MonkeyPatch) -> None:
    seen, _ = observed()
    given: list[float | None] = []
    clock = [100.0]
    module = importlib.import_module("leakgauge.attacks.begun")
    monkeypatch.setattr(module, "time", SimpleNamespace(
        monotonic=lambda: clock[0], process_time=lambda: clock[0] / 2
    ))  # fmt: skip
    original = InvertingGradients.reconstruct

    @dataclass(frozen=True)
    class Slow(Known):
        def reconstruct(self, seen: Any, rng: Any, resources: Any = None) -> Reconstruction:
            given.append(resources.seconds)
            clock[0] += 4.0
            return super().reconstruct(seen, rng, resources)

    def spy(self: Any, seen: Any, rng: Any, resources: Any = None) -> Any:
        given.append(resources.seconds)
        return original(self, seen, rng, resources)

    monkeypatch.setattr(InvertingGradients, "reconstruct", spy)
    whole = begun(Slow(), InvertingGradients(iterations=1))
    guess = whole.reconstruct(seen, seeded(), Resources(seconds=10.0))
    assert given == [10.0, 6.0]
    assert guess.facts["times"] == {"begun_cpu_seconds": 2.0}
    whole.reconstruct(seen, seeded(), Resources(seconds=3.0))
    assert given[2:] == [3.0, 0.0]


# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize("other", ["analytic", "exact-recursion", "separate-and-decode"])
def test_what_does_not_search_begins_from_nothing(other: str) -> None:
    with pytest.raises(InputError, match="does not search by matching gradients"):
        begun(Known(), ATTACKS[other]())
    with pytest.raises(InputError, match="Begun does not search"):
        begun(Known(), begun(Known(), InvertingGradients()))


def test_a_search_that_is_prepared_begins_from_nothing() -> None:
    """Nobody would prepare it."""

    @dataclass(frozen=True)
    class Both(InvertingGradients):
        manipulates: ClassVar[bool] = False
        prepare = Learned.prepare

    with pytest.raises(InputError, match=r"Both does not search .* and not prepared"):
        begun(Known(), Both())


def test_there_must_be_one_image_for_each_record() -> None:
    seen, _ = observed(4)
    for guesses in (0, 3, 5):
        whole = begun(Known(guesses=guesses), InvertingGradients(iterations=1))
        with pytest.raises(InputError, match=rf"has 4; Known guessed {guesses}: begin from"):
            whole.reconstruct(seen, seeded())
    held = replace(seen, begin=guess_of(torch.zeros(4, 1, 7, 8)))
    with pytest.raises(InputError, match=r"images \(4, 1, 8, 8\), one for each .* \(4, 1, 7, 8\)"):
        InvertingGradients(iterations=1).reconstruct(held, seeded())


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_images_that_are_not_finite_are_refused(value: float) -> None:
    seen, _ = observed()
    with pytest.raises(InputError, match="finite images, got 64 NaN or infinite values of 64"):
        begun(Known(value), InvertingGradients(iterations=1)).reconstruct(seen, seeded())


def test_images_are_cut_to_their_range(starts: list[Tensor]) -> None:
    seen, _ = observed()
    begun(Known(1.5), InvertingGradients(iterations=1)).reconstruct(seen, seeded())
    assert torch.equal(starts[0], torch.ones(1, 1, 8, 8))


def test_where_the_first_does_not_apply_the_hybrid_does_not() -> None:
    seen, _ = observed()
    words = "it begins from known, which does not apply: no such layer"
    search = InvertingGradients(iterations=1)
    with pytest.raises(NotApplicable, match=words):
        begun(Known(reason="no such layer"), search, names=("known", "")).reconstruct(
            seen, seeded()
        )
    learned = begun(Learned(reason="no such layer"), search, names=("known", ""))
    assert isinstance(learned, PreparedAttack)
    with pytest.raises(NotApplicable, match=words):
        learned.prepare(None, seeded())  # type: ignore[arg-type]


# ---------------------------------------------------------------- plans


FIRST = {"name": "inverting-gradients", "iterations": 3}
THEN = {"name": "smooth-to-sharp", "iterations": 6}
HYBRID = "inverting-gradients+smooth-to-sharp"


def plan(*attacks: dict[str, Any], **federation: Any) -> dict[str, Any]:
    return {
        "federation": {"model": "lenet-zhu", "data": {"name": "digits"}} | federation,
        "attack": list(attacks),
        "audit": {"seeds": [0], "control": False, "explain": False, "exact": False},
    }


def test_a_plan_begins_a_search_from_any_attack(tmp_path: Path) -> None:
    smooth = {"name": "total-variation", "weight": 0.3}
    tables = (
        THEN | {"begin": "analytic"},
        THEN | {"begin": FIRST},
        THEN | {"begin": FIRST | {"restore": smooth}},
        THEN | {"begin": THEN | {"begin": FIRST}, "restore": "total-variation"},
        THEN | {"begin": FIRST},
    )
    checked = parse(plan(*tables), "hybrids", tmp_path)
    restored = "inverting-gradients+total-variation+smooth-to-sharp"
    twice = f"{HYBRID}+smooth-to-sharp+total-variation"
    keys = ["analytic+smooth-to-sharp", HYBRID, restored, twice, f"{HYBRID}-2"]
    assert list(checked.attacks) == keys
    assert list(checked.asked) == keys
    ig, s2s = InvertingGradients(iterations=3), SmoothToSharp(iterations=6)
    once = begun(ig, s2s, None, ("inverting-gradients", "smooth-to-sharp"))
    assert checked.attacks[HYBRID] == checked.attacks[f"{HYBRID}-2"] == once
    first = checked.attacks[restored]
    assert isinstance(first, Begun)
    assert first.restore == TotalVariation(weight=0.3)
    assert first.names == ("inverting-gradients+total-variation", "smooth-to-sharp")
    assert first.chain == ("inverting-gradients", "smooth-to-sharp")
    assert checked.attacks[twice] == begun(once, s2s, None, (HYBRID, "smooth-to-sharp"))
    assert checked.restorers == {twice: TotalVariation()}
    assert [cases.effort(checked, key) for key in keys] == [6, 9, 9, 15, 9]
    assert list(settings(checked.document.attack)) == keys
    assert settings(checked.document.attack)[HYBRID] == (
        'iterations = 6, begin = { name = "inverting-gradients", iterations = 3 }'
    )


@pytest.mark.parametrize(
    ("attack", "message"),
    [
        (
            {"name": "analytic", "begin": "dlg"},
            "attack 'analytic': begin: it does not search by matching gradients.*agic, bayes",
        ),
        ({"name": "seer", "begin": "dlg"}, "attack 'seer': begin: it does not search"),
        (
            THEN | {"begin": "inverting-gradient"},
            "'smooth-to-sharp': begin: unknown attack 'inverting-gradient'; did you mean 'inv",
        ),
        (THEN | {"begin": {"iterations": 3}}, "begin: attack: key 'name' is missing"),
        (THEN | {"begin": FIRST | {"iteration": 3}}, "begin: .*unknown key 'iteration'"),
        (THEN | {"begin": FIRST | {"iterations": 0}}, "begin: .*iterations must be between"),
        (THEN | {"begin": FIRST | {"restore": "tv"}}, "begin: unknown restorer 'tv'"),
        (THEN | {"begin": {"name": "analytic", "begin": "dlg"}}, "begin: .*it does not search"),
        (THEN | {"begin": 3}, "'smooth-to-sharp': begin: expected text, got 3 or"),
        (THEN | {"begin": ["dlg"]}, "'smooth-to-sharp': begin: expected text"),
    ],
)
def test_a_wrong_start_is_refused(attack: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=message):
        parse(plan(attack), "wrong", tmp_path)


def test_settings_stand_at_the_rows_of_own_code_too(tmp_path: Path) -> None:
    checked = parse(plan({"name": MEAN}, THEN | {"begin": MEAN}, public=20), "own", tmp_path)
    assert settings(checked.document.attack).keys() == checked.attacks.keys()


def test_an_attacker_must_hold_what_the_first_attack_needs(tmp_path: Path) -> None:
    public = THEN | {"begin": "separate-and-decode"}
    with pytest.raises(Withheld, match=r"'separate-and-decode\+smooth-to-sharp' needs 'public'"):
        parse(plan(public, public=0), "none", tmp_path)
    assert len(parse(plan(public, public=50), "some", tmp_path).public) == 50
    active = THEN | {"begin": "robbing-the-fed"}
    with pytest.raises(Withheld, match=r"'robbing-the-fed\+smooth-to-sharp' changes the model"):
        parse(plan(active), "honest", tmp_path)


def test_its_references_are_those_of_all_its_parts() -> None:
    whole = begun(InvertingGradients(), DLG(), TotalVariation())
    named = [paper.key for paper in references.of([whole])]
    for part in (InvertingGradients(), DLG(), TotalVariation()):
        assert {paper.key for paper in references.of([part])} <= set(named)


# ---------------------------------------------------------------- audits


def test_an_audit_runs_a_hybrid_beside_its_parts(tmp_path: Path, starts: list[Tensor]) -> None:
    """Its start is what the first attack guesses alone; its search draws what it draws alone."""
    twice = THEN | {"restarts": 2}
    checked = parse(plan(FIRST, twice, twice | {"begin": FIRST}), "hybrid", tmp_path)
    assert list(checked.attacks) == ["inverting-gradients", "smooth-to-sharp", HYBRID]
    bench, began = Bench(checked, tmp_path / "prepared"), {}
    for case in cases.trials(checked):
        starts.clear()
        assert bench.trial(case, lambda *_: None).trial.status == "done"
        began[case.attack] = list(starts)
    (first,) = began["inverting-gradients"]
    _, second, *_ = began["smooth-to-sharp"]
    start, guess, again, *_ = began[HYBRID]
    assert torch.equal(start, first)
    assert torch.equal(again, second)  # the restart that begins as the search does alone
    assert not torch.equal(guess, start)
    run(checked, Store(tmp_path / "out"))
    result = load(tmp_path / "out" / "result.json")
    assert [trial.attack for trial in result.trials] == list(checked.attacks)
    alone, _, hybrid = (trial.found for trial in result.trials)
    assert alone is not None
    assert hybrid is not None
    assert hybrid.facts["begun_from"] == "inverting-gradients"
    assert hybrid.facts["begun_residual"] == alone.residual
    assert hybrid.facts["times"]["begun_cpu_seconds"] > 0  # type: ignore[index]
    page = html.render(result, tmp_path / "out", "hide")
    assert HYBRID in page
    assert "its search begins from the guess of inverting-gradients" in page
    assert "begin = { name = &#34;inverting-gradients&#34;, iterations = 3 }" in page


def test_two_audits_of_a_hybrid_are_the_same(tmp_path: Path) -> None:
    checked = parse(plan(THEN | {"begin": FIRST}), "hybrid", tmp_path)

    def without(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: without(item) for key, item in value.items() if key != "times"}
        return [without(item) for item in value] if isinstance(value, list) else value

    results = []
    for out in ("one", "two"):
        run(checked, Store(tmp_path / out))
        results.append(without(json.loads((tmp_path / out / "result.json").read_text())))
    assert results[0] == results[1]


MEAN = "public_attack:MeanPublic"


def test_a_hybrid_meets_what_its_first_attack_prepared(tmp_path: Path) -> None:
    public_attack.CALLED.clear()
    table = plan({"name": MEAN}, THEN | {"begin": MEAN}, public=20)
    checked = parse(table, "learned", tmp_path)
    assert list(checked.attacks) == ["MeanPublic", "MeanPublic+smooth-to-sharp"]
    result = run(checked, Store(tmp_path / "out"))
    assert [trial.status for trial in result.trials] == ["done", "done"]
    assert len(public_attack.CALLED) == 1  # prepared once for both
    found = result.trials[1].found
    assert found is not None
    assert found.facts["begun_from"] == "MeanPublic"


def test_code_from_outside_is_known_that_only_a_start_names(tmp_path: Path) -> None:
    checked = parse(plan(THEN | {"begin": MEAN}, public=20), "learned", tmp_path)
    assert [method.spec for method in checked.outside] == [MEAN]  # a change of it is noticed


def test_a_forecast_counts_a_shared_preparation_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spent = [0.0]  # by preparations, of which each takes a second for every public record

    def work() -> None:
        spent[0] += 1

    monkeypatch.setattr(time, "process_time", lambda: spent[0])
    monkeypatch.setattr(public_attack, "WHILE", [work])
    for tables in (({"name": MEAN}, THEN | {"begin": MEAN}), (THEN | {"begin": MEAN}, MEAN)):
        public_attack.CALLED.clear()
        named = [one if isinstance(one, dict) else {"name": one} for one in tables]
        checked = parse(plan(*named, public=20), "learned", tmp_path)
        assert {method.spec for method in checked.outside} == {MEAN}
        told = forecast(checked)
        assert [one.reason for one in told.attacks] == [None, None]
        assert len(public_attack.CALLED) == 1
        assert [one.cpu_seconds for one in told.attacks] == [0, 0]
        assert told.cpu_seconds == 20
        trying = Trying(checked, tmp_path, lambda name: None)
        assert len({trying.preparation(case) for case in cases.trials(checked)}) == 1


def test_a_hybrid_of_a_malicious_server_sends_what_its_first_attack_prepared(
    tmp_path: Path,
) -> None:
    first = {"name": "robbing-the-fed", "bins": 32}
    table = plan(first, FIRST | {"begin": first}, model={"name": "mlp", "hidden": [48]})
    checked = parse(table | {"threat": {"malicious": True}}, "active", tmp_path)
    result = run(checked, Store(tmp_path / "out"))
    alone, hybrid = result.trials
    assert (alone.status, hybrid.status) == ("done", "done"), (alone.error, hybrid.error)
    assert hybrid.realism == "active"
    assert hybrid.found.facts["begun_residual"] == alone.found.residual  # type: ignore[union-attr]
    assert hybrid.found.guard is not None  # type: ignore[union-attr]


def test_a_first_attack_that_does_not_apply_is_a_finding(tmp_path: Path) -> None:
    table = plan(FIRST, FIRST | {"begin": "analytic"}, model="cnn")
    result = run(parse(table, "hybrid", tmp_path), Store(tmp_path / "out"))
    _, hybrid = result.trials
    assert hybrid.status == "not applicable"
    assert hybrid.error is not None
    assert hybrid.error.startswith("it begins from analytic, which does not apply: ")


def test_a_hybrid_ignores_a_defence_as_its_parts_do(tmp_path: Path) -> None:
    table = plan(THEN | {"begin": FIRST})
    table["defence"] = [{"name": "prune", "share": 0.5}]
    checked = parse(table, "defended", tmp_path)
    assert checked.blind == {f"{HYBRID}-blind": HYBRID}
    result = run(checked, Store(tmp_path / "out"))
    assert [trial.status for trial in result.trials] == ["done", "done"]
    assert [bool(t.found and t.found.adapted) for t in result.trials] == [True, False]
