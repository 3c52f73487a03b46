"""The sentence about numbers that do not divide names the nearest ones that do."""

import pytest

from minidist.base.errors import UsageError, check_divisible


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
