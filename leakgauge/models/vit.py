"""Vision transformers, with parameters called as in timm: `patch_embed.proj`, `blocks.0.norm1`, …

Dosovitskiy et al., An Image is Worth 16x16 Words, ICLR 2021; pre-norm blocks, class token, learned
positions, LayerNorm eps 1e-6, no dropout.
`vit-base`   ViT-B/16: patches of 16, width 768, 12 blocks of 12 heads; 224 × 224 is its own size.
`vit-small`  made for 32 × 32: patches of 4, width 192, 6 blocks of 3 heads. It is *not* ViT-S/16.
Attention is written out as two products and a softmax: PyTorch's fused kernel has no second
derivative, and gradient matching needs one. Class token and positions have no PyTorch default: they
start from a normal of standard deviation 0.02, cut at ±2.
"""

from __future__ import annotations

from collections import OrderedDict

import torch
from torch import Tensor, nn

from leakgauge.config import choose
from leakgauge.errors import InputError, PlanError
from leakgauge.models._layers import ACTIVATIONS, Activation, check_sides, whole


class PatchEmbed(nn.Module):
    """Cuts the image into squares and maps each to a token: (N, C, H, W) -> (N, T, D)."""

    def __init__(self, channels: int, patch: int, dim: int) -> None:
        super().__init__()
        self.proj = nn.Conv2d(channels, dim, patch, stride=patch)

    def forward(self, x: Tensor) -> Tensor:
        tokens: Tensor = self.proj(x)
        return tokens.flatten(2).transpose(1, 2)


class Attention(nn.Module):
    """softmax(QKᵀ/√d)V a head, then a projection. `qkv` holds the rows of Q, K, V in this order."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.scale = (dim // heads) ** -0.5
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        split = self.qkv(x).unflatten(2, (3, self.heads, -1))  # (N, T, 3, heads, d)
        q, k, v = split.permute(2, 0, 3, 1, 4).unbind(0)  # each (N, heads, T, d)
        weights = (self.scale * q @ k.transpose(-2, -1)).softmax(dim=-1)
        out: Tensor = self.proj((weights @ v).transpose(1, 2).flatten(2))
        return out


def _mlp(dim: int, act: Activation) -> nn.Sequential:
    """Two linear layers, four times as wide between them."""
    fc1, fc2 = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)
    return nn.Sequential(OrderedDict(fc1=fc1, act=act(), fc2=fc2))


class Block(nn.Module):
    """x + attention(norm(x)), then the same with the perceptron."""

    def __init__(self, dim: int, heads: int, act: Activation) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(dim, eps=1e-6)
        self.attn = Attention(dim, heads)
        self.norm2 = nn.LayerNorm(dim, eps=1e-6)
        self.mlp = _mlp(dim, act)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        out: Tensor = x + self.mlp(self.norm2(x))
        return out


class VisionTransformer(nn.Module):
    """Vision transformer on square patches."""

    def __init__(
        self,
        shape: tuple[int, int, int],
        classes: int,
        *,
        patch: int = 4,
        dim: int = 192,
        depth: int = 6,
        heads: int = 3,
        activation: str = "gelu",
    ) -> None:
        super().__init__()
        channels, height, width = shape
        act = choose(ACTIVATIONS, activation, "activation")
        if whole("dim", dim) % whole("heads", heads):
            raise PlanError(f"dim must be a multiple of heads, got dim {dim} and heads {heads}.")
        # One patch per side would leave attention nothing to attend to.
        check_sides(f"A ViT with patches of {patch}", shape, 2 * whole("patch", patch))
        if height % patch or width % patch:
            raise InputError(
                f"A ViT with patches of {patch} needs sides that are multiples of {patch}, "
                f"got {height} × {width}: resize the images or set another patch."
            )
        tokens = (height // patch) * (width // patch)
        self.cls_token = nn.Parameter(torch.empty(1, 1, dim))
        self.pos_embed = nn.Parameter(torch.empty(1, 1 + tokens, dim))
        self.patch_embed = PatchEmbed(channels, patch, dim)
        self.blocks = nn.Sequential(*(Block(dim, heads, act) for _ in range(whole("depth", depth))))
        self.norm = nn.LayerNorm(dim, eps=1e-6)
        self.head = nn.Linear(dim, classes)
        for token in (self.cls_token, self.pos_embed):
            nn.init.trunc_normal_(token, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        patches = self.patch_embed(x)
        tokens = torch.cat([self.cls_token.expand(patches.shape[0], -1, -1), patches], dim=1)
        out: Tensor = self.head(self.norm(self.blocks(tokens + self.pos_embed))[:, 0])
        return out
