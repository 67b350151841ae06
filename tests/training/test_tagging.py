"""Tagging: tags of words and of tokens, windows of long texts, and rows that cannot be used."""

import numpy as np
import pytest

from support.tiny import make_task, save_tiny, tokens
from toolkit.tasks.tagging import check_iob2, to_iob2

IGNORED = -100


@pytest.fixture(scope="module")
def spelling(tmp_path_factory) -> str:
    words = ["anna", "smith", "##son", "##s", "new", "york", "cafe", "日", "paris", "a", "b", "c", "went", "."]
    return save_tiny(tmp_path_factory.mktemp("spelling"), words)


def test_odd_words_do_not_shift_the_tags(spelling):
    """Words in several pieces, two words in one, words without any piece, and one that is unknown."""
    words = ["Anna", "\u200b", "Smithsons", "", "New York", "\u00ad", "cafe\u0301", "日", "🙂", "Paris"]
    tags = ["B-PER", "I-PER", "I-PER", "O", "B-LOC", "I-LOC", "O", "B-PER", "O", "B-LOC"]
    row = {"tokens": words, "tags": tags}
    tags[1:3], no = ["I-PER", "I-PER"], IGNORED
    task, rows = make_task("tagging", [row, {"tokens": ["\u200b"], "tags": ["O"]}], model=spelling)
    assert task.labels == ["O", "B-LOC", "I-LOC", "B-PER", "I-PER"]
    example, without_pieces = task.encode(rows)
    assert not without_pieces["first_pieces"]
    assert tokens(task, example["input_ids"]) == "[CLS] anna smith ##son ##s new york cafe 日 [UNK] paris [SEP]"
    assert example["labels"].tolist() == [no, 3, 4, no, no, 1, no, 0, 3, 0, 1, no]
    (found,) = task.decode(rows[:1], [example], [[1] * 12])
    assert found["predicted_tags"] == ["B-LOC", "O", "B-LOC", "O", *["B-LOC", "O"], *["B-LOC"] * 4]


@pytest.mark.parametrize(("max_length", "stride"), [(8, 0), (8, 1), (8, 5), (11, 4), (11, 7), (64, 16)])
def test_each_word_is_tagged_in_one_window(max_length, stride, spelling):
    """By its first piece, where it has at least half of the overlap on both sides. Windows have all tokens in order."""
    words = ["Anna", "Smithsons", "\u200b", "went", "a", "Smithson", "New York", "Smiths", "."] * 3 + ["a"] * 5
    row = {"tokens": words, "tags": ["O"] * len(words)}
    flags = {"model": spelling, "max_length": max_length, "stride": stride, "labels": ["O", "B-X"]}
    task, rows = make_task("tagging", [row], **flags)
    whole = task.tokenizer(words, is_split_into_words=True)
    first = {word: whole.word_ids().index(word) for word in whole.word_ids() if word is not None}
    begin, end, seen = 1, len(whole["input_ids"]) - 1, []
    for example in task.encode(rows):
        size = example["length"] - 2
        assert size <= max_length - 2
        assert example["input_ids"].tolist()[1:-1] == whole["input_ids"][begin : begin + size]
        for word, position in example["first_pieces"].items():
            assert begin - 1 + position == first[word]
            assert position - 1 >= stride // 2 or begin == 1
            assert size - position >= stride - stride // 2 or begin + size == end
        assert np.flatnonzero(example["labels"] >= 0).tolist() == list(example["first_pieces"].values())
        seen += example["first_pieces"]
        last, begin = begin + size, begin + max_length - 2 - stride
    assert sorted(seen) == sorted(first)
    assert last == end


def test_tags():
    assert to_iob2(["I-P", "I-P", "B-P", "O", "I-L"]) == ["B-P", "I-P", "B-P", "O", "B-L"]
    for tags in (["I-P"], ["B-P", "I-L"], ["B-P", "O", "I-P"], ["P"], ["B-"], ["S-P"], ["o"]):
        with pytest.raises(ValueError, match=f"tag {len(tags)}"):
            check_iob2(tags)
    check_iob2(["O", "B-P", "I-P", "I-P", "B-P", "B-a-b", "I-a-b"])


@pytest.mark.parametrize(
    ("words", "tags", "flags", "labels"),
    [
        ("a b", "I-X O", {"scheme": "iob1"}, ["O", "B-X", "I-X"]),
        (["a", "b"], "VERB NOUN", {"scheme": "plain"}, ["NOUN", "VERB"]),
        (["a"] * 4, [10, 2, "x", 1], {"scheme": "plain"}, ["1", "2", "10", "x"]),
        ("[ 1 ]", "O B-X O", {}, None),
        ("a b", "O", {}, None),
        ([], [], {}, None),
        (["a", None], ["O", "O"], {}, None),
        ('["a"]', "O", {}, None),
        (["a"], [-100], {"scheme": "plain"}, None),  # of files for the Trainer
        ("a", "B-Y", {"labels": ["O", "B-X"]}, None),
    ],
)
def test_words_and_tags(words, tags, flags, labels, model):
    """Of each form; or rows that cannot be used."""
    row = {"tokens": words, "tags": tags}
    if labels is None:
        with pytest.raises(ValueError, match=r"tokens|tags?|words|label"):
            make_task("tagging", [row], model=model, **flags)
    else:
        task, _ = make_task("tagging", [row], model=model, **flags)
        assert task.labels == labels
