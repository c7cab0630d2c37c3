"""Training FLOPs: counted by hand for the garden's hosts, and added up over an episode."""

import pytest
import torch

from esper.garden import Episodes, Playground, evaluate, find_suite
from esper.kasmina.isolation import Isolation
from esper.leyline.lifecycle import Lifecycle
from esper.leyline.ops import Blend
from esper.leyline.stages import SeedStage
from esper.tamiyo.controllers import Arm, FixedSchedule, NeverGrow
from esper.tolaria.flops import FlopTable, count_flops
from tests.garden.plots import CONTEXTS, DOUBLE, HORIZON

BATCHES = 2

# 40 points through three convolutions of stride 2 (20, 10 and 5 places), and the head.
CONV1D = 2 * (20 * 8 * 1 * 5 + 10 * 8 * 8 * 5 + 5 * 8 * 8 * 5 + 8 * 5 * 10)
MLP = 2 * (40 * 16 + 16 * 16 + 16 * 10)
CONV_EARLY = 2 * (2 * 20 * 8 * 8 * 5)
TOKEN_MIX_EARLY = 2 * (2 * 8 * 20 * 10)
CONVPOOL_EARLY = 2 * (40 * 16 * 1 * 5 + 16 * 40)


@pytest.fixture(autouse=True)
def _short_epochs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("esper.garden.episodes.GARDEN_BATCHES", BATCHES)


def episodes_of(suite: str) -> Episodes:
    return Episodes(find_suite(suite).training[:1], 1)


def test_hosts_and_seeds_count_two_for_each_multiply_add() -> None:
    episodes = episodes_of("garden")
    names, table = episodes.population.catalogue.names, episodes.flops
    assert table.host == CONV1D
    assert int(table.seeds[0, names.index("conv")]) == CONV_EARLY
    assert int(table.seeds[0, names.index("token_mix")]) == TOKEN_MIX_EARLY
    assert int(table.seeds[0, names.index("norm")]) == 0, "no product in it"
    assert table.gates.tolist() == [2 * 8 * 20, 2 * 8 * 10, 2 * 8 * 5]
    episodes = episodes_of("garden_mlp")
    assert episodes.flops.host == MLP
    convpool = episodes.population.catalogue.index("convpool")
    assert int(episodes.flops.seeds[0, convpool]) == CONVPOOL_EARLY


def test_counting_leaves_random_numbers_alone() -> None:
    episodes = episodes_of("garden")
    host = episodes.population.build_host()
    before = torch.get_rng_state()
    count_flops(host, torch.zeros(1, 40), episodes.population.catalogue)
    assert torch.equal(torch.get_rng_state(), before)


def test_an_epoch_costs_three_passes_of_what_shows_and_isolated_seeds_a_pass_more() -> None:
    table = FlopTable(
        100, torch.tensor([[10, 20], [30, 0]]), torch.tensor([1, 2]), torch.tensor([90, 40])
    )
    life = Lifecycle.dormant(hosts=4, slots=2)
    life.stage[:, 0] = torch.tensor(
        [SeedStage.DORMANT, SeedStage.TRAINING, SeedStage.HOLDING, SeedStage.TRAINING]
    )
    life.blueprint[:, 0] = torch.tensor([-1, 1, 0, 1])
    life.blend[:, 0] = torch.tensor([-1, Blend.RAMP, Blend.GATE, Blend.RAMP])
    life.alpha[2, 0] = 0.5
    life.stage[3, 1], life.blueprint[3, 1], life.alpha[3, 1] = SeedStage.FOSSILIZED, 0, 1.0
    found = table.training(life, samples=5)
    passes = [100, 100 + 120, 100 + 10 + 1, 130 + 150]
    assert found.tolist() == [15.0 * each for each in passes]
    # Forward through all of the host and back to the slot; three times through the shadow.
    costs = table.shadows(life)  # [N, S, P]
    assert costs[0].mul(300).round().tolist() == [[220, 250], [230, 140]]
    assert costs[2].mul(300).round().tolist() == [[242, 272], [252, 162]], "the seed counts twice"
    shares = torch.zeros(4, 2, 2).double()
    shares[0, 0, 1], shares[2, 1, 0] = 0.4, 1.0
    more = table.training(life, samples=5, shadowed=shares) - found
    torch.testing.assert_close(more, torch.tensor([500.0, 0.0, 1260.0, 0.0]).double())
    straight = table.training(life, samples=5, isolation=Isolation.STRAIGHT_THROUGH)
    assert straight.tolist() == [15.0 * each for each in (100, 120, 111, 150)]


def test_an_episode_adds_up_its_epochs_and_results_carry_the_sum() -> None:
    arm = Arm(slot="early", blueprint="convpool", blend="immediate", epoch=3)
    ground = Playground(horizon=HORIZON, config=DOUBLE)
    results = evaluate([NeverGrow(), FixedSchedule(arm)], CONTEXTS[:1], ground, seeds=1)
    samples = 3 * 50 * BATCHES
    assert results[0].flops == samples * HORIZON * MLP
    assert results[1].flops == samples * (HORIZON * MLP + (HORIZON - 3) * CONVPOOL_EARLY)
