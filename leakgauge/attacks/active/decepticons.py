"""Decepticons — L. Fowl, J. Geiping, S. Reich, Y. Wen, W. Czaja, M. Goldblum, T. Goldstein:
"Decepticons: Corrupted Transformers Breach Privacy in Federated Learning for Language Models",
ICLR 2023, https://arxiv.org/abs/2201.12675

The server writes the weights of a pre-norm transformer of L blocks and width D by hand.
Blocks 1 … L−1 do not attend (values zero), and their first feed-forward layers measure the
normalised token y = LN(x) along one secret direction v:

    unit k:  φ(s·(⟨v, y⟩ − t_k)),    t_1 < t_2 < …  quantiles of ⟨v, y⟩ on public data;

their second layers write the sum of all units to the last coordinate of the token, and nothing
else. So every unit that a token switches on passes back the same error δ, and neighbouring units
differ by the tokens between their thresholds: where that is a single token,

    (∂W_k − ∂W_{k+1}) / (∂b_k − ∂b_{k+1}) = y.

y = (x − μ)/σ tells x up to scale and shift. For an image patch p at position j, x = Ep + e + pos_j,
on all coordinates but the last. Outside the span of E and of a shift only e + pos_j is left: its
direction gives j, its length σ, and a linear system p. For text, the nearest of all sums of a token
and a position vector is taken. Mixtures are told by their length: ‖y‖² = D for single tokens only.
Block L attends to all tokens alike and hands the mean of their last coordinates to the class token.

Needs: `training`, `records`, public data for the quantiles; SGD; parameters named as in timm
(`blocks.0.attn.qkv`, …) as those of "vit-small" and `models.text`; at least two blocks; for images,
D − 1 above the numbers in a patch + 1. From gradients, and from an update of several steps as long
as these move the weights little: mixtures are refused, not returned.
Differs from the paper: closed form for images as well; a position is read from each token, where
the paper matches tokens and positions afterwards; which tokens belong to one record is not encoded
by attention: the error that reaches a token, divided by the derivative that the server can compute
for it, is one number per record (`signatures`). Patches not found show the public mean colour,
tokens −1.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from leakgauge.attacks._layers import gradient_sum, refuse_rescaled, shared
from leakgauge.attacks.active._imprint import neighbours
from leakgauge.errors import NotApplicable, PlanError, Withheld
from leakgauge.papers import Paper
from leakgauge.ranges import POSITIVE, option
from leakgauge.records import pictures
from leakgauge.types import (
    Dataset,
    Kept,
    Knowledge,
    Observation,
    Preparation,
    Reconstruction,
    Resources,
    Target,
)

PAPER = Paper(
    "fowl2023",
    "Fowl, Liam and Geiping, Jonas and Reich, Steven and Wen, Yuxin and Czaja, Wojciech and "
    "Goldblum, Micah and Goldstein, Tom",
    "Decepticons: Corrupted Transformers Breach Privacy in Federated Learning for Language Models",
    2023,
    "International Conference on Learning Representations",
    "https://arxiv.org/abs/2201.12675",
)


@dataclass(frozen=True)
class Decepticons:
    """A transformer whose update holds its tokens (Fowl 2023).

    `scale` is s; None: units^−½ for a ReLU, 1e5 for others, since on large inputs a GELU is a ReLU.

    `voice` is the share of the tokens in what the class token becomes. At 1 records are told apart
    best; at 0.01 local steps move the weights less, so that more than one step can be read.
    `tolerance` is the relative error up to which a row is believed to show a single token.
    """

    papers: ClassVar[tuple[Paper, ...]] = (PAPER,)
    scale: float | None = option(None, POSITIVE)
    voice: float = option(1.0, POSITIVE)
    tolerance: float = option(2e-2, POSITIVE)
    needs: ClassVar[frozenset[Knowledge]] = frozenset({"training", "records", "weights"})
    manipulates: ClassVar[bool] = True

    def __post_init__(self) -> None:
        for key in ("scale", "voice", "tolerance"):
            value = getattr(self, key)
            if value is not None and not value > 0:
                raise PlanError(f"{key} must be positive, got {value}")

    def prepare(
        self, target: Target, rng: torch.Generator, resources: Resources | None = None
    ) -> Preparation:
        public = _public(target)
        model: Any = copy.deepcopy(target.model).eval()
        _check(model)
        picked = torch.randperm(len(public), generator=rng)[:256]
        inputs = target.record.entering(public.inputs[picked])
        *imprints, last = model.blocks
        width = model.pos_embed.shape[2]
        v = torch.randn(width, generator=rng)
        v[-1] = 0  # where the units write
        v /= v.norm()
        with torch.no_grad():
            x = _embedded(model, inputs).flatten(0, 1)[:, None]  # every token alone: (n, 1, D)
            # Enough to carry the errors, too little to change the order of the tokens in a block.
            size = 0.1 * x.square().mean().sqrt()
            bins = sum(block.mlp.fc1.out_features for block in imprints)
            before = 0
            for block in imprints:
                _plain(block)
                units = block.mlp.fc1.out_features
                scale = self.scale or (
                    float(size / units) ** 0.5 if _is_relu(block.mlp.act) else 1e5
                )
                measured = (block.norm2(x) @ v).flatten().unique()
                shares = torch.arange(before + 1, before + units + 1) / (bins + 1)
                thresholds = measured.quantile(shares.to(measured.dtype))
                block.mlp.fc1.weight.copy_(scale * v.expand(units, -1))
                block.mlp.fc1.bias.copy_(-scale * thresholds)
                block.mlp.fc2.weight[-1] = size / (scale * units)
                before += units
                x = block(x)
            _plain(last)
            # The class token, with its own large error, stays below every threshold. It is made
            # long, because LayerNorm divides that error, which moves the biases, by its length.
            length = 100 * (model.cls_token[0, 0] + model.pos_embed[0, 0]).norm().clamp(min=1e-3)
            model.cls_token[0, 0] = -length * v - model.pos_embed[0, 0]
            handed = last.norm1(x)[..., -1].abs().mean()
            spread = torch.randn(width, generator=rng) * width**-0.5
            last.attn.qkv.weight[2 * width :, -1] = self.voice * length / handed * spread
            last.attn.proj.weight.copy_(torch.eye(width))
        model.train(target.model.training)
        colour = {"colour": public.inputs.mean((0, 2, 3))} if _is_vision(model) else {}
        return Preparation(Kept(colour), (model,))

    def reconstruct(
        self, seen: Observation, rng: torch.Generator, resources: Resources | None = None
    ) -> Reconstruction:
        if seen.training is None or seen.records is None or seen.kept is None:
            raise Withheld("Decepticons needs 'training', 'records' and what its prepare() kept")
        found = recover(seen, self.tolerance)
        image = _grouped(found, seen.records)
        inputs = _assembled(found, image, seen)
        missing = seen.records * (seen.model.get_parameter("pos_embed").shape[1] - 1) - len(found)
        blank = "the public mean colour" if found.patches is not None else "−1"
        return Reconstruction(
            inputs=inputs,
            labels=None,
            residual=found.unexplained,
            notes=(
                f"{len(found)} patches or tokens found; {missing} not: {blank}",
                "grouped into records by the error that reached them; those whose place was "
                "taken went to the next record without one there",
            ),
            facts={
                "found": len(found),
                "positions": found.positions.tolist(),
                "residuals": found.residuals.tolist(),
                "records": image.tolist(),
            }
            | ({"tokens": found.tokens.tolist()} if found.tokens is not None else {}),
        )


@dataclass(frozen=True)
class Found:
    """Recovered parts of records: patches (n, C, p, p) in [0, 1], or tokens (n,) of texts.

    `positions` count from 0 without the class token, `signatures` agree within a record,
    `unexplained` is the share of the measuring units' gradient that no part accounts for.
    """

    positions: Tensor
    residuals: Tensor
    signatures: Tensor
    unexplained: float
    patches: Tensor | None = None
    tokens: Tensor | None = None

    def __len__(self) -> int:
        return len(self.positions)


def recover(seen: Observation, tolerance: float) -> Found:
    """Every patch or token that was alone between two thresholds, from an update."""
    assert seen.training is not None
    refuse_rescaled(seen.training, "Decepticons")
    model: Any = copy.deepcopy(seen.model).double().eval()
    _check(model)
    depth = len(model.blocks)
    rows: list[tuple[Tensor, Tensor, Tensor]] = []
    total = 0.0
    for number, block in enumerate(model.blocks[:-1]):
        weight, bias = (
            gradient_sum(seen, f"blocks.{number}.mlp.fc1.{kind}") for kind in ("weight", "bias")
        )
        order = block.mlp.fc1.bias.detach().argsort(descending=True)  # the lowest threshold first
        weight, bias = weight[order], bias[order]
        between = neighbours(bias)
        ratio = neighbours(weight) / between[:, None]
        # Above the last threshold lies a single interval in the last of these blocks only.
        total += float(between[: None if number == depth - 2 else -1].abs().sum())
        # Only single tokens have the length that LayerNorm gives them.
        long = (ratio.square().mean(1) - 1).abs()
        kept = (between.abs() > 1e-7 * bias.abs().max()) & (long < tolerance)
        rows.append((ratio[kept], between[kept], torch.full((int(kept.sum()),), number)))
    y, error, block_of = (torch.cat(parts) for parts in zip(*rows, strict=True))
    solve = _solved_patches if _is_vision(model) else _solved_tokens
    x, positions, residuals, contents = solve(model, y)
    believed = (residuals < tolerance).nonzero().flatten()
    kept, error = _distinct(x, positions, residuals, block_of, error, believed, tolerance)
    x, positions, residuals, contents = x[kept], positions[kept], residuals[kept], contents[kept]
    signatures = error / _derivatives(model, x, block_of[kept])
    unexplained = max(0.0, 1 - float(error.abs().sum()) / total) if total else 1.0
    found = Found(positions, residuals, signatures, unexplained)
    if not _is_vision(model):
        return replace(found, tokens=contents)
    patch = model.patch_embed.proj.kernel_size
    patches = contents.view(-1, pictures(seen.record).shape[0], *patch)
    return replace(found, patches=seen.record.leaving(patches).clamp(0, 1).float())


def _solved_patches(model: Any, y: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Token, position, relative residual and patch (normalised) behind every y (n, D).

    E p + c_j = σ·y + μ on all coordinates but the last; outside the span of [E, 1] it reads
    c_j = σ·y, so y points where c_j does.
    """
    embed = model.patch_embed.proj
    weight = embed.weight.detach().flatten(1)  # (D, pixels)
    constant = model.pos_embed[0, 1:].detach()
    if embed.bias is not None:
        constant = constant + embed.bias.detach()
    span = torch.cat([weight, torch.ones_like(weight[:, :1])], 1)[:-1]  # (D − 1, pixels + 1)
    q, r = torch.linalg.qr(span)
    outside = torch.eye(len(q), dtype=q.dtype) - q @ q.T
    seen, fixed = y[:, :-1] @ outside, constant[:, :-1] @ outside
    cosine = nn.functional.normalize(seen, dim=1) @ nn.functional.normalize(fixed, dim=1).T
    best, position = cosine.max(1)  # σ > 0: the same direction, not the opposite
    residual = (1 - best.clamp(0, 1).square()).sqrt()
    sigma = (seen * fixed[position]).sum(1) / seen.square().sum(1)
    known = sigma[:, None] * y[:, :-1] - constant[position][:, :-1]
    # Least squares by QR: torch.linalg.lstsq differs in last bits from call to call.
    patch = torch.linalg.solve_triangular(r, q.T @ known.T, upper=True)[:-1].T
    return patch @ weight.T + constant[position], position, residual, patch


def _solved_tokens(model: Any, y: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The same for texts: the nearest of all sums of a token's and a position's vector."""
    words = model.token_embed.weight.detach()
    places = model.pos_embed[0, 1:].detach()

    def direction(x: Tensor) -> Tensor:  # what neither a scale nor a shift changes
        x = x[..., :-1]
        return nn.functional.normalize(x - x.mean(-1, keepdim=True), dim=-1)

    pointing = direction(y)
    best = y.new_zeros(len(y))  # σ > 0: the same direction, not the opposite
    position, token = torch.zeros(2, len(y), dtype=torch.long)
    for j, place in enumerate(places):
        cosine, word = (pointing @ direction(words + place).T).max(1)
        closer = cosine > best
        best[closer], token[closer], position[closer] = cosine[closer], word[closer], j
    residual = (1 - best.clamp(max=1).square()).sqrt()
    return words[token] + places[position], position, residual, token


def _derivatives(model: Any, x: Tensor, block_of: Tensor) -> Tensor:
    """How the number that block L hands to the class token changes with what a unit of a token's
    block writes: the error that arrives is that, times one number per record."""
    out = torch.zeros(len(x), dtype=x.dtype)
    *imprints, last = model.blocks
    for number in range(len(imprints)):
        here = block_of == number
        if not here.any():
            continue
        with torch.no_grad():
            token = x[here][:, None]
            for block in imprints[: number + 1]:
                token = block(token)
        token = token.requires_grad_()
        after = token
        for block in imprints[number + 1 :]:
            after = block(after)
        handed = last.norm1(after)[..., -1].sum()
        out[here] = torch.autograd.grad(handed, token)[0][:, 0, -1]
    return out


def _distinct(
    x: Tensor, positions: Tensor, residuals: Tensor, block_of: Tensor, errors: Tensor,
    believed: Tensor, tolerance: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The best of the rows that show one token, by position, and its error.

    A token may be alone in two blocks; and a smooth unit switches on over a stretch, which may
    reach into the next interval of its block: the errors of these add up.
    """
    kept: list[int] = []
    sums: list[float] = []
    for i in believed[residuals[believed].argsort()].tolist():
        same = (positions[kept] == positions[i]) & (
            (x[kept] - x[i]).norm(dim=1) < tolerance * x[i].norm()
        )
        if not same.any():
            kept.append(i)
            sums.append(float(errors[i]))
        else:
            first = int(same.nonzero()[0])
            if block_of[kept[first]] == block_of[i]:
                sums[first] += float(errors[i])
    order = positions[kept].argsort(stable=True)
    return torch.tensor(kept, dtype=torch.long)[order], errors.new_tensor(sums)[order]


def _grouped(found: Found, records: int) -> Tensor:
    """The record of every part.

    Signatures that follow each other closely form a record; how closely is chosen so that most
    parts find a place, since a record has one part per position. A part whose place is taken goes
    to the record with the nearest signature that has it free.
    """
    record = torch.full((len(found),), -1)
    if not len(found):
        return record
    signature, order = found.signatures.sort()
    steps = signature.diff() / signature[1:].abs().maximum(signature[:-1].abs())
    best: list[Tensor] = []
    placed = 0
    for closeness in torch.logspace(-6, 0, 25, dtype=steps.dtype):
        ends = (steps > closeness).nonzero().flatten() + 1
        groups = sorted(order.tensor_split(ends), key=len, reverse=True)[:records]
        count = sum(len(set(found.positions[group].tolist())) for group in groups)
        if count > placed:
            best, placed = list(groups), count
    centres = torch.stack([found.signatures[group].median() for group in best])
    free = torch.ones(records, int(found.positions.max()) + 1, dtype=torch.bool)
    members = torch.cat(best)
    others = order[~torch.isin(order, members)]
    far = torch.full((records,), torch.inf, dtype=centres.dtype)
    for i in [*members.tolist(), *others.tolist()]:
        far[: len(centres)] = (centres - found.signatures[i]).abs()
        far[len(centres) :] = far[: len(centres)].max() + 1  # records of which nothing is known yet
        place = int(found.positions[i])
        for k in far.argsort(stable=True).tolist():
            if free[k, place]:
                free[k, place] = False
                record[i] = k
                break
    return record


def _assembled(found: Found, record: Tensor, seen: Observation) -> Tensor:
    """Records with the parts in their places, and blanks in between."""
    assert seen.records is not None
    assert seen.kept is not None
    placed = record >= 0
    where = record[placed], found.positions[placed]
    positions = seen.model.get_parameter("pos_embed").shape[1] - 1
    if found.tokens is not None:
        texts = torch.full((seen.records, positions), -1)
        texts[where] = found.tokens[placed]
        return texts
    assert found.patches is not None
    channels, height, width = pictures(seen.record).shape
    rows, columns = found.patches.shape[2:]
    grid = seen.kept.tensors["colour"].view(1, 1, channels, 1, 1).repeat(
        seen.records, positions, 1, rows, columns
    )  # fmt: skip
    grid[where] = found.patches[placed]
    folded = grid.flatten(2).transpose(1, 2)  # (N, C·p·p, positions), as fold() wants them
    return nn.functional.fold(folded, (height, width), (rows, columns), stride=(rows, columns))


def _embedded(model: Any, inputs: Tensor) -> Tensor:
    """Tokens with their positions, without the class token: (N, T, D)."""
    embed = model.patch_embed if _is_vision(model) else model.token_embed
    tokens: Tensor = embed(inputs) + model.pos_embed[:, 1:]
    return tokens


def _plain(block: Any) -> None:
    """A block that passes its input on, and whose attention is uniform."""
    for norm in (block.norm1, block.norm2):
        norm.weight.fill_(1)
        norm.bias.zero_()
    for layer in (block.attn.qkv, block.attn.proj, block.mlp.fc2):
        layer.weight.zero_()
        if layer.bias is not None:
            layer.bias.zero_()


def _is_relu(act: nn.Module) -> bool:
    probe = torch.tensor([-1.0, 0.5, 2.0])
    with torch.no_grad():
        return bool(torch.equal(act(probe), probe.clamp(min=0)))


def _is_vision(model: nn.Module) -> bool:
    return hasattr(model, "patch_embed")


def _public(target: Target) -> Dataset:
    if target.public is None or not len(target.public):
        raise NotApplicable(
            "Decepticons sets its thresholds by public records of the same kind: "
            "give target(round, public)"
        )
    return target.public


def _check(model: nn.Module) -> None:
    """Refuse a model whose tokens cannot be read, and say why."""
    names = {name for name, _ in model.named_parameters()}
    parts = ("norm1.weight", "attn.qkv.weight", "attn.proj.weight", "norm2.weight",
             "mlp.fc1.bias", "mlp.fc2.weight")  # fmt: skip
    wanted = {"cls_token", "pos_embed", *(f"blocks.{i}.{part}" for i in (0, 1) for part in parts)}
    embed = {"patch_embed.proj.weight", "token_embed.weight"}
    if not wanted <= names or not embed & names:
        missing = sorted(wanted - names) or sorted(embed)
        raise NotApplicable(
            "Decepticons rewrites a pre-norm transformer of at least two blocks with a class token "
            f"and parameters named as in timm; this model has no {missing[0]!r}"
        )
    if not all(p.requires_grad for n, p in model.named_parameters() if ".mlp.fc1." in n):
        raise NotApplicable("Decepticons reads `mlp.fc1`, and here it is frozen: it is never sent")
    if tied := sorted(name for name in shared(model) if name.startswith("blocks.")):
        raise NotApplicable(
            f"Decepticons gives every block weights of its own, and {tied[0]!r} is shared"
        )
    if _is_vision(model):
        dim, *patch = model.get_parameter("patch_embed.proj.weight").shape
        numbers = patch[0] * patch[1] * patch[2]
        if dim - 1 <= numbers + 1:
            raise NotApplicable(
                f"a patch of {numbers} numbers, its scale and its shift cannot be solved from "
                f"{dim - 1} coordinates of a token: Decepticons needs a width of {numbers + 3} or "
                "more, or smaller patches"
            )
