"""Data and who sees which sample: the same for one device and for any number of ranks.

load.py        what `--data` names
datasets.py    a stream of tokens, and samples with labels
generated.py   data that need no download
files.py       the user's own files
stages.py      what happens to samples between storage and the model
sampler.py     which samples a step trains on
batch_plan.py  the batch of each step, and which rank computes which of its rows
prefetch.py    batches that a thread makes ahead of time
workers.py     batches that worker processes make ahead of time
entropy.py     the entropy of a text, which a model must beat
"""

from typing import TYPE_CHECKING

from minidist.core.base.lazy import lazy_imports

if TYPE_CHECKING:
    from minidist.base.cache import cached
    from minidist.data.batch_plan import Shares, cut_batch, measured_every, parse_weights, sharding_rule
    from minidist.data.datasets import Dataset, SampleDataset, TokenDataset, data_digest, hold_out
    from minidist.data.entropy import bigram_entropy, unigram_entropy
    from minidist.data.files import idx_folder, npz_file, text_file, token_file
    from minidist.data.generated import glyphs, markov, pydoc_text
    from minidist.data.load import load_dataset
    from minidist.data.prefetch import PrefetchingSampler
    from minidist.data.sampler import GlobalBatchSampler, microbatch_numbers, microbatch_rows, weighted_shards
    from minidist.data.workers import LoaderError, WorkerSampler

__all__ = [
    "LoaderError",
    "PrefetchingSampler",
    "Dataset",
    "GlobalBatchSampler",
    "SampleDataset",
    "Shares",
    "TokenDataset",
    "bigram_entropy",
    "cached",
    "cut_batch",
    "data_digest",
    "glyphs",
    "hold_out",
    "idx_folder",
    "load_dataset",
    "markov",
    "measured_every",
    "microbatch_numbers",
    "microbatch_rows",
    "npz_file",
    "parse_weights",
    "pydoc_text",
    "sharding_rule",
    "text_file",
    "token_file",
    "unigram_entropy",
    "WorkerSampler",
    "weighted_shards",
]

__getattr__, __dir__ = lazy_imports(__name__, __file__)
