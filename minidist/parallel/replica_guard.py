"""Refuses ranks that do not train one model, although every array that they send has the right size.

    over which ranks      those with other shards of a tensor must not be summed, those with other tokens must be
    other models          a digest of names and shapes, and one of the settings, is compared with rank 0's: 16 B
    in each message       which model it is, how often its optimizer has stepped and with which settings, whether it
                          trains, over how many rows its loss is a mean, and a checksum of a sample of the weights
    in backward           a mean over one rank's rows where losses are added, and parameters that no wrapper has

At the end of a pass it lets the batch norms of the module have the running statistics of all ranks.

Proved by: tests/misuse/test_misuse.py, tests/parallel/test_data_parallel.py
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import partial
from math import inf, prod
from operator import attrgetter
from typing import Any
from weakref import WeakKeyDictionary
from zlib import crc32

import numpy as np

from minidist.base.errors import quoted
from minidist.base.limits import check_number
from minidist.core.autograd import BackwardPass, Node, Parameter
from minidist.core.autograd.backward import call_hook
from minidist.core.base import arrays as xp
from minidist.core.base import hooks
from minidist.core.base.errors import MismatchError, UsageError
from minidist.core.base.random import fingerprint
from minidist.core.base.trace import purpose
from minidist.core.collectives import broadcast
from minidist.core.collectives.calls import ALGORITHMS
from minidist.core.comm import Comm, check_communicator
from minidist.core.nn.flat import FlatParameters
from minidist.core.nn.module import Module
from minidist.core.parallel.data_parallel import Bucket
from minidist.nn.ops.in_place import SAMPLED, sample_step

OVER = ", mean over "  # precedes, in the description of gradients, what their losses are means over: "22 rows"
DIGEST_BYTES = 16  # of the fingerprints of the model's names and shapes and of the settings, which all ranks compare

# Of each wrapper that whole gradients are given to: what every rank must pass equal.
SETTINGS = {
    "DistributedDataParallel": ("reduction", "bucket_cap_mb", "algorithm"),
    "ZeroOptimizer": ("stage", "reduction", "reduce_bucket_size", "algorithm", "alignment"),
}

_models: "WeakKeyDictionary[Comm, int]" = WeakKeyDictionary()  # communicator -> see `next_model`


class ReplicaGuard:
    """Watches one wrapper on one rank. op: "sum" or "avg", of gradients that are summed over `comms` in turn.

        wraps(wrapper, module, flat, settings, *comms)   a wrapper of that name is made, and has sent nothing yet;
                                                         settings: by name, or the wrapper itself, which has `SETTINGS`
        shards(module, ignored)                          the module is to be sharded, but for ignored parameters
        covers(module, parameters)                       these parameters are taken care of; others are not
        forward_begins(module)                           a pass through it begins; None: through what is covered
        backward_begins(pass, again)                     its gradients will be reduced, again: with earlier ones
        backward_ended(), forget()                       the gradients of a pass are reduced; an error has ended it
        frozen, unused(rank, parameter, ...)             it has no bucket and got a gradient, or the other way round

    Texts that every rank must have equal: of_bucket(bucket), of_weights(flat), and, of a unit or a shard that the guard
    `made` was told of, of_unit(flat, made) and of_copies(shard, made). `wraps` sends 16 B from rank 0 to each other
    rank (purpose `startup`).

    number: of the model, among those on its communicator. mode: whether it trains, see `mode_of`. means: what the
    losses since the last reduction are means over, such as "22 rows".
    """

    def __init__(self, op: str, *comms: Comm) -> None:
        if note_means not in hooks.backward_checks:
            hooks.backward_checks.append(note_means)
        self.op, self.comms, self.comm, self.number = op, comms, comms[0], next_model(comms[0])
        self.ranks = prod(comm.size for comm in comms)  # that see other rows
        self.mode = self.means = ""
        self.has_no_forward = False
        self.module: Any = None
        self.members: set[Parameter] = set()  # those that come into the module later would never be reduced
        self.known: set[Parameter] = set()
        self.statistics: Any = None  # the `RunningStatistics` of a model that has some
        self._samples: dict[Parameter, slice] = {}  # about 60 values of each, spread over rows and columns

    def __reduce_ex__(self, protocol: Any) -> Any:
        # Wrappers of data parallelism and of ZeRO refuse copies before this.
        raise UsageError(
            f"rank {self.comm.rank}: a sharded module cannot be copied or pickled, because each rank has a part of it;"
            " copy the model before fully_shard, or load gather_tensors(shards_of(model), optimizer)['weights'] into"
            " another one"
        )

    def wraps(self, wrapper: str, module: Any, flat: FlatParameters, settings: Any, *comms: Comm) -> None:
        check_axes(wrapper, module, flat.parameters, *comms)
        self.has_no_forward = wrapper == "ZeroOptimizer"
        several = comms[0].size > 1
        if several:
            if wrapper in SETTINGS:
                unused = {"find_unused_parameters": settings.reducer_type.unused == "zeros"}
                settings = dict(zip(SETTINGS[wrapper], attrgetter(*SETTINGS[wrapper])(settings), strict=True)) | unused
            check_same_model(flat, comms[0], wrapper, settings)
        # A unit of FSDP is not loaded as a whole, and no optimizer would have the shard of a parameter that is unfrozen
        # later.
        if wrapper == "fully_shard":
            for parameter in flat.parameters:
                if not parameter.requires_grad:
                    parameter.register_post_accumulate_grad_hook(partial(refuse_unfrozen, comms[0].rank))
        elif several:
            flat.load_checks.append(partial(check_same_values, flat, comms[0]))
            self._choose_samples(flat)

    def shards(self, module: Any, ignored: Collection[Parameter]) -> None:
        from minidist.parallel.sharding_check import check_sharding

        check_sharding(module, self.op, ignored, self.comms)

    def covers(self, module: Any, parameters: Iterable[Parameter]) -> None:
        self.module, self.known = module, set(parameters)
        if module is not None:
            self.members = set(module.parameters())
            # Only a model with batch norms loads what combines them.
            if any(hasattr(layer, "mini_batch") for layer in getattr(module, "modules", tuple)()):
                from minidist.parallel.running_statistics import RunningStatistics

                self.statistics = RunningStatistics(module, *self.comms)

    def forward_begins(self, module: Any) -> None:
        if self.ranks > 1:  # one rank has nothing to compare
            self.mode = mode_of(self.module if module is None else module)

    def backward_begins(self, running: BackwardPass, again: bool = False) -> None:
        if self.has_no_forward:  # none has said that it begins
            self.forward_begins(None)
        # What no message would make right: a loss of these rows alone, and parameters that no wrapper knows.
        noted: Any = running  # see `note_means`
        if self.op == "sum" and self.ranks > 1 and noted.is_mean:
            from minidist.parallel.unreduced import mean_of_one_rank

            raise mean_of_one_rank(self.comm, self.ranks)
        if self.op == "avg" and self.ranks > 1:
            before = self.means if again else ""
            self.means = before + (" + " if before and noted.means else "") + noted.means
        if self.known and not running.sites.keys() <= self.known:
            from minidist.parallel.unreduced import refuse_unreduced

            known = self.known
            known.update(refuse_unreduced(self.module, running.sites, self.members, known, self.comm, self.ranks))

    def backward_ended(self) -> None:
        self.means = ""
        if self.statistics is not None and self.statistics.layers:
            self.statistics.combine()

    def forget(self) -> None:
        self.means = ""

    def frozen(self, rank: int, parameter: Parameter) -> None:
        from minidist.parallel.unreduced import was_frozen

        raise was_frozen(rank, parameter)

    def unused(self, *where: Any) -> None:
        from minidist.parallel.unreduced import UnusedParameterError

        raise UnusedParameterError(*where)

    # --- what every rank must have equal: it costs no message ---

    def of_bucket(self, bucket: Bucket) -> str:
        # A checksum of a sample of the weights costs a microsecond per parameter; all values would be read once more.
        # A stashed version has none, as replicas may be at other micro-batches, and arrays on a device have none,
        # because the copy would wait for them.
        flat = bucket.flat
        text = f"model {self.number} after {flat.updates}{self.mode}{self.means and OVER + self.means}"
        if flat.version_is_given or type(flat.data) is not np.ndarray:
            return text
        if bucket.parameters[0] not in self._samples:
            self._choose_samples(flat)
        data, checksum = flat.data, 0
        for parameter in bucket.parameters:
            checksum = crc32(data[self._samples[parameter]].tobytes(), checksum)
        return f"{text}, checksum of the weights {checksum:08x}"

    def _choose_samples(self, flat: FlatParameters) -> None:
        for parameter in flat.parameters:
            place = flat.slice_of(parameter)
            self._samples[parameter] = slice(place.start, place.stop, sample_step(parameter.shape))

    def of_weights(self, flat: FlatParameters) -> str:
        return f"model {self.number} after {flat.updates}"

    def of_unit(self, flat: FlatParameters, made: "ReplicaGuard") -> str:
        of = f"{flat.names[0]} of fully_shard {made.number}"
        return f"{of} after {flat.updates}{self.mode}{self.means and OVER + self.means}"

    def of_copies(self, shard: Any, made: "ReplicaGuard") -> str:
        data, step = shard.data, max(1, shard.size // SAMPLED)
        sample = data[::step] if type(data) is np.ndarray else np.zeros(0)
        return f"{self.of_unit(shard.flat, made)}, checksum of the weights {crc32(sample.tobytes()):08x}"


_LINEAR = ("add", "sub", "neg", "div", "cast")  # operations between means and a loss that averages them


def note_means(running: Any, loss: Node, gradient: Any) -> None:
    """Note in a `BackwardPass` what its loss is the mean over.

    means: "22 rows", "8 rows + 5 rows" of a sum, "" of other losses and where the gradient is not 1. is_mean: whether
    it is a mean that nothing divides, or a sum that has one. A mean that is divided, as by the number of micro-batches,
    is one, too. Of one that is multiplied nothing is said: its factor may be this rank's part of all rows.
    """
    running.is_mean, found, seen = False, [], set()
    pending = [(loss, False)] if gradient.size == 1 and gradient.item() == 1 else []
    while pending:
        node, divided = pending.pop()
        if getattr(node, "over", ""):
            found.append(node.over)
            running.is_mean |= not divided
            continue
        passes_on = node.name in _LINEAR or getattr(node.prepare, "func", None) is call_hook
        if passes_on and node not in seen and node.inputs:
            seen.add(node)
            divided = divided or node.name == "div"
            pending += [(source, divided) for source, _ in reversed(node.inputs)]
    running.means = " + ".join(found)


def next_model(comm: Comm) -> int:
    """Return the number of the model that is wrapped now, among those on one communicator: 1, 2, ...

    Every rank wraps its models in one order, so equal numbers mean the same model, with no message sent.
    """
    number = _models[comm] = _models.get(comm, 0) + 1
    return number


def check_axes(wrapper: str, module: Any, parameters: Iterable[Parameter], *comms: Comm) -> None:
    """Raise UsageError when summing the gradients of `parameters` over `comms` cannot be right. Sends nothing.

    A model may be split over one axis of a mesh before a wrapper sums its gradients over another. With two mistakes
    every message has the right size, and the loss falls:

        over too many ranks   DistributedDataParallel(model, mesh["tp"]): shards of different columns would be averaged
        over too few ranks    DistributedDataParallel(model, mesh["dp"]) with context parallelism: the ranks of `cp`
                              see different tokens, and their gradients would never be added

    wrapper: its name, for the message. module: what the parameters belong to, if it is known. comms: the communicators
    along which the wrapper sums; hybrid sharding has two.
    """
    for comm in comms:
        check_communicator(comm, wrapper)
    mine, members = comms[0], {rank for comm in comms for rank in comm.members}

    # Shards of one tensor have nothing in common, so there is nothing to sum. Most parameters are cut the same way.
    seen = set()
    for parameter in parameters:
        layout = parameter.layout
        cuts = () if layout is None else zip(layout.axes, layout.ranks, strict=False)
        for axis, ranks in cuts:
            if (axis, ranks) in seen:
                continue
            seen.add((axis, ranks))
            if len(members.intersection(ranks)) > 1:
                raise UsageError(
                    f"rank {mine.members[mine.rank]}: {wrapper} over ranks {quoted(sorted(members))} would sum"
                    f" parameter {parameter.name!r} with other shards of axis {axis!r} (ranks {quoted(list(ranks))}),"
                    " which hold other rows or columns; pass the data-parallel axis instead, such as mesh['dp'], or"
                    " leave the wrapper out"
                )

    # Attention that is split over the sequence: every rank of its axis has only the gradient of that rank's tokens.
    for part in module.modules() if isinstance(module, Module) else ():
        attention = getattr(part, "attention_fn", None)
        split_over = getattr(attention, "sequence_comm", None)
        if split_over is not None and not members.issuperset(split_over.members):
            raise UsageError(
                f"rank {mine.members[mine.rank]}: {wrapper} over ranks {quoted(sorted(members))} of a model with"
                f" context parallelism over ranks {quoted(list(split_over.members))}: the gradients of the ranks of"
                " axis 'cp', which see other tokens, would never be added; pass both axes: mesh['dp', 'cp'], which"
                " gradient_axes(mesh) returns"
            )


def mode_of(module: Any | None) -> str:
    """Return "", or in words how many modules are in evaluation, not in training. It must be equal on every rank."""
    modes = [part.training for part in module.modules()] if isinstance(module, Module) else []
    return "" if all(modes) else f", {modes.count(False)} of {len(modes)} modules in evaluation"


def refuse_unfrozen(rank: int, parameter: Parameter) -> None:
    """Raise UsageError: a frozen parameter of an FSDP unit got a gradient."""
    raise UsageError(
        f"rank {rank}: parameter {parameter.name!r} was frozen when its module was sharded, so no"
        " optimizer has its shard; set requires_grad before fully_shard, or build and shard the model anew"
    )


def check_reducer(operation: str, comm: Comm, algorithm: str, bucket_cap_mb: float) -> None:
    """Raise UsageError for what a `GradientReducer` cannot use, before the first backward pass would."""
    if bucket_cap_mb != inf:  # one bucket
        check_number("bucket_cap_mb", bucket_cap_mb, above=0)
    if algorithm != "auto":
        ALGORITHMS[operation][str(algorithm)]  # an unknown name is an error
    check_communicator(comm, "GradientReducer")


def startup_bytes(units: Sequence[int], itemsize: int, ranks: int) -> int:
    """Return the bytes that all `ranks` together send at construction, for units of these numbers of elements."""
    return (ranks - 1) * sum(elements * itemsize + DIGEST_BYTES for elements in units)


def check_same_model(flat: FlatParameters, comm: Comm, wrapper: str, settings: Mapping[str, Any]) -> None:
    """Compare digests of names and shapes (8 B) and of settings (8 B) with rank 0's, where messages depend on them.

    wrapper: whose `settings` they are, by name. Raises MismatchError on a rank where one of the two differs.
    """
    # A broadcast of 16 bytes instead of all names: the ranks would hang, or add unrelated gradients, if their models
    # or settings differed.
    text = repr([(p.name, p.shape, str(p.dtype), p.requires_grad) for p in flat.parameters])
    words: dict[str, Any] = {}
    for name, value in settings.items():
        if name == "mp_policy":
            words |= value.in_words()
        else:
            words[name] = value
    said = ", ".join(f"{name}={_in_words(value)}" for name, value in words.items())
    half = DIGEST_BYTES // 2
    mine = xp.concatenate([fingerprint(text, half), fingerprint(f"{wrapper} {said}", half)])
    with purpose("startup"):
        theirs: Any = broadcast(comm, mine.copy())

    # The model first: of another one the settings say nothing.
    if not xp.array_equal(mine[:half], theirs[:half]):
        raise MismatchError(
            f"rank {comm.rank}: its model differs from rank 0's in a parameter's name, shape, dtype or requires_grad; "
            f"here it has {len(flat)} parameters and {flat.numel} elements; build the same model on every rank"
        )
    if not xp.array_equal(mine, theirs):
        raise MismatchError(
            f"rank {comm.rank}: its {wrapper} has other settings than rank 0's; here they are {said}; pass the same"
            " settings on every rank, or the ranks would send other messages or compute other numbers"
        )


def _in_words(value: Any) -> str:
    """Return a setting as text that is equal where the values are: 25 and 25.0 are."""
    return f"{value:.12g}" if isinstance(value, int | float) and not isinstance(value, bool) else str(value)


def check_same_values(flat: FlatParameters, comm: Comm) -> None:
    """Compare a digest of the values (16 B) with rank 0's after a `load_state_dict`, which every rank must make.

    Raises MismatchError on a rank where it differs. Of ranks that loaded nothing the next collective meets this one,
    which is called load_state_dict.
    """
    mine = fingerprint(flat.data.tobytes(), DIGEST_BYTES)
    with purpose("startup"):
        theirs: Any = broadcast(comm.collective("load_state_dict"), mine.copy())
    if not xp.array_equal(mine, theirs):
        raise MismatchError(
            f"rank {comm.rank}: load_state_dict gave its replica other values than rank 0's, and they would train"
            " apart; load the same state on every rank, or load it before wrapping the model"
        )
