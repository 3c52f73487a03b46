"""`--strategy ps`: workers send gradients to parameter servers, which send back weights.

Its ranks have no common step, so the technique has a training loop in place of the job's: `loop.py`.

A rank sends per step: a worker its gradient, perhaps compressed, and 16 B to each server; the servers together the
weights to each worker.
Equal to: one device, bit for bit, or a replay of the recorded order.
Lesson: 06c_parameter_server.

Proved by: tests/train/test_servers.py
"""

from typing import Any, Literal

from minidist.base.limits import MAX_RANKS
from minidist.core.base.errors import UsageError
from minidist.techniques import Extension, Field, OwnLoop, Record, Rule, parameter_server


def serves(job: Any) -> bool:
    """Return whether the job has a parameter server."""
    return bool(job.strategy == "ps")


def aggregates(job: Any) -> bool:
    """Return whether the servers apply a whole clock's gradients at once; UsageError for an unknown consistency."""
    try:
        return parameter_server.parse_consistency(job.consistency).aggregate
    except UsageError as error:
        raise UsageError(f"--consistency: {error}") from None


def axes(job: Any) -> str:
    """Return the flags of axes that are set although every worker holds a whole model."""
    # A degree is off at 1, ZeRO at 0. --dp is not among them: the workers of a server are its replicas.
    names = ("pp", "cp", "tp", "ep", "zero")
    return " ".join(f"--{name} {getattr(job, name)}" for name in names if getattr(job, name) > (name != "zero"))


class ServerTraining(Extension):
    """Trains with servers, which hold the weights, and workers, which compute gradients."""

    class Settings(Record):
        strategy: Literal["auto", "ps"] = Field(
            "auto", description="auto, or ps: a parameter server in place of reductions"
        )
        servers: int = Field(1, ge=1, le=MAX_RANKS, description="ps: ranks that are servers")
        consistency: str = Field("bsp", description="ps: bsp, delay:CLOCKS, ssp:CLOCKS or asp")
        staleness_aware: bool = Field(
            False, description="ps with ssp or asp: divide an update's learning rate by its staleness"
        )

    main = "strategy"
    panel = "Data parallelism"
    rules = (
        Rule(
            "server-settings-without-server",
            lambda j: not serves(j) and (j.consistency != "bsp" or j.servers != 1 or j.staleness_aware),
            "--servers, --consistency and --staleness-aware belong to --strategy ps",
            "add it, or leave them out",
        ),
        Rule(
            "staleness-of-a-whole-clock",
            lambda j: serves(j) and aggregates(j) and j.staleness_aware,
            "--staleness-aware scales the gradient of one worker, and --consistency {consistency} applies those of all"
            " workers as one update",
            "use ssp:S or asp",
        ),
        Rule(
            "server-with-axes",
            lambda j: serves(j) and axes(j),
            "--strategy ps has whole models on its workers, so it does not combine with {server_axes}",
            "leave one of them out",
            {"server_axes": axes},
        ),
        Rule(
            "server-precision",
            lambda j: serves(j) and j.half,
            "--strategy ps pushes and pulls in fp32 or fp64, not {precision}",
            "use --precision fp32",
        ),
        Rule(
            "server-with-clip",
            lambda j: serves(j) and j.optional("clip") is not None and not (aggregates(j) and j.servers == 1),
            "--clip {clip} needs the norm of the whole gradient of a step, which no rank has with --servers {servers}"
            " and --consistency {consistency}",
            "use --servers 1 with bsp or delay:CLOCKS, or leave it out",
        ),
        Rule(
            "server-with-every",
            lambda j: serves(j) and j.every is not None and j.consistency != "bsp",
            "--every {every} needs a moment between two steps, and with --consistency {consistency} there is none: the"
            " job is saved once, at its end",
            "use --consistency bsp, or leave it out",
        ),
        # Settings that need common steps or equal weights.
        Rule(
            "server-with-synchronize-each",
            lambda j: serves(j) and j.optional("synchronize_each"),
            "--synchronize-each does not combine with --strategy ps: a worker pushes once per step",
        ),
        Rule(
            "server-with-bucket-cap-mb",
            lambda j: serves(j) and j.is_changed("bucket_cap_mb"),
            "--bucket-cap-mb {bucket_cap_mb} does not apply to --strategy ps, whose workers push one gradient per step,"
            " without buckets",
        ),
        Rule(
            "server-with-reduction",
            lambda j: serves(j) and j.is_changed("reduction"),
            "--reduction {reduction} does not apply to --strategy ps, whose servers add gradients in the order that"
            " --consistency sets",
        ),
        Rule(
            "sync-batch-norm-with-server",
            lambda j: serves(j) and j.optional("batch_norm") == "sync",
            "--batch-norm sync normalises by the rows of all ranks, and the workers of --strategy ps exchange nothing"
            " with each other",
            "use --batch-norm local",
        ),
    )
    rules_first = True  # its workers hold whole models, whatever the axes are
    unlike = "a parameter server's ranks"

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
