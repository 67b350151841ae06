"""What each task makes of rows: inputs, targets, losses and predictions, against values worked out by hand."""

import math

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy
from transformers import (
    AutoTokenizer,
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    BertLMHeadModel,
    BertModel,
    EncoderDecoderModel,
)

from support.models import tiny_config
from support.tiny import TEXTS, as_question, make_task, save_tiny, tokens
from toolkit.tasks import ARGUMENTS, task_class

IGNORED = -100


def rows_of(texts: list[str], labels: list) -> list[dict]:
    return [{"text": text, "label": label} for text, label in zip(texts, labels, strict=True)]


# ------------------------------------------------------------------------------------------------------ classification

PAIR = {"premise": "good film", "hypothesis": "fun .", "label": "yes"}


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({}, "[CLS] good film [SEP] fun . [SEP]"),
        ({"text_column": "hypothesis"}, "[CLS] fun . [SEP]"),
        ({"text_column": "hypothesis", "text_pair_column": "premise"}, "[CLS] fun . [SEP] good film [SEP]"),
        ({"max_length": 6}, "[CLS] good [SEP] fun . [SEP]"),
    ],
)
def test_pairs(flags, expected, model):
    task, rows = make_task("classification", [PAIR, {**PAIR, "label": "no"}], model=model, **flags)
    first, _ = task.encode(rows)
    assert tokens(task, first["input_ids"]) == expected
    assert (task.labels, first["labels"], first["cut"]) == (["no", "yes"], 1, int("max_length" in flags))
    if len(expected.split("[SEP]")) > 2:
        change = expected.split().index("[SEP]") + 1
        assert first["token_type_ids"].tolist() == [int(i >= change) for i in range(first["length"])]


def test_labels_are_in_the_order_of_numbers(model):
    task, rows = make_task("classification", rows_of(TEXTS[:5], [10, 2, "-1", " b ", 2]), model=model)
    assert task.labels == ["-1", "2", "10", "b"]
    assert [example["labels"] for example in task.encode(rows)] == [2, 1, 0, 3, 1]


SEVERAL = {
    "separated": ({}, ["x|y", "", " y", "z|x"]),
    "lists": ({}, [["x", "y"], [], ["y"], ["z", "x"]]),
    "another separator": ({"label_separator": ";"}, ["x;y", "", "y", "z;x"]),
    "columns": ({"label_columns": ["x", "y", "z"]}, [(1, 1, 0), ("0", False, 0.0), (0, "true", 0), (1, 0, 1)]),
}


@pytest.mark.parametrize(("flags", "labels"), SEVERAL.values(), ids=SEVERAL)
def test_several_labels(flags, labels, model):
    rows = rows_of(TEXTS[:4], labels)
    if "label_columns" in flags:
        rows = [{"text": row["text"], **dict(zip("xyz", row["label"], strict=True))} for row in rows]
    task, rows = make_task("classification", rows, model=model, problem="multi_label", **flags)
    assert task.collate(task.encode(rows))["labels"].tolist() == [[1, 1, 0], [0, 0, 0], [0, 1, 0], [1, 0, 1]]
    (decoded,) = task.decode(rows[:1], [], [[1.0, -1.0, 0.1]])
    assert decoded["prediction"] == ["x", "z"]
    assert decoded["scores"]["y"] == pytest.approx(1 / (1 + math.e))


@pytest.mark.parametrize(
    ("labels", "flags", "named"),
    [
        (["a", "a"], {}, "a"),
        (["0.5", "-1.5"], {}, "--problem regression"),
        ([[1, 2], [1]], {"problem": "regression"}, "1 and 2"),
    ],
)
def test_labels_that_cannot_be_trained(labels, flags, named, model):
    with pytest.raises(ValueError, match=named):
        make_task("classification", rows_of(["good", "bad"], labels), model=model, **flags)


@pytest.mark.parametrize("implementation", ["scratchbert", "bert"])
@pytest.mark.parametrize(
    ("saved", "flags", "order", "is_new"),
    [
        ("yzx", {}, "yzx", False),
        ("yzx", {"labels": list("xyz")}, "xyz", True),
        ("uvw", {}, "xyz", True),
        (["LABEL_0", "LABEL_1", "LABEL_2"], {}, "xyz", False),
    ],
    ids=["same set", "other order given", "other set", "no names"],
)
def test_a_model_head_keeps_its_labels(saved, flags, order, is_new, implementation, model, tmp_path):
    """Unless they are others: then it is new."""
    trained = BertForSequenceClassification.from_pretrained(model, id2label=dict(enumerate(saved)))
    trained.save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(model).save_pretrained(tmp_path)
    rows = rows_of(TEXTS[:4], "xyzx")
    task, _ = make_task("classification", rows, model=str(tmp_path), implementation=implementation, **flags)
    opened = task.open_model()
    assert list(opened.config.id2label.values()) == task.labels == list(order)
    assert opened.classifier.weight.equal(trained.classifier.weight) != is_new
    assert task.new_weights == ({"classifier.weight", "classifier.bias"} if is_new else set())


# A task, rows, and arguments on which its loss depends.
WEIGHTED = {
    "numbers": ("classification", rows_of(TEXTS[:4], "abab"), {"class_weights": ["1", "3"], "labels": ["a", "b"]}),
    "balanced": ("classification", rows_of(TEXTS[:4], "abaa"), {"class_weights": ["balanced"]}),
    "tags": (
        "tagging",
        [{"tokens": ["good", "film"], "tags": ["B-X", "O"]}, {"tokens": ["a"], "tags": ["O"]}],
        {"class_weights": ["1", "2", "0"], "labels": ["O", "B-X", "I-X"]},
    ),
}


@pytest.mark.parametrize(("name", "rows", "flags"), WEIGHTED.values(), ids=WEIGHTED)
def test_weighted_and_smoothed_losses_are_those_of_torch(name, rows, flags, model):
    """In an evaluation the loss is not smoothed."""
    task, rows = make_task(name, rows, model=model, **flags)
    task.label_smoothing = 0.2
    batch, opened = task.collate(task.encode(rows)), task.open_model().eval()
    inputs = {each: batch[each] for each in ("input_ids", "attention_mask")}
    logits, labels = opened(**inputs).logits.flatten(0, -2), batch["labels"].flatten()
    expected = [cross_entropy(logits, labels, task.weights, label_smoothing=share) for share in (0.2, 0)]
    torch.testing.assert_close(task.loss_of(task.logits(opened, batch), batch) / task.count(batch), expected[0])
    with torch.no_grad():
        torch.testing.assert_close(task.predict(opened, batch)[1] / task.count(batch), expected[1])
    if flags["class_weights"] == ["balanced"]:
        assert task.weights.tolist() == pytest.approx([4 / (2 * 3), 4 / (2 * 1)])


# ------------------------------------------------------------------------------------------------------------- seq2seq

SAID = [("good", "bad film"), ("bad", "fun"), ("good", "very good film"), ("a film", "film")]
PAIRS = [{"source": source, "target": target} for source, target in SAID]


def test_targets_begin_after_the_start_token(model):
    task, rows = make_task("seq2seq", PAIRS, model=model, max_length=3, max_target_length=3)
    examples = task.encode(rows)
    batch = task.collate(examples[:3])
    assert [tokens(task, ids) for ids in batch["decoder_input_ids"]] == [
        "[CLS] bad film",
        "[CLS] fun [SEP]",
        "[CLS] very good",
    ]
    assert tokens(task, batch["labels"][0]) == "bad film [SEP]"
    assert tokens(task, batch["labels"][2]) == "very good [SEP]"  # cut
    assert batch["labels"][1, 2:].tolist() == [IGNORED]
    assert [(each["length"], each["cut"]) for each in examples] == [(6, 0), (5, 0), (6, 1), (5, 1)]
    assert task.count(batch) == 8


@pytest.mark.parametrize(
    ("columns", "flags", "source", "target"),
    [
        ("id article summary text", {}, "text", "summary"),
        ("id article summary text", {"source_column": "article", "target_column": "text"}, "article", "text"),
        ("text source target", {"target_column": "source"}, "text", "source"),
        ("de en", {"source_column": "de", "target_column": "en"}, "de", "en"),
        ("de en", {"target_column": "en"}, None, None),
        ("source", {"source_column": "source", "target_column": "source"}, None, None),
    ],
)
def test_columns_of_pairs(columns, flags, source, target, model):
    task, _ = make_task("seq2seq", PAIRS, model=model)
    for name, value in flags.items():
        setattr(task.arguments, name, value)
    if source is None:
        with pytest.raises(ValueError, match=r"--(source|target)_column"):
            task.find_columns(columns.split())
    else:
        task.find_columns(columns.split())
        assert (task.source, task.target) == (source, target)


def test_the_loss_is_that_of_transformers_own_generator(model, tmp_path):
    """With the same weights. A share of each label's weight is spread over the vocabulary in the training alone."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    sizes = {"vocab_size": len(tokenizer), "max_position_embeddings": 64, "initializer_range": 0.3}
    decoder = BertLMHeadModel(tiny_config(BertConfig, **sizes, is_decoder=True, add_cross_attention=True))
    theirs = EncoderDecoderModel(encoder=BertModel(tiny_config(BertConfig, **sizes)), decoder=decoder).eval()
    theirs.config.decoder_start_token_id, theirs.config.pad_token_id = tokenizer.cls_token_id, tokenizer.pad_token_id
    theirs.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    task, rows = make_task("seq2seq", PAIRS, model=str(tmp_path), max_length=32, max_target_length=16)
    task.label_smoothing, opened, batch = 0.2, task.open_model().eval(), task.collate(task.encode(rows))
    with torch.no_grad():
        logits = theirs(**{name: batch[name] for name in batch if name != "labels"}).logits.flatten(0, 1)
    labels = batch["labels"].flatten()
    for share, context in ((0.2, torch.enable_grad()), (0.0, torch.no_grad())):
        expected = cross_entropy(logits, labels, label_smoothing=share)
        with context:
            loss = task.loss_of(task.logits(opened, batch), batch) / task.count(batch)
            torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match="--num_decoder_layers"):
        make_task("seq2seq", PAIRS, model=str(tmp_path), num_decoder_layers=1)[0].open_model()


def test_a_bert_starts_encoder_and_decoder(model):
    """With the special tokens of the tokenizer, and settings for generation."""
    own = BertModel.from_pretrained(model).encoder.layer[0].attention.self.query.weight
    flags = {"model": model, "num_beams": 2, "max_target_length": 7}
    opened = make_task("seq2seq", PAIRS, **flags, num_decoder_layers=1)[0].open_model()
    stacks = opened.get_encoder(), opened.get_decoder()
    assert [len(each.encoder.blocks) for each in stacks] == [2, 1]
    assert all(each.encoder.blocks[0].attention.query.weight.equal(own) for each in stacks)
    assert opened.get_encoder().config.padding_free
    settings = opened.generation_config
    assert (settings.decoder_start_token_id, settings.eos_token_id, settings.pad_token_id) == (2, 3, 0)
    assert (settings.num_beams, settings.max_new_tokens) == (2, 7)
    tied = make_task("seq2seq", PAIRS, **flags, tie_encoder_decoder=True)[0].open_model()
    first, second = (each.encoder.blocks[1].attention.key.weight for each in (tied.get_encoder(), tied.get_decoder()))
    assert first is second


@pytest.mark.parametrize(
    ("metrics", "chosen", "is_lower_better"),
    [
        (None, "rougeL", False),
        (["sacrebleu"], "bleu", False),
        (["error_rate", "rouge"], "token_error_rate", True),
        (["loss"], "loss", True),
    ],
)
def test_rows_with_the_same_source_are_one_item(metrics, chosen, is_lower_better, model):
    """The first metric selects the best model."""
    task, rows = make_task("seq2seq", PAIRS, model=model, metrics=metrics)
    written = ["very good film", "bad", "very good film", "film"]
    found = task.metrics(rows, [{"prediction": text} for text in written])
    best = task.metric_names[0]
    assert (best, best in task.lower_is_better) == (chosen, is_lower_better)
    if "error_rate" in (metrics or []):
        assert found["token_error_rate"] == 1 / 5  # of 3, 1 and 1 words
        assert found["item_error_rate"] == 1 / 3


# --------------------------------------------------------------------------------------------------- masked words


@pytest.fixture(scope="module")
def wordy(tmp_path_factory) -> str:
    words = [*(f"w{i}" for i in range(40)), *(f"##w{i}" for i in range(40)), "."]
    return save_tiny(tmp_path_factory.mktemp("wordy"), words)


def texts(count: int) -> list[dict]:
    """Words of one to three tokens, full stops right behind them, and unknown words."""
    random = np.random.default_rng(3)
    made = []
    for _ in range(count):
        words = ["".join(f"w{i}" for i in random.integers(0, 40, random.integers(1, 4))) for _ in range(30)]
        made.append({"text": " ".join(word + "." * int(random.random() < 0.2) for word in words) + " unknown"})
    return made


def within(found: int, trials: int, share: float) -> bool:
    """Whether so many successes are no more than 5 standard deviations from what is expected."""
    return abs(found - trials * share) < 5 * math.sqrt(trials * share * (1 - share))


@pytest.mark.parametrize("whole", [False, True])
def test_masks(whole, wordy):
    """Of the words 15 % are chosen, and of their tokens 80 % masked, 10 % replaced and 10 % left."""
    flags = {"model": wordy, "max_length": 64, "whole_word_masking": whole}
    task, rows = make_task("masked-lm", texts(400), **flags)
    examples = task.encode(rows)
    batch = task.collate(examples, (1, 0))
    ids, labels = batch["input_ids"], batch["labels"]
    plain = torch.full_like(ids, task.tokenizer.pad_token_id)
    plain[batch["attention_mask"].bool()] = torch.from_numpy(
        np.concatenate([each["input_ids"] for each in examples])
    ).long()
    chosen, special = labels != IGNORED, torch.isin(plain, torch.tensor(task.tokenizer.all_special_ids))
    assert not (chosen & special).any()
    assert labels[chosen].equal(plain[chosen])
    assert ids[~chosen].equal(plain[~chosen])
    continues = torch.from_numpy(task.continues)[plain]
    first = ~special & ~(continues if whole else torch.zeros_like(special))
    assert within((chosen & first).sum().item(), first.sum().item(), 0.15)
    before = chosen[:, :-1][continues[:, 1:] & ~special[:, :-1]]
    assert before.equal(chosen[:, 1:][continues[:, 1:] & ~special[:, :-1]]) == whole
    masked, count = ids == task.tokenizer.mask_token_id, chosen.sum().item()
    assert within(masked.sum().item(), count, 0.8)
    assert within((chosen & ~masked & (ids != plain)).sum().item(), count, 0.1 * 80 / 81)  # one of 81 is the same
    assert len(ids[chosen & ~masked & (ids != plain)].unique()) > 70
    # They depend on the seed, the epoch and the number of the example alone.
    again = task.collate(examples[7:9], (1, 0))["labels"]
    assert again.equal(labels[7:9, : again.shape[1]])
    for seed in ((1, 1), (2, 0), ()):
        assert not task.collate(examples, seed)["labels"].equal(labels)
    assert task.collate(examples)["labels"].equal(task.collate(examples)["labels"])


def test_texts_are_concatenated_or_cut(wordy):
    rows = [{"content": text} for text in ("w0 w1 w2", "w3", "\u200b", "w4 w5 w6 w7 w8")]
    flags = {"model": wordy, "max_length": 6}
    task, read = make_task("masked-lm", rows, **flags)
    examples = task.encode(read)
    parts = ["w0 w1 w2 [SEP]", "w3 [SEP] w4 w5", "w6 w7 w8"]
    assert [tokens(task, each["input_ids"]) for each in examples] == [f"[CLS] {part} [SEP]" for part in parts]
    assert [(each["row"], each["cut"]) for each in examples] == [(0, 0), (1, 0), (3, 0)]
    task, read = make_task("masked-lm", rows, **flags, line_by_line=True)
    examples = task.encode(read)
    parts = ["w0 w1 w2", "w3", "w4 w5 w6 w7"]
    assert [tokens(task, each["input_ids"]) for each in examples] == [f"[CLS] {part} [SEP]" for part in parts]
    assert [(each["row"], each["cut"]) for each in examples] == [(0, 0), (1, 0), (3, 1)]
    for nothing in ("\u200b", "unknown words"):
        task, read = make_task("masked-lm", [{"text": nothing}], **flags)
        with pytest.raises(ValueError, match="word"):
            task.encode(read)


@pytest.mark.parametrize("implementation", ["scratchbert", "bert"])
def test_the_loss_of_masked_words_is_berts(implementation, wordy, tmp_path):
    """Of each row by itself; and a decoder is refused, which sees one side of a word only."""
    config = BertConfig.from_pretrained(wordy)
    tokenizer = AutoTokenizer.from_pretrained(wordy)
    for name, is_decoder in (("bert", False), ("decoder", True)):
        config.is_decoder = is_decoder
        BertForMaskedLM(config).save_pretrained(tmp_path / name)
        tokenizer.save_pretrained(tmp_path / name)
    flags = {"implementation": implementation, "max_length": 64, "line_by_line": True}
    task, rows = make_task("masked-lm", texts(9), model=str(tmp_path / "bert"), **flags)
    examples, opened = task.encode(rows), task.open_model().eval()
    bert = BertForMaskedLM.from_pretrained(tmp_path / "bert").eval()
    batch, expected = task.collate(examples), 0.0
    with torch.no_grad():
        for example in examples:
            alone = task.collate([example])
            expected += bert(**alone).loss * task.count(alone)
        torch.testing.assert_close(task.predict(opened, batch)[1], expected)
    with pytest.raises(ValueError, match="is_decoder"):
        make_task("masked-lm", texts(1), model=str(tmp_path / "decoder"), **flags)[0].open_model()


# ----------------------------------------------------------------------------------------------------------- all tasks

GOOD = {
    "classification": {"text": "good film", "label": "x"},
    "tagging": {"tokens": ["good", "film"], "tags": ["B-X", "O"]},
    "question-answering": {
        "question": "it",
        "context": "a good film",
        "answers": [{"text": "good", "answer_start": 2}],
    },
    "seq2seq": {"source": "good film", "target": "bad film ."},
    "masked-lm": {"text": "good bad film fun a very saw Paris good bad film fun a very saw Paris"},
}
FLAGS = {
    "tagging": {"stride": 0},
    "question-answering": {"stride": 2},
    "masked-lm": {"line_by_line": True},
    "seq2seq": {"max_target_length": 9},
}


@pytest.mark.parametrize("name", GOOD)
def test_losses_are_those_of_the_models(name, model):
    """Without padding, the loss divided by the number of labels is the mean that the model itself computes."""
    rows = [GOOD[name], {**GOOD[name], "label": "y"}]
    task, rows = make_task(name, rows, model=model, max_length=20, **FLAGS.get(name, {}))
    batch = task.collate(task.encode(rows))
    opened = task.open_model().eval()
    targets = {name: value for name, value in batch.items() if name != "decoder_input_ids"}
    if name == "question-answering":
        targets = as_question(batch)
    with torch.no_grad():
        loss = task.loss_of(task.logits(opened, batch), batch) / task.count(batch)
        outputs, again = task.predict(opened, batch)
        expected = opened(**targets).loss
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(again / task.count(batch), expected)
    assert len(outputs) == 2


CLASS = {"text": "a", "label": "1"}
MULTI = {"problem": "multi_label"}
REGRESSION = {"problem": "regression"}
BAD = {
    "no text": ("classification", {**CLASS, "text": " "}, {}, "'text'"),
    "no label": ("classification", {"text": "a"}, {}, "'label'"),
    "a label of no kind": ("classification", {**CLASS, "label": {"a": 1}}, {}, "label"),
    "a list for one label": ("classification", {**CLASS, "label": ["a", "b"]}, {}, "label"),
    "another label": ("classification", CLASS, {"labels": ["a", "b"]}, "'1'"),
    "a label twice": ("classification", {**CLASS, "label": "a|a"}, MULTI, "'a.a'"),
    "no number": ("classification", {**CLASS, "label": "high"}, REGRESSION, "'high'"),
    "an infinite number": ("classification", {**CLASS, "label": "inf"}, REGRESSION, "'inf'"),
    "neither 0 nor 1": ("classification", {**CLASS, "label": 2}, {**MULTI, "label_columns": ["label"]}, "'label' is 2"),
    "no target": ("seq2seq", {"source": "a", "target": ""}, {}, "'target'"),
}


@pytest.mark.parametrize(("name", "row", "flags", "named"), BAD.values(), ids=BAD)
def test_rows_that_cannot_be_used(name, row, flags, named, model):
    task = task_class(name)(ARGUMENTS[name](model=model, **flags))
    task.find_columns(list({**GOOD[name], **row}))
    with pytest.raises(ValueError, match=named):
        task.read(row)


@pytest.mark.parametrize(
    ("name", "max_length"), [("classification", 2), ("seq2seq", 1), ("tagging", 2), ("question-answering", 2)]
)
def test_inputs_have_room_for_a_token(name, max_length, model):
    task, rows = make_task(name, [GOOD[name], {**GOOD[name], "label": "y"}], model=model, max_length=max_length)
    with pytest.raises(ValueError, match="--max_length"):
        task.encode(rows)
