"""`--momentum`, `--nesterov`, `--betas`, `--eps`: the arguments of the optimizer.

Each flag is passed to the optimizer's class as the argument of the same name. A flag for which the class has no
argument is refused. Nothing is sent, and the state in checkpoints is the optimizer's.

A rank sends per step: nothing.
Equal to: one device, bit for bit.
Lesson: 02b_from_sgd_to_adam.

Proved by: tests/optim/test_own_optimizer.py, tests/config/test_train_config.py, tests/config/test_rules.py
"""

from typing import Any

from minidist.base.limits import is_size
from minidist.base.records import WrongValue
from minidist.optim.named import takes
from minidist.techniques import Extension, Field, Record, Rule


def _two_betas(value: Any) -> str | None:
    # A file may have a list; one spelling makes equal settings equal.
    if value is None:
        return None
    try:
        betas = [float(word) for word in (value.split(",") if isinstance(value, str) else value)]
    except (TypeError, ValueError):
        betas = []
    if len(betas) != 2 or not all(is_size(beta) and beta < 1 for beta in betas):
        raise WrongValue("Input should be two numbers from 0 to below 1, such as 0.9,0.95")
    return ",".join(map(str, betas))


class OptimizerSettings(Extension):
    """Gives the optimizer the values of the flags."""

    class Settings(Record):
        """The flags; --optimizer, --lr and --weight-decay are settings of every job."""

        momentum: float = Field(0.0, ge=0, lt=1, description="momentum of SGD, RMSProp, LARS and Muon")
        nesterov: bool = Field(False, description="sgd and muon with --momentum: Nesterov's form, as in PyTorch")
        betas: str | None = Field(
            None,
            read=_two_betas,
            description="adam, adamw, lamb, muon: decay rates of the two averages, such as 0.9,0.95 (default:"
            " 0.9,0.999)",
        )
        eps: float | None = Field(
            None,
            gt=0,
            description="epsilon in the denominator (default: 1e-8, adagrad 1e-10, lamb 1e-6; sgd and lars have none)",
        )

    switches = (("optimizer", "adamw"),)
    panel = "Optimization"
    rules = (
        Rule(
            "muon-needs-momentum",
            lambda j: j.optimizer == "muon" and not j.momentum,
            "--optimizer muon orthogonalises momentum, and needs a --momentum above 0",
            "add --momentum 0.95",
        ),
        Rule(
            "momentum-by-optimizer",
            lambda j: j.momentum and not takes(j.optimizer, "momentum"),
            "--momentum {momentum} does not apply to --optimizer {optimizer}",
            "use sgd, rmsprop, lars or muon, or leave it out",
        ),
        Rule(
            "nesterov-by-optimizer",
            lambda j: j.nesterov and not takes(j.optimizer, "nesterov"),
            "--nesterov is a form of SGD's and Muon's momentum, and does not apply to --optimizer {optimizer}",
            "use sgd or muon, or leave it out",
        ),
        Rule(
            "nesterov-needs-momentum",
            lambda j: j.nesterov and not j.momentum,
            "--nesterov needs a --momentum above 0",
            "add --momentum 0.9, or leave it out",
        ),
        Rule(
            "betas-by-optimizer",
            lambda j: j.betas is not None and not takes(j.optimizer, "betas"),
            "--betas {betas} does not apply to --optimizer {optimizer}",
            "use adam, adamw, lamb or muon, or leave it out",
        ),
        Rule(
            "eps-by-optimizer",
            lambda j: j.eps is not None and not takes(j.optimizer, "eps"),
            "--eps {eps} does not apply to --optimizer {optimizer}, whose formula has none",
            "use another optimizer, or leave it out",
        ),
    )
    fixed = tuple(Settings.model_fields)
    unplanned = ("betas", "eps")

    @classmethod
    def used_by(cls, config: Any) -> bool:
        # No momentum is a choice, too: the class may have another default.
        return cls.given(config) or takes(config.optimizer, "momentum")

    def optimizer_arguments(self, job: Any, group: Any) -> dict[str, Any]:
        given = self.settings.model_dump()
        if given["betas"] is not None:
            given["betas"] = tuple(map(float, given["betas"].split(",")))
        own = {name: value for name, value in given.items() if takes(job.config.optimizer, name)}
        return {name: value for name, value in own.items() if value is not None}
