"""The benchmark on tasks of others' kind: its environments are sound, and its report is right."""

import argparse
import json
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("gymnasium")
sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import foreign
import numpy as np
from foreign_tasks import TASKS, Locks, RankedBandit, Repeat, Strides
from gymnasium.utils.env_checker import check_env

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize("name", TASKS)
def test_an_environment_keeps_gymnasiums_rules_and_its_masks_fit(name: str) -> None:
    env = TASKS[name].make()
    check_env(env, skip_render_check=True)
    assert hasattr(env.unwrapped, "action_masks") == TASKS[name].masked
    assert TASKS[name].needs == () or TASKS[name].needs[0] in ("memory", "masks")


def played(env: Any, choose: Any, seed: int = 0) -> float:
    """The return of an episode in which `choose` decides from environment and observation."""
    seen, _ = env.reset(seed=seed)
    total, over = 0.0, False
    while not over:
        seen, paid, ended, cut, _ = env.step(choose(env, seen))
        total, over = total + paid, ended or cut
    return total


def test_who_knows_the_answer_gets_all_there_is() -> None:
    def card(env: Any, seen: Any) -> Any:
        asked = max(0 if env.back is None else env.age - env.back, 0)
        return env.cards[:, asked] if env.decks > 1 else env.cards[0, asked]

    def arm(env: Any, seen: Any) -> Any:
        return np.argmax(np.where(env.mask, env.rank, -1))

    def door(env: Any, seen: Any) -> Any:
        first = int(np.argmax(env.closed))
        return np.array([first, env.code[first]])

    for env, choose in (
        (Repeat(4), card),
        (Repeat(None), card),
        (Repeat(2, 2), card),
        (RankedBandit(), arm),
        (Locks(), door),
    ):
        assert played(env, choose) == pytest.approx(1.0)


def test_a_walk_ends_at_the_goal_and_walls_stop_a_stride() -> None:
    env = Strides()
    for seed in range(5):
        env.reset(seed=seed)
        for direction, open_ in enumerate(env.action_masks()[:4]):
            before = env.place.copy()
            env.step(np.array([direction, 0]))
            assert bool((env.place != before).any()) == bool(open_)
            env.place = before
    env.place, env.goal = np.array([0, 0]), np.array([0, 3])
    _, paid, ended, _, _ = env.step(np.array([0, 2]))
    assert ended
    assert paid == pytest.approx(0.98)


def write_runs(folder: Path, task: str, scores: Any, passed: Any = None) -> None:
    """Runs with these returns by learner; `passed` says when each first had its last return."""
    for (learner, configuration), returns in scores.items():
        for seed, score in enumerate(returns):
            found = {"return": score, "sampled": 0.0, "seconds": 10.0 if learner == "esper" else 40}
            when = passed[learner, configuration][seed] if passed else 30_000
            found |= {"steps": 30_000, "curve": [[10_000, 0.0], [when, score]]}
            place = folder / foreign.file_of((task, learner, configuration, seed))
            place.write_text(json.dumps(found), encoding="utf-8")


def test_the_report_names_the_better_peer_and_says_what_is_clear(tmp_path: Path) -> None:
    scores = {
        ("esper", "auto"): (0.9, 0.92, 0.91),
        ("recurrent", "documented"): (0.5, 0.52, 0.51),
        ("recurrent", "as-esper"): (0.6, 0.62, 0.61),
        ("maskable", "documented"): (0.1, 0.1, 0.1),
    }
    write_runs(tmp_path, "locks", scores)
    write_runs(tmp_path, "locks", {("recurrent", "finer"): (0.99, 0.99)})  # a seed is missing
    figures, (row,) = foreign.report(tmp_path)
    assert row[0] == "locks"
    assert "recurrent as-esper" in row[3]
    assert row[4].startswith("+0.300") and row[4].endswith("better")  # noqa: PT018
    assert figures["locks.verdict"] == 1
    assert figures["locks.seconds_vs_recurrent"] == pytest.approx(0.25)
    assert figures["locks.esper.auto.interval"] == pytest.approx(4.30 * 0.01 / 3**0.5)
    assert figures["locks.esper.auto.steps_to_bar"] == 30_000


def test_verdicts_are_counted_apart_for_tasks_that_presets_were_chosen_by(tmp_path: Path) -> None:
    high, low = (0.9, 0.92, 0.91), (0.5, 0.52, 0.51)
    for task, ours, theirs in (
        ("locks", high, low),
        ("identity_70", high, high),
        ("strides", low, high),
        ("ranked_bandit", high, low),
    ):
        peer = "maskable" if task in ("identity_70", "strides") else "recurrent"
        write_runs(tmp_path, task, {("esper", "auto"): ours, (peer, "documented"): theirs})
    figures, _ = foreign.report(tmp_path)
    groups = ("chosen_by", "others")
    counts = [[figures[f"{each}.{word}"] for word in foreign.VERDICTS] for each in groups]
    assert counts == [[1, 1, 1], [0, 0, 1]]  # worse, equal, better
    assert set(foreign.CHOSEN_BY) < set(TASKS)


def test_the_published_table_follows_from_the_runs_that_are_kept(tmp_path: Path) -> None:
    with tarfile.open(DOCS / "evidence" / "foreign.tar.xz") as packed:
        packed.extractall(tmp_path, filter="data")
    figures, rows = foreign.report(tmp_path / "foreign")
    published = json.loads((DOCS / "foreign.json").read_text(encoding="utf-8"))
    assert {name: published[name] for name in figures} == pytest.approx(figures)
    page = (DOCS / "performance.md").read_text(encoding="utf-8")
    assert [row for row in rows if "| " + " | ".join(row) + " |" not in page] == []
    assert {row[0] for row in rows} == set(TASKS)


def test_steps_to_the_bar_decide_only_where_every_run_of_both_has_all_there_is(
    tmp_path: Path,
) -> None:
    ours, slow, fast = ("esper", "auto"), ("maskable", "documented"), ("maskable", "as-esper")
    scores = {ours: (100.0, 100.0), slow: (100.0, 100.0), fast: (100.0, 100.0)}
    passed = {ours: (12_000, 12_500), slow: (29_000, 29_500), fast: (20_000, 20_500)}
    write_runs(tmp_path, "identity_heads", scores, passed)
    figures, (row,) = foreign.report(tmp_path)
    assert "maskable as-esper" in row[3]  # of equal peers the one that passed the bar first
    assert row[4] == "none, both at the most; bar +8,000 ± 4,494 steps earlier: better"
    assert figures["identity_heads.difference"] == 0
    assert (
        figures["identity_heads.verdict"],
        figures["identity_heads.decided_by_steps_to_bar"],
    ) == (1, 1)
    write_runs(
        tmp_path, "identity_heads", scores | {fast: (100.0, 99.9), slow: (99.0, 99.0)}, passed
    )
    figures, (row,) = foreign.report(tmp_path)
    assert row[4].endswith("equal")
    assert figures["identity_heads.decided_by_steps_to_bar"] == 0


def test_peers_play_what_they_are_made_for_and_seed_comes_after_seed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(foreign.importlib.util, "find_spec", lambda name: True)
    options = argparse.Namespace(
        seeds=2, tasks=[*TASKS], learners=[*foreign.CONFIGURATIONS], configurations=None
    )
    jobs = list(foreign.jobs_of(options))
    assert [job[-1] for job in jobs] == sorted(job[-1] for job in jobs)
    for learner, configurations in foreign.CONFIGURATIONS.items():
        found = [job for job in jobs if job[1] == learner]
        played = {task for task, *_ in found}
        assert len(found) == 2 * len(configurations) * len(played)
        expected = {
            "esper": set(TASKS),
            "recurrent": {name for name, task in TASKS.items() if "memory" in task.needs},
            "maskable": {n for n, t in TASKS.items() if t.masked or "memory" not in t.needs},
        }
        assert played == expected[learner]
    options.configurations = ["auto"]
    assert list(foreign.jobs_of(options)) == [job for job in jobs if job[2] == "auto"]
    late = foreign.carry_out(("locks", "esper", "auto", 0), Path("nowhere"), 0.0)
    assert late.endswith("left for another time")
