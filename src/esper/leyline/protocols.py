"""What simic may know of a host: thin, fully typed views over the lifecycle arrays."""

from collections.abc import Mapping
from typing import Protocol, runtime_checkable

from torch import Tensor

from esper.leyline.catalogue import BlueprintCatalogue
from esper.leyline.legality import Actions, Legality
from esper.leyline.lifecycle import Lifecycle, Transitions
from esper.leyline.ops import Blend
from esper.leyline.slots import SlotSpec
from esper.leyline.stages import SeedStage


@runtime_checkable
class SeedStateProtocol(Protocol):
    """One seed, read from the arrays."""

    @property
    def stage(self) -> SeedStage: ...
    @property
    def blueprint(self) -> str: ...
    @property
    def blend(self) -> Blend: ...
    @property
    def alpha(self) -> float: ...
    @property
    def age(self) -> int: ...
    @property
    def epochs_in_stage(self) -> int: ...
    @property
    def params(self) -> int: ...
    @property
    def contribution(self) -> float | None: ...


@runtime_checkable
class SeedSlotProtocol(Protocol):
    """One slot and, when it is occupied, its seed."""

    @property
    def name(self) -> str: ...
    @property
    def spec(self) -> SlotSpec: ...
    @property
    def stage(self) -> SeedStage: ...
    @property
    def seed(self) -> SeedStateProtocol | None: ...


@runtime_checkable
class SlottedHostProtocol(Protocol):
    """One host with its slots."""

    @property
    def seed_slots(self) -> Mapping[str, SeedSlotProtocol]: ...
    @property
    def lifecycle(self) -> Lifecycle: ...
    @property
    def catalogue(self) -> BlueprintCatalogue: ...
    def legal(self) -> Legality: ...
    def apply(self, actions: Actions) -> Transitions: ...
    def pass_time(self) -> Transitions: ...

    def state_dict(self) -> Mapping[str, Tensor]: ...
