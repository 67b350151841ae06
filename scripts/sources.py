"""What the scripts ask of a checkpoint's name and files. It does without this project's package, which
sentence_similarity puts out of its own reach."""

from pathlib import Path

from huggingface_hub import HfApi
from huggingface_hub.errors import HfHubHTTPError, HTTPError, LocalEntryNotFoundError, RevisionResolutionError
from transformers.utils import cached_file


def looks_like_a_path(source: str) -> bool:
    """Whether `source` can only be a folder, and no hub id."""
    return source.startswith((".", "/", "~")) or source.count("/") > 1


def check_source(source: str) -> None:
    """Raises OSError if `source` is a path without a folder, or a hub id that neither Hub nor cache can be asked for.
    It tells at once, where a loader tries again for half a minute."""
    if Path(source).is_dir():
        return
    if looks_like_a_path(source) or Path(source).exists():
        raise OSError("There is no such folder.")
    try:
        HfApi().resolve_revision(source)
    except (HfHubHTTPError, ValueError):  # the loader says what the Hub says
        pass
    except (RevisionResolutionError, HTTPError) as error:  # the second is a proxy's
        if not isinstance(error.__cause__, HfHubHTTPError):  # a Hub that answers with an error may soon do better
            raise OSError(f"There is no such folder, and {out_of_reach(source, error)}") from error


def out_of_reach(source: str, error: Exception) -> str:
    """What is the matter where the Hub cannot be asked, and what to do."""
    return (
        f"it is not in the cache, or not all of it, and the Hub cannot be reached ({error.__cause__ or error}). Give "
        f"the path of a folder, or fetch it while there is a network (hf download {source}): it then opens from the "
        "cache, at once with HF_HUB_OFFLINE=1."
    )


def has_tokenizer(source: str) -> bool:
    """Whether a tokenizer lies beside the weights. AutoTokenizer makes up one of five words for a BERT without one, so
    it cannot be asked.

    Raises:
        OSError: none is in the cache, and the Hub cannot be asked for one.
    """
    files = ("tokenizer.json", "vocab.txt")
    if any(cached_file(source, name, _raise_exceptions_for_missing_entries=False) for name in files):
        return True
    for name in files:
        try:
            cached_file(source, name)
        except OSError as error:
            if isinstance(error.__cause__, LocalEntryNotFoundError):
                raise OSError(f"Of its tokenizer: {out_of_reach(source, error.__cause__)}") from error
    return False
