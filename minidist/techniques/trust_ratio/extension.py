"""`--optimizer lars`, `lamb`: a trust ratio for each parameter tensor, from the norms of the whole tensor.

    lars    ratio = eta |p| / (|g| + decay |p|)     eta: --trust-coefficient
    lamb    ratio = |p| / |u|                       u: Adam's update

`parallel/layer_sums.py` adds the squares over the ranks; the optimizers are `optim/lars.py` and `optim/lamb.py`.

A rank sends per step: with ZeRO 2 (n-1)/n of 288 B per parameter tensor, and the same over the ranks of `--tp` and of
`--ep`; else nothing.
Equal to: one device, bit for bit, 1e-12 with `--tp`.
Lesson: 11b_trust_ratios.

Proved by: tests/parallel/test_layer_sums.py, tests/optim/test_layerwise.py
"""

from typing import Any

from minidist.core.comm.mesh import Mesh
from minidist.core.train.data_axis import Group
from minidist.optim import LayerwiseOptimizer
from minidist.optim.named import optimizer_named, takes
from minidist.parallel import LayerSums
from minidist.parallel.layer_sums import layer_sums_volume
from minidist.techniques import AxisRun, Extension, Field, Record, Rule, Run

NUMBER = 8  # bytes of a sum of squares


class TrustRatio(Extension):
    """Gives the optimizer the norms of whole layers."""

    class Settings(Record):
        """The flags; --optimizer is a setting of every job."""

        trust_coefficient: float = Field(
            0.001, gt=0, description="lars: how far a layer may move, as a share of its norm, at a learning rate of 1"
        )

    switches = (("optimizer", "adamw"),)
    panel = "Optimization"
    rules = (
        Rule(
            "trust-coefficient-by-optimizer",
            lambda j: j.is_changed("trust_coefficient") and not takes(j.optimizer, "trust_coefficient"),
            "--trust-coefficient {trust_coefficient} does not apply to --optimizer {optimizer}",
            "use lars, or leave it out",
        ),
    )
    fixed = ("trust_coefficient",)

    @classmethod
    def used_by(cls, config: Any) -> bool:
        kind = optimizer_named(config.optimizer)
        return issubclass(kind, LayerwiseOptimizer) or takes(config.optimizer, "trust_coefficient")

    def optimizer_arguments(self, job: Any, group: Group | None) -> dict[str, Any]:
        arguments: dict[str, Any] = {}
        if takes(job.config.optimizer, "trust_coefficient"):
            arguments["trust_coefficient"] = self.settings.trust_coefficient
        if group is not None and issubclass(optimizer_named(job.config.optimizer), LayerwiseOptimizer):
            cut_by = {"tp": group.axes.tp, "ep": group.axes.ep} if group.experts else {"tp": group.axes.tp}
            shards = group.mesh["shard"] if isinstance(group.mesh, Mesh) else group.mesh
            arguments["layer_sums"] = LayerSums(group.parameters, shards if group.zero else None, **cut_by)
        return arguments

    def bytes_of_axis(self, run: Run, axis: AxisRun) -> dict[str, int]:
        """The norms of whole layers: summed over shards, and over tensor- and expert-parallel ranks."""
        dims, layers, copies = run.batches.dims, len(axis.sizes.parameters), run.config.dp_replicate
        numbers = dims.dp * dims.cp * layer_sums_volume(layers, dims.tp)
        if run.config.zero:
            numbers += copies * axis.groups * layer_sums_volume(layers, axis.ranks // copies)
        if axis.sizes.experts:
            numbers += dims.edp * dims.cp * dims.tp * layer_sums_volume(layers, dims.ep)
        return {"trust_ratio": (run.steps - run.skipped) * numbers * NUMBER}
