"""What `growing.py` says of its trainings: scores by way, differences on the same seeds, figures.

A score is in points: accuracy in percent, or how much of a guess's loss is gone. Intervals hold
95 % by Student's t: over seeds for one task, over the tasks' means where tasks are put together.
Tasks that learn the same data are no independent ones: there they count as one, by their mean. Only
in the first two sets every task counts by itself, for their figures stay as they were published.

Shapes: `S` seeds, `C` candidates, `E` epochs, `M` test samples.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from _report import ROOT  # noqa: F401  # lets it import studies
from growing_jobs import AUDITED, KINDS, Job, Outcome, Study, unpacked_numbers
from growing_replay import Trainings, optuna_here, searched
from growing_tasks import OWN_RATES, Candidate, Group, Task, tasks_for
from numpy.typing import ArrayLike, NDArray

from esper.garden.statistics import Estimate
from esper.show.audit_facts import Verdict
from studies.report.own_models import flops_of

Array = NDArray[np.float64]

RIVALS = {  # ways that the default is compared with, by the name of the figure
    "random_place": "a random place",
    "largest": "the largest affordable seed",
    "race": "`race`",
    "wider": "a wider host, rate tuned",
    "optuna": "Optuna, equal FLOPs",
    "optuna_5x": "Optuna, five times the FLOPs",
}
OTHERS = {
    "never": "never",
    "default": "default",
    "default_tuned": "default, rate tuned",
    "scratch": "from scratch, rate tuned",
    "ceiling": "best single place",
}
HARM = 2.0  # paired standard errors over test samples
SHARES = (1.0, 5.0)  # of the default's FLOPs, for Optuna
EACH_BY_ITSELF: tuple[Group, ...] = ("report 1", "report 2")  # even if tasks share their data


# --- statistics ----------------------------------------------------------------------------------


def t_quantile(freedom: int, level: float = 0.95) -> float:
    """Between minus and plus this lies so much of Student's distribution."""

    def inside(limit: float) -> float:
        points, step = np.linspace(0.0, limit, 2001, retstep=True)
        density = (1.0 + points**2 / freedom) ** (-(freedom + 1) / 2)
        weights = np.tile([2.0, 4.0], 1001)[:2001]  # Simpson's rule
        weights[0] = weights[-1] = 1.0
        log_scale = math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2)
        scale = math.exp(log_scale) / math.sqrt(freedom * math.pi)
        return 2.0 * scale * float(weights @ density) * float(step) / 3.0

    low, high = 0.0, 1.0
    while inside(high) < level:
        high *= 2.0
    for _ in range(60):
        middle = (low + high) / 2.0
        low, high = (middle, high) if inside(middle) < level else (low, middle)
    return (low + high) / 2.0


def t_interval(values: ArrayLike) -> Estimate:
    """The mean, and its interval; one value alone says nothing of its doubt."""
    array = np.asarray(values, dtype=float)
    mean, count = float(array.mean()), array.size
    if count < 2:
        return Estimate(mean, -math.inf, math.inf)
    reach = t_quantile(count - 1) * float(array.std(ddof=1)) / math.sqrt(count)
    return Estimate(mean, mean - reach, mean + reach)


def ranks(values: ArrayLike) -> Array:
    """From 0; equal values share the mean of their ranks."""
    array = np.asarray(values, dtype=float)
    below = (array[None] < array[:, None]).sum(1)
    same = (array[None] == array[:, None]).sum(1)
    return np.asarray(below + (same - 1) / 2.0)


@dataclass(frozen=True)
class Ranking:
    """How well a score that is known early ranks candidates by what they gain in the end."""

    spearman: float
    top1: float  # gain of the first in the ranking, as a share of the best gain
    top3: float  # and of the best among the first three

    @classmethod
    def of(cls, scores: ArrayLike, gains: Array) -> "Ranking":
        first, second = ranks(scores), ranks(gains)
        spread = first.std() * second.std()
        agreement = float(np.cov(first, second, ddof=0)[0, 1] / spread) if spread else 0.0
        order = np.argsort(-np.asarray(scores, dtype=float), kind="stable")
        best = float(gains.max())
        picked = [float(gains[order[:count]].max()) for count in (1, 3)]
        shares = [value / best if best > 0 else math.nan for value in picked]
        return cls(agreement, *shares)


# --- one task ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TaskResults:
    """All trainings of one task."""

    study: Study
    task: Task
    candidates: Sequence[Candidate]
    runs: Mapping[str, Sequence[Outcome]]  # by kind: never, default, race; [S]
    own_rates: Mapping[str, Sequence[Sequence[Outcome]]]  # default, wider, scratch; [rate][S]
    table: Sequence[Sequence[Outcome]]  # [C][S]

    @classmethod
    def read(cls, study: Study, name: str) -> "TaskResults | None":
        """None: something is still to be trained."""

        def runs(kind: str, detail: int = 0) -> list[Outcome]:
            found = study.all_found([Job(name, kind, seed, detail) for seed in study.seeds(name)])
            if found is None:
                raise LookupError(kind)
            return found

        try:
            middle = OWN_RATES.index(1.0)
            default = [runs("default", rate) for rate in range(len(OWN_RATES))]
            rates = range(len(OWN_RATES))
            return cls(
                study,
                study.task(name),
                study.candidates(name),
                {"never": runs("never"), "default": default[middle], "race": runs("race")},
                {
                    "default_tuned": default,
                    "wider": [runs("wider", rate) for rate in rates],
                    "scratch": [
                        [run["scratch"][rate] for run in default[middle]] for rate in rates
                    ],
                },
                [runs("candidate", number) for number in range(len(study.candidates(name)))],
            )
        except LookupError:
            return None

    @cached_property
    def tuned(self) -> dict[str, Sequence[Outcome]]:
        """Ways with a rate of their own, at the one that is best on validation data."""
        return {
            way: max(by_rate, key=lambda runs: _mean(runs, "validation"))
            for way, by_rate in self.own_rates.items()
        }

    @cached_property
    def validation(self) -> Array:
        """[C, S]"""
        return _matrix(self.table, "validation")

    @cached_property
    def tests(self) -> Array:
        """[C, S]"""
        return _matrix(self.table, "test")

    @property
    def best(self) -> int:
        """The candidate with the highest mean validation score."""
        return int(self.validation.mean(1).argmax())

    @cached_property
    def scores(self) -> dict[str, Array]:
        """[S] on test data, by way."""
        params = np.asarray([each.params for each in self.candidates])
        single = {way: _column(runs, "test") for way, runs in (self.runs | self.tuned).items()}
        derived = {
            "random_place": self.tests.mean(0),
            "largest": self.tests[params == params.max()].mean(0),
            "ceiling": self.tests[self.best],
        }
        return single | derived | self._searched()

    def _searched(self) -> dict[str, Array]:
        """What Optuna finds, on every seed with the trainings of that seed."""
        optuna = optuna_here()
        if optuna is None:
            return {}
        found = []
        pairs = zip(self.runs["default"], self.runs["never"], strict=True)
        for seed, (default, never) in enumerate(pairs):
            runs = [row[seed] for row in self.table]
            # One that diverged was not counted, and cost no less than the host alone.
            costs = np.maximum([run["flops"] for run in runs], never["flops"])
            known = Trainings(
                self.candidates,
                np.asarray([run["curve"] for run in runs], dtype=float),
                costs,
                self.tests[:, seed],
            )
            found.append(searched(optuna, known, [share * flops_of(default) for share in SHARES]))
        return dict(zip(("optuna", "optuna_5x"), np.asarray(found).T, strict=True))

    def difference(self, way: str, other: str = "never") -> Estimate:
        """Of mean test scores on the same seeds."""
        return t_interval(self.scores[way] - self.scores[other])

    @property
    def harmed(self) -> list[bool]:
        """[S]: does the default end clearly below never, on the test samples of its seed?"""
        pairs = zip(self.runs["default"], self.runs["never"], strict=True)
        return [ends_below(self.task, grown, never) for grown, never in pairs]

    @property
    def cost_factor(self) -> float:
        """FLOPs of the default over those of never, mean over seeds."""
        pairs = zip(self.runs["default"], self.runs["never"], strict=True)
        return float(np.mean([flops_of(grown) / flops_of(never) for grown, never in pairs]))

    @property
    def share(self) -> float | None:
        """Of what the best single place gains; None: it is not clear that it gains anything."""
        ceiling = self.difference("ceiling")
        return self.difference("default").value / ceiling.value if ceiling.low > 0 else None

    @property
    def missed(self) -> list[bool]:
        """Of every audited seed: did the audit say that something is missing?"""
        audits = self.study.all_found(self.study.audits(self.task.name)) or []
        known = [audit["verdicts"] for audit in audits if "verdicts" in audit]
        return [str(Verdict.MISSING) in verdicts for verdicts in known]

    def ranking(self, scores: ArrayLike) -> Ranking:
        """Of numbers [C] by what candidates gain on test data."""
        return Ranking.of(scores, self.tests.mean(1) - self.scores["never"].mean())

    def rankings(self) -> dict[str, list[Ranking]]:
        """By what candidates are ranked; shadows and gradients for every seed that was audited."""
        found = {"parameters": [self.ranking([each.params for each in self.candidates])]}
        for audit in self.study.all_found(self.study.audits(self.task.name)) or []:
            rounds = [each for each in audit["shadows"] if each]
            for count in AUDITED:
                certain = self._readings(
                    rounds[count - 1], lambda each: each["gain"] / each["error"]
                )
                found.setdefault(f"shadows, {count}", []).append(self.ranking(certain))
            first = self._readings(rounds[0], lambda each: each["gradient"])
            found.setdefault("gradient", []).append(self.ranking(first))
        return found

    def _readings(self, shadows: Sequence[Outcome], score: Callable[[Outcome], float]) -> Array:
        """[C]; last is what was not heard."""
        known = {(each["slot"], each["blueprint"]): each for each in shadows}
        readings = [known.get((each.place, each.blueprint)) for each in self.candidates]
        found = [
            -math.inf if each is None or not each["error"] else score(each) for each in readings
        ]
        return np.nan_to_num(np.asarray(found), nan=-math.inf, neginf=-1e300)


def ends_below(task: Task, grown: Outcome, never: Outcome) -> bool:
    """By more than `HARM` paired standard errors over test samples?"""
    exact, count = task.guess is None, task.samples["test"]
    each, others = (
        unpacked_numbers(run["each"], exact=exact, count=count) for run in (grown, never)
    )
    gap = each - others if exact else others - each  # [M], higher is better
    error = float(gap.std(ddof=1)) / math.sqrt(gap.size)
    return float(gap.mean()) < -HARM * error


def _column(runs: Sequence[Outcome], name: str) -> Array:
    return np.asarray([run[name] for run in runs], dtype=float)


def _matrix(table: Sequence[Sequence[Outcome]], name: str) -> Array:
    return np.asarray([[run[name] for run in runs] for runs in table], dtype=float)


def _mean(runs: Sequence[Outcome], name: str) -> float:
    return float(np.nan_to_num(_column(runs, name), nan=-math.inf).mean())


# --- all tasks -----------------------------------------------------------------------------------


def read_results(study: Study, group: Group) -> list[TaskResults]:
    """Of the tasks for this report that are trained to the end, and of those for development."""
    found = (TaskResults.read(study, name) for name in tasks_for("development", group))
    return [each for each in found if each is not None]


def for_report(results: Sequence[TaskResults]) -> list[TaskResults]:
    return [each for each in results if each.task.group != "development"]


def over_tasks(known: Iterable[tuple[Task, float]]) -> Estimate:
    """The mean and its interval, where tasks that learn the same data count as one."""
    by_data: dict[object, list[float]] = {}
    for task, value in known:
        data = task.name if task.group in EACH_BY_ITSELF else task.load
        by_data.setdefault(data, []).append(value)
    return t_interval([float(np.mean(values)) for values in by_data.values()])


def vs(results: Sequence[TaskResults], rival: str) -> Estimate | None:
    """The default less a rival in points, over tasks."""
    known = [
        (each.task, each.difference("default", rival).value)
        for each in results
        if rival in each.scores
    ]
    return over_tasks(known) if known else None


def figures(results: Sequence[TaskResults]) -> dict[str, float]:
    """Flat: one name, one number; what puts tasks together is of the tasks for the report."""
    found: dict[str, float] = {}
    for each in results:
        _add(found, f"default_minus_never_{each.task.name}", each.difference("default"))
        _add(found, f"ceiling_minus_never_{each.task.name}", each.difference("ceiling"))
        found[f"cost_factor_{each.task.name}"] = each.cost_factor
    reported = for_report(results)
    if not reported:
        return found
    shares = [(each.task, each.share) for each in reported if each.share is not None]
    if shares:
        _add(found, "share_of_best_place", over_tasks(shares))
    found["tasks_with_something_to_gain"] = len(shares)
    found["tasks_reported"] = len(reported)
    found["harm_rate"] = float(np.mean([harmed for each in reported for harmed in each.harmed]))
    found["cost_factor"] = float(np.mean([each.cost_factor for each in reported]))
    # Was the audit right where it said that something is missing, and where nothing is?
    for name, said in (("missing", True), ("nothing_to_gain", False)):
        told = [each.share is not None for each in reported for it in each.missed if it is said]
        found[f"audits_{name}"] = len(told)
        if told:
            found[f"audits_{name}_right"] = float(np.mean(np.asarray(told) == said))
    for rival in RIVALS:
        if (lead := vs(reported, rival)) is not None:
            _add(found, f"vs_{rival}", lead)
    gains = [each.difference("default") for each in reported]
    found["tasks_clearly_better"] = sum(gain.low > 0 for gain in gains)
    found["tasks_clearly_worse"] = sum(gain.high < 0 for gain in gains)
    return found


def _add(found: dict[str, float], name: str, estimate: Estimate) -> None:
    found |= {name: estimate.value, f"{name}_lo": estimate.low, f"{name}_hi": estimate.high}


# --- costs ---------------------------------------------------------------------------------------

# Seconds of a job of each kind, in those of a bare host's training, until some were measured. The
# default trains its shadows, and what it became three times from scratch.
GUESSED = {"tune": 1.0, "never": 1.0, "candidate": 1.2, "race": 1.4, "wider": 1.2, "default": 5.0}
AUDITED_SHARE = 0.3  # of a training, for every candidate: five epochs of its shadow


def cost_rows(study: Study, seconds: Mapping[str, float]) -> list[tuple[str, str, int, float]]:
    """Task, kind, jobs and seconds of the processor in all, by what was measured or guessed."""
    rows = []
    for name, bare in seconds.items():
        for kind, count in study.count(name).items():
            kept = (study.folder / name).glob(f"{kind}-*.json")
            known = [_total_seconds(study.found(_job_of(name, path.stem))) for path in kept]
            audit = AUDITED_SHARE * len(study.candidates(name))
            each = float(np.mean(known)) if known else bare * GUESSED.get(kind, audit)
            rows.append((name, kind, count, count * each))
    assert {kind for _, kind, _, _ in rows} <= set(KINDS)
    return rows


def _job_of(task: str, stem: str) -> Job:
    kind, seed, detail = stem.split("-")
    return Job(task, kind, int(seed), int(detail))


def _total_seconds(outcome: Any) -> float:
    return float(outcome["seconds"] + sum(each["seconds"] for each in outcome.get("scratch", ())))
