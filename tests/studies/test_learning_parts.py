"""The parts of the study of learning: tuned rules and the bandit."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from esper.garden import Atlas, Case, Controls, Playground, Suite, find_suite, measure_atlas
from esper.garden.atlas import FIRST_ATLAS_SEED, shipped_atlas
from esper.garden.episodes import EPOCHS_ALONE, Episodes
from esper.leyline import Blend
from esper.tamiyo.controllers import Arm, NeverGrow, make_controller
from studies.bandit import RULES, Bandit, fit_bandit
from studies.tuning import (
    KINDS,
    TuningSize,
    best_places,
    candidates_of,
    judged,
    tune,
)
from tests.garden.plots import DOUBLE, HORIZON, NOISY, PLAIN

SUITE = Suite(name="own", training=(PLAIN, NOISY))


@pytest.fixture(autouse=True, scope="module")
def _short_epochs() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("esper.garden.episodes.GARDEN_BATCHES", 5)
        yield


@pytest.fixture(scope="module")
def atlas() -> Atlas:
    few = replace(DOUBLE, blueprints=("norm", "convpool"))
    settings: dict[str, Any] = {"epochs": (EPOCHS_ALONE,), "blends": (Blend.IMMEDIATE,)}
    return measure_atlas(
        (PLAIN, NOISY), Playground(horizon=HORIZON, config=few), seeds=2, **settings
    )


@pytest.mark.parametrize("kind", KINDS)
def test_candidates_are_different_rules_of_one_kind_that_the_host_can_follow(kind: str) -> None:
    suite = find_suite("garden")
    shipped = shipped_atlas(suite)
    assert shipped is not None
    specs = candidates_of(kind, shipped, suite, 12)
    assert len(set(specs)) == 12
    assert specs == candidates_of(kind, shipped, suite, 12), "the same search twice"
    catalogue = suite.training[0].catalogue()
    for spec in specs:
        assert spec.partition(":")[0] == kind
        assert make_controller(spec, catalogue).name == spec
    places = best_places(shipped)
    assert len(set(places)) == len(places)
    first = shipped.schedules()[0][0]
    assert f"{first.slot}/{first.blueprint}" in places


def test_rules_are_judged_by_their_gain_over_the_control(atlas: Atlas) -> None:
    controls = Controls(horizon=HORIZON, config=DOUBLE)
    cases = [Case(PLAIN, 5), Case(NOISY, 5)]
    grows = make_controller("fixed:slot=early,blueprint=convpool,epoch=3")
    scores = {}
    for rows in (2, 4, 1):  # together, side by side, one after the other
        ground = Playground(rows, horizon=HORIZON, config=DOUBLE, test=False)
        scores[rows] = judged(ground, [NeverGrow(), grows], cases, controls)
        assert scores[rows].shape == (2, 2)
        assert float(scores[rows][0].abs().max()) < 1e-9, "never growing gains nothing"
        assert bool((scores[rows][1] != 0).all())
    for other in (4, 1):
        torch.testing.assert_close(scores[2], scores[other], rtol=0, atol=1e-9)


def test_every_kind_is_tuned_with_as_many_episodes(atlas: Atlas) -> None:
    controls = Controls(horizon=HORIZON)
    size = TuningSize(candidates=3, seeds=1, finalists=1, final_seeds=1)
    found = tune(atlas, SUITE, kinds=("periodic", "gap"), size=size, rows=16, controls=controls)
    assert set(found) == {"periodic", "gap"}
    for kind, tuned in found.items():
        assert tuned.episodes == 2 * (3 + 1) == sum(spent for _, _, spent in tuned.log)
        assert tuned.spec in {spec for spec, _, _ in tuned.log}
        assert all(spec.startswith(kind) for spec, _, _ in tuned.log)
        twice = {spec: score for spec, score, spent in tuned.log if spent == 4}
        assert tuned.score == max(twice.values()), "the winner was played in both heats"


def test_a_bandit_tells_contexts_apart_by_their_first_epochs(
    atlas: Atlas, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Made-up worths: one arm is right in one context, waiting in the other."""
    arms = (Arm(slot="early", blueprint="convpool", epoch=4), Arm(slot="late", blueprint="norm"))
    gain = torch.zeros(2, 2, 6, dtype=torch.float64)
    gain[0, 0], gain[0, 1], gain[1] = 10.0, -5.0, -5.0
    made = replace(
        atlas, arms=arms, gain=gain, validation=gain, exposure=torch.zeros_like(gain), plans=None
    )
    bandit, log = fit_bandit(made, rows=12)
    assert max(log.values()) == pytest.approx(10.0 / PLAIN.scale / 2, abs=0.3)
    assert len(log) == len(RULES)
    assert fit_bandit(made, rows=12)[0].fingerprint == bandit.fingerprint
    other = fit_bandit(replace(made, validation=-gain), rows=12)[0]
    assert other.fingerprint != bandit.fingerprint, "another fit is another controller"
    episodes = Episodes((PLAIN, NOISY), 6)
    cases = [Case(PLAIN if n % 2 else NOISY, FIRST_ATLAS_SEED + 50 + n) for n in range(6)]
    planted = _planted(bandit, episodes, cases)
    right = torch.tensor([n % 2 == 1 for n in range(6)])
    assert int((planted == right).sum()) >= 5


def _planted(bandit: Bandit, episodes: Episodes, cases: list[Case]) -> torch.Tensor:
    """[N] bool: where the first arm was planted after five epochs."""
    rows = torch.arange(len(cases))
    episodes.begin(rows, cases)
    starts = torch.ones(len(cases), dtype=torch.bool)
    for epoch in range(EPOCHS_ALONE + 2):
        actions = bandit.act(episodes.signals(), episodes.legal(), starts)
        assert epoch > EPOCHS_ALONE or not bool(actions["op"].any()), "it waits until then"
        episodes.advance(actions)
        starts = torch.zeros_like(starts)
    return episodes.population.lifecycle.blueprint[:, 0] >= 0
