"""What modules refuse, such as an array where a Tensor needs a gradient: no gradient gets through an array.

Proved by: tests/nn/test_hooks.py, tests/nn/test_modules.py
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn

from minidist.base.coordinates import current_coordinates
from minidist.base.errors import UsageError, nearest, quoted
from minidist.base.limits import check_number, check_whole
from minidist.core.autograd import AutogradError, DtypeError, Parameter, Tensor, is_grad_enabled
from minidist.core.base import arrays as xp
from minidist.core.nn.module import Module


def refuse_changed(module: Module, kind: str, hook: Callable[..., Any], before: Any, after: Any) -> None:
    """Raise AutogradError when what a hook of `kind` returned is an array where a Tensor needs a gradient."""
    refuse_arrays(module, f"the {kind} {getattr(hook, '__qualname__', type(hook).__name__)}", before, after)


def refuse_output(module: Module, args: tuple[Any, ...], output: xp.Array) -> None:
    """Raise AutogradError when the array that `forward` returned is where a gradient would have to come through.

    It would have to get to the first argument, or, while the module trains, to its parameters.
    """
    if args:
        refuse_arrays(module, "forward", args[0], output)
    if not (module.training and is_grad_enabled()):
        return
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            raise AutogradError(
                f"forward of {type(module).__name__} {module.name!r} returns an array, so its parameter {name!r} gets"
                " no gradient; return the Tensor whose `data` it is, or call the module in no_grad() or after"
                " eval()"
            )


def check_capacity(tokens: Any, experts: Any, top_k: Any, factor: Any) -> None:
    """Raise UsageError for numbers from which no capacity of an expert can be computed."""
    for name, value, least in (("tokens", tokens, 0), ("experts", experts, 1), ("top_k", top_k, 1)):
        check_whole(name, value, least)
    check_number("factor", factor, above=0)


def refuse_copy(unit: str) -> NoReturn:
    """Raise AutogradError: the parameters of a flat unit are views of its arrays, which a copy would not have."""
    raise AutogradError(
        f"the FlatParameters of {unit} cannot be copied or pickled; copy the model, and make"
        " FlatParameters(copy.parameters()) and the optimizer anew"
    )


def check_module(wrapper: str, module: Any, others: str) -> None:
    """Raise UsageError where a wrapper got no module. others: what follows the model in a call."""
    if not isinstance(module, Module):
        raise UsageError(
            f"{wrapper} got a value of type {type(module).__name__} as its module; pass the model,"
            f" and then the communicator: {wrapper}(model, {others})"
        )


def check_sizes(sizes: Any) -> None:
    """Raise UsageError for the sizes of an MLP that are not two or more whole numbers of at least 1."""
    if not isinstance(sizes, Iterable) or len(list(sizes)) < 2:
        raise UsageError(f"MLP({quoted(sizes)}) has no layer; pass the sizes of its input and of each layer's output")
    for at, size in enumerate(sizes):
        check_whole(f"sizes[{at}]", size, 1)


def check_heads(width: Any, heads: Any) -> None:
    """Raise UsageError for the width and the heads of a GPT that are not whole numbers, one a multiple of the other."""
    check_whole("n_embd", width, 1)
    check_whole("n_head", heads, 1)
    if width % heads:
        raise UsageError(f"n_embd {width} is not a multiple of n_head {heads}")


def refuse_config(model: str, config: Any, kind: type) -> NoReturn:
    """Raise UsageError: a model got something else than its `kind` of configuration."""
    raise UsageError(f"{model} got {quoted(config)} as its configuration; pass a {kind.__name__}(...)")


def check_whole_parameter(parameter: Parameter) -> None:
    """Raise UsageError for a parameter that is a shard, whose initial values cannot be drawn."""
    if parameter.layout is not None and parameter.layout.axes:
        raise UsageError(
            f"parameter {parameter.name!r} is a shard {parameter.shape} of {parameter.layout.global_shape}; "
            "initialize the whole model first, and shard it then"
        )


def require_coordinates(positions: Any) -> None:
    """Raise UsageError unless `batch_coordinates` has these positions, by which masks of a part of a text are drawn."""
    place = current_coordinates()
    if place.positions is None or not xp.array_equal(place.positions, positions):
        raise UsageError(
            "dropout with positions given: the masks of a part of a text are drawn by its positions, so give them there"
            " too: batch_coordinates(step, ..., positions=positions, length=tokens of a whole text)"
        )


def check_set(name: str, values: Iterable[Any]) -> None:
    """Raise UsageError for an attribute that is a set of modules or parameters."""
    if any(isinstance(value, (Module, Parameter)) for value in values):
        raise UsageError(f"the modules in the set {name!r} have no order and so no names; put them into a list")


def refuse_flat(parameter: Parameter, first: Parameter) -> None:
    """Raise an error: the parameter has an owner already, or another dtype than the first one of a flat array."""
    if parameter.flat is not None:
        raise AutogradError(
            f"parameter {parameter.name!r} belongs to another FlatParameters, wrapper or sharded module"
            " already; wrap or shard a model once, and give an existing FlatParameters to"
            " DistributedDataParallel(..., flat=...)"
        )
    raise DtypeError(
        f"one flat array has one dtype: {first.name!r} is {first.dtype}, {parameter.name!r} is {parameter.dtype}"
    )


def refuse_flat_shard(parameter: Parameter) -> None:
    """Raise UsageError: a parameter that is to be sharded lies in a flat array."""
    raise UsageError(
        f"parameter {parameter.name!r} belongs to a FlatParameters already; shard the model first and make it flat then"
    )


def refuse_partial(parameter: Parameter) -> None:
    """Raise AutogradError: a sum of both summands would add one rank's own gradient to the sum over ranks."""
    raise AutogradError(
        f"the gradient of {parameter.name!r} is partly summed over ranks and partly local; end the step"
        " with a backward pass whose forward ran outside no_sync"
    )


def check_auxiliary(module: Module, loss: Tensor) -> None:
    """Raise UsageError for experts' auxiliary loss without a node: the router would be unbalanced, and nothing said."""
    if is_grad_enabled() and loss.node is None:
        raise UsageError(
            f"{module.name}: its auxiliary loss was computed without gradient (inside a checkpoint?), so the"
            " router would not be balanced; return it from the segment, or call nn.recompute, which does"
        )


def check_experts(experts: int, top_k: int, capacity_factor: float) -> None:
    """Raise UsageError for choices and slots that a mixture of experts cannot have."""
    if top_k not in (1, 2) or top_k > experts:
        raise UsageError(
            f"top_k {top_k} of {experts} experts; use 1 (Switch) or 2 (GShard), and as many experts or more"
        )
    if capacity_factor <= 0:
        raise UsageError(f"capacity_factor {capacity_factor} leaves no slots; use 1.0 or more, 1.25 is usual")


def refuse_arrays(module: Module, what: str, before: Any, after: Any) -> None:
    """Raise AutogradError when `after`, which takes the place of `before`, is an array and no gradient gets there.

    Of tuples, each value takes the place of the one at its position.
    """
    before, after = (value if isinstance(value, tuple) else (value,) for value in (before, after))
    for old, new in zip(before, after, strict=False):
        if isinstance(old, Tensor) and old.requires_grad and xp.is_array(new) and is_grad_enabled():
            raise AutogradError(
                f"{what} of {type(module).__name__} {module.name!r} returns an array where a Tensor needs a gradient,"
                " and no gradient gets through an array; return a Tensor, or call the module in no_grad()"
            )


# --- how a model is divided ---


def refuse_pattern(pattern: str, known: Iterable[str]) -> NoReturn:
    """Raise UsageError: a pattern of a plan names none of the known modules."""
    raise UsageError(f"the plan names {quoted(pattern)}, which is not a module{nearest(pattern, known)}")


def refuse_shared(name: str, parameter: Parameter) -> NoReturn:
    """Raise UsageError: a module that no plan names uses a parameter that is sharded elsewhere."""
    raise UsageError(
        f"{name!r} shares a parameter that the plan shards elsewhere ({parameter.name!r}); name its module in the plan"
    )


def refuse_two_layouts(parameter: Parameter, *layouts: Any) -> NoReturn:
    """Raise UsageError: a tied parameter is sharded in two ways, or, without layouts, in one place alone."""
    how = "as {} and as {}".format(*layouts) if layouts else "in one place and whole in another"
    raise UsageError(f"tied parameter {parameter.name!r} is sharded {how}; shard it one way")


def check_mixtures(model: Module, mixtures: Sequence[str]) -> None:
    """Raise UsageError for a model without experts."""
    if not mixtures:
        raise UsageError(f"apply_expert_parallel: the {type(model).__name__} has no experts; give it n_experts")


def check_tokens(length: int, ranks: int) -> None:
    """Raise UsageError for a sequence of fewer tokens than ranks."""
    if ranks > length:
        raise UsageError(
            f"a sequence of {length} tokens over {ranks} context-parallel ranks leaves ranks without any; use at most "
            f"{length} ranks, or at least {ranks} tokens"
        )
