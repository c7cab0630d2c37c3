"""Esper's own hosts: chains of segments with a slot after each but the last.

Shapes: `B` batch, `C` channels, `L` positions, `H` height, `W` width, `T` tokens, `V` vocabulary.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import gcd

import torch
from torch import Tensor, nn

from esper.kasmina.layers import ChannelNorm, GroupNorm, SelfAttention, TokenLinear
from esper.leyline import EsperError, Layout, Reach, SlotConfig, SlotSpec, UnknownNameError

STRIDE = 2  # of the convolutions along sequences
GROUPS = 8  # of channels that are normalised together in images, where the width allows
INITIAL_SCALE = 0.02  # of embeddings, so that positions and tokens start as small as in GPT-2
FOLDED_POOLINGS = 2  # of a plane that is a folded line
EXPANSION = 4  # a transformer's feed-forward middle, in widths


# The activations that leave one segment, without the batch: layout, channels, the other axes.
SlotShape = tuple[Layout, int, tuple[int | None, ...]]


class SegmentedHost(nn.Module):
    """Applies `segments` in order; slot k is on the output of `segments[k]`, the last is the head.

    The segments are what a fused population stacks; the slots between them are what it gathers.
    """

    def __init__(self, segments: Sequence[nn.Module], shapes: Sequence[SlotShape]) -> None:
        super().__init__()
        if len(segments) != len(shapes) + 1:
            raise EsperError(
                "A host has one slot after each segment but the last",
                given=f"{len(segments)} segments, {len(shapes)} slots",
            )
        self.segments = nn.ModuleList(segments)
        names = SlotConfig.of_size(len(shapes)).names
        self._specs = tuple(
            SlotSpec(name=name, layout=layout, channels=channels, extent=extent)
            for name, (layout, channels, extent) in zip(names, shapes, strict=True)
        )

    def slot_specs(self) -> tuple[SlotSpec, ...]:
        return self._specs

    def slot_paths(self) -> dict[str, str]:
        """The submodule whose output carries each slot."""
        return {spec.name: f"segments.{index}" for index, spec in enumerate(self._specs)}

    def forward(self, x: Tensor) -> Tensor:
        for segment in self.segments:
            x = segment(x)
        return x


_ACTIVATIONS: dict[str, type[nn.Module]] = {"relu": nn.ReLU, "gelu": nn.GELU, "tanh": nn.Tanh}


def _activated(layer: nn.Module, activation: str, norm: nn.Module | None) -> list[nn.Module]:
    """A layer, normalised or not, and what makes it bend."""
    if activation not in _ACTIVATIONS:
        raise UnknownNameError.of("activation", activation, _ACTIVATIONS)
    return [layer, *([] if norm is None else [norm]), _ACTIVATIONS[activation]()]


class MlpHost(SegmentedHost):
    """Hidden layers on [B, C]; slots on the input itself and after each of them."""

    def __init__(
        self,
        *,
        features: int = 40,
        width: int = 16,
        depth: int = 2,
        activation: str = "relu",
        norm: str = "none",
        classes: int = 10,
    ) -> None:
        sizes = [features] + [width] * depth
        segments: list[nn.Module] = [nn.Identity()]
        for given in sizes[:-1]:
            normed = None if norm == "none" else ChannelNorm(width)
            segments.append(nn.Sequential(*_activated(nn.Linear(given, width), activation, normed)))
        segments.append(nn.Linear(width, classes))
        super().__init__(segments, [(Layout.DENSE, size, ()) for size in sizes])


class Conv1dHost(SegmentedHost):
    """Convolutions on [B, L] or [B, 1, L], the first of them strided; a slot after each."""

    def __init__(
        self,
        *,
        length: int = 40,
        channels: int = 8,
        kernel: int = 5,
        stages: int = 3,
        halvings: int = 8,  # stages that halve the line, at most
        activation: str = "relu",
        norm: str = "none",
        classes: int = 10,
    ) -> None:
        padding = kernel // 2
        segments: list[nn.Module] = []
        shapes: list[SlotShape] = []
        given, size = 1, length
        for stage in range(stages):
            # Accepts both ranks without looking at the input, so that the host can be traced.
            entry = [nn.Flatten(1), nn.Unflatten(1, (1, length))] if stage == 0 else []
            stride = STRIDE if stage < halvings else 1
            convolution = nn.Conv1d(given, channels, kernel, stride=stride, padding=padding)
            normed = None if norm == "none" else GroupNorm(channels, position_axes=1)
            segments.append(nn.Sequential(*entry, *_activated(convolution, activation, normed)))
            given, size = channels, (size + 2 * padding - kernel) // stride + 1
            shapes.append((Layout.SEQUENCE, channels, (size,)))
        segments.append(nn.Sequential(nn.Flatten(1), nn.Linear(channels * size, classes)))
        super().__init__(segments, shapes)


class Conv2dHost(SegmentedHost):
    """Stages of convolution, normalisation and pooling on [B, C, H, W]; a slot after each."""

    def __init__(
        self,
        *,
        channels_in: int = 3,
        size: int = 32,
        widths: Sequence[int] = (32, 64, 128),
        classes: int = 10,
    ) -> None:
        segments: list[nn.Module] = []
        shapes: list[SlotShape] = []
        given = channels_in
        for width in widths:
            segments.append(
                nn.Sequential(
                    nn.Conv2d(given, width, 3, padding=1, bias=False),
                    GroupNorm(width, position_axes=2, groups=gcd(width, GROUPS)),
                    nn.ReLU(),
                    nn.MaxPool2d(2, ceil_mode=True),
                )
            )
            given, size = width, (size + 1) // 2
            shapes.append((Layout.IMAGE, width, (size, size)))
        segments.append(
            nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(1), nn.Linear(given, classes))
        )
        super().__init__(segments, shapes)


class FoldedHost(SegmentedHost):
    """A line [B, L] folded into a plane, and convolutions in it, the first two of them pooled; a
    slot after each."""

    def __init__(
        self,
        *,
        rows: int = 5,
        columns: int = 8,
        channels: int = 8,
        kernel: int = 3,
        stages: int = 3,
        activation: str = "relu",
        norm: str = "none",
        classes: int = 10,
    ) -> None:
        segments: list[nn.Module] = []
        shapes: list[SlotShape] = []
        size, given = (rows, columns), 1
        for stage in range(stages):
            entry = [nn.Flatten(1), nn.Unflatten(1, (1, rows, columns))] if stage == 0 else []
            convolution = nn.Conv2d(given, channels, kernel, padding=kernel // 2)
            normed = None if norm == "none" else GroupNorm(channels, position_axes=2)
            parts = [*entry, *_activated(convolution, activation, normed)]
            if stage < FOLDED_POOLINGS:
                parts.append(nn.MaxPool2d(2, ceil_mode=True))
                size = ((size[0] + 1) // 2, (size[1] + 1) // 2)
            segments.append(nn.Sequential(*parts))
            given = channels
            shapes.append((Layout.IMAGE, channels, size))
        head = nn.Linear(channels * size[0] * size[1], classes)
        super().__init__([*segments, nn.Sequential(nn.Flatten(1), head)], shapes)


class Embedding(nn.Module):
    """Tokens [B, T] to vectors [B, T, C] that know their position."""

    def __init__(self, vocabulary: int, width: int, context: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Parameter(torch.empty(context, width))
        nn.init.normal_(self.tokens.weight, std=INITIAL_SCALE)
        nn.init.normal_(self.positions, std=INITIAL_SCALE)

    def forward(self, tokens: Tensor) -> Tensor:
        embedded: Tensor = self.tokens(tokens) + self.positions[: tokens.shape[1]]
        return embedded


class Block(nn.Module):
    """Attention and a feed-forward layer, each normalised first and added to its input."""

    def __init__(self, width: int, heads: int, *, causal: bool = True) -> None:
        super().__init__()
        self.attend = nn.Sequential(
            ChannelNorm(width), SelfAttention(width, inner=width, heads=heads, causal=causal)
        )
        self.think = nn.Sequential(
            ChannelNorm(width),
            TokenLinear(width, EXPANSION * width),
            nn.GELU(),
            TokenLinear(EXPANSION * width, width),
        )

    def forward(self, x: Tensor) -> Tensor:
        attended: Tensor = x + self.attend(x)
        thought: Tensor = attended + self.think(attended)
        return thought


class GptHost(SegmentedHost):
    """Tokens [B, T <= context] to logits [B, T, V]; a slot after each block."""

    def __init__(
        self,
        *,
        vocabulary: int = 256,
        width: int = 64,
        heads: int = 4,
        blocks: int = 3,
        context: int = 64,
    ) -> None:
        if heads < 1 or width % heads:
            raise EsperError(
                "The heads of a transformer share its width evenly",
                given=f"width {width}, heads {heads}",
                valid="heads that divide the width",
            )
        bodies: list[nn.Module] = [Block(width, heads) for _ in range(blocks)]
        bodies[:1] = [nn.Sequential(Embedding(vocabulary, width, context), *bodies[:1])]
        head = nn.Sequential(ChannelNorm(width), nn.Linear(width, vocabulary, bias=False))
        super().__init__([*bodies, head], [(Layout.TOKENS, width, (None,))] * blocks)
        self._specs = tuple(replace(spec, reach=Reach.PAST) for spec in self._specs)


class Pieces(nn.Module):
    """A line [B, T * P] to a vector for each of its pieces [B, T, C], which knows its place."""

    def __init__(self, pieces: int, points: int, width: int) -> None:
        super().__init__()
        self.cut, self.read = nn.Unflatten(1, (pieces, points)), TokenLinear(points, width)
        self.positions = nn.Parameter(torch.empty(pieces, width))
        nn.init.normal_(self.positions, std=INITIAL_SCALE)

    def forward(self, lines: Tensor) -> Tensor:
        read: Tensor = self.read(self.cut(lines.flatten(1))) + self.positions
        return read


class PiecesHost(SegmentedHost):
    """A tiny transformer over the pieces of a line [B, L]; a slot after each block."""

    def __init__(
        self,
        *,
        length: int = 40,
        pieces: int = 10,
        width: int = 12,
        heads: int = 2,
        blocks: int = 3,
        classes: int = 10,
    ) -> None:
        bodies: list[nn.Module] = [Block(width, heads, causal=False) for _ in range(blocks)]
        bodies[:1] = [nn.Sequential(Pieces(pieces, length // pieces, width), *bodies[:1])]
        head = nn.Sequential(ChannelNorm(width), nn.Flatten(1), nn.Linear(pieces * width, classes))
        super().__init__([*bodies, head], [(Layout.TOKENS, width, (pieces,))] * blocks)


HOSTS: dict[str, Callable[..., SegmentedHost]] = {
    "conv1d": Conv1dHost,
    "conv2d": Conv2dHost,
    "mlp": MlpHost,
    "gpt": GptHost,
    "folded": FoldedHost,
    "pieces": PiecesHost,
}


def build_host(name: str, **sizes: object) -> SegmentedHost:
    """The named host; `sizes` are its constructor's keyword arguments."""
    if name not in HOSTS:
        raise UnknownNameError.of("host", name, HOSTS)
    return HOSTS[name](**sizes)
