"""`each` runs a test over its cases: all of them, apart from one another, and it says which fail."""

import functools

import pytest

from tests.cases import each, title


def test_every_case_that_fails_is_named_with_what_it_raised():
    tried = []

    @each("a, b", [(1, 2), (3, 3), (4, 5)])
    def test(a, b):
        tried.append((a, b))
        assert a == b, f"{a} and {b}"

    with pytest.raises(
        AssertionError, match=r"^2 of 3 cases fail\na = 1, b = 2: .*1 and 2[^$]*a = 4, b = 5: "
    ) as raised:
        test()
    assert "1 and 2" in str(raised.value.__cause__)
    assert tried == [(1, 2), (3, 3), (4, 5)]


def test_a_bug_that_fails_every_case_ends_early_and_under_mpi_at_once():
    @each("a", range(100))
    def test(a, comm=None):
        pytest.fail("always")

    with pytest.raises(AssertionError, match="5 of 5 cases fail; 95 were not tried"):
        test()
    with pytest.raises(AssertionError, match="1 of 1 cases fail; 99 were not tried"):
        test(comm=None)


@each("first", ["a", "b"])
@each("second", ["c", "d"])
def test_cases_share_neither_files_nor_patches_nor_output(first, second, tmp_path, monkeypatch, capsys):
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").touch()
    assert not hasattr(each, "patched")
    monkeypatch.setattr(each, "patched", True, raising=False)
    assert capsys.readouterr().out == ""
    print("said")


def test_a_test_whose_cases_are_all_skipped_is_skipped():
    def skip_below(least):
        @each("a", [1, 2])
        def test(a):
            if a < least:
                pytest.skip("small")

        return test

    skip_below(2)()
    with pytest.raises(pytest.skip.Exception):
        skip_below(3)()


def test_a_case_is_called_the_same_in_every_process():
    @each("what", [int, len, test_a_case_is_called_the_same_in_every_process, functools.partial(title), object()])
    def test(what):
        raise ValueError

    with pytest.raises(AssertionError, match="what = int: ") as raised:
        test()
    assert "what = test_a_case_is_called_the_same_in_every_process: " in str(raised.value)
    assert "what = functools.partial(<function title>): " in str(raised.value)
    assert "what = <object object>: " in str(raised.value)


def test_a_mistake_in_the_decorator_is_an_error():
    with pytest.raises(AssertionError, match="without a case"):
        each("a", [])
    with pytest.raises(AssertionError, match="does not take b"):
        each("b", [1])(lambda a: None)


def test_the_first_case_and_some_pairs_are_tried_and_all_where_that_is_asked_for():
    tried = []

    def test(number, sign):
        tried.append((sign, number))

    pairs = [(sign, number) for sign in (1, -1) for number in range(30)]
    for above, below in ((5, None), (None, 5)):
        both = each("sign", [1, -1], sampled=above)(each("number", range(30), sampled=below)(test))
        (mark,) = both.pytestmark
        assert [getattr(value, "marks", ()) for value in mark.args[1]] == [(), (pytest.mark.exhaustive,)]
        tried.clear()
        both(cases="sample")
        assert tried[0] == pairs[0]
        assert len(tried) == 1 + 59 // 5
        assert {number for sign, number in tried if sign > 0} != {number for sign, number in tried if sign < 0}
        tried.clear()
        both(cases="all")
        assert tried == pairs
