"""Shadows in episodes: a controller asks for them, reads what they show, and pays for them."""

import pytest
import torch
from torch import Tensor

from esper.garden import Case, Episodes, evaluate
from esper.garden.playing import Job, Playground
from esper.leyline import Actions, Legality, LifecycleOp
from esper.leyline.ops import Blend
from esper.leyline.shadows import AuditionPlan, ShadowReadings
from esper.leyline.signals import Signals
from esper.tamiyo import TokenActorCritic, TokenController
from esper.tamiyo.controllers import Audition, NeverGrow, make_controller
from esper.tolaria.plan import HOST
from tests.garden.plots import CONTEXTS, DOUBLE, HORIZON, PLAIN, make_garden

BATCHES, SHARE = 4, 0.5
CASES = [Case(PLAIN, 0), Case(PLAIN, 1)]


@pytest.fixture(autouse=True)
def _short_epochs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("esper.garden.episodes.GARDEN_BATCHES", BATCHES)


class Listener:
    """Has one shadow trained, and plants it at an epoch."""

    name = "listener"

    def __init__(self, plants: int = HORIZON) -> None:
        self.plants = plants
        self.heard: list[ShadowReadings] = []

    def act(self, signals: Signals, legality: Legality, starts: Tensor) -> Actions:
        assert signals.shadows is not None
        self.heard.append(signals.shadows)
        self.kind = signals.catalogue.index("convpool")
        plant = (signals.lifecycle.epoch == self.plants).long() * LifecycleOp.GERMINATE
        choice = {"slot": 0, "blueprint": self.kind, "blend": int(Blend.RAMP)}
        return Actions.of(legality.space, len(signals), op=plant, **choice).canonical()

    def audition(self, signals: Signals, legality: Legality) -> AuditionPlan:
        return plan_of(signals, self.kind)


def plan_of(signals: Signals, kind: int) -> AuditionPlan:
    assert signals.shadows is not None
    where = torch.zeros(signals.shadows.epochs.shape, dtype=torch.bool)
    where[:, 0, kind] = True
    return AuditionPlan(where, torch.full((len(signals),), SHARE, dtype=torch.float64))


def test_a_controller_hears_the_shadows_it_asked_for_and_its_episodes_pay_for_them() -> None:
    listener = Listener()
    ground = Playground(4, horizon=HORIZON, config=DOUBLE)
    jobs = [Job(player, case) for player in (listener, ()) for case in CASES]
    played = ground.play_all(jobs)
    shown, never = played.rows(slice(2)), played.rows(slice(2, None))
    torch.testing.assert_close(shown.curve, never.curve, rtol=1e-12, atol=0)
    episodes = ground.episodes([PLAIN], 4)
    assert len(listener.heard) == HORIZON
    for epoch, heard in enumerate(listener.heard):
        assert heard.epochs[:, 0, listener.kind].tolist() == [epoch * SHARE] * 2
        assert int(heard.epochs.count_nonzero()) == (2 if epoch else 0)
        assert int(heard.gain.isfinite().sum()) == (2 if epoch else 0)
    cost = float(listener.heard[0].cost[0, 0, listener.kind])
    expected = cost * SHARE * HORIZON * 3 * episodes.flops.host * 50 * BATCHES
    torch.testing.assert_close(
        shown.flops - never.flops, torch.full((2,), expected).double(), rtol=1e-12, atol=0
    )


def test_what_was_planted_has_no_shadow_and_has_learned_before() -> None:
    warm = Listener(plants=4)
    ground = Playground(2, horizon=HORIZON, config=DOUBLE)
    ground.play_all([Job(warm, case) for case in CASES], epochs=5)
    episodes = ground.episodes([PLAIN], 2)
    population = episodes.population
    pool = population.pools["seed", 0, warm.kind]
    rows = population.pool_rows[:2, 0]
    steps = 4 * SHARE * BATCHES + BATCHES  # as a shadow, then planted
    assert pool.state.steps[rows, 0].tolist() == [steps] * 2
    assert not bool(population.shadows.living.any())


def test_a_row_that_was_rolled_back_has_no_more_shadows_and_its_next_case_knows_nothing() -> None:
    episodes = Episodes(CONTEXTS, 2, horizon=HORIZON, config=DOUBLE)
    episodes.begin(torch.arange(2), CASES)
    wait = Actions.of(episodes.population.space, 2)
    kind = episodes.population.catalogue.index("convpool")
    plan = plan_of(episodes.signals(), kind)
    episodes.advance(wait, plan)
    before = episodes.signals().shadows
    train = episodes.population.train_epoch

    def poisoned(plan: AuditionPlan | None) -> object:
        record = train(plan)
        episodes.population.pools[HOST].state.theta[1] = torch.nan
        return record

    episodes.population.train_epoch = poisoned  # type: ignore[method-assign, assignment]
    assert episodes.advance(wait, plan).rolled_back.tolist() == [False, True]
    episodes.population.train_epoch = train  # type: ignore[method-assign]
    after = episodes.signals().shadows
    assert before is not None
    assert after is not None
    assert torch.equal(after.gain[1].nan_to_num(), before.gain[1].nan_to_num())
    paid = episodes.ledger.flops.clone()
    episodes.advance(wait, plan)
    assert episodes.ledger.flops[1] == paid[1]
    assert episodes.population.shadows.living[:, 0, kind].tolist() == [True, False]
    episodes.begin(torch.tensor([1]), CASES[:1])
    fresh = episodes.signals().shadows
    assert fresh is not None
    assert not bool(fresh.epochs[1].any())
    assert bool(fresh.gain[1].isnan().all())
    assert bool(fresh.epochs[0].any())


def test_the_rule_audition_plays_beside_others_and_pays_for_what_it_hears() -> None:
    """And a network over tokens that was not trained yet plays as the rule that advises it."""
    spec = "audition:spend=0.5,certain=0"
    rule, again = make_controller(spec), make_controller(spec)
    assert isinstance(again, Audition)
    players = [NeverGrow(), rule, TokenController(TokenActorCritic(), again)]
    found = evaluate(players, (PLAIN,), Playground(horizon=HORIZON), seeds=2)
    never, auditioned, tokens = (
        [each for each in found if each.controller == player.name] for player in players
    )
    for alone, grown, advised in zip(never, auditioned, tokens, strict=True):
        assert alone.flops < grown.flops
        assert grown.interventions > 0
        for name in ("flops", "interventions", "seeds", "added"):
            assert getattr(advised, name) == getattr(grown, name)
        assert advised.test == pytest.approx(grown.test)


def test_a_garden_trains_the_shadows_of_a_step() -> None:
    garden = make_garden(2)
    garden.reset()
    plan = plan_of(garden.signals(), garden.catalogue.index("convpool"))
    garden.step(Actions.of(garden.action_space, 2), plan)
    heard = garden.signals().shadows
    assert heard is not None
    assert torch.equal(heard.epochs > 0, plan.where)
