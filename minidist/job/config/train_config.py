"""One description of a training job, the same behind flags, files and Python; every wrong value is one sentence.

The three batch sizes depend on each other: global batch = micro batch x accumulation x data-parallel ranks. Any two
determine the third. A global batch that the ranks do not divide is cut into shares that differ by one row.

Proved by: tests/config/test_train_config.py
"""

from collections.abc import Iterable
from dataclasses import dataclass
from types import new_class
from typing import TYPE_CHECKING, Any, Literal, Self

from minidist.base.errors import UsageError, nearest, quoted
from minidist.base.limits import MAX_BATCH, MAX_COUNT, MAX_LAYERS, MAX_RANKS
from minidist.base.records import Field, Record, WrongValue, checked
from minidist.base.user_file import is_user_function
from minidist.core.parallel.dims import ParallelDims
from minidist.core.pipeline.schedules import get_schedule
from minidist.data.batch_plan import Shares, cut_batch, measured_every, parse_weights
from minidist.optim.named import OPTIMIZERS
from minidist.parallel.fitting_dims import dims_of
from minidist.techniques import installed, ranks_beside
from minidist.techniques.rule import multiples


def _check_model(value: str) -> None:
    if value not in ("gpt", "llama", "mlp", "cnn") and not is_user_function(value):
        raise WrongValue("Input should be 'gpt', 'llama', 'mlp', 'cnn' or FILE.py:FUNCTION")


def _check_optimizer(value: str) -> None:
    if value not in OPTIMIZERS and not is_user_function(value):
        raise WrongValue(f"Input should be {', '.join(map(repr, OPTIMIZERS))} or FILE.py:CLASS")


def _samples_or_auto(value: Any) -> int | str | None:
    # One sentence for both.
    if value is None or (isinstance(value, str) and value == "auto"):
        return value
    try:
        return checked(int, value, {"ge": 1, "le": MAX_BATCH}, strict=False)  # type: ignore[no-any-return]
    except WrongValue:
        raise WrongValue(f"Input should be a whole number from 1 to {MAX_BATCH:,}, or auto") from None


class WrongSetting(WrongValue, UsageError):
    """The first wrong setting of a job, in the words of the flags: what is allowed, or the nearest name of one."""

    def __init__(self, error: WrongValue, names: Iterable[str]) -> None:
        super().__init__(error.message, error.place, error.value, error.unknown)
        self.names = names

    def __str__(self) -> str:
        key = self.path
        if self.unknown:
            return f"unknown setting {quoted(key)}{nearest(key, self.names)}"
        return f"{flag(key)} {quoted(self.value)}: {self.clause}"


class JobSettings(Record, forbid=True):
    """The settings of every job: model, data, batch, layout. Those of a technique are in its folder of `techniques`."""

    # model and data
    model: str = Field(
        "gpt",
        check=_check_model,
        description="gpt or llama (byte-level language models), mlp (classifier), cnn (of images), or your own,"
        " FILE.py:FUNCTION",
    )
    layers: int = Field(2, ge=1, le=MAX_LAYERS, description="blocks of the model; hidden layers of the MLP")
    width: int = Field(64, ge=1, le=MAX_COUNT, description="width of the model (d); channels of the CNN")
    heads: int = Field(4, ge=1, le=MAX_COUNT, description="attention heads")
    kv_heads: int | None = Field(
        None,
        ge=1,
        le=MAX_COUNT,
        description="llama: key-value heads, shared by groups of heads (default: as many as heads)",
    )
    ffn: int | None = Field(
        None,
        ge=1,
        le=MAX_COUNT,
        description="llama: width of the MLP, or of an expert (default: 8/3 of the width, to a multiple of the heads)",
    )
    context: int = Field(64, ge=1, le=MAX_COUNT, description="tokens per sample")
    experts: int = Field(0, ge=0, le=MAX_COUNT, description="gpt, llama: experts in place of each MLP; 0: none")
    data: str = Field(
        "",
        description="pydoc (default of language models), glyphs (of mlp and cnn), markov, random:N (random tokens of a"
        " vocabulary of N), text:FILE, tokens:FILE, idx:DIR, cifar:DIR, npz:FILE, or your own, FILE.py:FUNCTION;"
        " behind it stages, each after a bar: 'cifar:DIR | crop:4 | flip | shuffle:BLOCK | FILE.py:FUNCTION'",
    )

    # optimization
    steps: int = Field(20, ge=1, le=MAX_COUNT, description="optimizer steps")
    optimizer: str = Field(
        "adamw",
        check=_check_optimizer,
        description="optimizer (sgd | adagrad | rmsprop | adam | adamw | lars | lamb | muon) or your own FILE.py:CLASS",
    )
    lr: float = Field(3e-3, gt=0, description="learning rate")
    weight_decay: float = Field(0.0, ge=0, description="weight decay")
    seed: int = Field(0, ge=0, description="seed of weights, data order and dropout")

    # the batch: any two of the first three give the third
    global_batch: int | None = Field(None, ge=1, le=MAX_BATCH, description="samples per step, on all ranks together")
    micro_batch: int | Literal["auto"] | None = Field(
        None,
        read=_samples_or_auto,
        description="samples per forward pass of a rank, or auto: as many as fit --memory-budget",
    )
    accumulation: int | None = Field(None, ge=1, le=MAX_BATCH, description="forward passes of a rank per step")
    microbatches: int | None = Field(
        None, ge=1, le=MAX_BATCH, description="micro-batches of a pipeline per step; another name of --accumulation"
    )

    weights: str | None = Field(
        None,
        description="share of the rows for each data-parallel rank: such as 2,1,1; measured:STEPS, in proportion to the"
        " speeds measured every STEPS steps; equal, so that a batch which the ranks do not divide is refused (default:"
        " equal, or different by one row)",
    )

    # axes: ranks = pp x dp x cp x tp
    dp: int | None = Field(
        None, ge=1, le=MAX_RANKS, description="data-parallel ranks (default: the ranks that the other axes leave)"
    )
    pp: int = Field(1, ge=1, le=MAX_RANKS, description="pipeline ranks")
    schedule: str = Field(
        "1f1b", description="order of a pipeline: NAME (see minidist schedule), FILE.csv or FILE.py:FUNCTION"
    )
    chunks: int | None = Field(
        None, ge=1, le=MAX_COUNT, description="pipeline: stages per rank, for the schedules that leave the choice"
    )
    replicas: str | None = Field(None, description="pipedream: ranks of each stage, --pp in total, such as 2,1")
    partition: str = Field(
        "uniform",
        description="blocks of each stage: uniform, parameters, sizes such as 3,1, or FILE.json of minidist profile, or"
        " of minidist partition, with the replicas of each stage",
    )
    cp: int = Field(1, ge=1, le=MAX_RANKS, description="context-parallel ranks: each has a part of each sequence")
    attention: Literal["ring", "ulysses", "all-gather", "ulysses-ring"] = Field(
        "ring", description="attention across the parts of a sequence"
    )
    ulysses: int = Field(
        2, ge=1, le=MAX_RANKS, description="ulysses-ring: neighbours that exchange heads; rings join their groups"
    )
    tp: int = Field(1, ge=1, le=MAX_RANKS, description="tensor-parallel ranks: each has a shard of each matrix")
    sequence_parallel: bool = Field(False, description="with --tp: norms and dropout on 1/tp of the sequence")
    ep: int = Field(
        1, ge=1, le=MAX_RANKS, description="expert-parallel ranks, a divisor of --dp: each has a share of the experts"
    )

    # the data axis
    zero: int = Field(
        0, ge=0, le=3, description="ZeRO stage: 1 shards the optimizer, 2 gradients too, 3 parameters too"
    )
    reduction: Literal[
        "ordered",
        "ring",
        "auto",
        "binomial",
        "naive",
        "rabenseifner",
        "recursive_doubling",
        "recursive_halving",
        "ring_in_blocks",
        "segmented_ring",
        "two_level",
    ] = Field(
        "ring",
        description="algorithm of the sum of gradients; ordered: the same bits for all bucket sizes and numbers of"
        " ranks; auto: the fastest for each bucket",
    )
    dp_replicate: int = Field(
        1,
        ge=1,
        le=MAX_RANKS,
        description="ZeRO 3: equal copies of the sharded model, each over dp / copies ranks (hybrid sharding); with"
        " --local-steps and any --zero: replicas that train alone",
    )

    # numbers and memory
    precision: Literal["fp32", "fp64", "fp16", "bf16"] = Field(
        "fp32", description="dtype of parameters, gradients and activations"
    )
    # checkpoints and checks
    save: str | None = Field(None, description="directory of checkpoints; the last step is always saved")
    every: int | None = Field(None, ge=1, le=MAX_COUNT, description="steps between two checkpoints")
    resume: bool = Field(False, description="continue from the latest checkpoint in --save")
    extension: str | None = Field(
        None,
        description="a technique of your own: FILE.py:CLASS, with its settings, such as FILE.py:CLASS,every=2; several"
        " are joined by commas",
    )
    evaluate_every: int | None = Field(
        None, ge=1, le=MAX_COUNT, description="steps between losses on held-out data, the last tenth"
    )

    def optional(self, name: str) -> Any:
        """Return a setting of a technique that may not be installed; None without it."""
        return getattr(self, name, None)

    @property
    def is_language_model(self) -> bool:
        """Whether the model is minidist's GPT or Llama, which take targets and compute their loss themselves."""
        return self.model in ("gpt", "llama")

    @property
    def is_classifier(self) -> bool:
        """Whether the model is minidist's MLP or CNN."""
        return self.model in ("mlp", "cnn")

    @property
    def is_own_model(self) -> bool:
        """Whether the model comes from a function of the user's, FILE.py:FUNCTION."""
        return is_user_function(self.model)

    @classmethod
    def completed(cls, values: dict[str, Any]) -> dict[str, Any]:
        """Return the settings with the data set that belongs to the model."""
        data = "glyphs" if values.get("model") in ("mlp", "cnn") else "pydoc"
        return {**values, "data": values.get("data") or data}

    @classmethod
    def make(cls, **values: Any) -> Self:
        """Make a config, as the constructor does."""
        return cls(**values)

    def told(self, error: WrongValue) -> WrongValue:
        """Return the error in the words of the flags."""
        return WrongSetting(error, self.model_fields)


if TYPE_CHECKING:

    class TrainConfig(JobSettings):
        """A job: `JobSettings` and the settings of every technique."""

else:
    # What a technique is told by its flags, only its own folder knows.
    TrainConfig = new_class(
        "TrainConfig",
        (*(kind.Settings for kind in reversed(installed()) if kind.Settings.model_fields), JobSettings),
        exec_body=lambda body: body.update(__module__=__name__),
    )


def flag(field: str) -> str:
    """Return the flag of a field: global_batch -> --global-batch."""
    return "--" + field.replace("_", "-")


@dataclass(frozen=True)
class Batches:
    """The resolved degrees and batch triple: global_batch = micro_batch * accumulation * dp where all shares are equal.

    micro_batch: the rows of the largest micro-batch. weights: of the ranks' shares; None where they are equal.
    """

    dims: ParallelDims
    global_batch: int
    micro_batch: int
    accumulation: int
    weights: tuple[float, ...] | None = None

    @property
    def shares(self) -> Shares:
        """The rows of every micro-batch of a step."""
        return cut_batch(self.global_batch, self.dp, self.accumulation, self.weights)

    def with_shares(self, shares: Shares) -> "Batches":
        """Return the batches of steps that have these shares."""
        rows = tuple(float(sum(replica)) for replica in shares.rows)
        if shares == self.shares:
            return self
        return Batches(self.dims, shares.samples, shares.largest, shares.accumulation, rows)

    @property
    def dp(self) -> int:
        """The data-parallel degree."""
        return self.dims.dp

    @property
    def microbatches(self) -> int:
        """Micro-batches of a step on all ranks together; replica r's i-th is number r * accumulation + i."""
        return self.dp * self.accumulation


def has_ragged_shares(config: TrainConfig, batches: Batches) -> bool:
    """Return whether ranks have, or may get, different numbers of rows in a micro-batch."""
    may_change = measured_every(config.weights) > 0 or config.optional("memory_budget_file") is not None
    return not batches.shares.is_even or may_change


def resolve_dims(config: TrainConfig, ranks: int | None = None) -> ParallelDims:
    """Return the degrees on `ranks` ranks (None: on as many as the degrees need); UsageError when they do not fit.

    The ranks that a technique has outside of the layout (`Extension.beside`) are outside of every degree.
    """
    if ranks is not None:
        ranks -= ranks_beside(config, ranks)

    # Without a number of ranks, the degrees determine it; a --dp that is left open counts as 1.
    dp = config.dp if ranks is not None else config.dp or 1
    ranks = (dp or 1) * config.pp * config.cp * config.tp if ranks is None else ranks
    return dims_of(ranks, pp=config.pp, dp=dp, cp=config.cp, tp=config.tp, ep=config.ep)


def resolve_batches(config: TrainConfig, ranks: int) -> Batches:
    """Return the complete batch triple and the shares; UsageError when three given numbers contradict each other."""
    dims = resolve_dims(config, ranks)
    dp = dims.dp
    total, micro, given = _given_batches(config)
    accumulation = given
    if accumulation is None and config.pp > 1 and (total is None or micro is None):
        accumulation = _pipeline_microbatches(config)

    # Two of the three numbers determine the third; the defaults are a micro batch of 4 and an accumulation of 1.
    exact, weights = config.weights == "equal", _given_weights(config)
    if total is None:
        total = (micro or 4) * (accumulation or 1) * dp
    elif micro is not None and accumulation is None:
        # As many micro-batches as the largest share needs.
        largest = max(map(sum, cut_batch(total, dp, 1, weights).rows))
        accumulation = max(1, largest // micro if exact else -(-largest // micro))
    accumulation = accumulation or 1

    # A batch that the ranks do not divide is cut into shares that differ by one row, unless they must be equal or all
    # three numbers were given, so that any of them may be the wrong one.
    all_given = None not in (config.global_batch, micro, given)
    if exact or all_given:
        _check_product(total, micro, accumulation, dp, all_given)
    largest = cut_batch(total, dp, accumulation, weights).largest
    return Batches(dims=dims, global_batch=total, micro_batch=largest, accumulation=accumulation, weights=weights)


def _given_batches(config: TrainConfig) -> tuple[int | None, int | None, int | None]:
    """Return the global batch, the micro batch and the accumulation that the configuration gives."""
    if config.microbatches is not None and config.accumulation not in (None, config.microbatches):
        raise UsageError(
            f"--microbatches {config.microbatches} and --accumulation {config.accumulation} are the same number; give"
            " one of them"
        )
    if config.micro_batch == "auto":
        raise UsageError("--micro-batch auto is chosen by minidist train and minidist compare; give a number here")
    return config.global_batch, config.micro_batch, config.accumulation or config.microbatches


def _pipeline_microbatches(config: TrainConfig) -> int:
    """Return a pipeline's default: several micro-batches if it drains, unless its file says how many it has."""
    if config.schedule.endswith(".csv"):
        from minidist.pipeline.schedules.text import read_csv

        return read_csv(config.schedule).microbatches
    return 1 if updates_of(config.schedule) in ("stash", "vertical-sync") else 2 * config.pp


def _given_weights(config: TrainConfig) -> tuple[float, ...] | None:
    """Return the shares of the replicas, or None for shares that are equal or measured."""
    if config.weights in (None, "equal") or measured_every(config.weights):
        return None
    return parse_weights(config.weights)


def _check_product(total: int, given: int | None, accumulation: int, dp: int, all_given: bool) -> None:
    """Raise UsageError for a batch that is not the product. given: the micro batch. all_given: so are the others."""
    micro = given or total // (accumulation * dp)
    product = micro * accumulation * dp
    if product == total:
        return
    if all_given:
        choices = f"{product}"
        if total % (micro * accumulation) == 0:
            choices += f", or {total // (micro * accumulation)} data-parallel ranks instead of {dp}"
    else:
        choices = multiples(total, (given or accumulation) * dp)
    raise UsageError(
        f"global batch = micro batch x accumulation x dp does not hold: {total} != {micro} x {accumulation} x {dp} "
        f"= {product}; change one of them, for example --global-batch {choices}"
    )


def updates_of(schedule: str) -> str:
    """Return when a schedule updates the weights (see `Plan`); "flush" for a file or an unknown name."""
    try:
        return get_schedule(schedule).updates
    except UsageError:
        return "flush"
