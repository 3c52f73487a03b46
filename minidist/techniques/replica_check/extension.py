"""`--check-replicas`: after every step the ranks compare fingerprints of the parameters that more than one rank holds.

A rank sends per step: 8 B, and 16 B for each shard that it holds, to every other rank.
Equal to: the job without the check, bit for bit.

Proved by: tests/train/test_replicas.py, tests/config/test_rules.py
"""

from minidist.techniques import Extension, Field, Moment, Record, Rule, Run

NUMBER, ROW = 8, 16  # bytes: the number of shards of a rank; and one shard's tensor and place, with its fingerprint


class ReplicaCheck(Extension):
    """Compares the copies of every parameter; see `check_shard_replicas`."""

    class Settings(Record):
        check_replicas: bool = Field(
            False, description="after every step, compare all copies of every parameter bit for bit"
        )

    observes = True
    unlike = "the tables of --check-replicas"
    alone = (("check_replicas", lambda j: j.has_replicas),)
    rules = (
        Rule(
            "server-with-check-replicas",
            lambda j: j.server and j.check_replicas,
            "--check-replicas does not combine with --strategy ps: it compares ranks that step the same"
            " weights, and only servers step",
        ),
        Rule(
            "local-steps-with-check-replicas",
            lambda j: j.optional("local_steps") and j.check_replicas,
            "--check-replicas does not combine with --local-steps {local_steps}: between two averages the replicas have"
            " different weights and gradients",
        ),
        Rule(
            "replicas-to-check",
            # With one data-parallel rank it is a notice, see `alone`.
            lambda j: j.check_replicas and j.data_ranks > 1 and not j.has_replicas,
            "--check-replicas compares ranks that hold the same values, and with --zero {zero} no two ranks do",
            "use --zero 2 or --dp-replicate 2, or leave it out",
        ),
        Rule(
            "asynchronous-with-check-replicas",
            lambda j: j.asynchronous and j.check_replicas,
            "--check-replicas compares copies after every step, and with --schedule {schedule} those of a weight are of"
            " different steps",
            "leave it out, or use a synchronous schedule, such as 1f1b",
        ),
    )

    def after_update(self, moment: Moment) -> None:
        held = [shard for axis in moment.strategy.data_axes for shard in axis.weights()]
        assert moment.comm is not None  # the reference leaves it out
        from minidist.parallel.replica_check import check_shard_replicas

        check_shard_replicas(moment.comm, moment.strategy.axes, held, moment.steps.start)

    def bytes_sent(self, run: Run) -> dict[str, int]:
        """Each rank sends its number of shards, then a row for each of them, to every other rank, in every step."""
        shards = sum(axis.held for axes in run.sizes for axis in axes)
        return {"metrics": run.steps * (run.ranks - 1) * (run.ranks * NUMBER + shards * ROW)}
