"""What the planner counts of eager kernels is what PyTorch's autograd saves in a block of transformers' Llama."""

import pytest

from minidist.planning.architecture import Architecture
from minidist.planning.cluster.layout import ClusterLayout, Job
from minidist.planning.cluster.memory import block_activations, eager_bytes

BATCH, LENGTH, HEADS, WIDTH, INNER = 2, 64, 4, 96, 200


def saved(transformers, torch, layers, attention):
    """Return the bytes of all storages, but those of weights, that autograd keeps for a model's backward pass."""
    config = transformers.LlamaConfig(
        hidden_size=WIDTH,
        intermediate_size=INNER,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        num_hidden_layers=layers,
        vocab_size=50,
    )
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention).to(torch.bfloat16)
    weights = {weight.untyped_storage().data_ptr() for weight in (*model.parameters(), *model.buffers())}
    kept = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage  # held, so that no other storage gets its address
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(input_ids=torch.zeros(BATCH, LENGTH, dtype=torch.long), use_cache=False)
    return sum(storage.nbytes() for storage in kept.values())


def test_a_block_of_eager_kernels_keeps_what_is_counted():
    """With fused and with unfused attention: one more layer saves a block, and 4 bytes per token and norm."""
    transformers, torch = pytest.importorskip("transformers"), pytest.importorskip("torch")
    model = Architecture(2, WIDTH, HEADS, 50, LENGTH, INNER, gated=True)
    layout = ClusterLayout(micro_batch=BATCH)
    for attention, fused in (("sdpa", True), ("eager", False)):
        job = Job(model, LENGTH, BATCH, gpus=1, fused_attention=fused, kernels="eager")
        counted = block_activations(layout, job, 0) + eager_bytes(layout, job, 0)
        more = saved(transformers, torch, 3, attention) - saved(transformers, torch, 2, attention)
        assert more == counted + 2 * 4 * BATCH * LENGTH, attention
