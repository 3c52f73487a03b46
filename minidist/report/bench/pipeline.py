"""How fast is a pipeline step, compared with `torch.distributed.pipelining` on gloo, and with one rank?

Each rank of an `mpiexec` holds one stage of the same GPT twice, ours and PyTorch's. The third side is the whole model
on rank 0, which makes the step of the whole batch in one pass, while the others wait.

Proved by: tests/pipeline/test_against_torch.py
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from minidist.comm.mpi.world import MPIWorld
from minidist.core.autograd import cross_entropy
from minidist.core.base.errors import UsageError
from minidist.core.base.layout import chunk_sizes, offsets
from minidist.core.comm import Comm
from minidist.core.optim import AdamW
from minidist.core.pipeline.runtime import split_model
from minidist.pipeline.runtime.pipeline import Pipeline
from minidist.pipeline.schedules import get_schedule
from minidist.report.bench.harness import Step, Times, report_with_torch, row_of, run_ranks, time_on_ranks
from minidist.report.bench.workloads import ADAMW, CASES, StepCase, gpt_case, make_batch, make_model, own_step

TORCH_SCHEDULES = {"gpipe": "ScheduleGPipe", "1f1b": "Schedule1F1B"}
TARGETS = {4: 0.95, 8: 0.80}  # of PyTorch's time, by the number of micro-batches
ALONE = 0.72  # of the step of one rank


def bench_pipeline(
    stages: int = 2, schedule: str = "1f1b", microbatches: int = 4, rounds: int = 8, case: str = "gpt"
) -> dict[str, Any]:
    """Return {environment, rows}: against PyTorch (ratio None without it), and against one rank alone.

    Starts `mpiexec -n stages` itself.
    """
    batch = gpt_case(case, "bench pipeline").batch
    if batch % microbatches:
        raise UsageError(f"bench pipeline: --microbatches {microbatches} does not divide the batch of {batch}")
    get_schedule(schedule).plan(stages, microbatches)
    return run_ranks(main, stages, case, schedule, microbatches, rounds)


def own_pipeline(
    case: StepCase, comm: Comm, schedule: str, microbatches: int, dtype: Any = np.float32
) -> tuple[Pipeline, Step]:
    """Return our pipeline and its step."""
    # PyTorch's GPipe runs backwards in the order of the forwards.
    options: dict[str, Any] = {"backward_order": "forward"} if schedule == "gpipe" else {}
    plan = get_schedule(schedule).plan(comm.size, microbatches, **options)
    stages, tied = split_model(make_model(case, dtype), plan.stages, plan.stages_of(comm.rank))
    inputs, targets = make_batch(case)

    # Each micro-batch's loss is its share of the mean over the whole batch.
    divisor = float(targets.size)
    pipe = Pipeline(comm, plan, stages, lambda logits, labels: cross_entropy(logits, labels, divisor), tied=tied)
    optimizers = [AdamW(flat, **ADAMW) for flat in pipe.flats if len(flat)]
    cut = [np.ascontiguousarray(part) for part in np.split(inputs, microbatches)]
    labels = np.split(targets, microbatches)

    def step() -> float:
        pipe.zero_grad()
        losses = pipe.step(cut, labels)
        for optimizer in optimizers:
            optimizer.step()
        return sum(losses)

    return pipe, step


def torch_stage(case: StepCase, comm: Comm, dtype: Any = np.float32) -> Any:
    """Return this rank's part of PyTorch's twin, cut as `split_model` cuts ours; the tied head is a copy."""
    import torch
    from torch import nn

    from minidist.report.bench.torch_peer import torch_twin

    twin = torch_twin(case, make_model(case, dtype), torch.float64 if dtype == np.float64 else torch.float32)
    assert case.config is not None

    # The same blocks as ours: the first stage has the embedding, the last one the norm and the head.
    bounds = offsets(chunk_sizes(case.config.n_layer, comm.size))
    first, last = bounds[comm.rank], bounds[comm.rank + 1]
    embeds, heads = comm.rank == 0, comm.rank == comm.size - 1

    class Stage(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            if embeds:
                self.wte, self.wpe = twin.transformer.wte, twin.transformer.wpe
            self.h = twin.transformer.h[first:last]
            if heads:
                self.ln_f, self.head = twin.transformer.ln_f, nn.Parameter(twin.lm_head.weight.detach().clone())

        def forward(self, x: Any) -> Any:
            if embeds:
                x = self.wte(x) + self.wpe(torch.arange(x.shape[1]))
            for block in self.h:
                x = block(x)
            return nn.functional.linear(self.ln_f(x), self.head) if heads else x

    return Stage()


def torch_pipeline(
    case: StepCase, comm: Comm, schedule: str, microbatches: int, dtype: Any = np.float32
) -> tuple[Any, Callable[..., float]]:
    """Return PyTorch's stage and its step, on the default process group."""
    import torch
    import torch.distributed as dist
    from torch.distributed import pipelining

    from minidist.report.bench.torch_peer import torch_adamw

    module = torch_stage(case, comm, dtype)
    inputs, targets = (torch.from_numpy(a) for a in make_batch(case))
    stage = pipelining.PipelineStage(module, comm.rank, comm.size, torch.device("cpu"))

    def loss_of(logits: Any, labels: Any) -> Any:
        return torch.nn.functional.cross_entropy(logits.view(-1, logits.shape[-1]), labels.reshape(-1))

    runner = getattr(pipelining, TORCH_SCHEDULES[schedule])(stage, microbatches, loss_fn=loss_of)
    optimizer = torch_adamw(module.parameters())

    # The tied weight lies on the first and the last stage, which sum its gradients, as ours do.
    tied = module.wte.weight if comm.rank == 0 else module.head if comm.rank == comm.size - 1 else None
    ends = dist.new_group([0, comm.size - 1])

    def step(update: bool = True) -> float:
        optimizer.zero_grad(set_to_none=True)
        losses: list[Any] = []
        if comm.rank == 0:
            runner.step(inputs)
        elif comm.rank == comm.size - 1:
            runner.step(target=targets, losses=losses)
        else:
            runner.step()
        if tied is not None:
            dist.all_reduce(tied.grad, group=ends)
        if update:
            optimizer.step()
        loss = (
            torch.stack(losses).mean().reshape(1) if losses else torch.zeros(1, dtype=next(module.parameters()).dtype)
        )

        # Every rank knows the loss, as on our side.
        dist.broadcast(loss, comm.size - 1)
        return float(loss.item())

    return module, step


def rows(times: Times, schedule: str, stages: int, microbatches: int, rounds: int) -> list[dict[str, Any]]:
    """Return the two ratios, and the ideal: the share of a step that GPipe's and 1F1B's bubble leaves."""
    name = f"{schedule}, {stages} stages, {microbatches} micro-batches"
    against_torch = row_of(f"{name}, against torch pipelining on gloo", times, "pipeline", "torch", rounds)
    alone = row_of(f"{name}, against one rank alone", times, "pipeline", "alone", rounds, ALONE)
    # The bubble: m micro-batches on p stages take (m + p - 1) / m times a stage's work, which is 1 / p of all.
    ideal = (1 + (stages - 1) / microbatches) / stages
    return [{**against_torch, "target": TARGETS.get(microbatches)}, {**alone, "ideal": ideal}]


def compare(
    case: StepCase, schedule: str, microbatches: int, rounds: int, world: MPIWorld, with_torch: bool
) -> list[dict[str, Any]]:
    """Return the two rows. The losses of all sides must agree."""
    comm = world.comm
    sides: dict[str, Step] = {
        "pipeline": own_pipeline(case, comm, schedule, microbatches)[1],
        # Rank 0 makes the whole step alone, and the others wait for it at the barrier.
        "alone": own_step(case, make_model(case)) if comm.rank == 0 else lambda: 0.0,
    }
    if with_torch:
        sides["torch"] = torch_pipeline(case, comm, schedule, microbatches)[1]
    times = time_on_ranks(world, sides, rounds, [name for name in sides if comm.rank == 0 or name != "alone"])
    return rows(times, schedule, comm.size, microbatches, rounds)


def main(case_name: str, schedule: str, microbatches: int, rounds: int) -> None:
    """Run one rank of the benchmark."""
    report_with_torch(partial(compare, CASES[case_name], schedule, microbatches, rounds), schedule in TORCH_SCHEDULES)
