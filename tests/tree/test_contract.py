"""The page about the design reviews names code and tests that exist, and every finding."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "contract.md").read_text(encoding="utf-8")
NUM_FINDINGS = 153
ROW = re.compile(
    r"^\| ([\d, ]+) \| .* \| `([\w/]+\.py)` `([\w.]+)` \| `([\w/]+\.py)` `(\w+)` \|$", re.M
)
ROWS = ROW.findall(PAGE)


def defined_names(path: Path) -> set[str]:
    """Functions, classes, constants, and methods as `Class.method`."""
    names = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        if isinstance(node, ast.Assign):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
        if isinstance(node, ast.ClassDef):
            for member in node.body:
                if isinstance(member, ast.FunctionDef):
                    names.add(f"{node.name}.{member.name}")
    return names


@pytest.mark.parametrize(("findings", "file", "name", "test_file", "test"), ROWS)
def test_row_names_existing_code_and_test(
    findings: str, file: str, name: str, test_file: str, test: str
) -> None:
    assert name in defined_names(ROOT / "src" / "esper" / file)
    assert test in defined_names(ROOT / "tests" / test_file)


def test_every_finding_is_in_one_row() -> None:
    numbers = [int(number) for row in ROWS for number in row[0].split(",")]
    assert sorted(numbers) == list(range(1, NUM_FINDINGS + 1))


def test_every_line_of_the_table_is_parsed() -> None:
    table = PAGE.split("## Where each finding is")[1].split("## Deviations")[0]
    assert len(ROWS) == table.count("\n| ") - 1  # without the header
