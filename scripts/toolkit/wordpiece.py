"""Training of WordPiece tokenizers: BERT's, and one for symbols that are separated by spaces."""

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from itertools import chain, islice
from pathlib import Path

from tokenizers import Tokenizer, decoders, pre_tokenizers, processors
from tokenizers.models import WordPiece
from tokenizers.trainers import WordPieceTrainer
from transformers import BertTokenizer, PreTrainedTokenizerFast

from toolkit.inputs import Source, Warn
from toolkit.row_files import find_column, text_of

# In the order of their ids, 0 to 4. Google's files have them at 0 and 100 to 103, after unused tokens.
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
PIECE = "##"  # the prefix of tokens that continue a word

# The number of texts that the report is computed on.
MEASURED = 10_000

Texts = Callable[[], Iterator[str]]  # returns an iterator from the first text on


class Corpus:
    """The texts of files, read from the files each time.

    Args:
        columns: the columns of the texts, each a text of its own; None: "text".
        on_bad_row: "stop" or "skip". Skipped rows are listed at the first reading.
        held_out: keep every N-th row out of the training; 0: none.
        warn: is called with the list of skipped rows.

    Raises:
        OSError, ValueError: as `Source.rows`, or a column is missing.
    """

    def __init__(self, source: Source, columns: list[str] | None, on_bad_row: str, held_out: int, warn: Warn):
        columns_in_files = source.columns()
        self.source, self.on_bad_row, self.held_out = source, on_bad_row, held_out
        self.columns = [find_column(columns_in_files, column, ["text"], "the texts") for column in columns or [None]]
        self.warn = warn

    def texts(self, held_out: bool = False) -> Iterator[str]:
        """The texts of the rows to train on, or of those that are held out."""

        def texts_of(row: dict) -> dict[str, list[str]]:
            return {"texts": [text_of(row, column) for column in self.columns]}

        warn, self.warn = self.warn, lambda message: None
        for number, row in enumerate(self.source.valid_rows(texts_of, self.on_bad_row, warn), 1):
            if held_out == (self.held_out > 0 and number % self.held_out == 0):
                yield from row["texts"]


def train_bert(
    texts: Texts,
    vocab_size: int,
    min_frequency: int,
    limit_alphabet: int,
    cased: bool,
    strip_accents: bool | None,
    model_max_length: int,
) -> BertTokenizer:
    """Trains the WordPiece of a BertTokenizer, in two passes over the texts.

    The library numbers characters in the order of a hash table, which differs between processes, and these numbers
    decide between equally frequent pairs. Here characters are counted first and numbered in Unicode order, so that the
    result is deterministic.

    Args:
        vocab_size: the maximum number of tokens.
        min_frequency: pairs that occur less often are not merged.
        limit_alphabet: the maximum number of characters, the most frequent ones.
        cased: keep upper case.
        strip_accents: None: unless `cased`, as in BERT.

    Raises:
        ValueError: there are more characters than `vocab_size`, or none.
    """
    settings = {"do_lower_case": not cased, "strip_accents": strip_accents, "model_max_length": model_max_length}
    backend = BertTokenizer(**settings).backend_tokenizer
    pieces = alphabet(
        (
            word
            for text in texts()
            for word, _ in backend.pre_tokenizer.pre_tokenize_str(backend.normalizer.normalize_str(text))
        ),
        limit_alphabet,
    )
    if not pieces:
        raise ValueError("there is no text to train on, only spaces and control characters")
    check_size(vocab_size, len(pieces), f"{len(pieces):,} characters, at the beginning of a word and within")
    letters = [piece for piece in pieces if not piece.startswith(PIECE) or piece == PIECE[0]]
    # Special tokens are the only way to number "##a" as well. The tokens are special for the trainer only.
    trainer = WordPieceTrainer(
        vocab_size=vocab_size,
        min_frequency=min_frequency,
        initial_alphabet=letters,
        limit_alphabet=len(letters),
        special_tokens=SPECIAL + pieces,
        show_progress=sys.stderr.isatty(),
    )
    backend.train_from_iterator(texts(), trainer)
    return BertTokenizer(vocab=backend.get_vocab(), **settings)


def alphabet(words: Iterable[str], limit: int) -> list[str]:
    """The pieces of one character that spell these words: each character, in Unicode order, followed by those within a
    word, with ## before them; at most `limit` characters, the most frequent ones."""
    first, later = Counter(), Counter()
    for word in words:
        first[word[0]] += 1
        later.update(word[1:])
    both = first + later
    kept = sorted(sorted(both, key=lambda character: (-both[character], character))[:limit])
    return kept + [PIECE + character for character in kept if character in later]


def check_size(vocab_size: int, tokens: int, description: str) -> None:
    """Raises ValueError unless the special tokens and so many others fit into the vocabulary."""
    if vocab_size < len(SPECIAL) + tokens:
        raise ValueError(
            f"--vocab_size is {vocab_size:,}; expected at least {len(SPECIAL) + tokens:,}, "
            f"for {len(SPECIAL)} special tokens and {description}"
        )


def train_symbols(
    texts: Texts, vocab_size: int, min_frequency: int, limit_alphabet: int, model_max_length: int
) -> PreTrainedTokenizerFast:
    """Makes a tokenizer of symbols that are separated by spaces: frequent ones are tokens, the rest is spelt. It is a
    WordPiece without merges. All rare symbols are in memory at once.

    Args:
        min_frequency: symbols that occur at least this often are tokens.
        limit_alphabet: the maximum number of characters to spell the others with, the most frequent ones.

    Raises:
        ValueError: these are more than `vocab_size`, or the texts are blank.
    """
    seen = Counter(symbol for text in texts() for symbol in text.split())
    if not seen:
        raise ValueError("there is no text to train on, only spaces")
    whole = sorted((symbol for symbol in seen if seen[symbol] >= min_frequency), key=lambda one: (-seen[one], one))
    pieces = alphabet((symbol for symbol in seen.elements() if seen[symbol] < min_frequency), limit_alphabet)
    parts = f"{len(whole):,} symbols and {len(pieces):,} characters to spell the rarer ones with"
    check_size(vocab_size, len(whole) + len(pieces), parts)
    vocabulary = {token: i for i, token in enumerate(dict.fromkeys(SPECIAL + whole + pieces))}
    backend = Tokenizer(WordPiece(vocabulary, unk_token="[UNK]", max_input_chars_per_word=max(map(len, seen))))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.decoder = decoders.WordPiece(PIECE, cleanup=False)
    special = [(token, vocabulary[token]) for token in ("[CLS]", "[SEP]")]
    backend.post_processor = processors.TemplateProcessing("[CLS] $A [SEP]", "[CLS] $A [SEP] $B:1 [SEP]:1", special)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        model_max_length=model_max_length,
        model_input_names=BertTokenizer.model_input_names,
        **{f"{token[1:-1].lower()}_token": token for token in SPECIAL},
    )


def print_report(tokenizer, corpus: Corpus, output: Path) -> None:
    """Prints the number of words (separated by spaces), of tokens without [CLS] and [SEP], and of [UNK] among these,
    and an example, for the first texts that were held out, or else for the first of all."""
    held_out = list(islice(corpus.texts(held_out=True), MEASURED))
    texts = held_out or list(islice(corpus.texts(), MEASURED))
    ids = Counter(chain.from_iterable(tokenizer(texts, add_special_tokens=False)["input_ids"]))
    words, tokens = sum(len(text.split()) for text in texts), ids.total()
    print(f"{output}: {len(tokenizer):,} tokens")
    print(f"on {len(texts):,} texts that were {'held out' if held_out else 'trained on'}, with {words:,} words:")
    if tokens:
        print(f"  {tokens / words:.2f} tokens per word, {ids[tokenizer.unk_token_id] / tokens:.2%} of them [UNK]")
    sample = tokenizer.tokenize(texts[0])
    print(f"  {' '.join(sample[:40])}{' …' if len(sample) > 40 else ''}")


def save(tokenizer, folder: Path) -> None:
    """Writes the tokenizer's files."""
    tokenizer.save_pretrained(folder)
    if isinstance(tokenizer, BertTokenizer):
        tokenizer.backend_tokenizer.model.save(str(folder))  # vocab.txt
