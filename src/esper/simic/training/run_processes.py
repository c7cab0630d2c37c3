"""The processes of a run: this one, others that learn with it, and signals that ask them to stop.

When more cores are asked for, children learn with the first process: they hold its lock on the
run, are told of nothing by signals, stop when it does, and end within moments if it is killed. If
one of them fails, all end, and the first one says why. A child is started as
`python -m esper.simic.training.run_processes RUN PLACE RANK PARENT`; nothing here imports torch
before it is needed, so that it follows its parent before all that takes long.
"""

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from esper.leyline.errors import EsperError, require_known
from esper.simic.training.config import DEVICES

if TYPE_CHECKING:
    from esper.simic.agent.processes import Processes
    from esper.simic.training.trainer import Listener, Telling
    from esper.simic.training.training_runs import RunFolder

SIGNALS = (signal.SIGINT, signal.SIGTERM)
SHOW_CURSOR = "\x1b[?25h"  # a progress display may have hidden it
FOLLOWING_SECONDS = 0.2  # how often a child looks whether its parent lives
LOOPBACK = "lo"
PATIENCE = timedelta(minutes=10)  # with a process that computes
ENDING_SECONDS = 5.0  # that children have to end by themselves

Children = list[subprocess.Popen[bytes]]


class Stopping:
    """Remembers that a signal asked to stop.

    Signals are heard by a thread of its own, also while the others wait for another process.
    """

    def __init__(self, say: bool = True) -> None:
        self.signal: int | None = None
        self.children: Children = []  # a second signal ends these too
        self._say = say

    def __call__(self) -> bool:
        return self.signal is not None

    def ask(self, number: int = signal.SIGINT) -> None:
        """Ask to stop after the round, as this signal would."""
        self.signal = number

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Take over SIGINT and SIGTERM; where that is impossible, as in a thread, do not."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        hear, told = os.pipe()
        os.set_blocking(told, False)
        before = {number: signal.signal(number, lambda *_: None) for number in SIGNALS}
        earlier = signal.set_wakeup_fd(told, warn_on_full_buffer=False)
        listener = threading.Thread(target=self._listen, args=(hear,), name="stop", daemon=True)
        listener.start()
        try:
            yield
        finally:
            signal.set_wakeup_fd(earlier)
            for number, handler in before.items():
                signal.signal(number, handler)
            os.close(told)  # ends the listener
            listener.join()
            os.close(hear)

    def _listen(self, hear: int) -> None:
        while numbers := os.read(hear, 1):
            if numbers[0] not in SIGNALS:
                continue
            if self.signal is None:
                self.signal = numbers[0]
                if self._say:
                    text = "Stopping after this round; a second signal stops at once."
                    print(text, file=sys.stderr, flush=True)
                continue
            for child in self.children:
                child.kill()
            if sys.stderr.isatty():
                os.write(2, SHOW_CURSOR.encode())
            os._exit(128 + numbers[0])


# --- the first process ---------------------------------------------------------------------


def train_run(
    run: "RunFolder",
    *,
    listener: "Listener" = lambda report: None,
    tell: "Telling" = lambda what, done, total: None,
    stop: Stopping | None = None,
) -> bool:
    """Train a run to its end, from its last checkpoint on; False if it was stopped before."""
    import torch

    from esper.simic.training.trainer import Trainer
    from esper.simic.training.training_runs import RunError

    stop = stop or Stopping()
    device = run.config.device
    require_device(device)
    if device == "cpu":
        torch.set_num_threads(1)  # small operations are many times slower with more
    try:
        with (
            run.locked() as lock,
            stop.listening(),
            _group(run, lock, stop) as processes,
            Trainer(run, processes=processes, tell=tell, stop=stop) as trainer,
        ):
            return trainer.begin() and trainer.train(listener)
    except OSError as error:  # a full disk, a directory that is gone
        raise RunError(
            f"A file could not be read or written while {run.path} was trained",
            given=error,
            fix=f"make room for it, then go on with: esper resume {run.path}",
        ) from error


def require_device(name: str, option: str = "device") -> None:
    """Refuse a device that is unknown or not there; `option` is what it was given by."""
    import torch

    require_known("device", name, DEVICES)
    if name == "cuda" and not torch.cuda.is_available():
        fix = f"set {option} to cpu"
        raise EsperError("There is no CUDA device", given=f"{option} cuda", valid="cpu", fix=fix)


@contextmanager
def _group(run: "RunFolder", lock: int, stop: Stopping) -> Iterator["Processes"]:
    """The processes of a run, this one the first of them."""
    from esper.simic.agent.processes import ALONE

    size = run.config.processes
    if size == 1:
        yield ALONE
        return
    with tempfile.TemporaryDirectory(prefix="esper-") as folder:
        place = Path(folder)
        children = stop.children = _started(run, size, place, lock)
        try:
            with joined(place, 0, size, lambda: _require_life(children, place)) as all_:
                yield all_
        except EsperError:
            raise
        except RuntimeError as error:
            _explain(error, children, place)
            raise
        finally:
            until = time.monotonic() + ENDING_SECONDS  # a moment to end by themselves
            for child in children:
                try:
                    child.wait(max(0.0, until - time.monotonic()))
                except subprocess.TimeoutExpired:
                    child.kill()
                    child.wait()


def _started(run: "RunFolder", size: int, place: Path, lock: int) -> Children:
    words = [sys.executable, "-m", "esper.simic.training.run_processes", str(run.path), str(place)]
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
    from esper.simic.agent.processes import ProcessesError

    for rank, child in enumerate(children, start=1):
        code = child.poll()
        if code is None:
            continue
        reason = _reason_file(place, rank)
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
    from esper.simic.agent.processes import ProcessesError

    text = str(error).lower()
    if not any(word in text for word in ("gloo", "peer", "connection", "timed out", "timeout")):
        return
    until = time.monotonic() + ENDING_SECONDS
    while time.monotonic() < until:
        try:
            _require_life(children, place)
        except ProcessesError as found:
            raise found from error
        time.sleep(0.05)
    raise ProcessesError("A process that learns with this one no longer answers") from error


@contextmanager
def joined(
    place: Path, rank: int, size: int, check: Callable[[], None] = lambda: None
) -> Iterator["Processes"]:
    """Meet the other processes of a run in a folder that all know; `check` may raise meanwhile."""
    from torch import distributed

    from esper.simic.agent.processes import Processes

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


# --- a child -------------------------------------------------------------------------------


def main() -> None:
    path, place, rank, parent = sys.argv[1], Path(sys.argv[2]), *map(int, sys.argv[3:])
    follow(parent)  # before all that takes long
    for number in SIGNALS:  # the first process decides when to stop
        signal.signal(number, signal.SIG_IGN)
    try:
        import torch

        from esper.simic.training.trainer import Trainer
        from esper.simic.training.training_runs import RunFolder

        torch.set_num_threads(1)
        run = RunFolder.open(path)
        with (
            joined(place, rank, run.config.processes) as processes,
            Trainer(run, processes=processes) as trainer,
        ):
            if trainer.begin():
                trainer.train()
    except Exception as error:
        told = isinstance(error, EsperError)
        text = str(error) if told else "".join(traceback.format_exception(error))
        if place.is_dir():
            _reason_file(place, rank).write_text(text.strip(), encoding="utf-8")
        os._exit(1)  # connections may be broken: nothing is waited for


def _reason_file(place: Path, rank: int) -> Path:
    """Where a process that failed leaves word of why, for the first one to tell."""
    return place / f"reason-{rank}"


def follow(parent: int) -> None:
    """End this process soon after its parent is gone."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(FOLLOWING_SECONDS)
        os._exit(1)

    threading.Thread(target=watch, name="follow", daemon=True).start()


if __name__ == "__main__":
    main()
