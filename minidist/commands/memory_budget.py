"""`minidist train --memory-budget BYTES`: the largest micro-batch with which no rank has more bytes alive at a time.

The micro-batches cut a rank's share of --global-batch into equal parts, or parts that differ by one sample, so they
change what is alive at a time and, but for rounding, nothing else. The peak is what the memory account counts in two
steps on simulated ranks, whatever the layout; two, because an optimizer has its state from the first one on. It grows
with the micro-batch, so bisection finds the largest.
A resumed job with the same flags finds the same one.

Proved by: tests/commands/test_memory_budget.py
"""

from minidist.base.errors import UsageError
from minidist.comm import SimWorld
from minidist.comm.launch import under_mpiexec
from minidist.commands.explanation import trial
from minidist.commands.runner import number_of_ranks
from minidist.config.train_config import TrainConfig, flag, resolve_batches
from minidist.train.state import TrainResult
from minidist.train.trainer import train


def fit_micro_batch(config: TrainConfig, ranks: int | None, budget: float) -> tuple[TrainConfig, str]:
    """Return the job with the largest micro-batch that fits `budget` bytes, and a line that says so.

    Raises UsageError when there is no --global-batch to divide, when the micro-batch is given too, under mpiexec, and
    when one sample is too much.
    """
    if under_mpiexec():
        raise UsageError(
            "--memory-budget tries micro-batches on simulated ranks; run it without mpiexec, and then give the"
            " --micro-batch that it prints"
        )
    if config.global_batch is None:
        raise UsageError("--memory-budget divides --global-batch into micro-batches; add --global-batch SAMPLES")
    for name in ("micro_batch", "accumulation", "microbatches"):
        if getattr(config, name) is not None:
            raise UsageError(
                f"--memory-budget chooses the micro-batch, and {flag(name)} {getattr(config, name)} gives it; leave one"
                " of them out"
            )

    # All errors of the settings come first. The largest share, in any number of micro-batches.
    size = number_of_ranks(config.model_copy(update={"accumulation": 1}), ranks)
    shares = [sum(rows) for rows in resolve_batches(config.model_copy(update={"accumulation": 1}), size).shares.rows]
    share = max(shares)
    choices = sorted({-(-share // accumulation) for accumulation in range(1, min(shares) + 1)})

    def peak(micro: int) -> int:
        once = trial(config.model_copy(update={"micro_batch": micro}), 2)
        results: list[TrainResult] = SimWorld(size, record=False).run(train, once)
        return max(result.peak_bytes for result in results)

    # Bisection: choices[low] fits, choices[high] does not.
    fits = peak(choices[0])
    if fits > budget:
        raise UsageError(
            f"--memory-budget {budget:,.0f} B: a rank has {fits:,} B alive at a time even with --micro-batch"
            f" {choices[0]}; raise it, or use more ranks, --zero or --recompute"
        )
    low, high = 0, len(choices)
    while high - low > 1:
        middle = (low + high) // 2
        needed = peak(choices[middle])
        if needed <= budget:
            low, fits = middle, needed
        else:
            high = middle
    micro = choices[low]
    return config.model_copy(update={"micro_batch": micro}), (
        f"--micro-batch {micro} --accumulation {-(-share // micro)}: a rank has {fits:,} B alive at a time, of"
        f" --memory-budget {budget:,.0f}"
    )
