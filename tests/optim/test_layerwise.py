"""LARS and LAMB against their papers in NumPy, and the sums by which a layer that is cut has the bits of the whole."""

from fractions import Fraction

import hypothesis
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minidist.comm import SimWorld
from minidist.core.autograd import Parameter
from minidist.core.base.errors import UsageError
from minidist.core.base.layout import Layout
from minidist.core.nn.flat import FlatParameters
from minidist.core.parallel.zero import Shard
from minidist.optim import LAMB, LARS, NO_DECAY, ParameterSlice
from minidist.optim.exact_sums import LIMBS, square_sum, value_of
from minidist.parallel import HostPool, LayerSums

SHAPES = {"h.0.weight": (5, 7), "h.0.bias": (7,), "head.weight": (3, 5)}
CASES = [
    (LAMB, {"lr": 0.1}),
    (LAMB, {"lr": 0.1, "betas": (0.8, 0.9), "eps": 1e-3, "weight_decay": 0.3}),
    (LARS, {"lr": 2.0}),
    (LARS, {"lr": 2.0, "momentum": 0.9, "trust_coefficient": 0.02, "weight_decay": 0.1}),
]
all_cases = pytest.mark.parametrize(("optimizer", "settings"), CASES, ids=lambda value: getattr(value, "__name__", ""))


def lamb(w, gradients, lr, betas=(0.9, 0.999), eps=1e-6, weight_decay=0.0):
    """You et al. 2020, algorithm 2, on one layer; phi is the identity."""
    m, v = np.zeros_like(w), np.zeros_like(w)
    for t, g in enumerate(gradients, 1):
        m = betas[0] * m + (1 - betas[0]) * g
        v = betas[1] * v + (1 - betas[1]) * g**2
        r = m / (1 - betas[0] ** t) / (np.sqrt(v / (1 - betas[1] ** t)) + eps)
        update = r + weight_decay * w
        w = w - lr * np.linalg.norm(w) / np.linalg.norm(update) * update
    return w


def lars(w, gradients, lr, momentum=0.0, trust_coefficient=0.001, weight_decay=0.0):
    """You et al. 2017, algorithm 1, on one layer."""
    v = np.zeros_like(w)
    for g in gradients:
        rate = trust_coefficient * np.linalg.norm(w) / (np.linalg.norm(g) + weight_decay * np.linalg.norm(w))
        v = momentum * v + lr * rate * (g + weight_decay * w)
        w = w - v
    return w


def model(dtype=np.float64):
    rng = np.random.default_rng(0)
    return [Parameter(rng.standard_normal(shape).astype(dtype), name=name) for name, shape in SHAPES.items()]


def gradients_of(dtype=np.float64):
    rng = np.random.default_rng(1)
    return [{name: rng.standard_normal(shape).astype(dtype) for name, shape in SHAPES.items()} for _ in range(4)]


@all_cases
def test_equals_the_algorithm_of_the_paper_layer_by_layer(optimizer, settings):
    parameters = model()
    start, steps = {p.name: p.data.copy() for p in parameters}, gradients_of()
    chosen = optimizer(FlatParameters(parameters), **settings)
    for gradients in steps:
        for p in parameters:
            p.grad = gradients[p.name]
        chosen.step()
    paper = {LAMB: lamb, LARS: lars}[optimizer]
    for p in parameters:
        expected = paper(start[p.name], [gradients[p.name] for gradients in steps], **settings)
        np.testing.assert_allclose(p.data, expected, rtol=1e-12)


def test_settings_of_groups_and_layers_of_zeros():
    """A bias that begins as zeros moves by the plain learning rate; a group has a separate rate and decay."""
    weight, bias = Parameter(np.full(4, 2.0), name="weight"), Parameter(np.zeros(4), name="bias")
    weight.grad, bias.grad = np.full(4, 4.0), np.full(4, 4.0)
    LARS([weight, bias], lr=0.5, trust_coefficient=0.25, weight_decay=1.0, groups=[NO_DECAY]).step()
    np.testing.assert_allclose(bias.data, -0.5 * 4)
    np.testing.assert_allclose(weight.data, 2 - 0.5 * (0.25 * 4 / (8 + 4)) * (4 + 2))  # |w| = 4, |g| = 8


@all_cases
@hypothesis.settings(max_examples=30)
@given(st.sets(st.integers(1, 56), max_size=3))
def test_a_layer_cut_anywhere_over_ranks_has_the_bits_of_the_whole(optimizer, settings, cuts):
    """In float32: what ZeRO relies on, for cuts at any element and more ranks than a layer has parts."""
    edges = [0, *sorted(cuts), 57]

    def program(comm):
        flat = FlatParameters(model(np.float32))
        first, last = (0, 57) if comm.size == 1 else edges[comm.rank : comm.rank + 2]
        parts = [(p.name, flat.slice_of(p)) for p in flat.parameters]
        parts = [(name, slice(max(place.start, first), min(place.stop, last))) for name, place in parts]
        slices = [(ParameterSlice(flat.data[at], None, name), at) for name, at in parts if at.start < at.stop]
        chosen = optimizer([piece for piece, _ in slices], layer_sums=LayerSums(flat.parameters, comm), **settings)
        for gradients in gradients_of(np.float32):
            whole = np.concatenate([gradients[p.name].reshape(-1) for p in flat.parameters])
            for piece, at in slices:
                piece.grad = whole[at]
            chosen.step()
        return flat.data[first:last]

    whole, cut = (np.concatenate(SimWorld(ranks).run(program)) for ranks in (1, len(edges) - 1))
    np.testing.assert_array_equal(whole, cut)


@all_cases
def test_blocks_do_not_change_bits_and_half_precision_has_masters(optimizer, settings, monkeypatch):
    def run(dtype):
        parameters = model(dtype)
        chosen = optimizer(FlatParameters(parameters), **settings)
        for gradients in gradients_of(dtype):
            for p in parameters:
                p.grad = gradients[p.name]
            chosen.step()
        return np.concatenate([p.data.reshape(-1) for p in parameters])

    whole, half = run(np.float32), run(np.float16)
    assert half.dtype == np.float16
    np.testing.assert_allclose(half, whole, rtol=0.05, atol=0.01)
    monkeypatch.setattr("minidist.core.optim.optimizer.BLOCK", 3)
    np.testing.assert_array_equal(run(np.float32), whole)


@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), max_size=30), st.randoms())
def test_sums_of_squares_are_exact_in_any_order(numbers, random):
    array = np.array(numbers, np.float32)
    exact = sum((Fraction(x) ** 2 for x in array.tolist() if x * x >= 2.0**-266), Fraction(0))
    limbs = square_sum(array)
    assert limbs.shape == (LIMBS,)
    assert value_of(limbs) == float(exact)
    shuffled = numbers[:]
    random.shuffle(shuffled)
    cut = random.randint(0, len(numbers))
    parts = [square_sum(np.array(part, np.float32)) for part in (shuffled[:cut], shuffled[cut:])]
    assert value_of(parts[0] + parts[1]) == value_of(limbs)


def test_what_is_not_finite_or_too_large_is_not_a_number():
    for value in (np.nan, np.inf, -np.inf, 1e39):
        assert np.isnan(value_of(square_sum(np.array([1.0, value]))))
    assert value_of(square_sum(np.array([1e-60, 3.0]))) == 9.0
    assert value_of(square_sum(np.zeros(0))) == 0.0


@pytest.mark.parametrize("optimizer", [LAMB, LARS])
def test_shards_without_their_sums_are_refused(optimizer):
    def over_ranks(comm):
        with pytest.raises(UsageError, match=r"the whole of '.*', and this rank has a shard of it; pass layer_sums="):
            optimizer(Shard(model(), comm, 1).slices())

    SimWorld(2).run(over_ranks)
    weight = Parameter(np.ones((2, 2)), name="w")
    weight.layout = Layout((4, 2), ("tp",), (0,))
    for cut in ([weight], FlatParameters([weight])):
        with pytest.raises(UsageError, match="tp=comm"):
            optimizer(cut)
    # Here, so that the other tests are collected without this technique.
    from minidist.techniques.offload.optimizer import OffloadedOptimizer

    with pytest.raises(UsageError, match=f"{optimizer.__name__} reads every gradient twice"):
        SimWorld(1).run(lambda comm: OffloadedOptimizer(model(), optimizer, HostPool(comm)))
