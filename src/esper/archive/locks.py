"""A folder that one process at a time may write."""

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from esper.leyline.errors import EsperError

LOCK = "lock"
LOCK_SECONDS = 3.0  # that children of a killed run have to end


@contextmanager
def held(folder: Path, error: type[EsperError] = EsperError) -> Iterator[int]:
    """Hold a run's folder; refused while another process does. Yields the lock's descriptor.

    A lock does not outlive the processes that hold it; those of a run that was killed need a
    moment to notice, which is waited for.
    """
    with (folder / LOCK).open("a+", encoding="utf-8") as stream:
        until = time.monotonic() + LOCK_SECONDS
        while not _locked(stream.fileno()):
            if time.monotonic() > until:
                stream.seek(0)
                raise error(
                    f"{folder} is being trained by another process",
                    given=f"process {stream.read().strip() or 'unknown'}",
                    fix="wait for it or stop it",
                )
            time.sleep(0.05)
        stream.seek(0)
        stream.truncate()
        stream.write(f"{os.getpid()}\n")
        stream.flush()
        yield stream.fileno()


def _locked(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
