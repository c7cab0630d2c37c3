"""Trials: one training of a network on one case, grown or not, and its result in a file.

Shapes: `N` rows.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from esper.distributed import SINGLE_PROCESS
from esper.garden import Case, Controls, Episodes, Job, Playground, Result, ResultFile
from esper.garden.dealing import Ranks
from esper.garden.playing import StoppedError
from esper.leyline.errors import AgreementError
from esper.tamiyo.controllers import Arm, RandomLegal
from esper.tolaria.population_config import PopulationConfig
from studies.fixed import FixedRun, Mark, Start, train_fixed
from studies.folders import Clock, Tell

GROW, RANDOM, FIXED = "grow", "random", "fixed"
WAYS = (GROW, RANDOM, FIXED)


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What is trained, in which way, how long and how fast."""

    way: str = FIXED  # grow by the arms; grow at random; have the arms from the beginning
    epochs: int
    rate: float
    arms: tuple[Arm, ...] = ()
    start: Start = Start.USUAL  # of arms that are there from the beginning

    def __str__(self) -> str:
        """Everything that matters, as results keep it."""
        words = [self.way, f"rate={self.rate:g}", f"epochs={self.epochs}"]
        words += ["arms=" + "+".join(map(str, self.arms))] if self.arms else []
        words += [f"start={self.start}"] if self.arms and self.way == FIXED else []
        return " ".join(words)


class Trial(NamedTuple):
    """A setting on a case, under the name that tables give it."""

    name: str
    label: str  # of the context
    case: Case
    setting: Setting

    @property
    def identity(self) -> tuple[str, str, str, int]:
        return self.name, str(self.setting), self.case.context.key, self.case.seed


@dataclass(frozen=True, kw_only=True)
class Workshop:
    """Where trials are carried out."""

    rows: int
    device: str
    config: PopulationConfig
    horizon: int
    controls: Controls
    clock: Clock
    tell: Tell
    ranks: Ranks = SINGLE_PROCESS  # that share the work

    def run(
        self, what: str, trials: Sequence[Trial], file: ResultFile, *, last: bool = False
    ) -> bool:
        """Carry out what the file does not hold yet; False if the time is over after that.

        Every call that finds something to do does some of it. What comes last may be finished
        when the time is over.
        """
        done = {result.identity for result in file.results}
        todo = [trial for trial in trials if trial.identity not in done]
        finished = len(trials) - len(todo)
        with file.watched((trial.identity[0] for trial in trials), len(todo)):
            try:
                for batch in self._batches(todo):
                    self.controls.require([trial.case for trial, _ in batch], self.ranks)
                    file.add([self._result(trial, mark) for trial, mark in batch])
                    finished += len(batch)
                    self.tell(what, finished, len(trials))
            except StoppedError:
                return False
        return last or not todo or not any(self.ranks.all_gather_object(self._is_over()))

    def _is_over(self) -> bool:
        return self.clock.over

    def _batches(self, trials: Sequence[Trial]) -> Iterator[list[tuple[Trial, "Outcome"]]]:
        """Until the time is over: ranks that share batches keep all that they have played."""
        begun = False
        for way in WAYS:
            own = [trial for trial in trials if trial.setting.way == way]
            if begun and own and any(self.ranks.all_gather_object(self._is_over())):
                raise StoppedError("The time is over", given=f"{len(own)} trials left")
            yield from self._fixed(own) if way == FIXED else self._grown(way, own)
            begun = begun or bool(own)

    def _grown(self, way: str, trials: Sequence[Trial]) -> Iterator[list[tuple[Trial, "Outcome"]]]:
        if any(trial.setting.epochs != self.horizon for trial in trials):
            raise AgreementError(
                "What grows plays whole episodes",
                given=f"{sorted({trial.setting.epochs for trial in trials})} epochs",
                valid=f"{self.horizon} epochs",
            )
        chance = RandomLegal()
        jobs = [Job(t.setting.arms if way == GROW else chance, t.case) for t in trials]

        def set_rates(episodes: Episodes, places: list[int]) -> None:
            """Rates outlive the episode's start, which gives them to the newborn hosts."""
            rates = [trials[place].setting.rate for place in places]
            rates += [self.config.rate] * (len(episodes) - len(places))
            everyone = torch.arange(len(episodes))
            episodes.population.set_rates(everyone, rate=torch.tensor(rates).double())

        ground = Playground(
            self.rows,
            horizon=self.horizon,
            device=self.device,
            config=self.config,
            ranks=self.ranks,
        )
        for places, played in ground.play(jobs, prepare=set_rates, stop=self._is_over):
            outcomes = [Outcome(**record) for record in played.records()]
            yield [(trials[place], each) for place, each in zip(places, outcomes, strict=True)]

    def _fixed(self, trials: Sequence[Trial]) -> Iterator[list[tuple[Trial, "Outcome"]]]:
        """Trials that differ in nothing but their length are one training with several marks."""
        together: dict[tuple[object, ...], list[Trial]] = {}
        for trial in trials:
            setting = trial.setting
            same = (trial.case, setting.rate, setting.arms, setting.start)
            together.setdefault(same, []).append(trial)
        asked: dict[FixedRun, list[Trial]] = {}
        for group in together.values():
            setting = group[0].setting
            marks = tuple(sorted({trial.setting.epochs for trial in group}))
            run = FixedRun(group[0].case, setting.rate, marks, setting.arms, setting.start)
            asked[run] = group
        batches = train_fixed(
            list(asked),
            rows=self.rows,
            device=self.device,
            config=self.config,
            ranks=self.ranks,
            stop=self._is_over,
        )
        for batch in batches:
            found = []
            for run, marks_of_run in batch:
                by_epochs = {mark.epochs: mark for mark in marks_of_run}
                for trial in asked[run]:
                    found.append((trial, _outcome(by_epochs[trial.setting.epochs])))
            yield found

    def _result(self, trial: Trial, outcome: "Outcome") -> Result:
        case, setting = trial.case, trial.setting
        exposure = outcome.exposure
        if exposure is None:  # there from the beginning to the end
            exposure = outcome.added / case.context.catalogue().host_params
        return Result.of(
            case,
            controller=trial.name,
            made=str(setting),
            context=trial.label,
            control=float(self.controls.test([case])),
            **(outcome._asdict() | {"exposure": exposure}),
        )


class Outcome(NamedTuple):
    """What a result has beside its trial."""

    test: float
    validation: float
    area: float
    exposure: float | None  # None: the seeds were there all the time
    added: int
    seeds: int
    flops: float
    interventions: int
    rolled_back: bool


def _outcome(mark: Mark) -> Outcome:
    return Outcome(
        mark.test, mark.validation, mark.area, None, mark.added, mark.seeds, mark.flops, 0, False
    )
