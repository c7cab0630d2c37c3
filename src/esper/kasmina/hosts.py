"""Esper's own hosts: chains of segments with a slot after each but the last.

Shapes: `B` batch, `C` channels, `L` positions, `H` height, `W` width, `T` tokens, `V` vocabulary.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import gcd, prod

import torch
from torch import Tensor, nn

from esper.kasmina.layers import ChannelNorm, GroupNorm, SelfAttention, TokenLinear
from esper.leyline import EsperError, Layout, Reach, SlotConfig, SlotSpec
from esper.leyline.errors import require_known

STRIDE = 2  # of the convolutions along sequences
GROUPS = 8  # of channels that are normalised together in images, where the width allows
INITIAL_SCALE = 0.02  # of embeddings, so that positions and tokens start as small as in GPT-2
FOLDED, FOLDED_HALVINGS = (5, 8), 2  # of a line of 40 points
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


def _bent(activation: str, norm: str, normed: nn.Module, *layers: nn.Module) -> nn.Module:
    """Layers, what they return `normed` or not, and what makes it bend."""
    require_known("activation", activation, _ACTIVATIONS)
    between = [] if norm == "none" else [normed]
    return nn.Sequential(*layers, *between, _ACTIVATIONS[activation]())


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
        given = (nn.Linear(size, width) for size in sizes[:-1])
        hidden = [_bent(activation, norm, ChannelNorm(width), layer) for layer in given]
        segments = [nn.Identity(), *hidden, nn.Linear(width, classes)]
        super().__init__(segments, [(Layout.DENSE, size, ()) for size in sizes])


def _convolved(
    size: tuple[int, ...],
    channels: int,
    kernel: int,
    strides: Sequence[int],
    activation: str,
    norm: str,
    classes: int,
) -> tuple[list[nn.Module], list[SlotShape]]:
    """The segments of a host of convolutions on lines, or on lines as planes of this size."""
    # Accepts any rank without looking at the input, so that the host can be traced.
    entry: list[nn.Module] = [nn.Flatten(1), nn.Unflatten(1, (1, *size))]
    line = len(size) == 1
    layer, layout = (nn.Conv1d, Layout.SEQUENCE) if line else (nn.Conv2d, Layout.IMAGE)
    segments: list[nn.Module] = []
    shapes: list[SlotShape] = []
    padding, given = kernel // 2, 1
    for stride in strides:
        convolution = layer(given, channels, kernel, stride=stride, padding=padding)
        normed = GroupNorm(channels, position_axes=len(size))
        segments.append(_bent(activation, norm, normed, *entry, convolution))
        entry, given = [], channels
        size = tuple((points + 2 * padding - kernel) // stride + 1 for points in size)
        shapes.append((layout, channels, size))
    head = nn.Linear(channels * prod(size), classes)
    return [*segments, nn.Sequential(nn.Flatten(1), head)], shapes


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
        strides = [STRIDE if stage < halvings else 1 for stage in range(stages)]
        size = (length,)
        super().__init__(*_convolved(size, channels, kernel, strides, activation, norm, classes))


class FoldedHost(SegmentedHost):
    """The same on lines [B, L] that are folded into planes, of which two stages halve the sides."""

    def __init__(
        self,
        *,
        channels: int = 8,
        kernel: int = 3,
        stages: int = 3,
        activation: str = "relu",
        norm: str = "none",
        classes: int = 10,
    ) -> None:
        strides = [STRIDE if stage < FOLDED_HALVINGS else 1 for stage in range(stages)]
        super().__init__(*_convolved(FOLDED, channels, kernel, strides, activation, norm, classes))


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


class Embedding(nn.Module):
    """What `tokens` reads as vectors [B, T, C], which then know their position."""

    def __init__(self, tokens: nn.Module, width: int, context: int) -> None:
        super().__init__()
        self.tokens = tokens
        self.positions = nn.Parameter(torch.empty(context, width))
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
        tokens = nn.Embedding(vocabulary, width)
        nn.init.normal_(tokens.weight, std=INITIAL_SCALE)
        bodies[:1] = [nn.Sequential(Embedding(tokens, width, context), *bodies[:1])]
        head = nn.Sequential(ChannelNorm(width), nn.Linear(width, vocabulary, bias=False))
        super().__init__([*bodies, head], [(Layout.TOKENS, width, (None,))] * blocks)
        self._specs = tuple(replace(spec, reach=Reach.PAST) for spec in self._specs)


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
        points = length // pieces
        cut = [nn.Flatten(1), nn.Unflatten(1, (pieces, points))]
        read = nn.Sequential(*cut, TokenLinear(points, width))
        bodies[:1] = [nn.Sequential(Embedding(read, width, pieces), *bodies[:1])]
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
    require_known("host", name, HOSTS)
    return HOSTS[name](**sizes)
