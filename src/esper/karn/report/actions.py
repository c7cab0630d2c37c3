"""What was decided, round by round: shares of every head's actions."""

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from esper.karn.report.facts import Facts, Shares
from esper.karn.report.theme import (
    MANY,
    OP_COLOURS,
    AbsentError,
    Theme,
    legend_beside,
    new_figure,
    over_rounds,
)

PANEL = 2.15  # inches
MOST_BINS = 80  # of rounds; more is noise

_OF_PLANTINGS = ("slot", "blueprint", "blend")


def action_shares(facts: Facts, theme: Theme) -> Figure:
    """Areas, stacked: the op over all decisions, what was planted over plantings."""
    panels = [(head, _shares(facts, head)) for head in facts.shares]
    panels = [(head, shares) for head, shares in panels if shares]
    if not panels:
        raise AbsentError("No decision has been recorded yet")
    figure = new_figure(PANEL * len(panels) + 0.4)
    rows = figure.subplots(len(panels), 1, squeeze=False)[:, 0]
    for place, (axes, (head, shares)) in enumerate(zip(rows, panels, strict=True)):
        _stack(axes, shares, _colours(head, shares), theme)
        axes.set_title(_title(head, first=place == 0))
        over_rounds(axes, panels[0][1][0][0], panels[0][1][-1][0], label=axes is rows[-1])
        axes.set_xlim(panels[0][1][0][0] - 0.5, panels[0][1][-1][0] + 0.5)
    return figure


def _shares(facts: Facts, head: str) -> Shares:
    shares = facts.planted_in if head == "slot" else facts.shares[head]
    return [(number, found) for number, found in shares if sum(found.values()) > 0]


def _title(head: str, *, first: bool) -> str:
    if first:
        return f"{head}: share of all decisions"
    return f"{head}: share of " + ("plantings" if head in _OF_PLANTINGS else "where it mattered")


def _stack(axes: Axes, shares: Shares, colours: Mapping[str, str], theme: Theme) -> None:
    """Steps rather than slopes: a round is one number, and may be missing."""
    edges, heights = binned(shares)  # [bins, 2], [actions, bins]
    names = list(shares[0][1])
    top = np.zeros(len(edges))
    for name, height in zip(names, heights, strict=True):
        bottom, top = top, top + height
        axes.fill_between(
            edges.reshape(-1),
            np.repeat(bottom, 2),
            np.repeat(top, 2),
            where=np.repeat(height >= 0, 2),
            color=colours[name],
            edgecolor=theme.paper,
            linewidth=0.4,
            label=name,
        )
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


def _colours(head: str, shares: Shares) -> dict[str, str]:
    names = list(shares[0][1])
    if all(name in OP_COLOURS for name in names):
        return {name: OP_COLOURS[name] for name in names}
    if head == "slot":  # slots have an order
        return dict(zip(names, ordered_colours(len(names)), strict=True))
    if head == "blend":
        return {name: MANY[-2 - place % 6] for place, name in enumerate(names)}
    return {name: MANY[place % len(MANY)] for place, name in enumerate(names)}


def ordered_colours(count: int) -> Sequence[str]:
    """From early to late."""
    places = np.linspace(0.15, 0.9, count) if count > 1 else np.array([0.5])
    return [to_hex(colour) for colour in colormaps["cividis"](places)]
