"""`--fold`: one rank of each pipeline stage runs, and the bytes, messages, memory and virtual time are those of all."""

import json

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from minidist.base.meta import creating_meta
from minidist.comm import SimWorld
from minidist.comm.sim.folded import FoldedWorld
from minidist.comm.sim.links import LinkModel
from minidist.commands.dry_run import check_fold
from minidist.core.base.errors import UsageError
from minidist.job.config.train_config import TrainConfig
from minidist.job.train.start import number_of_ranks
from minidist.job.train.trainer import train
from minidist.pipeline.runtime.repeated import RepeatedPipeline
from tests.cases import each

# Times of powers of two have no rounding: folded times are equal to the bit.
LINKS = LinkModel(
    alpha=2.0**-20,
    flops=2.0**37,
    memory_bandwidth=2.0**36,
    link=lambda a, b: (2.0**-20, 2.0**-33 if a // 8 == b // 8 else 2.0**-31),
    free_startup=True,
)
SMALL = {"data": "markov", "layers": 2, "width": 16, "heads": 4, "context": 8, "steps": 2, "global_batch": 8}

JOBS = [
    (4, {"dp": 4, "clip": 1.0}),
    (4, {"dp": 4, "reduction": "ordered", "precision": "fp16"}),
    (4, {"dp": 4, "zero": 1, "accumulation": 2}),
    (4, {"dp": 4, "optimizer": "lamb"}),
    (4, {"dp": 4, "zero": 2, "precision": "bf16"}),
    (4, {"dp": 4, "zero": 3, "recompute": "full"}),
    (4, {"dp": 4, "experts": 4, "ep": 2}),
    (4, {"dp": 4, "evaluate_every": 1}),
    (4, {"dp": 4, "local_steps": 2, "optimizer": "sgd"}),
    (4, {"dp": 4, "compression": "topk:0.1"}),
    (4, {"dp": 4, "sparsity": 0.7, "sparsity_schedule": "1"}),
    (4, {"tp": 4, "sequence_parallel": True, "recompute": "selective"}),
    (2, {"cp": 2, "model": "llama", "kv_heads": 2}),
    (4, {"cp": 4, "attention": "ulysses"}),
    (8, {"dp": 2, "cp": 2, "tp": 2, "zero": 3}),
    (4, {"pp": 2, "dp": 2, "microbatches": 2, "clip": 1.0}),
    (4, {"pp": 2, "dp": 2, "microbatches": 4, "schedule": "zb-v", "layers": 4}),
    (8, {"pp": 2, "dp": 2, "tp": 2, "microbatches": 2, "precision": "fp16", "clip": 1.0, "zero": 1}),
    (8, {"pp": 2, "tp": 2, "cp": 2, "microbatches": 4, "schedule": "interleaved", "layers": 4, "zero": 1}),
    (8, {"pp": 2, "dp": 4, "microbatches": 2, "zero": 2, "precision": "bf16"}),
    (8, {"pp": 2, "dp": 4, "microbatches": 2, "zero": 3}),
]


# Where the bytes of a checkpoint depend on the rank in other ways than in `JOBS`.
SAVED = [
    (4, {"dp": 4, "zero": 3, "dp_replicate": 2}),
    (4, {"dp": 4, "zero": 3, "persistence_threshold": 64, "offload": "parameters"}),
    (4, {"dp": 4, "zero": 1, "compression": "topk:0.1"}),
    (4, {"dp": 4, "local_steps": 2, "outer_fragments": 2, "outer_delay": 1, "outer_optimizer": "nesterov"}),
    (4, {"dp": 4, "model": "cnn", "data": "glyphs", "batch_norm": "sync"}),
    (8, {"dp": 4, "tp": 2, "experts": 4, "ep": 2, "zero": 2, "precision": "bf16"}),
    (8, {"dp": 2, "tp": 4, "model": "llama", "kv_heads": 2, "zero": 1, "ffn": 92}),
    (8, {"pp": 2, "dp": 2, "tp": 2, "microbatches": 2, "compression": "sign"}),
    (8, {"pp": 2, "dp": 4, "microbatches": 2, "model": "cnn", "data": "glyphs", "batch_norm": "sync"}),
    (8, {"pp": 2, "dp": 4, "microbatches": 2, "zero": 3, "experts": 4, "ep": 2}),
    (8, {"pp": 2, "dp": 2, "tp": 2, "schedule": "interleaved", "layers": 4, "microbatches": 2, "every": 1, "zero": 1}),
]


def names(value):
    """Return the name of a test's case."""
    return str(value).strip("{}").replace("'", "")


def run_both(ranks, **job):
    """Run a job on all ranks, and folded; return (classes, both worlds, the results of both), all ranks first."""
    config = TrainConfig.make(**{**SMALL, **job})

    def program(comm):
        with creating_meta():
            return train(comm, config)

    stage = ranks // config.pp
    classes = [range(first, first + stage) for first in range(0, ranks, stage)]
    whole = SimWorld(ranks, checks=False, record="totals", links=LINKS)
    folded = FoldedWorld(ranks, classes, links=LINKS)
    return classes, whole, folded, whole.run(program), folded.run(program)


def assert_equal_messages(whole, folded, classes):
    """Assert that the messages and bytes of every stage are equal, by purpose."""
    for members in classes:
        of_stage = folded.traces[members[0]]
        for kind in ("bytes_by_purpose", "messages_by_purpose"):
            together = {}
            for rank in members:
                for purpose, count in getattr(whole.traces[rank], kind)().items():
                    together[purpose] = together.get(purpose, 0) + count
            assert getattr(of_stage, kind)() == together


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("ranks", "job"), JOBS, ids=names)
def test_a_folded_dry_run_equals_that_of_all_ranks(ranks, job):
    classes, whole, folded, expected, found = run_both(ranks, **job)
    assert_equal_messages(whole, folded, classes)
    for members in classes:
        of_stage = folded.traces[members[0]]

        # Peaks. The last shard of a parameter may be shorter, and a shard of the vocabulary have fewer of the words.
        first = members[0]
        for kind in ("peak_by_purpose", "step_peak"):
            assert getattr(found[first], kind) == getattr(expected[first], kind)
            fullest = max(sum(getattr(expected[rank], kind).values()) for rank in members)
            assert fullest == sum(getattr(found[first], kind).values())
        assert {whole.traces[rank].busy for rank in members} == {of_stage.busy}

    # Where chunks are unequal the time is an upper bound.
    assert folded.end_time == whole.end_time or (folded.uneven and folded.end_time > whole.end_time)


def repeated(ranks, job):
    """Run a folded job with equal micro-batches; return its results, its counts and times, and how many it repeats."""
    config = TrainConfig.make(**{**SMALL, "global_batch": None, "micro_batch": 1, "steps": 1, **job})
    stage, count = ranks // config.pp, []

    def program(comm):
        with creating_meta(), pytest.MonkeyPatch.context() as patch:
            again = RepeatedPipeline._again
            patch.setattr(RepeatedPipeline, "_again", lambda self, *a: count.append(1) or again(self, *a))
            return train(comm, config)

    # Times are rounded, and the ranks of a call are on several nodes.
    links = LinkModel(link=lambda a, b: (1e-6, 1e-10 / 3) if a // 2 == b // 2 else (5e-6, 1e-9 / 7), free_startup=True)
    world = FoldedWorld(ranks, [range(first, first + stage) for first in range(0, ranks, stage)], links=links)
    results = world.run(program)
    counts = [(t.bytes_by_purpose(), t.messages_by_purpose(), t.busy, t.computed) for t in world.traces]
    return (results, counts, world.end_time, world.uneven), len(count)


@each(
    ("ranks", "job"),
    [
        (8, {"pp": 2, "dp": 2, "tp": 2, "zero": 1, "sequence_parallel": True, "recompute": "selective"}),
        (4, {"pp": 2, "dp": 2, "steps": 2, "dropout": 0.1, "microbatches": 9}),
        (4, {"pp": 2, "dp": 2, "model": "llama", "kv_heads": 2, "precision": "fp16", "clip": 1.0, "steps": 2}),
        (4, {"pp": 2, "tp": 2, "schedule": "interleaved", "layers": 4, "precision": "bf16"}),
        (4, {"pp": 4, "layers": 4, "schedule": "eager-1f1b", "microbatches": 20, "steps": 2}),
        (4, {"pp": 2, "tp": 2, "schedule": "dualpipev", "layers": 4}),
        (8, {"pp": 2, "dp": 4, "experts": 4, "ep": 2}),
        (4, {"pp": 2, "cp": 2, "attention": "ulysses"}),
    ],
    sampled=3,
)
def test_micro_batches_that_repeat_what_others_did_change_nothing(ranks, job, monkeypatch):
    job = {"microbatches": 12, **job}
    found, count = repeated(ranks, job)
    assert count > 6
    monkeypatch.setattr(RepeatedPipeline, "_steady", lambda self: set())
    assert repeated(ranks, job) == (found, 0)


@each(
    ("ranks", "job"),
    [
        (4, {"pp": 2, "cp": 2}),  # a ring of one rank
        (4, {"pp": 2, "dp": 2, "zero": 3}),  # gathers on another stream
        (4, {"pp": 2, "dp": 2, "zero": 2}),
        (4, {"pp": 2, "dp": 2, "offload": "activations"}),
        (4, {"pp": 2, "dp": 2, "schedule": "zb-h1"}),
    ],
)
def test_micro_batches_in_which_others_have_a_part_are_not_repeated(ranks, job, monkeypatch):
    job = {"microbatches": 8, **job}
    found, count = repeated(ranks, job)
    assert count == 0
    monkeypatch.setattr(RepeatedPipeline, "_steady", lambda self: set())
    assert repeated(ranks, job) == (found, 0)


def assert_equal_checkpoints(ranks, **job):
    """Assert that every rank's bytes in a checkpoint are those that it has when all run, and the messages, too."""
    classes, whole, folded, expected, found = run_both(ranks, save="new", **job)
    wanted = [result.checkpoint_bytes[rank] for rank, result in enumerate(expected)]
    assert [result.checkpoint_bytes[rank] for rank, result in enumerate(found)] == wanted
    assert any(wanted)
    assert_equal_messages(whole, folded, classes)
    assert ranks == 1 or any("checkpoint" in trace.messages_by_purpose() for trace in folded.traces)


@pytest.mark.sampled(6)
@pytest.mark.parametrize(("ranks", "job"), JOBS + SAVED, ids=names)
def test_every_rank_saves_the_bytes_that_it_saves_when_all_run(ranks, job):
    assert_equal_checkpoints(ranks, **job)


@st.composite
def layouts(draw):
    """Draw the settings of a job on up to 16 ranks."""
    job = {axis: draw(st.sampled_from(sizes)) for axis, sizes in {"pp": [1, 2], "dp": [1, 2, 3, 4]}.items()}
    job |= {axis: draw(st.sampled_from([1, 1, 2])) for axis in ("cp", "tp")}
    job |= {"zero": draw(st.integers(0, 3)), "precision": draw(st.sampled_from(["fp32", "bf16"]))}
    job |= {"optimizer": draw(st.sampled_from(["sgd", "adam"])), "model": draw(st.sampled_from(["gpt", "llama"]))}
    job |= {"width": draw(st.sampled_from([16, 40])), "layers": 4, "steps": 1, "global_batch": 4 * job["dp"]}
    if job["pp"] > 1:
        job |= {"microbatches": 4, "schedule": draw(st.sampled_from(["1f1b", "interleaved"]))}
    if job["tp"] > 1:
        job["sequence_parallel"] = draw(st.booleans())
    if draw(st.booleans()):
        job |= {"experts": 12, "ep": draw(st.sampled_from([n for n in (1, 2, 3, 4) if job["dp"] % n == 0]))}
    return job


@settings(max_examples=settings().max_examples // 6)
@given(job=layouts())
def test_every_rank_saves_these_bytes_in_any_layout(job):
    config = TrainConfig.make(**{**SMALL, **job})
    try:
        ranks = number_of_ranks(config, None, has_values=False)
        check_fold(config, ranks)
    except UsageError:
        assume(False)
    assert_equal_checkpoints(ranks, **job)


FOLDED = ["train", "--dry-run", "--fold"]


@pytest.mark.parametrize("dp", [16, pytest.param(128, marks=pytest.mark.exhaustive)])
def test_hundreds_of_ranks_or_two_thousand(dp, minidist, tmp_path, monkeypatch):
    ranks = 16 * dp
    sizes = ["--layers", "2", "--width", "512", "--heads", "8", "--context", "64", "--data", "markov", "--steps", "1"]
    layout = f"--dp {dp} --tp 8 --pp 2 --microbatches 2 --global-batch {2 * dp} --zero 1".split()
    monkeypatch.chdir(tmp_path)
    words = ["--gpu", "h100", "--precision", "bf16", "--save", "new", "--json"]
    result = json.loads(minidist(*FOLDED, *sizes, *layout, *words).out)
    assert result["ranks"] == len(result["peak_bytes"]) == ranks
    assert result["folded"]
    assert all(volume["measured"] == volume["closed_form"] for volume in result["bytes_by_purpose"].values())
    assert result["messages_by_purpose"]["pipeline_activation"] == ranks // 2 * 2
    assert result["step_peak_by_purpose"][0] != result["step_peak_by_purpose"][ranks // 2]
    assert len({json.dumps(split) for split in result["step_peak_by_purpose"]}) == 2
    assert result["virtual_seconds"] > 0
    assert 0 < result["bubble"] < 1

    # Each rank of a stage saves another part: of each parameter 2 B, and 12 B of optimizer state.
    assert len(set(result["checkpoint_bytes"])) > 40
    parameters = 2 * (12 * 512**2 + 13 * 512) + 2 * 512 + (64 + 16) * 512  # of a vocabulary of 16
    assert 0 < sum(result["checkpoint_bytes"]) - 14 * parameters < ranks * 20_000
    assert not (tmp_path / "new").exists()


def test_what_a_folded_dry_run_with_a_checkpoint_prints(minidist, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    job = ["--dp", "2", "--pp", "2", "--microbatches", "2", "--data", "markov", "--steps", "1", "--zero", "1"]
    saved = json.loads(minidist(*FOLDED, *job, "--save", "new", "--json").out)["checkpoint_bytes"]
    most = max(saved)
    assert (
        f"tensors of a checkpoint: {sum(saved):,} B on 4 ranks; rank {saved.index(most)} writes the most, {most:,} B\n"
    ) in minidist(*FOLDED, *job, "--save", "new").out
    assert not (tmp_path / "new").exists()


@each(
    ("flags", "sentence"),
    [
        (["--dp", "3", "--global-batch", "32"], "replicas with different numbers of rows differ; leave out --fold"),
        (["--dp", "2", "--optimizer", "muon", "--momentum", "0.9"], "orthogonalise other matrices (muon) differ"),
        (["--dp", "2", "--optimizer", "lamb", "--zero", "1"], "(--optimizer lamb with --zero 1) differ"),
        (["--dp", "2", "--check-replicas"], "the tables of --check-replicas differ"),
        (["--dp", "2", "--check-data"], "the samples of --check-data differ"),
        (["--pp", "2", "--schedule", "pipedream"], "the replicas of --schedule pipedream differ"),
        (["--strategy", "ps", "--ranks", "3"], "a parameter server's ranks differ"),
        (["--cp", "4", "--context", "12"], "parts of --context 12 tokens differ"),
        (["--dp", "2", "--trace", "x.jsonl"], "--fold keeps no events; leave out --trace, or --fold"),
    ],
)
def test_jobs_whose_ranks_differ_are_refused(flags, sentence, minidist):
    assert sentence in minidist(*FOLDED, *flags, code=2).err


def test_fold_without_a_dry_run_is_refused(minidist):
    error = minidist("train", "--dp", "2", "--fold", code=2).err
    assert "--fold requires --dry-run; add it" in error
    assert "--trace" not in error
