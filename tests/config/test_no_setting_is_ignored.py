"""No setting is ignored: of two settings together each changes the run, or is refused, or a line names it.

Each pair is a job of three steps on a few hundred weights. What it does is recorded: losses, weights, messages, memory,
virtual time, files. The same job without one of the two settings must differ in that, unless a rule refuses the pair or
a notice names the setting. Nothing here knows the rules, so a rule that is missing is found.
"""

import itertools
import shutil
import tempfile
from functools import lru_cache
from pathlib import Path

import numpy as np
import pytest

from minidist.base.traces import sequences
from minidist.comm import SimWorld
from minidist.core.base.errors import MinidistError, UsageError
from minidist.job.checkpoint.resume import check_saving
from minidist.job.config.rules import check_rules, notices
from minidist.job.config.train_config import TrainConfig, flag, resolve_batches, resolve_dims
from minidist.job.train.job import Job
from minidist.job.train.trainer import train
from minidist.techniques import ranks_beside
from tests.cases import has_settings

BASE = {"layers": 2, "width": 8, "heads": 2, "context": 8, "data": "markov", "steps": 3, "micro_batch": 2, "lr": 0.01}
FP16, SERVER, EXPERTS = {"precision": "fp16"}, {"strategy": "ps", "dp": 4, "consistency": "asp"}, {"experts": 2}
SPARSE = {"sparsity": 0.5, "sparsity_schedule": "1"}
STUDENT = {"distill_from": "a teacher"}
ROUNDS = {"local_steps": 1, "dp": 2}
STREAMED = {"local_steps": 2, "dp": 2, "outer_optimizer": "nesterov"}
SHARDED, CUT = {"zero": 3, "dp": 2, "layers": 6}, {"pp": 2}

# A value of each setting that is not its default, with the settings that it needs.
IMAGES = {"model": "cnn", "data": "glyphs", "heads": 4, "context": 64, "layers": 3, "width": 4}
VALUES = {
    "model": {"model": "llama"},
    "layers": {"layers": 3},
    "width": {"width": 12},
    "heads": {"heads": 4},
    "kv_heads": {"kv_heads": 1, "model": "llama"},
    "ffn": {"ffn": 96, "model": "llama"},
    "context": {"context": 6},
    "dropout": {"dropout": 0.5},
    "attention_dropout": {"attention_dropout": 0.5},
    "experts": EXPERTS,
    "top_k": {"top_k": 2, **EXPERTS},
    "capacity_factor": {"capacity_factor": 0.3, **EXPERTS},
    "aux_loss_weight": {"aux_loss_weight": 1.0, **EXPERTS},
    "batch_norm": {"batch_norm": "none", **IMAGES},
    "data": {"data": "pydoc"},
    "prefetch_batches": {"prefetch_batches": 1},
    "loader_workers": {"loader_workers": 1},
    "steps": {"steps": 4},
    "optimizer": {"optimizer": "sgd"},
    "lr": {"lr": 0.02},
    "momentum": {"momentum": 0.5, "optimizer": "sgd"},
    "trust_coefficient": {"trust_coefficient": 0.1, "optimizer": "lars"},
    "orthogonalize": {"orthogonalize": "everywhere", "optimizer": "muon", "momentum": 0.5, "dp": 2},
    "nesterov": {"nesterov": True, "momentum": 0.5, "optimizer": "sgd"},
    "betas": {"betas": "0.5,0.5"},
    "eps": {"eps": 0.1},
    "weight_decay": {"weight_decay": 0.5},
    "warmup": {"warmup": 3, "steps": 5},
    "warmup_curve": {"warmup_curve": "deepspeed-log", "steps": 5},
    "warmup_start": {"warmup_start": 0.5, "warmup_curve": "deepspeed-linear", "steps": 5},
    "decay": {"decay": "cosine"},
    "decay_steps": {"decay_steps": 6, "decay": "linear"},
    "final_lr": {"final_lr": 0.5, "decay": "linear"},
    "clip": {"clip": 0.01},
    "seed": {"seed": 1},
    "global_batch": {"global_batch": 24, "micro_batch": None},
    "micro_batch": {"micro_batch": 3},
    "memory_budget": {"memory_budget": 1e6},  # `minidist train` replaces --micro-batch auto before a job begins
    "recompute_budget": {"recompute_budget": "budgets.json"},  # and this by --recompute
    "accumulation": {"accumulation": 2},
    "microbatches": {"microbatches": 2},
    "weights": {"weights": "3,1", "dp": 2},
    "adaptive_batch": {"adaptive_batch": 16, "dp": 2, "micro_batch": 1},
    "memory_budget_file": {"memory_budget_file": "tests/config/budget.txt", "global_batch": 4, "micro_batch": 1},
    "lr_scaling": {"lr_scaling": "linear", "base_batch": 1},
    "base_batch": {"base_batch": 1, "lr_scaling": "sqrt"},
    "dp": {"dp": 2},
    "pp": CUT,
    "schedule": {"schedule": "gpipe", **CUT},
    "chunks": {"chunks": 3, "schedule": "interleaved", "layers": 6, **CUT},
    "replicas": {"replicas": "2,1", "pp": 3, "schedule": "pipedream", "model": "llama"},
    "partition": {"partition": "1,2", "layers": 3, **CUT},
    "repartition_every": {"repartition_every": 2, "layers": 3, **CUT},
    "cp": {"cp": 2},
    "attention": {"attention": "ulysses", "cp": 2},
    "ulysses": {"ulysses": 4, "attention": "ulysses-ring", "cp": 4, "heads": 4},
    "attention: all-gather": {"attention": "all-gather", "cp": 2},
    "document_separator": {"document_separator": 3},
    "tp": {"tp": 2},
    "sequence_parallel": {"sequence_parallel": True, "tp": 2},
    "ep": {"ep": 2, "dp": 2, **EXPERTS},
    "strategy": {"strategy": "ps"},
    "servers": {"servers": 2, "strategy": "ps"},
    "consistency": SERVER,
    "staleness_aware": {"staleness_aware": True, **SERVER},
    "zero": {"zero": 2, "dp": 2},
    "reduction": {"reduction": "ordered", "dp": 2},
    "compression": {"compression": "sign", "dp": 2},
    "local_steps": {"local_steps": 2, "dp": 2},
    "outer_optimizer": {"outer_optimizer": "nesterov", **ROUNDS},
    "outer_lr": {"outer_lr": 0.5, "outer_optimizer": "nesterov", **ROUNDS},
    "outer_momentum": {"outer_momentum": 0.5, "outer_optimizer": "nesterov", **ROUNDS},
    "outer_fragments": {"outer_fragments": 2, **STREAMED},
    "outer_delay": {"outer_delay": 1, **STREAMED},
    "outer_mixing": {"outer_mixing": 0.5, **STREAMED},
    "bucket_cap_mb": {"bucket_cap_mb": 0.001, "dp": 2},
    "synchronize_each": {"synchronize_each": True, "dp": 2, "accumulation": 2},
    "reduce_bucket_size": {"reduce_bucket_size": 100, "zero": 1, "dp": 2},
    "prefetch": {"prefetch": 0, **SHARDED},
    "reshard_after_forward": {"reshard_after_forward": "false", **SHARDED},
    "persistence_threshold": {"persistence_threshold": 50, **SHARDED},
    "dp_replicate": {"dp_replicate": 2, "zero": 3, "dp": 4},
    "precision": FP16,
    "loss_scale": {"loss_scale": 8.0, **FP16},
    "static_loss_scale": {"static_loss_scale": True, **FP16},
    "loss_scale_interval": {"loss_scale_interval": 1, **FP16},
    "loss_scale_hysteresis": {"loss_scale_hysteresis": 1, **FP16},
    "loss_scale_floor": {"loss_scale_floor": 0.5, **FP16},
    "loss_scale_floor_limit": {"loss_scale_floor_limit": 1, **FP16},
    "quantize": {"quantize": "int8"},
    "quantize_weights": {"quantize_weights": "per-tensor", "quantize": "int8"},
    "quantize_observer": {"quantize_observer": "min-max", "quantize": "int8"},
    "sparsity": SPARSE,
    "sparsity_schedule": {**SPARSE, "sparsity_schedule": "2"},
    "sparsity_scope": {"sparsity_scope": "global", **SPARSE},
    "sparsity_pattern": {"sparsity_pattern": "2:4", "sparsity_schedule": "1"},
    "distill_from": STUDENT,
    "temperature": {"temperature": 8.0, **STUDENT},
    "distill_weight": {"distill_weight": 1.0, **STUDENT},
    "teacher_precision": {"teacher_precision": "fp64", **STUDENT},
    "teacher_cache": {"teacher_cache": "new", **STUDENT},
    "shard_teacher": {"shard_teacher": True, "dp": 2, **STUDENT},
    "teacher_ranks": {"teacher_ranks": 1, "dp": 2, **STUDENT},
    "shard_teacher: alone": {"shard_teacher": True, **STUDENT},
    "recompute": {"recompute": "full"},
    "offload": {"offload": "optimizer"},
    "save": {"save": "new"},
    "every": {"every": 2, "save": "new"},
    "resume": {"resume": True, "save": "used"},
    "overwrite": {"overwrite": True, "save": "used"},
    "init_from": {"init_from": "used"},
    "keep": {"keep": 1, "every": 1, "save": "new"},
    "from_step": {"from_step": 1, "resume": True, "save": "used"},
    "extension": {"extension": "tests/techniques/halved.py:Halved"},
    "noise_scale": {"noise_scale": True, "dp": 2},
    "evaluate_every": {"evaluate_every": 3},
    "check_replicas": {"check_replicas": True, "dp": 2},
    "check_data": {"check_data": True, "dp": 2},
    "check_layouts": {"check_layouts": True, "tp": 2},
    # Other values that run different code, and what needs several ranks on one.
    "model: mlp": {"model": "mlp", "data": "glyphs", "heads": 4, "context": 64, "layers": 3},
    "model: cnn": IMAGES,
    "batch_norm: sync": {"batch_norm": "sync", "dp": 2, **IMAGES},
    "batch_norm: sync alone": {"batch_norm": "sync", **IMAGES},
    "zero: 1": {"zero": 1, "dp": 2},
    "optimizer: lamb": {"optimizer": "lamb"},
    "optimizer: muon": {"optimizer": "muon", "momentum": 0.5},
    "zero: 3": SHARDED,
    "schedule: pipedream": {"schedule": "pipedream", **CUT},
    "schedule: pipedream-2bw": {"schedule": "pipedream-2bw", **CUT},
    "recompute: selective": {"recompute": "selective"},
    "recompute: stages": {"recompute": "stages:0", "pp": 2, "microbatches": 2},
    "offload: activations": {"offload": "activations", "recompute": "full"},
    "offload: saved tensors": {"offload": "activations"},
    "offload: parameters": {"offload": "parameters", **SHARDED},
    "compression: bf16": {"compression": "bf16", "dp": 2},
    "compression: zero 1": {"compression": "sign", "zero": 1, "dp": 2},
    "compression: zero 2": {"compression": "sign", "zero": 2, "dp": 2},
    "noise_scale: shards": {"noise_scale": True, "zero": 1, "dp": 2},
    "ep: zero 3": {"ep": 2, "dp": 2, "zero": 3, **EXPERTS},
    "weights: measured": {"weights": "measured:1", "dp": 2},
    "weights: alone": {"weights": "2"},
    "zero: alone": {"zero": 2},
    "reduction: auto": {"reduction": "auto", "dp": 2},
    "reduction: alone": {"reduction": "ordered"},
    "compression: alone": {"compression": "sign"},
    "local_steps: alone": {"local_steps": 2},
    "bucket_cap_mb: alone": {"bucket_cap_mb": 0.001},
    "synchronize_each: alone": {"synchronize_each": True, "accumulation": 2},
    "synchronize_each: one micro-batch": {"synchronize_each": True, "dp": 2},
    "reduce_bucket_size: alone": {"reduce_bucket_size": 100, "zero": 1},
    "prefetch: alone": {"prefetch": 0, "zero": 3},
    "check_replicas: alone": {"check_replicas": True},
    "attention: alone": {"attention": "ulysses"},
    "evaluate_every: never": {"evaluate_every": 9},
    "repartition_every: never": {"repartition_every": 3, "layers": 3, **CUT},
    "every: never": {"every": 9, "save": "new"},
    "sparsity: never": {"sparsity": 0.5, "sparsity_schedule": "7"},
}
VALUES = {name: values for name, values in VALUES.items() if has_settings(values)}
# What a run that comes first has not.
NEW = {"keep": None, "from_step": None}
PAIRS = [*((name, name) for name in VALUES), *itertools.combinations(VALUES, 2)]

# (setting, its value, another setting, its value) that changes nothing although it is honoured; the reason.
HONOURED = {
    ("prefetch_batches", 1, "loader_workers", 1): "how many batches wait changes none of them",
    ("accumulation", 2, "microbatches", 2): "two names of one number",
    ("microbatches", 2, "accumulation", 2): "two names of one number",
    ("reduction", "ordered", "sparsity", 0.5): "two ranks add two numbers in either order",
    ("reduction", "ordered", "sparsity_pattern", "2:4"): "two ranks add two numbers in either order",
    ("sparsity_scope", "global", "model", "cnn"): "a CNN has one linear layer, so all together are that one",
    ("reduction", "ordered", "pp", 2): "a stage with a tied weight is reduced in order in any case",
    ("reduction", "auto", "pp", 2): "a stage with a tied weight is reduced in order in any case",
}


def ranks_of(config):
    return resolve_dims(config).ranks + ranks_beside(config)


@lru_cache(None)
def what_happens(*settings):
    """Return all that a run of three steps shows, as one text; UsageError when the rules refuse the job."""
    config = TrainConfig.make(**{**BASE, **dict(settings)})
    ranks = ranks_of(config)
    check_rules(config, resolve_batches(config, ranks))

    # Checkpoints go into a separate directory, "used" has one of an earlier run.
    directory = Path(tempfile.mkdtemp()) if config.save or config.init_from or config.distill_from else None
    if config.distill_from:
        same = {name: getattr(config, name) for name in ("model", "data", "context", "heads", "seed")}
        path = str(directory / "teacher")
        SimWorld(1).run(train, TrainConfig.make(**{**BASE, **same, "width": 24, "steps": 1, "save": path}))
        stored = {"teacher_cache": str(directory / "cache")} if config.teacher_cache else {}
        config = config.model_copy(update={"distill_from": path, **stored})
    if config.init_from:
        source = {"save": str(directory / "source"), "steps": 2, "resume": False, "overwrite": False, "every": 1, **NEW}
        SimWorld(ranks).run(train, config.model_copy(update={**source, "init_from": None}))
        config = config.model_copy(update={"init_from": str(directory / "source")})
    if config.save:
        if config.save == "used":
            earlier = {"save": str(directory), "steps": 2, "resume": False, "overwrite": False, "every": 1, **NEW}
            before = config.model_copy(update=earlier)
            SimWorld(ranks).run(train, before)
        config = config.model_copy(update={"save": str(directory)})

    seen = []

    def look(state):
        job = state.job
        # The settings of the loss scale show only after an overflow, and a thread that reads ahead only here.
        scalers = [vars(extension.scaler) for extension in job.extensions if hasattr(extension, "scaler")]
        seen.append((state.rank, state.step, state.loss, job.lr_factor(state.step), str(scalers)))
        seen.append(
            (
                state.held_out_losses.get("held_out_loss"),
                type(job.sampler).__name__,
                getattr(job.sampler, "served", None),
            )
        )

    look.reads_tensors = False
    world = SimWorld(ranks)
    try:
        if config.save is not None:
            check_saving(config)
        results = world.run(train, config, [look])
    except MinidistError as error:
        return str(error)
    finally:
        files = sorted(map(str, directory.rglob("*"))) if directory is not None else []
        if directory is not None:
            shutil.rmtree(directory)
    files = [file.removeprefix(str(directory)) for file in files]
    messages = [sequences(trace) for trace in world.traces]
    return str([results, messages, [trace.spans for trace in world.traces], seen, files])


def together(first, second):
    """Return the settings of both; None where they contradict each other."""
    a, b = VALUES[first], VALUES[second]
    return None if any(a[name] != b[name] for name in a.keys() & b.keys()) else {**a, **b}


def ignored(first, second):
    """Return the settings of a pair that the job ignores without naming them."""
    values = together(first, second)
    if values is None:
        return []
    try:
        run = what_happens(*sorted(values.items()))
    except UsageError:
        return []
    config = TrainConfig.make(**{**BASE, **values})
    lines = " ".join(notices(config, resolve_batches(config, ranks_of(config))))
    return [
        f"{flag(name)} {values[name]} in {values}"
        for name in sorted({first.split(":")[0], second.split(":")[0]})
        if f"{flag(name)} " not in f"{lines} "
        and not any((name, values[name], other, value) in HONOURED for other, value in values.items())
        and run == without(values, name)
    ]


def without(values, name):
    """Return what happens without a setting; "" when the others are refused without it, so that it has an effect."""
    try:
        return what_happens(*sorted((other, value) for other, value in values.items() if other != name))
    except UsageError:
        return ""


def test_every_setting_has_a_value_here():
    assert set(VALUES) >= set(TrainConfig.model_fields)
    for name, values in VALUES.items():
        setting = name.split(":")[0]
        assert values[setting] != {**{n: f.default for n, f in TrainConfig.model_fields.items()}, **BASE}[setting]


def sampled():
    """Return pairs in which every value occurs, chosen by chance once and for all."""
    order = np.random.default_rng(0).permutation(list(VALUES)).tolist()
    return [(*order[i : i + 2], order[0])[:2] for i in range(0, len(order), 2)]


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("first", "second"), sampled())
def test_no_setting_is_ignored(first, second):
    assert ignored(first, second) == []


@pytest.mark.exhaustive
@pytest.mark.parametrize("first", VALUES)
def test_no_setting_is_ignored_in_any_pair(first):
    assert [line for one, other in PAIRS if one == first for line in ignored(one, other)] == []


@pytest.mark.parametrize(
    ("first", "second"),
    [("zero: 3", "check_replicas"), ("strategy", "prefetch_batches"), ("model: mlp", "context"), ("cp", "attention")]
    + [("noise_scale", "memory_budget_file"), ("noise_scale", "adaptive_batch")]
    + [("weights: measured", "memory_budget_file")],
)
def test_pairs_that_were_ignored_once(first, second):
    assert ignored(first, second) == []


def test_a_setting_that_nothing_reads_is_found(monkeypatch):
    original = Job.optimizer

    def forgets_eps(job, *more):
        kind, settings = original(job, *more)
        return kind, {name: value for name, value in settings.items() if name != "eps"}

    monkeypatch.setattr(Job, "optimizer", forgets_eps)
    what_happens.cache_clear()
    try:
        assert ignored("eps", "seed") == ["--eps 0.1 in {'eps': 0.1, 'seed': 1}"]
    finally:
        what_happens.cache_clear()
