"""`--synchronize-each`: gradients are reduced after every micro-batch instead of once per step.

    once per step    B0  B1  B2  reduce              a rank sends 2 (n-1)/n Psi
    after each       B0 reduce  B1 reduce  B2 reduce     three times as much, which `no_sync` avoids

ZeRO 2 and 3 reduce after every micro-batch in any case, because a rank keeps only its shard of the gradients.

A rank sends per step: 2 k (n-1)/n Ψ, and with ZeRO 1 (k+1) (n-1)/n Ψ, instead of 2 (n-1)/n Ψ.
Equal to: one device, bit for bit.
Lesson: 10_accumulate_and_recompute.

Proved by: tests/config/test_rules.py, tests/train/test_sharded.py, tests/equality/test_equality.py
"""

from minidist.techniques import Extension, Field, Record, Rule


class SynchronizeEach(Extension):
    """Says that every micro-batch is reduced."""

    class Settings(Record):
        synchronize_each: bool = Field(
            False, description="reduce after every micro-batch instead of once per step (without no_sync)"
        )

    panel = "Data parallelism"
    rules = (
        Rule(
            "synchronize-each-in-a-pipeline",
            lambda j: j.pp > 1 and j.synchronize_each,
            "--synchronize-each does not apply to a pipeline, which reduces a stage's gradients once",
        ),
        Rule(
            "synchronize-each-with-zero",
            lambda j: j.synchronize_each and j.zero >= 2,
            "--synchronize-each has no effect here, because --zero {zero} reduces after every micro-batch in any case",
            "leave it out, or use --zero 1",
        ),
        Rule(
            "synchronize-each-of-one-micro-batch",
            lambda j: j.synchronize_each and j.microbatches == 1,
            "--synchronize-each has no effect here, because a rank has one micro-batch per step",
            "add --accumulation 2 or more, or leave it out",
        ),
    )
    alone = (("synchronize_each", lambda j: False),)
    reduces_each = True
