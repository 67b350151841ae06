"""The figures in the tables of README.md and docs/ are those of the reports that the tables name."""

import json

import pytest

from figures import PAGES, Figures, bound_tables, read_report, rewrite
from support.folders import ROOT

PAGE = """# Speed

<!-- figures: reports/made-up.json; rows: ms ours ours-int8; columns: reviews single difference lowest mean -->
| | film reviews | 12 tokens | largest difference | lowest cosine | mean cosine |
| --- | --: | --: | --: | --: | --: |
| `BertModel`, ms per batch | 1,500 | 55 | | | |
| ours | 1.69 | 0.98 | 3.1e-06 | 1.00000 | 1.00000 |
| ours-int8 | 3.72 | 2.79 | 1.0e-01 | 0.99730 | 0.99900 |

<!-- figures: reports/made-up.json; rows: reviews training decoding-8-beam-4 -; columns: - ours ours-int8 bert/ours -->
| | Xeon | as loaded | int8 | all |
| --- | --: | --: | --: | --: |
| film reviews | 1.71 | 1.69 | 3.72 | 1.00 / 1.69 |
| a training step | 1.32 | 1.58 | – | – / 1.58 |
| a step of decoding | 1.16 | 1.15 | 1.79 | 1.00 / 1.15 |
| saved as | a | b | c | d |

After.
"""


def row(variant, workload, sequences, seconds, speed_up, max_abs, lowest, mean):
    return {
        "variant": variant, "workload": workload, "sequences": sequences, "error": None, "seconds_per_batch": seconds,
        "vs_bert": speed_up, "max_abs": max_abs, "cosine_lowest": lowest, "cosine_mean": mean,
    }  # fmt: skip


@pytest.fixture
def page(tmp_path):
    """A page with a report beside it."""
    rows = [
        row("bert", "reviews", 96, 1.5, 1.0, 0.0, 1.0, 1.0),
        row("bert", "single", 32, 0.0551, 1.0, 0.0, 1.0, 1.0),
        row("ours", "reviews", 96, 0.9, 1.688, 3.1e-6, 1.0, 1.0),
        row("ours", "single", 32, 0.056, 0.98, 3.0e-6, 1.0, 1.0),
        row("ours-int8", "reviews", 96, 0.4, 3.72, 0.08, 0.9973, 0.9986),
        row("ours-int8", "single", 32, 0.02, 2.79, 0.1, 0.9981, 1.0002),
        row("ours-int8", "mix", 32, 0.02, 2.79, 0.9, 0.1, 0.1),
        {"variant": "onnx", "workload": "reviews", "error": "ValueError: not today"},
    ]
    decoding = [{"batch": 8, "decoding": "beam 4", "vs_bert": {"bert": 1.0, "ours": 1.15, "ours-int8": 1.79}}]
    report = {"rows": rows, "training": {"vs_bert": 1.58}, "decoding": decoding}
    (tmp_path / "reports").mkdir()
    (tmp_path / "reports" / "made-up.json").write_text(json.dumps(report))
    (tmp_path / "page.md").write_text(PAGE, encoding="utf-8")
    return tmp_path / "page.md"


def differing(page) -> list[int]:
    """The lines of the comments before tables that are not as in the report."""
    return [line for line, table, expected in bound_tables(page, page.parent) if table != expected]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_tables_have_the_figures_of_their_reports(page):
    for line, table, expected in bound_tables(page, ROOT / "docs"):
        assert table == expected, f"{page.name}, line {line}: run `python tests/docs/figures.py`"


def test_the_first_screen_has_the_speed_ups_of_the_report():
    rows = Figures(read_report(ROOT / "docs", "reports/zen4.json")).rows
    first = (ROOT / "README.md").read_text(encoding="utf-8").partition("\n- **The same bits")[0]
    for variant in ("ours-optimised", "ours-int8"):
        assert f"{rows[variant, 'reviews']['vs_bert']:.1f} times" in first
    assert f"({rows['bert', 'reviews']['fill_rate']:.0%}".replace("%", " % non-padding tokens)") in first


@pytest.mark.parametrize("path", (ROOT / "docs").glob("reports/*.json"), ids=lambda path: path.name)
def test_a_report_is_of_a_commit(path):
    commit = json.loads(path.read_text(encoding="utf-8"))["machine"]["commit"]
    assert commit, "the report names no commit; run the benchmark in a clone"
    assert not commit.endswith("-dirty"), "commit the code, then run the benchmark again"


def test_tables_in_both_directions(page):
    assert differing(page) == []
    assert not rewrite(page, page.parent)


@pytest.mark.parametrize(
    ("old", "new", "line"),
    [
        ("| 1,500 |", "| 1,501 |", 3),
        ("| ours | 1.69", "| ours | 1.70", 3),
        ("0.99730", "0.99731", 3),
        ("3.1e-06", "3.1e-07", 3),
        ("| ours-int8 | 3.72", "| ours | 3.72", 3),
        ("| 1.79 |", "| 1.80 |", 10),
    ],
)
def test_a_changed_figure_is_found_and_rewritten(old, new, line, page):
    page.write_text(PAGE.replace(old, new), encoding="utf-8")
    assert differing(page) == [line]
    assert rewrite(page, page.parent)
    assert page.read_text(encoding="utf-8") == PAGE


def test_what_is_not_bound_stays(page):
    changed = PAGE.replace("1.71", "1.77").replace("| saved as | a |", "| saved as | e |").replace("After", "12.3")
    page.write_text(changed, encoding="utf-8")
    assert differing(page) == []


def test_rows_are_written_into_an_empty_table(page):
    lines = PAGE.splitlines(keepends=True)
    page.write_text("".join(lines[:5] + lines[8:]), encoding="utf-8")
    assert rewrite(page, page.parent)
    assert page.read_text(encoding="utf-8") == PAGE


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("ms ours ours-int8;", "ms ours onnx;", "line 3: the report has no variant onnx; it has ms, bert, ours, "),
        (
            "columns: reviews single",
            "columns: reviews full-128",
            "line 3: the report has no workload full-128; it has ",
        ),
        ("single difference", "mix difference", "the report has no ms on mix"),
        ("made-up.json; rows: ms", "other.json; rows: ms", "there is no reports/other.json; expected a report that "),
        ("rows: ms ours ours-int8;", "rows: ms ours;", "the table has 3 rows and 5 columns; the comment names 2 and 5"),
        ("rows: ms ours ours-int8; ", "", "the comment has columns; expected rows and columns"),
        (" -->\n| | film", " -->\n\n| | film", "has no table directly after it"),
    ],
)
def test_what_is_not_in_the_report_is_said(old, new, words, page):
    assert old in PAGE
    page.write_text(PAGE.replace(old, new), encoding="utf-8")
    with pytest.raises(ValueError, match=rf"page\.md.*{words}"):
        differing(page)
