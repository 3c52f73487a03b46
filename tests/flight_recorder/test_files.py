"""Which files are dumps and which are logs, by name and content; and a folder with neither is refused."""

import pytest

from minidist.core.base.errors import UsageError
from minidist.debug.flight_recorder.files import read_files
from tests.flight_recorder.lines import timeout

ERROR = "ValueError: the batch is empty\n"


def test_names_of_logs(tmp_path):
    for name, ranks in (
        ("slurm-812345.out", [7]),
        ("slurm-812345", [7]),
        ("stderr.3", [7]),
        ("train_rank_3.log", [3, 7]),
        ("rank3.json", [3, 7]),
    ):
        file = tmp_path / name
        file.write_text(f"{ERROR}{timeout(7, 1)}\n")
        dumps, log = read_files(tmp_path)
        assert (dumps, sorted(log.spoken), log.files) == ([], ranks, 1), name
        file.unlink()


def test_the_folders_of_torchrun(tmp_path):
    for rank in (0, 12):
        folder = tmp_path / "run_x1" / "attempt_0" / str(rank)
        folder.mkdir(parents=True)
        (folder / "stderr.log").write_text(ERROR)
    for place in ("run_x1/27/job.log", "rank4/job.log"):  # a date, and an experiment
        (tmp_path / place).parent.mkdir()
        (tmp_path / place).write_text("RuntimeError: Connection closed by peer\n")
    (tmp_path / "weights.bin").write_bytes(b"\0ValueError: x")
    log = read_files(tmp_path)[1]
    assert log.spoken == {0, 12}
    assert log.nameless


def test_a_text_that_tells_nothing_is_refused(tmp_path):
    file = tmp_path / "job.log"
    file.write_text("step 1\n")
    for path in (file, tmp_path):
        with pytest.raises(UsageError, match="no line of a watchdog"):
            read_files(path)
