"""Images of bytes to standardised splits.

Shapes: `M` images, `C` channels, `H` rows, `W` columns.
"""

import torch
from torch import Tensor

from esper.tolaria.data.splits import Split, Splits, partition


def image_splits(
    images: Tensor,
    labels: Tensor,
    *,
    shares: dict[str, float],
    test: Split | None = None,
    classes: int,
    seed: int,
    origin: str,
) -> Splits:
    """Splits of `images` [M, C, H, W] uint8; each channel of train has mean 0 and variance 1.

    The test split is a share of the images, or is given, as bytes too.
    """
    whole = Split(images, labels.long())
    parts = {name: whole.take(rows) for name, rows in partition(len(images), shares, seed).items()}
    if test is not None:
        parts["test"] = Split(test.inputs, test.labels.long())
    centre, spread = channel_statistics(parts["train"].inputs)
    ready = {
        name: Split((part.inputs.float() - centre) / spread, part.labels)
        for name, part in parts.items()
    }
    return Splits(**ready, classes=classes, origin=origin)


def channel_statistics(images: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of each channel, [C, 1, 1] float32.

    Sums of whole numbers are exact, so every machine gets the same bits.
    """
    count = images.numel() // images.shape[1]
    levels = torch.arange(256, dtype=torch.int64)
    statistics = []
    for channel in images.unbind(1):
        often = torch.bincount(channel.flatten(), minlength=256)
        mean = (often * levels).sum().double() / count
        square = (often * levels * levels).sum().double() / count
        deviation = (square - mean * mean).clamp_min(0).sqrt()
        # A channel that never changes is centred and left at its size.
        statistics.append(torch.stack([mean, torch.where(deviation > 0, deviation, 1.0)]))
    mean, deviation = torch.stack(statistics, 1).float()[:, :, None, None]
    return mean, deviation
