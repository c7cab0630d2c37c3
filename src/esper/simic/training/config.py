"""Settings of a training run, for the Python API, the command line and settings files.

Nested settings are tables of the file and dotted names on the command line. Imports no torch.
"""

import json
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any

from esper.archive.files import as_toml, read_toml
from esper.garden.reward_settings import RewardConfig
from esper.leyline.constants import BACKENDS, DEFAULT_EPISODE_LENGTH, DEFAULT_LSTM_HIDDEN_DIM
from esper.leyline.errors import DataError, EsperError, require_known
from esper.leyline.settings import (
    Count,
    Finite,
    NotNegative,
    Range,
    Whole,
    filled,
    require_settings,
)
from esper.simic.agent.ppo_config import PPOConfig
from esper.simic.renamed_settings import current_ppo_settings, current_run_settings

DEVICES = ("cpu", "cuda")
DEFAULT_PRUNE_LOGIT_BIAS = 2.0  # an untrained controller would prune most seeds before they help
DEFAULT_FINAL_LR_FRACTION = 0.1  # small updates at the end, without stopping before the end
MAX_SEEDS_PER_CONTEXT = 100_000  # far below the random seeds of atlases, selection and evaluation


@dataclass(frozen=True, kw_only=True)
class EvaluationConfig:
    """Greedy evaluation during training, on cases that training never uses."""

    every: Count = 5
    """rounds between evaluations"""
    seeds: Count = 2
    """random seeds of every context"""
    baselines: tuple[str, ...] = ("random", "heuristic")
    """controllers to evaluate once on the same cases"""

    def __post_init__(self) -> None:
        require_settings(self, "The evaluation's setting")


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """All settings on which a training run depends."""

    suite: str = "garden"
    """garden, garden_mlp, greenhouse, or the path of a TOML suite"""
    rounds: Count = 200
    """rounds to train: an episode per environment, then an update"""
    envs: Count = 64
    """environments, over all processes"""
    seed: int = 0
    """random seed of the run"""
    seeds_per_context: Annotated[int, Range(least=1, most=MAX_SEEDS_PER_CONTEXT, whole=True)] = 8
    """random seeds of every context that training draws from"""
    horizon: Count = DEFAULT_EPISODE_LENGTH
    """epochs of an episode; in the greenhouse the most epochs"""
    populations: Count = 16
    """greenhouse: populations of different hosts, over all processes"""
    rollouts_per_case: Count = 4
    """greenhouse: environments that share a case and its control"""
    device: str = "cpu"
    """cpu or cuda"""
    deterministic: bool = False
    """use slower, reproducible CUDA kernels; CPUs are always reproducible"""
    backend: str = "auto"
    """executor of hosts: fused, chip (small hosts), or auto (the faster)"""
    processes: Count = 1
    """processes that learn together, one per core or GPU"""
    lstm: Count = DEFAULT_LSTM_HIDDEN_DIM
    """hidden size of the controller's LSTM"""
    prune_logit_bias: Finite = DEFAULT_PRUNE_LOGIT_BIAS
    """initial logit bias against PRUNE"""
    final_entropy: NotNegative = 0.005
    """entropy coefficient at the end of the run"""
    final_lr_fraction: Annotated[float, Range(least=0, most=1, open_=True)] = (
        DEFAULT_FINAL_LR_FRACTION
    )
    """learning rate at the end, as a fraction of ppo.lr"""
    checkpoint_every: Count = 5
    """rounds between checkpoints"""
    sinks: tuple[str, ...] = ()
    """additional telemetry sinks: tensorboard, wandb, mlflow (each an extra)"""
    logged_envs: Whole = 16
    """environments whose observations are logged"""
    reward: RewardConfig = field(default_factory=RewardConfig)
    ppo: PPOConfig = field(default_factory=PPOConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)

    def __post_init__(self) -> None:
        require_settings(self, "The run's setting")
        if self.reward.gamma != self.ppo.gamma:
            raise EsperError(
                "Reward shaping and the learner need the same discount",
                given=f"reward.gamma {self.reward.gamma:g}, ppo.gamma {self.ppo.gamma:g}",
                fix="set both to the same value",
            )
        if self.envs % self.processes:
            raise EsperError(
                "All processes need the same number of environments",
                given=f"{self.envs} environments, {self.processes} processes",
                valid=f"a multiple of {self.processes}",
            )
        require_known("device", self.device, DEVICES)
        require_known("backend of a population", self.backend, BACKENDS)
        if self.ppo.minibatches > self.envs:
            raise EsperError(
                "A minibatch needs at least one episode",
                given=f"ppo.minibatches {self.ppo.minibatches}",
                valid=f"at most {self.envs}, the number of environments",
            )

    def annealed_hyperparameters(self, completed_rounds: int) -> dict[str, float]:
        """Return the entropy coefficient and learning rate of the next update.

        Both change linearly from the first round to the last one.

        Args:
            completed_rounds: Number of rounds before this update.
        """
        progress = min(1.0, completed_rounds / max(1, self.rounds - 1))
        first_entropy = self.ppo.entropy_coef
        last_entropy = min(first_entropy, self.final_entropy)
        return {
            "entropy_coef": first_entropy + (last_entropy - first_entropy) * progress,
            "lr": self.ppo.lr * (1 + (self.final_lr_fraction - 1) * progress),
        }


# --- files ---------------------------------------------------------------------------------


def to_toml(config: TrainConfig) -> str:
    """Return the settings as TOML that `read_config` reads."""
    return as_toml(asdict(config))


def read_config(path: Path, base: TrainConfig | None = None) -> TrainConfig:
    """Read settings from a TOML file.

    Args:
        path: The file. It may have been written by Esper 0.1.
        base: Settings that the file does not contain; by default the defaults.

    Raises:
        DataError: The file cannot be read or contains an invalid setting.
    """
    try:
        settings = current_run_settings(read_toml(path))
        return filled(base or TrainConfig(), settings, "setting of a run")
    except EsperError as error:
        raise DataError(f"{path} cannot be used", given=error) from error


def _read_presets() -> dict[str, TrainConfig]:
    presets = read_toml(Path(__file__).with_name("presets.toml"))
    return {
        name: filled(TrainConfig(), settings, "setting of a run")
        for name, settings in presets.items()
    }


PRESETS: dict[str, TrainConfig] = _read_presets()


# --- comparison with stored settings -------------------------------------------------------


def changed_settings(
    current: Any, stored: Mapping[str, Any], prefix: str = ""
) -> dict[str, tuple[Any, Any]]:
    """Compare settings with those that were stored as JSON.

    A setting that was not stored did not exist yet and had its default value. Settings that
    Esper 0.1 stored are compared under their names today.

    Args:
        current: A dataclass of settings.
        stored: The stored settings.
        prefix: Text before the names of the result.

    Returns:
        Stored and current value of every setting that differs, by dotted name.
    """
    if isinstance(current, TrainConfig):
        stored = current_run_settings(stored)
    elif isinstance(current, PPOConfig):
        stored = current_ppo_settings(stored)
    current_values: dict[str, Any] = {}
    stored_values: dict[str, Any] = {}
    for setting in fields(current):
        current_values[setting.name] = getattr(current, setting.name)
        if setting.default is not MISSING:
            stored_values[setting.name] = setting.default
    stored_values |= stored

    changed: dict[str, tuple[Any, Any]] = {}
    for name in sorted(current_values.keys() | stored_values.keys()):
        old, new = stored_values.get(name), current_values.get(name)
        if is_dataclass(new) and isinstance(old, Mapping):
            changed |= changed_settings(new, old, f"{prefix}{name}.")
        elif _as_json(old) != _as_json(new):
            changed[prefix + name] = (_as_json(old), _as_json(new))
    return changed


def _as_json(value: Any) -> Any:
    """Return a value as JSON stores it: tuples are lists, and settings are mappings."""
    return json.loads(json.dumps(value, default=asdict))
