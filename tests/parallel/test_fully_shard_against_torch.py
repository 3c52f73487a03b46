"""PyTorch's FSDP2 as an oracle: the same GPT, sharded by blocks over gloo, after five steps of AdamW in float64."""

import numpy as np
import pytest

from minidist.core.base.errors import UsageError
from minidist.core.parallel.fsdp import shards_of
from minidist.course.lesson.mpi_leg import mpiexec
from minidist.parallel import gather_tensors
from minidist.report.bench.harness import join_gloo
from minidist.report.bench.parallel import bench_data_parallel, own_side, torch_side
from minidist.report.bench.workloads import CASES


@pytest.mark.peers
@pytest.mark.mpi(2, timeout=120)
def test_gradients_and_weights_are_fsdp2_s_over_five_steps(comm):
    dist = pytest.importorskip("torch.distributed")
    join_gloo(comm.world)
    ours, model, optimizer = own_side("zero 3", CASES["gpt-tiny"], comm, np.float64)
    theirs, module = torch_side("torch zero 3", CASES["gpt-tiny"], comm.rank, comm.size, np.float64)
    for _ in range(5):
        assert abs(ours() - theirs()) <= 1e-10
        # {kind: {name: whole array}}; on PyTorch's side full_tensor() gathers the shards.
        mine = gather_tensors(shards_of(model), optimizer)
        for name, parameter in module.named_parameters():
            for kind, tensor in (("weights", parameter.detach()), ("gradients", parameter.grad)):
                whole = tensor.full_tensor().numpy()
                np.testing.assert_allclose(mine[kind][name], whole, rtol=0, atol=1e-10, err_msg=f"{kind} {name}")
    dist.destroy_process_group()
    assert len(mine["weights"]) == 28
    assert max(float(np.abs(gradient).max()) for gradient in mine["gradients"].values()) > 0.05


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
