# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 11c Muon: whole matrices
#
# *25 minutes. Before it: 11b.*
#
# ## 1 The case
#
# Adam steps a shard as if it had the whole, and a trust ratio needs two numbers of a layer. *Muon* needs
# the whole matrix. A matrix stretches some directions much and others little; the factors are its
# *singular values*. Where a few of them are much larger than the others, a step moves few directions. In Muon
# the step is *orthogonalised*: all its singular values become roughly 1. That takes five rounds of matrix products;
# each round replaces a singular value s by 3.4445 s - 4.7750 s^3 + 2.0315 s^5. What is a singular value of 0.001
# after the five rounds?
#
# On eight ranks ZeRO 1 cuts the flat array of all parameters into eighths, with no regard to where a matrix begins or
# ends. To orthogonalise a step every rank may gather all matrices. Or each matrix has one *owner*:
# the ranks send their parts to it, and it sends the results back. How many times fewer bytes travel then?

# %% [markdown]
# ## 2 Predict
#
# For a small s only the first term counts. For the bytes, count for one matrix what n ranks send in all: every part
# to every other rank, or every part to one rank and back. A tenth off is good enough for both.

# %%
from minidist.course.lesson import check, picture, predict, reveal, small_job, solution

value_guess = predict("a singular value of 0.001, after five rounds", example=1.0)
bytes_guess = predict("times fewer bytes with an owner for each matrix, 8 ranks", example=8.0)

# %%
from unittest.mock import patch

import numpy as np

from minidist import LinkModel, SimWorld
from minidist.base.trace_file import only_steps
from minidist.job.equality.compare import compare_rank
from minidist.job.train.trainer import train
from minidist.optim import newton_schulz
from minidist.parallel.whole_matrices import WholeMatrices
from minidist.report import show
from minidist.report.frame import new_panel

# %% [markdown]
# ## 3 The idea and its picture
#
# **What needs a whole matrix goes to one rank that has it.** The momentum stays where it is, in
# shards, and only the matrices of one step travel. What the owners save: bytes, and each product is
# computed once and not n times. But an owner waits for the parts, and the others for its result.
#
# Whether Muon trains better than Adam is another question, which a small job does not decide (Jordan et al. 2024 report
# it for larger ones).
#
# Rank 0 in the second step of ZeRO 1 on four ranks, above with owners, below with all matrices on all ranks; the five
# rounds take the time of their products on the clock. In the darkest colour are, above, two exchanges in which
# every rank may send to every other (*all-to-alls*), the parts on their way to the owners and the results on their way
# back, and below one gather, which is larger:


# %%
def muon_job(**settings):
    """A job with Muon on a GPT of two layers (momentum and Nesterov's variant: lesson 02b)."""
    muon = {"optimizer": "muon", "momentum": 0.95, "nesterov": True, "lr": 0.02}
    return small_job(layers=2, width=32, **muon, **settings)


orthogonal = WholeMatrices._orthogonal


def with_time(self, parameter, update, shapes):
    """The library's, which computes the five rounds of one matrix, with their time on the clock."""
    comm, _ = self._placement([parameter])
    rows, columns = sorted(shapes[parameter.name])
    flops = 5 * (4 * rows**2 * columns + 2 * rows**3)
    comm.compute(operations=[(flops, 0)], name="five rounds")
    return orthogonal(self, parameter, update, shapes)


for form in ("owner", "everywhere"):
    links = LinkModel(alpha=2e-5, beta=1e-8, flops=3e9, memory_bandwidth=6e9)
    world = SimWorld(4, links=links)
    with patch.object(WholeMatrices, "_orthogonal", with_time):
        world.run(train, muon_job(micro_batch=2, dp=4, zero=1, steps=2, orthogonalize=form))
    second = only_steps(world.traces, 1, 2)
    title = f"rank 0: a step of ZeRO 1 with Muon, {form}"
    picture("lanes", second, "part 3 of lesson 11c", title=title, most_seconds=1e-2)

# %% [markdown]
# ## 4 The code
#
# Divided by the root of the sum of its squares, a matrix has singular values of at most 1. What five rounds make of
# them:

# %%
A, B, C = 3.4445, -4.7750, 2.0315


def five_rounds(s):
    for _ in range(5):
        s = A * s + B * s**3 + C * s**5
    return s


values = np.geomspace(0.0003, 1, 2000)
figure, axes = new_panel(8, 2.6)
axes.plot(values, values, color="#BBBBBB", label="before")
axes.plot(values, five_rounds(values), color="#4477AA", label="after five rounds")
axes.axhline(1, color="#BBBBBB", linestyle=":")
axes.plot(0.001, five_rounds(0.001), "o", color="#4477AA")
axes.set_xscale("log")
axes.set_xticks(ticks := [0.001, 0.003, 0.01, 0.1, 1], [str(tick) for tick in ticks])
axes.set_xlabel("singular value before")
axes.set_title("singular values, before and after", fontsize=10, loc="left")
axes.legend(fontsize=8)
show(figure)
many = five_rounds(np.geomspace(0.003, 1, 1000))
print(f"those from 0.003 to 1 become {many.min():.2f} to {many.max():.2f}")
value_guess.judge(five_rounds(0.001), within=0.1)

# %% [markdown]
# A round multiplies a small s by 3.4445, so five rounds by 485 at most: the three numbers are chosen for a steep start.
# The price is that what is not small does not come to 1, but between about 0.7 and 1.2; that is near enough. The same
# polynomial in matrices (a Newton-Schulz iteration) changes the
# singular values in this way, and nothing else: x xᵀ x has the directions of x, and the cubes of its singular values.
# Vectors, embeddings and the output layer take AdamW's step.


# %%
def toy_newton_schulz(matrix, rounds=5):
    """For a matrix that is not taller than wide; the library transposes a tall one first."""
    x = matrix / np.linalg.norm(matrix)
    for _ in range(rounds):
        square = x @ x.T
        x = A * x + (B * square + C * square @ square) @ x
    return x


# %% [markdown]
# A momentum of 4 x 6 numbers that is mostly one direction:


# %%
def singular_values(matrix):
    return np.linalg.svd(matrix, compute_uv=False)


noise = np.random.default_rng(0).normal(size=(4, 6))
momentum = np.outer(np.arange(1.0, 5), np.arange(1.0, 7)) + noise
toy = toy_newton_schulz(momentum)
print("singular values before:", np.round(singular_values(momentum), 2))
print("and after:             ", np.round(singular_values(toy), 2))
print(f"max |toy - library| = {np.abs(toy - newton_schulz(momentum)).max():.0e}")
assert np.allclose(toy, newton_schulz(momentum), atol=1e-6)
assert 0.65 < singular_values(toy).min() < singular_values(toy).max() < 1.25

# %% [markdown]
# With shards, an owner receives the rows of the other ranks, orthogonalises, and sends each rank its rows of the
# result. Here rank 0 owns the only matrix, and all ranks have equally many rows of it. The library's version is
# [whole_matrices.py](../minidist/parallel/whole_matrices.py).


# %%
def at_owner(comm, part):
    if comm.rank > 0:
        comm.send(part, 0)
        result = np.empty_like(part)
        comm.recv(result, 0)
        return result
    parts = [part, *(np.empty_like(part) for _ in range(1, comm.size))]
    for other in range(1, comm.size):
        comm.recv(parts[other], other)
    results = np.split(toy_newton_schulz(np.concatenate(parts)), comm.size)
    for other in range(1, comm.size):
        comm.send(results[other], other)
    return results[0]


# %% [markdown]
# Two ranks, and the same on one device:

# %%
results = SimWorld(2).run(lambda comm: at_owner(comm, np.split(momentum, 2)[comm.rank].copy()))
off = np.abs(np.concatenate(results) - toy).max()
print(f"max |parallel - single| = {off:.0e}")
assert off < 1e-12

# %% [markdown]
# ## 5 Check
#
# The bytes of a step of eight ranks, both ways. "Everywhere" means that every rank gathers all matrices and
# orthogonalises them, so each element goes to the n - 1 other ranks. With owners it goes to one rank and comes back,
# unless the owner has it: at most twice the matrices' bytes.

# %%
bytes_of = {}
for form in ("everywhere", "owner"):
    world = SimWorld(8)
    world.run(train, muon_job(global_batch=8, steps=1, dp=8, zero=1, orthogonalize=form))
    each = [trace.bytes_by_purpose()["muon"] for trace in world.traces]
    bytes_of[form] = sum(each)
    least, most = min(each), max(each)
    print(f"{form:10} {sum(each):7,} B from all ranks, {least:6,} to {most:6,} B from one of them")
matrices = bytes_of["everywhere"] // 7
times = bytes_of["owner"] / matrices
print(f"the matrices have {matrices:,} B; with owners {times:.2f} times as much travels")
bytes_guess.judge(bytes_of["everywhere"] / bytes_of["owner"], within=0.1)

# %% [markdown]
# The owners are chosen so that all compute about as much, and here no owner has a part of its matrix already. So every
# element travels twice, and the bytes of the ranks are unequal.
#
# `compare_rank` trains a job on these ranks and on one device, and compares every array of each step, bit for bit.
# The one device computes the micro-batches of the ranks one after the other and adds them in the order of the ranks
# (lesson 04b); as one matrix product over all rows it would have other last bits:

# %%
for form in ("owner", "everywhere"):
    job = muon_job(micro_batch=2, steps=2, dp=4, zero=1, orthogonalize=form)
    verdict = SimWorld(4).run(compare_rank, job)[0]
    print(f"{form:10} four ranks have the bits of one device: {verdict.equal}")
    assert verdict.equal

# %% [markdown]
# ## 6 Break it
#
# Newton-Schulz of a shard is not the shard of Newton-Schulz. Here two ranks orthogonalise their rows, and
# send nothing:

# %%
shards = [toy_newton_schulz(rows) for rows in np.split(momentum, 2)]
values = singular_values(np.concatenate(shards))
print("singular values of the two halves:", np.round(values, 2))
assert values.max() / values.min() > 2.5

# %% [markdown]
# Each half is orthogonalised, and the whole step is not: one direction hardly moves. Nothing fails.
# (minidist's `Muon` refuses a parameter of which a rank has a shard only, unless it is told how to make it
# whole.)

# %% [markdown]
# ## 7 Exercise: each matrix at its owner
#
# The rows of several matrices lie on the ranks: `parts[k]` are this rank's rows of matrix k, and
# `rows[k][r]` says how many rank r has. The owner of matrix k is rank k % n. Return this rank's rows of
# `orthogonalize(matrix k)` for every k. What is judged: the rows, and the bytes: each part goes to the owner
# and back, and nowhere else.


# %%
def owners_compute(comm, parts, rows, orthogonalize):
    return [orthogonalize(part) if len(part) else part for part in parts]


check("11c.owners_compute", owners_compute)

# %%
reveal("11c.owners_compute")
check("11c.owners_compute", solution("11c.owners_compute"))

# %% [markdown]
# ## 8 Takeaway
#
# - Muon: momentum with singular values of about 1. It needs **whole matrices**, and Newton-Schulz of
#   a shard is not the shard of Newton-Schulz.
# - Gathered everywhere, n - 1 times the matrices' bytes travel and every rank computes all of them;
#   at one owner each it is **at most twice** their bytes, and 1/n of the arithmetic.

# %% [markdown]
# ## 9 The same code under mpiexec
#
#     mpiexec -n 4 minidist train --optimizer muon --momentum 0.95 --nesterov --lr 0.02 --dp 4 --zero 1 --steps 20
#     mpiexec -n 4 python mpi_examples/7_more/muon.py

# %% [markdown]
# ## 10 What others call it
#
# | here | elsewhere |
# |---|---|
# | `Muon` | Jordan et al. 2024, `torch.optim.Muon`, which multiplies the step by a factor of the matrix's shape (`adjust_lr_fn`) |
# | `WholeMatrices` | Moonlight's Distributed Muon (everywhere), K. Jordan's (owner computes), Dion's (parts to the owner) |
# | `--nesterov` | PyTorch `SGD(nesterov=True)` |
#
# Next: [12 ZeRO 3 / FSDP](12_zero_3_fsdp.ipynb). All lessons are in the [index](README.md).
