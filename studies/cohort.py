"""A cohort: agents that learn side by side, each with rows of its own in one garden.

Hosts of all agents train as one population, so five trainings cost little more than one. An agent
may be an apprentice first: a teacher that knows every context says what it would do, and the agent
learns to foresee that from what it sees. Then it learns by itself, from rewards.

Shapes: `N` rows of all members, `K` rows of one, `H` heads.
"""

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from esper.archive import read_archive, write_archive
from esper.distributed import SINGLE_PROCESS
from esper.garden.dealing import Ranks
from esper.garden.environment import Garden
from esper.garden.rewards import net_of_rent
from esper.leyline import Actions, AgreementError, Legality, LifecycleOp, PPOUpdateMetrics
from esper.leyline.constants import DEFAULT_LSTM_HIDDEN_DIM
from esper.simic.agent import Outcome, PPOAgent, PPOConfig
from esper.simic.training.config import (
    DEFAULT_FINAL_LR_FRACTION,
    DEFAULT_PRUNE_LOGIT_BIAS,
    changed_settings,
)
from esper.simic.training.trainer import init_policy_priors
from esper.tamiyo import RecurrentActorCritic
from studies.imitation import Lessons, LessonSettings, Notebook, learn_lessons
from studies.teacher import Teacher

STATE, KIND, VERSION = "state", "esper cohort", 1
_LESSONS, _CONTROL = "lessons.", "control"
Steer = Callable[[Legality, Tensor], Tensor]  # other actions [N, H] in place of those drawn
TIME_ONLY = ("epoch", "remaining")  # what a blanked observation still shows


@dataclass(frozen=True, kw_only=True)
class MemberSettings:
    """How one agent of a cohort learns."""

    name: str
    rows: int
    seed: int
    blanked: bool = False  # it sees the time and nothing else
    apprentice: bool = True
    prune_logit_bias: float = DEFAULT_PRUNE_LOGIT_BIAS  # against PRUNE, before it has learned


@dataclass(frozen=True, kw_only=True)
class CohortSettings:
    """How all of them learn."""

    rounds: int
    lesson_rounds: int = 6  # of which apprentices are taught
    led: tuple[float, ...] = (0.5, 0.25)  # share of rows the teacher plays itself, round by round
    ppo: PPOConfig = field(default_factory=PPOConfig)
    lessons: LessonSettings = field(default_factory=LessonSettings)
    final_rate: float = DEFAULT_FINAL_LR_FRACTION  # learning rate at the end, of the one at first
    final_entropy: float = 0.2  # and the entropy's coefficient
    lstm: int = DEFAULT_LSTM_HIDDEN_DIM

    def annealed(self, round_: int, apprentice: bool) -> dict[str, float]:
        """From what they are at first to their last values, from the round alone."""
        first = self.lesson_rounds if apprentice else 0
        left = 1.0 - (round_ - first) / max(1, self.rounds - first)
        rate = self.final_rate + (1.0 - self.final_rate) * left
        entropy = self.final_entropy + (1.0 - self.final_entropy) * left
        return {
            "entropy_coef": self.ppo.entropy_coef * entropy,
            "lr": self.ppo.lr * rate,
        }


@dataclass(frozen=True)
class PlayedRound:
    """What a round's episodes came to, [N] each; NaN where the teacher played."""

    scores: Tensor  # net gain / scale, on validation data
    acted: Tensor  # decisions other than WAIT


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
        self.settings, self.name, self.agent = settings, settings.name, agent
        self.rows = torch.arange(first, first + settings.rows)
        self.lessons: Lessons | None = None  # so far
        self.notebook = Notebook()  # of the round

    def load(self, place: Path, garden: Garden) -> None:
        """Take over an agent that was saved."""
        self.agent = PPOAgent.load(
            place,
            device=self.agent.device,
            action_space=garden.action_space,
            state_dim=garden.state_dim,
        )

    def take_lessons(self, settings: LessonSettings) -> float:
        """Learn from all that was noted so far; returns how unlikely the teacher still was."""
        agent = self.agent
        new = self.notebook.lessons(agent)
        self.lessons = new if self.lessons is None else self.lessons.and_(new)
        agent.network.update_return_scale(new.returns, new.valid)
        agent.network.observation_norm.observe(new.states, new.valid)
        missed = learn_lessons(agent, self.lessons, settings)
        agent.buffer.reset()
        return missed


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
        ranks: Ranks = SINGLE_PROCESS,
        share: slice = slice(None),
    ) -> None:
        """Of `ranks`, each has its `share` of the members, see `shares`, and a garden for them.

        One without any has a garden that nobody plays in.
        """
        everyone, members = members, members[share]
        total = sum(member.rows for member in members)
        if members and total != garden.num_envs:
            raise AgreementError(
                "The members' rows are not those of the garden", given=total, valid=garden.num_envs
            )
        if teacher is None and any(member.apprentice for member in members):
            raise AgreementError("Apprentices need a teacher", given="none")
        self.garden, self.settings, self.teacher = garden, settings, teacher
        self.ranks, self.everyone, self.device = ranks, tuple(everyone), device
        self.first_row = sum(member.rows for member in everyone[: share.start or 0])
        self.round = 0  # rounds that are over
        self.members: list[Member] = []
        first = 0
        for member in members:
            self.members.append(Member(member, first, self._agent(member, device)))
            first += member.rows
        self._observations: Tensor | None = None

    def _agent(self, member: MemberSettings, device: torch.device | str) -> PPOAgent:
        agent = PPOAgent(
            self.garden.action_space,
            state_dim=self.garden.state_dim,
            num_envs=member.rows,
            max_steps_per_env=self.garden.horizon,
            config=self.settings.ppo,
            lstm_hidden_dim=self.settings.lstm,
            seed=member.seed,
            device=device,
        )
        init_policy_priors(agent, member.prune_logit_bias)
        if member.blanked:
            table = self.garden.table
            is_visible = [table.index(name) for name in TIME_ONLY]
            feature_mask = agent.network.get_buffer("feature_mask")
            feature_mask.zero_()[is_visible] = 1.0
        return agent

    @property
    def over(self) -> bool:
        return self.round >= self.settings.rounds

    @property
    def taught(self) -> bool:
        """Is the next round one in which apprentices learn from the teacher?"""
        return self.round < self.settings.lesson_rounds

    # --- rounds --------------------------------------------------------------------------

    def one_round(self) -> list[MemberReport]:
        """An episode of every row, and an update of every agent of this rank."""
        if self.members:
            return self.learn(self.play())
        self.round += 1
        return []

    def play(self) -> PlayedRound:
        """One episode of every row, into the agents' buffers."""
        garden, observations = self.garden, self._observations
        if observations is None:
            observations = garden.reset()
        led, steer = self._lesson()
        acted = torch.zeros(garden.num_envs)
        for _ in range(garden.horizon):
            legality = garden.legal()
            decisions = [
                each.agent.act(observations[each.rows], legality.rows(each.rows))
                for each in self.members
            ]
            actions = torch.cat([decision.actions.cpu() for decision in decisions])
            last = garden.step(steer(legality, actions))
            for member, decision in zip(self.members, decisions, strict=True):
                member.agent.record(decision, _part(last, member.rows))
            acted += last.actions["op"] != LifecycleOp.WAIT
            observations = last.observations
        for member in self.members:
            member.agent.bootstrap_and_compute_returns(observations[member.rows])
        self._observations = observations
        after, rent = last.after, garden.reward.rent
        scores = net_of_rent(after.objective, after.exposure, rent) / last.scale
        # What the teacher played says nothing about its pupil.
        return PlayedRound(scores.masked_fill(led, torch.nan), acted.masked_fill(led, torch.nan))

    def _lesson(self) -> tuple[Tensor, Steer]:
        """[N] bool: rows that the teacher itself plays, to show the way; and how it does that."""
        garden, teacher = self.garden, self.teacher
        led = torch.zeros(garden.num_envs, dtype=torch.bool)
        pupils = [each for each in self.members if each.settings.apprentice and self.taught]
        if not pupils:
            return led, lambda legality, actions: actions
        assert teacher is not None
        teacher.reset([case.context.name for case in garden.cases])
        teacher.expect_changes(garden.episodes.drift_epoch.clone())
        shares = self.settings.led
        share = shares[self.round] if self.round < len(shares) else 0.0
        for member in pupils:
            led[member.rows[: int(share * len(member.rows))]] = True
            member.notebook = Notebook()
        starts = torch.ones(garden.num_envs, dtype=torch.bool)

        def steer(legality: Legality, actions: Tensor) -> Tensor:
            nonlocal starts
            taught = teacher.act(garden.signals(), legality, starts)
            starts = torch.zeros_like(starts)
            for member in pupils:
                own = Actions(taught.space, taught.values[member.rows])
                member.notebook.write(legality.rows(member.rows), own)
            return torch.where(led[:, None], taught.values, actions.cpu())

        return led, steer

    def learn(self, played: PlayedRound) -> list[MemberReport]:
        """An update of every agent, from the round that was played."""
        reports = [self._learn(member, played) for member in self.members]
        self.round += 1
        return reports

    def _learn(self, member: Member, played: PlayedRound) -> MemberReport:
        missed, metrics = None, None
        if member.settings.apprentice and self.taught:  # ever slower
            lessons = self.settings.lessons
            left = 1.0 - self.round / self.settings.lesson_rounds
            rate = lessons.learning_rate * (lessons.final_rate + (1.0 - lessons.final_rate) * left)
            missed = member.take_lessons(replace(lessons, learning_rate=rate))
        else:
            member.lessons = None
            member.agent.set_hyperparameters(
                **self.settings.annealed(self.round, member.settings.apprentice)
            )
            metrics = member.agent.update()
        return MemberReport(
            name=member.name,
            round=self.round + 1,
            episodes=(self.round + 1) * len(member.rows),
            score=float(played.scores[member.rows].nanmean()),
            acted=float(played.acted[member.rows].nanmean()),
            missed=missed,
            metrics=metrics,
        )

    # --- lasting -------------------------------------------------------------------------

    def save(self, path: Path) -> None:
        """Everything that the next round depends on, between two rounds."""
        controls, lessons = self.garden.controls.state_dict(), dict[str, Tensor]()
        tensors = self.garden.state_dict()
        tensors |= {f"{_CONTROL}.{name}": curve for name, curve in controls.items()}
        for member in self.members:
            member.agent.save(path / f"{member.name}-{self.round}")
            held = {} if member.lessons is None else vars(member.lessons)
            lessons |= {f"{_LESSONS}{member.name}.{name}": value for name, value in held.items()}
        number = tensors["number"] if self.members else tensors["number"][:0]
        said = self.ranks.all_gather_object(
            (number, lessons)
        )  # every agent is saved when all have said it
        tensors["number"] = torch.cat([number for number, _ in said])
        for _, held in said:
            tensors |= held
        members = [asdict(settings) for settings in self.everyone]
        notes = {"round": self.round, "members": members, "settings": asdict(self.settings)}
        if self.ranks.rank == 0:
            write_archive(path / STATE, kind=KIND, version=VERSION, tensors=tensors, notes=notes)
        self.ranks.all_gather_object(None)  # the state is written
        for member in self.members:  # what the state no longer refers to
            for old in path.glob(f"{member.name}-*"):
                if old.name != f"{member.name}-{self.round}":
                    shutil.rmtree(old)

    def load(self, path: Path) -> bool:
        """Go on from there; False if nothing was saved."""
        if not (path / STATE).is_dir():
            return False
        stored = read_archive(path / STATE, kind=KIND, version=VERSION)
        self._require_same(path, stored.notes)
        round_ = int(stored.notes["round"])
        for member in self.members:
            member.load(path / f"{member.name}-{round_}", self.garden)
            held = stored.part(f"{_LESSONS}{member.name}")
            if held:
                here = {name: tensor.to(member.agent.device) for name, tensor in held.items()}
                member.lessons = Lessons(**here)
        self.round = round_
        if self.members:
            # Measured again, in other company, they would be the same only to float tolerance.
            self.garden.controls.load_state_dict(stored.part(_CONTROL))
            number = stored.tensors["number"][self.first_row :][: self.garden.num_envs]
            self._observations = self.garden.load_state_dict({"number": number})
        return True

    def networks(self, path: Path) -> dict[str, RecurrentActorCritic]:
        """Of all members by name; those of other ranks as they were saved last."""
        own = {member.name: member.agent for member in self.members}
        for name in (settings.name for settings in self.everyone):
            if name not in own:
                own[name] = PPOAgent.load(path / f"{name}-{self.round}", device=self.device)
        return {settings.name: own[settings.name].network for settings in self.everyone}

    def _require_same(self, path: Path, notes: Mapping[str, Any]) -> None:
        """Refuse what was saved by a cohort of other members or settings."""
        theirs, ours = notes["members"], list(self.everyone)
        other = len(theirs) != len(ours) or any(map(changed_settings, ours, theirs))
        if other or changed_settings(self.settings, notes["settings"]):
            name = "members" if other else "settings"
            raise AgreementError(
                f"{path} is of trainings with other {name}",
                given=notes[name],
                valid=str(ours if other else self.settings),
                fix="use another folder",
            )


def shares(members: Sequence[MemberSettings], ranks: int) -> list[slice]:
    """By rank, neighbours among the members with about as many rows as those of the others."""
    total, before = sum(member.rows for member in members), 0
    owner = []
    for member in members:
        owner.append(min(ranks - 1, int(ranks * (before + member.rows / 2) / total)))
        before += member.rows
    return [
        slice(sum(each < rank for each in owner), sum(each <= rank for each in owner))
        for rank in range(ranks)
    ]


def _part(outcome: Outcome, rows: Tensor) -> Outcome:
    """What came of one agent's environments."""

    def taken(tensor: Any) -> Any:
        return None if tensor is None else tensor[rows]

    return Outcome(*(taken(getattr(outcome, each.name)) for each in fields(Outcome)))
