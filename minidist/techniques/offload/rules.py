"""The setting of what is kept in host memory, and with what it does not combine.

Proved by: tests/config/test_rules.py, tests/config/test_no_setting_is_ignored.py
"""

from typing import Literal

from minidist.base.records import Field
from minidist.optim import LayerwiseOptimizer, Muon
from minidist.optim.named import optimizer_named
from minidist.techniques.extension import Settings
from minidist.techniques.rule import Rule


class OffloadSettings(Settings):
    """The flag."""

    offload: Literal["none", "optimizer", "activations", "parameters"] = Field(
        "none", description="what is kept in host memory"
    )


RULES = (
    Rule(
        "trust-ratios-with-offload",
        lambda j: issubclass(optimizer_named(j.optimizer), LayerwiseOptimizer) and j.offload == "optimizer",
        "--optimizer {optimizer} reads every gradient twice, for its norms and for its step, and --offload optimizer"
        " brings each of them to the host once",
        "use --offload none, or --zero 3 with --offload parameters",
    ),
    Rule(
        "muon-with-offload",
        lambda j: issubclass(optimizer_named(j.optimizer), Muon) and j.offload == "optimizer",
        "--optimizer muon steps its matrices when it has the momentum of all of them, and --offload optimizer sends the"
        " values of each back before the next gradient comes",
        "use --offload none, or --zero 3 with --offload parameters",
    ),
    Rule(
        "server-with-offload",
        lambda j: j.server and j.offload != "none",
        "not implemented: --offload {offload} on the workers and servers of --strategy ps",
        "leave it out",
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
        "not implemented: --offload {offload} of the several versions of the weights that --schedule {schedule} keeps",
        "use a synchronous schedule, such as 1f1b",
    ),
)
