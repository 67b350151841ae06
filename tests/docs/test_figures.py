"""Tables have the numbers of their reports, and pictures are drawn from theirs."""

import json
import re

import pytest
from PIL import Image

from figures import PAGES, REPORTS, ROOT, with_figures
from pictures import DIGEST, digest


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_tables_have_the_numbers_of_their_reports(page):
    text = page.read_text(encoding="utf-8")
    assert with_figures(text) == text, "run `python tests/docs/figures.py`"


@pytest.mark.parametrize("report", sorted(REPORTS.glob("*.json")), ids=lambda report: report.name)
def test_reports_name_their_commit_and_are_used(report):
    commit = json.loads(report.read_text(encoding="utf-8"))["machine"]["commit"]
    assert re.fullmatch("[0-9a-f]{40}", commit), "commit the code, then run the benchmark again in a clone"
    assert any(f"<!-- report: {report.name}\n" in page.read_text(encoding="utf-8") for page in PAGES)


@pytest.mark.parametrize("name", ["benchmarks.png", "speed.png"])
def test_pictures_are_of_their_report(name):
    assert Image.open(ROOT / "docs" / name).text[DIGEST] == digest()
