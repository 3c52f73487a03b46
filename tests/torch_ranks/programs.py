"""Programs of torch.distributed for the tests: each is a source text, run on ranks as a file."""

import pytest


def run_source(folder, source, ranks, name="program.py", **options):
    """The run of a source text as a file."""
    program = pytest.importorskip("minidist.debug.torch_ranks.program")
    (folder / name).write_text(source)
    return program.run_on_ranks(program.load_program(str(folder / name)), ranks, **options)


DDP = """
import torch, torch.distributed as dist, torch.nn as nn

def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))

def data():
    torch.manual_seed(1)
    return torch.randn(16, 8), torch.randn(16, 4)

def gradients(model, x, y):
    ((model(x) - y) ** 2).mean().backward()
    return {name.removeprefix("module."): p.grad for name, p in model.named_parameters()}

def share(tensor):
    return tensor.chunk(dist.get_world_size())[dist.get_rank()]

def ddp():
    dist.init_process_group("nccl")
    x, y = data()
    return gradients(nn.parallel.DistributedDataParallel(model()), share(x), share(y))

def by_hand():
    dist.init_process_group("gloo")
    x, y = data()
    grads = gradients(model(), share(x), share(y))
    for name in grads:
        dist.all_reduce(grads[name])
        grads[name] /= dist.get_world_size()
    return grads

def forgets_to_divide():
    dist.init_process_group("gloo")
    x, y = data()
    grads = gradients(model(), share(x), share(y))
    for name in grads:
        dist.all_reduce(grads[name])
    return grads

def one_device():
    return gradients(model(), *data())
"""

SHARDED = """
import os, torch, torch.distributed as dist, torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from first import data, gradients, model

def split_layers(model, mesh):
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})

def shard_layers(model, mesh):
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh)

def fsdp():
    mesh = init_device_mesh("cpu", (int(os.environ["WORLD_SIZE"]),), mesh_dim_names=("dp",))
    net, (x, y) = model(), data()
    shard_layers(net, mesh)
    return gradients(net, x.chunk(mesh.size())[mesh.get_local_rank()], y.chunk(mesh.size())[mesh.get_local_rank()])

def tensor_parallel():
    mesh = init_device_mesh("cpu", (int(os.environ["WORLD_SIZE"]),), mesh_dim_names=("tp",))
    net, (x, y) = model(), data()
    split_layers(net, mesh)
    return gradients(net, x, y)

def two_axes():
    mesh = init_device_mesh("cpu", (int(os.environ["WORLD_SIZE"]) // 2, 2), mesh_dim_names=("dp", "tp"))
    net, (x, y) = model(), data()
    split_layers(net, mesh["tp"])
    shard_layers(net, mesh["dp"])
    part = mesh["dp"].get_local_rank()
    return gradients(net, x.chunk(mesh["dp"].size())[part], y.chunk(mesh["dp"].size())[part])
"""

CHECKPOINT = (
    SHARDED
    + """
import torch.distributed.checkpoint as dcp

def save_and_load(folder):
    mesh = init_device_mesh("cpu", (int(os.environ["WORLD_SIZE"]),), mesh_dim_names=("dp",))
    net = model()
    shard_layers(net, mesh)
    before = {name: p.full_tensor() for name, p in net.state_dict().items()}
    dcp.save({"model": net.state_dict()}, checkpoint_id=folder)
    with torch.no_grad():
        for p in net.parameters():
            p.zero_()
    state = {"model": net.state_dict()}
    dcp.load(state, checkpoint_id=folder)
    net.load_state_dict(state["model"])
    return before, {name: p.full_tensor() for name, p in net.state_dict().items()}
"""
)

PIPELINE = """
import torch, torch.distributed as dist, torch.nn as nn
from torch.distributed import pipelining
from torch.distributed.pipelining import PipelineStage

M = 8

def layers(n):
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(n)]

def loss(output, target):
    return ((output - target) ** 2).mean()

def data():
    torch.manual_seed(1)
    return torch.randn(2 * M, 8), torch.randn(2 * M, 8)

def gradients(parts):
    return {f"{n}.{name}": p.grad for n, part in parts.items() for name, p in part.named_parameters()}

def run(name, per_rank, is_v):
    dist.init_process_group("nccl")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    stages = ranks * per_rank
    mine = [rank, stages - 1 - rank] if is_v else [rank + ranks * c for c in range(per_rank)]
    parts = {n: part for n, part in enumerate(layers(stages)) if n in mine}
    built = [PipelineStage(parts[n], n, stages, torch.device("cpu")) for n in mine]
    schedule = getattr(pipelining, name, None) or getattr(pipelining.schedules, name)
    schedule = schedule(built[0] if per_rank == 1 else built, M, loss_fn=loss)
    x, y = data()
    schedule.step(*([x] if 0 in mine else []), **({"target": y} if stages - 1 in mine else {}))
    return gradients(parts)

def alone(stages):
    parts = dict(enumerate(layers(stages)))
    x, y = data()
    for x_part, y_part in zip(x.chunk(M), y.chunk(M)):
        for part in parts.values():
            x_part = part(x_part)
        (loss(x_part, y_part) / M).backward()
    return gradients(parts)
"""

HEAD = """import os, torch, torch.distributed as dist
dist.init_process_group('nccl')
r, n = dist.get_rank(), dist.get_world_size()
t = torch.ones(4)
"""

# Name -> (program, what the report must say).
BROKEN = {
    "every rank sends first": (
        HEAD + "dist.send(t, (r + 1) % n)\ndist.recv(t, (r - 1) % n)\n",
        ["circle: rank 0 -> rank 1 -> rank 2 -> rank 0", "broken.py:5"],
    ),
    "unlike collectives": (
        HEAD + "if r == 1:\n    dist.broadcast(t, 0)\nelse:\n    dist.all_reduce(t)\n",
        ["operation mismatch", "broken.py:6", "broken.py:8", "same order"],
    ),
    "a rank skips a collective": (
        HEAD + "for _ in range(3 - (r == 2)):\n    dist.all_reduce(t)\n",
        ["rank 2 has returned", "broken.py:6"],
    ),
    "only rank 0 enters the barrier": (
        HEAD + "if r == 0:\n    dist.barrier()\n",
        ["rank 0 waits in barrier", "broken.py:6"],
    ),
    "another shape on one rank": (HEAD + "dist.all_reduce(torch.ones(4 + (r == 1)))\n", ["mismatch", "broken.py:5"]),
    "another dtype on one rank": (
        HEAD + "dist.all_reduce(t.double() if r == 1 else t)\n",
        ["float64", "float32", "broken.py:5"],
    ),
    "unlike roots": (HEAD + "dist.broadcast(t, 0 if r else 1)\n", ["root", "broken.py:5"]),
    "groups in another order": (
        HEAD
        + "a, b = dist.new_group(list(range(n))), dist.new_group(list(range(n)))\n"
        + "for group in (b, a) if r == 0 else (a, b):\n    dist.all_reduce(t, group=group)\n",
        ["circle:", "broken.py:7"],
    ),
    "a receive from the wrong rank": (
        HEAD + "if r == 0:\n    dist.send(t, 1)\nif r == 1:\n    dist.recv(t, 2)\n",
        ["rank 1 waits in receive from rank 2", "broken.py:8"],
    ),
    "a collective of a group without this rank's partner": (
        HEAD + "group = dist.new_group([0, 1])\nif r == 0:\n    dist.all_reduce(t, group=group)\n",
        ["rank 0 waits in all_reduce", "broken.py:7"],
    ),
    "an asynchronous reduction that the others do not make": (
        HEAD + "work = dist.all_reduce(t, async_op=True) if r != 1 else None\nif work:\n    work.wait()\n",
        ["rank 1 has returned", "broken.py:5"],
    ),
    "a pipeline whose stages wait for each other": (
        HEAD + "if r < 2:\n    dist.recv(t, 1 - r)\n    dist.send(t, 1 - r)\n",
        ["circle: rank 0 -> rank 1 -> rank 0", "broken.py:6"],
    ),
}
