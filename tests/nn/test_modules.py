"""The module tree: names, initial values, state dicts; layers; the GPT without another library."""

import numpy as np
import pytest

from minidist.base.coordinates import batch_coordinates
from minidist.core.autograd import AutogradError, Parameter, ShapeError, Tensor, causal_attention
from minidist.core.base.errors import UsageError
from minidist.core.base.random import initial_weight
from minidist.core.nn import GPT, MLP, Block, Conv1D, Embedding, FlatParameters, GPTConfig, LayerNorm, Linear, Module
from minidist.nn import AttentionDropout, Dropout, causal_attention_composite, gradcheck

TINY = GPTConfig(vocab_size=11, n_positions=6, n_embd=8, n_layer=2, n_head=2)


class Twins(Module):
    def __init__(self):
        self.first = Linear(2, 3)
        self.again = self.first
        self.pair = [Linear(2, 3), Linear(2, 3)]
        self.scale = Parameter(np.ones(1, np.float32))


def test_names_come_from_attributes_and_tied_parameters_count_once():
    model = Twins().initialize(0)
    assert [n for n, _ in model.named_parameters()] == [
        "scale",
        "first.weight",
        "first.bias",
        "pair.0.weight",
        "pair.0.bias",
        "pair.1.weight",
        "pair.1.bias",
    ]
    assert "again.weight" in model.state_dict()
    assert model.pair[1].weight.name == "pair.1.weight"
    assert [m.name for m in model.modules()][-1] == "pair.1"


def test_initial_values_depend_on_seed_name_and_shape_alone():
    model = Twins().initialize(3)
    assert not np.array_equal(model.pair[0].weight.data, model.pair[1].weight.data)
    part = Linear(2, 3).initialize(3, prefix="pair.1")
    np.testing.assert_array_equal(part.weight.data, model.pair[1].weight.data)
    np.testing.assert_array_equal(
        part.weight.data, initial_weight(3, "pair.1.weight", (3, 2), "uniform", 2**-0.5).astype(np.float32)
    )
    assert not np.array_equal(part.initialize(4, "pair.1").weight.data, model.pair[1].weight.data)
    assert np.abs(part.weight.data).max() <= 2**-0.5


def test_initial_values_of_a_flat_model_stay_views():
    model = MLP([3, 4, 2])
    flat = FlatParameters(model.parameters())
    before, version = flat.data.copy(), flat.version
    model.initialize(9)
    assert not np.array_equal(before, flat.data)
    assert flat.version > version


def test_state_dict_round_trip_and_errors():
    a, b = GPT(TINY, seed=0), GPT(TINY, seed=1)
    assert b.load_state_dict(a.state_dict()) == ([], [])
    for name, value in a.state_dict().items():
        np.testing.assert_array_equal(value, b.state_dict()[name])
    state = {k: v for k, v in a.state_dict().items() if k != "lm_head.weight"}
    b.load_state_dict(state)  # the tied twin is there
    state["transformer.h.0.attn.c_attn.wieght"] = state.pop("transformer.h.0.attn.c_attn.weight")
    with pytest.raises(AutogradError, match=r"c_attn.weight' is missing \(did you mean '.*wieght'\?\)"):
        b.load_state_dict(state)
    missing, unexpected = b.load_state_dict(state, strict=False)
    assert (len(missing), len(unexpected)) == (1, 1)
    state = a.state_dict()
    state["transformer.ln_f.bias"] = np.zeros(9)
    with pytest.raises(ShapeError, match=r"'transformer.ln_f.bias' has shape \(9,\); the model's has \(8,\)"):
        b.load_state_dict(state)
    with pytest.raises(AutogradError, match="unknown 'extra'"):
        b.load_state_dict({**a.state_dict(), "extra": np.zeros(1)})


def test_gpt2s_parameter_names_and_shapes():
    shapes = {name: p.shape for name, p in GPT(TINY).named_parameters()}
    block = {
        "ln_1.weight": (8,),
        "ln_1.bias": (8,),
        "attn.c_attn.weight": (8, 24),
        "attn.c_attn.bias": (24,),
        "attn.c_proj.weight": (8, 8),
        "attn.c_proj.bias": (8,),
        "ln_2.weight": (8,),
        "ln_2.bias": (8,),
        "mlp.c_fc.weight": (8, 32),
        "mlp.c_fc.bias": (32,),
        "mlp.c_proj.weight": (32, 8),
        "mlp.c_proj.bias": (8,),
    }
    expected = {"transformer.wte.weight": (11, 8), "transformer.wpe.weight": (6, 8)}
    for i in range(2):
        expected |= {f"transformer.h.{i}.{name}": shape for name, shape in block.items()}
    expected |= {"transformer.ln_f.weight": (8,), "transformer.ln_f.bias": (8,)}
    assert shapes == expected
    model = GPT(TINY)
    assert model.lm_head.weight is model.transformer.wte.weight


def test_gpt_gradients_against_finite_differences():
    model = GPT(GPTConfig(5, 3, 4, 1, 2), np.float64)
    tokens, targets = np.array([[0, 3, 1], [4, 4, 2]]), np.array([[3, 1, 2], [4, -100, 0]])
    parameters = list(model.parameters())

    def loss(*values):
        for parameter, value in zip(parameters, values, strict=True):
            parameter.data[...] = value.data
        return model(tokens, targets, divisor=4)

    flat = FlatParameters(parameters)
    rng = np.random.default_rng(0)
    start = flat.data + rng.standard_normal(flat.numel) * 0.3
    flat.data[...] = start
    model(tokens, targets, divisor=4).backward()
    gradient = flat.grad
    for i in rng.choice(flat.numel, 60, replace=False):
        values = []
        for step in (1e-6, -1e-6):
            flat.data[...] = start
            flat.data[i] += step
            values.append(model(tokens, targets, divisor=4).item())
        assert gradient[i] == pytest.approx((values[0] - values[1]) / 2e-6, abs=2e-8)


def test_untrained_gpt_knows_nothing():
    model = GPT(TINY)
    tokens = np.random.default_rng(0).integers(0, 11, (4, 7))
    assert model(tokens[:, :-1], tokens[:, 1:]).item() == pytest.approx(np.log(11), abs=0.05)
    assert model(tokens[:, :-1]).shape == (4, 6, 11)
    with pytest.raises(ShapeError, match=r"GPT: 7 positions .* n_positions is 6"):
        model(tokens)
    with pytest.raises(UsageError, match="n_embd 9 is not a multiple of n_head 2"):
        GPTConfig(n_embd=9, n_head=2)


def test_attention_function_may_be_replaced():
    calls = []

    def spy(qkv, heads):
        calls.append(heads)
        return causal_attention_composite(qkv, heads)

    tokens = np.zeros((1, 6), int)
    a, b = GPT(TINY, np.float64), GPT(TINY, np.float64, attention_fn=spy)
    np.testing.assert_allclose(a(tokens).data, b(tokens).data, rtol=1e-10)
    assert calls == [2, 2]


def test_layers_against_finite_differences():
    rng = np.random.default_rng(0)
    for layer in (
        Linear(3, 2, activation="relu", dtype=np.float64),
        Conv1D(3, 2, "gelu", np.float64),
        LayerNorm(3, dtype=np.float64),
        Block(GPTConfig(n_embd=3, n_head=1), np.float64).initialize(1),
    ):
        gradcheck(layer, rng.standard_normal((2, 2, 3)), tolerance=1e-5)
    assert Embedding(4, 3)(np.array([[1, 2]])).shape == (1, 2, 3)
    assert Linear(3, 2, bias=False).bias is None


def test_zero_grad_train_and_eval():
    model = GPT(GPTConfig(11, 6, 8, 1, 2, dropout=0.5))
    tokens = np.zeros((1, 6), int)
    model.eval()
    np.testing.assert_array_equal(model(tokens).data, model(tokens).data)
    model.train()
    with pytest.raises(ValueError, match="batch_coordinates"):
        model(tokens)
    with batch_coordinates():
        model(tokens, tokens).backward()
    assert model.lm_head.weight.grad is not None
    model.zero_grad()
    assert model.lm_head.weight.grad is None


def keep(name, shape, step=0, offset=0, calls=1, p=0.5, seed=0):
    layer = Dropout(p)
    layer.name = name
    with batch_coordinates(step, offset, seed):
        for _ in range(calls):
            y = layer(Tensor(np.ones(shape)))
    return y.data


def test_dropout_rows_are_those_of_the_global_batch():
    whole = keep("d", (7, 3, 5))
    for a, b in ((0, 2), (2, 3), (3, 7), (4, 4)):
        np.testing.assert_array_equal(keep("d", (b - a, 3, 5), offset=a), whole[a:b])
    assert set(np.unique(whole)) == {0, 2}


def test_dropout_differs_by_name_step_call_and_seed():
    masks = [
        keep("d", (4, 16)),
        keep("e", (4, 16)),
        keep("d", (4, 16), step=1),
        keep("d", (4, 16), calls=2),
        keep("d", (4, 16), seed=1),
    ]
    for i, a in enumerate(masks):
        for b in masks[:i]:
            assert not np.array_equal(a, b)


def test_dropout_keeps_the_mean_and_checks_p():
    assert keep("d", (100, 100), p=0.3).mean() == pytest.approx(1, abs=0.03)
    np.testing.assert_array_equal(keep("d", (3, 3), p=0), np.ones((3, 3)))
    with pytest.raises(UsageError, match=r"1\.0"):
        Dropout(1.0)


def test_module_without_forward_says_so():
    with pytest.raises(NotImplementedError, match="Twins has no forward"):
        Twins()(1)


class FixedMask:
    """A WeightDropout that always gives the same mask."""

    def __init__(self, mask):
        self.keep, self.scale = mask, 1.25

    def mask(self, samples, heads, length, first=0):
        assert (samples, heads, length, first) == (*self.keep.shape[:3], 0)
        return self.keep


@pytest.mark.parametrize("length", [5, 130])
def test_dropout_of_attention_weights_fused_and_op_by_op(length):
    rng = np.random.default_rng(0)
    data, g = rng.standard_normal((2, length, 24)), rng.standard_normal((2, length, 8))
    drop = FixedMask(rng.random((2, 4, length, length)) >= 0.2)
    results = []
    for function in (causal_attention, causal_attention_composite):
        qkv = Tensor(data, requires_grad=True)
        y = function(qkv, 4, drop)
        y.backward(g)
        results.append((y.data, qkv.grad))
    for a, b in zip(*results, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-12)
    assert np.abs(results[0][0] - causal_attention(Tensor(data), 4).data).max() > 0.1


def test_a_part_of_the_heads_draws_the_numbers_of_the_whole():
    whole = AttentionDropout(0.5, 6)
    part = AttentionDropout(0.5, 6)
    part.first = 2
    with batch_coordinates(sample_offset=3):
        expected = whole.mask(4, 6, 5)
    with batch_coordinates(sample_offset=4):
        mine = part.mask(2, 2, 5, first=1)
    np.testing.assert_array_equal(mine, expected[1:3, 3:5])
    assert mine.dtype == bool
    assert 0.2 < expected.mean() < 0.8
