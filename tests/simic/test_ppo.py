"""The PPO agent: rounds, updates, agreement of its parts, non-finite numbers, resuming."""

import copy
import math
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from esper.leyline import (
    DEFAULT_ADAM_EPSILON,
    DEFAULT_EPISODE_LENGTH,
    DEFAULT_LEARNING_RATE,
    DEFAULT_LSTM_HIDDEN_DIM,
    HEADS,
    AgreementError,
    Head,
    HeadTable,
    HeadUpdateMetrics,
    Legality,
    LifecycleOp,
    PPOUpdateMetrics,
    UnknownNameError,
)
from esper.leyline.constants import STORED_LOG_PROB_TOLERANCE, STORED_LOG_PROB_TOLERANCE_BF16
from esper.simic.agent import (
    NonFiniteError,
    Outcome,
    PPOAgent,
    PPOConfig,
    RolloutError,
    StoredLogProbError,
    TamiyoRolloutBuffer,
    collect,
    initial_weights,
)
from esper.simic.agent.update import optimizer_tensors, step_optimizer
from esper.tamiyo import FactoredRecurrentActorCritic, SkipActorCritic, independent_heads
from tests.simic.toys import Noise, train
from tests.tamiyo.spaces import esper_space, space_of

HIDDEN_DIM = DEFAULT_LSTM_HIDDEN_DIM // 8
NUM_STEPS = DEFAULT_EPISODE_LENGTH // 2
NUM_ENVS = 6
FACTORED = "factored"
SKIP = "skip"


def make(
    num_envs: int = NUM_ENVS,
    config: PPOConfig | None = None,
    seed: int = 0,
    num_steps: int = NUM_STEPS,
    strict: bool = True,
    network_kind: str = FACTORED,
) -> tuple[PPOAgent, Noise]:
    """Return an agent and its world.

    A strict agent raises an error if an update does not reproduce the stored log-probabilities.
    """
    world = Noise(num_envs, seed)
    sizes: dict[str, Any] = {"state_dim": world.state_dim, "lstm_hidden_dim": HIDDEN_DIM}
    network = None
    if network_kind == SKIP:
        with initial_weights(seed):
            network = SkipActorCritic(world.action_space, **sizes)
    agent = PPOAgent(
        world.action_space,
        num_envs=num_envs,
        max_steps_per_env=num_steps,
        config=replace(config or PPOConfig(), strict=strict),
        network=network,
        seed=seed,
        **sizes,
    )
    return agent, world


def weights(agent: PPOAgent) -> Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in agent.network.parameters()])


def trunk_weights(agent: PPOAgent) -> Tensor:
    """Return all weights except those of the heads."""
    parameters = agent.network.named_parameters()
    return torch.cat([p.detach().flatten() for name, p in parameters if "head" not in name])


def learned_state(agent: PPOAgent) -> dict[str, Tensor]:
    """Copy everything that an update may change: weights, normalisers, moments."""
    tensors = dict(agent.network.state_dict())
    tensors |= optimizer_tensors(agent.network, agent.optimizer)
    return {name: tensor.clone() for name, tensor in tensors.items()}


def is_equal(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    if first.keys() != second.keys():
        return False
    return all(torch.equal(first[name], second[name]) for name in first)


# --- metrics ------------------------------------------------------------------------------------


def test_metrics_have_the_keys_of_their_types() -> None:
    agent, world = make()
    collect(agent, world, world.reset())
    metrics = agent.update()
    assert metrics.keys() == PPOUpdateMetrics.__annotations__.keys()
    assert tuple(metrics["heads"]) == world.action_space.names
    for head in metrics["heads"].values():
        assert head.keys() == HeadUpdateMetrics.__annotations__.keys()
        assert all(isinstance(value, float) for value in head.values())
        assert 0 < head["relevant_fraction"] <= 1
        assert head["ratio_min"] <= head["ratio_mean"] <= head["ratio_max"]
    norms = metrics["gradient_norms"]
    assert tuple(norms.heads) == world.action_space.names
    all_norms = (*norms.heads.values(), norms.value)
    assert all(norm > 0 for norm in all_norms)
    assert metrics["gradient_norm"] ** 2 > sum(norm**2 for norm in all_norms)  # and the trunk
    assert metrics["valid_steps"] == agent.buffer.num_envs * NUM_STEPS
    assert metrics["learning_rate"] == DEFAULT_LEARNING_RATE
    assert metrics["kl"] == pytest.approx(sum(head["kl"] for head in metrics["heads"].values()))


def test_head_entropy_is_averaged_over_relevant_steps() -> None:
    num_envs, num_steps = 64, 10
    config = PPOConfig(minibatches=8, epochs=2)
    agent, world = make(num_envs=num_envs, num_steps=num_steps, config=config)
    space = world.action_space
    # Only the first environment has a choice; the others wait.
    op_mask = torch.ones(num_envs, space.size("op"), dtype=torch.bool)
    op_mask[1:, 1:] = False
    legality = Legality(space, num_envs, {"op": op_mask})
    no_ends = torch.zeros(num_envs, dtype=torch.bool)
    for _ in range(num_steps):
        decision = agent.act(world.reset(), legality)
        agent.record(decision, Outcome(world.reset(), torch.zeros(num_envs), no_ends, no_ends))
    agent.bootstrap_and_compute_returns(world.reset())
    heads = agent.update()["heads"]
    assert 0 < heads["slot"]["relevant_fraction"] < 1 / num_envs
    for head in heads.values():
        if head["relevant_fraction"]:  # a new policy is nearly uniform
            assert 0.99 < head["entropy"] <= 1
            assert head["ratio_min"] <= head["ratio_mean"] <= head["ratio_max"]


# --- stored and recomputed log-probabilities ----------------------------------------------------


@pytest.mark.parametrize("network_kind", [FACTORED, SKIP])
@pytest.mark.parametrize(
    ("minibatches", "sequence_length"), [(1, None), (3, None), (12, NUM_STEPS // 4)]
)
def test_updates_reproduce_stored_log_probs_across_resets(
    minibatches: int, sequence_length: int | None, network_kind: str
) -> None:
    config = PPOConfig(minibatches=minibatches, sequence_length=sequence_length, lr=1e-2)
    agent, world = make(config=config, network_kind=network_kind)
    errors: list[float] = []

    def store_error(_: int, metrics: PPOUpdateMetrics) -> None:
        errors.append(metrics["stored_log_prob_error"])

    train(agent, world, 6 * NUM_ENVS * NUM_STEPS, store_error)
    assert len(errors) == 6
    assert max(errors) < STORED_LOG_PROB_TOLERANCE


@pytest.mark.parametrize("fault", ["hidden", "masks", "starts"])
@pytest.mark.parametrize("strict", [True, False])
def test_fault_in_stored_rollout_is_detected(fault: str, strict: bool) -> None:
    agent, world = make(config=PPOConfig(lr=1e-2, target_kl=None), strict=strict)
    train(agent, world, 3 * NUM_ENVS * NUM_STEPS)
    collect(agent, world, world.reset())
    if fault == "hidden":
        agent.buffer.hidden_h.add_(1.0)
    elif fault == "masks":
        agent.buffer.action_masks.fill_(True)
    else:
        agent.buffer.episode_starts.logical_not_()
    before = trunk_weights(agent)
    if strict:
        message = r"\|ratio - 1\| up to .*; valid: below 0.0001"
        with pytest.raises(StoredLogProbError, match=message):
            agent.update()
        assert torch.equal(trunk_weights(agent), before)  # no step was taken
        return
    metrics = agent.update()
    assert metrics["stored_log_prob_tolerance"] == STORED_LOG_PROB_TOLERANCE
    assert metrics["stored_log_prob_error"] > metrics["stored_log_prob_tolerance"]


def test_sequences_may_begin_at_any_step() -> None:
    """The buffer stores the hidden state that enters every step."""
    agent, world = make(config=PPOConfig(lr=1e-2))
    train(agent, world, 2 * NUM_ENVS * NUM_STEPS)
    collect(agent, world, world.reset())
    buffer = agent.buffer
    batch = buffer.get_batched_sequences()
    assert bool(batch.starts[:, 1:].any())
    for first in range(NUM_STEPS):
        hidden = (
            buffer.hidden_h[:, first].transpose(0, 1),
            buffer.hidden_c[:, first].transpose(0, 1),
        )
        with torch.no_grad():
            evaluation = agent.network.evaluate_actions(
                batch.states[:, first:],
                batch.actions[:, first:],
                batch.action_masks[:, first:],
                hidden,
            )
        expected = batch.log_probs[:, first]
        torch.testing.assert_close(evaluation.log_probs[:, 0], expected, atol=1e-5, rtol=0)
    starts = buffer.episode_starts
    assert bool((buffer.hidden_h[starts] == 0).all())
    assert bool((buffer.hidden_h[~starts] != 0).any())


def test_first_epoch_has_ratio_one_with_wrong_stored_log_probs() -> None:
    agent, world = make(config=PPOConfig(epochs=1), strict=False)
    collect(agent, world, world.reset())
    agent.buffer.log_probs.add_(0.5)
    metrics = agent.update()
    # An LSTM rounds differently with and without gradient.
    assert metrics["kl"] == pytest.approx(0.0, abs=1e-7)
    for head in metrics["heads"].values():
        assert head["ratio_min"] == pytest.approx(1.0, abs=1e-6)
        assert head["ratio_max"] == pytest.approx(1.0, abs=1e-6)
    assert metrics["stored_log_prob_error"] > STORED_LOG_PROB_TOLERANCE


# --- action spaces ------------------------------------------------------------------------------


def test_head_added_to_the_table_is_learned() -> None:
    tempo = Head(
        name="tempo",
        size=lambda catalogue: 3,
        matters_for=frozenset({LifecycleOp.ADVANCE}),
        given=("op",),
    )
    space = space_of(HeadTable(LifecycleOp, (*HEADS.heads, tempo)))
    world = Noise(NUM_ENVS, 0, action_space=space)
    agent = PPOAgent(
        space,
        state_dim=world.state_dim,
        num_envs=NUM_ENVS,
        max_steps_per_env=NUM_STEPS,
        lstm_hidden_dim=HIDDEN_DIM,
    )
    collect(agent, world, world.reset())
    metrics = agent.update()
    assert 0 < metrics["heads"]["tempo"]["relevant_fraction"] < 1
    assert metrics["gradient_norms"].heads["tempo"] > 0


@pytest.mark.parametrize("num_slots", [4, 5])
def test_agent_acts_records_and_updates_with_more_slots(num_slots: int) -> None:
    space = esper_space(num_slots)
    world = Noise(NUM_ENVS, 0, action_space=space)
    agent = PPOAgent(
        space,
        state_dim=world.state_dim,
        num_envs=NUM_ENVS,
        max_steps_per_env=NUM_STEPS,
        lstm_hidden_dim=HIDDEN_DIM,
        config=PPOConfig(strict=True),
    )
    assert agent.network.heads["slot"][-1].out_features == num_slots
    observations = world.reset()
    for _ in range(2):
        chosen_slots: set[int] = set()
        for _ in range(NUM_STEPS):
            legality = world.legal()
            decision = agent.act(observations, legality)
            assert decision.actions.shape == (NUM_ENVS, len(space))
            assert decision.masks.shape == (NUM_ENVS, len(space), max(space.sizes))
            assert torch.equal(decision.masks, legality.resolved(decision.actions))
            chosen_slots.update(decision.actions[:, space.index("slot")].tolist())
            outcome = world.step(decision.actions)
            agent.record(decision, outcome)
            observations = outcome.observations
        assert num_slots - 1 in chosen_slots
        agent.bootstrap_and_compute_returns(observations)
        before = weights(agent)
        metrics = agent.update()
        assert not torch.equal(weights(agent), before)
        assert metrics["valid_steps"] == NUM_ENVS * NUM_STEPS
        assert metrics["heads"]["slot"]["relevant_fraction"] > 0


def test_masks_of_another_action_space_raise() -> None:
    agent, world = make(num_envs=2)
    legality = Legality(independent_heads(world.action_space.sizes), 2, {})
    with pytest.raises(AgreementError, match="action heads"):
        agent.act(world.reset(), legality)


# --- minibatches and sequences ------------------------------------------------------------------


def test_accumulation_does_not_change_the_result() -> None:
    results = []
    for accumulation_steps in (1, 4):
        agent, world = make(num_envs=256, num_steps=4)
        collect(agent, world, world.reset())
        metrics = agent.update(accumulation_steps=accumulation_steps)
        results.append((weights(agent), metrics))
    (unsplit_weights, unsplit), (split_weights, split) = results
    torch.testing.assert_close(split_weights, unsplit_weights, atol=2e-5, rtol=1e-4)
    for name in ("policy_loss", "value_loss", "entropy", "gradient_norm"):
        assert split[name] == pytest.approx(unsplit[name], rel=1e-3, abs=1e-5)
    for name, head in unsplit["heads"].items():
        assert split["heads"][name] == pytest.approx(head, rel=1e-3, abs=1e-4)
    assert unsplit["optimizer_steps"] == split["optimizer_steps"]


def test_short_sequences_contain_the_same_steps() -> None:
    agent, world = make()
    collect(agent, world, world.reset())
    length = NUM_STEPS // 3
    unsplit = agent.buffer.get_batched_sequences()
    parts = agent.buffer.get_batched_sequences(length=length)
    fields = ("states", "actions", "action_masks", "advantages", "valid", "head_mask", "starts")
    for name in fields:
        assert torch.equal(getattr(parts, name).flatten(0, 1), getattr(unsplit, name).flatten(0, 1))
    entering = agent.buffer.hidden_h[:, ::length].flatten(0, 1)  # [sequences, L, D]
    assert torch.equal(parts.initial_hidden_h.transpose(0, 1), entering)
    evaluation = agent.network.evaluate_actions(
        parts.states, parts.actions, parts.action_masks, parts.initial_hidden, parts.starts
    )
    torch.testing.assert_close(evaluation.log_probs, parts.log_probs, atol=1e-5, rtol=0)


@pytest.mark.parametrize("sequence_length", [None, NUM_STEPS // 4])
def test_content_of_padding_does_not_reach_the_update(sequence_length: int | None) -> None:
    results = []
    for garbage in (0.0, math.nan):
        agent, world = make(config=PPOConfig(sequence_length=sequence_length))
        for tensor in (agent.buffer.states, agent.buffer.hidden_h, agent.buffer.rewards):
            tensor.fill_(garbage)
        observations = world.reset()
        for _ in range(NUM_STEPS // 2):
            decision = agent.act(observations, world.legal())
            outcome = world.step(decision.actions)
            agent.record(decision, outcome)
            observations = outcome.observations
        agent.bootstrap_and_compute_returns(observations)
        assert agent.update()["valid_steps"] == agent.buffer.num_envs * (NUM_STEPS // 2)
        results.append(weights(agent))
    assert bool(results[0].isfinite().all())
    assert torch.equal(*results)


# --- optimiser ----------------------------------------------------------------------------------


@pytest.mark.parametrize("accumulation_steps", [1, 3])
def test_kl_above_the_limit_skips_the_step_and_ends_the_update(accumulation_steps: int) -> None:
    one_epoch = PPOConfig(target_kl=None, epochs=1, lr=1e-2)
    limited = replace(one_epoch, epochs=8, target_kl=1e-9)
    agents = [make(config=config)[0] for config in (one_epoch, limited)]
    for agent in agents:
        world = Noise(NUM_ENVS, 0)
        collect(agent, world, world.reset())
    single, stopped = (agent.update(accumulation_steps=accumulation_steps) for agent in agents)
    assert stopped["stopped_by_kl"]
    assert stopped["optimizer_steps"] == single["optimizer_steps"] == 1
    assert torch.equal(weights(agents[0]), weights(agents[1]))
    assert not single["stopped_by_kl"]
    assert all(parameter.grad is None for parameter in agents[1].network.parameters())


def test_set_hyperparameters_changes_the_next_update_and_is_saved(tmp_path: Path) -> None:
    agent, world = make()
    agent.set_hyperparameters(entropy_coef=0.0, lr=1e-5)
    collect(agent, world, world.reset())
    before = trunk_weights(agent)
    metrics = agent.update()
    assert metrics["learning_rate"] == 1e-5
    largest_change = float((trunk_weights(agent) - before).abs().max())
    assert 0 < largest_change <= 1.01e-5 * metrics["optimizer_steps"]
    loaded = PPOAgent.load(agent.save(tmp_path / "agent"))
    assert (loaded.config.entropy_coef, loaded.config.lr) == (0.0, 1e-5)


def test_weight_decay_applies_to_the_value_head_only() -> None:
    agent, _ = make()
    for parameter in agent.network.parameters():
        parameter.grad = torch.zeros_like(parameter)
    before = {name: weight.clone() for name, weight in agent.network.named_parameters()}
    step_optimizer(agent.optimizer, torch.tensor(False))
    for name, weight in agent.network.named_parameters():
        decays = name.startswith("value_head") and bool(weight.any())
        assert torch.equal(weight, before[name]) != decays, name


def test_optimizer_equals_adamw_and_skips_nonfinite_steps() -> None:
    agent, _ = make()
    network = agent.network
    reference = copy.deepcopy(network)
    plain = torch.optim.AdamW(
        reference.parameters(), agent.config.lr, eps=DEFAULT_ADAM_EPSILON, weight_decay=0.0
    )
    for gradient_size in (0.1, 30.0, math.nan, 2.0):
        pairs = list(zip(network.named_parameters(), reference.parameters(), strict=True))
        for (_, parameter), expected in pairs:
            parameter.grad = gradient_size * torch.randn_like(parameter)
            expected.grad = parameter.grad.clone()
        found_inf = torch.tensor(math.isnan(gradient_size))
        step_optimizer(agent.optimizer, found_inf)
        if not found_inf:
            plain.step()
        for (name, parameter), expected in pairs:
            assert parameter.grad is None
            if not name.startswith("value_head"):  # which decays
                torch.testing.assert_close(parameter, expected, atol=1e-7, rtol=1e-5)
    steps = {float(state["step"]) for state in agent.optimizer.state.values()}
    assert steps == {3.0}


def test_update_clips_gradients_to_the_configured_norm(monkeypatch: pytest.MonkeyPatch) -> None:
    norms: list[float] = []
    agent, world = make(config=PPOConfig(max_grad_norm=1e-3))
    step = torch.optim.AdamW.step

    def measure_norm(optimizer: torch.optim.AdamW) -> None:
        gradients = [p.grad for p in agent.network.parameters() if p.grad is not None]
        norms.append(float(nn.utils.get_total_norm(gradients)))
        step(optimizer)

    collect(agent, world, world.reset())
    agent.optimizer.step = lambda: measure_norm(agent.optimizer)  # type: ignore[method-assign]
    metrics = agent.update()
    assert len(norms) == metrics["optimizer_steps"] > 0
    assert norms == pytest.approx([1e-3] * len(norms), rel=1e-2)
    assert metrics["gradient_norm"] > 1e-3  # of the gradients before clipping


# --- rounds -------------------------------------------------------------------------------------


def test_truncated_step_bootstraps_from_its_last_observation() -> None:
    agent, world = make(num_envs=2, config=PPOConfig(gae_lambda=0.0))
    first_observations = world.reset()
    last_observations = torch.full((2, world.state_dim), 2.0)
    decision = agent.act(first_observations, Legality(world.action_space, 2, {}))
    truncations = torch.tensor([True, False])
    outcome = Outcome(world.reset(), torch.zeros(2), ~truncations, truncations, last_observations)
    agent.record(decision, outcome)
    agent.bootstrap_and_compute_returns(world.reset())
    with torch.no_grad():
        hidden = agent.network(first_observations, agent.network.get_initial_hidden(2)).hidden
        values = agent.network(last_observations, hidden).values
    returns = agent.buffer.returns[:, 0]
    assert float(returns[0]) == pytest.approx(agent.config.gamma * float(values[0]), abs=1e-6)
    assert float(returns[1]) == pytest.approx(0.0, abs=1e-6)


def test_same_seed_gives_identical_runs() -> None:
    results = []
    for _ in range(2):
        agent, world = make(config=PPOConfig(minibatches=2))
        train(agent, world, 3 * NUM_ENVS * NUM_STEPS)
        results.append(weights(agent))
    assert torch.equal(*results)


def test_inactive_environments_keep_their_hidden_state() -> None:
    agent, world = make(num_envs=3)
    no_ends = torch.zeros(3, dtype=torch.bool)
    active = torch.tensor([True, False, True])
    for all_active in (True, False):
        before = agent.hidden
        decision = agent.act(world.reset(), world.legal())
        outcome = Outcome(world.reset(), torch.zeros(3), no_ends, no_ends)
        agent.record(decision, outcome if all_active else replace(outcome, active=active))
    for hidden_before, hidden_after in zip(before, agent.hidden, strict=True):
        assert torch.equal(hidden_before[:, 1], hidden_after[:, 1])
        assert not torch.equal(hidden_before[:, 0], hidden_after[:, 0])


def test_rollout_is_learned_from_only_once() -> None:
    agent, world = make()
    collect(agent, world, world.reset())
    agent.update(clear_buffer=False)
    before = learned_state(agent)
    with pytest.raises(RolloutError, match=r"learned from this rollout already.*reset"):
        agent.update(clear_buffer=False)
    assert is_equal(learned_state(agent), before)
    agent.buffer.reset()
    collect(agent, world, world.reset())
    agent.update()


# --- saving and restoring -----------------------------------------------------------------------


@pytest.mark.parametrize("network_kind", [FACTORED, SKIP])
def test_loaded_agent_continues_bit_for_bit(tmp_path: Path, network_kind: str) -> None:
    config = PPOConfig(minibatches=2, entropy_targets={"op": 0.9})
    agent, world = make(config=config, network_kind=network_kind)
    observations = world.reset()
    for _ in range(2):
        observations = collect(agent, world, observations)
        agent.update()
    agent.save(tmp_path / "agent")
    generator_state = world.generator.get_state()
    results = []
    for is_loaded in (False, True):
        world.generator.set_state(generator_state)
        if is_loaded:
            torch.manual_seed(12345)  # nothing may depend on the global generator
            agent = PPOAgent.load(
                tmp_path / "agent", action_space=world.action_space, state_dim=world.state_dim
            )
        current, metrics, actions = observations, [], []
        for _ in range(2):
            current = collect(agent, world, current)
            actions.append(agent.buffer.actions.clone())
            update_metrics = agent.update()
            metrics.append(dict(update_metrics, heads=dict(update_metrics["heads"])))
        results.append((weights(agent), metrics, torch.stack(actions), agent.hidden[0]))
    expected, continued = results
    assert torch.equal(expected[0], continued[0])
    assert expected[1] == continued[1]
    assert torch.equal(expected[2], continued[2])
    assert torch.equal(expected[3], continued[3])
    assert agent.config == replace(config, strict=True)


@pytest.mark.parametrize("network_kind", [FACTORED, SKIP])
def test_restored_snapshot_is_bit_exact(network_kind: str) -> None:
    agent, world = make(network_kind=network_kind)
    observations = collect(agent, world, world.reset())
    agent.update()
    before = learned_state(agent)
    hidden, next_starts = agent.hidden, agent.buffer.next_starts.clone()
    states = torch.randn(NUM_ENVS, world.state_dim)
    values = agent.network(states).values
    snapshot = agent.snapshot()

    sampler_states = [agent.sampler.get_state()]
    for _ in range(2):
        observations = collect(agent, world, observations)
        agent.update()
    collect(agent, world, observations)
    sampler_states.append(agent.sampler.get_state())
    assert not is_equal(learned_state(agent), before)

    for _ in range(2):  # a snapshot can be restored again
        agent.restore_snapshot(snapshot)
        assert is_equal(learned_state(agent), before)
        assert torch.equal(agent.hidden[0], hidden[0])
        assert torch.equal(agent.hidden[1], hidden[1])
        assert torch.equal(agent.buffer.next_starts, next_starts)
        assert torch.equal(agent.network(states).values, values)
        assert len(agent.buffer) == 0
        # The next rollout is another one: the generators continue.
        assert torch.equal(agent.sampler.get_state(), sampler_states[1])
        collect(agent, world, observations)
        agent.update()
        sampler_states[1] = agent.sampler.get_state()


def test_update_after_restored_snapshot_equals_the_first() -> None:
    results = []
    agent, world = make()
    observations = collect(agent, world, world.reset())
    agent.update()
    snapshot = agent.snapshot()
    generator_states = [g.get_state() for g in (world.generator, agent.sampler, agent.shuffler)]
    for _ in range(2):
        agent.restore_snapshot(snapshot)
        for generator, state in zip(
            (world.generator, agent.sampler, agent.shuffler), generator_states, strict=True
        ):
            generator.set_state(state)
        collect(agent, world, observations)
        agent.update()
        results.append(learned_state(agent))
    assert is_equal(*results)


def test_network_of_an_agent_can_be_copied_and_pickled() -> None:
    agent, world = make()
    train(agent, world, NUM_ENVS * NUM_STEPS)
    states = torch.randn(4, 3, world.state_dim)
    expected = agent.network(states).values
    for network in (copy.deepcopy(agent.network), pickle.loads(pickle.dumps(agent.network))):  # noqa: S301
        assert torch.equal(network(states).values, expected)
        network.observation_norm.observe(10 + 5 * torch.randn(50, world.state_dim))
        assert not torch.equal(network(states).values, expected)
    assert torch.equal(agent.network(states).values, expected)


# --- precision and compilation ------------------------------------------------------------------


def test_bf16_updates_agree_within_their_tolerance() -> None:
    bf16_agent, bf16_world = make(config=PPOConfig(bf16=True))
    agent, world = make()
    collect(bf16_agent, bf16_world, bf16_world.reset())
    collect(agent, world, world.reset())
    bf16_metrics, metrics = bf16_agent.update(), agent.update()
    tolerance = bf16_metrics["stored_log_prob_tolerance"]
    assert tolerance == STORED_LOG_PROB_TOLERANCE_BF16
    assert bf16_metrics["stored_log_prob_error"] < tolerance
    assert bf16_metrics["value_loss"] == pytest.approx(metrics["value_loss"], rel=0.2)
    assert bf16_agent.hidden[0].dtype == torch.float32
    assert bf16_agent.buffer.log_probs.dtype == torch.float32


def test_compiled_agent_learns_the_same_and_keeps_its_backend(tmp_path: Path) -> None:
    results = []
    for compile_network in (False, True):
        config = PPOConfig(compile_network=compile_network, compile_backend="aot_eager", epochs=2)
        agent, world = make(config=config)
        train(agent, world, 2 * NUM_ENVS * NUM_STEPS)
        results.append(weights(agent))
    torch.testing.assert_close(results[1], results[0], atol=1e-5, rtol=1e-4)
    assert agent.network._compiled_call_impl is not None
    agent.save(tmp_path / "agent")
    loaded = PPOAgent.load(tmp_path / "agent")
    assert loaded.config.compile_network
    assert loaded.config.compile_backend == "aot_eager"
    assert loaded.network._compiled_call_impl is not None
    assert torch.equal(weights(loaded), weights(agent))


def make_counting_backend() -> tuple[Any, list[int]]:
    """Return a backend of torch.compile and a list that gets an entry for every graph that runs."""
    executed_graphs: list[int] = []

    def backend(graph: torch.fx.GraphModule, _: list[Tensor]) -> Any:
        def run(*inputs: Any) -> Any:
            executed_graphs.append(len(graph.graph.nodes))
            return graph.forward(*inputs)

        return run

    return backend, executed_graphs


@pytest.mark.parametrize("network_kind", [FACTORED, SKIP])
def test_compiled_network_breaks_one_graph_per_environment_step(network_kind: str) -> None:
    """The LSTM is the only break: at most two graphs run for a step of all environments."""
    torch._dynamo.reset()
    agent, world = make(num_envs=4, network_kind=network_kind)
    backend, executed_graphs = make_counting_backend()
    agent.network.compile(backend=backend, fullgraph=False)
    observations = world.reset()
    for step in range(4):
        executed_graphs.clear()
        decision = agent.act(observations, world.legal())
        assert 1 <= len(executed_graphs) <= 2, f"step {step}"
        outcome = world.step(decision.actions)
        agent.record(decision, outcome)
        observations = outcome.observations


@pytest.mark.parametrize("network_kind", [FACTORED, SKIP])
@pytest.mark.parametrize("num_steps", [None, 5])
def test_compiled_forward_has_at_most_one_graph_break(
    network_kind: str, num_steps: int | None
) -> None:
    """For one step [N, F] and for whole sequences [N, T, F] without resets inside."""
    torch._dynamo.reset()
    agent, world = make(num_envs=4, network_kind=network_kind)
    shape = (4, world.state_dim) if num_steps is None else (4, num_steps, world.state_dim)
    hidden = agent.network.get_initial_hidden(4)
    explanation = torch._dynamo.explain(agent.network)(torch.randn(shape), hidden)
    assert explanation.op_count > 0
    assert explanation.graph_break_count <= 1, explanation.break_reasons


def test_network_compiled_by_the_user_is_saved_under_its_own_names(tmp_path: Path) -> None:
    agent, world = make()
    network = agent.network
    agent.network = torch.compile(network, backend="eager")
    collect(agent, world, world.reset())
    agent.update()
    snapshot = agent.snapshot()
    agent.restore_snapshot(snapshot)
    loaded = PPOAgent.load(agent.save(tmp_path / "agent"))
    assert loaded.network.state_dict().keys() == network.state_dict().keys()
    assert torch.equal(weights(loaded), weights(agent))


def test_compile_mode_is_passed_on_and_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compile_calls: list[dict[str, object]] = []

    def record_call(network: nn.Module, **arguments: object) -> None:
        compile_calls.append(arguments)

    monkeypatch.setattr(torch.nn.Module, "compile", record_call)
    agent, _ = make(config=PPOConfig(compile_network=True, compile_mode="reduce-overhead"))
    loaded = PPOAgent.load(agent.save(tmp_path / "agent"))
    expected = {"backend": "inductor", "mode": "reduce-overhead", "fullgraph": False}
    assert compile_calls == [expected] * 2
    assert loaded.config.compile_mode == "reduce-overhead"


def test_wrong_compile_settings_raise() -> None:
    with pytest.raises(AgreementError, match=r"mode.*'reduce-overhead'.*compile_network"):
        PPOConfig(compile_mode="reduce-overhead")
    with pytest.raises(UnknownNameError, match="compile mode"):
        PPOConfig(compile_network=True, compile_mode="fastest")
    with pytest.raises(AgreementError, match=r"no such backend; given: 'inducter'"):
        make(config=PPOConfig(compile_network=True, compile_backend="inducter"))


# --- agreement ----------------------------------------------------------------------------------


def make_network_and_buffer_sizes() -> tuple[FactoredRecurrentActorCritic, dict[str, Any]]:
    network = FactoredRecurrentActorCritic(esper_space(), state_dim=5, lstm_hidden_dim=HIDDEN_DIM)
    sizes = {
        "num_envs": 2,
        "max_steps_per_env": NUM_STEPS,
        "state_dim": 5,
        "lstm_hidden_dim": HIDDEN_DIM,
    }
    return network, sizes


@pytest.mark.parametrize(
    ("slots", "changed_sizes", "message"),
    [
        (2, {}, "action heads"),
        (3, {"state_dim": 6}, "the state's size; given: network has 5, buffer has 6"),
        (3, {"lstm_hidden_dim": 32}, f"hidden size; given: network has {HIDDEN_DIM}"),
        (3, {"lstm_layers": 2}, "layers; given: network has 1, buffer has 2"),
    ],
)
def test_buffer_for_another_network_raises(
    slots: int, changed_sizes: dict[str, int], message: str
) -> None:
    network, sizes = make_network_and_buffer_sizes()
    buffer = TamiyoRolloutBuffer(esper_space(slots), **(sizes | changed_sizes))
    with pytest.raises(AgreementError, match=message):
        PPOAgent(network=network, buffer=buffer)


def test_agent_uses_the_network_and_buffer_it_is_given() -> None:
    network, sizes = make_network_and_buffer_sizes()
    buffer = TamiyoRolloutBuffer(esper_space(), **sizes)
    agent = PPOAgent(network=network, buffer=buffer)
    assert agent.network is network
    assert agent.buffer is buffer
    compiled = torch.compile(network, backend="eager")
    assert PPOAgent(network=compiled, buffer=buffer).network is network
    with pytest.raises(AgreementError, match="action heads"):
        PPOAgent(esper_space(4), network=network, buffer=buffer)
    with pytest.raises(AgreementError, match="the state's size"):
        PPOAgent(state_dim=6, network=network, buffer=buffer)
    with pytest.raises(AgreementError, match="needs a network or the sizes of one"):
        PPOAgent(esper_space())


def test_settings_that_do_not_fit_the_buffer_raise() -> None:
    network, sizes = make_network_and_buffer_sizes()
    buffer = TamiyoRolloutBuffer(esper_space(), **sizes)

    def build(**settings: Any) -> PPOAgent:
        return PPOAgent(network=network, buffer=buffer, config=PPOConfig(**settings))

    with pytest.raises(AgreementError, match="whole sequences; given: 3 minibatches"):
        build(minibatches=3)
    build(minibatches=3, sequence_length=NUM_STEPS // 2)
    message = f"sequence_length {NUM_STEPS - 1}; .*divide {NUM_STEPS} steps"
    with pytest.raises(AgreementError, match=message):
        build(sequence_length=NUM_STEPS - 1)
    with pytest.raises(UnknownNameError, match="did you mean 'slot'"):
        build(entropy_targets={"slots": 0.5})


def test_calls_in_the_wrong_order_raise(tmp_path: Path) -> None:
    agent, world = make(num_envs=2)
    decision = agent.act(world.reset(), world.legal())
    truncations = torch.tensor([False, True])
    outcome = Outcome(world.reset(), torch.zeros(2), ~truncations, truncations)
    with pytest.raises(RolloutError, match=r"environments \[1\]"):
        agent.record(decision, outcome)
    with pytest.raises(RolloutError, match="is empty"):
        agent.update()
    agent.record(decision, world.step(decision.actions))
    with pytest.raises(RolloutError, match="not computed"):
        agent.update()
    with pytest.raises(RolloutError, match="between rounds; given: 2 steps"):
        agent.save(tmp_path / "agent")
    agent.bootstrap_and_compute_returns(world.reset())
    with pytest.raises(AgreementError, match="accumulation steps is out of range; given: 0"):
        agent.update(accumulation_steps=0)


def test_settings_out_of_range_raise() -> None:
    for name, value in {"gamma": 2.0, "epochs": 0, "target_kl": 0.0}.items():
        with pytest.raises(AgreementError, match=f"{name!r} is out of range"):
            PPOConfig(**{name: value})
    with pytest.raises(UnknownNameError, match="head average; given: 'some'"):
        PPOConfig(head_average="some")


def test_buffer_device_is_the_one_tensors_report() -> None:
    for device in ("cpu", "cpu:0", torch.device("cpu")):
        buffer = TamiyoRolloutBuffer(esper_space(), state_dim=5, num_envs=2, device=device)
        assert buffer.device == torch.ones(1).device == buffer.states.device


# --- non-finite numbers -------------------------------------------------------------------------

NONFINITE_ENV = 4
NONFINITE_STEP = 3
AFTER_LAST_STEP = "the observation after the last step"


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("field", ["states", "rewards", "final_observations", AFTER_LAST_STEP])
def test_nonfinite_rollout_is_rejected_before_anything_changes(field: str, value: float) -> None:
    num_envs = num_steps = 6
    agent, world = make(num_envs=num_envs, num_steps=num_steps)
    collect(agent, world, world.reset())
    agent.update()
    before = learned_state(agent)
    no_ends = torch.zeros(num_envs, dtype=torch.bool)
    for step in range(num_steps):
        observations, final_observations = world.reset(), world.reset()
        rewards, truncations = torch.zeros(num_envs), no_ends
        if step == NONFINITE_STEP and field == "states":
            observations[NONFINITE_ENV, 2] = value
        if step == NONFINITE_STEP and field == "rewards":
            rewards[NONFINITE_ENV] = value
        if step == NONFINITE_STEP and field == "final_observations":
            final_observations[NONFINITE_ENV, 2] = value
            truncations = torch.arange(num_envs) == NONFINITE_ENV
        decision = agent.act(observations, world.legal())
        outcome = Outcome(observations, rewards, no_ends, truncations, final_observations)
        agent.record(decision, outcome)
    last_observations = world.reset()
    if field == AFTER_LAST_STEP:
        last_observations[NONFINITE_ENV, 2] = value
    agent.bootstrap_and_compute_returns(last_observations)
    step = num_steps if field == AFTER_LAST_STEP else NONFINITE_STEP
    message = f"given: {field} of environment {NONFINITE_ENV}, step {step};"
    with pytest.raises(NonFiniteError, match=message):
        agent.update()
    assert is_equal(learned_state(agent), before)
    agent.buffer.clear_env(NONFINITE_ENV)  # the other environments can be learned from
    agent.bootstrap_and_compute_returns(world.reset())
    assert math.isfinite(agent.update()["gradient_norm"])


@pytest.mark.parametrize("accumulation_steps", [1, 2])
def test_step_with_nonfinite_loss_is_not_taken(accumulation_steps: int) -> None:
    config = PPOConfig(lr=1e30, target_kl=None, epochs=1, accumulation_steps=accumulation_steps)
    one_epoch, _ = make(config=config)
    four_epochs, _ = make(config=replace(config, epochs=4))
    for agent in (one_epoch, four_epochs):
        world = Noise(NUM_ENVS, 0)
        collect(agent, world, world.reset())
    # The only step is finite, and no output after it is.
    with pytest.raises(NonFiniteError, match=r"outputs are NaN.*log-probs, values"):
        one_epoch.update()
    with pytest.raises(NonFiniteError, match=r"optimiser step 2 of 4.*environment 0, step 0"):
        four_epochs.update()
    assert all(bool(weight.isfinite().all()) for weight in four_epochs.network.parameters())
    assert is_equal(learned_state(one_epoch), learned_state(four_epochs))
    assert float(four_epochs.network.observation_norm.count) == 0  # the rollout is not counted
    steps = {float(state["step"]) for state in four_epochs.optimizer.state.values()}
    assert steps == {1.0}


def test_nonfinite_loss_names_the_environment_of_a_short_sequence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The row of a minibatch of shuffled parts is translated to environment and step."""
    config = PPOConfig(lr=1e-3, target_kl=None, minibatches=12, sequence_length=NUM_STEPS // 4)
    agent, world = make(config=config)
    collect(agent, world, world.reset())
    marked_state = agent.buffer.states[NONFINITE_ENV, NONFINITE_STEP * 2].clone()
    decode = agent.network.decode

    def decode_with_nan(memory: Tensor, encoded: Tensor, states: Tensor) -> Any:
        logits, values = decode(memory, encoded, states)
        is_marked = (states == marked_state).all(-1)
        if has_stepped:
            values = values.masked_fill(is_marked, math.nan)
        return logits, values

    has_stepped: list[bool] = []
    step = agent.optimizer.step

    def note_step() -> None:
        has_stepped.append(True)
        step()

    monkeypatch.setattr(agent.network, "decode", decode_with_nan)
    monkeypatch.setattr(agent.optimizer, "step", note_step)
    location = f"values of environment {NONFINITE_ENV}, step {NONFINITE_STEP * 2}"
    with pytest.raises(NonFiniteError, match=location):
        agent.update()
