"""Training as people see it: a new run or an old one, its progress, and how it ended."""

import json as json_module
import platform
import sys
import time
from collections.abc import Mapping
from contextlib import ExitStack
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table

from esper import __version__
from esper.garden import find_suite
from esper.garden.controller_choice import controller_of
from esper.karn.commands.training import RUNS
from esper.karn.progress import progress
from esper.leyline.errors import DataError
from esper.leyline.stages import SeedStage
from esper.nissa import RunReader
from esper.simic.training import (
    RoundReport,
    RunError,
    RunFolder,
    Stopping,
    TrainConfig,
    train_run,
)
from esper.simic.training.launch import require_device

SHOWN_STAGES = (
    SeedStage.DORMANT,
    SeedStage.TRAINING,
    SeedStage.BLENDING,
    SeedStage.HOLDING,
    SeedStage.FOSSILIZED,
)


def start_run(
    config: TrainConfig, out: Path | None, *, quiet: bool = False, json: Path | None = None
) -> RunFolder:
    """Make a run directory and train."""
    require_device(config)
    _require_writable(json)
    for name in config.evaluation.baselines:
        controller_of(name, find_suite(config.suite))  # refuses a name that there is not
    facts = facts_of(config)
    try:
        run = RunFolder.create(out or _next_folder(config), config, facts)
    except OSError as error:
        raise RunError(f"{error.filename} cannot be made", given=error.strerror) from error
    _train(run, quiet=quiet, json=json)
    return run


def resume_run(path: Path, *, quiet: bool = False, json: Path | None = None) -> None:
    """Go on from the last checkpoint."""
    run = RunFolder.open(path)
    _require_writable(json)
    done = run.rounds()
    if done and done[-1] >= run.config.rounds:
        _write_figures(run, json)
        print(f"{run.path} is finished: {done[-1]} rounds. Its report: esper report {run.path}")
        return
    now, then = versions(), run.facts.get("versions", {})
    changed = [f"{name} {then[name]} -> {now[name]}" for name in then if then[name] != now[name]]
    if changed:
        text = "from here on the numbers may be others than without the interruption"
        print(f"Versions have changed ({', '.join(changed)}): {text}.", file=sys.stderr)
    _train(run, quiet=quiet, json=json)


def versions() -> dict[str, str]:
    """Of all that numbers depend on."""
    found = {"esper": __version__, "python": platform.python_version()}
    return found | {name: version(name) for name in ("torch", "numpy", "safetensors")}


def facts_of(config: TrainConfig) -> dict[str, Any]:
    """What a run's numbers depend on beside its settings."""
    suite = find_suite(config.suite)
    return {
        "versions": versions(),
        "machine": f"{platform.system()} {platform.machine()}",
        "suite": suite.to_dict(),
        "data": {
            str(source): source.load().fingerprint()
            for context in suite.training
            for source in (context.source, context.drift)
            if source is not None
        },
    }


def _require_writable(file: Path | None) -> None:
    """Say at once that a file cannot be written, not after hours."""
    if file is not None and (file.is_dir() or not file.parent.is_dir()):
        raise DataError(f"{file} cannot be written", valid="a file in a directory that exists")


def _write_figures(run: RunFolder, file: Path | None) -> None:
    if file is not None:
        text = json_module.dumps(figures_of(run.path), indent=1) + "\n"
        file.write_text(text, encoding="utf-8")


def _next_folder(config: TrainConfig) -> Path:
    """A name that is not taken: the suite and a number."""
    stem = Path(config.suite).stem
    number = 1
    while (RUNS / f"{stem}-{number}").exists():
        number += 1
    return RUNS / f"{stem}-{number}"


def _train(run: RunFolder, *, quiet: bool, json: Path | None) -> None:
    config, stop = run.config, Stopping(say=not quiet)
    if not quiet:
        first = (run.rounds() or [0])[-1]
        print(
            f"{run.path}: rounds {first + 1} to {config.rounds} of {config.envs} episodes each, "
            f"suite {config.suite}, {config.processes} process(es) on {config.device}. "
            "Ctrl-C stops after the round; nothing is lost.",
            flush=True,
        )
    view = _view(config, quiet)
    with view, ExitStack() as bars:
        tell = bars.enter_context(progress(quiet=quiet))

        def listen(report: RoundReport) -> None:
            bars.close()  # two displays at once would overwrite each other
            view.show(report)

        finished = train_run(run, listener=listen, tell=tell, stop=stop)
    if not finished:
        done = run.rounds()
        when = f"after round {done[-1]}" if done else "before the first round"
        print(f"Stopped {when}. Go on with: esper resume {run.path}", flush=True)
        raise SystemExit(128 + (stop.signal or 0))
    _write_figures(run, json)
    if not quiet:
        print(sentence_of(run.path))


def figures_of(path: Path) -> dict[str, float]:
    """The run in numbers, flat."""
    with RunReader(path) as reader:
        figures: dict[str, float] = {}
        for name, line in latest_evaluations(reader).items():
            figures |= {f"{name}.{key}": value for key, value in line.items()}
        rounds = reader.rounds()
        figures["rounds"] = len([each for each in rounds if each.round > 0])
    return figures


def latest_evaluations(reader: RunReader) -> dict[str, Mapping[str, float]]:
    """By controller: its figure over all contexts; of the learner the best round's."""
    found: dict[str, Mapping[str, float]] = {}
    table = reader.query(
        "select controller, round, score, low, high, episodes from evaluations "
        "where context = 'all' order by round"
    )
    for controller, round_, score, low, high, episodes in table.rows:
        line = {
            "round": float(round_),
            "score": float(score),
            "score_lo": float(low),
            "score_hi": float(high),
            "episodes": float(episodes),
        }
        if controller not in found or line["score"] > found[controller]["score"]:
            found[controller] = line
    return found


def sentence_of(path: Path) -> str:
    """What a run came to, in one sentence."""
    with RunReader(path) as reader:
        found = latest_evaluations(reader)
    learned = found.pop("tamiyo", None)
    if learned is None:
        return f"{path} is finished; it was never evaluated."

    def spoken(line: Mapping[str, float]) -> str:
        return f"{line['score']:+.2f} [{line['score_lo']:+.2f}, {line['score_hi']:+.2f}]"

    others = ", ".join(f"{name} {spoken(line)}" for name, line in found.items())
    return (
        f"Tamiyo scores {spoken(learned)} after round {learned['round']:.0f} "
        "(1 is about what the best single seed gains, 0 never growing; validation data, 95 % "
        "intervals, the best of its evaluations)"
        + (f"; on the same cases {others}." if others else ".")
    )


class _Silent:
    """Shows nothing."""

    def __enter__(self) -> "_Silent":
        return self

    def __exit__(self, *failure: object) -> None: ...

    def show(self, report: RoundReport) -> None: ...


class _Lines(_Silent):
    """One plain line a round, where there is no terminal."""

    def __init__(self, config: TrainConfig) -> None:
        self.config, self.began, self.first = config, time.monotonic(), 0

    def show(self, report: RoundReport) -> None:
        self.first = self.first or report.round
        print(" · ".join(self.facts(report)), flush=True)

    def facts(self, report: RoundReport) -> list[str]:
        spent, config = report.seconds, self.config
        steps = config.envs * config.horizon / max(1e-9, spent["play"] + spent["learn"])
        rounds = report.round - self.first + 1
        left = (config.rounds - report.round) * (time.monotonic() - self.began) / rounds
        error = float(report.returns.std()) / max(1, len(report.returns)) ** 0.5
        facts = [
            f"round {report.round}/{config.rounds}",
            f"return {float(report.returns.mean()):+.2f} ± {1.96 * error:.2f}",
            f"{steps:,.0f} steps/s (play {spent['play']:.1f} s, learn {spent['learn']:.1f} s)",
            f"{left / 60:.0f} min left" if left > 90 else f"{left:.0f} s left",
        ]
        if report.judgement is not None:
            judged = report.judgement.mean
            spoken = f"{judged.value:+.2f} [{judged.low:+.2f}, {judged.high:+.2f}]"
            facts.insert(2, f"evaluation {spoken}")
        return [*facts, *(f"ANOMALY {anomaly}" for anomaly in report.anomalies)]


class _Screen(_Lines):
    """A table that is redrawn, in a terminal."""

    def __init__(self, config: TrainConfig) -> None:
        super().__init__(config)
        self.console = Console(stderr=True)
        self.live = Live(console=self.console, auto_refresh=False)
        self.evaluations: list[str] = []

    def __enter__(self) -> "_Screen":
        return self

    def __exit__(self, *failure: object) -> None:
        self.live.stop()

    def show(self, report: RoundReport) -> None:
        self.first = self.first or report.round
        if not self.live.is_started:
            self.live.start()
        if report.judgement is not None:
            judged = report.judgement.mean
            text = f"{judged.value:+.2f} [{judged.low:+.2f}, {judged.high:+.2f}]"
            self.evaluations = [*self.evaluations[-4:], f"round {report.round}: {text}"]
        table = Table(box=None, title="seeds at the end of the round", title_justify="left")
        table.add_column("slot", style="bold")
        for stage in SHOWN_STAGES:
            table.add_column(stage.name.lower(), justify="right")
        for slot, counts in report.stages.items():
            table.add_row(slot, *(str(counts[stage]) for stage in SHOWN_STAGES))
        phases = ", ".join(f"{name} {spent:.1f} s" for name, spent in report.seconds.items())
        lines = [*self.facts(report), f"phases: {phases}"]
        if self.evaluations:
            lines.append("evaluations: " + "; ".join(self.evaluations))
        self.live.update(Group(*lines, table), refresh=True)


def _view(config: TrainConfig, quiet: bool) -> _Silent:
    if quiet:
        return _Silent()
    return _Screen(config) if sys.stderr.isatty() else _Lines(config)
