"""What a sentence quotes: values and texts of other programs in part, paths whole; the nearest numbers that divide."""

from pathlib import Path

import pytest

from minidist.base.errors import MAX_PATH, UsageError, check_divisible, quoted, quoted_path, ranges_text, reason


def test_a_path_is_whole_and_another_value_is_not():
    path = "/tmp/" + "/".join(f"folder-{number}" for number in range(100))
    assert quoted_path(path) == repr(path)
    assert quoted_path(Path(path), marks=False) == path
    assert len(quoted(path)) < 120
    assert len(quoted_path("x" * (MAX_PATH + 1))) < 120
    assert quoted_path("a\nb") == r"'a\nb'"


def test_numbers_that_follow_each_other_are_written_as_a_range():
    assert ranges_text([8, 0, 1, 2, 5, 7]) == "0-2, 5, 7-8"
    assert ranges_text([]) == ""


def test_the_text_of_another_programs_error_is_one_short_line():
    class Odd(Exception):
        def __str__(self):
            raise ValueError

    assert reason(KeyError("x")) == "'x'"
    assert reason(KeyError("x"), named=True) == "KeyError: 'x'"
    assert reason(MemoryError()) == reason(MemoryError(), named=True) == "MemoryError"
    assert reason(ValueError("one\ntwo")) == r"one\ntwo"
    assert len(reason(ValueError("x" * 20_000), named=True)) < 250
    assert "without a text" in reason(Odd())


def test_what_divides_passes():
    check_divisible(8, "heads", 4, "tensor")
    check_divisible(0, "elements", 3)
    check_divisible(12, "out features", 2, blocks=3)


@pytest.mark.parametrize(
    ("arguments", "options", "sentence"),
    [
        (
            (8, "heads", 3, "context"),
            {"or_else": "ring attention"},
            "8 heads cannot be divided among 3 context-parallel ranks; use 6 or 9, or one of 1, 2, 4, 8 ranks, or ring"
            " attention",
        ),
        ((2, "rows", 3), {}, "2 rows cannot be divided among 3 ranks; use 3, or one of 1, 2 ranks"),
        (
            (12, "features", 4, "tensor"),
            {"blocks": 2},  # each block of 6 is cut
            "12 features cannot be divided among 4 tensor-parallel ranks; use 8 or 16, or one of 1, 2, 3, 6 ranks",
        ),
    ],
)
def test_what_does_not_is_refused_with_the_remedy(arguments, options, sentence):
    with pytest.raises(UsageError) as error:
        check_divisible(*arguments, **options)
    assert str(error.value) == sentence
