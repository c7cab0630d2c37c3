"""Errors of other people's code become one sentence, and those that are one stay as they are."""

import pytest

from esper.leyline.errors import DataError, EsperError, UnknownNameError, in_words


def refused(error: Exception, *kinds: type[Exception], **how: object) -> str:
    """What is said where this is raised."""
    with pytest.raises(EsperError) as found, in_words("It fails", *kinds, **how):  # type: ignore[arg-type]
        raise error
    assert found.value.__cause__ is error
    return str(found.value)


def test_what_other_code_says_is_told_in_a_line_with_what_was_given() -> None:
    said = refused(RuntimeError("no room\nand more"), given="a box: ", valid="bags", fix="wait")
    assert said == "It fails; given: a box: no room; valid: bags; wait."


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (KeyError("size"), "KeyError: 'size'"),  # alone, a key says nothing
        (ValueError(), "ValueError"),
        (PermissionError(13, "Permission denied", "/a/b"), "Permission denied"),
    ],
)
def test_an_error_that_says_little_has_its_name_and_one_of_a_file_its_reason(
    error: Exception, said: str
) -> None:
    assert refused(error) == f"It fails; given: {said}."


def test_it_is_an_error_of_the_kind_that_was_asked_for_in_the_words_that_were() -> None:
    with (
        pytest.raises(DataError, match="given: 3 letters"),
        in_words("It fails", error=DataError, say=lambda error: f"{len(str(error))} letters"),
    ):
        raise ValueError("odd")


def test_other_kinds_and_sentences_of_our_own_pass_as_they_are() -> None:
    with pytest.raises(TypeError, match="odd"), in_words("It fails", (ValueError, LookupError)):
        raise TypeError("odd")
    own = UnknownNameError.of("fruit", "aple", ["apple"])
    with pytest.raises(UnknownNameError) as found, in_words("It fails"):
        raise own
    assert found.value is own
