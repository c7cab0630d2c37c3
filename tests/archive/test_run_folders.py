"""Folders of runs: which kind they hold, when one is fresh, and that one process writes."""

import fcntl
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from esper.archive import KeptFolder, RunKind, run_folders
from esper.archive.run_folders import LOCK
from esper.leyline.errors import DataError, EsperError


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


@pytest.fixture
def machines(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Says which machine this is; locks of the system reach no other one."""
    monkeypatch.setattr(run_folders, "_taken", lambda descriptor: True)
    monkeypatch.setattr(run_folders, "BEAT_SECONDS", 0.02)
    return lambda name: monkeypatch.setattr("socket.gethostname", lambda: name)


def test_a_lock_of_another_machine_counts_while_its_heart_beats(
    tmp_path: Path, machines: Callable[[str], None]
) -> None:
    first, second = Folder(tmp_path), Folder(tmp_path)
    machines("one")
    with first.locked():
        noted = (tmp_path / "lock").read_text(encoding="utf-8")
        machines("two")
        beating = threading.Thread(target=keep_beating, args=(tmp_path / "lock", noted))
        beating.start()
        with pytest.raises(EsperError, match=r"process .* on one"), second.locked():
            pass
        beating.join()
        with second.locked():  # it has stopped
            machines("one")
            with pytest.raises(EsperError, match="taken over"):
                first.require_held()
            machines("two")
            second.require_held()
    assert (tmp_path / "lock").read_text(encoding="utf-8") == ""


def keep_beating(lock: Path, noted: str) -> None:
    """As the other machine would."""
    for beat in range(8):
        time.sleep(0.01)
        lock.write_text(noted.replace(", 0", f", {beat + 1}"), encoding="utf-8")
