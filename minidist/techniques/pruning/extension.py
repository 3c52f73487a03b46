"""`--sparsity`, `--sparsity-pattern`: a growing share of the weights is set to zero, and their gradients are not sent.

Each data axis has a `Pruner` (`pruner.py`) for its weights, and its reductions leave out what is pruned (`layouts.py`).
Checkpoints contain the masks, as bits.

A rank sends per step: data parallel 2 (n-1)/n of the kept gradients, ZeRO (n-1)/n of them and of the padding; ZeRO 3:
256 counts per digit and layer for a mask.
Equal to: one device, bit for bit.
Lesson: 09c_pruning.

Proved by: tests/techniques/test_pruning.py
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from minidist.base.errors import quoted
from minidist.core.comm import Comm
from minidist.parallel.volume import gradient_volume
from minidist.techniques import AxisRun, Extension, Field, Moment, Record, Rule, Run, pruning, setting, without_effect


def prunes(job: Any) -> bool:
    """Return whether weights become zero while a job with these settings trains."""
    return job.sparsity > 0 or job.sparsity_pattern is not None


def pruning_of(job: Any) -> tuple["pruning.SparsitySchedule", tuple[int, int] | None]:
    """Return the schedule and the pattern of a job that prunes; UsageError for texts that are none."""
    pattern = None if job.sparsity_pattern is None else pruning.parse_pattern(job.sparsity_pattern)
    final = job.sparsity if pattern is None else pruning.pattern_sparsity(*pattern)
    return pruning.parse_schedule(job.sparsity_schedule or "", final), pattern


def pruning_flag(job: Any) -> str:
    """Return the setting that says what is pruned, as it is typed."""
    pattern = job.sparsity_pattern
    return f"--sparsity {job.sparsity:g}" if pattern is None else f"--sparsity-pattern {quoted(pattern, marks=False)}"


FLAG = {"pruning_flag": pruning_flag}  # what the sentences name


MASKS = "masks"  # the first part of their names in a checkpoint


class Pruning(Extension):
    """Sets the smallest weights to zero; see `Pruner`."""

    class Settings(Record):
        sparsity: float = Field(
            0.0, ge=0, lt=1, description="share of the weights of linear layers that become zero, by magnitude; 0: none"
        )
        sparsity_schedule: str | None = Field(
            None,
            description="BEGIN,END or BEGIN,END,EVERY: after which steps weights are pruned (Zhu and Gupta's cubic"
            " curve)",
        )
        sparsity_scope: Literal["layer", "global"] = Field(
            "layer", description="what is pruned to --sparsity: each layer, or all together"
        )
        sparsity_pattern: str | None = Field(
            None, description="N:M, in place of --sparsity: N of every M weights of a sum stay, such as 2:4"
        )

    panel = "Precision and memory"
    rules = (
        Rule(
            "reduction-with-sparsity",
            lambda j: prunes(j) and j.reduction not in ("ring", "ordered"),
            "--reduction {reduction} of the entries that --sparsity keeps sends bytes that no closed form gives,"
            " because the masks decide how many each rank's chunk has",
            "use --reduction ring or ordered",
        ),
        Rule(
            "sparsity-needs-schedule",
            lambda j: prunes(j) and j.sparsity_schedule is None,
            "{pruning_flag} needs --sparsity-schedule BEGIN,END, the steps after which weights are pruned",
            "add it, such as --sparsity-schedule {between}",
            {**FLAG, "between": lambda j: f"{-(-j.steps // 4)},{-(-3 * j.steps // 4)}"},
        ),
        Rule(
            "sparsity-or-pattern",
            lambda j: j.sparsity and j.sparsity_pattern is not None,
            "--sparsity-pattern {sparsity_pattern} says itself how much is pruned, and so does --sparsity {sparsity:g}",
            "leave one of them out",
        ),
        Rule(
            "sparsity-pattern-at-once",
            lambda j: j.sparsity_pattern is not None and pruning_of(j)[0].begin != pruning_of(j)[0].end,
            "--sparsity-pattern {sparsity_pattern} is set once, and --sparsity-schedule {sparsity_schedule} has two"
            " ends",
            "use --sparsity-schedule {begin}",
            {"begin": lambda j: pruning_of(j)[0].begin},
        ),
        Rule(
            "sparsity-scope-of-a-pattern",
            lambda j: j.sparsity_pattern is not None and j.sparsity_scope != "layer",
            "--sparsity-pattern {sparsity_pattern} compares neighbours, and --sparsity-scope {sparsity_scope} compares"
            " all weights",
            "leave one of them out",
        ),
        Rule(
            "sparsity-pattern-with-zero-3",
            lambda j: j.sparsity_pattern is not None and j.zero == 3,
            "--sparsity-pattern {sparsity_pattern} compares neighbours, which with --zero 3 may lie on two ranks",
            "use --zero 2, or --sparsity",
        ),
        Rule(
            "sparsity-with-tp",
            lambda j: prunes(j) and j.tp > 1,
            "not implemented: --tp {tp} cuts matrices by rows and columns, and {pruning_flag} compares the weights of"
            " whole matrices or of ZeRO's shards",
            "use --dp, with or without --zero",
            FLAG,
        ),
        Rule(
            "sparsity-scope-in-a-pipeline",
            lambda j: prunes(j) and j.pp > 1 and j.sparsity_scope == "global",
            "not implemented: --sparsity-scope global compares the weights of all layers, and with --pp {pp} stages do"
            " not tell each other about theirs",
            "use --sparsity-scope layer",
        ),
        Rule(
            "sparsity-in-an-asynchronous-pipeline",
            lambda j: prunes(j) and j.asynchronous,
            "{pruning_flag} finds masks at the end of a step, and --schedule {schedule} updates its weights on the way",
            "use a synchronous one, such as 1f1b",
            FLAG,
        ),
        Rule(
            "sparsity-with-experts",
            lambda j: prunes(j) and j.experts,
            "--experts {experts} has its weights in matrices of all experts, and {pruning_flag} prunes linear layers",
            "leave one of them out",
            FLAG,
        ),
        Rule(
            "sparsity-with-compression",
            lambda j: prunes(j) and j.optional("compression") not in (None, "none"),
            "--compression {compression} takes the place of an all-reduce of gradients, and so does {pruning_flag},"
            " which sends those of the kept weights",
            "leave one of them out",
            FLAG,
        ),
        Rule(
            "sparsity-with-offload",
            lambda j: prunes(j) and j.optional("offload") == "optimizer",
            "--offload {offload} steps copies of the weights on the host, which {pruning_flag} does not set to zero",
            "use --offload activations, --zero 3 with --offload parameters, or leave it out",
            FLAG,
        ),
        Rule(
            "sparsity-with-local-steps",
            lambda j: prunes(j) and j.optional("local_steps"),
            "--local-steps {local_steps} gives replicas different weights, and with them {pruning_flag} different"
            " masks",
            "leave one of them out",
            FLAG,
        ),
        Rule(
            "sparsity-with-server",
            lambda j: prunes(j) and j.server,
            "not implemented: {pruning_flag} finds masks where weights are stepped, which with --strategy ps is on the"
            " servers",
            "use --strategy auto",
            FLAG,
        ),
        without_effect("sparsity_schedule", prunes, "--sparsity or --sparsity-pattern"),
        without_effect("sparsity_scope", prunes, "--sparsity"),
    )
    fixed = ("sparsity", "sparsity_schedule", "sparsity_scope", "sparsity_pattern")
    jumps = "--sparsity"

    @classmethod
    def used_by(cls, config: Any) -> bool:
        return prunes(config)

    @classmethod
    def check(cls, job: Any) -> None:
        pruning.check_prunable(job.small_model(), pruning_of(job)[1])

    @classmethod
    def notices(cls, job: Any) -> list[str]:
        if pruning_of(job)[0].end <= job.steps:
            return []
        schedule = f"--sparsity-schedule {setting(job, 'sparsity_schedule')}"
        return [f"{pruning_flag(job)} is not reached, because {schedule} ends after --steps {job.steps}"]

    @classmethod
    def needs_values(cls, config: Any) -> dict[str, Any]:
        needs: dict[str, Any] = {}
        # The number of kept weights of a whole matrix is known. Of a shard it depends on values.
        if prunes(config) and config.sparsity_scope == "global":
            needs["--sparsity-scope"] = "global"
        if prunes(config) and config.zero:
            needs["--sparsity with --zero"] = config.zero
        return needs

    def build(self, job: Any, comm: Comm | None) -> None:
        self.steps, self.matrices = job.config.steps, pruning.prunable(job.model)

    def axis_made(self, axis: Any) -> None:
        pruner = self._pruner([name for flat in axis.flats for name in flat.names], pruning.shard_comm(axis))
        axis.techniques[self.key] = pruner
        pruning.leave_out(axis, pruner)

    def after_backward(self, strategy: Any, step: int) -> None:
        """Set the gradients of pruned weights to zero, before they are clipped: they belong to no weight."""
        for axis in strategy.data_axes:
            self._of(axis).apply(pruning.parts(axis.gradient_shards()))

    def after_update(self, moment: Moment) -> None:
        """Set what is pruned to zero, with new masks when the schedule says so."""
        for axis in moment.strategy.data_axes:
            pruner, done = self._of(axis), moment.steps.stop
            pruner.prune(done, pruning.parts(axis.weights()))
            axis.updated()
            if pruner.schedule.is_due(done):
                pruning.exchange_masks(axis, pruner)

    # --- checkpoints --------------------------------------------------------------------------------------------------

    def shards(self, axis: Any) -> dict[str, list[Any]]:
        masks = self._of(axis).masks
        # None before the first ones are found.
        held = [shard for shard in axis.weights() if shard.parameter.name in masks]
        return {MASKS: [shard._replace(values=masks[shard.parameter.name].values) for shard in held]}

    def kept(self, axis: Any) -> dict[str, int]:
        """Of pruned weights the kept ones are stored, and bits in place of masks."""
        zeros, masks = self._of(axis).zeros, self.shards(axis)[MASKS]
        kept = {mask.parameter.name: mask.values.size - zeros[mask.parameter.name] for mask in masks}
        return {f"{kind}/{name}": number for name, number in kept.items() for kind in ("weights", MASKS)}

    def shards_after(self, axis: Any, done: int) -> dict[str, tuple[str, list[Any]]]:
        pruner = self._of(axis)
        masked = done >= pruner.schedule.begin
        return {MASKS: ("bool", [s for s in axis.weights() if masked and s.parameter.name in pruner.matrices])}

    def load_shards(self, axis: Any, shards: Mapping[str, Sequence[Any]]) -> None:
        pruner = self._of(axis)
        pruner.load(pruning.parts(shards[MASKS]))
        pruning.exchange_masks(axis, pruner)

    # --- results and bytes --------------------------------------------------------------------------------------------

    def record(self, job: Any, done: int) -> dict[str, Any]:
        pruned = self._pruned(done)
        return {"sparsity": pruned["pruned"] / pruned["of"]}

    def result(self) -> dict[str, Any]:
        return {"sparsity": self._pruned(self.steps)}

    def lines(self, result: dict[str, Any]) -> list[str]:
        zeros, of = result["sparsity"]["pruned"], result["sparsity"]["of"]
        return [f"pruned {zeros:,} of {of:,} weights of linear layers ({zeros / of:.1%})"]

    def sizes(self, axis: Any) -> dict[str, Any]:
        """Return the elements of each weight that may be pruned, and those of ZeRO 3's units that have such weights."""
        pruner = self._of(axis)
        units = sum(unit.flat.padded_numel for unit in pruning.prunable_units(axis, pruner))
        return {"prunable": [matrix.size for matrix in pruner.matrices.values()], "masked": units}

    def bytes_of_axis(self, run: Run, axis: AxisRun) -> dict[str, int]:
        schedule, _ = pruning_of(run.config)
        together = run.config.sparsity_scope == "global" and run.config.sparsity_pattern is None
        sizes, units = axis.sizes.more["prunable"], axis.sizes.more["masked"]
        # What is pruned is not reduced.
        compared = [sum(sizes)] if together else sizes
        zeros = sum(schedule.pruned(size, run.done + step) for step in range(run.steps) for size in compared)
        spared = gradient_volume(run.config.zero, axis.reductions * zeros, axis.ranks, run.config.dp_replicate)
        sent = {"gradient_reduce": -axis.groups * spared * run.itemsize}
        if run.config.zero == 3:
            # Ranks compare magnitudes, and exchange masks, a bit for each element of the units with such weights; a
            # resumed job exchanges the masks of its checkpoint, too.
            shards = axis.ranks // run.config.dp_replicate
            times = sum(schedule.is_due(run.done + step + 1) for step in range(run.steps)) if sizes else 0
            once = pruning.selection_bytes(len(sizes), len(compared), run.itemsize, shards)
            masks = (times + bool(run.done)) * (shards - 1) * (units // 8)
            sent["pruning"] = axis.groups * run.config.dp_replicate * (times * once + masks)
        return sent

    # --- what the hooks share -----------------------------------------------------------------------------------------

    def _of(self, axis: Any) -> "pruning.Pruner":
        pruner: pruning.Pruner = axis.techniques[self.key]
        return pruner

    def _pruner(self, names: Sequence[str], comm: Comm | None = None) -> "pruning.Pruner":
        """Return the pruner of the parameters with these names. comm: the ranks that hold shards of them."""
        schedule, pattern = pruning_of(self.settings)
        matrices = {name: matrix for name, matrix in self.matrices.items() if name in set(names)}
        return pruning.Pruner(matrices, schedule, self.settings.sparsity_scope, pattern, comm)

    def _pruned(self, done: int) -> dict[str, int]:
        """Return how many weights are pruned after `done` steps, and of how many."""
        pruner = self._pruner(list(self.matrices))
        return {"pruned": sum(pruner.pruned(done)), "of": sum(matrix.size for matrix in self.matrices.values())}
