"""Pictures of training: the learning curve, decisions over rounds, and what parameters buy."""

import math
from collections.abc import Mapping, Sequence
from itertools import cycle, product

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import PercentFormatter

from esper.show import palette
from esper.show.run_facts import Curve, Facts, Shares
from esper.show.theme import AbsentError, Look, Theme, legend_beside, new_figure, over_rounds

CURVE = 4.8  # inches
RETURNS_REACH = 0.5  # how far returns may stretch the axis, of what scores need
SHARES_PANEL = 2.15  # inches
MOST_BINS = 80  # of rounds; more is noise

_OF_PLANTINGS = ("slot", "blueprint", "blend")


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
        faint |= {
            "marker": "." if len(played) < 3 else "",
            "label": "mean return of training episodes",
        }
        axes.plot([*played], [*played.values()], **faint)
    axes.set_ylim(*_limits(facts))
    _learned(axes, facts, theme)
    _baselines(axes, facts, theme)
    axes.set_ylabel("score: net gain / scale")
    envs = facts.config.get("envs")
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


# --- what parameters buy ------------------------------------------------------------------------


def gain_by_parameters(facts: Facts, theme: Theme) -> Figure:
    """A small dot an episode, a large one a context's mean; never growing is at the origin."""
    groups = facts.by_context()
    if not groups:
        raise AbsentError("No episode has ended yet, so no parameters have bought anything")
    kinds = product(palette.CONTEXT_MARKERS, palette.CONTEXT_COLOURS)
    looks = dict(zip(sorted(groups), cycle(kinds), strict=False))
    figure = new_figure(max(4.8, 0.21 * len(groups) + 1.2))
    axes = figure.subplots()
    for context, (marker, colour) in looks.items():
        added = [row["added"] or 0 for row in groups[context]]
        gains = [row["net_gain"] for row in groups[context]]
        axes.scatter(added, gains, s=22, color=colour, marker=marker, alpha=0.55, linewidths=0)
        mean: Look = {"s": 95, "edgecolors": theme.ink, "linewidths": 0.9, "zorder": 4}
        axes.scatter(np.mean(added), np.mean(gains), color=colour, marker=marker, **mean)
    axes.axhline(0.0, color=theme.ink, lw=1.0, alpha=0.7)
    axes.plot(0, 0, marker="+", ms=15, mew=2.2, color=theme.ink, zorder=5)
    axes.set_xlabel("parameters added for good")
    axes.set_ylabel("net gain, points of validation accuracy")
    axes.xaxis.set_major_formatter(lambda value, place: f"{value:,.0f}")
    axes.grid(visible=True, axis="both")
    axes.margins(x=0.03)
    never: Look = {"ms": 10, "mew": 2, "color": theme.ink, "label": "never grow"}
    entries = [Line2D([], [], ls="none", marker="+", **never)]
    entries += [
        Line2D([], [], ls="none", marker=marker, color=colour, label=context)
        for context, (marker, colour) in looks.items()
    ]
    legend_beside(axes, handles=entries, title="context (large: mean)", alignment="left", ncols=1)
    return figure
