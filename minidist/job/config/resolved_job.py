"""A job as the rules see it: its settings by name, and what follows from them.

Proved by: tests/config/test_rules.py
"""

import os
from functools import cached_property
from typing import Any

from minidist.data import load_dataset
from minidist.job.config.models import make_model, parameter_count
from minidist.job.config.pipeline_plan import load_job_plan, make_plan, replicas_of
from minidist.job.config.train_config import Batches, TrainConfig, updates_of
from minidist.parallel.context.orders import part_order, sequence_positions
from minidist.techniques import drains, own_loop


class ResolvedJob:
    """A job as the rules see it: the fields of its config by name, and what follows from them."""

    def __init__(self, config: TrainConfig, batches: Batches, processes_here: int = 1) -> None:
        self.config, self.batches, self.dims, self.processes_here = config, batches, batches.dims, processes_here

    def __getattr__(self, name: str) -> Any:
        # Python calls this only for names that the class does not define: the fields of the config.
        return getattr(self.config, name)

    def optional(self, name: str) -> Any:
        """Return a setting or a property of a technique that may not be installed; None without it."""
        return getattr(self, name, None)

    def is_changed(self, name: str) -> bool:
        """Return whether a setting differs from its default; not one of a technique that is not installed."""
        field = TrainConfig.model_fields.get(name)
        return field is not None and bool(getattr(self, name) != field.default)

    def small_model(self) -> Any:
        """Return the job's model with one block: blocks of the package's own models are equal. A user's is whole."""
        config = self.config
        return make_model(config if config.is_own_model else config.model_copy(update={"layers": 1}), self.dataset)

    @property
    def dp(self) -> int:
        """Data-parallel ranks, also where the config leaves them open."""
        return self.dims.dp

    @property
    def replicas(self) -> str | None:
        """The ranks of each stage of a pipeline, also where the file of --partition has them."""
        given: str | None = self.config.replicas
        if given is not None or self.config.partition == "uniform":
            return given
        found = replicas_of(self.config)
        return None if found is None else ",".join(map(str, found))

    @property
    def data_ranks(self) -> int:
        """Ranks that share the gradients of one stage."""
        return self.dims.dp * self.dims.cp

    @property
    def shards(self) -> int:
        """Ranks over which one copy of the model is sharded."""
        return self.data_ranks // self.dp_replicate  # type: ignore[no-any-return]

    @property
    def expert_ranks(self) -> int:
        """Ranks that share the gradients of one expert."""
        return self.dims.edp * self.dims.cp

    @property
    def expert_shards(self) -> int:
        """Ranks over which one copy of an expert is sharded."""
        return self.expert_ranks // self.dp_replicate  # type: ignore[no-any-return]

    @property
    def has_replicas(self) -> bool:
        """Whether two ranks hold the same values of a parameter."""
        on_data_axis = self.dp_replicate > 1 if self.config.zero == 3 else self.data_ranks > 1
        # Norms are on all tensor-parallel ranks, a GPT's embedding is on the first and on the last stage.
        return on_data_axis or self.config.tp > 1 or (self.config.pp > 1 and self.config.model == "gpt")

    @property
    def microbatches(self) -> int:
        """Micro-batches of one pipeline in one step."""
        return self.batches.accumulation

    @cached_property
    def dataset(self) -> Any:
        """The data set; raises UsageError when there is none."""
        return load_dataset(self.config.data)

    @cached_property
    def half(self) -> bool:
        """Whether values have 16 bits."""
        return self.config.precision in ("fp16", "bf16")

    @cached_property
    def server(self) -> bool:
        """Whether a technique has a training loop in place of the job's: no moment has all gradients of a step."""
        return own_loop(self.config) is not None

    @property
    def replicas_only(self) -> bool:
        """Whether the data axis has replicas alone, and no parts of sequences or experts, which step together."""
        return not (self.server or self.experts or self.cp > 1) and self.updates == "flush"

    @cached_property
    def updates(self) -> str:
        """When the schedule updates the weights; "flush" without a pipeline."""
        return updates_of(self.config.schedule) if self.config.pp > 1 else "flush"

    @cached_property
    def asynchronous(self) -> bool:
        """Whether the pipeline never drains, so that no moment has all gradients of one step."""
        return not drains(self.config)

    @cached_property
    def plan(self) -> Any:
        """The validated plan of the pipeline; raises when it cannot be made."""
        return make_plan(self.config, self.batches.accumulation)

    @cached_property
    def blocks(self) -> int:
        """How many blocks of the model a pipeline can divide among stages."""
        if self.config.is_own_model:
            return len(getattr(make_model(self.config, self.dataset), "blocks", ()))
        # An MLP has one layer more than hidden layers: the one that returns the classes.
        return self.config.layers + (self.config.model == "mlp")

    @cached_property
    def loaded_plan(self) -> Any:
        """The plan as its schedule gives it."""
        return load_job_plan(self.config, self.batches.accumulation)

    @cached_property
    def sequence_parts(self) -> set[int]:
        """Tokens of one sequence on the context-parallel ranks."""
        length, cp, order = self.config.context, self.config.cp, part_order(self.config.attention, self.config.ulysses)
        # One number, unless the sequence does not divide evenly.
        return {len(sequence_positions(length, rank, cp, order)) for rank in range(cp)}

    @property
    def heads_of_rank(self) -> int:
        """Key-value heads of one tensor-parallel rank."""
        return max(1, (self.config.kv_heads or self.config.heads) // self.config.tp)

    @property
    def head_unit(self) -> int:
        """The width of a head is a multiple of this: Llama's rotation takes pairs."""
        return 2 if self.config.model == "llama" else 1

    @cached_property
    def parameters(self) -> int:
        """About how many parameters the whole model has."""
        # One large token among the data makes a large vocabulary.
        data = self.dataset
        if self.config.model == "cnn" and not data.is_tokens and data.image is not None:
            return parameter_count(self.config, 9 * data.image[0] + data.classes)
        return parameter_count(self.config, data.vocab_size if data.is_tokens else data.features + data.classes)

    @property
    def vocabulary_dominates(self) -> bool:
        """Whether more than half of the parameters are the embedding of tokens."""
        return 2 * self.dataset.vocab_size * self.config.width > self.parameters  # type: ignore[no-any-return]

    @property
    def needed_bytes(self) -> int:
        """Weights, gradients and Adam's two states of all ranks of this process, in 4 bytes each.

        0 for a model of the user's, whose size follows from no setting.
        """
        if self.config.is_own_model:
            return 0
        return self.parameters * 4 * 4 * self.processes_here

    @cached_property
    def machine_bytes(self) -> float:
        """Memory of this machine; infinite where the system does not tell."""
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else float("inf")
