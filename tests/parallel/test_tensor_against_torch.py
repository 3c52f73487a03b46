"""PyTorch's tensor parallelism as an oracle: the same blocks, cut by ColwiseParallel and RowwiseParallel over gloo."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from minidist.course.lesson.mpi_leg import mpiexec

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.peers
@pytest.mark.skipif(mpiexec() is None, reason="needs mpi4py and an mpiexec: pip install 'minidist[mpi]'")
def test_every_gathered_gradient_is_pytorchs():
    pytest.importorskip("torch")
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path, "OPENBLAS_NUM_THREADS": "1"}
    command = [mpiexec(), "-n", "2", sys.executable, "-m", "minidist.report.bench.tensor_parallel", "--check"]
    process = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert process.returncode == 0, process.stdout + process.stderr
    answer = json.loads(process.stdout.strip().splitlines()[-1])
    assert answer["parameters"] == 48
    assert answer["largest_gradient"] > 1
    assert answer["largest_difference"] <= 1e-10
