"""The settings of sparse training, and with what they do not combine.

Masks are found on whole matrices, or on ZeRO's shards of them, at the end of a step.

Proved by: tests/config/test_rules.py, tests/config/test_no_setting_is_ignored.py
"""

from typing import Any, Literal

from minidist.base.records import Field
from minidist.core.base.errors import quoted
from minidist.techniques import Rule, Settings, without_effect
from minidist.techniques.pruning.schedule import SparsitySchedule, parse_pattern, parse_schedule, pattern_sparsity


class PruningSettings(Settings):
    """The flags."""

    sparsity: float = Field(
        0.0, ge=0, lt=1, description="share of the weights of linear layers that become zero, by magnitude; 0: none"
    )
    sparsity_schedule: str | None = Field(
        None,
        description="BEGIN,END or BEGIN,END,EVERY: after which steps weights are pruned (Zhu and Gupta's cubic curve)",
    )
    sparsity_scope: Literal["layer", "global"] = Field(
        "layer", description="what is pruned to --sparsity: each layer, or all together"
    )
    sparsity_pattern: str | None = Field(
        None, description="N:M, in place of --sparsity: N of every M weights of a sum stay, such as 2:4"
    )


def prunes(job: Any) -> bool:
    """Return whether weights become zero while a job with these settings trains."""
    return job.sparsity > 0 or job.sparsity_pattern is not None


def pruning_of(job: Any) -> tuple[SparsitySchedule, tuple[int, int] | None]:
    """Return the schedule and the pattern of a job that prunes; UsageError for texts that are none."""
    pattern = None if job.sparsity_pattern is None else parse_pattern(job.sparsity_pattern)
    final = job.sparsity if pattern is None else pattern_sparsity(*pattern)
    return parse_schedule(job.sparsity_schedule or "", final), pattern


def pruning_flag(job: Any) -> str:
    """Return the setting that says what is pruned, as it is typed."""
    pattern = job.sparsity_pattern
    return f"--sparsity {job.sparsity:g}" if pattern is None else f"--sparsity-pattern {quoted(pattern, marks=False)}"


FLAG = {"pruning_flag": pruning_flag}  # what the sentences name
RULES = (
    Rule(
        "reduction-with-sparsity",
        lambda j: prunes(j) and j.reduction not in ("ring", "ordered"),
        "--reduction {reduction} of the entries that --sparsity keeps sends bytes that no closed form gives, because"
        " the masks decide how many each rank's chunk has",
        "use --reduction ring or ordered",
    ),
    Rule(
        "sparsity-needs-schedule",
        lambda j: prunes(j) and j.sparsity_schedule is None,
        "{pruning_flag} needs --sparsity-schedule BEGIN,END, the steps after which weights are pruned",
        "add it, such as --sparsity-schedule {between}",
        {**FLAG, "between": lambda j: f"{-(-j.steps // 4)},{-(-3 * j.steps // 4)}"},
    ),
    Rule(
        "sparsity-or-pattern",
        lambda j: j.sparsity and j.sparsity_pattern is not None,
        "--sparsity-pattern {sparsity_pattern} says itself how much is pruned, and so does --sparsity {sparsity:g}",
        "leave one of them out",
    ),
    Rule(
        "sparsity-pattern-at-once",
        lambda j: j.sparsity_pattern is not None and pruning_of(j)[0].begin != pruning_of(j)[0].end,
        "--sparsity-pattern {sparsity_pattern} is set once, and --sparsity-schedule {sparsity_schedule} has two ends",
        "use --sparsity-schedule {begin}",
        {"begin": lambda j: pruning_of(j)[0].begin},
    ),
    Rule(
        "sparsity-scope-of-a-pattern",
        lambda j: j.sparsity_pattern is not None and j.sparsity_scope != "layer",
        "--sparsity-pattern {sparsity_pattern} compares neighbours, and --sparsity-scope {sparsity_scope} compares all"
        " weights",
        "leave one of them out",
    ),
    Rule(
        "sparsity-pattern-with-zero-3",
        lambda j: j.sparsity_pattern is not None and j.zero == 3,
        "--sparsity-pattern {sparsity_pattern} compares neighbours, which with --zero 3 may lie on two ranks",
        "use --zero 2, or --sparsity",
    ),
    Rule(
        "sparsity-with-tp",
        lambda j: prunes(j) and j.tp > 1,
        "not implemented: --tp {tp} cuts matrices by rows and columns, and {pruning_flag} compares the weights of whole"
        " matrices or of ZeRO's shards",
        "use --dp, with or without --zero",
        FLAG,
    ),
    Rule(
        "sparsity-scope-in-a-pipeline",
        lambda j: prunes(j) and j.pp > 1 and j.sparsity_scope == "global",
        "not implemented: --sparsity-scope global compares the weights of all layers, and with --pp {pp} stages do not"
        " tell each other about theirs",
        "use --sparsity-scope layer",
    ),
    Rule(
        "sparsity-in-an-asynchronous-pipeline",
        lambda j: prunes(j) and j.asynchronous,
        "{pruning_flag} finds masks at the end of a step, and --schedule {schedule} updates its weights on the way",
        "use a synchronous one, such as 1f1b",
        FLAG,
    ),
    Rule(
        "sparsity-with-experts",
        lambda j: prunes(j) and j.experts,
        "--experts {experts} has its weights in matrices of all experts, and {pruning_flag} prunes linear layers",
        "leave one of them out",
        FLAG,
    ),
    Rule(
        "sparsity-with-compression",
        lambda j: prunes(j) and j.optional("compression") not in (None, "none"),
        "--compression {compression} takes the place of an all-reduce of gradients, and so does {pruning_flag}, which"
        " sends those of the kept weights",
        "leave one of them out",
        FLAG,
    ),
    Rule(
        "sparsity-with-offload",
        lambda j: prunes(j) and j.optional("offload") == "optimizer",
        "--offload {offload} steps copies of the weights on the host, which {pruning_flag} does not set to zero",
        "use --offload activations, --zero 3 with --offload parameters, or leave it out",
        FLAG,
    ),
    Rule(
        "sparsity-with-local-steps",
        lambda j: prunes(j) and j.optional("local_steps"),
        "--local-steps {local_steps} gives replicas different weights, and with them {pruning_flag} different masks",
        "leave one of them out",
        FLAG,
    ),
    Rule(
        "sparsity-with-server",
        lambda j: prunes(j) and j.server,
        "not implemented: {pruning_flag} finds masks where weights are stepped, which with --strategy ps is on the"
        " servers",
        "use --strategy auto",
        FLAG,
    ),
    without_effect(PruningSettings, "sparsity_schedule", prunes, "--sparsity or --sparsity-pattern"),
    without_effect(PruningSettings, "sparsity_scope", prunes, "--sparsity"),
)
