"""What will a job cost in bytes, memory and time? Closed forms and one measurement; nothing here trains.

volumes.py            what a job sends, by purpose; layer_volumes.py and pipeline_volumes.py are its parts
cluster/              which layouts of a large model fit on a cluster of GPUs, and how fast each one is
architecture.py       the parameters and FLOPs of a transformer, from those of its parts (parts.py)
huggingface_config.py reads a config.json (config_keys.py): a row of families.toml says what a kind of model is made of
                      (family.py), decoder.py puts its layers together (layer_kinds.py, mixers.py, vision_towers.py);
                      transformers_count.py: what has no row is built by transformers
job_config.py         reads a job of minidist train as the planner's input
zero_stages.py        what a rank holds at each ZeRO stage; block_bytes.py: the activations of a transformer block
profiler.py           how long each block of a model takes, measured
"""
