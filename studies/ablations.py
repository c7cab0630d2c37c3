"""Controllers over tokens that lack something: shadows, properties of blueprints, later seeds.

What is seen is changed in the same way when a network is fitted and when it decides:

    shadows     what shadows showed is 0, and the rule's advice to plant, which follows from them,
                is to wait; its advice on what grows stays
    properties  the traits of a blueprint give way to its identity: of their columns a number that
                is the same for all names, a choice of its own for each
    one_shot    nothing that is seen changes, but a row that planted may not plant again

A kept controller has its ablation in its card, so whoever reads it here applies it.

Shapes: `N` rows, `F` features, `S` slots, `P` blueprints, `T` columns of traits.
"""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import combinations
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from esper.garden import LAYOUT
from esper.garden.greenhouse import LONGEST
from esper.kasmina.blueprints import blueprint_names
from esper.leyline import Actions, Family, Legality, LifecycleOp
from esper.leyline.errors import require_known
from esper.leyline.signals import Signals
from esper.tamiyo.controllers.auditioning import Audition
from esper.tamiyo.controllers.learned import (
    LearnedController,
    SavedController,
    TokenController,
    load_saved,
)
from esper.tamiyo.controllers.protocol import restarted
from esper.tamiyo.features import FeatureBlock
from esper.tamiyo.token_layout import CANDIDATE_TOKEN, SLOT_TOKEN, WHOLE_TOKEN, TokenLayout
from esper.tamiyo.token_network import TokenActorCritic
from studies.garden_plots import house_of
from studies.greenhouse_gains import Anchors, Gains
from studies.listening import Moments

SHADOWS, PROPERTIES, ONE_SHOT = "shadows", "properties", "one_shot"
SEEN = (SHADOWS, PROPERTIES)  # that change what is seen
ABLATIONS = (*SEEN, ONE_SHOT)
ABLATION = "ablation"  # in a kept controller's card

Seen = TypeVar("Seen", Gains, Anchors, Moments)

_HEARD = ("heard", "gradient_known")  # flags of what shadows showed


def columns_of(block: FeatureBlock, *features: str) -> list[int]:
    """Places of these features' columns in a token."""
    wanted = {name for each in block.features if each.name in features for name in each.names}
    return [place for place, name in enumerate(block.names) if name in wanted]


def shadow_features() -> tuple[str, ...]:
    """Of candidates: whether shadows showed something, and what."""
    return tuple(
        each.name
        for each in CANDIDATE_TOKEN.features
        if each.name in _HEARD or set(_HEARD) & set(each.flags)
    )


_SHOWN = columns_of(CANDIDATE_TOKEN, *shadow_features())
_TRAITS = columns_of(CANDIDATE_TOKEN, "trait")
_PRESENT = columns_of(CANDIDATE_TOKEN, "present")[0]
_SEED_ADVISED = columns_of(CANDIDATE_TOKEN, "advised")
_SLOT_ADVISED = columns_of(SLOT_TOKEN, "advised")
_OP_ADVISED = columns_of(WHOLE_TOKEN, "advised")


def without_shadows(layout: TokenLayout, states: Tensor) -> Tensor:
    """[N, F]: nothing was heard, and where the rule would plant it waits."""
    found = states.clone()
    whole, own, seeds = layout.split(found)  # views
    plants = whole[..., _OP_ADVISED[LifecycleOp.GERMINATE]] > 0
    whole[..., _OP_ADVISED[LifecycleOp.WAIT]][plants] = 1.0
    whole[..., _OP_ADVISED[LifecycleOp.GERMINATE]] = 0.0
    own[..., _SLOT_ADVISED] *= (~plants)[..., None, None]
    seeds[..., [*_SHOWN, *_SEED_ADVISED]] = 0.0
    return found


def by_identity(layout: TokenLayout, states: Tensor, codes: Tensor) -> Tensor:
    """[N, F]: traits give way to `codes`, [N, P, T] or [P, T]; padding stays 0."""
    found = states.clone()
    seeds = layout.split(found)[2]
    there = seeds[..., _PRESENT, None] > 0
    seeds[..., _TRAITS] = torch.where(there, codes.to(found).unsqueeze(-3), 0.0)
    return found


@lru_cache
def _identities() -> Mapping[str, tuple[float, ...]]:
    """Of every blueprint that Esper has: half of the columns are 1, for no two names the same."""
    names = sorted({name for kind in Family for name in blueprint_names(kind, wrapped=True)})
    columns = range(len(_TRAITS))
    chosen = combinations(columns, len(_TRAITS) // 2)
    return {
        name: tuple(float(place in ones) for place in columns)
        for name, ones in zip(names, chosen, strict=False)
    }


def codes_of(names: Sequence[str], room: int) -> Tensor:
    """[P, T] for so many blueprints; 0 for padding, and for one that somebody added."""
    known, nobody = _identities(), (0.0,) * len(_TRAITS)
    found = [known.get(name, nobody) for name in names]
    return torch.tensor(found + [nobody] * (room - len(found)))


def ablated(ablation: str | None, part: Seen) -> Seen:
    """What a fit learns from, as an ablated controller would see it."""
    if ablation is None:
        return part
    require_known("ablation of what is seen", ablation, SEEN)
    if ablation == SHADOWS:
        return part._replace(observations=without_shadows(LAYOUT, part.observations))
    codes = _codes_by_plot(part.seed, part.plot)
    return part._replace(observations=by_identity(LAYOUT, part.observations, codes))


def _codes_by_plot(seed: Tensor, plot: Tensor) -> Tensor:
    """[D, P, T]: gains are kept without names, but a plot can be drawn again."""
    if bool((seed < 0).any()):
        raise SystemExit("These gains do not say of which greenhouse they are: collect them anew")
    pairs, which = torch.stack((seed, plot), 1).unique(dim=0, return_inverse=True)
    codes = [
        codes_of(house_of(one, LONGEST).plot(number, contexts=0).blueprints, LAYOUT.blueprints)
        for one, number in pairs.tolist()
    ]
    nobody = codes_of((), LAYOUT.blueprints)  # very little may have no anchors
    return torch.stack([*codes, nobody])[which]


class AblatedController(TokenController):
    """A controller over tokens that lacks something."""

    def __init__(
        self, network: TokenActorCritic, ablation: str, rule: Audition | None = None, *, name: str
    ) -> None:
        require_known("ablation", ablation, ABLATIONS)
        super().__init__(network, rule, name=name)
        self.ablation = ablation
        self._planted: Tensor | None = None  # [N] bool

    @property
    def fingerprint(self) -> str:
        return f"{super().fingerprint} without {self.ablation}"

    def act(self, signals: Signals | Tensor, legality: Legality, starts: Tensor) -> Actions:
        if self.ablation != ONE_SHOT:
            return super().act(signals, legality, starts)
        planted = restarted(self._planted, torch.zeros_like(starts), starts)
        actions = super().act(signals, _closed(legality, planted), starts)
        self._planted = planted | (actions["op"] == LifecycleOp.GERMINATE)
        return actions

    def _encode_signals(self, signals: Signals, legality: Legality, starts: Tensor) -> Tensor:
        states = super()._encode_signals(signals, legality, starts)
        layout = self.network.layout
        if self.ablation == SHADOWS:
            return without_shadows(layout, states)
        if self.ablation == PROPERTIES:
            codes = codes_of(signals.catalogue.names, layout.blueprints)
            return by_identity(layout, states, codes)
        return states


def _closed(legality: Legality, planted: Tensor) -> Legality:
    """The same, but these rows [N] bool may not plant."""
    op = legality.masks["op"].clone()
    op[planted, LifecycleOp.GERMINATE] = False
    return Legality(legality.space, legality.hosts, {**legality.masks, "op": op})


def controller_in(folder: Path, name: str) -> LearnedController:
    """Load a saved controller under a name, with the ablation that its card names."""
    saved: SavedController = load_saved(folder)
    controller = saved.controller(name)
    ablation = saved.card.get(ABLATION)
    if ablation is None:
        return controller
    assert isinstance(controller, TokenController), "ablations need a network over tokens"
    return AblatedController(controller.network, str(ablation), controller.rule, name=name)
