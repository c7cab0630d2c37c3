"""The order of batches follows from a number, wherever a loader keeps its random numbers."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    RandomSampler,
    Sampler,
    TensorDataset,
    WeightedRandomSampler,
)

from esper.api.batches import Batches

ROWS = TensorDataset(torch.arange(24.0), torch.arange(24))
CPU = torch.device("cpu")


class Buckets(Sampler[list[int]]):
    """Batches of one's own, with random numbers under a name of one's own."""

    def __init__(self) -> None:
        self.dice = torch.Generator().manual_seed(8)
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[list[int]]:
        start = int(torch.randint(12, (), generator=self.dice))
        yield [start, (start + self.epoch) % 24]

    def __len__(self) -> int:
        return 1


def drawn() -> torch.Generator:
    return torch.Generator().manual_seed(5)


def in_batches(sampler: Sampler[int]) -> DataLoader[Any]:
    return DataLoader(ROWS, batch_sampler=BatchSampler(sampler, 8, drop_last=False))


LOADERS: dict[str, Callable[[], Dataset[Any] | DataLoader[Any]]] = {
    "data set": lambda: ROWS,
    "shuffled": lambda: DataLoader(ROWS, 8, shuffle=True),
    "generator": lambda: DataLoader(ROWS, 8, shuffle=True, generator=drawn()),
    "sampler": lambda: DataLoader(ROWS, 8, sampler=RandomSampler(ROWS, generator=drawn())),
    "sampler of batches": lambda: in_batches(RandomSampler(ROWS, generator=drawn())),
    "weights": lambda: in_batches(WeightedRandomSampler([1.0] * 24, 24, generator=drawn())),
    "own": lambda: DataLoader(ROWS, batch_sampler=Buckets()),
}


@pytest.mark.parametrize("kind", LOADERS)
def test_the_order_follows_from_the_stream_and_not_from_what_was_drawn_before(kind: str) -> None:
    batches = Batches.of("train", LOADERS[kind](), 8, shuffle=True)

    def order(stream: int) -> list[int]:
        torch.manual_seed(stream)  # as a run does
        return torch.cat([targets for _, targets in batches(stream, CPU)]).tolist()

    first = order(1)
    assert order(2) != first
    assert order(1) == first
    seen = batches.fingerprint(0)
    order(3)
    assert batches.fingerprint(0) == seen
    assert Batches.of("train", LOADERS[kind](), 8, shuffle=True).fingerprint(0) == seen


@pytest.mark.parametrize("size", [1, 5, 23, 24, 50])
@pytest.mark.parametrize("shuffle", [True, False])
def test_tensors_come_batch_by_batch_in_the_order_of_a_loader(size: int, shuffle: bool) -> None:
    class Slow(Dataset[Any]):  # taken row by row, as of any data set that is not of tensors
        def __len__(self) -> int:
            return len(ROWS)

        def __getitem__(self, row: int) -> Any:
            return ROWS[row]

    kinds = [Batches.of("train", each, size, shuffle=shuffle) for each in (ROWS, Slow())]
    quick, slow = ([y.tolist() for _, y in each(11, CPU)] for each in kinds)
    assert quick == slow
    assert len(kinds[0].loader) == len(quick)
    assert kinds[0].fingerprint(3) == kinds[1].fingerprint(3)
    x, _ = next(kinds[0](11, CPU))
    x.zero_()  # a model may do that; the data stay
    assert ROWS.tensors[0].sum() == 276
