"""What a configuration file asks for: its bytes in closed form, and with `--run` those that a step sends, with memory.

The closed form needs the sizes of the parts that each rank holds, so the ranks build the model without values, and run
no step: a file is explained in about a second, whatever its batch. With `--run` a step runs in the simulated world,
which counts bytes, messages and memory; they are those of a real run. Of a step that accumulates over many
micro-batches, two and three of them run: what each further one sends is the difference. Memory is that of a second
step, when the optimizer has its state. For models that do not fit on a laptop, the ZeRO paper's bytes of the model
states are given for any number of parameters.

Proved by: tests/config/test_deepspeed.py
"""

from collections import Counter
from contextlib import nullcontext
from typing import Any, NamedTuple

from minidist.base.memory import MEMORY_PURPOSES
from minidist.base.meta import creating_meta
from minidist.base.traces import sent_by_purpose
from minidist.comm import SimWorld
from minidist.core.comm import Comm
from minidist.job.config.deepspeed import Translation
from minidist.job.config.train_config import Batches, TrainConfig, resolve_batches
from minidist.job.train.start import number_of_ranks, settings_that_need_values, trial
from minidist.job.train.state import TrainResult
from minidist.job.train.trainer import train
from minidist.planning.volumes import closed_form_bytes
from minidist.planning.zero_stages import model_states, whole_number
from minidist.techniques import own_loop

MAX_MICROBATCHES = 4  # of a step, that all run


def explain_job(
    config: TrainConfig, translation: Translation, ranks: int | None, parameters: str | None = None, run: bool = False
) -> dict[str, Any]:
    """Return figures of one step of the job that `config` (with the file's settings in it) describes.

    {honoured, not_honoured, model, batch, ranks, purposes: {name: {closed_form}} in bytes of all ranks, model_states:
    bytes of a rank for `parameters` parameters at the file's ZeRO stage}. run: the step runs, and there are also the
    `bytes` and `messages` of each purpose, peak_bytes of each rank, and peak_by_purpose of rank 0.
    """
    # Every step sends the same bytes, so one step without checkpoints is enough.
    once = trial(config, 1)
    size = number_of_ranks(once, ranks)
    batches = resolve_batches(once, size)
    # The closed form is computed from the sizes that ranks report: without a step they only build the model.
    built = _counted(once.model_copy(update={"steps": 0}), size).results
    closed = closed_form_bytes(once, batches, [result.sizes for result in built])
    replaced = translation.in_place(config)
    tokens = () if config.is_classifier else ("context",)
    figures: dict[str, Any] = {
        "honoured": [{"key": key, "value": value, "becomes": becomes} for key, value, becomes in translation.applied],
        "not_honoured": [
            {"key": key, "why": f"{why}; {replaced[key]}" if key in replaced else why}
            for key, why in translation.ignored
        ],
        "model": {name: getattr(config, name) for name in ("model", "layers", "width", *tokens)},
        "batch": {
            "global_batch": batches.global_batch,
            "micro_batch": batches.micro_batch,
            "accumulation": batches.accumulation,
            "dp": batches.dp,
        },
        "ranks": size,
        "purposes": {name: {"closed_form": nbytes} for name, nbytes in closed.items()},
    }
    if run:
        figures |= _executed(once, size, batches, closed)

    # A model of any size: the file's ZeRO stage, by the formula of the ZeRO paper.
    if parameters is not None:
        figures["model_states"] = model_states(whole_number(parameters), batches.dp)[f"stage{config.zero}"]
    return figures


def _executed(once: TrainConfig, size: int, batches: Batches, closed: dict[str, int]) -> dict[str, Any]:
    """Return what a step sends, with the closed form, and the memory of a second step."""
    shorter = [once]
    if batches.accumulation > MAX_MICROBATCHES and _adds_micro_batches(once, batches):
        part = {"global_batch": None, "micro_batch": batches.micro_batch}
        shorter = [once.model_copy(update={**part, "accumulation": n}) for n in (2, 3)]
    counted = [_counted(job, size) for job in shorter]
    further = batches.accumulation - 2 if len(counted) > 1 else 0
    measured = _with_further(counted[0].nbytes, counted[-1].nbytes, further)
    messages = _with_further(counted[0].messages, counted[-1].messages, further)
    warm = _counted(shorter[-1].model_copy(update={"steps": 2}), size).results
    return {
        "purposes": {
            name: {"bytes": measured[name], "closed_form": closed.get(name, 0), "messages": messages[name]}
            for name in sorted({*closed, *measured})
        },
        "peak_bytes": [result.peak_bytes for result in warm],
        "peak_by_purpose": {name: n for name in MEMORY_PURPOSES if (n := warm[0].peak_by_purpose.get(name, 0))},
    }


class _Counted(NamedTuple):
    """What all ranks sent in a job, by purpose, and each rank's result."""

    nbytes: Counter[str]
    messages: Counter[str]
    results: list[TrainResult]


def _adds_micro_batches(config: TrainConfig, batches: Batches) -> bool:
    """Return whether each further micro-batch of a step sends what the third one does, and needs no more memory."""
    even = batches.global_batch == batches.micro_batch * batches.accumulation * batches.dp
    return even and config.pp == 1 and own_loop(config) is None and not settings_that_need_values(config)


def _counted(config: TrainConfig, size: int) -> _Counted:
    """Run a job without values, or with values where it depends on them."""
    valued = bool(settings_that_need_values(config))

    def program(comm: Comm) -> TrainResult:
        with nullcontext() if valued else creating_meta():
            return train(comm, config)

    world = SimWorld(size, checks=valued, record="totals")
    results: list[TrainResult] = world.run(program)
    nbytes, messages = sent_by_purpose(world.traces)
    return _Counted(nbytes, messages, results)


def _with_further(two: Counter[str], three: Counter[str], further: int) -> Counter[str]:
    """Return what a step of 2 + `further` micro-batches sends. two, three: what a step of two and of three sends."""
    return Counter({name: count + further * (three[name] - count) for name, count in two.items()})


def table(figures: dict[str, Any]) -> str:
    """Format the figures for people."""
    width = max((len(item["key"]) for item in [*figures["honoured"], *figures["not_honoured"]]), default=0)
    lines = ["honoured"]
    lines += [f"  {item['key']:{width}} {item['value']!s:>12}   {item['becomes']}" for item in figures["honoured"]]
    lines.append("not honoured" if figures["not_honoured"] else "not honoured: nothing")
    lines += [f"  {item['key']:{width}} {item['why']}" for item in figures["not_honoured"]]

    # A file does not describe the model, which flags do.
    model = figures["model"]
    tokens = f", samples of {model['context']:,} tokens" if "context" in model else ""
    lines.append(f"model {model['model']}: {model['layers']:,} layers of width {model['width']:,}{tokens}")

    # DeepSpeed's equation of the batch, as it was resolved.
    batch = figures["batch"]
    even = batch["global_batch"] == batch["micro_batch"] * batch["accumulation"] * batch["dp"]
    lines.append(
        "global batch {global_batch} {relation} micro batch {micro_batch} x accumulation {accumulation} x data-parallel"
        " ranks {dp}".format(relation="=" if even else "in uneven shares: at most", **batch)
    )
    lines += _executed_lines(figures) if "peak_bytes" in figures else _formula_lines(figures)
    if "model_states" in figures:
        states = figures["model_states"]
        lines.append(
            "a rank's model states, mixed-precision Adam: "
            + ", ".join(f"{name} {nbytes:,} B" for name, nbytes in states.items())
        )
    return "\n".join(lines)


def _formula_lines(figures: dict[str, Any]) -> list[str]:
    """Return the closed form of each purpose's bytes."""
    lines = [f"{'one step, all ranks':24}{'bytes, by formula':>20}"]
    lines += [f"  {name:22}{row['closed_form']:20,}" for name, row in figures["purposes"].items()]
    return [*lines, "startup is sent once, the rest in every step; --run counts messages and memory by running a step"]


def _executed_lines(figures: dict[str, Any]) -> list[str]:
    """Return what the step that ran sent, and its memory."""
    lines = [f"{'one step, all ranks':24}{'bytes':>14}{'closed form':>14}{'messages':>10}"]
    for name, row in figures["purposes"].items():
        # What was counted must equal the closed form, here as in every run.
        mark = "" if row["bytes"] == row["closed_form"] else "   DIFFERENT"
        lines.append(f"  {name:22}{row['bytes']:14,}{row['closed_form']:14,}{row['messages']:10,}{mark}")
    lines.append(
        f"startup is sent once, the rest in every step; peak of a rank: {max(figures['peak_bytes']):,} B, of rank 0:"
    )
    return lines + [f"  {name:22}{nbytes:14,}" for name, nbytes in figures["peak_by_purpose"].items()]
