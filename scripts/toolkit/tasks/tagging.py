"""Tagging the words of texts, such as named entities."""

import warnings
from collections.abc import Iterable, Sequence
from itertools import groupby, pairwise
from typing import Any

import numpy as np
from datasets import List, Value

from toolkit.data import EmptyText, find_column, label_of, sorted_labels, value_of
from toolkit.metrics import classification_metrics
from toolkit.tasks.arguments import WORDS, TaggingArguments
from toolkit.tasks.labels import LabelTask, check_known, table_by_label
from toolkit.tasks.task import IGNORED, encodings, example_of
from toolkit.tasks.text_metric import TextMetric

TAGS = ("tags", "ner_tags", "labels")
OUTSIDE = "O"
AVERAGES = {"micro avg", "macro avg", "weighted avg"}  # over the types of entities, as seqeval names them


class Tagging(LabelTask):
    """Words and their tags. An example is a window of a text, which shares --stride tokens with the one before it. Each
    word is tagged in one window, by its first piece."""

    name = "token-classification"
    label_fields = ("tags",)
    model_class = "ForTokenClassification"
    txt_format = ".conll"
    grouped_by = ("words",)
    arguments: TaggingArguments

    def __init__(self, arguments: TaggingArguments):
        super().__init__(arguments)
        self.has_entities = arguments.scheme != "plain"
        entities = ("entity_f1", "entity_precision", "entity_recall", "tag_accuracy")
        self.metric_names = entities if self.has_entities else ("f1_macro", "tag_accuracy")

    # -- data

    def find_inputs(self, columns):
        self.words = find_column(columns, "--words_column", self.arguments.words_column, WORDS)
        return f"the words are {self.words!r}"

    def find_labels(self, columns):
        self.tags = find_column(columns, "--tags_column", self.arguments.tags_column, TAGS)
        return f"the tags are {self.tags!r}"

    def read_inputs(self, content):
        return {"words": list_of(content, self.words)}

    def read_labels(self, content):
        words, tags = list_of(content, self.words), [label_of(tag) for tag in list_of(content, self.tags)]
        if len(words) != len(tags):
            raise ValueError(f"there are {len(words)} words and {len(tags)} tags; expected as many")
        if self.arguments.scheme == "iob1":
            tags = to_iob2(tags)
        if self.has_entities:
            check_iob2(tags)
        check_known(tags, self.labels)
        return {"tags": tags}

    def labels_of(self, row):
        return row["tags"]

    def ordered(self, labels):
        return iob_tags(labels) if self.has_entities else sorted_labels(labels)

    def encode(self, rows):
        length, stride = self.arguments.max_length, self.arguments.stride
        stride = length // 4 if stride is None else stride
        room = length - self.tokenizer.num_special_tokens_to_add()
        if room <= stride:
            raise ValueError(f"--stride is {stride}; expected less than {room}, with --max_length {length}.")
        examples = []
        encoded = encodings(
            self.tokenizer,
            [row["words"] for row in rows],
            is_split_into_words=True,
            truncation=True,
            max_length=length,
            stride=stride,
        )
        for row, group in groupby(encoded, lambda each: each[0]):
            windows = [encoding for _, encoding in group]
            first_pieces = tagged_words([encoding.word_ids for encoding in windows], stride)
            for encoding, own in zip(windows, first_pieces, strict=True):
                example = example_of(encoding, row) | {"first_pieces": own}
                if "tags" in rows[row]:
                    example["labels"] = np.full(len(encoding.ids), IGNORED)
                    for word, i in own.items():
                        example["labels"][i] = self.numbers[rows[row]["tags"][word]]
                examples.append(example)
        return examples

    # -- predictions and metrics

    def outputs_of(self, logits, batch):
        return [row[mask].tolist() for row, mask in zip(logits.argmax(-1), batch["attention_mask"].bool(), strict=True)]

    def decode(self, rows, examples, outputs):
        # Of a word without a token, such as an invisible character.
        unseen = OUTSIDE if self.has_entities else max(self.labels, key=self.label_counts.__getitem__)
        tags = [[unseen] * len(row["words"]) for row in rows]
        for example, numbers in zip(examples, outputs, strict=True):
            for word, i in example["first_pieces"].items():
                tags[example["row"]][word] = self.labels[numbers[i]]
        return [{"predicted_tags": own} for own in tags]

    def metrics(self, rows, predictions):
        found, right = [row["predicted_tags"] for row in predictions], [row["tags"] for row in rows]
        if self.has_entities:
            return Entities.of(found, right)
        values = classification_metrics("single_label", self.flat(right), self.flat(found))
        return {"f1_macro": values["f1_macro"], "tag_accuracy": values["accuracy"]}

    def flat(self, tags: list[list[str]]) -> np.ndarray:
        return np.array([self.numbers[tag] for row in tags for tag in row])

    def table_by_label(self, rows, predictions):
        found, right = [row["predicted_tags"] for row in predictions], [row["tags"] for row in rows]
        if not self.has_entities:
            return table_by_label(self.labels, self.flat(right), self.flat(found))
        report = entity_report(right, found)
        return [
            {"label": kind, **scores(report[kind]), "entities": int(report[kind]["support"])}
            for kind in sorted(report.keys() - AVERAGES)
        ]


def tagged_words(windows: list[list[int | None]], stride: int) -> list[dict[int, int]]:
    """For each window the words that are tagged in it, with the position of their first pieces. A word is tagged in the
    earlier of two windows if its first piece is in the first half of the tokens that they share.

    Args:
        windows: the word of each token of consecutive windows; None for special tokens.
        stride: the tokens that two windows share.
    """
    before = next((i for i, word in enumerate(windows[0]) if word is not None), 0)  # [CLS]
    step = max(sum(word is not None for word in windows[0]) - stride, 1)  # a single window may be short
    tagged = [{} for _ in windows]
    seen = {None}
    for number, window in enumerate(windows):
        for i, word in enumerate(window):
            if word not in seen:
                seen.add(word)
                token = number * step + i - before  # in the whole text
                own = min(max((token - stride // 2) // step, 0), len(windows) - 1)
                tagged[own][word] = token - own * step + before
    return tagged


# ---------------------------------------------------------------------------------------------------------------- tags


def list_of(content: dict, column: str) -> list:
    """The words or tags of a row: a list, or a text with spaces."""
    value: Any = value_of(content, column)
    if isinstance(value, str) and not value.lstrip().startswith("["):
        value = value.split()
    if value in (None, []):
        raise EmptyText(f"{column!r} is empty; expected a list, or words separated by spaces")
    if not isinstance(value, list):
        raise ValueError(f"{column!r} is {value!r}; expected a list, or words separated by spaces")
    for each in value:
        if not isinstance(each, str) and (type(each) is not int or each < 0):
            raise ValueError(f"{column!r} has {each!r}; expected a text, or an integer of 0 or more")
    return [str(each) for each in value]


def check_iob2(tags: Sequence[str]) -> None:
    """Raises ValueError unless every entity begins with B- and continues with I- of its type (IOB2: Tjong Kim Sang &
    Veenstra 1999, section 2)."""
    for number, (before, tag) in enumerate(pairwise([OUTSIDE, *tags]), 1):
        if tag != OUTSIDE and (tag[:2] not in ("B-", "I-") or len(tag) == 2):
            raise ValueError(
                f"tag {number} is {tag!r}; expected O, B-TYPE or I-TYPE. Pass --scheme plain for other tags"
            )
        if tag.startswith("I-") and before[2:] != tag[2:]:
            raise ValueError(
                f"tag {number} is {tag} after {before}; expected B-{tag[2:]}. Pass --scheme iob1 for such tags"
            )


def to_iob2(tags: Sequence[str]) -> list[str]:
    """The tags with B- for each I- that begins an entity, as in IOB1, the form of older CoNLL files."""
    return [
        f"B-{tag[2:]}" if tag.startswith("I-") and before[2:] != tag[2:] else tag
        for before, tag in pairwise([OUTSIDE, *tags])
    ]


def iob_tags(tags: Iterable[str]) -> list[str]:
    """O, and both tags of each type that occurs: a longer entity may come later."""
    types = sorted({tag[2:] for tag in tags if tag != OUTSIDE})
    return [OUTSIDE, *(f"{prefix}-{kind}" for kind in types for prefix in "BI")]


def entity_report(references: list[list[str]], predictions: list[list[str]]) -> dict[str, dict]:
    """The scores of the entities of each type, and `AVERAGES` of them. An entity is correct if its first word, its last
    word and its type are."""
    from seqeval.metrics import classification_report

    with warnings.catch_warnings(action="ignore"):
        return classification_report(references, predictions, output_dict=True, zero_division=0)


def scores(row: dict) -> dict[str, float]:
    return {"precision": row["precision"], "recall": row["recall"], "f1": row["f1-score"]}


class Entities(TextMetric):
    """entity_precision, entity_recall, entity_f1: of entities, over all types together (micro average). tag_accuracy:
    the share of words with the correct tag."""

    prediction = List(Value("string"))

    def _compute(self, predictions, references):
        from seqeval.metrics import accuracy_score

        total = scores(entity_report(references, predictions)["micro avg"])
        values = {f"entity_{name}": value for name, value in total.items()}
        return values | {"tag_accuracy": accuracy_score(references, predictions)}
