"""Runs of Esper 0.1: their settings and checkpoints are read under today's names.

`settings_0_1` has the `config.toml` that Esper 0.1 (commit 28b7a14) wrote for each preset.
"""

import shutil
import tomllib
from dataclasses import asdict, replace
from pathlib import Path
from signal import SIGINT
from typing import Any

import pytest

from esper.archive import write_archive
from esper.archive.files import as_toml
from esper.leyline.errors import DataError
from esper.simic.agent import PPOConfig
from esper.simic.renamed_settings import (
    LAST_COMMIT,
    RENAMED_CHECKPOINT_NOTES,
    RENAMED_PPO_SETTINGS,
    RENAMED_RUN_SETTINGS,
)
from esper.simic.training import (
    PRESETS,
    GracefulShutdown,
    RoundReport,
    RunError,
    RunFolder,
    TrainConfig,
    read_config,
    train_run,
)
from esper.simic.training.config import changed_settings
from esper.simic.training.training_runs import KIND, STATE
from tests.simic.training.tiny import kept, tiny_run, told

SAVED = Path(__file__).with_name("settings_0_1")
ROUND = 2


def old_names(values: dict[str, Any], renamed: dict[str, str]) -> dict[str, Any]:
    original = {current: old for old, current in renamed.items()}
    return {original.get(name, name): value for name, value in values.items()}


def settings_of_esper_0_1(config: TrainConfig) -> dict[str, Any]:
    """Return settings as Esper 0.1 stored them."""
    settings = old_names(asdict(config), RENAMED_RUN_SETTINGS)
    ppo = old_names(settings["ppo"], RENAMED_PPO_SETTINGS)
    del ppo["accumulation_steps"]
    if not ppo.pop("compile_network"):
        ppo["compile_backend"] = None
    settings["ppo"] = ppo
    return settings


def convert_to_esper_0_1(run: RunFolder) -> None:
    """Rewrite the settings and the newest checkpoint of a run as Esper 0.1 wrote them."""
    checkpoint = run.newest()
    assert checkpoint is not None
    settings = settings_of_esper_0_1(run.config)
    notes = old_names(dict(checkpoint.state.notes), RENAMED_CHECKPOINT_NOTES)
    notes["settings"] = settings
    folder = run.checkpoint(checkpoint.round) / STATE
    shutil.rmtree(folder)
    write_archive(folder, kind=KIND, version=2, tensors=checkpoint.state.tensors, notes=notes)
    (run.path / "config.toml").write_text(as_toml(settings), encoding="utf-8")


@pytest.mark.parametrize("name", PRESETS)
def test_saved_preset_of_esper_0_1_equals_the_preset(name: str) -> None:
    assert read_config(SAVED / f"{name}.toml") == PRESETS[name]


@pytest.mark.parametrize("name", PRESETS)
def test_stored_settings_of_esper_0_1_are_unchanged(name: str) -> None:
    stored = tomllib.loads((SAVED / f"{name}.toml").read_text(encoding="utf-8"))
    stored["ppo"]["sequence"] = stored["ppo"]["compile_backend"] = None  # as JSON stores them
    assert changed_settings(PRESETS[name], stored) == {}
    changed = changed_settings(replace(PRESETS[name], logged_envs=3), stored)
    assert changed == {"logged_envs": (stored["watched"], 3)}


@pytest.mark.parametrize(
    ("backend", "ppo"),
    [
        ("none", PPOConfig()),
        ("eager", PPOConfig(compile_network=True, compile_backend="eager")),
    ],
)
def test_compile_backend_of_esper_0_1_compiles_the_network(
    backend: str, ppo: PPOConfig, tmp_path: Path
) -> None:
    file = tmp_path / "config.toml"
    file.write_text(f'[ppo]\nsequence = "none"\ncompile_backend = "{backend}"', encoding="utf-8")
    assert read_config(file).ppo == ppo


def test_setting_under_both_names_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    file.write_text("watched = 1\nlogged_envs = 2", encoding="utf-8")
    with pytest.raises(DataError, match=r"'logged_envs' is given twice.*watched"):
        read_config(file)


def test_range_of_processes_is_refused_with_the_commit(tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    text = (SAVED / "demo.toml").read_text(encoding="utf-8")
    file.write_text(text.replace("processes = 2", 'processes = "2:4"'), encoding="utf-8")
    with pytest.raises(DataError, match=LAST_COMMIT):
        read_config(file)


def test_run_of_esper_0_1_resumes(tmp_path: Path) -> None:
    whole = tiny_run(tmp_path / "whole", rounds=ROUND + 1)
    assert train_run(whole)
    run = tiny_run(tmp_path / "run", rounds=ROUND + 1)
    stop = GracefulShutdown(say=False)

    def stop_after_round(report: RoundReport) -> None:
        if report.round == ROUND:
            stop.signal = SIGINT

    assert not train_run(run, on_round=stop_after_round, stop=stop)
    convert_to_esper_0_1(run)
    assert train_run(run)
    last_checkpoint = f"round-{ROUND + 1:06d}"
    hashes = {name: value for name, value in kept(run).items() if last_checkpoint in name}
    assert hashes
    assert hashes.items() <= kept(whole).items()
    assert told(run) == told(whole)


def test_changed_setting_of_esper_0_1_is_refused_by_todays_name(tmp_path: Path) -> None:
    run = tiny_run(tmp_path / "run", rounds=1)
    assert train_run(run)
    convert_to_esper_0_1(run)
    file = run.path / "config.toml"
    text = file.read_text(encoding="utf-8")
    file.write_text(text.replace("patience = 2.0", "patience = 3.0"), encoding="utf-8")
    with pytest.raises(RunError, match=r"prune_logit_bias 2\.0 -> 3\.0"):
        train_run(run)
