"""Results as arrays: who was played where, in which order, and what a cut-off file still holds."""

import gzip
import json
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest

from esper.garden.evaluation import FORMAT
from esper.leyline import DataError
from studies.cubes import Results, members, read_results
from tests.studies.made_up import result


def test_a_cube_is_trainings_by_contexts_by_seeds_whatever_the_order() -> None:
    found = [
        result(f"tamiyo-{training}", context, seed, 100.0 * training + 10.0 * place + seed)
        for seed in (2, 0, 1)
        for training in (1, 0)
        for place, context in enumerate(("one", "two"))
    ]
    cube = Results(found).cube(["tamiyo-0", "tamiyo-1"], ["one", "two"], lambda r: r.net_gain())
    expected = np.arange(2)[:, None, None] * 100.0 + np.arange(2)[:, None] * 10.0 + np.arange(3)
    assert cube == pytest.approx(expected)


def test_the_later_of_two_results_of_one_episode_counts() -> None:
    twice = [result("race", "one", 0, 1.0), result("race", "one", 0, 2.0, made="again")]
    assert Results(twice).cube(["race"], ["one"], lambda r: r.net_gain()).item() == 2.0


def test_controllers_with_other_seeds_are_not_paired() -> None:
    found = Results([result("race", "one", 0, 1.0), result("gap", "one", 1, 1.0)])
    with pytest.raises(DataError, match="same cases"):
        found.require_paired(["race", "gap"], ["one"])


def test_trainings_are_told_by_their_numbers_and_sorted_by_them() -> None:
    names = ["tamiyo-10", "tamiyo-2", "never", "tamiyo-x", "blanked-0", "tamiyo"]
    assert members(names, "tamiyo") == ["tamiyo-2", "tamiyo-10"]


def test_a_line_that_was_cut_off_is_left_out_and_another_file_refused(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    line = json.dumps(asdict(result("race", "one", 0, 1.0)))
    path.write_text(f'{{"format": "{FORMAT}"}}\n{line}\n{line[:40]}', encoding="utf-8")
    assert len(read_results(path)) == 1
    packed = tmp_path / "results.jsonl.gz"
    packed.write_bytes(gzip.compress(path.read_bytes()))
    path.unlink()
    assert read_results(path) == [result("race", "one", 0, 1.0)]
    packed.write_bytes(packed.read_bytes()[:-9])
    with pytest.raises(DataError, match="cannot be read"):
        read_results(path)
    path.write_text('{"format": "esper results 0"}\n', encoding="utf-8")
    with pytest.raises(DataError, match="of this version"):
        read_results(path)
    path.write_text("", encoding="utf-8")
    with pytest.raises(DataError, match="of this version"):
        read_results(path)
    with pytest.raises(DataError, match="cannot be read"):
        read_results(tmp_path / "nothing.jsonl")
