"""The teacher: what it says in states that somebody else brought about."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from esper.leyline import Actions, AgreementError, Blend, LifecycleOp, UnknownNameError
from esper.leyline.constants import DEFAULT_EMBARGO, DEFAULT_PRUNE_TEMPO, SCORED_EPOCHS
from esper.leyline.stages import SeedStage
from esper.tamiyo import Privileged, make_controller
from esper.tamiyo.controllers import Arm
from esper.tamiyo.controllers.proposals import epochs_to_permanence
from esper.tamiyo.controllers.schedules import Planned
from studies.teacher import Teacher
from tests.tamiyo.gardens import HORIZON, Tape, TapeGarden, catalogue_of, decisions, ops_of

CATALOGUE = catalogue_of()
CONV = Arm(slot="early", blueprint="conv", epoch=3)
NORM = Arm(slot="mid", blueprint="norm", epoch=6)
BLENDS = [blend.name.lower() for blend in Blend]


def started(
    plan: Planned, rows: int = 1, before: Planned = None, change: int | None = None
) -> tuple[Teacher, TapeGarden]:
    """A teacher of one context, and a garden of it; with a change, `before` is right until then."""
    teacher = Teacher({"here": plan}, None if change is None else {"here": before})
    teacher.reset(["here"] * rows)
    if change is not None:
        teacher.expect_changes(torch.full((rows,), change))
    return teacher, TapeGarden(Tape.steady(rows=rows))


def said(teacher: Teacher, garden: TapeGarden) -> Actions:
    """What it would do now, which must be legal."""
    legal = garden.legal()
    starts = torch.full((len(garden.index),), garden.epoch == 0)
    actions = teacher.act(garden.signals(), legal, starts)
    assert bool(legal.permits(actions).all())
    assert torch.equal(actions.values, actions.canonical().values)
    return actions


def word(teacher: Teacher, garden: TapeGarden) -> tuple[str, ...]:
    """What it would do in the first row: the op, and where and what it is about."""
    op, slot, blueprint, blend = said(teacher, garden).values[0].tolist()
    place = CATALOGUE.slots.names[slot]
    if op == LifecycleOp.GERMINATE:
        return "GERMINATE", place, CATALOGUE.names[blueprint], BLENDS[blend]
    return ("WAIT",) if op == LifecycleOp.WAIT else (LifecycleOp(op).name, place)


def wait(garden: TapeGarden, epochs: int = 1) -> None:
    for _ in range(epochs):
        garden.step(Actions.of(garden.space, len(garden.index), op=LifecycleOp.WAIT))


def plant(garden: TapeGarden, slot: str, blueprint: str, blend: Blend = Blend.IMMEDIATE) -> None:
    """Somebody else's decision, in every row."""
    garden.step(
        Actions.of(
            garden.space,
            len(garden.index),
            op=LifecycleOp.GERMINATE,
            slot=CATALOGUE.slots.index(slot),
            blueprint=CATALOGUE.index(blueprint),
            blend=int(blend),
        )
    )


def act_in(garden: TapeGarden, op: LifecycleOp, slot: str) -> None:
    place = CATALOGUE.slots.index(slot)
    garden.step(Actions.of(garden.space, len(garden.index), op=int(op), slot=place))


@pytest.mark.parametrize("blend", BLENDS)
def test_it_plants_what_is_due_and_makes_it_permanent(blend: str) -> None:
    arm = Arm(slot="mid", blueprint="conv", blend=blend, epoch=3)
    teacher, garden = started(arm)
    wait(garden, arm.epoch - 1)
    assert word(teacher, garden) == ("WAIT",), "not yet"
    wait(garden)
    assert word(teacher, garden) == ("GERMINATE", "mid", "conv", blend)
    wait(garden, 4)
    assert word(teacher, garden) == ("GERMINATE", "mid", "conv", blend), "late is not too late"

    table = {f"context{number}": arm for number in range(3)}
    (ops,) = ops_of(TapeGarden(Tape.steady()), Teacher(table))
    started_blending = [] if blend == "immediate" else [(4, "ADVANCE", "mid")]
    done = 3 + epochs_to_permanence(Blend.named(blend))
    assert ops == [(3, "GERMINATE", "mid"), *started_blending, (done, "FOSSILIZE", "mid")]


def test_all_arms_of_a_plan_are_planted_the_earlier_first() -> None:
    both = (NORM, Arm(slot="late", blueprint="token_mix", epoch=6), CONV)
    (ops,) = ops_of(TapeGarden(Tape.steady()), Teacher({"context0": both}))
    planted = [(epoch, slot) for epoch, op, slot in ops if op == "GERMINATE"]
    assert [slot for _, slot in planted] == ["early", "mid", "late"]
    assert planted[0][0] == CONV.epoch
    assert {slot for _, op, slot in ops if op == "FOSSILIZE"} == {"early", "mid", "late"}
    assert not any(op == "PRUNE" for _, op, _ in ops)


def test_what_belongs_to_the_plan_is_brought_on_whoever_planted_it() -> None:
    late = Arm(slot="early", blueprint="conv", epoch=15, train=3)
    teacher, garden = started(late)
    plant(garden, "early", "conv", Blend.RAMP)  # long before the plan would, and blended otherwise
    heard = []
    for _ in range(8):
        heard.append(word(teacher, garden))
        garden.step(said(teacher, garden))
    others = [("WAIT",)] * 2
    assert heard[:3] == [*others, ("ADVANCE", "early")], "after the plan's epochs of training"
    assert heard[3:6] == [*others, ("FOSSILIZE", "early")]
    assert heard[6:] == others, "it is there: nothing is left to do"


def test_a_seed_that_is_ready_is_made_permanent_before_anything_else() -> None:
    teacher, garden = started((CONV, NORM))
    plant(garden, "late", "attention")
    plant(garden, "early", "conv")
    assert garden.epoch == 2
    assert word(teacher, garden) == ("FOSSILIZE", "early")
    garden.step(said(teacher, garden))
    assert word(teacher, garden) == ("PRUNE", "late")


@pytest.mark.parametrize(
    ("slot", "blueprint"),
    [("early", "norm"), ("late", "conv"), ("mid", "token_mix")],
    ids=["another blueprint", "another slot", "neither"],
)
def test_what_does_not_belong_to_the_plan_is_pruned(slot: str, blueprint: str) -> None:
    teacher, garden = started(CONV)
    plant(garden, slot, blueprint)
    assert word(teacher, garden) == ("PRUNE", slot)
    for _ in range(CONV.epoch + DEFAULT_PRUNE_TEMPO + DEFAULT_EMBARGO + 3):
        garden.step(said(teacher, garden))
    expected = torch.full((1, 3), -1)
    expected[0, CATALOGUE.slots.index("early")] = CATALOGUE.index("conv")
    assert torch.equal(garden.life.blueprint, expected), "and what is right takes its place"
    assert int(garden.life.stage[0, 0]) == SeedStage.FOSSILIZED


def test_what_is_permanent_is_left_alone_even_where_it_does_not_belong() -> None:
    teacher, garden = started(CONV)
    plant(garden, "early", "norm")
    act_in(garden, LifecycleOp.FOSSILIZE, "early")
    assert int(garden.life.stage[0, 0]) == SeedStage.FOSSILIZED
    while garden.epoch < HORIZON:
        assert word(teacher, garden) == ("WAIT",)
        wait(garden)


def test_a_wrong_seed_of_several_goes_while_the_right_one_stays() -> None:
    teacher, garden = started((CONV, NORM))
    plant(garden, "mid", "norm", Blend.RAMP)
    plant(garden, "late", "norm", Blend.RAMP)
    heard = set()
    while garden.epoch < HORIZON:
        heard.add(word(teacher, garden))
        garden.step(said(teacher, garden))
    assert ("PRUNE", "late") in heard
    assert not heard & {("PRUNE", "mid"), ("PRUNE", "early")}
    assert ("GERMINATE", "mid", "norm", "immediate") not in heard
    stages = garden.life.stage[0].tolist()
    assert stages[:2] == [SeedStage.FOSSILIZED] * 2
    assert stages[2] == SeedStage.DORMANT


@pytest.mark.parametrize("train", [1, 4])
@pytest.mark.parametrize("blend", BLENDS)
def test_what_could_not_become_permanent_any_more_is_not_planted(blend: str, train: int) -> None:
    arm = Arm(slot="early", blueprint="conv", blend=blend, epoch=3, train=train)
    teacher, garden = started(arm)
    planting = []
    while garden.epoch < HORIZON:
        if word(teacher, garden)[0] == "GERMINATE":
            planting.append(garden.epoch)
        wait(garden)
    last = HORIZON - SCORED_EPOCHS - epochs_to_permanence(Blend.named(blend), train)
    assert planting == list(range(arm.epoch, last + 1))

    garden.begin()
    wait(garden, last)  # the last moment is early enough
    while garden.epoch <= HORIZON - SCORED_EPOCHS:
        garden.step(said(teacher, garden))
    assert int(garden.life.stage[0, 0]) == SeedStage.FOSSILIZED


@pytest.mark.parametrize("nothing", [None, ()])
def test_where_the_plan_is_empty_it_waits_and_takes_out_what_others_planted(
    nothing: Planned,
) -> None:
    teacher, garden = started(nothing)
    while garden.epoch < HORIZON:
        assert word(teacher, garden) == ("WAIT",)
        wait(garden)
    garden.begin()
    plant(garden, "late", "norm", Blend.RAMP)
    assert word(teacher, garden) == ("PRUNE", "late")


def test_every_row_is_taught_by_its_own_context() -> None:
    table = {"context0": CONV, "context1": None, "context2": (CONV, NORM)}
    rows = ops_of(TapeGarden(Tape.steady(rows=6)), Teacher(table))
    planted = [[slot for _, op, slot in row if op == "GERMINATE"] for row in rows]
    assert planted == [["early"], [], ["early", "mid"]] * 2
    assert isinstance(Teacher(table), Privileged)


# --- tasks that change ---------------------------------------------------------------------


def test_before_a_change_it_does_what_is_right_for_the_task_as_it_is() -> None:
    change = 8
    teacher, garden = started(NORM, before=CONV, change=change)
    heard = []
    while garden.epoch < HORIZON:
        heard.append(word(teacher, garden))
        wait(garden)
    conv, norm = ("GERMINATE", "early", "conv"), ("GERMINATE", "mid", "norm")
    assert [each[:3] for each in heard[: change + 1]] == [("WAIT",)] * 3 + [conv] * 6
    assert heard[change + 1][:3] == norm, "the first decision after the epoch that was different"
    assert not any(each[:3] == conv for each in heard[change + 1 :])


def test_what_was_right_before_the_change_is_taken_out_after_it() -> None:
    ramp = Arm(slot="early", blueprint="conv", blend="ramp", epoch=3, train=4)
    for change, out in ((5, True), (-1, False)):
        teacher, garden = started(None, before=ramp, change=change)
        heard = set()
        while garden.epoch < HORIZON:
            heard.add(word(teacher, garden))
            garden.step(said(teacher, garden))
        assert (("PRUNE", "early") in heard) == out
        assert (("FOSSILIZE", "early") in heard) == (not out)


def test_each_row_follows_its_own_change_in_every_state() -> None:
    rows, changes = 12, torch.tensor([5, -1, 0, HORIZON, 9, -1] * 2)
    names = ["turning"] * 6 + ["calm"] * 6
    after, before, calm = (CONV, NORM), Arm(slot="late", blueprint="norm", epoch=0), NORM
    teacher = Teacher({"turning": after, "calm": calm}, {"turning": before})
    sure = Teacher({"after": after, "before": before, "calm": calm})
    walker = make_controller("random:rate=0.5")
    garden = TapeGarden(Tape.random(rows, seed=2))
    teacher.reset(names)
    teacher.expect_changes(changes)
    different = 0
    while garden.epoch < HORIZON:
        changed = (changes >= 0) & (garden.epoch > changes)
        sure.reset(
            [
                "calm" if name == "calm" else "after" if now else "before"
                for name, now in zip(names, changed.tolist(), strict=True)
            ]
        )
        ours, theirs = said(teacher, garden), said(sure, garden)
        assert torch.equal(ours.values, theirs.values)
        sure.reset(["after"] * rows)
        different += int((said(sure, garden).values != ours.values).any(1).sum())
        starts = torch.full((rows,), garden.epoch == 0)
        garden.step(walker.act(garden.signals(), garden.legal(), starts))
    assert different > rows, "the two plans do not say the same"


def test_changes_are_those_of_one_episode() -> None:
    teacher, garden = started(NORM, before=CONV, change=0)
    wait(garden, NORM.epoch)
    assert word(teacher, garden)[1] == "mid"
    teacher.reset(["here"])
    assert word(teacher, garden)[1] == "early", "nobody has said that this one will change"
    told = torch.tensor([0])
    teacher.expect_changes(told)
    told.fill_(-1)
    assert word(teacher, garden)[1] == "mid"


def test_unknown_contexts_are_refused() -> None:
    with pytest.raises(UnknownNameError, match=r"teacher's table.*'ther'.*'there'"):
        Teacher({"here": CONV, "there": NORM}, before={"ther": CONV})
    with pytest.raises(UnknownNameError, match="'elsewhere'"):
        Teacher({"here": CONV}).reset(["here", "elsewhere"])


def test_rows_whose_context_nobody_told_are_refused() -> None:
    teacher, garden = Teacher({"here": CONV}), TapeGarden(Tape.steady(rows=3))
    for told in (0, 2):
        if told:
            teacher.reset(["here"] * told)
        with pytest.raises(AgreementError, match=f"{told} contexts for 3 environments"):
            said(teacher, garden)


def test_another_plan_before_the_change_is_another_teacher() -> None:
    table = {"here": CONV}
    assert Teacher(table).fingerprint == Teacher(dict(table)).fingerprint
    prints = {Teacher(table, before).fingerprint for before in (None, {"here": NORM}, {"here": ()})}
    assert len(prints) == 3


# --- any state -----------------------------------------------------------------------------

arms = st.builds(
    Arm,
    slot=st.sampled_from(CATALOGUE.slots.names),
    blueprint=st.sampled_from(CATALOGUE.names),
    blend=st.sampled_from(BLENDS),
    epoch=st.integers(0, HORIZON),
    train=st.integers(1, 6),
)
plans = st.lists(arms, max_size=3, unique_by=lambda arm: arm.slot)
ROWS = 6


@pytest.mark.slow
@settings(max_examples=12, deadline=None)
@given(
    seed=st.integers(0, 2**16),
    table=st.lists(plans, min_size=3, max_size=3),
    before=plans,
    changes=st.lists(st.integers(-1, HORIZON), min_size=ROWS, max_size=ROWS),
    rate=st.sampled_from([0.2, 1.0]),
)
def test_whatever_state_others_bring_about_its_decision_is_legal(
    seed: int, table: list[list[Arm]], before: list[Arm], changes: list[int], rate: float
) -> None:
    names = [f"context{number}" for number in range(3)]
    teacher = Teacher(dict(zip(names, table, strict=True)), {"context0": before})
    teacher.reset(names * 2)
    teacher.expect_changes(torch.tensor(changes))
    walker = make_controller(f"random:rate={rate}")
    garden = TapeGarden(Tape.random(ROWS, seed))
    for epoch in range(HORIZON):
        said(teacher, garden)  # looks whether it is legal
        starts = torch.full((ROWS,), epoch == 0)
        garden.step(walker.act(garden.signals(), garden.legal(), starts))


@settings(max_examples=6, deadline=None)
@given(seed=st.integers(0, 2**16), plan=plans)
def test_left_to_itself_it_keeps_nothing_that_is_not_in_the_plan(
    seed: int, plan: list[Arm]
) -> None:
    garden = TapeGarden(Tape.random(ROWS, seed))
    decisions(garden, Teacher({f"context{number}": plan for number in range(3)}))
    wanted = torch.full((3,), -1)
    for arm in plan:
        slot, blueprint = arm.place(CATALOGUE)
        wanted[slot] = blueprint
    there = garden.life.occupied
    assert bool((garden.life.blueprint == wanted)[there].all())
