"""Runs for the terminal: which there are, what one came to, and any question about it."""

from contextlib import suppress

from rich.console import Console
from rich.markup import escape

from esper.api import GrowthFolder
from esper.karn.commands import Events, Runs, Show, WriteReport
from esper.karn.grow_commands import line_of
from esper.karn.train_commands import best_scores, untold
from esper.leyline.errors import EsperError, printable
from esper.nissa import RunReader, StoreError
from esper.show import write_report
from esper.show.run_facts import scores
from esper.show.terminal import show_table
from esper.simic.training import RunError, RunFolder


def list_runs(command: Runs) -> None:
    folder, found = command.folder, []
    paths = sorted(folder.iterdir()) if folder.is_dir() else []
    for path in paths:
        try:
            found.append(RunFolder.open(path))
        except RunError:
            continue
    grown = [path for path in paths if GrowthFolder(path).holds_run]
    if not found and not grown:
        raise RunError(f"There are no runs in {folder}", fix="train one: esper train demo")
    if found:
        columns = ["run", "suite", "rounds", "envs", "best evaluation"]
        show_table(columns, ((run.path, *_line(run)) for run in found), fold=("run", "suite"))
    if grown:
        columns = ["run", "model", "epochs", "score"]
        show_table(columns, ((path, *line_of(path)) for path in grown), fold=("run", "model"))


def _line(run: RunFolder) -> tuple[object, ...]:
    """What the list says of a run; one that cannot be read must not hide the others."""
    try:
        config, done = run.config, run.newest()
    except EsperError:
        return ("unreadable", "", "", "")
    rounds = f"{done[0] if done else 0} of {config.rounds}"
    return config.suite, rounds, config.envs, best_scores(run.path).get("tamiyo")


def show_run(command: Show) -> None:
    run = RunFolder.open(command.path)
    config, done, console = run.config, run.newest(), Console()
    console.print(
        f"[bold]{escape(str(run.path))}[/bold]: {done[0] if done else 0} of {config.rounds} "
        f"rounds are checkpointed; suite {escape(config.suite)}, {config.envs} environments"
    )
    title = "evaluations (net gain / scale, validation data)"
    rows = [(name, each.round, each) for name, found in scores(done).items() for each in found]
    if rows:
        show_table(("controller", "round", "score, 95 % interval"), rows, title=title)
    else:
        console.print("Nothing has been evaluated yet.")
    if lacking := untold(run.path).strip():
        console.print(escape(lacking))
    with suppress(StoreError), RunReader(run.path) as reader:
        for row in reader.each("notes"):
            console.print(escape(printable(f"round {row['round']}: {row['text']}")))
        metrics = reader.query(
            "select name, value from updates where round = (select max(round) from updates) "
            "order by name"
        ).rows
        figures = [(name, "nan" if value is None else f"{value:.4g}") for name, value in metrics]
        if figures:
            show_table(("metric", "value"), figures, title="the last update", right=("value",))
        anomalies = list(reader.each("anomalies"))
        for row in anomalies:
            word = "[red]anomaly[/red]" if row["raised"] else "[green]over[/green]"
            said = escape(printable(f"{row['message']} {row['advice']}"))
            console.print(f"round {row['round']}: {word}: {said}")
        if not anomalies:
            console.print("No anomalies.")


def report_run(command: WriteReport) -> None:
    RunFolder.open(command.path)
    print(f"Report: {write_report(command.path, command.out)}")


def ask_run(command: Events) -> None:
    if not GrowthFolder(command.path).holds_run:
        RunFolder.open(command.path)
    sql, export = command.sql, command.export
    with RunReader(command.path) as reader:
        if export is not None:
            print(f"{reader.export(export)} events written to {export}")
        if sql is not None:
            found = reader.query(sql)
            show_table(found.columns, found.rows, fold=found.columns)
        if sql is None and export is None:
            raise EsperError(
                "Nothing was asked",
                fix='use --sql "select kind, count(*) from events group by kind" or --export FILE',
            )
