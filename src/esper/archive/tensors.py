"""Hashed, atomic directories of tensors: what every checkpoint is made of. Nothing is pickled.

    checkpoint/
      manifest.json                kind, version, notes, and the hash of the tensors
      tensors-<hash>.safetensors

The tensors' file is written first and named after its hash; then the manifest replaces the old
one in a single rename. Whenever the writer is killed, the directory holds the old archive or the
new one, whole.
"""

import hashlib
import json
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from esper.archive.files import replace_whole, write_whole
from esper.leyline.errors import EsperError, in_words

FORMAT = "esper-archive"
MANIFEST = "manifest.json"
TENSORS = "tensors-*.safetensors"
TEMPORARY = "writing.tmp"
Notes = Mapping[str, Any]  # whatever JSON can hold

_BODY = {"kind": str, "version": int, "file": str, "sha256": str, "notes": dict}


class ArchiveError(EsperError):
    """An archive that is missing, damaged, foreign or of another kind or version."""


def describing(said: str) -> AbstractContextManager[None]:
    """Refuse, in these words, notes in which something else stands than what is read there."""
    kinds = (LookupError, TypeError, ValueError, AttributeError, RecursionError)
    return in_words(said, kinds, error=ArchiveError)


@dataclass(frozen=True)
class Archive:
    """Tensors and notes of an archive, and the version of their format."""

    tensors: Mapping[str, Tensor]
    notes: Notes
    version: int = 0  # 0: not read from a file

    def part(self, prefix: str) -> dict[str, Tensor]:
        """The tensors whose names begin with this word and a dot, by what follows."""
        start = f"{prefix}."
        return {n.removeprefix(start): t for n, t in self.tensors.items() if n.startswith(start)}


def write_archive(
    path: str | Path,
    *,
    kind: str,
    version: int,
    tensors: Mapping[str, Tensor],
    notes: Notes,
    ready: Callable[[], object] = lambda: None,
    before: Path | None = None,
) -> Path:
    """Write tensors and notes to the directory `path`, replacing the archive that is there.

    `ready` is called before the one rename by which it does; then the archive that was there takes
    its place in the directory `before`.
    """
    folder = Path(path)
    _require_ours(folder)
    last = folder / MANIFEST
    replaced = last.read_bytes() if before is not None and last.is_file() else b""
    folder.mkdir(parents=True, exist_ok=True)
    temporary = folder / TEMPORARY
    data = save({name: each.detach().cpu().contiguous().clone() for name, each in tensors.items()})
    temporary.write_bytes(data)  # by this process: with the modes and errors of any other file
    digest = hashlib.sha256(data).hexdigest()
    file = folder / TENSORS.replace("*", digest[:16])
    replace_whole(temporary, file)

    body = {"kind": kind, "version": version, "file": file.name, "sha256": digest, "notes": notes}
    text = json.dumps({"format": FORMAT, "seal": sealed(body), "body": body}, indent=1)
    temporary.write_text(text, encoding="utf-8")
    ready()
    replace_whole(temporary, last)
    olds = [old for old in folder.glob(TENSORS) if old != file]
    if before is not None and replaced and len(olds) == 1:
        before.mkdir(exist_ok=True)
        place = before / olds.pop().name
        (folder / place.name).rename(place)
        write_whole(before / MANIFEST, replaced)
        olds = [old for old in before.glob(TENSORS) if old != place]
    for old in olds:
        old.unlink()
    return folder


def read_archive(
    path: str | Path, *, kind: str, version: int, older_versions: tuple[int, ...] = ()
) -> Archive:
    """Read an archive; an archive that is replaced meanwhile is read again.

    Args:
        path: Directory of the archive.
        kind: Kind of the archive.
        version: Version of its format that is written today.
        older_versions: Versions that the caller can read as well.

    Raises:
        ArchiveError: The archive is missing, damaged, or of another kind or version.
    """
    folder = Path(path)
    while True:
        seal = seal_of(folder) if (folder / MANIFEST).is_file() else None
        try:
            with in_words(f"{folder} cannot be read", OSError, error=ArchiveError):
                return _read(folder, kind, (version, *older_versions))
        except ArchiveError:
            if seal is None or seal == seal_of(folder):
                raise


def _read(folder: Path, kind: str, versions: tuple[int, ...]) -> Archive:
    body, file = require_whole(folder)
    if body["kind"] != kind or body["version"] not in versions:
        raise ArchiveError(
            f"{folder} holds something else",
            given=f"{body['kind']} version {body['version']}",
            valid=f"{kind} version {' or '.join(map(str, versions))}",
            fix="load it with the version of Esper that wrote it",
        )
    with in_words(f"{file} cannot be read", SafetensorError, error=ArchiveError):
        return Archive(load_file(file), body["notes"], body["version"])


def require_whole(folder: Path) -> tuple[dict[str, Any], Path]:
    """The manifest's body and the tensors' file, after both were compared with their hashes."""
    body = _manifest(folder)
    file = folder / str(body["file"])
    if file.parent != folder or not file.is_file():
        raise ArchiveError(f"{folder} lacks its tensors", given=f"no file {file.name}")
    with file.open("rb") as stream:
        found = hashlib.file_digest(stream, "sha256").hexdigest()
    if found != body["sha256"]:
        raise ArchiveError(
            f"{file} is damaged",
            given=f"sha256 {found[:16]}...",
            valid=f"{body['sha256'][:16]}...",
            fix="use another copy",
        )
    return body, file


def kind_of(path: str | Path) -> str | None:
    """What kind of archive a directory holds; None if it holds none."""
    folder = Path(path)
    return str(_manifest(folder)["kind"]) if (folder / MANIFEST).is_file() else None


def seal_of(path: Path) -> str:
    """The hash of an archive's manifest, which holds the hash of the rest."""
    with in_words(f"{path} cannot be read", error=ArchiveError):
        return hashlib.sha256((path / MANIFEST).read_bytes()).hexdigest()


def not_finite(tensors: Mapping[str, Tensor]) -> list[str]:
    """Names of tensors that hold NaN or infinite numbers; a device is waited for once."""
    floating = {name: tensor for name, tensor in tensors.items() if tensor.is_floating_point()}
    sound = [tensor.isfinite().all().reshape(1) for tensor in floating.values()]
    flags = torch.cat(sound).tolist() if sound else []
    return [name for name, flag in zip(floating, flags, strict=True) if not flag]


def _require_ours(folder: Path) -> None:
    """Refuse to write among files that are not an archive's, or onto a file."""
    found = list(folder.iterdir()) if folder.is_dir() else [folder] if folder.exists() else []
    ours = (MANIFEST, TEMPORARY, TENSORS)
    foreign = [file.name for file in found if not any(file.match(name) for name in ours)]
    if foreign:
        raise ArchiveError(
            f"{folder} holds other files",
            given=", ".join(sorted(foreign)[:3]),
            fix="name an empty or a new directory",
        )


def _manifest(folder: Path) -> dict[str, Any]:
    """The body of the manifest, after it was checked against its seal."""
    file = folder / MANIFEST
    if not file.is_file():
        raise ArchiveError(
            f"{folder} is not an archive of Esper's",
            given=f"no {MANIFEST}" if folder.is_dir() else "no such directory",
            fix="name the directory that was saved",
        )
    with describing(f"{file} is damaged"):
        document = json.loads(file.read_text(encoding="utf-8"))
        known = document["format"] == FORMAT
        body: dict[str, Any] = document["body"]
        unchanged = document["seal"] == sealed(body)
        complete = all(type(body[name]) is kind for name, kind in _BODY.items())
    if not (known and unchanged and complete):
        raise ArchiveError(f"{file} is damaged or was edited", fix="use another copy")
    return body


def sealed(body: Mapping[str, Any]) -> str:
    """The hash of what JSON holds, whatever the order of its keys."""
    text = json.dumps(body, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()
