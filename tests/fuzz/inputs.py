"""The generators of `make fuzz`: each writes files into a folder and returns the arguments of a command on them."""

import gzip
import io
import json

import numpy as np

from minidist.job.config.train_config import TrainConfig

NUMBERS = (0, 1, 2, 3, 7, -1, 10**6, 10**9, 10**18, 10**30, 10**400, 0.5, 1e-308, 1e308, 1e30, -0.0)
WORDS = (
    "",
    "a",
    "auto",
    "none",
    "true",
    "1f1b",
    "$x^2$",
    "é" * 50,
    "x" * 5_000,
    "a\0b",
    "\ud800",
    "~nobody/x",
    "../x",
    "9" * 5_000,
)
# All settings of a job but its length, which MODEL gives, and the files that it would read and write.
SETTINGS = [name for name in TrainConfig.model_fields if name not in ("steps", "save", "every", "resume", "overwrite")]
MODEL = ["--layers", "1", "--width", "8", "--heads", "2", "--context", "4", "--steps", "1", "--trace", "t.jsonl"]


def value(rng, depth=0):
    """A JSON value, sometimes a wild one."""
    kind = rng.randrange(9)
    if kind < 3:
        return rng.choice(NUMBERS[:8])
    if kind < 5:
        return rng.choice(NUMBERS)
    if kind < 7:
        return rng.choice(WORDS)
    if kind == 7 or depth > 2:
        return rng.choice((None, True, False, [], {}, "auto", float("nan"), float("inf"), -float("inf")))
    return (
        [value(rng, depth + 1) for _ in range(rng.randrange(3))]
        if rng.random() < 0.5
        else {rng.choice(WORDS): value(rng, depth + 1) for _ in range(rng.randrange(3))}
    )


def damage(rng, content):
    """Bytes with a few changes: flipped, cut off, repeated or inserted."""
    content = bytearray(content)
    for _ in range(rng.randrange(1, 4)):
        at = rng.randrange(len(content) + 1)
        kind = rng.randrange(5)
        if kind == 0 and content:
            content[at % len(content)] ^= 1 << rng.randrange(8)
        elif kind == 1:
            del content[at:]
        elif kind == 2:
            content[at:at] = content[: rng.randrange(64)]
        elif kind == 3:
            content[at:at] = rng.choice((b"[" * 3_000, b"9" * 5_000, b'"', b"\0", b"\xff", b"{}", b"NaN", b"1e999"))
        else:
            del content[at : at + rng.randrange(1, 9)]
    return bytes(content)


def _write(rng, path, content):
    path.write_bytes(damage(rng, content) if rng.random() < 0.6 else content)


def _dumps(content):
    return json.dumps(content).encode("utf-8", "replace")


def setting(rng):
    """A setting of a job and a value. A million samples are a valid batch, which takes its time, so none has them."""
    name, each = rng.choice(SETTINGS), value(rng)
    counts_samples = name in ("global_batch", "accumulation", "microbatches")
    return name, 10**9 if counts_samples and each == 10**6 else each


def config(rng, folder):
    """A job in a JSON or TOML file."""
    settings = dict(setting(rng) for _ in range(rng.randrange(1, 4)))
    if rng.random() < 0.5:
        _write(rng, folder / "job.json", _dumps({"job": settings, **({"steps": 1} if rng.random() < 0.5 else {})}))
        return ["train", *MODEL, "--config", "job.json"]
    lines = [f"{name} = {json.dumps(each)}" for name, each in settings.items()]
    _write(rng, folder / "job.toml", "\n".join(["[job]", *lines]).encode("utf-8", "replace"))
    return ["train", *MODEL, "--config", "job.toml"]


def flags(rng, folder):
    """Flags of train, data and memory with wild values, and --set."""
    name, each = setting(rng)
    text = str(each).replace("\0", "").replace("\ud800", "\udcff")
    if rng.random() < 0.3:
        return ["train", *MODEL, "--set", f"{name}={text}"]
    if TrainConfig.model_fields[name].annotation is bool:
        return ["train", *MODEL, f"--{name.replace('_', '-')}"]
    return [rng.choice(("train", "data")), *MODEL[:10], f"--{name.replace('_', '-')}", text]


def commands(rng, folder):
    """Numbers of the commands that only compute."""
    number, sizes = str(rng.choice(NUMBERS)), ["--stages", "2", "--microbatches", "4"]
    return rng.choice(
        (
            ["memory", "--params", number, "--dp", str(rng.choice(NUMBERS))],
            ["memory", "--model", "gpt2", "--dp", "2", "--batch", number],
            ["tiles", "--tp", number],
            ["tiles", "--vocab", number, "--width", str(rng.choice(NUMBERS))],
            ["tiles", "--experts", number, "--ep", "2"],
            ["bench", "collectives", "--simulated", "--ranks", "2", "--sizes", number],
            ["bench", "collectives", "--simulated", "--ranks", "2", "--alpha", number, "--sizes", "4"],
            ["bench", "collectives", "--simulated", "--ranks", "2", "--beta", number, "--sizes", "4"],
            ["data", "--weights", f"{number},1"],
            ["data", "--step", number],
            ["schedule", "1f1b", "--stages", "2", "--microbatches", "2", "--times", f"F={number}"],
            ["schedule", "1f1b", "--stages", "2", "--microbatches", number],
            ["schedule", "interleaved", "--stages", "2", "--microbatches", "2", "--chunks", number],
            ["schedule", "1f1b", "--stages", "2", "--microbatches", "2", "--memory-limit", number],
            ["schedule", "pipedream", *sizes, "--option", f"{rng.choice(WORDS[1:6])}={number}"],
        )
    )


def deepspeed(rng, folder):
    """A DeepSpeed file. As in `setting`, none has a batch of a million samples."""
    content = {
        "train_batch_size": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "betas": [0.9, 0.999]}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 1}},
        "fp16": {"enabled": False, "initial_scale_power": 16},
        "zero_optimization": {"stage": 0, "reduce_bucket_size": 5e8, "offload_optimizer": {"device": "none"}},
        "gradient_clipping": 1.0,
    }
    for _ in range(rng.randrange(1, 3)):
        section = rng.choice(sorted(content))
        inner = content[section]
        if isinstance(inner, dict) and inner and rng.random() < 0.7:
            inner[rng.choice(sorted(inner))] = value(rng)
        else:
            content[section] = value(rng)
    content["train_batch_size"] = 10**9 if content["train_batch_size"] == 10**6 else content["train_batch_size"]
    _write(rng, folder / "ds.json", _dumps(content))
    return ["train", *MODEL, "--deepspeed", "ds.json"]


def plan(rng, folder):
    """A plan in a CSV file."""
    rows = [[f"{s}{k}{i}" for i in range(3) for k in "FB"] for s in range(2)]
    for _ in range(rng.randrange(3)):
        row = rng.choice(rows)
        row.insert(
            rng.randrange(len(row) + 1),
            rng.choice(
                (
                    "0F0",
                    "1B7",
                    "0SEND_F0",
                    "1RECV_F0",
                    "99999999F0",
                    "0F99999999",
                    "0W1",
                    "0I1",
                    "(0F1;0B0)OVERLAP_F_B",
                    "0REDUCE_GRAD",
                    "x" * 5_000,
                )
            ),
        )
        rng.shuffle(row)
    _write(rng, folder / "plan.csv", "\n".join(map(",".join, rows)).encode())
    extra = rng.choice(
        ([], ["--lowered"], ["--recompute"], ["--format", "json"], ["--receives", "blocking"], ["--format", "svg"])
    )
    return ["schedule", "plan.csv", *extra]


def profile(rng, folder):
    """A profile of layers for partition, or of stages for schedule."""
    if rng.random() < 0.5:
        layers = [{"op": "l", "fwd_ms": 1.0, "bwd_ms": 2.0, "act_bytes": 8, "param_bytes": 16} for _ in range(4)]
        rng.choice(layers)[rng.choice(("op", "fwd_ms", "bwd_ms", "act_bytes", "param_bytes"))] = value(rng)
        _write(rng, folder / "p.json", _dumps(layers))
        return ["partition", "p.json", "--machines", str(rng.choice(NUMBERS)), "--bandwidth", str(rng.choice(NUMBERS))]
    stages = [{"F": 1.0, "I": 1.0, "W": 1.0} for _ in range(2)]
    rng.choice(stages)[rng.choice(("F", "I", "W", "FB", "bytes_until_b", "parameters", "x"))] = value(rng)
    _write(rng, folder / "p.json", _dumps({"stages": stages, "edges": [value(rng)]}))
    return ["schedule", "1f1b", "--stages", "2", "--microbatches", "2", "--profile", "p.json"]


def data(rng, folder):
    """A damaged data file."""
    x, y = np.arange(320, dtype=np.uint8).reshape(20, 4, 4), np.arange(20, dtype=np.uint8) % 3
    content = io.BytesIO()
    kind = rng.choice(("npz", "npy", "gz", "idx", "u16"))
    spec, job = f"tokens:a.{kind}", MODEL
    if kind == "npz":
        rng.choice((np.savez, np.savez_compressed))(content, x=x, y=y)
        spec, job = "npz:a.npz", [*MODEL[:4], *MODEL[8:], "--model", "mlp"]
    elif kind == "npy":
        np.save(content, np.arange(400) % 50)
    elif kind == "gz":
        content.write(gzip.compress(b"some text " * 100))
        spec = "text:a.gz"
    elif kind == "u16":
        content.write((np.arange(400) % 50).astype("<u2").tobytes())
    else:
        spec, job = "idx:.", [*MODEL[:4], *MODEL[8:], "--model", "mlp"]
        for stem, array in (("train-images-idx3-ubyte", x), ("train-labels-idx1-ubyte", y)):
            header = bytes([0, 0, 8, array.ndim]) + b"".join(n.to_bytes(4, "big") for n in array.shape)
            (folder / stem).write_bytes(
                damage(rng, header + array.tobytes()) if rng.random() < 0.6 else header + array.tobytes()
            )
    (folder / f"a.{kind}").write_bytes(damage(rng, content.getvalue()))
    return ["train", *job, "--data", spec]


def trace(rng, folder):
    """A damaged trace."""
    lines = [{"format": "minidist-trace-1", "ranks": 2, "command": "minidist train"}]
    for rank in range(2):
        lines.append(
            {
                "event": "span",
                "rank": rank,
                "lane": "main",
                "name": "step 0",
                "start": 0.0,
                "end": 1.0,
                "category": "step",
            }
        )
        lines.append({"event": "memory", "rank": rank, "time": 0.5, "live": {"parameters": 8}})
    for _ in range(rng.randrange(3)):
        line = rng.choice(lines)
        line[rng.choice(sorted(line))] = value(rng)
    _write(rng, folder / "t.jsonl", b"\n".join(map(_dumps, lines)) + b"\n")
    return ["report", "t.jsonl", "--picture", rng.choice(("perfetto", "page", "perfetto", "mesh"))]


def checkpoint(rng, folder):
    """The metadata of a checkpoint, damaged."""
    (folder / "c" / "step-00000001").mkdir(parents=True)
    _write(rng, folder / "c" / "latest", b"step-00000001")
    content = {
        "format": "minidist-checkpoint-1",
        "step": 1,
        "ranks": 1,
        "state": {"config": {}},
        "files": {},
        "tensors": {},
    }
    content[rng.choice(sorted(content))] = value(rng)
    _write(rng, folder / "c" / "step-00000001" / "metadata.json", _dumps(content))
    return rng.choice((["generate", "c"], ["train", *MODEL, "--save", "c", "--resume"]))


GENERATORS = {
    each.__name__: each for each in (config, flags, commands, deepspeed, plan, profile, data, trace, checkpoint)
}
