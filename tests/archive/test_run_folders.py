"""Folders of runs: which kind they hold, when one is fresh, and that one process writes."""

import fcntl
import os
from pathlib import Path

import pytest

from esper.archive import KeptFolder, RunKind, run_folders
from esper.archive.run_folders import LOCK
from esper.leyline.errors import DataError


class Folder(KeptFolder):
    kind, error = RunKind.TRAINING, DataError
    beginnings = ("facts.json",)


def test_a_folder_is_known_by_what_is_in_it(tmp_path: Path) -> None:
    assert not Folder(tmp_path).holds_run
    assert not Folder(tmp_path / "absent").holds_run
    for kind in RunKind:
        folder = tmp_path / kind.name
        folder.mkdir()
        (folder / kind).parent.mkdir(exist_ok=True)
        (folder / kind).touch()
        assert Folder(folder).holds_run is (kind is RunKind.TRAINING)


def test_a_run_is_made_only_where_nothing_is_or_where_one_was_never_made(tmp_path: Path) -> None:
    folder = Folder(tmp_path / "run")
    folder.require_fresh(fix="")
    with folder.locked():
        folder.write("facts.json", {"seed": 1})
    (folder.path / ".config.toml").touch()
    folder.require_fresh(fix="")
    (folder.path / "config.toml").touch()
    with pytest.raises(DataError, match=r"is not empty; name another"):
        folder.require_fresh(fix="name another")
    (tmp_path / "file").touch()
    assert not Folder(tmp_path / "file").is_fresh


def test_what_is_no_run_is_refused_with_what_it_lacks(tmp_path: Path) -> None:
    for path, given in ((tmp_path / "absent", "no such directory"), (tmp_path, "no config.toml")):
        with pytest.raises(DataError, match=f"is not a run.*{given}.*list them"):
            Folder(path).require_run("is not a run", fix="list them")
    (tmp_path / "config.toml").touch()
    Folder(tmp_path).require_run("is not a run", fix="list them")


def test_what_is_kept_is_read_back_or_refused_by_name(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    folder.write("facts.json", {"seed": 1})
    assert folder.read("facts.json") == {"seed": 1}
    assert {each.name for each in tmp_path.iterdir()} == {"facts.json"}
    for text in ("{", "[1]", "\ud800"):
        (tmp_path / "facts.json").write_bytes(text.encode(errors="surrogatepass"))
        with pytest.raises(DataError, match=r"facts\.json (cannot be read|is damaged)"):
            folder.read("facts.json")
    with pytest.raises(DataError, match="cannot be read"):
        folder.read("absent.json")


def test_a_folder_that_is_held_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("esper.archive.run_folders.LOCK_SECONDS", 0.1)
    folder = Folder(tmp_path / "run")
    with (
        folder.locked(),
        pytest.raises(DataError, match=r"trained by another process.*process \d+"),
        Folder(folder.path).locked(),
    ):
        pass
    with folder.locked() as descriptor:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        noted = (folder.path / LOCK).read_text(encoding="utf-8")
        assert noted.startswith(f"{os.getpid()} on ")
    assert (folder.path / LOCK).read_text(encoding="utf-8") == ""


def test_change_of_the_host_name_keeps_the_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Folder(tmp_path)
    monkeypatch.setattr("socket.gethostname", lambda: "one")
    with folder.locked():
        assert (tmp_path / LOCK).read_text(encoding="utf-8") == f"{os.getpid()} on one\n"
        monkeypatch.setattr("socket.gethostname", lambda: "two")
        folder.require_held()
    assert (tmp_path / LOCK).read_text(encoding="utf-8") == ""


def test_text_of_an_unlocked_lock_file_refuses_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A killed process leaves its text, and so does a process of another machine."""
    (tmp_path / LOCK).write_text("1 on another-machine, 7\n", encoding="utf-8")
    monkeypatch.setattr(run_folders, "LOCK_SECONDS", 0.0)  # the first attempt must succeed
    with Folder(tmp_path).locked():
        assert (tmp_path / LOCK).read_text(encoding="utf-8").startswith(f"{os.getpid()} on ")


def test_replaced_lock_file_is_refused(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    with folder.locked():
        folder.require_held()
        text = (tmp_path / LOCK).read_bytes()
        (tmp_path / LOCK).rename(tmp_path / "moved")
        with pytest.raises(DataError, match="no longer the folder"):
            folder.require_held()
        (tmp_path / LOCK).write_bytes(text)
        with pytest.raises(DataError, match=r"moved, deleted or replaced"):
            folder.require_held()
        (tmp_path / "moved").replace(tmp_path / LOCK)
        folder.require_held()
