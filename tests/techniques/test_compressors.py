"""Compression: error feedback loses nothing, the bounds hold, and the bytes are those of the closed form."""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minidist.base.coordinates import Key, normal
from minidist.collectives.closed_forms import volume
from minidist.comm import SimWorld
from minidist.core.autograd import Parameter, Tensor
from minidist.core.base import hooks
from minidist.core.base.errors import MismatchError, UsageError
from minidist.core.base.layout import chunk_sizes, offsets
from minidist.core.base.trace import purpose
from minidist.core.nn.flat import FlatParameters
from minidist.core.parallel.data_parallel import make_buckets
from minidist.parallel.data_parallel import DistributedDataParallel
from minidist.techniques.compression import (
    NAMES,
    QSGD,
    Cast,
    PowerSGD,
    Sign,
    TopK,
    check_compression,
    compress,
    dequantize,
    make_compressor,
    orthonormal,
    quantize,
)
from tests.cases import each
from tests.parallel.replicas import Nested, batch

SHAPES = [(5, 4), (3,), (4, 2, 3), (1, 6)]
SIZE = 53


def hooked(comm, make, gradients, shapes):
    """`gradients(rank)`: one flat gradient per step. Returns each step's result, and what is left at the end."""
    first = gradients(comm.rank)[0]
    parameters = [Parameter(np.zeros(shape, first.dtype), name=f"p{i}") for i, shape in enumerate(shapes)]
    flat = FlatParameters(parameters)
    (bucket,) = make_buckets(flat, 1e9, hooks.guard("avg", comm))
    state, results = make(comm), []
    for gradient in gradients(comm.rank):
        bucket.buffer[...] = gradient
        with purpose("gradient_reduce"):
            work = compress(state, bucket)
        work.wait()
        results.append(bucket.buffer.copy())
    return results, state.residuals.get(0)


def run(make, gradients, ranks, shapes=None, eager_bytes=0):
    world = SimWorld(ranks, eager_bytes=eager_bytes)
    results = world.run(hooked, make, gradients, shapes or [gradients(0)[0].shape])
    for step in range(len(results[0][0])):
        assert len({steps[step].tobytes() for steps, _ in results}) == 1  # all ranks have the same bits
    return world, results


def normals(steps, size, dtype=np.float64):
    return lambda rank: [np.random.default_rng([rank, s]).standard_normal(size).astype(dtype) for s in range(steps)]


def integers(steps, size, seed):
    return lambda rank: [
        np.random.default_rng([seed, rank, s]).integers(-9, 10, size).astype(float) for s in range(steps)
    ]


def everything(gradients, ranks):
    return sum(sum(gradients(rank)) for rank in range(ranks))


# --- error feedback ---


@given(st.integers(1, 5), st.integers(1, 40), st.integers(1, 4), st.integers(0, 99), st.data())
@settings(max_examples=40)
def test_top_k_sent_and_residual_are_all_gradients_exactly(ranks, size, steps, seed, data):
    k, gradients = data.draw(st.integers(1, size)), integers(steps, size, seed)
    _, results = run(lambda comm: TopK(comm, k, "sum"), gradients, ranks)
    left = sum(residual for _, residual in results)
    assert np.array_equal(sum(results[0][0]) + left, everything(gradients, ranks))
    assert all(np.count_nonzero(residual) <= size - k for _, residual in results)


@given(st.integers(1, 5), st.sampled_from([1, 2, 8, 32]), st.integers(1, 4), st.integers(0, 99))
@settings(max_examples=40)
def test_sign_sent_and_residual_are_all_gradients_exactly(ranks, size, steps, seed):
    """Sizes are powers of two, so that the mean magnitude of integers is exact."""
    gradients = integers(steps, size, seed)
    _, results = run(lambda comm: Sign(comm, "sum"), gradients, ranks)
    assert np.array_equal(sum(results[0][0]) + sum(left for _, left in results), everything(gradients, ranks))


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 3))
@settings(max_examples=25)
def test_powersgd_sent_and_residual_are_all_gradients(ranks, rank, steps):
    gradients = normals(steps, SIZE)
    _, results = run(lambda comm: PowerSGD(comm, rank, op="sum", always=True), gradients, ranks, SHAPES)
    np.testing.assert_allclose(
        sum(results[0][0]) + sum(left for _, left in results), everything(gradients, ranks), rtol=0, atol=1e-12
    )


def test_the_mean_is_the_sum_divided():
    for make in (lambda c, op: TopK(c, 5, op), Sign, lambda c, op: QSGD(c, op=op), lambda c, op: PowerSGD(c, op=op)):
        by_op = [
            run(lambda comm, op=op, make=make: make(comm, op), normals(2, 16), 4, [(4, 4)])[1][0][0]
            for op in ("sum", "mean")
        ]
        for total, mean in zip(*by_op, strict=True):
            assert np.array_equal(mean, total / 4)


# --- each compressor ---


@given(st.integers(1, 60), st.data())
def test_top_k_is_a_contraction(size, data):
    k, gradients = data.draw(st.integers(1, size)), normals(1, size)
    x = gradients(0)[0]
    _, [(results, residual)] = run(lambda comm: TopK(comm, k), gradients, 1)
    assert np.count_nonzero(results[0]) == k
    assert np.abs(residual).max() <= np.abs(results[0][results[0] != 0]).min()
    assert (residual**2).sum() <= (1 - k / size) * (x**2).sum() + 1e-12


def test_top_k_of_ties_takes_the_first_ones_and_never_hides_a_nan():
    _, [(results, _)] = run(lambda comm: TopK(comm, 2), lambda rank: [np.array([1.0, -2.0, 2.0, 2.0, -2.0])], 1)
    assert results[0].tolist() == [0, -2, 2, 0, 0]
    spoilt = lambda rank: [np.array([5.0, np.nan if rank else 1.0, 3.0])]  # noqa: E731
    _, parts = run(lambda comm: TopK(comm, 1, "sum"), spoilt, 2)
    for (results, residual), left in zip(parts, ([0, 1, 3], [5, 0, 3]), strict=True):
        np.testing.assert_array_equal(results[0], [5, np.nan, 0])
        assert residual.tolist() == left


def test_sign_of_the_papers_example_and_its_contraction():
    _, [(results, residual)] = run(Sign, lambda rank: [np.array([3.0, -1.0])], 1)
    assert results[0].tolist() == [2, -2]
    assert residual.tolist() == [1, 1]
    _, [(results, residual)] = run(Sign, lambda rank: [np.array([0.0, -4.0])], 1)
    assert (results[0].tolist(), residual.tolist()) == ([2, -2], [-2, -2])  # zero counts as positive
    x = normals(1, 37)(0)[0]
    _, [(_, residual)] = run(Sign, lambda rank: [x], 1)
    assert (residual**2).sum() == pytest.approx((x**2).sum() - np.abs(x).sum() ** 2 / x.size)


@pytest.mark.parametrize("levels", [1, 4, 127])
def test_qsgd_is_unbiased_with_its_variance_bound(levels):
    """Over draws that fill [0, 1) evenly means are exact up to 1/N; over random ones the variance is the bound's at
    most.
    """
    x, n = normals(1, 29)(0)[0], 4000
    step = np.linalg.norm(x) / levels
    even = np.mean(
        [dequantize(*quantized(x, levels, np.full(x.size, (i + 0.5) / n)), levels) for i in range(n)], axis=0
    )
    assert np.abs(even - x).max() <= step / n
    draws = np.random.default_rng(1).random((n, x.size))
    samples = np.array([dequantize(*quantized(x, levels, row), levels) for row in draws])
    assert np.abs(samples.mean(axis=0) - x).max() <= 5 * step / 2 / n**0.5
    factor = min(x.size / levels**2, x.size**0.5 / levels)
    assert ((samples - x) ** 2).sum(axis=1).mean() <= factor * (x**2).sum()
    place = np.abs(x) / step % 1
    assert ((samples - x) ** 2).sum(axis=1).mean() == pytest.approx((place * (1 - place)).sum() * step**2, rel=0.1)


def quantized(x, levels, draws):
    level, norm = quantize(x, levels, draws)
    assert np.abs(level.astype(int)).max() <= levels
    return level, norm[0]


def test_qsgd_stays_within_a_byte_where_the_norm_is_rounded_down():
    """A square may be a denormal with few digits, its root smaller than the number: then x/norm > 1, and 1.2 x 127 is
    no byte.
    """
    below = 0
    for tiny in np.linspace(1.6e-162, 9e-162, 50):
        level, norm = quantize(np.array([tiny, 0.0]), 127, np.zeros(2))
        below += norm[0] < tiny
        assert level[0] == 127 or norm[0] > tiny
    assert below > 5


def test_qsgd_draws_anew_for_every_rank_and_step_and_repeats_with_the_seed():
    same = lambda rank: [np.linspace(-1, 1, 40)] * 2  # noqa: E731
    first, again = (run(lambda comm: QSGD(comm, 3, seed=5, op="sum"), same, 2)[1][0][0] for _ in range(2))
    alone = run(lambda comm: QSGD(comm, 3, seed=5, op="sum"), same, 1)[1][0][0]
    assert np.array_equal(first, again)
    assert not np.array_equal(first[0], first[1])
    assert not np.array_equal(first[0], 2 * alone[0])
    assert not run(lambda comm: QSGD(comm), lambda rank: [np.zeros(5)], 2)[1][0][0][0].any()


def test_qsgd_draws_anew_for_every_bucket():
    """Two buckets with the same numbers are rounded apart."""

    def program(comm):
        flat = FlatParameters([Parameter(np.zeros(40), name=name) for name in "ab"])
        state, buckets = QSGD(comm, 3), make_buckets(flat, 320)
        flat.grad_buffer[...] = np.tile(np.linspace(-1, 1, 40), 2)
        for bucket in buckets:
            compress(state, bucket).wait()
        return [bucket.buffer.copy() for bucket in buckets]

    first, second = SimWorld(1).run(program)[0]
    assert not np.array_equal(first, second)


def test_powersgd_sends_a_matrix_whole_unless_its_factors_are_smaller():
    """4 x 4 by rank 2 is 16 values either way; then whole, and exact."""

    def program(comm):
        always = PowerSGD(comm, rank=2, always=True)
        return [*(PowerSGD(comm, rank=2).factors(shape) for shape in ((4, 4), (4, 5))), always.factors((4, 4))]

    assert SimWorld(1).run(program) == [[None, (4, 5, 2), (4, 4, 2)]]


def test_powersgd_gets_better_by_its_warm_start():
    """The same matrix repeatedly, without error feedback: power iteration finds the best rank-1 approximation."""
    x = normals(1, 48)(0)[0]

    class Forgetful(PowerSGD):
        def corrected(self, bucket):
            return bucket.buffer.copy()

    _, [(results, _)] = run(lambda comm: Forgetful(comm, 1), lambda rank: [x] * 200, 1, [(6, 8)])
    u, s, v = np.linalg.svd(x.reshape(6, 8))
    best = s[0] * np.outer(u[:, 0], v[0])
    errors = [np.linalg.norm(result.reshape(6, 8) - best) for result in (results[0], results[-1])]
    assert errors[1] < 1e-6 < errors[0]


def test_orthonormal_columns_and_dependent_ones():
    columns = np.random.default_rng(0).standard_normal((7, 3))
    q = orthonormal(columns)
    np.testing.assert_allclose(q.T @ q, np.eye(3), atol=1e-14)
    np.testing.assert_allclose(q @ (q.T @ columns), columns, atol=1e-13)
    dependent = orthonormal(np.stack([columns[:, 0], 2 * columns[:, 0], 0 * columns[:, 0]], axis=1))
    assert not dependent[:, 1:].any()


def test_columns_that_nearly_depend_on_each_other_become_orthonormal():
    """After one projection the third one would keep 1e-6 of the others: rounding of 1e-16 next to a rest of 1e-10."""
    a, b, c = np.random.default_rng(1).standard_normal((3, 9))
    q = orthonormal(np.stack([a, b, a + b + 1e-10 * c], axis=1))
    np.testing.assert_allclose(q.T @ q, np.eye(3), rtol=0, atol=1e-14)


@pytest.mark.parametrize("seed", [0, 7])
def test_powersgd_projects_the_sum_on_what_all_ranks_make_of_the_same_queries(seed):
    """One step of the paper's algorithm, with NumPy's QR: the sum becomes P P^T times the sum on every rank."""
    gradients, ranks = normals(1, 20), 3
    _, results = run(lambda comm: PowerSGD(comm, 2, seed, "sum"), gradients, ranks, [(5, 4)])
    of_rank = [gradients(rank)[0].reshape(5, 4) for rank in range(ranks)]
    query = normal(Key(seed, "powersgd", name="p0"), (4, 2))
    p, _ = np.linalg.qr(sum(matrix @ query for matrix in of_rank))
    np.testing.assert_allclose(results[0][0][0].reshape(5, 4), p @ p.T @ sum(of_rank), rtol=0, atol=1e-12)
    for matrix, (_, left) in zip(of_rank, results, strict=True):
        np.testing.assert_allclose(left.reshape(5, 4), matrix - p @ p.T @ matrix, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("text", "kind"), [("powersgd:1", PowerSGD), ("qsgd:1", QSGD)])
def test_a_compressor_by_its_name_draws_with_the_seed_that_it_is_given(text, kind):
    gradients = normals(1, 20)
    named, same, other = (
        run(make, gradients, 2, [(5, 4)])[1][0][0][0].tobytes()
        for make in (
            lambda comm: make_compressor(text, comm, "sum", 7),
            lambda comm: kind(comm, 1, seed=7, op="sum"),
            lambda comm: kind(comm, 1, seed=0, op="sum"),
        )
    )
    assert named == same != other


def test_of_16_bit_gradients_a_residual_keeps_what_16_bits_do_not():
    """2048 + 1 is no float16. It is kept whole, and when 2048 of it are sent, 1 stays."""
    gradients = lambda rank: [np.array(g, np.float16) for g in ([4096, 2048], [0, 1])]  # noqa: E731
    _, [(results, left)] = run(lambda comm: TopK(comm, 1), gradients, 1)
    assert [result.tolist() for result in results] == [[4096, 0], [0, 2048]]
    assert (left.dtype, left.tolist()) == (np.float32, [0, 1])


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_cast_is_an_all_reduce_in_half_precision(dtype):
    kind = np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else np.float16)
    gradients = normals(1, 21, np.float32)
    _, results = run(lambda comm: Cast(comm, dtype), gradients, 2)
    a, b = ((gradients(rank)[0] / 2).astype(kind) for rank in range(2))
    assert np.array_equal(results[0][0][0], (a + b).astype(np.float32))
    large = lambda rank: [np.full(3, 60000.0, np.float32)]  # noqa: E731
    assert np.isfinite(run(lambda comm: Cast(comm, dtype), large, 4)[1][0][0][0]).all()


# --- bytes ---


def ring(elements, ranks, rank, itemsize):
    return volume("all_reduce", "ring", elements, ranks, rank).elements * itemsize


MATRICES = [(5, 4), (4, 6)]  # of SHAPES, where rank 1 is smaller than the matrix; (1, 6) is not
FORMULAS = {
    "Cast": (lambda comm: Cast(comm), lambda n, r: ring(SIZE, n, r, 2)),
    "TopK": (lambda comm: TopK(comm, 7), lambda n, r: (n - 1) * 7 * (4 + 4)),
    "Sign": (Sign, lambda n, r: (n - 1) * (-(-SIZE // 8) + 4)),
    "QSGD": (QSGD, lambda n, r: (n - 1) * (SIZE + 4)),
    "PowerSGD": (
        PowerSGD,
        lambda n, r: (
            ring(3 + 6, n, r, 4)
            + ring(sum(m for m, _ in MATRICES), n, r, 4)
            + ring(sum(k for _, k in MATRICES), n, r, 4)
        ),
    ),
}


def declared_bytes(comm, make):
    flat = FlatParameters([Parameter(np.zeros(shape, np.float32), name=f"p{i}") for i, shape in enumerate(SHAPES)])
    (bucket,) = make_buckets(flat, 1e9)
    state = make(comm)
    return [state.sent_bytes(bucket, rank) for rank in range(comm.size)]


@each("name", FORMULAS)
@each("ranks", [1, 2, 3, 5])
@each("eager_bytes", [0, 1 << 20])
def test_bytes_on_the_wire(name, ranks, eager_bytes):
    make, formula = FORMULAS[name]
    world, _ = run(make, normals(2, SIZE, np.float32), ranks, SHAPES, eager_bytes)
    declared = SimWorld(ranks).run(declared_bytes, make)
    for rank, trace in enumerate(world.traces):
        assert sum(m.nbytes for m in trace.sent("gradient_reduce")) == 2 * formula(ranks, rank)
        assert declared[rank] == [formula(ranks, other) for other in range(ranks)]
        assert trace.bytes_by_purpose().keys() <= {"gradient_reduce"}


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_matrix_of_fewer_rows_than_the_rank_has_factors_of_as_many_columns(ranks):
    """2 x 50 by rank 3 is 2 columns of 2 and of 50 values."""
    make = lambda comm: PowerSGD(comm, 3, always=True)  # noqa: E731
    world, _ = run(make, normals(1, 100, np.float32), ranks, [(2, 50)])
    assert SimWorld(1).run(lambda comm: make(comm).factors((2, 50))) == [(2, 50, 2)]
    for rank, trace in enumerate(world.traces):
        sent = sum(m.nbytes for m in trace.sent("gradient_reduce"))
        assert sent == ring(2 * 2, ranks, rank, 4) + ring(50 * 2, ranks, rank, 4)


# --- in a checkpoint ---

STATEFUL = {
    "TopK": lambda comm: TopK(comm, 0.3, "sum"),
    "Sign": lambda comm: Sign(comm, "sum"),
    "QSGD": lambda comm: QSGD(comm, 4, op="sum"),
    "PowerSGD": lambda comm: PowerSGD(comm, 1, op="sum", always=True),
}


def interrupted(comm, make, cut, cap_before, cap_after):
    """Five steps; after `cut` of them the compressor is made anew, with other buckets, and given its state."""
    flat = FlatParameters([Parameter(np.zeros(shape, np.float64), name=f"p{i}") for i, shape in enumerate(SHAPES)])
    state, buckets, results = make(comm), make_buckets(flat, cap_before), []
    for step, gradient in enumerate(normals(5, SIZE)(comm.rank)):
        if step == cut:
            residual, shared, old = state.residual(buckets), state.shared_state(), state
            state, buckets = make(comm), make_buckets(flat, cap_after)
            if old.error_feedback:
                state.load_residual(buckets, residual)
            state.load_shared_state(shared)
        flat.grad_buffer[...] = gradient
        for bucket in buckets:
            with purpose("gradient_reduce"):
                compress(state, bucket).wait()
        results.append(flat.grad_buffer.copy())
    return results, state.residual(buckets)


@each("name", STATEFUL)
@each("ranks", [1, 3])
def test_a_resumed_compressor_goes_on_bit_for_bit(name, ranks):
    whole = SimWorld(ranks).run(interrupted, STATEFUL[name], None, 1e9, 1e9)
    for cut in (1, 3):
        parts = SimWorld(ranks).run(interrupted, STATEFUL[name], cut, 1e9, 1e9)
        assert all(np.array_equal(a[0], b[0]) and np.array_equal(a[1], b[1]) for a, b in zip(whole, parts, strict=True))


def test_a_residual_does_not_depend_on_the_buckets():
    """Every sum of five steps and what is left: the same total, though other buckets choose other elements."""
    for name in ("TopK", "PowerSGD"):
        for caps in ((200, 1e9), (1e9, 200)):
            results = SimWorld(3).run(interrupted, STATEFUL[name], 2, *caps)
            total = sum(results[0][0]) + sum(left for _, left in results)
            np.testing.assert_allclose(total, everything(normals(5, SIZE), 3), rtol=0, atol=1e-12)


def test_a_residual_of_another_model_is_refused():
    def program(comm):
        flat = FlatParameters([Parameter(np.zeros(4), name="p")])
        TopK(comm, 1).load_residual(make_buckets(flat, 1e9), np.zeros(5))

    with pytest.raises(UsageError, match=r"rank 0: a residual of \(5,\) float64 for a flat gradient of \(4,\)"):
        SimWorld(2).run(program)


# --- by name ---


def test_a_compressor_by_its_name():
    def program(comm):
        made = [
            make_compressor(text, comm, "sum", 3)
            for text in ("fp16", "bf16", "topk:0.1", "topk:7", "sign", "qsgd:4", "powersgd:2")
        ]
        return [(type(m), m.op) for m in made], [made[2].k, made[3].k, made[5].levels, made[5].seed, made[6].rank]

    kinds, numbers = SimWorld(1).run(program)[0]
    assert kinds == [(kind, "sum") for kind in (Cast, Cast, TopK, TopK, Sign, QSGD, PowerSGD)]
    assert numbers == [0.1, 7, 4, 3, 2]
    assert set(NAMES) == {"none", "fp16", "bf16", "topk", "sign", "qsgd", "powersgd"}


@each(
    ("text", "sentence"),
    [
        ("top", "did you mean 'topk'"),
        ("fp16:2", "fp16 takes no number"),
        ("topk", "a share below 1"),
        ("topk:1.5", "such as topk:0.01"),
        ("topk:0", "needs a number"),
        ("topk:-3", "needs a number"),
        ("qsgd:128", "levels, 1 to 127"),
        ("powersgd:0.5", "rank, at least 1"),
        ("qsgd:x", "needs a number"),
        ("topk:inf", "needs a number"),
        ("powersgd:inf", "needs a number"),
        ("topk:nan", "needs a number"),
    ],
)
def test_an_unknown_compression_is_refused(text, sentence):
    with pytest.raises(UsageError, match=sentence):
        check_compression(text)


@given(st.lists(st.floats(-(2.0**99), 2.0**99, width=32), min_size=1, max_size=20), st.floats(0.01, 0.99))
@settings(max_examples=40)
def test_on_any_numbers_what_top_k_sends_and_keeps_is_what_it_had(numbers, share):
    x = np.array(numbers, np.float32)
    _, [(results, left)] = run(lambda comm: TopK(comm, share, "sum"), lambda rank: [x], 1)
    assert np.array_equal(results[0] + left, x)
    assert not np.any((results[0] != 0) & (left != 0))
    assert np.count_nonzero(left) <= x.size - np.ceil(share * x.size)


# --- with DistributedDataParallel ---


def ddp_gradient(comm, make, bucket_cap_mb=25.0):
    inputs, output_gradient = batch(rows=12)
    start = offsets(chunk_sizes(12, comm.size))
    rows = slice(start[comm.rank], start[comm.rank + 1])
    ddp = DistributedDataParallel(Nested(), comm, algorithm="ordered", bucket_cap_mb=bucket_cap_mb)
    if make is not None:
        ddp.register_comm_hook(make(comm), compress)
    ddp(Tensor(inputs[rows])).backward(output_gradient[rows])
    return ddp.flat.grad.copy(), len(ddp.reducer.buckets)


@each("name", FORMULAS)
@each("ranks", [1, 3])
def test_as_hooks_of_data_parallelism_over_several_buckets(name, ranks):
    make = {**{n: f[0] for n, f in FORMULAS.items()}, "PowerSGD": lambda comm: PowerSGD(comm, 6, always=True)}[name]
    results = SimWorld(ranks).run(ddp_gradient, make, 200e-6)
    whole = SimWorld(ranks).run(ddp_gradient, None, 200e-6)
    assert results[0][1] > 2
    assert len({gradient.tobytes() for gradient, _ in results}) == 1
    error = np.linalg.norm(results[0][0] - whole[0][0]) / np.linalg.norm(whole[0][0])
    assert error < {"Cast": 0.02, "TopK": 0.95, "Sign": 1.0, "QSGD": 0.05, "PowerSGD": 1e-5}[name]
    assert error > 0 or name == "PowerSGD"


# --- bad input ---

BAD = {
    "k": (lambda c: TopK(c, 0), "top-k: k=0; it must be a finite number above 0"),
    "k of a half": (lambda c: TopK(c, 1.5), "k = 1.5"),
    "op": (lambda c: Sign(c, "avg"), "'avg'; it must be 'mean' or 'sum'"),
    "dtype": (lambda c: Cast(c, "float32"), "float16 or bfloat16"),
    "levels": (lambda c: QSGD(c, 128), "128 levels"),
    "rank": (lambda c: PowerSGD(c, 0), "rank 0: PowerSGD: rank=0; it must be a whole number of at least 1"),
}


@each("what", BAD)
def test_wrong_arguments(what):
    with pytest.raises(UsageError, match=BAD[what][1]):
        SimWorld(2).run(BAD[what][0])


UNLIKE = {
    "k": (lambda c: TopK(c, 2 + c.rank), "k 2", "k 3"),
    "levels": (lambda c: QSGD(c, 4 + c.rank), "levels 4", "levels 5"),
    "rank": (lambda c: PowerSGD(c, 1 + c.rank), "rank 1", "rank 2"),
    "always": (lambda c: PowerSGD(c, 1, always=c.rank == 0), "always True", "always False"),
    "dtype": (lambda c: Cast(c, ("float16", "bfloat16")[c.rank]), "dtype float16", "dtype bfloat16"),
    "op of top-k": (lambda c: TopK(c, 2, ("sum", "mean")[c.rank]), "op sum", "op mean"),
    "op of signs": (lambda c: Sign(c, ("sum", "mean")[c.rank]), "op sum", "op mean"),
}


@each("what", UNLIKE)
def test_ranks_with_other_settings_are_named_with_both(what):
    make, first, second = UNLIKE[what]
    with pytest.raises(MismatchError, match=r"ranks differ in compress/") as raised:
        run(make, normals(1, 20), 2, [(5, 4)])
    assert first in str(raised.value)
    assert second in str(raised.value)


def test_top_k_of_more_elements_than_there_are_is_refused():
    with pytest.raises(UsageError, match="rank 0: top-k with k = 9 > 4, the size of bucket 0"):
        run(lambda comm: TopK(comm, 9), normals(1, 4), 2)
