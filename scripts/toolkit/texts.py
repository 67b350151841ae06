"""The texts of a file, and their token ids, for `check.py` and `benchmark.py`."""

from toolkit.common import about
from toolkit.data import Source, find_column, open_files, text_of
from toolkit.hub import check_vocabulary, open_tokenizer
from toolkit.tasks.arguments import TEXTS


def read_texts(args, path: str, flag: str, limit: int | None) -> list[dict]:
    """The texts of the first rows of a file, each with its place.

    Args:
        args: with `text_column`, `encoding` and `delimiter`.
        flag: that names the file.

    Raises:
        OSError, ValueError: the file cannot be read, or a row has no text.
    """
    source = Source(flag, open_files([path], flag, args.encoding, args.delimiter), limit=limit)
    column = find_column(source.columns(), "--text_column", args.text_column, TEXTS)
    return list(source.valid_rows(lambda content: {"text": text_of(content, column)}, "stop", print))


def encode(source: str, config, texts: list[str], longest: int) -> list[list[int]]:
    """The token ids of texts, by the tokenizer of a checkpoint.

    Raises:
        CommandError: it has none that fits the model.
    """
    with about(source):
        tokenizer = open_tokenizer(source)
        check_vocabulary(len(tokenizer), config)
        longest = min(longest, config.max_position_embeddings)
        return tokenizer(texts, truncation=True, max_length=longest)["input_ids"]
