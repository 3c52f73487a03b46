"""What a configuration file asks for, in bytes, messages and memory, counted in one step of the simulated world.

The messages are those of a real run, so the counts are what a rank will send; beside them is the closed form. Memory is
that of a second step, when the optimizer has its state. For models that do not fit on a laptop, the ZeRO paper's bytes
of the model states are given for any number of parameters.

Proved by: tests/config/test_deepspeed.py
"""

from collections import Counter
from typing import Any

from minidist.base.memory import MEMORY_PURPOSES
from minidist.comm import SimWorld
from minidist.commands.runner import number_of_ranks
from minidist.config.deepspeed import Translation
from minidist.config.train_config import TrainConfig, resolve_batches
from minidist.planning.memory_estimator import model_states, whole_number
from minidist.planning.volumes import closed_form_bytes
from minidist.train.state import TrainResult
from minidist.train.trainer import train


def explain_job(
    config: TrainConfig, translation: Translation, ranks: int | None, parameters: str | None = None
) -> dict[str, Any]:
    """Return figures of one step of the job that `config` (with the file's settings in it) describes.

    {honoured, not_honoured, batch, ranks, purposes: {name: {bytes, closed_form, messages}} of all ranks, peak_bytes of
    each rank, peak_by_purpose of rank 0, model_states: bytes of a rank for `parameters` parameters at the file's ZeRO
    stage}.
    """
    # Every step sends the same bytes, so one step without checkpoints is enough.
    once = trial(config, 1)
    size = number_of_ranks(once, ranks)

    # The first step is recorded, for the messages; the closed form is computed from the sizes that ranks report.
    world = SimWorld(size)
    results: list[TrainResult] = world.run(train, once)
    measured: Counter[str] = Counter()
    messages: Counter[str] = Counter()
    for trace in world.traces:
        for message in trace.sent():
            measured[message.purpose] += message.nbytes
            messages[message.purpose] += 1
    batches = resolve_batches(once, size)
    closed = closed_form_bytes(once, batches, [result.sizes for result in results])

    # Two steps without a record, for the memory.
    warm: list[TrainResult] = SimWorld(size, record=False).run(train, once.model_copy(update={"steps": 2}))
    replaced = translation.in_place(config)
    figures: dict[str, Any] = {
        "honoured": [{"key": key, "value": value, "becomes": becomes} for key, value, becomes in translation.applied],
        "not_honoured": [
            {"key": key, "why": f"{why}; {replaced[key]}" if key in replaced else why}
            for key, why in translation.ignored
        ],
        "batch": {
            "global_batch": batches.global_batch,
            "micro_batch": batches.micro_batch,
            "accumulation": batches.accumulation,
            "dp": batches.dp,
        },
        "ranks": size,
        "purposes": {
            name: {"bytes": measured[name], "closed_form": closed.get(name, 0), "messages": messages[name]}
            for name in sorted({*closed, *measured})
        },
        "peak_bytes": [result.peak_bytes for result in warm],
        "peak_by_purpose": {name: n for name in MEMORY_PURPOSES if (n := warm[0].peak_by_purpose.get(name, 0))},
    }

    # A model of any size: the file's ZeRO stage, by the formula of the ZeRO paper.
    if parameters is not None:
        figures["model_states"] = model_states(whole_number(parameters), batches.dp)[f"stage{config.zero}"]
    return figures


def trial(config: TrainConfig, steps: int) -> TrainConfig:
    """Return the job with so few steps: its learning rate is constant, and nothing is saved."""
    fields = ("warmup", "warmup_curve", "warmup_start", "decay", "decay_steps", "final_lr")
    constant = {name: TrainConfig.model_fields[name].default for name in fields}
    unsaved = {"save": None, "every": None, "keep": None, "resume": False, "from_step": None, "overwrite": False}
    return config.model_copy(update={"steps": steps, **unsaved, **constant})


def table(figures: dict[str, Any]) -> str:
    """Format the figures for people."""
    width = max((len(item["key"]) for item in [*figures["honoured"], *figures["not_honoured"]]), default=0)
    lines = ["honoured"]
    lines += [f"  {item['key']:{width}} {item['value']!s:>12}   {item['becomes']}" for item in figures["honoured"]]
    lines.append("not honoured" if figures["not_honoured"] else "not honoured: nothing")
    lines += [f"  {item['key']:{width}} {item['why']}" for item in figures["not_honoured"]]

    # DeepSpeed's equation of the batch, as it was resolved.
    batch = figures["batch"]
    even = batch["global_batch"] == batch["micro_batch"] * batch["accumulation"] * batch["dp"]
    lines.append(
        "global batch {global_batch} {relation} micro batch {micro_batch} x accumulation {accumulation} x data-parallel"
        " ranks {dp}".format(relation="=" if even else "in uneven shares: at most", **batch)
    )
    lines.append(f"{'one step, all ranks':24}{'bytes':>14}{'closed form':>14}{'messages':>10}")
    for name, row in figures["purposes"].items():
        # What was counted must equal the closed form, here as in every run.
        mark = "" if row["bytes"] == row["closed_form"] else "   DIFFERENT"
        lines.append(f"  {name:22}{row['bytes']:14,}{row['closed_form']:14,}{row['messages']:10,}{mark}")
    lines.append(
        f"startup is sent once, the rest in every step; peak of a rank: {max(figures['peak_bytes']):,} B, of rank 0:"
    )
    lines += [f"  {name:22}{nbytes:14,}" for name, nbytes in figures["peak_by_purpose"].items()]
    if "model_states" in figures:
        states = figures["model_states"]
        lines.append(
            "a rank's model states, mixed-precision Adam: "
            + ", ".join(f"{name} {nbytes:,} B" for name, nbytes in states.items())
        )
    return "\n".join(lines)
