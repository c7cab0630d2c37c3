"""Whoever goes along with a run hears of every epoch once, before and after it is kept."""

from pathlib import Path

import pytest

import esper
from esper.api.batches import Data
from esper.api.grow_loop import Growth
from esper.api.grow_settings import GrowSettings
from esper.api.grown_runs import GrownRun, GrowthFolder
from esper.api.observers import EpochNews, Observer
from esper.api.scoring import Scoring
from tests.api.tables import TRAIN, VAL, mlp, wrapped


class Diary(Observer):
    """Writes down what it hears, and what is on the disk by then."""

    def __init__(self, fails_after: int = 99) -> None:
        self.heard: list[tuple[str, int, int]] = []
        self.fails_after = fails_after

    def begin(self, run: GrownRun) -> None:
        self.run = run
        self._write("begin")

    def epoch(self, news: EpochNews) -> None:
        assert self.run.history[-1] is news.record
        assert dict(news.seconds) == self.run.seconds[-1]
        assert list(news.seconds) == ["train", "measure", "decide"]
        assert min(news.seconds.values()) > 0.0
        self._write("epoch")

    def kept(self, news: EpochNews) -> None:
        self._write("kept")
        if news.record["epoch"] == self.fails_after:
            raise KeyboardInterrupt

    def close(self, failure: BaseException | None) -> None:
        self.failure = failure
        self._write("close")

    def _write(self, what: str) -> None:
        assert self.run.folder is not None
        on_disk = len(self.run.folder.checkpoint().notes["history"])
        self.heard.append((what, len(self.run.history), on_disk))


def growth(folder: Path, *observers: Observer) -> Growth:
    host = wrapped(budget=esper.Budget(None, epochs=3), isolation="dual_pass")
    settings = GrowSettings(budget=None, epochs=3, loss="cross_entropy", batch_size=16)
    run = GrownRun(host, settings, folder=GrowthFolder(folder))
    data, scoring = Data(TRAIN, VAL, None, 16), Scoring.of("cross_entropy", "auto")
    return Growth(run, data, scoring, "never", "AdamW", None, observers)


def test_an_epoch_is_told_before_and_after_it_is_kept(tmp_path: Path) -> None:
    diary = Diary()
    going = growth(tmp_path, diary)
    going.begin(TRAIN)
    going.go()
    told = [each for n in (1, 2, 3) for each in (("epoch", n, n - 1), ("kept", n, n))]
    assert diary.heard == [("begin", 0, 0), *told, ("close", 3, 3)]


def test_all_are_told_of_the_end_also_if_one_fails(tmp_path: Path) -> None:
    diary, failing = Diary(), Diary(fails_after=2)
    going = growth(tmp_path, failing, diary)
    going.begin(TRAIN)
    with pytest.raises(KeyboardInterrupt):
        going.go()
    assert diary.heard[-1] == failing.heard[-1] == ("close", 2, 2)
    assert isinstance(diary.failure, KeyboardInterrupt)


def test_seconds_of_epochs_are_kept_with_the_run(tmp_path: Path) -> None:
    budget = esper.Budget(0, epochs=2)
    run = esper.grow(mlp(), TRAIN, VAL, loss="cross_entropy", budget=budget, controller="never",
                     out=tmp_path)  # fmt: skip
    again = esper.resume(tmp_path, mlp())
    assert len(again.seconds) == 2
    assert again.seconds == run.seconds
