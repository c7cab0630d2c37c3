"""CIFAR-10 in its binary version: six files of 10,000 records, each a label and 3×32×32 bytes."""

from pathlib import Path

import torch

from esper.leyline.errors import DataError
from esper.tolaria.data.folders import find_files
from esper.tolaria.data.images import image_splits
from esper.tolaria.data.splits import Split, Splits

FOLDER = "cifar-10-batches-bin"  # its name in the published archive
TRAIN_FILES = tuple(f"data_batch_{number}.bin" for number in range(1, 6))
TEST_FILE = "test_batch.bin"
IMAGE_SHAPE = (3, 32, 32)
RECORD = 1 + 3 * 32 * 32  # bytes
RECORDS = 10_000  # in each file
CLASSES = 10
VALIDATION_SHARE = 0.1
FIX = (
    "get the files with: mkdir -p data && "
    "curl https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz | tar xz -C data"
)


def cifar10(seed: int) -> Splits:
    """Images [M, 3, 32, 32]; `seed` decides what is validated on, the test split is published."""
    wanted = [(name,) for name in (*TRAIN_FILES, TEST_FILE)]
    paths = find_files("CIFAR-10", FOLDER, wanted, fix=FIX)
    parts = [read_batch(path) for path in paths]
    return image_splits(
        torch.cat([part.inputs for part in parts[:-1]]),
        torch.cat([part.labels for part in parts[:-1]]),
        shares={"validation": VALIDATION_SHARE},
        test=parts[-1],
        classes=CLASSES,
        seed=seed,
        origin=f"CIFAR-10 from {paths[0].parent}",
    )


def read_batch(path: Path) -> Split:
    """Images and labels of one file, as bytes."""
    size = RECORD * RECORDS
    try:
        with path.open("rb") as stream:
            content = bytearray(stream.read(size + 1))
    except OSError as error:
        raise _damaged(path, "cannot be read", error, "a file of bytes") from error
    if len(content) != size:
        found = len(content) if len(content) < size else "more"
        raise _damaged(path, "has the wrong length", f"{found} bytes", f"{size} bytes")
    records = torch.frombuffer(content, dtype=torch.uint8).view(RECORDS, RECORD)
    labels = records[:, 0]
    if labels.max() >= CLASSES:
        valid = f"0 to {CLASSES - 1}"
        raise _damaged(path, "holds impossible labels", int(labels.max()), valid)
    return Split(records[:, 1:].reshape(RECORDS, *IMAGE_SHAPE), labels)


def _damaged(path: Path, wrong: str, given: object, valid: str) -> DataError:
    advice = f"remove it and {FIX}"
    return DataError(f"The file {path} {wrong}", given=given, valid=valid, fix=advice)
