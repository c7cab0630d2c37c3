"""Pools: the rows in which a population keeps hosts and seeds.

A pool holds one kind of module: a host, one blueprint at one slot, or one slot's blend gates. Its
rows are copies with their own optimiser state. The last row is spare: it stands in wherever a plan
of fixed size has nothing to compute, and is never active. A pool that runs out of rows doubles.
A template says which columns a module's parameters take, and how a newborn row is drawn.

Shapes: `R` rows, `P` parameters of one row (columns), `K` rows in question, `N` stacked copies.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from esper.kasmina.blueprints import ScalarGate, learning_rate_scales
from esper.leyline.errors import AgreementError, BlueprintError
from esper.tolaria.optimisers import RowState
from esper.tolaria.random_streams import uniform
from esper.tolaria.stacked import Form, stack

VACANT = -1
_UNIFORM = (nn.Linear, nn.modules.conv._ConvNd)  # weights and biases within 1 / sqrt(fan in)


@dataclass(frozen=True)
class _Column:
    """One parameter tensor: where it lies in the row and how it starts."""

    name: str
    shape: torch.Size
    bound: float | None  # uniform within +-bound; None: the constant `value`
    value: float


class Template:
    """What a population needs to know of a module to hold many copies of it as rows."""

    def __init__(self, build: Callable[[], nn.Module], *, known: bool = False) -> None:
        """`known`: linear layers and convolutions start as torch starts them, so that all rows can
        be drawn at once. Otherwise each row is drawn by building the module."""
        self.build = build
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            module = build()
        _require_pure(module)
        self.form: Form = stack(module)
        scales = learning_rate_scales(module)
        self.columns, unknown = _columns(module)
        self.drawn_by_module = unknown or not known
        self.sizes = [column.shape.numel() for column in self.columns]
        self.width = sum(self.sizes)
        self.scales = self._by_column([scales[column.name] for column in self.columns])

    def views(self, rows: Tensor) -> dict[str, Tensor]:
        """Rows [N, P] as stacked parameters [N, ...] by name."""
        parts = rows.split(self.sizes, dim=1)
        return {
            column.name: torch.unflatten(part, 1, column.shape) if column.shape else part[:, 0]
            for column, part in zip(self.columns, parts, strict=True)
        }

    def newborn(self, seeds: Tensor) -> Tensor:
        """Fresh rows [K, P] in float32, each drawn from its own seed [K], whatever K is."""
        if self.drawn_by_module:
            return self._rows_of_modules(seeds)
        draws = 2.0 * uniform(seeds, "weights", 0, self.width) - 1.0
        bounds = self._by_column([column.bound or 0.0 for column in self.columns])
        values = self._by_column([column.value for column in self.columns])
        return (draws * bounds.to(draws) + values.to(draws)).float()

    def newborn_as_usual(self, seeds: Tensor) -> Tensor:
        """Rows [K, P] in which every layer starts as torch starts it, and scalar gates at 1."""
        return self._rows_of_modules(seeds, _start_as_usual)

    def _rows_of_modules(
        self, seeds: Tensor, alter: Callable[[nn.Module], None] = lambda part: None
    ) -> Tensor:
        rows = []
        with torch.random.fork_rng(devices=[]):
            for seed in seeds.tolist():
                torch.manual_seed(seed)
                module = self.build().apply(alter)
                rows.append(torch.cat([p.detach().flatten() for p in module.parameters()]))
        return torch.stack(rows).to(seeds.device)

    def _by_column(self, numbers: Sequence[float]) -> Tensor:
        """[P]: one number for all of a column."""
        pairs = zip(self.sizes, numbers, strict=True)
        return torch.cat([torch.full((size,), number) for size, number in pairs])


def _start_as_usual(part: nn.Module) -> None:
    if isinstance(part, _UNIFORM):
        part.reset_parameters()
    elif isinstance(part, ScalarGate):
        nn.init.ones_(part.weight)


def _require_pure(module: nn.Module) -> None:
    """Rows are computed together, so a module may keep nothing and draw nothing."""
    buffers = [name for name, _ in module.named_buffers()]
    random = [
        name
        for name, part in module.named_modules()
        if isinstance(part, nn.modules.dropout._DropoutNd) and part.p > 0
    ]
    if buffers or random:
        kind = "buffers" if buffers else "dropout"
        raise BlueprintError(
            f"A {type(module).__name__} with {kind} cannot be trained in a population",
            given=", ".join((buffers or random)[:4]),
            valid="modules whose output depends on weights and input alone",
            fix="leave the blueprint out: PopulationConfig(blueprints=(...))",
        )


def _columns(module: nn.Module) -> tuple[list[_Column], bool]:
    """The module's parameters, and whether one starts in a way that only the module knows."""
    columns: list[_Column] = []
    unknown = False
    for prefix, part in module.named_modules():
        for name, parameter in part.named_parameters(recurse=False):
            full = f"{prefix}.{name}" if prefix else name
            first = float(parameter.detach().flatten()[0])
            constant = bool((parameter == first).all())
            bound = None
            if not constant and isinstance(part, _UNIFORM):
                fan_in = part.weight[0].numel()
                bound = 1.0 / math.sqrt(fan_in)
            unknown |= not constant and bound is None
            columns.append(_Column(full, parameter.shape, bound, first if bound is None else 0.0))
    return columns, unknown


class Pool:
    """Rows of one template, given to environments and taken back."""

    def __init__(
        self, template: Template, moments: int, *, device: torch.device, dtype: torch.dtype
    ) -> None:
        self.template = template
        # [R - 1] environment of each row, on the CPU
        self.owner = torch.zeros(0, dtype=torch.int64)
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
        named = {f"moment{i}": moment for i, moment in enumerate(self.state.moments)}
        per_row = {name: getattr(self.state, name) for name in _PER_ROW}
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
