"""Two processes that learn together make the update that one would make with everything."""

import multiprocessing
import random
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import distributed

from esper.archive import KeepingError
from esper.leyline import DEFAULT_EPISODE_LENGTH, DEFAULT_LSTM_HIDDEN_DIM, Legality
from esper.leyline.constants import KL_STOP_FACTOR
from esper.simic.agent import (
    NonFiniteError,
    PPOAgent,
    PPOConfig,
    Processes,
    ProcessesError,
    RolloutError,
    StoredLogProbError,
    collect,
)
from esper.simic.agent.processes import _letter, _said
from esper.simic.agent.update import Update
from esper.tamiyo import RunningNorm
from tests.simic.toys import Noise

HIDDEN, TIME = DEFAULT_LSTM_HIDDEN_DIM // 8, DEFAULT_EPISODE_LENGTH // 4
ROWS = ((0, 4), (4, 7))  # whose environments are whose
Rows = tuple[tuple[int, int], ...]
ENVS = ROWS[-1][1]
RANDOM = 12  # rollouts of random sizes, in float64
BASE = PPOConfig(learning_rate=1e-2, target_kl=None, strict=True)
NAMES = ("one minibatch", "several minibatches", "stopped", "one has no steps")


def cases() -> dict[str, PPOConfig]:
    """Settings whose limits lie between what one process sees and what all of them see."""
    agent = filled(BASE)
    batch = agent.buffer.get_batched_sequences("cpu")
    with torch.no_grad():
        update = Update(agent.network, agent.optimizer, config=agent.config)
        entropies = update.evaluate(batch).entropies[..., 0]
    counted = batch.matters[..., 0]
    first = entropies[: ROWS[0][1]][counted[: ROWS[0][1]]].mean()
    target = float((entropies[counted].mean() + first) / 2)
    kl = filled(replace(BASE, epochs=2)).update()["kl"]
    base = replace(BASE, entropy_targets={"op": target, "slot": 0.5})
    return {
        "one minibatch": base,
        "several minibatches": replace(base, minibatches=3, epochs=2),
        "stopped": replace(BASE, target_kl=0.9 * kl / KL_STOP_FACTOR, epochs=8),
        "one has no steps": replace(base, minibatches=2),
    }


def filled(config: PPOConfig, envs: int = ENVS, seed: int = 3) -> PPOAgent:
    """An agent with a rollout of all the environments, some of which took fewer steps."""
    world = Noise(envs, seed=seed)
    agent = build(config, envs)
    collect(agent, world, world.reset())
    agent.buffer.counts[1] = TIME // 2
    agent.buffer._even = False
    agent.buffer.compute_advantages_and_returns(torch.zeros(envs))
    return agent


def build(config: PPOConfig, envs: int, processes: Processes | None = None) -> PPOAgent:
    world = Noise(1, 0)
    return PPOAgent.build(
        world.space,
        world.state_dim,
        envs,
        TIME,
        config,
        lstm_hidden_dim=HIDDEN,
        processes=processes or Processes(),
    )


def divided(whole: PPOAgent, processes: Processes, rows: Rows = ROWS) -> PPOAgent:
    """This process's agent: the same weights, and the rollout of its own environments."""
    first, after = rows[processes.rank]
    part = build(whole.config, after - first, processes)
    for name, data in whole.buffer._data.items():
        part.buffer[name].copy_(data[first:after])
    for name in ("counts", "next_starts"):
        getattr(part.buffer, name).copy_(getattr(whole.buffer, name)[first:after])
    part.buffer.longest, part.buffer._even = whole.buffer.longest, False
    part.buffer._advantages = whole.buffer.advantages[first:after].clone()
    part.buffer._returns = whole.buffer.returns[first:after].clone()
    return part


def flat(agent: PPOAgent, metrics: Any) -> dict[str, Any]:
    """All that an update changes and reports."""
    heads = {name: dict(head) for name, head in metrics["heads"].items()}
    norms = {name: float(norm) for name, norm in metrics["gradient_norms"].heads.items()}
    state = {name: tensor.tolist() for name, tensor in agent.network.state_dict().items()}
    value = metrics["gradient_norms"].value
    return {"metrics": {**metrics, "heads": heads, "gradient_norms": (norms, value)}, **state}


def empty_the_second(name: str, agent: PPOAgent, first: int = 0) -> None:
    if name == "one has no steps":
        agent.buffer.counts[max(ROWS[1][0] - first, 0) :] = 0


def learn(rank: int, folder: str, results: Any) -> None:
    """What each process does."""
    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=len(ROWS)
    )
    try:
        results.put((rank, findings(rank, Processes.joined(), folder)))
    except Exception as error:
        results.put((rank, {"failed": repr(error)}))
        raise
    finally:
        distributed.destroy_process_group()


def findings(rank: int, processes: Processes, folder: str) -> dict[str, Any]:
    """What comes of all cases, of weights that differ, and of what must be refused."""
    found: dict[str, Any] = {}
    for name, config in cases().items():
        agent = divided(filled(config), processes)
        empty_the_second(name, agent, ROWS[rank][0])
        found[name] = flat(agent, agent.update())
    network = build(BASE, 1).network
    network.lstm.weight_hh_l0.data.fill_(rank)
    agent = PPOAgent(network, build(BASE, 1).buffer, processes=processes)
    found["weights"] = agent.network.lstm.weight_hh_l0.tolist()
    found["actions"] = played(processes)
    found |= kept(processes, folder)

    wrong = divided(filled(BASE), processes)
    if rank == 1:
        wrong.buffer["log_probs"].add_(0.01)
    found["refusals"] = []
    before = wrong.network.lstm.weight_hh_l0.clone()
    for agent in (wrong, build(BASE, 1, processes)):
        agent.buffer._advantages = agent.buffer._returns = torch.zeros_like(agent.buffer["values"])
        try:
            agent.update()
        except (StoredLogProbError, RolloutError) as error:
            found["refusals"].append(type(error).__name__)
    found["untouched"] = torch.equal(before, wrong.network.lstm.weight_hh_l0)

    broken = divided(filled(BASE), processes)
    state = {name: tensor.clone() for name, tensor in broken.network.state_dict().items()}
    if rank == 1:
        broken.buffer["rewards"][0, 2] = torch.nan
    broken.buffer.compute_advantages_and_returns(torch.zeros(broken.buffer.envs))
    try:
        broken.update()
    except (NonFiniteError, ProcessesError) as error:
        found["refusals"].append(type(error).__name__)
    after = broken.network.state_dict()
    found["untouched"] &= all(torch.equal(state[name], after[name]) for name in state)
    compute_in_double()
    found["apart"] = [apart(seed, processes) for seed in range(RANDOM)]
    return found


def apart(seed: int, processes: Processes) -> float:
    """By how much weights differ after the updates of all processes and of one, at random sizes."""
    draw = random.Random(seed)
    envs = draw.randint(3, 9)
    middle = draw.randint(1, envs - 1)
    config = replace(
        BASE,
        epochs=draw.randint(1, 3),
        minibatches=draw.randint(1, min(4, envs)),
        gae_lambda=draw.random(),
        entropy_coef=0.1 * draw.random(),
        normalize_observations=draw.random() < 0.5,
    )
    whole = filled(config, envs, seed)
    part = divided(whole, processes, ((0, middle), (middle, envs)))
    part.update()
    whole.update()
    ours, theirs = part.network.state_dict(), whole.network.state_dict()
    return max(float((ours[name] - theirs[name]).abs().max()) for name in ours)


def compute_in_double() -> None:
    """From here on this process computes in float64 what is computed in float32 otherwise."""
    torch.set_default_dtype(torch.float64)
    torch.float32, narrow = torch.float64, torch.Tensor.float  # type: ignore[misc]
    torch.Tensor.float = (  # type: ignore[method-assign,assignment]
        lambda each: each.double() if each.is_floating_point() else narrow(each)
    )


def played(processes: Processes) -> list[Any]:
    """Actions of this process's environments, in the same states: [envs, steps, H]."""
    first, after = ROWS[processes.rank] if processes.size > 1 else (0, ENVS)
    world = Noise(ENVS, seed=5)
    states, legal = world.reset(), world.legal()
    masks = {name: mask[first:after] for name, mask in legal.masks.items()}
    own = Legality(legal.space, after - first, masks)
    agent = build(BASE, after - first, processes)
    actions: list[Any] = torch.stack(
        [agent.act(states[first:after], own).actions for _ in range(3)], 1
    ).tolist()
    return actions


def kept(processes: Processes, folder: str) -> dict[str, Any]:
    """The memory of this process's environments, that of the saved agent, and what is its share."""
    first, after = ROWS[processes.rank]
    agent = build(BASE, after - first, processes)
    agent.hidden = tuple(torch.rand_like(each) for each in agent.hidden)  # type: ignore[assignment]
    agent.save(f"{folder}/agent")
    processes.sum_(torch.zeros(1))
    loaded = PPOAgent.load(f"{folder}/agent", processes=processes)
    saved = PPOAgent.load(f"{folder}/agent")
    memories = {"memory": agent, "saved": saved, "loaded": loaded}
    return {name: each.hidden[1].tolist() for name, each in memories.items()}


@pytest.fixture(scope="module")
def together(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What the two processes found, by rank."""
    folder: Path = tmp_path_factory.mktemp("processes")
    forked = multiprocessing.get_context("fork")
    results = forked.Queue()
    started = [
        forked.Process(target=learn, args=(rank, str(folder), results)) for rank in range(len(ROWS))
    ]
    for process in started:
        process.start()
    try:
        by_rank = dict(results.get(timeout=60) for _ in started)
    finally:
        for process in started:
            process.join(timeout=20)
            process.kill()
    failed = [found["failed"] for found in by_rank.values() if "failed" in found]
    assert not failed, failed
    return [by_rank[rank] for rank in range(len(ROWS))]


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_an_update_of_two_processes_is_that_of_one(
    name: str, together: list[dict[str, Any]]
) -> None:
    config = cases()[name]
    whole = filled(config)
    empty_the_second(name, whole)
    expected = flat(whole, whole.update())
    first, second = (found[name] for found in together)
    assert first == second  # to the bit, decisions included
    for key, value in expected.items():
        if key != "metrics":
            found = torch.tensor(first[key])
            torch.testing.assert_close(found, torch.tensor(value), atol=2e-5, rtol=1e-4, msg=key)
    theirs, ours = first["metrics"], expected["metrics"]
    assert theirs.keys() == ours.keys()
    for key in ours:
        if key == "gradient_norms":
            assert theirs[key][0] == pytest.approx(ours[key][0], rel=1e-3)
            assert theirs[key][1] == pytest.approx(ours[key][1], rel=1e-3)
        elif key == "heads":
            for head in ours[key]:
                assert theirs[key][head] == pytest.approx(ours[key][head], rel=1e-3, abs=1e-5)
        else:
            assert theirs[key] == pytest.approx(ours[key], rel=1e-3, abs=1e-5), key
    assert ours["stopped_by_kl"] == (name == "stopped")
    steps = 1 if name == "stopped" else config.epochs * config.minibatches
    assert ours["optimizer_steps"] == steps


@pytest.mark.slow
def test_updates_on_random_rollouts_are_those_of_one_process_to_a_millionth(
    together: list[dict[str, Any]],
) -> None:
    for found in together:
        assert len(found["apart"]) == RANDOM
        assert max(found["apart"]) < 1e-6, found["apart"]


def test_every_process_starts_from_the_same_weights(together: list[dict[str, Any]]) -> None:
    first, second = together
    assert first["weights"] == second["weights"]
    assert not torch.tensor(first["weights"]).any()


def test_statistics_of_the_first_process_count_at_once_where_others_were_used_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def told(tensor: torch.Tensor, **_: object) -> None:  # as messages do, unseen by torch
        tensor.data.fill_(4.0)

    norm, states = RunningNorm(2), torch.full((1, 2), 8.0)
    assert torch.equal(norm(states), states)
    monkeypatch.setattr(distributed, "broadcast", told)
    group: Any = object()
    Processes(rank=1, size=2, group=group).share(norm)
    assert torch.equal(norm(states), torch.full((1, 2), (8.0 - 4.0) / 2.0))


def test_an_environment_gets_the_same_actions_whichever_process_plays_it(
    together: list[dict[str, Any]],
) -> None:
    """Streams belong to environments: three steps, in states that do not depend on actions."""
    first, second = (found["actions"] for found in together)
    assert first + second == played(Processes())


def test_one_agent_is_saved_and_any_number_of_processes_goes_on_with_it(
    together: list[dict[str, Any]],
) -> None:
    alone = torch.tensor(together[0]["saved"])
    assert torch.equal(alone, torch.cat([torch.tensor(f["memory"]) for f in together], 1))
    for rank, found in enumerate(together):
        first = ENVS * rank // 2
        assert torch.equal(torch.tensor(found["loaded"]), alone[:, first : ENVS * (rank + 1) // 2])


def test_what_one_process_refuses_all_of_them_refuse_and_nothing_has_changed(
    together: list[dict[str, Any]],
) -> None:
    for found, last in zip(together, (ProcessesError, NonFiniteError), strict=True):
        errors = (StoredLogProbError, RolloutError, last)
        assert found["refusals"] == [error.__name__ for error in errors]
        assert found["untouched"]


def test_a_process_is_alone_unless_it_was_started_with_others() -> None:
    alone = Processes()
    tensor = torch.arange(3.0)
    assert alone.sum_(tensor) is alone.max_(tensor) is tensor
    assert alone.largest(7, torch.device("cpu")) == 7
    with pytest.raises(ProcessesError, match="torchrun"):
        Processes.joined()
    assert asdict(alone) == {"rank": 0, "size": 1, "group": None}


TREES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**60), 2**60) | st.floats() | st.text(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text(max_size=3) | st.integers(), inner, max_size=3)
        | st.builds(lambda rows: np.arange(rows, dtype="<i4"), st.integers(0, 3))
        | st.builds(lambda rows: torch.full((rows, 2), torch.nan), st.integers(0, 3))
    ),
    max_leaves=8,
)


@given(TREES, st.integers(0, 9))
def test_a_message_between_processes_is_read_as_it_was_written(what: object, padding: int) -> None:
    letter = _letter(what)
    arrived = _said(torch.cat([letter, torch.zeros(padding, dtype=torch.uint8)]))
    assert repr(arrived) == repr(what)


def test_what_is_no_data_is_not_sent_to_other_processes() -> None:
    with pytest.raises(KeepingError, match="message between processes"):
        _letter([print])
