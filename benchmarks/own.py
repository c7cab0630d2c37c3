"""Controllers on the tasks of the group `own` (docs/greenhouse.md), through `esper.grow`.

    python benchmarks/own.py --runs DIR --jobs 16 --final [--seconds 560]
        --controllers audition "periodic@*/global:every=2" both-0=FOLDER ...

Every task, five seeds: the bare host at a rate that is tuned once on other seeds, never grown, and
each controller at the same rate: specs, rules for any host (`studies/any_host.py`), or kept ones by
their folder. DIR holds a file for every training, so that what was stopped goes on;
`controllers.json` there says by which number each is known, and `whole.json` that all is trained.
These tasks are for reporting alone, so they are trained only with --final.
"""

import argparse
import dataclasses
import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from _report import ROOT  # noqa: F401  # lets it import studies
from growing_jobs import Job, Study, carry_out_all, processes
from growing_tasks import SEEDS, Task
from own_tasks import OWN_TASKS

from esper.archive.files import write_whole
from esper.garden.evaluation import fingerprint_of
from esper.leyline.streams import derive_seed
from esper.tamiyo.controllers import Controller
from studies.judging import controller_of, name_of

KINDS = ("tune", "never", "variant")  # in this order
NAMED = {task.name: task for task in OWN_TASKS}


@dataclasses.dataclass(frozen=True)
class Own(Study):
    """Controllers on users' tasks."""

    words: tuple[str, ...] = ()  # as they were asked for
    numbers: tuple[int, ...] = ()  # by which each is known

    def task(self, name: str) -> Task:
        return NAMED[name].quick() if self.quick else NAMED[name]

    def seeds(self, task: str) -> Sequence[int]:
        return SEEDS["own"][: 1 if self.quick else None]

    def jobs(self, task: str) -> Iterator[Job]:
        yield from (job for jobs in self.tuning(task) for job in jobs)
        if self.rate(task) is None:
            return
        for seed in self.seeds(task):
            yield Job(task, "never", seed)
            yield from (Job(task, "variant", seed, number) for number in self.numbers)

    def controller(self, job: Job) -> "Controller | str":  # type: ignore[override]
        if job.kind != "variant":
            return job.kind
        return controller_of(self.words[self.numbers.index(job.detail)])


def number_of(word: str) -> int:
    """The same for the same controller; another one under its name has another."""
    return derive_seed("own", name_of(word), fingerprint_of(controller_of(word))) % 10**9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--runs", type=Path, required=True, metavar="DIR")
    parser.add_argument("--controllers", nargs="+", default=["audition"])
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="train in N processes")
    parser.add_argument("--seconds", type=float, default=math.inf, help="then begin no more")
    parser.add_argument("--tasks", nargs="+", choices=list(NAMED), default=list(NAMED))
    parser.add_argument("--quick", action="store_true", help="little of everything")
    parser.add_argument("--final", action="store_true", help="all is chosen: train")
    options = parser.parse_args()
    if not options.final:
        parser.error("the tasks of group 'own' are held out: --final says that all is chosen")
    torch.set_num_threads(1)
    words = tuple(options.controllers)
    study = Own(options.runs, None, options.quick, words, tuple(map(number_of, words)))
    options.runs.mkdir(parents=True, exist_ok=True)
    told = {str(number): name_of(word) for number, word in zip(study.numbers, words, strict=True)}
    write_whole(options.runs / "controllers.json", json.dumps(told, indent=1) + "\n")
    with processes(options.jobs) as pool:
        carry_out_all(study, options.tasks, pool, options.jobs, options.seconds, KINDS)
    jobs = [job for task in NAMED for job in study.jobs(task)]
    if all(study.rate(task) for task in NAMED) and study.all_found(jobs) is not None:
        write_whole(options.runs / "whole.json", json.dumps([name_of(word) for word in words]))


if __name__ == "__main__":
    main()
