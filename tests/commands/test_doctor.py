"""`minidist doctor` under launchers: sizes that must agree, hosts, software and cores of all ranks."""

import json
import os
from types import SimpleNamespace

import numpy as np
import pytest

from minidist.base.process import usable_cores
from minidist.collectives import tuning
from minidist.comm.launcher import run_under_mpiexec
from minidist.commands import doctor
from minidist.commands.doctor import RankFacts, judge_ranks, launcher_finding, launcher_of
from tests.cases import each
from tests.mpi_runner import mpiexec

OPEN_MPI = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4"}
HYDRA = {"PMI_RANK": "0", "PMI_SIZE": "2"}
PMIX = {"SLURM_PROCID": "3", "SLURM_STEP_NUM_TASKS": "8"}


def test_a_launcher_is_recognised_by_its_variables():
    assert launcher_of({}) is None
    assert launcher_of(OPEN_MPI) == ("Open MPI's mpiexec (OMPI_COMM_WORLD_RANK 1, OMPI_COMM_WORLD_SIZE 4)", 1, 4)
    assert launcher_of({**PMIX, **HYDRA})[1:] == (0, 2)  # an mpiexec inside a Slurm job
    assert launcher_of(PMIX)[1:] == (3, 8)


@each(
    ("environment", "size", "ok", "words"),
    [
        ({}, 1, True, "none, this is one process"),
        (HYDRA, 2, True, "PMI_SIZE 2); MPI sees 2"),
        (HYDRA, 1, False, "do not belong together"),
        (PMIX, 8, True, "Slurm's srun (SLURM_PROCID 3, SLURM_STEP_NUM_TASKS 8); MPI sees 8"),
        (PMIX, 1, False, "do not belong together"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, 1, False, "torchrun starts no MPI processes"),
    ],
)
def test_the_launcher_and_mpi_must_see_as_many_processes(environment, size, ok, words):
    finding = launcher_finding(environment, size)
    assert finding.ok is ok
    assert words in finding.text


def test_ranks_are_judged_host_by_host():
    facts = [RankFacts(rank, 4, f"node{rank // 2}", "minidist 1", (0, 1), 1) for rank in range(4)]
    hosts, software, cores = judge_ranks(facts)
    assert hosts.text == "4 ranks on node0 (ranks 0-1), node1 (ranks 2-3)"
    assert software.ok
    assert cores.ok
    assert "node1: 2 ranks, 1 BLAS threads each, on 2 cores" in cores.text

    other = RankFacts(3, 4, "node1", "minidist 2", (0, 1), 2)
    _, software, cores = judge_ranks([*facts[:3], other])
    assert not software.ok
    assert "rank 3 on node1 has minidist 2" in software.text
    assert not cores.ok
    assert cores.text.endswith("set OPENBLAS_NUM_THREADS=1")


@pytest.mark.parametrize("rank", [0, 1])
def test_a_launcher_of_another_mpi_is_reported_by_rank_0_alone(rank, monkeypatch):
    """MPICH would end the process inside MPI_Init, with a page of PMIx's errors."""
    monkeypatch.setattr(doctor, "load_mpi", lambda: SimpleNamespace(Get_library_version=lambda: "MPICH Version: 5.0.2"))
    for name, value in {"OMPI_COMM_WORLD_RANK": str(rank), "OMPI_COMM_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    for name in ("PMI_SIZE", "MPI4PY_CHECK_MPIEXEC"):
        monkeypatch.delenv(name, raising=False)
    findings = doctor.ranks_together()
    if rank:
        assert findings is None
        return
    (finding,) = findings
    assert (finding.name, finding.ok) == ("launcher", False)
    assert "Open MPI's mpiexec started 2 processes, but the MPI library of this Python is MPICH" in finding.text


def test_a_system_that_does_not_say_which_cores(monkeypatch):
    """macOS and Windows."""
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 3)
    assert usable_cores() == [0, 1, 2]
    assert [f.text for f in doctor.examine() if f.name == "cores"] == ["3 usable by this process"]


@pytest.mark.skipif(mpiexec() is None, reason="no mpiexec on this machine")
def test_rank_0_reports_for_all_ranks():
    answer = run_under_mpiexec(2, ["-m", "minidist", "doctor", "--json"], timeout=120)
    findings = {finding["name"]: finding for finding in json.loads(answer.stdout)}
    assert findings["launcher"]["ok"]
    assert "MPI sees 2" in findings["launcher"]["text"]
    assert findings["hosts"]["text"].startswith("2 ranks on ")
    assert findings["software"]["ok"]
    assert "on one host 8 B in" in findings["transport"]["text"]


def test_what_auto_chooses_by_is_said(monkeypatch, tmp_path):
    """Nothing is measured yet; a table of these ranks; the formulas, by the user's word."""
    monkeypatch.setenv("MINIDIST_CACHE", str(tmp_path))
    monkeypatch.delenv("MINIDIST_TUNING", raising=False)
    MPI = SimpleNamespace(Get_library_version=lambda: "MPICH 5")
    facts = [RankFacts(rank, 2, "node0", "minidist 1", (0, 1), 1) for rank in range(2)]
    (finding,) = doctor.collectives(MPI, facts)
    assert 'the first algorithm="auto" of each operation measures it on these 2 ranks, in about 3 s' in finding.text

    place = tuning.entry_of("all_reduce", ["node0"] * 2, "MPICH 5", nodes=None, checks=True, synchronous=False)
    tuning.write_entry(place, np.ones((len(tuning.candidates("all_reduce")), len(tuning.SIZES))))
    others, finding = doctor.collectives(MPI, facts)
    assert "of each other operation" in others.text
    assert (finding.name, finding.text) == ("all_reduce", f"measured: binomial for all sizes (in {place.name})")

    monkeypatch.setenv("MINIDIST_TUNING", "off")
    (finding,) = doctor.collectives(MPI, facts)
    assert finding.text == 'MINIDIST_TUNING=off: algorithm="auto" chooses by formulas'
    assert doctor.collectives(MPI, facts[:1]) == []
