"""Pictures of training over rounds: the learning curve, decisions, health, and where time goes."""

import math
from collections.abc import Mapping, Sequence
from itertools import cycle
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter, PercentFormatter

from esper.leyline.constants import KL_STOP_FACTOR
from esper.show import palette
from esper.show.run_facts import Curve, Facts, Shares
from esper.show.theme import AbsentError, Look, Theme, legend_beside, new_figure, over_rounds

CURVE = 4.8  # inches
RETURNS_REACH = 0.5  # how far returns may stretch the axis, of what scores need
SHARES_PANEL = 2.15  # inches
MOST_BINS = 80  # of rounds; more is noise

_OF_PLANTINGS = ("slot", "blueprint", "blend")
HEALTH_PANEL = 2.3  # inches
PANELS = {  # titles, and the metric in each; a place in its name is for every head
    "kl": ("KL of an update, nats", "kl"),
    "variance": ("variance of returns explained by the value (1 is all)", "explained_variance"),
    "entropy": ("entropy by head (1: uniform over what is legal)", "heads.{}.entropy"),
    "clip": ("steps whose ratio was clipped, by head", "heads.{}.clip_fraction"),
    "gradient": ("gradient norm by head, before clipping", "gradient_norms.heads.{}"),
    "rollback": ("episodes that were rolled back", ""),
}
INSIDE_PLAY = ("step", "decide", "tell")
PHASE_LOOKS = {  # words and colour, in order
    "step": ("train hosts", palette.BLUE),
    "decide": ("decide", palette.SKY),
    "tell": ("telemetry", palette.PURPLE),
    "play": ("other play", palette.GREY),  # what is left of it
    "learn": ("learn", palette.ORANGE),
    "judge": ("evaluate", palette.GREEN),
}

# Which panel anomalies belong to whose names begin so; all others are marked in every panel.
PANEL_OF = {"ratio": "clip", "entropy": "entropy", "value": "variance", "gradient": "gradient"}


# --- the learning curve ---------------------------------------------------------------------------


def learning_curve(facts: Facts, theme: Theme) -> Figure:
    """Score over rounds; training returns are in the same unit, and faint."""
    played = _returns(facts)
    if not played and not facts.learned:
        raise AbsentError("No episode has ended yet, so there is no learning curve")
    figure = new_figure(CURVE)
    axes = figure.subplots()
    rounds = [*played, *(score.round for score in facts.learned)]
    over_rounds(axes, min(rounds), max(rounds))
    if played:
        faint: Look = {"color": theme.faint, "alpha": 0.6, "lw": 1.1}
        _line(axes, played, label="mean return of training episodes", **faint)
    axes.set_ylim(*_limits(facts))
    _learned(axes, facts, theme)
    _baselines(axes, facts, theme)
    axes.set_ylabel("score: net gain / scale")
    envs = facts.setting("envs")
    if envs:
        axes.set_xlabel(f"round ({envs} training episodes each)")
    legend_beside(axes)
    return figure


def _returns(facts: Facts) -> Curve:
    known = ((each["round"], each["mean_return"]) for each in facts.rounds)
    return {number: mean for number, mean in known if mean is not None}


def _learned(axes: Axes, facts: Facts, theme: Theme) -> None:
    scores, best = facts.learned, facts.best
    if best is None:
        return
    intervals = [(score.round, *score.interval) for score in scores if score.interval]
    if intervals:
        at, low, high = zip(*intervals, strict=True)
        axes.fill_between(at, low, high, color=palette.LEARNED_COLOUR, alpha=0.18, lw=0)
    if len(intervals) == 1:  # a band of no width is not seen
        axes.vlines(*intervals[0], color=palette.LEARNED_COLOUR, alpha=0.5)
    rounds, values = [score.round for score in scores], [score.value for score in scores]
    label = "Tamiyo, evaluated" + (" (band: 95 % interval)" if intervals else "")
    axes.plot(rounds, values, color=palette.LEARNED_COLOUR, marker="o", ms=4.5, lw=2.2, label=label)
    star: Look = {"marker": "*", "ms": 17, "mec": theme.paper, "mew": 1.4, "zorder": 5}
    best_said: Look = {"ls": "none", "label": f"Tamiyo's best {best}"}
    axes.plot(best.round, best.value, color=palette.LEARNED_COLOUR, **star, **best_said)


def _baselines(axes: Axes, facts: Facts, theme: Theme) -> None:
    """Lines across."""
    colours = cycle(palette.BASELINE_COLOURS)
    for colour, (name, score) in zip(colours, facts.baselines.items(), strict=False):
        if score.interval:
            axes.axhspan(*score.interval, color=colour, alpha=0.10, lw=0)
        axes.axhline(score.value, color=colour, lw=1.6, ls=(0, (5, 2)), label=f"{name} {score}")
    axes.axhline(0.0, color=theme.ink, lw=1.1, alpha=0.7, label="never grow 0")


def _limits(facts: Facts) -> tuple[float, float]:
    """All scores, and of the returns what is not far from them: those stay in the background."""
    scores = (*facts.learned, *facts.baselines.values())
    found = [0.0, *(end for score in scores for end in (score.value, *(score.interval or ())))]
    low, high = min(found), max(found)
    if returns := [*_returns(facts).values()]:
        lowest, highest = np.quantile(returns, (0.05, 0.95)).tolist()
        reach = RETURNS_REACH * (high - low) or math.inf
        low, high = max(min(low, lowest), low - reach), min(max(high, highest), high + reach)
    room = 0.08 * (high - low) or 0.1
    return low - room, high + room


# --- what was decided: shares of every head's actions ---------------------------------------------


def action_shares(facts: Facts, theme: Theme) -> Figure:
    """Areas, stacked: the op over all decisions, what was planted over plantings."""
    some = {
        head: [(number, found) for number, found in shares if sum(found.values()) > 0]
        for head, shares in facts.shares.items()
    }
    panels = {head: shares for head, shares in some.items() if shares}
    if not panels:
        raise AbsentError("No decision has been recorded yet")
    figure = new_figure(SHARES_PANEL * len(panels) + 0.4)
    rows = figure.subplots(len(panels), 1, squeeze=False)[:, 0]
    first, last = (next(iter(panels.values()))[place][0] for place in (0, -1))
    for axes, (head, shares) in zip(rows, panels.items(), strict=True):
        _stack(axes, shares, _colours(head, list(shares[0][1])), theme)
        of_what = "plantings" if head in _OF_PLANTINGS else "where it mattered"
        axes.set_title(f"{head}: share of {'all decisions' if axes is rows[0] else of_what}")
        over_rounds(axes, first, last, label=axes is rows[-1])
        axes.set_xlim(first - 0.5, last + 0.5)
    return figure


def _stack(axes: Axes, shares: Shares, colours: Mapping[str, str], theme: Theme) -> None:
    """Steps rather than slopes: a round is one number, and may be missing."""
    edges, heights = binned(shares)  # [bins, 2], [actions, bins]
    top = np.zeros(len(edges))
    for name, height in zip(shares[0][1], heights, strict=True):
        bottom, top = top, top + height
        area = (edges.reshape(-1), np.repeat(bottom, 2), np.repeat(top, 2))
        look: Look = {"color": colours[name], "edgecolor": theme.paper, "lw": 0.4, "label": name}
        axes.fill_between(*area, where=np.repeat(height >= 0, 2), **look)
    axes.set_ylim(0, 1)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes.set_yticks([0, 0.5, 1])
    axes.grid(visible=False)
    legend_beside(axes, reverse=True, labelspacing=0.25)


def binned(shares: Shares) -> tuple[np.ndarray, np.ndarray]:
    """Edges of bins of rounds [bins, 2], and the mean shares within [actions, bins].

    Between rounds without any such decision there is a gap of height 0.
    """
    first, last = shares[0][0], shares[-1][0]
    width = -(-(last - first + 1) // MOST_BINS)
    starts = np.arange(first, last + 1, width)
    names = list(shares[0][1])
    heights = np.zeros((len(names), len(starts)))
    counts = np.zeros(len(starts))
    for number, found in shares:
        place = (number - first) // width
        heights[:, place] += [found[name] for name in names]
        counts[place] += 1
    ends = np.minimum(starts + width, last + 1)
    return np.stack([starts - 0.5, ends - 0.5], 1), heights / np.maximum(counts, 1)


def _colours(head: str, names: Sequence[str]) -> Mapping[str, str]:
    if palette.OP_COLOURS.keys() >= set(names):
        return palette.OP_COLOURS
    if head == "slot":  # slots have an order, from early to late
        places = np.linspace(0.15, 0.9, len(names)) if len(names) > 1 else np.array([0.5])
        return dict(zip(names, map(to_hex, colormaps["cividis"](places)), strict=True))
    many = palette.MANY[-2:-8:-1] if head == "blend" else palette.MANY
    return dict(zip(names, cycle(many), strict=False))


# --- health: metrics of updates, findings marked --------------------------------------------------


def health(facts: Facts, theme: Theme) -> Figure:
    """Six small panels over the same rounds."""
    if not facts.updates:
        raise AbsentError("No update of the learner has been recorded yet")
    rounds = [number for curve in facts.updates.values() for number in curve]
    figure = new_figure(3 * HEALTH_PANEL + 0.4)
    places = figure.subplots(3, 2)
    for axes, (name, (title, metric)) in zip(places.flat, PANELS.items(), strict=True):
        axes.set_title(title)
        heads = facts.layout.heads if facts.layout and "{}" in metric else ("",)
        for head, colour in zip(heads, cycle(palette.HEAD_COLOURS), strict=False):
            _line(axes, facts.updates.get(metric.format(head)), color=colour, label=head or None)
        _scale(name, axes, facts, theme)
        if axes.get_legend_handles_labels()[0]:
            legend_beside(axes, labelspacing=0.3, fontsize=8.5)
        over_rounds(axes, min(rounds), max(rounds), label=axes in places[-1])
        # A line where an anomaly was raised.
        on_top: Look = {"transform": axes.get_xaxis_transform(), "clip_on": False}
        for row in facts.anomalies:
            if PANEL_OF.get(row["name"].partition("_")[0], name) == name:
                axes.axvline(row["round"], color=palette.VERMILION, lw=1.2, ls=(0, (2, 2)))
                axes.plot(row["round"], 0.97, marker="v", ms=6, color=palette.VERMILION, **on_top)
    return figure


def _line(axes: Axes, curve: Curve | None, **look: Any) -> None:
    """A line over rounds; a point or two are dots."""
    if curve is not None:
        marker = "." if len(curve) < 3 else ""
        axes.plot([*curve], [*curve.values()], marker=marker, **{"lw": 1.5, **look})


def _scale(name: str, axes: Axes, facts: Facts, theme: Theme) -> None:
    """What a panel has beside its curves."""
    if name in ("clip", "rollback"):
        axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    if name in ("clip", "kl"):
        axes.set_ylim(bottom=0)
    target = facts.setting("ppo", "target_kl")
    if name == "kl" and isinstance(target, int | float):
        stop = KL_STOP_FACTOR * target
        axes.axhline(stop, color=theme.faint, lw=1.0, ls=(0, (4, 2)))
        axes.set_ylim(top=max(1.15 * stop, axes.get_ylim()[1]))
        axes.set_title(f"KL of an update, nats (it stops above {stop:g})")
    elif name == "variance":
        axes.axhline(0.0, color=theme.faint, lw=1.0)
        known = facts.updates.get("explained_variance", {}).values()
        lowest = min((value for value in known if value == value), default=0)
        axes.set_ylim(min(-0.1, max(lowest - 0.1, -1.0)), 1.05)
    elif name == "entropy":
        axes.set_ylim(0, 1.05)
    elif name == "gradient":
        value = facts.updates.get("gradient_norms.value")
        _line(axes, value, color=palette.VALUE_COLOUR, label="value")
        if any(np.any(np.asarray(line.get_ydata()) > 0) for line in axes.get_lines()):
            axes.set_yscale("log")
            axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
            axes.yaxis.set_major_formatter(lambda value, place: f"{value:g}")
            axes.yaxis.set_minor_formatter(NullFormatter())
    elif name == "rollback":
        shares = {each["round"]: each["rolled_back"] / each["episodes"] for each in facts.rounds}
        axes.bar([*shares], [*shares.values()], width=0.9, color=palette.VERMILION)
        axes.set_ylim(0, max(0.05, 1.1 * max(shares.values(), default=0.0)))
        if not facts.rolled_back:
            axes.set_yticks([])
            axes.text(0.5, 0.5, "none", transform=axes.transAxes, ha="center", color=theme.faint)


# --- time -----------------------------------------------------------------------------------------


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
        words, colour = PHASE_LOOKS[name]
        axes.bar(rounds, heights, bottom=bottom, width=0.9, color=colour, label=words)
        bottom += heights
    over_rounds(axes, rounds[0], rounds[-1])
    axes.set_xlim(rounds[0] - 0.6, rounds[-1] + 0.6)
    axes.set_ylabel("seconds of a round")
    axes.yaxis.set_major_locator(MaxNLocator(nbins=5))
    legend_beside(axes, reverse=True)
    return figure


def seconds_by_phase(facts: Facts) -> dict[str, Curve]:
    """By phase and round, none counted twice: playing is split into its parts and the rest."""
    times = dict(facts.seconds)
    parts = [times[name] for name in INSIDE_PLAY if name in times]
    if "play" in times:
        times["play"] = {
            number: max(0.0, spent - sum(part.get(number, 0.0) for part in parts))
            for number, spent in times["play"].items()
        }
    return {name: times[name] for name in PHASE_LOOKS if name in times}
