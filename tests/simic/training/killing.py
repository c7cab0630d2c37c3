"""Trains runs in forks of this process and kills them where it is told to.

A plan is either {"phase": NAME, "entry": k, "delay": seconds}, that long after the k-th time a
phase was entered, or {"call": NAME, "number": k, "after": bool}, at the k-th call of a function.
"""

import contextlib
import functools
import mmap
import os
import shutil
import signal
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import esper.archive.tensors
from esper.nissa import RunStore
from esper.nissa import store as store_module
from esper.simic.agent.ppo import PPOAgent
from esper.simic.training import RunFolder, Trainer, train_run

PHASES = {
    "start": (RunFolder, "locked"),
    "store": (Trainer, "_open_store"),
    "controls": (Trainer, "_measure_controls"),
    "baselines": (Trainer, "_evaluate_baselines"),
    "playing": (Trainer, "_collect_rollout"),
    "learning": (PPOAgent, "update"),
    "evaluating": (Trainer, "_evaluate_agent"),
    "checkpoint": (Trainer, "_save_checkpoint"),
    "closing": (Trainer, "close"),
}
CALLS = {
    "fsync": (os, "fsync"),
    "replace": (os, "replace"),
    "rename": (Path, "rename"),
    "rmtree": (shutil, "rmtree"),
    "unlink": (os, "unlink"),
    "rmdir": (os, "rmdir"),
    "mkdir": (Path, "mkdir"),
    "save": (esper.archive.tensors, "save"),
    "insert": (RunStore, "_add"),
    "telemetry write": (RunStore, "write"),
    "telemetry commit": (RunStore, "commit"),
    "telemetry transaction": (store_module, "_transaction"),
    "telemetry rewind": (RunStore, "rewind"),
}


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class Watch:
    """Follows which phase a process is in, for whoever forked it."""

    def __init__(self) -> None:
        self.names = ["nothing", *PHASES]
        self.shared = mmap.mmap(-1, 1)
        self.entries: Counter[str] = Counter()

    @property
    def phase(self) -> str:
        return self.names[self.shared[0]]

    def patch(self, plan: dict[str, Any]) -> None:
        for name, (owner, attribute) in PHASES.items():
            setattr(owner, attribute, self._phase(name, getattr(owner, attribute), plan))
        if "call" in plan:
            owner, attribute = CALLS[plan["call"]]
            setattr(owner, attribute, _deadly(getattr(owner, attribute), plan))

    def _phase(
        self, name: str, alone: Callable[..., Any], plan: dict[str, Any]
    ) -> Callable[..., Any]:
        @functools.wraps(alone)
        def wrapped(*given: Any, **named: Any) -> Any:
            before = self.shared[0]
            self.shared[0] = self.names.index(name)
            self.entries[name] += 1
            if plan.get("phase") == name and plan["entry"] == self.entries[name]:
                threading.Timer(plan["delay"], die).start()
            try:
                return alone(*given, **named)
            finally:
                self.shared[0] = before

        return wrapped


def _deadly(alone: Callable[..., Any], plan: dict[str, Any]) -> Callable[..., Any]:
    calls = Counter[str]()

    @functools.wraps(alone)
    def wrapped(*given: Any, **named: Any) -> Any:
        calls["all"] += 1
        if calls["all"] < plan["number"]:
            return alone(*given, **named)
        if plan["after"]:
            with contextlib.suppress(Exception):
                alone(*given, **named)
        die()
        raise AssertionError("unreachable")

    return wrapped


def attempt(run: RunFolder, plan: dict[str, Any] | None) -> tuple[int, str]:
    """The exit code, below 0 if it was killed, and the phase in which it ended."""
    watch = Watch()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            watch.patch(plan or {})
            code = 0 if train_run(RunFolder.open(run.path)) else 3
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status), watch.phase
