"""What only looks runs nothing, and code that a folder names is run when a person said so."""

import io
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from esper.archive.tensors import sealed
from esper.show import theme
from esper.simic.training import RunFolder, train_run
from tests.karn.own_files import MODEL, table
from tests.programs import esper_here
from tests.simic.training.tiny import FACTS, TINY, tiny_run

BRIEF = ["--budget.epochs", "1", "--lr", "0.02", "--controller", "never", "--quiet"]


@pytest.fixture
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Nothing is known yet."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "state"


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A model that leaves a trace each time its file is run."""
    trace = f"\nfrom pathlib import Path\nPath({str(tmp_path / 'ran')!r}).touch()\n"
    (tmp_path / "evil_net.py").write_text(MODEL + trace, encoding="utf-8")
    np.savez(tmp_path / "table.npz", **table())
    return tmp_path


def grown(home: Path) -> Path:
    words = (f"{home}/evil_net.py:Slow", "--data", home / "table.npz", "--out", home / "run")
    told = esper_here("grow", *words, *BRIEF)
    assert told.returncode == 0, told.stderr
    forget(home)
    return home / "run"


def forget(home: Path) -> None:
    (home / "ran").unlink(missing_ok=True)
    sys.modules.pop("evil_net", None)


def asked(home: Path, answer: str, patch: pytest.MonkeyPatch, *words: object) -> tuple[Any, bool]:
    """What a command says when it is answered like this, and whether the model's file was run."""
    forget(home)
    patch.setattr(sys, "stdin", io.StringIO(answer))
    told = esper_here(*words)
    assert "Traceback" not in told.stderr
    return told, (home / "ran").exists()


def test_looking_at_a_run_of_ones_own_model_runs_none_of_it(
    home: Path, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(theme, "render", lambda draw, look: b"")  # painting takes seconds
    run = grown(home)
    looks: tuple[tuple[object, ...], ...] = (
        ("show", run), ("runs", home), ("report", run, "--out", home / "page"), ("resume", run),
        ("events", run, "--sql", "select 1"),
    )  # fmt: skip
    for words in looks:
        assert esper_here(*words).returncode == 0
    assert not (home / "ran").exists()


def test_code_that_a_folder_names_is_run_if_it_is_known_named_here_or_agreed_to(
    home: Path, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = grown(home)
    export = ("export", run, "--out", home / "written")
    told, ran = asked(home, "", monkeypatch, *export)
    assert ran, "the run was started with it"
    assert told.returncode == 0
    with (home / "evil_net.py").open("a") as file:
        file.write("# changed\n")
    for answer in ("", "no\n", "y\n"):
        told, ran = asked(home, answer, monkeypatch, *export)
        assert (told.returncode, ran) == (2, False)
        assert "evil_net.py" in told.stderr
    told, ran = asked(home, "", monkeypatch, *export, "--model", f"{home}/evil_net.py:Slow")
    assert (told.returncode, ran) == (0, True)
    told, ran = asked(home, "yes\n", monkeypatch, *export)
    assert (told.returncode, ran) == (0, True)
    told, ran = asked(home, "", monkeypatch, *export)
    assert (told.returncode, ran) == (0, True), "and is known from then on"


FAMILY = """
from pathlib import Path
Path({place!r}).touch()
"""


def test_the_code_of_a_suite_is_run_in_the_same_cases(
    home: Path, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Silence is no yes: nothing is run under --quiet."""
    (home / "evil_net.py").write_text(FAMILY.format(place=str(home / "ran")), encoding="utf-8")
    suite = FACTS["suite"] | {"code": [str(home / "evil_net.py")]}
    run = tiny_run(home / "run", rounds=1)
    facts = {"suite": suite}
    run.write("run.json", {**facts, "seal": sealed(facts)})
    for words in (("show", run.path), ("runs", home), ("resume", run.path, "--quiet")):
        _, ran = asked(home, "yes\n", monkeypatch, *words)
        assert not ran
    told, ran = asked(home, "no\n", monkeypatch, "resume", run.path)
    assert (told.returncode, ran) == (2, False)
    told, ran = asked(home, "yes\n", monkeypatch, "resume", run.path)
    assert (told.returncode, ran) == (0, True), told.stderr
    again = RunFolder.create(home / "again", TINY, facts)
    forget(home)
    assert again.suite.name == "tiny", "whoever made the run has named its code"
    assert (home / "ran").exists()


@pytest.mark.parametrize("key", ["suite", "data", "versions", "machine", "seal", "new"])
def test_a_fact_of_a_run_that_was_edited_is_refused(key: str, tmp_path: Path) -> None:
    facts = FACTS | {"data": {"a": "0"}, "versions": {"esper": "1"}, "machine": "mine"}
    run = RunFolder.create(tmp_path / "run", TINY, facts)
    assert run.facts == facts
    found = json.loads((run.path / "run.json").read_text())
    found[key] = "0"
    (run.path / "run.json").write_text(json.dumps(found))
    said = esper_here("resume", run.path, "--quiet").stderr
    assert "run.json is damaged or was edited" in said
    assert said.count("\n") == 1
    for wrong in (None, 3, "x", [1], {"a": 1}, {"code": 3}, {"code": [3]}):
        if key in ("suite", "data", "versions"):  # resealed by someone who knows how
            body = facts | {key: wrong}
            run.write("run.json", {**body, "seal": sealed(body)})
            told = esper_here("resume", run.path, "--quiet")
            assert told.returncode == 2
            assert "Traceback" not in told.stderr


def test_a_training_does_not_go_on_with_other_data(tmp_path: Path) -> None:
    run = tiny_run(tmp_path / "run", rounds=1)
    data = run.suite.fingerprints()
    other = RunFolder.create(tmp_path / "other", TINY, FACTS | {"data": data})
    assert train_run(run)
    (other.path / "checkpoints").rmdir()
    (run.path / "checkpoints").rename(other.path / "checkpoints")
    other.require_data()
    name = next(iter(data))
    body = FACTS | {"data": data | {name: "0" * 64}}
    other.write("run.json", {**body, "seal": sealed(body)})
    said = esper_here("resume", other.path, "--quiet").stderr
    assert f"have changed since the start of the run; given: {name}" in said
