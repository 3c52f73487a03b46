"""Writes docs/deepspeed.md from the tables of minidist/job/config/deepspeed_keys.py.

    python docs/deepspeed_keys.py

Proved by: tests/config/test_deepspeed.py
"""

import json
from pathlib import Path
from typing import Any

from minidist.job.config.deepspeed_keys import APPLIED, NOTED

# What is an error in DeepSpeed, or means nothing, is one here: (key, an example of the file, why).
REFUSED: tuple[tuple[str, dict[str, Any], str], ...] = (
    ("train_batch_size", {}, "no number of the batch is given, or the accumulation alone"),
    ("train_batch_size", {"train_batch_size": 0}, "a number of the batch is not a whole number of at least 1"),
    ("zero_optimization.stage", {"zero_optimization": {"stage": 4}}, "there are stages 0 to 3"),
    ("fp16 and bf16", {"fp16": {"enabled": True}, "bf16": {"enabled": True}}, "both are enabled"),
    (
        "optimizer.params.max_grad_norm",
        {"optimizer": {"type": "Adam", "params": {"max_grad_norm": 1.0}}},
        "DeepSpeed refuses it too, in favour of gradient_clipping",
    ),
    ("any number", {"gradient_clipping": "much"}, "a text stands where a number must"),
    ("any section", {"optimizer": 3}, "a number stands where a section must"),
)


def as_markdown() -> str:
    """Return the tables as docs/deepspeed.md."""
    lines = [
        "# Keys of a DeepSpeed configuration file",
        "",
        "`minidist train --deepspeed FILE` and `minidist explain FILE` read a file that was written for DeepSpeed.",
        "Each key becomes a flag, or is named with the reason why it does not apply. No key is silently ignored. For",
        "a key with the value `auto` the flag is used. A key that is absent has DeepSpeed's default. A key that begins",
        "with `_` or `//` is a comment. An optimizer or a schedule that minidist does not have is replaced by that of",
        "the flags, and a sentence names both. `explain` computes the bytes of a step by formula; with `--run` it runs",
        "the step on simulated ranks, and counts messages and memory, too.",
        "`python docs/deepspeed_keys.py` writes this page.",
        "",
        "## Read a file line by line",
        "",
        "`minidist explain mpi_examples/ds_config.json --dp 4` says what each line of a small file becomes:",
        "",
        "- Rows per step = micro-batch x accumulation x data-parallel ranks. Two of the three batch sizes and the",
        "  number of ranks determine the third; three that do not fit are an error.",
        "- Stage 2 keeps no whole gradient, so it sends the gradient of each of k micro-batches: (k + 1) (n-1)/n Ψ",
        "  per step, where stage 1 sends 2 (n-1)/n Ψ. `reduce_bucket_size` counts elements, not bytes.",
        "- A scheduler overrules the optimizer's `lr`. DeepSpeed computes the rate when a step has ended, so the first",
        "  two steps of that file's warm-up have the rate 0 and change no weight.",
        "- A default is a setting that the file does not show. Without `warmup_type` and `warmup_num_steps` the",
        "  warm-up is logarithmic and takes 1,000 steps; `explain` prints the defaults that it uses.",
        "",
        "## Honoured",
        "",
        "| key | what it becomes |",
        "|---|---|",
        *(f"| `{key}` | {row.becomes} |" for key, row in APPLIED.items()),
        "",
        "## Noted",
        "",
        "These keys have no flag. The second column has the values with which a key describes what minidist does",
        "without a flag. A row also covers the keys below its key.",
        "",
        "| key | as minidist does | why another value does not apply |",
        "|---|---|---|",
        *(f"| `{key}` | {_values(row.values)} | {row.why} |" for key, row in NOTED.items()),
        "",
        "## Refused",
        "",
        "| key | when |",
        "|---|---|",
        *(f"| {f'`{key}`' if ' ' not in key else key} | {why} |" for key, _, why in REFUSED),
    ]
    return "\n".join(lines) + "\n"


def _values(values: tuple[Any, ...]) -> str:
    return ", ".join(f"`{json.dumps(value)}`" for value in values)


if __name__ == "__main__":
    Path(__file__).with_name("deepspeed.md").write_text(as_markdown(), encoding="utf-8")
