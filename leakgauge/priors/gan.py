"""A small generative adversarial network (I. Goodfellow et al.: "Generative Adversarial Nets",
NeurIPS 2014), convolutional as A. Radford, L. Metz, S. Chintala: "Unsupervised Representation
Learning with Deep Convolutional Generative Adversarial Networks", ICLR 2016.

    D:  min  E max(0, 1 − D(x)) + E max(0, 1 + D(G(z)))          z ~ N(0, I)
    G:  min  −E D(G(z)) + c·E_x min_z ‖x − G(z)‖²

G makes maps of about 4 × 4 of a latent z, and doubles their sides (nearest neighbour, a 3 × 3
convolution, a leaky ReLU, every pixel brought to one length) up to the image, through a sigmoid.
Each of its images depends on its own z alone: there is no batch normalisation. D halves the sides
by strided convolutions, every weight divided by its largest singular value (T. Miyato et al.:
"Spectral Normalization for Generative Adversarial Networks", ICLR 2018; one power iteration per
step). The last term is ours, after K. Li and J. Malik ("Implicit Maximum Likelihood Estimation",
2018): every real picture of a step has a made one near it, at a coarse scale. In so short a
training it keeps G from showing a few pictures only. Kept are the means of G's weights over the
last hundreds of steps.

`score` says how well G covers images that it was not trained on: the mean PSNR of each with the
nearest of NEAREST samples; `mean_psnr` is that of the mean image, which no sample has to be like.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from leakgauge.errors import CheckpointError
from leakgauge.fitting import Clock
from leakgauge.papers import Paper
from leakgauge.priors._pictures import checked, checked_kind, decibels
from leakgauge.priors.folder import DIGESTS, digests
from leakgauge.ranges import POSITIVE, count, option
from leakgauge.types import Dataset, Kept, Named, Resources

GOODFELLOW = Paper(
    "goodfellow2014",
    "Goodfellow, Ian and Pouget-Abadie, Jean and Mirza, Mehdi and Xu, Bing and Warde-Farley, David "
    "and Ozair, Sherjil and Courville, Aaron and Bengio, Yoshua",
    "Generative Adversarial Nets",
    2014,
    "Advances in Neural Information Processing Systems",
    "https://arxiv.org/abs/1406.2661",
    fields=(("volume", "27"),),
)
MIYATO = Paper(
    "miyato2018",
    "Miyato, Takeru and Kataoka, Toshiki and Koyama, Masanori and Yoshida, Yuichi",
    "Spectral Normalization for Generative Adversarial Networks",
    2018,
    "International Conference on Learning Representations",
    "https://openreview.net/forum?id=B1QRgziT-",
)
HELD = 200  # images held out, and at most a tenth of all
NEAREST = 1000  # samples among which the nearest is sought
EVERY = 100  # steps between two checkpoints
MEAN = 0.995  # share of the mean weights that a step keeps
FADING = 0.5  # of Adam's mean of slopes, that a step keeps
SMALLEST = 4  # about the side of the first maps
GAIN = 1.2  # by which a layer of the judge may stretch, at most
COVER = 10.0  # weight of the real pictures' distance to the nearest made ones
COARSE = 8  # about the side at which that is taken
SLOPE = 0.2  # of the leaky ReLUs below zero


@dataclass(frozen=True)
class GAN:
    """A generator, trained against a judge (Goodfellow 2014)."""

    papers: ClassVar[tuple[Paper, ...]] = (GOODFELLOW, MIYATO)
    kind: ClassVar[str] = "gan"
    latent: int = option(64, count(100_000))
    width: int = option(96, count(10_000))  # channels of the smallest maps
    steps: int = option(2000, count(100_000_000))
    batch: int = option(32, count(100_000))
    lr: float = option(1e-3, POSITIVE)

    def train(
        self, public: Dataset, rng: torch.Generator, resources: Resources | None = None
    ) -> Kept:
        """The prior of these records. Killed and begun again with the same `rng` and checkpoint, it
        ends at the same weights."""
        resources = resources or Resources()
        every = max(1, min(EVERY, self.steps // 5))
        clock = Clock.of(resources)
        shape = checked(public)
        order = torch.randperm(len(public), generator=rng)
        held = max(1, min(HELD, len(public) // 10))
        images, aside = public.inputs[order[held:]].float(), public.inputs[order[:held]].float()
        run = _Run.begun(self, shape, rng)
        before = resources.checkpoint.load() if resources.checkpoint is not None else None
        if before is not None:
            run.go_on(before, rng)
        spent = run.cpu_seconds
        while run.step < self.steps and not clock.up:
            error = run.advance(self, images, rng)
            if resources.progress is not None:
                resources.progress(run.step, self.steps, error)
            if resources.checkpoint is not None and run.step % every == 0:
                run.cpu_seconds = spent + clock.spent
                resources.checkpoint.save(run.kept(rng))
        facts: dict[str, Any] = {
            "kind": self.kind,
            "shape": list(shape),
            "options": asdict(self),
            "data": public.name,
            "records": len(public),
            "parameters": sum(w.numel() for w in run.mean.values()),
            "steps": run.step,
        }
        prior = GANPrior.of(Kept(run.mean, facts))
        facts["score"] = prior.coverage(aside, rng)
        facts["mean_psnr"] = decibels(images.mean(0).expand_as(aside), aside)
        facts["cpu_seconds"] = spent + clock.spent
        return Kept(run.mean | {DIGESTS: digests(public.inputs)}, facts)

    @staticmethod
    def opened(kept: Kept) -> GANPrior:
        return GANPrior.of(kept)


@dataclass(frozen=True)
class GANPrior:
    """A trained generator."""

    shape: tuple[int, int, int]
    latent: int
    weights: Named

    @classmethod
    def of(cls, kept: Kept) -> GANPrior:
        shape = checked_kind(kept, GAN.kind)
        options = kept.facts["options"]
        wanted = layout(int(options["latent"]), int(options["width"]), shape)
        weights = {name: kept.tensors.get(name) for name in wanted}
        if any(w is None or tuple(w.shape) != wanted[name] for name, w in weights.items()):
            raise CheckpointError(
                f"the weights of this prior are not those of a {GAN.kind} with {dict(options)}: "
                "train it anew"
            )
        held = {name: w.float() for name, w in weights.items() if w is not None}
        return cls(shape, int(options["latent"]), held)

    def decode(self, z: Tensor, weights: Mapping[str, Tensor] | None = None) -> Tensor:
        """Images in [0, 1] of latents (N, latent), by its own or by other weights."""
        own = self.weights if weights is None else weights
        return pictures({name: w.to(z) for name, w in own.items()}, z, self.shape[1:])

    def sample(self, count: int, rng: torch.Generator, labels: Tensor | None = None) -> Tensor:
        """Images that saw no update. Labels change nothing: it was trained without them."""
        z = torch.randn(count, self.latent, generator=rng)
        with torch.no_grad():
            return torch.cat([self.decode(part) for part in torch.split(z, 100)])

    def coverage(self, images: Tensor, rng: torch.Generator) -> float:
        """The mean over these images of the PSNR with the nearest of NEAREST samples."""
        shown = self.sample(NEAREST, rng).flatten(1)
        near = torch.cdist(images.flatten(1), shown).square().min(1).values / shown.shape[1]
        return float((-10 * near.clamp_min(1e-12).log10()).mean())


# --- the two networks -----------------------------------------------------------------------------


def layout(latent: int, width: int, shape: tuple[int, int, int]) -> dict[str, tuple[int, ...]]:
    """The shapes of a generator's weights, by name and in their order."""
    channels, *size = shape
    doublings = _doublings(size)
    widths = [width] + [max(width // 4, width >> k + 1, 1) for k in range(doublings)]
    small = [math.ceil(side / 2**doublings) for side in size]
    shapes: dict[str, tuple[int, ...]] = {"first": (latent, width, *small)}
    for k in range(doublings):
        shapes[f"double{k}.weight"] = (widths[k + 1], widths[k], 3, 3)
        shapes[f"double{k}.bias"] = (widths[k + 1],)
    return shapes | {"last.weight": (channels, widths[-1], 3, 3), "last.bias": (channels,)}


def pictures(weights: Mapping[str, Tensor], z: Tensor, size: tuple[int, ...]) -> Tensor:
    """What a generator makes of latents (N, latent)."""
    x = F.leaky_relu(torch.einsum("nl,lchw->nchw", z, weights["first"]), SLOPE)
    doublings = _doublings(size)
    for k in range(doublings):
        name, sides = f"double{k}", [math.ceil(s / 2 ** (doublings - 1 - k)) for s in size]
        x = F.conv2d(F.interpolate(x, sides), weights[f"{name}.weight"], padding=1)
        x = F.leaky_relu(x + weights[f"{name}.bias"].view(1, -1, 1, 1), SLOPE)
        x = x * (x.square().mean(1, keepdim=True) + 1e-8).rsqrt()  # one length for every pixel
    return F.conv2d(x, weights["last.weight"], weights["last.bias"], padding=1).sigmoid()


def _judge_layout(width: int, shape: tuple[int, int, int]) -> dict[str, tuple[int, ...]]:
    channels, *size = shape
    halvings = _doublings(size)
    widths = [max(width >> halvings - k, width // 4, 1) for k in range(halvings)] + [width]
    shapes: dict[str, tuple[int, ...]] = {
        "first.weight": (widths[0], channels, 3, 3), "first.bias": (widths[0],),
    }  # fmt: skip
    for k in range(halvings):
        shapes[f"halve{k}.weight"] = (widths[k + 1], widths[k], 4, 4)
        shapes[f"halve{k}.bias"] = (widths[k + 1],)
        size = [(side + 2 * (side % 2) - 2) // 2 + 1 if side > 1 else 1 for side in size]
    return shapes | {"last.weight": (1, widths[-1] * math.prod(size)), "last.bias": (1,)}


def _judged(weights: Mapping[str, Tensor], x: Tensor) -> Tensor:
    """What the judge says of images: above 0 it takes them for real."""
    x = F.conv2d(2 * x - 1, weights["first.weight"], weights["first.bias"], padding=1)
    x = F.leaky_relu(x, SLOPE)
    for k in range(sum(name.startswith("halve") for name in weights) // 2):
        odd = [s % 2 for s in x.shape[2:]]
        x = F.pad(x, (0, odd[1], 0, odd[0]))  # sides are even: a window of 4 halves them
        x = F.conv2d(x, weights[f"halve{k}.weight"], weights[f"halve{k}.bias"], 2, padding=1)
        x = F.leaky_relu(x, SLOPE)
    return F.linear(x.flatten(1), weights["last.weight"], weights["last.bias"])[:, 0]


def _doublings(size: tuple[int, ...] | list[int]) -> int:
    return max(0, math.ceil(math.log2(max(size) / SMALLEST)))


# --- the training ---------------------------------------------------------------------------------


@dataclass
class _Player:
    """The weights of one of the two, and Adam's two means of their slopes."""

    weights: Named
    first: Named
    second: Named

    @classmethod
    def begun(cls, weights: Named) -> _Player:
        zeros = [{n: torch.zeros_like(w) for n, w in weights.items()} for _ in range(2)]
        return cls(weights, *zeros)

    def free(self) -> Named:
        return {n: w.detach().requires_grad_() for n, w in self.weights.items()}

    def move(self, free: Named, error: Tensor, lr: float, step: int) -> None:
        """One step of Adam (β = FADING, 0.99) down the error's slope at the free weights."""
        slopes = torch.autograd.grad(error, list(free.values()))
        with torch.no_grad():
            for (name, weight), slope in zip(self.weights.items(), slopes, strict=True):
                mean = self.first[name].lerp_(slope, 1 - FADING)
                square = self.second[name].mul_(0.99).addcmul_(slope, slope, value=0.01)
                root = square.sqrt().div_((1 - 0.99**step) ** 0.5).add_(1e-8)
                weight.addcdiv_(mean, root, value=-lr / (1 - FADING**step))


@dataclass
class _Run:
    """A training on its way, changed in place."""

    maker: _Player
    judge: _Player
    mean: Named  # of the maker's weights
    singular: Named  # a vector for each of the judge's weights: near the left one of its largest
    step: int = 0
    cpu_seconds: float = 0.0

    @classmethod
    def begun(cls, how: GAN, shape: tuple[int, int, int], rng: torch.Generator) -> _Run:
        maker = _drawn(layout(how.latent, how.width, shape), rng)
        judge = _drawn(_judge_layout(how.width, shape), rng)
        singular = {
            name: torch.randn(len(w), generator=rng) for name, w in judge.items() if w.dim() > 1
        }
        mean = {name: w.clone() for name, w in maker.items()}
        return cls(_Player.begun(maker), _Player.begun(judge), mean, singular)

    def parts(self) -> dict[str, Named]:
        return {
            "maker": self.maker.weights, "maker1": self.maker.first, "maker2": self.maker.second,
            "judge": self.judge.weights, "judge1": self.judge.first, "judge2": self.judge.second,
            "mean": self.mean, "singular": self.singular,
        }  # fmt: skip

    def kept(self, rng: torch.Generator) -> Kept:
        tensors = {f"{p}.{n}": t for p, named in self.parts().items() for n, t in named.items()}
        return Kept(
            tensors | {"rng": rng.get_state()},
            {"step": self.step, "cpu_seconds": self.cpu_seconds},
        )

    def go_on(self, kept: Kept, rng: torch.Generator) -> None:
        for part, named in self.parts().items():
            for name in named:
                named[name] = kept.tensors[f"{part}.{name}"].clone()
        self.step, self.cpu_seconds = int(kept.facts["step"]), float(kept.facts["cpu_seconds"])
        rng.set_state(kept.tensors["rng"])

    def advance(self, how: GAN, images: Tensor, rng: torch.Generator) -> float:
        """One step of the judge, one of the maker; what the judge's error was before."""
        self.step += 1
        lr = how.lr * (0.5 + 0.5 * math.cos(math.pi * (self.step - 1) / how.steps))
        size = tuple(images.shape[2:])
        real = images[torch.randint(len(images), (how.batch,), generator=rng)]
        z = torch.randn(how.batch, how.latent, generator=rng)
        maker = self.maker.free()
        shown = pictures(maker, z, size)
        judge = self.judge.free()
        says = _judged(self.tamed(judge), torch.cat([real, shown.detach()]))
        error = (1 - says[: how.batch]).relu().mean() + (1 + says[how.batch :]).relu().mean()
        self.judge.move(judge, error, lr, self.step)
        tamed = {n: w.detach() for n, w in self.tamed(self.judge.weights).items()}
        missed = COVER * uncovered(real, shown)
        self.maker.move(maker, missed - _judged(tamed, shown).mean(), lr, self.step)
        keep = min(MEAN, (1 + self.step) / (10 + self.step))
        for name, weight in self.maker.weights.items():
            self.mean[name].lerp_(weight, 1 - keep)
        return float(error.detach())

    def tamed(self, weights: Mapping[str, Tensor]) -> Named:
        """The judge's weights, each divided by its largest singular value as known so far."""
        tame: Named = {}
        for name, weight in weights.items():
            if name not in self.singular:
                tame[name] = weight
                continue
            matrix = weight.flatten(1)
            with torch.no_grad():
                right = F.normalize(matrix.T @ self.singular[name], dim=0)
                self.singular[name] = F.normalize(matrix @ right, dim=0)
            tame[name] = GAIN * weight / (self.singular[name] @ matrix @ right)
        return tame


def uncovered(real: Tensor, shown: Tensor) -> Tensor:
    """The mean squared distance of real pictures to the nearest made one, both at about COARSE
    pixels per side."""
    by = max(1, max(real.shape[2:]) // COARSE)
    wanted, made = (F.avg_pool2d(x, by).flatten(1) for x in (real, shown))
    with torch.no_grad():
        nearest = torch.cdist(wanted, made).argmin(1)
    return (wanted - made[nearest]).square().mean()


def _drawn(shapes: Mapping[str, tuple[int, ...]], rng: torch.Generator) -> Named:
    """First weights, normal by the number of inputs."""
    weights: Named = {}
    for name, shape in shapes.items():
        if len(shape) == 1:
            weights[name] = torch.zeros(shape)
        else:
            fan = shape[0] if name == "first" else math.prod(shape[1:])
            weights[name] = torch.randn(shape, generator=rng) / math.sqrt(fan)
    return weights
