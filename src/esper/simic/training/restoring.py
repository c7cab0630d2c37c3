"""What a checkpoint holds beside the agents, checked before it is believed.

Shapes: `E` environments of all processes.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from esper.archive import Archive, ArchiveError
from esper.simic.agent.ppo import PPOAgent
from esper.simic.training.config import TrainConfig

CONTROL = "controls."  # before the names of controls


@contextmanager
def what_is_wrong_in(place: Path) -> Iterator[None]:
    """Say in which checkpoint something is not what it should be."""
    try:
        yield
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise ArchiveError(
            f"{place} does not hold a run's state", given=f"{type(error).__name__}: {error}"
        ) from error


def require_own(agent: PPOAgent, config: TrainConfig, place: Path) -> None:
    """Refuse an agent that was made with other settings than the run's."""
    held, buffer = agent.config, agent.buffer
    annealed = replace(config.ppo, entropy_coef=held.entropy_coef, learning_rate=held.learning_rate)
    ours = {
        "environments": config.envs // config.processes,
        "steps": config.horizon,
        "lstm": config.lstm,
        "seed": config.seed,
        "ppo": annealed,
    }
    theirs = {
        "environments": buffer.envs,
        "steps": buffer.steps,
        "lstm": buffer.lstm_hidden_dim,
        "seed": agent.seed,
        "ppo": held,
    }
    wrong = [name for name in ours if ours[name] != theirs[name]]
    if wrong:
        raise ArchiveError(
            f"{place} was made with other settings than the run's",
            given=", ".join(wrong),
            fix="remove this checkpoint to resume from the one before",
        )


def stored_controls(state: Archive) -> dict[str, Tensor]:
    """The controls that were measured."""
    curves = {
        name.removeprefix(CONTROL): tensor
        for name, tensor in state.tensors.items()
        if name.startswith(CONTROL)
    }
    if any(curve.dtype != torch.float64 for curve in curves.values()):
        raise TypeError("controls are not float64")
    return curves


def stored_numbers(state: Archive, envs: int) -> Tensor:
    """[E]: which episode each environment is in."""
    numbers = state.tensors["number"]
    if numbers.shape != (envs,) or numbers.dtype != torch.int64:
        raise ValueError(f"no number for each of {envs} environments")
    return numbers


def stored_score(state: Archive) -> float | None:
    """The best evaluation so far."""
    best: float | None = state.notes["best"]
    if best is not None and type(best) is not float:
        raise TypeError("the best score is not a number")
    return best
