"""PyTorch as an independent oracle: the same weights, the same loss, every gradient."""

import numpy as np
import pytest

from minidist.core.autograd import Tensor, cross_entropy
from minidist.core.nn import FlatParameters, GPTConfig
from minidist.report.bench.workloads import StepCase, make_batch, make_model

pytestmark = pytest.mark.peers
torch = pytest.importorskip("torch")

CASES = {
    "gpt": StepCase("gpt", 3, 1, config=GPTConfig(61, 96, 32, 3, 4), length=90),
    "mlp": StepCase("mlp", 9, 1, sizes=(12, 20, 20, 5)),
}


@pytest.mark.parametrize(("dtype", "bound"), [("float32", 1e-5), ("float64", 1e-10)])
@pytest.mark.parametrize("name", CASES)
def test_loss_and_every_gradient(name, dtype, bound):
    case = CASES[name]
    model = make_model(case, getattr(np, dtype))
    flat = FlatParameters(model.parameters())
    flat.data[...] += (np.random.default_rng(1).standard_normal(flat.numel) * 0.05).astype(dtype)  # no zeros, no ones
    from minidist.report.bench.torch_peer import torch_twin

    twin = torch_twin(case, model, getattr(torch, dtype))
    inputs, targets = make_batch(case)
    if case.config is None:
        inputs = inputs.astype(dtype)
        loss = cross_entropy(model(Tensor(inputs)), targets)
    else:
        loss = model(inputs, targets)
    loss.backward()
    logits = twin(torch.from_numpy(inputs))
    their_loss = torch.nn.functional.cross_entropy(logits.flatten(0, -2), torch.from_numpy(targets).flatten())
    their_loss.backward()
    assert loss.item() == pytest.approx(their_loss.item(), rel=bound)
    theirs = dict(twin.named_parameters())
    assert set(theirs) == set(flat.names)
    for name, parameter in zip(flat.names, flat.parameters, strict=True):
        other = theirs[name].grad.numpy()
        assert np.abs(parameter.grad - other).max() <= bound * max(1, np.abs(other).max()), name
        assert np.abs(parameter.grad).max() > 0, name
