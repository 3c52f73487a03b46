"""The loop of `--strategy ps` as the commands see it: `trainer.py` runs it, `comparison.py` judges it.

Proved by: tests/train/test_servers.py
"""

from collections.abc import Sequence
from typing import Any

from minidist.base.traces import Trace
from minidist.core.comm import Comm
from minidist.techniques.own_loop import OwnLoop
from minidist.techniques.parameter_server.comparison import compare_served, serve_and_keep
from minidist.techniques.parameter_server.ranks import parameter_server_bytes
from minidist.techniques.parameter_server.trainer import run_parameter_server


class ServerLoop(OwnLoop):
    """Servers and workers of a job. Rank 0 is a server, so the first worker shows the progress."""

    no_device = "--strategy ps keeps the weights of its servers on the host; leave out --device"

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.shown_by = config.servers

    def train(self, comm: Comm, observers: Sequence[Any]) -> Any:
        return run_parameter_server(comm, self.config, observers).result

    def bytes_sent(self, batches: Any, first: Any) -> dict[str, int]:
        return parameter_server_bytes(self.config, batches, first.sizes[0], first.first_step)

    def bytes_averaged(self, first: Any) -> int:
        # The running statistics of batch norms: a mean and a variance of 8 B for each channel.
        return 2 * 8 * sum(first.sizes[0].norms)  # type: ignore[no-any-return]

    def train_and_keep(self, comm: Comm, progress: Any) -> Any:
        return serve_and_keep(comm, self.config, progress)

    def compare(self, kept: Sequence[Any], traces: Sequence[Trace], progress: Any) -> Any:
        return compare_served(self.config, kept, traces, progress)
