"""Handwritten digits, 1,797 images of 8×8 points, shipped with Esper.

The test part of E. Alpaydin and C. Kaynak, "Optical Recognition of Handwritten Digits", UCI
Machine Learning Repository (1998), CC BY 4.0, in the form of scikit-learn's `load_digits`:
ink from 0 to 16. The file holds `images` [1797, 8, 8] and `labels` [1797], both uint8.
"""

import hashlib
import io
from pathlib import Path

import numpy as np
import torch

from esper.leyline.errors import DataError
from esper.tolaria.data.images import image_splits
from esper.tolaria.data.splits import TEST_SHARE, VALIDATION_SHARE, Splits

FILE = Path(__file__).with_name("digits.npz")
SHA256 = "b2dab7b501728c22e9119ad76740b2e17c77a231e42d1e592380d90886f1a05e"


def digits(seed: int, file: Path = FILE) -> Splits:
    """Images [M, 1, 8, 8]; the test split is the same for every seed."""
    try:
        content = file.read_bytes()
    except OSError as error:
        raise _damaged(file, str(error)) from error
    found = hashlib.sha256(content).hexdigest()
    if found != SHA256:
        raise _damaged(file, f"sha256 {found}")
    with np.load(io.BytesIO(content), allow_pickle=False) as stored:
        images, labels = (torch.from_numpy(stored[name]) for name in ("images", "labels"))
    return image_splits(
        images.unsqueeze(1),
        labels,
        shares={"validation": VALIDATION_SHARE, "test": TEST_SHARE},
        classes=10,
        seed=seed,
        origin=f"handwritten digits of the UCI repository, 8×8, sha256 {SHA256}",
    )


def _damaged(file: Path, found: str) -> DataError:
    return DataError(
        f"The shipped data {file} is missing or damaged",
        given=found,
        valid=f"sha256 {SHA256}",
        fix="install Esper again with pip install --force-reinstall --no-deps esper-ml",
    )
