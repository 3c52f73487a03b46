"""Refuses wrong plans, and ranks whose weights differ: their shards would be those of different models.

    parallelize_module, apply_context_parallel  ──▶  hooks.check_weights  ──▶  one checksum, compared on all ranks
                                                                              the kinds of the modules that a plan names

Proved by: tests/misuse/test_misuse.py, tests/parallel/test_tensor.py
"""

import fnmatch
from collections.abc import Mapping
from functools import partial
from types import FunctionType
from typing import Any
from zlib import crc32

import numpy as np

from minidist.base.errors import UsageError, quoted
from minidist.comm.communicator import check_alike
from minidist.core.comm import Comm, check_communicator
from minidist.core.nn.experts import MixtureOfExperts
from minidist.core.nn.gpt import Attention, LanguageModel, TiedHead
from minidist.core.nn.layers import Conv1D, Embedding, Linear
from minidist.core.nn.module import Module
from minidist.core.parallel import tensor_parallel
from minidist.core.parallel.expert_parallel import ExpertParallel
from minidist.nn.ops.in_place import sample_step
from minidist.nn.refusals import check_module

# The modules that each layer, or function of the core, splits; the head first, which is a column-parallel layer, too.
KINDS: dict[Any, tuple[type, ...]] = {
    tensor_parallel.VocabParallelHead: (TiedHead, Linear),
    tensor_parallel.ColumnParallelLinear: (Linear, Conv1D),
    tensor_parallel.RowParallelLinear: (Linear, Conv1D),
    tensor_parallel.VocabParallelEmbedding: (Embedding,),
    tensor_parallel.split_heads: (Attention,),
    tensor_parallel.split_loss: (LanguageModel,),
    ExpertParallel: (MixtureOfExperts,),
}


def check_weights(operation: str, module: Module, comm: Comm, plan: Mapping[str, Any] | None = None) -> None:
    """Raise MismatchError when a rank of `comm` has other weights, at once or with the next message. Sends nothing.

    plan: of tensor parallelism. Raises UsageError where `comm` is no communicator, or a style has a module of another
    kind.
    """
    if not isinstance(module, Module):
        check_module(operation, module, "comm")
    check_communicator(comm, operation)
    if plan is not None:
        check_plan(module, plan)
    check_alike(comm, operation, "weights", weights_checksum(module, comm))


def weights_checksum(module: Module, comm: Comm) -> int:
    """Return a checksum of a sample of the weights that every rank must have: of all but those split over it already.

    0 where the values are not in this process's memory.
    """
    checksum, ranks = 0, set(comm.members)
    for name, parameter in module.named_parameters():
        split = parameter.layout is not None and any(len(ranks.intersection(r)) > 1 for r in parameter.layout.ranks)
        values = parameter.data
        if not split and type(values) is np.ndarray:
            sample = values.reshape(-1)[:: sample_step(values.shape)] if values.ndim else values
            checksum = crc32(sample.tobytes(), crc32(f"{name} {values.shape} {values.dtype}".encode(), checksum))
    return checksum


def check_plan(module: Module, plan: Mapping[str, Any]) -> None:
    """Raise UsageError where a layer of the core, or a function, is to split a module that it cannot split."""
    if not isinstance(plan, Mapping):
        raise UsageError(
            f"a plan of tensor parallelism is a dict of names of modules and styles, not {quoted(plan)}; pass"
            " gpt_plan(), or {'*.c_fc': ColumnParallelLinear}"
        )
    parts = dict(module.named_modules())
    for pattern, styles in plan.items():
        for name in fnmatch.filter(parts, pattern):
            for style in styles if isinstance(styles, list) else [styles]:
                _check_style(style, parts[name], name)


def _check_style(given: Any, module: Any, name: str) -> None:
    style = given.func if isinstance(given, partial) else given
    # A class of another layer is a subclass of one of these; most styles that are objects refuse by themselves.
    kind = style if isinstance(style, type) else type(style)
    known = {style} if isinstance(style, FunctionType) else set(kind.__mro__)
    for base, kinds in KINDS.items():
        if base in known:
            if not isinstance(module, kinds):
                raise not_for(getattr(style, "__name__", base.__name__), module, name, kinds)
            break
    if tensor_parallel.RowParallelLinear in known and module.activation is not None:
        raise UsageError(
            f"{name} has activation {module.activation!r}, which cannot be applied to the summands of a"
            " row-parallel layer; give it ColumnParallelLinear, or take the activation out"
        )
    if tensor_parallel.VocabParallelHead in known and getattr(module, "bias", None) is not None:
        raise UsageError(f"the head {module.name!r} has a bias; a vocabulary-parallel head has none")
    if style is tensor_parallel.split_loss and style is not given:
        # The head's weight may be a shard already; its layout knows the number of words.
        weight, planned = module.lm_head.weight, given.keywords["vocab_size"]
        words = (weight.layout.global_shape if weight.layout else weight.shape)[0]
        if words != planned:
            raise UsageError(
                f"the plan is for a vocabulary of {planned} words, the model has {words}; give the plan {words}"
            )


def not_for(style: str, module: Any, name: str, kinds: tuple[type, ...]) -> UsageError:
    """Return the error of a style whose module is of none of the kinds that it splits."""
    wanted = " or ".join(kind.__name__ for kind in kinds)
    return UsageError(f"{style} is for {wanted}; {name!r} is a {type(module).__name__}")
