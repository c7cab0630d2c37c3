"""Runs of `esper train`: new ones and old ones, their progress, and how they ended."""

import itertools
import platform
import sys
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from esper.api.run_records import versions
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
from esper.simic.agent.processes import Processes
from esper.simic.training import RoundReport, RunFolder, Stopping, TrainConfig, train_run
from esper.simic.training.run_processes import (
    begins,
    goes_on,
    is_launched,
    joined,
    launch,
    require_device,
)


def start_run(command: Train) -> RunFolder:
    """Make a run directory and train; one for all processes that were launched together."""
    config: TrainConfig = command.config
    with joined(config.device) as processes:
        if is_launched() and processes.size != config.processes:
            config = replace(config, processes=processes.size)  # as many as there are
        made = command.out is not None and goes_on(RunFolder(command.out))
        path = "" if processes.rank else str(command.out if made else _created(command, config))
        run = RunFolder.open(processes.each(path)[0])
        _train(run, command, processes)
    return run


def _created(command: Train, config: TrainConfig) -> Path:
    require_device(config.device, count=1 if is_launched() else config.processes)
    require_sinks(config.sinks)
    require_writable(command.json)
    suite = find_suite(config.suite)
    for name in config.evaluation.baselines:
        controller_of(name, suite)  # refuses a name that there is not
    facts = {  # what a run's numbers depend on beside its settings
        "versions": versions(),
        "machine": f"{platform.system()} {platform.machine()}",
        "suite": suite.to_dict(),
        "data": suite.fingerprints(),
    }
    path = command.out or RunFolder.next_in(RUNS, Path(config.suite).stem)
    if command.watch:
        start_watching(path)
    begins(run := RunFolder.create(path, config, facts))
    return run.path


def resume_run(command: Resume) -> None:
    """Go on from the last checkpoint."""
    run = RunFolder.open(command.path)
    with joined(run.config.device) as processes:
        if processes.each(processes.rank > 0 or _is_to_go_on(run, command))[0]:
            _train(run, command, processes)


def _is_to_go_on(run: RunFolder, command: Resume) -> bool:
    """Is it unfinished? Tells what has changed since."""
    require_writable(command.json)
    done = run.newest()
    if done is not None and done[0] >= run.config.rounds:
        if command.json is not None:
            write_flat(command.json, figures_of(run.path))
        print(f"{run.path} is finished: {done[0]} rounds. Its report: esper report {run.path}")
        return False
    allow_code(run.code, run.path, quiet=command.quiet)
    if command.watch:
        start_watching(run.path)
    now, then = versions(), run.facts.get("versions", {})
    changed = [f"{name} {then[name]} -> {now[name]}" for name in then if then[name] != now[name]]
    if changed:
        text = "from here on the numbers may be others than without the interruption"
        print(f"Versions have changed ({', '.join(changed)}): {text}.", file=sys.stderr)
    return True


def _train(run: RunFolder, command: Train | Resume, processes: Processes) -> None:
    """Train here, or in the processes that the run is for."""
    quiet, size = command.quiet, run.config.processes
    if size > 1 and not is_launched():
        stop = Stopping(say=not quiet)
        code = launch(train_launched, run.path, quiet, command.json, size=size, stop=stop)
    else:
        code = _trained(run, quiet, command.json, processes)
    if code:
        raise SystemExit(code)


def train_launched(path: Path, quiet: bool, json: Path | None) -> int:
    """The part of a process that `launch` started; its exit code."""
    run = RunFolder.open(path)
    with joined(run.config.device) as processes:
        return _trained(run, quiet, json, processes)


def _trained(run: RunFolder, quiet: bool, json: Path | None, processes: Processes) -> int:
    config, quiet = run.config, quiet or processes.rank > 0
    stop, done, began = Stopping(say=not quiet), (run.rounds() or [0])[-1], time.monotonic()
    if not quiet:
        print(
            f"{run.path}: rounds {done + 1} to {config.rounds} of {config.envs} episodes each, "
            f"suite {config.suite}, {processes.size} process(es) on {config.device}. "
            "Ctrl-C stops after the round; nothing is lost.",
            flush=True,
        )
    with ExitStack() as bars:
        tell = bars.enter_context(progress(quiet=quiet))

        played = itertools.count(1)  # from a damaged checkpoint some rounds are played again

        def listen(report: RoundReport) -> None:
            bars.close()  # which would be drawn over the lines
            each = (time.monotonic() - began) / next(played)
            if not quiet:
                print(round_line(report, config, (config.rounds - report.round) * each), flush=True)

        finished = train_run(run, listener=listen, tell=tell, stop=stop, processes=processes)
    if not finished:
        rounds = run.rounds()
        when = f"after round {rounds[-1]}" if rounds else "before the first round"
        if processes.rank == 0:
            print(f"Stopped {when}. Go on with: esper resume {run.path}", flush=True)
        return 128 + (stop.signal or 0)
    if json is not None and processes.rank == 0:
        write_flat(json, figures_of(run.path))
    if not quiet:
        print(f"{read_facts(run.path).headline}{untold(run.path)}", flush=True)
    return 0


# --- what came of it ------------------------------------------------------------------------


def best_scores(path: Path) -> dict[str, Score]:
    """By controller, over all contexts; of the learner the best round's."""
    kept = RunFolder(path).newest()
    return {name: max(each, key=lambda s: s.value) for name, each in scores(kept).items()}


def untold(path: Path) -> str:
    """What the telemetry of a run lacks, in a sentence; nothing where it is whole."""
    done = RunFolder(path).newest()
    if done is None:
        return ""
    try:
        with RunReader(path) as reader:
            told = reader.last_commit() or 0
    except StoreError as error:
        return f" The telemetry cannot be read: {error}"
    return f" The telemetry has rounds up to {told} only." if told < done[0] else ""


def figures_of(path: Path) -> dict[str, float]:
    """The run in numbers, flat."""
    figures: dict[str, float] = {}
    for name, score in best_scores(path).items():
        estimate = Estimate(score.value, *(score.interval or (score.value, score.value)))
        figures |= flat_estimate(f"{name}.score", estimate)
        figures |= {f"{name}.round": score.round, f"{name}.episodes": score.episodes or 0}
    done = RunFolder(path).newest()
    figures |= {"rounds": done[0] if done else 0, "telemetry.whole": float(not untold(path))}
    return figures


# --- progress -----------------------------------------------------------------------------------


def round_line(report: RoundReport, config: TrainConfig, left: float) -> str:
    """A plain line for a round, with the seconds that are left."""
    spent = report.seconds
    steps = config.envs * config.horizon / max(1e-9, spent["play"] + spent["learn"])
    error = float(report.returns.std()) / max(1, len(report.returns)) ** 0.5
    kept = (f"{n} {counts[SeedStage.FOSSILIZED]}" for n, counts in report.stages.items())
    facts = [
        f"round {report.round}/{config.rounds}",
        f"return {float(report.returns.mean()):+.2f} ± {1.96 * error:.2f}",
        f"{steps:,.0f} steps/s (play {spent['play']:.1f} s, learn {spent['learn']:.1f} s)",
        f"seeds kept: {', '.join(kept)}",
        f"{duration(left)} left",
    ]
    if report.judgement is not None:
        facts.insert(2, f"evaluation {report.judgement.mean:+.2f}")
    return " · ".join([*facts, *(f"ANOMALY {anomaly}" for anomaly in report.anomalies)])
