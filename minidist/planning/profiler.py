"""How long each layer of the real model takes, measured: the input of a partition by time.

The model is cut into stages of one block each, exactly as a pipeline would be (the embedding goes with the first block,
the head and the loss with the last), and each is run forward and backward on one micro-batch. The result is a profile
as `minidist partition` reads it. Times are medians over rounds that go through all blocks in turn, so that a busy
moment affects all blocks equally.

Proved by: tests/planning/test_profiler.py
"""

import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from minidist.base.coordinates import batch_coordinates
from minidist.core.autograd import Tensor
from minidist.core.base.errors import UsageError
from minidist.core.pipeline.runtime import PipelineStage, cut_model
from minidist.core.pipeline.runtime.messages import FLOATS
from minidist.core.pipeline.runtime.pipeline import backward_from
from minidist.core.train.task import as_input
from minidist.job.config.pipeline_plan import count_blocks
from minidist.job.config.rules import MODEL_AND_DATA, check_rules
from minidist.job.config.train_config import TrainConfig, resolve_batches
from minidist.job.train.job import Job, build
from minidist.pipeline.partition import Layer


def profile_layers(
    config: TrainConfig, rounds: int = 5, watch: Callable[[int], None] = lambda rounds: None
) -> list[Layer]:
    """Return one Layer per block: milliseconds of forward and backward, bytes of its output and of its parameters.

    watch: called after each round with the number of rounds that are done; the first one warms up and counts as 0.
    """
    if rounds < 1:
        raise UsageError(f"--rounds is {rounds}; it must be at least 1")
    if config.is_own_model:
        raise UsageError(
            f"profile times the blocks of a model, and minidist does not know those of --model {config.model}; use"
            " --model gpt, llama, mlp or cnn"
        )
    alone = config.model_copy(update={"pp": 1, "dp": 1, "tp": 1, "cp": 1, "ep": 1, "chunks": None})
    batches = resolve_batches(alone, 1)
    check_rules(alone, batches, rules=MODEL_AND_DATA)
    job = build(alone, batches)

    # One stage per block, as a pipeline of as many stages would have.
    blocks = count_blocks(job.model)
    modules, _ = cut_model(job.model, blocks)
    stages = [PipelineStage(module, number) for number, module in enumerate(modules)]
    tokens, targets = job.micro_batch(0, 0)
    inputs = as_input(tokens, job.dtype)
    times: list[list[tuple[float, float]]] = []
    sizes: list[int] = []

    # The first round warms up, and does not count.
    for done in range(rounds + 1):
        row, sizes = _one_round(job, stages, inputs, targets)
        times.append(row)
        watch(done)

    # The medians over the rounds, in milliseconds; the sizes are the same in every round.
    result = []
    first = {"mlp": "", "cnn": "stem"}.get(config.model, "embedding")
    for number, stage in enumerate(stages):
        forward, backward = (statistics.median(row[number][k] for row in times[1:]) * 1e3 for k in (0, 1))
        name = " + ".join(
            [
                *([first] if number == 0 and first else []),
                f"block {number}",
                *(["head"] if number == blocks - 1 else []),
            ]
        )
        result.append(
            Layer(name, forward, backward, float(sizes[number]), float(sum(p.data.nbytes for p in stage.parameters)))
        )
    return result


def _one_round(
    job: Job, stages: list[PipelineStage], inputs: Any, targets: Any
) -> tuple[list[tuple[float, float]], list[int]]:
    # Forward, stage by stage: each begins with new leaves, as if its input had been received.
    x, alive, row, sizes = [inputs], [], [], []
    with batch_coordinates(0, 0, job.config.seed):
        for number, stage in enumerate(stages):
            leaves = x if number == 0 else [Tensor(array, requires_grad=array.dtype.kind in FLOATS) for array in x]
            begin = time.perf_counter()
            result = stage.module(*leaves)
            if number + 1 == len(stages):
                result = job.loss_of(result, targets)
            outputs = list(result) if isinstance(result, tuple) else [result]
            alive.append((leaves, outputs, time.perf_counter() - begin))
            x = [np.ascontiguousarray(output.data) for output in outputs]
            sizes.append(sum(array.nbytes for array in x))

    # Backward from the last stage, each with the gradients that the next one hands over.
    gradients: list[Any] = [None]
    for stage, (leaves, outputs, forward) in zip(reversed(stages), reversed(alive), strict=True):
        stage.flat.zero_grad()
        begin = time.perf_counter()
        backward_from(outputs, gradients, "now")
        row.append((forward, time.perf_counter() - begin))
        gradients = [
            np.zeros(leaf.shape, leaf.dtype) if leaf.grad is None else leaf.grad
            for leaf in leaves
            if isinstance(leaf, Tensor)
        ]
    return row[::-1], sizes
