"""Reading a run's file, also while it is written.

Every question is a short read of its own, so a reader never holds a writer up.
"""

import hashlib
import json
import math
import os
import shutil
import sqlite3
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from esper.archive.files import replace_whole, unfinished
from esper.leyline import SeedStage
from esper.leyline.errors import in_words
from esper.nissa.events import KINDS, Event
from esper.nissa.schema import RunLayout
from esper.nissa.store import BLOBS, FILE, StoreError, connect, file_of, quoted, read_layout, tables

Row = Mapping[str, Any]
_EMPTY = {stage.name for stage in (SeedStage.DORMANT, SeedStage.EMBARGOED, SeedStage.RESETTING)}
_INTERRUPTIBLE_EVERY = 10_000  # instructions of SQLite's machine: a millisecond or so
_ALLOWED = {sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_FUNCTION}
_ALLOWED |= {sqlite3.SQLITE_RECURSIVE}
_ALLOWED_PRAGMAS = {"table_info", "table_list", "table_xinfo"}


# --- what questions are answered with ----------------------------------------------------------


@dataclass(frozen=True)
class Table:
    """The answer to a query."""

    columns: tuple[str, ...]
    rows: list[tuple[Any, ...]]

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (dict(zip(self.columns, row, strict=True)) for row in self.rows)

    def __len__(self) -> int:
        return len(self.rows)


@dataclass(frozen=True, kw_only=True)
class DecisionRecord:
    """One decision, by name. Observation, legal actions and probabilities: watched rows only."""

    round: int
    step: int
    env: int
    actions: Mapping[str, str]  # of the heads that mattered
    value: float | None  # None: of a rule, which has none
    log_prob: float | None
    reward: float | None = None
    observation: Mapping[str, float] | None = None
    legal: Mapping[str, tuple[str, ...]] | None = None
    probabilities: Mapping[str, Mapping[str, float]] | None = None
    log_probs: Mapping[str, float] | None = None

    def __str__(self) -> str:
        chosen = ", ".join(f"{head} {action}" for head, action in self.actions.items())
        numbers = {"value": self.value, "reward": self.reward}
        known = [f"{name} {each:+.3f}" for name, each in numbers.items() if each is not None]
        return f"step {self.step}: {chosen}" + (f" ({', '.join(known)})" if known else "")


@dataclass(frozen=True)
class Cell:
    """A slot at the end of a step, for a picture of slot × epoch."""

    step: int
    slot: str
    stage: str
    blueprint: str | None
    alpha: float | None  # None: not measured


class RunReader(AbstractContextManager["RunReader"]):
    """Answers questions about one run."""

    def __init__(self, path: str | Path) -> None:
        """`path` is the run's directory or its file."""
        self.path = file_of(path)
        if not self.path.is_file():
            raise StoreError(
                f"There is no telemetry at {path}",
                given=f"no file {self.path}",
                fix=f"name the directory of a run, the one with {FILE} in it",
            )
        with ExitStack() as resources:  # released here if the file cannot be opened
            database = self._copy_if_read_only(resources)
            with in_words(f"{self.path} cannot be opened", error=StoreError):
                self._connection = resources.enter_context(
                    closing(connect(database, read_only=True))
                )
                self._connection.execute("PRAGMA query_only = 1")
            self._connection.set_progress_handler(lambda: 0, _INTERRUPTIBLE_EVERY)
            self.layout = read_layout(self._connection, self.path)
            self._resources = resources.pop_all()

    def _copy_if_read_only(self, resources: ExitStack) -> Path:
        """Return the database to open: the run's file, or a temporary copy of it.

        To read a write-ahead log, SQLite creates a file beside it. A log in a folder that cannot
        be written is therefore copied together with its database.
        """
        log = self.path.with_name(f"{self.path.name}-wal")
        if not log.is_file() or os.access(self.path.parent, os.W_OK):
            return self.path
        folder = tempfile.TemporaryDirectory(prefix="esper-", ignore_cleanup_errors=True)
        copied = Path(resources.enter_context(folder)) / FILE
        shutil.copy(self.path, copied)
        shutil.copy(log, copied.with_name(f"{FILE}-wal"))
        return copied

    def close(self) -> None:
        self._resources.close()

    def __exit__(self, *failure: object) -> None:
        self.close()

    # --- questions ---------------------------------------------------------------------------

    def dropped(self) -> dict[str, int]:
        """How many events of each kind were lost, because a sink was too slow."""
        sql = "SELECT sink || ': ' || what, sum(count) FROM dropped GROUP BY 1"
        return dict(self.query(sql).rows)

    def last_commit(self) -> int | None:
        """The latest round that is known to be whole."""
        ((found,),) = self.query("SELECT max(round) FROM commits").rows
        return None if found is None else int(found)

    def runs(self) -> list[dict[str, Any]]:
        """Starts and resumptions: configuration, versions, seeds and data, from JSON."""
        return [
            {name: json.loads(v) if isinstance(v, str) else v for name, v in row.items()}
            for row in self.query("SELECT * FROM runs ORDER BY event")
        ]

    def rounds(self) -> list[Row]:
        """What the episodes of every round came to, in order; gains are points."""
        played = self.query(
            "SELECT round, count(*) AS episodes, avg(returns) AS mean_return, "
            "avg(net_gain) AS net_gain, sum(rolled_back) AS rolled_back "
            "FROM episodes GROUP BY round ORDER BY round"
        )
        return list(played)

    def decisions(self, round: int, env: int = 0) -> list[DecisionRecord]:
        """The decisions of one episode, with observations by name where they were kept."""
        rewards = {row["step"]: row["reward"] for row in self.steps(round, env)}
        blobs = {
            row["step"]: own
            for row in self.query("SELECT * FROM observations WHERE round = ?", (round,))
            for watched, own in _blobs_by_environment(row)
            if watched == env
        }
        found = []
        for row in self._of_environment("decisions", round, env):
            step, mattered = row["step"], self.layout.relevance[row[self.layout.heads[0]]]
            heads = zip(self.layout.heads, self.layout.actions, mattered, strict=True)
            record = DecisionRecord(
                round=round,
                step=step,
                env=env,
                actions={head: names[row[head]] for head, names, matters in heads if matters},
                value=row["value"],
                log_prob=row["log_prob"],
                reward=rewards.get(step),
                **_by_name(blobs.get(step, {}), self.layout),
            )
            found.append(record)
        return found

    def steps(self, round: int, env: int) -> list[Row]:
        """What came of the decisions of one episode: rewards, their terms and measurements."""
        return self._of_environment("steps", round, env)

    def _of_environment(self, table: str, round: int, env: int) -> list[Row]:
        """Rows of one episode; in a large population most environments' are packed."""
        sql = f"SELECT * FROM {table} WHERE round = ? AND env = ? ORDER BY step"  # noqa: S608
        rows: list[Row] = list(self.query(sql, (round, env)))
        if rows:
            return rows
        packs = self.query(
            "SELECT * FROM packs WHERE round = ? AND kind = ? ORDER BY step, first", (round, table)
        )
        return [row for _, row in _packed_rows(packs, env)]

    def timeline(self, round: int, env: int) -> list[Cell]:
        """Every slot at the end of every step of one episode."""
        changes = defaultdict(list)
        for change in self.query(
            "SELECT * FROM lifecycle WHERE round = ? AND env = ? ORDER BY event, n", (round, env)
        ):
            changes[change["step"]].append(change)
        held: dict[str, Row] = {}  # the last change of each slot
        cells = []
        for row in self.steps(round, env):
            held |= {change["slot"]: change for change in changes[row["step"]]}
            for slot in self.layout.slots:
                stage = held[slot]["after"] if slot in held else SeedStage.DORMANT.name
                seed = None if stage in _EMPTY else held[slot]["blueprint"]
                cells.append(Cell(row["step"], slot, stage, seed, row.get(f"alpha_{slot}")))
        return cells

    def action_shares(self, head: str, op: str | None = None) -> list[tuple[int, dict[str, float]]]:
        """(round, share of each action) of one head, over the decisions in which it mattered, or
        those of one op."""
        place, ops = self.layout.heads.index(head), self.layout.actions[0]
        relevant = [row[place] for row in self.layout.relevance]
        matters = np.array(relevant if op is None else [name == op for name in ops])
        first, names = self.layout.heads[0], self.layout.actions[place]
        counts: dict[int, NDArray[np.int64]] = {}  # of each action, by round
        for number, op, action, times in self._each(
            f"SELECT round, {quoted(first)}, {quoted(head)}, count(*) FROM decisions "  # noqa: S608
            "GROUP BY 1, 2, 3"
        ):
            if matters[op]:
                counts.setdefault(number, np.zeros(len(names), np.int64))[action] += times
        packs = self.query(
            "SELECT * FROM packs WHERE kind = 'decisions' AND name IN (?, ?)", (first, head)
        )
        for number, _, _, arrays in _unpacked(packs):
            chosen = arrays[head][matters[arrays[first]]]
            counts.setdefault(number, np.zeros(len(names), np.int64))
            counts[number] += np.bincount(chosen, minlength=len(names))
        return [
            (number, dict(zip(names, (found / max(found.sum(), 1)).tolist(), strict=True)))
            for number, found in sorted(counts.items())
        ]

    def digest(self, round: int | None = None) -> str:
        """A hash of what does not depend on when and how often a run was interrupted.

        With `round`, of the rounds up to it.
        """
        found = hashlib.sha256()
        repeatable = [kind.table for kind in KINDS.values() if kind.repeatable]
        repeatable.insert(repeatable.index("steps") + 1, "packs")
        for table in repeatable:
            columns = [name for name in self._columns(table) if name != "event"]
            # Events of several processes come in any order, those of one environment do not.
            order = self._key(table)
            if order == list(Event.key) and "env" in columns:
                order = ["round", "step", "env", "n"]
            skipped = "name != 'peak_memory_bytes'" if table == "updates" else "1"
            for row in self._each(
                f"SELECT {', '.join(map(quoted, sorted(columns)))} FROM {table} "  # noqa: S608
                f"WHERE round <= ifnull(?, round) AND {skipped} ORDER BY {', '.join(order)}",
                (round,),
            ):
                found.update(repr((table, row)).encode())
        return found.hexdigest()

    def each(self, table: str) -> Iterator[dict[str, Any]]:
        """The rows of a table one by one, in order of their keys: `each("anomalies")`."""
        names = self._columns(table)
        sql = f"SELECT * FROM {table} ORDER BY {', '.join(self._key(table))}"  # noqa: S608
        for row in self._each(sql):
            yield dict(zip(names, row, strict=True))

    def export(self, path: str | Path) -> int:
        """Write every row as a line of JSON, the table named in `type`; returns their number.

        The file appears when it is whole.
        """
        path, lines = Path(path), 0
        try:
            with unfinished(path).open("w", encoding="utf-8") as stream:
                for kind, row in self._exported():
                    line = {"type": kind, **row}
                    for name, value in row.items():
                        if isinstance(value, float) and not math.isfinite(value):
                            line[name] = str(value)  # JSON has no infinity
                    stream.write(json.dumps(line) + "\n")
                    lines += 1
            replace_whole(unfinished(path), path)
        finally:
            unfinished(path).unlink(missing_ok=True)
        return lines

    def _exported(self) -> Iterator[tuple[str, Row]]:
        """(type, row) of everything; what is packed comes as the rows that it stands for."""
        yield from _packed_rows(self.each("packs"))
        for row in self.each("observations"):
            for env, blobs in _blobs_by_environment(row):
                key = {"round": row["round"], "step": row["step"], "env": env}
                yield "observations", {**key, **_by_name(blobs, self.layout)}
        yield from (("runs", row) for row in self.runs())
        # Each row of `events` is told by the table of its kind.
        for table in tables():
            if table not in ("packs", "observations", "runs", "events"):
                yield from ((table, row) for row in self.each(table))

    # --- SQL ---------------------------------------------------------------------------------

    def query(self, sql: str, values: Sequence[Any] | Mapping[str, Any] = ()) -> Table:
        """The answer to any SELECT. Whatever would change something is refused."""
        self._connection.set_authorizer(_authorize)
        try:
            with self._reading(sql):
                cursor = self._connection.execute(sql, values)
                rows = cursor.fetchall()
        finally:
            self._connection.set_authorizer(None)
        if cursor.description is None:
            raise StoreError("This is no query", given=sql.strip()[:200], valid="one SELECT")
        return Table(tuple(column[0] for column in cursor.description), rows)

    def _columns(self, table: str) -> list[str]:
        found = self.query("SELECT name FROM pragma_table_info(?)", (table,)).rows
        return [name for (name,) in found]

    def _key(self, table: str) -> list[str]:
        sql = "SELECT name FROM pragma_table_info(?) WHERE pk ORDER BY pk"
        return [name for (name,) in self.query(sql, (table,)).rows]

    def _each(self, sql: str, values: Sequence[Any] = ()) -> Iterator[tuple[Any, ...]]:
        """The rows of an answer of any size, one by one."""
        with self._reading(sql):
            yield from self._connection.execute(sql, values)

    @contextmanager
    def _reading(self, sql: str) -> Iterator[None]:
        given = sql.strip()[:200]
        try:
            yield
        except (sqlite3.Error, sqlite3.Warning) as error:
            if str(error) == "interrupted":  # by Ctrl-C, which SQLite turned into this
                raise KeyboardInterrupt from error
            what, said, valid = "SQLite does not accept this query", f"{given} ({error})", None
            if any(hint in str(error) for hint in ("authoriz", "readonly", "may not be modified")):
                what, said, valid = "A run's file is only read", given, "one SELECT"
            elif type(error) is sqlite3.DatabaseError:
                what, said = f"{self.path} cannot be read", str(error)
            raise StoreError(what, given=said, valid=valid) from error


# --- from stored rows to answers ---------------------------------------------------------------


def _by_name(blobs: Row, layout: RunLayout) -> dict[str, Any]:
    """The blobs of one environment as people read them; None is what was not kept."""
    return {
        kind.read_as or name: kind.decode(blobs[name], layout) if name in blobs else None
        for name, kind in BLOBS.items()
    }


def _unpacked(rows: Iterable[Row]) -> Iterable[tuple[int, int, str, dict[str, Any]]]:
    """(round, step, table, arrays by name) of rows of `packs`, which are in the key's order."""
    key = itemgetter("round", "step", "kind", "first")
    for (number, step, kind, _), group in groupby(rows, key):
        arrays = {row["name"]: np.frombuffer(row["data"], row["dtype"]) for row in group}
        yield number, step, kind, arrays


def _packed_rows(rows: Iterable[Row], env: int | None = None) -> Iterable[tuple[str, Row]]:
    """(table, row) of every environment in rows of `packs`, or of one environment."""
    for number, step, table, arrays in _unpacked(rows):
        found = arrays["env"]
        places = range(len(found)) if env is None else np.flatnonzero(found == env)
        for place in places:
            row: dict[str, Any] = {"round": number, "step": step}
            for name, array in arrays.items():
                value = array[place].item()
                row[name] = None if value != value else value  # NaN is NULL in a table
            yield table, row


def _blobs_by_environment(row: Row) -> Iterator[tuple[int, Row]]:
    """A row of `observations`, apart: each watched environment's own part of every blob."""
    envs = np.frombuffer(row["envs"], "<i4").tolist()
    blobs = {name: row[name] for name in BLOBS if row[name] is not None}
    for place, env in enumerate(envs):
        widths = {name: len(blob) // len(envs) for name, blob in blobs.items()}
        yield env, {n: blobs[n][place * width : (place + 1) * width] for n, width in widths.items()}


def _authorize(action: int, first: str | None, *rest: str | None) -> int:
    allowed = action in _ALLOWED or (
        (action == sqlite3.SQLITE_PRAGMA and str(first).lower() in _ALLOWED_PRAGMAS)
        # How SQLite announces functions like json_each; the file itself is open to be read only.
        or (action == sqlite3.SQLITE_UPDATE and first == "sqlite_master")
    )
    return sqlite3.SQLITE_OK if allowed else sqlite3.SQLITE_DENY
