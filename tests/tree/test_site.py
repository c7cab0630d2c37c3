"""The documentation as a site: complete, no broken link, and nothing loaded from elsewhere."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import esper
from esper import api

ROOT = Path(__file__).parents[2]
# Of no use but to the command line.
LEFT_OUT = {"__version__", "GrowthFolder", "read_report"}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site. Strict: a page that is missing in the menu, a link to nowhere and a name that
    the reference cannot find are errors. (With --quiet they would pass.)"""
    folder = tmp_path_factory.mktemp("site")
    build = [sys.executable, "-m", "mkdocs", "build", "--strict", "-d", str(folder)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(
        build, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return folder


def test_every_page_of_the_documentation_is_in_the_site(site: Path) -> None:
    pages = {page.stem for page in (ROOT / "docs").glob("*.md")}
    assert pages | {"index", "contributing"} <= {page.stem for page in site.glob("*.html")}


def test_pages_load_nothing_from_elsewhere(site: Path) -> None:
    loaded = r'<(?:script|img|iframe|link)[^>]*(?:src|href)="?((?:https?:)?//[^">\s]+)'
    found = {
        address
        for page in site.glob("*.html")
        for address in re.findall(loaded, page.read_text(encoding="utf-8"))
    }
    assert not found


def test_the_reference_has_every_name_that_a_user_needs(site: Path) -> None:
    anchors = re.findall(r'id="esper\.([\w.]+)"', (site / "reference.html").read_text("utf-8"))
    described = {name.split(".")[-1] for name in anchors}
    assert not {*esper.__all__, *api.__all__} - described - LEFT_OUT
