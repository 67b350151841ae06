"""A tokenizer of BERT's kind with a few words, for the commands that read and write text."""

from tokenizers import Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import WordPiece
from transformers import PreTrainedTokenizerFast

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
PAD, UNK, CLS, SEP = range(4)
WORDS = [
    "the",
    "a",
    "dog",
    "cat",
    "bird",
    "house",
    "tree",
    "sees",
    "walk",
    "##ing",
    "##s",
    "it",
    "'",
    "s",
    "don",
    "t",
    ".",
    ",",
    "red",
    "blue",
    "old",
    "new",
    "and",
    "but",
    "runs",
    "sleeps",
    "under",
    "over",
    "big",
    "small",
    "abcdef",  # what transformers looks at a tokenizer with before it looks for stop strings
]


def make_tokenizer(words=WORDS, **options) -> PreTrainedTokenizerFast:
    """BERT's kind, with few words."""
    ids = {word: number for number, word in enumerate(SPECIAL + words)}
    tokenizer = Tokenizer(WordPiece(ids, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", CLS), ("[SEP]", SEP)]
    )
    tokenizer.decoder = decoders.WordPiece()
    names = {f"{name.strip('[]').lower()}_token": name for name in SPECIAL}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names, **options)
