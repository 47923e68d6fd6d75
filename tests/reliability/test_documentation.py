"""The page that says which test shows what."""

import re
from pathlib import Path

TESTS = Path(__file__).parents[1]
PAGE = TESTS.parent / "docs" / "reliability.md"


def test_every_test_that_the_page_names_is_there():
    named = set(re.findall(r"\btest_\w+", PAGE.read_text()))
    files = {path.stem: path.read_text() for path in TESTS.rglob("test_*.py")}
    defined = set(re.findall(r"^def (test_\w+)", "\n".join(files.values()), re.MULTILINE))
    assert len(named) > 30
    assert named <= defined | set(files)


def test_the_page_names_every_test_of_this_folder():
    text = PAGE.read_text()
    for path in TESTS.glob("reliability/test_*.py"):
        if path.stem not in ("test_documentation", "test_without_the_library"):
            for test in re.findall(r"^def (test_\w+)", path.read_text(), re.MULTILINE):
                assert test in text, f"{path.name}::{test}"
