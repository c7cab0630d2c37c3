"""Small vectorised worlds with known answers.

Shapes: `E` environments, `F` features, `H` heads.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from esper.leyline import ActionSpace, Legality, PPOUpdateMetrics
from esper.simic.agent import Outcome, PPOAgent, VectorWorld, collect
from esper.tamiyo import independent_heads
from tests.tamiyo.spaces import esper_space, random_legality


def train(
    agent: PPOAgent,
    world: VectorWorld,
    steps: int,
    after_update: Callable[[int, PPOUpdateMetrics], bool | None] = lambda steps, metrics: None,
) -> int:
    """Rollouts and updates with the agent's own settings, until told that it is enough."""
    observations, taken = world.reset(), 0
    agent.begin()
    while taken < steps:
        observations = collect(agent, world, observations)
        metrics = agent.update()
        taken += metrics["valid_steps"]
        if after_update(taken, metrics):
            break
    return taken


class Toy:
    """E environments with their own random stream; every action is legal unless said."""

    space: ActionSpace
    state_dim: int

    def __init__(self, envs: int, seed: int) -> None:
        self.envs = envs
        self.draw = torch.Generator().manual_seed(seed)

    def legal(self) -> Legality:
        return Legality(self.space, self.envs, {})

    def random(self, high: int, *shape: int) -> Tensor:
        return torch.randint(high, shape, generator=self.draw)

    def outcome(
        self,
        observations: Tensor,
        rewards: Tensor,
        terminals: Tensor | bool,
        truncations: Tensor | bool = False,
        final: Tensor | None = None,
    ) -> Outcome:
        def flags(value: Tensor | bool) -> Tensor:
            return torch.as_tensor(value).expand(self.envs)

        return Outcome(observations, rewards, flags(terminals), flags(truncations), final)


class Identity(Toy):
    """Every step shows a digit for each head; the reward is the fraction repeated."""

    def __init__(self, envs: int, seed: int, sizes: tuple[int, ...] = (4, 4, 4)) -> None:
        super().__init__(envs, seed)
        self.space = independent_heads(sizes)
        self.sizes = sizes
        self.state_dim = sum(sizes)

    def reset(self) -> Tensor:
        shown = [self.random(size, self.envs) for size in self.sizes]
        self.answer = torch.stack(shown, 1)  # [E, H]
        digits = [one_hot(digit, size) for digit, size in zip(shown, self.sizes, strict=True)]
        return torch.cat(digits, 1).float()

    def step(self, actions: Tensor) -> Outcome:
        self.correct = (actions == self.answer).float().mean(1)
        return self.outcome(self.reset(), self.correct, terminals=True)


class ManyIllegal(Toy):
    """70 actions, 55 of them illegal at each step; one of the legal ones is right."""

    ACTIONS, LEGAL, KINDS = 70, 15, 10

    def __init__(self, envs: int, seed: int) -> None:
        super().__init__(envs, seed)
        self.space = independent_heads((self.ACTIONS,))
        self.state_dim = self.KINDS
        self.illegal_taken = 0

    def reset(self) -> Tensor:
        kind = self.random(self.KINDS, self.envs)
        self.answer = kind * 7  # [E]
        order = torch.rand(self.envs, self.ACTIONS, generator=self.draw)
        order[torch.arange(self.envs), self.answer] = 2.0
        self.mask = torch.zeros(self.envs, self.ACTIONS, dtype=torch.bool)
        self.mask.scatter_(1, order.topk(self.LEGAL, 1).indices, True)
        return one_hot(kind, self.KINDS).float()

    def legal(self) -> Legality:
        return Legality(self.space, self.envs, {self.space.names[0]: self.mask})

    def step(self, actions: Tensor) -> Outcome:
        self.illegal_taken += int((~self.mask.gather(1, actions)).sum())
        self.correct = (actions[:, 0] == self.answer).float()
        return self.outcome(self.reset(), self.correct, terminals=True)


class RememberCue(Toy):
    """A cue is shown in the first step only; it is to be named then and in the 20 steps after.

    The environments begin in different places of their episodes and do not end all together.
    """

    CUES, DELAY = 4, 20

    def __init__(self, envs: int, seed: int) -> None:
        super().__init__(envs, seed)
        self.space = independent_heads((self.CUES,))
        self.state_dim = self.CUES

    def reset(self) -> Tensor:
        self.age = self.random(self.DELAY, self.envs)
        self.cue = self.random(self.CUES, self.envs)
        return one_hot(self.cue, self.CUES).float()

    def step(self, actions: Tensor) -> Outcome:
        self.correct = (actions[:, 0] == self.cue).float()
        ended = self.age == self.DELAY
        self.age = torch.where(ended, 0, self.age + 1)
        self.cue = torch.where(ended, self.random(self.CUES, self.envs), self.cue)
        shown = one_hot(self.cue, self.CUES).float() * ended[:, None]
        return self.outcome(shown, self.correct, terminals=ended)


class ForEver(Toy):
    """State A pays 1 for ever and is cut from outside every `CUT` steps."""

    CUT = 10
    A, B = 0, 1

    def __init__(self, envs: int, seed: int) -> None:
        super().__init__(envs, seed)
        self.space = independent_heads((2,))
        self.state_dim = 2
        self.lengths = torch.full((envs,), self.CUT)

    def show(self, age: Tensor) -> Tensor:
        return one_hot(torch.full_like(age, self.A), self.state_dim).float()

    def reset(self) -> Tensor:
        self.age = torch.zeros(self.envs, dtype=torch.int64)
        return self.show(self.age)

    def step(self, actions: Tensor) -> Outcome:
        rewards = torch.where(self.show(self.age)[:, self.B] > 0, 3.0, 1.0)
        final = self.show(self.age + 1)
        cut = self.age + 1 == self.lengths
        self.age = torch.where(cut, 0, self.age + 1)
        return self.outcome(self.show(self.age), rewards, False, cut, final)


class ForEverThenMore(ForEver):
    """After `CUT` steps A turns into B, which pays 3 for ever.

    Half of the environments are cut just then: only their final observation shows B. The other
    half goes on for as long again, so that a memory of A followed by B is nothing unheard of.
    """

    def __init__(self, envs: int, seed: int) -> None:
        super().__init__(envs, seed)
        self.lengths[envs // 2 :] = 2 * self.CUT

    def show(self, age: Tensor) -> Tensor:
        return one_hot(torch.where(age < self.CUT, self.A, self.B), self.state_dim).float()


class OpArguments(Toy):
    """WAIT or one of four ops, each with an 8-way argument of its own; the reward is noisy.

    The state names the right op and the right argument. Without `causal`, arguments of ops that
    were not chosen are sampled and learned from as well.
    """

    OPS, ARGUMENTS, NOISE = 4, 8, 0.5

    def __init__(self, envs: int, seed: int, causal: bool = True) -> None:
        super().__init__(envs, seed)
        ops = range(self.OPS + 1)
        self.space = ActionSpace(
            names=("op", *(f"argument{op}" for op in range(self.OPS))),
            sizes=(self.OPS + 1, *(self.ARGUMENTS,) * self.OPS),
            relevance=tuple(
                (True, *(not causal or op == own + 1 for own in range(self.OPS))) for op in ops
            ),
            given=((),) * (self.OPS + 1),
        )
        self.state_dim = self.OPS + self.ARGUMENTS

    def reset(self) -> Tensor:
        self.op = self.random(self.OPS, self.envs) + 1
        self.argument = self.random(self.ARGUMENTS, self.envs)
        shown = (one_hot(self.op - 1, self.OPS), one_hot(self.argument, self.ARGUMENTS))
        return torch.cat(shown, 1).float()

    def step(self, actions: Tensor) -> Outcome:
        chosen = actions.gather(1, self.op[:, None])[:, 0]  # the argument of the right op
        self.correct = ((actions[:, 0] == self.op) & (chosen == self.argument)).float()
        noise = self.NOISE * torch.randn(self.envs, generator=self.draw)
        rewards = torch.where(actions[:, 0] == 0, 0.0, self.correct + noise)
        return self.outcome(self.reset(), rewards, terminals=True)


class Noise(Toy):
    """Esper's heads, random states, rewards and masks; episodes end or are cut at random."""

    def __init__(self, envs: int, seed: int, end_rate: float = 0.1) -> None:
        super().__init__(envs, seed)
        self.space = esper_space()
        self.state_dim = 5
        self.end_rate = end_rate

    def reset(self) -> Tensor:
        return torch.randn(self.envs, self.state_dim, generator=self.draw)

    def legal(self) -> Legality:
        return random_legality(self.space, self.envs, self.draw)

    def step(self, actions: Tensor) -> Outcome:
        ended = torch.rand(self.envs, generator=self.draw) < self.end_rate
        cut = torch.rand(self.envs, generator=self.draw) < 0.5
        rewards = torch.randn(self.envs, generator=self.draw) + (actions[:, 0] == 1)
        return self.outcome(self.reset(), rewards, ended & ~cut, ended & cut, self.reset())
