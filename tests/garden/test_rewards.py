"""Rewards on synthetic episodes: they say what the score says, and nothing else can be earned."""

from collections.abc import Callable
from dataclasses import replace

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import assume, given, settings
from torch import Tensor

from esper.garden.reward_settings import MODES, RewardConfig
from esper.garden.rewards import potential, reward_scale, rewards
from esper.leyline import AgreementError, EsperError, SeedStage, UnknownNameError
from esper.leyline.constants import (
    DEFAULT_INTERVENTION_COST,
    DEFAULT_ROLLBACK_PENALTY,
    MIN_REWARD_SCALE,
    RENT_LEVELS,
)
from tests.garden.scripts import Episode, N, S, claim, episodes, grown, quiet, returns, spam, toggle

_S = SeedStage


scales = st.lists(st.floats(MIN_REWARD_SCALE, 50.0), min_size=N, max_size=N).map(
    lambda numbers: torch.tensor(numbers, dtype=torch.float64)
)
gammas = st.sampled_from([0.0, 0.5, 0.9, 0.995, 1.0])
modes = pytest.mark.parametrize("mode", list(MODES))


def test_the_sparse_reward_is_the_net_gain_of_the_last_three_epochs_at_the_end() -> None:
    episode = replace(
        quiet(5),
        committed=torch.tensor([[0.0, 0.0, 61.0, 65.0, 66.0]]),
        control=torch.tensor([[0.0, 0.0, 60.0, 60.0, 60.0]]),
        share=torch.tensor([[0.0, 0.5, 0.5, 0.5, 1.0]]),
    )
    terms = episode.terms(RewardConfig(mode="sparse", rent=2.0), torch.tensor([4.0]))
    assert [float(step.total) for step in terms[:-1]] == [0.0] * 4
    # (1 + 5 + 6) / 3 = 4 points, and 2 x (0.5 + 0.5 + 0.5 + 1) / 5 = 1 of rent
    assert float(terms[-1]["objective"]) == pytest.approx(4.0 / 4.0)
    assert float(terms[-1]["rent"]) == pytest.approx(-1.0 / 4.0)
    assert float(terms[-1].total) == pytest.approx(3.0 / 4.0)


@given(episodes(rollbacks=False), scales, st.sampled_from(RENT_LEVELS))
@settings(max_examples=50)
def test_the_sparse_reward_is_the_score_that_evaluation_reports(
    episode: Episode, scale: Tensor, rent: float
) -> None:
    assume(episode.committed.shape[1] >= 3)
    paid = returns(episode.terms(RewardConfig(mode="sparse", rent=rent), scale))
    torch.testing.assert_close(paid, episode.net_score(rent) / scale, rtol=0, atol=1e-9)


@pytest.mark.parametrize("mode", ["sparse", "simplified"])
@given(episodes(rollbacks=False), scales, st.sampled_from(RENT_LEVELS), st.floats(0.5, 5.0))
@settings(max_examples=30)
def test_with_caution_every_point_that_is_lost_at_the_end_counts_as_several(
    mode: str, episode: Episode, scale: Tensor, rent: float, caution: float
) -> None:
    assume(episode.committed.shape[1] >= 3)
    config = RewardConfig(mode=mode, rent=rent, caution=caution, intervention_cost=0.0)
    net = episode.net_score(rent)
    wanted = torch.where(net < 0, caution * net, net) / scale
    torch.testing.assert_close(returns(episode.terms(config, scale)), wanted, rtol=0, atol=1e-9)


@given(episodes(), scales, st.floats(0, 5), st.floats(0, 1))
@settings(max_examples=30)
def test_simplified_adds_up_to_sparse_less_the_cost_of_interventions(
    episode: Episode, scale: Tensor, rent: float, cost: float
) -> None:
    settings = {"rent": rent, "intervention_cost": cost}
    dense = returns(episode.terms(RewardConfig(mode="simplified", **settings), scale))  # type: ignore[arg-type]
    sparse = returns(episode.terms(RewardConfig(mode="sparse", **settings), scale))  # type: ignore[arg-type]
    made = episode.states()[-1].interventions
    torch.testing.assert_close(dense, sparse - made / scale * cost, rtol=0, atol=1e-9)


@given(episodes(), scales, gammas, st.floats(0, 3))
@settings(max_examples=30)
def test_shaping_cancels_over_every_episode(
    episode: Episode, scale: Tensor, gamma: float, weight: float
) -> None:
    config = RewardConfig(mode="shaped", gamma=gamma, shaping_weight=weight)
    paid = returns(episode.terms(config, scale), gamma, "shaping")
    torch.testing.assert_close(paid, torch.zeros_like(paid), rtol=0, atol=1e-9)


@given(episodes(), scales, gammas)
@settings(max_examples=30)
def test_shaped_is_simplified_plus_shaping(episode: Episode, scale: Tensor, gamma: float) -> None:
    shaped = episode.terms(RewardConfig(mode="shaped", gamma=gamma), scale)
    simplified = episode.terms(RewardConfig(mode="simplified", gamma=gamma), scale)
    for rich, plain in zip(shaped, simplified, strict=True):
        for name in MODES["simplified"]:
            assert torch.equal(rich[name], plain[name])
    torch.testing.assert_close(
        returns(shaped, gamma), returns(simplified, gamma), rtol=0, atol=1e-9
    )


@given(episodes(rollbacks=False), gammas)
@settings(max_examples=30)
def test_a_truncated_episode_keeps_the_potential_of_its_last_state(
    episode: Episode, gamma: float
) -> None:
    cut = replace(episode, horizon=episode.horizon + 5)
    paid = returns(cut.terms(RewardConfig(mode="shaped", gamma=gamma)), gamma, "shaping")
    last, steps = potential(cut.states()[-1]), cut.committed.shape[1]
    assert bool((last >= 0).all())
    torch.testing.assert_close(paid, gamma**steps * last, rtol=0, atol=1e-9)
    sparse = cut.terms(RewardConfig(mode="sparse"))
    assert torch.equal(returns(sparse), torch.zeros(N)), "a cut is no end: nothing is due"


@modes
@given(episode=episodes(), scale=scales)
@settings(max_examples=30)
def test_the_terms_are_those_of_the_mode_and_add_up_to_the_bit(
    mode: str, episode: Episode, scale: Tensor
) -> None:
    for step in episode.terms(RewardConfig(mode=mode), scale):
        assert tuple(step) == MODES[mode]
        assert torch.equal(sum(step.values(), torch.zeros(N)), step.total)
        assert step.total.dtype == torch.float64
        assert bool(step.total.isfinite().all())


@modes
@given(episode=episodes(), order=st.permutations(range(S)))
@settings(max_examples=30)
def test_no_slot_is_worth_more_than_another(mode: str, episode: Episode, order: list[int]) -> None:
    moved = replace(episode, stage=episode.stage[:, :, order])
    config = RewardConfig(mode=mode)
    for here, there in zip(episode.terms(config), moved.terms(config), strict=True):
        assert torch.equal(here.total, there.total)


@modes
@given(episode=episodes(), seed=st.integers(0, 1000))
@settings(max_examples=30)
def test_the_hosts_own_progress_earns_nothing(mode: str, episode: Episode, seed: int) -> None:
    noise = torch.Generator().manual_seed(seed)
    progress = 50 * torch.rand(episode.control.shape, generator=noise, dtype=torch.float64)
    better = replace(
        episode,
        committed=episode.committed + progress,
        current=episode.current + progress,
        control=episode.control + progress,
    )
    config = RewardConfig(mode=mode)
    for plain, fast in zip(episode.terms(config), better.terms(config), strict=True):
        torch.testing.assert_close(plain.total, fast.total, rtol=0, atol=1e-9)


@modes
def test_never_growing_earns_exactly_nothing(mode: str) -> None:
    for step in quiet(25).terms(RewardConfig(mode=mode)):
        assert float(step.total) == 0.0


@modes
@pytest.mark.parametrize("exploit", [spam, toggle, claim])
@pytest.mark.parametrize("epochs", [4, 25])
def test_no_exploit_earns_more_than_never_growing(
    mode: str, exploit: Callable[[int], Episode], epochs: int
) -> None:
    config = RewardConfig(mode=mode)
    for gamma in (config.gamma, 1.0):  # shaping cancels under the discount it was made for
        terms = exploit(epochs).terms(replace(config, gamma=gamma))
        assert float(returns(terms, gamma)) < 0.0


def test_fossilizing_a_useful_seed_pays_at_once_also_when_shaped() -> None:
    keeping = grown(10.0, at=4)
    holding = replace(
        keeping,
        committed=keeping.control,
        decided=torch.arange(25)[None] == 4,
        stage=keeping.stage.masked_fill(keeping.stage == _S.FOSSILIZED, int(_S.HOLDING)),
    )
    config = RewardConfig(mode="shaped")
    for step in (6, 7, 8):  # the score is a mean over three epochs: it rises for three
        now, later = keeping.terms(config)[step].total, holding.terms(config)[step].total
        assert float(now) > float(later) + 0.5
        assert float(now) > 0.5


def test_each_stage_on_the_way_to_fossilized_is_worth_more() -> None:
    way = (_S.DORMANT, _S.GERMINATED, _S.TRAINING, _S.BLENDING, _S.HOLDING, _S.FOSSILIZED)
    episode = replace(quiet(3), horizon=torch.tensor([9]))
    values = []
    for stage in way:
        at = replace(episode, stage=torch.full((1, 3, S), int(stage)))
        values.append(float(potential(at.states()[-1])))
    assert values[0] == 0.0
    assert values == sorted(set(values))
    for left in (_S.PRUNED, _S.EMBARGOED, _S.RESETTING):
        at = replace(episode, stage=torch.full((1, 3, S), int(left)))
        assert float(potential(at.states()[-1])) == 0.0


def test_the_potential_is_a_share_of_what_the_score_would_still_rise_to() -> None:
    states = grown(12.0, at=4).states()
    stages = [0.0] * 5 + [0.25] * 2 + [0.3] * 18
    promise = [0.0] * 5 + [12.0] * 2 + [8.0, 4.0] + [0.0] * 16
    expected = [0.5 * p + s for p, s in zip(promise, stages, strict=True)] + [0.0]
    assert [float(potential(state)) for state in states] == pytest.approx(expected)


@pytest.mark.parametrize("mode", list(MODES))
def test_scripted_policies_rank_as_their_net_scores_do(mode: str) -> None:
    scripts = {
        "good": grown(15.0, at=2),
        "late": grown(9.0, at=18),
        "wasteful": grown(15.0, at=2, share=2.5),
        "idle": quiet(25),
        "spammy": spam(25),
        "useless": grown(0.0, at=2),
        "destructive": grown(-20.0, at=2),
    }
    config = RewardConfig(mode=mode)
    truth, paid = {}, {}
    for name, episode in scripts.items():
        truth[name] = float(episode.net_score())
        paid[name] = float(returns(episode.terms(config), config.gamma))
    if mode == "sparse":
        assert sorted(truth, key=truth.__getitem__) == sorted(paid, key=paid.__getitem__)
    # "spammy" owes less rent than "useless" but 23 more interventions.
    for pair in (truth, paid):
        pair.pop("spammy")
    assert sorted(truth, key=truth.__getitem__) == sorted(paid, key=paid.__getitem__)


@pytest.mark.parametrize("mode", list(MODES))
@given(
    seed=st.integers(0, 2**31),
    epochs=st.integers(2, 12),
    rent=st.sampled_from(RENT_LEVELS),
    gamma=gammas,
    data=st.data(),
)
@settings(max_examples=60)
def test_a_rollback_is_never_better_than_going_on_by_waiting(
    mode: str, seed: int, epochs: int, rent: float, gamma: float, data: st.DataObject
) -> None:
    # The bound: waiting loses no more than what the penalty leaves after the rent.
    share = 3.0
    fall = DEFAULT_ROLLBACK_PENALTY - rent * share
    noise = torch.Generator().manual_seed(seed)
    at = data.draw(st.integers(0, epochs - 1))
    first = 200 * torch.rand(1, at, generator=noise, dtype=torch.float64) - 100
    reached = first[:, -3:].mean() if at else torch.zeros(())
    least = reached.clamp(max=0.0) - fall
    later = least + 80 * torch.rand(1, epochs - at, generator=noise, dtype=torch.float64)
    if data.draw(st.booleans()):
        later = least.expand_as(later)  # the worst that is within the bound
    gains = torch.cat((first, later), 1)
    base = quiet(epochs)
    stay = replace(
        base,
        committed=base.control + gains,
        current=base.control + gains + 30,
        share=torch.full((1, epochs), share),
        decided=torch.arange(epochs)[None] <= at,
        stage=torch.full((1, epochs, S), int(_S.HOLDING)),
    )
    # The mean over the last epochs still remembers better or worse ones from before.
    objectives = torch.stack([state.objective for state in stay.states()[at:]])
    assume(float(objectives.min()) >= float(least))
    fail = replace(stay, rolled_back_at=torch.tensor([at]))
    config = RewardConfig(mode=mode, rent=rent, gamma=gamma)
    going_on, failing = (returns(each.terms(config), gamma) for each in (stay, fail))
    assert float(failing) <= float(going_on) + 1e-9


@modes
@pytest.mark.parametrize("score", [float("nan"), 10.0])
def test_a_rollback_forfeits_the_gain_and_pays_the_penalty_and_then_nothing_happens(
    mode: str, score: float
) -> None:
    episode = replace(
        grown(12.0, at=2), rolled_back_at=torch.tensor([12]), share=torch.full((1, 25), 0.5)
    )
    broken = episode.committed.clone()
    broken[:, 12:] = score
    episode = replace(episode, committed=broken, current=broken)
    terms = episode.terms(RewardConfig(mode=mode))
    assert float(terms[12]["rollback"]) == pytest.approx(-DEFAULT_ROLLBACK_PENALTY - 12.0)
    assert float(returns(terms, name="objective")) == pytest.approx(12.0), "it stays as it stood"
    assert float(returns(terms, name="rent")) == pytest.approx(-2.0 * 0.5 * 13 / 25)
    for step in terms[13:]:
        assert float(step.total) == 0.0
        assert all(float(term) == 0.0 for term in step.values())
    last = episode.states()[-1]
    assert bool(last.ended)
    assert (int(last.epoch), int(last.interventions)) == (13, 2)


def test_a_rollback_in_the_first_epoch_costs_the_penalty_and_what_was_decided() -> None:
    episode = replace(grown(5.0, at=0), rolled_back_at=torch.tensor([0]))
    terms = episode.terms(RewardConfig(mode="simplified"))
    owed = DEFAULT_ROLLBACK_PENALTY + DEFAULT_INTERVENTION_COST + 2.0 * 0.2 / 25
    assert float(terms[0].total) == pytest.approx(-owed)


def test_rewards_are_in_units_of_the_familys_best_gain_but_at_least_three_points() -> None:
    scale = reward_scale(torch.tensor([48.0, 3.5, 0.2, -1.0]))
    assert scale.tolist() == [48.0, 3.5, 3.0, 3.0]
    one = grown(12.0, at=2)
    plain, scaled = (one.terms(RewardConfig(), torch.tensor([float(unit)])) for unit in (1.0, 48.0))
    torch.testing.assert_close(returns(plain) / 48.0, returns(scaled))


def test_the_penalty_must_exceed_any_rent_that_a_rollback_saves() -> None:
    RewardConfig().check_budget(9.9)
    with pytest.raises(EsperError, match=r"20 points, rent up to 5 x 4 = 20.*rollback_penalty"):
        RewardConfig(rent=5.0).check_budget(4.0)


def test_an_unknown_mode_is_answered_with_the_one_that_was_meant() -> None:
    with pytest.raises(UnknownNameError, match="did you mean 'simplified'"):
        RewardConfig(mode="simplifed")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("rent", -1.0),
        ("intervention_cost", -0.1),
        ("shaping_weight", -1.0),
        ("gamma", 1.1),
        ("rollback_penalty", 0.0),
        ("rent", float("nan")),
    ],
)
def test_settings_out_of_range_are_refused(name: str, value: float) -> None:
    with pytest.raises(AgreementError, match=f"'{name}' is out of range"):
        RewardConfig(**{name: value})  # type: ignore[arg-type]


def test_wrong_shapes_and_scales_are_refused() -> None:
    states = quiet(3).states()
    with pytest.raises(AgreementError, match="positive scale"):
        rewards(states[0], states[1], torch.ones(2), RewardConfig())
    with pytest.raises(AgreementError, match="positive scale"):
        rewards(states[0], states[1], torch.zeros(1), RewardConfig())


@pytest.mark.parametrize("name", ["exposure", "interventions"])
def test_what_was_paid_is_never_given_back(name: str) -> None:
    before, after = spam(4).states()[2:4]
    refunded = replace(after, **{name: torch.zeros_like(getattr(after, name))})
    with pytest.raises(AgreementError, match=f"'{name}' of a reward state fell"):
        rewards(before, refunded, torch.ones(1), RewardConfig())
