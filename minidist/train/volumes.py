"""What a data-parallel job must send, by purpose, in closed form: printed beside what the trace counted, and asserted."""

from minidist.collectives import closed_form
from minidist.train.config import Batches, TrainConfig

LOSS_BYTES = 8  # a micro-batch's loss travels as one float64
DIGEST_BYTES = 16  # of the model's names and shapes, see data_parallel.check_same_model


def closed_form_bytes(
    config: TrainConfig, batches: Batches, elements: int, bucket_sizes: list[int], itemsize: int
) -> dict[str, int]:
    """Payload bytes that all ranks together send in a job of `config.steps` steps.

    elements: of the flat parameters. bucket_sizes: elements of each gradient bucket. itemsize: bytes of one.
    """
    n, steps = batches.dp, config.steps
    reductions = steps * (batches.accumulation if config.synchronize_each else 1)
    a_reduction = sum(closed_form.all_reduce(size, n, rank)[1] for size in bucket_sizes for rank in range(n)) * itemsize
    volumes = {
        "startup": closed_form.broadcast(1, n, 0)[1] * (elements * itemsize + DIGEST_BYTES),
        "gradient_reduce": reductions * a_reduction,
        "metrics": steps * n * (n - 1) * batches.accumulation * LOSS_BYTES,
    }
    return {purpose: volume for purpose, volume in volumes.items() if volume}
