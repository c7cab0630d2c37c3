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
from esper.show.terminal import table_of
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
        table = table_of("run", "suite", "rounds", "envs", "best evaluation", fold=("run", "suite"))
        for run in found:
            table.add_row(*map(_cell, (run.path, *_line(run))))
        Console().print(table)
    if grown:
        table = table_of("run", "model", "epochs", "score", fold=("run", "model"))
        for path in grown:
            table.add_row(*map(_cell, (path, *line_of(path))))
        Console().print(table)


def _line(run: RunFolder) -> tuple[str, ...]:
    """What the list says of a run; one that cannot be read must not hide the others."""
    try:
        config, done = run.config, run.newest()
    except EsperError:
        return ("unreadable", "", "", "")
    rounds = f"{done[0] if done else 0} of {config.rounds}"
    best = best_scores(run.path).get("tamiyo", "")
    return config.suite, rounds, str(config.envs), str(best)


def show_run(command: Show) -> None:
    run = RunFolder.open(command.path)
    config, done, console = run.config, run.newest(), Console()
    console.print(
        f"[bold]{escape(str(run.path))}[/bold]: {done[0] if done else 0} of {config.rounds} "
        f"rounds are checkpointed; suite {escape(config.suite)}, {config.envs} environments"
    )
    title = "evaluations (net gain / scale, validation data)"
    table = table_of("controller", "round", "score, 95 % interval", title=title)
    judged = scores(done)
    for controller, found in judged.items():
        for score in found:
            table.add_row(_cell(controller), str(score.round), str(score))
    console.print(table if judged else "Nothing has been evaluated yet.")
    if lacking := untold(run.path).strip():
        console.print(escape(lacking))
    with suppress(StoreError), RunReader(run.path) as reader:
        for row in reader.each("notes"):
            console.print(escape(printable(f"round {row['round']}: {row['text']}")))
        metrics = reader.query(
            "select name, value from updates where round = (select max(round) from updates) "
            "order by name"
        ).rows
        table = table_of("metric", "value", title="the last update", right=("value",))
        for name, value in metrics:
            table.add_row(name, f"{float('nan') if value is None else value:.4g}")
        if metrics:
            console.print(table)
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
            columns = [escape(name) for name in found.columns]
            table = table_of(*columns, fold=columns)
            for row in found.rows:
                table.add_row(*(_cell(value) for value in row))
            Console().print(table)
        if sql is None and export is None:
            raise EsperError(
                "Nothing was asked",
                fix='use --sql "select kind, count(*) from events group by kind" or --export FILE',
            )


def _cell(value: object) -> str:
    if value is None:
        return ""
    return f"{len(value)} bytes" if isinstance(value, bytes) else escape(printable(str(value)))
