#!/usr/bin/env python
"""Pre-trains a BERT on texts: to fill in masked words and, with --next_sentence, to tell what follows a sentence.

    train_tokenizer.py --train_file books.txt --output my-tokenizer
    pretrain_mlm.py --config_file configuration/mini.json --tokenizer my-tokenizer --train_file books.txt
                    --validation_file others.txt --output my-bert
    pretrain_mlm.py --model google-bert/bert-base-uncased --train_file reports.jsonl --output bert-of-reports
    pretrain_mlm.py configuration/recipes/pretrain_reviews.yaml --tokenizer my-tokenizer --output reviews

From random weights with --config_file, from a checkpoint with --model. A document is a row: the text in its column, or
a line of a .txt file. Documents are laid end to end, with [SEP] between them, and cut into sequences of --max_length;
or each makes one, cut there, with --line_by_line; or with --next_sentence pairs out of its sentences, so that a
document of a single one makes none.

15 % of the words are masked, others in each epoch. What is held out is masked in one way, the same for each evaluation
and each seed; its loss and perplexity are those of the masked words, before the first update and from then on.

With --streaming the training set may be larger than memory: each process reads all of it, keeps --shuffle_buffer
sequences, and trains on its share. What is held out is in memory.

Exit code: 0 done, 1 the training broke off, 2 bad usage or data, 143 stopped by SIGTERM (--resume continues).
"""

import json
import math
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count, islice
from pathlib import Path

import numpy as np
import torch
from datasets import Dataset, Features, List, Value
from torch.nn.functional import cross_entropy
from transformers import AutoTokenizer, BertConfig, BertForMaskedLM, BertForPreTraining

from modeling_scratchbert import ScratchBertConfig, ScratchBertForMaskedLM, ScratchBertForPreTraining
from toolkit.training import loop
from toolkit.training.batches import PadOrFlatten
from toolkit.training.loop import FineTuning, sources
from toolkit.training.metrics import perplexity
from toolkit.training.rows import Source, columns_of, find_column, load_rows, stream_rows, text_of
from toolkit.training.settings import Settings, flag

TEXTS = ("text", "sentence", "content", "document")
CONFIGS = {"scratchbert": ScratchBertConfig, "bert": BertConfig}
# Without and with next sentences.
CLASSES = {
    "scratchbert": (ScratchBertForMaskedLM, ScratchBertForPreTraining),
    "bert": (BertForMaskedLM, BertForPreTraining),
}

# Of the words, so many are to be filled in; and of these, so many are [MASK], and so many another word (Devlin et al.
# 2018, section 3.1). The rest stay.
CHOSEN, MASKED, RANDOM = 0.15, 0.8, 0.1

# So many documents are made into sequences at once; what is left over makes a shorter one.
DOCUMENTS_TOGETHER = 100

# Behind the end of a sentence, or between lines. Chinese and Japanese have no space there.
SENTENCE_END = re.compile(r"(?<=[.!?…])\s+|(?<=[.!?…][\"'”’)\]])\s+|(?<=[。！？])|\n+")

FEATURES = {"input_ids": List(Value("int32")), "place": Value("string"), "length": Value("int32")}
PAIR_FEATURES = {"token_type_ids": List(Value("int8")), "next_sentence_label": Value("int64")}


@dataclass
class PretrainingSettings(Settings):
    """Of `pretrain_mlm`."""

    config_file: str | None = flag(None, "instead of --model: a configuration (.json), to start from random weights")
    tokenizer: str | None = flag(None, "a folder or hub id; left out: that of --model")
    text_column: str | None = flag(None, f"left out: the first there is of {', '.join(TEXTS)}")
    line_by_line: bool = flag(False, "each text is a sequence of its own, instead of end to end with others")
    next_sentence: bool = flag(False, "also learn, of pairs of passages, whether the second follows the first")
    whole_word_masking: bool = flag(False, "all tokens of a word are masked, or none")
    streaming: bool = flag(False, "read the training set as it is needed; wants --max_steps")
    shuffle_buffer: int = flag(10_000, "sequences out of which --streaming draws")

    def __post_init__(self):
        if (self.model is None) == (self.config_file is None):
            given = "neither was" if self.model is None else "both were"
            raise ValueError(f"the model comes from --model or, at random weights, from --config_file; {given} given")
        super().__post_init__()
        if self.config_file is not None and self.tokenizer is None:
            raise ValueError("--config_file wants --tokenizer, such as the folder that train_tokenizer.py writes")
        if self.streaming and self.max_steps is None:
            raise ValueError("--streaming wants --max_steps: how many rows will come is not known")
        if self.next_sentence and self.line_by_line:
            raise ValueError("--line_by_line does not go with --next_sentence, which makes pairs of a text's sentences")
        if self.shuffle_buffer < 1:
            raise ValueError(f"--shuffle_buffer is {self.shuffle_buffer}; it wants 1 or more")
        # [CLS], [SEP] and a word; or, of pairs, two words and another [SEP].
        if self.max_length < (least := 5 if self.next_sentence else 3):
            raise ValueError(f"--max_length is {self.max_length}; it wants {least} or more")


# ------------------------------------------------------------------------------------------------------------- masking


class Masking:
    """Chooses words for the model to fill in, and masks them (Devlin et al. 2018, section 3.1, task 1).

    transformers' DataCollatorForLanguageModeling does not do: whole words it masks all with [MASK], none with another
    word or with itself, and a full stop belongs to the word before it.

    Args:
        whole_words: choose all the tokens of a word or none, a word being a token and those with ## that follow it
            (the whole-word masking of Google's BERT).

    Raises:
        ValueError: the tokenizer has no mask, or no ##.
    """

    def __init__(self, tokenizer, whole_words: bool):
        vocabulary = tokenizer.get_vocab()
        continued = [number for token, number in vocabulary.items() if token.startswith("##") and token != "##"]
        if tokenizer.mask_token_id is None:
            raise ValueError(f"the tokenizer {tokenizer.name_or_path} has no mask token")
        if whole_words and not continued:
            name = tokenizer.name_or_path
            raise ValueError(f"--whole_word_masking wants a WordPiece tokenizer; {name} has no token with ##")
        self.whole_words, self.mask_id = whole_words, tokenizer.mask_token_id
        self.is_special, self.continues = torch.zeros(2, max(vocabulary.values()) + 1, dtype=torch.bool)
        self.is_special[tokenizer.all_special_ids] = True
        self.continues[continued] = True
        special = set(tokenizer.all_special_ids)
        self.ordinary = torch.tensor(sorted(set(vocabulary.values()) - special))

    def __call__(self, input_ids: torch.Tensor, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        """Masks sequences of whatever shape, each of which begins with a special token.

        Returns:
            The ids with masks, and the labels, -100 for what was not chosen. Of the shape of `input_ids`.
        """
        ids = input_ids.flatten()
        special = self.is_special[ids]
        words = torch.arange(len(ids))
        if self.whole_words:
            words = (~self.continues[ids]).cumsum(0) - 1
        chance, kind = torch.rand(2, len(ids), generator=generator)
        others = self.ordinary[torch.randint(len(self.ordinary), ids.shape, generator=generator)]
        chosen = (chance[words] < CHOSEN) & ~special
        labels = ids.where(chosen, torch.tensor(-100))
        ids = ids.where(~chosen | (kind < 1 - RANDOM), others)
        ids = ids.masked_fill(chosen & (kind < MASKED), self.mask_id)
        return ids.view_as(input_ids), labels.view_as(input_ids)


def generator_of(*numbers: int) -> torch.Generator:
    """What draws the same for the same numbers, and independently for others."""
    return torch.Generator().manual_seed(int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0]))


# --------------------------------------------------------------------------------------- from documents to sequences


def pack(documents: list[list[int]], places: list[str], room: int, separator: int) -> Iterator[tuple[list[int], str]]:
    """Lays documents end to end, with `separator` between them, and cuts them into pieces of `room` tokens; the last,
    and those that a separator would begin or end, have fewer. Each has the place of the document that it begins in."""
    ends = np.cumsum([len(ids) + 1 for ids in documents])
    tokens = [token for ids in documents for token in (*ids, separator)]
    for start in range(0, len(tokens), room):
        piece = tokens[start : start + room]
        skipped = piece[0] == separator
        piece = piece[skipped : len(piece) - (piece[-1] == separator)]
        if piece:
            yield piece, places[np.searchsorted(ends, start + skipped, side="right")]


def split_sentences(text: str) -> list[str]:
    """By full stops, exclamation and question marks, and lines; so that "Dr. No" are two."""
    return [sentence for sentence in SENTENCE_END.split(text) if sentence.strip()]


def sentence_pairs(
    document: list[list[int]], others: list[list[list[int]]], room: int, random: np.random.Generator
) -> Iterator[tuple[list[int], list[int], int]]:
    """Pairs of passages of whole sentences, one after the other; in half of them the second is exchanged for one of
    another document (Devlin et al. 2018, section 3.1, task 2, and Google's create_pretraining_data.py).

    As there, a pair has sentences enough to fill `room`, and is then cut; but where the passages meet no word is lost.

    Args:
        document: the tokens of its sentences.
        others: the other documents, not empty.

    Yields:
        A, B, and 0: B follows A, or 1: it does not.
    """
    start = 0
    while start < len(document) - 1:
        sizes = np.cumsum([len(sentence) for sentence in document[start : start + room]])
        stop = start + max(2, int((sizes < room).sum()) + 1)
        stop = min(stop, len(document))
        middle = int(random.integers(start + 1, stop))
        first, second, label = document[start:middle], document[middle:stop], int(random.random() < 0.5)
        start = stop
        if label:
            other = others[random.integers(len(others))]
            second = other[random.integers(len(other)) :]
            start = middle  # what would have followed is still to come
        first, second = ([token for sentence in part for token in sentence] for part in (first, second))
        first = first[-max(room - len(second), (room + 1) // 2) :]
        yield first, second[: room - len(first)], label


# ---------------------------------------------------------------------------------------------------------------- task


class Pretraining(FineTuning):
    """Texts, without labels."""

    name = "fill-mask"
    metric = "perplexity"
    greater_is_better = False
    evaluates_at_start = True

    def __init__(self, settings: PretrainingSettings, accelerator):
        super().__init__(settings, accelerator)
        self.tokenizer = AutoTokenizer.from_pretrained(settings.tokenizer or settings.model)
        if self.tokenizer.cls_token_id is None or self.tokenizer.sep_token_id is None:
            raise ValueError(f"the tokenizer {self.tokenizer.name_or_path} has not both a [CLS] and a [SEP]")
        self.masking = Masking(self.tokenizer, settings.whole_word_masking)
        self.model = self.make_model()
        self.features = Features(FEATURES | (PAIR_FEATURES if settings.next_sentence else {}))
        for split, source in sources(settings).items():
            sequences = self.read(source, settings.streaming and split == "train")
            if split == "train":
                self.train_set = sequences
            else:
                self.splits[split] = self.mask_once(sequences, split)
        self.collate = PadOrFlatten(
            self.tokenizer, settings.padding_free_collation, per_token=["labels"], per_sequence=["next_sentence_label"]
        )

    # -- model

    def make_model(self):
        """Raises:
        OSError, ValueError: there is none, or it does not fit the tokenizer or --max_length.
        """
        settings, ours = self.settings, self.settings.implementation == "scratchbert"
        model_class = CLASSES[settings.implementation][settings.next_sentence]
        # Of the words, only those that are to be filled in are compared with the vocabulary.
        options = {"sparse_prediction": True} if ours else {}
        if settings.config_file is None:
            model = model_class.from_pretrained(settings.model, **options)
        else:
            given = read_json(settings.config_file)
            fitting = {"vocab_size": len(self.tokenizer), "pad_token_id": self.tokenizer.pad_token_id}
            model = model_class(CONFIGS[settings.implementation](**fitting | given | options))
        words, positions = model.config.vocab_size, model.config.max_position_embeddings
        if len(self.masking.is_special) > words:
            raise ValueError(f"the tokenizer has {len(self.masking.is_special):,} tokens, the model {words:,}")
        if settings.max_length > positions:
            raise ValueError(f"--max_length is {settings.max_length}; the model has {positions} positions")
        return model

    # -- data

    def read(self, source: Source, streaming: bool):
        """The sequences of a split: a Dataset or, streaming, an IterableDataset, drawn from a buffer."""
        settings = self.settings
        column = find_column(columns_of(source), settings.text_column, TEXTS, "the texts (--text_column)")
        documents = (stream_rows if streaming else load_rows)(
            source, lambda row: {"text": text_of(row, column)}, settings.on_bad_row, self.accelerator.print
        )
        sequences = documents.map(
            self.sequences, with_indices=True, batched=True, batch_size=DOCUMENTS_TOGETHER,
            remove_columns=["text", "place"], features=self.features,
        )  # fmt: skip
        if streaming:
            return sequences.shuffle(settings.seed, buffer_size=settings.shuffle_buffer)
        if not len(sequences):
            what = "two documents of two sentences" if settings.next_sentence else "a word"
            raise ValueError(f"{', '.join(map(str, source.files)) or source.name}: there are not {what} in it")
        return sequences

    def sequences(self, documents: dict[str, list], numbers: list[int]) -> dict[str, list]:
        """The columns of what a lot of documents makes."""
        start, end = self.tokenizer.cls_token_id, self.tokenizer.sep_token_id
        if self.settings.next_sentence:
            made = [
                ([start, *a, end, *b, end], place, [0] * (len(a) + 2) + [1] * (len(b) + 1), label)
                for a, b, label, place in self.pairs(documents, numbers[0])
            ]
        else:
            made = [([start, *piece, end], place) for piece, place in self.pieces(documents)]
        columns = list(zip(*made, strict=True)) or [[]] * (len(self.features) - 1)
        names = ("input_ids", "place", "token_type_ids", "next_sentence_label")
        return {"length": [len(ids) for ids in columns[0]]} | dict(zip(names, map(list, columns), strict=False))

    def pieces(self, documents: dict[str, list]) -> Iterator[tuple[list[int], str]]:
        room = self.settings.max_length - 2
        ids, places = self.tokenize(documents["text"]), documents["place"]
        if not self.settings.line_by_line:
            return pack(ids, places, room, self.tokenizer.sep_token_id)
        return ((each[:room], place) for each, place in zip(ids, places, strict=True) if each)

    def pairs(self, documents: dict[str, list], number: int) -> Iterator[tuple[list[int], list[int], int, str]]:
        """Drawn by the lot's number alone: what is held out is the same for every seed."""
        random = np.random.default_rng(number)
        split = [list(filter(None, self.tokenize(split_sentences(text)))) for text in documents["text"]]
        for i, place in enumerate(documents["place"]):
            if others := [other for other in split[:i] + split[i + 1 :] if other]:
                for a, b, label in sentence_pairs(split[i], others, self.settings.max_length - 3, random):
                    yield a, b, label, place

    def tokenize(self, texts: list[str]) -> list[list[int]]:
        return self.tokenizer(
            texts, add_special_tokens=False, return_attention_mask=False, return_token_type_ids=False, verbose=False
        )["input_ids"]

    def mask_once(self, sequences: Dataset, split: str) -> Dataset:
        """Masks what is held out: each sequence by its number, however many processes and whatever the seed."""

        def mask(row: dict, number: int) -> dict:
            ids, labels = self.masking(torch.tensor(row["input_ids"]), generator_of(number))
            return {"input_ids": ids.tolist(), "labels": labels.tolist()}

        masked = sequences.map(mask, with_indices=True)
        if all(label == -100 for labels in masked["labels"] for label in labels):
            raise ValueError(f"the {split} set is too small: not one word of it is masked")
        return masked

    def batches_per_epoch(self):
        return None if self.settings.streaming else super().batches_per_epoch()

    def batches(self, epoch, start):
        unmasked = self.streamed(epoch, start) if self.settings.streaming else super().batches(epoch, start)
        for number, (places, batch) in enumerate(unmasked, start):
            drawn = generator_of(self.settings.seed, epoch, number, self.accelerator.process_index)
            batch["input_ids"], batch["labels"] = self.masking(batch["input_ids"], drawn)
            yield places, batch

    def streamed(self, epoch: int, start: int) -> Iterator[tuple[list[str], dict]]:
        """As `FineTuning.batches`: of each step's sequences every process takes its share; what is left over at the end
        makes a smaller step, unless there is not one for each."""
        rank, world = self.accelerator.process_index, self.accelerator.num_processes
        self.train_set.set_epoch(epoch)
        sequences = iter(self.train_set)
        for number in count():
            step = list(islice(sequences, self.settings.batch_size * world))
            if len(step) < world:
                return
            if number >= start:
                own = step[rank::world]
                yield [row["place"] for row in own], self.collate(own)

    # -- loss and metrics

    def counts(self, batch):
        """Words to fill in, and pairs."""
        words = (batch["labels"] != -100).sum()
        pairs = [torch.full_like(words, len(batch["next_sentence_label"]))] if self.settings.next_sentence else []
        return torch.stack([words, *pairs])

    def losses(self, model, batch):
        return torch.stack([each.sum() for each in self.each_loss(model, batch)[:2]])

    def each_loss(self, model, batch) -> list[torch.Tensor]:
        """The loss of each word that is to be filled in, `(N,)`; with next sentences also that of each pair,
        `(B,)`, and whether it was told rightly, `(B,)`."""
        labels, follows = batch["labels"], batch.get("next_sentence_label")
        ours = self.settings.implementation == "scratchbert"
        withheld = ("next_sentence_label",) if ours else ("next_sentence_label", "labels")
        outputs = model(**{name: value for name, value in batch.items() if name not in withheld})
        scores = outputs.logits if follows is None else outputs.prediction_logits
        labelled = labels != -100
        words = cross_entropy((scores if ours else scores[labelled]).float(), labels[labelled], reduction="none")
        if follows is None:
            return [words]
        told = outputs.seq_relationship_logits.float()
        return [words, cross_entropy(told, follows, reduction="none"), told.argmax(-1) == follows]

    def evaluate(self, model, split):
        """`loss`, as in training; `perplexity`, of the words to fill in; of pairs, their loss and accuracy."""

        def forward(model, batch) -> list[list[float]]:
            """The batch's sums, as if they were all its first row's."""
            words, *pairs = self.each_loss(model, batch)
            sums = [words.double().sum().item(), len(words), *(each.double().sum().item() for each in pairs)]
            starts = batch.get("cu_seq_lens_q")
            rows = len(batch["labels"]) if starts is None else len(starts) - 1
            return [sums] + [[0.0] * len(sums)] * (rows - 1)

        rows = self.predict(model, split, forward)
        total, words, *pairs = map(math.fsum, zip(*rows, strict=True))
        names = ("next_sentence_loss", "next_sentence_accuracy")
        told = {name: each / len(rows) for name, each in zip(names, pairs, strict=False)}
        loss = total / words + told.get("next_sentence_loss", 0.0)
        return {"loss": loss, "perplexity": perplexity(total, words), **told}


def read_json(path: str) -> dict:
    """The fields of a configuration. Of what type of model is left out.

    Raises:
        OSError, ValueError: it cannot be read.
    """
    try:
        fields = json.loads(Path(path).read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"--config_file {path} is not JSON: {error}") from None
    if not isinstance(fields, dict):
        raise ValueError(f"--config_file {path}: a configuration is an object, {{…}}")
    return {name: value for name, value in fields.items() if name != "model_type"}


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code."""
    return loop.main(PretrainingSettings, __doc__, Pretraining, argv)


if __name__ == "__main__":
    sys.exit(main())
