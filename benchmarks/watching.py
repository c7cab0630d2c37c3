"""What watching costs: how late a browser knows, what answers take, and what the watched run loses.

    python benchmarks/watching.py
    python benchmarks/watching.py --runs 50 --events 100000 --clients 20 --seconds 600 --json FILE

Many runs lie in a folder, copies of one with so many events, and one more is written while clients
listen to word of what is new and ask for what a page would show then. The run's steps are as in
benchmarks/telemetry.py. Its speed is measured in turns: with a page open, and with none.
A word's lateness is counted from the moment in which the run hands its last event over.
"""

import argparse
import contextlib
import http.client
import json
import os
import shutil
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

    def connect(self, path: str) -> http.client.HTTPResponse:
        line = http.client.HTTPConnection(self.host or "", self.port, timeout=60)
        line.request("GET", path, headers=self.headers)
        return line.getresponse()

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
    """A client for each name, until the standard input ends; then says what they heard."""
    clients = [Client(address, name) for name in names]
    for client in clients:
        client.start()
    print("ready", flush=True)
    sys.stdin.read()
    print(json.dumps([[client.heard, client.took] for client in clients]))


@contextlib.contextmanager
def listening(address: str, names: list[str]) -> Iterator[list]:
    """Clients in a process of their own; what they heard is there afterwards."""
    words = [sys.executable, __file__, "--listen", address, *names]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    process = subprocess.Popen(words, **pipes)  # noqa: S603
    assert process.stdout is not None
    process.stdout.readline()
    found: list = []
    yield found
    found += json.loads(process.communicate("")[0])


@contextlib.contextmanager
def server(folder: Path) -> Iterator[tuple[str, int]]:
    """The live page of a folder in a process of its own: its address and its number."""
    words = [sys.executable, "-m", "esper.watch.live_server", str(folder), str(os.getpid())]
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


def paced(folder: Path, turns: int, each: float) -> Iterator[tuple[float, float]]:
    """Write a run for so many turns; after each, what a step took, by the clock and of a core."""
    step, source, number, times = make_step(), Source(ENVS), 0, list[tuple[float, float]]()
    turn = time.monotonic() + each
    folder.mkdir()
    SENT.clear()
    with Noting(RunStore(folder, LAYOUT)) as hub:
        hub.emit(RunStarted(round=0, config=CONFIG))
        while turns:
            number += 1
            for _ in whole_round(hub, source, number):
                began, worked = time.perf_counter(), time.process_time()
                step()
                times.append((time.perf_counter() - began, time.process_time() - worked))
                if time.monotonic() > turn and turns:
                    yield tuple(map(statistics.mean, zip(*times, strict=True)))
                    times, turn, turns = [], time.monotonic() + each, turns - 1


def measure_load(folder: Path, clients: int, seconds: float) -> dict[str, float]:
    """Many clients on all runs, while one is written."""
    names = [LIVE, *(path.name for path in folder.iterdir())]
    wanted = [names[n % len(names)] for n in range(clients)]
    with server(folder) as (address, process), listening(address, wanted) as heard:
        time.sleep(3.0)
        first, busy, began = memory(process), processor(process), time.monotonic()
        for _ in paced(folder / LIVE, round(seconds), 1.0):
            pass
        spent = time.monotonic() - began
        figures = {"server_mb_first": first, "server_mb_last": memory(process)}
        figures["server_core_percent"] = 100 * (processor(process) - busy) / spent
    late = sorted(now - SENT[last - 1] for words, _ in heard for last, now in words)
    figures |= {f"word_p{p}_ms": 1e3 * late[int(0.01 * p * len(late))] for p in (50, 95, 99)}
    for view in VIEWS:
        took = sorted(second for _, all_ in heard for second in all_.get(view, ()))
        figures |= {f"{view}_p{p}_ms": 1e3 * took[int(0.01 * p * len(took))] for p in (50, 95)}
    return figures


def measure_loss(folder: Path, turns: int, each: float) -> dict[str, float]:
    """Steps of a run with a page open and with none, in turns; each with its neighbour."""
    times: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
    page: contextlib.ExitStack | None = None
    with server(folder) as (address, _):
        for found in paced(folder / f"{LIVE}-turns", 2 * turns, each):
            times[page is not None].append(found)
            if page is None:
                page = contextlib.ExitStack()
                page.enter_context(listening(address, [f"{LIVE}-turns"]))
            else:
                page.close()
                page = None
    figures = {"step_ms": 1e3 * statistics.median(wall for wall, _ in times[False])}
    for place, name in enumerate(("loss_percent", "loss_of_core_percent")):
        pairs = zip(times[True], times[False], strict=True)
        ratios = [100 * (on[place] / off[place] - 1) for on, off in pairs]
        figures[name] = statistics.mean(ratios)
        figures[f"{name}_error"] = statistics.stdev(ratios) / len(ratios) ** 0.5
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
    parser.add_argument("--seconds", type=float, default=10.0, help="of the load")
    parser.add_argument(
        "--turns", type=int, default=4, help="with a page open, and as many with none"
    )
    parser.add_argument("--turn-seconds", type=float, default=2.0)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--listen", nargs="+", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.listen:
        listen(given.listen[0], given.listen[1:])
        return
    with tempfile.TemporaryDirectory() as home:
        folder = Path(home) / "runs"
        folder.mkdir()
        began = time.monotonic()
        written(folder / "run-0", given.events)
        for number in range(1, given.runs):
            shutil.copytree(folder / "run-0", folder / f"run-{number}", copy_function=os.link)
        print(f"{given.runs} runs of {given.events:,} events in {time.monotonic() - began:.0f} s")
        figures = measure_load(folder, given.clients, given.seconds)
        figures |= measure_loss(folder, given.turns, given.turn_seconds)
        figures |= measure_pixels(folder, 20)
    table = Table("what", "figure", title="the live page")
    for name, value in figures.items():
        table.add_row(name, f"{value:.3g}")
    Console().print(table)
    write_json(given.json, figures)


if __name__ == "__main__":
    main()
