"""The rollout buffer: stored steps, rejected steps, and episode boundaries.

Shapes: `E` environments, `T` time, `F` state features, `H` heads, `A` actions, `L` layers, `D`
hidden size.
"""

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
    ActionSpace,
)
from esper.simic.agent import NonFiniteError, RolloutError, TamiyoRolloutBuffer
from esper.simic.agent.rollout_buffer import pack_bytes, to_device, unpack_bytes
from esper.tamiyo import InvalidStateMachineError, independent_heads
from tests.tamiyo.spaces import esper_space

NUM_ENVS = 3
NUM_STEPS = DEFAULT_EPISODE_LENGTH // 5
STATE_DIM = 4
HIDDEN_DIM = DEFAULT_LSTM_HIDDEN_DIM // 16
SPACE = esper_space()
NUM_HEADS = len(SPACE)
WIDEST = max(SPACE.sizes)

Step = dict[str, Any]  # the arguments of `add_batch`

# Arguments of `add`, and the fields of `add_batch` that they are a row of.
FIELD_OF_ARGUMENT = {
    "state": "states",
    "actions": "actions",
    "action_masks": "action_masks",
    "log_probs": "log_probs",
    "value": "values",
    "reward": "rewards",
    "terminal": "terminals",
    "truncated": "truncations",
    "bootstrap_value": "bootstrap_values",
}


def make_buffer(num_envs: int = NUM_ENVS, **sizes: Any) -> TamiyoRolloutBuffer:
    arguments = {
        "num_envs": num_envs,
        "max_steps_per_env": NUM_STEPS,
        "state_dim": STATE_DIM,
        "lstm_hidden_dim": HIDDEN_DIM,
        **sizes,
    }
    return TamiyoRolloutBuffer(SPACE, **arguments)


def random_step(
    seed: int,
    terminal_envs: tuple[int, ...] = (),
    truncated_envs: tuple[int, ...] = (),
    num_envs: int = NUM_ENVS,
) -> Step:
    """Return one step of all environments."""
    generator = torch.Generator().manual_seed(seed)

    def random_numbers(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    def flags(envs: tuple[int, ...]) -> Tensor:
        return torch.tensor([env in envs for env in range(num_envs)])

    return {
        "states": random_numbers(num_envs, STATE_DIM),
        "actions": torch.zeros(num_envs, NUM_HEADS, dtype=torch.int64),
        "action_masks": torch.ones(num_envs, NUM_HEADS, WIDEST, dtype=torch.bool),
        "log_probs": random_numbers(num_envs, NUM_HEADS),
        "values": random_numbers(num_envs),
        "rewards": random_numbers(num_envs),
        "terminals": flags(terminal_envs),
        "truncations": flags(truncated_envs),
        "bootstrap_values": random_numbers(num_envs) * flags(truncated_envs),
        "hidden": (
            random_numbers(DEFAULT_LSTM_LAYERS, num_envs, HIDDEN_DIM),
            random_numbers(DEFAULT_LSTM_LAYERS, num_envs, HIDDEN_DIM),
        ),
    }


def step_of_env(step: Step, env_id: int) -> dict[str, Any]:
    """Return the arguments of `add` for one environment of a step."""
    h, c = step["hidden"]
    arguments = {name: step[field][env_id] for name, field in FIELD_OF_ARGUMENT.items()}
    return {
        "env_id": env_id,
        **arguments,
        "hidden_h": h[:, env_id : env_id + 1],
        "hidden_c": c[:, env_id : env_id + 1],
    }


def test_default_sizes_are_those_of_leyline() -> None:
    buffer = TamiyoRolloutBuffer(SPACE, state_dim=STATE_DIM, num_envs=NUM_ENVS)
    assert buffer.max_steps_per_env == DEFAULT_EPISODE_LENGTH
    assert buffer.lstm_hidden_dim == DEFAULT_LSTM_HIDDEN_DIM
    assert buffer.lstm_layers == DEFAULT_LSTM_LAYERS


# --- adding steps -------------------------------------------------------------------------------


def test_add_and_add_batch_store_the_same_steps() -> None:
    batched = make_buffer()
    one_by_one = make_buffer()
    for time in range(NUM_STEPS):
        step = random_step(time, terminal_envs=(time % NUM_ENVS,))
        batched.add_batch(**step)
        for env_id in range(NUM_ENVS):
            one_by_one.add(**step_of_env(step, env_id))
    for buffer in (batched, one_by_one):
        assert buffer.is_full
        assert len(buffer) == NUM_ENVS * NUM_STEPS
        buffer.compute_advantages_and_returns()
    first, second = batched.get_batched_sequences(), one_by_one.get_batched_sequences()
    for name in vars(first):
        assert torch.equal(getattr(first, name), getattr(second, name)), name
    assert torch.equal(batched.hidden_h, one_by_one.hidden_h)
    assert torch.equal(batched.hidden_c, one_by_one.hidden_c)


def test_add_accepts_python_numbers() -> None:
    with_tensors, with_numbers = make_buffer(), make_buffer()
    arguments = step_of_env(random_step(0, truncated_envs=(1,)), 1)
    with_tensors.add(**arguments)
    for name in ("value", "reward", "terminal", "truncated", "bootstrap_value"):
        arguments[name] = arguments[name].item()
    with_numbers.add(**arguments)
    for name in ("values", "rewards", "terminals", "truncations", "bootstrap_values"):
        assert torch.equal(getattr(with_tensors, name), getattr(with_numbers, name)), name


def test_episodes_added_one_by_one_match_add_batch() -> None:
    """`start_episode` and `end_episode` mark the boundaries that `add_batch` takes from flags."""
    batched = make_buffer()
    by_episode = make_buffer()
    steps = [random_step(0), random_step(1, (0,), (1,)), random_step(2), random_step(3)]
    for step in steps:
        batched.add_batch(**step)
    for env_id in range(NUM_ENVS):
        by_episode.start_episode(env_id)
        for time, step in enumerate(steps):
            arguments = step_of_env(step, env_id)
            is_truncated = bool(arguments.pop("truncated"))
            is_terminal = bool(arguments.pop("terminal"))
            by_episode.add(**arguments)
            if is_terminal:
                by_episode.end_episode(env_id)
            if is_truncated:
                value = float(step["bootstrap_values"][env_id])
                by_episode.end_episode(env_id, truncated_value=value)
            if is_terminal or is_truncated:
                assert time == 1
                by_episode.start_episode(env_id)
    last_values = torch.randn(NUM_ENVS)
    for buffer in (batched, by_episode):
        buffer.compute_advantages_and_returns(last_values=last_values)
    first, second = batched.get_batched_sequences(), by_episode.get_batched_sequences()
    for name in vars(first):
        assert torch.equal(getattr(first, name), getattr(second, name)), name


def test_hidden_state_entering_each_step_is_stored() -> None:
    buffer = make_buffer()
    for time in range(NUM_STEPS):
        buffer.add_batch(**random_step(time))
    for time in range(NUM_STEPS):
        h, c = random_step(time)["hidden"]
        assert torch.equal(buffer.hidden_h[:, time].transpose(0, 1), h)
        assert torch.equal(buffer.hidden_c[:, time].transpose(0, 1), c)
    buffer.clear_env(1)
    for hidden in (buffer.hidden_h, buffer.hidden_c):
        assert not bool(hidden[1].any())
        assert bool(hidden[0].any())


def test_environments_may_have_different_step_counts() -> None:
    buffer = make_buffer()
    buffer.add(**step_of_env(random_step(0), 1))
    buffer.add_batch(**random_step(1))
    assert buffer.step_counts.tolist() == [1, 2, 1]
    assert torch.equal(buffer.states[1, 1], random_step(1)["states"][1])
    assert torch.equal(buffer.states[2, 0], random_step(1)["states"][2])
    buffer.compute_advantages_and_returns()
    batch = buffer.get_batched_sequences()
    assert torch.equal(batch.valid, torch.arange(NUM_STEPS) < torch.tensor([[1], [2], [1]]))
    assert torch.equal(batch.initial_hidden_h[:, 1], random_step(0)["hidden"][0][:, 1])
    assert torch.equal(batch.initial_hidden_h[:, 0], random_step(1)["hidden"][0][:, 0])


def test_inactive_environments_store_nothing() -> None:
    buffer, reference = make_buffer(), make_buffer()
    buffer.add_batch(**random_step(0, terminal_envs=(1,)))
    for time in range(1, NUM_STEPS):
        step = random_step(time)
        step["rewards"][1] = math.nan
        buffer.add_batch(**step, active=torch.tensor([True, False, True]))
    for env_id in range(NUM_ENVS):
        num_steps = 1 if env_id == 1 else NUM_STEPS
        for time in range(num_steps):
            terminal_envs = (1,) if time == 0 else ()
            reference.add(**step_of_env(random_step(time, terminal_envs), env_id))
    expected_counts = [NUM_STEPS, 1, NUM_STEPS]
    assert buffer.step_counts.tolist() == reference.step_counts.tolist() == expected_counts
    assert torch.equal(buffer.next_starts, reference.next_starts)
    buffer.compute_advantages_and_returns()
    reference.compute_advantages_and_returns()
    first, second = buffer.get_batched_sequences(), reference.get_batched_sequences()
    for name in vars(first):
        assert torch.equal(getattr(first, name), getattr(second, name)), name
    with pytest.raises(RolloutError, match="Environment 2 is full"):
        buffer.add_batch(**random_step(9), active=torch.tensor([False, True, True]))
    with pytest.raises(RolloutError, match="'active'"):
        buffer.add_batch(**random_step(9), active=torch.ones(NUM_ENVS))


def test_batch_is_a_copy_without_gradient() -> None:
    buffer = make_buffer()
    step = random_step(0)
    step["values"].requires_grad_()
    buffer.add_batch(**step)
    buffer.compute_advantages_and_returns()
    batch = buffer.get_batched_sequences()
    assert not batch.values.requires_grad
    states = batch.states.clone()
    buffer.reset()
    buffer.add_batch(**random_step(5))
    assert torch.equal(batch.states, states)


# --- episode boundaries -------------------------------------------------------------------------


def test_episode_starts_follow_ends_and_survive_reset() -> None:
    buffer = make_buffer()
    assert bool(buffer.next_starts.all())
    buffer.add_batch(**random_step(0, terminal_envs=(0,), truncated_envs=(1,)))
    assert buffer.next_starts.tolist() == [True, True, False]
    buffer.add_batch(**random_step(1))
    buffer.compute_advantages_and_returns()
    starts = buffer.get_batched_sequences().starts
    assert starts[:, :2].tolist() == [[True, True], [True, True], [True, False]]
    buffer.end_episode(2)
    buffer.reset()
    assert len(buffer) == 0
    assert buffer.next_starts.tolist() == [False, False, True]
    buffer.start_episode(0)
    assert buffer.next_starts.tolist() == [True, False, True]


def test_end_episode_has_the_effect_of_flags() -> None:
    with_flags, with_calls = make_buffer(), make_buffer()
    for time in range(3):
        terminal_envs = (0,) if time == 1 else ()
        truncated_envs = (1,) if time == 1 else ()
        with_flags.add_batch(**random_step(time, terminal_envs, truncated_envs))
        with_calls.add_batch(**random_step(time))
        if time == 1:
            with_calls.end_episode(0)
            value = float(with_flags.bootstrap_values[1, 1])
            with_calls.end_episode(1, truncated_value=value)
    for buffer in (with_flags, with_calls):
        buffer.compute_advantages_and_returns(DEFAULT_GAMMA, last_values=torch.ones(NUM_ENVS))
    assert torch.equal(with_flags.advantages, with_calls.advantages)
    assert torch.equal(with_flags.returns, with_calls.returns)
    expected_returns = with_flags.advantages + with_flags.values
    torch.testing.assert_close(with_flags.returns, expected_returns)


def test_last_values_default_to_zero() -> None:
    buffers = make_buffer(), make_buffer()
    for buffer in buffers:
        buffer.add_batch(**random_step(0))
    buffers[0].compute_advantages_and_returns()
    buffers[1].compute_advantages_and_returns(last_values=torch.zeros(NUM_ENVS))
    assert torch.equal(buffers[0].returns, buffers[1].returns)


def test_clear_env_discards_steps_and_hidden_state_of_one() -> None:
    buffer = make_buffer()
    step = random_step(0)
    step["states"][1] = math.nan
    step["rewards"][1] = math.nan
    step["hidden"][0][:, 1] = math.nan
    buffer.add_batch(**step)
    buffer.add_batch(**random_step(1))
    buffer.clear_env(1)
    assert buffer.step_counts.tolist() == [2, 0, 2]
    assert bool(buffer.next_starts[1])
    buffer.compute_advantages_and_returns()
    buffer.normalize_advantages()
    batch = buffer.get_batched_sequences()
    assert len(batch) == NUM_ENVS - 1
    assert bool(batch.advantages.isfinite().all())
    buffer.add(**step_of_env(random_step(2), 1))
    buffer.compute_advantages_and_returns()
    batch = buffer.get_batched_sequences()
    for tensor in (batch.states, batch.advantages, batch.returns, *batch.initial_hidden):
        assert bool(tensor.isfinite().all())


def test_padding_contains_zero_states_and_canonical_action() -> None:
    buffer = make_buffer()
    for time in range(NUM_STEPS):
        buffer.add_batch(**random_step(time))
    buffer.reset()
    buffer.add_batch(**random_step(9))
    buffer.compute_advantages_and_returns()
    batch = buffer.get_batched_sequences()
    padding = ~batch.valid
    assert int(padding.sum()) == NUM_ENVS * (NUM_STEPS - 1)
    assert bool((batch.states[padding] == 0).all())
    assert bool((batch.actions[padding] == CANONICAL_ACTION).all())
    assert bool(batch.action_masks[padding][..., CANONICAL_ACTION].all())
    assert int(batch.action_masks[padding].sum()) == int(padding.sum()) * NUM_HEADS
    assert not bool(batch.starts[padding].any())


def test_normalize_advantages_changes_valid_steps_only() -> None:
    buffer = make_buffer()
    for time in range(2):
        buffer.add_batch(**random_step(time))
    buffer.compute_advantages_and_returns()
    returns = buffer.returns.clone()
    expected = buffer.advantages[:, :2].double()
    expected = (expected - expected.mean()) / expected.std(correction=0)
    buffer.normalize_advantages()
    normalized = buffer.advantages
    torch.testing.assert_close(normalized[:, :2].double(), expected, atol=1e-5, rtol=1e-5)
    assert not bool(normalized[:, 2:].any())
    assert torch.equal(buffer.returns, returns)


# --- shapes of the batch ------------------------------------------------------------------------


@st.composite
def random_layouts(draw: st.DrawFn) -> dict[str, Any]:
    """Sizes of a buffer, step counts of its environments, and a sequence length."""
    num_steps = draw(st.sampled_from([1, 4, 6, 12]))
    num_envs = draw(st.integers(1, 5))
    divisors = [length for length in range(1, num_steps + 1) if num_steps % length == 0]
    head_sizes = draw(st.lists(st.integers(1, 6), min_size=1, max_size=5))
    counts = draw(st.lists(st.integers(0, num_steps), min_size=num_envs, max_size=num_envs))
    counts[draw(st.integers(0, num_envs - 1))] = num_steps  # at least one is not empty
    return {
        "space": independent_heads(head_sizes),
        "num_steps": num_steps,
        "state_dim": draw(st.integers(1, 7)),
        "lstm_layers": draw(st.integers(0, 3)),
        "counts": counts,
        "length": draw(st.sampled_from([None, *divisors])),
    }


def fill_random_layout(
    space: ActionSpace,
    num_steps: int,
    state_dim: int,
    lstm_layers: int,
    counts: list[int],
    generator: torch.Generator,
) -> TamiyoRolloutBuffer:
    buffer = TamiyoRolloutBuffer(
        space,
        num_envs=len(counts),
        max_steps_per_env=num_steps,
        state_dim=state_dim,
        lstm_hidden_dim=HIDDEN_DIM,
        lstm_layers=lstm_layers,
    )
    for env_id, count in enumerate(counts):
        for _ in range(count):
            buffer.add(
                env_id=env_id,
                state=torch.randn(state_dim, generator=generator),
                actions=torch.zeros(len(space), dtype=torch.int64),
                action_masks=torch.ones(len(space), max(space.sizes), dtype=torch.bool),
                log_probs=torch.randn(len(space), generator=generator),
                value=0.5,
                reward=1.0,
                hidden_h=torch.randn(lstm_layers, 1, HIDDEN_DIM, generator=generator),
                hidden_c=torch.randn(lstm_layers, 1, HIDDEN_DIM, generator=generator),
                terminal=bool(torch.rand((), generator=generator) < 0.2),
            )
    buffer.compute_advantages_and_returns()
    return buffer


@given(random_layouts(), st.integers(0, 1000))
def test_batch_has_documented_shapes_dtypes_and_device(layout: dict[str, Any], seed: int) -> None:
    length = layout.pop("length")
    space, counts = layout["space"], layout["counts"]
    buffer = fill_random_layout(**layout, generator=torch.Generator().manual_seed(seed))
    batch = buffer.get_batched_sequences(length=length)

    time = length or layout["num_steps"]
    num_envs_with_steps = sum(count > 0 for count in counts)
    rows = num_envs_with_steps * (layout["num_steps"] // time)
    heads, widest = len(space), max(space.sizes)
    hidden_shape = (layout["lstm_layers"], rows, HIDDEN_DIM)
    expected = {
        "states": ((rows, time, layout["state_dim"]), torch.float32),
        "actions": ((rows, time, heads), torch.int64),
        "action_masks": ((rows, time, heads, widest), torch.bool),
        "log_probs": ((rows, time, heads), torch.float32),
        "values": ((rows, time), torch.float32),
        "advantages": ((rows, time), torch.float32),
        "returns": ((rows, time), torch.float32),
        "valid": ((rows, time), torch.bool),
        "head_mask": ((rows, time, heads), torch.bool),
        "entropy_mask": ((rows, time, heads), torch.bool),
        "starts": ((rows, time), torch.bool),
        "initial_hidden_h": (hidden_shape, torch.float32),
        "initial_hidden_c": (hidden_shape, torch.float32),
    }
    if not space.is_always_relevant:
        expected["entropy_masks"] = ((rows, time, heads, widest), torch.bool)
        expected["entropy_conditions"] = ((rows, time, heads), torch.int64)
    assert {name for name, tensor in vars(batch).items() if tensor is not None} == expected.keys()
    for name, (shape, dtype) in expected.items():
        tensor = getattr(batch, name)
        assert tuple(tensor.shape) == shape, name
        assert tensor.dtype == dtype, name
        assert tensor.device == torch.device("cpu"), name
    assert len(batch) == rows
    assert int(batch.valid.sum()) == sum(counts) == len(buffer)

    # The steps are those of the environments, in order of time.
    envs = [env for env, count in enumerate(counts) if count]
    states = batch.states.reshape(len(envs), -1, layout["state_dim"])
    h, c = (part.unflatten(1, (len(envs), -1)) for part in batch.initial_hidden)
    for row, env in enumerate(envs):
        count = counts[env]
        assert torch.equal(states[row, :count], buffer.states[env, :count])
        for part in range(layout["num_steps"] // time):
            is_used = part * time < count
            expected_h = buffer.hidden_h[env, part * time] * is_used
            expected_c = buffer.hidden_c[env, part * time] * is_used
            assert torch.equal(h[:, row, part], expected_h)
            assert torch.equal(c[:, row, part], expected_c)


def test_empty_rollout_gives_empty_batch_if_allowed() -> None:
    buffer = make_buffer()
    buffer.compute_advantages_and_returns()
    batch = buffer.get_batched_sequences(allow_empty=True)
    assert len(batch) == 0
    assert batch.states.shape == (0, NUM_STEPS, STATE_DIM)
    assert batch.initial_hidden_h.shape == (DEFAULT_LSTM_LAYERS, 0, HIDDEN_DIM)
    assert batch.split(3) == []


# --- errors -------------------------------------------------------------------------------------

FIELDS = list(FIELD_OF_ARGUMENT.values())


def wrong_tensors(tensor: Tensor) -> list[Tensor]:
    """Return tensors with another shape, another dtype, and on another device."""
    other_dtype = torch.float64 if tensor.dtype != torch.float64 else torch.float32
    return [tensor[..., None], tensor.to(other_dtype), tensor.to("meta")]


@pytest.mark.parametrize("field", FIELDS)
def test_add_batch_with_wrong_tensor_names_the_field(field: str) -> None:
    step = random_step(0)
    for wrong in (step[field][:-1], *wrong_tensors(step[field])):
        with pytest.raises(RolloutError, match=rf"'{field}'; given: .*; valid: "):
            make_buffer().add_batch(**(step | {field: wrong}))
    incomplete = {name: tensor for name, tensor in step.items() if name != field}
    with pytest.raises(RolloutError, match=f"unknown or missing: {field}"):
        make_buffer().add_batch(**incomplete)


@pytest.mark.parametrize(("argument", "field"), FIELD_OF_ARGUMENT.items())
def test_add_with_wrong_tensor_names_the_field(argument: str, field: str) -> None:
    arguments = step_of_env(random_step(0), 0)
    for wrong in wrong_tensors(arguments[argument]):
        buffer = make_buffer()
        with pytest.raises(RolloutError, match=rf"'{field}'; given: .*; valid: "):
            buffer.add(**(arguments | {argument: wrong}))
        assert len(buffer) == 0


@pytest.mark.parametrize("name", ["hidden_h", "hidden_c"])
def test_hidden_state_of_wrong_shape_raises(name: str) -> None:
    step = random_step(0)
    arguments = step_of_env(step, 0)
    batch_of_three = step["hidden"][0]
    with pytest.raises(RolloutError, match=rf"{name}.*valid: .*\[1, 1, {HIDDEN_DIM}\]"):
        make_buffer().add(**(arguments | {name: batch_of_three}))
    hidden = dict(zip(("hidden_h", "hidden_c"), step["hidden"], strict=True))
    hidden[name] = hidden[name][..., :-1]
    with pytest.raises(RolloutError, match=name):
        make_buffer().add_batch(**(step | {"hidden": tuple(hidden.values())}))


def test_methods_without_steps_raise() -> None:
    buffer = make_buffer()
    with pytest.raises(RolloutError, match="unknown or missing: reward"):
        buffer.add_batch(**random_step(0), reward=torch.zeros(NUM_ENVS))
    with pytest.raises(RolloutError, match="is empty"):
        buffer.get_batched_sequences()
    with pytest.raises(RolloutError, match="no step"):
        buffer.end_episode(0)
    with pytest.raises(RolloutError, match="valid: 0 to 2"):
        buffer.clear_env(NUM_ENVS)
    with pytest.raises(RolloutError, match="positive size"):
        make_buffer(num_envs=0)


def test_sequences_without_advantages_raise() -> None:
    buffer = make_buffer()
    buffer.add_batch(**random_step(0))
    for call in (buffer.get_batched_sequences, buffer.normalize_advantages, buffer.validate):
        with pytest.raises(RolloutError, match="not computed"):
            call()
    with pytest.raises(RolloutError, match=r"last_values.*\[3\]"):
        buffer.compute_advantages_and_returns(last_values=torch.zeros(NUM_ENVS + 1))


def test_truncation_without_bootstrap_value_raises() -> None:
    buffer = make_buffer()
    step = random_step(0, truncated_envs=(2,))
    step["bootstrap_values"][2] = math.nan
    buffer.add_batch(**step)
    buffer.compute_advantages_and_returns()
    with pytest.raises(RolloutError, match=r"no value; given: environments \[2\]"):
        buffer.get_batched_sequences()


def test_mask_without_legal_action_names_head_and_row() -> None:
    buffer = make_buffer()
    step = random_step(0)
    step["action_masks"][1, 2] = False
    buffer.add_batch(**step)
    buffer.compute_advantages_and_returns()
    with pytest.raises(InvalidStateMachineError, match=r"'blueprint' .*row \[1, 0\]"):
        buffer.get_batched_sequences()


def test_start_episode_inside_an_episode_raises() -> None:
    buffer = make_buffer()
    buffer.add_batch(**random_step(0))
    with pytest.raises(RolloutError, match="middle of an episode"):
        buffer.start_episode(0)


def test_full_buffer_rejects_steps() -> None:
    buffer = make_buffer()
    while not buffer.is_full:
        buffer.add_batch(**random_step(1))
    with pytest.raises(RolloutError, match="Environment 0 is full"):
        buffer.add_batch(**random_step(2))
    with pytest.raises(RolloutError, match="Environment 2 is full"):
        buffer.add(**step_of_env(random_step(2), 2))


def test_validate_checks_tensors_written_after_an_earlier_check() -> None:
    buffer = make_buffer()
    buffer.add_batch(**random_step(0))
    buffer.compute_advantages_and_returns()
    buffer.get_batched_sequences()
    buffer.states[1, 0, 2] = math.nan
    with pytest.raises(NonFiniteError, match="states of environment 1, step 0"):
        buffer.validate()


# --- random sequences of calls ------------------------------------------------------------------


class ReferenceBuffer:
    """The expected content of a buffer as plain lists: steps of each environment since `clear_env`.

    A step is its reward and whether it begins an episode.
    """

    def __init__(self, num_envs: int) -> None:
        self.steps: list[list[tuple[float, bool]]] = [[] for _ in range(num_envs)]
        self.next_starts = [True] * num_envs

    def add(self, env_id: int, reward: float, ends_episode: bool) -> None:
        self.steps[env_id].append((reward, self.next_starts[env_id]))
        self.next_starts[env_id] = ends_episode

    def clear_env(self, env_id: int) -> None:
        self.steps[env_id] = []
        self.next_starts[env_id] = True

    def reset(self) -> None:
        self.steps = [[] for _ in self.steps]


CALLS = st.one_of(
    st.tuples(st.just("add_batch"), st.none() | st.lists(st.booleans(), min_size=4, max_size=4)),
    st.tuples(st.sampled_from(["add", "clear_env"]), st.integers(0, 3)),
    st.tuples(st.just("reset"), st.none()),
)


@given(
    st.integers(1, 4),
    st.lists(CALLS, min_size=4, max_size=25),
    st.lists(st.booleans(), min_size=4, max_size=4),
)
@example(
    1,
    [("add_batch", None), ("add_batch", None), ("clear_env", 0), ("add", 0), ("add_batch", None)],
    [False],
)
def test_buffer_equals_lists_after_random_calls(
    num_envs: int, calls: list[tuple[str, Any]], ends_episode: list[bool]
) -> None:
    buffer = make_buffer(num_envs)
    reference = ReferenceBuffer(num_envs)
    terminal_envs = tuple(env for env in range(num_envs) if ends_episode[env])
    for number, (method, argument) in enumerate(calls, 1):
        if method == "reset":
            buffer.reset()
            reference.reset()
        elif method == "clear_env":
            buffer.clear_env(argument % num_envs)
            reference.clear_env(argument % num_envs)
        else:
            _add_to_both(buffer, reference, method, argument, number, terminal_envs)

        step_counts = [len(steps) for steps in reference.steps]
        assert buffer.step_counts.tolist() == step_counts
        assert len(buffer) == sum(step_counts)
        assert buffer.is_full == (sum(step_counts) == num_envs * NUM_STEPS)
        assert buffer.max_length >= max(step_counts)
        assert buffer.next_starts.tolist() == reference.next_starts
        for env, steps in enumerate(reference.steps):
            count = len(steps)
            rewards = [reward for reward, _ in steps]
            starts = [is_start for _, is_start in steps]
            assert buffer.rewards[env, :count].tolist() == rewards
            assert buffer.episode_starts[env, :count].tolist() == starts


def _add_to_both(
    buffer: TamiyoRolloutBuffer,
    reference: ReferenceBuffer,
    method: str,
    argument: Any,
    number: int,
    terminal_envs: tuple[int, ...],
) -> None:
    num_envs = buffer.num_envs
    step = random_step(number, terminal_envs, num_envs=num_envs)
    step["rewards"].fill_(number)
    envs = list(range(num_envs))
    active = None
    if method == "add":
        envs = [argument % num_envs]
    elif argument is not None:
        active = torch.tensor(argument[:num_envs])
        envs = [env for env in envs if argument[env]]
    is_full = any(len(reference.steps[env]) == NUM_STEPS for env in envs)
    with pytest.raises(RolloutError, match="is full") if is_full else nullcontext():
        if method == "add":
            buffer.add(**step_of_env(step, envs[0]))
        else:
            buffer.add_batch(**step, active=active)
    if not is_full:
        for env in envs:
            reference.add(env, number, env in terminal_envs)


# --- transfer -----------------------------------------------------------------------------------


def test_unpacked_tensors_equal_packed_ones() -> None:
    tensors = {
        "flags": torch.rand(3, 5) < 0.5,
        "transposed": torch.randn(7, 2).t(),
        "counts": torch.arange(11),
        "double": torch.randn(1, dtype=torch.float64),
        "empty": torch.empty(0, 4),
    }
    packed = pack_bytes(tensors)
    assert packed.dtype == torch.uint8
    unpacked = unpack_bytes(packed, tensors)
    assert list(unpacked) == list(tensors)
    for name, tensor in tensors.items():
        assert torch.equal(unpacked[name], tensor), name
        assert unpacked[name].dtype == tensor.dtype
    tensors["counts"].zero_()  # packing has copied the tensor
    assert int(unpacked["counts"].sum()) == sum(range(11))


def test_transfer_within_cpu_does_not_copy() -> None:
    tensors = {"numbers": torch.randn(3)}
    assert to_device(tensors, torch.device("cpu"))["numbers"] is tensors["numbers"]
