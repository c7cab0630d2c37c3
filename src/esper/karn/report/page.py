"""The page: one file that loads nothing, readable by day and by night."""

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from esper.karn.report.facts import Facts, Row, signed
from esper.karn.report.words import cautions, duration, headline

_STYLE = """
:root { color-scheme: light dark; --paper: #ffffff; --ink: #1f2430; --faint: #5f6775;
  --line: #e2e5ea; --card: #f6f7f9; --accent: #0072B2; }
@media (prefers-color-scheme: dark) { :root { --paper: #171a21; --ink: #e6e9ef; --faint: #98a1b0;
  --line: #2c323d; --card: #1f242d; --accent: #56B4E9; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 2.5rem 1.25rem 4rem; max-width: 68rem; background: var(--paper);
  color: var(--ink); font: 16px/1.55 system-ui, "Segoe UI", "DejaVu Sans", sans-serif; }
h1 { margin: 0; font-size: 1rem; font-weight: 600; color: var(--faint); overflow-wrap: anywhere; }
h2 { margin: 3.2rem 0 .4rem; font-size: 1.35rem; line-height: 1.25; }
h3 { margin: 1.6rem 0 .4rem; font-size: 1rem; }
p { margin: .4rem 0; max-width: 46rem; }
.headline { margin: .6rem 0 1.4rem; font-size: 1.45rem; line-height: 1.4; max-width: none; }
.reading, figcaption, .absent { color: var(--faint); }
.absent { padding: .8rem 1rem; border-left: 3px solid var(--line); }
dl.figures { display: grid; grid-template-columns: repeat(auto-fit, minmax(10rem, 1fr));
  gap: .75rem; margin: 0; }
dl.figures div { padding: .75rem .8rem; background: var(--card); border-radius: .5rem; }
dt { color: var(--faint); font-size: .85rem; }
dd { margin: 0; font-size: 1.25rem; font-weight: 600; font-variant-numeric: tabular-nums; }
dd small { display: block; font-size: .8rem; font-weight: 400; color: var(--faint); }
ul.cautions { margin: 1.2rem 0 0; padding-left: 1.2rem; color: var(--faint); max-width: 50rem; }
figure { margin: 1rem 0 1.6rem; }
figure img { display: block; width: 100%; height: auto; }
figcaption { font-size: .9rem; }
nav { margin: 1.6rem 0 0; display: flex; flex-wrap: wrap; gap: .3rem 1.2rem; }
a { color: var(--accent); }
.tables { display: grid; grid-template-columns: repeat(auto-fit, minmax(18rem, 1fr)); gap: 0 2rem; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: .9rem; }
th, td { padding: .28rem .6rem .28rem 0; border-bottom: 1px solid var(--line); text-align: left;
  vertical-align: top; overflow-wrap: anywhere; }
th { font-weight: 400; color: var(--faint); }
td { font-variant-numeric: tabular-nums; }
"""

# Nothing but what is in the file: not even a mistake in it can ask another machine for something.
_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"


@dataclass(frozen=True, kw_only=True)
class Drawn:
    """A picture in both themes."""

    words: str
    light: bytes
    dark: bytes
    caption: str = ""


@dataclass(frozen=True, kw_only=True)
class Part:
    """A section with its pictures drawn."""

    title: str
    reading: str
    pictures: Sequence[Drawn]
    absent: Sequence[str]


def page(facts: Facts, parts: Sequence[Part]) -> str:
    """The whole page as HTML."""
    name = escape(facts.path.resolve().name)
    body = [
        f"<header><h1>Esper · run {name}</h1>",
        f'<p class="headline">{escape(headline(facts))}</p>',
        _figures(facts),
        _list(cautions(facts)),
        _links(parts),
        "</header><main>",
        *(_part(number, part) for number, part in enumerate(parts)),
        _anomalies(facts.anomalies),
        _about(facts),
        "</main>",
    ]
    head = (
        '<meta charset="utf-8"><meta name="viewport" content="width=device-width, '
        f'initial-scale=1"><meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        f"<title>Esper · run {name}</title><style>{_STYLE}</style>"
    )
    return (
        f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body>\n'
        + "\n".join(body)
        + "\n</body></html>\n"
    )


def _figures(facts: Facts) -> str:
    """The few numbers that people look for first."""
    best = facts.best
    tiles = []
    if best is not None:
        tiles.append(("best evaluation", signed(best.value), _interval(best.low, best.high)))
    for name, score in facts.baselines.items():
        tiles.append((name, signed(score.value), _interval(score.low, score.high)))
    planned = facts.setting("rounds")
    tiles += [
        (
            "rounds",
            f"{facts.last_round:,}" + (f" of {planned:,}" if planned else ""),
            f"{facts.played:,} episodes",
        ),
        ("training time", duration(facts.training_seconds), "with evaluations"),
    ]
    listed = "".join(
        f"<div><dt>{escape(what)}</dt><dd>{escape(value)}<small>{escape(more)}</small></dd></div>"
        for what, value, more in tiles
    )
    return f'<dl class="figures">{listed}</dl>'


def _interval(low: float | None, high: float | None) -> str:
    return (
        "no interval" if low is None or high is None else f"95 %: [{signed(low)}, {signed(high)}]"
    )


def _list(sentences: Sequence[str]) -> str:
    if not sentences:
        return ""
    return (
        '<ul class="cautions">'
        + "".join(f"<li>{escape(text)}</li>" for text in sentences)
        + "</ul>"
    )


def _links(parts: Sequence[Part]) -> str:
    links = "".join(
        f'<a href="#part-{number}">{escape(part.title)}</a>' for number, part in enumerate(parts)
    )
    return f'<nav>{links}<a href="#about">Settings and versions</a></nav>'


def _part(number: int, part: Part) -> str:
    pieces = [
        f'<section id="part-{number}"><h2>{escape(part.title)}</h2>',
        f'<p class="reading">{escape(part.reading)}</p>' if part.pictures else "",
        *(_picture(drawn) for drawn in part.pictures),
        *(f'<p class="absent">{escape(text)}</p>' for text in part.absent),
        "</section>",
    ]
    return "".join(pieces)


def _picture(drawn: Drawn) -> str:
    caption = f"<figcaption>{escape(drawn.caption)}</figcaption>" if drawn.caption else ""
    return (
        '<figure><picture><source media="(prefers-color-scheme: dark)" '
        f'srcset="{_embedded(drawn.dark)}"><img alt="{escape(drawn.words)}" '
        f'src="{_embedded(drawn.light)}"></picture>{caption}</figure>'
    )


def _embedded(png: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(png).decode('ascii')}"


def _anomalies(rows: Sequence[Row]) -> str:
    if not rows:
        return ""
    lines = "".join(
        f"<tr><td>{row['round']}</td><td>{escape(str(row['message']))}</td>"
        f"<td>{escape(str(row['advice']))}</td></tr>"
        for row in rows
    )
    return (
        '<section><h3>Anomalies</h3><div class="wide"><table><tr><th>round</th>'
        f"<th>what was seen</th><th>what to do</th></tr>{lines}</table></div></section>"
    )


def _about(facts: Facts) -> str:
    plain = {name: v for name, v in facts.config.items() if not isinstance(v, Mapping)}
    tables: list[tuple[str, Row]] = [("run", plain)] if plain else []
    tables += [(name, v) for name, v in facts.config.items() if isinstance(v, Mapping)]
    versions = facts.about.get("versions")
    known: dict[str, Any] = dict(versions) if isinstance(versions, Mapping) else {}
    if "machine" in facts.about:
        known["machine"] = facts.about["machine"]
    listed = "".join(_table(name, rows) for name, rows in tables)
    absent = "" if tables else '<p class="absent">There is no config.toml.</p>'
    if known:
        listed += _table("versions", known)
    else:
        absent += '<p class="absent">The versions of this run were not recorded.</p>'
    return (
        '<section id="about"><h2>Settings and versions</h2>'
        f'{absent}<div class="tables">{listed}</div></section>'
    )


def _table(name: str, rows: Mapping[str, Any]) -> str:
    lines = "".join(
        f"<tr><th>{escape(str(key))}</th><td>{escape(_value(value))}</td></tr>"
        for key, value in rows.items()
    )
    return f"<div><h3>{escape(name)}</h3><table>{lines}</table></div>"


def _value(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "none"
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {inner}" for key, inner in value.items()) or "none"
    return str(value)
