"""What fits a memory budget is chosen before the job, which is the one that the chosen flag gives."""

import json
from functools import cache
from math import inf

import pytest

from minidist.comm import SimWorld
from minidist.core.base.errors import UsageError
from minidist.job.checkpoint.saved_model import named_checkpoint, saved_config
from minidist.job.config.train_config import TrainConfig, resolve_batches
from minidist.job.train.trainer import train
from minidist.techniques.memory_trials.trials import fit_micro_batch, fit_recompute
from tests.cases import each

SMALL = {"layers": 1, "width": 16, "heads": 2, "context": 8, "data": "markov", "global_batch": 24, "steps": 2}
DATA = {**SMALL, "dp": 2, "zero": 2}
AUTO = {"micro_batch": "auto"}
# A job whose memory does not grow with every micro-batch: a pipeline has fewer of them in flight when they are larger.
PIPELINE = {**SMALL, "layers": 4, "pp": 4, "schedule": "gpipe"}


def peaks_of(job, micros):
    """Return the peak of the fullest rank for each micro-batch, as the job itself reports it."""
    found = {}
    for micro in micros:
        config = TrainConfig.make(**job, micro_batch=micro)
        results = SimWorld(config.pp * (config.dp or 1), record=False).run(train, config)
        found[micro] = max(result.peak_bytes for result in results)
    return found


@pytest.fixture(scope="module")
def peaks():
    """The peak of every micro-batch that divides the 12 samples of a rank."""
    return peaks_of(DATA, (1, 2, 3, 4, 6, 12))


@pytest.mark.parametrize("micro", [1, 3, 4, 12])
def test_the_largest_that_fits_is_taken(micro, peaks):
    larger = min([n for m, n in peaks.items() if m > micro], default=10**9)
    assert peaks[micro] < larger
    for budget in (peaks[micro], larger - 1):
        config, line = fit_micro_batch(TrainConfig.make(**DATA, **AUTO, memory_budget=budget), None)
        assert config == TrainConfig.make(**DATA, micro_batch=micro)
        assert f"--accumulation {12 // micro}: a rank has {peaks[micro]:,} B alive" in line


def test_a_larger_one_that_fits_is_found_where_a_smaller_one_does_not():
    peaks = peaks_of(PIPELINE, (4, 5, 6))
    assert peaks[5] < peaks[4] < peaks[6]
    config, _ = fit_micro_batch(TrainConfig.make(**PIPELINE, **AUTO, memory_budget=peaks[5]), None)
    assert config.micro_batch == 5


def test_micro_batches_that_the_job_cannot_have_are_left_out():
    """Of 24 samples, interleaved 1F1B takes no 5 micro-batches; equal shares take none that differ by a sample."""
    job = {**SMALL, "layers": 4, "pp": 2, "schedule": "interleaved"}
    with pytest.raises(UsageError, match="cannot take 5 micro-batches"):
        peaks_of(job, (5,))
    config, _ = fit_micro_batch(TrainConfig.make(**job, **AUTO, memory_budget=peaks_of(job, (6,))[6] - 1), None)
    assert config.micro_batch == 4
    config, _ = fit_micro_batch(TrainConfig.make(**{**DATA, "weights": "equal"}, **AUTO, memory_budget=1e9), None)
    assert config.micro_batch == 12


@pytest.mark.parametrize(
    ("values", "micro"),
    [
        ({**DATA, "global_batch": 25}, 13),
        ({**SMALL, "dp": 2, "strategy": "ps"}, 12),
        ({**SMALL, "dp": 2, "adaptive_batch": 48}, 12),  # decides by values, so the trials compute
        ({**DATA, "weights": "2,1"}, 16),
    ],
)
def test_other_jobs(values, micro):
    config, line = fit_micro_batch(TrainConfig.make(**values, **AUTO, memory_budget=1e9), None)
    assert (config.micro_batch, line.startswith(f"--micro-batch {micro} --accumulation 1:")) == (micro, True)


@each(
    ("values", "sentence"),
    [
        ({"memory_budget": None}, "--micro-batch auto needs a limit; add --memory-budget BYTES"),
        ({"global_batch": None}, "divides --global-batch into micro-batches; add --global-batch SAMPLES"),
        ({"accumulation": 2}, "--accumulation 2 gives it; leave one of them out"),
        ({"microbatches": 3}, "--microbatches 3 gives it; leave one of them out"),
        ({"global_batch": 1}, "leave 0 for rank 1"),
        ({"heads": 3}, "16 .*3"),
    ],
)
def test_what_is_refused(values, sentence):
    with pytest.raises(UsageError, match=sentence):
        fit_micro_batch(TrainConfig.make(**{**DATA, **AUTO, "memory_budget": 1e9, **values}), None)


def test_nothing_fits(peaks):
    sentence = (
        f"--memory-budget {peaks[1] - 1:,} B: a rank has {peaks[1]:,} B alive at a time even with --micro-batch 1;"
        " raise it, or use more ranks, --zero or --recompute"
    )
    with pytest.raises(UsageError, match=sentence):
        fit_micro_batch(TrainConfig.make(**DATA, **AUTO, memory_budget=peaks[1] - 1), None)


def test_a_number_is_needed_where_nothing_chooses_it():
    with pytest.raises(UsageError, match="is chosen by minidist train and minidist compare; give a number here"):
        resolve_batches(TrainConfig.make(**DATA, **AUTO), 2)
    for wrong in ("most", 0, 1.5, inf):
        with pytest.raises(UsageError, match=r"--micro-batch .*: input should be a whole number from 1 to .*, or auto"):
            TrainConfig.make(micro_batch=wrong)


def flags(job):
    return [f"--{name.replace('_', '-')}={value}" for name, value in job.items() if name != "steps"]


def test_a_checkpoint_has_the_number_and_a_resumed_job_keeps_it(minidist, tmp_path, peaks):
    job = ["train", *flags(DATA), "--micro-batch=auto", f"--memory-budget={peaks[4]}", "--trace=none", "--json"]
    for more in (["--steps=2"], ["--steps=3", "--resume"]):
        captured = minidist(*job, f"--save={tmp_path}", *more)
        assert f"--micro-batch 4 --accumulation 3: a rank has {peaks[4]:,} B alive at a time" in captured.err
        assert max(json.loads(captured.out)["peak_bytes"]) <= peaks[4]
    assert saved_config(named_checkpoint("--save", str(tmp_path))).micro_batch == 4


def test_a_job_file_says_auto_and_a_comparison_and_a_dry_run_choose(minidist, tmp_path, peaks):
    file = tmp_path / "job.toml"
    job = ["train", *flags(DATA), "--steps=2", "--micro-batch=auto", "--memory-budget=1e9"]
    file.write_text(minidist(*job, "--print-config").out)
    assert 'micro-batch = "auto"' in file.read_text()
    for command in (["compare"], ["train", "--dry-run", "--trace=none"]):
        said = minidist(*command, "--config", file, f"--memory-budget={peaks[6]}").err
        assert "--micro-batch 6 --accumulation 2: a rank has" in said


# --- a budget for each rank -----------------------------------------------------------------------------------------

DEEP = {**SMALL, "layers": 2, "context": 32, "pp": 2, "microbatches": 4, "schedule": "gpipe"}
INTERLEAVED = {**DEEP, "layers": 4, "schedule": "interleaved", "chunks": 2}


def peaks_of_ranks(job, **values):
    """Return the peak of each rank, as the job itself reports it."""
    return peaks_of_config(TrainConfig.make(**{**job, **values}))


@cache
def peaks_of_config(config):
    ranks = config.pp * (config.dp or 1) * config.tp
    return [result.peak_bytes for result in SimWorld(ranks, record=False).run(train, config)]


@pytest.fixture
def fitted(tmp_path):
    """Return what --recompute becomes for budgets, after a check that the job with it holds no more than they allow."""

    def fit(job, budgets):
        file = tmp_path / "budgets.json"
        file.write_text(json.dumps(budgets))
        config, line = fit_recompute(TrainConfig.make(**job, recompute_budget=str(file)), None)
        assert config == TrainConfig.make(**job, recompute=config.recompute)
        assert line.startswith(f"--recompute {config.recompute}: ")
        peaks = peaks_of_ranks(job, recompute=config.recompute)
        each = len(peaks) // len(budgets)
        assert all(peak <= budgets[rank // each] for rank, peak in enumerate(peaks))
        return config.recompute

    return fit


def test_only_stages_of_ranks_over_their_budgets_run_again(fitted):
    kept, again = peaks_of_ranks(DEEP), peaks_of_ranks(DEEP, recompute="full")
    assert [less < more for less, more in zip(again, kept, strict=True)] == [True, True]
    for budgets, expected in (
        (kept, "none"),
        ([kept[0] - 1, kept[1]], "stages:0"),
        ([kept[0], kept[1] - 1], "stages:1"),
        (again, "stages:0,1"),
    ):
        assert fitted(DEEP, budgets) == expected
    # One budget for all tensor-parallel ranks of a stage, or one for each.
    split = {**DEEP, "tp": 2}
    kept = peaks_of_ranks(split)
    assert fitted(split, [max(kept[:2]) - 1, max(kept[2:])]) == "stages:0"
    assert fitted(split, [*kept[:3], kept[3] - 1]) == "stages:1"


def test_a_rank_with_several_stages_runs_no_more_of_them_again_than_it_needs(fitted):
    kept = peaks_of_ranks(INTERLEAVED)
    one, both = (peaks_of_ranks(INTERLEAVED, recompute=what)[0] for what in ("stages:0", "stages:0,2"))
    assert both < one < kept[0]
    assert fitted(INTERLEAVED, [one, kept[1]]) == "stages:0"
    assert fitted(INTERLEAVED, [one - 1, kept[1]]) == "stages:0,2"


def test_without_a_pipeline_the_first_choice_that_fits_is_taken(fitted):
    job = {**SMALL, "layers": 4, "context": 32, "dp": 2}
    peaks = {what: peaks_of_ranks(job, recompute=what) for what in ("none", "selective", "full")}
    assert max(peaks["full"]) < max(peaks["selective"]) < min(peaks["none"])
    for what, found in peaks.items():
        assert fitted(job, found) == what


@pytest.mark.parametrize(
    ("content", "values", "sentence"),
    [
        ("[1, 2, 3]", {}, r"is a list of 3; it must be a list of 4, one for each rank, or 2, one for each rank of the"),
        ('{"a": 1}', {}, r"is {'a': 1}; it must be a list of 4, one for each rank"),
        ('[1000, "many"]', {}, r": budget 1 is 'many'; it must be a number of bytes above 0"),
        ("[1000, 0]", {}, r": budget 1 is 0; it must be a number of bytes above 0"),
        ("[1000, true]", {}, r": budget 1 is True; it must be a number of bytes above 0"),
        ("[1000", {}, r"is not JSON: .*; give a JSON list of bytes"),
        ("[1000, 2000]", {"recompute": "full"}, r"and --recompute full gives it; leave one of them out"),
        (
            "[1000, 1e9]",
            {},
            r"pipeline rank 0 has [\d,]+ B alive at a time even with --recompute stages:0, of 1,000; raise it, or use",
        ),
    ],
)
def test_what_is_wrong_with_budgets_is_one_sentence(content, values, sentence, tmp_path):
    file = tmp_path / "budgets.json"
    file.write_text(content)
    with pytest.raises(UsageError, match=sentence):
        fit_recompute(TrainConfig.make(**{**DEEP, "tp": 2, **values}, recompute_budget=str(file)), None)


def test_commands_choose_what_runs_again(minidist, tmp_path):
    kept = peaks_of_ranks(DEEP)
    file = tmp_path / "budgets.json"
    file.write_text(json.dumps([kept[0] - 1, kept[1]]))
    for command in (["compare"], ["train", "--dry-run", "--trace=none"], ["train", "--trace=none", "--json"]):
        captured = minidist(*command, *flags(DEEP), "--steps=2", f"--recompute-budget={file}")
        assert "--recompute stages:0: pipeline rank" in captured.err or "--recompute stages:0: rank" in captured.err
    peaks = json.loads(captured.out)["peak_bytes"]
    assert peaks[0] < kept[0]
    assert peaks[1] <= kept[1]
