"""The page of a training run: what it says in sentences, its figures, tables and pictures.

How to read the pictures is said in `templates/sections.toml`.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import cycle, product
from statistics import fmean, median

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import PercentFormatter

from esper.show import palette
from esper.show.page import Markup, Page, Picture, Section, fill, sections_of, sentences_of, table
from esper.show.run_facts import Array, Facts, Row, Shares, Story, signed
from esper.show.theme import AbsentError, Look, Theme, legend_beside, new_figure, over_rounds
from esper.show.timelines import timeline, title

TIMELINES = "timelines"  # the section whose pictures are episodes
CURVE, SHARES_PANEL = 4.8, 2.15  # inches
MOST_BINS = 80  # of rounds; more is noise
OF_PLANTINGS = ("slot", "blueprint", "blend")
HEALTH = ("kl", "explained_variance", "entropy", "clip_fraction", "gradient_norms")


def page(facts: Facts) -> Page:
    """The whole page, its pictures not drawn yet."""
    return Page(
        name=f"run {facts.path.resolve().name}",
        headline=facts.headline,
        tiles=fill("training_tiles", facts=facts),
        sections=contents(facts),
        cautions=[
            *sentences_of("cautions-training", facts),
            *(f"Round {number}: {text}" for number, text in facts.notes),
        ],
        settings=_settings(facts),
    )


def contents(facts: Facts) -> list[Section]:
    """All sections, their pictures not drawn yet."""
    more = {"contexts": _contexts(facts), "health": _health(facts)}
    sections = sections_of("sections.toml", facts, CHARTS, more)
    episodes = [_episode(story) for story in facts.stories]
    told = replace(sections[TIMELINES], pictures=episodes)
    return [*(sections | {TIMELINES: told}).values()]


def _contexts(facts: Facts) -> Markup:
    """What was planted in each context in the last rounds, and what came of it; most gain first."""
    first: dict[tuple[int, int], Row] = {}  # plantings, by episode
    for row in facts.plantings:
        first.setdefault((row["round"], row["env"]), row)
    rows = []
    for context, episodes in facts.by_context().items():
        grown = [first[key] for row in episodes if (key := (row["round"], row["env"])) in first]
        gain = fmean(row["net_gain"] for row in episodes)
        kinds = Counter(f"{row['blueprint'] or '?'} at {row['slot']}" for row in grown)
        usual = [f"{kind} ({times / len(grown):.0%})" for kind, times in kinds.most_common(1)]
        when = f"{median(row['step'] + 1 for row in grown):g}" if grown else "—"
        waited = f"{1 - len(grown) / len(episodes):.0%}"
        cells = (context, len(episodes), signed(gain, 1), waited, *(usual or ["—"]), when)
        rows.append((gain, cells))
    titles = ("context", "episodes", "mean net gain", "planted nothing", "first seed", "in epoch")
    return table(titles, (cells for _, cells in sorted(rows, reverse=True)))


def _health(facts: Facts) -> Markup:
    """Metrics of updates: how they began, how they are, and the extremes between."""
    rows = []
    for name, curve in sorted(facts.updates.items()):
        values = [value for value in curve.values() if value == value]
        if values and set(name.split(".")) & {*HEALTH}:
            numbers = (values[0], values[-1], min(values), median(values), max(values))
            rows.append((name, *(f"{number:.3g}" for number in numbers)))
    return table(("metric", "first", "last", "lowest", "median", "highest"), rows)


def _episode(story: Story) -> Picture:
    row = story.episode
    caption = (
        f"Round {row['round']}, environment {row['env']}, case {row['seed']}; "
        f"{row['interventions'] or 0} decisions other than waiting."
    )
    if story.failure is not None:
        step, reason = story.failure
        caption += f" Rolled back in epoch {step + 1}: {reason}."
    return Picture(f"timeline-{story.kind}", title(story), partial(timeline, story), caption)


def _settings(facts: Facts) -> dict[str, Row]:
    """Tables of settings and versions, as far as they are known."""
    inner = {name: v for name, v in facts.config.items() if isinstance(v, Mapping)}
    plain = {name: v for name, v in facts.config.items() if name not in inner}
    known = {name: facts.about[name] for name in ("machine",) if name in facts.about}
    versions = facts.about.get("versions")
    known |= versions if isinstance(versions, Mapping) else {}
    return {"run": plain, **inner, "versions": known}


# --- the learning curve ---------------------------------------------------------------------------


def learning_curve(facts: Facts, theme: Theme) -> Figure:
    """Score over rounds; training returns are in the same unit, and faint."""
    known = ((each["round"], each["mean_return"]) for each in facts.rounds)
    played = {number: mean for number, mean in known if mean is not None}
    if not played and not facts.learned:
        raise AbsentError("No episode has ended yet, so there is no learning curve")
    figure = new_figure(CURVE)
    axes = figure.subplots()
    rounds = [*played, *(score.round for score in facts.learned)]
    over_rounds(axes, min(rounds), max(rounds))
    _learned(axes, facts, theme)
    _baselines(axes, facts, theme)
    axes.autoscale(enable=not (facts.learned or facts.baselines), axis="y")  # now by scores alone
    if played:
        faint: Look = {"color": theme.faint, "alpha": 0.6, "lw": 1.1, "zorder": 1}
        faint["marker"] = "." if len(played) < 3 else ""
        said = "mean return of training episodes"
        axes.plot([*played], [*played.values()], label=said, **faint)
    axes.set_ylabel("score: net gain / scale")
    if envs := facts.config.get("envs"):
        axes.set_xlabel(f"round ({envs} training episodes each)")
    legend_beside(axes)
    return figure


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
        of_what = "plantings" if head in OF_PLANTINGS else "where it mattered"
        axes.set_title(f"{head}: share of {'all decisions' if axes is rows[0] else of_what}")
        over_rounds(axes, first, last, label=axes is rows[-1])
        axes.set_xlim(first - 0.5, last + 0.5)
    return figure


def _stack(axes: Axes, shares: Shares, colours: Mapping[str, str], theme: Theme) -> None:
    """Bars rather than slopes: a round is one number, and may be missing."""
    edges, heights = binned(shares)
    bottom = np.zeros(len(edges) - 1)
    for name, height in zip(shares[0][1], heights, strict=True):
        look: Look = {"color": colours[name], "edgecolor": theme.paper, "lw": 0.4, "label": name}
        axes.bar(edges[:-1], height, np.diff(edges), bottom, align="edge", **look)
        bottom += height
    axes.set_ylim(0, 1)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes.set_yticks([0, 0.5, 1])
    axes.grid(visible=False)
    legend_beside(axes, reverse=True, labelspacing=0.25)


def binned(shares: Shares) -> tuple[Array, Array]:
    """Edges of bins of rounds [bins + 1], and the mean shares within [actions, bins].

    Where no round has any such decision they are 0.
    """
    rounds = np.array([number for number, _ in shares])
    width = -(-(rounds[-1] - rounds[0] + 1) // MOST_BINS)
    edges = np.append(np.arange(rounds[0], rounds[-1] + 1, width), rounds[-1] + 1) - 0.5
    sums = [
        np.histogram(rounds, edges, weights=[found[name] for _, found in shares])[0]
        for name in shares[0][1]
    ]
    return edges, np.array(sums) / np.maximum(np.histogram(rounds, edges)[0], 1)


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
    kinds = product(palette.CONTEXT_MARKERS, palette.MANY)
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


CHARTS: Mapping[str, Callable[[Facts, Theme], Figure]] = {  # by name of their pictures
    "learning-curve": learning_curve,
    "parameters": gain_by_parameters,
    "actions": action_shares,
}
