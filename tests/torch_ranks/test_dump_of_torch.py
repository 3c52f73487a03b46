"""A dump of a model of transformers, sharded by FSDP2 and wrapped by DDP on simulated ranks, is equal to ours."""

import re
from pathlib import Path

import numpy as np
import pytest

pytestmark = pytest.mark.peers
torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

PAGE = Path(__file__).parents[2] / "docs" / "gradients.md"
TOKENS = np.random.default_rng(0).integers(0, 37, (4, 9))


def dump_of_the_page():
    """The function of docs/gradients.md."""
    source = re.search(r"<!-- dump\.py -->\n```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)[1]
    space = {}
    exec(source, space)
    return space["dump"]


def make(kind):
    torch.manual_seed(0)
    if kind == "gpt":
        config = transformers.GPT2Config(
            vocab_size=37, n_positions=8, n_embd=16, n_layer=2, n_head=4, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0
        )
        return transformers.GPT2LMHeadModel(config)
    config = transformers.LlamaConfig(
        vocab_size=37,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=8,
        rms_norm_eps=1e-5,
    )
    return transformers.LlamaForCausalLM(config)


@pytest.mark.parametrize("kind", ["gpt", "llama"])
@pytest.mark.parametrize("wrapper", ["one device", "ddp", "fsdp"])
@pytest.mark.parametrize("bug", [False, True])
def test_the_dump_of_a_torch_model(kind, wrapper, bug, tmp_path):
    from minidist.debug.dumps.dump import read_dump
    from minidist.debug.dumps.dump_comparison import compare_with_ours
    from minidist.debug.torch_ranks.program import run_on_ranks

    dump = dump_of_the_page()

    def program():
        import torch.distributed as dist
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard
        from torch.nn.parallel import DistributedDataParallel

        dist.init_process_group("gloo")
        mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
        model = make(kind)
        if wrapper == "ddp":
            model = DistributedDataParallel(model)
        elif wrapper == "fsdp":
            fully_shard(model, mesh=mesh)
        mine = torch.from_numpy(np.array_split(TOKENS, dist.get_world_size())[dist.get_rank()])
        logits = model(mine[:, :-1]).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), mine[:, 1:].flatten())
        (2 * loss if bug else loss).backward()
        dump(model, mine, tmp_path, "huggingface")

    run_on_ranks(program, 1 if wrapper == "one device" else 2)
    found = compare_with_ours(read_dump(tmp_path), kind, 4, 2 if kind == "llama" else None)
    assert found.equal is not bug, found.text()
    if bug:
        assert found.differences[0].patterns[0].startswith("2 times")
        assert len(found.differences) >= found.compared - 2
