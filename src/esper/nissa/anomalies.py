"""Anomaly detection: finds problems of learning in the metrics of updates.

An anomaly is raised after several bad updates in a row, and it is over after several good ones.
Good means clearly better than the threshold. A value without meaning, such as the entropy of a head
that was hardly ever relevant, counts as neither.
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

Metrics = Mapping[str, float]
Reading = tuple[str, str, float]  # rule, head ("" for all heads together), value


@dataclass(frozen=True, kw_only=True)
class Thresholds:
    """Limits of the rules, and how many updates in a row raise and end an anomaly."""

    max_ratio_threshold: float = RATIO_EXPLOSION  # largest probability ratio of a head
    min_ratio_threshold: float = RATIO_COLLAPSE  # smallest probability ratio of a head
    entropy_collapse: float = 0.001  # share of the largest entropy that the masks allow
    value_collapse: float = 0.02  # spread of values / spread of returns, and explained variance
    gradient_vanishing: float = 1e-6
    gradient_explosion: float = 100.0  # before clipping
    inactive_head: float = 1.0  # steps of an update in which the head was relevant and learned
    min_clip_fraction: float = 0.3  # a few extreme ratios among thousands mean nothing
    min_relevant_steps: int = 32  # with fewer relevant steps, a head's numbers mean nothing
    min_return_spread: float = 1e-3  # with less spread there is nothing to learn
    recovery_factor: float = 1.5  # an anomaly ends when the value is this much better
    clear_after: int = 3  # good updates in a row that end an anomaly
    ratio_patience: int = 3  # bad updates in a row that raise one
    entropy_patience: int = 5
    value_patience: int = 10
    gradient_patience: int = 5
    inactive_patience: int = 10


@dataclass(frozen=True)
class Rule:
    """One kind of anomaly, from `anomalies.toml`."""

    high: bool  # values above the threshold are bad; otherwise values below
    quantity: str  # description of the value, for messages
    suggestion: str  # what the user can do
    threshold: str = ""  # name of the threshold; 0 if empty
    patience: str = ""  # name of the patience; 1 if empty


@dataclass
class Streak:
    """Consecutive bad and good updates of one rule and head."""

    bad: int = 0
    good: int = 0
    raised: bool = False


class AnomalyDetector:
    """Checks the metrics of every update against the rules."""

    def __init__(self, **thresholds: float) -> None:
        """Create a detector.

        Args:
            **thresholds: Fields of `Thresholds` that differ from their defaults, for example
                `max_ratio_threshold=5.0, min_ratio_threshold=0.1`.
        """
        self.thresholds = Thresholds(**thresholds)  # type: ignore[arg-type]
        self._streaks: dict[str, Streak] = {}  # by "rule/head"

    def observe(self, round: int, metrics: Mapping[str, Any]) -> list[AnomalyFound]:
        """Check the metrics of an update.

        Args:
            round: Number of the round.
            metrics: Metrics of the update, nested or flat.

        Returns:
            Anomalies that this update raised or ended.
        """
        flat_metrics = flatten(metrics)
        if flat_metrics.get("valid_steps", 1.0) == 0.0:
            return []
        order = list(RULES)
        current = [r for r in readings(flat_metrics, self.thresholds) if not math.isnan(r[2])]
        events = []
        for name, head, value in sorted(current, key=lambda reading: order.index(reading[0])):
            threshold = self._threshold(name, flat_metrics)
            streak = self._streaks.setdefault(f"{name}/{head}", Streak())
            if self._changes(streak, RULES[name], value, threshold):
                nonfinite = _nonfinite_names(flat_metrics)
                events.append(_event(round, name, head, value, threshold, streak, nonfinite))
        return events

    def _threshold(self, name: str, metrics: Metrics) -> float:
        if name == "log_prob_mismatch":
            return metrics["stored_log_prob_tolerance"]
        threshold = RULES[name].threshold
        return float(getattr(self.thresholds, threshold)) if threshold else 0.0

    def _changes(self, streak: Streak, rule: Rule, value: float, threshold: float) -> bool:
        """Update a streak; return whether the anomaly is raised or ended by this value."""
        sign = 1 if rule.high else -1
        if sign * value > sign * threshold:
            streak.bad += 1
            streak.good = 0
            patience = getattr(self.thresholds, rule.patience) if rule.patience else 1
            is_new = not streak.raised and streak.bad >= patience
            streak.raised = streak.raised or is_new
            return is_new

        # Good is clearly better than the threshold. In between, nothing changes.
        factor = self.thresholds.recovery_factor
        good_value = threshold / factor if rule.high else threshold * factor
        streak.good = streak.good + 1 if sign * value <= sign * good_value else 0
        is_over = streak.raised and streak.good >= self.thresholds.clear_after
        if is_over:
            streak.raised = False
        if not streak.raised:
            streak.bad = 0
        return is_over

    def state_dict(self) -> dict[str, list[int]]:
        """Return the streaks for a checkpoint, as JSON can hold them."""
        return {key: [*map(int, astuple(streak))] for key, streak in self._streaks.items()}

    def load_state_dict(self, state: Mapping[str, list[int]]) -> None:
        """Load the streaks of a checkpoint.

        Raises:
            AgreementError: The checkpoint names an unknown rule.
        """
        unknown = {key.partition("/")[0] for key in state} - RULES.keys()
        if unknown:
            raise AgreementError(
                "A saved detector knows another anomaly",
                given=", ".join(map(repr, unknown)),
                valid=", ".join(sorted(RULES)),
            )
        self._streaks = {
            key: Streak(index(bad), index(good), bool(index(raised)))
            for key, (bad, good, raised) in state.items()
        }


def not_a_number(round: int, message: str, advice: str) -> AnomalyFound:
    """Return the anomaly of a round whose update was reverted."""
    return AnomalyFound(
        round=round,
        name="not_a_number",
        head="",
        raised=True,
        seen=math.nan,
        threshold=0.0,
        updates=1,
        message=message,
        advice=advice,
    )


def readings(metrics: Metrics, limits: Thresholds) -> Iterator[Reading]:
    """Yield every value that a rule checks; NaN where it is unknown.

    Args:
        metrics: Flat metrics of an update; any of them may be missing.
        limits: Limits below which values mean nothing.
    """

    def metric(name: str) -> float:
        value = metrics.get(name, math.nan)
        return value if math.isfinite(value) else math.nan

    yield "not_a_number", "", len(_nonfinite_names(metrics))
    if not math.isnan(metric("stored_log_prob_tolerance")):
        yield "log_prob_mismatch", "", metric("stored_log_prob_error")

    # Without spread of the returns there is nothing to learn, and nothing can collapse.
    return_std = metric("return_std")
    can_learn = not return_std <= limits.min_return_spread
    if can_learn:
        relative_spread = metric("value_std") / return_std
        explained = metric("explained_variance")
        yield "value_collapse", "", float(np.maximum(relative_spread, explained))

    has_steps = bool(metrics.get("optimizer_steps", 1.0))
    checked_norms = {"value": metric("gradient_norms.value")}
    for head in _head_names(metrics):
        norm = metric(f"gradient_norms.heads.{head}")
        fraction = metric(f"heads.{head}.relevant_fraction")
        if math.isnan(fraction):
            fraction = 1.0
        relevant_steps = 0.0
        if fraction > 0:
            relevant_steps = fraction * metrics.get("valid_steps", math.inf)
        if can_learn and has_steps:
            # A head without gradient does not learn from its relevant steps.
            yield "inactive_head", head, 0.0 if norm == 0.0 else relevant_steps
        if relevant_steps < limits.min_relevant_steps:
            continue
        checked_norms[head] = norm
        yield "entropy_collapse", head, metric(f"heads.{head}.entropy")
        clip_fraction = metric(f"heads.{head}.clip_fraction")
        for name, extreme in (("ratio_explosion", "ratio_max"), ("ratio_collapse", "ratio_min")):
            ratio = metric(f"heads.{head}.{extreme}")
            is_normal = limits.min_ratio_threshold <= ratio <= limits.max_ratio_threshold
            # An extreme ratio means something only if many steps moved.
            if is_normal or not clip_fraction < limits.min_clip_fraction:
                yield name, head, ratio
    if not has_steps:
        return
    for head, norm in checked_norms.items():
        yield "gradient_explosion", head, norm
        if can_learn:
            yield "gradient_vanishing", head, norm


def _head_names(metrics: Metrics) -> list[str]:
    """Return the heads of which the metrics `heads.NAME.FIELD` report."""
    names = []
    for name in metrics:
        parts = name.split(".")
        if len(parts) == 3 and parts[0] == "heads" and parts[1] not in names:
            names.append(parts[1])
    return names


def _nonfinite_names(metrics: Metrics) -> list[str]:
    return [name for name, value in metrics.items() if not math.isfinite(value)]


def _event(
    round: int,
    name: str,
    head: str,
    value: float,
    threshold: float,
    streak: Streak,
    nonfinite: list[str],
) -> AnomalyFound:
    """Describe an anomaly that was raised or is over."""
    rule = RULES[name]
    title = name.replace("_", " ").capitalize()
    if head:
        title += f" of head {head!r}"
    quantity = rule.quantity.format(", ".join(nonfinite[:3]) or "none")
    if streak.raised:
        side = "above" if rule.high else "below"
        updates = "1 update" if streak.bad <= 1 else f"{streak.bad} updates"
        message = f"{title}: {quantity} is {value:.4g}, {side} {threshold:g}, for {updates}."
    else:
        message = f"{title} is over: {quantity} is {value:.4g} (threshold {threshold:g})."
    return AnomalyFound(
        round=round,
        name=name,
        head=head,
        raised=streak.raised,
        seen=value,
        threshold=threshold,
        updates=streak.bad,
        message=message,
        advice=rule.suggestion if streak.raised else "",
    )


_FILE = Path(__file__).with_name("anomalies.toml")
RULES = {name: Rule(**fields) for name, fields in tomllib.loads(_FILE.read_text("utf-8")).items()}
