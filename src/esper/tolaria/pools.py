"""Pools: the rows in which a population keeps hosts and seeds.

A pool holds one kind of module: a host, one blueprint at one slot, or one slot's blend gates. Its
rows are copies with their own optimiser state. The last row is spare: it stands in wherever a plan
of fixed size has nothing to compute, and is never active. A pool that runs out of rows doubles.
A template says which columns a module's parameters take, and how a newborn row is drawn.

Shapes: `R` rows, `P` parameters of one row (columns), `K` rows in question, `N` stacked copies.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from esper.kasmina.blueprints import learning_rate_scales
from esper.leyline.errors import BlueprintError
from esper.tolaria.optimisers import RowState
from esper.tolaria.plan import PoolKey
from esper.tolaria.random_streams import sent, uniform_groups
from esper.tolaria.stacked import Form, stack

VACANT = -1
_PER_ROW = ("theta", "steps", "rate", "decay", "active")
UNIFORM = (nn.Linear, nn.modules.conv._ConvNd)  # weights and biases within 1 / sqrt(fan in)


class Template:
    """What a population needs to know of a module to hold many copies of it as rows."""

    def __init__(
        self,
        build: Callable[[], nn.Module],
        compiled: Callable[[Form], Form] = lambda form: form,
        *,
        known: bool = False,
    ) -> None:
        """`known`: linear layers and convolutions start as torch starts them, so that all rows can
        be drawn at once. Otherwise each row is drawn by building the module."""
        self.build = build
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            module = build()
        _require_pure(module)
        self.form = compiled(stack(module))
        self.shapes: dict[str, torch.Size] = {}  # by name, in the order of the row
        self.drawn_by_module = not known
        scales, numbers = learning_rate_scales(module), []
        for prefix, part in module.named_modules():
            for name, parameter in part.named_parameters(recurse=False):
                full = f"{prefix}.{name}" if prefix else name
                bound, value = 0.0, float(parameter.detach().flatten()[0])
                if not bool((parameter == value).all()):
                    if isinstance(part, UNIFORM):
                        bound, value = 1.0 / math.sqrt(part.weight[0].numel()), 0.0
                    else:  # it starts in a way that only the module knows
                        self.drawn_by_module = True
                self.shapes[full] = parameter.shape
                own = torch.tensor([[bound], [value], [scales[full]]])
                numbers.append(own.expand(3, parameter.numel()))
        self.sizes = [shape.numel() for shape in self.shapes.values()]
        self.width = sum(self.sizes)
        whole = torch.cat([torch.zeros(3, 0), *numbers], dim=1)
        self.starts = whole[:2].double()  # [2, P] each starts within value +- bound
        self.scales = whole[2].clone()  # [P]

    def views(self, rows: Tensor) -> dict[str, Tensor]:
        """Rows [N, P] as stacked parameters [N, ...] by name."""
        parts = rows.split(self.sizes, dim=1)
        return {
            name: torch.unflatten(part, 1, shape) if shape else part[:, 0]
            for (name, shape), part in zip(self.shapes.items(), parts, strict=True)
        }

    def built(self, seeds: Tensor) -> Tensor:
        """Rows [K, P] as the module starts them, built once for each seed [K]."""
        rows = []
        with torch.random.fork_rng(devices=[]):
            for seed in seeds.tolist():
                torch.manual_seed(seed)
                module = self.build()
                rows.append(torch.cat([p.detach().flatten() for p in module.parameters()]))
        return torch.stack(rows)


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


class Pool:
    """Rows of one template, given to environments and taken back."""

    def __init__(
        self, template: Template, moments: int, device: torch.device, dtype: torch.dtype
    ) -> None:

        def matrix(columns: int, kind: torch.dtype = dtype) -> Tensor:  # of the spare row alone
            return torch.zeros(1, columns, device=device, dtype=kind)

        self.template, width = template, template.width
        self.owner = torch.zeros(0, dtype=torch.int64)  # [R - 1] environment of each row, on CPU
        plain = bool((template.scales == 1.0).all())
        self.state = RowState(
            theta=matrix(width),
            moments=[matrix(width) for _ in range(moments)],
            steps=matrix(1, torch.float64),
            rate=matrix(1),
            decay=matrix(1),
            active=matrix(1, torch.bool),
            scale=None if plain else template.scales.to(device=device, dtype=dtype)[None],
        )
        self.squares = matrix(width)  # [R, P] squared gradients of the epoch
        self.leaf = self.state.theta.detach().requires_grad_()
        self.version = 0  # changes when storage moves

    @property
    def capacity(self) -> int:
        """Rows beside the spare one, which comes last: its number."""
        return len(self.owner)

    @property
    def rows_in_use(self) -> Tensor:
        return (self.owner != VACANT).nonzero()[:, 0]

    def give(self, environments: Tensor) -> Tensor:
        """Vacant rows for these environments, lowest first; grows when there are too few."""
        vacant = (self.owner == VACANT).nonzero()[:, 0]
        lacking = len(environments) - len(vacant)
        if lacking > 0:
            extra = max(self.capacity, lacking)
            self.owner = torch.cat([self.owner, torch.full((extra,), VACANT)])
            more = (0, 0, 0, extra + 1)  # rows, the spare one too
            larger = {name: F.pad(own[:-1], more) for name, own in self.tensors().items()}
            self.state, self.squares = self.state_of(larger), larger["squares"]
            self.leaf = self.state.theta.detach().requires_grad_()
            self.outdate()
            vacant = (self.owner == VACANT).nonzero()[:, 0]
        rows = vacant[: len(environments)]
        self.owner[rows] = environments
        return rows

    def start(self, there: Tensor, values: Tensor, rates: Tensor) -> None:
        """Newborn rows [K]: these parameters, fresh optimiser state, rate and decay [2, K, 1]."""
        state = self.state
        state.theta.index_copy_(0, there, values.to(state.theta))
        for cleared in (*state.moments, state.steps):  # squares are with every epoch
            cleared.index_fill_(0, there, 0.0)
        state.active.index_fill_(0, there, True)
        for own, given in zip((state.rate, state.decay), rates, strict=True):
            own.index_copy_(0, there, given)

    def tensors(self) -> dict[str, Tensor]:
        """Everything kept by row, for growing, copying, snapshots and checkpoints."""
        named = {f"moment{i}": moment for i, moment in enumerate(self.state.moments)}
        per_row = {name: getattr(self.state, name) for name in _PER_ROW}
        return {**named, **per_row, "squares": self.squares}

    def put(self, rows: Tensor, saved: Mapping[str, Tensor], old: Tensor | slice) -> None:
        """Make `rows` [K] what the rows `old` [K] were when they were copied."""
        for name, tensor in self.tensors().items():
            tensor[rows] = saved[name][old]

    def set_rates(self, rows: Tensor, rate: Tensor, decay: Tensor) -> None:
        """Give these rows the rate and decay of their environments, [N] each."""
        state, owners = self.state, self.owner[rows]
        state.rate[rows] = rate[owners].to(state.rate)[:, None]
        state.decay[rows] = decay[owners].to(state.decay)[:, None]

    def outdate(self) -> None:
        """What was captured of the storage so far no longer holds."""
        self.version += 1

    def state_of(self, tensors: Mapping[str, Tensor]) -> RowState:
        """What an optimiser moves, of rows with these tensors, named as in `tensors()`."""
        moments = [tensors[f"moment{i}"] for i in range(len(self.state.moments))]
        per_row = {name: tensors[name] for name in _PER_ROW}
        return RowState(moments=moments, scale=self.state.scale, **per_row)


def copies_of(
    pools: Mapping[PoolKey, Pool], over: Mapping[PoolKey, Mapping[str, Tensor]]
) -> dict[PoolKey, Mapping[str, Tensor]]:
    """Copies of all that pools keep by row, in few operations; written `over` older ones that have
    the size."""
    copies: dict[PoolKey, Mapping[str, Tensor]] = {}
    alike: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = {}
    for key, pool in pools.items():
        own, old = pool.tensors(), over.get(key, {})
        fits = bool(old) and old["theta"].shape == own["theta"].shape
        copies[key] = old if fits else {name: torch.empty_like(each) for name, each in own.items()}
        for name, tensor in own.items():
            copied, sources = alike.setdefault(tensor.dtype, ([], []))
            copied.append(copies[key][name])
            sources.append(tensor)
    for copied, sources in alike.values():
        torch._foreach_copy_(copied, sources)
    return copies


def take_back(given: Sequence[tuple[Pool, Tensor]]) -> None:
    """Rows [K] of pools that nobody needs any more, in one transfer for all pools."""
    if not given:
        return
    device = given[0][0].state.active.device
    there = sent(torch.cat([rows for _, rows in given]), device)
    parts = there.split([len(rows) for _, rows in given])
    for (pool, rows), own in zip(given, parts, strict=True):
        pool.owner[rows] = VACANT
        pool.state.active.index_fill_(0, own, False)


class Birth(NamedTuple):
    """Rows that begin anew, and the stream from which each draws its parameters."""

    pool: Pool
    rows: Tensor  # [K]
    streams: Tensor  # [K]


def begin(births: Sequence[Birth], rate: Tensor, decay: Tensor) -> None:
    """Fresh parameters in float32, each row's drawn from its own stream, whatever else is born.

    Rates are of environments, [N]. All pools are served together: one draw, and one transfer of a
    kind, since a few rows in each of many pools are the rule.
    """
    if not births:
        return
    built = [each for each in births if each.pool.template.drawn_by_module]
    values = [each.pool.template.built(each.streams) for each in built]
    drawn = [each for each in births if not each.pool.template.drawn_by_module]
    values, births = values + _drawn(drawn), built + drawn
    like = births[0].pool.state.rate
    owners = torch.cat([pool.owner[rows] for pool, rows, _ in births])
    rates = torch.stack([rate[owners], decay[owners]])[:, :, None].to(like.dtype)
    there = torch.cat([rows for _, rows, _ in births])
    there, rates = sent(there, like.device), sent(rates, like.device)
    counts = [len(rows) for _, rows, _ in births]
    parts = zip(births, there.split(counts), values, rates.split(counts, dim=1), strict=True)
    for birth, rows, own, theirs in parts:
        birth.pool.start(rows, own, theirs)


def _drawn(births: Sequence[Birth]) -> list[Tensor]:
    """Values [K, P] of each, as its template says that they start."""
    if not births:
        return []
    device, templates = births[0].pool.state.rate.device, [each.pool.template for each in births]
    pairs = [(birth.streams, birth.pool.template.width) for birth in births]
    draws = uniform_groups(pairs, "weights", 0, device)
    torch._foreach_mul_(draws, 2.0)
    torch._foreach_sub_(draws, 1.0)
    starts = sent(torch.cat([each.starts for each in templates], dim=1), device)
    bounds, values = (each.split([t.width for t in templates]) for each in starts)
    torch._foreach_mul_(draws, bounds)
    torch._foreach_add_(draws, values)
    return [draw.float() for draw in draws]
