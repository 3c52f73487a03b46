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
from minidist.core.optim import SGD, clip
from minidist.core.pipeline.runtime import Pipeline, split_model
from minidist.course.museum import jobs
from minidist.course.museum.exhibit import Catch, Exhibit, Patch, Recording
from minidist.job.train import recipe, run
from minidist.job.train.strategies.pipeline import PipelineParallel
from minidist.optim import clip_grad_norm_
from minidist.pipeline.schedules import get_schedule

CHECKS = "tests/museum/test_recent.py"
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


def pipeline_rounds() -> Recording:
    """Train two stages for three steps, of two rounds of two micro-batches each."""

    def main(comm: Comm) -> Any:
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
        weights = {p.name: p.data.copy() for flat in pipe.flats for p in flat.parameters}
        return losses, {"gradients": gradients, "weights": weights}

    return jobs.recorded(2, main)


def windows() -> Recording:
    """Train with windows of four micro-batches; every other window is the last one of an epoch, and has two."""

    def main(comm: Comm) -> Any:
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

    return jobs.recorded(1, main)


def validation() -> Recording:
    """Train four steps, and compute the loss on three batches in which different numbers of labels count."""

    def main(comm: Comm) -> Any:
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

    return jobs.recorded(1, main)


def clipped() -> Recording:
    """Train one rank with gradients that are clipped to a norm of 0.1."""

    def main(comm: Comm) -> Any:
        model = jobs.mlp()

        def before_step() -> None:
            clip_grad_norm_(model.parameters(), 0.1)

        return jobs.loop(
            model, jobs.loss_on_points(model), FlatParameters(model.parameters()), before_step=before_step, steps=4
        )

    return jobs.recorded(1, main)


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


def multiplied_by_all_processes(patch: Patch) -> None:
    """the loss is multiplied by the number of all processes where that of the data-parallel ones is meant"""

    def parallelize(job: Any, comm: Comm, *rest: Any) -> Any:
        job.targets_per_sample //= comm.size // job.batches.dp
        return recipe.parallelize(job, comm, *rest)

    patch.setattr(run, "parallelize", parallelize)


def whole_window(patch: Patch) -> None:
    """the losses of a short window are divided by the number of micro-batches of a whole one"""
    patch.setitem(globals(), "divisor_of_window", lambda micro_batches: WINDOW)


def parameters_used_up(patch: Patch) -> None:
    """the norm uses up the generator of the parameters, and nothing is left to be scaled"""
    patch.setattr(clip, "list", iter)


EXHIBITS = [
    Exhibit(
        "110",
        "a pipeline divides what earlier rounds have accumulated",
        "The schedule divides all gradients by the number of its micro-batches at the end of its step. With several"
        " steps of the schedule per optimizer step it divided also what the earlier ones had added: the gradient was a"
        " moving average in place of a sum, much smaller than it should be, and the loss was that of another job.",
        divided_after_every_round,
        pipeline_rounds,
        (Catch(CHECKS, "test_rounds_of_a_pipeline_are_one_batch"),),
        "https://github.com/pytorch/torchtitan/issues/1733",
    ),
    Exhibit(
        "111",
        "a pipeline's loss is divided for the report alone",
        "Without a pipeline the loss was divided by the number of tokens, and then backward began. A pipeline's"
        " schedule begins backward itself, from the sum; the division came afterwards, for the metrics. The gradients"
        " were as many times too large as a step has tokens, and the loss that was printed was right.",
        divided_for_the_report,
        jobs.train_job(2, steps=4, pp=2, microbatches=2, optimizer="adam"),
        (Catch("tests/museum/test_checks.py", "test_a_pipeline_equals_one_device", ("gpt",)),),
        "https://github.com/pytorch/torchtitan/issues/2972",
    ),
    Exhibit(
        "112",
        "the validation loss is a mean of batch means",
        "Each validation batch was divided by its number of labels that count, and all batches had one weight in the"
        " average."
        " A batch with few such labels had as much weight as one with many: losses of 2 over 1 label and of 90 over 9"
        " gave 6.0 in place of 9.2. Nothing that is trained is wrong; what a run is judged by is.",
        mean_of_batch_means,
        validation,
        (Catch(CHECKS, "test_every_label_counts_once_in_a_validation"),),
        "https://github.com/pytorch/torchtitan/pull/4167",
    ),
    Exhibit(
        "113",
        "the loss is multiplied by all processes, and not by the data-parallel ones",
        "A mean over replicas was made up for by a factor: the number of processes. With tensor or context parallelism"
        " there are more processes than replicas, and the loss was as many times too large as ranks share a replica.",
        multiplied_by_all_processes,
        jobs.train_job(2, steps=3, tp=2, precision="fp64", optimizer="sgd"),
        (Catch(CHECKS, "test_a_job_equals_one_device", (2, {"tp": 2})),),
        "https://github.com/huggingface/transformers/pull/39674",
    ),
    Exhibit(
        "114",
        "the last, short window is divided as a whole one",
        "Gradients are accumulated over a window of micro-batches, and the last window of an epoch may have fewer. The"
        " loss of each micro-batch was divided by the number that was configured, so the last update of every epoch"
        " was too small, and its loss was reported as half of what it was.",
        whole_window,
        windows,
        (Catch(CHECKS, "test_a_short_window_is_one_batch"),),
        "https://github.com/huggingface/transformers/pull/39659",
    ),
    Exhibit(
        "115",
        "the norm uses up the parameters, and nothing is clipped",
        "The parameters were passed to the clipping as an iterator. The norm walked it to its end; when gradients were"
        " to be scaled, it was empty.",
        parameters_used_up,
        clipped,
        (Catch("tests/optim/test_clip.py", "test_a_generator_of_parameters_is_clipped_too"),),
        "https://github.com/areal-project/AReaL/pull/335",
    ),
]
