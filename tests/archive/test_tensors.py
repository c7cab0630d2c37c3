"""Archives: atomic, sealed, and refused with a sentence when anything is wrong."""

import json
import random
import time
from pathlib import Path

import pytest
import torch

from esper.archive import ArchiveError, read_archive, write_archive
from esper.archive.tensors import MANIFEST
from tests import programs

KIND, VERSION = "test", 3


def write(path: Path, number: float = 1.0) -> Path:
    tensors = {"a": torch.full((3, 2), number), "b": torch.arange(5), "empty": torch.empty(0)}
    return write_archive(
        path, kind=KIND, version=VERSION, tensors=tensors, notes={"number": number, "list": [1]}
    )


def read(path: Path):
    return read_archive(path, kind=KIND, version=VERSION)


def test_what_was_written_is_read_and_can_be_replaced(tmp_path: Path) -> None:
    for number in (1.0, 2.0):
        found = read(write(tmp_path / "archive", number))
        assert found.notes == {"number": number, "list": [1]}
        assert torch.equal(found.tensors["a"], torch.full((3, 2), number))
        assert found.tensors["b"].dtype == torch.int64
    assert len(list((tmp_path / "archive").iterdir())) == 2


def test_tensors_that_share_memory_or_are_not_contiguous_are_written(tmp_path: Path) -> None:
    base = torch.arange(6.0).view(2, 3)
    tensors = {"base": base, "turned": base.T, "row": base[0]}
    path = write_archive(tmp_path / "a", kind=KIND, version=VERSION, tensors=tensors, notes={})
    assert torch.equal(read(path).tensors["turned"], base.T)


@pytest.mark.parametrize(
    ("kind", "version"), [("other", VERSION), (KIND, VERSION - 1), (KIND, VERSION + 1)]
)
def test_another_kind_or_version_is_refused_with_both(
    tmp_path: Path, kind: str, version: int
) -> None:
    path = write(tmp_path / "archive")
    expected = f"given: {KIND} version {VERSION}; valid: {kind} version {version}"
    with pytest.raises(ArchiveError, match=expected):
        read_archive(path, kind=kind, version=version)


def test_what_is_no_archive_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ArchiveError, match="no such directory"):
        read(tmp_path / "nothing")
    with pytest.raises(ArchiveError, match=f"no {MANIFEST}"):
        read(tmp_path)
    path = write(tmp_path / "archive")
    next(path.glob("tensors-*")).unlink()
    with pytest.raises(ArchiveError, match="lacks its tensors"):
        read(path)
    manifest = path / MANIFEST
    for text in ("", "[]", "null", "{}", '{"format": 1}', "[" * 100_000):
        manifest.write_text(text)
        with pytest.raises(ArchiveError, match="damaged"):
            read(path)


def test_an_edited_manifest_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "archive")
    document = json.loads((path / MANIFEST).read_text())
    document["body"]["notes"]["number"] = 7
    (path / MANIFEST).write_text(json.dumps(document))
    with pytest.raises(ArchiveError, match="edited"):
        read(path)


def test_nothing_is_written_among_files_of_others(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(ArchiveError, match=r"thesis\.tex"):
        write(tmp_path)
    with pytest.raises(ArchiveError, match="other files"):
        write(tmp_path / "thesis.tex")
    assert [file.name for file in tmp_path.iterdir()] == ["thesis.tex"]


def test_random_damage_is_refused_or_changes_nothing(tmp_path: Path) -> None:
    path = write(tmp_path / "archive")
    whole = {file: file.read_bytes() for file in path.iterdir()}
    dice = random.Random(0)
    refused = 0
    for _ in range(300):
        file = dice.choice(list(whole))
        data = bytearray(whole[file])
        if dice.random() < 0.3:
            del data[dice.randrange(len(data)) :]
        else:
            data[dice.randrange(len(data))] ^= 1 << dice.randrange(8)
        file.write_bytes(data)
        try:
            found = read(path)
        except ArchiveError as error:
            refused += "\n" not in str(error)
        else:
            assert found.notes == {"number": 1.0, "list": [1]}
            assert torch.equal(found.tensors["a"], torch.ones(3, 2))
        file.write_bytes(whole[file])
    assert refused > 250


@pytest.mark.slow
def test_a_killed_writer_leaves_the_old_archive_or_the_new_one(tmp_path: Path) -> None:
    path = write(tmp_path / "archive", 0.0)
    program = (
        "import sys, torch\n"
        "from esper.archive import write_archive\n"
        "for n in range(10**6):\n"
        "    print(n, flush=True)\n"
        "    write_archive(sys.argv[1], kind='test', version=3, notes={'number': n},\n"
        "        tensors={'a': torch.full((300_000,), float(n))})\n"
    )
    dice = random.Random(0)
    for _ in range(8):
        writer = programs.start(program, path)
        writer.stdout.readline()
        time.sleep(dice.uniform(0.0, 0.1))
        writer.kill()
        writer.communicate()
        found = read(path)
        assert bool((found.tensors["a"] == found.notes["number"]).all())
