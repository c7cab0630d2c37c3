"""The tables of a run's file, and how it is opened.

`decisions` and `steps` have a row for each environment and step; their key is (round, step, env).
In a large population only the first environments have rows of their own, and `packs` holds those
of all others, an array for each column of a step. `observations` has a row for each step, with
arrays over the watched environments. Both have a row for each process, told apart by the number of
its `first` environment. All other tables have rows in the order of events; their key
is (round, event, n).
"""

import sqlite3
from collections.abc import Mapping
from pathlib import Path

from esper.leyline.errors import AgreementError, EsperError
from esper.nissa.layout import Layout

FILE = "events.sqlite"
SCHEMA_VERSION = 1
APPLICATION = 0x45535052  # "ESPR", in the header of every such file
BUSY_SECONDS = 30.0

STEP_KEY = ("round", "step", "env")
EVENT_KEY = ("round", "event", "n")
BY_STEP = ("decisions", "observations", "steps", "packs")
KEYS: Mapping[str, tuple[str, ...]] = {
    "events": ("id",),
    "commits": ("round",),
    "packs": ("round", "step", "kind", "first", "name"),
    "observations": ("round", "step", "first"),
    **dict.fromkeys(("decisions", "steps"), STEP_KEY),
}
"""Keys of all tables whose key is not that of events."""

_EVENT_TABLES: Mapping[str, str] = {
    "runs": "config TEXT, versions TEXT, seeds TEXT, data TEXT",
    "lifecycle": "step INTEGER, env INTEGER, slot TEXT, before TEXT, after TEXT, cause TEXT, "
    "blueprint TEXT, reason TEXT",
    "episodes": "step INTEGER, env INTEGER, context TEXT, seed INTEGER, test REAL, "
    "validation REAL, control REAL, net_gain REAL, returns REAL, added INTEGER, exposure REAL, "
    "interventions INTEGER, rolled_back INTEGER",
    "rollbacks": "step INTEGER, env INTEGER, reason TEXT",
    "updates": "name TEXT, value REAL",
    "evaluations": "controller TEXT, context TEXT, score REAL, low REAL, high REAL, "
    "episodes INTEGER",
    "anomalies": "name TEXT, head TEXT, raised INTEGER, seen REAL, threshold REAL, "
    "updates INTEGER, message TEXT, advice TEXT",
    "samples": "step INTEGER, name TEXT, value REAL",
    "notes": "text TEXT",
    "dropped": "sink TEXT, what TEXT, count INTEGER",
}
ROUND_TABLES = ("events", "commits", *BY_STEP, *_EVENT_TABLES)
"""Every table whose rows belong to a round."""

TABLES_OF_KINDS: Mapping[str, str] = {
    "run": "runs",
    "decision": "decisions",
    "step": "steps",
    "lifecycle": "lifecycle",
    "episode": "episodes",
    "rollback": "rollbacks",
    "update": "updates",
    "evaluation": "evaluations",
    "anomaly": "anomalies",
    "sample": "samples",
    "note": "notes",
    "dropped": "dropped",
}


class StoreError(EsperError):
    """A run's file that is missing, damaged, foreign or of another version."""


def schema(layout: Layout) -> list[str]:
    """The statements that make an empty file."""
    heads = ", ".join(f"{quoted(name)} INTEGER" for name in layout.heads)
    rows = {
        "decisions": f"{heads}, value REAL, log_prob REAL",
        "steps": "reward REAL",
    }
    taken = {*STEP_KEY, "value", "log_prob"}
    clashing = [name for name in layout.heads if name.lower() in taken]
    if clashing:
        raise AgreementError(
            "A head's name becomes a column of `decisions`, and that one is taken",
            given=", ".join(clashing),
        )
    return [
        "CREATE TABLE meta (name TEXT PRIMARY KEY, value TEXT) WITHOUT ROWID",
        "CREATE TABLE names (kind TEXT, place INTEGER, name TEXT, PRIMARY KEY (kind, place)) "
        "WITHOUT ROWID",
        # Numbers of events are not used again after a rewind, so that a follower misses nothing.
        "CREATE TABLE events (id INTEGER PRIMARY KEY AUTOINCREMENT, round INTEGER, step INTEGER, "
        "kind TEXT, version INTEGER, time REAL)",
        "CREATE TABLE commits (round INTEGER PRIMARY KEY, time REAL)",
        "CREATE TABLE observations (round INTEGER, step INTEGER, first INTEGER, envs BLOB, "
        "observation BLOB, masks BLOB, probabilities BLOB, log_probs BLOB, "
        "PRIMARY KEY (round, step, first)) WITHOUT ROWID",
        "CREATE TABLE packs (round INTEGER, step INTEGER, kind TEXT, first INTEGER, name TEXT, "
        "dtype TEXT, data BLOB, PRIMARY KEY (round, step, kind, first, name)) WITHOUT ROWID",
        *(
            f"CREATE TABLE {name} (round INTEGER, step INTEGER, env INTEGER, {columns}, "
            "PRIMARY KEY (round, step, env)) WITHOUT ROWID"
            for name, columns in rows.items()
        ),
        *(
            f"CREATE TABLE {name} (round INTEGER, event INTEGER, n INTEGER, {columns}, "
            "PRIMARY KEY (round, event, n)) WITHOUT ROWID"
            for name, columns in _EVENT_TABLES.items()
        ),
    ]


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


def read_layout(connection: sqlite3.Connection, path: Path) -> Layout:
    """The layout of an open file, after a look at whose it is and of which version."""
    try:
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
        return Layout.from_json(text)
    except (sqlite3.DatabaseError, ValueError, LookupError, TypeError) as error:
        raise StoreError(
            f"{path} cannot be read", given=error, fix="use a copy, or delete it and start anew"
        ) from error
