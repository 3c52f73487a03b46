"""`--distill-from`: a student has the bits of one device wherever its teacher is, and every byte is counted."""

import json
import shutil

import numpy as np
import pytest

from minidist.comm import SimWorld
from minidist.commands.generation import load_model
from minidist.core.autograd import no_grad
from minidist.core.base.errors import UsageError
from minidist.job.checkpoint import saved_model
from minidist.job.config.train_config import TrainConfig, resolve_batches, resolve_dims
from minidist.job.equality.compare import compare_rank
from minidist.job.train.job import build
from minidist.job.train.start import number_of_ranks
from minidist.job.train.trainer import train
from tests.cases import each, has_settings
from tests.jobs import equals_one_device_in_closed_form, has_the_bits_of, train_in_closed_form

JOB = {"model": "gpt", "layers": 1, "width": 8, "heads": 2, "context": 6, "data": "markov", "steps": 3, "lr": 0.03}
JOB |= {"micro_batch": 2, "reduction": "ordered"}
TEACHER = {"layers": 2, "width": 16, "context": 8, "steps": 2}
ON_RANKS, SHARDED = {"teacher_ranks": 1}, {"shard_teacher": True}
UNEVEN = {"micro_batch": None, "global_batch": 7}
LAYOUTS = {
    "teacher's rank": {"dp": 2, **ON_RANKS, "accumulation": 2, "zero": 2},
    "one rank": {"accumulation": 3},
    "dp 3": {"dp": 3, "dropout": 0.1, "clip": 0.5, **UNEVEN},
    "zero 1, fp64": {"dp": 2, "zero": 1, "precision": "fp64", "accumulation": 2},
    "zero 3, experts": {"dp": 2, "zero": 3, "experts": 2, "recompute": "full"},
    "int8, pruned": {"dp": 2, "quantize": "int8", "sparsity": 0.5, "sparsity_schedule": "1"},
    "pipeline": {"pp": 2, "dp": 2, "layers": 2, "microbatches": 2},
    "pipedream": {"pp": 2, "schedule": "pipedream-2bw", "model": "llama", "layers": 2},
    "local steps": {"dp": 2, "local_steps": 2},
    "mlp": {"dp": 3, "model": "mlp", "data": "glyphs", "heads": 4, "context": 64},
    "documents": {"dp": 2, "document_separator": 3, **ON_RANKS},
    "sharded": {"dp": 3, **SHARDED, "teacher_precision": "bf16", "accumulation": 2},
    "sharded, zero 3, bf16": {"dp": 2, "zero": 3, **SHARDED, "precision": "bf16"},
    "sharded mlp": {"dp": 2, "model": "mlp", "data": "glyphs", "heads": 4, "context": 64, **SHARDED},
    "teachers' ranks": {"dp": 3, **UNEVEN, "teacher_ranks": 2, "teacher_precision": "fp16", "temperature": 4.0},
    "teacher's rank, mlp": {"dp": 2, "model": "mlp", "data": "glyphs", "heads": 4, "context": 64, **ON_RANKS},
}
LAYOUTS = {name: settings for name, settings in LAYOUTS.items() if has_settings(settings)}
FLOATS = {"precision": "fp64", "reduction": "ring"}
FLOAT_LAYOUTS = {
    "cp": {"cp": 3, **FLOATS},
    "cp, sharded": {"cp": 2, "dp": 2, **SHARDED, **FLOATS},
    "cp, teacher's rank": {"cp": 2, "dp": 2, "context": 7, **ON_RANKS, **FLOATS},
    "experts apart": {"dp": 2, "experts": 2, "ep": 2, **FLOATS},
    "tp": {"tp": 2, "dropout": 0.1, **FLOATS},
    "tp, sp, sharded": {"tp": 2, "dp": 2, "sequence_parallel": True, "temperature": 4.0, **SHARDED, **FLOATS},
    "tp, pp, llama": {"tp": 2, "pp": 2, "model": "llama", "layers": 2, "microbatches": 2, **FLOATS},
    "tp, cp, teacher's rank": {"tp": 2, "cp": 2, "distill_weight": 0.9, **ON_RANKS, **FLOATS},
    "tp, mlp": {"tp": 2, "model": "mlp", "data": "glyphs", "heads": 4, "context": 64, **FLOATS},
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Directories of trained teachers: a GPT, and an MLP."""
    folders = {}
    for kind, more in {"gpt": {}, "mlp": {"model": "mlp", "data": "glyphs", "heads": 4, "context": 64}}.items():
        folders[kind] = str(tmp_path_factory.mktemp(kind))
        SimWorld(1).run(train, TrainConfig.make(**{**JOB, **TEACHER, **more, "save": folders[kind]}))
    return folders


def config_of(saved, layout, **more):
    settings = {**JOB, **layout, **more}
    return TrainConfig.make(**{"distill_from": saved["mlp" if settings["model"] == "mlp" else "gpt"], **settings})


def ranks_of(config):
    return resolve_dims(config).ranks + config.teacher_ranks


@each("layout", [*LAYOUTS, *FLOAT_LAYOUTS], sampled=6)
def test_every_layout_equals_one_device_and_every_byte_is_in_the_closed_form(layout, saved):
    config = config_of(saved, {**LAYOUTS, **FLOAT_LAYOUTS}[layout])
    if layout not in ("pipedream", "local steps"):
        config = config.model_copy(update={"evaluate_every": 2})
    ranks = number_of_ranks(config, None)
    assert ranks == ranks_of(config)
    if layout == "local steps":  # each rank is compared with the device of its replica
        assert all(verdict.equal for verdict in SimWorld(ranks).run(compare_rank, config))
        _, sent = train_in_closed_form(ranks, config)
    else:
        _, sent = equals_one_device_in_closed_form(ranks, config)
    assert (sent["teacher"] > 0) == (config.shard_teacher or config.teacher_ranks > 0)
    if config.teacher_ranks:
        logits = 3 * resolve_batches(config, ranks).global_batch * 4 * 10 if config.model == "mlp" else 0
        assert not logits or sent["teacher"] == logits + 8


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_a_split_vocabulary_in_half_precision(precision, saved):
    """The loss and its five numbers per token are float32; it is near to that of one device."""
    losses = []
    for tp in (1, 2):
        config = config_of(saved, {"tp": tp, "precision": precision, "reduction": "ring"})
        losses.append(train_in_closed_form(tp, config)[0][0].losses)
    np.testing.assert_allclose(losses[1], losses[0], rtol=0.02)


def test_all_forms_have_the_same_bits(saved):
    """Also with a teacher in half precision, sharded or whole."""
    forms = [{"dp": 3}, {"dp": 3, "teacher_ranks": 2}, {"dp": 3, **SHARDED}]
    losses = []
    for form in forms:
        config = config_of(saved, {"global_batch": 6, **form}, teacher_precision="bf16", steps=2)
        losses.append(SimWorld(ranks_of(config)).run(train, config)[0].losses)
    assert losses[0] == losses[1] == losses[2]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "layout",
    [
        {"dp": 3, **UNEVEN, "teacher_precision": "bf16"},
        {"dp": 2, "model": "mlp", "data": "glyphs", "heads": 4, "context": 64},
        {"dp": 2, **ON_RANKS},
    ],
    ids=["gpt", "mlp", "teacher's rank"],
)
def test_logits_that_are_stored_are_computed_once_and_have_the_same_bits(layout, saved, tmp_path):
    """On n ranks as on one device, which finds what the ranks stored; a second run computes nothing."""
    config = config_of(saved, layout, teacher_cache=str(tmp_path / "cache"))
    ranks = number_of_ranks(config, None)
    results = [SimWorld(ranks).run(train, config) for _ in range(2)]
    verdicts = SimWorld(ranks).run(compare_rank, config)
    assert verdicts[0].equal, verdicts[0].first_difference
    assert [r.digest for r in results[0]] == [r.digest for r in results[1]]
    counts = [[result.measured["teacher"] for result in run if result.measured["teacher"]["asked"]] for run in results]
    assert sum(count["asked"] for count in counts[0]) == 3 * resolve_batches(config, ranks).global_batch
    assert sum(count["computed"] for count in counts[0]) == len(list((tmp_path / "cache").iterdir()))
    assert [count["computed"] for count in counts[1]] == [0] * len(counts[1])

    # Another teacher, or another precision of it, has other entries; a damaged one is computed again.
    again = SimWorld(ranks).run(train, config.model_copy(update={"teacher_precision": "fp64"}))
    computed = sum(result.measured["teacher"]["computed"] for result in again)
    assert computed == sum(count["computed"] for count in counts[0])
    for entry in (tmp_path / "cache").iterdir():
        entry.write_bytes(entry.read_bytes()[:-1] + b"?")
    assert [r.digest for r in SimWorld(ranks).run(train, config)] == [r.digest for r in results[0]]


@pytest.mark.parametrize("layout", ["sharded", "teacher's rank"])
def test_a_resumed_job_has_the_bits_of_the_uninterrupted_one(layout, saved, tmp_path):
    settings = {"steps": 4, "save": str(tmp_path), "every": 2}
    config = config_of(saved, LAYOUTS[layout], **settings)
    whole = SimWorld(ranks_of(config)).run(train, config)
    (tmp_path / "latest").write_text("step-00000002")
    resumed = SimWorld(ranks_of(config)).run(train, config.model_copy(update={"resume": True}))
    assert [r.first_step for r in resumed] == [2] * len(resumed)
    has_the_bits_of(resumed, whole)


def test_a_resumed_job_has_the_same_teacher_by_its_weights(saved, tmp_path):
    settings = {"save": str(tmp_path / "student"), "steps": 2}
    SimWorld(1).run(train, config_of(saved, {}, **settings))
    copy = shutil.copytree(saved["gpt"], tmp_path / "moved")
    other = tmp_path / "other"
    SimWorld(1).run(train, TrainConfig.make(**{**JOB, **TEACHER, "save": str(other), "seed": 5}))
    again = {**settings, "resume": True, "steps": 3}
    assert SimWorld(1).run(train, config_of(saved, {}, **again, distill_from=str(copy)))[0].first_step == 2
    (tmp_path / "student" / "latest").write_text("step-00000002")
    for change, sentence in (
        ({"distill_from": str(other)}, "was made with another teacher than the one in --distill-from"),
        ({"distill_from": None}, "made with --distill-from .*, this job has None; resume with --distill-from"),
        ({"temperature": 3.0}, r"made with --temperature 2.0, this job has 3.0"),
        ({"distill_weight": 1.0}, "resume with --distill-weight 0.5"),
    ):
        with pytest.raises(UsageError, match=sentence):
            SimWorld(1).run(train, config_of(saved, {}, **{**again, **change}))


def test_a_student_learns_from_the_teacher_and_is_evaluated_on_labels(saved):
    """With all weight on the teacher, the loss is T^2 KL; the held-out loss is the cross-entropy of the labels."""
    config = config_of(saved, {}, distill_weight=1.0, temperature=3.0, evaluate_every=1, steps=1, micro_batch=4)
    result = SimWorld(1).run(train, config)[0]
    job = build(config, resolve_batches(config, 1))
    inputs, targets = job.micro_batch(0, 0)
    p, q = (
        np.exp(x / 3 - np.log(np.exp(x / 3).sum(-1, keepdims=True))) for x in (targets.logits, logits_of(job, inputs))
    )
    assert result.losses[0] == pytest.approx(9 * (p * np.log(p / q)).sum() / 24, rel=1e-3)
    assert result.held_out[1] == pytest.approx(np.log(16), abs=0.1)
    assert not teacher_of(job).model.training
    assert not any(parameter.requires_grad for parameter in teacher_of(job).model.parameters())


def test_a_teacher_sees_documents_as_the_student_does(saved):
    job = build(config_of(saved, {"document_separator": 3}), resolve_batches(config_of(saved, {}), 1))
    tokens = np.array([[1, 2, 3, 4, 5, 6], [9, 9, 3, 4, 5, 6]])
    logits = teacher_of(job).logits(0, tokens)
    assert np.abs(logits[0, 3:] - logits[1, 3:]).max() < 1e-6 < 1e-3 < np.abs(logits[0, 2] - logits[1, 2]).max()


def teacher_of(job):
    return next(each.teacher for each in job.extensions if hasattr(each, "teacher"))


def logits_of(job, inputs):
    with no_grad():
        return job.model(inputs).data


@pytest.mark.parametrize(
    ("kind", "change", "sentence"),
    [
        ("gpt", {"distill_from": "nowhere"}, "--distill-from 'nowhere' has no checkpoint in it; name a directory"),
        ("gpt", {"data": "pydoc"}, "holds a model of 16 tokens and --data pydoc has 256; .* the same vocabulary"),
        ("gpt", {"context": 9}, "holds a model that knows 8 positions; use --context 8 at most"),
        ("mlp", {}, r"holds a model \(--model mlp\) that cannot read --data markov; .* the same kind of data"),
        ("gpt", {"teacher_ranks": 2, "dp": 1}, "--teacher-ranks 2 are more than the 1 data-parallel replicas"),
    ],
)
def test_what_does_not_fit_is_one_sentence(kind, change, sentence, saved):
    with pytest.raises(UsageError, match=sentence):
        number_of_ranks(config_of(saved, {"distill_from": saved[kind], **change}), None)


def test_ranks_that_leave_no_student_and_logits_that_are_not_finite(saved, monkeypatch):
    with pytest.raises(UsageError, match="--teacher-ranks 2 of 2 ranks leave no student; start at least 3 ranks"):
        resolve_dims(config_of(saved, {"teacher_ranks": 2}), 2)
    load = saved_model.load_weights

    def overflowing(checkpoint, model):
        load(checkpoint, model)
        model.lm_head.weight.data[...] = np.nan

    monkeypatch.setattr(saved_model, "load_weights", overflowing)
    with pytest.raises(
        UsageError, match="step 0: the teacher's logits in fp16 are not finite; use --teacher-precision"
    ):
        SimWorld(1).run(train, config_of(saved, {}, teacher_precision="fp16"))


COMMAND = ["train", "--layers", "1", "--width", "8", "--heads", "2", "--context", "6", "--data", "markov"]
COMMAND += ["--steps", "2", "--dp", "2", "--teacher-ranks", "1"]


def test_compare_and_train_from_the_command_line(saved, minidist):
    verdict = SimWorld(3).run(compare_rank, config_of(saved, LAYOUTS["teacher's rank"]))[2]
    assert verdict.equal
    assert verdict.steps == 3
    flags = ["--distill-from", saved["gpt"], "--save", saved["gpt"] + "/student"]
    printed = json.loads(minidist(*COMMAND, *flags, "--json").out)
    assert printed["bytes_by_purpose"]["teacher"]["measured"] == 2 * 8 * 6 * 16 * 4 + 8
    for volume in printed["bytes_by_purpose"].values():
        assert volume["measured"] == volume["closed_form"]
    model, config = load_model(saved["gpt"] + "/student")
    assert config.distill_from == saved["gpt"]
    assert model.config.n_embd == 8


def test_the_stored_logits_of_all_ranks_are_counted(saved, minidist, tmp_path):
    """In the JSON and in its line; the teacher's rank is asked, and rank 0 is not."""
    flags = ["--distill-from", saved["gpt"], "--teacher-cache", str(tmp_path)]
    counted = json.loads(minidist(*COMMAND, *flags, "--json").out)["teacher"]
    assert counted == {"asked": 16, "computed": len(list(tmp_path.iterdir()))}
    assert "logits of 16 samples; the teacher computed 0 of them\n" in minidist(*COMMAND, *flags).out
