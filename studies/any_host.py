"""Rules for any host: what they plant is said by position and by trait, not by name.

A spec has preferences before its settings, `periodic@first/large-local+*/global:every=2`. Each is a
slot and a kind:

    slot   first, middle, last, or * for every slot in order
    kind   a trait (local, global, content, normalises, plain): the seeds that have it, the cheapest
           first, or with `large-` the dearest first; cheapest, dearest; * for all, the cheapest
           first

A preference that a host has no seed for is passed over, and a rule uses as many of its places, from
the first one on, as it has time for in an episode. `constant` plants one seed for every preference,
each in a slot of its own, at its `epoch`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from esper.leyline import Actions, Blend, BlueprintCatalogue, EsperError, Legality, Trait
from esper.leyline.errors import require_known
from esper.leyline.signals import Signals
from esper.tamiyo.controllers import Controller, FixedSchedule, make_controller
from esper.tamiyo.controllers.protocol import Checkable
from esper.tamiyo.controllers.racing import Race
from esper.tamiyo.controllers.rules import Gap, Heuristic, NeverGrow, Periodic, Plateau
from esper.tamiyo.controllers.specs import DEFAULT_ARM_BLEND, DEFAULT_ARM_EPOCH, Arm, parse_settings

CONSTANT = "constant"
SLOTS = ("first", "middle", "last", "*")
LARGE = "large-"
_TRAITS = {trait.name.lower(): trait for trait in Trait if trait.name is not None}
KINDS = ("*", "cheapest", "dearest", *_TRAITS, *(f"{LARGE}{name}" for name in _TRAITS))
WITH_PLACES = ("periodic", "plateau", "gap", "race", "heuristic")

Place = tuple[str, str]  # a host's slot, and a blueprint that fits it


@dataclass(frozen=True, kw_only=True)
class ConstantSettings:
    """When the seeds of a constant are planted; a list of one serves all."""

    epoch: tuple[int, ...] = (DEFAULT_ARM_EPOCH,)
    blend: str = DEFAULT_ARM_BLEND

    def rule(self, places: Sequence[Place]) -> FixedSchedule:
        epochs = self.epoch if len(self.epoch) > 1 else self.epoch * len(places)
        pairs = zip(places, epochs, strict=False)
        arms = [Arm(slot=s, blueprint=b, blend=self.blend, epoch=epoch) for (s, b), epoch in pairs]
        return FixedSchedule(arms)


class AnyHost:
    """A rule that is made for a host when it first decides for it."""

    needs_contributions = True

    def __init__(self, spec: str) -> None:
        self.name = spec
        self.kind, _, rest = spec.partition("@")
        wanted, _, self.settings = rest.partition(":")
        require_known("rule for any host", self.kind, (CONSTANT, *WITH_PLACES))
        self.wanted = [_preference(word) for word in wanted.split("+")]
        self._plain: Controller | None = None
        if self.kind == CONSTANT:
            self.constant = parse_settings(CONSTANT, self.settings, ConstantSettings)
            Blend.named(self.constant.blend)
        else:
            self._plain = make_controller(f"{self.kind}:{self.settings}".rstrip(":"))
        self._made: dict[tuple[BlueprintCatalogue, int], Controller] = {}

    def act(self, signals: Signals, legality: Legality, starts: Tensor) -> Actions:
        known = (signals.catalogue, int(signals.horizon.max()))
        if known not in self._made:
            self._made[known] = self.rule_for(*known)
        return self._made[known].act(signals, legality, starts)

    def rule_for(self, catalogue: BlueprintCatalogue, horizon: int) -> Controller:
        """With as many of its places as there is time for; if there is for none, it waits."""
        places = self.places(catalogue)
        for count in range(len(places), 0, -1):
            rule = self._with(places[:count])
            try:
                if isinstance(rule, Checkable):
                    rule.require_possible(catalogue, horizon)
            except EsperError:  # too late to become permanent
                continue
            return rule
        return NeverGrow()

    def places(self, catalogue: BlueprintCatalogue) -> list[Place]:
        """Of one host, in order and each once; a constant has one in a slot."""
        found: dict[Place, None] = {}
        for slot, kind in self.wanted:
            ours = [(s, b) for s in _slots(slot, catalogue) for b in _kinds(kind, s, catalogue)]
            if self.kind == CONSTANT:
                used = {place[0] for place in found}
                ours = [place for place in ours if place[0] not in used][:1]
            found |= dict.fromkeys(ours)
        return list(found)

    def _with(self, places: Sequence[Place]) -> Controller:
        words = tuple(f"{slot}/{blueprint}" for slot, blueprint in places)
        match self._plain:
            case Periodic() | Plateau() | Gap() as rule:
                return replace(rule, places=words)
            case Race(config=config):
                return Race(replace(config, places=words))
            case Heuristic(config=config):
                return Heuristic(replace(config, places=words))
        return self.constant.rule(places)


def _preference(word: str) -> tuple[str, str]:
    slot, _, kind = word.partition("/")
    require_known("slot of a rule for any host", slot, SLOTS)
    require_known("kind of seed of a rule for any host", kind, KINDS)
    return slot, kind


def _slots(slot: str, catalogue: BlueprintCatalogue) -> Sequence[str]:
    names = catalogue.slots.names
    chosen = {"first": 0, "middle": (len(names) - 1) // 2, "last": len(names) - 1}
    return names if slot == "*" else (names[chosen[slot]],)


def _kinds(kind: str, slot: str, catalogue: BlueprintCatalogue) -> list[str]:
    """Blueprints that fit this slot and are of the kind, in order."""
    place = catalogue.slots.index(slot)
    costs = dict(zip(catalogue.names, catalogue.costs[place], strict=True))
    fits = sorted((name for name, cost in costs.items() if cost >= 0), key=costs.__getitem__)
    if kind in ("*", "cheapest", "dearest"):
        return {"*": fits, "cheapest": fits[:1], "dearest": fits[-1:]}[kind]
    has = catalogue.has(_TRAITS[kind.removeprefix(LARGE)])[place].tolist()
    ours = [name for name in fits if has[catalogue.index(name)]]
    return ours[::-1] if kind.startswith(LARGE) else ours
