"""`esper demo`: a network that lacks something is audited and grown; a controller is trained."""

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import torch
from torch import nn

from esper.api import GrownRun, GrowthFolder, audit, grow
from esper.garden import evaluate, find_suite, standings
from esper.garden.controller_choice import controller_of
from esper.karn.commands import RUNS, Demo, Train
from esper.karn.garden_commands import print_standings, standing_figures
from esper.karn.train_commands import figures_of, start_run
from esper.karn.watch_commands import start_watching
from esper.show import write_report
from esper.show.audit_facts import Audit
from esper.show.report import require_matplotlib
from esper.show.terminal import progress, write_flat
from esper.simic.training import PRESETS, RunFolder, load_controller
from esper.tolaria.tasks import mnist1d

COMPARED = ("random", "heuristic", "best_constant")  # with what the demo learned
RESULTS = "results.jsonl"
AUDIT_PAGE = "audit.html"  # in the run's folder
EPOCHS, RATE, BUDGET = 20, 1e-2, "+25%"  # of the network that is audited


def run_demo(options: Demo) -> None:
    require_matplotlib()  # before minutes of work
    config = replace(PRESETS["demo"], rounds=options.rounds, seed=options.seed)
    path = options.out or RunFolder.next_in(RUNS, config.suite)
    network = None
    if options.watch:  # the page shows what is kept
        network = GrowthFolder.next_in(path.parent, f"{path.name}-network")
        start_watching(network, path)
    found, gained = grow_one(options.seed, network)
    print("\nNow a controller is trained to decide such things by itself, on a garden of tasks:")
    run = start_run(Train(config=config, out=path))
    found.save(run.path / AUDIT_PAGE)
    suite = find_suite(config.suite)
    players = [load_controller(run.path), *(controller_of(name, suite) for name in COMPARED)]
    print("Now on test data, which nothing has seen:", flush=True)
    with progress() as tell:
        results = evaluate(
            players, suite.training, seeds=options.seeds, file=run.path / RESULTS, progress=tell
        )
    lines = standings(results)
    print_standings(f"{suite.name}, test data", lines, config.reward.rent)
    report = write_report(run.path)
    write_flat(options.json, gained | figures_of(run.path) | standing_figures(lines))
    tamiyo, chance, rule, constant = (line.gain for line in lines)  # as in COMPARED
    verdict = "better than chance and than not growing"
    if tamiyo.low <= max(0.0, chance.high):
        verdict = "not clearly better than chance or than not growing, so train longer"
    print(
        f"After {config.rounds * config.envs:,} episodes Tamiyo's networks end {tamiyo:+.1f} "
        f"points above the same networks never grown, after rent: {verdict} (random decisions "
        f"{chance:+.1f}, the rule of thumb {rule:+.1f}, the best fixed schedule "
        f"{constant:+.1f}; 95 % intervals). The report: {report}, and what the audit saw: "
        f"{run.path / AUDIT_PAGE}"
    )


# --- one network ------------------------------------------------------------------------------


def network(seed: int) -> nn.Module:
    """Sees each of 40 points at its own place, while the glyphs of MNIST-1D are anywhere."""
    torch.manual_seed(seed)
    widths = (40, 64, 40, 10)
    layers: list[nn.Module] = [nn.LayerNorm(widths[0])]
    for given, returned in pairwise(widths):
        layers += [nn.Linear(given, returned), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def grow_one(seed: int, folder: Path | None = None) -> tuple[Audit, dict[str, float]]:
    """Audit a network and grow it; what was found, and its accuracy beside one never grown."""
    train, val, test = mnist1d(seed).named().values()
    print(
        "A small network is to tell glyphs apart that may be anywhere on a line. What does it lack?"
    )
    found = audit(
        network(seed), train, val, loss="cross_entropy", budget=BUDGET, lr=RATE, seed=seed
    )
    print(f"\n{found}\n", flush=True)

    def trained(controller: str, out: Path | None = None) -> GrownRun:
        return grow(
            network(seed), train, val, test=test, loss="cross_entropy", budget=BUDGET, lr=RATE,
            epochs=EPOCHS, seed=seed, controller=controller, quiet=controller == "never", out=out,
        )  # fmt: skip

    print("Now it grows, with nothing chosen by hand:", flush=True)
    never, grown = trained("never"), trained("audition", folder)
    print(f"\n{grown.report()}\n")
    before, after = (run.after["test_score"] for run in (never, grown))
    print(f"On test data: {before:.1f} % never grown, {after:.1f} % grown ({after - before:+.1f}).")
    return found, {"demo_never": before, "demo_grown": after}
