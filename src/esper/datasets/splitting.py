"""Train, validation and test data, and how samples are divided among them."""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from esper.leyline.errors import DataError
from esper.leyline.streams import derive_seed

VALIDATION_SHARE = 0.15
TEST_SHARE = 0.15

LabelledData = tuple[Tensor, Tensor]  # inputs [samples, ...] and labels [samples]


class DataSets(NamedTuple):
    """Three disjoint data sets; unpacks into `train, val, test`."""

    train: LabelledData
    val: LabelledData
    test: LabelledData


def partition(samples: int, shares: Mapping[str, float], seed: int) -> dict[str, Tensor]:
    """Divide the rows of a data set among train and the named splits.

    Args:
        samples: Number of rows.
        shares: Share of the rows for `validation`, `test` or both. Train gets the rest.
        seed: Random seed for the choice of validation rows. The test rows do not depend on it, so
            that no seed trains on samples that another seed tests.

    Returns:
        Sorted, disjoint row numbers of `train` and of each split in `shares`.
    """
    if not all(0 < share < 1 for share in shares.values()) or sum(shares.values()) >= 1:
        raise DataError(
            "Impossible shares of the samples",
            given=", ".join(f"{name} {share}" for name, share in shares.items()),
            valid="each more than 0, and together less than 1",
        )
    counts = {name: max(1, round(share * samples)) for name, share in shares.items()}
    if sum(counts.values()) >= samples:
        raise DataError(
            "There are too few samples to split",
            given=samples,
            valid=f"at least {len(counts) + 1}, and some left to train on after "
            + ", ".join(f"{count} for {name}" for name, count in counts.items()),
        )
    test_order = torch.Generator().manual_seed(derive_seed("test split", samples))
    validation_order = torch.Generator().manual_seed(derive_seed(seed, "validation split"))
    rows = {}
    remaining = torch.arange(samples)
    for name, generator in (("test", test_order), ("validation", validation_order)):
        shuffled = remaining[torch.randperm(len(remaining), generator=generator)]
        count = counts.get(name, 0)
        rows[name] = shuffled[:count].sort().values
        remaining = shuffled[count:].sort().values
    return {"train": remaining, **{name: rows[name] for name in shares}}
