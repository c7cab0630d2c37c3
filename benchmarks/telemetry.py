"""What telemetry costs: share of a step's time, rows per second, and how late a reader sees them.

    python benchmarks/telemetry.py
    python benchmarks/telemetry.py --sizes 64 1024 --json FILE

A step is a fixed amount of small tensor operations under Python, as long as a step of 1,024 hosts
on a GPU takes and as busy with launching work: the hardest case, because the writer's thread needs
the interpreter as well. Rounds with telemetry and without alternate.
"""

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from _report import write_json
from rich.console import Console
from rich.table import Table

from esper.leyline import DEFAULT_EPISODE_LENGTH, Blend, LifecycleOp, SeedStage
from esper.nissa import (
    Decisions,
    Event,
    Hub,
    LifecycleChanged,
    RunLayout,
    RunReader,
    RunStore,
    Sampled,
    Stepped,
)

SLOTS, BLUEPRINTS = ("early", "mid", "late"), tuple(f"blueprint{n}" for n in range(9))
FEATURES, WIDEST = 117, 9
TERMS = ("objective", "rent", "interventions", "shaping", "rollback")
STEP_SECONDS = 0.035
SHORT_ROUND = 8  # steps
LAYOUT = RunLayout(
    heads=("op", "slot", "blueprint", "blend"),
    actions=(
        tuple(op.name for op in LifecycleOp),
        SLOTS,
        BLUEPRINTS,
        tuple(blend.name for blend in Blend),
    ),
    relevance=((True, False, False, False), (True,) * 4, *((True, True, False, False),) * 3),
    features=tuple(f"feature{n}" for n in range(FEATURES)),
    slots=SLOTS,
    blueprints=BLUEPRINTS,
)
WATCHED = 16  # environments whose observations are kept
READER = """
import sys, time
from esper.nissa import RunReader
with RunReader(sys.argv[1]) as reader:
    print("ready", flush=True)
    last, name = 0, ""
    while name != "last":
        time.sleep(0.01)
        asked = "SELECT event, name, value FROM samples WHERE event > ? ORDER BY event, n"
        for last, name, value in reader.query(asked, (last,)).rows:
            if name == "sent":
                print(time.time() - value, flush=True)
"""


class Source:
    """The tensors of a step, as a training loop has them, and the events they become."""

    def __init__(self, envs: int) -> None:
        draw = torch.Generator().manual_seed(0)
        self.envs = envs
        sizes = torch.tensor([len(names) for names in LAYOUT.actions])
        self.actions = (torch.rand(envs, 4, generator=draw) * sizes).long()
        self.values = torch.randn(envs, generator=draw)
        self.log_probs = -torch.rand(envs, 4, generator=draw)
        self.states = torch.randn(envs, FEATURES, generator=draw)
        self.masks = torch.rand(envs, 4, WIDEST, generator=draw) < 0.5
        self.terms = {n: torch.randn(envs, generator=draw, dtype=torch.float64) for n in TERMS}
        self.accuracy = 100 * torch.rand(envs, generator=draw, dtype=torch.float64)
        self.added = torch.randint(500, (envs,), generator=draw)
        self.changed = torch.arange(0, envs, 5)  # a fifth of the environments change a stage
        self.active = torch.ones(envs, dtype=torch.bool)

    def events(self, round: int, step: int) -> list[Event]:
        count = len(self.changed)
        return [
            Decisions(
                round=round,
                step=step,
                actions=self.actions,
                values=self.values,
                log_probs=self.log_probs,
                observations=self.states[:WATCHED],
                masks=self.masks[:WATCHED],
                active=self.active,
            ),
            Stepped(
                round=round,
                step=step,
                rewards=sum(self.terms.values()),
                terms=self.terms,
                measures={
                    "accuracy": self.accuracy,
                    "committed": self.accuracy,
                    "added": self.added,
                },
                active=self.active,
            ),
            LifecycleChanged(
                round=round,
                step=step,
                env=self.changed,
                slot=self.changed % 3,
                before=torch.full((count,), int(SeedStage.TRAINING)),
                after=torch.full((count,), int(SeedStage.BLENDING)),
                cause=torch.full((count,), int(LifecycleOp.ADVANCE)),
            ),
            Sampled(round=round, step=step, values={"sent": time.time()}),
        ]


def make_step() -> Callable[[], None]:
    """A fixed number of operations that take about STEP_SECONDS."""
    small, large = torch.randn(16, 16), torch.randn(64, 64)

    def work(times: int) -> None:
        for _ in range(times):
            torch.relu(small @ small).add_(1.0).mul_(0.5)
            large @ large

    work(100)
    start = time.process_time()
    work(1000)
    times = round(1000 * STEP_SECONDS / (time.process_time() - start))
    return lambda: work(times)


def measure_overhead(source: Source, rounds: int) -> dict[str, float]:
    """Short rounds with telemetry and without take turns; each is compared with its neighbour."""
    step, spent = make_step(), list[float]()
    times: dict[bool, list[float]] = {True: [], False: []}
    with tempfile.TemporaryDirectory() as folder:
        store = RunStore(folder, LAYOUT)
        with Hub(store) as hub:
            for number in range(2 * rounds):
                on = number % 2 == 1
                start = time.perf_counter()
                for place in range(SHORT_ROUND):
                    step()
                    if on:
                        before = time.perf_counter()
                        for event in source.events(number, place):
                            hub.emit(event)
                        spent.append(time.perf_counter() - before)
                times[on].append((time.perf_counter() - start) / SHORT_ROUND)
                hub.commit(number)  # nothing of it is left for the next one
        with RunReader(folder) as reader:
            dropped = sum(reader.dropped().values())
        size = store.path.stat().st_size
    spent.sort()
    pairs = zip(times[True], times[False], strict=True)
    return {
        "overhead_percent": 100 * (statistics.median(on / off for on, off in pairs) - 1),
        "step_ms": 1e3 * statistics.median(times[False]),
        "emit_ms": 1e3 * statistics.median(spent),
        "emit_p99_ms": 1e3 * spent[int(0.99 * len(spent))],
        "samples_dropped": float(dropped),
        "bytes_per_env_step": size / (rounds * SHORT_ROUND * source.envs),
    }


def measure_writer(source: Source, rounds: int) -> dict[str, float]:
    """Processor time of the writer's thread for a step, whatever else the machine does."""
    with tempfile.TemporaryDirectory() as folder, RunStore(folder, LAYOUT) as store:
        store.write(source.events(0, 0))
        spent = []
        for number in range(1, rounds + 1):
            steps = range(DEFAULT_EPISODE_LENGTH)
            batch = [event for step in steps for event in source.events(number, step)]
            start = time.thread_time()
            store.write(batch)
            spent.append((time.thread_time() - start) / len(steps))
    return {"writer_ms": 1e3 * statistics.median(spent)}


def measure_lag(source: Source, rounds: int) -> dict[str, float]:
    """From emitting to a second process that has the event, at the pace of steps."""
    with tempfile.TemporaryDirectory() as folder:
        store = RunStore(folder, LAYOUT)
        command = [sys.executable, "-c", READER, folder]
        reader = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)  # noqa: S603
        assert reader.stdout is not None
        reader.stdout.readline()
        with Hub(store) as hub:
            for number in range(rounds):
                for place in range(DEFAULT_EPISODE_LENGTH):
                    time.sleep(STEP_SECONDS)
                    for event in source.events(number, place):
                        hub.emit(event)
            hub.emit(Sampled(round=rounds, values={"last": 1.0}))
        lags = sorted(float(line) for line in reader.stdout)
        reader.wait(30)
    return {
        "reader_lag_ms": 1e3 * statistics.median(lags),
        "reader_lag_p99_ms": 1e3 * lags[int(0.99 * len(lags))],
        "events_unseen_by_reader": float(rounds * DEFAULT_EPISODE_LENGTH - len(lags)),
    }


def measure_rate(source: Source, seconds: float = 3.0) -> dict[str, float]:
    """As many steps as the store takes, nothing else going on."""
    with tempfile.TemporaryDirectory() as folder, Hub(RunStore(folder, LAYOUT)) as hub:
        start, steps = time.perf_counter(), 0
        while time.perf_counter() - start < seconds:
            for event in source.events(0, steps):
                hub.emit(event)
            steps += 1
        hub.commit(0)
        spent = time.perf_counter() - start
    return {
        "env_steps_per_second": source.envs * steps / spent,
        "events_per_second": 4 * steps / spent,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", nargs="+", type=int, default=[64, 1024], help="environments")
    parser.add_argument("--rounds", type=int, default=30, help="of each kind")
    parser.add_argument("--json", type=Path, help="write the figures flat to this file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    flat: dict[str, float] = {}
    table = Table("figure", *(f"N = {envs}" for envs in options.sizes), title="telemetry")
    columns = []
    for envs in options.sizes:
        source = Source(envs)
        figures = {
            **measure_overhead(source, options.rounds),
            **measure_writer(source, rounds=8),
            **measure_lag(source, rounds=8),
            **measure_rate(source),
        }
        columns.append(figures)
        flat |= {f"telemetry_n{envs}_{name}": value for name, value in figures.items()}
    for name in columns[0]:
        table.add_row(name, *(f"{figures[name]:,.2f}" for figures in columns))
    Console().print(table)
    write_json(options.json, flat)


if __name__ == "__main__":
    main()
