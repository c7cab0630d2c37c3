"""Gymnasium's vector environments as a world for the learner (extra `gym`).

Actions are `Discrete`, `MultiDiscrete` or `MultiBinary`; observations of any space that can be
flattened are, each environment's for itself. Masks come from a part "action_mask" of a `Dict`
observation, which is then not observed, from `info["action_mask"]`, or from a method
`action_masks()`, of the vector environment or of each one in it: [E, all heads' actions side by
side], or for each environment a tuple of one mask for each head.

Shapes: `E` environments, `F` features, `H` heads.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import iterate
from torch import Tensor
from torch.nn.functional import one_hot

from esper.leyline import ActionSpace, EsperError, Legality
from esper.leyline.streams import derive_seed
from esper.simic.agent.types import Outcome
from esper.tamiyo.choosing import independent_heads

MASK = "action_mask"


class GymError(EsperError):
    """An environment of Gymnasium's that the learner cannot use."""


class GymWorld:
    """A vector environment that resets in the same step, as the learner's `VectorWorld`.

    In Gymnasium's default mode an episode's end is followed by a step that ignores the action
    and shows the next first observation: a filler, not experience. Such environments are refused
    rather than learned from; `make_gym` builds them in the right mode.
    """

    def __init__(self, env: VectorEnv[Any, Any, Any], seed: int = 0) -> None:
        if not isinstance(env, VectorEnv):
            raise GymError(
                "The learner plays environments side by side",
                given=f"a single {type(env).__name__}",
                valid="a vector environment",
                fix="give make_gym a function that makes one, and how many there should be",
            )
        mode = env.metadata.get("autoreset_mode")
        if mode != AutoresetMode.SAME_STEP:
            raise GymError(
                "This vector environment does not start anew in the step that ends an episode",
                given=f"autoreset mode {getattr(mode, 'name', mode)}",
                valid="SAME_STEP",
                fix="make it with vector_kwargs={'autoreset_mode': AutoresetMode.SAME_STEP}",
            )
        self.env, self.seed, self.envs = env, seed, env.num_envs
        self.sizes, self.offset = _heads(env.single_action_space)
        self.space: ActionSpace = independent_heads(self.sizes)
        self._shown = env.single_observation_space
        self._masks_shown = isinstance(self._shown, spaces.Dict) and MASK in self._shown.spaces
        if isinstance(self._shown, spaces.Dict):
            seen = {name: part for name, part in self._shown.items() if name != MASK}
            self._shown = spaces.Dict(seen)
        self.state_dim = int(spaces.flatdim(self._shown))
        self.resets = 0  # how often all environments started anew together
        self._info: Mapping[str, Any] = {}
        self._asked = _mask_method(env)

    def reset(self) -> Tensor:
        """Every time with seeds of its own; the first time the world's, as Gymnasium counts on."""
        again = derive_seed(self.seed, "reset", self.resets) % 2**31
        self._last, self._info = self.env.reset(seed=again if self.resets else self.seed)
        self._masks_told = MASK in self._info
        self.resets += 1
        return self._flat(self._last)

    def legal(self) -> Legality:
        if (MASK in self._info) != self._masks_told:
            raise GymError(
                'The environments say by info["action_mask"] what is legal, but not always',
                given="no masks after a " + ("step" if self._masks_told else "reset"),
                valid="masks of every reset and every step, or none at all",
            )
        if self._masks_shown:
            masks = self._last[MASK]
        elif self._masks_told:
            _require_all(self._info.get(f"_{MASK}", True), 'info["action_mask"]')
            masks = self._info[MASK]
        elif self._asked is not None:
            masks = self._asked()
        else:
            return Legality(self.space, self.envs, {})
        parts = self._truth(masks).split(list(self.sizes), 1)
        return Legality(self.space, self.envs, dict(zip(self.space.names, parts, strict=True)))

    def _truth(self, masks: Any) -> Tensor:
        """[E, all heads' actions] bool, from what the environments call their masks."""
        rows = [np.hstack(row) if isinstance(row, tuple | list) else row for row in masks]
        shapes = {np.shape(row) for row in rows}
        if len(rows) != self.envs or shapes != {(sum(self.sizes),)}:
            given = f"{len(rows)} masks of shape {' and '.join(map(str, map(list, shapes)))}"
            raise GymError(
                "The action masks have the wrong shape",
                given=given,
                valid=f"{self.envs} of shape [{sum(self.sizes)}]",
            )
        whole = np.stack(rows)
        if not np.isin(whole, (0, 1)).all():
            wrong = whole[~np.isin(whole, (0, 1))][0]
            raise GymError(
                "The action masks do not say yes or no",
                given=wrong,
                valid="True and False, 1 and 0",
            )
        return torch.as_tensor(whole.astype(bool))

    def step(self, actions: Tensor) -> Outcome:
        space = self.env.single_action_space
        chosen = actions.cpu().numpy() + self.offset
        chosen = chosen.reshape(self.envs, *(space.shape or ())).astype(space.dtype)
        self._last, rewards, terminals, truncations, self._info = self.env.step(chosen)
        observations = self._flat(self._last)
        ended = torch.as_tensor(np.asarray(terminals, dtype=bool))
        cut = torch.as_tensor(np.asarray(truncations, dtype=bool)) & ~ended
        final: Tensor | None = None  # [E, F]: the true last observation where an episode ended
        if bool(cut.any()):
            final = self._finals(observations.clone())
        paid = torch.as_tensor(np.asarray(rewards), dtype=torch.float32)
        return Outcome(observations, paid, ended, cut, final)

    def _finals(self, observations: Tensor) -> Tensor:
        """The observations [E, F] with the true last ones of episodes that are over."""
        if "final_obs" not in self._info:
            raise GymError(
                "Episodes were cut, and the vector environment does not show what was seen last",
                given=f"info with {', '.join(self._info) or 'nothing'}",
                valid='info["final_obs"] and info["_final_obs"]',
            )
        for env in np.flatnonzero(self._info["_final_obs"]):
            flat = spaces.flatten(self._shown, self._info["final_obs"][env])
            observations[env] = torch.as_tensor(np.asarray(flat), dtype=torch.float32)
        return observations

    def _flat(self, observations: Any) -> Tensor:
        return _flattened(self._shown, observations, self.envs)


def _flattened(space: gymnasium.Space[Any], seen: Any, envs: int) -> Tensor:
    """[E, F]: what `spaces.flatten` makes of each environment's observation, of all at once."""
    if isinstance(space, spaces.Dict):
        return torch.cat([_flattened(each, seen[name], envs) for name, each in space.items()], 1)
    if isinstance(space, spaces.Tuple):
        parts = zip(space.spaces, seen, strict=True)
        return torch.cat([_flattened(each, part, envs) for each, part in parts], 1)
    if isinstance(space, spaces.Discrete):
        place = torch.as_tensor(np.asarray(seen, dtype=np.int64) - int(space.start))
        return one_hot(place, int(space.n)).float()
    if isinstance(space, spaces.Box | spaces.MultiBinary):
        whole = np.asarray(seen, dtype=np.float32).reshape(envs, -1)
        return torch.from_numpy(whole.copy())  # the environment writes into its own array
    rows = [
        spaces.flatten(space, row)
        for row in iterate(gymnasium.vector.utils.batch_space(space, envs), seen)
    ]
    return torch.as_tensor(np.stack([np.asarray(row) for row in rows]), dtype=torch.float32)


def make_gym(name: str, envs: int, seed: int = 0, **settings: Any) -> GymWorld:
    """A world of `envs` environments of Gymnasium's registry, in one process."""
    vector = gymnasium.make_vec(
        name,
        envs,
        vectorization_mode="sync",
        vector_kwargs={"autoreset_mode": AutoresetMode.SAME_STEP},
        **settings,
    )
    return GymWorld(vector, seed)


def _mask_method(env: VectorEnv[Any, Any, Any]) -> Callable[[], Any] | None:
    """What says for all environments what is legal: one method of all, or one of each."""
    for vector in (env, env.unwrapped):
        if hasattr(vector, "action_masks"):
            found: Callable[[], Any] = vector.action_masks
            return found
    call = getattr(env.unwrapped, "call", None)
    if call is None:
        return None
    have = call("has_wrapper_attr", "action_masks")
    if not any(have):
        return None
    _require_all(have, "action_masks()")
    return partial(call, "action_masks")


def _require_all(have: Any, source: str) -> None:
    """Refuse masks that some environments have and others do not."""
    lacking = np.flatnonzero(~np.asarray(have, dtype=bool)).tolist()
    if lacking:
        raise GymError(
            f"Only some of the environments say by {source} what is legal",
            given=f"environments {lacking[:8]} do not",
            valid="all of them or none",
        )


def _heads(space: gymnasium.Space[Any]) -> tuple[tuple[int, ...], Any]:
    """Sizes of the heads, and the number of each head's first action."""
    if isinstance(space, spaces.Discrete):
        return (int(space.n),), np.asarray([space.start])
    if isinstance(space, spaces.MultiDiscrete):
        return tuple(int(size) for size in space.nvec.flat), space.start.flatten()
    if isinstance(space, spaces.MultiBinary):
        return (2,) * int(np.prod(space.shape)), 0
    raise GymError(
        "The learner cannot act in this action space",
        given=space,
        valid="Discrete, MultiDiscrete or MultiBinary",
    )
