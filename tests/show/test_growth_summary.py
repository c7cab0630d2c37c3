"""The text of print(run): its size, its units, and its sentences where nothing was added."""

import math
from dataclasses import replace

import pytest

from esper.show.growth_facts import Contribution, Report, ShownEpoch, SlotState, TrialResult
from esper.show.growth_summary import MAX_LINES, MAX_WIDTH, summary
from tests.show.growth_runs import growth_facts


def report_with(contributions: dict[str, Contribution], blueprint: str = "norm") -> Report:
    """A finished run of two epochs with a permanent seed in every slot, 97 parameters each."""
    slots = [
        SlotState(slot=slot, stage="FOSSILIZED", blueprint=blueprint, params=97, contribution=2.0)
        for slot in contributions
    ]
    epoch = ShownEpoch(
        number=1,
        train_loss=0.5,
        val_loss=0.6,
        score=88.0,
        committed=88.0,
        added=97 * len(slots),
        most_added=97 * len(slots),
        op="WAIT",
        slots=slots,
        flops=1e9,
    )
    return replace(
        growth_facts(),
        planned=2,
        places=tuple(contributions),
        epochs=[epoch, replace(epoch, number=2, op="END", flops=2.5e9)],
        contributions=contributions,
    )


def contribution(value: float, standard_error: float | None = 1.0) -> Contribution:
    return Contribution(value=value, standard_error=standard_error)


def assert_fits(text: str) -> None:
    lines = text.splitlines()
    assert len(lines) <= MAX_LINES
    assert max(map(len, lines)) <= MAX_WIDTH


def test_summary_has_parameters_scores_cost_and_additions() -> None:
    report = report_with({"0": contribution(68.26, 1.24), "2": contribution(-0.1, 0.3)})
    report = replace(report, settings={"budget": "+25%"}, room=160, host_params=1000)
    report = replace(report, after=report.after | {"test_score": 88.6, "test_loss": 0.25})
    assert summary(report).splitlines() == [
        "Net: 1,000 → 1,194 parameters (+19.4 %, budget +25 %), 2 epochs",
        "validation accuracy: 48.0 % → 78.0 % (loss 1.4 → 0.2); test accuracy: 88.6 %",
        "cost: 1.8× the FLOPs of plain training for 2 epochs",
        "",
        "added  after layer  parameters  contribution (accuracy points lost if removed)",
        "norm   0                   +97  68.3 ± 1.2",
        "norm   2                   +97  −0.1 ± 0.3 (none measurable)",
    ]


@pytest.mark.parametrize(
    ("budget", "room", "text"),
    [("+12.5 %", 10, "budget +12.5 %"), (5000, 5000, "budget +5,000"), (None, None, "no budget ")],
)
def test_summary_states_budget_as_given(budget: str | int | None, room: int, text: str) -> None:
    assert text in summary(replace(growth_facts(), settings={"budget": budget}, room=room))


def test_summary_of_many_additions_combines_the_smallest() -> None:
    additions = {f"layer{number}": contribution(float(number)) for number in range(10)}
    lines = summary(report_with(additions)).splitlines()
    assert len(lines) == MAX_LINES
    assert [line.split()[1] for line in lines[5:-1]] == [f"layer{n}" for n in range(9, 3, -1)]
    assert lines[-1] == "4 more: +388 parameters"


def test_summary_of_seven_additions_lists_all() -> None:
    additions = {f"layer{number}": contribution(float(number)) for number in range(7)}
    text = summary(report_with(additions))
    assert len(text.splitlines()) == MAX_LINES
    assert "more" not in text


def test_summary_of_long_names_fits() -> None:
    additions = {f"encoder.layers.{n}.{'attention.' * 9}output": contribution(-n) for n in range(9)}
    report = report_with(additions, blueprint="a_blueprint_with_a_name_that_nobody_would_type")
    report = replace(report, model="M" * 200, host_params=10**12, metric="loss")
    text = summary(report)
    assert_fits(text)
    assert "…" in text
    assert "output" in text, "the end of a path distinguishes layers"


def test_contribution_to_loss_is_shown_in_units_of_loss() -> None:
    additions = {"0": contribution(0.01234, 0.00041), "2": contribution(-0.0021, 0.004)}
    lines = summary(replace(report_with(additions), metric="loss")).splitlines()
    assert lines[1] == "validation loss: 1.4 → 0.2 (score 48.0 → 78.0)"
    assert lines[4].endswith("contribution (validation loss added if removed)")
    assert lines[5].endswith("0.0123 ± 0.00041")
    assert lines[6].endswith("−0.0021 ± 0.004 (none measurable)")


def test_contribution_to_metric_is_shown_in_points_of_score() -> None:
    report = replace(report_with({"0": contribution(12.0, 0.03)}), metric="score")
    lines = summary(report).splitlines()
    assert lines[1] == "validation score: 48.0 → 78.0 (loss 1.4 → 0.2)"
    assert lines[4].endswith("contribution (score points lost if removed)")
    assert lines[5].endswith("12.00 ± 0.03")


@pytest.mark.parametrize("metric", ["accuracy", "loss", "score"])
def test_old_run_shows_contributions_without_standard_error(metric: str) -> None:
    report = replace(report_with({"0": contribution(1.0)}), metric=metric, contributions={})
    lines = summary(report).splitlines()
    name = "accuracy" if metric == "accuracy" else "score"
    assert lines[4].endswith(f"contribution ({name} points lost if removed)")
    assert lines[5] == "norm   0                   +97  2.0"


def trial(name: str, val_loss: float) -> TrialResult:
    return TrialResult(seeds=(name,), val_loss=val_loss, val_loss_without=0.409, is_chosen=False)


@pytest.mark.parametrize(
    ("trials", "sentence"),
    [
        (
            [trial("mlp at 0", 0.5), trial("norm at 2", 0.412), trial("mlp at 2", math.inf)],
            "Nothing was added; norm at 2 came closest (validation loss 0.412, 0.409 without).",
        ),
        ([trial("mlp at 2", math.inf)], "Nothing was added; mlp at 2 diverged in the trial."),
        ([], "Nothing was added; no seed was planted."),
    ],
)
def test_summary_without_additions_names_the_closest_trial(
    trials: list[TrialResult], sentence: str
) -> None:
    text = summary(replace(report_with({}), trials=trials))
    assert text.splitlines()[-1] == sentence


def test_summary_of_removed_seeds_counts_them() -> None:
    report = growth_facts()
    epochs = [*report.epochs[:4], replace(report.epochs[-1], slots=())]
    text = summary(replace(report, epochs=epochs, planned=len(epochs)))
    assert text.endswith("seeds that were planted and removed again: 2.")


def test_summary_of_unfinished_run_states_its_progress() -> None:
    lines = summary(growth_facts(3)).splitlines()
    assert lines[0].endswith("3 of 7 epochs")
    assert lines[1].startswith("validation accuracy: 48.0 % → 65.0 %")
    assert lines[-1] == "Nothing is permanent yet; on probation: 2."


def test_summary_before_first_epoch_states_no_cost() -> None:
    assert summary(growth_facts(0)).splitlines()[1:] == ["not trained yet"]


def test_summary_without_counted_flops_states_no_ratio() -> None:
    report = report_with({})
    uncounted = [report.epochs[0], replace(report.epochs[1], flops=None)]
    text = summary(replace(report, epochs=uncounted))
    assert "cost: not known, because the FLOPs of this model could not be counted" in text
