"""Is the learning healthy? Metrics of updates over rounds, findings marked, and where time goes."""

from collections.abc import Callable, Mapping

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter, PercentFormatter

from esper.karn.report.facts import PHASES, Facts, Series
from esper.karn.report.theme import (
    BLUE,
    GREEN,
    GREY,
    HEAD_COLOURS,
    ORANGE,
    PURPLE,
    SKY,
    VALUE_COLOUR,
    VERMILION,
    YELLOW,
    AbsentError,
    Theme,
    legend_beside,
    new_figure,
    over_rounds,
)
from esper.leyline.constants import KL_STOP_FACTOR

PANEL = 2.3  # inches
INSIDE_PLAY = ("step", "decide", "tell")
PHASE_COLOURS = {
    "step": BLUE,
    "decide": SKY,
    "tell": PURPLE,
    "play": GREY,  # what is left of it
    "learn": ORANGE,
    "judge": GREEN,
}
PHASE_WORDS = {
    "step": "train hosts",
    "decide": "decide",
    "tell": "telemetry",
    "play": "other play",
    "learn": "learn",
    "judge": "evaluate",
}

# Which panel an anomaly belongs to; those that are not here are marked in all of them.
PANEL_OF_ANOMALY = {
    "ratio_explosion": "clip",
    "ratio_collapse": "clip",
    "entropy_collapse": "entropy",
    "value_collapse": "variance",
    "gradient_vanishing": "gradient",
    "gradient_explosion": "gradient",
}


def health(facts: Facts, theme: Theme) -> Figure:
    """Six small panels over the same rounds."""
    if not facts.updates:
        raise AbsentError("No update of the learner has been recorded yet")
    panels: Mapping[str, Callable[[Axes, Facts, Theme], None]] = {
        "kl": _kl,
        "variance": _variance,
        "entropy": _entropy,
        "clip": _clip,
        "gradient": _gradient,
        "rollback": _rollbacks,
    }
    rounds = [number for series in facts.updates.values() for number in series.rounds]
    figure = new_figure(3 * PANEL + 0.4)
    places = figure.subplots(3, 2)
    for axes, (name, draw) in zip(places.flat, panels.items(), strict=True):
        draw(axes, facts, theme)
        over_rounds(axes, min(rounds), max(rounds), label=axes in places[-1])
        _findings(axes, name, facts)
    return figure


def _line(axes: Axes, series: Series | None, colour: str, label: str = "") -> None:
    if series is not None:
        marker = "." if len(series.rounds) < 3 else ""
        axes.plot(
            series.rounds, series.values, color=colour, label=label, marker=marker, linewidth=1.5
        )


def _kl(axes: Axes, facts: Facts, theme: Theme) -> None:
    _line(axes, facts.updates.get("kl"), BLUE)
    axes.set_title("KL of an update, nats")
    axes.set_ylim(bottom=0)
    target = facts.setting("ppo", "target_kl")
    if isinstance(target, int | float):
        stop = KL_STOP_FACTOR * target
        axes.axhline(stop, color=theme.faint, linewidth=1.0, linestyle=(0, (4, 2)))
        axes.set_ylim(top=max(1.15 * stop, axes.get_ylim()[1]))
        axes.set_title(f"KL of an update, nats (it stops above {stop:g})")


def _variance(axes: Axes, facts: Facts, theme: Theme) -> None:
    series = facts.updates.get("explained_variance")
    _line(axes, series, BLUE)
    axes.axhline(0.0, color=theme.faint, linewidth=1.0)
    axes.set_title("variance of returns explained by the value (1 is all)")
    lowest = min((value for value in series.values if value == value), default=0) if series else 0
    axes.set_ylim(min(-0.1, max(lowest - 0.1, -1.0)), 1.05)


def _entropy(axes: Axes, facts: Facts, theme: Theme) -> None:
    _heads(axes, facts, "heads.{}.entropy")
    axes.set_title("entropy by head (1: uniform over what is legal)")
    axes.set_ylim(0, 1.05)


def _clip(axes: Axes, facts: Facts, theme: Theme) -> None:
    _heads(axes, facts, "heads.{}.clip_fraction")
    axes.set_title("steps whose ratio was clipped, by head")
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axes.set_ylim(bottom=0)


def _gradient(axes: Axes, facts: Facts, theme: Theme) -> None:
    _heads(axes, facts, "gradient_norms.heads.{}")
    _line(axes, facts.updates.get("gradient_norms.value"), VALUE_COLOUR, "value")
    axes.set_title("gradient norm by head, before clipping")
    shown = [value for line in axes.get_lines() for value in np.ravel(line.get_ydata())]
    if any(value > 0 for value in shown):
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axes.yaxis.set_major_formatter(lambda value, place: f"{value:g}")
        axes.yaxis.set_minor_formatter(NullFormatter())
    _legend(axes)


def _rollbacks(axes: Axes, facts: Facts, theme: Theme) -> None:
    played = [each for each in facts.rounds if each.episodes]
    shares = [each.rolled_back / each.episodes for each in played]
    axes.bar([each.round for each in played], shares, width=0.9, color=VERMILION)
    axes.set_title("episodes that were rolled back")
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axes.set_ylim(0, max(0.05, 1.1 * max(shares, default=0.0)))
    if not facts.rolled_back:
        axes.set_yticks([])
        axes.text(0.5, 0.5, "none", transform=axes.transAxes, ha="center", color=theme.faint)


def _heads(axes: Axes, facts: Facts, pattern: str) -> None:
    heads = facts.layout.heads if facts.layout else ()
    for place, head in enumerate(heads):
        colour = HEAD_COLOURS[place % len(HEAD_COLOURS)]
        _line(axes, facts.updates.get(pattern.format(head)), colour, head)
    _legend(axes)


def _legend(axes: Axes) -> None:
    if axes.get_legend_handles_labels()[0]:
        legend_beside(axes, labelspacing=0.3, fontsize=8.5)


def _findings(axes: Axes, panel: str, facts: Facts) -> None:
    """A line where an anomaly was raised."""
    for row in facts.anomalies:
        if PANEL_OF_ANOMALY.get(row["name"], panel) == panel:
            axes.axvline(row["round"], color=VERMILION, linewidth=1.2, linestyle=(0, (2, 2)))
            axes.plot(
                row["round"],
                0.97,
                marker="v",
                markersize=6,
                color=VERMILION,
                transform=axes.get_xaxis_transform(),
                clip_on=False,
            )


# --- time ----------------------------------------------------------------------------------


def phase_times(facts: Facts, theme: Theme) -> Figure:
    """Seconds of every round, phase upon phase."""
    phases = seconds_by_phase(facts)
    if not phases:
        raise AbsentError("No times of phases have been recorded")
    rounds = sorted({number for found in phases.values() for number in found})
    figure = new_figure(2.9)
    axes = figure.subplots()
    bottom = np.zeros(len(rounds))
    for name, found in phases.items():
        heights = np.array([found.get(number, 0.0) for number in rounds])
        axes.bar(
            rounds,
            heights,
            bottom=bottom,
            width=0.9,
            color=PHASE_COLOURS.get(name, YELLOW),
            label=PHASE_WORDS.get(name, name),
        )
        bottom += heights
    over_rounds(axes, rounds[0], rounds[-1])
    axes.set_xlim(rounds[0] - 0.6, rounds[-1] + 0.6)
    axes.set_ylabel("seconds of a round")
    axes.yaxis.set_major_locator(MaxNLocator(nbins=5))
    legend_beside(axes, reverse=True)
    return figure


def seconds_by_phase(facts: Facts) -> dict[str, dict[int, float]]:
    """By phase and round, none counted twice: playing is split into its parts and the rest."""
    times = {
        name: dict(zip(series.rounds, series.values, strict=True))
        for name, series in facts.seconds.items()
    }
    parts = [times[name] for name in INSIDE_PLAY if name in times]
    if "play" in times:
        times["play"] = {
            number: max(0.0, spent - sum(part.get(number, 0.0) for part in parts))
            for number, spent in times["play"].items()
        }
    order = (*INSIDE_PLAY, *PHASES)
    return {name: times[name] for name in order if name in times}
