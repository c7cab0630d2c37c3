"""Atomic writes of files, and settings as TOML.

Imports no torch.
"""

import os
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from esper.leyline.errors import DataError, in_words
from esper.leyline.settings import NONE


def write_whole(path: Path, content: str | bytes) -> None:
    """Replace a file in one rename, after its content has reached the disk."""
    temporary = unfinished(path)
    temporary.write_bytes(content if isinstance(content, bytes) else content.encode())
    replace_whole(temporary, path)


def append_lines(path: Path, lines: Iterable[str]) -> None:
    """Append to a file; the lines are on the disk when this returns."""
    with path.open("a", encoding="utf-8") as stream:
        stream.write("".join(f"{line}\n" for line in lines))
        stream.flush()
        os.fsync(stream.fileno())


def unfinished(path: Path) -> Path:
    """Where a file is written before it takes its place; whoever was killed leaves it behind."""
    return path.with_name(f".{path.name}")


def replace_whole(temporary: Path, final: Path) -> None:
    """Make the temporary file last and give it its name, in that order."""
    sync(temporary)
    os.replace(temporary, final)
    sync(final.parent)


def sync(path: Path) -> None:
    """Wait until a file, or the entries of a folder, are on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


# --- settings -----------------------------------------------------------------------------------


def as_toml(values: Mapping[str, Any]) -> str:
    """Nested settings as a file that `read_toml` reads back; None is written as a word."""
    import tomli_w  # nobody else needs it: what only trains runs where it is not installed

    return tomli_w.dumps({name: _plain(value) for name, value in values.items()})


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _plain(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    return NONE if value is None else value


def read_toml(path: Path, what: str = "file of settings") -> dict[str, Any]:
    """The tables of a TOML file; one sentence says what is wrong with it."""
    if not path.exists():
        raise DataError(f"There is no such {what}", given=path)
    with in_words(f"{path} cannot be read", OSError, error=DataError):
        content = path.read_bytes()
    with in_words(f"{path} is not TOML", error=DataError):
        return tomllib.loads(content.decode())
