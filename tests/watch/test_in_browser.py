"""The live page in a real browser: one Chromium and one server for all of it."""

import fcntl
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from esper.nissa import RunEnded
from tests.watch.served import begun, compared, grown, seen, served, whole

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
HOSTILE = "<img src=x onerror=document.title='hacked'>"

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium on this machine")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    whole(folder / "first")
    whole(folder / HOSTILE)
    whole(folder / "second", rounds=2, state="stopped")
    grown(folder / "net")
    seen(folder / "seen")
    compared(folder / "results.jsonl")
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
    assert page.title() == f"{HOSTILE} · Esper"
    page.get_by_text("Score over rounds").wait_for()
    opened(page, f"#/compare/first/{quote(HOSTILE, safe='')}")
    page.get_by_role("img", name=f"Score by evaluation: now first 0.3, {HOSTILE} 0.3").wait_for()
    assert page.evaluate("document.querySelectorAll('img').length") == 0
    assert page.title() == "Esper"


def test_a_decision_has_its_chances_what_was_closed_and_why_and_what_was_seen(page: Any) -> None:
    opened(page, "#/run/seen/round/1/env/2/step/0")
    chosen = page.locator(".actions li.taken").first
    chosen.wait_for()
    assert chosen.inner_text().split() == ["ADVANCE", "62.5", "%"]
    page.get_by_text("mid, late: 0 epochs in TRAINING, at least 1 needed").wait_for()
    page.locator("li.closed", has_text="PRUNE").wait_for()
    page.get_by_text("4 features").wait_for()
    assert page.get_by_role("row", name="alpha").inner_text().split() == [
        "alpha",
        "0.25",
        "0.5",
        "1",
    ]
    page.get_by_text("objective").wait_for()


def test_a_training_run_shows_its_curve_and_health(page: Any) -> None:
    opened(page, "#/run/first")
    for title in ("Score over rounds", "Entropy by head", "Gradient norms", "Where the time goes"):
        page.get_by_text(title).wait_for()
    curve = page.get_by_role("img", name="Score over rounds: now")
    assert "score by evaluation 0.3" in curve.get_attribute("aria-label")


def test_a_network_that_grows_shows_its_places_its_audition_and_why_it_waited(page: Any) -> None:
    opened(page, "#/run/net")
    page.get_by_role("img", name="budget: 100 of the model, 40 in seeds, 10 left").wait_for()
    page.get_by_text("conv training, +7.50 points").wait_for()
    page.get_by_role("cell", name="conv at 0: gain +0.2500 ± 0.02").wait_for()
    page.get_by_text("plant conv at 0").wait_for()
    seeds = page.locator("svg.episode rect[fill-opacity]")  # the third epoch and the fourth
    strengths = seeds.evaluate_all("found => found.map(each => each.getAttribute('fill-opacity'))")
    assert strengths == ["0.28", "0.64"], "faint at alpha 0, stronger at a half"
    page.get_by_text("ValueError of yours").wait_for()
    opened(page, "#/run/net/round/3/env/0/step/0")
    page.get_by_text("Decision after epoch 3").wait_for()
    page.get_by_text("0: 0 epochs in TRAINING").wait_for()


def test_an_evaluation_shows_controllers_against_each_other(page: Any) -> None:
    opened(page, "#/run/results")
    page.get_by_role("row", name="tamiyo +0.40 ± ").wait_for()
    page.get_by_role("cell", name="tamiyo in gain: +0.60, 2 episodes").wait_for()


def test_two_runs_that_were_chosen_are_compared_with_the_keyboard_too(page: Any) -> None:
    for name in ("first", "second"):
        page.get_by_label(f"compare {name}").press("Space")
    page.get_by_role("button", name="Compare 2").press("Enter")
    page.get_by_role("img", name="Score by evaluation: now first 0.3, second 0.2").wait_for()
    assert page.evaluate("location.hash") == "#/compare/first/second"
    page.keyboard.press("o")
    page.get_by_role("heading", name="Runs").wait_for()
    page.keyboard.press("/")
    page.keyboard.type("stopped")
    page.get_by_role("link", name="first", exact=True).wait_for(state="hidden")


SEEN = """(seen) => {
  Object.defineProperty(document, "hidden", {get: () => !seen, configurable: true});
  document.dispatchEvent(new Event("visibilitychange"));
}"""


def test_a_browser_that_was_cut_off_or_hidden_misses_nothing(
    browser: Any, address: str, folder: Path
) -> None:
    context = browser.new_context()
    page = context.new_page()
    page.set_default_timeout(20_000)
    page.goto(address)
    with begun(folder / "lonely") as run:
        run.play(1)
        page.get_by_role("link", name="lonely").click()
        page.get_by_text("Round 1, epoch 10 of 10").wait_for()
        context.set_offline(True)
        run.play(2)
        page.wait_for_timeout(300)
        assert page.get_by_text("Round 1, epoch 10 of 10").is_visible(), "what is known stays"
        context.set_offline(False)
        page.get_by_text("Round 2, epoch 10 of 10").wait_for()
        page.evaluate(SEEN, False)
        run.play(3)
        page.wait_for_timeout(300)
        assert page.get_by_text("Round 2, epoch 10 of 10").is_visible(), "nobody sees it"
        page.evaluate(SEEN, True)
        page.get_by_text("Round 3, epoch 10 of 10").wait_for()
    context.close()


def test_a_run_whose_process_was_killed_turns_stale(page: Any, folder: Path) -> None:
    with begun(folder / "killed") as run:
        lock = (folder / "killed" / "lock").open("w")
        fcntl.flock(lock, fcntl.LOCK_EX)
        run.learn(1)
        page.get_by_role("link", name="killed").click()
        page.get_by_role("heading", name="killed").wait_for()  # the list has badges of its own
        page.locator(".badge.running").wait_for()
        lock.close()  # as the end of its process would
        page.locator(".badge.stale").wait_for()
    page.get_by_text("its process is gone").wait_for()


def test_a_phone_has_room_for_it_and_the_dark_is_dark(browser: Any, address: str) -> None:
    phone = {"width": 390, "height": 844}
    context = browser.new_context(viewport=phone, color_scheme="dark")
    page = context.new_page()
    page.goto(f"{address}#/run/first")
    page.get_by_text("Gradient norms").wait_for()
    wide = page.evaluate("document.documentElement.scrollWidth")
    paper = page.evaluate("getComputedStyle(document.body).backgroundColor")
    context.close()
    assert wide <= phone["width"]
    assert paper == "rgb(23, 26, 33)"
