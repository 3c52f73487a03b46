"""A DeepSpeed configuration file as settings of a job: a key that applies becomes a flag, every other key is listed.

No key of a file that was written for another program may be ignored without a message. So each key of the file is in
one of two lists. The list also depends on the key's value: `overlap_comm: true` is what minidist does, `false` is not.
The keys and the reasons are tables in job/config/deepspeed_keys.py, and the page docs/deepspeed.md.

A key that is absent means DeepSpeed's default. Where that is not minidist's it is applied too, and listed as
`... (default)`; a flag on the command line takes precedence over it, but not over what the file says.

The batch triple follows DeepSpeed's rules (runtime/config.py, _set_batch_related_parameters): global batch = micro
batch x accumulation x data-parallel ranks; two of them give the third; train_batch_size alone, or the micro batch
alone, means an accumulation of 1; the accumulation alone means nothing.

Source: DeepSpeed's documentation, "Configuration JSON".

Proved by: tests/config/test_deepspeed.py
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from minidist.base.errors import UsageError, quoted, quoted_path
from minidist.base.read_file import read_json, read_text
from minidist.job.config.deepspeed_keys import NVME, UNBOUNDED, note_of, unknown
from minidist.job.config.train_config import TrainConfig, flag
from minidist.techniques import installed
from minidist.techniques.deepspeed import AUTO, number, whole

Settings = dict[str, Any]
Reader = Callable[[str, Any, "Translation"], None]  # of a key, its value, and what gets the settings
# By an optimizer's name, which is DeepSpeed's in lower case: the parameters in DeepSpeed and PyTorch that a file leaves
# out, where they are not those of every job.
DEFAULTS: dict[str, Settings] = {
    "adam": {"lr": 1e-3},
    "adamw": {"lr": 1e-3},
    "sgd": {"lr": 1e-3},
    "adagrad": {"lr": 1e-2},
    "rmsprop": {"lr": 1e-2},
    "lamb": {"lr": 1e-3, "eps": 1e-8},
    "muon": {"lr": 3e-4, "momentum": 0.95, "nesterov": True, "betas": "0.9,0.95", "eps": 1e-10},
}
AVERAGING = ("adam", "adamw", "lamb", "muon")  # these have betas
# The batch triple, in the order global batch, micro-batch, accumulation.
BATCH = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
MAX_LISTED = 20  # keys that do not apply, in a warning


@dataclass
class Translation:
    """What a file says.

    settings: fields of TrainConfig. defaults: those that follow from keys that the file leaves out. applied: (key,
    value, the flags that it became). ignored: (key, why). replaced: "optimizer" or "scheduler" -> the file's kind,
    where minidist has no such kind.
    """

    settings: Settings = field(default_factory=dict)
    defaults: Settings = field(default_factory=dict)
    applied: list[tuple[str, Any, str]] = field(default_factory=list)
    ignored: list[tuple[str, str]] = field(default_factory=list)
    replaced: dict[str, Any] = field(default_factory=dict)

    def apply(self, key: str, value: Any, **settings: Any) -> None:
        """Record that the key applies, through these settings (none: minidist does that anyway)."""
        if not TrainConfig.model_fields.keys() >= settings.keys():
            self.ignore(key, f"{_flags(settings)} is not installed")
            return
        self.settings.update(settings)
        self.applied.append((key, value, _flags(settings) or "as it is"))

    def default(self, key: str, value: Any, **settings: Any) -> None:
        """Record DeepSpeed's default of a key that the file leaves out."""
        self.defaults.update(settings)
        self.applied.append((f"{key} (default)", value, _flags(settings)))

    def ignore(self, key: str, why: str, value: Any = None) -> None:
        """Record that the key, or every key below it in a section, does not apply, and why."""
        if not isinstance(value, dict) or not value:
            self.ignored.append((key, why))
            return
        for name, inner in value.items():
            self.ignore(f"{key}.{name}", why, inner)

    def read(self, section: str, values: Mapping[str, Any], readers: Mapping[str, Reader]) -> None:
        """Record the keys of a section: those with a reader as it says, and all others as notes."""
        for name, value in values.items():
            key = f"{section}.{name}"
            if value == "auto":
                self.ignore(key, AUTO)
            elif name in readers:
                readers[name](key, value, self)
            else:
                self.note(key, value)

    def note(self, key: str, value: Any) -> None:
        """Record a key without a flag, and every key below it: what minidist does anyway, or why it does not apply."""
        if isinstance(value, dict) and value:
            # The other keys of a section that is off mean nothing.
            if value.get("enabled") is False:
                self.apply(key, "off")
                return
            for name, inner in value.items():
                self.note(f"{key}.{name}", inner)
            return

        noted = note_of(key)
        if noted is None:
            self.ignore(key, unknown(key))
        elif any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in noted.values):
            self.apply(key, value)
        else:
            self.ignore(key, AUTO if value == "auto" else noted.why)

    def replace(self, section: str, values: Mapping[str, Any], why: str) -> None:
        """Record that minidist has no optimizer or schedule of the file's kind."""
        if "type" in values:
            self.replaced[section] = values["type"]
        self.ignore(section, why, dict(values))

    def in_place(self, job: Any) -> dict[str, str]:
        """Return what trains in the place of the file's optimizer and schedule, where minidist has no such kind."""
        ours = {
            "optimizer": f"--optimizer {job.optimizer} with --lr {job.lr:g}",
            "scheduler": f"--decay {job.optional('decay')} with --warmup {job.optional('warmup')}",
        }
        return {
            f"{section}.type": f"{ours[section]} trains in the place of {quoted(kind)}"
            for section, kind in self.replaced.items()
        }

    def warning(self, job: TrainConfig) -> str:
        """Return one line that names every key that does not apply to the job; "" when there is none."""
        if not self.ignored:
            return ""
        keys = [quoted(key, marks=False) for key, _ in self.ignored[:MAX_LISTED]]
        more = len(self.ignored) - len(keys)
        listed = f"not honoured: {', '.join(keys)}" + (
            f" and {more:,} more, which minidist explain lists" if more else ""
        )
        return "; ".join([listed, *self.in_place(job).values()])


def _flags(settings: Settings) -> str:
    return " ".join(flag(name) if setting is True else f"{flag(name)} {setting}" for name, setting in settings.items())


def read_deepspeed(path: str | Path) -> Translation:
    """Translate a file. UsageError when it is not a JSON object, a value is wrong, or the batch is undetermined."""
    try:
        content = read_json(path, "--deepspeed", "name a DeepSpeed configuration file")
    except UsageError:
        _check_template(path)
        raise
    if not isinstance(content, dict):
        raise UsageError(f"--deepspeed {quoted_path(path)} is of type {type(content).__name__}, not a JSON object")
    return translate(content)


def _check_template(path: str | Path) -> None:
    """Raise UsageError for a file in which a program puts values, such as "stage": ${zero_stage}."""
    lines = read_text(path, "--deepspeed", "name a DeepSpeed configuration file").splitlines()
    for place, line in enumerate(lines, 1):
        found = re.search(r":\s*(\$\{\w+\}|\{\{[^{}]*\}\}|<\w+>)", line)
        if found:
            raise UsageError(
                f"--deepspeed {quoted_path(path)} is a template: {quoted(found[1], marks=False)} in line {place} stands"
                ' for a value; put one in its place, or "auto"'
            )


def translate(content: Mapping[str, Any]) -> Translation:
    """Translate the content of a file. Keys that begin with "_" or "//" are comments."""
    result, content = Translation(), _without_comments(content)
    _batch(content, result)
    sections: dict[str, Reader] = {
        "optimizer": _optimizer,
        "scheduler": _scheduler,
        "fp16": _half,
        "bf16": _half,
        "bfloat16": _half,
        "zero_optimization": _zero,
        "gradient_clipping": _clipping,
        "activation_checkpointing": _activations,
        "tensor_parallel": _degree("autotp_size", "tp", is_on=True),
        "expert_parallel": _degree("autoep_size", "ep", is_on=False),
    }

    # A section knows its keys; a key without a section is listed, with every key below it.
    for key, value in content.items():
        if key in BATCH:
            continue
        if value == "auto":
            result.ignore(key, AUTO)
        elif key in sections:
            # An old form of the section says whether there is ZeRO, which then is stage 1.
            if key == "zero_optimization" and isinstance(value, bool):
                value = {"stage": int(value)}
            if key not in ("gradient_clipping",) and not isinstance(value, dict):
                raise UsageError(f"DeepSpeed's {key} is a JSON object, not {quoted(value)}")
            sections[key](key, value, result)
        else:
            result.note(key, value)
    _across_sections(content, result)
    return result


def _without_comments(value: Any) -> Any:
    if not isinstance(value, Mapping):
        return value
    return {key: _without_comments(inner) for key, inner in value.items() if not key.startswith(("_", "//"))}


def _across_sections(content: Mapping[str, Any], result: Translation) -> None:
    """Apply what depends on two sections, in whichever order the file has them."""
    # WarmupLR's maximum replaces the optimizer's rate.
    for key, value, _ in result.applied:
        if key == "scheduler.params.warmup_max_lr":
            result.settings["lr"] = value
    _warmup_minimum(content, result)
    _secondary_shards(content, result)
    for kind in installed():
        kind.deepspeed.complete(result)


def _warmup_minimum(content: Mapping[str, Any], result: Translation) -> None:
    """Apply where the warm-up begins: a learning rate in the file, a share of the learning rate in a job."""
    kind = content.get("scheduler", {})
    least = kind.get("params", {}).get("warmup_min_lr") if isinstance(kind, dict) else None
    if least is None or kind.get("type") not in ("WarmupLR", "WarmupDecayLR"):
        return
    key = "scheduler.params.warmup_min_lr"
    if least == "auto":
        result.ignore(key, AUTO)
        return
    number(key, least, least=0)
    rate = result.settings.get("lr", result.defaults.get("lr"))
    if least == 0:
        result.apply(key, least)
    elif rate is None:
        result.ignore(key, "it is a share of the learning rate here, and the file gives none: --warmup-start")
    elif least > rate:
        result.ignore(key, "it is above the learning rate, and a warm-up here rises")
    else:
        # WarmupDecayLR falls back to this rate at its end.
        decays = {"final_lr": least / rate} if kind["type"] == "WarmupDecayLR" else {}
        result.apply(key, least, warmup_start=least / rate, **decays)


def _secondary_shards(content: Mapping[str, Any], result: Translation) -> None:
    """Apply ZeRO++'s second partition, over neighbours from which backward gathers."""
    section, key = content.get("zero_optimization"), "zero_optimization.zero_hpz_partition_size"
    size = section.get("zero_hpz_partition_size", "auto") if isinstance(section, dict) else "auto"
    if size == "auto":
        return  # listed where the section was read
    size = whole(key, size)
    if size == 1:
        result.apply(key, size)
    elif result.settings.get("zero") != 3:
        result.ignore(key, STAGE_3)
    elif result.settings.get("recompute", "none") != "none":
        result.ignore(key, "recomputation gathers parameters for both of its forward passes, from all ranks")
    else:
        result.apply(key, size, reshard_after_forward=str(size))


def _degree(own: str, axis: str, is_on: bool) -> Callable[[str, Any, Translation], None]:
    """Return the reader of a section whose key `own` is the degree of an axis. is_on: without the key `enabled`."""

    def degree(key: str, value: Any, result: Translation) -> None:
        ranks = whole(key, value)
        # DeepSpeed turns the axis off with 0.
        result.apply(key, value, **({axis: ranks} if ranks > 1 else {}))

    def enabled(key: str, value: Any, result: Translation) -> None:
        if value is True:
            result.apply(key, value)
        else:
            result.note(key, value)

    def section(name: str, values: Mapping[str, Any], result: Translation) -> None:
        if values.get("enabled", is_on) is False:
            result.apply(name, "off")
        else:
            result.read(name, values, {own: degree, "enabled": enabled})

    return section


def _batch(content: Mapping[str, Any], result: Translation) -> None:
    # "auto" counts as not given: the program that was to fill it in is not here.
    given = {key: content[key] for key in BATCH if content.get(key, "auto") != "auto"}
    for key in BATCH:
        if content.get(key) == "auto":
            result.ignore(key, AUTO)
    for key, value in given.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise UsageError(f"DeepSpeed's {key} is {quoted(value)}; it must be a whole number of at least 1")

    # DeepSpeed's rules: total or micro-batch must be given, and one of them alone means an accumulation of 1.
    if not given:
        if any(key in content for key in BATCH):
            return  # all of them are auto: flags determine the batch
        raise UsageError(
            "the file has no train_batch_size and no train_micro_batch_size_per_gpu; DeepSpeed needs one of them"
        )
    if set(given) == {"gradient_accumulation_steps"}:
        raise UsageError(
            "gradient_accumulation_steps alone does not determine the batch; DeepSpeed needs train_batch_size or"
            " train_micro_batch_size_per_gpu in addition"
        )

    # Each given number becomes a setting; `resolve_batches` computes the third number from two of them.
    names = dict(zip(BATCH, ("global_batch", "micro_batch", "accumulation"), strict=True))
    for key, value in given.items():
        result.apply(key, value, **{names[key]: value})
    # With one number DeepSpeed accumulates over one micro-batch, also in a pipeline.
    if len(given) == 1:
        result.settings["accumulation"] = 1


def _numbers(section: str, params: Mapping[str, Any], result: Translation, fields: Mapping[str, str]) -> None:
    """Translate parameters that are settings under another name; those that are "auto" are ignored."""
    for name, value in params.items():
        key = f"{section}.params.{name}"
        if value == "auto":
            result.ignore(key, AUTO)
        elif name in fields:
            result.apply(key, value, **{fields[name]: number(key, value)})


def _params(name: str, section: Mapping[str, Any]) -> Settings:
    params = section.get("params", {})
    if not isinstance(params, dict):
        raise UsageError(f"DeepSpeed's {name}.params is a JSON object, not {quoted(params)}")
    return dict(params)


def _optimizer(_: str, section: Mapping[str, Any], result: Translation) -> None:
    kind, params = str(section.get("type", "")), _params("optimizer", section)
    name = kind.lower()
    if "max_grad_norm" in params:
        raise UsageError(
            "DeepSpeed refuses optimizer.params.max_grad_norm; write gradient_clipping next to optimizer instead"
        )
    if name not in DEFAULTS:
        *some, last = ("Adam", "AdamW", "SGD", "Adagrad", "RMSprop", "Lamb", "Muon")
        result.replace("optimizer", section, f"minidist has {', '.join(some)} and {last} of these")
        return
    if name == "adam" and params.get("adam_w_mode", True) is not False:
        # DeepSpeed's "Adam" decays weights as AdamW does, unless told otherwise; PyTorch's too, with `torch_adam`.
        name = "adamw"
    result.apply("optimizer.type", kind, optimizer=name)

    # Numbers that are settings here too. Only SGD, RMSprop and Muon have a momentum.
    fields = {"lr": "lr", "weight_decay": "weight_decay"}
    fields |= {"momentum": "momentum"} if name in ("sgd", "rmsprop", "muon") else {}
    _numbers("optimizer", params, result, fields)
    _optimizer_defaults(name, params, result)
    _betas_and_more(name, params, result)
    _steps_of_another_length(name, params, result)

    # Other parameters apply only with the value that minidist trains with.
    for key, value in params.items():
        if key in fields or value == "auto":
            continue
        if key in ("adam_w_mode", "torch_adam") and name in ("adam", "adamw") and isinstance(value, bool):
            result.apply(f"optimizer.params.{key}", value)
        else:
            result.note(f"optimizer.params.{key}", value)
    _note_others("optimizer", section, result)


def _note_others(name: str, section: Mapping[str, Any], result: Translation) -> None:
    """List the keys other than type and params: such as legacy_fusion, they concern DeepSpeed's kernels."""
    for key in section:
        if key not in ("type", "params"):
            result.note(f"{name}.{key}", section[key])


def _optimizer_defaults(name: str, params: Settings, result: Translation) -> None:
    """List DeepSpeed's values, where they differ from minidist's, of the parameters that the file leaves out."""
    for key, value in DEFAULTS[name].items():
        if key not in params:
            result.default(f"optimizer.params.{key}", value, **{key: value})
    # PyTorch's AdamW decays weights by default, DeepSpeed's does not.
    if name == "adamw" and params.get("torch_adam") is True and "weight_decay" not in params:
        result.default("optimizer.params.weight_decay", 0.01, weight_decay=0.01)


def _betas_and_more(name: str, params: Settings, result: Translation) -> None:
    """Apply the parameters that are not one number, and epsilon, and remove them from `params`."""
    # PyTorch's SGD takes a flag, too.
    if name in ("sgd", "muon") and isinstance(params.get("nesterov"), bool):
        nesterov = params.pop("nesterov")
        result.apply("optimizer.params.nesterov", nesterov, nesterov=nesterov)

    # The two averages, and the epsilon of all that divide.
    betas = params.get("betas")
    if name in AVERAGING and betas is not None and betas != "auto":
        if _are_betas(betas):
            result.apply("optimizer.params.betas", betas, betas=",".join(str(float(b)) for b in betas))
        else:
            result.ignore("optimizer.params.betas", "betas are two numbers from 0 to below 1")
        del params["betas"]
    if name != "sgd" and params.get("eps", "auto") != "auto":
        _numbers("optimizer", {"eps": params.pop("eps")}, result, {"eps": "eps"})


def _steps_of_another_length(name: str, params: Settings, result: Translation) -> None:
    """List in what a step of Lamb and Muon differs from DeepSpeed's, also where the file leaves the parameter out."""
    if name == "lamb":
        for key, value in {"max_coeff": 10.0, "min_coeff": 0.01}.items():
            if key not in params:
                result.ignore(f"optimizer.params.{key} (default)", f"it is {value:g}; {UNBOUNDED}")
    elif name == "muon":
        result.ignore("optimizer.params.lr (of matrices)", MUON_STEP)


MUON_STEP = (
    "minidist multiplies the step of a matrix by 0.2 sqrt(max(rows, columns)), DeepSpeed by sqrt(max(1, rows /"
    " columns)): steps are as long with lr / (0.2 sqrt(columns))"
)


def _are_betas(value: Any) -> bool:
    numbers = isinstance(value, list) and all(isinstance(b, int | float) and not isinstance(b, bool) for b in value)
    return numbers and len(value) == 2 and all(0 <= b < 1 for b in value)


# DeepSpeed's scheduler -> the decay, and the settings of its parameters.
SCHEDULERS = {
    "WarmupLR": ("constant", {"warmup_max_lr": "lr"}),
    "WarmupDecayLR": ("linear", {"warmup_max_lr": "lr", "total_num_steps": "decay_steps"}),
    "WarmupCosineLR": (
        "cosine",
        {"cos_min_ratio": "final_lr", "total_num_steps": "decay_steps", "warmup_min_ratio": "warmup_start"},
    ),
}


def _scheduler(name: str, section: Mapping[str, Any], result: Translation) -> None:
    kind, params = section.get("type"), _params("scheduler", section)
    if not isinstance(kind, str) or kind not in SCHEDULERS:
        result.replace("scheduler", section, "minidist has a warm-up, then a constant, a line or a cosine")
        return
    cosine = kind == "WarmupCosineLR"
    decay, own = SCHEDULERS[kind]
    result.apply("scheduler.type", kind, decay=decay)
    fields = {"warmup_num_steps": "warmup", **own}
    _numbers("scheduler", params, result, fields)
    # A job is as long as its schedule, unless a flag says otherwise.
    if "decay_steps" in result.settings:
        result.default("scheduler: the steps of the job", params["total_num_steps"], steps=params["total_num_steps"])

    _warmup_curve(params.pop("warmup_type", None), result)

    # Defaults that are not minidist's.
    if "warmup_num_steps" not in params:
        result.default("scheduler.params.warmup_num_steps", 1000, warmup=1000)
    if cosine and "cos_min_ratio" not in params:
        result.default("scheduler.params.cos_min_ratio", 1e-4, final_lr=1e-4)
    if not cosine and "warmup_max_lr" not in params:
        result.ignore(
            "scheduler.params.warmup_max_lr (default)",
            "the optimizer's learning rate, as in DeepSpeed today; until 2025 it was 0.001, whatever the optimizer's"
            " (its issue 7303): write it into the file",
        )

    # The rest applies where it says what minidist does anyway; the minimum's share of the rate is known at the end.
    for key, value in params.items():
        if key not in fields and value != "auto" and (cosine or key != "warmup_min_lr"):
            result.note(f"scheduler.params.{key}", value)
    _note_others("scheduler", section, result)


def _warmup_curve(curve: Any, result: Translation) -> None:
    """Translate warmup_type: DeepSpeed's warm-up is logarithmic, also with a word that it does not know."""
    if curve is None:
        result.default("scheduler.params.warmup_type", "log", warmup_curve="deepspeed-log")
    elif curve == "auto":
        result.ignore("scheduler.params.warmup_type", AUTO)
    else:
        shape = "linear" if curve == "linear" else "log"
        result.apply("scheduler.params.warmup_type", curve, warmup_curve=f"deepspeed-{shape}")


def _half(section: str, values: Mapping[str, Any], result: Translation) -> None:
    """Translate fp16 and bf16, or bfloat16 in older files: `enabled` decides whether the other keys mean anything."""
    precision, enabled = "fp16" if section == "fp16" else "bf16", values.get("enabled", False)
    rest = {key: value for key, value in values.items() if key != "enabled"}
    if enabled not in (True, False, "auto"):
        raise UsageError(f"DeepSpeed's {precision}.enabled is {quoted(enabled)}; it must be true or false")
    if enabled == "auto":
        result.ignore(f"{precision}.enabled", AUTO)
        for key, value in rest.items():
            result.ignore(f"{precision}.{key}", f"{precision}.enabled is auto: write true, or use the flags", value)
        return
    if enabled != 1:  # true, and 1, which reads the same
        result.apply(f"{precision}.enabled", False)
        return

    if result.settings.get("precision", precision) != precision:
        raise UsageError("the file enables fp16 and bf16; enable one of them")
    result.apply(f"{precision}.enabled", True, precision=precision)
    for kind in installed():
        kind.deepspeed.translate(precision, rest, result)
    for key, value in rest.items():
        result.note(f"{precision}.{key}", value)


def _zero(name: str, section: Mapping[str, Any], result: Translation) -> None:
    stage = section.get("stage", 0)
    if stage not in (0, 1, 2, 3):
        raise UsageError(f"DeepSpeed's zero_optimization.stage is {quoted(stage)}; it must be 0, 1, 2 or 3")
    result.apply("zero_optimization.stage", stage, zero=stage)

    for key, value in section.items():
        if key != "stage" and (key != "zero_hpz_partition_size" or value == "auto"):
            _zero_key(key, value, stage, result)
    if stage == 3 and "stage3_param_persistence_threshold" not in section:
        result.default("zero_optimization.stage3_param_persistence_threshold", 100_000, persistence_threshold=100_000)


def _zero_key(key: str, value: Any, stage: int, result: Translation) -> None:
    """Translate a key. Those about buckets, offloading and small parameters apply, others concern DeepSpeed alone."""
    name = f"zero_optimization.{key}"
    if value == "auto":
        result.ignore(name, AUTO)
    elif key == "reduce_bucket_size":
        size = whole(name, value)
        if stage in (1, 2):
            result.apply(name, value, reduce_bucket_size=size)
        else:
            result.ignore(name, BUCKETS[stage])
    elif key in OFFLOAD and (isinstance(value, dict) or value is None):
        _offload(name, value or {"device": None}, OFFLOAD[key], stage, result)
    elif key in LEGACY_OFFLOAD and isinstance(value, bool):
        _offload_device(name, value, "cpu" if value else None, LEGACY_OFFLOAD[key], stage, result)
    elif key in STAGE_3_KEYS:
        number = whole(name, value)
        if stage != 3:
            result.ignore(name, STAGE_3)
        elif key == "stage3_param_persistence_threshold":
            result.apply(name, value, persistence_threshold=number)
        elif number == 0:
            result.apply(name, value, prefetch=0)
        else:
            result.ignore(name, "minidist gathers whole blocks ahead, and --prefetch is their number")
    else:
        result.note(name, value)


STAGE_3 = "it applies at stage 3 only, in DeepSpeed too"
STAGE_3_KEYS = ("stage3_param_persistence_threshold", "stage3_prefetch_bucket_size")
# Why the size of a bucket does not apply at these stages.
BUCKETS = {
    0: "stage 0 reduces in buckets of --bucket-cap-mb; DeepSpeed's stage 0 reduces in buckets of a fixed size",
    3: "stage 3 reduces the gradients of a block when backward leaves it",
}
# DeepSpeed's key -> what --offload calls it.
OFFLOAD = {"offload_optimizer": "optimizer", "offload_param": "parameters"}
LEGACY_OFFLOAD = {"cpu_offload": "optimizer", "cpu_offload_params": "parameters"}


def _offload(name: str, section: Mapping[str, Any], what: str, stage: int, result: Translation) -> None:
    """Translate an offload section. --offload parameters, which ZeRO 3 has, includes the optimizer."""
    _offload_device(f"{name}.device", section.get("device", "cpu"), section.get("device", "cpu"), what, stage, result)
    for inner in section:
        if inner != "device":
            result.note(f"{name}.{inner}", section[inner])


def _offload_device(key: str, value: Any, device: Any, what: str, stage: int, result: Translation) -> None:
    """Apply the device of an offload; value: how the file says it."""
    if device in ("none", None):
        result.apply(key, value, **({} if "offload" in result.settings else {"offload": "none"}))
    elif device == "auto":
        result.ignore(key, AUTO)
    elif device != "cpu":
        result.ignore(key, NVME)
    elif what == "parameters" and stage != 3:
        result.ignore(key, "parameters are offloaded at stage 3 only, in DeepSpeed too")
    elif stage == 0:
        result.ignore(key, "the optimizer is offloaded from stage 1 on, in DeepSpeed too")
    else:
        _offload_to_host(key, value, what, result)


def _offload_to_host(key: str, value: Any, what: str, result: Translation) -> None:
    """Offload `what`; minidist offloads one kind, or parameters with their optimizer."""
    before = result.settings.get("offload", "none")
    if {before, what} == {"parameters", "optimizer"}:
        what = "parameters"
    elif before not in ("none", what):
        result.ignore(key, f"minidist offloads one kind, and the file says {before} before")
        return
    result.apply(key, value, offload=what)


def _clipping(key: str, value: Any, result: Translation) -> None:
    norm = number(key, value, least=0)
    result.apply(key, value, **({"clip": float(norm)} if norm else {}))


def _activations(name: str, section: Mapping[str, Any], result: Translation) -> None:
    """Turn recomputation on; in DeepSpeed the model says what is recomputed, and this section says how."""
    result.apply(name, "{...}", recompute="full")
    result.read(name, section, {"cpu_checkpointing": _activations_on_the_host})


def _activations_on_the_host(key: str, value: Any, result: Translation) -> None:
    if value:
        _offload_to_host(key, value, "activations", result)
    else:
        result.apply(key, value)


def apply_deepspeed(config: TrainConfig, translation: Translation, given: set[str]) -> TrainConfig:
    """Return the job that flags and file describe together; UsageError when a flag contradicts the file.

    given: the fields that a flag, --set or --config gives.
    """
    # Neither overrides the other: both may name a setting only if their values are equal.
    for name, value in translation.settings.items():
        if name in given and getattr(config, name) != value:
            raise UsageError(
                f"{flag(name)} {getattr(config, name)} from a flag, --set or --config, and {value} in the DeepSpeed"
                " file; leave one of them out"
            )
    defaults = {name: value for name, value in translation.defaults.items() if name not in given}
    # DeepSpeed refuses a batch that the ranks do not divide.
    if "global_batch" in translation.settings and config.weights is None:
        defaults["weights"] = "equal"
    return TrainConfig.make(**{**config.model_dump(), **defaults, **translation.settings})
