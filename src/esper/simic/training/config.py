"""Settings of a training run: one definition is the API, the command line, the help and the file.

Nested settings are tables of the file, and dotted names elsewhere.
"""

import json
import tomllib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from esper.garden.reward_settings import RewardConfig
from esper.leyline.constants import DEFAULT_EPISODE_LENGTH, DEFAULT_LSTM_HIDDEN_DIM
from esper.leyline.errors import DataError, EsperError, UnknownNameError
from esper.simic.agent.settings import PPOConfig

T = TypeVar("T")

NONE = "none"  # TOML has no word for it
MOST_CASES = 100_000  # far below the seeds of atlases, selection and evaluation
_COUNTS = ("rounds", "envs", "cases", "horizon", "processes", "lstm", "checkpoint_every")


@dataclass(frozen=True, kw_only=True)
class EvaluationConfig:
    """How a controller is judged while it learns: greedily, on cases it never trains on."""

    every: int = 5
    """rounds between evaluations"""
    seeds: int = 2
    """cases of every context"""
    baselines: tuple[str, ...] = ("random", "heuristic")
    """controllers that are played once on the same cases, for comparison"""


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """All that a run depends on."""

    suite: str = "garden"
    """garden, garden_mlp, or the path of a suite in TOML"""
    rounds: int = 200
    """in each round every environment plays one episode, then the controller learns"""
    envs: int = 64
    """environments, over all processes"""
    seed: int = 0
    """every random number follows from it"""
    cases: int = 8
    """different cases of every context that training draws from"""
    horizon: int = DEFAULT_EPISODE_LENGTH
    """epochs of an episode"""
    device: str = "cpu"
    """cpu or cuda"""
    processes: int = 1
    """processes that learn together, one for each core; only on the CPU"""
    lstm: int = DEFAULT_LSTM_HIDDEN_DIM
    """size of the controller's memory"""
    patience: float = 2.0
    """how reluctant an untrained controller is to prune, as a logarithm of odds"""
    final_entropy: float = 0.005
    """the entropy bonus falls from that of `ppo` to this over the run"""
    final_rate: float = 0.1
    """the learning rate falls to this share of that of `ppo` over the run"""
    checkpoint_every: int = 5
    """rounds between checkpoints"""
    tensorboard: bool = False
    """write curves for TensorBoard too, into RUN/tensorboard; needs the extra of that name"""
    watched: int = 16
    """environments whose observations are kept in the telemetry"""
    reward: RewardConfig = field(default_factory=RewardConfig)
    ppo: PPOConfig = field(default_factory=PPOConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)

    def __post_init__(self) -> None:
        least = dict.fromkeys(_COUNTS, 1) | {"watched": 0, "final_entropy": 0}
        for name, number in least.items():
            given = getattr(self, name)
            if not given >= number:
                valid = f"from {number}"
                raise EsperError(f"{name} of a run is too small", given=given, valid=valid)
        if not 0 < self.final_rate <= 1:
            raise EsperError(
                "final_rate is a share of the learning rate",
                given=self.final_rate,
                valid="above 0, up to 1",
            )
        if self.cases > MOST_CASES:
            raise EsperError("Too many cases", given=self.cases, valid=f"up to {MOST_CASES}")
        self._check_processes()
        if self.reward.gamma != self.ppo.gamma:
            raise EsperError(
                "Shaping cancels only with the learner's discount",
                given=f"reward.gamma {self.reward.gamma:g}, ppo.gamma {self.ppo.gamma:g}",
                fix="set both to the same",
            )
        if self.evaluation.every < 1 or self.evaluation.seeds < 1:
            raise EsperError("Evaluation needs rounds and seeds", given=self.evaluation)

    def _check_processes(self) -> None:
        if self.envs % self.processes:
            raise EsperError(
                "Every process needs as many environments as the others",
                given=f"{self.envs} environments, {self.processes} processes",
                valid=f"a multiple of {self.processes}",
            )
        if self.device not in ("cpu", "cuda"):
            raise UnknownNameError.of("device", self.device, ("cpu", "cuda"))
        if self.processes > 1 and self.device != "cpu":
            raise EsperError(
                "Several processes are for several cores",
                given=f"{self.processes} processes on {self.device}",
                fix="use processes 1, and more environments",
            )
        if self.ppo.minibatches > self.envs // self.processes:
            raise EsperError(
                "Minibatches are made of whole episodes",
                given=f"{self.ppo.minibatches} minibatches of ppo",
                valid=f"at most {self.envs // self.processes}, the environments of a process",
            )

    def progress(self, round_: int) -> float:
        """From 0 in the first round to 1 in the last."""
        return min(1.0, round_ / max(1, self.rounds - 1))

    def entropy_in(self, round_: int) -> float:
        """The entropy bonus of a round, on a straight line."""
        first = self.ppo.entropy_coef
        return first + (min(first, self.final_entropy) - first) * self.progress(round_)

    def rate_in(self, round_: int) -> float:
        """The learning rate of a round, on a straight line."""
        return self.ppo.learning_rate * (1 + (self.final_rate - 1) * self.progress(round_))


_DEMO = PPOConfig(
    learning_rate=1e-3, epochs=8, minibatches=4, target_kl=0.08, entropy_coef=0.05, gae_lambda=0.95
)

PRESETS: dict[str, TrainConfig] = {
    # Learns on two cores within minutes: a small host, and few cases to measure controls of.
    "demo": TrainConfig(
        suite="garden_mlp",
        rounds=9,
        envs=64,
        processes=2,
        cases=4,
        ppo=_DEMO,
        evaluation=EvaluationConfig(every=3, seeds=2),
        checkpoint_every=3,
    ),
    # The main suite on the cores of a workstation: hours.
    "garden": TrainConfig(
        suite="garden",
        rounds=400,
        envs=64,
        processes=2,
        cases=16,
        ppo=replace(_DEMO, learning_rate=5e-4, target_kl=0.03),
        evaluation=EvaluationConfig(every=20, seeds=2),
    ),
    # The main suite on one large GPU: a quarter of a million episodes.
    "gpu": TrainConfig(
        suite="garden",
        rounds=250,
        envs=1024,
        cases=32,
        device="cuda",
        ppo=replace(_DEMO, learning_rate=5e-4, target_kl=0.03, minibatches=8, epochs=4),
        evaluation=EvaluationConfig(every=10, seeds=8),
    ),
}


def find_preset(name: str) -> TrainConfig:
    if name not in PRESETS:
        raise UnknownNameError.of("preset", name, PRESETS)
    return PRESETS[name]


# --- files ---------------------------------------------------------------------------------


def to_toml(config: TrainConfig) -> str:
    """The settings as a file that `from_toml` reads back as they are."""
    plain: list[str] = []
    tables: list[str] = []
    for name, value in asdict(config).items():
        if isinstance(value, Mapping):
            lines = [_line(key, inner) for key, inner in value.items()]
            tables.append("\n".join([f"[{name}]", *lines]))
        else:
            plain.append(_line(name, value))
    return "\n\n".join(["\n".join(plain), *tables]) + "\n"


def _line(name: str, value: object) -> str:
    return f"{name} = {_toml(value)}"


def _toml(value: object) -> str:
    if value is None:
        return f'"{NONE}"'
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        # A TOML string is written like JSON's, but for one character.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, Mapping):
        pairs = (f"{_toml(key)} = {_toml(inner)}" for key, inner in value.items())
        return "{" + ", ".join(pairs) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_toml(inner) for inner in value) + "]"
    return repr(value)


def read_config(path: Path, base: TrainConfig | None = None) -> TrainConfig:
    """Settings from a TOML file; what it leaves out is as in `base`."""
    try:
        given = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise DataError("There is no such file of settings", given=path) from None
    except OSError as error:
        raise DataError(f"{path} cannot be read", given=error.strerror) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise DataError(f"{path} is not TOML", given=error) from error
    try:
        return _filled(base or TrainConfig(), given, "setting of a run")
    except EsperError as error:
        raise DataError(f"{path} cannot be used", given=error) from error


def _filled(base: T, given: Mapping[str, Any], what: str) -> T:
    """`base` with the given settings in place of its own; each checked for its name and type."""
    hints = get_type_hints(type(base))
    known = [each.name for each in fields(base)]  # type: ignore[arg-type]
    changed: dict[str, Any] = {}
    for name, value in given.items():
        if name not in known:
            raise UnknownNameError.of(what, name, known)
        own = getattr(base, name)
        if is_dataclass(own):
            if not isinstance(value, Mapping):
                raise DataError(f"{name!r} is a table of settings", given=repr(value))
            changed[name] = _filled(own, value, f"setting of {name!r}")
        else:
            changed[name] = _typed(name, value, hints[name])
    return replace(base, **changed)  # type: ignore[type-var]


def _typed(name: str, value: object, hint: Any) -> object:
    """The value as the setting's type; refused if it is another one's."""
    kinds = get_args(hint) if type(None) in get_args(hint) else (hint,)
    if type(None) in kinds and value == NONE:
        return None
    wanted = next(kind for kind in kinds if kind is not type(None))
    origin = get_origin(wanted) or wanted
    inner = get_args(wanted)
    if origin is Literal and value in inner:
        return value
    if origin is tuple and isinstance(value, list):
        return tuple(_typed(name, each, inner[0]) for each in value)
    if origin is Mapping and isinstance(value, dict):
        return {key: _typed(f"{name}.{key}", each, inner[1]) for key, each in value.items()}
    if origin is float and type(value) is int:
        return float(value)
    if origin in (int, float, str, bool) and type(value) is origin:
        return value
    raise DataError(
        f"{name!r} has the wrong type or value", given=repr(value), valid=_spoken(wanted)
    )


def _spoken(kind: Any) -> str:
    """A type in the words of a file."""
    origin, inner = get_origin(kind) or kind, get_args(kind)
    if origin is Literal:
        return " or ".join(map(repr, inner))
    if origin is tuple:
        return f"a list, each {_spoken(inner[0])}"
    if origin is Mapping:
        return f"a table, each {_spoken(inner[1])}"
    words = {int: "a whole number", float: "a number", str: "a text", bool: "true or false"}
    return words[origin]
