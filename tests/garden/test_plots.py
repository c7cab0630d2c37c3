"""Plots side by side: the rule's own game, paired controls, rounds that are drawn and resumed."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from esper.garden import LAYOUT, Bed, Greenhouse, Job, Playground, Plot, Plots
from esper.leyline import Actions, LifecycleOp
from esper.leyline.errors import AgreementError
from esper.leyline.shadows import AuditionPlan
from esper.tamiyo.controllers.auditioning import ATTENTIVE, Audition
from esper.tamiyo.token_layout import WHOLE_TOKEN

LONGEST = 12


def plot_of(host: str, contexts: int = 2, group: str = "training") -> Plot:
    """The first one with such a host, in short episodes."""
    house = Greenhouse(3, group, longest=LONGEST)
    found = (house.plot(number, contexts) for number in range(100))
    return next(plot for plot in found if plot.contexts[0].host == host)


def padded(bed: Bed) -> torch.Tensor:
    """What the rule would do."""
    return bed.advice.values


@pytest.mark.slow
@pytest.mark.parametrize("host", ["mlp", "folded"])
def test_players_who_follow_the_advice_play_as_the_rule_does(host: str) -> None:
    plot = plot_of(host)
    bed = Bed(plot, players=1)
    ops = []
    while not bed.over:
        ops.append(bed.advice["op"])
        assert bool(LAYOUT.widen(bed.episodes.legal().rows(bed.players)).permits(
            LAYOUT.narrow(padded(bed), LAYOUT.space)).all())  # fmt: skip
        bed.step(padded(bed))
    ground = Playground(len(plot.contexts), horizon=plot.horizon, config=plot.population())
    alone = ground.play_all([Job(Audition(ATTENTIVE), case) for case in plot.cases])
    mine = bed.episodes.ledger.committed[bed.players]
    torch.testing.assert_close(mine, alone.curve, rtol=0, atol=0.11)  # a sample of a thousand
    assert torch.equal(bed.episodes.population.lifecycle.interventions[bed.players],
                       alone.interventions)  # fmt: skip


def test_players_and_controllers_see_what_seeds_cost_in_their_plot() -> None:
    plot = replace(plot_of("mlp", contexts=1), rent=3.7)
    place = WHOLE_TOKEN.names.index("rent")
    whole = LAYOUT.split(Bed(plot, players=1).observations)[0]
    assert float(whole[0, place]) == pytest.approx(0.37)
    ground = Playground(1, horizon=plot.horizon, config=plot.population(), rent=plot.rent)
    assert ground.episodes(plot.contexts).signals().rent == 3.7


def test_tiny_transformers_are_seen_as_other_hosts_are() -> None:
    bed = Bed(plot_of("pieces", contexts=1, group="kinds"), players=1)
    for _ in range(3):
        assert bool(bed.step(padded(bed)).observations.isfinite().all())


def test_a_player_who_is_deaf_has_no_shadows_and_trains_as_one_who_hears() -> None:
    bed = Bed(plot_of("conv1d", contexts=1), players=2)
    wait, deaf = torch.zeros(2, 4, dtype=torch.int64), torch.tensor([False, True])
    for _ in range(4):
        bed.step(wait, deaf)
    heard = bed.episodes.population.shadows.readings.epochs.flatten(1).sum(1)
    assert float(heard[0]) > 0.0 == float(heard[1])
    assert torch.equal(*bed.episodes.ledger.committed[bed.players, :4])


def test_a_player_who_waits_is_its_control_and_earns_nothing() -> None:
    bed = Bed(plot_of("conv1d"), players=2)
    wait = torch.zeros(len(bed.players), 4, dtype=torch.int64)
    for _ in range(5):
        outcome = bed.step(wait)
        assert float(outcome.rewards.abs().max()) < 1e-6
    curves = bed.episodes.ledger.committed[:, :5]
    assert torch.equal(curves[bed.players], curves[bed._control[bed.players]])


def test_growing_is_paid_for_against_the_control_and_rent_is_the_plots() -> None:
    plot = replace(plot_of("mlp", contexts=1), rent=5.0)
    bed = Bed(plot, players=2)
    total = torch.zeros(2)
    for _ in range(LONGEST):
        own = bed.episodes.legal().rows(bed.players)
        plant = (own.masks["op"][:, LifecycleOp.GERMINATE]) & torch.tensor([True, False])
        actions = torch.zeros(2, 4, dtype=torch.int64)
        actions[:, 0] = torch.where(plant, LifecycleOp.GERMINATE, LifecycleOp.WAIT)
        actions[:, 1] = own.masks["slot"][:, LifecycleOp.GERMINATE].long().argmax(1) * plant
        kinds = own.masks["blueprint"][torch.arange(2), actions[:, 1]].long()
        actions[:, 2] = kinds.argmax(1) * plant
        total += bed.step(actions).rewards
    ledger = bed.episodes.ledger
    paired = ledger.current[:2, -1] - ledger.committed[2, -1]  # the third row is the control
    assert torch.equal(bed.state.current_gain[:2], paired)
    assert float(paired[0]) != 0.0
    assert float(bed.episodes.ledger.exposure[0, -1]) > 0.0
    assert float(total[1]) == pytest.approx(0.0, abs=1e-5)
    assert float(total[0]) != 0.0
    assert bed.reward.rent == 5.0


def test_the_rule_is_asked_for_shadows_once_it_knows_what_was_done(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[str] = []

    class Recorded(Audition):
        def act(self, *seen: Any) -> Actions:
            asked.append("act")
            return super().act(*seen)

        def overruled(self, advised: Actions, done: Actions) -> None:
            asked.append(f"overruled {int(done['op'][0])}")
            super().overruled(advised, done)

        def audition(self, *seen: Any, **among: Any) -> AuditionPlan:
            asked.append("audition")
            return super().audition(*seen, **among)

    monkeypatch.setattr("esper.garden.plots.Audition", Recorded)
    bed = Bed(plot_of("mlp", contexts=1), players=1)
    for _ in range(2):
        bed.step(torch.zeros(1, 4, dtype=torch.int64))
    wait = f"overruled {int(LifecycleOp.WAIT)}"
    assert asked == ["act", *(wait, "audition", "act") * 2]  # as in a TokenController


def test_a_row_that_was_rolled_back_idles_and_its_neighbour_does_not() -> None:
    bed = Bed(plot_of("mlp", contexts=1), players=2)
    bed.episodes.running[0] = False
    active = bed.step(torch.zeros(2, 4, dtype=torch.int64)).active
    assert active is not None
    assert active.tolist() == [False, True]


@pytest.mark.slow
def test_rows_of_different_hosts_and_lengths_stand_in_one_batch() -> None:
    world = Plots(Greenhouse(3, longest=14), 8, plots=4, players=2)
    seen = world.reset()
    assert seen.shape == (8, world.state_dim)
    assert len({bed.plot.contexts[0].host_shape for bed in world.beds}) > 1
    short = min(bed.plot.horizon for bed in world.beds)
    assert short < 14
    first = [bed.plot.name for bed in world.beds]
    active = []
    for _ in range(14):
        legal = world.legal()
        assert bool(legal.masks["op"].any(1).all())
        outcome = world.step(torch.zeros(8, 4, dtype=torch.int64))
        assert bool(outcome.observations.isfinite().all())
        assert outcome.active is not None
        active.append(outcome.active)
    lived = torch.stack(active).sum(0)
    names = [world.greenhouse.plot(number).horizon for number in range(4)]
    assert lived.tolist() == [length for length in names for _ in range(2)]
    assert [bed.plot.name for bed in world.beds] == [f"training-3-{n}" for n in range(4, 8)]
    assert first == [f"training-3-{n}" for n in range(4)]


def test_a_world_goes_on_from_its_round_as_if_it_had_not_been_stopped() -> None:
    world = Plots(Greenhouse(2, longest=LONGEST), 4, plots=2, players=2)
    world.reset()
    seen = world.reset()
    again = Plots(Greenhouse(2, longest=LONGEST), 4, plots=2, players=2)
    assert torch.equal(again.load_state_dict(world.state_dict()), seen)


def test_worlds_of_several_processes_share_the_plots_of_one() -> None:
    whole = Plots(Greenhouse(2), 8, plots=4, players=2)
    whole._round = 2
    parts = [Plots(Greenhouse(2), 4, plots=2, players=2, place=place, of=2) for place in (0, 1)]
    names = [bed.plot.name for world in (whole, *parts) for bed in _next(world)]
    assert names[:4] == names[4:]


def _next(world: Plots) -> list[Bed]:
    world._round = 2
    world.reset()
    return world.beds


def test_rows_that_do_not_come_out_even_are_refused() -> None:
    with pytest.raises(AgreementError, match="a multiple of 8 rows"):
        Plots(Greenhouse(0), 12, plots=4, players=2)
