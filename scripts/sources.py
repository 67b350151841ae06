"""What the scripts ask of a checkpoint's name and files. It does without this project's package, which
sentence_similarity puts out of its own reach."""

from transformers.utils import cached_file


def looks_like_a_path(source: str) -> bool:
    """Whether `source` can only be a folder, and no hub id."""
    return source.startswith((".", "/", "~")) or source.count("/") > 1


def has_tokenizer(source: str) -> bool:
    """Whether a tokenizer lies beside the weights. AutoTokenizer makes up one of five words for a BERT without one, so
    it cannot be asked."""
    files = ("tokenizer.json", "vocab.txt")
    return any(cached_file(source, name, _raise_exceptions_for_missing_entries=False) for name in files)
