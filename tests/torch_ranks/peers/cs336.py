"""What the tests of Stanford CS336's second assignment demand, in our words, of answers that are written here.

Replicas that start as rank 0's and train as one device; a weight that two layers share, and one that is not trained; an
optimizer of a share of the parameters; shards of each parameter, gathered in float32 or in float16. The names are those
that the course asks its students for.
"""

import copy
import sys

import torch
import torch.distributed as dist
from torch import nn

STEPS, ROWS, RATE = 4, 6, 0.1


class Toy(nn.Module):
    """tied: the second matrix is the last one too. One parameter is never trained."""

    def __init__(self, tied):
        super().__init__()
        self.first, self.middle = nn.Linear(5, 4), nn.Linear(4, 4, bias=False)
        self.norm, self.last = nn.LayerNorm(4), nn.Linear(4, 4, bias=False)
        self.no_grad_fixed_param = nn.Parameter(torch.tensor([2.0, 3.0]), requires_grad=False)
        if tied:
            self.last.weight = self.middle.weight

    def forward(self, x):
        return self.last(self.norm(torch.relu(self.middle(torch.relu(self.first(x))))))


# The answers ----------------------------------------------------------------------------------------------------------


class Replica(nn.Module):
    def __init__(self, module):
        super().__init__()
        self.module = module
        for parameter in module.parameters():
            dist.broadcast(parameter.data, 0)

    def forward(self, x):
        return self.module(x)

    def average(self):
        for parameter in self.module.parameters():  # a shared one comes once
            if parameter.grad is not None:
                dist.all_reduce(parameter.grad)
                parameter.grad /= dist.get_world_size()


def get_ddp(module):
    return Replica(module)


def ddp_on_after_backward(ddp_model, optimizer):
    ddp_model.average()


class Sharded(torch.optim.Optimizer):
    """Parameter i is stepped by rank i mod n, which then broadcasts it."""

    def __init__(self, params, optimizer_cls, **kwargs):
        everything = list(params)
        own = everything[dist.get_rank() :: dist.get_world_size()]
        super().__init__(everything, {})
        self.inner = optimizer_cls(own, **kwargs)

    def step(self):
        self.inner.step()
        for number, parameter in enumerate(self.param_groups[0]["params"]):
            dist.broadcast(parameter.data, number % dist.get_world_size())


def get_sharded_optimizer(params, optimizer_cls, **kwargs):
    return Sharded(params, optimizer_cls, **kwargs)


class FullySharded(nn.Module):
    """The matrices are cut by elements; what is not a matrix is on every rank.

    A matrix exists from a forward to its backward: gathered in `dtype`, and its gradient reduced in float32.
    """

    def __init__(self, module, dtype):
        super().__init__()
        self.module, self.dtype = module, dtype
        self.whole = {}
        for name, parameter in module.named_parameters():
            dist.broadcast(parameter.data, 0)
            if parameter.ndim == 2:
                self.whole[name] = parameter.shape
                parameter.data = self.padded(parameter.data).chunk(dist.get_world_size())[dist.get_rank()].clone()

    def padded(self, tensor):
        size = dist.get_world_size()
        return nn.functional.pad(tensor.reshape(-1), (0, -tensor.numel() % size))

    def gathered(self, name, dtype):
        shard, shape = self.module.get_parameter(name).data, self.whole[name]
        parts = [torch.empty_like(shard, dtype=dtype) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, shard.to(dtype))
        return torch.cat(parts)[: shape.numel()].view(shape)

    def forward(self, x):
        dtype = self.dtype or torch.float32
        self.used = {}
        for name, parameter in self.module.named_parameters():
            value = self.gathered(name, dtype) if name in self.whole else parameter.data.to(dtype)
            self.used[name] = value.requires_grad_(parameter.requires_grad)
        return torch.func.functional_call(self.module, self.used, (x.to(dtype),), tie_weights=True)

    def reduce(self):
        size = dist.get_world_size()
        for name, parameter in self.module.named_parameters():
            gradient = self.used[name].grad
            if gradient is None:
                continue
            gradient = gradient.float() / size
            if name in self.whole:
                parameter.grad = torch.empty_like(parameter)
                dist.reduce_scatter(parameter.grad, list(self.padded(gradient).chunk(size)))
            else:
                dist.all_reduce(gradient)
                parameter.grad = gradient


def get_fsdp(module, compute_dtype=None):
    return FullySharded(module, compute_dtype)


def fsdp_on_after_backward(fsdp_model, optimizer):
    fsdp_model.reduce()


def fsdp_gather_full_params(fsdp_model):
    named = fsdp_model.module.named_parameters()
    return {n: fsdp_model.gathered(n, torch.float32) if n in fsdp_model.whole else p.data for n, p in named}


# What is demanded of them ---------------------------------------------------------------------------------------------


def models(tied, device):
    """Return rank 0's model, for one device, and a model of this rank, which differs from it."""
    torch.manual_seed(0)
    alone = Toy(tied).to(device)
    torch.manual_seed(dist.get_rank())
    return alone, Toy(tied).to(device)


def batches(device):
    torch.manual_seed(7)
    rows = ROWS * dist.get_world_size()
    for _ in range(STEPS):
        x, y = torch.randn(rows, 5).to(device), torch.randn(rows, 4).to(device)
        own = slice(ROWS * dist.get_rank(), ROWS * (dist.get_rank() + 1))
        yield (x, y), (x[own], y[own])


def train_one(model, optimizer, batch, after=None):
    x, y = batch
    optimizer.zero_grad()
    output = model(x)
    nn.functional.mse_loss(output, y.to(output.dtype)).backward()
    if after:
        after(model, optimizer)
    optimizer.step()
    return output


def compare(name, got, wanted, tolerance=1e-6):
    for key, value in wanted.items():
        assert got[key].shape == value.shape
        assert torch.allclose(got[key], value, rtol=tolerance, atol=tolerance), (name, key, got[key], value)
    total = sum(value.double().sum().item() for value in got.values())
    print("rank", dist.get_rank(), name, "sum", total)


def test_ddp(tied, device):
    alone, own = models(tied, device)
    started = copy.deepcopy(own.state_dict())
    wrapped = get_ddp(own)
    assert dist.get_rank() == 0 or not torch.equal(own.first.weight, started["first.weight"])
    optimizers = [torch.optim.SGD(model.parameters(), lr=RATE) for model in (alone, own)]
    for whole, rows in batches(device):
        train_one(alone, optimizers[0], whole)
        train_one(wrapped, optimizers[1], rows, ddp_on_after_backward)
        compare(f"ddp tied={tied}", dict(own.named_parameters()), dict(alone.named_parameters()))
    assert torch.equal(own.no_grad_fixed_param, started["no_grad_fixed_param"])


def test_sharded_optimizer(tied, device):
    alone, _ = models(tied, device)
    own = copy.deepcopy(alone)
    settings = {"lr": RATE, "weight_decay": 0.1, "betas": (0.9, 0.999), "eps": 1e-8}
    optimizers = [
        torch.optim.AdamW(alone.parameters(), **settings),
        get_sharded_optimizer(own.parameters(), torch.optim.AdamW, **settings),
    ]
    for whole, _ in batches(device):
        for model, optimizer in zip((alone, own), optimizers, strict=True):
            train_one(model, optimizer, whole)
    compare(f"sharded optimizer tied={tied}", dict(own.named_parameters()), dict(alone.named_parameters()), 1e-5)


def test_fsdp(dtype, device):
    alone, own = models(False, device)
    shapes = {name: parameter.shape for name, parameter in own.named_parameters()}
    wrapped = get_fsdp(own, dtype)
    optimizers = [torch.optim.SGD(alone.parameters(), lr=RATE), torch.optim.SGD(wrapped.parameters(), lr=RATE)]
    for whole, rows in batches(device):
        train_one(alone, optimizers[0], whole)
        output = train_one(wrapped, optimizers[1], rows, fsdp_on_after_backward)
        assert output.dtype == (dtype or torch.float32)

    # A matrix is a share of it, in float32 as its gradient is, and what is trained has a gradient.
    for name, parameter in own.named_parameters():
        share = -(-shapes[name].numel() // dist.get_world_size()) if len(shapes[name]) == 2 else shapes[name].numel()
        assert parameter.numel() == share
        assert parameter.dtype == torch.float32
        if parameter.requires_grad:
            assert (parameter.grad.shape, parameter.grad.dtype) == (parameter.shape, torch.float32)
        else:
            assert parameter.grad is None
    compare(f"fsdp {dtype}", fsdp_gather_full_params(wrapped), dict(alone.named_parameters()), 1e-2 if dtype else 1e-6)


def main():
    on_cpu = "--cpu" in sys.argv
    dist.init_process_group("gloo" if on_cpu else "nccl")
    device = "cpu" if on_cpu else f"cuda:{dist.get_rank()}"
    for tied in (False, True):
        test_ddp(tied, device)
        test_sharded_optimizer(tied, device)
    for dtype in (None, torch.float16):
        test_fsdp(dtype, device)
    dist.destroy_process_group()


main()
