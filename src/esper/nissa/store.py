"""The run store: one SQLite file for each run, that other processes read while it is written.

A batch of events is one transaction. Rows go in many at a time, in statements that do not repeat
what all rows share: each statement is one call in which other Python threads can run.
"""

import sqlite3
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import lru_cache
from itertools import chain
from pathlib import Path

from esper.nissa.events import Event
from esper.nissa.layout import Layout
from esper.nissa.rows import DEFAULT_ROWS, Rows, rows_of
from esper.nissa.tables import (
    APPLICATION,
    BY_STEP,
    FILE,
    ROUND_TABLES,
    SCHEMA_VERSION,
    StoreError,
    connect,
    file_of,
    quoted,
    read_layout,
    schema,
)

CHUNKS = (256, 64, 16, 4, 1)  # rows of a statement; few sizes, so that statements are prepared once


class RunStore:
    """Writes a run's file. Made in any thread, written to by one at a time."""

    name = "run store"

    def __init__(self, path: str | Path, layout: Layout, rows: int = DEFAULT_ROWS) -> None:
        """`path` is a run's directory or the file; what exists must have the same layout.

        `rows`: of how many environments decisions and steps are rows for SQL; those of all others
        are kept as arrays, at a hundredth of the cost.
        """
        self.path, self.layout, self.rows = file_of(path), layout, rows
        self._lock = threading.Lock()
        try:
            self._connection = connect(self.path)
            self._prepare()
            self._measures = self._columns_of_steps()
        except sqlite3.DatabaseError as error:
            raise StoreError(
                f"{self.path} cannot be opened",
                given=error,
                fix=f"name a directory that can be written to, or move a damaged {FILE} away",
            ) from error

    def _prepare(self) -> None:
        connection = self._connection
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = NORMAL")
        connection.execute("PRAGMA cache_size = -16000")  # KiB: a batch fits
        ((tables,),) = connection.execute("SELECT count(*) FROM sqlite_schema").fetchall()
        if tables:
            found = read_layout(connection, self.path)
            if found != self.layout:
                raise StoreError(
                    f"{self.path} belongs to a run with other names",
                    given=_difference(self.layout, found),
                    fix="give every run a directory of its own",
                )
            return
        with self._transaction():
            for statement in schema(self.layout):
                connection.execute(statement)
            layout = ("layout", self.layout.to_json())
            connection.execute("INSERT INTO meta VALUES (?, ?)", layout)
            connection.executemany("INSERT INTO names VALUES (?, ?, ?)", self.layout.names())
            connection.execute(f"PRAGMA application_id = {APPLICATION}")
            connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")

    @property
    def last_commit(self) -> int | None:
        """The latest round that is known to be whole."""
        with self._lock:
            ((latest,),) = self._connection.execute("SELECT max(round) FROM commits").fetchall()
        return None if latest is None else int(latest)

    def write(self, batch: Sequence[Event]) -> None:
        """Add events, all of them or, if it raises, none."""
        now = time.time()
        with self._lock:
            try:
                with self._transaction():
                    for event in batch:
                        self._add(event, now)
            except BaseException:
                self._measures = self._columns_of_steps()  # new ones went with the batch
                raise

    def commit(self, round: int) -> None:
        """Mark a round as whole; what was written is on the disk when this returns."""
        with self._lock:
            self._connection.execute("PRAGMA synchronous = FULL")
            try:
                with self._transaction():
                    self._connection.execute(
                        "INSERT OR REPLACE INTO commits VALUES (?, ?)", (round, time.time())
                    )
            finally:
                self._connection.execute("PRAGMA synchronous = NORMAL")

    def rewind(self, round: int) -> int | None:
        """Forget everything after `round`; returns the latest round that is known to be whole.

        If that is an earlier one, the store had failed before the checkpoint was written.
        """
        with self._lock, self._transaction():
            for table in ROUND_TABLES:
                self._connection.execute(f"DELETE FROM {table} WHERE round > ?", (round,))  # noqa: S608
        return self.last_commit

    def close(self) -> None:
        """Leave one plain file, which can be read where nothing can be written, if nobody reads."""
        with self._lock:
            with suppress(sqlite3.Error):
                self._connection.execute("PRAGMA busy_timeout = 0")
                self._connection.execute("PRAGMA journal_mode = DELETE")
            self._connection.close()

    def __enter__(self) -> "RunStore":
        return self

    def __exit__(self, *failure: object) -> None:
        self.close()

    def _transaction(self) -> "_Transaction":
        return _Transaction(self._connection)

    def _add(self, event: Event, now: float) -> None:
        step = getattr(event, "step", None)
        number = self._connection.execute(
            "INSERT INTO events (round, step, kind, version, time) VALUES (?, ?, ?, ?, ?)",
            (event.round, step, event.kind, event.version, now),
        ).lastrowid
        for rows in rows_of(event, self.layout, self.rows):
            if rows.table in BY_STEP:
                self._measure(rows)
                self._insert(rows, ("round", "step"), (event.round, step))
            else:
                columns = {"n": range(len(rows)), **rows.columns}
                self._insert(Rows(rows.table, columns), ("round", "event"), (event.round, number))

    def _columns_of_steps(self) -> set[str]:
        found = self._connection.execute("SELECT name FROM pragma_table_info('steps')")
        return {name for (name,) in found}

    def _measure(self, rows: Rows) -> None:
        """Columns of `steps` come into being with the first measurement of their name."""
        if rows.table == "steps":
            if not self._measures.issuperset(rows.columns):
                self._measures = self._columns_of_steps()  # another process may have made them
            for name in rows.columns:
                if name not in self._measures:
                    self._connection.execute(f"ALTER TABLE steps ADD COLUMN {quoted(name)} REAL")
                    self._measures.add(name)

    def _insert(self, rows: Rows, shared: tuple[str, str], values: tuple[object, object]) -> None:
        names, columns = (*shared, *rows.columns), list(rows.columns.values())
        for first, size in _chunks(len(rows)):
            part = (column[first : first + size] for column in columns)
            flat = [*values, *chain.from_iterable(zip(*part, strict=True))]
            self._connection.execute(_statement(rows.table, names, size), flat)


class _Transaction:
    """All or nothing."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection

    def __enter__(self) -> None:
        self._connection.execute("BEGIN IMMEDIATE")

    def __exit__(self, failure: type[BaseException] | None, *rest: object) -> None:
        try:
            if failure is None:
                self._connection.execute("COMMIT")
        finally:
            if self._connection.in_transaction:
                self._connection.execute("ROLLBACK")


def _chunks(rows: int) -> Iterator[tuple[int, int]]:
    """(first row, number of rows), largest chunks first."""
    first = 0
    for size in CHUNKS:
        while rows - first >= size:
            yield first, size
            first += size


@lru_cache(maxsize=256)
def _statement(table: str, names: tuple[str, ...], rows: int) -> str:
    """Insert rows whose first two columns are the same in all of them."""
    width = len(names) - 2
    values = ", ".join(
        f"(?1, ?2, {', '.join(f'?{3 + row * width + place}' for place in range(width))})"
        for row in range(rows)
    )
    columns = ", ".join(map(quoted, names))
    return f"INSERT INTO {table} ({columns}) VALUES {values}"  # noqa: S608


def _difference(ours: Layout, theirs: Layout) -> str:
    for name in ("heads", "actions", "features", "slots", "blueprints", "relevance"):
        if getattr(ours, name) != getattr(theirs, name):
            return f"{name} {getattr(ours, name)}, in the file {getattr(theirs, name)}"[:400]
    return "equal layouts"
