"""`--keep`, `--from-step`, `--overwrite`: which checkpoints are kept, and which one a job resumes from.

    step-00000010  step-00000020  step-00000030  step-00000040  <- latest
                   --from-step 20 --resume                         a job resumes from here, not from the latest one
                                  --keep 2                         older ones of the same run are deleted
                                                  --overwrite      a new run begins; these stay

A rank sends per step: nothing.
Equal to: the job without an interruption, bit for bit.
Lesson: 26_it_will_fail.

Proved by: tests/checkpoint/test_resume.py, tests/config/test_rules.py
"""

from minidist.base.limits import MAX_COUNT
from minidist.techniques import Extension, Field, History, Record, Rule


class CheckpointHistory(Extension):
    """Says which checkpoints count."""

    class Settings(Record):
        """The flags; --save, --every and --resume are settings of every job."""

        keep: int | None = Field(
            None,
            ge=1,
            le=MAX_COUNT,
            description="the number of a run's latest checkpoints that are kept (default: all)",
        )
        from_step: int | None = Field(
            None, ge=1, le=MAX_COUNT, description="resume from the checkpoint of this step, not the latest one"
        )
        overwrite: bool = Field(
            False, description="begin a new run in a --save directory with checkpoints; the old checkpoints are kept"
        )

    for_all_steps = True
    rules = (
        Rule(
            "keep-needs-every",
            lambda j: j.keep is not None and j.every is None,
            "--keep {keep} deletes older checkpoints of --every, and without it there is one, at the end",
            "add --every STEPS, or leave it out",
        ),
        Rule(
            "from-step-needs-resume",
            lambda j: j.from_step is not None and not j.resume,
            "--from-step {from_step} says which checkpoint --resume continues from",
            "add --resume, or leave it out",
        ),
        Rule(
            "overwrite-needs-save",
            lambda j: j.overwrite and j.save is None,
            "--overwrite needs --save DIR, the directory of the checkpoints",
            "add it, or leave --overwrite out",
        ),
        Rule(
            "overwrite-with-resume",
            lambda j: j.overwrite and j.resume,
            "--overwrite begins a new run, and --resume continues the one in --save {save}",
            "leave one of them out",
        ),
    )
    unplanned = ("keep", "overwrite")

    def history(self) -> History:
        return History(**self.settings.model_dump())
