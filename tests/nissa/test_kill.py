"""A writer that is killed at any moment leaves a file that opens, with whole rounds."""

import random
import sqlite3
import time
from pathlib import Path

import pytest

from esper.nissa import RunReader, RunStore
from tests import programs
from tests.nissa.runs import ENVS, LAYOUT, STEPS, a_round

KILLS = 20
WRITER = """
import sys
from pathlib import Path
from tests.nissa.runs import write_until_killed
write_until_killed(Path(sys.argv[1]))
"""


def killed_after(path: Path, seconds: float) -> int:
    """Start a writer, kill it after it was ready for `seconds`; the last round it told of."""
    writer = programs.start(WRITER, path)
    assert writer.stdout.readline() == "ready\n"
    time.sleep(seconds)
    writer.kill()
    out, _ = writer.communicate(timeout=120)
    told = out.split("\n")[:-1]  # the last line may be cut off
    return int(told[-1]) if told else 0


@pytest.mark.slow
def test_a_killed_writer_leaves_whole_rounds_up_to_its_last_commit(tmp_path: Path) -> None:
    draw = random.Random(0)
    path = tmp_path / "events.sqlite"
    reached = 0
    for _ in range(KILLS):
        told = killed_after(path, draw.uniform(0.0, 0.25))
        with RunReader(path) as reader:  # before anything is repaired
            last = reader.last_commit() or 0
        assert last >= max(told, reached), "what was told to be on the disk is there"
        reached = last
        with sqlite3.connect(path) as connection:
            assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        with RunStore(path, LAYOUT) as store:
            store.rewind(last)
        with RunReader(path) as reader:
            assert (reader.last_commit() or 0) == last
            for table in ("decisions", "steps"):
                found = reader.query(
                    f"SELECT round, count(*) FROM {table} GROUP BY round"  # noqa: S608
                )
                assert found.rows == [(n, STEPS * ENVS) for n in range(1, last + 1)]
            assert len(reader.rounds()) == last
    assert reached > KILLS / 4, "some rounds were finished"
    with RunStore(tmp_path / "whole.sqlite", LAYOUT) as store:
        for number in range(1, reached + 1):
            store.write(a_round(number))
    with RunReader(path) as killed, RunReader(tmp_path / "whole.sqlite") as whole:
        assert killed.digest() == whole.digest()
