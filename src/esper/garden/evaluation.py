"""Paired evaluation: every controller on the same cases, scored on test data.

Results are kept as one line of JSON for each episode, in a file that survives being cut off: it is
only ever appended to, a whole batch at a time, and a line that was cut off by a crash is dropped,
so evaluation goes on where it was.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from esper.archive.files import append_lines
from esper.distributed import SINGLE_PROCESS
from esper.garden.cases import EVALUATION_SEED, Case
from esper.garden.contexts import Context, by_shape
from esper.garden.dealing import Ranks
from esper.garden.episodes import EPOCHS_ALONE
from esper.garden.playing import Controls, Job, Played, Playground
from esper.garden.rewards import net_of_rent
from esper.garden.statistics import Estimate, interquartile_mean_interval, mean_interval
from esper.leyline.constants import DEFAULT_RENT
from esper.leyline.errors import AgreementError, DataError, DuplicateNameError, in_words
from esper.nissa import CasesPlayed, Hub, RunEnded, RunLayout, RunStarted
from esper.nissa.store import usable_store
from esper.tamiyo.controllers import Controller
from esper.tamiyo.controllers.protocol import Checkable
from esper.tolaria.population_config import PopulationConfig
from esper.tolaria.tasks import GARDEN_BATCH, GARDEN_BATCHES

FORMAT = "esper results 2"
HARM = 0.5  # points of net gain below the paired control; less is taken for noise

Progress = Callable[[str, int, int], None]  # what is played, episodes done, of how many


# --- results -----------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Result:
    """One episode of one controller. Scores are percent on test data, gains points."""

    controller: str
    made: str  # a fingerprint of the controller: another one may come under the same name
    context: str
    key: str  # of the context: equal where its numbers are
    seed: int
    scale: float  # points that count as 1 in this context
    test: float  # the committed network, mean of the last epochs
    control: float  # the same case, never grown
    validation: float
    area: float  # mean over all epochs of the committed network's validation score
    exposure: float  # share of the host's parameters added × share of the episode
    added: int  # parameters in fossilized seeds at the end
    seeds: int  # fossilized
    flops: float  # of training the episode's network
    interventions: int
    rolled_back: bool

    @classmethod
    def of(cls, case: Case, **values: Any) -> "Result":
        """Of an episode on this case, under its context's name unless that is among the values."""
        context = case.context
        named = {"context": context.name, "key": context.key, "scale": context.scale}
        return cls(**{**named, "seed": case.seed, **values})

    def net_gain(self, rent: float = DEFAULT_RENT) -> float:
        """Points over the control, less the rent."""
        return net_of_rent(self.test - self.control, self.exposure, rent)

    def score(self, rent: float = DEFAULT_RENT) -> float:
        """The net gain in units of what can be gained in its context."""
        return self.net_gain(rent) / self.scale

    @property
    def identity(self) -> tuple[str, str, str, int]:
        return self.controller, self.made, self.key, self.seed


class ResultFile:
    """Results in a file that grows."""

    def __init__(
        self, path: Path | None, settings: dict[str, Any], ranks: Ranks = SINGLE_PROCESS
    ) -> None:
        """`settings` are what results depend on beside their case; another file's are refused.

        Without a path results are only held; so they are by all `ranks` but the first, which
        tells them what it has read.
        """
        self.path = path if ranks.rank == 0 else None
        self.results: list[Result] = []
        self._hub = Hub()  # tells the same to whoever watches
        header = json.dumps({"format": FORMAT, **settings}, sort_keys=True)
        if self.path is not None:
            self._open(self.path, header)
        told = ranks.all_gather_object([asdict(result) for result in self.results])[0]
        self.results = [Result(**each) for each in told]

    def _open(self, path: Path, header: str) -> None:
        what, valid = f"Results cannot be kept in {path}", "a file of yours"
        with in_words(what, OSError, valid=valid, error=DataError):
            if path.exists():
                self._read(path, header)
            else:
                path.parent.mkdir(parents=True, exist_ok=True)
                append_lines(path, [header])

    def add(self, results: Iterable[Result]) -> None:
        """Append a batch; it is on the disk when this returns."""
        fresh = list(results)
        if self.path is not None:
            append_lines(self.path, [json.dumps(asdict(result)) for result in fresh])
        self.results += fresh
        self._hub.emit(_played(fresh))

    @contextmanager
    def watched(self, controllers: Iterable[str], episodes: int) -> Iterator[None]:
        """While so many are to be played; whoever watches learns of each, and how it ended."""
        total, store = len(self.results) + episodes, None
        if episodes and self.path is not None:
            store = usable_store(Path(f"{self.path}.sqlite"), RunLayout((), (), ()), after=-1)
        config = {"controllers": list(dict.fromkeys(controllers)), "episodes": total}
        with Hub(*([] if store is None else [store])) as self._hub:
            self._hub.emit(RunStarted(round=0, config=config))
            self._hub.emit(_played(self.results))
            try:
                yield
            finally:
                state = "finished" if len(self.results) >= total else "stopped"
                self._hub.emit(RunEnded(round=0, state=state))

    def _read(self, path: Path, header: str) -> None:
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            what = f"{path} does not hold results"
            raise DataError(what, given="a file that is not text") from error
        whole, ended, rest = text.rpartition("\n")
        if not ended and header.startswith(text):  # not even its first line was finished
            path.write_text("", encoding="utf-8")
            append_lines(path, [header])
            return
        lines = whole.split("\n")
        if lines[0] != header:
            raise DataError(
                f"{path} holds results of another evaluation",
                given=lines[0][:200] or "an empty file",
                valid=header,
                fix="name another file, or ask for what it was made with",
            )
        if rest:  # the last batch was cut off
            with path.open("r+", encoding="utf-8") as stream:
                stream.truncate(len((whole + "\n").encode()))
        self.results = [parse(line, path, n + 2) for n, line in enumerate(lines[1:])]


def _played(results: Sequence[Result]) -> CasesPlayed:
    names = ("controller", "context", "seed", "added", "interventions")
    columns = {name: [getattr(result, name) for result in results] for name in names}
    gains = [result.net_gain() for result in results]
    scores = [result.score() for result in results]
    return CasesPlayed(round=0, score=scores, net_gain=gains, **columns)


def parse(line: str, path: Path, number: int) -> Result:
    """One line of a result file."""
    what, fix = f"Line {number} of {path} is not a result", "delete the file and evaluate anew"
    with in_words(what, (ValueError, TypeError), fix=fix, error=DataError):
        record = json.loads(line)
        names = {field.name for field in fields(Result)}
        if set(record) != names:
            raise ValueError(f"keys {sorted(set(record) ^ names)}")
        return Result(**record)


# --- evaluation --------------------------------------------------------------------------------


def evaluate(
    controllers: Sequence[Controller],
    contexts: Sequence[Context],
    ground: Playground | None = None,
    *,
    seeds: int = 4,
    file: Path | None = None,
    controls: Controls | None = None,
    progress: Progress = lambda what, done, total: None,
    stop: Callable[[], bool] = lambda: False,
) -> list[Result]:
    """Play `seeds` cases of every context with every controller; the ground's ranks share the work.

    With `file` results are kept there and what it already holds is not played again. `stop` is
    asked after every batch; if it says so before all is played, that is an error, and what was
    played is in the file.
    """
    ground = ground or Playground()
    names = [controller.name for controller in controllers]
    if len(set(names)) != len(names):
        raise DuplicateNameError(
            "Controllers that are compared need different names", given=", ".join(names)
        )
    if not names or not contexts or seeds < 1:
        given = f"{len(names)} controllers, {len(contexts)} contexts, {seeds} seeds of each"
        raise AgreementError("There is nothing to evaluate", given=given, valid="at least 1 each")
    _require_possible(controllers, contexts, ground)
    stored = ResultFile(file, _settings(ground), ground.ranks)
    done = {result.identity: result for result in stored.results}
    cases = [Case(context, EVALUATION_SEED + n) for n in range(seeds) for context in contexts]
    made = {controller.name: fingerprint_of(controller) for controller in controllers}

    def sought(name: str, case: Case) -> tuple[str, str, str, int]:
        return name, made[name], case.context.key, case.seed

    controls = Controls(horizon=ground.horizon) if controls is None else controls
    unknown = [case for case in cases if any(sought(name, case) not in done for name in names)]
    # A control that a stored result was paired with stays the control of its case.
    for result in done.values():
        controls.learn_test(result.key, result.seed, result.control)
    missing = controls.missing(unknown, test=True)
    # Controls come first, so that whatever is played knows its own when it is over.
    jobs = [Job((), case) for case in missing]
    jobs += [
        Job(controller, case)
        for controller in controllers
        for case in cases
        if sought(controller.name, case) not in done
    ]
    tell = partial(progress, "episodes")
    with stored.watched(names, len(jobs) - len(missing)):
        for places, played in ground.play(jobs, progress=tell, stop=stop):
            known = [place for place in places if place < len(missing)]
            controls.learn([jobs[place].case for place in known], played.rows(slice(len(known))))
            batch = [jobs[place] for place in places[len(known) :]]
            fresh = _results(batch, made, played.rows(slice(len(known), None)), controls)
            done |= {result.identity: result for result in fresh}
            stored.add(fresh)
    return [
        # The scale is the suite's present one: it is no part of what was played.
        replace(done[sought(name, case)], scale=case.context.scale)
        for name in names
        for case in cases
    ]


def fingerprint_of(controller: Controller) -> str:
    """What tells controllers of one name apart: their own word for it, or else their name."""
    return str(getattr(controller, "fingerprint", controller.name))


def _settings(ground: Playground) -> dict[str, Any]:
    """What results depend on beside controller, context and seed: the rules of the world."""
    rules = repr((ground.config or PopulationConfig(), EPOCHS_ALONE, GARDEN_BATCH, GARDEN_BATCHES))
    digest = hashlib.blake2b(rules.encode(), digest_size=6).hexdigest()
    told = {} if ground.rent == DEFAULT_RENT else {"rent": ground.rent}
    return {"horizon": ground.horizon, "rules": digest, **told}


def _require_possible(
    controllers: Sequence[Controller], contexts: Sequence[Context], ground: Playground
) -> None:
    """Refuse what a host or an episode contradicts before hours have been spent on the others."""
    blueprints = None if ground.config is None else ground.config.blueprints
    for alike in by_shape(contexts):
        catalogue = alike[0].catalogue(blueprints)
        for controller in controllers:
            if isinstance(controller, Checkable):
                controller.require_possible(catalogue, ground.horizon)


def _results(
    batch: Sequence[Job], made: Mapping[str, str], played: Played, controls: Controls
) -> list[Result]:
    """The results of jobs whose players are controllers."""
    found = []
    tests = controls.test([job.case for job in batch]).tolist()
    for (player, case), control, record in zip(batch, tests, played.records(), strict=True):
        name = player.name  # type: ignore[union-attr]  # schedules play the controls only
        found.append(Result.of(case, controller=name, made=made[name], control=control, **record))
    return found


class Standing(NamedTuple):
    """One line of the table: how a controller did over all its cases."""

    controller: str
    score: Estimate  # interquartile mean of net gain / scale
    gain: Estimate  # mean net gain, points
    harmful: float  # share of episodes that ended worse than never grown
    added: float  # mean parameters added
    interventions: float
    rollbacks: int
    episodes: int


def standings(results: Sequence[Result], rent: float = DEFAULT_RENT) -> list[Standing]:
    """Every controller's line, in order of first appearance."""
    lines = []
    for name in dict.fromkeys(result.controller for result in results):
        own = [result for result in results if result.controller == name]
        lines.append(
            Standing(
                controller=name,
                score=interquartile_mean_interval(grid(own, lambda result: result.score(rent))),
                gain=mean_interval(grid(own, lambda result: result.net_gain(rent))),
                harmful=_mean([result.net_gain(rent) < -HARM for result in own]),
                added=_mean([result.added for result in own]),
                interventions=_mean([result.interventions for result in own]),
                rollbacks=sum(result.rolled_back for result in own),
                episodes=len(own),
            )
        )
    return lines


def grid(results: Sequence[Result], value: Callable[[Result], float]) -> list[list[float]]:
    """A value of one controller's results, [contexts][episodes]."""
    by_context: dict[str, list[Result]] = {}
    for result in results:
        by_context.setdefault(result.key, []).append(result)
    return [
        [value(each) for each in sorted(own, key=lambda result: result.seed)]
        for own in by_context.values()
    ]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
