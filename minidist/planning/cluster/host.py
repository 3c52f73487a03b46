"""What is kept in host memory: the bytes that leave the GPU, and the seconds for which the GPU waits.

    optimizer     gradients go to the host, which updates the float32 copies; the new values come back
                  (Ren et al., 2021, arXiv:2101.06840, section 4)
    activations   what blocks keep for backward goes to the host and comes back; the GPU has two blocks at a time
    parameters    with ZeRO 3: shards of parameters, gradients and optimizer are on the host; each micro-batch fetches
                  the parameters twice and sends its gradients (Rajbhandari et al., 2021, arXiv:2104.07857)

Transfers run while the GPU computes, as far as computing lasts. The update on the host, and the transfer of new values
after it, do not. The speeds are of a node with PCIe 4 and eight GPUs; none of them is fitted.

Proved by: tests/planning/test_decision.py
"""

from minidist.planning.cluster.layout import ClusterLayout, Job

CHOICES = ("none", "optimizer", "activations", "parameters")
LINK = 25e9  # bytes per second of a GPU, in each direction: PCIe 4 x16 reaches 25 of its 32 GB/s
BANDWIDTH = 25e9  # bytes per second of the host's memory for each GPU: 200 GB/s for eight
UPDATE_BYTES = 28  # that Adam reads and writes per parameter: float32 gradient, and value and two moments twice


def divided(layout: ClusterLayout, kinds: dict[str, int], two_blocks: int) -> tuple[dict[str, int], int]:
    """Return a rank's bytes by kind without what is on the host, and the bytes of the host.

    two_blocks: the activations of the block at work and of the one in transfer.
    """
    stay = {
        "none": kinds,
        "optimizer": kinds | {"optimizer": 0},
        "parameters": kinds | {"parameters": 0, "gradients": 0, "optimizer": 0},
        "activations": kinds | {"activations": min(kinds["activations"], two_blocks)},
    }[layout.host]
    return stay, sum(kinds.values()) - sum(stay.values())


def waiting_seconds(layout: ClusterLayout, job: Job, parameters: float, kept: float, compute: float) -> float:
    """Return the seconds of a step in which a GPU waits for the host.

    parameters: those that a rank updates. kept: bytes that its blocks keep of a micro-batch. compute: seconds in which
    transfers are hidden.
    """
    update = UPDATE_BYTES * parameters / BANDWIDTH
    if layout.host == "optimizer":
        return max(0.0, job.gradient_bytes * parameters / LINK - compute) + update + 2 * parameters / LINK
    if layout.host == "activations":
        return max(0.0, 2 * layout.microbatches * kept / LINK - compute)
    if layout.host == "parameters":
        moved = layout.microbatches * (2 * 2 + job.gradient_bytes) * parameters
        return max(0.0, moved / LINK - compute) + update
    return 0.0
