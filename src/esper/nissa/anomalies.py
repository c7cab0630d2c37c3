"""Anomalies: what goes wrong in learning, found in the metrics of updates, without crying wolf.

A finding is raised after several bad updates in a row and is over after several good ones, where
good is clearly better than not bad. Numbers that say nothing (a head that hardly ever mattered,
values where all returns are equal) count as neither.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from esper.leyline.constants import RATIO_COLLAPSE, RATIO_EXPLOSION
from esper.leyline.errors import AgreementError
from esper.nissa.events import AnomalyFound, flatten

Numbers = Mapping[str, float]


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


@dataclass(frozen=True)
class Reading:
    """One number that a rule looks at; `head` is empty where it is about all heads."""

    head: str
    value: float
    threshold: float
    what: str  # for people


@dataclass(frozen=True)
class Rule:
    """One kind of anomaly."""

    name: str
    read: Callable[[Numbers, Thresholds], Iterator[Reading]]
    high: bool  # is too much bad, or too little?
    patience: Callable[[Thresholds], int]
    advice: str

    def bad(self, reading: Reading) -> bool:
        if self.high:
            return reading.value > reading.threshold
        return reading.value < reading.threshold

    def good(self, reading: Reading, factor: float) -> bool:
        if self.high:
            return reading.value <= reading.threshold / factor
        return reading.value >= reading.threshold * factor


@dataclass
class Course:
    """How one reading has gone."""

    bad: int = 0  # updates in a row
    good: int = 0
    raised: bool = False


class AnomalyDetector:
    """Looks at every update once."""

    def __init__(self, thresholds: Thresholds | None = None) -> None:
        self.thresholds = thresholds or Thresholds()
        self._courses: dict[tuple[str, str], Course] = {}

    @property
    def active(self) -> list[tuple[str, str]]:
        """(name, head) of what was raised and is not over."""
        return [key for key, course in self._courses.items() if course.raised]

    def observe(self, round: int, metrics: Mapping[str, Any]) -> list[AnomalyFound]:
        """Look at an update's metrics, nested or flat; returns what was raised or is over."""
        numbers = flatten(metrics)
        if numbers.get("valid_steps", 1.0) == 0.0:
            return []
        found = []
        for rule in RULES:
            for reading in rule.read(numbers, self.thresholds):
                event = self._follow(rule, reading, round)
                if event is not None:
                    found.append(event)
        return found

    def _follow(self, rule: Rule, reading: Reading, round: int) -> AnomalyFound | None:
        course = self._courses.setdefault((rule.name, reading.head), Course())
        if rule.bad(reading):
            course.bad, course.good = course.bad + 1, 0
            if not course.raised and course.bad >= rule.patience(self.thresholds):
                course.raised = True
                return _event(rule, reading, round, course)
            return None
        if rule.good(reading, self.thresholds.recovery_factor):
            course.good += 1
            if course.raised and course.good >= self.thresholds.clear_after:
                course.raised, course.bad = False, 0
                return _event(rule, reading, round, course)
        else:
            course.good = 0
        if not course.raised:
            course.bad = 0
        return None

    def state_dict(self) -> dict[str, list[int]]:
        """All that is remembered, for a checkpoint's notes."""
        return {
            f"{name}/{head}": [course.bad, course.good, int(course.raised)]
            for (name, head), course in self._courses.items()
        }

    def load_state_dict(self, state: Mapping[str, list[int]]) -> None:
        known = {rule.name for rule in RULES}
        courses = {}
        for key, (bad, good, raised) in state.items():
            name, _, head = key.partition("/")
            if name not in known:
                raise AgreementError(
                    "A saved detector knows another anomaly",
                    given=repr(name),
                    valid=", ".join(sorted(known)),
                )
            courses[name, head] = Course(bad, good, bool(raised))
        self._courses = courses


def _event(rule: Rule, reading: Reading, round: int, course: Course) -> AnomalyFound:
    of = f" of head {reading.head!r}" if reading.head else ""
    side = "above" if rule.high else "below"
    title = rule.name.replace("_", " ").capitalize()
    if course.raised:
        message = (
            f"{title}{of}: {reading.what} is {reading.value:.4g}, {side} {reading.threshold:g}, "
            f"for {course.bad} update{'s' if course.bad > 1 else ''}."
        )
    else:
        message = (
            f"{title}{of} is over: {reading.what} is {reading.value:.4g} "
            f"(threshold {reading.threshold:g})."
        )
    return AnomalyFound(
        round=round,
        name=rule.name,
        head=reading.head,
        raised=course.raised,
        seen=reading.value,
        threshold=reading.threshold,
        updates=course.bad,
        message=message,
        advice=rule.advice if course.raised else "",
    )


def _heads(numbers: Numbers) -> list[str]:
    """The heads that metrics speak of, in their order."""
    parts = (name.split(".") for name in numbers)
    return list(dict.fromkeys(part[1] for part in parts if part[0] == "heads" and len(part) == 3))


def _finite(numbers: Numbers, name: str) -> float | None:
    value = numbers.get(name)
    return value if value is not None and math.isfinite(value) else None


def _mattering(numbers: Numbers, limits: Thresholds) -> Iterator[str]:
    """Heads that mattered often enough to be judged."""
    steps = numbers.get("valid_steps", math.inf)
    for head in _heads(numbers):
        share = _finite(numbers, f"heads.{head}.relevant_fraction")
        share = 1.0 if share is None else share
        if share > 0 and share * steps >= limits.min_mattering_steps:
            yield head


def _something_to_learn(numbers: Numbers, limits: Thresholds) -> bool:
    spread = _finite(numbers, "return_std")
    return spread is None or spread > limits.min_return_spread


def _not_finite(numbers: Numbers, limits: Thresholds) -> Iterator[Reading]:
    wrong = [name for name, value in numbers.items() if not math.isfinite(value)]
    what = f"the number of metrics that are NaN or infinite ({', '.join(wrong[:3]) or 'none'})"
    yield Reading("", len(wrong), 0.0, what)


def _ratio_max(numbers: Numbers, limits: Thresholds) -> Iterator[Reading]:
    for head, value in _ratios(numbers, limits, "ratio_max"):
        yield Reading(head, value, limits.ratio_explosion, "the largest probability ratio")


def _ratio_min(numbers: Numbers, limits: Thresholds) -> Iterator[Reading]:
    for head, value in _ratios(numbers, limits, "ratio_min"):
        yield Reading(head, value, limits.ratio_collapse, "the smallest probability ratio")


def _ratios(numbers: Numbers, limits: Thresholds, which: str) -> Iterator[tuple[str, float]]:
    """Extreme ratios say something only where many steps moved, others always."""
    for head in _mattering(numbers, limits):
        value = _finite(numbers, f"heads.{head}.{which}")
        clipped = _finite(numbers, f"heads.{head}.clip_fraction")
        if value is None:
            continue
        extreme = not limits.ratio_collapse <= value <= limits.ratio_explosion
        if not extreme or clipped is None or clipped >= limits.min_clipped:
            yield head, value


def _entropy(numbers: Numbers, limits: Thresholds) -> Iterator[Reading]:
    for head in _mattering(numbers, limits):
        value = _finite(numbers, f"heads.{head}.entropy")
        if value is not None:
            yield Reading(head, value, limits.entropy_collapse, "its share of the highest entropy")


def _value_spread(numbers: Numbers, limits: Thresholds) -> Iterator[Reading]:
    values, returns = _finite(numbers, "value_std"), _finite(numbers, "return_std")
    explained = _finite(numbers, "explained_variance")
    if values is None or returns is None or explained is None:
        return
    if returns > limits.min_return_spread:
        better = max(values / returns, explained)
        what = "the larger of (spread of values / spread of returns) and variance explained"
        yield Reading("", better, limits.value_collapse, what)


def _gradients(numbers: Numbers, limits: Thresholds) -> Iterator[tuple[str, float]]:
    if numbers.get("optimizer_steps", 1.0) == 0.0:
        return
    for head in _mattering(numbers, limits):
        value = _finite(numbers, f"gradient_norms.heads.{head}")
        if value is not None:
            yield head, value
    value = _finite(numbers, "gradient_norms.value")
    if value is not None:
        yield "value", value


def _small_gradients(numbers: Numbers, limits: Thresholds) -> Iterator[Reading]:
    if _something_to_learn(numbers, limits):
        for head, norm in _gradients(numbers, limits):
            yield Reading(head, norm, limits.gradient_vanishing, "its gradient's norm")


def _large_gradients(numbers: Numbers, limits: Thresholds) -> Iterator[Reading]:
    for head, norm in _gradients(numbers, limits):
        yield Reading(head, norm, limits.gradient_explosion, "its gradient's norm before clipping")


def _log_probs(numbers: Numbers, limits: Thresholds) -> Iterator[Reading]:
    error = _finite(numbers, "stored_log_prob_error")
    tolerance = _finite(numbers, "stored_log_prob_tolerance")
    if error is not None and tolerance is not None:
        yield Reading("", error, tolerance, "|ratio - 1| before the first step")


RULES = (
    Rule(
        "not_a_number",
        _not_finite,
        True,
        lambda limits: 1,
        "Resume from the last good checkpoint with a lower learning rate; if it comes back, look "
        "for infinite observations or rewards in the round before.",
    ),
    Rule(
        "log_prob_mismatch",
        _log_probs,
        True,
        lambda limits: 1,
        "Rollout and update do not compute the same thing: look for wrong hidden states, masks or "
        "a lower precision in one of them. Results until it is found are not to be trusted.",
    ),
    Rule(
        "ratio_explosion",
        _ratio_max,
        True,
        lambda limits: limits.ratio_patience,
        "The policy moves too far in one update: lower the learning rate or the number of epochs, "
        "or set a target for the KL.",
    ),
    Rule(
        "ratio_collapse",
        _ratio_min,
        False,
        lambda limits: limits.ratio_patience,
        "The policy abandons actions within one update: lower the learning rate or the number of "
        "epochs, or set a target for the KL.",
    ),
    Rule(
        "entropy_collapse",
        _entropy,
        False,
        lambda limits: limits.entropy_patience,
        "The head always takes the same action: if it is not the right one, raise the entropy "
        "coefficient or start anew from an earlier checkpoint.",
    ),
    Rule(
        "value_collapse",
        _value_spread,
        False,
        lambda limits: limits.value_patience,
        "Values are the same everywhere while returns are not: raise the value coefficient or the "
        "value clip, and check that observations tell the cases apart.",
    ),
    Rule(
        "gradient_vanishing",
        _small_gradients,
        False,
        lambda limits: limits.gradient_patience,
        "The head does not learn: check that its advantages are not all zero and that its "
        "probabilities are not saturated.",
    ),
    Rule(
        "gradient_explosion",
        _large_gradients,
        True,
        lambda limits: limits.gradient_patience,
        "Gradients are clipped to noise: check the scale of rewards and observations, and lower "
        "the learning rate.",
    ),
)
