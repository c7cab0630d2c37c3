"""The shipped digits are complete, small and identical on every machine."""

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from esper import datasets
from esper.datasets.handwritten import DIGITS_FILE, channel_statistics, read_digits
from esper.leyline.errors import DataError
from esper.tolaria import find_task

SHIPPED = DIGITS_FILE.read_bytes()
MAX_BYTES = 60_000
FINGERPRINT = "18f2650a9db91cc7f2ade07397f554350c44612c856c059e04eb83ef82187a34"


def test_shipped_file_is_small() -> None:
    assert len(SHIPPED) <= MAX_BYTES


def test_digits_are_identical_on_every_machine() -> None:
    assert find_task("digits").load(0).fingerprint() == FINGERPRINT


def test_digits_equal_the_task_of_this_name() -> None:
    splits = find_task("digits").load(3)
    data = datasets.digits(seed=3)
    for pair, split in zip(data, splits.named().values(), strict=True):
        assert torch.equal(pair[0], split.inputs)
        assert torch.equal(pair[1], split.labels)


def test_every_sample_is_in_one_split() -> None:
    data = datasets.digits(3)
    assert [len(labels) for _, labels in data] == [1257, 270, 270]
    labels = torch.cat([labels for _, labels in data])
    assert torch.bincount(labels).tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]
    assert data.train[0].shape[1:] == (1, 8, 8)


def test_test_split_does_not_depend_on_the_seed() -> None:
    assert torch.equal(datasets.digits(0).test[1], datasets.digits(1).test[1])
    assert not torch.equal(datasets.digits(0).val[1], datasets.digits(1).val[1])


@given(position=st.integers(0, len(SHIPPED) - 1), bit=st.integers(0, 7), cut=st.booleans())
def test_damaged_file_is_refused(
    tmp_path_factory: pytest.TempPathFactory, position: int, bit: int, cut: bool
) -> None:
    damaged = bytearray(SHIPPED)
    damaged[position] ^= 1 << bit
    path = tmp_path_factory.mktemp("digits") / "digits.npz"
    path.write_bytes(damaged[:position] if cut else damaged)
    with pytest.raises(DataError, match="install Esper again") as caught:
        read_digits(path)
    assert str(path) in str(caught.value)


def test_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="No such file"):
        read_digits(tmp_path / "digits.npz")


def test_channel_statistics_match_float64() -> None:
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(256, (50, 2, 5, 4), generator=generator, dtype=torch.uint8)
    mean, deviation = channel_statistics(images)
    reference = images.double()
    torch.testing.assert_close(mean.flatten().double(), reference.mean((0, 2, 3)))
    expected = reference.std((0, 2, 3), correction=0)
    torch.testing.assert_close(deviation.flatten().double(), expected)


def test_constant_channel_has_deviation_one() -> None:
    mean, deviation = channel_statistics(torch.full((3, 1, 2, 2), 7, dtype=torch.uint8))
    assert (mean.item(), deviation.item()) == (7.0, 1.0)
