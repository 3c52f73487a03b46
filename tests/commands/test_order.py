"""`minidist order`: what is printed, as text and as JSON, and its exit codes."""

import json


def test_a_ring_adds_each_chunk_in_another_order(minidist):
    assert minidist("order", "ring", "--ranks", "3").out.splitlines() == [
        "ring adds 3 terms of float64 on 3 ranks:",
        "  element 0: 1 + 2 + 0   around a ring, from term 1",
        "  element 1: 0 + 2 + 1   around a ring, from term 2",
        "  element 2: 0 + 1 + 2   from left to right",
    ]


def test_a_sum_that_depends_on_the_number_of_ranks_ends_with_1(minidist):
    words = ["order", "ordered", "--terms", "4", "--ranks", "2,4", "--elements", "1", "--json"]
    report = json.loads(minidist(*words, code=1).out)
    assert report["same"] is False
    assert [each["ranks"] for each in report["runs"]] == [2, 4]
    assert report["runs"][0]["orders"][0] == [
        {"tree": [[0, 1], [2, 3]], "name": "in pairs, neighbours first", "accumulator": "float64"}
    ]


def test_a_long_sum_is_not_written_out(minidist):
    out = minidist("order", "sum", "--terms", "65").out
    assert out == "sum adds 65 terms of float64:\n  (--json has the whole tree)   from left to right\n"


def test_wrong_input_ends_with_2(minidist):
    out, err = minidist("order", "ring", "--ranks", "two", code=2)
    assert out == ""
    assert "whole numbers" in err
