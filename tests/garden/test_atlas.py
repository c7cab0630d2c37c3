"""The atlas: known answers from made-up tensors, and a small one that was really measured."""

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from esper.garden import (
    SUITES,
    Atlas,
    Case,
    Controls,
    Plans,
    Playground,
    Suite,
    arms_of,
    find_suite,
    measure_atlas,
    search_plans,
)
from esper.garden.atlas import FIRST_ATLAS_SEED, shipped_atlas
from esper.garden.controller_choice import controller_of
from esper.garden.episodes import EPOCHS_ALONE
from esper.garden.evaluation import fingerprint_of
from esper.leyline import AgreementError, Blend, EsperError
from esper.tamiyo.controllers import Arm, FixedSchedule
from esper.tolaria.tasks import DEFAULT_BUDGET
from tests.garden.plots import CONTEXTS, DOUBLE, DRIFT, HORIZON, LESION, NOISY, PLAIN

SEEDS = 4
BATCHES = 5  # an epoch: enough for every seed to change something
ARMS = tuple(Arm(slot=slot, blueprint="mlp", epoch=0) for slot in ("early", "mid", "late"))


@pytest.fixture(autouse=True)
def _short_epochs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("esper.garden.episodes.GARDEN_BATCHES", BATCHES)


def made_up(gains: list[list[float]], exposure: float = 0.0) -> Atlas:
    """Each arm gains the same on all seeds."""
    gain = torch.tensor(gains, dtype=torch.float64)[:, :, None].expand(-1, -1, SEEDS).clone()
    return Atlas(
        contexts=CONTEXTS[: len(gains)],
        arms=ARMS,
        control=torch.full((len(gains), SEEDS), 50.0, dtype=torch.float64),
        validation_control=torch.full((len(gains), SEEDS), 40.0, dtype=torch.float64),
        gain=gain,
        validation=gain.clone(),
        exposure=torch.full_like(gain, exposure),
    )


def test_oracle_constant_random_and_waiting_are_the_known_ones() -> None:
    atlas = made_up([[10.0, 0.0, 5.0], [0.0, 20.0, 10.0], [-2.0, -1.0, -3.0], [0.3, -9.0, 0.0]])
    found = atlas.summary(rent=0.0)
    assert atlas.scales(0.0).tolist() == [10.0, 20.0, 3.0, 3.0]  # at least 3 points
    assert found["oracle"] == pytest.approx((1 + 1 + 0 + 0) / 4)  # 0.3 points are no reason
    # mid: (0 + 1 - 1/3 - 3) / 4; late: (0.5 + 0.5 - 1 + 0) / 4; early: (1 + 0 - 2/3 + 0.1) / 4
    assert atlas.best_constant(0.0) == ARMS[0]
    assert found["best_constant"] == pytest.approx((1 - 2 / 3 + 0.1) / 4)
    scores = [1.0, 0.0, 0.5, 0.0, 1.0, 0.5, -2 / 3, -1 / 3, -1.0, 0.1, -3.0, 0.0]
    assert found["random"] == pytest.approx(sum(scores) / 12)
    assert found["wait_optimal_share"] == 0.5, "0.3 points are no reason to grow"
    assert found["best_constant_share"] == pytest.approx(found["best_constant"] / found["oracle"])
    assert atlas.best(0.0) == [ARMS[0], ARMS[1], None, None]


def test_rent_is_taken_off_and_can_make_waiting_best() -> None:
    atlas = made_up([[10.0, 0.0, 5.0], [0.0, 20.0, 10.0]], exposure=2.0)
    assert torch.equal(atlas.net(5.0), atlas.gain - 10.0)
    assert atlas.best(5.0) == [None, ARMS[1]]
    assert atlas.summary(rent=5.0)["wait_optimal_share"] == 0.5


def test_arms_are_scored_on_seeds_that_did_not_choose_them() -> None:
    noise = torch.randn(3, 3, 40, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    atlas = replace(
        made_up([[0.0] * 3] * 3),
        gain=20 * noise,
        validation=20 * noise,
        exposure=torch.zeros_like(noise),
    )
    found = atlas.summary(rent=0.0, splits=400)
    in_sample = float((atlas.net(0.0).mean(2).amax(1) / atlas.scales(0.0)).mean())
    assert found["oracle"] < 0.6 * in_sample, "luck does not repeat on other seeds"


def test_an_atlas_is_read_as_it_was_written(tmp_path: Path) -> None:
    atlas = made_up([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]], exposure=0.5)
    atlas.save(tmp_path / "atlas")
    again = Atlas.load(tmp_path / "atlas")
    assert (again.contexts, again.arms) == (atlas.contexts, atlas.arms)
    for name in ("control", "validation_control", "gain", "validation", "exposure"):
        assert torch.equal(getattr(again, name), getattr(atlas, name))
    with pytest.raises(EsperError):
        Atlas.load(tmp_path)


def test_a_small_atlas_agrees_with_its_controls_and_with_itself() -> None:
    settings = {
        "epochs": (EPOCHS_ALONE,),
        "blends": (Blend.IMMEDIATE,),
        "seeds": 2,
    }
    contexts = (PLAIN, LESION)
    few = replace(DOUBLE, blueprints=("norm", "mlp", "wide"))
    seen: list[tuple[int, int]] = []
    atlas = measure_atlas(
        contexts,
        Playground(10, horizon=HORIZON, config=few),
        progress=lambda done, total: seen.append((done, total)),
        **settings,  # type: ignore[arg-type]
    )
    catalogue = PLAIN.catalogue(few.blueprints)
    budget = int(DEFAULT_BUDGET * catalogue.host_params)
    arms = arms_of(catalogue, epochs=(EPOCHS_ALONE,), blends=(Blend.IMMEDIATE,), budget=budget)
    assert Arm(slot="early", blueprint="wide", epoch=EPOCHS_ALONE) not in arms, "it costs too much"
    assert atlas.arms == tuple(arms)
    assert atlas.gain.shape == (2, len(arms), 2)
    assert seen[-1] == (2 * 2 * (len(arms) + 1),) * 2
    controls = Controls(horizon=HORIZON, config=DOUBLE)
    for row, context in enumerate(contexts):
        cases = [Case(context, FIRST_ATLAS_SEED + number) for number in range(2)]
        controls.require(cases)
        torch.testing.assert_close(atlas.control[row], controls.test(cases), rtol=0, atol=1e-9)
    assert bool((atlas.gain != 0).any(2).all()), "every seed changes something"
    places = [arm.place(catalogue) for arm in arms]
    costs = torch.tensor([catalogue.costs[slot][kind] for slot, kind in places]).double()
    expected = costs / catalogue.host_params * (1 - EPOCHS_ALONE / HORIZON)
    torch.testing.assert_close(atlas.exposure, expected[None, :, None].expand(2, -1, 2))
    other = measure_atlas(contexts, Playground(horizon=HORIZON, config=few), **settings)  # type: ignore[arg-type]
    torch.testing.assert_close(atlas.gain, other.gain, rtol=0, atol=1e-9)
    torch.testing.assert_close(atlas.validation, other.validation, rtol=0, atol=1e-9)
    assert not torch.equal(atlas.validation, atlas.gain)


def test_arms_are_chosen_by_validation_data_and_told_by_test_data() -> None:
    atlas = made_up([[10.0, 0.0, 5.0], [0.0, 20.0, 10.0]])
    flattered = replace(atlas, gain=-atlas.gain)
    assert flattered.best(0.0) == atlas.best(0.0)
    assert flattered.summary(rent=0.0)["oracle"] == -atlas.summary(rent=0.0)["oracle"]


def test_schedules_are_widened_as_long_as_another_seed_pays() -> None:
    few = replace(DOUBLE, blueprints=("norm", "mlp"))
    ground = Playground(32, horizon=HORIZON, config=few)
    single: dict[str, Any] = {"epochs": (EPOCHS_ALONE,), "blends": (Blend.IMMEDIATE,)}
    atlas = measure_atlas((PLAIN, NOISY), ground, seeds=2, **single)
    searched = search_plans(atlas, ground, seeds=2, **single)
    plans = searched.plans
    assert plans is not None
    assert plans.episodes > 0
    for schedule, arm in zip(plans.oracle, atlas.best(), strict=True):
        assert schedule[:1] == (() if arm is None else (arm,)), "the best single arm comes first"
        assert len({each.slot for each in schedule}) == len(schedule)
    assert plans.constant[0] == atlas.best_constant()
    assert searched.schedules() == plans.oracle
    assert searched.constant() == plans.constant
    assert Plans.from_dict(asdict(plans)) == plans
    again = search_plans(atlas, Playground(7, horizon=HORIZON, config=few), seeds=2, **single)
    assert again.plans == plans, "rows are only a batching knob"


def test_impossible_atlases_are_refused_at_once() -> None:
    with pytest.raises(EsperError, match="cannot become permanent"):
        measure_atlas([PLAIN], epochs=(40,))
    with pytest.raises(EsperError, match="given: epoch 0; valid: from epoch 3"):
        measure_atlas([PLAIN], epochs=(0, 9))
    with pytest.raises(AgreementError, match="at least 2 seeds"):
        measure_atlas([PLAIN], seeds=1)


def test_controllers_are_made_from_an_atlas() -> None:
    atlas = made_up([[10.0, 0.0, 5.0], [0.0, 20.0, 10.0], [-2.0, -1.0, -3.0]])
    suite = Suite(name="own", training=CONTEXTS[:3], heldout={"task": (DRIFT,)})
    constant = controller_of("best_constant", suite, atlas)
    assert constant.name == "best_constant"
    assert fingerprint_of(constant) == FixedSchedule(atlas.best_constant()).name
    assert controller_of("oracle", suite, atlas).name == "oracle"
    with pytest.raises(EsperError, match="needs an atlas of suite 'own'"):
        controller_of("oracle", suite)


@pytest.mark.parametrize("name", SUITES)
def test_the_scales_of_a_suite_are_what_its_shipped_atlas_says(name: str) -> None:
    suite = find_suite(name)
    atlas = shipped_atlas(suite)
    assert atlas is not None
    families: dict[str, list[float]] = {}
    for context, scale in zip(atlas.contexts, atlas.scales().tolist(), strict=True):
        families.setdefault(context.family, []).append(scale)
    known = {context.family: context.scale for context in suite}
    assert set(known) == set(families)
    for family, scales in families.items():
        assert known[family] == pytest.approx(sum(scales) / len(scales), abs=0.7), family


def test_the_default_suite_has_something_to_learn() -> None:
    atlas = shipped_atlas(find_suite("garden"))
    assert atlas is not None
    found = atlas.summary()
    assert found["best_constant_share"] <= 0.65
    assert found["random_share"] <= 0.35
    assert 0.20 <= found["wait_optimal_share"] <= 0.35
