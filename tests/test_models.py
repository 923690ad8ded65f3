"""Networks: shapes, names, counts, exact cases of their blocks, and building from a seed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from leakgauge.errors import InputError, PlanError
from leakgauge.models import INITS, MODELS, make
from leakgauge.models._layers import ACTIVATIONS, NORMS, scaled
from leakgauge.models.densenet import DenseLayer
from leakgauge.models.mobilenet import InvertedResidual
from leakgauge.models.resnet import BasicBlock, Residual
from leakgauge.models.vit import Attention, Block

# Names and counts are tested at full width; what does not depend on it is tested on these.
LIGHT: dict[str, dict[str, object]] = {
    "mlp": {},
    "lenet-zhu": {},
    "lenet-5": {},
    "cnn": {"hidden": 16},
    "convnet": {"width": 0.125},
    "resnet-9": {"width": 0.125},
    "resnet-10": {"width": 0.125},
    "resnet-18": {"width": 0.125},
    "resnet-34": {"width": 0.125},
    "densenet-121": {"growth": 4},
    "mobilenet-v2": {"width": 0.125},
    "vit-small": {"dim": 48},
    "vit-base": {"dim": 48, "depth": 2},
}
SMALL = [name for name in MODELS if name != "vit-base"]


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def light(name: str, shape: tuple[int, int, int] = (3, 32, 32), seed: int = 0) -> nn.Module:
    return make(name, shape=shape, classes=7, rng=seeded(seed), **LIGHT[name])


def count(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def meta(name: str, shape: tuple[int, int, int], classes: int, **options: object) -> nn.Module:
    """Built without memory: enough for names and counts."""
    with torch.device("meta"):
        return MODELS[name](shape, classes, **options)


# --- every model -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("channels", [1, 3])
def test_maps_images_to_logits(name: str, channels: int) -> None:
    for side in (16, 32):
        model = light(name, (channels, side, side)).eval()
        with torch.no_grad():
            logits = model(torch.rand(2, channels, side, side, generator=seeded()))
        assert logits.shape == (2, 7)
        assert logits.isfinite().all()
        assert not torch.equal(logits[0], logits[1])  # the image reaches the logits


@pytest.mark.parametrize("name", MODELS)
def test_accepts_images_that_are_not_square(name: str) -> None:
    height, width = (32, 48) if name.startswith("vit") else (33, 46)  # patches must fill an image
    model = light(name, (3, height, width)).eval()
    assert model(torch.rand(2, 3, height, width)).shape == (2, 7)


@pytest.mark.parametrize("name", MODELS)
def test_gradient_reaches_every_parameter_and_has_a_derivative(name: str) -> None:
    model = light(name)
    x = torch.rand(2, 3, 32, 32, generator=seeded(), requires_grad=True)
    loss = nn.functional.cross_entropy(model(x), torch.tensor([1, 2]))
    named = dict(model.named_parameters())
    gradient = torch.autograd.grad(loss, list(named.values()), create_graph=True)
    assert [n for n, g in zip(named, gradient, strict=True) if not g.abs().sum() > 0] == []
    (again,) = torch.autograd.grad(sum(g.square().sum() for g in gradient), x)
    assert again.isfinite().all()
    assert again.abs().sum() > 0


@pytest.mark.parametrize("name", MODELS)
def test_ends_in_a_linear_layer_and_changes_nothing_in_place(name: str) -> None:
    model = light(name).eval()
    called: list[nn.Module] = []
    for layer in model.modules():
        if not list(layer.children()):
            layer.register_forward_hook(lambda layer, *_: called.append(layer))
    x = torch.rand(2, 3, 32, 32)
    before = x.clone()
    model(x)
    assert isinstance(called[-1], nn.Linear)
    assert called[-1].out_features == 7
    assert list(model.modules())[-1] is called[-1]
    assert torch.equal(x, before)
    assert not any(getattr(layer, "inplace", False) for layer in model.modules())


@pytest.mark.parametrize("name", MODELS)
def test_traces_and_convolutions_before_a_norm_have_no_bias(name: str) -> None:
    model = light(name).eval()
    traced = torch.fx.symbolic_trace(model)
    x = torch.rand(2, 3, 32, 32)
    torch.testing.assert_close(traced(x), model(x))
    layers = dict(model.named_modules())
    for node in traced.graph.nodes:
        if node.op == "call_module" and isinstance(layers[node.target], nn.Conv2d):
            users = [layers[u.target] for u in node.users if u.op == "call_module"]
            if any(isinstance(user, nn.BatchNorm2d | nn.GroupNorm) for user in users):
                assert layers[node.target].bias is None, node.target


@pytest.mark.parametrize("name", MODELS)
def test_same_seed_same_weights_and_the_global_generator_is_left_alone(name: str) -> None:
    before = torch.random.get_rng_state()
    first, again, other = light(name), light(name), light(name, seed=1)
    assert torch.equal(torch.random.get_rng_state(), before)
    torch.manual_seed(99)  # nor does the global generator decide the weights
    third = light(name)
    for (key, value), *others in zip(
        *(model.named_parameters() for model in (first, again, third)), strict=True
    ):
        assert all(torch.equal(value, same) for _, same in others), key
    assert not torch.equal(list(first.parameters())[-2], list(other.parameters())[-2])


@pytest.mark.parametrize("init", INITS)
def test_every_initialisation_is_seeded_and_local(init: str) -> None:
    before = torch.random.get_rng_state()
    one, two = (
        make("lenet-5", shape=(1, 16, 16), classes=3, init=init, rng=seeded()) for _ in range(2)
    )
    assert torch.equal(torch.random.get_rng_state(), before)
    for a, b in zip(one.parameters(), two.parameters(), strict=True):
        assert torch.equal(a, b)


def test_the_generator_moves_on() -> None:
    rng = seeded()
    first = make("mlp", shape=(1, 4, 4), classes=2, rng=rng)
    second = make("mlp", shape=(1, 4, 4), classes=2, rng=rng)
    assert not torch.equal(first.fc1.weight, second.fc1.weight)


# --- names and counts --------------------------------------------------------------------------


def norm_names(prefix: str) -> list[str]:
    own = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
    return [f"{prefix}.{name}" for name in own]


def resnet_names(blocks: tuple[int, ...]) -> list[str]:
    names = ["conv1.weight", *norm_names("bn1")]
    for stage, number in enumerate(blocks, start=1):
        for block in range(number):
            at = f"layer{stage}.{block}"
            for part in (1, 2):
                names += [f"{at}.conv{part}.weight", *norm_names(f"{at}.bn{part}")]
            if block == 0 and stage > 1:
                names += [f"{at}.downsample.0.weight", *norm_names(f"{at}.downsample.1")]
    return [*names, "fc.weight", "fc.bias"]


def densenet_names() -> list[str]:
    names = ["features.conv0.weight", *norm_names("features.norm0")]
    for block, number in enumerate((6, 12, 24, 16), start=1):
        for layer in range(1, number + 1):
            at = f"features.denseblock{block}.denselayer{layer}"
            for part in (1, 2):
                names += [*norm_names(f"{at}.norm{part}"), f"{at}.conv{part}.weight"]
        if block < 4:
            at = f"features.transition{block}"
            names += [*norm_names(f"{at}.norm"), f"{at}.conv.weight"]
    return [*names, *norm_names("features.norm5"), "classifier.weight", "classifier.bias"]


def mobilenet_names() -> list[str]:
    def unit(at: str) -> list[str]:
        return [f"{at}.0.weight", *norm_names(f"{at}.1")]

    names = unit("features.0")
    for block in range(1, 18):
        at = f"features.{block}.conv"
        inner = 1 if block == 1 else 2  # the first block does not expand
        for part in range(inner):
            names += unit(f"{at}.{part}")
        names += [f"{at}.{inner}.weight", *norm_names(f"{at}.{inner + 1}")]
    return [*names, *unit("features.18"), "classifier.1.weight", "classifier.1.bias"]


def vit_names(depth: int) -> list[str]:
    layers = ["patch_embed.proj"]
    for block in range(depth):
        layers += [f"blocks.{block}.{part}" for part in ("norm1", "attn.qkv", "attn.proj", "norm2")]
        layers += [f"blocks.{block}.mlp.fc1", f"blocks.{block}.mlp.fc2"]
    layers += ["norm", "head"]
    return ["cls_token", "pos_embed", *(f"{at}.{p}" for at in layers for p in ("weight", "bias"))]


def plain_names(*layers: str) -> list[str]:
    return [f"{layer}.{part}" for layer in layers for part in ("weight", "bias")]


def resnet_9_names() -> list[str]:
    units = ["prep", "layer1", "layer1.residual.first", "layer1.residual.second"]
    units += ["layer2", "layer3", "layer3.residual.first", "layer3.residual.second"]
    names = [n for at in units for n in (f"{at}.conv.weight", *norm_names(f"{at}.bn"))]
    return names + plain_names("linear")


NAMES = {
    "mlp": plain_names("fc1", "fc2"),
    "lenet-zhu": plain_names("body.0", "body.2", "body.4", "fc.0"),
    "lenet-5": plain_names("conv1", "conv2", "fc1", "fc2", "fc3"),
    "cnn": plain_names("conv1", "conv2", "fc1", "fc2"),
    "convnet": [
        *(n for k in range(8) for n in (f"conv{k}.weight", *norm_names(f"bn{k}"))),
        *plain_names("linear"),
    ],
    "resnet-9": resnet_9_names(),
    "resnet-10": resnet_names((1, 1, 1, 1)),
    "resnet-18": resnet_names((2, 2, 2, 2)),
    "resnet-34": resnet_names((3, 4, 6, 3)),
    "densenet-121": densenet_names(),
    "mobilenet-v2": mobilenet_names(),
    "vit-small": vit_names(6),
    "vit-base": vit_names(12),
}


@pytest.mark.parametrize("name", MODELS)
def test_parameter_names_are_stable(name: str) -> None:
    assert list(meta(name, (3, 32, 32), 10).state_dict()) == NAMES[name]


@pytest.mark.parametrize("name", ["resnet-18", "densenet-121", "mobilenet-v2"])
def test_both_stems_have_the_same_names(name: str) -> None:
    assert list(meta(name, (3, 32, 32), 10, stem="imagenet").state_dict()) == NAMES[name]


@pytest.mark.parametrize(
    ("name", "shape", "classes", "options", "published"),
    [
        ("resnet-18", (3, 224, 224), 1000, {"stem": "imagenet"}, 11_689_512),  # torchvision
        ("resnet-34", (3, 224, 224), 1000, {"stem": "imagenet"}, 21_797_672),  # torchvision
        ("densenet-121", (3, 224, 224), 1000, {"stem": "imagenet"}, 7_978_856),  # torchvision
        ("mobilenet-v2", (3, 224, 224), 1000, {"stem": "imagenet"}, 3_504_872),  # torchvision
        ("vit-base", (3, 224, 224), 1000, {}, 86_567_656),  # torchvision, timm
        ("resnet-10", (1, 28, 28), 10, {}, 4_902_090),  # FedLeak, footnote 3
        ("lenet-5", (1, 28, 28), 10, {}, 61_706),  # without the paper's pool weights
        ("lenet-5", (3, 32, 32), 10, {"padding": 0}, 62_006),  # PyTorch's tutorial
        ("lenet-zhu", (3, 32, 32), 100, {}, 85_036),  # DLG's code: 768 features
        ("convnet", (3, 32, 32), 10, {"norm": "none"}, 2_904_970 - 3_200),  # IG's, less its norms
        ("resnet-9", (3, 32, 32), 10, {}, 6_573_120 + 10),  # Page's, and a bias in the head
    ],
)
def test_parameter_counts_are_the_published_ones(
    name: str, shape: tuple[int, int, int], classes: int, options: dict[str, object], published: int
) -> None:
    assert count(meta(name, shape, classes, **options)) == published


# --- options -----------------------------------------------------------------------------------


def channels(model: nn.Module) -> list[int]:
    return [layer.out_channels for layer in model.modules() if isinstance(layer, nn.Conv2d)]


@pytest.mark.parametrize("name", ["convnet", "resnet-9", "resnet-10"])
@pytest.mark.parametrize("width", [0.25, 3])
def test_width_multiplies_the_channels(name: str, width: float) -> None:
    plain = channels(meta(name, (3, 32, 32), 10))
    assert channels(meta(name, (3, 32, 32), 10, width=width)) == [width * c for c in plain]
    model = make(name, shape=(3, 16, 16), classes=3, rng=seeded(), width=0.25)
    assert model.eval()(torch.rand(2, 3, 16, 16)).shape == (2, 3)


def test_mobilenet_width_keeps_the_last_convolution() -> None:
    half = meta("mobilenet-v2", (3, 32, 32), 10, width=0.5)
    joints = [b.conv[-2].out_channels for b in half.features if isinstance(b, InvertedResidual)]
    assert sorted(set(joints)) == [8, 16, 32, 48, 80, 160]
    assert channels(half)[-1] == 1280
    assert channels(meta("mobilenet-v2", (3, 32, 32), 10, width=1.4))[-1] == 1792


@given(st.integers(1, 2048), st.floats(0.01, 16))
def test_scaled_widths_are_multiples_of_eight_near_the_wish(base: int, width: float) -> None:
    got, wish = scaled(base, width), base * width
    assert got % 8 == 0
    assert got >= max(8, 0.9 * wish)
    assert got <= 8 or got - wish <= 8


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activation_is_used_everywhere(activation: str) -> None:
    kind = ACTIVATIONS[activation]
    model = make(
        "resnet-10", shape=(3, 8, 8), classes=3, rng=seeded(), width=0.125, activation=activation
    )
    found = [layer for layer in model.modules() if type(layer) is kind]
    assert len(found) == 1 + 2 * 4  # the stem, two a block
    assert model(torch.rand(2, 3, 8, 8)).isfinite().all()


@pytest.mark.parametrize("name", ["convnet", "resnet-9", "resnet-10", "densenet-121"])
def test_only_batch_norm_mixes_samples(name: str) -> None:
    x = torch.rand(3, 3, 16, 16, generator=seeded())
    for norm in NORMS:
        model = make(name, shape=(3, 16, 16), classes=4, rng=seeded(), norm=norm, **LIGHT[name])
        with torch.no_grad():
            alone, together = model(x[:2])[0], model(x)[0]
        assert torch.allclose(alone, together, atol=1e-5) == (norm != "batch")


def test_norms_against_their_definitions() -> None:
    x = torch.randn(2, 64, 3, 3, generator=seeded())
    layer = nn.functional.layer_norm(x, x.shape[1:])
    torch.testing.assert_close(NORMS["layer"](64)(x), layer)
    pairs = x.view(2, 32, 2, 3, 3)  # 64 channels: 32 groups of two
    group = nn.functional.layer_norm(pairs, pairs.shape[2:]).view_as(x)
    torch.testing.assert_close(NORMS["group"](64)(x), group)
    for width in (8, 16, 24, 33, 96):  # two channels a group or more: a 1 × 1 map survives
        assert NORMS["group"](width)(torch.randn(1, width, 1, 1)).abs().max() > 0.5


def test_hidden_widths_of_the_perceptron() -> None:
    model = make("mlp", shape=(1, 4, 4), classes=5, rng=seeded(), hidden=[8, 6], activation="tanh")
    x = torch.rand(2, 1, 4, 4)
    inner = torch.tanh(model.fc2(torch.tanh(model.fc1(x.view(2, 16)))))
    torch.testing.assert_close(model(x), model.fc3(inner))
    assert (model.fc1.out_features, model.fc2.out_features) == (8, 6)
    linear = make("mlp", shape=(1, 4, 4), classes=5, rng=seeded(), hidden=[])
    torch.testing.assert_close(linear(x), linear.fc1(x.view(2, 16)))


def sides(model: nn.Module, side: int, layers: list[str]) -> list[int]:
    """Of the maps that these layers put out for a square image."""
    found: list[int] = []
    for name in layers:
        model.get_submodule(name).register_forward_hook(
            lambda _layer, _inputs, out: found.append(out.shape[-1])
        )
    with torch.no_grad():
        model.eval()(torch.rand(1, 3, side, side))
    return found


def test_strides_of_the_stems() -> None:
    stages = ["conv1", "layer1", "layer2", "layer3", "layer4"]
    build = {"shape": (3, 64, 64), "classes": 2, "rng": seeded(), "width": 0.125}
    assert sides(make("resnet-10", **build), 64, stages) == [64, 64, 32, 16, 8]
    assert sides(make("resnet-10", stem="imagenet", **build), 64, stages) == [32, 16, 8, 4, 2]
    assert sides(make("resnet-9", **build), 64, ["prep", "layer1", "layer2", "layer3"]) == [
        64,
        32,
        16,
        8,
    ]
    assert sides(make("convnet", **build), 64, ["conv5", "conv6", "conv7", "pool7"]) == [
        64,
        21,
        21,
        7,
    ]
    cuts = ["features.0", "features.3", "features.6", "features.10", "features.18"]
    assert sides(make("mobilenet-v2", **build), 64, cuts) == [64, 64, 32, 16, 8]
    assert sides(make("mobilenet-v2", stem="imagenet", **build), 64, cuts) == [32, 16, 8, 4, 2]
    del build["width"]
    cuts = ["features.conv0", *(f"features.denseblock{k}" for k in (1, 2, 3, 4))]
    build["growth"] = 4
    assert sides(make("densenet-121", **build), 64, cuts) == [64, 64, 32, 16, 8]
    assert sides(make("densenet-121", stem="imagenet", **build), 64, cuts) == [32, 16, 8, 4, 2]


# --- blocks, where the answer is known ---------------------------------------------------------


def silence(norm: nn.Module) -> None:
    nn.init.zeros_(norm.weight)
    nn.init.zeros_(norm.bias)


def test_basic_block_adds_its_input() -> None:
    x = torch.randn(2, 8, 4, 4, generator=seeded())
    block = BasicBlock(8, 8, 1, nn.BatchNorm2d, nn.ReLU)
    inner = block.conv2(torch.relu(block.bn1(block.conv1(x))))
    torch.testing.assert_close(block(x), torch.relu(block.bn2(inner) + x))
    silence(block.bn2)
    assert torch.equal(block(x), torch.relu(x))
    other = BasicBlock(8, 16, 2, nn.BatchNorm2d, nn.ReLU)
    silence(other.bn2)
    assert torch.equal(other(x), torch.relu(other.downsample(x)))


def test_residual_of_resnet_9_adds_its_input() -> None:
    x = torch.randn(2, 8, 4, 4, generator=seeded())
    residual = Residual(8, nn.BatchNorm2d, nn.ReLU)
    torch.testing.assert_close(residual(x) - x, residual.second(residual.first(x)))
    silence(residual.second.bn)
    assert torch.equal(residual(x), x)


def test_dense_layer_appends_to_its_input() -> None:
    x = torch.randn(2, 8, 4, 4, generator=seeded())
    layer = DenseLayer(8, 3, nn.BatchNorm2d, nn.ReLU)
    out = layer(x)
    assert torch.equal(out[:, :8], x)
    inner = layer.conv1(torch.relu(layer.norm1(x)))
    torch.testing.assert_close(out[:, 8:], layer.conv2(torch.relu(layer.norm2(inner))))


def test_inverted_residual_adds_its_input_only_where_sizes_agree() -> None:
    x = torch.randn(2, 8, 4, 4, generator=seeded())
    block = InvertedResidual(8, 8, 1, 6, nn.BatchNorm2d, nn.ReLU6)
    torch.testing.assert_close(block(x) - x, block.conv(x))
    assert block.conv[1][0].groups == 48  # depthwise
    silence(block.conv[-1])
    assert torch.equal(block(x), x)
    wider = InvertedResidual(8, 16, 1, 6, nn.BatchNorm2d, nn.ReLU6)
    torch.testing.assert_close(wider(x), wider.conv(x))


def test_transformer_block_is_pytorchs_own() -> None:
    """Oracle: torch's encoder layer with the same weights."""
    torch.manual_seed(0)
    block = Block(24, 3, nn.GELU).double()
    oracle = nn.TransformerEncoderLayer(
        24, 3, 96, 0.0, "gelu", 1e-6, batch_first=True, norm_first=True, dtype=torch.float64
    )
    pairs = {
        "self_attn.in_proj_": "attn.qkv.",
        "self_attn.out_proj.": "attn.proj.",
        "linear1.": "mlp.fc1.",
        "linear2.": "mlp.fc2.",
        "norm1.": "norm1.",
        "norm2.": "norm2.",
    }
    for norm in (block.norm1, block.norm2):
        nn.init.normal_(norm.weight)
        nn.init.normal_(norm.bias)
    own = block.state_dict()
    oracle.load_state_dict(
        {
            f"{theirs}{p}": own[f"{ours}{p}"]
            for theirs, ours in pairs.items()
            for p in ("weight", "bias")
        }
    )
    x = torch.randn(2, 5, 24, dtype=torch.float64)
    torch.testing.assert_close(block(x), oracle(x))
    assert isinstance(block.attn, Attention)


def test_vision_transformer_sees_patches_and_their_places() -> None:
    """Tokens by hand: the class token first, then the patches row by row, each with its place."""
    model = make("vit-small", shape=(1, 8, 12), classes=3, rng=seeded(), dim=12, depth=1, heads=2)
    x = torch.rand(2, 1, 8, 12, generator=seeded())
    kernel, bias = model.patch_embed.proj.weight.view(12, 16), model.patch_embed.proj.bias
    tokens = [model.cls_token[0, 0].expand(2, 12)]
    for row in range(0, 8, 4):
        for column in range(0, 12, 4):
            patch = x[:, 0, row : row + 4, column : column + 4].reshape(2, 16)
            tokens.append(patch @ kernel.T + bias)
    by_hand = torch.stack(tokens, dim=1) + model.pos_embed
    out = model.head(model.norm(model.blocks(by_hand))[:, 0])
    torch.testing.assert_close(model(x), out)
    for free in (model.cls_token, model.pos_embed):
        assert 0.01 < free.std() < 0.04


# --- refusals ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "least", "options"),
    [
        ("convnet", 9, LIGHT["convnet"]),
        ("lenet-5", 12, {}),
        ("lenet-5", 16, {"padding": 0}),
        ("resnet-9", 8, LIGHT["resnet-9"]),
        ("resnet-10", 8, LIGHT["resnet-10"]),
        ("densenet-121", 8, LIGHT["densenet-121"]),
        ("densenet-121", 32, {"growth": 4, "stem": "imagenet"}),
        ("mobilenet-v2", 8, LIGHT["mobilenet-v2"]),
        ("vit-small", 8, LIGHT["vit-small"]),
        ("vit-base", 32, LIGHT["vit-base"]),
    ],
)
def test_smallest_image(name: str, least: int, options: dict[str, object]) -> None:
    model = make(name, shape=(1, least, least), classes=2, rng=seeded(), **options)
    assert model.eval()(torch.rand(1, 1, least, least)).shape == (1, 2)
    for shape in ((1, least - 1, 64), (1, 64, least - 1)):
        with pytest.raises(InputError, match=rf"at least {least} × {least} pixels, got {shape[1]}"):
            make(name, shape=shape, classes=2, rng=seeded(), **options)


def test_patches_must_fill_the_image() -> None:
    with pytest.raises(InputError, match="multiples of 4, got 32 × 30"):
        make("vit-small", shape=(3, 32, 30), classes=2, rng=seeded())
    with pytest.raises(InputError, match="multiples of 16, got 40 × 32"):
        make("vit-base", shape=(3, 40, 32), classes=2, rng=seeded())


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("resnet18", {}, "unknown model 'resnet18'; did you mean 'resnet-18'"),
        ("resnet-18", {"init": "orthogonol"}, "unknown initialisation .* mean 'orthogonal'"),
        ("resnet-18", {"with": 3}, "no option 'with'; did you mean 'width'"),
        ("resnet-18", {"layers": 3}, "no option 'layers'; known: activation, norm, stem, width"),
        ("resnet-18", {"blocks": (1, 1, 1, 1)}, "no option 'blocks'"),
        ("resnet-18", {"stem": "cifar10"}, "unknown stem 'cifar10'; did you mean 'cifar'"),
        ("resnet-18", {"norm": "none"}, "unknown norm 'none'; known: batch, group, layer"),
        ("resnet-18", {"activation": ["relu"]}, "unknown activation"),
        ("resnet-18", {"width": 0}, "width must be a positive number"),
        ("resnet-18", {"width": "wide"}, "width must be a positive number"),
        ("resnet-18", {"width": float("inf")}, "width must be a positive number"),
        ("mlp", {"hidden": 64}, "hidden must be a list"),
        ("mlp", {"hidden": [64, 0]}, "hidden must be a whole number"),
        ("lenet-5", {"padding": -1}, "padding must be a whole number of at least 0"),
        ("lenet-5", {"pool": "mean"}, "unknown pool 'mean'"),
        ("densenet-121", {"growth": 1.5}, "growth must be a whole number"),
        ("mobilenet-v2", {"dropout": 1}, "dropout must be"),
        ("vit-small", {"heads": 5}, "dim must be a multiple of heads, got dim 192 and heads 5"),
        ("vit-small", {"depth": True}, "depth must be a whole number"),
    ],
)
def test_wrong_names_and_options_are_answered(
    name: str, options: dict[str, object], words: str
) -> None:
    with pytest.raises(PlanError, match=words):
        make(name, shape=(3, 32, 32), classes=10, rng=seeded(), **options)


@pytest.mark.parametrize(
    ("shape", "classes", "words"),
    [
        ((32, 32), 10, "shape must be"),
        ((3, 0, 32), 10, "shape must be"),
        ((3, 32, 32.0), 10, "shape must be"),
        ((3, 32, 32), 1, "classes must be"),
        ((3, 32, 32), 2.0, "classes must be"),
    ],
)
def test_wrong_sizes_are_answered(shape: tuple[int, int, int], classes: int, words: str) -> None:
    with pytest.raises(InputError, match=words):
        make("mlp", shape=shape, classes=classes, rng=seeded())


# --- the user's own model ----------------------------------------------------------------------

OWN = """
import torch
from torch import nn

def nothing():
    return nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(48, 5))

def sized(classes, shape):
    return nn.Sequential(nn.Flatten(), nn.Linear(shape[0] * shape[1] * shape[2], classes))

def with_option(*, classes, hidden=4):
    return nn.Sequential(nn.Flatten(), nn.Linear(48, hidden), nn.Linear(hidden, classes))

def open_ended(**options):  # as torchvision.models:resnet18
    assert options == {"num_classes": 5}, options
    return nothing()

def frozen():
    model = nothing()
    model[1].eval()
    return model

def lazy():
    return nn.Sequential(nn.Flatten(), nn.LazyLinear(5))

class Net(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.fc = nn.Linear(48, classes)
    def forward(self, x):
        return self.fc(x.flatten(1))

class Pair(Net):
    def forward(self, x):
        return super().forward(x), x

def noise():
    torch.rand(3)
    return nothing()

def raises():
    raise RuntimeError("no licence")

def not_a_model():
    return 3

def no_weights():
    return nn.Sequential(nn.Flatten(), nn.AdaptiveAvgPool1d(5))

constant = 3
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    name = f"own_models_{tmp_path.name}".replace("-", "_")
    (tmp_path / f"{name}.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    return name


def make_own(
    own: str, what: str, shape: tuple[int, int, int] = (3, 4, 4), **options: object
) -> nn.Module:
    return make(f"{own}:{what}", shape=shape, classes=5, rng=seeded(), **options)


def test_own_models_are_built_from_the_seed(own: str) -> None:
    for what in ("nothing", "sized", "with_option", "Net", "lazy", "noise"):
        before = torch.random.get_rng_state()
        first, again = make_own(own, what), make_own(own, what)
        assert torch.equal(torch.random.get_rng_state(), before)
        assert first(torch.rand(2, 3, 4, 4)).shape == (2, 5)
        for a, b in zip(first.parameters(), again.parameters(), strict=True):
            assert torch.equal(a, b)


def test_own_models_take_options_and_initialisations(own: str) -> None:
    assert make_own(own, "with_option", hidden=9)[1].out_features == 9
    assert isinstance(make_own(own, "open_ended", num_classes=5), nn.Module)
    assert make_own(own, "Net", init="kaiming-normal-fan-in").fc.bias.abs().max() == 0


def test_trying_out_an_own_model_restores_its_modes(own: str) -> None:
    model = make_own(own, "frozen")
    assert [layer.training for layer in model] == [True, False, True]
    assert model.training


@pytest.mark.parametrize(
    ("what", "error", "words"),
    [
        ("missing", PlanError, "expected a callable missing in .*, got nothing"),
        ("constant", PlanError, "expected a callable constant in .*, got a int"),
        ("raises", PlanError, "could not be built .*no licence"),
        ("not_a_model", InputError, "gave a int, expected an nn.Module"),
        ("no_weights", InputError, "no trainable parameter"),
        ("Pair", InputError, "gave a tuple. Expected images"),
    ],
)
def test_own_models_that_are_none(own: str, what: str, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        make_own(own, what)


def test_callables_that_do_not_say_what_they_take() -> None:
    with pytest.raises(InputError, match=r"gave a dict, expected an nn\.Module"):
        make("builtins:dict", shape=(3, 4, 4), classes=5, rng=seeded())


def test_own_models_for_other_images_or_classes(own: str) -> None:
    with pytest.raises(InputError, match=r"failed on two blank images .*\(2, 3, 8, 8\)"):
        make_own(own, "nothing", shape=(3, 8, 8))
    with pytest.raises(InputError, match=r"gave \(2, 5\). Expected .* logits \(2, 4\)"):
        make(f"{own}:nothing", shape=(3, 4, 4), classes=4, rng=seeded())
    with pytest.raises(PlanError, match="no option 'hiden'; did you mean 'hidden'"):
        make_own(own, "with_option", hiden=3)
    with pytest.raises(PlanError, match=r"could not be imported .*ModuleNotFoundError"):
        make("no_such_module_here:make", shape=(3, 4, 4), classes=5, rng=seeded())
    with pytest.raises(PlanError, match="could not be imported"):
        make(":make", shape=(3, 4, 4), classes=5, rng=seeded())
