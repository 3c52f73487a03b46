"""Stanford CS336, assignment 2: data parallelism, a sharded optimizer and FSDP, on minidist's modules.

    get_ddp(module, comm)                         a module that is called as `module` is; replicas start as rank 0's
    ddp_on_after_backward(ddp_model, optimizer)   called after `loss.backward()`: gradients are the mean over the ranks;
        in one of two models a layer is used twice, and a parameter is not trained
    get_sharded_optimizer(params, optimizer_cls, comm, **kwargs)
        an optimizer with `step()` and `zero_grad()`; each rank gives `optimizer_cls` about 1/n of the parameters
    get_fsdp(module, comm, compute_dtype)           is called as `module` is; its `parameters()` are this rank's shards,
        one for each parameter. compute_dtype: in which weights are gathered, inputs cast and products computed, float16
        or None, the weights' own
    fsdp_on_after_backward(fsdp_model, optimizer)   leaves the mean gradients in the shards
    fsdp_gather_full_params(fsdp_model)             name -> whole array, in the dtype of the shards

The last two train the model with a layer that is used twice and a parameter that is not trained.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from minidist.core.autograd import Parameter
from minidist.core.comm import Comm
from minidist.core.nn import MLP, Linear, Module
from minidist.core.optim import AdamW
from minidist.course.lesson.exercise import Case, Exercise, Failure, Least, difference, drawing
from minidist.course.lesson.hint_file import hints_of
from minidist.nn import mse_loss
from minidist.optim import SGD

STEPS, RATE = 3, 0.1
HALF_TOLERANCE = 1e-2  # three steps in float16, whose numbers are 1e-3 apart, in any order of additions


class TiedModel(Module):
    """A layer that is used twice, so its weight has two gradients to add, and a parameter that is not trained."""

    def __init__(self, width: int, seed: int) -> None:
        layers = [Linear(n, m, activation="relu", dtype=np.float64, seed=None) for n, m in ((3, width), (width, width))]
        self.first, self.twice = layers
        self.last = Linear(width, 2, dtype=np.float64, seed=None)
        self.fixed = Parameter(np.full(2, 2.0), requires_grad=False)
        self.initialize(seed)

    def forward(self, x: Any) -> Any:
        return self.last(self.twice(self.twice(self.first(x))))


def model_of(case: Case, seed: int) -> MLP:
    return MLP([3, 2 + case.size, 2], dtype=np.float64, seed=seed)


def tied_model_of(case: Case, seed: int) -> TiedModel:
    return TiedModel(2 + case.size, seed)


def batches(case: Case) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return the whole batches of all steps: two rows for each rank."""
    draw = case.generator()
    return [(draw.normal(size=(2 * case.ranks, 3)), draw.normal(size=(2 * case.ranks, 2))) for _ in range(STEPS)]


def weights(model: Module) -> tuple[np.ndarray, ...]:
    return tuple(np.array(parameter.data) for parameter in model.parameters())


def numbers(case: Case, make: Any = model_of) -> int:
    """Return the numbers that are trained."""
    return sum(parameter.data.size for parameter in make(case, 0).parameters() if parameter.requires_grad)


def summands(case: Case, make: Any = model_of) -> int:
    """Return the numbers that a rank's gradient has, or the rows that it is made of, if those are fewer."""
    x, y = rows_of(case, 0)[0]
    return min(numbers(case, make), x.size + y.size)


def least(case: Case, numbers: int) -> Least:
    """Return the least when `numbers` numbers are sent to every rank but one, at least once a step."""
    return Least(STEPS * (case.ranks - 1), 8 * (case.ranks - 1) * numbers)


def trained(case: Case, optimizer_class: Any, make: Any = model_of, **settings: Any) -> tuple[np.ndarray, ...]:
    """Return the weights after training rank 0's model on one device with the whole batches."""
    model = make(case, 0)
    optimizer = optimizer_class(model.parameters(), **settings)
    for x, y in batches(case):
        model.zero_grad()
        mse_loss(model(x), y).backward()
        optimizer.step()
    return weights(model)


def wrong_weights(case: Case, answers: Sequence[Any], wanted: tuple[np.ndarray, ...], tolerance: float) -> str:
    """Return a sentence about the first rank whose weights, which its answer begins with, differ from these, or ""."""
    problems = [difference(answer[0], wanted, tolerance) for answer in answers]
    return next((f"rank {rank}: {problem}" for rank, problem in enumerate(problems) if problem), "")


def over_share(case: Case, sizes: Sequence[int], elements: Sequence[int], who: str) -> str:
    """Return a sentence about the first rank that has more than a share and the largest parameter, or ""."""
    allowed = -(-sum(sizes) // case.ranks) + max(sizes)
    for rank, own in enumerate(elements):
        if own > allowed and case.ranks > 1:
            return (
                f"rank {rank} {who} {own} of {sum(sizes)} elements; with {case.ranks} ranks at most"
                f" {allowed} are its share"
            )
    return ""


# Data parallel --------------------------------------------------------------------------------------------------------


def use_ddp(functions: Mapping[str, Any]) -> Callable[..., Any]:
    """Train as the course's test does: each rank on its rows."""

    def run(comm: Comm, model: Module, rows: Sequence[tuple[np.ndarray, np.ndarray]]) -> Any:
        wrapped = functions["get_ddp"](model, comm)
        optimizer = SGD(model.parameters(), lr=RATE)
        for x, y in rows:
            model.zero_grad()
            mse_loss(wrapped(x), y).backward()
            functions["ddp_on_after_backward"](wrapped, optimizer)
            optimizer.step()
        return weights(model)

    return run


def rows_of(case: Case, rank: int) -> list[tuple[np.ndarray, np.ndarray]]:
    own = slice(2 * rank, 2 * rank + 2)
    return [(x[own], y[own]) for x, y in batches(case)]


def apart(failure: Failure) -> bool:
    """Return whether the ranks' weights differ from each other."""
    return failure.kind == "wrong" and any(
        difference(answer, tuple(failure.answers[0]), 1e-9) for answer in failure.answers
    )


# A sharded optimizer --------------------------------------------------------------------------------------------------


class CountedAdamW(AdamW):
    """AdamW that counts the elements it is given on this rank."""

    def __init__(self, parameters: Iterable[Parameter], counter: list[int], **settings: Any) -> None:
        owned = list(parameters)
        counter[0] += sum(parameter.data.size for parameter in owned)
        super().__init__(owned, **settings)


def use_sharded_optimizer(functions: Mapping[str, Any]) -> Callable[..., Any]:
    """Train the same model on the same rows on every rank, as the course's test does."""

    def run(comm: Comm, model: Module, rows: Sequence[tuple[np.ndarray, np.ndarray]]) -> Any:
        counter = [0]
        optimizer = functions["get_sharded_optimizer"](
            list(model.parameters()), CountedAdamW, comm, counter=counter, lr=RATE
        )
        for x, y in rows:
            optimizer.zero_grad()
            mse_loss(model(x), y).backward()
            optimizer.step()
        return weights(model), counter[0]

    return run


def check_sharded(case: Case, answers: Sequence[Any]) -> str:
    wanted = trained(case, AdamW, tied_model_of, lr=RATE)
    elements = [counted for _, counted in answers]
    return wrong_weights(case, answers, wanted, 1e-9) or over_share(
        case, [array.size for array in wanted], elements, "gives its optimizer"
    )


# Fully sharded --------------------------------------------------------------------------------------------------------


def use_fsdp(functions: Mapping[str, Any]) -> Callable[..., Any]:
    """Train as the course's test does: each rank on its rows, with an optimizer of the shards.

    Returns the whole weights; size and dtype of each shard, and whether it has a gradient, whose shape and dtype the
    parameter ensures; the dtype of the output.
    """

    def run(comm: Comm, model: Module, rows: Sequence[tuple[np.ndarray, np.ndarray]], dtype: Any) -> Any:
        names = [name for name, _ in model.named_parameters()]
        wrapped = functions["get_fsdp"](model, comm, dtype)
        shards = list(wrapped.parameters())
        optimizer = SGD(shards, lr=RATE)
        for x, y in rows:
            for shard in shards:
                shard.grad = None
            output = wrapped(x)
            mse_loss(output, y.astype(output.data.dtype)).backward()
            functions["fsdp_on_after_backward"](wrapped, optimizer)
            optimizer.step()
        whole = functions["fsdp_gather_full_params"](wrapped)
        forms = [(shard.data.size, shard.data.dtype.name, shard.grad is not None) for shard in shards]
        return tuple(np.asarray(whole[name]) for name in names), forms, output.data.dtype.name

    return run


def wrong_forms(forms: Sequence[Any], output: str, parameters: int, dtype: Any) -> str:
    """Return a sentence about a rank's shards or the dtype of its output, or ""."""
    if len(forms) != parameters:
        return f"{len(forms)} shards, and the model has {parameters} parameters: one shard for each"
    for number, (_, own, has_gradient) in enumerate(forms):
        # The first parameter is not trained.
        if own != "float64" or (number and not has_gradient):
            return (
                f"shard {number} is {own} with{'' if has_gradient else 'out'} a gradient; shards are float64, and those"
                f" of trained parameters have gradients"
            )
    wanted = dtype or "float64"
    return "" if output == wanted else f"the output is {output}; with compute_dtype {dtype} it is {wanted}"


def check_fsdp(case: Case, answers: Sequence[Any], dtype: Any) -> str:
    wanted = trained(case, SGD, tied_model_of, lr=RATE)
    sizes = [array.size for array in wanted]
    for rank, (_, forms, output) in enumerate(answers):
        problem = wrong_forms(forms, output, len(sizes), dtype)
        if problem:
            return f"rank {rank}: {problem}"
    elements = [sum(size for size, *_ in forms) for _, forms, _ in answers]
    return over_share(case, sizes, elements, "has in its shards") or wrong_weights(
        case, answers, wanted, HALF_TOLERANCE if dtype else 1e-9
    )


def exercise(name: str, **settings: Any) -> Exercise:
    """Return an exercise with what all of them have in common."""
    return Exercise(
        name=name,
        cases=lambda: [Case(ranks, size) for ranks in (1, 2, 3, 4) for size in (0, 1, 3)],
        draw=drawing((1, 6), (0, 8)),
        par=Case(4, 3),
        unit="hidden feature",
        written_by_hand=("minidist.core.parallel", "minidist.parallel"),
        **settings,
    )


def ddp(name: str, make: Any) -> Exercise:
    return exercise(
        name,
        arguments=lambda case, rank: (make(case, rank), rows_of(case, rank)),
        expected=lambda case: [trained(case, SGD, make, lr=RATE)] * case.ranks,
        least=lambda case: least(case, numbers(case, make) + 2 * STEPS * summands(case, make)),
        hints=hints_of(globals(), name, "cs336.weights"),
        functions=("get_ddp", "ddp_on_after_backward"),
        adapter=use_ddp,
    )


def fsdp(name: str, dtype: str | None) -> Exercise:
    """Return the exercise in which weights are gathered, and products computed, in this dtype; None: in float64."""
    itemsize = np.dtype(dtype or "float64").itemsize

    def fewest(case: Case) -> Least:
        sent = numbers(case, tied_model_of) + summands(case, tied_model_of)
        return Least(STEPS * (case.ranks - 1), itemsize * (case.ranks - 1) * STEPS * sent)

    return exercise(
        name,
        arguments=lambda case, rank: (tied_model_of(case, rank), rows_of(case, rank), dtype),
        check_answers=partial(check_fsdp, dtype=dtype),
        least=fewest,
        hints=hints_of(globals(), "cs336.fsdp"),
        functions=("get_fsdp", "fsdp_on_after_backward", "fsdp_gather_full_params"),
        adapter=use_fsdp,
    )


EXERCISES = [
    ddp("cs336.ddp", model_of),
    ddp("cs336.ddp_tied", tied_model_of),
    exercise(
        "cs336.sharded_optimizer",
        arguments=lambda case, rank: (tied_model_of(case, 0), batches(case)),
        check_answers=check_sharded,
        least=lambda case: least(case, STEPS * numbers(case, tied_model_of)),
        functions=("get_sharded_optimizer",),
        adapter=use_sharded_optimizer,
    ),
    fsdp("cs336.fsdp", None),
    fsdp("cs336.fsdp_fp16", "float16"),
]
