"""Two processes that learn together make the update of one process with all environments.

The two processes run once, in `both_processes`; each test checks a part of their results.

Shapes: `E` environments, `T` time, `H` heads.
"""

import multiprocessing
import random
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, distributed

from esper.distributed import SINGLE_PROCESS, Processes, ProcessesError
from esper.leyline import DEFAULT_EPISODE_LENGTH, DEFAULT_LSTM_HIDDEN_DIM, EsperError, Legality
from esper.leyline.constants import KL_EARLY_STOP_MULTIPLIER
from esper.simic.agent import PPOAgent, PPOConfig, TamiyoRolloutBuffer, collect
from esper.simic.agent.update import _evaluate
from esper.tamiyo import RunningNorm
from tests.simic.toys import Noise

HIDDEN_DIM = DEFAULT_LSTM_HIDDEN_DIM // 8
NUM_STEPS = DEFAULT_EPISODE_LENGTH // 4
CPU = torch.device("cpu")

EnvRanges = tuple[tuple[int, int], ...]  # environments of each rank: first, end
ENV_RANGES: EnvRanges = ((0, 4), (4, 7))
NUM_RANKS = len(ENV_RANGES)
NUM_ENVS = ENV_RANGES[-1][1]

NUM_RANDOM_UPDATES = 12  # with random sizes, in float64
CONFIG = PPOConfig(lr=1e-2, target_kl=None, strict=True)

ONE_MINIBATCH = "one minibatch"
SEVERAL_MINIBATCHES = "several minibatches"
ACCUMULATION = "accumulation"
KL_STOP = "stopped by KL"
EMPTY_RANK = "one rank has no steps"
CASES = (ONE_MINIBATCH, SEVERAL_MINIBATCHES, ACCUMULATION, KL_STOP, EMPTY_RANK)

BUFFER_TENSORS = (
    "states",
    "actions",
    "action_masks",
    "log_probs",
    "values",
    "rewards",
    "terminals",
    "truncations",
    "bootstrap_values",
    "episode_starts",
    "hidden_h",
    "hidden_c",
    "step_counts",
    "next_starts",
    "entropy_masks",
    "entropy_conditions",
)


def build_agent(
    config: PPOConfig, num_envs: int, processes: Processes = SINGLE_PROCESS
) -> PPOAgent:
    world = Noise(1, 0)
    return PPOAgent(
        world.action_space,
        state_dim=world.state_dim,
        num_envs=num_envs,
        max_steps_per_env=NUM_STEPS,
        config=config,
        lstm_hidden_dim=HIDDEN_DIM,
        processes=processes,
    )


def agent_with_rollout(config: PPOConfig, num_envs: int = NUM_ENVS, seed: int = 3) -> PPOAgent:
    """Return an agent with a rollout of all environments, one of which took fewer steps."""
    world = Noise(num_envs, seed=seed)
    agent = build_agent(config, num_envs)
    collect(agent, world, world.reset())
    agent.buffer.step_counts[1] = NUM_STEPS // 2
    agent.buffer._is_uniform = False
    agent.buffer.compute_advantages_and_returns()
    return agent


def agent_of_rank(
    agent: PPOAgent, processes: Processes, env_ranges: EnvRanges = ENV_RANGES
) -> PPOAgent:
    """Return an agent with the same weights and the rollout of this rank's environments."""
    first, end = env_ranges[processes.rank]
    part = build_agent(agent.config, end - first, processes)
    for name in BUFFER_TENSORS:
        getattr(part.buffer, name).copy_(getattr(agent.buffer, name)[first:end])
    part.buffer.max_length = agent.buffer.max_length
    part.buffer._is_uniform = False
    part.buffer._advantages = agent.buffer.advantages[first:end].clone()
    part.buffer._returns = agent.buffer.returns[first:end].clone()
    return part


def configs_by_case() -> dict[str, PPOConfig]:
    """Return settings whose limits lie between the values of one process and of all of them."""
    # An entropy target between the entropy of the first rank's environments and that of all.
    agent = agent_with_rollout(CONFIG)
    batch = agent.buffer.get_batched_sequences()
    with torch.no_grad():
        entropies = _evaluate(agent.network, batch, CONFIG).entropies[..., 0]
    is_counted = batch.head_mask[..., 0]
    first_rank = slice(*ENV_RANGES[0])
    entropy_of_first_rank = entropies[first_rank][is_counted[first_rank]].mean()
    entropy_target = float((entropies[is_counted].mean() + entropy_of_first_rank) / 2)
    with_targets = replace(CONFIG, entropy_targets={"op": entropy_target, "slot": 0.5})

    # A KL limit that is exceeded in the second epoch.
    kl = agent_with_rollout(replace(CONFIG, epochs=2)).update()["kl"]
    target_kl = 0.9 * kl / KL_EARLY_STOP_MULTIPLIER
    return {
        ONE_MINIBATCH: with_targets,
        SEVERAL_MINIBATCHES: replace(with_targets, minibatches=3, epochs=2),
        ACCUMULATION: replace(with_targets, minibatches=2, accumulation_steps=2),
        KL_STOP: replace(CONFIG, target_kl=target_kl, epochs=8),
        EMPTY_RANK: replace(with_targets, minibatches=2),
    }


def remove_steps_of_second_rank(agent: PPOAgent, first_env: int = 0) -> None:
    agent.buffer.step_counts[max(ENV_RANGES[1][0] - first_env, 0) :] = 0


def results_of(agent: PPOAgent, metrics: Any) -> dict[str, Any]:
    """Return the state and the metrics after an update as plain numbers."""
    norms = metrics["gradient_norms"]
    plain_metrics = {
        **metrics,
        "heads": {name: dict(head) for name, head in metrics["heads"].items()},
        "gradient_norms": {**norms.heads, "value": norms.value},
    }
    state = {name: tensor.tolist() for name, tensor in agent.network.state_dict().items()}
    return {"metrics": plain_metrics, "state": state}


# --- what each process does ---------------------------------------------------------------------


def run_rank(rank: int, folder: str, queue: Any) -> None:
    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=NUM_RANKS
    )
    try:
        queue.put((rank, results_of_rank(Processes.from_default_group(), folder)))
    except Exception as error:
        queue.put((rank, {"error": repr(error)}))
        raise
    finally:
        distributed.destroy_process_group()


def results_of_rank(processes: Processes, folder: str) -> dict[str, Any]:
    results: dict[str, Any] = {"updates": updates_of_all_cases(processes)}
    results["collectives"] = call_collectives(processes)
    results["first weights"] = weights_after_construction(processes)
    results["actions"] = sample_actions_of_rank(processes)
    results["hidden"] = save_and_load(processes, folder)
    results["errors"] = errors_of_faults(processes)
    compute_in_float64()
    results["differences"] = [
        difference_to_single_process(seed, processes) for seed in range(NUM_RANDOM_UPDATES)
    ]
    return results


def updates_of_all_cases(processes: Processes) -> dict[str, Any]:
    updates = {}
    for case, config in configs_by_case().items():
        agent = agent_of_rank(agent_with_rollout(config), processes)
        if case == EMPTY_RANK:
            remove_steps_of_second_rank(agent, ENV_RANGES[processes.rank][0])
        updates[case] = results_of(agent, agent.update())
    return updates


def call_collectives(processes: Processes) -> dict[str, Any]:
    rank = processes.rank
    env_slice = processes.env_slice(rank + 1, CPU)
    rows = torch.full((rank + 1, 2), float(rank))
    flags = torch.tensor([[rank == 1] * (rank + 1)])
    tree = {"rank": rank, "nested": [(rank, "text"), None], "tensor": torch.arange(rank + 1)}
    return {
        "sum": processes.sum_(torch.tensor([1.0, rank])).tolist(),
        "max": processes.max_(torch.tensor([1.0, rank])).tolist(),
        "max_int": processes.max_int(10 * rank, CPU),
        "env_slice": env_slice,
        "rows": processes.all_gather_rows(rows, env_slice).tolist(),
        "flags": processes.all_gather_rows(flags, env_slice, dim=1).tolist(),
        "all_gather_object": [item["rank"] for item in processes.all_gather_object(tree)],
        "gather_object": [
            (item["nested"], item["tensor"].tolist()) for item in processes.gather_object(tree)
        ],
    }


def weights_after_construction(processes: Processes) -> dict[str, Any]:
    """Build an agent from a network that differs between ranks."""
    network = build_agent(CONFIG, 1).network
    network.lstm.weight_hh_l0.data.fill_(processes.rank)
    states = torch.full((1, network.state_dim), 8.0)
    network.observation_norm.observe(torch.randn(20, network.state_dim) + 3 * processes.rank)
    agent = PPOAgent(network=network, buffer=build_agent(CONFIG, 1).buffer, processes=processes)
    return {
        "weights": agent.network.lstm.weight_hh_l0.tolist(),
        "normalised": agent.network.observation_norm(states).tolist(),
    }


def sample_actions_of_rank(processes: Processes) -> list[Any]:
    """Sample three times in the same states; return actions of this rank, [E, 3, H]."""
    first, end = ENV_RANGES[processes.rank] if processes.size > 1 else (0, NUM_ENVS)
    world = Noise(NUM_ENVS, seed=5)
    states, legality = world.reset(), world.legal()
    masks = {name: mask[first:end] for name, mask in legality.masks.items()}
    own_legality = Legality(legality.space, end - first, masks)
    agent = build_agent(CONFIG, end - first, processes)
    actions = [agent.act(states[first:end], own_legality).actions for _ in range(3)]
    result: list[Any] = torch.stack(actions, 1).tolist()
    return result


def save_and_load(processes: Processes, folder: str) -> dict[str, Any]:
    """Return cell states: before saving, of the saved agent, and of this rank's share."""
    first, end = ENV_RANGES[processes.rank]
    agent = build_agent(CONFIG, end - first, processes)
    h, c = agent.hidden
    agent.hidden = torch.rand_like(h), torch.rand_like(c)
    agent.save(f"{folder}/agent")
    processes.sum_(torch.zeros(1))  # wait until the file is written
    share = PPOAgent.load(f"{folder}/agent", processes=processes)
    complete = PPOAgent.load(f"{folder}/agent")
    agents = {"before": agent, "saved": complete, "loaded": share}
    return {name: agent.hidden[1].tolist() for name, agent in agents.items()}


def errors_of_faults(processes: Processes) -> dict[str, Any]:
    """Return, for several faults of one rank, this rank's error and whether its state is intact."""
    errors = {}

    wrong_log_probs = agent_of_rank(agent_with_rollout(CONFIG), processes)
    if processes.rank == 1:
        wrong_log_probs.buffer.log_probs.add_(0.01)
    errors["log-probs"] = error_of(wrong_log_probs, "lstm")

    empty = build_agent(CONFIG, 1, processes)
    empty.buffer.compute_advantages_and_returns()
    errors["all empty"] = error_of(empty)

    nan_reward = agent_of_rank(agent_with_rollout(CONFIG), processes)
    if processes.rank == 1:
        nan_reward.buffer.rewards[0, 2] = torch.nan
    nan_reward.buffer.compute_advantages_and_returns()
    errors["reward"] = error_of(nan_reward)

    diverging = agent_of_rank(agent_with_rollout(replace(CONFIG, lr=1e30)), processes)
    remove_steps_of_second_rank(diverging, ENV_RANGES[processes.rank][0])
    errors["divergence"] = error_of(diverging)
    return errors


def error_of(agent: PPOAgent, compared: str = "") -> tuple[str, str, bool]:
    """Update; return type and text of the error, and whether the compared tensors are unchanged."""
    before = {name: tensor.clone() for name, tensor in agent.network.state_dict().items()}
    name = text = "none"
    try:
        agent.update()
    except EsperError as error:
        name, text = type(error).__name__, str(error)
    after = agent.network.state_dict()
    compared_names = [name for name in before if name.startswith(compared)]
    is_unchanged = all(torch.equal(before[name], after[name]) for name in compared_names)
    return name, text, is_unchanged


def difference_to_single_process(seed: int, processes: Processes) -> float:
    """Return the largest difference of weights between an update of all ranks and of one process.

    Sizes and settings are random.
    """
    generator = random.Random(seed)
    num_envs = generator.randint(3, 9)
    middle = generator.randint(1, num_envs - 1)
    config = replace(
        CONFIG,
        epochs=generator.randint(1, 3),
        minibatches=generator.randint(1, min(4, num_envs)),
        gae_lambda=generator.random(),
        entropy_coef=0.1 * generator.random(),
        normalize_observations=generator.random() < 0.5,
    )
    single = agent_with_rollout(config, num_envs, seed)
    part = agent_of_rank(single, processes, ((0, middle), (middle, num_envs)))
    part.update()
    single.update()
    state, expected = part.network.state_dict(), single.network.state_dict()
    return max(float((state[name] - expected[name]).abs().max()) for name in state)


def compute_in_float64() -> None:
    """Replace float32 by float64 in the rest of this process."""
    torch.set_default_dtype(torch.float64)
    to_float: Callable[[Tensor], Tensor] = torch.Tensor.float

    def to_double(tensor: Tensor) -> Tensor:
        return tensor.double() if tensor.is_floating_point() else to_float(tensor)

    torch.float32 = torch.float64  # type: ignore[misc]
    torch.Tensor.float = to_double  # type: ignore[method-assign,assignment]
    TamiyoRolloutBuffer._allocate.__kwdefaults__["dtype"] = torch.float64


@pytest.fixture(scope="module")
def both_processes(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Return the results of both processes, by rank."""
    folder: Path = tmp_path_factory.mktemp("processes")
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    processes = [
        context.Process(target=run_rank, args=(rank, str(folder), queue))
        for rank in range(NUM_RANKS)
    ]
    for process in processes:
        process.start()
    try:
        results = dict(queue.get(timeout=60) for _ in processes)
    finally:
        for process in processes:
            process.join(timeout=20)
            process.kill()
    errors = [result["error"] for result in results.values() if "error" in result]
    assert not errors, errors
    return [results[rank] for rank in range(NUM_RANKS)]


# --- tests --------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES)
def test_update_of_two_processes_equals_that_of_one(
    case: str, both_processes: list[dict[str, Any]]
) -> None:
    config = configs_by_case()[case]
    single = agent_with_rollout(config)
    if case == EMPTY_RANK:
        remove_steps_of_second_rank(single)
    expected = results_of(single, single.update())
    first, second = (result["updates"][case] for result in both_processes)
    assert first == second  # bit for bit

    for name, numbers in expected["state"].items():
        tensor, expected_tensor = torch.tensor(first["state"][name]), torch.tensor(numbers)
        torch.testing.assert_close(tensor, expected_tensor, atol=2e-5, rtol=1e-4, msg=name)
    metrics, expected_metrics = first["metrics"], expected["metrics"]
    assert metrics.keys() == expected_metrics.keys()
    for name, value in expected_metrics.items():
        if name == "heads":
            for head in value:
                assert metrics[name][head] == pytest.approx(value[head], rel=1e-3, abs=1e-5)
        else:
            assert metrics[name] == pytest.approx(value, rel=1e-3, abs=1e-5), name
    assert metrics["stopped_by_kl"] == (case == KL_STOP)
    num_steps = 1 if case == KL_STOP else config.epochs * config.minibatches
    assert metrics["optimizer_steps"] == num_steps


def test_random_updates_equal_those_of_one_process_in_float64(
    both_processes: list[dict[str, Any]],
) -> None:
    for result in both_processes:
        assert len(result["differences"]) == NUM_RANDOM_UPDATES
        assert max(result["differences"]) < 1e-6, result["differences"]


def test_collectives_return_values_of_all_ranks(both_processes: list[dict[str, Any]]) -> None:
    for rank, result in enumerate(both_processes):
        collectives = result["collectives"]
        assert collectives["sum"] == [2.0, 1.0]
        assert collectives["max"] == [1.0, 1.0]
        assert collectives["max_int"] == 10
        assert collectives["env_slice"] == ((0, 3), (1, 3))[rank]
        assert collectives["rows"] == [[0.0, 0.0], [1.0, 1.0], [1.0, 1.0]]
        assert collectives["flags"] == [[False, True, True]]
        assert collectives["all_gather_object"] == [0, 1]
        gathered = [([(0, "text"), None], [0]), ([(1, "text"), None], [0, 1])]
        assert collectives["gather_object"] == (gathered if rank == 0 else [])


def test_all_processes_begin_with_the_network_of_rank_0(
    both_processes: list[dict[str, Any]],
) -> None:
    first, second = (result["first weights"] for result in both_processes)
    assert first["weights"] == second["weights"]
    assert not torch.tensor(first["weights"]).any()
    assert first["normalised"] == second["normalised"]


def test_broadcast_statistics_are_used_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def receive_fours(tensor: Tensor, **_: object) -> None:
        tensor.data.fill_(4.0)

    norm, states = RunningNorm(2), torch.full((1, 2), 8.0)
    assert torch.equal(norm(states), states)
    monkeypatch.setattr(distributed, "broadcast", receive_fours)
    group: Any = object()
    Processes(rank=1, size=2, group=group).broadcast_module(norm)
    assert torch.equal(norm(states), torch.full((1, 2), (8.0 - 4.0) / 2.0))


def test_environment_gets_the_same_actions_in_any_process(
    both_processes: list[dict[str, Any]],
) -> None:
    first, second = (result["actions"] for result in both_processes)
    assert first + second == sample_actions_of_rank(SINGLE_PROCESS)


def test_saved_agent_is_shared_by_any_number_of_processes(
    both_processes: list[dict[str, Any]],
) -> None:
    hidden = [result["hidden"] for result in both_processes]
    saved = torch.tensor(hidden[0]["saved"])
    before = [torch.tensor(hidden_of_rank["before"]) for hidden_of_rank in hidden]
    assert torch.equal(saved, torch.cat(before, 1))
    for rank, hidden_of_rank in enumerate(hidden):
        first, end = NUM_ENVS * rank // 2, NUM_ENVS * (rank + 1) // 2
        assert torch.equal(torch.tensor(hidden_of_rank["loaded"]), saved[:, first:end])


@pytest.mark.parametrize(
    ("fault", "expected_errors"),
    [
        ("log-probs", ("StoredLogProbError", "StoredLogProbError")),
        ("all empty", ("RolloutError", "RolloutError")),
        ("reward", ("ProcessesError", "NonFiniteError")),
    ],
)
def test_error_of_one_process_is_raised_in_all(
    fault: str, expected_errors: tuple[str, str], both_processes: list[dict[str, Any]]
) -> None:
    for result, expected_error in zip(both_processes, expected_errors, strict=True):
        error, _, is_unchanged = result["errors"][fault]
        assert error == expected_error
        assert is_unchanged


def test_divergence_is_named_in_a_process_without_steps(
    both_processes: list[dict[str, Any]],
) -> None:
    locations = ("environment 0, step 0", "a step of another process")
    for result, location in zip(both_processes, locations, strict=True):
        error, text, _ = result["errors"]["divergence"]
        assert error == "NonFiniteError"
        assert "optimiser step 2" in text
        assert location in text


def test_single_process_returns_its_arguments() -> None:
    single = Processes()
    tensor = torch.arange(3.0)
    assert single.sum_(tensor) is single.max_(tensor) is tensor
    assert single.max_int(7, CPU) == 7
    assert single.env_slice(3, CPU) == (0, 3)
    assert single.all_gather_rows(tensor, (0, 3)) is tensor
    assert single.all_gather_object("text") == single.gather_object("text") == ["text"]
    assert asdict(single) == {"rank": 0, "size": 1, "group": None}


def test_missing_process_group_raises() -> None:
    with pytest.raises(ProcessesError, match="torchrun"):
        Processes.from_default_group()
