"""What public courses ask for: a submission by hand gets every point, and typical mistakes get none."""

from pathlib import Path

import pytest

from minidist.course.lesson.exercise import exercises
from minidist.course.lesson.grade import grade
from tests.cases import each

# Our answers, which are files as a student hands them in.
CS336, CSE234, LLMSYS = (
    (Path(__file__).parents[2] / "lessons" / "solutions" / f"{name}.py").read_text(encoding="utf-8")
    for name in ("cs336", "cse234", "llmsys")
)


def graded(tmp_path: Path, text: str, assignment: str):
    path = tmp_path / "answer.py"
    path.write_text(text)
    return grade(path, assignment, 3)


@pytest.mark.parametrize(("name", "text"), [("cse234", CSE234), ("cs336", CS336), ("llmsys", LLMSYS)])
def test_the_file_of_our_answers_gets_all_points(tmp_path, name, text):
    result = graded(tmp_path, text, name)
    assert result.score == sum(item.most for item in result.items), result.text()
    assert len([item for item in result.items if item.name.endswith("right")]) == sum(
        exercise.startswith(name) for exercise in exercises("assignments")
    )


@each(
    ("assignment", "text", "old", "new", "message"),
    [
        ("cs336.ddp", CS336, "broadcast(comm, values)", "pass", "replicas start as rank 0's"),
        ("cs336.ddp", CS336, " / self.comm.size).reshape", ").reshape", "the mean of the ranks' gradients"),
        (
            "cs336.ddp_tied",
            CS336,
            "self.params if parameter.grad is not None]",
            "self.params]",
            "has no gradient: grad is None",
        ),
        ("cs336.ddp_tied", CS336, " / self.comm.size).reshape", ").reshape", "the mean of the ranks' gradients"),
        ("cs336.sharded_optimizer", CS336, "if owner == comm.rank]", "]", "its own parameters only"),
        ("cs336.sharded_optimizer", CS336, "broadcast(self.comm, value, root=owner)", "pass", "from its owner"),
        ("cs336.fsdp", CS336, "dtype) / self.comm.size", "dtype)", "the mean over the ranks"),
        ("cs336.fsdp_fp16", CS336, "dtype) / self.comm.size", "dtype)", "the mean over the ranks"),
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
            "return Replicated(",
            "from minidist.parallel.data_parallel import DistributedDataParallel\n    return DistributedDataParallel(",
            "asks you to write",
        ),
        ("cse234.myAllreduce", CSE234, "COMBINE[op](own, arrived", "np.add(own, arrived", "expected"),
        ("cse234.myAlltoall", CSE234, "outgoing[to], to", "outgoing[comm.rank], to", "expected"),
        ("cse234.get_info", CSE234, 'fc_layer == "fc_o"', 'fc_layer != "fc_o"', "expected"),
        ("cse234.split_data", CSE234, "rank // mp_size * rows", "rank % dp_size * rows", "rank // mp"),
        ("cse234.MoE_EP", CSE234, " * gates[own].reshape(-1)[order][:, None]", "", "counts with its weight"),
        (
            "cse234.MoE_EP",
            CSE234,
            "gathered = all_gather(comm, mixture.reshape(-1), counts=[count * width for count in counts])",
            "gathered = np.zeros((len(x), width))\n    gathered[own] = mixture",
            "the results of all",
        ),
        ("cse234.naive_collect_forward_input", CSE234, "list(gathered), axis=-1", "list(gathered), axis=0", "axis -1"),
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
