"""The checker of the pages finds wrong numbers, missing outputs and unknown commands."""

import pytest

from pages import agrees, commands, make_targets, python_blocks, run, without_outputs

PAGE = """# A page

```python
x = 2.0
print([x / 3, x])
```

```text
[0.67, 2.0]
```

```python slow
print(x)
```

```text
2.0
```
"""


@pytest.fixture
def run_page(tmp_path):
    """Runs a page with this text, and returns its namespace."""

    def write_and_run(text, marks=()):
        (tmp_path / "page.md").write_text(text, encoding="utf-8")
        return run(tmp_path / "page.md", marks)

    return write_and_run


@pytest.mark.parametrize(
    ("actual", "expected"),
    [
        ("0.6666667", "0.67"),
        ("[1, 2]  \n", "[1, 2]"),
        ("-0.0", "0.0"),
        ("9.996e-06", "1.00e-05"),
        ("loss: 0.125.", "loss: 0.13."),
        ("nan", "nan"),
    ],
)
def test_numbers_within_half_of_the_last_digit_agree(actual, expected):
    assert agrees(actual, expected)


@pytest.mark.parametrize(
    ("actual", "expected"),
    [
        ("0.68", "0.67"),
        ("0.6651", "0.66"),
        ("2", "3"),
        ("2.4", "2"),
        ("-0.5", "0.5"),
        ("1.1e-05", "1.0e-05"),
        ("[1, 2]", "[1 2]"),
        ("1 2", "1"),
        ("1", "1 2"),
        ("true", "True"),
        ("0.5", "nan"),
        ("a\nb", "a b"),
        ("bert2", "bert3"),
        ("1,235", "1,234"),
    ],
)
def test_others_do_not_agree(actual, expected):
    assert not agrees(actual, expected)


def test_a_page_that_is_right_runs(run_page):
    assert run_page(PAGE)["x"] == 2.0
    run_page(PAGE, marks=["slow"])


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("0.67", "0.68"),
        ("```text\n[0.67, 2.0]\n```\n", ""),
        ("[0.67, 2.0]\n", "[0.67, 2.0]\n1\n"),
        ("print([x / 3, x])", "pass"),
        ("print([x / 3, x])", "assert x == 3"),
    ],
    ids=["a wrong digit", "a missing output", "a line too many", "nothing printed", "a false assertion"],
)
def test_a_page_that_is_wrong_fails(run_page, old, new):
    assert old in PAGE
    with pytest.raises(AssertionError):
        run_page(PAGE.replace(old, new))


def test_the_error_names_the_line_and_shows_both_outputs(run_page):
    with pytest.raises(AssertionError, match=r"page\.md, line 3: (.|\n)*-\[0\.68, 2\.0\]\n\+\[0\.66\d*, 2\.0\]"):
        run_page(PAGE.replace("0.67", "0.68"))


def test_a_marked_block_runs_only_with_its_mark(run_page):
    wrong = PAGE.replace("print(x)", "print(x + 1)")
    run_page(wrong)
    with pytest.raises(AssertionError, match="line 12"):
        run_page(wrong, marks=["slow"])


def test_an_output_without_a_block_is_an_error():
    with pytest.raises(ValueError, match="line 3"):
        python_blocks("# A page\n\n```text\n1\n```\n")


def test_outputs_are_removed():
    assert without_outputs("```python\nprint(1)\n```\n\n```text\n1\n```\n\nMore.\n") == (
        "```python\nprint(1)\n```\n\nMore.\n"
    )


def test_commands_are_found_with_their_flags():
    page = """
```sh
python scripts/export.py MODEL --output model.onnx \\
    --format=onnx  # not --this
scratchbert predict model --text "a word" --num_beams 4
accelerate launch --config_file x.yaml "$(scratchbert --path train)" masked-lm --seed 2
make test-docs MODEL=a-bert
```

`python scripts/export.py --inline` is not in a block.

```python
"python scripts/export.py --python"
```
"""
    found = commands(page, {"export", "predict", "train"})
    assert [(one.line, one.script, one.flags) for one in found] == [
        (3, "export", ["--output", "--format"]),
        (5, "predict", ["--text", "--num_beams"]),
        (6, "train masked-lm", ["--seed"]),
    ]
    assert make_targets(page) == [(7, "test-docs")]
    with pytest.raises(ValueError, match="line 3: there is no script 'export'"):
        commands(page, {"predict"})
