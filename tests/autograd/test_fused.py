"""The fused nodes: against finite differences, against their op-by-op forms, and under awkward shapes."""

import hypothesis.extra.numpy as hnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minidist import nn
from minidist.core import autograd as ag
from minidist.core.autograd import AutogradError, Parameter, Tensor
from minidist.nn import causal_attention_heads, gradcheck
from tests.cases import each

modest = settings(max_examples=15, deadline=None)


def draws(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape)


@pytest.mark.parametrize("activation", [None, "relu", "gelu"])
@pytest.mark.parametrize("in_out", [False, True])
@modest
@given(
    lead=hnp.array_shapes(min_dims=0, max_dims=2, min_side=0, max_side=3),
    n=st.integers(0, 3),
    m=st.integers(0, 3),
    parameters=st.booleans(),
    bias=st.booleans(),
)
def test_linear(activation, in_out, lead, n, m, parameters, bias):
    inputs = [draws(*lead, n) + 0.1, draws(*((n, m) if in_out else (m, n)), seed=1)] + [draws(m, seed=2)] * bias
    gradcheck(
        lambda x, w, b=None: ag.linear(x, w, b, activation, in_out), *inputs, parameters=parameters, tolerance=1e-5
    )


def test_linear_equals_its_parts():
    x, w, b = (Tensor(draws(*shape, seed=i), requires_grad=True) for i, shape in enumerate([(2, 5, 3), (4, 3), (4,)]))
    fused, parts = ag.linear(x, w, b, "gelu"), nn.gelu_composite(x @ w.T + b)
    np.testing.assert_allclose(fused.data, parts.data, rtol=1e-13)
    gradients = []
    for y in (fused, parts):
        for t in (x, w, b):
            t.grad = None
        y.backward(draws(2, 5, 4, seed=9))
        gradients.append([t.grad for t in (x, w, b)])
    for a, c in zip(*gradients, strict=True):
        np.testing.assert_allclose(a, c, rtol=1e-12, atol=1e-13)


def test_gelu_crosses_its_blocks():
    x = Tensor(np.linspace(-6, 6, 40_001), requires_grad=True)
    y = ag.gelu(x)
    y.sum().backward()
    other = Tensor(x.data, requires_grad=True)
    z = nn.gelu_composite(other)
    z.sum().backward()
    np.testing.assert_allclose(y.data, z.data, rtol=1e-12, atol=1e-14)
    np.testing.assert_allclose(x.grad, other.grad, rtol=1e-10, atol=1e-13)


@modest
@given(
    lead=hnp.array_shapes(min_dims=0, max_dims=2, min_side=0, max_side=3), n=st.integers(0, 5), parameters=st.booleans()
)
def test_layer_norm(lead, n, parameters):
    inputs = draws(*lead, n), draws(n, seed=1), draws(n, seed=2)
    fused = lambda x, w, b: ag.layer_norm(x, w, b, eps=1e-2)  # noqa: E731
    gradcheck(fused, *inputs, parameters=parameters, tolerance=1e-5)
    if n:
        composite = nn.layer_norm_composite(*map(Tensor, inputs), eps=1e-2)
        np.testing.assert_allclose(fused(*map(Tensor, inputs)).data, composite.data, rtol=1e-10, atol=1e-12)


@modest
@given(
    batch=st.integers(0, 2), length=st.integers(0, 4), heads=st.integers(1, 2), size=st.integers(0, 2), p=st.booleans()
)
def test_attention_of_small_shapes(batch, length, heads, size, p):
    gradcheck(
        lambda x: ag.causal_attention(x, heads), draws(batch, length, 3 * heads * size), parameters=p, tolerance=1e-5
    )
    shape = (batch, heads, length, size)
    gradcheck(causal_attention_heads, *(draws(*shape, seed=i) for i in range(3)), parameters=p, tolerance=1e-5)


@each("length", [1, 63, 64, 65, 130, 200])
def test_attention_in_blocks_equals_the_composite(length):
    results = []
    for attention in (ag.causal_attention, nn.causal_attention_composite):
        x = Tensor(draws(3, length, 3 * 2 * 4), requires_grad=True)
        y = attention(x, 2)
        y.backward(draws(*y.shape, seed=1))
        results.append((y.data, x.grad))
    for a, b in zip(*results, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-12)


def test_separate_heads_equal_the_packed_form():
    packed = draws(2, 70, 3, 2, 4)
    q, k, v = (Tensor(packed[:, :, i].transpose(0, 2, 1, 3), requires_grad=True) for i in range(3))
    x = Tensor(packed.reshape(2, 70, 24), requires_grad=True)
    g = draws(2, 70, 8, seed=1)
    y = ag.causal_attention(x, 2)
    z = causal_attention_heads(q, k, v)
    np.testing.assert_allclose(z.data.transpose(0, 2, 1, 3).reshape(2, 70, 8), y.data, rtol=1e-12)
    y.backward(g)
    z.backward(g.reshape(2, 70, 2, 4).transpose(0, 2, 1, 3))
    together = np.stack([t.grad.transpose(0, 2, 1, 3) for t in (q, k, v)], axis=2).reshape(2, 70, 24)
    np.testing.assert_allclose(together, x.grad, rtol=1e-10, atol=1e-12)


def test_attention_sees_no_later_position():
    x = draws(1, 80, 6)
    before = ag.causal_attention(Tensor(x), 1).data
    x[:, 50:] += 1
    np.testing.assert_array_equal(ag.causal_attention(Tensor(x), 1).data[:, :50], before[:, :50])


def test_attention_of_large_scores_does_not_overflow():
    x = (draws(1, 70, 6) * 1000).astype(np.float32)
    y = Tensor(x, requires_grad=True)
    out = ag.causal_attention(y, 1)
    out.sum().backward()
    assert np.isfinite(out.data).all()
    assert np.isfinite(y.grad).all()


@modest
@given(
    lead=hnp.array_shapes(min_dims=0, max_dims=2, min_side=1, max_side=3),
    classes=st.integers(1, 4),
    divisor=st.sampled_from([None, 1.0, 7.5]),
    data=st.data(),
)
def test_cross_entropy(lead, classes, divisor, data):
    targets = data.draw(hnp.arrays(np.int64, lead, elements=st.integers(0, classes - 1)))
    ignored = data.draw(hnp.arrays(bool, lead))
    if divisor is None and ignored.all():
        ignored[...] = False
    targets = np.where(ignored, -100, targets)
    logits = draws(*lead, classes)
    gradcheck(lambda x: ag.cross_entropy(x, targets, divisor), logits, parameters=data.draw(st.booleans()))
    rows = nn.log_softmax(Tensor(logits)).data.reshape(-1, classes)
    flat = targets.reshape(-1)
    total = -sum(rows[i, t] for i, t in enumerate(flat) if t != -100)
    expected = total / ((flat != -100).sum() if divisor is None else divisor)
    np.testing.assert_allclose(
        ag.cross_entropy(Tensor(logits), targets, divisor).item(), expected, rtol=1e-12, atol=1e-14
    )


def test_targets_may_have_any_integer_dtype_and_byte_order():
    logits, targets = draws(4, 3), np.array([2, 0, 1, 2])
    expected = ag.cross_entropy(Tensor(logits), targets).item()
    for dtype in ("<i8", ">i8", ">i4", "i1", "u1", ">u2"):
        # Every second element, so that the targets are not contiguous.
        given = np.repeat(targets, 2).astype(dtype)[::2]
        assert ag.cross_entropy(Tensor(logits), given).item() == expected, dtype
        # A number that is small in the other byte order, and a negative one.
        large = 1 << 8 * (given.itemsize - 1) if given.itemsize > 1 else 3
        for wrong in (large, -1) if "i" in dtype else (large,):
            given[:] = 0, wrong, 0, 0
            with pytest.raises(AutogradError, match=f"target {wrong} is out of range"):
                ag.cross_entropy(Tensor(logits), given)


@each("targets", [[0, 2, 1, 2], [2, 0, -1, 2], [2, 2, 2, 0]])
@each("ignore", [2, 0, -1])
def test_the_ignored_target_may_be_a_class(targets, ignore):
    """The id of a padding token is one: its rows count neither in the sum, nor in the mean, nor in the gradient."""
    logits, targets = draws(4, 3), np.array(targets)
    if -1 in targets and ignore != -1:
        with pytest.raises(AutogradError, match="target -1 is out of range"):
            ag.cross_entropy(Tensor(logits), targets, ignore_index=ignore)
        return
    kept = targets != ignore
    whole, alone = (Tensor(x, requires_grad=True) for x in (logits, logits[kept]))
    loss, expected = ag.cross_entropy(whole, targets, ignore_index=ignore), ag.cross_entropy(alone, targets[kept])
    loss.backward()
    expected.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-14)
    np.testing.assert_allclose(whole.grad[kept], alone.grad, rtol=1e-14)
    assert not whole.grad[~kept].any()


def test_shards_of_a_masked_batch_add_up_under_the_global_divisor():
    """Museum 1: the mean of means over ragged or masked shards is not the mean."""
    logits, targets = draws(5, 3), np.array([0, -100, 2, 1, -100])
    whole = ag.cross_entropy(Tensor(logits), targets).item()
    parts = [ag.cross_entropy(Tensor(logits[s]), targets[s], divisor=3).item() for s in (slice(0, 2), slice(2, 5))]
    assert sum(parts) == pytest.approx(whole, rel=1e-14)


def test_cross_entropy_of_nothing():
    empty = ag.cross_entropy(Tensor(np.zeros((0, 3)), requires_grad=True), np.zeros(0, int), divisor=4)
    assert empty.item() == 0
    empty.backward()


def test_cross_entropy_does_not_overflow_and_checks_targets():
    assert ag.cross_entropy(Tensor([[1e4, 0.0]]), np.array([1])).item() == 1e4
    with pytest.raises(AutogradError, match=r"target 5 is out of range: classes are 0\.\.2"):
        ag.cross_entropy(Tensor(draws(2, 3)), np.array([1, 5]))
    with pytest.raises(AutogradError, match="integers"):
        ag.cross_entropy(Tensor(draws(2, 3)), np.array([1.0, 2.0]))


def test_embedding_checks_indices():
    with pytest.raises(AutogradError, match=r"index -1 is out of range: the weight of shape \(3, 2\)"):
        ag.embedding(np.array([0, -1]), Parameter(draws(3, 2)))
    with pytest.raises(AutogradError, match=r"index 3 is out of range: .* has rows 0\.\.2"):
        ag.embedding(np.array([0, 3]), Parameter(draws(3, 2)))


def test_an_embeddings_gradient_begins_at_zero_in_an_array_that_it_is_given():
    """A flat gradient still has the numbers of the step before."""
    weight = Parameter(draws(4, 2))
    out = np.full((4, 2), 7.0)
    (edge,) = ag.embedding(np.array([1, 1, 3]), weight).node.weights
    edge[1](np.ones((3, 2)), out)
    np.testing.assert_array_equal(out, [[0, 0], [2, 2], [0, 0], [1, 1]])


def test_the_angles_of_rotary_embeddings():
    """RoFormer, equation 15: theta_i = 10000^(-2 i / n)."""
    expected = [[3 * 10000.0 ** (-2 * i / 8) for i in range(4)]]
    np.testing.assert_allclose(nn.rotary_angles(np.array([3]), 8), expected, rtol=1e-14)


def test_mse():
    gradcheck(lambda a, b: nn.mse_loss(a, b, divisor=4), draws(3, 2), draws(3, 2, seed=1))
    assert nn.mse_loss(Tensor([1.0, 3.0]), np.array([0.0, 0.0])).item() == 5.0


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_fused_nodes_keep_the_dtype(dtype):
    x = Parameter(draws(2, 6, 6).astype(dtype))
    w, b = Parameter(np.ones(6, dtype)), Parameter(np.ones(6, dtype))
    y = ag.causal_attention(ag.gelu(ag.layer_norm(x, w, b)), 2)
    loss = ag.cross_entropy(y, np.zeros((2, 6), int), np.float64(3.0))
    assert loss.dtype == dtype
    loss.backward()
    assert x.grad.dtype == w.grad.dtype == b.grad.dtype == dtype
