"""A small text classifier: a pre-norm transformer over whole-number tokens, with a class token.

The blocks are those of the vision transformer, and so are the names of the parameters; in place of
the patch embedding stands a table of token vectors, `token_embed`. Inputs are (N, T) whole numbers
below `vocabulary`; every text has the same length T.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from leakgauge.config import choose
from leakgauge.errors import PlanError
from leakgauge.models._layers import ACTIVATIONS, whole
from leakgauge.models.vit import Block


class TextTransformer(nn.Module):
    def __init__(
        self,
        vocabulary: int,
        length: int,
        classes: int,
        *,
        dim: int = 64,
        depth: int = 3,
        heads: int = 4,
        activation: str = "gelu",
    ) -> None:
        super().__init__()
        act = choose(ACTIVATIONS, activation, "activation")
        if whole("dim", dim) % whole("heads", heads):
            raise PlanError(f"dim must be a multiple of heads, got dim {dim} and heads {heads}.")
        self.cls_token = nn.Parameter(torch.empty(1, 1, dim))
        self.pos_embed = nn.Parameter(torch.empty(1, 1 + whole("length", length), dim))
        self.token_embed = nn.Embedding(whole("vocabulary", vocabulary), dim)
        self.blocks = nn.Sequential(*(Block(dim, heads, act) for _ in range(whole("depth", depth))))
        self.norm = nn.LayerNorm(dim, eps=1e-6)
        self.head = nn.Linear(dim, whole("classes", classes, least=2))
        for table in (self.cls_token, self.pos_embed, self.token_embed.weight):
            nn.init.trunc_normal_(table, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        words = self.token_embed(x)
        tokens = torch.cat([self.cls_token.expand(words.shape[0], -1, -1), words], dim=1)
        out: Tensor = self.head(self.norm(self.blocks(tokens + self.pos_embed))[:, 0])
        return out
