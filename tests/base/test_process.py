"""Process settings, in a separate process."""

import ctypes
import gc
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import minidist
from minidist.base import process


def test_cycles_are_collected_rarely_in_the_block_only():
    before = gc.get_threshold()
    with process.infrequent_gc():
        assert gc.get_threshold()[0] == 100_000
    assert gc.get_threshold() == before


CODE = """
import resource, sys
import numpy as np
from minidist.base.process import tune_process
done = tune_process()
assert done["blas_threads"] == 1
import threadpoolctl
assert all(p["num_threads"] == 1 for p in threadpoolctl.threadpool_info() if p["user_api"] == "blas")
assert tune_process(None, keep_memory=False) == {"blas_threads": None, "keep_memory": False}
if done["keep_memory"]:
    def churn():
        for _ in range(20):
            a = np.empty(5_000_000, np.uint8); a.fill(1); del a
    churn()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    churn()
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
    assert faults < 20, faults
"""


HEAP = """
import ctypes, re
from pathlib import Path
from minidist.base.process import tune_process
before = Path("/proc/self/statm").read_text().split()
if tune_process(None)["keep_memory"]:
    def advised():
        blocks = re.split(r"(?m)^(?=[0-9a-f]+-)", Path("/proc/self/smaps").read_text())
        large = [b for b in blocks if "[heap]" in b and re.search(r"VmFlags:.* hg", b)]
        return sum(int(re.search(r"Size: +(\\d+)", b)[1]) for b in large)
    bytearray(20 << 20)  # is freed at once, and the heap does not shrink
    assert advised() >= 500 * 1024, advised()
    tune_process(None)
    assert advised() < 700 * 1024, advised()
    resident = int(Path("/proc/self/statm").read_text().split()[1]) - int(before[1])
    assert resident < 10_000, resident  # pages of 4 KiB: nothing is touched
"""


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="Linux")
def test_half_a_gibibyte_of_the_heap_is_reserved_for_large_pages():
    run(HEAP)


def run(code):
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "2", "OMP_NUM_THREADS": "2"}
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(minidist.__file__).parents[1], env=environment)


def test_one_blas_thread_and_memory_that_stays():
    run(CODE)


ONE_THREAD = """
import numpy, threadpoolctl
numbers = [library["num_threads"] for library in threadpoolctl.threadpool_info()]
assert not numbers or set(numbers) == {1}, numbers
"""


def test_blas_is_limited_where_numpy_is_not_loaded_yet():
    run(
        "import sys\nfrom minidist.base.process import tune_process\nassert 'numpy' not in sys.modules\n"
        "done = tune_process()\nassert done['blas_threads'] in (1, None), done\n" + ONE_THREAD
    )


def test_importing_the_lessons_limits_blas():
    run("import minidist.course.lesson\n" + ONE_THREAD)


def test_the_answer_is_what_the_libraries_say(monkeypatch):
    import threadpoolctl

    for said, answer in (([{"num_threads": 3}], 3), ([], None)):
        libraries = SimpleNamespace(limit=lambda limits: None, info=lambda said=said: said)
        monkeypatch.setattr(threadpoolctl, "ThreadpoolController", lambda libraries=libraries: libraries)
        assert process.tune_process(keep_memory=False)["blas_threads"] == answer


@pytest.mark.parametrize("has_call", [True, False])
def test_apple_s_accelerate_gets_one_thread(monkeypatch, has_call):
    """threadpoolctl does not know it. macOS 15 has a call, older systems a variable."""
    calls = []
    library = SimpleNamespace(BLASSetThreading=lambda mode: calls.append(mode.value)) if has_call else SimpleNamespace()
    monkeypatch.setattr(process, "sys", SimpleNamespace(platform="darwin"))
    monkeypatch.setattr(process, "ctypes", SimpleNamespace(CDLL=lambda path: library, c_uint=ctypes.c_uint))
    monkeypatch.setenv("VECLIB_MAXIMUM_THREADS", "4")
    monkeypatch.delenv("VECLIB_MAXIMUM_THREADS")
    process._limit_accelerate(2)  # all or one, nothing between
    assert calls == []
    process.tune_process(1, keep_memory=False)
    assert calls == ([1] if has_call else [])
    assert os.environ["VECLIB_MAXIMUM_THREADS"] == "1"
