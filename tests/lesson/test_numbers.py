"""Numbers of lessons, those of now and those that a reader may still have."""

from pathlib import Path

import pytest

from minidist.core.base.errors import UsageError
from minidist.course.lesson import build, names
from minidist.course.lesson.catalogue import find
from minidist.course.lesson.grade import exercises_of
from minidist.course.lesson.numbers import MOVED, MOVED_EXERCISES, current, number_of

LESSONS = Path(__file__).resolve().parents[2] / "lessons"

# Names of exercises that readers have had, some of them of lessons that have become several. None is removed from here.
KNOWN = """
00.in_rank_order 00b.add_backward 00b.cross_entropy_backward 02.free_in_order 02b.adam 03.by_order 03.by_sendrecv
03.by_requests 04.ring_all_reduce 04b.ordered_reduce_scatter 05.halving_doubling 05.choose 05b.ring_order
05b.two_level_sum 06.weighted_average 06b.bucketed_reducer 06c.ssp 06d.error_feedback 06d.sign_feedback 06e.outer_step
06f.in_order 09.scaled_training 09b.one_grid 09c.kept_all_reduce 09d.distil 10.pick_segments 10.recompute
10b.gradient_and_noise 10c.stages_by_time 11.zero_step 11b.trust_ratio_step 11c.owners_compute 12.prefetch
12b.offloaded_step 14.parallel_mlp 14.parallel_attention 14b.split_mlp 14b.split_cross_entropy 14c.slots_and_balance
14c.dispatch 16.gpipe 16b.sync_batch_norm 17.one_f_one_b 17b.stashing 17c.two_versions 19.zero_bubble 19b.building_block
20.place_ranks 20b.min_max_split 22.visible 22.ring_attention 26.save 26.load 28.first_difference 28.read_once cs336.ddp
cs336.ddp_tied cs336.sharded_optimizer cs336.fsdp cs336.fsdp_fp16 cse234.myAllreduce cse234.myAlltoall cse234.get_info
cse234.split_data cse234.MoE_EP cse234.naive_collect_forward_input cse234.naive_collect_forward_output
cse234.naive_collect_backward_output cse234.naive_collect_backward_x llmsys.partition_dataset llmsys.average_gradients
llmsys.clock_cycles puzzle.s16
"""
PUZZLES = [f"puzzle.{row}{number:02}" for row in "bms" for number in range(1, 16)]


def test_a_number_of_before_finds_its_lesson_and_its_exercises():
    numbers = {number_of(source): source for source in build.sources(LESSONS)}
    for old, new in MOVED.items():
        assert old not in numbers
        assert build.sources(LESSONS, [old]) == [numbers[new]] == build.sources(LESSONS, [new])
        assert exercises_of(old) == exercises_of(new) != []
        for exercise in exercises_of(new):
            slug = exercise.name.partition(".")[2]
            assert find(f"{old}.{slug}") is exercise
    # A lesson that has become several: its old number finds the first.
    for old in ("24.distil", "09b.distil", "09d.distil"):
        assert find(old).name == "09d.distil"
    for old, new in (("31.stages_by_time", "20c.stages_by_time"), ("29.owners_compute", "11c.owners_compute")):
        assert find(old).name == new
    # A lesson of the core has the number that it always had.
    assert not {number for number in numbers if len(number) == 2} & MOVED.keys()
    assert all(current(name) == name for name in names())


@pytest.mark.parametrize("name", [*KNOWN.split(), *PUZZLES, *MOVED_EXERCISES])
def test_a_name_of_before_finds_its_exercise(name):
    assert find(name).name.partition(".")[2] == name.partition(".")[2]


def test_an_exercise_of_a_side_room_is_not_one_of_its_lesson():
    assert [exercise.name for exercise in exercises_of("04")] == ["04.ring_all_reduce"]
    assert [exercise.name for exercise in exercises_of("04b")] == ["04b.ordered_reduce_scatter"]
    with pytest.raises(UsageError, match=r"no exercise '06b\.nothing'"):
        find("07.nothing")
