"""Process settings, in a process of their own."""

import subprocess
import sys
from pathlib import Path

import minidist

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


def test_one_blas_thread_and_memory_that_stays():
    subprocess.run([sys.executable, "-c", CODE], check=True, cwd=Path(minidist.__file__).parents[1])
