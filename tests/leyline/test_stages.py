"""The transition table, and moving arrays by it."""

import itertools

import pytest
import torch

from esper.leyline import (
    LIVING_STAGES,
    TRANSITIONS,
    IllegalTransitionError,
    Lifecycle,
    LifecycleOp,
    SeedStage,
    check_transition,
)
from esper.leyline.lifecycle import move


def test_every_stage_has_a_row_and_fossilized_is_the_only_end() -> None:
    assert set(TRANSITIONS) == set(SeedStage)
    ends = [stage for stage, after in TRANSITIONS.items() if not after]
    assert ends == [SeedStage.FOSSILIZED]


def test_every_living_stage_can_be_pruned_and_nothing_else_can() -> None:
    prunable = {stage for stage, after in TRANSITIONS.items() if SeedStage.PRUNED in after}
    assert prunable == LIVING_STAGES


def test_every_slot_that_is_not_fossilized_can_become_dormant_again() -> None:
    for stage in set(SeedStage) - {SeedStage.FOSSILIZED}:
        reached, frontier = {stage}, [stage]
        while frontier:
            for after in TRANSITIONS[frontier.pop()] - reached:
                reached.add(after)
                frontier.append(after)
        assert SeedStage.DORMANT in reached


@pytest.mark.parametrize(("before", "after"), list(itertools.product(SeedStage, SeedStage)))
def test_arrays_move_exactly_where_the_table_allows(before: SeedStage, after: SeedStage) -> None:
    life = Lifecycle.dormant(2, 2)
    life.stage[1, 0] = before
    where = torch.tensor([[False, False], [True, False]])
    if after in TRANSITIONS[before]:
        check_transition(before, after)
        moved, record = move(life, where, after, LifecycleOp.WAIT)
        assert moved.stage.tolist() == [[0, 0], [after, 0]]
        assert [(r.host, r.slot, r.before, r.after) for r in record] == [(1, 0, before, after)]
    else:
        with pytest.raises(IllegalTransitionError, match=f"{before.name} -> {after.name}"):
            check_transition(before, after)
        with pytest.raises(IllegalTransitionError, match="host 1 slot 0"):
            move(life, where, after, LifecycleOp.WAIT)
    assert int(life.stage[1, 0]) == before, "the arrays handed in are never changed"


def test_rows_can_be_copied_and_replaced() -> None:
    life = Lifecycle.dormant(4, 2)
    life.stage[2] = SeedStage.HOLDING
    life.interventions[2] = 7
    copied = life.rows(torch.tensor([2]))
    other = Lifecycle.dormant(4, 2).with_rows(torch.tensor([0]), copied)
    assert other.stage.tolist() == [[4, 4], [0, 0], [0, 0], [0, 0]]
    assert other.interventions.tolist() == [7, 0, 0, 0]
    copied.stage[0] = SeedStage.DORMANT
    assert int(life.stage[2, 0]) == SeedStage.HOLDING, "a copy is independent"


def test_a_lifecycle_survives_its_state_dict_and_refuses_a_foreign_one() -> None:
    life = Lifecycle.dormant(3, 2)
    life.alpha[1, 1] = 0.25
    again = Lifecycle.from_state_dict(life.state_dict())
    assert all(
        torch.equal(a, b)
        for a, b in zip(life.state_dict().values(), again.state_dict().values(), strict=True)
    )
    broken = life.state_dict()
    del broken["alpha"]
    with pytest.raises(Exception, match="missing \\['alpha'\\]"):
        Lifecycle.from_state_dict(broken)


def test_what_is_not_measured_is_absent_and_an_empty_slot_measures_nothing() -> None:
    life = Lifecycle.dormant(1, 3)
    life.stage[0, :2] = SeedStage.HOLDING
    values = torch.tensor([[0.5, torch.nan, 0.9]], dtype=torch.float64)
    life = life.measured(contribution=values, gradient=values, loss_rise=torch.tensor([torch.nan]))
    assert life.contribution.tolist() == [[0.5, 0.0, 0.0]]
    assert life.contribution_known.tolist() == [[True, False, False]]
    assert life.gradient_known.tolist() == [[True, False, False]]
    assert life.loss_rise_known.tolist() == [False]
