"""The trainer in this process: what is judged, kept, annealed and told, and what is refused."""

import json
import re
import shutil
import sqlite3
from collections.abc import Sequence
from contextlib import closing, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from esper.archive import Archive, read_archive
from esper.garden import episodes as episodes_module
from esper.leyline.constants import SCORED_EPOCHS
from esper.leyline.errors import EsperError
from esper.leyline.ops import LifecycleOp
from esper.leyline.stages import LIVING_STAGES
from esper.nissa import Event, RunReader, RunStore
from esper.simic.agent import CHECKPOINT_VERSION
from esper.simic.agent.saved_agents import KIND
from esper.simic.training import (
    RoundReport,
    RunError,
    RunFolder,
    Trainer,
    load_controller,
    to_toml,
    train_run,
)
from esper.simic.training.evaluator import Evaluator
from esper.tolaria.plan import HOST
from tests.simic.training.tiny import (
    ENVS,
    FACTS,
    HORIZON,
    ROUNDS,
    TINY,
    assert_same,
    digest,
    tiny_run,
)


def replace_agent_scores(monkeypatch: pytest.MonkeyPatch, *scores: float) -> None:
    """Replace the score of the agent in each evaluation by the next one of `scores`."""
    remaining = list(scores)
    original = Evaluator.evaluate

    def evaluate(evaluator: Evaluator, controller: Any, **options: Any) -> Any:
        result = original(evaluator, controller, **options)
        if controller.name != "tamiyo":
            return result
        return replace(result, scores=torch.full_like(result.scores, remaining.pop(0)))

    monkeypatch.setattr(Evaluator, "evaluate", evaluate)


@pytest.fixture(scope="module")
def reports() -> list[RoundReport]:
    return []


@pytest.fixture(scope="module")
def finished_run(tmp_path_factory: pytest.TempPathFactory, reports: list[RoundReport]) -> RunFolder:
    """A run, never interrupted; `reports` are of its rounds."""
    run = tiny_run(tmp_path_factory.mktemp("whole") / "run")
    assert train_run(run, on_round=reports.append)
    return run


def test_every_round_has_a_report(finished_run: RunFolder, reports: list[RoundReport]) -> None:
    assert [report.round for report in reports] == [1, 2, 3, 4]
    assert [report.evaluation is not None for report in reports] == [False, True, False, True]
    for report in reports:
        assert report.returns.shape == (ENVS,)
        assert {"play", "learn", "decide", "step", "report"} <= report.seconds.keys()
        assert all(sum(counts) == ENVS for counts in report.stages.values())


class Curves:
    """A tracker that keeps what it hears."""

    name = "curves"
    heard: ClassVar[list[Event]] = []
    places: ClassVar[list[Path]] = []

    def __init__(self, path: Path) -> None:
        self.places.append(path)

    @classmethod
    def require_installed(cls) -> None: ...

    def write(self, batch: Sequence[Event]) -> None:
        self.heard.extend(batch)

    def close(self) -> None: ...


def test_run_sends_events_to_configured_sinks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("esper.nissa.trackers.TRACKERS", {"curves": Curves})
    run = tiny_run(tmp_path / "run", sinks=("curves",))
    with closing(Trainer(run, stop=lambda: True)) as trainer:  # stopped as soon as it has begun
        assert not trainer.begin()
    assert Curves.places == [run.path]
    (start,) = Curves.heard
    assert start.kind == "run"


def test_run_keeps_last_checkpoints_and_best_agent(finished_run: RunFolder) -> None:
    assert finished_run.rounds() == [ROUNDS - 2, ROUNDS - 1, ROUNDS]
    for round_ in finished_run.rounds():
        finished_run.read_checkpoint(round_)
    names = {each.name for each in (finished_run.path / "checkpoints").iterdir()}
    assert names == {f"round-{round_:06d}" for round_ in finished_run.rounds()}
    assert load_controller(finished_run.path).name == "tamiyo(run)"


def test_every_decision_and_step_is_logged_once(finished_run: RunFolder) -> None:
    everything = [
        (round_, step, env)
        for round_ in range(1, ROUNDS + 1)
        for step in range(HORIZON)
        for env in range(ENVS)
    ]
    with RunReader(finished_run.path) as reader:
        for table in ("decisions", "steps"):
            rows = reader.query(f"select round, step, env from {table} order by 1, 2, 3").rows  # noqa: S608
            assert rows == everything, "no row was idle in this run"
        ended = reader.query("select round, env from episodes order by 1, 2").rows
        assert ended == [(round_, env) for round_ in range(1, 5) for env in range(ENVS)]
        terms = reader.query(
            "select max(abs(reward - reward_objective - reward_rent - reward_interventions "
            "- reward_shaping - reward_rollback)) from steps"
        ).rows[0][0]
        assert terms < 1e-9
        assert reader.query("select count(distinct round) from updates").rows == [(ROUNDS,)]
        assert not list(reader.each("anomalies"))
        assert not reader.dropped()
        assert not list(reader.each("notes"))
        (started,) = reader.runs()
        assert started["round"] == 0
        assert started["config"]["envs"] == ENVS
        assert started["seeds"] == {"run": TINY.seed}


def test_episode_return_is_the_sum_of_rewards(finished_run: RunFolder) -> None:
    with RunReader(finished_run.path) as reader:
        wrong = reader.query(
            "select count(*) from episodes e join (select round, env, sum(reward) as total "
            "from steps group by round, env) s on e.round = s.round and e.env = s.env "
            "where abs(e.returns - s.total) > 1e-9"
        ).rows
        assert wrong == [(0,)]


def test_stage_transitions_have_reasons_of_gates(finished_run: RunFolder) -> None:
    with RunReader(finished_run.path) as reader:
        rows = reader.query("select after, cause, reason from lifecycle").rows
    said = {after: reason for after, _, reason in rows}
    assert all(reason for _, _, reason in rows)
    assert re.fullmatch(r"its \d+ parameters fit the budget", said["GERMINATED"])
    assert said["TRAINING"] == "what is planted trains at once"
    ours = [(after, cause, reason) for after, cause, reason in rows if after == "BLENDING"]
    for _, cause, reason in ours:
        found = "no gradient was asked for" if cause == "GERMINATE" else "gradient norm is"
        assert found in reason
    assert all("GOVERNOR" not in cause for _, cause, _ in rows)


def test_refused_ops_of_logged_environments_have_reasons(
    finished_run: RunFolder,
) -> None:
    with RunReader(finished_run.path) as reader:
        refused = list(reader.each("refusals"))
        chosen = {
            (row["round"], row["step"], row["env"], LifecycleOp(row["op"]).name, row["slot"])
            for row in reader.each("decisions")
        }
        places = {name: place for place, name in enumerate(reader.layout.slots)}
    assert refused
    for row in refused:
        assert not row["reason"].startswith("the slot is")
        assert row["env"] < finished_run.config.logged_envs
        key = (*(row[name] for name in ("round", "step", "env", "op")), places[row["slot"]])
        assert key not in chosen, "nobody did what a gate refused"


@pytest.mark.parametrize(("error", "state"), [(None, "stopped"), (ValueError, "failed")])
def test_end_of_run_is_logged(tmp_path: Path, error: type[Exception] | None, state: str) -> None:
    run = tiny_run(tmp_path / "run")
    with (
        pytest.raises(error) if error else nullcontext(),
        Trainer(run, stop=lambda: True) as trainer,
    ):
        assert not trainer.begin()
        if error:
            raise error("of yours")
    with RunReader(run.path) as reader:
        told = reader.query("SELECT state, text FROM ends").rows
    assert told == [(state, "ValueError of yours" if error else "")]


def test_finished_run_is_logged_as_finished(finished_run: RunFolder) -> None:
    with RunReader(finished_run.path) as reader:
        assert reader.query("SELECT round, state FROM ends").rows == [(ROUNDS, "finished")]


def test_seeds_removed_by_governor_have_its_reason(tmp_path: Path) -> None:
    run = tiny_run(tmp_path / "run")
    trainer = Trainer(run)
    assert trainer.begin()
    episodes, alone = trainer.garden.episodes, trainer.garden.episodes.train_epoch

    def poisoned(plan: Any) -> Any:
        record = alone(plan)
        life = episodes.population.lifecycle
        if bool((life.at(*LIVING_STAGES) & (life.age > 0)).any()):  # from an epoch before
            episodes.population.pools[HOST].state.theta.fill_(torch.nan)
        return record

    episodes.train_epoch = poisoned  # type: ignore[method-assign]
    assert trainer.train()
    trainer.close()
    with RunReader(run.path) as reader:
        removed = reader.query("select env, reason from lifecycle where cause = 'GOVERNOR'").rows
        tripped = dict(reader.query("select env, reason from rollbacks").rows)
    assert removed
    for env, reason in removed:
        assert reason == tripped[env]
        assert "rolled back" in reason


def test_evaluation_cases_are_never_used_in_training(finished_run: RunFolder) -> None:
    trainer = Trainer(finished_run)
    drawn = {(case.context.key, case.seed) for case in trainer.draw.pool()}
    judged = {(case.context.key, case.seed) for case in trainer.evaluator.cases}
    assert drawn
    assert judged
    assert not drawn & judged
    with RunReader(finished_run.path) as reader:
        seeds = {row[0] for row in reader.query("select distinct seed from episodes").rows}
        contexts = reader.query("select distinct context from evaluations order by 1").rows
    assert seeds <= {case.seed for case in trainer.draw.pool()}
    assert contexts == [("all",), ("fixed",), ("xor",)]


def test_evaluation_uses_no_test_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All that a controller is judged and rewarded by, with test data made useless."""
    seeing = tiny_run(tmp_path / "seeing", rounds=2)
    assert train_run(seeing)
    alone = episodes_module.Episodes.advance

    def blinded(episodes: Any, *given: Any) -> Any:
        epoch = alone(episodes, *given)
        episodes.ledger.test.fill_(float("nan"))
        return epoch

    monkeypatch.setattr(episodes_module.Episodes, "advance", blinded)
    run = tiny_run(tmp_path / "run", rounds=2)
    assert train_run(run)
    assert SCORED_EPOCHS <= HORIZON
    with RunReader(run.path) as reader, RunReader(seeing.path) as other:
        question = "select controller, context, round, score from evaluations"
        assert reader.query(question).rows == other.query(question).rows
        assert reader.query("select count(*) from evaluations where score is null").rows == [(0,)]


def test_best_agent_has_the_best_score(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    replace_agent_scores(monkeypatch, 0.5, 0.9, 0.7, 0.9)
    run = tiny_run(
        tmp_path / "run",
        evaluation=replace(TINY.evaluation, every=1, baselines=()),
    )
    weights = {}
    best = []

    def listen(report: RoundReport) -> None:
        best.append(report.best_score)
        agent = read_archive(run.best, kind=KIND, version=CHECKPOINT_VERSION)
        weights[report.round] = agent.tensors["network.value_head.0.weight"]

    assert train_run(run, on_round=listen)
    assert best == [0.5, 0.9, 0.9, 0.9]
    assert not torch.equal(weights[1], weights[2])
    assert torch.equal(weights[2], weights[3])
    assert torch.equal(weights[2], weights[4]), "as good is not better"


@pytest.mark.parametrize("every", [1, 3])
def test_resume_after_stop_matches_uninterrupted_run(
    every: int, finished_run: RunFolder, tmp_path: Path
) -> None:
    run = tiny_run(tmp_path / "run", checkpoint_every=every)
    rates: dict[int, float] = {}

    def trained_until(round_: int) -> bool:
        reached = [0]

        def listen(report: RoundReport) -> None:
            reached[0] = report.round
            rates[report.round] = report.metrics["learning_rate"]

        trainer = Trainer(run, stop=lambda: reached[0] >= round_)
        try:
            return trainer.begin() and trainer.train(listen)
        finally:
            trainer.close()

    assert not trained_until(0), "before the first round"
    assert run.rounds() == []
    assert not trained_until(2)
    assert run.rounds()[-1] == 2
    assert trained_until(9)
    assert digest(run) == digest(finished_run)
    if every == 1:
        assert_same(run, finished_run)
    annealed = {n: TINY.annealed_hyperparameters(n - 1)["lr"] for n in range(1, ROUNDS + 1)}
    assert rates == pytest.approx(annealed)
    with RunReader(run.path) as reader:
        assert [started["round"] for started in reader.runs()] == [0, 2]


def test_failing_sink_does_not_stop_training(
    finished_run: RunFolder,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = tiny_run(tmp_path / "run")
    alone, commits = RunStore.commit, []

    def commit(store: RunStore, round: int) -> None:
        alone(store, round)
        commits.append(round)
        if round == 2:
            store._connection.execute("PRAGMA query_only = 1")  # as when it cannot be written

    with monkeypatch.context() as patch:
        patch.setattr(RunStore, "commit", commit)
        assert train_run(run)
    told = [line for line in capsys.readouterr().err.splitlines() if "Telemetry sink" in line]
    assert len(told) == 1
    assert "training goes on" in told[0]
    assert commits == [0, 1, 2]
    assert run.rounds()[-1] == ROUNDS
    for part in ("agent-0", "state"):
        ours, theirs = (
            (each.checkpoint(ROUNDS) / part / "manifest.json").read_text(encoding="utf-8")
            for each in (run, finished_run)
        )
        assert ours == theirs, "what was learned does not depend on telemetry"
    (run.path / "config.toml").write_text(
        to_toml(replace(run.config, rounds=ROUNDS + 1)), encoding="utf-8"
    )
    assert train_run(run)
    with RunReader(run.path) as reader:
        assert [row["text"] for row in reader.each("notes")] == [
            "Telemetry for rounds 3 to 4 is incomplete."
        ]
        assert reader.query("select count(*) from decisions where round = 5").rows == [
            (HORIZON * ENVS,)
        ]


def test_full_disk_raises_run_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tiny_run(tmp_path / "run")

    def full(*given: Any, **named: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("esper.archive.tensors.save", full)
    with pytest.raises(RunError, match="No space left on device"):
        train_run(run)
    monkeypatch.undo()
    with run.locked():
        pass


def test_resume_with_changed_settings_raises_run_error(
    finished_run: RunFolder, tmp_path: Path
) -> None:
    import shutil

    run = RunFolder(tmp_path / "run")
    shutil.copytree(finished_run.path, run.path)
    for changes in ({"lstm": 32}, {"envs": 8}, {"seed": 1}, {"seeds_per_context": 2}):
        (run.path / "config.toml").write_text(to_toml(replace(TINY, **changes)), encoding="utf-8")
        with pytest.raises(RunError, match="was changed since"):
            train_run(run)
    (run.path / "config.toml").write_text(
        to_toml(replace(TINY, checkpoint_every=7)), encoding="utf-8"
    )
    assert train_run(run), "it is finished"


def test_new_run_needs_an_empty_folder(tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("mine", encoding="utf-8")
    with pytest.raises(RunError, match="is not empty"):
        tiny_run(tmp_path / "full")
    (tmp_path / "file").write_text("", encoding="utf-8")
    with pytest.raises(RunError, match="is not empty"):
        tiny_run(tmp_path / "file")
    run = tiny_run(tmp_path / "empty")
    with pytest.raises(RunError, match=f"esper resume {run.path}"):
        tiny_run(run.path)


def test_half_created_run_can_be_created_again(tmp_path: Path) -> None:
    run = tiny_run(tmp_path / "run")
    (run.path / "config.toml").rename(run.path / ".config.toml")
    with pytest.raises(RunError, match="is not a run"):
        RunFolder.open(run.path)
    tiny_run(run.path)
    RunFolder.open(run.path)


def test_run_uses_the_suite_of_its_start(tmp_path: Path) -> None:
    run = tiny_run(tmp_path / "run", suite="gone/with/the/wind.toml")
    assert run.suite.to_dict() == FACTS["suite"]
    bare = RunFolder.create(tmp_path / "bare", replace(TINY, suite="garden_mlp"), {})
    assert bare.suite.name == "garden_mlp"


def test_damaged_facts_raise_run_error(tmp_path: Path) -> None:
    run = tiny_run(tmp_path / "run")
    (run.path / "run.json").write_text("{", encoding="utf-8")
    with pytest.raises(RunError, match="cannot be read"):
        train_run(run)


def test_resume_with_another_backend_is_noted(
    finished_run: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(finished_run.path, tmp_path / "run")
    run = RunFolder(tmp_path / "run")
    assert run.read_checkpoint(ROUNDS).notes["backend"] == "fused"
    monkeypatch.setattr(Trainer, "_backend", "chip")
    trainer = Trainer(run)
    trainer.begin()
    trainer.close()
    with RunReader(run.path) as reader:
        (note,) = reader.each("notes")
    assert note["text"] == "The executor changed from fused to chip; rounding differs."


@pytest.mark.parametrize("deterministic", [False, True])
def test_all_populations_use_backend_and_determinism(tmp_path: Path, deterministic: bool) -> None:
    backend = "fused" if deterministic else "auto"
    run = tiny_run(tmp_path / "run", deterministic=deterministic, backend=backend)
    assert run.config.deterministic is deterministic, "it is kept with the run"
    trainer = Trainer(run)
    for config in (
        trainer.garden.population.config,
        trainer.controls.world["config"],
        trainer.evaluator.controls.world["config"],
    ):
        assert config is not None
        assert (config.deterministic, config.backend) == (deterministic, backend)
    with pytest.raises(EsperError, match="did you mean 'fused'"):
        tiny_run(tmp_path / "other", backend="fusd")


def test_setting_missing_in_old_checkpoint_has_default(
    finished_run: RunFolder, tmp_path: Path
) -> None:
    state = finished_run.read_checkpoint(ROUNDS)
    older = {
        name: each for name, each in state.notes["settings"].items() if name != "deterministic"
    }
    finished_run.require_settings(Archive(state.tensors, {"settings": older}))
    other = tiny_run(tmp_path / "run", deterministic=True)
    with pytest.raises(RunError, match="deterministic False -> True"):
        other.require_settings(Archive(state.tensors, {"settings": older}))


def test_checkpoint_lists_its_parts(finished_run: RunFolder) -> None:
    state = finished_run.read_checkpoint(ROUNDS)
    assert set(state.notes["parts"]) == {"agent-0"}
    assert state.notes["settings"] == json.loads(json.dumps(state.notes["settings"]))
    assert [row[1] for row in state.notes["eval_history"]] == [0, 2, 4]


def test_store_of_finished_run_is_one_file(finished_run: RunFolder) -> None:
    assert not list(finished_run.path.glob("events.sqlite-*"))
    with sqlite3.connect(finished_run.path / "events.sqlite") as connection:
        assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
