"""Long lists of cases: some of them in every test run, the others in `make nightly`."""

from collections.abc import Iterable
from typing import Any

import pytest


def thinned(cases: Iterable[Any], step: int) -> list[Any]:
    """Return all cases for `pytest.mark.parametrize`, most of them marked `nightly`.

    Args:
        cases: Arguments of the test. A tuple holds the values of several arguments.
        step: Every `step`-th case stays among the default tests.
    """
    marked = []
    for number, case in enumerate(cases):
        if number % step == 0:
            marked.append(case)
            continue
        values = case if isinstance(case, tuple) else (case,)
        marked.append(pytest.param(*values, marks=pytest.mark.nightly))
    return marked
