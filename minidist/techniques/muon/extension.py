"""`--optimizer muon`: whole matrices are orthogonalised, although a rank may hold only a part of each.

    --orthogonalize owner         each matrix by one data-parallel rank, which sends the result to the others
                    everywhere    each matrix by all of them

`parallel/whole_matrices.py` moves the parts, and states what that sends; the optimizer is `optim/muon.py`.

A rank sends per step: ZeRO: twice the parts of each matrix that its owner does not have (2 (n-1)/n² of the matrices
where each is spread evenly), or (n-1)/n of them everywhere; replicas (n-1)/n, or nothing; tensor parallelism (t-1)/t of
each matrix.
Equal to: one device, bit for bit, 1e-12 with `--tp`.
Lesson: 11c_muon.

Proved by: tests/parallel/test_muon.py
"""

from typing import Any, Literal

from minidist import optim, parallel
from minidist.optim.named import optimizer_named
from minidist.techniques import AxisRun, Extension, Field, Record, Run, trains_alone, without_effect


class WholeMatricesOfMuon(Extension):
    """Gives the optimizer whole matrices, which the ranks join."""

    class Settings(Record):
        """The flags; --optimizer is a setting of every job."""

        orthogonalize: Literal["owner", "everywhere"] = Field(
            "owner", description="muon: each matrix is orthogonalised by one data-parallel rank, or by all"
        )

    switches = (("optimizer", "adamw"),)
    panel = "Optimization"
    rules = (
        without_effect(
            "orthogonalize",
            lambda j: j.optimizer == "muon" and not (j.server or j.optional("local_steps") or j.asynchronous),
            "--optimizer muon on ranks that step together",
        ),
    )
    alone = (("orthogonalize", lambda j: False),)

    @classmethod
    def used_by(cls, config: Any) -> bool:
        return issubclass(optimizer_named(config.optimizer), optim.Muon)

    def optimizer_arguments(self, job: Any, group: Any) -> dict[str, Any]:
        if group is None:
            return {}
        cut_by = {"tp": group.axes.tp, "ep": group.axes.ep} if group.experts else {"tp": group.axes.tp}
        # Replicas of whole matrices share the work.
        replicas = None if group.zero or trains_alone(job.config) else group.comm
        matrices = parallel.WholeMatrices(group.parameters, self.settings.orthogonalize, replicas, **cut_by)
        return {"whole_matrices": matrices}

    def sizes(self, axis: Any) -> dict[str, Any]:
        whole = getattr(axis.optimizer, "whole_matrices", None)
        return {} if whole is None else {"orthogonalized": whole.sent(axis.optimizer.shapes)}

    def bytes_of_axis(self, run: Run, axis: AxisRun) -> dict[str, int]:
        """The whole matrices, in the dtype of the update, of every group of a hybrid mesh."""
        copies = run.config.dp_replicate if run.config.zero else 1
        elements = copies * axis.groups * axis.sizes.more.get("orthogonalized", 0)
        return {"muon": (run.steps - run.skipped) * elements * max(4, run.itemsize)}
