"""Layers that still work when many copies are fused: under `vmap` in a dynamic compile.

There torch's own group norm, its linear layer with a bias on more than two axes, and (for speed)
its fused attention on the CPU do not serve.

Shapes: `B` batch, `C` channels, `G` groups, `L` positions (one axis or two), `T` tokens,
`D` channels inside, `H` heads.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

NORM_EPSILON = 1e-5


class ChannelNorm(nn.Module):
    """Normalises [..., C] over its last axis, with C scales and shifts."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(channels))
        self.bias = nn.Parameter(torch.zeros(channels))

    def forward(self, x: Tensor) -> Tensor:
        return _standardise(x, (-1,)) * self.weight + self.bias


class GroupNorm(nn.Module):
    """Normalises [B, C, L...] over positions and groups of channels, with C scales and shifts."""

    def __init__(self, channels: int, *, position_axes: int, groups: int = 1) -> None:
        super().__init__()
        self.groups = groups
        self.axes = tuple(range(2, 3 + position_axes))  # all but the first two of [B, G, C/G, L...]
        self.weight = nn.Parameter(torch.ones(channels, *(1,) * position_axes))
        self.bias = nn.Parameter(torch.zeros(channels, *(1,) * position_axes))

    def forward(self, x: Tensor) -> Tensor:
        grouped = torch.unflatten(x, 1, (self.groups, -1))  # [B, G, C/G, L...]
        return _standardise(grouped, self.axes).flatten(1, 2) * self.weight + self.bias


def _standardise(x: Tensor, axes: tuple[int, ...]) -> Tensor:
    variance, mean = torch.var_mean(x, dim=axes, correction=0, keepdim=True)
    return (x - mean) * torch.rsqrt(variance + NORM_EPSILON)


class TokenLinear(nn.Linear):
    """`nn.Linear` for [B, T, C]: the bias is added apart from the product."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight) + self.bias


class PastLinear(TokenLinear):
    """Each of the features comes from those at or before its own place."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.tril()) + self.bias


class SelfAttention(nn.Module):
    """Tokens [B, T, C] look at each other; with `causal` only at themselves and the past.

    Keys have no bias: the softmax cancels it, so it would never learn.
    """

    def __init__(self, channels: int, *, inner: int, heads: int = 1, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.scale = (inner // heads) ** -0.5
        self.query = TokenLinear(channels, inner)
        self.key = nn.Linear(channels, inner, bias=False)
        self.value = TokenLinear(channels, inner)
        self.out = TokenLinear(inner, channels)

    def forward(self, x: Tensor) -> Tensor:
        query = self._by_head(self.query(x)) * self.scale  # [B, H, T, D/H]
        scores = query @ self._by_head(self.key(x)).transpose(-2, -1)  # [B, H, T, T]
        if self.causal:
            future = torch.ones_like(scores, dtype=torch.bool).triu(1)
            scores = scores.masked_fill(future, float("-inf"))
        seen = scores.softmax(-1) @ self._by_head(self.value(x))
        mixed: Tensor = self.out(seen.transpose(-3, -2).flatten(-2))
        return mixed

    def _by_head(self, x: Tensor) -> Tensor:
        return torch.unflatten(x, -1, (self.heads, -1)).transpose(-3, -2)
