"""Models whose early outputs do not depend on late inputs, as people write them."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.kasmina import zoo_sequence as sequence

WORDS, LENGTH, WIDTH = 16, 9, 6
_DRAW = torch.Generator().manual_seed(2)
TOKENS = torch.randint(WORDS, (2, LENGTH), generator=_DRAW)
SIGNAL = torch.randn(2, 3, LENGTH, generator=_DRAW)
PICTURES = torch.randn(2, 2, 6, 6, generator=_DRAW)


class Chomp(nn.Module):
    """A convolution padded on both sides, of which the end is cut off."""

    def __init__(self, given: int, returned: int, dilation: int = 1) -> None:
        super().__init__()
        self.conv = nn.Conv1d(given, returned, 3, padding=2 * dilation, dilation=dilation)

    def forward(self, x: Tensor) -> Tensor:
        return F.leaky_relu(self.conv(x)[..., : x.shape[-1]])


class Tcn(nn.Module):
    """Tokens, channels first inside, and logits at every position."""

    def __init__(self, *, pool: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.Sequential(Chomp(WIDTH, WIDTH), Chomp(WIDTH, WIDTH, 2))
        self.head = nn.Linear(WIDTH, WORDS)
        self.pool = pool

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.blocks(self.embedding(tokens).transpose(1, 2)).transpose(1, 2)
        return self.head(x[:, -1] if self.pool else x)


class WaveNet(nn.Module):
    """Gates, residuals and skips along [B, C, T]; `valid`: no padding, so fewer outputs."""

    def __init__(self, *, valid: bool = False) -> None:
        super().__init__()
        self.front = nn.Conv1d(3, WIDTH, 1)
        self.filters = nn.ModuleList(nn.Conv1d(WIDTH, 2 * WIDTH, 2, dilation=d) for d in (1, 2))
        self.mixes = nn.ModuleList(nn.Conv1d(WIDTH, WIDTH, 1) for _ in range(2))
        self.head = nn.Conv1d(WIDTH, 4, 1)
        self.valid = valid

    def forward(self, x: Tensor) -> Tensor:
        x = self.front(x)
        for gates, mix in zip(self.filters, self.mixes, strict=True):
            padded = x if self.valid else F.pad(x, (gates.dilation[0], 0))
            left, right = gates(padded).chunk(2, 1)
            x = x[..., -left.shape[-1] :] + mix(left.tanh() * right.sigmoid())
        return self.head(x)


class Lstm(nn.Module):
    def __init__(self, *, batch_first: bool = True, both_ways: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.rnn = nn.LSTM(WIDTH, WIDTH, batch_first=batch_first, bidirectional=both_ways)
        self.norm = nn.LayerNorm((1 + both_ways) * WIDTH)
        self.head = nn.Linear((1 + both_ways) * WIDTH, WORDS)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.norm(self.rnn(self.embedding(tokens))[0]))


class StatefulLstm(Lstm):
    """Hands its state back, to go on from there."""

    def forward(self, tokens: Tensor, state: object = None) -> tuple[Tensor, object]:  # type: ignore[override]
        x, state = self.rnn(self.embedding(tokens), state)
        return self.head(self.norm(x)), state


class Mamba(nn.Module):
    """A short causal convolution and a scan whose gates depend on the input."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.conv = nn.Conv1d(WIDTH, WIDTH, 3, padding=2, groups=WIDTH)
        self.gates = nn.Linear(WIDTH, 2 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        mixed = F.silu(self.conv(x.transpose(1, 2))[..., : x.shape[1]].transpose(1, 2))
        keep, take = self.gates(mixed).sigmoid().chunk(2, -1)
        state, states = torch.zeros_like(x[:, 0]), []
        for step in range(x.shape[1]):
            state = keep[:, step] * state + take[:, step] * mixed[:, step]
            states.append(state)
        return self.head(x + self.out(torch.stack(states, 1)))


class Fourier(nn.Module):
    """A convolution as long as the sequence, by way of frequencies: causal but for rounding."""

    def __init__(self) -> None:
        super().__init__()
        self.front, self.head = nn.Conv1d(3, WIDTH, 1), nn.Conv1d(WIDTH, 4, 1)
        self.kernel = nn.Parameter(torch.randn(WIDTH, LENGTH))

    def forward(self, x: Tensor) -> Tensor:
        x, twice = self.front(x), 2 * x.shape[-1]
        spectrum = torch.fft.rfft(x, twice) * torch.fft.rfft(self.kernel, twice)
        return self.head(torch.fft.irfft(spectrum, twice)[..., : x.shape[-1]])


class Masked(nn.Conv2d):
    """Sees what comes before in raster order; with `own` also its own pixel."""

    def __init__(self, given: int, returned: int, *, own: bool) -> None:
        super().__init__(given, returned, 3, padding=1)
        mask = torch.ones(3, 3)
        mask[1, 1 + own :], mask[2:] = 0, 0
        self.register_buffer("mask", mask)

    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(x, self.weight * self.mask, self.bias, padding=1)


def pixel_cnn() -> nn.Module:
    return nn.Sequential(
        Masked(2, WIDTH, own=False), nn.LeakyReLU(), Masked(WIDTH, WIDTH, own=True), nn.LeakyReLU(),
        nn.Conv2d(WIDTH, 4, 1),
    )  # fmt: skip


class Triangle(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.tril(), self.bias)


class Made(nn.Module):
    """Features one after the other, by masks on the weights: channels hold positions."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = Triangle(LENGTH, LENGTH), Triangle(LENGTH, LENGTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x).relu())


class Patches(nn.Module):
    """Four positions at a time become one, which sees those before it; so out of four come four."""

    def __init__(self) -> None:
        super().__init__()
        self.patch, self.chomp = nn.Conv1d(3, WIDTH, 4, stride=4), Chomp(WIDTH, WIDTH)
        self.back = nn.ConvTranspose1d(WIDTH, 2, 4, stride=4)

    def forward(self, x: Tensor) -> Tensor:
        return self.back(self.chomp(self.patch(x)))


class Translator(nn.Module):
    """An encoder that sees all, and a decoder that sees it and its own past."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, 8)
        self.source = nn.Conv1d(8, 8, 3, padding=1)
        self.target = Chomp(8, 8)
        self.cross = nn.MultiheadAttention(8, 2, batch_first=True)
        self.head = nn.Linear(8, WORDS)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        memory = self.source(self.words(source).transpose(1, 2)).transpose(1, 2)
        x = self.target(self.words(target).transpose(1, 2)).transpose(1, 2)
        return self.head(x + self.cross(x, memory, memory)[0])


class Prefix(nn.Module):
    """The first three positions see each other, all others what comes before."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, 8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.thought, self.head = nn.Conv1d(8, 8, 1), nn.Linear(8, WORDS)

    def forward(self, tokens: Tensor) -> Tensor:
        x, length = self.words(tokens), tokens.shape[1]
        hidden = torch.ones(length, length, dtype=torch.bool).triu(1)
        hidden[:3, :3] = False
        x = x + self.attention(x, x, x, attn_mask=hidden)[0]
        return self.head(self.thought(x.transpose(1, 2)).transpose(1, 2))


class Encoder(nn.Module):
    """torch's own layers; with `causal` each token sees those before it."""

    def __init__(self, *, causal: bool = True) -> None:
        super().__init__()
        self.words, self.causal = nn.Embedding(WORDS, 8), causal
        layer = nn.TransformerEncoderLayer(8, 2, 12, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(8, WORDS)

    def forward(self, tokens: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        return self.head(self.encoder(self.words(tokens), mask if self.causal else None))


def gpt_with_a_head_of_zeros() -> nn.Module:
    model = sequence.Gpt()
    model.lm_head = nn.Linear(8, WORDS, bias=False)
    nn.init.zeros_(model.lm_head.weight)
    return model


@dataclass(frozen=True, eq=False)
class Case:
    """A causal model, places in it, and where inputs and outputs have their positions."""

    build: Callable[[], nn.Module]
    sample: Tensor
    places: tuple[str, ...]
    given: int = 1
    returned: int = 1

    def model(self) -> nn.Module:
        with torch.random.fork_rng():
            torch.manual_seed(4)
            return self.build().eval()


CAUSAL = {
    "tcn": Case(Tcn, TOKENS, ("embedding", "blocks.0", "blocks.1")),
    "wavenet": Case(WaveNet, SIGNAL, ("front", "mixes.0", "mixes.1"), 2, 2),
    "transformer": Case(Encoder, TOKENS, ("words", "encoder.layers.0", "encoder.layers.1")),
    "gpt": Case(
        lambda: sequence.Gpt(norm_heads=True), TOKENS % sequence.WORDS,
        ("transformer.drop", "transformer.h.0", "transformer.h.1"),
    ),
    "lstm": Case(Lstm, TOKENS, ("embedding", "rnn@0", "norm")),
    "time first": Case(lambda: Lstm(batch_first=False), TOKENS.T, ("embedding", "norm"), 0, 0),
    "mamba": Case(Mamba, TOKENS, ("embedding", "conv", "out")),
    "prefix": Case(Prefix, TOKENS, ("words", "thought")),
}  # fmt: skip
