"""The page of a report: one file that loads nothing, and what it says in sentences.

How it looks is in `templates/page.html`, the pieces of the page, and `templates/page.css`.
"""

import base64
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from string import Template
from typing import Any

from matplotlib.figure import Figure

from esper.show.run_facts import Facts, Row, Score, signed
from esper.show.theme import Theme


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
    reading: str  # how to read its pictures
    pictures: Sequence[Picture]
    absent: Sequence[str] = ()  # what is not there, and why


class Markup(str):
    """HTML already; whatever else is filled into a piece of the page is escaped."""

    __slots__ = ()


def template(name: str) -> str:
    """The text of a file beside the code."""
    return (Path(__file__).parent / "templates" / name).read_text(encoding="utf-8")


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


def fill_each(piece: str, rows: Iterable[Mapping[str, object]]) -> Markup:
    """The piece once for every row of values."""
    return Markup("".join(fill(piece, **row) for row in rows))


def fill_texts(piece: str, texts: Iterable[str]) -> Markup:
    return fill_each(piece, ({"text": text} for text in texts))


def page(facts: Facts, sections: Sequence[Section]) -> str:
    """The whole page as HTML."""
    sentences = fill_texts("caution", cautions(facts))
    anomalies = fill_each("anomaly", facts.anomalies)
    absent, settings = _settings(facts)
    numbered = [{"number": n, **_parts(section)} for n, section in enumerate(sections)]
    return fill(
        "page",
        name=facts.path.resolve().name,
        style=Markup(template("page.css")),
        headline=headline(facts),
        tiles=fill_each("tile", _tiles(facts)),
        cautions=fill("cautions", sentences=sentences) if sentences else "",
        links=fill_each("link", numbered),
        sections=fill_each("section", numbered),
        attribution=_attribution(facts.attribution),
        anomalies=fill("anomalies", rows=anomalies) if anomalies else "",
        absent=fill_texts("absent", absent),
        settings=settings,
    )


def _tiles(facts: Facts) -> list[dict[str, str]]:
    """The few numbers that people look for first."""
    best, planned = facts.best, facts.setting("rounds")
    scores = {} if best is None else {"best evaluation": best}
    tiles = [
        {
            "what": name,
            "value": signed(score.value),
            "more": f"95 %: {score.spoken_interval}" if score.interval else "no interval",
        }
        for name, score in (scores | dict(facts.baselines)).items()
    ]
    rounds = f"{facts.last_round:,}" + (f" of {planned:,}" if planned else "")
    time = duration(facts.training_seconds)
    return [
        *tiles,
        {"what": "rounds", "value": rounds, "more": f"{facts.played:,} episodes"},
        {"what": "training time", "value": time, "more": "with evaluations"},
    ]


def _parts(section: Section) -> dict[str, str]:
    """What is filled into a section and the link to it."""
    pictures = (
        {
            "words": picture.words,
            "light": base64.b64encode(picture.light).decode("ascii"),
            "dark": base64.b64encode(picture.dark).decode("ascii"),
            "caption": fill_texts("caption", [picture.caption] if picture.caption else []),
        }
        for picture in section.pictures
    )
    return {
        "title": section.title,
        "reading": fill_texts("reading", [section.reading] if section.pictures else []),
        "pictures": fill_each("picture", pictures),
        "absent": fill_texts("absent", section.absent),
    }


def _attribution(seeds: Sequence[Row]) -> Markup | str:
    """What each seed of the best episode was worth; nothing if that was not found out."""
    if not seeds:
        return ""
    figures = ("score", "shapley", "left_out")
    rows = [{**row, **{name: signed(row[name]) for name in figures}} for row in seeds]
    return fill("attribution", **rows[0], rows=fill_each("attributed", rows))


def _settings(facts: Facts) -> tuple[list[str], Markup]:
    """What is not known, and tables of settings and versions."""
    inner = {name: v for name, v in facts.config.items() if isinstance(v, Mapping)}
    plain = {name: v for name, v in facts.config.items() if name not in inner}
    tables: dict[str, Row] = ({"run": plain} if plain else {}) | inner
    absent = [] if tables else ["There is no config.toml."]
    versions = facts.about.get("versions")
    known: dict[str, Any] = dict(versions) if isinstance(versions, Mapping) else {}
    if "machine" in facts.about:
        known["machine"] = facts.about["machine"]
    if known:
        tables["versions"] = known
    else:
        absent.append("The versions of this run were not recorded.")
    rows = (
        {
            "name": name,
            "rows": fill_each("setting", ({"key": k, "value": _value(v)} for k, v in rows.items())),
        }
        for name, rows in tables.items()
    )
    return absent, fill_each("settings", rows)


def _value(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "none"
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {inner}" for key, inner in value.items()) or "none"
    return str(value)


# --- sentences ------------------------------------------------------------------------------


def headline(facts: Facts) -> str:
    """What was learned, with its figures."""
    rounds = "1 round" if facts.last_round == 1 else f"{facts.last_round:,} rounds"
    time = "" if facts.training_seconds is None else f" and {duration(facts.training_seconds)}"
    done = f"After {facts.played:,} episodes in {rounds}{time},"
    best = facts.best
    if best is None:
        said = f"{done} the controller has not been evaluated yet."
        if not facts.played:
            said = "Nothing has been played yet."
        others = [f"{_article(name)} {score}" for name, score in facts.baselines.items()]
        if others:
            said += f" To compare with: {_listed(others)}; never growing is 0."
        return said
    compared = [
        f"{_relation(best, score)} {_article(name)} ({score})"
        for name, score in facts.baselines.items()
    ]
    compared.append(f"{_relation(best, Score(0, 0.0, (0.0, 0.0)))} never growing (0)")
    return f"{done} Tamiyo scores {best} at its best, in round {best.round}: {_listed(compared)}."


def cautions(facts: Facts) -> list[str]:
    """What a reader should know before believing the figures, and what is missing."""
    found = []
    if len(facts.learned) > 1:
        last = facts.learned[-1]
        found.append(
            f"The best evaluation is chosen from {len(facts.learned)} by the very figure that is "
            f"shown, which flatters it a little; the latest is {last} (round {last.round})."
        )
    if facts.best is not None and facts.best.interval is None:
        found.append(
            "There are no intervals: with one case of each context nothing is known about the "
            "spread. Set evaluation.seeds to 2 or more."
        )
    if not facts.baselines:
        found.append("No baseline was evaluated, so there is only never growing to compare with.")
    planned = facts.setting("rounds")
    if isinstance(planned, int) and facts.last_round < planned:
        found.append(f"The run is not finished: {facts.last_round} of {planned} rounds so far.")
    if facts.rolled_back:
        found.append(
            f"{facts.rolled_back:,} of {facts.played:,} episodes failed and were rolled back."
        )
    if facts.resumed_after:
        rounds = ", ".join(map(str, facts.resumed_after))
        found.append(f"The run was resumed after round {rounds}.")
    if facts.dropped:
        lost = ", ".join(f"{count:,} of {what}" for what, count in facts.dropped.items())
        found.append(f"Telemetry lost events on the way: {lost}.")
    if facts.played and not facts.updates:
        found.append("Episodes were recorded but no update, so part of the telemetry is missing.")
    envs = facts.setting("envs")
    short = [each.round for each in facts.rounds if 0 < each.episodes < (envs or 0)]
    if isinstance(envs, int) and short:
        found.append(
            f"In {len(short)} of {facts.last_round} rounds there are fewer episodes than the "
            f"{envs} environments: the last may still be played; otherwise telemetry is missing."
        )
    found += [f"Round {number}: {text}" for number, text in facts.notes]
    return found


def duration(seconds: float | None) -> str:
    if seconds is None:
        return "not recorded"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def _relation(best: Score, other: Score) -> str:
    """What the intervals allow to say."""
    if best.interval is None or other.interval is None:
        return "more than" if best.value > other.value else "not more than"
    if best.interval[0] > other.interval[1]:
        return "clearly above"
    return "clearly below" if best.interval[1] < other.interval[0] else "not distinguishable from"


def _article(name: str) -> str:
    return {"random": "random decisions", "heuristic": "the heuristic"}.get(name, name)


def _listed(parts: list[str]) -> str:
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"
