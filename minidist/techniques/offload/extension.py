"""`--offload optimizer`, `activations`, `parameters`: what is kept in host memory (`HostPool`).

    optimizer      the optimizer's state, and copies of the weights that it updates, are there    `OffloadedOptimizer`
    activations    what operations save for backward moves to the host and back                  `SavedOnHost`
                   where blocks are recomputed, their inputs alone                               `HostCopy`
    parameters     shards of ZeRO 3's parameters, gradients and optimizer state are on the host  `CPUOffloadPolicy`

The arithmetic is the same, and so are the bits. No rank sends more; what crosses the link to the host is reported.

A rank sends per step: nothing to other ranks; to and from the host 2 + 2 B per parameter, and each saved activation
once in each direction.
Equal to: one device, bit for bit.
Lesson: 12b_offload.

Proved by: tests/techniques/test_offload.py
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Literal

from minidist import optim, parallel
from minidist.core.comm import Comm
from minidist.optim.named import optimizer_named
from minidist.techniques import Extension, Field, Record, Rule, recomputed


def on_parameters(job: Any) -> bool:
    """Return whether shards of parameters are on the host; they are shards on one data-parallel rank, too."""
    return bool(job.offload == "parameters")


class Offload(Extension):
    """Keeps optimizer state, activations or parameters of a rank in host memory. pool: None on one device."""

    class Settings(Record):
        offload: Literal["none", "optimizer", "activations", "parameters"] = Field(
            "none", description="what is kept in host memory"
        )

    panel = "Precision and memory"
    rules = (
        Rule(
            "trust-ratios-with-offload",
            lambda j: issubclass(optimizer_named(j.optimizer), optim.LayerwiseOptimizer) and j.offload == "optimizer",
            "--optimizer {optimizer} reads every gradient twice, for its norms and for its step, and --offload"
            " optimizer brings each of them to the host once",
            "use --offload none, or --zero 3 with --offload parameters",
        ),
        Rule(
            "muon-with-offload",
            lambda j: issubclass(optimizer_named(j.optimizer), optim.Muon) and j.offload == "optimizer",
            "--optimizer muon steps its matrices when it has the momentum of all of them, and --offload optimizer"
            " sends the values of each back before the next gradient comes",
            "use --offload none, or --zero 3 with --offload parameters",
        ),
        Rule(
            "server-with-offload",
            lambda j: j.server and j.offload != "none",
            "not implemented: --offload {offload} on the workers and servers of --strategy ps",
        ),
        Rule(
            "offloaded-parameters-need-zero-3",
            lambda j: j.offload == "parameters" and j.zero != 3,
            "--offload parameters keeps shards of parameters on the host, and --zero {zero} has none",
            "add --zero 3",
        ),
        Rule(
            "asynchronous-with-offload",
            lambda j: j.asynchronous and j.offload != "none",
            "not implemented: --offload {offload} of the several versions of the weights that --schedule {schedule}"
            " keeps",
            "use a synchronous schedule, such as 1f1b",
        ),
    )
    matters_alone = (("zero", on_parameters), ("prefetch", on_parameters))
    pool: "parallel.HostPool | None" = None

    def build(self, job: Any, comm: Comm | None) -> None:
        # The reference on one device has one memory.
        self.pool = None if comm is None else parallel.HostPool(comm)

    def attached(self, strategy: Any) -> AbstractContextManager[Any] | None:
        # Where blocks are recomputed, their inputs are all that is offloaded: see `pack`.
        kept = recomputed(strategy.job.config) in ("none", "selective")
        if self.pool is None or self.settings.offload != "activations" or not kept:
            return None
        from minidist.techniques.offload.activations import SavedOnHost

        return SavedOnHost(self.pool).saving()

    def packs_inputs(self) -> bool:
        return bool(self.settings.offload == "activations")

    def pack(self, array: Any) -> Any:
        assert self.pool is not None
        from minidist.techniques.offload.activations import HostCopy

        return HostCopy(array, self.pool)

    def optimizer(self, kind: Callable[..., Any]) -> Callable[..., Any]:
        """Return the optimizer that steps on the host, with its state in the pool's memory."""
        if self.pool is None or self.settings.offload == "activations":
            return kind
        # Shards of parameters are on the host already; other weights are copied there.
        if self.settings.offload == "parameters":
            return partial(_on_host, kind, self.pool)
        from minidist.techniques.offload.optimizer import OffloadedOptimizer

        return partial(OffloadedOptimizer, optimizer_class=kind, pool=self.pool)

    def wrapper_options(self, config: Any) -> Mapping[str, Any]:
        if self.pool is None or self.settings.offload != "parameters":
            return {}
        return {"offload_policy": parallel.CPUOffloadPolicy(self.pool)}

    def result(self) -> dict[str, Any]:
        if self.pool is None:
            return {}
        crossed = {"to_host": self.pool.to_host, "to_device": self.pool.to_device}
        return {"host": {"peak": self.pool.account.peak, **crossed}}

    def lines(self, result: dict[str, Any]) -> list[str]:
        return [
            "on the host: peak {peak:,} B; crossed the link: {to_host:,} B down, {to_device:,} B up".format(
                **result["host"]
            )
        ]


def _on_host(kind: Callable[..., Any], pool: "parallel.HostPool", parameters: Any, **settings: Any) -> Any:
    """Return an optimizer of parameters that are on the host; its state is on the host, too."""
    from minidist.techniques.offload.optimizer import HostOptimizer

    with pool.on_host():
        optimizer = kind(parameters, **settings)
    return HostOptimizer(optimizer, pool)
