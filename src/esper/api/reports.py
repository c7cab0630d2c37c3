"""A run in words: what grew, when, what it was worth, and whether the budget was kept."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from esper.api.hosts import GrowingModel
from esper.leyline.stages import SeedStage


@dataclass(frozen=True)
class Grown:
    """A seed that became part of the network."""

    slot: str
    blueprint: str
    params: int
    planted: int  # the epoch after which it was planted
    kept: int  # the epoch after which it became permanent
    contribution: float | None  # in percent points, when last measured

    @property
    def missed(self) -> str:
        """The contribution in words that nobody takes for what growing won."""
        if self.contribution is None:
            return ""
        if self.contribution < 0.0:
            return f", stands in the way by {-self.contribution:.2f} points"
        return f", is missed by {self.contribution:.2f} points if it is left out"


@dataclass(frozen=True)
class Report:
    """Of one run; prints as text."""

    controller: str
    epochs: int
    horizon: int
    host_params: int
    room: int | None  # parameters that were allowed in seeds
    grown: tuple[Grown, ...]
    most_added: int  # parameters in seeds at any time, those on probation included
    decisions: tuple[tuple[int, str], ...]  # epoch and what was decided, waiting left out
    metric: str
    before: Mapping[str, float]  # training
    after: Mapping[str, float]  # of the exported network; empty until the run is finished

    @property
    def added(self) -> int:
        return sum(seed.params for seed in self.grown)

    @property
    def within_budget(self) -> bool:
        return self.room is None or self.most_added <= self.room

    def __str__(self) -> str:
        share = 100.0 * self.added / max(self.host_params, 1)
        limit = "no limit" if self.room is None else f"allowed {self.room:,}"
        lines = [
            f"{self.epochs} of {self.horizon} epochs under {self.controller!r}",
            f"parameters: {self.host_params:,} + {self.added:,} ({share:+.1f} %), at most "
            f"{self.most_added:,} in seeds at any time, {limit}: "
            + ("within the budget" if self.within_budget else "OVER THE BUDGET"),
            # A loss is turned into a score, which is another number than the loss.
            f"{'score' if self.metric == 'loss' else self.metric}: {_shown(self.before)} before "
            "training" + (f", {_shown(self.after)} of the exported network" if self.after else ""),
        ]
        if "test_score" in self.after:
            lines.append(
                f"test: {self.after['test_score']:.2f} (loss {self.after['test_loss']:.4g})"
            )
        lines.append("")
        lines += ["grown:"] if self.grown else ["nothing grew for good"]
        for seed in self.grown:
            lines.append(
                f"  {seed.blueprint} at {seed.slot}: {seed.params:,} parameters, planted after "
                f"epoch {seed.planted}, permanent after {seed.kept}{seed.missed}"
            )
        if self.decisions:
            lines += ["", "decisions:"]
            lines += [f"  after epoch {epoch}: {what}" for epoch, what in self.decisions]
        return "\n".join(lines)


def _shown(scores: Mapping[str, float]) -> str:
    return f"{scores['score']:.2f} (loss {scores['loss']:.4g})"


def report_on(
    host: GrowingModel,
    settings: Mapping[str, Any],
    history: Sequence[Mapping[str, Any]],
    before: Mapping[str, float],
    after: Mapping[str, float],
) -> Report:
    grown = []
    for name, slot in host.seed_slots.items():
        seed = slot.seed
        if seed is not None and seed.stage is SeedStage.FOSSILIZED:
            planted = _last(history, f"{name}: DORMANT -> GERMINATED ")
            kept = _last(history, f"{name}: HOLDING -> FOSSILIZED ")
            grown.append(Grown(name, seed.blueprint, seed.params, planted, kept, seed.contribution))
    return Report(
        controller=settings["controller"],
        epochs=len(history),
        horizon=settings["epochs"],
        host_params=host.catalogue.host_params,
        room=host.room,
        grown=tuple(grown),
        most_added=max((record["most_added"] for record in history), default=0),
        decisions=tuple(
            (record["epoch"], record["decision"])
            for record in history
            if record["decision"] not in ("wait", "end")
        ),
        metric=settings["metric"] or "score",
        before=dict(before),
        after=dict(after),
    )


def _last(history: Sequence[Mapping[str, Any]], beginning: str) -> int:
    """The last epoch with an event that begins like this."""
    epochs = [
        record["epoch"]
        for record in history
        if any(event.startswith(beginning) for event in record["events"])
    ]
    return int(epochs[-1])
