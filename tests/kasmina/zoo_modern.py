"""Networks of the last years, and of the sort that one person writes for one purpose.

Shapes: `B` batch, `C` channels, `L` positions, `T` tokens.
"""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def vgg() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 5, 3, padding=1), nn.ReLU(inplace=True),
        nn.Conv2d(5, 5, 3, padding=1), nn.ReLU(inplace=True), nn.MaxPool2d(2),
        nn.Conv2d(5, 7, 3, padding=1), nn.ReLU(inplace=True), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(28, 9), nn.ReLU(inplace=True), nn.Dropout(0.5), nn.Linear(9, 4),
    )  # fmt: skip


def conv_mixer() -> nn.Module:
    """Patches, then depthwise and pointwise convolutions, the first around a skip."""

    class Residual(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x) + x

    def block() -> nn.Module:
        wide = nn.Conv2d(6, 6, 3, groups=6, padding="same")
        return nn.Sequential(
            Residual(nn.Sequential(wide, nn.GELU(), nn.BatchNorm2d(6))),
            nn.Conv2d(6, 6, 1), nn.GELU(), nn.BatchNorm2d(6),
        )  # fmt: skip

    return nn.Sequential(
        nn.Conv2d(3, 6, 2, stride=2), nn.GELU(), block(), block(),
        nn.AdaptiveAvgPool2d((1, 1)), nn.Flatten(), nn.Linear(6, 4),
    )  # fmt: skip


class ShuffleUnit(nn.Module):
    """Half of the channels pass, half are worked on; then both are shuffled."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        half = channels // 2
        self.branch = nn.Sequential(
            nn.Conv2d(half, half, 1), nn.BatchNorm2d(half), nn.ReLU(),
            nn.Conv2d(half, half, 3, padding=1, groups=half), nn.BatchNorm2d(half),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        passed, worked = x.chunk(2, dim=1)
        x = torch.cat([passed, self.branch(worked)], dim=1)
        B, C, H, W = x.shape
        return x.view(B, 2, C // 2, H, W).transpose(1, 2).reshape(B, C, H, W)


class ShuffleNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 6, 3, stride=2, padding=1)
        self.units = nn.Sequential(ShuffleUnit(6), ShuffleUnit(6))
        self.fc = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.units(self.stem(x)).mean([2, 3]))


class MBConv(nn.Module):
    """Of EfficientNet: widen, filter, squeeze and excite, narrow, and perhaps skip."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        wide = 2 * channels
        self.expand = nn.Sequential(nn.Conv2d(channels, wide, 1), nn.BatchNorm2d(wide), nn.SiLU())
        self.filter = nn.Sequential(
            nn.Conv2d(wide, wide, 3, padding=1, groups=wide), nn.BatchNorm2d(wide), nn.SiLU()
        )
        self.squeeze, self.excite = nn.Conv2d(wide, 2, 1), nn.Conv2d(2, wide, 1)
        self.project = nn.Sequential(nn.Conv2d(wide, channels, 1), nn.BatchNorm2d(channels))

    def forward(self, x: Tensor) -> Tensor:
        h = self.filter(self.expand(x))
        scale = F.adaptive_avg_pool2d(h, 1)
        scale = torch.sigmoid(self.excite(F.silu(self.squeeze(scale))))
        return x + self.project(h * scale)


class EfficientNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 5, 3, padding=1)
        self.blocks = nn.Sequential(MBConv(5), MBConv(5))
        self.classifier = nn.Sequential(nn.Dropout(0.2), nn.Linear(5, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.blocks(self.stem(x)).mean((-2, -1)))


class Crnn(nn.Module):
    """Convolutions over an image, then a recurrent network along its width, as for text lines."""

    def __init__(self) -> None:
        super().__init__()
        self.cnn = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.MaxPool2d((2, 1)))
        self.rnn = nn.GRU(16, 5, bidirectional=True, batch_first=True)
        self.fc = nn.Linear(10, 7)

    def forward(self, x: Tensor) -> Tensor:
        features = self.cnn(x).permute(0, 3, 1, 2).flatten(2)  # [B, T, C·H]
        states, _ = self.rnn(features)
        return self.fc(states).log_softmax(-1)


class M5(nn.Module):
    """Convolutions on a raw waveform."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv1d(1, 5, 8, stride=4), nn.BatchNorm1d(5)
        self.conv2, self.bn2 = nn.Conv1d(5, 7, 3), nn.BatchNorm1d(7)
        self.pool = nn.MaxPool1d(2)
        self.fc1 = nn.Linear(7, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.pool(F.relu(self.bn1(self.conv1(x))))
        x = F.relu(self.bn2(self.conv2(x)))
        return F.log_softmax(self.fc1(F.avg_pool1d(x, x.shape[-1]).squeeze(-1)), dim=1)


class WaveNetLayer(nn.Module):
    def __init__(self, channels: int, dilation: int) -> None:
        super().__init__()
        self.gate = nn.Conv1d(channels, 2 * channels, 2, dilation=dilation, padding=dilation)
        self.residual, self.skip = nn.Conv1d(channels, channels, 1), nn.Conv1d(channels, 4, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        left, right = self.gate(x)[..., : x.shape[-1]].chunk(2, dim=1)
        h = torch.tanh(left) * torch.sigmoid(right)
        return x + self.residual(h), self.skip(h)


class WaveNet(nn.Module):
    """Gated dilated convolutions; all layers' skips are summed."""

    def __init__(self) -> None:
        super().__init__()
        self.front = nn.Conv1d(2, 6, 1)
        self.layers = nn.ModuleList(WaveNetLayer(6, 2**depth) for depth in range(2))
        self.end = nn.Conv1d(4, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.front(x)
        skips = []
        for layer in self.layers:
            x, skip = layer(x)
            skips.append(skip)
        return self.end(F.relu(torch.stack(skips).sum(0)))


class RotaryAttention(nn.Module):
    """Grouped queries, positions by rotation, fused attention, no biases: as in Llama."""

    def __init__(self, channels: int, heads: int) -> None:
        super().__init__()
        self.heads, size = heads, channels // heads
        self.wq = nn.Linear(channels, channels, bias=False)
        self.wkv = nn.Linear(channels, 2 * size, bias=False)
        self.wo = nn.Linear(channels, channels, bias=False)
        angle = torch.arange(16)[:, None] / 100 ** (torch.arange(0, size, 2) / size)
        self.register_buffer("cos", angle.cos(), persistent=False)
        self.register_buffer("sin", angle.sin(), persistent=False)

    def rotate(self, x: Tensor) -> Tensor:
        even, odd = x[..., 0::2], x[..., 1::2]
        cos, sin = self.cos[: x.shape[-2]], self.sin[: x.shape[-2]]
        return torch.stack([even * cos - odd * sin, even * sin + odd * cos], -1).flatten(-2)

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.shape
        q = self.wq(x).view(B, T, self.heads, -1).transpose(1, 2)
        k, v = self.wkv(x).unsqueeze(1).chunk(2, dim=-1)
        k, v = (each.expand(B, self.heads, T, -1) for each in (k, v))
        y = F.scaled_dot_product_attention(self.rotate(q), self.rotate(k), v, is_causal=True)
        return self.wo(y.transpose(1, 2).reshape(B, T, C))


class LlamaBlock(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.attention_norm, self.ffn_norm = nn.RMSNorm(channels), nn.RMSNorm(channels)
        self.attention = RotaryAttention(channels, 2)
        self.w1, self.w3 = (nn.Linear(channels, 12, bias=False) for _ in range(2))
        self.w2 = nn.Linear(12, channels, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        h = self.ffn_norm(x)
        return x + self.w2(F.silu(self.w1(h)) * self.w3(h))


class Llama(nn.Module):
    def __init__(self, words: int) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(words, 8)
        self.layers = nn.ModuleList(LlamaBlock(8) for _ in range(2))
        self.norm = nn.RMSNorm(8)
        self.output = nn.Linear(8, words, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tok_embeddings(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.output(self.norm(x))


class Seq2Seq(nn.Module):
    """A recurrent encoder, and a decoder that attends to it step by step."""

    def __init__(self, words: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, 6)
        self.encoder = nn.GRU(6, 6, batch_first=True)
        self.cell = nn.GRUCell(12, 6)
        self.out = nn.Linear(6, words)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        memory, state = self.encoder(self.embed(source))
        state, logits = state[0], []
        for word in self.embed(target).unbind(1):
            weights = torch.softmax(memory @ state.unsqueeze(-1) / math.sqrt(6), dim=1)
            state = self.cell(torch.cat([word, (weights * memory).sum(1)], -1), state)
            logits.append(self.out(state))
        return torch.stack(logits, 1)


class FNet(nn.Module):
    """Fourier transforms in place of attention."""

    def __init__(self, words: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, 8)
        self.norm1, self.norm2 = nn.LayerNorm(8), nn.LayerNorm(8)
        self.ff = nn.Sequential(nn.Linear(8, 12), nn.GELU(), nn.Linear(12, 8))
        self.head = nn.Linear(8, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        x = self.norm1(x + torch.fft.fft2(x.float()).real)
        return self.head(self.norm2(x + self.ff(x)).mean(1))


class DeepSets(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.phi = nn.Sequential(nn.Linear(4, 9), nn.ELU(), nn.Linear(9, 7))
        self.rho = nn.Sequential(nn.Linear(7, 6), nn.ELU(), nn.Linear(6, 2))

    def forward(self, x: Tensor) -> Tensor:
        return self.rho(self.phi(x).sum(1))


class WideAndDeep(nn.Module):
    """For recommendations: crossed features beside a deep network over embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.user, self.item = nn.Embedding(7, 4), nn.Embedding(9, 4)
        self.wide = nn.Linear(4, 1)
        self.deep = nn.Sequential(nn.Linear(8, 10), nn.ReLU(), nn.Linear(10, 6), nn.ReLU())
        self.last = nn.Linear(6, 1)

    def forward(self, user: Tensor, item: Tensor) -> Tensor:
        u, i = self.user(user), self.item(item)
        return (self.wide(u * i) + self.last(self.deep(torch.cat([u, i], 1)))).squeeze(1)


class ActorCritic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(10, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh())
        self.actor, self.critic = nn.Linear(8, 3), nn.Linear(8, 1)

    def forward(self, state: Tensor) -> tuple[Tensor, Tensor]:
        h = self.trunk(state)
        return F.log_softmax(self.actor(h), -1), self.critic(h).squeeze(-1)


class Nerf(nn.Module):
    """Sines of positions, and a skip that joins the input again half way."""

    def __init__(self) -> None:
        super().__init__()
        self.early = nn.Sequential(nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU())
        self.late = nn.Sequential(nn.Linear(20, 8), nn.ReLU())
        self.density, self.colour = nn.Linear(8, 1), nn.Linear(8, 3)

    def forward(self, place: Tensor) -> dict[str, Tensor]:
        code = torch.cat([f(2**k * place) for k in range(2) for f in (torch.sin, torch.cos)], -1)
        h = self.late(torch.cat([self.early(code), code], -1))
        return {"density": F.softplus(self.density(h)), "colour": torch.sigmoid(self.colour(h))}


class TiedAutoencoder(nn.Module):
    """The decoder is the encoder turned over."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(10, 6)
        self.bias = nn.Parameter(torch.zeros(10))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(torch.tanh(self.encoder(x)), self.encoder.weight.t(), self.bias)


class LowRankLinear(nn.Linear):
    """A frozen layer and what is learned beside it."""

    def __init__(self, before: int, after: int) -> None:
        super().__init__(before, after)
        self.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(2, before))
        self.up = nn.Parameter(torch.zeros(after, 2))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + x @ self.down.T @ self.up.T


def adapted() -> nn.Module:
    return nn.Sequential(LowRankLinear(10, 8), nn.ReLU(), LowRankLinear(8, 4))


class SharedLayers(nn.Module):
    """One block applied again and again, as in ALBERT or a deep equilibrium network."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(10, 8), nn.Linear(8, 4)
        self.block = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for _ in range(3):
            x = x + self.block(x)
        return self.leave(x)


class Experts(nn.Module):
    """A mixture: every sample's features go to the expert that a router picks."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.router = nn.Linear(10, 8), nn.Linear(8, 3)
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.leave = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        weight, chosen = self.router(x).softmax(-1).max(-1)
        mixed = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            rows = chosen == index
            if rows.any():
                mixed[rows] = weight[rows, None] * expert(x[rows])
        return self.leave(x + mixed)
