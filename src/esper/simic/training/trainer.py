"""The trainer of a run: play a round, learn from it, judge now and then, and never lose anything.

A round is one episode of every environment and one update. Rounds are counted from 1; what
happened before the first, as the baselines, is in round 0. All that a round depends on is in the
settings and the last checkpoint, so a run that was killed goes on as if it had not been.

Shapes: `N` environments of this process.
"""

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from esper.archive import Archive, ArchiveError
from esper.archive.tensors import describing
from esper.garden import LAYOUT, Case, Controls, Draw, Garden, Greenhouse, Plots, Transition
from esper.garden.controller_choice import controller_of
from esper.garden.playing import StoppedError
from esper.garden.suites import GREENHOUSE
from esper.leyline import AgreementError, LifecycleOp, PPOUpdateMetrics, SeedStage
from esper.leyline.errors import first_line
from esper.nissa import (
    AnomalyDetector,
    AnomalyFound,
    Clock,
    Hub,
    Noted,
    RunEnded,
    RunLayout,
    RunStarted,
    RunStore,
    Sampled,
    Sink,
    UpdateMetrics,
    flatten,
    open_sinks,
)
from esper.nissa.anomalies import not_a_number
from esper.nissa.events import KINDS
from esper.nissa.hub import tell
from esper.nissa.store import usable_store
from esper.simic.agent.ppo import PPOAgent
from esper.simic.agent.processes import ALONE, Processes, ProcessesError
from esper.simic.agent.rollout_buffer import NonFiniteError
from esper.simic.agent.rollouts import collect
from esper.simic.agent.types import Decision, Outcome
from esper.simic.training.config import TrainConfig
from esper.simic.training.run_processes import started_again
from esper.simic.training.selection import Judge, Judgement, PlotJudge
from esper.simic.training.telemetry import Reporter, SlowRank, Waiting
from esper.simic.training.training_runs import Kept, RunError, RunFolder
from esper.tamiyo import TokenLayout
from esper.tamiyo.controllers import controller_of_network
from esper.tamiyo.network import GARDEN_FLOOR
from esper.tolaria.population_config import PopulationConfig

AGENT = "agent-0"  # the part of a checkpoint that is the learner
CONTROLS = "controls"  # before the names of controls in a checkpoint


@dataclass(frozen=True)
class RoundReport:
    """What a round came to, for progress displays."""

    round: int
    returns: Tensor  # [N] of this process's episodes
    metrics: PPOUpdateMetrics | None  # None: the round was undone
    seconds: dict[str, float]  # by phase
    stages: dict[str, list[int]]  # by slot: how many environments ended in each stage
    judgement: Judgement | None
    anomalies: tuple[AnomalyFound, ...]
    best: float | None  # score by evaluation


Listener = Callable[[RoundReport], None]
Telling = Callable[[str, int, int], None]


class Trainer:
    """One process's part in a run."""

    tokens: TokenLayout | None = None  # that the network is over

    def __init__(
        self,
        run: RunFolder,
        *,
        processes: Processes = ALONE,
        tell: Telling = lambda what, done, total: None,
        stop: Callable[[], bool] = lambda: False,
    ) -> None:
        self.run, self.processes, self.tell, self.stop = run, processes, tell, stop
        self.config: TrainConfig = run.config
        config = self.config
        if processes.size != config.processes:
            raise AgreementError(
                "The run is for another number of processes",
                given=processes.size,
                valid=config.processes,
                fix=f"continue with: esper resume {run.path}",
            )
        own = config.envs // processes.size
        self.first_env = processes.rank * own
        population = PopulationConfig(deterministic=config.deterministic, backend=config.backend)
        self.controls = Controls(horizon=config.horizon, device=config.device, config=population)
        self.detector = AnomalyDetector()
        self.round = 0  # rounds that are over
        self.judged: list[list[Any]] = []  # controller, round, score, interval, episodes
        self.undone = False  # was the last round?
        self._computed: str | None = None  # the backend of the checkpoint that it goes on from
        self.hub = Hub() if processes.rank == 0 else Waiting()
        self._slow = SlowRank()
        self._build(own, population)
        agent = PPOAgent.build(
            self.garden.space,
            self.garden.state_dim,
            own,
            config.horizon,
            config.ppo,
            lstm_hidden_dim=config.lstm,
            layout=self.tokens,
            seed=config.seed,
            device=config.device,
            processes=processes,
        )
        self.agent = agent if self.tokens else suited_to_gardens(agent, config.patience)

    def _build(self, own: int, population: PopulationConfig) -> None:
        """The world of `own` environments, and whoever judges."""
        config, suite, processes = self.config, self.run.suite, self.processes
        self.draw = Draw(
            contexts=suite.training, seeds=config.cases, seed=config.seed, first_row=self.first_env
        )
        self.garden = Garden(self.draw, own, controls=self.controls, reward=config.reward)
        self.judge = Judge(
            suite.training,
            seeds=config.evaluation.seeds,
            rows=own,
            controls=self.controls,
            rent=config.reward.rent,
            processes=processes,
        )

    # --- beginning and going on ----------------------------------------------------------

    def begin(self) -> bool:
        """Start anew, or from the last checkpoint if there is one; False if stopped meanwhile."""
        saved = self.run.newest()
        seen = self.processes.each(saved[0] if saved else None)
        if any(each != seen[0] for each in seen):
            what = f"Processes see other checkpoints in {self.run.path}"
            raise ProcessesError(what, given=f"by rank {seen}", fix="give all the same folder")
        if saved is not None:
            if self.processes.rank == 0:
                self.run.require_data()
            self.round, numbers = saved[0], self._restore(*saved)
            self._observations = self.garden.load_state_dict({"number": numbers})
        if self.processes.rank == 0:
            self.run.clear_unfinished()
            self._open(saved)
        self.reporter = Reporter(
            self.hub, self.agent.network, self.garden, self.first_env, self.config.watched
        )
        if saved is None:
            try:
                self._measure_controls()
                self._observations = self.garden.reset()
                self._judge_baselines()
            except StoppedError:
                return False
            self._checkpoint()
        return True

    def _store(self, *, new: bool) -> RunStore | None:
        """The run's telemetry, as it was at the end of the present round, if it can be used."""
        return usable_store(self.run.path, self._layout(), after=-1 if new else self.round)

    def _layout(self) -> RunLayout:
        """What the columns of the telemetry mean."""
        garden = self.garden
        return RunLayout.of(garden.space, garden.table.names, garden.catalogue)

    @property
    def _backend(self) -> str:
        return self.garden.population.backend

    def _open(self, saved: Kept | None) -> None:
        """Open the telemetry, and tell what starts here."""
        store = self._store(new=saved is None)
        sinks: list[Sink] = [] if store is None else [store]
        self.hub = Hub(*sinks, *open_sinks(self.config.sinks, self.run.path))
        facts, whole = self.run.facts, None if store is None else store.last_commit
        self.hub.emit(
            RunStarted(
                round=self.round,
                config=asdict(self.config),
                versions=facts.get("versions", {}),
                seeds={"run": self.config.seed},
                data=facts.get("data", {}),
            )
        )
        if (whole or 0) < self.round:
            gap = f"Telemetry of rounds {(whole or 0) + 1} to {self.round} is not whole."
            self.hub.emit(Noted(round=self.round, text=gap))
        size, before = self.processes.size, saved[1].notes.get("processes") if saved else None
        changes = []
        if times := started_again():
            changes.append(f"A process was lost, and all were started again ({times})")
        if before not in (None, size):
            changes.append(f"Where {before} processes learned, {size} go on")
        if self._computed not in (None, now := self._backend):
            how = f"Hosts were computed {self._computed}, and are {now} now; rounding differs"
            changes.append(how)
        for change in changes:
            tell(f"{change}: from round {self.round} on.")
            self.hub.emit(Noted(round=self.round, text=f"{change}."))

    def _restore(self, round_: int, state: Archive) -> Tensor:
        """Take everything over from a checkpoint; returns each row's episode, [N]."""
        place = self.run.checkpoint(round_)
        self.run.require_settings(state)
        self._computed = state.notes.get("backend", "fused")
        self.agent = PPOAgent.load(
            place / AGENT,
            device=self.agent.device,
            space=self.garden.space,
            state_dim=self.garden.state_dim,
            processes=self.processes,
        )
        held, buffer = self.agent.config, self.agent.buffer
        own = replace(self.config.ppo, entropy_coef=held.entropy_coef)
        pairs = {  # an agent of other settings than the run's is refused
            "environments": (self.config.envs, self.agent.place[1]),
            "steps": (self.config.horizon, buffer.steps),
            # Over tokens the memory has a size of its own.
            "lstm": (self.config.lstm, self.config.lstm if self.tokens else buffer.lstm_hidden_dim),
            "seed": (self.config.seed, self.agent.seed),
            "ppo": (replace(own, learning_rate=held.learning_rate), held),
        }
        if wrong := [name for name, (ours, theirs) in pairs.items() if ours != theirs]:
            what = f"{place / AGENT} was made with other settings than the run's"
            fix = "remove this checkpoint to resume from the one before"
            raise ArchiveError(what, given=", ".join(wrong), fix=fix)
        with describing(f"{place} does not hold a run's state"):
            self.detector.load_state_dict(state.notes["anomalies"])
            numbers, self.judged = state.tensors["number"], state.notes["judged"]
            if numbers.shape != (self.config.envs,) or numbers.dtype != torch.int64:
                raise ValueError(f"no number for each of {self.config.envs} environments")
            self.undone = state.notes["undone"] is True
            curves = state.part(CONTROLS)
            if any(curve.dtype != torch.float64 for curve in curves.values()):
                raise TypeError("controls are not float64")
            self.controls.load_state_dict(curves)
            if self.controls.missing(self._cases()):  # measured again they would differ a little
                raise LookupError("controls are missing")
        return numbers[self.first_env :][: self.garden.envs]

    def _cases(self) -> list[Case]:
        """Every case that is played or judged."""
        return [*self.draw.pool(), *self.judge.cases]

    def _measure_controls(self) -> None:
        """Processes share the controls, and get to know all of them."""
        ranks, said = self.processes, partial(self.tell, "measuring controls")
        self.controls.require(self._cases(), ranks, parts=ranks.size, progress=said, stop=self.stop)

    def _judge_baselines(self) -> None:
        for place, name in enumerate(self.config.evaluation.baselines):
            if self._stopping():
                raise StoppedError("Judging was told to stop", given=f"{name} was not judged")
            self._tell_judged(self.judge.judge(controller_of(name, self.run.suite)), 0)
            self.tell("judging baselines", place + 1, len(self.config.evaluation.baselines))

    # --- rounds --------------------------------------------------------------------------

    def train(self, listener: Listener = lambda report: None) -> bool:
        """Train until the last round; False if it was stopped before, after a checkpoint."""
        kept = self.round  # the last round with a checkpoint
        while self.round < self.config.rounds:
            stopping = self._stopping()
            if not stopping:
                listener(self._one_round())
            last = self.round == self.config.rounds
            due = stopping or last or self.round % self.config.checkpoint_every == 0
            if due and self.round > kept:
                self._checkpoint()
                kept = self.round
            if stopping:
                return False
        return True

    def _stopping(self) -> bool:
        """One process is told to stop; all stop, at the same place."""
        return bool(self.processes.max_(torch.tensor(float(self.stop()))))

    def _one_round(self) -> RoundReport:
        clock, number, before = Clock(), self.round + 1, self.agent.state()
        with clock.phase("play"):
            returns, stages = self._play(clock)
        with clock.phase("learn"):
            metrics, found = self._learn(before)
        self.round = number
        if self.processes.rank == 0:
            if metrics is not None:
                self.hub.emit(UpdateMetrics(round=number, metrics=flatten(metrics)))
                found = tuple(self.detector.observe(number, metrics))
            for anomaly in found:
                self.hub.emit(anomaly)
        judged: Judgement | None = None
        every = self.config.evaluation.every
        if number % every == 0 or number == self.config.rounds:
            with clock.phase("judge"):
                judged = self._judge(number)
        found += self._gather(number, clock.spent)
        spent = dict(clock.spent)
        return RoundReport(number, returns, metrics, spent, stages, judged, found, self.best)

    def _gather(self, number: int, spent: dict[str, float]) -> tuple[AnomalyFound, ...]:
        """Take the other processes' events and times over; which of them is slow."""
        waiting = self.hub.taken() if isinstance(self.hub, Waiting) else []
        told = [(event.kind, dict(vars(event))) for event in waiting]
        others = self.processes.handed_over((told, spent))
        if self.processes.rank > 0:
            return ()
        for kind, values in (event for events, _ in others for event in events):
            self.hub.emit(KINDS[kind](**values))
        times = {f"seconds_{name}": seconds for name, seconds in spent.items()}
        playing = [each["play"] for each in (spent, *(each for _, each in others))]
        if others:
            times |= {f"seconds_play_rank_{rank}": each for rank, each in enumerate(playing)}
        self.hub.emit(Sampled(round=number, values=times))
        found = self._slow.observe(number, playing)
        for anomaly in found:
            self.hub.emit(anomaly)
        return found

    def _learn(self, before: Archive) -> tuple[PPOUpdateMetrics | None, tuple[AnomalyFound, ...]]:
        """Learn from the round. Where that comes to numbers that are not finite, the agent is what
        it was before the round, and the next one is played; twice in a row ends the run."""
        self.agent.anneal(**self.config.annealed(self.round))
        try:
            metrics = self.agent.update()
        except (NonFiniteError, ProcessesError) as error:  # of this process, or of another
            self.agent.undo(before)
            why = f"{error.what} ({error.given})"
            if self.undone:
                sound = self.run.checkpoint(self.run.rounds()[-1])
                what = f"Learning failed in rounds {self.round} and {self.round + 1}"
                fix = f"the agent in {sound} is sound; start another run with a smaller "
                raise RunError(what, given=why, fix=f"{fix}ppo.learning_rate") from error
            self.undone = True
            message = f"Round {self.round + 1} was undone: {why}."
            advice = "If it happens again, the run ends: lower ppo.learning_rate."
            return None, (not_a_number(self.round + 1, message, advice),)
        self.undone = False
        return metrics, ()

    def _play(self, clock: Clock) -> tuple[Tensor, dict[str, list[int]]]:
        """An episode of every environment, into the agent's buffer: returns [N], and by slot how
        many ended in each stage."""
        returns = torch.zeros(self.garden.envs, dtype=torch.float64)
        stage = self.garden.lifecycle.stage  # [N, S]
        untold: list[Callable[[], None]] = []  # of the last step

        def tell_untold() -> None:
            while untold:
                untold.pop(0)()

        def listen(step: int, decision: Decision, outcome: Outcome) -> None:
            nonlocal stage
            assert isinstance(outcome, Transition)
            returns.add_(outcome.terms.total)
            untold.append(self.reporter.step(self.round + 1, step, decision, outcome, returns))
            stage = outcome.after.lifecycle.stage

        self.garden.population.do_beside_epochs(tell_untold)
        self._observations = collect(
            self.agent, self.garden, self._observations, listen=listen, phase=clock.phase
        )
        tell_untold()
        counts = one_hot(stage, len(SeedStage)).sum(0).tolist()
        return returns, dict(zip(self.garden.catalogue.slots.names, counts, strict=True))

    def _judge(self, number: int) -> Judgement:
        judged = self.judge.judge(controller_of_network(self.agent.network), attribute=True)
        before = self.best
        self._tell_judged(judged, number)
        if self.best != before:  # as all processes see it
            if self.processes.rank == 0:
                self.run.require_held()
            self.agent.save(self.run.best)
        if judged.best is not None:
            self.hub.emit(replace(judged.best, round=number))
        return judged

    def _tell_judged(self, judged: Judgement, number: int) -> None:
        """To the telemetry, and to the next checkpoint: what counts lasts where telemetry fails."""
        figures = [each if math.isfinite(each) else None for each in judged.mean]
        self.judged.append([judged.controller, number, *figures, judged.scores.numel()])
        if self.processes.rank == 0:
            self.hub.emit(judged.event(number))

    @property
    def best(self) -> float | None:
        """Of the learner's scores."""
        found = [row[2] for row in self.judged if row[1] > 0 and row[2] is not None]
        return max(found, default=None)

    # --- lasting -------------------------------------------------------------------------

    def _checkpoint(self) -> None:
        """Everything, at the end of a round; telemetry first, so that it is never behind."""
        self.hub.commit(self.round)
        if self.processes.rank == 0:
            self.run.begin_checkpoint(self.round)
        self.agent.save(self.run.unfinished(self.round) / AGENT)
        number = self.processes.united(self.garden.state_dict()["number"], self.agent.place)
        if self.processes.rank == 0:
            controls = self.controls.state_dict().items()
            tensors = {"number": number, **{f"{CONTROLS}.{n}": curve for n, curve in controls}}
            anomalies = self.detector.state_dict()
            notes: dict[str, Any] = {"settings": asdict(self.config), "anomalies": anomalies}
            notes |= {"judged": self.judged, "undone": self.undone}
            notes["backend"] = self._backend
            notes["processes"] = self.processes.size
            self.run.finish_checkpoint(self.round, tensors, notes)
        self.processes.sum_(torch.zeros(1))  # all wait for the first

    def close(self) -> None:
        self.hub.close()

    def __enter__(self) -> "Trainer":
        return self

    def __exit__(self, kind: object, failure: BaseException | None, trace: object) -> None:
        """Tell how it ended, and close."""
        if self.processes.rank == 0:
            state, text = "finished" if self.round == self.config.rounds else "stopped", ""
            if failure is not None:
                state, text = "failed", f"{type(failure).__name__} {first_line(failure)}"
            self.hub.emit(RunEnded(round=self.round, state=state, text=text))
        self.close()


def suited_to_gardens(agent: PPOAgent, patience: float) -> PPOAgent:
    """A new agent, reluctant to prune: only what is left to grow can show its worth."""
    agent.network.prefer("op", LifecycleOp.PRUNE, -patience)
    agent.network.observation_norm.floor.fill_(GARDEN_FLOOR)
    return agent


class GreenhouseTrainer(Trainer):
    """The same in the greenhouse: drawn plots in place of a garden, one policy for all of them."""

    tokens = LAYOUT

    def _build(self, own: int, population: PopulationConfig) -> None:
        config, processes = self.config, self.processes
        how = {"device": config.device, "deterministic": config.deterministic}
        self.plots = Plots(
            Greenhouse(config.seed, longest=config.horizon),
            own,
            plots=config.plots // processes.size,
            players=config.players,
            place=processes.rank,
            of=processes.size,
            reward=config.reward,
            **how,
        )
        self.garden = cast(Any, self.plots)
        self.judge = cast(Any, PlotJudge(config.evaluation.seeds, config.horizon, processes, **how))

    def _layout(self) -> RunLayout:
        return RunLayout.of(LAYOUT.space)

    @property
    def _backend(self) -> str:
        return "as plots allow"

    def _cases(self) -> list[Case]:
        return []  # controls play with the rest

    def _play(self, clock: Clock) -> tuple[Tensor, dict[str, list[int]]]:
        """Returns [N], and by kind of host how many slots ended in each stage."""
        returns = torch.zeros(self.plots.envs, dtype=torch.float64)

        def listen(step: int, decision: Decision, outcome: Outcome) -> None:
            returns.add_(outcome.rewards)

        self._observations = collect(
            self.agent, self.plots, self._observations, listen=listen, phase=clock.phase
        )
        stages: dict[str, Tensor] = {}
        for kind, stage in self.plots.last:
            stages[kind] = stages.get(kind, 0) + one_hot(stage, len(SeedStage)).sum((0, 1))
        self.hub.emit(Sampled(round=self.round + 1, values={"return": float(returns.mean())}))
        return returns, {kind: counts.tolist() for kind, counts in stages.items()}


def trainer_of(run: RunFolder) -> type[Trainer]:
    return GreenhouseTrainer if run.config.suite == GREENHOUSE else Trainer
