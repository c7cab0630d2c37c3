"""Heads are data: the table, what is derived from it, and a fifth head by declaration only."""

import enum

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from esper.leyline import (
    HEAD_NAMES,
    HEADS,
    ActionError,
    Actions,
    AgreementError,
    Blend,
    BlueprintCatalogue,
    EsperError,
    Head,
    HeadTable,
    Legality,
    LifecycleOp,
    SlotConfig,
)


def catalogue(slots: int = 3, blueprints: int = 4) -> BlueprintCatalogue:
    return BlueprintCatalogue(
        SlotConfig.of_size(slots),
        tuple(f"b{index}" for index in range(blueprints)),
        tuple(tuple(10 * (index + 1) for index in range(blueprints)) for _ in range(slots)),
        tuple((0, 0, 5) for _ in range(slots)),
        host_params=1000,
    )


def test_relevance_is_the_matrix_of_the_specification() -> None:
    expected = {
        "WAIT": {"op"},
        "GERMINATE": {"op", "slot", "blueprint", "blend"},
        "ADVANCE": {"op", "slot"},
        "FOSSILIZE": {"op", "slot"},
        "PRUNE": {"op", "slot"},
    }
    for op in LifecycleOp:
        row = HEADS.relevance[op]
        assert {name for name, on in zip(HEAD_NAMES, row, strict=True) if on} == expected[op.name]


def test_sizes_come_from_slots_and_catalogue() -> None:
    space = HEADS.resolve(catalogue(slots=5, blueprints=7))
    assert space.sizes == (len(LifecycleOp), 5, 7, len(Blend))


def test_an_op_that_the_table_leaves_out_is_refused_when_the_table_is_made() -> None:
    longer = enum.IntEnum("longer", [*LifecycleOp.__members__, "SPLIT"], start=0)
    with pytest.raises(AgreementError, match="missing SPLIT"):
        HeadTable(longer, HEADS.heads)


def test_a_head_that_depends_on_a_later_head_is_refused() -> None:
    first, second = HEADS.heads[:2]
    with pytest.raises(AgreementError, match="not chosen before"):
        HeadTable(
            LifecycleOp,
            (first, Head(name="x", size=second.size, matters_for=frozenset({1}), given=("slot",))),
        )


def test_a_fifth_head_needs_its_declaration_and_nothing_else() -> None:
    tempo = Head(
        name="tempo",
        size=lambda _: 4,
        matters_for=frozenset({LifecycleOp.GERMINATE, LifecycleOp.ADVANCE}),
        given=("op",),
    )
    table = HeadTable(LifecycleOp, (*HEADS.heads, tempo))
    space = table.resolve(catalogue())
    assert space.names == (*HEAD_NAMES, "tempo")
    assert space.size("tempo") == 4
    assert [row[-1] for row in space.relevance] == [False, True, True, False, False]

    actions = Actions.of(space, hosts=2, op=torch.tensor([1, 3]), tempo=3)
    assert actions.relevant()[:, -1].tolist() == [True, False]
    assert actions.canonical()["tempo"].tolist() == [3, 0]

    ops = torch.ones(2, len(LifecycleOp), dtype=torch.bool)
    tempos = torch.ones(2, len(LifecycleOp), 4, dtype=torch.bool)
    tempos[:, LifecycleOp.GERMINATE, 3] = False
    legal = Legality(space, 2, {"op": ops, "tempo": tempos})
    assert legal.mask("tempo", actions.values).tolist() == [
        [True, True, True, False],
        [True, False, False, False],  # does not matter for FOSSILIZE: canonical only
    ]
    assert legal.permits(actions).tolist() == [False, True]


def test_the_body_carries_on_with_a_fifth_head() -> None:
    from esper.kasmina import SlottedModel, build_host

    host = SlottedModel(build_host("mlp"))
    tempo = Head(name="tempo", size=lambda _: 4, matters_for=frozenset({1}))
    space = HeadTable(LifecycleOp, (*HEADS.heads, tempo)).resolve(host.catalogue)
    host.space = space
    legal = host.legal()
    actions = Actions.of(space, op=1, slot=1, blueprint=2, blend=1, tempo=3)
    assert bool(legal.permits(actions)[0])
    assert len(host.apply(actions)) == 2


@given(values=st.lists(st.tuples(*(st.integers(-1, 8) for _ in range(4))), min_size=1, max_size=5))
def test_actions_are_accepted_exactly_when_every_head_is_in_range(
    values: list[tuple[int, ...]],
) -> None:
    space = HEADS.resolve(catalogue())
    fine = all(0 <= v < size for row in values for v, size in zip(row, space.sizes, strict=True))
    tensor = torch.tensor(values)
    if fine:
        actions = Actions(space, tensor)
        again = actions.canonical()
        assert torch.equal(again.values, again.canonical().values)
        assert not bool((again.values[~actions.relevant()] != 0).any())
    else:
        with pytest.raises(ActionError, match="out of range"):
            Actions(space, tensor)


@pytest.mark.parametrize(
    ("make", "fragment"),
    [
        (lambda space: Actions(space, torch.zeros(3, 4)), "int64"),
        (lambda space: Actions(space, torch.zeros(3, 3, dtype=torch.int64)), "number of heads"),
        (lambda space: Actions.of(space, tempo=1), "action head"),
        (lambda space: Legality(space, 2, {"op": torch.ones(1, 5, dtype=torch.bool)}), "shape"),
        (lambda space: Legality(space, 1, {"op": torch.ones(1, 5)}), "torch.bool"),
    ],
)
def test_malformed_actions_and_masks_are_refused_by_name(make, fragment: str) -> None:
    with pytest.raises(EsperError, match=fragment):
        make(HEADS.resolve(catalogue()))
