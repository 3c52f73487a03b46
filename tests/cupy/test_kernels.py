"""The kernels in CUDA C compute what the array functions next to them do, and sums have the same bits in each run."""

import ast
import inspect
from pathlib import Path

import numpy as np
import pytest

from minidist.base import arrays as xp
from minidist.base import meta_kernels
from minidist.base.meta import MetaArray
from minidist.core.autograd import Tensor, cross_entropy
from minidist.core.autograd.ops.attention import causal_attention
from minidist.core.autograd.ops.layer_norm import layer_norm
from minidist.core.autograd.ops.linear import gelu_with_derivative
from minidist.core.nn import FlatParameters, Linear
from minidist.core.optim import AdamW
from minidist.optim.adam import Adam
from tests.cupy.stand_in import Device

RNG = np.random.default_rng(0)


def test_only_arrays_of_cupy_and_without_data_have_kernels():
    for value in (np.ones(3), Device().asarray(np.ones(3))):
        assert xp.kernels_of(value) is None
    assert xp.kernels_of(MetaArray(3)) is meta_kernels


def test_the_operations_of_meta_arrays_are_those_of_cupy():
    """The names and the parameters: cuda.py cannot be imported without CuPy, so it and what it imports are parsed."""
    folder = Path(meta_kernels.__file__).parent
    imports = [node for node in ast.parse((folder / "cuda.py").read_text()).body if isinstance(node, ast.ImportFrom)]
    assert sum(len(node.names) for node in imports) == 11
    for node in imports:
        tree = ast.parse((folder / node.module.rpartition(".")[2]).with_suffix(".py").read_text())
        functions = {function.name: function for function in tree.body if isinstance(function, ast.FunctionDef)}
        for name in (alias.name for alias in node.names):
            own = list(inspect.signature(getattr(meta_kernels, name)).parameters)
            if own != ["arguments"]:
                assert own == [argument.arg for argument in functions[name].args.args][: len(own)], name


def test_a_gpu_takes_larger_blocks():
    there = Device().asarray(np.ones(5))
    assert xp.block_length(np.ones(5), 2) == 2
    assert [(b.start, b.stop) for b in xp.blocks(np.ones(5), 2)] == [(0, 2), (2, 4), (4, 5)]
    assert [(b.start, b.stop) for b in xp.blocks(there, 2)] == [(0, 5)]
    assert list(xp.blocks(Device().asarray(np.ones(0)), 2)) == []


def close(there, here, dtype):
    # 1 + tanh of a large negative number has no digits left: it is off by the last digit of 1, times x.
    np.testing.assert_allclose(there.get(), here, rtol=1e-12 if dtype == np.float64 else 2e-5, atol=5e-6)


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("shape", [(), (0,), (7,), (3, 5, 64)])
def test_gelu(gpu, shape, dtype):
    x = np.asarray(3 * RNG.standard_normal(shape), dtype)
    for there, here in zip(gelu_with_derivative(gpu.asarray(x)), gelu_with_derivative(x), strict=True):
        assert (there.shape, there.dtype) == (here.shape, here.dtype)
        close(there, here, dtype)


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("kind", [Adam, AdamW])
def test_adam(gpu, kind, dtype):
    """Ten steps with gradients from 1e-9 to 1e3: eps matters in some and the second moment's digits in others."""
    results = []
    gradients = [(10.0 ** RNG.uniform(-9, 3, 4 * 3 + 3)).astype(dtype) for _ in range(10)]
    for device in (None, gpu):
        model = Linear(4, 3, dtype=dtype).to(device)
        flat = FlatParameters(model.parameters())
        optimizer = kind(flat, lr=1e-2, weight_decay=0.1)
        for gradient in gradients:
            flat.grad[...] = gradient if device is None else device.asarray(gradient)
            optimizer.step()
        results.append([flat.data, *(state for own in optimizer.state.values() for state in own.values())])
    for here, there in zip(*results, strict=True):
        np.testing.assert_allclose(there.get(), here, rtol=1e-12 if dtype == np.float64 else 1e-5)


@pytest.mark.cuda
@pytest.mark.parametrize(("rows", "width", "entries"), [(1, 1, 5000), (50, 3, 2000), (1000, 64, 7), (4, 5, 0)])
def test_sums_into_rows_are_in_index_order(gpu, rows, width, entries):
    index = RNG.integers(0, rows, entries)
    values = (10.0 ** RNG.uniform(-4, 4, (entries, width))).astype(np.float32)
    expected = np.ones((rows, width), np.float32)
    np.add.at(expected, index, values)
    for _ in range(3):
        target = gpu.asarray(np.ones((rows, width), np.float32))
        xp.scatter_add_rows(target, gpu.asarray(index), gpu.asarray(values))
        np.testing.assert_array_equal(target.get(), expected)


@pytest.mark.cuda
def test_sums_at_an_index_are_in_index_order(gpu):
    first, second = RNG.integers(0, 5, 400), RNG.integers(0, 6, 400)
    values = RNG.standard_normal((400, 3)).astype(np.float32)
    expected, target = np.zeros((5, 6, 3), np.float32), gpu.zeros((5, 6, 3), np.float32)
    np.add.at(expected, (first, second), values)
    xp.scatter_add(target, (gpu.asarray(first), gpu.asarray(second)), gpu.asarray(values))
    np.testing.assert_array_equal(target.get(), expected)


def _operands(packed, matrix, batch):
    q, k, v = (packed[:, :, part].transpose(0, 2, 1, 3) for part in range(3))  # (2, 4, 5, 8), without a common stride
    return [
        (matrix[:, :7], matrix.T[:7]),
        (matrix.T, matrix),
        (matrix[1:2], matrix.T),
        (matrix[::2, ::2], matrix[:5, ::3]),
        (batch[:, 1:], batch.swapaxes(1, 2)),
        (q[:, :, 1:4], k.swapaxes(2, 3)),
        (q.swapaxes(2, 3), v),
        (matrix[:0], matrix.T),
        (matrix[:, :0], matrix.T[:0]),
    ]


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_products_read_their_operands_where_they_lie(gpu, dtype):
    """Rows or columns contiguous, parts of larger matrices, heads of a packed projection; scaled, and added."""
    from minidist.base.cuda_products import product

    sources = [RNG.standard_normal(shape).astype(dtype) for shape in ((2, 5, 3, 4, 8), (6, 10), (3, 4, 5))]
    here, there = _operands(*sources), _operands(*(gpu.asarray(array) for array in sources))
    for number, ((a, b), (there_a, there_b)) in enumerate(zip(here, there, strict=True)):
        expected = a @ b
        for scale, add in ((1.0, False), (0.25, True)):
            out = gpu.ones(expected.shape, dtype)
            product(there_a, there_b, out, scale, add)
            np.testing.assert_allclose(out.get(), scale * expected + add, rtol=2e-5, atol=2e-5, err_msg=str(number))
            # Results stored by columns, and a block of a larger array.
            larger = gpu.ones((*expected.shape[:-2], expected.shape[-1], expected.shape[-2] + 3), dtype)
            out = larger.swapaxes(-1, -2)[..., 1 : 1 + expected.shape[-2], :]
            product(there_a, there_b, out, scale, add)
            np.testing.assert_allclose(out.get(), scale * expected + add, rtol=2e-5, atol=2e-5, err_msg=str(number))
            assert (larger[..., 0].get() == 1).all(), number
            assert (larger[..., 1 + expected.shape[-2] :].get() == 1).all(), number
        np.testing.assert_allclose(product(there_a, there_b).get(), expected, rtol=2e-5, atol=2e-5)


@pytest.mark.cuda
@pytest.mark.parametrize("length", [1, 5, 256, 300, 700])
def test_attention_in_the_blocks_of_a_gpu(gpu, length):
    """Lengths below, at and above one block of queries, with what is left over."""
    qkv, g = RNG.standard_normal((2, length, 3 * 32)), RNG.standard_normal((2, length, 32))
    results = []
    for asarray in (np.asarray, gpu.asarray):
        x = Tensor(asarray(qkv), requires_grad=True)
        y = causal_attention(x, 4)
        y.backward(asarray(g))
        results.append((xp.to_host(y.data), xp.to_host(x.grad)))
    for here, there in zip(*results, strict=True):
        np.testing.assert_allclose(there, here, rtol=1e-10, atol=1e-10)


@pytest.mark.cuda
@pytest.mark.parametrize("shape", [(5, 3), (2, 3, 4), (4000, 7), (0, 3)])
def test_sums_over_rows(gpu, shape):
    rows = RNG.standard_normal(shape)
    np.testing.assert_allclose(xp.sum_rows(gpu.asarray(rows)).get(), xp.sum_rows(rows), rtol=1e-10, atol=1e-10)
    out = gpu.ones(shape[-1], rows.dtype)
    np.testing.assert_allclose(xp.sum_rows(gpu.asarray(rows), out).get(), xp.sum_rows(rows), rtol=1e-10, atol=1e-10)


@pytest.mark.cuda
@pytest.mark.parametrize("width", [1, 96, 128, 1000])
def test_norms_and_losses(gpu, width):
    x, w, b = RNG.standard_normal((6, 4, width)), RNG.standard_normal(width), RNG.standard_normal(width)
    targets = RNG.integers(0, width, (6, 4))
    targets[2:4] = -100  # rows that do not count
    results = []
    for asarray in (np.asarray, gpu.asarray):
        tensors = [Tensor(asarray(a), requires_grad=True) for a in (x, w, b)]
        loss = cross_entropy(layer_norm(*tensors), asarray(targets))
        loss.backward()
        results.append([loss.item(), *(xp.to_host(t.grad) for t in tensors)])
    for here, there in zip(*results, strict=True):
        np.testing.assert_allclose(there, here, rtol=1e-10, atol=1e-10)
