"""Experts: routing by an independent count, gradients of the dense computation, and sharded over ranks the same
training.
"""

import sys
from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from minidist.comm import SimWorld
from minidist.core.autograd import Tensor, gelu, linear, softmax
from minidist.core.base.errors import UsageError
from minidist.core.comm import init_device_mesh
from minidist.core.nn import GPT, GPTConfig, cross_entropy
from minidist.core.nn.experts import Assignment, MixtureOfExperts, expert_capacity
from minidist.core.parallel.expert_parallel import ExpertParallel
from minidist.core.parallel.model_parallel import parallelize_module
from minidist.parallel.expert import ExpertDataParallel, expert_gpt_plan
from minidist.parallel.replica_check import check_module_replicas
from minidist.parallel.tensor.grad_norm import global_square_sum
from tests.cases import each
from tests.parallel.split_models import assert_equal, summed_loss, text, train

EXPERTS, LENGTH, WORDS = 12, 6, 13


def random(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape)


# --- routing on one device ---


def route_one_by_one(probabilities, top_k, capacity):
    """The papers' loops: every token in turn, first choices before second ones."""
    order = np.argsort(-probabilities, axis=1, kind="stable")
    filled = [0] * probabilities.shape[1]
    slots = []
    for choice in range(top_k):
        mine = []
        for token in range(len(probabilities)):
            expert = int(order[token, choice])
            mine.append(expert * capacity + filled[expert] if filled[expert] < capacity else -1)
            filled[expert] += 1
        slots.append(mine)
    return slots


@each("top_k", [1, 2])
@each("capacity", [1, 3, 100])
def test_slots_are_given_out_in_token_order(top_k, capacity):
    probabilities = np.exp(random(capacity, 30, 4))
    assignment = Assignment(probabilities, top_k, capacity)
    expected = route_one_by_one(probabilities, top_k, capacity)
    assert [slots.tolist() for _, slots in assignment.choices] == expected
    assert assignment.dropped == sum(slot < 0 for slots in expected for slot in slots)
    used = [slot for slots in expected for slot in slots if slot >= 0]
    assert len(set(used)) == len(used)
    assert assignment.first_counts.tolist() == np.bincount(probabilities.argmax(1), minlength=4).tolist()


def test_capacity_is_rounded_up():
    assert expert_capacity(10, 4, 1, 1.0) == 3
    assert expert_capacity(8, 4, 2, 1.25) == 5
    assert expert_capacity(1, 64, 1, 1.0) == 1


def dense(layer, x, top_k):
    """Every token through every expert, weighted by gates that are zero for the experts that it did not choose."""
    rows = x.reshape((-1, x.shape[-1]))
    probabilities = softmax(linear(rows, layer.router))
    chosen = np.zeros(probabilities.shape)
    for choice in np.argsort(-probabilities.data, axis=1, kind="stable")[:, :top_k].T:
        chosen[np.arange(len(chosen)), choice] = 1
    gates = probabilities * Tensor(chosen)
    if top_k == 2:
        gates = gates / gates.sum(-1, keepdims=True)
    total = None
    for e in range(layer.num_experts):
        hidden = gelu(rows @ layer.fc_weight[e] + layer.fc_bias[e])
        part = (hidden @ layer.proj_weight[e] + layer.proj_bias[e]) * gates[:, e : e + 1]
        total = part if total is None else total + part
    return total.reshape(x.shape)


@pytest.mark.parametrize("top_k", [1, 2])
def test_without_drops_it_is_the_dense_computation(top_k):
    def run(function, **options):
        layer = MixtureOfExperts(6, 10, 4, top_k, capacity_factor=4.0, dtype=np.float64, scale=0.5, seed=1)
        x = Tensor(random(0, 2, 7, 6), requires_grad=True)
        y = function(layer, x)
        y.backward(random(1, *y.shape))
        return [y.data, x.grad] + [p.grad for p in layer.parameters()], layer

    mine, layer = run(lambda layer, x: layer(x))
    theirs, _ = run(lambda layer, x: dense(layer, x, top_k))
    assert layer.assignment.dropped == 0
    for a, b in zip(mine, theirs, strict=True):
        assert np.abs(a - b).max() < 1e-13
        assert np.abs(b).max() > 1e-3


def test_a_dropped_token_gets_zeros():
    layer = MixtureOfExperts(6, 10, 2, 1, capacity_factor=0.3, dtype=np.float64, scale=0.5, seed=1)
    y = layer(Tensor(random(0, 1, 20, 6))).data[0]
    ((_, slots),) = layer.assignment.choices
    assert layer.assignment.dropped == 14  # 20 tokens, 2 experts with 3 slots
    assert not y[slots < 0].any()
    assert np.abs(y[slots >= 0]).min(axis=1).max() > 0


@pytest.mark.parametrize("top_k", [1, 2])
def test_auxiliary_losses_are_the_papers(top_k):
    layer = MixtureOfExperts(6, 10, 4, top_k, dtype=np.float64, scale=0.5, seed=1)
    x = Tensor(random(0, 2, 7, 6))
    layer(x)
    probabilities = softmax(linear(x.reshape((14, 6)), layer.router)).data
    f = np.bincount(probabilities.argmax(1), minlength=4) / 14
    P = probabilities.mean(0)
    expected = 4 * sum(f * P) if top_k == 1 else sum(f * P) / 4  # Switch, equation 4; GShard, algorithm 1
    assert abs(layer.auxiliary_loss.item() - expected) < 1e-14
    layer.auxiliary_loss.backward()
    assert np.abs(layer.router.grad).max() > 1e-4
    uniform = MixtureOfExperts(6, 10, 4, 1, dtype=np.float64, scale=0.5, seed=1)
    uniform.router.data[...] = 0  # all probabilities equal: P = 1/4, whatever f
    uniform(x)
    assert abs(uniform.auxiliary_loss.item() - 1) < 1e-14  # the minimum


def test_a_gpts_loss_holds_the_mean_of_the_groups_auxiliary_losses():
    model, groups, expected = model_of(4, 1, 2.0), 3, 0.0
    total = 0.0
    for number in range(groups):
        tokens, targets = group(0, number, 2, groups)
        total += model(tokens, targets, 2 * groups * LENGTH).item()
        expected += cross_entropy(model(tokens), targets, 2 * groups * LENGTH).item()
        expected += 0.1 * sum(block.mlp.auxiliary_loss.item() for block in model.transformer.h) / groups
    assert abs(total - expected) < 1e-14
    assert model(tokens, targets).item() == pytest.approx(
        cross_entropy(model(tokens), targets).item()
        + 0.1 * sum(b.mlp.auxiliary_loss.item() for b in model.transformer.h),
        rel=1e-14,
    )


# --- sharded over ranks ---


def model_of(experts, top_k, factor):
    config = GPTConfig(
        vocab_size=WORDS,
        n_positions=LENGTH,
        n_embd=8,
        n_layer=2,
        n_head=2,
        n_experts=experts,
        expert_top_k=top_k,
        capacity_factor=factor,
        aux_loss_weight=0.1,
    )
    return GPT(config, dtype=np.float64, seed=3)


def group(step, number, rows, groups):
    tokens, targets = text(step, rows * groups, LENGTH, WORDS)
    return tokens[number * rows : (number + 1) * rows], targets[number * rows : (number + 1) * rows]


@cache
def one_device(groups, top_k, factor, optimizer):
    """The groups one after the other through the same layer: capacity and auxiliary loss are each group's own."""
    dropped = []

    def loss_of(model, step):
        total = None
        for number in range(groups):
            loss = model(*group(step, number, 2, groups), 2 * groups * LENGTH)
            dropped.append(sum(block.mlp.assignment.dropped for block in model.transformer.h))
            total = loss if total is None else total + loss
        return total

    return train(model_of(EXPERTS, top_k, factor), loss_of, optimizer), sum(dropped)


def expert_train(comm, top_k, factor, optimizer, shape):
    mesh = init_device_mesh(comm, shape, ("dp", "ep"))
    model = parallelize_module(
        model_of(EXPERTS, top_k, factor), mesh["ep"], {"transformer.h.*.mlp": ExpertParallel()}, axis="ep"
    )
    parallel = ExpertDataParallel(model, mesh)
    divisor = 2 * comm.size * LENGTH

    def loss_of(_, step):
        return parallel(*group(step, comm.rank, 2, comm.size), divisor)

    return train(model, loss_of, optimizer, mesh, synchronize=summed_loss(comm), flat=Both(parallel.flats))


class Both:
    """Two flat units as the one that `train` knows."""

    def __init__(self, flats):
        self.flats = flats
        self.parameters = [p for flat in flats for p in flat.parameters]

    def __iter__(self):
        return iter(self.flats)

    def zero_grad(self):
        for flat in self.flats:
            flat.zero_grad()


def assert_experts(shape, top_k, factor, optimizer):
    ranks = shape[0] * shape[1]
    expected, dropped = one_device(ranks, top_k, factor, optimizer)
    assert (dropped > 0) == (factor < 2)
    for history in SimWorld(ranks).run(expert_train, top_k, factor, optimizer, shape):
        assert_equal(history, expected)


@pytest.mark.sampled(12)
@pytest.mark.parametrize("shape", [(1, 1), (1, 2), (1, 3), (1, 4), (2, 2), (3, 1)])
@pytest.mark.parametrize("top_k", [1, 2])
@pytest.mark.parametrize("factor", [1.0, 12.0])
def test_sharded_experts_equal_one_device_in_every_tensor_of_every_step(shape, top_k, factor):
    assert_experts(shape, top_k, factor, "adam" if top_k == 1 else "sgd")


@pytest.mark.parametrize("ranks", [5, 8])
def test_more_ranks_than_are_usual(ranks, monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "EXPERTS", ranks)
    expected, _ = one_device.__wrapped__(ranks, 1, 1.0, "sgd")
    for history in SimWorld(ranks).run(expert_train, 1, 1.0, "sgd", (1, ranks)):
        assert_equal(history, expected)


# --- with other axes ---


@each(
    ("shape", "top_k", "factor", "sequence_parallel"),
    [
        (*case, cut)
        for case in (((1, 2, 2), 1, 1.0), ((2, 1, 2), 2, 12.0), ((1, 2, 2), 2, 1.0), ((1, 1, 4), 1, 12.0))
        for cut in (False, True)
    ],
    sampled=6,
)
def test_experts_and_tensor_parallel_together(shape, top_k, factor, sequence_parallel):
    """Experts cut twice: gathered over tp and then over ep they are the whole, and so are gradients and optimizer
    state.
    """
    groups, heads = shape[0] * shape[1], 4
    length = 8 if shape[2] == 4 else LENGTH

    def model_here():
        return GPT(replace(model_of(4, top_k, factor).config, n_head=heads, n_positions=length), np.float64, 3)

    def rows(step, number):
        tokens, targets = text(step, 2 * groups, length, WORDS)
        return tokens[2 * number : 2 * number + 2], targets[2 * number : 2 * number + 2]

    def one(model, step):
        losses = [model(*rows(step, number), 2 * groups * length) for number in range(groups)]
        return sum(losses[1:], losses[0])

    expected = train(model_here(), one, "adam")
    single = model_here()
    one(single, 0).backward()
    norm = float(np.sqrt(sum((p.grad**2).sum() for p in single.parameters())))

    def main(comm):
        mesh = init_device_mesh(comm, shape, ("dp", "ep", "tp"))
        model = parallelize_module(model_here(), mesh["ep"], {"transformer.h.*.mlp": ExpertParallel()}, axis="ep")
        model = parallelize_module(model, mesh["tp"], expert_gpt_plan(WORDS, sequence_parallel))
        parallel = ExpertDataParallel(model, mesh)
        number = mesh["dp"].rank * shape[1] + mesh["ep"].rank

        def loss_of(_, step):
            return parallel(*rows(step, number), 2 * groups * length)

        loss_of(model, 0).backward()
        mine = global_square_sum(model.parameters(), mesh) ** 0.5
        history = train(
            model, loss_of, "adam", mesh, synchronize=summed_loss(mesh["dp", "ep"]), flat=Both(parallel.flats)
        )
        for axis in mesh.axis_names:
            check_module_replicas(model, mesh[axis], axis)
        return history, mine, model.transformer.h[0].mlp.fc_weight.layout

    for history, mine, layout in SimWorld(shape[0] * shape[1] * shape[2]).run(main):
        assert_equal(history, expected)
        assert abs(mine - norm) < 1e-12 * norm
        assert (layout.axes, layout.dims, layout.global_shape) == (("ep", "tp"), (0, 2), (4, 8, 32))


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("top_k", [1, 2])
def test_four_all_to_alls_a_layer(ranks, top_k):
    width, tokens, factor, experts = 8, 24, 1.5, 4

    def main(comm):
        layer = MixtureOfExperts(width, 16, experts, top_k, factor, seed=0)
        parallelize_module(layer, comm, {"": ExpertParallel()}, axis="ep")
        x = Tensor(np.ones((2, tokens // 2, width), np.float32), requires_grad=True)
        y = layer(x)
        y.backward(y.data)

    world = SimWorld(ranks)
    world.run(main)
    for trace in world.traces:
        one = (ranks - 1) * tokens * top_k * factor * width * 4 / ranks  # (P-1)/P tokens k factor h bytes
        assert trace.bytes_by_purpose() == ({"dispatch": 4 * one} if ranks > 1 else {})
        assert len(trace.sent()) == 4 * (ranks - 1)


def test_bad_input():
    def main(comm):
        with pytest.raises(
            UsageError,
            match=r"12 experts of transformer\.h\.0\.mlp cannot be divided among 5 .* 10 or 15, or one of 1, 2, 3",
        ):
            parallelize_module(model_of(12, 1, 1.0), comm, {"transformer.h.*.mlp": ExpertParallel()})
        with pytest.raises(UsageError, match=r"'transformer\.h\.0\.attn' is a Attention"):
            parallelize_module(model_of(12, 1, 1.0), comm, {"transformer.h.*.attn": ExpertParallel()})
        with pytest.raises(UsageError, match="no axis 'ep'"):
            ExpertDataParallel(model_of(12, 1, 1.0), init_device_mesh(comm, (5,), ("dp",)))

    SimWorld(5).run(main)
    with pytest.raises(UsageError, match="top_k 3 of 4 experts; use 1"):
        MixtureOfExperts(4, 4, 4, 3)
    with pytest.raises(UsageError, match="capacity_factor 0 leaves no slots"):
        MixtureOfExperts(4, 4, 4, capacity_factor=0)


def test_recomputation_that_would_lose_the_auxiliary_loss_is_refused():
    from minidist.nn import checkpoint

    model = model_of(4, 1, 1.0)
    block = model.transformer.h[0]
    model.transformer.h[0] = type("Again", (), {"mlp": block.mlp, "__call__": lambda self, x: checkpoint(block, x)})()
    with pytest.raises(UsageError, match="auxiliary loss was computed without gradient"):
        model(*text(0, 2, LENGTH, WORDS))
