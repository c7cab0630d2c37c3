"""The run store: whole batches or nothing, rewinding, versions."""

import re
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from esper import nissa
from esper.leyline import AgreementError
from esper.nissa import Event, Noted, RunLayout, RunReader, RunStore, Stepped, StoreError
from esper.nissa.events import KINDS
from esper.nissa.schema import Integers, Reals, Stages, Texts
from esper.nissa.store import FILE, _chunks, _statement
from tests.nissa.runs import ENVS, LAYOUT, STEPS, a_round, counted, decisions, stepped, written


def count(path: Path, table: str) -> int:
    with RunReader(path) as reader:
        ((found,),) = reader.query(f"SELECT count(*) FROM {table}").rows  # noqa: S608
    return int(found)


def test_what_is_written_is_read_to_the_bit(tmp_path: Path) -> None:
    written(tmp_path, rounds=2)
    with RunReader(tmp_path) as reader:
        for step in range(STEPS):
            given = stepped(2, step)
            found = reader.query(
                "SELECT reward, reward_objective, reward_rent, accuracy FROM steps "
                "WHERE round = 2 AND step = ? ORDER BY env",
                (step,),
            )
            columns = np.array(found.rows).T
            expected = [given.rewards, *given.terms.values(), given.measures["accuracy"]]
            np.testing.assert_array_equal(columns, np.array(expected))
            taken = decisions(2, step)
            found = reader.query(
                "SELECT op, slot, blueprint, blend, value FROM decisions "
                "WHERE round = 2 AND step = ? ORDER BY env",
                (step,),
            )
            np.testing.assert_array_equal([row[:4] for row in found.rows], taken.actions)
            np.testing.assert_array_equal([row[4] for row in found.rows], taken.values)


def test_what_was_not_measured_is_null(tmp_path: Path) -> None:
    with RunStore(tmp_path, LAYOUT) as store:
        measures = {"accuracy": [np.nan, 1.0]}
        store.write([Stepped(round=1, step=0, rewards=[0.0, np.inf], measures=measures)])
    with RunReader(tmp_path) as reader:
        assert reader.query("SELECT reward, accuracy FROM steps ORDER BY env").rows == [
            (0.0, None),
            (np.inf, 1.0),
        ]


def test_measurements_may_come_later(tmp_path: Path) -> None:
    with RunStore(tmp_path, LAYOUT) as store:
        store.write([Stepped(round=1, step=0, rewards=[1.0])])
    with RunStore(tmp_path, LAYOUT) as store:
        store.write([Stepped(round=1, step=1, rewards=[1.0], terms={"rent": [2.0]})])
        store.write([Stepped(round=1, step=2, rewards=[1.0], terms={"rent": [3.0]})])
    with RunReader(tmp_path) as reader:
        found = reader.query("SELECT reward_rent FROM steps ORDER BY step").rows
    assert found == [(None,), (2.0,), (3.0,)]


def test_a_batch_that_fails_leaves_nothing_behind(tmp_path: Path) -> None:
    new = Stepped(round=1, step=0, rewards=[1.0], measures={"gap": [0.5]})
    with RunStore(tmp_path, LAYOUT) as store:
        wrong = decisions(1, 1)
        object.__setattr__(wrong, "actions", wrong.actions[:, :2])
        with pytest.raises(AgreementError, match="another number of heads"):
            store.write([new, wrong])
        with pytest.raises(sqlite3.IntegrityError):
            store.write([new, new])
        assert count(tmp_path, "events") == count(tmp_path, "steps") == 0
        store.write([new])
    assert count(tmp_path, "steps") == 1


def test_rewinding_forgets_later_rounds_and_nothing_else(tmp_path: Path) -> None:
    written(tmp_path / "short.sqlite", rounds=3)
    path = written(tmp_path / "long.sqlite", rounds=5)
    with RunStore(path, LAYOUT) as store:
        store.write(a_round(6)[:4])  # cut off in the middle
        store.rewind(3)
        assert store.last_commit == 3
        store.write(a_round(4))
        store.rewind(3)
        assert store.last_commit == 3
    with RunReader(tmp_path / "short.sqlite") as short, RunReader(path) as long:
        assert short.digest() == long.digest()
        assert counted(short) == counted(long)
        assert {row["round"] for row in long.rounds()} == {1, 2, 3}


def test_a_resumed_run_has_the_same_digest_as_an_uninterrupted_one(tmp_path: Path) -> None:
    whole = written(tmp_path / "whole.sqlite", rounds=4)
    path = written(tmp_path / "resumed.sqlite", rounds=3)
    with RunStore(path, LAYOUT) as store:
        store.rewind(2)
        for number in (3, 4):
            store.write(a_round(number))
    with RunReader(whole) as first, RunReader(path) as second:
        assert first.digest() == second.digest()
        assert first.digest(2) == second.digest(2) != first.digest()


def test_numbers_of_events_are_not_used_again_after_a_rewind(tmp_path: Path) -> None:
    with RunStore(tmp_path, LAYOUT) as store:
        store.write([Noted(round=1, text="kept"), Noted(round=2, text="gone")])
        store.rewind(1)
        store.write([Noted(round=2, text="new")])
    with RunReader(tmp_path) as reader:
        assert [row["id"] for row in reader.each("events")] == [1, 3]


def test_a_rewind_leaves_the_latest_round_that_is_known_to_be_whole(tmp_path: Path) -> None:
    with RunStore(tmp_path, LAYOUT) as store:
        store.rewind(5)
        assert store.last_commit is None
        store.write(a_round(1))
        store.commit(1)
        store.write(a_round(2))
        assert store.last_commit == 1
        store.rewind(2)
        assert store.last_commit == 1


def test_another_version_is_refused_with_both(tmp_path: Path) -> None:
    path = written(tmp_path / "run.sqlite", rounds=1)
    with sqlite3.connect(path) as connection:
        connection.execute("PRAGMA user_version = 7")
    for opened in (RunReader, lambda path: RunStore(path, LAYOUT)):
        with pytest.raises(StoreError, match="given: version 7; valid: version 3"):
            opened(path)


@pytest.fixture
def new_event() -> Iterator[type[Event]]:
    class Weighed(Event, kind="weighing", table="weighings"):
        step: int
        env: Integers  # [M]
        stage: Stages  # [M]
        scale: str
        weight: Reals | None = None  # [M]
        remark: Texts | None = None  # [M]

    yield Weighed
    del KINDS["weighing"]


def test_a_new_event_is_a_class_and_nothing_else(tmp_path: Path, new_event: type[Event]) -> None:
    given = new_event(round=1, step=2, env=[4, 5], stage=[0, 2], scale="kg", weight=[1.5, np.nan])  # type: ignore[call-arg]
    with RunStore(tmp_path, LAYOUT) as store:
        store.write([given])
    with RunReader(tmp_path) as reader:
        (event,) = reader.each("events")
        assert (event["kind"], event["round"], event["step"]) == ("weighing", 1, 2)
        shared = {"round": 1, "event": 1, "step": 2, "scale": "kg", "remark": None}
        assert list(reader.each("weighings")) == [
            {**shared, "n": 0, "env": 4, "stage": "DORMANT", "weight": 1.5},
            {**shared, "n": 1, "env": 5, "stage": "TRAINING", "weight": None},
        ]
        assert reader.export(tmp_path / "run.jsonl") == 2
        before = reader.digest()
    with RunStore(tmp_path, LAYOUT) as store:
        store.rewind(0)
    with RunReader(tmp_path) as reader:
        assert reader.digest() != before
        assert not list(reader.each("weighings"))


def test_another_layout_is_refused(tmp_path: Path) -> None:
    written(tmp_path, rounds=1)
    other = RunLayout(LAYOUT.heads, LAYOUT.actions, LAYOUT.relevance, ("epoch",))
    with pytest.raises(StoreError, match="other names; given: features"):
        RunStore(tmp_path, other)


@pytest.mark.parametrize("content", [b"this is no database", b"SQLite format 3\x00" + b"x" * 500])
def test_a_foreign_or_damaged_file_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "events.sqlite"
    path.write_bytes(content)
    for opened in (RunReader, lambda path: RunStore(path, LAYOUT)):
        with pytest.raises(StoreError, match="cannot be"):
            opened(path)
    assert path.read_bytes() == content


def test_a_database_of_another_application_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "events.sqlite"
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE theirs (x)")
    for opened in (RunReader, lambda path: RunStore(path, LAYOUT)):
        with pytest.raises(StoreError, match="not a run's file"):
            opened(path)


def test_a_missing_run_is_refused_with_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"There is no telemetry.*name the directory of a run"):
        RunReader(tmp_path / "nowhere")


@given(rows=st.integers(0, 3000))
def test_chunks_cover_every_row_once(rows: int) -> None:
    covered = [row for first, size in _chunks(rows) for row in range(first, first + size)]
    assert covered == list(range(rows))


def test_parameters_of_statements_have_no_numbers() -> None:
    # Newer Pythons look for each number among all parameters.
    assert _statement("steps", ("round", "step", "env"), 2).count("?") == 6
    for path in Path(nissa.__file__).parent.glob("*.py"):
        assert not re.search(r"\?[0-9]", path.read_text(encoding="utf-8")), path


@pytest.mark.parametrize("envs", [1, 3, 4, 31, 33, 255, 256, 257, 700])
def test_any_number_of_environments_is_stored(tmp_path: Path, envs: int) -> None:
    with RunStore(tmp_path, LAYOUT, rows=envs) as store:
        store.write([decisions(1, 0, envs), stepped(1, 0, envs)])
    with RunReader(tmp_path) as reader:
        assert not reader.query("SELECT * FROM packs")
        for table in ("decisions", "steps"):
            sql = f"SELECT count(*), max(env) FROM {table}"  # noqa: S608
            assert reader.query(sql).rows == [(envs, envs - 1)]


def test_every_row_carries_its_round(tmp_path: Path) -> None:
    written(tmp_path, rounds=2)
    with RunReader(tmp_path) as reader:
        names = [row[0] for row in reader.query("SELECT name FROM sqlite_schema").rows]
        for name in names:
            if not name.startswith("sqlite") and name not in ("meta", "names"):
                assert "round" in reader.query(f"SELECT * FROM {name}").columns  # noqa: S608
    assert count(tmp_path, "decisions") == 2 * STEPS * ENVS


def test_reader_copies_the_log_of_a_read_only_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, temporary = tmp_path / "run", tmp_path / "temporary"
    run.mkdir()
    temporary.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    with RunStore(run, LAYOUT) as store:
        store.write([Noted(round=1, text="in the log")])
        monkeypatch.setattr("os.access", lambda path, mode: False)
        with RunReader(run) as reader:
            assert reader.query("SELECT text FROM notes").rows == [("in the log",)]
            assert list(temporary.iterdir())
        assert not list(temporary.iterdir())


def test_reader_that_cannot_open_a_file_leaves_no_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    for name in (FILE, f"{FILE}-wal"):
        (tmp_path / name).write_bytes(b"no database")
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    monkeypatch.setattr("os.access", lambda path, mode: False)
    with pytest.raises(StoreError):
        RunReader(tmp_path)
    assert not list(temporary.iterdir())
