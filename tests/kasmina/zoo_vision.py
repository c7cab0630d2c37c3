"""Networks for images and feature vectors, as people write them.

Shapes: `B` batch, `C` channels, `H` height, `W` width.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations


def mlp() -> nn.Module:
    return nn.Sequential(
        nn.Linear(10, 16), nn.ReLU(), nn.Linear(16, 12), nn.ReLU(), nn.Linear(12, 4)
    )


class BasicBlock(nn.Module):
    """ResNet v1."""

    def __init__(self, before: int, after: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(before, after, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(after)
        self.conv2 = nn.Conv2d(after, after, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(after)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = None
        if stride != 1 or before != after:
            self.downsample = nn.Sequential(
                nn.Conv2d(before, after, 1, stride, bias=False), nn.BatchNorm2d(after)
            )

    def forward(self, x: Tensor) -> Tensor:
        identity = x if self.downsample is None else self.downsample(x)
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += identity
        return self.relu(out)


class Bottleneck(nn.Module):
    """ResNet-50's block."""

    def __init__(self, channels: int, inner: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels, inner, 1, bias=False),
            nn.BatchNorm2d(inner),
            nn.ReLU(inplace=True),
            nn.Conv2d(inner, inner, 3, padding=1, bias=False),
            nn.BatchNorm2d(inner),
            nn.ReLU(inplace=True),
            nn.Conv2d(inner, channels, 1, bias=False),
            nn.BatchNorm2d(channels),
        )

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.body(x), inplace=True)


class PreActivationBlock(nn.Module):
    """ResNet v2; its first ReLU works in place on what the block before returned."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.relu = nn.ReLU(inplace=True)
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1)
        self.bn = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv1(self.relu(x))
        return x + self.conv2(F.relu(self.bn(y)))


class ResNet(nn.Module):
    def __init__(self, *blocks: nn.Module, width: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 6, 3, padding=1, bias=False), nn.BatchNorm2d(6))
        self.layer1 = blocks[0]
        self.layer2 = nn.Sequential(*blocks[1:])
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(width, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer2(self.layer1(F.relu(self.stem(x))))
        return self.fc(torch.flatten(self.pool(x), 1))


def resnet_basic() -> nn.Module:
    return ResNet(BasicBlock(6, 6), BasicBlock(6, 10, stride=2), width=10)


def resnet_bottleneck() -> nn.Module:
    return ResNet(Bottleneck(6, 3), Bottleneck(6, 3), width=6)


def resnet_preactivation() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 6, 3, padding=1),
        PreActivationBlock(6),
        PreActivationBlock(6),
        nn.Sequential(nn.BatchNorm2d(6), nn.ReLU(inplace=True), nn.AdaptiveAvgPool2d(1)),
        nn.Flatten(),
        nn.Linear(6, 4),
    )


def as_deep_as_wide() -> nn.Module:
    """[B, 8, 8, 8] in the middle, after which no module has its channels last."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), PreActivationBlock(8), nn.Flatten(), nn.Linear(512, 4)
    )


class DenseLayer(nn.Module):
    def __init__(self, before: int, growth: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(before)
        self.conv = nn.Conv2d(before, growth, 3, padding=1, bias=False)
        self.drop = nn.Dropout2d(0.2)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x, self.drop(self.conv(F.relu(self.norm(x))))], dim=1)


def densenet() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1),
        DenseLayer(4, 3),
        DenseLayer(7, 3),
        nn.Sequential(nn.BatchNorm2d(10), nn.Conv2d(10, 5, 1), nn.AvgPool2d(2)),
        nn.Flatten(),
        nn.Linear(5 * 4 * 4, 4),
    )


def double_conv(before: int, after: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(before, after, 3, padding=1),
        nn.GroupNorm(2, after),
        nn.SiLU(inplace=True),
        nn.Conv2d(after, after, 3, padding=1),
        nn.SiLU(inplace=True),
    )


class UNet(nn.Module):
    """With skips by concatenation and a time, as diffusion models have it."""

    def __init__(self) -> None:
        super().__init__()
        self.time = nn.Sequential(nn.Linear(1, 6), nn.SiLU(), nn.Linear(6, 6))
        self.down1 = double_conv(1, 4)
        self.down2 = double_conv(4, 6)
        self.mid = double_conv(6, 6)
        self.up1 = nn.ConvTranspose2d(6, 4, 2, stride=2)
        self.fuse = double_conv(8, 4)
        self.head = nn.Conv2d(4, 1, 1)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        skip = self.down1(x)
        h = self.down2(F.max_pool2d(skip, 2))
        h = self.mid(h + self.time(time)[:, :, None, None])
        return self.head(self.fuse(torch.cat([skip, self.up1(h)], dim=1)))


class InvertedResidual(nn.Module):
    """MobileNet v2."""

    def __init__(self, channels: int, expand: int) -> None:
        super().__init__()
        inner = channels * expand
        self.expand = nn.Sequential(nn.Conv2d(channels, inner, 1), nn.ReLU6(inplace=True))
        self.depthwise = nn.Conv2d(inner, inner, 3, padding=1, groups=inner)
        self.act = nn.ReLU6(inplace=True)
        self.project = nn.Sequential(nn.Conv2d(inner, channels, 1), nn.BatchNorm2d(channels))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.project(self.act(self.depthwise(self.expand(x))))


class MobileNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 5, 3, stride=2, padding=1)
        self.blocks = nn.ModuleList(InvertedResidual(5, 2) for _ in range(2))
        self.classifier = nn.Sequential(nn.Dropout(0.2), nn.Linear(5, 4))

    def forward(self, x: Tensor) -> Tensor:
        x = F.hardswish(self.stem(x))
        for block in self.blocks:
            x = block(x)
        return self.classifier(x.mean([2, 3]))


class ConvNeXtBlock(nn.Module):
    """Permutes to channels last and back."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.dwconv = nn.Conv2d(channels, channels, 7, padding=3, groups=channels)
        self.norm = nn.LayerNorm(channels)
        self.pwconv1 = nn.Linear(channels, 2 * channels)
        self.pwconv2 = nn.Linear(2 * channels, channels)
        self.gamma = nn.Parameter(torch.full((channels,), 0.1))

    def forward(self, x: Tensor) -> Tensor:
        y = self.dwconv(x).permute(0, 2, 3, 1)
        y = self.gamma * self.pwconv2(F.gelu(self.pwconv1(self.norm(y))))
        return x + y.permute(0, 3, 1, 2)


class ConvNeXt(nn.Module):
    def __init__(self, channels: int = 6) -> None:
        super().__init__()
        self.patchify = nn.Conv2d(3, channels, 2, stride=2)
        self.blocks = nn.Sequential(ConvNeXtBlock(channels), ConvNeXtBlock(channels))
        self.norm = nn.LayerNorm(channels)
        self.head = nn.Linear(channels, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.patchify(x)).mean((-2, -1))))


class SqueezeExcite(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(channels, channels // 2)
        self.fc2 = nn.Linear(channels // 2, channels)

    def forward(self, x: Tensor) -> Tensor:
        scale = torch.sigmoid(self.fc2(F.relu(self.fc1(x.mean((2, 3))))))
        return x * scale[:, :, None, None]


class SqueezeExciteNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 6, 3, padding=1)
        self.se = SqueezeExcite(6)
        self.fc = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(F.relu_(self.se(self.conv(x))).amax((2, 3)))


class Autoencoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Flatten(), nn.Linear(64, 12), nn.Tanh(), nn.Linear(12, 3))
        self.decoder = nn.Sequential(nn.Linear(3, 12), nn.Tanh(), nn.Linear(12, 64), nn.Sigmoid())

    def forward(self, x: Tensor) -> Tensor:
        return self.decoder(self.encoder(x)).view_as(x)


def generator() -> nn.Module:
    """DCGAN's generator, from noise [B, Z, 1, 1]."""
    return nn.Sequential(
        nn.ConvTranspose2d(6, 8, 4, 1, 0, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(True),
        nn.ConvTranspose2d(8, 5, 4, 2, 1, bias=False),
        nn.BatchNorm2d(5),
        nn.ReLU(True),
        nn.Conv2d(5, 1, 3, padding=1),
        nn.Tanh(),
    )


class Siamese(nn.Module):
    """One encoder, called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 7)
        )

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        return F.pairwise_distance(self.encoder(left), self.encoder(right))


def in_place_behind_the_slot() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 5, 3, padding=1),
        nn.LeakyReLU(0.1, inplace=True),
        nn.BatchNorm2d(5),
        nn.Dropout(0.3, inplace=True),
        nn.Flatten(),
        nn.Linear(5 * 64, 4),
    )


def weight_norm() -> nn.Module:
    return nn.Sequential(
        parametrizations.weight_norm(nn.Linear(10, 8)),
        nn.ReLU(),
        parametrizations.weight_norm(nn.Linear(8, 4)),
    )


def spectral_norm() -> nn.Module:
    """A discriminator whose power iteration goes on in every training pass."""
    return nn.Sequential(
        parametrizations.spectral_norm(nn.Conv2d(3, 5, 3, padding=1)),
        nn.LeakyReLU(0.2),
        nn.Flatten(),
        parametrizations.spectral_norm(nn.Linear(5 * 64, 1)),
    )


class FrozenBackbone(nn.Module):
    """Fine-tuning: the backbone stays in evaluation mode and receives no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Conv2d(3, 5, 3), nn.BatchNorm2d(5), nn.ReLU())
        self.head = nn.Sequential(nn.Flatten(), nn.Linear(5 * 36, 9), nn.ReLU(), nn.Linear(9, 4))
        self.backbone.requires_grad_(False)

    def train(self, mode: bool = True) -> nn.Module:
        super().train(mode)
        self.backbone.eval()
        return self

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.backbone(x))


class DeepSupervision(nn.Module):
    """A second head that only exists in training, as GoogLeNet's."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 6, 3, stride=2), nn.ReLU())
        self.aux = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 4))
        self.head = nn.Sequential(nn.AdaptiveMaxPool2d(1), nn.Flatten(), nn.Linear(6, 4))

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        h = self.stem(x)
        return (self.head(h), self.aux(h)) if self.training else self.head(h)
