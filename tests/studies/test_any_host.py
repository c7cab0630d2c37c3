"""Rules for any host: what they plant is found by position and trait."""

import pytest
import torch

from esper.garden import Bed, Greenhouse
from esper.leyline import LifecycleOp
from esper.leyline.errors import EsperError
from esper.tamiyo.controllers.racing import Race
from esper.tamiyo.controllers.rules import NeverGrow
from studies.any_host import AnyHost

PLOTS = [Greenhouse(3, longest=14).plot(number) for number in range(6)]
CATALOGUES = [plot.contexts[0].catalogue(plot.blueprints) for plot in PLOTS]


def fitting(spec: str) -> list[list[tuple[str, str]]]:
    return [AnyHost(spec).places(catalogue) for catalogue in CATALOGUES]


def test_places_are_of_the_host_and_fit_it() -> None:
    for catalogue, cheap, dear, all_ in zip(
        CATALOGUES,
        fitting("periodic@first/cheapest"),
        fitting("periodic@last/dearest"),
        fitting("periodic@*/*"),
        strict=True,
    ):
        slots = catalogue.slots.names
        costs = {(slot, name): catalogue.costs[slots.index(slot)][catalogue.index(name)]
                 for slot in slots for name in catalogue.names}  # fmt: skip
        fits = {place for place, cost in costs.items() if cost >= 0}
        assert set(all_) == fits
        assert all_ == sorted(all_, key=lambda place: (slots.index(place[0]), costs[place]))
        for slot, chosen, best in ((slots[0], cheap, min), (slots[-1], dear, max)):
            here = [costs[place] for place in fits if place[0] == slot]
            assert [costs[place] for place in chosen] == ([best(here)] if here else [])
            assert all(place[0] == slot for place in chosen)


def test_a_trait_finds_the_same_seeds_from_either_end_and_none_where_there_is_none() -> None:
    small, large = fitting("gap@first/local"), fitting("gap@first/large-local")
    assert [sorted(each) for each in small] == [sorted(each) for each in large]
    pairs = zip(small, large, strict=True)
    assert any(len(each) > 1 and each == other[::-1] for each, other in pairs)
    assert any(not each for each in fitting("gap@*/global"))


def test_a_constant_has_one_seed_in_a_slot() -> None:
    for catalogue, places in zip(
        CATALOGUES, fitting("constant@first/*+first/cheapest+*/*"), strict=True
    ):
        slots = [slot for slot, _ in places]
        assert len(slots) == len(set(slots)) == min(2, len(catalogue.slots))


def test_a_rule_uses_as_many_places_as_it_has_time_for() -> None:
    spec = "race@*/*:first=1,epochs=7,spacing=1"
    catalogue = max(CATALOGUES, key=lambda each: len(each.slots))
    slots = len(catalogue.slots)
    assert slots > 2
    whole, short = (AnyHost(spec).rule_for(catalogue, horizon) for horizon in (60, 12))
    assert isinstance(whole, Race)
    assert isinstance(short, Race)
    assert len(whole._candidates(catalogue)) == slots
    assert len(short._candidates(catalogue)) == 2  # judged at 9 of 12
    assert isinstance(AnyHost(spec).rule_for(catalogue, 8), NeverGrow)


@pytest.mark.parametrize(
    "spec",
    ["constant@first/dearest+last/cheapest:epoch=2+3", "periodic@*/plain:every=2,seeds=1",
     "plateau@*/*", "heuristic@first/*:patience=0"],
)  # fmt: skip
def test_rules_act_on_any_host_by_legal_actions(spec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("esper.garden.episodes.GARDEN_BATCHES", 1)
    bed, rule = Bed(PLOTS[1], players=1), AnyHost(spec)
    starts, planted = torch.ones(1, dtype=torch.bool), 0
    for _ in range(6):
        actions = rule.act(*bed.seen, starts)
        assert bool(bed.seen[1].permits(actions).all())
        planted += int((actions["op"] == LifecycleOp.GERMINATE).sum())
        bed.step(actions.values)
        starts = torch.zeros_like(starts)
    assert planted > 0 or not rule.places(bed.seen[0].catalogue) or "plateau" in spec


@pytest.mark.parametrize(
    "spec", ["audition@*/*", "periodic@second/*", "periodic@*/cheap", "gap@*/*:evry=2"]
)
def test_what_is_not_known_is_refused(spec: str) -> None:
    with pytest.raises(EsperError):
        AnyHost(spec)
