"""Tasks of others' kind for `foreign.py`: environments of Gymnasium's, written from descriptions.

Each says which of memory, masks and several heads it needs. An illegal action is never an error
here: it is a wrong one, so that learners without masks can play too.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from math import inf
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from tests.simic.gym.environments import MaskedIdentity

Env = gymnasium.Env[Any, Any]


class Repeat(Env):
    """Cards of four suits in a shuffled deck: name the one `back` steps ago, or the first one.

    With several decks one head names the card of each (POPGym's RepeatPrevious and RepeatFirst).
    """

    CARDS, SUITS = 52, 4

    def __init__(self, back: int | None, decks: int = 1) -> None:
        self.back, self.decks = back, decks
        several = spaces.MultiDiscrete([self.SUITS] * decks)
        self.observation_space = self.action_space = (
            several if decks > 1 else spaces.Discrete(self.SUITS)
        )

    def seen(self) -> Any:
        cards = self.cards[:, min(self.age, self.CARDS - 1)]
        return cards.copy() if self.decks > 1 else int(cards[0])

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        deck = np.arange(self.CARDS) % self.SUITS
        self.cards = np.stack([self.np_random.permutation(deck) for _ in range(self.decks)])
        self.age = 0
        return self.seen(), {}

    def step(self, action: Any) -> Any:
        asked = 0 if self.back is None else self.age - self.back
        paid = 0.0
        if asked >= 0:
            right = np.mean(np.atleast_1d(action) == self.cards[:, asked])
            paid = float(2 * right - 1) / (self.CARDS - (self.back or 0))
        self.age += 1
        return self.seen(), paid, self.age == self.CARDS, False, {}


class RankedBandit(Env):
    """A ranking of the arms is shown once; then the best of the few arms that are open is to be
    pulled, others at each step. What is paid is the share of open arms that are worse."""

    ARMS, OPEN, LENGTH = 6, 3, 16

    def __init__(self) -> None:
        self.action_space = spaces.Discrete(self.ARMS)
        self.observation_space = spaces.Box(0, 1, (self.ARMS + 1,), np.float32)

    def action_masks(self) -> Any:
        return self.mask

    def seen(self) -> Any:
        open_ = self.np_random.choice(self.ARMS, self.OPEN, replace=False)
        self.mask = np.isin(np.arange(self.ARMS), open_)
        shown = self.rank / (self.ARMS - 1) if self.age == 0 else np.zeros(self.ARMS)
        return np.array([*shown, self.age == 0], np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.rank, self.age = self.np_random.permutation(self.ARMS), 0
        return self.seen(), {}

    def step(self, action: Any) -> Any:
        worse = np.sum(self.rank[self.mask] < self.rank[action]) / (self.OPEN - 1)
        paid = float(worse) / self.LENGTH if self.mask[action] else 0.0
        self.age += 1
        return self.seen(), paid, self.age == self.LENGTH, False, {}


class Strides(Env):
    """A walk to a goal on a board with walls: a direction and a stride of one to three squares.

    A direction is legal where its next square is free; a wall stops a stride. The last square pays
    1, and every step costs a little.
    """

    SIZE, LIMIT = 7, 40
    MOVES = np.array([[0, 1], [1, 0], [0, -1], [-1, 0]])

    def __init__(self) -> None:
        self.action_space = spaces.MultiDiscrete([4, 3])
        self.observation_space = spaces.Box(-1, 1, (8,), np.float32)
        self.walls = np.zeros((self.SIZE, self.SIZE), bool)
        self.walls[[1, 1, 3, 3, 5, 5], [1, 5, 2, 4, 1, 5]] = True

    def free(self, place: Any) -> bool:
        return bool((place >= 0).all() and (place < self.SIZE).all() and not self.walls[*place])

    def action_masks(self) -> Any:
        return np.array([*(self.free(self.place + move) for move in self.MOVES), True, True, True])

    def seen(self) -> Any:
        apart = (self.goal - self.place) / self.SIZE
        here = 2 * self.place / (self.SIZE - 1) - 1
        return np.array([*apart, *here, *self.action_masks()[:4]], np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        places = self.np_random.permutation(np.argwhere(~self.walls))
        self.place, self.goal, self.age = places[0], places[1], 0
        return self.seen(), {}

    def step(self, action: Any) -> Any:
        for _ in range(int(action[1]) + 1):
            if self.free(self.place + self.MOVES[action[0]]):
                self.place = self.place + self.MOVES[action[0]]
        self.age += 1
        there = bool((self.place == self.goal).all())
        return self.seen(), there - 0.02, there, self.age == self.LIMIT and not there, {}


class Locks(Env):
    """Three doors, each with a digit that is shown once: choose a door that is still closed, and
    its digit. A door opens whatever the digit; the right one pays a third."""

    DOORS, DIGITS, WAIT = 3, 4, 3

    def __init__(self) -> None:
        self.action_space = spaces.MultiDiscrete([self.DOORS, self.DIGITS])
        self.observation_space = spaces.MultiDiscrete([self.DIGITS + 1] * self.DOORS)

    def action_masks(self) -> Any:
        waits = self.age < self.WAIT
        return np.array([*(self.closed | waits), *[True] * self.DIGITS])

    def seen(self) -> Any:
        return self.code + 1 if self.age == 0 else np.zeros(self.DOORS, np.int64)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.code = self.np_random.integers(self.DIGITS, size=self.DOORS)
        self.closed, self.age = np.ones(self.DOORS, bool), 0
        return self.seen(), {}

    def step(self, action: Any) -> Any:
        door, digit = (int(each) for each in action)
        paid = 0.0
        if self.age >= self.WAIT and self.closed[door]:
            paid = float(digit == self.code[door]) / self.DOORS
            self.closed[door] = False
        self.age += 1
        return self.seen(), paid, self.age == self.WAIT + self.DOORS, False, {}


def blind_cartpole() -> Env:
    """A pole to be balanced without seeing velocities, for at most 500 steps."""
    env = gymnasium.make("CartPole-v1")
    box = env.observation_space
    shown = spaces.Box(box.low[[0, 2]], box.high[[0, 2]])  # type: ignore[attr-defined]
    return gymnasium.wrappers.TransformObservation(env, lambda seen: seen[[0, 2]], shown)


@dataclass(frozen=True, kw_only=True)
class Task:
    make: Callable[[], Env]
    needs: tuple[str, ...] = ()  # of memory, masks, heads
    steps: int
    gamma: float = 0.99  # part of the task: all learners have it
    bar: float  # a greedy return that counts as learned
    most: float = inf  # the greatest return that there is, if it can be reached
    masked: bool = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "masked", "masks" in self.needs)


# What network and presets of `esper.rl` were chosen by, by their returns or their processor time;
# the other one was looked at beside them, but nothing was chosen by it.
CHOSEN_BY = (
    *("blind_cartpole", "repeat_previous", "repeat_first", "repeat_two", "identity_70"),
    *("identity_heads", "acrobot", "strides", "locks"),
)
MEMORY, MASKS, HEADS = "memory", "masks", "heads"
TASKS = {
    "blind_cartpole": Task(make=blind_cartpole, needs=(MEMORY,), steps=40_000, bar=450, most=500),
    "repeat_previous": Task(
        make=partial(Repeat, 4), needs=(MEMORY,), steps=50_000, bar=0.9, most=1
    ),
    "repeat_first": Task(
        make=partial(Repeat, None), needs=(MEMORY,), steps=40_000, bar=0.9, most=1
    ),
    "identity_70": Task(
        make=partial(MaskedIdentity, spaces.Discrete(70), 55),
        needs=(MASKS,),
        steps=4_096,
        gamma=0.4,
        bar=90,
        most=100,
    ),
    "acrobot": Task(make=partial(gymnasium.make, "Acrobot-v1"), steps=40_000, bar=-150),
    "identity_heads": Task(
        make=partial(MaskedIdentity, spaces.MultiDiscrete([4, 5, 3]), 6),
        needs=(MASKS, HEADS),
        steps=8_192,
        gamma=0.4,
        bar=95,
        most=100,
    ),
    "strides": Task(make=Strides, needs=(MASKS, HEADS), steps=30_000, bar=0.85),
    "ranked_bandit": Task(make=RankedBandit, needs=(MEMORY, MASKS), steps=30_000, bar=0.95, most=1),
    "repeat_two": Task(
        make=partial(Repeat, 2, 2), needs=(MEMORY, HEADS), steps=40_000, bar=0.9, most=1
    ),
    "locks": Task(make=Locks, needs=(MEMORY, MASKS, HEADS), steps=30_000, bar=0.95, most=1),
}
