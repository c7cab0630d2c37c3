"""`python -m studies`: what it says when all is well, and one sentence for what is wrong."""

import json
import runpy
from pathlib import Path
from typing import Any

import pytest

from tests.studies.made_up import (
    growth_description,
    growth_results,
    learning_description,
    learning_results,
    write_study,
)


def esper(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    """Run a command in this process; returns its exit status."""
    monkeypatch.setattr("sys.argv", ["python -m studies", *words])
    try:
        runpy.run_module("studies", run_name="__main__")
    except SystemExit as left:
        return int(left.code or 0)
    return 0


def make(kind: str, folder: Path) -> None:
    if kind == "c1":
        write_study(folder, growth_results(), growth_description())
    else:
        write_study(folder, learning_results(noise=1.5), learning_description())


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["c1", "c2"])
def test_a_study_tells_what_came_of_it_and_writes_its_figures(
    kind: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    asked: dict[str, object] = {}

    def run(folder: Path, size: str, device: str, **how: Any) -> bool:
        asked.update(size=size, device=device, seconds=how["seconds"])
        how["tell"]("episodes", 1, 1)
        make(kind, folder)
        return True

    place = "studies.report.running.run_c1" if kind == "c1" else "studies.learning_pays.run_c2"
    monkeypatch.setattr(place, run)
    words = ["--size", "cpu", "--out", str(tmp_path / "s"), "--json", str(tmp_path / "f.json")]
    assert esper(monkeypatch, kind, *words) == 0
    told = capsys.readouterr()
    assert "Confirmed: " in told.out
    assert "python -m studies report" in told.out
    assert "episodes: 1 of 1" in told.err
    assert asked == {"size": "cpu", "device": "cpu", "seconds": None}
    figures = json.loads((tmp_path / "f.json").read_text(encoding="utf-8"))
    assert any(name.startswith(f"{kind}_") for name in figures)


def test_a_study_that_ran_out_of_time_says_how_to_go_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr("studies.report.running.run_c1", lambda *_, **__: False)
    assert esper(monkeypatch, "c1", "--seconds", "5", "--out", str(tmp_path), "--quiet") == 0
    assert "The same command goes on" in capsys.readouterr().out


def test_a_report_is_written_where_one_says(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    make("c1", tmp_path / "c1")
    words = [str(tmp_path / "c1"), "--out", str(tmp_path / "docs")]
    assert esper(monkeypatch, "report", *words) == 0
    assert "evidence.md" in capsys.readouterr().out
    assert (tmp_path / "docs" / "evidence.json").is_file()


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["c1", "--size", "huge"], "Unknown size of a study"),
        (["c1", "--device", "tpu"], "Unknown device"),
        (["c1", "--seconds", "0"], "A study needs time"),
        (["c2", "--seconds", "-1"], "A study needs time"),
        (["report", "nowhere"], "no finished study"),
    ],
)
def test_wrong_words_get_one_sentence(
    words: list[str],
    sentence: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert esper(monkeypatch, *words) == 2
    told = capsys.readouterr().err
    assert told.startswith("esper: ")
    assert sentence in told
    assert "Traceback" not in told
