"""Beds: rows that are started on cases, with the lesion and the change of task of each."""

from dataclasses import replace

import pytest
import torch

from esper.garden import Bed, Case, by_shape
from esper.garden.bed import EPOCHS_ALONE, catalogue_of
from esper.garden.contexts import Context
from esper.leyline import AgreementError, GateRefusedError, UnknownNameError
from esper.leyline.legality import Actions
from esper.leyline.ops import LifecycleOp
from esper.tolaria.plan import HOST
from tests.garden.plots import CONTEXTS, DOUBLE, DRIFT, HORIZON, LESION, PLAIN

EVERYONE = torch.arange(4)


@pytest.fixture(autouse=True)
def _short_epochs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("esper.garden.bed.GARDEN_BATCHES", 2)


def make_bed(rows: int = 4) -> Bed:
    return Bed(CONTEXTS, rows, horizon=HORIZON, config=DOUBLE)


def drifting_seed(context: Context, *, changes: bool) -> int:
    return next(s for s in range(99) if (context.drift_epoch(s) is not None) == changes)


def live_on(bed: Bed, epochs: int) -> None:
    for _ in range(epochs):
        bed.train_epoch()
        bed.population.pass_time()


def test_a_row_changes_its_task_at_its_own_epoch_and_only_where_chance_says_so() -> None:
    bed = make_bed()
    seed, calm = (drifting_seed(DRIFT, changes=changes) for changes in (True, False))
    bed.start(EVERYONE, [Case(DRIFT, seed), Case(DRIFT, calm), Case(PLAIN, 0), Case(LESION, 0)])
    first = bed.population.feed.assignment.tolist()
    when = DRIFT.drift_epoch(seed)
    assert when is not None
    for epoch in range(HORIZON):
        assert bed.drifting().tolist() == ([0] if epoch == when else [])
        live_on(bed, 1)
        now = bed.population.feed.assignment.tolist()
        assert (now[0] != first[0]) == (epoch >= when), "from that epoch on"
        assert now[1:] == first[1:]
    xor = DRIFT.drift
    assert xor is not None
    ((inputs, labels),) = bed.population.feed.held_out("test", torch.tensor([0]))
    assert torch.equal(labels[0], xor.load().test.labels)
    assert torch.equal(inputs[0], xor.load().test.inputs.double())
    bed.start(torch.tensor([0]), [Case(DRIFT, seed)])
    assert bed.population.feed.assignment.tolist() == first, (
        "a new episode begins with the old task"
    )


def test_a_case_is_the_same_in_any_row_and_after_any_other() -> None:
    one, many = make_bed(1), make_bed()
    case = Case(LESION, 7)
    one.start(torch.tensor([0]), [case])
    many.start(EVERYONE, [Case(DRIFT, 1), Case(PLAIN, 2), Case(LESION, 3), Case(PLAIN, 7)])
    live_on(many, 2)
    many.start(torch.tensor([2]), [case])
    for _ in range(3):
        ours, theirs = one.train_epoch(), many.train_epoch()
        torch.testing.assert_close(ours.loss[0], theirs.loss[2], rtol=1e-9, atol=0)
        for bed in (one, many):
            bed.population.pass_time()
    weights = [bed.population.pools[HOST].state.theta for bed in (one, many)]
    torch.testing.assert_close(weights[0][0], weights[1][2], rtol=1e-9, atol=1e-11)
    assert int((weights[1][2] == 0).sum()) > 0
    assert int((weights[1][3] == 0).sum()) == 0


def test_a_lesioned_row_becomes_whole_with_its_next_case() -> None:
    bed = make_bed(2)
    bed.start(torch.arange(2), [Case(LESION, 0), Case(PLAIN, 0)])
    live_on(bed, 1)
    bed.start(torch.arange(2), [Case(PLAIN, 0), Case(LESION, 0)])
    theta = bed.population.pools[HOST].state.theta
    assert [int((theta[row] == 0).sum()) > 0 for row in range(2)] == [False, True]
    assert bed.cases == [Case(PLAIN, 0), Case(LESION, 0)]


def test_nothing_is_planted_while_a_host_is_alone() -> None:
    bed = make_bed(1)
    bed.start(torch.tensor([0]), [Case(PLAIN, 0)])
    plant = Actions.of(bed.population.space, 1, op=int(LifecycleOp.GERMINATE))
    for _ in range(EPOCHS_ALONE):
        assert bed.population.legal().masks["op"][0].tolist() == [True] + [False] * 4
        with pytest.raises(GateRefusedError, match=f"at least {EPOCHS_ALONE} needed"):
            bed.population.apply(plant)
        live_on(bed, 1)
    assert len(bed.population.apply(plant)) > 0


def test_what_does_not_belong_to_a_bed_is_refused() -> None:
    bed = make_bed(1)
    other = replace(PLAIN, name="other", source=replace(PLAIN.source, seed=9))
    with pytest.raises(UnknownNameError, match="context of this bed; given: 'other'"):
        bed.start(torch.tensor([0]), [Case(other, 0)])
    wide = replace(PLAIN, name="wide", host_sizes=(("width", 24),))
    with pytest.raises(AgreementError, match="hosts of one shape"):
        Bed([PLAIN, wide], 1)
    with pytest.raises(AgreementError, match="needs contexts"):
        Bed([], 1)
    assert by_shape([PLAIN, wide, LESION]) == [[PLAIN, LESION], [wide]]


def test_the_catalogue_of_a_context_is_that_of_its_bed() -> None:
    assert catalogue_of(PLAIN) == make_bed(1).population.catalogue
