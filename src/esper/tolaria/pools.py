"""Pools: the rows in which a population keeps hosts and seeds.

A pool holds one kind of module: a host, one blueprint at one slot, or one slot's blend gates. Its
rows are copies with their own optimiser state. The last row is spare: it stands in wherever a plan
of fixed size has nothing to compute, and is never active. A pool that runs out of rows doubles.

Shapes: `R` rows, `P` parameters of one row, `K` rows in question.
"""

from collections.abc import Mapping
from dataclasses import fields

import torch
from torch import Tensor

from esper.leyline.errors import AgreementError
from esper.tolaria.optimisers import RowState
from esper.tolaria.templates import Template

VACANT = -1


class Pool:
    """Rows of one template, given to environments and taken back."""

    def __init__(
        self, template: Template, moments: int, *, device: torch.device, dtype: torch.dtype
    ) -> None:
        self.template = template
        self.owner = torch.zeros(
            0, dtype=torch.int64
        )  # [R - 1] environment of each row, on the CPU
        self.state = _empty(template, moments, device, dtype)
        self.squares = torch.zeros_like(self.state.theta)  # [R, P] squared gradients of the epoch
        self.leaf = self.state.theta.detach().requires_grad_()
        self.version = 0  # changes when storage moves

    @property
    def capacity(self) -> int:
        return len(self.owner)

    @property
    def spare(self) -> int:
        return self.capacity

    @property
    def rows_in_use(self) -> Tensor:
        return (self.owner != VACANT).nonzero()[:, 0]

    def give(self, environments: Tensor) -> Tensor:
        """Vacant rows for these environments, lowest first; grows when there are too few."""
        vacant = (self.owner == VACANT).nonzero()[:, 0]
        if len(vacant) < len(environments):
            self._grow(self.capacity + max(self.capacity, len(environments) - len(vacant)))
            vacant = (self.owner == VACANT).nonzero()[:, 0]
        rows = vacant[: len(environments)]
        self.owner[rows] = environments
        return rows

    def take_back(self, rows: Tensor) -> None:
        self.owner[rows] = VACANT
        self.state.active[rows] = False

    def start(self, rows: Tensor, values: Tensor, *, rate: Tensor, decay: Tensor) -> None:
        """Newborn rows: these parameters, fresh optimiser state."""
        state = self.state
        state.theta[rows] = values.to(state.theta)
        for moment in state.moments:
            moment[rows] = 0.0
        state.steps[rows] = 0.0
        state.rate[rows] = rate.to(state.rate)[:, None]
        state.decay[rows] = decay.to(state.decay)[:, None]
        state.active[rows] = True
        self.squares[rows] = 0.0

    def _grow(self, capacity: int) -> None:
        extra = capacity - self.capacity
        self.owner = torch.cat([self.owner, torch.full((extra,), VACANT)])
        for name, tensor in self.tensors().items():
            fresh = torch.zeros(capacity + 1, *tensor.shape[1:], device=tensor.device)
            fresh = fresh.to(tensor.dtype)
            fresh[: tensor.shape[0] - 1] = tensor[:-1]
            self._put(name, fresh)
        self._moved()

    def tensors(self) -> dict[str, Tensor]:
        """Everything kept by row, for growing, copying, snapshots and checkpoints."""
        state = self.state
        named = {f"moment{i}": moment for i, moment in enumerate(state.moments)}
        per_row = {f.name: getattr(state, f.name) for f in fields(state) if f.name in _PER_ROW}
        return {**named, **per_row, "squares": self.squares}

    def copied(self) -> dict[str, Tensor]:
        return {name: tensor.clone() for name, tensor in self.tensors().items()}

    def put(self, rows: Tensor, saved: Mapping[str, Tensor], old: Tensor) -> None:
        """Make `rows` [K] what the rows `old` [K] were when they were copied."""
        for name, tensor in self.tensors().items():
            tensor[rows] = saved[name][old]

    def idle(self, environments: Tensor) -> None:
        """The rows of these environments take no steps."""
        self.state.active[torch.isin(self.owner, environments).nonzero()[:, 0]] = False

    def set_rates(self, rate: Tensor, decay: Tensor) -> None:
        """Give every row in use the rate and decay of its environment, [N] each."""
        rows = self.rows_in_use
        state, owners = self.state, self.owner[rows]
        state.rate[rows] = rate[owners].to(state.rate)[:, None]
        state.decay[rows] = decay[owners].to(state.decay)[:, None]

    def outdate(self) -> None:
        """What was captured of the storage so far no longer holds."""
        self.version += 1

    def require_fitting(self, saved: Mapping[str, Tensor]) -> None:
        """Refuse rows of another module or another optimiser."""
        ours = {name: tensor.shape[1:] for name, tensor in self.tensors().items()}
        theirs = {name: tensor.shape[1:] for name, tensor in saved.items() if name != "owner"}
        if ours != theirs:
            raise AgreementError(
                "Saved rows do not fit this population",
                given=", ".join(f"{name} {list(shape)}" for name, shape in theirs.items()),
                valid=", ".join(f"{name} {list(shape)}" for name, shape in ours.items()),
                fix="use the same host, blueprints and optimiser as when it was saved",
            )

    def load(self, saved: Mapping[str, Tensor]) -> None:
        """Take over rows, their owners and their state as they were saved."""
        self.owner = saved["owner"].clone()
        for name, tensor in self.tensors().items():
            self._put(name, saved[name].to(tensor.device).clone())
        self._moved()

    def _moved(self) -> None:
        self.leaf = self.state.theta.detach().requires_grad_()
        self.outdate()

    def _put(self, name: str, tensor: Tensor) -> None:
        if name == "squares":
            self.squares = tensor
        elif name.startswith("moment"):
            self.state.moments[int(name.removeprefix("moment"))] = tensor
        else:
            setattr(self.state, name, tensor)


_PER_ROW = ("theta", "steps", "rate", "decay", "active")


def _empty(template: Template, moments: int, device: torch.device, dtype: torch.dtype) -> RowState:
    """A pool's state with the spare row alone."""

    def matrix(columns: int, kind: torch.dtype = dtype) -> Tensor:
        return torch.zeros(1, columns, device=device, dtype=kind)

    plain = bool((template.scales == 1.0).all())
    scale = None if plain else template.scales.to(device=device, dtype=dtype)[None]
    return RowState(
        theta=matrix(template.width),
        moments=[matrix(template.width) for _ in range(moments)],
        steps=matrix(1, torch.float64),
        rate=matrix(1),
        decay=matrix(1),
        active=matrix(1, torch.bool),
        scale=scale,
    )
