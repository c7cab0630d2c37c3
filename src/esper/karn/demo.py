"""The main job in minutes: train, compare on test data, report."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from esper.garden import evaluate, find_suite, standings
from esper.garden.controller_choice import controller_of
from esper.garden.evaluation import Standing
from esper.karn.commands.training import Demo
from esper.karn.garden import print_standings, standing_figures
from esper.karn.progress import progress
from esper.karn.report import write_report
from esper.karn.training import figures_of, start_run
from esper.simic.training import PRESETS, load_controller

COMPARED = ("random", "heuristic", "best_constant")
RESULTS = "results.jsonl"


def run_demo(options: Demo) -> None:
    config = replace(PRESETS["demo"], rounds=options.rounds, seed=options.seed)
    run = start_run(config, options.out)
    suite = find_suite(config.suite)
    learned = load_controller(run.path)
    others = [controller_of(name, suite) for name in COMPARED]
    print("Now on test data, which nothing has seen:", flush=True)
    with progress() as report:
        results = evaluate(
            [learned, *others],
            suite.training,
            seeds=options.seeds,
            file=run.path / RESULTS,
            progress=report,
        )
    lines = standings(results)
    print_standings(f"{suite.name}, test data", lines, config.reward.rent)
    page = write_report(run.path)
    if options.json is not None:
        figures = {**figures_of(run.path), **standing_figures(lines)}
        options.json.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    print(_conclusion(lines, config.rounds * config.envs, page))


def _conclusion(lines: list[Standing], episodes: int, page: Path) -> str:
    """What was learned, with its figures, and where to look."""
    by_name: Mapping[str, Standing] = dict(zip(("tamiyo", *COMPARED), lines, strict=True))

    def spoken(name: str) -> str:
        gain = by_name[name].gain
        return f"{gain.value:+.1f} [{gain.low:+.1f}, {gain.high:+.1f}]"

    tamiyo, chance = by_name["tamiyo"].gain, by_name["random"].gain
    verdict = "better than chance and than not growing"
    if tamiyo.low <= max(0.0, chance.high):
        verdict = "not clearly better than chance or than not growing, so train longer"
    return (
        f"After {episodes:,} episodes Tamiyo's networks end {spoken('tamiyo')} points above the "
        f"same networks never grown, after rent: {verdict} (random decisions {spoken('random')}, "
        f"the rule of thumb {spoken('heuristic')}, the best fixed schedule "
        f"{spoken('best_constant')}; 95 % intervals). The report: {page}"
    )
