"""Llama: its nodes by finite differences, its loss and gradients against PyTorch's, its names, its errors."""

import numpy as np
import pytest

from minidist.core.autograd import ShapeError, Tensor
from minidist.core.base.errors import UsageError
from minidist.nn import Llama, LlamaConfig, SwiGLUExperts, gradcheck, rms_norm, rotary, rotary_angles, swiglu
from minidist.nn.llama import LlamaMLP
from tests.cases import each

CONFIG = {
    "vocab_size": 11,
    "hidden_size": 24,
    "intermediate_size": 20,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 40,
}


def random(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape)


def test_the_nodes_by_finite_differences():
    angles = rotary_angles(np.array([3, 0, 17]), 6)
    for parameters in (False, True):
        gradcheck(rms_norm, random(2, 3, 5), random(5, seed=1), parameters=parameters)
    gradcheck(lambda x: rotary(x, angles), random(2, 3, 2, 6))
    gradcheck(swiglu, random(3, 4), random(3, 4, seed=1))


def test_one_expert_is_an_mlp_and_two_share_the_tokens():
    def mlp(experts, expert):
        plain = LlamaMLP(LlamaConfig(**CONFIG), np.float64)
        for name, weight in (("gate", experts.gate_weight), ("up", experts.up_weight), ("down", experts.down_weight)):
            getattr(plain, f"{name}_proj").weight.data[...] = weight.data[expert].T
        return plain

    x = Tensor(random(2, 3, 24))
    one = SwiGLUExperts(24, 20, 1, capacity_factor=1.0, dtype=np.float64)
    np.testing.assert_allclose(one(x).data, mlp(one, 0)(x).data, atol=1e-15)

    # Each token's own expert, times its probability.
    two = SwiGLUExperts(24, 20, 2, capacity_factor=9.0, dtype=np.float64, seed=1)
    found = two(x).data.reshape(-1, 24)
    outputs = [mlp(two, expert)(x).data.reshape(-1, 24) for expert in (0, 1)]
    scores = np.exp(x.data.reshape(-1, 24) @ two.router.data.T)
    chosen = scores.argmax(axis=1)
    assert set(chosen) == {0, 1}
    for token, expert in enumerate(chosen):
        gate = scores[token, expert] / scores[token].sum()
        np.testing.assert_allclose(found[token], outputs[expert][token] * gate, atol=1e-15)


def test_products_of_queries_and_keys_depend_on_the_distance_only():
    q, k = Tensor(random(1, 4, 1, 8)), Tensor(random(1, 4, 1, 8, seed=1))

    def scores(start):
        angles = rotary_angles(start + np.arange(4), 8)
        return rotary(q, angles).data[0, :, 0] @ rotary(k, angles).data[0, :, 0].T

    assert np.abs(scores(0) - scores(100)).max() < 1e-12
    assert np.abs(scores(0) - q.data[0, :, 0] @ k.data[0, :, 0].T).max() > 0.1


def test_names_are_those_of_the_published_state_dicts():
    names = [name for name, _ in Llama(LlamaConfig(**CONFIG)).named_parameters()]
    layer = "model.layers.0."
    assert names[:10] == [
        "model.embed_tokens.weight",
        layer + "input_layernorm.weight",
        layer + "self_attn.q_proj.weight",
        layer + "self_attn.k_proj.weight",
        layer + "self_attn.v_proj.weight",
        layer + "self_attn.o_proj.weight",
        layer + "post_attention_layernorm.weight",
        layer + "mlp.gate_proj.weight",
        layer + "mlp.up_proj.weight",
        layer + "mlp.down_proj.weight",
    ]
    assert names[-2:] == ["model.norm.weight", "lm_head.weight"]
    tied = Llama(LlamaConfig(**CONFIG, tie_word_embeddings=True))
    assert [name for name, _ in tied.named_parameters()] == names[:-1]


def test_bad_sizes():
    with pytest.raises(UsageError, match="6 heads do not share 4 key-value heads evenly; use one of 1, 2, 3, 6"):
        LlamaConfig(**{**CONFIG, "num_key_value_heads": 4})
    with pytest.raises(UsageError, match="hidden_size 25 does not divide into 6 heads of an even size"):
        LlamaConfig(**{**CONFIG, "hidden_size": 25})
    with pytest.raises(ShapeError, match=r"position 40 .* max_position_embeddings is 40"):
        Llama(LlamaConfig(**CONFIG))(np.zeros((1, 41), int))


@pytest.mark.peers
@each("dtype", ["float32", "float64"])
@each("kv_heads", [1, 2, 6])
def test_loss_and_every_gradient_beside_pytorch(dtype, kv_heads):
    torch = pytest.importorskip("torch")
    F = torch.nn.functional
    config = LlamaConfig(**{**CONFIG, "num_key_value_heads": kv_heads})
    model = Llama(config, dtype=np.dtype(dtype), seed=2)
    for name, parameter in model.named_parameters():
        if name.endswith("norm.weight"):
            parameter.data[...] += random(*parameter.shape) * 0.1
    tokens, targets = np.random.default_rng(0).integers(0, 11, (2, 3, 9))
    positions = np.arange(20, 29)
    loss = model(tokens, targets, positions=positions)
    loss.backward()

    weights = {name: torch.tensor(value, requires_grad=True) for name, value in model.state_dict().items()}
    frequencies = 1 / 10000 ** (torch.arange(0, 4, 2, dtype=torch.float64) / 4)
    angles = torch.tensor(positions)[:, None] * frequencies
    cos, sin = (torch.cat([f(angles)] * 2, -1).to(getattr(torch, dtype)) for f in (torch.cos, torch.sin))

    def norm(x, name):
        return F.rms_norm(x, x.shape[-1:], weights[name], config.rms_norm_eps)

    def heads(x, count):
        return x.view(3, 9, count, 4).transpose(1, 2)

    def turn(x):  # as in the published implementation
        return x * cos + torch.cat([-x[..., 2:], x[..., :2]], -1) * sin

    x = weights["model.embed_tokens.weight"][torch.tensor(tokens)]
    for i in range(2):
        w = {
            name: weights[f"model.layers.{i}.{name}.weight"]
            for name in (
                "self_attn.q_proj",
                "self_attn.k_proj",
                "self_attn.v_proj",
                "self_attn.o_proj",
                "mlp.gate_proj",
                "mlp.up_proj",
                "mlp.down_proj",
            )
        }
        h = norm(x, f"model.layers.{i}.input_layernorm.weight")
        q, k = turn(heads(h @ w["self_attn.q_proj"].T, 6)), turn(heads(h @ w["self_attn.k_proj"].T, kv_heads))
        v = heads(h @ w["self_attn.v_proj"].T, kv_heads)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + mixed.transpose(1, 2).reshape(3, 9, 24) @ w["self_attn.o_proj"].T
        h = norm(x, f"model.layers.{i}.post_attention_layernorm.weight")
        x = x + (F.silu(h @ w["mlp.gate_proj"].T) * (h @ w["mlp.up_proj"].T)) @ w["mlp.down_proj"].T
    logits = norm(x, "model.norm.weight") @ weights["lm_head.weight"].T
    expected = F.cross_entropy(logits.view(-1, 11), torch.tensor(targets.reshape(-1)))
    expected.backward()

    bound = 1e-12 if dtype == "float64" else 1e-5
    assert abs(loss.item() - expected.item()) < bound
    for name, parameter in model.named_parameters():
        assert parameter.grad.dtype == np.dtype(dtype)
        assert np.abs(parameter.grad - weights[name].grad.numpy()).max() < bound, name
