"""Bugs of divisors and of clipping, from public threads of 2024 to 2026: by what a loss or a gradient is divided.

The programs here are written as users write them. What an exhibit replaces are the functions above them.

Proved by: tests/museum/test_recent.py
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from minidist.core.autograd import Tensor, cross_entropy, no_grad
from minidist.core.comm import Comm
from minidist.core.nn import GPT, GPTConfig
from minidist.core.nn.flat import FlatParameters
from minidist.core.pipeline.runtime import split_model
from minidist.course.museum import jobs
from minidist.course.museum.exhibit import Patch, replaces
from minidist.course.museum.pipelines import weights_of
from minidist.job.train import recipe, trainer
from minidist.job.train.strategies.pipeline import PipelineParallel
from minidist.optim import SGD, clip_grad_norm_, clip_whole
from minidist.pipeline.runtime.pipeline import Pipeline
from minidist.pipeline.schedules import get_schedule

ROUNDS, MICRO_BATCHES = 2, 2  # of the pipeline that accumulates
WINDOW = 4  # micro-batches of a whole window


# --- what an exhibit may replace --------------------------------------------------------------------------------------


def divisor_in_pipeline(tokens: int) -> float:
    """Return the divisor of the loss of a micro-batch: the tokens of all rounds."""
    return float(tokens * MICRO_BATCHES * ROUNDS)


def after_round(flats: Sequence[FlatParameters]) -> None:
    """Leave the gradient as it is after a round of the pipeline."""


def divisor_of_window(micro_batches: int) -> int:
    """Return by what a micro-batch's mean is divided in a window of several: their number, also in a short window."""
    return micro_batches


def mean_over_batches(sums: Sequence[float], counts: Sequence[int]) -> float:
    """Return the mean loss of batches with these sums and these numbers of labels: each label counts once."""
    return sum(sums) / sum(counts)


# --- the programs -----------------------------------------------------------------------------------------------------


def small_gpt() -> Any:
    """Return a GPT with two blocks."""
    return GPT(GPTConfig(jobs.WORDS, jobs.LENGTH, 8, 2, 2), dtype=np.float64, seed=3)


@jobs.on_ranks(2)
def pipeline_rounds(comm: Comm) -> Any:
    """Train two stages for three steps, of two rounds of two micro-batches each."""
    plan = get_schedule("1f1b").plan(2, MICRO_BATCHES)
    stages, tied = split_model(small_gpt(), plan.stages, plan.stages_of(comm.rank))
    divisor = divisor_in_pipeline(jobs.LENGTH)
    pipe = Pipeline(comm, plan, stages, lambda y, t: cross_entropy(y, t, divisor), tied=tied)
    optimizers = [SGD(flat, lr=0.3) for flat in pipe.flats]
    losses, gradients = [], {}
    for step in range(3):
        pipe.zero_grad()
        inputs, targets = jobs.tokens(step, ROUNDS * MICRO_BATCHES)
        total = 0.0
        for first in range(0, len(inputs), MICRO_BATCHES):
            rows = [slice(row, row + 1) for row in range(first, first + MICRO_BATCHES)]
            total += sum(pipe.step([inputs[r] for r in rows], [targets[r] for r in rows]))
            after_round(pipe.flats)
        losses.append(total * divisor / (jobs.LENGTH * len(inputs)))
        if step == 0:
            gradients = {p.name: np.array(p.grad) for flat in pipe.flats for p in flat.parameters}
        for optimizer in optimizers:
            optimizer.step()
    return losses, {"gradients": gradients, "weights": weights_of(pipe)}


@jobs.on_ranks(1)
def windows(comm: Comm) -> Any:
    """Train with windows of four micro-batches; every other window is the last one of an epoch, and has two."""
    model = jobs.mlp()

    def loss_of(step: int) -> Tensor:
        count, total = WINDOW if step % 2 == 0 else WINDOW // 2, 0.0
        inputs, labels = jobs.points(step, 3 * count)
        for rows in np.array_split(np.arange(3 * count), count):
            outputs = model(Tensor(inputs[rows]))
            loss = cross_entropy(outputs, labels[rows], divisor=3 * divisor_of_window(count))
            loss.backward()
            total += loss.item()
        return Tensor(np.float32(total))

    return jobs.loop(model, loss_of, FlatParameters(model.parameters()), steps=6)


@jobs.on_ranks(1)
def validation(comm: Comm) -> Any:
    """Train four steps, and compute the loss on three batches in which different numbers of labels count."""
    model = jobs.mlp()
    flat = FlatParameters(model.parameters())
    losses, seen = jobs.loop(model, jobs.loss_on_points(model), flat, steps=4)
    sums, counts = [], []
    with no_grad():
        for batch, counted in enumerate((1, 9, 5)):
            inputs, labels = jobs.points(100 + batch)
            labels[counted:] = -100
            sums.append(cross_entropy(model(Tensor(inputs)), labels, divisor=1.0).item())
            counts.append(counted)
    return losses, {**seen, "validation": {"loss": np.array([mean_over_batches(sums, counts)])}}


@jobs.on_ranks(1)
def clipped(comm: Comm) -> Any:
    """Train one rank with gradients that are clipped to a norm of 0.1."""
    model = jobs.mlp()

    def before_step() -> None:
        clip_grad_norm_(model.parameters(), 0.1)

    return jobs.loop(
        model, jobs.loss_on_points(model), FlatParameters(model.parameters()), before_step=before_step, steps=4
    )


# --- the bugs ---------------------------------------------------------------------------------------------------------


def divided_after_every_round(patch: Patch) -> None:
    """the pipeline divides all gradients by its micro-batches after every round, and so also those of earlier rounds"""
    patch.setitem(globals(), "divisor_in_pipeline", lambda tokens: float(tokens * ROUNDS))

    def divide(flats: Sequence[FlatParameters]) -> None:
        for flat in flats:
            for parameter in flat.parameters:
                gradient: Any = parameter.grad
                gradient /= MICRO_BATCHES

    patch.setitem(globals(), "after_round", divide)


def divided_for_the_report(patch: Patch) -> None:
    """backward starts from the sum over tokens, and only the loss that is reported is divided by their number"""
    loss, forward_backward = PipelineParallel._loss, PipelineParallel.forward_backward
    patch.setattr(PipelineParallel, "_loss", lambda self, *batch: loss(self, *batch) * self.job.divisor)

    def report(self: Any, step: int) -> list[float]:
        return [value / self.job.divisor for value in forward_backward(self, step)]

    patch.setattr(PipelineParallel, "forward_backward", report)


def mean_of_batch_means(patch: Patch) -> None:
    """the loss of each validation batch is divided by the number of its labels, and all batches count equally"""
    means = lambda sums, counts: float(np.mean(np.divide(sums, counts)))  # noqa: E731
    patch.setitem(globals(), "mean_over_batches", means)


@replaces(trainer, "parallelize")
def multiplied_by_all_processes(_: Any, job: Any, comm: Comm, *rest: Any) -> Any:
    """the loss is multiplied by the number of all processes where that of the data-parallel ones is meant"""
    job.targets_per_sample //= comm.size // job.batches.dp
    return recipe.parallelize(job, comm, *rest)


def whole_window(patch: Patch) -> None:
    """the losses of a short window are divided by the number of micro-batches of a whole one"""
    patch.setitem(globals(), "divisor_of_window", lambda micro_batches: WINDOW)


def parameters_used_up(patch: Patch) -> None:
    """the norm uses up the generator of the parameters, and nothing is left to be scaled"""
    patch.setattr(clip_whole, "list", iter)
