"""Suites: the shipped ones, files, and what is refused."""

from dataclasses import replace
from pathlib import Path

import pytest

from esper.garden import (
    FAMILIES,
    SUITES,
    Context,
    Source,
    Suite,
    find_suite,
    load_suite,
    save_suite,
)
from esper.leyline.constants import MIN_REWARD_SCALE
from esper.leyline.errors import DataError, DuplicateNameError, EsperError, UnknownNameError

A, B = (
    Context(name=name, family="xor", source=Source(family="xor", seed=seed))
    for seed, name in enumerate("ab")
)
every_suite = pytest.mark.parametrize("name", SUITES)


# --- shipped -------------------------------------------------------------------------------


@every_suite
def test_a_shipped_suite_survives_a_file(name: str, tmp_path: Path) -> None:
    suite = find_suite(name)
    save_suite(suite, tmp_path / "suite.toml")
    again = load_suite(tmp_path / "suite.toml")
    assert again == suite
    assert hash(again) == hash(suite)
    assert find_suite(tmp_path / "suite.toml") == suite


@every_suite
def test_a_shipped_suite_has_the_three_kinds_of_held_out_contexts(name: str) -> None:
    suite = find_suite(name)
    assert list(suite.heldout) == ["task", "host", "lesion"]
    shapes = {context.host_shape for context in suite.training}
    assert len(shapes) == 1  # one population can hold them
    assert {context.host_shape for context in suite.heldout["task"]} == shapes
    assert {context.host_shape for context in suite.heldout["lesion"]} == shapes
    assert not {context.host_shape for context in suite.heldout["host"]} & shapes
    assert all(context.lesion for context in suite.heldout["lesion"])
    lesions = {(each.lesion, each.source) for each in suite.training if each.lesion}
    assert not lesions & {(each.lesion, each.source) for each in suite.heldout["lesion"]}


@every_suite
def test_a_family_has_one_scale_and_it_is_large_enough(name: str) -> None:
    scales: dict[str, float] = {}
    for context in find_suite(name):
        assert context.scale == scales.setdefault(context.family, context.scale)
        assert context.scale >= MIN_REWARD_SCALE


@every_suite
def test_a_quarter_of_training_has_nothing_to_gain(name: str) -> None:
    training = find_suite(name).training
    idle = [each for each in training if each.family in ("noise", "small", "fixed")]
    assert 0.2 <= len(idle) / len(training) <= 0.35


def test_the_garden_has_every_family_lesion_and_stage() -> None:
    training = find_suite("garden").training
    fixed = {name for name, family in FAMILIES.items() if not family.any_classes}
    assert {context.source.family for context in training} == fixed
    assert {context.family for context in training} == {
        *("mnist1d", "gain", "xor", "shuffled", "noise", "small", "fixed", "lesion"),
        *("drift", "drift_xor"),
    }
    lesions = [context.lesion for context in training if context.lesion]
    assert {lesion.kind for lesion in lesions} == {"narrow", "tap"}
    assert {lesion.stage for lesion in lesions} == {0, 1, 2}
    assert any(context.drift for context in training)


def test_a_suite_is_built_once() -> None:
    assert find_suite("garden") is find_suite("garden")


# --- values --------------------------------------------------------------------------------


def test_a_suite_is_iterated_from_its_training_contexts_on() -> None:
    suite = Suite(name="mine", training=(A,), heldout={"task": (B,)})
    assert list(suite) == [A, B]
    assert suite.groups() == {"training": (A,), "task": (B,)}
    assert str(suite) == f"suite mine\n  training\n    {A}\n  held out: task\n    {B}"


def test_a_context_is_found_by_its_name_in_any_group() -> None:
    suite = Suite(name="mine", training=(A,), heldout={"task": (replace(B, name="beta"),)})
    assert suite.find("a") == A
    assert suite.find("beta").source == B.source
    with pytest.raises(UnknownNameError, match=r"context of suite 'mine'.*did you mean 'beta'"):
        suite.find("betta")


def test_a_suite_keeps_its_own_table_of_groups() -> None:
    groups = {"task": (B,)}
    suite = Suite(name="mine", training=(A,), heldout=groups)
    groups.clear()
    assert suite.heldout == {"task": (B,)}


def test_an_unknown_suite_is_refused_with_a_suggestion() -> None:
    with pytest.raises(UnknownNameError, match=r"Unknown suite; .*TOML.*did you mean 'garden'"):
        find_suite("gardn")


def test_two_contexts_of_one_name_are_refused() -> None:
    with pytest.raises(DuplicateNameError, match=r"Two contexts of suite 'x' have one name.*'a'"):
        Suite(name="x", training=(A, replace(B, name="a")))


def test_what_was_trained_in_is_not_held_out() -> None:
    with pytest.raises(DuplicateNameError, match="nothing but their name; given: 'a' and 'c'"):
        Suite(name="x", training=(A,), heldout={"task": (replace(A, name="c", scale=9.0),)})


def test_empty_groups_are_refused() -> None:
    with pytest.raises(DataError, match="Suite 'x' has no contexts in 'training'"):
        Suite(name="x", training=())
    with pytest.raises(DataError, match="Suite 'x' has no contexts in 'host'"):
        Suite(name="x", training=(A,), heldout={"host": ()})


def test_a_held_out_group_cannot_be_called_training() -> None:
    with pytest.raises(EsperError, match="cannot be called 'training'"):
        Suite(name="x", training=(A,), heldout={"training": (B,)})


# --- files ---------------------------------------------------------------------------------

CONTEXT = """
[[training]]
name = "mine"
family = "gain"
source = { family = "gain", gain = 1.5 }
"""


def test_a_short_file_is_enough(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('name = "mine"\n' + CONTEXT)
    source = Source(family="gain", gain=1.5)
    context = Context(name="mine", family="gain", source=source)
    assert load_suite(path) == Suite(name="mine", training=(context,))


def test_odd_names_survive_a_file(tmp_path: Path) -> None:
    odd = "a.b-c_1+2"
    suite = Suite(name=odd, training=(replace(A, name=odd),), heldout={odd: (B,)})
    save_suite(suite, tmp_path / "odd.toml")
    assert load_suite(tmp_path / "odd.toml") == suite


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("name = ", "is not TOML; given: Invalid value"),
        ("", "A suite lacks its name; given: nothing"),
        ('name = "x"', "A suite lacks its training; given: name"),
        ('name = "x"\ntraining = []', "has no contexts in 'training'"),
        ('name = "x"\ntraining = 3', r"Wrong type of training in a suite; given: 3.*\[\[training"),
        ('name = "x"\ntraining = [3]', "training context number 1: Wrong type of context"),
        ('name = "x"\nheldout = []' + CONTEXT, r"Wrong type of heldout in a suite; given: \[\]"),
        ('name = "x"\nheldout.task = 3' + CONTEXT, "Wrong type of heldout.task in a suite"),
        ('name = "x"\ntrainings = []', "Unknown key of a suite.*did you mean 'training'"),
        ("name = 3" + CONTEXT, "Impossible name of a suite; given: 3"),
        ('name = "x"' + CONTEXT + "sorce = 1", "training context 'mine': Unknown key.*'source'"),
        (
            'name = "x"' + CONTEXT + "scale = true",
            "'mine': The context's setting 'scale' is out of range",
        ),
        ('name = "x"' + CONTEXT + 'host = "mpl"', "'mine': Unknown host.*did you mean 'mlp'"),
        ('name = "x"' + CONTEXT * 2, "have one name; given: 'mine'"),
        (
            'name = "x"' + CONTEXT + CONTEXT.replace("training", "heldout.task"),
            "have one name; given: 'mine'",
        ),
    ],
)
def test_a_malformed_file_is_refused_in_one_sentence(
    text: str, message: str, tmp_path: Path
) -> None:
    path = tmp_path / "bad.toml"
    path.write_text(text)
    with pytest.raises(EsperError, match=message) as caught:
        load_suite(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_that_is_not_there_or_no_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"There is no such suite file; given: .*none\.toml"):
        find_suite(tmp_path / "none.toml")
    (tmp_path / "bytes.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(DataError, match=r"bytes\.toml is not TOML"):
        load_suite(tmp_path / "bytes.toml")


def test_the_file_in_the_documentation_is_a_suite(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "garden.md").read_text(encoding="utf-8")
    path = tmp_path / "mine.toml"
    path.write_text(page.split("```toml\n")[1].split("```")[0], encoding="utf-8")
    assert [context.name for context in load_suite(path)] == [
        "gain-1.5",
        "fixed-to-xor",
        "gain-1.5-c12",
    ]
