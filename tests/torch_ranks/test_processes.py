"""Programs that start their ranks themselves, and what ranks find each other by: processes, queues, stores."""

import re
import sys

import pytest

from minidist.core.base.errors import DeadlockError, MinidistError, UsageError
from minidist.debug.results import bytes_by_operation
from tests.torch_ranks.programs import run_source

torch = pytest.importorskip("torch")
program = pytest.importorskip("minidist.debug.torch_ranks.program")
pytestmark = pytest.mark.peers
HEAD = (
    "import os, sys, torch, torch.distributed as dist, torch.multiprocessing as mp, multiprocessing\n"
    "def work(rank, size, *rest):\n"
    "    dist.init_process_group('gloo', init_method='tcp://127.0.0.1:1', rank=rank, world_size=size)\n"
    "    t = torch.full((1,), float(rank + 1)); dist.all_reduce(t); print(rank, size, t.item(), *rest)\n"
    "    dist.destroy_process_group()\n"
)
MAIN = "if __name__ == '__main__':\n"


def run(source, tmp_path, ranks=4, **settings):
    """A run of a source text as a file."""
    return run_source(tmp_path, source, ranks, "started.py", settings=program.Settings(**settings))


STARTS = {
    "mp.spawn": "    mp.spawn(work, (3, 'x'), nprocs=3)\n",
    "mp.spawn without waiting": "    context = mp.spawn(work, (3, 'x'), nprocs=3, join=False)\n"
    "    while not context.join():\n        pass\n",
    "processes of torch": "    ps = [mp.Process(target=work, args=(r, 3, 'x')) for r in range(3)]\n"
    "    [p.start() for p in ps]; [p.join() for p in ps]\n    assert [p.exitcode for p in ps] == [0] * 3\n",
    "processes that nobody waits for": "    for r in range(3):\n"
    "        multiprocessing.Process(target=work, args=(r,), kwargs={'size': 3}).start()\n",
    "spawned processes": "    mp.set_start_method('spawn')\n    for r in range(3):\n"
    "        p = mp.Process(target=work, args=(r, 3, 'x')); p.start()\n    p.join()\n    assert not p.is_alive()\n",
    "two worlds": "    for n in (2, 3):\n        mp.spawn(work, (n, 'x'), nprocs=n)\n",
}


@pytest.mark.parametrize("name", STARTS)
def test_a_program_that_starts_its_ranks_runs_once(name, tmp_path):
    source = HEAD + MAIN + "    print('begin', os.getpid() > 0, __name__)\n" + STARTS[name]
    first = run(source, tmp_path)
    assert first.world.size == 3
    assert first.outputs[-1] == "begin True __main__\n"  # once, whatever --ranks says
    ends = [output.splitlines()[-1].split()[:3] for output in first.outputs[:-1]]
    assert ends == [[str(rank), "3", "6.0"] for rank in range(3)]
    assert len(first.worlds) == (2 if name == "two worlds" else 1)
    rows = bytes_by_operation(first.traces, first.groups, "group")
    # One element goes around a ring of n twice, but for one message.
    assert sum(row["bytes"] for row in rows) == 2 * 2 * 4 + (2 * 1 * 4 if name == "two worlds" else 0)
    assert program.first_difference(first, run(source, tmp_path)) == ""


def test_arguments_are_copies_but_for_the_memory_of_tensors(tmp_path):
    """As torch.multiprocessing passes them: a spawned process sees another process's writes into a tensor."""
    source = (
        HEAD + "class Settings:\n    lr = 1\n"
        "def change(rank, settings, tensor, parameter):\n"
        "    assert type(settings) is Settings and settings.lr == 2, settings\n"
        "    settings.lr += 1; tensor[rank] = rank + 1\n"
        "    assert isinstance(parameter, torch.nn.Parameter) and parameter.grad is None\n"
        "    parameter.data += 1; parameter.grad = tensor.clone()\n"
        + MAIN
        + "    settings = Settings(); settings.lr = 2\n"
        "    tensor, parameter = torch.zeros(2), torch.nn.Parameter(torch.zeros(2))\n"
        "    mp.spawn(change, (settings, tensor, parameter), nprocs=2)\n"
        "    print(settings.lr, tensor.tolist(), parameter.tolist(), parameter.grad)\n"
    )
    assert run(source, tmp_path).outputs[-1] == "2 [1.0, 2.0] [2.0, 2.0] None\n"


def test_a_forked_process_knows_what_the_program_has_set_and_a_spawned_one_does_not(tmp_path):
    source = (
        "import random, torch, multiprocessing\nvalue, torch_seed = [0], 0\n"
        "def show(rank):\n    value.append(rank); print(value, random.random(), torch.rand(1).item())\n"
        "def start(method):\n    context = multiprocessing.get_context(method)\n"
        "    ps = [context.Process(target=show, args=(r,)) for r in range(2)]\n"
        "    [p.start() for p in ps]; [p.join() for p in ps]\n"
    )
    main = "value = [5]; random.seed(1); torch.manual_seed(1)\nstart({!r}); print(value, random.random())\n"
    guarded = {each: MAIN + "    " + main.format(each).replace("\n", "\n    ") for each in ("fork", "spawn")}
    of = {each: run(source + text, tmp_path).outputs for each, text in guarded.items()}
    assert run(source + main.format("fork"), tmp_path).outputs == of["fork"]  # forked programs need no guard
    numbers = {method: [output.split("] ")[1].split() for output in outputs] for method, outputs in of.items()}
    assert [output.split("] ")[0] for output in of["fork"]] == ["[5, 0", "[5, 1", "[5"]
    assert [output.split("] ")[0] for output in of["spawn"]] == ["[0, 0", "[0, 1", "[5"]
    for method in of:
        assert numbers[method][0] == numbers[method][1]  # all ranks begin with the same numbers
        assert (numbers[method][0][0] == numbers[method][2][0]) == (method == "fork")
    assert numbers["fork"][0] != numbers["spawn"][0]


def test_a_subclass_of_process_and_a_queue(tmp_path):
    source = HEAD + (
        "class Worker(multiprocessing.Process):\n"
        "    def __init__(self, rank, tasks, results):\n        super().__init__()\n"
        "        self.rank, self.tasks, self.results = rank, tasks, results\n"
        "    def run(self):\n        work(self.rank, 2)\n"
        "        if self.rank == 0:\n            self.tasks.put(torch.ones(2))\n"
        "        else:\n            self.results.put(self.tasks.get().sum().item())\n"
    )
    source += MAIN + (
        "    tasks, results = multiprocessing.Queue(), mp.SimpleQueue()\n"
        "    ps = [Worker(r, tasks, results) for r in (0, 1)]\n    [p.start() for p in ps]\n    print(results.get())\n"
    )
    assert run(source, tmp_path).outputs[-1] == "2.0\n"


def test_a_data_loader_s_processes_are_real(tmp_path):
    source = HEAD + (
        "def main():\n    dist.init_process_group()\n"
        "    loader = torch.utils.data.DataLoader(list(range(8)), 4, num_workers=1)\n"
        "    t = sum(loader); dist.all_reduce(t); print(t.tolist())\nmain()\n"
    )
    assert run(source, tmp_path, 2).outputs == ["[8, 12, 16, 20]\n"] * 2


@pytest.mark.parametrize(
    ("source", "parts"),
    [
        (
            "dist.init_process_group()\nmultiprocessing.Process(target=work, args=(0, 1)).start()\n",
            ["rank 0 starts a process at ", "started.py:7; a program that runs on every rank cannot start ranks"],
        ),
        (
            "import subprocess\nsubprocess.run(['true'], env=dict(os.environ))\n"
            "subprocess.run([sys.executable, 'other.py'], env={**os.environ, 'RANK': '7'})\n",
            [r"rank 0 starts ranks with subprocess at .*started\.py:8; give their script"],
        ),
        ("import subprocess\nsubprocess.Popen('torchrun x.py', shell=True)\n", ["starts ranks with subprocess at "]),
        (
            "dist.init_process_group()\nt = torch.ones(1, dtype=torch.int32)\ndist.all_reduce(t, dist.ReduceOp.BXOR)\n",
            [r"ReduceOp\.BXOR is not simulated"],
        ),
        (
            "dist.init_process_group()\nwith torch.profiler.profile():\n    dist.barrier()\n",
            [r"rank 1 starts PyTorch's profiler at .*started\.py:7 while rank 0 profiles"],
        ),
        (MAIN + "    mp.spawn(work, (3,), nprocs=2)\n", [r"init_process_group\(world_size=3\) on rank \d of 2"]),
        ("mp.spawn(work, (2,), nprocs=2)\n", ["starts processes while it is imported", "__name__"]),
        (
            "def fail(rank):\n    raise ValueError(rank)\n" + MAIN + "    mp.spawn(fail, nprocs=2)\n",
            ["the program raised ValueError: 0", r"started\.py\", line 7, in fail", "raised on rank 0 of 2"],
        ),
        (
            "q = mp.Queue()\nif os.environ['RANK'] == '1':\n    q.get()\n",
            ["1 of 2 ranks are blocked", r"rank 1 waits in queue\.get\(\), at .*started\.py:8"],
        ),
    ],
)
def test_what_cannot_be_run_is_said(source, parts, tmp_path):
    with pytest.raises(MinidistError) as raised:
        run(HEAD + source, tmp_path, 2)
    text = "\n".join([str(raised.value), *getattr(raised.value, "__notes__", ())])
    for part in parts:
        assert re.search(part, text), text
    assert text.count("raised on rank") < 2, text


STORES = {
    "TCPStore": "dist.TCPStore('localhost', 1, n, r == 0)",
    "TCPStore of one port": "dist.TCPStore('other', port=1, world_size=n, is_master=r == 0, wait_for_workers=False)",
    "FileStore": "dist.FileStore('a_file', n)",
    "PrefixStore": "dist.PrefixStore('x', dist.PrefixStore('y', dist.TCPStore('localhost', 1)))",
    "the group's": "(dist.init_process_group(), dist.distributed_c10d._get_default_store())[1]",
}


def test_a_rank_waits_in_a_store_for_another_one(tmp_path):
    for name, made in STORES.items():
        source = HEAD + (
            f"r, n = int(os.environ['RANK']), int(os.environ['WORLD_SIZE'])\nstore = {made}\n"
            "if r == 0:\n    assert store.get('key') == b'value' and store.check(['key'])\n"
            "    store.set('answer', 'yes')\n"
            "if r == 1:\n    store.set('key', 'value'); store.wait(['key', 'answer'])\n"
            "t = torch.zeros(1)\nif r == 1:\n    store.set('more', '')\n"
            "if dist.is_initialized():\n    dist.recv(t, 1) if r == 0 else dist.send(t + 1, 0) if r == 1 else None\n"
            "    assert t.item() == (r == 0)\n"
            "store.add('number', r + 1); store.set(f'done{r}', '')\nstore.wait([f'done{i}' for i in range(n)])\n"
            "print(store.add('number', 0), store.compare_set('first', '', 'mine'), store.delete_key('no'),\n"
            "      store.compare_set('first', 'mine', 'next') if r == 0 else '', store.multi_get(['key', 'answer']))\n"
        )
        expected = "6 b'mine' False {} [b'value', b'yes']\n"
        outputs = run(source, tmp_path, 3).outputs
        assert outputs[0] == expected.format("b'next'"), name
        assert outputs[1:] != [], name
    with pytest.raises(DeadlockError, match=r"rank 1 waits in store\.wait\('never'\), at .*started\.py:7"):
        run(HEAD + "if os.environ['RANK'] == '1':\n    dist.TCPStore('localhost', 1).get('never')\n", tmp_path, 2)


def test_a_program_that_does_not_communicate_is_no_success(tmp_path, minidist):
    for source in "print('not enough GPUs')\n", "import torch.multiprocessing as mp\nmp.spawn(print, nprocs=0)\n":
        (tmp_path / "nothing.py").write_text(source)
        assert "no rank has communicated" in minidist("torch", "--ranks", 2, tmp_path / "nothing.py", code=3).err


def test_flags_of_torch_distributed_launch_and_modules(tmp_path, minidist, monkeypatch):
    (tmp_path / "package").mkdir()
    source = "import sys, torch.distributed as dist\ndist.init_process_group()\nprint(sys.argv[1:])\n"
    (tmp_path / "package" / "__main__.py").write_text(source)
    (tmp_path / "old.py").write_text(
        source + "import argparse\nargparse.ArgumentParser().add_argument('--local_rank')\n"
    )
    monkeypatch.chdir(tmp_path)
    out = minidist("torch", "--ranks", 2, "-m", "package", "--lr", 3, "-m").out
    assert out.count("['--lr', '3', '-m']\n") == 2
    out = minidist("torch", "--ranks", 2, "old.py", "--ranks", 7).out
    assert out.startswith("['--local_rank=0', '--ranks', '7']\n['--local_rank=1', '--ranks', '7']\n")
    out = minidist("torch", "--ranks", 2, "old.py", "--local-rank=5").out
    assert out.startswith("['--local-rank=5']\n" * 2)
    assert "package" not in sys.modules


def test_every_run_begins_alike_so_that_no_race_is_seen_where_there_is_none(tmp_path, minidist):
    (tmp_path / "drawn.py").write_text(
        "import random, numpy, torch, torch.distributed as dist\n"
        "x = torch.rand(1).item(), random.random(), numpy.random.rand()\n"
        "dist.init_process_group()\nall_of_them = [None] * 2\ndist.all_gather_object(all_of_them, x)\n"
        "assert all_of_them == [x, x]\nprint(x)\n"
    )
    numbers = []
    for words in ["--interleavings", "2"], [], ["--seed", "1"]:
        torch.rand(1)  # whatever the process has drawn before
        out = minidist("torch", "--ranks", 2, *words, tmp_path / "drawn.py").out
        numbers.append(re.findall(r"0\.\d+", out.splitlines()[0]))
    assert len(numbers[0]) == 3
    assert numbers[0] == numbers[1]
    assert all(a != b for a, b in zip(numbers[0], numbers[2], strict=True))


def test_what_a_process_has_for_itself_is_not_shared(tmp_path):
    (tmp_path / "its_state.py").write_text("value = None\n")
    source = (
        "import os, sys, torch, torch.distributed as dist, its_state\n"
        "from torch.distributed.fsdp._debug_utils import SimpleProfiler\n"
        "dist.init_process_group(); r = dist.get_rank()\nits_state.value, os.environ['MINE'] = r, str(r)\n"
        "torch.set_default_dtype(torch.float64 if r else torch.float32); torch.set_grad_enabled(bool(r))\n"
        "with SimpleProfiler.profile('part'):\n    dist.barrier()\n"
        "mesh = torch.distributed.device_mesh.init_device_mesh('cpu', (2,))\ndist.barrier()\n"
        "assert list(SimpleProfiler.results) == ['part'] and mesh.get_local_rank() == r\n"
        "from torch.distributed.tensor import Shard, distribute_tensor\n"
        "twice = distribute_tensor(torch.arange(5), mesh, [Shard(0)]) * 2\n"
        "assert twice.device_mesh.get_local_rank() == r and twice.full_tensor().tolist() == [0, 2, 4, 6, 8]\n"
        "print(its_state.value, os.environ['MINE'], torch.zeros(1).dtype, torch.is_grad_enabled(),\n"
        "      __import__('its_state').value)\n"
    )
    assert run(source, tmp_path, 2).outputs == ["0 0 torch.float32 False 0\n", "1 1 torch.float64 True 1\n"]
    assert torch.get_default_dtype() is torch.float32


def test_what_one_rank_sets_for_a_block_is_not_set_for_another(tmp_path):
    source = (
        "import contextlib, torch, torch.distributed as dist\n"
        "from torch.distributed.tensor import DTensor\n"
        "from torch.distributed.tensor.parallel import loss_parallel\n"
        "from torch.nn.modules.module import register_module_forward_hook\n"
        "dist.init_process_group(); r = dist.get_rank(); seen = []\n"
        "handlers = lambda: DTensor._op_dispatcher._custom_op_handlers\n"
        "before = set(handlers())\n"
        "with loss_parallel() if r == 0 else contextlib.nullcontext():\n"
        "    dist.barrier(); inside = set(handlers()) > before\n"
        "hook = register_module_forward_hook(lambda *_: seen.append(r)) if r == 1 else None\n"
        "dist.barrier(); torch.nn.Identity()(0); dist.barrier()\n"
        "print(inside, set(handlers()) == before, len(before) > 3, seen)\n"
    )
    assert run(source, tmp_path, 2).outputs == ["True True True []\n", "False True True [1]\n"]


def test_a_program_is_told_the_backend_that_it_has_asked_for(tmp_path):
    for asked, told in ("'nccl'", "nccl"), ("'cpu:gloo,cuda:nccl'", "cpu:gloo,cuda:nccl"), ("", "gloo"):
        source = f"import torch.distributed as dist\ndist.init_process_group({asked})\n"
        source += "print(dist.get_backend(), dist.get_backend(dist.new_group([0])) if dist.get_rank() == 0 else '')\n"
        assert run(source, tmp_path, 1).outputs == [f"{told} {told}\n"], asked


def test_a_process_group_that_a_package_has_kept_is_not_another_rank_s(tmp_path, monkeypatch):
    (tmp_path / "site-packages").mkdir()
    (tmp_path / "site-packages" / "of_group.py").write_text(
        "import torch.distributed as dist\ndef total(tensor, group=dist.group.WORLD):\n"
        "    dist.all_reduce(tensor, group=group)\n    return tensor\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path / "site-packages"))
    source = (
        "import torch, torch.distributed as dist\ndist.init_process_group()\n"
        "import of_group, torch.distributed.nn.functional as functional\n"
        "x = torch.ones(1, requires_grad=True)\nfunctional.all_reduce(x).sum().backward()\n"
        "print(x.grad.item(), of_group.total(torch.ones(1)).item())\n"
    )
    with pytest.raises(UsageError, match=r"rank 1 uses a process group of rank 0 at .*:6, .*--own"):
        run(source, tmp_path, 2)
    del sys.modules["of_group"]
    assert run(source, tmp_path, 2, own=["of_group"]).outputs == ["2.0 2.0\n"] * 2


def test_an_installed_package_may_be_every_rank_s_own(tmp_path, monkeypatch):
    (tmp_path / "site-packages").mkdir()
    (tmp_path / "site-packages" / "of_singletons.py").write_text("class State:\n    shared = {}\n")
    monkeypatch.syspath_prepend(str(tmp_path / "site-packages"))
    source = (
        "import torch.distributed as dist, of_singletons\ndist.init_process_group()\n"
        "of_singletons.State.shared.setdefault('rank', dist.get_rank())\ndist.barrier()\n"
        "print(of_singletons.State.shared['rank'] == dist.get_rank())\n"
    )
    assert run(source, tmp_path, 2).outputs == ["True\n", "False\n"]
    del sys.modules["of_singletons"]
    assert run(source, tmp_path, 2, own=["of_singletons"]).outputs == ["True\n"] * 2
    with pytest.raises(UsageError, match="every rank needs the same torch"):
        run(source, tmp_path, 2, own=["torch"])
