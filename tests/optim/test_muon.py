"""Muon against its papers: singular values, one step in NumPy, which parameters are matrices, and what is refused."""

import numpy as np
import pytest

from minidist.core.base.errors import UsageError
from minidist.core.nn import GPT, FlatParameters, GPTConfig
from minidist.optim import Muon, ParameterSlice, is_hidden_matrix, newton_schulz


@pytest.mark.parametrize("shape", [(4, 4), (3, 7), (9, 2), (1, 5)])
def test_singular_values_become_about_one_and_singular_vectors_stay(shape):
    rng = np.random.default_rng(0)
    u, _, vt = np.linalg.svd(rng.normal(size=shape), full_matrices=False)
    values = np.geomspace(1, 0.05, min(shape))  # a few directions dominate
    result = newton_schulz((u * values) @ vt)
    assert result.shape == shape
    # In the basis of the same singular vectors it is diagonal, with entries of about 1.
    inside = u.T @ result @ vt.T
    assert np.allclose(inside, np.diag(np.diag(inside)), atol=1e-12)
    assert 0.65 < np.diag(inside).min() <= np.diag(inside).max() < 1.25
    assert not newton_schulz(np.zeros(shape)).any()


def test_the_polynomial_by_hand():
    """A 1 x 1 matrix: five times x -> a x + b x^3 + c x^5, from x = 1."""
    x = 1 / (1 + 1e-7)
    for _ in range(5):
        x = 3.4445 * x - 4.7750 * x**3 + 2.0315 * x**5
    assert newton_schulz(np.array([[-3.0]])) == pytest.approx(-x, abs=1e-6)


@pytest.mark.parametrize("nesterov", [False, True])
def test_three_steps_of_the_papers(nesterov):
    """Matrices: momentum, Newton-Schulz, 0.2 sqrt(max(m, n)) and decoupled decay; a vector takes AdamW's step."""
    rng = np.random.default_rng(1)
    w, b = rng.normal(size=(4, 6)), rng.normal(size=6)
    pieces = [
        ParameterSlice(w.reshape(-1).copy(), None, "fc.weight", (4, 6)),
        ParameterSlice(b.copy(), None, "fc.bias"),
    ]
    optimizer = Muon(pieces, lr=0.1, momentum=0.9, nesterov=nesterov, betas=(0.8, 0.9), eps=1e-3, weight_decay=0.2)
    buffer, mean, square = np.zeros_like(w), np.zeros(6), np.zeros(6)
    for step in range(1, 4):
        gw, gb = rng.normal(size=(4, 6)), rng.normal(size=6)
        pieces[0].grad, pieces[1].grad = gw.reshape(-1), gb
        optimizer.step()

        buffer = 0.9 * buffer + gw
        update = newton_schulz(gw + 0.9 * buffer if nesterov else buffer)
        w = w * (1 - 0.1 * 0.2) - 0.1 * 0.2 * np.sqrt(6) * update
        mean, square = 0.8 * mean + 0.2 * gb, 0.9 * square + 0.1 * gb**2
        b = b * (1 - 0.1 * 0.2) - 0.1 * (mean / (1 - 0.8**step)) / (np.sqrt(square / (1 - 0.9**step)) + 1e-3)
        assert np.allclose(pieces[0].data, w.reshape(-1), rtol=0, atol=1e-12)
        assert np.allclose(pieces[1].data, b, rtol=0, atol=1e-12)
    assert {name: set(state) for name, state in optimizer.state.items()} == {
        "fc.weight": {"momentum_buffer"},
        "fc.bias": {"exp_avg", "exp_avg_sq"},
    }


def test_embeddings_and_the_output_layer_are_adamws():
    model = GPT(GPTConfig(vocab_size=11, n_positions=8, n_embd=8, n_layer=1, n_head=2), seed=0)
    optimizer = Muon(FlatParameters(model.parameters()), lr=0.1)
    assert sorted(name.removeprefix("transformer.h.0.") for name in optimizer.shapes) == [
        "attn.c_attn.weight",
        "attn.c_proj.weight",
        "mlp.c_fc.weight",
        "mlp.c_proj.weight",
    ]
    for name in ("lm_head.weight", "model.embed_tokens.weight", "embedding.weight", "token_embedding.weight"):
        assert not is_hidden_matrix(name, (8, 8))
    assert not is_hidden_matrix("ln.weight", (8,))
    assert not is_hidden_matrix("experts.w", (2, 8, 8))


def test_wrong_settings_are_refused():
    pieces = [ParameterSlice(np.zeros(6), None, "w", (2, 3))]
    with pytest.raises(UsageError, match=r"momentum=1\.5; it must be"):
        Muon(pieces, momentum=1.5)
    with pytest.raises(UsageError, match="nesterov"):
        Muon(pieces, nesterov="yes")
