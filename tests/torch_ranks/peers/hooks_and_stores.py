"""Communication hooks of DistributedDataParallel, and a store between the ranks."""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

on_cpu = "--cpu" in sys.argv
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
store = dist.TCPStore("127.0.0.1", 29621, size, rank == 0)
if rank == size - 1:
    store.set("where", "rank 1 is told")
if rank == 1:
    print("rank 1", store.get("where").decode())
dist.init_process_group("gloo" if on_cpu else "nccl", store=store, rank=rank, world_size=size)
prefixed = dist.PrefixStore("count", store)
prefixed.add("number", rank)
dist.barrier()
print("rank", rank, "number", prefixed.add("number", 0), store.check(["nothing"]))


def train(register):
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(12, 8))
    register(model)
    torch.manual_seed(rank)
    for _ in range(4):
        model.zero_grad()
        model(torch.randn(5, 12)).square().mean().backward()
        for parameter in model.parameters():
            parameter.data -= 0.1 * parameter.grad
    return model.module.weight.double().sum().item()


def scaled(state, bucket):
    return dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(lambda future: future.value()[0] / 8)


state = powerSGD_hook.PowerSGDState(process_group=None, matrix_approximation_rank=1, start_powerSGD_iter=2)
print("rank", rank, "fp16", train(lambda model: model.register_comm_hook(None, default_hooks.fp16_compress_hook)))
print("rank", rank, "own", train(lambda model: model.register_comm_hook(None, scaled)))
print("rank", rank, "power", train(lambda model: model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)))
dist.destroy_process_group()
