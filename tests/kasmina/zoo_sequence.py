"""Networks for sequences and sets, as people write them.

Shapes: `B` batch, `C` channels, `L` positions, `T` tokens.
"""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

WORDS = 13


class TemporalBlock(nn.Module):
    """Of a temporal convolutional network: causal by padding and cutting."""

    def __init__(self, before: int, after: int, dilation: int) -> None:
        super().__init__()
        self.cut = 2 * dilation
        self.conv = nn.Conv1d(before, after, 3, padding=self.cut, dilation=dilation)
        self.drop = nn.Dropout(0.2)
        self.skip = nn.Conv1d(before, after, 1)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.drop(F.relu(self.conv(x)[..., : -self.cut])) + self.skip(x))


class Tcn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.network = nn.Sequential(TemporalBlock(2, 6, 1), TemporalBlock(6, 5, 2))
        self.linear = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.network(x)[:, :, -1])


def pointnet() -> nn.Module:
    """A set of points [B, 3, L], each on its own and then the largest of each feature."""
    return nn.Sequential(
        nn.Conv1d(3, 6, 1),
        nn.BatchNorm1d(6),
        nn.ReLU(),
        nn.AdaptiveMaxPool1d(1),
        nn.Flatten(),
        nn.Linear(6, 4),
    )


class LstmClassifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, 6)
        self.lstm = nn.LSTM(6, 8, num_layers=2, dropout=0.2, batch_first=True, bidirectional=True)
        self.fc = nn.Linear(16, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        states, _ = self.lstm(self.embedding(tokens))
        return self.fc(states[:, -1])


class WordLanguageModel(nn.Module):
    """The classic recurrent one: time first, decoder tied to the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.1)
        self.encoder = nn.Embedding(WORDS, 6)
        self.rnn = nn.GRU(6, 6)
        self.decoder = nn.Linear(6, WORDS)
        self.decoder.weight = self.encoder.weight

    def forward(self, tokens: Tensor) -> Tensor:
        states, _ = self.rnn(self.drop(self.encoder(tokens)))
        return self.decoder(self.drop(states))


class CellLoop(nn.Module):
    """A recurrent cell, called once for each step."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(4, 7)
        self.out = nn.Linear(7, 2)

    def forward(self, x: Tensor) -> Tensor:
        state = x.new_zeros(x.shape[0], 7)
        for step in x.unbind(1):
            state = self.cell(step, state)
        return self.out(state)


class StatefulRnn(nn.Module):
    """Remembers its state from batch to batch, in an attribute, and counts in a new buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.RNN(4, 6, batch_first=True)
        self.out = nn.Linear(6, 2)
        self.hidden: Tensor | None = None
        self.register_buffer("batches", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        states, hidden = self.rnn(x, self.hidden)
        self.hidden = hidden.detach()
        self.batches = self.batches + 1
        return self.out(states)


class PositionalEncoding(nn.Module):
    def __init__(self, channels: int, length: int) -> None:
        super().__init__()
        angle = torch.arange(length)[:, None] / 50 ** (torch.arange(channels) / channels)
        self.register_buffer("table", angle.sin(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.table[: x.shape[1]]


class TextEncoder(nn.Module):
    """Torch's own transformer encoder, batch first or time first."""

    def __init__(self, *, batch_first: bool, norm_first: bool = False) -> None:
        super().__init__()
        self.batch_first = batch_first
        self.embedding = nn.Embedding(WORDS, 8)
        self.position = PositionalEncoding(8, 16)
        layer = nn.TransformerEncoderLayer(
            8, 2, 12, dropout=0.1, batch_first=batch_first, norm_first=norm_first
        )
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=not norm_first)
        self.head = nn.Linear(8, 3)

    def forward(self, tokens: Tensor, padding: Tensor | None = None) -> Tensor:
        x = self.position(self.embedding(tokens))
        if not self.batch_first:
            x = x.transpose(0, 1)
        x = self.encoder(x, src_key_padding_mask=padding)
        return self.head(x.mean(1 if self.batch_first else 0))


def translator() -> nn.Module:
    """Encoder and decoder, time first (torch's default), on embedded words."""
    return nn.Transformer(8, 2, 1, 1, 12, dropout=0.1)


class CausalSelfAttention(nn.Module):
    def __init__(self, channels: int, heads: int, *, norm_heads: bool = False) -> None:
        super().__init__()
        self.heads = heads
        self.c_attn = nn.Linear(channels, 3 * channels)
        self.c_proj = nn.Linear(channels, channels)
        self.q_norm = nn.LayerNorm(channels // heads) if norm_heads else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.shape
        q, k, v = (
            part.view(B, T, self.heads, C // self.heads).transpose(1, 2)
            for part in self.c_attn(x).split(C, dim=2)
        )
        scores = (self.q_norm(q) @ k.transpose(-2, -1)) / math.sqrt(k.shape[-1])
        future = torch.ones(T, T, dtype=torch.bool, device=x.device).triu(1)
        y = scores.masked_fill(future, float("-inf")).softmax(-1) @ v
        return self.c_proj(y.transpose(1, 2).contiguous().view(B, T, C))


class GptBlock(nn.Module):
    def __init__(self, channels: int, *, norm_heads: bool = False) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(channels)
        self.attn = CausalSelfAttention(channels, 2, norm_heads=norm_heads)
        self.ln_2 = nn.LayerNorm(channels)
        self.mlp = nn.Sequential(
            nn.Linear(channels, 2 * channels), nn.GELU(), nn.Linear(2 * channels, channels)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class Gpt(nn.Module):
    """After nanoGPT: a ModuleDict, and a head tied to the embedding."""

    def __init__(self, *, norm_heads: bool = False) -> None:
        super().__init__()
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(WORDS, 8),
                "wpe": nn.Embedding(16, 8),
                "drop": nn.Dropout(0.1),
                "h": nn.ModuleList(GptBlock(8, norm_heads=norm_heads) for _ in range(2)),
                "ln_f": nn.LayerNorm(8),
            }
        )
        self.lm_head = nn.Linear(8, WORDS, bias=False)
        self.transformer.wte.weight = self.lm_head.weight

    def forward(
        self, tokens: Tensor, targets: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        position = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.transformer.drop(self.transformer.wte(tokens) + self.transformer.wpe(position))
        for block in self.transformer.h:
            x = block(x)
        logits = self.lm_head(self.transformer.ln_f(x))
        if targets is None:
            return logits, None
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class VisionTransformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patch_embed = nn.Conv2d(3, 8, 4, stride=4)
        self.class_token = nn.Parameter(torch.randn(1, 1, 8))
        self.position = nn.Parameter(torch.randn(1, 5, 8))
        self.blocks = nn.Sequential(EncoderBlock(8), EncoderBlock(8))
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch_embed(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.class_token.expand(len(x), -1, -1), x], dim=1) + self.position
        return self.head(self.blocks(x)[:, 0])


class EncoderBlock(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(channels)
        self.attention = nn.MultiheadAttention(channels, 2, batch_first=True)
        self.norm2 = nn.LayerNorm(channels)
        self.mlp = nn.Sequential(nn.Linear(channels, 12), nn.GELU(), nn.Linear(12, channels))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return x + self.mlp(self.norm2(x))


class MixerBlock(nn.Module):
    def __init__(self, tokens: int, channels: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(channels), nn.LayerNorm(channels)
        self.token_mix = nn.Sequential(nn.Linear(tokens, 6), nn.GELU(), nn.Linear(6, tokens))
        self.channel_mix = nn.Sequential(nn.Linear(channels, 9), nn.GELU(), nn.Linear(9, channels))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.token_mix(self.norm1(x).transpose(1, 2)).transpose(1, 2)
        return x + self.channel_mix(self.norm2(x))


class Mixer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 7, 4, stride=4)
        self.blocks = nn.ModuleList(MixerBlock(4, 7) for _ in range(2))
        self.head = nn.Linear(7, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x).flatten(2).transpose(1, 2)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(1))


class GraphConvolution(nn.Module):
    """Nodes of one graph as rows, as graph libraries have it."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Linear(5, 8), nn.Linear(8, 3)

    def forward(self, nodes: Tensor, adjacency: Tensor) -> Tensor:
        return adjacency @ self.conv2(F.relu(adjacency @ self.conv1(nodes)))
