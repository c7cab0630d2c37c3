"""What the policy does in each context, and what its parameters buy.

Shapes: `C` contexts, `K` kinds of seed (a blueprint in a slot).
"""

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from esper.show.palette import BLUE, FAMILY_COLOURS, FAMILY_MARKERS, GREEN, VERMILION, tint
from esper.show.run_facts import Facts, Row, signed
from esper.show.theme import AbsentError, Look, Theme, legend_beside, new_figure, readable_on

MOST_KINDS = 30  # columns that can be read
WORTH_A_NUMBER = 0.045  # smaller shares are only a shade
NORMAL_95 = 1.96

Kind = tuple[str, str]  # slot, blueprint


@dataclass
class Habit:
    """What was done in one context."""

    gains: list[float] = field(default_factory=list)  # net, points
    planted: Counter[Kind] = field(default_factory=Counter)  # episodes in which it was
    first: Counter[Kind] = field(default_factory=Counter)
    epochs: list[int] = field(default_factory=list)  # of first plantings
    episodes: int = 0

    @property
    def waited(self) -> float:
        """Share of episodes in which nothing was planted."""
        return 1.0 - len(self.epochs) / self.episodes

    @property
    def gain(self) -> float:
        return float(np.mean(self.gains)) if self.gains else math.nan

    @property
    def spread(self) -> float:
        """Half of a 95 % interval of the mean gain; 0 where one episode says nothing of it."""
        if len(self.gains) < 2:
            return 0.0
        return NORMAL_95 * float(np.std(self.gains, ddof=1)) / math.sqrt(len(self.gains))


def habits(facts: Facts) -> dict[str, Habit]:
    """By context, the one with the greatest gain first."""
    found: dict[str, Habit] = defaultdict(Habit)
    contexts = {(row["round"], row["env"]): row["context"] for row in facts.episodes}
    for row in facts.episodes:
        habit = found[row["context"]]
        habit.episodes += 1
        if row["net_gain"] is not None:
            habit.gains.append(row["net_gain"])
    seen: dict[tuple[int, int], set[Kind]] = defaultdict(set)
    for row in facts.plantings:
        key = (row["round"], row["env"])
        if key not in contexts:  # of an episode that is not over
            continue
        kind = (row["slot"], row["blueprint"] or "?")
        habit = found[contexts[key]]
        if not seen[key]:
            habit.first[kind] += 1
            habit.epochs.append(row["step"] + 1)
        if kind not in seen[key]:
            habit.planted[kind] += 1
            seen[key].add(kind)
    return dict(sorted(found.items(), key=lambda each: -np.nan_to_num(each[1].gain, nan=-1e9)))


def policy_by_context(facts: Facts, theme: Theme) -> Figure:
    """Shares of what was planted, the first planting, and the mean net gain; a line a context."""
    found = habits(facts)
    if not found:
        raise AbsentError("No episode has ended yet, so there is nothing to say about contexts")
    figure = new_figure(0.36 * len(found) + 2.1)
    heat, first, gain = figure.subplots(1, 3, width_ratios=[5.2, 2.0, 1.9])
    _heat(heat, found, facts, theme)
    _first(first, found, facts, theme)
    _gain(gain, found, theme)
    for axes in (heat, first, gain):
        axes.set_ylim(len(found) - 0.5, -0.5)
        axes.spines["left"].set_visible(False)
        axes.tick_params(axis="y", length=0)
    return figure


def _kinds(found: Mapping[str, Habit], facts: Facts) -> list[Kind]:
    """Columns: slot by slot in the order of the host, blueprints in that of the catalogue."""
    total: Counter[Kind] = Counter()
    for habit in found.values():
        total.update(habit.planted)
    orders = (facts.layout.slots, facts.layout.blueprints) if facts.layout else ((), ())

    def places(kind: Kind) -> list[int]:
        pairs = zip(orders, kind, strict=True)
        return [names.index(name) if name in names else len(names) for names, name in pairs]

    return sorted((kind for kind, _ in total.most_common(MOST_KINDS)), key=places)


def _heat(axes: Axes, found: Mapping[str, Habit], facts: Facts, theme: Theme) -> None:
    kinds = _kinds(found, facts)
    shares = np.array(
        [
            [habit.waited, *(habit.planted[kind] / habit.episodes for kind in kinds)]
            for habit in found.values()
        ]
    )  # [C, 1 + K]
    waited = np.arange(shares.shape[1]) == 0
    for shown, colour in ((~waited, BLUE), (waited, theme.faint)):
        part = np.where(shown, shares, np.nan)
        from_paper = LinearSegmentedColormap.from_list(colour, [theme.paper, colour])
        shades: Look = {"cmap": from_paper, "vmin": 0.0, "vmax": 1.0}
        axes.imshow(part, aspect="auto", interpolation="nearest", **shades)
    size = 7.5 if len(kinds) <= 20 else 6
    for (row, column), share in np.ndenumerate(shares):
        if share >= WORTH_A_NUMBER:
            colour = readable_on(tint(theme.faint if column == 0 else BLUE, share, theme.paper))
            font: Look = {"fontsize": size if share < 0.995 else 0.85 * size, "color": colour}
            axes.text(column, row, f"{100 * share:.0f}", ha="center", va="center", **font)
    axes.set_xticks(range(1 + len(kinds)), ["nothing", *(kind[1] for kind in kinds)], rotation=90)
    axes.set_yticks(range(len(found)), [f"{name} ({h.episodes})" for name, h in found.items()])
    axes.tick_params(axis="x", length=0)
    axes.grid(visible=False)
    axes.spines["bottom"].set_visible(False)
    # Slots as headings over their blueprints, with a line between them.
    axes.axvline(0.5, color=theme.paper, lw=4)
    heading: Look = {"ha": "center", "va": "bottom", "color": theme.ink, "fontsize": 9}
    for slot in dict.fromkeys(slot for slot, _ in kinds):
        columns = [1 + place for place, kind in enumerate(kinds) if kind[0] == slot]
        middle = (columns[0] + columns[-1]) / 2
        axes.text(middle, 1.01, slot, transform=axes.get_xaxis_transform(), **heading)
        axes.axvline(columns[-1] + 0.5, color=theme.paper, lw=2)
    axes.set_title("planted, % of episodes", pad=24)


def _first(axes: Axes, found: Mapping[str, Habit], facts: Facts, theme: Theme) -> None:
    horizon = facts.setting("horizon") or max(
        (epoch for habit in found.values() for epoch in habit.epochs), default=1
    )
    labels = []
    for row, habit in enumerate(found.values()):
        if not habit.epochs:
            labels.append("—")
            continue
        low, middle, high = np.quantile(habit.epochs, (0.1, 0.5, 0.9))
        axes.hlines(row, low, high, color=theme.faint, lw=3, alpha=0.5)
        axes.plot(middle, row, marker="o", color=BLUE, ms=6)
        (slot, blueprint), times = habit.first.most_common(1)[0]
        labels.append(f"{blueprint}@{slot} {100 * times / len(habit.epochs):.0f} %")
    axes.set_xlim(0.5, horizon + 0.5)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=5))
    _beside(axes, "first planting", "epoch", labels, fontsize=8.5)


def _gain(axes: Axes, found: Mapping[str, Habit], theme: Theme) -> None:
    rows = range(len(found))
    gains = [habit.gain for habit in found.values()]
    spread = [habit.spread for habit in found.values()]
    axes.barh(rows, gains, height=0.62, color=[GREEN if gain >= 0 else VERMILION for gain in gains])
    whiskers: Look = {"ecolor": theme.ink, "elinewidth": 1.1, "capsize": 2}
    axes.errorbar(gains, rows, xerr=spread, fmt="none", **whiskers)
    axes.axvline(0.0, color=theme.ink, lw=1.0)
    _beside(axes, "mean net gain", "points", [signed(gain, 1) for gain in gains])


def _beside(axes: Axes, title: str, unit: str, labels: Sequence[str], **font: Any) -> None:
    """A column of figures beside the map, a label for each of its lines to the right."""
    axes.grid(visible=True, axis="x")
    axes.grid(visible=False, axis="y")
    axes.set_yticks(range(len(labels)), labels, **font)
    axes.yaxis.tick_right()
    axes.set_xlabel(unit)
    axes.set_title(title, pad=24)


# --- parameters ----------------------------------------------------------------------------


def gain_by_parameters(facts: Facts, theme: Theme) -> Figure:
    """A small dot an episode, a large one a context's mean; never growing is at the origin."""
    groups: dict[str, list[Row]] = defaultdict(list)
    for row in facts.episodes:
        if row["net_gain"] is not None:
            groups[row["context"]].append(row)
    if not groups:
        raise AbsentError("No episode has ended yet, so no parameters have bought anything")
    looks = appearances(sorted(groups), facts)
    figure = new_figure(max(4.8, 0.21 * len(groups) + 1.2))
    axes = figure.subplots()
    for context, (colour, marker) in looks.items():
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
        for context, (colour, marker) in looks.items()
    ]
    legend_beside(axes, handles=entries, title="context (large: mean)", alignment="left", ncols=1)
    return figure


def appearances(contexts: Sequence[str], facts: Facts) -> dict[str, tuple[str, str]]:
    """Colour and marker: a colour for each family, no pair twice while there are enough."""
    families = sorted({facts.family(context) for context in contexts})
    used: Counter[str] = Counter()
    found = {}
    for context in contexts:
        place = families.index(facts.family(context))
        colour = FAMILY_COLOURS[place % len(FAMILY_COLOURS)]
        found[context] = (colour, FAMILY_MARKERS[used[colour] % len(FAMILY_MARKERS)])
        used[colour] += 1
    return found
