"""PyTorch's FSDP2 as an oracle: the same GPT, sharded by blocks over gloo, after five steps of AdamW in float64."""

import json

import pytest

from minidist.comm.launcher import run_under_mpiexec
from minidist.core.base.errors import UsageError
from minidist.course.lesson.mpi_leg import mpiexec
from minidist.report.bench.parallel import bench_data_parallel


@pytest.mark.peers
@pytest.mark.skipif(mpiexec() is None, reason="needs mpi4py and an mpiexec: pip install 'minidist[mpi]'")
def test_gradients_and_weights_are_fsdp2_s_over_five_steps():
    pytest.importorskip("torch")
    report = json.loads(
        run_under_mpiexec(
            2, ["-m", "minidist.report.bench.parallel", "gpt-tiny", "check", "", "torch"], timeout=120
        ).stdout
    )
    assert (report["parameters"], report["steps"]) == (28, 5)
    assert report["largest_gradient"] > 0.05
    assert all(difference <= 1e-10 for difference in report["largest_difference"].values())


@pytest.mark.skipif(mpiexec() is None, reason="needs mpi4py and an mpiexec: pip install 'minidist[mpi]'")
def test_the_stages_are_timed_beside_each_other():
    rows = bench_data_parallel(2, 2, "gpt-tiny", [1, 2, 3], None)["rows"]
    named = {row["name"]: row for row in rows}
    assert named["zero 1, 2 ranks, against our ddp"]["ratio"] > 0
    assert named["fully_shard, 2 ranks, against our ddp"]["target"] == 1.25
    assert all((row["ratio"] is None) == ("torch" in row["name"]) for row in rows)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("mlp", []), "no GPT case 'mlp'"),
        (("gpt", [4]), "the stages are 1, 2 and 3"),
        (("gpt", [1], "jax"), "it can be torch"),
    ],
)
def test_wrong_arguments_are_one_sentence(arguments, sentence):
    with pytest.raises(UsageError, match=sentence):
        bench_data_parallel(2, 2, *arguments)
