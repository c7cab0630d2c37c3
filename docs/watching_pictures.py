"""Makes the pictures of docs/watching.md: real runs in a real browser, while one of them trains.

    python docs/watching_pictures.py          # a few minutes; needs chromium

What it runs is small, and lies in a folder that is gone afterwards.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

from playwright.sync_api import Browser, sync_playwright

from esper.watch.live_server import listening, server_of

HERE = Path(__file__).parent
NET = """
from torch import nn


class Net(nn.Sequential):
    def __init__(self):
        layers = nn.LayerNorm(40), nn.Linear(40, 64), nn.ReLU(), nn.Linear(64, 40), nn.ReLU()
        super().__init__(*layers, nn.Linear(40, 10))
"""
WAIT = 300_000  # milliseconds, at most
SMALL = ["--envs", "24", "--seeds-per-context", "2", "--processes", "1", "--rounds", "12"]
SMALL += ["--evaluation.every", "2", "--evaluation.seeds", "2"]


def started(home: Path, *words: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "esper.karn.cli", *words]
    return subprocess.Popen(command, cwd=home, env=os.environ | {"OMP_NUM_THREADS": "1"})  # noqa: S603


@contextlib.contextmanager
def served(folder: Path) -> Iterator[str]:
    listener = listening(0)
    server, address = server_of([folder], listener)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    yield address
    server.should_exit = True
    thread.join()


def picture(
    browser: Browser, address: str, name: str, route: str, text: str, *, high: int = 900,
    dark: bool = False, wide: int = 1240,
) -> None:  # fmt: skip
    """Wait for a text on a page and take its picture."""
    scheme = "dark" if dark else "light"
    context = browser.new_context(viewport={"width": wide, "height": high}, color_scheme=scheme)
    page = context.new_page()
    page.set_default_timeout(WAIT)
    page.goto(f"{address}{route}")
    page.get_by_text(text).first.wait_for()
    page.wait_for_timeout(400)  # for curves to be drawn
    page.screenshot(path=HERE / f"watching-{name}.png")
    context.close()


def main() -> None:
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        home, runs = Path(folder), Path(folder) / "runs"
        (home / "net.py").write_text(NET)
        for name, controller in (("glyphs", "audition"), ("glyphs-by-rule", "heuristic")):
            words = ["--data", "mnist1d", "--lr", "0.01", "--budget.params", "+25%", "--quiet"]
            words += ["--budget.epochs", "24", "--controller", controller, "--out", f"runs/{name}"]
            started(home, "grow", "net.py:Net", *words).wait()
        started(home, "evaluate", "--seeds", "2", "--quiet", "--out", "runs/rules.jsonl").wait()
        training = started(home, "train", "demo", *SMALL, "--quiet", "--out", "runs/tamiyo-1")
        chromium = shutil.which("chromium") or "/usr/bin/chromium"
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        try:
            with served(runs) as address:
                run = "#/run/tamiyo-1"
                picture(browser, address, "training", run, "Round 3, epoch 1", high=1000)
                route = f"{run}/round/3/env/2/step/9"
                picture(browser, address, "decision", route, "What it saw", high=1150)
                picture(browser, address, "growth", "#/run/glyphs", "Audition", high=1640)
                training.send_signal(signal.SIGKILL)
                training.wait()
                picture(browser, address, "runs", "#/", "stale", high=420)
                picture(browser, address, "phone", run, "Round", high=800, wide=390, dark=True)
        finally:
            browser.close()
            if training.poll() is None:
                training.kill()


if __name__ == "__main__":
    main()
