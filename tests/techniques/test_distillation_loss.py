"""The loss of a student as one node: against finite differences, against the paper's formula, and at large scores."""

import hypothesis.extra.numpy as hnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minidist.core.autograd import AutogradError, Tensor
from minidist.core.base.errors import UsageError
from minidist.nn import gradcheck
from minidist.techniques.distillation.loss import distillation_loss

modest = settings(max_examples=15, deadline=None)


def draws(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape)


@modest
@given(
    lead=hnp.array_shapes(min_dims=1, max_dims=2, max_side=3),
    classes=st.integers(1, 4),
    divisor=st.sampled_from([None, 1.0, 6.5]),
    temperature=st.sampled_from([0.5, 1.0, 4.0]),
    weight=st.sampled_from([0.0, 0.3, 1.0]),
    data=st.data(),
)
def test_distillation_loss(lead, classes, divisor, temperature, weight, data):
    """Against finite differences, and against the paper's formula from elementary functions."""
    targets = data.draw(hnp.arrays(np.int64, lead, elements=st.integers(0, classes - 1)))
    ignored = data.draw(hnp.arrays(bool, lead))
    if divisor is None and ignored.all():
        ignored[...] = False
    labels = np.where(ignored, -100, targets)
    logits, teacher = draws(*lead, classes), draws(*lead, classes, seed=1) * 3
    settings_of = (temperature, weight, divisor)
    gradcheck(lambda x: distillation_loss(x, labels, teacher, *settings_of), logits)

    def softmax(x):
        return np.exp(x) / np.exp(x).sum(-1, keepdims=True)

    p, q, hard = softmax(teacher / temperature), softmax(logits / temperature), softmax(logits)
    picked = np.take_along_axis(hard, targets[..., None], -1)[..., 0]
    rows = weight * temperature**2 * (p * np.log(p / q)).sum(-1) - (1 - weight) * np.log(picked)
    by = (~ignored).sum() if divisor is None else divisor
    loss = distillation_loss(x := Tensor(logits, requires_grad=True), labels, Tensor(teacher), *settings_of)
    np.testing.assert_allclose(loss.item(), rows[~ignored].sum() / by, rtol=1e-11, atol=1e-13)
    loss.backward()
    expected = (1 - weight) * (hard - np.eye(classes)[targets]) + weight * temperature * (q - p)
    np.testing.assert_allclose(x.grad, np.where(ignored[..., None], 0, expected) / by, rtol=1e-11, atol=1e-13)


def test_distillation_is_stable_and_says_what_is_wrong():
    """Scores of 1e4, and a class that the teacher excludes (-inf)."""
    x = Tensor([[1e4, 0.0, -1e4]], requires_grad=True)
    loss = distillation_loss(x, np.array([0]), np.array([[-1e4, 1e4, -np.inf]]), 1.0, 0.5)
    loss.backward()
    assert loss.item() == 0.5 * 1e4
    assert x.grad.tolist() == [[0.5, -0.5, 0.0]]
    same, labels = draws(3, 4) * 50, np.zeros(3, int)
    assert abs(distillation_loss(Tensor(same), labels, same, 3.0, 1.0).item()) < 1e-14
    with pytest.raises(AutogradError, match="a teacher gets none; compute them under no_grad"):
        distillation_loss(Tensor(same), labels, Tensor(same, requires_grad=True))
    with pytest.raises(AutogradError, match=r"logits of shape \(3, 5\) for logits of shape \(3, 4\); .* same classes"):
        distillation_loss(Tensor(same), labels, np.zeros((3, 5)))
    for wrong, sentence in (({"temperature": 0.0}, "temperature=0.0"), ({"weight": 1.5}, "weight=1.5; .* from 0")):
        with pytest.raises(UsageError, match=sentence):
            distillation_loss(Tensor(same), labels, same, **wrong)
