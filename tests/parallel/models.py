"""Small models and their reference on one device, for the tests of strategies that shard."""

import numpy as np

from minidist.base.coordinates import batch_coordinates
from minidist.core.autograd import contribution_recorder
from minidist.core.nn import GPT, GPTConfig
from minidist.core.nn.flat import FlatParameters
from minidist.job.equality.gradient_order import GradientOrder
from minidist.optim import block_square_sums, clip_coefficient, norm_from_blocks, scale_gradients_

ROWS, LENGTH, VOCAB = 2, 5, 11


def small_gpt(width=12, layers=2, frozen=(), dtype=np.float32):
    """A GPT with tied embeddings, 4,332 parameters by default; parameters whose name contains one of `frozen` are
    frozen.
    """
    model = GPT(GPTConfig(VOCAB, LENGTH, width, layers, 2), dtype=dtype, seed=3)
    for parameter in model.parameters():
        parameter.requires_grad = not any(part in parameter.name for part in frozen)
    return model


def batch(step, number):
    """Tokens and targets of a micro-batch, (ROWS, LENGTH) each."""
    tokens = np.random.default_rng([step, number]).integers(0, VOCAB, (ROWS, LENGTH + 1))
    return tokens[:, :-1], tokens[:, 1:]


def loss_of(model, step, number, count):
    """The micro-batch's share of the mean over `count` micro-batches."""
    with batch_coordinates(step, number * ROWS):
        return model(*batch(step, number), float(count * ROWS * LENGTH))


def sum_contributions(model, flat, step, count, add, loss=loss_of):
    """Run the `count` micro-batches of a step; each gradient becomes add(its contributions by micro-batch)."""
    caught = []
    for number in range(count):
        parts = {}
        token = contribution_recorder.set(lambda p, a, parts=parts: parts.setdefault(p, []).append(a))
        loss(model, step, number, count).backward()
        contribution_recorder.reset(token)
        caught.append(parts)
    flat.zero_grad()
    for parameter in flat.parameters:
        if parameter.requires_grad:
            parameter.grad = add([parts.get(parameter, []) for parts in caught])


def add_in_order(sites, order):
    return order.add("", sites)


def one_device(
    make_optimizer, replicas, local, synchronize_each, steps=2, clip=None, model=None, units=None, add=add_in_order
):
    """Train on one device, contributions added in the declared order. Returns (weights, gradients, optimizer state) by
    name.

    units(model): lists of parameters; the norm's blocks begin anew with each. Default: one unit.
    add(sites by micro-batch, order): adds one parameter's contributions.
    """
    model = model or small_gpt()
    flat = FlatParameters(model.parameters())
    optimizer = make_optimizer(flat)
    order = GradientOrder(replicas, synchronize_each)
    for step in range(steps):
        sum_contributions(model, flat, step, replicas * local, lambda sites: add(sites, order))
        if clip is not None:
            groups = units(model) if units else [flat.parameters]
            arrays = [np.concatenate([_grad(p) for p in group]) for group in groups]
            norm = norm_from_blocks(np.concatenate([block_square_sums(array) for array in arrays]))
            scale_gradients_(flat, clip_coefficient(norm, clip))
        optimizer.step()
    return tensors_of(flat, optimizer)


def tensors_of(flat, optimizer):
    return {
        "weights": {p.name: p.data for p in flat.parameters},
        "gradients": {p.name: p.grad for p in flat.parameters if p.requires_grad},
        "optimizer": {
            f"{name}.{key}": array for name, state in optimizer.state.items() for key, array in state.items()
        },
    }


def _grad(parameter):
    return (np.zeros(parameter.shape, parameter.dtype) if parameter.grad is None else parameter.grad).reshape(-1)


def assert_same(actual, expected):
    """Bit for bit, in every kind and under every name."""
    assert actual.keys() == expected.keys()
    for kind in expected:
        assert actual[kind].keys() == expected[kind].keys(), kind
        for name, array in expected[kind].items():
            assert actual[kind][name].dtype == array.dtype, (kind, name)
            assert np.array_equal(actual[kind][name], array), (kind, name)
