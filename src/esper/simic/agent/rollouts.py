"""The loop: an agent acts in a vectorised world, records what came of it, and learns.

Shapes: `E` environments, `F` features, `H` heads.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

from torch import Tensor

from esper.leyline import ActionSpace, AgreementError, Legality, PPOUpdateMetrics
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


def require_fitting(agent: PPOAgent, world: VectorWorld) -> None:
    """Refuse a world of another size or with other actions than the agent's."""
    buffer = agent.buffer
    for what, ours, theirs in (
        ("action heads", buffer.space, world.space),
        ("the state's size", buffer.state_dim, world.state_dim),
        ("the number of environments", buffer.envs, world.envs),
    ):
        if ours != theirs:
            raise AgreementError(
                f"The agent does not fit this world: {what}",
                given=f"the agent has {ours}, the world {theirs}",
                fix="build the agent with the world's space, state_dim and envs",
            )


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


def train(
    agent: PPOAgent,
    world: VectorWorld,
    steps: int,
    after_update: Callable[[int, PPOUpdateMetrics], bool] = lambda steps, metrics: False,
) -> int:
    """Train for about `steps` steps of all environments of all processes, in whole rollouts.

    The world starts anew, and so does the agent's memory. `after_update` is told the steps taken
    and the metrics; it ends the training by returning true.
    """
    require_fitting(agent, world)
    observations = world.reset()
    agent.begin()
    taken = 0
    while taken < steps:
        observations = collect(agent, world, observations)
        metrics = agent.update()
        taken += metrics["valid_steps"]
        if after_update(taken, metrics):
            break
    return taken
