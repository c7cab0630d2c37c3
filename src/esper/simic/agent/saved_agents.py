"""The description of a saved agent, from which it is built before its tensors are loaded.

Version 3 was written by Esper 0.1. It is read through tables of renamed keys.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from esper.archive import Archive, ArchiveError
from esper.leyline import ActionSpace
from esper.leyline.errors import EsperError
from esper.leyline.settings import NONE, Range, filled, require
from esper.simic.agent.ppo_config import PPOConfig
from esper.simic.agent.types import CHECKPOINT_VERSION
from esper.simic.renamed_settings import current_ppo_settings
from esper.tamiyo.network import FactoredRecurrentActorCritic
from esper.tamiyo.recurrent import RecurrentActorCritic
from esper.tamiyo.saved_names import current_name
from esper.tamiyo.skip_network import SkipActorCritic
from esper.tamiyo.token_layout import TokenLayout
from esper.tamiyo.token_network import TokenActorCritic

KIND = "ppo-agent"
READABLE_VERSIONS = (3,)  # besides CHECKPOINT_VERSION
MAX_STEPS = 2**24  # of a rollout; no tensor has its length
MAX_NUMBER = 2**63 - 1

FACTORED, SKIP, TOKENS = "factored", "skip", "tokens"
NETWORK_SIZES = ("state_dim", "lstm_hidden_dim", "lstm_layers")
COUNTS = (*NETWORK_SIZES, "num_envs", "max_steps_per_env", "seed")

# Version 3: keys of the notes, and their names today.
RENAMED_NOTES = {"space": "action_space", "envs": "num_envs", "steps": "max_steps_per_env"}


@dataclass(frozen=True, kw_only=True)
class NetworkDescription:
    """Kind and sizes of a network."""

    kind: str
    action_space: ActionSpace
    state_dim: int
    lstm_hidden_dim: int
    lstm_layers: int
    layout: TokenLayout | None = None  # of a network over tokens


@dataclass(frozen=True, kw_only=True)
class SavedAgent:
    """Network, sizes and settings of a saved agent."""

    network: NetworkDescription
    num_envs: int
    max_steps_per_env: int
    seed: int
    config: PPOConfig

    @property
    def action_space(self) -> ActionSpace:
        return self.network.action_space

    @property
    def state_dim(self) -> int:
        return self.network.state_dim

    def notes(self) -> dict[str, Any]:
        """Return the description as JSON can hold it."""
        notes = {
            "network": self.network.kind,
            "action_space": asdict(self.action_space),
            "num_envs": self.num_envs,
            "max_steps_per_env": self.max_steps_per_env,
            "seed": self.seed,
            "config": asdict(self.config),
        }
        notes |= {name: getattr(self.network, name) for name in NETWORK_SIZES}
        if self.network.layout is not None:
            notes["layout"] = asdict(self.network.layout)
        return notes

    def build_network(self) -> RecurrentActorCritic:
        """Build the network with initial weights from torch's global random generator."""
        network = self.network
        if network.layout is not None:
            return TokenActorCritic(network.layout)
        sizes: dict[str, Any] = {name: getattr(network, name) for name in NETWORK_SIZES}
        if network.kind == SKIP:
            return SkipActorCritic(network.action_space, **sizes)
        return FactoredRecurrentActorCritic(network.action_space, **sizes)

    @classmethod
    def read(cls, archive: Archive, path: str | Path) -> "tuple[SavedAgent, dict[str, Tensor]]":
        """Return the description and the tensors, under today's names.

        The sizes are compared with the tensors before memory is allocated for them.

        Raises:
            ArchiveError: The notes or the tensors do not describe an agent.
        """
        try:
            notes, tensors = dict(archive.notes), dict(archive.tensors)
            if archive.version != CHECKPOINT_VERSION:
                notes, tensors = _from_version_3(notes, tensors, path)
            saved = _parse(notes)
        except (LookupError, TypeError, ValueError, AttributeError, EsperError) as error:
            if isinstance(error, ArchiveError):
                raise
            raise ArchiveError(f"{path} does not describe an agent", given=error) from error
        network = saved.network
        hidden_shape = (network.lstm_layers, saved.num_envs, network.lstm_hidden_dim)
        num_features = 0 if network.layout is not None else network.state_dim
        shapes: dict[str, tuple[int, ...]] = {
            "hidden.h": hidden_shape,
            "hidden.c": hidden_shape,
            "buffer.next_starts": (saved.num_envs,),
            "network.observation_norm.mean": (num_features,),
        }
        wrong = [n for n in shapes if n not in tensors or tensors[n].shape != shapes[n]]
        if wrong:
            problem = f"{path} holds other tensors than its notes describe"
            raise ArchiveError(problem, given=", ".join(wrong), fix="use another copy")
        return saved, tensors


def describe_agent(network: RecurrentActorCritic) -> NetworkDescription:
    """Return kind and sizes of a network."""
    kind, layout = FACTORED, None
    if isinstance(network, SkipActorCritic):
        kind = SKIP
    if isinstance(network, TokenActorCritic):
        kind, layout = TOKENS, network.layout
    return NetworkDescription(
        kind=kind,
        action_space=network.action_space,
        state_dim=network.state_dim,
        lstm_hidden_dim=network.lstm_hidden_dim,
        lstm_layers=network.lstm_layers,
        layout=layout,
    )


def _parse(notes: Mapping[str, Any]) -> SavedAgent:
    """Read the notes; every value must have its type."""
    expected_keys = {"network", "action_space", "config", *COUNTS}
    wrong = (notes.keys() - {"layout"}) ^ expected_keys
    if wrong:
        raise LookupError(f"unknown or missing: {', '.join(sorted(wrong))}")
    for name in COUNTS:
        upper_bound = MAX_STEPS if name == "max_steps_per_env" else MAX_NUMBER
        require(name, notes[name], Range(least=0, most=upper_bound, whole=True))
    settings = {name: NONE if v is None else v for name, v in notes["config"].items()}
    config = filled(PPOConfig(), settings, "setting of the learner")
    space = ActionSpace.from_dict(notes["action_space"])
    layout = TokenLayout(**notes["layout"]) if "layout" in notes else None
    if notes["network"] not in (FACTORED, SKIP, TOKENS):
        raise ValueError(f"unknown network {notes['network']!r}")
    if (notes["network"] == TOKENS) != (layout is not None):
        raise ValueError("a network over tokens needs a layout, and no other network has one")
    if layout is not None and (layout.space, layout.state_dim) != (space, notes["state_dim"]):
        raise ValueError(f"other sizes than of {layout}")
    sizes = {name: notes[name] for name in NETWORK_SIZES}
    network = NetworkDescription(kind=notes["network"], action_space=space, layout=layout, **sizes)
    return SavedAgent(
        network=network,
        num_envs=notes["num_envs"],
        max_steps_per_env=notes["max_steps_per_env"],
        seed=notes["seed"],
        config=config,
    )


# --- agents of Esper 0.1 ------------------------------------------------------------------------


def _from_version_3(
    notes: Mapping[str, Any], tensors: Mapping[str, Tensor], path: str | Path
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Translate the notes and tensors of version 3."""
    current = {RENAMED_NOTES.get(name, name): value for name, value in notes.items()}
    current["config"] = current_ppo_settings(notes["config"])
    current["network"] = TOKENS if "layout" in notes else FACTORED
    if "layout" not in notes and "network.memory_norm.weight" not in tensors:
        raise ArchiveError(
            f"{path} holds an agent for Gymnasium environments from Esper 0.1",
            fix="load it with commit 28b7a14, or train it again",
        )
    return current, _tensors_of_version_3(tensors, current["action_space"]["names"])


def _tensors_of_version_3(tensors: Mapping[str, Tensor], heads: list[str]) -> dict[str, Tensor]:
    """Return the tensors under today's names.

    The optimiser had one step count for all parameters, and `mean` and `square` for its moments.
    """
    current: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        part, _, rest = name.partition(".")
        if part == "network":
            current[f"network.{current_name(rest, heads)}"] = tensor
        elif name == "optimizer.steps":
            continue
        elif part == "optimizer":
            parameter, _, moment = rest.rpartition(".")
            renamed = current_name(parameter, heads)
            quantity = {"mean": "exp_avg", "square": "exp_avg_sq"}[moment]
            current[f"optimizer.{renamed}.{quantity}"] = tensor
            current[f"optimizer.{renamed}.step"] = tensors["optimizer.steps"].clone()
        else:
            current[name] = tensor
    return current
