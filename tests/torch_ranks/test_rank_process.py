"""Ranks of one process have what processes have: modules, variables, folder, arguments. Needs no PyTorch."""

import os
import pickle
import sys
from types import ModuleType

import pytest

from minidist.comm import SimWorld
from minidist.core.base.errors import UsageError
from minidist.debug.rank_process import MARKER, RankProcess, UserModules, own_process_state
from minidist.debug.torch_ranks.rank_thread import RankThread, current_rank
from minidist.debug.user_program import UserProgram


def run(program, ranks=2, own=()):
    """What `program()` returns on every rank, and what the ranks print."""
    processes = []

    def of_rank(comm):
        process = RankProcess(beginning, {"RANK": str(comm.rank)})
        processes.append(process)
        return RankThread(comm, program, process.leave, process.enter).run()

    with own_process_state(UserModules(own)) as beginning:
        return SimWorld(ranks, timeout=20).run(of_rank), [process.output.written.getvalue() for process in processes]


def meet():
    """Let the other ranks run."""
    current_rank().call(current_rank().comm.barrier)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty folder whose modules can be imported, and to which the process is put back."""
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    return tmp_path


def test_a_rank_has_the_modules_that_it_has_imported(folder):
    (folder / "its_state.py").write_text("value = None\n")
    before = dict(sys.modules)

    def program():
        import its_state

        rank = current_rank().comm.rank
        its_state.value = rank
        meet()
        import its_state as again

        return again is its_state and again.value == rank, MARKER in sys.modules

    assert run(program, 3)[0] == [(True, True)] * 3
    assert {name: module for name, module in sys.modules.items() if name in before} == before
    assert not {"its_state", MARKER} & set(sys.modules)


def test_the_ranks_import_what_the_process_had_imported_anew(folder):
    (folder / "its_state.py").write_text("value = 0\n")
    import its_state

    its_state.value = 5
    assert run(lambda: __import__("its_state").value)[0] == [0, 0]
    assert sys.modules.pop("its_state") is its_state


def test_which_modules_are_the_program_s(folder, monkeypatch):
    (folder / "installed" / "site-packages").mkdir(parents=True)
    (folder / "installed" / "site-packages" / "of_a_package.py").write_text("")
    (folder / "a_folder").mkdir()
    (folder / "a_folder" / "inner.py").write_text("")
    (folder / "mine.py").write_text("")
    monkeypatch.syspath_prepend(str(folder / "installed" / "site-packages"))
    import a_folder.inner
    import mine
    import of_a_package

    made = ModuleType("made")
    extension = ModuleType("extension")
    extension.__file__ = str(folder / "extension.abi3.so")
    for module in (made, extension):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    is_own = {
        "__main__": True,
        "a_folder.inner": True,
        "mine": True,
        "extension": False,
        "json": False,
        "made": False,
        "minidist.comm": False,
        "of_a_package": False,
        "pytest": False,
        "sys": False,
    }
    modules = UserModules()
    assert {name: modules.has(name) for name in is_own} == is_own
    assert UserModules(["of_a_package"]).has("of_a_package")
    for name in (mine, of_a_package, a_folder.inner, a_folder):
        del sys.modules[name.__name__]


@pytest.mark.parametrize(("name", "part"), [("torch", "needs the same torch"), ("a.b", "name of a package")])
def test_what_cannot_be_a_rank_s_own_is_refused(name, part):
    with pytest.raises(UsageError, match=part):
        UserModules([name])


def test_a_module_may_communicate_while_it_is_imported(folder):
    (folder / "talks.py").write_text(
        "from minidist.debug.torch_ranks.rank_thread import current_rank\n"
        "rank = current_rank().comm.rank\ncurrent_rank().call(current_rank().comm.barrier)\n"
    )
    assert run(lambda: __import__("talks").rank, 3)[0] == [0, 1, 2]


def test_a_library_that_one_rank_imports_is_there_for_all(folder, monkeypatch):
    monkeypatch.delitem(sys.modules, "this", raising=False)

    def program():
        if current_rank().comm.rank == 0:
            import colorsys

            return colorsys
        meet_again = sys.modules.get("colorsys")
        import colorsys

        return meet_again and colorsys

    monkeypatch.delitem(sys.modules, "colorsys", raising=False)
    first, second = run(program)[0]
    assert first is second is not None


def test_variables_folder_arguments_and_output_belong_to_a_rank(folder, monkeypatch):
    monkeypatch.setenv("OF_ALL", "1")
    before = dict(os.environ), os.getcwd(), list(sys.path), sys.argv, sys.stdout

    def program():
        rank = os.environ["RANK"]
        os.environ["ITS_FOLDER"] = rank
        if rank == "0":
            del os.environ["OF_ALL"]
        (folder / rank).mkdir()
        os.chdir(folder / rank)
        sys.argv = [rank]
        sys.path.append(rank)
        meet()
        print(rank)
        started = os.popen("echo $RANK $ITS_FOLDER ${OF_ALL:-none}").read().split()
        assert started[:2] == [rank, rank]
        assert (started[2] == "none") == (rank == "0")
        return os.environ["ITS_FOLDER"], os.path.basename(os.getcwd()), sys.argv, sys.path[-1]

    results, outputs = run(program)
    assert results == [(rank, rank, [rank], rank) for rank in "01"]
    assert outputs == ["0\n", "1\n"]
    assert before == (dict(os.environ), os.getcwd(), list(sys.path), sys.argv, sys.stdout)
    assert os.popen("echo ${ITS_FOLDER:-none}").read() == "none\n"


def test_a_program_is_the_module_main_of_its_rank(folder):
    (folder / "program.py").write_text(
        "import dataclasses, pickle, sys\nimport neighbour\n"
        "from minidist.debug.torch_ranks.rank_thread import current_rank\n"
        "@dataclasses.dataclass\nclass Mine:\n    rank: int\n"
        "mine = Mine(current_rank().comm.rank)\ncurrent_rank().call(current_rank().comm.barrier)\n"
        "again = pickle.loads(pickle.dumps(mine))\nresult = again == mine and type(again) is Mine and sys.argv[1:]\n"
        "assert __name__ == '__main__'\n"
    )
    (folder / "neighbour.py").write_text("")
    (folder / "package").mkdir()
    (folder / "package" / "__main__.py").write_text("from . import part\nresult = part.__name__, __name__\n")
    (folder / "package" / "part.py").write_text("")
    program = UserProgram(str(folder / "program.py"), ["--lr", "3"])
    assert run(lambda: program.run()["result"])[0] == [["--lr", "3"]] * 2
    assert run(UserProgram("package", is_module=True).run)[0][1]["result"] == ("package.part", "__main__")
    assert pickle.dumps(None)


@pytest.mark.parametrize(
    ("program", "part"),
    [
        (UserProgram("none.py"), "cannot be read"),
        (UserProgram("no.such.module", is_module=True), "no module of that name"),
        (UserProgram("json.decoder.more", is_module=True), "no module of that name"),
    ],
)
def test_a_program_that_cannot_be_read_is_one_sentence(program, part):
    with pytest.raises(UsageError, match=part):
        run(program.run)
