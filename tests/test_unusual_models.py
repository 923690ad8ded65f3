"""Tied weights, frozen layers and other ordinary models that are not the textbook's.

Every attack gives a guess of the right shape or says in a sentence why it cannot, and where a
method can, it is right.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from nouns import setting
from torch import Tensor, nn

from leakgauge import data, diagnostics, metrics
from leakgauge.attacks import ACTIVE_ATTACKS, ATTACKS, Analytic, ExactRecursion, separable
from leakgauge.attacks._labels import RULES, _slopes, infer
from leakgauge.attacks._layers import last_linear
from leakgauge.attacks._separation import gradient_of
from leakgauge.attacks._trace import Trace
from leakgauge.defences import DEFENCES
from leakgauge.errors import InputError, NotApplicable
from leakgauge.fl import Scenario, simulate, tampered, target
from leakgauge.fl.local import train
from leakgauge.models.vit import VisionTransformer
from leakgauge.tensors import parameters
from leakgauge.threat import observe
from leakgauge.types import Attack, Batch, LocalTraining, PreparedAttack, Round, ThreatModel

CLASSES, LONGEST = 10, 420


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


class Perceptron(nn.Module):
    def __init__(self, first: int = 64, second: int = 32) -> None:
        super().__init__()
        self.fc1 = nn.Linear(64, first)
        self.mid = nn.Linear(first, second)
        self.head = nn.Linear(second, CLASSES)

    def features(self, x: Tensor) -> Tensor:
        return self.mid(self.fc1(x.flatten(1)).relu()).relu()  # type: ignore[no-any-return]

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x))  # type: ignore[no-any-return]


class Smooth(Perceptron):
    def features(self, x: Tensor) -> Tensor:
        return self.mid(self.fc1(x.flatten(1)).sigmoid()).sigmoid()  # type: ignore[no-any-return]


class Adapter(nn.Module):
    """A frozen network with a small trained one inside."""

    def __init__(self) -> None:
        super().__init__()
        self.body = Perceptron().requires_grad_(False)
        self.down, self.up = nn.Linear(32, 8), nn.Linear(8, 32)

    def forward(self, x: Tensor) -> Tensor:
        h = self.body.features(x)
        return self.body.head(h + self.up(self.down(h).relu()))  # type: ignore[no-any-return]


class LowRank(nn.Module):
    """A frozen layer with a trained term of low rank beside it, and a trained head."""

    def __init__(self) -> None:
        super().__init__()
        self.body = Perceptron().requires_grad_(False)
        self.body.head.requires_grad_(True)
        self.a = nn.Parameter(torch.randn(4, 64) / 8)
        self.b = nn.Parameter(torch.randn(64, 4) / 8)

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1)
        h = (self.body.fc1(x) + x @ self.a.T @ self.b.T).relu()
        return self.body.head(self.body.mid(h).relu())  # type: ignore[no-any-return]


class CutOff(Perceptron):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            h = self.features(x)
        return self.head(h)  # type: ignore[no-any-return]


class Detached(Perceptron):
    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x).detach())  # type: ignore[no-any-return]


class Between(Perceptron):
    """Cut off between two frozen layers."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1.requires_grad_(False)
        self.mid.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.fc1(x.flatten(1)).relu().detach()
        return self.head(self.mid(h).relu())  # type: ignore[no-any-return]


class Stepped(Perceptron):
    """Nothing that has a derivative is in front of the head."""

    def forward(self, x: Tensor) -> Tensor:
        return self.head((self.features(x) > 0).to(x))  # type: ignore[no-any-return]


class Single(Perceptron):
    """Insists on float32."""

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x.float()))  # type: ignore[no-any-return]


class Twice(nn.Module):
    """One layer that runs twice."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.head = nn.Linear(64, 64), nn.Linear(64, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.fc(self.fc(x.flatten(1)).relu()).relu())  # type: ignore[no-any-return]


def tied_head(kind: type[Perceptron] = Perceptron) -> Perceptron:
    model = kind(64, CLASSES)
    model.mid = nn.Linear(64, CLASSES)
    inner = nn.Linear(CLASSES, CLASSES)
    model.mid = nn.Sequential(model.mid, nn.ReLU(), inner)  # type: ignore[assignment]
    model.head.weight = inner.weight
    return model


def tied_first() -> Perceptron:
    model = Perceptron(64, 64)
    model.mid.weight = model.fc1.weight
    return model


def frozen(*names: str) -> Perceptron:
    """A perceptron with these layers or parameters frozen."""
    model = Perceptron()
    for name, parameter in model.named_parameters():
        if name in names or name.partition(".")[0] in names:
            parameter.requires_grad_(False)
    return model


def biases_only() -> Perceptron:
    return frozen("fc1.weight", "mid.weight", "head.weight")


def weight_norm() -> Perceptron:
    model = Perceptron()
    for layer in (model.fc1, model.mid, model.head):
        nn.utils.parametrizations.weight_norm(layer)
    return model


def convolutions() -> nn.Module:
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1),
        nn.ReLU(), nn.Flatten(), nn.Linear(512, CLASSES),
    )  # fmt: skip
    model[0].requires_grad_(False)
    model[1].requires_grad_(False)
    return model


MODELS: dict[str, Callable[[], nn.Module]] = {
    "tied head": tied_head,
    "tied first layer": tied_first,
    "a layer twice": Twice,
    "frozen backbone": lambda: frozen("fc1"),
    "frozen convolution": convolutions,
    "head only": lambda: frozen("fc1", "mid"),
    "first only": lambda: frozen("mid", "head"),
    "frozen head": lambda: frozen("head"),
    "frozen head bias": lambda: frozen("head.bias"),
    "frozen head weight": lambda: frozen("head.weight"),
    "frozen first bias": lambda: frozen("fc1.bias"),
    "frozen middle weight": lambda: frozen("mid.weight"),
    "biases only": biases_only,
    "adapter": Adapter,
    "low rank": LowRank,
    "cut off": CutOff,
    "detached": Detached,
    "stepped": Stepped,
    "single precision": Single,
    "weight norm": weight_norm,
}

QUICK: dict[str, dict[str, Any]] = {
    "seer": {"steps": 2, "width": 16},
    "loki": {"bins": 16},
    "exact-recursion": {"evaluations": 20, "restarts": 1},
    "fishing": {"iterations": 2},
    "separate-and-decode": {"steps": 2, "images": 32, "evaluations": 20},
    "git": {"pairs": 24, "steps": 2},
    "guided-diffusion": {"training": 1},
    **{key: {"steps": 2} for key in ("fedinverse", "ggl", "gias", "rog")},
    "lti": {"pairs": 24, "steps": 2},
}


def quick(name: str) -> Attack:
    kind: Any = (ATTACKS | ACTIVE_ATTACKS)[name]
    iterations = {"iterations": 2} if "iterations" in kind.__dataclass_fields__ else {}
    attack: Attack = kind(**iterations | QUICK.get(name, {}))
    return attack


def played(make: Callable[[], nn.Module], records: int = 2, **training: Any) -> Round:
    local = LocalTraining(batch_size=records, batch_norm="eval", lr=0.1)
    scenario = Scenario(make, data.load("digits"), replace(local, **training), records=records)
    return simulate(scenario, seeded())


def attacked(name: str, round_: Round) -> None:
    """Run an attack: its guess fits the records, or its refusal is a sentence."""
    attack: Any = quick(name)
    try:
        kept = None
        if isinstance(attack, PreparedAttack):
            made = attack.prepare(target(round_, data.load("digits")), seeded())
            kept = made.kept
            assert bool(made.models) == attack.manipulates
            round_ = tampered(round_, made, seeded()) if made.models else round_
        seen = observe(round_, ThreatModel(malicious=True), kept=kept)
        guess = attack.reconstruct(seen, seeded())
    except NotApplicable as reason:
        words = str(reason)
    else:
        words = ""
    if words:
        assert 20 < len(words) <= LONGEST, words
        assert "Error" not in words
        return
    assert guess.inputs.shape[1:] == round_.truths[0].inputs.shape[1:]
    assert len(guess.inputs) <= len(round_.truths[0])
    assert len(guess.inputs) or guess.notes  # no guess, and why
    assert torch.isfinite(guess.inputs).all()


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("name", [*ATTACKS, *ACTIVE_ATTACKS])
def test_every_attack_gives_a_guess_or_a_reason(name: str, model: str) -> None:
    attacked(name, played(MODELS[model], 1 if name == "idlg" else 2))


@pytest.mark.parametrize("model", ["tied head", "head only", "frozen backbone", "adapter"])
@pytest.mark.parametrize("training", [{"steps": 2}, {"optimiser": "adam"}], ids=str)
def test_several_steps_and_adam_too(model: str, training: dict[str, Any]) -> None:
    round_ = played(MODELS[model], **training)
    for name in ("inverting-gradients", "dlg", "fedavg-epochs", "analytic", "exact-recursion"):
        attacked(name, round_)


# ---------------------------------------------------------------- transformers


def transformer() -> Any:
    return VisionTransformer(shape=(1, 8, 8), classes=CLASSES, patch=4, dim=24, depth=3, heads=2)


def tied_blocks() -> nn.Module:
    model = transformer()
    model.blocks[1].mlp.fc1.weight = model.blocks[0].mlp.fc1.weight
    return model  # type: ignore[no-any-return]


def frozen_transformer(*parts: str) -> nn.Module:
    model = transformer()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not any(part in name for part in parts))
    return model  # type: ignore[no-any-return]


TRANSFORMERS: dict[str, Callable[[], nn.Module]] = {
    "tied": tied_blocks,
    "frozen": lambda: frozen_transformer("fc1"),
    "head only": lambda: frozen_transformer("blocks", "embed", "token"),
    "one bias": lambda: frozen_transformer("blocks.0.mlp.fc1.bias"),
    "frozen embedding": lambda: frozen_transformer("embed", "token"),
}


@pytest.mark.parametrize("model", TRANSFORMERS)
@pytest.mark.parametrize("name", ["decepticons", "inverting-gradients", "exact-recursion"])
def test_transformers_too(name: str, model: str) -> None:
    attacked(name, played(TRANSFORMERS[model]))


def test_decepticons_refuses_blocks_that_share_weights() -> None:
    with pytest.raises(NotApplicable, match=r"'blocks\.0\.mlp\.fc1\.weight' is shared"):
        ACTIVE_ATTACKS["decepticons"]().prepare(
            target(played(tied_blocks), data.load("digits")), seeded()
        )


# ---------------------------------------------------------------- where a method can, it is right


def best(guess: Tensor, truth: Batch) -> float:
    paired = guess[metrics.assign.optimal(guess, truth.inputs)]
    return float(metrics.psnr(paired, truth.inputs).min())


def reconstructed(attack: Attack, round_: Round) -> float:
    guess = attack.reconstruct(observe(round_, ThreatModel()), seeded())
    return best(guess.inputs, round_.truths[0])


@pytest.mark.parametrize("model", ["first only", "frozen head", "tied head", "tied first layer"])
def test_the_analytic_attack_reads_a_trained_first_layer(model: str) -> None:
    assert reconstructed(Analytic(), played(MODELS[model], 1)) > 80


class Backwards(nn.Module):
    """What runs last is registered first, and gives the shared weight its name."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.second = nn.Linear(64, CLASSES), nn.Linear(64, 64)
        self.first = nn.Linear(64, 64)
        self.first.weight = self.second.weight

    def forward(self, x: Tensor) -> Tensor:
        h = self.second(self.first(x.flatten(1)).relu()).relu()
        return self.head(h)  # type: ignore[no-any-return]


def test_a_first_layer_is_found_under_the_name_of_another() -> None:
    round_ = played(Backwards, 1)
    assert "first.weight" not in round_.updates[0]
    assert reconstructed(Analytic(), round_) > 80
    trap: Any = ACTIVE_ATTACKS["trap-weights"]()
    sent = trap.prepare(target(round_), seeded())
    round_ = tampered(round_, sent, seeded())
    seen = observe(round_, ThreatModel(malicious=True), kept=sent.kept)
    guess = trap.reconstruct(seen, seeded())
    assert best(guess.inputs, round_.truths[0]) > 80


@pytest.mark.parametrize("model", ["frozen head bias", "frozen first bias", "frozen head"])
def test_the_exact_recursion_does_without_what_is_frozen(model: str) -> None:
    assert reconstructed(ExactRecursion(), played(MODELS[model], 1)) > 80


@pytest.mark.parametrize("model", ["frozen head bias", "frozen first bias"])
def test_the_exact_recursion_of_a_batch_does_without_a_frozen_bias(model: str) -> None:
    assert reconstructed(ExactRecursion(), played(MODELS[model], 3)) > 80


def test_the_exact_recursion_reads_past_a_detach() -> None:
    """It stops the client's gradients, not the reader of the graph: its features are exact."""
    seen = [observe(played(make, 3), ThreatModel()) for make in (Detached, CutOff)]
    found = [separable(one, seeded()) for one in seen]
    assert torch.equal(found[0].maps, found[1].maps)
    round_ = played(Detached, 3)
    features = round_.model.features(round_.truths[0].inputs)  # type: ignore[operator]
    distance = torch.cdist(found[0].maps.float(), features) / features.norm(dim=1)
    assert distance.min(1).values.max() < 1e-4


@pytest.mark.parametrize(
    ("model", "told"),
    [
        ("tied head", ["fc1.weight", "mid.0.weight", None, None]),
        ("tied first layer", [None, None, "head.weight"]),
        ("a layer twice", [None, None, "head.weight"]),
        ("head only", [None, None, "head.weight"]),
        ("cut off", [None, None, "head.weight"]),  # they are sent, and zero
        ("weight norm", [None, None, None]),  # computed from what is sent
        ("frozen head bias", ["fc1.weight", "mid.weight", "head.weight"]),
    ],
)
def test_a_gradient_tells_of_a_layer_that_has_it_alone(model: str, told: list[str | None]) -> None:
    seen = observe(played(MODELS[model]), ThreatModel())
    trace, gradient = Trace(seen.model, seen.record.shape), gradient_of(seen)
    assert [trace.told(layer, "weight", gradient) for layer in trace.layers()] == told


@pytest.mark.parametrize("make", [CutOff, Detached, Between])
def test_what_stops_the_peeling_is_a_layer_that_tells_nothing(make: type[Perceptron]) -> None:
    guess = ExactRecursion().reconstruct(observe(played(make, 1), ThreatModel()), seeded())
    assert guess.facts["images_met"] == 1  # it has the features that were read
    plain = ExactRecursion().reconstruct(
        observe(played(lambda: frozen("fc1", "mid"), 1), ThreatModel()), seeded()
    )
    assert plain.facts["peeled_to"] == guess.facts["peeled_to"] == "relu_1"


def test_a_layer_under_two_names_is_not_shared() -> None:
    def make() -> nn.Module:
        model = Perceptron()
        model.also = model.mid
        return model

    assert reconstructed(ExactRecursion(), played(make, 3)) > 80


@pytest.mark.parametrize("name", ["idlg", "inverting-gradients"])
def test_gradients_are_matched_through_tied_weights(name: str) -> None:
    round_ = played(lambda: tied_head(Smooth), 1)
    options = {"idlg": {"iterations": 100}, "inverting-gradients": {"iterations": 300, "tv": 0.0}}
    attack: Any = ATTACKS[name]
    assert reconstructed(attack(**options[name]), round_) > 40


def test_gradients_are_matched_on_the_head_alone() -> None:
    """The head tells the features exactly: the search ends where they agree."""

    def make() -> nn.Module:
        model = Smooth()
        model.fc1.requires_grad_(False)
        model.mid.requires_grad_(False)
        return model

    round_ = played(make, 1)
    seen = observe(round_, ThreatModel())
    assert set(seen.update) == {"head.weight", "head.bias"}
    guess = ATTACKS["dlg"](iterations=100).reconstruct(seen, seeded())  # type: ignore[call-arg]
    assert guess.residual < 1e-9
    model: Any = round_.model
    ours, theirs = model.features(guess.inputs), model.features(round_.truths[0].inputs)
    assert float((ours - theirs).norm() / theirs.norm()) < 0.01


@pytest.mark.parametrize(
    ("model", "records"),
    [("tied head", 16), ("frozen head weight", 16), ("frozen head bias", 8), ("head only", 16)],
)
def test_labels_are_counted_with_half_a_head(model: str, records: int) -> None:
    round_ = played(MODELS[model], records)
    found = infer(observe(round_, ThreatModel()), "counts", seeded())
    assert found.tolist() == sorted(round_.truths[0].labels.tolist())


@pytest.mark.parametrize("rule", ["yin", "fedleak"])
def test_rules_that_need_the_weights_say_so(rule: Any) -> None:
    seen = observe(played(tied_head), ThreatModel())
    assert last_linear(seen.model, seen.record.shape).weight is None
    with pytest.raises(NotApplicable, match=r"frozen or shared.*use the rule 'counts'"):
        infer(seen, rule, seeded())
    assert rule in RULES


def test_a_shared_bias_below_the_head_is_not_read() -> None:
    """Its gradient is a sum over its layers, and the slopes are those of one."""

    def make(*, tied: bool) -> Perceptron:
        model = Perceptron(32, 32)
        model.head = nn.Linear(32, CLASSES, bias=False)
        if tied:
            model.mid.bias = model.fc1.bias
        return model

    images = torch.rand(2, 1, 8, 8, generator=seeded())
    for tied, name in ((False, "mid.bias"), (True, None)):
        model = make(tied=tied)
        assert _slopes(model, parameters(model), images, "head")[0] == name


@pytest.mark.parametrize("model", ["tied first layer", "a layer twice"])
def test_bins_are_not_written_into_a_shared_layer(model: str) -> None:
    with pytest.raises(NotApplicable, match="which other layers share"):
        ACTIVE_ATTACKS["robbing-the-fed"]().prepare(
            target(played(MODELS[model]), data.load("digits")), seeded()
        )


def test_smooth_to_sharp_takes_its_own_errors_where_only_biases_are_trained() -> None:
    seen = observe(played(biases_only), ThreatModel())
    guess = quick("smooth-to-sharp").reconstruct(seen, seeded())
    assert "only biases and norms are trained" in guess.facts["errors"]


def test_an_attack_on_matrices_refuses_an_update_without_any() -> None:
    seen = observe(played(biases_only), ThreatModel())
    for name in ("agic", "sapag"):
        with pytest.raises(NotApplicable, match="only biases and norms are trained"):
            quick(name).reconstruct(seen, seeded())


def test_fishing_the_head_alone_gives_the_features() -> None:
    attack: Any = quick("fishing")
    round_ = played(lambda: frozen("fc1", "mid"), 1)
    attack = replace(attack, label=int(round_.truths[0].labels[0]))
    sent = attack.prepare(target(round_), seeded())
    round_ = tampered(round_, sent, seeded())
    seen = observe(round_, ThreatModel(malicious=True), kept=sent.kept)
    guess = attack.reconstruct(seen, seeded())
    model: Any = seen.model
    features = model.features(round_.truths[0].inputs)[0]
    assert torch.allclose(guess.facts["features"], features, atol=1e-5)
    assert len(guess.inputs) == 0
    assert "only the last layer is trained" in guess.notes[0]


def test_what_a_client_can_check_before_sending() -> None:
    found = separable(observe(played(lambda: frozen("fc1", "mid")), ThreatModel()), seeded())
    truth = played(lambda: frozen("fc1", "mid")).truths[0]
    assert sorted(found.labels.tolist()) == sorted(truth.labels.tolist())
    with pytest.raises(NotApplicable, match="frozen, shared with other layers"):
        separable(observe(played(lambda: frozen("mid", "head")), ThreatModel()), seeded())


# ---------------------------------------------------------------- the update itself


@pytest.mark.parametrize("model", ["tied head", "head only", "adapter", "biases only"])
@pytest.mark.parametrize("training", [{}, {"momentum": 0.9, "weight_decay": 0.1}], ids=str)
def test_three_steps_are_those_of_torch_optim(model: str, training: dict[str, Any]) -> None:
    local = LocalTraining(lr=0.1, batch_size=2, steps=3, **training)
    network = MODELS[model]()
    batch = Batch(torch.rand(2, 1, 8, 8, generator=seeded()), torch.tensor([3, 7]))
    update = train(setting(network, batch), batch, local, seeded()).update
    before = {n: p.detach().clone() for n, p in network.named_parameters()}
    trained = [p for p in network.parameters() if p.requires_grad]
    optimiser = torch.optim.SGD(trained, lr=0.1, **training)
    for _ in range(3):
        optimiser.zero_grad()
        nn.functional.cross_entropy(network(batch.inputs), batch.labels).backward()
        optimiser.step()
    expected = {n: before[n] - p.detach() for n, p in network.named_parameters() if p.requires_grad}
    assert update.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.allclose(update[name], value, atol=1e-6)


def test_tied_weights_stay_tied_over_the_rounds() -> None:
    scenario = Scenario(tied_head, data.load("digits"), LocalTraining(lr=0.5), rounds=2, clients=2)
    model: Any = simulate(scenario, seeded()).model
    assert model.head.weight is model.mid[2].weight
    fresh: Any = simulate(replace(scenario, rounds=0), seeded()).model
    assert not torch.equal(model.head.weight, fresh.head.weight)


@pytest.mark.parametrize("name", DEFENCES)
@pytest.mark.parametrize("model", ["tied head", "head only", "adapter"])
def test_a_defended_update_has_the_same_names(model: str, name: str) -> None:
    network = MODELS[model]()
    batch = Batch(torch.rand(2, 1, 8, 8, generator=seeded()), torch.tensor([3, 7]))
    local = LocalTraining(batch_size=2)
    plain = train(setting(network, batch), batch, local, seeded()).update
    defended = train(setting(network, batch), batch, local, seeded(), DEFENCES[name]()).update
    assert {n: v.shape for n, v in defended.items()} == {n: v.shape for n, v in plain.items()}


@pytest.mark.parametrize("model", ["tied head", "head only", "cut off"])
def test_diagnostics_take_them(model: str) -> None:
    network, local = MODELS[model](), LocalTraining(batch_size=2)
    batch = Batch(torch.rand(2, 1, 8, 8, generator=seeded()), torch.tensor([3, 7]))
    world = setting(network, batch)
    found = diagnostics.gradient(world, batch, local)
    assert found.keys() == {n for n, p in network.named_parameters() if p.requires_grad}
    assert 0 <= diagnostics.sparsity(found) < 1
    assert diagnostics.noise_distances(world, batch, local, [0.1], seeded(), draws=1)[0] > 0


def test_diagnostics_of_a_parameter_that_is_not_sent() -> None:
    batch = Batch(torch.rand(2, 1, 8, 8, generator=seeded()), torch.tensor([3, 7]))
    local = LocalTraining(batch_size=2)
    world = setting(frozen("fc1", "mid"), batch)
    with pytest.raises(InputError, match=r"'fc1\.bias' is not in the update: choose one of head"):
        diagnostics.magnitude_and_sensitivity(world, batch, local, "fc1.bias")
    with pytest.raises(InputError, match="does not depend on the image"):
        diagnostics.magnitude_and_sensitivity(setting(CutOff(), batch), batch, local, "head.weight")
