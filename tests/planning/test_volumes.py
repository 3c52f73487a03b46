"""Every byte of every composition is in the closed form, purpose by purpose."""

import pytest

from minidist.comm.launching import execute
from minidist.commands.runner import summarize
from minidist.job.config.train_config import TrainConfig
from minidist.job.train.start import number_of_ranks
from minidist.job.train.trainer import train
from tests.jobs import SMALL_GPT

# An MLP has no heads and no context: both have their default.
MLP = {"model": "mlp", "data": "glyphs", "heads": 4, "context": 64}
SMALL = SMALL_GPT | {"width": 24, "heads": 4, "context": 8, "steps": 2, "micro_batch": 1, "clip": 0.1}


def table(tmp_path, ranks, **values):
    config = TrainConfig.make(**{**SMALL, **values})
    assert number_of_ranks(config, ranks) == ranks
    summary = summarize(config, execute(train, config, ranks=ranks), tmp_path / "run.jsonl", 1.0)
    assert summary.volumes_hold(), summary.table()
    return {name: volume["measured"] for name, volume in summary.bytes_by_purpose.items()}


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("ranks", "values"),
    [
        (
            4,
            {
                "pp": 2,
                "zero": 3,
                "layers": 4,
                "schedule": "interleaved",
                "chunks": 2,
                "microbatches": 2,
                "recompute": "stages:0,3",
            },
        ),
        (6, {"pp": 3, "layers": 3, "zero": 1, "microbatches": 2}),
        (6, {"pp": 2, "zero": 2, "microbatches": 3}),
        (4, {"pp": 2, "zero": 2, "schedule": "dualpipe", "layers": 4, "microbatches": 4}),
        (2, {"tp": 2, "recompute": "full"}),
        (4, {"tp": 2, "sequence_parallel": True, "zero": 2, "accumulation": 2}),
        (8, {"tp": 2, "pp": 2, "sequence_parallel": True, "recompute": "full", "microbatches": 3}),
        (4, {"tp": 2, "pp": 2, "schedule": "zb-v", "layers": 4, "model": "llama", "kv_heads": 2, "microbatches": 4}),
        (4, {"tp": 2, "pp": 2, **MLP, "layers": 4, "microbatches": 2}),
        (8, {"cp": 2, "tp": 4, "model": "llama", "kv_heads": 2, "recompute": "full"}),
        (3, {"cp": 3, "context": 10, "recompute": "full"}),
        (2, {"tp": 2, "recompute": "sqrt"}),
        (3, {"tp": 3, "pp": 1, **MLP, "layers": 3, "recompute": "sqrt"}),
        (6, {"tp": 3, "pp": 2, **MLP, "layers": 2, "microbatches": 2, "partition": "2,1"}),
        (4, {"pp": 2, "zero": 3, "persistence_threshold": 100, "microbatches": 2}),
        (2, {"zero": 3, **MLP, "recompute": "sqrt"}),
        (4, {"cp": 2, "pp": 2, "recompute": "selective", "model": "llama", "kv_heads": 2, "microbatches": 2}),
        (8, {"cp": 2, "tp": 2, "attention": "ulysses", "sequence_parallel": True, "zero": 3}),
        (8, {"experts": 4, "ep": 2, "dp": 4, "tp": 2, "zero": 1, "top_k": 2}),
        (8, {"experts": 4, "ep": 2, "dp": 8, "zero": 3, "reshard_after_forward": "2"}),
        (
            8,
            {"experts": 4, "ep": 2, "cp": 2, "tp": 2, "sequence_parallel": True, "context": 12, "attention": "ulysses"},
        ),
        (4, {"experts": 4, "ep": 2, "pp": 2, "recompute": "stages:0", "microbatches": 2}),
        (4, {"experts": 4, "ep": 2, "dp": 2, "tp": 2, "recompute": "full"}),
    ],
)
def test_every_byte_is_in_the_closed_form(ranks, values, tmp_path):
    table(tmp_path, ranks, **values)
