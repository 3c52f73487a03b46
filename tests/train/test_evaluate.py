"""Held-out loss: of data that is never trained on, the same on every rank and on one device, and it leaves training as
it was.
"""

import json

import numpy as np
import pytest

from minidist.comm import SimWorld
from minidist.data import hold_out, load_dataset
from minidist.job.config.rules import check_rules
from minidist.job.config.train_config import TrainConfig, resolve_batches
from minidist.job.equality.compare import Judge, tier_of
from minidist.job.equality.expected import expected_snapshots
from minidist.job.train.metrics import read_metrics
from minidist.job.train.trainer import train
from minidist.planning.volumes import closed_form_bytes, evaluation_bytes
from tests.cases import each, has_settings
from tests.jobs import SMALL_GPT, sent_bytes

# An MLP has no heads and no context: both have their default.
MLP = {"model": "mlp", "data": "glyphs", "heads": 4, "context": 64}
JOB = SMALL_GPT | {"steps": 6, "global_batch": 8, "dropout": 0.3}


def test_nothing_held_out_is_trained_on():
    for name in ("markov", "glyphs"):
        whole = load_dataset(name)
        kept, rest = hold_out(whole)
        arrays = (lambda d: d.tokens) if whole.is_tokens else (lambda d: d.inputs)
        assert np.array_equal(np.concatenate([arrays(kept), arrays(rest)]), arrays(whole))
        assert len(arrays(rest)) == pytest.approx(0.1 * len(arrays(whole)), abs=1)


def test_evaluating_changes_nothing_of_the_training():
    """Dropout is back, no gradient is left behind, and the losses are those of a job that looks once at the end."""
    often, once = (SimWorld(2).run(train, TrainConfig.make(**JOB, evaluate_every=every)) for every in (1, 6))
    assert [r.digest for r in often] == [r.digest for r in once]
    assert often[0].losses == once[0].losses
    assert often[0].held_out[6] == once[0].held_out[6]
    assert often[0].held_out[6] != often[0].losses[-1]


@pytest.mark.skipif(not has_settings(["document_separator"]), reason="the folder of the technique is deleted")
def test_attention_stays_inside_documents_in_evaluations_too():
    # The weights hardly move, so the losses differ by the masks alone; token 2 occurs in the held-out text.
    job = {**JOB, "dropout": 0.0, "steps": 1, "lr": 1e-9, "evaluate_every": 1, "precision": "fp64"}
    whole, documents, stages = (
        SimWorld(ranks).run(train, TrainConfig.make(**job, **values))[0].held_out[1]
        for ranks, values in (
            (1, {}),
            (1, {"document_separator": 2}),
            (2, {"document_separator": 2, "pp": 2, "microbatches": 2}),
        )
    )
    assert abs(documents - whole) > 1e-6
    assert stages == pytest.approx(documents, rel=1e-12)


@each(
    ("ranks", "values"),
    [
        (2, {"pp": 2, "microbatches": 3, "global_batch": 6, "dropout": 0.2}),
        (2, {"pp": 2, "schedule": "zb-v", "layers": 4, "microbatches": 4, "zero": 1}),
        (2, {"pp": 2, "schedule": "dualpipe", "microbatches": 4, "zero": 2}),
        (
            4,
            {
                "pp": 2,
                "zero": 3,
                "schedule": "interleaved",
                "chunks": 2,
                "layers": 4,
                "microbatches": 2,
                "global_batch": 4,
            },
        ),
        (2, {"pp": 2, **MLP, "precision": "fp16"}),
        (4, {"pp": 2, "tp": 2, **MLP, "layers": 1}),
        (5, {"zero": 3, "global_batch": 5, "recompute": "sqrt"}),
        (4, {"zero": 3, "persistence_threshold": 40, "dp_replicate": 2}),
        (4, {"tp": 2, "pp": 2, "sequence_parallel": True, "microbatches": 2}),
        (3, {"cp": 3, "context": 7, "experts": 2}),
        (4, {"tp": 2, "model": "llama", "kv_heads": 1, "zero": 3}),
        (4, {"ep": 2, "experts": 4, "pp": 2, "microbatches": 2, "recompute": "full"}),
        (2, {"local_steps": 2}),
    ],
    sampled=6,
)
def test_every_layout_has_the_loss_of_one_device(ranks, values):
    """Bit for bit where no sum is cut, else to 1e-12; and every byte is in the closed form under its purpose."""
    values = {**JOB, "precision": "fp64", "reduction": "ordered", "steps": 2, "dropout": 0.0, **values}
    config = TrainConfig.make(**values, evaluate_every=2)
    batches = resolve_batches(config, ranks)
    check_rules(config, batches)
    judges = [
        Judge(expected_snapshots(config, ranks, rank), tier_of(config, batches.dims))
        for rank in range(2 if config.local_steps else 1)
    ]
    results = SimWorld(ranks).run(lambda comm: train(comm, config, [judges[comm.rank % len(judges)]]))
    assert [judge.verdict.first_difference for judge in judges] == [None] * len(judges)
    assert all(list(result.held_out) == [2] and result.held_out == results[0].held_out for result in results)

    config, world = TrainConfig.make(**values, evaluate_every=1), SimWorld(ranks)
    sizes = [result.sizes for result in world.run(train, config)]
    closed = closed_form_bytes(config, batches, sizes)
    evaluation = evaluation_bytes(config, batches, sizes, 0)
    assert {name: closed.get(name, 0) + evaluation[name] for name in (*closed, "evaluation")} == sent_bytes(world)


def test_the_command_says_it_and_its_bytes_are_in_the_closed_form(tmp_path, minidist):
    flags = ["--dp", "3", "--steps", "4", "--width", "16", "--heads", "2", "--context", "8", "--evaluate-every", "2"]
    answer = json.loads(
        minidist("train", *flags, "--json", "--metrics", tmp_path / "m.jsonl", "--trace", tmp_path / "t.jsonl").out
    )
    assert list(answer["held_out"]) == ["2", "4"]
    assert answer["bytes_by_purpose"]["evaluation"] == {"measured": 2 * 3 * 2 * 8, "closed_form": 2 * 3 * 2 * 8}
    for volume in answer["bytes_by_purpose"].values():
        assert volume["measured"] == volume["closed_form"]
    assert [record.get("held_out_loss") for record in read_metrics(tmp_path / "m.jsonl")] == [
        None,
        answer["held_out"]["2"],
        None,
        answer["held_out"]["4"],
    ]
