"""Tasks of `predict.py` that are tasks of `train.py`: their columns, lengths and answers are those of the training."""

import pyarrow as pa

from toolkit.corpus.models import Usage
from toolkit.corpus.tasks import FiniteCheck, max_length, own_arguments, prepare_generation
from toolkit.tasks import arguments
from toolkit.tasks.question_answering import QuestionAnswering
from toolkit.tasks.seq2seq import Seq2Seq
from toolkit.tasks.tagging import Tagging


class TagWords(Tagging):
    """The tag of each word."""

    columns = {"predicted_tags": pa.list_(pa.string())}

    def __init__(self, args, usage: Usage, columns: list[str]):
        super().__init__(own_arguments(arguments.TaggingArguments, args, usage, columns))
        self.restore()


class Answer(QuestionAnswering):
    """The span of each context that answers its question."""

    columns = {"prediction": pa.string(), "score": pa.float32(), "start": pa.int32()}

    def __init__(self, args, usage: Usage, columns: list[str]):
        if args.label_column not in (None, "answers"):
            raise ValueError(f"--label_column is {args.label_column}; expected answers, in the form of SQuAD.")
        saved = usage.fields.get("question_answering") or {}
        saved_length = saved.get("max_length", arguments.QuestionAnsweringArguments.max_length)
        names = ("stride", "max_answer_length", "null_threshold")
        chosen = {name: getattr(args, name) or saved.get(name) for name in names}
        given = {name: value for name, value in chosen.items() if value is not None}
        own = own_arguments(arguments.QuestionAnsweringArguments, args, usage, columns, **given)
        own.max_length = max_length(args, usage, saved_length)
        if "stride" not in given:  # a model may have few positions
            own.stride = min(own.stride, own.max_length // 3)
        super().__init__(own)
        self.restore()


class Write(Seq2Seq):
    """A text for each source, by an encoder and a decoder."""

    columns = {"prediction": pa.string()}

    def __init__(self, args, usage: Usage, columns: list[str]):
        super().__init__(own_arguments(arguments.Seq2SeqArguments, args, usage, columns))
        self.args = args

    def open(self, model) -> None:
        prepare_generation(model, self.tokenizer, self.args, model.config.max_position_embeddings)

    def answer(self, model, batch):
        check = FiniteCheck(len(batch["input_ids"]))
        return check.without_bad(super().answer(model, batch, logits_processor=[check]))

    def decode(self, rows, examples, outputs):
        return [{"prediction": text} for text in outputs]  # also of a model that was trained without metrics of texts
