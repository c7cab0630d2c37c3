"""Gymnasium's vector environments as a world for the learner (extra `gym`).

Actions are `Discrete` or `MultiDiscrete`; observations of any space that can be flattened are,
each environment's for itself. Masks come from `info["action_mask"]` or from a method
`action_masks()`, of the vector environment or of each one in it: [E, actions] for `Discrete`,
[E, all heads' actions side by side] for `MultiDiscrete`.

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

from esper.leyline import ActionSpace, EsperError, Legality
from esper.simic.agent.types import Outcome
from esper.tamiyo.choosing import independent_heads


class GymError(EsperError):
    """An environment of Gymnasium's that the learner cannot use."""


class GymWorld:
    """A vector environment that resets in the same step, as the learner's `VectorWorld`.

    In Gymnasium's default mode an episode's end is followed by a step that ignores the action
    and shows the next first observation: a filler, not experience. Such environments are refused
    rather than learned from; `make_gym` builds them in the right mode.
    """

    def __init__(self, env: VectorEnv[Any, Any, Any], seed: int = 0) -> None:
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
        self.state_dim = int(spaces.flatdim(env.single_observation_space))
        self._info: Mapping[str, Any] = {}
        self._asked = _mask_method(env)

    def reset(self) -> Tensor:
        observations, self._info = self.env.reset(seed=self.seed)
        return self._flat(observations)

    def legal(self) -> Legality:
        if "action_mask" in self._info:
            _require_all(self._info.get("_action_mask", True), 'info["action_mask"]')
            masks = self._info["action_mask"]
        elif self._asked is not None:
            masks = self._asked()
        else:
            return Legality(self.space, self.envs, {})
        whole = torch.as_tensor(np.stack(masks).astype(bool))
        if whole.shape != (self.envs, sum(self.sizes)):
            raise GymError(
                "The action masks have the wrong shape",
                given=list(whole.shape),
                valid=[self.envs, sum(self.sizes)],
            )
        parts = whole.split(list(self.sizes), 1)
        return Legality(self.space, self.envs, dict(zip(self.space.names, parts, strict=True)))

    def step(self, actions: Tensor) -> Outcome:
        chosen = actions.cpu().numpy() + self.offset
        if len(self.sizes) == 1 and isinstance(self.env.single_action_space, spaces.Discrete):
            chosen = chosen[:, 0]
        seen, rewards, terminals, truncations, self._info = self.env.step(chosen)
        observations = self._flat(seen)
        ended = torch.as_tensor(np.asarray(terminals, dtype=bool))
        cut = torch.as_tensor(np.asarray(truncations, dtype=bool)) & ~ended
        final: Tensor | None = None  # [E, F]: the true last observation where an episode ended
        if bool(cut.any()):
            final = observations.clone()
            for env in np.flatnonzero(self._info["_final_obs"]):
                final[env] = self._flat_one(self._info["final_obs"][env])
        paid = torch.as_tensor(np.asarray(rewards), dtype=torch.float32)
        return Outcome(observations, paid, ended, cut, final)

    def _flat(self, observations: Any) -> Tensor:
        if isinstance(self.env.single_observation_space, spaces.Box):
            whole = np.asarray(observations, dtype=np.float32).reshape(self.envs, -1)
            return torch.from_numpy(whole.copy())  # the environment writes into its own array
        rows = iterate(self.env.observation_space, observations)
        return torch.stack([self._flat_one(row) for row in rows])

    def _flat_one(self, observation: Any) -> Tensor:
        flat = spaces.flatten(self.env.single_observation_space, observation)
        return torch.as_tensor(np.asarray(flat), dtype=torch.float32)


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
    if isinstance(space, spaces.MultiDiscrete) and space.nvec.ndim == 1:
        return tuple(int(size) for size in space.nvec), space.start
    raise GymError(
        "The learner cannot act in this action space",
        given=space,
        valid="Discrete, or MultiDiscrete with one axis",
    )
