"""What the study of learning chooses: whom to learn from, which training to keep, what to tell."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from esper.garden import Atlas, Case, Episodes, Source, find_suite
from esper.garden.atlas import Plans, shipped_atlas
from esper.leyline.constants import DEFAULT_EPISODE_LENGTH
from esper.tamiyo.controllers import Arm
from esper.tamiyo.controllers.schedules import Schedule
from studies.learning_pays import LAST, SIZES, best_training, card_of, teacher_of
from studies.teacher import Teacher
from tests.garden.plots import DOUBLE, DRIFT, HORIZON, LESION, NOISY, PLAIN
from tests.studies.test_teacher import wait, word
from tests.tamiyo.gardens import HORIZON as WHOLE
from tests.tamiyo.gardens import Tape, TapeGarden

PLANS: dict[str, Schedule] = {
    "plain": (Arm(slot="early", blueprint="conv", epoch=2),),
    "noisy": (),
    "lesion": (Arm(slot="mid", blueprint="norm", epoch=2),),
    "drift": (Arm(slot="late", blueprint="token_mix", epoch=2),),
    "harmed-drift": (Arm(slot="late", blueprint="norm", epoch=2),),
    "noisy-drift": (Arm(slot="late", blueprint="squeeze", epoch=2),),
    "lonely-drift": (Arm(slot="late", blueprint="attention", epoch=2),),
}
CONTEXTS = (
    DRIFT,  # of the same task as PLAIN
    PLAIN,
    NOISY,
    LESION,
    replace(DRIFT, name="harmed-drift", lesion=LESION.lesion),
    replace(DRIFT, name="noisy-drift", source=NOISY.source),
    replace(DRIFT, name="lonely-drift", source=Source(family="gain", samples=300)),
)
FIRST, CHANGE = 2, 6


def made_up_atlas() -> Atlas:
    """Nothing was measured for it: its schedules are all that counts here."""
    nothing = torch.zeros(len(CONTEXTS), 1, 2, dtype=torch.float64)
    return Atlas(
        contexts=CONTEXTS,
        arms=PLANS["plain"],
        control=nothing[:, 0],
        validation_control=nothing[:, 0],
        gain=nothing,
        validation=nothing,
        exposure=nothing,
        plans=Plans(tuple(PLANS[each.name] for each in CONTEXTS), PLANS["plain"], 0),
    )


def heard(teacher: Teacher, context: str, change: int) -> list[str]:
    """What it would plant at each epoch of an episode in which nobody ever does."""
    garden = TapeGarden(Tape.steady())
    teacher.reset([context])
    teacher.expect_changes(torch.tensor([change]))
    words = []
    for _ in range(WHOLE - 5):  # until it is too late to plant
        words.append("/".join(word(teacher, garden)[1:3]))
        wait(garden)
    return words


def planted(context: str) -> str:
    return "/".join(f"{arm.slot}/{arm.blueprint}" for arm in PLANS[context])


@pytest.mark.parametrize("context", ["plain", "noisy", "lesion"])
def test_contexts_that_do_not_change_are_taught_their_own_plan(context: str) -> None:
    words = heard(teacher_of(made_up_atlas()), context, -1)
    assert set(words[:FIRST]) == {""}
    assert set(words[FIRST:]) == {planted(context)}


@pytest.mark.parametrize(
    ("context", "same_task"),
    [("drift", "plain"), ("harmed-drift", "lesion"), ("noisy-drift", "noisy")],
)
def test_contexts_that_change_are_taught_the_same_task_that_does_not_until_they_do(
    context: str, same_task: str
) -> None:
    teacher = teacher_of(made_up_atlas())
    words = heard(teacher, context, CHANGE)
    assert set(words[FIRST : CHANGE + 1]) == {planted(same_task)}
    assert set(words[CHANGE + 1 :]) == {planted(context)}
    assert heard(teacher, context, -1) == heard(teacher, same_task, -1), "it never came"


def test_where_no_such_task_is_known_the_teacher_waits_for_the_change() -> None:
    words = heard(teacher_of(made_up_atlas()), "lonely-drift", CHANGE)
    assert set(words[: CHANGE + 1]) == {""}
    assert set(words[CHANGE + 1 :]) == {planted("lonely-drift")}


@pytest.mark.parametrize("suite", ["garden", "garden_mlp"])
def test_the_shipped_atlases_have_a_teacher_of_all_their_contexts(suite: str) -> None:
    atlas = shipped_atlas(find_suite(suite))
    assert atlas is not None
    teacher = teacher_of(atlas)
    teacher.reset([context.name for context in atlas.contexts])
    teacher.require_possible(Tape.steady().catalogue, DEFAULT_EPISODE_LENGTH)


def curve(*scores: float) -> list[dict[str, Any]]:
    return [{"round": n, "episodes": 10 * n, "score": each} for n, each in enumerate(scores, 1)]


def test_the_training_that_ended_best_is_kept_whatever_came_before_or_beside_it() -> None:
    curves = {
        "tamiyo-0": curve(9.0, 9.0, 0.1, 0.2, 0.1),
        "tamiyo-1": curve(0.0, 0.0, 0.0, 0.3, 0.4),
        "tamiyo-2": curve(0.0, 0.0, 0.0, 0.0, 0.6),
        "blanked-0": curve(9.0, 9.0, 9.0, 9.0, 9.0),
        "untaught-0": curve(9.0, 9.0, 9.0, 9.0, 9.0),
    }
    assert LAST == 3
    assert best_training(curves) == "tamiyo-1"
    backwards = dict(reversed(curves.items()))
    assert best_training(backwards) == "tamiyo-1"


def test_a_card_says_what_it_was_trained_on_and_what_that_cost() -> None:
    study = {
        "suite": "garden",
        "groups": {"training": ["a", "b"], "heldout": ["c"]},
        "episodes": {"tamiyo-0": 111 + 333, "tamiyo-1": 222 + 333},  # with the teacher's
        "atlas_episodes": 333,
        "curves": {
            "tamiyo-0": [[10, 9.0]] * 4,
            "tamiyo-1": [[10, 9.0], [20, 0.25], [30, 0.5], [40, 0.75]],
        },
    }
    card = card_of(study, "tamiyo-1")
    assert card["training"] == "tamiyo-1"
    assert card["suite"] == "garden"
    assert card["contexts"] == ["a", "b"]
    assert (card["episodes"], card["atlas_episodes"]) == (222, 333)
    assert card["training_score"] == pytest.approx(0.5), "of its last rounds"
    assert f"{DEFAULT_EPISODE_LENGTH} epochs" in card["limits"]
    assert all(size.cohort.rounds >= LAST for size in SIZES.values())


# --- with which epoch tasks change ----------------------------------------------------------


def test_a_bed_knows_with_which_epoch_each_rows_task_changes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("esper.garden.episodes.GARDEN_BATCHES", 1)
    episodes = Episodes((PLAIN, DRIFT), 5, horizon=HORIZON, config=DOUBLE)
    assert episodes.drift_epoch.tolist() == [-1] * 5, "nothing has begun"
    cases = [Case(PLAIN, 0), *(Case(DRIFT, seed) for seed in range(4))]
    episodes.begin(torch.arange(5), cases)
    told = episodes.drift_epoch.clone()
    expected = [case.context.drift_epoch(case.seed) for case in cases]
    assert told.tolist() == [-1 if epoch is None else epoch for epoch in expected]
    assert sorted((told >= 0).tolist()) == [False] * 3 + [True] * 2

    first = episodes.population.feed.assignment.clone()
    for _ in range(HORIZON):
        epoch = episodes.population.lifecycle.epoch
        changed = (told >= 0) & (epoch > told)  # what the teacher goes by
        assert torch.equal(episodes.population.feed.assignment != first, changed)
        episodes.train_epoch()
        episodes.population.pass_time()
    assert torch.equal(episodes.drift_epoch, told), "it is still known when it is over"
    episodes.begin(torch.tensor([1, 2, 3, 4]), [Case(PLAIN, 1)] * 4)
    assert episodes.drift_epoch.tolist() == [-1] * 5
