"""A garden without training: real lifecycles and gates, made-up measurements.

Every row's measurements come from a tape that was drawn before, so a row sees the same whoever
stands beside it.

Shapes: `R` rows of the tape, `N` rows of a garden, `T` epochs, `S` slots, `W` epochs remembered.
"""

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from esper.kasmina import GateRules, Situation, build_catalogue, build_host, decide, pass_time
from esper.kasmina.gates import legality
from esper.leyline import (
    HEADS,
    Actions,
    BlueprintCatalogue,
    Legality,
    Lifecycle,
    LifecycleOp,
)
from esper.leyline.shadows import AuditionPlan, ShadowReadings
from esper.leyline.signals import FLOW_STATISTICS, Signals, SignalWindow
from esper.tamiyo.controllers import Auditioning, Controller, Privileged

HORIZON = 25


@functools.cache
def catalogue_of(host: str = "conv1d") -> BlueprintCatalogue:
    built = build_host(host)
    return build_catalogue(built.slot_specs(), sum(p.numel() for p in built.parameters()))


@dataclass(frozen=True)
class Tape:
    """What will be measured, row by row and epoch by epoch; NaN: nothing."""

    catalogue: BlueprintCatalogue
    series: dict[str, Tensor]  # [R, T] each
    contribution: Tensor  # [R, T, S]
    gradient: Tensor  # [R, T, S]
    host_gradient: Tensor  # [R, T]
    draws: Tensor  # [R, T, H]
    budget: Tensor  # [R]
    flow: Tensor | None = None  # [R, T, S, K]
    shadow_gain: Tensor | None = None  # [R, T, S, P]

    @classmethod
    def random(
        cls, rows: int, seed: int = 0, host: str = "conv1d", epochs: int = HORIZON
    ) -> "Tape":
        chance = torch.Generator().manual_seed(seed)
        catalogue = catalogue_of(host)
        slots = len(catalogue.slots)

        def uniform(*shape: int) -> Tensor:
            return torch.rand(shape, generator=chance, dtype=torch.float64)

        def some(values: Tensor, missing: float) -> Tensor:
            return values.masked_fill(uniform(*values.shape) < missing, torch.nan)

        slope = uniform(rows, 1) * torch.linspace(0, 1, epochs, dtype=torch.float64)
        accuracy = 10 + 80 * slope + 3 * uniform(rows, epochs)
        loss = 2.3 * (1 - 0.8 * slope) + 0.2 * uniform(rows, epochs)
        return cls(
            catalogue=catalogue,
            series={
                "train_loss": some(loss, 0.02),
                "validation_loss": some(loss + uniform(rows, 1) - 0.3, 0.02),
                "validation_accuracy": some(accuracy, 0.02),
                "committed_accuracy": some(accuracy - 2, 0.02),
            },
            contribution=some(8 * uniform(rows, epochs, slots) - 2, 0.1),
            gradient=some(uniform(rows, epochs, slots), 0.1),
            host_gradient=some(uniform(rows, epochs), 0.1),
            draws=uniform(rows, epochs, len(HEADS.heads)),
            budget=(3 * uniform(rows) * catalogue.host_params).long(),
            flow=some(uniform(rows, epochs, slots, len(FLOW_STATISTICS)), 0.1),
            shadow_gain=some(0.2 * uniform(rows, epochs, slots, len(catalogue.names)) - 0.1, 0.1),
        )

    @classmethod
    def steady(
        cls,
        accuracy: Sequence[float] | float = 50.0,
        contribution: Sequence[float] = (1.0, 1.0, 1.0),
        *,
        gap: float = 0.0,
        loss: float = 1.5,
        rows: int = 1,
        budget: int = 10_000,
    ) -> "Tape":
        """The same in every row: accuracy by epoch (the last one stays), contribution by slot."""
        catalogue = catalogue_of()
        levels = [accuracy] if isinstance(accuracy, float) else list(accuracy)
        levels += levels[-1:] * (HORIZON - len(levels))
        curve = torch.tensor(levels, dtype=torch.float64).expand(rows, -1)
        losses = torch.full_like(curve, loss)
        shape = (rows, HORIZON, len(catalogue.slots))
        return cls(
            catalogue=catalogue,
            series={
                "train_loss": losses,
                "validation_loss": losses + gap,
                "validation_accuracy": curve,
                "committed_accuracy": curve,
            },
            contribution=torch.tensor(contribution, dtype=torch.float64).expand(shape),
            gradient=torch.ones(shape, dtype=torch.float64),
            host_gradient=torch.ones(shape[:2], dtype=torch.float64),
            draws=torch.zeros(rows, HORIZON, len(HEADS.heads), dtype=torch.float64),
            budget=torch.full((rows,), budget),
        )


class TapeGarden:
    """The rows `index` of a tape, as episodes of one length that start together."""

    def __init__(self, tape: Tape, index: Sequence[int] | None = None) -> None:
        rows = range(len(tape.budget)) if index is None else index
        self.tape, self.index = tape, torch.tensor(list(rows))
        self.space = HEADS.resolve(tape.catalogue)
        self.rules = GateRules()
        self.begin()

    def begin(self) -> None:
        self.life = Lifecycle.dormant(len(self.index), len(self.tape.catalogue.slots))
        self.window = SignalWindow(*self.life.shape)
        costs = torch.tensor(self.tape.catalogue.costs)
        cost = torch.where(costs >= 0, 0.6, torch.nan)
        self.shadows = ShadowReadings.none(len(self.index), cost)
        self.spent = torch.zeros(len(self.index), dtype=torch.float64)  # epochs of the host
        self.plan: AuditionPlan | None = None
        self.epoch = 0

    @property
    def situation(self) -> Situation:
        budget = self.tape.budget[self.index]
        return Situation(self.life, self.tape.catalogue, self.rules, budget)

    def legal(self) -> Legality:
        return legality(self.situation, self.space)

    def signals(self) -> Signals:
        if self.tape.flow is not None:
            self.window.remember_flow(self.tape.flow[self.index, self.epoch])
        return Signals(
            catalogue=self.tape.catalogue,
            lifecycle=self.life,
            budget=self.tape.budget[self.index],
            **self.window.measured(),
            horizon=torch.full((len(self.index),), HORIZON),
            classes=10,
            draws=self.tape.draws[self.index, self.epoch],
            shadows=None if self.tape.shadow_gain is None else self.shadows,
        )

    def step(self, actions: Actions) -> None:
        """Decide (an illegal decision raises), measure what the tape says, and let time pass."""
        self.life, _ = decide(self.situation, actions)
        now, tape = self.epoch, self.tape
        latest = {name: series[self.index, now] for name, series in tape.series.items()}
        rise = self.window.loss_rise(latest["train_loss"])
        self.window.remember(latest, tape.host_gradient[self.index, now])
        self.life = self.life.measured(
            contribution=tape.contribution[self.index, now],
            gradient=tape.gradient[self.index, now],
            loss_rise=rise,
        )
        self.life, _ = pass_time(self.situation)
        self._hear()
        self.epoch += 1

    def _hear(self) -> None:
        """Shadows that the plan trains show what the tape says."""
        if self.plan is None or self.tape.shadow_gain is None:
            return
        where, share = self.plan
        self.spent += share * (self.shadows.cost.nan_to_num(torch.inf) * where).nan_to_num(0.0).sum(
            (1, 2)
        )
        gain = self.tape.shadow_gain[self.index, self.epoch]
        error = torch.full_like(gain, 0.01)
        found = {"gain": gain, "error": error, "train_gain": gain, "gradient": error}
        epochs = self.shadows.epochs + share[:, None, None] * where
        self.shadows = self.shadows.updated(where & (share > 0)[:, None, None], epochs, **found)


def play(garden: TapeGarden, controller: Controller, episodes: int = 1) -> Iterator[Actions]:
    """Yield every decision of whole episodes, after checking and before carrying it out."""
    rows = len(garden.index)
    for _ in range(episodes):
        garden.begin()
        if isinstance(controller, Privileged):
            controller.reset([f"context{int(row) % 3}" for row in garden.index])
        starts = torch.ones(rows, dtype=torch.bool)
        for _ in range(HORIZON):
            legal = garden.legal()
            signals = garden.signals()
            actions = controller.act(signals, legal, starts)
            assert bool(legal.permits(actions).all())
            assert torch.equal(actions.values, actions.canonical().values)
            if isinstance(controller, Auditioning):
                garden.plan = controller.audition(signals, legal)
            yield actions
            garden.step(actions)
            starts = torch.zeros_like(starts)


def decisions(garden: TapeGarden, controller: Controller, episodes: int = 1) -> Tensor:
    """[N, epochs, H]: everything a controller decided."""
    return torch.stack([actions.values for actions in play(garden, controller, episodes)], 1)


def ops_of(garden: TapeGarden, controller: Controller) -> list[list[tuple[int, str, str]]]:
    """For each row its (epoch, op, slot) other than WAIT."""
    chosen = decisions(garden, controller)
    slots = garden.tape.catalogue.slots.names
    return [
        [
            (epoch, LifecycleOp(op).name, slots[slot])
            for epoch, (op, slot) in enumerate(row[:, :2].tolist())
            if op != LifecycleOp.WAIT
        ]
        for row in chosen
    ]
