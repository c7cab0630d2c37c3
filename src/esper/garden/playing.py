"""Whole episodes: whoever decides, on which case, and what came of it; and paired controls.

Everything that plays episodes without a learner plays them here: jobs of one shape of host go
together, many at once, whoever decides for them.

Shapes: `N` episodes, `T` epochs of an episode.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Self, Unpack

import torch
from torch import Tensor

from esper.distributed import SINGLE_PROCESS
from esper.garden.cases import Case
from esper.garden.contexts import Context, by_shape
from esper.garden.dealing import Costs, Ranks, in_turns
from esper.garden.episodes import Episodes, World
from esper.garden.rewards import net_of_rent
from esper.leyline import Actions, AgreementError, EsperError, SeedStage
from esper.leyline.constants import DEFAULT_EPISODE_LENGTH, DEFAULT_RENT, SCORED_EPOCHS
from esper.leyline.settings import COUNT, require
from esper.leyline.slots import require_form
from esper.tamiyo.controllers import Controller, RowSchedule, Schedule, SideBySide
from esper.tamiyo.controllers.protocol import Auditioning

ROWS_AT_ONCE = {"cpu": 64, "cuda": 1024}  # of controls

Progress = Callable[[int, int], None]  # episodes done, of how many


class StoppedError(EsperError):
    """There was more to play when it was told to stop."""


class Job(NamedTuple):
    """An episode to be played."""

    player: Controller | Schedule  # whoever decides, or what is planted when; () only waits
    case: Case


@dataclass(frozen=True)
class Played:
    """What came of episodes, [N] each unless said."""

    test: Tensor  # percent: the committed network on test data, mean of the last epochs
    validation: Tensor  # percent: the same on validation data
    curve: Tensor  # [N, T] percent: the committed network on validation data
    exposure: Tensor  # share of the host's parameters added × share of the episode
    added: Tensor  # parameters in fossilized seeds at the end
    seeds: Tensor  # fossilized seeds at the end
    flops: Tensor  # of training, see tolaria/flops.py
    interventions: Tensor
    rolled_back: Tensor  # bool

    @classmethod
    def of(cls, episodes: Episodes) -> Self:
        """Of the episodes that every row has just finished."""
        ledger, life = episodes.ledger, episodes.population.lifecycle
        kept = life.at(SeedStage.FOSSILIZED)
        return cls(
            test=ledger.test[:, -SCORED_EPOCHS:].mean(1),
            validation=ledger.committed[:, -SCORED_EPOCHS:].mean(1),
            curve=ledger.committed.clone(),
            exposure=ledger.exposure[:, -1].clone(),
            added=(life.params * kept).sum(1),
            seeds=kept.sum(1),
            flops=ledger.flops.clone(),
            interventions=life.interventions.clone(),
            rolled_back=ledger.rolled_back.clone(),
        )

    def rows(self, chosen: slice | Tensor) -> "Played":
        return Played(**{name: values[chosen] for name, values in vars(self).items()})

    def records(self) -> list[dict[str, Any]]:
        """One of plain numbers for each episode, with its `area` in place of its curve."""
        columns = {name: values for name, values in vars(self).items() if name != "curve"}
        columns["area"] = self.curve.mean(1)
        lists = [values.tolist() for values in columns.values()]
        return [dict(zip(columns, row, strict=True)) for row in zip(*lists, strict=True)]


def batches(jobs: Sequence[Job], rows: int, order: Sequence[int] | None = None) -> list[list[int]]:
    """The places of jobs that are played together: of one shape of host, at most so many.

    As evenly as can be: a last batch of few would cost as much as a whole one.
    """
    by_host: dict[str, list[int]] = {}
    for place in range(len(jobs)) if order is None else order:
        by_host.setdefault(jobs[place].case.context.host_shape, []).append(place)
    found = []
    for places in by_host.values():
        even = -(-len(places) // -(-len(places) // rows))
        found += [places[first : first + even] for first in range(0, len(places), even)]
    return found


class Playground:
    """Rows in which jobs are played; they are kept for the next ones with hosts of their shape."""

    def __init__(
        self,
        rows: int = 64,
        *,
        test: bool = True,
        attribute: bool = True,
        rent: float = DEFAULT_RENT,
        ranks: Ranks = SINGLE_PROCESS,
        **world: Unpack[World],
    ) -> None:
        """`test`, `attribute`, `rent`: as for episodes. Of `ranks` that play the same jobs, each
        plays a part of the batches, which are the same for any number, and all hear of all."""
        require("The number of rows to play in", rows, COUNT, error=AgreementError)
        self.most, self.rent, self.ranks, self.config = rows, rent, ranks, world.get("config")
        self.horizon = world.get("horizon", DEFAULT_EPISODE_LENGTH)
        self._make = partial(Episodes, test=test, attribute=attribute, rent=rent, **world)
        self._episodes: Episodes | None = None
        self._costs = Costs()  # by shape of host

    def episodes(self, contexts: Sequence[Context], rows: int | None = None) -> Episodes:
        """At least so many rows for these contexts: those there are, or else new ones."""
        kept, rows = self._episodes, self.most if rows is None else rows
        if kept is None or len(kept) < rows or any(c.key not in kept.contexts for c in contexts):
            self._episodes = None  # gone before the new ones need its memory
            self._episodes = kept = self._make(contexts, rows)
        return kept

    def play(
        self,
        jobs: Sequence[Job],
        *,
        mixed: bool = False,
        epochs: int | None = None,
        prepare: Callable[[Episodes, list[int]], None] = lambda episodes, places: None,
        progress: Progress = lambda done, total: None,
        stop: Callable[[], bool] = lambda: False,
    ) -> Iterator[tuple[list[int], Played]]:
        """Play all, batch by batch, in their order or `mixed`, whole or only the first epochs.

        Yields the places of a batch's jobs among all, and what came of them.
        `prepare` is called with the rows and the places of their jobs before a batch begins;
        `progress` and `stop` after it, when whoever asked has dealt with it. To be told to stop
        while there is more to play is an error.
        """
        # Mixed, so that every batch has about as many seeds of each kind and pools keep sizes.
        chance = torch.Generator().manual_seed(0)
        order = torch.randperm(len(jobs), generator=chance).tolist() if mixed else None
        contexts = list({job.case.context.key: job.case.context for job in jobs}.values())
        alike = {each[0].host_shape: each for each in by_shape(contexts)}
        dealt, ranks, done = batches(jobs, self.most, order), self.ranks, 0
        work = [(jobs[each[0]].case.context.host_shape, float(len(each))) for each in dealt]

        def play(number: int) -> tuple[list[int], dict[str, Tensor]]:
            batch = dealt[number]
            episodes = self.episodes(alike[work[number][0]], len(batch))
            runs = _by_player(jobs, batch)
            places = [place for run in runs for place in run]
            prepare(episodes, places)
            played = _play(episodes, [[jobs[p] for p in run] for run in runs], epochs)
            return places, dict(vars(played))

        for turn in in_turns(play, work, costs=self._costs, ranks=ranks):
            for _, (places, columns) in turn:
                yield places, Played(**columns)
                done += len(places)
                progress(done, len(jobs))
            if done < len(jobs) and any(ranks.all_gather_object(stop())):
                raise StoppedError(
                    "Playing was told to stop", given=f"{len(jobs) - done} episodes left"
                )

    def play_all(self, jobs: Sequence[Job], **how: Any) -> Played:
        """What came of every job, in their order; `how` is that of `play`."""
        found = list(self.play(jobs, **how))
        places = torch.tensor([place for batch, _ in found for place in batch])
        parts = [vars(played) for _, played in found]
        whole = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
        return Played(**whole).rows(places.argsort())


def _by_player(jobs: Sequence[Job], places: Sequence[int]) -> list[list[int]]:
    """The places of each player's jobs; all schedules together are one player's."""
    runs: dict[int | None, list[int]] = {}
    for place in places:
        player = jobs[place].player
        runs.setdefault(None if isinstance(player, tuple) else id(player), []).append(place)
    return list(runs.values())


def _player_of(run: Sequence[Job]) -> Controller:
    first = run[0].player
    if not isinstance(first, tuple):
        return first
    return RowSchedule([job.player for job in run if isinstance(job.player, tuple)])


def _play(episodes: Episodes, runs: Sequence[Sequence[Job]], epochs: int | None) -> Played:
    """Every player's jobs side by side; rows that are left over repeat the first case and wait."""
    together = SideBySide([(_player_of(run), len(run)) for run in runs])
    cases = [job.case for run in runs for job in run]
    count = len(cases)
    cases += [cases[0]] * (len(episodes) - count)
    episodes.begin(torch.arange(len(episodes)), cases)
    together.reset([case.context.name for case in cases])
    starts = torch.ones(len(episodes), dtype=torch.bool)
    hears = any(isinstance(player, Auditioning) for player in together.parts)
    for _ in range(episodes.horizon if epochs is None else epochs):
        signals, legal = episodes.signals(), episodes.legal()
        actions = together.act(signals, legal, starts)
        plan = together.audition(signals, legal) if hears else None
        episodes.advance(idle_where(~episodes.running, actions), plan)
        starts = torch.zeros_like(starts)
    return Played.of(episodes).rows(slice(count))


def idle_where(idle: Tensor, actions: Actions) -> Actions:
    """The same decisions, but rows that are in no episode wait."""
    values = torch.where(idle[:, None], torch.zeros_like(actions.values), actions.values)
    return Actions(actions.space, values).canonical()


# --- paired controls --------------------------------------------------------------------------


class Controls:
    """The same cases never grown, against which growth is credited; each is measured once."""

    def __init__(self, **world: Unpack[World]) -> None:
        self.world, self.horizon = world, world.get("horizon", DEFAULT_EPISODE_LENGTH)
        self._validation: dict[tuple[str, int], Tensor] = {}  # [T] each
        self._test: dict[tuple[str, int], float] = {}

    def __len__(self) -> int:
        return len(self._validation)

    def missing(self, cases: Sequence[Case], *, test: bool = False) -> list[Case]:
        """Those that have not been measured or, for `test`, whose test score is not known; once."""
        known: Collection[tuple[str, int]] = self._test if test else self._validation
        return list({_key(case): case for case in cases if _key(case) not in known}.values())

    def learn_test(self, key: str, seed: int, test: float) -> None:
        """The test score of a control as it was measured before, unless it is known here."""
        self._test.setdefault((key, seed), test)

    def require(
        self, cases: Sequence[Case], ranks: Ranks = SINGLE_PROCESS, *, parts: int = 1, **how: Any
    ) -> None:
        """Measure what is missing, in so many parts at least, which `ranks` that all call it share.

        `how` is that of `play`.
        """
        missing = self.missing(cases)
        most = ROWS_AT_ONCE[torch.device(self.world.get("device", "cpu")).type]
        rows = max(1, min(most, -(-len(missing) // parts)))
        ground = Playground(rows, attribute=False, ranks=ranks, **self.world)
        for places, played in ground.play([Job((), case) for case in missing], **how):
            self.learn([missing[place] for place in places], played)

    def learn(self, cases: Sequence[Case], played: Played) -> None:
        """Never-grown cases that were played elsewhere."""
        for case, curve, test in zip(cases, played.curve, played.test.tolist(), strict=True):
            self._validation[_key(case)] = curve.clone()
            self._test[_key(case)] = test

    def validation(self, cases: Sequence[Case]) -> Tensor:
        """[N, T] percent, epoch by epoch."""
        return torch.stack([self._validation[_key(case)] for case in cases])

    def test(self, cases: Sequence[Case]) -> Tensor:
        """[N] percent, mean of the last epochs."""
        return torch.tensor([self._test[_key(case)] for case in cases], dtype=torch.float64)

    def scores(self, cases: Sequence[Case], played: Played, rent: float) -> Tensor:
        """[N]: net gains over the controls in units of each context's scale, by validation data."""
        control = self.validation(cases)[:, -SCORED_EPOCHS:].mean(1)
        scale = torch.tensor([case.context.scale for case in cases], dtype=torch.float64)
        return net_of_rent(played.validation - control, played.exposure, rent) / scale

    def state_dict(self) -> dict[str, Tensor]:
        """Everything that was measured, for checkpoints."""
        return {
            f"{key}.{seed}": torch.cat([curve, torch.tensor([self._test[key, seed]]).double()])
            for (key, seed), curve in self._validation.items()
        }

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        for name, values in state.items():
            key, _, seed = name.partition(".")
            what = "Stored controls are of episodes of another length"
            require_form(what, values[1:], (self.horizon,))  # and a test score
            self._validation[key, int(seed)] = values[:-1].clone()
            self._test[key, int(seed)] = float(values[-1])


def _key(case: Case) -> tuple[str, int]:
    return case.context.key, case.seed
