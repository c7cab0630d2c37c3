"""Object views over the lifecycle arrays, for people and for the protocols."""

from collections.abc import Callable
from dataclasses import dataclass

from esper.leyline.catalogue import BlueprintCatalogue
from esper.leyline.lifecycle import Lifecycle
from esper.leyline.ops import Blend
from esper.leyline.slots import SlotSpec
from esper.leyline.stages import SeedStage


@dataclass(frozen=True)
class SeedView:
    """One seed as it is now; reads the arrays, holds nothing."""

    read: Callable[[], Lifecycle]
    catalogue: BlueprintCatalogue
    host: int
    slot: int

    @property
    def stage(self) -> SeedStage:
        return SeedStage(int(self.read().stage[self.host, self.slot]))

    @property
    def blueprint(self) -> str:
        return self.catalogue.names[int(self.read().blueprint[self.host, self.slot])]

    @property
    def blend(self) -> Blend:
        return Blend(int(self.read().blend[self.host, self.slot]))

    @property
    def alpha(self) -> float:
        return float(self.read().alpha[self.host, self.slot])

    @property
    def age(self) -> int:
        return int(self.read().age[self.host, self.slot])

    @property
    def epochs_in_stage(self) -> int:
        return int(self.read().epochs_in_stage[self.host, self.slot])

    @property
    def params(self) -> int:
        return int(self.read().params[self.host, self.slot])

    @property
    def contribution(self) -> float | None:
        life = self.read()
        if not bool(life.contribution_known[self.host, self.slot]):
            return None
        return float(life.contribution[self.host, self.slot])


@dataclass(frozen=True)
class SlotView:
    """One slot and, when it is occupied, its seed."""

    read: Callable[[], Lifecycle]
    catalogue: BlueprintCatalogue
    spec: SlotSpec
    host: int
    slot: int

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def stage(self) -> SeedStage:
        return SeedStage(int(self.read().stage[self.host, self.slot]))

    @property
    def seed(self) -> SeedView | None:
        if not bool(self.read().occupied[self.host, self.slot]):
            return None
        return SeedView(self.read, self.catalogue, self.host, self.slot)
