"""DDPM — J. Ho, A. Jain, P. Abbeel: "Denoising Diffusion Probabilistic Models", NeurIPS 2020,
https://arxiv.org/abs/2006.11239; drawn from by J. Song, C. Meng, S. Ermon: "Denoising Diffusion
Implicit Models", ICLR 2021, https://arxiv.org/abs/2010.02502

    x_t = √ᾱ_t · x_0 + √(1 − ᾱ_t) · ε,     ε ~ N(0, I)                              (DDPM, Eq. 4)
    min_θ  E ‖ε − ε_θ(x_t, t)‖²                                                    (DDPM, Eq. 14)
    x_s = √ᾱ_s · x̂_0 + √(1 − ᾱ_s − σ²) · ε_θ + σ · z                               (DDIM, Eq. 12)
    with x̂_0 = (x_t − √(1 − ᾱ_t) ε_θ) / √ᾱ_t

The network is a `UNet2DModel` of the package diffusers, and ᾱ comes from one of its schedulers. A
prior that was trained here lies on disk as a checkpoint of diffusers too, and any checkpoint of an
`UNet2DModel` can be used as a prior: from a folder, or by its name on the hub. Only safetensors are
read, never a pickle. Nobody can check what a foreign one was trained on: its facts say so.

Images are in [0, 1] everywhere else and in [−1, 1] inside. A `conditional` network is told the
class; it has one class more that means *any*, which one record in ten is given in training.

Differs from the paper: 2,000 steps of 32 images and 0.6 M parameters by default, what two CPU cores
train in a quarter of an hour, in place of 800,000 steps and 36 M; Adam's rate rises and then falls
like half a cosine, and the weights that predict held-out noise best are kept, in place of a moving
average; no attention, no dropout, no mirrored images.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from leakgauge.config import optional
from leakgauge.errors import CheckpointError, InputError, NotApplicable
from leakgauge.files import json_text, read_plain, some, tensor_bytes
from leakgauge.fitting import Clock, Lesson, Pace, fit
from leakgauge.papers import Paper
from leakgauge.priors.folder import DIGESTS, digests
from leakgauge.ranges import count, option
from leakgauge.types import Dataset, Kept, Named, Resources

HO = Paper(
    "ho2020",
    "Ho, Jonathan and Jain, Ajay and Abbeel, Pieter",
    "Denoising Diffusion Probabilistic Models",
    2020,
    "Advances in Neural Information Processing Systems",
    "https://arxiv.org/abs/2006.11239",
    fields=(("volume", "33"), ("pages", "6840--6851")),
)
DDIM = Paper(
    "song2021",
    "Song, Jiaming and Meng, Chenlin and Ermon, Stefano",
    "Denoising Diffusion Implicit Models",
    2021,
    "International Conference on Learning Representations",
    "https://arxiv.org/abs/2010.02502",
)
EXTRA = "diffusion"
EXTRAS = (("diffusers", EXTRA),)  # what a method needs that uses such a prior
PREFIX = "unet."  # of the network's weights among a prior's tensors
GROUPS = 8  # of channels that are normalised together
HELD_OUT = 128  # records on which a fit is judged, at most
LOOKS = 40  # at these, in a whole fit
ANY = 0.1  # share of the records whose class is not told in training
PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


@dataclass(frozen=True)
class DDPM:
    """A network that takes noise off pictures, in pixels (Ho 2020)."""

    papers: ClassVar[tuple[Paper, ...]] = (HO, DDIM)
    steps: int = option(2000, count(100_000_000))
    batch: int = option(32, count(1_000_000))
    lr: float = 1e-3
    widths: tuple[int, ...] = option((16, 32, 64), count(4096))
    noises: int = option(1000, count(100_000, 2))  # levels
    conditional: bool = False

    def __post_init__(self) -> None:
        if not self.widths or any(width % GROUPS for width in self.widths):
            raise ValueError(
                f"widths must be one or more multiples of {GROUPS}, got {list(self.widths)}"
            )

    def train(
        self, public: Dataset, rng: torch.Generator, resources: Resources | None = None
    ) -> Kept:
        """The prior, with its score: decibels of the noise that it predicts on records held out."""
        resources = resources or Resources()
        clock = Clock.of(resources)
        check_pictures(public)
        configs = self._configs(public)
        network, alphas = _network(configs, rng), _alphas(configs["scheduler"])
        images = public.inputs * 2 - 1
        classes = len(public.classes)
        order = torch.randperm(len(images), generator=rng)
        held = order[: max(1, min(HELD_OUT, len(order) // 10))]
        own = order[len(held) :] if len(order) > len(held) else order
        levels = torch.linspace(0, self.noises - 1, len(held)).round().long()
        fixed = torch.randn(images[held].shape, generator=rng)

        def off(weights: Mapping[str, Tensor], rows: Tensor, t: Tensor, noise: Tensor,
                labels: Tensor | None) -> Tensor:  # fmt: skip
            spread = alphas[t].view(-1, 1, 1, 1)
            x = spread.sqrt() * images[rows] + (1 - spread).sqrt() * noise  # Eq. 4
            guess = functional_call(network, dict(weights), (x, t, labels)).sample
            return F.mse_loss(guess, noise)  # Eq. 14

        def error(weights: Mapping[str, Tensor], rng: torch.Generator) -> Tensor:
            rows = own[torch.randint(len(own), (self.batch,), generator=rng)]
            t = torch.randint(self.noises, (self.batch,), generator=rng)
            noise = torch.randn((self.batch, *images.shape[1:]), generator=rng)
            labels = None
            if self.conditional:
                hidden = torch.rand(self.batch, generator=rng) < ANY
                labels = _told(public.labels[rows], classes).where(~hidden, torch.tensor(classes))
            return off(weights, rows, t, noise, labels)

        def score(weights: Mapping[str, Tensor]) -> float:
            parts = zip(*(torch.split(one, 32) for one in (held, levels, fixed)), strict=True)
            errors = [
                off(weights, rows, t, noise,
                    _told(public.labels[rows], classes) if self.conditional else None) * len(rows)
                for rows, t, noise in parts
            ]  # fmt: skip
            return -10 * math.log10(max(1e-12, float(torch.stack(errors).sum()) / len(held)))

        lesson = Lesson(lambda: dict(network.named_parameters()), error, score)
        pace = Pace(self.steps, self.lr, every=max(1, self.steps // LOOKS))
        done = fit(lesson, pace, rng, resources, clock)
        facts = {
            "kind": "ddpm",
            "shape": list(public.inputs.shape[1:]),
            "options": asdict(self) | {"widths": list(self.widths)},
            "data": public.name,
            "records": len(public),
            "classes": list(public.classes) if self.conditional else [],
            "parameters": sum(weight.numel() for weight in done.weights.values()),
            "score": done.score,
            "steps": done.steps,
            "cpu_seconds": done.cpu_seconds,
            **configs,
        }
        weights = {f"{PREFIX}{name}": weight for name, weight in done.weights.items()}
        return Kept(weights | {DIGESTS: digests(public.inputs)}, facts)

    def _configs(self, public: Dataset) -> dict[str, dict[str, Any]]:
        """What diffusers' own classes are made of: as many widths as the sides can be halved."""
        channels, *size = public.inputs.shape[1:]
        levels = 1
        while levels < len(self.widths) and all(side % 2**levels == 0 for side in size):
            levels += 1
        widths = self.widths[:levels] if levels < len(self.widths) else self.widths
        unet = {
            "_class_name": "UNet2DModel",
            "sample_size": size[0] if size[0] == size[1] else size,
            "in_channels": channels,
            "out_channels": channels,
            "layers_per_block": 1,
            "block_out_channels": list(widths),
            "down_block_types": ["DownBlock2D"] * len(widths),
            "up_block_types": ["UpBlock2D"] * len(widths),
            "norm_num_groups": GROUPS,
            "add_attention": False,
            "num_class_embeds": len(public.classes) + 1 if self.conditional else None,
        }
        scheduler = {
            "_class_name": "DDPMScheduler",
            "num_train_timesteps": self.noises,
            # The paper's rates are those of 1,000 levels.
            "beta_start": 1e-4 * 1000 / self.noises,
            "beta_end": min(0.999, 0.02 * 1000 / self.noises),
            "beta_schedule": "linear",
            "prediction_type": "epsilon",
        }
        return {"unet": unet, "scheduler": scheduler}

    @staticmethod
    def opened(kept: Kept) -> Diffusion:
        """The prior as it is used."""
        return Diffusion(kept)


class Diffusion:
    """A diffusion model, frozen. Pictures go in and out in [−1, 1] but for `sample`."""

    def __init__(self, kept: Kept, device: str = "cpu"):
        facts = kept.facts
        channels, height, width = facts["shape"]
        self.shape: tuple[int, int, int] = (channels, height, width)
        self.facts = facts
        self.device = torch.device(device)
        self.alphas = _alphas(facts["scheduler"]).to(self.device)  # ᾱ, by level
        self._kind = str(facts["scheduler"].get("prediction_type", "epsilon"))
        if self._kind not in ("epsilon", "v_prediction", "sample"):
            raise CheckpointError(
                f"a scheduler with prediction_type = {self._kind!r}: expected epsilon, "
                "v_prediction or sample"
            )
        embeds = facts["unet"].get("num_class_embeds") or 0
        self.any = embeds - 1 if facts.get("classes") else None  # the class that means any
        self.classes = embeds if self.any is None else self.any
        self._network = _network(facts, torch.Generator())
        weights = {
            name.removeprefix(PREFIX): weight
            for name, weight in kept.tensors.items()
            if name.startswith(PREFIX)
        }
        try:
            self._network.load_state_dict(weights)
        except RuntimeError as error:
            raise CheckpointError(
                f"the weights of this prior are not those of its network ({error}): train it anew"
            ) from error
        self._network.eval().requires_grad_(False).to(self.device)

    def clean(self, x: Tensor, t: int, labels: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """What the network takes for the picture and for the noise in x_t; `labels` by `told`."""
        level = torch.full((len(x),), t, device=x.device)
        out = self._network(x, level, labels).sample[:, : self.shape[0]]  # some learn variances too
        alpha = self.alphas[t]
        if self._kind == "sample":
            return out, (x - alpha.sqrt() * out) / (1 - alpha).sqrt()
        if self._kind == "v_prediction":
            return (
                alpha.sqrt() * x - (1 - alpha).sqrt() * out,
                alpha.sqrt() * out + (1 - alpha).sqrt() * x,
            )
        return (x - (1 - alpha).sqrt() * out) / alpha.sqrt(), out

    def told(self, labels: Tensor | None, count: int) -> Tensor | None:
        """Labels as the network takes them: none if it asks for none; any where it is not known."""
        if not self.classes:
            return None
        if labels is None and self.any is None:
            raise NotApplicable(
                "this prior was trained by class and has no class that means any: it needs an "
                "attack that guesses labels"
            )
        known = torch.full((count,), -1) if labels is None else labels.cpu()
        return _told(known, self.classes, self.any).to(self.device)

    def times(self, steps: int) -> list[int]:
        """So many levels from the last one down, evenly."""
        most = len(self.alphas)
        steps = min(steps, most)
        return [round((most - 1) * (1 - k / steps)) for k in range(steps)]

    def step(
        self, x0: Tensor, noise: Tensor, t: int, s: int | None, eta: float = 0.0,
        rng: torch.Generator | None = None,
    ) -> Tensor:  # fmt: skip
        """x_s of what x_t was split into, by DDIM's Eq. 12; `s=None` is the end. eta = 1 adds as
        much fresh noise as DDPM does, 0 none."""
        if s is None:
            return x0
        then, fresh = self.alphas[s], eta * self.fresh(t, s)
        x = then.sqrt() * x0 + (1 - then - fresh**2).clamp_min(0).sqrt() * noise
        if eta and rng is not None:
            x = x + fresh * torch.randn(x.shape, generator=rng).to(x)
        return x

    def fresh(self, t: int, s: int) -> float:
        """The deviation of the noise that DDPM adds on its way from level t to s (DDIM, Eq. 16)."""
        now, then = self.alphas[t], self.alphas[s]
        return float(((1 - then) / (1 - now) * (1 - now / then)).clamp_min(0).sqrt())

    @torch.no_grad()
    def sample(
        self, count: int, rng: torch.Generator, labels: Tensor | None = None, steps: int = 50
    ) -> Tensor:
        """Pictures (N, C, H, W) in [0, 1] out of noise alone."""
        x = torch.randn((count, *self.shape), generator=rng).to(self.device)
        if labels is None and self.classes:
            labels = torch.randint(self.classes, (count,), generator=rng)
        told, times = self.told(labels, count), self.times(steps)
        for t, s in zip(times, [*times[1:], None], strict=True):
            x0, _ = self.clean(x, t, told)
            x0 = x0.clamp(-1, 1)
            noise = (x - self.alphas[t].sqrt() * x0) / (1 - self.alphas[t]).sqrt()
            x = self.step(x0, noise, t, s, 1.0, rng)
        return ((x + 1) / 2).clamp(0, 1).cpu()

    def entering(self, images: Tensor) -> Tensor:
        """Pictures in [0, 1] of any shape that `check_fits` allows, as this prior has them."""
        images = images.to(self.device, torch.float32)
        if images.shape[1] == 1 and self.shape[0] == 3:
            images = images.expand(-1, 3, -1, -1)
        if images.shape[2:] != self.shape[1:]:
            images = F.interpolate(images, size=self.shape[1:], mode="bicubic", antialias=True)
        return images.clamp(0, 1) * 2 - 1

    def leaving(self, x: Tensor, shape: tuple[int, int, int]) -> Tensor:
        """The way back, to pictures of this shape in [0, 1]."""
        images = (x + 1) / 2
        if shape[0] == 1 and self.shape[0] == 3:
            images = images.mean(1, keepdim=True)
        if shape[1:] != self.shape[1:]:
            images = F.interpolate(images, size=shape[1:], mode="bicubic", antialias=True)
        return images.clamp(0, 1)

    def check_fits(self, shape: tuple[int, int, int]) -> None:
        """Refuse pictures that this prior has no idea of: they may be smaller, and grey."""
        same = shape[0] == self.shape[0] or (shape[0] == 1 and self.shape[0] == 3)
        if not same or any(own < side for own, side in zip(self.shape[1:], shape[1:], strict=True)):
            own, wanted = (" × ".join(map(str, one)) for one in (self.shape, shape))
            raise NotApplicable(
                f"its prior makes pictures of {own} and these records are {wanted}: use a prior of "
                "that shape or larger (leakgauge prior train, with --size for a folder of pictures)"
            )


def check_pictures(public: Dataset) -> None:
    """Refuse records that are no pictures, or none at all."""
    if public.inputs.dim() != 4 or not public.inputs.is_floating_point() or not len(public):
        raise InputError(
            "a prior is trained on pictures (N, C, H, W), got "
            f"{tuple(public.inputs.shape)} of {public.inputs.dtype} ({public.name})"
        )


def _told(labels: Tensor, classes: int, any_: int | None = None) -> Tensor:
    """Labels, and `any_` in place of one that is no class."""
    unknown = (labels < 0) | (labels >= classes)
    return labels.where(~unknown, torch.tensor(classes if any_ is None else any_))


def _diffusers() -> Any:
    return optional("diffusers", EXTRA, "a diffusion prior")


def _network(configs: Mapping[str, Any], rng: torch.Generator) -> nn.Module:
    """The network of these configurations, drawn from `rng` and not from torch's own generator."""
    made = _diffusers().UNet2DModel
    seed = int(torch.randint(2**62, (), generator=rng))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            network: nn.Module = made.from_config(dict(configs["unet"]))
        except (TypeError, ValueError, KeyError, AttributeError) as error:
            raise CheckpointError(
                f"its unet/config.json describes no UNet2DModel ({type(error).__name__}: {error})"
            ) from error
    return network


def _alphas(scheduler: Mapping[str, Any]) -> Tensor:
    """ᾱ by level, as diffusers' DDPMScheduler has it."""
    made = _diffusers().DDPMScheduler.from_config(dict(scheduler))
    alphas: Tensor = made.alphas_cumprod.float()
    return alphas


def checkpoint_files(kept: Kept) -> dict[str, bytes]:
    """The files that make a folder a checkpoint of diffusers, which its DDPMPipeline loads."""
    own = {n.removeprefix(PREFIX): w for n, w in kept.tensors.items() if n.startswith(PREFIX)}
    index = {
        "_class_name": "DDPMPipeline",
        "unet": ["diffusers", "UNet2DModel"],
        "scheduler": ["diffusers", "DDPMScheduler"],
    }
    return {
        "unet/diffusion_pytorch_model.safetensors": tensor_bytes(own),
        "unet/config.json": json_text(kept.facts["unet"]).encode(),
        "scheduler/scheduler_config.json": json_text(kept.facts["scheduler"]).encode(),
        "model_index.json": json_text(index).encode(),
    }


def is_checkpoint(folder: Path) -> bool:
    """Whether a folder is laid out as a checkpoint of diffusers."""
    names = ("model_index.json", "unet/config.json", "config.json")
    return any((folder / name).is_file() for name in names)


def described(folder: Path, name: str) -> dict[str, Any]:
    """The facts of a foreign checkpoint, from its configurations alone."""
    inside = folder / "unet" if (folder / "unet" / "config.json").is_file() else folder
    config = _read_config(inside / "config.json", name)
    if config.get("_class_name") != "UNet2DModel":
        raise CheckpointError(
            f"{name} is a checkpoint of {config.get('_class_name', 'something else')}, expected "
            "an UNet2DModel, which makes pictures of pixels and takes no text: name another"
        )
    places = [folder / "scheduler" / "scheduler_config.json", folder / "scheduler_config.json"]
    found = next((place for place in places if place.is_file()), None)
    scheduler = {} if found is None else _read_config(found, name)
    size = config.get("sample_size")
    sides = [size, size] if isinstance(size, int) else size
    if not isinstance(sides, list) or len(sides) != 2:
        raise CheckpointError(f"{name}: its unet/config.json names no sample_size: add it")
    return {
        "kind": "ddpm",
        "shape": [config.get("in_channels", 3), *sides],
        "options": {},
        "data": "unknown",
        "records": 0,
        "foreign": name,
        "classes": [],
        "scheduler": scheduler,
        "unet": config,
    }


def foreign(folder: Path, name: str) -> Kept:
    """A checkpoint of diffusers as a prior. Its weights must be safetensors, and all there."""
    facts = described(folder, name)
    inside = folder / "unet" if (folder / "unet" / "config.json").is_file() else folder
    if not any(inside.glob("*.safetensors")):
        pickled = [file.name for file in inside.glob("*") if file.suffix in PICKLED]
        raise CheckpointError(
            f"{name} has its weights in {some(pickled)}, and unpickling could run code: refused. "
            "Save it with save_pretrained(folder, safe_serialization=True)"
            if pickled
            else f"{name} has no weights in {inside}: expected safetensors; download it again"
        )
    made = _diffusers().UNet2DModel
    with torch.random.fork_rng(devices=[]):
        try:
            network, info = made.from_pretrained(
                str(inside), use_safetensors=True, local_files_only=True,
                low_cpu_mem_usage=False, output_loading_info=True,
            )  # fmt: skip
        except Exception as error:  # the reader answers a damaged file with a dozen kinds of error
            raise CheckpointError(
                f"{name} could not be read ({type(error).__name__}: {error}): it is damaged, or "
                "not a checkpoint of an UNet2DModel in safetensors"
            ) from error
    if wrong := [*info["missing_keys"], *info["unexpected_keys"], *info["mismatched_keys"]]:
        raise CheckpointError(
            f"{name}: its weights are not those that its config.json describes ({some(wrong)}): "
            "download it again"
        )
    tensors: Named = {f"{PREFIX}{n}": w.float() for n, w in network.state_dict().items()}
    facts["parameters"] = sum(weight.numel() for weight in tensors.values())
    return Kept(tensors, facts)


def _read_config(path: Path, name: str) -> dict[str, Any]:
    try:
        config = json.loads(read_plain(path))
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{name}: {path.name} cannot be read ({error}): expected a folder that diffusers saved"
        ) from error
    if not isinstance(config, dict):
        raise CheckpointError(f"{name}: {path.name} holds no table: download it again")
    return config
