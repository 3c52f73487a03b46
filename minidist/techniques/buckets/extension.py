"""`--bucket-cap-mb`, `--reduce-bucket-size`: the size of a bucket, the gradients that are reduced together.

    parameters   | wte | wpe | h.0 | h.1 | ln_f |     backward fills the buckets from the last parameter to the first,
    buckets      |  2        |  1        |  0   |     and a full bucket is reduced while backward goes on

The bytes of all buckets together do not depend on the size of one. The number of messages depends on it, and so does
the share of their time that overlaps with backward.

A rank sends per step: what data parallelism or ZeRO 1 or 2 sends; only the number of messages changes.
Equal to: one device, bit for bit, with `--reduction ordered`.
Lesson: 06b_buckets_and_overlap.

Proved by: tests/config/test_no_setting_is_ignored.py, tests/config/test_rules.py
"""

from collections.abc import Mapping
from typing import Any

from minidist.base.limits import MAX_COUNT
from minidist.core.parallel.data_parallel import BUCKET_MEGABYTES
from minidist.core.parallel.zero import REDUCE_BUCKET_SIZE
from minidist.techniques import Extension, Field, Record, Rule, without_effect


class Buckets(Extension):
    """Gives the wrapper of the model the size of its buckets."""

    class Settings(Record):
        bucket_cap_mb: float = Field(
            BUCKET_MEGABYTES, gt=0, le=1e9, description="largest gradient bucket, in 1e6 bytes"
        )
        reduce_bucket_size: int = Field(
            REDUCE_BUCKET_SIZE, ge=1, le=MAX_COUNT, description="ZeRO 1, 2: maximum elements of a gradient bucket"
        )

    panel = "Data parallelism"
    rules = (
        Rule(
            "asynchronous-with-bucket-cap-mb",
            lambda j: j.asynchronous and j.is_changed("bucket_cap_mb"),
            "--bucket-cap-mb {bucket_cap_mb} does not apply to --schedule {schedule}, which has no reduction while"
            " backward runs",
        ),
        without_effect("reduce_bucket_size", lambda j: j.zero in (1, 2), "--zero 1 or 2"),
        without_effect("bucket_cap_mb", lambda j: j.zero == 0, "--zero 0"),
    )
    alone = tuple((name, lambda j: False) for name in Settings.model_fields)
    unplanned = ("bucket_cap_mb",)

    def wrapper_options(self, config: Any) -> Mapping[str, Any]:
        if config.zero == 0:
            return {"bucket_cap_mb": self.settings.bucket_cap_mb}
        return {"reduce_bucket_size": self.settings.reduce_bucket_size} if config.zero < 3 else {}
