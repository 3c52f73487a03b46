"""What `minidist train` runs is the core: below the core's loop, the layouts of the papers enter the core's files.

A crossing is a function outside the core that a function of the core has called. What a job adds to a step, and the
checks that are on in every run, are crossings with a name; nothing else is.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

import minidist
from minidist.core.base.errors import UsageError
from minidist.core.comm.sim.world import Sim
from minidist.core.nn import GPT, GPTConfig
from minidist.core.optim import AdamW
from minidist.core.train.parallelize import Loop, parallelize
from minidist.core.train.task import ParallelLayout, Task
from minidist.job.config.train_config import TrainConfig
from minidist.job.train.trainer import train

PACKAGE = str(Path(minidist.__file__).parent)
CORE_FILES = {str(path) for path in Path(PACKAGE, "core").rglob("*.py")}

GPT_JOB = {"data": "markov", "layers": 1, "width": 8, "heads": 2, "context": 4, "steps": 2, "micro_batch": 2}
DEEP_JOB = {**GPT_JOB, "layers": 4, "pp": 2, "microbatches": 2}
JOBS = {
    "DDP": {**GPT_JOB, "dp": 2},
    "ZeRO 1": {**GPT_JOB, "dp": 2, "zero": 1},
    "ZeRO 2": {**GPT_JOB, "dp": 2, "zero": 2},
    "FSDP": {**GPT_JOB, "dp": 2, "zero": 3},
    "TP": {**GPT_JOB, "tp": 2},
    "CP": {**GPT_JOB, "cp": 2},
    "EP": {**GPT_JOB, "dp": 2, "ep": 2, "experts": 2},
    "GPipe": {**DEEP_JOB, "schedule": "gpipe"},
    "1F1B": DEEP_JOB,
    "ZB-H1": {**DEEP_JOB, "schedule": "zb-h1"},
    "3-D": {**DEEP_JOB, "dp": 2, "tp": 2, "zero": 1},
}

# What a job adds to a method of the core and then calls it: what the core does below them counts.
OVERRIDES = {
    "job/train/job.py Job.coordinates",
    "job/train/strategies/pipeline.py PipelineParallel.forward_backward",
    "job/train/strategies/mesh.py MeshStrategy.step",
    "job/train/strategies/mesh.py MeshStrategy.update",
    *(f"pipeline/runtime/pipeline.py Pipeline.{name}" for name in ("begin", "compute", "execute", "forward", "know")),
    *(f"pipeline/runtime/pipeline.py Pipeline.{name}" for name in ("_dry_run", "outputs_of", "sum_gradients")),
}
# What a job has in place of a method that the core leaves open: its batches, and its part of a step.
OF_JOBS = ("divisor", "first_row", "is_language_model", "lr_factor", "micro_batch", "microbatches", "scale", "scaled")
OF_RUNS = ("after_forward_backward", "after_step", "before_step", "is_updated")
HOOKS = {
    *(f"job/train/job.py Job.{name}" for name in OF_JOBS),
    *(f"job/train/trainer.py Run.{name}" for name in OF_RUNS),
}
# Files that watch messages and modules, record them, and refuse; `SimWorld` is the core's world with all of these.
CHECKS = {
    "nn/ops/in_place.py",
    "base/limits.py",
    "base/memory.py",
    "base/traces.py",
    "base/watchers.py",
    "collectives/call_checks.py",
    "nn/ops/refusals.py",
    "nn/refusals.py",
    "optim/checks.py",
    "parallel/replica_guard.py",
    "pipeline/runtime/refusals.py",
}
# The counter of operations; dropout, whose probability is 0 here; the additions of `minidist.Pipeline`, and what says
# when a message has arrived; a dtype by its name; the parts of an output that is not a tensor.
STEPPED_THROUGH = {
    "base/arrays.py",
    "base/coordinates.py",
    "base/flop_counter.py",
    "nn/dropout.py",
    "nn/ops/objects.py",
    "pipeline/runtime/early_release.py",
    "pipeline/runtime/pipeline.py",
}
# What is called once in a process, and then known: the package's additions to the core are found by name.
ONCE = {"additions.py"}


def crossings(config):
    """Train, and return the functions outside the core that the core has called below its loop."""
    found, known = set(), set()

    def watch(frame, event, argument):
        code = frame.f_code
        if event == "call" and code not in known and code.co_filename.startswith(PACKAGE):
            if code.co_filename in CORE_FILES:
                known.add(code)
            elif comes_from_the_loop(frame.f_back):
                known.add(code)
                found.add(name_of(code))

    # All simulated ranks run in this thread.
    sys.setprofile(watch)
    try:
        Sim(ranks_of(config)).run(train, TrainConfig.make(**config))
    finally:
        sys.setprofile(None)
    return found


def name_of(code):
    return f"{Path(code.co_filename).relative_to(PACKAGE)} {code.co_qualname}".removesuffix(".<locals>.<listcomp>")


def comes_from_the_loop(frame):
    """Return whether the core's loop has called a frame by way of the core and of overrides alone."""
    while frame is not None and frame.f_code is not Loop.train.__code__:
        name = frame.f_code.co_filename
        if name.startswith(PACKAGE) and name not in CORE_FILES and name_of(frame.f_code) not in OVERRIDES:
            return False
        frame = frame.f_back
    return frame is not None


def ranks_of(config):
    return config.get("dp", 1) * config.get("tp", 1) * config.get("cp", 1) * config.get("pp", 1)


def test_a_job_of_any_layout_runs_the_core_and_named_hooks_alone():
    found = {layout: crossings(config) for layout, config in JOBS.items()}
    named = OVERRIDES | HOOKS
    files = {layout: {name.split()[0] for name in names - named} for layout, names in found.items()}
    assert {layout: more for layout, names in files.items() if (more := names - CHECKS - STEPPED_THROUGH - ONCE)} == {}
    # What nothing calls any more leaves the lists.
    assert named - set().union(*found.values()) == set()
    assert set().union(*files.values()) >= CHECKS | STEPPED_THROUGH


@dataclass(kw_only=True)
class Text(Task):
    """Random tokens for a GPT: a task that needs the core alone. rows: of a micro-batch; replicas: of the layout."""

    rows: int
    replicas: int
    microbatches = 2

    @property
    def divisor(self):
        return float(self.rows * self.microbatches * self.replicas * self.context)

    def first_row(self, number):
        return number * self.rows

    def whole_batch(self, step, number):
        first = self.first_row(number)
        tokens = np.random.default_rng(step).integers(0, 8, (8, self.context + 1))[first : first + self.rows]
        return tokens[:, :-1], tokens[:, 1:]

    def optimizer(self, group):
        return AdamW, {"lr": 0.1}


def losses_of(comm, layout):
    """Train for two steps of 8 rows, and return the losses."""
    model = GPT(GPTConfig(8, 4, 8, 4, 2), dtype=np.float64, seed=0)
    rows = 8 // (layout.dp * Text.microbatches)
    task = Text(model=model, dtype=np.dtype(float), context=4, rows=rows, replicas=layout.dp)
    return Loop(parallelize(task, comm, layout)).train(range(2))


def test_a_program_of_the_core_alone_trains_in_every_layout_as_one_device_does():
    (alone,) = Sim(1).run(losses_of, ParallelLayout())
    layouts = [
        ParallelLayout(dp=2, tp=2, zero=1, sequence_parallel=True),
        ParallelLayout(dp=2, cp=2, zero=3),
        ParallelLayout(pp=2, dp=2, zero=2, schedule="zb-h1"),
        ParallelLayout(pp=2, dp=2, tp=2, schedule="interleaved", chunks=2),
    ]
    for layout in layouts:
        for losses in Sim(layout.ranks).run(losses_of, layout):
            np.testing.assert_allclose(losses, alone, rtol=1e-12, err_msg=str(layout))


def test_a_layout_that_does_not_fit_is_refused_in_one_sentence():
    for ranks, layout, words in (
        (2, {"dp": 2, "tp": 2}, "dp=2, cp=1, tp=2.* is for 4 ranks, and there are 2; make"),
        (3, {"dp": 3, "ep": 2}, "dp=3, ep=2.: ep divides dp; choose a divisor of 3"),
        (4, {"dp": 4, "ep": 0}, "dp=4, ep=0.: ep divides dp; choose a divisor of 4"),
        (2, {"dp": 2, "zero": 4}, r"ParallelLayout\(zero=4\); the stage of ZeRO is 0, 1, 2 or 3"),
    ):
        with pytest.raises(UsageError, match=words):
            Sim(ranks).run(lambda comm, layout: losses_of(comm, ParallelLayout(**layout)), layout)
