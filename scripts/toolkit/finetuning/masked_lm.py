"""Pre-training of encoders: masked words, whole words, and next sentences."""

import re
from collections.abc import Iterator
from itertools import count, islice

import numpy as np
import torch
from datasets import Dataset, Features, List, Value
from torch.nn.functional import cross_entropy
from transformers import BertConfig, BertForMaskedLM, BertForPreTraining

from modeling_scratchbert import ScratchBertConfig, ScratchBertForMaskedLM, ScratchBertForPreTraining
from toolkit.finetuning.batches import PadOrFlatten, unpadded
from toolkit.finetuning.checks import check_lengths, config_file_fields, tokenizer_of
from toolkit.finetuning.fingerprint import fingerprint, tokenizer_fingerprint
from toolkit.finetuning.rows import load_rows, map_rows, stream_rows
from toolkit.finetuning.task import Evaluation, Task, sources, without
from toolkit.finetuning.task_settings import PretrainingSettings
from toolkit.hub import check_vocabulary
from toolkit.inputs import Source, content_hash
from toolkit.metrics import perplexity
from toolkit.row_files import find_column, text_of

TEXTS = ("text", "sentence", "content", "document")
CONFIGS = {"scratchbert": ScratchBertConfig, "bert": BertConfig}
# Without and with next-sentence prediction.
CLASSES = {
    "scratchbert": (ScratchBertForMaskedLM, ScratchBertForPreTraining),
    "bert": (BertForMaskedLM, BertForPreTraining),
}

# The share of words to predict; and among these, the shares replaced by [MASK] and by a random word. The rest stay
# unchanged (Devlin et al. 2018, section 3.1).
CHOSEN, MASKED, RANDOM = 0.15, 0.8, 0.1

# The documents that are made into sequences at once; the remainder makes a shorter sequence.
DOCUMENTS_TOGETHER = 100

# After the end of a sentence, or between lines. Chinese and Japanese have no space there.
SENTENCE_END = re.compile(r"(?<=[.!?…])\s+|(?<=[.!?…][\"'”’)\]])\s+|(?<=[。！？])|\n+")

FEATURES = {"input_ids": List(Value("int32")), "place": Value("string"), "length": Value("int32")}
PAIR_FEATURES = {"token_type_ids": List(Value("int8")), "next_sentence_label": Value("int64")}


class Masking:
    """Chooses words for the model to predict, and masks them (Devlin et al. 2018, section 3.1, task 1).

    transformers' DataCollatorForLanguageModeling differs: it replaces whole words by [MASK] only, never by another word
    or by themselves, and a full stop belongs to the word before it.

    Args:
        whole_words: choose all tokens of a word or none. A word is a token and the ## tokens that follow it (the
            whole-word masking of Google's BERT).

    Raises:
        ValueError: the tokenizer has no mask token, or for whole words no ## token.
    """

    def __init__(self, tokenizer, whole_words: bool):
        vocabulary = tokenizer.get_vocab()
        continued = [number for token, number in vocabulary.items() if token.startswith("##") and token != "##"]
        if tokenizer.mask_token_id is None:
            raise ValueError(f"the tokenizer {tokenizer.name_or_path} has no mask token")
        if whole_words and not continued:
            expected = "a WordPiece tokenizer for --whole_word_masking"
            raise ValueError(f"the tokenizer {tokenizer.name_or_path} has no ## token; expected {expected}")
        self.whole_words, self.mask_id = whole_words, tokenizer.mask_token_id
        self.is_special, self.continues = torch.zeros(2, max(vocabulary.values()) + 1, dtype=torch.bool)
        self.is_special[tokenizer.all_special_ids] = True
        self.continues[continued] = True
        self.special = set(tokenizer.all_special_ids)
        self.ordinary = torch.tensor(sorted(set(vocabulary.values()) - self.special))

    def can_mask(self, ids: list[int]) -> bool:
        """Whether one of these tokens can be chosen: not all are special, as an unknown word is."""
        return not self.special.issuperset(ids)

    def __call__(self, input_ids: torch.Tensor, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        """Masks sequences, in a tensor of any shape, that each begin with a special token.

        Returns:
            The masked ids and the labels, -100 for tokens that were not chosen, in the shape of `input_ids`.
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
    """A generator seeded by these numbers; for other numbers an independent one."""
    return torch.Generator().manual_seed(int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0]))


def concatenate(documents: list[tuple[list[int], str]], room: int, separator: int) -> Iterator[tuple[list[int], str]]:
    """Concatenates documents, each with its place and not empty, with `separator` between them, and cuts them into
    pieces of `room` tokens; the last one, and those that a separator would begin or end, are shorter. Each has the
    place of the document that it begins in."""
    ends = np.cumsum([len(ids) + 1 for ids, _ in documents])
    tokens = [token for ids, _ in documents for token in (*ids, separator)]
    for start in range(0, len(tokens), room):
        piece = tokens[start : start + room]
        skipped = piece[0] == separator
        piece = piece[skipped : len(piece) - (piece[-1] == separator)]
        if piece:
            yield piece, documents[np.searchsorted(ends, start + skipped, side="right")][1]


def split_sentences(text: str) -> list[str]:
    """Splits after full stops, exclamation and question marks, and lines; "Dr. No" becomes two."""
    return [sentence for sentence in SENTENCE_END.split(text) if sentence.strip()]


def sentence_pairs(
    document: list[list[int]], others: list[list[list[int]]], room: int, random: np.random.Generator
) -> Iterator[tuple[list[int], list[int], int]]:
    """Pairs of consecutive passages of whole sentences; in half of them the second is replaced by one of another
    document (Devlin et al. 2018, section 3.1, task 2, and Google's create_pretraining_data.py).

    As there, a pair has enough sentences to fill `room`, and is then cut at its ends: no text is missing between the
    passages.

    Args:
        document: the tokens of its sentences.
        others: the other documents, not empty.

    Yields:
        A, B, and 0: B follows A, or 1: it does not.
    """
    start = 0
    while start < len(document) - 1:
        sizes = np.cumsum([len(sentence) for sentence in document[start : start + room]])
        stop = min(start + max(2, int((sizes < room).sum()) + 1), len(document))
        middle = int(random.integers(start + 1, stop))
        first, second, label = document[start:middle], document[middle:stop], int(random.random() < 0.5)
        start = stop
        if label:
            other = others[random.integers(len(others))]
            second = other[random.integers(len(other)) :]
            start = middle  # the passage that was replaced comes next
        first, second = ([token for sentence in part for token in sentence] for part in (first, second))
        first = first[-max(room - len(second), (room + 1) // 2) :]
        yield first, second[: room - len(first)], label


class Pretraining(Task):
    """Texts, without labels."""

    name = "fill-mask"
    metric = "perplexity"
    greater_is_better = False
    evaluates_at_start = True

    def __init__(self, settings: PretrainingSettings, accelerator):
        super().__init__(settings, accelerator)
        self.tokenizer = tokenizer_of(settings)
        if self.tokenizer.cls_token_id is None or self.tokenizer.sep_token_id is None:
            raise ValueError(f"the tokenizer {self.tokenizer.name_or_path} lacks [CLS] or [SEP]; expected both")
        self.masking = Masking(self.tokenizer, settings.whole_word_masking)
        self.model = self.make_model()
        self.features = Features(FEATURES | (PAIR_FEATURES if settings.next_sentence else {}))
        self.loss_by_frequency: dict[str, float] = {}
        for split, documents in self.read_splits():
            sequences = self.sequences_of(documents, split)
            if split == "train":
                self.train_set = sequences
            else:
                self.splits[split] = self.mask_once(sequences, split)
                if (counted := sequences if settings.streaming else self.train_set) is not None:
                    self.loss_by_frequency[split] = self.frequency_loss(counted, self.splits[split])
        self.collate = PadOrFlatten(
            self.tokenizer, settings.padding_free_collation, per_token=["labels"], per_sequence=["next_sentence_label"]
        )

    # -- model

    def make_model(self):
        """The model, from a checkpoint or random weights.

        Raises:
            OSError, ValueError: there is none, or it does not match the tokenizer or --max_length.
        """
        settings, ours = self.settings, self.settings.implementation == "scratchbert"
        model_class = CLASSES[settings.implementation][settings.next_sentence]
        # Removes padding, and computes the vocabulary's scores of the masked words only.
        options = {"padding_free": True, "sparse_prediction": True} if ours else {}
        if settings.config_file is None:
            model = self.open_model(model_class.from_pretrained, **options)
        else:
            config_class = CONFIGS[settings.implementation]
            given = config_file_fields(settings.config_file, config_class)
            fitting = {"vocab_size": len(self.tokenizer), "pad_token_id": self.tokenizer.pad_token_id}
            model = model_class(config_class(**fitting | given | options))
        if model.config.is_decoder:
            name = "model" if settings.config_file is None else "config_file"
            raise ValueError(
                f"--{name} {getattr(settings, name)} has is_decoder true; expected an encoder, "
                "because a decoder does not see the words after a masked one"
            )
        check_vocabulary(len(self.masking.is_special), model.config)
        check_lengths(settings, ["max_length"], model.config)
        return model

    # -- data

    def read(self, source: Source):
        """The documents of a split: a Dataset or, of the training set with --streaming, an IterableDataset."""
        column = find_column(source.columns(), self.settings.text_column, TEXTS, "the texts (--text_column)")
        is_streamed = self.settings.streaming and self.train_set is None
        return (stream_rows if is_streamed else load_rows)(
            source, lambda row: {"text": text_of(row, column)}, self.settings.on_bad_row, self.accelerator.print
        )

    def sequences_of(self, documents, split: str):
        """The sequences of a split: a Dataset or, with streaming, a shuffled IterableDataset."""
        settings = self.settings
        self.documents_read = self.without_pair = 0
        sequences = map_rows(
            documents,
            self.sequences,
            with_indices=True,
            batched=True,
            batch_size=DOCUMENTS_TOGETHER,
            remove_columns=["text", "place"],
            features=self.features,
        )
        if next(iter(sequences), None) is None:
            what = "two documents of two sentences" if settings.next_sentence else "a word of the vocabulary"
            raise ValueError(f"the {split} set is too small; expected at least {what}")
        if not isinstance(sequences, Dataset):  # the documents are counted while they are read
            return sequences.shuffle(settings.seed, buffer_size=settings.shuffle_buffer)
        self.report_without_pair(split)
        return sequences

    def report_without_pair(self, split: str) -> None:
        """Prints how many of the documents that were read give no pair."""
        if self.without_pair:
            self.accelerator.print(
                f"{self.without_pair} of {self.documents_read} documents of the {split} set give no "
                "pair of passages; a document requires two sentences"
            )

    def sequences(self, documents: dict[str, list], numbers: list[int]) -> dict[str, list]:
        """The columns of the sequences made of some documents."""
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
        """Documents, cut or concatenated, with a word that can be masked."""
        room = self.settings.max_length - 2
        tokenized = zip(self.tokenize(documents["text"]), documents["place"], strict=True)
        found = [(ids, place) for ids, place in tokenized if ids]
        is_cut, separator = self.settings.line_by_line, self.tokenizer.sep_token_id
        found = [(ids[:room], place) for ids, place in found] if is_cut else concatenate(found, room, separator)
        return (piece for piece in found if self.masking.can_mask(piece[0]))

    def pairs(self, documents: dict[str, list], number: int) -> Iterator[tuple[list[int], list[int], int, str]]:
        """Pairs of passages, drawn with the documents' number as the seed: held-out pairs are the same for every
        --seed."""
        random = np.random.default_rng(number)
        split = [list(filter(None, self.tokenize(split_sentences(text)))) for text in documents["text"]]
        for i, place in enumerate(documents["place"]):
            others, found = [other for other in split[:i] + split[i + 1 :] if other], False
            if others:
                for a, b, label in sentence_pairs(split[i], others, self.settings.max_length - 3, random):
                    if self.masking.can_mask(a + b):
                        found = True
                        yield a, b, label, place
            self.documents_read += 1
            self.without_pair += not found

    def tokenize(self, texts: list[str]) -> list[list[int]]:
        return self.tokenizer(
            texts, add_special_tokens=False, return_attention_mask=False, return_token_type_ids=False, verbose=False
        )["input_ids"]

    def mask_once(self, sequences: Dataset, split: str) -> Dataset:
        """Masks held-out sequences, each seeded by its number: the same for every --seed and number of processes."""

        def mask(row: dict, number: int) -> dict:
            ids, labels = self.masking(torch.tensor(row["input_ids"]), generator_of(number))
            return {"input_ids": ids.tolist(), "labels": labels.tolist()}

        masked = map_rows(sequences, mask, with_indices=True)
        if all(label == -100 for labels in masked["labels"] for label in labels):
            raise ValueError(f"the {split} set is too small: no word of it is masked")
        return masked

    def frequency_loss(self, counted: Dataset, masked: Dataset) -> float:
        """The loss of a model that ignores the context, and predicts each masked word by its frequency in `counted`,
        where each word of the vocabulary counts once more than it occurs."""
        counts = (~self.masking.is_special).double()
        for batch in counted.iter(1000):
            ids = torch.tensor([i for ids in batch["input_ids"] for i in ids])
            counts += torch.bincount(ids, minlength=len(counts))
        counts[self.masking.is_special] = 0
        labels = [label for labels in masked["labels"] for label in labels if label != -100]
        return -(counts / counts.sum())[labels].log().mean().item()

    def fingerprints(self):
        tokenizer = {"tokenizer": tokenizer_fingerprint(self.tokenizer)}
        if not self.settings.streaming:
            return super().fingerprints() | tokenizer
        held_out = {split: fingerprint(examples) for split, examples in self.splits.items()}
        return {"train": content_hash(sources(self.settings)["train"].inputs), **held_out, **tokenizer}

    def batches_per_epoch(self):
        return None if self.settings.streaming else super().batches_per_epoch()

    def batches(self, epoch, start):
        unmasked = self.streamed(epoch, start) if self.settings.streaming else super().batches(epoch, start)
        for number, (places, batch) in enumerate(unmasked, start):
            drawn = generator_of(self.settings.seed, epoch, number, self.accelerator.process_index)
            batch["input_ids"], batch["labels"] = self.masking(batch["input_ids"], drawn)
            yield places, batch

    def streamed(self, epoch: int, start: int) -> Iterator[tuple[list[str], dict]]:
        """As `Task.batches`: each process takes its share of a step's sequences. The remainder makes a smaller
        step."""
        rank, world = self.accelerator.process_index, self.accelerator.num_processes
        self.train_set.set_epoch(epoch)
        self.documents_read = self.without_pair = 0
        sequences = iter(self.train_set)
        for number in count():
            step = list(islice(sequences, self.settings.batch_size * world))
            if not step:
                if epoch == 0:
                    self.report_without_pair("train")
                return
            if number >= start:
                own = step[rank::world]
                yield [row["place"] for row in own], self.collate(own or step[:1])

    # -- loss and metrics

    def counts(self, batch):
        """The numbers of masked words and of pairs."""
        words = (batch["labels"] != -100).sum()
        pairs = [torch.full_like(words, len(batch["next_sentence_label"]))] if self.settings.next_sentence else []
        return torch.stack([words, *pairs])

    def losses(self, model, batch):
        return torch.stack([each.sum() for each in self.each_loss(model, batch)[:3:2]])

    def each_loss(self, model, batch) -> list[torch.Tensor]:
        """The loss and the prediction of each masked word, `(N,)`; with next sentences also the loss of each pair,
        `(B,)`, and whether its prediction is correct, `(B,)`."""
        labels, follows = batch["labels"], batch.get("next_sentence_label")
        ours = self.settings.implementation == "scratchbert"
        not_given = ("next_sentence_label",) if ours else ("next_sentence_label", "labels")
        outputs = model(**without(batch, *not_given))
        scores = outputs.logits if follows is None else outputs.prediction_logits
        labelled = labels != -100
        scores = (scores if ours else scores[labelled]).float()
        words = [cross_entropy(scores, labels[labelled], reduction="none"), scores.argmax(-1)]
        if follows is None:
            return words
        pairs = outputs.seq_relationship_logits.float()
        return [*words, cross_entropy(pairs, follows, reduction="none"), pairs.argmax(-1) == follows]

    def evaluate(self, model, split):
        """`loss`, as in training; `perplexity` of the masked words; loss and accuracy of pairs; and
        `loss_by_frequency`, which a model has that has learned nothing but the frequencies of words."""

        def forward(model, batch) -> tuple[list[list[int]], list[float]]:
            losses, predicted, *pairs = self.each_loss(model, batch)
            sums = [losses.double().sum().item(), len(losses), *(each.double().sum().item() for each in pairs)]
            masked = [int((row != -100).sum()) for row in unpadded(batch, batch["labels"])]
            return [row.tolist() for row in predicted.split(masked)], sums

        predicted, (total, words, *pairs) = self.predict(model, split, forward)
        names = ("next_sentence_loss", "next_sentence_accuracy")
        of_pairs = {name: each / len(predicted) for name, each in zip(names, pairs, strict=False)}
        loss = total / words + of_pairs.get("next_sentence_loss", 0.0)
        metrics = {"loss": loss, "perplexity": perplexity(total, words), **of_pairs}
        if split in self.loss_by_frequency:
            metrics["loss_by_frequency"] = self.loss_by_frequency[split]
        return Evaluation(metrics, self.predictions(split, predicted))

    def predictions(self, split: str, predicted: list[list[int]]) -> list[dict]:
        """The masked sequences, with their masked words and the most probable ones."""
        examples = self.splits[split].select_columns(["input_ids", "labels", "place"])
        words = self.tokenizer.convert_ids_to_tokens
        return [
            {
                "text": self.tokenizer.decode(example["input_ids"]),
                "prediction": words(own),
                "place": example["place"],
                "masked_words": words([label for label in example["labels"] if label != -100]),
            }
            for example, own in zip(examples, predicted, strict=True)
        ]
