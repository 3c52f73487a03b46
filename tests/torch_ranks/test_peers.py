"""The programs of peers/, one for each kind that people write: what they print does not depend on the device they name.

Their numbers next to those of real processes: `python -m tests.torch_ranks.against_gloo`.
"""

import pytest

from tests.torch_ranks.against_gloo import FOLDER, PROGRAMS

torch = pytest.importorskip("torch")
program = pytest.importorskip("minidist.debug.torch_ranks.program")
pytestmark = pytest.mark.peers
# Sums that each program must have printed on every rank, and what only its ranks can know.
LINES = {"ddp.py": 3, "fsdp1.py": 9, "two_axes.py": 7, "pipeline.py": 2, "grid": 4, "checkpoint.py": 2}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_prints_the_same_on_the_gpus_that_it_names(name, monkeypatch):
    if name == "two_axes.py" and torch.__version__ < "2.7" and not torch.__version__.startswith("2.1"):
        pytest.skip("FSDP2 of this PyTorch does not run on the CPU, with gloo either")
    monkeypatch.chdir(FOLDER)
    ranks, is_module = PROGRAMS[name][0], not name.endswith(".py")
    runs = []
    for arguments in (), ("--cpu",):
        loaded = program.load_program(name, arguments, is_module)
        runs.append(program.run_on_ranks(loaded, ranks, settings=program.Settings(cuda="cpu")))
    assert runs[0].outputs == runs[1].outputs
    assert all(output.count("\n") >= LINES.get(name, 1) for output in runs[0].outputs[:ranks] if output)
    assert any(runs[0].outputs)
    assert program.first_difference(*runs) == ""
    assert runs[0].has_communicated
