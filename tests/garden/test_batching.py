"""N is only a batching knob: an environment is the same in any company."""

import pytest
import torch
from torch import Tensor

from esper.garden import Case, Draw, Garden, Transition
from esper.tolaria.plan import HOST
from tests.garden.plots import BATCHES, CONTEXTS, DRIFT, Listed, make_garden, walk

ROWS = 64
DEAL = Draw(contexts=CONTEXTS, seed=1)  # a row whose task changes decides more than once
SERIES = ("train_loss", "validation_loss", "validation_accuracy", "committed_accuracy")
Seen = dict[str, Tensor]  # [N, ...] each


def lived(garden: Garden) -> tuple[list[Seen], list[Transition]]:
    """A round of random decisions: what was known before each, and what came of it."""
    garden.reset()
    seen: list[Seen] = []

    def look(garden: Garden) -> None:
        signals, population = garden.signals(), garden.population
        order = population.feed.epoch(population.seeds, signals.lifecycle.epoch)
        inputs, labels = population.feed.samples_at(order)  # [T, N, B, ...]
        seen.append(
            {name: getattr(signals, name) for name in SERIES}
            | {
                "draws": signals.draws,
                "host_gradient": signals.host_gradient,
                "contribution": signals.lifecycle.contribution,
                "features": garden.observations(),
                "stage": signals.lifecycle.stage,
                "weights": population.pools[HOST].state.theta[:-1].clone(),
                "inputs": inputs.transpose(0, 1),
                "labels": labels.transpose(0, 1),
            }
        )

    return seen, walk(garden, look=look)


@pytest.fixture(scope="module")
def all_together() -> tuple[Garden, list[Seen], list[Transition]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("esper.garden.episodes.GARDEN_BATCHES", BATCHES)
        garden = make_garden(ROWS, draw=DEAL)
        return garden, *lived(garden)


def assert_same_lives(
    small: tuple[list[Seen], list[Transition]],
    large: tuple[list[Seen], list[Transition]],
    rows: list[int],
) -> None:
    """The rows of the small garden are these rows of the large one."""
    for here, there in zip(small[0], large[0], strict=True):
        for name, values in here.items():
            exact = name in ("draws", "stage", "inputs", "labels")
            tolerance = 0.0 if exact else 1e-6 if name == "features" else 1e-9
            torch.testing.assert_close(
                values, there[name][rows], rtol=tolerance, atol=tolerance, equal_nan=True,
                msg=lambda text, name=name: f"{name}: {text}",
            )  # fmt: skip
    for mine, theirs in zip(small[1], large[1], strict=True):
        assert torch.equal(mine.actions.values, theirs.actions.values[rows])
        assert torch.equal(mine.terminals, theirs.terminals[rows])
        assert mine.cases == tuple(theirs.cases[row] for row in rows)
        for values, others in (
            (mine.epoch.accuracy, theirs.epoch.accuracy),
            (mine.epoch.committed, theirs.epoch.committed),
            *((mine.terms[name], theirs.terms[name]) for name in theirs.terms),
        ):
            torch.testing.assert_close(values, others[rows], rtol=1e-9, atol=1e-9)


@pytest.mark.slow
def test_eight_rows_live_as_among_sixty_four(
    all_together: tuple[Garden, list[Seen], list[Transition]],
) -> None:
    assert_same_lives(lived(make_garden(8, draw=DEAL)), all_together[1:], list(range(8)))


@pytest.mark.slow
def test_each_kind_of_row_lives_alone_as_among_sixty_four(
    all_together: tuple[Garden, list[Seen], list[Transition]],
) -> None:
    _, seen, transitions = all_together
    played = transitions[0].cases
    decided = torch.stack([each.actions["op"] != 0 for each in transitions]).sum(0)
    for context in CONTEXTS:
        rows = [
            row
            for row, case in enumerate(played)
            if case.context == context
            and (context != DRIFT or context.drift_epoch(case.seed) is not None)
        ]
        row = max(rows, key=lambda row: int(decided[row]))
        case: Case = played[row]
        alone = lived(make_garden(1, draw=Listed((case,))))
        assert_same_lives(alone, (seen, transitions), [row])
        assert int(decided[row]) >= 2


@pytest.mark.slow
def test_the_same_garden_twice_is_the_same_to_the_bit() -> None:
    first, second = lived(make_garden(5)), lived(make_garden(5))
    for here, there in zip(first[0], second[0], strict=True):
        for name in here:
            assert torch.equal(here[name].nan_to_num(), there[name].nan_to_num()), name
    for mine, theirs in zip(first[1], second[1], strict=True):
        assert torch.equal(mine.rewards, theirs.rewards)
        assert torch.equal(mine.observations, theirs.observations)
