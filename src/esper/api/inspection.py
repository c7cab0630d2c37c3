"""Where a model could grow: one survey, which `inspect` shows and `wrap` takes its slots from.

`slots="auto"` takes up to three places, in the order in which the model runs them: the first, the
last and the middle one of

- the repeated blocks of the model (modules with parameters and parts of their own, side by side
  in an `nn.Sequential` or `nn.ModuleList`, and not inside another), if there are at least two; else
- its activation functions and its blocks; else
- any place at all.

Not among them: what the model returns (a seed there would edit its logits), modules that run
more than once in a pass, places without a fitting blueprint, and, of places with the same
activations, all but one. Esper's own hosts announce their slots; those are taken as they are.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd

from esper.api.grow_settings import AUTO, EVERY, Budget, BudgetLike, GrowSettings
from esper.kasmina import SegmentedHost
from esper.kasmina.layout_inference import opening
from esper.kasmina.probe import Place, Sighting, Target, module_at, require_slottable, survey
from esper.kasmina.slotted import catalogue_of
from esper.kasmina.watching import Sample
from esper.leyline import DEFAULT_SLOT_COUNT, EsperError, SlotError, SlotSpec
from esper.show.audit_facts import Audit
from esper.show.terminal import aligned, listed, one_line_repr

Slots = str | Sequence[Target | str]

_SHOWN_REASONS = 3
_ACTIVATIONS = nn.ReLU.__module__
_NOT_ACTIVATIONS = (nn.MultiheadAttention, nn.Softmax, nn.LogSoftmax, nn.Softmax2d, nn.Softmin)
# Layers, whatever hangs below them: weights computed from others, observers, low-rank additions.
_LAYERS = (nn.Linear, nn.Embedding, nn.RNNBase, _ConvNd, _NormBase)
_PARAMETRIZATIONS = "parametrizations"  # torch's name for the child that computes a layer's weights


@dataclass(frozen=True)
class Spot:
    """A submodule that can carry a slot, or cannot."""

    path: str
    kind: str  # of module
    layout: str = ""  # and shape, as text
    options: Mapping[str, int] = field(default_factory=dict)  # parameters that each seed would add
    reason: str = ""  # why there can be no slot

    def __repr__(self) -> str:
        if self.reason:
            return one_line_repr(self, f"{self.path}: {self.kind}, refused: {self.reason}")
        return one_line_repr(self, f"{self.path}: {self.kind}, {len(self.options)} blueprints fit")


@dataclass(frozen=True)
class Inspection:
    """What `inspect` found; prints as a table."""

    model: str
    host_params: int
    room: int | None  # parameters that the budget allows; None: no limit
    places: tuple[Spot, ...]  # in the order in which the model runs them
    refusals: tuple[Spot, ...]
    chosen: tuple[str, ...]  # what slots="auto" takes

    def __repr__(self) -> str:
        chosen = f'slots="auto" takes {listed(self.chosen)}' if self.chosen else "none chosen"
        counts = f"{len(self.places)} places, {len(self.refusals)} refused"
        return one_line_repr(self, f"{self.model}: {counts}, {chosen}")

    def __str__(self) -> str:
        limit = "" if self.room is None else f", at most {self.room:,} more"
        lines = [f"{self.model}: {self.host_params:,} parameters{limit}", ""]
        if self.places:
            rows = [("", "place", "module", "activations", "blueprints (parameters each adds)")]
            for each in self.places:
                mark = "*" if each.path in self.chosen else ""
                options = ", ".join(f"{name} {cost:,}" for name, cost in each.options.items())
                rows.append((mark, each.path, each.kind, each.layout, options))
            lines += aligned(rows)
            lines += ["", '* taken by slots="auto"'] if self.chosen else []
        else:
            lines.append("No place can carry a slot.")
        if self.refusals:
            reasons = [("refused", "module", "reason")]
            reasons += [(each.path, each.kind, each.reason) for each in self.refusals]
            lines += ["", *aligned(reasons)]
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
    found = Survey(model, sample, blueprints)
    room = Budget.of(budget).allowed(found.host_params)
    spots: list[Spot] = []
    for sighting in found.sightings:
        target, place = sighting.target, sighting.place
        kind = type(model.get_submodule(target.path)).__name__
        if isinstance(place, EsperError):
            spots.append(Spot(target.path, kind, reason=str(place)))
        elif options := found.options(target, room):
            spots.append(Spot(target.slot_name, kind, _shape(place.spec), options))
        else:
            why = "No blueprint fits activations of this shape."
            if costs := found.options(target, None).values():
                why = f"A seed adds at least {min(costs):,} parameters, the budget allows {room:,}."
            spots.append(Spot(target.path, kind, reason=why))
    return Inspection(
        model=type(model).__name__,
        host_params=found.host_params,
        room=room,
        places=tuple(spot for spot in spots if spot.options),
        refusals=tuple(spot for spot in spots if spot.reason),
        chosen=tuple(each.target.slot_name for each in found.choose(room)),
    )


def chosen_places(
    model: nn.Module,
    sample: Sample,
    slots: Slots,
    room: int | None,
    blueprints: Sequence[str] | None,
) -> tuple[list[Target], Sequence[Place | Target]]:
    """Where a host gets its slots: how the places are named, and what is known to be there."""
    if isinstance(slots, str) and slots in (AUTO, EVERY):
        found, every = Survey(model, sample, blueprints), slots == EVERY
        # Where nothing fits the budget, that is what is to be said, and not that there is no place.
        chosen = found.choose(room, every) or found.choose(None, every)
        if not chosen:
            raise found.no_place()
        places = [each.place for each in chosen if isinstance(each.place, Place)]
        return [each.target for each in chosen], places
    several = isinstance(slots, Iterable) and not isinstance(slots, str)
    if not several or not slots or not all(isinstance(each, (str, Target)) for each in slots):
        path = slots if isinstance(slots, str) else "layer1"
        raise SlotError(
            "Slots are a list of at least one path",
            given=repr(slots).partition("\n")[0],
            valid='"auto", "every" or a list',
            fix=f'write slots=[{path!r}] or slots="auto"; esper.inspect shows all paths',
        )
    named = [Target.parse(place) for place in slots]
    return named, named


def audited(audit: Audit, model: nn.Module, controller: object, slots: Slots) -> tuple[str, Slots]:
    """Who plants what an audit of this model found, and where."""
    if not isinstance(audit, Audit) or (controller, slots) != (GrowSettings.controller, AUTO):
        fix = "pass what esper.audit returned, and neither controller nor slots"
        raise EsperError("An audit says what is planted, and where", fix=fix)
    size, paths = sum(each.numel() for each in model.parameters()), dict(model.named_modules())
    known = size == audit.host_params and all(note["path"] in paths for note in audit.slots)
    if not known or type(model).__name__ != audit.model:
        given, valid = f"{size:,} parameters", f"{audit.model} with {audit.host_params:,}"
        raise EsperError("The audit is of another model", given=given, valid=valid)
    if not audit.combinations:
        return "never", AUTO
    best = {each.slot: f"{each.slot}/{each.blueprint}" for each in audit.combinations[0]}
    named = zip(audit.places, audit.slots, strict=True)
    rule = f"first=1,spacing=1,patience=0,together={len(best)},probation=1,trial=3,margin=0,rent=0"
    chosen = [Target(**note) for place, note in named if place in best]
    return f"heuristic:places={'+'.join(best.values())},{rule}", chosen


class Survey:
    """Every submodule of a model, seen while it runs on a sample, and what would fit there."""

    def __init__(
        self, model: nn.Module, sample: Sample, blueprints: Sequence[str] | None = None
    ) -> None:
        self.model, self.sample = model, sample
        self.host_params = sum(parameter.numel() for parameter in model.parameters())
        if isinstance(model, SegmentedHost):  # announces its places; the rest is its own business
            names, paths = (spec.name for spec in model.slot_specs()), model.slot_paths().values()
            announced = [Target(path, name=name) for name, path in zip(names, paths, strict=True)]
            self.sightings = survey(model, announced, sample)
        else:
            module_at(model, "")  # raises where hooks would not work in any part of it
            named = [path for path, _ in model.named_modules() if path]
            targets = [Target(path) for path in named if _PARAMETRIZATIONS not in path.split(".")]
            targets = targets or [Target("")]
            seen = survey(model, targets, sample)
            self.sightings = sorted(seen, key=lambda each: each.first_event)
        self._costs: dict[Target, dict[str, int]] = {}  # by place and blueprint that fits there
        self._refusals: dict[Target, EsperError] = {}  # why "auto" does not take a place
        good = [(s.target, s.place) for s in self.sightings if isinstance(s.place, Place)]
        if good:
            # One catalogue: a blueprint is not unknown because it fits some places and not others.
            catalogue = catalogue_of(model, [place for _, place in good], blueprints)
            for (target, _), row in zip(good, catalogue.costs, strict=True):
                pairs = zip(catalogue.names, row, strict=True)
                self._costs[target] = {name: cost for name, cost in pairs if cost >= 0}

    def options(self, target: Target, room: int | None) -> dict[str, int]:
        """What can be planted there within so many parameters, and how many each adds."""
        costs = self._costs.get(target, {}).items()
        return {name: cost for name, cost in costs if room is None or cost <= room}

    def choose(self, room: int | None, every: bool = False) -> list[Sighting]:
        """What "auto" takes, of places where a seed fits into this many parameters; or all.

        Seen with fewer neighbours a place may be doubtful: then the next.
        """
        useful = [each for each in self.sightings if self.options(each.target, room)]
        if isinstance(self.model, SegmentedHost):
            return useful
        useful = [each for each in useful if not self._refuses(each)]
        while chosen := self._distinct(useful) if every else self._spread(useful):
            again = survey(self.model, [each.target for each in chosen], self.sample)
            if not [each for each in again if self._refuses(each)]:
                return again
            useful = [each for each in useful if each.target not in self._refusals]
        return []

    def _spread(self, useful: Sequence[Sighting]) -> list[Sighting]:
        """Blocks if there are two, else what is lively, else any; some of them, evenly apart."""
        sound = self._distinct(useful)
        blocks = self._blocks(sound)
        lively = [each for each in sound if each in blocks or _is_activation(each)]
        found = blocks if len(blocks) >= 2 else lively or sound
        last, most = len(found) - 1, DEFAULT_SLOT_COUNT
        if last < most:
            return found
        return [found[round(step * last / (most - 1))] for step in range(most)]

    def _distinct(self, useful: Sequence[Sighting]) -> list[Sighting]:
        """One for each tensor, in order: the block that returns it, or its maker."""
        distinct: dict[int, Sighting] = {}
        for each in useful:
            if id(each.output) not in distinct or self._is_block(each):
                distinct[id(each.output)] = each
        return sorted(distinct.values(), key=lambda each: each.first_event)

    def _blocks(self, sound: Sequence[Sighting]) -> list[Sighting]:
        """Not those inside another; but an `nn.Sequential` holds blocks rather than being one."""
        blocks = {each.target.path: each for each in sound if self._is_block(each)}
        whole = [p for p in blocks if type(self.model.get_submodule(p)) is not nn.Sequential]
        outermost = [p for p in blocks if not any(p.startswith(f"{outer}.") for outer in whole)]
        return [blocks[path] for path in outermost]

    def _is_block(self, sighting: Sighting) -> bool:
        parent = self.model.get_submodule(sighting.target.path.rpartition(".")[0])
        module = self.model.get_submodule(sighting.target.path)
        parts = {name for name, _ in module.named_children()} - {_PARAMETRIZATIONS}
        made_of_parts = bool(parts) and not isinstance(module, _LAYERS)
        learns = next(module.parameters(), None) is not None
        return made_of_parts and learns and isinstance(parent, (nn.Sequential, nn.ModuleList))

    def _refuses(self, sighting: Sighting) -> bool:
        """Is this no place for "auto"? Then it is remembered why."""
        found, where = sighting.place, opening(sighting.target.where)
        if isinstance(found, EsperError):
            self._refusals[sighting.target] = found
        elif sighting.is_returned:
            self._refusals[sighting.target] = SlotError(f"{where} gives what the model returns")
        elif sighting.calls > 1:
            self._refusals[sighting.target] = SlotError(f"{where} runs more than once in a pass")
        return sighting.target in self._refusals

    def no_place(self) -> SlotError:
        """What to say where nothing is left: the reasons by how many places they concern."""
        alike: dict[str, list[EsperError]] = {}
        for sighting in self.sightings:
            target = sighting.target
            what = f"No blueprint fits the output of {target.where}"
            refusal = EsperError(what, fix="allow other blueprints")
            if self._refuses(sighting):
                refusal = self._refusals[target]
            alike.setdefault(refusal.what.replace(repr(target.path), ""), []).append(refusal)
        groups = sorted(alike.values(), key=len, reverse=True)
        reasons = [
            first.what + (f" (and {len(others)} more like it)" if others else "")
            for first, *others in groups[:_SHOWN_REASONS]
        ]
        look = "print(esper.inspect(model, sample)) "
        if any(self._costs.values()):  # what "auto" does not take, its user may
            advice = [look + "shows every place; name some with slots=[...]"]
        else:
            advice = [*filter(None, [groups[0][0].fix]), look + "says of every submodule why"]
        return SlotError(
            "No place was found where this model could grow",
            given="; ".join([type(self.model).__name__, *reasons]),
            fix="; ".join(advice),
        )


def require_module(model: object) -> None:
    """Refuse what is no module, or one that no slot fits."""
    if not isinstance(model, nn.Module):
        is_class = isinstance(model, type) and issubclass(model, nn.Module)
        named = f"the class {model.__name__}" if isinstance(model, type) else type(model).__name__
        raise SlotError(
            "What is to grow must be a torch nn.Module",
            given=named,
            fix="make an instance of it first" if is_class else "pass the model itself",
        )
    require_slottable(model)


def _is_activation(sighting: Sighting) -> bool:
    assert isinstance(sighting.place, Place)
    module = sighting.place.module
    return type(module).__module__ == _ACTIVATIONS and not isinstance(module, _NOT_ACTIVATIONS)


def _shape(spec: SlotSpec) -> str:
    canonical = ["B", *("?" if size is None else str(size) for size in spec.extent)]
    canonical.insert(spec.channel_axis, str(spec.channels))
    own = [canonical[axis] for axis in spec.from_canonical]
    return f"{spec.layout.value} [{', '.join(own)}]"
