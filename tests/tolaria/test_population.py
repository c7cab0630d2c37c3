"""The fused population against N reference trainers, to the last digits."""

import copy

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from esper.kasmina import Isolation, blueprint_names
from esper.leyline import (
    Actions,
    Blend,
    EsperError,
    Lifecycle,
    LifecycleOp,
    SeedStage,
    UnknownNameError,
)
from esper.tolaria.cuda_graphs import Padding
from esper.tolaria.engine import cast_weights
from esper.tolaria.optimisers import AdamW, RowOptimiser, Sgd
from esper.tolaria.plan import HOST
from esper.tolaria.population import Population, extract
from esper.tolaria.stacked import Form, Params
from esper.tolaria.tasks import mean_loss
from tests.nightly import thinned
from tests.tolaria.twins import EVERY_HOST, HOSTS, Twins, draw_actions, make_population

OPTIMISERS: dict[str, RowOptimiser] = {"adamw": AdamW(), "sgd": Sgd()}
FAMILY = {"mlp": "dense", "conv1d": "conv1d", "conv2d": "conv2d", "gpt": "transformer"}
each_host = pytest.mark.parametrize("host", list(HOSTS))
every_host = pytest.mark.parametrize("host", list(EVERY_HOST))
each_isolation = pytest.mark.parametrize("isolation", list(Isolation))


def own_draws(population: Population, step: int):
    """Random numbers that environment i draws whatever the population around it."""
    from esper.tolaria.random_streams import uniform

    return lambda purpose: uniform(population.seeds, f"test {purpose}", step, 16)


# Every host with both isolations and both optimisers, and these with each other.
MIXED = [
    (host, isolation, list(OPTIMISERS)[(number + other) % 2], other)
    for number, host in enumerate(EVERY_HOST)
    for other, isolation in enumerate(Isolation)
]


@pytest.mark.parametrize(("host", "isolation", "optimiser", "draw"), MIXED)
def test_a_mixed_population_equals_its_reference_trainers_over_many_epochs(
    host: str, isolation: Isolation, optimiser: str, draw: int
) -> None:
    chosen = OPTIMISERS[optimiser]
    if host == "gpt" and optimiser == "adamw":
        # Norms make the gradients of what comes before them all but vanish; divided by nearly
        # nothing, their rounding would be what is compared.
        chosen = AdamW(epsilon=1e-4)
    population = make_population(
        host,
        7,
        batches=1 if host == "gpt" else 2,
        isolation=isolation,
        optimiser=chosen,
        rate=0.01 if optimiser == "adamw" else 0.05,
        decay=0.02,
    )
    twins = Twins(population)
    stages: set[int] = set()
    for epoch in range(9):
        actions = draw_actions(population.legal(), own_draws(population, 100 * draw + epoch))
        twins.apply(actions)
        losses, gradients, scores = twins.epoch()
        record = population.train_epoch()
        torch.testing.assert_close(record.loss, losses, rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(
            record.seed_gradient, gradients, rtol=1e-8, atol=1e-12, equal_nan=True
        )
        torch.testing.assert_close(population.evaluate().accuracy, scores.double())
        stages |= set(population.lifecycle.stage.flatten().tolist())
        population.pass_time()
        for each in twins.hosts:
            each.pass_time()
        if epoch % 3 == 2:  # what has come apart stays apart
            assert twins.difference() < 1e-9
    assert len(stages) >= 6, "the draw should visit most stages"


# Every host with each blend and with both isolations, and these with each other; a seed that is
# blended at once is never isolated.
GROWN = [
    (host, list(Isolation)[(number + int(blend)) % 2], blend)
    for number, host in enumerate(EVERY_HOST)
    for blend in Blend
]


@pytest.mark.parametrize(("host", "isolation", "blend"), GROWN)
def test_every_blueprint_equals_the_reference_in_every_stage(
    host: str, isolation: Isolation, blend: Blend
) -> None:
    names = blueprint_names(FAMILY[host])
    count = len(names)
    population = make_population(host, count, batches=1, isolation=isolation)

    def live(twins: Twins, epochs: range, script: dict[int, LifecycleOp]) -> None:
        fused = twins.population
        for epoch in epochs:
            if epoch in script:
                twins.apply(
                    Actions.of(
                        fused.space,
                        count,
                        op=int(script[epoch]),
                        slot=torch.arange(count) % 3,
                        blueprint=torch.arange(count),
                        blend=int(blend),
                    )
                )
            losses, _, _ = twins.epoch()
            torch.testing.assert_close(fused.train_epoch().loss, losses, rtol=1e-9, atol=1e-12)
            fused.pass_time()
            for each in twins.hosts:
                each.pass_time()
        assert twins.difference() < 1e-9

    script = {0: LifecycleOp.GERMINATE, 2: LifecycleOp.ADVANCE}
    if blend is Blend.IMMEDIATE:
        del script[2]
    young = Twins(population)
    live(young, range(3), script)
    live(young, range(3, 6), {})
    kept, pruned = young, copy.deepcopy(young)
    live(kept, range(6, 9), {6: LifecycleOp.FOSSILIZE})
    assert int(kept.population.lifecycle.at(SeedStage.FOSSILIZED).sum()) == count
    live(pruned, range(6, 9), {6: LifecycleOp.PRUNE})


@pytest.mark.parametrize("host", thinned(HOSTS, 2))
def test_an_environment_is_the_same_in_populations_of_1_7_and_64(host: str) -> None:
    def life(count: int, first: int, watched: int) -> dict[str, torch.Tensor]:
        population = make_population(host, count, first=first)
        for epoch in range(5):
            population.apply(draw_actions(population.legal(), own_draws(population, epoch)))
            population.train_epoch()
            population.pass_time()
        return extract(population, watched).state_dict()

    alone, few, many = life(1, 5, 0), life(7, 3, 2), life(64, 0, 5)
    for other in (few, many):
        assert set(alone) == set(other)
        for name, value in alone.items():
            torch.testing.assert_close(value, other[name], rtol=1e-9, atol=1e-11)


def test_isolation_may_be_given_by_name_and_a_misspelt_one_is_refused() -> None:
    population = make_population("mlp", 2, isolation="straight_through")
    assert population.config.isolation is Isolation.STRAIGHT_THROUGH
    with pytest.raises(UnknownNameError, match="did you mean 'dual_pass'"):
        make_population("mlp", 2, isolation="dual_pas")


@pytest.mark.parametrize(
    ("wrong", "fragment"),
    [
        (lambda p: p.evaluate("valid"), "did you mean 'validation'"),
        (lambda p: p.counterfactual(torch.tensor([0]), torch.zeros(1, 2)), "boolean"),
        (lambda p: p.measure(gradient=torch.zeros(3)), "gradient has the wrong shape"),
        (lambda p: extract(p, 5), "from 0 up to 1"),
        (lambda p: make_population("mlp", 0), "environments of a feed is out of"),
        (lambda p: make_population("mlp", 2, rate=-1.0), "'rate' is out of range; .*number from 0"),
        (
            lambda p: make_population("mlp", 2, compiler="inductor", compile_mode="max-autotune"),
            "did you mean 'max-autotune-no-cudagraphs'",
        ),
        (
            lambda p: make_population("mlp", 2, compiler="aot_eager", compile_mode="default"),
            "compiler 'aot_eager'; choose compiler=\"inductor\"",
        ),
        (
            lambda p: make_population("mlp", 2, budget="10"),
            "'budget' is out of range; .*whole number from 0",
        ),
    ],
)
def test_wrong_use_of_a_population_gets_a_sentence(wrong, fragment: str) -> None:
    with pytest.raises(EsperError, match=fragment):
        wrong(make_population("mlp", 2))


@each_host
def test_the_same_run_twice_is_identical_to_the_bit(host: str) -> None:
    def run() -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        population = make_population(host, 5, dtype=torch.float32)
        losses = []
        for epoch in range(4):
            population.apply(draw_actions(population.legal(), own_draws(population, epoch)))
            losses.append(population.train_epoch().loss)
            population.pass_time()
        return torch.stack(losses), extract(population, 3).state_dict()

    (first, weights), (second, again) = run(), run()
    assert torch.equal(first, second)
    assert all(torch.equal(weights[name], again[name]) for name in weights)


@each_host
def test_single_precision_stays_close_to_the_reference(host: str) -> None:
    population = make_population(host, 6, dtype=torch.float32)
    twins = Twins(population)
    for epoch in range(2):
        twins.apply(draw_actions(population.legal(), own_draws(population, epoch)))
        losses, _, _ = twins.epoch()
        record = population.train_epoch()
        torch.testing.assert_close(record.loss, losses, rtol=1e-4, atol=1e-4)
        expected = torch.stack([twins.validation_loss(index) for index in range(6)])
        torch.testing.assert_close(population.evaluate().loss, expected, rtol=1e-4, atol=1e-4)
        population.pass_time()
        for each in twins.hosts:
            each.pass_time()


@pytest.mark.parametrize("host", thinned(HOSTS, 2))
def test_a_compiled_population_equals_an_eager_one(host: str) -> None:
    eager, compiled = make_population(host, 3), make_population(host, 3, compiler="aot_eager")
    for epoch in range(2):
        actions = draw_actions(eager.legal(), own_draws(eager, epoch))
        for population in (eager, compiled):
            population.apply(actions)
        mine, theirs = compiled.train_epoch(), eager.train_epoch()
        torch.testing.assert_close(mine.loss, theirs.loss, rtol=1e-9, atol=1e-12)
        for population in (eager, compiled):
            population.pass_time()


def test_backend_and_mode_of_the_compiler_are_as_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: set[tuple[str, str | None]] = set()

    def compile_(form: Form, *, backend: str, mode: str | None, dynamic: bool) -> Form:
        chosen.add((backend, mode))
        return form

    monkeypatch.setattr(torch, "compile", compile_)
    make_population("mlp", 2, compiler="inductor", compile_mode="max-autotune-no-cudagraphs")
    assert chosen == {("inductor", "max-autotune-no-cudagraphs")}


@each_host
def test_half_precision_trains_and_stays_near_single_precision(host: str) -> None:
    half = make_population(host, 4, dtype=torch.float32, compute_dtype=torch.bfloat16)
    full = make_population(host, 4, dtype=torch.float32)
    for epoch in range(3):
        actions = draw_actions(full.legal(), own_draws(full, epoch))
        for population in (half, full):
            population.apply(actions)
        torch.testing.assert_close(
            half.train_epoch().loss, full.train_epoch().loss, rtol=0.03, atol=0.03
        )
        for population in (half, full):
            population.pass_time()
    assert half.pools[HOST].state.theta.dtype == torch.float32


@every_host
def test_counterfactuals_equal_switching_seeds_off_one_environment_at_a_time(host: str) -> None:
    population = make_population(host, 6)
    for epoch in range(6):
        population.apply(draw_actions(population.legal(), own_draws(population, epoch)))
        population.train_epoch()
        population.pass_time()
    environment = torch.arange(6).repeat_interleave(8)
    off = (torch.arange(8)[:, None] >> torch.arange(3)) & 1 == 1
    off = off.repeat(6, 1)
    scores = population.counterfactual(environment, off)
    assert int((population.lifecycle.alpha > 0).sum()) > 4
    for index in range(len(environment)):
        twin = extract(population, int(environment[index])).eval()
        ((x, y),) = population.feed.held_out("validation", environment[index : index + 1])
        names = [n for n, o in zip(twin.catalogue.slots.names, off[index], strict=True) if o]
        with twin.without(*names), torch.no_grad():
            expected = mean_loss(twin(x[0]), y[0])
        torch.testing.assert_close(scores.loss[index], expected, rtol=1e-9, atol=1e-12)


def test_the_committed_score_is_that_of_the_export() -> None:
    from esper.kasmina import export_module

    population = make_population("mlp", 4)
    actions = {"slot": 1, "blueprint": 3, "blend": int(Blend.IMMEDIATE)}
    population.apply(Actions.of(population.space, 4, op=1, **actions))
    population.apply(Actions.of(population.space, 4, op=1, **(actions | {"slot": 0})))
    population.train_epoch()
    population.pass_time()
    population.apply(Actions.of(population.space, 4, op=torch.tensor([3, 3, 0, 0]), slot=1))
    scores = population.evaluate("test", committed=True)
    for index in range(4):
        ((x, y),) = population.feed.held_out("test", torch.tensor([index]))
        plain = export_module(extract(population, index), x[0]).eval()
        with torch.no_grad():
            loss = mean_loss(plain(x[0]), y[0])
        torch.testing.assert_close(scores.loss[index], loss, rtol=1e-9, atol=1e-12)


class Counter(TorchDispatchMode):
    """Counts every operation that is sent to a kernel, backward included."""

    def __init__(self) -> None:
        super().__init__()
        self.operations = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.operations += 1
        return func(*args, **(kwargs or {}))


def planted(count: int, kinds: int, first: int = 0) -> tuple[Population, int]:
    """Hosts with seeds of so many kinds in three slots, and the operations of planting them."""
    population, operations = make_population("mlp", count, first=first), 0
    numbers = torch.arange(first, first + count)
    for slot in range(3):
        seeds = {"slot": slot, "blueprint": numbers % kinds, "blend": numbers % 3}
        actions = Actions.of(population.space, count, op=1, **seeds)
        with Counter() as counted:
            population.apply(actions)
        operations += counted.operations
    return population, operations


def test_seeds_of_many_kinds_are_drawn_at_once_and_each_is_what_it_is_alone() -> None:
    (one, few), (many, most) = planted(16, 1), planted(16, 5)
    assert len(many.pools) - len(one.pools) == 12  # of four more kinds in three slots
    assert most - few < 12 * 70, "a further pool is made, grown and written to, no more"
    rows = {
        (key, int(owner)): many.pools[key].state.theta[row]
        for key, owners, places in many.places(many.lifecycle.occupied)
        for owner, row in zip(owners, places, strict=True)
    }
    for number in (2, 9):
        alone, _ = planted(1, 5, first=number)
        for key, _, place in alone.places(alone.lifecycle.occupied):
            assert torch.equal(alone.pools[key].state.theta[place[0]], rows.pop((key, number)))
    assert not {number for _, number in rows} & {2, 9}


@pytest.mark.parametrize("host", thinned(EVERY_HOST, 2))
@pytest.mark.parametrize("isolation", list(Isolation))
def test_the_number_of_operations_does_not_grow_with_the_population(
    host: str, isolation: Isolation
) -> None:
    def operations(count: int) -> int:
        population = make_population(host, count, isolation=isolation, dtype=torch.float32)
        kinds = len(population.catalogue.names)
        for slot in range(3):
            population.apply(
                Actions.of(
                    population.space,
                    count,
                    op=1,
                    slot=slot,
                    blueprint=torch.arange(count) % kinds,
                    blend=torch.arange(count) // kinds % 3,
                )
            )
        step = population.training_step()
        inputs = population.feed.fetch(
            population.feed.epoch(population.seeds, population.lifecycle.epoch)[0]
        )
        with Counter() as counter:
            step.run(*inputs)
        return counter.operations

    assert operations(42) == operations(126)


# Every bit pattern that a sum with nothing might change, and an ordinary number.
DELICATE = torch.tensor([-0.0, 0.0, float("inf"), -float("inf"), 1.5], dtype=torch.float64)


@every_host
@each_isolation
@pytest.mark.parametrize("padded", [False, True], ids=["exact", "padded"])
def test_at_alpha_0_what_leaves_a_slot_is_what_came_to_it_bit_for_bit(
    host: str, isolation: Isolation, padded: bool
) -> None:
    count = len(blueprint_names(FAMILY[host]))
    population = make_population(host, count, isolation=isolation)
    for slot in range(3):
        blend, kind = (torch.arange(count) + 1) % 3, torch.arange(count)
        population.apply(
            Actions.of(population.space, count, op=1, slot=slot, blueprint=kind, blend=blend)
        )
    training = population.lifecycle.at(SeedStage.TRAINING)
    assert bool(training.any(dim=0).all()), "seeds learn unseen at every slot"
    plan = population.training_step().plan.training
    if padded:  # as in a CUDA graph, where unused places point at the first environment
        plan = Padding(population.pools, grain=4).pad("training", plan)
    came: list[torch.Tensor] = []
    left: list[torch.Tensor] = []

    def watched(form: Form) -> Form:
        def segment(params: Params, x: torch.Tensor) -> torch.Tensor:
            left.append(x)
            y = form(params, torch.zeros_like(x))
            came.append(DELICATE.repeat(y.numel())[: y.numel()].view_as(y))
            return came[-1]

        return segment

    engine = population.engine
    engine.segments[:] = [watched(form) for form in engine.segments]
    inputs, _ = population.feed.samples_at(torch.zeros(count, 2, dtype=torch.int64))
    engine.logits(cast_weights(population.pools, None), plan, inputs)
    for slot, (before, after) in enumerate(zip(came, left[1:], strict=False)):
        unseen = training[:, slot]
        assert torch.equal(*(each[unseen].view(torch.int64) for each in (before, after)))


def test_an_idle_population_never_changes_its_rows() -> None:
    population = make_population("mlp", 3)
    assert isinstance(population.lifecycle, Lifecycle)
    assert bool((population.lifecycle.stage == SeedStage.DORMANT).all())
    before = population.lifecycle
    population.train_epoch()
    assert population.lifecycle is before
