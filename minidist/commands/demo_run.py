"""The demonstration: a byte-level GPT learns English on four ranks, in three worlds, to the same bits.

1 simulated     four ranks in this process                      meanwhile, in a second process: 3 one device
2 mpiexec       the same job on four processes
compared: losses to the last digit; weights and optimizer state by fingerprint; every rank's messages one by one

Proved by: tests/test_readme.py
"""

from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from minidist.base.process import tune_process
from minidist.base.read_file import parse_json
from minidist.base.trace_file import read_traces
from minidist.base.traces import sequences
from minidist.comm.errors import LauncherError
from minidist.comm.launcher import find_mpiexec, run_under_mpiexec
from minidist.comm.launching import writable
from minidist.commands.runner import run_training
from minidist.data import bigram_entropy, pydoc_text
from minidist.job.config.train_config import TrainConfig, flag, resolve_batches
from minidist.job.equality.reference import reference
from minidist.job.train.state import StepState
from minidist.job.train.trainer import digest

BIGRAM_STEPS = 300  # after as many steps the model has learned more than pairs of letters
LAST_STEPS = 20  # one step's loss is noisy; the mean of the last ones is not


def demo_config(steps: int, ranks: int) -> TrainConfig:
    """Return the job: a two-layer GPT on the text of Python's own help, 16 samples of 64 bytes per step."""
    return TrainConfig.make(
        model="gpt",
        layers=2,
        width=64,
        heads=4,
        context=64,
        data="pydoc",
        steps=steps,
        lr=4e-3,
        warmup=min(20, steps - 1),
        decay="cosine",
        clip=1.0,
        dp=ranks,
        global_batch=4 * ranks,
        micro_batch=4,
        # The same bits on one device and in every world.
        reduction="ordered",
        # Two buckets, so that the picture shows gradients that travel while backward still runs.
        bucket_cap_mb=0.3,
    )


def one_device(config: TrainConfig, ranks: int) -> tuple[list[float], str]:
    """Return losses and fingerprint of the reference; runs in another process."""
    # A new process starts with the machine's number of BLAS threads, on which bits depend.
    tune_process()
    last: list[str] = []

    def observe(state: StepState) -> None:
        # The fingerprint covers weights and optimizer state, so that of the last step covers the whole run.
        if state.step == config.steps - 1 and state.strategy is not None:
            last.append(digest(state.strategy))

    return reference(config, resolve_batches(config, ranks), [observe]), last[0]


def run_demo(
    steps: int, ranks: int, folder: Path, timeout: float, say: Callable[[str], None]
) -> tuple[dict[str, Any], list[str]]:
    """Run the job in the three worlds; return what was found (`passed`, and the figures), and the lines that say it.

    say: prints a line of progress.
    """
    config = demo_config(steps, ranks)
    writable(folder / "simulated.jsonl")  # before minutes of training
    text = pydoc_text().tokens
    entropy = bigram_entropy(text)
    say(
        f"a byte-level GPT on {len(text):,} bytes of English (the text of Python's help), {steps} steps on {ranks}"
        " ranks"
    )
    say(f"1/3 {ranks} simulated ranks in this process, and 2/3 one device in a second process")

    # One device computes in a second process while this one simulates four ranks.
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as other:
        alone = other.submit(one_device, config, ranks)
        simulated = run_training(
            config, ranks, timeout, folder / "simulated.jsonl", command=f"minidist demo --steps {steps}"
        )
        assert simulated is not None
        losses, fingerprint = alone.result()

    # A figure that is False fails the demonstration.
    mean_loss = sum(simulated.losses[-LAST_STEPS:]) / len(simulated.losses[-LAST_STEPS:])
    report: dict[str, Any] = {
        "losses": simulated.losses,
        "bigram_entropy": entropy,
        "mean_of_last_losses": mean_loss,
        **({"below_bigram_entropy": mean_loss < entropy} if steps >= BIGRAM_STEPS else {}),
        "equals_one_device": losses == simulated.losses and fingerprint == simulated.digest,
        "volumes_equal_closed_form": simulated.volumes_hold(),
        **_under_mpiexec(config, ranks, simulated, folder, timeout, say),
        "trace": simulated.trace,
    }
    report["passed"] = all(value is not False for value in report.values())
    return report, [simulated.table(), *verdict(report, steps)]


def _under_mpiexec(
    config: TrainConfig, ranks: int, simulated: Any, folder: Path, timeout: float, say: Callable[[str], None]
) -> dict[str, Any]:
    """Compare with the same job on processes; {} when this machine has no MPI (the demo then says so and goes on)."""
    try:
        find_mpiexec()
    except LauncherError as error:
        say(f"the world of mpiexec is left out: {error}")
        return {}

    # The job as flags: every setting that differs from its default.
    flags = [
        f"{flag(name)}={value}" for name, value in config.model_dump(exclude_defaults=True).items() if value is not True
    ]
    path = folder / "mpi.jsonl"
    say(f"3/3 the same job on {ranks} processes: mpiexec -n {ranks} minidist train ...")
    finished = run_under_mpiexec(
        ranks, ["-m", "minidist", "train", *flags, "--json", "--trace", str(path), "--timeout", str(timeout)]
    )

    # Traces of both worlds must name the same messages in the same order.
    mpi = parse_json(finished.stdout, any_float=True)
    real, _ = read_traces(path)
    virtual, _ = read_traces(simulated.trace)
    return {
        "mpi_losses_identical": mpi["losses"] == simulated.losses,
        "mpi_bits_identical": mpi["digest"] == simulated.digest,
        "mpi_sequences_identical": all(sequences(a) == sequences(b) for a, b in zip(real, virtual, strict=True)),
        "messages": sum(len(trace.sent()) for trace in virtual),
    }


def verdict(report: dict[str, Any], steps: int) -> list[str]:
    """Return the lines that a person reads at the end."""

    def mark(name: str) -> str:
        return "yes" if report[name] else "NO "

    lines = [
        f"loss {report['losses'][0]:.4f} -> {report['mean_of_last_losses']:.4f} (mean of the last"
        f" {min(LAST_STEPS, len(report['losses']))} steps); the bigram entropy of the text is"
        f" {report['bigram_entropy']:.4f}"
    ]
    if "below_bigram_entropy" in report:
        lines.append(f"  {mark('below_bigram_entropy')}  the model knows more than pairs of letters")
    lines += [
        (
            f"  {mark('equals_one_device')}  equals one device: all {steps} losses, weights and optimizer state, bit"
            " for bit"
        ),
        f"  {mark('volumes_equal_closed_form')}  bytes sent equal the closed form, for every purpose",
    ]

    # Without an MPI on this machine its world was left out.
    if "messages" in report:
        lines += [
            f"  {mark('mpi_losses_identical')}  simulated and mpiexec agree in every digit of every loss",
            f"  {mark('mpi_bits_identical')}  and in every bit of weights and optimizer state",
            (
                f"  {mark('mpi_sequences_identical')}  and each rank sent the same {report['messages']:,} messages in"
                " the same order"
            ),
        ]
    return lines
