"""Pre-training of encoders on texts without labels: masked words."""

from collections.abc import Iterator

import numpy as np

from toolkit.data import find_column, text_of
from toolkit.tasks.arguments import MaskedLMArguments
from toolkit.tasks.new_model import new_config, overrides
from toolkit.tasks.task import IGNORED, Task, encodings, inputs_of

UNLABELLED_TEXTS = ("text", "sentence", "content", "document")

# The share of words to predict; and among these, the shares replaced by [MASK] and by a random word. The rest stay
# unchanged (Devlin et al. 2018, section 3.1).
CHOSEN, MASKED, RANDOM = 0.15, 0.8, 0.1


class MaskedLM(Task):
    """Texts. An example is a sequence of up to --max_length tokens: texts one after the other with [SEP] between them,
    or with --line_by_line one text. Which words are masked depends on the seed, the epoch and the number of the example
    only; in an evaluation on the number alone."""

    name = "fill-mask"
    model_class = "ForMaskedLM"
    metric_names = ("perplexity",)
    lower_is_better = ("loss", "perplexity")
    is_language_model = True
    arguments: MaskedLMArguments

    def __init__(self, arguments: MaskedLMArguments):
        super().__init__(arguments)
        tokenizer = self.tokenizer
        for role in ("cls_token_id", "sep_token_id", "mask_token_id"):
            if getattr(tokenizer, role) is None:
                raise ValueError(f"the tokenizer has no {role}; expected one like BERT's.")
        vocabulary = tokenizer.get_vocab()
        numbers = np.arange(max(vocabulary.values()) + 1)
        self.continues = np.isin(numbers, [i for token, i in vocabulary.items() if token.startswith("##")])
        self.is_special = np.isin(numbers, tokenizer.all_special_ids)
        self.ordinary = np.flatnonzero(~self.is_special)
        if arguments.whole_word_masking and not self.continues.any():
            raise ValueError("--whole_word_masking is given; expected a WordPiece tokenizer, with ## tokens.")

    # -- data

    def find_inputs(self, columns):
        self.text = find_column(columns, "--text_column", self.arguments.text_column, UNLABELLED_TEXTS)
        return f"the text is {self.text!r}"

    def read_inputs(self, content):
        return {"text": text_of(content, self.text)}

    def encode(self, rows):
        start, end = self.tokenizer.cls_token_id, self.tokenizer.sep_token_id
        examples = []
        for row, ids, cut in self.pieces(rows):
            if not self.is_special[ids].all():  # else nothing can be masked
                whole = np.array([start, *ids, end], dtype=np.int32)
                examples.append(
                    {"input_ids": whole, "length": len(whole), "row": row, "cut": cut, "number": len(examples)}
                )
        if not examples:
            raise ValueError("the rows have no word of the vocabulary; expected at least one.")
        return examples

    def pieces(self, rows: list[dict]) -> Iterator[tuple[int, list[int], int]]:
        """The tokens of each sequence without [CLS] and [SEP], the row where it starts, and how many are cut off."""
        room = self.arguments.max_length - 2
        buffer, first = [], 0
        for number, encoding in encodings(self.tokenizer, [row["text"] for row in rows], add_special_tokens=False):
            ids = encoding.ids
            if not ids:
                continue
            if self.arguments.line_by_line:
                yield number, ids[:room], max(len(ids) - room, 0)
                continue
            if buffer:
                buffer.append(self.tokenizer.sep_token_id)
            else:
                first = number
            buffer += ids
            while len(buffer) >= room:
                yield first, buffer[:room], 0
                buffer, first = buffer[room:], number
        if buffer:
            yield first, buffer, 0

    def save_settings(self, config):
        """Later tasks have their own lengths."""

    def collate(self, examples, seed=()):
        return super().collate(
            [self.masked(example, np.random.default_rng([*seed, example["number"]])) for example in examples]
        )

    def masked(self, example: dict, random: np.random.Generator) -> dict:
        """A sequence with masked words. `labels` are the words to predict, and -100 elsewhere."""
        ids = example["input_ids"]
        words = (~self.continues[ids]).cumsum() - 1 if self.arguments.whole_word_masking else np.arange(len(ids))
        chosen = (random.random(len(ids))[words] < CHOSEN) & ~self.is_special[ids]
        kind = random.random(len(ids))
        others = random.choice(self.ordinary, len(ids))
        cases = [~chosen, kind < MASKED, kind >= 1 - RANDOM]
        changed = np.select(cases, [ids, self.tokenizer.mask_token_id, others], ids)
        return {**example, "input_ids": changed, "labels": np.where(chosen, ids, IGNORED)}

    # -- model, loss and metrics

    def open_model(self):
        flags = self.arguments
        fields = overrides(flags)
        if flags.implementation == "scratchbert":
            fields["sparse_prediction"] = True  # computes the scores of the masked words only
        if flags.config_name:
            model = self.choose_class()(new_config(flags, self.tokenizer, **fields))
        else:
            model = super().open_model(**fields)
        if model.config.is_decoder:
            raise ValueError(
                "the configuration has is_decoder true; expected an encoder, which sees words on both sides."
            )
        return model

    def logits(self, model, batch):
        """The scores of the masked words only, `(N, V)`."""
        if self.arguments.implementation == "scratchbert":
            return model(**inputs_of(batch), labels=batch["labels"]).logits.float()
        return super().logits(model, batch)[batch["labels"] != IGNORED]

    def loss_of(self, logits, batch):
        labels = batch["labels"]
        return super().loss_of(logits, {"labels": labels[labels != IGNORED]})
