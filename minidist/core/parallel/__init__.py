"""Strategies: how ranks share the work of training one model. Each uses autograd to compute and comm to send.

dims.py                 the degrees of parallelism and their communicators
model_parallel.py       `parallelize_module`: a model split by a plan; and one function per axis for a whole model
data_parallel.py        data parallelism: gradients summed while backward runs
zero.py                 ZeRO 1 and 2, and one rank's shard of flat parameters
fsdp.py                 ZeRO 3: `fully_shard`, and when it gathers, releases and reduces
tensor_parallel.py      every matrix split over the ranks, the vocabulary too
context_parallel.py     ring attention, and which tokens of a split sequence a rank has
expert_parallel.py      each rank has some of the experts
"""
