"""The learning-rate scheduler of a run: made, stepped once per epoch, and kept as JSON holds it."""

from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from esper.api.grow_settings import GrowError
from esper.leyline.errors import first_line

MakeScheduler = Callable[[Optimizer], LRScheduler]

_EXAMPLE = "scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 10)"
_NEEDED = ("step", "state_dict", "load_state_dict")
# How what JSON has no word for is written: {"dict": [[key, value], ...]} and the like.
_MAPPINGS = {kind.__name__: kind for kind in (dict, Counter, OrderedDict)}


class Schedule:
    """A scheduler that steps after every epoch."""

    def __init__(self, make: MakeScheduler, optimizer: Optimizer) -> None:
        try:
            made = make(optimizer)
        except (TypeError, ValueError) as error:
            raise GrowError(
                "The scheduler could not be made",
                given=f"{getattr(make, '__name__', type(make).__name__)}: {first_line(error)}",
                fix=f"pass a function of the optimiser, as in {_EXAMPLE}",
            ) from error
        able = all(callable(getattr(made, name, None)) for name in _NEEDED)
        if isinstance(made, type) or not able:
            raise GrowError(
                "This does not make a scheduler",
                given=type(made).__name__,
                fix=f"pass a function that returns one, as in {_EXAMPLE}",
            )
        self.scheduler = made

    def step(self, loss: float, score: float) -> None:
        """An epoch is over, with these on validation data: what waits for a plateau looks at it."""
        scheduler = self.scheduler
        if isinstance(scheduler, ReduceLROnPlateau):
            scheduler.step(loss if scheduler.mode == "min" else score)
        else:
            scheduler.step()

    def note(self) -> dict[str, Any]:
        """All of its state, for `restore`."""
        state = as_json(self.scheduler.state_dict())
        return {"kind": type(self.scheduler).__name__, "state": state}

    def restore(self, note: Mapping[str, Any]) -> None:
        kind = type(self.scheduler).__name__
        if note["kind"] != kind:
            raise GrowError(
                "The run had another scheduler",
                given=kind,
                valid=note["kind"],
                fix="pass the one that it began with",
            )
        try:
            self.scheduler.load_state_dict(from_json(note["state"]))
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise GrowError(
                "The scheduler is made otherwise than that of the run",
                given=f"{kind}: {first_line(error)}",
                fix="make it as it was made for the run",
            ) from error


# --- state as JSON -------------------------------------------------------------------------


def as_json(value: Any, where: str = "state") -> Any:
    """What `from_json` makes the same of again: keys that are numbers stay numbers."""
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, list):
        return [as_json(each, f"{where}[{place}]") for place, each in enumerate(value)]
    if type(value) is tuple:
        return {"tuple": as_json(list(value), where)}
    if type(value) in _MAPPINGS.values():
        pairs = [[as_json(key, where), as_json(value[key], f"{where}.{key}")] for key in value]
        return {type(value).__name__: pairs}
    raise GrowError(
        "The scheduler keeps something that cannot be saved",
        given=f"{where}: {type(value).__name__}",
        valid="numbers, texts, lists, tuples and dicts",
        fix="leave out=... away, or take another scheduler",
    )


def from_json(value: Any) -> Any:
    if isinstance(value, list):
        return [from_json(each) for each in value]
    if not isinstance(value, dict):
        return value
    ((name, parts),) = value.items()
    if name == "tuple":
        return tuple(from_json(parts))
    return _MAPPINGS[name]({from_json(key): from_json(each) for key, each in parts})
