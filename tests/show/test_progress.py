"""How a run goes: lines without a terminal, a display in one, a renewed output in a notebook."""

import io
import sys
from contextlib import closing
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from rich.console import Console
from rich.live import Live

from esper.show.progress import LINES, GrowthProgress
from tests.show.growth_runs import EPOCHS


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def shown(stream: io.StringIO | None, **more: str) -> str:
    with closing(GrowthProgress(stream, epochs=len(EPOCHS), params=642, **more)) as tell:
        for epoch in EPOCHS:
            tell(epoch)
    return "" if stream is None else stream.getvalue()


def test_without_a_terminal_there_is_one_plain_line_for_every_epoch() -> None:
    lines = shown(io.StringIO()).splitlines()
    assert len(lines) == len(EPOCHS)
    assert lines[1].startswith(
        "epoch 2/7 · loss 0.5000, validation 0.6000 · score 60.00 · 33 parameters in seeds · "
        "plant norm at body.act (ramp) · "
    )
    assert lines[1].endswith(" left")
    assert "left" not in lines[-1]
    assert "\x1b" not in "".join(lines)


def test_a_terminal_shows_figures_seeds_and_time_and_keeps_what_was_decided(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "120")
    text = shown(Terminal())
    assert "after epoch 4: prune wide at head" in text
    assert "score 85.00 · 642 + 33 parameters" in text
    assert "● norm at body.act: fossilized, alpha 1.00, +3.25 points" in text
    assert "epoch 7/7" in text
    assert "\x1b[?25h" in text, "the cursor is there again"


def test_where_it_runs_and_what_a_score_is_are_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    about = "on cpu in full precision; a score is the share of labels that are right, in percent"
    lines = shown(io.StringIO(), about=about).splitlines()
    assert lines[0] == about
    assert len(lines) == len(EPOCHS) + 1
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "120")
    assert about in shown(Terminal(), about=about)


def test_a_terminal_that_can_do_nothing_gets_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    assert len(shown(Terminal()).splitlines()) == len(EPOCHS)


def test_a_program_without_a_console_is_not_disturbed() -> None:
    assert shown(None) == ""


def test_a_reader_that_leaves_does_not_end_the_run() -> None:
    stream = io.StringIO()
    with closing(GrowthProgress(stream, epochs=len(EPOCHS), params=642)) as tell:
        tell(EPOCHS[0])
        stream.close()
        tell(EPOCHS[1])


def test_a_display_of_the_callers_own_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    with Live("mine", console=Console(file=Terminal())):
        assert "epoch 7/7" in shown(Terminal())


def test_a_notebook_renews_one_output(monkeypatch: pytest.MonkeyPatch) -> None:
    outputs: list[str] = []

    class Handle:
        def update(self, content: dict[str, str], raw: bool) -> None:
            outputs.append(content["text/plain"])

    def display(content: Any, *, raw: bool, display_id: bool) -> Handle:
        return Handle()

    ipython, displays = ModuleType("IPython"), ModuleType("IPython.display")
    vars(ipython)["get_ipython"] = lambda: SimpleNamespace(kernel=object())
    vars(displays)["display"] = display
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    monkeypatch.setitem(sys.modules, "IPython.display", displays)
    stream = io.StringIO()
    assert shown(stream) == ""
    assert [text.count("\n") + 1 for text in outputs] == list(range(1, len(EPOCHS) + 1))
    assert len(EPOCHS) <= LINES
    assert outputs[-1].splitlines()[-1].startswith("epoch 7/7")
