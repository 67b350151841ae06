"""Checkpoints on the Hub, in the cache or in a folder: whether they can be reached, and opening their tokenizer.

Nothing here imports `modeling_scratchbert`: with --trust_remote_code, checkpoints open with their own code.
"""

from contextlib import suppress
from pathlib import Path

from huggingface_hub import HfApi
from huggingface_hub.errors import HfHubHTTPError, HTTPError, LocalEntryNotFoundError, RevisionResolutionError
from transformers import AutoTokenizer, PreTrainedConfig
from transformers.utils import cached_file

from toolkit.trust import FLAG, check_code

TOKENIZER_FILES = ("tokenizer.json", "vocab.txt")


def check_source(source: str, trust_remote_code: bool | None = None) -> None:
    """Checks that `source` can be reached, and holds no code from elsewhere. Every command calls this before it opens
    a checkpoint.

    Args:
        trust_remote_code: the command's flag, with which code from elsewhere is accepted; None: it has no such flag.

    Raises:
        OSError: as `check_reachable`.
        ValueError, ImportError: as `check_code`.
    """
    check_reachable(source)
    if trust_remote_code is None:
        check_code(source, "Remove it if the model computes the same without it")
    elif not trust_remote_code:
        check_code(source, f"If you trust it, {FLAG} runs it")


def check_reachable(source: str) -> None:
    """Checks that `source` is a folder or a hub id that the Hub or the cache has. Fails at once, where a loader would
    retry for half a minute.

    Raises:
        OSError: it is neither.
    """
    if Path(source).is_dir():
        return
    looks_like_a_path = source.startswith((".", "/", "~")) or source.count("/") > 1
    if looks_like_a_path or Path(source).exists():
        raise OSError("There is no such folder.")
    try:
        HfApi().resolve_revision(source)
    except (HfHubHTTPError, ValueError):  # the loader reports the Hub's answer
        pass
    except (RevisionResolutionError, HTTPError) as error:  # the second comes from a proxy
        if not isinstance(error.__cause__, HfHubHTTPError):  # an error status may be temporary: the loader retries
            raise OSError(f"There is no such folder, and {out_of_reach(source, error)}") from error


def out_of_reach(source: str, error: Exception) -> str:
    """Says that the Hub cannot be reached, and what to do."""
    return (
        f"it is not completely in the cache, and the Hub cannot be reached ({error.__cause__ or error}). Give the "
        f"path of a folder, or run `hf download {source}` where there is a network: it then opens from the cache, "
        "at once with HF_HUB_OFFLINE=1."
    )


def read_config(source: str) -> dict:
    """The fields of the config.json of a checkpoint.

    Raises:
        OSError: there is none, or it is not a JSON object with fields.
    """
    with suppress(AttributeError, TypeError):  # transformers expects an object of JSON
        fields, _ = PreTrainedConfig.get_config_dict(source)
        if isinstance(fields, dict) and fields:
            return fields
    raise OSError(
        "It has no config.json with the fields of a model; expected the folder of a saved model. A training saves its "
        "model at the end: resume one that was interrupted."
    )


def has_tokenizer(source: str) -> bool:
    """Whether the checkpoint has a tokenizer. For a BERT without one, AutoTokenizer returns one of five words.

    Raises:
        OSError: none is in the cache, and the Hub cannot be reached.
    """
    if any(cached_file(source, name, _raise_exceptions_for_missing_entries=False) for name in TOKENIZER_FILES):
        return True
    for name in TOKENIZER_FILES:
        try:
            cached_file(source, name)
        except OSError as error:
            if isinstance(error.__cause__, LocalEntryNotFoundError):
                raise OSError(f"Its tokenizer cannot be opened: {out_of_reach(source, error.__cause__)}") from error
    return False


def open_tokenizer(source: str, trust_remote_code: bool = False):
    """The tokenizer of a checkpoint, opened by `AutoTokenizer`. Nobody is asked whether code may run.

    Raises:
        OSError: it has none.
    """
    if not has_tokenizer(source):
        raise OSError(
            f"It has no tokenizer: neither {' nor '.join(TOKENIZER_FILES)}. Save the model's tokenizer there."
        )
    return AutoTokenizer.from_pretrained(source, trust_remote_code=trust_remote_code)


def check_vocabulary(tokens: int, config) -> None:
    """Raises ValueError if the tokenizer has more tokens than the model."""
    if tokens > config.vocab_size:
        raise ValueError(f"the tokenizer has {tokens:,} tokens; expected at most vocab_size, {config.vocab_size:,}")
