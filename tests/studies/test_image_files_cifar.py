"""CIFAR-10's files: what is whole is read, what is damaged is refused."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from esper.leyline.errors import DataError
from studies import image_files
from studies.image_files import (
    CIFAR10,
    CIFAR_FILES,
    CIFAR_RECORD,
    load_cifar10,
    read_cifar,
)
from tests.studies.image_file_writers import cifar_bytes, write_cifar

RECORDS = 4  # in a file, in place of 10,000
WHOLE = cifar_bytes(RECORDS)


@pytest.fixture(autouse=True, scope="module")
def _small_files() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(image_files, "CIFAR_RECORDS", RECORDS)
        yield


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ESPER_DATA", str(tmp_path))
    write_cifar(tmp_path / CIFAR10.folder, RECORDS)
    return tmp_path / CIFAR10.folder


def test_the_published_files_have_ten_thousand_records_of_3073_bytes() -> None:
    assert CIFAR_RECORD == 3073
    assert CIFAR_RECORD * 10_000 == 30_730_000


def test_all_six_files_are_read(folder: Path) -> None:
    splits = load_cifar10(0)
    assert [part.samples for part in splits.named().values()] == [18, 2, 4]
    assert splits.train.inputs.shape[1:] == (3, 32, 32)
    assert splits.fingerprint() == load_cifar10(0).fingerprint()
    assert str(folder) in splits.origin


def test_a_record_is_a_label_then_red_green_and_blue_rows(tmp_path: Path) -> None:
    content = bytearray(RECORDS * CIFAR_RECORD)
    content[CIFAR_RECORD] = 7  # the second label
    content[CIFAR_RECORD + 1 + 1024 + 32 * 3 + 5] = 99  # green, row 3, column 5
    (tmp_path / "batch.bin").write_bytes(content)
    images, labels = read_cifar(tmp_path / "batch.bin")
    assert labels.tolist() == [0, 7, 0, 0]
    assert images[1, 1, 3, 5] == 99
    assert images.sum(dtype=torch.int64) == 99


@settings(max_examples=60)
@given(
    length=st.one_of(
        st.integers(0, len(WHOLE) - 1), st.integers(0, RECORDS - 1).map(lambda n: n * CIFAR_RECORD)
    )
)
def test_a_truncated_file_is_refused(tmp_path_factory: pytest.TempPathFactory, length: int) -> None:
    path = tmp_path_factory.mktemp("cifar") / "data_batch_1.bin"
    path.write_bytes(WHOLE[:length])
    with pytest.raises(DataError, match=f"{length} bytes; valid: {len(WHOLE)} bytes") as caught:
        read_cifar(path)
    assert str(path) in str(caught.value)
    assert "cifar-10-binary.tar.gz" in str(caught.value)


@given(at=st.integers(0, len(WHOLE) - 1), value=st.integers(0, 255), extra=st.binary(max_size=3))
def test_only_data_errors_come_from_damage(
    tmp_path_factory: pytest.TempPathFactory, at: int, value: int, extra: bytes
) -> None:
    content = bytearray(WHOLE)
    content[at] = value
    path = tmp_path_factory.mktemp("cifar") / "data_batch_1.bin"
    path.write_bytes(bytes(content) + extra)
    wrong_label = at % CIFAR_RECORD == 0 and value > 9
    if extra or wrong_label:
        with pytest.raises(DataError):
            read_cifar(path)
    else:
        assert read_cifar(path).samples == RECORDS


def test_a_label_out_of_range_is_refused(tmp_path: Path) -> None:
    content = bytearray(WHOLE)
    content[CIFAR_RECORD * 2] = 10
    (tmp_path / "batch.bin").write_bytes(content)
    with pytest.raises(DataError, match="impossible labels; given: 10; valid: 0 to 9"):
        read_cifar(tmp_path / "batch.bin")


def test_missing_data_says_which_file_is_expected_where(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ESPER_DATA", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match=r"no data_batch_1\.bin in .*cifar-10-batches-bin"):
        load_cifar10(0)


def test_a_missing_file_is_named(folder: Path) -> None:
    (folder / CIFAR_FILES[-1]).unlink()
    with pytest.raises(DataError, match=r"no test_batch\.bin"):
        load_cifar10(0)


def test_an_unreadable_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="cannot be read"):
        read_cifar(tmp_path)
