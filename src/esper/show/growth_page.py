"""The page of a run of `grow`: what it says in sentences, its figures, tables and pictures."""

import math
from dataclasses import replace
from itertools import cycle

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, MaxNLocator

from esper.show.growth_facts import Report, SeedLife
from esper.show.model_drawing import drawing
from esper.show.page import Markup, Page, Section, Tile, cautions_of, sections_of, table
from esper.show.palette import BLUE, GREEN, GREY, MANY, ORANGE, PURPLE, SKY
from esper.show.terminal import duration, listed
from esper.show.theme import AbsentError, Look, Theme, legend_beside, new_figure
from esper.show.timelines import ROW, draw_slots, shown_slots

SCORE, SMALL = 2.4, 1.7  # inches
PHASES = {"train": BLUE, "measure": SKY, "decide": ORANGE}
_DASHED, _DOTTED = (0, (4, 1.6)), (0, (1, 1.6))
EMPTY = {"drawing": "The parts of this model were not recorded.", "seeds": "Nothing was planted."}
EMPTY["decisions"] = "Nothing was decided but to wait."


def contents(facts: Report) -> list[Section]:
    """All sections, their pictures not drawn yet."""
    more = {"drawing": drawing(facts), "seeds": _seeds(facts), "decisions": _decisions(facts)}
    sections = sections_of("growth.toml", {"growth": growth, "costs": costs}, facts)
    return [
        replace(section, more=more[name], absent=[] if more[name] else [EMPTY[name]])
        if name in more
        else section
        for name, section in sections.items()
    ]


def page(facts: Report) -> Page:
    """The whole page, its pictures not drawn yet."""
    return Page(
        name=f"run {facts.name}",
        headline=headline(facts),
        tiles=tiles(facts),
        sections=contents(facts),
        cautions=cautions(facts),
        settings={"run": facts.settings} | ({"versions": facts.versions} if facts.versions else {}),
    )


def tiles(facts: Report) -> list[Tile]:
    """The few numbers that people look for first."""
    score, before = facts.latest_score, facts.before.get("score")
    found = []
    if score is not None:
        untrained = "" if before is None else f"before training {before:.2f} %"
        found.append(Tile(facts.score_name, f"{score:.2f} %", untrained))
    if "test_score" in facts.after:
        test = f"{facts.after['test_score']:.2f} %"
        found.append(Tile("on test data", test, "which nothing looked at"))
    added = f"{facts.host_params:,} + {facts.added:,}"
    planted = f"of {len(facts.seeds)} planted" if facts.seeds else "none was planted"
    spent = duration(sum(facts.seconds.values())) if facts.seconds else "not recorded"
    return [
        *found,
        Tile("parameters", added, f"{facts.share:+.1f} %, {facts.limit}"),
        Tile("seeds kept", str(len(facts.grown)), planted),
        Tile("time", spent, facts.where),
        Tile("FLOPs of training", spoken_flops(facts.flops), "matrix products"),
    ]


def headline(facts: Report) -> str:
    """What grew, and what the network came to."""
    kept = [seed.name for seed in facts.grown]
    done = len(facts.epochs)
    epochs = f"{done} epochs" if done == facts.planned else f"{done} of {facts.planned} epochs"
    if not done:
        return "Nothing has been trained yet."
    grew = f"{listed(kept)} grew into the network" if kept else "nothing grew for good"
    cost = f" ({facts.added:,} parameters, {facts.share:+.1f} %)" if kept else ""
    network = "The exported network" if facts.after else "So far the network"
    before = f" ({facts.before['score']:.2f} % before training)" if facts.before else ""
    score = f"{facts.latest_score:.2f} %{before}"
    return f"In {epochs} {grew}{cost}. {network} has {facts.score_name} {score}."


def cautions(facts: Report) -> list[str]:
    """What a reader should know before believing the figures, and what is missing."""
    holds = {
        "unfinished": len(facts.epochs) < facts.planned,
        "untested": facts.epochs and "test_score" not in facts.after,
        "contributions": facts.grown,
    }
    return cautions_of("growth", holds, facts=facts, epochs=len(facts.epochs))


def _seeds(facts: Report) -> Markup:
    """Every seed that ever lived."""
    columns = ("seed", "slot", "parameters", "planted after epoch", "what became of it")
    rows = (
        (life.blueprint, life.slot, f"{life.params:,}", life.planted, life.course, life.worth)
        for life in facts.seeds
    )
    return table((*columns, "contribution"), rows)


def _decisions(facts: Report) -> Markup:
    """What was decided after which epoch, what passed with time, and why that was possible."""
    rows = (
        (
            epoch.number,
            "; ".join(epoch.news),
            "; ".join(dict.fromkeys(reason for *_, reason in epoch.changes if reason)) or "—",
        )
        for epoch in facts.epochs
        if epoch.news
    )
    return table(("after epoch", "what", "what the gates saw"), rows)


# --- how it grew ----------------------------------------------------------------------------


def growth(facts: Report, theme: Theme) -> Figure:
    """Score, losses and contributions above, slots below, on the same axis of epochs."""
    if not facts.epochs:
        raise AbsentError("No epoch has ended yet")
    story, lives = facts.story, facts.seeds
    slots = shown_slots(story)
    measured = [life for life in lives if life.contribution is not None]
    heights = [SCORE, SMALL, *([SMALL] if measured else []), ROW * max(len(slots), 1) + 0.2]
    figure = new_figure(sum(heights) + 0.45 * len(heights) + 0.4)
    panels = list(figure.subplots(len(heights), 1, sharex=True, height_ratios=heights))
    colours = dict(zip((life.name for life in lives), cycle(MANY), strict=False))
    _score(panels[0], facts, measured, colours, theme)
    _losses(panels[1], facts)
    if measured:
        _contributions(panels[2], measured, colours, theme)
    draw_slots(panels[-1], story, slots, theme)
    for axes in panels[:-1]:
        axes.tick_params(labelbottom=False)
    return figure


def _score(
    axes: Axes, facts: Report, lives: list[SeedLife], colours: dict[str, str], theme: Theme
) -> None:
    """As it is, with only what is permanent, and without each seed."""
    epochs, score, committed = facts.curve("number"), facts.curve("score"), facts.curve("committed")
    dot: Look = {"marker": "." if len(epochs) < 3 else ""}
    for life in lives:
        known = life.contributions
        without = [score[number - 1] - worth for number, worth in known.items()]
        look: Look = {"color": colours[life.name], "lw": 1.2}
        axes.plot(list(known), without, label=f"without {life.name}", **look, **dot)
    axes.plot(epochs, score, color=BLUE, label="network as it is", zorder=3, **dot)
    if np.isfinite(committed).any() and not np.array_equal(committed, score, equal_nan=True):
        look = {"color": GREEN, "ls": _DASHED, "label": "what is permanent"}
        axes.plot(epochs, committed, zorder=4, **look, **dot)
    if "score" in facts.before:
        look = {"color": theme.faint, "ls": _DOTTED, "lw": 1.2, "label": "before training"}
        axes.axhline(facts.before["score"], **look)
    if facts.after:
        star: Look = {"marker": "*", "ms": 11, "ls": "none", "color": theme.ink, "clip_on": False}
        axes.plot(epochs[-1] + 0.5, facts.after["score"], label="exported network", **star)
    axes.set_title(f"{facts.score_name}, validation data, %")
    legend_beside(axes)


def _losses(axes: Axes, facts: Report) -> None:
    dot: Look = {"marker": "." if len(facts.epochs) < 3 else ""}
    axes.plot(facts.curve("number"), facts.curve("train_loss"), color=GREY, label="training", **dot)
    axes.plot(facts.curve("number"), facts.curve("val_loss"), color=BLUE, label="validation", **dot)
    axes.set_title("loss")
    legend_beside(axes)


def _contributions(
    axes: Axes, lives: list[SeedLife], colours: dict[str, str], theme: Theme
) -> None:
    """What the score loses without each seed."""
    for life in lives:
        known = life.contributions
        look: Look = {"color": colours[life.name], "marker": "." if len(known) < 3 else ""}
        axes.plot(list(known), list(known.values()), label=life.name, **look)
    axes.axhline(0.0, color=theme.ink, lw=1.0, alpha=0.7)
    axes.set_title("contribution of each seed, points")
    legend_beside(axes)


# --- cost ----------------------------------------------------------------------------------


def costs(facts: Report, theme: Theme) -> Figure:
    """Seconds of every epoch, phase upon phase; and its floating-point operations."""
    if not facts.seconds and facts.flops is None:
        raise AbsentError("What this run cost was not recorded")
    figure = new_figure(2.7)
    left, right = figure.subplots(1, 2)
    epochs, bottom = facts.curve("number"), np.zeros(len(facts.epochs))
    for phase in facts.seconds:
        heights = np.array([epoch.seconds.get(phase, 0.0) for epoch in facts.epochs])
        colour = PHASES.get(phase, PURPLE)
        left.bar(epochs, heights, bottom=bottom, width=0.9, color=colour, label=phase)
        bottom += heights
    left.set_title("seconds of an epoch")
    if facts.seconds:
        left.legend(loc="upper right", ncols=3, bbox_to_anchor=(1.0, 1.17), borderaxespad=0.0)
    flops = np.nan_to_num(facts.curve("flops"))
    right.bar(epochs, flops, width=0.9, color=PURPLE)
    right.set_title("training, floating-point operations of an epoch")
    right.yaxis.set_major_formatter(EngFormatter(sep=" "))
    if facts.flops is None:
        right.set_yticks([])
        right.text(0.5, 0.5, "not counted", transform=right.transAxes, ha="center")
    for axes in (left, right):
        axes.set_xlabel("epoch")
        axes.set_xlim(0.4, len(epochs) + 0.6)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8, min_n_ticks=1))
    return figure


def spoken_flops(value: float | None) -> str:
    """A large number with its unit: 1.2 G."""
    if value is None:
        return "not counted"
    thousands = min(int(math.log10(max(value, 1.0)) // 3), 6)
    return f"{value / 1000**thousands:.3g} {'kMGTPE'[thousands - 1] if thousands else ''}".strip()
