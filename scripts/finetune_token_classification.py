#!/usr/bin/env python
"""Fine-tunes a BERT to tag the words of a text: names of persons and places, say, or parts of speech.

    finetune_token_classification.py --model google-bert/bert-base-cased --train_file train.jsonl
                                     --validation_file val.jsonl --output my-tagger
    finetune_token_classification.py configuration/recipes/entities.yaml --model MODEL --output entities-0
    accelerate launch --config_file configuration/two_process.yaml scripts/finetune_token_classification.py …

A row has its words (column tokens or words) and as many tags (tags, ner_tags or labels), two lists; in CSV and TSV two
texts with a space between words and between tags. Tags are IOB2: B-PER at the first word of a person, I-PER at those
that follow, O outside; or, with --scheme plain, any.

A row of more than --max_length tokens is read in windows that overlap. Each word is learned, and tagged, in one of
them, so that none is lost. A word's tag is that of its first piece. A word that the tokenizer sees nothing in, such as
a zero-width space, is tagged O (with --scheme plain, with the commonest tag), and counts in the metrics.

--output gets the model in the Hub's form with its tokenizer, a model card, metrics.json, curves.png, recipe.yaml and
the checkpoints.

Exit code: 0 done, 1 the training broke off, 2 bad usage or data, 143 stopped by SIGTERM (--resume continues).
"""

import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn
from transformers import AutoTokenizer, BertForTokenClassification

from modeling_scratchbert import ScratchBertForTokenClassification
from toolkit.training import loop
from toolkit.training.batches import PadOrFlatten, unpadded
from toolkit.training.labels import LabelSettings, class_weights
from toolkit.training.loop import FineTuning, sources
from toolkit.training.metrics import compute, load
from toolkit.training.rows import columns_of, find_column, load_rows
from toolkit.training.settings import flag

WORDS = ("tokens", "words")
TAGS = ("tags", "ner_tags", "labels")
CLASSES = {"scratchbert": ScratchBertForTokenClassification, "bert": BertForTokenClassification}
METRICS = {"iob2": ["seqeval"], "plain": ["accuracy", "f1"]}
OUTSIDE = "O"
IGNORED = -100  # what torch's cross-entropy leaves out


@dataclass
class TokenClassificationSettings(LabelSettings):
    """Of `finetune_token_classification`."""

    max_length: int = flag(128, "tokens to a window; rows with more are read in several")
    stride: int | None = flag(
        None, "tokens that two windows of a row have in common; left out: a quarter of --max_length"
    )
    scheme: Literal["iob2", "plain"] = flag("iob2", "what the tags are: entities, B-TYPE I-TYPE O; or any, one by one")
    words_column: str | None = flag(None, f"left out: the first there is of {', '.join(WORDS)}")
    tags_column: str | None = flag(None, f"left out: the first there is of {', '.join(TAGS)}")
    label_all_pieces: bool = flag(False, "a word's other pieces learn its tag as well (I-PER, of B-PER)")
    metric: Literal["f1", "accuracy"] = flag("f1", "which one says what model is best")

    def __post_init__(self):
        super().__post_init__()
        self.stride = self.max_length // 4 if self.stride is None else self.stride
        if self.stride < 0:
            raise ValueError(f"--stride is {self.stride}; it wants 0 or more")
        if self.labels and self.scheme == "iob2":
            bad = [f"{tag!r} is among them" for tag in self.labels if not is_iob(tag)]
            if bad or OUTSIDE not in self.labels:
                told = (bad or ["O is missing"])[0]
                raise ValueError(f"--labels want to be O, B-TYPE and I-TYPE with --scheme iob2; {told}")


# ------------------------------------------------------------------------------------------------------- words to tags


def is_iob(tag: str) -> bool:
    return tag == OUTSIDE or (tag[:2] in ("B-", "I-") and len(tag) > 2)


def check_iob2(tags: Sequence[str]) -> None:
    """Raises ValueError unless every entity begins with B- and goes on with I- of the same type (IOB2: Tjong Kim
    Sang & Veenstra 1999, section 2)."""
    before = OUTSIDE
    for number, tag in enumerate(tags, 1):
        if not is_iob(tag):
            raise ValueError(f"tag {number} is {tag!r}; it wants to be O, B-TYPE or I-TYPE (or give --scheme plain)")
        if tag.startswith("I-") and before[2:] != tag[2:]:
            raise ValueError(f"tag {number} is {tag}, after {before}; in IOB2 an entity begins with B-{tag[2:]}")
        before = tag


def iob_tags(tags: set[str]) -> list[str]:
    """O, and for each type that occurs both its tags: what a longer name of it would need may come later."""
    types = sorted({tag[2:] for tag in tags - {OUTSIDE}})
    return [OUTSIDE, *(f"{prefix}-{each}" for each in types for prefix in "BI")]


def list_of(row: dict, column: str) -> list[str]:
    """A row's words or tags.

    Raises:
        ValueError: there are none, or one is neither text nor a number.
    """
    value = row.get(column)
    if isinstance(value, str):
        value = [part for part in value.split(" ") if part]
    if not isinstance(value, list) or not value:
        raise ValueError(f"{column!r} is {'empty' if value in (None, []) else f'{value!r}; it wants to be a list'}")
    if bad := [each for each in value if not isinstance(each, str | int) or isinstance(each, bool)]:
        raise ValueError(f"{column!r} has {bad[0]!r} in it, which is no text")
    return [str(each) for each in value]


@dataclass
class Window:
    """A part of a row, between the tokenizer's special tokens."""

    input_ids: list[int]
    token_type_ids: list[int]
    piece_of: list[int | None]  # the word, of those that are tagged here, that each token is a piece of
    words: list[int]  # those that are tagged here
    positions: list[int]  # of the first piece of each of them


def windows(tokenizer, words: list[str], max_length: int, stride: int) -> list[Window]:
    """A row in windows, of which two neighbours have `stride` tokens in common. A word belongs to one of them, by its
    first piece: in the first half of what two have in common to the earlier one, in the other half to the later.

    Returns:
        Windows of up to `max_length` tokens; none where the tokenizer sees nothing in any word.

    Raises:
        ValueError: a window has no room for more than `stride` tokens.
    """
    room = max_length - tokenizer.num_special_tokens_to_add()
    if room <= stride:
        raise ValueError(
            f"--max_length {max_length} leaves {room} tokens to words; it wants more than --stride, {stride}"
        )
    encoded = tokenizer(words, is_split_into_words=True, return_token_type_ids=True, verbose=False)
    word_of = encoded.word_ids()  # None for [CLS] and [SEP]; no index has a word without pieces
    pieces = [i for i, word in enumerate(word_of) if word is not None]
    if not pieces:
        return []
    begin, end = pieces[0], pieces[-1] + 1
    first = {}
    for i in pieces:
        first.setdefault(word_of[i], i)
    starts = range(begin, max(end - stride, begin + 1), room - stride)
    bounds = [begin, *(start + stride // 2 for start in starts[1:]), end]
    found = []
    for start, low, high in zip(starts, bounds[:-1], bounds[1:], strict=True):
        own = {word: i for word, i in first.items() if low <= i < high}
        kept = [*range(begin), *range(start, min(start + room, end)), *range(end, len(word_of))]
        ids, types = ([encoded[name][i] for i in kept] for name in ("input_ids", "token_type_ids"))
        piece_of = [word_of[i] if word_of[i] in own else None for i in kept]
        found.append(Window(ids, types, piece_of, list(own), [begin + i - start for i in own.values()]))
    return found


# ---------------------------------------------------------------------------------------------------------------- task


class TokenClassification(FineTuning):
    """Words and their tags."""

    name = "token-classification"

    def __init__(self, settings: TokenClassificationSettings, accelerator):
        super().__init__(settings, accelerator)
        load(METRICS[settings.scheme][0])  # a package that is missing shows before the training
        self.tokenizer = AutoTokenizer.from_pretrained(settings.model)
        if not self.tokenizer.is_fast:
            raise ValueError(
                f"--model {settings.model}: its tokenizer is a slow one, which does not know the words of pieces"
            )
        self.metric, self.labels = settings.metric, settings.labels
        self.rows = {}
        for split, source in sources(settings).items():  # the training set first
            self.rows[split] = self.read(source)
            self.labels = self.labels or self.find_labels(self.rows[split])
            self.splits[split] = self.encode(self.rows[split])
        self.train_set = self.splits.pop("train")
        self.tag_counts = Counter(tag for tags in self.rows.pop("train")["tags"] for tag in tags)
        self.model = self.make_model()
        self.weights = class_weights(settings.class_weights, self.labels, self.tag_counts).to(accelerator.device)
        self.collate = PadOrFlatten(self.tokenizer, settings.padding_free_collation, per_token=["labels"])

    # -- data

    def read(self, source):
        """The rows of a split: words and tags."""
        settings, columns = self.settings, columns_of(source)
        words_column = find_column(columns, settings.words_column, WORDS, "the words (--words_column)")
        tags_column = find_column(columns, settings.tags_column, TAGS, "the tags (--tags_column)")

        def check(row: dict) -> dict:
            words, tags = list_of(row, words_column), list_of(row, tags_column)
            if len(words) != len(tags):
                raise ValueError(f"there are {len(words)} words and {len(tags)} tags")
            if settings.scheme == "iob2":
                check_iob2(tags)
            if self.labels and (unknown := [tag for tag in tags if tag not in self.labels]):
                raise ValueError(f"a tag is {unknown[0]!r}; it wants to be one of {', '.join(self.labels)}")
            return {"words": words, "tags": tags}

        return load_rows(source, check, settings.on_bad_row, self.accelerator.print)

    def find_labels(self, rows) -> list[str]:
        """The set of tags: those of the training set."""
        found = {tag for tags in rows["tags"] for tag in tags}
        labels = iob_tags(found) if self.settings.scheme == "iob2" else sorted(found)
        if len(labels) < 2:
            raise ValueError(f"there want to be two tags or more; the training set has {', '.join(labels)}")
        return labels

    def encode(self, rows):
        """The windows of the rows as the model takes them, each with the number of its row."""

        def encode(batch: dict, numbers: list[int]) -> dict:
            found = [
                (number, place, tags, window)
                for number, place, words, tags in zip(
                    numbers, batch["place"], batch["words"], batch["tags"], strict=True
                )
                for window in windows(self.tokenizer, words, self.settings.max_length, self.settings.stride)
            ]
            return {
                "input_ids": [window.input_ids for *_, window in found],
                "token_type_ids": [window.token_type_ids for *_, window in found],
                "labels": [self.targets(window, tags) for *_, tags, window in found],
                "words": [window.words for *_, window in found],
                "positions": [window.positions for *_, window in found],
                "row": [number for number, *_ in found],
                "place": [place for _, place, *_ in found],
                "length": [len(window.input_ids) for *_, window in found],
            }

        return rows.map(encode, batched=True, with_indices=True, remove_columns=rows.column_names)

    def targets(self, window: Window, tags: list[str]) -> list[int]:
        """What each token of a window is to learn."""
        firsts = set(window.positions)
        targets = []
        for i, word in enumerate(window.piece_of):
            tag = None if word is None else tags[word]
            if i not in firsts and tag is not None:
                tag = self.tag_inside(tag) if self.settings.label_all_pieces else None
            targets.append(IGNORED if tag is None else self.labels.index(tag))
        return targets

    def tag_inside(self, tag: str) -> str:
        """The tag of what follows in the same word."""
        inside = f"I-{tag[2:]}"
        return inside if tag.startswith("B-") and inside in self.labels else tag

    # -- model

    def make_model(self):
        return CLASSES[self.settings.implementation].from_pretrained(
            self.settings.model,
            num_labels=len(self.labels),
            id2label=dict(enumerate(self.labels)),
            label2id={name: i for i, name in enumerate(self.labels)},
        )

    # -- loss and metrics

    def counts(self, batch):
        """With class weights, tokens count as much as they weigh, as in torch's own mean."""
        labels = batch["labels"]
        return self.weights[labels[labels != IGNORED]].sum()[None]

    def losses(self, model, batch):
        loss = nn.functional.cross_entropy(
            self.logits(model, batch).flatten(0, 1),
            batch["labels"].flatten(),
            self.weights,
            reduction="sum",
            ignore_index=IGNORED,
            label_smoothing=self.settings.label_smoothing,
        )
        return loss[None]

    def logits(self, model, batch) -> torch.Tensor:
        """`(B, T, L)`, or `(1, N, L)` of a batch without padding."""
        return model(**{name: value for name, value in batch.items() if name != "labels"}).logits.float()

    def predict_tags(self, model, split: str) -> list[list[str]]:
        """A tag for each word of each row."""

        def forward(model, batch):
            return [row.tolist() for row in unpadded(batch, self.logits(model, batch).argmax(-1))]

        unseen = OUTSIDE if self.settings.scheme == "iob2" else self.tag_counts.most_common(1)[0][0]
        tags = [[unseen] * len(row) for row in self.rows[split]["words"]]
        examples = self.splits[split].select_columns(["row", "words", "positions"])
        for example, said in zip(examples, self.predict(model, split, forward), strict=True):
            for word, position in zip(example["words"], example["positions"], strict=True):
                tags[example["row"]][word] = self.labels[said[position]]
        return tags

    def evaluate(self, model, split):
        predictions, references = self.predict_tags(model, split), list(self.rows[split]["tags"])
        if self.settings.scheme == "iob2":
            return compute(METRICS["iob2"], predictions, references)
        predictions, references = (
            [self.labels.index(tag) for row in rows for tag in row] for rows in (predictions, references)
        )
        return compute(METRICS["plain"], predictions, references, average="macro")


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code."""
    return loop.main(TokenClassificationSettings, __doc__, TokenClassification, argv)


if __name__ == "__main__":
    sys.exit(main())
