"""The few numbers that no formula gives, each with its source: efficiencies, latencies and constants of memory.

The values are fitted, by least squares of logarithms, to published step times and peaks: Megatron-LM on A100
(Narayanan et al., SC 2021, tables 1 and 2; Korthikanti et al., 2022, table 5), vTrain's measurements on A100 (Bang et
al., MICRO 2024, MIT license), MPT on A100 and H100 (llm-foundry, Apache-2.0), torchtitan's tables on H100, MLPerf
Training 4.1, Llama 3 (arXiv:2407.21783, table 4), Megatron-Bridge on H100, B200 and GB200 (Apache-2.0), fms-fsdp
(Apache-2.0), and the peaks of Megatron-LM's functional tests (Apache-2.0). Of each source's step times one half, chosen
by a hash of model and layout, was used; docs/planner.md has the errors of the other half.

Proved by: tests/planning/test_published.py
"""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Calibration:
    """Constants of time (seconds, shares of a peak) and of memory (bytes, factors)."""

    # The share of a GPU family's peak that matrix products reach, with 2-byte values and with 8-bit ones, and
    # attention's core. No card of the first family was measured with 8-bit values.
    product_efficiency: Mapping[str, float] = field(default_factory=lambda: {"a100": 0.795, "h100": 0.65, "b200": 0.74})
    fp8_efficiency: Mapping[str, float] = field(default_factory=lambda: {"a100": 0.745, "h100": 0.745, "b200": 0.85})
    expert_efficiency: float = 0.66  # of the products of experts, as a multiple
    attention_efficiency: Mapping[str, float] = field(
        default_factory=lambda: {"a100": 0.317, "h100": 0.18, "b200": 0.285}
    )

    # A block's other operations move its activations so often, at a share of the memory's bandwidth.
    block_passes: float = 24.0
    memory_efficiency: float = 0.8

    # The host launches the kernels of a block's forward pass in this time; a step has a constant part.
    launch_seconds: float = 1.04e-3
    # A block with experts has a router, permutations and exchanges.
    sparse_launch_seconds: float = 2.35e-3

    # Four permutations of the copies of tokens that experts get; each reads and writes them. Counted, not fitted.
    permutation_passes: float = 8.0
    step_seconds: float = 22e-3

    # Collectives: shares of the nominal bandwidths, and seconds per step of a ring.
    link_efficiency: float = 0.9
    network_efficiency: float = 0.77
    message_seconds: float = 1.2e-5

    # A pipeline rank waits for its neighbour: of each message between stages, in addition to the bytes.
    handoff_seconds: float = 2e-4

    # Shares of the gradients' and of ZeRO 3's messages that are never hidden; how much of computing hides the others.
    gradients_exposed: float = 0.13
    shards_exposed: float = 0.27
    shards_hidden: float = 0.50

    # The optimizer reads and writes its states so often.
    update_passes: float = 1.2

    # Bytes in addition to what is counted; bytes per logit (2-byte values, a float32 copy or its gradient).
    constant_bytes: float = 1.0e8
    logit_bytes: float = 6.0

    # A prediction is a range: peaks and seconds times these.
    memory_range: tuple[float, float] = (0.95, 1.1)
    # What PyTorch's allocator reserves, as a multiple of what eager kernels allocate: of eight language models on A100
    # 15 % of it were fragments in the mean (Guo et al., GMLake, ASPLOS 2024). Fused kernels allocate few sizes.
    eager_reserved: float = 1 / (1 - 0.15)
    time_range: tuple[float, float] = (0.85, 1.2)
    sparse_time_range: tuple[float, float] = (0.7, 1.5)  # of a model with experts

    # What a GPU's memory also holds: the device's context and the communication library's buffers.
    reserved_bytes: float = 1.0e9


CALIBRATION = Calibration()
