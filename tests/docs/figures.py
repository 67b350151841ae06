"""The measured figures in README.md and docs/: each is bound to a report, or to an output that a test compares.

    python tests/docs/figures.py    # writes the figures of the reports into the pages; exit code 1 if one is not bound

A figure is a number with decimals or with a unit, outside of code, links and versions. It may be repeated wherever its
page has it in an output, or with decimals in code. Every other paragraph, list or table with figures has a comment
directly before it, and an output of a command should have one:

    <!-- figures: reports/NAME.json; TERM TERM … -->                   the figures of a text, in their order
    <!-- figures: reports/NAME.json; rows: TERM …; columns: TERM … --> the cells of a table
    <!-- figures: given -->                                            not measured: definitions, settings, quotations
    <!-- figures: no report; WHAT IS KNOWN -->                         measured before reports were kept

The path of a report is relative to docs/. A term is a path of names in it, such as `random.result.accuracy`;
`a:b.seconds` is `a.seconds` divided by `b.seconds`. The term of a cell is its row's and then its column's, or the one
of the columns `a|b` that the row has. `a/b` is several figures in a cell. `-` is a figure, or cells, that stay as they
are. A percentage is 100 times the number.

In a report of `scripts/benchmark.py`, `VARIANT.WORKLOAD`, or the reverse, is the speed-up over `BertModel`.
`ms.WORKLOAD` is its milliseconds per batch, and `padding.WORKLOAD` the share of padding. `VARIANT.difference`,
`.lowest` and `.mean` are the largest difference, the lowest and the mean cosine over the workloads of the table, or of
the report if the table has none; `.peak` is the memory and `.texts` the texts per second, of the first of these
workloads. `decoding-8-beam-4` is a workload, too. In other reports, `runs` and `rows` are left
out of a path, `minutes` and `processor_minutes` are added to the seconds, and an element of a list is found by its
variant, precision or `epoch-N`.

The text of the page decides how many digits a figure has.
"""

import argparse
import json
import re
import statistics
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path

from pages import FENCED

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]

DIGITS = r"\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?"
UNIT = (
    r"(?:x|[\s-]*(?:%|percent|[mµ]?s|sec|seconds?|min|minutes?|h|hours?|times|[kMGT]i?B(?:/s)?|GFLOP/s|"
    r"(?:texts|tokens|requests)(?:/s| per second)|changed))(?!\w)"
)
RANGE = rf"\s*(?:–|to)\s*{DIGITS}{UNIT}"  # what follows the first number of 2 to 10 ms
FIGURE = re.compile(rf"(?<![\w.,/-]){DIGITS}(?:{UNIT}|(?={RANGE})|(?!\w|[.,/]\d))")
LIBRARY = (
    r"(?:Apache|Python|torch|PyTorch|transformers|safetensors|sentence-transformers|setfit|onnx\w*|ONNX Runtime|nncf|"
    r"openvino|OpenVINO|[Cc][Tt]ranslate2|torchao|Ray Data|vLLM|litserve|LitServe|Infinity|version|sections?|figure)"
)
VERSION = rf"\d(?:[\w.+]*\w)?(?!{UNIT})(?![\w.+]*\w)"
HIDDEN = re.compile(
    rf"`[^`]*`|<!--.*?-->|\]\([^)]*\)|\b{LIBRARY}\s+{VERSION}(?:\s+(?:to|and|or)\s+{VERSION})*", re.DOTALL
)
COMMENT = re.compile(r" *<!-- figures: (?P<terms>.*?) -->\n", re.DOTALL)
STATISTICS, KEPT, NONE = ("difference", "lowest", "mean", "peak", "texts"), "-", "–"


@dataclass
class Block:
    """A paragraph, list or table, and the terms of the comment before it."""

    line: int
    start: int
    text: str
    terms: str | None

    @property
    def is_table(self) -> bool:
        return self.text.startswith("|")


def blanked(match: re.Match) -> str:
    return re.sub(r"[^\n]", " ", match[0])


def blocks_of(page: str) -> Iterator[Block]:
    """The blocks of a page outside of fences, and the outputs with a comment.

    Raises:
        ValueError: a comment has nothing directly after it, or is not written as it should.
    """
    prose = FENCED.sub(blanked, page)
    fences = {match.start(): match for match in FENCED.finditer(page)}
    for match in re.finditer(r"(?:[^\n]*\S[^\n]*\n?)+", prose):
        comment = COMMENT.match(match[0])
        start, end = match.start() + (comment.end() if comment else 0), match.end()
        line = page.count("\n", 0, match.start()) + 1
        written_comments = re.findall(r"<!--\s*figures?\b", re.sub("`[^`]*`", "", match[0]))
        if len(written_comments) != (comment is not None):
            raise ValueError(f"line {line}: a comment is not alone before a text, or is misspelt")
        if comment and start == end:
            if start not in fences:
                raise ValueError(f"line {line}: the comment has no text, table or output directly after it")
            start, end = fences[start].span("text")
        terms = re.sub(r"\s+", " ", comment["terms"]) if comment else None
        yield Block(line, start, page[start:end], terms)


def figures_in(text: str) -> list[re.Match]:
    """The figures of a text: numbers with decimals or a unit."""
    visible, begins_range = HIDDEN.sub(blanked, text), re.compile(RANGE)
    return [
        match
        for match in FIGURE.finditer(visible)
        if re.search(rf"\.\d|\de[-+]?\d|{UNIT}$", match[0]) or begins_range.match(visible, match.end())
    ]


# ------------------------------------------------------------------------------------------------------------- reports


def benchmark_figures(report: dict, workloads: Iterable[str]) -> dict:
    """The speed-ups of a report of `scripts/benchmark.py`, by variant and workload, and by workload and variant."""
    rows = [row for row in report["rows"] if row["error"] is None]
    found: dict = {}
    for row in rows:
        found.setdefault(row["variant"], {})[row["workload"]] = row["vs_bert"]
        if row["variant"] == "bert":
            found.setdefault("ms", dict.fromkeys(STATISTICS, ""))[row["workload"]] = 1000 * row["seconds_per_batch"]
            found.setdefault("padding", {})[row["workload"]] = 1 - row["fill_rate"]
    for variant in {row["variant"] for row in rows}:
        own = [row for row in rows if row["variant"] == variant]
        own = [row for row in own if row["workload"] in workloads] or own
        sequences = [row["sequences"] for row in own]
        found[variant] |= {
            "difference": max(row["max_abs"] for row in own),
            "lowest": min(row["cosine_lowest"] for row in own),
            "mean": statistics.fmean([row["cosine_mean"] for row in own], sequences),
            "peak": own[0].get("peak_anonymous_mib", NONE),  # not in older reports
            "texts": own[0]["sequences_per_second"],
        }
    steps = {
        f"decoding-{row['batch']}-{row['decoding'].replace(' ', '-')}": row["vs_bert"] for row in report["decoding"]
    }
    if report["training"] is not None:
        steps["training"] = {"ours": report["training"]["vs_bert"]}
    for variant in {variant for speed_ups in steps.values() for variant in speed_ups}:
        found.setdefault(variant, {}).update({step: of.get(variant, NONE) for step, of in steps.items()})
    by_workload: dict = {}
    for variant, numbers in found.items():
        for workload, number in numbers.items():
            by_workload.setdefault(workload, {})[variant] = number
    return found | by_workload


def read_figures(folder: Path, name: str, workloads: Iterable[str] = ()) -> dict:
    """The figures of a report. Raises ValueError if there is none."""
    if not (folder / name).is_file():
        raise ValueError(f"there is no {name}; expected a report in docs/reports")
    report = json.loads((folder / name).read_text(encoding="utf-8"))
    if "decoding" in report:
        return benchmark_figures(report, workloads)
    for run in report.get("runs", {}).values():
        run |= {name.replace("seconds", "minutes"): run[name] / 60 for name in ("seconds", "processor_seconds")}
    return report | report.get("runs", {}) | by_name(report.get("rows", []))


def by_name(rows: list[dict]) -> dict:
    """The elements of a list by their variant, precision or epoch. Raises ValueError if two have the same name."""
    found: dict = {}
    for row in rows:
        name = str(row.get("variant") or row.get("precision") or f"epoch-{row.get('epoch')}").replace(" ", "-")
        if name in found:
            raise ValueError(f"the report has two {name} in a list")
        found[name] = row
    return found


def look_up(figures: dict, path: str) -> float | str:
    """The number of a path. Raises ValueError if there is none."""
    found = figures
    names = path.split(".")
    for position, name in enumerate(names):
        if isinstance(found, list):
            found = by_name(found)
        if not isinstance(found, dict) or name not in found:
            known = ", ".join(found) if isinstance(found, dict) else "no names"
            raise ValueError(f"the report has no {'.'.join(names[: position + 1])}; it has {known}")
        found = found[name]
    if not isinstance(found, (int, float, str)):
        raise ValueError(f"{path} is no number in the report; it has {', '.join(map(str, found))}")
    return found


def evaluate(figures: dict, term: str) -> float | str:
    """The number of a term: of a path, or of two whose last name is the same (`a:b.seconds`)."""
    base, colon, path = term.rpartition(":")
    number = look_up(figures, path)
    return look_up(figures, f"{base}.{path.rpartition('.')[2]}") / number if colon else number


def written(number: float | str, like: str) -> str:
    """A number with the digits and the notation of another text."""
    if isinstance(number, str):
        return number
    digits, unit = re.fullmatch(rf"({DIGITS})((?:{UNIT})?)", like).groups() if re.match(r"\d", like) else ("0.0", "")
    number *= 100 if unit.strip() == "%" else 1
    mantissa, _, exponent = digits.partition("e")
    decimals = len(mantissa.partition(".")[2])
    if exponent or 0 < abs(number) < 0.5 * 10**-decimals:
        text = f"{number:.{decimals if exponent else 1}e}"
        return (text if re.match(r"[-+]?0", exponent) else re.sub(r"e([-+])0", r"e\1", text)) + unit
    return f"{number:,.{decimals}f}{unit}"


def with_figures(text: str, matches: list[re.Match], terms: list[str], figures: dict) -> str:
    """The text with the number of each term in place of each match. Raises ValueError if they are not as many."""
    if len(matches) != len(terms):
        shown = ", ".join(match[0] for match in matches)
        raise ValueError(f"the comment has {len(terms)} terms; expected one for each of {shown or 'no figure'}")
    for match, term in reversed(list(zip(matches, terms, strict=True))):
        if term != KEPT:
            text = text[: match.start()] + written(evaluate(figures, term), match[0]) + text[match.end() :]
    return text


def table_with_figures(table: str, rows: list[str], columns: list[str], figures: dict) -> str:
    """The table with the numbers of its rows and columns."""
    header, ruler, *lines = table.splitlines()
    cells = [[cell.strip() for cell in line.strip().removeprefix("|").removesuffix("|").split("|")] for line in lines]
    if len(cells) != len(rows) or any(len(row) != 1 + len(columns) for row in cells):
        raise ValueError(
            f"the table has {len(cells)} rows and {len(cells[0]) - 1} columns; the comment names "
            f"{len(rows)} and {len(columns)}"
        )
    new = [header, ruler]
    for row, (label, *own) in zip(rows, cells, strict=True):
        filled = [label, *(cell_with_figures(*pair, row, figures) for pair in zip(own, columns, strict=True))]
        if label in figures and label not in row.split("/"):
            raise ValueError(f"the label {label!r} is in the row of {row!r}")
        new.append("".join(f"| {cell} " if cell else "| " for cell in filled) + "|")
    return "\n".join(new) + "\n"


def cell_with_figures(cell: str, column: str, row: str, figures: dict) -> str:
    if KEPT in (row, column):
        return cell
    terms = [KEPT if KEPT in (r, c) else term_of(r, c, figures) for r in row.split("/") for c in column.split("/")]
    matches = list(re.finditer(rf"{NONE}|{FIGURE.pattern}", cell))
    if not matches and terms != [KEPT] and not isinstance(evaluate(figures, terms[0]), str):
        raise ValueError(f"the cell {cell!r} of {row} and {column} has no number; expected one, with its digits")
    return with_figures(cell, matches, terms, figures) if matches else cell


def term_of(row: str, column: str, figures: dict) -> str:
    """The term of a cell, with the first of the names `a|b` that the row has."""
    base, colon, names = column.rpartition(":")
    for name in names.split("|"):
        try:
            look_up(figures, f"{row}.{name}")
            break
        except ValueError:
            pass
    return f"{base}{colon}{row}.{name}"


# --------------------------------------------------------------------------------------------------------------- pages


def bound_text(block: Block, folder: Path) -> str:
    """The text of a block as its report has it.

    Raises:
        ValueError: the comment does not fit the report or the text.
    """
    name, *others = (term.strip() for term in block.terms.split(";"))
    if name.startswith("reports/") and block.is_table:
        named = {key.strip(): names.split() for key, _, names in (term.partition(":") for term in others)}
        if named.keys() != {"rows", "columns"}:
            raise ValueError(f"the comment has {', '.join(named) or 'no names'}; expected rows and columns")
        figures = read_figures(folder, name, {*named["rows"], *named["columns"]})
        return table_with_figures(block.text, named["rows"], named["columns"], figures)
    if name.startswith("reports/"):
        terms = " ".join(others).split()
        return with_figures(block.text, figures_in(block.text), terms, read_figures(folder, name))
    if name != "given" and not (name == "no report" and any(others)):
        raise ValueError(f"the comment names {name!r}; expected a report, 'given', or 'no report' and a reason")
    return block.text


def bound_blocks(page: Path, folder: Path) -> Iterator[tuple[Block, str]]:
    """The blocks with a comment, and their text as the report has it. Raises ValueError, with the line."""
    try:
        for block in blocks_of(page.read_text(encoding="utf-8")):
            if block.terms is not None:
                try:
                    yield block, bound_text(block, folder)
                except (ValueError, TypeError, LookupError, ZeroDivisionError) as error:
                    raise ValueError(f"line {block.line}: {error}") from error
    except ValueError as error:
        raise ValueError(f"{page.name}, {error}.") from error


def numbers_in(page: str) -> list[Decimal]:
    """The numbers in the outputs of a page, and those with decimals in its code."""
    found: list[str] = []
    for match in FENCED.finditer(page):
        numbers = re.findall(rf"(?<![\w.]){DIGITS}(?!\w)", match["text"])
        is_output = match["info"].split()[:1] in (["text"], ["json"])
        found += numbers if is_output else [number for number in numbers if re.search(r"\.\d|\de", number)]
    return [Decimal(number.replace(",", "")) for number in found]


def is_shown(figure: str, numbers: list[Decimal]) -> bool:
    """Whether a figure is one of the numbers, rounded to its digits."""
    digits, unit = re.match(rf"({DIGITS})(.*)", figure, re.DOTALL).groups()
    expected = Decimal(digits.replace(",", ""))
    tolerance = Decimal(5).scaleb(expected.as_tuple().exponent - 1)
    scales = (1, 100) if unit.strip() == "%" else (1,)
    return any(abs(number * scale - expected) <= tolerance for number in numbers for scale in scales)


def unbound_figures(page: Path) -> list[tuple[int, str]]:
    """The line and the text of each figure that has no comment, and is in no block of code or output of its page."""
    text = page.read_text(encoding="utf-8")
    numbers = numbers_in(text)
    return [
        (text.count("\n", 0, block.start + match.start()) + 1, match[0])
        for block in blocks_of(text)
        if block.terms is None
        for match in figures_in(block.text)
        if not is_shown(match[0], numbers)
    ]


def rewrite(page: Path, folder: Path) -> bool:
    """Writes the figures into a page. Returns whether any was different."""
    text = new = page.read_text(encoding="utf-8")
    for block, expected in reversed(list(bound_blocks(page, folder))):
        new = new[: block.start] + expected + new[block.start + len(block.text) :]
    if new != text:
        page.write_text(new, encoding="utf-8")
    return new != text


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args(argv)
    changed, errors, unbound = [], [], []
    for page in PAGES:
        try:
            changed += [page.name] if rewrite(page, ROOT / "docs") else []
            unbound += [f"{page.relative_to(ROOT)}:{line}: {figure}" for line, figure in unbound_figures(page)]
        except ValueError as error:
            errors.append(str(error))
    print(f"rewritten: {', '.join(changed) or 'nothing'}")
    print("\n".join([*unbound, f"figures that are not bound: {len(unbound)}", *errors]))
    return 1 if unbound or errors else 0


if __name__ == "__main__":
    sys.exit(main())
