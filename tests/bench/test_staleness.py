"""One slow worker: the paces follow from arithmetic, the staleness keeps its bound, and the picture shows both."""

import importlib.util
import json
from collections import Counter

import pytest

from minidist.cli import main
from minidist.core.base.errors import UsageError
from minidist.report.bench.staleness import GRADIENT_SECONDS, staleness_runs
from minidist.report.staleness import staleness
from tests.cases import each


def test_a_slow_worker_sets_the_pace_of_bsp_and_in_the_long_run_of_ssp():
    bsp, ssp, asp = staleness_runs(seconds=0.2)
    slow, fast = 0.2 / (3 * GRADIENT_SECONDS), 0.2 / GRADIENT_SECONDS  # gradients, if messages took no time
    assert 0.95 * slow < min(bsp.pushes) <= max(bsp.pushes) <= slow + 1
    assert max(ssp.pushes) - min(ssp.pushes) <= 2 + 1  # two clocks, and the one under way at the end
    assert 0.95 * slow < asp.pushes[2] <= slow + 1
    assert 0.95 * fast < asp.pushes[0] == asp.pushes[1] <= fast + 1
    assert set(bsp.staleness) == {0}
    assert 0 < sum(ssp.staleness) / len(ssp.staleness) < sum(asp.staleness) / len(asp.staleness)
    for run in (bsp, ssp, asp):
        assert len(run.staleness) == sum(run.pushes)
        assert run.entropy < run.curve[-1][1] < run.curve[0][1] - 1
        assert [time for time, _ in run.curve] == sorted(time for time, _ in run.curve)
    assert asp.curve[-1][1] < bsp.curve[-1][1]  # here more steps are worth more than fresh ones


def test_where_anyone_is_slow_at_times_ssp_is_faster_than_bsp():
    bsp, ssp, asp = staleness_runs(seconds=0.2, who="anyone")
    assert 1.2 * bsp.gradients_per_second < ssp.gradients_per_second < asp.gradients_per_second


def test_workers_of_one_speed_lack_the_updates_of_each_other():
    (asp,) = staleness_runs(["asp"], workers=4, slow=1, seconds=0.05)
    assert asp.staleness[:4] == [0, 1, 2, 3]
    assert set(asp.staleness[4:]) == {3}  # workers - 1


def test_without_the_folder_of_the_technique_the_command_says_so(monkeypatch, capsys):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit) as ended:
        main(["staleness"])
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert said.startswith("minidist: minidist staleness runs a parameter server, and the folder minidist/techniques/")


def test_the_picture_has_a_bar_per_rate_and_a_bar_per_value():
    runs = staleness_runs(seconds=0.05)
    figure = staleness(runs, command="minidist staleness")
    gids = Counter(artist.get_gid() for axes in figure.axes for artist in axes.get_children())
    assert gids["rate"] == gids["loss"] == 3
    assert gids["staleness"] == sum(len(set(run.staleness)) for run in runs)
    for axes in figure.axes[1:2]:
        assert sum(patch.get_height() for patch in axes.patches) == pytest.approx(3)  # shares of each run


def test_the_command(tmp_path, capsys):
    path = tmp_path / "s.svg"
    main_without_exit(["staleness", "bsp", "delay:2", "--seconds", "0.02", "--json", "-o", str(path)])
    runs = json.loads(capsys.readouterr().out)
    assert [run["consistency"] for run in runs] == ["bsp", "delay:2"]
    assert "minidist staleness bsp delay:2" in path.read_text()


def main_without_exit(arguments):
    with pytest.raises(SystemExit) as left:
        main(arguments)
    assert left.value.code in (0, None)


@each(
    ("values", "sentence"),
    [
        ({"workers": 0}, "--workers is 0; it must be from 1"),
        ({"slow": 0}, "--slow is 0; it must be a number from"),
        ({"seconds": float("nan")}, "--seconds is nan; it must be a number from"),
        ({"slow": float("inf")}, "--slow is inf; it must be a number from"),
        ({"who": "me"}, "'me'; it must be 'last'"),
        ({"consistencies": ["ssp:-1"]}, "bound -1"),
    ],
)
def test_wrong_numbers(values, sentence):
    with pytest.raises(UsageError, match=sentence):
        staleness_runs(**values)
