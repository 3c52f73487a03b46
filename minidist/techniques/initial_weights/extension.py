"""`--init-from`: a new job begins with the weights of a checkpoint, or of a folder of Hugging Face.

    --init-from runs/a                     the latest checkpoint of a --save directory
                runs/a/step-00000040       one of them
                gpt2                       a folder with config.json and *.safetensors

Only the weights count: optimizer state, step count, losses, seed and data are those of a new job. Every rank puts them
into the whole model before any axis cuts it (`weights.py`), so layouts do not matter.

A rank sends per step: nothing.
Equal to: the weights of the checkpoint, bit for bit, in every layout.
Lesson: 26_it_will_fail.

Proved by: tests/checkpoint/test_initial_weights.py
"""

from collections.abc import Callable
from typing import Any

from minidist.core.comm import Comm
from minidist.techniques import Extension, Field, Record, Rule


class InitialWeights(Extension):
    """Gives the whole model of a new job its weights."""

    class Settings(Record):
        init_from: str | None = Field(
            None,
            description="begin a new job with the weights of a checkpoint, a --save directory or a folder in it, or of"
            " a folder of Hugging Face (gpt2, llama)",
        )

    by_values = ("init_from",)
    rules = (
        Rule(
            "init-from-with-resume",
            lambda j: j.init_from is not None and j.resume,
            "--init-from {init_from} gives the weights of a new job, and --resume continues the one in --save {save}",
            "leave one of them out",
        ),
    )

    def check_models(self, config: Any, saved_model: Callable[[str, str], Any]) -> None:
        from minidist.techniques.initial_weights.weights import initial_checkpoint

        initial_checkpoint(self.settings.init_from, config)

    def build(self, job: Any, comm: Comm | None) -> None:
        # Imported when a job needs it: it reads checkpoints.
        from minidist.techniques.initial_weights.weights import load_initial_weights

        load_initial_weights(self.settings.init_from, job.config, job.model)
