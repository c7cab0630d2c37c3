"""The garden as a Gymnasium vector environment (extra `gym`): other libraries can train in it.

An action is one number for a whole decision; `info["action_mask"]`, or `action_masks()`, says which
are legal. Gymnasium itself knows no masks, so an illegal action is refused the way an environment
there refuses: nothing is decided, the row waits, and `info["illegal"]` says so.

Shapes: `N` rows, `F` features, `A` composite actions, `H` heads.
"""

from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space
from numpy.typing import NDArray
from torch import Tensor

from esper.garden.cases import Deal, Draw
from esper.garden.environment import Garden
from esper.garden.suites import find_suite
from esper.leyline import ActionError, Actions, Legality
from esper.leyline.heads import CANONICAL_ACTION, ActionSpace

Array = NDArray[Any]
WAIT = 0  # as a composite action


class CompositeActions:
    """Every composite decision of a space as one number, for learners of one discrete action.

    WAIT is 0; then come GERMINATE with every slot, blueprint and blend, and the other ops with
    every slot: each op with the heads that matter for it, as the head table says.
    """

    def __init__(self, space: ActionSpace) -> None:
        rows: list[tuple[int, ...]] = []
        for op, matters in enumerate(space.relevance):
            choices = [
                range(size) if relevant else (CANONICAL_ACTION,)
                for size, relevant in zip(space.sizes[1:], matters[1:], strict=True)
            ]
            rows += [(op, *rest) for rest in product(*choices)]
        self.space = space
        # [A, H]: the choice of every head, canonical where it does not matter.
        self.table = torch.tensor(rows)

    def __len__(self) -> int:
        return len(self.table)

    def decode(self, numbers: Tensor) -> Actions:
        """Decisions [N, H] from their numbers [N]."""
        wrong = (numbers < 0) | (numbers >= len(self))
        if bool(wrong.any()):
            raise ActionError(
                f"Row {int(wrong.nonzero()[0, 0])} got a number that is no action",
                given=int(numbers[wrong][0]),
                valid=f"0 to {len(self) - 1}",
            )
        return Actions(self.space, self.table[numbers])

    def masks(self, legality: Legality) -> Tensor:
        """[N, A] bool: which are legal now, exactly."""
        rows = torch.arange(legality.hosts).repeat_interleave(len(self))
        every = Actions(self.space, self.table.repeat(legality.hosts, 1))
        return legality.rows(rows).permits(every).view(legality.hosts, -1)


def _array(values: Tensor) -> Array:
    """A copy: what was handed out never changes."""
    array: Array = values.cpu().numpy().copy()
    return array


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

    def __init__(self, deal: Deal | str = "garden_mlp", num_envs: int = 8, **settings: Any) -> None:
        """`deal`: what gives rows their cases, or the name of a suite whose training contexts do.

        `settings` are the garden's: reward, horizon, device, config, controls.
        """
        if isinstance(deal, str):
            deal = Draw(contexts=find_suite(deal).training)
        self.garden = Garden(deal, num_envs, in_place=True, **settings)
        self.actions = CompositeActions(self.garden.action_space)  # what their numbers mean
        self.num_envs = num_envs
        low, high = self.garden.table.bounds()
        self.single_observation_space = spaces.Box(low.numpy(), high.numpy(), dtype=np.float32)
        self.single_action_space = spaces.Discrete(len(self.actions))
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)

    def action_masks(self) -> Array:
        """[N, A] bool: what is legal now."""
        return _array(self.actions.masks(self.garden.legal()))

    def reset(
        self, *, seed: int | list[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Array, dict[str, Any]]:
        """All rows start together: the next episodes or, with a seed, the first of another dealing.

        Rows differ by their number.
        """
        first = seed[0] if isinstance(seed, list) else seed
        super().reset(seed=first, options=options)
        deal = None if first is None else self.garden.draw
        if isinstance(deal, Draw) and first is not None:
            deal = replace(deal, seed=first)
        seen = _array(self.garden.reset(deal))
        return seen, self._with_flags({"action_mask": self.action_masks().astype(np.int8)})

    def step(self, actions: Array) -> tuple[Array, Array, Array, Array, dict[str, Any]]:
        asked, refused = self._asked(actions)
        step = self.garden.step(asked)
        told = {
            "illegal": _array(refused),
            "rolled_back": _array(step.epoch.rolled_back),
            "terms": {name: _array(term) for name, term in step.terms.items()},
            "context": np.array([case.context.name for case in step.cases], dtype=object),
        }
        ended = _array(step.terminals)
        info = self._with_flags({"action_mask": self.action_masks().astype(np.int8), **told})
        if ended.any():
            assert step.final_observations is not None
            final = np.full(self.num_envs, None, dtype=object)
            for row in np.flatnonzero(ended):
                final[row] = _array(step.final_observations[row])
            info |= {"final_obs": final, "_final_obs": ended.copy()}
            info |= {"final_info": self._with_flags(told, ended), "_final_info": ended.copy()}
        paid = _array(step.rewards.double())
        return _array(step.observations), paid, ended, _array(step.truncations), info

    def _asked(self, chosen: Array) -> tuple[Actions, Tensor]:
        """What is to be done, and which rows [N] wait since what was chosen there is illegal."""
        numbers = torch.as_tensor(np.asarray(chosen), dtype=torch.int64).reshape(-1)
        asked = self.actions.decode(numbers)  # refuses what is no action at all
        refused = ~self.garden.legal().permits(asked)
        if bool(refused.any()):
            asked = self.actions.decode(numbers.masked_fill(refused, WAIT))
        return asked, refused

    def _with_flags(self, told: dict[str, Any], rows: Array | None = None) -> dict[str, Any]:
        """Beside every entry, as Gymnasium has it, which rows it is there for."""
        there = np.ones(self.num_envs, dtype=np.bool_) if rows is None else rows
        info: dict[str, Any] = {}
        for name, value in told.items():
            info[name] = self._with_flags(value, rows) if isinstance(value, dict) else value
            info[f"_{name}"] = there.copy()
        return info
