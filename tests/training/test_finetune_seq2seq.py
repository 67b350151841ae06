"""scripts/finetune_seq2seq.py and scripts/cmudict_pairs.py: pairs of texts in, a generator and its errors out."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load_file
from transformers import (
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    BertConfig,
    BertLMHeadModel,
    BertModel,
    EncoderDecoderModel,
)

import cmudict_pairs
import finetune_seq2seq
import train_tokenizer
from modeling_scratchbert import ScratchBertConfig, ScratchBertForConditionalGeneration, ScratchBertForMaskedLM
from support.finetuning import assert_one_line, read_settings
from support.folders import CONFIGURATION
from support.generation import answers, generate_text
from support.models import tiny_config
from toolkit import training
from toolkit.finetuning.seq2seq import Seq2Seq, items
from toolkit.finetuning.task_settings import SEQ2SEQ_METRICS, Seq2SeqSettings

pytestmark = pytest.mark.usefixtures("quiet_only_here")

TINY_PRESET = str(CONFIGURATION / "tiny.json")
RECIPE = CONFIGURATION / "recipes" / "cmudict.yaml"
SIZE = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "max_position_embeddings": 32,
}
PAIRS = [("be", "B IY"), ("add", "AE D"), ("decade", "D EH K EY D"), ("a", "AH"), ("a", "EY"), ("bead", "B IY D")]


@pytest.fixture(scope="module")
def words() -> dict[str, list[str]]:
    return cmudict_pairs.load_words()


def write_pairs(path: Path, pairs: list[tuple[str, str]]) -> str:
    lines = [json.dumps({"source": source, "target": target}) for source, target in pairs]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return str(path)


def overrides(**fields) -> list[str]:
    return [f"{name}={json.dumps(value)}" for name, value in fields.items()]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """pairs.jsonl, and `tokenizer`, in which each phoneme of PAIRS is a token, and each letter."""
    folder = tmp_path_factory.mktemp("seq2seq")
    file = write_pairs(folder / "pairs.jsonl", PAIRS)
    write_pairs(folder / "often.jsonl", PAIRS + [(said, said) for _, said in PAIRS] * 9)
    arguments = ["--column", "source", "target", "--pre_split", "whitespace", "--min_frequency", "9", "--held_out", "0"]
    files = ["--train_file", file.replace("pairs.jsonl", "often.jsonl"), "--output", str(folder / "tokenizer")]
    assert train_tokenizer.main([*files, *arguments]) == 0
    return folder


@pytest.fixture(scope="module")
def flags(folder) -> dict:
    """Those of a tiny model with random weights, on PAIRS."""
    return {
        "output": "nowhere",
        "train_file": [str(folder / "pairs.jsonl")],
        "tokenizer": str(folder / "tokenizer"),
        "config_file": TINY_PRESET,
        "config_overrides": overrides(**SIZE),
        "max_length": 32,
        "max_target_length": 16,
        "metrics": ["error_rate"],
    }


@pytest.fixture(scope="module")
def make_task(flags):
    def make(**changed) -> Seq2Seq:
        return Seq2Seq(Seq2SeqSettings(**{**flags, **changed}), Accelerator(cpu=True))

    return make


def arguments_of(flags: dict) -> list[str]:
    """As the command line has them."""
    return [
        part
        for name, value in flags.items()
        for part in [f"--{name}", *map(str, value if isinstance(value, list) else [value])]
    ]


def run(flags: dict, **changed) -> dict:
    """metrics.json of a whole run."""
    flags = {"trackers": "none", **flags, **changed}
    assert finetune_seq2seq.main(arguments_of(flags)) == 0
    return json.loads((Path(flags["output"]) / "metrics.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def encoder_decoder(folder) -> tuple[EncoderDecoderModel, str]:
    """transformers' own generator, with large random weights, and the folder where it lies with the tokenizer."""
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(folder / "tokenizer")
    sizes = {**SIZE, "vocab_size": len(tokenizer), "initializer_range": 0.3}
    decoder = BertLMHeadModel(BertConfig(**sizes, is_decoder=True, add_cross_attention=True))
    model = EncoderDecoderModel(encoder=BertModel(BertConfig(**sizes)), decoder=decoder).eval()
    model.config.decoder_start_token_id, model.config.pad_token_id = tokenizer.cls_token_id, tokenizer.pad_token_id
    model.config.eos_token_id = tokenizer.sep_token_id
    model.save_pretrained(folder / "encoder-decoder")
    tokenizer.save_pretrained(folder / "encoder-decoder")
    return model, str(folder / "encoder-decoder")


# ---------------------------------------------------------------------------------------------------------------- data


def test_labels_begin_after_the_start_token_and_padding_has_none(make_task):
    task = make_task()
    batch = task.collate([task.train_set[1], task.train_set[2]])
    name = task.tokenizer.convert_ids_to_tokens
    assert name(batch["input_ids"][0]) == ["[CLS]", "a", "##d", "##d", "[SEP]", "[PAD]", "[PAD]", "[PAD]"]
    assert batch["attention_mask"][0].tolist() == [1, 1, 1, 1, 1, 0, 0, 0]
    assert name(batch["decoder_input_ids"][1]) == ["[CLS]", "D", "EH", "K", "EY", "D"]
    assert name(batch["labels"][1]) == ["D", "EH", "K", "EY", "D", "[SEP]"]
    assert name(batch["labels"][0, :3]) == ["AE", "D", "[SEP]"]
    assert batch["labels"][0, 3:].tolist() == [-100, -100, -100]
    assert task.counts(batch).tolist() == [9]
    assert task.train_set["length"] == [7, 8, 14, 5, 5, 10]  # of both texts


def test_long_texts_are_cut_and_still_end(make_task):
    task = make_task(max_length=4, max_target_length=3)
    name, row = task.tokenizer.convert_ids_to_tokens, task.train_set[2]
    assert name(row["input_ids"]) == ["[CLS]", "d", "##e", "[SEP]"]
    assert name(row["labels"]) == ["D", "EH", "[SEP]"]


def test_columns_are_found_or_named(make_task, tmp_path):
    file = tmp_path / "rows.csv"
    file.write_text("id,article,summary,text\n1,be,B,add\n", encoding="utf-8")
    found = make_task(train_file=[str(file)]).train_set[0]
    assert (found["source"], found["target"]) == ("add", "B")  # text stands before article
    named = make_task(train_file=[str(file)], source_column="article", target_column="text").train_set[0]
    assert (named["source"], named["target"]) == ("be", "add")


def test_a_column_that_is_named_for_one_role_is_no_default_for_the_other(make_task, tmp_path):
    file = tmp_path / "rows.csv"
    file.write_text("de,en\nD,be\n", encoding="utf-8")
    with pytest.raises(ValueError, match=r"no column for the source \(--source_column\); .* the columns are 'de'"):
        make_task(train_file=[str(file)], target_column="en")
    row = make_task(train_file=[str(file)], source_column="de", target_column="en").train_set[0]
    assert (row["source"], row["target"]) == ("D", "be")
    file.write_text("text,source,target\nbe,D,B\n", encoding="utf-8")
    row = make_task(train_file=[str(file)], target_column="source").train_set[0]
    assert (row["source"], row["target"]) == ("be", "D")


# --------------------------------------------------------------------------------------------------- model and loss


def test_the_loss_is_that_of_transformers_own_generator_with_the_same_weights(make_task, encoder_decoder):
    theirs, saved = encoder_decoder
    task = make_task(model=saved, config_file=None, config_overrides=None)
    task.model.eval()
    batch = task.collate([task.train_set[i] for i in range(4)])
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask", "labels")}
    with torch.no_grad():
        ours = task.losses(task.model, batch) / task.counts(batch)
        with pytest.warns(FutureWarning, match="loss"):  # that it is computed otherwise than once it was
            expected = theirs(**inputs).loss
    assert expected > 3
    torch.testing.assert_close(ours[0], expected, rtol=1e-5, atol=1e-5)


def test_label_smoothing_gives_the_whole_vocabulary_its_share(make_task):
    """Szegedy et al. 2016, section 7: (1 - s) · nll + s · the mean over the vocabulary."""
    task = make_task(label_smoothing=0.2)
    task.model.eval()
    batch = task.collate([task.train_set[i] for i in range(4)])
    with torch.no_grad():
        logits = task.model(**{name: batch[name] for name in batch if name != "labels"}).logits
        nll = 0.0
        for row, column in (batch["labels"] != -100).nonzero().tolist():
            log_shares = logits[row, column].double().log_softmax(0)
            nll -= 0.8 * log_shares[batch["labels"][row, column]] + 0.2 * log_shares.mean()
        torch.testing.assert_close(task.losses(task.model, batch)[0].double(), nll, rtol=1e-5, atol=0)


def test_a_bert_starts_both_halves(make_task, folder, tmp_path):
    vocabulary = len(AutoTokenizer.from_pretrained(folder / "tokenizer"))
    bert = ScratchBertForMaskedLM(tiny_config(vocab_size=vocabulary))
    bert.save_pretrained(tmp_path)
    start = {"model": str(tmp_path), "config_file": None, "config_overrides": ["hidden_dropout_prob=0"]}
    model = make_task(**start, num_decoder_layers=1).model
    own = bert.state_dict()["model.encoder.blocks.0.attention.query.weight"]
    for half in (model.get_encoder(), model.get_decoder()):
        assert torch.equal(half.encoder.blocks[0].attention.query.weight, own)
        assert half.config.hidden_dropout_prob == 0
    assert [len(half.encoder.blocks) for half in (model.get_encoder(), model.get_decoder())] == [2, 1]
    assert model.generation_config.decoder_start_token_id == 2  # [CLS], of --tokenizer: the model has none
    tied = make_task(**start, tie_encoder_decoder=True).model
    first, second = (half.encoder.blocks[1].attention.key.weight for half in (tied.get_encoder(), tied.get_decoder()))
    assert first is second


def test_a_configuration_file_and_overrides_make_a_model_of_random_weights(make_task):
    config = make_task(
        config_overrides=["hidden_size=64", "norm_first=true", "position_embedding_type=sinusoidal"],
        num_decoder_layers=1,
    ).model.config
    assert (config.hidden_size, config.norm_first, config.position_embedding_type) == (64, True, "sinusoidal")
    assert (config.num_hidden_layers, config.num_decoder_layers, config.intermediate_size) == (2, 1, 512)
    assert (config.vocab_size, config.decoder_start_token_id, config.eos_token_id) == (22, 2, 3)


@pytest.mark.parametrize("source", ["random", "bert", "generator"])
def test_the_encoder_removes_padding_unless_overridden(source, make_task, save_generator, folder, tmp_path):
    vocabulary = len(AutoTokenizer.from_pretrained(folder / "tokenizer"))
    start = {"config_overrides": overrides(**SIZE)}
    if source != "random":
        ScratchBertForMaskedLM(tiny_config(vocab_size=vocabulary)).save_pretrained(tmp_path)
        start = {"model": save_generator() if source == "generator" else str(tmp_path), "config_file": None}
        start["config_overrides"] = []
    assert make_task(**start).model.get_encoder().config.padding_free
    start["config_overrides"] = [*start["config_overrides"], "padding_free=false"]
    assert not make_task(**start).model.get_encoder().config.padding_free


def test_the_recipe_is_of_the_model_that_its_comment_says(folder, make_task, monkeypatch):
    """Pre-norm, 3 + 3 blocks of 256: with the dictionary's 98 tokens 5.6 million parameters."""
    monkeypatch.chdir(RECIPE.parents[2])
    recipe = read_settings(Seq2SeqSettings, [str(RECIPE), "--output", "nowhere"])
    chosen = ("config_file", "config_overrides", "max_length", "max_target_length", "num_beams", "metrics")
    task = make_task(**{name: getattr(recipe, name) for name in chosen})
    config = task.model.config
    assert (config.norm_first, config.num_hidden_layers, config.decoder_config().num_hidden_layers) == (True, 3, 3)
    assert task.model.num_parameters() / 1e6 == pytest.approx(5.6, abs=0.05)


# ---------------------------------------------------------------------------------------------------------- evaluation


def test_rows_with_the_same_source_are_one_item():
    rows = [("a", "AH", "X"), ("be", "B IY", "Y"), ("a", "EY", "X")]
    assert items(*zip(*rows, strict=True)) == (["X", "Y"], [["AH", "EY"], ["B IY"]])


@pytest.mark.parametrize(
    ("metrics", "expected"),
    [
        # B IY is right; D lacks AE; D EH K lacks EY and D; EY is one of two that are right; B IY D is right.
        # Of the references those that are judged by have 2, 2, 5, 1 and 3 phonemes.
        (["error_rate"], {"token_error_rate": 3 / 13, "item_error_rate": 2 / 5}),
        # F1 of the words: 1, 2/3, 3/4, 1, 1. All that was said is in order, so rougeL is the same.
        (["rouge"], {"rouge1": 53 / 60, "rougeL": 53 / 60}),
        (["error_rate", "rouge"], {"token_error_rate": 3 / 13, "rougeLsum": 53 / 60}),
        # Nothing that was said has four words, so the precision of 4-grams, a factor, is 0.
        (["sacrebleu"], {"bleu": 0.0}),
        (["loss"], {}),
    ],
)
def test_metrics_of_known_outputs(metrics, expected, make_task, folder, monkeypatch):
    said = {"be": "B IY", "add": "D", "decade": "D EH K", "a": "EY", "bead": "B IY D"}
    task = make_task(metrics=metrics, validation_file=[str(folder / "pairs.jsonl")], eval_batch_size=2)

    def generate(model, batch):
        words = task.tokenizer.batch_decode(batch["input_ids"], skip_special_tokens=True)
        return [said[word] for word in words]

    monkeypatch.setattr(task, "generate", generate)
    found = task.evaluate(task.model, "validation").metrics
    assert {name: found[name] for name in expected} == pytest.approx(expected)
    assert set(found) == {value for name in [*metrics, "loss"] for value in SEQ2SEQ_METRICS[name]}


def test_the_loss_of_an_evaluation_is_a_labels_mean_without_smoothing_whatever_the_batches(make_task, folder):
    found = []
    for size in (1, 4, 64):
        task = make_task(validation_file=[str(folder / "pairs.jsonl")], eval_batch_size=size, label_smoothing=0.3)
        torch.manual_seed(1)
        for weight in task.model.parameters():
            torch.nn.init.normal_(weight, 0, 0.1)
        found.append(task.evaluate(task.model, "validation").metrics)
    batch = task.collate([task.splits["validation"][i] for i in range(6)])
    with torch.no_grad():
        expected = task.model.eval()(**{name: batch[name] for name in batch if name != "decoder_input_ids"}).loss.item()
    assert [each["loss"] for each in found] == pytest.approx([expected] * 3, rel=1e-5)
    assert found[0]["perplexity"] == pytest.approx(torch.tensor(expected).exp().item(), rel=1e-5)
    assert found[0]["token_error_rate"] == found[1]["token_error_rate"] == found[2]["token_error_rate"]


@pytest.mark.parametrize(
    ("metrics", "metric", "judged_by", "greater_is_better"),
    [
        (None, None, "rougeL", True),
        (["sacrebleu"], None, "bleu", True),
        (["sacrebleu", "error_rate"], "chrf", "chrf", True),
        (["error_rate", "rouge"], None, "token_error_rate", False),
        (["error_rate"], "item_error_rate", "item_error_rate", False),
        (["rouge"], "perplexity", "perplexity", False),
        (["loss"], None, "loss", False),
    ],
)
def test_which_model_is_best(metrics, metric, judged_by, greater_is_better, make_task, folder):
    validation = [str(folder / "pairs.jsonl")]
    task = make_task(metrics=metrics, metric=metric, validation_file=validation)
    assert (task.metric, task.greater_is_better) == (judged_by, greater_is_better)


# ---------------------------------------------------------------------------------------------------------- whole runs


def test_words_are_learnt_by_heart(words, tmp_path):
    """From pairs to the error rates of the saved model. It has learnt every word when the loss is near zero, so that
    the errors that a test set gives are those that are put into it here."""
    train = cmudict_pairs.split(words)["train"]
    pairs = [(word, ways[0]) for word, ways in train.items() if len(ways) == 1][:60]
    (one, said), (two, also_said) = pairs[:2]
    file = write_pairs(tmp_path / "train.jsonl", pairs)
    test = [(one, f"{said} ZH"), (two, "AA"), (two, also_said), *pairs[2:]]
    tokenizer = str(tmp_path / "tokenizer")
    assert (
        train_tokenizer.main(
            [
                "--train_file",
                file,
                "--column",
                "source",
                "target",
                "--pre_split",
                "whitespace",
                "--min_frequency",
                "3",
                "--output",
                tokenizer,
            ]
        )
        == 0
    )
    sizes = {**SIZE, "hidden_size": 64, "num_hidden_layers": 1, "intermediate_size": 256, "norm_first": True}
    sizes |= {"hidden_dropout_prob": 0, "attention_probs_dropout_prob": 0}
    metrics = run(
        {
            "output": tmp_path / "model",
            "tokenizer": tokenizer,
            "config_file": TINY_PRESET,
            "config_overrides": overrides(**sizes),
            "max_length": 32,
            "max_target_length": 31,
            "metrics": ["error_rate"],
            "train_file": [file],
            "test_file": [write_pairs(tmp_path / "test.jsonl", test)],
            "batch_size": 20,
            "epochs": 80,
            "eval_steps": 240,
            "learning_rate": 4e-3,
            "schedule": "cosine",
            "num_beams": 2,
            "eval_batch_size": 300,
        }
    )
    assert metrics["history"][-1]["loss"] < 0.02
    phonemes = sum(len(way.split()) for _, way in pairs) + 1
    assert metrics["test"]["token_error_rate"] == pytest.approx(1 / phonemes)
    assert metrics["test"]["item_error_rate"] == pytest.approx(1 / 60)

    model, tokenizer = (auto.from_pretrained(tmp_path / "model") for auto in (AutoModelForSeq2SeqLM, AutoTokenizer))
    assert (model.generation_config.num_beams, model.generation_config.max_new_tokens) == (2, 31)
    written = generate_text(model.eval(), tokenizer, [word for word, _ in pairs], batch_size=300)
    assert [one for [one] in written] == [way for _, way in pairs]


def test_a_resumed_run_ends_as_one_that_never_stopped(flags, tmp_path, folder):
    flags = {
        **flags,
        "validation_file": [str(folder / "pairs.jsonl")],
        "batch_size": 2,
        "epochs": 3,
        "save_steps": 2,
        "keep_checkpoints": 9,
        "learning_rate": 1e-2,
        "num_beams": 2,
        "log_steps": 1,
    }
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    run(flags, output=whole)
    stopped.mkdir()
    shutil.copy(whole / "recipe.yaml", stopped)
    for name in ("step-00000003-epoch-1", "step-00000004"):  # the best so far, and the last
        shutil.copytree(whole / "checkpoints" / name, stopped / "checkpoints" / name)
    run({**flags, "output": stopped}, resume=True)
    first, second = (load_file(path / "model.safetensors") for path in (whole, stopped))
    assert all(torch.equal(first[name], second[name]) for name in first)
    first, second = (json.loads((path / "metrics.json").read_text(encoding="utf-8")) for path in (whole, stopped))
    assert first["validation"] == second["validation"]
    losses = [[point["loss"] for point in run["history"] if "loss" in point] for run in (first, second)]
    assert losses[0] == losses[1]
    assert len(losses[0]) == 9


def test_lora_trains_the_adapters_of_a_generator_alone(flags, encoder_decoder, tmp_path):
    flags = {name: value for name, value in flags.items() if not name.startswith("config_")}
    flags |= {"model": encoder_decoder[1], "output": tmp_path / "out", "test_file": flags["train_file"]}
    run(flags, lora_rank=2, max_steps=2, learning_rate=1e-2)
    opened = [
        ScratchBertForConditionalGeneration.from_pretrained(path) for path in (encoder_decoder[1], flags["output"])
    ]
    before, after = (model.state_dict() for model in opened)
    changed = {name for name in after if not torch.equal(after[name], before[name])}
    assert changed == {name for name in after if name.endswith(("query.weight", "value.weight"))}


@pytest.mark.parametrize(
    ("targets", "changed", "printed"),
    [
        (
            ["B IY", "AE  D", "D EH", "AE D "],
            {},
            "2 of 4 validation targets differ from their decoded tokens, e.g. "
            "'AE  D' and 'AE D'; text metrics compare with the targets as they are written\n",
        ),
        (["B IY", "D EH K EY D"], {"max_target_length": 4}, "1 of 2 validation targets differ"),
        (["B IY", "AE D"], {}, None),
        (["AE  D"], {"metrics": ["loss"]}, None),
    ],
)
def test_targets_that_no_output_can_equal_are_reported(targets, changed, printed, make_task, tmp_path, capsys):
    file = write_pairs(tmp_path / "validation.jsonl", [("a", target) for target in targets])
    make_task(validation_file=[file], **changed)
    out = capsys.readouterr().out
    assert printed in out if printed else "targets differ" not in out


@pytest.fixture
def save_generator(folder, tmp_path):
    """Saves a generator with random weights, and its tokenizer."""

    def save(name="generator", **fields) -> str:
        tokenizer = AutoTokenizer.from_pretrained(folder / "tokenizer")
        special = {
            "decoder_start_token_id": tokenizer.cls_token_id,
            "eos_token_id": tokenizer.sep_token_id,
            "pad_token_id": tokenizer.pad_token_id,
        }
        torch.manual_seed(0)
        config = ScratchBertConfig(
            **{**SIZE, **special, "vocab_size": len(tokenizer), "is_encoder_decoder": True, **fields}
        )
        ScratchBertForConditionalGeneration(config).save_pretrained(tmp_path / name)
        tokenizer.save_pretrained(tmp_path / name)
        return str(tmp_path / name)

    return save


def from_generator(flags: dict, generator: str) -> dict:
    """The flags of a run that starts from a generator, with its tokenizer."""
    return {name: value for name, value in flags.items() if not name.startswith(("config_", "tok"))} | {
        "model": generator
    }


def test_the_saved_model_generates_as_the_evaluation_did_for_sources_that_were_cut(flags, tmp_path):
    flags = {
        **flags,
        "output": tmp_path / "out",
        "test_file": flags["train_file"],
        "max_length": 4,
        "max_steps": 2,
        "config_overrides": overrides(**SIZE, initializer_range=0.5),
    }
    run(flags)
    rows = [json.loads(line) for line in (tmp_path / "out" / "predictions_test.jsonl").read_text().splitlines()]
    model, tokenizer = (auto.from_pretrained(tmp_path / "out") for auto in (AutoModelForSeq2SeqLM, AutoTokenizer))
    assert tokenizer.model_max_length == 4
    found = answers(model.eval(), tokenizer, [row["source"] for row in rows])
    assert sum(one.dropped > 0 for one in found) == 3
    assert [text for one in found for text in one.outputs] == [row["prediction"] for row in rows]
    tokenizer.model_max_length = 32
    whole = answers(model, tokenizer, [row["source"] for row in rows])
    assert [one.outputs for one in whole] != [one.outputs for one in found]


def test_a_generator_takes_the_special_ids_of_the_tokenizer(flags, make_task, save_generator):
    earlier = {"decoder_start_token_id": 7, "eos_token_id": 8, "pad_token_id": 9}
    task = make_task(
        **{**from_generator(flags, save_generator(**earlier)), "config_file": None, "config_overrides": None}
    )
    tokenizer = task.tokenizer
    expected = [tokenizer.cls_token_id, tokenizer.sep_token_id, tokenizer.pad_token_id]
    for config in (task.model.config, task.model.generation_config):
        assert [getattr(config, name) for name in earlier] == expected
    batch = task.collate([task.train_set[0]])
    assert batch["decoder_input_ids"][0, 0] == tokenizer.cls_token_id


@pytest.mark.parametrize("freeze", ["encoder", "embeddings", "1"])
@pytest.mark.parametrize("sharing", ["embeddings", "nothing", "all"])
def test_freezing_concerns_the_encoder_and_what_the_decoder_shares(freeze, sharing, save_generator):
    model = ScratchBertForConditionalGeneration.from_pretrained(
        save_generator(share_embeddings=sharing != "nothing", tie_encoder_decoder=sharing == "all")
    )
    training.freeze(model, freeze)
    frozen = {name for name, each in model.named_parameters(remove_duplicate=False) if not each.requires_grad}
    embeddings = {name for name, _ in model.named_parameters() if name.startswith("model.encoder.embeddings.")}
    lowest = {"encoder": "", "1": "encoder.blocks.0.", "embeddings": "embeddings."}[freeze]
    encoder = {name for name, _ in model.named_parameters() if name.startswith(f"model.encoder.{lowest}")} | embeddings
    shared = {name.replace("model.encoder.", "model.decoder.", 1) for name in encoder}
    shared = {"nothing": set(), "embeddings": {name for name in shared if ".embeddings." in name}, "all": shared}[
        sharing
    ]
    head = {"lm_head.decoder.weight"} if sharing != "nothing" else set()
    assert frozen == encoder | shared | head
    assert not any("cross_attention" in name for name in frozen)


def test_special_ids_can_be_overridden(make_task, save_generator, folder, tmp_path):
    vocabulary = len(AutoTokenizer.from_pretrained(folder / "tokenizer"))
    ScratchBertForMaskedLM(tiny_config(vocab_size=vocabulary)).save_pretrained(tmp_path / "bert")
    given = {"decoder_start_token_id": 5, "eos_token_id": 6, "pad_token_id": 7, "num_decoder_layers": 2}
    for model in (str(tmp_path / "bert"), save_generator()):
        task = make_task(model=model, config_file=None, config_overrides=overrides(**given))
        config, generation = task.model.config, task.model.generation_config
        assert {name: getattr(config, name) for name in given} == given
        assert (generation.decoder_start_token_id, generation.eos_token_id, generation.pad_token_id) == (5, 6, 7)


def test_the_encoder_of_a_bert_can_be_frozen(make_task, folder, tmp_path):
    vocabulary = len(AutoTokenizer.from_pretrained(folder / "tokenizer"))
    ScratchBertForMaskedLM(tiny_config(vocab_size=vocabulary)).save_pretrained(tmp_path)
    task = make_task(model=str(tmp_path), config_file=None, config_overrides=None, freeze="encoder")
    training.freeze(task.model, "encoder", task.new_weights)
    trained = {name for name, each in task.model.named_parameters() if each.requires_grad}
    assert {name for name in trained if "cross_attention" in name}
    assert not any(name.startswith("model.encoder.") for name in trained)


GENERATION_SETTINGS = {
    "num_beams": 4,
    "early_stopping": True,
    "do_sample": True,
    "temperature": 0.7,
    "top_p": 0.9,
    "num_return_sequences": 4,
    "return_dict_in_generate": True,
    "stop_strings": ["B"],
    "min_length": 3,
    "forced_bos_token_id": 7,
    "no_repeat_ngram_size": 2,
    "output_scores": True,
}


@pytest.mark.parametrize("num_beams", [1, 2])
def test_generation_settings_of_the_base_model_are_dropped_and_named(
    num_beams, flags, save_generator, tmp_path, capsys
):
    generator = save_generator()
    path = Path(generator) / "generation_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **GENERATION_SETTINGS}), encoding="utf-8")
    flags = from_generator(flags, generator) | {"output": tmp_path / "out", "test_file": flags["train_file"]}
    run(flags, max_steps=1, num_beams=num_beams)
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "generation_config.json" in line]
    named = line.split(" has ")[1].split(" in generation")[0].split(", ")
    assert named == sorted(GENERATION_SETTINGS)
    saved = json.loads((tmp_path / "out" / "generation_config.json").read_text(encoding="utf-8"))
    beams = {"length_penalty": 1.0} if num_beams > 1 else {}
    del saved["transformers_version"]
    assert saved == {
        "decoder_start_token_id": 2,
        "eos_token_id": 3,
        "pad_token_id": 0,
        "max_new_tokens": 16,
        "do_sample": False,
        "num_beams": num_beams,
        **beams,
    }


def test_adapters_of_shared_weights_are_refused(flags, save_generator, tmp_path, capsys):
    """PEFT would evaluate each module with its own adapter, and save the shared weight with both."""
    flags = from_generator(flags, save_generator(tie_encoder_decoder=True)) | {"output": tmp_path / "out"}
    message = "encoder and decoder share their weights (tie_encoder_decoder)"
    assert_one_line(lambda: finetune_seq2seq.main(arguments_of({**flags, "lora_rank": 2})), message, capsys)


# ---------------------------------------------------------------------------------------------------------- bad usage


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"config_file": None}, "--model or --config_file is missing"),
        ({"model": "a-folder"}, "--config_file and --model are both given"),
        ({"tokenizer": None}, "without --tokenizer"),
        ({"config_file": "small.json"}, "--config_file small.json: there is no such file"),
        ({"train_file": "nowhere.csv"}, "nowhere.csv: there is no such file"),
        ({"metrics": ["meteor"]}, "--metrics has 'meteor'; expected some of rouge, sacrebleu, error_rate, loss"),
        ({"metric": "bleu", "validation_file": ["x.jsonl"]}, "--metric is 'bleu'; expected one of token_error_rate"),
        ({"num_beams": 0}, "--num_beams is 0"),
        ({"label_smoothing": 1.0}, "--label_smoothing is 1.0"),
        ({"length_penalty": 2.0}, "--length_penalty is 2.0 without --num_beams"),
        ({"padding_free_collation": True}, "--padding_free_collation"),
        ({"implementation": "bert"}, "--implementation is bert"),
        ({"config_overrides": ["hiden_size=3"]}, "--config_overrides has 'hiden_size'; expected FIELD=VALUE"),
        ({"config_overrides": ["hidden_size"]}, "expected NAME=VALUE"),
        ({"config_overrides": ["is_decoder=true"]}, "--config_overrides has 'is_decoder'; expected other fields"),
        ({"config_overrides": ["is_encoder_decoder=false"]}, "--config_overrides has 'is_encoder_decoder'"),
        ({"config_overrides": ["model_type=bert"]}, "--config_overrides has 'model_type'; expected other fields"),
        ({"config_overrides": ["hidden_size=wide"]}, "hidden_size"),
        ({"config_overrides": ["hidden_size=33"]}, "hidden_size is 33; expected a multiple of num_attention_heads (2)"),
        (
            {"max_target_length": 64, "config_overrides": ["max_position_embeddings=63"]},
            "expected at most 63, the positions",
        ),
        ({"lora_rank": 4}, "--lora_rank is given and --model is not a generator"),
        ({"freeze": "encoder"}, "--freeze is given with --config_file, whose weights are random; expected --model"),
        ({"tie_encoder_decoder": True, "num_decoder_layers": 1}, "tie_encoder_decoder is True"),
        ({"target_column": "source"}, "there is no column for the source (--source_column)"),
        ({"source_column": "target", "target_column": "target"}, "no column 'target' for the target"),
    ],
)
def test_what_cannot_be_done_is_said_in_one_line(changed, message, flags, tmp_path, capsys):
    wanted = {name: value for name, value in {**flags, **changed}.items() if value is not None}
    code = None
    try:
        code = finetune_seq2seq.main(arguments_of({**wanted, "output": tmp_path / "out"}))
    except SystemExit as stopped:
        code = stopped.code
    assert code == 2
    line = capsys.readouterr().err
    assert message in line
    assert line.count("\n") == 1


def test_what_a_generator_is_already_cannot_be_chosen(make_task, encoder_decoder):
    start = {"model": encoder_decoder[1], "config_file": None, "config_overrides": None}
    with pytest.raises(ValueError, match=r"--num_decoder_layers is given and .* has a decoder"):
        make_task(**start, num_decoder_layers=1)


def test_a_tokenizer_that_does_not_fit_is_refused(make_task, encoder_decoder, minilm):
    start = {"model": encoder_decoder[1], "config_file": None, "config_overrides": None}
    with pytest.raises(ValueError, match="the tokenizer has 30,522 tokens; expected at most vocab_size, 22"):
        make_task(**start, tokenizer=minilm)


def test_a_bad_row_is_named_or_skipped(flags, tmp_path, capsys):
    file = write_pairs(tmp_path / "rows.jsonl", [("be", "B IY"), ("add", " ")])
    assert finetune_seq2seq.main(arguments_of({**flags, "output": tmp_path / "out", "train_file": file})) == 2
    assert "rows.jsonl, row 2 (line 2): 'target' is empty" in capsys.readouterr().err
    run(flags, output=tmp_path / "new", train_file=file, on_bad_row="skip", epochs=1)
    assert "row 2 (line 2)" in capsys.readouterr().out


# ------------------------------------------------------------------------------------------------------ the dictionary


def test_the_dictionary_is_read_whole_but_for_marks_of_stress_and_spellings_with_other_signs(words):
    assert 124_000 < len(words) < 126_000
    assert words["hello"] == ["HH AH L OW", "HH EH L OW"]
    assert "D OW N T" in words["don't"]
    assert len({phoneme for ways in words.values() for way in ways for phoneme in way.split()}) == 39
    assert all(len(set(ways)) == len(ways) for ways in words.values())


def test_no_word_is_in_two_parts(words):
    parts = cmudict_pairs.split(words)
    together = [word for part in parts.values() for word in part]
    assert len(together) == len(set(together)) == len(words)
    shares = {name: round(len(part) / len(words), 3) for name, part in parts.items()}
    assert shares == {"train": 0.94, "validation": 0.01, "test": 0.05}
    assert cmudict_pairs.split(dict(words)) == parts


def test_a_word_has_a_line_for_each_pronunciation(words, tmp_path, capsys, monkeypatch):
    some = dict(list(words.items())[:2000])
    monkeypatch.setattr(cmudict_pairs, "load_words", lambda: some)  # which takes seconds
    folder = tmp_path / "cmudict"
    assert cmudict_pairs.main([str(folder)]) == 0
    assert "train.jsonl: 1,880 words" in capsys.readouterr().out
    parts = cmudict_pairs.split(some)
    assert sorted(path.stem for path in folder.iterdir()) == sorted(parts)
    for name, part in parts.items():
        rows = [json.loads(line) for line in (folder / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()]
        assert rows == [{"source": word, "target": way} for word, ways in part.items() for way in ways]


def test_pairs_are_not_written_into_a_folder_with_files(tmp_path, capsys):
    (tmp_path / "a-file").write_text("kept", encoding="utf-8")
    assert_one_line(lambda: cmudict_pairs.main([str(tmp_path)]), "exists already", capsys)
