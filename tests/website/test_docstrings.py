"""How a docstring, which is plain text, becomes what Sphinx reads; and which arrows the map of the lessons has."""

import re

import minidist.techniques
from website.docstrings import restructured, skipped
from website.lesson_map import drawn


def text(*lines, parameters=frozenset()):
    return "\n".join(restructured(list(lines), parameters)).strip()


def test_no_character_of_a_paragraph_is_markup_but_backticks():
    assert text("n * m, a_ and |x|; `2 * n` stays.") == "n \\* m, a\\_ and \\|x\\|; \\ ``2 * n``\\  stays."


def test_columns_and_indented_lines_are_shown_as_they_stand():
    assert text("Files:", "", "ring.py    the ring", "", "    0 --> 1", "", "The end.") == (
        "Files:\n\n.. code-block:: text\n\n    ring.py    the ring\n    \n        0 --> 1\n    \nThe end."
    )
    assert ".. code-block:: python" in text("    world = SimWorld(4)", "    world.run(main)")


def test_sentences_on_parameters_become_a_list_and_other_colons_do_not():
    lines = ("Two cases: one. out: where it goes. rows,", "columns: how many; equal: a text.")
    assert text(*lines, parameters={"out", "rows", "columns", "equal"}) == (
        "Two cases: one. \n\n- **out**: where it goes.\n- **rows, columns**: how many;\n- **equal**: a text."
    )
    assert text(*lines, parameters={"cases"}) == "\n".join(lines)


def test_a_class_that_another_class_has_as_an_attribute_is_described_once():
    techniques = minidist.techniques

    def is_skipped(what, name, item):
        return skipped(None, what, name, item, False, None)

    assert is_skipped("class", "Settings", techniques.Extension.Settings)
    # At the module, and what is no class of a module: Sphinx decides.
    assert is_skipped("module", "Settings", techniques.Settings) is None
    assert is_skipped("class", "panel", techniques.Extension.panel) is None

    class Outer:
        class Inner:
            pass

        other = dict

    assert is_skipped("class", "Inner", Outer.Inner) is None
    assert is_skipped("class", "other", Outer.other) is None  # "alias of dict"


def test_the_map_leaves_out_an_arrow_that_others_imply():
    names = "".join(f'{name}["{name} A <title>"]\n' for name in ("00", "01", "02"))
    picture = drawn(names + "00 --> 01\n01 --> 02\n00 --> 02\n")
    assert picture.count("marker-end") == 2
    assert picture.count("<rect x=") == 3
    assert "&lt;title&gt;" in picture
    heights = [int(y) for y in re.findall(r'<rect x="\d+" y="(\d+)"', picture)]
    assert heights == sorted(set(heights))
