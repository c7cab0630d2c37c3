"""Networks whose form is unusual: in what they take, return, call or remember."""

import random
from collections import defaultdict
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint


class TwoTowers(nn.Module):
    """An image and words, each with a network of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.image = nn.Sequential(nn.Conv2d(1, 5, 3), nn.ReLU(), nn.Flatten(), nn.Linear(180, 6))
        self.words = nn.Embedding(13, 6)
        self.text = nn.GRU(6, 6, batch_first=True)
        self.temperature = nn.Parameter(torch.zeros(()))

    def forward(self, image: Tensor, words: Tensor) -> Tensor:
        _, state = self.text(self.words(words))
        left, right = F.normalize(self.image(image)), F.normalize(state[-1])
        return self.temperature.exp() * left @ right.T


class DictTrunk(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(10, 8)

    def forward(self, x: Tensor) -> dict[str, Tensor | int]:
        found: dict[str, Tensor | int] = defaultdict(int)
        found.update(features=F.relu(self.fc(x)), norm=x.norm(dim=1), rows=len(x))
        return found


class DictOutput(nn.Module):
    """Returns a dict, and so does a part of it: a defaultdict, which is not made like a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = DictTrunk()
        self.heads = nn.ModuleDict({"left": nn.Linear(8, 3), "right": nn.Linear(8, 2)})

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        seen = self.trunk(x)
        assert seen["nothing"] == 0
        return {name: head(seen["features"]) for name, head in self.heads.items()}


class Encoded(NamedTuple):
    mean: Tensor
    log_variance: Tensor


class GaussianEncoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(10, 8)
        self.mean, self.log_variance = nn.Linear(8, 5), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Encoded:
        h = F.elu(self.body(x))
        return Encoded(self.mean(h), self.log_variance(h))


@dataclass
class Reconstruction:
    image: Tensor
    code: Encoded


class Vae(nn.Module):
    """Its encoder returns a named tuple, the model a dataclass, and noise is drawn between."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = GaussianEncoder()
        self.decoder = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 10))

    def forward(self, x: Tensor) -> Reconstruction:
        code = self.encoder(x)
        noise = torch.randn_like(code.mean)
        return Reconstruction(self.decoder(code.mean + noise * (code.log_variance / 2).exp()), code)


class ListOfScales(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fine, self.coarse = nn.Conv2d(1, 4, 3, padding=1), nn.Conv2d(4, 4, 3, stride=2)

    def forward(self, x: Tensor) -> list[Tensor]:
        fine = F.relu(self.fine(x))
        return [fine, F.relu(self.coarse(fine))]


class FeaturePyramid(nn.Module):
    """Passes lists of feature maps along."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = ListOfScales()
        self.head = nn.Conv2d(4, 2, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return tuple(self.head(scale).mean((2, 3)) for scale in self.backbone(x))


class OwnHooks(nn.Module):
    """Has hooks of its own: one changes activations, one looks at them."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(10, 8), nn.Linear(8, 4)
        self.register_buffer("seen", torch.zeros(8))
        self.fc1.register_forward_hook(self.soften)
        self.fc1.register_forward_pre_hook(lambda module, args: (args[0] * 2,))

    @staticmethod
    def soften(module: nn.Module, args: object, output: Tensor) -> Tensor:
        return output.tanh()

    def forward(self, x: Tensor) -> Tensor:
        h = self.fc1(x)
        self.seen.lerp_(h.detach().mean(0), 0.1)
        return self.fc2(h)


class Checkpointed(nn.Module):
    """Computes its activations again in the backward pass."""

    def __init__(self, *, reentrant: bool = False) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.stem = nn.Linear(10, 8)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Dropout(0.2)) for _ in range(2)
        )
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = x + checkpoint(block, x, use_reentrant=self.reentrant)
        return self.head(x)


class KeywordsOnly(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.features, self.mixer = nn.Linear(10, 8), nn.Bilinear(8, 3, 6)
        self.head = nn.Linear(6, 4)

    def forward(self, *, numbers: Tensor, context: Tensor, scale: float = 1.0) -> Tensor:
        h = self.mixer(F.relu(self.features(numbers)), context)
        return self.head(h) * scale


class StochasticDepth(nn.Module):
    """A loop over blocks, each of which training skips now and then, whoever throws the dice."""

    def __init__(self, dice: str) -> None:
        super().__init__()
        self.dice = dice
        self.generator = torch.Generator().manual_seed(7)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Dropout(0.1)) for _ in range(3)
        )
        self.head = nn.Linear(8, 4)

    def chance(self) -> float:
        if self.dice == "python":
            return random.random()
        if self.dice == "numpy":
            return float(np.random.rand())
        own = self.generator if self.dice == "own" else None
        return torch.rand((), generator=own).item()

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            if not self.training or self.chance() < 0.9:
                x = x + layer(x)
        return self.head(x)


class NormOfAllAxes(nn.Module):
    """Layer norm over [C, H, W], which says nothing about where the channels are."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 6, 3, padding=1), nn.LayerNorm([6, 8, 8])
        self.fc = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.norm(self.conv(x)).relu().mean((2, 3)))


class MixedPrecision(nn.Module):
    """A bfloat16 model whose norm stays in float32, as large ones do."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(10, 8, dtype=torch.bfloat16)
        self.norm = CastNorm(8)
        self.fc2 = nn.Linear(8, 4, dtype=torch.bfloat16)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.norm(self.fc1(x.bfloat16())))


class CastNorm(nn.LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.float()).to(x.dtype)


class LayerNorm2d(nn.LayerNorm):
    """Torch's layer norm made to work on [B, C, H, W], as torchvision's ConvNeXt has it."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


def channels_first_norm() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 6, 2, stride=2), LayerNorm2d(6), nn.GELU(), nn.Flatten(), nn.Linear(96, 4)
    )


class Swin(nn.Module):
    """Channels last throughout; merges 2 x 2 patches into one."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 5, 2, stride=2)
        self.stage = nn.Sequential(nn.LayerNorm(5), nn.Linear(5, 5), nn.GELU())
        self.merge = nn.Linear(20, 6)
        self.head = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).permute(0, 2, 3, 1)
        x = x + self.stage(x)
        corners = [x[:, row::2, column::2] for row in (0, 1) for column in (0, 1)]
        return self.head(self.merge(torch.cat(corners, -1)).mean((1, 2)))
