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
# the whole matrix. A matrix stretches some directions and hardly changes others; the factors are its
# *singular values*. The largest one of a step may be nearly sixty times the smallest, so the step moves few
# directions. After five rounds of matrix products all singular values are roughly 1: the matrix is
# *orthogonalised*, and every direction moves about as far. How many times the smallest is the largest
# one then?
#
# On eight ranks each layer is one flat array, and each rank has an eighth of it (this is ZeRO 3, of the
# next lesson). To orthogonalise a step every rank may gather all matrices. Or each matrix has one *owner*:
# the ranks send their parts to it, and it sends the results back. How many times fewer bytes travel then?

# %% [markdown]
# ## 2 Predict
#
# Count for one matrix what n ranks send in all: every part to every other rank, or every part to one
# rank and back. A quarter off is good enough for both.

# %%
from minidist.course.lesson import check, picture, predict, reveal, small_job, solution

values_guess = predict("largest singular value over the smallest, after five rounds", example=1.0)
bytes_guess = predict("times fewer bytes with an owner for each matrix, 8 ranks", example=8.0)

# %%
import numpy as np

from minidist import LinkModel, SimWorld, all_gather
from minidist.base.trace_file import only_steps
from minidist.job.equality.compare import compare_rank
from minidist.job.train.trainer import train
from minidist.optim import newton_schulz

# %% [markdown]
# ## 3 The idea and its picture
#
# **What needs a whole matrix goes to one rank that has it.** The momentum stays where it is, in
# shards, and only the matrices of one step travel. What the owners save: bytes, and each product is
# computed once and not n times. What it costs: an owner waits for the parts, and the others for its
# result.
#
# Rank 0 in the second step of ZeRO 1 on four ranks. Between the gradients and the gather of the parameters
# are two all-to-alls, the parts on their way to the owners and the results on their way back:


# %%
def muon_job(**settings):
    """The settings of a job with Muon on a GPT of two layers."""
    muon = {"optimizer": "muon", "momentum": 0.95, "nesterov": True, "lr": 0.02}
    return small_job(layers=2, width=32, **muon, **settings)


world = SimWorld(4, links=LinkModel(alpha=2e-5, beta=1e-8, flops=3e9, memory_bandwidth=6e9))
world.run(train, muon_job(micro_batch=2, dp=4, zero=1, steps=2))
second = only_steps(world.traces, 1, 2)
picture("lanes", second, "part 3 of lesson 11c", title="rank 0: a step of ZeRO 1 with Muon")

# %% [markdown]
# ## 4 The code
#
# The momentum of a matrix is dominated by a few directions. Five rounds of a polynomial in it
# (Newton-Schulz) change its singular values only, and bring them between 0.7 and 1.2. Vectors,
# embeddings and the output layer take AdamW's step.


# %%
def toy_newton_schulz(matrix, rounds=5):
    a, b, c = 3.4445, -4.7750, 2.0315  # a s + b s^3 + c s^5 brings singular values s to 0.7 .. 1.2
    x = matrix / np.linalg.norm(matrix)
    for _ in range(rounds):
        square = x @ x.T
        x = a * x + (b * square + c * square @ square) @ x
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
values_guess.judge(singular_values(toy).max() / singular_values(toy).min(), within=0.25)

# %% [markdown]
# The simplest way with shards, with every message: gather the rows of all ranks, orthogonalise, and
# keep this rank's rows. The library's version is
# [whole_matrices.py](../minidist/parallel/whole_matrices.py).


# %%
def everywhere(comm, part):
    whole = all_gather(comm, part.reshape(-1)).reshape(-1, part.shape[1])
    return np.split(toy_newton_schulz(whole), comm.size)[comm.rank]


parts = SimWorld(2).run(lambda comm: everywhere(comm, np.split(momentum, 2)[comm.rank].copy()))
off = np.abs(np.concatenate(parts) - toy).max()
print(f"max |parallel - single| = {off:.0e}")
assert off < 1e-12

# %% [markdown]
# ## 5 Check
#
# The bytes of a step of eight ranks, both ways. Everywhere, each element goes to the n - 1 other ranks. With
# owners it goes to one rank and comes back, unless the owner has it: at most twice the matrices' bytes.

# %%
bytes_of = {}
for form in ("everywhere", "owner"):
    world = SimWorld(8)
    world.run(train, muon_job(global_batch=8, steps=1, dp=8, zero=3, orthogonalize=form))
    each = [trace.bytes_by_purpose()["muon"] for trace in world.traces]
    bytes_of[form] = sum(each)
    least, most = min(each), max(each)
    print(f"{form:10} {sum(each):7,} B from all ranks, {least:6,} to {most:6,} B from one of them")
matrices = bytes_of["everywhere"] // 7
times = bytes_of["owner"] / matrices
print(f"the matrices have {matrices:,} B; with owners {times:.2f} times as much travels")
bytes_guess.judge(bytes_of["everywhere"] / bytes_of["owner"], within=0.25)

# %% [markdown]
# The flat layer is cut into eighths, so a matrix lies on two or three ranks, and its owner is mostly another
# one. (Equal parts on all ranks would be 2 (n-1)/n, as the owner has one.) The owners are chosen so that
# all compute about as much, and the bytes of the ranks are unequal.
#
# The arithmetic is that of one device, so the bits are, too. Which form is cheaper depends on where the
# matrices are. With ZeRO 0 every rank has all of them, so "everywhere" sends nothing, and an owner sends
# its results. With ZeRO 1 and 2 the array of all parameters is cut, so most matrices lie on one rank, and
# here on four ranks this one is often the owner:

# %%
for zero in (0, 1, 2, 3):
    for form in ("owner", "everywhere"):
        world, job = (
            SimWorld(4),
            muon_job(micro_batch=2, steps=2, dp=4, zero=zero, orthogonalize=form),
        )
        verdict = world.run(compare_rank, job)[0]
        sent = sum(trace.bytes_by_purpose().get("muon", 0) for trace in world.traces) / 2
        print(
            f"ZeRO {zero}, {form:10} {sent:8,.0f} B per step; equal to one device: {verdict.equal}"
        )
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
# | `Muon` | Jordan et al. 2024, `torch.optim.Muon` |
# | `WholeMatrices` | Moonlight's Distributed Muon (everywhere), K. Jordan's and Dion's owner-computes |
# | `--nesterov` | PyTorch `SGD(nesterov=True)` |
#
# Next: [12 ZeRO 3 / FSDP](12_zero_3_fsdp.ipynb). All of them are in the [index](README.md).
