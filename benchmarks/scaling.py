"""What more processes bring: rounds of training at 1 and 2 processes, every collective of a round,
and what follows from both for many GPUs.

Strong scaling divides the same environments, weak scaling gives every process as many. A model of
compute, messages, latency and bandwidth is checked against the measured rounds, then asked about 8
to 1,024 GPUs.

    python benchmarks/scaling.py [--json FILE] [--picture FILE] [--envs 16] [--rounds 3]
"""

import argparse
import json
import math
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from _report import write_json

from esper.distributed import Processes
from esper.simic.training import PRESETS, EvaluationConfig, RunFolder, Trainer
from esper.simic.training.run_processes import init_distributed, launch

SIZES = (1, 2)
GPUS = (8, 16, 32, 64, 128, 256, 512, 1024)
# Stated, not measured: a node of 8 GPUs, and 400 Gb/s of network for each of them.
NODE, NODE_SECONDS, NODE_BYTES = 8, 10e-6, 300e9
NETWORK_SECONDS, NETWORK_BYTES = 25e-6, 40e9
SUMS = (16, 2**18)  # float32s of a sum that is timed for latency, and for bandwidth


class Counted(Processes):
    """Processes whose every message is counted: calls, bytes of this process, seconds."""

    counts: ClassVar[dict[str, list[float]]] = {}

    def _count(self, what: str, size: int, began: float) -> None:
        calls, sent, spent = self.counts.setdefault(what, [0.0, 0.0, 0.0])
        self.counts[what] = [calls + 1, sent + size, spent + time.perf_counter() - began]

    def _all_reduce(self, tensor: torch.Tensor, operation: str) -> torch.Tensor:
        start = time.perf_counter()
        reduced = super()._all_reduce(tensor, operation)
        self._count("sums", tensor.numel() * tensor.element_size(), start)
        return reduced

    def gather_object(self, value: Any) -> list[Any]:
        start = time.perf_counter()
        values = super().gather_object(value)
        self._count("events", 0, start)
        return values


def settings(envs: int) -> Any:
    return replace(
        PRESETS["demo"],
        envs=envs,
        processes=1,
        rounds=10**6,
        seeds_per_context=1,
        checkpoint_every=10**6,
        evaluation=EvaluationConfig(every=10**6, seeds=1, baselines=()),
    )


def play(folder: Path, size: int, envs: int, rounds: int) -> int:
    """What each process does; the first keeps the figures."""
    torch.set_num_threads(1)
    with init_distributed("cpu") as processes:
        counted = Counted(processes.rank, processes.size, processes.group)
        run = RunFolder.open(folder)
        figures = {"latency": 0.0, "bandwidth": 0.0}
        if size > 1:
            small, large = (_sum_seconds(counted, count) for count in SUMS)
            figures = {"latency": small, "bandwidth": 4 * SUMS[1] / max(1e-9, large - small)}
        with Trainer(run, processes=counted) as trainer:
            trainer.begin()
            trainer._run_round()  # programs are built
            Counted.counts.clear()
            seconds = []
            for _ in range(rounds):
                began = time.perf_counter()
                spent = trainer._run_round().seconds
                seconds.append((time.perf_counter() - began, spent["play"], spent["learn"]))
        whole, playing, learning = (
            sorted(each)[rounds // 2] for each in zip(*seconds, strict=True)
        )
        figures |= {"round": whole, "play": playing, "learn": learning}
        for name, (calls, sent, spent) in Counted.counts.items():
            figures |= {f"{name}.calls": calls / rounds, f"{name}.bytes": sent / rounds}
            figures[f"{name}.seconds"] = spent / rounds
        if processes.rank == 0:
            (folder / "figures.json").write_text(json.dumps(figures), encoding="utf-8")
    return 0


def _sum_seconds(processes: Processes, count: int, times: int = 20) -> float:
    tensor, spent = torch.zeros(count), []
    for _ in range(times):
        began = time.perf_counter()
        processes.sum_(tensor)
        spent.append(time.perf_counter() - began)
    return sorted(spent)[times // 2]


def measured(size: int, envs: int, rounds: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        config = replace(settings(envs), processes=size)
        run = RunFolder.create(Path(folder) / "run", config, {})
        launch(play, run.path, size, envs, rounds, size=size)
        found: dict[str, float] = json.loads((run.path / "figures.json").read_text("utf-8"))
        return found


def messages(found: dict[str, float], latency: float, bandwidth: float, ranks: int) -> float:
    """Seconds of a round's sums as a ring over so many ranks."""
    calls, sent = found["sums.calls"], found["sums.bytes"]
    hops = 2 * math.log2(ranks) if ranks > 1 else 0
    return calls * latency * hops + 2 * sent * (ranks - 1) / ranks / bandwidth


def predicted(found: dict[str, float], round_seconds: float) -> dict[int, float]:
    """Weak efficiency: what share of a round many GPUs spend on their own work."""
    efficiency = {}
    for gpus in GPUS:
        nodes = gpus // NODE
        spent = messages(found, NODE_SECONDS, NODE_BYTES, NODE)
        spent += messages(found, NETWORK_SECONDS, NETWORK_BYTES, nodes) if nodes > 1 else 0.0
        efficiency[gpus] = round_seconds / (round_seconds + spent)
    return efficiency


def draw(path: Path, figures: dict[str, float], by_length: dict[float, dict[int, float]]) -> None:
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 3.6), layout="constrained")
    for seconds, found in by_length.items():
        label = f"a round of {seconds:g} s a GPU (model)"
        axes.plot(list(found), [100 * each for each in found.values()], marker="o", label=label)
    axes.plot([2], [100 * figures["weak.efficiency"]], "k^", label="2 processes, weak (measured)")
    axes.set(xscale="log", xlabel="ranks", ylabel="efficiency, %", ylim=(0, 105))
    axes.set_xticks([2, *GPUS], [str(each) for each in (2, *GPUS)])
    axes.legend(frameon=False)
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--picture", type=Path)
    parser.add_argument("--envs", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--lengths", type=float, nargs="+", default=[1.0, 20.0])
    options = parser.parse_args()
    envs, rounds = options.envs, options.rounds
    alone = measured(1, envs, rounds)
    strong, weak = measured(2, envs, rounds), measured(2, 2 * envs, rounds)
    half = measured(1, envs // 2, rounds)
    figures = {f"alone.{name}": value for name, value in alone.items()}
    figures |= {f"strong.{name}": value for name, value in strong.items()}
    figures |= {f"weak.{name}": value for name, value in weak.items()}
    figures["strong.efficiency"] = alone["round"] / (2 * strong["round"])
    figures["weak.efficiency"] = alone["round"] / weak["round"]
    for name, own, found in (("strong", half, strong), ("weak", alone, weak)):
        sums = messages(found, found["latency"] / 2, found["bandwidth"], 2)
        figures[f"{name}.predicted"] = own["round"] + sums
        figures[f"{name}.model_error"] = figures[f"{name}.predicted"] / found["round"] - 1
    by_length = {seconds: predicted(weak, seconds) for seconds in options.lengths}
    for seconds, found in by_length.items():
        figures |= {f"gpus_{gpus}.round_{seconds:g}": each for gpus, each in found.items()}
    for name, value in figures.items():
        print(f"{name:32} {value:.6g}")
    if options.picture is not None:
        draw(options.picture, figures, by_length)
    if options.json is not None:
        write_json(options.json, figures)


if __name__ == "__main__":
    main()
