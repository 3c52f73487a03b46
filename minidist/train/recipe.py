"""The recipe: every kind of parallelism, applied to one model in a fixed order, on one page.

    1  experts       expert parallel: each rank has some of them
    2  layers        tensor (and sequence) parallel: each rank keeps its tiles of every matrix, also of its experts'
    3  sequences     context parallel: each rank has a part of every sequence; attention crosses the parts
    4  activations   recomputed in backward instead of kept
    5  stages        the model cut into a pipeline
    6  data          each stage's parameters spread over the ranks that see other rows: DDP, ZeRO, FSDP

Every rank builds the whole model from the seed and keeps its part, so all parts together are the model of one device;
that is why a plan of tiles can speak of the whole model's names although it is cut into stages later. The order is not
free: tiles must be cut before parameters become flat arrays (6), and a replay (4) must replay the messages of 1 to 3.
Gradients are
finished inside out: tiles and norms while backward runs (2, 3), then copies of a tied weight on two stages (5), then
the data axis (6), then clip, then step; with ZeRO 2 and 3 the data axis comes first, in every micro-batch, and the
copies' shards last.
"""

from functools import partial

from minidist.base import arrays as xp
from minidist.comm import Comm
from minidist.config.train_config import updates_of
from minidist.nn.recompute import recompute
from minidist.parallel import HostCopy
from minidist.parallel.model_parallel import (
    apply_context_parallel,
    apply_expert_parallel,
    apply_tensor_parallel,
    use_positions,
)
from minidist.train.job import Job
from minidist.train.strategies.asynchronous import AsynchronousPipeline
from minidist.train.strategies.base import Strategy
from minidist.train.strategies.data_axes import data_axes
from minidist.train.strategies.pipelines import PipelineParallel


def parallelize(job: Job, comm: Comm) -> Strategy:
    """This rank's part of the job's model, with every axis applied. All ranks of `comm` call it.

    Sends the weights of rank 0 along the data axis (purpose startup); in a pipeline also what `Pipeline` says at its
    start.
    """
    axes = job.batches.dims.axes(comm)
    config = job.config
    if axes.ep.size > 1:  # 1
        job.model = apply_expert_parallel(job.model, axes.ep)
    if axes.tp.size > 1:  # 2
        job.model = apply_tensor_parallel(job.model, axes.tp, config.sequence_parallel)
    if axes.cp.size > 1:  # 3
        job.positions = apply_context_parallel(job.model, axes.cp, config.context, config.attention)
    elif config.model == "llama":  # a stage that holds 1/tp of the sequence needs the angles of all of it
        use_positions(job.model, xp.arange(config.context))
    recompute_blocks(job)
    if axes.pp.size > 1 and updates_of(job.config.schedule) != "flush":
        return AsynchronousPipeline(job, axes)
    if axes.pp.size > 1:
        return PipelineParallel(job, axes)  # cuts the stages and makes each one's data axes
    return Strategy(job, axes, data_axes(job, job.model, axes))


def recompute_blocks(job: Job) -> None:
    """4: blocks keep their input only (full), segments of blocks do (sqrt, budget:BYTES), or attention (selective).

    A pipeline's plan runs a whole stage's forward again, so with `full` nothing inside the stage does, unless the
    blocks' inputs are to wait on the host.
    """
    config = job.config
    pack = partial(HostCopy, pool=job.pool) if job.pool is not None and config.offload == "activations" else None
    if config.pp == 1 or config.recompute == "selective" or pack is not None:
        rows = config.context if job.positions is None else len(job.positions)
        rows //= config.tp if config.sequence_parallel else 1
        shape = (job.batches.micro_batch, *(() if config.model == "mlp" else (rows,)), config.width)
        recompute(job.model, config.recompute, pack, shape, job.dtype)
