"""The map and the page of an audit show what was heard, what was not, and why."""

from dataclasses import replace
from pathlib import Path

import pytest
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from esper.leyline.errors import EsperError
from esper.show.audit_facts import Audit, Candidate, Verdict

NAMES = {"model": "Net", "places": ("stem", "head"), "blueprints": ("norm", "conv", "wide")}


def heard(slot: str, blueprint: str, gain: float, verdict: Verdict) -> Candidate:
    return Candidate(
        slot=slot, blueprint=blueprint, gain=gain, verdict=verdict, error=0.01, params=40,
        cost=0.5, epochs=3.0, train_gain=gain, slope=0.0,
    )  # fmt: skip


def audit() -> Audit:
    candidates = (
        heard("stem", "conv", 0.31, Verdict.MISSING), heard("stem", "norm", 0.0, Verdict.NOTHING),
        heard("head", "norm", -0.12, Verdict.MEMORISE),
    )  # fmt: skip
    return Audit(
        **NAMES, host_params=1000, room=100, slots=({"path": "stem"}, {"path": "head"}),
        costs=((10, 40, 900), (10, -1, 60)), candidates=candidates, guess=2.3, train_loss=1.0,
        val_loss=1.1, fell=0.2, first=1, epochs=3, spent=12.0, seconds=4.0, settings={"lr": 0.1},
    )  # fmt: skip


def cells(figure: Figure) -> list[Rectangle]:
    return [each for each in figure.axes[0].patches if isinstance(each, Rectangle)]


def test_the_map_hatches_what_was_not_heard_and_frames_what_is_missing() -> None:
    drawn = cells(audit().plot())
    hatched = {each.get_xy(): each.get_hatch() for each in drawn if each.get_hatch()}
    assert hatched == {(1.5, -0.5): "...", (0.5, 0.5): "///", (1.5, 0.5): "xx"}
    assert [each.get_xy() for each in drawn if not each.get_hatch()] == [(0.5, -0.5)]
    told = [text.get_text() for text in audit().plot(dark=True).axes[0].texts]
    assert told == ["+0.000", "+0.310", "-0.120"]


def test_the_page_needs_nothing_else_and_says_what_was_found(tmp_path: Path) -> None:
    page = audit().save(tmp_path / "new" / "audit.html").read_text(encoding="utf-8")
    assert (
        "conv at stem (+40) is missing: with it the validation loss falls by 0.310 ± 0.020" in page
    )
    assert "3 of 4 seeds that fit were heard" in page
    assert page.count("<td>would memorise</td>") == 1
    assert "http" not in page.replace("http-equiv", "")
    assert "conv at stem" in audit()._repr_html_()


def test_long_tables_are_summed_up_in_print() -> None:
    many = tuple(replace(audit().candidates[1], blueprint=f"kind{n}") for n in range(25))
    text = str(replace(audit(), candidates=many))
    assert "kind19" in text
    assert "kind20" not in text
    assert "and 5 more: 5 nothing to gain" in text


def test_without_matplotlib_a_map_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    with pytest.raises(EsperError, match="need matplotlib"):
        audit().plot()
