"""The page of a run of grow: all that there is to say of it, and nothing that is not so."""

import re
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from esper.show import theme as themes
from esper.show.growth_facts import Report
from esper.show.growth_page import growth, page
from esper.show.page import fill, spoken_flops
from esper.show.theme import DARK, LIGHT, AbsentError
from tests.show.growth_runs import EPOCHS, growth_facts


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Figures are made but not laid out and painted, which takes the time."""

    def made(draw: Callable[[themes.Theme], Figure], theme: themes.Theme) -> bytes:
        draw(theme)
        return b"not painted"

    monkeypatch.setattr(themes, "render", made)


class Balance(HTMLParser):
    """Fails where an element is not closed."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: object) -> None:
        if tag not in {"meta", "img", "source"}:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_a_page_is_written_with_its_pictures_in_both_themes(tmp_path: Path) -> None:
    written = growth_facts().write(tmp_path / "report")
    text = written.read_text(encoding="utf-8")
    names = {file.stem for file in written.parent.glob("*.png")}
    assert names == {"growth"}
    assert text.count("data:image/png;base64,") == 2 * len(names)
    assert not re.findall(r'(?:src|srcset|href)="(?!data:image|#)', text), "it loads nothing"
    assert all(words for words in re.findall(r'<img alt="([^"]*)"', text))
    reader = Balance()
    reader.feed(text)
    assert not reader.open


@pytest.mark.usefixtures("quick")
def test_the_page_says_what_grew_what_became_of_every_seed_and_why() -> None:
    text = str(page(growth_facts()))
    assert "my&lt;run&gt;" in text
    assert "my<run>" not in text
    for row in (
        "<td>norm</td><td>body.act</td><td>33</td><td>2</td><td>permanent after epoch 5</td>",
        "<td>wide</td><td>head</td><td>33</td><td>3</td><td>pruned after epoch 4</td>",
        "<td>mlp</td><td>head</td><td>33</td><td>6</td><td>switched off at the end after epoch 7<",
        "<td>5</td><td>keep norm at body.act</td><td>it pays</td>",
        "<td>train</td><td>14 s</td><td>57%</td><td>2 s</td>",
        "<td>operations</td><td>7 G</td><td></td><td>1 G</td>",
    ):
        assert row in text
    assert "<td>+3.25</td>" in text, "the contribution when it was last measured"
    assert "<th>precision</th><td>full</td>" in text


def test_the_headline_names_what_is_permanent_and_claims_nothing_else() -> None:
    said = page(growth_facts()).headline
    assert said == (
        "In 7 epochs norm at body.act grew into the network (33 parameters, +5.1 %). The exported "
        "network has accuracy 78.00 % (48.00 % before training)."
    )
    assert "nothing grew for good" in page(growth_facts(4)).headline
    assert "So far the network has accuracy 70.00 %" in page(growth_facts(4)).headline
    assert page(growth_facts(0)).headline == "Nothing has been trained yet."


def tiles_of(facts: Report) -> list[tuple[str, ...]]:
    """What each of the page's figures is, its value, and what is said of it."""
    tile = "<dt>(.*?)</dt><dd>(.*?)<small>(.*?)</small>"
    return re.findall(tile, page(facts).tiles)


def test_figures_are_those_of_the_run() -> None:
    found = {what: (value, more) for what, value, more in tiles_of(growth_facts())}
    assert found["accuracy"] == ("78.00 %", "before training 48.00 %")
    assert found["parameters"] == ("642 + 33", "+5.1 %, allowed 100")
    assert found["seeds kept"] == ("1", "of 3 planted")
    assert found["time"] == ("24 s", "cpu, full")
    assert found["FLOPs of training"][0] == "7 G"


def test_a_run_that_is_not_finished_or_has_no_test_data_is_told_as_that() -> None:
    assert any("4 of 7 epochs" in caution for caution in page(growth_facts(4)).cautions)
    finished = growth_facts()
    assert not any("not finished" in caution for caution in page(finished).cautions)
    tested = replace(finished, after=finished.after | {"test_score": 70.0})
    assert any("validation data" in caution for caution in page(finished).cautions)
    assert not any("validation data" in caution for caution in page(tested).cautions)
    assert ("on test data", "70.00 %", "which nothing looked at") in tiles_of(tested)


def test_a_seed_is_shown_in_the_epochs_that_it_trains_in_and_decisions_before_them() -> None:
    story = growth_facts().story
    norm = [(cell.step, cell.stage, cell.alpha) for cell in story.cells if cell.blueprint == "norm"]
    # Planted after epoch 2, so that it trains in the third, whose place is 2.
    assert norm[:2] == [(2, "TRAINING", 0.0), (3, "BLENDING", 0.5)]
    assert norm[-1][0] == len(EPOCHS) - 1, "nothing trains after the last epoch"
    assert [step for step, op, _ in story.marks if op == "PRUNE"] == [4]


@pytest.mark.parametrize("theme", [LIGHT, DARK], ids=lambda theme: theme.name)
@pytest.mark.parametrize("epochs", [1, 3, 7])
def test_the_picture_can_be_drawn_of_a_run_of_any_length(epochs: int, theme: object) -> None:
    assert isinstance(growth(growth_facts(epochs), theme), Figure)  # type: ignore[arg-type]


def test_curves_show_the_network_with_and_without_what_grew() -> None:
    figure = growth(growth_facts(), LIGHT)
    score, losses, worth, _ = figure.axes
    lines = {str(line.get_label()): line for line in score.get_lines()}
    assert {"network as it is", "what is permanent", "without norm at body.act"} <= set(lines)
    without = dict(zip(*lines["without norm at body.act"].get_data(), strict=True))
    assert without[3] == 65.0 - 1.5, "the score of epoch 3 less what the seed contributed"
    assert {str(line.get_label()) for line in losses.get_lines()} == {"training", "validation"}
    assert "norm at body.act" in {str(line.get_label()) for line in worth.get_lines()}


def test_what_was_not_recorded_is_absent_and_says_so() -> None:
    bare = replace(
        growth_facts(), parts=(), epochs=[replace(e, seconds={}, flops=None) for e in EPOCHS]
    )
    (cost,) = (each for each in page(bare).sections if each.title == "What it cost")
    assert (cost.more, cost.absent) == ("", ["What this run cost was not recorded."])
    with pytest.raises(AbsentError, match="No epoch"):
        growth(growth_facts(0), LIGHT)
    assert fill("drawing", facts=bare) == ""
    sections = {section.title: section for section in page(growth_facts(1)).sections}
    assert sections["Every seed"].absent == ["Nothing was planted."]
    assert sections["Decisions"].absent == ["Nothing was decided but to wait."]


def test_the_drawing_has_every_module_and_slot_and_bars_on_one_scale() -> None:
    found = fill("drawing", facts=growth_facts())
    assert found.count('class="module"') == 4, "one is opened"
    assert "norm · 33 parameters" in found
    assert found.count('style="--share: 1.0"') == 1, "the largest part"
    assert f'style="--share: {33 / 336:.3f}"' in found, "a seed's, on the same scale"
    assert "slot head, empty" in found
    assert "tried: wide, mlp" in found
    assert "&lt;Head&gt;" in found
    words = re.sub("<[^>]*>", " ", found)
    assert re.search(r"body.act +ReLU · no parameters +norm · 33 parameters", words), (
        "read in order"
    )


@pytest.mark.parametrize(
    ("value", "said"),
    [(None, "not counted"), (0.0, "0"), (999.0, "999"), (1500.0, "1.5 k"), (2.5e12, "2.5 T")],
)
def test_large_numbers_have_a_unit(value: float | None, said: str) -> None:
    assert spoken_flops(value) == said


@pytest.mark.usefixtures("quick")
def test_a_notebook_gets_the_head_of_the_page_and_a_figure_that_shows_itself() -> None:
    found = page(growth_facts()).inline()
    assert "norm at body.act grew into the network" in found
    assert found.count("data:image/png;base64,") == 2
    assert growth_facts(1).plot()._repr_png_().startswith(b"\x89PNG")  # type: ignore[attr-defined]
