"""Small environments of Gymnasium's with known answers."""

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces


class MaskedIdentity(gymnasium.Env[Any, Any]):
    """Shows a choice of all heads, to be repeated; all but `legal` other actions are closed.

    The rules of sb3-contrib's environments for invalid actions, with a random stream of its own.
    """

    def __init__(self, space: Any, illegal: int, length: int = 100) -> None:
        self.action_space = self.observation_space = space
        sizes = space.nvec if isinstance(space, spaces.MultiDiscrete) else [space.n]
        self.sizes = [2] * space.n if isinstance(space, spaces.MultiBinary) else list(sizes)
        self.illegal, self.length = illegal, length

    def _show(self) -> Any:
        chosen = [int(self.np_random.integers(size)) for size in self.sizes]
        single = isinstance(self.action_space, spaces.Discrete)
        self.shown: Any = chosen[0] if single else np.array(chosen, self.action_space.dtype)
        first = np.cumsum([0, *self.sizes[:-1]])
        others = np.setdiff1d(np.arange(sum(self.sizes)), first + chosen)
        self.mask = np.ones(sum(self.sizes), bool)
        self.mask[self.np_random.choice(others, self.illegal, replace=False)] = False
        return self.shown

    def action_masks(self) -> Any:
        return self.mask

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.age = 0
        return self._show(), {}

    def step(self, action: Any) -> Any:
        right = float(np.all(action == self.shown))
        self.age += 1
        return self._show(), right, False, self.age == self.length, {}


class Countdown(gymnasium.Env[Any, Any]):
    """Lasts as long as the first observation says; pays 1 a step for the action that was shown
    first, which is not shown again."""

    observation_space = spaces.Box(-10, 10, (2,), np.float32)
    action_space = spaces.Discrete(2, start=3)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.left, self.right = (int(self.np_random.integers(low, 4)) for low in (1, 2))
        self.right += 1  # 3 or 4
        return np.array([self.left, 2 * self.right - 7], np.float32), {}

    def step(self, action: Any) -> Any:
        self.left -= 1
        seen = np.array([self.left, 0], np.float32)
        return seen, float(action == self.right), self.left == 0, False, {}
