"""Read MNIST, Fashion-MNIST and CIFAR-10 from the files that they are published in.

Files are searched in this order: `$ESPER_DATA/NAME`, `data/NAME` below the current folder, and the
folder into which a package installs them. The first folder that holds one file of a data set must
hold all of its files.

Shapes: `M` images, `C` channels, `H` rows, `W` columns.
"""

import gzip
import math
import os
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from esper.archive.files import read_toml
from esper.datasets.handwritten import channel_statistics
from esper.datasets.splitting import partition
from esper.leyline.errors import DataError
from esper.tolaria.data.splits import Split, Splits

VARIABLE = "ESPER_DATA"
CLASSES = 10  # of every data set here


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
    """Divide images among splits and standardise them with the statistics of train.

    Args:
        images: Images, [M, C, H, W] uint8.
        labels: Labels, [M].
        shares: Share of the images for `validation`, and for `test` if it is not given.
        test: Published test images, uint8, and their labels.
        classes: Number of classes.
        seed: Random seed for the choice of validation images.
        origin: Description of the source of the data.
    """
    all_images = Split(images, labels.long())
    parts = {}
    for name, rows in partition(len(images), shares, seed).items():
        parts[name] = all_images.take(rows)
    if test is not None:
        parts["test"] = Split(test.inputs, test.labels.long())
    mean, deviation = channel_statistics(parts["train"].inputs)
    standardised = {
        name: Split((part.inputs.float() - mean) / deviation, part.labels)
        for name, part in parts.items()
    }
    return Splits(**standardised, classes=classes, origin=origin)


@dataclass(frozen=True, kw_only=True)
class ImageFiles:
    """A published data set: the folders that may hold its files, and the command that gets them."""

    title: str
    folder: str  # its name below $ESPER_DATA and data/
    packaged: Path | str = ""  # the folder into which a package installs the files
    command: str

    @property
    def advice(self) -> str:
        return f"get the files with: {self.command}"

    def find(self, files: Sequence[Sequence[str]]) -> list[Path]:
        """Find the files of the data set in the first folder that holds one of them.

        Args:
            files: For each file, the names that it may have.

        Returns:
            One path for each file.

        Raises:
            DataError: If no folder holds a file, or if the first that does lacks another one.
        """
        parents = (os.environ.get(VARIABLE), "data")
        folders = [Path(parent) / self.folder for parent in parents if parent]
        if self.packaged:
            folders.append(Path(self.packaged))
        for folder in folders:
            paths, missing = [], []
            for names in files:
                existing = [folder / name for name in names if (folder / name).is_file()]
                if existing:
                    paths.append(existing[0])
                else:
                    missing.append(names[0])
            if not missing:
                return paths
            if paths:
                raise DataError(
                    f"{self.title} is incomplete in {folder}",
                    given=f"no {', '.join(missing)}",
                    valid=f"{len(files)} files in one folder",
                    fix=self.advice,
                )
        raise DataError(
            f"{self.title} is not on this machine",
            given=f"no {files[0][0]} in {', '.join(map(str, folders))}",
            valid=f"{len(files)} files in one of these folders, or in ${VARIABLE}/{self.folder}",
            fix=self.advice,
        )

    def make_splits(
        self, folder: Path, parts: Iterable[Split], validation_share: float, seed: int
    ) -> Splits:
        """Make splits from the parts that were read from a folder.

        Args:
            folder: The folder that holds the files; named as the origin of the data.
            parts: Images [M, C, H, W] uint8 and labels [M]; the last part is the test split.
            validation_share: Share of the other parts that is used for validation.
            seed: Decides which images are used for validation.
        """
        *training_parts, test = parts
        images = torch.cat([part.inputs for part in training_parts])
        labels = torch.cat([part.labels for part in training_parts])
        return image_splits(
            images,
            labels,
            shares={"validation": validation_share},
            test=test,
            seed=seed,
            origin=f"{self.title} from {folder}",
        )

    def damaged(self, path: Path, problem: str, given: object, valid: object) -> DataError:
        """Return the error for a file with unexpected content."""
        advice = f"remove it and {self.advice}"
        return DataError(f"The file {path} {problem}", given=given, valid=valid, fix=advice)

    def check_labels(self, path: Path, labels: Tensor) -> None:
        """Refuse labels [M] that are no class."""
        if labels.max() >= CLASSES:
            valid = f"0 to {CLASSES - 1}"
            raise self.damaged(path, "holds impossible labels", int(labels.max()), valid)


_SETTINGS = read_toml(Path(__file__).with_name("image_files.toml"))
FASHION_MNIST = ImageFiles(**_SETTINGS["fashion_mnist"])
MNIST = ImageFiles(**_SETTINGS["mnist"])
CIFAR10 = ImageFiles(**_SETTINGS["cifar10"])


# --- MNIST and Fashion-MNIST: IDX files -----------------------------------------------------------

# Layout of an IDX file, plain or gzipped: two zero bytes, the type of the values (8: bytes), the
# number of axes, the size of each axis as a big-endian 32-bit number, then the values.
IDX_BYTES = 8  # the type code of unsigned bytes, the only type in these data sets
IDX_SIZE = 28  # rows and columns of an image
IDX_VALIDATION_SHARE = 1 / 6  # 10,000 of 60,000, as many as in the test split
IDX_MAX_BYTES = 1 << 31  # a header that announces more is damaged
IDX_FILES = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
)


def load_idx(source: ImageFiles, seed: int) -> Splits:
    """Load MNIST or Fashion-MNIST: images [M, 1, 28, 28].

    Args:
        source: The data set to load.
        seed: Decides which images are used for validation. The test split is the published one.
    """
    paths = source.find([(name, f"{name}.gz") for name in IDX_FILES])
    training_images, training_labels, test_images, test_labels = paths
    parts = [
        _read_labelled_images(source, training_images, training_labels),
        _read_labelled_images(source, test_images, test_labels),
    ]
    return source.make_splits(paths[0].parent, parts, IDX_VALIDATION_SHARE, seed)


def read_idx(source: ImageFiles, path: Path, axes: int) -> Tensor:
    """Read the bytes of an IDX file that has the given number of axes.

    Raises:
        DataError: If the file cannot be read or is damaged.
    """
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
            if len(header) < 4 * axes or not 0 < total <= IDX_MAX_BYTES:
                raise source.damaged(path, "has an impossible size", shape, "1 byte to 2 GiB")
            # Read one byte more than announced, to detect a file that is too long.
            values = bytearray(stream.read(total + 1))
    except (OSError, EOFError, zlib.error) as error:
        valid = "an IDX file, plain or gzipped"
        raise source.damaged(path, "cannot be read", error, valid) from error
    expected = f"{total} for {shape}"
    if len(values) < total:
        raise source.damaged(path, "ends early", f"{len(values)} bytes of values", expected)
    if len(values) > total:
        raise source.damaged(path, "is longer than it says", "more bytes of values", expected)
    return torch.frombuffer(values, dtype=torch.uint8).view(shape)


def _read_labelled_images(source: ImageFiles, images_path: Path, labels_path: Path) -> Split:
    """Read images [M, 1, 28, 28] uint8 and their labels [M]."""
    images = read_idx(source, images_path, axes=3)
    labels = read_idx(source, labels_path, axes=1)
    if images.shape[1:] != (IDX_SIZE, IDX_SIZE):
        valid = f"{IDX_SIZE} by {IDX_SIZE} points"
        raise source.damaged(images_path, "holds other images", list(images.shape[1:]), valid)
    if len(images) != len(labels):
        raise source.damaged(labels_path, "does not fit its images", len(labels), len(images))
    source.check_labels(labels_path, labels)
    return Split(images.unsqueeze(1), labels)


# --- CIFAR-10, binary version: six files of 10,000 records, each a label and an image -------------

CIFAR_FILES = (*(f"data_batch_{number}.bin" for number in range(1, 6)), "test_batch.bin")
CIFAR_SHAPE = (3, 32, 32)
CIFAR_RECORD = 1 + math.prod(CIFAR_SHAPE)  # bytes
CIFAR_RECORDS = 10_000  # in each file
CIFAR_VALIDATION_SHARE = 0.1


def load_cifar10(seed: int) -> Splits:
    """Load CIFAR-10: images [M, 3, 32, 32].

    Args:
        seed: Decides which images are used for validation. The test split is the published one.
    """
    paths = CIFAR10.find([(name,) for name in CIFAR_FILES])
    parts = [read_cifar(path) for path in paths]
    return CIFAR10.make_splits(paths[0].parent, parts, CIFAR_VALIDATION_SHARE, seed)


def read_cifar(path: Path) -> Split:
    """Read images [M, 3, 32, 32] uint8 and labels [M] of one file.

    Raises:
        DataError: If the file cannot be read or is damaged.
    """
    size = CIFAR_RECORD * CIFAR_RECORDS
    try:
        with path.open("rb") as stream:
            # Read one byte more than expected, to detect a file that is too long.
            content = bytearray(stream.read(size + 1))
    except OSError as error:
        raise CIFAR10.damaged(path, "cannot be read", error, "a file of bytes") from error
    if len(content) != size:
        length = str(len(content)) if len(content) < size else "more"
        raise CIFAR10.damaged(path, "has the wrong length", f"{length} bytes", f"{size} bytes")
    records = torch.frombuffer(content, dtype=torch.uint8).view(CIFAR_RECORDS, CIFAR_RECORD)
    labels = records[:, 0]
    CIFAR10.check_labels(path, labels)
    return Split(records[:, 1:].reshape(CIFAR_RECORDS, *CIFAR_SHAPE), labels)
