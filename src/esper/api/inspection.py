"""Where a model could grow: every place that could carry a slot, what fits there, and refusals."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from esper.api.budgets import Budget, BudgetLike
from esper.api.sites import auto_places
from esper.kasmina.blueprints import build_catalogue
from esper.kasmina.hosts import SegmentedHost
from esper.kasmina.probe import (
    Place,
    Sample,
    Sighting,
    Target,
    module_at,
    require_slottable,
    survey,
)
from esper.leyline.catalogue import NOT_APPLICABLE
from esper.leyline.errors import EsperError, SlotError
from esper.leyline.slots import SlotSpec


@dataclass(frozen=True)
class Possible:
    """A place that can carry a slot."""

    path: str
    kind: str  # of module
    layout: str  # and shape, as text
    options: Mapping[str, int]  # what can be planted, and the parameters that each would add


@dataclass(frozen=True)
class Refusal:
    """A submodule that cannot carry a slot, and why."""

    path: str
    kind: str
    reason: str


@dataclass(frozen=True)
class Inspection:
    """What `inspect` found; prints as a table."""

    model: str
    host_params: int
    room: int | None  # parameters that the budget allows; None: no limit
    places: tuple[Possible, ...]  # in the order in which the model runs them
    refusals: tuple[Refusal, ...]
    chosen: tuple[str, ...]  # what slots="auto" takes

    def __str__(self) -> str:
        limit = "" if self.room is None else f", at most {self.room:,} more"
        lines = [f"{self.model}: {self.host_params:,} parameters{limit}", ""]
        if self.places:
            rows = [("", "place", "module", "activations", "blueprints (parameters each adds)")]
            rows += [
                (
                    "*" if each.path in self.chosen else "",
                    each.path,
                    each.kind,
                    each.layout,
                    ", ".join(f"{name} {cost:,}" for name, cost in each.options.items()),
                )
                for each in self.places
            ]
            lines += _table(rows)
            lines += ["", '* taken by slots="auto"'] if self.chosen else []
        else:
            lines.append("No place can carry a slot.")
        if self.refusals:
            reasons = [("refused", "module", "reason")]
            reasons += [(each.path, each.kind, each.reason) for each in self.refusals]
            lines += ["", *_table(reasons)]
        return "\n".join(lines)


def inspect(
    model: nn.Module,
    sample: Sample,
    *,
    budget: BudgetLike = None,
    blueprints: Sequence[str] | None = None,
) -> Inspection:
    """Try every submodule as a place for a slot, on a sample input; the model is left as it was.

    `sample` is one batch: a tensor, a tuple of positional or a dict of keyword arguments. With a
    budget, seeds that it has no room for are left out.
    """
    require_module(model)
    host_params = sum(parameter.numel() for parameter in model.parameters())
    room = Budget.of(budget).allowed(host_params)
    places: list[Possible] = []
    refusals: list[Refusal] = []
    useful: list[Sighting] = []
    for sighting, costs in offers(model, sample, blueprints):
        path, found = sighting.target.path, sighting.place
        kind = type(model.get_submodule(path)).__name__
        if isinstance(found, EsperError):
            refusals.append(Refusal(path, kind, str(found)))
        elif options := within(costs, room):
            places.append(Possible(sighting.target.slot_name, kind, _shape(found.spec), options))
            useful.append(sighting)
        else:
            refusals.append(Refusal(path, kind, _why_no_option(costs, room)))
    return Inspection(
        model=type(model).__name__,
        host_params=host_params,
        room=room,
        places=tuple(places),
        refusals=tuple(refusals),
        chosen=tuple(each.slot_name for each in auto_places(model, sample, useful, {})),
    )


def offers(
    model: nn.Module, sample: Sample, blueprints: Sequence[str] | None
) -> list[tuple[Sighting, dict[str, int]]]:
    """Every submodule in the order of their calls, and what each blueprint would cost there."""
    seen = _sightings(model, sample)
    specs = [each.place.spec for each in seen if isinstance(each.place, Place)]
    if not specs:
        return [(each, {}) for each in seen]
    # One catalogue: a blueprint is not unknown because it fits some places and not others.
    host_params = sum(parameter.numel() for parameter in model.parameters())
    catalogue = build_catalogue(specs, host_params, blueprints)
    rows = iter(catalogue.costs)
    return [
        (each, _fitting(catalogue.names, next(rows)) if isinstance(each.place, Place) else {})
        for each in seen
    ]


def _fitting(names: Sequence[str], costs: Sequence[int]) -> dict[str, int]:
    pairs = zip(names, costs, strict=True)
    return {name: cost for name, cost in pairs if cost != NOT_APPLICABLE}


def within(costs: Mapping[str, int], room: int | None) -> dict[str, int]:
    """Of these, what there is room for."""
    return {name: cost for name, cost in costs.items() if room is None or cost <= room}


def _sightings(model: nn.Module, sample: Sample) -> list[Sighting]:
    """Every submodule, seen while the model runs on the sample, in the order of their calls."""
    if isinstance(model, SegmentedHost):  # announces its places; the rest is its own business
        pairs = zip(model.slot_specs(), model.slot_paths().values(), strict=True)
        return [
            Sighting(Target(path, name=spec.name), Place(model.get_submodule(path), None, spec))
            for spec, path in pairs
        ]
    module_at(model, "")  # raises where hooks would not work in any part of it
    targets = [Target(path) for path, _ in model.named_modules() if path]
    found = survey(model, targets or [Target("")], sample)
    return sorted(found, key=lambda each: each.first_event)


def require_module(model: object) -> None:
    """Refuse what is no module, or one that no slot fits."""
    if not isinstance(model, nn.Module):
        is_class = isinstance(model, type) and issubclass(model, nn.Module)
        raise SlotError(
            "What is to grow must be a torch nn.Module",
            given=f"the class {model.__name__}"
            if isinstance(model, type)
            else type(model).__name__,
            fix="make an instance of it first" if is_class else "pass the model itself",
        )
    require_slottable(model)


def _why_no_option(costs: Mapping[str, int], room: int | None) -> str:
    if not costs:
        return "No blueprint fits activations of this shape."
    return f"The cheapest seed adds {min(costs.values()):,} parameters, the budget allows {room:,}."


def _shape(spec: SlotSpec) -> str:
    canonical = ["B", *("?" if size is None else str(size) for size in spec.extent)]
    canonical.insert(spec.channel_axis, str(spec.channels))
    own = [canonical[axis] for axis in spec.from_canonical]
    return f"{spec.layout.value} [{', '.join(own)}]"


def _table(rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
