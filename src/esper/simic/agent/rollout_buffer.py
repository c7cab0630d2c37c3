"""What happened since the last update, for all environments, pre-allocated.

Shapes: `E` environments, `T` time, `F` state features, `H` heads, `A` actions of the largest head,
`L` layers, `D` hidden size, `K` environments in question.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from esper.leyline.constants import (
    DEFAULT_EPISODE_LENGTH,
    DEFAULT_GAE_LAMBDA,
    DEFAULT_GAMMA,
    DEFAULT_LSTM_HIDDEN_DIM,
    DEFAULT_LSTM_LAYERS,
)
from esper.leyline.errors import EsperError
from esper.leyline.heads import CANONICAL_ACTION, ActionSpace
from esper.simic.agent.advantages import generalised_advantages, normalised
from esper.simic.agent.types import SequenceBatch
from esper.tamiyo.sequences import Hidden


class RolloutError(EsperError):
    """A rollout buffer that was given something it cannot hold, or was used out of order."""


class TamiyoRolloutBuffer:
    """Steps of E environments, at most T each, whole sequences in order of time.

    An environment's next step begins an episode after `start_episode`, after an episode ended,
    after `clear_env`, and at the very beginning; `next_starts` says where. Rollout and update
    reset the memory there, and advantages do not look across. An episode that is not over goes
    on in the next rollout: `reset` forgets the steps, not who is in the middle of what.

    `add` takes the hidden state entering the step. The one that enters an environment's first
    step is kept; the update recomputes the others from it.
    """

    def __init__(
        self,
        space: ActionSpace,
        state_dim: int,
        envs: int,
        steps: int = DEFAULT_EPISODE_LENGTH,
        lstm_hidden_dim: int = DEFAULT_LSTM_HIDDEN_DIM,
        lstm_layers: int = DEFAULT_LSTM_LAYERS,
        device: torch.device | str = "cpu",
    ) -> None:
        if min(envs, steps) < 1:
            raise RolloutError(
                "A rollout needs room", given=f"{envs} environments, {steps} steps", valid="from 1"
            )
        self.space, self.state_dim, self.envs, self.steps = space, state_dim, envs, steps
        self.lstm_hidden_dim, self.lstm_layers = lstm_hidden_dim, lstm_layers
        self.device = torch.device(device)
        heads, widest = len(space), max(space.sizes)
        f, b, i = torch.float32, torch.bool, torch.int64
        # What a step holds for one environment: shape and type of each field.
        self._fields: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
            "states": ((state_dim,), f),
            "actions": ((heads,), i),
            "masks": ((heads, widest), b),
            "log_probs": ((heads,), f),
            "values": ((), f),
            "rewards": ((), f),
            "terminals": ((), b),
            "truncations": ((), b),
            "bootstraps": ((), f),
        }
        self._data = {
            name: torch.zeros((envs, steps, *shape), dtype=dtype, device=self.device)
            for name, (shape, dtype) in self._fields.items()
        }
        self._starts = torch.zeros(envs, steps, dtype=b)
        hidden = (lstm_layers, envs, lstm_hidden_dim)
        self._h = torch.zeros(hidden, device=self.device)
        self._c = torch.zeros(hidden, device=self.device)
        self.counts = torch.zeros(envs, dtype=i)  # [E] steps held
        self.next_starts = torch.ones(envs, dtype=b)  # [E] does the next step begin an episode?
        self._advantages: Tensor | None = None  # [E, T]
        self._returns: Tensor | None = None  # [E, T]

    def __len__(self) -> int:
        """Steps held, of all environments together."""
        return int(self.counts.sum())

    @property
    def full(self) -> bool:
        return bool((self.counts == self.steps).all())

    @property
    def valid(self) -> Tensor:
        """[E, T] bool: the steps that were taken."""
        return torch.arange(self.steps) < self.counts[:, None]

    def __getitem__(self, field: str) -> Tensor:
        """One field of all steps, [E, T, ...], without a copy."""
        if field not in self._data:
            raise RolloutError(
                "The rollout has no such field", given=repr(field), valid=", ".join(self._data)
            )
        return self._data[field]

    def add(self, *, hidden: Hidden, active: Tensor | None = None, **step: Tensor) -> None:
        """Append one step of every environment: each field [E, ...], hidden [L, E, D] each.

        Fields: states, actions, masks, log_probs, values, rewards, terminals, truncations and
        bootstraps (the value of the true last state where the step was truncated). Environments
        that are not `active` [E] bool idle: nothing is kept of their rows.
        """
        self._check(step, self.envs)
        self._check_hidden(hidden, self.envs)
        if active is not None:
            self._check_one("active", active, (self.envs,), torch.bool)
            self._add_some(active.nonzero()[:, 0], step, hidden)
            return
        self._require_room(self.counts)
        time = int(self.counts[0])
        together = bool((self.counts == time).all())
        rows = slice(None) if together else torch.arange(self.envs)
        when = time if together else self.counts
        self._write(rows, when, step, hidden)

    def _add_some(self, rows: Tensor, step: Mapping[str, Tensor], hidden: Hidden) -> None:
        envs = rows.cpu()
        full = envs[self.counts[envs] >= self.steps]
        if len(full):
            self._require_room(self.counts[full], int(full[0]))
        taken = {name: value[rows] for name, value in step.items()}
        self._write(envs, self.counts[envs], taken, (hidden[0][:, rows], hidden[1][:, rows]))

    def add_single(self, env: int, *, hidden: Hidden, **step: Tensor) -> None:
        """Append one step of one environment: fields without the first axis, hidden [L, 1, D]."""
        self._require_env(env)
        self._check_hidden(hidden, 1)
        rows = {name: value[None] for name, value in step.items()}
        self._check(rows, 1)
        self._require_room(self.counts[env : env + 1], env)
        self._write(slice(env, env + 1), int(self.counts[env]), rows, hidden)

    def _write(
        self,
        rows: slice | Tensor,
        when: int | Tensor,
        step: Mapping[str, Tensor],
        hidden: Hidden,
    ) -> None:
        for name, value in step.items():
            self._data[name][rows, when] = value.detach()
        self._starts[rows, when] = self.next_starts[rows]
        ended = step["terminals"] | step["truncations"]
        self.next_starts[rows] = ended.cpu()
        first = (self.counts[rows] == 0).to(self.device)
        if isinstance(when, Tensor) or when == 0:
            for kept, entering in zip((self._h, self._c), hidden, strict=True):
                kept[:, rows] = torch.where(first[:, None], entering.detach(), kept[:, rows])
        self.counts[rows] += 1
        self._advantages = self._returns = None

    def start_episode(self, env: int) -> None:
        """Let the next step of `env` begin an episode."""
        self._require_env(env)
        if int(self.counts[env]) and not bool(self.next_starts[env]):
            raise RolloutError(
                f"Environment {env} is in the middle of an episode",
                fix="call end_episode first, so that its advantages end there",
            )
        self.next_starts[env] = True

    def end_episode(self, env: int, *, truncated_value: float | None = None) -> None:
        """Let the last step of `env` end its episode: terminal, or cut with that value ahead."""
        self._require_env(env)
        last = int(self.counts[env]) - 1
        if last < 0:
            raise RolloutError(f"Environment {env} has no step that could end an episode")
        self._data["terminals"][env, last] = truncated_value is None
        self._data["truncations"][env, last] = truncated_value is not None
        self._data["bootstraps"][env, last] = truncated_value or 0.0
        self.next_starts[env] = True
        self._advantages = self._returns = None

    def clear_env(self, env: int) -> None:
        """Forget everything of one environment, its memory included; it begins an episode."""
        self._require_env(env)
        self.counts[env] = 0
        self._h[:, env] = 0.0
        self._c[:, env] = 0.0
        self.next_starts[env] = True
        self._advantages = self._returns = None

    def reset(self) -> None:
        """Forget all steps. Nothing is overwritten: the counts say what is there."""
        self.counts.zero_()
        self._advantages = self._returns = None

    def compute_advantages_and_returns(
        self,
        last_values: Tensor,
        gamma: float = DEFAULT_GAMMA,
        gae_lambda: float = DEFAULT_GAE_LAMBDA,
    ) -> None:
        """Estimate advantages; `last_values` [E] is what follows each environment's last step."""
        self._check_one("last_values", last_values, (self.envs,), torch.float32)
        data = self._data
        self._advantages = generalised_advantages(
            data["rewards"],
            data["values"],
            data["terminals"],
            data["truncations"],
            data["bootstraps"],
            last_values,
            self.counts,
            gamma=gamma,
            gae_lambda=gae_lambda,
        )
        self._returns = self._advantages + data["values"]

    def normalize_advantages(self) -> None:
        """Mean 0, standard deviation 1 over the steps taken; the returns stay as they are."""
        self._advantages = normalised(self.advantages, self.valid.to(self.device))

    @property
    def advantages(self) -> Tensor:
        """[E, T]"""
        return self._require_computed(self._advantages)

    @property
    def returns(self) -> Tensor:
        """[E, T]"""
        return self._require_computed(self._returns)

    def get_batched_sequences(self, device: torch.device | str) -> SequenceBatch:
        """A copy of all environments that took a step, as sequences on `device`.

        Padding holds zero states and the canonical action as the only legal one: nothing that an
        earlier rollout left there can reach a loss or an error.
        """
        target = torch.device(device)
        rows = self.counts.nonzero()[:, 0]
        if not len(rows):
            raise RolloutError("The rollout is empty", fix="add steps before you ask for them")
        valid = self.valid[rows]
        here, open_ = rows.to(self.device), valid.to(self.device)
        whole = bool(valid.all())

        def send(tensor: Tensor, padding: bool | float = 0) -> Tensor:
            kept = tensor[here]
            if not whole:
                shape = (*open_.shape, *(1,) * (kept.ndim - 2))
                kept = torch.where(open_.view(shape), kept, torch.as_tensor(padding).to(kept))
            return _send(kept, target)

        masks = send(self._data["masks"], padding=False)
        if not whole:
            masks[..., CANONICAL_ACTION] |= ~_send(open_, target)[..., None]
        return SequenceBatch(
            states=send(self._data["states"]),
            actions=send(self._data["actions"]),
            masks=masks,
            log_probs=send(self._data["log_probs"]),
            values=send(self._data["values"]),
            advantages=send(self.advantages),
            returns=send(self.returns),
            valid=_send(open_, target),
            starts=self._starts[rows] & valid,
            hidden=(_send(self._h[:, here], target), _send(self._c[:, here], target)),
        )

    def _check(self, step: Mapping[str, Tensor], rows: int) -> None:
        if step.keys() != self._fields.keys():
            wrong = sorted(step.keys() ^ self._fields.keys())
            raise RolloutError(
                "A step has the wrong fields",
                given=f"unknown or missing: {', '.join(wrong)}",
                valid=", ".join(self._fields),
            )
        for name, (shape, dtype) in self._fields.items():
            self._check_one(name, step[name], (rows, *shape), dtype)

    def _check_hidden(self, hidden: Hidden, rows: int) -> None:
        shape = (self.lstm_layers, rows, self.lstm_hidden_dim)
        for name, part in zip(("hidden h", "hidden c"), hidden, strict=True):
            self._check_one(name, part, shape, torch.float32)

    def _check_one(
        self, name: str, value: Tensor, shape: tuple[int, ...], dtype: torch.dtype
    ) -> None:
        if value.shape != shape or value.dtype != dtype or value.device.type != self.device.type:
            raise RolloutError(
                f"The rollout cannot hold this {name!r}",
                given=f"{value.dtype} {list(value.shape)} on {value.device}",
                valid=f"{dtype} {list(shape)} on {self.device}",
            )

    def _require_room(self, counts: Tensor, first: int = 0) -> None:
        if bool((counts >= self.steps).any()):
            env = first + int((counts >= self.steps).nonzero()[0])
            raise RolloutError(
                f"Environment {env} is full",
                given=f"step {self.steps + 1}",
                valid=f"{self.steps} steps in a rollout",
                fix="update and reset before you add more",
            )

    def _require_env(self, env: int) -> None:
        if not 0 <= env < self.envs:
            raise RolloutError(
                "There is no such environment", given=env, valid=f"0 to {self.envs - 1}"
            )

    def _require_computed(self, tensor: Tensor | None) -> Tensor:
        if tensor is None:
            raise RolloutError(
                "The advantages of this rollout are not computed",
                fix="call compute_advantages_and_returns after the last step",
            )
        return tensor


def _send(tensor: Tensor, device: torch.device) -> Tensor:
    """Through pinned memory to a GPU, without waiting: the source may be overwritten at once,
    because pinning copies it, and the pinned copy lives until the transfer is done."""
    if device.type == "cuda" and tensor.device.type == "cpu":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)
