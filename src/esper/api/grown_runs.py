"""A run of `grow`: what it was asked for, what happened, how it is kept, and a report on it.

    OUT/checkpoint/   the run after its last whole epoch, replaced in one rename
    OUT/checkpoint-before/   and after the one before that
    OUT/events.sqlite telemetry, never behind the checkpoint
    OUT/sample/       the batch on which the model was probed and exports are checked
    OUT/lock          held by the process that trains

Checkpoint and sample are archives of tensors and JSON.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from esper.api.grow_settings import GrowError, GrowSettings
from esper.api.growing_model import GrowingModel
from esper.api.host_state import pack, unpack
from esper.api.retraining import Retrained, Train, fresh, retrain
from esper.api.run_records import model_notes, report_of
from esper.archive import (
    Archive,
    ArchiveError,
    KeptFolder,
    RunKind,
    packed,
    read_archive,
    unpacked,
    write_archive,
)
from esper.archive.tensors import MANIFEST
from esper.kasmina.probe import Sample
from esper.nissa.hub import tell
from esper.show.growth_facts import Report, SeedLife
from esper.show.report import FOLDER

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CHECKPOINT, BEFORE, SAMPLE = "checkpoint", "checkpoint-before", "sample"
KIND, VERSION = "grow-run", 3
SAMPLE_KIND = "grow-sample"


class GrowthFolder(KeptFolder):
    """The files of one run."""

    kind, error = RunKind.GROWTH, GrowError
    beginnings = (SAMPLE, CHECKPOINT)

    def require_new(self) -> None:
        """Refuse what cannot become a run's folder; other files in it do not matter."""
        if self.holds_run:
            raise GrowError(
                f"{self.path} holds a run already",
                fix=f"go on with esper.resume({str(self.path)!r}, ...), or name another directory",
            )
        if self.path.exists() and not self.path.is_dir():
            raise GrowError(f"{self.path} is a file", fix="name a directory for the run")

    def require_old(self) -> None:
        self.require_run(
            "holds no run to go on with", fix="name the directory that grow(out=...) was given"
        )

    def checkpoint(self) -> Archive:
        """The last one; if that is damaged the one before it, which is said."""
        self.require_old()
        try:
            return read_archive(self.path / CHECKPOINT, kind=KIND, version=VERSION)
        except ArchiveError as error:
            if not (self.path / BEFORE / MANIFEST).is_file():
                raise
            found = read_archive(self.path / BEFORE, kind=KIND, version=VERSION)
            epoch = len(found.notes["history"])
            tell(f"{error} The checkpoint before it is whole: later epochs than {epoch} are lost.")
            return found

    @property
    def holds_sample(self) -> bool:
        return (self.path / SAMPLE).is_dir()

    def keep_sample(self, sample: Sample) -> None:
        """Write the sample; inputs that are not tensors alone are left for the caller to give."""
        plain = dict(sample) if isinstance(sample, Mapping) else sample
        if all(isinstance(each, Tensor) for each in tree_leaves(plain)):
            tensors: dict[str, Tensor] = {}
            notes = {"form": packed(plain, tensors, of="The sample")}
            place = self.path / SAMPLE
            write_archive(place, kind=SAMPLE_KIND, version=VERSION, tensors=tensors, notes=notes)

    def sample(self, device: torch.device) -> Sample | None:
        """The sample, if it could be kept."""
        if not self.holds_sample:
            return None
        archive = read_archive(self.path / SAMPLE, kind=SAMPLE_KIND, version=VERSION)
        # Copied: products of numbers that lie in a mapped file may differ in their last bit.
        tensors = {name: tensor.to(device, copy=True) for name, tensor in archive.tensors.items()}
        found: Sample = unpacked(archive.notes["form"], tensors)
        return found


def read_report(path: str | Path) -> Report:
    """Of the run in this folder; its model is not needed."""
    folder = GrowthFolder(path)
    return report_of(folder.path.resolve().name, folder.checkpoint().notes)


@dataclass
class GrownRun:
    """What `grow` returns: print its `report()`, take the network with `export()`.

    `history` has a record for every epoch: `epoch`, `train_loss`, `val_loss`, `score`,
    `committed` (the score with permanent seeds only), `contributions` by slot, `added`
    (parameters in seeds), `decision` and `events` by names.
    """

    host: GrowingModel
    settings: GrowSettings
    history: list[dict[str, Any]] = field(default_factory=list)  # as JSON holds them
    seconds: list[dict[str, float]] = field(default_factory=list)  # of every epoch, by phase
    before: dict[str, float] = field(default_factory=dict)  # loss and score before training
    after: dict[str, float] = field(default_factory=dict)  # of the network that is exported
    folder: GrowthFolder | None = None  # where it is kept
    train_plain: Train | None = None  # trains a network that does not grow like this one

    @property
    def finished(self) -> bool:
        return bool(self.after)

    @property
    def sample(self) -> Sample:
        return self.host.sample

    def report(self) -> Report:
        """What grew, when, and what it was worth; prints as text, and is what pages show."""
        name = self._model["name"] if self.folder is None else self.folder.path.resolve().name
        return report_of(name, self.notes())

    @property
    def seeds(self) -> tuple[SeedLife, ...]:
        """Every seed that ever lived, in the order in which they were planted."""
        return self.report().seeds

    def export(self, sample: Sample | None = None) -> nn.Module:
        """The committed network as a plain module, checked against the host."""
        return self.host.export(sample)

    def fresh(self, model: nn.Module | None = None) -> nn.Module:
        """The architecture that was found, with new weights: the host's are those of `model`, a
        newborn one, or drawn by its layers.
        """
        return fresh(self, model)

    def retrain(self, rates: Sequence[float] | None = None) -> Retrained:
        """Train that architecture from the first step, as this run was trained, at its rate or at
        each of these; print what it returns to see both networks side by side.
        """
        return retrain(self, self.train_plain, rates)

    # --- to look at ----------------------------------------------------------------------

    def plot(self, *, dark: bool = False) -> "Figure":
        """How it grew, as a figure of matplotlib: scores, losses, contributions and slots."""
        return self.report().plot(dark=dark)

    def write_report(self, out: str | Path | None = None) -> Path:
        """Write the page of this run into a folder, by default `report` in the run's own."""
        if out is None:
            if self.folder is None:
                raise GrowError(
                    "This run has no folder for its report", fix="name one: write_report(out)"
                )
            out = self.folder.path / FOLDER
        return self.report().write(Path(out))

    def _repr_html_(self) -> str:
        return self.report()._repr_html_()

    # --- as it goes on -------------------------------------------------------------------

    def settle(self, **known: Any) -> None:
        """Settings that are known only now."""
        self.settings = replace(self.settings, **known)

    def begin(self, scores: Mapping[str, float]) -> None:
        """Before the first epoch."""
        self.before = dict(scores)
        if self.folder is not None:
            self.folder.keep_sample(self.sample)

    def finish(self, scores: Mapping[str, float]) -> None:
        """After the last one."""
        self.after = dict(scores)
        self.host.eval()

    # --- keeping -------------------------------------------------------------------------

    def notes(self) -> dict[str, Any]:
        """All but weights, as JSON holds it."""
        known = {name: getattr(self, name) for name in ("history", "seconds", "before", "after")}
        return known | {"settings": asdict(self.settings), "model": self._model}

    @cached_property
    def _model(self) -> dict[str, Any]:
        return model_notes(self.host)

    def keep(self, scheduler: Mapping[str, Any] | None, ready: Callable[[], object]) -> None:
        """Write the checkpoint of a run that has a folder; `ready` is called before it counts."""
        assert self.folder is not None
        tensors, notes = pack(self.host)
        notes |= self.notes() | {"scheduler": scheduler}
        self.folder.require_held()
        place, before = (self.folder.path / name for name in (CHECKPOINT, BEFORE))
        saved: dict[str, Any] = {"tensors": tensors, "notes": notes}
        write_archive(place, kind=KIND, version=VERSION, ready=ready, before=before, **saved)

    def restore(self, archive: Archive) -> None:
        """Take over host, history and scores of a checkpoint of a run made like this one."""
        unpack(self.host, archive, training=False)
        notes = archive.notes
        self.history, self.before = list(notes["history"]), dict(notes["before"])
        self.seconds = list(notes["seconds"])
        if notes["after"]:
            self.finish(notes["after"])
