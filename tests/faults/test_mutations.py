"""Guards that `python -m tests.faults.mutations` breaks are where it looks for them."""

import pytest

from tests.faults.mutations import MUTATIONS, ROOT, Mutation


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda each: each.guard)
def test_a_guard_and_the_test_that_notices_it_are_there(mutation: Mutation) -> None:
    code = (ROOT / "src" / "esper" / mutation.file).read_text(encoding="utf-8")
    assert code.count(mutation.text) == 1
    file, _, name = mutation.tests.partition(" -k ")
    assert name in (ROOT / file).read_text(encoding="utf-8")
