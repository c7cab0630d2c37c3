"""The learning curve, with other controllers as lines to compare with."""

import math

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from esper.karn.report.facts import Facts
from esper.karn.report.theme import (
    BASELINE_COLOURS,
    LEARNED_COLOUR,
    AbsentError,
    Theme,
    apart,
    new_figure,
    over_rounds,
)

HEIGHT = 4.8
RETURNS_REACH = 0.5  # how far returns may stretch the axis, of what scores need


def learning_curve(facts: Facts, theme: Theme) -> Figure:
    """Score over rounds; training returns are in the same unit, and faint."""
    played = [each for each in facts.rounds if each.mean_return is not None]
    if not played and not facts.learned:
        raise AbsentError("No episode has ended yet, so there is no learning curve")
    figure = new_figure(HEIGHT)
    axes = figure.subplots()
    rounds = [each.round for each in played] + [score.round for score in facts.learned]
    over_rounds(axes, min(rounds), max(rounds))
    if played:
        axes.plot(
            [each.round for each in played],
            [each.mean_return or 0.0 for each in played],
            color=theme.faint,
            alpha=0.6,
            linewidth=1.1,
            marker="." if len(played) < 3 else "",
            label="mean return of training episodes",
        )
    axes.set_ylim(*_limits(facts))
    _learned(axes, facts, theme)
    _baselines(axes, facts, theme)
    axes.set_ylabel("score: net gain / scale")
    envs = facts.setting("envs")
    if envs:
        axes.set_xlabel(f"round ({envs} training episodes each)")
    axes.legend(loc="lower left", bbox_to_anchor=(0.0, 1.0), ncols=2, borderaxespad=0.2)
    return figure


def _learned(axes: Axes, facts: Facts, theme: Theme) -> None:
    scores, best = facts.learned, facts.best
    if best is None:
        return
    rounds = [score.round for score in scores]
    intervals = [score for score in scores if score.low is not None]
    if intervals:
        axes.fill_between(
            [score.round for score in intervals],
            [score.low or 0.0 for score in intervals],
            [score.high or 0.0 for score in intervals],
            color=LEARNED_COLOUR,
            alpha=0.18,
            linewidth=0,
        )
    if len(intervals) == 1:  # a band of no width is not seen
        axes.vlines(best.round, best.low or 0.0, best.high or 0.0, color=LEARNED_COLOUR, alpha=0.5)
    axes.plot(
        rounds,
        [score.value for score in scores],
        color=LEARNED_COLOUR,
        marker="o",
        markersize=4.5,
        linewidth=2.2,
        label="Tamiyo, evaluated" + (" (band: 95 % interval)" if intervals else ""),
    )
    axes.plot(
        best.round,
        best.value,
        marker="*",
        markersize=17,
        color=LEARNED_COLOUR,
        markeredgecolor=theme.paper,
        markeredgewidth=1.4,
        linestyle="none",
        zorder=5,
    )


def _baselines(axes: Axes, facts: Facts, theme: Theme) -> None:
    """Lines across, their names to the right of the axes, none upon another."""
    lines: list[tuple[float, str, str]] = []
    for (name, score), colour in zip(
        facts.baselines.items(), BASELINE_COLOURS * len(facts.baselines), strict=False
    ):
        if score.low is not None and score.high is not None:
            axes.axhspan(score.low, score.high, color=colour, alpha=0.10, linewidth=0)
        axes.axhline(score.value, color=colour, linewidth=1.6, linestyle=(0, (5, 2)))
        lines.append((score.value, colour, f"{name} {score}"))
    axes.axhline(0.0, color=theme.ink, linewidth=1.1, alpha=0.7)
    lines.append((0.0, theme.ink, "never grow 0"))
    if facts.best is not None:
        lines.append((facts.best.value, LEARNED_COLOUR, f"Tamiyo's best {facts.best}"))
    low, high = axes.get_ylim()
    heights = apart([value for value, _, _ in lines], 0.06 * (high - low))
    for (value, colour, text), height in zip(lines, heights, strict=True):
        axes.annotate(
            text,
            xy=(1.0, value),
            xytext=(1.035, height),
            xycoords=("axes fraction", "data"),
            textcoords=("axes fraction", "data"),
            va="center",
            color=theme.ink,
            annotation_clip=False,
            arrowprops={"arrowstyle": "-", "color": colour, "linewidth": 1.6, "relpos": (0.0, 0.5)},
        )


def _limits(facts: Facts) -> tuple[float, float]:
    """All scores, and of the returns what is not far from them: those stay in the background."""
    found = [0.0]
    for score in (*facts.learned, *facts.baselines.values()):
        found += [each for each in (score.value, score.low, score.high) if each is not None]
    low, high = min(found), max(found)
    returns = [each.mean_return for each in facts.rounds if each.mean_return is not None]
    if returns:
        lowest, highest = np.quantile(returns, (0.05, 0.95)).tolist()
        reach = RETURNS_REACH * (high - low) or math.inf
        low, high = max(min(low, lowest), low - reach), min(max(high, highest), high + reach)
    room = 0.08 * (high - low) or 0.1
    return low - room, high + room
