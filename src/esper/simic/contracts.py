"""The protocols through which simic uses worlds and hosts, without importing kasmina.

They are satisfied structurally (PEP 544).

Shapes: `E` environments, `F` features, `H` heads.
"""

from collections.abc import Mapping
from typing import Protocol, runtime_checkable

from torch import Tensor

from esper.leyline import ActionSpace, Legality
from esper.leyline.protocols import SeedSlotProtocol, SeedStateProtocol, SlottedHostProtocol
from esper.leyline.results import Outcome

__all__ = [
    "ResumableWorld",
    "SeedSlotProtocol",
    "SeedStateProtocol",
    "SlottedHostProtocol",
    "VectorWorld",
]


@runtime_checkable
class VectorWorld(Protocol):
    """`E` environments that step together; each starts a new episode by itself."""

    @property
    def action_space(self) -> ActionSpace: ...
    @property
    def state_dim(self) -> int: ...
    @property
    def num_envs(self) -> int: ...

    def reset(self) -> Tensor:
        """Start all episodes and return the first observations, [E, F] float32."""
        ...

    def legal(self) -> Legality:
        """Return the legal actions of every environment."""
        ...

    def step(self, actions: Tensor) -> Outcome:
        """Take actions [E, H] and return their outcome."""
        ...


@runtime_checkable
class ResumableWorld(VectorWorld, Protocol):
    """A world whose state between two rollouts can be saved."""

    def state_dict(self) -> Mapping[str, Tensor]:
        """Return the state; its tensors have a row for every environment."""
        ...

    def load_state_dict(self, state: Mapping[str, Tensor]) -> Tensor:
        """Continue from a state and return the first observations, [E, F] float32."""
        ...
