"""Runs for the terminal: which there are, what one came to, and any question about it."""

from contextlib import suppress
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from esper.api import GrowthFolder, read_report
from esper.karn.commands import Events, Runs, Show, WriteReport
from esper.karn.train_commands import best_scores, describe_missing_telemetry
from esper.leyline.errors import EsperError, printable
from esper.nissa import RunReader, StoreError
from esper.show import write_report
from esper.show.report import FOLDER
from esper.show.run_facts import scores
from esper.show.terminal import show_table
from esper.simic.training import RunError, RunFolder


def list_runs(command: Runs) -> None:
    folder = command.folder
    found = ((path, _line(path)) for path in (sorted(folder.iterdir()) if folder.is_dir() else ()))
    rows = [(path, *line) for path, line in found if line]
    if not rows:
        raise RunError(f"There are no runs in {folder}", fix="train one: esper train demo")
    columns = ("run", "suite or model", "done", "score")
    show_table(columns, rows, fold=columns[:2])


def _line(path: Path) -> tuple[object, ...]:
    """What the list says of a run, nothing of what is none; a damaged one must not hide others."""
    run = RunFolder(path)
    try:
        if GrowthFolder(path).holds_run:
            report = read_report(path)
            score = "" if report.latest_score is None else f"{report.latest_score:.2f}"
            model, epochs = Path(report.origin.get("model", "")).name, len(report.epochs)
            return model, f"{epochs} of {report.planned} epochs", score
        if run.holds_run:
            done = (run.newest() or (0,))[0]
            best = best_scores(path).get("tamiyo")
            return run.config.suite, f"{done} of {run.config.rounds} rounds", best
    except EsperError:
        return ("unreadable", "", "")
    return ()


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
    if lacking := describe_missing_telemetry(run.path).strip():
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
    """Its page; of a network that grew neither model nor data are needed."""
    if GrowthFolder(command.path).holds_run:
        page = read_report(command.path).write(command.out or command.path / FOLDER)
    else:
        page = write_report(RunFolder.open(command.path).path, command.out)
    print(f"Report: {page}")


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
