"""Does the reward rank controllers as the true objective does? Scripted ones, good and bad.

    python benchmarks/alignment.py             # the whole suite, about three minutes
    python benchmarks/alignment.py --episodes 8

All controllers play the same cases of `garden_mlp`. Their mean returns, discounted and taken from
the garden's transitions, are compared with their mean net scores on test data and, for the sparse
reward, on the split that rewards are made of.
"""

import argparse
from pathlib import Path

import torch
from _report import write_json
from rich.console import Console
from rich.table import Table

from esper.garden import find_suite
from tests.garden.aligning import EXPLOITS, Aligned, align, scripts
from tests.garden.rank_agreement import rank_agreement, spearman


def figures_of(found: Aligned) -> dict[str, float]:
    """Flat: correlations by mode, and every controller's scores."""
    flat: dict[str, float] = {"controllers": len(found.names)}
    for mode, returns in found.returns.items():
        for split in ("test", "validation"):
            score = getattr(found, split)
            agreement = rank_agreement(returns, score)
            name = f"{mode}_vs_{split}"
            flat[f"alignment_{name}_spearman"] = spearman(returns.mean((1, 2)), score.mean((1, 2)))
            flat[f"alignment_{name}_spearman_ties_aside"] = agreement.spearman
            flat[f"alignment_{name}_disagreements"] = len(agreement.disagreements)
        never = returns[found.names.index("never")].mean()
        best = max(returns[found.names.index(name)].mean() for name in EXPLOITS)
        flat[f"alignment_{mode}_best_exploit_over_never"] = float(best - never)
    return flat


def show(found: Aligned, flat: dict[str, float]) -> None:
    table = Table("controller", "net score, test", "validation", *found.returns, "interventions")
    order = found.test.mean((1, 2)).argsort()[::-1]
    for place in order:
        columns = (found.test, found.validation, *found.returns.values(), -found.charged)
        table.add_row(found.names[place], *(f"{each[place].mean():+.3f}" for each in columns))
    Console().print(table)
    for name, value in flat.items():
        print(f"{name:60} {value:.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--episodes", type=int, default=3, help="cases of every context")
    parser.add_argument("--contexts", nargs="+", help="of garden_mlp; all that are trained in")
    parser.add_argument("--json", type=Path, help="write the figures flat to this file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    suite = find_suite("garden_mlp")
    names = options.contexts or [context.name for context in suite.training]
    contexts = [suite.find(name) for name in names]
    found = align(contexts, scripts(contexts), options.episodes)
    flat = figures_of(found)
    show(found, flat)
    write_json(options.json, flat)


if __name__ == "__main__":
    main()
