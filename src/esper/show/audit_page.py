"""The page of an audit and its picture: a map of places and blueprints."""

from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
from matplotlib.colors import LinearSegmentedColormap, SymLogNorm, to_hex
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from esper.archive import write_whole
from esper.leyline.errors import DataError
from esper.show import page as pages
from esper.show.audit_facts import COLUMNS, WORTH, Audit, Verdict, named
from esper.show.page import fill, fill_each, sections_of
from esper.show.palette import GREEN, VERMILION
from esper.show.terminal import duration
from esper.show.theme import DARK, LIGHT, Look, Theme, new_figure, readable_on, styled

ROW = 0.32  # inches
HATCHES = {"does not fit there": "///", "over the budget": "...", "not heard": "xx"}
LETTERS = "abcdefgh"  # of columns, in the templates


def figure(facts: Audit, *, dark: bool) -> Figure:
    return styled(partial(heat_map, facts), DARK if dark else LIGHT)


def heat_map(facts: Audit, theme: Theme) -> Figure:
    """Gains by colour, from harm to help; a frame marks what is missing for certain."""
    heard = {(each.slot, each.blueprint): each for each in facts.candidates}
    cells = [[heard.get((place, kind)) for kind in facts.blueprints] for place in facts.places]
    gains = np.array([[np.nan if each is None else each.gain for each in row] for row in cells])
    drawn = new_figure(ROW * len(facts.places) + 1.9)
    axes = drawn.add_subplot()
    most = max(float(np.nanmax(np.abs(gains))), 1e-9)
    norm = SymLogNorm(min(WORTH * facts.guess, most), vmin=-most, vmax=most)
    colours = LinearSegmentedColormap.from_list("gain", [VERMILION, theme.paper, GREEN])
    image = axes.imshow(gains, cmap=colours, norm=norm, aspect="auto")
    empty: Look = {"fc": "none", "ec": theme.faint, "lw": 0.0, "alpha": 0.6}
    framed: Look = {"fill": False, "ec": theme.ink, "lw": 2.0, "zorder": 3}
    marks = {"": Patch(label=str(Verdict.MISSING), **framed)}
    for (row, column), cost in np.ndenumerate(np.array(facts.costs)):
        each, corner = cells[row][column], (column - 0.5, row - 0.5)
        if each is None:
            why = list(HATCHES)[0 if cost < 0 else 2 if facts.affords(int(cost)) else 1]
            marks[why] = Patch(label=why, hatch=HATCHES[why], **empty)
            axes.add_patch(Rectangle(corner, 1, 1, hatch=HATCHES[why], **empty))
            continue
        ink, told = readable_on(to_hex(colours(norm(each.gain)))), f"{each.gain:+.{facts.digits}f}"
        axes.text(column, row, told, color=ink, ha="center", va="center")
        if each.verdict is Verdict.MISSING:
            axes.add_patch(Rectangle(corner, 1, 1, **framed))
    axes.set_xticks(range(len(facts.blueprints)), facts.blueprints, rotation=30, ha="right")
    axes.set_yticks(range(len(facts.places)), facts.places)
    axes.grid(visible=False)
    axes.set_title(f"{facts.model}: by how much a seed lowers the validation loss")
    drawn.colorbar(image, ax=axes, pad=0.01)
    drawn.legend(handles=list(marks.values()), loc="outside lower center", ncols=len(marks))
    return drawn


def write(facts: Audit, file: Path) -> Path:
    """Write the page to this file."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        found = sections_of("audit.toml", {"heat-map": heat_map}, facts)
        lines = [COLUMNS, *(each.cells(facts.digits) for each in facts.candidates)]
        titles, *rows = (dict(zip(LETTERS, line, strict=True)) for line in lines)
        table = fill("candidates", rows=fill_each("candidate", rows), **titles)
        found["candidates"] = replace(found["candidates"], more=table)
        sections = [pages.drawn(section) for section in found.values()]
        said = (f"audit of {facts.model}", f"{facts.headline}.", tiles(facts), sections)
        known: Look = {"cautions": [f"{facts.cost}."], "settings": {"audit": facts.settings}}
        write_whole(file, pages.assembled(*said, **known))
    except OSError as error:
        raise DataError(f"{file} cannot be written", given=error.strerror) from error
    return file


def head(facts: Audit) -> str:
    """What a notebook shows of an audit."""
    first = sections_of("audit.toml", {"heat-map": heat_map}, facts)["map"]
    return pages.inline(f"{facts.headline}.", tiles(facts), first)


def tiles(facts: Audit) -> list[dict[str, str]]:
    """The answer and what it cost."""
    planted = named(facts.combinations[0]) if facts.combinations else "nothing"
    told = {"verdict": str(facts.verdict), "to plant": planted, "time": duration(facts.seconds)}
    told |= {"seeds heard": str(len(facts.candidates)), "cost": f"{facts.spent:.1f} epochs"}
    return [{"what": what, "value": value, "more": ""} for what, value in told.items()]
