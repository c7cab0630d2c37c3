"""Collecting a rollout: the agent acts in a world and records the outcomes.

Shapes: `E` environments, `F` features.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

from torch import Tensor

from esper.leyline import AgreementError
from esper.simic.agent.ppo import PPOAgent
from esper.simic.agent.types import Decision, Outcome
from esper.simic.contracts import VectorWorld

OnStep = Callable[[int, Decision, Outcome], None]
Phase = Callable[[str], AbstractContextManager[None]]


def _ignore_step(step: int, decision: Decision, outcome: Outcome) -> None:
    pass


def _no_timer(phase: str) -> AbstractContextManager[None]:
    return nullcontext()


def collect(
    agent: PPOAgent,
    world: VectorWorld,
    observations: Tensor,
    *,
    on_step: OnStep = _ignore_step,
    phase: Phase = _no_timer,
) -> Tensor:
    """Fill the agent's buffer and compute advantages and returns.

    Args:
        agent: The agent.
        world: Environments for which the agent was built.
        observations: Current observations of the world, [E, F].
        on_step: Called after each step with its number, the decision and the outcome.
        phase: Context that is entered around each phase: "decide", "step" and "report".

    Returns:
        Observations after the last step, [E, F].

    Raises:
        AgreementError: The agent was built for another world.
    """
    buffer = agent.buffer
    for quantity, of_agent, of_world in (
        ("action heads", buffer.action_space, world.action_space),
        ("state_dim", buffer.state_dim, world.state_dim),
        ("num_envs", buffer.num_envs, world.num_envs),
    ):
        if of_agent != of_world:
            received = f"the agent's {quantity} is {of_agent}, the world's {of_world}"
            raise AgreementError("The agent was built for another world", given=received)
    for step in range(buffer.max_length, buffer.max_steps_per_env):
        with phase("decide"):
            decision = agent.act(observations, world.legal())
        with phase("step"):
            outcome = world.step(decision.actions)
        agent.record(decision, outcome)
        observations = outcome.observations
        with phase("report"):
            on_step(step, decision, outcome)
    agent.bootstrap_and_compute_returns(observations)
    return observations
