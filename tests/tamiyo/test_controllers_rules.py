"""What each rule does, epoch by epoch, in a garden where everything is known."""

import math
from dataclasses import replace

import pytest
import torch

from esper.leyline import Blend, LifecycleOp
from esper.tamiyo import (
    FactoredRecurrentActorCritic,
    FeatureTable,
    LearnedController,
    MaskedCategorical,
    make_controller,
    signals_to_features,
)
from esper.tamiyo.controllers import Arm, FixedSchedule, Proposal, RandomLegal, first_legal
from esper.tamiyo.controllers.proposals import draw
from tests.tamiyo import scripted
from tests.tamiyo.gardens import Tape, TapeGarden, catalogue_of, decisions, ops_of

CATALOGUE = catalogue_of()
PLANT, ADVANCE, KEEP, PRUNE = "GERMINATE", "ADVANCE", "FOSSILIZE", "PRUNE"


def story(spec: str, tape: Tape) -> list[tuple[int, str, str]]:
    """(epoch, op, slot) of everything the controller did in the only row."""
    return ops_of(TapeGarden(tape), make_controller(spec))[0]


def planted(spec: str, tape: Tape) -> list[tuple[int, str, str]]:
    """(epoch, slot, blueprint) of every planting in the only row."""
    chosen = decisions(TapeGarden(tape), make_controller(spec))[0].tolist()
    slots, names = tape.catalogue.slots.names, tape.catalogue.names
    return [
        (epoch, slots[slot], names[blueprint])
        for epoch, (op, slot, blueprint, _) in enumerate(chosen)
        if op == LifecycleOp.GERMINATE
    ]


def test_never_means_never() -> None:
    assert story("never", Tape.steady()) == []


def test_a_seed_with_the_immediate_blend_is_permanent_an_epoch_later() -> None:
    assert story("fixed:slot=mid,blueprint=conv,epoch=5", Tape.steady()) == [
        (5, PLANT, "mid"),
        (6, KEEP, "mid"),
    ]


def test_a_ramped_seed_trains_blends_and_holds() -> None:
    spec = "fixed:slot=mid,blueprint=conv,blend=ramp,epoch=5"
    assert story(spec, Tape.steady()) == [(5, PLANT, "mid"), (6, ADVANCE, "mid"), (9, KEEP, "mid")]
    assert story(f"{spec},train=4", Tape.steady()) == [
        (5, PLANT, "mid"),
        (9, ADVANCE, "mid"),
        (12, KEEP, "mid"),
    ]


def test_the_latest_epoch_that_is_accepted_is_just_in_time() -> None:
    for blend, latest in (("immediate", 23), ("ramp", 20)):
        spec = f"fixed:slot=mid,blueprint=conv,blend={blend},epoch={latest}"
        make_controller(spec, CATALOGUE)
        assert story(spec, Tape.steady())[-1] == (24, KEEP, "mid")


def test_a_schedule_plants_as_soon_after_as_it_is_legal_and_one_seed_an_epoch() -> None:
    spec = "fixed:slot=late+early+mid,blueprint=norm,blend=ramp,epoch=2"
    assert [step for step in story(spec, Tape.steady()) if step[1] == PLANT] == [
        (2, PLANT, "late"),
        (4, PLANT, "early"),  # epoch 3 went to the first one's blending
        (7, PLANT, "mid"),  # so did epoch 5, and epoch 6 made the first one permanent
    ]
    assert story("fixed:slot=mid,blueprint=conv", Tape.steady(budget=600)) == []


def test_a_seed_that_harms_is_not_made_permanent() -> None:
    tape = Tape.steady(contribution=(-1.0, 1.0, 1.0))
    assert story("fixed:slot=early,blueprint=conv,epoch=5", tape) == [(5, PLANT, "early")]


def test_periodic_plants_the_next_of_its_places() -> None:
    spec = "periodic:places=late/conv+early/norm+late/norm+mid/squeeze,every=4,first=2"
    assert planted(spec, Tape.steady()) == [
        (2, "late", "conv"),
        (6, "early", "norm"),
        (10, "mid", "squeeze"),
    ]
    assert planted(f"{spec},seeds=1", Tape.steady()) == [(2, "late", "conv")]


def test_wildcards_take_slots_in_order_and_the_cheapest_blueprint_first() -> None:
    assert planted("periodic:places=*/conv,every=1,first=0", Tape.steady()) == [
        (0, "early", "conv"),
        (2, "mid", "conv"),
        (4, "late", "conv"),
    ]
    assert planted("periodic:seeds=1", Tape.steady()) == [(3, "early", "norm")]
    assert planted("periodic:places=late/*,seeds=1", Tape.steady()) == [(3, "late", "norm")]
    dear = Tape.steady(budget=700)  # one convolution, and then only little ones
    assert planted("periodic:places=*/conv+*/norm,every=2,first=0", dear) == [
        (0, "early", "conv"),
        (2, "mid", "norm"),
        (4, "late", "norm"),
    ]


def test_plateau_waits_while_accuracy_rises() -> None:
    rising = [20.0 + 3 * epoch for epoch in range(10)]
    tape = Tape.steady(rising)  # measured after 1 to 10 epochs; nothing new from then on
    # The last rise is seen at epoch 10; from epoch 13 the last 3 epochs are no better than it.
    assert planted("plateau:places=*/norm,patience=3,seeds=1", tape) == [(13, "early", "norm")]
    assert planted("plateau:places=*/norm,patience=3,delta=20.0,seeds=1", tape) == [
        (4, "early", "norm")
    ]
    spaced = planted("plateau:places=*/norm,patience=3", tape)
    assert [epoch for epoch, _, _ in spaced] == [13, 16, 19]


def test_gap_grows_only_where_the_host_underfits() -> None:
    spec = "gap:places=*/norm,seeds=1"
    assert planted(spec, Tape.steady(loss=1.5, gap=0.1)) == [(3, "early", "norm")]
    assert planted(spec, Tape.steady(loss=1.5, gap=0.5)) == []
    assert planted(spec, Tape.steady(loss=0.3, gap=0.1)) == []


def test_rules_do_not_plant_what_could_not_count_any_more() -> None:
    level = Tape.steady()
    assert planted("periodic:first=21,seeds=1", level) == [(21, "early", "norm")]
    assert planted("periodic:first=22,seeds=1", level) == []
    assert planted("periodic:first=18,seeds=1,blend=ramp", level) == [(18, "early", "norm")]
    assert planted("periodic:first=19,seeds=1,blend=ramp", level) == []


def test_a_race_keeps_the_best_and_prunes_the_rest() -> None:
    tape = Tape.steady(contribution=(2.0, 6.0, 4.0))
    spec = "race:places=*/norm"
    start = [(1, PLANT, "early"), (2, PLANT, "mid"), (3, PLANT, "late")]
    judged = [(10, KEEP, "mid"), (11, PRUNE, "early"), (12, PRUNE, "late")]
    assert story(spec, tape) == start + judged
    two = [(10, KEEP, "mid"), (11, KEEP, "late"), (12, PRUNE, "early")]
    assert story(f"{spec},keep=2", tape) == start + two
    none = [(10, PRUNE, "early"), (11, PRUNE, "mid"), (12, PRUNE, "late")]
    assert story(f"{spec},threshold=7.0", tape) == start + none


def test_a_race_counts_rent() -> None:
    tape = Tape.steady(contribution=(4.0, 4.2, 0.0))
    spec = "race:places=early/norm+mid/conv+late/norm"  # the convolution is 0.6 of the host
    assert (10, KEEP, "early") in story(spec, tape)
    assert (10, KEEP, "mid") in story(f"{spec},rent=0.0", tape)


def test_a_race_can_go_by_the_gain_since_planting() -> None:
    rising = [20.0] * 9 + [30.0] * 7 + [31.0] * 9
    spec = "race:places=*/norm,measure=gain,spacing=7"
    assert story(spec, Tape.steady(rising)) == [
        (1, PLANT, "early"),  # 20 then, 20 at epoch 8
        (8, PLANT, "mid"),  # 20 then, 30 at epoch 15
        (15, PLANT, "late"),  # 30 then, 31 at epoch 22
        (22, KEEP, "mid"),
        (23, PRUNE, "early"),
        (24, PRUNE, "late"),
    ]


def test_a_race_in_turns_takes_the_first_that_is_good_enough() -> None:
    spec = "race:turns=true,places=early/norm+early/conv+mid/norm,epochs=4"
    assert story(spec, Tape.steady(contribution=(0.5, 3.0, 0.0))) == [
        (1, PLANT, "early"),
        (5, PRUNE, "early"),
        (9, PLANT, "early"),  # the slot has rested
        (13, PRUNE, "early"),
        (14, PLANT, "mid"),
        (18, KEEP, "mid"),
    ]
    assert story(spec, Tape.steady(contribution=(5.0, 9.0, 0.0))) == [
        (1, PLANT, "early"),
        (5, KEEP, "early"),
    ]


def test_a_race_gives_up_candidates_that_it_cannot_plant() -> None:
    tape = Tape.steady(contribution=(3.0, 6.0, 4.0), budget=700)  # room for one convolution
    assert story("race:places=*/conv", tape) == [(1, PLANT, "early"), (8, KEEP, "early")]


def test_the_heuristic_keeps_what_is_worth_its_parameters() -> None:
    spec = "heuristic:places=early/norm+mid/conv,patience=0,first=2"
    assert story(spec, Tape.steady(contribution=(1.0, 1.0, 0.0))) == [
        (2, PLANT, "early"),
        (5, KEEP, "early"),
        (6, PLANT, "mid"),  # 0.6 of the host: 1 point is not enough
        (12, PRUNE, "mid"),
    ]


def test_the_heuristic_does_not_try_a_place_twice() -> None:
    harmful = Tape.steady(contribution=(0.1, 0.1, 0.1))
    spec = "heuristic:places=early/norm+early/conv,patience=0,first=0,probation=1,trial=1"
    assert planted(spec, harmful) == [(0, "early", "norm"), (5, "early", "conv")]


def test_the_heuristic_looks_at_plateau_gap_and_room_on_trial() -> None:
    rising = Tape.steady([20.0 + 3 * epoch for epoch in range(25)])
    assert planted("heuristic", rising) == []
    spec = "heuristic:places=*/norm,patience=0,first=0"
    assert planted(f"{spec},most_gap=0.1", Tape.steady(gap=1.0)) == []
    trials = planted(f"{spec},together=2,spacing=1,probation=5,trial=9", Tape.steady())
    assert [epoch for epoch, _, _ in trials] == [0, 1, 7]  # when both were kept
    assert len(planted(f"{spec},together=3,seeds=2", Tape.steady())) == 2


def test_the_heuristic_decides_before_the_scored_epochs() -> None:
    spec = "heuristic:places=*/norm,patience=0,first=17,probation=4,trial=9,seeds=1"
    good, poor = Tape.steady(), Tape.steady(contribution=(0.1, 0.1, 0.1))
    assert story(spec, good) == [(17, PLANT, "early"), (21, KEEP, "early")]
    assert story(spec, poor) == [(17, PLANT, "early"), (22, PRUNE, "early")]


def test_the_heuristic_cuts_probation_short_at_the_end() -> None:
    tape = Tape.steady()
    gradient = tape.gradient.clone()
    gradient[:, 12:16] = math.nan  # blending has to wait until the seed is seen to learn
    spec = "heuristic:places=*/norm,patience=0,first=12,blend=ramp,probation=6,trial=9,seeds=1"
    assert story(spec, replace(tape, gradient=gradient)) == [
        (12, PLANT, "early"),
        (17, ADVANCE, "early"),
        (22, KEEP, "early"),
    ]


def test_random_is_uniform_over_legal_ops_and_their_arguments() -> None:
    tape = Tape.random(4096, seed=2)
    tape = replace(tape, budget=torch.full((4096,), 10_000))
    garden = TapeGarden(tape)
    signals, legal = garden.signals(), garden.legal()
    starts = torch.ones(4096, dtype=torch.bool)
    actions = RandomLegal().act(signals, legal, starts)
    plants = actions["op"] == LifecycleOp.GERMINATE  # WAIT and GERMINATE are legal at first
    assert float(plants.double().mean()) == pytest.approx(0.5, abs=0.03)
    for head in ("slot", "blueprint", "blend"):
        size = garden.space.size(head)
        shares = actions[head][plants].bincount(minlength=size) / int(plants.sum())
        assert shares.tolist() == pytest.approx([1 / size] * size, abs=0.04)
    for rate in (0.0, 0.1, 1.0):
        seldom = RandomLegal(rate=rate).act(signals, legal, starts)["op"]
        assert float((seldom != 0).double().mean()) == pytest.approx(rate, abs=0.02)


def test_a_draw_never_takes_what_has_no_weight() -> None:
    weights = torch.tensor([0.0, 1.0, 0.0, 3.0, 0.0]).expand(5, -1)
    draws = torch.tensor([0.0, 0.2499, 0.2501, 0.999999, 1.0])
    assert draw(weights, draws).tolist() == [1, 1, 3, 3, 3]


def test_the_first_legal_proposal_wins_and_otherwise_nothing_happens() -> None:
    garden = TapeGarden(Tape.steady(rows=3, budget=100))
    everywhere = torch.ones(3, dtype=torch.bool)
    dear, cheap = CATALOGUE.index("conv"), CATALOGUE.index("norm")
    wishes = [
        Proposal(everywhere, LifecycleOp.FOSSILIZE, 1),
        Proposal(everywhere, LifecycleOp.GERMINATE, 1, dear),
        Proposal(torch.tensor([True, False, False]), LifecycleOp.GERMINATE, 2, cheap, Blend.GATE),
        Proposal(torch.tensor([True, True, False]), LifecycleOp.GERMINATE, 1, cheap),
    ]
    assert first_legal(garden.legal(), wishes).values.tolist() == [
        [LifecycleOp.GERMINATE, 2, cheap, Blend.GATE],
        [LifecycleOp.GERMINATE, 1, cheap, Blend.IMMEDIATE],
        [LifecycleOp.WAIT, 0, 0, 0],
    ]


def test_a_sampling_network_follows_its_own_probabilities() -> None:
    torch.manual_seed(0)
    rows = 4096
    tape = replace(Tape.random(rows, seed=2), budget=torch.full((rows,), 10_000))
    garden = TapeGarden(tape)
    state_dim = FeatureTable.of(CATALOGUE).size
    network = FactoredRecurrentActorCritic(garden.space, state_dim=state_dim, lstm_hidden_dim=16)
    torch.nn.init.normal_(network.heads["op"][-1].bias)  # type: ignore[index, arg-type]
    signals, legal = garden.signals(), garden.legal()
    starts = torch.ones(rows, dtype=torch.bool)
    actions = LearnedController(network, greedy=False).act(signals, legal, starts)
    logits = network(signals_to_features(signals)).logits["op"]
    chances = MaskedCategorical(logits, legal.masks["op"]).probs.mean(0)
    shares = actions["op"].bincount(minlength=len(LifecycleOp)) / rows
    torch.testing.assert_close(shares, chances, atol=0.03, rtol=0)
    greedy = LearnedController(network).act(signals, legal, starts)
    assert torch.equal(greedy["op"], chances.argmax().expand(rows))


def test_scripted_controllers_do_what_they_are_there_for() -> None:
    tape, arm = Tape.steady(), Arm(slot="early", blueprint="conv", epoch=3)

    def told(controller: object) -> list[tuple[int, str, str]]:
        return ops_of(TapeGarden(tape), controller)[0]  # type: ignore[arg-type]

    assert told(FixedSchedule(arm)) == [(3, PLANT, "early"), (4, KEEP, "early")]
    assert told(scripted.destructive(arm)) == [(3, PLANT, "early"), (23, PRUNE, "early")]
    assert told(scripted.unfinished(arm)) == [(3, PLANT, "early")]
    assert told(scripted.late(arm)) == [(18, PLANT, "early"), (19, KEEP, "early")]
    assert told(scripted.wrong_slot(arm, "late")) == [(3, PLANT, "late"), (4, KEEP, "late")]
    wasted = told(scripted.wasteful())
    assert [step[1] for step in wasted] == [PLANT] * 3 + [KEEP] * 3
    spam = [op for _, op, _ in told(scripted.spammy(arm))]
    assert spam[:6] == [PLANT, PRUNE] * 3
    assert len(spam) > 12
    assert math.isclose(spam.count(PLANT), spam.count(PRUNE), abs_tol=1)
