"""What will a job cost in bytes, memory and time? Closed forms and one measurement; nothing here trains.

volumes.py            what a job sends, by purpose; layer_volumes.py and pipeline_volumes.py are its parts
cluster/              which layouts of a large model fit on a cluster of GPUs, and how fast each one is
architecture.py       the parameters and FLOPs of a transformer, from parts.py: attention, an MLP, experts
huggingface_config.py reads a config.json: family.py and families.toml say what its keys mean in each family of models
                      (config_keys.py), decoder.py puts layers together (layer_kinds.py, mixers.py, vision_towers.py);
                      transformers_count.py counts a family that has no row, where transformers is installed
job_config.py         reads a job of minidist train as the planner's input
zero_stages.py        what a rank holds at each ZeRO stage; block_bytes.py: the activations of a transformer block
profiler.py           how long each block of a model takes, measured
"""
