"""The page that leads through the tree names files and functions that are there."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "esper"
PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
HOPS = re.findall(r"\| `([\w/]+\.py)` \| `([\w.]+)` \|", PAGE)


def names_in(path: Path) -> set[str]:
    """Functions, classes, and methods as `Class.method`."""
    found = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            inside = (each for each in node.body if isinstance(each, ast.FunctionDef))
            found |= {f"{node.name}.{each.name}" for each in inside}
    return found


@pytest.mark.parametrize(("file", "name"), HOPS, ids=[name for _, name in HOPS])
def test_a_hop_leads_to_a_function_that_exists(file: str, name: str) -> None:
    assert name in names_in(PACKAGE / file)


def test_both_ways_are_told_from_beginning_to_end() -> None:
    numbers = [int(number) for number in re.findall(r"^\| (\d+) \|", PAGE, re.MULTILINE)]
    second = numbers.index(1, 1)
    for way in (numbers[:second], numbers[second:]):
        assert way == list(range(1, len(way) + 1))
    assert len(HOPS) == len(numbers), "every hop names its file and function"


def test_files_and_folders_that_are_named_exist() -> None:
    named = set(re.findall(r"`([a-z_]+/(?:[\w/]+\.py)?)`", PAGE))
    missing = [name for name in named if not (PACKAGE / name).exists()]
    assert not missing


def test_map_of_the_repository_names_existing_files() -> None:
    code_block = re.search(r"## Map of the repository\n\n```\n(.*?)```", PAGE, re.DOTALL)
    assert code_block is not None
    lines = code_block[1].splitlines()
    assert len(lines) <= 45
    folder, missing = PACKAGE, []
    for line in lines:
        if heading := re.match(r"(  )?([\w/]+)/ ", line):
            folder = PACKAGE / heading[2] if heading[1] else ROOT / heading[2]
            if not folder.is_dir():
                missing.append(heading[2])
        for name in re.findall(r"[ :](\w+\.py)\b", line):
            if not any(folder.rglob(name)):
                missing.append(name)
    assert not missing
