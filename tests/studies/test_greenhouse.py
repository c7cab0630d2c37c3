"""Gains as data: collected in parts, ranked, and gone on from by PPO."""

from pathlib import Path

import pytest
import torch

from esper.garden import LAYOUT
from esper.simic.agent.ppo import PPOAgent
from esper.tamiyo import TokenActorCritic
from studies import greenhouse
from studies.greenhouse import Gains, choice_scores, figures_of, parsed, ranking_loss


@pytest.fixture(autouse=True, scope="module")
def _small() -> object:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("esper.garden.episodes.GARDEN_BATCHES", 2)
        patch.setattr(greenhouse, "PLOTS_OF_PART", 1)
        yield


def run(*words: object) -> None:
    options = parsed([str(word) for word in words])
    options.work(options)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("gains")
    for plots in (1, 2):  # stopped in between
        run("collect", "--out", out, "--plots", plots, "--cases", 2, "--schedules", 2,
            "--longest", 12, "--seed", 8)  # fmt: skip
    return out


def test_gains_are_kept_in_parts_with_what_was_seen_and_done(folder: Path) -> None:
    assert sorted(file.name for file in folder.iterdir()) == [
        "gains-000000.npz",
        "gains-000001.npz",
    ]
    data = Gains.load(folder)
    assert data.observations.shape == (4, LAYOUT.state_dim)
    assert bool(data.observations.isfinite().all())
    assert data.gains.shape == (4, 4)  # the control, two schedules, the rule
    assert float(data.gains[:, 0].abs().max()) == 0.0
    assert bool((data.actions[:, 1:3, 0] == 1).any())  # something was planted
    assert data.plot.tolist() == [0, 0, 1, 1]


def test_a_fit_prefers_what_gained_more(folder: Path, tmp_path: Path) -> None:
    data = Gains.load(folder)
    data.gains[:, 1] = torch.where(data.actions[:, 1, 0] == 1, 10.0, data.gains[:, 1])
    torch.manual_seed(0)
    network = TokenActorCritic(LAYOUT)
    optimiser = torch.optim.Adam(network.parameters(), lr=3e-3)
    first = figures_of(network, data)["loss"]
    for _ in range(15):
        optimiser.zero_grad()
        ranking_loss(choice_scores(network, data), data).backward()
        optimiser.step()
    assert figures_of(network, data)["loss"] < 0.7 * first
    assert figures_of(network, data)["chosen"] > figures_of(network, data)["random"]


def test_ppo_goes_on_from_a_fit_and_from_its_last_round(folder: Path, tmp_path: Path) -> None:
    run("fit", "--gains", folder, "--out", tmp_path / "fitted", "--epochs", 1)
    words = ("train", "--out", tmp_path / "run", "--start", tmp_path / "fitted", "--envs", 4,
             "--plots", 2, "--players", 2, "--longest", 8, "--minibatches", 1)  # fmt: skip
    run(*words, "--rounds", 1)
    run(*words, "--rounds", 2)
    run("train", *words[1:2], tmp_path / "whole", *words[3:], "--rounds", 2)
    one, other = (PPOAgent.load(tmp_path / name / "agent" / "round-2") for name in ("run", "whole"))
    for left, right in zip(one.network.parameters(), other.network.parameters(), strict=True):
        assert torch.equal(left, right)
