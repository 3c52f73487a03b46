"""`--batch-norm`: the rows over which the batch norms of a CNN take their statistics.

    local   the rows of a micro-batch on its rank; the ranks combine their running statistics in every step
    sync    the rows of the i-th micro-batches of all data-parallel ranks: forward and backward send statistics
    none    no batch norms

`parallel/sync_batch_norm.py` has the messages of `sync`, and their closed form. For `compare` one device computes the
i-th micro-batches of all replicas as one.

A rank sends per step: for each norm of C channels 8 (1 + 2 C) (n-1) B for each reduction of gradients; with `sync` for
each micro-batch, and 2 (n-1)/n of 16 C B in its backward pass.
Equal to: one device, bit for bit; with `sync` to 1e-12.
Lesson: 16b_batch_norm.

Proved by: tests/parallel/test_sync_batch_norm.py, tests/train/test_cnn.py
"""

from collections.abc import Mapping
from typing import Any, Literal

from minidist.core.base.errors import UsageError
from minidist.core.parallel.dims import Axes
from minidist.techniques import AxisRun, Extension, Field, Record, Rule, Run, changes_batches, without_effect


class BatchNorms(Extension):
    """Leaves the batch norms of a CNN out, or lets them normalise over the ranks."""

    class Settings(Record):
        batch_norm: Literal["local", "sync", "none"] = Field(
            "local",
            description="cnn: statistics of each micro-batch (local), of all data-parallel ranks' (sync), or no norms",
        )

    switches = (("model", "gpt"),)
    panel = "Model and data"
    rules = (
        Rule(
            "replicas-of-batch-norm",
            lambda j: j.asynchronous and j.replicas is not None and j.model == "cnn" and j.batch_norm != "none",
            "--replicas {replicas} updates a stage on several ranks at different times, and running statistics of"
            " batch normalisation are those of all rows of one step",
            "use --batch-norm none, or a synchronous schedule with --dp",
        ),
        without_effect("batch_norm", lambda j: j.model == "cnn", "--model cnn"),
    )
    fixed = ("batch_norm",)
    alone = (("batch_norm", lambda j: j.batch_norm != "sync"),)

    @classmethod
    def used_by(cls, config: Any) -> bool:
        return cls.given(config) or config.model == "cnn"

    def joins_replicas(self) -> str:
        return "--batch-norm sync" if self.settings.batch_norm == "sync" else ""

    def model_options(self, config: Any) -> Mapping[str, Any]:
        return {"norm": self.settings.batch_norm != "none"} if config.model == "cnn" else {}

    def layers_split(self, job: Any, axes: Axes) -> None:
        if self.joins_replicas():
            from minidist.parallel.sync_batch_norm import convert_sync_batchnorm

            convert_sync_batchnorm(job.model, axes.data)

    def check_comparison(self, config: Any, dims: Any, cut: str) -> None:
        if self.joins_replicas() and changes_batches(config):
            raise UsageError(
                "compare joins the micro-batches of all replicas for --batch-norm sync, and their rows change while the"
                " job trains; compare with --batch-norm local"
            )

    def bytes_of_axis(self, run: Run, axis: AxisRun) -> dict[str, int]:
        """Of `sync`: once per norm and pass, and again where forward runs again."""
        if not self.joins_replicas():
            return {}
        from minidist.parallel.sync_batch_norm import sync_batch_norm_bytes

        sizes, passes = axis.sizes, axis.groups * run.steps * axis.microbatches
        again = sizes.norms if axis.replayed else sizes.norms_again
        sent = sum(sum(sync_batch_norm_bytes(channels, axis.ranks)) for channels in sizes.norms)
        return {
            "batch_norm": passes * (sent + sum(sync_batch_norm_bytes(channels, axis.ranks)[0] for channels in again))
        }
