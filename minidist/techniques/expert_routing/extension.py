"""`--top-k`, `--capacity-factor`, `--aux-loss-weight`: which experts compute a token.

    router       probabilities of a token for each expert; the --top-k largest are taken
    capacity     slots of an expert = ceil(factor x top_k x tokens / experts); a token without a slot is dropped
    loss         + weight x balancing loss, so that the experts get equal numbers of tokens

--experts and --ep are settings of every job. Sources: Fedus et al., Switch Transformers, 2021 (arXiv:2101.03961);
Lepikhin et al., GShard, 2020 (arXiv:2006.16668).

A rank sends per step: with `--ep` 4 (P-1)/P k c N h elements per layer, as above, for k = `--top-k` and c =
`--capacity-factor`; else nothing.
Equal to: one device to 1e-12.
Lesson: 14c_experts.

Proved by: tests/config/test_rules.py, tests/config/test_no_setting_is_ignored.py, tests/planning/test_volumes.py
"""

from collections.abc import Mapping
from typing import Any

from minidist.techniques import Extension, Field, Record, Rule, without_effect

# The arguments of GPTConfig and of LlamaConfig.
NAMES = {
    "gpt": {"top_k": "expert_top_k", "capacity_factor": "capacity_factor", "aux_loss_weight": "aux_loss_weight"},
    "llama": {
        "top_k": "num_experts_per_tok",
        "capacity_factor": "capacity_factor",
        "aux_loss_weight": "router_aux_loss_coef",
    },
}


class ExpertRouting(Extension):
    """Gives the model's routers the settings."""

    class Settings(Record):
        top_k: int = Field(1, ge=1, le=2, description="experts per token: 1 (Switch) or 2 (GShard)")
        capacity_factor: float = Field(
            1.25, gt=0, le=1000, description="slots of an expert: top_k x tokens / experts x this"
        )
        aux_loss_weight: float = Field(0.01, ge=0, description="weight of the experts' balancing loss")

    panel = "Model and data"
    rules = (
        Rule(
            "experts-top-k",
            lambda j: j.experts and j.top_k > j.experts,
            "--top-k {top_k} of --experts {experts} sends a token to more experts than there are",
            "use --top-k 1",
        ),
        *(without_effect(name, lambda j: j.experts > 0, "--experts") for name in Settings.model_fields),
    )
    fixed = tuple(Settings.model_fields)
    unplanned = ("aux_loss_weight",)

    def model_options(self, config: Any) -> Mapping[str, Any]:
        names = NAMES.get(config.model, {})
        return {argument: getattr(self.settings, name) for name, argument in names.items()}
