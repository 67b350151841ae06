"""What a model is applied for, with what `toolkit.tasks` has for training: the same reading, lengths and answers."""

import pkgutil
from collections import defaultdict
from dataclasses import fields
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torch.nn.functional import normalize
from transformers import LogitsProcessor

from toolkit.corpus.models import Usage, open_modules
from toolkit.data import find_column, text_of
from toolkit.hub import open_tokenizer
from toolkit.tasks import arguments
from toolkit.tasks.arguments import SECOND_TEXTS, SOURCES, TEXTS, WORDS
from toolkit.tasks.classification import Classification
from toolkit.tasks.task import Batch, Task, encodings, example_of, inputs_of, tokenize

# Usual names of the columns of pairs to rerank.
QUERIES, DOCUMENTS = ("query", *TEXTS), ("document", "passage", "answer", "text_pair", *SECOND_TEXTS)

# What the recipe of a training says of the columns and labels.
READING = {
    *("text_column", "text_pair_column", "label_column", "label_columns", "words_column", "tags_column"),
    *("source_column", "target_column", "label_separator", "scheme", "metrics"),
}
# From the name of a task to its module and class. Those of `trained` import `evaluate` and `datasets`, which takes
# seconds: only when they are used.
TASK_CLASSES = {
    "embed": "tasks:Embed",
    "classify": "tasks:Classify",
    "rerank": "tasks:Rerank",
    "tag": "tasks:Tag",
    "tag-words": "trained:TagWords",
    "answer": "trained:Answer",
    "generate": "trained:Write",
    "continue": "tasks:Continue",
    "fill-mask": "tasks:FillMask",
}
NEW_TOKENS = 128  # of a generated text, if neither the flags nor the model set a limit
LARGEST_INT8 = 127


def make_task(args, usage: Usage, columns: list[str]) -> Any:
    """The task of a run, without its model. Its columns are those of the flags, those of the training, or usual ones.

    Raises:
        ValueError: the model or a flag does not allow the task, or a column is missing.
    """
    name = args.task
    if name == "tag" and has_words(args, usage, columns):
        name = "tag-words"
    if name == "generate" and not usage.is_seq2seq:
        name = "continue"
    task = pkgutil.resolve_name(f"toolkit.corpus.{TASK_CLASSES[name]}")(args, usage, columns)
    task.find_inputs(columns)
    if args.label_column is not None:
        task.find_labels(columns)
    return task


def has_words(args, usage: Usage, columns: list[str]) -> bool:
    """Whether the rows have lists of words: a column of them is named, or there is one and no text."""
    has_text = args.text_column is not None or any(name in columns for name in TEXTS)
    usual = any(name in columns for name in (usage.recipe.get("words_column"), *WORDS))
    return args.words_column is not None or (usual and not has_text)


def own_arguments(cls: type, args, usage: Usage, columns: list[str], **more):
    """The arguments of a task of `toolkit.tasks`: from flags, else from the training."""
    names = READING & {each.name for each in fields(cls)}
    labels = {}  # the label column has other names in a training
    if args.label_column is not None:
        name = find_column(columns, "--label_column", args.label_column, ())
        labels = dict.fromkeys(("tags_column", "target_column"), name)
    found = {name: getattr(args, name, None) or labels.get(name) or saved(usage, name, columns) for name in names}
    given = {name: value for name, value in found.items() if value is not None}
    found = cls(model=args.model, **given | more)
    found.max_length = max_length(args, usage, usage.recipe.get("max_length"))
    found.trust_remote_code = args.trust_remote_code
    return found


def saved(usage: Usage, name: str, columns: list[str]):
    """What the training says of columns and labels; None if the rows have no such column."""
    value = usage.recipe.get(name)
    return None if name.endswith("_column") and value not in columns else value


def max_length(args, usage: Usage, saved: int | None = None) -> int:
    """The tokens to which an input is cut, or of a window. Raises ValueError if the model has fewer positions."""
    of_encoder = usage.fields.get("encoder", usage.fields)  # the fields of an EncoderDecoderModel are in two groups
    positions = of_encoder["max_position_embeddings"]
    if args.max_length is not None and args.max_length > positions:
        raise ValueError(f"--max_length is {args.max_length}; the model has {positions} positions.")
    given = args.max_length or saved or usage.max_length
    return min(given or open_tokenizer(args.model, args.trust_remote_code).model_max_length, positions)


# ----------------------------------------------------------------------------------------------- tasks of the training


class Classify(Classification):
    """The label of each text or pair, with its score; several labels; or numbers."""

    def __init__(self, args, usage: Usage, columns: list[str]):
        problem = (usage.fields.get("problem_type") or "single_label").removesuffix("_classification")
        super().__init__(own_arguments(arguments.ClassificationArguments, args, usage, columns, problem=problem))
        self.restore()
        self.function, self.prompt = usage.activation, usage.prompt(args.prompt, args.prompt_name)
        self.threshold = 0.5 if args.threshold is None else args.threshold
        self.all_scores = args.all_scores
        if len(set(self.labels)) < len(self.labels):
            raise ValueError("two labels of the model have the same name; expected different names.")
        number = pa.float32()
        scores = {"scores": pa.struct([(label, number) for label in self.labels])}
        self.columns = {
            "single_label": {"prediction": pa.string(), "score": number, **(scores if args.all_scores else {})},
            "multi_label": {"prediction": pa.list_(pa.string()), **scores},
            "regression": {"prediction": number if len(self.labels) == 1 else pa.list_(number)},
        }[problem]

    def read_inputs(self, content):
        row = super().read_inputs(content)
        return {**row, "text": self.prompt + row["text"]}

    def activation(self, logits):
        if self.function is not None:
            return activation_of(self.function)(logits)
        return logits.sigmoid() if len(self.labels) == 1 else super().activation(logits)

    def decode(self, rows, examples, outputs):
        found = super().decode(rows, examples, outputs)
        for row, logits in zip(found, outputs, strict=True) if self.all_scores else ():
            row["scores"] = dict(zip(self.labels, self.activation(torch.tensor(logits)).tolist(), strict=True))
        return found


class Rerank(Classify):
    """The score of each pair, as sentence-transformers' `CrossEncoder.predict` returns it."""

    def __init__(self, args, usage: Usage, columns: list[str]):
        super().__init__(args, usage, columns)
        if len(self.labels) != 1:
            raise ValueError(
                f"the model has {len(self.labels)} labels; expected one with --task rerank, or --task classify."
            )
        self.problem, self.columns = "regression", {"score": pa.float32()}
        self.function = self.function or "Sigmoid"

    def find_inputs(self, columns):
        self.text = find_column(columns, "--text_column", self.arguments.text_column, QUERIES)
        self.pair = find_column(columns, "--text_pair_column", self.arguments.text_pair_column, DOCUMENTS)

    def decode(self, rows, examples, outputs):
        return [{"score": self.activation(torch.tensor(logits)).item()} for logits in outputs]

    def metrics(self, rows, predictions):
        return super().metrics(rows, [{"prediction": each["score"]} for each in predictions])


def activation_of(path: str) -> torch.nn.Module:
    """An activation function that config.json names. Raises ValueError if it is none of the usual ones."""
    name = path.rpartition(".")[2]
    known = {"Identity": torch.nn.Identity(), "Sigmoid": torch.nn.Sigmoid(), "Softmax": torch.nn.Softmax(-1)}
    if name not in known:
        raise ValueError(f"the activation function of the model is {path}; expected one of {', '.join(known)}.")
    return known[name]


# ----------------------------------------------------------------------------------------------- tasks without training


class TextTask(Task):
    """A task of one text in each row.

    Attributes:
        columns: the columns of its result, with their types.
    """

    columns: dict[str, pa.DataType]
    usual = TEXTS

    def __init__(self, args, usage: Usage, columns: list[str]):
        super().__init__(own_arguments(arguments.MaskedLMArguments, args, usage, columns))
        self.args, self.usage = args, usage
        self.prompt = usage.prompt(args.prompt, args.prompt_name)

    def find_inputs(self, columns):
        self.text = find_column(columns, "--text_column", self.arguments.text_column, self.usual)

    def find_labels(self, columns):
        raise ValueError(f"--label_column is given for the task {self.args.task}; expected a task that has labels.")

    def read_inputs(self, content):
        return {"text": self.prompt + text_of(content, self.text)}

    def open(self, model) -> None:
        """Prepares what depends on the model."""

    def encode(self, rows):
        return list(tokenize(self.tokenizer, self.arguments.max_length, [row["text"] for row in rows]))


class Embed(TextTask):
    """A vector for each text."""

    def open(self, model):
        args, usage = self.args, self.usage
        self.modules = open_modules(args.model, usage, model.device) if usage.modules and args.pooling is None else []
        self.pooling = args.pooling or usage.pooling
        prompt = self.tokenizer(self.prompt)["input_ids"] if self.prompt and not usage.include_prompt else []
        self.skipped = len(prompt) - (prompt[-1:] == [self.tokenizer.sep_token_id])
        width = len(self.vector(torch.zeros(self.skipped + 1, model.config.hidden_size, device=model.device), False))
        if (args.truncate_dim or 0) > width:
            raise ValueError(f"--truncate_dim is {args.truncate_dim}; the embeddings have {width} numbers.")
        size, dtype = args.truncate_dim or width, args.embedding_dtype
        if dtype.endswith("binary"):
            size, dtype = -(-size // 8), dtype.replace("ubinary", "uint8").replace("binary", "int8")
        self.columns = {"embedding": pa.list_(pa.from_numpy_dtype(dtype), size)}
        if args.embedding_dtype == "int8" and args.ranges is None:
            self.columns["scale"] = pa.float32()

    def answer(self, model, batch: Batch) -> list:
        states = model(**inputs_of(batch)).last_hidden_state.float()
        lengths = batch["attention_mask"].sum(1).tolist()
        # One text after the other: a product and the functions of an array have other last bits in a batch.
        vectors = [self.vector(own[:length]).cpu() for own, length in zip(states, lengths, strict=True)]
        if self.args.embedding_dtype == "float16":  # in which a number may be infinite
            vectors = [vector.half() for vector in vectors]
        return [vector.numpy() if vector.isfinite().all() else None for vector in vectors]

    def vector(self, states: torch.Tensor, is_cut: bool = True) -> torch.Tensor:
        """The vector of a text with these hidden states, `(T, C)`."""
        if self.modules:
            mask = torch.ones(1, len(states), dtype=torch.long, device=states.device)
            features = {"token_embeddings": states[None], "attention_mask": mask, "prompt_length": self.skipped}
            for module in self.modules:
                features = module(features)
            vector = features["sentence_embedding"][0]
        else:
            states = states[self.skipped :]
            pooled = {"mean": lambda: states.mean(0), "cls": lambda: states[0], "max": lambda: states.max(0).values}
            vector = pooled[self.pooling]()
            vector = normalize(vector, dim=0) if self.usage.normalize else vector
        vector = vector[: self.args.truncate_dim] if is_cut else vector
        return normalize(vector, dim=0) if self.args.normalize else vector

    def decode(self, rows, examples, outputs):
        vectors = np.array(outputs, np.float32)
        dtype = self.args.embedding_dtype
        if dtype == "int8" and self.args.ranges is None:
            scale = np.abs(vectors).max(axis=1) / LARGEST_INT8
            rounded = np.rint(vectors / np.maximum(scale, np.finfo(np.float32).tiny)[:, None]).astype(np.int8)
            return [{"embedding": own, "scale": number} for own, number in zip(rounded, scale, strict=True)]
        if dtype in ("int8", "uint8", "binary", "ubinary"):
            from sentence_transformers import quantize_embeddings

            vectors = quantize_embeddings(vectors, dtype, self.args.ranges)
        return [{"embedding": own} for own in vectors.astype(self.columns["embedding"].value_type.to_pandas_dtype())]


class FillMask(TextTask):
    """The likeliest words for each mask of a text, the likeliest first."""

    columns = {"words": pa.list_(pa.list_(pa.string())), "scores": pa.list_(pa.list_(pa.float32()))}

    def read_inputs(self, content):
        row = super().read_inputs(content)
        if self.tokenizer.mask_token not in row["text"]:
            raise ValueError(f"{self.text!r} has no {self.tokenizer.mask_token}; expected one or more")
        return row

    def open(self, model):
        self.top_k = self.args.top_k or 5
        if self.top_k > model.config.vocab_size:
            raise ValueError(f"--top_k is {self.top_k}; the vocabulary has {model.config.vocab_size} words.")

    def encode(self, rows):
        found = super().encode(rows)
        for example in found:
            if self.tokenizer.mask_token_id not in example["input_ids"]:
                raise ValueError(
                    f"{self.text!r} has no {self.tokenizer.mask_token} in its first {example['length']} tokens"
                )
        return found

    def answer(self, model, batch):
        is_mask = batch["input_ids"] == self.tokenizer.mask_token_id
        states = model.base_model(**inputs_of(batch)).last_hidden_state[is_mask]
        best = model.lm_head(states).float().softmax(-1).topk(self.top_k)
        parts = zip(*(each.cpu().split(is_mask.sum(1).tolist()) for each in (best.indices, best.values)), strict=True)
        return [(ids.tolist(), scores.tolist()) if scores.isfinite().all() else None for ids, scores in parts]

    def decode(self, rows, examples, outputs):
        words = [[[self.tokenizer.decode([word]) for word in mask] for mask in ids] for ids, _ in outputs]
        return [{"words": own, "scores": scores} for own, (_, scores) in zip(words, outputs, strict=True)]


class Tag(TextTask):
    """The entities of each text with their characters, as `pipeline("token-classification", stride=…)` finds them."""

    def __init__(self, args, usage: Usage, columns: list[str]):
        super().__init__(args, usage, columns)
        text, number, place = pa.string(), pa.float32(), pa.int32()
        kind = [("entity", text), ("index", place)] if args.aggregation == "none" else [("entity_group", text)]
        entity = pa.struct([*kind, ("score", number), ("word", text), ("start", place), ("end", place)])
        self.columns = {"entities": pa.list_(entity)}

    def open(self, model):
        from transformers import TokenClassificationPipeline
        from transformers.pipelines.token_classification import AggregationStrategy

        self.strategy = AggregationStrategy(self.args.aggregation)
        self.pipeline = TokenClassificationPipeline(model=model, tokenizer=self.tokenizer, device=model.device)

    def encode(self, rows):
        length = self.arguments.max_length
        options = {"truncation": True, "max_length": length, "stride": length // 4}
        found = encodings(self.tokenizer, [row["text"] for row in rows], **options)
        return [example_of(encoding, row) | {"window": encoding} for row, encoding in found]

    def outputs_of(self, logits, batch):
        lengths = batch["attention_mask"].sum(1).tolist()
        return [own[:length] for own, length in zip(logits.cpu(), lengths, strict=True)]

    def decode(self, rows, examples, outputs):
        windows = defaultdict(list)
        for example, logits in zip(examples, outputs, strict=True):
            encoding = example["window"]
            windows[example["row"]].append(
                {
                    "logits": logits[None],
                    "sentence": rows[example["row"]]["text"],
                    "input_ids": [encoding.ids],
                    "offset_mapping": [encoding.offsets],
                    "special_tokens_mask": torch.tensor([encoding.special_tokens_mask]),
                }
            )
        return [{"entities": self.entities(windows[i])} for i in range(len(rows))]

    def entities(self, windows: list[dict]) -> list[dict]:
        found = self.pipeline.postprocess(windows, aggregation_strategy=self.strategy)
        return [{**entity, "score": float(entity["score"])} for entity in found]


class Continue(TextTask):
    """Each text with its continuation, by a decoder. A text that is too long is cut at its beginning."""

    columns = {"prediction": pa.string()}
    usual = SOURCES

    def open(self, model):
        positions = model.config.max_position_embeddings
        new = prepare_generation(model, self.tokenizer, self.args, positions // 2)
        self.room = positions + 1 - new  # the last token is not fed back
        if self.room < 2:
            raise ValueError(f"max_new_tokens is {new}; expected fewer than the model's {positions} positions.")

    def encode(self, rows):
        start = self.tokenizer("")["input_ids"][:1]  # [CLS]; a text to continue does not end with [SEP]
        bodies = self.tokenizer([row["text"] for row in rows], add_special_tokens=False, verbose=False)["input_ids"]
        examples = []
        for number, body in enumerate(bodies):
            kept = body[-(self.room - len(start)) :]
            ids = np.array([*start, *kept], dtype=np.int32)
            examples.append({"input_ids": ids, "length": len(ids), "row": number, "cut": len(body) - len(kept)})
        return examples

    def collate(self, examples, seed=()):
        # A text is continued at its end, so its padding is on the left.
        ids = {"input_ids": [example["input_ids"].tolist() for example in examples]}
        return self.tokenizer.pad(ids, padding_side="left", return_tensors="pt")

    def answer(self, model, batch):
        start = batch["input_ids"].shape[1]
        check = FiniteCheck(len(batch["input_ids"]))
        sequences = model.generate(**inputs_of(batch), logits_processor=[check], tokenizer=self.tokenizer)
        return check.without_bad([ids.tolist() for ids in sequences[:, start:]])

    def decode(self, rows, examples, outputs):
        return [
            {"prediction": self.continued(rows[example["row"]]["text"], example["input_ids"].tolist(), ids)}
            for example, ids in zip(examples, outputs, strict=True)
        ]

    def continued(self, text: str, text_ids: list[int], ids: list[int]) -> str:
        """The text with its continuation. This is not decoded alone: it may start in the middle of a word."""
        before, whole = (self.tokenizer.decode(each, skip_special_tokens=True) for each in (text_ids, text_ids + ids))
        added = whole[len(before) :]
        return text + (added.lstrip(" ") if text[-1:].isspace() else added)


class FiniteCheck(LogitsProcessor):
    """Notes of which rows the model's numbers are NaN while it generates texts."""

    def __init__(self, rows: int):
        self.is_bad = torch.zeros(rows, dtype=torch.bool)

    def __call__(self, input_ids, scores):
        is_nan = scores.isnan()
        self.is_bad |= is_nan.view(len(self.is_bad), -1).any(1).cpu()
        return scores.masked_fill(is_nan, 0.0)  # sampling would fail

    def without_bad(self, outputs: list) -> list:
        """The outputs, None for the rows that are bad."""
        return [None if bad else output for bad, output in zip(self.is_bad.tolist(), outputs, strict=True)]


def prepare_generation(model, tokenizer, args, most: int) -> int:
    """Sets the model's generation_config by the flags. Returns the largest number of new tokens.

    Raises:
        ValueError: there is no such field, or fields contradict each other.
    """
    config = model.generation_config
    options: dict[str, Any] = dict(args.option)
    options |= {name: getattr(args, name) for name in ("max_new_tokens", "num_beams") if getattr(args, name)}
    if unknown := config.update(**options):
        raise ValueError(f"--option {min(unknown)} is unknown; expected a field of GenerationConfig.")
    if (config.num_return_sequences or 1) != 1:
        raise ValueError(f"num_return_sequences is {config.num_return_sequences}; expected 1, a text for each row.")
    if config.max_new_tokens is None and "max_length" not in options:
        config.max_new_tokens = min(NEW_TOKENS, most)
    if config.eos_token_id is None:
        config.eos_token_id = tokenizer.sep_token_id
    if config.pad_token_id is None:
        config.pad_token_id = tokenizer.pad_token_id
    config.validate(strict=True, user_set_attributes={"do_sample", "num_beams", *options})
    return config.max_new_tokens or config.max_length
