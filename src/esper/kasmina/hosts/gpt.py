"""A small causal language model.

Shapes: `B` batch, `T` tokens, `C` channels, `V` vocabulary.
"""

import torch
from torch import Tensor, nn

from esper.kasmina.hosts.segmented import SegmentedHost, SlotShape
from esper.kasmina.layers import ChannelNorm, SelfAttention, TokenLinear
from esper.leyline.errors import EsperError
from esper.leyline.slots import Layout

INITIAL_SCALE = 0.02  # of embeddings, so that positions and tokens start as small as in GPT-2
EXPANSION = 4  # the feed-forward middle, in widths


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

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attend = nn.Sequential(
            ChannelNorm(width), SelfAttention(width, inner=width, heads=heads, causal=True)
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
        super().__init__([*bodies, head], [SlotShape(Layout.TOKENS, width, (None,))] * blocks)
