"""Who goes along with a run of `grow`: telemetry, a display of its progress, a function of yours.

A run has one place where it tells what an epoch came to, and everyone hears the same.
"""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from esper.api.run_records import epoch_of
from esper.leyline.errors import EsperError
from esper.show.progress import GrowthProgress

if TYPE_CHECKING:
    from esper.api.grown_runs import GrownRun

OnEpoch = Callable[[dict[str, Any]], object]


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


@dataclass
class Told(Observer):
    """A function of the user's own, called with the record of every epoch."""

    on_epoch: OnEpoch

    def __post_init__(self) -> None:
        if not callable(self.on_epoch):
            fix = "pass a function of the record of an epoch"
            raise EsperError("on_epoch is no function", given=repr(self.on_epoch), fix=fix)

    def kept(self, news: EpochNews) -> None:
        self.on_epoch(news.record)


class Shown(Observer):
    """The progress that people watch."""

    def begin(self, run: "GrownRun") -> None:
        params, settings = run.host.catalogue.host_params, run.settings
        about = (
            f"on {settings.device} in {settings.precision} precision; a score is {settings.score}"
        )
        self.progress = GrowthProgress(
            sys.stderr, epochs=settings.epochs, params=params, about=about
        )
        self.progress.__enter__()

    def trying(self, told: str) -> None:
        self.progress.say(told)

    def kept(self, news: EpochNews) -> None:
        self.progress(epoch_of(news.record, news.seconds))

    def close(self, failure: BaseException | None) -> None:
        self.progress.__exit__(failure)


@contextmanager
def observed(run: "GrownRun", observers: Sequence[Observer]) -> Iterator[None]:
    """While training goes on; all are told of its end, the last one first."""
    with ExitStack() as ends:
        for observer in observers:
            observer.begin(run)
            ends.push(lambda _, failure, *__, to=observer: to.close(failure))
        yield
