"""The processes of a run: how they start, meet and stop.

Processes that learn together are started by torch's elastic launcher: by
`torchrun … -m esper train`, or by `launch` for the cores of this machine. The launcher's
environment variables give a process its rank, and `init_distributed` makes it part of the group. If
a process is lost, the launcher ends the others and starts all of them again, and they continue from
the last checkpoint. An error that one process raises on purpose ends all of them.

Nothing here imports torch before it is needed.
"""

import hashlib
import logging
import multiprocessing
import os
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from esper.archive.run_folders import LAUNCH
from esper.distributed import SINGLE_PROCESS, Processes, ProcessesError
from esper.leyline.errors import EsperError, first_line, in_words, require_known
from esper.simic.training.config import DEVICES

if TYPE_CHECKING:
    from esper.archive import KeptFolder
    from esper.simic.training.trainer import OnRound, Progress
    from esper.simic.training.training_runs import RunFolder

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)
SHOW_CURSOR = "\x1b[?25h"  # a progress bar may have hidden the cursor
PARENT_CHECK_SECONDS = 0.2  # between two checks whether the parent process is alive
TIMEOUT = timedelta(minutes=10)  # for a process that computes
MAX_RESTARTS = 3  # of all processes, before a lost process ends the run
START_METHOD = "spawn"  # a forked process would have the threads and locks of its parent
LOOPBACK = "lo"
NOTICE_SECONDS = 1.0  # within which a launcher notices a lost process
STOP_VARIABLE = "ESPER_STOP"  # environment: the signal that asked for a stop before the start
REFUSAL_KEY = "refused"  # key of the group's store: the error that a process raised


def is_launched() -> bool:
    """Return whether a launcher such as torchrun started this process as part of a group."""
    return {"RANK", "WORLD_SIZE", "MASTER_ADDR"} <= os.environ.keys()


def restart_count() -> int:
    """Return how often the launcher has lost a process and started all of them again."""
    if not is_launched():
        return 0
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def mark_started(folder: "KeptFolder") -> None:
    """Store in the folder of a new run which launch started it, for `is_restart_of`."""
    if is_launched():
        folder.write(LAUNCH, {"launch": _launch_id()})


def is_restart_of(folder: "KeptFolder") -> bool:
    """Return whether this launch started the run in the folder and then lost a process."""
    if not restart_count() or not folder.holds_run:
        return False
    if not (folder.path / LAUNCH).is_file():
        return False
    return bool(folder.read(LAUNCH).get("launch") == _launch_id())


def _launch_id() -> str:
    """Return a text that is the same in all restarts of a launch, and in no other launch.

    The launcher is the parent process, and it outlives the processes that it starts.
    """
    run_id = os.environ.get("TORCHELASTIC_RUN_ID", "")
    return f"{run_id} {socket.gethostname()} {os.getppid()}"


class GracefulShutdown:
    """Records that a signal asked the run to stop.

    A separate thread receives the signals, also while the main thread waits for another process.
    A launched process stops when its launcher sends SIGTERM. Ctrl-C in a terminal is for the
    launcher.
    """

    def __init__(self, say: bool = True) -> None:
        """Create the recorder.

        Args:
            say: Print a message at the first signal.
        """
        self.signal = int(os.environ.get(STOP_VARIABLE, 0)) or None
        self.forwards_to_children = False
        self._say = say

    def __call__(self) -> bool:
        """Return whether a signal asked for a stop."""
        return self.signal is not None

    @contextmanager
    def handle_signals(self) -> Iterator[None]:
        """Handle SIGINT and SIGTERM inside; only the main thread can do this."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        read_fd, write_fd = os.pipe()
        os.set_blocking(write_fd, False)
        earlier_handlers = {
            number: signal.signal(number, lambda *_: None) for number in STOP_SIGNALS
        }
        earlier_fd = signal.set_wakeup_fd(write_fd, warn_on_full_buffer=False)
        listener = threading.Thread(target=self._listen, args=(read_fd,), name="stop", daemon=True)
        listener.start()
        try:
            yield
        finally:
            signal.set_wakeup_fd(earlier_fd)
            for number, handler in earlier_handlers.items():
                signal.signal(number, handler)
            os.close(write_fd)  # ends the listener
            listener.join()
            os.close(read_fd)

    def _listen(self, read_fd: int) -> None:
        while received := os.read(read_fd, 1):
            number = received[0]
            if number not in STOP_SIGNALS:
                continue
            if is_launched():
                if number == signal.SIGTERM:
                    self.signal = number
            elif self.signal is None:
                self._stop_after_round(number)
            else:
                self._stop_at_once(number)

    def _stop_after_round(self, number: int) -> None:
        self.signal = number
        if self._say:
            text = "Stopping after this round; a second signal stops at once."
            print(text, file=sys.stderr, flush=True)
        if self.forwards_to_children:
            os.environ[STOP_VARIABLE] = str(number)  # for children that are just starting
            for child in multiprocessing.active_children():
                child.terminate()

    def _stop_at_once(self, number: int) -> None:
        if self.forwards_to_children:
            for child in multiprocessing.active_children():
                child.kill()
        if sys.stderr.isatty():
            os.write(2, SHOW_CURSOR.encode())
        os._exit(128 + number)


def exit_with_parent(parent: int) -> None:
    """End this process soon after its parent process has ended.

    Args:
        parent: Process id of the parent.
    """

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(PARENT_CHECK_SECONDS)
        os._exit(1)

    threading.Thread(target=watch, name="exit with parent", daemon=True).start()


# --- one process -----------------------------------------------------------------------------


def train_run(
    run: "RunFolder",
    *,
    on_round: "OnRound | None" = None,
    progress: "Progress | None" = None,
    stop: GracefulShutdown | None = None,
    processes: Processes = SINGLE_PROCESS,
) -> bool:
    """Train a run from its last checkpoint to its end, as one of its processes.

    Args:
        run: Folder of the run.
        on_round: Called after every round with its report.
        progress: Called with an activity, the number of its finished parts and of all its parts.
        stop: Records signals that ask for a stop.
        processes: Processes that learn together, see `init_distributed`.

    Returns:
        False if it was stopped before its last round.

    Raises:
        RunError: A file cannot be read or written, or another process trains the run.
    """
    import torch

    from esper.simic.training.trainer import trainer_class
    from esper.simic.training.training_runs import RunError

    stop = stop or GracefulShutdown()
    device = run.config.device
    require_device(device)
    if device == "cpu":
        torch.set_num_threads(1)  # more threads make small operations many times slower
    options: dict[str, Any] = {} if progress is None else {"progress": progress}
    file_errors = in_words(  # such as a full disk
        f"A file could not be read or written while {run.path} was trained",
        OSError,
        fix=f"make room for it, then continue with: esper resume {run.path}",
        error=RunError,
        say=str,
    )
    with (
        file_errors,
        run.locked() if processes.rank == 0 else nullcontext(),
        stop.handle_signals(),
        trainer_class(run)(run, processes=processes, stop=stop, **options) as trainer,
    ):
        if not trainer.begin():
            return False
        return trainer.train() if on_round is None else trainer.train(on_round)


def require_device(name: str, option: str = "device", count: int = 1) -> None:
    """Raise an error for a device that is unknown or not available.

    Args:
        name: Name of the device.
        option: Option or setting that named the device, for the message.
        count: Number of processes that each need a device.
    """
    import torch

    require_known("device", name, DEVICES)
    available = torch.cuda.device_count() if name == "cuda" else count
    if not available:
        raise EsperError(
            "There is no CUDA device",
            given=f"{option} cuda",
            valid="cpu",
            fix=f"set {option} to cpu",
        )
    if available < count:
        raise EsperError(
            "Every process needs its own GPU",
            given=f"{count} processes",
            valid=f"at most {available} on this machine",
        )


@contextmanager
def init_distributed(device: str) -> Iterator[Processes]:
    """Join the group of the processes that were launched together.

    If one of them raises an `EsperError` inside, the others raise it as well when they notice.

    Args:
        device: cpu or cuda; with cuda every process uses the GPU of its local rank.

    Yields:
        The processes of the group; a single process if this process was not launched.
    """
    if not is_launched():
        yield SINGLE_PROCESS
        return
    import torch
    from torch import distributed

    exit_with_parent(os.getppid())
    if device == "cuda":
        local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        require_device(device, count=local_rank + 1)
        torch.cuda.set_device(local_rank)
    rendezvous = distributed.rendezvous("env://", timeout=TIMEOUT)  # type: ignore[attr-defined]
    launcher_store, rank, size = next(rendezvous)
    store = _rendezvous(launcher_store, rank, size)
    backend = "gloo" if device == "cpu" else "cpu:gloo,cuda:nccl"
    distributed.init_process_group(
        backend, store=store, rank=rank, world_size=size, timeout=TIMEOUT
    )
    try:
        yield Processes.from_default_group()
    except EsperError as error:
        store.set(REFUSAL_KEY, str(error))
        raise
    except Exception as error:
        # The launcher reports the process whose end it notices first. Processes that fail only
        # because another one is gone wait, so that it reports the cause.
        time.sleep(NOTICE_SECONDS * store.add("failed", 1))
        if store.check([REFUSAL_KEY]):
            raise ProcessesError(store.get(REFUSAL_KEY).decode()) from error
        raise
    finally:
        distributed.destroy_process_group()


def _rendezvous(launcher_store: Any, rank: int, size: int) -> Any:
    """Wait for all processes, and return a part of the launcher's store that only they use.

    The launcher's store outlives processes that are restarted, so it can hold keys of earlier
    processes. Every process therefore writes a new random id. Rank 0 lists the ids of all ranks. A
    list that contains a process's own id is a list of the current processes.

    Args:
        launcher_store: The launcher's store.
        rank: Rank of this process.
        size: Number of processes.

    Raises:
        ProcessesError: A process did not come in time, or the processes have different versions.
    """
    from torch.distributed import PrefixStore  # type: ignore[attr-defined]

    own_entry = f"{uuid4()} {_versions()}"
    keys = [f"here-{number}" for number in range(size)]
    all_entries = "everyone"
    launcher_store.set(keys[rank], own_entry)
    deadline = time.monotonic() + TIMEOUT.seconds
    while time.monotonic() < deadline:
        if rank == 0 and launcher_store.check(keys):
            entries = [launcher_store.get(key).decode() for key in keys]
            launcher_store.set(all_entries, "\n".join(entries))
        entries = []
        if launcher_store.check([all_entries]):
            entries = launcher_store.get(all_entries).decode().split("\n")
        if len(entries) == size and entries[rank] == own_entry:
            prefix = hashlib.sha256("".join(entries).encode()).hexdigest()
            store = PrefixStore(prefix, launcher_store)
            store.set(keys[rank], "")
            if store.check(keys):  # all processes have found themselves in this list
                _require_same_versions([entry.partition(" ")[2] for entry in entries])
                return store
        time.sleep(0.02)
    raise ProcessesError(
        "Not all processes came",
        valid=f"{size} of them",
        fix="read the messages of the missing ones; a firewall may be between them",
    )


def _versions() -> str:
    """Return the versions on which the numerical results of a process depend."""
    import numpy
    import torch

    # `import esper` would not be the module here, but the package's exports.
    esper_version = sys.modules["esper"].__version__
    python = ".".join(map(str, sys.version_info[:2]))
    return (
        f"esper {esper_version}, torch {torch.__version__}, numpy {numpy.__version__}, "
        f"python {python}"
    )


def _require_same_versions(versions: Sequence[str]) -> None:
    for rank, version in enumerate(versions):
        if version != versions[0]:
            raise ProcessesError(
                "Processes that learn together need the same versions",
                given=f"rank 0 has {versions[0]}; rank {rank} has {version}",
                fix="install the same on every machine",
            )


# --- the process that launches the others ----------------------------------------------------


def launch(
    function: Callable[..., int],
    *arguments: Any,
    size: int,
    stop: GracefulShutdown | None = None,
) -> int:
    """Call a function in new processes that learn together.

    If a process is lost, all of them are started again, at most `MAX_RESTARTS` times.

    Args:
        function: Called in every process; it returns an exit code.
        arguments: Arguments of the function.
        size: Number of processes.
        stop: Records signals that ask for a stop, and forwards them.

    Returns:
        The exit code of rank 0.

    Raises:
        EsperError: A process raised it.
        ProcessesError: A process was lost too often.
    """
    stop = stop or GracefulShutdown(say=False)
    stop.forwards_to_children = True
    os.environ.setdefault("GLOO_SOCKET_IFNAME", LOOPBACK)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with stop.handle_signals():
        # The children inherit the blocked SIGINT: Ctrl-C in a terminal is for this process, whose
        # other thread receives it.
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
        logging.disable(logging.ERROR)  # torch would log failures that are reported here
        try:
            results = _run_launcher(function, arguments, size)
        finally:
            logging.disable(logging.NOTSET)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
            os.environ.pop(STOP_VARIABLE, None)
    for _, refusal in results.values():
        if refusal:
            raise EsperError(refusal)
    exit_code, _ = results[min(results)]
    if exit_code > 128 and stop.signal:
        return 128 + stop.signal
    return exit_code


def _run_launcher(
    function: Callable[..., int], arguments: Sequence[Any], size: int
) -> dict[int, tuple[int, str]]:
    """Return the exit code and the refusal of every process, by rank."""
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
            max_restarts=MAX_RESTARTS,
            start_method=START_METHOD,
            signals_to_handle="SIGHUP,SIGQUIT",  # STOP_SIGNALS ask for a stop after the round
            logs_specs=DefaultLogsSpecs(log_dir=log_folder),
        )
        try:
            return launch_agent(config, _run_rank, [os.getpid(), function, *arguments])
        except ChildFailedError as error:
            raise _describe_loss(error, size) from error


def _run_rank(parent: int, function: Callable[..., int], *arguments: Any) -> tuple[int, str]:
    """Call the function in a launched process; return its exit code and its refusal."""
    # A forked process has the signal handlers of its parent.
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    exit_with_parent(parent)
    try:
        return function(*arguments), ""
    except EsperError as error:
        return 2, str(error)


def _describe_loss(error: Any, size: int) -> ProcessesError:
    """Return an error that names the process that was lost first, and the reason."""
    rank, failure = error.get_first_failure()
    if failure.exitcode < 0:
        reason = f"killed by signal {-failure.exitcode}"
    else:
        message = failure.message
        if isinstance(message, dict):
            message = message.get("message", "")
        reason = first_line(RuntimeError(str(message)))
    return ProcessesError(
        f"Process {rank + 1} of the {size} that learn together ended, as after "
        f"{MAX_RESTARTS} restarts",
        given=reason,
        fix="nothing before the last checkpoint is lost: continue with esper resume",
    )
