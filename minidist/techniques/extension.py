"""What a technique adds to a job: settings, rules, hooks, state in checkpoints, results and bytes, in one class.

The training loop, the rules, the checkpoints and the volumes do not depend on any technique: they call the hooks of
every extension of the job. The hooks stand in the order of a job.

Each hook does nothing unless a technique overrides it. A folder of `minidist/techniques` holds one subclass, in its
`extension.py`; a user's class is named by `--extension FILE.py:CLASS`.

Proved by: tests/techniques/test_extensions.py
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar, NamedTuple

import numpy as np

from minidist.base.records import Record
from minidist.core.autograd import Tensor
from minidist.core.base.errors import UsageError
from minidist.core.comm import Comm
from minidist.data import Shares
from minidist.techniques.bucket import ReplicaBucket
from minidist.techniques.deepspeed import DeepSpeedKeys
from minidist.techniques.meeting import Mean, Meeting, Replay, Replica
from minidist.techniques.own_loop import OwnLoop
from minidist.techniques.rule import Rule


class Moment(NamedTuple):
    """A time in a job at which these steps have been made.

    comm: all ranks that train; None in the reference on one device. strategy: the layout; None with an `OwnLoop`,
    whose ranks have no common step. skipped: whether the update was left out: see `Extension.updates`.
    """

    comm: Comm | None
    steps: range
    strategy: Any
    skipped: bool = False

    @property
    def place(self) -> str:
        """The steps as text, for a message."""
        first, last = self.steps.start, self.steps.stop - 1
        return f"step {first}" if first == last else f"steps {first} to {last}"


class Run(NamedTuple):
    """The part of a job whose bytes are counted.

    ranks: all that train. steps: made in this run, after `done` earlier ones. moments: calls of `after_update` at which
    no batch is on its way. sizes: the `AxisSizes` of every rank's data axes, in rank order. runs: the rows of all
    ranks, and for how many steps. skipped: steps whose update was left out.
    """

    config: Any
    batches: Any
    ranks: int
    steps: int
    done: int
    moments: int
    sizes: Collection[Collection[Any]]
    itemsize: int  # bytes of a weight
    runs: Sequence[tuple[Shares, int]]
    skipped: int = 0


class AxisRun(NamedTuple):
    """One data axis in the part of a job whose bytes are counted: one stage's parameters on the ranks that share them.

    sizes: its `AxisSizes`. ranks: those over which gradients are summed. groups: how many such groups a stage has.
    reductions: of its gradients, in a step. reduced: bytes that its ranks together send in one of them. microbatches:
    that each of its ranks runs in a step. replayed: whether a pipeline runs the forward pass of its stage again.
    """

    sizes: Any
    ranks: int
    groups: int
    reductions: int
    reduced: int
    microbatches: int
    replayed: bool


class History(NamedTuple):
    """Which checkpoints of a --save directory count.

    keep: how many of a run are kept; None keeps all. from_step: which one a job goes on from; None: the latest one.
    overwrite: whether a new run may begin in a directory with checkpoints.
    """

    keep: int | None = None
    from_step: int | None = None
    overwrite: bool = False


class Settings(Record, forbid=True):
    """The flags of a technique. A field is a flag of `minidist train`, with its default, bounds and description."""


class Extension:
    """The base class: a technique that does nothing. A rank has one object of each technique that its job uses."""

    # The flags. In a job that uses the technique, one of them differs from its default.
    Settings: ClassVar[type[Record]] = Settings

    # The flag without which the others have no effect and are refused; it decides whether a job uses the technique.
    main: ClassVar[str] = ""

    # Settings of every job that also decide whether the technique is used, each with the value with which it is not:
    # see `used_by`.
    switches: ClassVar[tuple[tuple[str, Any], ...]] = ()

    # The heading of the flags in `--help`.
    panel: ClassVar[str] = "Checkpoints and checks"

    # What is refused.
    rules: ClassVar[tuple[Rule, ...]] = ()

    # Whether the rules are checked before those of the layout's axes.
    rules_first: ClassVar[bool] = False

    # Flags that one data-parallel rank ignores, with a function that says when they have an effect all the same.
    alone: ClassVar[tuple[tuple[str, Callable[[Any], bool]], ...]] = ()

    # Settings of every job that have an effect on such a rank with the technique, with a function that says when.
    matters_alone: ClassVar[tuple[tuple[str, Callable[[Any], bool]], ...]] = ()

    # Whether the numbers of the training do not depend on the technique, so that the reference on one device leaves it
    # out.
    observes: ClassVar[bool] = False

    # What differs from rank to rank, so that `--fold` is refused.
    unlike: str = ""

    # The name of `state` in a checkpoint; by default the name of the class.
    key: ClassVar[str] = ""

    # The settings that a resumed job must have in common with the job that saved its checkpoint.
    fixed: ClassVar[tuple[str, ...]] = ()

    # Those of `fixed` that `differs` compares where the checkpoint has a `state`, because they name a place.
    by_content: ClassVar[tuple[str, ...]] = ()

    # How many losses `evaluate` computes.
    evaluations: ClassVar[int] = 0

    # Flags of what happens every N steps, and how many steps must follow for it to have an effect.
    periods: ClassVar[Mapping[str, int]] = {}

    # The flag with which a number that differs in its last bit may change a choice.
    jumps: ClassVar[str] = ""

    # Settings that need the values of arrays, which a dry run does not have. An attribute: a method is refused.
    by_values: ClassVar[tuple[str, ...]] = ()

    # Whether each data-parallel rank steps its replica with the gradient of that rank's rows (`meeting.py`).
    trains_alone: ClassVar[bool] = False

    # Whether a pipeline is empty after every step, so that all stages have the weights and gradients of one step.
    drains: ClassVar[bool] = True

    # The kinds of optimizer state that are differences of weights, which `compare` holds to the rounding of weights.
    weight_differences: ClassVar[tuple[str, ...]] = ()

    # Whether the technique sums whole buckets of gradients in its own order, in place of --reduction (`bucket.py`).
    # Both stages with a tied weight then have a bucket for it.
    sums_buckets: ClassVar[bool] = False

    # Whether gradients are reduced after every micro-batch. An attribute: a method is refused.
    reduces_each: ClassVar[bool] = False

    # Of each kind of state that `of_rank` returns: what a checkpoint holds with it, and what to resume with, in words,
    # where a job has no place for it.
    own_state: ClassVar[Mapping[str, tuple[str, str]]] = {}

    # What traces and reports call the ranks of the layout, where other ranks are outside of it. One technique of a job
    # may have such ranks.
    trainers: ClassVar[str] = "layout"

    # Whether the settings are meant for the whole length of a job, so that a trial of a few steps leaves them out.
    for_all_steps: ClassVar[bool] = False

    # Whether evaluations have the technique, too, with `read_inputs` and `micro_batch`.
    in_evaluations: ClassVar[bool] = False

    # The flags that a plan (`minidist plan`) leaves out, because they change neither memory nor time by more than the
    # planner's error.
    unplanned: ClassVar[tuple[str, ...]] = ()

    # What is made of keys of a DeepSpeed file.
    deepspeed: ClassVar[DeepSpeedKeys] = DeepSpeedKeys()

    # By what `scaled` has multiplied the loss of the current step, and so its gradients.
    scale: float = 1.0

    def __init_subclass__(cls) -> None:
        for name in ("reduces_each", "by_values"):
            if callable(getattr(cls, name)):
                raise UsageError(f"{cls.__name__}.{name} is a method, which is always true; make it an attribute")

        # A hook with another name would never be called.
        for name in vars(cls):
            if name[0] != "_" and not any(hasattr(base, name) for base in cls.__bases__) and (near := _hook_like(name)):
                raise UsageError(
                    f"{cls.__name__}.{name} is no hook; did you mean {near}? If it is not meant as a hook, begin its"
                    " name with an underscore"
                )

        # Every class has its own state, also where it is derived from another extension.
        cls.key = vars(cls).get("key") or cls.__name__

    def __init__(self, settings: Any) -> None:
        self.settings = settings

    # --- what the settings say ----------------------------------------------------------------------------------------

    @classmethod
    def used_by(cls, config: Any) -> bool:
        """Return whether a job with these settings uses the technique.

        Unless overridden: when the flag `main` is given, or any flag where there is no `main`.

        Asked only of a job in which a flag, or a setting of `switches`, has another value.
        """
        flags = [cls.main] if cls.main else list(cls.Settings.model_fields)
        return any(getattr(config, name) != cls.Settings.model_fields[name].default for name in flags)

    @classmethod
    def given(cls, config: Any) -> bool:
        """Return whether a setting of the technique differs from its default."""
        return any(getattr(config, name) != field.default for name, field in cls.Settings.model_fields.items())

    @classmethod
    def check(cls, job: Any) -> None:
        """Raise UsageError for what no rule can refuse, in a job that uses the technique. job: as the rules see it."""

    @classmethod
    def notices(cls, job: Any) -> list[str]:
        """Return lines that name what has no effect in a job that uses the technique. job: as the rules see it."""
        return []

    @classmethod
    def changes_batches(cls, config: Any) -> bool:
        """Return whether the ranks choose their batches, or the shares of them, while they train."""
        return False

    @classmethod
    def needs_values(cls, config: Any) -> dict[str, Any]:
        """Return {flag: value} of the settings that a dry run cannot make, because its arrays have no values."""
        return {"--" + name.replace("_", "-"): getattr(config, name) for name in cls.by_values}

    @classmethod
    def beside(cls, config: Any, ranks: int | None = None) -> int:
        """Return how many ranks are outside of the layout, the last ones: they call `serve` in place of training.

        ranks: of the job, None where they follow from the degrees. Raises UsageError when none is left to train.
        """
        return 0

    def joins_replicas(self) -> str:
        """Return the flag with which a micro-batch is computed from the rows of all replicas; "" without it.

        One device then joins their micro-batches of the same number.
        """
        return ""

    def recomputes(self) -> str:
        """Return what runs again in backward, as `nn.recompute.recompute` takes it."""
        return "none"

    def replays(self, config: Any) -> tuple[int, ...] | range:
        """Return the stages of a pipeline whose whole forward pass runs again before their backward."""
        return ()

    def history(self) -> History:
        """Return which checkpoints of the --save directory count."""
        return History()

    def check_comparison(self, config: Any, dims: Any, cut: str) -> None:
        """Raise UsageError for a layout in which the job cannot be compared with one device.

        cut: why a sum inside a micro-batch has another order than on one device; empty where it has not.
        """

    # --- before the model is made -------------------------------------------------------------------------------------

    def before_ranks(self, config: Any, ranks: int | None, has_values: bool) -> tuple[Any, Sequence[str]]:
        """Return the settings with which `train` and `compare` run a job, and lines that say what was chosen.

        ranks: as they are given, None where they follow from the degrees. has_values: False for a dry run.
        """
        return config, ()

    def check_models(self, config: Any, saved_model: Callable[[str, str], Any]) -> None:
        """Raise UsageError for a model that the technique reads and cannot use; no rank has started.

        saved_model: (flag, directory) -> the model of a checkpoint, a `SavedModel`.
        """

    def own_loop(self, config: Any) -> OwnLoop | None:
        """Return the training loop that the technique has in place of the job's; None: it has none."""
        return None

    def serve(self, comm: Comm, config: Any, batches: Any, saved_model: Callable[[str, str], Any]) -> int:
        """Do the work of a rank outside of the layout; return how many steps were done before the job began.

        comm: all ranks. saved_model: as in `check_models`.
        """
        raise NotImplementedError

    def before_resume(self, config: Any, stages: int, then: Mapping[str, Any], state: Any) -> Any:
        """Return the settings with which a job that is resumed is built; a ValueError says what is wrong with `state`.

        stages: of the pipeline. then: settings of the job that saved the checkpoint. state: as for `load`.
        """
        return config

    def model_options(self, config: Any) -> Mapping[str, Any]:
        """Return further arguments of the model, or of its `GPTConfig` or `LlamaConfig`, as `config.model` says."""
        return {}

    # --- the model and its layout are made ----------------------------------------------------------------------------

    def build(self, job: Any, comm: Comm | None) -> None:
        """Change the job that `train.job.build` has made. comm: None in the reference on one device."""

    def loss(self, loss: Callable[..., Any], comm: Comm | None = None) -> Callable[..., Any]:
        """Return a loss function (logits, targets, divisor) in place of the job's, for steps and for evaluations.

        comm: the ranks among which the vocabulary is split; each has the logits of its words.
        """
        return loss

    def layers_split(self, job: Any, axes: Any) -> None:
        """Change the layers of the job's model, which are split over ranks, and not yet cut into stages.

        axes: None on a rank that has the whole model by itself.
        """

    def forget(self) -> None:
        """Forget what the model's layers have done since it was built."""

    def packs_inputs(self) -> bool:
        """Return whether `pack` moves the inputs of recomputed blocks away; a pipeline's blocks then recompute, too."""
        return False

    def pack(self, array: Any) -> Any:
        """Return what a block's input is until backward reads it, in a technique that `packs_inputs`.

        See `pack` of `autograd.checkpoint`.
        """
        raise NotImplementedError

    def pipeline(self) -> Any:
        """Return the class of the strategy that runs a pipeline; None: `PipelineParallel`."""
        return None

    def axis_made(self, axis: Any) -> None:
        """Note that a data axis of the layout (a `DataAxis`) is made, before anything is read or sent for it.

        What the technique keeps of it may be in `axis.techniques`, under the technique's key.
        """

    def wrapper_options(self, config: Any) -> Mapping[str, Any]:
        """Return arguments of what wraps the model on the data axis.

        That is `DistributedDataParallel`, `ZeroOptimizer` or `fully_shard`, as `config.zero` says.
        """
        return {}

    def optimizer_arguments(self, job: Any, group: Any) -> dict[str, Any]:
        """Return further arguments of the optimizer's class.

        group: the parameters and the ranks that share them, a `core.train.data_axis.Group`; None: each rank has them
        whole, and makes every update itself.
        """
        return {}

    def optimizer(self, kind: Callable[..., Any]) -> Callable[..., Any]:
        """Return what makes the job's optimizer. kind: what makes it without the technique."""
        return kind

    def begin(self, comm: Comm, strategy: Any, done: int) -> None:
        """Prepare the first step, on every rank of the layout. comm: all ranks. done: steps of an earlier run.

        Not called with an `OwnLoop`, which has no layout.
        """

    def reading(self, sampler: Any, replica: int, steps: Iterable[int]) -> AbstractContextManager[Any]:
        """Return a context that lasts until the job ends, with what makes the micro-batches in place of `sampler`.

        replica: whose rows the rank reads. steps: those in which it reads, in order. Every rank that reads calls it,
        also in an `OwnLoop`.
        """
        return nullcontext(sampler)

    def attached(self, strategy: Any) -> AbstractContextManager[Any] | None:
        """Note the strategy; return None, or a context that lasts until the job ends, or has another strategy."""
        return None

    # --- each step ----------------------------------------------------------------------------------------------------

    def before_step(self, samples: int) -> None:
        """Note that all ranks together read `samples` samples in the next step."""

    def read(self, numbers: np.ndarray[Any, Any], sides: Iterable[str]) -> None:
        """Note that this rank has read the samples with these numbers. sides: their inputs, their targets, or both."""

    def read_inputs(self, number: int, inputs: Any) -> None:
        """Note that micro-batch `number` was read, with these inputs of whole samples."""

    def micro_batch(self, number: int) -> AbstractContextManager[Any]:
        """Return a context in which micro-batch `number` runs; every action of a pipeline has one."""
        return nullcontext()

    def targets(self, step: int, inputs: Any, targets: Any, positions: Any) -> Any:
        """Return what the loss of a micro-batch gets in place of its targets; not called for held-out data.

        inputs: of whole samples. positions: of the targets in their sequences, where these are split; else None.
        """
        return targets

    def scaled(self, loss: Tensor) -> Tensor:
        """Return the loss from which the backward of a micro-batch starts; not called for held-out data."""
        return loss

    def lr_factor(self, step: int) -> float:
        """Return by what the learning rate of a step is multiplied: a function of its number and the batches so far."""
        return 1.0

    def after_forward_backward(self, strategy: Any, step: int) -> None:
        """Note that this rank has made its micro-batches of a step. Every rank calls it, before it sends losses."""

    def after_backward(self, strategy: Any, step: int) -> None:
        """Look at the gradients of a step, or change them in place: they are summed over all ranks, not yet clipped.

        strategy: a `job/train/strategies/mesh.py:MeshStrategy`; `strategy.gradients()` is multiplied by
        `strategy.job.scale`. Every rank calls it, and the reference on one device.
        """

    def updates(self, strategy: Any, comm: Comm | None) -> bool:
        """Return whether the update of a step is made, the same on every rank. Where it is not, nothing is clipped.

        Every rank calls it, and the reference on one device, until a technique of the job returns False. comm: all
        ranks that train; None on one device. Not called with an `OwnLoop`.
        """
        return True

    def after_update(self, moment: Moment) -> None:
        """Look at the weights after an update, or change them. Every rank calls it."""

    def evaluate(self, done: int, loss: Callable[[], float]) -> dict[str, float]:
        """Return further losses on held-out data after `done` steps, by the name that they have in `--metrics`.

        loss: computes the loss of the model as it is when it is called, on all ranks.
        """
        return {}

    def record(self, job: Any, done: int) -> dict[str, Any]:
        """Return entries for the line of `--metrics` of the step that `job` has just made, of rank 0.

        done: steps that are made.
        """
        return {}

    def next_layout(self, strategy: Any, done: int, rebuild: Callable[[Any], Any]) -> Any:
        """Return the strategy of the steps after the first `done`: the same, or another one in the same state.

        rebuild: makes the strategy of a new model from a config, with its initial weights; what does not belong to the
        model is that of `strategy.job`. Every rank calls it, so the layout may be chosen together.
        """
        return strategy

    # --- replicas that train alone, and one device --------------------------------------------------------------------

    def meeting(self, replica: Replica) -> Meeting:
        """Return what steps a rank's replica and lets it meet the others, in a technique that `trains_alone`."""
        raise NotImplementedError

    def replay(self, devices: Sequence[Any], mean: Mean) -> Replay:
        """Return what lets replicas meet on one device. devices: has one for each, with its `job` and its `flat`."""
        raise NotImplementedError

    def reference(self, config: Any, batches: Any, observers: Sequence[Any]) -> list[float] | None:
        """Train on one device what the job trains on many, in place of `job.equality.reference`; return the losses.

        None: the technique leaves that to the job. Observers are called after every step, as on ranks.
        """
        return None

    def sum_of_replicas(self, bucket: ReplicaBucket) -> Any:
        """Return the sum of a bucket of gradients over the replicas, on one device, in a technique that `sums_buckets`.

        It sends nothing, and is to be written independently of what the ranks do.
        """
        raise NotImplementedError

    # --- checkpoints --------------------------------------------------------------------------------------------------

    def check_resume(self, checkpoint: Any) -> None:
        """Raise UsageError when the job cannot continue where a checkpoint ended. It has a `path` and a `step`."""

    def differs(self, state: Any) -> str:
        """Return what a job was made with that has saved `state` and is another one, and the remedy; else nothing.

        Rank 0 calls it. A ValueError says what is wrong with the state.
        """
        return ""

    def load(self, state: Any, samples: int) -> None:
        """Continue with the `state` of a checkpoint after `samples` samples. None: the job that saved it had none.

        A ValueError says what is wrong with the state.
        """

    def load_scalars(self, scalars: Mapping[str, float]) -> None:
        """Restore the numbers of `scalars`; those of other techniques are among them."""

    def load_shards(self, axis: Any, shards: Mapping[str, Sequence[Any]]) -> None:
        """Continue with the shards of a checkpoint, or of other ranks, which `shards_after` has named."""

    def load_of_rank(self, axis: Any, arrays: Mapping[str, Any]) -> None:
        """Continue with the arrays of `of_rank`."""

    def load_of_axis(self, axis: Any, arrays: Mapping[str, Any]) -> None:
        """Continue with the arrays of `of_axis`."""

    def state(self) -> Any:
        """Return what a checkpoint keeps, as a value of JSON; nothing is kept of what is empty. Rank 0 calls it."""
        return {}

    def scalars(self) -> dict[str, float]:
        """Return numbers for a checkpoint, the same on all ranks."""
        return {}

    def shards(self, axis: Any) -> dict[str, list[Any]]:
        """Return what a checkpoint keeps with the weights of a data axis, by kind: the tensor KIND/WEIGHT of each.

        They are shards of `axis.weights()` with other values, and have the same places.
        """
        return {}

    def kept(self, axis: Any) -> dict[str, int]:
        """Return how many elements of the shards are not zero, by the name of a tensor that is stored sparsely."""
        return {}

    def shards_after(self, axis: Any, done: int) -> dict[str, tuple[str, list[Any]]]:
        """Return what `shards` returns after `done` steps: by kind the dtype, and shards whose values do not matter."""
        return {}

    def of_rank(self, axis: Any) -> dict[str, Any]:
        """Return arrays that this rank alone holds for a data axis, by kind, for a checkpoint; see `own_state`.

        Ranks of a resumed job get their own, and other numbers of ranks arrays with the same sum.
        """
        return {}

    def of_axis(self, axis: Any) -> dict[str, Any]:
        """Return further arrays for a checkpoint by name, which are equal on all ranks of a data axis."""
        return {}

    def converted(self, model: Any, scalars: Mapping[str, float]) -> Any:
        """Return a model of a checkpoint as it is used after the training. scalars: of the checkpoint."""
        return model

    # --- results and bytes --------------------------------------------------------------------------------------------

    def result(self) -> dict[str, Any]:
        """Return the entries that a job's JSON gets: of rank 0, after the last step.

        Not called with an `OwnLoop`, and neither are `of_all_ranks`, `lines` and `header`.
        """
        return {}

    def of_all_ranks(self, results: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Return entries in place of those of rank 0, from what `result` returned on all ranks, in rank order."""
        return {}

    def lines(self, result: dict[str, Any]) -> list[str]:
        """Return the lines that `minidist train` prints of what `result` returned."""
        return []

    def header(self, result: dict[str, Any]) -> dict[str, Any]:
        """Return entries of the header of a trace, from what `result` returned."""
        return {}

    def sizes(self, axis: Any) -> dict[str, Any]:
        """Return numbers of a data axis on which the closed forms depend; they are in `more` of its `AxisSizes`.

        They are those of the layout in use: they are asked for before another one is `attached`, and after the last
        step.
        """
        return {}

    def loss_volume(self, volume: Callable[[int, int], Any]) -> Callable[[int, int], Any]:
        """Return the closed form (tokens, ranks) of what `loss` sends in a step where the vocabulary is split."""
        return volume

    def bytes_sent(self, run: Run) -> dict[str, int]:
        """Return the payload bytes that the technique adds, of all ranks together, by purpose: the closed form.

        run: the steps that were made with one layout.
        """
        return {}

    def bytes_of_axis(self, run: Run, axis: AxisRun) -> dict[str, int]:
        """Return the payload bytes that the technique adds on a data axis, of all its groups; negative: that it saves.

        They are added to those of `bytes_sent`.
        """
        return {}


def _hook_like(name: str) -> str:
    """Return the attribute of `Extension` whose name is nearly `name`, or ""."""
    from difflib import get_close_matches

    hooks = [hook for hook in dir(Extension) if hook[0] != "_"]
    return next(iter(get_close_matches(name, hooks, 1, cutoff=0.85)), "")
