"""The corpus: the same bytes every time, split by file."""

import os
import platform
from pathlib import Path

import pytest
import torch

from esper.leyline.errors import DataError
from esper.tolaria.data.corpus import Corpus, corpus_splits, read_corpus


def write(folder: Path, files: dict[str, bytes]) -> Path:
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return folder


@pytest.fixture(scope="module")
def library() -> Corpus:
    return read_corpus()


@pytest.fixture
def letters(tmp_path: Path) -> Corpus:
    """Sixty files, each of one byte value of its own."""
    return read_corpus(write(tmp_path, {f"{n:02}.py": bytes([60 + n]) * 100 for n in range(60)}))


def test_the_standard_library_is_the_same_every_time(library: Corpus) -> None:
    again = read_corpus()
    assert again.sha256 == library.sha256
    assert platform.python_version() in library.title
    assert library.size > 4_000_000


def test_tests_tables_and_what_a_machine_writes_for_itself_are_left_out(library: Corpus) -> None:
    names = [name for name, _ in library.files]
    assert {"abc.py", "json/decoder.py", "unittest/mock.py"} <= set(names)
    folders = {part for name in names for part in name.split("/")[:-1]}
    assert not folders & {"test", "tests", "idlelib", "site-packages", "__pycache__", "encodings"}
    assert not [name for name in names if "sysconfigdata" in name or "sitecustomize" in name]
    assert names == sorted(names)


def test_files_are_read_by_path_without_empty_and_repeated_ones(tmp_path: Path) -> None:
    files = {"b/x.py": b"one\r\ntwo", "a.py": b"zero", "c.py": b"zero", "d.py": b"", "e.txt": b"no"}
    corpus = read_corpus(write(tmp_path, files))
    assert corpus.files == (("a.py", b"zero"), ("b/x.py", b"one\ntwo"))
    (tmp_path / "a.py").rename(tmp_path / "aa.py")
    assert read_corpus(tmp_path).sha256 != corpus.sha256


def test_no_file_is_in_two_splits(letters: Corpus) -> None:
    for seed in range(5):
        made = corpus_splits(letters, context=10, limit=10**9, seed=seed)
        seen = [set(part.inputs.unique().tolist()) - {0} for part in made.named().values()]
        assert len(set().union(*seen)) == sum(map(len, seen)) == 60


def test_the_test_files_are_the_same_for_every_seed(letters: Corpus) -> None:
    one, other = (corpus_splits(letters, context=10, limit=3000, seed=seed) for seed in (0, 1))
    assert torch.equal(one.test.inputs, other.test.inputs)
    assert one.fingerprint() != other.fingerprint()
    assert one.fingerprint() == corpus_splits(letters, context=10, limit=3000, seed=0).fingerprint()


def test_a_label_is_the_byte_after_its_input(library: Corpus) -> None:
    made = corpus_splits(library, context=16, limit=100_000, seed=0)
    for inputs, labels in made.named().values():
        assert torch.equal(inputs[:, 1:], labels[:, :-1])
        assert torch.equal(inputs[1:, 0], labels[:-1, -1])
    text = bytes(made.train.inputs.flatten().tolist())
    assert b"def " in text


@pytest.mark.parametrize("limit", [20_000, 500_000])
def test_the_limit_is_shared_among_the_splits(library: Corpus, limit: int) -> None:
    made = corpus_splits(library, context=50, limit=limit, seed=0)
    sizes = [part.inputs.numel() for part in made.named().values()]
    for size, share in zip(sizes, (0.8, 0.1, 0.1), strict=True):
        assert size == pytest.approx(share * limit, abs=60 + 0.002 * limit)


def test_the_hash_is_recorded_with_the_splits(library: Corpus) -> None:
    made = corpus_splits(library, context=16, limit=10_000, seed=0)
    assert library.sha256 in made.origin


def test_too_little_text_is_refused(tmp_path: Path) -> None:
    for files in ({}, {"a.py": b"x = 1\n"}):
        corpus = read_corpus(write(tmp_path, files))
        with pytest.raises(DataError, match="too little text for a test split"):
            corpus_splits(corpus, context=64, limit=10**6, seed=0)


def test_an_unreadable_file_is_named(tmp_path: Path) -> None:
    os.symlink(tmp_path / "nowhere", tmp_path / "gone.py")
    with pytest.raises(DataError, match=r"gone\.py cannot be read"):
        read_corpus(tmp_path)
