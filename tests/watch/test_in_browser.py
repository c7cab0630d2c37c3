"""The live page in a real browser: one Chromium and one server for all of it."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from esper.nissa import RunEnded
from tests.watch.served import begun, served, whole

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
HOSTILE = "<img src=x onerror=document.title='hacked'>"

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium on this machine")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    whole(folder / "first")
    whole(folder / HOSTILE)
    return folder


@pytest.fixture(scope="module")
def address(folder: Path) -> Iterator[str]:
    with served(folder) as page:
        yield page.address


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api")
    with playwright.sync_playwright() as started:
        found = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield found
        found.close()


@pytest.fixture
def page(browser: Any, address: str) -> Iterator[Any]:
    """A page of the browser; whatever it complains about fails the test."""
    context = browser.new_context()
    page, complaints = context.new_page(), []
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("console", lambda said: complaints.append(said.text) if said.type == "error" else None)
    page.set_default_timeout(20_000)
    page.goto(address)
    yield page
    context.close()
    assert complaints == []


def opened(page: Any, route: str) -> None:
    page.evaluate("route => { location.hash = route }", route)


def test_environments_move_while_a_run_is_written_and_a_decision_can_be_opened(
    page: Any, folder: Path
) -> None:
    with begun(folder / "moving") as run:
        page.get_by_role("link", name="moving").click()
        page.get_by_text("No episode has begun yet").wait_for()
        run.play(1)
        page.get_by_text("Round 1, epoch 10 of 10: 4 of 6 shown hosts hold a seed").wait_for()
        run.play(2)
        page.get_by_text("Round 2, epoch 10 of 10").wait_for()
        page.get_by_role("link", name="environment 1: accuracy 50.0 %, mid gate fossilized").click()
        page.get_by_text("Environment 1, round 2").wait_for()
        page.get_by_role("link", name="‹ before").click()
        page.get_by_text("Decision before epoch 9").wait_for()
        assert page.evaluate("location.hash") == "#/run/moving/round/2/env/1/step/8"
        page.reload()
        page.get_by_text("Decision before epoch 9").wait_for()
        run.hub.emit(RunEnded(round=2, state="stopped"))
    page.locator(".badge.stopped").wait_for()


def test_a_name_that_means_harm_is_only_a_name(page: Any) -> None:
    row = page.get_by_role("link", name=HOSTILE)
    row.wait_for()
    row.click()
    page.get_by_role("heading", name=HOSTILE).wait_for()
    assert page.evaluate("document.querySelectorAll('img').length") == 0
    assert "hacked" not in page.title() or HOSTILE in page.title()


def test_a_training_run_shows_its_curve_and_health(page: Any) -> None:
    opened(page, "#/run/first")
    for title in ("Score over rounds", "Entropy by head", "Gradient norms", "Where the time goes"):
        page.get_by_text(title).wait_for()
    curve = page.get_by_role("img", name="Score over rounds: now")
    assert "score by evaluation 0.3" in curve.get_attribute("aria-label")
