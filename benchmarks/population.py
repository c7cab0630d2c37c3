"""Host-steps per second: a population against the reference trainer, host by host.

    python benchmarks/population.py                                # one CPU thread, fused
    python benchmarks/population.py --backend chip                 # and small hosts on chip
    python benchmarks/population.py --device cuda                  # one GPU: small hosts on chip
    python benchmarks/population.py --device cuda --backend fused  # and all hosts fused

All sides do the same work in the same run: the same hosts with the same seeds, batches, losses and
optimiser steps. `one by one` trains hosts taken out of the population with plain PyTorch, one after
the other. Ratios are what counts; absolute times depend on the machine and its neighbours.
"""

import argparse
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from _report import write_json, write_section
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.flop_counter import FlopCounterMode

from esper.kasmina.gates import GateRules
from esper.kasmina.hosts import Conv1dHost, Conv2dHost, MlpHost, SegmentedHost
from esper.leyline import DEFAULT_EPISODE_LENGTH, Actions, Blend, EsperError, LifecycleOp
from esper.leyline.shadows import AuditionPlan
from esper.tolaria.data.splits import Split, Splits
from esper.tolaria.feed import Feed
from esper.tolaria.population import Population, extract
from esper.tolaria.population_config import PopulationConfig
from esper.tolaria.tasks import mnist1d


@dataclass(frozen=True)
class Case:
    """One host shape and how it is measured."""

    name: str
    build: Callable[[], SegmentedHost]
    shape: tuple[int, ...]
    batch: int
    cpu: tuple[int, ...]  # population sizes
    cuda: tuple[int, ...]
    compute_dtype: torch.dtype | None = None  # on CUDA
    compiler: str | None = None  # on CUDA


CASES = {
    "conv1d": Case("conv1d", Conv1dHost, (40,), 50, (8, 64, 256), (8, 64, 256, 1024)),
    "mlp": Case("mlp", MlpHost, (40,), 50, (8, 64, 256), (8, 64, 256, 1024)),
    "conv2d": Case(
        "conv2d",
        Conv2dHost,
        (3, 32, 32),
        128,
        (8,),
        (8, 64, 256, 1024),
        compute_dtype=torch.bfloat16,
        compiler="inductor",
    ),
}
FILLINGS = (0, 70)  # percent of slots with a seed
ON_CHIP = ("conv1d", "mlp")
CHIP_SIZES = {"cpu": (16, 64, 256), "cuda": (16, 132, 264, 1024, 4096, 16384, 65536)}
COMPARED = {"cpu": 256, "cuda": 1024}  # environments, with what else there is
EPISODES_OF = {"cpu": 256, "cuda": 4096}  # environments
PAIRED = 500  # cases that both backends train
HEADER = (
    "host",
    "N",
    "slots filled",
    "one by one, host-steps/s",
    "together, host-steps/s",
    "ratio",
    "of the floor",
    "MB per host",
)
CHIP_HEADER = (
    "host",
    "N",
    "what is planted",
    "on chip, host-steps/s",
    "against one by one",
    "fused",
)


def noise(case: Case, samples: int) -> Splits:
    draw = torch.Generator().manual_seed(0)

    def split(count: int) -> Split:
        inputs = torch.randn(count, *case.shape, generator=draw)
        return Split(inputs, torch.randint(10, (count,), generator=draw))

    return Splits(
        train=split(samples), validation=split(500), test=split(500), classes=10, origin="noise"
    )


def make_population(
    case: Case,
    count: int,
    device: str,
    batches: int,
    backend: str = "fused",
    data: Splits | None = None,
) -> Population:
    data = data or noise(case, max(2000, case.batch * batches))
    feed = Feed([data], [0] * count, batch=case.batch, batches=batches, device=device)
    config = PopulationConfig(
        rules=GateRules.unmeasured(),
        backend=backend,
        compute_dtype=case.compute_dtype if device == "cuda" else None,
        compiler=case.compiler if device == "cuda" else None,
    )
    return Population(case.build, feed, identities=range(count), config=config)


def fill(population: Population, percent: int) -> None:
    """Plant blueprints of every kind at random, all of them on."""
    draw = torch.Generator().manual_seed(1)
    count, kinds = len(population), len(population.catalogue.names)
    for slot in range(len(population.specs)):
        planted = torch.rand(count, generator=draw) * 100 < percent
        population.apply(
            Actions.of(
                population.space,
                count,
                op=torch.where(planted, int(LifecycleOp.GERMINATE), int(LifecycleOp.WAIT)),
                slot=slot,
                blueprint=torch.randint(kinds, (count,), generator=draw),
                blend=int(Blend.IMMEDIATE),
            )
        )


def finish(device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def one_by_one(population: Population, hosts: int, device: str, repeats: int) -> float:
    """Seconds per host-step of the reference trainer, over some of the population's hosts."""
    chosen = torch.linspace(0, len(population) - 1, hosts).long().tolist()
    pairs = []
    dtype = population.config.compute_dtype
    for index in chosen:
        host = extract(population, index)
        pairs.append((host, torch.optim.AdamW(host.parameters(), lr=1e-3)))
    order = population.feed.epoch(population.seeds, population.lifecycle.epoch)[0]
    inputs, labels = population.feed.samples_at(order[chosen])

    def step() -> None:
        for row, (host, optimizer) in enumerate(pairs):
            optimizer.zero_grad()
            with torch.autocast(device, dtype=dtype or torch.bfloat16, enabled=dtype is not None):
                loss = cross_entropy(host(inputs[row]), labels[row])
            loss.backward()
            optimizer.step()

    step()
    start = finish(device)
    for _ in range(repeats):
        step()
    return (finish(device) - start) / (repeats * hosts)


def together(population: Population, device: str, repeats: int) -> float:
    """Seconds per host-step of the population."""
    population.train_epoch()
    times = []
    for _ in range(repeats):
        start = finish(device)
        population.train_epoch()
        times.append(finish(device) - start)
    return sorted(times)[len(times) // 2] / (len(population) * population.feed.batches)


def episodes_per_minute(case: Case, count: int, device: str, backend: str = "fused") -> float:
    """Whole episodes: training, validation, every seed's contribution, flow, gates and time."""
    population = make_population(case, count, device, 40, backend)
    fill(population, 70)
    slots = len(population.specs)
    environment = torch.arange(count).repeat_interleave(slots)
    off = torch.eye(slots, dtype=torch.bool).repeat(count, 1)
    times = []
    for _ in range(4):
        start = finish(device)
        record = population.train_epoch()
        score = population.evaluate().accuracy
        without = population.counterfactual(environment, off).accuracy.view(count, slots)
        population.flow()
        population.measure(contribution=score[:, None] - without, gradient=record.seed_gradient)
        population.pass_time()
        population.legal()
        times.append(finish(device) - start)
    return 60.0 * count / (sorted(times)[1] * DEFAULT_EPISODE_LENGTH)


def floor(population: Population, hosts: int, rates: tuple[float, float]) -> float:
    """Seconds per host-step that the memory and the arithmetic units need at the very least.

    Every layer with weights reads its input and writes its output once forward; backward it reads
    the gradient and its input and writes the gradient of its input. Weights, gradients and
    optimiser state are read and written once.
    """
    counted: list[int] = []

    def note(module: nn.Module, args: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        counted.append(3 * args[0].numel() + 3 * output.numel())

    flops = parameters = 0
    size = 2 if population.config.compute_dtype is not None else 4
    for index in torch.linspace(0, len(population) - 1, hosts).long().tolist():
        host = extract(population, index)
        parameters += sum(parameter.numel() for parameter in host.parameters())
        for module in host.modules():
            if isinstance(module, (nn.Linear, nn.modules.conv._ConvNd)):
                module.register_forward_hook(note)
        order = population.feed.epoch(population.seeds, population.lifecycle.epoch)[0]
        inputs, labels = population.feed.samples_at(order[index : index + 1])
        with FlopCounterMode(display=False) as counter:
            cross_entropy(host(inputs[0]), labels[0]).backward()
        flops += counter.get_total_flops()
    moved = sum(counted) * size + parameters * 4 * 10
    return max(moved / rates[0], flops / rates[1]) / hosts


def ceilings(device: str, dtype: torch.dtype | None) -> tuple[float, float]:
    """Bytes per second of a large copy and operations per second of a large product, measured."""
    side = 8192 if device == "cuda" else 1024
    a = torch.randn(side, side, device=device, dtype=dtype or torch.float32)
    source = torch.randn(2**28 if device == "cuda" else 2**24, device=device)
    target = torch.empty_like(source)
    figures = []
    for work, amount in (
        (lambda: target.copy_(source), 2 * source.numel() * 4),
        (lambda: a @ a, 2 * side**3),
    ):
        work()
        start = finish(device)
        for _ in range(5):
            work()
        figures.append(5 * amount / (finish(device) - start))
    return figures[0], figures[1]


def measure(case: Case, count: int, percent: int, device: str) -> dict[str, float]:
    population = make_population(case, count, device, batches=10)
    fill(population, percent)
    hosts = min(count, 8 if case.name == "conv2d" or device == "cuda" else 16)
    slow = one_by_one(population, hosts, device, repeats=3)
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    fast = together(population, device, repeats=3)
    memory = torch.cuda.max_memory_allocated() if device == "cuda" else None
    least = floor(population, hosts, ceilings(device, population.config.compute_dtype))
    figures = {
        "ratio": slow / fast,
        "host_steps_per_second": 1 / fast,
        "one_by_one_host_steps_per_second": 1 / slow,
        "share_of_floor": least / fast,
    }
    if memory is not None:
        figures["megabytes_per_host"] = memory / count / 2**20
    return figures


def on_chip(
    case: Case, count: int, device: str, percent: int, kind: int | None = None
) -> Population:
    """Filled at random, or with blueprint `kind` in all slots that it fits."""
    population = make_population(case, count, device, 40, "chip")
    if kind is None:
        fill(population, percent)
        return population
    for slot, costs in enumerate(population.catalogue.costs):
        if costs[kind] >= 0:
            planted = {"slot": slot, "blueprint": kind, "blend": int(Blend.IMMEDIATE)}
            op = int(LifecycleOp.GERMINATE)
            population.apply(Actions.of(population.space, count, op=op, **planted))
    return population


def with_all_shadows(case: Case, count: int, device: str) -> float:
    """Seconds per host-step of hosts with a shadow of every kind in every slot, gains included."""
    population = on_chip(case, count, device, 0)
    plan = AuditionPlan(population.shadows.fits.repeat(count, 1, 1), torch.ones(count))
    population.train_epoch(plan)
    start = finish(device)
    population.train_epoch(plan)
    return (finish(device) - start) / (count * population.feed.batches)


class ChipTable:
    """On chip by size and by what is planted, against one by one and fused in the same run."""

    def __init__(self, device: str) -> None:
        self.device, self.compared = device, COMPARED[device]
        self.figures: dict[str, float] = {}
        self.rows: list[list[str]] = []
        self._slow: dict[tuple[str, int], float] = {}
        self._fused: dict[tuple[str, int], float] = {}

    def alternatives(self, case: Case) -> None:
        """One by one and fused, at one N."""
        for percent in FILLINGS:
            hosts = make_population(case, self.compared, self.device, 40)
            fill(hosts, percent)
            slow = self._slow[case.name, percent] = one_by_one(hosts, 8, self.device, repeats=3)
            fused = self._fused[case.name, percent] = together(hosts, self.device, repeats=1)
            key = f"{case.name}_n{self.compared}_filled{percent}"
            self.figures[f"{key}_fused_host_steps_per_second"] = 1 / fused
            self.figures[f"{key}_one_by_one_host_steps_per_second"] = 1 / slow

    def size(self, case: Case, count: int) -> None:
        for percent in FILLINGS if count == self.compared else FILLINGS[-1:]:
            repeats = 3 if count < 16384 else 1
            hosts = on_chip(case, count, self.device, percent)
            fast = together(hosts, self.device, repeats)
            key = f"n{count}_filled{percent}"
            self._note(case, key, count, f"{percent} % of slots", fast, percent)

    def planted(self, case: Case, kind: int, name: str) -> None:
        count = self.compared
        fast = together(on_chip(case, count, self.device, 0, kind), self.device, repeats=1)
        self._note(case, f"n{count}_{name}", count, f"{name} in all slots", fast)

    def shadows(self, case: Case) -> None:
        count = self.compared
        fast = with_all_shadows(case, count, self.device)
        self._note(case, f"n{count}_shadows", count, "shadows of all, with gains", fast)

    def episodes(self, case: Case, backend: str) -> None:
        count = EPISODES_OF[self.device]
        key = f"{case.name}_n{count}_{backend}_episodes_per_minute"
        self.figures[key] = episodes_per_minute(case, count, self.device, backend)
        print(key, round(self.figures[key]), flush=True)

    def _note(
        self, case: Case, key: str, count: int, planted: str, fast: float, percent: int = -1
    ) -> None:
        self.figures[f"{case.name}_{key}_chip_host_steps_per_second"] = 1 / fast
        slow, fused = (side.get((case.name, percent)) for side in (self._slow, self._fused))
        shown = ["", ""]
        if slow is not None:
            self.figures[f"{case.name}_{key}_chip_ratio"] = slow / fast
            shown[0] = f"{slow / fast:,.0f}"
        if fused is not None and count == self.compared:
            shown[1] = f"{1 / fused:,.0f}"
        self.rows.append([case.name, f"{count:,}", planted, f"{1 / fast:,.0f}", *shown])
        print(" | ".join(self.rows[-1]), flush=True)

    def parts(self, hosts: Sequence[str], sizes: Sequence[int]) -> list[Callable[[], None]]:
        """What there is to measure; what takes longest comes last."""
        found: list[Callable[[], None]] = []
        for case in (CASES[name] for name in hosts):
            found.append(partial(self.alternatives, case))
            found += [partial(self.size, case, count) for count in sizes if count <= 4096]
            found.append(partial(self.episodes, case, "chip"))
        for case in (CASES[name] for name in hosts):
            names = on_chip(case, 8, self.device, 0).catalogue.names
            found += [partial(self.planted, case, kind, name) for kind, name in enumerate(names)]
            found.append(partial(self.shadows, case))
            found += [partial(self.size, case, count) for count in sizes if count > 4096]
        found += [partial(self.episodes, CASES[name], "fused") for name in hosts]
        paired = partial(paired_figures, CASES["conv1d"], self.device)
        return [*found, lambda: self.figures.update(paired())]


def life_of(case: Case, backend: str, data: Splits, device: str, grows: bool) -> Tensor:
    """Test accuracy [N] after an episode in which every host is given three seeds, or none."""
    population = make_population(case, PAIRED, device, 40, backend, data)
    draw, slots = torch.Generator().manual_seed(2), len(population.specs)
    kinds, wait = len(population.catalogue.names), torch.tensor(int(LifecycleOp.WAIT))
    for epoch in range(DEFAULT_EPISODE_LENGTH):
        slot, stage = epoch % slots, epoch // slots  # plant in the first turns, then let blend
        op = LifecycleOp.GERMINATE if stage == 0 else LifecycleOp.ADVANCE
        chosen = {
            "slot": torch.full((PAIRED,), slot),
            "blueprint": torch.randint(kinds, (PAIRED,), generator=draw),
            "blend": torch.randint(len(Blend), (PAIRED,), generator=draw),
        }
        legal = population.legal()
        wanted = Actions.of(population.space, PAIRED, op=int(op), **chosen)
        ops = torch.where(legal.permits(wanted) & grows, int(op), wait)
        population.apply(Actions.of(population.space, PAIRED, op=ops, **chosen), legal)
        population.train_epoch()
        population.pass_time()
    return population.evaluate("test").accuracy


def paired_figures(case: Case, device: str) -> dict[str, float]:
    """Gains of the same decisions in the same cases, on chip and fused: rounding alone differs."""
    data, gains = mnist1d(0), {}
    for backend in ("chip", "fused"):
        alone, grown = (life_of(case, backend, data, device, grows) for grows in (False, True))
        gains[backend] = grown - alone
    apart = gains["chip"] - gains["fused"]
    half = 1.96 * float(apart.std()) / PAIRED**0.5
    figures = {
        f"{case.name}_paired_gain_chip": float(gains["chip"].mean()),
        f"{case.name}_paired_gain_fused": float(gains["fused"].mean()),
        f"{case.name}_paired_difference": float(apart.mean()),
        f"{case.name}_paired_half_interval": half,
    }
    print({key: round(value, 3) for key, value in figures.items()}, flush=True)
    return figures


def fused_figures(
    names: list[str], sizes: list[int] | None, device: str, rows: list[list[str]]
) -> dict[str, float]:
    flat: dict[str, float] = {}
    for name in names:
        case = CASES[name]
        for count in sizes or getattr(case, device):
            for percent in FILLINGS:
                figures = measure(case, count, percent, device)
                key = f"{name}_n{count}_filled{percent}"
                flat |= {f"{key}_{label}": value for label, value in figures.items()}
                rows.append([name, str(count), f"{percent} %", *_cells(figures)])
                print(key, {k: round(v, 3) for k, v in figures.items()}, flush=True)
        if name != "conv2d":
            most = max(sizes or getattr(case, device))
            label = f"{name}_n{most}_episodes_per_minute"
            flat[label] = episodes_per_minute(case, most, device)
            print(label, round(flat[label]), flush=True)
        small, large = (f"{name}_n{n}_filled70_host_steps_per_second" for n in (64, 1024))
        if small in flat and large in flat:
            flat[f"{name}_n1024_vs_n64_cost"] = flat[small] / flat[large]
    return flat


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--backend", choices=("fused", "chip"), help="by default chip on a GPU")
    parser.add_argument("--hosts", nargs="+", choices=list(CASES))
    parser.add_argument("--sizes", nargs="+", type=int, help="population sizes, for all hosts")
    parser.add_argument(
        "--limit", type=float, default=math.inf, help="seconds after which no other part begins"
    )
    parser.add_argument("--json", type=Path, help="write the figures flat to this file")
    parser.add_argument("--write", action="store_true", help="update docs/performance.md")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.backends.cuda.matmul.allow_tf32 = True
    torch.backends.cudnn.allow_tf32 = True
    torch.backends.cudnn.benchmark = True
    chip = (options.backend or {"cpu": "fused", "cuda": "chip"}[options.device]) == "chip"
    rows: list[list[str]] = []
    if chip:
        table = ChipTable(options.device)
        flat, rows, began = table.figures, table.rows, time.perf_counter()
        sizes = options.sizes or CHIP_SIZES[options.device]
        for part in table.parts(options.hosts or ON_CHIP, sizes):
            start = time.perf_counter()
            if start - began > options.limit:
                print("the time is over", flush=True)
                break
            try:
                part()
            except (RuntimeError, EsperError) as error:  # the others are measured all the same
                print(f"not measured: {error}", flush=True)
            print(f"    {time.perf_counter() - start:.1f} s", flush=True)
            write_json(options.json, flat)
            torch.cuda.empty_cache()
        rows.sort(key=lambda row: row[0])
    else:
        flat = fused_figures(options.hosts or list(CASES), options.sizes, options.device, rows)
    write_json(options.json, flat)
    if options.write:
        usual = chip == (options.device == "cuda")
        given = "" if usual else f" --backend {options.backend}"
        given += f" --sizes {' '.join(map(str, options.sizes))}" if options.sizes else ""
        command = f"python benchmarks/population.py --device {options.device}{given} --write"
        section, header = ("chip", CHIP_HEADER) if chip else ("population", HEADER)
        write_section(section, options.device, command, header, rows)


def _cells(figures: dict[str, float]) -> list[str]:
    memory = figures.get("megabytes_per_host")
    return [
        f"{figures['one_by_one_host_steps_per_second']:,.0f}",
        f"{figures['host_steps_per_second']:,.0f}",
        f"{figures['ratio']:.1f}",
        f"{figures['share_of_floor']:.1%}",
        "" if memory is None else f"{memory:.1f}",
    ]


if __name__ == "__main__":
    main()
