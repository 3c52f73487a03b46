"""NaN and infinity are differences with their place, and what both sides have is said."""

import json

import numpy as np
import pytest

from minidist.commands.output import Result, json_or_table, strict
from minidist.equality.compare import Judge
from minidist.equality.difference_patterns import Context, distance, explain
from minidist.equality.dump_comparison import _compared

NAN, INF = float("nan"), float("inf")


def judged(tier, actual, expected, tolerance=0.1):
    """The verdict on one tensor of a step."""

    def side(values):
        return {"gradients": {"w": np.array(values, np.float32)}}

    wanted = side(expected)
    if tier == "rounding":
        wanted["tolerances"] = {"gradients/w": np.array(tolerance)}
    judge = Judge([wanted], tier)
    judge.compare(side(actual), wanted, 0, 1)
    return judge.verdict


@pytest.mark.parametrize("tier", ["ordered", "float", "rounding"])
@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_a_value_that_is_not_finite_on_one_side_is_a_difference_with_its_place(tier, bad):
    for actual, expected in (([1.0, bad], [1.0, 2.0]), ([1.0, 2.0], [1.0, bad])):
        verdict = judged(tier, actual, expected)
        assert not verdict.equal
        words = f"'w' at step 0 on rank 1, the element at [1] is {actual[1]}, one device's is {expected[1]}"
        assert words in verdict.first_difference
        assert verdict.max_difference["gradients"] == INF
    assert not judged(tier, [1.0, INF], [1.0, -INF]).equal


@pytest.mark.parametrize("tier", ["ordered", "float", "rounding"])
def test_what_is_not_finite_on_both_sides_is_said(tier):
    verdict = judged(tier, [1.0, NAN, INF], [1.0, NAN, INF])
    assert verdict.equal
    words = "1 tensors are not finite at the same places on both sides, first gradients: of 'w' at step 0, the element"
    assert words in verdict.sentence()
    assert verdict.as_dict()["not_finite"] == 1
    assert "not_finite" not in judged(tier, [1.0], [1.0]).as_dict()


def test_a_tolerance_that_is_not_a_number_does_not_excuse_a_tensor():
    assert not judged("rounding", [1.0, NAN], [1.0, 2.0], tolerance=NAN).equal


# --- dumps ---


def compared(theirs, ours, tolerances):
    names = [f"gradients/{letter}" for letter in "abc"[: len(theirs)]]

    def table(values):
        return dict(zip(names, (np.array(v, np.float64) for v in values), strict=True))

    limits = dict(zip(names, tolerances, strict=True))
    context = lambda name: Context(limits[name])  # noqa: E731
    return _compared(table(theirs), table(ours), limits, context, {}, None)


@pytest.mark.parametrize("bad", [NAN, INF])
def test_a_dump_full_of_nan_is_not_equal(bad):
    result = compared([[bad, bad], [1.0, 2.0]], [[1.0, 2.0], [1.0, 2.0]], [1e-3, 1e-3])
    assert [d.name for d in result.differences] == ["gradients/a"]
    (sentence,) = result.differences[0].patterns
    assert sentence == f"the element at [0] is {bad}, ours is 1.0; 2 of 2 elements are not finite"
    # Also where the other side is nearly zero, or is not finite itself.
    assert compared([[bad, bad], [1.0, 2.0]], [[1e-30, 0.0], [1.0, 2.0]], [1e-3, 1e-3]).differences
    assert compared([[1.0, 2.0]], [[bad, 2.0]], [INF]).differences
    assert distance(np.array([1.0]), np.array([bad])) == INF


def test_a_tensor_that_is_nearly_zero_on_one_side_alone_is_a_difference():
    for theirs, ours in (([3.0, 4.0], [1e-12, 0.0]), ([1e-12, 0.0], [3.0, 4.0])):
        result = compared([theirs, [5.0, 5.0]], [ours, [5.0, 5.0]], [1e-3, 1e-3])
        assert [d.name for d in result.differences] == ["gradients/a"]
    # On both sides it is rounding, such as the gradient of attention's key bias.
    assert compared([[1e-12, 0.0], [5.0, 5.0]], [[-1e-12, 0.0], [5.0, 5.0]], [1e-3, 1e-3]).differences == []


def test_each_tensor_has_its_own_tolerance():
    result = compared([[1.05, 1.0], [1.05, 1.0]], [[1.0, 1.0], [1.0, 1.0]], [1e-3, 1e-1])
    assert [d.name for d in result.differences] == ["gradients/a"]
    assert result.differences[0].tolerance == 1e-3


def test_shapes_that_differ_are_explained_with_the_place():
    assert explain(np.array([NAN]), np.ones(2), Context(1e-3))[0].startswith("the element at [0] is nan;")


# --- JSON ---


def test_json_has_no_nan(capsys):
    value = {"losses": [1.0, NAN, (INF, 2)], "peak": {"a": -INF}, "count": 3, "name": "nan"}
    assert strict(value) == {"losses": [1.0, None, [None, 2]], "peak": {"a": None}, "count": 3, "name": "nan"}
    json_or_table(lambda: Result(value, print))(json_output=True)

    def refuse(word):
        raise AssertionError(word)

    assert json.loads(capsys.readouterr().out, parse_constant=refuse)["losses"] == [1.0, None, [None, 2]]
