"""Learned inversion: pairs on disk, the fit, LTI and GIT."""

from __future__ import annotations

import json
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from leakgauge import data, metrics, models
from leakgauge.attacks import GIT, LTI, InvertingGradients, begun
from leakgauge.attacks._learned import _errors, _standard
from leakgauge.attacks._pairs import HELD, Pairs, check, sketched
from leakgauge.attacks._recursion import derived
from leakgauge.defences import Prune
from leakgauge.errors import InputError, NotApplicable, Withheld
from leakgauge.fitting import Clock
from leakgauge.fl import Scenario, simulate, target
from leakgauge.kept import Checkpoint
from leakgauge.threat import adapted, before, observe
from leakgauge.types import (
    Dataset,
    Defence,
    Learned,
    LocalTraining,
    Named,
    Resources,
    Round,
    Target,
    ThreatModel,
)

EAVESDROPPER = ThreatModel("eavesdropper")


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def digits(begin: int = 0, end: int | None = None) -> Dataset:
    found = data.load("digits")
    rows = slice(begin, end)
    return Dataset("digits", found.inputs[rows], found.labels[rows], found.classes)


def network(name: str = "mlp", **options: Any) -> nn.Module:
    return models.make(name, shape=(1, 8, 8), classes=10, rng=seeded(), **options)


def played(
    model: nn.Module | None = None, records: int = 1, defence: Defence | None = None
) -> Round:
    made = model or network(hidden=(12,))
    training = LocalTraining(lr=0.1, batch_size=records)
    scenario = Scenario(lambda: made, digits(0, 100), training, records=records, defence=defence)
    return simulate(scenario, seeded())


def aim(round_: Round, public: Dataset | None = None) -> Target:
    return before(round_, EAVESDROPPER, public or digits(100))


def flat(update: Named) -> Tensor:
    return torch.cat([value.flatten() for value in update.values()])


def asked(
    aimed: Target, count: int = 60, folder: Path | None = None, seconds: float | None = None
) -> Pairs:
    resources = Resources(folder=folder, seconds=seconds)
    return Pairs.asked_of(aimed, count, flat, resources, Clock.of(resources), lambda done: None)


# --- pairs ----------------------------------------------------------------------------------------


def test_a_pair_is_a_public_record_and_the_update_that_a_client_sends_of_it() -> None:
    round_ = played()
    pairs = asked(aim(round_))
    assert pairs.read.shape == (60, 12 * 65 + 10 * 13)
    public = digits(100)
    shown = pairs.inputs([0, 17])
    rows = [(public.inputs == one[0]).flatten(1).all(1).nonzero()[0, 0] for one in shown]
    for k, row in zip((0, 17), rows, strict=True):
        live = {n: p.detach().requires_grad_() for n, p in round_.model.named_parameters()}
        out = torch.func.functional_call(round_.model, live, (public.inputs[row : row + 1],))
        loss = nn.functional.cross_entropy(out, public.labels[row : row + 1])
        gradient = torch.autograd.grad(loss, list(live.values()))
        wanted = 0.1 * torch.cat([g.flatten() for g in gradient])
        assert torch.allclose(pairs.read[k], wanted, atol=1e-7)


def test_the_pairs_held_out_share_no_record_with_the_others() -> None:
    public = digits(100, 130)  # fewer than pairs: later ones are variants
    pairs = asked(aim(played(), public), 80)
    assert pairs.held == 3
    assert pairs.variants == 80 - 3 - 27
    held = pairs.inputs(range(3)).flatten(1)
    own = pairs.inputs(range(3, 30)).flatten(1)
    assert not (held[:, None] == own[None]).all(2).any()
    later = pairs.inputs(range(30, 57)).flatten(1)
    assert not (later[:, None] == own[None]).all(2).any()  # varied, not shown again
    assert (later - own).square().mean() < (later - own.roll(1, 0)).square().mean()
    assert set(pairs.aside.tolist()).isdisjoint(pairs.fresh.tolist())


def test_no_more_are_held_out_than_a_tenth() -> None:
    assert asked(aim(played())).held == 6
    assert HELD == 500


def test_killed_pairs_go_on_where_they_were_and_are_the_same(tmp_path: Path) -> None:
    aimed = aim(played())
    whole = asked(aimed, 120, tmp_path / "whole")

    class Killed(Exception):
        pass

    def kill(done: int) -> None:
        if done == 100:
            raise Killed

    resources = Resources(folder=tmp_path / "part")
    with pytest.raises(Killed):
        Pairs.asked_of(aimed, 120, flat, resources, Clock.of(resources), kill)
    left = 0

    def counted(batch: Any, rng: torch.Generator) -> Named:
        nonlocal left
        left += 1
        assert aimed.query is not None
        return aimed.query(batch, rng)

    again = asked(replace(aimed, query=counted), 120, tmp_path / "part")
    assert left == 20
    assert torch.equal(again.read, whole.read)
    assert json.loads((tmp_path / "part" / "pairs.json").read_text())["done"] == 120


def test_without_a_folder_pairs_leave_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    pairs = asked(aim(played()))
    assert len(list(tmp_path.glob("*/pairs.f32"))) == 1
    pairs.close()
    assert not list(tmp_path.iterdir())
    LTI(pairs=40, steps=2, hidden=5).prepare(aim(played()), seeded())
    assert not list(tmp_path.iterdir())


def test_pairs_of_another_number_or_width_are_not_met(tmp_path: Path) -> None:
    aimed = aim(played())
    asked(aimed, 60, tmp_path)
    other = asked(aim(played(network(hidden=(7,)))), 60, tmp_path)
    fresh = asked(aim(played(network(hidden=(7,)))), 60)
    assert torch.equal(other.read, fresh.read)
    (tmp_path / "pairs.json").write_text("{broken")
    assert torch.equal(asked(aimed, 60, tmp_path).read, asked(aimed, 60).read)


def test_every_attack_learns_from_the_same_pairs() -> None:
    one, two = asked(aim(played())), asked(aim(played()))
    assert torch.equal(one.read, two.read)


def test_records_of_no_class_are_given_one() -> None:
    public = replace(digits(100), labels=torch.full_like(digits(100).labels, -1))
    assert asked(aim(played(), public)).read.isfinite().all()


def test_refusals_of_pairs() -> None:
    aimed = aim(played())
    with pytest.raises(InputError, match="at least 20 pairs, got 19"):
        check(aimed, 19)
    with pytest.raises(InputError, match=r"needs at least 2 public images.*got 1"):
        check(replace(aimed, public=digits(0, 1)), 20)
    with pytest.raises(Withheld, match="nobody to ask"):
        check(replace(aimed, query=None), 20)
    with pytest.raises(Withheld, match="holds none"):
        check(replace(aimed, public=None), 20)
    wrong = Dataset("wide", torch.rand(9, 1, 8, 9), torch.zeros(9).long(), digits().classes)
    with pytest.raises(InputError, match=r"\(1, 8, 9\).*\(1, 8, 8\)"):
        check(replace(aimed, public=wrong), 20)
    with pytest.raises(NotApplicable, match="time was up after 0 of 60 pairs"):
        asked(aimed, 60, seconds=0.0)


def test_updates_that_are_not_finite_are_refused() -> None:
    def broken(batch: Any, rng: torch.Generator) -> Named:
        return {n: torch.full(p.shape, torch.nan) for n, p in played().model.named_parameters()}

    with pytest.raises(InputError, match="not finite"):
        asked(replace(aim(played()), query=broken))


def test_a_sketch_keeps_lengths_and_angles_about_and_is_always_the_same() -> None:
    rows = torch.randn(40, 20_000, generator=seeded())
    short = torch.stack([sketched("w", row, 4000) for row in rows])
    assert short.shape == (40, 4000)
    ratio = short.norm(dim=1) / rows.norm(dim=1) * (20_000 / 4000) ** 0.5
    assert (ratio - 1).abs().max() < 0.1
    assert torch.equal(short[3], sketched("w", rows[3], 4000))
    assert not torch.equal(short[3], sketched("v", rows[3], 4000))
    assert torch.allclose(sketched("w", rows[0] + rows[1], 4000), short[0] + short[1], atol=1e-4)
    assert sketched("w", rows[0, :50], 50) is not None
    assert torch.equal(sketched("w", rows[0, :50], 50), rows[0, :50])


# --- the fit --------------------------------------------------------------------------------------


def test_several_records_are_paired_by_the_smallest_error() -> None:
    truth = torch.rand(3, 4, 5, generator=seeded())
    order = torch.tensor([[2, 0, 3, 1], [0, 1, 2, 3], [3, 2, 1, 0]])
    shown = torch.stack([one[o] for one, o in zip(truth, order, strict=True)])
    assert _errors(shown, truth).max() < 1e-12
    assert _errors(shown + 0.5, truth).mean() == pytest.approx(0.25, abs=1e-4)


def test_what_is_read_is_standardised_and_what_never_changes_is_left_out() -> None:
    rows = torch.tensor([[3.0, 7.0], [100.0, 8.0]])
    found = _standard(rows, torch.tensor([1.0, 7.0]), torch.tensor([2.0, torch.inf]))
    assert found.tolist() == [[1.0, 0.0], [10.0, 0.0]]
    assert _standard(rows, torch.empty(0), torch.empty(0)) is rows


@pytest.mark.parametrize("attack", [LTI(pairs=60, steps=60, hidden=20),
                                    GIT(pairs=60, steps=60, hidden=20)])  # fmt: skip
def test_a_killed_fit_ends_with_the_same_weights(attack: LTI | GIT, tmp_path: Path) -> None:
    aimed = aim(played(network("cnn", channels=3, hidden=12)))
    whole = attack.prepare(aimed, seeded(1)).kept

    class Killed(Exception):
        pass

    told: list[float] = []

    def kill(done: int, total: int, error: float) -> None:
        assert 0 <= done <= total
        told.append(error)
        if sum(e > 0 for e in told) == 31:
            raise Killed

    place = Checkpoint(tmp_path / "fit.safetensors", "key")
    part = Resources(progress=kill, checkpoint=place, folder=tmp_path / "bulky")
    with pytest.raises(Killed):
        attack.prepare(aimed, seeded(1), part)
    again = attack.prepare(aimed, seeded(1), replace(part, progress=None)).kept
    assert again.tensors.keys() == whole.tensors.keys()
    assert all(torch.equal(again.tensors[n], w) for n, w in whole.tensors.items())
    assert again.facts["psnr"] == whole.facts["psnr"]
    assert again.facts["steps"] == 60


def test_progress_ends_at_its_end() -> None:
    seen: list[tuple[int, int]] = []
    resources = Resources(progress=lambda done, total, error: seen.append((done, total)))
    LTI(pairs=60, steps=10, hidden=20).prepare(aim(played()), seeded(), resources)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert seen[-1][0] == seen[-1][1]


# --- attacks --------------------------------------------------------------------------------------


@pytest.mark.parametrize("attack", [LTI(), GIT()])
def test_they_learn_and_need_neither_weights_nor_labels(attack: Any) -> None:
    assert isinstance(attack, Learned)
    assert attack.needs == {"records", "public"}


@pytest.mark.parametrize(
    "attack",
    [LTI(pairs=600, steps=300, hidden=60), GIT(pairs=600, steps=300, hidden=30),
     GIT(pairs=600, steps=300, hidden=30, known=False),
     GIT("module", pairs=600, steps=300, hidden=30)],
)  # fmt: skip
def test_images_are_seen_that_were_never_learned(attack: LTI | GIT) -> None:
    round_ = played(network("cnn", channels=3, hidden=12))
    kept = attack.prepare(aim(round_), seeded(1)).kept
    seen = observe(round_, EAVESDROPPER, kept=kept)
    assert seen.weights is None
    guess = attack.reconstruct(seen, seeded())
    truth = round_.truths[0].inputs
    mean = digits(100).inputs.mean(0, keepdim=True)
    gain = metrics.psnr(guess.inputs, truth) - metrics.psnr(mean, truth)
    assert float(gain) > 1.5
    assert kept.facts["psnr"] > kept.facts["mean_psnr"] + 2
    assert guess.residual == kept.facts["mse"]
    assert guess.labels is None
    assert "600 pairs of public images of digits" in guess.notes[0]


def test_git_of_two_records_shows_both() -> None:
    round_ = played(network("cnn", channels=3, hidden=12), records=2)
    git = GIT(pairs=500, steps=200, hidden=30)
    kept = git.prepare(aim(round_), seeded(1)).kept
    guess = git.reconstruct(observe(round_, EAVESDROPPER, kept=kept), seeded())
    assert guess.inputs.shape == (2, 1, 8, 8)
    assert kept.facts["psnr"] > kept.facts["mean_psnr"]
    other = observe(played(network("cnn", channels=3, hidden=12)), EAVESDROPPER, kept=kept)
    with pytest.raises(NotApplicable, match="updates of 2 records, and this one is of 1"):
        git.reconstruct(other, seeded())


def test_a_defence_is_inside_the_pairs_and_the_update_is_read_as_it_was_sent() -> None:
    defence = Prune(share=0.9)
    round_ = played(network("cnn", channels=3, hidden=12), defence=defence)
    lti = LTI(pairs=40, steps=2, hidden=5)
    kept = lti.prepare(aim(round_), seeded(1)).kept
    assert kept.facts["defence"] == repr(defence)
    server = ThreatModel()
    seen = observe(round_, server, kept=kept)
    changed = adapted(seen, defence)
    plain, told = (lti.reconstruct(one, seeded()) for one in (seen, changed))
    assert torch.equal(plain.inputs, told.inputs)
    assert "which had passed the clients' defence" in plain.notes[0]
    bare = lti.prepare(target(round_, digits(100)), seeded(1)).kept
    assert bare.facts["defence"] is None
    assert not torch.equal(bare.tensors["read.mean"], kept.tensors["read.mean"])


def test_a_hybrid_begins_from_what_was_learned() -> None:
    round_ = played(network("lenet-zhu", init="wide-uniform"))
    git = GIT(pairs=500, steps=200, hidden=30)
    server = ThreatModel()
    kept = git.prepare(before(round_, server, digits(100)), seeded(1)).kept
    seen, truth = observe(round_, server, kept=kept), round_.truths[0].inputs
    search = InvertingGradients(iterations=60, lr=0.01)
    alone, start = search.reconstruct(seen, seeded()), git.reconstruct(seen, seeded())
    both = begun(git, search).reconstruct(seen, seeded())
    scores = [float(metrics.psnr(one.inputs, truth)) for one in (alone, start, both)]
    assert scores[2] > max(scores[:2])


# --- the recursion --------------------------------------------------------------------------------


class Skipped(nn.Module):
    """Two layers whose output joins what entered them, then a head."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, 4, 3, padding=1)
        self.inner = nn.Conv2d(4, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.outer = nn.Conv2d(4, 4, 3, padding=1)
        self.head = nn.Linear(4 * 64, 10)

    def forward(self, x: Tensor) -> Tensor:
        a = self.first(x).relu()
        b = self.outer(self.norm(self.inner(a)).relu())
        return self.head((a + b).relu().flatten(1))


def test_the_recursion_of_a_chain() -> None:
    steps = derived(network("lenet-zhu"), (1, 8, 8)).steps
    assert [step.name for step in steps] == ["flatten", "body_3", "body_1", "x"]
    assert steps[0].known == "fc.0"
    assert [step.after for step in steps[1:]] == [("flatten",), ("body_3",), ("body_1",)]
    assert set(steps[3].parameters) == {
        "body.0.weight", "body.0.bias", "body.2.weight", "body.2.bias"
    }  # fmt: skip


def test_a_skip_connection_brings_the_gradients_of_the_layer_that_it_meets() -> None:
    found = {step.name: step for step in derived(Skipped(), (1, 8, 8)).steps}
    image = found["x"]  # Eq. 12: its own layer, the next, and the one at the sum
    layers = {name.rpartition(".")[0] for name in image.parameters}
    assert layers == {"first", "inner", "outer"}
    inner = next(s for s in found.values() if "inner.weight" in s.parameters[:1])
    assert {n.rpartition(".")[0] for n in inner.parameters} == {"inner", "norm", "outer"}


def test_modules_are_one_step_each_and_attention_reads_queries_keys_and_values() -> None:
    model = models.make(
        "vit-small", shape=(1, 8, 8), classes=10, rng=seeded(), dim=16, depth=2, heads=2
    )
    fine, coarse = (derived(model, (1, 8, 8), modules=m) for m in (False, True))
    assert len(fine.steps) == 10
    assert len(coarse.steps) == 6
    (reads,) = [s for s in fine.steps if s.parameters[0] == "blocks.1.attn.qkv.weight"]
    layers = {n.rpartition(".")[0] for n in reads.parameters}  # Eq. 15
    assert layers == {"blocks.1.attn.qkv", "blocks.1.attn.proj"}
    blocks = [s for s in coarse.steps if s.parameters[0].startswith("blocks.0.attn.qkv")]
    assert "blocks.0.attn.proj.weight" in blocks[0].parameters


def test_no_weight_is_read_and_frozen_layers_give_no_gradient() -> None:
    model = Skipped()
    model.inner.requires_grad_(False)
    meta = Skipped().to("meta")
    meta.inner.requires_grad_(False)
    assert derived(model, (1, 8, 8)) == derived(meta, (1, 8, 8))
    assert not any("inner" in n for s in derived(meta, (1, 8, 8)).steps for n in s.parameters)


class Shifted(nn.Module):
    """Holds a tensor that is neither a parameter nor a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = torch.ones(64)
        self.fc = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.fc(x.flatten(1) + self.shift)
        return out


def test_plain_tensors_of_a_model_are_no_obstacle() -> None:
    assert [step.name for step in derived(Shifted(), (1, 8, 8)).steps] == ["x~", "x"]


def test_it_prints_as_lines() -> None:
    words = str(GIT().recursion(network("lenet-zhu"), (1, 8, 8)))
    assert words.splitlines()[0] == "flatten (48) = ∂b⁺ · g[fc.0]"
    assert words.splitlines()[-1].startswith("x (64) = f(body_1, g[body.0], g[body.2])")
    exact = str(GIT("exact").recursion(network(hidden=(5, 4)), (1, 8, 8)))
    assert exact.splitlines()[-1] == "x = δ1⁺ · g[fc1],  δ1 = W[fc2]ᵀ · δ2 ⊙ σ'(a1)"


def test_without_a_bias_the_head_is_read_by_a_network() -> None:
    model = network("lenet-zhu")
    model.get_submodule("fc.0").register_parameter("bias", None)
    steps = derived(model, (1, 8, 8)).steps
    assert steps[0].known is None
    assert steps[0].parameters == ("fc.0.weight",)
    assert steps[0].after == ()


class Untraceable(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 0:
            x = -x
        out: Tensor = self.fc(x.flatten(1))
        return out


def test_what_git_cannot_follow_it_says() -> None:
    with pytest.raises(NotApplicable, match=r"cannot trace this model.*LTI needs no graph"):
        derived(Untraceable(), (1, 8, 8))
    with pytest.raises(NotApplicable, match="no linear or convolutional layer"):
        derived(nn.Sequential(nn.Flatten(), nn.BatchNorm1d(64)), (1, 8, 8))
    with pytest.raises(NotApplicable, match=r"exact recursion.*this model has a Conv2d"):
        GIT("exact").recursion(network("lenet-zhu"), (1, 8, 8))
    two = played(records=2)
    with pytest.raises(NotApplicable, match="one record, and this one is of 2"):
        GIT("exact", pairs=40).prepare(aim(two), seeded())
    bare = nn.Sequential(nn.Flatten(), nn.Linear(64, 5, bias=False), nn.Tanh(), nn.Linear(5, 10))
    with pytest.raises(NotApplicable, match=r"trained, and 1.bias is not"):
        GIT("exact").recursion(bare, (1, 8, 8))


@pytest.mark.parametrize("activation", ["relu", "tanh", "sigmoid"])
def test_with_the_true_weights_the_exact_recursion_is_exact(activation: str) -> None:
    model = network(hidden=(12, 9), activation=activation)
    round_ = played(model)
    git = GIT("exact")
    built = git.network(round_.setting, 1)
    weights = {n: p.detach() for n, p in model.named_parameters() if n in built.shapes}
    shown = built.forward(weights, built.reader(round_.updates[0])[None])
    assert torch.allclose(shown.view(1, 1, 8, 8), round_.truths[0].inputs, atol=2e-4)
    assert built.also is not None
    assert float(built.also(weights, built.reader(round_.updates[0])[None])) < 1e-6
    wrong = {n: -w for n, w in weights.items()}
    assert float(built.also(wrong, built.reader(round_.updates[0])[None])) > 0.1
