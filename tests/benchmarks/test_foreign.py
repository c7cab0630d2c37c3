"""The benchmark on tasks of others' kind: its environments are sound, and its report is right."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("gymnasium")
sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import foreign
import numpy as np
from foreign_tasks import TASKS, Locks, RankedBandit, Repeat, Strides
from gymnasium.utils.env_checker import check_env


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


def test_the_report_names_the_better_peer_and_says_what_is_clear(tmp_path: Path) -> None:
    scores = {
        ("esper", "auto"): (0.9, 0.92, 0.91),
        ("recurrent", "documented"): (0.5, 0.52, 0.51),
        ("recurrent", "as-esper"): (0.6, 0.62, 0.61),
        ("maskable", "documented"): (0.1, 0.1, 0.1),
    }
    for (learner, configuration), returns in scores.items():
        for seed, score in enumerate(returns):
            found = {"return": score, "sampled": 0.0, "seconds": 10.0 if learner == "esper" else 40}
            found |= {"steps": 30_000, "curve": [[10_000, 0.0], [30_000, score]]}
            place = tmp_path / foreign.file_of(("locks", learner, configuration, seed))
            place.write_text(json.dumps(found), encoding="utf-8")
    figures, (row,) = foreign.report(tmp_path)
    assert row[0] == "locks"
    assert "recurrent as-esper" in row[3]
    assert row[4].startswith("+0.300") and row[4].endswith("better")  # noqa: PT018
    assert figures["locks.verdict"] == 1
    assert figures["locks.seconds_vs_recurrent"] == pytest.approx(0.25)
    assert figures["locks.esper.auto.interval"] == pytest.approx(4.30 * 0.01 / 3**0.5)
    assert figures["locks.esper.auto.steps_to_bar"] == 30_000
