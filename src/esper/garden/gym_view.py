"""The garden as Gymnasium environments (extra `gym`), so that other libraries can train in it.

An action is one number for a whole decision; `info["action_mask"]`, or `action_masks()`, says which
are legal. Gymnasium itself knows no masks, so an illegal action is by default refused the way an
environment there refuses: nothing is decided, the row waits, and `info["illegal"]` says so. With
`illegal="raise"` it is an error, for learners that promise to obey masks.

Shapes: `N` rows, `F` features, `A` composite actions.
"""

from dataclasses import replace
from typing import Any, Literal

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space
from numpy.typing import NDArray
from torch import Tensor

from esper.garden.cases import Deal, Draw
from esper.garden.composite_actions import CompositeActions
from esper.garden.environment import Garden, Transition
from esper.garden.suites import find_suite
from esper.leyline.errors import ActionError, UnknownNameError

Array = NDArray[Any]
Illegal = Literal["wait", "raise"]
WAIT = 0  # as a composite action


class _Beds:
    """What both views share: a garden whose rows start anew by themselves, and its spaces."""

    def __init__(self, deal: Deal | str, rows: int, illegal: Illegal, settings: Any) -> None:
        if illegal not in ("wait", "raise"):
            raise UnknownNameError.of("way with illegal actions", illegal, ("wait", "raise"))
        if isinstance(deal, str):
            deal = Draw(contexts=find_suite(deal).training)
        self.garden = Garden(deal, rows, in_place=True, **settings)
        self.actions, self.illegal = CompositeActions(self.garden.space), illegal
        low, high = self.garden.table.bounds()
        self.seen = spaces.Box(low.numpy(), high.numpy(), dtype=np.float32)
        self.chosen = spaces.Discrete(len(self.actions))

    def reset(self, seed: int | None) -> Array:
        """The next episodes or, with a seed, the first ones of another dealing."""
        deal = self.garden.draw
        if seed is not None:
            deal = replace(deal, seed=seed) if isinstance(deal, Draw) else deal
            return _array(self.garden.reset(deal))
        return _array(self.garden.reset())

    def masks(self) -> Array:
        """[N, A] bool"""
        return _array(self.actions.masks(self.garden.legal()))

    def step(self, chosen: Array) -> tuple[Transition, Array]:
        """Decide and train an epoch; also which actions were illegal [N]."""
        numbers = torch.as_tensor(np.asarray(chosen), dtype=torch.int64).reshape(-1)
        legal = self.actions.masks(self.garden.legal())
        asked = self.actions.decode(numbers)  # refuses what is no action at all
        refused = ~legal[torch.arange(len(numbers)), numbers]
        if bool(refused.any()) and self.illegal == "raise":
            row = int(refused.nonzero()[0, 0])
            raise ActionError(
                f"Row {row} was given an illegal action",
                given=f"{int(numbers[row])}: {self.actions.describe(int(numbers[row]))}",
                valid=f"{legal[row].nonzero()[:, 0].tolist()[:12]} …",
                fix='sample from info["action_mask"], or make it with illegal="wait"',
            )
        if bool(refused.any()):
            asked = self.actions.decode(numbers.masked_fill(refused, WAIT))
        return self.garden.step(asked), _array(refused)


def _array(values: Tensor) -> Array:
    """A copy: what was handed out never changes."""
    array: Array = values.numpy().copy()
    return array


def _context_names(step: Transition) -> list[str]:
    return [case.context.name for case in step.cases]


class GardenVectorEnv(VectorEnv[Array, Array, Array]):
    """N environments in one fused population; an episode that ends starts anew in that step.

    `info` has for every row: `action_mask` of the next decision, `illegal`, the `terms` of the
    reward, the `context` and whether the row was `rolled_back`; where an episode ended also
    `final_obs` and `final_info`.
    """

    metadata: dict[str, Any] = {  # noqa: RUF012  # as Gymnasium declares it
        "autoreset_mode": AutoresetMode.SAME_STEP,
        "render_modes": [],
    }

    def __init__(
        self,
        deal: Deal | str = "garden_mlp",
        num_envs: int = 8,
        *,
        illegal: Illegal = "wait",
        **settings: Any,
    ) -> None:
        """`deal`: what gives rows their cases, or the name of a suite whose training contexts do.

        `settings` are the garden's: reward, horizon, device, config, controls.
        """
        self._beds = _Beds(deal, num_envs, illegal, settings)
        self.num_envs = num_envs
        self.single_observation_space = self._beds.seen
        self.single_action_space = self._beds.chosen
        self.observation_space = batch_space(self._beds.seen, num_envs)
        self.action_space = batch_space(self._beds.chosen, num_envs)

    @property
    def garden(self) -> Garden:
        return self._beds.garden

    @property
    def actions(self) -> CompositeActions:
        """What the numbers of actions mean."""
        return self._beds.actions

    def action_masks(self) -> Array:
        """[N, A] bool: what is legal now."""
        return self._beds.masks()

    def reset(
        self,
        *,
        seed: int | list[int | None] | None = None,
        options: dict[str, Any] | None = None,
    ) -> tuple[Array, dict[str, Any]]:
        """All rows start together. A seed is that of the dealing: rows differ by their number."""
        first = seed[0] if isinstance(seed, list) else seed
        super().reset(seed=first, options=options)
        return self._beds.reset(first), self._with_flags({"action_mask": self._int_masks()})

    def step(self, actions: Array) -> tuple[Array, Array, Array, Array, dict[str, Any]]:
        step, refused = self._beds.step(actions)
        told = {
            "illegal": refused,
            "rolled_back": _array(step.epoch.rolled_back),
            "terms": {name: _array(term) for name, term in step.terms.items()},
            "context": np.array(_context_names(step), dtype=object),
        }
        ended = _array(step.terminals)
        info = self._with_flags({"action_mask": self._int_masks(), **told})
        if ended.any():
            assert step.final_observations is not None
            final = np.full(self.num_envs, None, dtype=object)
            for row in np.flatnonzero(ended):
                final[row] = _array(step.final_observations[row])
            info |= {"final_obs": final, "_final_obs": ended.copy()}
            info |= {"final_info": self._with_flags(told, ended), "_final_info": ended.copy()}
        paid = _array(step.rewards.double())
        return _array(step.observations), paid, ended, _array(step.truncations), info

    def _int_masks(self) -> Array:
        return self._beds.masks().astype(np.int8)

    def _with_flags(self, told: dict[str, Any], rows: Array | None = None) -> dict[str, Any]:
        """Beside every entry, as Gymnasium has it, which rows it is there for."""
        there = np.ones(self.num_envs, dtype=np.bool_) if rows is None else rows
        info: dict[str, Any] = {}
        for name, value in told.items():
            info[name] = self._with_flags(value, rows) if isinstance(value, dict) else value
            info[f"_{name}"] = there.copy()
        return info


class GardenEnv(gymnasium.Env[Array, np.int64]):
    """One environment: the garden with a single row."""

    metadata: dict[str, Any] = {"render_modes": []}  # noqa: RUF012  # as Gymnasium declares it

    def __init__(
        self, deal: Deal | str = "garden_mlp", *, illegal: Illegal = "wait", **settings: Any
    ) -> None:
        """As for `GardenVectorEnv`."""
        self._beds = _Beds(deal, 1, illegal, settings)
        self.observation_space = self._beds.seen
        self.action_space = self._beds.chosen
        self._started = False  # has the next episode begun already, with the end of the last?

    @property
    def garden(self) -> Garden:
        return self._beds.garden

    @property
    def actions(self) -> CompositeActions:
        """What the numbers of actions mean."""
        return self._beds.actions

    def action_masks(self) -> Array:
        """[A] bool: what is legal now. After an episode's end that is of the next one."""
        masks: Array = self._beds.masks()[0]
        return masks

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Array, dict[str, Any]]:
        super().reset(seed=seed, options=options)
        if self._started and seed is None:
            observations = _array(self.garden.observations())
        else:
            observations = self._beds.reset(seed)
        self._started = False
        return observations[0], {"action_mask": self.action_masks().astype(np.int8)}

    def step(self, action: np.int64 | int) -> tuple[Array, float, bool, bool, dict[str, Any]]:
        step, refused = self._beds.step(np.asarray([action]))
        assert step.final_observations is not None
        ended = self._started = bool(step.terminals[0])
        info = {
            "action_mask": self.action_masks().astype(np.int8),
            "illegal": bool(refused[0]),
            "rolled_back": bool(step.epoch.rolled_back[0]),
            "terms": {name: float(term[0]) for name, term in step.terms.items()},
            "context": _context_names(step)[0],
        }
        seen = step.final_observations if ended else step.observations
        return _array(seen[0]), float(step.rewards[0]), ended, False, info
