"""The garden in the terminal: contexts, atlas and controllers side by side."""

from functools import partial
from pathlib import Path

from esper import garden
from esper.distributed import Processes
from esper.garden import Atlas, Standing, Suite, find_suite, shipped_atlas
from esper.garden.controller_choice import controller_of
from esper.karn import commands
from esper.leyline.constants import DEFAULT_RENT, RENT_LEVELS
from esper.leyline.errors import DataError, EsperError, require_known
from esper.leyline.settings import NOT_NEGATIVE, require
from esper.show.terminal import flat_estimate, progress, show_table, write_flat
from esper.simic.training.run_processes import init_distributed, require_device
from esper.simic.training.training_runs import load_controller


def show_tasks(command: commands.Tasks) -> None:
    suite = find_suite(command.suite)
    atlas = shipped_atlas(suite)
    known = {} if atlas is None else _facts(atlas)
    headings = ("context", "never grown", "best known", "by", "what it is")
    for group, contexts in suite.groups().items():
        rows = ((c.name, *known.get(c.key, [""] * 3), str(c).partition(": ")[2]) for c in contexts)
        title, what = f"{suite.name}: {group}", headings[-1:]
        show_table(headings, rows, title=title, right=headings[1:3], fold=what, wide=True)
    if atlas is None:
        print(f"Nothing has been measured of {suite.name!r}: esper atlas --suite {command.suite}")


def _facts(atlas: Atlas) -> dict[str, tuple[str, str, str]]:
    """By context: the score of never growing, the best net gain, and the arm that has it."""
    scores, gains = atlas.control.mean(1).tolist(), atlas.best_gains().tolist()
    rows = zip(atlas.contexts, scores, gains, atlas.best(), strict=True)
    return {
        context.key: (
            f"{score:.1f} %",
            "" if arm is None else f"{gain:+.1f}",
            "waiting" if arm is None else str(arm),
        )
        for context, score, gain, arm in rows
    }


def run_atlas(options: commands.MeasureAtlas) -> None:
    suite = find_suite(options.suite)
    folder = options.out or Path(f"atlas-{suite.name}")
    if options.show:
        stored = Atlas.load(folder) if options.out else shipped_atlas(suite)
    else:
        with init_distributed(options.device) as processes:
            stored = _measured(options, suite, folder, processes)
            if processes.rank > 0:
                return
    if stored is None:
        raise DataError(
            f"No atlas of suite {suite.name!r} is shipped",
            fix="measure one, or name a directory with --out",
        )
    _print_atlas(suite, stored)
    if not options.show:
        print(f"Stored in {folder}.")
    # At the default rent by plain names, at the others with the rent behind.
    figures: dict[str, float] = {"contexts": len(stored.contexts), "arms": len(stored.arms)}
    figures["seeds"] = stored.gain.shape[2]
    for rent in RENT_LEVELS:
        suffix = "" if rent == DEFAULT_RENT else f"_rent_{rent:g}"
        figures |= {f"{name}{suffix}": value for name, value in stored.summary(rent).items()}
    write_flat(options.json, figures)


def _measured(
    options: commands.MeasureAtlas, suite: Suite, folder: Path, processes: Processes
) -> Atlas:
    """Measure, and keep what is known as soon as it is."""
    require_device(options.device, "--device")
    shapes = [group[0].host_shape for group in garden.by_shape(suite.training)]
    if len(shapes) > 1:
        given = ", ".join(shapes)
        raise EsperError("An atlas is of hosts of one shape", given=given, fix="split the suite")
    with progress(quiet=processes.rank > 0) as report:
        ground = garden.Playground(options.rows, device=options.device, ranks=processes)
        atlas = garden.measure_atlas(
            suite.training,
            ground,
            epochs=options.epochs,
            seeds=options.seeds,
            progress=partial(report, "episodes"),
        )
        if processes.rank == 0:
            atlas.save(folder)
        if options.schedules:
            said = partial(report, "searching, episodes")
            atlas = garden.search_plans(atlas, ground, progress=said)
            if processes.rank == 0:
                atlas.save(folder)
    return atlas


def _print_atlas(suite: Suite, atlas: Atlas) -> None:
    numbers = ("never grown", "net gain")
    title = f"{suite.name}: the best single seed of each context"
    known = _facts(atlas)
    rows = ((context.name, *known[context.key]) for context in atlas.contexts)
    show_table(("context", *numbers, "best arm"), rows, title=title, right=numbers, wide=True)
    headings = ("rent", "oracle", "best constant", "random", "waiting is best in")
    title = "Suite score, chosen on half the seeds, scored on the others"
    summary = (
        (
            f"{rent:g}",
            f"{found['oracle']:.2f}",
            f"{found['best_constant']:.2f} ({found['best_constant_share']:.0%})",
            f"{found['random']:.2f} ({found['random_share']:.0%})",
            f"{found['wait_optimal_share']:.0%} of contexts",
        )
        for rent, found in ((rent, atlas.summary(rent)) for rent in RENT_LEVELS)
    )
    show_table(headings, summary, title=title, right=headings, wide=True)
    print(f"Best constant at rent {DEFAULT_RENT:g}: {atlas.best_constant()}")
    if atlas.plans is not None:
        print(f"Best constant schedule: {', '.join(map(str, atlas.constant()))}")


def run_evaluation(options: commands.Evaluate) -> None:
    suite = find_suite(options.suite)
    groups = suite.groups()
    require_known("group of contexts", options.group, groups)
    require("--rent", options.rent, NOT_NEGATIVE)
    require_device(options.device, "--device")
    controllers = [
        load_controller(name, device=options.device)
        if Path(name).is_dir()
        else controller_of(name, suite)
        for name in options.controllers
    ]
    with (
        init_distributed(options.device) as processes,
        progress(quiet=options.quiet or processes.rank > 0) as report,
    ):
        results = garden.evaluate(
            controllers,
            groups[options.group],
            garden.Playground(options.rows, device=options.device, ranks=processes),
            seeds=options.seeds,
            file=options.out,
            progress=report,
        )
    if processes.rank > 0:
        return
    lines = garden.standings(results, options.rent)
    print_standings(f"{suite.name}, {options.group} contexts", lines, options.rent)
    write_flat(options.json, standing_figures(lines))


def standing_figures(lines: list[Standing]) -> dict[str, float]:
    figures: dict[str, float] = {}
    for line in lines:
        figures |= flat_estimate(f"{line.controller}.score", line.score)
        figures |= flat_estimate(f"{line.controller}.gain", line.gain)
        for name in ("harmful", "added", "interventions", "rollbacks", "episodes"):
            figures[f"{line.controller}.{name}"] = getattr(line, name)
    return figures


def print_standings(title: str, lines: list[Standing], rent: float) -> None:
    figures = ("score (IQM)", "net gain, points", "harmful", "parameters", "decisions", "rollbacks")
    rows = (
        (
            line.controller,
            f"{line.score:+.2f}",
            f"{line.gain:+.1f}",
            f"{line.harmful:.0%}",
            f"+{line.added:,.0f}",
            f"{line.interventions:.1f}",
            line.rollbacks,
        )
        for line in lines
    )
    name, title = ("controller",), f"{title}; rent {rent:g}; 95 % intervals"
    show_table((*name, *figures), rows, title=title, right=figures, fold=name, wide=True)
