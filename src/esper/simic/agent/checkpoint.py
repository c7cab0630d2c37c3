"""An agent as a directory: weights, normalisers, optimiser, random streams, carried memory."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from esper.archive import ArchiveError, read_archive, write_archive
from esper.leyline.errors import EsperError
from esper.leyline.heads import ActionSpace
from esper.leyline.slots import require_agreement
from esper.simic.agent.rollout_buffer import RolloutError
from esper.simic.agent.settings import PPOConfig
from esper.tamiyo.network import unwrapped

if TYPE_CHECKING:
    from esper.simic.agent.ppo import PPOAgent

KIND = "ppo-agent"
VERSION = 2

_MOST = {"steps": 2**24}  # of a rollout, which no tensor tells
_ALSO = {"target_kl": (type(None),), "compile_backend": (str,)}  # types beside the default's


@dataclass(frozen=True, kw_only=True)
class SavedAgent:
    """All that is needed to build an agent again, and the tensors to put into it."""

    path: Path
    space: ActionSpace
    state_dim: int
    lstm_hidden_dim: int
    lstm_layers: int
    envs: int
    steps: int
    seed: int
    config: PPOConfig
    tensors: Mapping[str, Tensor]


def save_agent(agent: "PPOAgent", path: str | Path) -> Path:
    if len(agent.buffer):
        raise RolloutError(
            "An agent is saved between rounds",
            given=f"{len(agent.buffer)} steps that were not learned from",
            valid="an empty buffer",
            fix="save after update",
        )
    notes = {
        "config": asdict(agent.config),
        "space": asdict(agent.space),
        "state_dim": agent.network.state_dim,
        "lstm_hidden_dim": agent.network.lstm_hidden_dim,
        "lstm_layers": agent.network.lstm_layers,
        "envs": agent.buffer.envs,
        "steps": agent.buffer.steps,
        "seed": agent.seed,
    }
    tensors = _tensors(agent)
    return write_archive(path, kind=KIND, version=VERSION, tensors=tensors, notes=notes)


def read_agent(
    path: str | Path, space: ActionSpace | None = None, state_dim: int | None = None
) -> SavedAgent:
    """Read a saved agent; refused if it does not fit the space or the state that are given."""
    archive = read_archive(path, kind=KIND, version=VERSION)
    try:
        notes = dict(archive.notes)
        _require_counts(notes)
        saved = SavedAgent(
            path=Path(path),
            space=ActionSpace.from_dict(notes.pop("space")),
            config=_config(notes.pop("config")),
            tensors=archive.tensors,
            **notes,
        )
    except (LookupError, TypeError, ValueError, EsperError) as error:
        raise ArchiveError(f"{path} does not describe an agent", given=error) from error
    _require_sizes(saved)
    if space is not None:
        require_agreement("action heads", ("checkpoint", saved.space), ("caller", space))
    if state_dim is not None:
        given = ("caller", state_dim)
        require_agreement("the state's size", ("checkpoint", saved.state_dim), given)
    return saved


def _require_counts(notes: Mapping[str, Any]) -> None:
    for name in ("state_dim", "lstm_hidden_dim", "lstm_layers", "envs", "steps", "seed"):
        if type(notes[name]) is not int or not 0 <= notes[name] < _MOST.get(name, 2**63):
            raise TypeError(f"{name} {notes[name]!r}")


def _config(notes: Mapping[str, Any]) -> PPOConfig:
    """Settings, each of its own type."""
    config, default = PPOConfig(**notes), PPOConfig()
    for name, value in asdict(config).items():
        kinds: tuple[type, ...] = (type(getattr(default, name)), *_ALSO.get(name, ()))
        if float in kinds:
            kinds = (*kinds, int)
        if type(value) not in kinds:
            raise TypeError(f"{name} {value!r}")
    return config


def _require_sizes(saved: SavedAgent) -> None:
    """Refuse sizes that are not those of the tensors, before memory is taken for them."""
    shapes = {
        "hidden.h": (saved.lstm_layers, saved.envs, saved.lstm_hidden_dim),
        "network.observation_norm.mean": (saved.state_dim,),
    }
    wrong = [
        name
        for name, shape in shapes.items()
        if name not in saved.tensors or saved.tensors[name].shape != shape
    ]
    if wrong:
        raise _other_tensors(saved.path, wrong)


def _other_tensors(path: Path, names: Sequence[str]) -> ArchiveError:
    return ArchiveError(
        f"{path} holds other tensors than its notes describe",
        given=", ".join(names[:3]),
        fix="use another copy",
    )


def restore_agent(agent: "PPOAgent", saved: SavedAgent) -> None:
    """Put saved tensors into an agent of their shapes; if one does not fit, none is touched."""
    _require_fit(agent, saved.tensors, saved.path)
    parts = _by_prefix(saved.tensors)
    unwrapped(agent.network).load_state_dict(parts["network"])
    state: dict[int, dict[str, Tensor]] = {}
    for name, value in parts.get("optimizer", {}).items():
        index, field = name.split(".")
        state.setdefault(int(index), {})[field] = value
    groups = agent.optimizer.state_dict()["param_groups"]
    agent.optimizer.load_state_dict({"state": state, "param_groups": groups})
    h, c = (parts["hidden"][name].to(agent.device) for name in ("h", "c"))
    agent.hidden = (h, c)
    agent.buffer.next_starts.copy_(parts["buffer"]["next_starts"])
    agent.shuffler.set_state(parts["random"]["shuffler"])
    # A generator's state is of its device's kind; on another device the stream starts anew.
    if len(parts["random"]["sampler"]) == len(agent.sampler.get_state()):
        agent.sampler.set_state(parts["random"]["sampler"])


def _tensors(agent: "PPOAgent") -> dict[str, Tensor]:
    weights = unwrapped(agent.network).state_dict()  # a compiled one has other names
    tensors = {f"network.{name}": tensor for name, tensor in weights.items()}
    for index, state in agent.optimizer.state_dict()["state"].items():
        tensors |= {f"optimizer.{index}.{name}": value for name, value in state.items()}
    return tensors | {
        "hidden.h": agent.hidden[0],
        "hidden.c": agent.hidden[1],
        "buffer.next_starts": agent.buffer.next_starts,
        "random.sampler": agent.sampler.get_state(),
        "random.shuffler": agent.shuffler.get_state(),
    }


def _require_fit(agent: "PPOAgent", tensors: Mapping[str, Tensor], path: Path) -> None:
    """Refuse tensors that are missing, surplus, or of another shape or type than the agent's."""
    expected = {name: _form(tensor) for name, tensor in _tensors(agent).items()}
    found = {name: _form(tensor) for name, tensor in tensors.items()}
    if any(name.startswith("optimizer.") for name in found):  # absent before the first update
        order = [p for group in agent.optimizer.param_groups for p in group["params"]]
        for index, parameter in enumerate(order):
            expected[f"optimizer.{index}.step"] = _form(torch.zeros(()))
            for moment in ("exp_avg", "exp_avg_sq"):
                expected[f"optimizer.{index}.{moment}"] = _form(parameter)
    if found.get("random.sampler", ((), None))[1] is torch.uint8:
        expected["random.sampler"] = found["random.sampler"]  # another device's has another size
    wrong = sorted({name for name, _ in found.items() ^ expected.items()})
    if wrong:
        raise _other_tensors(path, wrong)


def _form(tensor: Tensor) -> tuple[tuple[int, ...], torch.dtype]:
    return tuple(tensor.shape), tensor.dtype


def _by_prefix(tensors: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    parts: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        prefix, _, rest = name.partition(".")
        parts.setdefault(prefix, {})[rest] = tensor
    return parts
