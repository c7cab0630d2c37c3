"""What happened since the last update, for all environments, pre-allocated.

Shapes: `E` environments, `T` time, `F` state features, `H` heads, `A` actions of the largest head,
`L` layers, `D` hidden size, `K` environments in question.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from esper.leyline import CANONICAL_ACTION, ActionSpace, EsperError, constants
from esper.simic.agent.advantages import generalised_advantages, mattered, normalised
from esper.simic.agent.processes import ALONE, Processes
from esper.simic.agent.types import SequenceBatch
from esper.tamiyo.choosing import require_choice
from esper.tamiyo.network import Hidden


class RolloutError(EsperError):
    """A rollout buffer that was given something it cannot hold, or was used out of order."""


class NonFiniteError(EsperError):
    """A number that is NaN or infinite: which, and in which environment and step of the rollout."""


class TamiyoRolloutBuffer:
    """Steps of E environments, at most T each, whole sequences in order of time.

    An environment's next step begins an episode after `start_episode`, after an episode ended,
    after `clear_env`, and at the very beginning; `next_starts` says where. Rollout and update
    reset the memory there, and advantages do not look across. An episode that is not over goes
    on in the next rollout: `reset` forgets the steps, not who is in the middle of what.

    `add` takes the hidden state entering the step, and all of them are kept.

    Everything lies on one device, and adding steps of all environments does not wait for it:
    what a check would have to look up there is known here (`longest`), or checked for the whole
    rollout together in `get_batched_sequences`, numbers that are not finite included.
    """

    def __init__(
        self,
        space: ActionSpace,
        state_dim: int,
        envs: int,
        steps: int = constants.DEFAULT_EPISODE_LENGTH,
        lstm_hidden_dim: int = constants.DEFAULT_LSTM_HIDDEN_DIM,
        lstm_layers: int = constants.DEFAULT_LSTM_LAYERS,
        device: torch.device | str = "cpu",
    ) -> None:
        if min(envs, steps) < 1:
            raise RolloutError(
                "A rollout needs room", given=f"{envs} environments, {steps} steps", valid="from 1"
            )
        self.space, self.state_dim, self.envs, self.steps = space, state_dim, envs, steps
        self.lstm_hidden_dim, self.lstm_layers = lstm_hidden_dim, lstm_layers
        self.device = torch.empty(0, device=device).device  # with its index, as tensors name it
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
        self.spent = False  # were these steps learned from?
        self._rows = torch.arange(envs, device=self.device)
        self._last_values = torch.zeros(envs, device=self.device)  # [E]
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

    def add(self, *, hidden: Hidden, active: Tensor | None = None, **step: Tensor) -> None:
        """Append one step of every environment: each field [E, ...], hidden [L, E, D] each.

        Fields: states, actions, masks, log_probs, values, rewards, terminals, truncations and
        bootstraps (the value of the true last state where the step was truncated). Environments
        that are not `active` [E] bool idle: nothing is kept of their rows.
        """
        whole = self._checked(step, hidden, self.envs) | {"starts": self.next_starts}
        if active is not None:
            self._check_one("active", active, (self.envs,), torch.bool)
        if self.longest == self.steps:
            self._require_room(self.counts if active is None else self.counts * active)
        ended = whole["terminals"] | whole["truncations"]
        if active is None and self._even:
            for name, value in whole.items():
                self._data[name][:, self.longest] = value
            self.next_starts.copy_(ended)
            self.counts += 1
        else:
            if active is None:
                active = torch.ones_like(self.next_starts)
            place = (self._rows, self.counts.clamp(max=self.steps - 1))
            for name, value in whole.items():
                data, keeps = self._data[name], active.view(-1, *(1,) * (value.ndim - 1))
                data[place] = torch.where(keeps, value, data[place])
            self.next_starts.copy_(torch.where(active, ended, self.next_starts))
            self.counts += active
            self._even = False
        self.longest = min(self.longest + 1, self.steps)
        self._advantages = self._returns = None

    def add_single(self, env: int, *, hidden: Hidden, **step: Tensor) -> None:
        """Append one step of one environment: fields without the first axis, hidden [L, 1, D].

        For worlds that come one by one: it waits for the device.
        """
        self._require_env(env)
        row = self._checked({name: value[None] for name, value in step.items()}, hidden, 1)
        self._require_room(self.counts[env : env + 1], env)
        when = int(self.counts[env])
        row["starts"] = self.next_starts[env : env + 1]
        for name, value in row.items():
            self._data[name][env, when] = value[0]
        self.next_starts[env] = (row["terminals"] | row["truncations"])[0]
        self.counts[env] += 1
        self._recount()

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
        self._recount()

    def _recount(self) -> None:
        """After the steps of one environment changed: look up what is known of all."""
        least, most = self.counts.aminmax()
        self.longest, self._even = int(most), bool(least == most)
        self._advantages = self._returns = None

    def spend(self) -> None:
        """From now on these steps were learned from, and an update refuses them."""
        self.spent = True

    def reset(self) -> None:
        """Forget all steps. Nothing is overwritten: the counts say what is there."""
        self.counts.zero_()
        self.longest, self._even, self.spent = 0, True, False
        self._advantages = self._returns = None

    def compute_advantages_and_returns(
        self,
        last_values: Tensor,
        gamma: float = constants.DEFAULT_GAMMA,
        gae_lambda: float = constants.DEFAULT_GAE_LAMBDA,
    ) -> None:
        """Estimate advantages; `last_values` [E] is what follows each environment's last step."""
        self._check_one("last_values", last_values, (self.envs,), torch.float32)
        names = ("rewards", "values", "terminals", "truncations", "bootstraps")
        given = (*(self._data[name] for name in names), last_values, self.counts)
        self._advantages = generalised_advantages(*given, gamma=gamma, gae_lambda=gae_lambda)
        self._returns = self._advantages + self._data["values"]
        self._last_values = last_values

    @property
    def advantages(self) -> Tensor:
        """[E, T]"""
        return self._require_computed(self._advantages)

    @property
    def returns(self) -> Tensor:
        """[E, T]"""
        return self._require_computed(self._returns)

    def get_batched_sequences(
        self,
        device: torch.device | str,
        *,
        processes: Processes | None = None,
        length: int | None = None,
    ) -> SequenceBatch:
        """A copy of all environments that took a step, as sequences on `device`.

        A `length` that divides the rollout's cuts them; each has the memory it was entered with.

        Padding holds zero states and the canonical action as the only legal one: nothing that an
        earlier rollout left there can reach a loss or an error. This waits for the device once,
        since where episodes begin decides the shape of what is computed.

        With `processes` the copy's advantages are normalised over all of them; one of several may
        be without a step, and what one of them refuses, all refuse.
        """
        together, length = processes or ALONE, length or self.steps
        with together.refusing_together(self.device):
            if not self.longest and together.size == 1:
                raise RolloutError("The rollout is empty", fix="add steps before you ask for them")
            counts, starts = self._looked_up()
        rows, advantages = counts.nonzero()[:, 0], self.advantages
        if processes is not None:
            advantages = normalised(advantages, self.valid, processes)
        valid = torch.arange(self.steps) < counts[rows, None]
        whole = bool(valid.all())
        here = rows.to(self.device, non_blocking=True)
        open_ = self.valid[here]

        def taken(tensor: Tensor) -> Tensor:
            kept = tensor[here]
            closed = ~open_.view(*open_.shape, *(1,) * (kept.ndim - 2))
            return kept if whole else kept.masked_fill_(closed, 0)

        names = ("states", "actions", "masks", "log_probs", "values")
        parts = {name: taken(self._data[name]) for name in names}
        if not whole:
            parts["masks"][..., CANONICAL_ACTION] |= ~open_[..., None]
        for name in "hc":  # [L, sequences, D]
            unused = ~open_[:, ::length, None, None]
            entering = self._data[name][here, ::length].masked_fill(unused, 0.0)
            parts[name] = entering.flatten(0, 1).transpose(0, 1)
        parts |= {"advantages": taken(advantages), "returns": taken(self.returns)}
        parts["matters"] = mattered(self.space, parts["actions"], parts["masks"], open_)
        moved = sent({**parts, "valid": open_}, torch.device(device))
        hidden = (moved.pop("h"), moved.pop("c"))
        moved["starts"] = starts[rows] & valid
        cut = {name: part.unflatten(1, (-1, length)).flatten(0, 1) for name, part in moved.items()}
        return SequenceBatch(**cut, hidden=hidden)

    def _looked_up(self) -> tuple[Tensor, Tensor]:
        """Counts [E] and episode starts [E, T] on the CPU; refuses steps that are not sound."""
        valid, data = self.valid, self._data
        closed = (~data["masks"].any(-1) & valid[..., None]).any()
        cut = data["truncations"] & data["bootstraps"].isnan() & valid
        last = torch.arange(self.steps + 1, device=self.device) == self.counts[:, None]
        unsound = {  # [E, T] or [E, T + 1] bool, causes before what follows from them
            "states": valid & ~_finite(data["states"]),
            "rewards": valid & ~_finite(data["rewards"]),
            "final_observations": valid & data["truncations"] & ~_finite(data["bootstraps"]),
            "the observation after the last step": last & ~_finite(self._last_values)[:, None],
            "values": valid & ~_finite(data["values"]),
            "log_probs": valid & ~_finite(data["log_probs"]),
            "hidden": valid & ~(_finite(data["h"]) & _finite(data["c"])),
            "returns": valid & ~_finite(self.returns),
        }
        flags = torch.stack((closed, cut.any(), *(wrong.any() for wrong in unsound.values())))
        facts = torch.cat((self.counts, data["starts"].flatten(), flags))
        counts, starts, found = facts.cpu().split((self.envs, self.envs * self.steps, len(flags)))
        if found[0]:
            require_choice(data["masks"] | ~valid[..., None, None], self.space.names)
        if found[1]:
            raise missing_last_observation(cut.any(1))
        for field, flag in zip(unsound, found[2:].tolist(), strict=True):
            if flag:
                env, step = unsound[field].nonzero()[0].tolist()
                raise NonFiniteError(
                    "A number of the rollout is NaN or infinite",
                    given=f"{field} of environment {env}, step {step}",
                    fix="nothing was learned from this rollout: correct the environment, or go on "
                    f"without it by buffer.clear_env({env}) and finish",
                )
        return counts, starts.view(self.envs, self.steps).bool()

    def _checked(self, step: Mapping[str, Tensor], hidden: Hidden, rows: int) -> dict[str, Tensor]:
        """All that is kept of a step of so many environments, rows first."""
        if step.keys() != self._fields.keys():
            wrong = sorted(step.keys() ^ self._fields.keys())
            given, valid = f"unknown or missing: {', '.join(wrong)}", ", ".join(self._fields)
            raise RolloutError("A step has the wrong fields", given=given, valid=valid)
        memory = (self.lstm_layers, rows, self.lstm_hidden_dim)
        for name, part in zip(("hidden h", "hidden c"), hidden, strict=True):
            self._check_one(name, part, memory, torch.float32)
        for name, (shape, dtype) in self._fields.items():
            self._check_one(name, step[name], (rows, *shape), dtype)
        h, c = (part.detach().transpose(0, 1) for part in hidden)
        return {**{name: value.detach() for name, value in step.items()}, "h": h, "c": c}

    def _check_one(
        self, name: str, value: Tensor, shape: tuple[int, ...], dtype: torch.dtype
    ) -> None:
        if value.shape != shape or value.dtype != dtype or value.device != self.device:
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


def _finite(values: Tensor) -> Tensor:
    """[E] or [E, T] bool: is everything finite there, in values [E] or [E, T, ...]?"""
    finite = values.isfinite()
    return finite if finite.ndim < 3 else finite.flatten(2).all(-1)


def sent(tensors: Mapping[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    """The tensors on `device`.

    From the CPU to a GPU they go in one transfer through pinned memory, which is not waited for.
    Packing copies them, so their source may be overwritten at once; the pinned copy lives until
    the transfer is done.
    """
    if device.type != "cuda" or any(tensor.is_cuda for tensor in tensors.values()):
        return {name: tensor.to(device) for name, tensor in tensors.items()}
    return unpacked(packed(tensors, pin=True).to(device, non_blocking=True), tensors)


def packed(tensors: Mapping[str, Tensor], pin: bool = False) -> Tensor:
    """One row of bytes; the widest types come first, so that each begins where it may."""
    parts = [tensors[name].contiguous().view(-1).view(torch.uint8) for name in _order(tensors)]
    size = sum(len(part) for part in parts)
    return torch.cat(parts, out=torch.empty(size, dtype=torch.uint8, pin_memory=pin))


def unpacked(row: Tensor, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Views of the bytes as the tensors that were packed, in their order."""
    order = _order(like)
    parts = row.split([like[name].nbytes for name in order])
    found = {
        name: part.view(like[name].dtype).view(like[name].shape)
        for name, part in zip(order, parts, strict=True)
    }
    return {name: found[name] for name in like}


def _order(tensors: Mapping[str, Tensor]) -> list[str]:
    return sorted(tensors, key=lambda name: -tensors[name].element_size())
