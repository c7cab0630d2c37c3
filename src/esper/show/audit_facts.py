"""What an audit found, as plain values: what a model lacks, where, and how certain that is."""

import itertools
import json
import math
import tomllib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from functools import cached_property
from pathlib import Path
from typing import Any

from esper.archive import write_whole
from esper.leyline.constants import BY_HEART, CERTAIN, UNLEARNED
from esper.leyline.errors import DataError, in_words
from esper.show.report import Pictured
from esper.show.terminal import aligned, duration, listed, one_line_repr

# What verdicts go by: losses in units of guessing, certainty in standard errors.
WORTH = 0.005  # that a gain must be
INTERVAL = 2.0  # errors to both sides of a gain: what is outside is excluded
UNMOVED = 0.97  # validation loss above which nothing has been learned yet

SEEDS = 3  # of a combination at most, and combinations
LEADERS = 6  # candidates that they are made of
ROWS = 20  # that are printed
COLUMNS = ("place", "blueprint", "parameters", "cost", "gain", "in training", "rising", "verdict")
_SENTENCES = Path(__file__).parent / "templates" / "verdicts.toml"


class Verdict(StrEnum):
    """Of a candidate one of the first four, of the whole model any."""

    MISSING = "missing here"
    NOTHING = "nothing to gain"
    MEMORISE = "would memorise"
    UNCLEAR = "not enough data to tell"
    PLATEAU = "plateau"
    CAPACITY = "plain capacity"


def judged(
    gain: float, error: float | None, train_gain: float, guess: float, fell: float
) -> Verdict:
    """Of one candidate, from losses, that of guessing, and by how much the model's own fell in an
    epoch: what helps less than that may be learned without it, only later."""
    if error is None:
        return Verdict.UNCLEAR
    if gain > CERTAIN * error and gain >= WORTH * guess:
        return Verdict.MISSING if gain > fell else Verdict.UNCLEAR
    highest = gain + INTERVAL * error
    if train_gain >= WORTH * guess and highest < 0.0:
        return Verdict.MEMORISE
    return Verdict.NOTHING if highest < WORTH * guess else Verdict.UNCLEAR


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A seed that was heard. Losses are in the unit of the user's own."""

    slot: str
    blueprint: str
    params: int
    cost: float  # FLOPs of its training step over those of the model's
    epochs: float  # passes over the training data that it has learned from
    gain: float  # of validation loss
    error: float | None  # standard error of the gain, paired; None: there is only one sample
    train_gain: float  # on training batches before it learned from them
    slope: float  # by how much the gain rose in its last epoch
    verdict: Verdict

    @property
    def low(self) -> float:
        """The lower end of its gain, by which candidates are ranked."""
        return -math.inf if self.error is None else self.gain - INTERVAL * self.error

    def __repr__(self) -> str:
        error = "" if self.error is None else f" ± {self.error:.2g}"
        seed = f"{self.blueprint} at {self.slot}: +{self.params:,} parameters"
        return one_line_repr(self, f"{seed}, gain {self.gain:+.3g}{error}, {self.verdict}")

    def cells(self, digits: int) -> tuple[str, ...]:
        """As a row of a table, with so many decimals."""
        gain, train, slope = (f"{x:+.{digits}f}" for x in (self.gain, self.train_gain, self.slope))
        gain += " ± ?" if self.error is None else f" ± {INTERVAL * self.error:.{digits}f}"
        sizes = f"{self.params:,}", f"{self.cost:.0%}"
        return (self.slot, self.blueprint, *sizes, gain, train, slope, str(self.verdict))


@dataclass(frozen=True, kw_only=True)
class Audit(Pictured):
    """What a model lacks, and where; prints as a table, `plot()` is a map of it."""

    page_of = "audit_page"

    model: str
    host_params: int
    room: int | None  # parameters that the budget allows; None: no limit
    slots: tuple[Mapping[str, Any], ...]  # places as notes
    places: tuple[str, ...]  # their names, in the order in which the model runs them
    blueprints: tuple[str, ...]
    costs: tuple[tuple[int, ...], ...]  # parameters, by place and blueprint; below 0: does not fit
    candidates: tuple[Candidate, ...]  # those that were heard, best first
    guess: float  # loss of who knows nothing
    train_loss: float  # of the model alone, in its last epoch
    val_loss: float
    fell: float  # by how much the validation loss of the model alone fell in its last epoch
    first: int  # epochs that it trained alone
    epochs: int  # of the audition
    spent: float  # FLOPs in all, over those of an epoch of the model
    seconds: float
    settings: Mapping[str, Any]

    @cached_property
    def verdict(self) -> Verdict:
        """Of the whole model."""
        found = Counter(each.verdict for each in self.candidates)
        if found[Verdict.MISSING]:
            return Verdict.MISSING
        if self.outrun:
            return Verdict.UNCLEAR
        if self.val_loss - self.train_loss > BY_HEART * self.guess:
            return Verdict.MEMORISE
        if self.val_loss >= UNMOVED * self.guess:
            return Verdict.PLATEAU
        if found[Verdict.MEMORISE]:
            return Verdict.MEMORISE
        if 2 * found[Verdict.UNCLEAR] > len(self.candidates):
            return Verdict.UNCLEAR
        return Verdict.CAPACITY if self.train_loss >= UNLEARNED * self.guess else Verdict.NOTHING

    @property
    def outrun(self) -> bool:
        """Does the best seed help for certain, but by less than the model alone gains an epoch?"""
        best = self.candidates[0]
        return best.verdict is Verdict.UNCLEAR and WORTH * self.guess <= best.gain < self.fell

    @property
    def headline(self) -> str:
        """The answer in a sentence."""
        sentences: dict[str, str] = tomllib.loads(_SENTENCES.read_text(encoding="utf-8"))
        sentence = sentences["still learning" if self.outrun else self.verdict]
        missing = (each for each in self.candidates if each.verdict is Verdict.MISSING)
        best = next(missing, self.candidates[0])
        gain = best.cells(self.digits)[4].lstrip("+")
        return sentence.format(best=named([best]), gain=gain, planted=self.planted, **vars(self))

    @property
    def planted(self) -> str:
        """The best combination in words, if there is one."""
        return named(self.combinations[0]) if self.combinations else ""

    @property
    def cost(self) -> str:
        """What was done, and what that took."""
        fitting = sum(self.affords(cost) for row in self.costs for cost in row)
        share = max(each.epochs for each in self.candidates) / self.epochs  # of those that stayed
        return (
            f"{len(self.candidates)} of {fitting} seeds that fit were heard, one by one, for "
            f"{self.epochs} epochs on {share:.0%} of the batches, after {self.first} of the model "
            f"alone: as much as {self.spent:.1f} epochs of it, {duration(self.seconds)}"
        )

    def affords(self, cost: int) -> bool:
        return cost >= 0 and (self.room is None or cost <= self.room)

    def best(self, k: int = 1) -> tuple[Candidate, ...]:
        """The k with the highest lower end of their gain, whatever their verdict."""
        return self.candidates[:k]

    @cached_property
    def combinations(self) -> tuple[tuple[Candidate, ...], ...]:
        """Up to three that fit the budget, best first: of what is missing, in different places; or
        the largest seed, where capacity is."""
        if self.verdict is Verdict.CAPACITY:
            return ((max(self.candidates, key=lambda each: (each.params, each.low)),),)
        missing = [each for each in self.candidates if each.verdict is Verdict.MISSING][:LEADERS]
        sets = (c for size in range(1, SEEDS + 1) for c in itertools.combinations(missing, size))
        apart = (c for c in sets if len({each.slot for each in c}) == len(c))
        found = [c for c in apart if self.affords(sum(each.params for each in c))]
        return tuple(sorted(found, key=lambda c: -sum(each.low for each in c))[:SEEDS])

    def __repr__(self) -> str:
        count = f"{len(self.candidates)} candidates"
        return one_line_repr(self, f"{self.model}: {self.verdict}, {count}")

    def __str__(self) -> str:
        limit = "" if self.room is None else f", at most {self.room:,} more"
        lines = [f"{self.model}: {self.host_params:,} parameters{limit}", f"{self.headline}.", ""]
        rows = [COLUMNS, *(each.cells(self.digits) for each in self.candidates[:ROWS])]
        lines += aligned(rows)
        if rest := Counter(each.verdict for each in self.candidates[ROWS:]):
            told = ", ".join(f"{number} {verdict}" for verdict, number in rest.items())
            lines.append(f"and {rest.total()} more: {told}")
        for title, chosen in zip(("to plant:", "or:", "or:"), self.combinations, strict=False):
            lines += ["", f"{title} {named(chosen)}"]
        return "\n".join([*lines, "", self.cost])

    @property
    def digits(self) -> int:
        """Decimals in which a gain worth having has two figures."""
        return max(1 - math.floor(math.log10(WORTH * self.guess)), 0)

    def save(self, path: str | Path) -> Path:
        """Write a page that needs nothing else: map, table, verdicts and costs."""
        file, page = Path(path), self.page()
        with in_words(f"{file} cannot be written", OSError, error=DataError):
            file.parent.mkdir(parents=True, exist_ok=True)
            write_whole(file, str(page.drawn()))
        return file

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1, allow_nan=False)

    @classmethod
    def of_json(cls, text: str) -> "Audit":
        """What `to_json` wrote."""
        with in_words("This is no audit", valid="what to_json gave", error=DataError):
            note = json.loads(text)
            heard = (each | {"verdict": Verdict(each["verdict"])} for each in note["candidates"])
            note["candidates"] = [Candidate(**each) for each in heard]
            note["costs"] = map(tuple, note["costs"])
            lists = ("candidates", "costs", "slots", "places", "blueprints")
            return cls(**note | {name: tuple(note[name]) for name in lists})


def named(chosen: Sequence[Candidate]) -> str:
    size = sum(each.params for each in chosen)
    return f"{listed([f'{each.blueprint} at {each.slot}' for each in chosen])} (+{size:,})"
