"""Small Gymnasium environments with known optimal actions."""

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces


class MaskedIdentity(gymnasium.Env[Any, Any]):
    """Shows one action for each head, which is the correct one; some other actions are illegal.

    The rules are those of sb3-contrib's environments for invalid actions.
    """

    def __init__(self, space: Any, num_illegal: int, length: int = 100) -> None:
        self.action_space = self.observation_space = space
        if isinstance(space, spaces.MultiBinary):
            self.sizes = [2] * space.n
        elif isinstance(space, spaces.MultiDiscrete):
            self.sizes = list(space.nvec)
        else:
            self.sizes = [space.n]
        self.num_illegal = num_illegal
        self.length = length

    def _observe(self) -> Any:
        correct = [int(self.np_random.integers(size)) for size in self.sizes]
        is_single = isinstance(self.action_space, spaces.Discrete)
        self.correct: Any = correct[0] if is_single else np.array(correct, self.action_space.dtype)
        first_of_head = np.cumsum([0, *self.sizes[:-1]])
        wrong = np.setdiff1d(np.arange(sum(self.sizes)), first_of_head + correct)
        self.mask = np.ones(sum(self.sizes), bool)
        self.mask[self.np_random.choice(wrong, self.num_illegal, replace=False)] = False
        return self.correct

    def action_masks(self) -> Any:
        return self.mask

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.age = 0
        return self._observe(), {}

    def step(self, action: Any) -> Any:
        reward = float(np.all(action == self.correct))
        self.age += 1
        return self._observe(), reward, False, self.age == self.length, {}


class Countdown(gymnasium.Env[Any, Any]):
    """Episodes of one to three steps; the first observation shows their length.

    The first observation also shows the correct action of all steps, and later ones do not.
    """

    observation_space = spaces.Box(-10, 10, (2,), np.float32)
    action_space = spaces.Discrete(2, start=3)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.steps_left = int(self.np_random.integers(1, 4))
        self.correct = int(self.np_random.integers(2, 4)) + 1  # 3 or 4
        return np.array([self.steps_left, 2 * self.correct - 7], np.float32), {}

    def step(self, action: Any) -> Any:
        self.steps_left -= 1
        observation = np.array([self.steps_left, 0], np.float32)
        return observation, float(action == self.correct), self.steps_left == 0, False, {}
