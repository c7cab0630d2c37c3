"""The shipped digits are whole, small and the same everywhere."""

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from esper.leyline.errors import DataError
from esper.tolaria.data.image_sets import DIGITS_FILE, digits

SHIPPED = DIGITS_FILE.read_bytes()
KILOBYTES = 60
PRINT = "18f2650a9db91cc7f2ade07397f554350c44612c856c059e04eb83ef82187a34"


def test_the_shipped_file_is_small() -> None:
    assert len(SHIPPED) <= KILOBYTES * 1000


def test_the_digits_are_the_same_on_every_machine() -> None:
    assert digits(0).fingerprint() == PRINT


def test_all_samples_are_in_one_split() -> None:
    made = digits(3)
    assert [part.samples for part in made.named().values()] == [1257, 270, 270]
    labels = torch.cat([part.labels for part in made.named().values()])
    assert torch.bincount(labels).tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]
    assert made.train.inputs.shape[1:] == (1, 8, 8)


def test_no_seed_trains_on_what_another_tests() -> None:
    assert torch.equal(digits(0).test.labels, digits(1).test.labels)
    assert not torch.equal(digits(0).validation.labels, digits(1).validation.labels)


@given(at=st.integers(0, len(SHIPPED) - 1), bit=st.integers(0, 7), cut=st.booleans())
def test_a_damaged_file_is_refused(
    tmp_path_factory: pytest.TempPathFactory, at: int, bit: int, cut: bool
) -> None:
    damaged = bytearray(SHIPPED)
    damaged[at] ^= 1 << bit
    path = tmp_path_factory.mktemp("digits") / "digits.npz"
    path.write_bytes(damaged[:at] if cut else damaged)
    with pytest.raises(DataError, match="install Esper again from its checkout") as caught:
        digits(0, path)
    assert str(path) in str(caught.value)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="No such file"):
        digits(0, tmp_path / "digits.npz")
