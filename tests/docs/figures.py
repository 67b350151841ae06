"""The tables of figures in README.md and docs/: writes their cells from the reports of `scripts/benchmark.py --json`.

    python tests/docs/figures.py    # rewrites each table that is bound to a report

A comment directly before a table binds it; the path of the report is relative to docs/:

    <!-- figures: reports/zen4.json; rows: ms ours onnx; columns: reviews single difference -->
    | | film reviews | 12 tokens | largest difference |
    | --- | --: | --: | --: |

Rows are variants and columns are workloads, or the other way round. A cell is the speed-up over `BertModel`. Other
names:

- `ms` in place of a variant: milliseconds per batch of `BertModel`.
- `difference`, `lowest`, `mean` in place of a workload: the largest difference, the lowest and the mean cosine, over
  the workloads of the table, or of the report if the table has none.
- `training`, and `decoding-8-greedy` or `decoding-32-beam-4`: workloads of steps. `–` where a variant has none.
- `a/b`: two figures in one cell.
- `-`: the cells stay as they are.

The header, and labels of rows that are not names of variants, stay as they are. Without rows, the labels are the names.
"""

import json
import re
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BOUND = re.compile(r"^<!-- figures: (?P<terms>.*) -->\n(?P<table>(?:\|.*\n)+)", re.MULTILINE)
MS, STATISTICS, KEPT, NONE = "ms", ("difference", "lowest", "mean"), "-", "–"
MS_LABEL = "`BertModel`, ms per batch"


def read_report(folder: Path, name: str) -> dict:
    """The report of this name.

    Raises:
        ValueError: there is none.
    """
    if not (folder / name).is_file():
        raise ValueError(f"there is no {name}; expected a report that scripts/benchmark.py --json docs/{name} writes")
    return json.loads((folder / name).read_text(encoding="utf-8"))


class Figures:
    """The figures of a report, as text."""

    def __init__(self, report: dict):
        rows = [row for row in report["rows"] if row["error"] is None]
        self.rows = {(row["variant"], row["workload"]): row for row in rows}
        self.steps = {f"decoding-{row['batch']}-{row['decoding'].replace(' ', '-')}": row["vs_bert"]
                      for row in report["decoding"]}  # fmt: skip
        if report["training"] is not None:
            self.steps["training"] = {"ours": report["training"]["vs_bert"]}
        of_steps = [variant for speed_ups in self.steps.values() for variant in speed_ups]
        self.variants = list(dict.fromkeys([*(row["variant"] for row in rows), *of_steps]))
        self.workloads = [*dict.fromkeys(row["workload"] for row in rows), *self.steps]

    def check(self, names: list[str], known: list[str], kind: str) -> None:
        """Raises ValueError for a name that is not in the report."""
        unknown = {part for name in names for part in name.split("/")} - {*known, KEPT}
        if unknown:
            raise ValueError(f"the report has no {kind} {', '.join(sorted(unknown))}; it has {', '.join(known)}")

    def cell(self, variant: str, workload: str, workloads: list[str]) -> str:
        """The text for these names, which may be pairs."""
        pairs = [(v, w) for v in variant.split("/") for w in workload.split("/")]
        return " / ".join(self.figure(*pair, workloads) for pair in pairs)

    def figure(self, variant: str, workload: str, workloads: list[str]) -> str:
        if KEPT in (variant, workload):
            return NONE
        if workload in self.steps:
            speed_up = self.steps[workload].get(variant)
            return NONE if speed_up is None else f"{speed_up:.2f}"
        if workload in STATISTICS:
            return "" if variant in (MS, "bert") else self.statistic(variant, workload, workloads)
        row = self.rows.get(("bert" if variant == MS else variant, workload))
        if row is None:
            raise ValueError(f"the report has no {variant} on {workload}")
        return f"{1000 * row['seconds_per_batch']:,.0f}" if variant == MS else f"{row['vs_bert']:.2f}"

    def statistic(self, variant: str, name: str, workloads: list[str]) -> str:
        rows = [row for key, row in self.rows.items() if key[0] == variant and (key[1] in workloads or not workloads)]
        if name == "difference":
            return f"{max(row['max_abs'] for row in rows):.1e}"
        if name == "lowest":
            return f"{min(row['cosine_lowest'] for row in rows):.5f}"
        sequences = [row["sequences"] for row in rows]
        return f"{statistics.fmean([row['cosine_mean'] for row in rows], sequences):.5f}"


def cells_of(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().removeprefix("|").removesuffix("|").split("|")]


def table_of(terms: str, table: str, folder: Path) -> str:
    """The table as the report has it.

    Args:
        terms: the words of the comment.
        table: as it is on the page.
        folder: the path of the report is relative to it.

    Raises:
        ValueError: the comment does not fit the report or the table.
    """
    name, *others = (term.strip() for term in terms.split(";"))
    named = {key.strip(): names.split() for key, _, names in (term.partition(":") for term in others)}
    if named.keys() != {"rows", "columns"}:
        raise ValueError(f"the comment has {', '.join(named) or 'no names'}; expected rows and columns")
    figures = Figures(read_report(folder, name))
    rows, columns = named["rows"], named["columns"]
    by_variant = any(part in (MS, *figures.variants) for name in rows for part in name.split("/"))
    variants, workloads = (rows, columns) if by_variant else (columns, rows)
    figures.check(variants, [MS, *figures.variants], "variant")
    figures.check(workloads, [*figures.workloads, *STATISTICS], "workload")
    measured = [name for name in workloads if name in figures.workloads and name not in figures.steps]

    header, ruler, *old = table.splitlines()
    old_cells = [cells_of(line) for line in old] or [[MS_LABEL if row == MS else row, *columns] for row in rows]
    if len(old_cells) != len(rows) or len(cells_of(header)) != 1 + len(columns):
        raise ValueError(f"the table has {len(old)} rows and {len(cells_of(header)) - 1} columns; the comment names "
                         f"{len(rows)} and {len(columns)}")  # fmt: skip
    lines = [header, ruler]
    for row, (label, *cells) in zip(rows, old_cells, strict=True):
        new = [row if label in figures.variants else label]
        for column, cell in zip(columns, cells, strict=True):
            variant, workload = (row, column) if by_variant else (column, row)
            new.append(cell if KEPT in (row, column) else figures.cell(variant, workload, measured))
        lines.append("".join(f"| {cell} " if cell else "| " for cell in new) + "|")
    return "\n".join(lines) + "\n"


def bound_tables(page: Path, folder: Path) -> Iterator[tuple[int, str, str]]:
    """The line of each comment, its table, and the table as the report has it.

    Raises:
        ValueError: a comment fits no report or table; the message has the line.
    """
    text = page.read_text(encoding="utf-8")
    if len(re.findall("^<!-- figures:", text, re.MULTILINE)) != len(BOUND.findall(text)):
        raise ValueError(f"{page.name}: a comment with figures has no table directly after it")
    for match in BOUND.finditer(text):
        line = text.count("\n", 0, match.start()) + 1
        try:
            yield line, match["table"], table_of(match["terms"], match["table"], folder)
        except ValueError as error:
            raise ValueError(f"{page.name}, line {line}: {error}.") from error


def rewrite(page: Path, folder: Path) -> bool:
    """Writes the figures into a page. Returns whether any was different."""
    text = new = page.read_text(encoding="utf-8")
    for _, table, expected in bound_tables(page, folder):
        new = new.replace(f" -->\n{table}", f" -->\n{expected}")
    if new != text:
        page.write_text(new, encoding="utf-8")
    return new != text


def main() -> int:
    """Returns the exit code."""
    try:
        changed = [page.name for page in PAGES if rewrite(page, ROOT / "docs")]
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    print(f"rewritten: {', '.join(changed) or 'nothing'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
