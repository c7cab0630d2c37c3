"""Does the demo's controller learn, whatever the seed? Five demos, one after the other.

The alternatives, on the same cases: deciding at random and never growing. A seed counts as learned
if the 95 % interval of its mean net gain on test data lies above both.

    python benchmarks/learning.py [--seeds 5] [--runs DIR] [--json FILE] [--write]

With --runs the demos are kept, and those that are already there are not run again.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from _report import PAGE, write_json, write_section

from esper.garden import Result, Standing, standings
from esper.garden.evaluation import parse
from esper.karn.train_commands import RESULTS
from esper.nissa import RunReader

HEADER = ("seed", "Tamiyo, points", "random", "tuned rule", "best constant", "harmful", "learned")
PICTURE = PAGE.parent / "learning.png"


def demo(folder: Path, seed: int) -> float | None:
    """Run one demo; returns its seconds, or None if it was there."""
    if (folder / "report" / "index.html").exists():
        return None
    began = time.monotonic()
    words = [sys.executable, "-m", "esper.karn.cli", "demo", "--seed", str(seed)]
    subprocess.run([*words, "--out", str(folder)], check=True, env=os.environ)  # noqa: S603
    return time.monotonic() - began


def results_of(folder: Path) -> list[Result]:
    path = folder / RESULTS
    lines = path.read_text(encoding="utf-8").splitlines()[1:]
    return [parse(line, path, number + 2) for number, line in enumerate(lines)]


def curve_of(folder: Path) -> list[tuple[int, float, float, float]]:
    """(round, score, low, high) of every evaluation while it learned."""
    with RunReader(folder) as reader:
        return [
            (line["round"], line["score"], line["low"], line["high"])
            for line in reader.each("evaluations")
            if line["controller"] == "tamiyo" and line["context"] == "all"
        ]


def draw(curves: dict[int, list[tuple[int, float, float, float]]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7.0, 4.0), layout="constrained")
    for seed, curve in curves.items():
        rounds, scores, lows, highs = zip(*curve, strict=True)
        (line,) = axes.plot(rounds, scores, marker="o", label=f"seed {seed}")
        axes.fill_between(rounds, lows, highs, color=line.get_color(), alpha=0.12, linewidth=0)
    axes.axhline(0.0, color="black", linewidth=1)
    axes.annotate("never grown", (1.0, 0.0), (4, 3), ("axes fraction", "data"), "offset points")
    axes.set(
        xlabel="round (64 episodes each)", ylabel="score on validation data (net gain / scale)"
    )
    axes.set_title("The demo's controller while it learns: evaluations, with 95 % intervals")
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--runs", type=Path)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--write", action="store_true", help="put table and picture into the docs")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as spare:
        runs = options.runs or Path(spare)
        figures: dict[str, float] = {}
        rows, curves = [], {}
        for seed in range(options.seeds):
            folder = runs / f"seed{seed}"
            seconds = demo(folder, seed)
            lines = standings(results_of(folder))
            learned = above(lines)
            curves[seed] = curve_of(folder)
            rows.append([str(seed), *(spoken(line) for line in lines)])
            rows[-1] += [f"{lines[0].harmful:.0%}", "yes" if learned else "no"]
            figures[f"learning_seed{seed}_gain"] = lines[0].gain.value
            figures[f"learning_seed{seed}_gain_lo"] = lines[0].gain.low
            figures[f"learning_seed{seed}_random_hi"] = lines[1].gain.high
            figures[f"learning_seed{seed}_learned"] = float(learned)
            if seconds is not None:
                figures[f"learning_seed{seed}_seconds"] = seconds
            print(" | ".join(rows[-1]), flush=True)
        figures["learning_seeds_learned"] = sum(row[-1] == "yes" for row in rows)
        if options.write:
            write_section("learning", "cpu", "python benchmarks/learning.py --write", HEADER, rows)
            draw(curves, PICTURE)
    write_json(options.json, figures)


def above(lines: list[Standing]) -> bool:
    """Is the learner's interval above zero and above that of random decisions?"""
    return lines[0].gain.low > max(0.0, lines[1].gain.high)


def spoken(line: Standing) -> str:
    return f"{line.gain:+.1f}"


if __name__ == "__main__":
    main()
