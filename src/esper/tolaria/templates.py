"""A template: one module's parameters as the columns of a row, and how a newborn row is drawn.

Shapes: `P` parameters of one module (columns), `K` rows, `N` stacked copies.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from esper.kasmina.blueprints import ScalarGate, learning_rate_scales
from esper.leyline.errors import BlueprintError
from esper.tolaria.shuffle import uniform
from esper.tolaria.stacked import Form, stack

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
        self.scales = torch.cat(
            [torch.full((column.shape.numel(),), scales[column.name]) for column in self.columns]
        )

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
            return torch.stack([self._row_of_module(int(seed)) for seed in seeds.tolist()]).to(
                seeds.device
            )
        draws = 2.0 * uniform(seeds, "weights", 0, self.width) - 1.0
        bounds = [
            torch.full((size,), 0.0 if column.bound is None else column.bound)
            for column, size in zip(self.columns, self.sizes, strict=True)
        ]
        values = [
            torch.full((size,), column.value)
            for column, size in zip(self.columns, self.sizes, strict=True)
        ]
        return (draws * torch.cat(bounds).to(draws) + torch.cat(values).to(draws)).float()

    def newborn_as_usual(self, seeds: Tensor) -> Tensor:
        """Rows [K, P] in which every layer starts as torch starts it, and scalar gates at 1."""
        rows = [self._row_of_module(int(seed), _start_as_usual) for seed in seeds.tolist()]
        return torch.stack(rows).to(seeds.device)

    def _row_of_module(self, seed: int, alter: Callable[[nn.Module], None] | None = None) -> Tensor:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            module = self.build()
            if alter is not None:
                module.apply(alter)
        return torch.cat([p.detach().flatten() for p in module.parameters()])


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
