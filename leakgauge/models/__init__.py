"""The networks of the papers by name, built from a seed, with stable parameter names.

`make` builds one of `MODELS` or the user's own `"module:callable"`, with one of `INITS`.
The last layer of every network in `MODELS` is an `nn.Linear`; all of them can be traced by torch.fx
and differentiated twice. On 8 × 8 images the deep ones end in a single pixel: batch norm in train
mode then needs two images or more.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from leakgauge.config import choose, convert, did_you_mean, imported
from leakgauge.errors import InputError, PlanError
from leakgauge.fl.model import plain
from leakgauge.models.checkpoint import load, save
from leakgauge.models.densenet import densenet_121
from leakgauge.models.init import INITS
from leakgauge.models.mobilenet import mobilenet_v2
from leakgauge.models.precode import Precode, inserted
from leakgauge.models.resnet import resnet, resnet_9
from leakgauge.models.small import cnn, convnet, lenet_5, lenet_zhu, mlp
from leakgauge.models.vit import VisionTransformer
from leakgauge.ranges import check_numbers

__all__ = ["INITS", "MODELS", "load", "make", "save"]

MODELS: dict[str, Callable[..., nn.Module]] = {
    "mlp": mlp,
    "lenet-zhu": lenet_zhu,
    "lenet-5": lenet_5,
    "cnn": cnn,
    "convnet": convnet,
    "resnet-9": resnet_9,
    "resnet-10": partial(resnet, (1, 1, 1, 1)),
    "resnet-18": partial(resnet, (2, 2, 2, 2)),
    "resnet-34": partial(resnet, (3, 4, 6, 3)),
    "densenet-121": densenet_121,
    "mobilenet-v2": mobilenet_v2,
    "vit-small": VisionTransformer,
    "vit-base": partial(VisionTransformer, patch=16, dim=768, depth=12, heads=12),
}


def make(
    name: str,
    *,
    shape: tuple[int, int, int],
    classes: int,
    init: str = "torch",
    rng: torch.Generator,
    precode: bool | dict[str, Any] = False,
    **options: Any,
) -> nn.Module:
    """A network for images of `shape` (C, H, W) and `classes` logits, on the CPU, in train mode.

    `name` is a key of `MODELS`, or "module:callable" for a model of your own: **this imports the
    module and runs its code**, so name only code you trust. The callable takes `shape` and
    `classes` if its signature names them, and the options; its model is tried on two blank images.
    `precode` puts a variational bottleneck before the last layer: true, or a table of its options.

    The weights depend on `rng` alone, from which one number is drawn; PyTorch's global generator is
    left as it was.
    """
    _check_sizes(shape, classes)
    initialise = choose(INITS, init, "initialisation")
    bottleneck = _precode(precode)
    own = ":" in name
    build = imported(name, "model") if own else choose(MODELS, name, "model")
    arguments = _arguments(name, build, {"shape": shape, "classes": classes}, options)
    seed = int(torch.randint(2**62, (), generator=rng, device=rng.device))
    with torch.random.fork_rng(devices=[]):
        stream = torch.default_generator.manual_seed(seed)  # torch.manual_seed reseeds GPUs too
        if own:
            model = plain(_built(name, build, arguments), f"The model {name!r}")
            _try_out(name, model, shape, classes)
        else:
            model = build(**arguments)
        if bottleneck is not None:
            model = inserted(model, bottleneck, shape)
        initialise(model, stream)
    return model


def _precode(value: bool | dict[str, Any]) -> Precode | None:
    if value is False:
        return None
    found = convert({} if value is True else value, Precode, "model.precode")
    check_numbers(found, "model.precode")
    assert isinstance(found, Precode)
    return found


def _check_sizes(shape: tuple[int, int, int], classes: int) -> None:
    if len(shape) != 3 or any(type(side) is not int or side < 1 for side in shape):
        raise InputError(f"shape must be (channels, height, width), all positive, got {shape!r}.")
    if type(classes) is not int or classes < 2:
        raise InputError(f"classes must be a whole number of at least 2, got {classes!r}.")


def _arguments(
    name: str, build: Callable[..., Any], sizes: dict[str, Any], options: dict[str, Any]
) -> dict[str, Any]:
    """The sizes that the callable asks for, and the options if it knows them all."""
    try:
        parameters = list(inspect.signature(build).parameters.values())
    except ValueError:  # compiled code may not say what it takes
        parameters = []
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    names = {p.name for p in parameters if p.kind in named}
    # A **kwargs takes any option, but no size: it hands on what it gets to code that names its own.
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        names |= options.keys()
    unknown = sorted(options.keys() - names)
    if unknown:
        hint = did_you_mean(unknown[0], names - sizes.keys())
        raise PlanError(f"The model {name!r} has no option {unknown[0]!r}{hint}")
    return {key: value for key, value in sizes.items() if key in names} | options


def _built(name: str, build: Callable[..., Any], arguments: dict[str, Any]) -> object:
    try:
        return build(**arguments)
    except (Exception, SystemExit) as error:  # whatever the user's code raises
        raise PlanError(
            f"The model {name!r} could not be built with {sorted(arguments)} "
            f"({type(error).__name__}: {error})."
        ) from error


def _try_out(name: str, model: nn.Module, shape: tuple[int, int, int], classes: int) -> None:
    """Runs two blank images through the model in eval mode, then restores every layer's mode."""
    modes = [(layer, layer.training) for layer in model.modules()]
    blank = torch.zeros(2, *shape)
    wanted = f"images {tuple(blank.shape)} -> logits {(2, classes)}"
    try:
        with torch.no_grad():
            logits = model.eval()(blank)
    except (Exception, SystemExit) as error:  # whatever the user's code raises
        raise InputError(
            f"The model {name!r} failed on two blank images ({type(error).__name__}: {error}). "
            f"Expected {wanted}, in float32 on the CPU."
        ) from error
    finally:
        for layer, mode in modes:
            layer.training = mode
    got = tuple(logits.shape) if isinstance(logits, Tensor) else f"a {type(logits).__name__}"
    if got != (2, classes):
        raise InputError(
            f"The model {name!r} gave {got}. Expected {wanted}: let forward return logits alone."
        )
