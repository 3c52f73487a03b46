"""Every collective, every algorithm, any number of ranks, size, dtype, reduction, root and counts: to the bit.

Proved to catch: a wrong neighbour, a wrong chunk, an addition left out or in another order, a root taken for 0.
"""

import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minidist import collectives
from minidist.collectives.call_checks import LINE, elements_before_line
from minidist.comm import SimWorld
from minidist.core.base.errors import CommunicationError, MismatchError, UsageError
from minidist.core.collectives.calls import accumulate, divide
from tests.cases import each
from tests.collectives.cases import ALL, DTYPES, OPS, Case, contribution, primes

SENDS = [0, 24, 1 << 20]  # synchronous; short ones buffered; all buffered


@st.composite
def cases(draw, operation, algorithm):
    ranks = draw(st.integers(1, 17))
    size = draw(st.sampled_from([0, 1, ranks - 1, ranks, ranks + 1, 3 * ranks]) | st.integers(0, 30))
    dtype = DTYPES[draw(st.sampled_from(sorted(DTYPES)))]
    op = draw(st.sampled_from([op for op in OPS if op != "avg" or dtype.kind != "i"]))
    counts = None
    if operation not in ("all_reduce", "broadcast", "reduce") and draw(st.booleans()):
        cuts = sorted(draw(st.lists(st.integers(0, size), min_size=ranks - 1, max_size=ranks - 1)))
        counts = tuple(np.diff([0, *cuts, size]).tolist())
    return Case(
        operation, algorithm, ranks, size, dtype, op, draw(st.integers(0, ranks - 1)), counts, draw(st.booleans())
    )


@pytest.mark.filterwarnings("ignore:overflow")  # a product of primes in float16: infinity on every rank
@pytest.mark.parametrize(("operation", "algorithm"), ALL)
@given(data=st.data())
@settings(max_examples=settings().max_examples * 4 // 5)
def test_every_rank_gets_its_result_to_the_bit(operation, algorithm, data):
    case = data.draw(cases(operation, algorithm))
    world = SimWorld(case.ranks, eager_bytes=data.draw(st.sampled_from(SENDS)))
    for rank, result in enumerate(world.run(case.call)):
        case.check(rank, result)


@each("algorithm", ["naive", "ring", "ordered"])
@each("ranks", range(1, 10))
def test_a_sum_of_primes_is_the_sum_of_all_primes(ranks, algorithm):
    """The same, against arithmetic that knows nothing of chunks and orders."""

    def program(comm):
        mine = primes(20 * ranks)[comm.rank * 20 : (comm.rank + 1) * 20].astype(np.float64)
        return collectives.all_reduce(comm, mine, algorithm=algorithm)

    total = primes(20 * ranks).reshape(ranks, 20).sum(axis=0)
    for result in SimWorld(ranks).run(program):
        assert np.array_equal(result, total)


@each(("operation", "algorithm"), [a for a in ALL if a[0] in ("all_reduce", "broadcast", "reduce")])
def test_shapes_of_several_dims_and_of_none(operation, algorithm):
    def program(comm, shape):
        array = np.full(shape, float(comm.rank + 1))
        return getattr(collectives, operation)(comm, array, algorithm=algorithm)

    for shape in [(), (1,), (2, 3), (2, 1, 2, 2), (0, 3)]:
        result = SimWorld(3).run(program, shape)[0]
        assert result.shape == shape
        assert (result == (1 if operation == "broadcast" else 6)).all()


def test_many_collectives_in_flight_at_once_do_not_meet():
    """Lanes of two communicators, several calls each, waited for in another order than posted."""

    def program(comm):
        other = comm.dup()
        arrays = [contribution(comm.rank, 10 + i, DTYPES["float64"]) for i in range(6)]
        works = [collectives.all_reduce((comm, other)[i % 2], arrays[i], async_op=True) for i in range(6)]
        blocking = collectives.all_reduce(comm, np.ones(3))
        for i in (5, 0, 3, 2, 1, 4):
            assert works[i].wait() is arrays[i]
        return [*arrays, blocking]

    for results in SimWorld(4).run(program):
        for i, result in enumerate(results[:6]):
            case = Case("all_reduce", "ring", 4, 10 + i)
            case.check(0, result)
        assert np.array_equal(results[6], np.full(3, 4.0))


@each(("operation", "algorithm"), [a for a in ALL if a[0] in ("reduce", "gather", "all_to_all")])
def test_a_result_on_one_rank_is_an_array_of_its_own(operation, algorithm):
    """Also where nothing is sent: who changes the result must not change what was reduced."""

    def program(comm):
        array = np.arange(4.0)
        result = getattr(collectives, operation)(comm, array, algorithm=algorithm)
        assert not np.may_share_memory(result, array)
        return result.tolist()

    assert SimWorld(1).run(program) == [[0, 1, 2, 3]]


@each("dtype", ["float16", "bfloat16"])
@each("algorithm", ["ring", "naive", "ordered", "recursive_doubling", "rabenseifner"])
def test_an_average_in_half_precision_overflows_in_silence_as_a_sum_does(algorithm, dtype):
    """Each addition is one of float32, rounded; a loss scaler looks for the infinity, and no warning is printed."""

    def program(comm, op):
        return collectives.all_reduce(comm, np.full(4, top, DTYPES[dtype]), op, algorithm=algorithm)

    top = 6e4 if dtype == "float16" else 3e38
    with np.errstate(over="raise"):
        for op in ("sum", "avg"):
            assert np.isinf(SimWorld(3).run(program, op)[0].astype(np.float32)).all()


@pytest.mark.parametrize(("dtype", "ranks"), [("bfloat16", 257), ("float16", 2049)])
def test_an_average_in_half_precision_divides_by_the_number_of_ranks(dtype, ranks):
    """bfloat16 rounds 257 ranks to 256, and float16 2049 to 2048: the average of as many ones would be above one."""
    total = np.full(3, ranks, np.float32).astype(DTYPES[dtype])
    exact = (total.astype(np.float64) / ranks).astype(DTYPES[dtype])
    values = np.concatenate([total, np.arange(1, 400).astype(DTYPES[dtype])])
    expected = (values.astype(np.float32) / np.float32(ranks)).astype(DTYPES[dtype])
    divide(values, ranks)
    assert values[:3].tobytes() == exact.tobytes()
    assert values.tobytes() == expected.tobytes()
    rounded = np.arange(1, 400).astype(DTYPES[dtype]) / DTYPES[dtype].type(ranks)
    assert (rounded != expected[3:]).any()


def test_all_gather_into_place_copies_nothing_of_its_own():
    def program(comm):
        out = np.zeros(12)
        mine = out[comm.rank * 4 : (comm.rank + 1) * 4]
        mine[...] = comm.rank + 1
        assert collectives.all_gather(comm, mine, out=out) is not None
        return out

    for out in SimWorld(3).run(program):
        assert np.array_equal(out, np.repeat([1.0, 2.0, 3.0], 4))


def test_reduce_scatter_writes_into_out():
    def program(comm):
        out = np.empty((2, 2))
        collectives.reduce_scatter(comm, np.arange(12.0), out=out)
        return out

    for rank, out in enumerate(SimWorld(3).run(program)):
        assert np.array_equal(out.reshape(-1), 3 * np.arange(12.0)[4 * rank : 4 * rank + 4])


BAD = {
    "counts that do not sum": (lambda c: collectives.reduce_scatter(c, np.ones(4), counts=[1, 2]), "sum to 4"),
    "a negative count": (lambda c: collectives.reduce_scatter(c, np.ones(4), counts=[-1, 5]), "at least 0"),
    "too few counts": (lambda c: collectives.scatter(c, np.ones(4), np.ones(4), counts=[4]), "2 counts"),
    "a shard of another size": (lambda c: collectives.all_gather(c, np.ones(4), counts=[3, 3]), "rank 0 must be 4"),
    "a gathered shard": (lambda c: collectives.gather(c, np.ones(4), counts=[3, 3]), "rank 0 must be 4"),
    "an out of another size": (lambda c: collectives.all_gather(c, np.ones(4), out=np.ones(7)), "out of 8 elements"),
    "an out of another dtype": (lambda c: collectives.all_gather(c, np.ones(1), out=np.ones(2, "f4")), "float32"),
    "an out with gaps": (lambda c: collectives.scatter(c, np.ones(4), np.ones(4)[::2]), "strides"),
    "an out that is its input": (lambda c: _reduce_scatter_in_place(c), "its own input"),
    "an out in the array that it comes from": (lambda c: _scatter_in_place(c), "its own array"),
    "a list": (lambda c: collectives.all_reduce(c, [1.0, 2.0]), "all_reduce of a value of type list"),
    "a list to scatter": (lambda c: collectives.scatter(c, [1.0, 2.0], np.ones(1)), "scatter of a value|receive"),
    "a number": (lambda c: collectives.all_gather(c, np.float64(1)), "all_gather of a value of type float64"),
    "an input with gaps": (lambda c: collectives.all_reduce(c, np.ones(4)[::2]), "strides"),
    "an array that may not be written": (
        lambda c: collectives.all_reduce(c, _read_only(4)),
        "read-only, where the sum would go",
    ),
    "an out that may not be written": (
        lambda c: collectives.all_gather(c, np.ones(2), out=_read_only(4)),
        "out that is read-only",
    ),
    "counts with fractions": (
        lambda c: collectives.reduce_scatter(c, np.ones(4), counts=[2.9, 2]),
        r"counts \[2.9, 2\]; a count is a whole",
    ),
    "receive counts with fractions": (
        lambda c: collectives.all_to_all(c, np.ones(4), send_counts=[2, 2], receive_counts=[2.5, 2.5]),
        "a count is a whole",
    ),
    "a sum of dates": (
        lambda c: collectives.all_reduce(c, np.zeros(2, "M8[D]")),
        r"datetime64\[D\] values have no 'sum'",
    ),
    "a sum of records": (lambda c: collectives.reduce(c, np.zeros(2, [("a", "f4")])), "values have no 'sum'"),
    "a root between ranks": (lambda c: collectives.broadcast(c, np.ones(4), root=0.5), r"root 0.5; ranks are 0\.\.1"),
    "a root by name": (lambda c: collectives.gather(c, np.ones(4), root="a"), r"root 'a'; ranks are 0\.\.1"),
    "a root that is not a rank": (lambda c: collectives.broadcast(c, np.ones(4), root=2), "ranks are 0..1"),
    "an unknown reduction": (lambda c: collectives.all_reduce(c, np.ones(4), "add"), "one of sum, avg"),
    "an array for a reduction": (
        lambda c: collectives.reduce_scatter(c, np.ones(4), np.ones(2)),
        "op is a name, such as 'sum', and operations that take an array for the result have out=",
    ),
    "an average of integers": (lambda c: collectives.all_reduce(c, np.ones(4, int), "avg"), "not an integer"),
    "a maximum of complex numbers": (lambda c: collectives.all_reduce(c, np.ones(4, complex), "max"), "have no order"),
    "a masked array": (lambda c: collectives.all_reduce(c, np.ma.ones(4)), "whose mask is not sent; pass array.filled"),
    "an unknown algorithm": (lambda c: collectives.all_reduce(c, np.ones(4), algorithm="rnig"), "did you mean 'ring'"),
    "a size that does not divide": (
        lambda c: collectives.all_to_all(c, np.ones(5)),
        "cannot be divided among 2 ranks; use 4 or 6, .* or pass counts",
    ),
    "an own count that differs": (
        lambda c: collectives.all_to_all(c, np.ones(4), send_counts=[1, 3], receive_counts=[2, 3]),
        r"receive_counts \[2, 3\]; it needs 2 counts of at least 0, its own equal to what it sends itself, 1",
    ),
    "a sum of text": (lambda c: collectives.all_reduce(c, np.array(["a", "b"])), "<U1 values have no 'sum'"),
    "a maximum of bytes": (lambda c: collectives.all_reduce(c, np.array([b"a"]), "max"), r"\|S1 values have no 'max'"),
    "half of the counts": (lambda c: collectives.all_to_all(c, np.ones(4), send_counts=[1, 3]), "both"),
    "no array at the root": (lambda c: collectives.scatter(c, None, np.ones(2)), "must pass the array"),
}


@each(("operation", "algorithm"), [a for a in ALL if a[0] in ("all_reduce", "reduce_scatter", "reduce")])
@each("dtype", ["int8", "uint16", "int32"])
def test_a_sum_of_integers_that_is_too_large_is_refused(operation, algorithm, dtype):
    """NumPy keeps the lower bits."""
    largest = np.iinfo(dtype).max

    def program(comm, first, op="sum"):
        array = np.array([first, 2, 3, 2] if comm.rank else [largest - 1, 1, 1, 1], dtype)
        return getattr(collectives, operation)(comm, array, op=op, algorithm=algorithm)

    results = [result for result in SimWorld(2).run(program, 1) if result is not None]
    assert [largest, 3, 4, 3] in (results[0].tolist(), np.concatenate(results).tolist())
    with pytest.raises(
        UsageError, match=f"'sum' of {dtype} values gives {largest + 1}, and {dtype} ends at {largest};"
    ):
        SimWorld(2).run(program, 2)
    with pytest.raises(UsageError, match=f"'prod' of {dtype} values gives {2 * largest - 2}"):
        SimWorld(2).run(program, 2, "prod")


@each(("operation", "algorithm"), [a for a in ALL if a[0] in ("all_reduce", "broadcast", "reduce", "reduce_scatter")])
def test_an_array_of_2_by_3_does_not_meet_one_of_3_by_2(operation, algorithm):
    """Also where the algorithm sends it flattened, in segments."""

    def program(comm):
        getattr(collectives, operation)(comm, np.ones([(2, 3), (3, 2)][comm.rank]), algorithm=algorithm)

    with pytest.raises(MismatchError, match=r"^shape mismatch: .*\[2, 3\] on rank 0.*\[3, 2\] on rank 1"):
        SimWorld(2).run(program)


UNLIKE_ROOTS = {
    "broadcast": lambda comm, root, **options: collectives.broadcast(comm, np.ones(4), root, **options),
    "reduce": lambda comm, root, **options: collectives.reduce(comm, np.ones(4), root, **options),
    "gather": lambda comm, root, **options: collectives.gather(comm, np.ones(2), root, **options),
    "scatter": lambda comm, root, **options: collectives.scatter(comm, np.ones(4), np.ones(2), root, **options),
}


@each(("operation", "algorithm"), [a for a in ALL if a[0] in UNLIKE_ROOTS], sampled=8)
@each("roots", [(0, 1), (1, 0), (0, 0, 1), (0, 1, 2), (2, 2, 1, 2)], ids=str)
@each("eager_bytes", SENDS)
@each("async_op", [False, True])
def test_unlike_roots_are_named_with_the_ranks_that_passed_them(operation, algorithm, roots, eager_bytes, async_op):
    """Whether two messages meet, every rank waits, or one is left over; each sentence has the roots of two ranks."""

    def program(comm):
        array = 4 * comm.size
        if operation == "scatter":
            work = collectives.scatter(
                comm, np.ones(array), np.ones(4), roots[comm.rank], algorithm=algorithm, async_op=async_op
            )
        else:
            work = UNLIKE_ROOTS[operation](comm, roots[comm.rank], algorithm=algorithm, async_op=async_op)
        if async_op:
            work.wait()

    with pytest.raises(CommunicationError, match="roots differ") as caught:
        SimWorld(len(roots), eager_bytes=eager_bytes).run(program)
    text = str(caught.value)
    assert "every rank must pass the same root" in text
    for root in set(re.findall(r"root (\d)", text)):
        assert int(root) in roots
    assert len(set(re.findall(r"root (\d)", text))) >= 2


def _read_only(size):
    array = np.ones(size)
    array.flags.writeable = False
    return array


def _scatter_in_place(comm):
    array = np.ones(2 * comm.size)
    return collectives.scatter(comm, array if comm.rank == 0 else None, array[2:4])


def _reduce_scatter_in_place(comm):
    array = np.ones(4)
    return collectives.reduce_scatter(comm, array, out=array[2 * comm.rank : 2 * comm.rank + 2])


@each("what", BAD)
def test_wrong_arguments_are_refused_with_the_remedy(what):
    call, words = BAD[what]
    with pytest.raises(UsageError, match=words):
        SimWorld(2).run(call)


@each("dtype, elements", [(np.float32, 16_384), (np.float32, 16_385), (np.float64, 99_999), (np.float64, 200_000)])
def test_an_array_that_starts_inside_a_cache_line_is_added_as_any_other(dtype, elements):
    rng = np.random.default_rng(0)
    for start in range(LINE // np.dtype(dtype).itemsize):
        total, contribution = (rng.standard_normal(elements + start).astype(dtype)[start:] for _ in range(2))
        expected, head = total + contribution, elements_before_line(total)
        assert total[head:].ctypes.data % LINE == 0
        assert head < LINE // total.itemsize
        assert elements_before_line(total[::2]) == 0  # its elements do not fill lines
        accumulate("sum", total, contribution)
        assert total.tobytes() == expected.tobytes()


@each("nbytes, is_asked", [(65_536, False), (65_540, True), (4 << 20, True)])
def test_sums_of_arrays_that_are_sent_without_a_copy_store_whole_cache_lines(nbytes, is_asked, monkeypatch):
    asked = []
    monkeypatch.setattr(
        "minidist.collectives.call_checks.elements_before_line", lambda value: asked.append(value.nbytes) or 0
    )
    accumulate("sum", *np.zeros((2, nbytes // 4), np.float32))
    assert asked == [nbytes] * is_asked
