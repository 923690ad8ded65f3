"""What the attacks that read images from a linear layer share.

A unit z = ⟨w, x⟩ + b with a ReLU behind it gives its records away by the ratio of its gradients,
Σ δ_n·x_n over Σ δ_n, when only one record switched it on. The attacks differ in how they see to
that; here is how they find the layer, cut the public images into bins, and read the update.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import asdict, dataclass
from math import prod
from typing import Literal, TypeAlias

import torch
from torch import Tensor, nn

from leakgauge.attacks._layers import (
    Run,
    named,
    refuse_rescaled,
    rehearsing,
    shared,
    told,
    watch,
)
from leakgauge.errors import InputError, NotApplicable, Withheld
from leakgauge.fl.local import ready
from leakgauge.records import Images, Record, pictures
from leakgauge.types import Dataset, Kept, LocalTraining, Observation, Target

Functional: TypeAlias = Literal["mean", "random"]
FEWEST = 16  # public images; with fewer than bins, quantiles lie on straight lines between them

# --- the layer that reads the image ------------------------------------------------------------


@dataclass(frozen=True)
class Reader:
    """A linear layer whose first columns read the image, and the one behind its ReLU, by the names
    of their parameters. It reads pixels in [0, 1] if `raw`, else as local training normalises them.
    It is not `alone` if other layers share its parameters: their gradients are mixed into its own.
    """

    weight: str
    bias: str
    following: str
    raw: bool
    alone: bool = True

    def kept(self, units: Tensor) -> Kept:
        """This layer and its changed units, to be read by later."""
        return Kept({"units": units}, {"reader": asdict(self)})

    @staticmethod
    def of(kept: Kept) -> tuple[Reader, Tensor]:
        return Reader(**kept.facts["reader"]), kept.tensors["units"]


def reader(model: nn.Module, target: Target) -> Reader:
    """The model's first linear layer, if it reads the image or can be made to.

    Convolutions in front of it are changed in `model`: each hands the image on. The first also
    undoes the normalisation, so that no pixel is negative and a ReLU between them changes nothing.
    """
    shape = pictures(target.record).shape
    probe = torch.rand(2, *shape, generator=torch.Generator().manual_seed(0))
    pixels = prod(shape)
    runs = _runs(model, target, probe)
    at = next((i for i, run in enumerate(runs) if isinstance(run.module, nn.Linear)), None)
    if at is None:
        raise NotApplicable("images are read from a linear layer, and this model has none")
    raw = not torch.equal(runs[at].entered, target.record.entering(probe).flatten(1))
    if raw:
        for number, run in enumerate(runs[:at]):
            _hand_on(model.get_submodule(run.name), target, first=number == 0)
        runs = _runs(model, target, probe)
        entered = runs[at].entered.flatten(1)[:, :pixels]
        wanted = probe.flatten(1)
        if entered.shape != wanted.shape or not torch.allclose(entered, wanted, atol=1e-4):
            raise NotApplicable(
                "the first linear layer does not read the image, and what is in front of it cannot "
                "be made to hand the image on: that takes convolutions of stride 1 that keep the "
                "image's size, with at least as many channels, a bias in the first, and nothing "
                "but ReLU between them"
            )
    layer = runs[at]
    sent = named(model, layer.name)
    weight, bias = sent.weight, sent.bias
    if weight is None or bias is None:
        raise NotApplicable(
            f"images are read from the gradients of a weight and a bias, but {layer.name!r} has no "
            "bias or is not trained"
        )
    again = sum(run.name == layer.name for run in runs) > 1
    behind = next((run for run in runs[at + 1 :] if isinstance(run.module, nn.Linear)), None)
    if (
        behind is None
        or not torch.equal(behind.entered, layer.left.relu())
        or not isinstance(behind.module.weight, nn.Parameter)  # computed: it cannot be set
    ):
        raise NotApplicable(
            f"a unit keeps a record to itself only behind a ReLU, but the layer {layer.name!r}, "
            "which reads the image, is not followed by ReLU and another linear layer"
        )
    alone = not again and not shared(model) & {weight, bias}
    return Reader(weight, bias, f"{behind.name}.weight", raw, alone)


def _runs(model: nn.Module, target: Target, images: Tensor) -> list[Run]:
    """Every run of a linear layer or a convolution, in order, as clients would run them."""
    live = ready(model, rehearsing(target, "an imprint"))
    return watch(live, target.record.entering(images), nn.Linear, nn.Conv2d)[0]


@torch.no_grad()
def _hand_on(convolution: nn.Module, target: Target, first: bool) -> None:
    """Make a convolution hand the image on in its first channels, and zeros in the others."""
    assert isinstance(convolution, nn.Conv2d)
    channels = min(pictures(target.record).shape[0], *convolution.weight.shape[:2])
    centre = (convolution.weight.shape[2] // 2, convolution.weight.shape[3] // 2)
    for part in convolution.parameters():
        part.zero_()
    convolution.weight[range(channels), range(channels), *centre] = 1.0
    if first and convolution.bias is not None:  # x = (p − mean) / std, so p = std·x + mean
        mean, std = channelwise(pictures(target.record))
        convolution.weight[range(channels), range(channels), *centre] = std[:channels]
        convolution.bias[:channels] = mean[:channels]


def channelwise(record: Images) -> tuple[Tensor, Tensor]:
    """The mean and std of the normalisation, one per channel."""
    mean, std = (torch.tensor(v).expand(record.shape[0]) for v in (record.mean, record.std))
    return mean, std


# --- bins of one functional --------------------------------------------------------------------


def bins_of(
    target: Target,
    count: int,
    functional: Functional,
    raw: bool,
    noise: float,
    rng: torch.Generator,
) -> tuple[Tensor, Tensor]:
    """Rows (count, pixels) and biases, falling, of units that are on above rising thresholds of one
    functional. Their bins hold equally many public images; the lowest reaches down to all others.

    The functional is scaled so that its values have standard deviation 1. `noise` disguises every
    row, relative to its own size.
    """
    images = public_images(target).inputs
    if len(images) < FEWEST:
        raise NotApplicable(
            f"quantiles over public images need at least {FEWEST} of them, got {len(images)}: "
            "give more public images"
        )
    entering = (images if raw else target.record.entering(images)).flatten(1)
    pixels = entering.shape[1]
    if functional == "mean":
        row = torch.full((pixels,), 1 / pixels)
    else:
        row = torch.randn(pixels, generator=rng) / pixels**0.5
    row = row / (entering @ row).std()
    values = (entering @ row).sort().values
    # The lowest threshold lies far below: no record may fall short of it.
    lowest = values[:1] - 10
    inner = torch.quantile(values.double(), torch.arange(1, count).double() / count).float()
    rows = row + noise * row.square().mean().sqrt() * torch.randn(count, pixels, generator=rng)
    return rows, -torch.cat([lowest, inner])


def public_images(target: Target) -> Dataset:
    """The server's own images: the attacks that set thresholds measure quantiles over them."""
    if target.public is None:
        raise NotApplicable(
            "the thresholds of this attack are quantiles over public images, and this server has "
            "none: give target() a data set of the same kind as its second argument"
        )
    if target.public.inputs.shape[1:] != target.record.shape:
        raise InputError(
            f"the public images have shape {tuple(target.public.inputs.shape[1:])}, those of the "
            f"clients {target.record.shape}: both must be of the same kind"
        )
    return target.public


def repeated(size: int, count: int, gain: float, rng: torch.Generator) -> Tensor:
    """The columns (size, count) of the layer behind an imprint: all equal, so that every unit that
    a record switched on receives the same error, and neighbours differ by one bin exactly."""
    return (torch.randn(size, 1, generator=rng) * (3 * gain / count)).repeat(1, count)


def block(
    shape: tuple[int, int, int], rows: Tensor, biases: Tensor, gain: float, rng: torch.Generator
) -> nn.Sequential:
    """Linear, ReLU, Linear: units with these rows and biases, which hand on an image of `shape`."""
    count, columns = rows.shape
    pixels = prod(shape)
    # Made empty: initialising them would draw from the global generator.
    first = nn.Linear(columns, count, device="meta").to_empty(device="cpu")
    second = nn.Linear(count, pixels, device="meta").to_empty(device="cpu")
    with torch.no_grad():
        first.weight.copy_(rows)
        first.bias.copy_(biases)
        second.weight.copy_(repeated(pixels, count, gain, rng))
        second.bias.zero_()
    return nn.Sequential(
        OrderedDict(
            flatten=nn.Flatten(), fc1=first, act=nn.ReLU(), fc2=second, image=nn.Unflatten(1, shape)
        )
    )


# --- reading the update ------------------------------------------------------------------------


def knowledge(seen: Observation, name: str) -> tuple[Kept, LocalTraining, int]:
    """What every such attack holds: what it kept, the local training, the number of records."""
    training, records = told(seen, name)
    if seen.kept is None:
        raise Withheld(
            f"{name} reads the update by what it kept when it changed the model, and this observer "
            "kept nothing: observe a round of `tampered` with kept = what prepare() gave"
        )
    refuse_rescaled(training, name)
    return seen.kept, training, records


def neighbours(gradients: Tensor) -> Tensor:
    """What each bin adds: a unit is on for the records of its own bin and of all bins above."""
    return gradients - torch.cat([gradients[1:], torch.zeros_like(gradients[:1])])


def ratios(weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """The quotients of all rows that passed on a gradient, and which rows those are."""
    rows = (bias.abs() > 1e-7 * bias.abs().max()).nonzero().flatten()
    if not len(rows):
        raise NotApplicable("no unit of the layer that reads the image passed on a gradient")
    return weight[rows] / bias[rows, None], rows


def as_images(quotients: Tensor, record: Record, raw: bool) -> Tensor:
    images = quotients.view(-1, *record.shape)
    return images if raw else record.leaving(images)


def best(images: Tensor, strength: Tensor, records: int) -> Tensor:
    """The indices of the `records` candidates that look most like single records, best first.

    Candidates whose pixels are all near one of 256 levels come first, as mixtures of pictures of 8
    bits are not; then those that another unit shows too, as units mix records differently; then
    those within [0, 1]; then the others: each by the strength of their gradient. Of candidates that
    show the same picture only the first is kept as long as there are others.
    """
    pixels = images.flatten(1)
    levels = 255 * pixels
    grain = (levels - levels.round()).square().mean(1).sqrt()  # 1/√12 where there are no levels
    outside = (pixels - pixels.clamp(0, 1)).square().mean(1).sqrt()
    apart = torch.cdist(pixels.double(), pixels.double()) / pixels.shape[1] ** 0.5
    twice = (apart < 1e-4).sum(1) > 1
    tier = torch.where(grain < 0.1, 0, torch.where(twice, 1, 2)) + 3 * (outside > 0.02)
    order = strength.argsort(descending=True, stable=True)
    order = order[tier[order].argsort(stable=True)]
    alike = (apart < 0.08)[order][:, order]
    first: list[int] = []
    again: list[int] = []
    for place in range(len(order)):
        (again if alike[place, first].any() else first).append(place)
    return order[torch.tensor(first + again)[:records]]


def read(
    weight: Tensor, bias: Tensor, record: Record, raw: bool, records: int
) -> tuple[Tensor, Tensor, int]:
    """The images of at most `records` rows, best first, these rows' quotients, and how many rows
    there were to choose from."""
    quotients, rows = ratios(weight, bias)
    images = as_images(quotients, record, raw)
    chosen = best(images, bias[rows].abs(), records)
    return images[chosen].clamp(0, 1).float(), quotients[chosen], len(rows)
