"""Handwritten digits of 8×8 pixels, shipped with Esper.

The data is the test part of E. Alpaydin and C. Kaynak, "Optical Recognition of Handwritten Digits",
UCI Machine Learning Repository (1998), CC BY 4.0, in the form of scikit-learn's `load_digits`:
1,797 images with intensities from 0 to 16. The file holds `images` [1797, 8, 8] and
`labels` [1797], uint8.

Shapes: `M` images, `C` channels, `H` rows, `W` columns.
"""

import hashlib
import io
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from esper.datasets.splitting import TEST_SHARE, VALIDATION_SHARE, DataSets, partition
from esper.leyline.errors import DataError

CLASSES = 10
DIGITS_FILE = Path(__file__).with_name("digits.npz")
DIGITS_SHA256 = "b2dab7b501728c22e9119ad76740b2e17c77a231e42d1e592380d90886f1a05e"


def digits(seed: int = 0) -> DataSets:
    """Load the handwritten digits: 1,257 images to train, 270 to validate and 270 to test.

    Args:
        seed: Random seed for the choice of validation images. The test images are always the same.

    Returns:
        `train, val, test`, each a pair of images [samples, 1, 8, 8] float32, standardised with the
        statistics of train, and labels [samples] int64 from 0 to 9.
    """
    images, labels = read_digits(DIGITS_FILE)
    shares = {"validation": VALIDATION_SHARE, "test": TEST_SHARE}
    rows = partition(len(images), shares, seed)
    mean, deviation = channel_statistics(images[rows["train"]])
    standardised = (images.float() - mean) / deviation
    train, val, test = (
        (standardised[rows[name]], labels[rows[name]]) for name in ("train", "validation", "test")
    )
    return DataSets(train, val, test)


def read_digits(file: Path) -> tuple[Tensor, Tensor]:
    """Read images [M, 1, 8, 8] uint8 and labels [M] int64; reject a damaged file."""
    try:
        content = file.read_bytes()
        checksum = f"sha256 {hashlib.sha256(content).hexdigest()}"
    except OSError as error:
        content, checksum = b"", str(error)
    expected_checksum = f"sha256 {DIGITS_SHA256}"
    if checksum != expected_checksum:
        raise DataError(
            f"The data file {file} is missing or damaged",
            given=checksum,
            valid=expected_checksum,
            fix="install Esper again from its checkout",
        )
    with np.load(io.BytesIO(content), allow_pickle=False) as arrays:
        images = torch.from_numpy(arrays["images"])
        labels = torch.from_numpy(arrays["labels"])
    return images.unsqueeze(1), labels.long()


def channel_statistics(images: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the mean and standard deviation of each channel of images [M, C, H, W] uint8.

    The sums are sums of integers, which are exact, so every machine gets identical bits. A constant
    channel gets deviation 1.

    Returns:
        Mean and deviation, [C, 1, 1] float32 each.
    """
    # Histogram of the 256 intensities, and its first three moments.
    histogram = torch.stack(
        [channel.flatten().bincount(minlength=256) for channel in images.unbind(1)]
    )
    intensities = torch.arange(256)
    count, total, total_square = (
        (histogram * intensities**power).sum(1).double() for power in range(3)
    )
    mean = total / count
    variance = (total_square / count - mean * mean).clamp_min(0)
    deviation = variance.sqrt()
    deviation = torch.where(deviation > 0, deviation, 1.0)
    return mean.float()[:, None, None], deviation.float()[:, None, None]
