"""Networks for images, written out as in their papers and popular repositories, only narrower.

Shapes: `B` batch, `C` channels, `H` height, `W` width, `N` patches.
"""

import warnings
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.ao import quantization
from torch.nn import functional as F
from torch.nn.utils import parametrizations


class BasicBlock(nn.Module):
    expansion = 1

    def __init__(self, inner: int, width: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inner, width, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.downsample = shortcut(inner, width, stride)

    def forward(self, x: Tensor) -> Tensor:
        identity = x if self.downsample is None else self.downsample(x)
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += identity
        return self.relu(out)


class Bottleneck(nn.Module):
    expansion = 4

    def __init__(self, inner: int, width: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(inner, width, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, width * 4, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(width * 4)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = shortcut(inner, width * 4, stride)

    def forward(self, x: Tensor) -> Tensor:
        identity = x if self.downsample is None else self.downsample(x)
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.relu(self.bn2(self.conv2(out)))
        out = self.bn3(self.conv3(out))
        out += identity
        return self.relu(out)


def shortcut(inner: int, outer: int, stride: int) -> nn.Module | None:
    if stride == 1 and inner == outer:
        return None
    return nn.Sequential(nn.Conv2d(inner, outer, 1, stride, bias=False), nn.BatchNorm2d(outer))


class ResNet(nn.Module):
    def __init__(self, block: type[BasicBlock | Bottleneck], layers: list[int], width: int) -> None:
        super().__init__()
        self.inplanes = width
        self.conv1 = nn.Conv2d(3, width, 7, 2, 3, bias=False)
        self.bn1, self.relu = nn.BatchNorm2d(width), nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, 2, 1)
        self.layer1 = self._make_layer(block, width, layers[0], 1)
        self.layer2 = self._make_layer(block, width * 2, layers[1], 2)
        self.layer3 = self._make_layer(block, width * 4, layers[2], 2)
        self.layer4 = self._make_layer(block, width * 8, layers[3], 2)
        self.avgpool = nn.AdaptiveAvgPool2d((1, 1))
        self.fc = nn.Linear(width * 8 * block.expansion, 10)

    def _make_layer(
        self, block: type[BasicBlock | Bottleneck], width: int, count: int, stride: int
    ) -> nn.Sequential:
        layers = [block(self.inplanes, width, stride)]
        self.inplanes = width * block.expansion
        layers += [block(self.inplanes, width) for _ in range(1, count)]
        return nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return self.fc(torch.flatten(self.avgpool(x), 1))


def resnet18() -> nn.Module:
    return ResNet(BasicBlock, [2, 2, 2, 2], 4)


def resnet50() -> nn.Module:
    return ResNet(Bottleneck, [3, 4, 6, 3], 2)


class DenseLayer(nn.Module):
    def __init__(self, inner: int, growth: int) -> None:
        super().__init__()
        self.norm1, self.relu1 = nn.BatchNorm2d(inner), nn.ReLU(inplace=True)
        self.conv1 = nn.Conv2d(inner, 2 * growth, 1, bias=False)
        self.norm2, self.relu2 = nn.BatchNorm2d(2 * growth), nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(2 * growth, growth, 3, padding=1, bias=False)

    def forward(self, features: list[Tensor]) -> Tensor:
        x = self.conv1(self.relu1(self.norm1(torch.cat(features, 1))))
        return self.conv2(self.relu2(self.norm2(x)))


class DenseBlock(nn.ModuleDict):
    """As in torchvision: a dict of layers, each of which sees all before it."""

    def __init__(self, layers: int, inner: int, growth: int) -> None:
        super().__init__()
        for index in range(layers):
            self.add_module(f"layer{index}", DenseLayer(inner + index * growth, growth))

    def forward(self, x: Tensor) -> Tensor:
        features = [x]
        for layer in self.values():
            features.append(layer(features))
        return torch.cat(features, 1)


class DenseNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1, bias=False))
        for index, inner in enumerate((4, 5)):
            self.features.add_module(f"block{index}", DenseBlock(2, inner, 3))
            outer = inner + 6
            self.features.add_module(f"norm{index}", nn.BatchNorm2d(outer))
            if index == 0:
                half = nn.Sequential(nn.ReLU(inplace=True), nn.Conv2d(outer, 5, 1), nn.AvgPool2d(2))
                self.features.add_module("transition", half)
        self.classifier = nn.Linear(11, 4)

    def forward(self, x: Tensor) -> Tensor:
        features = F.relu(self.features(x), inplace=True)
        return self.classifier(F.adaptive_avg_pool2d(features, (1, 1)).flatten(1))


class InvertedResidual(nn.Module):
    def __init__(self, inner: int, outer: int, stride: int, expand: int) -> None:
        super().__init__()
        wide = inner * expand
        self.use_res_connect = stride == 1 and inner == outer
        self.conv = nn.Sequential(
            nn.Conv2d(inner, wide, 1, bias=False), nn.BatchNorm2d(wide), nn.ReLU6(inplace=True),
            nn.Conv2d(wide, wide, 3, stride, 1, groups=wide, bias=False),
            nn.BatchNorm2d(wide), nn.ReLU6(inplace=True),
            nn.Conv2d(wide, outer, 1, bias=False), nn.BatchNorm2d(outer),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return x + self.conv(x) if self.use_res_connect else self.conv(x)


def mobilenet_v2() -> nn.Module:
    settings = ((2, 4, 1, 1), (2, 6, 2, 2), (2, 8, 2, 2))  # expansion, channels, blocks, stride
    layers: list[nn.Module] = [nn.Conv2d(3, 4, 3, 2, 1), nn.BatchNorm2d(4), nn.ReLU6(inplace=True)]
    inner = 4
    for expand, outer, count, stride in settings:
        for index in range(count):
            block = InvertedResidual(inner, outer, stride if index == 0 else 1, expand)
            layers.append(block)
            inner = outer
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.2), nn.Linear(inner, 4)]
    return nn.Sequential(nn.Sequential(*layers), *head)


class SqueezeExcitation(nn.Module):
    def __init__(self, channels: int, squeezed: int) -> None:
        super().__init__()
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc1, self.fc2 = nn.Conv2d(channels, squeezed, 1), nn.Conv2d(squeezed, channels, 1)
        self.activation, self.scale_activation = nn.SiLU(), nn.Sigmoid()

    def forward(self, x: Tensor) -> Tensor:
        scale = self.fc2(self.activation(self.fc1(self.avgpool(x))))
        return self.scale_activation(scale) * x


class StochasticDepth(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        return x * torch.empty(x.shape[0], 1, 1, 1).bernoulli_(0.8).div_(0.8)


class MBConvSE(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        wide = 3 * channels
        self.block = nn.Sequential(
            nn.Sequential(nn.Conv2d(channels, wide, 1), nn.BatchNorm2d(wide), nn.SiLU(True)),
            nn.Sequential(
                nn.Conv2d(wide, wide, 3, padding=1, groups=wide), nn.BatchNorm2d(wide),
                nn.SiLU(True),
            ),
            SqueezeExcitation(wide, 2),
            nn.Sequential(nn.Conv2d(wide, channels, 1), nn.BatchNorm2d(channels)),
        )  # fmt: skip
        self.stochastic_depth = StochasticDepth()

    def forward(self, x: Tensor) -> Tensor:
        result = self.stochastic_depth(self.block(x))
        result += x
        return result


def efficientnet_se() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, 2, 1), nn.SiLU(inplace=True), MBConvSE(4), MBConvSE(4),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.2), nn.Linear(4, 4),
    )  # fmt: skip


class ConvNeXtBlock(nn.Module):
    """Channels last inside, with a learned scale, as the original repository has it."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.dwconv = nn.Conv2d(channels, channels, 7, padding=3, groups=channels)
        self.norm = nn.LayerNorm(channels, eps=1e-6)
        self.pwconv1, self.act = nn.Linear(channels, 4 * channels), nn.GELU()
        self.pwconv2 = nn.Linear(4 * channels, channels)
        self.gamma = nn.Parameter(1e-2 * torch.ones(channels))

    def forward(self, x: Tensor) -> Tensor:
        h = self.dwconv(x).permute(0, 2, 3, 1)
        h = self.gamma * self.pwconv2(self.act(self.pwconv1(self.norm(h))))
        return x + h.permute(0, 3, 1, 2)


class LayerNorm2d(nn.LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        x = F.layer_norm(x.permute(0, 2, 3, 1), self.normalized_shape, self.weight, self.bias)
        return x.permute(0, 3, 1, 2)


class ConvNeXtStages(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        widths = (5, 7)
        stem = nn.Sequential(nn.Conv2d(3, 5, 2, 2), LayerNorm2d(5))
        down = nn.Sequential(LayerNorm2d(5), nn.Conv2d(5, 7, 2, 2))
        self.downsample_layers = nn.ModuleList([stem, down])
        self.stages = nn.ModuleList(
            nn.Sequential(*(ConvNeXtBlock(width) for _ in range(2))) for width in widths
        )
        self.norm, self.head = nn.LayerNorm(7), nn.Linear(7, 4)

    def forward(self, x: Tensor) -> Tensor:
        for downsample, stage in zip(self.downsample_layers, self.stages, strict=True):
            x = stage(downsample(x))
        return self.head(self.norm(x.mean([-2, -1])))


class ViTBlock(nn.Module):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.heads, self.qkv, self.proj = heads, nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))

    def attention(self, x: Tensor) -> Tensor:
        B, N, C = x.shape
        parts = self.qkv(x).reshape(B, N, 3, self.heads, C // self.heads).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(*parts.unbind(0))
        return self.proj(mixed.transpose(1, 2).reshape(B, N, C))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class ViT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patch_embed = nn.Conv2d(3, 8, 4, 4)
        self.cls_token = nn.Parameter(torch.randn(1, 1, 8))
        self.pos_embed = nn.Parameter(torch.randn(1, 17, 8))
        self.blocks = nn.Sequential(*(ViTBlock(8, 2) for _ in range(4)))
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch_embed(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls_token.expand(x.shape[0], -1, -1), x], 1) + self.pos_embed
        return self.head(self.norm(self.blocks(x))[:, 0])


class SwinBlock(nn.Module):
    """Attention within windows; every other block shifts them."""

    def __init__(self, dim: int, window: int, shift: int) -> None:
        super().__init__()
        self.window, self.shift = window, shift
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attn = nn.MultiheadAttention(dim, 2, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))

    def forward(self, x: Tensor) -> Tensor:  # [B, H, W, C]
        B, H, W, C = x.shape
        side = self.window
        h = self.norm1(x)
        h = torch.roll(h, (-self.shift, -self.shift), (1, 2))
        h = h.view(B, H // side, side, W // side, side, C).transpose(2, 3)
        windows = h.reshape(-1, side * side, C)
        windows, _ = self.attn(windows, windows, windows, need_weights=False)
        h = windows.view(B, H // side, W // side, side, side, C).transpose(2, 3)
        h = torch.roll(h.reshape(B, H, W, C), (self.shift, self.shift), (1, 2))
        x = x + h
        return x + self.mlp(self.norm2(x))


class SwinTransformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patch_embed = nn.Conv2d(3, 6, 2, 2)
        self.layers = nn.Sequential(*(SwinBlock(6, 4, 2 * (index % 2)) for index in range(4)))
        self.norm, self.head = nn.LayerNorm(6), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers(self.patch_embed(x).permute(0, 2, 3, 1))
        return self.head(self.norm(x).mean((1, 2)))


class MixerBlock(nn.Module):
    def __init__(self, tokens: int, dim: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.tokens = nn.Sequential(nn.Linear(tokens, 9), nn.GELU(), nn.Linear(9, tokens))
        self.channels = nn.Sequential(nn.Linear(dim, 10), nn.GELU(), nn.Linear(10, dim))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.tokens(self.norm1(x).transpose(1, 2)).transpose(1, 2)
        return x + self.channels(self.norm2(x))


class MlpMixer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 7, 4, 4)
        self.blocks = nn.ModuleList(MixerBlock(16, 7) for _ in range(3))
        self.norm, self.head = nn.LayerNorm(7), nn.Linear(7, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x).flatten(2).transpose(1, 2)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x).mean(1))


class DoubleConv(nn.Module):
    def __init__(self, inner: int, outer: int) -> None:
        super().__init__()
        self.double_conv = nn.Sequential(
            nn.Conv2d(inner, outer, 3, padding=1, bias=False), nn.BatchNorm2d(outer),
            nn.ReLU(inplace=True),
            nn.Conv2d(outer, outer, 3, padding=1, bias=False), nn.BatchNorm2d(outer),
            nn.ReLU(inplace=True),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return self.double_conv(x)


class UNet2d(nn.Module):
    """For masks: the well-known one with `inc`, `down1`, `up1` and `outc`."""

    def __init__(self) -> None:
        super().__init__()
        self.inc = DoubleConv(3, 4)
        self.down1 = nn.Sequential(nn.MaxPool2d(2), DoubleConv(4, 6))
        self.down2 = nn.Sequential(nn.MaxPool2d(2), DoubleConv(6, 8))
        self.up1, self.conv1 = nn.ConvTranspose2d(8, 6, 2, 2), DoubleConv(12, 6)
        self.up2, self.conv2 = nn.ConvTranspose2d(6, 4, 2, 2), DoubleConv(8, 4)
        self.outc = nn.Conv2d(4, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        x1 = self.inc(x)
        x2 = self.down1(x1)
        x3 = self.down2(x2)
        x = self.conv1(torch.cat([x2, self.up1(x3)], dim=1))
        x = self.conv2(torch.cat([x1, self.up2(x)], dim=1))
        return self.outc(x)


class AsppSegmenter(nn.Module):
    """A head for segmentation over dilated branches, upsampled to the image; returns a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Conv2d(3, 6, 3, 2, 1), nn.BatchNorm2d(6), nn.ReLU(True))
        self.branches = nn.ModuleList(nn.Conv2d(6, 4, 3, padding=d, dilation=d) for d in (1, 2, 4))
        self.project = nn.Sequential(nn.Conv2d(12, 5, 1), nn.BatchNorm2d(5), nn.ReLU(True))
        self.classifier, self.aux = nn.Conv2d(5, 3, 1), nn.Conv2d(6, 3, 1)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        features = self.backbone(x)
        h = self.project(torch.cat([branch(features) for branch in self.branches], 1))
        size = x.shape[-2:]
        return {
            "out": F.interpolate(self.classifier(h), size, mode="bilinear"),
            "aux": F.interpolate(self.aux(features), size, mode="bilinear"),
        }


@dataclass
class Detections:
    logits: Tensor
    boxes: Tensor


class Detector(nn.Module):
    """One-stage: shared towers run on every level of a pyramid; returns a dataclass."""

    def __init__(self) -> None:
        super().__init__()
        self.body1 = nn.Sequential(nn.Conv2d(3, 6, 3, 2, 1), nn.ReLU(inplace=True))
        self.body2 = nn.Sequential(nn.Conv2d(6, 6, 3, 2, 1), nn.ReLU(inplace=True))
        self.tower = nn.Sequential(nn.Conv2d(6, 6, 3, padding=1), nn.GroupNorm(2, 6), nn.ReLU())
        self.classes, self.boxes = nn.Conv2d(6, 3, 1), nn.Conv2d(6, 4, 1)

    def forward(self, x: Tensor) -> Detections:
        first = self.body1(x)
        levels = [self.tower(level) for level in (first, self.body2(first))]
        logits = [self.classes(level).flatten(2) for level in levels]
        boxes = [self.boxes(level).flatten(2).exp() for level in levels]
        return Detections(torch.cat(logits, 2).mT, torch.cat(boxes, 2).mT)


class CapsNet(nn.Module):
    """Capsules with three rounds of routing, done by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.primary = nn.Conv2d(3, 6, 5, 2), nn.Conv2d(6, 8, 3, 2)
        self.routes = nn.Parameter(0.1 * torch.randn(1, 8, 3, 4, 4))  # [1, in, out, d, D]

    def squash(self, x: Tensor) -> Tensor:
        norm = x.square().sum(-1, keepdim=True)
        return x * norm / (1 + norm) / (norm + 1e-6).sqrt()

    def forward(self, x: Tensor) -> Tensor:
        u = self.primary(F.relu(self.conv(x)))  # [B, 8, 2, 2]
        u = self.squash(u.flatten(2)).unsqueeze(2).unsqueeze(3)  # [B, in, 1, 1, d]
        votes = (u @ self.routes).squeeze(3)  # [B, in, out, D]
        logits = torch.zeros(votes.shape[:3])
        for _ in range(3):
            v = self.squash((logits.softmax(2).unsqueeze(-1) * votes).sum(1, keepdim=True))
            logits = logits + (votes * v).sum(-1)
        return v.squeeze(1).norm(dim=-1)


def discriminator() -> nn.Module:
    def layer(inner: int, outer: int) -> list[nn.Module]:
        conv = parametrizations.spectral_norm(nn.Conv2d(inner, outer, 4, 2, 1))
        return [conv, nn.LeakyReLU(0.2, inplace=True)]

    return nn.Sequential(*layer(3, 4), *layer(4, 6), nn.Flatten(), nn.Linear(96, 1))


def trained_for_quantisation() -> nn.Module:
    """Every layer has observers, which see weights and activations."""
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3, 2), nn.ReLU(), nn.Conv2d(4, 6, 3, 2), nn.ReLU(), nn.Flatten(),
        nn.Linear(54, 4),
    ).train()  # fmt: skip
    model.qconfig = quantization.get_default_qat_qconfig("fbgemm")
    with warnings.catch_warnings(action="ignore"):  # that this is to move to another package
        return quantization.prepare_qat(model)  # type: ignore[no-any-return]


class SpectralConv2d(nn.Module):
    """Of a Fourier neural operator: a complex weight on the lowest frequencies."""

    def __init__(self, channels: int, modes: int) -> None:
        super().__init__()
        self.modes = modes
        weight = torch.randn(channels, channels, modes, modes, dtype=torch.cfloat)
        self.weight = nn.Parameter(weight / channels)

    def forward(self, x: Tensor) -> Tensor:
        spectrum = torch.fft.rfft2(x)
        low = spectrum[:, :, : self.modes, : self.modes]
        mixed = torch.zeros_like(spectrum)
        mixed[:, :, : self.modes, : self.modes] = torch.einsum("bixy,ioxy->boxy", low, self.weight)
        return torch.fft.irfft2(mixed, s=x.shape[-2:])


class FourierOperator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lift, self.project = nn.Conv2d(3, 5, 1), nn.Conv2d(5, 1, 1)
        self.spectral = nn.ModuleList(SpectralConv2d(5, 3) for _ in range(3))
        self.local = nn.ModuleList(nn.Conv2d(5, 5, 1) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.lift(x)
        for spectral, local in zip(self.spectral, self.local, strict=True):
            x = F.gelu(spectral(x) + local(x))
        return self.project(x)


class VectorQuantizer(nn.Module):
    """The nearest code of a book, with the gradient passed straight through."""

    def __init__(self, codes: int, dim: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(codes, dim)

    def forward(self, z: Tensor) -> tuple[Tensor, Tensor, Tensor]:  # [B, C, H, W]
        flat = z.permute(0, 2, 3, 1)
        distances = torch.cdist(flat.reshape(-1, flat.shape[-1]), self.embedding.weight)
        codes = distances.argmin(1).view(flat.shape[:-1])
        q = self.embedding(codes).permute(0, 3, 1, 2)
        loss = F.mse_loss(q, z.detach()) + 0.25 * F.mse_loss(z, q.detach())
        return z + (q - z).detach(), loss, codes


class VqVae(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Conv2d(3, 6, 4, 2, 1), nn.ReLU(), nn.Conv2d(6, 4, 3, 1, 1))
        self.quantizer = VectorQuantizer(9, 4)
        self.decoder = nn.Sequential(
            nn.Conv2d(4, 6, 3, 1, 1), nn.ReLU(), nn.ConvTranspose2d(6, 3, 4, 2, 1)
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        q, loss, _ = self.quantizer(self.encoder(x))
        return self.decoder(q), loss


class ConvAutoencoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Conv2d(3, 4, 3, 2, 1), nn.ReLU(True), nn.Conv2d(4, 6, 3, 2, 1), nn.ReLU(True),
            nn.Flatten(), nn.Linear(96, 5),
        )  # fmt: skip
        self.decoder = nn.Sequential(
            nn.Linear(5, 96), nn.ReLU(True), nn.Unflatten(1, (6, 4, 4)),
            nn.ConvTranspose2d(6, 4, 4, 2, 1), nn.ReLU(True), nn.ConvTranspose2d(4, 3, 4, 2, 1),
            nn.Tanh(),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return self.decoder(self.encoder(x))


class ContrastiveTowers(nn.Module):
    """Images and captions meet in one space; returns the logits both ways."""

    def __init__(self) -> None:
        super().__init__()
        self.visual = nn.Sequential(
            nn.Conv2d(3, 6, 4, 4), nn.ReLU(), nn.Flatten(), nn.Linear(96, 7), nn.LayerNorm(7)
        )
        self.token_embedding = nn.Embedding(20, 8)
        layer = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True)
        self.transformer = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.text_projection = nn.Linear(8, 7)
        self.logit_scale = nn.Parameter(torch.ones(()))

    def forward(self, image: Tensor, text: Tensor) -> tuple[Tensor, Tensor]:
        left = F.normalize(self.visual(image), dim=-1)
        words = self.transformer(self.token_embedding(text))
        right = F.normalize(self.text_projection(words.mean(1)), dim=-1)
        logits = self.logit_scale.exp() * left @ right.t()
        return logits, logits.t()
