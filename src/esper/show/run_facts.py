"""All that a report says, read from a run's files. Nothing is written, and training may go on.

What a run does not have is empty here; the pictures then say so. Four episodes are told step by
step: the best, a typical one, the worst, and one that waited.

Shapes: `T` steps of an episode.
"""

import json
import math
import tomllib
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from esper.leyline import LifecycleOp, SeedStage
from esper.leyline.constants import SCORED_EPOCHS
from esper.nissa import Cell, RunLayout, RunReader, StoreError
from esper.nissa.store import file_of
from esper.show.report import Pictured
from esper.show.terminal import duration, listed

if TYPE_CHECKING:
    from esper.simic.training.training_runs import Checkpoint

LATE_EPISODES = 240  # enough to say what a policy does now
LATE_SHARE = 0.25  # of the run's rounds, at most

CONFIG, ABOUT = "config.toml", "run.json"
# Phases of a round; the first three are part of "play".
PHASES = ("step", "decide", "report", "play", "learn", "evaluate")
RENAMED_PHASES = {"tell": "report", "judge": "evaluate"}  # names in Esper 0.1

Row = Mapping[str, Any]
Curve = Mapping[int, float]  # numbers over rounds; NaN where one is not a number
Shares = list[tuple[int, dict[str, float]]]  # (round, share of each action)
Array = NDArray[np.float64]
Controls = Mapping[int, Sequence[Array]]  # curves [T] by the seed of a case

SAME_SCORE = 1e-6  # points

BEST, TYPICAL, WORST, WAITING = "best", "typical", "worst", "waiting"


def signed(value: float, digits: int = 2) -> str:
    """A number with its sign, which zero does not have."""
    text = f"{value:+.{digits}f}"
    return text[1:] if float(text) == 0 else text.replace("-", "−")


class Score(NamedTuple):
    """An evaluation over all contexts: net gain / scale, on validation data."""

    round: int
    value: float
    interval: tuple[float, float] | None = None  # None, as from one case of each context
    episodes: int | None = None

    def __str__(self) -> str:
        return f"{signed(self.value)} {self.ends}".rstrip()

    @property
    def ends(self) -> str:
        """Of its interval, where it has one."""
        return "" if self.interval is None else f"[{', '.join(map(signed, self.interval))}]"


@dataclass(frozen=True, kw_only=True)
class Story:
    """One episode, or run of `grow`, step by step."""

    kind: str = ""
    episode: Row = field(default_factory=dict)
    slots: tuple[str, ...]
    cells: Sequence[Cell]
    marks: Sequence[tuple[int, str, str]]  # step, op and slot of every decision
    accuracy: Array  # [T] percent, of the network as it is; NaN where it was not measured
    committed: Array  # [T] percent, of what is permanent
    control: Array | None = None  # [T] percent, of the same case, never grown
    failure: tuple[int, str] | None = None  # step and reason of a rollback

    @property
    def steps(self) -> int:
        return len(self.accuracy)


@dataclass(frozen=True, kw_only=True)
class Facts(Pictured):
    """One run, as far as it is."""

    page_of = "training_page"

    path: Path
    config: Row = field(default_factory=dict)
    about: Row = field(default_factory=dict)  # versions, machine, suite
    layout: RunLayout | None = None
    rounds: Sequence[Row] = ()  # what their episodes came to
    learned: Sequence[Score] = ()  # of the controller in training, over rounds
    baselines: Mapping[str, Score] = field(default_factory=dict)
    updates: Mapping[str, Curve] = field(default_factory=dict)
    seconds: Mapping[str, float] = field(default_factory=dict)  # in all, by phase
    shares: Mapping[str, Shares] = field(default_factory=dict)  # by head; slots: of plantings
    attribution: Sequence[Row] = ()  # of the best episode of all evaluations, seed by seed
    anomalies: Sequence[Row] = ()
    notes: Sequence[tuple[int, str]] = ()
    dropped: Mapping[str, int] = field(default_factory=dict)
    resumed_after: Sequence[int] = ()
    done: int = 0  # rounds, by the last checkpoint
    late: Sequence[int] = ()  # the last rounds
    episodes: Sequence[Row] = ()  # of the last rounds
    plantings: Sequence[Row] = ()  # of the last rounds, in order
    stories: Sequence[Story] = ()

    @property
    def best(self) -> Score | None:
        return max(self.learned, key=lambda score: score.value, default=None)

    @property
    def played(self) -> int:
        """Episodes of training."""
        return sum(each["episodes"] for each in self.rounds)

    @property
    def last_round(self) -> int:
        return self.rounds[-1]["round"] if self.rounds else self.done

    @property
    def training_seconds(self) -> float | None:
        """Without the controls and baselines that are measured first."""
        return sum(self.phases.values()) if self.phases else None

    @property
    def phases(self) -> dict[str, float]:
        """Seconds of each, none counted twice: playing is split into its parts and the rest."""
        spent = {name: self.seconds[name] for name in PHASES if name in self.seconds}
        if "play" in spent:
            spent["play"] -= sum(spent.get(name, 0.0) for name in PHASES[:3])
        return spent

    @property
    def rolled_back(self) -> int:
        return sum(each["rolled_back"] for each in self.rounds)

    @property
    def headline(self) -> str:
        """What was learned, with its figures."""
        rounds = "1 round" if self.last_round == 1 else f"{self.last_round:,} rounds"
        time = "" if self.training_seconds is None else f" and {duration(self.training_seconds)}"
        done = f"After {self.played:,} episodes in {rounds}{time},"
        best = self.best
        if best is None:
            said = f"{done} the controller has not been evaluated yet."
            if not self.played:
                said = "Nothing has been played yet."
            others = [f"{_article(name)} {score}" for name, score in self.baselines.items()]
            if others:
                said += f" To compare with: {listed(others)}; never growing is 0."
            return said
        compared = [
            f"{_relation(best, score)} {_article(name)} ({score})"
            for name, score in self.baselines.items()
        ]
        compared.append(f"{_relation(best, Score(0, 0.0, (0.0, 0.0)))} never growing (0)")
        return (
            f"{done} Tamiyo scores {best} at its best, in round {best.round}: {listed(compared)}."
        )

    @property
    def late_words(self) -> str:
        """The last rounds, in words."""
        if not self.late:
            return "no round"
        first, last = self.late[0], self.late[-1]
        return f"round {last}" if first == last else f"rounds {first} to {last}"

    def by_context(self) -> dict[str, list[Row]]:
        """Episodes of the last rounds whose gain is known."""
        found: dict[str, list[Row]] = defaultdict(list)
        for row in self.episodes:
            if row["net_gain"] is not None:
                found[row["context"]].append(row)
        return found


def _relation(best: Score, other: Score) -> str:
    """What the intervals allow to say."""
    if best.interval is None or other.interval is None:
        return "more than" if best.value > other.value else "not more than"
    if best.interval[0] > other.interval[1]:
        return "clearly above"
    return "clearly below" if best.interval[1] < other.interval[0] else "not distinguishable from"


def _article(name: str) -> str:
    return {"random": "random decisions", "heuristic": "the heuristic"}.get(name, name)


def read_facts(run: Path) -> Facts:
    """Everything; a run that has not begun to tell anything has its settings."""
    folder = run if run.is_dir() else run.parent
    config, about = _read(folder / CONFIG, tomllib.loads), _read(folder / ABOUT, json.loads)
    from esper.simic.training.training_runs import RunFolder  # which needs torch

    kept = RunFolder(folder).newest()
    judged = scores(kept)
    # The controller in training, and those that were judged before the first round.
    learned = next((name for name, found in judged.items() if found[-1].round > 0), None)
    known = Facts(
        path=folder,
        config=config,
        about=about,
        done=kept[0] if kept else 0,
        learned=judged.pop(learned) if learned else (),
        baselines={name: found[-1] for name, found in judged.items()},
    )
    if config and not kept and not file_of(folder).is_file():
        return known
    try:
        return _told(run, known)
    except StoreError as error:
        if not kept:
            raise
        said = f"The telemetry cannot be read, and what is missing here was in it: {error}"
        return replace(known, notes=[(known.done, said)])


def _told(run: Path, known: Facts) -> Facts:
    """And what the telemetry tells."""
    with RunReader(run) as reader:
        rounds = reader.rounds()
        late = _late_rounds(rounds)
        asked = "SELECT * FROM {} WHERE round >= ? ORDER BY round, event, n"
        since = late[:1] or (None,)  # no round is later than nothing
        episodes = list(reader.query(asked.format("episodes"), since))
        changes = reader.query(asked.format("lifecycle"), since)
        plantings = [row for row in changes if row["after"] == SeedStage.GERMINATED.name]
        controls = read_controls(known.path)
        updates: dict[str, dict[int, float]] = defaultdict(dict)
        for name, number, value in reader.query(
            "SELECT name, round, value FROM updates ORDER BY round"
        ).rows:
            updates[name][number] = math.nan if value is None else value
        stories = (_story(reader, *each, controls) for each in choose(episodes, plantings).items())
        return replace(
            known,
            layout=reader.layout,
            rounds=rounds,
            updates=updates,
            seconds=_seconds_by_phase(reader),
            shares=_shares(reader, rounds),
            attribution=list(
                reader.query(
                    "SELECT * FROM attributions WHERE event = (SELECT event FROM attributions "
                    "ORDER BY score DESC, round, event LIMIT 1) ORDER BY n"
                )
            ),
            anomalies=[row for row in reader.each("anomalies") if row["raised"]],
            notes=[(row["round"], row["text"]) for row in reader.each("notes")],
            dropped=reader.dropped(),
            resumed_after=[row["round"] for row in reader.runs()[1:]],
            late=late,
            episodes=episodes,
            plantings=plantings,
            stories=[story for story in stories if story.cells],
        )


def _read(file: Path, parse: Callable[[str], Any]) -> Row:
    """A file's table; nothing where it is absent or damaged."""
    try:
        found = parse(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _late_rounds(rounds: Sequence[Row]) -> list[int]:
    """From the end, until there are episodes enough."""
    late: list[int] = []
    episodes = 0
    for each in rounds[: -1 - max(1, round(LATE_SHARE * len(rounds))) : -1]:
        if episodes < LATE_EPISODES:
            late.insert(0, each["round"])
            episodes += each["episodes"]
    return late


def scores(checkpoint: "Checkpoint | None") -> dict[str, list[Score]]:
    """Return the evaluations of every controller in the order of rounds.

    They are read from the checkpoint, because the telemetry may have failed.
    """
    scores: dict[str, list[Score]] = defaultdict(list)
    if checkpoint is None:
        return scores
    for name, round_, score, low, high, episodes in checkpoint.state.notes.get("eval_history", ()):
        if score is None:
            continue
        has_interval = low is not None and high is not None and high > low
        interval = (low, high) if has_interval else None
        scores[name].append(Score(round_, score, interval, episodes))
    return scores


def _seconds_by_phase(reader: RunReader) -> dict[str, float]:
    """Return the total seconds of every phase, also of runs of Esper 0.1."""
    totals = reader.query(
        "SELECT substr(name, 9), sum(value) FROM samples WHERE name GLOB 'seconds_*' GROUP BY name"
    ).rows
    return {RENAMED_PHASES.get(phase, phase): seconds for phase, seconds in totals}


def _shares(reader: RunReader, rounds: Sequence[Row]) -> dict[str, Shares]:
    """By head, without the round that is being played: its first steps are not like the others.

    Slots are those of plantings; the head's own shares are over every op that names a slot.
    """
    played = {each["round"] for each in rounds}
    planting = {"slot": LifecycleOp.GERMINATE.name}
    return {
        head: [each for each in reader.action_shares(head, planting.get(head)) if each[0] in played]
        for head in reader.layout.heads
    }


# --- episodes that are worth a look -------------------------------------------------------------


def choose(episodes: Sequence[Row], plantings: Sequence[Row]) -> dict[str, Row]:
    """Episodes by what they are an example of; none is chosen twice."""
    grown = {(row["round"], row["env"]) for row in plantings}
    known = [row for row in episodes if row["net_gain"] is not None]
    waited = [row for row in known if (row["round"], row["env"]) not in grown]
    ranked = sorted(
        (row for row in known if (row["round"], row["env"]) in grown),
        key=lambda row: (row["net_gain"], row["round"], row["env"]),
    )
    chosen: dict[str, Row] = {BEST: ranked[-1]} if ranked else {}
    if len(ranked) > 2:
        chosen[TYPICAL] = ranked[(len(ranked) - 1) // 2]
    if len(ranked) > 1:
        chosen[WORST] = ranked[0]
    if waited:
        often = Counter(row["context"] for row in waited).most_common(1)[0][0]
        chosen[WAITING] = next(row for row in reversed(waited) if row["context"] == often)
    return chosen


def _story(reader: RunReader, kind: str, episode: Row, controls: Controls) -> Story:
    number, env = episode["round"], episode["env"]
    decisions = reader.decisions(number, env)
    measured = {row["step"]: row for row in reader.steps(number, env)}
    steps = max((*measured, *(each.step for each in decisions)), default=-1) + 1

    def curve(name: str) -> Array:
        found = [measured.get(step, {}).get(name) for step in range(steps)]
        return np.array([np.nan if value is None else value for value in found], dtype=float)

    failures = reader.query(
        "SELECT step, reason FROM rollbacks WHERE round = ? AND env = ?", (number, env)
    ).rows
    return Story(
        kind=kind,
        episode=episode,
        slots=reader.layout.slots,
        cells=reader.timeline(number, env),
        marks=[(d.step, d.actions["op"], d.actions.get("slot", "")) for d in decisions],
        accuracy=curve("accuracy"),
        committed=curve("committed"),
        control=control_of(episode, controls),
        failure=failures[0] if failures else None,
    )


def control_of(episode: Row, controls: Controls) -> Array | None:
    """Of the curves with an episode's seed, the one that ends in the score of its control."""
    score = episode["control"]
    same_case = (
        each
        for each in controls.get(episode["seed"], ())
        if score is not None and abs(each[-SCORED_EPOCHS:].mean() - score) < SAME_SCORE
    )
    return next(same_case, None)


def read_controls(run: Path) -> Controls:
    """Curves of never-grown cases from the latest checkpoint, empty where there is none.

    They are stored under a hash of their context and the seed of their case; behind the curve is
    the score on test data, which is not shown.
    """
    from safetensors import SafetensorError, safe_open

    found: dict[int, list[Array]] = {}
    files = sorted(run.glob("checkpoints/round-*/state/tensors-*.safetensors"))
    try:
        for file in files[-1:]:
            with safe_open(file, framework="numpy") as tensors:
                for name in tensors.keys():  # noqa: SIM118 - it is no mapping
                    if name.startswith("controls."):
                        curve = np.asarray(tensors.get_tensor(name), dtype=float)[:-1]
                        found.setdefault(int(name.rpartition(".")[2]), []).append(curve)
    except (OSError, ValueError, SafetensorError):  # a run in training drops old checkpoints
        return {}
    return found
