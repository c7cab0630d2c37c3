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
from esper.simic.agent.advantages import generalised_advantages, mattered, normalised
from esper.simic.agent.processes import ALONE, Processes
from esper.simic.agent.transfer import sent
from esper.simic.agent.types import SequenceBatch
from esper.tamiyo.distributions import require_choice
from esper.tamiyo.sequences import Hidden


class RolloutError(EsperError):
    """A rollout buffer that was given something it cannot hold, or was used out of order."""


class TamiyoRolloutBuffer:
    """Steps of E environments, at most T each, whole sequences in order of time.

    An environment's next step begins an episode after `start_episode`, after an episode ended,
    after `clear_env`, and at the very beginning; `next_starts` says where. Rollout and update
    reset the memory there, and advantages do not look across. An episode that is not over goes
    on in the next rollout: `reset` forgets the steps, not who is in the middle of what.

    `add` takes the hidden state entering the step, and all of them are kept.

    Everything lies on one device, and adding steps of all environments does not wait for it:
    what a check would have to look up there is known here (`longest`), or checked for the whole
    rollout together in `get_batched_sequences`.
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
        memory = (lstm_layers, lstm_hidden_dim)
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
        kept = {**self._fields, "starts": ((), b), "h": (memory, f), "c": (memory, f)}
        self._data = {
            name: torch.zeros((envs, steps, *shape), dtype=dtype, device=self.device)
            for name, (shape, dtype) in kept.items()
        }
        self.counts = torch.zeros(envs, dtype=i, device=self.device)  # [E] steps held
        # [E] does the next step begin an episode?
        self.next_starts = torch.ones(envs, dtype=b, device=self.device)
        self.longest = 0  # no environment holds more steps than this
        self._even = True  # do all hold exactly that many?
        self._rows = torch.arange(envs, device=self.device)
        self._advantages: Tensor | None = None  # [E, T]
        self._returns: Tensor | None = None  # [E, T]

    def __len__(self) -> int:
        """Steps held, of all environments together."""
        return self.longest * self.envs if self._even else int(self.counts.sum())

    @property
    def full(self) -> bool:
        """Is there no room left in any environment?"""
        return len(self) == self.envs * self.steps

    @property
    def valid(self) -> Tensor:
        """[E, T] bool: the steps that were taken."""
        return torch.arange(self.steps, device=self.device) < self.counts[:, None]

    def __getitem__(self, field: str) -> Tensor:
        """One field of all steps, [E, T, ...], without a copy."""
        if field not in self._data:
            raise RolloutError(
                "The rollout has no such field", given=repr(field), valid=", ".join(self._data)
            )
        return self._data[field]

    def hidden_at(self, step: int) -> Hidden:
        """The memory [L, E, D] with which each environment entered that step."""
        return self._data["h"][:, step].transpose(0, 1), self._data["c"][:, step].transpose(0, 1)

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
        if self.longest == self.steps:
            self._require_room(self.counts if active is None else self.counts * active)
        whole = self._whole(step, hidden, self.next_starts)
        ended = step["terminals"] | step["truncations"]
        if active is None and self._even:
            for name, value in whole.items():
                self._data[name][:, self.longest] = value
            self.next_starts.copy_(ended)
            self.counts += 1
        else:
            if active is None:
                active = torch.ones_like(self.next_starts)
            self._add_some(active, whole)
            self.next_starts.copy_(torch.where(active, ended, self.next_starts))
            self.counts += active
            self._even = False
        self.longest = min(self.longest + 1, self.steps)
        self._advantages = self._returns = None

    def _add_some(self, active: Tensor, step: Mapping[str, Tensor]) -> None:
        place = (self._rows, self.counts.clamp(max=self.steps - 1))
        for name, value in step.items():
            data = self._data[name]
            keeps = active.view(-1, *(1,) * (value.ndim - 1))
            data[place] = torch.where(keeps, value, data[place])

    def add_single(self, env: int, *, hidden: Hidden, **step: Tensor) -> None:
        """Append one step of one environment: fields without the first axis, hidden [L, 1, D].

        For worlds that come one by one: it waits for the device.
        """
        self._require_env(env)
        self._check_hidden(hidden, 1)
        rows = {name: value[None] for name, value in step.items()}
        self._check(rows, 1)
        self._require_room(self.counts[env : env + 1], env)
        when = int(self.counts[env])
        for name, value in self._whole(rows, hidden, self.next_starts[env : env + 1]).items():
            self._data[name][env, when] = value[0]
        self.next_starts[env] = (rows["terminals"] | rows["truncations"])[0]
        self.counts[env] += 1
        self.longest = max(self.longest, when + 1)
        self._even = self.envs == 1
        self._advantages = self._returns = None

    @staticmethod
    def _whole(step: Mapping[str, Tensor], hidden: Hidden, starts: Tensor) -> dict[str, Tensor]:
        """All that is kept of a step, rows first."""
        h, c = (part.detach().transpose(0, 1) for part in hidden)
        given = {name: value.detach() for name, value in step.items()}
        return {**given, "starts": starts, "h": h, "c": c}

    def start_episode(self, env: int) -> None:
        """Let the next step of `env` begin an episode."""
        self._require_env(env)
        if self.longest and int(self.counts[env]) and not bool(self.next_starts[env]):
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
        self._data["h"][env] = 0.0
        self._data["c"][env] = 0.0
        self.next_starts[env] = True
        self._even = self.longest == 0
        self._advantages = self._returns = None

    def reset(self) -> None:
        """Forget all steps. Nothing is overwritten: the counts say what is there."""
        self.counts.zero_()
        self.longest, self._even = 0, True
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

    def normalize_advantages(self, processes: Processes = ALONE) -> None:
        """Mean 0, standard deviation 1 over the steps taken; the returns stay as they are."""
        self._advantages = normalised(self.advantages, self.valid, processes)

    @property
    def advantages(self) -> Tensor:
        """[E, T]"""
        return self._require_computed(self._advantages)

    @property
    def returns(self) -> Tensor:
        """[E, T]"""
        return self._require_computed(self._returns)

    def get_batched_sequences(
        self, device: torch.device | str, *, allow_empty: bool = False
    ) -> SequenceBatch:
        """A copy of all environments that took a step, as sequences on `device`.

        Padding holds zero states and the canonical action as the only legal one: nothing that an
        earlier rollout left there can reach a loss or an error. This waits for the device once,
        since where episodes begin decides the shape of what is computed.
        """
        counts, starts = self._looked_up()
        rows = counts.nonzero()[:, 0]
        if not len(rows) and not allow_empty:
            raise RolloutError("The rollout is empty", fix="add steps before you ask for them")
        valid = torch.arange(self.steps) < counts[rows, None]
        whole = bool(valid.all())
        here = rows.to(self.device, non_blocking=True)
        open_ = self.valid[here]

        def taken(tensor: Tensor) -> Tensor:
            kept = tensor[here]
            return kept if whole else kept.masked_fill_(~_beside(open_, kept), 0)

        names = ("states", "actions", "masks", "log_probs", "values")
        parts = {name: taken(self._data[name]) for name in names}
        if not whole:
            parts["masks"][..., CANONICAL_ACTION] |= ~open_[..., None]
        for name, part in zip("hc", self.hidden_at(0), strict=True):
            parts[name] = part[:, here]
        parts |= {"advantages": taken(self.advantages), "returns": taken(self.returns)}
        parts["matters"] = mattered(self.space, parts["actions"], parts["masks"], open_)
        moved = sent({**parts, "valid": open_}, torch.device(device))
        hidden = (moved.pop("h"), moved.pop("c"))
        return SequenceBatch(**moved, starts=starts[rows] & valid, hidden=hidden)

    def _looked_up(self) -> tuple[Tensor, Tensor]:
        """Counts [E] and episode starts [E, T] on the CPU; refuses steps that are not sound."""
        valid = self.valid
        closed = (~self._data["masks"].any(-1) & valid[..., None]).any()
        unknown = (self._data["truncations"] & self._data["bootstraps"].isnan() & valid).any()
        facts = torch.cat(
            (self.counts, self._data["starts"].flatten(), closed[None], unknown[None])
        )
        counts, starts, flags = facts.cpu().split((self.envs, self.envs * self.steps, 2))
        if flags[0]:
            legal = self._data["masks"] | ~valid[..., None, None]
            require_choice(legal, self.space.names)
        if flags[1]:
            cut = self._data["truncations"] & self._data["bootstraps"].isnan() & valid
            raise missing_last_observation(cut.any(1))
        return counts, starts.view(self.envs, self.steps).bool()

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


def missing_last_observation(cut: Tensor) -> RolloutError:
    """The error for environments [E] bool that were cut without showing their last state."""
    return RolloutError(
        "An episode was cut and what would have followed has no value",
        given=f"environments {cut.nonzero()[:, 0].tolist()[:8]}",
        fix="give final_observations, or call it a terminal if nothing follows",
    )


def _beside(flags: Tensor, values: Tensor) -> Tensor:
    """The flags [R, T] with as many axes as the values [R, T, ...]."""
    return flags.view(*flags.shape, *(1,) * (values.ndim - 2))
