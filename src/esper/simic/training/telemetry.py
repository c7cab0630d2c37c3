"""Telemetry of training: events of every step, and the hub of the processes other than rank 0.

Shapes: `N` environments, `H` heads, `A` actions of the largest head.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from esper.garden.environment import Garden, Transition
from esper.garden.rewards import net_of_rent
from esper.leyline import NOTHING, Cause, SeedStage
from esper.leyline.constants import SCORED_EPOCHS
from esper.nissa import (
    Decisions,
    EpisodeEnded,
    Event,
    Hub,
    LifecycleChanged,
    Refused,
    RolledBack,
    Stepped,
)
from esper.simic.agent.types import Decision
from esper.tamiyo.distributions import MaskedCategorical, stack_logits
from esper.tamiyo.recurrent import RecurrentActorCritic


class BufferingHub(Hub):
    """The hub of a process other than rank 0: it stores events until rank 0 collects them."""

    def __init__(self) -> None:
        super().__init__()
        self._events: list[Event] = []

    def emit(self, event: Event) -> None:
        """Store an event."""
        self._events.append(event)

    def take_events(self) -> list[Event]:
        """Return the stored events and remove them."""
        events, self._events = self._events, []
        return events


@dataclass
class Reporter:
    """Sends events about the environments of one process to a hub."""

    hub: Hub
    network: RecurrentActorCritic
    garden: Garden
    first_env: int  # number of this process's first environment in the run
    logged_envs: int  # the first environments of the run whose observations are logged

    @property
    def num_logged(self) -> int:
        """How many environments of this process have their observations logged."""
        return max(0, self.logged_envs - self.first_env)

    def step(
        self, round_: int, step: int, decision: Decision, transition: Transition, returns: Tensor
    ) -> Callable[[], None]:
        """Prepare the events of a step.

        Tensors on a device are copied at once, so that sending the events does not wait for it.

        Args:
            round_: Number of the round.
            step: Number of the step.
            decision: The decision.
            transition: The outcome of the decision.
            returns: Returns of the running episodes so far, [N].

        Returns:
            A function that sends the events.
        """
        num_logged = self.num_logged
        observations = masks = probabilities = None
        if num_logged:
            observations = decision.states[:num_logged].cpu()
            masks = decision.masks[:num_logged].cpu()
            probabilities = self._action_probabilities(decision)
        decisions = Decisions(
            round=round_,
            step=step,
            actions=transition.actions.values,
            values=decision.values.cpu(),
            log_probs=decision.log_probs.cpu(),
            observations=observations,
            masks=masks,
            probabilities=probabilities,
            active=transition.active,
            first_env=self.first_env,
        )
        return partial(self._emit_step, decisions, transition, returns)

    def _emit_step(self, decisions: Decisions, transition: Transition, returns: Tensor) -> None:
        round_, step = decisions.round, decisions.step
        self.hub.emit(decisions)
        self._emit_refusals(round_, step, transition)
        lifecycle = transition.after.lifecycle
        slot_names = self.garden.catalogue.slots.names
        alphas = {f"alpha_{name}": lifecycle.alpha[:, i] for i, name in enumerate(slot_names)}
        stepped = Stepped(
            round=round_,
            step=step,
            rewards=transition.terms.total,
            terms=dict(transition.terms),
            measures={
                "accuracy": transition.epoch.accuracy,
                "committed": transition.epoch.committed,
                "added": transition.epoch.added,
                **alphas,
            },
            active=transition.active,
            first_env=self.first_env,
        )
        self.hub.emit(stepped)
        self._emit_lifecycle_changes(round_, step, transition)
        self._emit_rollbacks(round_, step, transition)
        self._emit_episode_ends(round_, step, transition, returns)

    @torch.no_grad()
    def _action_probabilities(self, decision: Decision) -> Tensor:
        """Return the probability of every action in the logged environments, [N, H, A]."""
        rows = slice(self.num_logged)
        hidden = (decision.hidden[0][:, rows], decision.hidden[1][:, rows])
        output = self.network(decision.states[rows], hidden)
        space = self.network.action_space
        logits = stack_logits(output.logits, space, decision.actions[rows])
        return MaskedCategorical(logits, decision.masks[rows], validate=False).probs.cpu()

    def _emit_refusals(self, round_: int, step: int, transition: Transition) -> None:
        """Report the ops that gates refused in the logged environments.

        Environments whose episode ended are left out, because they already run the next episode.
        """
        is_running = transition.epoch.active & ~transition.terminals
        (rows,) = is_running[: self.num_logged].nonzero(as_tuple=True)
        population = self.garden.episodes.population
        refusals = population.refusals(transition.before.lifecycle, rows)
        if not refusals:
            return
        row_index, slot, op, reason = zip(*refusals, strict=True)
        env = rows[list(row_index)] + self.first_env
        self.hub.emit(Refused(round=round_, step=step, env=env, slot=slot, op=op, reason=reason))

    def _emit_lifecycle_changes(self, round_: int, step: int, transition: Transition) -> None:
        """Report stage transitions of seeds and their reasons."""
        changes = transition.epoch.transitions
        if not len(changes):
            return
        # A seed that was removed is named by its blueprint before the step.
        blueprint = transition.after.lifecycle.blueprint
        earlier_blueprint = transition.before.lifecycle.blueprint
        blueprint = torch.where(blueprint != NOTHING, blueprint, earlier_blueprint)

        # The governor's reason is stored with its rollback.
        reasons = changes.reasons()
        rollback_reasons = {trip.environment: str(trip) for trip in transition.epoch.trips}
        for index in (changes.cause == Cause.GOVERNOR).nonzero()[:, 0].tolist():
            reasons[index] = rollback_reasons[int(changes.host[index])]
        event = LifecycleChanged(
            round=round_,
            step=step,
            env=changes.host + self.first_env,
            slot=changes.slot,
            before=changes.before,
            after=changes.after,
            cause=changes.cause,
            blueprint=blueprint[changes.host, changes.slot],
            reason=reasons,
        )
        self.hub.emit(event)

    def _emit_rollbacks(self, round_: int, step: int, transition: Transition) -> None:
        """Report the environments that the governor rolled back."""
        trips = transition.epoch.trips
        if trips:
            env = [self.first_env + trip.environment for trip in trips]
            reason = [str(trip) for trip in trips]
            self.hub.emit(RolledBack(round=round_, step=step, env=env, reason=reason))

    def _emit_episode_ends(
        self, round_: int, step: int, transition: Transition, returns: Tensor
    ) -> None:
        """Report the episodes that ended in this step."""
        rows = transition.terminals.nonzero()[:, 0]
        if not len(rows):
            return
        after = transition.after
        cases = [transition.cases[row] for row in rows.tolist()]
        control = self.garden.controls.validation(cases)[:, -SCORED_EPOCHS:].mean(1)
        gain = after.objective[rows]
        exposure = after.exposure[rows]
        fossilized_params = after.lifecycle.params * after.lifecycle.at(SeedStage.FOSSILIZED)
        # After a rollback the score is not measured again before the end of the round.
        validation = (control + gain).masked_fill(after.rolled_back[rows], torch.nan)
        event = EpisodeEnded(
            round=round_,
            step=step,
            env=rows + self.first_env,
            context=[case.context.name for case in cases],
            seed=[case.seed for case in cases],
            validation=validation,
            control=control,
            net_gain=net_of_rent(gain, exposure, self.garden.reward.rent),
            returns=returns[rows],
            added=fossilized_params.sum(1)[rows],
            exposure=exposure,
            interventions=after.interventions[rows],
            rolled_back=after.rolled_back[rows],
        )
        self.hub.emit(event)
