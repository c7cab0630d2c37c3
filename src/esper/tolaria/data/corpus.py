"""Python's own standard library as text, byte by byte.

Which bytes these are depends on the Python version alone, and their hash is recorded. Splits
are made of whole files, so that nothing of a test file was ever trained on.

Shapes: `M` windows, `T` bytes of a window.
"""

import hashlib
import os
import platform
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch

from esper.leyline.errors import DataError
from esper.leyline.streams import derive_seed
from esper.tolaria.data.splits import Split, Splits

VOCABULARY = 256
SHARES = {"test": 0.1, "validation": 0.1, "train": 0.8}  # of the bytes
END_OF_FILE = b"\0"
# Tests, other people's packages, and generated tables, many of which are nearly copies of one
# another: in two splits they would test memory.
SKIPPED_FOLDERS = {"test", "tests", "idlelib", "encodings", "pydoc_data"}
SKIPPED_FOLDERS |= {"site-packages", "dist-packages", "__pycache__"}
# What a machine or a distribution writes for itself.
SKIPPED_PREFIXES = ("config-", "_sysconfigdata", "sitecustomize", "usercustomize")

File = tuple[str, bytes]  # path relative to the corpus's folder, content


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """Source files in the order of their paths, without empty and repeated ones."""

    title: str
    files: tuple[File, ...]
    sha256: str  # of all paths and contents

    @property
    def size(self) -> int:
        return sum(len(content) for _, content in self.files)


def read_corpus(folder: Path | None = None) -> Corpus:
    """Every Python file below `folder`, or of the standard library."""
    home = Path(sysconfig.get_path("stdlib")) if folder is None else folder
    paths = []  # relative to `home`, with forward slashes
    for place, inside, names in os.walk(home):
        wanted = [name for name in inside if not name.startswith(SKIPPED_PREFIXES)]
        inside[:] = [name for name in wanted if name not in SKIPPED_FOLDERS]
        for name in names:
            if name.endswith(".py") and not name.startswith(SKIPPED_PREFIXES):
                paths.append((Path(place) / name).relative_to(home).as_posix())
    digest, seen, files = hashlib.sha256(), {b""}, []
    for name in sorted(paths):
        try:
            # Some installers write two bytes at the end of a line.
            content = (home / name).read_bytes().replace(b"\r\n", b"\n")
        except OSError as error:
            raise DataError(f"The file {home / name} cannot be read", given=error) from error
        if content not in seen:
            seen.add(content)
            files.append((name, content))
            digest.update(f"{name} {len(content)}\n".encode() + content)
    title = f"standard library of Python {platform.python_version()}" if folder is None else home
    return Corpus(title=str(title), files=tuple(files), sha256=digest.hexdigest())


def corpus_splits(corpus: Corpus, *, context: int, limit: int, seed: int) -> Splits:
    """Windows [M, T] of at most `limit` bytes in all; the label of a byte is the one after it.

    Files are taken in an order of chance. The test files do not depend on the seed.
    """
    total = min(limit, corpus.size)
    waiting = sorted(corpus.files, key=lambda file: derive_seed("test files", file[0]))
    splits = {}
    for name, share in SHARES.items():
        if name == "validation":
            waiting.sort(key=lambda file: derive_seed(seed, "validation files", file[0]))
        room, taken = int(share * total), []
        while waiting and room > 0:  # the last file is cut
            path, content = waiting.pop(0)
            taken.append((path, content[:room]))
            room -= len(content)
        text = b"".join(content + END_OF_FILE for _, content in sorted(taken))
        count = (len(text) - 1) // context  # consecutive windows, in the order of the files' paths
        if count < 1:
            raise DataError(
                f"There is too little text for a {name} split",
                given=f"{corpus.size} bytes in {len(corpus.files)} files of {corpus.title}",
                valid=f"at least {context} bytes in each split",
                fix="install Python with its sources, or name another folder",
            )
        size, values = count * context, torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
        parts = (values[first : first + size].view(count, context) for first in (0, 1))
        splits[name] = Split(*parts)
    origin = f"{corpus.title}, {len(corpus.files)} files, sha256 {corpus.sha256}"
    return Splits(**splits, classes=VOCABULARY, origin=origin)
