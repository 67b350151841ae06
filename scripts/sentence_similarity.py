#!/usr/bin/env python
"""How alike are these sentences? Opens a checkpoint as anybody would, through the Auto classes and the code that lies
beside the weights, and prints the cosine similarity of every pair.

    sentence_similarity.py path/to/scratchbert
    sentence_similarity.py path/to/scratchbert "Dogs bark." "The dog is barking." "Interest rates rose."

A sentence's embedding is the mean of its tokens' last hidden states, padding left out, scaled to length 1: that is how
all-MiniLM-L6-v2 and its kin were trained.

Exit code: 0; 1 if, among the default sentences, an unrelated pair is as close as a paraphrase; 2 bad usage, or a
checkpoint that cannot be opened, or not in the way that --without-package demands.
"""

import argparse
import importlib
import inspect
import logging
import sys

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoModel, AutoTokenizer

from sources import check_source, has_tokenizer

PACKAGE = "modeling_scratchbert"

# Each pair says one thing in two ways, in other words as far as that goes; no two pairs have a subject in common.
PARAPHRASES = [
    ("A man is playing a guitar.", "Someone is strumming a guitar."),
    ("How do I reset my password?", "I forgot my password, how can I change it?"),
    ("The company's profits fell last year.", "Last year the firm earned less money."),
]


class PackageOutOfReach:
    """A finder that stands before all others, and says of one package, however it is installed, that there is none.

    The code beside the weights is not caught: its modules have names of their own, under `transformers_modules`.
    """

    def find_spec(self, name, path=None, target=None):
        """Raises ImportError for the package and whatever is in it; leaves all else to the other finders."""
        if name.split(".")[0] == PACKAGE:
            raise ModuleNotFoundError(f"{name} is out of reach (--without-package)", name=name)


def block_package() -> None:
    """Puts the package out of this process's reach.

    Raises:
        RuntimeError: it is imported already, or can be imported still.
    """
    if PACKAGE in sys.modules:
        raise RuntimeError(f"{PACKAGE} is imported already, so nothing can be shown of a process without it.")
    sys.meta_path.insert(0, PackageOutOfReach())
    try:
        importlib.import_module(PACKAGE)
    except ModuleNotFoundError:
        return
    raise RuntimeError(f"{PACKAGE} can be imported all the same.")


def open_checkpoint(source: str, without_package: bool):
    """The tokenizer and the model, and on the way a line on where the model's class comes from.

    Raises:
        OSError: there is no such checkpoint, or a file of it cannot be read.
        RuntimeError: `without_package`, and the class is not from the code beside the weights.
    """
    check_source(source)
    model = AutoModel.from_pretrained(source, trust_remote_code=True, dtype=torch.float32).eval()
    name, module = type(model).__name__, type(model).__module__
    print(f"{source} opens as {name}, defined in {inspect.getfile(type(model))}")
    if without_package:
        if not module.startswith("transformers_modules."):
            raise RuntimeError(f"{name} comes from {module}, not from code beside the weights.")
        if PACKAGE in sys.modules:
            raise RuntimeError(f"The code beside the weights imported {PACKAGE}.")
        print(f"The package {PACKAGE} is out of this process's reach: the checkpoint's own code was enough.")
    if not has_tokenizer(source):
        raise OSError("It has no tokenizer: neither tokenizer.json nor vocab.txt.")
    return AutoTokenizer.from_pretrained(source, trust_remote_code=True), model


@torch.inference_mode()
def embed(sentences: list[str], tokenizer, model) -> torch.Tensor:
    """`(N, C)`, each row of length 1."""
    batch = tokenizer(sentences, padding=True, truncation=True, max_length=model.config.max_position_embeddings,
                      return_tensors="pt")  # fmt: skip
    states = model(**batch).last_hidden_state  # (N, T, C)
    weights = batch["attention_mask"][..., None].to(states.dtype)
    return torch.nn.functional.normalize((states * weights).sum(dim=1) / weights.sum(dim=1))


def table(sentences: list[str], similarities: torch.Tensor) -> str:
    """The sentences with their numbers, and below the diagonal how alike each two are."""
    width = max(map(len, sentences))
    lines = [" " * (width + 4) + "".join(f"{i + 1:>7}" for i in range(len(sentences)))]
    for i, sentence in enumerate(sentences):
        row = "".join(f"{value:7.2f}" for value in similarities[i, : i + 1].tolist())
        lines.append(f"{i + 1:>2}  {sentence:<{width}}{row}")
    return "\n".join(lines)


def makes_sense(similarities: torch.Tensor) -> bool:
    """Whether each default sentence is closer to its paraphrase than any two unrelated ones are to each other."""
    pair = torch.arange(len(similarities)) // 2
    paraphrase = (pair[:, None] == pair[None, :]).fill_diagonal_(False)
    lowest, highest = similarities[paraphrase].min(), similarities[pair[:, None] != pair[None, :]].max()
    print(f"\nparaphrases (1 and 2, 3 and 4, 5 and 6): {lowest:.2f} and more; all others: {highest:.2f} and less")
    return bool(lowest > highest)  # False too where either is not a number


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", metavar="FOLDER", help="a checkpoint with a tokenizer: a folder or a hub id")
    parser.add_argument("sentences", metavar="sentence", nargs="*", help="two or more (default: six of our own)")
    parser.add_argument(
        "--without-package",
        action="store_true",
        help=f"put the package {PACKAGE} out of reach first: shows that the folder alone is enough",
    )
    args = parser.parse_args(argv)
    if len(args.sentences) == 1:
        parser.error("one sentence alone is like no other: give two or more, or none for the default ones")
    # Retries, load reports and the like: what matters of them comes back as an error.
    logging.disable(logging.WARNING)
    transformers.logging.disable_progress_bar()
    try:
        if args.without_package:
            block_package()
        tokenizer, model = open_checkpoint(args.folder, args.without_package)
        sentences = args.sentences or [sentence for pair in PARAPHRASES for sentence in pair]
        embeddings = embed(sentences, tokenizer, model)
    except (OSError, ValueError, RuntimeError, ImportError, StrictDataclassError) as error:
        print(f"sentence_similarity: {args.folder}: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    similarities = embeddings @ embeddings.T
    print(f"\n{table(sentences, similarities)}")
    if args.sentences or makes_sense(similarities):
        return 0
    print("sentence_similarity: an unrelated pair scores as high as a paraphrase", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
