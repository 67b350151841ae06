"""What the scripts ask of a checkpoint's name and files. It does without this project's package, which
sentence_similarity puts out of its own reach."""

from pathlib import Path

from huggingface_hub import HfApi
from huggingface_hub.errors import HfHubHTTPError, HTTPError, RevisionResolutionError
from transformers.utils import cached_file


def looks_like_a_path(source: str) -> bool:
    """Whether `source` can only be a folder, and no hub id."""
    return source.startswith((".", "/", "~")) or source.count("/") > 1


def check_source(source: str) -> None:
    """Raises OSError if `source` is a path without a folder, or a hub id that neither Hub nor cache can be asked for.
    It tells at once, where a loader tries again for half a minute."""
    if Path(source).is_dir():
        return
    if looks_like_a_path(source):
        raise OSError("There is no such folder.")
    try:
        HfApi().resolve_revision(source)
    except RevisionResolutionError as error:
        if not isinstance(error.__cause__, HfHubHTTPError):  # a Hub that answers with an error may soon do better
            raise OSError(
                f"There is no such folder, it is not in the cache, and the Hub cannot be reached ({error.__cause__}). "
                f"Give the path of a folder, or fetch it while there is a network (hf download {source}): it then "
                "opens from the cache, at once with HF_HUB_OFFLINE=1."
            ) from error
    except (HTTPError, ValueError):  # the loader says what the Hub says
        pass


def has_tokenizer(source: str) -> bool:
    """Whether a tokenizer lies beside the weights. AutoTokenizer makes up one of five words for a BERT without one, so
    it cannot be asked."""
    files = ("tokenizer.json", "vocab.txt")
    return any(cached_file(source, name, _raise_exceptions_for_missing_entries=False) for name in files)
