"""What is known of a job before any rank starts: its ranks, whether its settings fit, and shorter trials of it.

Proved by: tests/commands/test_cli.py, tests/config/test_rules.py, tests/commands/test_memory_budget.py
"""

from typing import Any

from minidist.base.limits import check_ranks
from minidist.comm.launched import launched_size
from minidist.core.base.errors import UsageError
from minidist.job import checkpoint
from minidist.job.config.rules import check_rules
from minidist.job.config.train_config import TrainConfig, resolve_batches, resolve_dims
from minidist.job.train.job import Job
from minidist.techniques import installed, of_job, ranks_beside


def job_size(config: TrainConfig, ranks: int | None) -> int:
    """Return the number of ranks of the job: from mpiexec, --ranks, or the product of the degrees."""
    size = launched_size()

    # mpiexec decides the number of ranks, where it started this process.
    if size is not None and ranks is not None and ranks != size:
        raise UsageError(
            f"--ranks {ranks} under an mpiexec that started {size} processes; leave --ranks out, mpiexec decides"
        )

    # The ranks of a technique are added to those of the degrees.
    result = size or (resolve_dims(config).ranks + ranks_beside(config) if ranks is None else ranks)
    check_ranks(result)
    return result


def number_of_ranks(config: TrainConfig, ranks: int | None, has_values: bool = True) -> int:
    """Return the number of ranks of the job, after a check of its rules.

    has_values: False in a dry run, which may be larger than this machine.
    """
    # All errors of the settings are reported before any rank starts.
    result = job_size(config, ranks)
    batches = resolve_batches(config, result)
    # Simulated ranks share the memory of this process; processes of mpiexec have their own.
    check_rules(config, batches, (1 if launched_size() else result) if has_values else 0)
    if has_values and config.save is not None:
        checkpoint.check_saving(config)
    for extension in of_job(config):
        extension.check_models(config, Job.saved_model)
    return result


def settings_that_need_values(config: TrainConfig) -> dict[str, Any]:
    """Return the settings that meta arrays cannot run, by flag: what they store, read or decide by has values."""
    needs: dict[str, Any] = {"--resume": config.resume or None}
    for kind in installed():
        needs |= kind.needs_values(config)
    return {flag: value for flag, value in needs.items() if value is not None}


def trial(config: TrainConfig, steps: int) -> TrainConfig:
    """Return the job with so few steps: its learning rate is constant, and nothing is saved."""
    whole = (kind.Settings.model_fields.items() for kind in installed() if kind.for_all_steps)
    defaults = {name: field.default for fields in whole for name, field in fields}
    return config.model_copy(update={"steps": steps, "save": None, "every": None, "resume": False, **defaults})
