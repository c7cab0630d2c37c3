"""Writing a report: pictures as PNG, and the page that holds them all."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from esper.karn.report.facts import read_facts
from esper.karn.report.page import Drawn, Part, page
from esper.leyline.errors import DataError, EsperError

if TYPE_CHECKING:
    from esper.karn.report.contents import Section

FOLDER, PAGE = "report", "index.html"


def write_report(run: Path, out: Path | None = None) -> Path:
    """Write what a run came to, as far as it is, and return the page.

    `run` is a run's directory, which is only read (also while it is trained); `out` is where to
    write, by default `report` in it. Pictures of an older report there are replaced.
    """
    _require_matplotlib()
    from esper.karn.report.contents import contents

    facts = read_facts(Path(run))
    parts, pictures = _drawn(contents(facts))
    folder = facts.path / FOLDER if out is None else Path(out)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for old in folder.glob("timeline-*.png"):  # of episodes that are not the chosen ones now
            old.unlink()
        for name, png in pictures.items():
            (folder / f"{name}.png").write_bytes(png)
        place = folder / PAGE
        temporary = folder / f".{PAGE}"
        temporary.write_text(page(facts, parts), encoding="utf-8")
        temporary.replace(place)
    except OSError as error:
        raise DataError(
            f"The report cannot be written to {folder}", given=error.strerror, fix="name --out"
        ) from error
    return place


def _drawn(sections: Sequence["Section"]) -> tuple[list[Part], dict[str, bytes]]:
    """Sections with their pictures, and the light ones by name; what cannot be drawn says why."""
    from esper.karn.report.theme import DARK, LIGHT, AbsentError, render

    parts: list[Part] = []
    files: dict[str, bytes] = {}
    for section in sections:
        drawn, absent = [], list(section.absent)
        for picture in section.pictures:
            try:
                light, dark = render(picture.draw, LIGHT), render(picture.draw, DARK)
            except AbsentError as reason:
                absent.append(str(reason))
                continue
            files[picture.name] = light
            drawn.append(
                Drawn(words=picture.words, light=light, dark=dark, caption=picture.caption)
            )
        parts.append(
            Part(title=section.title, reading=section.reading, pictures=drawn, absent=absent)
        )
    return parts, files


def _require_matplotlib() -> None:
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise EsperError(
            "Reports need matplotlib, which is not installed", fix="pip install 'esper-ml[report]'"
        ) from error
