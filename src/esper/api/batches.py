"""What a run learns from, however it was given: a loader, a data set, or two tensors."""

import hashlib
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, TensorDataset

from esper.kasmina.isolation import randomness_kept
from esper.leyline.errors import DataError, require_equal
from esper.leyline.streams import derive_seed

Source = DataLoader[Any] | Dataset[Any] | tuple[Any, Any]
Pair = tuple[Any, Any]  # inputs (a tensor, a tuple or a dict of them) and targets

IGNORED = -100  # the label that torch's cross-entropy leaves out
_VALID = "a DataLoader, a Dataset, or a pair of tensors (inputs, targets)"


@dataclass(frozen=True)
class Batches:
    """Pairs of inputs and targets, in an order that follows from a number."""

    name: str  # train, val or test: for messages
    loader: DataLoader[Any]

    @classmethod
    def of(cls, name: str, source: object, batch_size: int, *, shuffle: bool) -> "Batches":
        """Loaders are taken as they are; of data sets and tensors batches are made."""
        if isinstance(source, DataLoader):
            return cls(name, source)
        given = type(source).__name__
        if isinstance(source, (tuple, list)):
            parts: list[Any] = [_as_tensor(each) for each in source]
            given += f" of {', '.join(type(part).__name__ for part in parts[:3]) or 'nothing'}"
            if len(parts) == 2 and all(isinstance(part, Tensor) for part in parts):
                if len(parts[0]) != len(parts[1]):
                    raise DataError(
                        f"The {name} data has not one target for each input",
                        given=f"{len(parts[0])} inputs, {len(parts[1])} targets",
                    )
                source = TensorDataset(*parts)
        if not isinstance(source, Dataset):
            held = "hold out part of train for it" if source is None and name == "val" else None
            raise DataError(f"Cannot read the {name} data", given=given, valid=_VALID, fix=held)
        if isinstance(source, IterableDataset):
            return cls(name, DataLoader(source, batch_size))
        if not hasattr(source, "__len__"):
            fix = "write its __len__, or make it an IterableDataset"
            raise DataError(f"The {name} data set has no length", given=given, fix=fix)
        samples = len(source)
        if samples == 0:
            raise DataError(f"The {name} data is empty", fix="give at least one sample")
        size, order = min(batch_size, samples), torch.Generator()
        # Batch normalisation cannot train on a last batch of one.
        drop_last = shuffle and samples > batch_size and samples % batch_size == 1
        if type(source) is TensorDataset:
            rows = Rows(samples, size, order if shuffle else None, drop_last=drop_last)
            return cls(name, DataLoader(source, None, sampler=rows, generator=order))
        return cls(
            name, DataLoader(source, size, shuffle=shuffle, generator=order, drop_last=drop_last)
        )

    def __call__(self, stream: int, device: torch.device) -> Iterator[Pair]:
        """One pass in the order of `stream`; call it where random states may change."""
        found: list[Sampler[Any]] = []  # all that have a say in the order
        waiting = [self.loader.generator, self.loader.sampler, self.loader.batch_sampler]
        while waiting:
            each = waiting.pop()
            if isinstance(each, torch.Generator):
                each.manual_seed(stream)
            elif isinstance(each, Sampler) and not any(each is one for one in found):
                found.append(each)
                waiting += vars(each).values()  # samplers of batches hold samplers in turn
                if hasattr(each, "set_epoch"):
                    each.set_epoch(stream % 2**31)
        empty = True
        for batch in self._taken():
            empty = False
            yield _moved(self._pair(batch), device)
        if empty:
            raise DataError(
                f"The {self.name} data is empty",
                fix="give at least one batch; one that is not full is left out by drop_last",
            )

    def _taken(self) -> Iterable[Any]:
        """Batches as they come: tensors give theirs without the detour of a loader."""
        loader = self.loader
        if not isinstance(loader.sampler, Rows):
            return loader
        # A loader draws a number for its workers first; the order is the one that comes after it.
        torch.empty((), dtype=torch.int64).random_(generator=loader.generator)
        return map(loader.dataset.__getitem__, loader.sampler)

    def spread(self, stream: int, device: torch.device, most: int) -> Iterator[Pair]:
        """About so many batches, evenly over all of them; the first ones, if nobody knows how many
        there are.
        """
        batches = self(stream, device)
        try:
            return islice(batches, 0, None, max(math.ceil(len(self.loader) / most), 1))
        except TypeError:
            return islice(batches, most)

    def first(self, seed: int, device: torch.device) -> Pair:
        """A batch to look at; random states are left as they were."""
        with randomness_kept(stream=derive_seed(seed, "first", self.name)):
            return next(self(derive_seed(seed, "first", self.name), device))

    def fingerprint(self, seed: int) -> dict[str, Any]:
        """What tells these data from others, without reading all of them."""
        found = hashlib.blake2b(digest_size=8)
        for leaf in _batched(self.first(seed, torch.device("cpu"))):
            found.update(f"{leaf.dtype} {list(leaf.shape)}".encode())
            found.update(leaf.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        try:
            batches: int | None = len(self.loader)
        except TypeError:  # a stream of unknown length
            batches = None
        return {"batches": batches, "first": found.hexdigest()}

    def _pair(self, batch: object) -> Pair:
        if not isinstance(batch, (tuple, list)) or len(batch) != 2:
            size = f" of {len(batch)}" if isinstance(batch, (tuple, list)) else ""
            raise DataError(
                f"The {self.name} data does not hold pairs",
                given=f"{type(batch).__name__}{size}",
                valid="(inputs, targets)",
                fix="give the loader a collate_fn that returns that pair",
            )
        inputs, targets = batch
        return (tuple(inputs) if isinstance(inputs, list) else inputs), targets


class Rows(Sampler[Tensor]):
    """Row numbers of whole batches, so that tensors give a batch at once and not row by row.

    They come in the order in which a loader that shuffles by the same generator would take them.
    """

    def __init__(
        self, samples: int, size: int, generator: torch.Generator | None, *, drop_last: bool
    ) -> None:
        self.samples, self.size, self.generator = samples, size, generator  # None: as they lie
        self.batches = samples // size if drop_last else -(-samples // size)

    def __len__(self) -> int:
        return self.batches

    def __iter__(self) -> Iterator[Tensor]:
        rows = torch.arange(self.samples)
        if self.generator is not None:
            rows = torch.randperm(self.samples, generator=self.generator)
        yield from rows.split(self.size)[: self.batches]


def _moved(pair: Pair, device: torch.device) -> Pair:
    if isinstance(pair[0], Tensor) and isinstance(pair[1], Tensor):  # nearly always; quicker
        return pair[0].to(device), pair[1].to(device)
    moved: Pair = tree_map_only(Tensor, lambda each: each.to(device), pair)
    return moved


def samples_of(pair: Pair) -> int:
    """How many can be taken out of this batch: 0 of graphs or of packed sequences."""
    sizes = {len(leaf) if leaf.dim() else 0 for leaf in _batched(pair)}
    return sizes.pop() if len(sizes) == 1 else 0


def first_of(pair: Pair, share: float) -> Pair:
    """A share of a batch's samples, one at least."""
    return part_of(pair, slice(max(round(share * samples_of(pair)), 1)))


def part_of(pair: Pair, rows: slice) -> Pair:
    """Some of a batch's samples."""
    part: Pair = tree_map_only(Tensor, lambda each: each[rows], pair)
    return part


def _batched(pair: Pair) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(pair) if isinstance(leaf, Tensor)]


class Data(dict[str, Batches]):
    """The parts of a run's data, as batches: train, val and perhaps test."""

    def __init__(self, train: object, val: object, test: object, batch_size: int) -> None:
        given = {"train": train, "val": val} | ({} if test is None else {"test": test})
        for name, source in given.items():
            self[name] = Batches.of(name, source, batch_size, shuffle=name == "train")

    def broken(self, classes: int | None) -> str | None:
        """The first sample with something that is not finite, or no class; None: there is none."""
        for name, part in self.items():
            data: Any = part.loader.dataset
            items = (data[n] for n in range(len(data))) if hasattr(data, "__getitem__") else data
            for place, item in enumerate(items):
                whole = isinstance(item, (tuple, list)) and len(item) == 2
                if not all(each.isfinite().all() for each in _tensors(item)):
                    return f"NaN or infinity in sample {place} of {name}"
                for each in _tensors(item[1]) if whole and classes is not None else ():
                    if ((each >= (classes or 0)) | (each < 0) & (each != IGNORED)).any():
                        label = f"label {each.tolist()} of {classes} classes"
                        return f"{label} in sample {place} of {name}"
        return None

    def fingerprints(self, seed: int) -> dict[str, Any]:
        return {name: part.fingerprint(seed) for name, part in self.items()}

    def require_same(self, saved: Mapping[str, Any], seed: int) -> None:
        """Refuse data that are not those of which these fingerprints were taken."""
        present, fix = self.fingerprints(seed), "load the same data, in the same order"
        for name, was in saved.items():
            what = f"The {name} data are not those of the run"
            require_equal(what, present.get(name, "none"), was, fix, DataError)


def _tensors(item: object) -> list[Tensor]:
    numbers = (Tensor, np.ndarray, np.generic, int, float)
    return [torch.as_tensor(each) for each in tree_leaves(item) if isinstance(each, numbers)]


def _as_tensor(value: object) -> object:
    """Numbers of numpy as a tensor, anything else as it is."""
    numbers = isinstance(value, np.ndarray) and value.dtype.kind in "biufc"
    return torch.from_numpy(value) if numbers else value
