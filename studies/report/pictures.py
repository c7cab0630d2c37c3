"""Pictures of studies, in the look of reports."""

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from esper.garden.statistics import mean
from esper.show.palette import (
    BLUE,
    GREEN,
    GREY,
    LEARNED_COLOUR,
    ORANGE,
    PURPLE,
    SKY,
    VERMILION,
)
from esper.show.theme import AbsentError, Theme, legend_beside, new_figure
from studies.comparisons import paired_difference, performance_profile
from studies.growth_pays import (
    CONSTANT as CONSTANT_GROWTH,
)
from studies.growth_pays import (
    GROWN,
    GROWN_TUNED,
    NAMES,
    NEVER,
    RANDOM_GROWTH,
    SCRATCH,
    SCRATCH_FLOPS,
    SCRATCH_PLAIN,
    SMALL,
    SMALL_FLOPS,
)
from studies.report.growth import GrowthStudy
from studies.report.learning import (
    BANDIT,
    BLANKED,
    CONSTANT,
    ORACLE,
    TAMIYO,
    TRAINING,
    UNTAUGHT,
    LearningStudy,
)

THRESHOLDS = np.linspace(-0.5, 1.5, 81)

WAYS: Mapping[str, tuple[str, str, str]] = {  # words, colour and marker of each way to train
    GROWN: ("grown", GREEN, "D"),
    GROWN_TUNED: ("grown, tuned", GREEN, "o"),
    NEVER: ("small host", GREY, "D"),
    SMALL: ("small host, tuned rate", GREY, "o"),
    SCRATCH_PLAIN: ("from scratch", VERMILION, "D"),
    SCRATCH: ("from scratch, tuned rate", VERMILION, "o"),
    SMALL_FLOPS: ("small host, equal FLOPs", GREY, "s"),
    SCRATCH_FLOPS: ("from scratch, equal FLOPs", VERMILION, "s"),
    CONSTANT_GROWTH: ("grown, one schedule for all", BLUE, "D"),
    RANDOM_GROWTH: ("grown at random", ORANGE, "D"),
}


def profiles(study: LearningStudy, theme: Theme) -> Figure:
    """The share of episodes above each score, a panel for each group of contexts."""
    groups = list(study.groups)
    columns = min(2, len(groups))
    rows = -(-len(groups) // columns)
    figure = new_figure(0.6 + 3.3 * rows)
    panels = figure.subplots(rows, columns, squeeze=False, sharey=True).flatten()
    for group, axes in zip(groups, panels, strict=False):
        _profile(axes, study, group)
    for axes in panels[len(groups) :]:
        axes.set_visible(False)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=4)
    return figure


def _profile(axes: Axes, study: LearningStudy, group: str) -> None:
    contexts = study.groups[group]
    for name, colour, dashed in _shown(study):
        if name not in study.played[group]:
            continue
        found = performance_profile(study.scores(name, contexts), THRESHOLDS, resamples=500)
        style = (0, (5, 2)) if dashed else "-"
        axes.plot(found.thresholds, found.share, color=colour, linestyle=style, label=_name(name))
        if name == TAMIYO:
            axes.fill_between(
                found.thresholds, found.low, found.high, color=colour, alpha=0.2, linewidth=0
            )
    axes.axvline(0.0, color=GREY, linewidth=0.9)
    kind = "trained in" if group == TRAINING else f"held out: {group}"
    many = "1 context" if len(contexts) == 1 else f"{len(contexts)} contexts"
    axes.set_title(f"{kind}, {many}")
    axes.set_xlabel("score: net gain / what can be gained")
    axes.set_ylabel("share of episodes above")
    axes.set_ylim(0, 1)


def _shown(study: LearningStudy) -> list[tuple[str, str, bool]]:
    """Controllers of a profile, with colour, and whether the line is broken."""
    return [
        (TAMIYO, LEARNED_COLOUR, False),
        (CONSTANT, ORANGE, False),
        (study.best_heuristic, GREEN, False),
        (BANDIT, PURPLE, False),
        (BLANKED, SKY, True),
        ("random", GREY, True),
        (ORACLE, VERMILION, True),
    ]


def _name(controller: str) -> str:
    return _NAMES.get(controller, controller)


_NAMES = {
    TAMIYO: "Tamiyo",
    BLANKED: "Tamiyo, blanked",
    UNTAUGHT: "Tamiyo, untaught",
    CONSTANT: "best constant",
}


def learning_curves(study: LearningStudy, theme: Theme) -> Figure:
    """The score of every training over its episodes, and their mean."""
    curves = study.description.get("curves") or {}
    kinds = {
        kind: [curves[name] for name in curves if name.rpartition("-")[0] == kind]
        for kind in (TAMIYO, BLANKED, UNTAUGHT)
    }
    if not kinds[TAMIYO]:
        raise AbsentError("The study kept no learning curves")
    figure = new_figure(4.2)
    axes = figure.subplots()
    for kind, colour in ((BLANKED, SKY), (UNTAUGHT, PURPLE), (TAMIYO, LEARNED_COLOUR)):
        for curve in kinds[kind]:
            episodes, scores = zip(*curve, strict=True)
            axes.plot(episodes, scores, color=colour, alpha=0.35, linewidth=1.1)
        if kinds[kind]:
            count = len(kinds[kind])
            words = _name(kind) + (f", mean of {count} trainings" if count > 1 else "")
            axes.plot(*_average(kinds[kind]), color=colour, linewidth=2.4, label=words)
    axes.axhline(0.0, color=theme.ink, linewidth=1.1, alpha=0.7)
    axes.set_xlabel("training episodes")
    axes.set_ylabel("score while learning")
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.legend(loc="lower left", bbox_to_anchor=(0.0, 1.0), ncols=2, borderaxespad=0.2)
    return figure


def _average(curves: Sequence[Sequence[Sequence[float]]]) -> tuple[list[float], list[float]]:
    """The mean of curves where all of them have been measured."""
    shortest = min(curves, key=lambda curve: curve[-1][0])
    at = [float(point[0]) for point in shortest]
    values = [
        np.interp(at, [point[0] for point in curve], [point[1] for point in curve])
        for curve in curves
    ]
    return at, np.mean(values, axis=0).tolist()


def leads(study: LearningStudy, theme: Theme) -> Figure:
    """Tamiyo's net gain less the best constant schedule's, context by context."""
    names = [(group, context) for group, contexts in study.groups.items() for context in contexts]
    names = [(group, each) for group, each in names if CONSTANT in study.played[group]]
    figure = new_figure(1.2 + 0.22 * len(names))
    axes = figure.subplots()
    colours = dict(zip(study.groups, (LEARNED_COLOUR, ORANGE, GREEN, PURPLE, SKY), strict=False))
    for place, (group, context) in enumerate(reversed(names)):
        pair = (TAMIYO, CONSTANT)
        both = (study.gains(name, [context], beside=pair) for name in pair)
        lead = paired_difference(*both, statistic=mean)
        axes.plot([lead.low, lead.high], [place, place], color=colours[group], linewidth=2.2)
        axes.plot(lead.value, place, marker="o", color=colours[group], markersize=5)
    axes.set_yticks(range(len(names)), [context for _, context in reversed(names)])
    axes.set_ylim(-0.7, len(names) - 0.3)
    axes.axvline(0.0, color=theme.ink, linewidth=1.1, alpha=0.7)
    axes.grid(axis="x")
    axes.set_xlabel("points of net gain: Tamiyo − best constant schedule, 95 % intervals")
    for group, colour in colours.items():
        label = "trained in" if group == TRAINING else f"held out: {group}"
        axes.plot([], [], color=colour, marker="o", label=label)
    legend_beside(axes)
    return figure


def growth(study: GrowthStudy, theme: Theme) -> Figure:
    """Test accuracy of every way to train, context by context."""
    figure = new_figure(0.8 + 0.27 * len(NAMES) * len(study.contexts) / 2 + 0.8)
    axes = figure.subplots()
    height = len(NAMES) + 1.5
    middles = []
    for number, context in enumerate(study.contexts):
        top = -number * height
        for place, line in enumerate(study.lines(context)):
            words, colour, marker = WAYS[line.name]
            at = top - place
            axes.plot([line.test.low, line.test.high], [at, at], color=colour, linewidth=2.2)
            axes.plot(
                line.test.value, at, marker=marker, color=colour, markersize=5.5, linestyle="none",
                label=words if number == 0 else None,
            )  # fmt: skip
        middles.append(top - (len(NAMES) - 1) / 2)
        if number:
            axes.axhline(top + 1.2, color=theme.grid, linewidth=1.0)
    axes.set_yticks(middles, study.contexts)
    axes.grid(axis="x")
    axes.grid(visible=False, axis="y")
    axes.set_xlabel("test accuracy, percent; 95 % intervals")
    legend_beside(axes, ncols=1)
    return figure
