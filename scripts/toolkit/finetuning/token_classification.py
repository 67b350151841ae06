"""Fine-tuning to tag the words of texts, such as named entities."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import nn
from transformers import BertForTokenClassification

from modeling_scratchbert import ScratchBertForTokenClassification
from toolkit.finetuning.batches import PadOrFlatten, unpadded
from toolkit.finetuning.checks import tokenizer_of
from toolkit.finetuning.rows import map_rows
from toolkit.finetuning.task import Evaluation, Task
from toolkit.finetuning.task_settings import TokenClassificationSettings, is_iob_tag
from toolkit.labels import check_known, class_weights, in_saved_order, label_order, saved_labels, trained_labels
from toolkit.metrics import compute, label_metrics, load, mean_loss
from toolkit.row_files import find_column, read_conll
from toolkit.tasks.tagging import iob_tags, to_iob2
from toolkit.windows import split_into_windows

WORDS = ("tokens", "words")
TAGS = ("tags", "ner_tags", "labels")
CLASSES = {"scratchbert": ScratchBertForTokenClassification, "bert": BertForTokenClassification}
OUTSIDE = "O"
IGNORED = -100  # the label that torch's cross-entropy ignores


def check_iob2(tags: Sequence[str]) -> None:
    """Raises ValueError unless every entity begins with B- and continues with I- of the same type (IOB2: Tjong Kim
    Sang & Veenstra 1999, section 2)."""
    before = OUTSIDE
    for number, tag in enumerate(tags, 1):
        if not is_iob_tag(tag):
            raise ValueError(f"tag {number} is {tag!r}; expected O, B-TYPE or I-TYPE (or --scheme plain)")
        if tag.startswith("I-") and before[2:] != tag[2:]:
            raise ValueError(
                f"tag {number} is {tag} after {before}; expected B-{tag[2:]}, with which an IOB2 entity begins"
            )
        before = tag


def list_of(row: dict, column: str) -> list[str]:
    """A row's words or tags.

    Raises:
        ValueError: there are none, one is neither text nor an integer, or they are a list as text, such as "['a']".
    """
    value = row.get(column)
    if isinstance(value, str):
        if value.strip()[:1] == "[" and value.strip()[-1:] == "]":
            raise ValueError(
                f"{column!r} is {value!r}, a list as text; expected words or tags separated by spaces. "
                "JSON lines (.jsonl) can have lists"
            )
        value = [part for part in value.split(" ") if part]
    if not isinstance(value, list) or not value:
        raise ValueError(f"{column!r} is {'empty' if value in (None, []) else repr(value)}; expected a list")
    if bad := [each for each in value if not isinstance(each, str | int) or isinstance(each, bool)]:
        raise ValueError(f"{column!r} has {bad[0]!r}; expected text")
    return [str(each) for each in value]


@dataclass
class WordWindow:
    """A window of a row's tokens, and the words that are tagged in it."""

    input_ids: list[int]
    token_type_ids: list[int]
    word_of: list[int | None]  # for each token, its word; None unless the word is tagged in this window
    words: list[int]  # the words that are tagged in this window
    positions: list[int]  # the position of the first piece of each of them


def word_windows(tokenizer, words: list[str], max_length: int, stride: int) -> list[WordWindow]:
    """Splits a row into windows; two neighbours share `stride` tokens. Each word is tagged in one of them: if its first
    piece is in the first half of the shared tokens in the earlier one, else in the later one.

    Returns:
        Windows of up to `max_length` tokens; none if no word has a token.

    Raises:
        ValueError: a window holds no more than `stride` tokens of the row.
    """
    [encoding] = tokenizer(words, is_split_into_words=True, verbose=False).encodings
    word_of = encoding.word_ids  # None for [CLS] and [SEP]; words without tokens are missing
    pieces = [i for i, word in enumerate(word_of) if word is not None]
    if not pieces:
        return []
    text = range(pieces[0], pieces[-1] + 1)
    found = split_into_windows(encoding, text, max_length, stride)
    bounds = [0, *(window.tokens.start + stride // 2 for window in found[1:]), len(text)]
    first = {}  # from a word to its first piece
    for i in pieces:
        first.setdefault(word_of[i], i - text.start)
    tagged = []
    for window, low, high in zip(found, bounds[:-1], bounds[1:], strict=True):
        positions = {word: window.first + i - window.tokens.start for word, i in first.items() if low <= i < high}
        tagged_word_of = [None] * len(window.input_ids)
        for position, i in enumerate(window.tokens, window.first):
            word = word_of[text.start + i]
            tagged_word_of[position] = word if word in positions else None
        ids, types = window.input_ids, window.token_type_ids
        tagged.append(WordWindow(ids, types, tagged_word_of, list(positions), list(positions.values())))
    return tagged


class TokenClassification(Task):
    """Words and their tags."""

    name = "token-classification"
    readers: ClassVar = {".txt": read_conll}

    def __init__(self, settings: TokenClassificationSettings, accelerator):
        super().__init__(settings, accelerator)
        if settings.scheme == "iob2":
            load("seqeval")  # raises before the training if a library is missing
        self.tokenizer = tokenizer_of(settings)
        if not self.tokenizer.is_fast:
            raise ValueError(
                f"--model {settings.model} has a slow tokenizer; expected a fast one, which returns the words of pieces"
            )
        self.metric, self.labels = settings.metric, settings.labels
        self.saved_labels = saved_labels(settings.model)
        if settings.evaluate_only:
            self.labels = trained_labels(settings.model, "ForTokenClassification")
        train_rows = self.encode_splits()
        tags = None if train_rows is None else Counter(tag for tags in train_rows["tags"] for tag in tags)
        self.label_counts = self.saved_label_counts() if tags is None else tags
        self.model = self.open_labelled(CLASSES[settings.implementation])
        self.weights = class_weights(settings.class_weights, self.labels, self.label_counts).to(accelerator.device)
        self.collate = PadOrFlatten(self.tokenizer, settings.padding_free_collation, per_token=["labels"])

    # -- data

    def read(self, source):
        """The rows of a split: words and tags. Sets the labels if none are known."""
        settings, columns = self.settings, source.columns()
        words_column = find_column(columns, settings.words_column, WORDS, "the words (--words_column)")
        tags_column = find_column(columns, settings.tags_column, TAGS, "the tags (--tags_column)")
        is_conll = any(getattr(each, "reader", None) is read_conll for each in source.inputs)

        def check(row: dict) -> dict:
            words, tags = list_of(row, words_column), list_of(row, tags_column)
            if ignored := [tag for tag in row[tags_column] if isinstance(tag, int) and tag < 0]:
                raise ValueError(f"a tag is {ignored[0]}; expected text or an integer of 0 or more; no word is ignored")
            if len(words) != len(tags):
                raise ValueError(f"there are {len(words)} words and {len(tags)} tags; expected as many")
            if settings.scheme == "iob2":
                tags = to_iob2(tags) if is_conll else tags
                check_iob2(tags)
            check_known("a tag", tags, self.labels)
            return {"words": words, "tags": tags}

        rows = self.load(source, check)
        if not self.labels:
            self.labels = in_saved_order(self.find_labels(rows, source.label_names(tags_column)), self.saved_labels)
        return rows

    def find_labels(self, rows, names: list[str]) -> list[str]:
        """The tags of the training set in the order of the dataset, `names`, or, if it has none, numbers sorted by
        value."""
        found = {tag for tags in rows["tags"] for tag in tags}
        is_iob = self.settings.scheme == "iob2"
        needed, ordered = (found | {OUTSIDE}, iob_tags(found)) if is_iob else (found, sorted(found, key=label_order))
        labels = names if needed <= set(names) else ordered
        if len(labels) < 2:
            raise ValueError(f"the training set has the tags {', '.join(labels)}; expected two or more")
        return labels

    def encode(self, rows):
        """The windows of the rows as inputs of the model, each with the number of its row.

        Raises:
            ValueError: no word of the training set has a token.
        """
        length, stride = self.settings.max_length, self.settings.stride
        empty = []
        if not any(word_windows(self.tokenizer, words, length, stride) for words in rows["words"]):
            if not self.splits:
                expected = "words that the tokenizer does not drop"
                raise ValueError(f"no word of the training set has a token; expected {expected}")
            # An evaluation requires a window: one of special tokens only, in which no word is tagged.
            [encoding] = self.tokenizer([""], verbose=False).encodings
            empty = [WordWindow(encoding.ids, encoding.type_ids, [None] * len(encoding.ids), [], [])]

        def encode(batch: dict, numbers: list[int]) -> dict:
            rows = zip(numbers, batch["place"], batch["words"], batch["tags"], strict=True)
            found = [
                {**vars(window), "labels": self.targets(window, tags), "row": number, "place": place}
                for number, place, words, tags in rows
                for window in word_windows(self.tokenizer, words, length, stride) or empty
            ]
            names = ("input_ids", "token_type_ids", "labels", "words", "positions", "row", "place")
            columns = {name: [each[name] for each in found] for name in names}
            return columns | {"length": [len(ids) for ids in columns["input_ids"]]}

        return map_rows(rows, encode, batched=True, with_indices=True, remove_columns=rows.column_names)

    def targets(self, window: WordWindow, tags: list[str]) -> list[int]:
        """The label of each token of a window."""
        firsts = set(window.positions)
        targets = []
        for i, word in enumerate(window.word_of):
            tag = None if word is None else tags[word]
            if i not in firsts and tag is not None:
                inside = f"I-{tag[2:]}" if tag.startswith("B-") else tag
                tag = (inside if inside in self.labels else tag) if self.settings.label_all_pieces else None
            targets.append(IGNORED if tag is None else self.labels.index(tag))
        return targets

    def shown(self, example):
        tokens = super().shown(example).split(" ")
        tags = [f"/{self.labels[label]}" if label != IGNORED else "" for label in example["labels"]]
        return " ".join(map("".join, zip(tokens, tags, strict=True)))

    # -- loss and metrics

    def counts(self, batch):
        """The sum of the class weights, as in the mean of torch's losses."""
        labels = batch["labels"]
        return self.weights[labels[labels != IGNORED]].sum()[None]

    def losses_of(self, logits, batch):
        return nn.functional.cross_entropy(
            logits.flatten(0, 1),
            batch["labels"].flatten(),
            self.weights,
            reduction="sum",
            ignore_index=IGNORED,
            label_smoothing=self.settings.label_smoothing,
        )[None]

    def predict_tags(self, model, split: str) -> tuple[list[list[str]], float]:
        """A tag for each word of each row, and the mean loss."""

        def forward(model, batch):
            logits = self.logits(model, batch)
            sums = [self.losses_of(logits, batch).item(), self.counts(batch).item()]
            return [row.tolist() for row in unpadded(batch, logits.argmax(-1))], sums

        unseen = OUTSIDE if self.settings.scheme == "iob2" else max(self.labels, key=self.label_counts.__getitem__)
        tags = [[unseen] * len(row) for row in self.rows[split]["words"]]
        examples = self.splits[split].select_columns(["row", "words", "positions"])
        labels_of_windows, sums = self.predict(model, split, forward)
        for example, labels in zip(examples, labels_of_windows, strict=True):
            for word, position in zip(example["words"], example["positions"], strict=True):
                tags[example["row"]][word] = self.labels[labels[position]]
        return tags, mean_loss(*sums)

    def evaluate(self, model, split):
        (tags, loss), references = self.predict_tags(model, split), list(self.rows[split]["tags"])
        if self.settings.scheme == "iob2":
            metrics = compute("seqeval", tags, references)
        else:
            numbers = ([self.labels.index(tag) for row in rows for tag in row] for rows in (tags, references))
            metrics = label_metrics(*numbers)
        predictions = self.joined(self.rows[split], [{"predicted_tags": own} for own in tags])
        return Evaluation({"loss": loss} | metrics, predictions)
