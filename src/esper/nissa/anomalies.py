"""Anomalies: what goes wrong in learning, found in the metrics of updates, without crying wolf.

A finding is raised after several bad updates in a row and is over after several good ones, where
good is clearly better than not bad. Numbers that say nothing (a head that hardly ever mattered,
values where all returns are equal) count as neither.
"""

import math
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import astuple, dataclass
from operator import index
from pathlib import Path
from typing import Any

import numpy as np

from esper.leyline import RATIO_COLLAPSE, RATIO_EXPLOSION, AgreementError
from esper.nissa.events import AnomalyFound, flatten

Numbers = Mapping[str, float]
Readings = Iterator[tuple[tuple[str, str], float]]  # rule, head ("": all of them), and number


@dataclass(frozen=True, kw_only=True)
class Thresholds:
    """When a number of an update counts as wrong, for how long, and when it is right again."""

    ratio_explosion: float = RATIO_EXPLOSION
    ratio_collapse: float = RATIO_COLLAPSE
    entropy_collapse: float = 0.001  # of a uniform choice among the legal actions
    value_collapse: float = 0.02  # spread of values / spread of returns, and variance explained
    gradient_vanishing: float = 1e-6
    gradient_explosion: float = 100.0  # before clipping
    min_clipped: float = 0.3  # share of a head's steps: of thousands, one always has an extreme
    min_mattering_steps: int = 32  # below this a head's numbers say nothing
    min_return_spread: float = 1e-3  # below this there is nothing to learn, and nothing collapsed
    recovery_factor: float = 1.5  # over when the number is so much better than the threshold
    clear_after: int = 3  # good updates in a row
    ratio_patience: int = 3  # bad updates in a row
    entropy_patience: int = 5
    value_patience: int = 10
    gradient_patience: int = 5


@dataclass
class Course:
    """How one reading has gone."""

    bad: int = 0  # updates in a row
    good: int = 0
    raised: bool = False


@dataclass(frozen=True)
class Rule:
    """One kind of anomaly, as `anomalies.toml` has it; its threshold is the one of its name."""

    high: bool
    what: str
    advice: str
    patience: str = ""


class AnomalyDetector:
    """Looks at every update once."""

    def __init__(self, thresholds: Thresholds | None = None) -> None:
        self.thresholds = thresholds or Thresholds()
        self._courses: dict[str, Course] = {}  # by rule and head

    def observe(self, round: int, metrics: Mapping[str, Any]) -> list[AnomalyFound]:
        """Look at an update's metrics, nested or flat; returns what was raised or is over."""
        numbers = flatten(metrics)
        if numbers.get("valid_steps", 1.0) == 0.0:
            return []
        found = []
        read = {of: v for of, v in readings(numbers, self.thresholds) if not math.isnan(v)}
        for name, head in sorted(read, key=lambda reading: [*RULES].index(reading[0])):
            value = read[name, head]
            rule, threshold = RULES[name], float(getattr(self.thresholds, name, 0.0))
            if name == "log_prob_mismatch":
                threshold = numbers["stored_log_prob_tolerance"]
            course = self._courses.setdefault(f"{name}/{head}", Course())
            if not self._turns(course, rule, value, threshold):
                continue
            title = name.replace("_", " ").capitalize() + (f" of head {head!r}" if head else "")
            what = rule.what.format(", ".join(_not_finite(numbers)[:3]) or "none")
            message = f"{title} is over: {what} is {value:.4g} (threshold {threshold:g})."
            if course.raised:
                side, more = "above" if rule.high else "below", "s" if course.bad > 1 else ""
                lasting = f"{side} {threshold:g}, for {course.bad} update{more}"
                message = f"{title}: {what} is {value:.4g}, {lasting}."
            event = AnomalyFound(
                round=round,
                name=name,
                head=head,
                raised=course.raised,
                seen=value,
                threshold=threshold,
                updates=course.bad,
                message=message,
                advice=rule.advice if course.raised else "",
            )
            found.append(event)
        return found

    def _turns(self, course: Course, rule: Rule, value: float, threshold: float) -> bool:
        """Follow a number; is it raised now, or over?"""
        limits, sign = self.thresholds, 1 if rule.high else -1
        if sign * value > sign * threshold:
            course.bad, course.good = course.bad + 1, 0
            patience = getattr(limits, rule.patience) if rule.patience else 1
            turned = not course.raised and course.bad >= patience
            course.raised = course.raised or turned
            return turned
        factor = limits.recovery_factor
        recovered = threshold / factor if rule.high else threshold * factor
        course.good = course.good + 1 if sign * value <= sign * recovered else 0
        turned = course.raised and course.good >= limits.clear_after
        if turned:
            course.raised = False
        if not course.raised:
            course.bad = 0
        return turned

    def state_dict(self) -> dict[str, list[int]]:
        """All that is remembered, for a checkpoint's notes."""
        return {key: [*map(int, astuple(course))] for key, course in self._courses.items()}

    def load_state_dict(self, state: Mapping[str, list[int]]) -> None:
        if unknown := {key.partition("/")[0] for key in state} - RULES.keys():
            raise AgreementError(
                "A saved detector knows another anomaly",
                given=", ".join(map(repr, unknown)),
                valid=", ".join(sorted(RULES)),
            )
        self._courses = {
            key: Course(index(bad), index(good), bool(index(raised)))  # whole numbers, or refused
            for key, (bad, good, raised) in state.items()
        }


def not_a_number(round: int, message: str, advice: str) -> AnomalyFound:
    """Of a round that came to nothing."""
    figures = {"seen": math.nan, "threshold": 0.0, "updates": 1}
    found = {"name": "not_a_number", "head": "", "message": message, "advice": advice}
    return AnomalyFound(round=round, raised=True, **found, **figures)  # type: ignore[arg-type]


def _not_finite(numbers: Numbers) -> list[str]:
    return [name for name, value in numbers.items() if not math.isfinite(value)]


def readings(numbers: Numbers, limits: Thresholds) -> Readings:
    """What can be judged of an update; NaN is what is not known."""

    def known(name: str) -> float:
        value = numbers.get(name, math.nan)
        return value if math.isfinite(value) else math.nan

    yield ("not_a_number", ""), len(_not_finite(numbers))
    tolerable = not math.isnan(known("stored_log_prob_tolerance"))
    yield ("log_prob_mismatch", ""), known("stored_log_prob_error") if tolerable else math.nan
    values, returns, explained = map(known, ("value_std", "return_std", "explained_variance"))
    learns = not returns <= limits.min_return_spread
    if learns:
        yield ("value_collapse", ""), float(np.maximum(values / returns, explained))
    norms: dict[str, float] = {}
    parts = (name.split(".") for name in numbers)
    for head in dict.fromkeys(part[1] for part in parts if part[0] == "heads" and len(part) == 3):
        share = known(f"heads.{head}.relevant_fraction")
        share = 1.0 if math.isnan(share) else share
        steps = share * numbers.get("valid_steps", math.inf) if share > 0 else 0.0
        if steps < limits.min_mattering_steps:
            continue
        norms[head] = known(f"gradient_norms.heads.{head}")
        yield ("entropy_collapse", head), known(f"heads.{head}.entropy")
        clipped = known(f"heads.{head}.clip_fraction")
        for name, end in (("ratio_explosion", "ratio_max"), ("ratio_collapse", "ratio_min")):
            ratio = known(f"heads.{head}.{end}")
            # Extreme ratios say something only where many steps moved, others always.
            extreme = not limits.ratio_collapse <= ratio <= limits.ratio_explosion
            if not (extreme and clipped < limits.min_clipped):
                yield (name, head), ratio
    norms["value"] = known("gradient_norms.value")
    for head, norm in norms.items() if numbers.get("optimizer_steps", 1.0) else ():
        yield ("gradient_explosion", head), norm
        if learns:
            yield ("gradient_vanishing", head), norm


_FILE = Path(__file__).with_name("anomalies.toml")
RULES = {name: Rule(**said) for name, said in tomllib.loads(_FILE.read_text("utf-8")).items()}
