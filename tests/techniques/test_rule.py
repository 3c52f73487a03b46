"""The sentence of a rule has the numbers of the job, computed where the rule says so, and nothing else is computed."""

from types import SimpleNamespace

import pytest

from minidist.techniques import Rule

JOB = SimpleNamespace(zero=3, ranks=4, schedule="1f1b", long="a" * 1000)


def sentence(message, **values):
    return Rule("name", lambda job: True, message, "use {zero} or less", values).sentence(JOB)


def test_a_sentence_is_the_message_and_the_remedy_with_the_job_s_settings():
    assert sentence("--zero {zero} with {schedule}") == "--zero 3 with 1f1b; use 3 or less"


def test_a_value_of_the_rule_is_computed_from_the_job_and_comes_before_a_setting_of_that_name():
    assert sentence("{zero} of {half}", half=lambda job: job.ranks // 2) == "3 of 2; use 3 or less"
    assert sentence("{zero}", zero=lambda job: job.zero - 1) == "2; use 2 or less"


def test_a_value_that_the_sentence_does_not_name_is_not_computed():
    assert sentence("{ranks} ranks", share=lambda job: job.ranks // 0) == "4 ranks; use 3 or less"
    with pytest.raises(ZeroDivisionError):
        sentence("{share}", share=lambda job: job.ranks // 0)


def test_a_long_text_of_a_user_is_shortened_and_a_computed_one_is_not():
    text = sentence("{long}")
    assert text.startswith("a" * 20)
    assert len(text) < 200
    assert sentence("{mine}", mine=lambda job: job.long) == "a" * 1000 + "; use 3 or less"
