"""What questions about a run are answered with."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Table:
    """The answer to a query."""

    columns: tuple[str, ...]
    rows: list[tuple[Any, ...]]

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (dict(zip(self.columns, row, strict=True)) for row in self.rows)

    def __len__(self) -> int:
        return len(self.rows)


@dataclass(frozen=True, kw_only=True)
class RoundSummary:
    """One round: its episodes, and the evaluation after it if there was one."""

    round: int
    episodes: int
    mean_return: float | None
    net_gain: float | None  # mean, points
    rolled_back: int
    evaluations: Mapping[str, float]  # score of each controller


@dataclass(frozen=True, kw_only=True)
class DecisionRecord:
    """One decision, by name. Observation, legal actions and probabilities: watched rows only."""

    round: int
    step: int
    env: int
    actions: Mapping[str, str]  # of the heads that mattered
    value: float
    log_prob: float
    reward: float | None
    observation: Mapping[str, float] | None
    legal: Mapping[str, tuple[str, ...]] | None
    probabilities: Mapping[str, Mapping[str, float]] | None
    log_probs: Mapping[str, float] | None

    def __str__(self) -> str:
        chosen = ", ".join(f"{head} {action}" for head, action in self.actions.items())
        reward = "" if self.reward is None else f", reward {self.reward:+.3f}"
        return f"step {self.step}: {chosen} (value {self.value:+.3f}{reward})"


@dataclass(frozen=True, kw_only=True)
class Cell:
    """A slot at the end of a step, for a picture of slot × epoch."""

    step: int
    slot: str
    stage: str
    blueprint: str | None
    alpha: float | None  # of watched environments


@dataclass(frozen=True, kw_only=True)
class StoredEvent:
    """An event as the file has it."""

    id: int
    kind: str
    round: int
    step: int | None
    time: float
    rows: list[dict[str, Any]]
