"""Settings that do not combine are one sentence with the numbers and the nearest settings that do."""

import re
from pathlib import Path

import numpy as np
import pytest

from minidist.comm import SimWorld
from minidist.comm.launching import execute
from minidist.commands.runner import run_comparison, run_training
from minidist.core.base.errors import UsageError
from minidist.core.collectives.calls import ALGORITHMS
from minidist.job.config.resolved_job import ResolvedJob
from minidist.job.config.rules import RULES, as_markdown, check_rules, notices
from minidist.job.config.train_config import TrainConfig, resolve_batches, resolve_dims
from minidist.job.equality.compare import tier_of
from minidist.job.train.start import number_of_ranks
from minidist.job.train.trainer import train
from minidist.techniques import ranks_beside
from tests.cases import absent_folders, each

PIPEDREAM = {"pp": 2, "schedule": "pipedream", "model": "llama", "microbatches": 1}
SERVER = {"strategy": "ps", "dp": 2}
INT8 = {"quantize": "int8"}
STUDENT = {"distill_from": "x"}
SPARSE = {"sparsity": 0.8, "sparsity_schedule": "2,6"}
FILE = """
from minidist.pipeline.schedules import get_schedule

def updating(ranks, microbatches):
    return get_schedule("pipedream").plan(ranks, microbatches)
"""

NESTEROV = {"local_steps": 2, "dp": 2, "outer_optimizer": "nesterov"}

# rule -> settings that break it and no rule above it
CASES = {
    "vocabulary-of-the-data": {"data": "tokens:damaged.u32", "width": 1024},
    "memory-of-the-machine": {"layers": 9_999, "width": 8192},
    "tokens-for-language-models": {"data": "glyphs"},
    "samples-for-classifiers": {"model": "mlp", "data": "markov"},
    "images-for-cnn": {"model": "cnn", "data": "npz:rows.npz"},
    "width-by-heads": {"model": "llama", "width": 12},
    "momentum-by-optimizer": {"momentum": 0.9},
    "nesterov-by-optimizer": {"nesterov": True},
    "muon-needs-momentum": {"optimizer": "muon"},
    "muon-with-offload": {"optimizer": "muon", "momentum": 0.9, "offload": "optimizer"},
    "orthogonalize-without-effect": {"orthogonalize": "everywhere"},
    "nesterov-needs-momentum": {"nesterov": True, "optimizer": "sgd"},
    "trust-coefficient-by-optimizer": {"trust_coefficient": 0.1, "optimizer": "lamb"},
    "weight-decay-by-optimizer": {
        "optimizer": f"{Path(__file__).with_name('without_decay.py')}:WithoutDecay",
        "weight_decay": 0.1,
    },
    "trust-ratios-with-offload": {"optimizer": "lamb", "offload": "optimizer"},
    "own-model-with-pp": {"model": "mine.py:net", "pp": 2},
    "own-model-with-cp": {"model": "mine.py:net", "cp": 2},
    "own-model-with-tp": {"model": "mine.py:net", "tp": 2},
    "own-model-with-recomputation": {"model": "mine.py:net", "recompute": "full"},
    "betas-by-optimizer": {"betas": "0.9,0.9", "optimizer": "rmsprop"},
    "eps-by-optimizer": {"eps": 1e-6, "optimizer": "sgd"},
    "selective-needs-attention": {"model": "cnn", "recompute": "selective"},
    "budget-needs-equal-blocks": {"model": "mlp", "recompute": "budget:5000"},
    "resume-needs-save": {"resume": True},
    "every-needs-save": {"every": 2},
    "overwrite-needs-save": {"overwrite": True},
    "keep-needs-every": {"keep": 2, "save": "x"},
    "from-step-needs-resume": {"from_step": 2, "save": "x"},
    "init-from-with-resume": {"resume": True, "save": "x", "init_from": "y"},
    "overwrite-with-resume": {"overwrite": True, "resume": True, "save": "x"},
    "compression-with-zero": {"compression": "sign", "zero": 3, "dp": 2},
    "cast-with-zero": {"compression": "fp16", "zero": 3, "dp": 2},
    "compression-with-reduction": {"compression": "fp16", "reduction": "ordered", "dp": 2},
    "reduction-is-no-all-reduce": {"reduction": "recursive_halving", "dp": 2},
    "reduction-is-no-reduce-scatter": {"reduction": "binomial", "dp": 2, "zero": 2},
    "reduction-of-shards-and-copies": {"reduction": "recursive_halving", "dp": 4, "zero": 3, "dp_replicate": 2},
    "reduction-with-sparsity": {"reduction": "naive", "dp": 2, "sparsity": 0.5},
    "reduction-with-local-steps": {"reduction": "auto", "dp": 2, "local_steps": 2},
    "compression-with-loss-scaling": {"compression": "sign", "precision": "fp16"},
    "quantization-in-half-precision": {**INT8, "precision": "bf16"},
    "quantization-with-zero-3": {**INT8, "zero": 3, "dp": 2},
    "quantization-with-experts": {**INT8, "experts": 2},
    "quantization-with-local-steps": {**INT8, "local_steps": 2, "dp": 2},
    "quantization-with-server": {**INT8, **SERVER},
    "sparsity-needs-schedule": {"sparsity": 0.5},
    "sparsity-or-pattern": {**SPARSE, "sparsity_pattern": "2:4"},
    "sparsity-pattern-at-once": {"sparsity_pattern": "2:4", "sparsity_schedule": "2,6"},
    "sparsity-scope-of-a-pattern": {"sparsity_pattern": "2:4", "sparsity_schedule": "2", "sparsity_scope": "global"},
    "sparsity-pattern-with-zero-3": {"sparsity_pattern": "2:4", "sparsity_schedule": "2", "zero": 3, "dp": 2},
    "sparsity-with-tp": {**SPARSE, "tp": 2},
    "sparsity-scope-in-a-pipeline": {**SPARSE, "sparsity_scope": "global", "pp": 2},
    "sparsity-in-an-asynchronous-pipeline": {**SPARSE, **PIPEDREAM},
    "sparsity-with-experts": {**SPARSE, "experts": 2},
    "sparsity-with-compression": {**SPARSE, "compression": "sign", "dp": 2},
    "sparsity-with-offload": {**SPARSE, "offload": "optimizer"},
    "sparsity-with-local-steps": {**SPARSE, "local_steps": 2, "dp": 2},
    "sparsity-with-server": {**SPARSE, **SERVER},
    "sparsity-schedule-without-effect": {"sparsity_schedule": "1,2"},
    "sparsity-scope-without-effect": {"sparsity_scope": "global"},
    "teacher-without-student": {**STUDENT, "dp": 2, "teacher_ranks": 3},
    "shard-teacher-in-a-pipeline": {**STUDENT, "shard_teacher": True, "pp": 2},
    "teacher-ranks-in-a-pipeline": {**STUDENT, "teacher_ranks": 1, "pp": 2},
    "shard-teacher-with-server": {**STUDENT, "shard_teacher": True, **SERVER},
    "teacher-ranks-with-server": {**STUDENT, "teacher_ranks": 1, **SERVER},
    "sharded-teacher-with-a-cache": {**STUDENT, "shard_teacher": True, "teacher_cache": "y"},
    "teacher-cache-without-effect": {"teacher_cache": "y"},
    "sharded-teacher-on-its-own-ranks": {**STUDENT, "shard_teacher": True, "teacher_ranks": 1},
    "temperature-without-effect": {"temperature": 3.0},
    "distill-weight-without-effect": {"distill_weight": 0.1},
    "teacher-precision-without-effect": {"teacher_precision": "bf16"},
    "shard-teacher-without-effect": {"shard_teacher": True},
    "teacher-ranks-without-effect": {"teacher_ranks": 1},
    "server-settings-without-server": {"servers": 2},
    "staleness-of-a-whole-clock": {**SERVER, "staleness_aware": True},
    "server-with-axes": {**SERVER, "zero": 1},
    "server-precision": {**SERVER, "precision": "fp16"},
    "server-with-clip": {**SERVER, "clip": 1.0, "servers": 2},
    "server-with-every": {**SERVER, "every": 1, "save": "x", "consistency": "asp"},
    "server-with-synchronize-each": {**SERVER, "synchronize_each": True},
    "server-with-check-replicas": {**SERVER, "check_replicas": True},
    "server-with-bucket-cap-mb": {**SERVER, "bucket_cap_mb": 1.0},
    "server-with-reduction": {**SERVER, "reduction": "ordered"},
    "server-with-offload": {**SERVER, "offload": "optimizer"},
    "uneven-rows-of-experts-in-a-pipeline": {
        "ep": 2,
        "dp": 2,
        "pp": 2,
        "experts": 2,
        "global_batch": 7,
        "microbatches": 2,
    },
    "uneven-rows-in-a-sharded-pipeline": {"zero": 3, "dp": 2, "pp": 2, "global_batch": 5, "microbatches": 2},
    "changing-batches-with-prefetch": {"weights": "measured:2", "dp": 2, "prefetch_batches": 1},
    "measured-weights-in-a-pipeline": {"weights": "measured:2", "dp": 2, "pp": 2},
    "adaptive-batch-by-a-file": {
        "adaptive_batch": 64,
        "dp": 2,
        "pp": 2,
        "schedule": "two.csv",
        "microbatches": 1,
        "global_batch": 2,
    },
    "changing-batches-with-server": {**SERVER, "weights": "measured:2"},
    "changing-batches-with-local-steps": {"local_steps": 2, "dp": 2, "weights": "measured:2"},
    "changing-batches-with-teacher-ranks": {**STUDENT, "dp": 2, "teacher_ranks": 1, "weights": "measured:2"},
    "memory-budget-file-with-batches-ahead": {"memory_budget_file": "budget", "loader_workers": 1},
    "memory-budget-file-with-measured-weights": {"memory_budget_file": "budget", "weights": "measured:2", "dp": 2},
    "memory-budget-file-with-adaptive-batch": {"memory_budget_file": "budget", "adaptive_batch": 16, "dp": 2},
    "memory-budget-file-without-steps-in-common": {"memory_budget_file": "budget", "pp": 2, "schedule": "pipedream"},
    "memory-budget-file-with-teacher-ranks": {**STUDENT, "dp": 2, "teacher_ranks": 1, "memory_budget_file": "budget"},
    "adaptive-batch-in-micro-batches": {"adaptive_batch": 20, "dp": 2},
    "noise-scale-needs-replicas": {"noise_scale": True},
    "noise-scale-needs-whole-gradients": {"noise_scale": True, "dp": 2, "synchronize_each": True},
    "local-steps-need-replicas": {"local_steps": 2, "dp": 2, "cp": 2},
    "local-steps-of-one-sharded-replica": {"local_steps": 2, "dp": 2, "zero": 1},
    "fragments-of-whole-replicas": {
        "local_steps": 2,
        "dp": 2,
        "tp": 2,
        "outer_optimizer": "nesterov",
        "outer_fragments": 2,
    },
    "local-steps-precision": {"local_steps": 2, "dp": 2, "precision": "bf16"},
    "local-steps-with-clip": {"local_steps": 2, "dp": 2, "clip": 1.0},
    "local-steps-saved-with-an-average": {"local_steps": 2, "dp": 2, "save": "x", "every": 3},
    "outer-fragments-in-a-round": {**NESTEROV, "outer_fragments": 3},
    "outer-delay-in-a-round": {**NESTEROV, "outer_delay": 2},
    "streaming-outer-steps-with-batch-norm": {**NESTEROV, "outer_mixing": 0.5, "model": "cnn", "data": "glyphs"},
    "local-steps-with-noise-scale": {"local_steps": 2, "dp": 2, "noise_scale": True},
    "local-steps-with-synchronize-each": {"local_steps": 2, "dp": 2, "synchronize_each": True},
    "local-steps-with-check-replicas": {"local_steps": 2, "dp": 2, "check_replicas": True},
    "local-steps-with-bucket-cap-mb": {"local_steps": 2, "dp": 2, "bucket_cap_mb": 1.0},
    "local-steps-with-compression": {"local_steps": 2, "dp": 2, "compression": "sign"},
    "replicas-to-check": {"zero": 3, "dp": 2, "check_replicas": True},
    "local-steps-with-sync-batch-norm": {"local_steps": 2, "dp": 2, "model": "cnn", "batch_norm": "sync"},
    "sync-batch-norm-with-server": {"strategy": "ps", "dp": 2, "model": "cnn", "batch_norm": "sync"},
    "ffn-llama": {"ffn": 96},
    "ffn-by-tp": {"tp": 2, "model": "llama", "ffn": 97},
    "kv-heads-llama": {"kv_heads": 2},
    "kv-heads-share-heads": {"model": "llama", "kv_heads": 3},
    "dropout-gpt": {"model": "llama", "dropout": 0.1},
    "attention-dropout-mlp": {"model": "mlp", "attention_dropout": 0.1},
    "sequence-parallel-needs-tp": {"sequence_parallel": True},
    "tensor-parallel-cnn": {"tp": 2, "model": "cnn"},
    "width-by-tp": {"tp": 3, "model": "mlp"},
    "heads-by-tp": {"tp": 3, "width": 48},
    "kv-heads-by-tp": {"tp": 2, "model": "llama", "heads": 6, "kv_heads": 3, "width": 48},
    "sequence-parallel-mlp": {"tp": 2, "sequence_parallel": True, "model": "mlp"},
    "context-parallel-mlp": {"cp": 2, "model": "mlp"},
    "context-parallel-tokens": {"cp": 65},
    "documents-of-language-models": {"document_separator": 0, "model": "mlp", "data": "glyphs"},
    "documents-of-the-data": {"document_separator": 256, "data": "pydoc"},
    "documents-on-a-ring": {"document_separator": 1, "cp": 2},
    "documents-in-an-asynchronous-pipeline": {**PIPEDREAM, "document_separator": 1},
    "ulysses-heads": {"cp": 3, "attention": "ulysses"},
    "ulysses-ring-ranks": {"cp": 3, "attention": "ulysses-ring"},
    "ulysses-ring-heads": {"cp": 3, "attention": "ulysses-ring", "ulysses": 3},
    "outer-optimizer-without-effect": {"outer_optimizer": "nesterov"},
    "outer-lr-without-effect": {"outer_lr": 1.0},
    "outer-momentum-without-effect": {"outer_momentum": 0.5},
    "outer-fragments-without-effect": {"outer_fragments": 2},
    "outer-delay-without-effect": {"outer_delay": 2},
    "outer-mixing-without-effect": {"outer_mixing": 0.5},
    "ulysses-without-effect": {"ulysses": 4},
    "sequence-parallel-tokens": {"tp": 2, "sequence_parallel": True, "context": 7},
    "experts-of-language-models": {"experts": 4, "model": "mlp", "data": "glyphs"},
    "experts-top-k": {"experts": 1, "top_k": 2},
    "experts-by-ep": {"experts": 4, "ep": 3, "dp": 3},
    "segments-in-a-pipeline": {"pp": 2, "recompute": "sqrt"},
    "budget-with-messages-in-blocks": {"tp": 2, "recompute": "budget:40000"},
    "reshard-after-forward-needs-zero-3": {"reshard_after_forward": "false"},
    "persistence-threshold-needs-zero-3": {"persistence_threshold": 5},
    "dp-replicate-needs-zero-3": {"dp_replicate": 2, "dp": 2},
    "offloaded-parameters-need-zero-3": {"offload": "parameters"},
    "copies-share-ranks": {"zero": 3, "dp": 4, "dp_replicate": 3},
    "reshard-divides-shards": {"zero": 3, "dp": 4, "reshard_after_forward": "3"},
    "copies-share-ranks-of-experts": {"experts": 4, "ep": 4, "dp": 4, "zero": 3, "dp_replicate": 2},
    "reshard-divides-shards-of-experts": {"experts": 2, "ep": 2, "dp": 4, "zero": 3, "reshard_after_forward": "2"},
    "reshard-with-recomputation": {"zero": 3, "dp": 2, "reshard_after_forward": "false", "recompute": "sqrt"},
    "chunks-need-pp": {"chunks": 2},
    "partition-needs-pp": {"partition": "1,1"},
    "repartition-needs-pp": {"repartition_every": 2},
    "replicas-need-pp": {"replicas": "2,1"},
    "replicas-need-pipedream": {"pp": 3, "replicas": "2,1"},
    "stashing-updates-every-micro-batch": {**PIPEDREAM, "microbatches": 2},
    "asynchronous-with-dp": {**PIPEDREAM, "dp": 2},
    "asynchronous-with-tp": {**PIPEDREAM, "tp": 2},
    "asynchronous-with-cp": {**PIPEDREAM, "cp": 2},
    "asynchronous-with-clip": {**PIPEDREAM, "clip": 1.0},
    "asynchronous-with-check-replicas": {**PIPEDREAM, "check_replicas": True},
    "asynchronous-with-fp16": {**PIPEDREAM, "precision": "fp16"},
    "asynchronous-with-offload": {**PIPEDREAM, "offload": "optimizer"},
    "asynchronous-with-compression": {**PIPEDREAM, "compression": "sign"},
    "asynchronous-with-zero": {**PIPEDREAM, "zero": 1},
    "asynchronous-with-bucket-cap-mb": {**PIPEDREAM, "bucket_cap_mb": 1.0},
    "replicas-of-batch-norm": {**PIPEDREAM, "pp": 3, "model": "cnn", "replicas": "2,1"},
    "synchronize-each-in-a-pipeline": {"pp": 2, "synchronize_each": True},
    "asynchronous-with-repartition": {**PIPEDREAM, "repartition_every": 2},
    "repartition-with-compression": {"pp": 2, "layers": 3, "dp": 2, "compression": "sign", "repartition_every": 2},
    "repartition-with-one-cut": {"pp": 2, "layers": 2, "repartition_every": 2},
    "schedule-without-backward": {"pp": 2, "schedule": "forward-only"},
    "file-that-updates-on-the-way": {"pp": 2, "schedule": "plan.py:updating"},
    "rank-without-a-stage": {"pp": 2, "schedule": "idle.csv"},
    "synchronize-each-with-zero": {"synchronize_each": True, "zero": 2, "dp": 2, "accumulation": 2},
    "synchronize-each-of-one-micro-batch": {"synchronize_each": True, "dp": 2},
    "heads-without-effect": {"model": "mlp", "heads": 2},
    "context-without-effect": {"model": "mlp", "context": 8},
    "batch-norm-without-effect": {"batch_norm": "none"},
    "attention-without-effect": {"attention": "ulysses"},
    "check-layouts-without-effect": {"check_layouts": True},
    "prefetch-without-effect": {"dp": 2, "prefetch": 2},
    "reduce-bucket-size-without-effect": {"reduce_bucket_size": 5},
    "bucket-cap-mb-without-effect": {"zero": 1, "bucket_cap_mb": 1.0},
    "top-k-without-effect": {"top_k": 2},
    "capacity-factor-without-effect": {"capacity_factor": 2.0},
    "aux-loss-weight-without-effect": {"aux_loss_weight": 0.5},
    "schedule-without-effect": {"schedule": "gpipe"},
    "quantize-weights-without-effect": {"quantize_weights": "per-tensor"},
    "quantize-observer-without-effect": {"quantize_observer": "min-max"},
    "loss-scale-without-effect": {"loss_scale": 8.0},
    "loss-scale-interval-without-effect": {"loss_scale_interval": 5},
    "loss-scale-hysteresis-without-effect": {"loss_scale_hysteresis": 5},
    "loss-scale-floor-without-effect": {"loss_scale_floor": 0.5},
    "loss-scale-floor-limit-without-effect": {"loss_scale_floor_limit": 1},
    "static-loss-scale-without-effect": {"static_loss_scale": True},
    "warmup-start-without-effect": {"warmup_start": 0.1},
    "lr-scaling-without-effect": {"lr_scaling": "linear"},
    "base-batch-without-effect": {"base_batch": 4},
    "recompute-budget-chooses": {"recompute_budget": "budgets.json"},
    "recomputed-stages-need-a-pipeline": {"recompute": "stages:0"},
    "recomputed-stages-with-packed-inputs": {"recompute": "stages:0", "pp": 2, "offload": "activations"},
    "memory-budget-without-effect": {"memory_budget": 1e6},
    "decay-steps-without-effect": {"decay_steps": 9},
    "final-lr-without-effect": {"final_lr": 0.1},
}

# rule -> the sentence about its case or a part of it, where it has numbers or settings that the rule computes
SENTENCES = {
    "vocabulary-of-the-data": (
        r"--data tokens:damaged\.u32 has tokens up to 2,147,483,647, .* check the file and the dtype"
    ),
    "memory-of-the-machine": "parameters on 1 ranks .* use fewer --layers",
    "images-for-cnn": (
        r"samples of shape \(2,\), and --model cnn needs images of at least 2 x 2 pixels, .* use --model mlp"
    ),
    "width-by-heads": "--width 12 is not a multiple of 2 x --heads 4; use --heads 3 or --heads 6",
    "sparsity-needs-schedule": "--sparsity 0.5 needs --sparsity-schedule BEGIN,END, .* such as",
    "sparsity-pattern-at-once": "--sparsity-pattern 2:4 is set once, .* use --sparsity-schedule 2",
    "sparsity-with-tp": "--tp 2 cuts matrices by rows and columns, and --sparsity 0.8",
    "sparsity-in-an-asynchronous-pipeline": (
        "--schedule pipedream updates its weights on the way; use a synchronous one"
    ),
    "sparsity-with-experts": "--experts 2 has its weights in matrices of all experts",
    "sparsity-with-compression": "and so does --sparsity 0.8",
    "sparsity-with-offload": "steps copies of the weights on the host",
    "sparsity-with-local-steps": "and with them --sparsity 0.8 different masks",
    "sparsity-with-server": "masks where weights are stepped, .* on the servers",
    "teacher-without-student": (
        "--teacher-ranks 3 are more than the 2 data-parallel replicas, .* use --teacher-ranks 2 at most"
    ),
    "server-with-axes": "does not combine with --zero 1; leave one of them out",
    "uneven-rows-of-experts-in-a-pipeline": (
        "with 7 rows on 2 data-parallel ranks the replicas have different numbers of shapes; use --global-batch 4 or 8"
    ),
    "uneven-rows-in-a-sharded-pipeline": (
        "with 5 rows on 2 data-parallel ranks the replicas have different numbers of shapes; use --zero 2"
    ),
    "changing-batches-with-prefetch": "read the rows of later steps, which --weights measured:2 has not chosen yet",
    "changing-batches-with-server": "the workers of --strategy ps exchange nothing",
    "changing-batches-with-local-steps": (
        "and --weights measured:2 chooses batches with all ranks at the end of a step; leave one of them out"
    ),
    "changing-batches-with-teacher-ranks": (
        "--teacher-ranks 1 computes the logits of later steps, whose rows --weights measured:2 has not chosen yet"
    ),
    "adaptive-batch-in-micro-batches": (
        "from 8 samples by adding micro-batches, 8 samples on all ranks together; use --adaptive-batch 16 or"
    ),
    "noise-scale-needs-replicas": "needs --dp 2 or more",
    "noise-scale-needs-whole-gradients": "leave out --sync",
    "fragments-of-whole-replicas": (
        "--outer-fragments 2 sends fragments of a replica's weights, and a rank of the replica holds a stage"
    ),
    "local-steps-saved-with-an-average": (
        "--every 3 would save between two averages of --local-steps 2, .*; use --every 2 or 4"
    ),
    "outer-delay-in-a-round": (
        "--outer-delay 2 would merge a fragment when it is sent again, after --local-steps 2; use --outer-delay 1"
    ),
    "streaming-outer-steps-with-batch-norm": (
        "--outer-mixing 0.5 averages layers at different steps, .* --batch-norm local belong .*; use --batch-norm none"
    ),
    "ffn-by-tp": "--ffn 97 cannot be divided among --tp 2; use --ffn 96 or 98, or --tp 1, 97",
    "kv-heads-share-heads": "--heads 4 cannot be divided among --kv-heads 3; use one of 1, 2, 4",
    "width-by-tp": "--width 64 cannot be divided among --tp 3; use --width 63 or 66, or --tp 1, 2, 4",
    "heads-by-tp": "--heads 4 cannot be divided among --tp 3; use --heads 3 or 6, or --tp 1, 2, 4",
    "kv-heads-by-tp": "--kv-heads 3 cannot be divided among --tp 2; use --kv-heads 2 or 4, or --tp 1, 3",
    "documents-of-the-data": (
        r"--document-separator 256 is out of range: the tokens of --data pydoc are 0\.\.255; use one of them"
    ),
    "ulysses-heads": "the 4 .* heads of a rank cannot be divided among --cp 3 .* use --cp 2, 4, or --attention ring",
    "ulysses-ring-ranks": "--cp 3 cannot be divided into groups of --ulysses 2; use one of 1, 3",
    "ulysses-ring-heads": "the 4 .* heads of a rank cannot be divided among --ulysses 3; use one of 1, 2, 4",
    "sequence-parallel-tokens": (
        "--context 7 cannot be divided into 2 parts for --sequence-parallel; use --context 4 or 8"
    ),
    "experts-by-ep": "--experts 4 cannot be divided among --ep 3; use --experts 3 or 6",
    "copies-share-ranks": "4 data-parallel ranks cannot be divided among --dp-replicate 3; use one of 1, 2, 4",
    "reshard-divides-shards": (
        "--reshard-after-forward 3 with 4 shards: a number must divide them and lie between 1 and 4"
    ),
    "copies-share-ranks-of-experts": (
        "the 1 ranks that share an expert with --ep 4 cannot be divided among --dp-replicate 2; use one of 1"
    ),
    "reshard-divides-shards-of-experts": (
        "--reshard-after-forward 2 with 2 shards of an expert: a number must divide them"
    ),
    "repartition-with-one-cut": "has only one way to cut 2 layers into 2 stages, which is one layer each",
    "rank-without-a-stage": "leaves rank 1 without a stage; give it one, or leave its line out and use --pp 1",
}


def ranks_of(config):
    return resolve_dims(config).ranks + ranks_beside(config)


@each("rule", RULES, ids=lambda rule: rule.name)
def test_every_rule_refuses_its_case_with_one_sentence(rule, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("plan.py").write_text(FILE)
    Path("two.csv").write_text("0F0,,,0B0\n,1F0,1B0,\n")
    Path("idle.csv").write_text("0F0,1F0,1B0,0B0\n,\n")
    np.array([1, 2, 2**31 - 1], "<u4").tofile("damaged.u32")
    np.savez("rows.npz", x=np.zeros((3, 2)), y=np.arange(3))
    config = TrainConfig.make(**CASES[rule.name])
    job = ResolvedJob(config, resolve_batches(config, ranks_of(config)))
    assert next(broken.name for broken in RULES if broken.broken(job)) == rule.name
    with pytest.raises(UsageError, match=SENTENCES.get(rule.name)) as caught:
        number_of_ranks(config, None)
    assert str(caught.value) == rule.sentence(job)
    assert "\n" not in str(caught.value)
    assert "{" not in str(caught.value)


def test_the_names_of_the_rules_are_unique_and_all_have_a_case():
    names = [rule.name for rule in RULES]
    assert len(names) == len(set(names))
    assert set(SENTENCES) < set(CASES)
    assert set(CASES) == set(names) or (absent_folders() and set(CASES) > set(names))


def test_the_remedies_about_reductions_name_every_algorithm():
    remedies = {rule.name: rule.remedy.replace(" or ", ", ").removeprefix("use --reduction ") for rule in RULES}
    of_shards, of_all = set(ALGORITHMS["reduce_scatter"]), set(ALGORITHMS["all_reduce"])
    assert set(remedies["reduction-is-no-reduce-scatter"].split(", ")) == of_shards | {"auto"}
    assert set(remedies["reduction-of-shards-and-copies"].split(", ")) == (of_shards & of_all) | {"auto"}
    assert {"ring", "ordered"} <= of_shards & of_all


def test_the_page_of_rules_is_current():
    """docs/rules.md is written by `python -m minidist.job.config.rules > docs/rules.md`."""
    page = Path(__file__).parents[2] / "docs" / "rules.md"
    written, current = page.read_text(encoding="utf-8"), as_markdown()
    if absent_folders():  # each rule that is there has its row
        written, current = (re.findall(r"^\| `.*", text, re.M) for text in (written, current))
        assert set(written) > set(current)
    else:
        assert written == current


@each(
    ("values", "sentence"),
    [
        ({"tp": 2, "heads": 3, "width": 48}, "--heads 3 cannot be divided among --tp 2; use --heads 2 or 4"),
        ({"tp": 3}, "--heads 4 .* use --heads 3 with --width 63 or 66, or --tp 1, 2, 4"),
        ({"ep": 2, "dp": 2}, "--experts 0 cannot be divided among --ep 2; use --experts 2"),
        ({"ep": 2, "experts": 4}, "--ep 2 does not divide --dp 1"),
        ({"zero": 3, "reshard_after_forward": "\u00b2"}, "--reshard-after-forward '\u00b2'; it must be true, false"),
        (
            {"recompute": "stages:1,x", "pp": 2},
            "--recompute 'stages:1,x'; write the numbers of stages, such as stages:0",
        ),
        ({"recompute": "stages:2", "pp": 2}, "cannot recompute stage 2: the plan has stages 0 to 1"),
        ({"recompute": "budget:\u00b2"}, "must be one of none, full, selective, sqrt, budget:BYTES"),
        (
            {"save": "/dev/null/checkpoints"},
            "checkpoints cannot be written to --save /dev/null/checkpoints: .*; choose another directory",
        ),
        *(({"save": f"a{character}"}, "--save .* no path can have; correct the name") for character in "\0\ud800"),
    ],
)
def test_what_does_not_fit_is_one_sentence(values, sentence):
    with pytest.raises(UsageError, match=sentence) as caught:
        number_of_ranks(TrainConfig.make(**values), None)
    assert "\n" not in str(caught.value)


@each(
    ("values", "lines"),
    [
        ({"zero": 2}, ["--zero 2 has no effect on one rank"]),
        ({"zero": 2, "dp": 2}, []),
        ({"zero": 3, "offload": "parameters"}, []),
        ({"pp": 2, "zero": 1}, ["--zero 1 has no effect with one data-parallel rank"]),
        ({"pp": 2, "compression": "sign"}, ["--compression sign has no effect with one data-parallel rank"]),
        ({"compression": "sign"}, []),
        (
            {"bucket_cap_mb": 0.5, "reduction": "ordered", "synchronize_each": True, "accumulation": 2},
            ["--reduction ordered, --bucket-cap-mb 0.5 and --synchronize-each have no effect on one rank"],
        ),
        ({"local_steps": 4}, ["--local-steps 4 has no effect on one rank"]),
        ({"check_replicas": True}, ["--check-replicas has no effect on one rank"]),
        ({"check_replicas": True, "tp": 2}, []),
        ({"evaluate_every": 20, "every": 20, "save": "x"}, []),
        (
            {"evaluate_every": 21, "every": 30, "save": "x"},
            [
                "--every 30 has no effect, because the job ends after --steps 20",
                "--evaluate-every 21 has no effect, because the job ends after --steps 20",
            ],
        ),
    ],
)
def test_what_has_no_effect_in_a_smaller_job_is_one_line_and_the_job_runs(values, lines):
    config = TrainConfig.make(**values)
    batches = resolve_batches(config, ranks_of(config))
    check_rules(config, batches)
    assert notices(config, batches) == lines


def test_a_program_that_trains_is_refused_what_does_not_combine():
    """Without a command line; a setting without effect, as of a job tried in several layouts, is not refused."""
    values = {"steps": 1, "layers": 1, "width": 8, "heads": 2, "context": 8, "data": "markov"}
    ring = TrainConfig.make(**values, cp=2, document_separator=3)
    with pytest.raises(UsageError, match="--document-separator 3"):
        SimWorld(2).run(train, ring)
    assert SimWorld(1).run(train, TrainConfig.make(**values, bucket_cap_mb=0.5))[0].losses


def test_the_line_is_printed_and_compare_reads_the_order_of_additions_on_one_rank_too(capsys):
    config = TrainConfig.make(zero=2, reduction="ordered", steps=1, layers=1, width=8, context=8, data="markov")
    run_training(config, None, 60, None)
    assert "minidist: --zero 2 and --reduction ordered have no effect on one rank\n" in capsys.readouterr().err
    assert run_comparison(config, None, 60).equal
    assert "minidist: --zero 2 has no effect on one rank\n" in capsys.readouterr().err


@pytest.mark.parametrize(
    "values",
    [
        {"tp": 3, "width": 48},
        {"tp": 3, "model": "mlp"},
        {"cp": 3, "attention": "ulysses"},
        {"model": "llama", "width": 12},
    ],
)
def test_what_a_sentence_proposes_works(values):
    with pytest.raises(UsageError) as caught:
        number_of_ranks(TrainConfig.make(**values), None)
    name, numbers = re.findall(r"use --(\S+) (\d+)", str(caught.value))[-1]
    fixed = {**values, name: int(numbers)}
    number_of_ranks(TrainConfig.make(**fixed), None)


def test_the_tier_follows_from_what_is_cut():
    def tier(**values):
        config = TrainConfig.make(**{"reduction": "ordered", **values})
        return tier_of(config, resolve_dims(config))

    assert tier(dp=2, pp=2, zero=3) == "ordered"
    for axis in ({"tp": 2}, {"cp": 2}, {"dp": 2, "ep": 2, "experts": 2}):
        assert tier(**axis, precision="fp64", steps=5) == "float"
        for precision in ("fp32", "bf16", "fp16"):
            if "experts" in axis:
                with pytest.raises(
                    UsageError, match=r"--ep 2 cuts the sums .*--experts makes another.*--precision fp64"
                ):
                    tier(**axis, precision=precision, steps=5)
                continue
            assert tier(**axis, precision=precision, steps=5) == "rounding"
            with pytest.raises(UsageError, match="the rounding tier holds for at most 5 steps"):
                tier(**axis, precision=precision, steps=6)
        with pytest.raises(UsageError, match="at most 5 steps"):
            tier(**axis, precision="fp64", steps=6)
    for wild in (
        {"optimizer": "adagrad"},
        {"optimizer": "rmsprop"},
        {"optimizer": "adam", "weight_decay": 0.1},
        {"eps": 1e-12},
    ):
        with pytest.raises(UsageError, match=r"attention's key bias.*take one of them"):
            tier(tp=2, precision="fp64", steps=5, **wild)
        assert tier(dp=2, **wild) == "ordered"


@pytest.mark.parametrize("seconds", [-1.0, float("nan"), float("inf")])
def test_a_timeout_is_a_number_of_seconds_that_a_thread_can_wait(seconds):
    with pytest.raises(UsageError, match=r"--timeout \S+; it must be at least 0 seconds"):
        execute(lambda comm: None, ranks=1, timeout=seconds)


def test_the_two_ways_to_send_are_of_one_world_each(monkeypatch):
    with pytest.raises(UsageError, match=r"^--synchronous lets every send wait .*--eager-bytes 8 .*leave one of them"):
        execute(len, ranks=2, eager_bytes=8, synchronous=True)
    monkeypatch.setitem(execute.__globals__, "launched_size", lambda: 2)
    with pytest.raises(UsageError, match=r"^--eager-bytes 8 is of simulated ranks; under mpiexec .*leave it out"):
        execute(len, eager_bytes=8)


@each("model", ["gpt", "llama"])
@each(("tp", "heads", "width"), [(3, 4, 64), (3, 4, 48), (5, 4, 64), (6, 4, 64), (4, 6, 48)])
def test_what_is_proposed_for_heads_among_tensor_parallel_ranks_works(model, tp, heads, width):
    values = {"model": model, "tp": tp, "width": width, "heads": heads}
    with pytest.raises(UsageError, match="cannot be divided among --tp") as caught:
        number_of_ranks(TrainConfig.make(**values), None)
    heads_text, _, width_text = re.search(
        r"use --heads ([\d or]+)( with --width ([\d or]+))?,", str(caught.value)
    ).groups()
    for number in heads_text.split(" or "):
        for other in width_text.split(" or ") if width_text else [width]:
            number_of_ranks(TrainConfig.make(**{**values, "heads": int(number), "width": int(other)}), None)
