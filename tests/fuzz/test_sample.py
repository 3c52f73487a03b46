"""A sample of `make fuzz`: 200 inputs of all generators, each a success or one sentence."""

import sys

import pytest

from tests.fuzz import campaign


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the limit of memory is Linux's")
def test_every_outcome_is_success_or_one_sentence(tmp_path):
    counts, wrong = campaign.run("sample", range(100), 2, tmp_path)
    assert not wrong, "\n\n".join(f"{name} {number}: {text}" for number, name, _, text in wrong[:5])
    assert sum(counts.values()) == 100
    assert len({name for name, _ in counts}) == len(campaign.inputs.GENERATORS)


def test_a_traceback_a_long_sentence_and_silence_are_noticed(monkeypatch):
    import minidist.cli

    def ends(code, said):
        def main(arguments):
            print(said, file=sys.stderr)
            sys.exit(code)

        return main

    for main, kind in (
        (lambda arguments: 1 / 0, "traceback"),
        (ends(2, "minidist: " + "a" * 700), "long"),
        (ends(2, ""), "silent"),
        (ends(3, "minidist: no"), "traceback"),
        (ends(2, "minidist: no"), "refused"),
        (ends(0, ""), "done"),
    ):
        monkeypatch.setattr(minidist.cli, "main", main)
        assert campaign.outcome([])[0] == kind
