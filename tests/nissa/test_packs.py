"""Environments beyond the first ones are packed, and read as if they were not."""

import json
from pathlib import Path

import pytest

from esper.nissa import RunReader, RunStore
from tests.nissa.runs import ENVS, LAYOUT, a_round, decisions


@pytest.fixture
def two_runs(tmp_path: Path) -> tuple[Path, Path]:
    """The same events, all as rows, and of but two environments packed."""
    active = [True, False, True, True, False, True]
    paths = tmp_path / "rows.sqlite", tmp_path / "packs.sqlite"
    for path, rows in zip(paths, (ENVS, 2), strict=True):
        with RunStore(path, LAYOUT, rows=rows) as store:
            store.write(a_round(1))
            store.write([decisions(2, 0, active=active), decisions(2, 1, watched=0)])
    return paths


def test_what_is_packed_is_read_like_rows(two_runs: tuple[Path, Path]) -> None:
    with RunReader(two_runs[0]) as rows, RunReader(two_runs[1]) as packs:
        assert len(packs.query("SELECT DISTINCT env FROM decisions")) == 2
        for head in LAYOUT.heads:
            assert packs.action_shares(head) == rows.action_shares(head)
        for env in range(ENVS):
            for number in (1, 2):
                there, here = rows.decisions(number, env), packs.decisions(number, env)
                assert [str(record) for record in here] == [str(record) for record in there]
                assert [r.log_prob for r in here] == [r.log_prob for r in there]
            stages = [(cell.step, cell.slot, cell.stage) for cell in rows.timeline(1, env)]
            assert stages == [(c.step, c.slot, c.stage) for c in packs.timeline(1, env)]
        assert packs.digest() == packs.digest()


def test_what_is_packed_is_exported_like_rows(two_runs: tuple[Path, Path], tmp_path: Path) -> None:
    lines = []
    for path in two_runs:
        with RunReader(path) as reader:
            reader.export(tmp_path / "out.jsonl")
        text = (tmp_path / "out.jsonl").read_text()
        lines.append(sorted(json.dumps(json.loads(x), sort_keys=True) for x in text.splitlines()))
    assert lines[0] == lines[1]
