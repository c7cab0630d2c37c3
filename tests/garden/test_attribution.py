"""Attribution against a slow loop and against the definition, on a real population and on games."""

import itertools
from functools import cache

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from torch import Tensor

from esper.garden import attribution
from esper.garden.attribution import (
    AttributionError,
    leave_one_out,
    shapley,
    shapley_from_values,
)
from esper.leyline import Actions, Blend, LifecycleOp, SeedStage, UnknownNameError
from esper.tolaria.population import Population
from tests.tolaria.twins import make_population

NAN = torch.nan


@cache
def grown() -> Population:
    """Six MLP hosts with 0 to 3 seeds on, one fossilized, one that still trains in isolation."""
    population = make_population("mlp", 6, batches=8, rate=0.1)
    for slot in range(3):
        plant = torch.arange(6) > slot  # host 0 none, host 1 one, ..., hosts 3 to 5 three
        blend = torch.full((6,), int(Blend.IMMEDIATE))
        if slot == 2:
            blend[5] = int(Blend.RAMP)  # alpha 0 while it trains
        population.apply(
            Actions.of(
                population.space,
                6,
                op=torch.where(plant, LifecycleOp.GERMINATE, LifecycleOp.WAIT),
                slot=torch.where(plant, slot, 0),
                blueprint=torch.where(plant, slot + 1, 0),
                blend=torch.where(plant, blend, 0),
            )
        )
    for _ in range(4):
        population.train_epoch()
        population.pass_time()
    keep = torch.arange(6) == 3
    population.apply(
        Actions.of(
            population.space,
            6,
            op=torch.where(keep, LifecycleOp.FOSSILIZE, LifecycleOp.WAIT),
            slot=torch.where(keep, 1, 0),
        )
    )
    return population


def accuracy(population: Population, environment: int, off: list[int]) -> float:
    """One question, on its own."""
    mask = torch.zeros(1, 3, dtype=torch.bool)
    mask[0, off] = True
    return float(population.counterfactual(torch.tensor([environment]), mask).accuracy)


def brute_force(worth: dict[frozenset[int], float], players: list[int]) -> dict[int, float]:
    """The definition: what a player adds on joining, averaged over all orders."""
    added = dict.fromkeys(players, 0.0)
    orders = list(itertools.permutations(players))
    for order in orders:
        for place, player in enumerate(order):
            before = frozenset(order[:place])
            added[player] += worth[before | {player}] - worth[before]
    return {player: total / len(orders) for player, total in added.items()}


def close(given: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(given, expected, rtol=0, atol=1e-9, equal_nan=True)


def test_the_population_has_every_case() -> None:
    life = grown().lifecycle
    assert (life.alpha > 0).sum(1).tolist() == [0, 1, 2, 3, 3, 2]
    assert int(life.stage[3, 1]) == SeedStage.FOSSILIZED
    assert int(life.stage[5, 2]) == SeedStage.TRAINING


def test_leave_one_out_equals_a_slow_loop() -> None:
    population = grown()
    expected = torch.full((6, 3), NAN, dtype=torch.float64)
    for n, s in (population.lifecycle.alpha > 0).nonzero().tolist():
        expected[n, s] = accuracy(population, n, []) - accuracy(population, n, [s])
    close(leave_one_out(population), expected)
    assert int((expected.nan_to_num() != 0).sum()) > 3, "some seeds must matter"


def test_all_questions_are_put_in_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    population = grown()
    calls = []
    ask = population.counterfactual
    monkeypatch.setattr(population, "counterfactual", lambda *a: calls.append(len(a[0])) or ask(*a))
    leave_one_out(population)
    shapley(population)
    assert calls == [11 + 11, 2 + 4 + 8 + 8 + 4]


def test_exact_shapley_values_equal_the_definition() -> None:
    population = grown()
    expected = torch.full((6, 3), NAN, dtype=torch.float64)
    for n in range(6):
        players = (population.lifecycle.alpha[n] > 0).nonzero()[:, 0].tolist()
        worth = {
            frozenset(chosen): accuracy(population, n, [p for p in players if p not in chosen])
            for size in range(len(players) + 1)
            for chosen in itertools.combinations(players, size)
        }
        for player, value in brute_force(worth, players).items():
            expected[n, player] = value
    values = shapley(population)
    close(values, expected)
    for n in range(1, 6):
        gain = accuracy(population, n, []) - accuracy(population, n, [0, 1, 2])
        assert float(values[n].nansum()) == pytest.approx(gain, abs=1e-9)


def test_only_the_environments_that_were_asked_are_measured() -> None:
    population = grown()
    values, everyone = shapley(population, [4, 1, 4]), shapley(population)
    close(values[[1, 4]], everyone[[1, 4]])
    assert bool(values[[0, 2, 3, 5]].isnan().all())
    assert bool(shapley(population, []).isnan().all())
    assert bool(shapley(population, [0]).isnan().all())


def test_a_lone_seeds_shapley_value_is_its_contribution() -> None:
    population = grown()
    close(shapley(population)[1], leave_one_out(population)[1])


def test_sampled_shapley_values_come_near_and_share_out_the_whole_gain(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    population = grown()
    exact = shapley(population)
    monkeypatch.setattr(attribution, "MAX_EXACT_SEEDS", 1)
    with pytest.raises(AttributionError, match=r"environment 2 with 2 seeds on.*samples="):
        shapley(population)
    sampled = shapley(population, samples=400)
    assert torch.equal(sampled.isnan(), exact.isnan())
    close(sampled.nansum(1), exact.nansum(1))
    close(sampled[:2], exact[:2])  # one seed: still exact
    spread = float(exact.nan_to_num().abs().max())
    assert float((sampled - exact).nan_to_num().abs().max()) < 0.1 * max(spread, 1.0)
    assert torch.equal(shapley(population, samples=5).nan_to_num(), sampled_again(population))


def sampled_again(population: Population) -> Tensor:
    """Environment by environment: the orders do not depend on who else is asked."""
    alone = [shapley(population, [n], samples=5)[n] for n in range(len(population))]
    return torch.stack(alone).nan_to_num()


def test_a_population_without_seeds_has_nothing_to_attribute() -> None:
    population = make_population("mlp", 2)
    assert bool(leave_one_out(population).isnan().all())
    assert bool(shapley(population).isnan().all())
    assert tuple(shapley(population, samples=3).shape) == (2, 3)


def test_impossible_questions_are_refused() -> None:
    population = grown()
    with pytest.raises(AttributionError, match=r"no such environment.*0 to 5"):
        shapley(population, [6])
    with pytest.raises(AttributionError, match="at least one order"):
        shapley(population, samples=0)
    with pytest.raises(UnknownNameError, match="did you mean 'validation'"):
        leave_one_out(population, "validaton")
    with pytest.raises(AttributionError, match=r"every subset.*\[3, 6\]"):
        shapley_from_values(torch.zeros(3, 6))
    with pytest.raises(AttributionError, match="every subset"):
        shapley_from_values(torch.zeros(()))


@st.composite
def games(draw: st.DrawFn) -> Tensor:
    players = draw(st.integers(0, 4))
    worth = st.floats(-100, 100)
    return torch.tensor(
        draw(st.lists(worth, min_size=2**players, max_size=2**players)), dtype=torch.float64
    )


@given(games())
def test_shapley_values_of_a_game_equal_the_average_over_all_orders(game: Tensor) -> None:
    players = list(range(len(game).bit_length() - 1))
    worth = {
        frozenset(p for p in players if subset >> p & 1): float(value)
        for subset, value in enumerate(game)
    }
    expected = brute_force(worth, players)
    values = shapley_from_values(game)
    assert values.tolist() == pytest.approx([expected[p] for p in players], abs=1e-9)
    assert float(values.sum()) == pytest.approx(float(game[-1] - game[0]), abs=1e-9)


@given(games(), games())
def test_games_are_solved_side_by_side(one: Tensor, other: Tensor) -> None:
    if len(one) == len(other):
        both = shapley_from_values(torch.stack((one, other)))
        close(both, torch.stack((shapley_from_values(one), shapley_from_values(other))))


def test_known_games() -> None:
    # Three players, a glove market: 0 has the left glove, 1 and 2 a right one each.
    pairs = torch.tensor([0.0, 0, 0, 1, 0, 1, 0, 1])
    assert shapley_from_values(pairs).tolist() == pytest.approx([2 / 3, 1 / 6, 1 / 6])
    additive = torch.tensor([0.0, 3.0, 5.0, 8.0])
    assert shapley_from_values(additive).tolist() == [3.0, 5.0]
