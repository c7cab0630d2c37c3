"""The learning-rate scheduler of a run: made, stepped once per epoch, and kept as JSON holds it."""

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from esper.archive import KeepingError, packed, unpacked
from esper.leyline.errors import in_words, require_equal

MakeScheduler = Callable[[Optimizer], LRScheduler]

_EXAMPLE = "scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 10)"
_NEEDED = ("step", "state_dict", "load_state_dict")


class Schedule:
    """A scheduler that steps after every epoch."""

    def __init__(self, make: MakeScheduler, optimizer: Optimizer) -> None:
        given = f"{getattr(make, '__name__', type(make).__name__)}: "
        fix = f"pass a function of the optimiser, as in {_EXAMPLE}"
        with in_words("The scheduler could not be made", given=given, fix=fix):
            self.scheduler = made = make(optimizer)
            if isinstance(made, type) or not all(hasattr(made, name) for name in _NEEDED):
                raise TypeError(f"{type(made).__name__} is no scheduler")

    def step(self, loss: float, score: float) -> None:
        """An epoch is over, with these on validation data: what waits for a plateau looks at it."""
        scheduler = self.scheduler
        if isinstance(scheduler, ReduceLROnPlateau):
            scheduler.step(loss if scheduler.mode == "min" else score)
        else:
            scheduler.step()

    def note(self) -> dict[str, Any]:
        """All of its state, for `restore`."""
        tensors: dict[str, Tensor] = {}
        state = packed(self.scheduler.state_dict(), tensors, of="The scheduler")
        if tensors:
            given = f"a tensor, {next(iter(tensors))}"
            raise KeepingError("The scheduler keeps something that cannot be saved", given=given)
        return {"kind": type(self.scheduler).__name__, "state": state}

    def restore(self, note: Mapping[str, Any]) -> None:
        kind = type(self.scheduler).__name__
        fix = "pass the one that it began with"
        require_equal("The run had another scheduler", kind, note["kind"], fix)
        what = "The scheduler is made otherwise than that of the run"
        with in_words(what, given=f"{kind}: ", fix="make it as it was made for the run"):
            self.scheduler.load_state_dict(unpacked(note["state"], {}))
