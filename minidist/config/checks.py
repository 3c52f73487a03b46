"""What does not go together, each in one sentence, said once before any rank starts."""

from collections.abc import Callable, Iterator

from minidist.base.errors import UsageError
from minidist.config.models import llama_inner, make_model
from minidist.config.pipeline_plan import cut_stages, defers_weights, make_plan
from minidist.config.train_config import Batches, TrainConfig, flag, updates_of
from minidist.data import load_dataset
from minidist.nn.recompute import budget_of
from minidist.parallel.compression import check_compression
from minidist.parallel.context import part_order, sequence_positions
from minidist.parallel.parameter_server import parse_consistency


def check_axes(config: TrainConfig, batches: Batches) -> None:
    """Raise UsageError, the first of all that is wrong, when the axes do not fit the model or each other."""
    for message in _problems(config, batches):
        raise UsageError(message)
    if config.pp > 1:
        cut_stages(
            config, make_model(config, load_dataset(config.data)), make_plan(config, batches.accumulation).stages
        )


# Settings that mean something only beside another one: the field, when it means something, and what to add.
BELONGS: tuple[tuple[str, Callable[[TrainConfig], bool], str], ...] = (
    ("prefetch", lambda c: c.zero == 3, "--zero 3"),
    ("reshard_after_forward", lambda c: c.zero == 3, "--zero 3"),
    ("persistence_threshold", lambda c: c.zero == 3, "--zero 3"),
    ("dp_replicate", lambda c: c.zero == 3, "--zero 3"),
    ("reduce_bucket_size", lambda c: c.zero in (1, 2), "--zero 1 or 2"),
    ("bucket_cap_mb", lambda c: c.zero == 0, "--zero 0"),
    ("top_k", lambda c: c.experts > 0, "--experts"),
    ("capacity_factor", lambda c: c.experts > 0, "--experts"),
    ("aux_loss_weight", lambda c: c.experts > 0, "--experts"),
    ("schedule", lambda c: c.pp > 1, "--pp 2 or more"),
    ("loss_scale", lambda c: c.precision == "fp16", "--precision fp16"),
    ("loss_scale_interval", lambda c: c.precision == "fp16", "--precision fp16"),
    ("loss_scale_hysteresis", lambda c: c.precision == "fp16", "--precision fp16"),
    ("loss_scale_floor", lambda c: c.precision == "fp16", "--precision fp16"),
)


def _without_effect(config: TrainConfig) -> Iterator[str]:
    """A setting that would be ignored is a mistake of who wrote it."""
    for field, has_effect, other in BELONGS:
        value = getattr(config, field)
        if value != TrainConfig.model_fields[field].default and not has_effect(config):
            yield f"{flag(field)} {value} has no effect here; it belongs to {other}: add that, or leave it out"


def _problems(config: TrainConfig, batches: Batches) -> Iterator[str]:
    yield from _compression(config)
    yield from _served(config)
    yield from _noise_scale(config, batches)
    yield from _local_steps(config, batches)
    yield from _evaluation(config)
    yield from _models(config)
    yield from _tensor(config)
    yield from _context(config)
    yield from _experts(config)
    yield from _memory(config, batches)
    yield from _pipeline(config, batches)
    yield from _without_effect(config)


def _compression(config: TrainConfig) -> Iterator[str]:
    name, _ = check_compression(config.compression)
    if name == "none":
        return
    if config.zero:
        yield (
            f"--compression {config.compression} is a hook of data parallelism, and --zero {config.zero} reduces by"
            " another way; take --zero 0"
        )
    if config.precision in ("fp16", "bf16"):
        yield (
            f"--compression {config.compression} does its arithmetic in the gradients' precision; take --precision fp32"
            " or fp64"
        )


def _served(config: TrainConfig) -> Iterator[str]:
    """What does not go with `--strategy ps`, or only with it."""
    if config.strategy != "ps":
        if config.consistency != "bsp" or config.servers != 1 or config.staleness_aware:
            yield "--servers, --consistency and --staleness-aware belong to --strategy ps; add it, or leave them out"
        return
    try:
        if parse_consistency(config.consistency).aggregate and config.staleness_aware:
            yield (
                f"--staleness-aware has no meaning with --consistency {config.consistency}, whose updates are a whole"
                " clock; take ssp:S or asp"
            )
    except UsageError as error:
        yield f"--consistency: {error}"
    axes = [
        f"--{name} {getattr(config, name)}"
        for name in ("pp", "cp", "tp", "ep", "zero")
        if getattr(config, name) > (name != "zero")
    ]
    if axes:
        yield (
            f"--strategy ps has servers and workers with whole models, so it does not go with {' '.join(axes)}; leave"
            " out one or the other"
        )
    if config.precision not in ("fp32", "fp64"):
        yield f"--strategy ps pushes and pulls in fp32 or fp64, not {config.precision}; take --precision fp32"
    for name, why in (
        ("clip", "no rank has the whole gradient whose norm it would take"),
        ("every", "there is no moment between two steps, and it saves when all is done"),
        ("synchronize_each", "a worker pushes once a step"),
        ("check_replicas", "workers have different weights on purpose"),
    ):
        if getattr(config, name):
            yield f"--{name.replace('_', '-')} does not go with --strategy ps: {why}; leave it out"
    if config.compression != "none":
        yield (
            f"--compression {config.compression} is a hook of data parallelism, and --strategy ps pushes whole"
            " gradients; leave it out"
        )
    if config.offload != "none":
        yield (
            f"--offload {config.offload} does not go with --strategy ps, whose optimizer lives on the servers; leave"
            " it out"
        )


def _noise_scale(config: TrainConfig, batches: Batches) -> Iterator[str]:
    """What `--noise-scale` does not go with."""
    if not config.noise_scale:
        return
    dims = batches.dims
    if config.strategy == "ps" or config.zero or dims.dp == 1 or dims.dp != dims.ranks or config.experts:
        yield (
            "--noise-scale compares the gradients of replicas, so it needs --dp 2 or more and no other axis, no --zero"
            " and no --strategy ps"
        )
    if config.synchronize_each or config.compression != "none" or config.precision in ("fp16", "bf16"):
        yield (
            "--noise-scale compares a rank's whole gradient with everybody's, as they are; leave out"
            " --synchronize-each, --compression and --precision fp16 or bf16"
        )


def _local_steps(config: TrainConfig, batches: Batches) -> Iterator[str]:
    """What `--local-steps` does not go with."""
    if not config.local_steps:
        return
    flags = f"--local-steps {config.local_steps}"
    if config.strategy == "ps" or config.zero or config.experts or batches.dims.dp != batches.dims.ranks:
        yield (
            f"{flags} lets whole replicas train alone, so it goes with --dp and no other axis, no --zero and no"
            " --strategy ps"
        )
    if config.precision in ("fp16", "bf16"):
        yield f"{flags} averages weights in fp32 or fp64, not {config.precision}; take --precision fp32"
    for name in ("clip", "save", "noise_scale", "synchronize_each", "check_replicas"):
        if getattr(config, name):
            yield (
                f"--{name.replace('_', '-')} does not go with {flags}: between two averages replicas have different"
                " weights and gradients; leave it out"
            )
    if config.compression != "none":
        yield f"--compression {config.compression} does not go with {flags}, which sends no gradients; leave it out"


def _evaluation(config: TrainConfig) -> Iterator[str]:
    """What evaluation does not combine with, each in one sentence."""
    if not config.evaluate_every:
        return
    if config.pp > 1 and updates_of(config.schedule) != "flush":
        yield (
            f"--evaluate-every needs a moment at which no micro-batch is under way, and --schedule {config.schedule}"
            " never drains; take a synchronous one, such as 1f1b"
        )
    if config.strategy == "ps":
        yield "--evaluate-every belongs to ranks that step together; leave it out, or leave out --strategy ps"


def _models(config: TrainConfig) -> Iterator[str]:
    if config.kv_heads is not None and config.model != "llama":
        yield f"--kv-heads belongs to --model llama, not to {config.model}; leave it out"
    if config.model == "llama" and config.heads % (config.kv_heads or config.heads):
        yield (
            f"--heads {config.heads} do not share --kv-heads {config.kv_heads} evenly; take one of"
            f" {_divisors(config.heads)}"
        )
    if config.dropout and config.model != "gpt":
        yield f"--dropout {config.dropout} belongs to --model gpt; {config.model} has none, leave it out"
    if config.attention_dropout and config.model == "mlp":
        yield (
            f"--attention-dropout {config.attention_dropout} is for attention, which an MLP does not have; leave it out"
        )


def _tensor(config: TrainConfig) -> Iterator[str]:
    tp = config.tp
    if tp == 1:
        if config.sequence_parallel:
            yield (
                "--sequence-parallel splits the sequence over the tensor-parallel ranks; add --tp 2 or more, or take"
                " --cp 2"
            )
        return
    parts = {"--width": config.width}
    if config.model != "mlp":
        parts = {
            "--heads": config.heads,
            **({"--kv-heads": config.kv_heads} if config.kv_heads and tp % config.kv_heads else {}),
        }
    for name, number in parts.items():
        if number % tp:
            near = _near(number, tp)
            if name == "--heads":  # they must divide the width, too
                fitting = [n for n in range(tp, config.width + 1, tp) if config.width % n == 0]
                near = " or ".join(
                    map(str, [*[n for n in fitting if n < number][-1:], *[n for n in fitting if n > number][:1]])
                )
            change = f"{name} {near}" if near else f"a --width that is a multiple of {tp}"
            yield f"{name} {number} does not divide over --tp {tp}; take {change}, or --tp {_divisors(number)}"
    if config.model == "llama" and llama_inner(config) % tp:
        yield f"the inner width {llama_inner(config)} does not divide over --tp {tp}; take --heads a multiple of {tp}"
    if config.sequence_parallel and config.model == "mlp":
        yield "--sequence-parallel is for sequences, which an MLP does not have; leave it out"


def _context(config: TrainConfig) -> Iterator[str]:
    cp, tp = config.cp, config.tp
    if cp > 1:
        if config.model == "mlp":
            yield f"--cp {cp} splits sequences, which an MLP does not have; take --dp {cp}"
        if cp > config.context:
            yield (
                f"--cp {cp} leaves ranks without any of the --context {config.context} tokens; take at most"
                f" {config.context}"
            )
        kv = max(1, (config.kv_heads or config.heads) // tp)
        if config.attention == "ulysses" and kv % cp:
            yield (
                f"Ulysses deals the {kv} (key-value) heads of a rank to --cp {cp} ranks, which does not divide; take"
                f" --cp {_divisors(kv)}, or --attention ring"
            )
    if config.sequence_parallel and config.model != "mlp" and cp <= config.context:
        rows = {len(sequence_positions(config.context, rank, cp, part_order(config.attention))) for rank in range(cp)}
        if any(n % tp for n in rows):
            yield (
                f"--context {config.context} does not divide into {cp * tp} parts for --sequence-parallel; take"
                f" --context {_near(config.context, 2 * cp * tp)}"
            )


def _experts(config: TrainConfig) -> Iterator[str]:
    if config.experts and config.model != "gpt":
        yield f"--experts belongs to --model gpt, not to {config.model}; leave it out"
    if config.experts and config.top_k > config.experts:
        yield f"--top-k {config.top_k} of --experts {config.experts}: a token cannot visit more experts than there are"
    if config.experts % config.ep or (config.ep > 1 and not config.experts):
        yield (
            f"--experts {config.experts} do not divide over --ep {config.ep}; take --experts"
            f" {_near(config.experts, config.ep)}"
        )
    if config.ep > 1 and config.zero == 3:
        yield (
            f"--zero 3 gathers a block over one group of ranks, and with --ep {config.ep} its experts have another;"
            " take --zero 2"
        )


def _memory(config: TrainConfig, batches: Batches) -> Iterator[str]:
    again = budget_of(config.recompute) is not None or config.recompute in ("full", "sqrt")
    if config.pp > 1 and again and config.recompute != "full":
        yield (
            f"--recompute {config.recompute} cuts a model into segments, and a pipeline's plan runs whole stages again;"
            " take full or selective"
        )
    if budget_of(config.recompute) is not None and batches.dims.splits_sums:
        yield (
            f"--recompute {config.recompute} runs a block once to see what it keeps, and with --tp, --cp or --ep a"
            " block sends messages; take sqrt or full"
        )
    reshard, n = config.reshard, batches.dims.dp * batches.dims.cp
    for name in ("reshard_after_forward", "persistence_threshold", "dp_replicate"):
        value = getattr(config, name)
        if config.zero != 3 and value != type(config).model_fields[name].default:
            yield f"{flag(name)} {value} is about sharded parameters; add --zero 3"
    if config.offload == "parameters" and config.zero != 3:
        yield (
            f"--offload parameters keeps shards of parameters on the host, and --zero {config.zero} has none; add"
            " --zero 3"
        )
    if n % config.dp_replicate:
        yield (
            f"--dp-replicate {config.dp_replicate} copies do not share {n} data-parallel ranks evenly; take one of"
            f" {_divisors(n)}"
        )
    shards = n // config.dp_replicate
    if not isinstance(reshard, bool) and (not 1 < reshard < shards or shards % reshard):
        yield (
            f"--reshard-after-forward {reshard} with {shards} shards: a number must divide them and lie between 1 and"
            f" {shards}; or take true or false"
        )
    if reshard is not True and again:
        yield (
            f"--reshard-after-forward {config.reshard_after_forward} keeps what a recorded forward gathered, and with"
            f" --recompute {config.recompute} the forward is not recorded; take one of them"
        )


def _pipeline(config: TrainConfig, batches: Batches) -> Iterator[str]:
    pp = config.pp
    if pp == 1:
        if config.chunks:
            yield "--chunks belongs to a pipeline; add --pp 2 or more"
        if config.partition != "uniform":
            yield f"--partition {config.partition} cuts a pipeline's stages; add --pp 2 or more"
        if config.replicas is not None:
            yield (
                f"--replicas {config.replicas} copies a pipeline's stages; add --pp 2 or more and --schedule pipedream"
            )
        return
    yield from _asynchronous(config, batches)
    if config.synchronize_each:
        yield "--synchronize-each has no meaning in a pipeline, which reduces a stage's gradients once; leave it out"
    if config.zero == 3 and defers_weights(make_plan(config, batches.accumulation)):
        yield (
            f"--zero 3 sends a unit's gradient when backward leaves the unit, and --schedule {config.schedule} computes"
            " weight gradients (W) later than that; take --zero 2, or 1f1b"
        )


def _asynchronous(config: TrainConfig, batches: Batches) -> Iterator[str]:
    """A stream that never drains has no moment at which all gradients of a step are there."""
    updates = updates_of(config.schedule)
    if config.replicas is not None and updates != "stash":
        yield (
            f"--replicas copies stages of --schedule pipedream, and this is {config.schedule}; take --dp for whole"
            " pipelines"
        )
    if updates == "flush":
        return
    if updates in ("stash", "vertical-sync") and batches.accumulation > 1:
        yield (
            f"--schedule {config.schedule} updates after every micro-batch, and a step has {batches.accumulation}; take"
            " --microbatches 1, or pipedream-2bw"
        )
    alone = {"--dp": batches.dims.dp, "--tp": config.tp, "--cp": config.cp, "--ep": config.ep}
    for name, degree in alone.items():
        if degree > 1:
            instead = "--replicas 2,1,.." if name == "--dp" else "a synchronous schedule"
            yield f"--schedule {config.schedule} runs on a pipeline alone, without {name} {degree}; take {instead}"
    if config.clip is not None:
        yield (
            f"--clip {config.clip} needs the gradients of all stages at one time, which --schedule {config.schedule}"
            " never has; leave it out"
        )
    for name, asked in (("--save", config.save is not None), ("--check-replicas", config.check_replicas)):
        if asked:
            yield (
                f"{name} needs a moment at which no micro-batch is under way, and --schedule {config.schedule} never"
                " drains; take a synchronous one, such as 1f1b"
            )
    for name, value, nothing in (
        ("--recompute", config.recompute, "none"),
        ("--offload", config.offload, "none"),
        ("--zero", config.zero, 0),
    ):
        if value != nothing:
            yield (
                f"{name} {value} does not combine with --schedule {config.schedule}; take a synchronous schedule, such"
                " as 1f1b"
            )
    if config.precision in ("fp16", "bf16"):
        yield (
            f"--precision {config.precision} scales losses step by step, which --schedule {config.schedule} does not"
            " have; take fp32"
        )
    if config.replicas is not None and config.model == "gpt":
        yield (
            "--replicas copies stages that share no parameter, and a GPT's embedding is on two of them; take --model"
            " llama or mlp"
        )


def _near(number: int, unit: int) -> str:
    below, above = number // unit * unit, (number // unit + 1) * unit
    return f"{below} or {above}" if below else f"{above}"


def _divisors(number: int) -> str:
    return ", ".join(str(n) for n in range(1, number + 1) if number % n == 0)
