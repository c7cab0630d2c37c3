"""Anomalies: what goes wrong in learning, found in the metrics of updates, without crying wolf.

A finding is raised after several bad updates in a row and is over after several good ones, where
good is clearly better than not bad. Numbers that say nothing (a head that hardly ever mattered,
values where all returns are equal) count as neither.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from esper.leyline import RATIO_COLLAPSE, RATIO_EXPLOSION, AgreementError
from esper.nissa.events import AnomalyFound, flatten

Numbers = Mapping[str, float]
Readings = Iterator[tuple[str, float]]  # head ("": all of them) and number


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
    """One kind of anomaly; its threshold is the one of its name."""

    name: str
    high: bool  # is too much bad, or too little?
    patience: str  # which of the thresholds; "" is one update
    read: Callable[[Numbers, Thresholds], Iterable[tuple[str, float]]]  # head and number
    what: str  # the number, for people; {} are the metrics that are not finite
    advice: str

    def threshold(self, numbers: Numbers, limits: Thresholds) -> float:
        if self.name == "log_prob_mismatch":
            return numbers["stored_log_prob_tolerance"]
        return float(getattr(limits, self.name, 0.0))

    def message(
        self, course: Course, head: str, value: float, threshold: float, numbers: Numbers
    ) -> str:
        title = self.name.replace("_", " ").capitalize() + (f" of head {head!r}" if head else "")
        what = self.what.format(", ".join(_not_finite(numbers)[:3]) or "none")
        if not course.raised:
            return f"{title} is over: {what} is {value:.4g} (threshold {threshold:g})."
        side, more = "above" if self.high else "below", "s" if course.bad > 1 else ""
        return (
            f"{title}: {what} is {value:.4g}, {side} {threshold:g}, for {course.bad} update{more}."
        )


class AnomalyDetector:
    """Looks at every update once."""

    def __init__(self, thresholds: Thresholds | None = None) -> None:
        self.thresholds = thresholds or Thresholds()
        self._courses: dict[tuple[str, str], Course] = {}

    def observe(self, round: int, metrics: Mapping[str, Any]) -> list[AnomalyFound]:
        """Look at an update's metrics, nested or flat; returns what was raised or is over."""
        numbers = flatten(metrics)
        if numbers.get("valid_steps", 1.0) == 0.0:
            return []
        found = []
        for rule in RULES:
            for head, value in rule.read(numbers, self.thresholds):
                threshold = rule.threshold(numbers, self.thresholds)
                course = self._courses.setdefault((rule.name, head), Course())
                if self._turns(course, rule, value, threshold):
                    event = AnomalyFound(
                        round=round,
                        name=rule.name,
                        head=head,
                        raised=course.raised,
                        seen=value,
                        threshold=threshold,
                        updates=course.bad,
                        message=rule.message(course, head, value, threshold, numbers),
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


def _not_finite(numbers: Numbers) -> list[str]:
    return [name for name, value in numbers.items() if not math.isfinite(value)]


def _finite(numbers: Numbers, name: str) -> float | None:
    value = numbers.get(name)
    return value if value is not None and math.isfinite(value) else None


def _of_heads(numbers: Numbers, limits: Thresholds, path: str) -> Readings:
    """A metric of every head that mattered often enough to be judged."""
    steps = numbers.get("valid_steps", math.inf)
    parts = (name.split(".") for name in numbers)
    heads = dict.fromkeys(part[1] for part in parts if part[0] == "heads" and len(part) == 3)
    for head in heads:
        share = _finite(numbers, f"heads.{head}.relevant_fraction")
        share = 1.0 if share is None else share
        value = _finite(numbers, path.format(head))
        if share > 0 and share * steps >= limits.min_mattering_steps and value is not None:
            yield head, value


def _ratios(numbers: Numbers, limits: Thresholds, which: str) -> Readings:
    """Extreme ratios say something only where many steps moved, others always."""
    for head, value in _of_heads(numbers, limits, f"heads.{{}}.{which}"):
        clipped = _finite(numbers, f"heads.{head}.clip_fraction")
        extreme = not limits.ratio_collapse <= value <= limits.ratio_explosion
        if not extreme or clipped is None or clipped >= limits.min_clipped:
            yield head, value


def _value_spread(numbers: Numbers, limits: Thresholds) -> Readings:
    values, returns = _finite(numbers, "value_std"), _finite(numbers, "return_std")
    explained = _finite(numbers, "explained_variance")
    if values is None or returns is None or explained is None:
        return
    if returns > limits.min_return_spread:
        yield "", max(values / returns, explained)


def _gradients(numbers: Numbers, limits: Thresholds) -> Readings:
    if numbers.get("optimizer_steps", 1.0) == 0.0:
        return
    yield from _of_heads(numbers, limits, "gradient_norms.heads.{}")
    value = _finite(numbers, "gradient_norms.value")
    if value is not None:
        yield "value", value


def _gradients_with_something_to_learn(numbers: Numbers, limits: Thresholds) -> Readings:
    spread = _finite(numbers, "return_std")
    if spread is None or spread > limits.min_return_spread:
        yield from _gradients(numbers, limits)


def _log_probs(numbers: Numbers, limits: Thresholds) -> Readings:
    error = _finite(numbers, "stored_log_prob_error")
    if error is not None and _finite(numbers, "stored_log_prob_tolerance") is not None:
        yield "", error


RULES = (
    Rule(
        "not_a_number",
        True,
        "",
        lambda numbers, limits: [("", len(_not_finite(numbers)))],
        "the number of metrics that are NaN or infinite ({})",
        "Resume from the last good checkpoint with a lower learning rate; if it comes back, look "
        "for infinite observations or rewards in the round before.",
    ),
    Rule(
        "log_prob_mismatch",
        True,
        "",
        _log_probs,
        "|ratio - 1| before the first step",
        "Rollout and update do not compute the same thing: look for wrong hidden states, masks or "
        "a lower precision in one of them. Results until it is found are not to be trusted.",
    ),
    Rule(
        "ratio_explosion",
        True,
        "ratio_patience",
        lambda numbers, limits: _ratios(numbers, limits, "ratio_max"),
        "the largest probability ratio",
        "The policy moves too far in one update: lower the learning rate or the number of epochs, "
        "or set a target for the KL.",
    ),
    Rule(
        "ratio_collapse",
        False,
        "ratio_patience",
        lambda numbers, limits: _ratios(numbers, limits, "ratio_min"),
        "the smallest probability ratio",
        "The policy abandons actions within one update: lower the learning rate or the number of "
        "epochs, or set a target for the KL.",
    ),
    Rule(
        "entropy_collapse",
        False,
        "entropy_patience",
        lambda numbers, limits: _of_heads(numbers, limits, "heads.{}.entropy"),
        "its share of the highest entropy",
        "The head always takes the same action: if it is not the right one, raise the entropy "
        "coefficient or start anew from an earlier checkpoint.",
    ),
    Rule(
        "value_collapse",
        False,
        "value_patience",
        _value_spread,
        "the larger of (spread of values / spread of returns) and variance explained",
        "Values are the same everywhere while returns are not: raise the value coefficient or the "
        "value clip, and check that observations tell the cases apart.",
    ),
    Rule(
        "gradient_vanishing",
        False,
        "gradient_patience",
        _gradients_with_something_to_learn,
        "its gradient's norm",
        "The head does not learn: check that its advantages are not all zero and that its "
        "probabilities are not saturated.",
    ),
    Rule(
        "gradient_explosion",
        True,
        "gradient_patience",
        _gradients,
        "its gradient's norm before clipping",
        "Gradients are clipped to noise: check the scale of rewards and observations, and lower "
        "the learning rate.",
    ),
)
