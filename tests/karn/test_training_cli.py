"""Training on the command line: runs, questions about them, and wrong words."""

import json
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from esper import __version__ as esper_version
from esper.karn.train_commands import best_scores, describe_missing_telemetry, figures_of
from esper.show.run_facts import read_facts
from esper.show.training_page import page
from esper.simic.training import RunFolder, read_config
from tests.programs import ENVIRONMENT, esper, esper_here
from tests.simic.training.tiny import (
    BATCHES,
    ENVS,
    HORIZON,
    ROUNDS,
    TINY,
    digest,
    tiny_files,
    tiny_run,
)

PACKAGES = ("torch", "numpy", "sqlite3", "matplotlib", "safetensors")


@pytest.fixture(autouse=True, scope="module")
def _short_epochs() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("esper.garden.episodes.GARDEN_BATCHES", BATCHES)
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def run(folder: Path) -> RunFolder:
    """A run of the settings in a file, less the rounds that an option gives."""
    file = tiny_files(folder)
    told = esper_here(
        "train", "demo", "--file", file, "--rounds", "2", "--out", folder / "first",
        "--json", folder / "figures.json",
    )  # fmt: skip
    assert told.returncode == 0, told.stderr
    assert "Tamiyo scores" in told.stdout
    assert "round 2/2" in told.stdout
    return RunFolder.open(folder / "first")


def refused(words: Sequence[str | Path]) -> str:
    """What is said on wrong words: one line."""
    told = esper_here(*words)
    assert told.returncode == 2, told
    assert told.stdout == ""
    (line,) = told.stderr.strip().splitlines()
    assert line.startswith("esper: ")
    return line


def test_options_count_more_than_the_file_and_the_file_more_than_the_preset(
    run: RunFolder, folder: Path
) -> None:
    config = run.config
    assert config.rounds == 2, "an option"
    assert (config.envs, config.horizon, config.ppo) == (ENVS, HORIZON, TINY.ppo), "the file"
    assert read_config(folder / "settings.toml").rounds == ROUNDS
    versions = run.facts["versions"]
    assert {"esper", "python", "torch", "numpy", "safetensors"} <= versions.keys()
    assert set(run.facts["data"]) == {"fixed × 200", "xor × 200"}


def test_a_file_for_several_processes_does_not_trip_over_presets_that_were_not_asked_for(
    tmp_path: Path,
) -> None:
    file = tiny_files(tmp_path, processes=2)
    assert "processes" not in refused(
        ["train", "demo", "--file", file, "--evaluation.baselines", "nobody"]
    ), "it is the baseline that is wrong"


def test_final_figures_are_one_flat_object(run: RunFolder, folder: Path) -> None:
    figures = json.loads((folder / "figures.json").read_text(encoding="utf-8"))
    assert figures["rounds"] == 2
    assert {"tamiyo.score", "tamiyo.score_lo", "tamiyo.score_hi", "random.score"} <= figures.keys()
    assert all(isinstance(value, float | int) for value in figures.values())


def test_runs_are_listed(run: RunFolder, folder: Path) -> None:
    broken = folder / "broken"
    broken.mkdir(exist_ok=True)
    (broken / "config.toml").write_text("rounds = 'x'", encoding="utf-8")
    told = esper_here("runs", folder)
    assert told.returncode == 0
    listed = told.stdout.replace("\n", "")
    assert "2 of 2" in listed
    assert "unreadable" in listed, "one that is broken does not hide the others"


def test_a_run_is_shown(run: RunFolder) -> None:
    told = esper_here("show", run.path)
    assert told.returncode == 0
    assert "2 of 2 rounds" in told.stdout.replace("\n", " ")
    for words in ("tamiyo", "random", "policy_loss", "No anomalies."):
        assert words in told.stdout


def test_telemetry_can_be_asked_and_not_changed(run: RunFolder) -> None:
    before = digest(run)
    told = esper_here(
        "events", run.path, "--sql", "select count(*) as n, '[b]' as x from decisions"
    )
    assert told.returncode == 0
    assert str(2 * HORIZON * ENVS) in told.stdout
    assert "[b]" in told.stdout, "what looks like markup is text"
    for sql in ("delete from decisions", "drop table steps", "update events set round = 9"):
        assert "only read" in refused(["events", run.path, "--sql", sql])
    assert "SQLite does not accept" in refused(["events", run.path, "--sql", "selct 1"])
    assert digest(run) == before


def test_telemetry_can_be_exported(run: RunFolder, tmp_path: Path) -> None:
    file = tmp_path / "events.jsonl"
    told = esper_here("events", run.path, "--export", file)
    assert told.returncode == 0
    lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    assert told.stdout.startswith(f"{len(lines)} events")
    decisions = [line for line in lines if line["type"] == "decisions"]
    assert len(decisions) == 2 * HORIZON * ENVS


def test_a_finished_run_is_not_resumed(run: RunFolder, tmp_path: Path) -> None:
    before = digest(run)
    told = esper_here("resume", run.path, "--json", tmp_path / "figures.json")
    assert told.returncode == 0
    assert "is finished: 2 rounds" in told.stdout
    assert json.loads((tmp_path / "figures.json").read_text(encoding="utf-8"))["rounds"] == 2
    assert digest(run) == before


def test_run_of_other_package_version_resumes_with_notice(
    run: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unfinished = tmp_path / "unfinished"
    shutil.copytree(run.path, unfinished)
    config_file = unfinished / "config.toml"
    config = config_file.read_text(encoding="utf-8")
    config_file.write_text(config.replace("rounds = 2", "rounds = 3"), encoding="utf-8")
    monkeypatch.setattr("esper.api.run_records.__version__", "99.0")
    resumed = esper_here("resume", unfinished, "--quiet")
    assert resumed.returncode == 0, resumed.stderr
    assert f"Versions have changed (esper {esper_version} -> 99.0)" in resumed.stderr
    assert RunFolder.open(unfinished).rounds()[-1] == 3


def test_a_run_that_goes_on_can_be_watched(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    watched: list[Path] = []
    monkeypatch.setattr("esper.karn.train_commands.start_watching", watched.append)
    monkeypatch.setattr("esper.karn.train_commands._train", lambda run, command, processes: None)
    monkeypatch.setattr(RunFolder, "newest", lambda run: None)
    assert esper_here("resume", run.path, "--watch").returncode == 0
    assert watched == [run.path]


def test_a_trained_run_is_a_controller_to_evaluate(run: RunFolder, folder: Path) -> None:
    told = esper_here(
        "evaluate", "--controllers", "never", run.path, "--suite", folder / "tiny.toml",
        "--seeds", "1", "--json", folder / "evaluation.json", "--quiet",
    )  # fmt: skip
    assert told.returncode == 0, told.stderr
    figures = json.loads((folder / "evaluation.json").read_text(encoding="utf-8"))
    assert figures["never.score"] == 0.0
    assert "tamiyo(first).score" in figures


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["resume", "nowhere"], "nowhere is not a run; given: no such directory"),
        (["show", "."], "is not a run; given: no config.toml"),
        (["events", "nowhere"], "is not a run"),
        (["runs", "nowhere"], "There are no runs in nowhere"),
        (["report", "nowhere"], "is not a run"),
        (["train", "demo", "--file", "nowhere.toml"], "no such file of settings"),
        (["train", "demo", "--suite", "gardn"], "did you mean 'garden'?"),
        (["train", "demo", "--evaluation.baselines", "randm"], "did you mean 'random'?"),
        (["train", "demo", "--reward.mode", "shapd"], "did you mean 'shaped'?"),
        (["train", "demo", "--envs", "3"], "a multiple of 2"),
        (["train", "demo", "--json", "nowhere/x.json"], "nowhere/x.json cannot be written"),
        (["train", "demo", "--out", "/proc/nowhere"], "/proc/nowhere cannot be read or written"),
        (["evaluate", "--controllers", "."], "is not an archive"),
    ],
)
def test_wrong_words_get_one_sentence(words: list[str], said: str) -> None:
    assert said in refused(words)


def test_a_run_without_an_agent_cannot_be_evaluated(tmp_path: Path) -> None:
    run = tiny_run(tmp_path / "run")
    assert "has no agent yet" in refused(["evaluate", "--controllers", str(run.path)])
    assert "Nothing has been evaluated yet" in esper_here("show", run.path).stdout


def test_a_directory_that_is_taken_is_refused(run: RunFolder, folder: Path) -> None:
    words = ["train", "demo", "--file", folder / "settings.toml", "--out", run.path]
    assert f"esper resume {run.path}" in refused(words)


def test_where_the_store_is_damaged_scores_are_shown_and_what_is_missing_is_said(
    run: RunFolder, tmp_path: Path
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(run.path, copy)
    figures = figures_of(run.path)
    assert figures.pop("telemetry.whole") == 1
    file = copy / "events.sqlite"

    def outdate() -> None:
        with sqlite3.connect(file) as connection:
            connection.execute("PRAGMA user_version = 99")

    def damage() -> None:
        file.write_bytes(b"no database" * 100)

    for mishap, said in ((outdate, "another version"), (damage, "cannot be read"),
                         (file.unlink, "no file")):  # fmt: skip
        mishap()
        told = esper_here("show", copy)
        assert told.returncode == 0, told.stderr
        assert said in " ".join(told.stdout.split())
        assert str(best_scores(run.path)["tamiyo"]) in told.stdout
        assert figures_of(copy) == figures | {"telemetry.whole": 0}
        assert said in describe_missing_telemetry(copy)
        facts = read_facts(copy)
        assert (facts.best, facts.last_round) == (read_facts(run.path).best, 2)
        assert said in str(page(facts))
        assert said in refused(["events", copy, "--sql", "select 1"])


def test_an_option_that_does_not_exist_is_refused_with_the_one_that_was_meant() -> None:
    told = esper("train", "demo", "--rouns", "3")
    assert told.returncode == 2
    assert "--rounds" in told.stdout + told.stderr
    assert "Traceback" not in told.stderr


@pytest.mark.parametrize("words", [["--help"], ["train", "demo", "--help"], ["--version"]])
def test_help_imports_nothing_heavy(words: list[str]) -> None:
    code = (
        "import sys, atexit\n"
        f"atexit.register(lambda: print([p for p in {PACKAGES!r} if p in sys.modules]))\n"
        f"sys.argv = ['esper', *{words!r}]\n"
        "from esper.karn.cli import main\n"
        "main()"
    )
    told = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, env=ENVIRONMENT
    )
    assert told.returncode == 0
    assert told.stdout.splitlines()[-1] == "[]"
