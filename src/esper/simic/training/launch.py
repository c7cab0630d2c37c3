"""Starting a run: in this process, and in others that learn with it when more cores are asked for.

The others are children that follow this one: they hold its lock on the run, are told of nothing
by signals, stop when it does, and end within moments if it is killed. If one of them fails, all
end, and this one says why.
"""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import torch

from esper.leyline.errors import EsperError, UnknownNameError
from esper.simic.agent.processes import ALONE, Processes, ProcessesError
from esper.simic.training.config import DEVICES, TrainConfig
from esper.simic.training.interrupts import Stopping
from esper.simic.training.loop import Trainer
from esper.simic.training.rounds import Listener, Telling
from esper.simic.training.runs import RunError, RunFolder
from esper.simic.training.worker import reason_file

LOOPBACK = "lo"
PATIENCE = timedelta(minutes=10)  # with a process that computes
ENDING_SECONDS = 5.0  # that children have to end by themselves

Children = list[subprocess.Popen[bytes]]


def train_run(
    run: RunFolder,
    *,
    listener: Listener = lambda report: None,
    tell: Telling = lambda what, done, total: None,
    stop: Stopping | None = None,
) -> bool:
    """Train a run to its end, from its last checkpoint on; False if it was stopped before."""
    stop = stop or Stopping()
    config = run.config
    require_device(config.device)
    if config.device == "cpu":
        torch.set_num_threads(1)  # small operations are many times slower with more
    try:
        with run.locked() as lock, stop.listening(), _group(run, config, lock, stop) as processes:
            trainer = Trainer(run, processes=processes, tell=tell, stop=stop)
            try:
                return trainer.begin() and trainer.train(listener)
            finally:
                trainer.close()
    except OSError as error:  # a full disk, a directory that is gone
        raise RunError(
            f"A file could not be read or written while {run.path} was trained",
            given=error,
            fix=f"make room for it, then go on with: esper resume {run.path}",
        ) from error


def require_device(name: str, option: str = "device") -> None:
    """Refuse a device that is unknown or not there; `option` is what it was given by."""
    if name not in DEVICES:
        raise UnknownNameError.of("device", name, DEVICES)
    if name == "cuda" and not torch.cuda.is_available():
        raise EsperError(
            "There is no CUDA device",
            given=f"{option} cuda",
            valid="cpu",
            fix=f"set {option} to cpu",
        )


@contextmanager
def _group(run: RunFolder, config: TrainConfig, lock: int, stop: Stopping) -> Iterator[Processes]:
    """The processes of a run, this one the first of them."""
    if config.processes == 1:
        yield ALONE
        return
    with tempfile.TemporaryDirectory(prefix="esper-") as folder:
        place = Path(folder)
        children = stop.children = _started(run, config.processes, place, lock)
        try:
            with joined(place, 0, config.processes, lambda: _require_life(children, place)) as all_:
                yield all_
        except EsperError:
            raise
        except RuntimeError as error:
            _explain(error, children, place)
            raise
        finally:
            _end(children)


def _started(run: RunFolder, size: int, place: Path, lock: int) -> Children:
    words = [sys.executable, "-m", "esper.simic.training.worker", str(run.path), str(place)]
    return [
        subprocess.Popen(  # noqa: S603 - our own module, with numbers and paths
            [*words, str(rank), str(os.getpid())],
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            pass_fds=(lock,),
            process_group=0,  # a terminal's Ctrl-C is for the first process
        )
        for rank in range(1, size)
    ]


def _require_life(children: Children, place: Path) -> None:
    """Say which child has ended, and why, if one has."""
    for rank, child in enumerate(children, start=1):
        code = child.poll()
        if code is None:
            continue
        reason = reason_file(place, rank)
        given = reason.read_text(encoding="utf-8") if reason.exists() else f"exit code {code}"
        if code < 0:
            given = f"killed by signal {-code}"
        raise ProcessesError(
            f"Process {rank + 1} of the {len(children) + 1} that learn together ended",
            given=given,
            fix="nothing before the last checkpoint is lost: go on with esper resume",
        )


def _explain(error: RuntimeError, children: Children, place: Path) -> None:
    """If an error comes from a child's end, raise one that says so."""
    if not _is_lost_connection(error):
        return
    until = time.monotonic() + ENDING_SECONDS
    while time.monotonic() < until:
        try:
            _require_life(children, place)
        except ProcessesError as found:
            raise found from error
        time.sleep(0.05)
    raise ProcessesError("A process that learns with this one no longer answers") from error


def _is_lost_connection(error: RuntimeError) -> bool:
    text = str(error).lower()
    return any(word in text for word in ("gloo", "peer", "connection", "timed out", "timeout"))


def _end(children: Children) -> None:
    """Give children a moment to end by themselves."""
    until = time.monotonic() + ENDING_SECONDS
    for child in children:
        try:
            child.wait(max(0.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()


@contextmanager
def joined(
    place: Path, rank: int, size: int, check: Callable[[], None] = lambda: None
) -> Iterator[Processes]:
    """Meet the other processes of a run in a folder that all know; `check` may raise meanwhile."""
    from torch import distributed

    os.environ.setdefault("GLOO_SOCKET_IFNAME", LOOPBACK)
    store = distributed.FileStore(str(place / "meeting"), size)  # type: ignore[attr-defined]
    store.set_timeout(PATIENCE)
    here = store.add("here", 1)
    while here < size:  # waiting for connections would not notice one that has ended
        check()
        time.sleep(0.02)
        here = store.add("here", 0)
    distributed.init_process_group(
        "gloo", store=store, rank=rank, world_size=size, timeout=PATIENCE
    )
    try:
        yield Processes.joined()
    finally:
        distributed.destroy_process_group()
