"""A DeepSpeed configuration file as settings of a job: a key that applies becomes a flag, every other key is listed.

A file that was written for another program must not be half understood in silence. So each key of the file is in one of
two lists, and which one depends on its value too: `overlap_comm: true` is what minidist does, `false` is not.

A key that is absent means DeepSpeed's default. Where that is not minidist's it is applied too, and listed as
`... (default)`; a flag on the command line takes precedence over it, but not over what the file says.

The batch triple follows DeepSpeed's rules (runtime/config.py, _set_batch_related_parameters): global batch = micro
batch x accumulation x data-parallel ranks; two of them give the third; train_batch_size alone, or the micro batch
alone, means an accumulation of 1; the accumulation alone means nothing.

Source: DeepSpeed's documentation, "Configuration JSON".

Proved by: tests/config/test_deepspeed.py
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from minidist.base.errors import UsageError, quoted
from minidist.base.read_file import read_json
from minidist.config.train_config import TrainConfig, flag

Settings = dict[str, Any]
# DeepSpeed's name of an optimizer, in lower case -> minidist's.
OPTIMIZERS = {"adam": "adamw", "adamw": "adamw", "sgd": "sgd", "adagrad": "adagrad"}
# The learning rate of these in DeepSpeed and PyTorch, where the file gives none.
DEFAULT_LR = {"adam": 1e-3, "adamw": 1e-3, "sgd": 1e-3, "adagrad": 1e-2}
AUTO = "auto: another program was to fill it in"
# The batch triple, in the order global batch, micro-batch, accumulation.
BATCH = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


@dataclass
class Translation:
    """What a file says.

    settings: fields of TrainConfig. defaults: those that follow from keys that the file leaves out. applied: (key,
    value, the flags that it became). ignored: (key, why).
    """

    settings: Settings = field(default_factory=dict)
    defaults: Settings = field(default_factory=dict)
    applied: list[tuple[str, Any, str]] = field(default_factory=list)
    ignored: list[tuple[str, str]] = field(default_factory=list)

    def apply(self, key: str, value: Any, **settings: Any) -> None:
        """Record that the key applies, through these settings (none: minidist does that anyway)."""
        self.settings.update(settings)
        self.applied.append((key, value, _flags(settings) or "as it is"))

    def default(self, key: str, value: Any, **settings: Any) -> None:
        """Record DeepSpeed's default of a key that the file leaves out."""
        self.defaults.update(settings)
        self.applied.append((f"{key} (default)", value, _flags(settings)))

    def ignore(self, key: str, why: str = "minidist has no such setting") -> None:
        """Record that the key does not apply, and why."""
        self.ignored.append((key, why))

    def warning(self) -> str:
        """Return one line that names every key that does not apply; "" when there is none."""
        return f"not honoured: {', '.join(key for key, _ in self.ignored)}" if self.ignored else ""


def _flags(settings: Settings) -> str:
    return " ".join(flag(name) if setting is True else f"{flag(name)} {setting}" for name, setting in settings.items())


def read_deepspeed(path: str | Path) -> Translation:
    """Translate a file. UsageError when it is not a JSON object, a value is wrong, or the batch is undetermined."""
    content = read_json(path, "--deepspeed", "name a DeepSpeed configuration file")
    if not isinstance(content, dict):
        raise UsageError(f"--deepspeed {quoted(str(path))} holds a {type(content).__name__}, not a JSON object")
    return translate(content)


def translate(content: Mapping[str, Any]) -> Translation:
    """Translate the content of a file."""
    result = Translation()
    _batch(content, result)
    sections: dict[str, Callable[[Any, Translation], None]] = {
        "optimizer": _optimizer,
        "scheduler": _scheduler,
        "fp16": _half("fp16"),
        "bf16": _half("bf16"),
        "bfloat16": _half("bf16"),
        "zero_optimization": _zero,
        "gradient_clipping": _clipping,
        "activation_checkpointing": _activations,
    }

    # A section knows its keys; a key without a section is listed, with every key below it.
    for key, value in content.items():
        if key in BATCH:
            continue
        if value == "auto":
            result.ignore(key, AUTO)
        elif key in sections:
            if key not in ("gradient_clipping",) and not isinstance(value, dict):
                raise UsageError(f"DeepSpeed's {key} is a JSON object, not {quoted(value)}")
            sections[key](value, result)
        else:
            _ignore_all(key, value, result)
    _across_sections(result)
    return result


def _across_sections(result: Translation) -> None:
    """Apply what depends on two sections, in whichever order the file has them."""
    # WarmupLR's maximum replaces the optimizer's rate.
    for key, value, _ in result.applied:
        if key == "scheduler.params.warmup_max_lr":
            result.settings["lr"] = value
    # ZeRO's optimizers stop at the first overflow at the smallest loss scale; the one without ZeRO never does.
    if result.settings.get("precision") == "fp16" and result.settings.get("zero", 0) > 0:
        result.default("fp16: overflows at min_loss_scale", 1, loss_scale_floor_limit=1)


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
            " train_micro_batch_size_per_gpu beside it"
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
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise UsageError(f"DeepSpeed's {key} is {quoted(value)}; it must be a number")
            result.apply(key, value, **{fields[name]: value})


def _params(name: str, section: Mapping[str, Any]) -> Settings:
    params = section.get("params", {})
    if not isinstance(params, dict):
        raise UsageError(f"DeepSpeed's {name}.params is a JSON object, not {quoted(params)}")
    return dict(params)


def _whole(key: str, value: Any) -> int:
    """Return a whole number, which DeepSpeed's files may write as 5e8."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not value < 2**63 or value != int(value):
        raise UsageError(f"DeepSpeed's {key} is {quoted(value)}; it must be a whole number")
    return int(value)


def _optimizer(section: Mapping[str, Any], result: Translation) -> None:
    kind, params = str(section.get("type", "")), _params("optimizer", section)
    name = OPTIMIZERS.get(kind.lower())
    if name is None:
        _ignore_all("optimizer", section, result, "minidist has Adam, AdamW, SGD and Adagrad of these")
        return
    if kind.lower() == "adam" and (params.get("adam_w_mode", True) is False or params.get("torch_adam") is True):
        # DeepSpeed's own "Adam" decays weights as AdamW does, unless told otherwise.
        name = "adam"
    result.apply("optimizer.type", kind, optimizer=name)

    # Numbers that are settings here too. Only SGD has a momentum of its own.
    fields = {"lr": "lr", "weight_decay": "weight_decay", **({"momentum": "momentum"} if name == "sgd" else {})}
    _numbers("optimizer", params, result, fields)
    if "lr" not in params:
        result.default("optimizer.params.lr", DEFAULT_LR[name], lr=DEFAULT_LR[name])

    # Adam's two averages, and the epsilon of all that divide. What is not two numbers is listed below.
    if name in ("adam", "adamw") and _are_betas(params.get("betas")):
        result.apply(
            "optimizer.params.betas", params["betas"], betas=",".join(str(float(b)) for b in params.pop("betas"))
        )
    if name != "sgd" and params.get("eps", "auto") != "auto":
        _numbers("optimizer", {"eps": params.pop("eps")}, result, {"eps": "eps"})

    # Other parameters apply only with the value that minidist trains with.
    usual = {
        "betas": [0.9, 0.999],
        "eps": 1e-8,
        "bias_correction": True,
        "amsgrad": False,
        "nesterov": False,
        "dampening": 0,
    }
    for key, value in params.items():
        if key in fields or value == "auto":
            continue
        if (key in ("adam_w_mode", "torch_adam") and kind.lower() == "adam") or (key in usual and value == usual[key]):
            result.apply(f"optimizer.params.{key}", value)
        else:
            result.ignore(
                f"optimizer.params.{key}",
                f"minidist trains with {usual[key]}" if key in usual else "minidist has no such setting",
            )

    # Keys beside type and params, such as legacy_fusion, concern DeepSpeed's kernels.
    for key in set(section) - {"type", "params"}:
        _ignore_all(f"optimizer.{key}", section[key], result)


def _are_betas(value: Any) -> bool:
    numbers = isinstance(value, list) and all(isinstance(b, int | float) and not isinstance(b, bool) for b in value)
    return numbers and len(value) == 2 and all(0 <= b < 1 for b in value)


def _scheduler(section: Mapping[str, Any], result: Translation) -> None:
    kind, params = section.get("type"), _params("scheduler", section)
    decays = {"WarmupLR": "constant", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}
    if kind not in decays:
        _ignore_all("scheduler", section, result, "minidist has a warm-up, then a constant, a line or a cosine")
        return
    cosine = kind == "WarmupCosineLR"
    result.apply("scheduler.type", kind, decay=decays[kind])
    own = {"cos_min_ratio": "final_lr"} if cosine else {"warmup_max_lr": "lr"}
    if decays[kind] != "constant":
        own["total_num_steps"] = "steps"
    fields = {"warmup_num_steps": "warmup", **own}
    _numbers("scheduler", params, result, fields)

    # DeepSpeed's warm-up is logarithmic unless told otherwise, also by a word that it does not know.
    curve = params.pop("warmup_type", None)
    if curve is None:
        result.default("scheduler.params.warmup_type", "log", warmup_curve="deepspeed-log")
    elif curve == "auto":
        result.ignore("scheduler.params.warmup_type", AUTO)
    else:
        shape = "linear" if curve == "linear" else "log"
        result.apply("scheduler.params.warmup_type", curve, warmup_curve=f"deepspeed-{shape}")

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

    # The rest applies where it says what minidist does anyway.
    for key, value in params.items():
        name = f"scheduler.params.{key}"
        if key in fields or value == "auto":
            continue
        if (key, value) in (("warmup_min_lr", 0), ("warmup_min_ratio", 0), ("last_batch_iteration", -1)):
            result.apply(name, value)
        else:
            result.ignore(name)


# DeepSpeed's key of the dynamic loss scale -> the field of TrainConfig.
LOSS_SCALE = {
    "loss_scale_window": "loss_scale_interval",
    "hysteresis": "loss_scale_hysteresis",
    "min_loss_scale": "loss_scale_floor",
}


def _half(precision: str) -> Callable[[Any, Translation], None]:
    def section(values: Mapping[str, Any], result: Translation) -> None:
        rest = {key: value for key, value in values.items() if key != "enabled"}

        # `enabled` decides whether the other keys of the section mean anything.
        if values.get("enabled", False) not in (True, False, "auto"):
            raise UsageError(
                f"DeepSpeed's {precision}.enabled is {quoted(values['enabled'])}; it must be true or false"
            )
        if values.get("enabled") == 1:  # true, and 1, which reads the same
            if result.settings.get("precision", precision) != precision:
                raise UsageError("the file enables fp16 and bf16; enable one of them")
            result.apply(f"{precision}.enabled", True, precision=precision)
            if rest.get("loss_scale") == 0:
                # 0 means dynamic.
                result.apply(f"{precision}.loss_scale", rest.pop("loss_scale"))
            # Only fp16 scales its loss: bf16 has the exponents of fp32.
            if precision == "fp16":
                if isinstance(rest.get("initial_scale_power"), int):
                    power = rest.pop("initial_scale_power")
                    if not 0 <= power <= 1000:
                        raise UsageError(
                            f"DeepSpeed's fp16.initial_scale_power is {quoted(power)}; it must be from 0 to 1000"
                        )
                    result.apply("fp16.initial_scale_power", power, loss_scale=2.0**power)
                for key, setting in LOSS_SCALE.items():
                    if key in rest:
                        value = rest.pop(key)
                        result.apply(f"fp16.{key}", value, **{setting: value})
                if "loss_scale_window" not in values and "loss_scale" not in rest:
                    result.default("fp16.loss_scale_window", 1000, loss_scale_interval=1000)
                if rest.get("consecutive_hysteresis") is False:
                    result.apply("fp16.consecutive_hysteresis", rest.pop("consecutive_hysteresis"))
        elif values.get("enabled", False) == "auto":
            result.ignore(f"{precision}.enabled", AUTO)
        else:
            result.apply(f"{precision}.enabled", False)
            return  # the other keys of a disabled section have no meaning

        # The remaining keys have no counterpart here.
        for key, value in rest.items():
            _ignore_all(f"{precision}.{key}", value, result)

    return section


def _zero(section: Mapping[str, Any], result: Translation) -> None:
    stage = section.get("stage", 0)
    if stage not in (0, 1, 2, 3):
        raise UsageError(f"DeepSpeed's zero_optimization.stage is {quoted(stage)}; it must be 0, 1, 2 or 3")
    result.apply("zero_optimization.stage", stage, zero=stage)

    # Keys about buckets, offloading and small parameters apply; those about DeepSpeed's own memory do not.
    for key, value in section.items():
        name = f"zero_optimization.{key}"
        if key == "stage":
            continue
        if value == "auto":
            result.ignore(name, AUTO)
        elif key == "reduce_bucket_size":
            result.apply(name, value, reduce_bucket_size=_whole(name, value))
        elif key in OFFLOAD and isinstance(value, dict):
            _offload(name, value, OFFLOAD[key], stage, result)
        elif key == "stage3_param_persistence_threshold" and stage == 3:
            result.apply(name, value, persistence_threshold=_whole(name, value))
        elif key in ALWAYS and isinstance(value, bool):
            if value:
                result.apply(name, value)
            else:
                result.ignore(name, ALWAYS[key])
        else:
            _ignore_all(name, value, result)

    if stage == 3 and "stage3_param_persistence_threshold" not in section:
        result.default("zero_optimization.stage3_param_persistence_threshold", 100_000, persistence_threshold=100_000)


# What minidist does in any case, so that only `true` says what happens.
ALWAYS = {
    "overlap_comm": "minidist always sends gradients while backward computes",
    "contiguous_gradients": "minidist's gradients always lie in one flat buffer",
}
# DeepSpeed's key -> what --offload calls it.
OFFLOAD = {"offload_optimizer": "optimizer", "offload_param": "parameters"}


def _offload(name: str, section: Mapping[str, Any], what: str, stage: int, result: Translation) -> None:
    """Translate an offload section. --offload parameters, which ZeRO 3 has, includes the optimizer."""
    device = section.get("device", "cpu")
    if device in ("none", None):
        result.apply(f"{name}.device", device, **({} if "offload" in result.settings else {"offload": "none"}))
    elif device != "cpu":
        result.ignore(f"{name}.device", "minidist offloads to the host's memory")
    elif what == "parameters" and stage != 3:
        result.ignore(f"{name}.device", "parameters are offloaded at stage 3 only, in DeepSpeed too")
    else:
        _offload_to_host(f"{name}.device", device, what, result)
    for inner in set(section) - {"device"}:
        _ignore_all(f"{name}.{inner}", section[inner], result)


def _offload_to_host(key: str, value: Any, what: str, result: Translation) -> None:
    """Offload `what`; minidist offloads one kind, or parameters with their optimizer."""
    before = result.settings.get("offload", "none")
    if {before, what} == {"parameters", "optimizer"}:
        what = "parameters"
    elif before not in ("none", what):
        result.ignore(key, f"minidist offloads one kind, and the file says {before} before")
        return
    result.apply(key, value, offload=what)


def _clipping(value: Any, result: Translation) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or value < 0:
        raise UsageError(f"DeepSpeed's gradient_clipping is {quoted(value)}; it must be a number of at least 0")
    result.apply("gradient_clipping", value, **({"clip": float(value)} if value else {}))


def _activations(section: Mapping[str, Any], result: Translation) -> None:
    """Turn recomputation on; in DeepSpeed the model says what is recomputed, and this section says how."""
    result.apply("activation_checkpointing", "{...}", recompute="full")
    for key, value in section.items():
        if key == "cpu_checkpointing" and value:
            _offload_to_host(f"activation_checkpointing.{key}", value, "activations", result)
        elif value in (False, None):
            result.apply(f"activation_checkpointing.{key}", value)
        else:
            _ignore_all(f"activation_checkpointing.{key}", value, result)


def _ignore_all(key: str, value: Any, result: Translation, why: str = "minidist has no such setting") -> None:
    """Ignore a key, or every key below it."""
    if isinstance(value, dict) and value:
        for name, inner in value.items():
            _ignore_all(f"{key}.{name}", inner, result, why)
    else:
        result.ignore(key, why)


def apply_deepspeed(config: TrainConfig, translation: Translation, given: set[str]) -> TrainConfig:
    """Return the job that flags and file describe together; UsageError when a flag contradicts the file.

    given: the fields that a flag, --set or --config gives.
    """
    # Neither overrides the other in silence: both may name a setting only if they agree.
    for name, value in translation.settings.items():
        if name in given and getattr(config, name) != value:
            raise UsageError(
                f"{flag(name)} {getattr(config, name)} from a flag, --set or --config, and {value} in the DeepSpeed"
                " file; leave one of them out"
            )
    defaults = {name: value for name, value in translation.defaults.items() if name not in given}
    return TrainConfig.make(**{**config.model_dump(), **defaults, **translation.settings})
