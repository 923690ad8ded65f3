"""Attacks: what every one of them promises, and for each a case where theory gives the answer."""

from __future__ import annotations

import copy
import dataclasses
import json
import math
from collections.abc import Callable
from functools import cache
from typing import Any, get_args

import pytest
import torch
from torch import Tensor, nn

from leakgauge import metrics, models, priors
from leakgauge.attacks import (
    ATTACKS,
    DLG,
    GIT,
    IDLG,
    LTI,
    ROG,
    Analytic,
    CuriousClient,
    ExactRecursion,
    FedInverse,
    GuidedDiffusion,
    InvertingGradients,
    SeparateAndDecode,
    SmoothToSharp,
)
from leakgauge.attacks._layers import first_linear, gradient_sum, last_linear
from leakgauge.attacks._spaces import SPACES, SpaceName
from leakgauge.attacks.analytic import grouped, unexplained
from leakgauge.data.digits import digits as load_digits
from leakgauge.errors import NotApplicable, Withheld
from leakgauge.fl import Scenario, simulate
from leakgauge.fl.local import decay, train
from leakgauge.metrics.identify import reidentified
from leakgauge.priors import DDPM
from leakgauge.records import AS_THEY_ARE, Scale
from leakgauge.threat import before, check, covered, observe
from leakgauge.types import (
    Attack,
    Batch,
    Dataset,
    Kept,
    Knowledge,
    LocalTraining,
    Observation,
    PreparedAttack,
    Reconstruction,
    Resources,
    Round,
    Target,
    ThreatModel,
)

SHAPE = (1, 8, 8)
RECOGNISED = 20.0  # dB: "very high" on the project's scale of risk


@cache
def digits() -> Dataset:
    """Real images, small enough to attack in a second."""
    return load_digits()


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def network(name: str, seed: int = 0, **options: Any) -> nn.Module:
    return models.make(name, shape=SHAPE, classes=10, rng=seeded(seed), **options)


def played(
    model: nn.Module,
    training: LocalTraining | None = None,
    *,
    seed: int = 0,
    records: int | None = None,
    scale: Scale = AS_THEY_ARE,
) -> Round:
    scenario = Scenario(
        lambda: model,
        digits(),
        training or LocalTraining(),
        clients=2,
        records=records,
        scale=scale,
    )
    return simulate(scenario, seeded(seed))


def attacked(
    attack: Attack, round_: Round, *, seed: int = 0, grants: frozenset[Knowledge] | None = None
) -> tuple[Reconstruction, Batch]:
    """What the attack makes of client 0's update, and the truth: they meet in tests only."""
    threat = ThreatModel(grants=attack.needs if grants is None else grants)
    check("attack", attack, threat)
    return attack.reconstruct(shown(attack, round_, threat), seeded(seed)), covered(round_, threat)


def paired(guess: Tensor, truth: Tensor) -> Tensor:
    """PSNR of each truth by the best one-to-one pairing."""
    return metrics.psnr(guess[metrics.assign.optimal(guess, truth)], truth)


# ---------------------------------------------------------------- the contract


def quick(name: str, **options: Any) -> Attack:
    """The attack with a few iterations, or of what learns, a few pairs; a search does search."""
    known = {f.name for f in dataclasses.fields(ATTACKS[name])}  # type: ignore[arg-type]
    short: dict[str, Any] = {"iterations": 4, "exact": False, "training": 1}
    short |= {"pairs": 24, "steps": 3} if "pairs" in known else {}
    short |= {"steps": 2, "candidates": 4} if "prior" in known else {}
    return ATTACKS[name](**{k: v for k, v in (short | options).items() if k in known})


def tiny() -> nn.Module:
    """Linear at both ends, so that every attack applies."""
    return network("mlp", hidden=(12,), activation="sigmoid")


def exactly(attack: Attack) -> ThreatModel:
    """The threat model that grants what the attack needs, and nothing else."""
    if "weights" not in attack.needs:  # everybody else holds them
        return ThreatModel(actor="eavesdropper", grants=attack.needs)
    actor = "client" if "own" in attack.needs else "server"
    return ThreatModel(actor=actor, grants=attack.needs - {"own"})


def public() -> Dataset:
    """Records that are no client's: those of a round come before them."""
    data = digits()
    return Dataset("public digits", data.inputs[-200:], data.labels[-200:], data.classes)


def shown(attack: Attack, round_: Round, threat: ThreatModel | None = None) -> Observation:
    """What the attacker holds: the observation, with what the attack prepared before the round."""
    kept, threat = None, threat or exactly(attack)
    if isinstance(attack, PreparedAttack):
        kept = attack.prepare(before(round_, threat, public()), seeded(3)).kept
    return observe(round_, threat, kept=kept)


class Forbidden:
    """A truth that cannot be looked at."""

    def __getattribute__(self, name: str) -> Any:
        raise AssertionError(f"the truth was read: {name}")


def same(left: Reconstruction, right: Reconstruction) -> bool:
    def plain(guess: Reconstruction) -> tuple[Any, ...]:
        labels = None if guess.labels is None else guess.labels.tolist()
        return (
            guess.inputs.numpy().tobytes(),
            guess.inputs.shape,
            labels,
            guess.residual,
            guess.history,
            guess.distances,
            guess.notes,
            guess.facts,
        )

    return plain(left) == plain(right)


@pytest.mark.parametrize("name", ATTACKS)
def test_same_seed_same_bytes_whatever_the_global_generator_holds(name: str) -> None:
    attack = quick(name)
    seen = shown(attack, played(tiny()))
    guesses = []
    for state in (1, 2):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(state)
            before = torch.random.get_rng_state()
            guesses.append(attack.reconstruct(seen, seeded(7)))
            assert torch.equal(torch.random.get_rng_state(), before)
    assert same(*guesses)


@pytest.mark.parametrize("name", ATTACKS)
def test_the_same_bytes_wherever_the_update_lies_in_memory(name: str) -> None:
    attack = quick(name)
    seen = shown(attack, played(tiny()))
    update = {}
    for key, value in seen.update.items():
        block = torch.empty(value.numel() + 1)  # entries begin 4 bytes behind its start
        update[key] = block[1:].view(value.shape).copy_(value)
    moved = dataclasses.replace(seen, update=update)
    assert same(attack.reconstruct(seen, seeded(7)), attack.reconstruct(moved, seeded(7)))


CLOSED = {
    "analytic",
    "exact-recursion",
    "git",
    "lti",
    "separate-and-decode",
}  # linear algebra down to the image, or learned before: nothing is drawn


@pytest.mark.parametrize("name", [name for name in ATTACKS if name not in CLOSED])
def test_another_seed_starts_elsewhere(name: str) -> None:
    attack = quick(name)
    seen = shown(attack, played(tiny()))
    assert not same(attack.reconstruct(seen, seeded(1)), attack.reconstruct(seen, seeded(2)))


@pytest.mark.parametrize("name", ATTACKS)
@pytest.mark.parametrize("training", [True, False])
def test_the_observation_is_left_untouched(name: str, training: bool) -> None:
    attack = quick(name)
    seen = shown(attack, played(tiny()), ThreatModel(grants=attack.needs))
    seen.model.train(training)
    model, update = copy.deepcopy((seen.model.state_dict(), seen.update))
    attack.reconstruct(seen, seeded())
    for old, new in ((model, seen.model.state_dict()), (update, seen.update)):
        assert old.keys() == new.keys()
        assert all(torch.equal(old[key], new[key]) for key in old)
    assert all(module.training is training for module in seen.model.modules())
    assert all(p.requires_grad and p.grad is None for p in seen.model.parameters())
    assert not any(m._forward_hooks for m in seen.model.modules())
    assert not any(u.requires_grad for u in seen.update.values())


@pytest.mark.parametrize("name", ATTACKS)
def test_runs_with_everything_withheld_that_it_does_not_declare(name: str) -> None:
    attack = quick(name)
    threat = exactly(attack)
    seen = shown(attack, played(tiny()), threat)
    for item in {*get_args(Knowledge)} - {"public"}:  # that is met in prepare() alone
        assert (getattr(seen, item) is not None) == (item in attack.needs)
    check(name, attack, threat)
    guess = attack.reconstruct(seen, seeded())
    assert guess.inputs.shape == (1, *SHAPE)


@pytest.mark.parametrize("name", ATTACKS)
def test_is_refused_when_a_need_is_withheld(name: str) -> None:
    attack = quick(name)
    assert attack.needs
    round_ = played(tiny())
    for item in attack.needs - {"own", "public"}:
        actor = "eavesdropper" if item == "weights" else "server"
        threat = ThreatModel(actor, grants=attack.needs - {item})
        with pytest.raises(Withheld, match=rf"{name}.*needs '{item}'.*threat.grants"):
            check(name, attack, threat)
        with pytest.raises(Withheld):  # and by the attack itself, if nobody asked
            attack.reconstruct(shown(attack, round_, threat), seeded())
    if "public" in attack.needs:  # held or not, and met in prepare() alone
        with pytest.raises(Withheld, match=rf"{name}.*needs 'public'.*federation.public"):
            check(name, attack, exactly(attack), public=False)
        assert isinstance(attack, PreparedAttack)
        with pytest.raises(Withheld, match="public"):
            attack.prepare(Target(round_.setting, round_.training, 1), seeded())
        with pytest.raises(Withheld, match="prepare"):
            attack.reconstruct(observe(round_, exactly(attack)), seeded())


@pytest.mark.parametrize("name", ATTACKS)
def test_never_sees_the_truth(name: str) -> None:
    """Everything downstream of the round works although its truths cannot be read."""
    attack = quick(name)
    assert not {"labels", "own"} & attack.needs  # it would be granted a part of the truth
    round_ = played(tiny())
    blind = dataclasses.replace(round_, truths=(Forbidden(), Forbidden()))
    with pytest.raises(AssertionError, match="the truth was read"):
        covered(blind, ThreatModel())
    guess = attack.reconstruct(shown(attack, blind), seeded())
    assert same(guess, attack.reconstruct(shown(attack, round_), seeded()))


@pytest.mark.parametrize("name", ATTACKS)
def test_a_guess_is_what_the_type_says(name: str) -> None:
    attack = quick(name)
    guess = attack.reconstruct(shown(attack, played(tiny())), seeded())
    assert guess.inputs.dtype == torch.float32
    assert float(guess.inputs.min()) >= 0
    assert float(guess.inputs.max()) <= 1
    assert not guess.inputs.requires_grad
    if guess.labels is not None:
        assert guess.labels.dtype == torch.int64
        assert guess.labels.shape == (1,)
    assert math.isfinite(guess.residual)
    assert all(isinstance(note, str) for note in guess.notes)
    json.dumps(guess.facts)


@pytest.mark.parametrize("name", ATTACKS)
def test_works_within_the_given_resources(name: str) -> None:
    attack = quick(name, iterations=50)
    seen = shown(attack, played(tiny()))
    calls: list[tuple[int, int, float]] = []
    resources = Resources(
        dtype=torch.float64, seconds=0.0, progress=lambda *call: calls.append(call)
    )
    guess = attack.reconstruct(seen, seeded(), resources)
    if guess.history:
        assert calls == [(1, 50, guess.history[0])]
        assert "stopped by the time budget" in guess.notes[-1]


@pytest.mark.parametrize("name", ATTACKS)
def test_is_a_frozen_dataclass_of_plain_knobs(name: str) -> None:
    attack = ATTACKS[name]()
    assert attack == ATTACKS[name]()
    json.dumps(dataclasses.asdict(attack))  # type: ignore[call-overload]
    with pytest.raises(dataclasses.FrozenInstanceError):
        attack.iterations = 1  # type: ignore[attr-defined]


# ---------------------------------------------------------------- exact cases, one an attack


def exact_analytic() -> None:
    guess, truth = attacked(Analytic(), played(network("mlp", hidden=(32,))))
    assert float(metrics.psnr(guess.inputs, truth.inputs)) > 100
    assert guess.residual < 1e-6


def exact_dlg() -> None:
    """The paper's network and initialisation: image and label, from noise."""
    round_ = played(network("lenet-zhu", seed=1, init="wide-uniform"), seed=1)
    guess, truth = attacked(DLG(iterations=150), round_)
    assert float(metrics.psnr(guess.inputs, truth.inputs)) > 60
    assert guess.labels is not None
    assert guess.labels.tolist() == truth.labels.tolist()
    assert guess.residual < 1e-6 * guess.history[0]


def exact_idlg() -> None:
    round_ = played(network("lenet-zhu", seed=2, init="wide-uniform"), seed=2)
    guess, truth = attacked(IDLG(iterations=120), round_)
    assert float(metrics.psnr(guess.inputs, truth.inputs)) > 60
    assert guess.labels is not None
    assert guess.labels.tolist() == truth.labels.tolist()


def exact_inverting_gradients() -> None:
    """A digit that is nearer to its own truth than to any of 300 others."""
    round_ = played(network("lenet-zhu", seed=1, init="wide-uniform"), seed=1)
    guess, truth = attacked(InvertingGradients(iterations=100, tv=1e-4), round_)
    start, _ = attacked(InvertingGradients(iterations=1, tv=1e-4), round_)
    score, first = (float(metrics.psnr(g.inputs, truth.inputs)) for g in (guess, start))
    assert score > RECOGNISED
    assert score > first + 10
    assert guess.labels is not None
    assert guess.labels.tolist() == truth.labels.tolist()
    others = digits().inputs[:300]
    others = others[(others != truth.inputs).flatten(1).any(1)]
    gallery = torch.cat([truth.inputs, others])
    assert reidentified(guess.inputs, torch.tensor([0]), gallery).tolist() == [1]


def recognises(attack: Attack) -> None:
    """A digit as good as to the eye, with its label, from noise."""
    round_ = played(network("lenet-zhu", seed=1, init="wide-uniform"), seed=1)
    guess, truth = attacked(attack, round_)
    assert float(metrics.psnr(guess.inputs, truth.inputs)) > RECOGNISED
    assert guess.labels is not None
    assert guess.labels.tolist() == truth.labels.tolist()


def exact_coarse_to_fine() -> None:
    """What the fine stage is for: beyond recognition to the last digit."""
    round_ = played(network("lenet-zhu", seed=1, init="wide-uniform"), seed=1)
    scores = []
    for options in ({"iterations": 75, "coarse": 1.0}, {"iterations": 150}):
        guess, truth = attacked(quick("coarse-to-fine", tv=0.0, **options), round_)
        scores.append(float(metrics.psnr(guess.inputs, truth.inputs)))
    coarse, fine = scores
    assert coarse > RECOGNISED
    assert fine > coarse + 20


def exact_exact_recursion() -> None:
    """A batch of four: every digit, each with its own label."""
    training = LocalTraining(batch_size=4, batch_norm="eval")
    guess, truth = attacked(ExactRecursion(), played(network("mlp", hidden=(64,)), training))
    order = metrics.assign.optimal(guess.inputs, truth.inputs)
    assert float(metrics.psnr(guess.inputs[order], truth.inputs).min()) > 80
    assert guess.labels is not None
    assert guess.labels[order].tolist() == truth.labels.tolist()
    assert guess.residual < 1e-4


def exact_fedavg_epochs() -> None:
    """Two epochs, searched apart, agree on the digit."""
    training = LocalTraining(lr=0.05, epochs=2, order="shuffled")
    round_ = played(network("lenet-zhu", seed=1, init="wide-uniform"), training, seed=1, records=1)
    guess, truth = attacked(quick("fedavg-epochs", iterations=60), round_)
    assert guess.facts["epochs"] == 2
    assert float(metrics.psnr(guess.inputs, truth.inputs)) > RECOGNISED + 5


def exact_curious_client() -> None:
    """Every image of the other client, from two global models, by the exact recursion."""
    training = LocalTraining(batch_size=4, batch_norm="eval", lr=0.1)
    round_ = played(network("mlp", hidden=(64,)), training)
    threat = ThreatModel("client")
    guess = CuriousClient().reconstruct(observe(round_, threat), seeded())
    truth = covered(round_, threat)
    assert len(truth) == 4
    assert guess.facts["own"] == "subtract"
    order = metrics.assign.optimal(guess.inputs, truth.inputs)
    assert float(metrics.psnr(guess.inputs[order], truth.inputs).min()) > 60
    assert guess.labels is not None
    assert guess.labels[order].tolist() == truth.labels.tolist()


def convolutions(norms: bool) -> nn.Module:
    """Of which the last tells records apart, and no layer below leads down to the image."""
    widths = (1, 8, 16, 128)
    layers: list[nn.Module] = []
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        for k in range(3):
            stride = 2 if k == 1 else 1
            layers.append(nn.Conv2d(widths[k], widths[k + 1], 3, stride=stride, padding=1))
            layers += [nn.BatchNorm2d(widths[k + 1])] * norms + [nn.ReLU()]
        return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 10))


def exact_separate_and_decode() -> None:
    """From a poor decoder's images to every digit of four, each with its own label; but for the
    contrast, which batch norm leaves open, where there are norms."""
    attack = SeparateAndDecode(steps=100, images=400, evaluations=200)
    for norms, training in (
        (False, LocalTraining(batch_size=4)),
        (True, LocalTraining(batch_size=2, steps=2, lr=0.01)),
    ):
        guess, truth = attacked(attack, played(convolutions(norms), training, records=4))
        order = metrics.assign.optimal(guess.inputs, truth.inputs)
        score = metrics.affine_psnr if norms else metrics.psnr
        assert float(score(guess.inputs[order], truth.inputs).min()) > 60
        assert guess.labels is not None
        assert guess.labels[order].tolist() == truth.labels.tolist()
        assert guess.residual < 1e-2
        assert max(guess.facts["misfits"]) < 1e-6
        assert guess.facts["decoder_psnr"] < 25  # the search is what makes it exact


def test_a_rough_update_is_decoded_from_where_its_records_are_told_apart() -> None:
    """Noise stops the peeling above the node that the rehearsal reached: another decoder begins."""
    attack = SeparateAndDecode(steps=100, images=400, evaluations=100)
    round_ = played(convolutions(True), LocalTraining(batch_size=4), records=4)
    rng = seeded(7)
    for value in round_.updates[0].values():
        value += 2e-2 * value.square().mean().sqrt() * torch.randn(value.shape, generator=rng)
    guess, truth = attacked(attack, round_)
    order = metrics.assign.optimal(guess.inputs, truth.inputs)
    assert guess.labels is not None
    assert guess.labels[order].tolist() == truth.labels.tolist()
    assert guess.facts["decoder_node"] == guess.facts["peeled_to"]
    mean = metrics.affine_psnr(truth.inputs.mean(0).expand_as(truth.inputs), truth.inputs)
    shown = metrics.affine_psnr(guess.inputs[order], truth.inputs)  # contrast is open
    assert float((shown - mean).mean()) > 3


def exact_git() -> None:
    """The exact recursion finds the image, and the weights that it was never shown: those of a
    network whose errors, of nine dimensions, show them all."""
    model = network("mlp", hidden=(12, 8), activation="tanh")
    git = GIT(steps_of="exact", pairs=900, steps=1500, lr=0.03, batch=64)
    round_ = played(model, LocalTraining(lr=0.1))
    threat = exactly(git)
    data = digits()
    others = Dataset("others", data.inputs[100:], data.labels[100:], data.classes)
    kept = git.prepare(before(round_, threat, others), seeded(3)).kept
    guess = git.reconstruct(observe(round_, threat, kept=kept), seeded())
    assert float(metrics.psnr(guess.inputs, covered(round_, threat).inputs)) > 40
    truth, found = model.get_parameter("fc3.weight").detach(), kept.tensors["fc3.weight"]
    truth, found = truth - truth.mean(0), found - found.mean(0)  # a shift of all logits is not seen
    assert float((found - truth).norm() / truth.norm()) < 0.1


def exact_guided_diffusion() -> None:
    """Led by the gradient it draws digits whose gradient is near the observed one; what it draws
    of the same prior without, is not. A step uphill would lead away."""
    round_ = played(network("lenet-zhu", seed=1), LocalTraining(batch_size=2), records=2)
    threat, data = ThreatModel(), digits()
    others = Dataset("others", data.inputs[100:], data.labels[100:], data.classes)
    kept = DDPM(steps=120, batch=16, widths=(16, 16), lr=3e-3).train(others, seeded(3))
    guided = GuidedDiffusion(prior="given", iterations=40)
    assert "public" not in guided.needs
    assert "public" in GuidedDiffusion().needs
    guess = guided.reconstruct(observe(round_, threat, kept=kept), seeded())
    assert guess.prior is not None
    assert guess.prior.shape == guess.inputs.shape

    def distance(inputs: Tensor, labels: Tensor) -> float:
        sent = train(round_.setting, Batch(inputs, labels), round_.training, seeded()).update
        own, true = (
            torch.cat([v.flatten() for v in u.values()]) for u in (sent, round_.updates[0])
        )
        return 1 - float(torch.cosine_similarity(own, true, dim=0))

    assert guess.labels is not None
    led, alone = distance(guess.inputs, guess.labels), distance(guess.prior, guess.labels)
    assert led == pytest.approx(guess.residual, rel=1e-2, abs=1e-5)
    assert led < 0.25 * alone
    truth = covered(round_, threat).inputs
    assert float(paired(guess.inputs, truth).median()) > float(paired(guess.prior, truth).median())


def exact_lti() -> None:
    """A network without hidden layers in a world where the update is the image, times a class."""
    model = network("mlp", hidden=())
    lti = LTI(pairs=1200, steps=500, hidden=200, layers=1)
    round_ = played(model, LocalTraining(lr=0.1))
    threat = exactly(lti)
    data = digits()
    others = Dataset("others", data.inputs[100:], data.labels[100:], data.classes)
    kept = lti.prepare(before(round_, threat, others), seeded(3)).kept
    guess = lti.reconstruct(observe(round_, threat, kept=kept), seeded())
    psnr = float(metrics.psnr(guess.inputs, covered(round_, threat).inputs))
    assert psnr > kept.facts["mean_psnr"] + 4
    assert kept.facts["psnr"] > kept.facts["mean_psnr"] + 6


def exact_smooth_to_sharp() -> None:
    """The finish reaches the solution to the digits of the float32 update."""
    round_ = played(network("lenet-zhu", seed=1, init="wide-uniform"), seed=1)
    guess, truth = attacked(SmoothToSharp(iterations=300, basin=1.0), round_)
    assert guess.facts["finish"] == "second order"
    assert float(metrics.psnr(guess.inputs, truth.inputs)) > 75
    assert guess.residual < 1e-9


def shown_by(kept: Kept) -> Round:
    """A round on images that a generator can show."""
    images = priors.opened(kept).sample(4, seeded(9))
    data = Dataset("shown", images, torch.arange(4), digits().classes)
    model = network("lenet-zhu", seed=1, init="wide-uniform")
    return simulate(Scenario(lambda: model, data, LocalTraining()), seeded())


def exact_generator(attack: Attack) -> None:
    """What the generator can show is found among all that it can."""
    kept = priors.GAN(latent=6, width=16, steps=20, batch=16).train(public(), seeded(1))
    round_ = shown_by(kept)
    threat = exactly(attack)
    guess = attack.reconstruct(observe(round_, threat, kept=kept), seeded())
    assert float(metrics.psnr(guess.inputs, covered(round_, threat).inputs)) > 35


def exact_rog() -> None:
    """An image that is an enlarged one, and a restorer that has learned next to nothing."""
    small = torch.rand(4, 1, 4, 4, generator=seeded(2))
    images = nn.functional.interpolate(small, size=(8, 8), mode="bicubic").clamp(0, 1)
    data = Dataset("enlarged", images, torch.arange(4), digits().classes)
    model = network("lenet-zhu", seed=1, init="wide-uniform")
    round_ = simulate(Scenario(lambda: model, data, LocalTraining()), seeded())
    guess, truth = attacked(ROG(iterations=150, factor=2, tv=0.0, steps=1), round_)
    assert float(metrics.psnr(guess.inputs, truth.inputs)) > 30


def exact_fedinverse() -> None:
    """A linear model, of which each class looks at one part of the picture: the prototype of a
    class is bright there."""
    model = network("mlp", hidden=())
    with torch.no_grad():
        model.fc1.weight.zero_()
        for c in range(10):
            model.fc1.weight[c, 6 * c : 6 * c + 6] = 10.0
    attack = FedInverse(images="classes", iterations=150, near=0.0, steps=20)
    guess, _ = attacked(attack, played(model))
    assert guess.prior is not None
    for images, least, most in ((guess.inputs, 0.8, 1.0), (guess.prior, 0.0, 0.5)):
        with torch.no_grad():
            sure = model(images).softmax(1).diagonal().mean()
        assert least < float(sure) < most
    parts = guess.inputs.flatten(1)[:, :60].view(10, 10, 6).mean(2)
    assert parts.argmax(1).tolist() == list(range(10))


EXACT: dict[str, Callable[[], None]] = {
    "ci-net": lambda: recognises(quick("ci-net", iterations=200)),
    "fedinverse": exact_fedinverse,
    "ggl": lambda: exact_generator(quick("ggl", iterations=120, near=0.0)),
    "gias": lambda: exact_generator(quick("gias", iterations=200, latent=1.0, restarts=3)),
    "rog": exact_rog,
    "agic": lambda: recognises(quick("agic", iterations=100)),
    "bayes": lambda: recognises(quick("bayes", iterations=100, noise="gaussian", sigma=1e-5)),
    "gradinversion": lambda: recognises(quick("gradinversion", iterations=100)),
    "hfgradinv": lambda: recognises(quick("hfgradinv", iterations=100)),
    "sapag": lambda: recognises(quick("sapag", iterations=100)),
    "analytic": exact_analytic,
    "coarse-to-fine": exact_coarse_to_fine,
    "curious-client": exact_curious_client,
    "dlg": exact_dlg,
    "exact-recursion": exact_exact_recursion,
    "fedavg-epochs": exact_fedavg_epochs,
    "git": exact_git,
    "guided-diffusion": exact_guided_diffusion,
    "lti": exact_lti,
    "fedleak": lambda: recognises(quick("fedleak", iterations=100)),
    "idlg": exact_idlg,
    "inverting-gradients": exact_inverting_gradients,
    "separate-and-decode": exact_separate_and_decode,
    "smooth-to-sharp": exact_smooth_to_sharp,
}


@pytest.mark.parametrize("name", EXACT)
def test_exact_case(name: str) -> None:
    EXACT[name]()


def test_every_attack_has_an_exact_case() -> None:
    assert EXACT.keys() == ATTACKS.keys()


# ---------------------------------------------------------------- analytic


@pytest.mark.parametrize(
    ("training", "scale"),
    [
        (LocalTraining(lr=0.1, steps=5), AS_THEY_ARE),
        (LocalTraining(lr=0.1, steps=5, momentum=0.9), AS_THEY_ARE),
        (LocalTraining(lr=0.1, weight_decay=0.3), AS_THEY_ARE),
        (LocalTraining(lr=0.1, steps=5, momentum=0.9, weight_decay=0.3), AS_THEY_ARE),
        (LocalTraining(lr=0.1), Scale((0.3,), (0.2,))),
        (LocalTraining(lr=0.1, steps=3, weight_decay=0.1), Scale((0.3,), (0.2,))),
    ],
    ids=["steps", "momentum", "decay", "momentum and decay", "normalised", "all"],
)
def test_analytic_is_exact_after_any_training_by_sgd(training: LocalTraining, scale: Scale) -> None:
    round_ = played(network("mlp", hidden=(32,), activation="sigmoid"), training, scale=scale)
    guess, truth = attacked(Analytic(), round_)
    assert float(metrics.psnr(guess.inputs, truth.inputs)) > 100


def isolating(images: Tensor) -> nn.Module:
    """Units that only one of the images switches on, two of each, beside units that mix all."""
    wanted = torch.eye(len(images)) - 0.5  # (images, units): pre-activations, positive for one
    mixed = torch.tensor([[1.0, 2.0, 1.0], [1.0, 1.0, 3.0], [2.0, 1.0, 1.0]])
    flat = images.flatten(1)
    weights = torch.linalg.pinv(flat) @ torch.cat([wanted, 2 * wanted, mixed], 1)
    model = network("mlp", hidden=(weights.shape[1],))
    with torch.no_grad():
        model.fc1.weight.copy_(weights.T)
        model.fc1.bias.zero_()
    return model


def test_analytic_finds_every_record_of_a_batch_that_has_its_own_units() -> None:
    training = LocalTraining(batch_size=3)
    images = played(tiny(), training).truths[0].inputs  # the same seed draws the same records
    round_ = played(isolating(images), training)
    assert torch.equal(round_.truths[0].inputs, images)
    guess, truth = attacked(Analytic(), round_)
    assert guess.inputs.shape == truth.inputs.shape
    assert float(paired(guess.inputs, truth.inputs).min()) > 100
    assert guess.residual < 1e-5


def test_analytic_residual_says_when_records_are_missing() -> None:
    """A batch on units that all records share: mixtures, and not enough of them to explain it."""
    training = LocalTraining(batch_size=8)
    round_ = played(network("mlp", hidden=(4,), activation="sigmoid"), training)
    guess, truth = attacked(Analytic(), round_)
    assert len(guess.inputs) <= 4 < len(truth)
    assert float(metrics.pairwise_mse(guess.inputs, truth.inputs).min()) > 1e-4
    # With everything in one group, a single mixture explains little.
    one, _ = attacked(Analytic(tolerance=1e9), round_)
    assert len(one.inputs) == 1
    assert one.residual > 0.05


def test_rows_are_grouped_by_agreement_the_largest_group_first() -> None:
    a, b, c = torch.eye(3)
    rows = torch.stack([a, b, c * 5, b * 1.0001, c * 5.001, b])
    assert torch.equal(grouped(rows, 1e-3), torch.stack([b, c * 5, a]))


def test_unexplained_is_the_share_outside_the_span() -> None:
    found = torch.eye(4)[:2].double()
    inside = torch.tensor([[2.0, -3.0, 0.0, 0.0]]).double()
    outside = torch.tensor([[0.0, 0.0, 3.0, 0.0], [4.0, 0.0, 0.0, 0.0]]).double()
    assert unexplained(inside, found) == pytest.approx(0, abs=1e-12)
    assert unexplained(outside, found) == pytest.approx(3 / 5)


def test_decay_is_the_share_that_weights_lose_without_a_gradient() -> None:
    assert decay(LocalTraining(lr=0.1), 7) == 0
    assert decay(LocalTraining(lr=0.1, weight_decay=0.3), 2) == pytest.approx(1 - 0.97**2)


@pytest.mark.parametrize("optimiser", ["sgd", "adam"])
def test_weight_decay_is_undone_where_it_is_known(optimiser: Any) -> None:
    """All pixels are zero: the first weights get no gradient, and weight decay alone moves them."""
    training = LocalTraining(lr=0.1, steps=4, momentum=0.5, weight_decay=0.3, optimiser=optimiser)
    black = dataclasses.replace(digits(), inputs=torch.zeros_like(digits().inputs))
    round_ = simulate(Scenario(tiny, black, training), seeded())
    seen = observe(round_, ThreatModel(grants=frozenset({"training", "records"})))
    name = first_linear(seen.model, SHAPE).weight
    assert name is not None
    assert seen.update[name].abs().max() > 1e-3
    for least in (torch.float32, torch.float64):
        left = gradient_sum(seen, name, least)
        assert left.dtype == least
        if optimiser == "sgd":
            assert left.abs().max() < 1e-7
        else:
            assert torch.equal(left, seen.update[name].to(least))
    with pytest.raises(Withheld, match="'training' and 'records'"):
        gradient_sum(dataclasses.replace(seen, records=None), name)


def test_analytic_refuses_updates_that_are_not_sums_of_gradients() -> None:
    with pytest.raises(NotApplicable, match="'adam' is rescaled"):
        attacked(Analytic(), played(tiny(), LocalTraining(optimiser="adam")))


def test_analytic_refuses_a_layer_that_no_gradient_reached() -> None:
    model = network("mlp", hidden=(12,))
    nn.init.constant_(model.fc1.bias, -100.0)  # every ReLU is off
    with pytest.raises(NotApplicable, match=r"'fc1.bias' is zero everywhere"):
        attacked(Analytic(), played(model))


def frozen_first() -> nn.Module:
    model = tiny()
    model.fc1.requires_grad_(False)
    return model


def without_bias() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 12, bias=False), nn.Linear(12, 10))


@pytest.mark.parametrize("make", [lambda: network("lenet-zhu"), frozen_first, without_bias])
def test_analytic_refuses_models_without_a_linear_layer_on_the_image(
    make: Callable[[], nn.Module],
) -> None:
    with pytest.raises(NotApplicable, match="fed the image itself; this model has none"):
        attacked(Analytic(), played(make()))


# ---------------------------------------------------------------- the others


def test_idlg_refuses_two_records_and_names_the_rule_that_takes_them() -> None:
    round_ = played(tiny(), LocalTraining(batch_size=2))
    with pytest.raises(NotApplicable, match="covers 2: use the rule 'counts'"):
        attacked(quick("idlg"), round_)
    guess, truth = attacked(quick("idlg", labels="counts"), round_)
    assert guess.inputs.shape == truth.inputs.shape


def test_dlg_and_idlg_take_adam_where_lbfgs_does_not_move() -> None:
    round_ = played(tiny())
    for attack in (DLG(40, lr=0.2, optimiser="adam"), IDLG(40, lr=0.2, optimiser="adam")):
        guess, _ = attacked(attack, round_)
        assert len(guess.history) == 40
        assert min(guess.history) < 0.3 * guess.history[0]


def test_inverting_gradients_unrolls_several_local_steps() -> None:
    training = LocalTraining(lr=0.1, steps=3)
    round_ = played(network("lenet-zhu", seed=1, init="wide-uniform"), training, seed=1)
    guess, truth = attacked(InvertingGradients(iterations=100, tv=1e-4), round_)
    assert guess.facts["derivative"] == "fast"
    assert float(metrics.psnr(guess.inputs, truth.inputs)) > RECOGNISED


@pytest.mark.parametrize("space", SPACES)
@pytest.mark.parametrize("name", ["dlg", "idlg", "inverting-gradients"])
def test_the_space_searched_is_the_one_told(name: str, space: SpaceName) -> None:
    attack = quick(name, iterations=1, labels="known", space=space)
    guess, _ = attacked(attack, played(tiny()), seed=5)  # one iteration: the start itself
    free = SPACES[space]().draw((1, *SHAPE), "normal", seeded(5))
    assert torch.allclose(guess.inputs, SPACES[space]().decode(free, SHAPE[1:]), atol=1e-6)


def test_total_variation_smooths_the_guess_of_inverting_gradients() -> None:
    round_ = played(network("lenet-zhu", init="wide-uniform"))

    def roughness(tv: float) -> float:
        guess, _ = attacked(InvertingGradients(iterations=60, tv=tv), round_)
        return float(guess.inputs.diff(dim=-1).abs().mean())

    assert roughness(1.0) < 0.5 * roughness(0.0)


def test_known_labels_are_used_as_granted() -> None:
    attack = InvertingGradients(iterations=3, labels="known")
    assert attack.needs == {"training", "records", "labels", "weights"}
    guess, truth = attacked(attack, played(tiny(), LocalTraining(batch_size=5)))
    assert guess.labels is not None
    assert guess.labels.tolist() == truth.labels.tolist()


def softmax_inside() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10), nn.Softmax(1))


def frozen_head() -> nn.Module:
    model = tiny()
    model.fc2.requires_grad_(False)
    return model


@pytest.mark.parametrize("make", [softmax_inside, frozen_head])
@pytest.mark.parametrize("name", ["idlg", "inverting-gradients"])
def test_labels_cannot_be_read_without_a_trained_linear_last_layer(
    name: str, make: Callable[[], nn.Module]
) -> None:
    with pytest.raises(
        NotApplicable, match=r"(End the model in nn.Linear|frozen).*\"labels\" to threat.grants"
    ):
        attacked(quick(name), played(make()))
    guess, truth = attacked(quick(name, labels="known"), played(make()))
    assert guess.inputs.shape == truth.inputs.shape


# ---------------------------------------------------------------- layers are found by what they do


class Backwards(nn.Module):
    """Layers declared last to first, and one that runs beside the path to the output."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(6, 10)
        self.aside = nn.Linear(6, 10)
        self.inner = nn.ModuleDict({"in": nn.Linear(64, 6)})

    def forward(self, x: Tensor) -> Tensor:
        h = self.inner["in"](x.reshape(len(x), -1)).relu()
        y: Tensor = self.out(h)
        self.aside(h)
        return y


def test_first_and_last_linear_layer_are_found_whatever_their_names() -> None:
    model = Backwards()
    first, last = first_linear(model, SHAPE), last_linear(model, SHAPE)
    assert (first.weight, first.bias, first.module) == (
        "inner.in.weight",
        "inner.in.bias",
        "inner.in",
    )
    assert (last.weight, last.bias, last.module) == ("out.weight", "out.bias", "out")
    parameters = dict(model.named_parameters())
    assert parameters[first.weight] is model.inner["in"].weight
    assert parameters[last.weight] is model.out.weight


def test_a_head_without_bias_is_found() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 10, bias=False))
    assert last_linear(model, SHAPE).bias is None


def test_one_linear_layer_is_first_and_last() -> None:
    model = network("mlp", hidden=())
    assert first_linear(model, SHAPE) == last_linear(model, SHAPE)


def test_looking_for_layers_leaves_the_model_alone() -> None:
    model = network("resnet-10", width=0.0625)
    before = copy.deepcopy(model.state_dict())
    last_linear(model, SHAPE)
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
    assert model.training
    assert not any(m._forward_hooks for m in model.modules())
    with pytest.raises(NotApplicable):
        first_linear(model, SHAPE)
