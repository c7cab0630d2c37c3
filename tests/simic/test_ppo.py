"""The agent: rounds, updates, agreement, and going on from a checkpoint."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

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
from esper.leyline.constants import STORED_LOG_PROB_TOLERANCE
from esper.simic.agent import (
    Outcome,
    PPOAgent,
    PPOConfig,
    RolloutError,
    TamiyoRolloutBuffer,
    collect,
    train,
)
from esper.tamiyo import FactoredRecurrentActorCritic
from tests.simic.toys import Noise
from tests.tamiyo.spaces import esper_space, space_of

HIDDEN = DEFAULT_LSTM_HIDDEN_DIM // 8
TIME = DEFAULT_EPISODE_LENGTH // 2
BF16_TOLERANCE = 0.1  # measured: up to 0.03 on these sizes


def make(
    envs: int = 6, config: PPOConfig | None = None, seed: int = 0, steps: int = TIME
) -> tuple[PPOAgent, Noise]:
    world = Noise(envs, seed)
    agent = PPOAgent.build(
        world.space, world.state_dim, envs, steps, config, lstm_hidden_dim=HIDDEN, seed=seed
    )
    return agent, world


def weights(agent: PPOAgent) -> Tensor:
    return torch.cat([p.detach().flatten() for p in agent.network.parameters()])


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
        assert head["gradient_norm"] > 0
        assert head["ratio_min"] <= head["ratio_mean"] <= head["ratio_max"]
    assert metrics["valid_steps"] == agent.buffer.envs * TIME
    assert metrics["learning_rate"] == DEFAULT_LEARNING_RATE
    assert metrics["kl"] == pytest.approx(sum(h["kl"] for h in metrics["heads"].values()))


@pytest.mark.parametrize("minibatches", [1, 3])
def test_stored_and_recomputed_log_probs_agree_over_rounds_and_resets(minibatches: int) -> None:
    agent, world = make(config=PPOConfig(minibatches=minibatches, learning_rate=1e-2))
    errors: list[float] = []
    train(agent, world, 6 * 6 * TIME, lambda _, m: errors.append(m["stored_log_prob_error"]))
    assert len(errors) == 6
    assert max(errors) < STORED_LOG_PROB_TOLERANCE


@pytest.mark.parametrize("fault", ["hidden", "masks", "starts"])
def test_a_fault_in_what_was_stored_shows_in_the_log_prob_error(fault: str) -> None:
    agent, world = make(config=PPOConfig(learning_rate=1e-2, target_kl=None))
    train(agent, world, 3 * 6 * TIME)
    collect(agent, world, world.reset())
    if fault == "hidden":
        agent.buffer._h += 1.0
    elif fault == "masks":
        agent.buffer["masks"].fill_(True)
    else:
        agent.buffer._starts.logical_not_()
    assert agent.update()["stored_log_prob_error"] > STORED_LOG_PROB_TOLERANCE


def test_the_first_epoch_has_ratio_one_even_if_the_stored_log_probs_were_off() -> None:
    agent, world = make(config=PPOConfig(epochs=1))
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
    longer = HeadTable(LifecycleOp, (*HEADS, tempo))
    world = Noise(6, 0)
    world.space = space_of(longer)
    agent = PPOAgent.build(world.space, world.state_dim, 6, TIME, lstm_hidden_dim=HIDDEN)
    collect(agent, world, world.reset())
    found = agent.update()["heads"]["tempo"]
    assert 0 < found["relevant_fraction"] < 1
    assert found["gradient_norm"] > 0


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


def test_weight_decay_is_on_the_value_head_only() -> None:
    agent, _ = make()
    trunk, critic = agent.optimizer.param_groups
    assert trunk["weight_decay"] == 0
    assert critic["weight_decay"] > 0
    assert trunk["eps"] == critic["eps"] == DEFAULT_ADAM_EPS
    expected = {id(p) for p in agent.network.value_head.parameters()}
    assert {id(p) for p in critic["params"]} == expected
    together = len(trunk["params"]) + len(critic["params"])
    assert together == len(list(agent.network.parameters()))


def test_what_stands_in_padding_never_reaches_the_update() -> None:
    results = []
    for garbage in (0.0, float("nan")):
        agent, world = make()
        agent.buffer["states"].fill_(garbage)
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


def test_saving_and_loading_in_the_middle_continues_bit_for_bit(tmp_path: Path) -> None:
    agent, world = make(config=PPOConfig(minibatches=2, entropy_targets={"op": 0.9}))
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
    assert agent.config == PPOConfig(minibatches=2, entropy_targets={"op": 0.9})


def test_bf16_learns_the_same_within_its_tolerance() -> None:
    agent, world = make(config=PPOConfig(bf16=True))
    plain, other = make()
    for one, place in ((agent, world), (plain, other)):
        collect(one, place, place.reset())
    metrics, exact = agent.update(), plain.update()
    assert metrics["stored_log_prob_error"] < BF16_TOLERANCE
    assert metrics["value_loss"] == pytest.approx(exact["value_loss"], rel=0.2)
    assert agent.hidden[0].dtype == torch.float32


def test_a_compiled_agent_learns_the_same_and_keeps_its_backend(tmp_path: Path) -> None:
    results = []
    for backend in (None, "eager"):
        agent, world = make(config=PPOConfig(compile_backend=backend))
        train(agent, world, 2 * 6 * TIME)
        results.append(weights(agent))
    torch.testing.assert_close(results[1], results[0], atol=1e-5, rtol=1e-4)
    agent.save(tmp_path / "agent")
    again = PPOAgent.load(tmp_path / "agent")
    assert again.config.compile_backend == "eager"
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
    with pytest.raises(RolloutError, match="not computed"):
        agent.update()
    agent.record(decision, world.step(decision.actions))
    with pytest.raises(RolloutError, match="between rounds; given: 2 steps"):
        agent.save(tmp_path / "agent")
    agent.finish(world.reset())
    with pytest.raises(AgreementError, match="Accumulation"):
        agent.update(accumulation_steps=0)
    for wrong in ({"gamma": 2.0}, {"epochs": 0}, {"head_average": "some"}, {"target_kl": 0.0}):
        with pytest.raises(AgreementError, match=f"{next(iter(wrong))!r} is out of range"):
            PPOConfig(**wrong)
