"""The reader: questions people have, by name, while the file is written."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from esper.leyline import LifecycleOp, SeedStage
from esper.nissa import (
    AnomalyFound,
    Decisions,
    Hub,
    LifecycleChanged,
    Noted,
    RolledBack,
    RunReader,
    RunStarted,
    RunStore,
    Sampled,
    Stepped,
    StoreError,
)
from tests.nissa.runs import (
    ENVS,
    LAYOUT,
    OPS,
    SLOTS,
    STEPS,
    a_round,
    counted,
    decisions,
    ended,
    written,
)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return written(tmp_path / "run.sqlite", rounds=3)


def test_rounds_have_their_returns(run: Path) -> None:
    with RunReader(run) as reader:
        first, second, _ = reader.rounds()
    assert (first["round"], first["episodes"]) == (1, ENVS)
    assert second["mean_return"] == pytest.approx(ended(2).returns.mean())
    assert second["rolled_back"] == ended(2).rolled_back.sum()


def test_a_decision_is_read_by_name_with_its_observation(run: Path) -> None:
    given = decisions(3, 2)
    with RunReader(run) as reader:
        found = reader.decisions(3, env=4)[2]
    assert found.step == 2
    op = int(given.actions[4, 0])
    assert found.actions["op"] == OPS[op]
    assert ("blueprint" in found.actions) == (op == LifecycleOp.GERMINATE)
    assert found.value == given.values[4]
    assert found.log_prob == pytest.approx(given.log_probs[4].sum())
    assert found.observation is not None
    assert list(found.observation) == list(LAYOUT.features)
    np.testing.assert_allclose(list(found.observation.values()), given.observations[4], rtol=1e-3)
    assert found.legal is not None
    legal = tuple(name for name, bit in zip(SLOTS, given.masks[4, 1], strict=False) if bit)
    assert found.legal["slot"] == legal
    assert found.log_probs == pytest.approx(
        dict(zip(LAYOUT.heads, given.log_probs[4].tolist(), strict=True))
    )
    assert found.probabilities is None
    assert f"op {OPS[op]}" in str(found)


def test_probabilities_are_read_by_name(tmp_path: Path) -> None:
    probabilities = np.zeros((1, 4, 5))
    probabilities[0, :, 0], probabilities[0, 2, 1] = 0.25, 0.75
    with RunStore(tmp_path, LAYOUT) as store:
        store.write([decisions(1, 0, envs=1, probabilities=probabilities)])
    with RunReader(tmp_path) as reader:
        (found,) = reader.decisions(1, 0)
    assert found.probabilities is not None
    assert found.probabilities["blueprint"] == {"norm": 0.25, "conv": 0.75}


def test_a_timeline_shows_every_slot_at_the_end_of_every_step(tmp_path: Path) -> None:
    def change(step: int, before: SeedStage, after: SeedStage) -> LifecycleChanged:
        return LifecycleChanged(
            round=1, step=step, env=[0], slot=[1], before=[before], after=[after], cause=[-1],
            blueprint=[1],
        )  # fmt: skip

    def trained(step: int, **alpha: float) -> Stepped:
        measures = {f"alpha_{slot}": [each] for slot, each in alpha.items()}
        return Stepped(round=1, step=step, rewards=[0.0], measures=measures)

    stages = SeedStage
    with RunStore(tmp_path, LAYOUT) as store:
        store.write(
            [
                trained(0, mid=0.0),
                change(1, stages.DORMANT, stages.GERMINATED),
                change(1, stages.GERMINATED, stages.TRAINING),
                trained(1, mid=0.0),
                change(2, stages.TRAINING, stages.BLENDING),
                trained(2, mid=0.5),
                change(3, stages.BLENDING, stages.PRUNED),
                change(3, stages.PRUNED, stages.EMBARGOED),
                trained(3, mid=0.0),
                trained(4),
            ]
        )
    with RunReader(tmp_path) as reader:
        cells = reader.timeline(1, 0)
    assert len(cells) == 5 * len(SLOTS)
    mid = [(c.stage, c.blueprint, c.alpha) for c in cells if c.slot == "mid"]
    assert mid == [
        ("DORMANT", None, 0.0),
        ("TRAINING", "conv", 0.0),
        ("BLENDING", "conv", 0.5),
        ("EMBARGOED", None, 0.0),
        ("EMBARGOED", None, None),
    ]
    assert {c.stage for c in cells if c.slot != "mid"} == {"DORMANT"}


def test_shares_of_actions_count_only_decisions_in_which_the_head_mattered(tmp_path: Path) -> None:
    actions = [[0, 0, 0, 0], [1, 2, 1, 0], [1, 0, 1, 1], [3, 2, 0, 0]]
    with RunStore(tmp_path, LAYOUT) as store:
        store.write(
            [
                Decisions(
                    round=1, step=0, actions=actions, values=[0.0] * 4, log_probs=np.zeros((4, 4))
                )
            ]
        )
    with RunReader(tmp_path) as reader:
        assert reader.action_shares("blueprint") == [(1, {"norm": 0.0, "conv": 1.0})]
        ((_, slots),) = reader.action_shares("slot")
        ((_, ops),) = reader.action_shares("op")
    assert slots == pytest.approx({"early": 1 / 3, "mid": 0.0, "late": 2 / 3})
    assert ops["GERMINATE"] == 0.5


def test_runs_rollbacks_anomalies_and_counts(run: Path) -> None:
    with RunStore(run, LAYOUT) as store:
        store.write(
            [
                RunStarted(round=0, config={"envs": 6}, seeds={"run": 1}, data={"digits": "ab"}),
                RolledBack(round=3, step=1, env=[2], reason=["loss exploded"]),
                AnomalyFound(
                    round=3, name="entropy_collapse", head="op", raised=True, seen=0.0,
                    threshold=0.01, updates=5, message="It fell.", advice="Look.",
                ),
            ]
        )  # fmt: skip
    with RunReader(run) as reader:
        (started,) = reader.runs()
        assert started["config"] == {"envs": 6}
        (anomaly,) = reader.each("anomalies")
        assert (anomaly["name"], anomaly["raised"]) == ("entropy_collapse", 1)
        assert counted(reader)["decision"] == 3 * STEPS
        assert counted(reader)["rollback"] == 1
        assert reader.last_commit() == 3
        assert sum(row["round"] == 2 for row in reader.each("episodes")) == ENVS
        (found,) = reader.query("SELECT reason FROM lifecycle WHERE round = 1 AND n = 0").rows
        assert found == ("room for 40 parameters",)


@pytest.mark.parametrize(
    "sql",
    [
        "DELETE FROM decisions",
        "UPDATE steps SET reward = 1",
        "DROP TABLE decisions",
        "CREATE TABLE mine (x)",
        "CREATE TEMP TABLE mine (x)",
        "INSERT INTO notes VALUES (1, 1, 1, 'x')",
        "PRAGMA user_version = 9",
        "PRAGMA query_only = 0",
        "ATTACH '/tmp/other.sqlite' AS other",
        "VACUUM INTO '/tmp/copy.sqlite'",
        "BEGIN",
        "UPDATE sqlite_master SET sql = 'x'",
    ],
)
def test_a_query_cannot_change_anything(run: Path, sql: str) -> None:
    with RunReader(run) as reader:
        before = reader.digest()
        with pytest.raises(StoreError, match="only read") as refusal:
            reader.query(sql)
        assert sql in str(refusal.value)
        assert reader.digest() == before
        assert not Path("/tmp/copy.sqlite").exists()  # noqa: S108


@pytest.mark.parametrize(
    ("sql", "message"),
    [
        ("SELECT x FROM nowhere", "no such table"),
        ("SELEC 1", "syntax error"),
        ("SELECT 1; SELECT 2", "one statement"),
        ("", "no query"),
    ],
)
def test_a_wrong_query_gets_one_sentence(run: Path, sql: str, message: str) -> None:
    with RunReader(run) as reader, pytest.raises(StoreError, match=message):
        reader.query(sql)


def test_the_columns_of_a_table_can_be_asked_for(run: Path) -> None:
    with RunReader(run) as reader:
        found = reader.query("SELECT name FROM pragma_table_info('decisions')")
        assert ("blueprint",) in found.rows
        assert reader.query("SELECT value FROM json_each('[1, 2]')").rows == [(1,), (2,)]
        assert next(iter(found)) == {"name": "round"}


def test_a_finished_run_is_one_file_and_reading_adds_none(run: Path) -> None:
    with RunReader(run) as reader:
        assert counted(reader)["decision"] == 3 * STEPS
        assert [file.name for file in run.parent.iterdir()] == ["run.sqlite"]


def test_a_run_is_read_beyond_its_end_by_those_who_had_it_open(tmp_path: Path) -> None:
    store = RunStore(tmp_path, LAYOUT)
    store.write(a_round(1))
    with RunReader(tmp_path) as reader:
        assert counted(reader)["decision"] == STEPS
        store.write(a_round(2))
        store.close()
        assert counted(reader)["decision"] == 2 * STEPS
        with RunStore(tmp_path, LAYOUT) as store:
            store.write(a_round(3))
            assert counted(reader)["decision"] == 3 * STEPS


def test_a_path_with_odd_characters_is_opened(tmp_path: Path) -> None:
    folder = tmp_path / "50% done? #1 &mode=rwc"
    folder.mkdir()
    written(folder, rounds=1)
    with RunReader(folder) as reader:
        assert reader.last_commit() == 1


def test_another_process_sees_every_event_while_they_are_written(tmp_path: Path) -> None:
    program = (
        "import sys\n"
        "from esper.nissa import RunReader\n"
        "with RunReader(sys.argv[1]) as reader:\n"
        "    print('ready', flush=True)\n"
        "    last, kind = 0, ''\n"
        "    while kind != 'note':\n"
        "        asked = 'SELECT id, kind FROM events WHERE id > ? ORDER BY id'\n"
        "        for last, kind in reader.query(asked, (last,)).rows:\n"
        "            print(last, kind, flush=True)\n"
        "assert 'torch' not in sys.modules\n"
    )
    store = RunStore(tmp_path, LAYOUT)
    given = [event for number in range(1, 6) for event in a_round(number)]
    follower = subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert follower.stdout is not None
    assert follower.stdout.readline() == "ready\n"
    with Hub(store) as hub:
        for event in given:
            hub.emit(event)
            time.sleep(0.002)
        hub.commit(5)
        hub.emit(Noted(round=5, text="the end"))
    out, _ = follower.communicate(timeout=120)
    assert follower.returncode == 0
    lines = [line.split() for line in out.splitlines()]
    assert [line[1] for line in lines] == [*(event.kind for event in given), "note"]
    assert [int(line[0]) for line in lines] == list(range(1, len(given) + 2))


def test_an_export_has_a_line_for_every_row(run: Path, tmp_path: Path) -> None:
    with RunStore(run, LAYOUT) as store:
        store.write([Sampled(round=3, values={"odd": float("inf")})])
        store.write([RunStarted(round=0, config={"envs": 6})])
    target = tmp_path / "run.jsonl"
    with RunReader(run) as reader:
        lines = reader.export(target)
    rows = [json.loads(line) for line in target.read_text().splitlines()]
    assert len(rows) == lines
    kinds = {row["type"] for row in rows}
    assert {"decisions", "observations", "steps", "lifecycle", "episodes", "updates"} <= kinds
    assert sum(row["type"] == "decisions" for row in rows) == 3 * STEPS * ENVS
    seen = next(row for row in rows if row["type"] == "observations")
    assert list(seen["observation"]) == list(LAYOUT.features)
    assert set(seen["legal"]) == set(LAYOUT.heads)
    assert next(row for row in rows if row["type"] == "runs")["config"] == {"envs": 6}
    assert any(row.get("value") == "inf" for row in rows)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["run.jsonl", "run.sqlite"]


def test_an_export_that_is_interrupted_leaves_nothing_half_done(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(table: str) -> None:
        raise KeyboardInterrupt

    target = tmp_path / "run.jsonl"
    target.write_text("old")
    with RunReader(run) as reader:
        monkeypatch.setattr(reader, "each", interrupted)
        with pytest.raises(KeyboardInterrupt):
            reader.export(target)
    assert target.read_text() == "old"
    assert sorted(file.name for file in tmp_path.iterdir()) == ["run.jsonl", "run.sqlite"]


def test_a_long_query_ends_with_control_c(run: Path) -> None:
    program = (
        "import signal, sys\n"
        "from esper.nissa import RunReader\n"
        # Where tests run in the background, children are born deaf to it.
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "reader = RunReader(sys.argv[1])\n"
        "try:\n"
        "    print('ready', flush=True)\n"
        "    reader.query('WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n '\n"
        "                 'WHERE x < 1000000000000) SELECT count(*) FROM n')\n"
        "except KeyboardInterrupt:\n"
        "    print('stopped', reader.last_commit())\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program, str(run)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    try:
        out, _ = process.communicate(timeout=120)
    finally:
        process.kill()
    assert out == "stopped 3\n"
