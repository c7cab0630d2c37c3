"""Who goes along with a run of `grow`: telemetry, a display of its progress, a function of yours.

A run has one place where it tells what an epoch came to, and everyone hears the same.
"""

import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from esper.api.run_records import FIGURES, epoch_of, versions
from esper.api.ticking import GrowthDecision, NotFiniteError, StageChange
from esper.leyline import Cause, LifecycleOp, SeedStage
from esper.leyline.errors import EsperError, first_line
from esper.leyline.ops import cause_name
from esper.nissa import Hub, RunLayout, Sink, events, open_sinks, require_sinks
from esper.nissa.anomalies import not_a_number
from esper.nissa.hub import tell
from esper.nissa.store import usable_store
from esper.show.progress import GrowthProgress
from esper.tamiyo.controllers.protocol import Explaining
from esper.tamiyo.features import FeatureTable

if TYPE_CHECKING:
    from esper.api.grown_runs import GrownRun

OnEpoch = Callable[[dict[str, Any]], object]
_CAUSES = {cause_name(cause): int(cause) for cause in (*LifecycleOp, *Cause)}


@dataclass(frozen=True)
class EpochNews:
    """What an epoch came to."""

    record: dict[str, Any]  # as the run's history holds it: the same if the run is repeated
    seconds: Mapping[str, float]  # spent in each phase: train, measure, decide


class Observer:
    """Hears of a run; whoever observes overrides what it wants to hear."""

    def begin(self, run: "GrownRun") -> None:
        """Training begins or goes on; what was before is in the run's history."""

    def trying(self, told: str) -> None:
        """Something happened that is no epoch of the run's own: one of a tryout, a rollback."""

    def epoch(self, news: EpochNews) -> None:
        """An epoch is over and in the history, and about to be kept."""

    def keeping(self) -> None:
        """All is written but for the rename that counts: who must not be behind it waits here."""

    def kept(self, news: EpochNews) -> None:
        """The epoch is kept, where the run has a folder: nothing of it can be lost any more."""

    def close(self, failure: BaseException | None) -> None:
        """Training is over, or was ended by this."""


class Shown(Observer):
    """The progress that people watch, and a function of theirs that is called with the record of
    every epoch."""

    def __init__(self, on_epoch: OnEpoch | None, *, quiet: bool) -> None:
        self.on_epoch, self.quiet = on_epoch, quiet
        if on_epoch is not None and not callable(on_epoch):
            fix = "pass a function of the record of an epoch"
            raise EsperError("on_epoch is no function", given=repr(on_epoch), fix=fix)

    def begin(self, run: "GrownRun") -> None:
        params, known = run.host.catalogue.host_params, run.settings
        about = f"on {known.device} in {known.precision} precision; a score is {known.score}"
        stream = None if self.quiet else sys.stderr
        self.progress = GrowthProgress(stream, epochs=known.epochs, params=params, about=about)

    def trying(self, told: str) -> None:
        self.progress.say(told)

    def kept(self, news: EpochNews) -> None:
        if self.on_epoch is not None:
            self.on_epoch(news.record)
        self.progress(epoch_of(news.record, news.seconds))

    def close(self, failure: BaseException | None) -> None:
        self.progress.close()


class GrowthTelemetry(Observer):
    """Tells sinks, and the store of a run that has a folder, what every epoch came to.

    A network that grows is a population of one; a round of its telemetry is an epoch, with one
    step. All but the evidence for a decision is made of the run's history, so a store that lost
    something is filled up from it. Nothing that goes wrong here stops a run.
    """

    def __init__(self, sinks: Sequence[Sink | str] = ()) -> None:
        self._asked, self.failed = [sinks] if isinstance(sinks, str) else sinks, False
        require_sinks(self._asked)
        self._commit: Callable[[], object] = lambda: None  # waits until an epoch is on the disk
        self._planted: dict[str, str] = {}  # blueprints, by slot

    # --- as a run goes on ----------------------------------------------------------------

    def begin(self, run: "GrownRun") -> None:
        self.run, host = run, run.host
        # Only what has learned looks at features.
        learned = run.settings.fingerprint is not None
        features = FeatureTable.of(host.catalogue).names if learned else ()
        self.layout = RunLayout.of(host.space, features, host.catalogue)
        folder = None if run.folder is None else run.folder.path
        sinks, store = open_sinks(self._asked, folder), None
        if folder is not None:  # as it was at the end of the last epoch
            store = usable_store(folder, self.layout, after=len(run.history) or -1)
        self.hub = Hub(*([] if store is None else [store]), *sinks)
        with self._going_on():
            self._open(None if store is None else store.last_commit)

    def _open(self, known: int | None) -> None:
        """Tell what starts here, and of the epochs before what the store does not know."""
        run = self.run
        config = asdict(run.settings) | {"model": run.notes()["model"]}
        facts = {"config": config, "data": run.settings.data}
        facts |= {"versions": versions(), "seeds": {"run": run.settings.seed}}
        self.hub.emit(events.RunStarted(round=len(run.history), layout=self.layout, **facts))
        if known is None:
            loss, score = run.before["loss"], run.before["score"]
            self.hub.emit(events.EpochEnded(round=0, val_loss=loss, score=score))
        for record in run.history:  # all, to know what stands in which slot by now
            self._tell(record, known=known or 0)
        self.hub.commit(len(run.history))

    def epoch(self, news: EpochNews) -> None:
        if self.failed:
            return
        epoch = int(news.record["epoch"])
        with self._going_on():
            self._tell(news.record)
            self._decided(epoch)
            seconds = {f"seconds_{phase}": spent for phase, spent in news.seconds.items()}
            self.hub.emit(events.Sampled(round=epoch, values=seconds))
            if after := self.run.after:
                self.hub.emit(events.GrowthEnded(round=epoch, added=self.run.host.added, **after))
            self._commit = self.hub.request(epoch)

    def keeping(self) -> None:
        self._commit()

    @contextmanager
    def _going_on(self) -> Iterator[None]:
        """Whatever fails inside, such as a controller that cannot explain itself, training goes on
        and is told once."""
        try:
            yield
        except Exception as error:
            given = f"{type(error).__name__}: {first_line(error)}"
            tell(f"Telemetry failed and was dropped, training goes on: {given}")
            self.hub.close()
            self.hub, self.failed = Hub(), True

    def close(self, failure: BaseException | None) -> None:
        epoch, why = len(self.run.history), failure
        if isinstance(why, NotFiniteError):
            # Of the epoch that failed: where the run goes on, it is another one.
            self.hub.emit(not_a_number(epoch + 1, why.what, why.fix or ""))
        state, text = "finished" if self.run.finished else "stopped", ""
        if why is not None:
            state = "stopped" if isinstance(why, KeyboardInterrupt) else "failed"
            text = f"{type(why).__name__} {first_line(why)}".strip()
            self.hub.emit(events.Noted(round=epoch, text=f"Stopped after epoch {epoch}: {text}"))
        self.hub.emit(events.RunEnded(round=epoch, state=state, text=text))
        self.hub.close()

    # --- from a record to events ---------------------------------------------------------

    def _tell(self, record: dict[str, Any], known: int = -1) -> None:
        """What the history says of an epoch; those that are known already are only followed."""
        epoch, emit = int(record["epoch"]), self.hub.emit
        decision = GrowthDecision(**record["decision"])
        changes = [StageChange(**note) for note in record["events"]]
        worth = record["contributions"]
        seeds = [self._planted.get(slot, "") for slot in worth]  # as they were when it was measured
        blueprints = []  # of each change: a slot may be cleared and planted in one epoch
        for change in changes:
            if change.after == SeedStage.GERMINATED.name:
                self._planted[change.slot] = decision.blueprint or ""
            blueprints.append(self._planted[change.slot])
        if epoch <= known:
            return
        emit(events.EpochEnded(round=epoch, **{name: record[name] for name in FIGURES}))
        if held := record["slots"]:
            alphas = {f"alpha_{slot}": each["alpha"] for slot, each in held.items()}
            emit(events.Sampled(round=epoch, values=alphas))
        if "rollback" in record:
            note = record["rollback"]
            emit(not_a_number(epoch, note["what"], f"{note['seed']} was taken out."))
        if worth:
            columns = {"slot": list(worth), "blueprint": seeds, "contribution": [*worth.values()]}
            emit(events.Contributed(round=epoch, **columns))
        if heard := record.get("shadows"):
            kept = ("slot", "blueprint", "epochs", "gain", "error")
            shown = {name: [each[name] for each in heard] for name in kept}
            emit(events.Auditioned(round=epoch, **shown))
        if changes:
            rows = {
                "env": [0] * len(changes),
                "slot": [self.layout.slots.index(change.slot) for change in changes],
                "before": [SeedStage[change.before] for change in changes],
                "after": [SeedStage[change.after] for change in changes],
                "cause": [_CAUSES[change.cause] for change in changes],
                "blueprint": [self.layout.blueprints.index(name) for name in blueprints],
            }
            reasons = [change.reason for change in changes]
            emit(events.LifecycleChanged(round=epoch, step=0, reason=reasons, **rows))

    def _decided(self, epoch: int) -> None:
        """The decision after an epoch, among what, and of what has learned also why."""
        memory = self.run.host.memory
        if memory.ended:  # the end decides nothing
            return
        assert memory.actions is not None
        assert memory.legality is not None
        actions = memory.actions.canonical().values
        why: dict[str, Any] = {"values": [math.nan], "log_probs": [[math.nan] * actions.shape[1]]}
        if isinstance(memory.controller, Explaining):
            why = memory.controller.thoughts()._asdict()
            if why["observations"].shape[1] != len(self.layout.features):  # ones without names
                del why["observations"]
        else:
            why["masks"] = memory.legality.resolved(actions)
        self.hub.emit(events.Decisions(round=epoch, step=0, actions=actions, **why))
        if memory.refused:
            env, slot, op, reason = zip(*memory.refused, strict=True)
            self.hub.emit(
                events.Refused(round=epoch, step=0, env=env, slot=slot, op=op, reason=reason)
            )
