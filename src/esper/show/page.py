"""A page that needs nothing else: one file that loads nothing, its pieces and its sections.

How it looks is in `templates/page.html`, the pieces of the page, and `templates/page.css`.
"""

import base64
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from html import escape
from pathlib import Path
from string import Template
from typing import Any, NamedTuple

from matplotlib.figure import Figure

from esper.show import theme as themes
from esper.show.theme import DARK, LIGHT, AbsentError, Theme


class Markup(str):
    """HTML already; whatever else is filled into a piece of the page is escaped."""

    __slots__ = ()


NOTHING = Markup()


class Tile(NamedTuple):
    """One of the few numbers that people look for first."""

    what: str
    value: str
    more: str = ""


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


def template(name: str) -> str:
    """The text of a file beside the code."""
    return (Path(__file__).parent / "templates" / name).read_text(encoding="utf-8")


def sections_of(
    file: str,
    facts: object,
    charts: Mapping[str, Callable[[Any, Theme], Figure]],
    more: Mapping[str, Markup],
    **known: object,
) -> dict[str, Section]:
    """The sections that a file beside the code names, their pictures not drawn yet.

    `more`: what stands after the pictures of a section, by its name; where that is nothing, the
    file says what is not there, or there is no such section.
    """
    return {
        name: Section(
            said["title"],
            said["reading"].format_map(known),
            [
                Picture(chart, words, partial(charts[chart], facts))
                for chart, words in said.get("pictures", {}).items()
            ],
            [said["absent"]] if more.get(name) == NOTHING else [],
            more.get(name, NOTHING),
        )
        for name, said in tomllib.loads(template(file)).items()
        if more.get(name) != NOTHING or "absent" in said
    }


def cautions_of(kind: str, holds: Mapping[str, object], **known: object) -> list[str]:
    """Those sentences of a kind of page that hold, with what is known."""
    sentences = tomllib.loads(template("cautions.toml"))[kind]
    return [sentences[name].format_map(known) for name, true in holds.items() if true]


PIECES = {
    name: Template(piece)
    for name, piece in re.findall(
        r'<template id="(\w+)">\n?(.*?)</template>', template("page.html"), re.S
    )
}


def fill(piece: str, **values: object) -> Markup:
    """One of the pieces of the page with its values."""
    safe = {
        name: value if isinstance(value, Markup) else escape(str(value))
        for name, value in values.items()
    }
    return Markup(PIECES[piece].substitute(safe))


def fill_each(piece: str, rows: Iterable[object]) -> Markup:
    """The piece once for every row of values, or for every text."""
    each = (row if isinstance(row, Mapping) else {"text": row} for row in rows)
    return Markup("".join(fill(piece, **values) for values in each))


def table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> Markup:
    """Rows under the names of their columns; nothing where there is no row."""
    lines = fill_each("row", ({"cells": fill_each("cell", row)} for row in rows))
    return fill("table", titles=fill_each("title", columns), rows=lines) if lines else NOTHING


@dataclass(frozen=True, kw_only=True)
class Page:
    """All that a page says; as text it is HTML, with what was drawn of it."""

    name: str
    headline: str
    tiles: Sequence[Tile]
    sections: Sequence[Section]
    cautions: Sequence[str]
    settings: Mapping[str, Mapping[str, Any]]  # tables, by their names

    def drawn(self) -> "Page":
        return replace(self, sections=[drawn(section) for section in self.sections])

    def __str__(self) -> str:
        sentences = fill_each("caution", self.cautions)
        numbered = [{"number": n, **_parts(section)} for n, section in enumerate(self.sections)]
        tables = (
            {
                "name": name,
                "rows": fill_each("setting", ({"key": k, "value": _value(rows[k])} for k in rows)),
            }
            for name, rows in self.settings.items()
            if rows
        )
        return fill(
            "page",
            name=self.name,
            style=Markup(template("page.css")),
            headline=self.headline,
            tiles=self._tiles,
            cautions=fill("cautions", sentences=sentences) if sentences else "",
            links=fill_each("link", numbered),
            sections=fill_each("section", numbered),
            settings=fill_each("settings", tables),
        )

    def inline(self) -> str:
        """Its beginning with the first picture, for a notebook."""
        picture = Markup("".join(map(pictured, drawn(self.sections[0]).pictures)))
        return fill("inline", headline=self.headline, tiles=self._tiles, picture=picture)

    @property
    def _tiles(self) -> Markup:
        return fill_each("tile", (tile._asdict() for tile in self.tiles))


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


def pictured(picture: Picture) -> Markup:
    """A painted picture as a part of a page, light or dark as its reader likes it."""
    return fill(
        "picture",
        words=picture.words,
        light=base64.b64encode(picture.light).decode("ascii"),
        dark=base64.b64encode(picture.dark).decode("ascii"),
        caption=fill_each("caption", [picture.caption] if picture.caption else []),
    )


def _parts(section: Section) -> dict[str, str]:
    """What is filled into a section and the link to it."""
    shown = section.pictures or section.more
    return {
        "title": section.title,
        "reading": fill_each("reading", [section.reading] if shown else []),
        "pictures": Markup("".join(map(pictured, section.pictures))),
        "absent": fill_each("absent", section.absent),
        "more": section.more,
    }


def _value(value: Any) -> str:
    if isinstance(value, list | tuple):
        return ", ".join(map(_value, value)) or "none"
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {inner}" for key, inner in value.items()) or "none"
    return str(value)
