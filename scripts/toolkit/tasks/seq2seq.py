"""Pairs of texts: a model that writes a target for each source, from a BERT, a generator or random weights."""

from itertools import chain, zip_longest

import numpy as np
import torch
from transformers import GenerationConfig

from modeling_scratchbert import ScratchBertForConditionalGeneration
from toolkit.data import find_column, text_of
from toolkit.hub import read_config
from toolkit.tasks.arguments import SEQ2SEQ_METRICS, SOURCES, Seq2SeqArguments
from toolkit.tasks.new_model import new_config, overrides
from toolkit.tasks.task import IGNORED, Task, inputs_of, tokenize
from toolkit.tasks.text_metric import TextMetric

TARGETS = ("target", "summary", "highlights", "translation", "de")


class Seq2Seq(Task):
    """Sources and targets. The decoder starts with [CLS] and ends with [SEP]."""

    name = "text2text-generation"
    label_fields = ("source", "target")
    model_class = "ForConditionalGeneration"
    lower_is_better = ("loss", "perplexity", "token_error_rate", "item_error_rate")
    is_language_model = True
    grouped_by = ("source",)
    arguments: Seq2SeqArguments

    def __init__(self, arguments: Seq2SeqArguments):
        super().__init__(arguments)
        metrics = arguments.metrics or ["rouge"]
        self.texts = [name for name in metrics if name != "loss"]
        self.metric_names = [*chain(*(SEQ2SEQ_METRICS[name] for name in metrics)), "perplexity"]
        tokenizer = self.tokenizer
        if tokenizer("").input_ids != [tokenizer.cls_token_id, tokenizer.sep_token_id]:
            raise ValueError(
                "the tokenizer does not put [CLS] before and [SEP] after a text; expected one like BERT's."
            )

    # -- data

    def find_inputs(self, columns):
        flags = self.arguments
        others = [name for name in columns if flags.source_column or name != flags.target_column]
        self.source = find_column(others, "--source_column", flags.source_column, SOURCES)
        return f"the source is {self.source!r}"

    def find_labels(self, columns):
        others = [name for name in columns if name != self.source]
        self.target = find_column(others, "--target_column", self.arguments.target_column, TARGETS)
        return f"the target is {self.target!r}"

    def read_inputs(self, content):
        return {"source": text_of(content, self.source)}

    def read_labels(self, content):
        return {"target": text_of(content, self.target)}

    def encode(self, rows):
        longest = self.arguments.max_target_length + 1  # with [CLS], which labels lack
        sources = [row["source"] for row in rows]
        examples = list(tokenize(self.tokenizer, self.arguments.max_length, sources))
        targets = [row["target"] for row in rows if "target" in row]
        for example, target in zip(examples, tokenize(self.tokenizer, longest, targets), strict=False):
            example["labels"] = target["input_ids"][1:]
            example["cut"] += target["cut"]
            example["length"] += len(example["labels"])  # of both, to sort by
        return examples

    def collate(self, examples, seed=()):
        batch = super().collate(examples)
        if "labels" in batch:
            first = torch.full((len(examples), 1), self.tokenizer.cls_token_id)
            inputs = torch.cat([first, batch["labels"][:, :-1]], 1)
            batch["decoder_input_ids"] = inputs.masked_fill(inputs == IGNORED, self.tokenizer.pad_token_id)
        return batch

    # -- model

    def open_model(self):
        flags, tokenizer, cls = self.arguments, self.tokenizer, ScratchBertForConditionalGeneration
        names = ("tie_encoder_decoder", "num_decoder_layers")
        fields = {name: getattr(flags, name) for name in names if getattr(flags, name)} | overrides(flags)
        special = {
            "decoder_start_token_id": tokenizer.cls_token_id,
            "eos_token_id": tokenizer.sep_token_id,
            "pad_token_id": tokenizer.pad_token_id,
        }
        if flags.config_name:
            model = cls(new_config(flags, tokenizer, **{"is_encoder_decoder": True, **special, **fields}))
        else:
            config = read_config(flags.model)
            is_generator = bool(config.get("is_encoder_decoder")) or config.get("model_type") == "encoder-decoder"
            if is_generator and fields.keys() & set(names):
                raise ValueError(f"--model {flags.model} has a decoder; expected none of --{' and --'.join(names)}.")
            model = self.load(cls.from_pretrained if is_generator else cls.from_bert, **(special | fields))
        ids = {name: getattr(model.config, name) for name in ("bos_token_id", *special)}
        model.generation_config = GenerationConfig(
            **ids, max_new_tokens=flags.max_target_length, num_beams=flags.num_beams, do_sample=False
        )
        return model

    # -- loss and metrics

    def logits(self, model, batch):
        inputs = inputs_of(batch) | {"decoder_input_ids": batch["decoder_input_ids"]}
        return model(**inputs, use_cache=False).logits.float()

    def predict(self, model, batch):
        texts, loss = super().predict(model, batch)
        return self.answer(model, batch) if self.texts else texts, loss

    def answer(self, model, batch, **options):
        whole = getattr(model, "module", model)
        inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
        is_sharded = torch.distributed.is_initialized() and whole is model
        ids = whole.generate(**inputs, synced_gpus=is_sharded, tokenizer=self.tokenizer, **options)
        return self.tokenizer.batch_decode(ids, skip_special_tokens=True)

    def decode(self, rows, examples, outputs):
        return [{"prediction": text} for text in outputs] if self.texts else []

    def metrics(self, rows, predictions):
        """Rows with the same source are one item, with several right targets."""
        if not self.texts:
            return {}
        right, written = {}, {}
        for row, prediction in zip(rows, predictions, strict=True):
            right.setdefault(row["source"], []).append(row["target"])
            written.setdefault(row["source"], prediction["prediction"])
        values = {}
        for name in self.texts:
            values |= TEXT_METRICS[name].of(list(written.values()), list(right.values()))
        return values


# ------------------------------------------------------------------------------------------- metrics of generated texts
# References are a list of right texts for each prediction.


class Rouge(TextMetric):
    """rouge1, rouge2, rougeL, rougeLsum: the mean F1 of words, pairs of words and the longest common subsequence. The
    best of several references counts. Words consist of a-z and 0-9. Lin (2004), "ROUGE"."""

    def _compute(self, predictions, references):
        from rouge_score.rouge_scorer import RougeScorer

        types = SEQ2SEQ_METRICS["rouge"]
        scorer = RougeScorer(types)
        scores = [scorer.score_multi(right, text) for text, right in zip(predictions, references, strict=True)]
        return {name: np.mean([score[name].fmeasure for score in scores]) for name in types}


class Sacrebleu(TextMetric):
    """bleu, chrf: over the whole set, from 0 to 100. Post (2018), "A Call for Clarity in Reporting BLEU Scores"."""

    def _compute(self, predictions, references):
        from sacrebleu import corpus_bleu, corpus_chrf

        columns = [list(column) for column in zip_longest(*references)]
        return {"bleu": corpus_bleu(predictions, columns).score, "chrf": corpus_chrf(predictions, columns).score}


class ErrorRate(TextMetric):
    """token_error_rate: the edits that turn predictions into references, divided by the tokens of the references: the
    word error rate, or the phoneme error rate if tokens are phonemes. item_error_rate: the share of items with an edit.
    The reference with the fewest edits counts."""

    def _compute(self, predictions, references):
        from rapidfuzz.distance import Levenshtein

        best = [
            min((Levenshtein.distance(text.split(), right.split()), len(right.split())) for right in texts)
            for text, texts in zip(predictions, references, strict=True)
        ]
        edits, lengths = np.array(best).T
        return {
            "token_error_rate": edits.sum() / max(lengths.sum(), 1),
            "item_error_rate": (edits > 0).mean(),
        }


TEXT_METRICS: dict[str, type[TextMetric]] = {"rouge": Rouge, "sacrebleu": Sacrebleu, "error_rate": ErrorRate}
