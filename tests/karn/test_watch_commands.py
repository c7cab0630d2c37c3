"""The live page on the command line: alone, and beside a run."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from tests.programs import ENVIRONMENT, esper_here
from tests.watch.served import whole

BESIDE = """
import sys, time
from pathlib import Path
from esper.karn.watch_commands import start_watching
start_watching(Path(sys.argv[1]))
time.sleep(60)
"""


def address_of(process: "subprocess.Popen[str]") -> str:
    assert process.stdout is not None
    found = re.search(r"http://127\.0\.0\.1:\d+/\?token=\S+", process.stdout.readline())
    assert found is not None
    return found[0]


def answers(address: str) -> bool:
    """With the page, after it was sent on with its cookie."""
    cookies = urllib.request.build_opener(urllib.request.HTTPCookieProcessor())
    try:
        with cookies.open(address, timeout=20) as page:
            return b"<title>Esper</title>" in page.read()
    except OSError:
        return False


def started(*words: str) -> "subprocess.Popen[str]":
    command = [sys.executable, *words]
    return subprocess.Popen(command, env=ENVIRONMENT, stdout=subprocess.PIPE, text=True)


def test_esper_watch_says_where_the_page_is_and_ends_when_asked(tmp_path: Path) -> None:
    whole(tmp_path / "run", rounds=1)
    with started("-m", "esper.karn.cli", "watch", str(tmp_path), "--port", "0") as process:
        assert answers(address_of(process))
        process.send_signal(signal.SIGINT)
    assert process.returncode in (0, 130, -signal.SIGINT)


def test_a_page_beside_a_run_ends_with_it(tmp_path: Path) -> None:
    with started("-c", BESIDE, str(tmp_path / "not-there-yet")) as process:
        address = address_of(process)
        assert answers(address)
        os.kill(process.pid, signal.SIGKILL)
    until = time.monotonic() + 120
    while answers(address):
        assert time.monotonic() < until
        time.sleep(0.1)


def test_a_port_that_is_taken_is_refused_in_a_sentence(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        told = esper_here("watch", tmp_path, "--port", port)
    assert told.returncode == 2
    assert told.stderr.startswith(f"esper: Port {port} cannot be listened on")


def test_without_a_server_it_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("esper.karn.watch_commands.find_spec", lambda name: None)
    told = esper_here("watch", tmp_path)
    assert told.returncode == 2
    assert "pip install '.[watch]'" in told.stderr


def test_the_server_does_without_torch() -> None:
    program = "import sys, esper.watch.live_server; sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], env=ENVIRONMENT, check=False)
    assert done.returncode == 0
