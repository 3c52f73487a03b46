"""What is to be trained, and may it run? Settings, files of settings, and the rules of what does not combine.

train_config.py     `TrainConfig`, one field per setting, and the batch triple
config_file.py      settings in a .toml or .json file        deepspeed.py    those of a DeepSpeed file
rules.py            which settings do not combine            resolved_job.py    a job as the rules see it
deepspeed_keys.py   the keys of a DeepSpeed file, as tables
models.py           the model of a config                    pipeline_plan.py   its pipeline plan and stages
"""
