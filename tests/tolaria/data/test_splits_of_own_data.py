"""A user's own data sets and loaders become splits."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    SubsetRandomSampler,
    TensorDataset,
)

from esper.leyline.errors import DataError
from esper.tolaria.data.splits import splits_from

INPUTS = torch.arange(60.0).view(30, 2)
LABELS = torch.arange(30) % 3


class Numbers(Dataset[tuple[np.ndarray, int]]):
    """Items as people write them: an array and a Python number."""

    def __len__(self) -> int:
        return 30

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        return np.array([2.0 * index, 2.0 * index + 1], dtype=np.float32), index % 3


class Stream(IterableDataset[tuple[Tensor, int]]):
    def __iter__(self) -> Iterator[tuple[Tensor, int]]:
        yield from zip(INPUTS, LABELS.tolist(), strict=True)


def test_data_sets_of_all_kinds_give_the_same_splits() -> None:
    sources = [TensorDataset(INPUTS, LABELS), Numbers(), Stream(), DataLoader(Numbers(), 7)]
    prints = {splits_from(source).fingerprint() for source in sources}
    assert len(prints) == 1


def test_inputs_keep_their_labels() -> None:
    made = splits_from(DataLoader(Numbers(), 7, shuffle=True))
    for inputs, labels in made.named().values():
        assert torch.equal((inputs[:, 0] / 2).long() % 3, labels)
    everything = torch.cat([part.inputs for part in made.named().values()])
    assert torch.equal(everything[:, 0].sort().values, INPUTS[:, 0])


def test_a_loader_that_shuffles_gives_the_same_splits_whatever_was_drawn_before() -> None:
    prints = set()
    for seed in range(3):
        torch.manual_seed(seed)
        before = torch.random.get_rng_state()
        prints.add(splits_from(DataLoader(Numbers(), 7, shuffle=True)).fingerprint())
        assert torch.equal(before, torch.random.get_rng_state())
    assert len(prints) == 1


def test_a_loader_with_a_sampler_is_read_as_it_stands() -> None:
    sampler = SubsetRandomSampler(range(10, 20))
    made = splits_from(DataLoader(Numbers(), 7, sampler=sampler))
    seen = torch.cat([part.inputs[:, 0] for part in made.named().values()])
    assert torch.equal(seen.sort().values, INPUTS[10:20, 0])


def test_an_own_test_set_is_used_whole() -> None:
    later = TensorDataset(INPUTS + 100, LABELS)
    made = splits_from(Numbers(), test=DataLoader(later, 8), validation=0.2)
    assert torch.equal(made.test.inputs, INPUTS + 100)
    assert (made.train.samples, made.validation.samples) == (24, 6)


@pytest.mark.parametrize(
    ("source", "words"),
    [
        (TensorDataset(INPUTS), "does not hold pairs; given: list of 1"),
        (TensorDataset(INPUTS[:0], LABELS[:0]), "cannot be joined"),
        (DataLoader(Numbers(), 7, collate_fn=lambda items: {"x": items}), "given: dict"),
        (DataLoader(Numbers(), 7, collate_fn=lambda items: ("a", "b")), "cannot be joined"),
        (TensorDataset(INPUTS, LABELS.float()), "labels of the given split"),
        (TensorDataset(INPUTS.byte(), LABELS), "inputs of the given split"),
        ([1, 2], "given: list; valid: a torch Dataset or DataLoader"),
    ],
)
def test_what_is_no_pair_of_tensors_is_refused(source: Dataset[object], words: str) -> None:
    with pytest.raises(DataError, match=words) as caught:
        splits_from(source)
    assert "\n" not in str(caught.value)
