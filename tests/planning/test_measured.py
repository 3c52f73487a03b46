"""`minidist check-plan` compares each measured value with the plan of its row, and says what a row leaves open."""

import json

import pytest

from minidist.core.base.errors import UsageError
from minidist.planning.cluster.gpus import machine_of
from minidist.planning.cluster.layout import ClusterLayout, Job
from minidist.planning.cluster.measured import Comparison, compare, plans, read_rows, spearman, summaries, worst
from minidist.planning.cluster.search import Plan
from minidist.planning.huggingface_config import read_model
from tests.cases import each

ROW = {
    "model": "llama-7b",
    "gpu": "a100-80gb",
    "ranks": 8,
    "seq": 1024,
    "global_batch": 64,
    "dp": 4,
    "tp": 2,
    "zero": 1,
    "micro_batch": 2,
    "recompute": "full",
    "attention": "flash-2",
    "kernels": "eager",
}
JOB = Job(read_model("llama-7b"), 1024, 64, "bf16", 8, kernels="eager", attention_kernel="flash-2")
PLAN = Plan(ClusterLayout(4, 2, zero=1, micro_batch=2, microbatches=8, recompute="full"), JOB, machine_of("a100-80gb"))


def test_a_row_is_planned_as_plan_does():
    (one,) = plans(ROW, "")
    assert (one.layout, one.job, one.machine) == (PLAN.layout, JOB, PLAN.machine)


def test_what_a_row_does_not_say_is_planned_both_ways():
    """The prediction is that of the defaults; the range has all answers, each with its own range."""
    open_row = {key: value for key, value in ROW.items() if key not in ("recompute", "attention", "kernels")}
    found, left_out = compare([{**open_row, "step_seconds": 3.0, "peak_bytes": 4e10, "fits": True}], "f")
    assert left_out == []
    seconds, peak, fits = found
    of_row = plans(open_row, "")
    assert len(of_row) == 2 * 2 * 3
    assert seconds.predicted == of_row[0].time.seconds
    assert (of_row[0].layout.recompute, of_row[0].job.fused_attention, of_row[0].job.kernels) == ("none", True, "any")
    assert seconds.low == min(plan.seconds_range[0] for plan in of_row)
    assert seconds.high == max(plan.seconds_range[1] for plan in of_row)
    assert peak.low < peak.predicted < peak.high
    assert fits.low <= fits.predicted <= fits.high


def test_errors_are_summed_up_for_each_source_and_quantity():
    rows = [
        {**ROW, "source": "a", "global_batch": 64 * n, "step_seconds": PLAN.time.seconds * n * factor}
        for n, factor in ((1, 1.0), (2, 0.8), (4, 1.25))
    ]
    rows += [{**ROW, "source": "b", "fits": True}, {**ROW, "source": "b", "tp": 1, "dp": 8, "zero": 0, "fits": False}]
    rows += [{**ROW, "source": "b", "global_batch": 60, "fits": True}]
    found, left_out = compare(rows, "f")
    times, fits = summaries(found)
    predicted = [one.predicted / one.measured for one in found[:3]]
    assert (times.source, times.what, times.rows, times.order) == ("a", "step_seconds", 3, pytest.approx(1))
    assert times.error == pytest.approx(sum(abs(ratio - 1) for ratio in predicted) / 3)
    assert times.ratio == sorted(predicted)[1]
    assert (fits.source, fits.rows, fits.error, fits.wrongly_fit) == ("b", 2, 0, 0)
    assert left_out[0].startswith("row 6 is left out: dp 4 x micro-batch 2 x 7")
    assert worst(found, 1)[0].row in (2, 3)
    # A run that did not fit and is said to fit is counted apart.
    wrong = summaries([Comparison("c", "fits", row, 0.0, said, 0, 1) for row, said in ((1, 1.0), (2, 0.0))])[0]
    assert (wrong.error, wrong.wrongly_fit) == (0.5, 1)


def test_spearman_is_the_correlation_of_ranks():
    assert spearman([1, 5, 9], [2, 3, 70]) == pytest.approx(1)
    assert spearman([1, 5, 9], [70, 3, 2]) == pytest.approx(-1)
    # Ranks 1.5, 1.5, 3 and 1, 2, 3: the covariance is 1.5, the variances are 1.5 and 2.
    assert spearman([4, 4, 6], [1, 2, 3]) == pytest.approx(1.5 / (1.5 * 2) ** 0.5)
    assert spearman([1, 2], [1, 2]) is None
    assert spearman([1, 1, 1], [1, 2, 3]) is None


@each(
    "content, sentence",
    [
        ([], "has no rows"),
        ({"runs": []}, "has no rows"),
        ([3], "row 1 of"),
        ([{**ROW, "step_second": 1}], "key 'step_second' in row 1"),
        ([{**ROW}], "nothing is measured in row 1"),
        ([{"model": "llama-7b", "gpu": "h100", "fits": True}], "global_batch is missing in row 1"),
        ([{**ROW, "dp": 0, "fits": True}], "dp in row 1"),
        ([{**ROW, "dp": "8", "fits": True}], "dp '8' in row 1"),
        ([{**ROW, "zero": 4, "fits": True}], "zero in row 1"),
        ([{**ROW, "recompute": "some", "fits": True}], "recompute 'some' in row 1"),
        ([{**ROW, "recompute": ["full"], "fits": True}], "recompute ['full'] in row 1"),
        ([{**ROW, "fits": 1}], "fits 1 in row 1"),
        ([{**ROW, "gpu": 8, "fits": True}], "gpu 8 in row 1"),
        ([{**ROW, "step_seconds": 0}], "step_seconds 0 in row 1"),
        ([{**ROW, "step_seconds": "3 s"}], "step_seconds '3 s' in row 1"),
    ],
)
def test_a_file_with_a_mistake_is_one_sentence(content, sentence, tmp_path):
    path = tmp_path / "rows.json"
    path.write_text(json.dumps(content), encoding="utf-8")
    with pytest.raises(UsageError) as error:
        read_rows(path)
    assert sentence in str(error.value)


@each(
    "change, sentence",
    [
        ({"gpu": "h1000"}, "--gpu 'h1000' is unknown"),
        ({"model": 3}, "model 3 in row 1"),
        ({"model": "llama"}, "--model 'llama' is unknown"),
        ({"model": {"layers": 2}}, "--hidden, --heads are missing in row 1"),
        ({"model": {"layers": "2", "hidden": 64, "heads": 4}}, "layers '2' in row 1"),
        ({"model": {"layers": 2, "hidden": 64, "heads": 5}}, "--hidden 64 in row 1 of 'f' is not divisible by"),
        ({"model": {"depth": 2}}, "key 'depth' of the model in row 1"),
        ({"cp": 3}, "is 24 ranks, and the job has 8 GPUs"),
    ],
)
def test_a_row_that_cannot_be_planned_is_named_and_left_out(change, sentence):
    found, left_out = compare([{**ROW, **change, "fits": True}, {**ROW, "fits": True}], "f")
    assert [one.row for one in found] == [2]
    assert sentence in left_out[0]


def test_the_command_prints_the_errors_and_the_worst_rows(minidist, tmp_path):
    path = tmp_path / "rows.json"
    rows = [
        {**ROW, "step_seconds": PLAN.time.seconds},
        {**ROW, "tokens_per_second": 1.0},
        {**ROW, "ranks": 7, "fits": 1 > 0},
    ]
    path.write_text(json.dumps({"rows": rows}), encoding="utf-8")
    printed = minidist("check-plan", path, "--json")
    result = json.loads(printed.out)
    assert [(one["what"], one["error"] < 1e-9) for one in result["sources"]] == [
        ("step_seconds", True),
        ("tokens_per_second", False),
    ]
    assert "row 3 is left out" in printed.err
    lines = minidist("check-plan", path).out.splitlines()
    assert lines[1].split()[:4] == ["rows", "step_seconds", "1", "0.0%"]
    assert "row 2, tokens_per_second" in lines[4]
