"""The table of docs/ecosystem.md is what `make matrix` prints."""

from support import matrix
from support.folders import ROOT


def test_the_documented_table_has_these_rows():
    page = (ROOT / "docs" / "ecosystem.md").read_text(encoding="utf-8").splitlines()
    printed, _ = matrix.table({})
    start = page.index(printed[0])
    for documented, line in zip(page[start:], printed, strict=False):
        assert documented.split(" | ")[::3] == line.split(" | ")[::3]
    for _, file, _ in matrix.ROWS.values():
        assert (ROOT / "tests" / "ecosystem" / f"test_{file}.py").exists()
