"""What watching costs: how late a browser knows, what answers take, and what the watched run loses.

    python benchmarks/watching.py
    python benchmarks/watching.py --runs 50 --events 100000 --clients 20 --seconds 600 --turns 0
    python benchmarks/watching.py --runs 50 --events 100000 --seconds 0 --turns 300

Many runs lie in a folder, copies of one with so many events, and one more is written while clients
listen to word of what is new and ask for what a page would show then. The run's steps are as in
benchmarks/telemetry.py. What a step takes of a core, in all threads of the run's process, and by
the clock is measured in many short turns: without a page, twice with one, without. What drifts
cancels within such a block; the figure is the median over blocks, with the 95 % interval that their
order gives it. A word's lateness is counted from the moment in which the run hands its last event
over.
"""

import argparse
import contextlib
import http.client
import itertools
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote, urlsplit

import torch
from _report import write_json
from rich.console import Console
from rich.table import Table
from telemetry import LAYOUT, Source, make_step

from esper.nissa import EpisodeEnded, Evaluated, Event, Hub, RunStarted, RunStore, UpdateMetrics

ENVS, HORIZON = 16, 25
HEADS = LAYOUT.heads
METRICS = [f"heads.{head}.{name}" for head in HEADS for name in ("entropy", "kl", "ratio_max")]
CONFIG = {"suite": "garden", "envs": ENVS, "horizon": HORIZON, "rounds": 100_000}
LIVE = "live"
SENT: list[float] = []  # when each event of the run that is written was handed over
SETTLING = 0.25  # seconds after a page was opened or closed
VIEWS = ("summary", "environments", "training")


def whole_round(hub: Hub, source: Source, number: int) -> Iterator[None]:
    """The events of a round, a step at a time."""
    for step in range(HORIZON):
        for event in source.events(number, step):
            hub.emit(event)
        yield
    known = {"env": range(ENVS), "seed": range(ENVS), "context": ["xor"] * ENVS}
    same = ("validation", "control", "net_gain", "returns", "added", "exposure")
    numbers = {name: [float(number % 7)] * ENVS for name in same}
    rest = {"interventions": [1] * ENVS, "rolled_back": [0] * ENVS}
    hub.emit(EpisodeEnded(round=number, step=HORIZON - 1, **known, **numbers, **rest))
    hub.emit(UpdateMetrics(round=number, metrics=dict.fromkeys(METRICS, 1.0 / number)))
    score = {"score": [0.1], "low": [0.0], "high": [0.2], "episodes": [ENVS]}
    hub.emit(Evaluated(round=number, controller="tamiyo", context=["all"], **score))


class Noting(Hub):
    """Remembers when it was handed each event; they are numbered in this order."""

    def emit(self, event: Event) -> None:
        SENT.append(time.time())
        super().emit(event)


def written(folder: Path, events: int) -> None:
    """A run with so many events."""
    folder.mkdir()
    source, number = Source(ENVS), 0
    with Hub(RunStore(folder, LAYOUT)) as hub:
        hub.emit(RunStarted(round=0, config=CONFIG))
        for number in range(1, events // (4 * HORIZON + 3) + 2):
            for _ in whole_round(hub, source, number):
                pass


class Client(threading.Thread):
    """Hears words, and asks for what a page would ask for then."""

    def __init__(self, address: str, run: str) -> None:
        super().__init__(daemon=True)
        where = urlsplit(address)
        self.host, self.port = where.hostname, where.port
        self.headers = {"Authorization": f"Bearer {where.query.removeprefix('token=')}"}
        self.run_name = run
        self.heard: list[tuple[int, float]] = []  # the number of a last event, and when
        self.took: dict[str, list[float]] = defaultdict(list)  # seconds, by view
        self.line: http.client.HTTPConnection | None = None  # the last one
        self.open = True

    def connect(self, path: str) -> http.client.HTTPResponse:
        self.line = http.client.HTTPConnection(self.host or "", self.port, timeout=60)
        self.line.request("GET", path, headers=self.headers)
        return self.line.getresponse()

    def leave(self) -> None:
        """As when a page is closed."""
        self.open = False
        while self.is_alive():
            with contextlib.suppress(OSError, AttributeError):
                self.line.sock.shutdown(socket.SHUT_RDWR)
            self.join(0.01)

    def ask(self, view: str) -> None:
        began = time.perf_counter()
        of = "" if view == "summary" else f"&run={quote(self.run_name)}"
        self.connect(f"/ask?view={view}{of}").read()
        self.took[view].append(time.perf_counter() - began)

    def run(self) -> None:
        with contextlib.suppress(OSError, http.client.HTTPException):
            for view in VIEWS:
                self.ask(view)
            for line in self.connect("/words"):
                if not self.open:
                    return
                if line.startswith(b"data: "):
                    self.hear(json.loads(line[6:]))

    def hear(self, word: dict) -> None:
        now = time.time()
        self.heard += [(run["last"], now) for run in word["runs"] if run["run"] == LIVE]
        news = {kind for run in word["runs"] for kind in run["kinds"]}
        if "step" in news:
            self.ask("environments")
        if "update" in news:
            self.ask("training")
            self.ask("summary")


def listen(address: str, names: list[str]) -> None:
    """A client for each name; they come and go with lines of the standard input, and at its end it
    is said what they heard."""
    everyone: list[Client] = []
    here: list[Client] = []
    for line in itertools.chain(["in"], sys.stdin):
        for client in here:
            client.leave()
        here = [Client(address, name) for name in names] if line.strip() == "in" else []
        everyone += here
        for client in here:
            client.start()
        print("ready", flush=True)
    print(json.dumps([[client.heard, client.took] for client in everyone]))


class Clients:
    """Clients in a process of their own."""

    def __init__(self, address: str, names: list[str]) -> None:
        words = [sys.executable, __file__, "--listen", address, *names]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self.process = subprocess.Popen(words, **pipes)  # noqa: S603
        self.process.stdout.readline()

    def tell(self, word: str) -> None:
        """That they come "in", or go "out"; returns when they have."""
        self.process.stdin.write(f"{word}\n")
        self.process.stdin.flush()
        self.process.stdout.readline()

    def end(self) -> list:
        """What they heard."""
        return json.loads(self.process.communicate("")[0])


@contextlib.contextmanager
def server(folder: Path) -> Iterator[tuple[str, int]]:
    """The live page of a folder in a process of its own: its address and its number."""
    words = [sys.executable, "-m", "esper.watch.live_server", str(os.getpid()), str(folder)]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)  # noqa: S603
    assert process.stdout is not None
    try:
        yield process.stdout.readline().split()[-1], process.pid
    finally:
        process.terminate()
        process.wait()


def memory(process: int) -> float:
    """MB that a process holds."""
    status = Path(f"/proc/{process}/status").read_text(encoding="utf-8")
    return float(status.partition("VmRSS:")[2].split()[0]) / 1024


def processor(process: int) -> float:
    """Seconds that a process has computed for."""
    fields = Path(f"/proc/{process}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")


def paced(
    folder: Path, turns: int, each: float, settling: float = 0.0
) -> Iterator[tuple[float, float]]:
    """Write a run for so many turns; after each, what a step took, by the clock and of a core.

    `settling`: seconds at the beginning of a turn that do not count.
    """
    step, source, number = make_step(), Source(ENVS), 0
    folder.mkdir()
    SENT.clear()
    with Noting(RunStore(folder, LAYOUT)) as hub:
        hub.emit(RunStarted(round=0, config=CONFIG))
        opens, steps, began = time.perf_counter() + settling, 0, (0.0, 0.0)
        while turns:
            number += 1
            for _ in whole_round(hub, source, number):
                step()
                now = time.perf_counter(), time.process_time()
                if now[0] < opens or not steps:
                    began, steps = now, int(now[0] >= opens)
                elif now[0] > opens + each and turns:
                    yield (now[0] - began[0]) / steps, (now[1] - began[1]) / steps
                    opens, steps, turns = time.perf_counter() + settling, 0, turns - 1
                else:
                    steps += 1


def measure_load(folder: Path, count: int, seconds: float) -> dict[str, float]:
    """Many clients on all runs, while one is written."""
    names = [LIVE, *(path.name for path in folder.iterdir())]
    wanted = [names[n % len(names)] for n in range(count)]
    with server(folder) as (address, process):
        clients = Clients(address, wanted)
        time.sleep(3.0)
        first, busy, began = memory(process), processor(process), time.monotonic()
        for _ in paced(folder / LIVE, round(seconds), 1.0):
            pass
        spent = time.monotonic() - began
        figures = {"server_mb_first": first, "server_mb_last": memory(process)}
        figures["server_core_percent"] = 100 * (processor(process) - busy) / spent
        heard = clients.end()
    late = sorted(now - SENT[last - 1] for words, _ in heard for last, now in words)
    figures |= {f"word_p{p}_ms": 1e3 * late[int(0.01 * p * len(late))] for p in (50, 95, 99)}
    for view in VIEWS:
        took = sorted(second for _, all_ in heard for second in all_.get(view, ()))
        figures |= {f"{view}_p{p}_ms": 1e3 * took[int(0.01 * p * len(took))] for p in (50, 95)}
    return figures


def measure_loss(folder: Path, turns: int, each: float) -> dict[str, float]:
    """Steps of a run with a page open and with none, in blocks of four turns: out, in, in, out."""
    times: list[tuple[float, float]] = []
    with server(folder) as (address, _):
        clients = Clients(address, [f"{LIVE}-turns"])
        clients.tell("out")
        for found in paced(folder / f"{LIVE}-turns", 4 * (turns // 2), each, SETTLING):
            times.append(found)
            if len(times) % 2:
                clients.tell("in" if len(times) % 4 == 1 else "out")
        clients.end()
    blocks = [times[first : first + 4] for first in range(0, len(times), 4)]
    figures = {"step_ms": 1e3 * statistics.median(wall for wall, _ in times), "blocks": len(blocks)}
    for place, name in enumerate(("loss_percent", "loss_of_core_percent")):
        turned = [[turn[place] for turn in block] for block in blocks]
        ratios = sorted(100 * ((b + c) / (a + d) - 1) for a, b, c, d in turned)
        outside = max(0, int(len(ratios) / 2 - 0.98 * len(ratios) ** 0.5))  # on either side
        figures[name] = statistics.median(ratios)
        figures |= {f"{name}_low": ratios[outside], f"{name}_high": ratios[-1 - outside]}
    return figures


PIXEL = """([text]) => new Promise((done) => {
  const look = () => document.body.innerText.includes(text) && done(Date.now() / 1000);
  const all = {subtree: true, childList: true, characterData: true};
  new MutationObserver(look).observe(document.body, all);
  look();
})"""


def measure_pixels(folder: Path, times: int) -> dict[str, float]:
    """From handing an epoch's event over until a browser shows the epoch; needs chromium."""
    from playwright.sync_api import sync_playwright

    chromium = shutil.which("chromium")
    if chromium is None:
        return {}
    name = f"{LIVE}-pixels"
    (folder / name).mkdir()
    late, source = [], Source(ENVS)
    with (
        server(folder) as (address, _),
        sync_playwright() as playwright,
        Hub(RunStore(folder / name, LAYOUT)) as hub,
    ):
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page()
        hub.emit(RunStarted(round=0, config=CONFIG))
        page.goto(address)
        page.get_by_role("link", name=name).click()
        for number in range(1, times + 1):
            page.wait_for_timeout(300)
            sent = time.time()
            for event in source.events(number, 0):
                hub.emit(event)
            late.append(page.evaluate(PIXEL, [f"Round {number}, epoch 1 "]) - sent)
        browser.close()
    late.sort()
    return {"pixel_p50_ms": 1e3 * statistics.median(late), "pixel_max_ms": 1e3 * late[-1]}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--events", type=int, default=5_000, help="of each run")
    parser.add_argument("--clients", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=10.0, help="of the load; 0: none")
    parser.add_argument(
        "--turns", type=int, default=8, help="with a page open, and as many with none; 0: none"
    )
    parser.add_argument("--turn-seconds", type=float, default=0.5)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--listen", nargs="+", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.listen:
        listen(given.listen[0], given.listen[1:])
        return
    torch.set_num_threads(1)  # threads that wait for each other would count as work
    with tempfile.TemporaryDirectory() as home:
        folder = Path(home) / "runs"
        folder.mkdir()
        began = time.monotonic()
        written(folder / "run-0", given.events)
        for number in range(1, given.runs):
            shutil.copytree(folder / "run-0", folder / f"run-{number}", copy_function=os.link)
        print(f"{given.runs} runs of {given.events:,} events in {time.monotonic() - began:.0f} s")
        figures: dict[str, float] = {}
        if given.seconds:
            figures |= measure_load(folder, given.clients, given.seconds)
            figures |= measure_pixels(folder, 20)
        if given.turns:
            figures |= measure_loss(folder, given.turns, given.turn_seconds)
    table = Table("what", "figure", title="the live page")
    for name, value in figures.items():
        table.add_row(name, f"{value:.3g}")
    Console().print(table)
    write_json(given.json, figures)


if __name__ == "__main__":
    main()
