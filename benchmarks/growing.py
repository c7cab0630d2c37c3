"""Does the default of `esper.grow` pay, on models as users have them, with nothing chosen by hand?

    python benchmarks/growing.py --plan                                 # what it will cost
    python benchmarks/growing.py --runs DIR --jobs 16 [--seconds 1200]  # train, or go on
    python benchmarks/growing.py --runs DIR --report [--json FILE] [--write]
    python benchmarks/growing.py --set 2 --runs DIR --report --write    # of the second set
    python benchmarks/growing.py --pack FOLDER                          # data for other machines
    python benchmarks/growing.py --quick --runs DIR --jobs 1 --tasks mnist1d_mlp --report  # try it

On every task of a set of `growing_tasks.py` (the third, if nothing else is said): never · the
default · `race` · a random place · the largest affordable seed · a wider host of the same size ·
what the default became, from scratch · Optuna over the same seeds at the same and at five times the
FLOPs · the best single place, every candidate trained to the end. All train through the public API,
on the same data, at the rate that suits the bare host best; where a rate is said to be tuned, at
one of their own.

What came of earlier sets stays as it was published: `--set` writes the page of each, of trainings
of its time. `growing_tuning.py` compares rules on the tasks for development; --tasks trains those
here as well.

DIR holds a file for every training. Several machines share the work by --tasks or --kinds; their
folders are joined by copying one into the other. After a change of the rule remove what depends on
it: default-*, wider-* and audit-*.
"""

import argparse
import collections
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from _report import ROOT, write_json
from growing_figures import cost_rows, figures, for_report, read_results
from growing_jobs import KINDS, Study, carry_out_all, newborn, processes, train
from growing_pools import pack
from growing_tasks import BUDGET, RATES, TASKS, Group, tasks_for

from esper.leyline.errors import EsperError

SETS: dict[int, Group] = {1: "report 1", 2: "report 2", 3: "report 3"}
DOCS = ROOT / "docs"
PAGES = {
    1: DOCS / "growing-first.md", 2: DOCS / "growing-results.md", 3: DOCS / "growing-third.md"
}  # fmt: skip
PICTURES = {number: page.with_suffix(".png") for number, page in PAGES.items()}
PICTURES[2] = DOCS / "growing.png"
MEASURED_EPOCHS = 2


def main() -> None:
    options = _options()
    tasks = options.tasks or tasks_for(SETS[options.set])
    torch.set_num_threads(1)
    study = Study(options.runs, options.data, options.quick)
    try:
        if options.pack is not None:
            pack(options.pack)
        elif options.plan:
            show_plan(study, tasks)
        else:
            if options.jobs:
                with processes(options.jobs) as pool:
                    limits = (options.jobs, options.seconds, options.kinds)
                    carry_out_all(study, tasks, pool, *limits)
            if options.report:
                report(study, options.set, options.json, options.write)
    except EsperError as error:  # such as a data set that is not there, with how to get it
        raise SystemExit(str(error)) from error


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--runs", type=Path, default=Path("growing-runs"), metavar="DIR")
    parser.add_argument("--set", type=int, choices=list(SETS), default=max(SETS), help="of tasks")
    parser.add_argument("--tasks", nargs="+", choices=list(TASKS), help="instead of a whole set")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS, help="of trainings")
    parser.add_argument("--jobs", type=int, default=0, metavar="N", help="train in N processes")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="then begin no more")
    parser.add_argument("--data", type=Path, metavar="FOLDER", help="what --pack has written")
    parser.add_argument("--quick", action="store_true", help="little of everything")
    parser.add_argument("--plan", action="store_true", help="say what it will cost, and no more")
    parser.add_argument("--pack", type=Path, metavar="FOLDER")
    parser.add_argument("--report", action="store_true", help="say what came out")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--write", action="store_true", help="put tables and picture into the docs")
    options = parser.parse_args()
    if options.write and (options.quick or not options.report):
        parser.error("--write goes with --report, and not with --quick")
    return options


def show_plan(study: Study, tasks: Sequence[str]) -> None:
    """Jobs and seconds of the processor by task, from two epochs of every bare host."""
    seconds = {name: measured_seconds(study, name) for name in tasks}
    rows = cost_rows(study, seconds)
    by_kind: collections.Counter[str] = collections.Counter()
    for name in tasks:
        mine = [(kind, count, cost) for task, kind, count, cost in rows if task == name]
        words = ", ".join(f"{kind} {count} × {cost / count:.1f} s" for kind, count, cost in mine)
        total = sum(cost for _, _, cost in mine)
        print(f"{name}: {total:,.0f} s ({words}); {len(study.candidates(name))} candidates")
        by_kind.update({kind: round(cost) for kind, _, cost in mine})
    print(", ".join(f"{kind} {cost:,} s" for kind, cost in by_kind.items()))
    jobs, whole = sum(count for _, _, count, _ in rows), sum(cost for *_, cost in rows)
    print(f"{jobs} jobs, {whole:,.0f} s of the processor: {whole / 3600:.2f} hours")


def measured_seconds(study: Study, name: str) -> float:
    """A training of the bare host, from its first epochs."""
    task = study.task(name)
    data = task.data(0, study.packed)
    seconds = []
    for epochs in (1, 1 + MEASURED_EPOCHS):  # the first also wakes up what is slow once
        began = time.process_time()
        short = {"epochs": epochs, "budget": BUDGET, "controller": "never"}
        train(task, data, newborn(task, 0), 0, RATES[2], **short)
        seconds.append(time.process_time() - began)
    return seconds[-1] * task.epochs / (1 + MEASURED_EPOCHS)


def report(study: Study, number: int, json_file: Path | None, write: bool) -> None:
    results = read_results(study, SETS[number])
    found = figures(results)
    if not found or (write and not for_report(results)):
        raise EsperError(
            f"nothing of set {number} is trained to the end, so nothing was written",
            given=f"--runs {study.folder}",
            fix=f"train it first: --set {number} --runs {study.folder} --jobs 16",
        )
    for name, value in found.items():
        print(f"{name} {value:.4g}")
    write_json(json_file, found)
    if write:
        import growing_page as pages  # where only trainings run there is no matplotlib

        whole = pages.page(study, results) if number == 2 else pages.own_page(number, results)
        PAGES[number].write_text(whole, encoding="utf-8")
        PICTURES[number].write_bytes(pages.draw_gains(results))


if __name__ == "__main__":
    main()
