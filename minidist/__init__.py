"""minidist: distributed training that you can read, run on a laptop, and check.

The names of the core can be imported from here: `from minidist import SimWorld, Tensor`. A name is imported from
its module when it is used first, so `import minidist` loads nothing.
"""

from importlib import import_module
from typing import Any

from minidist import additions  # the core finds there what this package adds to it

__version__ = "0.2.0.dev0"

# Where each name is.
_MODULES = {
    "minidist.comm.errors": ("BufferReuseError", "UnwaitedRequestError"),
    "minidist.comm": ("MPIWorld", "SimWorld", "launch"),
    "minidist.core.autograd": (
        "AutogradError",
        "BackwardObserver",
        "BackwardPass",
        "Parameter",
        "Tensor",
        "cross_entropy",
        "gelu",
        "layer_norm",
        "matmul",
        "no_grad",
        "softmax",
    ),
    "minidist.base.flop_counter": ("FlopCounter", "current_flop_counter"),
    "minidist.base.coordinates": ("batch_coordinates",),
    "minidist.base.arrays": ("quiet_overflow",),
    "minidist.core.base.errors": ("DeadlockError", "MinidistError", "MismatchError", "UsageError"),
    "minidist.collectives": ("gather", "reduce", "scatter"),
    "minidist.collectives.algorithms": ("ALGORITHMS",),
    "minidist.core.base.layout": ("Layout", "chunk_sizes"),
    "minidist.base.traces": ("Trace",),
    "minidist.core.base.trace": ("new_purpose", "purpose"),
    "minidist.core.collectives": ("all_gather", "all_reduce", "all_to_all", "barrier", "broadcast", "reduce_scatter"),
    "minidist.comm.sim.links": ("LinkModel",),
    "minidist.core.comm": ("ANY", "Comm", "init_device_mesh"),
    "minidist.core.nn": ("Block", "FlatParameters", "GPT", "GPTConfig", "Linear", "MLP", "MixtureOfExperts", "Module"),
    "minidist.core.nn.layers": ("Embedding", "LayerNorm", "Sequential"),
    "minidist.core.nn.experts": ("expert_capacity",),
    "minidist.core.optim": ("AdamW", "SGD"),
    "minidist.optim.adam": ("Adam",),
    "minidist.core.parallel.context_parallel": ("RingAttention",),
    "minidist.core.parallel.dims": ("ParallelDims",),
    "minidist.core.parallel.expert_parallel": ("ExpertParallel",),
    "minidist.core.parallel.fsdp": ("fully_shard", "sharded_parameters", "shards_of"),
    "minidist.core.parallel.data_parallel": ("make_buckets",),
    "minidist.core.parallel.model_parallel": ("parallelize_module",),
    "minidist.core.parallel.tensor_parallel": (
        *("RowParallelLinear", "copy_to_tensor_parallel_region", "vocab_parallel_cross_entropy", "vocab_range"),
    ),
    "minidist.core.pipeline.runtime": ("PipelineStage", "Reduction", "split_model"),
    "minidist.pipeline.runtime.pipeline": ("Pipeline",),
    "minidist.pipeline.errors": ("PlanError",),
    "minidist.core.train.parallelize": ("Loop", "parallelize"),
    "minidist.core.train.task": ("ParallelLayout", "Task", "global_loss"),
    "minidist.data": ("glyphs", "load_dataset"),
    "minidist.job.config.train_config": ("TrainConfig",),
    "minidist.nn": ("Dropout", "Llama", "LlamaConfig", "ModuleDict", "ModuleList", "RMSNorm", "mse_loss", "relu"),
    "minidist.parallel.context.orders": ("part_order", "sequence_positions"),
    "minidist.parallel.context.ulysses": ("UlyssesAttention",),
    "minidist.parallel.fitting_dims": ("gradient_axes",),
    "minidist.parallel.data_parallel": ("DistributedDataParallel", "GradientReducer"),
    "minidist.parallel.tensor.sequence_layers": ("gpt_plan",),
    "minidist.parallel.tensor.sequence_regions": (
        "gather_from_sequence_parallel_region",
        "reduce_scatter_to_sequence_parallel_region",
    ),
    "minidist.parallel.unreduced": ("UnusedParameterError",),
    "minidist.parallel.zero": ("ZeroOptimizer",),
    "minidist.pipeline.schedules": ("get_schedule",),
}
# PyTorch's names, and MPI's, of what has another name here.
_CALLED = {"DDP": "DistributedDataParallel", "FSDP": "fully_shard", "init_process_group": "launch"}
_PACKAGES = {"flight_recorder": "minidist.debug.flight_recorder"}
_PLACES = {name: module for module, names in _MODULES.items() for name in names}

__all__ = [*_PLACES, *_PACKAGES]


def __getattr__(name: str) -> Any:
    if name in _PACKAGES:
        value = import_module(_PACKAGES[name])
    elif name in _PLACES:
        value = getattr(import_module(_PLACES[name]), name)
    else:
        here = f"; it is called {_CALLED[name]} here" if name in _CALLED else ""
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}{here}")
    globals()[name] = value  # kept, so that it is looked up once
    return value


def __dir__() -> list[str]:
    return sorted([*(name for name in globals() if name.startswith("__")), *__all__])
