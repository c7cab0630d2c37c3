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
def test_preset_round_trips_through_its_file(name: str, tmp_path: Path) -> None:
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
    lr=positive,
    target_kl=st.none() | positive,
    compile_network=st.booleans(),
    compile_backend=st.sampled_from(["eager", "inductor"]),
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
def test_settings_round_trip_through_a_file(config: TrainConfig) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        assert read(to_toml(config), Path(folder)) == config


@pytest.mark.parametrize(
    ("text", "message"),
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
        ("logged_envs = -1", "from 0"),
        ("final_lr_fraction = 0.0", "above 0"),
        ("final_lr_fraction = nan", "above 0"),
        ("final_entropy = nan", "from 0"),
        ("device = 'gpu'", "valid: cpu, cuda"),
        ("processes = 3", "a multiple of 3"),
        ("processes = '2:4'", "use Esper 0.1.x (commit 28b7a14), which reads ranges"),
        ("processes = 'two'", "valid: a whole number"),
        ("processes = '0'", "a whole number from 1"),
        ("processes = 0", "a whole number from 1"),
        ("envs = 2\n[ppo]\nminibatches = 4", "at most 2"),
        ("seeds_per_context = 2000000", "up to 100000"),
        ("[evaluation]\nevery = 0", "a whole number from 1"),
        ("rounds = ", "is not TOML"),
        ("\x00", "is not TOML"),
    ],
)
def test_invalid_settings_raise_one_sentence(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(DataError) as refused:
        read(text, tmp_path)
    assert message in str(refused.value)
    assert "\n" not in str(refused.value).replace("\\n", "")


@pytest.mark.parametrize("text", ["processes = 2", 'processes = "2"'])
def test_saved_number_of_processes_is_read_as_a_number(text: str, tmp_path: Path) -> None:
    assert read(text, tmp_path).processes == 2


def test_none_is_a_word_in_settings_files(tmp_path: Path) -> None:
    base = PRESETS["demo"]
    assert base.ppo.target_kl is not None
    config = read('[ppo]\ntarget_kl = "none"', tmp_path, base)
    assert config == replace(base, ppo=replace(base.ppo, target_kl=None))


def test_unreadable_settings_file_raises_data_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no such file"):
        read_config(tmp_path / "none.toml")
    with pytest.raises(DataError, match="cannot be read"):
        read_config(tmp_path)
    (tmp_path / "bytes.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(DataError, match="is not TOML"):
        read_config(tmp_path / "bytes.toml")


def test_annealed_hyperparameters_depend_on_the_round_alone() -> None:
    config = replace(PRESETS["demo"], rounds=11, final_lr_fraction=0.2, final_entropy=0.01)
    first, *_, last = schedule = [config.annealed_hyperparameters(done) for done in range(11)]
    rates = [hyperparameters["lr"] for hyperparameters in schedule]
    assert rates[0] == config.ppo.lr
    assert rates[-1] == pytest.approx(0.2 * config.ppo.lr)
    assert rates == sorted(rates, reverse=True)
    assert first["entropy_coef"] == config.ppo.entropy_coef
    assert last["entropy_coef"] == pytest.approx(0.01)


def test_annealed_entropy_coefficient_never_rises() -> None:
    config = replace(PRESETS["demo"], rounds=11, final_entropy=1.0)
    assert config.annealed_hyperparameters(10)["entropy_coef"] == config.ppo.entropy_coef


def test_run_of_one_round_uses_the_first_learning_rate() -> None:
    config = replace(PRESETS["demo"], rounds=1)
    assert config.annealed_hyperparameters(0)["lr"] == config.ppo.lr


@pytest.mark.parametrize("changes", [{"rounds": 0}, {"lstm": 0}, {"envs": 3, "processes": 2}])
def test_constructor_validates_settings(changes: dict[str, Any]) -> None:
    with pytest.raises(EsperError):
        TrainConfig(**changes)


def test_settings_and_processes_import_without_torch() -> None:
    import subprocess

    modules = "esper.simic.training.config, esper.simic.training.run_processes"
    code = f"import sys, {modules}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
