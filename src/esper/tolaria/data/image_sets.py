"""Images as data: standardised splits, and the shipped handwritten digits of 8×8 points.

Shapes: `M` images, `C` channels, `H` rows, `W` columns.
"""

import hashlib
import io
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from esper.leyline.errors import DataError
from esper.tolaria.data.splits import TEST_SHARE, VALIDATION_SHARE, Split, Splits, partition

CLASSES = 10  # of every set here


def image_splits(
    images: Tensor,
    labels: Tensor,
    *,
    shares: dict[str, float],
    test: Split | None = None,
    classes: int = CLASSES,
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
    often = torch.stack([each.flatten().bincount(minlength=256) for each in images.unbind(1)])
    levels = torch.arange(256)
    count, mean, square = ((often * levels**power).sum(1).double() for power in range(3))
    mean, square = mean / count, square / count
    deviation = (square - mean * mean).clamp_min(0).sqrt()
    # A channel that never changes is centred and left at its size.
    deviation = torch.where(deviation > 0, deviation, 1.0)
    return mean.float()[:, None, None], deviation.float()[:, None, None]


# --- handwritten digits, shipped with Esper ------------------------------------------------------

# The test part of E. Alpaydin and C. Kaynak, "Optical Recognition of Handwritten Digits", UCI
# Machine Learning Repository (1998), CC BY 4.0, in the form of scikit-learn's `load_digits`:
# 1,797 images, ink from 0 to 16. The file holds `images` [1797, 8, 8] and `labels` [1797], uint8.
DIGITS_FILE = Path(__file__).with_name("digits.npz")
DIGITS_SHA256 = "b2dab7b501728c22e9119ad76740b2e17c77a231e42d1e592380d90886f1a05e"


def digits(seed: int, file: Path = DIGITS_FILE) -> Splits:
    """Images [M, 1, 8, 8]; the test split is the same for every seed."""
    try:
        content = file.read_bytes()
        found = f"sha256 {hashlib.sha256(content).hexdigest()}"
    except OSError as error:
        content, found = b"", str(error)
    if found != (valid := f"sha256 {DIGITS_SHA256}"):
        raise DataError(
            f"The shipped data {file} is missing or damaged",
            given=found,
            valid=valid,
            fix="install Esper again from its checkout",
        )
    with np.load(io.BytesIO(content), allow_pickle=False) as stored:
        images, labels = (torch.from_numpy(stored[name]) for name in ("images", "labels"))
    return image_splits(
        images.unsqueeze(1),
        labels,
        shares={"validation": VALIDATION_SHARE, "test": TEST_SHARE},
        seed=seed,
        origin=f"handwritten digits of the UCI repository, 8×8, sha256 {DIGITS_SHA256}",
    )
