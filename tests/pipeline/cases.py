"""Pipelines on small models, and the single device that they must equal: contributions are added as declared."""

import numpy as np

from minidist.base.coordinates import batch_coordinates
from minidist.core.autograd import Tensor, contribution_recorder, cross_entropy
from minidist.core.nn import GPT, MLP, GPTConfig
from minidist.core.nn.flat import FlatParameters
from minidist.core.pipeline.runtime import split_model
from minidist.optim import SGD
from minidist.optim.adam import Adam
from minidist.pipeline.passes import additions
from minidist.pipeline.runtime.pipeline import Pipeline
from minidist.pipeline.schedules import get_schedule

SIZES = {"vocab_size": 11, "n_positions": 6, "n_embd": 8, "n_head": 2}


def make_optimizer(name, parameters):
    return SGD(parameters, lr=0.125) if name == "sgd" else Adam(parameters, lr=1e-2)


def gpt(layers, dropout=0.0):
    return GPT(GPTConfig(**SIZES, n_layer=layers, dropout=dropout), dtype=np.float64, seed=3)


def gpt_batches(m, step=0, ragged=True):
    """m micro-batches of 2 samples of 6 tokens; the last one has a single sample."""
    rng = np.random.default_rng(100 + step)
    rows = [1 if ragged and i == m - 1 and m > 1 else 2 for i in range(m)]
    tokens = [rng.integers(0, 11, (n, 7)) for n in rows]
    return [t[:, :-1].copy() for t in tokens], [t[:, 1:].copy() for t in tokens]


def gpt_loss(divisor):
    return lambda logits, targets: cross_entropy(logits, targets, divisor)


def mlp(layers):
    """Integer weights, so that every sum is exact."""
    model = MLP([4] * layers + [3], dtype=np.float64, seed=5)
    for n, parameter in enumerate(model.parameters()):
        parameter.data[...] = np.random.default_rng(n).integers(-2, 3, parameter.shape)
    return model


def mlp_batches(m, step=0):
    rng = np.random.default_rng(200 + step)
    rows = [1 if i == m - 1 and m > 1 else 2 for i in range(m)]
    return [rng.integers(-2, 3, (n, 4)).astype(float) for n in rows], [
        rng.integers(-2, 3, (n, 3)).astype(float) for n in rows
    ]


def mlp_loss(output, target):
    return (output * Tensor(target)).sum()


def fold(parts):
    total = None
    for part in parts:
        if part is not None:
            total = part.copy() if total is None else total + part
    return total


def add_as_declared(contributions, additions, stage_of, tied=()):
    """contributions[micro-batch][name] = arrays in backward order; the sum that the plan declares for `name`."""

    def of_stage(name, stage, site):
        return fold(
            fold(
                array
                for i in numbers
                for array in (contributions[i].get(name, []) if site is None else contributions[i][name][site])
            )
            for numbers in additions[stage]
        )

    result = {}
    for name in {name for caught in contributions for name in caught}:
        if name in tied and len(additions) > 1:  # the head's contribution comes first in backward, the embedding's last
            result[name] = fold([of_stage(name, 0, slice(1, 2)), of_stage(name, len(additions) - 1, slice(0, 1))])
        else:
            result[name] = of_stage(name, stage_of[name], None)
    return result


def reference(model, loss, batches, plan, stage_of, optimizer="adam", steps=1, tied=(), after=None):
    """One device; returns (losses, gradients, weights, state) of every step by name."""
    flat = FlatParameters(model.parameters())
    optimize = make_optimizer(optimizer, flat)
    history = []
    for step in range(steps):
        inputs, targets = batches(step)
        contributions, losses = [], []
        for i, (x, y) in enumerate(zip(inputs, targets, strict=True)):
            caught = {}
            token = contribution_recorder.set(
                lambda p, array, caught=caught: caught.setdefault(p.name, []).append(array)
            )
            with batch_coordinates(step, 2 * i, 9):
                value = loss(model(x if x.dtype.kind == "i" else Tensor(x)), y)
                value.backward()
            contribution_recorder.reset(token)
            contributions.append(caught)
            losses.append(value.item())
        flat.zero_grad()
        gradients = add_as_declared(contributions, additions(plan), stage_of, tied)
        for parameter in flat.parameters:
            if parameter.name in gradients:
                parameter.grad = gradients[parameter.name]
        kept = {p.name: np.array(p.grad) for p in flat.parameters}
        if after is not None:
            after(flat)
        optimize.step()
        history.append((losses, kept, {p.name: np.array(p.data) for p in flat.parameters}, by_name(optimize)))
    return history


def by_name(optimizer):
    return {f"{n}.{k}": np.array(a) for n, arrays in optimizer.state.items() for k, a in arrays.items()}


def pipeline_main(comm, make_model, loss, batches, plan, optimizer="adam", steps=1, cuts=None, **options):
    """What `reference` returns, for this rank's stages."""
    stages, tied = split_model(make_model(), plan.stages, plan.stages_of(comm.rank), cuts)
    now = {"step": 0}
    pipe = Pipeline(
        comm, plan, stages, loss, tied=tied, coordinates=lambda i: batch_coordinates(now["step"], 2 * i, 9), **options
    )
    optimize = [make_optimizer(optimizer, stage.flat) for stage in stages if len(stage.flat)]
    history = []
    for step in range(steps):
        now["step"] = step
        pipe.zero_grad()
        losses = pipe.step(*batches(step))
        kept = [(p.name, np.array(p.grad)) for stage in stages for p in stage.flat.parameters]
        for one in optimize:
            one.step()
        weights = [(p.name, np.array(p.data)) for stage in stages for p in stage.flat.parameters]
        state = [entry for one in optimize for entry in by_name(one).items()]
        history.append((losses, kept, weights, state))
    return history


def stage_names(make_model, plan, cuts=None):
    """Parameter name -> stage (the first, of a tied one)."""
    stages, tied = split_model(make_model(), plan.stages, range(plan.stages), cuts)
    found = {}
    for stage in stages:
        for parameter in stage.flat.parameters:
            found.setdefault(parameter.name, stage.number)
    return found, tied


def assert_equal(ranks, expected):
    """Every rank's every tensor equals the reference's, bit for bit, and together the ranks have all of them."""
    for step, (losses, gradients, weights, state) in enumerate(expected):
        seen = set()
        for rank, history in enumerate(ranks):
            got_losses, *got = history[step]
            assert got_losses == losses, (rank, step)
            for mine, reference_ in zip(got, (gradients, weights, state), strict=True):
                for name, value in mine:
                    assert np.array_equal(value, reference_[name]), (
                        rank,
                        step,
                        name,
                        np.abs(value - reference_[name]).max(),
                    )
                    seen.add(name)
        assert seen == set(gradients) | set(state), step


def plan_of(name, p, m, **options):
    return get_schedule(name).plan(p, m, **options)
