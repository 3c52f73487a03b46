"""Attention whose keys and values go around a ring of ranks, in an autograd function, under mp.spawn."""

import os
from functools import partial

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


class Around(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tensor, step):
        ctx.step = step
        return exchange(tensor, step)

    @staticmethod
    def backward(ctx, gradient):
        return exchange(gradient, -ctx.step), None


def exchange(tensor, step):
    rank, size = dist.get_rank(), dist.get_world_size()
    tensor = tensor.contiguous()
    received = torch.empty_like(tensor)
    operations = [
        dist.P2POp(dist.isend, tensor, (rank + step) % size),
        dist.P2POp(dist.irecv, received, (rank - step) % size),
    ]
    for request in dist.batch_isend_irecv(operations):
        request.wait()
    return received


def attention(q, k, v):
    scores, values = [], []
    for _ in range(dist.get_world_size()):
        scores.append(q @ k.transpose(-1, -2))
        values.append(v)
        k, v = Around.apply(k, 1), Around.apply(v, 1)
    return torch.cat(scores, -1).softmax(-1) @ torch.cat(values, -2)


def work(rank, size, port, scale):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=size)
    torch.manual_seed(0)
    whole = [(scale * torch.randn(3, 4 * size, 5)).requires_grad_() for _ in range(3)]
    parts = [each.detach().chunk(size, 1)[rank].clone().requires_grad_() for each in whole]
    out = attention(*parts)
    out.square().sum().backward()
    q, k, v = whole
    expected = (q @ k.transpose(-1, -2)).softmax(-1) @ v
    expected.square().sum().backward()
    assert torch.allclose(out, expected.chunk(size, 1)[rank], atol=1e-5)
    for mine, all_of_it in zip(parts, whole, strict=True):
        assert torch.allclose(mine.grad, all_of_it.grad.chunk(size, 1)[rank], atol=1e-4)
    print("rank", rank, "out", out.double().sum().item(), "k", parts[1].grad.double().abs().sum().item())
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(partial(work, scale=0.5), args=(3, 29618), nprocs=3)
