"""Tests of the files that describe the project to its users and contributors."""

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

import esper

ROOT = Path(__file__).parents[2]
WORKFLOW = ROOT / ".github" / "workflows" / "ci.yml"
PRE_COMMIT = ROOT / ".pre-commit-config.yaml"
ISSUE_FORMS = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))
FILES_WITH_MAKE_COMMANDS = [
    WORKFLOW,
    PRE_COMMIT,
    ROOT / ".github" / "pull_request_template.md",
    ROOT / "CONTRIBUTING.md",
]
FORM_FIELDS = {"checkboxes", "dropdown", "input", "textarea"}


def read_yaml(path: Path) -> dict[str, Any]:
    content = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert isinstance(content, dict)
    return content


def python_versions_of_classifiers() -> list[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    prefix = "Programming Language :: Python :: "
    versions = [text for text in project["classifiers"] if text.startswith(prefix)]
    return [text.removeprefix(prefix) for text in versions]


def make_targets(text: str) -> set[str]:
    """Return the targets of the commands `make TARGET` in a text.

    A command stands at the start of a line, after `run:` or after a backtick. Other occurrences of
    the word "make" are prose.
    """
    return set(re.findall(r"(?:^ *|run: |`)make ([a-z]+)", text, re.MULTILINE))


def test_citation_names_package_version() -> None:
    assert read_yaml(ROOT / "CITATION.cff")["version"] == esper.__version__


def test_citation_has_required_keys() -> None:
    required_keys = {"cff-version", "message", "title", "authors"}
    assert required_keys <= read_yaml(ROOT / "CITATION.cff").keys()


def test_changelog_starts_with_package_version() -> None:
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    versions = re.findall(r"^## \[(.+?)\]", changelog, re.MULTILINE)
    assert versions[0] == esper.__version__


def test_workflow_tests_every_declared_python_version() -> None:
    test_job = read_yaml(WORKFLOW)["jobs"]["test"]
    assert test_job["strategy"]["matrix"]["python-version"] == python_versions_of_classifiers()


def test_workflow_jobs_have_timeouts_and_pinned_actions() -> None:
    workflow = read_yaml(WORKFLOW)
    assert workflow["permissions"] == {"contents": "read"}
    for name, job in workflow["jobs"].items():
        assert job["timeout-minutes"] <= 60, name
        actions = [step["uses"] for step in job["steps"] if "uses" in step]
        assert actions, name
        assert all(re.fullmatch(r"[\w/-]+@v\d+", action) for action in actions), actions


def test_pre_commit_hooks_use_tools_of_the_environment() -> None:
    repositories = read_yaml(PRE_COMMIT)["repos"]
    assert [repository["repo"] for repository in repositories] == ["local"]
    hooks = repositories[0]["hooks"]
    entries = [hook["entry"] for hook in hooks]
    assert entries == [".venv/bin/ruff check", ".venv/bin/ruff format", ".venv/bin/mypy"]
    assert {hook["language"] for hook in hooks} == {"system"}


@pytest.mark.parametrize("path", ISSUE_FORMS, ids=[path.stem for path in ISSUE_FORMS])
def test_issue_form_has_labelled_fields_with_unique_ids(path: Path) -> None:
    form = read_yaml(path)
    assert form["name"]
    assert form["description"]
    ids = [field["id"] for field in form["body"]]
    assert len(set(ids)) == len(ids)
    for field in form["body"]:
        assert field["type"] in FORM_FIELDS
        assert field["attributes"]["label"]


def test_issue_forms_are_bug_report_and_feature_request() -> None:
    assert [path.name for path in ISSUE_FORMS] == ["bug_report.yml", "feature_request.yml"]


@pytest.mark.parametrize("path", FILES_WITH_MAKE_COMMANDS, ids=lambda path: path.name)
def test_make_targets_of_project_files_exist(path: Path) -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    existing_targets = set(re.findall(r"^([a-z]+):", makefile, re.MULTILINE))
    used_targets = make_targets(path.read_text(encoding="utf-8"))
    assert used_targets, "the pattern of make_targets no longer matches this file"
    assert used_targets <= existing_targets
