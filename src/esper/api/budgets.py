"""What growing may cost: parameters that seeds may add, and epochs."""

import re
from dataclasses import dataclass
from fractions import Fraction
from typing import Union

from esper.leyline.errors import EsperError

_VALID = '"+15%" of the model, a whole number of parameters such as 5000, or None for no limit'
_PERCENT = re.compile(r"\+?(\d+(?:\.\d+)?)\s*%")
_COUNT = re.compile(r"\+?(\d[\d_,]*)")


class BudgetError(EsperError):
    """A budget that cannot be meant, or that has room for nothing."""


@dataclass(frozen=True)
class Budget:
    """At most so many parameters in seeds at any time, and so many epochs in all.

    `params` is a share of the model ("+15%") or a number of parameters to be added. Seeds on
    probation count from the moment they are planted, so the limit is never exceeded, not even
    for an epoch. Taken out again, they count no more.
    """

    params: str | int | None = None
    epochs: int | None = None

    def __post_init__(self) -> None:
        self.allowed(0)
        if self.epochs is not None and (type(self.epochs) is not int or self.epochs < 1):
            raise BudgetError(
                "A budget's epochs are a whole number from 1",
                given=repr(self.epochs),
                fix="write for example Budget(params='+15%', epochs=20)",
            )

    @classmethod
    def of(cls, value: "BudgetLike") -> "Budget":
        """A budget, or the parameters of one."""
        return value if isinstance(value, Budget) else cls(params=value)

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
        raise BudgetError("Cannot read this budget", given=repr(value), valid=_VALID, fix=fix)

    def __str__(self) -> str:
        params = self.params
        shown = "no limit" if params is None else f"{params:,}" if type(params) is int else params
        return f"{shown} of parameters" + (f", {self.epochs} epochs" if self.epochs else "")


BudgetLike = Union[Budget, str, int, None]  # noqa: UP007 (Budget's own methods name it before)
