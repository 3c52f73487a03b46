"""Data and who sees which sample: the same for one device and for any number of ranks."""

from minidist.data.datasets import Dataset, SampleDataset, TokenDataset
from minidist.data.entropy import bigram_entropy, unigram_entropy
from minidist.data.files import idx_folder, npz_file, text_file, token_file
from minidist.data.generated import glyphs, markov, pydoc_text
from minidist.data.load import load_dataset
from minidist.data.sampler import GlobalBatchSampler, microbatch_numbers, microbatch_rows

__all__ = [
    "Dataset",
    "GlobalBatchSampler",
    "SampleDataset",
    "TokenDataset",
    "bigram_entropy",
    "glyphs",
    "idx_folder",
    "load_dataset",
    "markov",
    "microbatch_numbers",
    "microbatch_rows",
    "npz_file",
    "pydoc_text",
    "text_file",
    "token_file",
    "unigram_entropy",
]
