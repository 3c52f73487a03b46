"""`--quantize int8`: layers train with operands rounded to 8 bits, by ranges that all ranks share.

The layers are in `layers.py`, those that tensor parallelism splits in `split_layers.py`, the ranges in `ranges.py`. An
evaluation measures the loss of the model that trains, and of the same model converted to INT8.

A rank sends per step: log₂ n times two numbers per quantised layer, and with --tp log₂ t times a number per output of
its row-parallel layers.
Equal to: one device, bit for bit; with --tp and --cp to 1e-12 in float64.
Lesson: 09b_eight_bits.

Proved by: tests/techniques/test_quantization.py
"""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any, Literal

from minidist.core.base import arrays as xp
from minidist.core.comm import Comm
from minidist.core.nn.layers import Conv1D, Linear
from minidist.core.parallel.dims import Axes
from minidist.techniques import Extension, Field, Moment, Record, Rule, Run, quantization, without_effect

HELD_OUT = "held_out_loss_int8"


class Quantization(Extension):
    """Trains with rounded operands; see `QATLinear`."""

    class Settings(Record):
        quantize: Literal["none", "int8"] = Field(
            "none",
            description="int8: train with weights and inputs of linear layers rounded to 8 bits, evaluate in INT8",
        )
        quantize_weights: Literal["per-channel", "per-tensor"] = Field(
            "per-channel", description="int8: a scale for each output of a layer, or one for its whole weight"
        )
        quantize_observer: Literal["moving-average", "min-max"] = Field(
            "moving-average", description="int8: range of a layer's inputs, from the smallest and largest of each step"
        )

    panel = "Precision and memory"
    fixed = ("quantize", "quantize_weights", "quantize_observer")
    evaluations = 1
    jumps = "--quantize"
    rules = (
        Rule(
            "quantization-in-half-precision",
            lambda j: j.quantize != "none" and j.half,
            "--quantize {quantize} rounds to 256 levels, and {precision} could not hold the products of a level and its"
            " scale without rounding once more",
            "use --precision fp32 or fp64",
        ),
        Rule(
            "quantization-with-zero-3",
            lambda j: j.quantize != "none" and j.zero == 3,
            "not implemented: --zero 3 releases a weight after its product, and --quantize {quantize} reads it at the"
            " end of the step for its range, and keeps the rounded copy for backward",
            "use --zero 2",
        ),
        Rule(
            "quantization-with-experts",
            lambda j: j.quantize != "none" and j.experts,
            "--experts {experts} multiplies by the matrices of all experts at once, and --quantize {quantize} rounds"
            " the operands of linear layers",
            "leave one of them out",
        ),
        Rule(
            "quantization-with-local-steps",
            lambda j: j.quantize != "none" and j.optional("local_steps"),
            "--local-steps {local_steps} lets replicas train alone, and --quantize {quantize} agrees on ranges in every"
            " step",
            "leave one of them out",
        ),
        Rule(
            "quantization-with-server",
            lambda j: j.quantize != "none" and j.server,
            "--quantize {quantize} agrees on ranges at the end of every step, and the workers of --strategy ps exchange"
            " nothing with each other",
            "use --strategy auto",
        ),
        without_effect("quantize_weights", lambda j: j.quantize != "none", "--quantize int8"),
        without_effect("quantize_observer", lambda j: j.quantize != "none", "--quantize int8"),
    )

    @property
    def rounding(self) -> tuple[str, bool]:
        """The observer, and whether each output has a scale."""
        return self.settings.quantize_observer, self.settings.quantize_weights == "per-channel"

    @classmethod
    def check(cls, job: Any) -> None:
        quantization.prepare_qat(job.small_model())

    def build(self, job: Any, comm: Comm | None) -> None:
        self.job: Any = job
        self.held_out: dict[int, float] = {}
        self.maxima = 0
        # Tensor parallelism splits linear layers, and `layers_split` prepares their shards.
        self.names = [layer.name for layer in job.model.modules() if isinstance(layer, (Linear, Conv1D))]
        if comm is None or job.config.tp == 1:
            job.model = quantization.prepare_qat(job.model, *self.rounding)
        self.observers, self.computed = quantization.observers_of(job.model), [job.model]

    def layers_split(self, job: Any, axes: Axes) -> None:
        if axes.tp.size > 1:
            quantization.prepare_split_qat(job.model, self.names, *self.rounding)
        # The model may be a new one, which goes on with the ranges of the one before.
        known = quantization.ranges_state(self.observers)
        self.job, self.observers, self.computed = job, quantization.observers_of(job.model), [job.model]
        quantization.load_ranges(self.observers, known)

    def attached(self, strategy: Any) -> None:
        # A rank of a pipeline computes its stages; the rest of its model has no weights.
        pipe = getattr(strategy, "pipe", None)
        if pipe is not None:
            self.computed = [stage.module for stage in pipe.stages.values()]
        self.maxima = quantization.agree_on_weights(self.computed, strategy.axes.tp)

    def forget(self) -> None:
        for observer in self.observers.values():
            observer.seen = None

    def after_update(self, moment: Moment) -> None:
        """Let the next step quantise by ranges that include what this one saw, the same on every rank."""
        if not moment.skipped:
            # All ranks of a pipeline, so that each of them knows all ranges: those of other stages are in checkpoints.
            # With tensor parallelism each rank has other columns of what enters a row-parallel layer.
            axes = None if moment.comm is None else moment.strategy.axes
            quantization.update_ranges(
                self.observers, axes and (axes.data if axes.pp.size == axes.tp.size == 1 else axes.comm)
            )
            if axes is not None:
                quantization.agree_on_weights(self.computed, axes.tp)

    def evaluate(self, done: int, loss: Callable[[], float]) -> dict[str, float]:
        """Return the held-out loss of the layers converted to INT8: int8 weights and integer products."""
        with ExitStack() as stack:
            for module in self.computed:
                stack.enter_context(quantization.converted(module))
            result = loss()
        # In a dry run arrays have no values.
        if not xp.is_meta(next(iter(self.computed[0].parameters())).data):
            self.held_out[done] = result
        return {HELD_OUT: result}

    def converted(self, model: Any, scalars: Mapping[str, float]) -> Any:
        model = quantization.prepare_qat(model, *self.rounding)
        quantization.load_ranges(quantization.observers_of(model), scalars)
        return quantization.convert(model)

    def scalars(self) -> dict[str, float]:
        return quantization.ranges_state(self.observers)

    def load_scalars(self, scalars: Mapping[str, float]) -> None:
        quantization.load_ranges(self.observers, scalars)

    def sizes(self, axis: Any) -> dict[str, Any]:
        return {"quantized": len(self.observers), "maxima": self.maxima}

    def result(self) -> dict[str, Any]:
        return {"int8": {**quantization.int8_bytes(self.job.model), "held_out": self.held_out}}

    def lines(self, result: dict[str, Any]) -> list[str]:
        int8 = result["int8"]
        losses = ", ".join(f"{loss:.4f} after {step} steps" for step, loss in int8["held_out"].items())
        return [
            "INT8: weights {weight_bytes:,} B, in floats {float_bytes:,} B".format(**int8)
            + (f"; loss on held-out data: {losses}" if losses else "")
        ]

    def bytes_sent(self, run: Run) -> dict[str, int]:
        """The ranges of all layers, agreed over the ranks with other inputs once per step, and maxima of weights."""
        layers = max(axis.more.get("quantized", 0) for axes in run.sizes for axis in axes)
        dims = run.batches.dims
        sent = run.steps * quantization.ranges_volume(
            layers, dims.dp * dims.cp if dims.pp == dims.tp == 1 else dims.ranks
        )
        # Before the first step and after every update, the tensor-parallel ranks of each stage.
        for axes in list(run.sizes)[:: dims.tp]:
            maxima = max((axis.more.get("maxima", 0) for axis in axes), default=0)
            sent += (run.steps + 1) * quantization.doubling_volume(maxima, dims.tp)
        return {"quantization_range": sent * run.itemsize}
