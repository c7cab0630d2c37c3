"""Which rule gains the most on the tasks for development? For tuning; nothing here is a result.

    python benchmarks/growing_tuning.py --variants FILE --runs DIR --jobs 16 [--seconds 600]
        [--ceilings] [--tasks NAME ...] [--data FOLDER]

FILE has a controller in each line, such as `audition:rounds=5,spend=0.7`. What follows a `#` is
part of its name: after a change of code the same controller with another remark is trained anew.
Every task, three seeds: the bare host at a rate tuned once, every variant at that rate, and with
--ceilings every candidate planted, kept and trained to the end. DIR holds a file for every
training, so that what was stopped goes on; without --jobs only the tables are printed.
"""

import argparse
import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from growing_figures import ends_below
from growing_jobs import Job, Outcome, Study, carry_out_all, processes
from growing_tasks import Task, tasks_for

from esper.leyline.errors import EsperError
from esper.leyline.streams import derive_seed
from studies.report.own_models import cost_of

KINDS = ("tune", "never", "variant", "candidate")  # in this order
CLEAR = 2.0  # standard errors over seeds by which a ceiling lies above never, for it to count


@dataclasses.dataclass(frozen=True)
class Tuning(Study):
    """Variants, on the seeds that rates are tuned on."""

    variants: tuple[str, ...] = ()
    ceilings: bool = False

    def seeds(self, task: str) -> Sequence[int]:
        return self.tuning_seeds

    def jobs(self, task: str) -> Iterator[Job]:
        yield from (job for jobs in self.tuning(task) for job in jobs)
        if self.rate(task) is None:
            return
        for seed in self.seeds(task):
            yield Job(task, "never", seed)
            yield from (Job(task, "variant", seed, number_of(each)) for each in self.variants)
            count = len(self.candidates(task)) if self.ceilings else 0
            yield from (Job(task, "candidate", seed, number) for number in range(count))

    def controller(self, job: Job) -> str:
        if job.kind != "variant":
            return job.kind
        named = {number_of(each): each for each in self.variants}
        return named[job.detail].partition("#")[0].strip()

    def runs(self, task: str, kind: str, detail: int = 0) -> list[Outcome] | None:
        return self.all_found([Job(task, kind, seed, detail) for seed in self.seeds(task)])


def number_of(variant: str) -> int:
    """The same for the same words, wherever they stand in a file."""
    return derive_seed("variant", variant) % 10**9


def read_variants(path: Path) -> tuple[str, ...]:
    lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
    return tuple(dict.fromkeys(line for line in lines if line and not line.startswith("#")))


# --- what came out -------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Tried:
    """A variant on one task."""

    gain: float  # points of test score over never
    share: float  # of what the best single place gains; NaN: that is unknown, or not clear
    harm: float  # share of seeds
    cost: float  # FLOPs over those of never


def ceiling(study: Tuning, task: str) -> float:
    """What the best single place gains, chosen by validation scores; NaN: unknown or not clear."""
    never = study.runs(task, "never")
    table = [study.runs(task, "candidate", each) for each in range(len(study.candidates(task)))]
    known = [runs for runs in table if runs is not None]
    if never is None or len(known) < len(table):
        return math.nan
    best = max(known, key=lambda runs: float(np.mean([run["validation"] for run in runs])))
    gains = _tests(best) - _tests(never)
    error = float(gains.std(ddof=1)) / math.sqrt(gains.size) if gains.size > 1 else 0.0
    return float(gains.mean()) if gains.mean() > CLEAR * error else math.nan


def tried(study: Tuning, name: str, variant: str, best: float) -> Tried | None:
    """None: it is not trained yet."""
    never, grown = study.runs(name, "never"), study.runs(name, "variant", number_of(variant))
    if never is None or grown is None:
        return None
    task: Task = study.task(name)
    pairs = list(zip(grown, never, strict=True))
    gain = float((_tests(grown) - _tests(never)).mean())
    costs = [cost_of(one, other) for one, other in pairs]
    harm = float(np.mean([ends_below(task, one, other) for one, other in pairs]))
    return Tried(gain, gain / best, harm, float(np.mean(costs)))


def _tests(runs: Sequence[Outcome]) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    return np.asarray([run["test"] for run in runs], dtype=float)


def tables(study: Tuning, tasks: Sequence[str]) -> str:
    """Variants by tasks, their means first; variants have numbers."""
    ceilings = {name: ceiling(study, name) for name in tasks}
    found = {
        variant: {name: tried(study, name, variant, ceilings[name]) for name in tasks}
        for variant in study.variants
    }
    lines = [f"{number}: {variant}" for number, variant in enumerate(study.variants)]
    lines.append("tasks: " + ", ".join(f"{name} ({_rate(study, name)})" for name in tasks))
    columns: dict[str, tuple[Callable[[Tried], float], str]] = {
        "gain over never, points": (lambda each: each.gain, "+.2f"),
        "share of the best single place": (lambda each: each.share, ".2f"),
        "harmed, share of seeds": (lambda each: each.harm, ".2f"),
        "FLOPs over never": (lambda each: each.cost, ".2f"),
    }
    width = max([len(name) for name in tasks] + [8])
    header = "".join(f"{word:>{width + 1}}" for word in ("mean", *tasks))
    for title, (read, form) in columns.items():
        lines += ["", f"{title}", f"{'':>8}{header}"]
        if title.startswith("share of the"):
            lines.append(_row("gain", list(ceilings.values()), "+.2f", width))
        for number, by_task in enumerate(found.values()):
            values = [math.nan if each is None else read(each) for each in by_task.values()]
            lines.append(_row(str(number), values, form, width))
    return "\n".join(lines)


def _row(name: str, values: Sequence[float], form: str, width: int) -> str:
    known = [value for value in values if not math.isnan(value)]
    mean = float(np.mean(known)) if known else math.nan
    words = ["—" if math.isnan(value) else f"{value:{form}}" for value in (mean, *values)]
    return f"{name:>8}" + "".join(f"{word:>{width + 1}}" for word in words)


def _rate(study: Tuning, name: str) -> str:
    rate = study.rate(name)
    return "no rate yet" if rate is None else f"rate {rate:g}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    development = tasks_for("development")
    parser.add_argument("--variants", type=Path, metavar="FILE", help="without it: the default")
    parser.add_argument("--runs", type=Path, default=Path("tuning-runs"), metavar="DIR")
    parser.add_argument("--jobs", type=int, default=0, metavar="N", help="train in N processes")
    parser.add_argument("--seconds", type=float, default=math.inf, help="then begin no more")
    parser.add_argument("--tasks", nargs="+", choices=development, default=development)
    parser.add_argument("--ceilings", action="store_true", help="train every candidate as well")
    parser.add_argument("--data", type=Path, metavar="FOLDER", help="what --pack has written")
    parser.add_argument("--quick", action="store_true", help="little of everything")
    options = parser.parse_args()
    torch.set_num_threads(1)
    variants = ("audition",) if options.variants is None else read_variants(options.variants)
    study = Tuning(options.runs, options.data, options.quick, variants, options.ceilings)
    try:
        if options.jobs:
            with processes(options.jobs) as pool:
                limits = (options.jobs, options.seconds, KINDS)
                carry_out_all(study, options.tasks, pool, *limits)
        print(tables(study, options.tasks))
    except EsperError as error:  # such as a data set that is not there, with how to get it
        raise SystemExit(str(error)) from error


if __name__ == "__main__":
    main()
