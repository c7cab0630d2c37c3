"""Non-finite numbers are never saved or evaluated; one non-finite update is reverted."""

import math
from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any, get_type_hints

import pytest
import torch

from esper.api.grow_settings import GrowSettings
from esper.archive import Archive, ArchiveError, read_archive, write_archive
from esper.archive.tensors import not_finite
from esper.leyline.errors import ActionError, EsperError
from esper.nissa import RunReader
from esper.show.run_facts import read_facts
from esper.show.training_page import page
from esper.simic.agent import CHECKPOINT_VERSION, NonFiniteError, PPOAgent
from esper.simic.agent import update as update_module
from esper.simic.agent.saved_agents import KIND
from esper.simic.agent.update import optimizer_tensors
from esper.simic.training import RoundReport, RunError, RunFolder, Trainer, train_run
from esper.simic.training.config import read_config
from esper.tamiyo.controllers import LearnedController
from tests.programs import esper_here
from tests.simic.training.tiny import ROUNDS, TINY, tiny_run


def weights(agent: PPOAgent) -> None:
    with torch.no_grad():
        agent.network.value_head[0].weight[0, 0] = math.nan


def too_large(agent: PPOAgent) -> None:
    """Finite, and all that follows from it is not."""
    with torch.no_grad():
        for parameter in agent.network.parameters():
            parameter.mul_(1e36)


def moments(agent: PPOAgent) -> None:
    optimizer_state = optimizer_tensors(agent.network, agent.optimizer)
    name = next(name for name in optimizer_state if name.endswith("exp_avg"))
    optimizer_state[name].fill_(math.inf)


def normalizer(agent: PPOAgent) -> None:
    agent.network.observation_norm.mean[0] = math.nan


def rewards(agent: PPOAgent) -> None:
    buffer = agent.buffer
    buffer.rewards[0, 1] = math.nan
    last_values = torch.zeros(buffer.num_envs)
    buffer.compute_advantages_and_returns(gamma=0.99, gae_lambda=0.9, last_values=last_values)


def observations(agent: PPOAgent) -> None:
    agent.buffer.states[0, 1, 0] = math.inf


AFTER_LAST_STEP = (weights, too_large, moments, normalizer)
POISONS = (*AFTER_LAST_STEP, rewards, observations)
Poison = Callable[[PPOAgent], None]


def poison_updates(patch: pytest.MonkeyPatch, poison: Poison, *rounds: int) -> list[int]:
    """Poison the updates with these numbers; return a list that they are added to."""
    poisoned_rounds: list[int] = []
    original_update = PPOAgent.update
    original_metrics = update_module._collect_metrics
    number = 0
    poisoned_agent: PPOAgent | None = None

    def update(agent: PPOAgent) -> Any:
        nonlocal number, poisoned_agent
        number += 1
        poisoned_agent = agent if number in rounds else None
        if poisoned_agent is not None:
            poisoned_rounds.append(number)
            if poison not in AFTER_LAST_STEP:
                poison(agent)
        return original_update(agent)

    def collect_metrics(*arguments: Any) -> Any:
        """Poison the agent after the last step: no further step uses the number."""
        metrics = original_metrics(*arguments)
        if poisoned_agent is not None and poison in AFTER_LAST_STEP:
            poison(poisoned_agent)
        return metrics

    patch.setattr(PPOAgent, "update", update)
    patch.setattr(update_module, "_collect_metrics", collect_metrics)
    return poisoned_rounds


@pytest.mark.parametrize("poison", POISONS, ids=lambda poison: poison.__name__)
def test_non_finite_update_is_reverted(
    poison: Poison, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tiny_run(tmp_path / "run", rounds=2)
    reports: list[RoundReport] = []
    with monkeypatch.context() as patch:
        poisoned_rounds = poison_updates(patch, poison, 2)
        assert train_run(run, on_round=reports.append)
    assert poisoned_rounds == [2]
    assert [report.metrics is None for report in reports] == [False, True]
    assert "was reverted" in str(reports[1].anomalies[0])
    before = read_agent(run.checkpoint(1) / "agent-0").tensors
    after = read_agent(run.checkpoint(2) / "agent-0").tensors
    assert not not_finite(after)
    for name in before:
        if not name.startswith("random."):  # the next rollout is a different one
            assert torch.equal(before[name], after[name]), name
    best_score = reports[1].best_score
    assert best_score is not None, "the restored agent was evaluated"
    assert math.isfinite(best_score)


def test_second_reverted_update_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, whole = tiny_run(tmp_path / "run"), tiny_run(tmp_path / "whole")
    with monkeypatch.context() as patch:
        poison_updates(patch, too_large, 3, 4)
        with pytest.raises(RunError, match=r"rounds 3 and 4.*round-000003 is intact"):
            train_run(run)
    PPOAgent.load(run.checkpoint(3) / "agent-0")
    with RunReader(run.path) as reader:
        assert [row["name"] for row in reader.each("anomalies")] == ["not_a_number"]
    shown = esper_here("show", run.path)
    assert "The update of round 3 was reverted" in " ".join(shown.stdout.split()), shown.stderr
    assert "The update of round 3 was reverted" in str(page(read_facts(run.path)))

    # The first failure is stored in the checkpoint, so it also counts after a resume.
    with monkeypatch.context() as patch:
        poison_updates(patch, too_large, 1)
        with pytest.raises(RunError, match="rounds 3 and 4"):
            train_run(run)
    assert train_run(run)
    with monkeypatch.context() as patch:
        poison_updates(patch, weights, 3)
        assert train_run(whole)
    assert_same_agents(run, whole)


def read_agent(path: Path) -> Archive:
    return read_archive(path, kind=KIND, version=CHECKPOINT_VERSION)


def assert_same_agents(run: RunFolder, other: RunFolder) -> None:
    tensors = read_agent(run.checkpoint(ROUNDS) / "agent-0").tensors
    other_tensors = read_agent(other.checkpoint(ROUNDS) / "agent-0").tensors
    assert all(torch.equal(tensors[name], other_tensors[name]) for name in tensors)


def test_non_finite_agent_is_neither_saved_nor_loaded_nor_used(tmp_path: Path) -> None:
    run = tiny_run(tmp_path / "run", rounds=1)
    assert train_run(run)
    agent = PPOAgent.load(run.best)
    snapshot = agent.snapshot()
    for poison in AFTER_LAST_STEP:
        poison(agent)
        if poison is not too_large:
            with pytest.raises(NonFiniteError, match="is not saved"):
                agent.save(tmp_path / "agent")
        agent.restore_snapshot(snapshot)
    assert not (tmp_path / "agent").exists()
    too_large(agent)
    with pytest.raises(ActionError, match="cannot decide"):
        Trainer(run).evaluator.evaluate(LearnedController(agent.network))
    stored = read_agent(run.best)
    tensors = dict(stored.tensors)
    tensors["network.value_head.0.weight"] = tensors["network.value_head.0.weight"] * math.nan
    forged = write_archive(
        tmp_path / "forged",
        kind=KIND,
        version=CHECKPOINT_VERSION,
        tensors=tensors,
        notes=stored.notes,
    )
    with pytest.raises(ArchiveError, match=r"not finite.*value_head"):
        PPOAgent.load(forged)


def floats_of(settings: Any, before: str = "") -> list[tuple[str, Any, str]]:
    """(dotted name, owner, name) of every number with a fraction."""
    found = []
    for each in fields(settings):
        value = getattr(settings, each.name)
        if is_dataclass(value):
            found += floats_of(value, f"{before}{each.name}.")
        elif "float" in str(get_type_hints(type(settings))[each.name]):
            found.append((before + each.name, settings, each.name))
    return found


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_non_finite_settings_are_refused(value: float, tmp_path: Path) -> None:
    training, growing = floats_of(TINY), floats_of(GrowSettings(budget=None, loss="mse"))
    assert len(training) > 15
    assert len(growing) >= 2
    for dotted, owner, name in training + growing:
        given = {"head": value} if name == "entropy_targets" else value
        with pytest.raises(EsperError, match=name.replace("entropy_targets", "entropy target")):
            replace(owner, **{name: given})
        if isinstance(owner, GrowSettings):
            continue
        file = tmp_path / "settings.toml"
        *tables, last = dotted.split(".")
        text = f"{{ head = {value} }}" if name == "entropy_targets" else str(value)
        file.write_text("".join(f"[{each}]\n" for each in tables) + f"{last} = {text}\n")
        with pytest.raises(EsperError, match="cannot be used"):
            read_config(file)
