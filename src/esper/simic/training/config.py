"""Settings of a training run: one definition is the API, the command line, the help and the file.

Nested settings are tables of the file, and dotted names elsewhere.
"""

import json
import re
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

DEVICES = ("cpu", "cuda")
DEFAULT_PATIENCE = 2.0
DEFAULT_FINAL_RATE = 0.1
MOST_CASES = 100_000  # far below the seeds of atlases, selection and evaluation


@dataclass(frozen=True, kw_only=True)
class EvaluationConfig:
    """How a controller is judged while it learns: greedily, on cases it never trains on."""

    every: Count = 5
    """rounds between evaluations"""
    seeds: Count = 2
    """cases of every context"""
    baselines: tuple[str, ...] = ("random", "heuristic")
    """controllers that are played once on the same cases, for comparison"""

    def __post_init__(self) -> None:
        require_settings(self, "The evaluation's setting")


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """All that a run depends on."""

    suite: str = "garden"
    """garden, garden_mlp, greenhouse, or the path of a suite in TOML"""
    rounds: Count = 200
    """in each round every environment plays one episode, then the controller learns"""
    envs: Count = 64
    """environments, over all processes"""
    seed: int = 0
    """every random number follows from it"""
    cases: Annotated[int, Range(least=1, most=MOST_CASES, whole=True)] = 8
    """different cases of every context that training draws from"""
    horizon: Count = DEFAULT_EPISODE_LENGTH
    """epochs of an episode; in the greenhouse of the longest ones"""
    plots: Count = 16
    """in the greenhouse: populations of different hosts side by side, over all processes"""
    players: Count = 4
    """in the greenhouse: environments that share a case and its control"""
    device: str = "cpu"
    """cpu or cuda"""
    deterministic: bool = False
    """on cuda, the same run twice is the same to the bit, but slower; on a cpu it always is"""
    backend: str = "auto"
    """how hosts are computed: fused, chip (small hosts), or auto, the faster one"""
    processes: Count = 1
    """processes that learn together, one for each core or GPU"""
    lstm: Count = DEFAULT_LSTM_HIDDEN_DIM
    """size of the controller's memory"""
    patience: Finite = DEFAULT_PATIENCE
    """how reluctant an untrained controller is to prune, as a logarithm of odds"""
    final_entropy: NotNegative = 0.005
    """the entropy bonus falls from that of `ppo` to this over the run"""
    final_rate: Annotated[float, Range(least=0, most=1, open_=True)] = DEFAULT_FINAL_RATE
    """the learning rate falls to this share of that of `ppo` over the run"""
    checkpoint_every: Count = 5
    """rounds between checkpoints"""
    sinks: tuple[str, ...] = ()
    """trackers that get the curves too: tensorboard, wandb, mlflow; each needs its extra"""
    watched: Whole = 16
    """environments whose observations are kept in the telemetry"""
    reward: RewardConfig = field(default_factory=RewardConfig)
    ppo: PPOConfig = field(default_factory=PPOConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)

    def __post_init__(self) -> None:
        require_settings(self, "The run's setting")
        if self.reward.gamma != self.ppo.gamma:
            raise EsperError(
                "Shaping cancels only with the learner's discount",
                given=f"reward.gamma {self.reward.gamma:g}, ppo.gamma {self.ppo.gamma:g}",
                fix="set both to the same",
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
            given, valid = f"{self.ppo.minibatches} of ppo", f"at most {self.envs}: envs"
            raise EsperError("Minibatches are made of whole episodes", given=given, valid=valid)

    def annealed(self, round_: int) -> dict[str, float]:
        """What a round's update uses: on a straight line from the first round to the last."""
        done, first = min(1.0, round_ / max(1, self.rounds - 1)), self.ppo.entropy_coef
        return {
            "entropy_coef": first + (min(first, self.final_entropy) - first) * done,
            "learning_rate": self.ppo.learning_rate * (1 + (self.final_rate - 1) * done),
        }


PRESETS: dict[str, TrainConfig] = {
    name: filled(TrainConfig(), settings, "setting of a run")
    for name, settings in read_toml(Path(__file__).with_name("presets.toml")).items()
}


# --- files ---------------------------------------------------------------------------------


def to_toml(config: TrainConfig) -> str:
    """The settings as a file that `read_config` reads back as they are."""
    return as_toml(asdict(config))


def read_config(path: Path, base: TrainConfig | None = None) -> TrainConfig:
    """Settings from a TOML file; what it leaves out is as in `base`."""
    try:
        settings = read_toml(path)
        if "processes" in settings:
            settings["processes"] = _convert_processes(settings["processes"])
        return filled(base or TrainConfig(), settings, "setting of a run")
    except EsperError as error:
        raise DataError(f"{path} cannot be used", given=error) from error


def _convert_processes(value: object) -> object:
    """Convert a number of processes that Esper 0.1.x saved as a text.

    Raises:
        DataError: The text is a range such as "2:4", the fewest and the most processes.
    """
    if not isinstance(value, str):
        return value
    if re.fullmatch(r"\d+:\d+", value):
        raise DataError(
            "The setting 'processes' cannot be a range any more",
            given=repr(value),
            valid="a whole number from 1",
            fix="change it, or use Esper 0.1.x (commit 28b7a14), which reads ranges",
        )
    return int(value) if re.fullmatch(r"\d{1,9}", value) else value


# --- settings that were stored -------------------------------------------------------------


def changed_settings(
    ours: Any, stored: Mapping[str, Any], before: str = ""
) -> dict[str, tuple[Any, Any]]:
    """By dotted name, what differs from the settings as JSON kept them: theirs, ours.

    A setting that was not stored was not there yet, and had its default.
    """
    own = {each.name: getattr(ours, each.name) for each in fields(ours)}
    theirs = {each.name: each.default for each in fields(ours) if each.default is not MISSING}
    theirs |= stored
    changed: dict[str, tuple[Any, Any]] = {}
    for name in sorted(own.keys() | theirs.keys()):
        held, mine = theirs.get(name), own.get(name)
        if is_dataclass(mine) and isinstance(held, Mapping):
            changed |= changed_settings(mine, held, f"{before}{name}.")
        elif _as_json(held) != _as_json(mine):
            changed[before + name] = (_as_json(held), _as_json(mine))
    return changed


def _as_json(value: Any) -> Any:
    """A value as it comes back from a file: tuples are lists there, and settings are tables."""
    return json.loads(json.dumps(value, default=asdict))
