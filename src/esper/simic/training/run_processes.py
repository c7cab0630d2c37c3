"""The processes of a run: how they are started and meet, and signals that ask them to stop.

Several processes are started by torch's elastic launcher, `torchrun … -m esper train`, or by
`launch`, which calls it for the cores of this machine. Its variables in the environment tell a
process its rank; `joined` is the way into their group. If one is lost, the launcher ends the others
and starts all of them again, and they go on from the last checkpoint. What one refuses ends all.

Nothing here imports torch before it is needed.
"""

import hashlib
import logging
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from esper.leyline.errors import EsperError, first_line, in_words, require_known
from esper.simic.training.config import DEVICES

if TYPE_CHECKING:
    from esper.archive import KeptFolder
    from esper.simic.agent.processes import Processes, ProcessesError
    from esper.simic.training.trainer import Listener, Telling
    from esper.simic.training.training_runs import RunFolder

SIGNALS = (signal.SIGINT, signal.SIGTERM)
SHOW_CURSOR = "\x1b[?25h"  # a progress display may have hidden it
FOLLOWING_SECONDS = 0.2  # how often a process looks whether its parent lives
PATIENCE = timedelta(minutes=10)  # with a process that computes
RESTARTS = 3  # of all processes, after which a loss ends the run
STARTED = "spawn"  # how processes are: a fork would have its parent's threads and locks
LOOPBACK = "lo"
NOTICING_SECONDS = 1.0  # that a launcher takes to notice a lost process, at most
STOP = "ESPER_STOP"  # a variable: the signal that asked to stop before a process was started
REFUSED = "refused"  # a key of the group's store: what one of the processes refused


def is_launched() -> bool:
    """Is this process one of several that torch's launcher, or one like it, started together?"""
    return {"RANK", "WORLD_SIZE", "MASTER_ADDR"} <= os.environ.keys()


def started_again() -> int:
    """How often the launcher has lost a process, and started all of them again."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) if is_launched() else 0


def begins(folder: "KeptFolder") -> None:
    """Remember, for processes that are started again, that this launch began the run in here."""
    if (store := _launchers_store()) is not None:
        store.set(f"begun {folder.path.resolve()}", "")


def goes_on(folder: "KeptFolder") -> bool:
    """Is there a run in here which this launch began, and of which it lost a process?"""
    store = _launchers_store() if started_again() and folder.holds_run else None
    return store is not None and bool(store.check([f"begun {folder.path.resolve()}"]))


def _launchers_store() -> Any:
    """What is told there outlives processes; None: their launcher keeps no store for them."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return TCPStore(address, port, is_master=False, timeout=PATIENCE)


class Stopping:
    """Remembers that a signal asked to stop.

    Signals are heard by a thread of its own, also while the others wait for another process. A
    process that was launched stops when its launcher says so, by SIGTERM; a terminal's Ctrl-C is
    for the launcher.
    """

    def __init__(self, say: bool = True) -> None:
        self.signal = int(os.environ.get(STOP, 0)) or None
        self.leads = False  # are there processes that must be told?
        self._say = say

    def __call__(self) -> bool:
        return self.signal is not None

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
            if is_launched():
                self.signal = numbers[0] if numbers[0] == signal.SIGTERM else self.signal
            elif self.signal is None:
                self.signal = numbers[0]
                if self._say:
                    text = "Stopping after this round; a second signal stops at once."
                    print(text, file=sys.stderr, flush=True)
                if self.leads:
                    os.environ[STOP] = str(self.signal)  # for those that are being started
                    for child in multiprocessing.active_children():
                        child.terminate()
            else:
                for child in multiprocessing.active_children() if self.leads else ():
                    child.kill()
                if sys.stderr.isatty():
                    os.write(2, SHOW_CURSOR.encode())
                os._exit(128 + numbers[0])


def follow(parent: int) -> None:
    """End this process soon after its parent is gone."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(FOLLOWING_SECONDS)
        os._exit(1)

    threading.Thread(target=watch, name="follow", daemon=True).start()


# --- one process -----------------------------------------------------------------------------


def train_run(
    run: "RunFolder",
    *,
    listener: "Listener" = lambda report: None,
    tell: "Telling" = lambda what, done, total: None,
    stop: Stopping | None = None,
    processes: "Processes | None" = None,
) -> bool:
    """Train a run to its end, from its last checkpoint on; False if it was stopped before.

    This process's part of it, where `processes` learn together: see `joined`.
    """
    import torch

    from esper.simic.agent.processes import ALONE
    from esper.simic.training.trainer import trainer_of
    from esper.simic.training.training_runs import RunError

    stop, processes = stop or Stopping(), processes or ALONE
    device = run.config.device
    require_device(device)
    if device == "cpu":
        torch.set_num_threads(1)  # small operations are many times slower with more
    what = f"A file could not be read or written while {run.path} was trained"
    fix = f"make room for it, then go on with: esper resume {run.path}"
    with (
        in_words(what, OSError, fix=fix, error=RunError, say=str),  # a full disk, as it may be
        run.locked() if processes.rank == 0 else nullcontext(),
        stop.listening(),
        trainer_of(run)(run, processes=processes, tell=tell, stop=stop) as trainer,
    ):
        return trainer.begin() and trainer.train(listener)


def require_device(name: str, option: str = "device", count: int = 1) -> None:
    """Refuse a device that is unknown or not there; `option` is what it was given by."""
    import torch

    require_known("device", name, DEVICES)
    found = torch.cuda.device_count() if name == "cuda" else count
    if not found:
        fix = f"set {option} to cpu"
        raise EsperError("There is no CUDA device", given=f"{option} cuda", valid="cpu", fix=fix)
    if found < count:
        what = "Every process needs a GPU of its own"
        raise EsperError(what, given=f"{count} processes", valid=f"at most {found} on this machine")


@contextmanager
def joined(device: str) -> Iterator["Processes"]:
    """The processes that were launched together, by what the launcher's variables say; a process
    that was not launched is alone.

    What one of them refuses is told to the others, who refuse it too once they notice.
    """
    from esper.simic.agent.processes import ALONE, Processes, ProcessesError

    if not is_launched():
        yield ALONE
        return
    import torch
    from torch import distributed

    follow(os.getppid())
    if device == "cuda":
        place = int(os.environ.get("LOCAL_RANK", "0"))
        require_device(device, count=place + 1)
        torch.cuda.set_device(place)
    meeting = distributed.rendezvous("env://", timeout=PATIENCE)  # type: ignore[attr-defined]
    store, rank, size = next(meeting)
    store = _met(store, rank, size)
    backend = "gloo" if device == "cpu" else "cpu:gloo,cuda:nccl"
    distributed.init_process_group(
        backend, store=store, rank=rank, world_size=size, timeout=PATIENCE
    )
    try:
        yield Processes.joined()
    except EsperError as error:
        store.set(REFUSED, str(error))
        raise
    except Exception as error:
        # The launcher tells of the process that it notices first: let that be the cause of it all.
        time.sleep(NOTICING_SECONDS * store.add("failed", 1))
        if store.check([REFUSED]):
            raise ProcessesError(store.get(REFUSED).decode()) from error
        raise
    finally:
        distributed.destroy_process_group()


def _met(store: Any, rank: int, size: int) -> Any:
    """Wait until all processes are there; their own part of the launcher's store.

    That store outlives processes that are started again, so what is found in it may be of those
    before: only a list of all in which each has seen itself is of these.
    """
    import numpy
    import torch
    from torch.distributed import PrefixStore  # type: ignore[attr-defined]

    from esper.simic.agent.processes import ProcessesError

    ours = sys.modules["esper"].__version__  # imported it would stand for all that it exports
    versions = f"esper {ours}, torch {torch.__version__}, numpy {numpy.__version__}"
    python = ".".join(map(str, sys.version_info[:2]))
    own, until = f"{uuid4()} {versions}, python {python}", time.monotonic() + PATIENCE.seconds
    keys, everyone = [f"here-{each}" for each in range(size)], "everyone"
    store.set(keys[rank], own)
    while time.monotonic() < until:
        if rank == 0 and store.check(keys):
            store.set(everyone, "\n".join(store.get(key).decode() for key in keys))
        found = store.get(everyone).decode().split("\n") if store.check([everyone]) else []
        if len(found) == size and found[rank] == own:
            part = PrefixStore(hashlib.sha256("".join(found).encode()).hexdigest(), store)
            part.set(keys[rank], "")
            if part.check(keys):
                _require_alike([each.partition(" ")[2] for each in found])
                return part
        time.sleep(0.02)
    fix = "look at what the missing ones say; a firewall may be between them"
    raise ProcessesError("Not all processes came", valid=f"{size} of them", fix=fix)


def _require_alike(versions: Sequence[str]) -> None:
    from esper.simic.agent.processes import ProcessesError

    for rank, theirs in enumerate(versions):
        if theirs != versions[0]:
            raise ProcessesError(
                "Processes that learn together need the same versions",
                given=f"rank 0 has {versions[0]}; rank {rank} has {theirs}",
                fix="install the same on every machine",
            )


# --- the one that launches -------------------------------------------------------------------


def launch(
    part: Callable[..., int], *arguments: Any, size: int, stop: Stopping | None = None
) -> int:
    """Call `part(*arguments)` in `size` new processes and return the exit code of the first one.

    If a process is lost, all of them are started again, at most `RESTARTS` times.
    """
    stop = stop or Stopping(say=False)
    stop.leads = True
    os.environ.setdefault("GLOO_SOCKET_IFNAME", LOOPBACK)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with stop.listening():
        # Inherited: Ctrl-C in a terminal is for this process, which has another thread for it.
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
        logging.disable(logging.ERROR)  # what happens is told in a sentence
        try:
            results = _launched(part, arguments, size)
        finally:
            logging.disable(logging.NOTSET)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
            os.environ.pop(STOP, None)
    for _, refusal in results.values():
        if refusal:
            raise EsperError(refusal)
    code, _ = results[min(results)]
    return 128 + stop.signal if code > 128 and stop.signal else code


def _launched(
    part: Callable[..., int], arguments: Sequence[Any], size: int
) -> dict[int, tuple[int, str]]:
    """Return the exit code and the refusal of every process, by its rank."""
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, launch_agent

    logs = tempfile.TemporaryDirectory(prefix="esper-", ignore_cleanup_errors=True)
    with logs as log_folder:
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=size,
            run_id=str(uuid4()),
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            local_addr="localhost",
            max_restarts=RESTARTS,
            start_method=STARTED,
            signals_to_handle="SIGHUP,SIGQUIT",  # the others ask to stop after the round
            logs_specs=DefaultLogsSpecs(log_dir=log_folder),
        )
        try:
            return launch_agent(config, _rank, [os.getpid(), part, *arguments])
        except ChildFailedError as error:
            raise _lost(error, size) from error


def _rank(parent: int, part: Callable[..., int], *given: Any) -> tuple[int, str]:
    """What each process that was launched does: the exit code and what was refused."""
    signal.set_wakeup_fd(-1)  # a fork has its parent's, and its handlers
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    follow(parent)
    try:
        return part(*given), ""
    except EsperError as error:
        return 2, str(error)


def _lost(error: Any, size: int) -> "ProcessesError":
    """Which process was lost first, and why, in one sentence."""
    from esper.simic.agent.processes import ProcessesError

    rank, failure = error.get_first_failure()
    code, said = failure.exitcode, failure.message
    why = said.get("message", "") if isinstance(said, dict) else str(said)
    return ProcessesError(
        f"Process {rank + 1} of the {size} that learn together ended, as after {RESTARTS} restarts",
        given=f"killed by signal {-code}" if code < 0 else first_line(RuntimeError(why)),
        fix="nothing before the last checkpoint is lost: go on with esper resume",
    )
