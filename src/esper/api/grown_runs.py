"""A run of `grow`: what it was asked for, what happened, how it is kept, and a report on it.

    OUT/checkpoint/   the run after its last whole epoch, replaced in one rename
    OUT/events.sqlite telemetry, never behind the checkpoint
    OUT/sample/       the batch on which the model was probed and exports are checked
    OUT/lock          held by the process that trains

Checkpoint and sample are archives of tensors and JSON.
"""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from esper.api.grow_settings import GrowError, GrowSettings
from esper.api.growing_model import GrowingModel
from esper.api.host_state import pack, unpack
from esper.api.run_records import facts_of, model_notes
from esper.api.ticking import GrowthDecision, StageChange
from esper.archive import Archive, KeptFolder, RunKind, read_archive, write_archive
from esper.kasmina.probe import Sample
from esper.leyline import Blend, Cause
from esper.leyline.errors import EsperError
from esper.leyline.stages import SeedStage
from esper.show.growth_facts import GrowthFacts
from esper.show.report import FOLDER as REPORT
from esper.show.report import growth_figure, growth_head, write_growth_report

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CHECKPOINT, SAMPLE = RunKind.GROWTH, "sample"
KIND, VERSION = "grow-run", 1
SAMPLE_KIND = "grow-sample"


class GrowthFolder(KeptFolder):
    """The files of one run."""

    kind, error = CHECKPOINT, GrowError
    beginnings = (SAMPLE,)

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
        self.require_old()
        return read_archive(self.path / CHECKPOINT, kind=KIND, version=VERSION)

    @property
    def holds_sample(self) -> bool:
        return (self.path / SAMPLE).is_dir()

    def keep_sample(self, sample: Sample) -> None:
        """Write the sample; inputs that are not tensors alone are left for the caller to give."""
        if isinstance(sample, Tensor):
            form, parts = "tensor", {"0": sample}
        elif isinstance(sample, Mapping):
            form, parts = "mapping", dict(sample)
        else:
            form, parts = "tuple", {str(place): each for place, each in enumerate(sample)}
        if all(isinstance(each, Tensor) for each in parts.values()):
            place, notes = self.path / SAMPLE, {"form": form}
            write_archive(place, kind=SAMPLE_KIND, version=VERSION, tensors=parts, notes=notes)

    def sample(self, device: torch.device) -> Sample | None:
        """The sample, if it could be kept."""
        if not self.holds_sample:
            return None
        archive = read_archive(self.path / SAMPLE, kind=SAMPLE_KIND, version=VERSION)
        form = archive.notes["form"]
        # Copied: products of numbers that lie in a mapped file may differ in their last bit.
        tensors = {name: tensor.to(device, copy=True) for name, tensor in archive.tensors.items()}
        if form == "tensor":
            return tensors["0"]
        if form == "mapping":
            return tensors
        return tuple(tensors[str(place)] for place in range(len(tensors)))


def read_facts(path: str | Path) -> GrowthFacts:
    """All that pages and pictures say of the run in this folder; its model is not needed."""
    folder = GrowthFolder(path)
    return facts_of(folder.path.resolve().name, folder.checkpoint().notes)


def read_origin(path: str | Path) -> dict[str, Any]:
    """What `grow(origin=...)` was given: where model and data come from, for the command line."""
    return dict(GrowthFolder(path).checkpoint().notes["settings"]["origin"] or {})


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

    @property
    def finished(self) -> bool:
        return bool(self.after)

    @property
    def sample(self) -> Sample:
        return self.host.sample

    def report(self) -> "Report":
        """What grew, when, and what it was worth; prints as text."""
        return Report(
            controller=self.settings.controller,
            epochs=len(self.history),
            horizon=self.settings.epochs,
            host_params=self.host.catalogue.host_params,
            room=self.host.room,
            seeds=self.seeds,
            most_added=max((record["most_added"] for record in self.history), default=0),
            decisions=tuple(
                (record["epoch"], str(decision))
                for record in self.history
                if (decision := GrowthDecision.of(record["decision"])).changes_something
            ),
            metric=self.settings.metric or "score",
            meaning=self.settings.score,
            device=self.settings.device,
            precision=self.settings.precision,
            before=dict(self.before),
            after=dict(self.after),
        )

    @property
    def seeds(self) -> "tuple[SeedLife, ...]":
        """Every seed that ever lived, in the order in which they were planted."""
        lives: list[SeedLife] = []
        latest: dict[str, int] = {}  # where the life of a slot's seed is in the list
        catalogue = self.host.catalogue
        for record in self.history:
            epoch, decision = int(record["epoch"]), GrowthDecision.of(record["decision"])
            for slot, value in record["contributions"].items():
                if lives[latest[slot]].fate in (GROWING, PERMANENT):
                    lives[latest[slot]] = replace(lives[latest[slot]], contribution=value)
            for change in map(StageChange.of, record["events"]):
                slot = change.slot
                if change.after == SeedStage.GERMINATED.name:
                    blueprint, blend = str(decision.blueprint), Blend[str(decision.blend)]
                    place = catalogue.slots.index(slot), catalogue.index(blueprint), blend
                    params = int(catalogue.total_costs()[place])
                    latest[slot] = len(lives)
                    lives.append(SeedLife(slot, blueprint, params, epoch))
                elif change.after in _FATES:
                    fate = SWITCHED_OFF if change.cause == _AT_END else _FATES[change.after]
                    lives[latest[slot]] = replace(lives[latest[slot]], fate=fate, ended=epoch)
        return tuple(lives)

    def export(self, sample: Sample | None = None) -> nn.Module:
        """The committed network as a plain module, checked against the host."""
        return self.host.export(sample)

    # --- to look at ----------------------------------------------------------------------

    def facts(self) -> GrowthFacts:
        """All that pages and pictures say of it."""
        name = self._model["name"] if self.folder is None else self.folder.path.resolve().name
        return facts_of(name, self.notes())

    def plot(self, *, dark: bool = False) -> "Figure":
        """How it grew, as a figure of matplotlib: scores, losses, contributions and slots."""
        return growth_figure(self.facts(), dark=dark)

    def write_report(self, out: str | Path | None = None) -> Path:
        """Write the page of this run into a folder, by default `report` in the run's own."""
        if out is None:
            if self.folder is None:
                raise GrowError(
                    "This run has no folder for its report", fix="name one: write_report(out)"
                )
            out = self.folder.path / REPORT
        return write_growth_report(self.facts(), Path(out))

    def _repr_html_(self) -> str:
        try:
            return growth_head(self.facts())
        except EsperError:  # there is no matplotlib
            return f"<pre>{escape(str(self.report()))}</pre>"

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
        place = self.folder.path / CHECKPOINT
        write_archive(place, kind=KIND, version=VERSION, tensors=tensors, notes=notes, ready=ready)

    def restore(self, archive: Archive) -> None:
        """Take over host, history and scores of a checkpoint of a run made like this one."""
        unpack(self.host, archive, training=False)
        notes = archive.notes
        self.history, self.before = list(notes["history"]), dict(notes["before"])
        self.seconds = list(notes.get("seconds") or ({} for _ in self.history))
        if notes["after"]:
            self.finish(notes["after"])


# --- report --------------------------------------------------------------------------------


GROWING, PERMANENT, PRUNED = "growing", "permanent", "pruned"
SWITCHED_OFF = "switched off at the end"  # since it was not permanent
_FATES = {SeedStage.FOSSILIZED.name: PERMANENT, SeedStage.PRUNED.name: PRUNED}
_AT_END = Cause.GOVERNOR.name  # what takes seeds out at once: in a run, its end


@dataclass(frozen=True)
class SeedLife:
    """A seed that lived in a run, and what became of it."""

    slot: str
    blueprint: str
    params: int
    planted: int  # the epoch after which it was planted
    fate: str = GROWING  # or permanent, pruned, switched off at the end
    ended: int | None = None  # the epoch after which its fate was decided
    contribution: float | None = None  # in percent points, when last measured

    @property
    def missed(self) -> str:
        """The contribution in words that nobody takes for what growing won."""
        if self.contribution is None:
            return ""
        size, last = abs(self.contribution), self.fate == PERMANENT
        if self.contribution < 0.0:
            return f", {'stands' if last else 'stood'} in the way by {size:.2f} points"
        if not last:
            return f", was missed by {size:.2f} points when it was last left out"
        return f", is missed by {size:.2f} points if it is left out"

    def __str__(self) -> str:
        ended = "" if self.ended is None else f", {self.fate} after {self.ended}"
        return (
            f"{self.blueprint} at {self.slot}: {self.params:,} parameters, planted after epoch "
            f"{self.planted}{ended}{self.missed}"
        )


@dataclass(frozen=True)
class Report:
    """Of one run; prints as text."""

    controller: str
    epochs: int
    horizon: int
    host_params: int
    room: int | None  # parameters that were allowed in seeds
    seeds: tuple[SeedLife, ...]  # every one that ever lived
    most_added: int  # parameters in seeds at any time, those on probation included
    decisions: tuple[tuple[int, str], ...]  # epoch and what was decided, waiting left out
    metric: str
    meaning: str | None  # of a score, in words
    device: str | None  # where it was trained
    precision: str
    before: Mapping[str, float]  # training
    after: Mapping[str, float]  # of the exported network; empty until the run is finished

    @property
    def grown(self) -> tuple[SeedLife, ...]:
        """Those that became part of the network."""
        return tuple(seed for seed in self.seeds if seed.fate == PERMANENT)

    @property
    def added(self) -> int:
        return sum(seed.params for seed in self.grown)

    @property
    def within_budget(self) -> bool:
        return self.room is None or self.most_added <= self.room

    def __str__(self) -> str:
        share = 100.0 * self.added / max(self.host_params, 1)
        limit = "no limit" if self.room is None else f"allowed {self.room:,}"
        lines = [
            f"{self.epochs} of {self.horizon} epochs under {self.controller!r}"
            + (f", on {self.device} in {self.precision} precision" if self.device else ""),
            f"parameters: {self.host_params:,} + {self.added:,} ({share:+.1f} %), at most "
            f"{self.most_added:,} in seeds at any time, {limit}: "
            + ("within the budget" if self.within_budget else "OVER THE BUDGET"),
            # A loss is turned into a score, which is another number than the loss.
            f"{'score' if self.metric == 'loss' else self.metric}: {_shown(self.before)} before "
            "training" + (f", {_shown(self.after)} of the exported network" if self.after else ""),
        ]
        if self.meaning and self.metric != "accuracy":
            lines.append(f"a score is {self.meaning}")
        if "test_score" in self.after:
            lines.append(f"test: {_shown(self.after, 'test_')}")
        lines += ["", "grown:" if self.grown else "nothing grew for good"]
        lines += [f"  {seed}" for seed in self.grown]
        if others := [f"  {seed}" for seed in self.seeds if seed.fate != PERMANENT]:
            lines += ["", "planted, and not permanent:", *others]
        if self.decisions:
            lines += ["", "decisions:"]
            lines += [f"  after epoch {epoch}: {what}" for epoch, what in self.decisions]
        return "\n".join(lines)


def _shown(scores: Mapping[str, float], of: str = "") -> str:
    return f"{scores[f'{of}score']:.2f} (loss {scores[f'{of}loss']:.4g})"
