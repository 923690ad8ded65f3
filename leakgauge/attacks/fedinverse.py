"""FedInverse — D. Wu, J. Bai, Y. Song, J. Chen, W. Zhou, Y. Xiang, A. Sajjanhar: "FedInverse:
Evaluating Privacy Leakage in Federated Learning", ICLR 2024,
https://openreview.net/forum?id=nTNgkEIfeb

    min_z  −ln p(y | G(z)) + λ·HSIC(G(z_a), G(z_b)) + β·‖z‖²/dim

Model inversion by a client, or by anybody who holds the global model once it has learned: of a
generator G, trained on public images, the latents are sought whose pictures the model is surest to
be of class y. With λ = 0 that is model inversion alone ("MI"). The Hilbert–Schmidt independence
criterion (A. Gretton et al., 2005) of the two halves of all candidates,

    HSIC(a, b) = tr(K H L H) / (n − 1)²,  K_ij = exp(−‖a_i − a_j‖² / 2σ²d),  L of b,  H = I − 1/n

keeps them from being one picture again and again ("MI-HSIC"); here it is divided by
√(HSIC(a, a)·HSIC(b, b)), so that λ means the same for all sizes.

Nothing of the update is read but the labels that are wanted (`images="records"`); with
`images="classes"` not even these: one picture for every class. The pictures are prototypes, what
the model takes a class to be, and not the records of a client.

Needs: the weights, and a trained generator (`prior`) or public images to train a small one on; to
know which labels are wanted, the local training and the number of records. Labels are inferred
unless `labels="known"`. Facts: `confidence`, of the model in each picture. Beside the guess stands
a sample of the generator that saw neither model nor update.
Differs from the paper: of its three attackers the first, GMI; the length of z in place of a
discriminator's opinion; Adam; several candidates for each picture, of which the surest is shown;
the generator is as small as the minutes in which it is trained.
"""

from __future__ import annotations

import copy
import math
import time
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from leakgauge.attacks._generative import PriorSearch, generator_of, told_of
from leakgauge.attacks._labels import infer
from leakgauge.attacks._layers import weighed
from leakgauge.attacks._matching import first_of
from leakgauge.papers import Paper
from leakgauge.ranges import FROM_0, POSITIVE, count, option
from leakgauge.records import pictures
from leakgauge.tensors import spawned
from leakgauge.types import Knowledge, Observation, Reconstruction, Resources, Stopped

PAPER = Paper(
    "wu2024",
    "Wu, Di and Bai, Jun and Song, Yiliao and Chen, Junjun and Zhou, Wei and Xiang, Yong and "
    "Sajjanhar, Atul",
    "{FedInverse}: Evaluating Privacy Leakage in Federated Learning",
    2024,
    "International Conference on Learning Representations",
    "https://openreview.net/forum?id=nTNgkEIfeb",
)
PROTOTYPES = (
    "these pictures are what the model takes a class to be: nothing of the update was read but its "
    "labels, and a likeness to a record comes from the class and from the generator"
)


@dataclass(frozen=True)
class FedInverse(PriorSearch):
    """Inverts the global model to class prototypes (Wu 2024)."""

    papers: ClassVar[tuple[Paper, ...]] = (PAPER,)
    iterations: int = 300
    images: Literal["records", "classes"] = "records"
    candidates: int = option(8, count(100_000))  # latents per picture
    lr: float = 0.05
    hsic: float = option(0.05, FROM_0)  # λ; 0: model inversion alone
    sigma: float = option(0.5, POSITIVE)  # of the kernels
    near: float = option(0.01, FROM_0)  # β

    @property
    def needs(self) -> frozenset[Knowledge]:
        if self.images == "records":
            return super().needs
        return frozenset({"weights"}) if self.prior else frozenset({"weights", "public"})

    def reconstruct(
        self, seen: Observation, rng: torch.Generator, resources: Resources | None = None
    ) -> Reconstruction:
        weighed(seen, "fedinverse")
        prior, resources = generator_of(seen, "fedinverse"), resources or Resources()
        assert seen.kept is not None
        alone = spawned(rng, "prior")
        classes = torch.arange(seen.task.count)
        wanted = infer(seen, self.labels, rng) if self.images == "records" else classes
        device, dtype = torch.device(resources.device), resources.dtype or torch.float32
        model = copy.deepcopy(seen.model).eval().requires_grad_(False).to(device, dtype)
        record = pictures(seen.record)
        target = wanted.repeat_interleave(self.candidates).to(device)
        deadline = math.inf if resources.seconds is None else time.monotonic() + resources.seconds
        total = self.iterations * self.restarts
        ends: set[Stopped] = set()
        notes: list[str] = [PROTOTYPES]
        runs: list[tuple[float, list[float], Tensor]] = []
        done = 0
        for _ in range(self.restarts):
            z = torch.randn(len(target), prior.latent, generator=rng).to(device, dtype)
            search = torch.optim.Adam([z.requires_grad_()], lr=self.lr)
            history: list[float] = []
            best, least = z.detach().clone(), math.inf
            for _ in range(self.iterations):
                with torch.enable_grad():
                    shown = prior.decode(z)
                    unsure = F.cross_entropy(model(record.entering(shown)), target)
                    objective = unsure + self.near * z.square().mean()
                    if self.hsic and len(z) >= 4:
                        half = len(z) // 2
                        # Neighbours are candidates of one picture: each half has some of all.
                        parts = shown[0::2][:half].flatten(1), shown[1::2][:half].flatten(1)
                        objective = objective + self.hsic * alike(*parts, self.sigma)
                    (z.grad,) = torch.autograd.grad(objective, [z])
                history.append(float(objective.detach()))
                if history[-1] < least:
                    best, least = z.detach().clone(), history[-1]
                search.step()
                done += 1
                if resources.progress:
                    resources.progress(done, total, history[-1])
                if time.monotonic() > deadline:
                    ends.add("time")
                    break
            runs.append((least, history, best))
            if ends:
                notes.append(
                    f"stopped by the time budget of {resources.seconds:g} s after {done} of "
                    f"{total} iterations"
                )
                break
        least, history, best = min(runs, key=lambda run: run[0])
        with torch.no_grad():
            shown = prior.decode(best)
            sure = model(record.entering(shown)).softmax(1)
        sure = sure.gather(1, target[:, None]).view(-1, self.candidates)
        surest = sure.argmax(1)
        rows = torch.arange(len(wanted), device=device) * self.candidates + surest
        chosen = sure.gather(1, surest[:, None])[:, 0].double()
        return Reconstruction(
            inputs=shown[rows].clamp(0, 1).float().cpu(),
            labels=wanted,
            residual=float(-chosen.clamp_min(1e-30).log().mean()),
            history=tuple(history),
            iterations=done,
            objectives=tuple(run[0] for run in runs),
            stopped=first_of(ends),
            notes=tuple(notes),
            facts={"confidence": chosen.tolist()} | told_of(seen.kept),
            prior=prior.sample(len(wanted), alone),
        )


def hsic(a: Tensor, b: Tensor, sigma: float) -> Tensor:
    """How far two samples (n, d), paired row by row, depend on each other: 0 if not at all."""
    n = len(a)
    ours, theirs = (_centred(_kernel(x, sigma)) for x in (a, b))
    return (ours * theirs).sum() / (n - 1) ** 2  # tr(K H L H), as H is a projection


def alike(a: Tensor, b: Tensor, sigma: float) -> Tensor:
    """HSIC between 0 and 1."""
    size = (hsic(a, a, sigma) * hsic(b, b, sigma)).sqrt()
    return hsic(a, b, sigma) / size.clamp_min(1e-12)


def _kernel(x: Tensor, sigma: float) -> Tensor:
    squares = x.square().sum(1)
    distances = (squares[:, None] + squares - 2 * x @ x.T).clamp_min(0)
    return (-distances / (2 * sigma**2 * x.shape[1])).exp()


def _centred(kernel: Tensor) -> Tensor:
    return kernel - kernel.mean(0) - kernel.mean(1)[:, None] + kernel.mean()
