"""The quiz bank: answers are those of closed forms, choices differ, and both formats say the same."""

import csv
import functools
import io
import json
import re
import subprocess
import zipfile
from xml.etree import ElementTree

import pytest

from minidist.commands.lesson import lesson_autograder, lesson_quiz
from minidist.core.base.errors import UsageError
from minidist.course.lesson.quiz import CHOICES, bank
from minidist.course.lesson.quiz_files import PACKAGE, as_csv, as_gift, as_qti
from tests.cases import each


@functools.cache
def questions():
    """Return a bank; its programs are run when the first test asks."""
    return bank(45, 3)


def numbers(text):
    return [int(number.replace(",", "")) for number in re.findall(r"\d[\d,]*", text)]


# Independent of the programs that are run: what the literature says.
FORMS = {
    "ring all-reduce, bytes": lambda n, size: 2 * (n - 1) * size // n,
    "ring all-reduce, messages": lambda n: 2 * (n - 1),
    "recursive doubling, messages": lambda n: n.bit_length() - 1,
    "all-gather, bytes": lambda n, size: (n - 1) * size,
    "reduce-scatter, bytes": lambda n, size: (n - 1) * size // n,
    "gather, messages": lambda _, n: n - 1,
    "all-to-all, bytes": lambda n, size: (n - 1) * size // n,
    "GPipe, bubble": lambda m, p: f"{100 * (p - 1) / (m + p - 1):.1f} %",
    "1F1B, activations": lambda _, b, m, p, stage, zero: p - stage,
}


@each("name", sorted(FORMS))
def test_what_is_measured_is_the_closed_form(name):
    asked = [item for item in questions() if item.name == name]
    assert len(asked) >= 3
    for item in asked:
        wanted = FORMS[name](*numbers(item.text))
        assert item.right == wanted if isinstance(wanted, str) else numbers(item.right) == [wanted], item


def test_choices_differ_and_one_is_right():
    for item in questions():
        assert len(set(item.choices())) == CHOICES
        assert item.choices().count(item.right) == 1
    assert len({item.choices().index(item.right) for item in questions()}) == CHOICES


def test_a_seed_draws_one_bank():
    assert bank(18, 3) == bank(18, 3)
    assert {item.text for item in bank(18, 3)} != {item.text for item in bank(18, 4)}
    assert len(bank(18, 3)) == len({item.text for item in bank(18, 3)}) == 18


def test_both_formats_have_the_right_choice():
    rows = list(csv.DictReader(io.StringIO(as_csv(questions()))))
    name = "{http://www.imsglobal.org/xsd/ims_qtiasiv1p2}"
    items = list(ElementTree.fromstring(as_qti(questions(), "a title")).iter(f"{name}item"))
    assert len(rows) == len(items) == len(questions())
    for question, row, item in zip(questions(), rows, items, strict=True):
        assert row[f"choice {row['right']}"] == question.right
        labels = {
            label.get("ident"): label.find(f".//{name}mattext").text for label in item.iter(f"{name}response_label")
        }
        assert labels[item.find(f".//{name}varequal").text] == question.right
        assert list(labels.values()) == question.choices()


# The elements of our quiz -> their children in order, and their attributes: what the schema of QTI 1.2.1 allows, in the
# profile of Common Cartridge 1.2 (ccv1p2_qtiasiv1p2p1_v1p0.xsd), which platforms check. `!` marks what must be there.
QTI_SCHEMA = {
    "questestinterop": ("assessment ", ""),
    "assessment": ("(qtimetadata )?section ", "ident! title!"),
    "section": ("(item )+", "ident! title"),
    "item": ("(itemmetadata )?(presentation )?(resprocessing )*(itemfeedback )*", "ident! title"),
    "itemmetadata": ("(qtimetadata )+", ""),
    "qtimetadata": ("(qtimetadatafield )+", ""),
    "qtimetadatafield": ("fieldlabel fieldentry ", ""),
    "presentation": ("((material|response_lid) )+", "label"),
    "material": ("(mattext )+", "label"),
    "response_lid": ("(material )?render_choice (material )?", "ident! rcardinality"),
    "render_choice": ("((material|response_label) )*", "shuffle"),
    "response_label": ("((material|flow_mat) )*", "ident!"),
    "resprocessing": ("outcomes (respcondition )+", ""),
    "outcomes": ("decvar ", ""),
    "respcondition": ("conditionvar (setvar )*(displayfeedback )*", "title continue"),
    "conditionvar": ("((and|other|varequal) )+", ""),
    "itemfeedback": ("((flow_mat|material|solution|hint) )+", "ident! title"),
    "flow_mat": ("((flow_mat|material) )+", "class"),
    "decvar": ("", "varname! vartype minvalue maxvalue"),
    "setvar": ("", "varname action"),
    "varequal": ("", "respident! case"),
    "displayfeedback": ("", "feedbacktype! linkrefid!"),
    "mattext": ("", "texttype label"),
    "fieldlabel": ("", ""),
    "fieldentry": ("", ""),
    "other": ("", ""),
}


def test_the_quiz_is_valid_by_the_schema_of_qti():
    root = ElementTree.fromstring(as_qti(questions(), "a title"))
    for node in root.iter():
        name = node.tag.removeprefix("{http://www.imsglobal.org/xsd/ims_qtiasiv1p2}")
        children, attributes = QTI_SCHEMA[name]
        found = "".join(f"{child.tag.rpartition('}')[2]} " for child in node)
        assert re.fullmatch(children, found), (name, found)
        allowed = attributes.replace("!", "").split()
        assert set(re.findall(r"(\w+)!", attributes)) <= set(node.attrib) <= set(allowed), (name, node.attrib)


def test_gift_has_the_right_choice_and_no_open_character():
    blocks = as_gift(questions()).split("\n\n")
    assert len(blocks) == len(questions())
    for question, block in zip(questions(), blocks, strict=True):
        lines = [line.strip() for line in block.splitlines()]
        right = [line[1:] for line in lines if line.startswith("=")]
        assert [text.replace("\\", "") for text in right] == [question.right]
        assert sum(line.startswith("~") for line in lines) == CHOICES - 1
        plain = re.sub(r"\\.", "", block)
        assert (plain.count("{"), plain.count("}"), plain.count("::")) == (1, 1, 2)


def test_the_command_writes_the_format_of_the_suffix(tmp_path):
    for name, begin in (("quiz.csv", b"name,question"), ("quiz.xml", b"<?xml"), ("q.gift", b"::1 "), ("q.zip", b"PK")):
        lesson_quiz(tmp_path / name, questions=9, seed=1)
        assert (tmp_path / name).read_bytes().startswith(begin), name
    with pytest.raises(UsageError, match=r"end it in \.csv, \.gift, \.zip or \.xml"):
        lesson_quiz(tmp_path / "quiz.txt")

    # The manifest names the file that is in the package.
    with zipfile.ZipFile(tmp_path / "q.zip") as archive:
        manifest = ElementTree.fromstring(archive.read("imsmanifest.xml"))
        (resource,) = manifest.iter(f"{{{PACKAGE}}}resource")
        assert resource.get("type") == "imsqti_xmlv1p2"
        assert archive.read(resource.find(f"{{{PACKAGE}}}file").get("href")) == (tmp_path / "quiz.xml").read_bytes()


def test_a_grader_to_upload_runs_the_command(tmp_path):
    lesson_autograder("04", tmp_path / "a.zip", seed=7, package="minidist")
    with zipfile.ZipFile(tmp_path / "a.zip") as archive:
        assert {info.filename: info.external_attr >> 16 for info in archive.infolist()} == {
            "setup.sh": 0o755,
            "run_autograder": 0o755,
        }
        command = "--assignment 04 --seed 7 --json /autograder/results/results.json"
        assert command in archive.read("run_autograder").decode()
        assert "pip3 install 'minidist'" in archive.read("setup.sh").decode()
        for name in archive.namelist():
            subprocess.run(["bash", "-n"], input=archive.read(name), check=True)
    lesson_autograder("04", tmp_path / "autograding.json", seed=7, package="minidist")
    (test,) = json.loads((tmp_path / "autograding.json").read_text())["tests"]
    assert test["run"] == "minidist grade answer.py --assignment 04 --seed 7"
    lesson_autograder("04", tmp_path / "Dockerfile", seed=7, package="minidist")
    lines = (tmp_path / "Dockerfile").read_text().splitlines()
    command = "minidist grade /submissions/* --assignment 04 --seed 7 --json /results"
    assert json.loads(lines[-1].removeprefix("CMD ")) == ["sh", "-c", command]
    assert lines.index("USER grader") > [line.startswith("RUN pip install") for line in lines].index(True)
    with pytest.raises(UsageError, match="no assignment 'x'"):
        lesson_autograder("x", tmp_path / "a.zip")
