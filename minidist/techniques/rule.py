"""A rule: one combination of settings that is refused, with its condition, its sentence and its remedy.

    Rule("dropout-gpt", lambda j: j.dropout and j.model != "gpt",
         "--dropout {dropout} belongs to --model gpt, not to {model}")      <- {field} is a setting of the job

A technique has its rules in its folder; those of the layouts and models are in `job/config/rules.py`.

Proved by: tests/config/test_rules.py, tests/techniques/test_rule.py
"""

import string
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from minidist.base.errors import quoted

Value = Callable[[Any], Any]  # of a job as the rules see it, a `config.resolved_job.ResolvedJob`


class Rule(NamedTuple):
    """One combination that is refused.

    broken: whether a job breaks the rule. message, remedy: the two halves of the sentence, in which {name} is an entry
    of `values`, or an attribute of the ResolvedJob. Most flags that a job cannot have are left out.
    """

    name: str
    broken: Value
    message: str
    remedy: str = "leave it out"
    values: Mapping[str, Value] = {}

    def sentence(self, job: Any) -> str:
        """Return the sentence with the numbers of `job`."""
        template = f"{self.message}; {self.remedy}"
        # Only what the sentence names is computed: other values may be undefined for this job.
        names = {name for _, name, _, _ in string.Formatter().parse(template) if name}
        return template.format(
            **{name: self.values[name](job) if name in self.values else setting(job, name) for name in names}
        )


def changed(name: str, where: Value) -> Value:
    """Return a condition: the setting differs from its default in a job for which `where` is true."""
    return lambda job: job.is_changed(name) and where(job)


def without_effect(name: str, effective: Value, other: str, *, switch: bool = False) -> Rule:
    """Return the rule FLAG-without-effect, which refuses a setting elsewhere. other: what it belongs to.

    switch: whether the flag has no value.
    """
    flag = "--" + name.replace("_", "-")
    return Rule(
        f"{name.replace('_', '-')}-without-effect",
        changed(name, lambda job: not effective(job)),
        f"{flag if switch else f'{flag} {{{name}}}'} has no effect here, because it belongs to {other}",
        "add that, or leave it out",
    )


def multiples(number: int, unit: int) -> str:
    """Return the multiples of `unit` next to `number`, as text."""
    below, above = number // unit * unit, (number // unit + 1) * unit
    return f"{below} or {above}" if below else f"{above}"


def setting(job: Any, name: str) -> Any:
    """Return a value of the job, of a text at most what a sentence quotes."""
    value = getattr(job, name)
    return quoted(value, marks=False) if isinstance(value, str) else value
