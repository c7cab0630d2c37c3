"""The rollout buffer: the experience of all environments since the last update.

Shapes: `E` environments, `T` time, `F` state features, `H` heads, `A` actions of the largest head,
`L` layers, `D` hidden size, `R` sequences.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from esper.distributed import SINGLE_PROCESS, Processes
from esper.leyline import CANONICAL_ACTION, ActionSpace, EsperError, constants
from esper.simic.agent.advantages import compute_gae, normalize, relevant_head_mask
from esper.simic.agent.types import SequenceBatch
from esper.tamiyo.distributions import _validate_action_mask, condition_index
from esper.tamiyo.sequences import Hidden

__all__ = ["NonFiniteError", "RolloutError", "TamiyoRolloutBuffer"]


class RolloutError(EsperError):
    """A step that the buffer cannot hold, or a call in the wrong order."""


class NonFiniteError(EsperError):
    """A number that is NaN or infinite, with its environment and step."""


class TamiyoRolloutBuffer:
    """Steps of `E` environments, at most `T` each, in tensors that are allocated once.

    `next_starts` marks the environments whose next step begins an episode: at the very beginning,
    after a terminal or truncated step, and after `start_episode` or `clear_env`. Rollout and update
    reset the hidden state there, and advantages do not cross these boundaries. An episode that has
    not ended continues in the next rollout: `reset` removes the steps and keeps `next_starts`.

    Adding a step of all environments does not wait for a GPU. Values that such a check would need
    are checked for the whole rollout at once, in `validate`.
    """

    def __init__(
        self,
        action_space: ActionSpace,
        *,
        num_envs: int,
        max_steps_per_env: int = constants.DEFAULT_EPISODE_LENGTH,
        state_dim: int,
        lstm_hidden_dim: int = constants.DEFAULT_LSTM_HIDDEN_DIM,
        lstm_layers: int = constants.DEFAULT_LSTM_LAYERS,
        device: torch.device | str = "cpu",
    ) -> None:
        """Allocate an empty buffer.

        Args:
            action_space: Names and sizes of the action heads.
            num_envs: Number of environments `E`.
            max_steps_per_env: Steps `T` that each environment can hold.
            state_dim: Length `F` of the observation vector.
            lstm_hidden_dim: Hidden size `D` of the network.
            lstm_layers: LSTM layers `L` of the network.
            device: Device of all tensors.
        """
        if min(num_envs, max_steps_per_env) < 1:
            received = f"{num_envs} environments, {max_steps_per_env} steps"
            raise RolloutError(
                "A rollout buffer needs a positive size", given=received, valid="from 1"
            )
        self.action_space = action_space
        self.num_envs = num_envs
        self.max_steps_per_env = max_steps_per_env
        self.state_dim = state_dim
        self.lstm_hidden_dim = lstm_hidden_dim
        self.lstm_layers = lstm_layers
        self.device = torch.empty(0, device=device).device  # with its index, as tensors report it

        # Shape of one step of one environment, and dtype, of every field that `add_batch` takes.
        num_heads, widest = len(action_space), max(action_space.sizes)
        self._step_fields: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
            "states": ((state_dim,), torch.float32),
            "actions": ((num_heads,), torch.int64),
            "action_masks": ((num_heads, widest), torch.bool),
            "log_probs": ((num_heads,), torch.float32),
            "values": ((), torch.float32),
            "rewards": ((), torch.float32),
            "terminals": ((), torch.bool),
            "truncations": ((), torch.bool),
            "bootstrap_values": ((), torch.float32),
        }

        # The rollout, [E, T, ...].
        self.states = self._allocate(state_dim)
        self.actions = self._allocate(num_heads, dtype=torch.int64)
        self.action_masks = self._allocate(num_heads, widest, dtype=torch.bool)
        self.log_probs = self._allocate(num_heads)
        self.values = self._allocate()
        self.rewards = self._allocate()
        self.terminals = self._allocate(dtype=torch.bool)
        self.truncations = self._allocate(dtype=torch.bool)
        self.bootstrap_values = self._allocate()  # value after a truncated step
        self.episode_starts = self._allocate(dtype=torch.bool)
        self.hidden_h = self._allocate(lstm_layers, lstm_hidden_dim)  # entering the step
        self.hidden_c = self._allocate(lstm_layers, lstm_hidden_dim)

        # Masks with which the entropies count, if an op can make a head irrelevant.
        self.has_entropy_masks = not action_space.is_always_relevant
        if self.has_entropy_masks:
            self._entropy_fields = {
                "entropy_masks": ((num_heads, widest), torch.bool),
                "entropy_conditions": ((num_heads,), torch.int64),
            }
            self.entropy_masks = self._allocate(num_heads, widest, dtype=torch.bool)
            self.entropy_conditions = self._allocate(num_heads, dtype=torch.int64)

        # Environments: steps held, and whether the next step begins an episode.
        self.step_counts = torch.zeros(num_envs, dtype=torch.int64, device=self.device)  # [E]
        self.next_starts = torch.ones(num_envs, dtype=torch.bool, device=self.device)  # [E]
        self.max_length = 0  # no environment holds more steps
        self.consumed = False  # an update has learned from these steps
        self._is_uniform = True  # all environments hold exactly `max_length` steps
        self._env_index = torch.arange(num_envs, device=self.device)
        self._last_values = torch.zeros(num_envs, device=self.device)  # [E]
        self._advantages: Tensor | None = None  # [E, T]
        self._returns: Tensor | None = None  # [E, T]
        self._validated: tuple[Tensor, Tensor] | None = None  # step counts, starts; on the CPU

    def _allocate(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        size = (self.num_envs, self.max_steps_per_env, *shape)
        return torch.zeros(size, dtype=dtype, device=self.device)

    def __len__(self) -> int:
        """Number of steps of all environments."""
        if self._is_uniform:
            return self.max_length * self.num_envs
        return int(self.step_counts.sum())

    @property
    def is_full(self) -> bool:
        """Whether no environment can take another step."""
        return len(self) == self.num_envs * self.max_steps_per_env

    @property
    def valid(self) -> Tensor:
        """Steps that were taken, [E, T] bool."""
        step = torch.arange(self.max_steps_per_env, device=self.device)
        return step < self.step_counts[:, None]

    @property
    def advantages(self) -> Tensor:
        """Advantages, [E, T]."""
        return _require_computed(self._advantages)

    @property
    def returns(self) -> Tensor:
        """Returns, which are the targets of the value head, [E, T]."""
        return _require_computed(self._returns)

    # --- adding steps ---------------------------------------------------------------------------

    def add(
        self,
        *,
        env_id: int,
        state: Tensor,
        actions: Tensor,
        action_masks: Tensor,
        log_probs: Tensor,
        value: float | Tensor,
        reward: float | Tensor,
        hidden_h: Tensor,
        hidden_c: Tensor,
        entropy_masks: Tensor | None = None,
        entropy_conditions: Tensor | None = None,
        terminal: bool | Tensor = False,
        truncated: bool | Tensor = False,
        bootstrap_value: float | Tensor = 0.0,
    ) -> None:
        """Append one step of one environment; `add_batch` is faster for all of them.

        Args:
            env_id: Number of the environment.
            state: State, [F].
            actions: Actions of the heads, [H] int64.
            action_masks: Resolved masks, [H, A] bool.
            log_probs: Log-probabilities of the actions, [H].
            value: Value of the state.
            reward: Reward of the step.
            hidden_h: Hidden state h that enters the step, [L, 1, D].
            hidden_c: Cell state c that enters the step, [L, 1, D].
            entropy_masks: Masks with which the entropies count, [H, A] bool; by default
                `action_masks`.
            entropy_conditions: Earlier choices to which these masks belong, [H] int64.
            terminal: The episode ended with this step.
            truncated: The episode was cut off after this step.
            bootstrap_value: Value of the state after a truncated step.

        Raises:
            RolloutError: The environment is unknown or full, or a tensor has another shape, dtype
                or device than the buffer.
        """
        self._require_env(env_id)
        scalars = {"values": value, "rewards": reward, "bootstrap_values": bootstrap_value}
        flags = {"terminals": terminal, "truncations": truncated}
        fields = {
            "states": state[None],
            "actions": actions[None],
            "action_masks": action_masks[None],
            "log_probs": log_probs[None],
            **{name: self._to_row(number, torch.float32) for name, number in scalars.items()},
            **{name: self._to_row(flag, torch.bool) for name, flag in flags.items()},
        }
        if entropy_masks is not None and entropy_conditions is not None:
            fields["entropy_masks"] = entropy_masks[None]
            fields["entropy_conditions"] = entropy_conditions[None]
        row = self._checked_step(fields, (hidden_h, hidden_c), rows=1)
        step = int(self.step_counts[env_id])
        if step >= self.max_steps_per_env:
            raise self._full_error(env_id)
        for name, value_of_step in row.items():
            getattr(self, name)[env_id, step] = value_of_step[0]
        self.episode_starts[env_id, step] = self.next_starts[env_id]
        self.next_starts[env_id] = (row["terminals"] | row["truncations"])[0]
        self.step_counts[env_id] += 1
        self._count_steps()

    def add_batch(self, *, hidden: Hidden, active: Tensor | None = None, **fields: Tensor) -> None:
        """Append one step of every environment.

        Args:
            hidden: Hidden state that enters the step, [L, E, D] each.
            active: Environments that took a step, [E] bool; nothing is stored of the others. By
                default all of them.
            **fields: `states`, `actions`, `action_masks`, `log_probs`, `values`, `rewards`,
                `terminals`, `truncations` and `bootstrap_values`, each [E, ...]. If an op can make
                a head irrelevant, also `entropy_masks` and `entropy_conditions`; without them the
                entropies count with `action_masks`.

        Raises:
            RolloutError: A field is missing, has another shape, dtype or device than the buffer, or
                an environment is full.
        """
        step = self._checked_step(fields, hidden, rows=self.num_envs)
        if active is not None:
            self._check_field("active", active, (self.num_envs,), torch.bool)
        if self.max_length == self.max_steps_per_env:
            counts = self.step_counts if active is None else self.step_counts * active
            is_full = counts >= self.max_steps_per_env
            if bool(is_full.any()):
                raise self._full_error(int(is_full.nonzero()[0]))
        step["episode_starts"] = self.next_starts
        episode_ends = step["terminals"] | step["truncations"]
        if active is None and self._is_uniform:
            for name, value in step.items():
                getattr(self, name)[:, self.max_length] = value
            self.next_starts.copy_(episode_ends)
            self.step_counts += 1
        else:
            if active is None:
                active = torch.ones_like(self.next_starts)
            self._add_active(step, active)
            self.next_starts.copy_(torch.where(active, episode_ends, self.next_starts))
            self.step_counts += active
            self._is_uniform = False
        self.max_length = min(self.max_length + 1, self.max_steps_per_env)
        self._invalidate()

    def _add_active(self, step: Mapping[str, Tensor], active: Tensor) -> None:
        """Write the step of each active environment behind its last one."""
        index = (self._env_index, self.step_counts.clamp(max=self.max_steps_per_env - 1))
        for name, value in step.items():
            stored = getattr(self, name)
            is_active = active.view(-1, *(1,) * (value.ndim - 1))
            stored[index] = torch.where(is_active, value, stored[index])

    # --- episode boundaries ---------------------------------------------------------------------

    def start_episode(self, env_id: int) -> None:
        """Let the next step of an environment begin an episode.

        Raises:
            RolloutError: The environment is in the middle of an episode.
        """
        self._require_env(env_id)
        if int(self.step_counts[env_id]) and not bool(self.next_starts[env_id]):
            raise RolloutError(
                f"Environment {env_id} is in the middle of an episode",
                fix="call end_episode first, so that its advantages end there",
            )
        self.next_starts[env_id] = True

    def end_episode(self, env_id: int, *, truncated_value: float | None = None) -> None:
        """Let the last step of an environment end its episode.

        Args:
            env_id: Number of the environment.
            truncated_value: Value of the next state, if the episode was cut off. By default the
                episode ends in a terminal.

        Raises:
            RolloutError: The environment has no step.
        """
        self._require_env(env_id)
        last = int(self.step_counts[env_id]) - 1
        if last < 0:
            raise RolloutError(f"Environment {env_id} has no step that could end an episode")
        self.terminals[env_id, last] = truncated_value is None
        self.truncations[env_id, last] = truncated_value is not None
        self.bootstrap_values[env_id, last] = truncated_value or 0.0
        self.next_starts[env_id] = True
        self._invalidate()

    def clear_env(self, env_id: int) -> None:
        """Discard the steps and the hidden state of one environment; it begins an episode."""
        self._require_env(env_id)
        self.step_counts[env_id] = 0
        self.hidden_h[env_id] = 0.0
        self.hidden_c[env_id] = 0.0
        self.next_starts[env_id] = True
        self._count_steps()

    def reset(self) -> None:
        """Remove all steps. The tensors are not zeroed; the step counts mark them as invalid."""
        self.step_counts.zero_()
        self.max_length = 0
        self._is_uniform = True
        self.consumed = False
        self._invalidate()

    def mark_consumed(self) -> None:
        """Note that an update has learned from these steps. Another update refuses them."""
        self.consumed = True

    # --- advantages and sequences ---------------------------------------------------------------

    def compute_advantages_and_returns(
        self,
        gamma: float = constants.DEFAULT_GAMMA,
        gae_lambda: float = constants.DEFAULT_GAE_LAMBDA,
        last_values: Tensor | None = None,
    ) -> None:
        """Estimate advantages and returns of all steps.

        Args:
            gamma: Discount factor.
            gae_lambda: The λ of GAE.
            last_values: Value of the state after each environment's last step, [E]; 0 by default.
                It does not matter where that step ended an episode.
        """
        if last_values is None:
            last_values = torch.zeros(self.num_envs, device=self.device)
        self._check_field("last_values", last_values, (self.num_envs,), torch.float32)
        self._invalidate()
        self._advantages = compute_gae(
            self.rewards,
            self.values,
            self.terminals,
            self.truncations,
            self.bootstrap_values,
            last_values,
            self.step_counts,
            gamma=gamma,
            gae_lambda=gae_lambda,
        )
        self._returns = self._advantages + self.values
        self._last_values = last_values

    def normalize_advantages(self, processes: Processes = SINGLE_PROCESS) -> None:
        """Normalise the advantages to mean 0 and standard deviation 1 over all valid steps."""
        self._advantages = normalize(self.advantages, self.valid, processes)

    def validate(self) -> None:
        """Check the whole rollout. This waits for a GPU once.

        Call this again after you write to the buffer's tensors.

        Raises:
            RolloutError: The rollout is empty, or its advantages were not computed.
            InvalidStateMachineError: A head has no legal action in a step.
            NonFiniteError: A number is NaN or infinite.
        """
        self._validated = self._validate_and_sync()

    def get_batched_sequences(
        self,
        device: torch.device | str = "cpu",
        *,
        length: int | None = None,
        allow_empty: bool = False,
    ) -> SequenceBatch:
        """Return a copy of the rollout as sequences on `device`.

        Padding has zero states, and the canonical action is its only legal one. Nothing that an
        earlier rollout left there can therefore reach a loss. The copy is complete when this
        returns, so the buffer may be reset at once.

        Args:
            device: Device of the copy. From the CPU to a GPU it is one asynchronous transfer.
            length: Cut the sequences into parts of this length, which divides `max_steps_per_env`.
                Each part has the hidden state that entered its first step.
            allow_empty: Return a batch without sequences for an empty rollout, as a process needs
                whose neighbours have steps.

        Raises:
            RolloutError: The rollout is empty. `validate` lists the other errors.
        """
        if not self.max_length and not allow_empty:
            raise RolloutError("The rollout is empty", fix="add steps before you ask for them")
        if self._validated is None:
            self.validate()
        assert self._validated is not None, "validate stores its result"
        counts, starts = self._validated
        length = length or self.max_steps_per_env

        # Environments that took a step, and their padding.
        envs = counts.nonzero()[:, 0]
        env_index = envs.to(self.device, non_blocking=True)
        valid_cpu = torch.arange(self.max_steps_per_env) < counts[envs, None]
        valid = self.valid[env_index]
        has_padding = not bool(valid_cpu.all())

        def take(tensor: Tensor) -> Tensor:
            """Copy the sequences of a field [E, T, ...], with zeros as padding."""
            taken = tensor[env_index]
            if has_padding:
                is_padding = ~valid.view(*valid.shape, *(1,) * (taken.ndim - 2))
                taken.masked_fill_(is_padding, 0)
            return taken

        actions = take(self.actions)
        action_masks = take(self.action_masks)
        if has_padding:
            action_masks[..., CANONICAL_ACTION] |= ~valid[..., None]
        fields = {
            "states": take(self.states),
            "actions": actions,
            "action_masks": action_masks,
            "log_probs": take(self.log_probs),
            "values": take(self.values),
            "advantages": take(self.advantages),
            "returns": take(self.returns),
            "valid": valid,
            "head_mask": relevant_head_mask(self.action_space, actions, action_masks, valid),
        }
        fields["entropy_mask"] = fields["head_mask"]
        if self.has_entropy_masks:
            entropy_masks = take(self.entropy_masks)
            if has_padding:
                entropy_masks[..., CANONICAL_ACTION] |= ~valid[..., None]
            fields["entropy_masks"] = entropy_masks
            fields["entropy_conditions"] = take(self.entropy_conditions)
            fields["entropy_mask"] = (entropy_masks.sum(-1) > 1) & valid[..., None]
        hidden = {
            "initial_hidden_h": self._entering(self.hidden_h, env_index, valid, length),
            "initial_hidden_c": self._entering(self.hidden_c, env_index, valid, length),
        }

        # One transfer; then cut the sequences into parts.
        moved = to_device({**fields, **hidden}, torch.device(device))
        moved["starts"] = starts[envs] & valid_cpu
        for name in (*fields, "starts"):
            moved[name] = moved[name].unflatten(1, (-1, length)).flatten(0, 1)
        return SequenceBatch(**moved)

    def _entering(self, hidden: Tensor, env_index: Tensor, valid: Tensor, length: int) -> Tensor:
        """Return the hidden state [L, R, D] that entered the first step of each sequence."""
        entering = hidden[env_index, ::length]
        is_unused = ~valid[:, ::length, None, None]
        return entering.masked_fill(is_unused, 0.0).flatten(0, 1).transpose(0, 1)

    # --- checks ---------------------------------------------------------------------------------

    def _validate_and_sync(self) -> tuple[Tensor, Tensor]:
        """Check all values, and return step counts [E] and episode starts [E, T] on the CPU."""
        valid = self.valid
        returns = self.returns
        has_no_action = ~self.action_masks.any(-1) & valid[..., None]
        is_truncated = self.truncations & valid
        lacks_bootstrap = is_truncated & self.bootstrap_values.isnan()
        after_last = (
            torch.arange(self.max_steps_per_env + 1, device=self.device)
            == self.step_counts[:, None]
        )
        # Causes come before their effects: the first entry with a NaN is reported.
        non_finite = {  # [E, T] or [E, T + 1] bool
            "states": valid & ~_is_finite(self.states),
            "rewards": valid & ~_is_finite(self.rewards),
            "final_observations": is_truncated & ~_is_finite(self.bootstrap_values),
            "the observation after the last step": (
                after_last & ~_is_finite(self._last_values)[:, None]
            ),
            "values": valid & ~_is_finite(self.values),
            "log_probs": valid & ~_is_finite(self.log_probs),
            "hidden": valid & ~(_is_finite(self.hidden_h) & _is_finite(self.hidden_c)),
            "returns": valid & ~_is_finite(returns),
        }

        # Fetch counts, episode starts and all flags together.
        flags = [has_no_action.any(), lacks_bootstrap.any()]
        flags += [is_wrong.any() for is_wrong in non_finite.values()]
        fetched = torch.cat(
            (self.step_counts, self.episode_starts.flatten(), torch.stack(flags))
        ).cpu()
        sizes = (self.num_envs, self.num_envs * self.max_steps_per_env, len(flags))
        counts, starts, flags_cpu = fetched.split(sizes)

        if flags_cpu[0]:
            masks = self.action_masks | ~valid[..., None, None]
            _validate_action_mask(masks, self.action_space.names)
        if flags_cpu[1]:
            raise missing_final_observation(lacks_bootstrap.any(1))
        for field, flag in zip(non_finite, flags_cpu[2:].tolist(), strict=True):
            if flag:
                env, step = non_finite[field].nonzero()[0].tolist()
                raise NonFiniteError(
                    "A number of the rollout is NaN or infinite",
                    given=f"{field} of environment {env}, step {step}",
                    fix="nothing was learned from this rollout: correct the environment, or call "
                    f"buffer.clear_env({env}) and compute the advantages again",
                )
        return counts, starts.view(self.num_envs, self.max_steps_per_env).bool()

    def _checked_step(
        self, fields: Mapping[str, Tensor], hidden: Hidden, rows: int
    ) -> dict[str, Tensor]:
        """Check one step of `rows` environments, and return all of its tensors, detached."""
        expected = dict(self._step_fields)
        if self.has_entropy_masks and "entropy_masks" in fields:
            expected |= self._entropy_fields
        if fields.keys() != expected.keys():
            wrong = sorted(fields.keys() ^ expected.keys())
            received = f"unknown or missing: {', '.join(wrong)}"
            valid = ", ".join(self._step_fields)
            raise RolloutError("A step has the wrong fields", given=received, valid=valid)
        hidden_shape = (self.lstm_layers, rows, self.lstm_hidden_dim)
        for name, part in zip(("hidden_h", "hidden_c"), hidden, strict=True):
            self._check_field(name, part, hidden_shape, torch.float32)
        for name, (shape, dtype) in expected.items():
            self._check_field(name, fields[name], (rows, *shape), dtype)
        step = {name: value.detach() for name, value in fields.items()}
        if self.has_entropy_masks and "entropy_masks" not in fields:
            # The entropies count with the masks of the chosen actions.
            names, actions = self.action_space.names, step["actions"]
            conditions = [condition_index(self.action_space, name, actions) for name in names]
            step["entropy_masks"] = step["action_masks"]
            step["entropy_conditions"] = torch.stack(conditions, -1)
        step["hidden_h"] = hidden[0].detach().transpose(0, 1)
        step["hidden_c"] = hidden[1].detach().transpose(0, 1)
        return step

    def _check_field(
        self, name: str, value: Tensor, shape: tuple[int, ...], dtype: torch.dtype
    ) -> None:
        if value.shape != shape or value.dtype != dtype or value.device != self.device:
            raise RolloutError(
                f"The rollout cannot hold this {name!r}",
                given=f"{value.dtype} {list(value.shape)} on {value.device}",
                valid=f"{dtype} {list(shape)} on {self.device}",
            )

    def _to_row(self, value: float | Tensor, dtype: torch.dtype) -> Tensor:
        """Return a number as a row [1]. The dtype of a tensor is checked and not converted."""
        if isinstance(value, Tensor):
            return value[None]
        return torch.tensor([value], dtype=dtype, device=self.device)

    def _full_error(self, env_id: int) -> RolloutError:
        return RolloutError(
            f"Environment {env_id} is full",
            given=f"step {self.max_steps_per_env + 1}",
            valid=f"{self.max_steps_per_env} steps in a rollout",
            fix="update and reset before you add more",
        )

    def _require_env(self, env_id: int) -> None:
        if not 0 <= env_id < self.num_envs:
            valid = f"0 to {self.num_envs - 1}"
            raise RolloutError("There is no such environment", given=env_id, valid=valid)

    def _count_steps(self) -> None:
        """Update the counts on the CPU after the steps of a single environment changed."""
        fewest, highest = self.step_counts.aminmax()
        self.max_length = int(highest)
        self._is_uniform = bool(fewest == highest)
        self._invalidate()

    def _invalidate(self) -> None:
        """Discard the results that were computed from the steps."""
        self._advantages = None
        self._returns = None
        self._validated = None


def missing_final_observation(truncated: Tensor) -> RolloutError:
    """Return the error for environments [E] bool that were truncated without a final state."""
    return RolloutError(
        "An episode was cut and what would have followed has no value",
        given=f"environments {truncated.nonzero()[:, 0].tolist()[:8]}",
        fix="give final_observations, or call it a terminal if nothing follows",
    )


def _require_computed(tensor: Tensor | None) -> Tensor:
    if tensor is None:
        raise RolloutError(
            "The advantages of this rollout are not computed",
            fix="call compute_advantages_and_returns after the last step",
        )
    return tensor


def _is_finite(values: Tensor) -> Tensor:
    """Return whether all numbers are finite, [E] or [E, T], of values [E] or [E, T, ...]."""
    is_finite = values.isfinite()
    return is_finite if is_finite.ndim < 3 else is_finite.flatten(2).all(-1)


# --- one transfer to the GPU ------------------------------------------------------------------


def to_device(tensors: Mapping[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    """Copy tensors to a device.

    From the CPU to a GPU they go in one asynchronous transfer through pinned memory. Packing copies
    the tensors, so their sources may be overwritten at once.
    """
    if device.type != "cuda" or any(tensor.is_cuda for tensor in tensors.values()):
        return {name: tensor.to(device) for name, tensor in tensors.items()}
    packed = pack_bytes(tensors, pin_memory=True)
    return unpack_bytes(packed.to(device, non_blocking=True), tensors)


def pack_bytes(tensors: Mapping[str, Tensor], pin_memory: bool = False) -> Tensor:
    """Concatenate the bytes of tensors, [bytes] uint8.

    Tensors with larger elements come first, so that every tensor is aligned.
    """
    parts = [
        tensors[name].contiguous().view(-1).view(torch.uint8) for name in _by_element_size(tensors)
    ]
    size = sum(len(part) for part in parts)
    return torch.cat(parts, out=torch.empty(size, dtype=torch.uint8, pin_memory=pin_memory))


def unpack_bytes(packed: Tensor, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return views of packed bytes with the names, shapes and dtypes of `like`."""
    names = _by_element_size(like)
    parts = packed.split([like[name].nbytes for name in names])
    unpacked = {
        name: part.view(like[name].dtype).view(like[name].shape)
        for name, part in zip(names, parts, strict=True)
    }
    return {name: unpacked[name] for name in like}


def _by_element_size(tensors: Mapping[str, Tensor]) -> list[str]:
    return sorted(tensors, key=lambda name: -tensors[name].element_size())
