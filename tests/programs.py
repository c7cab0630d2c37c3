"""Programs as processes of their own, without the seconds that importing torch takes.

One process a test session imports everything and then does nothing but fork; each program runs in
a fork, with its own arguments, folder, environment and output. What must be a new interpreter (the
cost of imports, an installation without Esper) uses `subprocess` instead.
"""

import atexit
import contextlib
import functools
import importlib
import io
import json
import os
import pkgutil
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any, Never

ROOT = Path(__file__).parents[1]
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}/src:{ROOT}"}
LARGEST = 2**18  # bytes of a request
COMMAND_LINE = "from esper.karn.cli import main; main()"


class Program:
    """A program that was started; the part of `subprocess.Popen` that tests use."""

    def __init__(self, words: tuple[str, ...], code: str, cwd: Path | None, env: Any) -> None:
        out, err, status = os.pipe(), os.pipe(), os.pipe()
        request = {"words": words, "code": code, "cwd": os.fspath(cwd or Path.cwd())}
        message = json.dumps(request | {"environment": dict(env)}).encode()
        given = [out[1], err[1], status[1]]
        socket.send_fds(_forker(), [message], given)
        for end in given:
            os.close(end)
        self.args, self.returncode = words, None
        self.stdout, self.stderr, self._status = (os.fdopen(end[0]) for end in (out, err, status))
        self.pid = int(self._status.readline())

    def __enter__(self) -> "Program":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: object, trace: TracebackType | None
    ) -> None:
        self.stdout.close()
        self.stderr.close()
        self.wait()

    def wait(self, timeout: float = 300.0) -> int:
        """The exit code once it has ended; below 0 if a signal ended it."""
        if self.returncode is None:
            reader = threading.Thread(target=self._read_status, daemon=True)
            reader.start()
            reader.join(timeout)
            if self.returncode is None:
                raise subprocess.TimeoutExpired(self.args, timeout)
        return self.returncode

    def _read_status(self) -> None:
        self.returncode = int(self._status.readline())
        self._status.close()

    def communicate(self, timeout: float = 300.0) -> tuple[str, str]:
        """All that it has said since it was last read, to its end."""
        said = ["", ""]

        def read(place: int) -> None:
            said[place] = (self.stdout, self.stderr)[place].read()

        readers = [threading.Thread(target=read, args=(n,), daemon=True) for n in range(2)]
        for reader in readers:
            reader.start()
        self.wait(timeout)
        for reader in readers:
            reader.join(timeout)
        self.stdout.close()
        self.stderr.close()
        return said[0], said[1]

    def send_signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def start(
    code: str, *words: object, cwd: Path | None = None, env: Mapping[str, str] = ENVIRONMENT
) -> Program:
    """Start `python -c code words...`."""
    return Program(tuple(map(str, words)), code, cwd, env)


def run(
    code: str, *words: object, cwd: Path | None = None, env: Mapping[str, str] = ENVIRONMENT
) -> subprocess.CompletedProcess[str]:
    """Run `python -c code words...` to its end."""
    program = start(code, *words, cwd=cwd, env=env)
    try:
        out, err = program.communicate()
    except BaseException:
        program.kill()
        raise
    return subprocess.CompletedProcess(program.args, program.wait(), out, err)


def esper(*words: object, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run `esper words...` to its end."""
    return run(COMMAND_LINE, *words, cwd=cwd)


def esper_here(*words: object) -> subprocess.CompletedProcess[str]:
    """Run `esper words...` in this very process, so that a test can put something in its way."""
    from esper.karn.cli import main

    out, err, code = io.StringIO(), io.StringIO(), 0
    before, sys.argv = sys.argv, ["esper", *map(str, words)]
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            main()
    except SystemExit as ending:
        code = ending.code if isinstance(ending.code, int) else 1
    finally:
        sys.argv = before
    return subprocess.CompletedProcess(words, code, out.getvalue(), err.getvalue())


def started(*words: object) -> Program:
    """Start `esper words...`; Ctrl-C reaches it, also where tests run in the background."""
    return start(COMMAND_LINE, *words)


def wait_until(happened: Callable[[], bool], seconds: float = 120.0) -> None:
    until = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < until, "it did not happen"
        time.sleep(0.02)


def children_of(process: int) -> list[int]:
    """Processes that it started and that have not ended."""
    found = Path(f"/proc/{process}/task/{process}/children").read_text(encoding="ascii")
    return [int(number) for number in found.split()]


def is_alive(process: int) -> bool:
    try:
        state = Path(f"/proc/{process}/stat").read_text(encoding="ascii")
    except OSError:
        return False
    return state.rsplit(")", 1)[1].split()[0] != "Z"


# --- the process that forks ------------------------------------------------------------------


@functools.cache
def _forker() -> socket.socket:
    """The way to the process; it ends when this one does."""
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    # With -P the folder of this file is not on the path, where `datasets` would be tests/datasets.
    process = subprocess.Popen(
        [sys.executable, "-P", __file__, str(there.fileno())],
        pass_fds=(there.fileno(),),
        env=ENVIRONMENT,
        stdin=subprocess.DEVNULL,
        start_new_session=True,  # a terminal's Ctrl-C is for the tests
    )
    there.close()
    atexit.register(lambda: (here.close(), process.wait(10)))
    return here


def _serve(channel: socket.socket) -> None:
    import esper

    for found in pkgutil.walk_packages(esper.__path__, "esper."):
        if not found.name.startswith("esper.integrations."):  # theirs are large, and few need them
            importlib.import_module(found.name)
    for name in ("torch.export", "torch._dynamo"):
        importlib.import_module(name)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for those that wait for programs
    while True:
        message, given, _, _ = socket.recv_fds(channel, LARGEST, 3)
        if not message:  # the tests are over
            return
        if os.fork() == 0:
            channel.close()
            _attend(json.loads(message), *given)
        for end in given:
            os.close(end)


def _attend(request: dict[str, Any], out: int, err: int, status: int) -> Never:
    """Fork the program, say who it is, and how it ended."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    program = os.fork()
    if program == 0:
        os.close(status)
        _become(request, out, err)
    os.close(out)
    os.close(err)
    os.write(status, f"{program}\n".encode())
    _, ended = os.waitpid(program, 0)
    os.write(status, f"{os.waitstatus_to_exitcode(ended)}\n".encode())
    os._exit(0)


def _become(request: dict[str, Any], out: int, err: int) -> Never:
    """Run the program as a new interpreter would."""
    for given, place in ((out, 1), (err, 2)):
        os.dup2(given, place)
        os.close(given)
    sys.stdout, sys.stderr = (os.fdopen(place, "w") for place in (1, 2))
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["environment"])
    sys.argv = ["-c", *request["words"]]
    sys.path.insert(0, "")
    sys.modules["__main__"] = main = ModuleType("__main__")
    code = 0
    try:
        exec(compile(request["code"], "<string>", "exec"), main.__dict__)  # noqa: S102 - written by a test
    except SystemExit as ending:
        code = ending.code if isinstance(ending.code, int) else int(ending.code is not None)
        if isinstance(ending.code, str):
            print(ending.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
        code = 1
    with contextlib.suppress(BrokenPipeError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    _serve(socket.socket(fileno=int(sys.argv[1])))
