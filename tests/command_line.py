"""The fixture `minidist` runs a command line in the process of the test."""

import pytest


@pytest.fixture
def minidist(capsys):
    """minidist(*words, code=0) -> what the command printed (.out and .err); it must end with this exit code.

    Wrong input, which ends with code 2, has no traceback.
    """
    from minidist import cli

    def run(*words, code=0):
        with pytest.raises(SystemExit) as ended:
            cli.main([*map(str, words)])
        printed = capsys.readouterr()
        assert (ended.value.code or 0) == code, printed.err
        assert code != 2 or "Traceback" not in printed.err
        return printed

    return run
