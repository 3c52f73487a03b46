"""`minidist compare FILE.py:RANK FILE.py:ALONE`: what two functions of the user's return is compared."""

import json
import time

import numpy as np
import pytest

from minidist.core.autograd import Tensor
from minidist.core.base.errors import UsageError
from minidist.job.equality.own_functions import alone_function, compare_returned, rank_function, returned_tensors
from minidist.job.train.progress import Clock
from tests.cases import each

FILE = """
import numpy as np
from neighbour import START
from minidist.core.collectives import all_reduce

def steps(comm):
    weight, history = np.full(3, START), []
    for step in range(4):
        gradient = all_reduce(comm, np.full(3, 2.0 ** -comm.rank)) / comm.size
        history.append({"loss": float(weight.sum()), "weight": weight.copy()})
        weight -= gradient
    return history

def alone():
    weight, history = np.full(3, START), []
    for step in range(4):
        history.append({"loss": float(weight.sum()), "weight": weight.copy()})
        weight -= 0.75
    return history

def wrong_from_step_2():
    history = alone()
    for state in history[2:]:
        state["weight"][1] += 1e-9
    return history

def two(comm, more):
    return 0
"""


@pytest.fixture
def mine(tmp_path):
    (tmp_path / "neighbour.py").write_text("START = 5.0\n")
    (tmp_path / "mine.py").write_text(FILE)
    return lambda name: f"{tmp_path / 'mine.py'}:{name}"


def test_two_functions_are_compared_step_by_step(mine, minidist):
    out = minidist("compare", mine("steps"), mine("alone"), "--ranks", "2").out
    assert out == "equal: 2 ranks and one device return the same bit for bit, in 16 tensors\n"


def test_the_first_step_that_differs_is_named_and_a_tolerance_allows_it(mine, minidist):
    out = minidist("compare", mine("steps"), mine("wrong_from_step_2"), "--ranks", "2", code=1).out
    assert "NOT equal bit for bit: [2].weight of rank 0 is 3.5 at [1], and 3.500000001" in out
    assert "allow it: --tolerance 1e-3" in out
    words = [mine("steps"), mine("wrong_from_step_2"), "--ranks", "2", "--tolerance", "1e-6", "--json"]
    verdict = json.loads(minidist("compare", *words).out)
    assert (verdict["equal"], verdict["tensors"]) == (True, 16)
    assert verdict["max_difference"] == pytest.approx(1e-9 / 2.75, rel=1e-3)


def test_without_a_second_function_one_device_is_one_rank(mine, minidist):
    out = minidist("compare", mine("steps"), "--ranks", "2", code=1).out  # the mean of 1 and 1/2 is not 1
    assert "[1].loss of rank 0 is 12.75, and 12.0 on one device" in out


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["steps"], "how many ranks? minidist compare FILE.py:RANK FILE.py:ALONE --ranks 4"),
        (["alone", "--ranks", "2"], "takes no communicator; write what a rank does as FUNCTION(comm)"),
        (["two", "--ranks", "2"], "takes 2 arguments; a rank's function takes one, the communicator"),
        (["steps", "--ranks", "2", "--zero", "1"], "--zero is of minidist's own training loop"),
        (["steps", "--ranks", "2", "--matrix"], "--matrix is of minidist's own training loop"),
        (["steps", "--ranks", "2", "--tolerance", "2"], "--tolerance 2; it must be 0 (bit for bit) or a share below 1"),
        (["stebs", "--ranks", "2"], "has no function 'stebs' (did you mean 'steps'?)"),
    ],
)
def test_what_is_wrong_with_the_call_is_one_sentence(mine, minidist, words, sentence):
    err = minidist("compare", mine(words[0]), *words[1:], code=2).err
    assert sentence in err
    assert len(err.strip().splitlines()) == 1


def test_a_tolerance_needs_functions(minidist):
    assert "--tolerance is of functions of your own" in minidist("compare", "--tolerance", "1e-3", code=2).err


@each(
    ("ranks", "alone", "sentence"),
    [
        ([{"a": np.ones(2)}], {"a": np.ones((1, 2))}, r"a of rank 0 has shape \[2\], and \[1, 2\] on one device"),
        ([{"a": np.ones(2)}], {"a": np.ones(2, "f4")}, "a of rank 0 is float64, and float32 on one device"),
        ([{"a": 1.0}, {"b": 1.0}], {"a": 1.0}, "b of rank 1 is not returned on one device.*the same names"),
        ([{"a": 1.0}], {"a": 1.0, "b": 2.0}, "b of one device is returned by no rank"),
        ([{"a": np.nan}], {"a": 1.0}, "a of rank 0 is nan, and 1.0 on one device"),
        ([{"a": np.inf}], {"a": 1.0}, "a of rank 0 is inf, and 1.0 on one device"),
        ([{"a": 1e-300}], {"a": 0.0}, "a of rank 0 is 1e-300, and 0.0 on one device"),
        ([{"a": "x"}], {"a": "y"}, "a of rank 0 is 'x', and 'y' on one device"),
        ([[1.0, 2.0], [1.0, 3.0]], [1.0, 2.0], r"\[1\] of rank 1 is 3.0, and 2.0 on one device"),
        ([2.0], 1.0, "the result of rank 0 is 2.0, and 1.0 on one device"),
    ],
)
def test_a_difference_of_any_kind_is_found(ranks, alone, sentence):
    returned = [returned_tensors(f"rank {rank}", value) for rank, value in enumerate(ranks)]
    verdict = compare_returned(returned_tensors("one device", alone), returned, 0.25)
    assert not verdict.equal
    with pytest.raises(AssertionError, match=sentence):
        raise AssertionError(verdict.sentence())


def test_nan_equals_nan_and_a_stage_returns_its_own_weights():
    alone = returned_tensors("one device", {"a": np.nan, "b": Tensor(np.ones(3)), "c": np.arange(3), "d": [True, "x"]})
    ranks = [{"a": alone["a"]}, {name: alone[name] for name in ("b", "c", "d[0]", "d[1]")}]
    assert compare_returned(alone, ranks).equal


@pytest.mark.parametrize(
    ("value", "sentence"),
    [
        (None, "rank 1 returns None, which cannot be compared; return arrays"),
        ({"a": {"b": object}}, "as a.b, which cannot be compared"),
        ({}, r"rank 1 returns \{\}, in which there is nothing to compare"),
    ],
)
def test_what_cannot_be_compared_is_one_sentence(value, sentence):
    with pytest.raises(UsageError, match=sentence):
        returned_tensors("rank 1", value)


@pytest.mark.parametrize("dtype", [np.int64, np.uint64])
def test_numbers_that_float64_does_not_tell_apart_differ(dtype):
    expected = np.array([1, 2**60], dtype)
    verdict = compare_returned({"count": expected}, [{"count": expected}, {"count": expected + dtype(1)}])
    assert not verdict.equal
    assert "count of rank 1 is 1152921504606846977" in verdict.sentence()
    assert compare_returned({"count": expected}, [{"count": expected + dtype(1)}], tolerance=1e-12).equal


def test_one_array_for_all_steps_would_compare_the_last_one_only():
    weight = np.ones(3)
    with pytest.raises(UsageError, match=r"one array as \[0\].w and as \[1\].w, .* return copies: p.data.copy\(\)"):
        returned_tensors("rank 0", [{"w": weight}, {"w": weight}])
    returned_tensors("rank 0", {"embedding": weight, "head": weight})


@pytest.mark.mpi(2)
def test_under_mpi_a_function_returns_the_same(comm, tmp_path):
    (tmp_path / "neighbour.py").write_text("START = 5.0\n")
    (tmp_path / "mine.py").write_text(FILE)
    rank, alone = (
        make(f"{tmp_path / 'mine.py'}:{name}") for make, name in ((rank_function, "steps"), (alone_function, "alone"))
    )
    assert compare_returned(alone(), [rank(comm)]).equal


def test_a_long_run_shows_the_seconds_so_far(capsys):
    with Clock("compare: the ranks", 0.02):
        time.sleep(0.1)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) >= 2
    assert set(lines) == {"compare: the ranks: 0 s"}


def test_what_tensors_that_differ_have_in_common_is_said():
    """Of gradients a and b of two stages or replicas: a factor, one of each rank, a missing reduction, a shard."""
    rng = np.random.default_rng(0)
    a, b = rng.normal(size=(4, 3)), rng.normal(size=(4, 3))
    shard = a.copy()
    shard[2:] = 0.0
    both = {"a": a, "b": b}
    cases = [
        (
            [{"a": 2 * a, "b": 2 * b}] * 2,
            "each of the 4 tensors that differ is 2 times (the world has 2 ranks) that of",
        ),
        ([{"a": a / 4, "b": b / 4}] * 4, "each of the 8 tensors that differ is 1/4 of (the world has 4 ranks) that of"),
        ([{"a": 1.5 * a}, {"b": 0.7 * b}], "is, of rank 0: 1.5 times that of one device; of rank 1: 0.7 times that of"),
        (
            [{"a": a + b}, {"a": a - b}, both],
            "a of one device is 0.5 x rank 0's + 0.5 x rank 1's: the ranks return what",
        ),
        (
            [{"a": (a + b) / 0.6}, {"a": -b / 0.4}, both],
            "a of one device is 0.6 x rank 0's + 0.4 x rank 1's: the ranks",
        ),
        ([{"a": shard, "b": b}], "a of rank 0 is that of one device in 0:2 of dim 0 (of 4), zeros elsewhere"),
        ([{"a": 3 * a, "b": b.reshape(3, 4)}], "a of rank 0 is 3 times that of one device"),
    ]
    for ranks, words in cases:
        verdict = compare_returned(both, ranks, 1e-6)
        assert not verdict.equal
        assert words in verdict.sentence(), (words, verdict.sentence())
        assert verdict.as_dict()["patterns"] == verdict.patterns
    nothing = [{"a": a + rng.normal(size=a.shape), "b": b}, {"a": a, "b": b}]
    assert compare_returned(both, nothing, 1e-6).patterns == []
    assert "patterns" not in compare_returned(both, [both], 0.0).as_dict()
