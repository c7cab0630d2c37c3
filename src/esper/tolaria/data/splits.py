"""Three disjoint splits of one data set, of tensors or of loaders, checked when they are made.

Shapes: `M` samples, `T` tokens of a sample.
"""

import hashlib
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from esper.datasets.splitting import TEST_SHARE, VALIDATION_SHARE, partition
from esper.leyline.errors import DataError
from esper.leyline.settings import COUNT, require
from esper.leyline.streams import derive_seed

READ_BATCH = 256  # samples of a data set that are read and joined at a time

Source = Dataset[object] | DataLoader[object]


class Split(NamedTuple):
    """Samples and what is to be said of them; unpacks into `inputs, labels`."""

    inputs: Tensor  # [M, ...] floating point, or [M, T] int64 tokens
    labels: Tensor  # [M] int64, or [M, T] int64 where every token has one

    @property
    def samples(self) -> int:
        return len(self.inputs)

    def take(self, chosen: Tensor) -> "Split":
        return Split(self.inputs[chosen], self.labels[chosen])

    def to(self, device: torch.device | str) -> "Split":
        return Split(self.inputs.to(device), self.labels.to(device))


@dataclass(frozen=True, kw_only=True, eq=False)
class Splits:
    """What a host learns from, what its controller is told, and what only reports show."""

    train: Split
    validation: Split
    test: Split
    classes: int
    origin: str  # where the data comes from, in words, with its hash where it has one

    def __post_init__(self) -> None:
        require("The number of classes", self.classes, COUNT, error=DataError)
        for name, split in self.named().items():
            _check_split(name, split, self.classes)
        for one, other in combinations(self.named().items(), 2):
            _check_pair(*one, *other)

    @classmethod
    def from_tensors(
        cls,
        inputs: Tensor,
        labels: Tensor,
        *,
        validation: float | Split = VALIDATION_SHARE,
        test: float | Split = TEST_SHARE,
        seed: int = 0,
        classes: int | None = None,
        origin: str = "tensors",
    ) -> Self:
        """Splits of your own tensors.

            splits = Splits.from_tensors(inputs, labels)

        `validation` and `test` are shares of the samples, drawn at random, or splits that you
        have already. `seed` decides what is validated on; the test split is the same for every
        seed, so that no seed trains on what another one tests. `classes` is one more than the
        largest label unless it is given.
        """
        given = Split(inputs, labels)
        _check_form("given", given)
        parts = {"validation": validation, "test": test}
        shares = {name: part for name, part in parts.items() if not isinstance(part, Split)}
        chosen = partition(given.samples, shares, seed)
        splits = {name: part for name, part in parts.items() if isinstance(part, Split)}
        splits |= {name: given.take(rows.to(inputs.device)) for name, rows in chosen.items()}
        if classes is None:
            for name, split in splits.items():
                _check_form(name, split)
            classes = 1 + max(int(split.labels.max()) for split in splits.values())
        return cls(**splits, classes=classes, origin=origin)

    def named(self) -> dict[str, Split]:
        return {"train": self.train, "validation": self.validation, "test": self.test}

    def to(self, device: torch.device | str) -> Self:
        """The same data on the device where it is trained on."""
        train, validation, test = (split.to(device) for split in self.named().values())
        return replace(self, train=train, validation=validation, test=test)

    def fingerprint(self) -> str:
        """The sha256 of every number in the data; equal data has equal fingerprints anywhere."""
        digest = hashlib.sha256(f"classes {self.classes}".encode())
        for name, split in self.named().items():
            for part, tensor in split._asdict().items():
                digest.update(f"{name} {part} {tensor.dtype} {list(tensor.shape)}".encode())
                flat = tensor.detach().cpu().contiguous().view(-1)
                digest.update(flat.view(torch.uint8).numpy().data)
        return digest.hexdigest()


# --- a data set or loader of one's own ------------------------------------------------------------


def splits_from(
    train: Source,
    *,
    validation: float | Source = VALIDATION_SHARE,
    test: float | Source = TEST_SHARE,
    seed: int = 0,
    **how: Any,
) -> Splits:
    """Splits of a `Dataset` or `DataLoader`; `validation` and `test` may be shares of `train`.

        splits = splits_from(dataset)                         # shares are held out at random
        splits = splits_from(train_loader, test=test_loader)  # validation is held out of `train`

    Items are pairs `(input, label)` of tensors, arrays or numbers. Each source is read once, as it
    stands, and is from then on only shuffled by Esper: transforms that draw at random are frozen.
    `how`: `classes` and `origin`, as for `Splits.from_tensors`.
    """
    given = {"validation": validation, "test": test}
    parts = {
        name: part if isinstance(part, float | int) else _read(name, part, seed)
        for name, part in given.items()
    }
    how = {"origin": type(train).__name__, **parts, "seed": seed, **how}
    return Splits.from_tensors(*_read("train", train, seed), **how)


def _read(name: str, source: Source, seed: int) -> Split:
    if not isinstance(source, Dataset | DataLoader):
        raise DataError(
            f"Cannot read {name} data",
            given=type(source).__name__,
            valid="a torch Dataset or DataLoader",
            fix="for tensors use Splits.from_tensors(inputs, labels)",
        )
    loader = source if isinstance(source, DataLoader) else DataLoader(source, READ_BATCH)
    # A loader that shuffles draws from torch's global stream: seeded here, it gives the same
    # order every time, and the caller's stream is left where it was.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive_seed(seed, "read", name))
        try:
            pairs = []
            for batch in loader:
                if not isinstance(batch, tuple | list) or len(batch) != 2:
                    size = f" of {len(batch)}" if isinstance(batch, tuple | list) else ""
                    raise DataError(
                        f"The {name} data does not hold pairs",
                        given=f"{type(batch).__name__}{size}",
                        valid="(input, label)",
                        fix="give the loader a collate_fn that returns that pair",
                    )
                pairs.append([torch.as_tensor(part).detach().cpu() for part in batch])
            inputs, labels = (torch.cat([pair[side] for pair in pairs]) for side in (0, 1))
        except (TypeError, ValueError, RuntimeError) as error:
            raise DataError(
                f"The {name} data cannot be joined into two tensors",
                given=str(error).splitlines()[0],
                valid="at least one pair (input, label), all of one shape and type",
            ) from error
    return Split(inputs, labels if labels.is_floating_point() else labels.long())


# --- what is refused ------------------------------------------------------------------------------


def _check_form(name: str, split: Split) -> None:
    """Refuse what is not a pair of tensors of samples and whole-number labels."""
    inputs, labels = split
    if not isinstance(inputs, Tensor) or not isinstance(labels, Tensor):
        raise DataError(
            f"The {name} split needs tensors",
            given=f"{type(inputs).__name__} and {type(labels).__name__}",
            fix="convert them with torch.as_tensor",
        )
    if inputs.ndim < 2 or not (inputs.is_floating_point() or inputs.dtype == torch.int64):
        raise DataError(
            f"The inputs of the {name} split have the wrong form",
            given=f"{inputs.dtype} {list(inputs.shape)}",
            valid="floating point [samples, ...], or int64 tokens [samples, tokens]",
            fix="convert bytes with .float() / 255",
        )
    is_sequence = inputs.ndim == 3 or not inputs.is_floating_point()
    shapes = [list(inputs.shape[:axes]) for axes in ((1, 2) if is_sequence else (1,))]
    if labels.dtype != torch.int64 or list(labels.shape) not in shapes:
        raise DataError(
            f"The labels of the {name} split have the wrong form",
            given=f"{labels.dtype} {list(labels.shape)} for inputs {list(inputs.shape)}",
            valid="int64 " + " or ".join(map(str, shapes)),
        )
    if not inputs.numel():
        valid = "at least one sample in each of train, validation and test"
        raise DataError(f"The {name} split is empty", given=list(inputs.shape), valid=valid)
    if labels.device != inputs.device:
        raise DataError(
            f"The {name} split lies on two devices",
            given=f"inputs on {inputs.device}, labels on {labels.device}",
            fix="move both to one device",
        )


def _check_split(name: str, split: Split, classes: int) -> None:
    _check_form(name, split)
    inputs, labels = split
    low, high = (int(bound) for bound in labels.aminmax())
    if low < 0 or high >= classes:
        given, valid = f"labels from {low} to {high}", f"0 to {classes - 1}"
        raise DataError(f"A label of the {name} split is out of range", given=given, valid=valid)
    if not inputs.is_floating_point():
        if (least := int(inputs.min())) < 0:
            what = f"A token of the {name} split is negative"
            raise DataError(what, given=least, valid="0 or more")
    elif not bool(inputs.isfinite().all()):
        bad = int((~inputs.isfinite()).flatten(1).any(1).sum())
        raise DataError(
            f"The inputs of the {name} split are not all finite",
            given=f"NaN or infinity in {bad} of {split.samples} samples",
            fix="remove or repair those samples",
        )


def _check_pair(first: str, a: Split, second: str, b: Split) -> None:
    """Refuse two splits that do not match, or that are the same samples."""
    for what, one, other in (("inputs", a.inputs, b.inputs), ("labels", a.labels, b.labels)):
        forms = [f"{each.dtype} {list(each.shape[1:])} on {each.device}" for each in (one, other)]
        if forms[0] != forms[1]:
            raise DataError(
                f"The {what} of {first} and {second} differ in form",
                given=f"{first} {forms[0]}, {second} {forms[1]}",
                valid="one shape, type and device for all splits",
            )
    # Two tensors without gaps that lie over each other have samples in common.
    gapless = a.inputs.is_contiguous() and b.inputs.is_contiguous()
    low, high = sorted((a.inputs, b.inputs), key=Tensor.data_ptr)
    shared = gapless and high.data_ptr() < low.data_ptr() + low.nbytes
    if shared or torch.equal(a.inputs, b.inputs):
        raise DataError(
            f"The splits {first} and {second} hold the same samples",
            given=f"{a.samples} and {b.samples} samples",
            valid="three disjoint splits",
            fix="split one set of tensors with Splits.from_tensors(inputs, labels)",
        )
