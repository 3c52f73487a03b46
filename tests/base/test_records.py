"""Records: each type takes what reads as one of its values, and says of everything else what is wrong, and where."""

from typing import Annotated, Any, Literal

import pytest

from minidist.base.records import Field, Record, WrongValue
from tests.cases import each


class Job(Record, forbid=True):
    steps: int = Field(20, ge=1, le=10**6)
    lr: float = Field(0.5, gt=0)
    share: float = Field(0.0, ge=0, lt=1)
    resume: bool = False
    name: str = ""
    heads: int | None = Field(None, ge=1)
    micro: int | Literal["auto"] | None = Field(None, ge=1)
    order: Literal["ring", "naive", "auto"] = "ring"


class Piece(Record, strict=True):
    file: str
    range: Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=2, max_length=2)]


class File(Record, strict=True):
    step: int
    losses: list[float]
    pieces: dict[str, list[Piece]]
    checksum: Annotated[str, Field(pattern="[0-9a-f]{4}")] = "0000"
    scale: float = Field(1.0, allow_inf_nan=False)
    rest: Any = None


FILE = {"step": 1, "losses": [1, 0.5, float("inf")], "pieces": {"w": [{"file": "a", "range": [0, 3], "more": 1}]}}


@each(
    "name, given, value",
    [
        *(("steps", given, 4) for given in (4, 4.0, "4", " +4 ", "4.0")),
        *(("steps", given, 1_000) for given in ("1_000", 1e3)),
        ("steps", True, 1),
        *(("lr", given, 0.25) for given in (0.25, "0.25", ".25", "25e-2")),
        *(("resume", given, True) for given in (True, 1, 1.0, "yes", "ON", "True")),
        *(("resume", given, False) for given in (False, 0, "n", "Off")),
        *(("heads", given, given) for given in (None, 3)),
        *(("micro", given, given) for given in (None, 3, "auto")),
        ("micro", "3", 3),
        ("order", "auto", "auto"),
    ],
)
def test_a_setting_may_be_a_text_that_reads_as_its_value(name, given, value):
    found = getattr(Job(**{name: given}), name)
    assert (found, type(found)) == (value, type(value))


@each(
    "name, given, sentence",
    [
        ("steps", 0, "Input should be greater than or equal to 1"),
        ("steps", "1000001", "Input should be less than or equal to 1000000"),
        *(("steps", given, "Input should be a finite number") for given in (float("inf"), float("nan"))),
        ("steps", 1.5, "Input should be a valid integer, got a number with a fractional part"),
        *(
            ("steps", given, "Input should be a valid integer, unable to parse string as an integer")
            for given in ("x", "", "1.5", "1__0", "0x4", "9" * 5_000)
        ),
        *(("steps", given, "Input should be a valid integer") for given in (None, [], {})),
        ("lr", 0.0, "Input should be greater than 0"),
        ("lr", float("nan"), "Input should be greater than 0"),
        ("lr", float("inf"), "Input should be a number from 1e-30 to 1e+30"),
        ("share", 1, "Input should be less than 1"),
        ("share", 1e-40, "Input should be 0, or a number from 1e-30 to 1e+30"),
        *(
            ("lr", given, "Input should be a valid number, unable to parse string as a number")
            for given in ("fast", "", "\N{ARABIC-INDIC DIGIT THREE}", "\ud800")
        ),
        *(("lr", given, "Input should be a valid number") for given in (None, [], 10**400)),
        *(("resume", given, "Input should be a valid boolean, unable to interpret input") for given in ("x", 2)),
        *(("resume", given, "Input should be a valid boolean") for given in (None, 0.5, [])),
        *(("name", given, "Input should be a valid string") for given in (None, 3)),
        ("heads", 0, "Input should be greater than or equal to 1"),
        ("micro", 0, "Input should be 'auto'"),
        *(("order", given, "Input should be 'ring', 'naive' or 'auto'") for given in ("rings", None, [])),
        ("hats", 3, "Extra inputs are not permitted"),
    ],
)
def test_a_setting_that_is_wrong_is_one_sentence(name, given, sentence):
    with pytest.raises(WrongValue) as caught:
        Job(**{name: given})
    error = caught.value
    assert (error.message, error.place, error.unknown) == (sentence, (name,), name == "hats")
    assert error.value is given
    assert error.clause == sentence[0].lower() + sentence[1:]


@each(
    "changes, message",
    [
        ({"step": "1"}, "step: Input should be a valid integer"),
        ({"step": True}, "step: Input should be a valid integer"),
        ({"step": 1.0}, "step: Input should be a valid integer"),
        ({"losses": "1.5"}, "losses: Input should be a valid list"),
        ({"losses": [0.5, "1"]}, "losses.1: Input should be a valid number"),
        ({"losses": [True]}, "losses.0: Input should be a valid number"),
        ({"losses": [10**400]}, "losses.0: Input should be a valid number"),
        ({"scale": float("inf")}, "scale: Input should be a finite number"),
        ({"checksum": "00g0"}, "checksum: String should match pattern '[0-9a-f]{4}'"),
        ({"checksum": "0000\n"}, "checksum: String should match pattern '[0-9a-f]{4}'"),
        ({"pieces": []}, "pieces: Input should be a valid dictionary"),
        ({"pieces": {"w": [3]}}, "pieces.w.0: Input should be a valid dictionary or instance of Piece"),
        ({"pieces": {"w": [{"range": [0, 1]}]}}, "pieces.w.0.file: Field required"),
        (
            {"pieces": {"w": [{"file": "a", "range": [0]}]}},
            "pieces.w.0.range: List should have at least 2 items after validation, not 1",
        ),
        (
            {"pieces": {"w": [{"file": "a", "range": [0, 1, 2]}]}},
            "pieces.w.0.range: List should have at most 2 items after validation, not 3",
        ),
        (
            {"pieces": {"w": [{"file": "a", "range": [-1, 1]}]}},
            "pieces.w.0.range.0: Input should be greater than or equal to 0",
        ),
    ],
)
def test_nothing_in_a_file_is_believed(changes, message):
    with pytest.raises(WrongValue) as caught:
        File.model_validate({**FILE, **changes})
    assert str(caught.value) == message


def test_the_first_wrong_field_is_named_and_an_unknown_one_last():
    with pytest.raises(WrongValue, match=r"^lr: "):
        Job(hats=1, share=2, lr=0)
    with pytest.raises(WrongValue, match=r"^hats: "):
        Job(hats=1, lr=1)


def test_a_file_keeps_its_types_and_other_keys_are_left_out():
    file = File.model_validate(FILE)
    assert file.losses == [1.0, 0.5, float("inf")]
    assert [type(loss) for loss in file.losses] == [float] * 3
    assert file.pieces["w"][0].model_dump() == {"file": "a", "range": [0, 3]}
    assert (file.checksum, file.rest) == ("0000", None)


def test_a_record_does_not_change_and_is_copied_with_other_values():
    job = Job(steps=3)
    with pytest.raises(AttributeError, match=r"Job\.steps does not change"):
        job.steps = 4
    other = job.model_copy({"steps": 4})
    assert (job.steps, other.steps, other.lr) == (3, 4, 0.5)
    assert job == Job(steps="3") != other
    assert hash(job) == hash(Job(steps=3))
    assert job.model_dump(exclude_defaults=True) == {"steps": 3}
    assert list(job.model_dump()) == list(Job.model_fields)
    assert repr(Piece(file="a", range=[0, 1])) == "Piece(file='a', range=[0, 1])"


def test_fields_of_base_classes_come_first():
    class Technique(Record):
        clip: float | None = None

    class All(Technique, Job):
        pass

    assert list(All.model_fields) == [*Job.model_fields, "clip"]
    with pytest.raises(WrongValue, match="not permitted"):
        All(hats=1)
