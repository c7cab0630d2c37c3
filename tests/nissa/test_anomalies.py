"""The detector: finds what is wrong, says so once, and is silent where nothing is."""

import copy
import json
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from esper.leyline import HEAD_NAMES, AgreementError, HeadGradientNorms, PerHead, PPOUpdateMetrics
from esper.leyline.constants import (
    RATIO_COLLAPSE,
    RATIO_EXPLOSION,
    STORED_LOG_PROB_TOLERANCE,
)
from esper.leyline.results import HeadUpdateMetrics
from esper.nissa import AnomalyDetector, AnomalyFound, Thresholds, flatten
from esper.nissa.anomalies import RULES, readings
from esper.simic.agent import PPOAgent, collect
from tests.simic.toys import Noise, OpArguments

Metrics = dict[str, Any]
Change = Callable[[Metrics], None]


def healthy(update: int = 5, seed: int = 0) -> Metrics:
    """What an ordinary update reports, as nested as the learner does."""
    draw = np.random.default_rng((seed, update))
    heads = {
        name: HeadUpdateMetrics(
            loss=float(draw.normal(scale=0.01)),
            entropy=float(draw.uniform(0.2, 1.0)),
            kl=float(draw.uniform(0, 0.01)),
            clip_fraction=float(draw.uniform(0, 0.2)),
            relevant_fraction=1.0 if name == "op" else float(draw.uniform(0.1, 0.6)),
            ratio_min=float(draw.uniform(0.3, 0.9)),
            ratio_mean=float(draw.uniform(0.95, 1.05)),
            ratio_max=float(draw.uniform(1.1, 3.0)),
        )
        for name in HEAD_NAMES
    }
    norms = PerHead(HEAD_NAMES, {name: float(draw.uniform(0.01, 2)) for name in HEAD_NAMES})
    metrics = PPOUpdateMetrics(
        policy_loss=-0.01,
        value_loss=0.3,
        entropy=0.7,
        kl=0.01,
        explained_variance=float(draw.uniform(-0.5, 0.9)) if update > 3 else -5.0,
        value_mean=0.1,
        value_std=float(draw.uniform(0.1, 0.6)),
        return_mean=0.2,
        return_std=0.5,
        return_scale=0.5,
        gradient_norm=1.0,
        gradient_norms=HeadGradientNorms(norms, value=0.4),
        learning_rate=3e-4,
        stored_log_prob_error=1e-6,
        stored_log_prob_tolerance=STORED_LOG_PROB_TOLERANCE,
        valid_steps=1600,
        optimizer_steps=4,
        stopped_by_kl=False,
        peak_memory_bytes=0,
        heads=heads,
    )
    return dict(metrics)


def changed(change: Change, update: int = 5) -> Metrics:
    metrics = copy.deepcopy(healthy(update))
    change(metrics)
    return metrics


def head(name: str, field: str, value: float) -> Change:
    def change(metrics: Metrics) -> None:
        metrics["heads"][name][field] = value

    return change


def norm(name: str, value: float) -> Change:
    def change(metrics: Metrics) -> None:
        norms = metrics["gradient_norms"]
        values = {**norms.heads, name: value}
        metrics["gradient_norms"] = HeadGradientNorms(PerHead(HEAD_NAMES, values), norms.value)

    return change


def together(*changes: Change) -> Change:
    def change(metrics: Metrics) -> None:
        for each in changes:
            each(metrics)

    return change


def raised(detector: AnomalyDetector) -> list[str]:
    return [key for key, (_, _, active) in detector.state_dict().items() if active]


def whole(**values: object) -> Change:
    return lambda metrics: metrics.update(values)


limits = Thresholds()
# A head's entropy is that of the steps where it mattered, however few.
rare = together(head("blend", "relevant_fraction", 0.03), head("blend", "entropy", 9e-4))
moved = head("slot", "clip_fraction", 0.6)
exploded = together(moved, head("slot", "ratio_max", 5.5))
collapsed = together(moved, head("slot", "ratio_min", 0.09))
never_relevant = together(
    head("blend", "relevant_fraction", 0.0),
    head("blend", "entropy", 0.9),
    head("blend", "ratio_min", 1.0),
    head("blend", "ratio_max", 1.0),
)
without_gradient = together(head("blend", "relevant_fraction", 0.01), norm("blend", 0.0))
WRONG = [
    ("not_a_number", "", 1, whole(value_loss=math.nan)),
    ("not_a_number", "", 1, head("blend", "ratio_max", math.inf)),
    ("log_prob_mismatch", "", 1, whole(stored_log_prob_error=2e-4)),
    ("ratio_explosion", "slot", limits.ratio_patience, exploded),
    ("ratio_collapse", "slot", limits.ratio_patience, collapsed),
    ("entropy_collapse", "op", limits.entropy_patience, head("op", "entropy", 1e-4)),
    ("entropy_collapse", "blend", limits.entropy_patience, rare),
    ("value_collapse", "", limits.value_patience, whole(value_std=1e-3, explained_variance=-0.01)),
    ("gradient_vanishing", "blueprint", limits.gradient_patience, norm("blueprint", 1e-7)),
    ("gradient_explosion", "blueprint", limits.gradient_patience, norm("blueprint", 1e4)),
    ("inactive_head", "blend", limits.inactive_patience, never_relevant),
    ("inactive_head", "blend", limits.inactive_patience, without_gradient),
]  # fmt: skip


@pytest.mark.parametrize(("name", "where", "patience", "change"), WRONG)
def test_what_is_wrong_is_raised_once_and_ends_once(
    name: str, where: str, patience: int, change: Change
) -> None:
    detector = AnomalyDetector()
    found: list[list[AnomalyFound]] = []
    for update in range(patience + 10):
        found.append(detector.observe(update, changed(change, update)))
    events = [event for events in found for event in events]
    assert [(event.name, event.head, event.raised) for event in events] == [(name, where, True)]
    (event,) = events
    assert found[patience - 1] == [event], "after so many updates in a row"
    assert event.updates == patience
    assert raised(detector) == [f"{name}/{where}"]
    assert f"{event.threshold:g}" in event.message
    assert f"{event.seen:.4g}" in event.message
    assert len(event.advice) > 40
    after = [detector.observe(100 + update, healthy(update)) for update in range(10)]
    cleared = [event for events in after for event in events]
    assert [(event.name, event.raised, event.advice) for event in cleared] == [(name, False, "")]
    assert after[limits.clear_after - 1] == cleared
    assert not raised(detector)


def test_every_rule_has_a_test() -> None:
    assert set(RULES) == {name for name, *_ in WRONG}


def test_ratio_thresholds_are_those_of_leyline() -> None:
    ratios = (limits.max_ratio_threshold, limits.min_ratio_threshold)
    assert ratios == (RATIO_EXPLOSION, RATIO_COLLAPSE)


def test_thresholds_are_keyword_arguments_of_the_detector() -> None:
    detector = AnomalyDetector(max_ratio_threshold=2.0, ratio_patience=1)
    metrics = changed(together(head("slot", "ratio_max", 2.5), head("slot", "clip_fraction", 0.5)))
    (event,) = detector.observe(1, metrics)
    assert (event.name, event.head, event.threshold) == ("ratio_explosion", "slot", 2.0)


def test_every_metric_that_is_looked_at_is_reported_by_an_update() -> None:
    seen: set[str] = set()

    class Watched(dict[str, float]):
        def get(self, name: str, default: Any = None) -> Any:
            seen.add(name)
            return super().get(name, default)

    numbers = Watched(flatten(healthy()))
    list(readings(numbers, limits))
    assert seen <= numbers.keys()
    assert len(seen) > 10


@pytest.mark.parametrize("missing", [name for name in healthy() if name != "heads"])
def test_metrics_may_be_missing(missing: str) -> None:
    metrics = healthy()
    del metrics[missing]
    assert not AnomalyDetector().observe(1, metrics)


def test_no_metrics_at_all_are_no_anomaly() -> None:
    assert not AnomalyDetector().observe(1, {})


@pytest.mark.parametrize("seed", range(5))
def test_healthy_runs_are_silent_from_the_first_round(seed: int) -> None:
    detector = AnomalyDetector()
    assert not [e for update in range(300) for e in detector.observe(update, healthy(update, seed))]


QUIET = {
    "a head that was relevant in a few steps": together(
        head("blend", "relevant_fraction", 0.01), head("blend", "entropy", 0.0)
    ),
    "a rare head that chooses in its few steps": together(
        head("blend", "relevant_fraction", 0.03), head("blend", "entropy", 0.02)
    ),
    "one extreme ratio among thousands": together(
        head("op", "ratio_max", 40.0), head("op", "ratio_min", 1e-4), head("op", "kl", 0.01)
    ),
    "equal returns, as of a scripted controller": together(
        whole(return_std=0.0, value_std=0.0, explained_variance=0.0),
        *(norm(name, 0.0) for name in HEAD_NAMES),
    ),
    "an update without a step": together(
        whole(optimizer_steps=0, gradient_norm=0.0), *(norm(name, 0.0) for name in HEAD_NAMES)
    ),
    "a rollout without a step": whole(valid_steps=0, value_std=0.0),
    "values that begin far off": whole(explained_variance=-20.0, value_std=5.0),
    "a policy that has settled": together(
        *(head(name, "entropy", 0.02) for name in HEAD_NAMES),
        *(norm(name, 1e-3) for name in HEAD_NAMES),
    ),
    "lower precision with its own tolerance": whole(
        stored_log_prob_error=0.05, stored_log_prob_tolerance=0.1
    ),
}


@pytest.mark.parametrize("case", QUIET)
def test_silent_with(case: str) -> None:
    detector = AnomalyDetector()
    found = [
        e for update in range(50) for e in detector.observe(update, changed(QUIET[case], update))
    ]
    assert not found


def test_two_bad_updates_with_a_good_one_between_are_no_anomaly() -> None:
    detector = AnomalyDetector()
    bad = head("op", "entropy", 0.0)
    for update in range(40):
        metrics = healthy(update) if update % 4 == 3 else changed(bad, update)
        assert not detector.observe(update, metrics)


def test_hovering_around_the_threshold_does_not_repeat_it() -> None:
    detector = AnomalyDetector()
    events = []
    for update in range(60):
        level = limits.entropy_collapse * (0.9 if update % 6 < 5 else 1.2)
        events += detector.observe(update, changed(head("op", "entropy", level), update))
    assert [event.raised for event in events] == [True]


def test_heads_are_judged_apart() -> None:
    detector = AnomalyDetector()
    both = together(head("op", "entropy", 0.0), head("slot", "entropy", 0.0))
    events = [e for update in range(20) for e in detector.observe(update, changed(both, update))]
    assert [event.head for event in events] == ["op", "slot"]


@given(bad=st.lists(st.booleans(), max_size=60), cut=st.integers(0, 60))
def test_a_saved_detector_goes_on_as_if_nothing_had_happened(bad: list[bool], cut: int) -> None:
    wrong = flatten(changed(together(head("op", "entropy", 0.0), whole(kl=math.nan))))
    right = flatten(healthy())
    one, other = AnomalyDetector(), AnomalyDetector()
    for update, is_bad in enumerate(bad):
        if update == cut:
            saved = json.loads(json.dumps(other.state_dict()))
            other = AnomalyDetector()
            other.load_state_dict(saved)
        metrics = wrong if is_bad else right
        assert str(one.observe(update, metrics)) == str(other.observe(update, metrics))


def test_a_detector_of_another_version_is_refused() -> None:
    with pytest.raises(AgreementError, match="another anomaly; given: 'gremlins'"):
        AnomalyDetector().load_state_dict({"gremlins/op": [0, 0, 0]})


@pytest.mark.slow
@pytest.mark.parametrize("world", [Noise(32, 0), OpArguments(32, 0)], ids=["noise", "arguments"])
def test_a_real_learner_with_default_settings_is_healthy(world: Any) -> None:
    agent = PPOAgent(
        world.action_space,
        state_dim=world.state_dim,
        num_envs=world.num_envs,
        max_steps_per_env=25,
        lstm_hidden_dim=32,
    )
    detector, observations = AnomalyDetector(), world.reset()
    for update in range(12):
        observations = collect(agent, world, observations)
        metrics = agent.update()
        assert not detector.observe(update, metrics)
        assert math.isfinite(flatten(metrics)["gradient_norms.value"])
