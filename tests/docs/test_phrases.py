"""No text of the project uses a phrase for which there is a plain one."""

import re

import pytest

from support.folders import CONFIGURATION, ROOT, SCRIPTS

# Phrases that are wrong wherever they stand, each with its replacement.
PHRASES = {
    r"real tokens?": "non-padding tokens",
    r"twins?": "the reference, or its name",
    r"(two|both) halves": "encoder and decoder",
    r"unpacked batch": "padded batch",
    r"pours? into": "loads",
    r"wants? training": "must be trained",
    r"makes? of it": "the model's output",
    r"what lies between": "would close the gap",
    r"mean nothing": "have no meaning",
    r"lays? the matrices out": "prepacks the weights",
    r"packed already": "packed input",
    r"taken as (it comes|they come)": "supported",
    r"left out and named": "skipped and listed",
    r"where all passes": "everything passes",
    r"kernel does not tell": "does not return attention weights",
    r"(is|are) unfit": "is invalid",
    r"another's block": "custom block",
    r"numbers of booleans": "convert the mask",
    r"nobody waits for": "non-blocking",
    r"comput(e|es|ed|ing) padding": "skips padding, or also processes padding tokens",
    r"it wants (one )?of": "expected one of",
}
SUFFIXES = {".cfg", ".jinja", ".json", ".md", ".py", ".toml", ".yaml"}


def texts():
    """The files that a user of the project reads."""
    yield from (
        ROOT / name
        for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "Makefile", "pyproject.toml", "setup.cfg")
    )
    for folder in (ROOT / "docs", ROOT / "modeling_scratchbert", SCRIPTS, CONFIGURATION):
        # Data of other people is as they wrote it.
        files = (path for path in sorted(folder.rglob("*")) if "data" not in path.relative_to(folder).parts[:-1])
        yield from (path for path in files if path.suffix in SUFFIXES)


@pytest.mark.parametrize("phrase", PHRASES)
def test_no_text_uses(phrase):
    pattern = re.compile(rf"\b{phrase}\b".replace(" ", r"[\s#]+"), re.IGNORECASE)  # also across a line's end
    found = []
    for path in texts():
        text = path.read_text(encoding="utf-8")
        found += [
            f"{path.relative_to(ROOT)}:{text.count(chr(10), 0, match.start()) + 1}" for match in pattern.finditer(text)
        ]
    assert not found, f"{found}; expected: {PHRASES[phrase]}"


def test_the_texts_are_found():
    names = {path.name for path in texts()}
    assert {"README.md", "Makefile", "01_attention.md", "attention.py", "predict.py", "cmudict.yaml"} <= names
