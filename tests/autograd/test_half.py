"""Half precision: every operation follows the table of rules, is as exact as one rounding, and saves 16-bit arrays."""

import gc

import ml_dtypes
import numpy as np
import pytest

from minidist import nn
from minidist.base.memory import account_memory
from minidist.core import autograd as ag
from minidist.core.autograd import Parameter, Tensor, contribution_recorder
from minidist.core.nn import GPT, GPTConfig
from minidist.nn import causal_attention_heads
from minidist.nn.ops.dropout import dropout
from minidist.nn.ops.precision import RULES, result_dtype
from minidist.techniques.distillation.loss import distillation_loss

FLOAT16, BFLOAT16, FLOAT32 = np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16), np.dtype(np.float32)
HALVES = pytest.mark.parametrize("dtype", [FLOAT16, BFLOAT16], ids=str)
EPS = {FLOAT16: 2.0**-11, BFLOAT16: 2.0**-8}
TARGETS = np.array([[0, 5, 2, 3], [1, 0, 5, -100]])
ANGLES = nn.rotary_angles(np.arange(4), 6)


class Dropping:
    """Of attention weights: every third one."""

    scale = 1.5

    def mask(self, batch, heads, length):
        return np.arange(batch * heads * length * length).reshape(batch, heads, length, length) % 3 > 0


# name -> (operation, shapes of its operands)
OPERATIONS = {
    "linear": (lambda x, w, b: ag.linear(x, w, b), [(2, 4, 6), (5, 6), (5,)]),
    "linear relu": (lambda x, w, b: ag.linear(x, w, b, "relu"), [(2, 4, 6), (5, 6), (5,)]),
    "linear gelu": (lambda x, w, b: ag.linear(x, w, b, "gelu", weight_is_in_out=True), [(2, 4, 6), (6, 5), (5,)]),
    "matmul": (ag.matmul, [(2, 4, 6), (6, 5)]),
    "matmul batched": (ag.matmul, [(2, 4, 6), (2, 6, 5)]),
    "causal_attention": (lambda x: ag.causal_attention(x, 2), [(2, 4, 24)]),
    "causal_attention_heads": (causal_attention_heads, [(2, 3, 4, 6)] * 3),
    "embedding": (lambda w: ag.embedding(np.array([[0, 2, 2, 1], [2, 0, 0, 2]]), w), [(3, 5)]),
    "softmax": (ag.softmax, [(3, 7)]),
    "log_softmax": (nn.log_softmax, [(3, 7)]),
    "layer_norm": (ag.layer_norm, [(2, 4, 6), (6,), (6,)]),
    "rms_norm": (nn.rms_norm, [(2, 4, 6), (6,)]),
    "gelu": (ag.gelu, [(3, 7)]),
    "swiglu": (nn.swiglu, [(3, 7), (3, 7)]),
    "tanh": (nn.tanh, [(3, 7)]),
    "sigmoid": (nn.sigmoid, [(3, 7)]),
    "dropout": (lambda x: dropout(x, np.eye(3, 7) < 1, 1 / 0.9), [(3, 7)]),
    "causal_attention dropped": (lambda x: ag.causal_attention(x, 2, Dropping()), [(2, 4, 24)]),
    "sqrt": (lambda x: nn.sqrt(x * x + 1.0), [(3, 7)]),
    "rotary": (lambda x: nn.rotary(x, ANGLES), [(2, 4, 2, 6)]),
    "cross_entropy": (lambda x: ag.cross_entropy(x, TARGETS), [(2, 4, 6)]),
    "distillation_loss": (lambda x: distillation_loss(x, TARGETS, np.eye(4, 6) * np.ones((2, 1, 1))), [(2, 4, 6)]),
    "sum": (lambda x: x.sum(1), [(3, 7)]),
    "mean": (lambda x: x.mean(), [(3, 7)]),
    "max": (lambda x: x.max(1), [(3, 7)]),
    "exp": (nn.exp, [(3, 7)]),
    "log": (lambda x: nn.log(x * x + 1.0), [(3, 7)]),
    "pow": (lambda x: x**3, [(3, 7)]),
    "square": (lambda x: x**2, [(3, 7)]),
    "add": (ag.add, [(3, 7), (7,)]),
    "sub": (nn.sub, [(3, 7), (1, 7)]),
    "mul": (ag.mul, [(3, 7), (3, 1)]),
    "div": (lambda a, b: a / (b * b + 1.0), [(3, 7), (3, 7)]),
    "maximum": (nn.maximum, [(3, 7), (3, 7)]),
    "where": (lambda a, b: nn.where(np.eye(3, 7) > 0, a, b), [(3, 7), (3, 7)]),
    "relu": (nn.relu, [(3, 7)]),
    "absolute": (nn.absolute, [(3, 7)]),
    "neg": (nn.neg, [(3, 7)]),
    "reshape": (lambda x: x.reshape(7, 3), [(3, 7)]),
    "getitem": (lambda x: x[np.array([0, 0, 2])], [(3, 7)]),
    "concatenate": (lambda a, b: nn.concatenate([a, b]), [(3, 7), (2, 7)]),
}


def run(operation, arrays, kind=Tensor):
    """The result, and the gradients of sum(result * some weights)."""
    tensors = [kind(array) if kind is Parameter else kind(array, requires_grad=True) for array in arrays]
    result = operation(*tensors)
    weights = np.random.default_rng(9).uniform(0.5, 1, result.shape).astype(np.float32)
    result.backward(weights.astype(result.dtype))
    return result.data, [tensor.grad for tensor in tensors]


def assert_close(actual, expected, eps):
    """To a few roundings of the largest entry."""
    actual = actual.astype(np.float32)
    assert np.abs(actual - expected).max() <= 6 * eps * max(1.0, np.abs(expected).max())


@HALVES
@pytest.mark.parametrize("name", OPERATIONS)
def test_an_operation_follows_the_rules_and_is_as_exact_as_half_precision_allows(name, dtype):
    operation, shapes = OPERATIONS[name]
    draw = np.random.default_rng(3)
    arrays = [draw.normal(size=shape).astype(dtype) for shape in shapes]
    exact, exact_gradients = run(operation, [array.astype(np.float32) for array in arrays])
    for kind in (Tensor, Parameter):
        result, gradients = run(operation, arrays, kind)
        assert result.dtype == result_dtype("sum" if name == "mean" else "pow" if name == "square" else name, dtype)
        assert_close(result, exact, EPS[dtype])
        for gradient, expected in zip(gradients, exact_gradients, strict=True):
            assert gradient.dtype == dtype
            assert_close(gradient, expected, EPS[dtype])


def test_every_rule_is_tried():
    # The last two need ranks: tests/parallel/test_tensor.py,
    # tests/techniques/test_split_distillation_loss.py.
    elsewhere = {"stack", "vocab_parallel_cross_entropy", "vocab_parallel_distillation_loss"}
    assert {name for names in RULES.values() for name in names} - set(OPERATIONS) == elsewhere


@HALVES
def test_a_sum_of_many_is_a_sum_in_float32(dtype):
    """4,096 times 1: float16 stops at 2,048 and bfloat16 at 256."""
    ones = np.ones((4096, 3), dtype)
    assert Tensor(ones).sum(0).data.tolist() == [4096.0] * 3
    assert ag.matmul(Tensor(ones.T), Tensor(ones)).data.astype(float).tolist() == [[4096.0] * 3] * 3
    bias = Parameter(np.zeros(3, dtype))
    (Tensor(ones) + bias).backward(ones)
    assert bias.grad.astype(float).tolist() == [4096.0] * 3
    table = Parameter(np.zeros((1, 3), dtype))
    ag.embedding(np.zeros(4096, int), table).backward(ones)
    assert table.grad.astype(float).tolist() == [[4096.0] * 3]


@pytest.mark.parametrize(
    "loss",
    [ag.cross_entropy, lambda x, y, divisor: distillation_loss(x, y, np.eye(1, 8) * 99, 1.0, 0.5, divisor)],
    ids=["cross_entropy", "distillation_loss"],
)
def test_a_loss_divided_by_many_tokens_keeps_its_gradient(loss):
    """softmax / divisor is 1e-9: zero in float16, unless it is multiplied by the loss scale before it is stored."""
    logits = Tensor(np.zeros((1, 8), np.float16), requires_grad=True)
    (loss(logits, np.array([0]), divisor=1e8) * 2.0**16).backward()
    assert np.allclose(logits.grad.astype(float)[0, 1:], 2.0**16 / 8 / 1e8, rtol=1e-2)


def test_float32_and_half_precision_meet_as_the_table_says():
    half, whole = (
        Tensor(np.ones((2, 2), np.float16), requires_grad=True),
        Tensor(np.ones((2, 2), np.float32), requires_grad=True),
    )
    assert (half + whole).dtype == FLOAT32  # promote
    product = half @ whole
    assert product.dtype == FLOAT16  # to half
    product.sum().backward()
    assert (half.grad.dtype, whole.grad.dtype) == (FLOAT16, FLOAT32)
    with pytest.raises(ag.DtypeError, match=r"float16 and float64 differ"):
        half + Tensor(np.ones((2, 2)))


def test_cast_goes_both_ways():
    x = Tensor(np.float32([1 / 3, 2.0]), requires_grad=True)
    y = x.astype(np.float16)
    assert y.dtype == FLOAT16
    assert x.astype(np.float32) is x
    y.backward(np.ones(2, np.float16))
    assert x.grad.dtype == FLOAT32


def gpt(dtype, context=8):
    return GPT(GPTConfig(11, context, 16, 2, 2), dtype=dtype)


@HALVES
def test_deferred_weight_gradients_and_recorded_ones_have_the_same_bits(dtype):
    tokens = np.random.default_rng(0).integers(0, 11, (2, 8))

    def gradients(how):
        model, caught = gpt(dtype), {}
        loss = model(tokens, tokens)
        if how == "deferred":
            deferred = loss.backward(weight_gradients="deferred")
            assert {compute.args[0].dtype for _, compute, _ in deferred.work} == {dtype}  # what waits is of two bytes
            deferred.run()
        elif how == "recorded":
            token = contribution_recorder.set(lambda p, a: caught.setdefault(p, []).append(a))
            loss.backward()
            contribution_recorder.reset(token)
            return {p.name: sum(parts[1:], parts[0]) for p, parts in caught.items()}
        else:
            loss.backward()
        return {p.name: p.grad for p in model.parameters()}

    now = gradients("now")
    for other in (gradients("deferred"), gradients("recorded")):
        for name, array in now.items():
            assert array.dtype == other[name].dtype == dtype
            assert np.array_equal(array.view(np.uint16), other[name].view(np.uint16)), name


@HALVES
def test_what_a_step_keeps_is_half_as_large_and_its_workspace_is_gone(dtype):
    """Saved activations of float32 and of two bytes; row statistics, one number a row, stay float32."""

    def held(dtype):
        tokens = np.random.default_rng(0).integers(0, 11, (4, 32))
        with account_memory() as account:
            model = gpt(dtype, context=32)
            loss = model(tokens, tokens)
            forward = dict(account.by_purpose)
            loss.backward()
            del loss
            gc.collect()
            return forward, dict(account.by_purpose), account.peak_by_purpose

    (whole, _, _), (half, after, peak) = held(np.float32), held(dtype)
    rows = 4 * 32
    # Layer norms; heads; of the loss, and the loss.
    statistics = 4 * (2 * 2 + 1) * rows + 4 * 2 * 2 * rows + 2 * 4 * rows + 4
    tokens = 8 * rows + 8 * 32  # of the embeddings
    of_loss = 2 * 4 * rows  # float32 keeps the gradient of the logits ready; two bytes keep the logits and these
    assert 2 * (half["activation"] - statistics - tokens) == whole["activation"] - (statistics - of_loss) - tokens
    assert half.get("workspace", 0) == 0
    assert peak["workspace"] > 0
    assert after["parameter"] == after["gradient"] == 2 * sum(p.size for p in gpt(np.float32, context=32).parameters())
    assert after["workspace"] == after["activation_gradient"] == 0
    assert after["activation"] == 8 * rows  # the tokens, which this test holds itself


def test_the_logits_overflow_without_a_warning(recwarn):
    weight = Parameter(np.full((4, 4), 300, np.float16))
    result = ag.linear(Tensor(np.full((2, 4), 300, np.float16)), weight)
    assert np.isinf(result.data).all()
    assert not recwarn.list
