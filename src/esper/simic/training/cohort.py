"""A cohort: several agents that learn side by side, each with rows of its own in one garden.

Hosts of all agents train as one population, so five trainings cost little more than one. An agent
may be an apprentice first: a teacher that knows every context says what it would do, and the agent
learns to foresee that from what it sees. Then it learns by itself, from rewards.

Shapes: `N` rows of all members, `K` rows of one.
"""

import json
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from esper.archive import read_archive, write_archive
from esper.garden.environment import Garden, Transition
from esper.leyline.errors import AgreementError
from esper.leyline.legality import Actions, Legality
from esper.leyline.ops import LifecycleOp
from esper.leyline.results import PPOUpdateMetrics
from esper.simic.agent.imitation import Lessons, LessonSettings, Notebook, learn_lessons
from esper.simic.agent.ppo import PPOAgent
from esper.simic.agent.settings import PPOConfig
from esper.simic.agent.types import Decision, Outcome
from esper.tamiyo.controllers.schedules import Teacher
from esper.tamiyo.features import FeatureTable
from esper.tamiyo.normalisation import GARDEN_FLOOR

STATE, KIND, VERSION = "state", "esper cohort", 1
_LESSONS = "lessons."
TIME_ONLY = ("epoch", "remaining")  # what a blanked observation still shows


@dataclass(frozen=True, kw_only=True)
class MemberSettings:
    """How one agent of a cohort learns."""

    name: str
    rows: int
    seed: int
    blanked: bool = False  # it sees the time and nothing else
    apprentice: bool = True
    patience: float = 2.0  # how reluctant it is to prune at first


@dataclass(frozen=True, kw_only=True)
class CohortSettings:
    """How all of them learn."""

    rounds: int
    lesson_rounds: int = 6  # of which apprentices are taught
    led: tuple[float, ...] = (0.5, 0.25)  # share of rows the teacher plays itself, round by round
    ppo: PPOConfig = field(default_factory=PPOConfig)
    lessons: LessonSettings = field(default_factory=LessonSettings)
    final_rate: float = 0.1  # learning rate at the end, of the one at first
    final_entropy: float = 0.2  # and the entropy's coefficient
    lstm: int = 128


@dataclass(frozen=True)
class MemberReport:
    """What a round was for one member."""

    name: str
    round: int
    episodes: int  # played by it so far
    score: float  # mean net gain / scale of the round's episodes, on validation data
    acted: float  # mean decisions other than WAIT in an episode
    missed: float | None  # mean -log-probability of the teacher's decisions, while it was taught
    metrics: PPOUpdateMetrics | None  # of its update, when it learned by itself


class Member:
    """One agent and its rows."""

    def __init__(self, settings: MemberSettings, first: int, agent: PPOAgent) -> None:
        self.settings, self.agent = settings, agent
        self.rows = torch.arange(first, first + settings.rows)
        self.lessons: Lessons | None = None
        self.notebook = Notebook()

    @property
    def name(self) -> str:
        return self.settings.name


class Cohort:
    """Agents that play and learn round by round."""

    def __init__(
        self,
        garden: Garden,
        members: Sequence[MemberSettings],
        settings: CohortSettings,
        *,
        teacher: Teacher | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        total = sum(member.rows for member in members)
        if total != garden.envs:
            raise AgreementError(
                "The members' rows are not those of the garden", given=total, valid=garden.envs
            )
        if teacher is None and any(member.apprentice for member in members):
            raise AgreementError("Apprentices need a teacher", given="none")
        self.garden, self.settings, self.teacher = garden, settings, teacher
        self.round = 0
        self.members: list[Member] = []
        first = 0
        for member in members:
            agent = _agent(garden, member, settings, device)
            self.members.append(Member(member, first, agent))
            first += member.rows
        self._observations: Tensor | None = None

    @property
    def taught(self) -> bool:
        """Is the next round one in which apprentices learn from the teacher?"""
        return self.round < self.settings.lesson_rounds

    def one_round(self) -> list[MemberReport]:
        """An episode of every row, and an update of every agent."""
        if self._observations is None:
            self._observations = self.garden.reset()
        scores, acted = self._play()
        reports = [self._learn(member, scores, acted) for member in self.members]
        self.round += 1
        return reports

    @property
    def over(self) -> bool:
        return self.round >= self.settings.rounds

    def save(self, path: Path) -> None:
        """Everything that the next round depends on, between two rounds."""
        tensors = self.garden.state_dict()
        for member in self.members:
            member.agent.save(path / f"{member.name}-{self.round}")
            if member.lessons is not None:
                for each in fields(Lessons):
                    value = getattr(member.lessons, each.name)
                    tensors[f"{_LESSONS}{member.name}.{each.name}"] = value
        write_archive(
            path / STATE, kind=KIND, version=VERSION, tensors=tensors, notes=self._notes()
        )
        for member in self.members:  # what the state no longer refers to
            for old in path.glob(f"{member.name}-*"):
                if old.name != f"{member.name}-{self.round}":
                    shutil.rmtree(old)

    def _notes(self) -> dict[str, Any]:
        members = [asdict(member.settings) for member in self.members]
        return {"round": self.round, "members": members, "settings": asdict(self.settings)}

    def load(self, path: Path) -> bool:
        """Go on from there; False if nothing was saved."""
        if not (path / STATE).is_dir():
            return False
        stored = read_archive(path / STATE, kind=KIND, version=VERSION)
        ours = json.loads(json.dumps(self._notes()))
        for name in ("members", "settings"):
            if stored.notes[name] != ours[name]:
                raise AgreementError(
                    f"{path} is of trainings with other {name}",
                    given=stored.notes[name],
                    valid=ours[name],
                    fix="use another folder",
                )
        self.round = int(stored.notes["round"])
        for member in self.members:
            place = path / f"{member.name}-{self.round}"
            member.agent = PPOAgent.load(
                place,
                device=member.agent.device,
                space=self.garden.space,
                state_dim=self.garden.state_dim,
            )
            kept = {
                each.name: stored.tensors.get(f"{_LESSONS}{member.name}.{each.name}")
                for each in fields(Lessons)
            }
            if all(value is not None for value in kept.values()):
                there = {n: v.to(member.agent.device) for n, v in kept.items() if v is not None}
                member.lessons = Lessons(**there)
        garden = {n: v for n, v in stored.tensors.items() if not n.startswith(_LESSONS)}
        self._observations = self.garden.load_state_dict(garden)
        return True

    def _play(self) -> tuple[Tensor, Tensor]:
        """Scores and numbers of decisions [N] of the round's episodes; NaN where it was led."""
        garden = self.garden
        teaching = self.taught and any(member.settings.apprentice for member in self.members)
        if teaching and self.teacher is not None:
            self.teacher.reset([case.context.name for case in garden.cases])
            self.teacher.expect_changes(garden.drift_epochs)
        led = self._led() if teaching else torch.zeros(garden.envs, dtype=torch.bool)
        acted = torch.zeros(garden.envs)
        starts = torch.ones(garden.envs, dtype=torch.bool)
        for member in self.members:
            member.notebook = Notebook()
        for _ in range(garden.horizon):
            observations, legality = self._observations, garden.legal()
            assert observations is not None
            taught: Actions | None = None
            if teaching:
                assert self.teacher is not None
                taught = self.teacher.act(garden.signals(), legality, starts)
            decisions, values = self._decide(observations, legality, taught)
            if taught is not None:
                values = torch.where(led[:, None], taught.values, values)
            transition = garden.step(Actions(garden.space, values))
            for member, decision in zip(self.members, decisions, strict=True):
                member.agent.record(decision, _outcome(transition, member.rows))
            acted += transition.actions["op"] != LifecycleOp.WAIT
            self._observations = transition.observations
            starts = torch.zeros_like(starts)
        for member in self.members:
            member.agent.finish(transition.observations[member.rows])
        after = transition.after
        scores = (after.objective - garden.reward.rent * after.exposure) / transition.scale
        # What the teacher played says nothing about its pupil.
        return scores.masked_fill(led, torch.nan), acted.masked_fill(led, torch.nan)

    def _decide(
        self, observations: Tensor, legality: Legality, taught: Actions | None
    ) -> tuple[list[Decision], Tensor]:
        """Every member's decision for its rows, and all actions [N, H]."""
        values = Actions.of(self.garden.space, self.garden.envs).values
        decisions = []
        for member in self.members:
            rows = member.rows
            open_ = legality.rows(rows)
            decision = member.agent.act(observations[rows], open_)
            decisions.append(decision)
            values[rows] = decision.actions.cpu()
            if taught is not None and member.settings.apprentice:
                member.notebook.write(open_, Actions(taught.space, taught.values[rows]))
        return decisions, values

    def _led(self) -> Tensor:
        """[N] bool: rows of apprentices that the teacher itself plays, to show the way."""
        led = torch.zeros(self.garden.envs, dtype=torch.bool)
        shares = self.settings.led
        share = shares[self.round] if self.round < len(shares) else 0.0
        for member in self.members:
            if member.settings.apprentice:
                led[member.rows[: int(share * len(member.rows))]] = True
        return led

    def _learn(self, member: Member, scores: Tensor, acted: Tensor) -> MemberReport:
        missed, metrics = None, None
        if member.settings.apprentice and self.taught:
            missed = self._take_lessons(member)
        else:
            member.lessons = None
            self._anneal(member)
            metrics = member.agent.update()
        return MemberReport(
            name=member.name,
            round=self.round + 1,
            episodes=(self.round + 1) * len(member.rows),
            score=float(scores[member.rows].nanmean()),
            acted=float(acted[member.rows].nanmean()),
            missed=missed,
            metrics=metrics,
        )

    def _take_lessons(self, member: Member) -> float:
        agent = member.agent
        new = member.notebook.lessons(agent)
        member.lessons = new if member.lessons is None else member.lessons.and_(new)
        agent.network.observe_returns(new.returns, new.valid)
        agent.network.observation_norm.observe(new.states, new.valid)
        lessons = self.settings.lessons
        left = 1.0 - self.round / self.settings.lesson_rounds
        rate = lessons.learning_rate * (lessons.final_rate + (1.0 - lessons.final_rate) * left)
        missed = learn_lessons(agent, member.lessons, replace(lessons, learning_rate=rate))
        agent.buffer.reset()
        return missed

    def _anneal(self, member: Member) -> None:
        """From what they are at first to their last values, from the round alone."""
        settings = self.settings
        first = settings.lesson_rounds if member.settings.apprentice else 0
        left = 1.0 - (self.round - first) / max(1, settings.rounds - first)
        rate = settings.final_rate + (1.0 - settings.final_rate) * left
        entropy = settings.final_entropy + (1.0 - settings.final_entropy) * left
        member.agent.anneal(
            entropy_coef=settings.ppo.entropy_coef * entropy,
            learning_rate=settings.ppo.learning_rate * rate,
        )


def _agent(
    garden: Garden, member: MemberSettings, settings: CohortSettings, device: torch.device | str
) -> PPOAgent:
    agent = PPOAgent.build(
        garden.space,
        garden.state_dim,
        member.rows,
        garden.horizon,
        replace(settings.ppo),
        lstm_hidden_dim=settings.lstm,
        seed=member.seed,
        device=device,
    )
    network = agent.network
    network.prefer("op", LifecycleOp.PRUNE, -member.patience)
    network.observation_norm.floor.fill_(GARDEN_FLOOR)
    if member.blanked:
        network.visible.copy_(time_only(garden.table))
    return agent


def time_only(table: FeatureTable) -> Tensor:
    """[F] 1 or 0: the time index alone."""
    visible = torch.zeros(table.size)
    visible[[table.index(name) for name in TIME_ONLY]] = 1.0
    return visible


def _outcome(transition: Transition, rows: Tensor) -> Outcome:
    """One member's part of a transition."""
    active = transition.active
    return Outcome(
        observations=transition.observations[rows],
        rewards=transition.rewards[rows],
        terminals=transition.terminals[rows],
        truncations=transition.truncations[rows],
        active=None if active is None else active[rows],
    )
