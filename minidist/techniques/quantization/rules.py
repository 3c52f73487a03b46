"""The settings of quantised training, and with what they do not combine.

Proved by: tests/config/test_rules.py, tests/config/test_no_setting_is_ignored.py
"""

from typing import Literal

from minidist.base.records import Field
from minidist.techniques.extension import Settings
from minidist.techniques.rule import Rule, without_effect


class QuantizationSettings(Settings):
    """The flags."""

    quantize: Literal["none", "int8"] = Field(
        "none", description="int8: train with weights and inputs of linear layers rounded to 8 bits, evaluate in INT8"
    )
    quantize_weights: Literal["per-channel", "per-tensor"] = Field(
        "per-channel", description="int8: a scale for each output of a layer, or one for its whole weight"
    )
    quantize_observer: Literal["moving-average", "min-max"] = Field(
        "moving-average", description="int8: range of a layer's inputs, from the smallest and largest of each step"
    )


RULES = (
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
        "not implemented: --zero 3 releases a weight after its product, and --quantize {quantize} reads it at the end"
        " of the step for its range, and keeps the rounded copy for backward",
        "use --zero 2",
    ),
    Rule(
        "quantization-with-experts",
        lambda j: j.quantize != "none" and j.experts,
        "--experts {experts} multiplies by the matrices of all experts at once, and --quantize {quantize} rounds the"
        " operands of linear layers",
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
    without_effect(QuantizationSettings, "quantize_weights", lambda j: j.quantize != "none", "--quantize int8"),
    without_effect(QuantizationSettings, "quantize_observer", lambda j: j.quantize != "none", "--quantize int8"),
)
