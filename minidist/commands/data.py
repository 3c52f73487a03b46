"""`minidist data`: which samples each replica trains on.

Proved by: tests/data/test_loading.py
"""

from typing import Annotated

from minidist.base.limits import check_count, check_ranks
from minidist.commands.command import Option
from minidist.commands.options import Ranks, takes_config
from minidist.job.config.train_config import TrainConfig


@takes_config
def data(
    config: TrainConfig, ranks: Ranks = None, step: Annotated[int, Option(help="the step whose samples are listed")] = 0
) -> None:
    """Print which samples each replica trains on: the size of the data, the sharding rule, one step's samples."""
    from minidist.data import GlobalBatchSampler, load_dataset, sharding_rule
    from minidist.job.config.train_config import resolve_batches, resolve_dims

    if ranks is not None:
        check_ranks(ranks)
    batches = resolve_batches(config, ranks or resolve_dims(config).ranks)
    # The samples of all steps before it are counted in 64 bits.
    check_count(step, "--step", most=2**62 // batches.global_batch)
    sampler = GlobalBatchSampler(load_dataset(config.data), batches.global_batch, config.context, config.seed)
    print(sharding_rule(sampler, batches.shares, step))
