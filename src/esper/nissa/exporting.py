"""A run's file as lines of JSON, one for each row."""

import json
import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from esper.nissa.decoding import (
    blobs_by_environment,
    legal_of,
    log_probs_of,
    observation_of,
    packed_rows,
    probabilities_of,
)
from esper.nissa.layout import Layout
from esper.nissa.tables import ROUND_TABLES

if TYPE_CHECKING:
    from esper.nissa.reader import RunReader

_JSON = ("config", "versions", "seeds", "data")
_DECODED: Mapping[str, tuple[str, Callable[[bytes | None, Layout], Any]]] = {
    "observation": ("observation", observation_of),
    "masks": ("legal", legal_of),
    "probabilities": ("probabilities", probabilities_of),
    "log_probs": ("log_probs", log_probs_of),
}


def export_lines(reader: "RunReader", path: Path) -> int:
    """Write all tables to `path`; the file appears when it is whole."""
    unfinished = path.with_name(path.name + ".unfinished")
    lines = 0
    try:
        with unfinished.open("w", encoding="utf-8") as stream:
            for table in ROUND_TABLES:
                if table == "events":
                    continue  # each row of them is told by its own table
                for kind, row in _rows(reader, table):
                    stream.write(json.dumps({"type": kind, **_plain(kind, row, reader.layout)}))
                    stream.write("\n")
                    lines += 1
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)
    return lines


def _rows(reader: "RunReader", table: str) -> Iterable[tuple[str, Mapping[str, Any]]]:
    """(type, row); what is packed comes as the rows that it stands for."""
    if table == "packs":
        return packed_rows(reader.each(table))
    if table == "observations":
        return (
            (table, {"round": row["round"], "step": row["step"], "env": env, **blobs})
            for row in reader.each(table)
            for env, blobs in blobs_by_environment(row).items()
        )
    return ((table, row) for row in reader.each(table))


def _plain(table: str, row: Mapping[str, Any], layout: Layout) -> dict[str, Any]:
    plain: dict[str, Any] = {}
    for name, value in row.items():
        if isinstance(value, bytes) and name in _DECODED:
            name, decode = _DECODED[name]
            value = decode(value, layout)
        elif table == "runs" and name in _JSON:
            value = json.loads(value)
        elif isinstance(value, float) and not math.isfinite(value):
            value = str(value)  # JSON has no infinity
        plain[name] = value
    return plain
