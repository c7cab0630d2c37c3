"""A run of `grow`: what it was asked for, what happened, how it is kept, a report on it, and
what it found trained afresh.

    OUT/checkpoint/   the run after its last whole epoch, replaced in one rename
    OUT/checkpoint-before/   and after the one before that
    OUT/events.sqlite telemetry, never behind the checkpoint
    OUT/sample/       the batch on which the model was probed and exports are checked
    OUT/lock          held by the process that trains

Checkpoint and sample are archives of tensors and JSON.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils._pytree import tree_leaves

from esper.api import ranks
from esper.api.grow_settings import GrowSettings
from esper.api.growing_model import GrowingModel
from esper.api.host_state import pack, unpack
from esper.api.run_records import contributions_of, model_notes, report_of
from esper.api.ticking import NotFiniteError
from esper.archive import KeptFolder, RunKind, packed, read_archive, unpacked, write_archive
from esper.archive.tensors import MANIFEST, Archive, ArchiveError, describing
from esper.kasmina.isolation import randomness_kept
from esper.kasmina.probe import Sample
from esper.leyline.errors import EsperError
from esper.leyline.settings import POSITIVE, require
from esper.leyline.streams import derive_seed
from esper.nissa.hub import tell
from esper.show.growth_facts import Contribution, Report, SeedLife
from esper.show.growth_summary import summary
from esper.show.report import FOLDER
from esper.show.terminal import aligned, one_line_repr
from esper.simic.training import run_processes

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Train = Callable[[nn.Module, float], "GrownRun"]  # a plain module, at this rate
CHECKPOINT, BEFORE, SAMPLE = "checkpoint", "checkpoint-before", "sample"
KIND, VERSION = "grow-run", 4
SAMPLE_KIND = "grow-sample"


class GrowthFolder(KeptFolder):
    """The files of one run."""

    kind = RunKind.GROWTH
    beginnings = (SAMPLE, CHECKPOINT)

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
    with describing(f"{folder.path / CHECKPOINT} does not describe a run"):
        report = report_of(folder.path.resolve().name, folder.checkpoint().notes)
        str(report)  # what cannot be said is found here
    return report


@dataclass
class GrownRun:
    """The result of `grow`: `print(run)` summarises it, `export()` gives the network.

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
    # To the score of that network, by slot of a permanent seed.
    contributions: dict[str, Contribution] = field(default_factory=dict)
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
        """The architecture that was found, as a plain module with new weights.

        The host's come from `model`, a newborn one, or are drawn by its layers themselves. Layers
        in a seed start as torch starts them, also the last one, which a planted seed has at zero;
        norms and scalar gates start at one.
        """
        plain, layers = self.export(), set[str]()
        with randomness_kept(plain, stream=derive_seed(self.settings.seed, "fresh")):
            if model is not None:
                missing, unknown = plain.load_state_dict(model.state_dict(), strict=False)
                if unknown:
                    raise EsperError(
                        "The model is another than the one that grew",
                        given=f"it has {', '.join(unknown[:3])}",
                        fix="build it as it was built for the run",
                    )
                layers = {name.rpartition(".")[0] for name in missing}
            of_host = dict(self.host.model.named_modules())
            for path, module in plain.named_modules():
                holds = isinstance(module, _NormBase) or any(True for _ in module.parameters(False))
                if holds and (model is None or path in layers):
                    _start(path, module, seed=path not in of_host)
        return plain

    def retrain(self, rates: Sequence[float] | None = None) -> "Retrained":
        """Train that architecture from the first step, as this run was trained, at its rate or at
        each of these; print what it returns to see both networks side by side.

        It may do better than what grew, or not, and costs one training more for every rate.
        """
        train = self.train_plain
        if not self.finished or train is None:
            given = "a run that is not finished" if not self.finished else "a run without its data"
            raise EsperError(
                "Only a run that was finished in this process can be trained afresh",
                given=given,
                fix="go on with esper.resume(path, model, train, val), or train run.fresh()",
            )
        chosen = tuple([] if rates is None else rates) or (self.settings.lr,)
        for rate in chosen:
            require("A learning rate", rate, POSITIVE)
        found: dict[float, GrownRun] = {}
        for rate in chosen:
            try:
                found[rate] = train(self.fresh(), rate)
            except NotFiniteError:
                if rate == chosen[-1] and not found:
                    raise
        return Retrained(self, found, tuple(rate for rate in chosen if rate not in found))

    # --- to look at ----------------------------------------------------------------------

    def __str__(self) -> str:
        return summary(self.report())

    def __repr__(self) -> str:
        return one_line_repr(self, self.report().headline)

    def plot(self, *, dark: bool = False) -> "Figure":
        """How it grew, as a figure of matplotlib: scores, losses, contributions and slots."""
        return self.report().plot(dark=dark)

    def write_report(self, out: str | Path | None = None) -> Path:
        """Write the page of this run into a folder, by default `report` in the run's own."""
        if out is None:
            if self.folder is None:
                raise EsperError(
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
        if self.folder is not None and ranks.rank() == 0:
            run_processes.mark_started(self.folder)
            self.folder.keep_sample(self.sample)

    def finish(
        self, scores: Mapping[str, float], contributions: Mapping[str, Contribution]
    ) -> None:
        """Store the results of the finished network after the last epoch."""
        self.after = dict(scores)
        self.contributions = dict(contributions)
        self.host.eval()

    # --- keeping -------------------------------------------------------------------------

    def notes(self) -> dict[str, Any]:
        """All but weights, as JSON holds it."""
        contributions = {
            slot: asdict(contribution) for slot, contribution in self.contributions.items()
        }
        return {
            "history": self.history,
            "seconds": self.seconds,
            "before": self.before,
            "after": self.after,
            "contributions": contributions,
            "settings": asdict(self.settings),
            "model": self._model,
        }

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
            self.finish(notes["after"], contributions_of(notes))


# --- what was found, trained from the first step --------------------------------------------


@dataclass(frozen=True)
class Retrained:
    """The network that was trained afresh, beside the one that grew."""

    grown: GrownRun
    runs: dict[float, GrownRun]  # by rate
    diverged: tuple[float, ...] = ()  # rates that came to nothing

    @property
    def rate(self) -> float:
        """The one that did best on validation data."""
        return max(self.runs, key=lambda rate: self.runs[rate].after["score"])

    @property
    def best(self) -> GrownRun:
        return self.runs[self.rate]

    def export(self) -> nn.Module:
        """The network trained afresh, as a plain module."""
        return self.best.export()

    def __repr__(self) -> str:
        return one_line_repr(self, f"best at lr {self.rate:g}, {self.best.report().headline}")

    def __str__(self) -> str:
        runs = {"grown": self.grown} | {f"afresh, lr {r:g}": run for r, run in self.runs.items()}
        rows = [
            (name, ", ".join(f"{k.replace('_', ' ')} {v:.4g}" for k, v in run.after.items()))
            for name, run in runs.items()
        ]
        spent = sum(
            sum(map(sum, (each.values() for each in r.seconds))) for r in self.runs.values()
        )
        rows += [(f"afresh, lr {rate:g}", "diverged") for rate in self.diverged]
        return "\n".join([*aligned(rows), f"Training afresh took {spent:.1f} s more."])


@torch.no_grad()
def _start(path: str, layer: nn.Module, *, seed: bool) -> None:
    """Draw a layer's weights anew; those of a seed may be a plain graph that cannot itself."""
    reset = getattr(layer, "reset_parameters", getattr(layer, "_reset_parameters", None))
    if callable(reset):
        reset()
        return
    own = dict(layer.named_parameters(recurse=False))
    if not seed or "weight" not in own:
        raise EsperError(
            "A layer cannot draw its weights anew",
            given=f"{path or 'the model itself'}: {type(layer).__name__} with {', '.join(own)}",
            fix="pass a newborn model: run.fresh(Net())",
        )
    for name, parameter in own.items():
        if own["weight"].dim() >= 2:
            bound = 1.0 / math.sqrt(own["weight"][0].numel())
            nn.init.uniform_(parameter, -bound, bound)
        else:
            nn.init.constant_(parameter, 1.0 if name == "weight" else 0.0)
