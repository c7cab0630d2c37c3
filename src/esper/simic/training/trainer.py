"""The training loop of a run.

A round collects one episode in every environment and updates the agent once. Rounds are counted
from 1. Round 0 is what precedes them: the baselines are evaluated there. A round depends only on
the settings and on the checkpoint before it, so a run that was killed continues bit for bit.

Shapes: `N` environments of this process, `S` slots.
"""

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from esper.archive import Archive, ArchiveError
from esper.archive.tensors import describing
from esper.distributed import SINGLE_PROCESS, Processes, ProcessesError
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
from esper.simic.agent.ppo import PPOAgent, initial_weights
from esper.simic.agent.rollout import collect
from esper.simic.agent.rollout_buffer import NonFiniteError
from esper.simic.agent.types import Decision, Outcome
from esper.simic.contracts import ResumableWorld
from esper.simic.training.config import TrainConfig
from esper.simic.training.evaluator import (
    ControllerEvaluator,
    EvalResult,
    Evaluator,
    GreenhouseEvaluator,
)
from esper.simic.training.run_processes import restart_count
from esper.simic.training.telemetry import BufferingHub, Reporter
from esper.simic.training.training_runs import Checkpoint, RunError, RunFolder
from esper.tamiyo import TokenActorCritic
from esper.tamiyo.controllers import controller_of_network
from esper.tamiyo.normalization import GARDEN_VARIANCE_FLOOR
from esper.tolaria.population_config import PopulationConfig

AGENT = "agent-0"  # part of a checkpoint: the agent
CONTROLS = "controls"  # prefix of the controls' names in a checkpoint


@dataclass(frozen=True)
class RoundReport:
    """Results of a round, for progress displays."""

    round: int
    returns: Tensor  # [N] of this process's episodes
    metrics: PPOUpdateMetrics | None  # None: the update was reverted
    seconds: dict[str, float]  # by phase
    stages: dict[str, list[int]]  # by slot: number of environments that ended in each stage
    evaluation: EvalResult | None
    anomalies: tuple[AnomalyFound, ...]
    best_score: float | None  # of all evaluations of the agent


OnRound = Callable[[RoundReport], None]
Progress = Callable[[str, int, int], None]  # activity, parts done, number of parts


def _ignore_round(report: RoundReport) -> None:
    pass


def _ignore_progress(activity: str, done: int, total: int) -> None:
    pass


def _never_stop() -> bool:
    return False


class Trainer:
    """The training loop of one process in the environments of a garden."""

    world: ResumableWorld
    evaluator: ControllerEvaluator

    def __init__(
        self,
        run: RunFolder,
        *,
        processes: Processes = SINGLE_PROCESS,
        progress: Progress = _ignore_progress,
        stop: Callable[[], bool] = _never_stop,
    ) -> None:
        """Create the world, the evaluator and an untrained agent.

        Args:
            run: Folder of the run.
            processes: Processes that learn together.
            progress: Called while controls and baselines are measured.
            stop: Whether the run should stop after this round.

        Raises:
            AgreementError: The run is for another number of processes.
        """
        self.run = run
        self.processes = processes
        self.progress = progress
        self.stop = stop
        self.config: TrainConfig = run.config
        config = self.config
        if processes.size != config.processes:
            raise AgreementError(
                "The run is for another number of processes",
                given=processes.size,
                valid=config.processes,
                fix=f"continue with: esper resume {run.path}",
            )
        num_envs = config.envs // processes.size  # of this process
        self.first_env = processes.rank * num_envs
        self.detector = AnomalyDetector()
        self.hub = Hub() if processes.rank == 0 else BufferingHub()

        # Training state; a checkpoint contains it.
        self.round = 0  # completed rounds
        self.eval_history: list[list[Any]] = []  # controller, round, score, interval, episodes
        self.last_update_reverted = False

        self._checkpoint_backend: str | None = None  # executor before the run was resumed
        self._build_world(num_envs)
        self.agent = self._build_agent(num_envs)

    def _build_world(self, num_envs: int) -> None:
        """Create the environments and the evaluator."""
        config, suite = self.config, self.run.suite
        population = PopulationConfig(deterministic=config.deterministic, backend=config.backend)
        self.controls = Controls(horizon=config.horizon, device=config.device, config=population)
        self.draw = Draw(
            contexts=suite.training,
            seeds=config.seeds_per_context,
            seed=config.seed,
            first_row=self.first_env,
        )
        self.garden = Garden(self.draw, num_envs, controls=self.controls, reward=config.reward)
        self.world = self.garden
        garden_evaluator = Evaluator(
            suite.training,
            seeds=config.evaluation.seeds,
            rows=num_envs,
            controls=self.controls,
            rent=config.reward.rent,
            processes=self.processes,
        )
        self.evaluator = garden_evaluator
        # Every case of training and evaluation. Each needs a control.
        self.cases: list[Case] = [*self.draw.pool(), *garden_evaluator.cases]

    def _build_agent(self, num_envs: int) -> PPOAgent:
        """Create an untrained agent."""
        config = self.config
        agent = PPOAgent(
            self.world.action_space,
            state_dim=self.world.state_dim,
            num_envs=num_envs,
            max_steps_per_env=config.horizon,
            lstm_hidden_dim=config.lstm,
            config=config.ppo,
            seed=config.seed,
            device=config.device,
            processes=self.processes,
        )
        init_policy_priors(agent, config.prune_logit_bias)
        return agent

    # --- start and resume ----------------------------------------------------------------

    def begin(self) -> bool:
        """Start the run, or resume it from its last checkpoint.

        Returns:
            False if it was stopped while controls or baselines were measured.

        Raises:
            ProcessesError: The processes see different checkpoints.
        """
        checkpoint = self.run.newest()
        self._require_same_checkpoint(checkpoint)
        if checkpoint is not None:
            if self.processes.rank == 0:
                self.run.require_data()
            self.round = checkpoint.round
            episode_numbers = self._restore(*checkpoint)
            self._observations = self.world.load_state_dict({"number": episode_numbers})
        if self.processes.rank == 0:
            self.run.clear_unfinished()
            self._open_telemetry(checkpoint)
        self._create_reporter()
        if checkpoint is None:
            try:
                self._measure_controls()
                self._observations = self.world.reset()
                self._evaluate_baselines()
            except StoppedError:
                return False
            self._save_checkpoint()
        return True

    def _require_same_checkpoint(self, checkpoint: Checkpoint | None) -> None:
        round_ = None if checkpoint is None else checkpoint.round
        rounds = self.processes.all_gather_object(round_)
        if len(set(rounds)) > 1:
            raise ProcessesError(
                f"Processes see different checkpoints in {self.run.path}",
                given=f"rounds {rounds}, by rank",
                fix="give all processes the same folder",
            )

    def _open_store(self, *, new: bool) -> RunStore | None:
        """Open the telemetry as it was after the current round.

        Returns:
            The store, or None if it cannot be used.
        """
        after = -1 if new else self.round
        return usable_store(self.run.path, self._telemetry_layout(), after=after)

    def _telemetry_layout(self) -> RunLayout:
        """Return the meaning of the telemetry's columns."""
        garden = self.garden
        return RunLayout.of(garden.action_space, garden.table.names, garden.catalogue)

    @property
    def _backend(self) -> str:
        return self.garden.population.backend

    def _open_telemetry(self, checkpoint: Checkpoint | None) -> None:
        """Open the sinks, and report the start of the run and what has changed since before."""
        store = self._open_store(new=checkpoint is None)
        sinks: list[Sink] = [] if store is None else [store]
        self.hub = Hub(*sinks, *open_sinks(self.config.sinks, self.run.path))
        facts = self.run.facts
        self.hub.emit(
            RunStarted(
                round=self.round,
                config=asdict(self.config),
                versions=facts.get("versions", {}),
                seeds={"run": self.config.seed},
                data=facts.get("data", {}),
            )
        )
        last_stored = 0 if store is None else store.last_commit or 0
        if last_stored < self.round:
            gap = f"Telemetry for rounds {last_stored + 1} to {self.round} is incomplete."
            self.hub.emit(Noted(round=self.round, text=gap))
        for change in self._list_changes(checkpoint):
            tell(f"{change}: from round {self.round} on.")
            self.hub.emit(Noted(round=self.round, text=f"{change}."))

    def _create_reporter(self) -> None:
        """Create the reporter of the steps' events, for the current hub and agent."""
        self.reporter = Reporter(
            self.hub, self.agent.network, self.garden, self.first_env, self.config.logged_envs
        )

    def _list_changes(self, checkpoint: Checkpoint | None) -> list[str]:
        """Describe what differs from the process that wrote the checkpoint."""
        changes = []
        restarts = restart_count()
        if restarts:
            changes.append(f"A process was lost, and all were started again ({restarts})")
        size = self.processes.size
        earlier_size = None
        if checkpoint is not None:
            earlier_size = checkpoint.state.notes.get("processes")
        if earlier_size not in (None, size):
            changes.append(f"The number of processes changed from {earlier_size} to {size}")
        earlier, backend = self._checkpoint_backend, self._backend
        if earlier not in (None, backend):
            changes.append(f"The executor changed from {earlier} to {backend}; rounding differs")
        return changes

    def _restore(self, round_: int, state: Archive) -> Tensor:
        """Load the training state from a checkpoint.

        Returns:
            The episode number of every environment of this process, [N].

        Raises:
            ArchiveError: The checkpoint does not hold the state of this run.
        """
        folder = self.run.checkpoint(round_)
        self.run.require_settings(state)
        self._checkpoint_backend = state.notes.get("backend", "fused")
        self.agent = PPOAgent.load(
            folder / AGENT,
            device=self.agent.device,
            action_space=self.world.action_space,
            state_dim=self.world.state_dim,
            processes=self.processes,
        )
        self._require_agent_settings(folder)
        with describing(f"{folder} does not hold a run's state"):
            self.detector.load_state_dict(state.notes["anomalies"])
            self.eval_history = state.notes["eval_history"]
            self.last_update_reverted = state.notes["last_update_reverted"] is True
            numbers = state.tensors["number"]
            if numbers.shape != (self.config.envs,) or numbers.dtype != torch.int64:
                raise ValueError(f"no number for each of {self.config.envs} environments")
            self._restore_controls(state)
        return numbers[self.first_env :][: self.world.num_envs]

    def _restore_controls(self, state: Archive) -> None:
        curves = state.part(CONTROLS)
        if any(curve.dtype != torch.float64 for curve in curves.values()):
            raise TypeError("controls are not float64")
        self.controls.load_state_dict(curves)
        # A control that is measured again would differ slightly.
        if self.controls.missing(self.cases):
            raise LookupError("controls are missing")

    def _require_agent_settings(self, folder: Path) -> None:
        """Raise an error if the agent of a checkpoint was made with other settings."""
        config, agent = self.config, self.agent
        # The entropy coefficient and the learning rate change during training.
        ppo = replace(config.ppo, entropy_coef=agent.config.entropy_coef, lr=agent.config.lr)
        pairs = {
            "environments": (config.envs, agent.env_slice[1]),
            "steps": (config.horizon, agent.buffer.max_steps_per_env),
            "lstm": (self._expected_lstm_size(), agent.buffer.lstm_hidden_dim),
            "seed": (config.seed, agent.seed),
            "ppo": (ppo, agent.config),
        }
        wrong = [name for name, (expected, actual) in pairs.items() if expected != actual]
        if wrong:
            raise ArchiveError(
                f"{folder / AGENT} was made with other settings than the run's",
                given=", ".join(wrong),
                fix="remove this checkpoint to resume from the one before",
            )

    def _expected_lstm_size(self) -> int:
        return self.config.lstm

    def _measure_controls(self) -> None:
        """Measure the controls of all cases; the processes share the work and the results."""
        self.controls.require(
            self.cases,
            self.processes,
            parts=self.processes.size,
            progress=partial(self.progress, "measuring controls"),
            stop=self.stop,
        )

    def _evaluate_baselines(self) -> None:
        baselines = self.config.evaluation.baselines
        for number, name in enumerate(baselines):
            if self._should_stop():
                raise StoppedError("The evaluation was stopped", given=f"before {name}")
            result = self.evaluator.evaluate(controller_of(name, self.run.suite))
            self._record_evaluation(result, 0)
            self.progress("evaluating baselines", number + 1, len(baselines))

    # --- rounds --------------------------------------------------------------------------

    def train(self, on_round: OnRound = _ignore_round) -> bool:
        """Train until the last round.

        Args:
            on_round: Called after every round.

        Returns:
            False if it was stopped before, after a checkpoint.
        """
        last_saved = self.round
        while self.round < self.config.rounds:
            stopping = self._should_stop()
            if not stopping:
                on_round(self._run_round())
            is_last = self.round == self.config.rounds
            is_due = self.round % self.config.checkpoint_every == 0
            if (stopping or is_last or is_due) and self.round > last_saved:
                self._save_checkpoint()
                last_saved = self.round
            if stopping:
                return False
        return True

    def _should_stop(self) -> bool:
        """Whether one of the processes was asked to stop; the same in all of them."""
        return bool(self.processes.max_(torch.tensor(float(self.stop()))))

    def _run_round(self) -> RoundReport:
        clock = Clock()
        round_ = self.round + 1
        snapshot = self.agent.snapshot()
        with clock.phase("play"):
            returns, stages = self._collect_rollout(clock)
        with clock.phase("learn"):
            metrics, anomalies = self._update_agent(snapshot)
        self.round = round_
        if self.processes.rank == 0:
            if metrics is not None:
                self.hub.emit(UpdateMetrics(round=round_, metrics=flatten(metrics)))
                anomalies = tuple(self.detector.observe(round_, metrics))
            for anomaly in anomalies:
                self.hub.emit(anomaly)
        evaluation: EvalResult | None = None
        if round_ % self.config.evaluation.every == 0 or round_ == self.config.rounds:
            with clock.phase("evaluate"):
                evaluation = self._evaluate_agent(round_)
        self._gather_telemetry(round_, clock.spent)
        return RoundReport(
            round=round_,
            returns=returns,
            metrics=metrics,
            seconds=dict(clock.spent),
            stages=stages,
            evaluation=evaluation,
            anomalies=anomalies,
            best_score=self.best_score,
        )

    def _collect_rollout(self, clock: Clock) -> tuple[Tensor, dict[str, list[int]]]:
        """Run one episode in every environment and fill the agent's buffer.

        Returns:
            Returns of the episodes, [N], and for every slot the number of environments that ended
            in each stage.
        """
        round_ = self.round + 1
        returns = torch.zeros(self.garden.num_envs, dtype=torch.float64)
        stages = self.garden.lifecycle.stage  # [N, S]
        # The events of a step are sent while the device computes the next epoch.
        pending_events: list[Callable[[], None]] = []

        def flush_events() -> None:
            while pending_events:
                pending_events.pop(0)()

        def on_step(step: int, decision: Decision, outcome: Outcome) -> None:
            nonlocal stages
            assert isinstance(outcome, Transition)
            returns.add_(outcome.terms.total)
            stages = outcome.after.lifecycle.stage
            pending_events.append(self.reporter.step(round_, step, decision, outcome, returns))

        self.garden.population.do_beside_epochs(flush_events)
        self._observations = collect(
            self.agent, self.world, self._observations, on_step=on_step, phase=clock.phase
        )
        flush_events()
        counts = one_hot(stages, len(SeedStage)).sum(0).tolist()
        return returns, dict(zip(self.garden.catalogue.slots.names, counts, strict=True))

    def _update_agent(
        self, snapshot: Archive
    ) -> tuple[PPOUpdateMetrics | None, tuple[AnomalyFound, ...]]:
        """Update the agent from its rollout.

        If a number is not finite, the agent is restored from the snapshot and training continues.

        Args:
            snapshot: The agent before the round.

        Returns:
            Metrics of the update, or None and an anomaly if it was reverted.

        Raises:
            RunError: The update of the round before was reverted as well.
        """
        round_ = self.round + 1
        self.agent.set_hyperparameters(**self.config.annealed_hyperparameters(self.round))
        try:
            metrics = self.agent.update()
        except (NonFiniteError, ProcessesError) as error:  # of this process, or of another one
            self.agent.restore_snapshot(snapshot)
            reason = f"{error.what} ({error.given})"
            if self.last_update_reverted:
                intact = self.run.checkpoint(self.run.rounds()[-1])
                raise RunError(
                    f"Learning failed in rounds {self.round} and {round_}",
                    given=reason,
                    fix=f"the agent in {intact} is intact; start another run with a smaller ppo.lr",
                ) from error
            self.last_update_reverted = True
            anomaly = not_a_number(
                round_,
                f"The update of round {round_} was reverted: {reason}.",
                "If the next update fails as well, the run ends: lower ppo.lr.",
            )
            return None, (anomaly,)
        self.last_update_reverted = False
        return metrics, ()

    def _gather_telemetry(self, round_: int, seconds: dict[str, float]) -> None:
        """Send the events of all processes, and the time of each phase, to the hub of rank 0."""
        events = self.hub.take_events() if isinstance(self.hub, BufferingHub) else []
        records = [(event.kind, dict(vars(event))) for event in events]
        by_rank = self.processes.gather_object((records, seconds["play"]))
        if self.processes.rank > 0:
            return
        for rank_records, _ in by_rank:
            for kind, values in rank_records:
                self.hub.emit(KINDS[kind](**values))
        samples = {f"seconds_{phase}": spent for phase, spent in seconds.items()}
        if self.processes.size > 1:
            for rank, (_, play_seconds) in enumerate(by_rank):
                samples[f"seconds_play_rank_{rank}"] = play_seconds
        self.hub.emit(Sampled(round=round_, values=samples))

    def _evaluate_agent(self, round_: int) -> EvalResult:
        """Evaluate the agent, and save it if its score is the best so far."""
        controller = controller_of_network(self.agent.network)
        result = self.evaluator.evaluate(controller, attribute=True)
        earlier_best = self.best_score
        self._record_evaluation(result, round_)
        if self.best_score != earlier_best:  # the same in all processes
            if self.processes.rank == 0:
                self.run.require_held()
            self.agent.save(self.run.best)
        if result.best_episode is not None:
            self.hub.emit(replace(result.best_episode, round=round_))
        return result

    def _record_evaluation(self, result: EvalResult, round_: int) -> None:
        """Add an evaluation to the telemetry and to the next checkpoint.

        The checkpoint has it even if the telemetry fails.
        """
        estimate = [value if math.isfinite(value) else None for value in result.mean]
        row = [result.controller, round_, *estimate, result.scores.numel()]
        self.eval_history.append(row)
        if self.processes.rank == 0:
            self.hub.emit(result.event(round_))

    @property
    def best_score(self) -> float | None:
        """Best score of the agent in all evaluations."""
        scores = [
            score for _, round_, score, *_ in self.eval_history if round_ > 0 and score is not None
        ]
        return max(scores, default=None)

    # --- checkpoints ---------------------------------------------------------------------

    def _save_checkpoint(self) -> None:
        """Save the training state at the end of a round.

        The telemetry is committed first, so that it is never behind the checkpoint.
        """
        self.hub.commit(self.round)
        if self.processes.rank == 0:
            self.run.begin_checkpoint(self.round)
        self.agent.save(self.run.unfinished(self.round) / AGENT)
        numbers = self.processes.all_gather_rows(
            self.world.state_dict()["number"], self.agent.env_slice
        )
        if self.processes.rank == 0:
            tensors = {"number": numbers}
            for name, curve in self.controls.state_dict().items():
                tensors[f"{CONTROLS}.{name}"] = curve
            notes = {
                "settings": asdict(self.config),
                "anomalies": self.detector.state_dict(),
                "eval_history": self.eval_history,
                "last_update_reverted": self.last_update_reverted,
                "backend": self._backend,
                "processes": self.processes.size,
            }
            self.run.finish_checkpoint(self.round, tensors, notes)
        self.processes.sum_(torch.zeros(1))  # the other processes wait for rank 0

    def close(self) -> None:
        """Close the telemetry."""
        self.hub.close()

    def __enter__(self) -> "Trainer":
        return self

    def __exit__(self, kind: object, failure: BaseException | None, trace: object) -> None:
        """Report the end of the run and close the telemetry."""
        if self.processes.rank == 0:
            state, text = "stopped", ""
            if failure is not None:
                state, text = "failed", f"{type(failure).__name__} {first_line(failure)}"
            elif self.round == self.config.rounds:
                state = "finished"
            self.hub.emit(RunEnded(round=self.round, state=state, text=text))
        self.close()


def init_policy_priors(agent: PPOAgent, prune_logit_bias: float) -> None:
    """Prepare an untrained agent for gardens.

    A seed that is pruned early cannot show its value, so an untrained agent seldom prunes.

    Args:
        agent: The agent.
        prune_logit_bias: Amount that is subtracted from the logit of PRUNE.
    """
    agent.network.bias_action_logit("op", LifecycleOp.PRUNE, -prune_logit_bias)
    agent.network.observation_norm.set_variance_floor(GARDEN_VARIANCE_FLOOR)


class GreenhouseTrainer(Trainer):
    """The training loop in populations of the greenhouse, with one policy for all hosts."""

    def _build_world(self, num_envs: int) -> None:
        config, processes = self.config, self.processes
        settings: dict[str, Any] = {
            "device": config.device,
            "deterministic": config.deterministic,
        }
        self.plots = Plots(
            Greenhouse(config.seed, longest=config.horizon),
            num_envs,
            plots=config.populations // processes.size,
            players=config.rollouts_per_case,
            place=processes.rank,
            of=processes.size,
            reward=config.reward,
            **settings,
        )
        self.world = self.plots
        self.evaluator = GreenhouseEvaluator(
            config.evaluation.seeds, config.horizon, processes, **settings
        )
        # Controls run in the same population as the episodes.
        self.controls = Controls(horizon=config.horizon, device=config.device)
        self.cases = []

    def _build_agent(self, num_envs: int) -> PPOAgent:
        config = self.config
        with initial_weights(config.seed):
            network = TokenActorCritic(LAYOUT)
        return PPOAgent(
            network=network.to(config.device),
            num_envs=num_envs,
            max_steps_per_env=config.horizon,
            config=config.ppo,
            seed=config.seed,
            processes=self.processes,
        )

    def _expected_lstm_size(self) -> int:
        """Return the hidden size of the network, which the settings do not change."""
        return self.agent.network.lstm_hidden_dim

    def _telemetry_layout(self) -> RunLayout:
        return RunLayout.of(LAYOUT.space)

    @property
    def _backend(self) -> str:
        return "as plots allow"

    def _create_reporter(self) -> None:
        """Do nothing: the telemetry of the greenhouse has no steps."""

    def _collect_rollout(self, clock: Clock) -> tuple[Tensor, dict[str, list[int]]]:
        """Run one episode in every environment and fill the agent's buffer.

        Returns:
            Returns of the episodes, [N], and for every kind of host the number of slots that ended
            in each stage.
        """
        returns = torch.zeros(self.plots.num_envs, dtype=torch.float64)

        def on_step(step: int, decision: Decision, outcome: Outcome) -> None:
            returns.add_(outcome.rewards)

        self._observations = collect(
            self.agent, self.world, self._observations, on_step=on_step, phase=clock.phase
        )
        counts: dict[str, Tensor] = {}
        for host, stages in self.plots.last:
            host_counts = one_hot(stages, len(SeedStage)).sum((0, 1))
            counts[host] = counts.get(host, 0) + host_counts
        mean_return = float(returns.mean())
        self.hub.emit(Sampled(round=self.round + 1, values={"return": mean_return}))
        return returns, {host: count.tolist() for host, count in counts.items()}


def trainer_class(run: RunFolder) -> type[Trainer]:
    """Return the class of trainer that the suite of a run needs."""
    if run.config.suite == GREENHOUSE:
        return GreenhouseTrainer
    return Trainer
