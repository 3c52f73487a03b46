"""The check of a collective: minidist's own pass, and each planted mistake is found and said in a sentence."""

import json
import re
import sys
import textwrap

import numpy as np
import pytest

from minidist.collectives import algorithm
from minidist.collectives.algorithms import ALGORITHMS
from minidist.collectives.collective_check import Case, cases, check_collective
from minidist.core.base.errors import UsageError
from minidist.core.collectives import ring

QUICK = [("all_reduce", "rabenseifner"), ("all_to_all", "bruck"), ("scatter", "binomial"), ("broadcast", "ring")]


@pytest.fixture(autouse=True)
def registry():
    """Forget afterwards what a test registered."""
    before = {operation: (dict(entries), dict(entries.aliases)) for operation, entries in ALGORITHMS.items()}
    yield
    for operation, (entries, aliases) in before.items():
        ALGORITHMS[operation].clear()
        ALGORITHMS[operation].update(entries)
        ALGORITHMS[operation].aliases = aliases


@pytest.mark.parametrize(("operation", "name"), QUICK)
def test_algorithms_of_minidist_pass(operation, name):
    report = check_collective(name, operation, 5)
    assert (report.passed, report.right, report.first) == (True, [1, 2, 3, 4, 5], "")
    assert report.calls > 100
    assert report.sentences()[0] == f"{operation}/{name} agrees with NumPy on 1 to 5 ranks."
    assert "minidist's fastest" in report.cost


@pytest.mark.parametrize("operation", sorted(ALGORITHMS))
def test_the_cases_of_an_operation_are_many_and_each_choice_is_among_them(operation):
    found = list(cases(operation, "mine", 6))
    assert len({str(case) for case in found}) == len(found) > 10
    assert {case.buffered for case in found} == {case.on_stream for case in found} == {False, True}
    assert {case.dtype for case in found} == {"float64", "float32", "int64"}
    if operation in ("all_reduce", "reduce", "reduce_scatter"):
        assert {case.op for case in found} == {"sum", "avg", "max", "min", "prod"}
    if operation in ("broadcast", "gather", "reduce", "scatter"):
        assert {case.root for case in found} == {0, 1, 3, 5}


def test_numbers_of_one_rank_are_not_those_of_another():
    """The inputs of any two ranks and of any two calls differ, so that a wrong neighbour or a missing chunk shows."""
    case = Case("all_reduce", "mine", 9, (14,))
    inputs = [case.input(rank, call).tolist() for rank in range(9) for call in range(2)]
    assert len({tuple(values) for values in inputs}) == len(inputs)


def star(comm, array, op, *, wrong=""):
    """An all-reduce in which everybody sends everything to everybody."""
    n, rank = comm.size, comm.rank
    others = [other for other in range(n) if other != rank]
    parts = {rank: array.copy()} | {other: np.empty_like(array) for other in others}
    sends = [comm.isend(parts[rank], other) for other in others]
    comm.waitall([comm.irecv(parts[other], other) for other in others])
    if wrong != "not waited for":
        comm.waitall(sends)
    if wrong == "leaves a message" and n > 1:
        comm.isend(np.zeros(1), (rank + 1) % n, tag=1).wait()
    order = sorted(parts, key=lambda other: (other - rank) % n) if wrong == "own order" else sorted(parts)
    if wrong == "last left out":
        order = order[: max(1, n - 1)]
    total = parts[order[0]].copy()
    for other in order[1:]:
        if op in ("sum", "avg") or wrong == "any op":
            total += parts[other]
        elif op == "max":
            np.maximum(total, parts[other], out=total)
        else:
            raise NotImplementedError(f"no {op} here")
    if op == "avg" and wrong != "no division":
        total /= n
    array[...] = total


def report_of(wrong, operation="all_reduce", ranks=4, **formulas):
    def mine(comm, array, op):
        return star(comm, array, op, wrong=wrong)

    algorithm(operation, "mine", **formulas)(mine)
    return check_collective("mine", operation, ranks)


def test_an_algorithm_that_refuses_some_reductions_is_right():
    report = report_of("")
    assert report.passed
    assert set(report.refused) == {"min", "prod"}
    assert "It refuses min (NotImplementedError: no min here); prod (NotImplementedError" in "\n".join(
        report.sentences()
    )


WRONG = {
    "last left out": ([2, 3, 4], r"2 ranks, 8 elements of float64, sum, synchronous sends: rank 0 gets .* and NumPy"),
    "any op": ([2, 3, 4], r"2 ranks, 8 elements of float64, max, .* elements differ"),
    "no division": ([2, 3, 4], r"2 ranks, 8 elements of float64, avg"),
    "not waited for": ([2, 3, 4], r"rank 0: its all_reduce/mine: send .* was never waited for"),
    "leaves a message": ([2, 3, 4], r"deadlock: 2 of 2 ranks are blocked"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_planted_mistake_is_found(wrong):
    report = report_of(wrong)
    ranks, words = WRONG[wrong]
    assert not report.passed
    assert report.wrong == ranks
    assert re.search(words, report.first), report.first
    text = "\n".join(report.sentences())
    assert "all_reduce/mine agrees with NumPy on 1 rank." in text
    assert "all_reduce/mine is wrong on 2 to 4 ranks. The first case:" in text


def test_ranks_that_add_in_orders_of_their_own_get_other_bits():
    """Whole numbers hide it; a seventh does not."""
    report = report_of("own order", ranks=5)
    assert (report.right, report.wrong) == ([1, 2], [3, 4, 5])
    assert re.search(r"ranks 0 and \d get different bits; every rank must add in the same order", report.first)


def test_formulas_are_held_against_the_record_and_the_clock():
    right = {"sends": lambda sizes, rank: (len(sizes) - 1, (len(sizes) - 1) * sum(sizes))}
    assert report_of("", **right).passed
    wrong = {"sends": lambda sizes, rank: (len(sizes) - 1, sum(sizes) if len(sizes) > 1 else 0)}
    words = "its `sends` says that 2 messages of 11 elements in all leave rank 0, but 2 messages of 22 elements do"
    assert words in report_of("", **wrong).first
    for seconds, passes in (
        (lambda nbytes, n, alpha, beta: 2 * (n - 1) * (alpha + beta * nbytes / n), True),
        (lambda nbytes, n, alpha, beta: 2 * (n - 1) * (alpha + beta * nbytes), False),
    ):
        algorithm("all_reduce", "mine", seconds=seconds)(lambda *arguments: ring.all_reduce(*arguments))
        report = check_collective("mine", "all_reduce", 3)
        assert report.passed == passes
        assert passes or "2 ranks, 128 elements of float64, sum, synchronous sends: its `seconds` says" in report.first


def test_an_input_that_is_no_output_must_stay():
    def mine(comm, array, root, op):
        star(comm, array, op)
        return array.copy() if comm.rank == root else None

    algorithm("reduce", "mine")(mine)
    assert "rank 1's input was changed, although it is not an output" in check_collective("mine", "reduce", 2).first


def test_an_exception_of_the_function_is_named_with_its_line(tmp_path):
    (tmp_path / "mine.py").write_text("def all_reduce(comm, array, op):\n    return array[comm.size + 100]\n")
    report = check_collective(f"{tmp_path / 'mine.py'}:all_reduce")
    assert re.search(r"it raised IndexError: .*raised at .*mine\.py:2", report.first)


def test_wrong_input():
    for arguments, words in (
        (("ring",), "write FILE.py:FUNCTION, or a name with --operation"),
        (("ring", "allreduce"), "--operation 'allreduce'; it must be one of all_gather"),
        (("rnig", "all_reduce"), "did you mean 'ring'"),
        (("ring", "all_reduce", 0), "--ranks 0; a check runs on 1 to at most 64 ranks"),
    ):
        with pytest.raises(UsageError, match=words):
            check_collective(*arguments)


def test_the_command(tmp_path, minidist, monkeypatch):
    (tmp_path / "mine.py").write_text(
        textwrap.dedent(
            """
            from minidist.collectives import algorithm
            from minidist.collectives import chain

            @algorithm("broadcast", "mine")
            def mine(comm, array, root):
                if comm.size != 2:
                    return chain.broadcast(comm, array, root)
            """
        )
    )
    monkeypatch.setattr(sys, "argv", ["minidist"])
    command = ["check-collective", f"{tmp_path / 'mine.py'}:mine", "--ranks", "3"]
    output = minidist(*command, code=1)
    assert "broadcast/mine agrees with NumPy on 1 and 3 ranks." in output.out
    assert "broadcast/mine is wrong on 2 ranks. The first case:\n  2 ranks, 8 elements of float64, root 0" in output.out
    assert output.err == ""
    result = json.loads(minidist(*command, "--json", code=1).out)
    assert (result["passed"], result["right"], result["wrong"]) == (False, [1, 3], [2])
