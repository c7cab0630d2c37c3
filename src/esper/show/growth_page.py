"""The page of a run of `grow`: what it says in sentences, its figures, tables and pictures."""

from collections.abc import Iterable
from itertools import cycle
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from esper.show.growth_facts import Report
from esper.show.page import Page, fill, sections_of, sentences_of
from esper.show.palette import BLUE, GREEN, GREY, MANY
from esper.show.theme import AbsentError, Look, Theme, legend_beside, new_figure
from esper.show.timelines import ROW, draw_slots, shown_slots

Numbers = Iterable[float]
SCORE, SMALL = 2.4, 1.7  # inches
_DASHED, _DOTTED = (0, (4, 1.6)), (0, (1, 1.6))


def page(facts: Report) -> Page:
    """The whole page, its pictures not drawn yet."""
    return Page(
        name=f"run {facts.name}",
        headline=" ".join(sentences_of("headline-growth", facts)),
        tiles=fill("growth_tiles", facts=facts),
        sections=[*sections_of("growth.toml", facts, {"growth": growth}).values()],
        cautions=sentences_of("cautions-growth", facts),
        settings={"run": facts.settings, "versions": facts.versions},
    )


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
    epochs, score = facts.curve("number"), facts.curve("score")
    for life in measured:
        known, look = life.contributions, {"color": colours[life.name]}
        without = [score[number - 1] - worth for number, worth in known.items()]
        _line(panels[0], f"without {life.name}", known, without, lw=1.2, **look)
        _line(panels[2], life.name, known, known.values(), **look)
    if measured:
        panels[2].axhline(0.0, color=theme.ink, lw=1.0, alpha=0.7)
        panels[2].set_title("contribution of each seed, points")
    _scores(panels[0], facts, theme)
    panels[0].set_title(f"{facts.score_name}, validation data, %")
    _line(panels[1], "training", epochs, facts.curve("train_loss"), color=GREY)
    _line(panels[1], "validation", epochs, facts.curve("val_loss"), color=BLUE)
    panels[1].set_title("loss")
    for axes in panels[:-1]:
        legend_beside(axes)
        axes.tick_params(labelbottom=False)
    draw_slots(panels[-1], story, slots, theme)
    return figure


def _line(axes: Axes, label: str, at: Numbers, values: Numbers, **look: Any) -> None:
    """Numbers over epochs, as dots where they are too few for a line."""
    epochs, numbers = [*at], [*values]
    axes.plot(epochs, numbers, label=label, marker="." if len(numbers) < 3 else "", **look)


def _scores(axes: Axes, facts: Report, theme: Theme) -> None:
    """Of the network as it is, with only what is permanent, before and after training."""
    epochs, score, committed = facts.curve("number"), facts.curve("score"), facts.curve("committed")
    _line(axes, "network as it is", epochs, score, color=BLUE, zorder=3)
    if np.isfinite(committed).any() and not np.array_equal(committed, score, equal_nan=True):
        _line(axes, "what is permanent", epochs, committed, color=GREEN, ls=_DASHED, zorder=4)
    if "score" in facts.before:
        look: Look = {"color": theme.faint, "ls": _DOTTED, "lw": 1.2, "label": "before training"}
        axes.axhline(facts.before["score"], **look)
    if facts.after:
        star: Look = {"marker": "*", "ms": 11, "ls": "none", "color": theme.ink, "clip_on": False}
        axes.plot(epochs[-1] + 0.5, facts.after["score"], label="exported network", **star)
