"""A program of torch.distributed that calls every collective and compares its result. Run by test_program.py."""

import torch
import torch.distributed as dist

dist.init_process_group("nccl")
r, n = dist.get_rank(), dist.get_world_size()
x = torch.arange(4.0) + 10 * r
every = [torch.arange(4.0) + 10 * k for k in range(n)]
total = sum(every)


def same(found, expected):
    assert torch.equal(found, expected), (found, expected)


# Reductions.
for op, expected in ((dist.ReduceOp.SUM, total), (dist.ReduceOp.MAX, every[-1]), (dist.ReduceOp.MIN, every[0])):
    y = x.clone()
    dist.all_reduce(y, op)
    same(y, expected)
y = x.to(torch.bfloat16)
dist.all_reduce(y)
same(y, total.to(torch.bfloat16))
y = torch.complex(x, x)
dist.all_reduce(y)
same(y.imag, total)
y = torch.tensor([r == 1])
dist.all_reduce(y, dist.ReduceOp.MAX)
assert y.item()
y = x.clone()
dist.reduce(y, 1)
same(y, total if r == 1 else x)
y = torch.empty(4)
dist.reduce_scatter(y, [x + k for k in range(n)])
same(y, total + n * r)
dist.reduce_scatter_tensor(y, torch.cat([x] * n))
same(y, total)

# Moves.
y = x.clone()
dist.broadcast(y, 2)
same(y, every[2])
parts = [torch.empty(4) for _ in range(n)]
dist.all_gather(parts, x)
same(torch.cat(parts), torch.cat(every))
y = torch.empty(4 * n)
dist.all_gather_into_tensor(y, x)
same(y, torch.cat(every))
parts = [torch.empty(4) for _ in range(n)] if r == 0 else None
dist.gather(x, parts)
if parts is not None:
    same(torch.cat(parts), torch.cat(every))
y = torch.empty(4)
dist.scatter(y, every if r == 0 else None)
same(y, x)
y = torch.empty(n)
dist.all_to_all_single(y, torch.arange(float(n)) + 10 * r)
same(y, torch.tensor([10.0 * k + r for k in range(n)]))
y = torch.empty(n * (r + 1))
dist.all_to_all_single(y, torch.arange(6.0) + 10 * r, [r + 1] * n, [1, 2, 3])
first = [0, 1, 3][r]
same(y, torch.cat([torch.arange(6.0)[first : first + r + 1] + 10 * k for k in range(n)]))
parts = [torch.empty(1 + r) for _ in range(n)]
dist.all_to_all(parts, [torch.full((1 + k,), float(r)) for k in range(n)])
assert [part.tolist() for part in parts] == [[k] * (1 + r) for k in range(n)]
objects = [None] * n
dist.all_gather_object(objects, {"rank": r})
assert objects == [{"rank": k} for k in range(n)]

# Messages.
y = torch.empty(4)
operations = [dist.P2POp(dist.isend, x, (r + 1) % n), dist.P2POp(dist.irecv, y, (r - 1) % n)]
for work in dist.batch_isend_irecv(operations):
    work.wait()
same(y, every[(r - 1) % n])
if r:
    dist.send(x, 0)
else:
    assert {dist.recv(y) for _ in range(n - 1)} == set(range(1, n))

# Asynchronous.
y = x.clone()
work = dist.all_reduce(y, async_op=True)
assert not work.is_completed()
work.wait()
same(y, total)
dist.barrier()
print("done", r)
