"""The golden jobs: the command lines of about 50 small jobs, at least one for every axis and every technique.

A job is one or more command lines of `minidist`; `{dir}` is the job's empty folder. The last one is recorded.
"""

GPT = "train --data markov --layers 2 --width 16 --heads 2 --context 8 --steps 3 --seed 7"
DEEP = "train --data markov --layers 4 --width 16 --heads 2 --context 8 --steps 2 --seed 7"
LLAMA = "train --model llama --data markov --layers 2 --width 16 --heads 4 --context 8 --steps 2"
EXPERTS = f"{GPT} --experts 4"
HALF = f"{GPT} --precision fp16 --optimizer adam --global-batch 8 --save {{dir}}/run"
COMPARE = GPT.replace("train", "compare")
SAVED = f"{GPT} --dp 2 --save {{dir}}/run --every 2"

JOBS: dict[str, tuple[str, ...]] = {
    "one device": (f"{GPT} --dropout 0.1 --attention-dropout 0.1 --warmup 2 --decay cosine",),
    "mlp": ("train --model mlp --width 16 --steps 3 --dp 3 --optimizer sgd --momentum 0.9 --nesterov --lr 0.1",),
    # The data axis.
    "dp ring": (f"{GPT} --dp 3 --clip 0.5",),
    "dp ordered": (f"{GPT} --dp 3 --reduction ordered --bucket-cap-mb 0.01 --accumulation 2",),
    "dp auto": (f"{GPT} --dp 4 --reduction auto --synchronize-each --accumulation 2",),
    "dp uneven": (f"{GPT} --dp 3 --weights 2,1,1 --global-batch 8 --check-replicas --check-data",),
    "adaptive batch": (f"{GPT} --dp 2 --steps 5 --adaptive-batch 32 --lr-scaling sqrt --noise-scale",),
    "zero 1": (f"{GPT} --dp 3 --zero 1 --reduce-bucket-size 2000",),
    "zero 2": (f"{GPT} --dp 3 --zero 2 --accumulation 2 --clip 0.5",),
    "zero 3": (f"{GPT} --dp 3 --zero 3 --prefetch 2 --accumulation 2",),
    "zero 3 gathered": (f"{GPT} --dp 2 --zero 3 --reshard-after-forward false --persistence-threshold 64",),
    "hybrid sharding": (f"{GPT} --dp 4 --zero 3 --dp-replicate 2 --reduction ordered",),
    "local sgd": (f"{GPT} --dp 2 --steps 4 --local-steps 2",),
    "diloco": (f"{GPT} --dp 2 --steps 4 --local-steps 2 --outer-optimizer nesterov",),
    "streaming diloco": (
        f"{GPT} --dp 2 --steps 6 --local-steps 2 --outer-optimizer nesterov --outer-fragments 2 --outer-delay 1",
    ),
    "top-k": (f"{GPT} --dp 2 --compression topk:0.1",),
    "powersgd": (f"{GPT} --dp 2 --compression powersgd:2 --zero 2",),
    "server": (f"{GPT} --dp 2 --strategy ps --servers 2",),
    "stale server": (f"{GPT} --dp 3 --strategy ps --consistency ssp:1 --staleness-aware",),
    # The other axes.
    "tp": (f"{GPT} --tp 2",),
    "sequence parallel": (f"{GPT} --tp 2 --sequence-parallel --dropout 0.1 --clip 0.5 --check-layouts",),
    "llama tp": (f"{LLAMA} --tp 4 --kv-heads 2 --ffn 24",),
    "cp ring": (f"{GPT} --cp 2",),
    "cp ulysses": (f"{GPT} --cp 2 --attention ulysses --document-separator 3",),
    "cp all-gather": (f"{LLAMA} --cp 2 --attention all-gather --kv-heads 2",),
    "cp ulysses-ring": (f"{LLAMA} --cp 4 --attention ulysses-ring --ulysses 2",),
    "experts": (f"{EXPERTS} --dp 4 --ep 2 --top-k 2",),
    "experts tp": (f"{EXPERTS} --dp 2 --ep 2 --tp 2 --sequence-parallel",),
    "1f1b": (f"{DEEP} --pp 3 --microbatches 5 --reduction ordered",),
    "gpipe": (f"{DEEP} --pp 2 --schedule gpipe --microbatches 4 --recompute full",),
    "interleaved": (f"{DEEP} --pp 2 --schedule interleaved --chunks 2 --microbatches 4 --partition parameters",),
    "zb-h1": (f"{DEEP} --pp 4 --schedule zb-h1 --microbatches 6",),
    "zb-v": (f"{DEEP} --pp 2 --schedule zb-v --microbatches 4 --clip 0.5",),
    "dualpipe": (f"{DEEP} --pp 2 --schedule dualpipe --microbatches 4",),
    "pipedream": (f"{DEEP} --pp 3 --replicas 2,1 --schedule pipedream --steps 4",),
    "pipedream-2bw": (f"{DEEP} --pp 2 --schedule pipedream-2bw --microbatches 4",),
    "repartition": (f"{DEEP} --pp 2 --steps 4 --repartition-every 2 --microbatches 4",),
    "3-d": (f"{DEEP} --pp 2 --dp 2 --tp 2 --zero 1 --microbatches 4 --clip 0.5",),
    "4-d": (f"{DEEP} --pp 2 --dp 2 --cp 2 --tp 2 --zero 2 --sequence-parallel --microbatches 2",),
    # Numbers, memory, optimizers and models.
    "fp16": (f"{GPT} --dp 2 --precision fp16 --loss-scale 1073741824 --clip 0.5",),
    "bf16": (f"{GPT} --tp 2 --dp 2 --precision bf16 --zero 1",),
    "fp64": (f"{GPT} --dp 2 --precision fp64 --optimizer lamb --weight-decay 0.1",),
    "int8": (f"{GPT} --dp 2 --quantize int8 --evaluate-every 2",),
    "sparsity": (f"{GPT} --dp 2 --steps 4 --sparsity 0.5 --sparsity-schedule 1,3 --sparsity-scope global",),
    "n:m": (f"{GPT} --dp 2 --zero 2 --sparsity-pattern 2:4 --sparsity-schedule 1",),
    "muon": (f"{GPT} --dp 2 --optimizer muon --momentum 0.9 --zero 1",),
    "lars cnn": ("train --model cnn --width 4 --steps 2 --dp 2 --optimizer lars --batch-norm sync --micro-batch 4",),
    "selective": (f"{GPT} --tp 2 --recompute selective",),
    "offload optimizer": (f"{GPT} --dp 2 --zero 2 --offload optimizer",),
    "offload parameters": (f"{GPT} --dp 2 --zero 3 --offload parameters",),
    "offload activations": (f"{GPT} --offload activations --recompute sqrt",),
    "distillation": (
        f"{GPT} --save {{dir}}/teacher",
        f"{GPT} --width 8 --dp 2 --distill-from {{dir}}/teacher --shard-teacher",
    ),
    "teacher ranks": (
        f"{GPT} --save {{dir}}/teacher",
        f"{GPT} --width 8 --dp 2 --distill-from {{dir}}/teacher --teacher-ranks 1",
    ),
    "loader": (f"{GPT} --dp 2 --prefetch-batches 2",),
    # Checkpoints, dry runs and comparisons.
    "resume": (SAVED, f"{SAVED} --resume --steps 5 --zero 1".replace("--dp 2", "--dp 3 --tp 2 --global-batch 8")),
    "resume in half": (f"{HALF} --dp 2 --zero 3", f"{HALF} --dp 3 --zero 2 --resume --steps 5"),
    "init from": (f"{GPT} --save {{dir}}/first", f"{GPT} --pp 2 --init-from {{dir}}/first --evaluate-every 1"),
    "dry run": (f"{LLAMA} --dry-run --gpu h100 --tp 2 --pp 2 --dp 2 --microbatches 4",),
    "folded": (f"{LLAMA} --dry-run --fold --gpu h100 --dp 8 --zero 3",),
    "compare": (f"{COMPARE} --dp 2 --pp 2",),
    "compare in the float tier": (f"{COMPARE} --tp 2",),
    "compare pipedream": (f"{DEEP} --pp 2 --schedule pipedream --steps 4".replace("train", "compare", 1),),
}
