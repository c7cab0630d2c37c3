"""docs/telemetry.md says what the code does."""

import re
from pathlib import Path

import pytest

from esper.nissa import RunReader, RunStore
from esper.nissa.anomalies import RULES
from esper.nissa.events import KINDS
from tests.nissa.runs import LAYOUT, written

PAGE = (Path(__file__).parents[2] / "docs" / "telemetry.md").read_text(encoding="utf-8")
QUERIES = re.findall(r"```sql\n(.*?)```", PAGE, re.S)


@pytest.mark.parametrize("sql", QUERIES)
def test_a_query_of_the_page_runs(sql: str, tmp_path: Path) -> None:
    with RunReader(written(tmp_path, rounds=2)) as reader:
        assert reader.query(sql).columns


def test_the_page_names_every_event_anomaly_and_table(tmp_path: Path) -> None:
    with RunStore(tmp_path, LAYOUT), RunReader(tmp_path) as reader:
        tables = reader.query("SELECT name FROM sqlite_schema WHERE type = 'table'")
    names = [name for (name,) in tables.rows if not name.startswith("sqlite") and name != "meta"]
    names += [kind.__name__ for kind in KINDS.values()] + list(RULES)
    assert len(QUERIES) >= 5
    assert not [name for name in names if f"`{name}`" not in PAGE]
