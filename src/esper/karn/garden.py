"""Tables of the garden for the terminal: contexts, atlas, controllers side by side."""

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from rich import box
from rich.console import Console
from rich.table import Table

from esper.garden import (
    Atlas,
    Suite,
    by_shape,
    evaluate,
    find_suite,
    measure_atlas,
    search_plans,
    standings,
)
from esper.garden.atlases import shipped_atlas
from esper.garden.controller_choice import controller_of
from esper.garden.evaluation import Standing
from esper.karn.commands import garden as commands
from esper.karn.progress import progress
from esper.leyline.constants import DEFAULT_RENT
from esper.leyline.constants import RENT_LEVELS as RENTS
from esper.leyline.errors import DataError, EsperError, UnknownNameError
from esper.simic.training.agents import load_controller

WIDTH = 110


def _console() -> Console:
    """Wide enough for the tables, also where output goes to a file."""
    console = Console()
    return Console(width=max(WIDTH, console.width))


def show_tasks(name: str) -> None:
    suite = find_suite(name)
    atlas = shipped_atlas(suite)
    known = {} if atlas is None else _facts(atlas)
    for group, contexts in suite.groups().items():
        table = Table(title=f"{suite.name}: {group}", box=box.SIMPLE)
        for heading in ("context", "never grown", "best known", "by"):
            number = heading in ("never grown", "best known")
            table.add_column(heading, justify="right" if number else "left", no_wrap=True)
        table.add_column("what it is")
        for context in contexts:
            score, gain, arm = known.get(context.key, ("", "", ""))
            _, _, what = str(context).partition(": ")
            table.add_row(context.name, score, gain, arm, what)
        _console().print(table)
    if atlas is None:
        print(f"Nothing has been measured of {suite.name!r}: esper atlas --suite {name}")


def _facts(atlas: Atlas) -> dict[str, tuple[str, str, str]]:
    """By context: the score of never growing, the best net gain, and the arm that has it."""
    gains = atlas.best_gains().tolist()
    scores = atlas.control.mean(1).tolist()
    rows = zip(atlas.contexts, scores, gains, atlas.best(), strict=True)
    return {
        context.key: (
            f"{score:.1f} %",
            "" if arm is None else f"{gain:+.1f}",
            "waiting" if arm is None else str(arm),
        )
        for context, score, gain, arm in rows
    }


def run_atlas(options: commands.Atlas) -> None:
    suite = find_suite(options.suite)
    folder = options.out or Path(f"atlas-{suite.name}")
    if options.show:
        stored = Atlas.load(folder) if options.out else shipped_atlas(suite)
        if stored is None:
            raise DataError(
                f"No atlas of suite {suite.name!r} is shipped",
                fix="measure one, or name a directory with --out",
            )
        atlas = stored
    else:
        require_device(options.device)
        if len(by_shape(suite.training)) > 1:
            raise EsperError(
                "An atlas is of hosts of one shape",
                given=", ".join(group[0].host_shape for group in by_shape(suite.training)),
                fix="split the suite",
            )
        with progress() as report:
            atlas = measure_atlas(
                suite.training,
                epochs=options.epochs,
                seeds=options.seeds,
                rows=options.rows,
                device=options.device,
                progress=lambda done, total: report("episodes", done, total),
            )
            atlas.save(folder)
            if options.schedules:
                atlas = search_plans(
                    atlas,
                    rows=options.rows,
                    device=options.device,
                    progress=lambda done, total: report("searching, episodes", done, total),
                )
                atlas.save(folder)
    _print_atlas(suite, atlas)
    if not options.show:
        print(f"Stored in {folder}.")
    if options.json is not None:
        write_flat(options.json, _atlas_figures(atlas))


def _atlas_figures(atlas: Atlas) -> dict[str, float]:
    """Flat: at the default rent by plain names, at the others with the rent behind."""
    figures: dict[str, float] = {"contexts": len(atlas.contexts), "arms": len(atlas.arms)}
    figures["seeds"] = atlas.gain.shape[2]
    for rent in RENTS:
        suffix = "" if rent == DEFAULT_RENT else f"_rent_{rent:g}"
        figures |= {f"{name}{suffix}": value for name, value in atlas.summary(rent).items()}
    return figures


def _print_atlas(suite: Suite, atlas: Atlas) -> None:
    console = _console()
    table = Table(title=f"{suite.name}: the best single seed of each context", box=box.SIMPLE)
    for heading in ("context", "never grown", "net gain", "best arm"):
        number = heading in ("never grown", "net gain")
        table.add_column(heading, justify="right" if number else "left", no_wrap=True)
    for context in atlas.contexts:
        score, gain, arm = _facts(atlas)[context.key]
        table.add_row(context.name, score, gain, arm)
    console.print(table)
    summary = Table(
        title="Suite score, chosen on half the seeds, scored on the others", box=box.SIMPLE
    )
    for heading in ("rent", "oracle", "best constant", "random", "waiting is best in"):
        summary.add_column(heading, justify="right", no_wrap=True)
    for rent in RENTS:
        found = atlas.summary(rent)
        summary.add_row(
            f"{rent:g}",
            f"{found['oracle']:.2f}",
            f"{found['best_constant']:.2f} ({found['best_constant_share']:.0%})",
            f"{found['random']:.2f} ({found['random_share']:.0%})",
            f"{found['wait_optimal_share']:.0%} of contexts",
        )
    console.print(summary)
    print(f"Best constant at rent {DEFAULT_RENT:g}: {atlas.best_constant()}")
    if atlas.plans is not None:
        print(f"Best constant schedule: {', '.join(map(str, atlas.constant()))}")


def run_evaluation(options: commands.Evaluate) -> None:
    suite = find_suite(options.suite)
    groups = suite.groups()
    if options.group not in groups:
        raise UnknownNameError.of("group of contexts", options.group, groups)
    if options.seeds < 1:
        raise EsperError("Evaluation needs cases", given=f"--seeds {options.seeds}", valid="from 1")
    if not options.rent >= 0:
        raise EsperError("Rent is never negative", given=f"--rent {options.rent:g}", valid="from 0")
    require_device(options.device)
    controllers = [
        load_controller(name, device=options.device)
        if Path(name).is_dir()
        else controller_of(name, suite)
        for name in options.controllers
    ]
    with progress(quiet=options.quiet) as report:
        results = evaluate(
            controllers,
            groups[options.group],
            seeds=options.seeds,
            file=options.out,
            rows=options.rows,
            device=options.device,
            progress=report,
        )
    lines = standings(results, options.rent)
    print_standings(f"{suite.name}, {options.group} contexts", lines, options.rent)
    if options.json is not None:
        write_flat(options.json, standing_figures(lines))


def standing_figures(lines: list[Standing]) -> dict[str, float]:
    figures: dict[str, float] = {}
    for line in lines:
        for name in ("score", "gain"):
            estimate = getattr(line, name)
            figures[f"{line.controller}.{name}"] = estimate.value
            figures[f"{line.controller}.{name}_lo"] = estimate.low
            figures[f"{line.controller}.{name}_hi"] = estimate.high
        for name in ("harmful", "added", "interventions", "rollbacks", "episodes"):
            figures[f"{line.controller}.{name}"] = getattr(line, name)
    return figures


def print_standings(title: str, lines: list[Standing], rent: float) -> None:
    table = Table(title=f"{title}; rent {rent:g}; 95 % intervals", box=box.SIMPLE)
    table.add_column("controller", style="bold", overflow="fold")
    headings = (
        "score (IQM)",
        "net gain, points",
        "harmful",
        "parameters",
        "decisions",
        "rollbacks",
    )
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    for line in lines:
        table.add_row(
            line.controller,
            f"{line.score.value:+.2f} [{line.score.low:+.2f}, {line.score.high:+.2f}]",
            f"{line.gain.value:+.1f} [{line.gain.low:+.1f}, {line.gain.high:+.1f}]",
            f"{line.harmful:.0%}",
            f"+{line.added:,.0f}",
            f"{line.interventions:.1f}",
            str(line.rollbacks),
        )
    _console().print(table)


def require_device(name: str) -> None:
    if name not in ("cpu", "cuda"):
        raise UnknownNameError.of("device", name, ("cpu", "cuda"))
    if name == "cuda" and not torch.cuda.is_available():
        raise EsperError(
            "There is no CUDA device", given="--device cuda", valid="cpu", fix="leave --device out"
        )


def write_flat(path: Path, figures: Mapping[str, float]) -> None:
    try:
        path.write_text(json.dumps(dict(figures), indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise DataError(f"{path} cannot be written", given=error.strerror) from error
