"""Work that ranks share: every part is done once, and all are through at about the same time."""

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from esper.garden.dealing import TURN, Costs, deal, in_turns
from tests.garden.sides import Side, on_sides

COSTS = st.lists(st.floats(0.0, 1e6), max_size=30)
FEW = st.lists(st.integers(1, 20), max_size=7)


@given(COSTS, st.integers(1, 9))
def test_every_part_is_dealt_once_and_nobody_waits_longer_than_for_one_part(
    costs: list[float], ranks: int
) -> None:
    dealt = deal(costs, ranks)
    assert len(dealt) == ranks
    assert sorted(place for own in dealt for place in own) == list(range(len(costs)))
    loads = [sum(costs[place] for place in own) for own in dealt]
    assert max(loads) - min(loads) <= max(costs, default=0.0) * (1 + 1e-9)
    for own in dealt:
        assert [costs[place] for place in own] == sorted((costs[p] for p in own), reverse=True)


@given(FEW, st.integers(1, 3))
def test_the_last_rank_is_through_at_most_a_third_later_than_it_could_be(
    costs: list[int], ranks: int
) -> None:
    """Graham's bound for the longest first, against every way to deal."""
    latest = max(sum(costs[place] for place in own) for own in deal(costs, ranks))
    best = min(
        max(sum(c for c, of in zip(costs, who, strict=True) if of == rank) for rank in range(ranks))
        for who in product(range(ranks), repeat=len(costs))
    )
    assert latest <= best * (4 / 3 - 1 / (3 * ranks)) + 1e-9


def test_costs_are_estimates_until_something_was_measured() -> None:
    costs = Costs()
    assert costs("small", 3.0) == 3.0
    costs.learn("small", 2.0, 10.0)
    assert costs("small", 3.0) == pytest.approx(15.0)
    assert costs("large", 30.0) == pytest.approx(150.0), "as much as the other"
    costs.learn("large", 30.0, 30.0)
    assert costs("large", 30.0) == pytest.approx(30.0)
    assert costs("small", 3.0) == pytest.approx(15.0)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_ranks_hear_of_every_part_in_order_and_do_each_once(size: int) -> None:
    parts, done = 2 * TURN * size + 1, list[int]()

    def do(number: int) -> str:
        done.append(number)
        return f"part {number}"

    def own(side: Side) -> list[tuple[int, str]]:
        work = [("kind", number + 1.0) for number in range(parts)]
        turns = in_turns(do, work, costs=Costs(), ranks=side)
        return [each for turn in turns for each in turn]

    found = on_sides(size, own)
    assert found == [[(number, f"part {number}") for number in range(parts)]] * size
    assert sorted(done) == list(range(parts))
