"""What a pipeline refuses, in one sentence each: plans, stages, batches and losses that do not fit, and unequal copies.

The pipeline calls these functions; without them it computes the same where everything fits.

Proved by: tests/pipeline/test_runtime.py, tests/misuse/test_misuse.py
"""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from minidist.base.errors import MismatchError, UsageError, nearest, quoted
from minidist.base.limits import check_whole
from minidist.comm.communicator import part
from minidist.comm.message_checks import CheckedMessages
from minidist.core.autograd import Parameter
from minidist.core.base import arrays as xp
from minidist.core.base.random import fingerprint
from minidist.core.base.trace import purpose
from minidist.core.collectives import broadcast
from minidist.core.comm import Comm, PointToPoint
from minidist.core.nn import Module
from minidist.core.nn.flat import FlatParameters
from minidist.core.pipeline.plan import Plan
from minidist.core.pipeline.runtime.pipeline import Pipeline
from minidist.core.pipeline.runtime.reduction import Place, Row, digest_of, word_of


def check_flushes(plan: Plan) -> None:
    """Raise UsageError for what is no plan, and for a plan whose weights change on the way."""
    if not isinstance(plan, Plan):
        raise UsageError(f"Pipeline got {quoted(plan)} as its plan; pass get_schedule(name).plan(stages, microbatches)")
    if plan.updates not in ("flush", "none"):
        raise UsageError(
            f"plan {plan.name!r} updates its weights on the way; run it with VersionedPipeline(...,"
            " versions=WeightVersions(...)), or take a schedule that flushes, such as 1f1b"
        )


def check_fits(plan: Plan, comm: Comm, stages: Collection[int]) -> None:
    """Raise UsageError unless the plan is for these ranks, and for the stages of this one."""
    if plan.ranks != comm.size:
        raise UsageError(
            f"plan {plan.name!r} is for {plan.ranks} ranks and there are {comm.size}; start {plan.ranks} ranks"
        )
    if sorted(stages) != plan.stages_of(comm.rank):
        raise UsageError(
            f"rank {comm.rank}: plan {plan.name!r} gives it stages {plan.stages_of(comm.rank)} and it was built"
            f" with {sorted(stages)}; build the stages of Plan.stages_of(rank)"
        )


def check_same_plan(comm: Comm, plan: Plan) -> None:
    """Raise MismatchError unless the fingerprints of this rank's plan and of rank 0's are equal (16 B, startup)."""
    mine = fingerprint(plan.to_csv())
    with purpose("startup"):
        first: Any = broadcast(comm, mine.copy())
    if not xp.array_equal(mine, first):
        raise MismatchError(f"rank {comm.rank}: its plan differs from rank 0's; build the same plan on every rank")


def refuse_batches(pipe: Pipeline, inputs: Sequence[Any], targets: Sequence[Any] | None) -> None:
    """Raise UsageError for a step without the inputs, the targets or the loss that it needs."""
    plan, rank = pipe.plan, pipe.comm.rank
    m = plan.microbatches
    if len(inputs) != m:
        raise UsageError(f"rank {rank}: plan {plan.name!r} is for {m} micro-batches and got {len(inputs)}; give {m}")
    if pipe.loss is None and plan.updates != "none":
        raise UsageError(f"plan {plan.name!r} runs backward and needs a loss; pass loss=")
    got = 0 if targets is None else len(targets)
    raise UsageError(f"rank {rank}: {m} micro-batches need {m} targets, got {got}")


def refuse_output(value: Any, stage: int) -> None:
    """Raise UsageError for what a stage's module, or the loss, returned in place of a Tensor."""
    kind = "None" if value is None else f"a value of type {type(value).__name__}"
    raise UsageError(
        f"stage {stage} (or the loss after it) returned {kind} where a Tensor is needed; return a Tensor, or a tuple of"
        " Tensors (SkipConnection(stage, tensor) needs a SkipPipeline)"
    )


def refuse_mean(i: int, added: int) -> None:
    """Raise UsageError for the mean over the rows of micro-batch i, where the losses of `added` ones are added."""
    raise UsageError(
        f"the loss of micro-batch {i} is the mean over its own rows, and a pipeline adds the losses of"
        f" {added} micro-batches; divide by the rows (tokens) of the whole batch:"
        " lambda output, target: cross_entropy(output, target, divisor)"
    )


def check_messages(plan: Plan, count: int, most: int) -> None:
    """Raise UsageError when a plan sends more messages between two ranks in a step than there are tags."""
    if count > most and plan.updates in ("flush", "none"):
        raise UsageError(
            f"plan {plan.name!r} sends {count} messages between two ranks, at most {most:,} fit; take fewer"
            " micro-batches"
        )


def check_cuts(blocks: int, stages: int, cuts: Sequence[int] | None) -> None:
    """Raise UsageError for more stages than blocks, and for cuts that do not add up."""
    if cuts is None and stages > blocks:
        s = "" if blocks == 1 else "s"
        raise UsageError(
            f"cannot cut {blocks} layer{s} into {stages} stages: a stage needs at least one; use --layers {stages},"
            f" or at most {blocks} stage{s} (ranks x chunks)"
        )
    sizes = [] if cuts is None else list(cuts) if isinstance(cuts, Iterable) else [cuts]
    if cuts is not None and (len(sizes) != stages or sum(sizes) != blocks or min(sizes) < 0):
        raise UsageError(
            f"cuts {sizes} do not make {stages} stages of {blocks} layers; give {stages} numbers whose sum is {blocks}"
        )


def check_numbers(numbers: Any, stages: int) -> None:
    """Raise UsageError for the number of a stage that a model cut into `stages` does not have."""
    if not isinstance(numbers, Iterable):
        raise UsageError(f"the numbers of stages are {quoted(numbers)}; pass a list, such as [{quoted(numbers)}]")
    for number in numbers:
        if number not in range(stages):
            raise UsageError(f"there is no stage {quoted(number)} of {stages}; number them from 0 to {stages - 1}")


def check_model(model: Any, stages: int, cuts: Sequence[int] | None) -> None:
    """Raise UsageError for a model that cannot be cut, a number of stages that is none, and wrong cuts."""
    if not list(getattr(model, "blocks", ())) or not callable(getattr(model, "stage", None)):
        raise UsageError(
            f"cannot cut a {type(model).__name__}; give it a property `blocks` and a method"
            " stage(first, last, is_first, is_last) that returns a Module, or make PipelineStages of its parts yourself"
        )
    check_whole("stages", stages, 1)
    check_cuts(len(model.blocks), stages, cuts)


def check_stages(model: Any, made: Sequence[Module]) -> None:
    """Raise UsageError for parameters of a model that have one name, or that none of its stages has."""
    # What no stage has would not be computed.
    names = Counter(parameter.name for parameter in model.parameters())
    for name, count in names.items():
        if count > 1:
            raise UsageError(
                f"{count} parameters of {type(model).__name__} are called {name!r}, and stages find what they share by"
                " name; call initialize(seed) at the end of the model's __init__, which names them by their paths"
            )
    found = {parameter.name for stage in made for parameter in stage.parameters()}
    for name, parameter in model.named_parameters():
        if parameter.name not in found:
            raise UsageError(
                f"parameter {name!r} of {type(model).__name__} is in none of the {len(made)} stages; let its method"
                " stage put what comes in front of the blocks into the first one (is_first), and what follows into the"
                " last"
            )


# --- what crosses the boundaries of stages ---

DTYPES = [
    *("float16", "float32", "float64", "bfloat16", "int8", "int16", "int32", "int64"),
    *("uint8", "uint16", "uint32", "uint64", "bool"),
]


def check_crossing(value: Any) -> None:
    """Raise UsageError for an array of a dtype that cannot be sent from stage to stage."""
    if value.dtype.name not in DTYPES:
        raise UsageError(f"a tensor of {value.dtype} cannot cross a stage boundary; use one of {', '.join(DTYPES)}")


def check_crossings(tensors: Sequence[tuple[tuple[int, ...], str]], most: int, dims: int) -> None:
    """Raise UsageError unless these tensors, (shape, dtype), can cross one boundary."""
    if len(tensors) > most or any(len(shape) > dims for shape, _ in tensors):
        described = ", ".join(f"{shape} of {dtype}" for shape, dtype in tensors)
        raise UsageError(
            f"at most {most} tensors of at most {dims} dims can cross a boundary, and here are: {described}"
        )


# --- shared parameters ---


def matching(comm: Comm, name: str, flats: Iterable[FlatParameters | None]) -> PointToPoint:
    """Return `comm` for the sums of parameters that are shared, whose copies must have had the same updates everywhere.

    name: of the first one. flats: of this rank's copies of it.
    """
    said = {f"{name} of a pipeline after {flat.updates}" for flat in flats if flat is not None}
    if not said:
        return comm
    kind = CheckedMessages if isinstance(comm, CheckedMessages) else PointToPoint
    return part(comm, kind, operation="tied", match_key=f"tied {' and '.join(sorted(said))}")


def check_shared(
    rank: int, parameters: Mapping[int, Sequence[Parameter]], table: Sequence[Row], tied: Sequence[str]
) -> None:
    """Raise UsageError or MismatchError for parameters that are shared and not declared, or declared and not equal.

    parameters: this rank's, by stage. table: of all ranks. tied: names of those that several stages share.
    """
    _check_names(parameters)
    mine = {(stage, p.name): p for stage, members in parameters.items() for p in members if p.requires_grad}
    names = {word_of(name): name for _, name in mine}
    _check_tied(table, tied, names)
    _check_untied(table, set(tied), mine)
    _check_equal(rank, table, {word_of(name) for name in tied}, names)


def _check_names(parameters: Mapping[int, Sequence[Parameter]]) -> None:
    """Raise UsageError when two trained parameters of one stage have one name, by which they are told apart."""
    for stage, members in parameters.items():
        names = [parameter.name for parameter in members if parameter.requires_grad]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise UsageError(
                f"two parameters of stage {stage} are called {twice!r}; call module.initialize(seed, prefix=...), which"
                " names every parameter by its path and draws its values"
            )


def _check_tied(table: Sequence[Row], tied: Sequence[str], names: Mapping[int, str]) -> None:
    """Raise UsageError for a tied parameter that no rank has. names: this rank's parameters, by word."""
    on_any_rank = {row[2] for row in table}
    for name in tied:
        if word_of(name) not in on_any_rank:
            hint = nearest(name, names.values())
            raise UsageError(f"tied parameter {name!r} is on no stage{hint}; name one of the stages' parameters")


def _check_untied(table: Sequence[Row], tied: set[str], mine: Mapping[tuple[int, str], Parameter]) -> None:
    """Raise UsageError, on the ranks that have it, for one parameter on two stages that is not declared as tied.

    Copies of one parameter begin with equal values. Constants (of norms, of biases) are equal in any two layers, so
    they say nothing.
    """
    stages: dict[tuple[int, ...], list[int]] = {}
    for _, stage, *copied in table:
        stages.setdefault(tuple(copied), []).append(stage)
    for (stage, name), parameter in mine.items():
        if name in tied or (parameter.init is not None and parameter.init[0] == "constant"):
            continue
        for other in stages.get((word_of(name), *digest_of(parameter)), ()):
            if other != stage:
                first, last = sorted((stage, other))
                raise UsageError(
                    f"parameter {name!r} is on stage {first} and, with the same values, on stage {last}, and the two"
                    f" would be trained apart; pass tied=[{name!r}] to the Pipeline, or give the parameters of each"
                    " stage different names with module.initialize(seed, prefix=...)"
                )


def _check_equal(rank: int, table: Sequence[Row], tied: Collection[int], names: Mapping[int, str]) -> None:
    """Raise MismatchError for copies of one parameter with other values."""
    values: dict[tuple[int | None, int], tuple[Place, list[int]]] = {}
    for holder, stage, word, *digest in table:
        first, found = values.setdefault((None if word in tied else stage, word), ((stage, holder), digest))
        if found != digest:
            name = f"parameter {names[word]!r}" if word in names else "a parameter of other ranks"
            places = " and ".join(f"stage {at} on rank {of}" for at, of in (first, (stage, holder)))
            copies = f"the copies of {name} differ between {places}"
            raise MismatchError(f"rank {rank}: {copies}; build every copy from the same seed")
