"""Agents side by side: like alone, taught by a teacher, saved and gone on with to the bit."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from esper.garden import Draw
from esper.leyline import HEAD_NAMES, AgreementError, LifecycleOp
from esper.simic.agent.ppo import PPOAgent
from esper.simic.agent.ppo_config import PPOConfig
from esper.simic.agent.rollout_buffer import NonFiniteError
from esper.tamiyo.controllers import Arm, Oracle, RandomLegal, SideBySide
from studies.cohort import Cohort, CohortSettings, MemberSettings
from studies.imitation import Lessons, LessonSettings, learn_lessons
from studies.teacher import Teacher
from tests.garden.plots import BATCHES, CONTEXTS, make_garden, walk

ARM = Arm(slot="early", blueprint="convpool", blend="immediate", epoch=4)
TABLE = {"plain": (ARM,), "noisy": (), "lesion": (ARM,), "drift": ()}
PPO = PPOConfig(minibatches=2, epochs=2, entropy_coef=0.01)


@pytest.fixture(autouse=True, scope="module")
def _short_epochs() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("esper.garden.episodes.GARDEN_BATCHES", BATCHES)
        yield


def cohort_of(*members: MemberSettings, rounds: int = 3, **settings: Any) -> Cohort:
    garden = make_garden(sum(m.rows for m in members), draw=Draw(contexts=CONTEXTS, seeds=2))
    chosen = CohortSettings(
        rounds=rounds, **({"lesson_rounds": 1, "led": (0.5,), "ppo": PPO, "lstm": 16} | settings)
    )
    return Cohort(garden, members, chosen, teacher=Teacher(TABLE))


def weights(cohort: Cohort) -> list[torch.Tensor]:
    return [
        value for member in cohort.members for value in member.agent.network.state_dict().values()
    ]


def test_a_teacher_plants_what_is_due_and_prunes_what_others_planted() -> None:
    garden = make_garden(8)
    garden.reset()
    names = [case.context.name for case in garden.cases]
    teacher = Teacher(TABLE)
    teacher.reset(names)
    for transition in walk(garden, controller=teacher):
        ops = transition.actions["op"]
        waits = torch.tensor([not TABLE[name] for name in names])
        assert not bool(ops[waits].any()), "where nothing pays it waits"
    kept = transition.after.lifecycle.blueprint[:, 0] >= 0
    assert torch.equal(kept, ~waits)
    # Whatever random decisions leave behind, it says to take out, unless it belongs to the plan.
    walk(garden, steps=6)
    teacher.reset([case.context.name for case in garden.cases])
    legal, life = garden.legal(), garden.signals().lifecycle
    said = teacher.act(garden.signals(), legal, torch.zeros(8, dtype=torch.bool))
    living = legal.masks["slot"][:, LifecycleOp.PRUNE].any(1)
    wrong = living & torch.tensor([not TABLE[case.context.name] for case in garden.cases])
    assert bool(wrong.any())
    assert bool((said["op"][wrong] == LifecycleOp.PRUNE).all())
    assert bool(legal.permits(said).all())
    assert life.shape[0] == 8


def test_controllers_side_by_side_decide_as_they_would_alone() -> None:
    garden = make_garden(8)
    garden.reset()
    walk(garden, steps=5)
    signals, legal, starts = garden.signals(), garden.legal(), torch.zeros(8, dtype=torch.bool)
    names = [case.context.name for case in garden.cases]
    together = SideBySide([(RandomLegal(), 3), (Oracle(TABLE), 4)])
    together.reset(names)
    alone = Oracle(TABLE)
    alone.reset(names)
    chosen = together.act(signals, legal, starts)
    assert torch.equal(chosen.values[:3], RandomLegal().act(signals, legal, starts).values[:3])
    assert torch.equal(chosen.values[3:7], alone.act(signals, legal, starts).values[3:7])
    assert int(chosen["op"][7]) == LifecycleOp.WAIT, "rows of nobody wait"


def test_resolved_masks_permit_exactly_what_was_chosen_and_its_alternatives() -> None:
    garden = make_garden(6)
    garden.reset()
    walk(garden, steps=4)
    legal = garden.legal()
    actions = RandomLegal().act(garden.signals(), legal, torch.zeros(6, dtype=torch.bool))
    masks = legal.resolved(actions.canonical().values)
    picked = masks.gather(2, actions.canonical().values[..., None])[..., 0]
    assert bool(picked.all())
    for head, size in enumerate(garden.action_space.sizes):
        assert not bool(masks[:, head, size:].any()), "padding is closed"


def test_an_apprentice_learns_what_its_teacher_does_from_what_it_sees() -> None:
    """Two kinds of states, told apart by one feature: wait in one, plant in the other."""
    garden = make_garden(4)
    space, width = garden.action_space, garden.state_dim
    agent = PPOAgent(
        space,
        state_dim=width,
        num_envs=64,
        max_steps_per_env=5,
        config=PPO,
        lstm_hidden_dim=16,
    )
    chance = torch.Generator().manual_seed(0)
    kind = torch.arange(64) % 2
    states = 0.1 * torch.randn(64, 5, width, generator=chance)
    states[:, :, 3] += kind[:, None]
    labels = torch.zeros(64, 5, len(space), dtype=torch.int64)
    labels[kind == 1, 2, 0] = LifecycleOp.GERMINATE
    labels[kind == 1, 2, 2] = 1
    masks = torch.zeros(64, 5, len(space), max(space.sizes), dtype=torch.bool)
    masks[..., 0] = True
    masks[:, :, 0, : space.sizes[0]] = True
    planting = labels[..., 0] == LifecycleOp.GERMINATE
    for head in (1, 2, 3):
        masks[:, :, head, : space.sizes[head]] |= planting[..., None]
    valid = torch.ones(64, 5, dtype=torch.bool)
    lessons = Lessons(states, labels, masks, kind[:, None].float().expand(64, 5), valid)
    settings = LessonSettings(learning_rate=1e-2, passes=40, sequences=32)
    before = learn_lessons(agent, lessons, replace(settings, passes=1))
    after = learn_lessons(agent, lessons, settings)
    assert after < 0.1 * before
    values = agent.network(states).values.detach()
    assert float((values - lessons.returns).abs().mean()) < 0.2, "the value head learns as well"
    with pytest.raises(AgreementError, match="differ in sequences or time"):
        replace(lessons, valid=valid[:5])
    with pytest.raises(NonFiniteError, match="loss of a lesson is NaN or infinite"):
        learn_lessons(agent, lessons, replace(settings, learning_rate=1e30))
    assert all(bool(value.isfinite().all()) for value in agent.network.state_dict().values())


def test_members_have_rows_of_their_own_and_blanked_ones_see_the_time_alone() -> None:
    seeing = MemberSettings(name="seeing", rows=4, seed=0)
    blanked = MemberSettings(name="blanked", rows=4, seed=0, blanked=True)
    untaught = MemberSettings(name="untaught", rows=4, seed=1, apprentice=False)
    cohort = cohort_of(seeing, blanked, untaught)
    first = cohort.one_round()
    assert [report.missed is None for report in first] == [False, False, True]
    assert [report.metrics is None for report in first] == [True, True, False]
    second = cohort.one_round()
    assert all(report.metrics is not None for report in second), "then all learn by themselves"
    assert [report.episodes for report in second] == [8, 8, 8]
    network = cohort.members[1].agent.network
    feature_mask = network.feature_mask
    assert float(feature_mask.sum()) == 2
    states = torch.randn(3, network.state_dim)
    other = torch.where(feature_mask.bool(), states, torch.randn_like(states))
    logits, other_logits = network(states).logits, network(other).logits
    assert all(torch.equal(logits[head], other_logits[head]) for head in HEAD_NAMES)
    seeing_network = cohort.members[0].agent.network
    logits, other_logits = seeing_network(states).logits, seeing_network(other).logits
    assert not any(torch.equal(logits[head], other_logits[head]) for head in HEAD_NAMES)


def test_what_the_teacher_played_is_not_told_as_its_pupils_score() -> None:
    taught = MemberSettings(name="taught", rows=4, seed=0)
    alone = MemberSettings(name="alone", rows=4, seed=1, apprentice=False)
    played = cohort_of(taught, alone).play()
    led = torch.tensor([True, True, False, False, False, False, False, False])
    assert torch.equal(played.scores.isnan(), led)
    assert torch.equal(played.acted.isnan(), led)


def test_a_cohort_goes_on_to_the_bit(tmp_path: Path) -> None:
    members = (
        MemberSettings(name="a", rows=4, seed=0),
        MemberSettings(name="b", rows=4, seed=1, apprentice=False),
    )
    whole = cohort_of(*members, lesson_rounds=2)
    assert not whole.load(tmp_path / "nothing")
    told = []
    for number in range(3):
        whole.save(tmp_path / f"after {number}")
        told.append(whole.one_round())
    assert whole.over
    for stop in (1, 2):
        again = cohort_of(*members, lesson_rounds=2)
        assert again.load(tmp_path / f"after {stop}")
        rest = [again.one_round() for _ in range(3 - stop)]
        assert rest == told[stop:]
        assert all(map(torch.equal, weights(again), weights(whole)))
    other = cohort_of(replace(members[0], prune_logit_bias=1.0), members[1], lesson_rounds=2)
    with pytest.raises(AgreementError, match="trainings with other members"):
        other.load(tmp_path / "after 2")


def test_rows_and_teachers_must_be_there() -> None:
    garden = make_garden(4)
    member = MemberSettings(name="a", rows=3, seed=0)
    with pytest.raises(AgreementError, match="rows are not those of the garden"):
        Cohort(garden, [member], CohortSettings(rounds=1), teacher=Teacher(TABLE))
    with pytest.raises(AgreementError, match="need a teacher"):
        Cohort(garden, [replace(member, rows=4)], CohortSettings(rounds=1))
