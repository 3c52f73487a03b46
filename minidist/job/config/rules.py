"""Which settings do not combine: every rule in one list, with its condition, its sentence and its remedy.

To add a rule (`techniques/rule.py`), add it to the section that it belongs to, and a case to
tests/config/test_rules.py. The rules of a technique are in its folder. A job that breaks a rule is refused before any
rank starts, with one sentence: the message, a semicolon, the remedy.

The rules are checked in order and the first broken one is reported, so a rule may rely on all rules above it.
`python -m minidist.job.config.rules` writes them as docs/rules.md.

Proved by: tests/config/test_rules.py
"""

import string
from collections.abc import Callable, Collection, Sequence

from minidist.base.errors import UsageError, quoted
from minidist.job.config.pipeline_plan import check_stages
from minidist.job.config.resolved_job import ResolvedJob
from minidist.job.config.train_config import Batches, TrainConfig, flag
from minidist.optim.named import takes
from minidist.techniques import installed, of_job, of_users, touched, trains_alone
from minidist.techniques.rule import Rule, changed, multiples, setting, without_effect


def divisors(number: int) -> str:
    """Return the divisors of `number`, as text."""
    return ", ".join(str(n) for n in range(1, number + 1) if number % n == 0)


def neighbours(number: int, choices: list[int]) -> list[int]:
    """Return the nearest choice below `number` and the nearest one above."""
    return [*[n for n in choices if n < number][-1:], *[n for n in choices if n > number][:1]]


def heads_for_width(job: ResolvedJob) -> str:
    """Return the numbers of heads next to the job's that fit its width, or a width that fits its heads."""
    # A head takes width / heads columns, in Llama an even number of them.
    fitting = [h for h in range(1, job.width + 1) if job.width % (job.head_unit * h) == 0]
    near = neighbours(job.heads, fitting)
    return " or ".join(f"--heads {h}" for h in near) or f"--width {job.head_unit * job.heads}"


def heads_for_tp(job: ResolvedJob) -> str:
    """Return the numbers of heads next to the job's that divide among --tp and fit the width."""
    fitting = [n for n in range(job.tp, job.width + 1, job.tp) if job.width % (job.head_unit * n) == 0]
    if near := neighbours(job.heads, fitting):
        return f"--heads {' or '.join(map(str, near))}"

    # No number of heads divides this width: heads that fit --tp, and the widths next to the job's that fit the heads.
    heads = max(1, round(job.heads / job.tp)) * job.tp
    return f"--heads {heads} with --width {multiples(job.width, job.head_unit * heads)}"


def uneven_rows(job: ResolvedJob) -> str:
    """Return what gives ranks different numbers of rows, as text."""
    weights = "" if job.weights is None else f" with --weights {quoted(job.weights, marks=False)}"
    return f"{job.batches.global_batch} rows on {job.dp} data-parallel ranks{weights}"


def lacks(job: ResolvedJob, operation: str) -> bool:
    """Return whether the collective has no algorithm that is called as --reduction says."""
    from minidist.collectives.algorithms import ALGORITHMS

    return job.reduction != "auto" and job.reduction not in ALGORITHMS[operation]


# --- the rules --------------------------------------------------------------------------------------------------------

# Memory comes first: later rules load the data and make the pipeline's plan, and the last check makes the model.
MODEL_AND_DATA = (
    Rule(
        "vocabulary-of-the-data",
        lambda j: j.needed_bytes > j.machine_bytes and j.dataset.is_tokens and j.vocabulary_dominates,
        "--data {data} has tokens up to {largest:,}, and with a vector for each of them a model needs about"
        " {needed:,.0f} GB where this machine has {machine:,.0f} GB",
        "check the file and the dtype that its suffix says, or use a smaller --width",
        {
            "largest": lambda j: j.dataset.vocab_size - 1,
            "needed": lambda j: j.needed_bytes / 1e9,
            "machine": lambda j: j.machine_bytes / 1e9,
        },
    ),
    Rule(
        "memory-of-the-machine",
        lambda j: j.needed_bytes > j.machine_bytes,
        "{parameters:,} parameters on {processes_here:,} ranks in this process need about {needed:,.0f} GB and this"
        " machine has {machine:,.0f} GB",
        "use fewer --layers, a smaller --width or fewer ranks",
        {"needed": lambda j: j.needed_bytes / 1e9, "machine": lambda j: j.machine_bytes / 1e9},
    ),
    Rule(
        "tokens-for-language-models",
        lambda j: j.is_language_model and not j.dataset.is_tokens,
        "--data {data} holds labelled samples, not tokens",
        "use --model mlp or cnn",
    ),
    Rule(
        "samples-for-classifiers",
        lambda j: j.is_classifier and j.dataset.is_tokens,
        "--data {data} holds tokens, not labelled samples",
        "use --model gpt or llama",
    ),
    Rule(
        "images-for-cnn",
        lambda j: j.model == "cnn" and j.dataset.image is None,
        "--data {data} has samples of shape {shape}, and --model cnn needs images of at least 2 x 2 pixels, with or"
        " without a dim of channels",
        "use --model mlp",
        {"shape": lambda j: tuple(j.dataset.inputs.shape[1:])},
    ),
    Rule(
        "width-by-heads",
        lambda j: j.is_language_model and j.width % (j.heads * j.head_unit),
        "--width {width} is not a multiple of {pairs}--heads {heads}",
        "use {choices}",
        {"pairs": lambda j: "2 x " if j.head_unit == 2 else "", "choices": heads_for_width},
    ),
    *(
        Rule(
            f"own-model-with-{name}",
            changed(name, lambda j: j.is_own_model),
            f"not implemented: --{name} {{{name}}} {does}, and this command knows where only in the models that"
            " minidist has, not in --model {model}",
            f"use --dp, with or without --zero, --model gpt, or a program of your own with {instead}",
        )
        for name, does, instead in (
            ("pp", "cuts the model into stages", "minidist.split_model"),
            ("cp", "splits the sequences of its attention", "minidist.parallel.context"),
            ("tp", "splits its matrices", "minidist.parallelize_module"),
        )
    ),
    Rule(
        "weight-decay-by-optimizer",
        lambda j: j.weight_decay and not takes(j.optimizer, "weight_decay"),
        "--weight-decay {weight_decay} does not apply to --optimizer {optimizer}, whose __init__ has no such parameter",
        "add it there, or leave it out",
    ),
)

CHECKPOINTS = tuple(
    Rule(
        f"{name}-needs-save",
        changed(name, lambda j: j.save is None),
        f"--{name} needs --save DIR, the directory of the checkpoints",
        f"add it, or leave --{name} out",
    )
    for name in ("resume", "every")
)

# Which algorithm sums gradients follows from the operation that the layout does.
REDUCTIONS = (
    Rule(
        "reduction-is-no-all-reduce",
        changed("reduction", lambda j: j.zero == 0 and lacks(j, "all_reduce")),
        "--reduction {reduction} is an algorithm of reduce-scatter, and without --zero gradients are all-reduced",
        "add --zero 1, or use --reduction rabenseifner, which begins with it",
    ),
    Rule(
        "reduction-is-no-reduce-scatter",
        changed("reduction", lambda j: j.zero > 0 and lacks(j, "reduce_scatter")),
        "--reduction {reduction} is an algorithm of all-reduce, and --zero {zero} sends gradients by reduce-scatter",
        "use --reduction naive, ordered, recursive_halving, ring, two_level or auto",
    ),
    Rule(
        "reduction-of-shards-and-copies",
        changed("reduction", lambda j: j.dp_replicate > 1 and (lacks(j, "all_reduce") or lacks(j, "reduce_scatter"))),
        "--reduction {reduction} is no algorithm of both operations that --dp-replicate {dp_replicate} needs: a"
        " reduce-scatter of gradients, and an all-reduce over the copies of a shard",
        "use --reduction ring, ordered, naive, two_level or auto",
    ),
)

# Ranks with different numbers of rows do different things where they exchange parts of equal size.
UNEVEN_ROWS = (
    Rule(
        "uneven-rows-of-experts-in-a-pipeline",
        lambda j: j.pp > 1 and j.dims.ep > 1 and len({len(set(replica)) for replica in j.batches.shares.rows}) > 1,
        "--ep {ep} exchanges slots when a pipeline learns the shapes of its micro-batches, and with {rows} the replicas"
        " have different numbers of shapes",
        "use --global-batch {near}",
        {"rows": uneven_rows, "near": lambda j: multiples(j.batches.global_batch, j.dp * j.batches.accumulation)},
    ),
    Rule(
        "uneven-rows-in-a-sharded-pipeline",
        lambda j: j.pp > 1 and j.zero == 3 and len({len(set(replica)) for replica in j.batches.shares.rows}) > 1,
        "--zero 3 gathers units when a pipeline learns the shapes of its micro-batches, and with {rows} the replicas"
        " have different numbers of shapes",
        "use --zero 2",
        {"rows": uneven_rows},
    ),
)

# Settings that only one architecture has.
ARCHITECTURE = (
    Rule(
        "kv-heads-llama",
        lambda j: j.kv_heads is not None and j.model != "llama",
        "--kv-heads belongs to --model llama, not to {model}",
    ),
    Rule(
        "kv-heads-share-heads",
        lambda j: j.model == "llama" and j.heads % (j.kv_heads or j.heads),
        "--heads {heads} cannot be divided among --kv-heads {kv_heads}",
        "use one of {choices}",
        {"choices": lambda j: divisors(j.heads)},
    ),
    Rule(
        "ffn-llama",
        lambda j: j.ffn is not None and j.model != "llama",
        "--ffn belongs to --model llama, not to {model}",
    ),
)

# Tensor parallelism gives each rank whole heads and equal shares of every matrix.
TENSOR_PARALLEL = (
    Rule(
        "sequence-parallel-needs-tp",
        lambda j: j.tp == 1 and j.sequence_parallel,
        "--sequence-parallel splits the sequence over the tensor-parallel ranks",
        "add --tp 2 or more, or use --cp 2",
    ),
    Rule(
        "tensor-parallel-cnn",
        lambda j: j.tp > 1 and j.model == "cnn",
        "not implemented: --tp {tp} splits the matrices of linear layers and attention, and not the convolutions of a"
        " CNN",
        "use --dp {tp}",
    ),
    Rule(
        "width-by-tp",
        lambda j: j.tp > 1 and j.model == "mlp" and j.width % j.tp,
        "--width {width} cannot be divided among --tp {tp}",
        "use --width {near}, or --tp {choices}",
        {"near": lambda j: multiples(j.width, j.tp), "choices": lambda j: divisors(j.width)},
    ),
    Rule(
        "heads-by-tp",
        lambda j: j.tp > 1 and j.model != "mlp" and j.heads % j.tp,
        "--heads {heads} cannot be divided among --tp {tp}",
        "use {near}, or --tp {choices}",
        {"near": heads_for_tp, "choices": lambda j: divisors(j.heads)},
    ),
    Rule(
        "kv-heads-by-tp",
        # Either number may divide the other: ranks share a key-value head, or hold several of them.
        lambda j: j.tp > 1 and j.model != "mlp" and j.kv_heads and j.tp % j.kv_heads and j.kv_heads % j.tp,
        "--kv-heads {kv_heads} cannot be divided among --tp {tp}",
        "use --kv-heads {near}, or --tp {choices}",
        {"near": lambda j: multiples(j.kv_heads, j.tp), "choices": lambda j: divisors(j.kv_heads)},
    ),
    Rule(
        "ffn-by-tp",
        lambda j: j.tp > 1 and j.model == "llama" and j.ffn and j.ffn % j.tp,
        "--ffn {ffn} cannot be divided among --tp {tp}",
        "use --ffn {near}, or --tp {choices}",
        {"near": lambda j: multiples(j.ffn, j.tp), "choices": lambda j: divisors(j.ffn)},
    ),
    Rule(
        "sequence-parallel-mlp",
        lambda j: j.sequence_parallel and j.model == "mlp",
        "--sequence-parallel is for sequences, which an MLP does not have",
    ),
)

# Context parallelism gives each rank a part of every sequence; Ulysses exchanges it for some of the heads.
CONTEXT_PARALLEL = (
    Rule(
        "context-parallel-mlp",
        lambda j: j.cp > 1 and j.is_classifier,
        "--cp {cp} splits sequences, which --model {model} does not have",
        "use --dp {cp}",
    ),
    Rule(
        "context-parallel-tokens",
        lambda j: j.cp > j.context,
        "--cp {cp} leaves ranks without any of the --context {context} tokens",
        "use at most --cp {context}",
    ),
    Rule(
        "ulysses-heads",
        lambda j: j.cp > 1 and j.attention == "ulysses" and j.heads_of_rank % j.cp,
        "the {heads_of_rank} (key-value) heads of a rank cannot be divided among --cp {cp} for --attention ulysses",
        "use {choices}--attention ring",
        {"choices": lambda j: f"--cp {divisors(j.heads_of_rank)[3:]}, or " if j.heads_of_rank > 1 else ""},
    ),
    Rule(
        "ulysses-ring-ranks",
        lambda j: j.cp > 1 and j.attention == "ulysses-ring" and j.cp % j.ulysses,
        "--cp {cp} cannot be divided into groups of --ulysses {ulysses}",
        "use one of {choices}",
        {"choices": lambda j: divisors(j.cp)},
    ),
    Rule(
        "ulysses-ring-heads",
        lambda j: j.cp > 1 and j.attention == "ulysses-ring" and j.heads_of_rank % j.ulysses,
        "the {heads_of_rank} (key-value) heads of a rank cannot be divided among --ulysses {ulysses}",
        "use one of {choices}",
        {"choices": lambda j: divisors(j.heads_of_rank)},
    ),
    Rule(
        "sequence-parallel-tokens",
        lambda j: j.sequence_parallel and any(n % j.tp for n in j.sequence_parts),
        "--context {context} cannot be divided into {parts} parts for --sequence-parallel",
        "use --context {near}",
        {"parts": lambda j: j.cp * j.tp, "near": lambda j: multiples(j.context, 2 * j.cp * j.tp)},
    ),
)

# Experts are divided among ranks of the data axis, so their gradients have a smaller group than the others.
EXPERTS = (
    Rule(
        "experts-of-language-models",
        lambda j: j.experts and not j.is_language_model,
        "--experts {experts} belongs to --model gpt or llama, not to {model}",
    ),
    Rule(
        "experts-by-ep",
        lambda j: j.experts % j.ep or (j.ep > 1 and not j.experts),
        "--experts {experts} cannot be divided among --ep {ep}",
        "use --experts {near}",
        {"near": lambda j: multiples(j.experts, j.ep)},
    ),
)

# Copies of a sharded model.
MEMORY = (
    Rule(
        "dp-replicate-needs-zero-3",
        lambda j: j.dp_replicate > 1 and not (j.zero == 3 or (j.zero and trains_alone(j.config))),
        "--dp-replicate {dp_replicate} applies to sharded parameters",
        "add --zero 3, or leave it out",
    ),
    Rule(
        "copies-share-ranks",
        lambda j: j.data_ranks % j.dp_replicate,
        "{data_ranks} data-parallel ranks cannot be divided among --dp-replicate {dp_replicate}",
        "use one of {choices}",
        {"choices": lambda j: divisors(j.data_ranks)},
    ),
    Rule(
        "copies-share-ranks-of-experts",
        lambda j: j.ep > 1 and j.expert_ranks % j.dp_replicate,
        "the {expert_ranks} ranks that share an expert with --ep {ep} cannot be divided among --dp-replicate"
        " {dp_replicate}",
        "use one of {choices}",
        {"choices": lambda j: divisors(j.expert_ranks)},
    ),
)

PIPELINE = (
    # Settings of a pipeline that the job does not have.
    *(
        Rule(f"{name}-{need}-pp", changed(name, lambda j: j.pp == 1), f"--{name} {{{name}}} {does}", remedy)
        for name, need, does, remedy in (
            ("chunks", "need", "belongs to a pipeline", "add --pp 2 or more"),
            ("partition", "needs", "cuts a pipeline's stages", "add --pp 2 or more"),
            ("replicas", "need", "copies a pipeline's stages", "add --pp 2 or more and --schedule pipedream"),
        )
    ),
    Rule(
        "replicas-need-pipedream",
        lambda j: j.pp > 1 and j.replicas is not None and j.updates != "stash",
        "--replicas {replicas} copies stages of --schedule pipedream, not of {schedule}",
        "use --dp for copies of whole pipelines",
    ),
    # Plans that can be drawn and timed, but not trained with.
    Rule(
        "schedule-without-backward",
        lambda j: j.pp > 1 and j.loaded_plan.updates == "none",
        "--schedule {schedule} trains nothing",
        "train with a synchronous one, such as 1f1b or zb-h1",
    ),
    Rule(
        "file-that-updates-on-the-way",
        lambda j: j.pp > 1 and j.loaded_plan.updates != "flush" and not j.asynchronous,
        "--schedule {schedule} updates its weights on the way, which training does only for schedules by name",
        "train with a synchronous one, such as 1f1b or zb-h1",
    ),
    Rule(
        "rank-without-a-stage",
        lambda j: j.pp > 1 and not all(j.plan.orders),
        "--schedule {schedule} leaves rank {idle} without a stage",
        "give it one, or leave its line out and use --pp {used}",
        {
            "idle": lambda j: list(map(bool, j.plan.orders)).index(False),
            "used": lambda j: sum(map(bool, j.plan.orders)),
        },
    ),
)

# A setting that would be ignored is a mistake.
WITHOUT_EFFECT = (
    without_effect("heads", lambda j: not j.is_classifier, "--model gpt or llama"),
    without_effect("context", lambda j: not j.is_classifier, "--model gpt or llama"),
    without_effect("attention", lambda j: j.cp > 1, "--cp 2 or more"),
    without_effect("ulysses", lambda j: j.attention == "ulysses-ring", "--attention ulysses-ring"),
    without_effect("schedule", lambda j: j.pp > 1, "--pp 2 or more"),
)

# --- settings without effect in a smaller job -------------------------------------------------------------------------

# These are not refused, because the same command with more ranks or more steps is compared with this one. Those that
# need ranks to share the work, and find one: the field, and when it has an effect all the same.
ONE_RANK: tuple[tuple[str, Callable[[ResolvedJob], bool]], ...] = (
    ("zero", lambda j: False),
    # The replicas of an asynchronous pipeline's stage are ranks of the pipeline.
    ("reduction", lambda j: j.replicas is not None),
    ("weights", lambda j: False),
    *(pair for kind in installed() for pair in kind.alone),
)
# Those that happen every N steps, in a job that has fewer.
PERIODS = {"every": 0, "evaluate_every": 0}  # and how many steps must follow
PERIODS |= {name: after for kind in installed() for name, after in kind.periods.items()}


def notices(config: TrainConfig, batches: Batches, without: Collection[str] = ()) -> list[str]:
    """Return the lines that name the settings without effect on one rank, or in a short job. without: not these."""
    job, lines = ResolvedJob(config, batches), []

    # One line for all settings that have nothing to share.
    words = [_flag_and_value(job, name) for name in _unshared(job) if name not in without]
    if words:
        listed = " and ".join(filter(None, [", ".join(words[:-1]), words[-1]]))
        ranks = "on one rank" if batches.dims.ranks == 1 else "with one data-parallel rank"
        lines.append(f"{listed} {'has' if len(words) == 1 else 'have'} no effect {ranks}")
    for extension in of_job(config):
        lines += extension.notices(job)

    return lines + [
        f"{_flag_and_value(job, name)} has no effect, because the job ends after --steps {job.steps}"
        for name, after in PERIODS.items()
        if (getattr(job, name) or -after) + after > job.steps
    ]


def _unshared(job: ResolvedJob) -> list[str]:
    """Return the settings that need data-parallel ranks to share the work, in a job that has one such rank."""
    if job.data_ranks > 1:
        return []
    # A technique may give one of them an effect that needs no other rank; all but the weights a server refuses.
    kept = [name for kind in touched(job.config) for name, matters in kind.matters_alone if matters(job)]
    names = [name for name, effective in ONE_RANK if job.is_changed(name) and not effective(job)]
    return [name for name in names if name not in kept and (name == "weights" or not job.server)]


def _flag_and_value(job: ResolvedJob, name: str) -> str:
    """Return a setting as it is typed."""
    value = setting(job, name)
    return flag(name) if value is True else f"{flag(name)} {value}"


FIRST = tuple(rule for kind in installed() if kind.rules_first for rule in kind.rules)
LATER = tuple(rule for kind in installed() if not kind.rules_first for rule in kind.rules)
# The order in which rules are checked, and the headings of docs/rules.md.
SECTIONS: dict[str, tuple[Rule, ...]] = {
    "Model and data": MODEL_AND_DATA,
    "Checkpoints": CHECKPOINTS,
    "Reductions of gradients": REDUCTIONS,
    "Training without common steps": FIRST,
    "Uneven rows": UNEVEN_ROWS,
    "Models": ARCHITECTURE,
    "Tensor parallelism": TENSOR_PARALLEL,
    "Context parallelism": CONTEXT_PARALLEL,
    "Experts": EXPERTS,
    "Memory": MEMORY,
    "Pipelines": PIPELINE,
    "Techniques": tuple(rule for rule in LATER if not rule.name.endswith("-without-effect")),
    "Settings without effect": (*WITHOUT_EFFECT, *(rule for rule in LATER if rule.name.endswith("-without-effect"))),
}
RULES = tuple(rule for rules in SECTIONS.values() for rule in rules)
# A program that calls `train` may give several jobs the same settings: those without effect are not refused.
MEANING = tuple(rule for rule in RULES if not rule.name.endswith("-without-effect"))


# By the name of a rule, its technique. A job that neither uses it nor has a flag of it does not break the rule.
TECHNIQUES = {rule.name: kind for kind in installed() for rule in kind.rules}


def check_rules(config: TrainConfig, batches: Batches, processes_here: int = 1, rules: Sequence[Rule] = RULES) -> None:
    """Raise UsageError with the sentence of the first rule that the job breaks.

    processes_here: ranks that share this process's memory; 0 in a dry run, whose arrays have none.
    """
    job = ResolvedJob(config, batches, processes_here)
    asked = {None, *(kind for kind in touched(config) if kind.given(config) or kind.used_by(config))}
    of_extensions = [rule for extension in of_users(config) for rule in extension.rules] if config.extension else []
    for rule in (*rules, *of_extensions):
        if TECHNIQUES.get(rule.name) in asked and rule.broken(job):
            raise UsageError(rule.sentence(job))

    # What the parts refuse themselves: data shorter than one sample, a warm-up longer than the job, a stage too many.
    job.dataset.samples(config.context)
    if config.is_own_model:
        job.small_model()
    for extension in of_job(config):
        extension.check(job)
    if config.pp > 1:
        check_stages(config, job.dataset, job.plan.stages)


# --- docs/rules.md ----------------------------------------------------------------------------------------------------


def as_markdown() -> str:
    """Return the rules as docs/rules.md: {field} becomes FIELD, as a reader of `--help` knows it."""

    def shown(template: str) -> str:
        words = []
        # A bar would end the cell of the table.
        for text, name, _, _ in string.Formatter().parse(template):
            words += [text.replace("|", "\\|"), f"*{name.upper()}*" if name else ""]
        return "".join(words)

    lines = [
        "# Settings that do not combine",
        "",
        "A job that breaks one of these rules is refused with one sentence before any rank starts. The first broken",
        "rule is reported, without its name: search this page for a part of the sentence that has no value in it. The",
        "code is under the name in `minidist/job/config/rules.py` or `minidist/techniques`; names in `-without-effect`",
        "come from `without_effect` of `minidist/techniques/rule.py`: search for the flag.",
    ]
    for title, rules in SECTIONS.items():
        lines += ["", f"## {title}", "", "| rule | what is refused | what to do |", "|---|---|---|"]
        lines += [f"| `{rule.name}` | {shown(rule.message)} | {shown(rule.remedy)} |" for rule in rules]
    listed, periods = (", ".join(f"`{flag(name)}`" for name in names) for names in (dict(ONE_RANK), PERIODS))
    lines += [
        "",
        "## What has no effect in a smaller job",
        "",
        "These settings are not refused, because the same command may be compared with more ranks or more steps. One",
        "line says that they have no effect.",
        "",
        f"- On one data-parallel rank: {listed}.",
        f"- Periods that are too long for the job: {periods}.",
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(as_markdown(), end="")
