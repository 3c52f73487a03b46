"""The gradient norm: the same bits from any shards, PyTorch's value, PyTorch's coefficient."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minidist.core.autograd import Parameter
from minidist.core.base.errors import UsageError
from minidist.core.nn import MLP
from minidist.core.nn.flat import FlatParameters
from minidist.core.optim import NORM_BLOCK
from minidist.optim import ParameterSlice, block_square_sums, clip_coefficient, clip_grad_norm_, norm_from_blocks
from tests.cases import each


def gradient(size, seed=0):
    return np.random.default_rng(seed).standard_normal(size).astype(np.float32)


@given(size=st.integers(1, 9 * NORM_BLOCK), cuts=st.sets(st.integers(1, 8), max_size=4), padding=st.integers(0, 3))
def test_shards_give_the_bits_of_the_whole(size, cuts, padding):
    """Shards begin at multiples of the block; the last may be ragged, and padding with zeros changes nothing."""
    whole = gradient(size, seed=size)
    padded = np.concatenate([whole, np.zeros(padding * NORM_BLOCK, np.float32)])
    edges = [0, *(cut * NORM_BLOCK for cut in sorted(cuts) if cut * NORM_BLOCK < padded.size), padded.size]
    shards = [block_square_sums(padded[a:b].copy()) for a, b in pairwise(edges)]
    assert norm_from_blocks(np.concatenate(shards)) == norm_from_blocks(block_square_sums(whole))


def test_a_long_array_is_cut_into_the_same_blocks():
    """Longer than the piece that is converted at a time, and not a multiple of it."""
    whole = gradient(2 * 65536 + 5 * NORM_BLOCK + 7)
    blocks = block_square_sums(whole)
    assert blocks.shape == (134,)
    assert blocks.dtype == np.float64
    each = [block_square_sums(whole[start : start + NORM_BLOCK])[0] for start in range(0, whole.size, NORM_BLOCK)]
    np.testing.assert_array_equal(blocks, each)
    expected = float(np.sqrt((whole.astype(np.float64) ** 2).sum()))
    assert norm_from_blocks(blocks) == pytest.approx(expected, rel=1e-14)


def test_the_sum_is_in_float64():
    """In float32 ten million equal squares stop growing; and the blocks are added first to last, not pairwise."""
    assert norm_from_blocks(block_square_sums(np.full(4096, 1e-30, np.float32))) == pytest.approx(64e-30, rel=1e-7)
    assert norm_from_blocks(np.array([2.0**53, 1.0, 1.0, 1.0])) == np.sqrt(2.0**53)


def test_clipping_scales_every_gradient_once():
    pieces = [ParameterSlice(np.zeros(2), np.array([3.0, 0.0]), "a"), ParameterSlice(np.zeros(1), np.array([4.0]), "b")]
    without = ParameterSlice(np.zeros(1), None, "c")
    assert clip_grad_norm_([*pieces, without], 1.0) == 5.0
    np.testing.assert_allclose(np.concatenate([piece.grad for piece in pieces]), [0.6, 0, 0.8], rtol=1e-6)
    kept = [piece.grad.copy() for piece in pieces]
    clip_grad_norm_(pieces, 2.0)
    for piece, before in zip(pieces, kept, strict=True):
        np.testing.assert_array_equal(piece.grad, before)  # below the bound nothing is touched


def test_a_flat_unit_is_one_array():
    flat = FlatParameters([Parameter(np.zeros(700), name="a"), Parameter(np.zeros((30, 30)), name="b")])
    flat.grad[:] = np.arange(1600)
    assert clip_grad_norm_(flat, 1e9) == norm_from_blocks(block_square_sums(np.arange(1600.0)))
    assert clip_grad_norm_([], 1.0) == 0.0


@pytest.mark.parametrize(("norm", "expected"), [(0.0, 1.0), (1.0, 1 / (1 + 1e-6)), (0.5, 1.0), (np.inf, 0.0)])
def test_the_coefficient(norm, expected):
    assert clip_coefficient(norm, 1.0) == expected


def test_a_nan_is_not_hidden():
    assert np.isnan(clip_coefficient(float("nan"), 1.0))
    piece = ParameterSlice(np.zeros(2), np.array([np.nan, 1.0]), "a")
    assert np.isnan(clip_grad_norm_([piece], 1.0))
    assert np.isnan(piece.grad).all()


@pytest.mark.peers
@pytest.mark.parametrize("max_norm", [0.1, 1e6])
def test_equals_pytorch(max_norm):
    torch = pytest.importorskip("torch")
    grads = [gradient(3000).astype(np.float64), gradient(17, 1).astype(np.float64)]
    pieces = [ParameterSlice(np.zeros_like(grad), grad.copy(), str(i)) for i, grad in enumerate(grads)]
    parameters = [torch.nn.Parameter(torch.zeros(grad.size, dtype=torch.float64)) for grad in grads]
    for parameter, grad in zip(parameters, grads, strict=True):
        parameter.grad = torch.from_numpy(grad)
    norm = torch.nn.utils.clip_grad_norm_(parameters, max_norm)
    assert clip_grad_norm_(pieces, max_norm) == pytest.approx(float(norm), rel=1e-12)
    for piece, parameter in zip(pieces, parameters, strict=True):
        np.testing.assert_allclose(piece.grad, parameter.grad.numpy(), rtol=1e-12)


@each("wrong", [float("nan"), -1, 0, True, None, "1"])
def test_a_wrong_norm_to_clip_by(wrong):
    piece = ParameterSlice(np.zeros(2), np.ones(2), "w")
    with pytest.raises(UsageError, match=r"^max_norm=.*; it must be a finite number above 0, or infinite to compute"):
        clip_grad_norm_(piece, wrong)
    np.testing.assert_array_equal(piece.grad, 1)


def test_an_infinite_norm_to_clip_by_leaves_the_gradient_as_it_is():
    piece = ParameterSlice(np.zeros(2), np.array([3.0, 4.0]), "w")
    assert clip_grad_norm_(piece, float("inf")) == 5
    np.testing.assert_array_equal(piece.grad, [3, 4])


def test_a_generator_of_parameters_is_clipped_too():
    """`model.parameters()` is one: it was walked once for the norm, and then there was nothing left to scale."""
    for make in (lambda m: m.parameters(), lambda m: iter([m.parameters()]), lambda m: [*m.parameters()]):
        model = MLP([3, 4, 2], dtype=np.float64)
        for parameter in model.parameters():
            parameter.grad = np.ones(parameter.shape)
        size = sum(parameter.size for parameter in model.parameters())
        assert clip_grad_norm_(make(model), 0.5) == pytest.approx(size**0.5)
        assert clip_grad_norm_(make(model), 9.0) == pytest.approx(0.5, rel=1e-5)
