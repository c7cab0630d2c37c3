"""Models as users write them. This file does not import Esper, so that they load without it."""

from collections import OrderedDict
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class ResidualBlock(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(channels)
        self.act = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.norm(self.conv(x)) + x)


class ResidualCnn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.layer1 = nn.Sequential(ResidualBlock(8), ResidualBlock(8))
        self.layer2 = ResidualBlock(8)
        self.dropout = nn.Dropout(0.2)
        self.fc = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer2(self.layer1(self.stem(x)))
        return self.fc(self.dropout(x.mean((2, 3))))


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down1 = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU())
        self.down2 = nn.Sequential(nn.Conv2d(4, 8, 3, padding=1), nn.ReLU())
        self.up = nn.ConvTranspose2d(8, 4, 2, stride=2)
        self.out = nn.Conv2d(8, 2, 1)

    def forward(self, image: Tensor) -> Tensor:
        skip = self.down1(image)
        deep = self.down2(F.max_pool2d(skip, 2))
        return self.out(torch.cat([skip, self.up(deep)], 1))


class LstmClassifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 6)
        self.rnn = nn.LSTM(6, 8, batch_first=True)
        self.head = nn.Linear(8, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        states, (last, _) = self.rnn(self.embed(tokens))
        return self.head(states.mean(1) + last[-1])


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(5, 8)
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return scale * self.head(self.encoder(self.embed(x))[:, 0])


class TiedLm(nn.Module):
    """Its output layer's weight is its embedding's, and it reaches into both."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 8)
        self.mix = nn.Linear(8, 8)
        self.head = nn.Linear(8, 20, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = torch.tanh(self.mix(self.embed(tokens)))
        assert isinstance(self.mix, nn.Linear)
        return self.head(x) + F.linear(F.linear(x, self.mix.weight), self.embed.weight)


class Twice(nn.Module):
    """Calls one module twice, under two names, and looks at the length of another."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.again = self.first
        self.stack = nn.Sequential(nn.Linear(6, 6), nn.Tanh())
        self.layers = nn.ModuleList([nn.Linear(6, 6) for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        x = self.again(torch.relu(self.first(x)))
        x = self.stack(self.stack(x))
        for index in range(len(self.layers)):
            x = self.layers[index](x)
        return x


class Features(NamedTuple):
    low: Tensor
    high: Tensor


class ModelOutput(OrderedDict[str, Any]):
    """A dict whose entries are attributes too, as in a well-known library."""

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        super().__setattr__(key, value)


class Trunk(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.low = nn.Linear(6, 6)
        self.high = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Any:
        low, high = self.low(x), self.high(x)
        match self.kind:
            case "dict":
                return {"low": low, "high": high, "count": 2}
            case "ordered":
                return ModelOutput(low=low, high=high)
            case "named":
                return Features(low, high)
            case "list":
                return [low, high]
        return low, high, None


class Parts(nn.Module):
    """Returns a nest of what its trunk returned, in whatever container that came."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.trunk = Trunk(kind)
        self.head = nn.Linear(6, 2)

    def forward(self, x: Tensor) -> dict[str, Any]:
        found = self.trunk(x)
        if isinstance(found, ModelOutput):
            low, high = found.low, found.high
        elif isinstance(found, dict):
            low, high = found["low"], found["high"]
        elif isinstance(found, Features):
            low, high = found.low, found.high
        else:
            low, high = found[0], found[1]
        return {"logits": self.head(low), "features": (low, [high])}


class DenseBlock(nn.ModuleDict):
    """Runs its children by itself, so that one more among them would be run too."""

    def __init__(self) -> None:
        super().__init__({"a": nn.Linear(6, 6), "b": nn.Linear(6, 6)})

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.values():
            x = x + layer(x)
        return x


class Dense(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(DenseBlock(), nn.ReLU())
        self.head = nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x))


def chain() -> nn.Module:
    """Containers in a container: no module of a class of its own anywhere."""
    return nn.Sequential(
        nn.Sequential(nn.Linear(6, 6), nn.ReLU()),
        nn.Sequential(nn.Linear(6, 6), nn.ReLU()),
        nn.Linear(6, 2),
    )


class Counting(nn.Module):
    """Remembers its runs in every way a module can."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(6, 6)
        self.norm = nn.BatchNorm1d(6)
        self.runs = 0
        self.last: Tensor | None = None
        self.register_buffer("mean", torch.zeros(6))

    def forward(self, x: Tensor) -> Tensor:
        self.runs += 1
        self.last = F.dropout(self.norm(self.body(x)), 0.1, self.training)
        self.mean = 0.9 * self.mean + 0.1 * self.last.mean(0).detach()
        return self.last - self.mean


class ChildCounter(nn.Module):
    """Depends on how many children it has."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        (only,) = self.children()
        return only(x)
