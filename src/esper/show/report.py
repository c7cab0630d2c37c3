"""Reports: what a run came to, as pictures and one page that needs nothing else."""

from pathlib import Path

from esper.leyline.errors import DataError, EsperError

__all__ = ["write_report"]

FOLDER, PAGE = "report", "index.html"


def write_report(run: Path, out: Path | None = None) -> Path:
    """Write what a run came to, as far as it is, and return the page.

    `run` is a run's directory, which is only read (also while it is trained); `out` is where to
    write, by default `report` in it. Pictures of an older report there are replaced.
    """
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise EsperError(
            "Reports need matplotlib, which is not installed", fix="pip install 'esper-ml[report]'"
        ) from error
    from esper.archive import write_whole
    from esper.show.page import page
    from esper.show.run_facts import read_facts
    from esper.show.sections import contents, drawn

    facts = read_facts(Path(run))
    sections = [drawn(section) for section in contents(facts)]
    folder = facts.path / FOLDER if out is None else Path(out)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for old in folder.glob("timeline-*.png"):  # of episodes that are not the chosen ones now
            old.unlink()
        for picture in (picture for section in sections for picture in section.pictures):
            (folder / f"{picture.name}.png").write_bytes(picture.light)
        write_whole(folder / PAGE, page(facts, sections))
    except OSError as error:
        raise DataError(
            f"The report cannot be written to {folder}", given=error.strerror, fix="name --out"
        ) from error
    return folder / PAGE
