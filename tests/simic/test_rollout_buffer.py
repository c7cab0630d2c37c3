"""The rollout buffer: what it keeps, what it refuses, and where episodes end."""

import math
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from esper.leyline import (
    CANONICAL_ACTION,
    DEFAULT_EPISODE_LENGTH,
    DEFAULT_GAMMA,
    DEFAULT_LSTM_HIDDEN_DIM,
    DEFAULT_LSTM_LAYERS,
)
from esper.simic.agent import RolloutError, TamiyoRolloutBuffer
from esper.simic.agent.processes import ALONE
from esper.simic.agent.rollout_buffer import packed, sent, unpacked
from esper.tamiyo import InvalidStateMachineError
from tests.tamiyo.spaces import esper_space

ENVS, TIME, STATE = 3, DEFAULT_EPISODE_LENGTH // 5, 4
HIDDEN = DEFAULT_LSTM_HIDDEN_DIM // 16
SPACE = esper_space()
HEADS, WIDEST = len(SPACE), max(SPACE.sizes)

Step = dict[str, Tensor | tuple[Tensor, Tensor]]


def make_buffer(envs: int = ENVS) -> TamiyoRolloutBuffer:
    return TamiyoRolloutBuffer(SPACE, STATE, envs, TIME, HIDDEN)


def step(
    seed: int, ended: tuple[int, ...] = (), cut: tuple[int, ...] = (), envs: int = ENVS
) -> Step:
    draw = torch.Generator().manual_seed(seed)

    def numbers(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw)

    def flags(rows: tuple[int, ...]) -> Tensor:
        return torch.tensor([env in rows for env in range(envs)])

    return {
        "states": numbers(envs, STATE),
        "actions": torch.zeros(envs, HEADS, dtype=torch.int64),
        "masks": torch.ones(envs, HEADS, WIDEST, dtype=torch.bool),
        "log_probs": numbers(envs, HEADS),
        "values": numbers(envs),
        "rewards": numbers(envs),
        "terminals": flags(ended),
        "truncations": flags(cut),
        "bootstraps": numbers(envs) * flags(cut),
        "hidden": (
            numbers(DEFAULT_LSTM_LAYERS, envs, HIDDEN),
            numbers(DEFAULT_LSTM_LAYERS, envs, HIDDEN),
        ),
    }


def of_env(whole: Step, env: int) -> Step:
    h, c = whole["hidden"]
    single: Step = {name: value[env] for name, value in whole.items() if name != "hidden"}
    return single | {"hidden": (h[:, env : env + 1], c[:, env : env + 1])}


def test_the_defaults_are_leylines() -> None:
    buffer = TamiyoRolloutBuffer(SPACE, STATE, ENVS)
    assert buffer.steps == DEFAULT_EPISODE_LENGTH
    assert buffer.lstm_hidden_dim == DEFAULT_LSTM_HIDDEN_DIM
    assert buffer.lstm_layers == DEFAULT_LSTM_LAYERS


def test_adding_all_at_once_or_one_by_one_keeps_the_same() -> None:
    together, one_by_one = make_buffer(), make_buffer()
    for time in range(TIME):
        now = step(time, ended=(time % ENVS,))
        together.add(**now)
        for env in range(ENVS):
            one_by_one.add_single(env, **of_env(now, env))
    for buffer in (together, one_by_one):
        assert buffer.full
        assert len(buffer) == ENVS * TIME
        buffer.compute_advantages_and_returns(torch.zeros(ENVS))
    left, right = (b.get_batched_sequences("cpu") for b in (together, one_by_one))
    for name in ("states", "actions", "masks", "log_probs", "returns", "starts", "valid"):
        assert torch.equal(getattr(left, name), getattr(right, name)), name
    assert torch.equal(left.hidden[0], right.hidden[0])
    assert torch.equal(left.hidden[1], right.hidden[1])
    for name in "hc":
        assert torch.equal(together[name], one_by_one[name])


def test_the_memory_entering_each_step_is_kept() -> None:
    buffer = make_buffer()
    for time in range(TIME):
        buffer.add(**step(time))
    for time in range(TIME):
        for name, entered in zip("hc", step(time)["hidden"], strict=True):
            assert torch.equal(buffer[name][:, time].transpose(0, 1), entered)
    buffer.clear_env(1)
    for name in "hc":
        assert not bool(buffer[name][1].any())
        assert bool(buffer[name][0].any())


def test_environments_may_have_different_numbers_of_steps() -> None:
    buffer = make_buffer()
    buffer.add_single(1, **of_env(step(0), 1))
    buffer.add(**step(1))
    assert buffer.counts.tolist() == [1, 2, 1]
    assert torch.equal(buffer["states"][1, 1], step(1)["states"][1])
    assert torch.equal(buffer["states"][2, 0], step(1)["states"][2])
    buffer.compute_advantages_and_returns(torch.zeros(ENVS))
    batch = buffer.get_batched_sequences("cpu")
    assert torch.equal(batch.valid, torch.arange(TIME) < torch.tensor([[1], [2], [1]]))
    assert torch.equal(batch.hidden[0][:, 1], step(0)["hidden"][0][:, 1])
    assert torch.equal(batch.hidden[0][:, 0], step(1)["hidden"][0][:, 0])


def test_environments_that_idle_leave_nothing_behind() -> None:
    buffer, alone = make_buffer(), make_buffer()
    buffer.add(**step(0, ended=(1,)))
    for time in range(1, TIME):
        garbage = step(time)
        garbage["rewards"][1] = math.nan
        buffer.add(**garbage, active=torch.tensor([True, False, True]))
    for env in range(ENVS):
        for time in range(1 if env == 1 else TIME):
            alone.add_single(env, **of_env(step(time, ended=(1,) if time == 0 else ()), env))
    assert buffer.counts.tolist() == alone.counts.tolist() == [TIME, 1, TIME]
    assert torch.equal(buffer.next_starts, alone.next_starts)
    for some in (buffer, alone):
        some.compute_advantages_and_returns(torch.zeros(ENVS))
    left, right = (b.get_batched_sequences("cpu") for b in (buffer, alone))
    for name in ("states", "advantages", "starts", "valid"):
        assert torch.equal(getattr(left, name), getattr(right, name)), name
    assert torch.equal(left.hidden[0], right.hidden[0])
    with pytest.raises(RolloutError, match="Environment 2 is full"):
        buffer.add(**step(9), active=torch.tensor([False, True, True]))
    with pytest.raises(RolloutError, match="'active'"):
        buffer.add(**step(9), active=torch.ones(ENVS))


def test_episode_starts_follow_ends_and_outlive_a_reset() -> None:
    buffer = make_buffer()
    assert bool(buffer.next_starts.all())
    buffer.add(**step(0, ended=(0,), cut=(1,)))
    assert buffer.next_starts.tolist() == [True, True, False]
    buffer.add(**step(1))
    buffer.compute_advantages_and_returns(torch.zeros(ENVS))
    starts = buffer.get_batched_sequences("cpu").starts
    assert starts[:, :2].tolist() == [[True, True], [True, True], [True, False]]
    buffer.end_episode(2)
    buffer.reset()
    assert len(buffer) == 0
    assert buffer.next_starts.tolist() == [False, False, True]
    buffer.start_episode(0)
    assert buffer.next_starts.tolist() == [True, False, True]


def test_advantages_stop_where_an_episode_was_ended_by_hand() -> None:
    marked, told = make_buffer(), make_buffer()
    for time in range(3):
        marked.add(**step(time, ended=(0,) if time == 1 else (), cut=(1,) if time == 1 else ()))
        told.add(**step(time))
        if time == 1:
            told.end_episode(0)
            told.end_episode(1, truncated_value=float(marked["bootstraps"][1, 1]))
    for buffer in (marked, told):
        buffer.compute_advantages_and_returns(torch.ones(ENVS), gamma=DEFAULT_GAMMA)
    assert torch.equal(marked.advantages, told.advantages)
    assert torch.equal(marked.returns, told.returns)
    torch.testing.assert_close(marked.returns, marked.advantages + marked["values"])


def test_clearing_an_environment_forgets_it_and_its_memory_alone() -> None:
    buffer = make_buffer()
    bad = step(0)
    bad["states"][1] = math.nan
    bad["rewards"][1] = math.nan
    bad["hidden"][0][:, 1] = math.nan
    buffer.add(**bad)
    buffer.add(**step(1))
    buffer.clear_env(1)
    assert buffer.counts.tolist() == [2, 0, 2]
    assert bool(buffer.next_starts[1])
    buffer.compute_advantages_and_returns(torch.zeros(ENVS))
    batch = buffer.get_batched_sequences("cpu", processes=ALONE)
    assert len(batch.valid) == ENVS - 1  # nothing is left of it
    buffer.add_single(1, **of_env(step(2), 1))
    buffer.compute_advantages_and_returns(torch.zeros(ENVS))
    batch = buffer.get_batched_sequences("cpu")
    for tensor in (batch.states, batch.advantages, batch.returns, *batch.hidden):
        assert bool(tensor.isfinite().all())


def test_padding_has_zero_states_and_the_canonical_action_whatever_was_there() -> None:
    buffer = make_buffer()
    for time in range(TIME):
        buffer.add(**step(time))
    buffer.reset()
    buffer.add(**step(9))
    buffer.compute_advantages_and_returns(torch.zeros(ENVS))
    batch = buffer.get_batched_sequences("cpu")
    padding = ~batch.valid
    assert int(padding.sum()) == ENVS * (TIME - 1)
    assert bool((batch.states[padding] == 0).all())
    assert bool((batch.actions[padding] == CANONICAL_ACTION).all())
    assert bool(batch.masks[padding][..., CANONICAL_ACTION].all())
    assert int(batch.masks[padding].sum()) == int(padding.sum()) * HEADS
    assert not bool(batch.starts[padding].any())


def test_a_batch_is_a_copy_and_values_are_detached() -> None:
    buffer = make_buffer()
    attached = step(0)
    attached["values"].requires_grad_()
    buffer.add(**attached)
    buffer.compute_advantages_and_returns(torch.zeros(ENVS))
    batch = buffer.get_batched_sequences("cpu")
    assert not batch.values.requires_grad
    before = batch.states.clone()
    buffer.reset()
    buffer.add(**step(5))
    assert torch.equal(batch.states, before)


FIELDS = [name for name in step(0) if name != "hidden"]


@pytest.mark.parametrize("field", FIELDS)
def test_a_wrong_shape_type_or_device_is_refused_by_the_name_of_the_field(field: str) -> None:
    good = step(0)
    value = good[field]
    other = torch.float64 if value.dtype != torch.float64 else torch.float32
    wrongs = (value[:-1], value[..., None], value.to(other), value.to("meta"))
    for wrong in wrongs:
        with pytest.raises(RolloutError, match=rf"'{field}'; given: .*; valid: "):
            make_buffer().add(**(good | {field: wrong}))
    with pytest.raises(RolloutError, match=f"unknown or missing: {field}"):
        make_buffer().add(**{name: v for name, v in good.items() if name != field})


@pytest.mark.parametrize("part", [0, 1])
def test_hidden_states_of_a_wrong_batch_are_refused(part: int) -> None:
    whole = step(0)
    single = of_env(whole, 0)
    with pytest.raises(RolloutError, match=rf"hidden h.*valid: .*\[1, 1, {HIDDEN}\]"):
        make_buffer().add_single(0, **(single | {"hidden": whole["hidden"]}))
    wrong = list(whole["hidden"])
    wrong[part] = wrong[part][..., :-1]
    with pytest.raises(RolloutError, match=rf"hidden {'hc'[part]}"):
        make_buffer().add(**(whole | {"hidden": tuple(wrong)}))


def test_misuse_is_refused_with_a_sentence() -> None:
    buffer = make_buffer()
    with pytest.raises(RolloutError, match="unknown or missing: reward"):
        buffer.add(**step(0), reward=torch.zeros(ENVS))
    with pytest.raises(RolloutError, match="is empty"):
        buffer.get_batched_sequences("cpu")
    with pytest.raises(RolloutError, match="no step"):
        buffer.end_episode(0)
    with pytest.raises(RolloutError, match="valid: 0 to 2"):
        buffer.clear_env(ENVS)
    with pytest.raises(RolloutError, match="no such field"):
        buffer["reward"]
    buffer.add(**step(0))
    with pytest.raises(RolloutError, match="not computed"):
        buffer.get_batched_sequences("cpu")
    with pytest.raises(RolloutError, match=r"last_values.*\[3\]"):
        buffer.compute_advantages_and_returns(torch.zeros(ENVS + 1))
    cut = step(0, cut=(2,))
    cut["bootstraps"][2] = math.nan
    buffer.add(**cut)
    buffer.compute_advantages_and_returns(torch.zeros(ENVS))
    with pytest.raises(RolloutError, match=r"no value; given: environments \[2\]"):
        buffer.get_batched_sequences("cpu")
    buffer.reset()
    closed = step(0)
    closed["masks"][1, 2] = False
    buffer.add(**closed)
    buffer.compute_advantages_and_returns(torch.zeros(ENVS))
    with pytest.raises(InvalidStateMachineError, match=r"'blueprint' .*row \[1, 0\]"):
        buffer.get_batched_sequences("cpu")
    with pytest.raises(RolloutError, match="middle of an episode"):
        buffer.start_episode(0)
    with pytest.raises(RolloutError, match="needs room"):
        TamiyoRolloutBuffer(SPACE, STATE, 0)
    while not buffer.full:
        buffer.add(**step(1))
    with pytest.raises(RolloutError, match="Environment 0 is full"):
        buffer.add(**step(2))
    with pytest.raises(RolloutError, match="Environment 2 is full"):
        buffer.add_single(2, **of_env(step(2), 2))


class Lists:
    """What a buffer should hold, as plain lists: for each environment its steps since it was
    cleared, and whether the next one begins an episode."""

    def __init__(self, envs: int) -> None:
        self.steps: list[list[tuple[float, bool]]] = [[] for _ in range(envs)]
        self.starts = [True] * envs

    def add(self, env: int, number: float, ended: bool) -> None:
        self.steps[env].append((number, self.starts[env]))
        self.starts[env] = ended

    def clear(self, env: int) -> None:
        self.steps[env], self.starts[env] = [], True

    def reset(self) -> None:
        self.steps = [[] for _ in self.steps]


COMMANDS = st.one_of(
    st.tuples(st.just("add"), st.none() | st.lists(st.booleans(), min_size=4, max_size=4)),
    st.tuples(st.sampled_from(["add_single", "clear_env"]), st.integers(0, 3)),
    st.tuples(st.just("reset"), st.none()),
)


@given(
    st.integers(1, 4),
    st.lists(COMMANDS, min_size=4, max_size=25),
    st.lists(st.booleans(), min_size=4, max_size=4),
)
@example(
    1, [("add", None), ("add", None), ("clear_env", 0), ("add_single", 0), ("add", None)], [False]
)
def test_a_buffer_holds_what_lists_would_whatever_is_mixed(
    envs: int, commands: list[tuple[str, Any]], ends: list[bool]
) -> None:
    buffer, lists = make_buffer(envs), Lists(envs)
    for number, (command, given_) in enumerate(commands, 1):
        ended = tuple(env for env in range(envs) if ends[env])
        now = step(number, ended=ended, envs=envs)
        now["rewards"].fill_(number)
        if command == "reset":
            buffer.reset()
            lists.reset()
        elif command == "clear_env":
            buffer.clear_env(given_ % envs)
            lists.clear(given_ % envs)
        else:
            rows = [given_ % envs] if command == "add_single" else list(range(envs))
            if command == "add" and given_ is not None:
                rows = [env for env in rows if given_[env]]
            full = any(len(lists.steps[env]) == TIME for env in rows)
            with pytest.raises(RolloutError, match="is full") if full else nullcontext():
                if command == "add_single":
                    buffer.add_single(rows[0], **of_env(now, rows[0]))
                else:
                    active = None if given_ is None else torch.tensor(given_[:envs])
                    buffer.add(**now, active=active)
            if not full:
                for env in rows:
                    lists.add(env, number, env in ended)
        held = [len(steps) for steps in lists.steps]
        assert buffer.counts.tolist() == held
        assert len(buffer) == sum(held)
        assert buffer.full == (sum(held) == envs * TIME)
        assert buffer.longest >= max(held)
        assert buffer.next_starts.tolist() == lists.starts
        for env, steps in enumerate(lists.steps):
            assert buffer["rewards"][env, : len(steps)].tolist() == [n for n, _ in steps]
            assert buffer["starts"][env, : len(steps)].tolist() == [s for _, s in steps]


def test_what_is_packed_comes_out_as_it_went_in_whatever_the_types_and_shapes() -> None:
    tensors = {
        "flags": torch.rand(3, 5) < 0.5,
        "numbers": torch.randn(7, 2).t(),  # not contiguous
        "counts": torch.arange(11),
        "wide": torch.randn(1, dtype=torch.float64),
        "nothing": torch.empty(0, 4),
    }
    row = packed(tensors)
    assert row.dtype == torch.uint8
    found = unpacked(row, tensors)
    assert list(found) == list(tensors)
    for name, tensor in tensors.items():
        assert torch.equal(found[name], tensor), name
        assert found[name].dtype == tensor.dtype
    tensors["counts"].zero_()  # the packed row is a copy
    assert int(found["counts"].sum()) == sum(range(11))


def test_nothing_is_packed_on_the_way_to_the_same_kind_of_device() -> None:
    tensors = {"numbers": torch.randn(3)}
    assert sent(tensors, torch.device("cpu"))["numbers"] is tensors["numbers"]
