"""Programs of torch.distributed on simulated ranks: gradients of one device, and reports of programs that hang."""

import json
import random
import re
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from minidist.base.trace_file import read_traces
from minidist.core.base.errors import MinidistError, UsageError
from tests.torch_ranks import programs
from tests.torch_ranks.programs import run_source

torch = pytest.importorskip("torch")
run_on_ranks, load_program, as_arrays = (
    getattr(pytest.importorskip("minidist.debug.torch_ranks.program"), name)
    for name in ("run_on_ranks", "load_program", "as_arrays")
)
pytestmark = pytest.mark.peers
VERSION = tuple(int(part) for part in torch.__version__.split(".")[:2])
FSDP_NEEDS = "FSDP2 of this PyTorch does not run on the CPU, with gloo either"
SCHEDULES = {
    "ScheduleGPipe": (1, False),
    "Schedule1F1B": (1, False),
    "ScheduleInterleaved1F1B": (2, False),
    "ScheduleLoopedBFS": (2, False),
    "ScheduleInterleavedZeroBubble": (2, False),
    "ScheduleZBVZeroBubble": (2, True),
    "ScheduleDualPipeV": (2, True),
}


@pytest.fixture
def module(monkeypatch):
    """Make a module of a source text."""

    def make(source, name="first"):
        result = ModuleType(name)
        monkeypatch.setitem(sys.modules, name, result)
        exec(compile(source, f"{name}.py", "exec"), vars(result))
        return result

    return make


def largest(ranks, alone):
    """The largest difference of any rank's tensors from those of one device; every tensor of it must be there."""
    names = {name for tensors in ranks for name in tensors}
    assert names == set(alone)
    return max(abs(tensors[name] - alone[name]).max() for tensors in ranks for name in tensors)


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("name", ["ddp", "by_hand"])
def test_data_parallel_gradients_are_those_of_one_device(name, ranks, module):
    first = module(programs.DDP)
    run = run_on_ranks(lambda: as_arrays(getattr(first, name)()), ranks)
    assert largest(run.results, as_arrays(first.one_device())) < 2e-6


@pytest.mark.parametrize("name", ["fsdp", "tensor_parallel", "two_axes"])
def test_sharded_gradients_are_those_of_one_device(name, module):
    if VERSION < (2, 7) and name != "tensor_parallel":
        pytest.skip(FSDP_NEEDS)
    first, sharded = module(programs.DDP), module(programs.SHARDED, "sharded")
    run = run_on_ranks(lambda: as_arrays(getattr(sharded, name)()), 4)
    assert largest(run.results, as_arrays(first.one_device())) < 2e-6
    if name == "two_axes":
        assert {"mesh_dp", "mesh_tp"} <= set(run.groups.values())


def test_a_distributed_checkpoint_is_saved_and_loaded(module, tmp_path):
    first, checkpoint = module(programs.DDP), module(programs.CHECKPOINT, "checkpoint")
    run = run_on_ranks(lambda: as_arrays(checkpoint.save_and_load(str(tmp_path))), 2)
    expected = as_arrays(dict(first.model().state_dict()))
    assert [largest(list(pair), expected) for pair in run.results] == [0.0, 0.0]


@pytest.mark.parametrize("name", SCHEDULES)
def test_gradients_of_torch_s_schedules_are_those_of_one_device(name, module):
    if VERSION < (2, 7) or (VERSION < (2, 10) and name == "ScheduleDualPipeV"):
        pytest.skip("this PyTorch leaves the gradients of the micro-batches undivided")
    pipeline, (per_rank, is_v) = module(programs.PIPELINE), SCHEDULES[name]
    run = run_on_ranks(lambda: as_arrays(pipeline.run(name, per_rank, is_v)), 4)
    assert largest(run.results, as_arrays(pipeline.alone(4 * per_rank))) < 2e-6


@pytest.mark.parametrize("name", programs.BROKEN)
def test_a_broken_program_has_its_report(name, tmp_path):
    if VERSION < (2, 7) and name == "a collective of a group without this rank's partner":
        pytest.skip("this PyTorch does not say that a collective is not asynchronous: the wait is reported")
    source, parts = programs.BROKEN[name]
    with pytest.raises(MinidistError) as raised:
        run_source(tmp_path, source, 3, "broken.py")
    for part in parts:
        assert part in str(raised.value)


def test_an_exception_of_the_program_has_its_lines_only(tmp_path):
    for raises, found in (("[][3]", "IndexError"), ("raise SystemExit(3)", "SystemExit: 3")):
        with pytest.raises(MinidistError, match=f"the program raised {found}") as raised:
            run_source(tmp_path, programs.HEAD + f"if r == 1:\n    {raises}\ndist.barrier()\n", 3, "broken.py")
        assert 'broken.py", line 6' in str(raised.value)
        assert "torch_ranks" not in str(raised.value)
        assert "raised on rank 1 of 3" in str(raised.value)


def test_every_collective_of_torch():
    run = run_on_ranks(load_program(str(Path(__file__).with_name("every_collective.py"))), 3)
    assert run.outputs == [f"done {rank}\n" for rank in range(3)]


def test_every_rank_begins_with_the_random_numbers_of_the_process():
    """A rank runs after others that have drawn numbers, and have not communicated yet."""
    results = run_on_ranks(lambda: (torch.rand(1).item(), np.random.rand(), random.random()), 3).results  # noqa: NPY002
    assert len(set(results)) == 1


def test_random_numbers_and_the_environment_belong_to_a_rank(tmp_path):
    source = (
        programs.HEAD
        + "import random, numpy\ntorch.manual_seed(r); random.seed(r); numpy.random.seed(r)\ndist.barrier()\n"
        + "mine = torch.rand(1).item(), random.random(), numpy.random.rand()\n"
        + "torch.manual_seed(r); random.seed(r); numpy.random.seed(r)\n"
        + "assert mine == (torch.rand(1).item(), random.random(), numpy.random.rand())\n"
        + "assert os.environ['RANK'] == os.environ['LOCAL_RANK'] == str(r) == str(dist.get_rank())\nprint(mine)\n"
    )
    assert len(set(run_source(tmp_path, source, 3).outputs)) == 3


def test_a_run_leaves_torch_as_it_was(module):
    import os

    before = torch.distributed.distributed_c10d._world, dict(os.environ), sys.excepthook, sys.stdout
    state = torch.get_rng_state()
    run_on_ranks(module(programs.DDP).ddp, 2)
    assert before == (torch.distributed.distributed_c10d._world, dict(os.environ), sys.excepthook, sys.stdout)
    assert not torch.distributed.is_initialized()
    assert torch.get_rng_state().shape == state.shape


def test_a_rank_that_does_not_communicate_is_reported_at_its_line(tmp_path):
    """It computes, or sleeps."""
    computes = programs.HEAD + "if r == 1:\n    while True:\n        r += 0\ndist.barrier()\n"
    for source, words in (
        (computes, "computed for more than"),
        (computes.replace("r += 0", "time.sleep(9)"), "blocked"),
    ):
        with pytest.raises(MinidistError, match=f"rank 1 .*{words}.*still.py:[78]") as raised:
            run_source(tmp_path, "import time\n" + source, 2, "still.py", timeout=0.4)
        assert "rank_thread" not in str(raised.value)


def test_ranks_with_unlike_numbers_of_batches_are_reported_at_their_line(tmp_path):
    source = (
        programs.HEAD
        + "net = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))\n"
        + "for _ in range(3 - (r == 0)):\n    net(t).sum().backward()\n"
    )
    with pytest.raises(MinidistError, match="rank 0 has returned") as raised:
        run_source(tmp_path, source, 2, "uneven.py")
    lines = set(re.findall(r"at (\S+:\d+)", str(raised.value)))
    assert {line.rpartition("/")[2] for line in lines} == {"uneven.py:7"}


def test_the_tensors_of_a_call_are_named_and_who_skips_one(tmp_path, capsys):
    source = (
        programs.HEAD
        + "for step in range(3):\n    for shape in ((2, 3), (5,), (4,)):\n"
        + "        if (r, step, shape) != (1, 1, (2, 3)):\n            dist.all_reduce(torch.ones(shape))\n"
        + "    print('step', step)\n"
    )
    words = (
        r"call 3 of world is all_reduce of float32\[2, 3\] on ranks 0, 2 and of float32\[5\] on rank 1, at \S*skips"
        ".py:8; rank 1 made no call like call 3 of rank 0, and its later calls are rank 0's, one earlier"
    )
    with pytest.raises(MinidistError, match=words):
        run_source(tmp_path, source, 3, "skips.py")
    assert "step 1" not in capsys.readouterr().out


def test_a_wrong_rank_is_refused(tmp_path):
    source = "import torch.distributed as d\nd.init_process_group('gloo', rank=3, world_size=4)\n"
    with pytest.raises(UsageError, match=r"init_process_group\(rank=3\) on rank 0 of 2"):
        run_source(tmp_path, source, 2)


GROUPLESS = """
def wrapped():
    net, (x, y) = nn.parallel.DistributedDataParallel(model()), data()
    return gradients(net, share(x), share(y))

def summed():
    x, y = data()
    grads = gradients(model(), share(x), share(y))
    for grad in grads.values():
        dist.all_reduce(grad)
    return grads

def in_half():
    net, (x, y) = nn.parallel.DistributedDataParallel(model().bfloat16()), data()
    return gradients(net, share(x).bfloat16(), share(y).bfloat16())
"""


def test_the_command_compares_with_one_device(tmp_path, minidist):
    path = tmp_path / "mine.py"
    path.write_text(programs.DDP)
    compare = ["torch", "--ranks", 2, "--compare", f"{path}:one_device"]
    assert "equal: 2 ranks and one device return the same" in minidist(*compare, f"{path}:ddp").out
    report = json.loads(minidist(*compare, "--json", f"{path}:forgets_to_divide", code=1).out)
    assert not report["compared"]["equal"]
    # Each of 4 tensors of 212 elements in all, summed around a ring of 2: every element once per rank.
    assert [(r["operation"], r["group"], r["bytes"]) for r in report["sent"]] == [
        ("all_reduce/ring", "default_pg", 2 * 4 * 212)
    ]


def test_the_command_begins_the_group_and_knows_what_rounding_does(tmp_path, minidist):
    """Functions that call no init_process_group; of them one whose first call is DistributedDataParallel's."""
    path = tmp_path / "mine.py"
    path.write_text(
        programs.DDP.replace("    dist.init_process_group('nccl')\n", "").replace('("nccl")', "") + GROUPLESS
    )
    compare = ["torch", "--ranks", 2, "--compare", f"{path}:one_device"]
    assert "equal: 2 ranks" in minidist(*compare, f"{path}:wrapped").out
    out = minidist(*compare, f"{path}:summed", code=1).out
    assert "each of the 8 tensors that differ is 2 times (the world has 2 ranks) that of one device" in out
    minidist(*compare, f"{path}:in_half", code=1)
    out = minidist(*compare, "--rounding", "bf16", f"{path}:in_half").out
    assert "within 0.03125 of a tensor's largest entry" in out
    minidist(*compare, "--rounding", "bf16", f"{path}:summed", code=1)


def test_the_commands_of_the_page_print_what_it_says(tmp_path, minidist, monkeypatch):
    monkeypatch.chdir(tmp_path)
    page = (Path(__file__).parents[2] / "docs" / "torch.md").read_text()
    for name, text in re.findall(r"<!-- (\S+) -->\n```python\n(.*?)```", page, flags=re.S):
        Path(name).write_text(text)
    blocks = re.findall(r"```console\n\$ minidist torch (.*?)\n(.*?)```", page, flags=re.S)
    for (words, shown), code in zip(blocks, (1, 1, 1, 0), strict=True):
        out, err = minidist("torch", *words.split(), code=code)
        printed = err.removeprefix("every rank's random numbers begin with --seed 0\n") + out
        # Rounding errors differ from one BLAS to another.
        assert re.sub(r"difference \S+", "", printed) == re.sub(r"difference \S+", "", shown)


def test_the_trace_of_a_hang_is_written(tmp_path, minidist):
    (tmp_path / "ring.py").write_text(programs.HEAD + "dist.all_reduce(t)\ndist.recv(t, (r + 1) % n)\n")
    trace = tmp_path / "hang.jsonl"
    assert "deadlock: 3 of 3" in minidist("torch", "--ranks", 3, "--trace", trace, tmp_path / "ring.py", code=1).err
    assert [len(of_rank.sent()) for of_rank in read_traces(trace)[0]] == [4] * 3


def test_interleavings_find_a_race(tmp_path, minidist):
    (tmp_path / "race.py").write_text(
        programs.HEAD + "if r:\n    dist.send(t, 0)\nelse:\n    print([dist.recv(t) for _ in range(n - 1)])\n"
    )
    out = minidist("torch", "--interleavings", 8, tmp_path / "race.py", code=1).out
    assert re.search(r"order \d of 8: rank 0 prints '\[.*\]' in line 1", out)
    (tmp_path / "none.py").write_text(programs.HEAD + "dist.all_reduce(t)\nprint(t, __import__('sys').argv[1:])\n")
    out = minidist("torch", "--interleavings", 3, tmp_path / "none.py", "--lr", 3).out
    assert out.count("['--lr', '3']") == 16
    assert "3 other orders of the ranks print and send the same" in out


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["none.py"], "cannot be read"),
        (["--compare", "none.py:f", "none.py"], "give FILE.py:FUNCTION"),
        (["--ranks", "0", "none.py"], "1 to 1,024 ranks"),
        (["--interleavings", "-1", "none.py"], "--interleavings"),
        (["--rounding", "bf17", "--compare", "none.py:f", "none.py:g"], "one of fp32, fp16, bf16"),
        (["--rounding", "bf16", "none.py"], "--rounding bf16 is of --compare"),
        (["--rounding", "bf16", "--tolerance", "0.1", "--compare", "n.py:f", "n.py:g"], "leave one out"),
    ],
)
def test_wrong_input_ends_with_2(words, part, minidist):
    assert part in minidist("torch", *words, code=2).err
