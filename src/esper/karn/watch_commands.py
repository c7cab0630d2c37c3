"""The live page on the command line: alone, or beside a run that it shows."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

from esper.karn.commands import Watch
from esper.leyline.errors import EsperError, install_hint


def watch_runs(command: Watch) -> None:
    _require_server()
    from esper.watch.live_server import serve

    serve(command.folders, port=command.port, open_=command.open)


def start_watching(*folders: Path) -> None:
    """Show folders by a process of its own, which ends with this one and takes nothing from it."""
    _require_server()
    words = ["-m", "esper.watch.live_server", str(os.getpid()), *map(str, folders)]
    subprocess.Popen([sys.executable, *words], process_group=0)  # noqa: S603 - our own module


def _require_server() -> None:
    missing = [name for name in ("starlette", "uvicorn") if find_spec(name) is None]
    if missing:
        raise EsperError(
            "The live page needs a server",
            given=f"no {', no '.join(missing)}",
            fix=install_hint("watch"),
        )
