"""Attribution against a slow loop and against the definition, on a real population and on games."""

import itertools
from functools import cache

import pytest
import torch
from torch import Tensor

from esper.garden import attribution
from esper.garden.attribution import leave_one_out, shapley
from esper.leyline import Actions, Blend, LifecycleOp, SeedStage
from esper.leyline.errors import EsperError
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
    close(torch.stack([leave_one_out(population, n) for n in range(6)]), expected)
    assert int((expected.nan_to_num() != 0).sum()) > 3, "some seeds must matter"


def test_all_questions_are_put_in_one_call_and_each_subset_is_run_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    population = grown()
    calls, runs = [], []
    ask, score = population.counterfactual, population._score
    monkeypatch.setattr(population, "counterfactual", lambda *a: calls.append(1) or ask(*a))
    monkeypatch.setattr(population, "_score", lambda *a: runs.append(len(a[2])) or score(*a))
    leave_one_out(population, 4)
    shapley(population, 4)
    assert len(calls) == 2
    assert runs == [3, 2**3 - 1], "beside the network as it is"


def test_shapley_values_equal_the_definition() -> None:
    population = grown()
    for n in range(6):
        players = (population.lifecycle.alpha[n] > 0).nonzero()[:, 0].tolist()
        worth = {
            frozenset(chosen): accuracy(population, n, [p for p in players if p not in chosen])
            for size in range(len(players) + 1)
            for chosen in itertools.combinations(players, size)
        }
        expected = torch.full((3,), NAN, dtype=torch.float64)
        for player, value in brute_force(worth, players).items():
            expected[player] = value
        values = shapley(population, n)
        close(values, expected)
        gain = accuracy(population, n, []) - accuracy(population, n, [0, 1, 2])
        assert float(values.nansum()) == pytest.approx(gain, abs=1e-9)


def test_a_lone_seeds_shapley_value_is_its_contribution() -> None:
    population = grown()
    close(shapley(population, 1), leave_one_out(population, 1))


def test_sampled_shapley_values_come_near_and_share_out_the_whole_gain(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    population = grown()
    exact = torch.stack([shapley(population, n) for n in range(6)])
    monkeypatch.setattr(attribution, "MAX_EXACT_SEEDS", 1)
    sampled = torch.stack([shapley(population, n, samples=400) for n in range(6)])
    assert torch.equal(sampled.isnan(), exact.isnan())
    close(sampled.nansum(1), exact.nansum(1))
    close(sampled[:2], exact[:2])  # one seed: still exact
    spread = float(exact.nan_to_num().abs().max())
    assert float((sampled - exact).nan_to_num().abs().max()) < 0.1 * max(spread, 1.0)
    few = [shapley(population, 3, samples=5) for _ in range(2)]
    assert torch.equal(few[0], few[1]), "the same orders every time"
    assert not torch.equal(few[0], sampled[3])


def test_impossible_questions_are_refused() -> None:
    population = grown()
    with pytest.raises(EsperError, match=r"environment is out of range.*from 0 up to 5"):
        shapley(population, 6)
    with pytest.raises(EsperError, match=r"orders of Shapley .* given: 0; valid: a whole"):
        shapley(population, 0, samples=0)
