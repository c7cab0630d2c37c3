"""Tasks: every preset loads, fits its host and can be learned from."""

from dataclasses import replace
from itertools import combinations

import pytest
import torch
from torch.nn.functional import cross_entropy

from esper.leyline import Actions, Blend
from esper.leyline.constants import DEFAULT_EPISODE_LENGTH
from esper.leyline.errors import DataError, DuplicateNameError, EsperError, UnknownNameError
from esper.tolaria import tasks
from esper.tolaria.data.removed_sets import BUILT_IN_SETS, REMOVED_SETS
from esper.tolaria.data.splits import Split, Splits
from esper.tolaria.random_streams import orders
from esper.tolaria.tasks import (
    Task,
    find_task,
    mean_loss,
    population_of,
    register_task,
    task_names,
)

PRESETS = ("mnist1d", "mnist1d_mlp", "digits", "stdlib")


def toy(seed: int) -> Splits:
    source = torch.Generator().manual_seed(seed)
    inputs = torch.randn(30, 7, generator=source)
    return Splits.from_tensors(inputs, torch.arange(30) % 3)


TOY = Task(
    name="toy",
    summary="Noise.",
    load=toy,
    host="mlp",
    host_sizes={"features": 7, "classes": 3, "width": 4},
)


def test_the_presets_are_there() -> None:
    assert task_names()[: len(PRESETS)] == PRESETS


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_loads_and_its_host_learns_from_a_batch(name: str) -> None:
    task = find_task(name)
    splits = task.load_data(seed=0)
    torch.manual_seed(0)
    host = task.build_host()
    order = orders(torch.tensor([1]), 0, splits.train.samples, task.batch_size)[0]
    inputs, labels = splits.train.take(order[: task.batch_size])
    optimizer = torch.optim.Adam(host.parameters(), lr=task.learning_rate)
    losses = []
    for _ in range(8):
        optimizer.zero_grad()
        loss = mean_loss(host(inputs), labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    assert task.episode_length == DEFAULT_EPISODE_LENGTH
    assert task.budget_params() == int(task.budget * sum(p.numel() for p in host.parameters()))


@pytest.mark.parametrize("name", PRESETS)
def test_the_same_seed_gives_the_same_data(name: str) -> None:
    task = find_task(name)
    first = task.load_data(0).fingerprint()
    assert task.load_data(0).fingerprint() == first
    assert task.load_data(1).fingerprint() != first


@pytest.mark.parametrize("name", [name for name in PRESETS if name != "stdlib"])
def test_no_sample_is_in_two_splits(name: str) -> None:
    splits = find_task(name).load_data(0).named()
    rows = [{row.numpy().tobytes() for row in part.inputs} for part in splits.values()]
    for one, other in combinations(rows, 2):
        assert not one & other


def test_the_garden_has_forty_batches_of_fifty_and_the_samples_of_the_pilot() -> None:
    task = find_task("mnist1d")
    assert (task.batch_size, task.batches_per_epoch) == (50, 40)
    counts = [part.samples for part in task.load_data().named().values()]
    assert counts == [4000, 2000, 4000]


def test_a_misspelt_task_is_suggested() -> None:
    with pytest.raises(UnknownNameError, match="did you mean 'digits'"):
        find_task("digit")


def test_an_own_task_is_registered_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks, "_REGISTRY", dict(tasks._REGISTRY))
    assert register_task(TOY) is TOY
    assert find_task("toy") is TOY
    assert task_names()[-1] == "toy"
    with pytest.raises(DuplicateNameError, match="'toy' is already registered"):
        register_task(replace(TOY, summary="Other noise."))


def test_tasks_are_values_that_can_be_compared_and_hashed() -> None:
    assert {TOY, replace(TOY)} == {TOY}
    assert replace(TOY, batch_size=7) != TOY


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"name": "my task"}, "must be an identifier"),
        ({"host": "conv3d"}, "did you mean 'conv"),
        ({"batch_size": 0}, "is impossible: .* out of range"),
        ({"batches_per_epoch": 0}, "is impossible: .* out of range"),
        ({"episode_length": 0}, "is impossible: .* out of range"),
        ({"budget": -1.0}, "is impossible: .* out of range"),
        ({"budget": float("nan")}, "is impossible: .* out of range"),
        ({"learning_rate": 0.0}, "is impossible: .* out of range"),
    ],
)
def test_an_impossible_task_is_refused(changes: dict[str, object], words: str) -> None:
    with pytest.raises(EsperError, match=words):
        replace(TOY, **changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"host_sizes": {"features": 8, "classes": 3}},
        {"host_sizes": {"features": 7, "classes": 4}},
        {"host": "conv2d", "host_sizes": {}},
    ],
)
def test_a_host_that_does_not_fit_the_data_is_refused(changes: dict[str, object]) -> None:
    with pytest.raises(DataError, match="does not fit its data") as caught:
        replace(TOY, **changes).load_data()
    assert "\n" not in str(caught.value)


def test_a_size_that_the_host_does_not_have_is_refused() -> None:
    task = replace(TOY, host_sizes={"features": 7, "outputs": 3})
    with pytest.raises(EsperError, match=r"'mlp' of task 'toy' cannot be built; .* 'outputs'"):
        task.load_data()


def test_a_host_of_tokens_is_refused_where_a_sample_has_one_label() -> None:
    with pytest.raises(DataError, match=r"does not fit its data; .* valid: \[1, 3\], one logit"):
        replace(TOY, host="gpt", host_sizes={}).load_data()


def test_a_token_without_an_embedding_is_refused() -> None:
    def load(seed: int) -> Splits:
        tokens = torch.arange(60).view(10, 6)
        return Splits.from_tensors(tokens, tokens % 9, classes=9)

    task = Task(
        name="tokens",
        summary="Tokens.",
        load=load,
        host="gpt",
        host_sizes={"vocabulary": 9, "context": 6, "width": 8, "heads": 2},
    )
    with pytest.raises(DataError, match="no embedding for a token; given: 59; valid: 0 to 8"):
        task.load_data()


@pytest.mark.parametrize("name", REMOVED_SETS)
def test_removed_data_set_is_refused_with_alternatives(name: str) -> None:
    with pytest.raises(DataError) as caught:
        find_task(name)
    message = str(caught.value)
    assert f"removed in 0.2.0, and with it the data set {name!r}" in message
    assert "built-in data sets digits, mnist1d, stdlib" in message
    assert "FILE.py:FUNCTION" in message
    assert "28b7a14" in message


def test_name_of_removed_data_set_can_be_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks, "_REGISTRY", dict(tasks._REGISTRY))
    task = register_task(replace(TOY, name="mnist"))
    assert find_task("mnist") is task


def test_built_in_data_sets_are_those_of_the_tasks() -> None:
    assert set(BUILT_IN_SETS) == set(tasks._DATA)


@pytest.mark.parametrize("shape", [(6,), (6, 4)])
def test_the_loss_is_the_mean_over_all_labels(shape: tuple[int, ...]) -> None:
    source = torch.Generator().manual_seed(0)
    logits = torch.randn(*shape, 5, generator=source)
    labels = torch.randint(5, shape, generator=source)
    by_hand = torch.stack(
        [cross_entropy(x, y) for x, y in zip(logits.view(-1, 5), labels.view(-1), strict=True)]
    )
    torch.testing.assert_close(mean_loss(logits, labels), by_hand.mean())


def test_a_named_task_trains_and_grows_within_its_budget() -> None:
    population = population_of("mnist1d_mlp", 3, seed=1)
    before = population.evaluate().loss
    actions = {"op": 1, "slot": 0, "blend": int(Blend.IMMEDIATE)}
    convpool = population.catalogue.index("convpool")
    population.apply(Actions.of(population.space, 3, blueprint=convpool, **actions))
    for _ in range(2):
        population.train_epoch()
        population.pass_time()
    assert bool((population.evaluate().loss < before).all())
    assert int(population.budget[0]) == find_task("mnist1d_mlp").budget_params()


def test_a_language_task_runs_fused_and_every_environment_learns() -> None:
    task = find_task("stdlib")

    def shortened(seed: int) -> Splits:
        whole = task.load(seed)
        return replace(whole, validation=Split(*(part[:64] for part in whole.validation)))

    population = population_of(replace(task, load=shortened), 2)
    population.feed.batches = 3
    first = population.train_epoch().loss
    population.pass_time()
    assert bool((population.train_epoch().loss < first).all())
    assert bool((population.evaluate().accuracy > 5).all())


def test_an_unknown_task_is_refused_with_the_one_that_was_meant() -> None:
    with pytest.raises(UnknownNameError, match="did you mean 'mnist1d"):
        population_of("mnist1dd", 2)
