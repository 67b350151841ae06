"""scripts/train_tokenizer.py: what it trains is BERT's tokenizer, the same each time, and nothing is half-written."""

import gzip
import json
import os
import re
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer, BertTokenizer, TokenizersBackend
from transformers.models.bert.tokenization_bert_legacy import BertTokenizerLegacy

import train_tokenizer
from support.folders import SCRIPTS
from toolkit import wordpiece
from toolkit.inputs import Source, open_files

pytestmark = pytest.mark.usefixtures("quiet_only_here")

REVIEWS = SCRIPTS / "data" / "movie_reviews" / "validation.csv"
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]


def train(file, output, *options) -> int:
    return train_tokenizer.main(["--train_file", str(file), "--output", str(output), *map(str, options)])


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def tokens_of(folder: Path) -> list[str]:
    return (folder / "vocab.txt").read_text(encoding="utf-8").split("\n")[:-1]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Folders of tokenizers of the reviews: `uncased`, `cased`, and `plain`, of lower case with accents."""
    folder = tmp_path_factory.mktemp("tokenizers")
    for name, options in (("uncased", ()), ("cased", ("--cased",)), ("plain", ("--accents", "keep"))):
        assert train(REVIEWS, folder / name, "--vocab_size", 1500, *options) == 0
    return folder


# ---------------------------------------------------------------------------------------------------- the words of BERT


def test_the_special_tokens_come_first_in_berts_order(trained):
    assert tokens_of(trained / "uncased")[:5] == SPECIAL
    tokenizer = AutoTokenizer.from_pretrained(trained / "uncased")
    assert type(tokenizer) is BertTokenizer
    assert (tokenizer.pad_token_id, tokenizer.unk_token_id, tokenizer.cls_token_id) == (0, 1, 2)
    assert (tokenizer.sep_token_id, tokenizer.mask_token_id) == (3, 4)
    assert sorted(tokenizer.all_special_ids) == [0, 1, 2, 3, 4]
    assert tokenizer.model_max_length == 512


def test_the_three_files_have_the_same_vocabulary(trained):
    folder = trained / "uncased"
    assert sorted(os.listdir(folder)) == ["tokenizer.json", "tokenizer_config.json", "vocab.txt"]
    tokens = tokens_of(folder)
    ids = {token: i for i, token in enumerate(tokens)}
    assert len(tokens) == len(ids) == 1500
    assert AutoTokenizer.from_pretrained(folder).get_vocab() == ids
    assert json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))["model"]["vocab"] == ids


def test_all_texts_are_spelt_and_frequent_words_are_whole(trained, reviews):
    tokenizer = AutoTokenizer.from_pretrained(trained / "uncased")
    texts = [row["text"] for row in reviews]
    words = Counter(word for text in texts for word in re.findall(r"[a-z]+", text.lower()))
    assert {word for word, _ in words.most_common(20)} <= set(tokens_of(trained / "uncased"))
    assert tokenizer.unk_token_id not in {i for row in tokenizer(texts)["input_ids"] for i in row}


def test_pairs_are_encoded_as_berts(trained):
    tokenizer = AutoTokenizer.from_pretrained(trained / "uncased")
    encoded = tokenizer("the film", "it is")
    assert tokenizer.convert_ids_to_tokens(encoded["input_ids"]) == [
        "[CLS]",
        "the",
        "film",
        "[SEP]",
        "it",
        "is",
        "[SEP]",
    ]
    assert encoded["token_type_ids"] == [0, 0, 0, 0, 1, 1, 1]


TEXTS = st.text(st.characters(exclude_categories=["Cs"])) | st.text("aeinrst éÉÄß.,'-\n中[]#A", max_size=40)
REFERENCES = {
    "uncased": {"do_lower_case": True},
    "cased": {"do_lower_case": False},
    "plain": {"do_lower_case": True, "strip_accents": False},
}


@pytest.mark.parametrize("name", REFERENCES)
def test_the_vocabulary_file_gives_the_same_ids_in_transformers_tokenizer(name, trained):
    """Opened from vocab.txt alone, with the settings said by hand."""
    ours = AutoTokenizer.from_pretrained(trained / name)
    reference = BertTokenizer(vocab=str(trained / name / "vocab.txt"), **REFERENCES[name])

    @settings(max_examples=200, suppress_health_check=list(HealthCheck))
    @given(TEXTS, TEXTS)
    def check(one, other):
        assert ours(one, other).data == reference(one, other).data

    check()


@pytest.mark.parametrize("name", REFERENCES)
def test_berts_own_algorithm_in_python_finds_the_same_tokens(name, trained, reviews):
    """Google's, which transformers keeps as legacy code: another implementation than that of `tokenizers`."""
    ours = AutoTokenizer.from_pretrained(trained / name)
    reference = BertTokenizerLegacy(str(trained / name / "vocab.txt"), **REFERENCES[name])
    texts = [row["text"] for row in reviews] + [
        "Ein Café in Zürich: ÀÉ!",
        "das 中文 dazwischen",
        "don't re-enter",
        "\t a\nb",
    ]
    for text in texts:
        assert ours.tokenize(text) == reference.tokenize(text)


def test_case_and_accents_are_as_asked(tmp_path, capsys):
    text = write(tmp_path / "text.txt", "Été été Über\n" * 3)
    expected = {
        (): ["ete", "ete", "uber"],
        ("--cased",): ["Été", "été", "Über"],
        ("--accents", "keep"): ["été", "été", "über"],
        ("--cased", "--accents", "strip"): ["Ete", "ete", "Uber"],
    }
    for i, (options, tokens) in enumerate(expected.items()):
        assert train(text, tmp_path / str(i), *options) == 0
        assert AutoTokenizer.from_pretrained(tmp_path / str(i)).tokenize("Été été Über") == tokens


def test_unknown_characters_are_unknown(trained):
    tokenizer = AutoTokenizer.from_pretrained(trained / "uncased")
    assert tokenizer.tokenize("the ☃ film") == ["the", "[UNK]", "film"]


def test_the_rarest_characters_are_left_out(tmp_path):
    """Of é and ü, once each, the one that is first in Unicode stays. The vocabulary has room for all the others, just
    so."""
    text = write(tmp_path / "text.txt", "abab ü é\n")
    options = ("--limit_alphabet", 3, "--vocab_size", 10, "--accents", "keep", "--held_out", 0)
    assert train(text, tmp_path / "out", *options) == 0
    assert tokens_of(tmp_path / "out") == [*SPECIAL, "a", "b", "é", "##a", "##b"]


def test_texts_come_back(trained):
    tokenizer = AutoTokenizer.from_pretrained(trained / "uncased")
    text = "an unusually gripping film about the making of a forgettable movie."
    assert tokenizer.decode(tokenizer(text)["input_ids"], skip_special_tokens=True) == text


def test_pieces_are_joined_by_frequency(tmp_path):
    """By hand: "ab" 4 times and "abc" 3 times make ab, the pair of 7, and then abc; "xy", once, stays in pieces."""
    text = write(tmp_path / "text.txt", "ab ab ab ab abc abc abc xy\n")
    assert train(text, tmp_path / "out", "--held_out", 0) == 0
    assert tokens_of(tmp_path / "out") == [
        *SPECIAL,
        "a",
        "b",
        "c",
        "x",
        "y",
        "##b",
        "##c",
        "##y",
        "ab",
        "abc",
    ]


def test_the_same_text_gives_the_same_bytes(trained, tmp_path):
    """The library by itself does not do so: each of its hash tables has another order."""
    assert train(REVIEWS, tmp_path / "out", "--vocab_size", 1500) == 0
    for name in ("tokenizer.json", "tokenizer_config.json", "vocab.txt"):
        assert (tmp_path / "out" / name).read_bytes() == (trained / "uncased" / name).read_bytes()


def test_hash_signs_in_the_text_are_no_pieces(tmp_path):
    text = write(tmp_path / "text.txt", "a # ## c#d\n" * 2)
    assert train(text, tmp_path / "out", "--held_out", 0) == 0
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer.tokenize("c#d ##") == ["c", "#", "d", "#", "#"]


# -------------------------------------------------------------------------------------------------------------- symbols

SPOKEN = "word,phonemes\nhello,HH AH L OW\nyellow,Y EH L OW\nhole,HH OW L\n"


@pytest.fixture
def spoken(tmp_path):
    """The folder of a tokenizer of letters and phonemes, of which L and OW are seen three times, HH twice."""
    options = ("--column", "word", "phonemes", "--pre_split", "whitespace", "--held_out", 0)
    assert train(write(tmp_path / "spoken.csv", SPOKEN), tmp_path / "spoken", *options) == 0
    return tmp_path / "spoken"


def test_symbols_are_whole_and_rare_ones_are_spelt(spoken):
    tokenizer = AutoTokenizer.from_pretrained(spoken)
    assert isinstance(tokenizer, TokenizersBackend)
    # AH, EH and Y are seen once, as are the words. In what is seen once no h stands within.
    letters = ["A", "E", "H", "Y", "e", "h", "l", "o", "w", "y"]
    within = ["##H", "##e", "##l", "##o", "##w"]
    ids = tokenizer.get_vocab()
    assert sorted(ids, key=ids.get) == [*SPECIAL, "L", "OW", "HH", *letters, *within]
    assert tokenizer.tokenize("HH OW L") == ["HH", "OW", "L"]
    assert tokenizer.tokenize("hello") == ["h", "##e", "##l", "##l", "##o"]
    assert tokenizer.tokenize("EH hh OWL") == ["E", "##H", "[UNK]", "[UNK]"]
    assert not (spoken / "vocab.txt").exists()


def test_symbols_come_back_as_they_were(spoken):
    tokenizer = AutoTokenizer.from_pretrained(spoken)
    for text in ("HH AH L OW", "hello", "L L HH"):
        assert tokenizer.decode(tokenizer(text)["input_ids"], skip_special_tokens=True) == text


def test_symbols_are_encoded_in_pairs_as_berts_are(spoken):
    tokenizer = AutoTokenizer.from_pretrained(spoken)
    encoded = tokenizer("HH L", "OW")
    assert encoded["input_ids"] == [2, 7, 5, 3, 6, 3]
    assert encoded["token_type_ids"] == [0, 0, 0, 0, 1, 1]
    assert encoded["attention_mask"] == [1] * 6
    assert [tokenizer.convert_tokens_to_ids(token) for token in SPECIAL] == [0, 1, 2, 3, 4]
    assert (tokenizer.mask_token, tokenizer.pad_token, tokenizer.model_max_length) == ("[MASK]", "[PAD]", 512)


def test_symbols_with_punctuation_case_and_accents_are_not_touched(tmp_path):
    text = write(tmp_path / "ipa.txt", "t͡ʃ n' É é . ˈa_b\n" * 2)
    assert train(text, tmp_path / "out", "--pre_split", "whitespace", "--held_out", 0) == 0
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    said = "n' . É t͡ʃ é ˈa_b"
    assert tokenizer.tokenize(said) == said.split()
    assert tokenizer.decode(tokenizer(said)["input_ids"], skip_special_tokens=True) == said
    assert len(tokenizer) == 5 + 6


def test_long_symbols_are_whole_too(tmp_path):
    text = write(tmp_path / "text.txt", "a" * 300 + " b\n")
    assert train(text, tmp_path / "out", "--pre_split", "whitespace", "--held_out", 0, "--min_frequency", 1) == 0
    assert AutoTokenizer.from_pretrained(tmp_path / "out").tokenize("a" * 300) == ["a" * 300]


# ---------------------------------------------------------------------------------------------------------------- files


def test_the_format_of_the_file_makes_no_difference(tmp_path):
    texts = ["the cat, the mat", 'a "cat" sat', "the rat"] * 2
    write(tmp_path / "a.txt", "".join(f"{text}\n" for text in texts))
    doubled = [text.replace('"', '""') for text in texts]
    write(tmp_path / "a.csv", "id,body\n" + "".join(f'1,"{text}"\n' for text in doubled))
    write(tmp_path / "a.jsonl", "".join(json.dumps({"body": text}) + "\n" for text in texts))
    vocabularies = []
    for name, options in (("a.txt", ()), ("a.csv", ("--column", "body")), ("a.jsonl", ("--column", "body"))):
        assert train(tmp_path / name, tmp_path / f"of {name}", *options) == 0
        vocabularies.append(tokens_of(tmp_path / f"of {name}"))
    assert "cat" in vocabularies[0]
    assert vocabularies[0] == vocabularies[1] == vocabularies[2]


def test_compressed_files_are_named_by_a_pattern(tmp_path):
    for number, text in ((1, "a boat\n"), (2, "two boats\n")):
        (tmp_path / f"{number}.txt.gz").write_bytes(gzip.compress(text.encode()))
    assert train(tmp_path / "*.txt.gz", tmp_path / "pattern") == 0
    assert train(write(tmp_path / "both.txt", "a boat\ntwo boats\n"), tmp_path / "both") == 0
    assert tokens_of(tmp_path / "pattern") == tokens_of(tmp_path / "both")


def test_every_nth_row_is_held_out_and_measured(tmp_path, capsys):
    """By hand: rows 2 and 4 are "a z" and "a b", with words "a", "a", "b" known and "z" not."""
    text = write(tmp_path / "text.txt", "a b\na z\na b\na b\na b\n")
    assert train(text, tmp_path / "out", "--held_out", 2) == 0
    assert tokens_of(tmp_path / "out") == [*SPECIAL, "a", "b"]
    printed = capsys.readouterr().out
    assert "out: 7 tokens\n" in printed
    assert (
        "on 2 texts that were held out, with 4 words:\n  1.00 tokens per word, 25.00% of them [UNK]\n  a [UNK]\n"
        in printed
    )


def test_few_texts_are_measured_on_themselves(tmp_path, capsys):
    text = write(tmp_path / "text.txt", "ab\nxy\nab\n")
    assert train(text, tmp_path / "out") == 0
    assert "on 3 texts that were trained on, with 3 words:\n  1.33 tokens per word, 0.00% of" in capsys.readouterr().out


def test_texts_are_never_all_in_memory(trained, monkeypatch):
    """Of each pass, no row is asked for before those in front of it are through."""
    corpus = wordpiece.Corpus(Source(open_files([REVIEWS])), None, "stop", 100, print)
    texts = corpus.texts()
    monkeypatch.setattr(wordpiece, "text_of", lambda row, column: pytest.fail("read ahead"))
    with pytest.raises(pytest.fail.Exception, match="read ahead"):
        next(texts)


# --------------------------------------------------------------------------------------------------------------- faults


def test_skipped_rows_are_told_of_once(tmp_path, capsys):
    path = tmp_path / "text.txt"
    path.write_bytes(b"a b\nc \xff d\na b\n")
    assert train(path, tmp_path / "out", "--on_bad_row", "skip") == 0
    assert tokens_of(tmp_path / "out") == [*SPECIAL, "a", "b"]
    assert capsys.readouterr().err.count("1 of 3 rows are invalid and were skipped") == 1


@pytest.mark.parametrize(
    ("content", "options", "message"),
    [
        (None, (), "text.txt: there is no such file"),
        (b"a\nb\xff\n", (), "text.txt, row 2 (line 2): 'text' is not valid UTF-8"),
        (b"", (), "text.txt has no rows"),
        (b" \n\n", (), "text.txt has no rows"),
        (b"\x01\x02\n", (), "there is no text to train on"),
        (b"a b\n", ("--column", "body"), "no column 'body' for the texts; the columns are 'text'"),
        (b"abc abd\n", ("--vocab_size", 11), "--vocab_size is 11; expected at least 12"),
        (b"a b\na b c\n", ("--vocab_size", 7, "--pre_split", "whitespace"), "--vocab_size is 7; expected at least 8"),
        (b"a\n", ("--vocab_size", "0"), "--vocab_size: '0'"),
        (b"a\n", ("--held_out", "-1"), "--held_out: '-1'"),
        (b"a\n", ("--vocab", "9"), "unrecognized arguments: --vocab 9"),
        (b"a\n", ("--accents", "strip", "--pre_split", "whitespace"), "is given with --pre_split whitespace"),
    ],
)
def test_what_cannot_be_done_is_said_in_one_line(content, options, message, tmp_path, capsys):
    path = tmp_path / "text.txt"
    if content is not None:
        path.write_bytes(content)
    try:
        code = train(path, tmp_path / "out", *options)
    except SystemExit as stopped:
        code = stopped.code
    (line,) = capsys.readouterr().err.splitlines()
    assert code == 2
    assert message in line
    assert {path.name for path in tmp_path.iterdir()} <= {"text.txt"}


def test_a_folder_that_is_not_empty_is_left_alone(tmp_path, capsys):
    output = tmp_path / "out"
    output.mkdir()
    text = write(tmp_path / "text.txt", "a b\n")
    assert train(text, output) == 0
    before = (output / "tokenizer.json").read_bytes()
    assert train(write(text, "c d\n"), output) == 2
    assert "out exists already; expected a new or an empty folder" in capsys.readouterr().err
    assert (output / "tokenizer.json").read_bytes() == before
    assert train(text, text) == 2


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError("the disk is full")])
def test_an_interrupted_run_leaves_nothing(error, tmp_path, monkeypatch, capsys):
    def stop(tokenizer, folder):
        (folder / "vocab.txt").write_text("half")
        raise error

    monkeypatch.setattr(wordpiece, "save", stop)
    code = train(write(tmp_path / "text.txt", "a b\n"), tmp_path / "out")
    assert code == (130 if error is KeyboardInterrupt else 2)
    assert capsys.readouterr().err.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["text.txt"]


def test_an_error_while_the_library_trains_is_told(tmp_path, monkeypatch, capsys):
    """A file that changes under it."""
    text, trainer = write(tmp_path / "text.txt", "a b\n"), wordpiece.WordPieceTrainer

    def change_and_train(**options):
        text.write_bytes(b"\xff\n")
        return trainer(**options)

    monkeypatch.setattr(wordpiece, "WordPieceTrainer", change_and_train)
    assert train(text, tmp_path / "out") == 2
    assert "is not valid UTF-8" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["text.txt"]
