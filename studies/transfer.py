"""Does one controller for any host transfer? The whole study, in steps that go on where they were.

    python -m studies.transfer run --size gpu --out DIR --device cuda --processes 14 --final
    python -m studies.transfer run --size gpu --out DIR --steps fit train --seconds 560 ...
    python -m studies.transfer report --runs DIR --json FILE [--write]
    python -m studies.transfer pack --runs DIR --out FILE
    python -m studies.transfer box --runs DIR

The study has five trainings. Each is a supervised fit to measured gains, and two of them continue
with PPO. The gains are in the folder that --gains names; docs/greenhouse.md describes where to get
them. For every training, validation worlds select between the fit, the fit with a reserve against
planting, and the result of PPO: the variant with the highest points among those that rarely cause
harm. Rules are tuned on worlds of the training stream. All controllers are evaluated on the groups
that docs/greenhouse.md registers, on the contexts of the garden and on models of users. Ablations
follow.

Held-out groups are evaluated only with --final. The commands of a step run side by side, and
`costs.jsonl` stores the seconds of each step. `report` reads DIR or the archive that `pack` writes.
`box` copies the training with the best validation result into the package.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from esper.archive.files import append_lines
from esper.leyline.errors import EsperError
from studies import greenhouse
from studies.greenhouse_gains import deadline
from studies.transfer_plan import COSTS, ROOT, SIZES, STEPS, Study, Task


def carry_out(study: Study, step: str, until: float) -> bool:
    """Do what is missing of a step; is it over?"""
    began, told = time.time(), dict[str, object]()
    whole = True
    for tasks in study.tasks(step):
        open_ = _open(tasks)
        if not open_:
            continue
        study.require_gains(open_)
        told = {"step": step, "device": study.device}
        if study.processes == 1:
            _alone(open_, until)
        else:
            at_once = study.fits if step in ("fit", "ablate") else study.processes
            _side_by_side(open_, until, at_once, study.processes)
        if _open(open_):
            whole = False
            break
    if told:
        ended = time.time()
        append_lines(study.out / COSTS, [json.dumps(told | {"began": began, "ended": ended})])
        print(f"{step}: {'over' if whole else 'not over yet'}, {ended - began:.0f} s", flush=True)
    return whole


def _open(tasks: Sequence[Task]) -> list[Task]:
    """Those that are not over; shares of one piece of work are over together."""
    over = {ask: ask() for ask in {task.over for task in tasks}}
    return [task for task in tasks if not over[task.over]]


def _words(task: Task, until: float) -> list[str]:
    left = until - time.monotonic()
    return [*task.words, *(["--seconds", f"{max(left, 1.0):.0f}"] if left < 1e9 else [])]


def _alone(tasks: Sequence[Task], until: float) -> None:
    for task in tasks:
        if task.program != "studies.greenhouse":
            subprocess.run(_command(task, until), cwd=ROOT, check=True)  # noqa: S603
        elif time.monotonic() < until:
            options = greenhouse.parsed(_words(task, until))
            options.work(options)


def _command(task: Task, until: float) -> list[str]:
    words = _words(task, until)
    if task.program != "studies.greenhouse":
        return [sys.executable, task.program, *words]
    if task.processes == 1:
        return [sys.executable, "-m", task.program, *words]
    many = ["--standalone", "--nproc-per-node", str(task.processes)]
    return [sys.executable, "-m", "torch.distributed.run", *many, "-m", task.program, *words]


def _side_by_side(tasks: Sequence[Task], until: float, at_once: int, processes: int) -> None:
    """As many as there are processes for; one that fails ends the study."""
    waiting, running = list(tasks), dict[subprocess.Popen[bytes], Task]()
    while running or (waiting and time.monotonic() < until):
        busy = sum(task.processes for task in running.values())
        if (waiting and time.monotonic() < until and len(running) < at_once
                and (not running or busy + waiting[0].processes <= processes)):  # fmt: skip
            task = waiting.pop(0)
            running[subprocess.Popen(_command(task, until), cwd=ROOT)] = task  # noqa: S603
            continue
        for process in [each for each in running if each.poll() is not None]:
            task = running.pop(process)
            if process.returncode:
                waiting.clear()
                print(f"failed with {process.returncode}: {' '.join(task.words)[:300]}", flush=True)
        time.sleep(0.2)


def run(options: argparse.Namespace) -> None:
    """Steps one after the other, until time is up."""
    options.out.mkdir(parents=True, exist_ok=True)
    size = SIZES[options.size]
    size = size if options.rounds is None else replace(size, rounds=options.rounds)
    study = Study(options.out.resolve(), size, options.device, options.processes,
                  options.fits, options.ranks, options.final, options.gains)  # fmt: skip
    study.note_plan()
    until = deadline(options)
    for step in options.steps:
        if step == "report":
            from studies.report.transfer import write_report  # needs matplotlib

            write_report(study.out, study.out / "figures.json", study.out)
        elif time.monotonic() > until or not carry_out(study, step, until):
            print(f"Not finished: {step}. The same command goes on.")
            return


def _report(options: argparse.Namespace) -> None:
    from studies.report.transfer import write_docs, write_report

    write_report(options.runs, options.json, None)
    if options.write:
        write_docs(options.runs)


def _pack(options: argparse.Namespace) -> None:
    from studies.report.transfer_results import pack

    pack(options.runs, options.out)


def _box(options: argparse.Namespace) -> None:
    from studies.boxed import box

    print(f"{box(options.runs.resolve())} is in the box")


def parsed(words: Sequence[str] | None = None) -> argparse.Namespace:
    top = argparse.ArgumentParser(prog="python -m studies.transfer")
    parts = top.add_subparsers(required=True)
    one = parts.add_parser("run")
    one.add_argument("--size", choices=list(SIZES), default="gpu")
    one.add_argument("--out", type=Path, required=True)
    one.add_argument("--steps", nargs="+", choices=STEPS, default=STEPS)
    one.add_argument("--device", default="cpu")
    one.add_argument("--processes", type=int, default=1, help="at once")
    one.add_argument("--fits", type=int, default=4, help="of these, that fit")
    one.add_argument("--ranks", type=int, default=8, help="of one training by PPO")
    one.add_argument("--rounds", type=int, help="of PPO, if not those of the size; 0: fits alone")
    one.add_argument("--seconds", type=float, help="begin nothing after so many")
    one.add_argument("--gains", type=Path, help="folder of gains and moments collected before")
    one.add_argument("--final", action="store_true", help="all is chosen: play held-out groups")
    two = parts.add_parser("report")
    two.add_argument("--runs", type=Path, required=True, help="a folder, or what was packed of it")
    two.add_argument("--json", type=Path)
    two.add_argument("--write", action="store_true", help="docs/transfer.md, docs/evidence.json")
    three = parts.add_parser("pack")
    three.add_argument("--runs", type=Path, required=True)
    three.add_argument("--out", type=Path, required=True)
    four = parts.add_parser("box")
    four.add_argument("--runs", type=Path, required=True)
    for part, work in ((one, run), (two, _report), (three, _pack), (four, _box)):
        part.set_defaults(work=work)
    return top.parse_args(words)


if __name__ == "__main__":
    torch.set_num_threads(1)
    options = parsed()
    try:
        options.work(options)
    except EsperError as error:
        raise SystemExit(f"studies.transfer: {error}") from None
