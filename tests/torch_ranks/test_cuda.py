"""Programs that name CUDA devices run on the CPU of simulated ranks, and torch is as it was afterwards."""

import sys

import pytest

from minidist.core.base.errors import MinidistError, UsageError
from tests.torch_ranks.programs import run_source

torch = pytest.importorskip("torch")
program = pytest.importorskip("minidist.debug.torch_ranks.program")
pytestmark = pytest.mark.peers
CPU = program.Settings(cuda="cpu")
DEVICES = [
    "torch.ones(2, device='cuda')",
    "torch.ones(2, device='cuda:1')",
    "torch.ones(2, device=torch.device('cuda', 1))",
    "torch.ones(2, device=1)",
    "torch.ones(2).to(1)",
    "torch.ones(2).to('cuda:0', torch.float64)",
    "torch.ones(2).to(device='cuda')",
    "torch.ones(2).cuda(1, non_blocking=True)",
    "torch.as_tensor([1.0], dtype=None, device='cuda')",
    "torch.ones(2, pin_memory=True).pin_memory()",
    "torch.randn(2, generator=torch.Generator(device='cuda'), device='cuda')",
    "torch.nn.Linear(2, 2).to(1).weight",
    "torch.nn.Linear(2, 2).to(torch.device(1)).weight",
    "torch.nn.Linear(2, 2).cuda().bias",
    "torch.nn.Linear(2, 2, device='cuda').bias",
    "torch.nn.Linear(2, 2, device='meta').to_empty(device='cuda').bias",
]
CALLS = [
    "torch.cuda.synchronize()",
    "torch.cuda.set_device(1)",
    "torch.cuda.manual_seed_all(3)",
    "torch.cuda.current_stream().wait_stream(torch.cuda.Stream())",
    "torch.ones(2).record_stream(torch.cuda.current_stream())",
    "torch.cuda.get_device_properties(0).total_memory + 1",
    "torch.cuda.max_memory_allocated() / 2**30",
    "torch.cuda.Event(enable_timing=True).record()",
    "torch.cuda.get_rng_state()",
    "torch.accelerator.synchronize()",
    "torch.cuda.nvtx.range_push('forward')",
    "torch.backends.cuda.matmul.allow_tf32",
    "torch.distributed.is_nccl_available()",
]


def run(source, tmp_path, ranks=2, settings=CPU):
    """A run of a source text as a file."""
    return run_source(tmp_path, source, ranks, "named.py", settings=settings)


def test_a_device_is_the_cpu_however_it_is_written(tmp_path):
    source = "import torch\n" + "".join(
        f"value = {each}\nassert value.device.type == 'cpu', {each!r}\n" for each in DEVICES
    )
    source += "".join(f"{each}\n" for each in CALLS)
    assert run(source, tmp_path).first_cuda.line == 2


def test_blocks_of_streams_devices_and_autocast(tmp_path):
    run(
        "import torch\n"
        "with torch.cuda.stream(torch.cuda.Stream()), torch.cuda.device(1), torch.device('cuda'):\n"
        "    assert torch.ones(1).device.type == 'cpu'\n"
        "torch.set_default_device('cuda:1')\nassert torch.ones(1).device.type == 'cpu'\n"
        "for block in torch.autocast('cuda', torch.bfloat16), torch.cuda.amp.autocast(dtype=torch.bfloat16):\n"
        "    with block:\n        assert torch.nn.Linear(2, 2)(torch.ones(1, 2)).dtype is torch.bfloat16\n"
        "start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)\n"
        "start.record(); end.record()\nassert start.elapsed_time(end) >= 0\n",
        tmp_path,
    )


def test_a_program_sees_a_gpu_for_each_rank_and_torch_sees_none(tmp_path):
    output = run(
        "import os, torch\nrank = int(os.environ['LOCAL_RANK'])\ntorch.cuda.set_device(rank)\n"
        "asked = 'answer = torch.cuda.is_available(), torch.cuda.device_count()'\n"
        "names = {'torch': torch, '__name__': 'torch.utils.data'}\nexec(asked, names)\n"
        "assert isinstance(torch.device('cpu'), torch.device) and not isinstance('cpu', torch.device)\n"
        "print(torch.cuda.is_available(), torch.cuda.device_count(), torch.accelerator.device_count(),\n"
        "      torch.accelerator.current_accelerator(), torch.cuda.current_device() == rank, names['answer'])\n"
        "torch.accelerator.set_device_index(0)\nassert torch.cuda.current_device() == 0\n",
        tmp_path,
        3,
    ).outputs
    assert output == ["True 3 3 cuda True (False, 0)\n"] * 3


def test_the_host_s_copy_is_another_tensor(tmp_path):
    """From a GPU it is one, so that a program may keep it while it trains on."""
    run(
        "import torch\nweight = torch.ones(2, device='cuda')\n"
        "kept = [weight.cpu(), weight.to('cpu'), weight.to(torch.device('cpu'), torch.float64)]\n"
        "kept += [weight.to(device='cpu'), weight.cpu().cuda()]\nsame = weight.cuda()\nweight += 1\n"
        "assert [each.tolist() for each in kept] == [[1, 1]] * 5 and same is weight, kept\n"
        "assert kept[2].dtype is torch.float64\n",
        tmp_path,
    )


def test_a_file_with_tensors_of_a_gpu_is_loaded(tmp_path):
    """A storage's device is written in the file; here it is a name that no machine has."""
    run(
        "import io, torch\nfile = io.BytesIO()\ntorch.save({'w': torch.ones(2)}, file)\n"
        "for place in None, 'cuda:0', torch.device('cuda', 1), {'cuda:0': 'cuda:1'}, \\\n"
        "        lambda storage, _: storage, lambda storage, _: storage.cuda(0):\n"
        "    file.seek(0)\n    assert torch.load(file, map_location=place)['w'].device.type == 'cpu'\n",
        tmp_path,
    )


@pytest.mark.parametrize(
    ("line", "part"),
    [
        ("torch.cuda.CUDAGraph()", r"a CUDA graph at .*named\.py:2 cannot be captured on the CPU"),
        ("torch.cuda.set_device(2)", r"set_device\(2\) at .*named\.py:2, and the program sees 2 devices"),
    ],
)
def test_what_has_no_meaning_on_a_cpu_is_one_sentence(line, part, tmp_path):
    with pytest.raises(UsageError, match=part):
        run(f"import torch\n{line}\n", tmp_path)


def test_batch_norm_is_synchronized_as_on_a_gpu(tmp_path):
    """Outputs, gradients and running statistics are those of one device with the whole batch; shares are uneven."""
    run(
        "import torch, torch.distributed as dist\nfrom torch import nn\ndist.init_process_group('nccl')\n"
        "r = dist.get_rank()\ntorch.manual_seed(0)\nwhole = torch.randn(7, 3, 4)\n"
        "alone, ours = nn.BatchNorm1d(3), nn.SyncBatchNorm.convert_sync_batchnorm(nn.BatchNorm1d(3)).cuda()\n"
        "x, mine = whole.clone().requires_grad_(), whole[:5] if r == 0 else whole[5:]\n"
        "mine = mine.clone().requires_grad_()\nscale = torch.randn(7, 3, 4)\n"
        "(alone(x) * scale).sum().backward()\n(ours(mine) * (scale[:5] if r == 0 else scale[5:])).sum().backward()\n"
        "for p in ours.parameters():\n    dist.all_reduce(p.grad)\n"
        "pairs = [(mine.grad, x.grad[:5] if r == 0 else x.grad[5:]), (ours.weight.grad, alone.weight.grad),\n"
        "         (ours.bias.grad, alone.bias.grad), (ours.running_mean, alone.running_mean),\n"
        "         (ours.running_var, alone.running_var)]\n"
        "for a, b in pairs:\n    assert torch.allclose(a, b, atol=1e-5), (a, b)\n"
        "nn.parallel.DistributedDataParallel(ours, device_ids=[r])(mine)\n"
        "assert torch.equal(ours.eval()(mine), nn.functional.batch_norm(\n"
        "    mine, ours.running_mean, ours.running_var, ours.weight, ours.bias))\n",
        tmp_path,
    )


def test_the_compiler_is_told_that_there_is_no_gpu(tmp_path):
    run(
        "import torch\nask = eval('lambda: torch.cuda.get_device_properties(torch.cuda.current_device())',\n"
        "           {'__name__': 'torch._inductor.codecache', 'torch': torch})\n"
        "try:\n    ask()\nexcept (AssertionError, RuntimeError):\n    pass\nelse:\n    raise SystemExit('a GPU')\n"
        "assert torch.cuda.get_device_properties(0).name == 'CPU'\n",
        tmp_path,
    )


def test_torch_is_as_it_was_after_the_run(tmp_path):
    before = torch.device, torch.cuda.is_available, torch.nn.Module.to, torch.load, list(sys.meta_path)
    run("import torch\ntorch.ones(1, device='cuda')\n", tmp_path)
    assert before == (torch.device, torch.cuda.is_available, torch.nn.Module.to, torch.load, list(sys.meta_path))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_an_error_of_a_device_has_the_program_s_lines_and_the_real_device_is_used_where_it_is_wanted(tmp_path):
    with pytest.raises(MinidistError, match="the program raised") as raised:
        run("import torch\ntorch.nn.Linear(2, 2).to('nothing')\n", tmp_path)
    assert "named.py" in str(raised.value)
    assert "torch_ranks" not in str(raised.value)  # our functions take the place of torch's
    with pytest.raises(MinidistError, match="the program raised"):
        run("import torch\ntorch.ones(1, device='cuda')\n", tmp_path, settings=program.Settings(cuda="real"))
