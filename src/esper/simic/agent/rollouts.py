"""The loop: an agent acts in a vectorised world, records what came of it, and learns.

Shapes: `E` environments, `F` features, `H` heads.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

from torch import Tensor

from esper.leyline import ActionSpace, AgreementError, Legality
from esper.simic.agent.ppo import PPOAgent
from esper.simic.agent.types import Decision, Outcome


class VectorWorld(Protocol):
    """E environments that step together and start anew by themselves."""

    @property
    def space(self) -> ActionSpace: ...
    @property
    def state_dim(self) -> int: ...
    @property
    def envs(self) -> int: ...
    def reset(self) -> Tensor:
        """First observations, [E, F] float32."""
        ...

    def legal(self) -> Legality:
        """What may be done now."""
        ...

    def step(self, actions: Tensor) -> Outcome:
        """What comes of actions [E, H]."""
        ...


def collect(
    agent: PPOAgent,
    world: VectorWorld,
    observations: Tensor,
    *,
    listen: Callable[[int, Decision, Outcome], None] = lambda step, decision, outcome: None,
    phase: Callable[[str], AbstractContextManager[None]] = lambda name: nullcontext(),
) -> Tensor:
    """Fill the agent's buffer; returns the observations [E, F] to go on from.

    `listen` is told every step, and `phase` is entered around deciding, stepping and telling.
    """
    for what in ("space", "state_dim", "envs"):
        if (ours := getattr(agent.buffer, what)) != (theirs := getattr(world, what)):
            given = f"the agent's {what} is {ours}, the world's {theirs}"
            raise AgreementError("The agent was built for another world", given=given)
    for step in range(agent.buffer.longest, agent.buffer.steps):
        with phase("decide"):
            decision = agent.act(observations, world.legal())
        with phase("step"):
            outcome = world.step(decision.actions)
        agent.record(decision, outcome)
        observations = outcome.observations
        with phase("tell"):
            listen(step, decision, outcome)
    agent.finish(observations)
    return observations
