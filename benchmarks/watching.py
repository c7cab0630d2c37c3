"""What watching costs: how late a browser knows, what answers take, and what the watched run loses.

    python benchmarks/watching.py
    python benchmarks/watching.py --runs 50 --events 100000 --clients 20 --seconds 600 --blocks 0
    python benchmarks/watching.py --runs 50 --events 100000 --seconds 0 --blocks 100 --json FILE

Many runs lie in a folder, copies of one with so many events, and one more is written while clients
listen to word of what is new and ask for what a page would show then. The run's steps are as in
benchmarks/telemetry.py. A word's lateness is counted from the moment in which the run hands its
last event over.

What the run loses is measured in one process that writes a run, in turns of a round each: without a
page, twice with one, without. The page is the same all along; it sleeps in turns without it, and
what it asks for when it wakes comes before the turn. A turn ends when all that it told is on the
disk, so that each does the same work. What drifts cancels within a block of
four; the figure is the median of the means of any two blocks, with the 95 % interval of the
signed-rank test. What counts is the time of processors, in all threads of the run's process. Beside
it are how much of that is lost in the thread that writes telemetry, where alone the two meet, and
the loss by the clock, with the part of it that was spent waiting for a core. FILE has all of it
after every block.
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
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import quote, urlsplit

import torch
from _report import write_json
from rich.console import Console
from rich.table import Table
from telemetry import LAYOUT, Source, make_step

from esper.nissa import EpisodeEnded, Evaluated, Event, Hub, RunStarted, RunStore, UpdateMetrics

ENVS, HORIZON = 16, 25
SETTLING = 6  # steps of a round that does not count, after a page woke or fell asleep
HEADS = LAYOUT.heads
METRICS = [f"heads.{head}.{name}" for head in HEADS for name in ("entropy", "kl", "ratio_max")]
CONFIG = {"suite": "garden", "envs": ENVS, "horizon": HORIZON, "rounds": 100_000}
LIVE = "live"
SENT: list[float] = []  # when each event of the run that is written was handed over
WRITER = f"nissa {RunStore.name}"  # the thread
LOSSES = {  # of what each is a part: processors, or the clock
    "loss_percent": 0,
    "loss_in_writing_percent": 0,
    "loss_by_the_clock_percent": 2,
    "loss_in_waiting_percent": 2,
}
VIEWS = ("summary", "environments", "training")


def whole_round(hub: Hub, source: Source, number: int, horizon: int = HORIZON) -> Iterator[None]:
    """The events of a round, a step at a time."""
    for step in range(horizon):
        for event in source.events(number, step):
            hub.emit(event)
        yield
    known = {"env": range(ENVS), "seed": range(ENVS), "context": ["xor"] * ENVS}
    same = ("validation", "control", "net_gain", "returns", "added", "exposure")
    numbers = {name: [float(number % 7)] * ENVS for name in same}
    rest = {"interventions": [1] * ENVS, "rolled_back": [0] * ENVS}
    hub.emit(EpisodeEnded(round=number, step=horizon - 1, **known, **numbers, **rest))
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


class Client:
    """A page: hears words, and asks for what it would show then."""

    def __init__(self, address: str, run: str) -> None:
        where = urlsplit(address)
        self.host, self.port = where.hostname or "", where.port
        self.headers = {"Authorization": f"Bearer {where.query.removeprefix('token=')}"}
        self.run_name, self.last_word = run, ""
        self.heard: list[tuple[int, float]] = []  # the number of a last event, and when
        self.took: dict[str, list[float]] = defaultdict(list)  # seconds, by view
        self.line = http.client.HTTPConnection(self.host, self.port, timeout=60)  # for questions
        self.words = self.line
        self.awake, self.thread = False, threading.Thread()

    def wake(self) -> None:
        """As when a page is opened, or a browser comes back to it."""
        if not self.thread.is_alive():
            self.awake = True
            self.thread = threading.Thread(target=self.listen, daemon=True)
            self.thread.start()

    def sleep(self) -> None:
        self.awake = False
        while self.thread.is_alive():
            with contextlib.suppress(OSError, AttributeError):
                self.words.sock.shutdown(socket.SHUT_RDWR)
            self.thread.join(0.01)

    def ask(self, view: str) -> None:
        began = time.perf_counter()
        of = "" if view == "summary" else f"&run={quote(self.run_name)}"
        self.line.request("GET", f"/ask?view={view}{of}", headers=self.headers)
        self.line.getresponse().read()
        self.took[view].append(time.perf_counter() - began)

    def listen(self) -> None:
        with contextlib.suppress(OSError, http.client.HTTPException):
            if not self.last_word:
                for view in VIEWS:
                    self.ask(view)
            self.words = http.client.HTTPConnection(self.host, self.port, timeout=60)
            known = {"Last-Event-ID": self.last_word} if self.last_word else {}
            self.words.request("GET", "/words", headers=self.headers | known)
            for line in self.words.getresponse():
                if not self.awake:
                    return
                if line.startswith(b"id: "):
                    self.last_word = line[4:].strip().decode()
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
    """A client for each name; they wake and sleep with lines of the standard input, and at its end
    it is said what they heard."""
    everyone = [Client(address, name) for name in names]
    for line in itertools.chain(["wake"], sys.stdin):
        for client in everyone:
            client.wake() if line.strip() == "wake" else client.sleep()
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
        """To "wake" or to "sleep"; returns when they do."""
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


@contextlib.contextmanager
def written_live(folder: Path) -> Iterator[Callable[[int], None]]:
    """A run that is written while it is watched: what is given plays a round of so many steps."""
    step, source, numbers = make_step(), Source(ENVS), itertools.count(1)
    folder.mkdir()
    SENT.clear()
    with Noting(RunStore(folder, LAYOUT)) as hub:
        hub.emit(RunStarted(round=0, config=CONFIG))

        def play(horizon: int = HORIZON) -> None:
            number = next(numbers)
            for _ in whole_round(hub, source, number, horizon):
                step()
            hub.commit(number)

        yield play


def measure_load(folder: Path, count: int, seconds: float) -> dict[str, float]:
    """Many clients on all runs, while one is written."""
    names = [LIVE, *(path.name for path in folder.iterdir())]
    wanted = [names[n % len(names)] for n in range(count)]
    with server(folder) as (address, process):
        clients = Clients(address, wanted)
        time.sleep(3.0)
        first, busy, began = memory(process), processor(process), time.monotonic()
        with written_live(folder / LIVE) as play:
            while time.monotonic() < began + seconds:
                play()
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


def measure_loss(folder: Path, blocks: int, file: Path | None) -> dict[str, float]:
    """Rounds of a run while a page is asleep, awake, awake, asleep, and so on."""
    times: list[list[float]] = []  # that turns took, by way of measuring
    figures: dict[str, float] = {}
    with server(folder) as (address, _), written_live(folder / f"{LIVE}-turns") as play:
        clients = Clients(address, [f"{LIVE}-turns"])
        for turn in range(-2, 4 * blocks):  # the first two do not count
            clients.tell("wake" if turn % 4 in (1, 2) else "sleep")
            play(SETTLING)
            began = clocks()
            play()
            times.append([after - before for before, after in zip(began, clocks(), strict=True)])
            if turn % 4 == 3 and turn >= 0:
                figures = losses(times[2:])
                write_json(file, figures)
                print(
                    " ".join(f"{name} {value:.2f}" for name, value in figures.items()), flush=True
                )
        clients.end()
    return figures


def clocks() -> tuple[float, float, float, float]:
    """Seconds of processors in this process and in the thread that writes, by the clock, and in
    which this thread waited for a core."""
    (writer,) = (each.ident for each in threading.enumerate() if each.name == WRITER)
    written = time.clock_gettime(time.pthread_getcpuclockid(writer))
    waited = int(Path("/proc/thread-self/schedstat").read_text(encoding="ascii").split()[1])
    return time.process_time(), written, time.perf_counter(), 1e-9 * waited


def losses(times: list[list[float]]) -> dict[str, float]:
    """What turns with a page take longer than those without, in percent, with its interval."""
    blocks = [times[first : first + 4] for first in range(0, len(times), 4)]
    figures = {"blocks": float(len(blocks))}
    figures["round_ms"] = 1e3 * statistics.median(turn[2] for turn in times)
    for place, (name, whole) in enumerate(LOSSES.items()):
        ratios = []
        for asleep, awake, awake_too, asleep_too in blocks:
            more = awake[place] + awake_too[place] - asleep[place] - asleep_too[place]
            ratios.append(100 * more / (asleep[whole] + asleep_too[whole]))
        figures |= dict(zip((name, f"{name}_low", f"{name}_high"), centre(ratios), strict=True))
    return figures


def centre(values: list[float]) -> tuple[float, float, float]:
    """The median of all means of two values (or one with itself), and its 95 % interval."""
    pairs = itertools.combinations_with_replacement(values, 2)
    means, count = sorted((a + b) / 2 for a, b in pairs), len(values)
    spread = 1.96 * (count * (count + 1) * (2 * count + 1) / 24) ** 0.5
    outside = max(0, int(len(means) / 2 - spread))  # on either side
    return statistics.median(means), means[outside], means[-1 - outside]


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
        "--blocks", type=int, default=4, help="of four turns, of 5 seconds in all; 0: none"
    )
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
        if given.blocks:
            figures |= measure_loss(folder, given.blocks, given.json)
    table = Table("what", "figure", title="the live page")
    for name, value in figures.items():
        table.add_row(name, f"{value:.3g}")
    Console().print(table)
    write_json(given.json, figures)


if __name__ == "__main__":
    main()
