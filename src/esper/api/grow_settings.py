"""What a run of `grow` is asked for: one value for `esper.grow`, `esper.resume`, the command line
and checkpoints. Without torch, so that the command line can show it at once.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from fractions import Fraction
from typing import Any, Union

from esper.leyline import DEFAULT_EPISODE_LENGTH, EsperError
from esper.leyline.errors import in_words, require_equal, require_known
from esper.leyline.settings import Count, NotNegative, Positive, Whole, require_settings

AUTO = "auto"  # slots, metric: whatever fits; device: CUDA where there is one
EVERY = "every"  # slots: all that there are
OPTIMIZER = "AdamW"
OWN_LOOP = "heuristic"  # the controller of loops of one's own, where shadows may have no loss
FULL, HALF = "full", "bf16"  # the model's own precision; autocast to bfloat16

_VALID = '"+15%" of the model, a whole number of parameters such as 5000, or None for no limit'
_PERCENT = re.compile(r"\+?(\d+(?:\.\d+)?)\s*%")
_COUNT = re.compile(r"\+?(\d[\d_,]*)")


@dataclass(frozen=True)
class Budget:
    """At most so many parameters in seeds at any time, and so many epochs in all.

    `params` is a share of the model ("+15%") or a number of parameters to be added. Seeds on
    probation count from the moment they are planted, so the limit is never exceeded, not even
    for an epoch. Taken out again, they count no more.
    """

    params: str | int | None = None
    epochs: Count | None = None

    def __post_init__(self) -> None:
        self.allowed(0)
        require_settings(self, "The budget's")

    @classmethod
    def of(cls, value: "BudgetLike", epochs: int | None = None) -> "Budget":
        """A budget, or the parameters of one; epochs may stand in it or beside it."""
        budget = value if isinstance(value, Budget) else cls(params=value)
        if epochs is None:
            return budget
        if budget.epochs is not None:
            what = "The budget and the call disagree on the epochs"
            require_equal(what, epochs, budget.epochs, "give them once")
        return cls(budget.params, epochs)

    def allowed(self, host_params: int) -> int | None:
        """Parameters that may be added to a model of this size; None: as many as you like."""
        value = self.params
        if value is None:
            return None
        if isinstance(value, str):
            if found := _PERCENT.fullmatch(value.strip()):
                return int(host_params * Fraction(found[1]) / 100)
            if found := _COUNT.fullmatch(value.strip()):
                return int(found[1].replace(",", "").replace("_", ""))
        elif type(value) is int and value >= 0:
            return value
        fix = None
        if isinstance(value, float) and 0.0 < value < 10.0:
            fix = f"for a share of the model write '+{100 * value:g}%'"
        raise EsperError("Cannot read this budget", given=repr(value), valid=_VALID, fix=fix)


def listed(name: str, values: Sequence[str] | None) -> tuple[str, ...] | None:
    """Names as a tuple; a text is not taken for a list of its letters."""
    if isinstance(values, str):
        fix = f"write {name}=[{values!r}]"
        raise EsperError(f"The {name} are a list of names", given=repr(values), fix=fix)
    return None if values is None else tuple(values)


BudgetLike = Union[Budget, str, int, None]  # noqa: UP007 (Budget's own methods name it before)


@dataclass(frozen=True, kw_only=True)
class GrowSettings:
    """As JSON holds them. A loss, metric or optimiser that is code is None: code is not stored."""

    budget: str | int | None
    epochs: Count = DEFAULT_EPISODE_LENGTH
    slots: tuple[Mapping[str, Any], ...] = ()  # places as notes; empty until they are chosen
    blueprints: tuple[str, ...] | None = None  # None: all
    loss: str | None
    metric: str | None = AUTO
    optimizer: str | None = OPTIMIZER
    lr: Positive = 1e-3
    weight_decay: NotNegative | None = None  # None: the optimiser's own
    precision: str = FULL
    scheduled: bool = False  # is there a scheduler?
    batch_size: Count = 64
    seed: Whole = 0
    controller: str = "audition"  # by its name
    leader: str | None = None  # the controller as it was asked for; None: an object
    fingerprint: str | None = None  # of what a trained controller has learned
    data: Mapping[str, Any] = field(default_factory=dict)  # fingerprints, by part
    origin: Mapping[str, Any] | None = None  # where model and data come from: the command line's
    device: str | None = None  # where it was trained last, by name
    score: str | None = None  # what a score is, in words

    def __post_init__(self) -> None:
        require_settings(self, "The setting")
        require_known("precision", self.precision, (FULL, HALF))
        what = "Something to be kept with the run is not of the kind that JSON holds"
        with in_words(what, valid="numbers, texts, lists and dicts"):
            json.dumps(self.origin)

    @property
    def limits(self) -> Budget:
        return Budget(self.budget, self.epochs)

    def autocast(self, device: str) -> str | None:
        """The kind of device that computes in bf16, if any does."""
        return device if self.precision == HALF else None

    def again(self, name: str, given: Any, *, fixed: bool = False) -> Any:
        """What the run was asked for, or what stands for it now.

        `fixed`: something else would make its scores mean something else.
        """
        was = self.leader if name == "controller" else getattr(self, name)
        now = given if isinstance(given, str) else None
        if given is None and was is None:
            raise EsperError(
                f"The run's {name} was a function or an object, which is not stored",
                fix=f"pass it again: resume(path, ..., {name}=...)",
            )
        if given is not None and fixed:
            here, then = ("a function" if each is None else repr(each) for each in (now, was))
            fix = f"pass that {name}, or leave it away where it is a name"
            require_equal(f"The run has another {name}", here, then, fix)
        return was if given is None else given

    def require_given(self, **given: object) -> None:
        """Refuse to go on without what the run had: data, by part, and a scheduler."""
        had = {"test": "test" in self.data, "scheduler": self.scheduled}
        missing = [name for name, each in given.items() if each is None and had.get(name, True)]
        if missing:
            raise EsperError(
                "Going on needs what the run was given",
                given=f"no {', no '.join(missing)}",
                fix=f"pass {', '.join(missing)} to resume, as to grow",
            )
        if given["scheduler"] is not None and not self.scheduled:
            raise EsperError("The run has no scheduler", given="one", fix="leave scheduler away")

    @classmethod
    def of(cls, note: Mapping[str, Any]) -> "GrowSettings":
        """From a checkpoint's notes; what an older one does not name is as by default."""
        known = {each.name: note[each.name] for each in fields(cls) if each.name in note}
        lists = {name: tuple(value) for name, value in known.items() if isinstance(value, list)}
        return cls(**known | lists)
