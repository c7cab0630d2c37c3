"""Reports say what is in a run, and what is not."""

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure

from esper.leyline.errors import EsperError
from esper.leyline.ops import LifecycleOp
from esper.leyline.stages import SeedStage
from esper.nissa import Attributed, StoreError
from esper.show import theme as themes
from esper.show import write_report
from esper.show.page import sentences_of
from esper.show.palette import OP_COLOURS, STAGE_COLOURS
from esper.show.run_facts import Facts, Score, choose, read_facts, signed
from esper.show.theme import DARK, LIGHT, render
from esper.show.timelines import lives, shown_slots
from esper.show.training_page import (
    binned,
    contents,
    page,
)
from tests.show.report_runs import BLUEPRINTS, STEPS, Run, keep, whole_run

PICTURES = {
    "learning-curve", "timeline-best", "timeline-typical", "timeline-worst", "timeline-waiting",
    "parameters", "actions",
}  # fmt: skip


@pytest.fixture(scope="module")
def reported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of a whole run."""
    return write_report(whole_run(tmp_path_factory.mktemp("runs") / "whole"))


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Figures are made but not laid out and painted, which takes the time."""

    def made(draw: Callable[[themes.Theme], Figure], theme: themes.Theme) -> bytes:
        draw(theme)
        return b"not painted"

    monkeypatch.setattr(themes, "render", made)


@pytest.fixture
def light(monkeypatch: pytest.MonkeyPatch) -> None:
    """Figures of one theme are painted, those of the other only made."""

    def made(draw: Callable[[themes.Theme], Figure], theme: themes.Theme) -> bytes:
        return render(draw, theme) if theme is LIGHT else bytes(bool(draw(theme)))

    monkeypatch.setattr(themes, "render", made)


# --- a whole run ---------------------------------------------------------------------------


def test_a_report_is_a_page_and_its_pictures(reported: Path) -> None:
    assert reported.name == "index.html"
    assert reported.parent.name == "report"
    pictures = {file.stem: file.read_bytes() for file in reported.parent.glob("*.png")}
    assert set(pictures) == PICTURES
    assert all(png.startswith(b"\x89PNG") for png in pictures.values())


def test_the_page_holds_every_picture_in_both_themes_and_asks_for_nothing(reported: Path) -> None:
    text = reported.read_text(encoding="utf-8")
    assert text.count("data:image/png;base64,") == 2 * len(PICTURES)
    links = re.findall(r'(?:src|srcset|href)="([^"]{0,40})', text)
    assert links
    assert all(link.startswith(("data:image/png", "#")) for link in links)
    assert not re.search(r"https?:|@import|url\(|<script", text)
    assert "default-src 'none'" in text


def test_the_page_says_what_was_learned(reported: Path) -> None:
    text = reported.read_text(encoding="utf-8")
    assert "Tamiyo scores +0.40 [+0.30, +0.50] at its best, in round 2" in text
    assert "clearly above random decisions (−0.30 [−0.40, −0.20])" in text
    assert "not distinguishable from the heuristic (+0.35 [+0.25, +0.45])" in text
    assert "After 12 episodes in 2 rounds and 24 s" in text


def test_the_page_shows_settings_anomalies_and_failures(reported: Path) -> None:
    text = reported.read_text(encoding="utf-8")
    assert "<th>target_kl</th><td>0.05</td>" in text
    assert "Entropy collapse of head &#39;op&#39;" in text
    assert "Raise entropy_coef." in text
    assert "1 of 12 episodes failed and were rolled back" in text
    assert "Rolled back in epoch 10: loss is NaN" in text
    assert "The versions of this run were not recorded" in text


@pytest.mark.usefixtures("quick")
def test_the_page_shows_what_the_best_episodes_seeds_are_worth(tmp_path: Path) -> None:
    with Run(tmp_path) as run:
        run.play(1)
        for number, score in ((1, 0.7), (2, 0.3)):
            run.hub.emit(
                Attributed(
                    round=number,
                    controller="tamiyo",
                    context="gain",
                    seed=5,
                    score=score,
                    slot=[0, 2],
                    blueprint=[0, 1],
                    shapley=[2 * score, -1.0],
                    left_out=[1.0, 0.5],
                )
            )
    text = write_report(tmp_path).read_text(encoding="utf-8")
    assert "score +0.70, is case 5 of gain in round 1" in text
    first, second = BLUEPRINTS[:2]
    assert f"<td>early</td><td>{first}</td><td>+1.40</td><td>+1.00</td>" in text
    assert f"<td>late</td><td>{second}</td><td>−1.00</td><td>+0.50</td>" in text


def test_a_picture_is_the_same_every_time(tmp_path: Path) -> None:
    facts = read_facts(whole_run(tmp_path))
    draw = contents(facts)[0].pictures[0].draw
    assert render(draw, LIGHT) == render(draw, LIGHT)
    assert render(draw, LIGHT) != render(draw, DARK)


# --- runs that lack something --------------------------------------------------------------


@pytest.mark.usefixtures("light")
def test_a_run_of_one_round_is_drawn(tmp_path: Path) -> None:
    with Run(tmp_path, planned=5) as run:
        run.play(1)
        run.learn(1)
        run.judge(1, "tamiyo", 0.1, spread=0.0)
    text = write_report(tmp_path).read_text(encoding="utf-8")
    assert text.count("data:image/png") == 2 * len(PICTURES)
    assert "The run is not finished: 1 of 5 rounds so far." in text
    assert "There are no intervals" in text
    assert "No baseline was evaluated" in text
    assert "Tamiyo scores +0.10 at its best" in text


@pytest.mark.usefixtures("quick")
def test_what_was_not_recorded_is_named(tmp_path: Path) -> None:
    with Run(tmp_path) as run:
        run.judge(0, "random", -0.3)
        run.play(1)
    (tmp_path / "config.toml").write_text("envs = 12")  # twice as many as have told anything
    text = write_report(tmp_path).read_text(encoding="utf-8")
    assert "the controller has not been evaluated yet. To compare with: random" in text
    assert "No update of the learner has been recorded yet" in text
    assert "No times of phases have been recorded" in text
    assert "Episodes were recorded but no update" in text
    assert "In 1 of 1 rounds there are fewer episodes than the 12 environments" in text


@pytest.mark.usefixtures("quick")
def test_a_run_without_telemetry_has_its_settings(tmp_path: Path) -> None:
    with Run(tmp_path):
        pass
    (tmp_path / "events.sqlite").unlink()
    text = write_report(tmp_path).read_text(encoding="utf-8")
    assert "Nothing has been played yet." in text
    assert "No decision has been recorded yet" in text
    assert "No episode has ended yet" in text
    assert "<th>suite</th><td>garden_mlp</td>" in text
    assert "data:image" not in text


@pytest.mark.usefixtures("quick")
def test_a_store_without_settings_is_enough(tmp_path: Path) -> None:
    whole_run(tmp_path)
    (tmp_path / "config.toml").unlink()
    assert "There is no config.toml." in write_report(tmp_path).read_text(encoding="utf-8")


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="There is no telemetry at"):
        write_report(tmp_path / "nowhere")
    with pytest.raises(StoreError, match="There is no telemetry at"):
        write_report(tmp_path)


@pytest.mark.usefixtures("quick")
def test_a_run_is_only_read(tmp_path: Path) -> None:
    whole_run(tmp_path / "run")

    def contents() -> dict[Path, bytes]:
        files = (file for file in (tmp_path / "run").rglob("*") if file.is_file())
        return {file: file.read_bytes() for file in files}

    before = contents()
    write_report(tmp_path / "run", tmp_path / "out")
    assert contents() == before


@pytest.mark.usefixtures("quick")
def test_a_run_may_be_written_meanwhile(tmp_path: Path) -> None:
    with Run(tmp_path / "run", planned=9) as run:
        run.play(1)
        run.hub.commit(1)
        text = write_report(tmp_path / "run", tmp_path / "out").read_text(encoding="utf-8")
        assert "After 6 episodes in 1 round," in text
        run.play(2)
        run.hub.commit(2)
        text = write_report(tmp_path / "run", tmp_path / "out").read_text(encoding="utf-8")
        assert "After 12 episodes in 2 rounds," in text


def test_pictures_of_an_older_report_do_not_stay(tmp_path: Path, quick: None) -> None:
    whole_run(tmp_path / "run")
    out = tmp_path / "out"
    out.mkdir()
    (out / "timeline-formerly.png").write_bytes(b"")
    (out / "mine.png").write_bytes(b"")
    write_report(tmp_path / "run", out)
    assert not (out / "timeline-formerly.png").exists()
    assert (out / "mine.png").exists()


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path, quick: None) -> None:
    whole_run(tmp_path / "run")
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match=str(tmp_path / "file")):
        write_report(tmp_path / "run", tmp_path / "file")


def test_names_from_outside_are_not_markup(tmp_path: Path) -> None:
    with Run(tmp_path) as run:
        run.play(1, contexts=["<b>context</b>"])
    (tmp_path / "config.toml").write_text('suite = "<script>x</script>"\nrounds = 1\n')
    facts = read_facts(tmp_path)
    assert facts.stories[0].episode["context"] == "<b>context</b>"
    text = str(page(facts))
    assert "<script>" not in text
    assert "&lt;script&gt;" in text


def test_the_page_says_what_the_seeds_of_the_best_episode_are_worth() -> None:
    seed = {"slot": "early", "blueprint": "norm", "shapley": 1.25, "left_out": -0.5}
    row = {**seed, "score": 0.4, "seed": 7, "context": "<xor>", "round": 2}
    text = str(page(Facts(path=Path("run"), attribution=[row])))
    assert "with score +0.40, is case 7 of &lt;xor&gt; in round 2" in text
    assert "<td>early</td><td>norm</td><td>+1.25</td><td>−0.50</td>" in text
    assert "Whose doing" not in str(page(Facts(path=Path("run"))))


def test_without_matplotlib_one_sentence_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(EsperError, match=r"pip install '\.\[report\]'"):
        write_report(tmp_path)


def test_importing_reports_imports_neither_matplotlib_nor_torch() -> None:
    code = (
        "import sys; from esper.show import write_report; "
        "print({'matplotlib', 'torch'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


# --- what is read --------------------------------------------------------------------------


def test_packed_environments_tell_the_same_stories(tmp_path: Path) -> None:
    """Of a large population only the first environments have rows of their own."""
    found = []
    for rows in (256, 1):
        with Run(tmp_path / str(rows), rows=rows) as run:
            run.play(1)
        found.append(read_facts(tmp_path / str(rows)).stories)
    assert [story.kind for story in found[0]] == ["best", "typical", "worst", "waiting"]
    for rows, packs in zip(*found, strict=True):
        assert rows.episode["env"] == packs.episode["env"]
        assert rows.cells == packs.cells
        assert rows.accuracy.tolist() == packs.accuracy.tolist()
        assert any(cell.alpha for cell in rows.cells) == (rows.kind != "waiting")


def test_the_control_is_the_curve_of_the_same_case(tmp_path: Path) -> None:
    whole_run(tmp_path)
    assert all(story.control is None for story in read_facts(tmp_path).stories)
    seed = read_facts(tmp_path).stories[0].episode["seed"]
    right = np.concatenate([np.linspace(20, 47, STEPS - 3), np.full(3, 50.0), [99.0]])
    wrong = np.full(STEPS + 1, 70.0)
    curves = {"aa": torch.tensor(wrong), "bb": torch.tensor(right)}
    known = {f"controls.{name}.{seed}": curve for name, curve in curves.items()}
    keep(tmp_path, 2, [], **known)
    story = read_facts(tmp_path).stories[0]
    assert story.control is not None
    assert story.control.tolist() == right[:-1].tolist()


def test_the_chosen_episodes_are_the_best_the_median_the_worst_and_one_that_waited() -> None:
    gains = [3.0, -1.0, 2.0, 8.0, 0.0, 1.0]
    rows = [
        {"round": 1, "env": env, "net_gain": gain, "context": "a"} for env, gain in enumerate(gains)
    ]
    plantings = [{"round": 1, "env": env} for env in (0, 1, 2, 3, 5)]
    chosen = {kind: row["env"] for kind, row in choose(rows, plantings).items()}
    assert chosen == {"best": 3, "typical": 2, "worst": 1, "waiting": 4}
    assert choose([], []) == {}
    assert set(choose(rows[:1], plantings)) == {"best"}


def test_contexts_are_told_by_their_episodes_the_greatest_gain_first(tmp_path: Path) -> None:
    with Run(tmp_path) as run:
        run.play(1)
    told = {section.title: section.more for section in contents(read_facts(tmp_path))}
    rows = re.findall("<tr>(<td>.*?)</tr>", told["What it does in each context"])
    assert [re.findall("<td>(.*?)</td>", row) for row in rows] == [
        ["gain-2.0", "2", "+3.0", "0%", "gate at mid (100%)", "2"],
        ["xor-0.2", "2", "+2.0", "0%", "norm at early (100%)", "2"],
        ["noise-80", "2", "0.0", "100%", "—", "—"],
    ]


def test_metrics_of_updates_are_told_from_the_first_to_the_last() -> None:
    kl = {1: 0.5, 2: float("nan"), 3: 0.25, 4: 1.0}
    updates = {"kl": kl, "heads.op.entropy": {1: 0.75}, "valid_steps": {1: 640.0}}
    told = {each.title: each.more for each in contents(Facts(path=Path("run"), updates=updates))}
    rows = re.findall("<tr>(<td>.*?)</tr>", told["Health of the learning"])
    assert [re.findall("<td>(.*?)</td>", row) for row in rows] == [
        ["heads.op.entropy", *["0.75"] * 5],
        ["kl", "0.5", "1", "0.25", "0.5", "1"],
    ]


def test_lives_of_a_slot_end_with_the_removal(tmp_path: Path) -> None:
    with Run(tmp_path) as run:
        run.play(1)
    story = next(each for each in read_facts(tmp_path).stories if each.kind == "best")
    slot = story.slots[story.episode["env"] % 3]
    (life,) = lives([cell for cell in story.cells if cell.slot == slot])
    assert [cell.step for cell in life] == list(range(1, STEPS))
    assert life[0].blueprint == ("norm", "gate", "bottleneck")[story.episode["env"] % 3]


def test_of_many_slots_only_the_used_ones_are_drawn(tmp_path: Path) -> None:
    with Run(tmp_path, slots=16) as run:
        run.play(1)
    stories = {story.kind: story for story in read_facts(tmp_path).stories}
    assert shown_slots(stories["best"]) == (f"s{stories['best'].episode['env']}",)
    assert shown_slots(stories["waiting"]) == ("s0", "s1", "s2", "s3")


def test_no_second_is_counted_twice() -> None:
    seconds = {"play": 10.0, "step": 7.0, "decide": 1.0, "learn": 2.0}
    facts = Facts(path=Path("run"), seconds=seconds)
    found = facts.phases
    assert found["play"] == 2.0
    assert sum(found.values()) == 12.0 == facts.training_seconds


def test_many_rounds_are_averaged_in_bins() -> None:
    shares = [(number, {"a": 1.0, "b": 0.0}) for number in range(1, 401)]
    edges, heights = binned(shares)
    assert len(edges) <= 81
    assert (edges[0], edges[-1]) == (0.5, 400.5)
    assert heights[0].tolist() == [1.0] * (len(edges) - 1)
    edges, heights = binned([shares[0], shares[3]])  # in between there was nothing to count
    assert heights[0].tolist() == [1.0, 0.0, 0.0, 1.0]


# --- words and looks -----------------------------------------------------------------------


def test_below_and_between_are_said_as_they_are() -> None:
    learned = [Score(1, 0.0, (-0.1, 0.1))]
    facts = Facts(
        path=Path("run"), learned=learned, baselines={"heuristic": Score(0, 0.5, (0.4, 0.6))}
    )
    assert "clearly below the heuristic" in facts.headline
    assert "not distinguishable from never growing" in facts.headline
    assert not any("flatters" in text for text in sentences_of("cautions-training", facts))


@pytest.mark.parametrize(("value", "text"), [(0.0, "0.00"), (-0.001, "0.00"), (-1.5, "−1.50")])
def test_zero_has_no_sign(value: float, text: str) -> None:
    assert signed(value) == text


def test_every_stage_and_op_has_a_colour() -> None:
    assert set(STAGE_COLOURS) == {stage.name for stage in SeedStage}
    assert set(OP_COLOURS) == {op.name for op in LifecycleOp}
