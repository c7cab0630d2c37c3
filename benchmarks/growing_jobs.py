"""The trainings of `growing.py`: what is to be trained, one job, and many in several processes.

A job is a training, or a few that belong together; what came of it is one small JSON file in a
folder, written whole. Folders of several machines are joined by copying files. What is there is not
trained again, so a study that was stopped goes on.
"""

import base64
import dataclasses
import json
import math
import multiprocessing
import platform
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, Future, ProcessPoolExecutor, wait
from functools import cache, cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from growing_pools import Data
from growing_tasks import (
    BUDGET,
    OWN_RATES,
    RATES,
    SEEDS,
    TASKS,
    TUNING_SEEDS,
    Candidate,
    Task,
)
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import CosineAnnealingLR

import esper
from esper.api import GrownRun
from esper.archive.files import write_whole
from esper.leyline.errors import EsperError
from esper.leyline.streams import derive_seed

DEFAULT = "audition"  # the controller of the default
PLANTED = 1  # epochs after which a candidate is planted
TESTED = 500  # samples at once
WIDEST = 1.5  # times the host's own widths, among which one of a wanted size is looked for
KINDS = ("tune", "default", "wider", "never", "race", "candidate", "audit")  # in this order
AUDITED = (1, 3, 5)  # epochs after which rankings are compared
AUDIT_SEEDS = 2  # of those that are reported
# Every shadow is heard to the end, and nothing is planted.
AUDIT_EPOCHS = 5 * max(AUDITED)  # of the host, of which shadows are heard in a fifth at most
AUDIT = (
    f"audition:rounds={max(AUDITED)},finalists=1000,spend=1000,tries=0,certain=1000000,unlearned=1"
)
BY_SAMPLE = ("default", "never", "variant")  # of which every test sample's score is kept

Outcome = dict[str, Any]  # of one training, as JSON holds it


@dataclasses.dataclass(frozen=True)
class Job:
    """What is trained: `detail` is the number of a rate, or a candidate's."""

    task: str
    kind: str
    seed: int
    detail: int = 0

    @property
    def file(self) -> str:
        return f"{self.task}/{self.kind}-{self.seed}-{self.detail}.json"


@dataclasses.dataclass(frozen=True)
class Study:
    """Results in a folder, and what is still to be trained for them."""

    folder: Path
    packed: Path | None = None  # data of the pools
    quick: bool = False

    def task(self, name: str) -> Task:
        return TASKS[name].quick() if self.quick else TASKS[name]

    def seeds(self, task: str) -> Sequence[int]:
        """That are reported."""
        return SEEDS[TASKS[task].group][: 1 if self.quick else None]

    @property
    def tuning_seeds(self) -> Sequence[int]:
        return TUNING_SEEDS[:1] if self.quick else TUNING_SEEDS

    def found(self, job: Job) -> Outcome | None:
        path = self.folder / job.file
        return _read(path) if path.exists() else None

    def all_found(self, jobs: Sequence[Job]) -> list[Outcome] | None:
        found = [self.found(job) for job in jobs]
        return None if None in found else [each for each in found if each is not None]

    # --- what there is to train ---------------------------------------------------------------

    def candidates(self, task: str) -> list[Candidate]:
        return _candidates(task)[:2] if self.quick else _candidates(task)

    def tuning(self, task: str) -> list[list[Job]]:
        """By rate, and by seed."""
        return [
            [Job(task, "tune", seed, rate) for seed in self.tuning_seeds]
            for rate in range(len(RATES))
        ]

    def rate(self, task: str) -> float | None:
        """The bare host's best on validation data of the tuning seeds; None: not yet known."""
        found = [self.all_found(jobs) for jobs in self.tuning(task)]
        if any(each is None for each in found):
            return None
        scores = np.asarray([[run["validation"] for run in each or []] for each in found])
        spread = scores.std(1, ddof=1) if self.task(task).cautious and scores.shape[1] > 1 else 0.0
        return RATES[int(np.argmax(scores.mean(1) - spread))]

    def jobs(self, task: str) -> Iterator[Job]:
        """Those that can be trained now, or were."""
        yield from (job for jobs in self.tuning(task) for job in jobs)
        if self.rate(task) is None:
            return
        for seed in self.seeds(task):
            yield from (Job(task, "default", seed, rate) for rate in range(len(OWN_RATES)))
            yield Job(task, "never", seed)
            yield Job(task, "race", seed)
            count = len(self.candidates(task))
            yield from (Job(task, "candidate", seed, number) for number in range(count))
            if self.found(Job(task, "default", seed, OWN_RATES.index(1.0))) is not None:
                yield from (Job(task, "wider", seed, rate) for rate in range(len(OWN_RATES)))
        yield from self.audits(task)

    def controller(self, job: Job) -> str:
        """Of a training that its kind says nothing else of."""
        return job.kind

    def audits(self, task: str) -> list[Job]:
        return [Job(task, "audit", seed) for seed in self.seeds(task)[:AUDIT_SEEDS]]

    def count(self, task: str) -> dict[str, int]:
        """How many jobs of each kind there are in all."""
        seeds = len(self.seeds(task))
        each = {"never": 1, "race": 1, "candidate": len(self.candidates(task))}
        each |= dict.fromkeys(("default", "wider"), len(OWN_RATES))
        counts = {kind: seeds * count for kind, count in each.items()}
        counts |= {"tune": len(RATES) * len(self.tuning_seeds), "audit": len(self.audits(task))}
        return {kind: counts[kind] for kind in KINDS}


@lru_cache(maxsize=4096)
def _read(path: Path) -> Outcome:
    found: Outcome = json.loads(path.read_text(encoding="utf-8"))
    return found


@lru_cache
def _candidates(task: str) -> list[Candidate]:
    return TASKS[task].candidates()


# --- one training --------------------------------------------------------------------------------


def train(
    task: Task, data: Data, model: nn.Module, seed: int, rate: float, **choices: Any
) -> tuple[GrownRun | None, Outcome]:
    """One run of `esper.grow`; nothing else trains here, so that all ways train alike.

    None: it diverged, and counts as knowing nothing.
    """
    began = time.process_time()
    settings = {
        "loss": task.loss,
        "epochs": task.epochs,
        "lr": rate,
        "scheduler": lambda made: CosineAnnealingLR(made, task.epochs),
        "batch_size": task.batch_size,
        "seed": seed,
        "quiet": True,
    }
    try:
        run = esper.grow(model, data["train"], data["validation"], **settings | choices)
    except EsperError as error:
        if "finite" not in error.what:
            raise
        return None, {"diverged": error.what} | _nothing_learned(task, rate, model)
    report = run.report()
    if not report.within_budget:
        raise SystemExit(f"{task.name}, seed {seed}: over the budget\n{report}")
    each = tested(task, run.host, data["test"])
    history = run.history
    return run, {
        "rate": rate,
        "params": report.host_params + report.added,
        "validation": task.score(report.after["loss"], report.after["score"]),
        "curve": [task.score(record["val_loss"], record["score"]) for record in history],
        "test": task.score(float(each.mean()), 100.0 * float(each.mean())),
        "each": packed_numbers(each, exact=task.guess is None),
        "flops": [record["flops"] for record in history],
        "shadow_flops": shadow_flops(history),
        "tryouts": [each for record in history for each in record.get("tryouts", [])],
        "shadows": [[_rounded(each) for each in record.get("shadows", [])] for record in history],
        "grown": [f"{seed.blueprint} at {seed.slot}" for seed in report.grown],
        "seconds": time.process_time() - began,
    }


def _rounded(reading: Mapping[str, Any]) -> dict[str, Any]:
    """What a shadow showed, short enough to be kept."""
    return {
        name: float(f"{value:.4g}") if isinstance(value, float) else value
        for name, value in reading.items()
    }


def shadow_flops(history: Sequence[Mapping[str, Any]]) -> list[float]:
    """Of every epoch: what it costs to train shadows and to measure them."""
    return [record.get("shadow_cost", 0.0) * (record["flops"] or 0.0) for record in history]


def _nothing_learned(task: Task, rate: float, model: nn.Module) -> Outcome:
    """What a training that diverged comes to."""
    guesses = torch.full((task.samples["test"],), task.guess or 0.0, dtype=torch.float64)
    return {
        "rate": rate,
        "params": sum(parameter.numel() for parameter in model.parameters()),
        "validation": 0.0,
        "curve": [0.0] * task.epochs,
        "test": 0.0,
        "each": packed_numbers(guesses, exact=task.guess is None),
        "flops": [0.0] * task.epochs,
        "shadow_flops": [0.0] * task.epochs,
        "tryouts": [],
        "shadows": [[]] * task.epochs,
        "grown": [],
        "seconds": 0.0,
    }


def tested(task: Task, model: nn.Module, test: tuple[Tensor, Tensor]) -> Tensor:
    """[M]: for each sample of the test data whether it is right, or its loss."""
    found = []
    with torch.no_grad():
        for inputs, targets in zip(*(part.split(TESTED) for part in test), strict=True):
            outputs = model(inputs)
            if task.guess is None:
                found.append((outputs.argmax(1) == targets).double())
            elif task.loss == "mse":
                found.append((outputs - targets).square().flatten(1).mean(1))
            else:
                losses = cross_entropy(outputs.transpose(1, 2), targets, reduction="none")
                found.append(losses.mean(1))
    return torch.cat(found).double()


def packed_numbers(values: Tensor, *, exact: bool) -> str:
    """Numbers as text: bits where they are 0 or 1, else of half precision."""
    array = values.numpy()
    raw = np.packbits(array > 0.5) if exact else array.astype(np.float16)
    return base64.b64encode(raw.tobytes()).decode()


def unpacked_numbers(text: str, *, exact: bool, count: int) -> np.ndarray[Any, Any]:
    raw = base64.b64decode(text)
    if exact:
        return np.unpackbits(np.frombuffer(raw, np.uint8), count=count).astype(float)
    return np.frombuffer(raw, np.float16).astype(float)


def newborn(task: Task, seed: int, factor: float = 1.0) -> nn.Module:
    """The host with the weights of this seed."""
    torch.manual_seed(derive_seed(seed, "newborn"))
    return task.build(factor)


def wider(task: Task, size: int) -> float:
    """By how much all widths grow in the host that is nearest to this many parameters."""
    factors = np.linspace(1.0, WIDEST, 101)

    @cache
    def params(number: int) -> int:
        with torch.device("meta"):  # without memory for weights
            return sum(each.numel() for each in task.build(float(factors[number])).parameters())

    numbers = range(len(factors))  # larger factors never make a smaller host
    above = bisect_left(numbers, min(size, params(numbers[-1])), key=params)
    below = bisect_left(numbers, params(max(above - 1, 0)), key=params)
    return float(factors[min(below, above, key=lambda number: abs(params(number) - size))])


# --- jobs ------------------------------------------------------------------------------------


@lru_cache(maxsize=2)
def _data(study: Study, task: str, seed: int) -> Data:
    return study.task(task).data(seed, study.packed)


def carry_out(study: Study, job: Job) -> Outcome:
    """Train what a job asks for, and keep what came of it."""
    torch.set_num_threads(1)
    outcome = JobRun(study, job).outcome()
    if job.kind not in BY_SAMPLE:
        outcome.pop("each", None)
    outcome |= {"job": dataclasses.asdict(job), "machine": _machine()}
    path = study.folder / job.file
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, json.dumps(outcome) + "\n")
    return outcome


def _machine() -> str:
    return f"{platform.machine()}, torch {torch.__version__}, Python {platform.python_version()}"


@dataclasses.dataclass(frozen=True)
class JobRun:
    """A job with its task and data."""

    study: Study
    job: Job

    @cached_property
    def task(self) -> Task:
        return self.study.task(self.job.task)

    @cached_property
    def data(self) -> Data:
        return _data(self.study, self.job.task, self.job.seed)

    @property
    def shared_rate(self) -> float:
        rate = self.study.rate(self.job.task)
        assert rate is not None, "a job ran before its rate was known"
        return rate

    def outcome(self) -> Outcome:
        job = self.job
        if job.kind == "tune":
            return self._grown(RATES[job.detail], controller="never")[1]
        if job.kind == "default":
            return self._default()
        if job.kind == "wider":
            return self._wider()
        if job.kind == "candidate":
            return self._candidate()
        if job.kind == "audit":  # at the rates that a whole training has in its first epochs
            _, outcome = self._grown(self.shared_rate, controller=AUDIT, epochs=AUDIT_EPOCHS)
            return outcome | {"verdicts": self._verdicts()}
        return self._grown(self.shared_rate, controller=self.study.controller(job))[1]

    def _grown(self, rate: float, **choices: Any) -> tuple[GrownRun | None, Outcome]:
        model = newborn(self.task, self.job.seed)
        return train(self.task, self.data, model, self.job.seed, rate, budget=BUDGET, **choices)

    def _verdicts(self) -> dict[str, int]:
        """What `esper.audit` says of how many seeds."""
        task, data = self.task, self.data
        settings = {"loss": task.loss, "lr": self.shared_rate, "batch_size": task.batch_size}
        model = newborn(task, self.job.seed)
        found = esper.audit(
            model, data["train"], data["validation"], budget=BUDGET, seed=self.job.seed,
            quiet=True, **settings,
        )  # fmt: skip
        return dict(Counter(str(each.verdict) for each in found.candidates))

    def _candidate(self) -> Outcome:
        chosen = self.study.candidates(self.job.task)[self.job.detail]
        plan = f"fixed:slot={chosen.place},blueprint={chosen.blueprint},epoch={PLANTED}"
        _, outcome = self._grown(self.shared_rate, slots=[chosen.place], controller=plan)
        # One that stands in the way is not made permanent by its gate, and is gone at the end.
        if outcome["grown"] not in ([], [str(chosen)]):
            raise SystemExit(f"{self.job}: {outcome['grown']} grew instead of {chosen}")
        return outcome | {"candidate": dataclasses.asdict(chosen)}

    def _default(self) -> Outcome:
        """At the shared rate also what it became, from scratch."""
        factor = OWN_RATES[self.job.detail]
        run, outcome = self._grown(self.shared_rate * factor, controller=DEFAULT)
        if factor == 1.0:
            outcome["scratch"] = [self._scratch(run, self.shared_rate * own) for own in OWN_RATES]
        return outcome

    def _scratch(self, run: GrownRun | None, rate: float) -> Outcome:
        host = newborn(self.task, self.job.seed)
        if run is None:
            return self._plain(host, rate)
        return self._plain(run.fresh(host), rate)

    def _plain(self, model: nn.Module, rate: float) -> Outcome:
        """A network that does not grow, at its own rate."""
        choices = {"budget": None, "controller": "never"}
        outcome = train(self.task, self.data, model, self.job.seed, rate, **choices)[1]
        return {name: value for name, value in outcome.items() if name != "each"}

    def _wider(self) -> Outcome:
        """As large as what the default became."""
        job = self.job
        grown = self.study.found(Job(job.task, "default", job.seed, OWN_RATES.index(1.0)))
        assert grown is not None, "a wider host was asked for before its size was known"
        model = newborn(self.task, job.seed, wider(self.task, grown["params"]))
        return self._plain(model, self.shared_rate * OWN_RATES[job.detail])


# --- many jobs -----------------------------------------------------------------------------------


def processes(workers: int) -> Executor:
    """That train side by side, each with one thread."""
    context = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(workers, mp_context=context)


def carry_out_all(
    study: Study,
    tasks: Sequence[str],
    pool: Executor,
    workers: int,
    seconds: float = math.inf,
    kinds: Sequence[str] = KINDS,
) -> None:
    """Train what is missing, so many jobs at a time; none is begun after so many seconds."""
    began, failed, done = time.monotonic(), set[Job](), 0
    running: dict[Future[Outcome], Job] = {}
    while True:
        in_time = time.monotonic() - began < seconds
        taken = {*running.values(), *failed}
        open_ = waiting(study, tasks, kinds, taken) if in_time else []
        # A few more than there are workers, so that none of them waits for this process.
        for job in open_[: workers + 2 - len(running)]:
            running[pool.submit(carry_out, study, job)] = job
        if not running:
            break
        finished, _ = wait(running, return_when=FIRST_COMPLETED)
        for future in finished:
            job, error = running.pop(future), future.exception()
            done += 1
            if error is not None:
                failed.add(job)
                print(f"{job.file} failed: {error!r}", flush=True)
            else:
                _tell(job, future.result(), done, time.monotonic() - began)
    left = waiting(study, tasks, kinds, failed)
    print(f"{done} jobs done, {len(failed)} of them failed, {len(left)} can be done next")


def waiting(study: Study, tasks: Sequence[str], kinds: Sequence[str], taken: set[Job]) -> list[Job]:
    """Jobs that can be done now and are not, in the order of their kinds."""
    found = []
    for task in tasks:
        there = {f"{task}/{path.name}" for path in (study.folder / task).glob("*.json")}
        open_ = (job for job in study.jobs(task) if job.kind in kinds and job not in taken)
        found += [job for job in open_ if job.file not in there]
    return sorted(found, key=lambda job: kinds.index(job.kind))


def _tell(job: Job, outcome: Mapping[str, Any], done: int, seconds: float) -> None:
    grown = ", ".join(outcome["grown"])
    print(
        f"{seconds:6.0f} s, {done}: {job.file} validation {outcome['validation']:.2f}, rate "
        f"{outcome['rate']:g}, {outcome['seconds']:.1f} s {grown}",
        flush=True,
    )
