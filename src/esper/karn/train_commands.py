"""Training runs on the command line: start, resume, progress and results."""

import itertools
import platform
import sys
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from esper.api.run_records import versions
from esper.distributed import Processes
from esper.garden import find_suite
from esper.garden.controller_choice import controller_of
from esper.garden.own_code import allow_code
from esper.garden.statistics import Estimate
from esper.karn.commands import RUNS, Resume, Train
from esper.karn.watch_commands import start_watching
from esper.leyline.stages import SeedStage
from esper.nissa import RunReader, StoreError, require_sinks
from esper.show.run_facts import Score, read_facts, scores
from esper.show.terminal import duration, flat_estimate, progress, require_writable, write_flat
from esper.simic.training import GracefulShutdown, RoundReport, RunFolder, TrainConfig, train_run
from esper.simic.training.run_processes import (
    init_distributed,
    is_launched,
    is_restart_of,
    launch,
    mark_started,
    require_device,
)


def start_run(command: Train) -> RunFolder:
    """Create a run folder and train, in all processes that were launched together."""
    config: TrainConfig = command.config
    with init_distributed(config.device) as processes:
        if is_launched() and processes.size != config.processes:
            config = replace(config, processes=processes.size)  # torchrun sets the number
        # Rank 0 creates the folder, and the other processes open it.
        path = ""
        if processes.rank == 0:
            path = str(_find_or_create_run(command, config))
        run = RunFolder.open(processes.all_gather_object(path)[0])
        _train(run, command, processes)
    return run


def _find_or_create_run(command: Train, config: TrainConfig) -> Path:
    """Return the folder of the run that this launch has started before, or of a new run."""
    if command.out is not None and is_restart_of(RunFolder(command.out)):
        return command.out
    require_device(config.device, count=1 if is_launched() else config.processes)
    require_sinks(config.sinks)
    require_writable(command.json)
    suite = find_suite(config.suite)
    for name in config.evaluation.baselines:
        controller_of(name, suite)  # raises an error for an unknown name
    # Besides its settings, the numbers of a run depend on these facts.
    facts = {
        "versions": versions(),
        "machine": f"{platform.system()} {platform.machine()}",
        "suite": suite.to_dict(),
        "data": suite.fingerprints(),
    }
    path = command.out or RunFolder.next_in(RUNS, Path(config.suite).stem)
    if command.watch:
        start_watching(path)
    run = RunFolder.create(path, config, facts)
    mark_started(run)
    return run.path


def resume_run(command: Resume) -> None:
    """Continue a run from its last checkpoint."""
    run = RunFolder.open(command.path)
    with init_distributed(run.config.device) as processes:
        is_unfinished = processes.rank > 0 or _prepare_resume(run, command)
        if processes.all_gather_object(is_unfinished)[0]:
            _train(run, command, processes)


def _prepare_resume(run: RunFolder, command: Resume) -> bool:
    """Report what has changed since the run was started; return False if it is finished."""
    require_writable(command.json)
    checkpoint = run.newest()
    if checkpoint is not None and checkpoint.round >= run.config.rounds:
        if command.json is not None:
            write_flat(command.json, figures_of(run.path))
        print(
            f"{run.path} is finished: {checkpoint.round} rounds. "
            f"Its report: esper report {run.path}"
        )
        return False
    allow_code(run.code, run.path, quiet=command.quiet)
    if command.watch:
        start_watching(run.path)
    current, earlier = versions(), run.facts.get("versions", {})
    changed = [
        f"{name} {earlier[name]} -> {current[name]}"
        for name in earlier
        if earlier[name] != current[name]
    ]
    if changed:
        print(
            f"Versions have changed ({', '.join(changed)}): the numbers may differ from those "
            "of an uninterrupted run.",
            file=sys.stderr,
        )
    return True


def _train(run: RunFolder, command: Train | Resume, processes: Processes) -> None:
    """Train in this process, or launch the processes of the run."""
    quiet, size = command.quiet, run.config.processes
    if size > 1 and not is_launched():
        stop = GracefulShutdown(say=not quiet)
        code = launch(train_launched, run.path, quiet, command.json, size=size, stop=stop)
    else:
        code = _train_here(run, quiet, command.json, processes)
    if code:
        raise SystemExit(code)


def train_launched(path: Path, quiet: bool, json: Path | None) -> int:
    """Train in a process that `launch` started; return its exit code."""
    run = RunFolder.open(path)
    with init_distributed(run.config.device) as processes:
        return _train_here(run, quiet, json, processes)


def _train_here(run: RunFolder, quiet: bool, json: Path | None, processes: Processes) -> int:
    """Train in this process, print the progress, and return the exit code."""
    config = run.config
    quiet = quiet or processes.rank > 0
    stop = GracefulShutdown(say=not quiet)
    completed = max(run.rounds(), default=0)
    if not quiet:
        print(
            f"{run.path}: rounds {completed + 1} to {config.rounds} of {config.envs} episodes "
            f"each, suite {config.suite}, {processes.size} process(es) on {config.device}. "
            "Ctrl-C stops after the round; nothing is lost.",
            flush=True,
        )
    start = time.monotonic()
    rounds_here = itertools.count(1)  # of this process: the mean time of a round
    with ExitStack() as progress_bars:
        show_progress = progress_bars.enter_context(progress(quiet=quiet))

        def on_round(report: RoundReport) -> None:
            progress_bars.close()  # a bar would be drawn over the lines
            seconds_per_round = (time.monotonic() - start) / next(rounds_here)
            if not quiet:
                seconds_left = (config.rounds - report.round) * seconds_per_round
                print(round_line(report, config, seconds_left), flush=True)

        finished = train_run(
            run, on_round=on_round, progress=show_progress, stop=stop, processes=processes
        )
    if not finished:
        rounds = run.rounds()
        when = f"after round {rounds[-1]}" if rounds else "before the first round"
        if processes.rank == 0:
            print(f"Stopped {when}. Continue with: esper resume {run.path}", flush=True)
        return 128 + (stop.signal or 0)
    if json is not None and processes.rank == 0:
        write_flat(json, figures_of(run.path))
    if not quiet:
        headline = read_facts(run.path).headline
        print(f"{headline}{describe_missing_telemetry(run.path)}", flush=True)
    return 0


# --- results ----------------------------------------------------------------------------------


def best_scores(path: Path) -> dict[str, Score]:
    """Return the best score of every controller over all contexts."""
    history = scores(RunFolder(path).newest())
    return {
        name: max(controller_scores, key=lambda score: score.value)
        for name, controller_scores in history.items()
    }


def describe_missing_telemetry(path: Path) -> str:
    """Return a sentence about missing telemetry, or an empty text if the telemetry is complete."""
    checkpoint = RunFolder(path).newest()
    if checkpoint is None:
        return ""
    try:
        with RunReader(path) as reader:
            last_stored = reader.last_commit() or 0
    except StoreError as error:
        return f" The telemetry cannot be read: {error}"
    if last_stored < checkpoint.round:
        return f" The telemetry has rounds up to {last_stored} only."
    return ""


def figures_of(path: Path) -> dict[str, float]:
    """Return the results of a run as one flat object."""
    figures: dict[str, float] = {}
    for name, score in best_scores(path).items():
        low, high = score.interval or (score.value, score.value)
        figures |= flat_estimate(f"{name}.score", Estimate(score.value, low, high))
        figures[f"{name}.round"] = score.round
        figures[f"{name}.episodes"] = score.episodes or 0
    checkpoint = RunFolder(path).newest()
    figures["rounds"] = 0 if checkpoint is None else checkpoint.round
    figures["telemetry.whole"] = float(not describe_missing_telemetry(path))
    return figures


# --- progress -----------------------------------------------------------------------------------


def round_line(report: RoundReport, config: TrainConfig, seconds_left: float) -> str:
    """Return a line about a round for the terminal."""
    play, learn = report.seconds["play"], report.seconds["learn"]
    steps_per_second = config.envs * config.horizon / max(1e-9, play + learn)
    standard_error = float(report.returns.std()) / max(1, len(report.returns)) ** 0.5
    fossilized = ", ".join(
        f"{slot} {counts[SeedStage.FOSSILIZED]}" for slot, counts in report.stages.items()
    )
    parts = [
        f"round {report.round}/{config.rounds}",
        f"return {float(report.returns.mean()):+.2f} ± {1.96 * standard_error:.2f}",
    ]
    if report.evaluation is not None:
        parts.append(f"evaluation {report.evaluation.mean:+.2f}")
    parts += [
        f"{steps_per_second:,.0f} steps/s (play {play:.1f} s, learn {learn:.1f} s)",
        f"fossilized seeds: {fossilized}",
        f"{duration(seconds_left)} left",
    ]
    parts += [f"ANOMALY {anomaly}" for anomaly in report.anomalies]
    return " · ".join(parts)
