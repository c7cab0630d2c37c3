"""Who plays what: from names and numbers alone."""

from collections import Counter

from esper.garden import EVALUATION_SEED, TRAINING_SEEDS, Draw, Garden
from esper.garden.atlas import ATLAS_SEEDS, FIRST_ATLAS_SEED
from tests.garden.plots import CONTEXTS, make_garden


def test_every_context_comes_equally_often_and_every_seed_comes() -> None:
    draw = Draw(contexts=CONTEXTS, seeds=4)
    for episode in range(5):
        names = Counter(draw(row, episode).context.name for row in range(3 * len(CONTEXTS)))
        assert set(names.values()) == {3}
    for first in range(0, 12, 4):  # neighbours differ, wherever one looks
        assert len({draw(first + row, 2).context for row in range(4)}) == len(CONTEXTS)
    often = Counter(draw(row, episode) for row in range(64) for episode in range(25))
    assert set(often) == set(draw.pool())
    expected = 64 * 25 / len(draw.pool())
    assert all(0.5 * expected < count < 1.5 * expected for count in often.values())


def test_orders_differ_between_episodes_and_dealings() -> None:
    def dealt(seed: int, episode: int) -> tuple[str, ...]:
        draw = Draw(contexts=CONTEXTS, seed=seed)
        return tuple(str(draw(row, episode)) for row in range(8))

    assert len({dealt(seed, episode) for seed in range(3) for episode in range(3)}) == 9
    assert dealt(1, 1) == dealt(1, 1)


def test_a_row_draws_the_same_in_a_garden_of_any_size() -> None:
    def played(envs: int) -> list[object]:
        garden: Garden = make_garden(envs)
        garden.reset()
        return list(garden.cases)

    assert played(5)[:2] == played(2)


def test_no_case_is_trained_on_and_evaluated_on() -> None:
    trained = {case.seed for case in Draw(contexts=CONTEXTS).pool()}
    assert trained == set(range(TRAINING_SEEDS))
    measured = set(range(FIRST_ATLAS_SEED, FIRST_ATLAS_SEED + ATLAS_SEEDS))
    assert max(trained) < min(measured)
    assert max(measured) < EVALUATION_SEED
