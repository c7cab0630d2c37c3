"""Image sets: digits of 8×8 points (shipped), MNIST, Fashion-MNIST and CIFAR-10 (from files).

Files are looked for in this order: `$ESPER_DATA/NAME`, `data/NAME` below the current folder, and
the place where a package puts them. The first folder that holds one of them has to hold all.

Shapes: `M` images, `C` channels, `H` rows, `W` columns.
"""

import gzip
import hashlib
import io
import math
import os
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from esper.archive.files import read_toml
from esper.leyline.errors import DataError
from esper.tolaria.data.splits import TEST_SHARE, VALIDATION_SHARE, Split, Splits, partition

VARIABLE = "ESPER_DATA"
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


@dataclass(frozen=True, kw_only=True)
class ImageFiles:
    """A published data set: where its files may lie, and the command that gets them."""

    title: str
    folder: str  # its name below $ESPER_DATA and data/
    packaged: Path | str = ""  # where its package puts the files, if there is one
    command: str

    @property
    def fix(self) -> str:
        return f"get the files with: {self.command}"

    def find(self, wanted: Sequence[Sequence[str]]) -> list[Path]:
        """One path for each of `wanted`, whose entries are the names that a file may have."""
        homes = (os.environ.get(VARIABLE), "data")
        folders = [Path(home) / self.folder for home in homes if home]
        folders += [Path(self.packaged)] if self.packaged else []
        for folder in folders:
            found = [
                [folder / name for name in names if (folder / name).is_file()] for names in wanted
            ]
            if all(found):
                return [paths[0] for paths in found]
            if any(found):
                pairs = zip(wanted, found, strict=True)
                missing = [names[0] for names, paths in pairs if not paths]
                raise DataError(
                    f"{self.title} is incomplete in {folder}",
                    given=f"no {', '.join(missing)}",
                    valid=f"{len(wanted)} files in one folder",
                    fix=self.fix,
                )
        raise DataError(
            f"{self.title} is not on this machine",
            given=f"no {wanted[0][0]} in {', '.join(map(str, folders))}",
            valid=f"{len(wanted)} files in one of these folders, or in ${VARIABLE}/{self.folder}",
            fix=self.fix,
        )

    def splits(self, paths: list[Path], read: Iterable[Split], share: float, seed: int) -> Splits:
        """Of what was read from these paths; the last part is the published test split."""
        *parts, test = read
        whole = map(torch.cat, zip(*parts, strict=True))
        shares, origin = {"validation": share}, f"{self.title} from {paths[0].parent}"
        return image_splits(*whole, shares=shares, test=test, seed=seed, origin=origin)

    def damaged(self, path: Path, wrong: str, given: object, valid: object) -> DataError:
        advice = f"remove it and {self.fix}"
        return DataError(f"The file {path} {wrong}", given=given, valid=valid, fix=advice)

    def require_labels(self, path: Path, labels: Tensor) -> None:
        if labels.max() >= CLASSES:
            valid = f"0 to {CLASSES - 1}"
            raise self.damaged(path, "holds impossible labels", int(labels.max()), valid)


_KNOWN = read_toml(Path(__file__).with_name("image_sets.toml"))
FASHION_MNIST, MNIST, CIFAR10 = (ImageFiles(**given) for given in _KNOWN.values())


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
            fix="install Esper again with pip install --force-reinstall --no-deps esper-ml",
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


# --- MNIST and Fashion-MNIST, in the IDX files that they are published in ------------------------

# Layout of such a file, plain or gzipped: two zero bytes, the type of the values (8: bytes), the
# number of axes, the size of each axis as a big-endian 32-bit number, then the values.
IDX_BYTES = 8  # the type code of unsigned bytes, the only one these data sets use
IDX_SIZE = 28  # rows and columns of an image
IDX_VALIDATION_SHARE = 1 / 6  # 10,000 of 60,000, as many as there are in the test split
IDX_LARGEST = 1 << 31  # bytes; a header that promises more is damaged
IDX_FILES = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
)


def idx_splits(source: ImageFiles, seed: int) -> Splits:
    """Images [M, 1, 28, 28]; `seed` decides what is validated on, the test split is published."""
    paths = source.find([(name, f"{name}.gz") for name in IDX_FILES])
    parts = [_labelled_images(source, *pair) for pair in (paths[:2], paths[2:])]
    return source.splits(paths, parts, IDX_VALIDATION_SHARE, seed)


def read_idx(source: ImageFiles, path: Path, axes: int) -> Tensor:
    """The bytes of an IDX file with that many axes."""
    magic = bytes((0, 0, IDX_BYTES, axes))
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as stream:
            start = stream.read(4)
            if start != magic:
                valid = f"{magic.hex(' ')} (bytes along {axes} axes)"
                raise source.damaged(path, "starts wrongly", start.hex(" ") or "nothing", valid)
            header = stream.read(4 * axes)
            shape = [int.from_bytes(header[at : at + 4], "big") for at in range(0, 4 * axes, 4)]
            total = math.prod(shape)
            if len(header) < 4 * axes or not 0 < total <= IDX_LARGEST:
                raise source.damaged(path, "has an impossible size", shape, "1 byte to 2 GiB")
            # One more than promised, to see what should not be there.
            values = bytearray(stream.read(total + 1))
    except (OSError, EOFError, zlib.error) as error:
        valid = "an IDX file, plain or gzipped"
        raise source.damaged(path, "cannot be read", error, valid) from error
    if len(values) != total:
        wrong = "ends early" if len(values) < total else "is longer than it says"
        given = len(values) if len(values) < total else "more"
        raise source.damaged(path, wrong, f"{given} bytes of values", f"{total} for {shape}")
    return torch.frombuffer(values, dtype=torch.uint8).view(shape)


def _labelled_images(source: ImageFiles, images_path: Path, labels_path: Path) -> Split:
    images, labels = read_idx(source, images_path, 3), read_idx(source, labels_path, 1)
    if images.shape[1:] != (IDX_SIZE, IDX_SIZE):
        valid = f"{IDX_SIZE} by {IDX_SIZE} points"
        raise source.damaged(images_path, "holds other images", list(images.shape[1:]), valid)
    if len(images) != len(labels):
        raise source.damaged(labels_path, "does not fit its images", len(labels), len(images))
    source.require_labels(labels_path, labels)
    return Split(images.unsqueeze(1), labels)


# --- CIFAR-10, in its binary version: six files of 10,000 records, each a label and an image -----

CIFAR_FILES = (*(f"data_batch_{number}.bin" for number in range(1, 6)), "test_batch.bin")
CIFAR_SHAPE = (3, 32, 32)
CIFAR_RECORD = 1 + math.prod(CIFAR_SHAPE)  # bytes
CIFAR_RECORDS = 10_000  # in each file
CIFAR_VALIDATION_SHARE = 0.1


def cifar10(seed: int) -> Splits:
    """Images [M, 3, 32, 32]; `seed` decides what is validated on, the test split is published."""
    paths = CIFAR10.find([(name,) for name in CIFAR_FILES])
    return CIFAR10.splits(paths, map(read_cifar, paths), CIFAR_VALIDATION_SHARE, seed)


def read_cifar(path: Path) -> Split:
    """Images and labels of one file, as bytes."""
    size = CIFAR_RECORD * CIFAR_RECORDS
    try:
        with path.open("rb") as stream:
            content = bytearray(stream.read(size + 1))
    except OSError as error:
        raise CIFAR10.damaged(path, "cannot be read", error, "a file of bytes") from error
    if len(content) != size:
        found = len(content) if len(content) < size else "more"
        raise CIFAR10.damaged(path, "has the wrong length", f"{found} bytes", f"{size} bytes")
    records = torch.frombuffer(content, dtype=torch.uint8).view(CIFAR_RECORDS, CIFAR_RECORD)
    labels = records[:, 0]
    CIFAR10.require_labels(path, labels)
    return Split(records[:, 1:].reshape(CIFAR_RECORDS, *CIFAR_SHAPE), labels)
