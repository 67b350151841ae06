"""scripts/pretrain_mlm.py: which words are masked, what sequences are made of texts, and that a run counts rightly, is
the same when it is resumed, and needs no memory for what it streams."""

import itertools
import json
import math
import tracemalloc
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import AutoModelForMaskedLM, BertConfig, BertForMaskedLM, BertForPreTraining, BertTokenizer
from transformers import PreTrainedTokenizerFast as FastTokenizer

import pretrain_mlm
from toolkit.finetuning.masked_lm import (
    Masking,
    Pretraining,
    concatenate,
    generator_of,
    sentence_pairs,
    split_sentences,
)
from toolkit.finetuning.task_settings import PretrainingSettings

pytestmark = pytest.mark.usefixtures("quiet_only_here")

PAD, UNK, CLS, SEP, MASK = SPECIAL = range(5)
SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "max_position_embeddings": 64,
}


# Words w0 to w99, each also as a piece that continues one, and a full stop.
VOCABULARY = [
    "[PAD]",
    "[UNK]",
    "[CLS]",
    "[SEP]",
    "[MASK]",
    *(f"w{i}" for i in range(100)),
    *(f"##w{i}" for i in range(100)),
    ".",
]
WORD, PIECE, STOP = 5, 105, 205


@pytest.fixture(scope="module")
def tokenizer():
    return BertTokenizer(vocab={word: i for i, word in enumerate(VOCABULARY)})


@pytest.fixture(scope="module")
def folder(tmp_path_factory, tokenizer):
    """A tokenizer, a configuration, a BERT for each of the two tasks, and two files of texts, of 1 to 40 words."""
    folder = tmp_path_factory.mktemp("pretraining")
    tokenizer.save_pretrained(folder / "tokenizer")
    (folder / "tiny.json").write_text(json.dumps({"model_type": "scratchbert", **SIZES}))
    torch.manual_seed(1)
    for name, model_class in (("mlm", BertForMaskedLM), ("both", BertForPreTraining)):
        model = model_class(BertConfig(vocab_size=len(tokenizer), initializer_range=0.3, **SIZES))
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    random = np.random.default_rng(0)
    for name, rows in (("train.txt", 107), ("validation.txt", 43)):
        lines = [" ".join(f"w{i}" for i in random.integers(0, 100, random.integers(1, 41))) for _ in range(rows)]
        (folder / name).write_text("\n".join(lines) + "\n")
    # Document 3 is "w3 w0. w3 w1. …", so that each sentence says where it stands.
    stories = [" ".join(f"w{i} w{n} ." for n in range(1 + i % 12)) for i in range(90)]
    (folder / "stories.txt").write_text("\n".join(stories) + "\n")
    return folder


def settings_of(folder, **flags) -> PretrainingSettings:
    started = {} if "model" in flags else {"config_file": folder / "tiny.json", "tokenizer": folder / "tokenizer"}
    started |= {"eval_batch_size": 7} if {"validation_file", "test_file"} & flags.keys() else {}
    given = {"train_file": [folder / "train.txt"], "output": "unused", "max_length": 24, "batch_size": 4}
    given |= {**started, **flags}
    return PretrainingSettings(
        **{name: str(value) if isinstance(value, Path) else value for name, value in given.items()}
    )


def task_of(folder, rank=0, world=1, **flags) -> Pretraining:
    process = SimpleNamespace(process_index=rank, num_processes=world, device=torch.device("cpu"), print=print)
    return Pretraining(settings_of(folder, **flags), process)


def run(folder, output, *flags) -> int:
    started = ["--config_file", folder / "tiny.json", "--tokenizer", folder / "tokenizer"]
    data = {"--train_file": folder / "train.txt", "--validation_file": folder / "validation.txt"}
    data = [each for name, file in data.items() if name not in flags for each in (name, file)]
    common = ["--max_length", 24, "--batch_size", 8, "--trackers", "none", "--learning_rate", 1e-3]
    return pretrain_mlm.main([str(each) for each in [*started, *data, "--output", output, *common, *flags]])


# ------------------------------------------------------------------------------------------------------------- masking


def some_text(rows=500, width=80) -> torch.Tensor:
    """Sequences of words of 1 to 3 tokens, full stops right behind them, unknown words, and padding at the end."""
    random = np.random.default_rng(3)
    made = []
    for _ in range(rows):
        ids = [CLS]
        while len(ids) < width - 6:
            ids += [WORD + int(random.integers(100))]
            ids += [PIECE + int(i) for i in random.integers(0, 100, random.integers(3))]
            ids += [STOP] * int(random.random() < 0.2) + [UNK] * int(random.random() < 0.05)
        made.append([*ids, SEP, *[PAD] * (width - len(ids) - 1)])
    return torch.tensor(made)


def within(found: int, trials: int, share: float) -> bool:
    """Whether so many successes are no more than 5 standard deviations from what is expected."""
    return abs(found - trials * share) < 5 * math.sqrt(trials * share * (1 - share))


def is_special(ids):
    return torch.isin(ids, torch.tensor(SPECIAL))


@pytest.mark.parametrize("whole_words", [False, True])
def test_15_percent_are_chosen_and_of_these_80_10_and_10_percent_masked_exchanged_and_left(tokenizer, whole_words):
    ids = some_text()
    masked, labels = Masking(tokenizer, whole_words)(ids, generator_of(7))
    chosen = labels != -100
    assert torch.equal(labels[chosen], ids[chosen])
    assert torch.equal(masked[~chosen], ids[~chosen])
    ordinary, count = ~is_special(ids), int(chosen.sum())
    if whole_words:  # are drawn one by one; words have up to 3 tokens
        words = ordinary & ~((ids >= PIECE) & (ids < STOP))
        assert within(int((chosen & words).sum()), int(words.sum()), 0.15)
    else:
        assert within(count, int(ordinary.sum()), 0.15)
    other = chosen & (masked != MASK) & (masked != ids)
    kept = 1 / len(VOCABULARY[5:])  # a random word may be the same
    assert within(int((chosen & (masked == MASK)).sum()), count, 0.8)
    assert within(int(other.sum()), count, 0.1 * (1 - kept))
    assert within(int((chosen & (masked == ids)).sum()), count, 0.1 * (1 + kept))
    assert len(masked[other].unique()) > 150  # any word may come
    assert not is_special(masked[other]).any()


@pytest.mark.parametrize("whole_words", [False, True])
def test_special_tokens_and_padding_are_never_chosen(tokenizer, whole_words):
    ids = some_text(200)
    _, labels = Masking(tokenizer, whole_words)(ids, generator_of(1))
    assert {PAD, UNK, CLS, SEP} == set(ids[is_special(ids)].tolist())
    assert (labels[is_special(ids)] == -100).all()


def words_of(row: list[int]) -> list[list[int]]:
    """The positions of each word's tokens."""
    words = []
    for i, token in enumerate(row):
        if PIECE <= token < STOP and row[i - 1] not in SPECIAL:
            words[-1].append(i)
        elif token not in SPECIAL:
            words.append([i])
    return words


def test_whole_words_are_chosen_whole_and_each_by_itself(tokenizer):
    ids = some_text(300)
    ids[:, 1] = PIECE  # a word that the sequence begins in the middle of
    _, labels = Masking(tokenizer, True)(ids, generator_of(2))
    stops = Counter()
    for row, chosen in zip(ids.tolist(), (labels != -100).tolist(), strict=True):
        for before, word in zip([None, *words_of(row)], words_of(row), strict=False):
            assert len({chosen[i] for i in word}) == 1
            if row[word[0]] == STOP:
                stops[chosen[word[0]], chosen[before[0]]] += 1
    assert stops[True, False]
    assert stops[False, True]  # a full stop is a word of its own


def test_tokens_are_chosen_one_by_one_without_whole_words(tokenizer):
    ids = some_text(100)
    _, labels = Masking(tokenizer, False)(ids, generator_of(2))
    chosen = (labels != -100).tolist()
    assert any(len({chosen[r][i] for i in word}) == 2 for r, row in enumerate(ids.tolist()) for word in words_of(row))


@pytest.mark.parametrize("streaming", [{}, {"streaming": True, "max_steps": 9, "shuffle_buffer": 20}])
def test_masks_are_a_function_of_seed_epoch_batch_and_process(folder, streaming):
    def batches(epoch, start, **flags):
        return list(task_of(folder, **streaming, **flags).batches(epoch, start))

    first = batches(0, 0)
    for i, (places, batch) in enumerate(batches(0, 3), 3):
        assert places == first[i][0]
        assert all(torch.equal(batch[name], first[i][1][name]) for name in batch)
    assert not torch.equal(batches(1, 0)[0][1]["labels"], first[0][1]["labels"])
    assert not torch.equal(batches(0, 0, seed=1)[0][1]["labels"], first[0][1]["labels"])


@pytest.mark.parametrize("streaming", [{}, {"streaming": True, "max_steps": 9, "shuffle_buffer": 20}])
def test_no_two_batches_have_the_same_masks(folder, streaming, monkeypatch):
    """What stands at the labels' place tells what they are drawn by."""
    drawn = []
    monkeypatch.setattr(Masking, "__call__", lambda self, ids, generator: (ids, generator.initial_seed()))
    for seed, rank, epoch in itertools.product(range(2), range(2), range(2)):
        task = task_of(folder, rank, 2, seed=seed, **streaming)
        drawn += [batch["labels"] for _, batch in task.batches(epoch, 0)]
    assert len(drawn) > 30
    assert len(set(drawn)) == len(drawn)


# --------------------------------------------------------------------------------------- from documents to sequences


def test_documents_are_laid_end_to_end():
    pieces = concatenate([([10, 11, 12], "a"), ([13], "b"), ([14, 15, 16, 17, 18], "c")], 4, SEP)
    # 10 11 12 S | 13 S 14 15 | 16 17 18 S
    assert list(pieces) == [([10, 11, 12], "a"), ([13, SEP, 14, 15], "b"), ([16, 17, 18], "c")]
    pieces = concatenate([([10, 11], "a"), ([12, 13, 14], "b")], 2, SEP)
    # 10 11 | S 12 | 13 14 | S
    assert list(pieces) == [([10, 11], "a"), ([12], "b"), ([13, 14], "b")]


def texts_of(folder, tokenizer, name="train.txt") -> list[list[int]]:
    return [[tokenizer.vocab[word] for word in line.split()] for line in (folder / name).read_text().splitlines()]


def test_packing_keeps_every_token_in_order(folder, tokenizer):
    sequences = task_of(folder).train_set
    assert max(sequences["length"]) == 24
    assert all(row[0] == CLS and row[-1] == SEP and CLS not in row[1:] for row in sequences["input_ids"])
    found = [token for row in sequences["input_ids"] for token in row if token not in (CLS, SEP)]
    assert found == [token for text in texts_of(folder, tokenizer) for token in text]


def test_line_by_line_each_text_is_a_sequence_cut_at_the_end(folder, tokenizer):
    sequences = task_of(folder, line_by_line=True).train_set
    assert list(sequences["input_ids"]) == [[CLS, *text[:22], SEP] for text in texts_of(folder, tokenizer)]
    assert sequences["place"][2] == "train.txt, row 3 (line 3)"


def test_sentences_end_with_a_full_stop_or_a_line():
    text = "He came. \"Who?\" she said!  'Me.' So…\nThe end\n\n他来了。谁？"
    assert split_sentences(text) == ["He came.", '"Who?"', "she said!", "'Me.'", "So…", "The end", "他来了。", "谁？"]


def test_half_of_the_pairs_follow_and_the_labels_say_which(folder):
    task = task_of(folder, train_file=[folder / "stories.txt"], next_sentence=True)
    follow, pairs = Counter(), task.train_set
    for ids, types, label in zip(
        pairs["input_ids"], pairs["token_type_ids"], pairs["next_sentence_label"], strict=True
    ):
        end = ids.index(SEP)
        assert (ids[0], ids[-1], ids.count(SEP)) == (CLS, SEP, 2)
        assert types == [0] * (end + 1) + [1] * (len(ids) - end - 1)
        assert len(ids) <= 24
        a, b = sentences_in(ids[1:end]), sentences_in(ids[end + 1 : -1])
        follow[label] += 1
        if label == 0:
            assert b[0] == (a[-1][0], a[-1][1] + 1)  # of the same document, the next
        else:
            assert b[0][0] != a[-1][0]
    assert follow.total() > 100
    random = np.random.default_rng(0)
    labels = [next(sentence_pairs([[1], [2]], [[[3]]], 4, random))[2] for _ in range(2000)]
    assert within(sum(labels), 2000, 0.5)


def sentences_in(ids: list[int]) -> list[tuple[int, int]]:
    """Document and number of the sentences of which all is there."""
    return [(ids[i - 2] - WORD, ids[i - 1] - WORD) for i, token in enumerate(ids) if token == STOP and i >= 2] or [
        (ids[0] - WORD, ids[1] - WORD)
    ]


def test_what_a_random_sentence_displaces_comes_in_the_next_pair():
    document, others = [[100 + i] for i in range(30)], [[[7]]]
    pairs = list(sentence_pairs(document, others, 6, np.random.default_rng(0)))
    seen = [token for a, b, label in pairs for token in (a if label else a + b)]
    assert seen == list(range(100, 100 + len(seen)))
    assert len(seen) >= 29  # a last sentence that is left alone makes no pair
    assert {label for *_, label in pairs} == {0, 1}


def test_pairs_too_long_are_cut_away_from_where_they_meet():
    document = [list(range(10, 20)), list(range(20, 30))]
    for seed in range(20):
        ((a, b, label), *_) = sentence_pairs(document, [[[5] * 9]], 7, np.random.default_rng(seed))
        assert (a, b) == ([16, 17, 18, 19], [5, 5, 5] if label else [20, 21, 22])


# ----------------------------------------------------------------------------------------------- streams and processes


def ids_of(batches) -> list[tuple]:
    """Sequences as they were: what was masked is put back."""
    found = []
    for batch in (batch for places, batch in batches if places):
        ids = batch["input_ids"].where(batch["labels"] == -100, batch["labels"])
        found += [tuple(ids[i, : batch["attention_mask"][i].sum()].tolist()) for i in range(len(ids))]
    return found


STREAM = {"streaming": True, "max_steps": 5, "shuffle_buffer": 30}


def test_a_stream_is_what_is_in_memory_in_another_order_each_epoch(folder):
    task = task_of(folder, **STREAM)
    assert task.batches_per_epoch() is None
    first, second = (ids_of(task.batches(epoch, 0)) for epoch in (0, 1))
    rows = list(map(tuple, task_of(folder).train_set["input_ids"]))
    assert Counter(first) == Counter(second) == Counter(rows)
    assert first != second
    assert first != rows
    assert ids_of(task.batches(0, 0)) == first


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("rows", [9, 10, 11])  # 2 steps of 2 x 2, and 1, 2 or 3 sequences that are left over
def test_two_processes_have_every_sequence_once(folder, tmp_path, rows, streaming):
    path = tmp_path / "few.txt"
    path.write_text("".join(f"w{i} w1\n" for i in range(rows)))
    flags = {"train_file": [path], "line_by_line": True, "batch_size": 2}
    streamed = STREAM if streaming else {}
    shares = [list(task_of(folder, rank, 2, **flags, **streamed).batches(0, 0)) for rank in (0, 1)]
    assert len(shares[0]) == len(shares[1])
    found = Counter(ids_of(shares[0] + shares[1]))
    assert set(found.values()) == {1}
    assert found.total() == rows
    assert len(task_of(folder, 0, 2, **flags).sampler) == len(shares[0])


def test_a_file_larger_than_memory_may_be_streamed(folder, tmp_path, monkeypatch):
    path, text = tmp_path / "large.txt", "w1 w2 w3 " * 2222
    with path.open("w") as file:
        file.writelines(f"{i} {text}\n" for i in range(3000))
    assert path.stat().st_size > 60e6
    # What the tokenizer would make of so much takes longer than a test may.
    monkeypatch.setattr(Pretraining, "tokenize", lambda self, texts: [[5] * (len(text) // 400) for text in texts])
    tracemalloc.start()
    words = 0
    for _, batch in task_of(folder, **STREAM, train_file=[path], batch_size=64).batches(0, 0):
        words += int((batch["input_ids"] != PAD).sum())
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert words > 3000 * 49  # all of it came by
    assert most < 10e6


# --------------------------------------------------------------------------------------------------- loss and metrics


@pytest.mark.parametrize("implementation", ["scratchbert", "bert"])
@pytest.mark.parametrize("flags", [{}, {"next_sentence": True}])
def test_the_loss_is_berts(folder, implementation, flags):
    name, reference = ("both", BertForPreTraining) if flags else ("mlm", BertForMaskedLM)
    flags = {**flags, "model": folder / name, "train_file": [folder / "stories.txt"], "batch_size": 9}
    task = task_of(folder, implementation=implementation, **flags)
    bert = reference.from_pretrained(folder / name).eval()
    _, batch = next(task.batches(0, 0))
    counts = task.counts(batch)
    assert counts.tolist() == [int((batch["labels"] >= 0).sum()), *([9] if "next_sentence" in flags else [])]
    loss = (task.losses(task.model.eval(), batch) / counts).sum()
    torch.testing.assert_close(loss, bert(**batch).loss, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("source", ["model", "config_file"])
@pytest.mark.parametrize("implementation", ["scratchbert", "bert"])
def test_our_model_removes_padding(implementation, source, folder):
    start = {"model": {"model": folder / "mlm"}, "config_file": {}}[source]
    task = task_of(folder, implementation=implementation, train_file=[folder / "stories.txt"], **start)
    assert getattr(task.model.config, "padding_free", None) == (True if implementation == "scratchbert" else None)


def test_without_padding_losses_are_the_same(folder):
    """The masks are others, as they are drawn for as many tokens as there are. Those of what is held out are not."""
    stories = [folder / "stories.txt"]
    flags = {"model": folder / "both", "train_file": stories, "validation_file": stories, "next_sentence": True}
    padded, packed = (task_of(folder, padding_free_collation=flat, **flags) for flat in (False, True))
    _, batch = next(packed.batches(0, 0))
    assert batch["input_ids"].shape[0] == 1
    assert packed.losses(packed.model, batch).isfinite().all()
    expected, found = (task.evaluate(task.model, "validation").metrics for task in (padded, packed))
    assert found == pytest.approx(expected, rel=1e-5)


def test_perplexity_is_that_of_the_masked_words_of_every_row(folder):
    flags = {"model": folder / "mlm", "validation_file": [folder / "validation.txt"], "line_by_line": True}
    task = task_of(folder, **flags)
    rows = task.splits["validation"]
    assert len(rows) == 43
    bert, losses = BertForMaskedLM.from_pretrained(folder / "mlm").eval(), []
    for ids, labels in zip(rows["input_ids"], rows["labels"], strict=True):
        with torch.no_grad():
            scores = bert(torch.tensor([ids])).logits[0].double().log_softmax(-1)
        losses += [-scores[i, label].item() for i, label in enumerate(labels) if label != -100]
    found = task.evaluate(task.model, "validation").metrics
    assert found["loss"] == pytest.approx(sum(losses) / len(losses), rel=1e-6)
    assert found["perplexity"] == pytest.approx(math.exp(sum(losses) / len(losses)), rel=1e-6)
    # Another seed, other batches: the same masks.
    again = task_of(folder, **flags, seed=3, eval_batch_size=1)
    assert list(again.splits["validation"]["labels"]) == list(rows["labels"])
    assert again.evaluate(again.model, "validation").metrics == pytest.approx(found, rel=1e-6)
    text = [
        [t if t != -100 else i for i, t in zip(*row, strict=True)]
        for row in zip(rows["input_ids"], rows["labels"], strict=True)
    ]
    assert text == list(
        task_of(folder, line_by_line=True, train_file=[folder / "validation.txt"]).train_set["input_ids"]
    )


@pytest.mark.parametrize("streaming", [False, True])
def test_the_loss_of_word_frequencies(folder, streaming):
    """Those of the training set or, where that is streamed, of the evaluated one."""
    files = [folder / "train.txt"] * 2 + [folder / "validation.txt"]
    flags = {"streaming": streaming, "max_steps": 1, "train_file": files, "validation_file": files[-1:]}
    task = task_of(folder, line_by_line=True, max_length=64, **flags)
    words = " ".join(path.read_text() for path in (files[-1:] if streaming else files)).split()
    counts = Counter(VOCABULARY.index(word) for word in words)
    ordinary = range(len(SPECIAL), len(VOCABULARY))
    labels = [label for row in task.splits["validation"]["labels"] for label in row if label != -100]
    total = sum(counts[i] + 1 for i in ordinary)
    expected = -np.mean([math.log((counts[label] + 1) / total) for label in labels])
    assert task.evaluate(task.model, "validation").metrics["loss_by_frequency"] == pytest.approx(expected, rel=1e-6)


def test_pairs_are_judged_one_by_one(folder):
    task = task_of(
        folder,
        model=folder / "both",
        validation_file=[folder / "stories.txt"],
        next_sentence=True,
        train_file=[folder / "stories.txt"],
    )
    rows, losses, right = task.splits["validation"], [], []
    bert = BertForPreTraining.from_pretrained(folder / "both").eval()
    for ids, types, label in zip(rows["input_ids"], rows["token_type_ids"], rows["next_sentence_label"], strict=True):
        with torch.no_grad():
            told = bert(torch.tensor([ids]), token_type_ids=torch.tensor([types])).seq_relationship_logits[0]
        losses.append(-told.log_softmax(-1)[label].item())
        right.append(float(told[label] > told[1 - label]))
    found = task.evaluate(task.model, "validation").metrics
    assert found["next_sentence_loss"] == pytest.approx(np.mean(losses), rel=1e-5)
    assert found["next_sentence_accuracy"] == pytest.approx(np.mean(right))
    assert found["loss"] == pytest.approx(math.log(found["perplexity"]) + np.mean(losses), rel=1e-5)


# ---------------------------------------------------------------------------------------------------------------- runs


def test_a_run_from_random_weights_begins_at_the_size_of_the_vocabulary(folder, tmp_path):
    assert run(folder, tmp_path / "out", "--max_steps", 30, "--eval_steps", 30, "--learning_rate", 1e-2) == 0
    report = json.loads((tmp_path / "out" / "metrics.json").read_text())
    start = report["history"][0]
    assert (start["step"], start["epoch"]) == (0, 0)
    assert start["validation"]["perplexity"] == pytest.approx(len(VOCABULARY), rel=0.1)
    assert report["validation"]["perplexity"] < start["validation"]["perplexity"]
    for name in ("recipe.yaml", "README.md", "curves.png", "tokenizer.json"):
        assert (tmp_path / "out" / name).exists()
    model = AutoModelForMaskedLM.from_pretrained(tmp_path / "out")
    assert type(model).__name__ == "ScratchBertForMaskedLM"
    assert model.config.vocab_size == len(VOCABULARY)


def test_when_nothing_becomes_better_the_start_is_kept(folder, tmp_path):
    assert run(folder, tmp_path / "out", "--max_steps", 2, "--learning_rate", 1000, "--warmup_ratio", 0) == 0
    report = json.loads((tmp_path / "out" / "metrics.json").read_text())
    assert report["checkpoint"].startswith("step-00000000")
    assert report["validation"] == pytest.approx(report["history"][0]["validation"])


class Crash(BaseException):
    """What no handler catches."""


def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(folder, tmp_path, monkeypatch):
    stories = folder / "stories.txt"
    flags = ["--train_file", stories, "--validation_file", stories, "--next_sentence", "--whole_word_masking"]
    # An epoch has 19 batches.
    flags += ["--streaming", "--shuffle_buffer", 30, "--max_steps", 22, "--save_steps", 3, "--eval_steps", 11]
    assert run(folder, tmp_path / "whole", *flags) == 0
    losses, calls = Pretraining.losses, []

    def crashes(self, model, batch):
        calls.append(1)
        if len(calls) in (5, 23):  # at step 5 of the first epoch and, from step 4 on again, at 21, in the second
            raise Crash
        return losses(self, model, batch)

    monkeypatch.setattr(Pretraining, "losses", crashes)
    for _ in range(2):
        with pytest.raises(Crash):
            run(folder, tmp_path / "resumed", *flags, "--resume")
    assert run(folder, tmp_path / "resumed", *flags, "--resume") == 0
    whole, resumed = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("whole", "resumed"))
    assert whole == resumed
    reports = [json.loads((tmp_path / name / "metrics.json").read_text()) for name in ("whole", "resumed")]
    assert reports[0]["validation"] == reports[1]["validation"]
    assert reports[0]["epochs"] >= 1


def test_documents_without_a_pair_are_counted(folder, tmp_path, capsys):
    """Of the stories, every twelfth has one sentence: 0, 12, …, 84."""
    stories, message = folder / "stories.txt", "8 of 90 documents of the {} set give no pair of passages"
    task = task_of(folder, train_file=[stories], validation_file=[stories], next_sentence=True)
    said = capsys.readouterr().out
    assert message.format("train") in said
    assert message.format("validation") in said
    task = task_of(folder, train_file=[stories], next_sentence=True, streaming=True, max_steps=9)
    assert "no pair" not in capsys.readouterr().out
    for epoch in range(2):
        list(task.batches(epoch, 0))
    assert capsys.readouterr().out.count(message.format("train")) == 1


def test_a_fraction_of_the_documents_is_held_out(folder):
    task = task_of(folder, train_file=[folder / "stories.txt"], validation_fraction=0.2, line_by_line=True)
    places = [set(examples["place"]) for examples in (task.train_set, task.splits["validation"])]
    assert [len(each) for each in places] == [72, 18]
    assert not places[0] & places[1]
    with pytest.raises(ValueError, match="--streaming and --validation_fraction are both given"):
        task_of(folder, train_file=["x.txt"], validation_fraction=0.2, streaming=True, max_steps=9)


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("change", ["vocabulary", "lower case"])
def test_a_changed_tokenizer_is_noticed(streaming, change, folder, tokenizer, tmp_path, capsys):
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    flags = ["--tokenizer", tmp_path / "tokenizer", "--streaming", streaming]
    assert run(folder, tmp_path / "out", *flags, "--max_steps", 2) == 0
    words = [*VOCABULARY[:5], *reversed(VOCABULARY[5:])] if change == "vocabulary" else VOCABULARY
    changed = BertTokenizer(vocab={word: i for i, word in enumerate(words)}, do_lower_case=change == "vocabulary")
    changed.save_pretrained(tmp_path / "tokenizer")
    capsys.readouterr()
    assert run(folder, tmp_path / "out", *flags, "--max_steps", 3, "--resume") == 2
    assert "--resume: the tokenizer has changed since step-00000002" in capsys.readouterr().err
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    assert run(folder, tmp_path / "out", *flags, "--max_steps", 3, "--resume") == 0


@pytest.mark.parametrize("steps", [7, 14, 28, 35])
def test_the_epochs_of_a_streamed_run(steps, folder, tmp_path):
    """An epoch of 107 lines has 14 batches. Nobody knows that before its end."""
    flags = ["--streaming", "--max_steps", steps, "--line_by_line", "--log_steps", 1, "--eval_steps", 99]
    assert run(folder, tmp_path / "out", *flags) == 0
    report = json.loads((tmp_path / "out" / "metrics.json").read_text())
    assert report["epochs"] == (steps / 14 if steps > 14 else None)
    points = {point["step"]: point["epoch"] for point in report["history"] if "loss" in point}
    assert [points[step] for step in (1, 7)] == [None, None]
    assert [points[step] for step in (21, 28) if step <= steps] == [1.5, 2][: max(0, steps // 7 - 2)]
    assert ("epochs" in (tmp_path / "out" / "README.md").read_text().split(f"{steps} steps")[1][:20]) == (steps > 14)


# -------------------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--model", "x"], "--config_file and --model are both given"),
        (["--streaming"], "--streaming is given without --max_steps"),
        (["--next_sentence", "--line_by_line"], "--next_sentence and --line_by_line are both given"),
        (["--shuffle_buffer", "0"], "--shuffle_buffer is 0; expected 1 or more"),
        (["--max_length", "2"], "--max_length is 2; expected 3 or more"),
        (["--max_length", "4", "--next_sentence"], "--max_length is 4; expected 5 or more"),
        (["--max_length", "65"], "--max_length is 65; expected at most 64"),
        (["--config_file", "missing.json"], "missing.json"),
        (["--config_file", "{folder}/train.txt"], "train.txt is not JSON"),
        (["--config_file", "{folder}/list.json"], "list.json is not a JSON object"),
        (["--config_file", "{folder}/small.json"], "the tokenizer has 206 tokens; expected at most vocab_size, 50"),
        (["--config_file", "{folder}/typo.json"], "has the field 'num_hidden_layer'; expected fields of ScratchBert"),
        (["--config_file", "{folder}/typo.json"], "perhaps 'num_hidden_layers'"),
        (["--config_file", "{folder}/causal.json"], "causal.json has is_decoder true; expected an encoder"),
        (
            ["--config_file", "{folder}/causal.json", "--implementation", "bert"],
            "causal.json has is_decoder true; expected an encoder",
        ),
        (
            ["--config_file", "{folder}/relative.json", "--implementation", "bert"],
            "has position_embedding_type 'relative_key', which --implementation bert does not support",
        ),
        (
            ["--config_file", "{folder}/both.json", "--implementation", "bert"],
            "has is_encoder_decoder True, which --implementation bert does not support; expected False",
        ),
        (["--config_file", "{folder}/pre_norm.json", "--implementation", "bert"], "has the field 'norm_first'"),
        (["--text_column", "body"], "no column 'body' for the texts (--text_column); the columns are 'text'"),
        (["--train_file", "{folder}/train.txt", "--next_sentence"], "two documents of two sentences"),
        (["--validation_file", "{folder}/one.txt"], "the validation set is too small: no word of it is masked"),
        (["--tokenizer", "{folder}/unmasked"], "has no mask token"),
        (["--tokenizer", "{folder}/unclassed"], "lacks [CLS] or [SEP]"),
        (["--tokenizer", "{folder}/words", "--whole_word_masking"], "expected a WordPiece tokenizer for"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(folder, tmp_path, capsys, flags, message):
    (folder / "list.json").write_text("[1]")
    (folder / "small.json").write_text(json.dumps({**SIZES, "vocab_size": 50}))
    for name, fields in {
        "typo": {"num_hidden_layer": 1},
        "causal": {"is_decoder": True},
        "relative": {"position_embedding_type": "relative_key"},
        "both": {"is_encoder_decoder": True},
        "pre_norm": {"norm_first": True},
    }.items():
        (folder / f"{name}.json").write_text(json.dumps({**SIZES, **fields}))
    (folder / "one.txt").write_text("w1\n")
    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(VOCABULARY[:50])}, unk_token="[UNK]"))
    for name, left_out in (("words", None), ("unmasked", "mask"), ("unclassed", "cls")):
        roles = {
            f"{role}_token": f"[{role.upper()}]" for role in ("pad", "unk", "cls", "sep", "mask") if role != left_out
        }
        FastTokenizer(tokenizer_object=words, **roles).save_pretrained(folder / name)
    flags = [flag.format(folder=folder) for flag in flags]
    try:
        code = run(folder, tmp_path / "out", *flags)
    except SystemExit as stop:
        code = stop.code
    assert code == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert message in lines[0]


@pytest.mark.parametrize("implementation", ["scratchbert", "bert"])
def test_a_decoder_is_not_pretrained_as_an_encoder(implementation, folder, tmp_path, tokenizer):
    BertForMaskedLM(BertConfig(vocab_size=len(tokenizer), is_decoder=True, **SIZES)).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="has is_decoder true; expected an encoder"):
        task_of(folder, model=tmp_path, implementation=implementation)


@pytest.mark.parametrize("implementation", ["scratchbert", "bert"])
def test_the_config_json_of_a_bert_is_a_configuration_file(implementation, folder):
    config = {
        **json.loads((folder / "mlm" / "config.json").read_text()),
        "gradient_checkpointing": False,
        "position_embedding_type": "absolute",
        "pooler_type": "first_token_transform",
    }
    (folder / "google.json").write_text(json.dumps(config))
    files = {"config_file": folder / "google.json", "tokenizer": folder / "tokenizer"}
    assert task_of(folder, implementation=implementation, **files).model.config.hidden_size == 32


def test_neither_model_nor_configuration(capsys):
    with pytest.raises(SystemExit) as stop:
        pretrain_mlm.main(["--train_file", "x.txt", "--output", "out"])
    assert stop.value.code == 2
    assert "--model or --config_file is missing" in capsys.readouterr().err
    with pytest.raises(ValueError, match=r"--config_file is tiny\.json without --tokenizer"):
        PretrainingSettings(config_file="tiny.json", output="out", train_file=["x.txt"])
