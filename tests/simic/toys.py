"""Small vectorised worlds with known optimal policies and values.

Shapes: `E` environments, `F` features, `H` heads.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from esper.leyline import ActionSpace, Legality, PPOUpdateMetrics
from esper.simic.agent import Outcome, PPOAgent, collect
from esper.simic.contracts import VectorWorld
from esper.tamiyo import independent_heads
from tests.tamiyo.spaces import esper_space, random_legality

AfterUpdate = Callable[[int, PPOUpdateMetrics], bool | None]


def _continue_training(steps_taken: int, metrics: PPOUpdateMetrics) -> bool:
    return False


def train(
    agent: PPOAgent,
    world: VectorWorld,
    steps: int,
    after_update: AfterUpdate = _continue_training,
) -> int:
    """Alternate rollouts and updates.

    Args:
        agent: The agent.
        world: Its environments.
        steps: Stop after this number of steps of all environments.
        after_update: Called with the steps so far and the metrics; returns True to stop.

    Returns:
        The number of steps taken.
    """
    observations = world.reset()
    agent.reset()
    steps_taken = 0
    while steps_taken < steps:
        observations = collect(agent, world, observations)
        metrics = agent.update()
        steps_taken += metrics["valid_steps"]
        if after_update(steps_taken, metrics):
            break
    return steps_taken


class Toy:
    """`E` environments with a random generator. All actions are legal unless a subclass masks some.

    `correct` [E] holds, after a step, the share of correct actions of each environment.
    """

    action_space: ActionSpace
    state_dim: int
    correct: Tensor

    def __init__(self, num_envs: int, seed: int) -> None:
        self.num_envs = num_envs
        self.generator = torch.Generator().manual_seed(seed)

    def legal(self) -> Legality:
        return Legality(self.action_space, self.num_envs, {})

    def random_integers(self, high: int, *shape: int) -> Tensor:
        return torch.randint(high, shape, generator=self.generator)

    def outcome(
        self,
        observations: Tensor,
        rewards: Tensor,
        terminals: Tensor | bool,
        truncations: Tensor | bool = False,
        final_observations: Tensor | None = None,
    ) -> Outcome:
        """Return an outcome; a flag that is not a tensor holds for every environment."""
        return Outcome(
            observations,
            rewards,
            torch.as_tensor(terminals).expand(self.num_envs),
            torch.as_tensor(truncations).expand(self.num_envs),
            final_observations,
        )


class Identity(Toy):
    """Every step shows a digit for each head; the reward is the share of digits repeated."""

    def __init__(self, num_envs: int, seed: int, sizes: tuple[int, ...] = (4, 4, 4)) -> None:
        super().__init__(num_envs, seed)
        self.action_space = independent_heads(sizes)
        self.sizes = sizes
        self.state_dim = sum(sizes)

    def reset(self) -> Tensor:
        digits = [self.random_integers(size, self.num_envs) for size in self.sizes]
        self.answer = torch.stack(digits, dim=1)  # [E, H]
        encoded = [one_hot(digit, size) for digit, size in zip(digits, self.sizes, strict=True)]
        return torch.cat(encoded, dim=1).float()

    def step(self, actions: Tensor) -> Outcome:
        self.correct = (actions == self.answer).float().mean(1)
        return self.outcome(self.reset(), self.correct, terminals=True)


class ManyIllegal(Toy):
    """70 actions of which 55 are illegal in each step; one legal action is correct."""

    NUM_ACTIONS = 70
    NUM_LEGAL = 15
    NUM_KINDS = 10

    def __init__(self, num_envs: int, seed: int) -> None:
        super().__init__(num_envs, seed)
        self.action_space = independent_heads((self.NUM_ACTIONS,))
        self.state_dim = self.NUM_KINDS
        self.illegal_actions_taken = 0

    def reset(self) -> Tensor:
        kind = self.random_integers(self.NUM_KINDS, self.num_envs)
        self.answer = kind * 7  # [E]
        # Choose the legal actions at random; the correct one is among them.
        priority = torch.rand(self.num_envs, self.NUM_ACTIONS, generator=self.generator)
        priority[torch.arange(self.num_envs), self.answer] = 2.0
        self.mask = torch.zeros(self.num_envs, self.NUM_ACTIONS, dtype=torch.bool)
        self.mask.scatter_(1, priority.topk(self.NUM_LEGAL, 1).indices, True)
        return one_hot(kind, self.NUM_KINDS).float()

    def legal(self) -> Legality:
        return Legality(self.action_space, self.num_envs, {self.action_space.names[0]: self.mask})

    def step(self, actions: Tensor) -> Outcome:
        self.illegal_actions_taken += int((~self.mask.gather(1, actions)).sum())
        self.correct = (actions[:, 0] == self.answer).float()
        return self.outcome(self.reset(), self.correct, terminals=True)


class RememberCue(Toy):
    """A cue is shown in the first step; it is the correct action there and in the next 20 steps.

    The environments begin at different steps of their episodes and do not end together.
    """

    NUM_CUES = 4
    DELAY = 20

    def __init__(self, num_envs: int, seed: int) -> None:
        super().__init__(num_envs, seed)
        self.action_space = independent_heads((self.NUM_CUES,))
        self.state_dim = self.NUM_CUES

    def reset(self) -> Tensor:
        self.age = self.random_integers(self.DELAY, self.num_envs)
        self.cue = self.random_integers(self.NUM_CUES, self.num_envs)
        return one_hot(self.cue, self.NUM_CUES).float()

    def step(self, actions: Tensor) -> Outcome:
        self.correct = (actions[:, 0] == self.cue).float()
        episode_ends = self.age == self.DELAY
        self.age = torch.where(episode_ends, 0, self.age + 1)
        new_cue = self.random_integers(self.NUM_CUES, self.num_envs)
        self.cue = torch.where(episode_ends, new_cue, self.cue)
        observations = one_hot(self.cue, self.NUM_CUES).float() * episode_ends[:, None]
        return self.outcome(observations, self.correct, terminals=episode_ends)


class Endless(Toy):
    """State A pays 1 in every step; episodes are truncated every `TRUNCATED_AFTER` steps."""

    TRUNCATED_AFTER = 10
    A = 0
    B = 1

    def __init__(self, num_envs: int, seed: int) -> None:
        super().__init__(num_envs, seed)
        self.action_space = independent_heads((2,))
        self.state_dim = 2
        self.episode_lengths = torch.full((num_envs,), self.TRUNCATED_AFTER)

    def observe(self, age: Tensor) -> Tensor:
        return one_hot(torch.full_like(age, self.A), self.state_dim).float()

    def reset(self) -> Tensor:
        self.age = torch.zeros(self.num_envs, dtype=torch.int64)
        return self.observe(self.age)

    def step(self, actions: Tensor) -> Outcome:
        rewards = torch.where(self.observe(self.age)[:, self.B] > 0, 3.0, 1.0)
        final_observations = self.observe(self.age + 1)
        truncations = self.age + 1 == self.episode_lengths
        self.age = torch.where(truncations, 0, self.age + 1)
        observations = self.observe(self.age)
        return self.outcome(observations, rewards, False, truncations, final_observations)


class EndlessWithIncrease(Endless):
    """After `TRUNCATED_AFTER` steps A turns into B, which pays 3 in every step.

    Half of the environments are truncated at this step: only their final observation shows B. The
    other half continues for as many steps, so that the network has seen B after a memory of A.
    """

    def __init__(self, num_envs: int, seed: int) -> None:
        super().__init__(num_envs, seed)
        self.episode_lengths[num_envs // 2 :] = 2 * self.TRUNCATED_AFTER

    def observe(self, age: Tensor) -> Tensor:
        state = torch.where(age < self.TRUNCATED_AFTER, self.A, self.B)
        return one_hot(state, self.state_dim).float()


class OpArguments(Toy):
    """WAIT or one of four ops, each with a separate argument; the reward is noisy.

    The state names the correct op and the correct argument. With `causal=False`, the arguments of
    ops that were not chosen are sampled and learned from as well.
    """

    NUM_OPS = 4
    NUM_ARGUMENTS = 8
    NOISE = 0.5

    def __init__(self, num_envs: int, seed: int, causal: bool = True) -> None:
        super().__init__(num_envs, seed)
        relevance = []
        for op in range(self.NUM_OPS + 1):
            arguments = [not causal or op == number + 1 for number in range(self.NUM_OPS)]
            relevance.append((True, *arguments))
        self.action_space = ActionSpace(
            names=("op", *(f"argument{op}" for op in range(self.NUM_OPS))),
            sizes=(self.NUM_OPS + 1, *(self.NUM_ARGUMENTS,) * self.NUM_OPS),
            relevance=tuple(relevance),
            given=((),) * (self.NUM_OPS + 1),
        )
        self.state_dim = self.NUM_OPS + self.NUM_ARGUMENTS

    def reset(self) -> Tensor:
        self.op = self.random_integers(self.NUM_OPS, self.num_envs) + 1
        self.argument = self.random_integers(self.NUM_ARGUMENTS, self.num_envs)
        encoded = (one_hot(self.op - 1, self.NUM_OPS), one_hot(self.argument, self.NUM_ARGUMENTS))
        return torch.cat(encoded, dim=1).float()

    def step(self, actions: Tensor) -> Outcome:
        argument_of_correct_op = actions.gather(1, self.op[:, None])[:, 0]
        is_op_correct = actions[:, 0] == self.op
        self.correct = (is_op_correct & (argument_of_correct_op == self.argument)).float()
        noise = self.NOISE * torch.randn(self.num_envs, generator=self.generator)
        rewards = torch.where(actions[:, 0] == 0, 0.0, self.correct + noise)
        return self.outcome(self.reset(), rewards, terminals=True)


class Noise(Toy):
    """Esper's heads; random states, rewards and masks; episodes end or are truncated at random."""

    def __init__(
        self,
        num_envs: int,
        seed: int,
        end_rate: float = 0.1,
        action_space: ActionSpace | None = None,
    ) -> None:
        super().__init__(num_envs, seed)
        self.action_space = action_space or esper_space()
        self.state_dim = 5
        self.end_rate = end_rate

    def reset(self) -> Tensor:
        return torch.randn(self.num_envs, self.state_dim, generator=self.generator)

    def legal(self) -> Legality:
        return random_legality(self.action_space, self.num_envs, self.generator)

    def step(self, actions: Tensor) -> Outcome:
        episode_ends = torch.rand(self.num_envs, generator=self.generator) < self.end_rate
        is_truncated = torch.rand(self.num_envs, generator=self.generator) < 0.5
        rewards = torch.randn(self.num_envs, generator=self.generator) + (actions[:, 0] == 1)
        return self.outcome(
            self.reset(),
            rewards,
            terminals=episode_ends & ~is_truncated,
            truncations=episode_ends & is_truncated,
            final_observations=self.reset(),
        )
