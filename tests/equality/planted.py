"""Gradients as another framework may have them: a real run on ranks, with a bug planted in it, written as a dump."""

import numpy as np

from minidist.comm import SimWorld
from minidist.core.autograd import no_grad
from minidist.core.collectives import all_reduce
from minidist.core.nn import GPT, GPTConfig
from minidist.debug.dumps.dump import write_dump
from minidist.nn import Llama, LlamaConfig

ROWS, LENGTH, WORDS, WIDTH, HEADS, LAYERS = 4, 6, 11, 16, 4, 2
TOKENS = np.random.default_rng(0).integers(0, WORDS, (2, ROWS, LENGTH + 1))  # two batches


def model_of(kind):
    if kind == "gpt":
        model = GPT(GPTConfig(WORDS, LENGTH, WIDTH, LAYERS, HEADS), seed=3)
    else:
        model = Llama(LlamaConfig(WORDS, WIDTH, 24, LAYERS, HEADS, 2, LENGTH), seed=3)
    # Initial biases and norms are equal everywhere; other values let every gradient differ from every other.
    draw = np.random.default_rng(1)
    for parameter in model.parameters():
        parameter.data[...] += 0.1 * draw.standard_normal(parameter.shape).astype(parameter.dtype)
        parameter.updated()
    return model


def gradients(model, batch, rows, divisor):
    """The gradient of some rows of a batch, divided as the caller says."""
    for parameter in model.parameters():
        parameter.zero_grad()
    tokens = TOKENS[batch][rows]
    loss = model(tokens[:, :-1], tokens[:, 1:], divisor=divisor)
    loss.backward()
    return {p.name: np.array(p.grad) for p in model.parameters()}, float(loss.data)


def weights_of(model):
    with no_grad():
        return {f"weights/{p.name}": np.array(p.data) for p in model.parameters()}


def batch_of(number):
    return {"batch/tokens": TOKENS[number]}


def data_parallel(folder, kind="gpt", bug="", ranks=2, change=None, names="minidist"):
    """Write what `ranks` data-parallel ranks have after backward. change(name, gradient): what a bug makes of it."""

    def program(comm):
        model = model_of(kind)
        mine = np.array_split(np.arange(ROWS), comm.size)[comm.rank]
        batch, divisor = (0 if bug == "stale" else 1), float(ROWS * LENGTH)
        if bug == "missing micro-batch" and comm.rank == 1:
            mine = mine[1:]
        if bug == "sum for a mean":
            divisor = float(len(mine) * LENGTH)
        if bug == "divided twice":
            divisor *= comm.size
        found, _ = gradients(model, batch, mine, divisor)
        skipped = {"transformer.h.1.mlp.c_fc.weight"} if bug == "one parameter is not reduced" else set()
        for name, gradient in found.items():
            if bug != "no all-reduce" and name not in skipped:
                all_reduce(comm, gradient)
        result = {f"gradients/{name}": change(name, g) if change else g for name, g in found.items()}
        return {**result, **weights_of(model), **batch_of(1), "batch/previous_tokens": TOKENS[0]}

    return write_dump(folder, SimWorld(ranks).run(program), {"dp": ranks}, names=names)
