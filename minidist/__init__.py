"""minidist: distributed training that you can read, run on a laptop, and check.

The names of the core can be imported from here: `from minidist import SimWorld, Tensor`. A name is imported from
its module when it is used first, so `import minidist` loads nothing.
"""

from importlib import import_module
from typing import Any

from minidist import additions  # noqa: F401  the core finds there what this package adds to it

__version__ = "0.2.0.dev0"

# Where each name is.
_MODULES = {
    "minidist.autograd": ("Parameter", "Tensor", "cross_entropy", "no_grad"),
    "minidist.base.errors": ("DeadlockError", "MismatchError", "UsageError"),
    "minidist.base.trace": ("purpose",),
    "minidist.collectives": (
        "all_gather",
        "all_reduce",
        "all_to_all",
        "broadcast",
        "gather",
        "reduce_scatter",
        "scatter",
    ),
    "minidist.comm": ("ANY", "Comm", "LinkModel", "MPIWorld", "SimWorld", "init_device_mesh", "launch"),
    "minidist.job.config.train_config": ("TrainConfig",),
    "minidist.data": ("glyphs", "load_dataset"),
    "minidist.nn": ("GPT", "MLP", "GPTConfig", "Linear", "Llama", "LlamaConfig", "Module"),
    "minidist.optim": ("SGD", "Adam", "AdamW"),
    "minidist.parallel": ("DistributedDataParallel", "ZeroOptimizer", "fully_shard"),
    "minidist.pipeline.schedules": ("get_schedule",),
    "minidist.pipeline.runtime": ("Pipeline", "split_model"),
    "minidist.job.train.layout": ("ParallelLayout",),
    "minidist.job.train.loop": ("Loop",),
    "minidist.job.train.parallelize": ("parallelize",),
    "minidist.job.train.task": ("Task",),
}
_PACKAGES = {"flight_recorder": "minidist.debug.flight_recorder"}
_PLACES = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name in _PACKAGES:
        value = import_module(_PACKAGES[name])
    elif name in _PLACES:
        value = getattr(import_module(_PLACES[name]), name)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value  # kept, so that it is looked up once
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_PLACES, *_PACKAGES])
