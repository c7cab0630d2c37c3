"""Drawn worlds: the same everywhere, never twice, and nothing that is held out among them."""

import hashlib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from esper.garden import Context, Source
from esper.garden.contexts import lesion_mask
from esper.garden.greenhouse import (
    DRIFTS,
    GROUPS,
    HELD_OUT_FAMILIES,
    HELD_OUT_LESION,
    LESIONS,
    LISTED,
    LONGEST,
    RANGES,
    SETS,
    SHAPES,
    SHORTEST,
    WIDENED,
    Greenhouse,
    Plot,
    blueprint_set,
)
from esper.leyline.errors import UnknownNameError

PAGE = Path(__file__).parents[2] / "docs" / "greenhouse.md"


@cache
def drawn(count: int = 150) -> tuple[Plot, ...]:
    return tuple(Greenhouse(1).plot(number, contexts=2) for number in range(count))


def tasks(context: Context) -> Iterator[Source]:
    yield context.source
    if context.drift is not None:
        yield context.drift


def slots(plot: Plot) -> int:
    return len(plot.contexts[0].build_host().slot_specs())


def shape_of(plot: Plot) -> str:
    return plot.contexts[0].host_shape


def kind_of_drift(context: Context) -> str:
    before, after = context.source, context.drift
    assert after is not None
    if before.family != after.family:
        return "family"
    return "parameters" if before.parameters() != after.parameters() else "samples or labels"


# --- what a world is ----------------------------------------------------------------------------


@settings(max_examples=25)
@given(seed=st.integers(0, 2**40), number=st.integers(0, 10**9))
def test_a_world_follows_from_seed_and_number_and_has_nothing_that_is_held_out(
    seed: int, number: int
) -> None:
    plot = Greenhouse(seed).plot(number, contexts=2)
    assert plot == Greenhouse(seed).plot(number, contexts=2)
    assert plot.contexts[:1] == Greenhouse(seed).plot(number, contexts=1).contexts
    require_trained(plot)


def require_trained(plot: Plot) -> None:
    assert SHORTEST <= plot.horizon <= LONGEST
    assert slots(plot) in {1, 2, 3, 5, 6, 8}
    assert plot.contexts[0].host in {"mlp", "conv1d", "folded"}
    assert len({context.host_shape for context in plot.contexts}) == 1
    assert (shape_of(plot), plot.blueprints) in trained_spaces()
    for context in plot.contexts:
        assert context.lesion is None or context.lesion.kind in LESIONS
        assert context.drift is None or kind_of_drift(context) != "family"
        for task in tasks(context):
            assert task.family not in HELD_OUT_FAMILIES
            assert 100 <= task.samples <= 8000
            assert 0.0 <= task.label_noise <= 0.9
            assert task.classes == plot.contexts[0].source.classes
            for name, (low, high) in RANGES[task.family].items():
                assert low <= task.parameters()[name] <= high


@cache
def trained_spaces() -> frozenset[tuple[str, tuple[str, ...]]]:
    """Shapes with the sets of blueprints that training may give them."""
    found = set()
    for shape in SHAPES:
        source = Source(family="tones", classes=2)
        context = Context(
            name="any",
            family="any",
            source=source,
            host=shape.host,
            host_sizes=(*shape.sizes, ("classes", 20)),
        )
        if shape.group == "training":
            found |= {(context.host_shape, blueprint_set(shape, each)) for each in range(SETS)}
    return frozenset(found)


def test_many_worlds_have_nothing_that_is_held_out_and_no_samples_twice() -> None:
    seeds = [task.seed for plot in drawn() for context in plot.contexts for task in tasks(context)]
    assert len(set(seeds)) == len(seeds)
    for plot in drawn():
        require_trained(plot)


def test_everything_that_may_be_trained_on_is_drawn() -> None:
    contexts = [context for plot in drawn() for context in plot.contexts]
    families = {task.family for context in contexts for task in tasks(context)}
    assert families == set(RANGES) - HELD_OUT_FAMILIES
    assert {each.lesion.kind for each in contexts if each.lesion} == set(LESIONS)
    kinds = {kind_of_drift(each) for each in contexts if each.drift}
    assert kinds == {"parameters", "samples or labels"}
    assert set(DRIFTS) == {"samples", "labels", "parameters"}
    assert {slots(plot) for plot in drawn()} == {1, 2, 3, 5, 6, 8}
    classes = {context.source.classes for context in contexts}
    assert min(map(int, classes)) == 2
    assert max(map(int, classes)) > 15
    noise = torch.tensor([context.source.label_noise for context in contexts])
    assert float(noise.median()) < 0.1
    assert float(noise.max()) > 0.7
    shapes = {shape_of(plot) for plot in drawn()}
    assert len(shapes) == sum(shape.group == "training" for shape in SHAPES)


def test_seeds_of_greenhouses_have_different_worlds() -> None:
    first, second = (Greenhouse(seed).plot(0).contexts[0] for seed in (0, 1))
    assert first.source.seed != second.source.seed


@pytest.mark.parametrize("number", range(3))
def test_worlds_load_with_as_many_classes_as_they_say(number: int) -> None:
    source = drawn()[number].contexts[0].source
    splits = source.load()
    assert splits.classes == source.classes
    assert int(splits.train.labels.max()) < splits.classes


# --- what is held out -----------------------------------------------------------------------------


def is_held_out(group: str, plot: Plot) -> bool:
    """Does it have what training never has?"""
    (context,) = plot.contexts
    trained = {shape for shape, _ in trained_spaces()}
    return {
        "parameters": True,  # of them some lie beyond, see below
        "sizes": shape_of(plot) not in trained
        and context.host != "pieces"
        and slots(plot) not in {4, 7},
        "kinds": context.host == "pieces",
        "families": context.source.family in HELD_OUT_FAMILIES,
        "lesions": context.lesion is not None and context.lesion.kind == HELD_OUT_LESION,
        "drift": context.drift is not None and kind_of_drift(context) == "family",
        "spaces": slots(plot) in {4, 7},
    }[group]


@pytest.mark.parametrize("group", GROUPS)
def test_every_world_of_a_group_has_what_it_is_named_after(group: str) -> None:
    worlds = Greenhouse.listed(group)
    assert len(worlds) == LISTED >= 12
    assert len({plot.contexts[0].key for plot in worlds}) == LISTED
    assert all(is_held_out(group, plot) for plot in worlds)
    others = [each for each in GROUPS if each not in ("parameters", group)]
    assert not any(is_held_out(each, plot) for plot in worlds for each in others)


def test_half_of_the_group_of_parameters_lies_beyond_what_is_trained_on() -> None:
    beyond = [
        any(
            context.source.parameters()[name] > high
            for name, (_, high) in RANGES[context.source.family].items()
            if name in WIDENED
        )
        for plot in Greenhouse.listed("parameters")
        for context in plot.contexts
    ]
    assert 4 <= sum(beyond) <= 8


def test_sets_of_blueprints_held_out_are_on_no_host_of_their_kind_in_training() -> None:
    trained = {
        (shape.host, blueprint_set(shape, number))
        for shape in SHAPES
        for number in range(SETS)
        if shape.group == "training"
    }
    for plot in Greenhouse.listed("spaces"):
        assert (plot.contexts[0].host, plot.blueprints) not in trained


def test_every_lesion_held_out_closes_something() -> None:
    for plot in Greenhouse.listed("lesions"):
        context = plot.contexts[0]
        assert not bool(lesion_mask(context.build_host(), context.lesion).all())


def test_validation_is_as_training_and_none_of_it() -> None:
    trained = {context.source.seed for plot in drawn() for context in plot.contexts}
    for plot in Greenhouse.listed("validation"):
        require_trained(plot)
        assert plot.contexts[0].source.seed not in trained


def test_the_groups_are_those_that_were_registered() -> None:
    """The page names the hash of every group, which follows from all that changes numbers."""
    page = PAGE.read_text(encoding="utf-8")
    for group in GROUPS:
        worlds = [(plot.contexts[0].to_dict(), *settings_of(plot))
                  for plot in Greenhouse.listed(group)]  # fmt: skip
        digest = hashlib.sha256(repr(worlds).encode()).hexdigest()[:16]
        rows = [line for line in page.splitlines() if line.startswith(f"| `{group}` |")]
        assert [digest in row for row in rows] == [True], f"{group}: {digest}"


def settings_of(plot: Plot) -> tuple[object, ...]:
    return plot.blueprints, plot.rate, plot.horizon, plot.rent, plot.budget


def test_a_group_that_there_is_not_is_refused() -> None:
    with pytest.raises(UnknownNameError, match="did you mean 'spaces'"):
        Greenhouse(group="space")
