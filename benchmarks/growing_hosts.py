"""The hosts of `growing_tasks.py`: networks as users have them, with all widths times a factor.

Shapes: `B` batch, `T` positions, `C` channels, `L` points of a line.
"""

import math

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, scaled_dot_product_attention


def scaled(width: int, factor: float, layer: int = 0) -> int:
    """A width times a factor; layers round apart, so that sizes grow in small steps."""
    return width + math.floor(width * (factor - 1.0) + (layer + 1) / 4)


def dense(
    inputs: int, widths: tuple[int, ...], outputs: int, norm: bool, factor: float
) -> nn.Module:
    """[B, inputs] to [B, outputs]."""
    layers: list[nn.Module] = [nn.LayerNorm(inputs)] if norm else []
    before = inputs
    for layer, width in enumerate(widths):
        after = scaled(width, factor, layer)
        layers += [nn.Linear(before, after), nn.ReLU()]
        before = after
    return nn.Sequential(*layers, nn.Linear(before, outputs))


class Conv1d(nn.Module):
    """Lines [B, length] to [B, outputs], with every convolution halving them."""

    def __init__(
        self, length: int, channels: tuple[int, ...], outputs: int, norm: bool, factor: float
    ) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        before = 1
        for layer, width in enumerate(channels):
            after, length = scaled(width, factor, layer), (length + 1) // 2
            layers.append(nn.Conv1d(before, after, 5, stride=2, padding=2))
            layers += [nn.BatchNorm1d(after)] if norm else []
            layers.append(nn.ReLU())
            before = after
        self.layers = nn.Sequential(*layers)
        self.head = nn.Linear(before * length, outputs)

    def forward(self, lines: Tensor) -> Tensor:
        logits: Tensor = self.head(self.layers(lines.unsqueeze(1)).flatten(1))
        return logits


class Cnn(nn.Module):
    """Images [B, 1, H, W] to [B, 10], with every convolution halving them."""

    def __init__(self, channels: tuple[int, ...], norm: bool, factor: float) -> None:
        super().__init__()
        layers, before = [], 1
        for layer, width in enumerate(channels):
            after = scaled(width, factor, layer)
            parts = [nn.Conv2d(before, after, 3, stride=2, padding=1)]
            parts += [nn.BatchNorm2d(after)] if norm else []
            layers.append(nn.Sequential(*parts, nn.ReLU()))
            before = after
        self.layers = nn.Sequential(*layers)
        self.head = nn.Linear(before, 10)

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.head(self.layers(images).mean((2, 3)))
        return logits


class Glimpse(nn.Module):
    """Lines [B, L] or images [B, 1, H, W] to [B, outputs], by convolutions that see three points
    each, of which the first `halving` halve their inputs, and by what they see on average.
    """

    def __init__(
        self, axes: int, channels: tuple[int, ...], halving: int, outputs: int, factor: float
    ) -> None:
        super().__init__()
        kind = nn.Conv1d if axes == 1 else nn.Conv2d
        layers: list[nn.Module] = []
        before = 1
        for layer, width in enumerate(channels):
            after, stride = scaled(width, factor, layer), 2 if layer < halving else 1
            layers += [kind(before, after, 3, stride=stride, padding=1), nn.ReLU()]
            before = after
        self.axes, self.layers = axes, nn.Sequential(*layers)
        self.head = nn.Linear(before, outputs)

    def forward(self, inputs: Tensor) -> Tensor:
        seen = self.layers(inputs.unsqueeze(1) if self.axes == 1 else inputs)
        logits: Tensor = self.head(seen.flatten(2).mean(2))
        return logits


class Apart(nn.Module):
    """Tokens [B, T] to logits [B, T, outputs], each by itself and its place in the line."""

    def __init__(
        self, vocabulary: int, outputs: int, length: int, width: int, layers: int, factor: float
    ) -> None:
        super().__init__()
        wide = scaled(width, factor)
        self.tokens, self.places = nn.Embedding(vocabulary, wide), nn.Embedding(length, wide)
        parts = [[nn.Linear(wide, wide), nn.GELU()] for _ in range(layers)]
        self.layers = nn.Sequential(*(part for pair in parts for part in pair))
        self.head = nn.Linear(wide, outputs)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        logits: Tensor = self.head(self.layers(x))
        return logits


class Tagger(nn.Module):
    """Tokens [B, T] to logits [B, T, outputs], by convolutions that see a few neighbours."""

    def __init__(
        self, vocabulary: int, outputs: int, width: int, layers: int, factor: float
    ) -> None:
        super().__init__()
        wide = scaled(width, factor)
        self.tokens = nn.Embedding(vocabulary, wide)
        parts = [[nn.Conv1d(wide, wide, 3, padding=1), nn.ReLU()] for _ in range(layers)]
        self.layers = nn.Sequential(*(part for pair in parts for part in pair))
        self.head = nn.Linear(wide, outputs)

    def forward(self, tokens: Tensor) -> Tensor:
        seen = self.layers(self.tokens(tokens).transpose(1, 2)).transpose(1, 2)
        logits: Tensor = self.head(seen)
        return logits


class Block(nn.Module):
    """One head of attention and a feed-forward part no wider than the rest."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attend, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.think = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, width))

    def forward(self, x: Tensor) -> Tensor:  # [B, T, C]
        query, key, value = self.attend(self.norm1(x)).chunk(3, dim=-1)
        x = x + self.out(scaled_dot_product_attention(query, key, value, is_causal=True))
        thought: Tensor = x + self.think(self.norm2(x))
        return thought


class ParallelBlock(nn.Module):
    """The same with one norm, and both parts side by side."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.attend = nn.LayerNorm(width), nn.Linear(width, 3 * width)
        self.out, self.up, self.down = (nn.Linear(width, width) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:  # [B, T, C]
        h = self.norm(x)
        query, key, value = self.attend(h).chunk(3, dim=-1)
        seen = self.out(scaled_dot_product_attention(query, key, value, is_causal=True))
        thought: Tensor = x + seen + self.down(gelu(self.up(h)))
        return thought


class Gpt(nn.Module):
    """Tokens [B, T] to logits [B, T, outputs]; a position sees those before it."""

    def __init__(
        self,
        vocabulary: int,
        outputs: int,
        length: int,
        block: type[Block | ParallelBlock],
        width: int,
        blocks: int,
        factor: float,
    ) -> None:
        super().__init__()
        wide = scaled(width, factor)
        self.tokens, self.places = nn.Embedding(vocabulary, wide), nn.Embedding(length, wide)
        self.blocks = nn.Sequential(*(block(wide) for _ in range(blocks)))
        self.norm, self.head = nn.LayerNorm(wide), nn.Linear(wide, outputs)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        logits: Tensor = self.head(self.norm(self.blocks(x)))
        return logits
