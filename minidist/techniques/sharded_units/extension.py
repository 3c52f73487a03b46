"""`--prefetch`, `--reshard-after-forward`, `--persistence-threshold`: when ZeRO 3 gathers and releases parameters.

    forward    | gather h.0 | gather h.1 | ...      --prefetch N: N units are gathered before they are needed
                 release h.0                        --reshard-after-forward false: a unit stays whole until backward
    backward     ... | gather h.1 | gather h.0                              G:     each group of G ranks keeps it
    all the time   biases and norms                 --persistence-threshold: small parameters stay whole

A unit is the parameters that are gathered together. Each flag is an argument of `fully_shard`; the closed forms of what
they send are in `planning/volumes.py`.

A rank sends per step: ZeRO 3's 3 k (n-1)/n Ψ; with `--reshard-after-forward false` k (n-1)/n Ψ less, and with
groups of G ranks k (G-1)/G Ψ in place of these; parameters below the threshold are gathered once per step.
Equal to: one device, bit for bit.
Lesson: 12_zero_3_fsdp.

Proved by: tests/planning/test_volumes.py, tests/train/test_sharded.py, tests/config/test_rules.py
"""

from collections.abc import Mapping
from typing import Any

from minidist.base.errors import UsageError, quoted
from minidist.base.limits import MAX_COUNT, whole_number
from minidist.techniques import Extension, Field, Record, Rule, without_effect


def reshard(settings: Any) -> bool | int:
    """Return what `fully_shard` takes as `reshard_after_forward`; UsageError for another word."""
    text = settings.reshard_after_forward.lower()
    if text not in ("true", "false") and whole_number(text) is None:
        raise UsageError(
            f"--reshard-after-forward {quoted(settings.reshard_after_forward)}; it must be true, false or a number of"
            " ranks"
        )
    return text == "true" if text in ("true", "false") else int(text)


def _fits(job: Any, shards: int) -> bool:
    """Return whether a unit may stay split among groups of `reshard(job)` of its `shards` ranks."""
    part = reshard(job)
    return isinstance(part, bool) or (1 < part < shards and shards % part == 0)


def _of_shards(name: str) -> Rule:
    """Return the rule that refuses a setting that only ZeRO 3 reads."""
    flag = name.replace("_", "-")
    return Rule(
        f"{flag}-needs-zero-3",
        lambda j: j.is_changed(name) and j.zero != 3,
        f"--{flag} {{{name}}} applies to sharded parameters",
        "add --zero 3, or leave it out",
    )


class ShardedUnits(Extension):
    """Tells `fully_shard` when units are whole."""

    class Settings(Record):
        """The flags; --zero is a setting of every job."""

        prefetch: int = Field(1, ge=0, le=MAX_COUNT, description="ZeRO 3: units gathered ahead")
        reshard_after_forward: str = Field(
            "true",
            description=(
                "ZeRO 3: true, false (units stay gathered until backward), or a number of neighbours that keep them"
                " sharded"
            ),
        )
        persistence_threshold: int = Field(
            0, ge=0, le=MAX_COUNT, description="ZeRO 3: parameters with fewer elements stay gathered"
        )

    panel = "Data parallelism"
    rules = (
        _of_shards("reshard_after_forward"),
        _of_shards("persistence_threshold"),
        Rule(
            "reshard-divides-shards",
            lambda j: not _fits(j, j.shards),
            "--reshard-after-forward {reshard} with {shards} shards: a number must divide them and lie between 1 and"
            " {shards}",
            "use such a number, true or false",
            {"reshard": reshard},
        ),
        Rule(
            "reshard-divides-shards-of-experts",
            lambda j: j.ep > 1 and not _fits(j, j.expert_shards),
            "--reshard-after-forward {reshard} with {expert_shards} shards of an expert: a number must divide them and"
            " lie between 1 and {expert_shards}",
            "use such a number, true or false",
            {"reshard": reshard},
        ),
        Rule(
            "reshard-with-recomputation",
            # Of blocks that run again by themselves the outermost module's forward is recorded; a segment's is not.
            lambda j: reshard(j) is not True and j.optional("recompute") == "sqrt",
            "--reshard-after-forward {reshard_after_forward} keeps what a recorded forward gathered, and with"
            " --recompute {recompute} the forward of a segment is not recorded",
            "use --recompute full, or leave out one of the two",
        ),
        without_effect("prefetch", lambda j: j.zero == 3, "--zero 3"),
    )
    alone = tuple((name, lambda j: False) for name in Settings.model_fields)

    def wrapper_options(self, config: Any) -> Mapping[str, Any]:
        settings = self.settings
        if config.zero != 3:
            return {}
        options = {"prefetch": settings.prefetch, "reshard_after_forward": reshard(settings)}
        small = settings.persistence_threshold
        return {**options, "persistence_threshold": small} if small else options
