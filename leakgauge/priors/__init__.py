"""Generative priors: what pictures look like, learned from public records. One file per kind.

A prior is trained before any update is seen, by `leakgauge prior train` or inside the preparation
of an attack, and is a `Kept`: weights, and plain facts that say of which kind it is and what it was
trained on. In a folder it lies as `prior.safetensors` and `prior.json` (folder.py). Where a prior
is named, the folder of a diffusers checkpoint and a name on the hub of Hugging Face serve, too.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from leakgauge.config import choose, optional
from leakgauge.errors import CheckpointError, MissingExtra, NotApplicable, Withheld
from leakgauge.files import read_tensors
from leakgauge.papers import Paper
from leakgauge.priors import ddpm, folder
from leakgauge.priors.autoencoder import Autoencoder
from leakgauge.priors.ddpm import DDPM, Diffusion
from leakgauge.priors.gan import GAN
from leakgauge.types import Dataset, Kept, Resources


class Prior(Protocol):
    """What a trained prior can do, whatever its kind: `sample` is what it shows on its own."""

    @property
    def shape(self) -> tuple[int, int, int]: ...

    def sample(self, count: int, rng: torch.Generator, labels: Tensor | None = None) -> Tensor: ...


class Training(Protocol):
    """The options of a training. `train` goes on from `resources.checkpoint` to the same weights
    if it was killed; `opened` makes of what was kept what can be used."""

    papers: ClassVar[tuple[Paper, ...]]

    def train(
        self, public: Dataset, rng: torch.Generator, resources: Resources | None = None
    ) -> Kept: ...

    @staticmethod
    def opened(kept: Kept) -> Prior: ...


KINDS: dict[str, type[Training]] = {
    "autoencoder": Autoencoder,
    "ddpm": DDPM,
    "gan": GAN,
}

HUB = re.compile(r"[\w.-]+(/[\w.-]+)?")


@dataclass(frozen=True)
class Described:
    """A prior without its weights: the folder, its facts, and a digest of every record that it was
    trained on, None where nobody kept them."""

    place: Path
    facts: dict[str, Any]
    digests: Tensor | None

    @property
    def files(self) -> list[Path]:
        """What it is made of, on disk."""
        wanted = (
            file for file in self.place.rglob("*") if file.suffix in (".json", ".safetensors")
        )
        return sorted(file for file in wanted if file.is_file())


def of(
    place: str, kind: str, default: Training, public: Dataset | None, rng: torch.Generator,
    resources: Resources | None = None,
) -> Kept:  # fmt: skip
    """The prior at this place, which must be of this kind; where none is given, the default is
    trained on the public records."""
    if place:
        kept = load(place)
        if kept.facts["kind"] != kind:
            raise NotApplicable(
                f"the prior {place} is of the kind {kept.facts['kind']}, expected {kind}: train "
                f"one with `leakgauge prior train --kind {kind}`"
            )
        return kept
    if public is None or not len(public):
        raise Withheld(
            "it trains a prior on public records, and there are none: name a trained one as prior, "
            "or declare federation.public"
        )
    return default.train(public, rng, resources)


def load(place: str) -> Kept:
    """The prior in a folder, its own or of a diffusers checkpoint, or of this name on the hub."""
    found = located(place)
    if (found / folder.FACTS).is_file() or not ddpm.is_checkpoint(found):
        return folder.read(found)
    return ddpm.foreign(found, place)


def described(place: str, below: Path = Path()) -> Described:
    """What a prior is, without reading its weights."""
    found = located(place, below)
    if (found / folder.FACTS).is_file() or not ddpm.is_checkpoint(found):
        facts = folder.read_facts(found)
        choose(KINDS, facts["kind"], "kind of prior")
        return Described(found, facts, read_tensors(found / folder.WEIGHTS).get(folder.DIGESTS))
    return Described(found, ddpm.described(found, place), None)


def save(kept: Kept, place: Path) -> None:
    """Write a prior into a folder; a diffusion model so that diffusers loads it, too."""
    beside = ddpm.checkpoint_files(kept) if kept.facts["kind"] == "ddpm" else {}
    folder.write(kept, place, beside)


def opened(kept: Kept) -> Prior:
    """The prior as it is used."""
    return choose(KINDS, kept.facts.get("kind"), "kind of prior").opened(kept)


def diffusion(place: str, use: str) -> Diffusion:
    """The diffusion model at this place, read once; `use` says who needs it."""
    if not place:
        raise NotApplicable(
            f'{use} needs a diffusion prior: name one, as in prior = "FOLDER" (leakgauge prior '
            "train --kind ddpm makes one)"
        )
    found = located(place)
    stamps = tuple((str(f), f.stat().st_mtime_ns) for f in Described(found, {}, None).files)
    return _diffusion(place, stamps)


@lru_cache(maxsize=4)
def _diffusion(place: str, stamps: tuple[tuple[str, int], ...]) -> Diffusion:
    kept = load(place)
    if kept.facts["kind"] != "ddpm":
        raise NotApplicable(
            f"the prior {place} is of the kind {kept.facts['kind']}, expected a diffusion model: "
            "train one with `leakgauge prior train --kind ddpm`"
        )
    return Diffusion(kept)


def located(place: str, below: Path = Path()) -> Path:
    """The folder of a prior: a path, relative to `below` or in the user's home; else that of the
    hub's copy on this machine, which is fetched if it is not there. Of a hub only configurations
    and safetensors are fetched."""
    path = below / Path(place).expanduser()
    if path.is_dir():
        return path.resolve()
    looks = f"no folder {path}: expected one that `leakgauge prior train` or diffusers wrote"
    if path.exists() or not HUB.fullmatch(place) or place.startswith("."):
        raise CheckpointError(f"prior {place!r}: {looks}")
    try:
        hub = optional("huggingface_hub", ddpm.EXTRA, "a prior from the hub")
        return Path(hub.snapshot_download(place, allow_patterns=["*.json", "*.safetensors"]))
    except MissingExtra as error:
        raise MissingExtra(f"prior {place!r}: {looks}; and {error}") from None
    except Exception as error:  # no network, no such name, no room: a dozen kinds of error
        first = (str(error).strip() or "no reason given").splitlines()[0]
        raise CheckpointError(
            f"prior {place!r}: {looks}; nor did the hub give a model of that name "
            f"({type(error).__name__}: {first}): check the name, and the network"
        ) from error


__all__ = [
    "DDPM",
    "GAN",
    "KINDS",
    "Autoencoder",
    "Described",
    "Diffusion",
    "Prior",
    "Training",
    "described",
    "diffusion",
    "load",
    "located",
    "of",
    "opened",
    "save",
]
