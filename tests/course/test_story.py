"""The story of the course: each lesson of the core has a row, and its numbers are those of `minidist plan`."""

import json
import re

import pytest

from minidist.core.base.errors import UsageError
from minidist.course.lesson.build import sources
from minidist.course.lesson.numbers import number_of
from minidist.course.story import CARD, CHAPTERS, MODEL, TOKENS, spent, story, table
from tests.cases import each
from tests.lesson.test_lessons import ROOT

CORE = [path for path in sources(ROOT / "lessons") if number_of(path).isdecimal()]
PLANS = {chapter.lesson: chapter.plan for chapter in CHAPTERS if chapter.plan is not None}


def test_each_core_lesson_has_a_row_and_prints_the_end_of_the_story_up_to_it():
    assert [chapter.lesson for chapter in CHAPTERS] == [number_of(path) for path in CORE]
    for path in CORE:
        assert f'\nstory("{number_of(path)}")\n' in path.read_text()


def test_the_job_does_not_fit_until_the_optimizer_is_sharded():
    fits = {lesson: plan.fits for lesson, plan in PLANS.items()}
    assert [lesson for lesson, does in fits.items() if not does] == ["00", "06", "10", "16"]
    peak = {lesson: plan.fullest.peak for lesson, plan in PLANS.items()}
    assert peak["00"] == peak["06"] > peak["10"] > peak["11"] > peak["12"]
    assert peak["17"] < peak["16"] / 4
    # What the rows say of themselves, that the numbers in their columns do not.
    says = {chapter.lesson: chapter.limit for chapter in CHAPTERS}
    assert f"{PLANS['16'].fit.central / 1e9:.0f} GB" in says["16"]
    assert f"{peak['20'] / 1e9:.0f} GB" in says["20"]
    assert PLANS["20"].time.seconds < 1.02 * PLANS["17"].time.seconds
    assert PLANS["17"].time.bubble < PLANS["16"].time.bubble / 3
    assert 0.3 < PLANS["14"].time.exposed["tp"] / PLANS["14"].time.seconds < 0.37  # "a third"
    assert all(plan.job.global_batch * plan.job.length == TOKENS for plan in PLANS.values())


@each("lesson", ["06", "11", "17", "22"])
def test_the_numbers_are_those_of_the_planner(lesson, capsys):
    from minidist.cli import main

    plan = PLANS[lesson]
    layout, job = plan.layout, plan.job
    flags = (
        f"plan --model {MODEL} --gpu {CARD} --gpus {layout.ranks} --seq {job.length} --global-batch {job.global_batch}"
    )
    flags += f" --dp {layout.dp} --tp {layout.tp} --pp {layout.pp} --cp {layout.cp} --zero {layout.zero}"
    flags += f" --micro-batch {layout.micro_batch} --recompute {layout.recompute} --json"
    with pytest.raises(SystemExit):  # 1 where the layout does not fit
        main(flags.split())
    (found,) = (one for one in json.loads(capsys.readouterr().out)["layouts"] if one["vp"] == 1)
    assert found["memory"]["peak_bytes"] == plan.fullest.peak
    assert found["time"]["step_seconds"] == pytest.approx(plan.time.seconds)


def test_the_seconds_of_a_row_and_of_another_layout(capsys):
    spent("12")
    spent("14", dp=64, zero=1)
    spent("22", dp=8, zero=1, tp=2, pp=4, sequence_parallel=True)
    row, other, large = capsys.readouterr().out.splitlines()
    assert row.startswith("row 12: computes ")
    assert "; 24.8 GB on each of 8 cards" in row
    computes, waits = (float(number) for number in re.findall(r"([\d.]+) s", row))
    assert computes + waits == pytest.approx(PLANS["12"].time.seconds, abs=0.011)
    assert other.startswith("dp 64, zero 1: ")
    assert other.endswith(" GB on each of 64 cards")
    assert large.endswith(" 76.4 GB on each of 64 cards, 91.8 GB with temporaries: it does not fit")
    with pytest.raises(UsageError, match="row 09 has no layout"):
        spent("09")


def test_a_table_ends_with_its_lesson_and_fits_into_a_line(capsys):
    story("04")
    printed = capsys.readouterr().out
    assert [line[:2] for line in printed.splitlines()[1:]] == ["02", "03", "04"]
    assert max(len(line) for chapter in CHAPTERS for line in table(chapter.lesson).splitlines()) <= 104
    assert len(table("00").splitlines()) == 2
    with pytest.raises(UsageError, match=r"no lesson '04b' \(did you mean '04'\?\)"):
        story("04b")
