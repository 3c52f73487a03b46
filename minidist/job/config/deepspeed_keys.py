"""What becomes of each key of a DeepSpeed configuration file, as tables: applied, or noted with the reason why not.

`config.deepspeed` translates by these tables, and `python docs/deepspeed_keys.py` writes them as docs/deepspeed.md. A
test compares every row with the translation.

Source: DeepSpeed's documentation, "Configuration JSON"; the source of deepspeed/runtime where that is silent.

Proved by: tests/config/test_deepspeed.py
"""

from minidist.base.errors import nearest
from minidist.techniques import installed
from minidist.techniques.deepspeed import Applied, Noted

NVME = "minidist offloads to the host's memory, not to a drive"
KERNEL = "chooses a kernel of a GPU, which changes no number here"
LOGGING = "minidist logs with --metrics and --trace"
ARITHMETIC = "sums and the optimizer's copies of 16-bit parameters are float32 here"
ONE_BUFFER = "minidist gathers whole buffers: it has no size of a part"
WHOLE_UNITS = "ZeRO 3 gathers and releases whole blocks here"

UNBOUNDED = "the ratio of a layer's weights to its step has no bounds here, as in the paper"

APPLIED: dict[str, Applied] = {
    "train_batch_size": Applied(16, "--global-batch"),
    "train_micro_batch_size_per_gpu": Applied(2, "--micro-batch"),
    "gradient_accumulation_steps": Applied(4, "--accumulation"),
    "gradient_clipping": Applied(1.0, "--clip; 0 is off"),
    "optimizer.type": Applied("AdamW", "--optimizer: Adam, AdamW, SGD, Adagrad, RMSprop, Lamb and Muon, in any case"),
    "optimizer.params.lr": Applied(0.001, "--lr"),
    "optimizer.params.betas": Applied([0.8, 0.999], "of Adam, AdamW, Lamb and Muon: --betas"),
    "optimizer.params.eps": Applied(1e-6, "--eps, but of SGD"),
    "optimizer.params.weight_decay": Applied(0.01, "--weight-decay"),
    "optimizer.params.momentum": Applied(0.9, "of SGD, RMSprop and Muon: --momentum"),
    "optimizer.params.nesterov": Applied(True, "of SGD and Muon: --nesterov"),
    "optimizer.params.adam_w_mode": Applied(False, "of Adam: false is --optimizer adam, else it is adamw"),
    "optimizer.params.torch_adam": Applied(True, "of Adam and AdamW: a --weight-decay of 0.01 if none is given"),
    "scheduler.type": Applied(
        "WarmupLR", "--decay and --warmup-curve: WarmupLR, WarmupDecayLR and WarmupCosineLR, step by step"
    ),
    "scheduler.params.warmup_num_steps": Applied(10, "--warmup"),
    "scheduler.params.warmup_max_lr": Applied(0.001, "--lr"),
    "scheduler.params.warmup_min_lr": Applied(0.0001, "--warmup-start, a share of the learning rate"),
    "scheduler.params.warmup_min_ratio": Applied(0.1, "of WarmupCosineLR: --warmup-start"),
    "scheduler.params.warmup_type": Applied("linear", "--warmup-curve deepspeed-linear, else deepspeed-log"),
    "scheduler.params.total_num_steps": Applied(
        100, "of WarmupDecayLR and WarmupCosineLR: --decay-steps, and --steps where no flag gives it"
    ),
    "scheduler.params.cos_min_ratio": Applied(0.1, "of WarmupCosineLR: --final-lr"),
    "fp16.enabled": Applied(True, "--precision fp16"),
    **{key: row for kind in installed() for key, row in kind.deepspeed.applied.items()},
    "bf16.enabled": Applied(True, "--precision bf16"),
    "zero_optimization.stage": Applied(2, "--zero"),
    "zero_optimization.reduce_bucket_size": Applied(5e7, "at stages 1 and 2: --reduce-bucket-size"),
    "zero_optimization.offload_optimizer.device": Applied("cpu", "from stage 1 on: --offload optimizer"),
    "zero_optimization.offload_param.device": Applied("cpu", "at stage 3: --offload parameters, with the optimizer"),
    "zero_optimization.cpu_offload": Applied(True, "from stage 1 on: --offload optimizer"),
    "zero_optimization.cpu_offload_params": Applied(True, "at stage 3: --offload parameters"),
    "zero_optimization.stage3_param_persistence_threshold": Applied(1e4, "at stage 3: --persistence-threshold"),
    "zero_optimization.stage3_prefetch_bucket_size": Applied(0, "at stage 3: 0 is --prefetch 0"),
    "zero_optimization.zero_hpz_partition_size": Applied(
        2, "at stage 3, without recomputation: --reshard-after-forward"
    ),
    "activation_checkpointing": Applied({}, "--recompute full"),
    "activation_checkpointing.cpu_checkpointing": Applied(True, "--offload activations"),
    "tensor_parallel.autotp_size": Applied(2, "--tp"),
    "expert_parallel.autoep_size": Applied(2, "--ep, where enabled"),
}

NOTED: dict[str, Noted] = {
    # communication and the loop
    "managed_gradient_accumulation": Noted((True,), "minidist's loop accumulates by itself"),
    "communication_data_type": Noted(
        (None,), "gradients are sent in their own type; --compression fp16 or bf16 halves it"
    ),
    "seq_parallel_communication_data_type": Noted((None,), "activations are sent in their own type"),
    "gradient_allreduce_op": Noted(("mean",), "the loss is a mean, and so are its gradients"),
    "prescale_gradients": Noted((True, False), "the loss is divided before backward"),
    "gradient_predivide_factor": Noted((1,), "the loss is divided before backward, by the whole batch"),
    "sparse_gradients": Noted((False,), "embeddings' gradients are sent whole; --strategy ps sends rows of them"),
    "dataloader_drop_last": Noted((True, False), "batches are drawn by number, and no epoch has a rest"),
    "disable_allgather": Noted((False,), "ZeRO gathers parameters with all-gather"),
    "data_types": Noted((None, "fp32"), ARITHMETIC),
    "zero_allow_untested_optimizer": Noted((True, False), "every optimizer here works with every stage"),
    "zero_force_ds_cpu_optimizer": Noted((True, False), KERNEL),
    "use_node_local_storage": Noted((False,), "all ranks of a checkpoint share one directory"),
    "disable_python_gc": Noted((False,), "minidist leaves Python's garbage collection as it is"),
    # logs and measurements
    "steps_per_print": Noted((), "--metrics has the loss of every step"),
    "wall_clock_breakdown": Noted((False,), "--trace has the time of every computation and message"),
    "memory_breakdown": Noted((False,), "minidist report --picture memory draws it from the trace"),
    "dump_state": Noted((False,), "--print-config prints all settings"),
    "flops_profiler": Noted((), "minidist profile measures a model"),
    "comms_logger": Noted((), "--trace has every message"),
    **{name: Noted((), LOGGING) for name in ("tensorboard", "wandb", "comet", "csv_monitor", "monitor_config")},
    # other programs within DeepSpeed
    "autotuning": Noted((), "minidist tries no settings; minidist compare --matrix runs several layouts"),
    "elasticity": Noted((), "a job has a fixed number of ranks; its checkpoint can be resumed on any other number"),
    "aio": Noted((), NVME),
    "amp": Noted((), "this is NVIDIA's Apex; enable fp16 or bf16"),
    "torch_autocast": Noted((), "this is PyTorch's; enable fp16 or bf16"),
    "compile": Noted((), "this compiles kernels of PyTorch"),
    "checkpoint": Noted((), "minidist has one format of checkpoints, which any layout reads"),
    "nebula": Noted((), "minidist has one format of checkpoints, which any layout reads"),
    "data_efficiency": Noted((), "every step has whole sequences of the data set"),
    "curriculum_learning": Noted((), "every step has whole sequences of the data set"),
    "progressive_layer_drop": Noted((), "minidist trains all layers"),
    "eigenvalue": Noted((), "minidist computes no eigenvalues"),
    "compression_training": Noted((), "minidist's quantised training is --quantize int8"),
    "quantize_training": Noted((), "minidist's quantised training is --quantize int8"),
    "sparse_attention": Noted((), "minidist's attention is dense"),
    "hybrid_engine": Noted((), "minidist generate reads a checkpoint"),
    "pipeline": Noted((), "stages are given by --pp, --schedule and --partition"),
    "tensor_parallel": Noted((), "--tp cuts minidist's own models in one way"),
    "expert_parallel": Noted((), "experts are given by --experts and --top-k"),
    "expert_parallel.expert_tensor_parallel_size": Noted((1,), "an expert is whole on its rank"),
    # optimizer and scheduler
    "optimizer.params": Noted((), "minidist's optimizer has no such parameter"),
    "optimizer.params.bias_correction": Noted((True,), "Adam corrects the bias of its averages"),
    "optimizer.params.max_coeff": Noted((), UNBOUNDED),
    "optimizer.params.min_coeff": Noted((), UNBOUNDED),
    "optimizer.params.eps_inside_sqrt": Noted((False,), "epsilon is added to the root"),
    "optimizer.params.muon_lr": Noted((), "--lr is the learning rate of Muon's matrices and of all other parameters"),
    "optimizer.params.adam_lr": Noted((), "--lr is the learning rate of Muon's matrices and of all other parameters"),
    "optimizer.params.ns_method": Noted(("standard", "gram"), "a form of the same iteration"),
    "optimizer.params.amsgrad": Noted((False,), "minidist has no AMSGrad"),
    "optimizer.params.dampening": Noted((0,), "minidist's momentum has no dampening"),
    "optimizer.params.maximize": Noted((False,), "minidist minimises"),
    "optimizer.params.alpha": Noted((0.99,), "RMSprop's decay is 0.99"),
    "optimizer.params.centered": Noted((False,), "RMSprop is not centred"),
    "optimizer.params.lr_decay": Noted((0,), "a schedule lowers the learning rate"),
    "optimizer.params.initial_accumulator_value": Noted((0,), "Adagrad begins with 0"),
    **{
        f"optimizer.params.{name}": Noted((None, True, False), KERNEL)
        for name in ("fused", "foreach", "capturable", "differentiable", "set_grad_none")
    },
    "optimizer.params.fp32_optimizer_states": Noted((True,), ARITHMETIC),
    "optimizer.legacy_fusion": Noted((True, False), KERNEL),
    "scheduler.params": Noted((), "minidist's schedule has no such parameter"),
    "scheduler.params.last_batch_iteration": Noted(
        (-1,), "a schedule begins with the first step; --resume continues it"
    ),
    # half precision
    "fp16.auto_cast": Noted((True, False), "inputs get the type of the parameters"),
    "fp16.fp16_master_weights_and_grads": Noted((False,), ARITHMETIC),
    "bf16.bf16_master_weights_and_grads": Noted((False,), ARITHMETIC),
    "bf16.bf16_optimizer_states": Noted((False,), ARITHMETIC),
    "bf16.immediate_grad_update": Noted((True, False), "a gradient is added when it is computed"),
    "bf16.auto_cast": Noted((True, False), "inputs get the type of the parameters"),
    **{key: row for kind in installed() for key, row in kind.deepspeed.noted.items()},
    # ZeRO
    "zero_optimization.overlap_comm": Noted((True,), "gradients are always sent while backward computes"),
    "zero_optimization.contiguous_gradients": Noted((True,), "gradients always lie in one flat buffer"),
    "zero_optimization.reduce_scatter": Noted((True,), "ZeRO reduces and scatters gradients; --zero 0 reduces to all"),
    "zero_optimization.allgather_partitions": Noted((True,), "ZeRO gathers parameters with all-gather"),
    "zero_optimization.allgather_bucket_size": Noted((), ONE_BUFFER),
    "zero_optimization.compute_grad_norm": Noted((True, False), "the norm is computed where --clip needs it"),
    "zero_optimization.load_from_fp32_weights": Noted((True,), "checkpoints hold the float32 copies"),
    "zero_optimization.grad_hooks": Noted((True,), "gradients are reduced by hooks"),
    "zero_optimization.round_robin_gradients": Noted((False,), "a rank reduces the shard that is its own"),
    "zero_optimization.parameter_alignment": Noted((False,), "parameters lie side by side in their buffer"),
    "zero_optimization.ignore_unused_parameters": Noted((True,), "a parameter without a gradient has the gradient 0"),
    "zero_optimization.elastic_checkpoint": Noted((True, False), "a checkpoint can be resumed on any layout"),
    "zero_optimization.sub_group_size": Noted((), "the optimizer updates a rank's whole shard at once"),
    "zero_optimization.legacy_stage1": Noted((False,), "there is one implementation of stage 1"),
    "zero_optimization.cpu_offload_use_pin_memory": Noted((True, False), "the host has one kind of memory here"),
    "zero_optimization.offload_param": Noted((), NVME),
    "zero_optimization.offload_optimizer": Noted((), NVME),
    "zero_optimization.offload_param.pin_memory": Noted((True, False), "the host has one kind of memory here"),
    "zero_optimization.offload_optimizer.pin_memory": Noted((True, False), "the host has one kind of memory here"),
    "zero_optimization.offload_optimizer.ratio": Noted((1,), "all states are on the host, or none"),
    "zero_optimization.offload_optimizer.fast_init": Noted((False,), NVME),
    "zero_optimization.offload_optimizer.pipeline": Noted((False,), NVME),
    "zero_optimization.offload_optimizer.pipeline_read": Noted((False,), NVME),
    "zero_optimization.offload_optimizer.pipeline_write": Noted((False,), NVME),
    "zero_optimization.stage3_max_live_parameters": Noted((), WHOLE_UNITS),
    "zero_optimization.stage3_max_reuse_distance": Noted((0,), WHOLE_UNITS),
    "zero_optimization.stage3_module_granularity_threshold": Noted((0,), WHOLE_UNITS),
    "zero_optimization.stage3_use_all_reduce_for_fetch_params": Noted(
        (False,), "ZeRO gathers parameters with all-gather"
    ),
    "zero_optimization.stage3_gather_16bit_weights_on_model_save": Noted(
        (True,), "checkpoints hold every whole tensor"
    ),
    "zero_optimization.stage3_gather_fp16_weights_on_model_save": Noted((True,), "checkpoints hold every whole tensor"),
    "zero_optimization.leaf_module": Noted((None,), WHOLE_UNITS),
    "zero_optimization.memory_efficient_linear": Noted((True, False), KERNEL),
    "zero_optimization.mics_shard_size": Noted((-1,), "shards within a part of the ranks are --dp-replicate here"),
    "zero_optimization.mics_hierarchical_params_gather": Noted((False,), "parameters are gathered in one step"),
    "zero_optimization.zero_quantized_weights": Noted((False,), "ZeRO sends parameters in their own type"),
    "zero_optimization.zero_quantized_nontrainable_weights": Noted((False,), "ZeRO sends parameters in their own type"),
    "zero_optimization.zero_quantized_gradients": Noted((False,), "ZeRO sends gradients in their own type"),
    "zero_optimization.use_multi_rank_bucket_allreduce": Noted(
        (True, False), "a rank reduces the shard that is its own"
    ),
    "zero_optimization.log_trace_cache_warnings": Noted((True, False), "minidist has no trace cache"),
    "zero_optimization.save_muon_momentum_buffer_in_memory": Noted(
        (True, False), "Muon's momentum buffer is optimizer state, and lies where that lies"
    ),
    # activations
    "activation_checkpointing.partition_activations": Noted((False, None), "--sequence-parallel splits activations"),
    "activation_checkpointing.contiguous_memory_optimization": Noted((False, None), "what a block keeps is one array"),
    "activation_checkpointing.number_checkpoints": Noted(
        (None,), "--recompute sqrt or budget:BYTES chooses their number"
    ),
    "activation_checkpointing.synchronize_checkpoint_boundary": Noted((False, None), KERNEL),
    "activation_checkpointing.profile": Noted((False, None), "--trace has the time of every computation and message"),
}


def note_of(key: str) -> Noted | None:
    """Return the note of a key, or of the nearest section above it that has one."""
    while key:
        if key in NOTED:
            return NOTED[key]
        key = key.rpartition(".")[0]
    return None


def unknown(key: str) -> str:
    """Return why a key without a note does not apply, with the nearest key of its section."""
    section = key.rpartition(".")[0]
    siblings = {k for k in (*APPLIED, *NOTED) if k.rpartition(".")[0] == section}
    return f"neither DeepSpeed's documentation nor minidist has such a key{nearest(key, siblings)}"
