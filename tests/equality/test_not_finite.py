"""NaN and infinity are differences with their place, and what both sides have is said."""

import json
from types import SimpleNamespace

import numpy as np
import pytest

from minidist.base.files import strict
from minidist.commands.command import Result, json_or_table
from minidist.core.base.errors import UsageError
from minidist.debug.dumps.dump_comparison import _compared
from minidist.job.equality.compare import Judge
from minidist.job.equality.difference_patterns import Context, distance, explain
from minidist.job.equality.own_functions import compare_returned
from minidist.job.train.metrics import MetricsFile, check_same_run, read_metrics
from minidist.job.train.state import StepEnd
from tests.cases import each

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


@each("tier", ["ordered", "float", "rounding"])
@each("bad", [NAN, INF, -INF])
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


# --- a user's own functions ---


def returned(actual, expected, tolerance=0.0):
    return compare_returned({"w": np.array(expected)}, [{"w": np.array(actual)}], tolerance)


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_what_both_functions_return_that_is_not_finite_is_said(bad):
    verdict = returned([1.0, bad], [1.0, bad])
    assert verdict.equal
    words = "\n1 tensors are not finite at the same places on both sides, first w of rank 0, which is {} at [1]"
    assert verdict.sentence().endswith(words.format(bad))
    assert verdict.as_dict()["not_finite"] == 1
    # A number has no place in it.
    assert returned(bad, bad).first_not_finite == f"w of rank 0, which is {bad}"
    assert "not_finite" not in returned(1.0, 1.0).as_dict()
    # Also where rounding differs elsewhere, or more than rounding.
    rounded = returned([1.0, bad], [1.0 + 1e-9, bad], 1e-3)
    assert rounded.equal
    assert rounded.max_difference < 1e-8
    assert "not finite at the same places" in rounded.sentence()
    assert returned([5.0, bad], [1.0, bad]).first_difference == "w of rank 0 is 5.0 at [0], and 1.0 on one device"


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_what_one_function_alone_returns_that_is_not_finite_is_a_difference(bad):
    for actual, expected in (([1.0, bad], [1.0, 2.0]), ([1.0, 2.0], [1.0, bad])):
        verdict = returned(actual, expected, 0.9)
        assert verdict.first_difference == f"w of rank 0 is {actual[1]} at [1], and {expected[1]} on one device"
        assert "not_finite" not in verdict.as_dict()
    assert not returned([INF], [-INF], 0.9).equal
    assert not returned([NAN], [INF], 0.9).equal


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
    assert sentence == f"not finite: the element at [0] is {bad}, ours is 1.0; 2 of 2 elements are not finite"
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
    assert explain(np.array([NAN]), np.ones(2), Context(1e-3))[0].startswith("not finite: the element at [0] is nan;")


# --- JSON ---


def test_json_has_no_nan(capsys):
    value = {"losses": [1.0, NAN, (INF, 2)], "peak": {"a": -INF}, "count": 3, "name": "nan"}
    assert strict(value) == {"losses": [1.0, None, [None, 2]], "peak": {"a": None}, "count": 3, "name": "nan"}
    json_or_table(lambda: Result(value, print))(json_output=True)

    def refuse(word):
        raise AssertionError(word)

    assert json.loads(capsys.readouterr().out, parse_constant=refuse)["losses"] == [1.0, None, [None, 2]]


def test_a_file_of_metrics_has_no_nan_and_is_continued(tmp_path):
    path = tmp_path / "m.jsonl"

    def report(step, loss, resume):
        plan = SimpleNamespace(changes=False)
        job = SimpleNamespace(
            config=SimpleNamespace(lr=0.1),
            batches=SimpleNamespace(global_batch=4),
            batch=(None, None),
            lr_factor=lambda step: 1.0,
            plan=plan,
            extensions=(),
        )
        held_out = {"held_out_losses": {"held_out_loss": INF}}
        with MetricsFile(path, resume=resume) as file:
            file(SimpleNamespace(rank=0, job=job, step=step, loss=loss, end=StepEnd(0.0, 0), **held_out))

    report(0, NAN, resume=False)
    report(1, 2.0, resume=True)
    lines = [json.loads(line, parse_constant=pytest.fail) for line in path.read_text().splitlines()]
    assert [line["loss"] for line in lines] == [None, 2.0]
    assert [line["held_out_loss"] for line in lines] == [None, None]
    assert [record["loss"] for record in read_metrics(path)] == [None, 2.0]

    check_same_run(path, [NAN, 2.0])
    with pytest.raises(UsageError, match=r"in step 0 its loss is None, and that of the run that is resumed was 1\.5"):
        check_same_run(path, [1.5, 2.0])
    # A file that an older version has written.
    path.write_text(path.read_text().replace('"loss": null', '"loss": NaN', 1))
    check_same_run(path, [NAN, 2.0])
    path.write_text('{"step": 0}\n')
    with pytest.raises(UsageError, match="is not a record of a step"):
        check_same_run(path, [NAN, 2.0])
