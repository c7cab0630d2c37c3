"""What is not finite is never saved, judged or best, and what it spoiled is undone once."""

import math
from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any, get_type_hints

import pytest
import torch

from esper.api.grow_settings import GrowSettings
from esper.archive import ArchiveError, read_archive, write_archive
from esper.archive.tensors import not_finite
from esper.leyline.errors import ActionError, EsperError
from esper.nissa import RunReader
from esper.show.run_facts import read_facts
from esper.show.training_page import page
from esper.simic.agent import NonFiniteError, PPOAgent
from esper.simic.agent.ppo import KIND, VERSION
from esper.simic.agent.update import Update
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
    next(iter(agent.optimizer.moments.values())).fill_(math.inf)


def normaliser(agent: PPOAgent) -> None:
    agent.network.observation_norm.mean[0] = math.nan


def rewards(agent: PPOAgent) -> None:
    agent.buffer._data["rewards"][0, 1] = math.nan
    agent.buffer.compute_advantages_and_returns(agent.buffer._last_values, 0.99, 0.9)


def observations(agent: PPOAgent) -> None:
    agent.buffer._data["states"][0, 1, 0] = math.inf


AFTER_THE_STEPS = (weights, too_large, moments, normaliser)
POISONS = (*AFTER_THE_STEPS, rewards, observations)
Poison = Callable[[PPOAgent], None]


def poisoned(patch: pytest.MonkeyPatch, poison: Poison, *rounds: int) -> list[int]:
    """Every update of these rounds is spoiled; returns the rounds that were, as they come."""
    spoiled: list[int] = []
    update, figures = PPOAgent.update, Update._figures
    number = 0
    learning: list[PPOAgent] = []

    def updated(agent: PPOAgent) -> Any:
        nonlocal number
        number += 1
        learning[:] = [agent] if number in rounds else []
        if learning:
            spoiled.append(number)
            if poison not in AFTER_THE_STEPS:
                poison(agent)
        return update(agent)

    def measured(of: Update, *given: Any) -> Any:
        """The last step is taken: no other one will meet what it came to."""
        found = figures(of, *given)
        if learning and poison in AFTER_THE_STEPS:
            poison(learning[0])
        return found

    patch.setattr(PPOAgent, "update", updated)
    patch.setattr(Update, "_figures", measured)
    return spoiled


@pytest.mark.parametrize("poison", POISONS, ids=lambda poison: poison.__name__)
def test_a_round_that_is_not_finite_is_undone_and_nothing_of_it_is_kept(
    poison: Poison, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tiny_run(tmp_path / "run", rounds=2)
    reports: list[RoundReport] = []
    with monkeypatch.context() as patch:
        spoiled = poisoned(patch, poison, 2)
        assert train_run(run, listener=reports.append)
    assert spoiled == [2]
    assert [report.metrics is None for report in reports] == [False, True]
    assert "was undone" in str(reports[1].anomalies[0])
    one, two = (run.checkpoint(round_) / "agent-0" for round_ in (1, 2))
    before, after = (read_archive(each, kind=KIND, version=VERSION).tensors for each in (one, two))
    assert not not_finite(after)
    for name in before:
        if not name.startswith("random."):  # so that the next round is another one
            assert torch.equal(before[name], after[name]), name
    assert math.isfinite(reports[1].best or math.nan), "it was judged as it was before"


def test_twice_in_a_row_ends_the_run_and_says_where_the_sound_agent_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, whole = tiny_run(tmp_path / "run"), tiny_run(tmp_path / "whole")
    with monkeypatch.context() as patch:
        poisoned(patch, too_large, 3, 4)
        with pytest.raises(RunError, match=r"rounds 3 and 4.*round-000003 is sound"):
            train_run(run)
    PPOAgent.load(run.checkpoint(3) / "agent-0")
    with RunReader(run.path) as reader:
        assert [row["name"] for row in reader.each("anomalies")] == ["not_a_number"]
    told = esper_here("show", run.path)
    assert "Round 3 was undone" in " ".join(told.stdout.split()), told.stderr
    assert "Round 3 was undone" in str(page(read_facts(run.path)))
    # The first of the two counts after the run was stopped, too.
    with monkeypatch.context() as patch:
        poisoned(patch, too_large, 1)
        with pytest.raises(RunError, match="rounds 3 and 4"):
            train_run(run)
    assert train_run(run)
    with monkeypatch.context() as patch:
        poisoned(patch, weights, 3)
        assert train_run(whole)
    assert_same_agents(run, whole)


def assert_same_agents(run: RunFolder, other: RunFolder) -> None:
    ours, theirs = (
        read_archive(each.checkpoint(ROUNDS) / "agent-0", kind=KIND, version=VERSION).tensors
        for each in (run, other)
    )
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_an_agent_that_is_not_finite_is_neither_saved_nor_loaded_and_does_not_decide(
    tmp_path: Path,
) -> None:
    run = tiny_run(tmp_path / "run", rounds=1)
    assert train_run(run)
    agent = PPOAgent.load(run.best)
    good = agent.state()
    for poison in AFTER_THE_STEPS:
        poison(agent)
        if poison is not too_large:
            with pytest.raises(NonFiniteError, match="is not saved"):
                agent.save(tmp_path / "agent")
        agent.undo(good)
    assert not (tmp_path / "agent").exists()
    too_large(agent)
    with pytest.raises(ActionError, match="cannot decide"):
        Trainer(run).judge.judge(LearnedController(agent.network))
    stored = read_archive(run.best, kind=KIND, version=VERSION)
    tensors = dict(stored.tensors)
    tensors["network.value_head.0.weight"] = tensors["network.value_head.0.weight"] * math.nan
    forged = write_archive(
        tmp_path / "forged", kind=KIND, version=VERSION, tensors=tensors, notes=stored.notes
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
def test_settings_that_are_not_finite_are_refused_wherever_they_are(
    value: float, tmp_path: Path
) -> None:
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
