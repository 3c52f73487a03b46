"""What public courses ask for: a submission by hand gets every point, and typical mistakes get none."""

from pathlib import Path

import pytest

from minidist.course.lesson.catalogue import exercises
from minidist.course.lesson.grade import grade
from tests.cases import each


def ours(assignment: str) -> str:
    """Return our answers to an assignment, a file as a student hands it in."""
    path = Path(__file__).parents[2] / "lessons" / "solutions" / f"{assignment}.py"
    return path.read_text(encoding="utf-8")


def graded(tmp_path: Path, text: str, assignment: str):
    path = tmp_path / "answer.py"
    path.write_text(text)
    return grade(path, assignment, 3)


@pytest.mark.parametrize("name", ["cse234", "cs336", "llmsys"])
def test_the_file_of_our_answers_gets_all_points(tmp_path, name):
    result = graded(tmp_path, ours(name), name)
    assert result.score == sum(item.most for item in result.items), result.text()
    assert len([item for item in result.items if item.name.endswith("right")]) == sum(
        exercise.startswith(name) for exercise in exercises("assignments")
    )


@each(
    ("assignment", "old", "new", "message"),
    [
        ("cs336.ddp", "broadcast(comm, values)", "pass", "replicas start as rank 0's"),
        ("cs336.ddp", " / self.comm.size).reshape", ").reshape", "the mean of the ranks' gradients"),
        ("cs336.ddp_tied", " if parameter.grad is not None]", "]", "has no gradient: grad is None"),
        ("cs336.ddp_tied", " / self.comm.size).reshape", ").reshape", "the mean of the ranks' gradients"),
        ("cs336.sharded_optimizer", "if owner == comm.rank]", "]", "its own parameters only"),
        ("cs336.sharded_optimizer", "broadcast(self.comm, value, root=owner)", "pass", "from its owner"),
        ("cs336.fsdp", "dtype) / self.comm.size", "dtype)", "the mean over the ranks"),
        ("cs336.fsdp_fp16", "dtype) / self.comm.size", "dtype)", "the mean over the ranks"),
        ("cs336.fsdp_fp16", "Parameter(own,", "Parameter(own.astype(compute_dtype),", "the dtype of the weights"),
        ("cs336.fsdp_fp16", "self.gathered(self.dtype)", "self.gathered()", "float16"),
        ("cs336.fsdp_fp16", "comm, compute_dtype)", "comm, None)", "cast the input in compute_dtype"),
        ("cs336.fsdp", "            if parameter.grad is None:\n                continue\n", "", ""),
        (
            "cs336.fsdp",
            "counts = chunk_sizes(",
            "counts = (lambda size, ranks: [size] + [0] * (ranks - 1))(",
            "shards only",
        ),
        (
            "cs336.ddp",
            "return Replicated(",
            "from minidist.parallel.data_parallel import DistributedDataParallel\n    return DistributedDataParallel(",
            "asks you to write",
        ),
        ("cse234.myAllreduce", "COMBINE[op](own, arrived", "np.add(own, arrived", "expected"),
        ("cse234.myAlltoall", "outgoing[to], to", "outgoing[comm.rank], to", "expected"),
        ("cse234.get_info", 'fc_layer == "fc_o"', 'fc_layer != "fc_o"', "expected"),
        ("cse234.split_data", "rank // mp_size * rows", "rank % dp_size * rows", "rank // mp"),
        ("cse234.MoE_EP", " * gates[own].reshape(-1)[order][:, None]", "", "counts with its weight"),
        (
            "cse234.MoE_EP",
            "gathered = all_gather(comm, mixture.reshape(-1), counts=[count * width for count in counts])",
            "gathered = np.zeros((len(x), width))\n    gathered[own] = mixture",
            "the results of all",
        ),
        ("cse234.naive_collect_forward_input", "list(gathered), axis=-1", "list(gathered), axis=0", "axis -1"),
        (
            "llmsys.partition_dataset",
            "rank::world_size",
            "rank * (len(dataset) // world_size) : (rank + 1) * (len(dataset) // world_size)",
            "each once",
        ),
        ("llmsys.average_gradients", "total / comm.size", "total", "divide by their number"),
        ("llmsys.clock_cycles", "num_partitions - 1):", "num_partitions):", "take"),
    ],
)
def test_typical_mistakes_are_refused(tmp_path, assignment, old, new, message):
    text = ours(assignment.partition(".")[0])
    assert text.count(old) >= 1
    result = graded(tmp_path, text.replace(old, new), assignment)
    assert result.score == 0
    assert message in result.text()
