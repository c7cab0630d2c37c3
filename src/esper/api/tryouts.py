"""Trying out the finalists of an audition: one cast after the other is planted where it began, and
the host is trained from there up to now, as if it had been chosen then.

    OUT/start/   the run as it was where the audition began, until no checkpoint needs it

Nothing of a tryout is kept but what it came to: a run that is stopped in one begins it again, and
comes to the same.
"""

import math
import shutil
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from esper.api import ranks
from esper.api.growing_model import GrowingModel
from esper.api.observers import EpochNews
from esper.api.run_records import total_flops
from esper.api.scoring import Scores
from esper.api.ticking import NotFiniteError
from esper.archive import Archive, read_archive, write_archive
from esper.nissa import Clock
from esper.show.terminal import listed
from esper.tamiyo.controllers.auditioning import ALONE, LEAST_TRIED, Audition, Cast, Casting
from esper.tamiyo.controllers.learned import TokenController
from esper.tamiyo.controllers.protocol import Controller

if TYPE_CHECKING:
    from esper.api.grow_loop import Growth

START, KIND, VERSION = "start", "grow-start", 2
MOST_TRIED = 0.5  # of what a training of the host costs: after that no other cast is tried out
EARLY = 0.2  # epochs of the host, by which who is ahead may only be early
COMPARED = 2  # epochs, the last ones, over which validation losses are averaged


@dataclass(frozen=True)
class Trained:
    """An epoch of training, before its decision."""

    loss: float
    scores: Scores
    flops: float | None
    clock: Clock


def casting_of(controller: Controller, host: GrowingModel) -> Casting | None:
    """Who decides where finalists can be tried out; None: the controller itself does."""
    adviser = controller if isinstance(controller, TokenController) else None
    rule = adviser.rule if adviser else controller
    if not isinstance(rule, Audition) or rule.config.tries == 0:
        return None
    casting = Casting(rule, adviser)
    rounds = int(casting.rule.rounds(torch.tensor(host.horizon or 0)))
    return casting if rounds >= LEAST_TRIED else None


class Tryouts:
    """Those of one run."""

    def __init__(self, growth: "Growth", casting: Casting) -> None:
        self.growth, self.casting = growth, casting
        self.start: tuple[Archive, Trained] | None = None  # where the audition began
        rounds = casting.rule.rounds(torch.tensor(growth.host.horizon or 0))
        self._last = casting.first + int(rounds)  # the epoch after which finalists are tried out
        folder = growth.run.folder
        self._place = None if folder is None else folder.path / START

    # --- where the audition began ------------------------------------------------------------

    def begin(self, trained: Trained) -> None:
        """The decision after which shadows are heard comes next."""
        state = self.growth.state()
        self.start = state, trained
        if self._place is not None and ranks.rank() == 0:
            figures = {"loss": trained.loss, "scores": asdict(trained.scores)}
            notes = {"state": state.notes, **figures, "flops": trained.flops}
            write_archive(
                self._place, kind=KIND, version=VERSION, tensors=state.tensors, notes=notes
            )

    def go_on(self) -> None:
        """With what a stopped run has kept, unless its finalists were tried out already."""
        if self._place is not None and self.casting.first <= self._epochs < self._last:
            archive = read_archive(self._place, kind=KIND, version=VERSION)
            notes = archive.notes
            trained = Trained(notes["loss"], Scores(**notes["scores"]), notes["flops"], Clock())
            self.start = Archive(archive.tensors, notes["state"]), trained

    def kept(self) -> None:
        """The run is. Once also the checkpoint before lies past the tryouts, no start is needed."""
        if self._epochs > self._last and self._place is not None and self._place.is_dir():
            shutil.rmtree(self._place)

    @property
    def _epochs(self) -> int:
        return len(self.growth.run.history)

    # --- trying out ----------------------------------------------------------------------------

    def held(self, news: EpochNews) -> EpochNews:
        """The finalists are tried out up to this epoch, until one of them is ahead of the host
        alone, or they cost too much: the run goes on with it, or as if nothing had been.
        """
        run, casting = self.growth.run, self.casting
        casts, last = casting.finalists, news.record["epoch"]
        casting.take(ALONE)
        run.host.shadows.end()
        alone, history = self.growth.state(), [*run.history, news.record]
        before, fell = _validation_loss(history), _validation_loss(history[:-1])
        lead = casting.rule.config.ahead * abs(before) + EARLY * max(fell - before, 0.0)
        purse = MOST_TRIED * (run.host.horizon or 0)  # epochs of the host
        own = news.record["flops"]
        record, spent, tryouts = news.record, Counter(news.seconds), list[dict[str, Any]]()
        for cast in casts:
            first_trained = len(self.growth.trained_flops)
            told = self._tried(cast, last)
            # With the epoch in which it diverged, whose record is missing.
            trial_flops = total_flops(self.growth.trained_flops[first_trained:])
            whole = bool(told) and told[-1].record["epoch"] == last  # it did not diverge
            after = _validation_loss([each.record for each in told]) if whole else math.nan
            chosen = after < before - lead
            flops = [each.record["flops"] or 0.0 for each in told[1:]]
            # About an epoch of the host alone, where FLOPs are not counted.
            purse -= sum(cost / own if cost and own else 1.0 for cost in flops)
            for each in told:
                spent.update(each.seconds)
            note = {"seeds": self._names(cast), "val_loss": after if whole else None}
            tryouts.append(note | {"alone": before, "chosen": chosen, "flops": trial_flops})
            if chosen:
                record = _record_of(told, news.record)
            if chosen or purse < 0.0:
                break
        if not tryouts[-1]["chosen"]:
            self.growth.return_to(alone)
            casting.take(ALONE)
        self.start = None
        return EpochNews(record | {"tryouts": tryouts}, spent)

    def _names(self, cast: Cast) -> list[str]:
        arms = self.casting.arms(cast, self.growth.host.catalogue)
        return [f"{arm.blueprint} at {arm.slot}" for arm in arms]

    def _tried(self, cast: Cast, last: int) -> list[EpochNews]:
        """What becomes of these, from where the audition began; less if it diverges."""
        assert self.start is not None  # the audition began before it ended
        state, trained = self.start
        self.growth.return_to(state)
        self.casting.take(cast)
        told: list[EpochNews] = []
        with suppress(NotFiniteError):
            told.append(self.growth.decided(replace(trained, clock=Clock())))
            for epoch in range(self.casting.first, last):
                told.append(self.growth.epoch(epoch))
                words = f"trying out {listed(self._names(cast))}: epoch {epoch + 1}/{last}"
                for observer in self.growth.observers:
                    observer.trying(f"{words}, validation {told[-1].record['val_loss']:.4f}")
        return told


def _record_of(told: list[EpochNews], alone: Mapping[str, Any]) -> dict[str, Any]:
    """An epoch's record as that of a finalist, with all that happened to it until then; what the
    epoch cost and what shadows showed is that of the host alone.
    """
    records = [each.record for each in told]
    costs = {name: alone[name] for name in ("flops", "shadow_cost", "shadows") if name in alone}
    return records[-1] | costs | {
        "decision": records[0]["decision"],
        "events": [event for record in records for event in record["events"]],
        "most_added": max(record["most_added"] for record in records),
    }  # fmt: skip


def _validation_loss(history: Sequence[Mapping[str, Any]]) -> float:
    recent = [float(record["val_loss"]) for record in history[-COMPARED:]]
    return sum(recent) / max(len(recent), 1)
