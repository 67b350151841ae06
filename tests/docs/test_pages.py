"""The pages of docs/, and the commands of the README: what they show is what happens."""

import json
import re
import subprocess
import sys
from functools import cache

import pytest

import convert
from pages import FENCED, agrees, commands, machine_marks, make_targets, python_blocks, run
from support.folders import DATA, ROOT, SCRIPTS

CHAPTERS = sorted((ROOT / "docs" / "course").glob("[0-9]*.md"))
PAGES = [*sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "docs" / "course").glob("*.md"))]
PICTURES = ROOT / "docs" / "course" / "pictures"
MAX_PICTURE_BYTES = 60_000
# Of blocks that run elsewhere: `slow` in `make course-full`, `ecosystem` and `corpus` in `make test-ecosystem`; or that
# need VNNI.
MARKS = {"slow", "ecosystem", "corpus", "vnni"}

every_page, every_page_and_the_readme = (
    pytest.mark.parametrize("page", pages, ids=lambda page: str(page.relative_to(ROOT)))
    for pages in (PAGES, [*(ROOT / f"{name}.md" for name in ("README", "CHANGELOG", "CONTRIBUTING")), *PAGES])
)
every_chapter = pytest.mark.parametrize("page", CHAPTERS, ids=lambda page: page.name)


@every_page
def test_the_python_prints_what_the_page_shows(page, minilm, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MPLBACKEND", "Agg")
    (tmp_path / "scripts").symlink_to(SCRIPTS)
    blocks = python_blocks(page.read_text(encoding="utf-8"))
    assert {mark for block in blocks for mark in block.marks} <= MARKS
    if any('"my-model"' in block.code for block in blocks):
        assert convert.main([minilm, "my-model"]) == 0
    run(page, marks=machine_marks(), model=minilm)
    if page.name == "checkpoints.md":
        assert (tmp_path / "a-copy" / "modeling_scratchbert.py").exists()
        assert (tmp_path / "a-bert" / "model.safetensors").exists()


def test_similar_sentences_are_those_that_the_page_shows(minilm, tmp_path):
    assert convert.main([minilm, str(tmp_path / "my-model")]) == 0
    command = [sys.executable, str(ROOT / "docs" / "examples" / "similarity.py"), "my-model"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    first, printed = done.stdout.split("\n", 1)
    assert "transformers_modules.my" in first
    shown = [match["text"] for match in FENCED.finditer((ROOT / "docs" / "embeddings.md").read_text("utf-8"))]
    assert any(agrees(printed, text) for text in shown)


@pytest.mark.parametrize("page", [page for page in PAGES if page.name != "README.md"], ids=lambda page: page.name)
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


@every_chapter
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
    parts = re.split(r"^### (.*)$", text, flags=re.MULTILINE)
    copied, installed = (
        {
            file
            for row in re.findall(r"^\| (.*?) \|", parts[parts.index(title) + 1], re.MULTILINE)
            for file in re.findall(r"`([\w/]+\.py)`", row)
        }
        for title in ("Copied into every saved model", "Installed only")
    )
    package = ROOT / "modeling_scratchbert"
    paths = {path.relative_to(package).as_posix() for path in package.rglob("*.py") if path.name != "__init__.py"}
    assert copied == {path for path in paths if "/" not in path}
    assert installed == {path for path in paths if "/" in path}
    for page in (ROOT / "README.md", ROOT / "docs" / "trust.md"):
        assert f"{len(copied)} files of code" in page.read_text(encoding="utf-8").replace("[", "")


@cache
def flags_of(script: str) -> frozenset[str]:
    """The flags in the `--help` of a script, with - in place of _."""
    name, *task = script.split()
    command = [sys.executable, str(SCRIPTS / f"{name}.py"), *task, "--help"]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return frozenset(flag.replace("_", "-") for flag in re.findall(r"--[a-z][\w-]*", text))


@every_page_and_the_readme
def test_every_flag_of_a_command_exists(page):
    scripts = {path.stem for path in SCRIPTS.glob("*.py")}
    for command in commands(page.read_text(encoding="utf-8"), scripts):
        for flag in command.flags:
            known = flag.replace("_", "-") in flags_of(command.script)
            assert known, f"{page.name}, line {command.line}: {command.script} has no flag {flag}"


@every_page_and_the_readme
def test_every_make_target_exists(page):
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    for line, target in make_targets(page.read_text(encoding="utf-8")):
        assert target in targets, f"{page.name}, line {line}: the Makefile has no target {target}"


@every_page_and_the_readme
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


@every_chapter
def test_a_chapter_draws_the_pictures_that_it_shows(page):
    text = page.read_text(encoding="utf-8")
    shown = re.findall(r"\]\(pictures/([^)]+)\)", text)
    assert shown == re.findall(r'savefig\("([^"]+)"', text)
    assert sorted(shown) == sorted(path.name for path in PICTURES.glob(f"{page.name[:2]}_*"))
    for name in shown:
        assert (PICTURES / name).stat().st_size < MAX_PICTURE_BYTES


def test_the_first_chapter_shows_the_worked_example():
    """Each number of the example is in the page, as `print` writes it."""
    text = re.sub(r"\s+", " ", (ROOT / "docs" / "course" / "01_attention.md").read_text(encoding="utf-8"))
    worked = json.loads((DATA / "worked_attention.json").read_text(encoding="utf-8"))
    assert json.dumps(worked["tokens"]) in text
    plain, scaled = worked["unscaled_without_weights"], worked["scaled_with_weights"]
    tables = [plain[name] for name in ("scores", "weights", "contexts")]
    tables += [scaled[name] for name in ("W_query", "W_key", "W_value", "scores", "attention", "contexts")]
    for row in (row for table in tables for row in table):
        assert f"[{', '.join(f'{number:.4f}' for number in row)}]" in text
