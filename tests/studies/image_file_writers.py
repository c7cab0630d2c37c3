"""Write tiny IDX and CIFAR files for tests."""

import gzip
from pathlib import Path

import numpy as np

from studies.image_files import CIFAR_FILES, CIFAR_RECORD, CLASSES, IDX_FILES, IDX_SIZE

IDX_TRAIN, IDX_TEST = 60, 20


def idx_bytes(values: np.ndarray) -> bytes:
    sizes = b"".join(size.to_bytes(4, "big") for size in values.shape)
    return bytes((0, 0, 8, values.ndim)) + sizes + values.astype(np.uint8).tobytes()


def write_idx(folder: Path, *, zipped: bool, seed: int = 0) -> None:
    """The four files of an MNIST-like data set."""
    folder.mkdir(parents=True, exist_ok=True)
    source = np.random.default_rng(seed)
    for images, labels, count in (
        (*IDX_FILES[:2], IDX_TRAIN),
        (*IDX_FILES[2:], IDX_TEST),
    ):
        contents = {
            images: idx_bytes(source.integers(0, 256, (count, IDX_SIZE, IDX_SIZE))),
            labels: idx_bytes(np.arange(count) % CLASSES),
        }
        for name, content in contents.items():
            path = folder / (f"{name}.gz" if zipped else name)
            path.write_bytes(gzip.compress(content) if zipped else content)


def cifar_bytes(records: int, seed: int = 0) -> bytes:
    source = np.random.default_rng(seed)
    values = source.integers(0, 256, (records, CIFAR_RECORD), dtype=np.uint8)
    values[:, 0] = np.arange(records) % CLASSES
    return values.tobytes()


def write_cifar(folder: Path, records: int) -> None:
    """The six files of CIFAR-10's binary version, with that many records each."""
    folder.mkdir(parents=True, exist_ok=True)
    for seed, name in enumerate(CIFAR_FILES):
        (folder / name).write_bytes(cifar_bytes(records, seed))
