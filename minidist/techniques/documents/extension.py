"""`--document-separator TOKEN`: a sample holds several documents, and no token attends to another document.

    sample   a b . c d e . f          a micro-batch is read     the document of each token follows from its inputs
    ids      0 0 0 1 1 1 1 2          it runs                   every attention takes the ids as its mask

The mask is in `parallel/context/document_mask.py`; `train/task.py` says when a micro-batch is read and when it runs.

A rank sends per step: nothing more.
Equal to: one device, bit for bit, 1e-12 with `--cp`.
Lesson: 22c_documents.

Proved by: tests/parallel/test_all_gather_attention.py, tests/config/test_rules.py
"""

from contextlib import AbstractContextManager
from typing import Any

from minidist.core.base.arrays import Array
from minidist.core.comm import Comm
from minidist.parallel.context import document_ids, documents
from minidist.techniques import Extension, Field, Record, Rule


class Documents(Extension):
    """Keeps attention inside documents. ids: of the micro-batches that were read last, by their numbers."""

    class Settings(Record):
        document_separator: int | None = Field(
            None, ge=0, description="token that ends a document, inside which attention stays"
        )

    panel = "Context parallelism"
    rules = (
        Rule(
            "documents-of-language-models",
            lambda j: j.document_separator is not None and (not j.is_language_model or j.is_own_model),
            "--document-separator {document_separator} masks attention, which minidist does in its models gpt and"
            " llama, not in --model {model}",
            "use --model gpt or llama, or leave it out",
        ),
        Rule(
            "documents-of-the-data",
            lambda j: j.document_separator is not None and j.document_separator >= j.dataset.vocab_size,
            "--document-separator {document_separator} is out of range: the tokens of --data {data} are 0..{largest}",
            "use one of them",
            {"largest": lambda j: j.dataset.vocab_size - 1},
        ),
        Rule(
            "documents-on-a-ring",
            lambda j: j.document_separator is not None and j.cp > 1 and j.attention in ("ring", "ulysses-ring"),
            "not implemented: --attention {attention} has no masks but the causal one, and --document-separator"
            " {document_separator} needs one for each row",
            "use --attention all-gather or ulysses",
        ),
        Rule(
            "documents-in-an-asynchronous-pipeline",
            lambda j: j.document_separator is not None and j.asynchronous,
            "not implemented: --schedule {schedule} computes a stream of micro-batches without the masks of"
            " --document-separator {document_separator}",
            "use a synchronous one, such as 1f1b",
        ),
    )
    fixed = ("document_separator",)
    in_evaluations = True

    def build(self, job: Any, comm: Comm | None) -> None:
        from minidist.parallel.context.all_gather_attention import mask_documents

        mask_documents(job.model, job.config.context)
        self.ids: dict[int, Array] = {}

    def read_inputs(self, number: int, inputs: Any) -> None:
        self.ids[number] = document_ids(inputs, self.settings.document_separator)

    def micro_batch(self, number: int) -> AbstractContextManager[Any]:
        return documents(self.ids[number])
