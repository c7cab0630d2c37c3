"""Run folders of training: settings, checkpoints and a lock against a second writer.

    RUN/config.toml           settings
    RUN/run.json              versions, seeds and data at the start of the run
    RUN/events.sqlite         telemetry
    RUN/checkpoints/round-…   the last checkpoints, each complete or absent
    RUN/best                  the best agent by evaluation
    RUN/lock                  held by the process that trains

A checkpoint is written to a temporary folder and renamed when it is complete. Its parts are
archives. The checkpoint stores the hash of each part, so that parts of different checkpoints cannot
be mixed.
"""

import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

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
from esper.simic.renamed_settings import RENAMED_CHECKPOINT_NOTES, rename_keys
from esper.simic.training.config import TrainConfig, changed_settings, read_config, to_toml
from esper.tamiyo.controllers import LearnedController, controller_of_network
from esper.tamiyo.controllers.learned import is_saved, load_saved_controller

CONFIG, FACTS, BEST, CHECKPOINTS = RunKind.TRAINING, "run.json", "best", "checkpoints"
STATE = "state"
KIND, VERSION = "checkpoint", 3
READABLE_VERSIONS = (2,)  # besides VERSION: that of Esper 0.1
MAX_CHECKPOINTS = 3  # that are kept, besides the best agent
# Settings that may change during a run. With another backend only the rounding differs.
CHANGEABLE = ("rounds", "checkpoint_every", "logged_envs", "sinks", "processes", "backend")

_FINITE_OR_NONE = Range(optional=True)
_ROUND_FOLDER = re.compile(r"round-(\d{6,})")


class Checkpoint(NamedTuple):
    """A checkpoint that was read."""

    round: int  # number of completed rounds
    state: Archive


class RunError(EsperError):
    """A run folder cannot be used as requested."""


class RunFolder(KeptFolder):
    """The files of one run."""

    kind, error = RunKind.TRAINING, RunError
    beginnings = (CHECKPOINTS, FACTS)

    @classmethod
    def create(cls, path: str | Path, config: TrainConfig, facts: Mapping[str, Any]) -> "RunFolder":
        """Create the folder of a new run.

        Args:
            path: The folder; it must be empty or absent.
            config: Settings of the run.
            facts: Versions, fingerprints of the data, and the suite.

        Raises:
            RunError: The folder is not empty.
        """
        run = cls(path)
        run.require_fresh(fix=f"name another directory, or continue with: esper resume {run.path}")
        (run.path / CHECKPOINTS).mkdir(parents=True, exist_ok=True)
        run.write(FACTS, {**facts, "seal": sealed(facts)})
        remember(run.code)
        # The settings make the folder a run, so they are written last.
        write_whole(run.path / CONFIG, to_toml(config))
        return run

    @classmethod
    def open(cls, path: str | Path) -> "RunFolder":
        """Open the folder of an existing run.

        Raises:
            RunError: The folder holds no run.
        """
        run = cls(path)
        run.require_run("is not a run", fix="list the existing runs: esper runs")
        return run

    @property
    def is_fresh(self) -> bool:
        """Whether the folder is absent, empty, or holds a run that was never completed."""
        return super().is_fresh and not self.rounds()

    @property
    def config(self) -> TrainConfig:
        """Settings of the run, as `config.toml` has them now."""
        return read_config(self.path / CONFIG)

    @property
    def facts(self) -> dict[str, Any]:
        """Versions and fingerprints by name, and the suite, at the start of the run."""
        facts = self.read(FACTS)
        if facts.pop("seal", None) != sealed(facts):
            raise RunError(f"{self.path / FACTS} is damaged or was edited", fix="use another copy")
        for name in ("versions", "data"):
            typed(name, facts.get(name, {}), Mapping[str, str])
        return facts

    @property
    def code(self) -> list[str]:
        """Python files that the suite runs."""
        suite = self.facts.get("suite", {})
        code = suite.get("code", []) if isinstance(suite, dict) else suite
        typed("code", code, tuple[str, ...])
        return list(code)

    @property
    def suite(self) -> Suite:
        """The suite as it was at the start of the run, also if its file was moved."""
        stored = self.facts.get("suite")
        if stored is None:
            return find_suite(self.config.suite)
        allow_code(self.code, self.path)
        return Suite.from_dict(stored)

    def require_data(self) -> None:
        """Raise an error if the data are not those of the start of the run."""
        original = self.facts.get("data", {})
        current = self.suite.fingerprints()
        changed = [name for name in original if original[name] != current.get(name)]
        if changed:
            raise RunError(
                f"The data of {self.path} have changed since the start of the run",
                given=", ".join(changed[:3]),
                fix="continue with the version of Esper, or of your code, that started the run",
            )

    @property
    def best(self) -> Path:
        """Folder of the best agent."""
        return self.path / BEST

    # --- checkpoints ---------------------------------------------------------------------

    def rounds(self) -> list[int]:
        """Return the rounds with a checkpoint, in order."""
        folder = self.path / CHECKPOINTS
        if not folder.exists():
            return []
        matches = (_ROUND_FOLDER.fullmatch(entry.name) for entry in folder.iterdir())
        return sorted(int(match[1]) for match in matches if match)

    def newest(self) -> Checkpoint | None:
        """Read the last checkpoint that is intact.

        Returns:
            The checkpoint, or None if the run has no checkpoint.

        Raises:
            ArchiveError: All checkpoints are damaged.
        """
        damage: ArchiveError | None = None
        for round_ in reversed(self.rounds()):
            try:
                state = self.read_checkpoint(round_)
            except ArchiveError as error:
                damage = damage or error
                continue
            if damage:
                tell(f"{damage} The checkpoint of round {round_} is whole: later rounds are lost.")
            return Checkpoint(round_, state)
        if damage:
            raise damage
        return None

    def checkpoint(self, round_: int) -> Path:
        """Return the folder of a checkpoint."""
        return self.path / CHECKPOINTS / f"round-{round_:06d}"

    def unfinished(self, round_: int) -> Path:
        """Return the folder in which a checkpoint is written before it is complete."""
        return self.path / CHECKPOINTS / f".round-{round_:06d}"

    def begin_checkpoint(self, round_: int) -> Path:
        """Create an empty folder for the parts of a checkpoint."""
        self.require_held()
        folder = self.unfinished(round_)
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        return folder

    def finish_checkpoint(
        self, round_: int, tensors: Mapping[str, Tensor], notes: Mapping[str, Any]
    ) -> Path:
        """Complete a checkpoint and delete the oldest ones.

        Args:
            round_: Number of completed rounds.
            tensors: Tensors of the training state.
            notes: Other values of the training state, as JSON can hold them.

        Returns:
            The folder of the checkpoint.
        """
        self.require_held()
        folder = self.unfinished(round_)
        parts = {part.name: seal_of(part) for part in sorted(folder.iterdir())}
        notes = {**notes, "round": round_, "parts": parts}
        write_archive(folder / STATE, kind=KIND, version=VERSION, tensors=tensors, notes=notes)
        for path in (*folder.iterdir(), folder):
            sync(path)
        final = self.checkpoint(round_)
        # A resumed run may have a checkpoint of this round already. It is renamed before it is
        # deleted, because a half deleted checkpoint would be read as a damaged one.
        replaced = folder.with_name(f"{folder.name}-old")
        if final.exists():
            final.rename(replaced)
        folder.rename(final)
        sync(final.parent)
        shutil.rmtree(replaced, ignore_errors=True)
        self._delete_old_checkpoints()
        return final

    def _delete_old_checkpoints(self) -> None:
        for round_ in self.rounds()[:-MAX_CHECKPOINTS]:
            renamed = self.unfinished(round_)
            shutil.rmtree(renamed, ignore_errors=True)
            self.checkpoint(round_).rename(renamed)
            shutil.rmtree(renamed)

    def read_checkpoint(self, round_: int) -> Archive:
        """Read the state of a checkpoint and check its parts.

        Notes of Esper 0.1 are returned under today's names.

        Raises:
            ArchiveError: The checkpoint is damaged, or a part belongs to another one.
        """
        folder = self.checkpoint(round_)
        state = read_archive(
            folder / STATE, kind=KIND, version=VERSION, older_versions=READABLE_VERSIONS
        )
        notes = dict(state.notes)
        if state.version != VERSION:
            notes = rename_keys(notes, RENAMED_CHECKPOINT_NOTES)
        parts = notes.get("parts")
        if not isinstance(parts, dict) or notes.get("round") != round_:
            raise ArchiveError(f"{folder} is of another round", given=notes.get("round"))
        history = notes.get("eval_history", [])
        if not isinstance(history, list) or not all(map(_is_evaluation, history)):
            raise ArchiveError(f"{folder} holds no valid history of evaluations")
        _require_parts(folder, parts)
        return Archive(state.tensors, notes, state.version)

    def require_settings(self, state: Archive) -> None:
        """Raise an error if the settings differ from those of a checkpoint.

        Settings in `CHANGEABLE` may differ.
        """
        stored = state.notes.get("settings")
        if not isinstance(stored, dict):
            raise ArchiveError(f"A checkpoint of {self.path} lacks its settings")
        changes = [
            f"{name} {old} -> {new}"
            for name, (old, new) in changed_settings(self.config, stored).items()
            if name not in CHANGEABLE
        ]
        if changes:
            raise RunError(
                f"{self.path / CONFIG} was changed since the last checkpoint",
                given=", ".join(changes[:3]),
                valid=f"other values of {', '.join(CHANGEABLE)}",
                fix="change it back, or start another run",
            )

    def clear_unfinished(self) -> None:
        """Delete what an interrupted run left half written or half deleted."""
        for path in (self.path / CHECKPOINTS).glob(".round-*"):
            shutil.rmtree(path)
        self._delete_old_checkpoints()


def _require_parts(folder: Path, parts: Mapping[str, Any]) -> None:
    """Raise an error unless a checkpoint holds exactly its own parts, each intact."""
    names = {path.name for path in folder.iterdir() if path.name != STATE}
    wrong = names ^ parts.keys()
    wrong |= {name for name in names & parts.keys() if seal_of(folder / name) != parts[name]}
    if wrong:
        raise ArchiveError(
            f"{folder} lacks a part, or holds one that does not belong to it",
            given=", ".join(sorted(wrong)[:3]),
            fix="remove this checkpoint to resume from the one before",
        )
    for name in names:
        require_whole(folder / name)


def _is_evaluation(row: object) -> bool:
    """Whether a row is a controller, a round, a score, its interval and a number of episodes."""
    if not isinstance(row, list) or len(row) != 6 or not isinstance(row[0], str):
        return False
    return all(_FINITE_OR_NONE.holds(value) for value in row[1:])


# --- trained agents as controllers ---------------------------------------------------------


def load_controller(
    path: str | Path, *, name: str | None = None, device: str = "cpu"
) -> LearnedController:
    """Load a trained controller that decides greedily.

    Args:
        path: Folder of a run (its best agent is loaded), of a saved controller or of a saved agent.
        name: Name of the controller; by default it contains the name of the folder.
        device: Device of the network.

    Raises:
        RunError: The run has no agent yet.
    """
    folder = Path(path)
    name = name or f"tamiyo({folder.name})"
    if is_saved(folder):
        controller = load_saved_controller(folder, name)
        controller.network.to(device)
        return controller
    run = RunFolder(folder)
    if run.holds_run and not run.best.is_dir():
        raise RunError(
            f"{folder} has no agent yet",
            given="the run has no evaluation",
            fix=f"continue with: esper resume {folder}",
        )
    agent = PPOAgent.load(run.best if run.holds_run else folder, device=device)
    return controller_of_network(agent.network, name=name)
