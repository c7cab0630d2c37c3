"""Shadows of a population: what they learn, what they show, and that no host knows of them."""

import pytest
import torch
from torch import Tensor

from esper.kasmina import SlottedModel, blueprint_names
from esper.leyline import Actions, AgreementError, Blend, LifecycleOp
from esper.leyline.shadows import AuditionPlan
from esper.tolaria.feed import Augmentation
from esper.tolaria.governor import Governor
from esper.tolaria.population import Population
from esper.tolaria.random_streams import uniform
from esper.tolaria.tasks import mean_loss
from tests.tolaria.test_population import FAMILY, OPTIMISERS, Counter, own_draws
from tests.tolaria.twins import HOSTS, Twins, draw_actions, held, make_population

BATCHES = 3


def drawn_plan(population: Population, step: int, often: float = 0.5) -> AuditionPlan:
    """Each environment's own draw: which shadows train, and on how many batches."""
    shadows = population.shadows
    _, slots, kinds = shadows.rows.shape
    draws = uniform(population.seeds, "test plan", step, slots * kinds + 1)
    where = (draws[:, :-1].view(-1, slots, kinds) < often) & shadows.fits
    return AuditionPlan(where, (draws[:, -1] * 4).floor() / 3)


def only(population: Population, *places: tuple[int, int, int], share: float = 1.0) -> AuditionPlan:
    """A plan of shadows at (environment, slot, blueprint)."""
    where = torch.zeros(population.shadows.rows.shape, dtype=torch.bool)
    for place in places:
        where[place] = True
    return AuditionPlan(where, torch.full((len(where),), share, dtype=torch.float64))


def shadow(population: Population, place: tuple[int, int, int]) -> dict[str, Tensor]:
    """All that is kept of one shadow."""
    row = int(population.shadows.rows[place])
    assert row >= 0, "it lives"
    pool = population.shadows.pools["shadow", place[1], place[2]]
    return {name: tensor[row].clone() for name, tensor in pool.tensors().items()}


def lived(population: Population, epochs: range) -> list[Tensor]:
    """Everything that is measured in some epochs of random decisions and shadows."""
    found = []
    for epoch in epochs:
        population.apply(draw_actions(population.legal(), own_draws(population, epoch)))
        record = population.train_epoch(drawn_plan(population, epoch))
        found += [record.loss, *population.shadows.readings.arrays().values()]
        population.pass_time()
    return found


needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=needs_cuda)])
@pytest.mark.parametrize("host", list(HOSTS))
def test_hosts_and_seeds_are_equal_to_the_bit_with_and_without_shadows(
    host: str, device: str
) -> None:
    settings = {"device": device, "dtype": torch.float32, "deterministic": True}
    alone, shadowed = (make_population(host, 5, batches=BATCHES, **settings) for _ in range(2))
    if host == "conv2d":
        for each in (alone, shadowed):
            each.feed.augmentation = Augmentation(shift=1, flip=True)
    rng = torch.get_rng_state()
    for epoch in range(7):
        actions = draw_actions(alone.legal(), own_draws(alone, epoch))
        # What is planted warm is meant to differ: here everything is planted newborn.
        warm = shadowed.shadows.living[torch.arange(5), actions["slot"], actions["blueprint"]]
        warm &= actions["op"] == LifecycleOp.GERMINATE
        actions.values[warm, actions.space.names.index("blend")] = int(Blend.IMMEDIATE)
        for each in (alone, shadowed):
            each.apply(actions)
        ours = alone.train_epoch()
        theirs = shadowed.train_epoch(drawn_plan(shadowed, epoch))
        assert torch.equal(ours.loss, theirs.loss)
        assert torch.equal(ours.host_gradient, theirs.host_gradient)
        for each in (alone, shadowed):
            each.pass_time()
        state = held(shadowed)
        for name, value in held(alone).items():
            assert torch.equal(value, state[name]), name
    assert int((shadowed.shadows.readings.epochs > 0).sum()) > 20
    assert torch.equal(torch.get_rng_state(), rng)


def twin_of(
    twins: Twins, place: tuple[int, int, int]
) -> tuple[SlottedModel, torch.optim.Optimizer]:
    """A plain model with the shadow as a seed in isolation, which is what it should be like."""
    population = twins.population
    n, slot, kind = place
    model = twins.hosts[n]
    space = population.space
    choice = {"slot": slot, "blueprint": kind, "blend": int(Blend.RAMP)}
    model.apply(Actions.of(space, 1, op=int(LifecycleOp.GERMINATE), **choice))
    key = ("shadow", slot, kind)
    theta = shadow(population, place)["theta"][None]
    seed = model.slots[slot].seed
    assert seed is not None
    views = population.engine.templates[key].views(theta)
    with torch.no_grad():
        for name, parameter in seed.body.named_parameters():
            parameter.copy_(views[name][0])
    return model, twins.optimizers[n]


@pytest.mark.parametrize("host", ["mlp", "conv1d"])
@pytest.mark.parametrize("optimiser", list(OPTIMISERS))
def test_a_shadow_learns_and_shows_what_a_plain_seed_in_isolation_does(
    host: str, optimiser: str
) -> None:
    count = len(blueprint_names(FAMILY[host]))
    population = make_population(
        host, count, batches=BATCHES, optimiser=OPTIMISERS[optimiser], rate=0.01, decay=0.02
    )
    rows = torch.arange(count)
    # Every other host has a seed behind or before its shadows, which stays as it is for them.
    planted = {"slot": (rows + 2) % 3, "blueprint": rows, "blend": int(Blend.IMMEDIATE)}
    places = [(n, n % 3, n) for n in range(count)]
    places += [(n, (n + 1) % 3, (n + 1) % count) for n in range(count)]
    halves = [Twins(population), Twins(population)]  # one for each shadow of a host
    actions = Actions.of(population.space, count, op=(rows % 2), **planted)
    newborn = population.snapshot()
    for twins in halves:
        population.put_rows(rows, newborn)
        twins.apply(actions)
    share = torch.tensor([1.0, 2 / 3], dtype=torch.float64)[rows % 2]
    plan = only(population, *places)._replace(share=share)
    for twins in halves:  # shadows are born, but do not learn yet
        twins.epoch()
    population.train_epoch(plan._replace(share=torch.zeros_like(share)))
    assert bool(population.shadows.readings.gain.isnan().all())
    models = [twin_of(halves[i // count], place) for i, place in enumerate(places)]
    for epoch in (1, 2):
        population.pass_time()
        index = population.feed.epoch(population.seeds, population.lifecycle.epoch)
        inputs, labels = population.feed.samples_at(index)  # [T, N, B, ...]
        record = population.train_epoch(plan)
        readings = population.shadows.readings
        for place, (model, optimizer) in zip(places, models, strict=True):
            model.pass_time()
            n, slot, kind = place
            due = [t for t in range(BATCHES) if n % 2 == 0 or t > 0]
            body = model.slots[slot].seed
            gains, own, theirs = [], [], []
            for t in range(BATCHES):
                optimizer.zero_grad()
                loss = mean_loss(model(inputs[t, n]), labels[t, n])
                loss.backward()
                hosts = [p.grad for p in model.model.parameters() if p.grad is not None]
                theirs.append(sum(float(g.square().sum()) for g in hosts))
                if t in due:
                    with model.seed_pass():
                        alone = mean_loss(model(inputs[t, n]), labels[t, n])
                        alone.backward()
                    own.append(sum(float(p.grad.square().sum()) for p in body.body.parameters()))
                    gains.append(loss.item() - alone.item())
                optimizer.step()
            views = population.engine.templates["shadow", slot, kind].views(
                shadow(population, place)["theta"][None]
            )
            for name, parameter in body.body.named_parameters():
                torch.testing.assert_close(views[name][0], parameter.data, rtol=1e-8, atol=1e-10)
            found = {name: float(array[place]) for name, array in readings.arrays().items()}
            assert found["epochs"] == pytest.approx(epoch * float(share[n]))
            assert found["train_gain"] == pytest.approx(
                sum(gains) / len(gains), rel=1e-7, abs=1e-12
            )
            rms = (sum(own) / len(own)) ** 0.5 / (sum(theirs) / BATCHES) ** 0.5
            assert found["gradient"] == pytest.approx(rms, rel=1e-7, abs=1e-12)
            ((x, y),) = population.feed.held_out("validation", torch.tensor([n]))
            with torch.no_grad():
                without = torch.nn.functional.cross_entropy(model(x[0]), y[0], reduction="none")
                with model.seed_pass():
                    shown = torch.nn.functional.cross_entropy(model(x[0]), y[0], reduction="none")
            change = without - shown
            assert found["gain"] == pytest.approx(float(change.mean()), rel=1e-7, abs=1e-12)
            error = float(change.std() / len(change) ** 0.5)
            assert found["error"] == pytest.approx(error, rel=1e-6, abs=1e-9)
        assert bool((record.shadowed == plan.where * share[:, None, None]).all())


def test_a_shadow_is_the_same_in_populations_of_every_size() -> None:
    few, many = make_population("conv1d", 2, first=3), make_population("conv1d", 8)
    ours, theirs = lived(few, range(5)), lived(many, range(5))
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other[3:5], rtol=1e-7, atol=1e-10, equal_nan=True)
    assert int((few.shadows.readings.epochs > 0).sum()) > 5


def test_shadows_go_back_with_their_environment_and_live_the_same_life_again() -> None:
    population = make_population("mlp", 4)
    lived(population, range(3))
    snapshot = population.snapshot()
    first = lived(population, range(3, 6))
    population.put_rows(torch.tensor([0, 2]), snapshot)
    assert population.shadows.living[[0, 2]].equal((snapshot.shadow_rows != -1)[[0, 2]])
    assert bool(population.shadows.living[0].any())
    population.put_rows(torch.arange(4), snapshot)
    for one, other in zip(first, lived(population, range(3, 6)), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-13, equal_nan=True)


def test_restarted_and_frozen_environments_have_no_shadows() -> None:
    population = make_population("mlp", 3)
    places = [(n, 1, 0) for n in range(3)]
    population.train_epoch(only(population, *places))
    population.reset_rows(torch.tensor([0]), [8])
    assert population.shadows.living[:, 1, 0].tolist() == [False, True, True]
    assert population.shadows.readings.epochs[:, 1, 0].tolist() == [0.0, 1.0, 1.0]
    assert bool(population.shadows.readings.gain[0].isnan().all())
    population.freeze_rows(torch.tensor([1]))
    record = population.train_epoch(only(population, *places))
    assert population.shadows.living[:, 1, 0].tolist() == [True, False, True]
    assert record.shadowed is not None
    assert record.shadowed[:, 1, 0].tolist() == [1.0, 0.0, 1.0]
    assert population.shadows.readings.epochs[:, 1, 0].tolist() == [1.0, 1.0, 2.0]


def test_without_a_plan_shadows_rest_and_left_out_of_one_they_end() -> None:
    population = make_population("mlp", 2)
    here, there = (0, 0, 1), (1, 2, 0)
    population.train_epoch(only(population, here, there))
    before = shadow(population, here)
    assert population.train_epoch().shadowed is None
    assert all(torch.equal(value, before[name]) for name, value in shadow(population, here).items())
    population.train_epoch(only(population, here))
    assert population.shadows.living.nonzero().tolist() == [list(here)]
    assert float(population.shadows.readings.epochs[here]) == 2.0
    assert float(population.shadows.readings.epochs[there]) == 1.0, "what it showed stays known"
    population.train_epoch(only(population, there))
    assert float(population.shadows.readings.epochs[there]) == 1.0, "another, from the beginning"


@pytest.mark.parametrize("blend", list(Blend), ids=lambda blend: blend.name)
def test_a_shadow_is_planted_with_what_it_has_learned_unless_it_would_show_at_once(
    blend: Blend,
) -> None:
    population = make_population("conv1d", 3)
    kind, slot = population.catalogue.index("conv"), 1
    kept, lost, elsewhere = (0, slot, kind), (0, slot, kind - 1), (0, 2, kind)
    plan = only(population, kept, lost, elsewhere, (1, slot, kind - 1))
    population.train_epoch(plan)
    learned = shadow(population, kept)
    choice = {"slot": slot, "blueprint": kind, "blend": int(blend)}
    before = population.evaluate().loss
    population.apply(Actions.of(population.space, 3, op=torch.tensor([1, 1, 0]), **choice))
    assert torch.equal(population.evaluate().loss, before), "it does not show yet"
    pool = population.pools["seed", slot, kind]
    rows = population.pool_rows[:2, slot]
    seeds = [{name: each[row] for name, each in pool.tensors().items()} for row in rows.tolist()]
    warm = blend is not Blend.IMMEDIATE
    assert all(torch.equal(value, learned[name]) for name, value in seeds[0].items()) == warm
    assert float(seeds[0]["steps"]) == (BATCHES if warm else 0)
    assert float(seeds[1]["steps"]) == 0, "the other host's shadow was of another kind"
    assert population.lifecycle.alpha[:2, slot].tolist() == [0.0 if warm else 1.0] * 2
    assert population.shadows.living.nonzero().tolist() == [list(elsewhere)]
    population.train_epoch(plan)  # what it asks for in a taken slot is left out
    assert population.shadows.living.nonzero().tolist() == [list(elsewhere)]


def test_a_shadow_that_is_no_number_harms_neither_its_host_nor_other_shadows() -> None:
    sick, well = make_population("mlp", 3), make_population("mlp", 3)
    places = [(n, slot, 0) for n in range(3) for slot in range(3)]
    governors = [Governor(sick), Governor(well)]
    for each in (sick, well):
        each.train_epoch(only(each, *places))
    row = int(sick.shadows.rows[1, 1, 0])
    sick.shadows.pools["shadow", 1, 0].state.theta[row] = torch.nan
    for each, governor in zip((sick, well), governors, strict=True):
        governor.enter_epoch()
        record = each.train_epoch(only(each, *places))
        assert governor.leave_epoch(record) == []
    ours, theirs = (each.shadows.readings.gain.clone() for each in (sick, well))
    assert bool(ours[1, 1, 0].isnan())
    ours[1, 1, 0] = theirs[1, 1, 0]
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=0, equal_nan=True)


def test_the_number_of_operations_does_not_grow_with_the_population() -> None:
    def operations(count: int) -> int:
        population = make_population("conv1d", count, dtype=torch.float32)
        where = population.shadows.fits.expand(count, -1, -1).clone()
        shares = torch.tensor([1.0, 0.5], dtype=torch.float64)[torch.arange(count) % 2]
        with Counter() as counter:
            population.train_epoch(AuditionPlan(where, shares))
        return counter.operations

    assert operations(4) == operations(12)


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        (lambda plan: plan._replace(where=plan.where.long()), "a boolean for each shadow"),
        (lambda plan: plan._replace(where=plan.where[:1]), r"valid: torch.bool \[2, 3, "),
        (lambda plan: plan._replace(share=plan.share + 0.5), "2 shares from 0 to 1"),
        (lambda plan: plan._replace(where=~plan.where), "'norm' does not fit slot 1"),
    ],
)
def test_a_plan_that_does_not_fit_gets_a_sentence(wrong, sentence: str) -> None:
    population = make_population("mlp", 2)
    population.shadows.fits[1, population.catalogue.index("norm")] = False
    with pytest.raises(AgreementError, match=sentence):
        population.train_epoch(wrong(only(population)))
