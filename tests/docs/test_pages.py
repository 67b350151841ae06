"""The pages of docs/, and the commands of the README: what they show is what happens."""

import csv
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

import convert
from pages import FENCED, agrees, machine_marks, make_targets, python_blocks, run, script_calls
from support.folders import ROOT, SCRIPTS

CHAPTERS = sorted((ROOT / "docs" / "course").glob("[0-9]*.md"))
PAGES = sorted((ROOT / "docs").rglob("*.md"))
PAGES_AND_README = [*sorted(ROOT.glob("*.md")), *PAGES]
PICTURES = ROOT / "docs" / "course" / "pictures"
MAX_PICTURE_BYTES = 60_000
# Of blocks that run elsewhere: `slow` in `make course-full`, `ecosystem`, `corpus`, `server` and `embedder` in `make
# test-ecosystem`; or that need VNNI.
MARKS = {"slow", "ecosystem", "corpus", "server", "embedder", "vnni"}


def each(pages):
    """Runs a test for each of these pages."""
    return pytest.mark.parametrize("page", pages, ids=lambda page: str(page.relative_to(ROOT)))


@each(PAGES)
def test_the_python_prints_what_the_page_shows(page, minilm, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MPLBACKEND", "Agg")
    (tmp_path / "scripts").symlink_to(SCRIPTS)
    blocks = python_blocks(page.read_text(encoding="utf-8"))
    assert {mark for block in blocks for mark in block.marks} <= MARKS
    if any('"my-model"' in block.code for block in blocks):
        assert convert.main([minilm, "my-model"]) == 0
    run(page, marks=machine_marks(), model=minilm)


def test_similar_sentences_are_those_that_the_page_shows(minilm, tmp_path):
    assert convert.main([minilm, str(tmp_path / "my-model")]) == 0
    command = [sys.executable, str(ROOT / "docs" / "examples" / "similarity.py"), "my-model"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    first, printed = done.stdout.split("\n", 1)
    assert "transformers_modules.my" in first
    shown = [match["text"] for match in FENCED.finditer((ROOT / "docs" / "embeddings.md").read_text("utf-8"))]
    assert any(agrees(printed, text) for text in shown)


@each([page for page in PAGES if page.name != "README.md"])
def test_the_index_of_its_folder_lists(page):
    assert f"]({page.name})" in (page.parent / "README.md").read_text(encoding="utf-8")


def test_the_version_is_everywhere_the_same():
    changes, citation, project = (
        (ROOT / name).read_text("utf-8") for name in ("CHANGELOG.md", "CITATION.cff", "pyproject.toml")
    )
    version = re.search('^version = "(.*)"$', project, re.MULTILINE)[1]
    assert f"\nversion: {version}\n" in citation
    first = re.search("^## (.*)$", changes, re.MULTILINE)[1]
    if first != "Unreleased":
        date = re.search('^date-released: "(.*)"$', citation, re.MULTILINE)[1]
        assert first == f"{version} ({date})"


@each(CHAPTERS)
def test_a_chapter_names_its_exercises(page):
    exercises = SCRIPTS / "data" / "course"
    (tests,) = exercises.glob(f"tests/test_{page.name[:2]}_*.py")
    file = f"{tests.stem[8:]}.py"
    text = page.read_text(encoding="utf-8")
    assert f"scratchbert course check {int(page.name[:2])}\n" in text
    assert f"`{file}`" in text
    assert f"docs/course/{page.name}" in (exercises / file).read_text(encoding="utf-8")


def test_the_files_that_a_saved_model_carries_are_listed():
    text = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
    row = re.compile(r"^\| `([\w/]+\.py)` \|", re.MULTILINE)
    sections = dict(section.split("\n", 1) for section in text.split("\n### ")[1:])
    copied = row.findall(sections["Copied into every saved model"])
    installed = row.findall(sections["Installed only"])
    package = ROOT / "modeling_scratchbert"
    paths = {path.relative_to(package).as_posix() for path in package.rglob("*.py") if path.name != "__init__.py"}
    assert set(copied) == {path for path in paths if "/" not in path}
    assert set(installed) == {path for path in paths if "/" in path}
    for page in (ROOT / "README.md", ROOT / "docs" / "trust.md"):
        assert f"{len(copied)} files of code" in page.read_text(encoding="utf-8").replace("[", "")


@cache
def flags_of(script: str) -> set[str]:
    """The flags in the `--help` of a script, with - in place of _."""
    name, *task = script.split()
    command = [sys.executable, str(SCRIPTS / f"{name}.py"), *task, "--help"]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return {flag.replace("_", "-") for flag in re.findall(r"--[a-z][\w-]*", text)}


@each(PAGES_AND_README)
def test_every_script_and_flag_exists(page):
    for script, flags in script_calls(page.read_text(encoding="utf-8")):
        assert {flag.replace("_", "-") for flag in flags} <= flags_of(script), script


@each(PAGES_AND_README)
def test_every_make_target_exists(page):
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    assert set(make_targets(page.read_text(encoding="utf-8"))) <= set(targets)


@each(PAGES_AND_README)
def test_every_link_within_the_repository_leads_somewhere(page):
    text = FENCED.sub("", page.read_text(encoding="utf-8"))
    headings = {slug(heading) for heading in re.findall(r"^#+ (.*)$", text, re.MULTILINE)}
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        path, _, anchor = target.partition("#")
        if not re.match(r"[a-z]+:", target):
            assert (page.parent / path).exists(), f"{page.name}: there is no {target}"
            assert path or anchor in headings, f"{page.name}: there is no heading {target}"


def slug(heading: str) -> str:
    """The anchor that GitHub gives to a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


@each(CHAPTERS)
def test_a_chapter_draws_the_pictures_that_it_shows(page):
    text = page.read_text(encoding="utf-8")
    shown = re.findall(r"\]\(pictures/([^)]+\.png)\)", text)  # a drawing is an .svg file
    assert shown == re.findall(r'savefig\("([^"]+)"', text)
    assert sorted(shown) == sorted(path.name for path in PICTURES.glob(f"{page.name[:2]}_*"))


def test_the_pages_show_the_pictures_that_are_drawn_by_hand():
    """No picture is large, neither of these nor of those that code draws."""
    text = "".join(page.read_text(encoding="utf-8") for page in PAGES_AND_README)
    drawings = sorted(PICTURES.glob("*.svg"))
    assert set(re.findall(r"pictures/([^)/]+\.svg)\)", text)) == {path.name for path in drawings}
    for path in drawings:
        drawing = path.read_text(encoding="utf-8")
        assert "<title" in drawing
        assert "<desc" in drawing
    assert all(path.stat().st_size < MAX_PICTURE_BYTES for path in PICTURES.iterdir())


def test_the_course_shows_what_the_first_documents_had():
    """The code or the output of a chapter has each number and expression of documents.csv."""
    shown = {}
    for page in CHAPTERS:
        shown[page.stem] = "\n".join(match["text"] for match in FENCED.finditer(page.read_text(encoding="utf-8")))
    with (Path(__file__).parent / "documents.csv").open(encoding="utf-8") as file:
        missing = [row for row in csv.DictReader(file) if row["text"] not in shown[row["page"]]]
    assert not missing
