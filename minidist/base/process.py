"""Settings of the operating-system process that make a training step fast: one BLAS thread, and memory that stays warm.

glibc gives freed blocks above a threshold back to the kernel at once and fetches them again at the next step, page by
page: 20,000 minor page faults a step, an eighth of the time. Two `mallopt` calls keep the memory. They change the whole
process, therefore they are made by `launch()` and the command line, on purpose, and never at import.

Proved by: tests/base/test_process.py
"""

import ctypes
import sys

_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3


def tune_process(blas_threads: int | None = 1, keep_memory: bool = True) -> dict[str, object]:
    """Set the number of BLAS threads (None leaves it) and keep freed memory. Returns what was done, for reports.

    `mallopt` is glibc's; elsewhere, or when it refuses, "keep_memory" is False in the answer and nothing is changed.
    Blocks of up to 32 MiB (glibc's largest allowed threshold) come from the heap, which is trimmed only above 512 MiB.
    """
    done: dict[str, object] = {"blas_threads": None, "keep_memory": False}
    if blas_threads is not None:
        import threadpoolctl

        threadpoolctl.threadpool_limits(limits=blas_threads)
        done["blas_threads"] = blas_threads
    if keep_memory and sys.platform.startswith("linux"):
        mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
        if mallopt is not None:
            mmap_set = mallopt(_M_MMAP_THRESHOLD, 32 * 1024 * 1024) == 1
            trim_set = mallopt(_M_TRIM_THRESHOLD, 512 * 1024 * 1024) == 1
            done["keep_memory"] = mmap_set and trim_set
    return done
