"""A run of `grow`: what it was asked for, what happened, and how it is kept.

    OUT/checkpoint/   the run after its last whole epoch, replaced in one rename
    OUT/sample/       the batch on which the model was probed and exports are checked
    OUT/lock          held by the process that trains

The first two are archives of tensors and JSON.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from esper.api.host_state import pack, unpack
from esper.api.hosts import GrowingModel
from esper.api.reports import Report, report_on
from esper.archive import Archive, read_archive, write_archive
from esper.kasmina.probe import Sample, Target
from esper.leyline.errors import EsperError, first_line
from esper.leyline.slots import Layout
from esper.simic.training.runs import RunFolder

CHECKPOINT, SAMPLE = "checkpoint", "sample"
KIND, VERSION = "grow-run", 1
SAMPLE_KIND = "grow-sample"


class GrowError(EsperError):
    """A run that cannot be made or gone on with as asked."""


@dataclass
class GrownRun:
    """What `grow` returns. `history` has a record for every epoch."""

    host: GrowingModel
    settings: dict[str, Any]  # as JSON holds them
    history: list[dict[str, Any]] = field(default_factory=list)
    before: dict[str, float] = field(default_factory=dict)  # loss and score before training
    after: dict[str, float] = field(default_factory=dict)  # of the network that is exported
    path: Path | None = None

    @property
    def finished(self) -> bool:
        return bool(self.after)

    @property
    def sample(self) -> Sample:
        return self.host.sample

    def report(self) -> Report:
        """What grew, when, and what it was worth; prints as text."""
        return report_on(self.host, self.settings, self.history, self.before, self.after)

    def export(self, sample: Sample | None = None) -> nn.Module:
        """The committed network as a plain module, checked against the host."""
        return self.host.export(sample)

    # --- keeping -------------------------------------------------------------------------

    def keep(self, scheduler: Mapping[str, Any] | None) -> None:
        """Write the checkpoint, if the run has a folder."""
        if self.path is None:
            return
        tensors, notes = pack(self.host)
        notes |= {
            "settings": self.settings,
            "history": self.history,
            "before": self.before,
            "after": self.after,
            "scheduler": scheduler,
        }
        write_archive(
            self.path / CHECKPOINT, kind=KIND, version=VERSION, tensors=tensors, notes=notes
        )

    def keep_sample(self) -> None:
        """Write the sample; inputs that are not tensors alone are left for the caller to give."""
        if self.path is None:
            return
        sample = self.sample
        if isinstance(sample, Tensor):
            form, parts = "tensor", {"0": sample}
        elif isinstance(sample, Mapping):
            form, parts = "mapping", dict(sample)
        else:
            form, parts = "tuple", {str(place): each for place, each in enumerate(sample)}
        if all(isinstance(each, Tensor) for each in parts.values()):
            write_archive(
                self.path / SAMPLE,
                kind=SAMPLE_KIND,
                version=VERSION,
                tensors=parts,
                notes={"form": form},
            )


@contextmanager
def held(folder: Path | None) -> Iterator[None]:
    """Inside, no other process can train the run in this folder, if it has one."""
    if folder is None:
        yield
        return
    folder.mkdir(parents=True, exist_ok=True)
    with RunFolder(folder).locked():
        yield


def require_run(path: str | Path) -> None:
    folder = Path(path)
    if not (folder / CHECKPOINT).is_dir():
        raise GrowError(
            f"{folder} holds no run to go on with",
            given="no such directory" if not folder.is_dir() else f"no {CHECKPOINT} in it",
            fix="name the directory that grow(out=...) was given",
        )


def open_checkpoint(path: str | Path) -> Archive:
    """The checkpoint of a run's folder."""
    require_run(path)
    return read_archive(Path(path) / CHECKPOINT, kind=KIND, version=VERSION)


def read_sample(path: str | Path, device: torch.device) -> Sample | None:
    """The sample of a run's folder, if it could be kept."""
    folder = Path(path) / SAMPLE
    if not folder.is_dir():
        return None
    archive = read_archive(folder, kind=SAMPLE_KIND, version=VERSION)
    form = archive.notes["form"]
    # Copied: products of numbers that lie in a mapped file may differ in their last bit.
    tensors = {name: tensor.to(device, copy=True) for name, tensor in archive.tensors.items()}
    if form == "tensor":
        return tensors["0"]
    if form == "mapping":
        return tensors
    return tuple(tensors[str(place)] for place in range(len(tensors)))


def read_origin(path: str | Path) -> dict[str, Any]:
    """What `grow(origin=...)` was given: where model and data come from, for the command line."""
    return dict(open_checkpoint(path).notes["settings"]["origin"] or {})


def restore(run: GrownRun, archive: Archive, *, training: bool) -> None:
    """Put the host, the history and the scores of a checkpoint into a run made like it."""
    unpack(run.host, archive, training=training)
    notes = archive.notes
    run.history, run.before = list(notes["history"]), dict(notes["before"])
    run.after = dict(notes["after"])
    if run.finished:
        run.host.eval()  # as `grow` left it


def as_note(target: Target) -> dict[str, Any]:
    """A place as JSON holds it."""
    layout = None if target.layout is None else str(target.layout.value)
    return {"path": target.path, "part": target.part, "layout": layout, "name": target.name}


def as_target(note: Mapping[str, Any]) -> Target:
    layout = None if note["layout"] is None else Layout(note["layout"])
    return Target(note["path"], note["part"], layout, note["name"])


def move(model: nn.Module, device: torch.device | str | None) -> None:
    """To this device, if one is asked for."""
    if device is None:
        return
    try:
        model.to(device)
    except (AssertionError, RuntimeError, TypeError) as error:
        raise GrowError(
            "The model cannot be moved to this device",
            given=f"{device!r}: {first_line(error)}",
            valid='such as "cpu", "cuda" or "cuda:1", where torch finds it',
        ) from error


def device_of(model: nn.Module) -> torch.device:
    return next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
