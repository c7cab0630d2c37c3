"""The run store: one SQLite file for each run, that other processes read while it is written.

The tables follow from the events. Those of `decisions` and `steps` have a row for each environment
and step; their key is (round, step, env). In a large population only the first environments have
rows of their own, and `packs` holds those of all others, an array for each column of a step.
`observations` has a row for each step, with arrays over the watched environments. Both have a row
for each process, told apart by the number of its `first` environment. All other events have rows in
their order; their key is (round, event, n).

A batch of events is one transaction. Rows go in many at a time: each statement is one call in which
other Python threads can run. Its parameters have no numbers: from Python 3.12 on, each one with a
name or a number is looked for among all of them, while no other thread can run.

Shapes: `N` environments, `W` watched ones, `K` those that were active.
"""

import sqlite3
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import asdict, replace
from functools import lru_cache
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from esper.leyline.errors import AgreementError, EsperError, first_line, in_words
from esper.nissa.events import KINDS, Decisions, Event, StepEvent
from esper.nissa.hub import tell
from esper.nissa.schema import Numeric, RunLayout

FILE = "events.sqlite"
SCHEMA_VERSION = 3  # of tables and columns; files of others are refused
APPLICATION = 0x45535052  # "ESPR", in the header of every such file
BUSY_SECONDS = 30.0
DEFAULT_ROWS = 256  # environments that have rows of their own
Columns = Mapping[str, Sequence[Any]]  # of one length
CHUNKS = (256, 64, 16, 4, 1)  # rows of a statement; few sizes, so that statements are prepared once

BLOBS = {
    field.blob.column: field.blob
    for field in Decisions.declared.values()
    if isinstance(field, Numeric) and field.blob is not None
}
"""Columns of `observations`, with what people read in them."""
_OTHER_TABLES = (
    "meta (name TEXT PRIMARY KEY, value TEXT) WITHOUT ROWID",
    "names (kind TEXT, place INTEGER, name TEXT, PRIMARY KEY (kind, place)) WITHOUT ROWID",
    # Numbers of events are not used again after a rewind, so that a follower misses nothing.
    "events (id INTEGER PRIMARY KEY AUTOINCREMENT, round INTEGER, step INTEGER, kind TEXT, "
    "version INTEGER, time REAL)",
    "commits (round INTEGER PRIMARY KEY, time REAL)",
    f"observations (round INTEGER, step INTEGER, first INTEGER, envs BLOB, "
    f"{', '.join(f'{name} BLOB' for name in BLOBS)}, "
    "PRIMARY KEY (round, step, first)) WITHOUT ROWID",
    "packs (round INTEGER, step INTEGER, kind TEXT, first INTEGER, name TEXT, dtype TEXT, "
    "data BLOB, PRIMARY KEY (round, step, kind, first, name)) WITHOUT ROWID",
)


class StoreError(EsperError):
    """A run's file that is missing, damaged, foreign or of another version."""


def tables() -> list[str]:
    """Every table whose rows belong to a round."""
    return ["events", "commits", "observations", "packs", *(of.table for of in KINDS.values())]


def columns_of(kind: type[Event], layout: RunLayout) -> dict[str, str]:
    """The columns of an event's table, with their types in SQL."""
    columns = dict.fromkeys(kind.key, "INTEGER")
    for name, field in kind.declared.items():
        columns |= field.columns(name, layout)
    return columns


def schema(layout: RunLayout) -> list[str]:
    """The statements that make an empty file."""
    taken = columns_of(Decisions, replace(layout, heads=()))
    clashing = [name for name in layout.heads if name.lower() in taken]
    if clashing:
        raise AgreementError(
            "A head's name becomes a column of `decisions`, and that one is taken",
            given=", ".join(clashing),
        )
    tables = list(_OTHER_TABLES)
    for kind in KINDS.values():
        columns = [f"{quoted(name)} {sql}" for name, sql in columns_of(kind, layout).items()]
        columns.append(f"PRIMARY KEY ({', '.join(kind.key)})")
        tables.append(f"{kind.table} ({', '.join(columns)}) WITHOUT ROWID")
    return [f"CREATE TABLE {table}" for table in tables]


def quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def file_of(path: str | Path) -> Path:
    """The file of a run, given it or its directory."""
    path = Path(path)
    return path / FILE if path.is_dir() else path


def connect(path: Path, *, read_only: bool = False) -> sqlite3.Connection:
    """Open a file; statements are transactions of their own unless one is begun."""
    mode = "ro" if read_only else "rwc"
    return sqlite3.connect(
        f"{path.resolve().as_uri()}?mode={mode}",
        uri=True,
        isolation_level=None,
        timeout=BUSY_SECONDS,
        check_same_thread=False,
        cached_statements=256,
    )


def read_layout(connection: sqlite3.Connection, path: Path) -> RunLayout:
    """The layout of an open file, after a look at whose it is and of which version."""
    fix = "use a copy, or delete it and start anew"
    with in_words(f"{path} cannot be read", fix=fix, error=StoreError):
        ((application,),) = connection.execute("PRAGMA application_id").fetchall()
        ((version,),) = connection.execute("PRAGMA user_version").fetchall()
        if application != APPLICATION:
            raise StoreError(
                f"{path} is not a run's file",
                given=f"a database of another application ({application:#x})",
                fix=f"name the directory of a run, or its {FILE}",
            )
        if version != SCHEMA_VERSION:
            raise StoreError(
                f"{path} has another version of the tables",
                given=f"version {version}",
                valid=f"version {SCHEMA_VERSION}",
                fix="read it with the version of Esper that wrote it",
            )
        ((text,),) = connection.execute("SELECT value FROM meta WHERE name = 'layout'").fetchall()
        return RunLayout.from_json(text)


# --- from events to rows ---------------------------------------------------------------------


def rows_of(event: Event, layout: RunLayout, rows: int = DEFAULT_ROWS) -> dict[str, Columns]:
    """What an event adds to each table; round, step or event are added by the store.

    `rows`: of how many environments decisions and steps are rows; the others' are packed.
    """
    columns: dict[str, Any] = {}
    for name, field in event.declared.items():
        value = getattr(event, name)
        if value is not None:
            columns |= field.stored(name, value, layout)
    if isinstance(event, StepEvent):
        del columns["step"]
        return _by_environment(event, columns, layout, rows)
    columns = {n: c.tolist() if isinstance(c, np.ndarray) else c for n, c in columns.items()}
    lists = [column for column in columns.values() if isinstance(column, list | tuple)]
    count = len(lists[0]) if lists else 1
    return {
        event.table: {
            name: column if isinstance(column, list | tuple) else [column] * count
            for name, column in columns.items()
        }
    }


def _by_environment(
    event: StepEvent, columns: Mapping[str, NDArray[Any]], layout: RunLayout, rows: int
) -> dict[str, Columns]:
    """The active environments as rows, beyond the first ones as packs; the watched ones' blobs."""
    count = len(next(iter(columns.values())))  # N
    active = np.arange(count) if event.active is None else np.flatnonzero(event.active)
    arrays = {"env": (active + event.first_env).astype("<i4")}  # [K] each
    arrays |= {name: array[active] for name, array in columns.items()}
    few = int(np.searchsorted(active, rows))
    made: dict[str, Columns] = {
        event.table: {name: array[:few].tolist() for name, array in arrays.items()}
    }
    if few < len(active):
        many = [array[few:] for array in arrays.values()]
        made["packs"] = {
            "kind": [event.table] * len(many),
            "first": [event.first_env] * len(many),
            "name": list(arrays),
            "dtype": [array.dtype.str for array in many],
            "data": [array.tobytes() for array in many],
        }
    return made | _watched(event, active, layout)


def _watched(event: StepEvent, active: NDArray[np.intp], layout: RunLayout) -> dict[str, Columns]:
    """One row for all watched environments of a step: each blob holds an array over them."""
    parts: dict[str, NDArray[Any]] = {}
    watched: list[int] = []
    for name, field in event.declared.items():
        value = getattr(event, name)
        if isinstance(field, Numeric) and field.blob is not None and value is not None:
            parts[field.blob.column] = field.blob.encode(value, layout)
            watched += [len(value)] if field.watched else []
    if not any(watched):
        return {}
    active = active[active < min(watched)]
    parts = {name: part[active] for name, part in parts.items()}
    parts["envs"] = (active + event.first_env).astype("<i4")
    blobs = {name: [part.tobytes()] for name, part in parts.items()}
    return {"observations": {"first": [event.first_env], **blobs}}


# --- the store -------------------------------------------------------------------------------


def usable_store(path: Path, layout: RunLayout, *, after: int) -> "RunStore | None":
    """The telemetry of a run, rewound to a round; None: it cannot be used, which is told."""
    try:
        store = RunStore(path, layout)
        whole = store.last_commit
        store.rewind(-1 if whole is None else min(whole, after))
    except (EsperError, OSError, sqlite3.Error) as error:
        tell(f"The run goes on without telemetry of its own: {first_line(error)}")
        return None
    return store


class RunStore(AbstractContextManager["RunStore"]):
    """Writes a run's file. Made in any thread, written to by one at a time."""

    name = "run store"

    def __init__(self, path: str | Path, layout: RunLayout, rows: int = DEFAULT_ROWS) -> None:
        """`path` is a run's directory or the file; what exists must have the same layout.

        `rows`: of how many environments decisions and steps are rows for SQL; those of all others
        are kept as arrays, at a hundredth of the cost.
        """
        self.path, self.layout, self.rows = file_of(path), layout, rows
        self._lock = threading.Lock()
        fix = f"name a directory that can be written to, or move a damaged {FILE} away"
        kinds = (sqlite3.DatabaseError, OSError)
        with in_words(f"{self.path} cannot be opened", kinds, fix=fix, error=StoreError):
            self.path.touch()  # with the user's modes, which SQLite then keeps to
            self._connection = connect(self.path)
            self._prepare()
            self._measures = self._columns("steps")

    def _prepare(self) -> None:
        connection, layout = self._connection, self.layout
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = NORMAL")
        connection.execute("PRAGMA cache_size = -16000")  # KiB: a batch fits
        ((tables,),) = connection.execute("SELECT count(*) FROM sqlite_schema").fetchall()
        if tables:
            ours, theirs = asdict(layout), asdict(read_layout(connection, self.path))
            for name in ours:
                if ours[name] != theirs[name]:
                    raise StoreError(
                        f"{self.path} belongs to a run with other names",
                        given=f"{name} {ours[name]}, in the file {theirs[name]}"[:400],
                        fix="give every run a directory of its own",
                    )
            return
        with _transaction(connection):
            for statement in schema(layout):
                connection.execute(statement)
            connection.execute("INSERT INTO meta VALUES ('layout', ?)", (layout.to_json(),))
            connection.executemany("INSERT INTO names VALUES (?, ?, ?)", layout.names())
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
                with _transaction(self._connection):
                    for event in batch:
                        self._add(event, now)
            except BaseException:
                self._measures = self._columns("steps")  # new ones went with the batch
                raise

    def commit(self, round: int) -> None:
        """Mark a round as whole; what was written is on the disk when this returns."""
        with self._lock:
            self._connection.execute("PRAGMA synchronous = FULL")
            try:
                with _transaction(self._connection):
                    self._connection.execute(
                        "INSERT OR REPLACE INTO commits VALUES (?, ?)", (round, time.time())
                    )
            finally:
                self._connection.execute("PRAGMA synchronous = NORMAL")

    def rewind(self, round: int) -> None:
        """Forget everything after `round`."""
        with self._lock, _transaction(self._connection):
            for table in tables():
                self._connection.execute(f"DELETE FROM {table} WHERE round > ?", (round,))  # noqa: S608

    def close(self) -> None:
        """Leave one plain file, which can be read where nothing can be written, if nobody reads."""
        with self._lock:
            with suppress(sqlite3.Error):
                self._connection.execute("PRAGMA busy_timeout = 0")
                self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")  # also if one reads
                self._connection.execute("PRAGMA journal_mode = DELETE")
            self._connection.close()

    def __exit__(self, *failure: object) -> None:
        self.close()

    def _add(self, event: Event, now: float) -> None:
        step = getattr(event, "step", None)
        number = self._connection.execute(
            "INSERT INTO events (round, step, kind, version, time) VALUES (?, ?, ?, ?, ?)",
            (event.round, step, event.kind, event.version, now),
        ).lastrowid
        for table, columns in rows_of(event, self.layout, self.rows).items():
            if table == "steps" and not self._measures.issuperset(columns):
                # Measurements become columns when they first come, or another process did it.
                self._measures = self._columns(table)
                for name in (name for name in columns if name not in self._measures):
                    self._connection.execute(f"ALTER TABLE {table} ADD COLUMN {quoted(name)} REAL")
                self._measures |= columns.keys()
            count = len(next(iter(columns.values())))
            shared = {"round": event.round, "step": step}
            if not isinstance(event, StepEvent):
                columns = {"n": range(count), **columns}
                shared = {"round": event.round, "event": number}
            names = (*shared, *columns)
            for first, size in _chunks(count):
                part = [column[first : first + size] for column in columns.values()]
                rows = zip(*(repeat(value, size) for value in shared.values()), *part, strict=True)
                flat = list(chain.from_iterable(rows))
                self._connection.execute(_statement(table, names, size), flat)

    def _columns(self, table: str) -> set[str]:
        found = self._connection.execute("SELECT name FROM pragma_table_info(?)", (table,))
        return {name for (name,) in found}


@contextmanager
def _transaction(connection: sqlite3.Connection) -> Iterator[None]:
    """All or nothing."""
    with connection:  # at the end it commits, or if that or the block fails rolls back
        connection.execute("BEGIN IMMEDIATE")
        yield


def _chunks(rows: int) -> Iterator[tuple[int, int]]:
    """(first row, number of rows), largest chunks first."""
    first = 0
    for size in CHUNKS:
        while rows - first >= size:
            yield first, size
            first += size


@lru_cache(maxsize=256)
def _statement(table: str, names: tuple[str, ...], rows: int) -> str:
    values = ", ".join(repeat(f"({', '.join('?' * len(names))})", rows))
    columns = ", ".join(map(quoted, names))
    return f"INSERT INTO {table} ({columns}) VALUES {values}"  # noqa: S608
