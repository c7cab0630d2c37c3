"""A page that needs nothing else: one file that loads nothing, its pieces and its sections.

How it looks is in `templates/page.html`, `templates/pieces.html` and `templates/page.css`.
"""

import base64
import math
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined, select_autoescape
from markupsafe import Markup
from matplotlib.figure import Figure

from esper.show import theme as themes
from esper.show.palette import STAGE_COLOURS
from esper.show.run_facts import signed
from esper.show.terminal import duration, listed
from esper.show.theme import DARK, LIGHT, AbsentError, Theme

TEMPLATES = Path(__file__).parent / "templates"
NOTHING = Markup()


@dataclass(frozen=True)
class Picture:
    """A picture that can be drawn in any theme, and as it was painted in two."""

    name: str  # of its file
    words: str  # what it shows, for those who cannot see it
    draw: Callable[[Theme], Figure]
    caption: str = ""
    light: bytes = b""
    dark: bytes = b""


@dataclass(frozen=True)
class Section:
    title: str
    reading: str  # how to read it
    pictures: Sequence[Picture] = ()
    absent: Sequence[str] = ()  # what is not there, and why
    more: Markup = NOTHING  # after the pictures


def in_plain_words(value: Any) -> str:
    """A setting."""
    if isinstance(value, list | tuple):
        return ", ".join(map(in_plain_words, value)) or "none"
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {inner}" for key, inner in value.items()) or "none"
    return str(value)


def spoken_flops(value: float | None) -> str:
    """A large number with its unit: 1.2 G."""
    if value is None:
        return "not counted"
    thousands = min(int(math.log10(max(value, 1.0)) // 3), 6)
    return f"{value / 1000**thousands:.3g} {'kMGTPE'[thousands - 1] if thousands else ''}".strip()


# Whatever is filled into HTML is escaped, unless it is markup already.
_PAGES = Environment(
    loader=FileSystemLoader(TEMPLATES),
    autoescape=select_autoescape(["html"], default_for_string=False),
    trim_blocks=True,
    undefined=StrictUndefined,
)
_PAGES.filters.update(words=in_plain_words, flops=spoken_flops, duration=duration)
_PAGES.filters.update(signed=signed, number=format, listed=listed)
_PAGES.globals["colours"] = STAGE_COLOURS
_PAGES.filters["png"] = lambda painted: base64.b64encode(painted).decode("ascii")


def fill(piece: str, **values: object) -> Markup:
    """One of the pieces of the page with its values."""
    found: Markup = getattr(_PAGES.get_template("pieces.html").module, piece)(**values)
    return found.strip()


def sections_of(
    file: str,
    facts: object,
    charts: Mapping[str, Callable[[Any, Theme], Figure]],
    more: Mapping[str, Markup] = MappingProxyType({}),
) -> dict[str, Section]:
    """The sections that a file beside the code names, their pictures not drawn yet.

    After the pictures of a section stands what `more` has by its name, or a table that the file
    names; where that is nothing, the file says what is not there, or there is no such section.
    """

    def said(text: str) -> str:
        return _PAGES.from_string(text).render(facts=facts).strip()

    found: dict[str, Section] = {}
    for name, has in tomllib.loads((TEMPLATES / file).read_text(encoding="utf-8")).items():
        after = fill(has["table"], facts=facts) if "table" in has else more.get(name)
        absent = "" if after else said(has.get("absent", ""))
        if after != NOTHING or absent:
            charted = has.get("pictures", {}).items()
            pictures = [
                Picture(each, words, partial(charts[each], facts)) for each, words in charted
            ]
            lacking, reading = [absent] if absent else [], said(has["reading"])
            found[name] = Section(has["title"], reading, pictures, lacking, after or NOTHING)
    return found


def sentences_of(file: str, facts: object) -> list[str]:
    """Those of a file beside the code that hold, one to a line."""
    return _PAGES.get_template(f"{file}.txt").render(facts=facts).splitlines()


def table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> Markup:
    """Rows under the names of their columns; nothing where there is no row."""
    lines = list(rows)
    return fill("table", columns=columns, rows=lines) if lines else NOTHING


@dataclass(frozen=True, kw_only=True)
class Page:
    """All that a page says; as text it is HTML, with what was drawn of it."""

    name: str
    headline: str
    tiles: Markup  # the few numbers that people look for first
    sections: Sequence[Section]
    cautions: Sequence[str]
    settings: Mapping[str, Mapping[str, Any]]  # tables, by their names

    def drawn(self) -> "Page":
        return replace(self, sections=[drawn(section) for section in self.sections])

    def __str__(self) -> str:
        return _PAGES.get_template("page.html").render(page=self)

    def inline(self) -> str:
        """Its beginning with the first picture, for a notebook."""
        pictures = drawn(self.sections[0]).pictures
        return _PAGES.get_template("inline.html").render(page=self, pictures=pictures)


def drawn(section: Section) -> Section:
    """The section with its pictures painted; what cannot be drawn says why."""
    pictures, absent = [], list(section.absent)
    for picture in section.pictures:
        try:
            light, dark = (themes.render(picture.draw, theme) for theme in (LIGHT, DARK))
            pictures.append(replace(picture, light=light, dark=dark))
        except AbsentError as reason:
            absent.append(str(reason))
    return replace(section, pictures=pictures, absent=absent)
