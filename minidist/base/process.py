"""Settings of the operating-system process that make a training step fast: one BLAS thread, and memory that stays warm.

glibc gives freed blocks above a threshold back to the kernel at once and fetches them again at the next step, page by
page: 20,000 minor page faults a step, an eighth of the time. Two `mallopt` calls keep the memory. They change the whole
process, therefore they are made by `launch()` and the command line, on purpose, and never at import. The one exception
is `import minidist.course.lesson`, which limits BLAS threads, because a notebook has no other place for it.

Proved by: tests/base/test_process.py
"""

import atexit
import ctypes
import gc
import importlib
import os
import select
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

_M_TRIM_THRESHOLD = -1
_M_TOP_PAD = -2
_M_MMAP_THRESHOLD = -3
_MADV_HUGEPAGE = 14
_MIB = 1024 * 1024
_SINGLE_THREADED = 1  # Accelerate's BLAS_THREADING_SINGLE_THREADED


def tune_process(blas_threads: int | None = 1, keep_memory: bool = True) -> dict[str, object]:
    """Set the number of BLAS threads (None leaves it) and keep freed memory. Returns what was done, for reports.

    "blas_threads" in the answer is read back from the libraries; it is None when nothing could be limited. NumPy is
    imported first, because a library that is not loaded yet cannot be limited. threadpoolctl knows every BLAS but
    Apple's Accelerate, which NumPy's wheels for macOS use; see `_limit_accelerate`.
    "keep_memory" is the answer of `keep_freed_memory`. `MINIDIST_BLAS=mkl` lets MKL multiply matrices (see mkl.py); not
    in a notebook, which keeps no memory.
    """
    if keep_memory and (variable := os.environ.get("MINIDIST_BLAS")):
        from minidist.base.mkl import use_products_of

        use_products_of(variable)
    done: dict[str, object] = {"blas_threads": None, "keep_memory": False}
    if blas_threads is not None:
        importlib.import_module("numpy")
        import threadpoolctl

        libraries = threadpoolctl.ThreadpoolController()
        libraries.limit(limits=blas_threads)
        limited = [library["num_threads"] for library in libraries.info()]
        if sys.platform == "darwin" and _limit_accelerate(blas_threads):
            limited.append(blas_threads)
        done["blas_threads"] = max(limited, default=None)
    if keep_memory:
        done["keep_memory"] = keep_freed_memory()
    return done


def leave_standard_output() -> None:
    """Let go of what standard output has not taken, so that Python does not try again when it ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def end_if_nobody_reads() -> None:
    """After a BrokenPipeError: end as other programs do in `... | head`, if standard output has no reader any more."""
    if not hasattr(select, "poll"):
        return
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)
    if any(event & select.POLLERR for _, event in poll.poll(0)):
        leave_standard_output()
        sys.exit(128 + signal.SIGPIPE)


@cache
def flush_at_the_end() -> None:
    """Write what `print` has kept when the process ends; a reader that has gone, as of `... | head`, is no error."""

    def flush() -> None:
        try:
            sys.stdout.flush()
        except BrokenPipeError:
            leave_standard_output()
        except (AttributeError, ValueError):
            return  # there is none, or it is closed

    atexit.register(flush)


def keep_freed_memory() -> bool:
    """Keep freed memory in the process. `mallopt` is glibc's; elsewhere, or when it refuses, the answer is False.

    Blocks of up to 32 MiB (glibc's largest allowed threshold) come from the heap, which is trimmed only above 1 GiB.
    512 MiB of it are reserved, and touched only when they are used, so that they can be pages of 2 MiB; not where the
    address space is limited, which threads and shared memory need, too.
    """
    libc: Any = ctypes.CDLL(None) if sys.platform.startswith("linux") else None
    if not hasattr(libc, "mallopt"):
        return False
    mmap_set = libc.mallopt(_M_MMAP_THRESHOLD, 32 * _MIB) == 1
    trim_set = libc.mallopt(_M_TRIM_THRESHOLD, 1024 * _MIB) == 1

    import resource

    unlimited = resource.getrlimit(resource.RLIMIT_AS)[0] == resource.RLIM_INFINITY
    if mmap_set and trim_set and unlimited and hasattr(libc, "sbrk") and hasattr(libc, "madvise"):
        _reserve_huge_pages(libc, 512 * _MIB)
    return bool(mmap_set and trim_set)


def _reserve_huge_pages(libc: ctypes.CDLL, size: int) -> None:
    """Let the heap grow by `size` bytes at once, and advise the kernel to use pages of 2 MiB for them.

    The TLB of a processor has one or two thousand entries. With pages of 4 KiB they cover a few MiB, less than the
    arrays of a training step, which takes 3 to 6 % less time with large pages. A second call does not grow the heap.
    """
    libc.sbrk.restype = libc.malloc.restype = ctypes.c_void_p
    before = libc.sbrk(ctypes.c_ssize_t(0))
    libc.mallopt(_M_TOP_PAD, size)
    libc.free(ctypes.c_void_p(libc.malloc(ctypes.c_size_t(16 * _MIB))))
    libc.mallopt(_M_TOP_PAD, 128 * 1024)  # glibc's default
    first_page = -(-before // (2 * _MIB)) * 2 * _MIB
    if (length := libc.sbrk(ctypes.c_ssize_t(0)) - first_page) > 0:
        libc.madvise(ctypes.c_void_p(first_page), ctypes.c_size_t(length), _MADV_HUGEPAGE)


@contextmanager
def infrequent_gc() -> Iterator[None]:
    """Run the cyclic garbage collector less often inside the block: its threshold is 100,000 instead of 700.

    A dry run, or a search of layouts, makes millions of small objects that are freed without the collector, which takes
    a sixth of its time.
    """
    thresholds = gc.get_threshold()
    gc.set_threshold(100_000, 50, 50)
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)


def _limit_accelerate(threads: int) -> bool:
    """Let Apple's Accelerate compute with one thread: it knows one and all, and nothing between. Returns success.

    macOS 15 has a call for it; before, the library reads a variable when it first computes, and so do child processes.
    """
    if threads != 1:
        return False
    os.environ.setdefault("VECLIB_MAXIMUM_THREADS", "1")
    try:
        accelerate = ctypes.CDLL("/System/Library/Frameworks/Accelerate.framework/Accelerate")
    except OSError:  # NumPy was built with another BLAS
        return False
    set_threading = getattr(accelerate, "BLASSetThreading", None)
    if set_threading is not None:
        set_threading(ctypes.c_uint(_SINGLE_THREADED))
    return True


def usable_cores() -> list[int]:
    """Return the cores that this process may use; where the system does not say which (macOS, Windows), all of them."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))
