"""How fast is a pipeline step, beside `torch.distributed.pipelining` on gloo in the same processes, and beside one rank
alone?

Each rank of an `mpiexec` holds one stage of the same GPT twice, ours and PyTorch's. A round times, after a barrier
each, one side and then the other; a step takes as long as its slowest rank. The third side is the whole model on rank
0, which makes the step of the whole batch in one pass, while the others wait. Losses are compared before a ratio is
printed. Checks (headers) are off.
"""

import json
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from minidist.autograd import cross_entropy
from minidist.base.errors import MinidistError, UsageError
from minidist.base.process import tune_process
from minidist.bench.parallel import measure
from minidist.bench.step import CASES, Step, StepCase, environment, make_batch, make_model, own_step, torch_twin
from minidist.comm import Comm
from minidist.comm.launcher import run_under_mpiexec
from minidist.comm.mpi.world import MPIWorld
from minidist.optim import AdamW
from minidist.pipeline.plan import get_schedule
from minidist.pipeline.runtime import Pipeline, split_model

TORCH_SCHEDULES = {"gpipe": "ScheduleGPipe", "1f1b": "Schedule1F1B"}
TARGETS = {4: 0.95, 8: 0.80}  # of PyTorch's time, by the number of micro-batches
ALONE = 0.72  # of the step of one rank
RATE, DECAY = 1e-3, 0.01


def bench_pipeline(
    stages: int = 2, schedule: str = "1f1b", microbatches: int = 4, rounds: int = 8, case: str = "gpt"
) -> dict[str, Any]:
    """{environment, rows}: against PyTorch (ratio None without it), and against the step of one rank alone. Starts
    mpiexec.
    """
    if case not in CASES or CASES[case].config is None:
        raise UsageError(
            f"bench pipeline: no GPT case {case!r}; one of {', '.join(n for n, c in CASES.items() if c.config)}"
        )
    if CASES[case].batch % microbatches:
        raise UsageError(
            f"bench pipeline: --microbatches {microbatches} does not divide the batch of {CASES[case].batch}"
        )
    get_schedule(schedule).plan(stages, microbatches)
    answer = run_under_mpiexec(
        stages, ["-m", "minidist.bench.pipeline", case, schedule, str(microbatches), str(rounds)]
    )
    return json.loads(answer.stdout)  # type: ignore[no-any-return]


def own_pipeline(
    case: StepCase, comm: Comm, schedule: str, microbatches: int, dtype: Any = np.float32
) -> tuple[Pipeline, Step]:
    """Our pipeline and its step."""
    options: dict[str, Any] = {"backward_order": "forward"} if schedule == "gpipe" else {}  # as PyTorch's
    plan = get_schedule(schedule).plan(comm.size, microbatches, **options)
    stages, tied = split_model(make_model(case, dtype), plan.stages, plan.stages_of(comm.rank))
    inputs, targets = make_batch(case)
    divisor = float(targets.size)
    pipe = Pipeline(comm, plan, stages, lambda logits, labels: cross_entropy(logits, labels, divisor), tied=tied)
    optimizers = [AdamW(flat, lr=RATE, weight_decay=DECAY) for flat in pipe.flats if len(flat)]
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
    """This rank's part of PyTorch's twin: the blocks that `split_model` gives it, with embedding or head; a tied head
    is a copy.
    """
    import torch
    from torch import nn

    from minidist.base.layout import chunk_sizes, offsets

    twin = torch_twin(case, make_model(case, dtype), torch.float64 if dtype == np.float64 else torch.float32)
    assert case.config is not None
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
    case: StepCase, comm: Comm, schedule: str, microbatches: int, rendezvous: str, dtype: Any = np.float32
) -> tuple[Any, Callable[[], float]] | None:
    """PyTorch's stage and its step over gloo, in this process; None when torch is not installed."""
    try:
        import torch
        import torch.distributed as dist
        from torch.distributed import pipelining
    except ImportError:
        return None
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=comm.rank, world_size=comm.size)
    module = torch_stage(case, comm, dtype)
    inputs, targets = (torch.from_numpy(a) for a in make_batch(case))
    stage = pipelining.PipelineStage(module, comm.rank, comm.size, torch.device("cpu"))

    def loss_of(logits: Any, labels: Any) -> Any:
        return torch.nn.functional.cross_entropy(logits.view(-1, logits.shape[-1]), labels.reshape(-1))

    runner = getattr(pipelining, TORCH_SCHEDULES[schedule])(stage, microbatches, loss_fn=loss_of)
    optimizer = torch.optim.AdamW(module.parameters(), lr=RATE, weight_decay=DECAY, fused=True)
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
        dist.broadcast(loss, comm.size - 1)  # known on every rank, as ours is
        return loss.item()

    return module, step


def main(case_name: str, schedule: str, microbatches: int, rounds: int) -> None:
    """One rank of the benchmark; rank 0 prints the result as JSON."""
    tune_process()
    world = MPIWorld(checks=False, timeout=300, record=False)
    comm, case = world.comm, CASES[case_name]
    folder = world.base.bcast(tempfile.mkdtemp() if comm.rank == 0 else None)
    _, ours = own_pipeline(case, comm, schedule, microbatches)
    theirs = (
        torch_pipeline(case, comm, schedule, microbatches, str(Path(folder) / "rendezvous"))
        if schedule in TORCH_SCHEDULES
        else None
    )
    whole = own_step(case, make_model(case)) if comm.rank == 0 else lambda: 0.0
    for number in range(3):  # warms up, too
        mine, alone = ours(), whole()
        others = [("PyTorch's", theirs[1]())] if theirs is not None else []
        for name, loss in [*others, *([("one rank's", alone)] if comm.rank == 0 else [])]:
            if not abs(mine - loss) <= 2e-4 * max(1.0, abs(loss)):
                raise MinidistError(
                    f"rank {comm.rank}: step {number} has loss {mine}, {name} {loss}; no ratio is given"
                )
    sides = {"pipeline": ours, "alone": whole} | ({} if theirs is None else {"torch": theirs[1]})
    times = measure(world, sides, rounds)
    if comm.rank == 0:
        print(
            json.dumps(
                {
                    "environment": environment(theirs is not None),
                    "rows": rows(times, schedule, comm.size, microbatches, rounds),
                }
            )
        )
    world.finish()
    world.close()


def rows(
    times: dict[str, list[float]], schedule: str, stages: int, microbatches: int, rounds: int
) -> list[dict[str, Any]]:
    """The two ratios, medians over rounds, and the ideal: the share that GPipe's and 1F1B's bubble leaves."""

    def ratio(other: str) -> float | None:
        return (
            statistics.median(a / b for a, b in zip(times["pipeline"], times[other], strict=True))
            if other in times
            else None
        )

    name = f"{schedule}, {stages} stages, {microbatches} micro-batches"
    shared = {"median_s": float(np.median(times["pipeline"])), "rounds": rounds}
    return [
        {
            "name": f"{name}, against torch pipelining on gloo",
            "ratio": ratio("torch"),
            **shared,
            "target": TARGETS.get(microbatches),
        },
        {
            "name": f"{name}, against one rank alone",
            "ratio": ratio("alone"),
            **shared,
            "target": ALONE,
            "ideal": (1 + (stages - 1) / microbatches) / stages,
        },
    ]


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
