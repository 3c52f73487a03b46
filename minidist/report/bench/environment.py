"""What decides a timing: the processor, the BLAS of both sides, and what else the machine did meanwhile.

Proved by: tests/bench/test_environment.py
"""

import importlib.util
import os
import platform
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

BUSY = 0.05  # processors: with more that other processes keep busy, a ratio is not to be trusted


def has_torch() -> bool:
    """Return whether PyTorch is installed here."""
    return importlib.util.find_spec("torch") is not None


def environment(with_torch: bool) -> dict[str, Any]:
    """Return what decides a timing: processor, thread counts, BLAS libraries and the kernels that they chose."""
    import threadpoolctl

    # PyTorch first: threadpoolctl knows the libraries that are loaded.
    theirs: dict[str, Any] = {}
    if with_torch:
        import torch

        theirs["torch"] = torch.__version__
        built = re.search(r"BLAS_INFO=(\w+)", torch.__config__.show())
        theirs["torch_blas"] = built[1] if built else "unknown"
        theirs["torch_capability"] = torch.backends.cpu.get_cpu_capability()
        theirs["torch_threads"] = torch.get_num_threads()
        theirs["torch_mkl"] = torch.backends.mkl.is_available()

    pools = [
        {key: pool.get(key) for key in ("internal_api", "version", "architecture", "num_threads")}
        for pool in threadpoolctl.threadpool_info()
    ]
    built_with = np.show_config(mode="dicts").get("Build Dependencies", {}).get("blas", {})
    return {
        "processor": processor(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "numpy_blas": f"{built_with.get('name', 'unknown')} {built_with.get('version', '')}".strip(),
        "OPENBLAS_CORETYPE": os.environ.get("OPENBLAS_CORETYPE"),
        "MINIDIST_BLAS": os.environ.get("MINIDIST_BLAS"),
        "threadpools": pools,
        **theirs,
    }


def processor(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Return the name of the processor, and the widest vectors that it says it has."""
    try:
        lines = [line.partition(":") for line in cpuinfo.read_text(encoding="utf-8").splitlines()]
    except OSError:
        lines = []
    found = {name.strip(): value.strip() for name, _, value in lines}
    name = found.get("model name") or platform.processor() or platform.machine()
    flags = found.get("flags", "").split()
    return name + next((f", {text}" for flag, text in (("avx512f", "AVX-512"), ("avx2", "AVX2")) if flag in flags), "")


class Others:
    """How many processors the processes that do not belong to a benchmark kept busy while it ran."""

    cores: float | None = None  # None until the end, and where the system does not say

    def sentence(self) -> str | None:
        """Return a warning, or None when the machine was quiet enough, or is not known to have been busy."""
        if self.cores is None or self.cores <= BUSY:
            return None
        return (
            f"the machine is busy: other processes kept {self.cores:.2f} of its {os.cpu_count()} processors busy while"
            " this was measured, so the ratios may be wrong; measure again when nothing else runs"
        )


@contextmanager
def other_processes(stat: Path = Path("/proc/stat")) -> Iterator[Others]:
    """Measure what other processes did inside the block, from Linux's counts for all processors and for our processes.

    Processes that were started inside the block count as ours once they have ended.
    """
    others = Others()
    before = _processor_seconds(stat)
    yield others
    after = _processor_seconds(stat)
    if before is not None and after is not None and after[2] > before[2]:
        everyone, ours, clock = (b - a for a, b in zip(before, after, strict=True))
        others.cores = max(0.0, everyone - ours) / clock


def _processor_seconds(stat: Path) -> tuple[float, float, float] | None:
    """Return the seconds that all processors were busy, those of our processes, and the clock; None if unknown."""
    try:
        counts = [int(text) for text in stat.read_text(encoding="ascii").split("\n", 1)[0].split()[1:9]]
        tick = os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError):
        return None
    user, nice, system, _, _, irq, soft_irq, stolen = counts
    times = os.times()
    ours = times.user + times.system + times.children_user + times.children_system
    return (user + nice + system + irq + soft_irq + stolen) / tick, ours, times.elapsed
