"""Observations for a policy that serves any host: a token for all, for each slot, for each seed.

A candidate is a seed that may be planted, a slot and a blueprint together. A row is the global
token, then the slots' tokens, then the candidates', slot by slot, padded with zeros to the layout's
sizes: rows of different hosts stand in one buffer. No number depends on a task's scale, on names,
or on what other runs have seen; a blueprint is known by its traits. Part of what is seen is what
the rule `audition` would do now.

Shapes: `N` environments, `S` slots, `P` blueprints, `K` blends, `F` features in all, `G` of the
global token, `D` of a slot's, `C` of a candidate's.
"""

import math
from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch
from torch import Tensor
from torch.nn.functional import pad

from esper.leyline import HEADS, Actions, ActionSpace, Blend, Legality, LifecycleOp, Trait
from esper.leyline.catalogue import BlueprintCatalogue
from esper.leyline.errors import AgreementError
from esper.leyline.settings import Count, require_settings
from esper.leyline.shadows import ShadowReadings
from esper.leyline.signals import Signals
from esper.tamiyo.features import (
    GLOBAL_FEATURES,
    GRADIENT_DECADES,
    Feature,
    FeatureBlock,
    FeatureTable,
    decades,
    features_of,
    global_columns,
    slot_columns,
    slot_features,
    visible_cost,
)

SEEN_GAIN = 0.003  # in units of guessing: gains above it differ by their logarithm
SEEN_ERRORS, MOST_ERRORS = 1.0, 30.0  # as for gains, of gains over their errors

_OPS = tuple(op.name for op in LifecycleOp)
WHOLE_TOKEN = FeatureBlock((*GLOBAL_FEATURES, *features_of("whole", advised=_OPS)))
SLOT_TOKEN = FeatureBlock(
    (
        Feature("present", 0.0, 1.0, "0 or 1", "It is none of the padding."),
        *(feature for feature in slot_features(()) if feature.name != "blueprint"),
        Feature("advised", 0.0, 1.0, "0 or 1", "The rule would do it here."),
    )
)
CANDIDATE_TOKEN = FeatureBlock(
    features_of(
        "candidate",
        trait=tuple(str(trait.name) for trait in Trait),
        advised=tuple(blend.name for blend in Blend),
    )
)


@dataclass(frozen=True)
class TokenLayout:
    """How many slots and blueprints a row has room for."""

    slots: Count = 8
    blueprints: Count = 12

    def __post_init__(self) -> None:
        require_settings(self, "In a layout of tokens")

    @classmethod
    def of(cls, catalogue: BlueprintCatalogue) -> "TokenLayout":
        """The one without padding."""
        return cls(len(catalogue.slots), len(catalogue.names))

    @cached_property
    def space(self) -> ActionSpace:
        """The heads, padded as the rows are."""
        return ActionSpace(
            names=HEADS.names,
            sizes=(len(LifecycleOp), self.slots, self.blueprints, len(Blend)),
            relevance=HEADS.relevance,
            given=tuple(head.given for head in HEADS.heads),
        )

    @property
    def tokens(self) -> int:
        return 1 + self.slots * (1 + self.blueprints)

    @property
    def state_dim(self) -> int:
        """F"""
        return WIDTHS[0] + self.slots * (WIDTHS[1] + self.blueprints * WIDTHS[2])

    def split(self, states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[..., F] as the tokens [..., G], [..., S, D] and [..., S, P, C]."""
        inner = self.slots * WIDTHS[1]
        parts = states.split((WIDTHS[0], inner, self.state_dim - WIDTHS[0] - inner), -1)
        return (
            parts[0],
            parts[1].unflatten(-1, (self.slots, -1)),
            parts[2].unflatten(-1, (self.slots, self.blueprints, -1)),
        )

    def resized(self, other: "TokenLayout", own: Tensor, seeds: Tensor) -> tuple[Tensor, Tensor]:
        """What slots [..., S, D] and candidates [..., S, P, C] have, with another's room for them:
        cut off, or filled up with zeros."""
        slots, kinds = other.slots - self.slots, other.blueprints - self.blueprints
        return pad(own, (0, 0, 0, slots)), pad(seeds, (0, 0, 0, kinds, 0, slots))

    def observe(self, signals: Signals, advice: Actions) -> Tensor:
        """[N, F] float32, finite whatever was measured; `advice` is what the rule would do."""
        catalogue, N = signals.catalogue, len(signals)
        S, P = len(catalogue.slots), len(catalogue.names)
        self._require_room(S, P)
        told = torch.where(advice.relevant(), advice.values, -1)  # [N, H]: what matters, or -1
        op, slot, kind, blend = (column[:, None] for column in told.unbind(1))
        here = slot == torch.arange(S)  # [N, S]
        plant = here[:, :, None] & (kind == torch.arange(P))[:, None, :]  # [N, S, P]
        blends = (blend == torch.arange(len(Blend)))[:, None, None]  # [N, 1, 1, K]
        rows = torch.zeros(N, self.state_dim)
        whole, own, seeds = self.split(rows)
        of_all = {
            "horizon": signals.horizon.double().log10() / 3.0,
            "classes": torch.full((N,), math.log10(max(signals.classes, 1)) / 3.0),
            "slots": torch.full((N,), math.log10(1 + S) / 2.0),
            "budget": visible_cost(signals.budget.double(), max(catalogue.host_params, 1)),
            "rent": torch.full((N,), signals.rent / 10.0),
            "advised": op == torch.arange(len(LifecycleOp)),
        }
        whole[:] = WHOLE_TOKEN.held(global_columns(signals) | of_all)
        fixed = FeatureTable.of(catalogue).slot_constants
        more = {"present": torch.ones_like(here), "advised": here}
        own[:, :S] = SLOT_TOKEN.held(slot_columns(signals, fixed) | more)
        advised = {"advised": plant[..., None] & blends}
        seeds[:, :S, :P] = CANDIDATE_TOKEN.held(candidate_columns(signals) | advised)
        return rows

    def widen(self, legality: Legality) -> Legality:
        """The same with the layout's heads; padding is closed."""
        space = legality.space
        self._require_room(space.size("slot"), space.size("blueprint"))
        masks = {}
        for head, name in enumerate(space.names):
            inner = (*(space.size(earlier) for earlier in space.given[head]), space.sizes[head])
            outer = (*(self.space.size(e) for e in space.given[head]), self.space.sizes[head])
            mask = legality.masks.get(name)
            if mask is None:
                mask = torch.ones(legality.hosts, *inner, dtype=torch.bool)
            room = [w for have, want in zip(inner, outer, strict=True) for w in (want - have, 0)]
            masks[name] = pad(mask, room[::-1])
        return Legality(self.space, legality.hosts, masks)

    def narrow(self, actions: Actions | Tensor, space: ActionSpace) -> Actions:
        """Decisions [N, H] with the heads of a host."""
        return Actions(space, actions.values if isinstance(actions, Actions) else actions.cpu())

    def _require_room(self, slots: int, blueprints: int) -> None:
        if slots > self.slots or blueprints > self.blueprints:
            raise AgreementError(
                "The host has more slots or blueprints than the layout of tokens has room for",
                given=f"{slots} slots, {blueprints} blueprints",
                valid=f"at most {self.slots} slots, {self.blueprints} blueprints",
                fix="make a larger one: weights do not depend on it",
            )


WIDTHS = tuple(len(block.names) for block in (WHOLE_TOKEN, SLOT_TOKEN, CANDIDATE_TOKEN))  # G, D, C
# Where the advice stands in each kind of token, and last in all of them.
ADVISED = (len(LifecycleOp), 1, len(Blend))


def candidate_columns(signals: Signals) -> dict[str, Tensor]:
    """[N, S, P] each, or [N, S, P, options]; all but the advice."""
    life, fixed = signals.lifecycle, _constants(signals.catalogue)
    costs, kinds = fixed["costs"], torch.arange(len(signals.catalogue.names))
    shape = (len(signals), *costs.shape)
    silent = ShadowReadings.none(len(signals), torch.full(costs.shape, torch.nan))
    found = {name: array.float() for name, array in (signals.shadows or silent).arrays().items()}
    guessing = math.log(max(signals.classes, 2))
    gain, gradient, train = (found[name] for name in ("gain", "gradient", "train_gain"))
    heard, measured = ~gain.isnan(), ~gradient.isnan()
    sure = gain / found["error"].clamp(min=1e-12)
    left = signals.latest("validation_loss").float()[:, None, None].clamp(min=1e-6)
    room = (signals.budget - life.params.sum(1))[:, None, None]
    horizon = signals.horizon.clamp(min=1).float()[:, None, None]

    def of_loss(part: Tensor, unit: Tensor | float = guessing) -> Tensor:
        return symlog(part / unit, SEEN_GAIN, 1.0)

    return {
        "present": torch.ones(shape),
        "planted": (life.blueprint[:, :, None] == kinds) & life.occupied[:, :, None],
        "free": ~life.occupied[:, :, None].expand(shape),
        "fits": (costs >= 0).expand(shape),
        "affordable": (costs <= room).expand(shape),
        "params": fixed["params"].expand(shape),
        "params_rank": fixed["rank"].expand(shape),
        "trait": fixed["trait"].expand(*shape, len(Trait)),
        "flops_known": ~found["cost"].isnan(),
        "flops": visible_cost(found["cost"], 1.0),
        "heard": heard,
        "gain": of_loss(gain),
        "gain_of_rest": of_loss(gain, left),
        "certainty": symlog(sure, SEEN_ERRORS, MOST_ERRORS),
        "slope": of_loss(found["slope"]),
        "train_gain": of_loss(train),
        "by_heart": of_loss(train - gain),
        "learned": found["epochs"] / horizon,
        "gain_rank": standing(gain, heard),
        "certainty_rank": standing(sure, heard),
        "gradient_known": measured,
        "gradient": decades(gradient) / GRADIENT_DECADES,
        "gradient_rank": standing(gradient, measured),
    }


@lru_cache(maxsize=64)
def _constants(catalogue: BlueprintCatalogue) -> dict[str, Tensor]:
    """What candidates' features say of a host: [S, P] each, traits [S, P, traits]."""
    costs = catalogue.total_costs[:, :, Blend.RAMP]
    fits = costs >= 0
    return {
        "costs": costs,
        "params": visible_cost(costs.clamp(min=0).float(), max(catalogue.host_params, 1)),
        "rank": standing(costs.float()[None], fits[None])[0],
        "trait": torch.stack([catalogue.has(trait) for trait in Trait], -1),
    }


def symlog(value: Tensor, unit: float, most: float) -> Tensor:
    """About linear up to a unit, logarithmic beyond, 1 at the most."""
    return value.sign() * (value.abs() / unit).log1p() / math.log1p(most / unit)


def standing(score: Tensor, among: Tensor) -> Tensor:
    """[N, S, P] float32: the share of those `among` them that have a smaller score."""
    flat = score.masked_fill(~among, math.inf).flatten(1).contiguous()
    lower = torch.searchsorted(flat.sort(1).values, flat)
    return (lower / (among.flatten(1).sum(1, keepdim=True) - 1).clamp(min=1)).view_as(score)
