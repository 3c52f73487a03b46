"""`--memory-budget BYTES`, `--recompute-budget FILE`: chosen so that a job fits into its memory.

    --micro-batch auto --memory-budget N    the largest micro-batch with which no rank holds more than N bytes
    --recompute-budget FILE                 what runs again in backward, so that no rank holds more than its own budget

The file is a JSON list: the bytes of each rank, or of each rank of the pipeline and all ranks that have its stages:

    pipeline rank   0        1        2                  [180000, 120000, 120000]
    in flight       3 2 1    2 1      1   micro-batches  the first rank keeps the most: its stage runs again

Both are chosen before the job begins, by trials of two steps (`trials.py`), and the job is the one that
the chosen --micro-batch or --recompute gives.

A rank sends per step: nothing.
Equal to: the job that is given the chosen flags, bit for bit.
Lesson: 10b_batch_size_and_noise.

Proved by: tests/commands/test_memory_budget.py
"""

from typing import Any

from minidist.techniques import Extension, Field, Record, Rule, without_effect


class MemoryTrials(Extension):
    """Chooses by trials; the job that is chosen has no budget."""

    class Settings(Record):
        """The flags; --micro-batch is a setting of every job."""

        memory_budget: float | None = Field(
            None, gt=0, description="--micro-batch auto: bytes that a rank may hold at a time"
        )
        recompute_budget: str | None = Field(
            None,
            description="a JSON list of the bytes that each rank, or each rank of a pipeline, may hold at a time;"
            " chooses --recompute",
        )

    switches = (("micro_batch", None),)
    panel = "Precision and memory"
    rules = (
        without_effect("memory_budget", lambda j: j.config.micro_batch == "auto", "--micro-batch auto"),
        Rule(
            "recompute-budget-chooses",
            lambda j: j.recompute_budget is not None,
            "--recompute-budget {recompute_budget} is read by minidist train and minidist compare, which choose"
            " --recompute",
            "give --recompute here",
        ),
    )

    @classmethod
    def used_by(cls, config: Any) -> bool:
        return cls.given(config) or config.micro_batch == "auto"

    def before_ranks(self, config: Any, ranks: int | None, has_values: bool) -> tuple[Any, list[str]]:
        # Imported when a job is tried: it trains.
        from minidist.techniques.memory_trials.trials import fit_micro_batch, fit_recompute

        lines = []
        if config.micro_batch == "auto":
            config, line = fit_micro_batch(config, ranks, has_values)
            lines.append(line)
        if config.recompute_budget is not None:
            config, line = fit_recompute(config, ranks, has_values)
            lines.append(line)
        return config, lines
