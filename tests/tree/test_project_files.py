"""Tests of the files that describe the project to its users and contributors."""

import re
from pathlib import Path

import yaml

import esper

ROOT = Path(__file__).parents[2]


def test_citation_names_package_version() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["version"] == esper.__version__


def test_changelog_starts_with_package_version() -> None:
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    versions = re.findall(r"^## \[(.+?)\]", changelog, re.MULTILINE)
    assert versions[0] == esper.__version__
