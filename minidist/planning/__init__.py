"""What will a job cost in bytes, memory and time? Closed forms and one measurement; nothing here trains.

volumes.py            what a job sends, by purpose; layer_volumes.py and pipeline_volumes.py are its parts
memory_estimator.py   what a rank holds at each ZeRO stage; block_bytes.py: the activations of a transformer block
profiler.py           how long each block of a model takes, measured
"""
