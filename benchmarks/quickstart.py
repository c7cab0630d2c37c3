"""The quickstart of the README on several random seeds, beside the same network without growing.

    python benchmarks/quickstart.py                     # ten random seeds, about four minutes
    python benchmarks/quickstart.py --seeds 3 --json FILE

The random seed determines the data, the initial weights and the order of the batches. Both networks
of a seed start from the same weights and see the same batches.
"""

import argparse
import statistics
import time
from pathlib import Path

import torch
from _report import write_json
from torch import nn

import esper

SETTINGS = {"loss": "cross_entropy", "budget": "+25%", "epochs": 20, "lr": 1e-2, "quiet": True}


def build_network(seed: int) -> nn.Module:
    """Build the network of the quickstart."""
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.LayerNorm(40),
        nn.Linear(40, 64),
        nn.ReLU(),
        nn.Linear(64, 40),
        nn.ReLU(),
        nn.Linear(40, 10),
    )


def measure_seed(seed: int) -> dict[str, float]:
    """Train the network with and without growing.

    Returns:
        Test accuracy of both, in percent, the seconds of both, and the ratio of their FLOPs.
    """
    train, val, test = esper.datasets.mnist1d(seed)
    start = time.perf_counter()
    plain = esper.grow(
        build_network(seed), train, val, test=test, seed=seed, controller="never", **SETTINGS
    )
    plain_seconds = time.perf_counter() - start
    start = time.perf_counter()
    grown = esper.grow(build_network(seed), train, val, test=test, seed=seed, **SETTINGS)
    grown_seconds = time.perf_counter() - start
    relative_cost = grown.report().relative_cost
    assert relative_cost is not None, "the FLOPs of linear layers can be counted"
    return {
        "plain": plain.after["test_score"],
        "grown": grown.after["test_score"],
        "gain": grown.after["test_score"] - plain.after["test_score"],
        "flops_ratio": relative_cost,
        "plain_seconds": plain_seconds,
        "grown_seconds": grown_seconds,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=10, help="number of random seeds")
    parser.add_argument("--json", type=Path, help="write the figures flat to this file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    print("seed  plain %  grown %  gain   FLOPs / plain  seconds / plain")
    rows = []
    for seed in range(options.seeds):
        row = measure_seed(seed)
        rows.append(row)
        seconds_ratio = row["grown_seconds"] / row["plain_seconds"]
        print(
            f"{seed:4d}  {row['plain']:7.1f}  {row['grown']:7.1f}  {row['gain']:+5.1f}"
            f"  {row['flops_ratio']:13.2f}  {seconds_ratio:15.1f}",
            flush=True,
        )
    gains = [row["gain"] for row in rows]
    figures = {
        "quickstart_seeds": float(len(rows)),
        "quickstart_gain_min": min(gains),
        "quickstart_gain_median": statistics.median(gains),
        "quickstart_gain_max": max(gains),
        "quickstart_flops_ratio": statistics.median(row["flops_ratio"] for row in rows),
        "quickstart_seconds_ratio": statistics.median(
            row["grown_seconds"] / row["plain_seconds"] for row in rows
        ),
    }
    print(
        f"gain of {len(rows)} seeds: {min(gains):+.1f} to {max(gains):+.1f} points, "
        f"median {statistics.median(gains):+.1f}"
    )
    write_json(options.json, figures)


if __name__ == "__main__":
    main()
