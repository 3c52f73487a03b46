"""PyTorch's tensor parallelism as an oracle: the same blocks, cut by ColwiseParallel and RowwiseParallel over gloo."""

import numpy as np
import pytest

from minidist.core.autograd import Tensor
from minidist.parallel.tensor.full_state import full_tensor
from minidist.report.bench.harness import join_gloo
from minidist.report.bench.tensor_parallel import BATCH, LENGTH, WIDTH, as_torch, our_blocks, their_blocks


@pytest.mark.peers
@pytest.mark.mpi(2)
def test_every_gathered_gradient_is_pytorchs(comm):
    torch = pytest.importorskip("torch")
    join_gloo(comm.world)
    ours, (theirs, names) = our_blocks(comm, np.float64), their_blocks(comm.size, np.float64)
    x = np.random.default_rng(0).standard_normal((BATCH, LENGTH, WIDTH))
    y, z = ours(Tensor(x)), theirs(torch.tensor(x))
    (y * y).sum().backward()
    (z * z).sum().backward()
    np.testing.assert_allclose(y.data, z.detach().numpy(), rtol=0, atol=1e-10)
    # Both gradients are whole, and in PyTorch's order, before they are compared.
    largest = 0.0
    for name, parameter in ours.named_parameters():
        mine = full_tensor(parameter.grad, parameter.layout, {"tp": comm})
        gradient = theirs.get_parameter(names[name]).grad
        other = (gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient).numpy()
        np.testing.assert_allclose(as_torch(name, mine, comm.size).numpy(), other, rtol=0, atol=1e-10, err_msg=name)
        largest = max(largest, float(np.abs(mine).max()))
    torch.distributed.destroy_process_group()
    assert len(names) == 48
    assert largest > 1
