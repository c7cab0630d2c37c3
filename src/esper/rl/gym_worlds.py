"""Gymnasium's vector environments as a world for the learner (extra `gym`).

Actions are `Discrete`, `MultiDiscrete` or `MultiBinary`; observations of any space that can be
flattened are, each environment's for itself. Masks come from a part "action_mask" of a `Dict`
observation, from `info["action_mask"]`, or from a method `action_masks()` of all or of each one:
[E, all heads' actions side by side], a tuple of one mask for each head, or in `info` a mapping by
the names of heads, whose masks may be conditioned on earlier heads. `info["relevant_heads"]` [H]
says after a step which heads mattered in it; where it is not given, all did.

Shapes: `E` environments, `F` features, `H` heads.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv
from gymnasium.vector.utils import iterate
from torch import Tensor

from esper.leyline import ActionSpace, EsperError, Legality
from esper.leyline.streams import derive_seed
from esper.simic.agent.types import Outcome
from esper.tamiyo.choosing import independent_heads

Vector = VectorEnv[Any, Any, Any]
MASK, TOLD = "action_mask", 'info["action_mask"]'
RELEVANT = "relevant_heads"
SAME_STEP: dict[str, Any] = {"autoreset_mode": AutoresetMode.SAME_STEP}


class GymError(EsperError):
    """An environment of Gymnasium's that the learner cannot use."""


class GymWorld:
    """A vector environment that resets in the same step, as the learner's `VectorWorld`.

    In Gymnasium's default mode an episode's end is followed by a step that ignores the action
    and shows the next first observation: a filler, not experience, and so it is refused.
    """

    def __init__(self, env: Vector, seed: int = 0, space: ActionSpace | None = None) -> None:
        """`space`: heads with names, which may depend on earlier ones, and when they matter."""
        if not isinstance(env, VectorEnv):
            what, given = "The learner plays several side by side", f"a single {type(env).__name__}"
            fix = "give make_gym a function that makes one"
            raise GymError(what, given=given, valid="a vector environment", fix=fix)
        mode = env.metadata.get("autoreset_mode")
        if mode != AutoresetMode.SAME_STEP:
            what = "This vector environment does not start anew in the step that ends an episode"
            given = f"autoreset mode {getattr(mode, 'name', mode)}"
            raise GymError(what, given=given, valid="SAME_STEP", fix=f"make it with {SAME_STEP}")
        self.env, self.seed, self.envs = env, seed, env.num_envs
        sizes = _sizes(env.single_action_space)
        self.space = space or independent_heads(sizes)
        if self.space.sizes != sizes:
            raise GymError("The heads have other sizes", given=self.space.sizes, valid=sizes)
        self.shown = env.single_observation_space
        self._masks_shown = isinstance(self.shown, spaces.Dict) and MASK in self.shown.spaces
        if isinstance(self.shown, spaces.Dict):
            self.shown = spaces.Dict({n: part for n, part in self.shown.items() if n != MASK})
        self.state_dim = int(spaces.flatdim(self.shown))
        spec = getattr(env, "envs", [env])[0].spec
        self.horizon = (spec and spec.max_episode_steps) or 0  # steps of an episode, if known
        self.resets = 0  # how often all environments started anew together
        self._info: Mapping[str, Any] = {}
        self._asked = _mask_method(env)

    def reset(self, resets: int | None = None) -> Tensor:
        """With seeds of its own each time, or those after so many `resets`; first the world's."""
        self.resets = self.resets if resets is None else resets
        again = derive_seed(self.seed, "reset", self.resets) % 2**31
        self._last, self._info = self.env.reset(seed=again if self.resets else self.seed)
        self._masks_told = MASK in self._info
        self.resets += 1
        return self._flat(self._last)

    def legal(self) -> Legality:
        if (MASK in self._info) != self._masks_told:
            given = "no masks after a " + ("step" if self._masks_told else "reset")
            valid = "masks of every reset and every step, or none at all"
            raise GymError(f"{TOLD} says what is legal, but not always", given=given, valid=valid)
        if self._masks_told:
            _require_all(self._info.get(f"_{MASK}", True), TOLD)
            return self.legality(self._info[MASK])
        if self._masks_shown:
            return self.legality(self._last[MASK])
        return self.legality({} if self._asked is None else self._asked())

    def legality(self, masks: Any) -> Legality:
        """What may be done, from what the environments call their masks."""
        sizes, names = list(self.space.sizes), self.space.names
        if isinstance(masks, Mapping):
            by_head = {name: _truth(masks[name]) for name in names if name in masks}
            return Legality(self.space, self.envs, by_head)
        rows = [np.hstack(row) if isinstance(row, tuple | list) else row for row in masks]
        shapes = {np.shape(row) for row in rows}
        if len(rows) != self.envs or shapes != {(sum(sizes),)}:
            given = f"{len(rows)} masks of shape {' and '.join(map(str, map(list, shapes)))}"
            valid = f"{self.envs} of shape [{sum(sizes)}]"
            raise GymError("The action masks have the wrong shape", given=given, valid=valid)
        parts = _truth(np.stack(rows)).split(sizes, 1)
        return Legality(self.space, self.envs, dict(zip(names, parts, strict=True)))

    def native(self, actions: Tensor) -> Any:
        """Actions [E, H] as the environments take them."""
        space = self.env.single_action_space
        chosen = actions.cpu().numpy().reshape(len(actions), *(space.shape or ()))
        return (chosen + getattr(space, "start", 0)).astype(space.dtype)

    def flat(self, observation: Any) -> Tensor:
        """[F]: what one environment shows."""
        return torch.as_tensor(np.asarray(spaces.flatten(self.shown, observation))).float()

    def _flat(self, observations: Any) -> Tensor:
        if isinstance(self.shown, spaces.Box):
            whole = np.asarray(observations, dtype=np.float32).reshape(self.envs, -1)
            return torch.from_numpy(whole.copy())  # the environment writes into its own array
        each = iterate(self.env.observation_space, observations)
        rows = [np.asarray(spaces.flatten(self.shown, row)) for row in each]
        return torch.from_numpy(np.stack(rows).astype(np.float32, copy=False))

    def step(self, actions: Tensor) -> Outcome:
        stepped = self.env.step(self.native(actions))
        self._last, rewards, terminals, truncations, self._info = stepped
        observations = self._flat(self._last)
        ended = torch.as_tensor(np.asarray(terminals, dtype=bool))
        cut = torch.as_tensor(np.asarray(truncations, dtype=bool)) & ~ended
        final: Tensor | None = None  # [E, F]: the true last observation where an episode ended
        if bool(cut.any()):
            if "final_obs" not in self._info:
                what = "An episode was cut, and what was seen last is hidden"
                raise GymError(what, given=f"info of {list(self._info)}", valid='"final_obs" in it')
            final = observations.clone()
            for env in np.flatnonzero(self._info["_final_obs"]):
                final[env] = self.flat(self._info["final_obs"][env])
        paid = torch.as_tensor(np.asarray(rewards), dtype=torch.float32)
        return Outcome(observations, paid, ended, cut, final, None, self._relevant(ended | cut))

    def _relevant(self, over: Tensor) -> Tensor | None:
        """[E, H]: heads that mattered in the last step, where some environment told; what those
        that are `over` [E] said of it is in their last info."""
        last = self._info.get("final_info", {})
        if RELEVANT not in self._info and RELEVANT not in last:
            return None
        relevant = torch.ones(self.envs, len(self.space), dtype=torch.bool)
        for info, asked in ((self._info, ~over), (last, over)):
            for env in np.flatnonzero(info.get(f"_{RELEVANT}", False) & asked.numpy()):
                said = np.asarray(info[RELEVANT][env])
                if said.shape != (len(self.space),):
                    given, valid = f"shape {list(said.shape)}", f"[{len(self.space)}]"
                    raise GymError(f"{RELEVANT} has no entry a head", given=given, valid=valid)
                relevant[env] = _truth(said)
        return relevant


def make_gym(
    what: Any, envs: int = 16, seed: int = 0, *, space: ActionSpace | None = None, **settings: Any
) -> GymWorld:
    """A world of Gymnasium's: of a name in its registry, or of a function that makes one
    environment, so many of them in this process; or of a vector environment as it is."""
    if isinstance(what, str):
        made = {"vectorization_mode": "sync", "vector_kwargs": SAME_STEP, **settings}
        what = gymnasium.make_vec(what, envs, **made)
    elif callable(what):
        what = SyncVectorEnv([what] * envs, **SAME_STEP, **settings)
    return GymWorld(what, seed, space)


def _truth(mask: Any) -> Tensor:
    """Booleans, from a mask that says yes and no in any type."""
    found = np.asarray(mask)
    truth = found.astype(bool)
    if found.dtype != bool and len(wrong := found[found != truth]):
        valid = "True and False, 1 and 0"
        raise GymError("The masks do not say yes or no", given=wrong[0], valid=valid)
    return torch.from_numpy(truth)


def _mask_method(env: Vector) -> Callable[[], Any] | None:
    """What says for all environments what is legal: one method of all, or one of each."""
    for vector in (env, env.unwrapped):
        if hasattr(vector, "action_masks"):
            found: Callable[[], Any] = vector.action_masks
            return found
    call = getattr(env.unwrapped, "call", None)
    have = [] if call is None else call("has_wrapper_attr", "action_masks")
    if call is None or not any(have):
        return None
    _require_all(have, "action_masks()")
    return partial(call, "action_masks")


def _require_all(have: Any, source: str) -> None:
    """Refuse masks that some environments have and others do not."""
    lacking = np.flatnonzero(~np.asarray(have, dtype=bool)).tolist()
    if lacking:
        what = f"Only some of the environments say by {source} what is legal"
        given = f"environments {lacking[:8]} do not"
        raise GymError(what, given=given, valid="all of them or none")


def _sizes(space: gymnasium.Space[Any]) -> tuple[int, ...]:
    """Sizes of the heads."""
    if isinstance(space, spaces.Discrete):
        return (int(space.n),)
    if isinstance(space, spaces.MultiDiscrete):
        return tuple(int(size) for size in space.nvec.flat)
    if isinstance(space, spaces.MultiBinary):
        return (2,) * int(np.prod(space.shape))
    valid = "Discrete, MultiDiscrete or MultiBinary"
    raise GymError("The learner cannot act in this action space", given=space, valid=valid)
