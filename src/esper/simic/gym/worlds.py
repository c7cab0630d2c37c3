"""Gymnasium's vector environments as worlds for the learner.

Action spaces are `Discrete`, `MultiDiscrete` or `MultiBinary`. Observation spaces are any that
Gymnasium can flatten.

Action masks come from one of three sources: the part "action_mask" of a `Dict` observation,
`info["action_mask"]`, or a method `action_masks()` of the vector environment or of every single
environment. A mask is an array [E, total actions of all heads], a tuple with one array for each
head, or, in `info`, a mapping from head names to arrays. Arrays of a mapping may have axes for
earlier heads.

`info["relevant_heads"]` [H] names the heads that mattered in a step. Without it, all did.

Shapes: `E` environments, `F` features, `H` heads.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from esper.leyline import ActionSpace, EsperError, Legality
from esper.leyline.errors import install_hint
from esper.leyline.results import Outcome
from esper.leyline.streams import derive_seed
from esper.tamiyo.distributions import independent_heads

try:
    import gymnasium
    from gymnasium import spaces
    from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv
    from gymnasium.vector.utils import iterate
except ImportError as error:
    raise EsperError("gymnasium is not installed", fix=install_hint("gym")) from error

Vector = VectorEnv[Any, Any, Any]
MASK_KEY = "action_mask"
RELEVANT_KEY = "relevant_heads"
SAME_STEP: dict[str, Any] = {"autoreset_mode": AutoresetMode.SAME_STEP}


class GymError(EsperError):
    """A Gymnasium environment that the learner cannot use."""


class GymWorld:
    """A vector environment as the learner's `VectorWorld`.

    The environment must reset in the step that ends an episode. In Gymnasium's default mode, the
    step after the end ignores the action and returns the first observation of the next episode.
    Such a step is not experience.
    """

    def __init__(self, env: Vector, seed: int = 0, action_space: ActionSpace | None = None) -> None:
        """Wrap a vector environment.

        Args:
            env: The vector environment, with autoreset mode `SAME_STEP`.
            seed: Random seed of its episodes.
            action_space: Names, relevance and conditions of the heads. By default, all heads are
                relevant and independent.

        Raises:
            GymError: The learner cannot use the environment.
        """
        if not isinstance(env, VectorEnv):
            raise GymError(
                "The learner needs environments that step together",
                given=f"a single {type(env).__name__}",
                valid="a vector environment",
                fix="pass make_gym a function that makes one environment",
            )
        mode = env.metadata.get("autoreset_mode")
        if mode != AutoresetMode.SAME_STEP:
            raise GymError(
                "The vector environment does not reset in the step that ends an episode",
                given=f"autoreset mode {getattr(mode, 'name', mode)}",
                valid="SAME_STEP",
                fix=f"make it with {SAME_STEP}",
            )
        self.env = env
        self.seed = seed
        self.num_envs = env.num_envs

        sizes = _head_sizes(env.single_action_space)
        self.action_space = action_space or independent_heads(sizes)
        if self.action_space.sizes != sizes:
            raise GymError("The heads have other sizes", given=self.action_space.sizes, valid=sizes)

        # An action mask in the observation is not an input of the network.
        observation_space = env.single_observation_space
        self._mask_in_observation = False
        if isinstance(observation_space, spaces.Dict):
            self._mask_in_observation = MASK_KEY in observation_space.spaces
            parts = {name: part for name, part in observation_space.items() if name != MASK_KEY}
            observation_space = spaces.Dict(parts)
        self.observation_space = observation_space
        self.state_dim = int(spaces.flatdim(observation_space))
        self._mask_method = _find_mask_method(env)

        spec = getattr(env, "envs", [env])[0].spec
        self.horizon = (spec and spec.max_episode_steps) or 0  # steps of an episode; 0: unknown
        self.resets = 0  # number of calls of `reset`
        self._info: Mapping[str, Any] = {}

    def reset(self, reset_index: int | None = None) -> Tensor:
        """Start all episodes and return the first observations, [E, F].

        Each reset has its own random seed; the first one has the seed of the world.

        Args:
            reset_index: Number of resets before this one; by default those of this object.
        """
        if reset_index is not None:
            self.resets = reset_index
        seed = self.seed
        if self.resets:
            seed = derive_seed(self.seed, "reset", self.resets) % 2**31
        self._observations, self._info = self.env.reset(seed=seed)
        self._mask_in_info = MASK_KEY in self._info
        self.resets += 1
        return self._flatten_batch(self._observations)

    def legal(self) -> Legality:
        """Return the legal actions of every environment.

        Raises:
            GymError: Masks are missing, have the wrong shape, or are not boolean.
        """
        if (MASK_KEY in self._info) != self._mask_in_info:
            raise GymError(
                f'info["{MASK_KEY}"] is missing sometimes',
                given="no masks after a " + ("step" if self._mask_in_info else "reset"),
                valid="masks after every reset and every step, or none at all",
            )
        if self._mask_in_info:
            _require_all_envs(self._info.get(f"_{MASK_KEY}", True), f'info["{MASK_KEY}"]')
            return self.to_legality(self._info[MASK_KEY])
        if self._mask_in_observation:
            return self.to_legality(self._observations[MASK_KEY])
        if self._mask_method is not None:
            return self.to_legality(self._mask_method())
        return Legality(self.action_space, self.num_envs, {})

    def to_legality(self, masks: Any) -> Legality:
        """Return legal actions from masks in one of the forms that environments use.

        Args:
            masks: One mask for each environment, or a mapping from head names to arrays [E, ...].
        """
        space = self.action_space
        if isinstance(masks, Mapping):
            by_head = {name: _to_bool(masks[name]) for name in space.names if name in masks}
            return Legality(space, self.num_envs, by_head)

        rows = [np.hstack(row) if isinstance(row, tuple | list) else row for row in masks]
        row_shapes = {np.shape(row) for row in rows}
        row_size = sum(space.sizes)
        if len(rows) != self.num_envs or row_shapes != {(row_size,)}:
            shapes = " and ".join(str(list(shape)) for shape in row_shapes)
            raise GymError(
                "The action masks have the wrong shape",
                given=f"{len(rows)} masks of shape {shapes}",
                valid=f"{self.num_envs} of shape [{row_size}]",
            )
        masks_by_head = _to_bool(np.stack(rows)).split(list(space.sizes), dim=1)
        return Legality(space, self.num_envs, dict(zip(space.names, masks_by_head, strict=True)))

    def to_env_actions(self, actions: Tensor) -> Any:
        """Return actions [E, H] in the form that the environments take."""
        env_space = self.env.single_action_space
        env_actions = actions.cpu().numpy().reshape(len(actions), *(env_space.shape or ()))
        return (env_actions + getattr(env_space, "start", 0)).astype(env_space.dtype)

    def flatten(self, observation: Any) -> Tensor:
        """Return the observation of one environment as a vector, [F] float32."""
        flat = np.asarray(spaces.flatten(self.observation_space, observation))
        return torch.as_tensor(flat).float()

    def _flatten_batch(self, observations: Any) -> Tensor:
        """Return the observations of all environments, [E, F] float32."""
        if isinstance(self.observation_space, spaces.Box):
            flat = np.asarray(observations, dtype=np.float32).reshape(self.num_envs, -1)
            return torch.from_numpy(flat.copy())  # the environment reuses its array
        rows = [
            np.asarray(spaces.flatten(self.observation_space, observation))
            for observation in iterate(self.env.observation_space, observations)
        ]
        return torch.from_numpy(np.stack(rows).astype(np.float32, copy=False))

    def step(self, actions: Tensor) -> Outcome:
        """Take actions [E, H] and return their outcome.

        Raises:
            GymError: An episode was truncated and its last observation is missing.
        """
        result = self.env.step(self.to_env_actions(actions))
        self._observations, rewards, terminated, truncated, self._info = result
        observations = self._flatten_batch(self._observations)
        terminals = torch.as_tensor(np.asarray(terminated, dtype=bool))
        truncations = torch.as_tensor(np.asarray(truncated, dtype=bool)) & ~terminals

        # True last observations of truncated episodes, for their bootstrap values.
        final_observations: Tensor | None = None  # [E, F]
        if bool(truncations.any()):
            if "final_obs" not in self._info:
                raise GymError(
                    "An episode was truncated, and its last observation is missing",
                    given=f"info with {list(self._info)}",
                    valid='"final_obs" in info',
                )
            final_observations = observations.clone()
            for env in np.flatnonzero(self._info["_final_obs"]):
                final_observations[env] = self.flatten(self._info["final_obs"][env])
        return Outcome(
            observations=observations,
            rewards=torch.as_tensor(np.asarray(rewards), dtype=torch.float32),
            terminals=terminals,
            truncations=truncations,
            final_observations=final_observations,
            relevant=self._relevant_heads(terminals | truncations),
        )

    def _relevant_heads(self, ended: Tensor) -> Tensor | None:
        """Return the heads that mattered in the last step, [E, H] bool; None if `info` lacks them.

        Args:
            ended: Environments whose episode ended, [E] bool. Their `info` of the step is in
                `final_info`.
        """
        final_info = self._info.get("final_info", {})
        if RELEVANT_KEY not in self._info and RELEVANT_KEY not in final_info:
            return None
        num_heads = len(self.action_space)
        relevant = torch.ones(self.num_envs, num_heads, dtype=torch.bool)
        for info, rows in ((self._info, ~ended), (final_info, ended)):
            has_value = info.get(f"_{RELEVANT_KEY}", False)  # [E] bool
            for env in np.flatnonzero(has_value & rows.numpy()):
                flags = np.asarray(info[RELEVANT_KEY][env])
                if flags.shape != (num_heads,):
                    raise GymError(
                        f"{RELEVANT_KEY} has no entry a head",
                        given=f"shape {list(flags.shape)}",
                        valid=f"[{num_heads}]",
                    )
                relevant[env] = _to_bool(flags)
        return relevant


def make_gym(
    env: Any,
    num_envs: int = 16,
    seed: int = 0,
    *,
    action_space: ActionSpace | None = None,
    **settings: Any,
) -> GymWorld:
    """Make a world of Gymnasium environments.

    Args:
        env: Name in Gymnasium's registry, function that makes one environment, or vector
            environment. Environments of a name or function run in this process.
        num_envs: Number of environments, unless `env` is a vector environment.
        seed: Random seed of the episodes.
        action_space: Names, relevance and conditions of the heads; see `GymWorld`.
        settings: Arguments of `gymnasium.make_vec` or `SyncVectorEnv`.

    Raises:
        GymError: The learner cannot use the environment.
    """
    if isinstance(env, str):
        arguments = {"vectorization_mode": "sync", "vector_kwargs": SAME_STEP, **settings}
        env = gymnasium.make_vec(env, num_envs, **arguments)
    elif callable(env):
        env = SyncVectorEnv([env] * num_envs, **SAME_STEP, **settings)
    return GymWorld(env, seed, action_space)


def _to_bool(mask: Any) -> Tensor:
    """Return a mask of any dtype as booleans."""
    values = np.asarray(mask)
    flags = values.astype(bool)
    if values.dtype != bool:
        not_boolean = values[values != flags]
        if len(not_boolean):
            raise GymError(
                "Masks must be boolean",
                given=not_boolean[0],
                valid="True and False, 1 and 0",
            )
    return torch.from_numpy(flags)


def _find_mask_method(env: Vector) -> Callable[[], Any] | None:
    """Return the method that computes the masks of all environments, if there is one."""
    for vector in (env, env.unwrapped):
        if hasattr(vector, "action_masks"):
            method: Callable[[], Any] = vector.action_masks
            return method
    call = getattr(env.unwrapped, "call", None)  # calls a method of every single environment
    if call is None:
        return None
    has_method = call("has_wrapper_attr", "action_masks")
    if not any(has_method):
        return None
    _require_all_envs(has_method, "action_masks()")
    return partial(call, "action_masks")


def _require_all_envs(has_mask: Any, source: str) -> None:
    """Raise an error if only some environments have masks [E]."""
    without = np.flatnonzero(~np.asarray(has_mask, dtype=bool)).tolist()
    if without:
        raise GymError(
            f"Only some environments have masks from {source}",
            given=f"environments {without[:8]} do not",
            valid="all of them or none",
        )


def _head_sizes(env_space: gymnasium.Space[Any]) -> tuple[int, ...]:
    """Return the number of actions of every head of an action space."""
    if isinstance(env_space, spaces.Discrete):
        return (int(env_space.n),)
    if isinstance(env_space, spaces.MultiDiscrete):
        return tuple(int(size) for size in env_space.nvec.flat)
    if isinstance(env_space, spaces.MultiBinary):
        return (2,) * int(np.prod(env_space.shape))
    valid = "Discrete, MultiDiscrete or MultiBinary"
    raise GymError("The learner cannot act in this action space", given=env_space, valid=valid)
