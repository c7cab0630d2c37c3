"""Tokens: what a policy for any host sees, whatever the numbers of slots and blueprints."""

import dataclasses
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from esper.leyline import HEADS, Actions, Blend, BlueprintCatalogue, LifecycleOp, SlotConfig, Trait
from esper.leyline.errors import AgreementError, EsperError
from esper.leyline.shadows import MEASURED, ShadowReadings
from esper.leyline.signals import Signals
from esper.tamiyo.token_layout import (
    CANDIDATE_TOKEN,
    SLOT_TOKEN,
    WHOLE_TOKEN,
    WIDTHS,
    TokenLayout,
    standing,
    symlog,
)
from tests.tamiyo.spaces import esper_space, random_legality
from tests.tamiyo.test_features import CATALOGUE, WILD, wild_signals

LAYOUT = TokenLayout()


def token_names(catalogue: BlueprintCatalogue) -> tuple[str, ...]:
    """Of every number in a row of the layout without padding."""
    slots = catalogue.slots.names
    places = [f"{slot}/{kind}" for slot in slots for kind in catalogue.names]
    own = [f"{slot}:{name}" for slot in slots for name in SLOT_TOKEN.names]
    return (
        *WHOLE_TOKEN.names,
        *own,
        *(f"{place}:{name}" for place in places for name in CANDIDATE_TOKEN.names),
    )


def wild(seed: int, rows: int = 5) -> tuple[Signals, Actions]:
    """Any measurements, shadows and advice."""
    chance = torch.Generator().manual_seed(seed + 1)
    signals = wild_signals(seed, rows)
    shape = (rows, len(CATALOGUE.slots), len(CATALOGUE.names))
    picked = {
        name: WILD[torch.randint(len(WILD), shape, generator=chance)].double() for name in MEASURED
    }
    epochs = 30 * torch.rand(shape, generator=chance).double()
    shadows = ShadowReadings(epochs=epochs, cost=picked["gain"].abs(), **picked)
    space = HEADS.resolve(CATALOGUE)
    values = [torch.randint(size, (rows,), generator=chance) for size in space.sizes]
    advice = Actions(space, torch.stack(values, 1)).canonical()
    return dataclasses.replace(signals, shadows=shadows), advice


def seen(signals: Signals, advice: Actions) -> dict[str, Tensor]:
    columns = TokenLayout.of(CATALOGUE).observe(signals, advice).unbind(1)
    return dict(zip(token_names(CATALOGUE), columns, strict=True))


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**20), rows=st.integers(1, 5))
def test_whatever_was_measured_tokens_are_finite_and_small(seed: int, rows: int) -> None:
    states = LAYOUT.observe(*wild(seed, rows))
    assert states.shape == (rows, LAYOUT.state_dim)
    assert states.dtype == torch.float32
    assert bool((states.abs() <= 4.0).all())


@settings(max_examples=6, deadline=None)
@given(seed=st.integers(0, 2**20))
def test_room_for_more_changes_nothing_but_the_padding(seed: int) -> None:
    signals, advice = wild(seed)
    exact, wide = TokenLayout.of(CATALOGUE), TokenLayout(11, 17)
    whole, own, seeds = exact.split(exact.observe(signals, advice))
    parts = wide.split(wide.observe(signals, advice))
    more = torch.nn.functional.pad
    assert torch.equal(parts[0], whole)
    assert torch.equal(parts[1], more(own, (0, 0, 0, 11 - exact.slots)))
    room = (0, 0, 0, 17 - exact.blueprints, 0, 11 - exact.slots)
    assert torch.equal(parts[2], more(seeds, room))
    assert bool((own[..., 0] == 1).all() & (seeds[..., 0] == 1).all())


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**20))
def test_the_order_of_slots_and_blueprints_moves_tokens_and_changes_none(seed: int) -> None:
    signals, advice = wild(seed)
    chance = torch.Generator().manual_seed(seed)
    slots, kinds = (torch.randperm(count, generator=chance) for count in (3, len(CATALOGUE.names)))
    life, shadows = signals.lifecycle, signals.shadows
    assert shadows is not None
    place = kinds.argsort()  # where each blueprint is now
    moved = {name: each[:, slots] for name, each in life.state_dict().items() if each.ndim == 2}
    moved["blueprint"] = torch.where(
        moved["blueprint"] < 0, moved["blueprint"], place[moved["blueprint"]]
    )
    readings = {name: each[:, slots][:, :, kinds] for name, each in shadows.arrays().items()}

    def turned(table: tuple[tuple[int, ...], ...]) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(table[s][k] for k in kinds.tolist()) for s in slots.tolist())

    names = CATALOGUE.slots.names
    other = BlueprintCatalogue(
        SlotConfig(tuple(names[s] for s in slots.tolist())),
        tuple(CATALOGUE.names[k] for k in kinds.tolist()),
        turned(CATALOGUE.costs),
        tuple(CATALOGUE.blend_costs[s] for s in slots.tolist()),
        CATALOGUE.host_params,
        turned(CATALOGUE.traits),
    )
    values = advice.values.clone()
    values[:, 1], values[:, 2] = slots.argsort()[values[:, 1]], place[values[:, 2]]
    told = Actions(advice.space, values).canonical()
    assert signals.flow is not None
    second = dataclasses.replace(
        signals,
        catalogue=other,
        lifecycle=dataclasses.replace(life, **moved),
        shadows=ShadowReadings(**readings),
        flow=signals.flow[:, slots],
    )
    whole, own, seeds = LAYOUT.split(LAYOUT.observe(signals, advice))
    whole2, own2, seeds2 = LAYOUT.split(LAYOUT.observe(second, told))
    position = token_names(CATALOGUE)[WIDTHS[0] :].index("early:position")
    kept = [column for column in range(WIDTHS[1]) if column != position]
    assert torch.equal(whole, whole2)
    assert torch.equal(own[:, slots][..., kept], own2[:, :3][..., kept])
    assert torch.equal(seeds[:, slots][:, :, kinds], seeds2[:, :3, : len(kinds)])


def test_no_name_is_seen() -> None:
    signals, advice = wild(3)
    other = dataclasses.replace(
        CATALOGUE,
        slots=SlotConfig(("a", "b", "c")),
        names=tuple(f"mine{place}" for place in range(len(CATALOGUE.names))),
    )
    renamed = dataclasses.replace(signals, catalogue=other)
    assert torch.equal(LAYOUT.observe(signals, advice), LAYOUT.observe(renamed, advice))


def test_a_shadow_is_seen_in_units_of_guessing_and_of_what_is_left() -> None:
    signals, advice = wild(0)
    shadows = ShadowReadings.none(5, torch.full((3, len(CATALOGUE.names)), 0.5))
    where = torch.zeros_like(shadows.gain, dtype=torch.bool)
    where[:, 1, 2] = where[:, 2, 0] = True
    found = {"gain": 0.2, "error": 0.01, "train_gain": 0.3, "gradient": 0.1}
    given = {name: torch.full_like(shadows.gain, value) for name, value in found.items()}
    given["gain"][:, 2, 0] = -0.2
    shadows = shadows.updated(where, torch.full_like(shadows.gain, 2.0), **given)
    loss = torch.full_like(signals.validation_loss, 0.5)
    signals = dataclasses.replace(
        signals, shadows=shadows, validation_loss=loss, horizon=torch.full((5,), 20)
    )
    columns = seen(signals, advice)
    place = f"mid/{CATALOGUE.names[2]}"

    def logarithm(value: float, unit: float, most: float) -> float:
        return math.log1p(value / unit) / math.log1p(most / unit)

    for name, expected in {
        "heard": 1.0,
        "gain": logarithm(0.2 / math.log(10), 0.003, 1.0),
        "gain_of_rest": logarithm(0.4, 0.003, 1.0),
        "certainty": logarithm(20.0, 1.0, 30.0),
        "by_heart": logarithm(0.1 / math.log(10), 0.003, 1.0),
        "learned": 0.1,
        "gain_rank": 1.0,
        "gradient": -0.25,
        "flops": math.log10(501.0) / 4.0,
    }.items():
        value = torch.full((5,), expected)
        torch.testing.assert_close(columns[f"{place}:{name}"], value, msg=name)
    lost = columns[f"late/{CATALOGUE.names[0]}:gain"]
    assert torch.equal(lost, -columns[f"{place}:gain"])
    silent = columns[f"early/{CATALOGUE.names[0]}:heard"]
    assert not bool(silent.any())


def test_advice_is_marked_where_it_says_something() -> None:
    signals, _ = wild(0, 2)
    space = HEADS.resolve(CATALOGUE)
    plant = {"op": LifecycleOp.GERMINATE, "slot": 1, "blueprint": 2, "blend": Blend.RAMP}
    for chosen in (plant, {"op": LifecycleOp.WAIT}, {"op": LifecycleOp.PRUNE, "slot": 2}):
        columns = seen(signals, Actions.of(space, 2, **chosen))
        marked = {name for name, values in columns.items() if "advised" in name and values.any()}
        expected = {f"advised.{LifecycleOp(chosen['op']).name}"}
        if "slot" in chosen:
            expected.add(f"{CATALOGUE.slots.names[chosen['slot']]}:advised")
        if "blueprint" in chosen:
            expected.add(f"mid/{CATALOGUE.names[2]}:advised.RAMP")
        assert marked == expected


def test_traits_are_seen_at_every_slot() -> None:
    columns = seen(*wild(0))
    for slot, name in enumerate(CATALOGUE.slots.names):
        for kind, blueprint in enumerate(CATALOGUE.names):
            for trait in Trait:
                held = bool(CATALOGUE.has(trait)[slot, kind])
                values = columns[f"{name}/{blueprint}:trait.{trait.name}"]
                assert torch.equal(values, torch.full((5,), float(held)))
    assert bool(CATALOGUE.has(Trait.KNOWN).all())


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 2**20),
    slots=st.integers(1, 4),
    blueprints=st.integers(1, 5),
    left_out=st.sampled_from(["none", "op", "slot", "blueprint", "blend"]),
)
def test_widened_legality_permits_the_same_and_no_padding(
    seed: int, slots: int, blueprints: int, left_out: str
) -> None:
    space = esper_space(slots, blueprints)
    chance = torch.Generator().manual_seed(seed)
    legal = random_legality(space, 3, chance)
    masks = {name: mask for name, mask in legal.masks.items() if name != left_out}
    legal = dataclasses.replace(legal, masks=masks)
    layout = TokenLayout(5, 7)
    wide = layout.widen(legal)
    values = [torch.randint(size, (3,), generator=chance) for size in space.sizes]
    actions = Actions(space, torch.stack(values, 1)).canonical()
    padded = Actions(layout.space, actions.values)
    assert torch.equal(wide.permits(padded), legal.permits(actions))
    inside, outside = legal.resolved(actions.values), wide.resolved(actions.values)
    widest = inside.shape[-1]
    assert torch.equal(outside[..., :widest], inside)
    assert not bool(outside[..., widest:].any())
    assert torch.equal(layout.narrow(padded, space).values, actions.values)


def test_a_host_that_is_too_large_is_told_to_use_a_larger_layout() -> None:
    signals, advice = wild(0)
    with pytest.raises(AgreementError, match="make a larger one"):
        TokenLayout(2, 12).observe(signals, advice)
    with pytest.raises(AgreementError, match="at most 8 slots, 3 blueprints"):
        TokenLayout(8, 3).observe(signals, advice)
    with pytest.raises(EsperError, match="slots"):
        TokenLayout(0, 3)


def test_equal_scores_have_equal_ranks() -> None:
    score = torch.tensor([[[3.0, 1.0], [1.0, 7.0]]])
    among = torch.tensor([[[True, True], [True, False]]])
    assert standing(score, among)[among].tolist() == [1.0, 0.0, 0.0]
    assert symlog(torch.tensor([-1.0, 0.0, 1.0]), 0.003, 1.0).tolist() == [-1.0, 0.0, 1.0]
