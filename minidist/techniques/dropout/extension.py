"""`--dropout`, `--attention-dropout`: activations are zeroed at random while the model trains.

    y = x * mask / (1 - p)        mask: 1 with probability 1 - p, else 0

The masks depend on the seed, the step, the layer and the place of an element in the global batch, not on the rank, so
every layout has those of one device.

A rank sends per step: nothing.
Equal to: one device with the same masks, as exactly as the layout allows.

Proved by: tests/config/test_rules.py, tests/config/test_no_setting_is_ignored.py, tests/equality/test_equality.py
"""

from collections.abc import Mapping
from typing import Any

from minidist.techniques import Extension, Field, Record, Rule


class Dropouts(Extension):
    """Gives the model the probabilities."""

    class Settings(Record):
        dropout: float = Field(0.0, ge=0, lt=1, description="dropout of the GPT")
        attention_dropout: float = Field(0.0, ge=0, lt=1, description="dropout of attention's weights")

    panel = "Model and data"
    rules = (
        Rule(
            "dropout-gpt",
            lambda j: j.dropout and j.model != "gpt",
            "--dropout {dropout} belongs to --model gpt, and {model} has none",
        ),
        Rule(
            "attention-dropout-mlp",
            lambda j: j.attention_dropout and j.is_classifier,
            "--attention-dropout {attention_dropout} is for attention, which --model {model} does not have",
        ),
    )
    fixed = tuple(Settings.model_fields)

    def model_options(self, config: Any) -> Mapping[str, Any]:
        options = {"attention_dropout": self.settings.attention_dropout} if config.is_language_model else {}
        return {**options, "dropout": self.settings.dropout} if config.model == "gpt" else options
