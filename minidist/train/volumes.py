"""What a job must send, by purpose, in closed form: printed beside what the trace counted, and asserted.

With Psi elements (padded), k micro-batches a rank and n ranks, each rank sends (n-1)/n of, a step:

                     gradient_reduce    parameter_gather
    data parallel         2 Psi                 -            2 k Psi when every micro-batch is reduced
    ZeRO 1                  Psi               Psi
    ZeRO 2                k Psi               Psi
    ZeRO 3                k Psi             2 k Psi          a gather for forward, one for backward
"""

from minidist.collectives import closed_form
from minidist.optim import NORM_BLOCK
from minidist.train.config import Batches, TrainConfig

LOSS_BYTES = 8  # a micro-batch's loss travels as one float64
NORM_BYTES = 8  # the sum of a block's squares too
DIGEST_BYTES = 16  # of the names and shapes of a unit, see data_parallel.check_same_model


def closed_form_bytes(
    config: TrainConfig, batches: Batches, elements: int, bucket_sizes: list[int], itemsize: int, unit_sizes: list[int] | None = None
) -> dict[str, int]:
    """Payload bytes that all ranks together send in a job of `config.steps` steps.

    elements: of the flat parameters, with padding. bucket_sizes: elements of each gradient message of a micro-batch.
    itemsize: bytes of one. unit_sizes: elements of each flat unit; by default one.
    """
    n, steps, k = batches.dp, config.steps, batches.accumulation
    units = [elements] if unit_sizes is None else unit_sizes
    reductions = steps * (k if config.synchronize_each or config.zero >= 2 else 1)
    if config.zero:  # reduce-scatter: every rank sends all but its own part, together (n - 1) times the whole
        a_reduction = (n - 1) * sum(bucket_sizes) * itemsize
    else:
        a_reduction = sum(closed_form.all_reduce(size, n, rank)[1] for size in bucket_sizes for rank in range(n)) * itemsize
    gathers = {0: 0, 1: steps, 2: steps, 3: 2 * k * steps}[config.zero]
    blocks = sum(units) // NORM_BLOCK if config.zero and config.clip is not None else 0
    volumes = {
        "startup": closed_form.broadcast(1, n, 0)[1] * (sum(units) * itemsize + len(units) * DIGEST_BYTES),
        "gradient_reduce": reductions * a_reduction,
        "parameter_gather": gathers * (n - 1) * sum(units) * itemsize,
        "clip_norm": steps * (n - 1) * blocks * NORM_BYTES,
        "metrics": steps * n * (n - 1) * k * LOSS_BYTES,
    }
    return {purpose: volume for purpose, volume in volumes.items() if volume}
