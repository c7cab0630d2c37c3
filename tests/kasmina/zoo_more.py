"""More networks as people write them: branches, pyramids, gates, taggers, cross-attention, tables.

Shapes: `B` batch, `C` channels, `T` tokens.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Inception(nn.Module):
    """Parallel branches whose channels are joined."""

    def __init__(self) -> None:
        super().__init__()
        self.narrow = nn.Conv2d(3, 4, 1)
        self.wide = nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU(), nn.Conv2d(4, 5, 3, padding=1))
        self.pooled = nn.Sequential(nn.MaxPool2d(3, 1, 1), nn.Conv2d(3, 2, 1))
        self.head = nn.Linear(11, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cat([self.narrow(x), self.wide(x), self.pooled(x)], dim=1)
        return self.head(F.relu(x).mean((2, 3)))


class FeaturePyramid(nn.Module):
    """A backbone, lateral connections, and the way back up."""

    def __init__(self) -> None:
        super().__init__()
        self.down1 = nn.Sequential(nn.Conv2d(3, 6, 3, 2, 1), nn.BatchNorm2d(6), nn.ReLU())
        self.down2 = nn.Sequential(nn.Conv2d(6, 9, 3, 2, 1), nn.BatchNorm2d(9), nn.ReLU())
        self.lateral1, self.lateral2 = nn.Conv2d(6, 5, 1), nn.Conv2d(9, 5, 1)
        self.smooth = nn.Conv2d(5, 5, 3, padding=1)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        low = self.down1(x)
        high = self.lateral2(self.down2(low))
        up = F.interpolate(high, scale_factor=2, mode="nearest")
        return {"p1": self.smooth(self.lateral1(low) + up), "p2": high}


class Tagger(nn.Module):
    """A bidirectional LSTM that labels every word."""

    def __init__(self, words: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, 6)
        self.rnn = nn.LSTM(6, 5, bidirectional=True, batch_first=True)
        self.drop = nn.Dropout(0.3)
        self.tags = nn.Linear(10, 3)

    def forward(self, text: Tensor) -> Tensor:
        hidden, _ = self.rnn(self.embed(text))
        return self.tags(self.drop(hidden))


class CrossAttention(nn.Module):
    """Learned queries that read a sequence, as in Perceiver or DETR."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(5, 8)
        self.queries = nn.Parameter(torch.randn(3, 8))
        self.attend = nn.MultiheadAttention(8, 2, batch_first=True)
        self.norm = nn.LayerNorm(8)
        self.mlp = nn.Sequential(nn.Linear(8, 12), nn.GELU(), nn.Linear(12, 8))
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        memory = self.project(x)
        queries = self.queries.expand(len(x), -1, -1)
        read = queries + self.attend(queries, memory, memory, need_weights=False)[0]
        return self.head(read + self.mlp(self.norm(read)))


class TableNet(nn.Module):
    """Embeddings of categories beside numbers, then residual layers, for tables."""

    def __init__(self) -> None:
        super().__init__()
        self.categories = nn.ModuleList(nn.Embedding(size, 3) for size in (4, 6))
        self.first = nn.Linear(6 + 5, 12)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.BatchNorm1d(12), nn.Linear(12, 12), nn.ReLU(), nn.Dropout(0.1))
            for _ in range(2)
        )
        self.head = nn.Linear(12, 2)

    def forward(self, categories: Tensor, numbers: Tensor) -> Tensor:
        parts = [embed(categories[:, i]) for i, embed in enumerate(self.categories)]
        x = self.first(torch.cat([*parts, numbers], dim=1))
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


class Highway(nn.Module):
    """Layers that learn how much of themselves to let through."""

    def __init__(self) -> None:
        super().__init__()
        self.transform = nn.ModuleList(nn.Linear(10, 10) for _ in range(2))
        self.carry = nn.ModuleList(nn.Linear(10, 10) for _ in range(2))
        self.head = nn.Linear(10, 3)

    def forward(self, x: Tensor) -> Tensor:
        for transform, carry in zip(self.transform, self.carry, strict=True):
            gate = torch.sigmoid(carry(x))
            x = gate * F.relu(transform(x)) + (1 - gate) * x
        return self.head(x)
