"""Settings: one definition for the API, the command line and files."""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from esper.garden import find_suite
from esper.garden.reward_settings import MODES, RewardConfig
from esper.leyline.errors import DataError, EsperError
from esper.simic.agent import PPOConfig
from esper.simic.training import PRESETS, EvaluationConfig, TrainConfig, read_config, to_toml
from esper.tamiyo.controllers import make_controller


def read(text: str, folder: Path, base: TrainConfig | None = None) -> TrainConfig:
    file = folder / "settings.toml"
    file.write_text(text, encoding="utf-8")
    return read_config(file, base)


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_valid_and_comes_back_from_its_file(name: str, tmp_path: Path) -> None:
    config = PRESETS[name]
    assert read(to_toml(config), tmp_path) == config
    assert find_suite(config.suite).training
    for baseline in config.evaluation.baselines:
        make_controller(baseline)


shares = st.floats(0.0, 1.0)
positive = st.floats(1e-12, 1e12)
texts = st.text(st.characters(exclude_categories=["Cs"]))
gamma = st.shared(shares, key="gamma")
ppos = st.builds(
    PPOConfig,
    gamma=gamma,
    learning_rate=positive,
    target_kl=st.none() | positive,
    compile_backend=st.none() | st.sampled_from(["eager", "inductor"]),
    entropy_targets=st.dictionaries(texts, shares, max_size=3),
    head_average=st.sampled_from(["relevant", "all"]),
    strict=st.booleans(),
    epochs=st.integers(1, 2**62),
)
configs = st.builds(
    TrainConfig,
    suite=texts,
    rounds=st.integers(1, 2**62),
    envs=st.integers(1, 1000),
    seed=st.integers(-(2**62), 2**62),
    final_entropy=st.floats(0.0, allow_nan=False, allow_infinity=False),
    ppo=ppos,
    reward=st.builds(RewardConfig, mode=st.sampled_from(sorted(MODES)), rent=positive, gamma=gamma),
    evaluation=st.builds(
        EvaluationConfig, every=st.integers(1), baselines=st.lists(texts).map(tuple)
    ),
)


@settings(max_examples=200)
@given(configs)
def test_any_settings_come_back_from_their_file(config: TrainConfig) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        assert read(to_toml(config), Path(folder)) == config


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("rouns = 3", "did you mean 'rounds'?"),
        ("[ppo]\nminibatchs = 3", "did you mean 'minibatches'?"),
        ("[evaluation]\nbaselines = 'random'", "valid: a list, each a text"),
        ("[evaluation]\nbaselines = [1]", "valid: a text"),
        ("rounds = 2.5", "valid: a whole number"),
        ("rounds = '2'", "valid: a whole number"),
        ("rounds = true", "valid: a whole number"),
        ("rounds = 'none'", "valid: a whole number"),
        ("suite = 1", "valid: a text"),
        ("ppo = 3", "is a table of settings"),
        ("[ppo]\nstrict = 1", "valid: true or false"),
        ("[ppo]\ntarget_kl = 'never'", "valid: a number"),
        ("[ppo]\nentropy_targets = 3", "valid: a table, each a number"),
        ("[ppo]\nentropy_targets = {op = 'x'}", "valid: a number"),
        ("[ppo]\nhead_average = 'some'", "valid: 'relevant' or 'all'"),
        ("[reward]\nmode = 'shapd'", "did you mean 'shaped'?"),
        ("rounds = 0", "from 1"),
        ("watched = -1", "from 0"),
        ("final_rate = 0.0", "above 0"),
        ("final_rate = nan", "above 0"),
        ("final_entropy = nan", "from 0"),
        ("device = 'gpu'", "valid: cpu, cuda"),
        ("processes = 3", "a multiple of 3"),
        ("processes = '2:4'", "use Esper 0.1.x (commit 28b7a14), which reads ranges"),
        ("processes = 'two'", "valid: a whole number"),
        ("processes = '0'", "a whole number from 1"),
        ("processes = 0", "a whole number from 1"),
        ("envs = 2\n[ppo]\nminibatches = 4", "at most 2"),
        ("cases = 2000000", "up to 100000"),
        ("[evaluation]\nevery = 0", "a whole number from 1"),
        ("rounds = ", "is not TOML"),
        ("\x00", "is not TOML"),
    ],
)
def test_wrong_settings_are_refused_in_one_sentence(text: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(DataError) as refused:
        read(text, tmp_path)
    assert said in str(refused.value)
    assert "\n" not in str(refused.value).replace("\\n", "")


@pytest.mark.parametrize("text", ["processes = 2", 'processes = "2"'])
def test_saved_number_of_processes_is_read_as_a_number(text: str, tmp_path: Path) -> None:
    assert read(text, tmp_path).processes == 2


def test_none_has_a_word_in_files(tmp_path: Path) -> None:
    base = PRESETS["demo"]
    assert base.ppo.target_kl is not None
    config = read('[ppo]\ntarget_kl = "none"', tmp_path, base)
    assert config == replace(base, ppo=replace(base.ppo, target_kl=None))


def test_a_file_that_is_missing_or_a_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no such file"):
        read_config(tmp_path / "none.toml")
    with pytest.raises(DataError, match="cannot be read"):
        read_config(tmp_path)
    (tmp_path / "bytes.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(DataError, match="is not TOML"):
        read_config(tmp_path / "bytes.toml")


def test_what_is_annealed_follows_from_the_round_alone() -> None:
    config = replace(PRESETS["demo"], rounds=11, final_rate=0.2, final_entropy=0.01)
    rates = [config.annealed(round_)["learning_rate"] for round_ in range(11)]
    assert rates[0] == config.ppo.learning_rate
    assert rates[-1] == pytest.approx(0.2 * config.ppo.learning_rate)
    assert rates == sorted(rates, reverse=True)
    assert config.annealed(0)["entropy_coef"] == config.ppo.entropy_coef
    assert config.annealed(10)["entropy_coef"] == pytest.approx(0.01)
    low = replace(config, final_entropy=1.0)
    assert low.annealed(10)["entropy_coef"] == config.ppo.entropy_coef, "it never rises"
    assert replace(config, rounds=1).annealed(0)["learning_rate"] == config.ppo.learning_rate


@pytest.mark.parametrize("changes", [{"rounds": 0}, {"lstm": 0}, {"envs": 3, "processes": 2}])
def test_settings_are_checked_however_they_are_made(changes: dict[str, Any]) -> None:
    with pytest.raises(EsperError):
        TrainConfig(**changes)


def test_settings_and_processes_do_not_need_torch() -> None:
    import subprocess

    modules = "esper.simic.training.config, esper.simic.training.run_processes"
    code = f"import sys, {modules}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
