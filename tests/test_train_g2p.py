"""scripts/train_g2p.py: the data, the measures, and that a model learns."""

import json

import pytest
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

import train_g2p

pytestmark = pytest.mark.usefixtures("quiet_only_here")


@pytest.fixture(scope="module")
def words():
    return train_g2p.load_words(None, seed=0)


def test_the_dictionary_is_read_whole_but_for_marks_of_stress_and_spellings_with_other_signs(words):
    assert 124_000 < len(words) < 126_000
    assert words["hello"] == [["HH", "AH", "L", "OW"], ["HH", "EH", "L", "OW"]]
    assert ["D", "OW", "N", "T"] in words["don't"]
    assert len({phoneme for ways in words.values() for way in ways for phoneme in way}) == 39
    assert all(len({tuple(way) for way in ways}) == len(ways) for ways in words.values())


def test_no_word_is_in_two_parts_and_the_seed_alone_decides_which(words):
    parts = train_g2p.split(words)
    together = [word for part in parts for word in part]
    assert len(together) == len(set(together)) == len(words)
    assert [round(len(part) / len(words), 3) for part in parts] == [0.94, 0.01, 0.05]
    assert train_g2p.split(train_g2p.load_words(None, seed=0)) == parts
    assert set(train_g2p.split(train_g2p.load_words(None, seed=1))[2]) != set(parts[2])


def test_the_tokenizer_spells_words_and_keeps_phonemes_whole(words):
    tokenizer = train_g2p.make_tokenizer(words)
    assert tokenizer.tokenize("don't") == list("don't")
    assert tokenizer.tokenize("HH AH L OW") == ["HH", "AH", "L", "OW"]
    assert tokenizer.decode(tokenizer("HH AH L OW")["input_ids"], skip_special_tokens=True) == "HH AH L OW"
    assert tokenizer.convert_ids_to_tokens(tokenizer("aß")["input_ids"]) == ["[CLS]", "a", "[UNK]", "[SEP]"]
    example = train_g2p.encode({"be": [["B", "IY"]]}, tokenizer)[0]
    assert tokenizer.convert_ids_to_tokens(example["input_ids"]) == ["[CLS]", "b", "e", "[SEP]"]
    assert tokenizer.convert_ids_to_tokens(example["labels"]) == ["B", "IY", "[SEP]"]


@pytest.mark.parametrize(
    ("said", "ways", "rates"),
    [
        ([["A"]], [[["A"]]], (0.0, 0.0)),
        ([["A", "B"]], [[["A", "C", "D"]]], (2 / 3, 1.0)),  # a substitution and an insertion
        ([[]], [[["A", "C"]]], (1.0, 1.0)),
        ([["A", "B", "C"]], [[["A"]]], (2.0, 1.0)),
        ([["A"], ["B"]], [[["X", "Y", "Z"], ["A"]], [["B", "C"]]], (1 / 3, 0.5)),  # the closest way counts
    ],
)
def test_error_rates_are_edits_per_phoneme_and_wrong_words_per_word(said, ways, rates):
    assert train_g2p.error_rates(said, ways) == pytest.approx(rates)


def test_a_few_hundred_words_are_learnt_by_heart(words):
    """To a loss near zero, after which each is pronounced as the dictionary has it. Words with two ways to say them
    cannot be, so those are left out."""
    one_way = [word for word in words if len(words[word]) == 1]
    some, few = ({word: words[word] for word in one_way[:number]} for number in (300, 2))
    tokenizer = train_g2p.make_tokenizer(words)
    settings = train_g2p.Settings(epochs=80, batch_size=30, learning_rate=4e-3, hidden_size=64, layers=2, dropout=0.0)
    model, curve = train_g2p.train(settings, some, few, tokenizer)
    assert curve[-1]["loss"] < 0.02
    assert train_g2p.pronounce(model, tokenizer, list(some)) == [ways[0] for ways in some.values()]
    assert train_g2p.evaluate(model, tokenizer, some, num_beams=4) == (0.0, 0.0)


def test_the_script_writes_a_model_that_the_auto_classes_open_and_its_numbers(tmp_path, capsys):
    folder = tmp_path / "model"
    arguments = ["--words", "200", "--epochs", "2", "--hidden-size", "32", "--layers", "1", "--batch-size", "32"]
    assert train_g2p.main([str(folder), *arguments]) == 0
    printed = capsys.readouterr().out
    results = json.loads((folder / "results.json").read_text(encoding="utf-8"))
    assert [point["epoch"] for point in results["curve"]] == [1, 2]
    assert results["curve"][1]["loss"] < results["curve"][0]["loss"]
    assert f"greedy: phoneme error rate {results['greedy']['per']:.2%}" in printed
    assert (folder / "curve.png").stat().st_size > 5000

    model, tokenizer = AutoModelForSeq2SeqLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    held_out = train_g2p.split(train_g2p.load_words(200, seed=0))[2]
    assert train_g2p.evaluate(model, tokenizer, held_out) == (results["greedy"]["per"], results["greedy"]["wer"])


@pytest.mark.parametrize(("arguments", "message"), [([], "exists already"), (["--words", "99"], "100 are the least")])
def test_what_cannot_be_done_is_said_before_training(arguments, message, tmp_path, capsys):
    if not arguments:
        (tmp_path / "a-file").write_text("kept", encoding="utf-8")
    with pytest.raises(SystemExit) as stopped:
        train_g2p.main([str(tmp_path), *arguments])
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err
