"""The tables and outputs in README.md and docs/ whose numbers come from a report of docs/reports.

    python tests/docs/figures.py    # writes the numbers of the reports into the pages

A comment directly before the table or output has the file of the report, and a line for each row that has numbers:

    <!-- report: zen5.json
    rows.bert: reviews.seconds_per_batch/0.001 single.seconds_per_batch/0.001
    rows.ours: reviews.vs_bert single.vs_bert
    rows.onnx
    -->

A line has a path into the report and, after the colon, the paths of the columns, which continue it. A line without
columns has those of the line above. A line with two paths before the colon has two numbers for each column. The
numbers are the last ones of the row, from left to right.

A name in a path selects a value or, in a list, the elements that contain this value. The largest of several numbers is
taken. `a/60` is divided by 60, and `a/b` by the number at b. The page decides how many digits a number has.
"""

import json
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
REPORTS = ROOT / "docs" / "reports"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]

# A comment, and the lines after it up to an empty one.
BOUND = re.compile(r"(?P<comment><!-- report: (?P<report>\S+)\n(?P<rows>(?:.+\n)*?)-->\n)(?P<block>(?:.+\n)*)")
NUMBER = re.compile(r"(?<![\w.,])\d[\d,]*(?:\.\d+)?(?:e[-+]\d+)?(?!\w)")


def look_up(found, path: str):
    """What is at a path in a report."""
    for name in path.split("."):
        if isinstance(found, dict):
            found = found[name]
        else:
            selected = [row for row in found if name in [str(value).replace(" ", "-") for value in row.values()]]
            found = selected or [row[name] for row in found]
    return found


def figure(row, column: str) -> float:
    """The number of a column."""
    path, _, divisor = column.partition("/")
    found = look_up(row, path)
    number = max(found) if isinstance(found, list) else found
    if not divisor:
        return number
    return number / (float(divisor) if NUMBER.fullmatch(divisor) else figure(row, divisor))


def written(number: float, shown: str) -> str:
    """The number with the digits and the notation of the one that the page shows."""
    mantissa, exponent, _ = shown.partition("e")
    decimals = len(mantissa.partition(".")[2])
    return f"{number:,.{decimals}{exponent or 'f'}}"


def with_numbers(line: str, numbers: list[float]) -> str:
    """The line with these numbers as its last ones. Raises ValueError if it has fewer."""
    shown = NUMBER.findall(line)
    first = len(shown) - len(numbers)
    new = [written(number, old) for number, old in zip(numbers, shown[first:], strict=True)]
    texts = iter([*shown[:first], *new])
    return NUMBER.sub(lambda _: next(texts), line)


def filled(match: re.Match) -> str:
    """A comment and its block, with the numbers of the report. Raises ValueError if the rows are not as many."""
    report = json.loads((REPORTS / match["report"]).read_text(encoding="utf-8"))
    header, *lines = match["block"].split("\n")
    numbered = [index for index, line in enumerate(lines) if NUMBER.search(line)]
    columns = ""
    for index, row in zip(numbered, match["rows"].splitlines(), strict=True):
        paths, _, own_columns = row.partition(":")
        columns = own_columns or columns
        bases = [look_up(report, path) for path in paths.split()]
        numbers = [figure(base, column) for column in columns.split() for base in bases]
        lines[index] = with_numbers(lines[index], numbers)
    return "\n".join([match["comment"] + header, *lines])


def with_figures(page: str) -> str:
    """The text of a page with the numbers of the reports."""
    return BOUND.sub(filled, page)


def main() -> None:
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        new = with_figures(text)
        if new != text:
            page.write_text(new, encoding="utf-8")
            print(page.relative_to(ROOT))


if __name__ == "__main__":
    main()
