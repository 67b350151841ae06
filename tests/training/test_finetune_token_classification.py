"""scripts/finetune_token_classification.py: tags stay with their words, whatever becomes of these; losses, metrics."""

import json
import math
import re
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from datasets import ClassLabel, Dataset, Features, List, Value
from transformers import AutoModelForTokenClassification, AutoTokenizer, BertForTokenClassification, pipeline

import finetune_token_classification as script
from finetune_token_classification import main
from support.finetuning import SPECIAL, assert_help_tells, assert_one_line, assert_resumes, make_task, save_tiny
from toolkit.finetuning.batches import unpadded
from toolkit.finetuning.task_settings import TokenClassificationSettings
from toolkit.finetuning.token_classification import (
    TokenClassification,
    check_iob2,
    iob_tags,
    list_of,
    to_iob2,
    word_windows,
)
from toolkit.labels import class_weights

pytestmark = pytest.mark.usefixtures("quiet_only_here")

WORDS = ["anna", "smith", "##son", "##s", "went", "to", "new", "york", "café", "cafe", ".", "paris", "日"]
WORDS += ["a", "b", "c"]
ID = {word: i for i, word in enumerate([*SPECIAL, *WORDS])}
ROWS = [
    {
        "tokens": ["Anna", "Smithson", "went", "to", "New", "York", "."],
        "tags": ["B-PER", "I-PER", "O", "O", "B-LOC", "I-LOC", "O"],
    },
    {"tokens": ["Paris", "went", "to", "a", "."], "tags": ["B-LOC", "O", "O", "O", "O"]},
    {"tokens": ["to", "Smiths", "."], "tags": ["O", "B-PER", "O"]},
    {"tokens": ["Anna"], "tags": ["B-PER"]},
]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> str:
    torch.manual_seed(0)
    return save_tiny(tmp_path_factory.mktemp("tiny"), WORDS)


@pytest.fixture(scope="module")
def tokenizer(tiny):
    return AutoTokenizer.from_pretrained(tiny)


def write(path, rows: list[dict]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


@pytest.fixture
def task(tiny, tmp_path):
    """Makes the task of some rows; without any, of ROWS."""

    def make(rows=ROWS, validation=ROWS, **flags):
        files = {"train_file": [write(tmp_path / "t.jsonl", rows)]}
        if validation:
            files["validation_file"] = [write(tmp_path / "v.jsonl", validation)]
        return make_task(TokenClassification, TokenClassificationSettings, **{"model": tiny, **files, **flags})

    return make


def batch_of(task, examples=None) -> dict:
    return task.collate(list(examples or task.train_set))


# --------------------------------------------------------------------------------------------------- words and windows


def test_odd_words_do_not_shift_the_tags(tokenizer, task):
    """Words in several pieces, two words in one, words without any piece, and one that is unknown."""
    words = ["Anna", "\u200b", "Smithsons", "", "New York", "\u00ad", "cafe\u0301", "日", "\u0007", "🙂", "Paris"]
    tags = ["B-PER", "I-PER", "I-PER", "O", "B-LOC", "I-LOC", "O", "B-PER", "I-PER", "O", "B-LOC"]
    [window] = word_windows(tokenizer, words, 32, 0)
    pieces = ["[CLS]", "anna", "smith", "##son", "##s", "new", "york", "cafe", "日", "[UNK]", "paris", "[SEP]"]
    assert window.input_ids == [ID[piece] for piece in pieces]
    assert window.word_of == [None, 0, 2, 2, 2, 4, 4, 6, 7, 9, 10, None]
    assert (window.words, window.positions) == ([0, 2, 4, 6, 7, 9, 10], [1, 2, 5, 7, 8, 9, 10])
    row = {"tokens": words, "tags": tags}
    o, b_loc, i_loc, b_per, i_per, no = 0, 1, 2, 3, 4, -100
    expected = [no, b_per, i_per, no, no, b_loc, no, o, b_per, o, b_loc, no]
    assert task([row]).train_set["labels"][0] == expected
    expected = [no, b_per, i_per, i_per, i_per, b_loc, i_loc, o, b_per, o, b_loc, no]
    assert task([row], label_all_pieces=True).train_set["labels"][0] == expected


def test_words_of_which_nothing_is_seen(tokenizer, task):
    assert word_windows(tokenizer, ["\u200b", ""], 32, 8) == []
    made = task([{"tokens": ["\u200b"], "tags": ["O"]}, *ROWS])
    assert list(made.train_set["place"]) == [f"t.jsonl, row {n} (line {n})" for n in (2, 3, 4, 5)]


UNSEEN = [{"tokens": ["\u200b", "\u200b"], "tags": ["B-PER", "O"]}, {"tokens": [""], "tags": ["O"]}]


def test_a_training_set_without_tokens(tiny, tmp_path, capsys):
    rows = write(tmp_path / "rows.jsonl", UNSEEN)
    argv = ["--model", tiny, "--train_file", rows, "--output", str(tmp_path / "out"), "--max_length", "32"]
    assert_one_line(lambda: main(argv), "no word of the training set has a token; expected words", capsys)


@pytest.mark.parametrize(("scheme", "tag"), [("iob2", "O"), ("plain", "B-PER")])
def test_a_validation_set_without_tokens(scheme, tag, tiny, tmp_path):
    """All words get the tag of words without tokens: O, or the most frequent one."""
    train = write(tmp_path / "t.jsonl", ROWS[3:] + ROWS[3:] + ROWS[2:3])
    validation = write(tmp_path / "v.jsonl", UNSEEN)
    files = ["--train_file", train, "--validation_file", validation, "--output", str(tmp_path / "out")]
    assert main(["--model", tiny, *files, "--epochs", "1", "--max_length", "32", "--scheme", scheme]) == 0
    metrics = json.loads((tmp_path / "out" / "metrics.json").read_text())["validation"]
    assert (metrics["loss"], metrics["accuracy"]) == (0, pytest.approx(2 / 3 if tag == "O" else 1 / 3))
    lines = (tmp_path / "out" / "predictions_validation.jsonl").read_text().splitlines()
    assert [json.loads(line)["predicted_tags"] for line in lines] == [[tag, tag], [tag]]


@pytest.mark.parametrize(("max_length", "stride"), [(8, 0), (8, 1), (8, 5), (11, 4), (11, 7), (64, 16)])
def test_each_word_is_tagged_in_one_window(tokenizer, max_length, stride):
    words = ["Anna", "Smithsons", "\u200b", "went", "to", "Smithson", "New York", "Smiths", "."] * 3 + ["a"] * 5
    whole = tokenizer(words, is_split_into_words=True)
    first = {word: whole.word_ids().index(word) for word in whole.word_ids() if word is not None}
    end, found, begin = len(whole["input_ids"]) - 1, word_windows(tokenizer, words, max_length, stride), 1
    for window in found:
        size = len(window.input_ids) - 2
        assert size <= max_length - 2
        assert window.input_ids == [ID["[CLS]"], *whole["input_ids"][begin : begin + size], ID["[SEP]"]]
        assert window.token_type_ids == [0] * (size + 2)
        for word, position in zip(window.words, window.positions, strict=True):
            assert begin - 1 + position == first[word]
            # The half of the overlap is what there is on each side, but for the ends of the row.
            assert position - 1 >= stride // 2 or begin == 1
            assert size - position >= stride - stride // 2 or begin + size == end
        begin += max_length - 2 - stride
    assert sorted(word for window in found for word in window.words) == sorted(first)
    assert begin - (max_length - 2 - stride) + size == end


def test_two_windows_of_a_row(task):
    """Eight words in windows of four with two in common: 0 1 2 3, 2 3 4 5, 4 5 6 7. The labels of each are its own."""
    tags = ["B-PER", "I-PER", "O", "B-LOC", "O", "B-PER", "B-LOC", "I-LOC"]
    row = {"tokens": ["a", "b", "c", "a", "b", "c", "a", "b"], "tags": tags}
    labels = [[-100, 3, 4, 0, -100, -100], [-100, -100, 1, 0, -100, -100], [-100, -100, 3, 1, 2, -100]]
    for all_pieces in (False, True):
        made = task([row], max_length=6, stride=2, label_all_pieces=all_pieces)
        assert list(made.train_set["labels"]) == labels
    assert list(made.train_set["row"]) == [0, 0, 0]


def test_rows_of_each_form(tmp_path, tiny):
    """Lists under other names, texts with spaces, and Parquet."""
    train = tmp_path / "t.csv"
    train.write_text("words,ner_tags\nNew York  .,B-LOC I-LOC O\nAnna,B-PER\n", encoding="utf-8")
    validation = str(tmp_path / "v.parquet")
    Dataset.from_list([{"w": ["Anna", "."], "t": ["B-PER", "O"]}]).to_parquet(validation)
    made = make_task(TokenClassification, TokenClassificationSettings, model=tiny, train_file=[str(train)])
    assert list(made.train_set["labels"]) == [[-100, 1, 2, 0, -100], [-100, 3, -100]]
    columns = {"words_column": "w", "tags_column": "t", "validation_file": [validation], "train_file": [validation]}
    made = make_task(TokenClassification, TokenClassificationSettings, model=tiny, **columns)
    assert made.rows["validation"][0]["words"] == ["Anna", "."]


@pytest.mark.parametrize(
    ("tags", "message"),
    [
        (["O", "I-PER"], "tag 2 is I-PER after O"),
        (["I-PER"], "tag 1 is I-PER after O"),
        (["B-PER", "I-LOC"], "tag 2 is I-LOC after B-PER"),
        (["B-PER", "I-PER", "O", "I-PER"], "tag 4 is I-PER after O"),
        (["B-"], "tag 1 is 'B-'"),
        (["S-PER"], "tag 1 is 'S-PER'"),
        (["o"], "tag 1 is 'o'"),
    ],
)
def test_tags_that_are_not_iob2(tags, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        check_iob2(tags)


def test_iob2():
    check_iob2(["O", "B-PER", "I-PER", "I-PER", "B-PER", "B-LOC", "O", "B-a-b", "I-a-b"])
    assert iob_tags({"B-PER", "O", "B-LOC", "I-LOC"}) == ["O", "B-LOC", "I-LOC", "B-PER", "I-PER"]
    assert iob_tags({"B-x"}) == ["O", "B-x", "I-x"]


@pytest.mark.parametrize(
    ("tags", "iob2"),
    [
        (["O", "I-PER", "I-PER", "B-PER", "I-LOC"], ["O", "B-PER", "I-PER", "B-PER", "B-LOC"]),
        (["B-PER", "I-PER", "O", "I-PER"], ["B-PER", "I-PER", "O", "B-PER"]),
        (["B-PER", "O", "B-LOC"], ["B-PER", "O", "B-LOC"]),
    ],
)
def test_iob1_becomes_iob2(tags, iob2):
    assert to_iob2(tags) == iob2


@pytest.mark.parametrize(("name", "flags"), [("x.conll", {}), ("x.txt", {}), ("x.txt", {"scheme": "plain"})])
def test_conll_files(name, flags, tiny, tmp_path):
    """Of CoNLL-2003, whose training file has IOB1."""
    content = "-DOCSTART- -X- -X- O\n\nAnna NNP I-NP I-PER\nwent VBD I-VP O\n\nParis NNP I-NP I-LOC\n. . O O\n"
    (tmp_path / name).write_text(content)
    files = {"train_file": [str(tmp_path / name)], "validation_file": [str(tmp_path / name)]}
    made = make_task(TokenClassification, TokenClassificationSettings, model=tiny, **files, **flags)
    rows = made.rows["validation"]
    assert rows["words"][:] == [["Anna", "went"], ["Paris", "."]]
    assert rows["place"][:] == [f"{name}, row 1 (line 3)", f"{name}, row 2 (line 6)"]
    prefix = "I" if flags else "B"
    assert rows["tags"][:] == [[f"{prefix}-PER", "O"], [f"{prefix}-LOC", "O"]]
    assert made.labels == (["I-LOC", "I-PER", "O"] if flags else ["O", "B-LOC", "I-LOC", "B-PER", "I-PER"])


@pytest.mark.parametrize(
    ("names", "scheme", "labels"),
    [
        (["O", "B-PER", "I-PER", "B-LOC"], "iob2", ["O", "B-PER", "I-PER", "B-LOC"]),
        (["B-PER", "I-PER", "B-LOC"], "iob2", ["O", "B-LOC", "I-LOC", "B-PER", "I-PER"]),  # O is needed
        (["VERB", "NOUN", "ADJ"], "plain", ["VERB", "NOUN", "ADJ"]),
    ],
)
def test_tags_of_a_dataset_are_in_its_order(names, scheme, labels, tiny, tmp_path):
    features = Features({"tokens": List(Value("string")), "ner_tags": List(ClassLabel(names=names))})
    first = int(names[0] == "O")
    data = Dataset.from_dict(
        {"tokens": [["Anna", "a"], ["Paris"]], "ner_tags": [[first, first + 1], [first + 2]]}, features=features
    )
    data.to_parquet(tmp_path / "train.parquet")
    flags = {"train_file": [str(tmp_path / "train.parquet")], "scheme": scheme}
    assert make_task(TokenClassification, TokenClassificationSettings, model=tiny, **flags).labels == labels


@pytest.mark.parametrize("value", [None, [], "", " ", 3, ["a", None], [["a"]], [True]])
def test_words_that_are_none(value):
    with pytest.raises(ValueError, match=r"^'words'"):
        list_of({"words": value}, "words")


@pytest.mark.parametrize("value", ["['good', 'bad']", '["good", "bad"] ', "[1 2]", "[]"])
def test_lists_as_text(value):
    """As pandas writes them to CSV."""
    with pytest.raises(ValueError, match=r"^'words' is .*, a list as text; expected words or tags separated by spaces"):
        list_of({"words": value}, "words")
    assert list_of({"words": "[ 1 ] a"}, "words") == ["[", "1", "]", "a"]


# -------------------------------------------------------------------------------------------------- losses and weights


@pytest.mark.parametrize("implementation", ["scratchbert", "bert"])
def test_the_loss_is_the_models_own(implementation, task):
    """The mean over all words, 16 of ROWS; of BertForTokenClassification, for one."""
    made = task(implementation=implementation, max_length=6, stride=1)
    model, batch = made.model.eval(), batch_of(made)
    assert isinstance(model, BertForTokenClassification) == (implementation == "bert")
    assert made.counts(batch).tolist() == [16]
    torch.testing.assert_close(made.losses(model, batch) / 16, model(**batch).loss[None], rtol=1e-5, atol=0)


def test_weighted_and_smoothed(task):
    """As torch's own weighted mean, of 5 tags with weights 1, 2, 3, 4, 0."""
    labels = ["O", "B-PER", "I-PER", "B-LOC", "I-LOC"]
    made = task(labels=labels, class_weights=list("12340"), label_smoothing=0.2)
    model, batch = made.model.eval(), batch_of(made)
    assert made.counts(batch).tolist() == [9 * 1 + 3 * 2 + 1 * 3 + 2 * 4 + 1 * 0]
    logits, targets = model(batch["input_ids"], batch["attention_mask"]).logits, batch["labels"]
    kept = targets >= 0
    weights = torch.tensor([1.0, 2, 3, 4, 0])
    expected = torch.nn.functional.cross_entropy(logits[kept], targets[kept], weights, label_smoothing=0.2)
    torch.testing.assert_close(made.losses(model, batch)[0] / made.counts(batch)[0], expected, rtol=1e-5, atol=0)


def test_without_padding_the_loss_is_the_same(task):
    padded, flat = task(max_length=6, stride=1), task(max_length=6, stride=1, padding_free_collation=True)
    model = padded.model.eval()
    batches = batch_of(padded), batch_of(flat)
    assert batches[1]["labels"].shape[0] == 1 < batches[0]["labels"].shape[0]
    assert padded.counts(batches[0]).equal(flat.counts(batches[1]))
    torch.testing.assert_close(padded.losses(model, batches[0]), flat.losses(model, batches[1]), rtol=1e-5, atol=0)


def test_balanced_weights():
    """6 words, 3 tags: 6 / (3 · 4), 6 / (3 · 2), and for the tag that does not occur what it would be for one."""
    weights = class_weights(["balanced"], ["O", "B-x", "I-x"], Counter({"O": 4, "B-x": 2}))
    assert weights.tolist() == [0.5, 1, 2]
    assert class_weights(None, ["O", "B-x"], Counter()).tolist() == [1, 1]


@pytest.mark.parametrize("given", [["a", "1"], ["1"], ["-1", "1"], ["nan", "1"], ["inf", "1"], ["0", "0"]])
def test_weights_that_are_none(given):
    with pytest.raises(ValueError, match=r"--class_weights is .*; expected"):
        class_weights(given, ["O", "B-x"], Counter())


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_is_cut_off(side):
    rows = [[1, 2, 3], [4], [5, 6]]
    pad = {"left": lambda row: [0] * (3 - len(row)) + row, "right": lambda row: row + [0] * (3 - len(row))}[side]
    batch = {"attention_mask": torch.tensor([pad([1] * len(row)) for row in rows])}
    assert [row.tolist() for row in unpadded(batch, torch.tensor([pad(row) for row in rows]))] == rows
    flat = {"cu_seq_lens_q": torch.tensor([0, 3, 4, 6], dtype=torch.int32)}
    assert [row.tolist() for row in unpadded(flat, torch.tensor([[1, 2, 3, 4, 5, 6]]))] == rows


# ------------------------------------------------------------------------------------------------------------- metrics


class Told(torch.nn.Module):
    """Says the same tag of a token wherever it stands."""

    def __init__(self, labels: list[str], tags: dict[str, str], other: str):
        super().__init__()
        said = torch.tensor([labels.index(tags.get(token, other)) for token in ID])
        self.scores = torch.nn.functional.one_hot(said, len(labels)).float()

    def forward(self, input_ids, **_):
        return SimpleNamespace(logits=self.scores[input_ids])


def test_a_word_not_seen_is_outside(task):
    """Though B-PER is the commonest tag."""
    rows = [{"tokens": ["Anna", "\u200b", "Anna"], "tags": ["B-PER", "O", "B-PER"]}]
    made = task(rows, rows)
    tags, _ = made.predict_tags(Told(made.labels, {}, "B-PER"), "validation")
    assert tags == [["B-PER", "O", "B-PER"]]


@pytest.mark.parametrize("padding_free", [False, True])
@pytest.mark.parametrize(("max_length", "stride"), [(64, 8), (5, 1)])
def test_metrics_by_hand(task, max_length, stride, padding_free):
    """Persons: 4 to find; "Anna Smithson", "Smiths" (an I- alone begins one) and "Anna" are found, a word that is not
    seen is not. Places: "New York", which is found in part, and "Paris" twice. 15 of 18 tags are right: not that of
    "York", of "Smiths", and of the word not seen."""
    rows = [*ROWS, {"tokens": ["\u200b", "Paris"], "tags": ["B-PER", "B-LOC"]}]
    made = task(
        rows, rows, max_length=max_length, stride=stride, padding_free_collation=padding_free, eval_batch_size=2
    )
    assert len(made.splits["validation"]) == (5 if max_length == 64 else 10)
    tags = {"anna": "B-PER", "smith": "I-PER", "new": "B-LOC", "paris": "B-LOC", "##son": "B-LOC", "[SEP]": "B-LOC"}
    metrics = made.evaluate(Told(made.labels, tags, "O"), "validation").metrics
    of_all = {"precision": 5 / 6, "recall": 5 / 7, "f1": 10 / 13, "accuracy": 15 / 18}
    of_persons = {"PER_precision": 1, "PER_recall": 3 / 4, "PER_f1": 6 / 7, "PER_number": 4}
    of_places = {"LOC_precision": 2 / 3, "LOC_recall": 2 / 3, "LOC_f1": 2 / 3, "LOC_number": 3}
    # Of 17 words that are seen 15 are right. Their logit is 1, and that of the four other tags 0.
    loss = math.log(4 + math.e) - 15 / 17
    assert metrics == pytest.approx({"loss": loss} | of_all | of_persons | of_places)


def test_plain_tags(task):
    """Of 5 words 3 are right, "\u200b" as the commonest, N. N: 2 right, 3 said, 3 there, F1 2/3. V: 1, 1, 2: 2/3. X: 0,
    1 and 0."""
    rows = [{"words": ["Anna", "went", ".", "\u200b", "to"], "labels": ["N", "V", "N", "N", "V"]}]
    made = task([*rows, {"words": ["a"], "labels": ["X"]}], rows, scheme="plain", class_weights=["balanced"])
    assert made.labels == ["N", "V", "X"]
    metrics = made.evaluate(Told(made.labels, {"went": "V", ".": "X"}, "N"), "validation").metrics
    # The weights of N and V are 2/3 and 1. One of the two N that are seen is right, and one of the two V.
    loss = math.log(2 + math.e) - 1 / 2
    assert metrics == pytest.approx({"loss": loss, "accuracy": 3 / 5, "f1": (2 / 3 + 2 / 3 + 0) / 3})


def test_tags_that_are_numbers_are_in_order(task):
    rows = [{"tokens": ["a"] * 4, "tags": [10, 2, "x", 1]}]
    assert task(rows, [], scheme="plain").labels == ["x", "1", "2", "10"]


# ---------------------------------------------------------------------------------------------------------------- runs


def test_resumed_is_uninterrupted_and_the_pipeline_opens_it(tiny, tmp_path, monkeypatch):
    """Enough steps to learn four rows by heart."""
    rows = write(tmp_path / "rows.jsonl", ROWS)
    flags = ["--model", tiny, "--train_file", rows, "--validation_file", rows, "--test_file", rows, "--batch_size", "2"]
    flags += ["--epochs", "30", "--learning_rate", "3e-3", "--schedule", "constant", "--warmup_ratio", "0"]
    flags += ["--gradient_accumulation_steps", "2", "--padding_free_collation", "--max_length", "10", "--stride", "2"]
    assert_resumes(main, [*flags, "--label_all_pieces", "--eval_steps", "12"], tmp_path, monkeypatch, after=5)
    report = json.loads((tmp_path / "whole" / "metrics.json").read_text())
    assert report["test"] == report["validation"]
    assert report["test"]["f1"] == report["test"]["PER_f1"] == 1
    model = AutoModelForTokenClassification.from_pretrained(tmp_path / "whole")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "whole")
    tag = pipeline("token-classification", model=model, tokenizer=tokenizer, aggregation_strategy="simple")
    found = [(each["entity_group"], each["start"], each["end"]) for each in tag("Anna Smithson went to New York .")]
    assert found == [("PER", 0, 13), ("LOC", 22, 30)]


@pytest.mark.parametrize("implementation", ["scratchbert", "bert"])
def test_a_trained_tagger_keeps_its_tags(implementation, tiny, task, tmp_path):
    """Saved in another order than that of a new model; with another set of as many tags, its model head is new."""
    tags = ["I-PER", "B-PER", "O", "I-LOC", "B-LOC"]
    trained = BertForTokenClassification.from_pretrained(tiny, num_labels=5, id2label=dict(enumerate(tags)))
    trained.save_pretrained(tmp_path / "trained")
    AutoTokenizer.from_pretrained(tiny).save_pretrained(tmp_path / "trained")
    flags = {"model": str(tmp_path / "trained"), "implementation": implementation}
    same = task(**flags)
    assert (same.labels, same.new_weights) == (tags, set())
    assert same.model.classifier.weight.equal(trained.classifier.weight)
    other = task([{"tokens": ["Anna", "Paris"], "tags": ["B-X", "B-Y"]}], [], **flags)
    assert other.labels == ["O", "B-X", "I-X", "B-Y", "I-Y"]
    assert not other.model.classifier.weight.equal(trained.classifier.weight)
    assert not other.model.classifier.bias.any()
    assert other.new_weights == {"classifier.weight", "classifier.bias"}
    assert task(labels=iob_tags(set(tags)), **flags).new_weights == other.new_weights


def test_a_run_from_a_finished_run_has_its_metrics(tiny, tmp_path):
    rows = write(tmp_path / "rows.jsonl", ROWS)
    labels = ["B-PER", "I-PER", "B-LOC", "I-LOC", "O"]
    files = [
        "--train_file",
        rows,
        "--validation_file",
        rows,
        "--trackers",
        "none",
        "--epochs",
        "1",
        "--max_length",
        "32",
    ]
    first, again = tmp_path / "first", tmp_path / "again"
    assert main(["--model", tiny, "--output", str(first), *files, "--learning_rate", "1e-2", "--labels", *labels]) == 0
    assert main(["--model", str(first), "--output", str(again), *files, "--learning_rate", "0"]) == 0
    metrics = [json.loads((each / "metrics.json").read_text())["validation"] for each in (first, again)]
    assert metrics[1] == pytest.approx(metrics[0])


def test_help(capsys):
    assert_help_tells(script, ("--stride", "--label_all_pieces", "--class_weights", "--scheme"), capsys)


BAD_ROWS = {
    "a word too many": (
        {"tokens": ["a", "b"], "tags": ["O"]},
        "rows.jsonl, row 2 (line 2): there are 2 words and 1 tags",
    ),
    "no words": ({"tokens": [], "tags": []}, "rows.jsonl, row 2 (line 2): 'tokens' is empty"),
    "I- without B-": ({"tokens": ["a"], "tags": ["I-PER"]}, "rows.jsonl, row 2 (line 2): tag 1 is I-PER after O"),
}


def test_a_number_below_0_is_no_tag(tiny, tmp_path, capsys):
    """-100 in files that were made for the Trainer of transformers; as text it is a tag like others."""
    rows = write(tmp_path / "rows.jsonl", [{"tokens": ["a", "b"], "tags": [1, 0]}, {"tokens": ["a"], "tags": [-100]}])
    argv = ["--model", tiny, "--train_file", rows, "--output", str(tmp_path / "out"), "--scheme", "plain"]
    assert_one_line(lambda: main(argv), "rows.jsonl, row 2 (line 2): a tag is -100; expected text or", capsys)


@pytest.mark.parametrize("name", BAD_ROWS)
def test_a_bad_row_is_named_or_skipped(name, tiny, tmp_path, capsys):
    bad, message = BAD_ROWS[name]
    rows = write(tmp_path / "rows.jsonl", [ROWS[0], bad, ROWS[1]])
    assert main(["--model", tiny, "--train_file", rows, "--output", str(tmp_path / "out")]) == 2
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1
    flags = {"train_file": [rows], "on_bad_row": "skip"}
    made = make_task(TokenClassification, TokenClassificationSettings, model=tiny, **flags)
    assert list(made.train_set["place"]) == ["rows.jsonl, row 1 (line 1)", "rows.jsonl, row 3 (line 3)"]


WRONG = {
    "a tag outside the set": (["--labels", "O", "B-LOC"], "a tag is 'B-PER'; expected one of O, B-LOC"),
    "a set without O": (["--labels", "B-LOC", "I-LOC"], "--labels is invalid: O is missing; expected O, B-TYPE"),
    "a set of others": (["--labels", "O", "LOC"], "'LOC' is one of them"),
    "a tag twice": (["--labels", "O", "O"], "expected each label once"),
    "a stride too long": (["--max_length", "10", "--stride", "8"], "expected at least 11: 2 tokens around"),
    "a stride below 0": (["--stride", "-1"], "--stride is -1; expected 0 or more"),
    "too much smoothing": (["--label_smoothing", "1"], "--label_smoothing is 1.0"),
    "weights without an order": (["--class_weights", "1", "2"], "--class_weights has numbers and --labels is missing"),
    "a column that is not there": (["--tags_column", "pos"], "no column 'pos' for the tags"),
    "a scheme that is none": (["--scheme", "bioes"], "invalid choice: 'bioes'"),
    "a flag that is none": (["--tokens", "x"], "x"),
    "a file that is not there": (["--validation_file", "no.jsonl"], "no.jsonl"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_said_in_a_line(name, tiny, tmp_path, capsys):
    flags, message = WRONG[name]
    rows = write(tmp_path / "rows.jsonl", ROWS)
    argv = ["--model", tiny, "--train_file", rows, "--output", str(tmp_path / "out"), *flags]
    assert_one_line(lambda: main(argv), message, capsys)
