"""The files that learning platforms import: a quiz bank as CSV, GIFT or QTI 1.2, and graders ready to upload.

    quiz.csv            a table                          quiz.gift        Moodle
    quiz.xml            QTI 1.2                          quiz.zip         QTI 1.2 with its manifest: Canvas
    autograder.zip      Gradescope: setup.sh and run_autograder
    autograding.json    GitHub Classroom

Proved by: tests/lesson/test_quiz.py
"""

import csv
import io
import json
import re
import zipfile
from collections.abc import Sequence
from xml.etree import ElementTree as xml

from minidist.course.lesson.quiz import CHOICES, Question

QTI = "http://www.imsglobal.org/xsd/ims_qtiasiv1p2"
PACKAGE = "http://www.imsglobal.org/xsd/imsccv1p1/imscp_v1p1"
DATE = (2026, 1, 1, 0, 0, 0)  # of each file in a zip: the same bank is the same file


def as_csv(questions: Sequence[Question]) -> str:
    """Return a bank as CSV: name, question, the choices, the number of the right one (from 1), the explanation."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["name", "question", *(f"choice {i + 1}" for i in range(CHOICES)), "right", "explanation"])
    for item in questions:
        choices = item.choices()
        writer.writerow([item.name, item.text, *choices, choices.index(item.right) + 1, item.because])
    return text.getvalue()


def as_gift(questions: Sequence[Question]) -> str:
    """Return a bank in Moodle's GIFT: the right choice after =, the others after ~, the explanation after ####."""
    pieces = []
    for number, item in enumerate(questions, 1):
        choices = "".join(f"\t{'=' if c == item.right else '~'}{_escaped(c)}\n" for c in item.choices())
        name = _escaped(f"{number} {item.name}")
        pieces.append(f"::{name}::{_escaped(item.text)}{{\n{choices}\t####{_escaped(item.because)}\n}}\n")
    return "\n".join(pieces)


def _escaped(text: str) -> str:
    """Return a text without characters that GIFT reads as its own."""
    return re.sub(r"([~=#{}:\\])", r"\\\1", text)


def as_qti(questions: Sequence[Question], title: str) -> str:
    """Return a bank as QTI 1.2: one assessment of multiple-choice items, with the explanation as feedback."""
    root = xml.Element("questestinterop", xmlns=QTI)
    assessment = xml.SubElement(root, "assessment", ident="minidist", title=title)
    section = xml.SubElement(assessment, "section", ident="root_section")
    for number, item in enumerate(questions, 1):
        _qti_item(xml.SubElement(section, "item", ident=f"q{number}", title=item.name), item)
    return _document(root)


def _qti_item(node: xml.Element, item: Question) -> None:
    """Fill one item: how it is scored, the question with its choices, the right one, and the feedback."""
    fields = xml.SubElement(xml.SubElement(node, "itemmetadata"), "qtimetadata")
    for label, entry in (("question_type", "multiple_choice_question"), ("points_possible", "1")):
        field = xml.SubElement(fields, "qtimetadatafield")
        xml.SubElement(field, "fieldlabel").text = label
        xml.SubElement(field, "fieldentry").text = entry

    presentation = xml.SubElement(node, "presentation")
    _material(presentation, item.text)
    response = xml.SubElement(presentation, "response_lid", ident="response", rcardinality="Single")
    render = xml.SubElement(response, "render_choice")
    for index, choice in enumerate(item.choices()):
        _material(xml.SubElement(render, "response_label", ident=f"c{index}"), choice)

    # The right choice has 100 points, and every answer shows the explanation.
    processing = xml.SubElement(node, "resprocessing")
    outcomes = xml.SubElement(processing, "outcomes")
    xml.SubElement(outcomes, "decvar", varname="SCORE", vartype="Decimal", minvalue="0", maxvalue="100")
    condition = xml.SubElement(processing, "respcondition", {"continue": "Yes"})
    xml.SubElement(xml.SubElement(condition, "conditionvar"), "other")
    xml.SubElement(condition, "displayfeedback", feedbacktype="Response", linkrefid="general_fb")
    condition = xml.SubElement(processing, "respcondition", {"continue": "No"})
    equal = xml.SubElement(xml.SubElement(condition, "conditionvar"), "varequal", respident="response")
    equal.text = f"c{item.choices().index(item.right)}"
    xml.SubElement(condition, "setvar", action="Set", varname="SCORE").text = "100"
    feedback = xml.SubElement(node, "itemfeedback", ident="general_fb")
    _material(xml.SubElement(feedback, "flow_mat"), item.because)


def _material(parent: xml.Element, text: str) -> None:
    xml.SubElement(xml.SubElement(parent, "material"), "mattext", texttype="text/plain").text = text


def _document(root: xml.Element) -> str:
    xml.indent(root)
    return xml.tostring(root, encoding="unicode", xml_declaration=True) + "\n"


def as_qti_zip(questions: Sequence[Question], title: str) -> bytes:
    """Return the QTI file in a package with its manifest, which is what Canvas imports."""
    root = xml.Element("manifest", xmlns=PACKAGE, identifier="minidist_package")
    metadata = xml.SubElement(root, "metadata")
    xml.SubElement(metadata, "schema").text = "IMS Content"
    xml.SubElement(metadata, "schemaversion").text = "1.1.3"
    xml.SubElement(root, "organizations")
    resources = xml.SubElement(root, "resources")
    resource = xml.SubElement(resources, "resource", identifier="minidist", type="imsqti_xmlv1p2", href="quiz.xml")
    xml.SubElement(resource, "file", href="quiz.xml")
    return _zipped({"imsmanifest.xml": (_document(root), False), "quiz.xml": (as_qti(questions, title), False)})


def gradescope_zip(assignment: str, seed: int, package: str) -> bytes:
    """Return Gradescope's autograder for an assignment: it grades the first .py or .ipynb file of a submission.

    package: what pip installs, such as "minidist[mpi]".
    """
    setup = f"#!/usr/bin/env bash\nset -e\napt-get update && apt-get install -y python3-pip\npip3 install '{package}'\n"
    run = f"""#!/usr/bin/env bash
cd /autograder/submission
file=$(ls *.ipynb *.py 2>/dev/null | head -n 1)
minidist grade "${{file:-missing.py}}" --assignment {assignment} --seed {seed} --json /autograder/results/results.json
exit 0  # points are in the file; another exit code would read as a broken grader
"""
    return _zipped({"setup.sh": (setup, True), "run_autograder": (run, True)})


def classroom_json(assignment: str, seed: int, package: str, file: str = "answer.py") -> str:
    """Return GitHub Classroom's autograding.json: one test, which passes when every point is given."""
    test = {
        "name": f"minidist {assignment}",
        "setup": f"pip install '{package}'",
        "run": f"minidist grade {file} --assignment {assignment} --seed {seed}",
        "input": "",
        "output": "",
        "comparison": "included",
        "timeout": 10,
        "points": 10,
    }
    return json.dumps({"tests": [test]}, indent=2) + "\n"


def dockerfile(assignment: str, seed: int, package: str) -> str:
    """Return a Dockerfile of an image that grades /submissions into /results, as a user who may write only there."""
    return f"""# docker build -t grade-{assignment} .
# docker run --rm --network none -v "$PWD/submissions:/submissions:ro" -v "$PWD/results:/results" grade-{assignment}
FROM python:3.12-slim
RUN pip install --no-cache-dir '{package}' && useradd grader
USER grader
ENV OPENBLAS_NUM_THREADS=1
CMD ["sh", "-c", "minidist grade /submissions/* --assignment {assignment} --seed {seed} --json /results"]
"""


def _zipped(files: dict[str, tuple[str, bool]]) -> bytes:
    """Return a zip of name -> (text, whether it is a program)."""
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, (text, is_program) in files.items():
            info = zipfile.ZipInfo(name, DATE)
            info.external_attr = (0o755 if is_program else 0o644) << 16
            info.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(info, text)
    return stream.getvalue()
