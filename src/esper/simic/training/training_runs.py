"""Run directories: settings, checkpoints that survive anything, and a lock against two writers.

    RUN/config.toml           what was asked for
    RUN/run.json              versions, seeds and data, as they were when it began
    RUN/events.sqlite         telemetry
    RUN/checkpoints/round-…   the last few, each whole or absent
    RUN/best                  the best agent so far, by evaluation
    RUN/lock                  held by the process that trains

A checkpoint is written beside its place and moved there when it is whole. Its parts are archives
of their own; it knows the hash of each, so that parts of different checkpoints cannot be mixed.
"""

import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from esper.archive import (
    Archive,
    ArchiveError,
    KeptFolder,
    RunKind,
    read_archive,
    seal_of,
    sync,
    write_archive,
    write_whole,
)
from esper.archive.tensors import require_whole, sealed
from esper.garden.own_code import allow_code, remember
from esper.garden.suites import Suite, find_suite
from esper.leyline.errors import EsperError
from esper.leyline.settings import Range, typed
from esper.nissa.hub import tell
from esper.simic.agent.ppo import PPOAgent
from esper.simic.training.config import TrainConfig, changed_settings, read_config, to_toml
from esper.tamiyo.controllers import LearnedController, controller_of_network
from esper.tamiyo.controllers.learned import is_kept, kept_controller

CONFIG, FACTS, BEST, CHECKPOINTS = RunKind.TRAINING, "run.json", "best", "checkpoints"
STATE = "state"
KIND, VERSION = "checkpoint", 2
KEPT = 3  # checkpoints, beside the best agent
# Settings that may change while a run goes on; of another backend only the rounding differs.
CHANGEABLE = ("rounds", "checkpoint_every", "watched", "sinks", "processes", "backend")

Kept = tuple[int, Archive]  # a round and its state
_ROUND = re.compile(r"round-(\d{6,})")


class RunError(EsperError):
    """A run directory that cannot be used as asked."""


class RunFolder(KeptFolder):
    """The files of one run."""

    kind, error = RunKind.TRAINING, RunError
    beginnings = (CHECKPOINTS, FACTS)

    @classmethod
    def create(cls, path: str | Path, config: TrainConfig, facts: Mapping[str, Any]) -> "RunFolder":
        """A new run; the directory must be empty or absent."""
        run = cls(path)
        run.require_fresh(fix=f"name another directory, or go on with: esper resume {run.path}")
        (run.path / CHECKPOINTS).mkdir(parents=True, exist_ok=True)
        run.write(FACTS, {**facts, "seal": sealed(facts)})
        remember(run.code)
        write_whole(run.path / CONFIG, to_toml(config))  # last: without it there is no run
        return run

    @classmethod
    def open(cls, path: str | Path) -> "RunFolder":
        """An existing run."""
        run = cls(path)
        run.require_run("is not a run", fix="list the runs there are: esper runs")
        return run

    @property
    def is_fresh(self) -> bool:
        return super().is_fresh and not self.rounds()

    @property
    def config(self) -> TrainConfig:
        return read_config(self.path / CONFIG)

    @property
    def facts(self) -> dict[str, Any]:
        """As they were written; versions and fingerprints by name, and the suite."""
        found = self.read(FACTS)
        if found.pop("seal", None) != sealed(found):
            raise RunError(f"{self.path / FACTS} is damaged or was edited", fix="use another copy")
        for name in ("versions", "data"):
            typed(name, found.get(name, {}), Mapping[str, str])
        return found

    @property
    def code(self) -> list[str]:
        """Python files that its suite runs."""
        suite = self.facts.get("suite", {})
        code = suite.get("code", []) if isinstance(suite, dict) else suite
        typed("code", code, tuple[str, ...])
        return list(code)

    @property
    def suite(self) -> Suite:
        """As it was when the run began, wherever its file is by now."""
        stored = self.facts.get("suite")
        if stored is None:
            return find_suite(self.config.suite)
        allow_code(self.code, self.path)
        return Suite.from_dict(stored)

    def require_data(self) -> None:
        """Refuse to go on with other data than the run began with."""
        then, now = self.facts.get("data", {}), self.suite.fingerprints()
        if changed := [name for name in then if then[name] != now.get(name)]:
            what = f"The data of {self.path} are not those that it began with"
            fix = "go on with the version of Esper, or of your code, that it began with"
            raise RunError(what, given=", ".join(changed[:3]), fix=fix)

    @property
    def best(self) -> Path:
        return self.path / BEST

    # --- checkpoints ---------------------------------------------------------------------

    def rounds(self) -> list[int]:
        """Rounds after which there is a checkpoint, in order."""
        folder = self.path / CHECKPOINTS
        names = [each.name for each in folder.iterdir()] if folder.exists() else []
        return sorted(int(match[1]) for match in map(_ROUND.fullmatch, names) if match)

    def newest(self) -> Kept | None:
        """The last round whose checkpoint is whole, and its state; None: there is no checkpoint."""
        damaged: ArchiveError | None = None
        for round_ in reversed(self.rounds()):
            try:
                found = self.read_checkpoint(round_)
            except ArchiveError as error:
                damaged = damaged or error
                continue
            if damaged:
                tell(f"{damaged} The checkpoint of round {round_} is whole: later rounds are lost.")
            return round_, found
        if damaged:
            raise damaged
        return None

    def checkpoint(self, round_: int) -> Path:
        return self.path / CHECKPOINTS / f"round-{round_:06d}"

    def begin_checkpoint(self, round_: int) -> Path:
        """An empty directory for the parts of a checkpoint."""
        self.require_held()
        folder = self.unfinished(round_)
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        return folder

    def finish_checkpoint(
        self, round_: int, tensors: Mapping[str, Tensor], notes: Mapping[str, Any]
    ) -> Path:
        """Seal the parts together with this state, move them to their place, drop old ones."""
        self.require_held()
        folder = self.unfinished(round_)
        parts = {each.name: seal_of(each) for each in sorted(folder.iterdir())}
        sealed = {**notes, "round": round_, "parts": parts}
        write_archive(folder / STATE, kind=KIND, version=VERSION, tensors=tensors, notes=sealed)
        for each in (*folder.iterdir(), folder):
            sync(each)
        place = self.checkpoint(round_)
        old = folder.with_name(f"{folder.name}-old")  # of the same round, from before a resume
        if place.exists():  # moved first: half deleted it would be taken for a checkpoint
            place.rename(old)
        folder.rename(place)
        sync(place.parent)
        shutil.rmtree(old, ignore_errors=True)
        self._drop_old()
        return place

    def _drop_old(self) -> None:
        for old in self.rounds()[:-KEPT]:
            gone = self.unfinished(old)  # what is half deleted is no checkpoint
            shutil.rmtree(gone, ignore_errors=True)
            self.checkpoint(old).rename(gone)
            shutil.rmtree(gone)

    def read_checkpoint(self, round_: int) -> Archive:
        """The state of a checkpoint, after its parts were checked."""
        folder = self.checkpoint(round_)
        state = read_archive(folder / STATE, kind=KIND, version=VERSION)
        parts = state.notes.get("parts")
        if not isinstance(parts, dict) or state.notes.get("round") != round_:
            raise ArchiveError(f"{folder} is of another round", given=state.notes.get("round"))
        judged = state.notes.get("judged", [])
        if not isinstance(judged, list) or not all(map(_is_judged, judged)):
            raise ArchiveError(f"{folder} does not say what was judged")
        found = {each.name for each in folder.iterdir() if each.name != STATE}
        foreign = found ^ parts.keys()
        foreign |= {name for name in found & parts.keys() if seal_of(folder / name) != parts[name]}
        if foreign:
            raise ArchiveError(
                f"{folder} lacks a part, or holds one that does not belong to it",
                given=", ".join(sorted(foreign)[:3]),
                fix="remove this checkpoint to resume from the one before",
            )
        for name in found:
            require_whole(folder / name)
        return state

    def require_settings(self, state: Archive) -> None:
        """Refuse a checkpoint of other settings than the run's, where that would matter."""
        stored = state.notes.get("settings")
        if not isinstance(stored, dict):
            raise ArchiveError(f"A checkpoint of {self.path} lacks its settings")
        changed = changed_settings(self.config, stored).items()
        told = [f"{name} {old} -> {new}" for name, (old, new) in changed if name not in CHANGEABLE]
        if told:
            raise RunError(
                f"{self.path / CONFIG} was changed since the last checkpoint",
                given=", ".join(told[:3]),
                valid=f"other values of {', '.join(CHANGEABLE)}",
                fix="change it back, or start another run",
            )

    def unfinished(self, round_: int) -> Path:
        return self.path / CHECKPOINTS / f".round-{round_:06d}"

    def clear_unfinished(self) -> None:
        """Remove what an interrupted run left half written or half deleted."""
        for each in (self.path / CHECKPOINTS).glob(".round-*"):
            shutil.rmtree(each)
        self._drop_old()


def _is_judged(row: object) -> bool:
    """Is it a controller, a round, a score, its interval, and a number of episodes?"""
    named = isinstance(row, list) and len(row) == 6 and isinstance(row[0], str)
    return named and all(map(Range(optional=True).holds, row[1:]))  # type: ignore[index]


# --- trained agents as controllers ---------------------------------------------------------


def load_controller(
    path: str | Path, *, name: str | None = None, device: str = "cpu"
) -> LearnedController:
    """The best agent of a run, a kept controller or a saved agent; it decides greedily."""
    folder = Path(path)
    name = name or f"tamiyo({folder.name})"
    if is_kept(folder):
        controller = kept_controller(folder, name)
        controller.network.to(device)
        return controller
    run = RunFolder(folder)
    if run.holds_run and not run.best.is_dir():
        raise RunError(
            f"{folder} has no agent yet",
            given="it was never evaluated",
            fix=f"go on with: esper resume {folder}",
        )
    agent = PPOAgent.load(run.best if run.holds_run else folder, device=device)
    return controller_of_network(agent.network, name=name)
