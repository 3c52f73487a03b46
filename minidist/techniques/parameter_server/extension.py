"""`--strategy ps`: workers send gradients to parameter servers, which send back weights.

Its ranks have no common step, so the technique has a training loop in place of the job's: `loop.py`.

A rank sends per step: a worker its gradient, perhaps compressed, and 16 B to each server; the servers together the
weights to each worker.
Equal to: one device, bit for bit, or a replay of the recorded order.
Lesson: 06c_parameter_server.

Proved by: tests/train/test_servers.py
"""

from typing import Any

from minidist.core.base.errors import UsageError
from minidist.techniques.extension import Extension
from minidist.techniques.own_loop import OwnLoop
from minidist.techniques.parameter_server.rules import RULES, ServerSettings


class ServerTraining(Extension):
    """Trains with servers, which hold the weights, and workers, which compute gradients."""

    Settings = ServerSettings
    panel = "Data parallelism"
    rules = RULES
    rules_first = True
    unlike = "a parameter server's ranks"

    @classmethod
    def used_by(cls, config: Any) -> bool:
        # The other flags have no effect without this one, and a rule refuses them.
        return bool(config.strategy == "ps")

    @classmethod
    def beside(cls, config: Any, ranks: int | None = None) -> int:
        """Return the number of servers: the degrees divide the workers only."""
        if not cls.used_by(config):
            return 0
        servers = int(config.servers)
        if ranks is None:
            return servers
        if servers >= ranks:
            raise UsageError(
                f"--servers {servers} of {ranks} ranks leave no worker; start at least {servers + 1} ranks, or use"
                " fewer servers"
            )
        workers = ranks - servers
        if config.dp not in (None, workers):
            raise UsageError(
                f"--dp {config.dp} workers and --servers {servers} are not {ranks} ranks; use --dp {workers}, or start"
                f" {config.dp + servers} ranks"
            )
        return servers

    def own_loop(self, config: Any) -> OwnLoop:
        # Imported when a job runs it: it builds models and writes checkpoints.
        from minidist.techniques.parameter_server.loop import ServerLoop

        return ServerLoop(config)
