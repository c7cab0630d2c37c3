"""What a controller is: anything that turns signals and legality into actions.

Shapes: `N` environments, `K` rows of one controller, `F` features, `H` heads, `A` actions.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from esper.leyline import Actions, AgreementError, BlueprintCatalogue, Legality
from esper.leyline.shadows import AuditionPlan
from esper.leyline.signals import Signals


@runtime_checkable
class Controller(Protocol):
    """Decides for all environments at once.

    `starts` [N] bool marks rows whose episode begins now: what was remembered of them is void.
    Rows keep their order, and their number, until all of them start. Whatever chance a
    controller needs comes from `signals.draws`, so that a row's decisions do not depend on its
    neighbours.
    """

    @property
    def name(self) -> str:
        """Short and stable: for tables and result files."""

    def act(self, signals: Signals, legality: Legality, starts: Tensor) -> Actions:
        """One legal action for each row, from what was measured and what is open to it now."""
        ...


@runtime_checkable
class Privileged(Protocol):
    """A controller that is told the context of every row before an episode: the oracle only."""

    def reset(self, contexts: Sequence[str]) -> None: ...


@runtime_checkable
class Checkable(Protocol):
    """A controller with settings that a host or an episode can contradict."""

    def require_possible(self, catalogue: BlueprintCatalogue, horizon: int) -> None: ...


@runtime_checkable
class Remembering(Protocol):
    """A controller that remembers its rows between decisions, and can be told what it did."""

    def memory(self) -> dict[str, Tensor]: ...
    def recall(self, memory: Mapping[str, Tensor]) -> None: ...


@runtime_checkable
class Auditioning(Protocol):
    """A controller that has shadows trained, and reads `signals.shadows`.

    It is asked after each of its decisions, with the signals that it decided on.
    """

    def audition(self, signals: Signals, legality: Legality) -> AuditionPlan: ...


class Thoughts(NamedTuple):
    """What a decision was made of, on the CPU."""

    observations: Tensor  # [N, F]
    masks: Tensor  # [N, H, A] bool: what was legal
    probabilities: Tensor  # [N, H, A]
    values: Tensor  # [N]
    log_probs: Tensor  # [N, H] of the actions taken


@runtime_checkable
class Explaining(Protocol):
    """A controller that can say how it came to its last decision."""

    def thoughts(self) -> Thoughts: ...


def needs_contributions(controller: Controller) -> bool:
    """Does it judge seeds by what they contribute? Then it must not be used without."""
    return bool(getattr(controller, "needs_contributions", False))


def restarted(state: Tensor | None, fresh: Tensor, starts: Tensor) -> Tensor:
    """What a controller remembers of its rows, [N, ...], with the rows of `starts` as `fresh`."""
    if bool(starts.all()):
        return fresh
    if state is None or state.shape != fresh.shape:
        raise AgreementError(
            "The number of environments changed in the middle of an episode",
            given=f"{len(fresh)} rows, {'none' if state is None else len(state)} before",
            fix="mark every row as starting when a population begins",
        )
    return torch.where(starts.view(-1, *(1,) * (fresh.ndim - 1)), fresh, state)


class SideBySide:
    """Each of the controllers decides for its rows; rows beyond them wait."""

    name = "side by side"

    def __init__(self, parts: Sequence[tuple[Controller, int]]) -> None:
        """`parts`: controllers, and how many rows each has, one after the other."""
        self.parts = [controller for controller, _ in parts]
        counts = [count for _, count in parts]
        self._rows = torch.arange(sum(counts)).split(counts)

    def reset(self, contexts: Sequence[str]) -> None:
        for controller, rows in zip(self.parts, self._rows, strict=True):
            if isinstance(controller, Privileged):
                controller.reset([contexts[row] for row in rows.tolist()])

    def act(self, signals: Signals, legality: Legality, starts: Tensor) -> Actions:
        values = Actions.of(legality.space, len(signals)).values
        for controller, rows in zip(self.parts, self._rows, strict=True):
            chosen = controller.act(signals.rows(rows), legality.rows(rows), starts[rows])
            values[rows] = chosen.values
        return Actions(legality.space, values)

    def audition(self, signals: Signals, legality: Legality) -> AuditionPlan:
        shape = (len(signals), len(signals.catalogue.slots), len(signals.catalogue.names))
        where = torch.zeros(shape, dtype=torch.bool)
        share = torch.zeros(len(signals), dtype=torch.float64)
        for controller, rows in zip(self.parts, self._rows, strict=True):
            if isinstance(controller, Auditioning):
                plan = controller.audition(signals.rows(rows), legality.rows(rows))
                where[rows], share[rows] = plan
        return AuditionPlan(where, share)
