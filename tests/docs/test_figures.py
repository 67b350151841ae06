"""The figures in README.md and docs/ are bound to reports and outputs, and are the same."""

import json

import pytest
from PIL import Image

from figures import PAGES, bound_blocks, read_figures, rewrite, unbound_figures, written
from pictures import DIGEST, REPORT, digest, for_readme
from record import add, shortened
from support.folders import ROOT
from toolkit.pictures import plot_speeds

PAGE = """# Speed

<!-- figures: reports/made-up.json; rows: ms ours ours-int8; columns: reviews single difference lowest mean -->
| | film reviews | 12 tokens | largest difference | lowest cosine | mean cosine |
| --- | --: | --: | --: | --: | --: |
| `BertModel`, ms per batch | 1,500 | 55 | | | |
| ours | 1.69 | 0.98 | 3.1e-06 | 1.00000 | 1.00000 |
| ours-int8 | **3.72** | 2.79 | 1.0e-1 | 0.99730 | 0.99900 |

<!-- figures: reports/made-up.json; rows: reviews training decoding-8-beam-4 -; columns: - ours ours-int8 bert/ours -->
| | name | as loaded | int8 | all |
| --- | --: | --: | --: | --: |
| film reviews | b | 1.69 | 3.72 | 1.00 / 1.69 |
| a training step | c | 1.58 | – | – / 1.58 |
| a step of decoding | d | 1.15 | 1.79 | 1.00 / 1.15 |
| saved as | a | b | c | d |

<!-- figures: reports/runs.json;
     predict.seconds predict.result.accuracy - encode:predict.seconds predict.minutes -->
`predict 0.25` takes 30.0 seconds, and 91.3 % of the labels are right ([there](page.md#2.5), torch 2.13). Of 0.5,
it is 3.3 times as fast as `encode`, in 0.50 minutes.

<!-- figures: reports/runs.json; rows: encode predict;
     columns: seconds encode:seconds result.accuracy|result.share -->
| | seconds | times as fast | accuracy |
| --- | --: | --: | --: |
| `encode` | 100 | 1.00 | 90 % |
| `predict` | 30 | 3.34 | 91.3 % |

<!-- figures: reports/runs.json; predict.result.accuracy - -->
```
accuracy 0.9128, rate 0.1
```

<!-- figures: no report; measured in 2026 -->
The tolerance is 1.25e-7.

```text
recall: 0.0517
```

Its recall is 0.05, or 5.2 %, in 2 steps of version 1.5 files.
"""


def row(variant, workload, sequences, seconds, speed_up, max_abs, lowest, mean):
    return {
        "variant": variant,
        "workload": workload,
        "sequences": sequences,
        "error": None,
        "seconds_per_batch": seconds,
        "sequences_per_second": 32 / seconds,
        "fill_rate": 0.54,
        "vs_bert": speed_up,
        "max_abs": max_abs,
        "cosine_lowest": lowest,
        "cosine_mean": mean,
    }


@pytest.fixture
def page(tmp_path):
    """A page with two reports beside it."""
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
    benchmark = {"rows": rows, "training": {"vs_bert": 1.58}, "decoding": decoding}
    runs = {
        "encode": {"seconds": 100.2, "processor_seconds": 190.0, "result": {"share": 0.9}},
        "predict": {"seconds": 30.04, "processor_seconds": 59.0, "result": {"accuracy": 0.9128}},
    }
    (tmp_path / "reports").mkdir()
    (tmp_path / "reports" / "made-up.json").write_text(json.dumps(benchmark))
    (tmp_path / "reports" / "runs.json").write_text(json.dumps({"machine": {}, "runs": runs}))
    (tmp_path / "page.md").write_text(PAGE, encoding="utf-8")
    return tmp_path / "page.md"


def differing(page) -> list[int]:
    """The lines of the comments before texts that are not as in the report."""
    return [block.line for block, expected in bound_blocks(page, page.parent) if block.text != expected]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
class TestPages:
    def test_the_figures_are_those_of_their_reports(self, page):
        for block, expected in bound_blocks(page, ROOT / "docs"):
            assert block.text == expected, f"{page.name}, line {block.line}: run `python tests/docs/figures.py`"

    def test_each_figure_is_bound(self, page):
        assert unbound_figures(page) == []


@pytest.mark.parametrize("path", sorted((ROOT / "docs" / "reports").glob("*.json")), ids=lambda path: path.name)
def test_a_report_is_of_a_commit_and_used(path):
    commit = json.loads(path.read_text(encoding="utf-8"))["machine"]["commit"]
    assert commit, "the report names no commit; run the benchmark in a clone"
    assert not commit.endswith("-dirty"), "commit the code, then run the benchmark again"
    assert any(f"figures: reports/{path.name};" in page.read_text(encoding="utf-8") for page in PAGES)


def test_the_speeds_are_drawn(tmp_path):
    plot_speeds(for_readme(json.loads(REPORT.read_text(encoding="utf-8"))), tmp_path / "speed.png")
    assert Image.open(tmp_path / "speed.png").size == Image.open(ROOT / "docs" / "speed.png").size


@pytest.mark.parametrize("name", ["benchmarks.png", "speed.png"])
def test_a_picture_is_of_its_report(name):
    assert Image.open(ROOT / "docs" / name).text[DIGEST] == digest()


def test_the_page_is_as_its_reports(page):
    assert differing(page) == []
    assert not rewrite(page, page.parent)
    assert unbound_figures(page) == []


@pytest.mark.parametrize(
    ("old", "new", "line"),
    [
        ("| 1,500 |", "| 1,501 |", 3),
        ("| ours | 1.69", "| ours | 1.70", 3),
        ("0.99730", "0.99731", 3),
        ("3.1e-06", "3.1e-07", 3),
        ("1.0e-1", "1.1e-1", 3),
        ("**3.72**", "**3.73**", 3),
        ("| 1.79 |", "| 1.80 |", 10),
        ("30.0 seconds", "30.1 seconds", 18),
        ("91.3 % of", "91.4 % of", 18),
        ("3.3 times", "3.4 times", 18),
        ("| 3.34 |", "| 3.35 |", 23),
        ("| 91.3 % |", "| 91.2 % |", 23),
        ("accuracy 0.9128", "accuracy 0.9129", 30),
    ],
)
def test_a_changed_figure_is_found_and_rewritten(old, new, line, page):
    assert PAGE.count(old) == 1
    page.write_text(PAGE.replace(old, new), encoding="utf-8")
    assert differing(page) == [line]
    assert rewrite(page, page.parent)
    assert page.read_text(encoding="utf-8") == PAGE


@pytest.mark.parametrize(
    ("number", "like", "expected"),
    [
        (0.00000512, "3.1e-06", "5.1e-06"),
        (0.00000512, "3e-6", "5e-6"),
        (1234.5, "1.0", "1,234.5"),
        (0.41553, "49.2 %", "41.6 %"),
        (0.0004, "0.5", "4.0e-4"),
        (0.0, "0.5", "0.0"),
        (3.0, "–", "3.0"),
        ("–", "1.5", "–"),
    ],
)
def test_a_figure_keeps_its_digits(number, like, expected):
    assert written(number, like) == expected


@pytest.mark.parametrize(
    ("old", "new", "figure"),
    [
        ("recall is 0.05", "recall is 0.06", "0.06"),
        ("or 5.2 %", "or 5.3 %", "5.3 %"),
        ("in 2 steps", "in 2 minutes", "2 minutes"),
        ("in 2 steps", "in 2 MiB", "2 MiB"),
        ("in 2 steps", "within 2e-6", "2e-6"),
        ("in 2 steps", "in 2ms", "2ms"),
        ("in 2 steps", "in 2-second steps", "2-second"),
        ("in 2 steps", "OpenVINO 2 ms", "2 ms"),
        ("in 2 steps", "by 2%", "2%"),
        ("in 2 steps", "2x", "2x"),
        ("# Speed\n", "# Speed\n\n- It is 1.5 times as fast.\n", "1.5 times"),
        ("# Speed\n", "# Speed\n\n| | a |\n| --- | --- |\n| b | 7.25 |\n", "7.25"),
    ],
)
def test_a_figure_without_a_comment_is_found(old, new, figure, page):
    page.write_text(PAGE.replace(old, new), encoding="utf-8")
    assert [text for _, text in unbound_figures(page)] == [figure]


def test_what_is_kept_stays(page):
    changed = PAGE
    for old, new in (("reviews | b |", "reviews | f |"), ("saved as | a |", "saved as | e |"), ("0.5,", "0.6,")):
        changed = changed.replace(old, new)
    page.write_text(changed, encoding="utf-8")
    assert differing(page) == []


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("ms ours ours-int8;", "ms ours onnx;", "line 3: the report has no onnx; it has .*ours"),
        ("columns: reviews single", "columns: reviews full-128", "line 3: the report has no ms.full-128; it has "),
        ("| ours | 1.69", "| ours-int8 | 1.69", "line 3: the label 'ours-int8' is in the row of 'ours'"),
        ("made-up.json; rows: ms", "other.json; rows: ms", "there is no reports/other.json"),
        ("rows: ms ours ours-int8;", "rows: ms ours;", "the table has 3 rows and 5 columns; the comment names 2 and 5"),
        ("rows: ms ours ours-int8; ", "", "the comment has columns; expected rows and columns"),
        ("<!-- figures: no report", "<!-- figure: no report", "line 35: a comment is not alone before a text, or is"),
        ("The tolerance", "The\n<!-- figures: given -->\ntolerance", "line 35: a comment is not alone before a text"),
        (" -->\n| | film", " -->\n\n| | film", "line 3: the comment has no text, table or output directly after it"),
        ("| 0.98 |", "| fast |", "the cell 'fast' of ours and single has no number"),
        (
            "predict.seconds predict.result",
            "predict.result",
            "the comment has 4 terms; expected one for each of 30.0 seconds, ",
        ),
        (
            "result.accuracy|result.share -->",
            "result -->",
            "encode.result is no number in the report; it has share",
        ),
        (
            "figures: no report; measured in 2026",
            "figures: measured",
            "the comment names 'measured'; expected a report",
        ),
        ("figures: no report; measured in 2026", "figures: no report;", "the comment names 'no report'; expected"),
    ],
)
def test_what_is_not_in_the_report_is_said(old, new, words, page):
    assert old in PAGE
    page.write_text(PAGE.replace(old, new), encoding="utf-8")
    with pytest.raises(ValueError, match=rf"page\.md.*{words}"):
        differing(page)


def test_a_report_is_short():
    row, step = {"precision": "int8", "cosines": [0.9]}, {"step": 10, "loss": 0.7}
    result = {"data": "x", "rows": [row], "history": [step, step | {"validation": {"loss": 0.6}}]}
    assert shortened(result) == {"rows": [{"precision": "int8"}], "history": [step | {"validation": {"loss": 0.6}}]}


def test_runs_of_one_machine_are_added_to_a_report(tmp_path):
    path, machine = tmp_path / "runs.json", {"processor": "A", "commit": "1"}
    for name, seconds in (("a", 60), ("b", 1), ("b", 3)):
        add(path, name, {"seconds": seconds, "processor_seconds": 1, "result": None}, machine)
    figures = read_figures(tmp_path, "runs.json")
    assert (figures["a"]["minutes"], figures["b"]["seconds"]) == (1, 3)
    with pytest.raises(ValueError, match=r"runs\.json is of another commit; expected one report for each"):
        add(path, "c", {}, machine | {"commit": "2"})
