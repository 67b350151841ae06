#!/usr/bin/env python
"""Prints the cosine similarity of every pair of sentences, by the embeddings of a model.

    sentence_similarity.py path/to/scratchbert
    sentence_similarity.py path/to/scratchbert "Dogs bark." "The dog is barking." "Interest rates rose."

The checkpoint is opened by the Auto classes; its code runs only with --trust_remote_code. The embedding of a sentence
is the mean of the last hidden states of its non-padding tokens, scaled to length 1, as all-MiniLM-L6-v2 was trained.

Exit code: 0; 1 if, among the default sentences, an unrelated pair is as similar as a paraphrase; 2 bad usage, or a
checkpoint that cannot be opened, or only with the package despite --without_package.
"""

import inspect
import sys

from toolkit.cli import CommandError, Parser, about, table

PACKAGE = "modeling_scratchbert"

# Three paraphrases about three unrelated subjects.
PARAPHRASES = [
    ("A man is playing a guitar.", "Someone is strumming a guitar."),
    ("How do I reset my password?", "I forgot my password, how can I change it?"),
    ("The company's profits fell last year.", "Last year the firm earned less money."),
]


def block_package() -> None:
    """Hides the package from this process. The code beside the weights is not hidden: its modules are named
    `transformers_modules.…`.

    Raises:
        RuntimeError: it has been imported.
    """
    if PACKAGE in sys.modules:
        raise RuntimeError(f"{PACKAGE} has been imported already, so it cannot be hidden.")
    sys.modules[PACKAGE] = None  # an import then raises ModuleNotFoundError


def open_checkpoint(source: str, without_package: bool, trust_remote_code: bool):
    """The tokenizer and the model. Prints where the model's class is defined.

    Raises:
        OSError: there is no such checkpoint, or a file of it cannot be read.
        ValueError: it has code that is not trusted.
        RuntimeError: `without_package`, and the class is not from the code beside the weights.
    """
    import torch
    from transformers import AutoModel

    from toolkit.hub import check_source, open_tokenizer

    check_source(source, trust_remote_code)
    model = AutoModel.from_pretrained(source, trust_remote_code=trust_remote_code, dtype=torch.float32).eval()
    if model.config.model_type == "scratchbert":  # a BERT does not have the setting
        model.config.padding_free = True
    name, module = type(model).__name__, type(model).__module__
    print(f"{source} opens as {name}, defined in {inspect.getfile(type(model))}")
    if without_package:
        if not module.startswith("transformers_modules."):
            raise RuntimeError(f"{name} comes from {module}, not from code beside the weights.")
        print(f"The package {PACKAGE} is hidden from this process: the checkpoint's own code was enough.")
    return open_tokenizer(source, trust_remote_code=trust_remote_code), model


def embed(sentences: list[str], tokenizer, model):
    """The embeddings, `(N, C)`, each of length 1."""
    import torch

    batch = tokenizer(
        sentences, padding=True, truncation=True, max_length=model.config.max_position_embeddings, return_tensors="pt"
    )
    with torch.inference_mode():
        states = model(**batch).last_hidden_state  # (N, T, C)
    weights = batch["attention_mask"][..., None].to(states.dtype)
    return torch.nn.functional.normalize((states * weights).sum(dim=1) / weights.sum(dim=1))


def triangle(sentences: list[str], similarities) -> str:
    """The sentences with their numbers, and the similarities below the diagonal."""
    rows = [["", *(str(i) for i in range(1, len(sentences) + 1))]]
    for i, (sentence, values) in enumerate(zip(sentences, similarities.tolist(), strict=True), 1):
        rows.append([f"{i:2}  {sentence}", *(f"{value:.2f}" if j < i else "" for j, value in enumerate(values))])
    return table(rows)


def makes_sense(similarities) -> bool:
    """Whether each default sentence is more similar to its paraphrase than any two unrelated ones are. Prints both
    bounds."""
    import torch

    pair = torch.arange(len(similarities)) // 2
    same = pair[:, None] == pair
    lowest, highest = similarities[same].min(), similarities[~same].max()
    print(f"\nparaphrases (1 and 2, 3 and 4, 5 and 6): at least {lowest:.2f}; all others: at most {highest:.2f}")
    return bool(lowest > highest)  # False if either is NaN


def make_parser() -> Parser:
    parser = Parser(__file__, __doc__, usage="%(prog)s MODEL [SENTENCE …] [--FLAG VALUE …]")
    parser.add_argument("folder", metavar="MODEL", help="a checkpoint with a tokenizer: a folder or a hub id")
    parser.add_argument("sentences", metavar="SENTENCE", nargs="*", help="two or more; default: six of our own")
    model = parser.group("model")
    model.add_argument(
        "--trust_remote_code",
        action="store_true",
        help=f"run the code in the folder of the model; needed only if it is not what {PACKAGE} saves",
    )
    model.add_argument(
        "--without_package",
        action="store_true",
        help=f"hide the package {PACKAGE}: shows that the folder alone is enough; requires --trust_remote_code",
    )
    return parser


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code."""
    parser = make_parser()
    args = parser.parse_args(argv)
    if len(args.sentences) == 1:
        parser.error("one sentence is given; expected two or more, or none for the default ones")
    if args.without_package and not args.trust_remote_code:
        parser.error(
            "--without_package is given without --trust_remote_code; expected both, because the code in the "
            "folder then opens the model"
        )

    def work() -> None:
        if args.without_package:
            block_package()
        with about(args.folder):
            tokenizer, model = open_checkpoint(args.folder, args.without_package, args.trust_remote_code)
            sentences = args.sentences or [sentence for pair in PARAPHRASES for sentence in pair]
            embeddings = embed(sentences, tokenizer, model)
        similarities = embeddings @ embeddings.T
        print(f"\n{triangle(sentences, similarities)}")
        if not args.sentences and not makes_sense(similarities):
            raise CommandError("an unrelated pair is as similar as a paraphrase", exit_code=1)

    return parser.run(work, expected=(RuntimeError,), is_silent=True)


if __name__ == "__main__":
    sys.exit(main())
