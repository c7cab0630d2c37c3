"""The one loop: agents act in a vectorised world, record what came of it, and learn.

Shapes: `E` environments, `K` of them one agent's, `F` features, `H` heads.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import fields
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from esper.leyline import ActionSpace, Legality, PPOUpdateMetrics
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


class Seat(NamedTuple):
    """An agent and the environments it decides for."""

    agent: PPOAgent
    rows: Tensor | None = None  # [K]; None: all of the world's


Steer = Callable[[Legality, Tensor], Tensor]
Listen = Callable[[int, Sequence[Decision], Outcome], None]


def roll_out(
    seats: Sequence[Seat],
    world: VectorWorld,
    observations: Tensor,
    *,
    steer: Steer = lambda legality, actions: actions,
    listen: Listen = lambda step, decisions, outcome: None,
    phase: Callable[[str], AbstractContextManager[None]] = lambda name: nullcontext(),
) -> Tensor:
    """Fill the agents' buffers; returns the observations [E, F] to go on from.

    `steer` may put other actions [E, H] in the place of those that were drawn. `listen` is told
    every step, and `phase` is entered around deciding, stepping and telling.
    """
    buffer = seats[0].agent.buffer
    for step in range(buffer.longest, buffer.steps):
        with phase("decide"):
            legality = world.legal()
            decisions = [_decide(seat, observations, legality) for seat in seats]
            actions = steer(legality, _joined(seats, decisions, world))
        with phase("step"):
            outcome = world.step(actions)
        for seat, decision in zip(seats, decisions, strict=True):
            seat.agent.record(decision, _part(outcome, seat.rows))
        observations = outcome.observations
        with phase("tell"):
            listen(step, decisions, outcome)
    for agent, rows in seats:
        agent.finish(observations if rows is None else observations[rows])
    return observations


def _decide(seat: Seat, observations: Tensor, legality: Legality) -> Decision:
    if seat.rows is None:
        return seat.agent.act(observations, legality)
    return seat.agent.act(observations[seat.rows], legality.rows(seat.rows))


def _joined(seats: Sequence[Seat], decisions: Sequence[Decision], world: VectorWorld) -> Tensor:
    """[E, H]: everyone's actions; those of one agent with all environments stay where they are."""
    if len(seats) == 1 and seats[0].rows is None:
        return decisions[0].actions
    actions = torch.zeros(world.envs, len(world.space), dtype=torch.int64)
    for seat, decision in zip(seats, decisions, strict=True):
        actions[seat.rows] = decision.actions.cpu()
    return actions


def _part(outcome: Outcome, rows: Tensor | None) -> Outcome:
    """What came of one agent's environments."""
    if rows is None:
        return outcome

    def taken(tensor: Any) -> Any:
        return None if tensor is None else tensor[rows]

    return Outcome(*(taken(getattr(outcome, each.name)) for each in fields(Outcome)))


def collect(agent: PPOAgent, world: VectorWorld, observations: Tensor) -> Tensor:
    """Fill one agent's buffer; returns the observations [E, F] to go on from."""
    return roll_out([Seat(agent)], world, observations)


def train(
    agent: PPOAgent,
    world: VectorWorld,
    steps: int,
    after_update: Callable[[int, PPOUpdateMetrics], bool] = lambda steps, metrics: False,
) -> int:
    """Train for about `steps` steps of all environments of all processes, in whole rollouts.

    `after_update` is told the steps taken and the metrics; it ends the training by returning true.
    """
    observations = world.reset()
    taken = 0
    while taken < steps:
        observations = collect(agent, world, observations)
        metrics = agent.update()
        taken += metrics["valid_steps"]
        if after_update(taken, metrics):
            break
    return taken
