"""A kind of model without a row in families.toml is counted by transformers, where it is installed."""

import builtins

import pytest

from minidist.core.base.errors import UsageError
from minidist.planning.cluster.gpus import machine_of
from minidist.planning.cluster.layout import ClusterLayout, Job
from minidist.planning.cluster.step_time import StepModel
from minidist.planning.transformers_count import count_by_building

T5 = {"model_type": "t5", "d_model": 16, "d_kv": 4, "d_ff": 24, "num_layers": 3, "num_heads": 4, "vocab_size": 40}


def test_without_transformers_a_sentence_says_how_to_go_on(monkeypatch):
    original = builtins.__import__

    def without(name, *more, **settings):
        if name in ("torch", "transformers"):
            raise ImportError(name)
        return original(name, *more, **settings)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(UsageError, match="'t5' in f is not in minidist's table of models, near x; install transf"):
        count_by_building("t5", T5, "f", ", near x")


def test_transformers_counts_a_kind_without_a_row():
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    model = count_by_building("t5", T5, "f", "")
    with torch.device("meta"):
        built = transformers.AutoModelForSeq2SeqLM.from_config(transformers.CONFIG_MAPPING["t5"].from_dict(T5))
    assert model.parameters == sum(parameter.numel() for parameter in built.parameters())
    # A file of another kind, one that no model can be built from, and one whose model would take minutes to build.
    for kind, content, sentence in (
        ("nothing", {}, "does not know it; describe a model"),
        ("t5", {**T5, "d_model": "wide"}, "cannot build the t5 model of f"),
        ("t5", {**T5, "num_layers": 10**6}, "num_layers in f is 1000000; transformers is asked to build at most"),
    ):
        with pytest.raises(UsageError, match=sentence):
            count_by_building(kind, content, "f", "")
    # Experts are told from the rest by their name, and the layers can be planned.
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 50, "head_dim": 8}
    experts = {"num_local_experts": 4, "num_experts_per_tok": 1, "intermediate_size": 16, "pad_token_id": 0}
    mixtral = count_by_building("mixtral", {**sizes, **experts}, "f", "")
    assert mixtral.parameters - mixtral.active_parameters == 2 * 3 * 3 * 32 * 16
    assert StepModel(ClusterLayout(microbatches=1), Job(mixtral, 8, 1, gpus=1), machine_of("h100")).step().seconds > 0
