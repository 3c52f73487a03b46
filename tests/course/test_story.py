"""The story of the course: each lesson of the core has a row, and its numbers are those of `minidist plan`."""

import json
import re
from itertools import product

import pytest

from minidist.core.base.errors import UsageError
from minidist.course.lesson.build import sources
from minidist.course.lesson.numbers import number_of
from minidist.course.story import CARD, CHAPTERS, LARGE, LENGTH, MODEL, TOKENS, WHOLE, chapter, spent, story, table
from tests.cases import each
from tests.lesson.test_lessons import ROOT

CORE = [path for path in sources(ROOT / "lessons") if number_of(path).isdecimal()]
PLANS = {chapter.lesson: chapter.plan for chapter in CHAPTERS if chapter.plan is not None and chapter != WHOLE}


def seconds(lesson):
    """Return the seconds of a lesson's row."""
    (of,) = (chapter for chapter in CHAPTERS if chapter.lesson == lesson and chapter != WHOLE)
    return sum(of.times(of.plan))


def test_each_core_lesson_has_a_row_and_prints_the_end_of_the_story_up_to_it():
    assert [chapter.lesson for chapter in CHAPTERS if chapter != WHOLE] == [number_of(path) for path in CORE]
    for path in CORE:
        text = path.read_text()
        assert f'\nstory("{number_of(path)}")\n' in text
        assert ("model of 65 billion parameters" in text) == (number_of(path) > "12")


def test_the_job_does_not_fit_until_the_optimizer_is_sharded():
    fits = {lesson: plan.fits for lesson, plan in PLANS.items()}
    assert [lesson for lesson, does in fits.items() if not does] == ["00", "06", "10", "16"]
    peak = {lesson: plan.fullest.peak for lesson, plan in PLANS.items()}
    assert peak["00"] == peak["06"] > peak["10"] > peak["11"] > peak["12"]
    assert peak["17"] < peak["16"] / 4
    assert all(plan.job.global_batch * plan.job.length == TOKENS for plan in PLANS.values())


def test_the_last_column_says_what_the_planner_says():
    says = {chapter.lesson: chapter.limit for chapter in CHAPTERS if chapter != WHOLE}
    assert f"{WHOLE.plan.time.exposed['dp']:.1f} s" in WHOLE.limit
    assert f"{PLANS['14'].time.exposed['tp']:.1f} s" in says["14"]
    assert f"{PLANS['22'].time.exposed['cp']:.2f} s" in says["22"]
    assert f"{PLANS['17'].time.bubble:.0%}".replace("%", " %") in says["17"]
    # The largest part of what a card of row 19 does besides an equal part of the computation is not messages.
    equal = PLANS["14"].time.compute
    assert PLANS["19"].time.compute - equal > sum(PLANS["19"].time.exposed.values())
    assert not list(layouts(length=32768))  # "longer texts do not fit"


def layouts(length=LENGTH, model=LARGE, schedule=None):
    """Yield the rows of all layouts of the job on 64 cards that fit without recomputation and context parallelism."""
    for tp, pp, micro_batch, zero in product((1, 2, 4, 8), (1, 2, 4, 8, 16, 32), (1, 2, 4, 8), (1, 2, 3)):
        dp, sequences = 64 // (tp * pp), TOKENS // length
        if tp * pp <= 64 and sequences % (dp * micro_batch) == 0:
            settings = {"dp": dp, "tp": tp, "pp": pp, "zero": zero, "micro_batch": micro_batch}
            actions = schedule if pp > 1 else None
            of = chapter("", "", "", length, model, actions, sequence_parallel=tp > 1, **settings)
            if of.plan.fits:
                yield of


def test_the_model_of_seven_billion_needs_no_more_than_data_parallelism():
    small = chapter("", "", "", dp=64, zero=1).plan
    assert small.fits
    assert small.time.seconds - small.time.compute < 0.02
    assert small.layout == min(layouts(model=MODEL), key=lambda of: sum(of.times(of.plan))).plan.layout
    larger = [chapter("", "", "", LENGTH, LARGE, dp=64, zero=zero).plan for zero in (1, 2, 3)]
    assert [plan.fits for plan in larger] == [False, False, True]


def test_each_row_of_the_larger_model_is_the_fastest_of_its_kind_and_faster_than_data_parallelism():
    def fastest(schedule=None):
        """Return the fastest layout of each kind: are layers cut, and are there stages?"""
        kinds = {}
        for of in sorted(layouts(schedule=schedule), key=lambda of: -sum(of.times(of.plan))):
            kinds[of.plan.layout.tp > 1, of.plan.layout.pp > 1] = of.plan.layout
        return kinds

    found, in_two = fastest(), fastest("zb-h1")
    assert found[False, False] == WHOLE.plan.layout
    assert found[True, False] == PLANS["14"].layout
    assert found[False, True] == in_two[False, True] == PLANS["17"].layout == PLANS["19"].layout
    assert found[True, True] == in_two[True, True] == PLANS["20"].layout
    assert WHOLE.plan.time.seconds > seconds("17") > seconds("14") > seconds("19") > seconds("20")


@each("lesson", ["06", "11", "17", "22"])
def test_the_numbers_are_those_of_the_planner(lesson, capsys):
    from minidist.cli import main

    plan = PLANS[lesson]
    layout, job = plan.layout, plan.job
    model = MODEL if lesson < "12" else LARGE
    flags = (
        f"plan --model {model} --gpu {CARD} --gpus {layout.ranks} --seq {job.length} --global-batch {job.global_batch}"
    )
    flags += f" --dp {layout.dp} --tp {layout.tp} --pp {layout.pp} --cp {layout.cp} --zero {layout.zero}"
    flags += f" --micro-batch {layout.micro_batch} --recompute {layout.recompute} --json"
    with pytest.raises(SystemExit):  # 1 where the layout does not fit
        main(flags.split())
    (found,) = (one for one in json.loads(capsys.readouterr().out)["layouts"] if one["vp"] == 1)
    assert found["memory"]["peak_bytes"] == plan.fullest.peak
    assert found["time"]["step_seconds"] == pytest.approx(plan.time.seconds)


def test_the_last_stage_of_zb_h1_is_the_fullest():
    """It keeps 16 micro-batches as the first one does, and for each but one the gradients of its logits."""
    (of,) = (chapter for chapter in CHAPTERS if chapter.lesson == "19")
    peak, estimate = of.memory(of.plan)
    first, last = of.plan.memory[0], of.plan.memory[-1]
    tokens, width, words = LENGTH, of.plan.job.model.width, of.plan.job.model.vocabulary
    kept = first.by_kind["activations"] / 16 + 4 * tokens * width + 2 * tokens * words
    assert peak == pytest.approx(last.peak + 15 * kept)
    assert of.plan.fullest.peak < peak < estimate < of.plan.machine.memory
    assert f"{peak / 1e9:.1f}  yes" in table("19").splitlines()[-1]
    # Without a schedule the numbers are the planner's.
    (of,) = (chapter for chapter in CHAPTERS if chapter.lesson == "17")
    assert of.memory(of.plan) == (of.plan.fullest.peak, of.plan.fit.central)


def test_the_seconds_of_a_row_and_of_another_layout(capsys):
    spent("11")
    spent("11", dp=64, zero=1)
    spent("19")
    spent("16")
    spent("17", dp=4, zero=1, pp=16)
    spent("19", schedule="zb-h1", dp=8, zero=2, pp=8)
    spent("17", dp=8, zero=2, pp=8)
    spent("14")
    row, other, stages, large, close, in_two, whole, kinds = capsys.readouterr().out.splitlines()
    assert row.startswith("row 11: computes ")
    assert "; at most 59.7 GB on each of 8 cards" in row
    computes, waits = (float(number) for number in re.findall(r"([\d.]+) s", row))
    assert computes + waits == pytest.approx(PLANS["11"].time.seconds, abs=0.011)
    assert other.startswith("llama-7b, dp 64, zero 1, micro-batch 1 x 8: ")
    assert other.endswith(" GB on each of 64 cards")
    assert sum(map(float, re.findall(r"([\d.]+) s[ ,;]", stages))) == pytest.approx(seconds("19"), abs=0.016)
    assert large.endswith(" 372.7 GB on each of 64 cards")
    assert " 82.2 GB on each of 64 cards, 92.2 GB with half of what unfused norms" in close
    assert close.endswith(" keep, and 1 GB for the device: it does not fit")
    # Of ZB-H1 the stages wait a third of what they wait in 1F1B.
    assert ", zb-h1: computes 12.82 s" in in_two
    assert ", for other stages 0.46 s;" in in_two
    assert ", for other stages 1.37 s;" in whole
    waits, *parts = map(float, re.findall(r"messages ([\d.]+) s \(.* ([\d.]+), .* ([\d.]+)\)", kinds)[0])
    assert sum(parts) == pytest.approx(waits, abs=0.011)
    with pytest.raises(UsageError, match="row 09 has no layout"):
        spent("09")


def test_a_table_ends_with_its_lesson_and_fits_into_a_line(capsys):
    story("04")
    printed = capsys.readouterr().out
    assert [line[:2] for line in printed.splitlines()[1:]] == ["02", "03", "04"]
    assert max(len(line) for chapter in CHAPTERS for line in table(chapter.lesson).splitlines()) <= 104
    assert len(table("00").splitlines()) == 2
    # A model of 7 billion parameters is no row of the larger one's tables.
    assert [line[:2] for line in table("14").splitlines()[1:]] == ["12", "14"]
    assert "65 billion" in table("14").splitlines()[1]
    # A table begins with the row that its last is compared with.
    assert [line[:2] for line in table("17").splitlines()[1:]] == ["14", "16", "17"]
    assert [line[:2] for line in table("19").splitlines()[1:]] == ["14", "17", "19"]
    assert [line[:2] for line in table("20").splitlines()[1:]] == ["12", "19", "20"]
    assert [line[:2] for line in table("22").splitlines()[1:]] == ["19", "20", "22"]
    with pytest.raises(UsageError, match=r"no lesson '04b' \(did you mean '04'\?\)"):
        story("04b")
