"""torch.distributed.pipelining as an oracle: the same GPT cut at the same place, gradients in float64; and the
benchmark runs.
"""

import numpy as np
import pytest

from minidist.core.base.errors import UsageError
from minidist.core.base.layout import chunk_sizes, offsets
from minidist.report.bench.harness import join_gloo
from minidist.report.bench.pipeline import bench_pipeline, own_pipeline, torch_pipeline
from minidist.report.bench.workloads import CASES, make_batch


def gradients_differ(comm, schedule, microbatches):
    """Largest difference of a gradient of this rank, and the two losses."""
    case = CASES["gpt-tiny"]
    pipe, _ = own_pipeline(case, comm, schedule, microbatches, np.float64)
    join_gloo(comm.world)
    module, step = torch_pipeline(case, comm, schedule, microbatches, np.float64)
    theirs = step(update=False)
    first = offsets(chunk_sizes(case.config.n_layer, comm.size))[comm.rank]
    named = {}
    for name, parameter in module.named_parameters():
        parts = name.split(".")
        if parts[0] == "h":
            parts[1] = str(int(parts[1]) + first)
        named["transformer." + ("wte.weight" if name == "head" else ".".join(parts))] = parameter.grad.numpy()
    return pipe, theirs, named


@pytest.mark.peers
@pytest.mark.mpi(2)
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_gradients_equal_those_of_torch_pipelining(comm, schedule):
    dist = pytest.importorskip("torch.distributed")
    case = CASES["gpt-tiny"]
    pipe, theirs, named = gradients_differ(comm, schedule, 4)
    inputs, targets = make_batch(case)
    losses = pipe.step(np.split(inputs, 4), np.split(targets, 4))
    dist.destroy_process_group()
    assert sum(losses) == pytest.approx(theirs, rel=1e-12)
    mine = {p.name: p.grad for flat in pipe.flats for p in flat.parameters}
    assert mine.keys() == named.keys()
    for name, gradient in mine.items():
        np.testing.assert_allclose(gradient, named[name], rtol=0, atol=1e-10, err_msg=name)


@pytest.mark.peers
@pytest.mark.slow
def test_the_benchmark_runs_and_compares_losses_first():
    pytest.importorskip("torch")
    result = bench_pipeline(2, "1f1b", 4, rounds=1, case="gpt-tiny")
    against, alone = result["rows"]
    assert against["ratio"] > 0
    assert (against["target"], alone["target"], alone["ideal"]) == (0.95, 0.72, 0.625)


def test_what_the_benchmark_cannot_do_is_one_sentence():
    for arguments, sentence in [
        (("1f1b", 3), "--microbatches 3 does not divide the batch of 8"),
        (("1f1", 4), "unknown schedule '1f1'"),
    ]:
        with pytest.raises(UsageError, match=sentence):
            bench_pipeline(2, *arguments)
    with pytest.raises(UsageError, match="no GPT case 'mlp'"):
        bench_pipeline(case="mlp")
