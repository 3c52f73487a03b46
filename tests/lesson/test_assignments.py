"""What public courses ask for: a submission by hand gets every point, and typical mistakes get none."""

import inspect
from pathlib import Path

import pytest

from minidist.course.lesson.exercise import exercises
from minidist.course.lesson.grade import grade
from minidist.course.lesson.solutions import solution
from tests.cases import each

cs336, llmsys = (inspect.getmodule(solution(name)) for name in ("cs336.ddp", "llmsys.clock_cycles"))

CSE234 = """
import numpy as np

FOLD = {"sum": np.add, "min": np.minimum, "max": np.maximum}


def myAllreduce(comm, src_array, dest_array, op):
    dest_array[...] = src_array
    travelling = src_array.copy()
    for _ in range(comm.size - 1):
        incoming = np.empty_like(travelling)
        comm.sendrecv(travelling, (comm.rank + 1) % comm.size, incoming, (comm.rank - 1) % comm.size)
        FOLD[op](dest_array, incoming, out=dest_array)
        travelling = incoming


def myAlltoall(comm, src_array, dest_array):
    mine, yours = np.split(src_array, comm.size), np.split(dest_array, comm.size)
    yours[comm.rank][...] = mine[comm.rank]
    for distance in range(1, comm.size):
        to, source = (comm.rank + distance) % comm.size, (comm.rank - distance) % comm.size
        comm.sendrecv(mine[to], to, yours[source], source)


def get_info(comm, rank, mp_size, dp_size, fc_layer, in_dim, out_dim):
    mp_comm, dp_comm = comm.split(rank // mp_size), comm.split(rank % mp_size)
    if fc_layer == "fc_o":
        in_dim //= mp_size
    else:
        out_dim //= mp_size
    return rank % mp_size, rank // mp_size, mp_comm, dp_comm, in_dim, out_dim


def split_data(x_train, y_train, mp_size, dp_size, rank):
    rows = len(x_train) // dp_size
    replica = rank // mp_size
    return x_train[replica * rows : (replica + 1) * rows], y_train[replica * rows : (replica + 1) * rows]


class MoE_EP:
    def __init__(self, router, expert, topk, comm):
        self.router, self.expert, self.topk, self.comm = router, expert, topk, comm

    def forward(self, x):
        from minidist.core.collectives import all_reduce

        indices, gates = self.router(x, self.topk)
        own = indices == self.comm.rank
        chosen = own.any(axis=1)
        results = self.expert(x[chosen])
        outputs = np.zeros((len(x), results.shape[1]))
        outputs[chosen] = results * (gates * own).sum(axis=1)[chosen, None]
        return all_reduce(self.comm, outputs)


def gathered(x, comm):
    from minidist.core.collectives import all_gather

    return np.concatenate(list(all_gather(comm, x).reshape(comm.size, *x.shape)), axis=-1)


def naive_collect_forward_input(x, mp_comm, mp_size):
    return gathered(x, mp_comm)


def naive_collect_forward_output(out, mp_comm, mp_size):
    return gathered(out, mp_comm)


def naive_collect_backward_output(output_grad, mp_group_idx, mp_size):
    return np.split(output_grad, mp_size, axis=-1)[mp_group_idx]


def naive_collect_backward_x(grad_x, mp_comm, mp_size):
    from minidist.core.collectives import reduce_scatter

    parts = np.stack(np.split(grad_x, mp_size, axis=-1))
    return reduce_scatter(mp_comm, parts.reshape(-1)).reshape(parts.shape[1:])
"""

CS336 = (
    (
        """
import numpy as np
from minidist.core.autograd import Parameter
from minidist.core.base.layout import chunk_sizes, offsets
from minidist.core.collectives import all_gather, all_reduce, broadcast, reduce_scatter


class Replica:
    def __init__(self, module, comm):
        self.module, self.comm = module, comm
        for parameter in module.parameters():
            value = parameter.data.copy()
            broadcast(comm, value)
            parameter.data = value

    def __call__(self, x):
        return self.module(x)


def get_ddp(module, comm):
    return Replica(module, comm)


def ddp_on_after_backward(ddp_model, optimizer):
    for parameter in ddp_model.module.parameters():
        if parameter.grad is None:
            continue
        parameter.grad = all_reduce(ddp_model.comm, np.array(parameter.grad)) / ddp_model.comm.size


def get_sharded_optimizer(params, optimizer_cls, comm, **kwargs):
    return ShardedOptimizer(params, optimizer_cls, comm, **kwargs)


def get_fsdp(module, comm, compute_dtype=None):
    return FullySharded(module, comm, compute_dtype)


def fsdp_on_after_backward(fsdp_model, optimizer):
    fsdp_model.reduce()


def fsdp_gather_full_params(fsdp_model):
    return fsdp_model.gathered()

"""
        + inspect.getsource(cs336.ShardedOptimizer)
        + inspect.getsource(cs336.FullySharded)
    )
    .replace("Iterable[Parameter]", "list")
    .replace("Any", "object")
    .replace("Comm,", "object,")
    .replace("Module,", "object,")
)
CS336 = CS336.replace("comm: Comm)", "comm: object)")

LLMSYS = (
    "import numpy as np\nfrom minidist.core.collectives import all_reduce\n\n"
    + inspect.getsource(llmsys.partition_dataset)
    .replace("Iterator[Sequence[int]]", "list")
    .replace("Sequence[int]", "list")
    + inspect.getsource(llmsys.average_gradients).replace("MLP", "object").replace("Comm", "object")
    + inspect.getsource(llmsys.clock_cycles).replace("clock_cycles", "_clock_cycles").replace("Iterator[", "list[")
)


def graded(tmp_path: Path, text: str, assignment: str):
    path = tmp_path / "answer.py"
    path.write_text(text)
    return grade(path, assignment, 3)


@pytest.mark.parametrize(("name", "text"), [("cse234", CSE234), ("cs336", CS336), ("llmsys", LLMSYS)])
def test_a_submission_by_hand_is_right(tmp_path, name, text):
    result = graded(tmp_path, text, name)
    wrong = [item for item in result.items if item.name.endswith("right") and item.score < item.most]
    assert not wrong, result.text()
    assert len([item for item in result.items if item.name.endswith("right")]) == sum(
        exercise.startswith(name) for exercise in exercises("assignments")
    )


@each(
    ("assignment", "text", "old", "new", "message"),
    [
        ("cs336.ddp", CS336, "broadcast(comm, value)", "pass", "replicas start as rank 0's"),
        ("cs336.ddp", CS336, " / ddp_model.comm.size", "", "the mean of the ranks' gradients"),
        ("cs336.ddp_tied", CS336, "            continue", "            pass", "has no gradient: grad is None"),
        ("cs336.ddp_tied", CS336, " / ddp_model.comm.size", "", "the mean of the ranks' gradients"),
        ("cs336.sharded_optimizer", CS336, "if owner == comm.rank]", "]", "its own parameters only"),
        ("cs336.sharded_optimizer", CS336, "broadcast(self.comm, value, root=owner)", "pass", "from its owner"),
        ("cs336.fsdp", CS336, ") / self.comm.size", ")", "the mean over the ranks"),
        ("cs336.fsdp_fp16", CS336, ") / self.comm.size", ")", "the mean over the ranks"),
        (
            "cs336.fsdp_fp16",
            CS336,
            "Parameter(own,",
            "Parameter(own.astype(compute_dtype),",
            "the dtype of the weights",
        ),
        ("cs336.fsdp_fp16", CS336, "self.gathered(self.dtype)", "self.gathered()", "float16"),
        ("cs336.fsdp_fp16", CS336, "comm, compute_dtype)", "comm, None)", "cast the input in compute_dtype"),
        ("cs336.fsdp", CS336, "            if parameter.grad is None:\n                continue\n", "", ""),
        (
            "cs336.fsdp",
            CS336,
            "counts = chunk_sizes(",
            "counts = (lambda size, ranks: [size] + [0] * (ranks - 1))(",
            "shards only",
        ),
        (
            "cs336.ddp",
            CS336,
            "return Replica",
            "from minidist.parallel.data_parallel import DistributedDataParallel\n    return DistributedDataParallel",
            "asks you to write",
        ),
        ("cse234.myAllreduce", CSE234, "FOLD[op](dest_array, incoming", "np.add(dest_array, incoming", "expected"),
        ("cse234.myAlltoall", CSE234, "mine[to], to", "mine[comm.rank], to", "expected"),
        ("cse234.get_info", CSE234, 'fc_layer == "fc_o"', 'fc_layer != "fc_o"', "expected"),
        ("cse234.split_data", CSE234, "rank // mp_size\n    return x", "rank % dp_size\n    return x", "rank // mp"),
        ("cse234.MoE_EP", CSE234, "(gates * own)", "own", "counts with its weight"),
        ("cse234.MoE_EP", CSE234, "return all_reduce(self.comm, outputs)", "return outputs", "the results of all"),
        (
            "cse234.naive_collect_forward_input",
            CSE234,
            "axis=-1)\n\n\ndef naive_collect_forward_input",
            "axis=0)\n\n\ndef naive_collect_forward_input",
            "axis -1",
        ),
        (
            "llmsys.partition_dataset",
            LLMSYS,
            "rank::world_size",
            "rank * (len(dataset) // world_size) : (rank + 1) * (len(dataset) // world_size)",
            "each once",
        ),
        ("llmsys.average_gradients", LLMSYS, "total / comm.size", "total", "divide by their number"),
        ("llmsys.clock_cycles", LLMSYS, "num_partitions - 1):", "num_partitions):", "take"),
    ],
)
def test_typical_mistakes_are_refused(tmp_path, assignment, text, old, new, message):
    assert text.count(old) >= 1
    result = graded(tmp_path, text.replace(old, new), assignment)
    assert result.score == 0
    assert message in result.text()
