"""Splits refuse what is not three real, matching, disjoint sets of samples."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from esper.datasets.splitting import partition
from esper.leyline.errors import DataError
from esper.tolaria.data.splits import Split, Splits


def split(samples: int, seed: int, width: int = 3) -> Split:
    source = torch.Generator().manual_seed(seed)
    inputs = torch.randn(samples, width, generator=source)
    return Split(inputs, torch.randint(4, (samples,), generator=source))


def splits(**changes: Split) -> Splits:
    parts = {"train": split(6, 0), "validation": split(4, 1), "test": split(5, 2)}
    return Splits(**(parts | changes), classes=4, origin="drawn")


def test_a_split_unpacks_into_inputs_and_labels() -> None:
    inputs, labels = splits().validation
    assert inputs.shape == (4, 3)
    assert labels.shape == (4,)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda s: Split(s.inputs[:0], s.labels[:0]), "is empty"),
        (lambda s: Split(s.inputs, s.labels[:-1]), r"\[3\] for inputs \[4, 3\]"),
        (lambda s: Split(s.inputs, s.labels.int()), "torch.int32"),
        (lambda s: Split(s.inputs, s.labels.float()), "torch.float32"),
        (lambda s: Split(s.inputs[:, 0], s.labels), "wrong form"),
        (lambda s: Split(s.inputs.to(torch.uint8), s.labels), r"\.float\(\) / 255"),
        (lambda s: Split(s.inputs, s.labels - 9), "labels from -9 to"),
        (lambda s: Split(s.inputs, s.labels.clamp_min(3) + 1), "from 4 to 4; valid: 0 to 3"),
        (lambda s: Split(s.inputs.index_fill(0, torch.tensor(1), torch.nan), s.labels), "1 of 4"),
        (lambda s: Split(s.inputs / 0, s.labels), "4 of 4"),
        (lambda s: Split(s.inputs[:, :2], s.labels), "differ in form"),
        (lambda s: Split(s.inputs.double(), s.labels), "differ in form"),
        (lambda s: Split(s.inputs.tolist(), s.labels), "needs tensors"),
        (lambda s: Split(s.inputs.long() - 9, s.labels), "negative"),
    ],
)
def test_a_malformed_split_is_refused_in_one_sentence(
    change: Callable[[Split], Split], words: str
) -> None:
    with pytest.raises(DataError, match=words) as caught:
        splits(validation=change(split(4, 1)))
    assert "validation" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_same_samples_twice_are_no_two_splits() -> None:
    whole = split(20, 0)
    part = Split(whole.inputs[:5], whole.labels[:5])
    copied = Split(whole.inputs.clone(), whole.labels.clone())
    for same in (whole, part, copied):
        with pytest.raises(DataError, match="train and test hold the same samples"):
            splits(train=whole, test=same)


def test_neighbouring_views_of_one_tensor_are_accepted() -> None:
    whole = split(20, 0)
    parts = [Split(whole.inputs[at], whole.labels[at]) for at in (slice(0, 9), slice(9, 20))]
    assert splits(train=parts[0], test=parts[1]).train.samples == 9


def test_every_token_may_have_a_label() -> None:
    text = torch.arange(30).view(10, 3)
    parts = {
        name: Split(text[at] % 4, text[at] // 8)
        for name, at in (("train", slice(5)), ("validation", slice(5, 8)), ("test", slice(8, 10)))
    }
    assert splits(**parts).train.labels.shape == (5, 3)


def test_labels_of_features_are_one_for_each_sample() -> None:
    one_hot = torch.zeros(4, 3, dtype=torch.int64)
    with pytest.raises(DataError, match=r"valid: int64 \[4\]\."):
        splits(validation=Split(split(4, 1).inputs, one_hot))


def test_the_fingerprint_is_of_every_number() -> None:
    first = splits().fingerprint()
    assert first == splits().fingerprint() == splits().to("cpu").fingerprint()
    changed = split(4, 1)
    changed.inputs[3, 2] += 1e-6
    assert splits(validation=changed).fingerprint() != first
    relabelled = Split(split(5, 2).inputs, (split(5, 2).labels + 1) % 4)
    assert splits(test=relabelled).fingerprint() != first


def test_the_fingerprint_does_not_depend_on_the_layout_in_memory() -> None:
    turned = split(4, 1).inputs.t().contiguous().t()
    assert splits(validation=Split(turned, split(4, 1).labels)).fingerprint() == (
        splits().fingerprint()
    )


@given(
    samples=st.integers(10, 400),
    validation=st.floats(0.01, 0.4),
    test=st.floats(0.01, 0.4),
    seed=st.integers(0, 5),
)
def test_a_partition_has_every_sample_once(
    samples: int, validation: float, test: float, seed: int
) -> None:
    rows = partition(samples, {"validation": validation, "test": test}, seed)
    assert list(rows) == ["train", "validation", "test"]
    assert torch.equal(torch.cat(list(rows.values())).sort().values, torch.arange(samples))
    assert len(rows["test"]) == max(1, round(test * samples))


def test_the_seed_moves_validation_but_never_test() -> None:
    one, other = (partition(100, {"validation": 0.2, "test": 0.2}, seed) for seed in (0, 1))
    assert torch.equal(one["test"], other["test"])
    assert not torch.equal(one["validation"], other["validation"])


@pytest.mark.parametrize(
    "shares",
    [{"test": 0.0}, {"test": 1.0}, {"test": -0.1}, {"validation": 0.5, "test": 0.5}],
)
def test_impossible_shares_are_refused(shares: dict[str, float]) -> None:
    with pytest.raises(DataError, match="together less than 1"):
        partition(100, shares, 0)


def test_too_few_samples_are_refused() -> None:
    with pytest.raises(DataError, match="too few samples to split; given: 2"):
        partition(2, {"validation": 0.1, "test": 0.1}, 0)


def test_tensors_become_splits_in_one_line() -> None:
    inputs, labels = split(40, 0)
    made = Splits.from_tensors(inputs, labels)
    assert [part.samples for part in made.named().values()] == [28, 6, 6]
    assert made.classes == int(labels.max()) + 1
    again = Splits.from_tensors(inputs, labels, seed=0)
    assert made.fingerprint() == again.fingerprint()
    assert made.fingerprint() != Splits.from_tensors(inputs, labels, seed=1).fingerprint()


def test_a_test_split_that_exists_is_kept() -> None:
    test = split(5, 2)
    made = Splits.from_tensors(*split(40, 0), test=test, validation=0.5, classes=7)
    assert made.test is test
    assert (made.train.samples, made.validation.samples, made.classes) == (20, 20, 7)


def test_tensors_of_different_length_are_refused() -> None:
    inputs, labels = split(40, 0)
    with pytest.raises(DataError, match="given split"):
        Splits.from_tensors(inputs, labels[:-1])
