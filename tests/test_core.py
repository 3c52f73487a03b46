"""The core: the files that a reader opens to follow a message of any kind of parallelism. They import only each other.

Each part has two numbers, which only go down: its lines, and its imports from outside the core. Imports inside
functions count, those for type checkers do not. `python -m tests.test_core` prints what is there.
"""

import ast
from pathlib import Path

import minidist

PACKAGE = Path(minidist.__file__).parent

# Part: (lines, imports from outside, its files below minidist/).
PARTS = {
    "base": (
        1_473,
        0,
        "base: __init__ arrays errors fibers flop_counter hooks layout lazy limits random registry trace watchers",
    ),
    "autograd": (
        2_590,
        0,
        "autograd: __init__ backward errors function modes operands operators parameter tensor;"
        " autograd/ops: __init__ attention cross_entropy dropout elementwise embedding gelu layer_norm linear matrix"
        " reductions shaping",
    ),
    "nn": (1_428, 0, "nn: __init__ dropout embedding experts flat gpt language_model linear mlp module norm"),
    "optim": (893, 0, "optim: __init__ adam clip optimizer sgd slices"),
    "comm": (
        1_845,
        0,
        "comm: __init__ call_site communicator mesh point_to_point waiting; comm/sim: __init__ clock deadlock_report"
        " matching state world",
    ),
    "collectives": (
        1_560,
        0,
        "collectives: __init__ binomial_tree calls folding naive operations ordered recursive_doubling registry ring",
    ),
    "data parallelism": (
        2_103,
        0,
        "parallel: __init__ data_parallel dims flat_shards fsdp fsdp_param_group fsdp_state gradients guard zero",
    ),
    "model parallelism": (
        1_927,
        0,
        "parallel: model_parallel; parallel/tensor: __init__ layers parallelize regions"
        " sequence_parallel shard_context sharding styles vocabulary; parallel/context: __init__ positions"
        " ring_attention split_attention ulysses; parallel/expert: __init__ dispatch",
    ),
    "pipeline": (
        2_443,
        0,
        "pipeline: __init__ lowering simulate validate; pipeline/plan: __init__ action dualpipe gpipe interleaved"
        " one_f_one_b plan registry zb_v zero_bubble; pipeline/runtime: __init__ messages norm pipeline"
        " reduction shapes shared shared_shards stages; base: fingerprint",
    ),
    "train": (927, 0, "job/train: data_axis layout loop loss parallelize pipeline strategy task"),
}


def modules(part):
    """Return the modules of a part of PARTS."""
    folders = [folder.split(":") for folder in PARTS[part][2].split(";")]
    return [
        f"minidist.{folder.strip().replace('/', '.')}.{name}" for folder, names in folders for name in names.split()
    ]


CORE = {module.removesuffix(".__init__") for part in PARTS for module in modules(part)}


def file_of(module):
    return PACKAGE.parent / (module.replace(".", "/") + ".py")


def imports(node):
    """Yield the modules that a syntax tree imports, without those for type checkers."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test):
            continue
        if isinstance(child, ast.ImportFrom) and (child.module or "").startswith("minidist"):
            for alias in child.names:
                whole = f"{child.module}.{alias.name}"
                path = PACKAGE.parent / whole.replace(".", "/")
                yield whole if path.is_dir() or path.with_suffix(".py").exists() else child.module
        elif isinstance(child, ast.Import):
            yield from (alias.name for alias in child.names if alias.name.startswith("minidist"))
        else:
            yield from imports(child)


def outside(part):
    """Return (module, imported) of the imports of a part that are not in the core."""
    trees = ((module, ast.parse(file_of(module).read_text(encoding="utf-8"))) for module in modules(part))
    return sorted({(module, name) for module, tree in trees for name in imports(tree) if name not in CORE})


def lines(part):
    return sum(len(file_of(module).read_text(encoding="utf-8").splitlines()) for module in modules(part))


def test_the_core_grows_neither_in_lines_nor_in_imports_from_outside():
    for part, (most, foreign, _) in PARTS.items():
        assert lines(part) <= most, part
        assert len(outside(part)) <= foreign, (part, outside(part))


if __name__ == "__main__":
    for name in PARTS:
        print(f"{name}: {lines(name)} lines, {len(outside(name))} imports from outside")
        for module, imported in outside(name):
            print(f"    {module} <- {imported}")
    print("in all", sum(map(lines, PARTS)), sum(len(outside(name)) for name in PARTS))
