"""The table of docs/ecosystem.md is what `make matrix` prints."""

import pytest

from support import matrix
from support.folders import ROOT

REPORT = """<testsuites><testsuite>
<testcase classname="tests.ecosystem.test_export" name="test_every_head[onnx-Model]"/>
<testcase classname="tests.ecosystem.test_export" name="test_every_head[openvino-Model]"><failure/></testcase>
<testcase classname="tests.ecosystem.test_attention_readers" name="test_captum"><skipped/></testcase>
</testsuite></testsuites>"""


def cells(lines: list[str]) -> dict[str, list[str]]:
    """The other cells of each row of a table by its first."""
    rows = [[cell.strip() for cell in line.strip("| ").split(" | ")] for line in lines if line.startswith("| ")]
    return {row[0]: row[1:] for row in rows}


def test_a_row_has_the_results_of_its_tests(tmp_path):
    pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
    (tmp_path / "report.xml").write_text(REPORT)
    lines, all_work = matrix.table(matrix.outcomes(str(tmp_path / "report.xml")))
    rows = cells(lines)
    assert not all_work
    assert rows["ONNX Runtime"][1] == "passed"
    assert rows["OpenVINO"][1] == "failed"
    assert rows["Captum"][1] == "skipped"
    assert rows["bertviz"][1] == "not run"


def test_the_documented_table_has_these_rows():
    empty, _ = matrix.table({})
    page = (ROOT / "docs" / "ecosystem.md").read_text(encoding="utf-8").splitlines()
    first = page.index(empty[0])
    documented, printed = cells(page[first : first + len(empty)]), cells(empty)
    assert {what: row[-1] for what, row in documented.items()} == {what: row[-1] for what, row in printed.items()}
    for row in matrix.ROWS:
        for file in row.files:
            assert (ROOT / "tests" / "ecosystem" / f"test_{file}.py").exists()
