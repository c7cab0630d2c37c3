"""The agent: rounds, updates, agreement, and going on from a checkpoint."""

import copy
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from esper.leyline import (
    DEFAULT_ADAM_EPS,
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
)
from esper.tamiyo import FactoredRecurrentActorCritic, independent_heads
from tests.simic.toys import Noise, train
from tests.tamiyo.spaces import esper_space, space_of

HIDDEN = DEFAULT_LSTM_HIDDEN_DIM // 8
TIME = DEFAULT_EPISODE_LENGTH // 2


def make(
    envs: int = 6,
    config: PPOConfig | None = None,
    seed: int = 0,
    steps: int = TIME,
    strict: bool = True,
    direct: bool = False,
) -> tuple[PPOAgent, Noise]:
    """An agent that refuses log-probs that its update does not find again, and its world."""
    world = Noise(envs, seed)
    config = replace(config or PPOConfig(), strict=strict)
    sizes = (world.space, world.state_dim, envs, steps, config)
    agent = PPOAgent.build(*sizes, lstm_hidden_dim=HIDDEN, seed=seed, direct=direct)
    return agent, world


def weights(agent: PPOAgent) -> Tensor:
    return torch.cat([p.detach().flatten() for p in agent.network.parameters()])


def trunk(agent: PPOAgent) -> Tensor:
    """All weights but the heads'."""
    parameters = agent.network.named_parameters()
    return torch.cat([p.detach().flatten() for name, p in parameters if "head" not in name])


def test_the_keys_of_a_real_update_are_those_of_the_types() -> None:
    agent, world = make()
    collect(agent, world, world.reset())
    metrics = agent.update()
    assert metrics.keys() == PPOUpdateMetrics.__annotations__.keys()
    assert tuple(metrics["heads"]) == world.space.names
    for head in metrics["heads"].values():
        assert head.keys() == HeadUpdateMetrics.__annotations__.keys()
        assert all(isinstance(value, float) for value in head.values())
        assert 0 < head["relevant_fraction"] <= 1
        assert head["ratio_min"] <= head["ratio_mean"] <= head["ratio_max"]
    norms = metrics["gradient_norms"]
    assert tuple(norms.heads) == world.space.names
    assert all(norm > 0 for norm in (*norms.heads.values(), norms.value))
    squares = sum(norm**2 for norm in (*norms.heads.values(), norms.value))
    assert metrics["gradient_norm"] ** 2 > squares  # the trunk has its share
    assert metrics["valid_steps"] == agent.buffer.envs * TIME
    assert metrics["learning_rate"] == DEFAULT_LEARNING_RATE
    assert metrics["kl"] == pytest.approx(sum(h["kl"] for h in metrics["heads"].values()))


@pytest.mark.parametrize("direct", [False, True])
@pytest.mark.parametrize(("minibatches", "sequence"), [(1, None), (3, None), (12, TIME // 4)])
def test_stored_and_recomputed_log_probs_agree_over_rounds_and_resets(
    minibatches: int, sequence: int | None, direct: bool
) -> None:
    config = PPOConfig(minibatches=minibatches, sequence=sequence, learning_rate=1e-2)
    agent, world = make(config=config, direct=direct)
    errors: list[float] = []
    train(agent, world, 6 * 6 * TIME, lambda _, m: errors.append(m["stored_log_prob_error"]))
    assert len(errors) == 6
    assert max(errors) < STORED_LOG_PROB_TOLERANCE


@pytest.mark.parametrize("fault", ["hidden", "masks", "starts"])
@pytest.mark.parametrize("strict", [True, False])
def test_a_fault_in_what_was_stored_is_an_error_or_shows_in_the_metrics(
    fault: str, strict: bool
) -> None:
    config = PPOConfig(learning_rate=1e-2, target_kl=None)
    agent, world = make(config=config, strict=strict)
    train(agent, world, 3 * 6 * TIME)
    collect(agent, world, world.reset())
    if fault == "hidden":
        agent.buffer["h"].add_(1.0)
    elif fault == "masks":
        agent.buffer["masks"].fill_(True)
    else:
        agent.buffer["starts"].logical_not_()
    before = trunk(agent)
    if strict:
        with pytest.raises(
            StoredLogProbError, match=r"\|ratio - 1\| up to .*; valid: below 0.0001"
        ):
            agent.update()
        assert torch.equal(trunk(agent), before)  # no step was taken
        return
    metrics = agent.update()
    assert metrics["stored_log_prob_tolerance"] == STORED_LOG_PROB_TOLERANCE
    assert metrics["stored_log_prob_error"] > metrics["stored_log_prob_tolerance"]


def test_the_memory_entering_every_step_is_kept_so_that_a_sequence_may_begin_anywhere() -> None:
    agent, world = make(config=PPOConfig(learning_rate=1e-2))
    train(agent, world, 2 * 6 * TIME)
    collect(agent, world, world.reset())
    batch, buffer = agent.buffer.get_batched_sequences("cpu"), agent.buffer
    assert bool(batch.starts[:, 1:].any())
    for first in range(TIME):
        with torch.no_grad():
            found = agent.network.evaluate_actions(
                batch.states[:, first:],
                batch.actions[:, first:],
                batch.masks[:, first:],
                (buffer["h"][:, first].transpose(0, 1), buffer["c"][:, first].transpose(0, 1)),
            )
        # Up to the next reset what follows is the same; the first step always is.
        expected = batch.log_probs[:, first]
        torch.testing.assert_close(found.log_probs[:, 0], expected, atol=1e-5, rtol=0)
    starting = buffer["starts"]
    assert bool((buffer["h"][starting] == 0).all())
    assert bool((buffer["h"][~starting] != 0).any())


def test_the_first_epoch_has_ratio_one_even_if_the_stored_log_probs_were_off() -> None:
    agent, world = make(config=PPOConfig(epochs=1), strict=False)
    collect(agent, world, world.reset())
    agent.buffer["log_probs"].add_(0.5)
    metrics = agent.update()
    assert metrics["kl"] == 0
    assert all(head["ratio_max"] == 1 for head in metrics["heads"].values())
    assert metrics["stored_log_prob_error"] > STORED_LOG_PROB_TOLERANCE


def test_a_head_added_to_the_table_is_learned_without_other_changes() -> None:
    tempo = Head(
        name="tempo",
        size=lambda catalogue: 3,
        matters_for=frozenset({LifecycleOp.ADVANCE}),
        given=("op",),
    )
    longer = HeadTable(LifecycleOp, (*HEADS.heads, tempo))
    world = Noise(6, 0)
    world.space = space_of(longer)
    agent = PPOAgent.build(world.space, world.state_dim, 6, TIME, lstm_hidden_dim=HIDDEN)
    collect(agent, world, world.reset())
    metrics = agent.update()
    assert 0 < metrics["heads"]["tempo"]["relevant_fraction"] < 1
    assert metrics["gradient_norms"].heads["tempo"] > 0


def test_accumulation_does_not_change_the_result() -> None:
    results = []
    for parts in (1, 4):
        agent, world = make(envs=256, steps=4)
        collect(agent, world, world.reset())
        metrics = agent.update(accumulation_steps=parts)
        results.append((weights(agent), metrics))
    (whole, one), (split, four) = results
    torch.testing.assert_close(split, whole, atol=2e-5, rtol=1e-4)
    for name in ("policy_loss", "value_loss", "entropy", "gradient_norm"):
        assert four[name] == pytest.approx(one[name], rel=1e-3, abs=1e-5)
    assert one["optimizer_steps"] == four["optimizer_steps"]


def test_cut_sequences_hold_the_same_steps_and_the_memory_they_were_entered_with() -> None:
    agent, world = make()
    collect(agent, world, world.reset())
    whole = agent.buffer.get_batched_sequences("cpu")
    cut = agent.buffer.get_batched_sequences("cpu", length=TIME // 3)
    for field in ("states", "actions", "masks", "advantages", "valid", "matters", "starts"):
        assert torch.equal(getattr(cut, field).flatten(0, 1), getattr(whole, field).flatten(0, 1))
    entered = agent.buffer["h"][:, :: TIME // 3].flatten(0, 1)  # [sequences, L, D]
    assert torch.equal(cut.hidden[0].transpose(0, 1), entered)
    found = agent.network.evaluate_actions(
        cut.states, cut.actions, cut.masks, cut.hidden, cut.starts
    )
    torch.testing.assert_close(found.log_probs, cut.log_probs, atol=1e-5, rtol=0)


def test_a_divergence_above_the_limit_skips_the_step_and_ends_the_update() -> None:
    calm = PPOConfig(target_kl=None, epochs=1, learning_rate=1e-2)
    agents = [make(config=calm)[0], make(config=replace(calm, epochs=8, target_kl=1e-9))[0]]
    for agent in agents:
        world = Noise(6, 0)
        collect(agent, world, world.reset())
    one, stopped = (agent.update() for agent in agents)
    assert stopped["stopped_by_kl"]
    assert stopped["optimizer_steps"] == one["optimizer_steps"] == 1
    assert torch.equal(weights(agents[0]), weights(agents[1]))
    assert not one["stopped_by_kl"]


def test_what_is_annealed_holds_for_the_next_update_and_is_saved(tmp_path: Path) -> None:
    agent, world = make()
    agent.anneal(entropy_coef=0.0, learning_rate=1e-5)
    collect(agent, world, world.reset())
    before = trunk(agent)
    metrics = agent.update()
    assert metrics["learning_rate"] == 1e-5
    moved = float((trunk(agent) - before).abs().max())
    assert 0 < moved <= 1.01e-5 * metrics["optimizer_steps"]
    again = PPOAgent.load(agent.save(tmp_path / "agent"))
    assert (again.config.entropy_coef, again.config.learning_rate) == (0.0, 1e-5)


def test_weight_decay_is_on_the_value_head_only() -> None:
    agent, _ = make()
    for parameter in agent.network.parameters():
        parameter.grad = torch.zeros_like(parameter)
    before = {name: weight.clone() for name, weight in agent.network.named_parameters()}
    agent.optimizer.step_unless(torch.tensor(False), 1e-3)
    for name, weight in agent.network.named_parameters():
        decays = name.startswith("value_head") and bool(weight.any())
        assert torch.equal(weight, before[name]) != decays, name


def test_an_optimiser_step_is_that_of_torch_with_clipped_gradients_unless_it_is_broken() -> None:
    agent, _ = make()
    network, theirs = agent.network, copy.deepcopy(agent.network)
    plain = torch.optim.AdamW(theirs.parameters(), agent.config.learning_rate, weight_decay=0.0)
    plain.param_groups[0]["eps"] = DEFAULT_ADAM_EPS
    for size in (0.1, 30.0, math.nan, 2.0):
        for one, other in zip(network.parameters(), theirs.parameters(), strict=True):
            one.grad = size * torch.randn_like(one)
            other.grad = one.grad.clone()
        broken = torch.tensor(math.isnan(size))
        norm = nn.utils.clip_grad_norm_(theirs.parameters(), agent.config.max_grad_norm)
        shrink = (norm / agent.config.max_grad_norm).clamp(min=1)
        agent.optimizer.step_unless(broken, agent.config.learning_rate, shrink)
        if not broken:
            plain.step()
        for (name, one), other in zip(network.named_parameters(), theirs.parameters(), strict=True):
            assert one.grad is None
            if not name.startswith("value_head"):  # which decays
                torch.testing.assert_close(one, other, atol=1e-7, rtol=1e-5)


@pytest.mark.parametrize("sequence", [None, TIME // 4])
def test_what_stands_in_padding_never_reaches_the_update(sequence: int | None) -> None:
    results = []
    for garbage in (0.0, float("nan")):
        agent, world = make(config=PPOConfig(sequence=sequence))
        agent.buffer["states"].fill_(garbage)
        agent.buffer["h"].fill_(garbage)
        agent.buffer["rewards"].fill_(garbage)
        observations = world.reset()
        for _ in range(TIME // 2):
            decision = agent.act(observations, world.legal())
            outcome = world.step(decision.actions)
            agent.record(decision, outcome)
            observations = outcome.observations
        agent.finish(observations)
        assert agent.update()["valid_steps"] == agent.buffer.envs * (TIME // 2)
        results.append(weights(agent))
    assert bool(results[0].isfinite().all())
    assert torch.equal(*results)


def test_a_truncated_step_is_worth_the_value_of_its_true_last_observation() -> None:
    agent, world = make(envs=2, config=PPOConfig(gae_lambda=0.0))
    first, last = world.reset(), torch.full((2, world.state_dim), 2.0)
    decision = agent.act(first, Legality(world.space, 2, {}))
    cut = torch.tensor([True, False])
    agent.record(decision, Outcome(world.reset(), torch.zeros(2), ~cut, cut, last))
    agent.finish(world.reset())
    with torch.no_grad():
        after = agent.network(first, agent.network.get_initial_hidden(2)).hidden
        worth = agent.network(last, after).values
    returns = agent.buffer.returns[:, 0]
    assert float(returns[0]) == pytest.approx(agent.config.gamma * float(worth[0]), abs=1e-6)
    assert float(returns[1]) == pytest.approx(0.0, abs=1e-6)


def test_the_same_seed_gives_the_same_run_to_the_bit() -> None:
    runs = []
    for _ in range(2):
        agent, world = make(config=PPOConfig(minibatches=2))
        train(agent, world, 3 * 6 * TIME)
        runs.append(weights(agent))
    assert torch.equal(*runs)


@pytest.mark.parametrize("direct", [False, True])
def test_saving_and_loading_in_the_middle_continues_bit_for_bit(
    tmp_path: Path, direct: bool
) -> None:
    agent, world = make(config=PPOConfig(minibatches=2, entropy_targets={"op": 0.9}), direct=direct)
    observations = world.reset()
    for _ in range(2):
        observations = collect(agent, world, observations)
        agent.update()
    agent.save(tmp_path / "agent")
    randomness = world.draw.get_state()
    outcomes = []
    for restored in (False, True):
        world.draw.set_state(randomness)
        if restored:
            torch.manual_seed(12345)  # nothing may depend on the global stream
            agent = PPOAgent.load(tmp_path / "agent", space=world.space, state_dim=world.state_dim)
        seen, metrics, actions = observations, [], []
        for _ in range(2):
            seen = collect(agent, world, seen)
            actions.append(agent.buffer["actions"].clone())
            metrics.append(agent.update())
        outcomes.append((weights(agent), metrics, torch.stack(actions), agent.hidden[0]))
    before, after = outcomes
    assert torch.equal(before[0], after[0])
    assert [dict(m, heads=dict(m["heads"])) for m in before[1]] == [
        dict(m, heads=dict(m["heads"])) for m in after[1]
    ]
    assert torch.equal(before[2], after[2])
    assert torch.equal(before[3], after[3])
    assert agent.config == PPOConfig(minibatches=2, entropy_targets={"op": 0.9}, strict=True)


def test_bf16_learns_the_same_within_its_tolerance() -> None:
    agent, world = make(config=PPOConfig(bf16=True))
    plain, other = make()
    for one, place in ((agent, world), (plain, other)):
        collect(one, place, place.reset())
    metrics, exact = agent.update(), plain.update()
    tolerance = metrics["stored_log_prob_tolerance"]
    assert tolerance == STORED_LOG_PROB_TOLERANCE_BF16
    assert metrics["stored_log_prob_error"] < tolerance
    assert metrics["value_loss"] == pytest.approx(exact["value_loss"], rel=0.2)
    assert agent.hidden[0].dtype == torch.float32


def test_a_compiled_agent_learns_the_same_and_keeps_its_backend(tmp_path: Path) -> None:
    results, backend = [], "aot_eager"
    for used in (None, backend):
        agent, world = make(config=PPOConfig(compile_backend=used, epochs=2))
        train(agent, world, 2 * 6 * TIME)
        results.append(weights(agent))
    torch.testing.assert_close(results[1], results[0], atol=1e-5, rtol=1e-4)
    assert agent.network._compiled_call_impl is not None  # it was compiled indeed
    agent.save(tmp_path / "agent")
    again = PPOAgent.load(tmp_path / "agent")
    assert again.config.compile_backend == backend
    assert again.network._compiled_call_impl is not None
    assert torch.equal(weights(again), weights(agent))


def test_a_network_that_the_user_compiled_is_saved_under_its_own_names(tmp_path: Path) -> None:
    agent, _ = make()
    plain = agent.network
    agent.network = torch.compile(plain, backend="eager")
    again = PPOAgent.load(agent.save(tmp_path / "agent"))
    assert again.network.state_dict().keys() == plain.state_dict().keys()
    assert torch.equal(weights(again), weights(agent))


def test_parts_that_do_not_agree_are_refused_with_both_values() -> None:
    space = esper_space()
    network = FactoredRecurrentActorCritic(space, 5, HIDDEN)
    wrong = {
        "action heads": TamiyoRolloutBuffer(esper_space(2), 5, 2, TIME, HIDDEN),
        "the state's size; given: network has 5, buffer has 6": TamiyoRolloutBuffer(
            space, 6, 2, TIME, HIDDEN
        ),
        f"hidden size; given: network has {HIDDEN}": TamiyoRolloutBuffer(space, 5, 2, TIME),
        "layers; given: network has 1, buffer has 2": TamiyoRolloutBuffer(
            space, 5, 2, TIME, HIDDEN, 2
        ),
    }
    for message, buffer in wrong.items():
        with pytest.raises(AgreementError, match=message):
            PPOAgent(network, buffer)
    fitting = TamiyoRolloutBuffer(space, 5, 2, TIME, HIDDEN)
    with pytest.raises(AgreementError, match="whole sequences; given: 3 minibatches"):
        PPOAgent(network, fitting, PPOConfig(minibatches=3))
    PPOAgent(network, fitting, PPOConfig(minibatches=3, sequence=TIME // 2))
    with pytest.raises(AgreementError, match=f"sequence {TIME - 1}; .*divide {TIME} steps"):
        PPOAgent(network, fitting, PPOConfig(sequence=TIME - 1))
    with pytest.raises(UnknownNameError, match="did you mean 'slot'"):
        PPOAgent(network, fitting, PPOConfig(entropy_targets={"slots": 0.5}))
    compiled = torch.compile(network, backend="eager")
    assert PPOAgent(compiled, fitting).network is network


def test_misuse_is_refused_with_a_sentence(tmp_path: Path) -> None:
    agent, world = make(envs=2)
    decision = agent.act(world.reset(), world.legal())
    cut = torch.tensor([False, True])
    with pytest.raises(RolloutError, match=r"environments \[1\]"):
        agent.record(decision, Outcome(world.reset(), torch.zeros(2), ~cut, cut))
    with pytest.raises(RolloutError, match="is empty"):
        agent.update()
    agent.record(decision, world.step(decision.actions))
    with pytest.raises(RolloutError, match="not computed"):
        agent.update()
    with pytest.raises(RolloutError, match="between rounds; given: 2 steps"):
        agent.save(tmp_path / "agent")
    agent.finish(world.reset())
    with pytest.raises(AgreementError, match="accumulation steps is out of range; given: 0"):
        agent.update(accumulation_steps=0)
    for wrong in ({"gamma": 2.0}, {"epochs": 0}, {"target_kl": 0.0}):
        with pytest.raises(AgreementError, match=f"{next(iter(wrong))!r} is out of range"):
            PPOConfig(**wrong)
    with pytest.raises(UnknownNameError, match="head average; given: 'some'"):
        PPOConfig(head_average="some")


def state_of(agent: PPOAgent) -> dict[str, Tensor]:
    """All that an update may change: weights, normalisers, the optimiser's moments."""
    state = {name: tensor.clone() for name, tensor in agent.network.state_dict().items()}
    return state | {name: each.clone() for name, each in agent.optimizer.moments.items()}


def same(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[n], right[n]) for n in left)


ENV, STEP = 4, 3  # where something is not finite
FIELDS = ("states", "rewards", "final_observations", "the observation after the last step")


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("field", FIELDS)
def test_what_is_not_finite_is_refused_by_name_before_an_update_changes_anything(
    field: str, value: float
) -> None:
    agent, world = make(envs=6, steps=6)
    observations = world.reset()
    collect(agent, world, observations)
    agent.update()
    before = state_of(agent)
    never, cut = torch.zeros(6, dtype=torch.bool), torch.arange(6) == ENV
    for step in range(6):
        seen, rewards, final = world.reset(), torch.zeros(6), world.reset()
        here = step == STEP
        if field == "states" and here:
            seen[ENV, 2] = value
        if field == "rewards" and here:
            rewards[ENV] = value
        if field == "final_observations" and here:
            final[ENV, 2] = value
        decision = agent.act(seen, world.legal())
        truncations = cut if field == "final_observations" and here else never
        agent.record(decision, Outcome(seen, rewards, never, truncations, final))
    last = world.reset()
    if field == FIELDS[-1]:
        last[ENV, 2] = value
    agent.finish(last)
    when = 6 if field == FIELDS[-1] else STEP
    with pytest.raises(NonFiniteError, match=f"given: {field} of environment {ENV}, step {when};"):
        agent.update()
    assert same(state_of(agent), before)
    agent.buffer.clear_env(ENV)  # the others are sound
    agent.finish(world.reset())
    assert math.isfinite(agent.update()["gradient_norm"])


def test_a_step_whose_loss_is_not_finite_is_not_taken() -> None:
    wild = PPOConfig(learning_rate=1e30, target_kl=None, epochs=1)
    one, _ = make(config=wild)
    more, _ = make(config=replace(wild, epochs=4))
    for agent in (one, more):
        world = Noise(6, 0)
        collect(agent, world, world.reset())
    with pytest.raises(NonFiniteError, match=r"leads to it.*log-probs, values"):
        one.update()  # its one step is finite, and nothing after it would be
    with pytest.raises(NonFiniteError, match=r"optimiser step 2 of 4.*environment 0, step 0"):
        more.update()
    expected, found = state_of(one), state_of(more)
    for name in expected:
        if "observation_norm" in name:
            expected[name] = make()[0].network.state_dict()[name]  # not touched
    assert same(found, expected)


def test_a_rollout_is_learned_from_once() -> None:
    agent, world = make()
    collect(agent, world, world.reset())
    agent.update(clear_buffer=False)
    before = state_of(agent)
    with pytest.raises(RolloutError, match=r"learned from already.*reset"):
        agent.update(clear_buffer=False)
    assert same(state_of(agent), before)
    agent.buffer.reset()
    collect(agent, world, world.reset())
    agent.update()


def test_the_entropy_of_a_head_is_its_mean_over_the_steps_where_it_mattered() -> None:
    envs, steps = 64, 10
    agent, world = make(envs=envs, steps=steps, config=PPOConfig(minibatches=8, epochs=2))
    space, rare = world.space, torch.arange(envs) < 1
    legality = Legality(space, envs, {"op": torch.ones(envs, space.size("op"), dtype=torch.bool)})
    legality.masks["op"][:, 1:] = rare[:, None]  # all others wait
    never = torch.zeros(envs, dtype=torch.bool)
    for _ in range(steps):
        decision = agent.act(world.reset(), legality)
        agent.record(decision, Outcome(world.reset(), torch.zeros(envs), never, never))
    agent.finish(world.reset())
    heads = agent.update()["heads"]
    assert 0 < heads["slot"]["relevant_fraction"] < 1 / envs
    for head in heads.values():  # a new policy is nearly uniform
        if head["relevant_fraction"]:
            assert 0.99 < head["entropy"] <= 1
            assert head["ratio_min"] <= head["ratio_mean"] <= head["ratio_max"]


def test_rows_that_idle_keep_their_memory() -> None:
    agent, world = make(envs=3)
    never, active = torch.zeros(3, dtype=torch.bool), torch.tensor([True, False, True])
    for idle in (False, True):
        before = agent.hidden
        decision = agent.act(world.reset(), world.legal())
        outcome = Outcome(world.reset(), torch.zeros(3), never, never)
        agent.record(decision, replace(outcome, active=active) if idle else outcome)
    for was, now in zip(before, agent.hidden, strict=True):
        assert torch.equal(was[:, 1], now[:, 1])
        assert not torch.equal(was[:, 0], now[:, 0])


def test_masks_of_another_action_space_are_refused() -> None:
    agent, world = make(envs=2)
    other = Legality(independent_heads(world.space.sizes), 2, {})
    with pytest.raises(AgreementError, match="action heads"):
        agent.act(world.reset(), other)


def test_a_device_is_the_one_that_tensors_name_however_it_was_given() -> None:
    for given in ("cpu", "cpu:0", torch.device("cpu")):
        buffer = TamiyoRolloutBuffer(esper_space(), 5, 2, device=given)
        assert buffer.device == torch.ones(1).device == buffer["states"].device


def test_a_compile_mode_is_used_saved_and_needs_a_backend(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    used: list[dict[str, object]] = []
    monkeypatch.setattr(torch.nn.Module, "compile", lambda self, **how: used.append(how))
    config = PPOConfig(compile_backend="inductor", compile_mode="reduce-overhead")
    agent, _ = make(config=config)
    again = PPOAgent.load(agent.save(tmp_path / "agent"))
    assert used == [{"backend": "inductor", "mode": "reduce-overhead"}] * 2
    assert again.config.compile_mode == "reduce-overhead"
    with pytest.raises(AgreementError, match=r"mode.*'reduce-overhead'.*backend"):
        PPOConfig(compile_mode="reduce-overhead")
    with pytest.raises(UnknownNameError, match="compile mode"):
        PPOConfig(compile_backend="inductor", compile_mode="fastest")
