"""What a training run refuses or reports, because its result would be wrong without a word."""

import json
import os
import shutil
import subprocess
import sys
from decimal import Decimal

import pytest
import torch
from accelerate import Accelerator
from datasets import Dataset
from filelock import FileLock
from safetensors.torch import load_file
from scipy.stats import pearsonr
from transformers import BertConfig, BertForSequenceClassification, BertModel

import finetune_classification
import finetune_question_answering
import finetune_seq2seq
import finetune_token_classification
import pretrain_mlm
from support.finetuning import ROWS, TASKS, TEXTS, assert_one_line, main_of, read_settings, write_labels, write_rows
from support.models import tiny_config
from toolkit.finetuning.classification import Classification
from toolkit.finetuning.fingerprint import fingerprint
from toolkit.finetuning.loop import Training
from toolkit.finetuning.masked_lm import Pretraining
from toolkit.finetuning.output import LOCK
from toolkit.finetuning.recipes import changed_flags, recipe_of
from toolkit.finetuning.task_settings import (
    ClassificationSettings,
    PretrainingSettings,
    Seq2SeqSettings,
    TokenClassificationSettings,
)
from toolkit.labels import label_name, label_order

pytestmark = pytest.mark.usefixtures("quiet_only_here", "new_accelerator")


# ------------------------------------------------------------------------------------------------------ the tokenizer


@pytest.mark.parametrize("command", ROWS, ids=lambda command: command.__name__)
def test_a_model_without_a_tokenizer_is_refused(command, flags, tmp_path, capsys):
    """transformers would return a tokenizer of five words."""
    bare = tmp_path / "bare"
    BertModel(tiny_config(BertConfig, vocab_size=12)).save_pretrained(bare)
    argv = flags(train_file=write_rows(tmp_path / "rows.jsonl", [ROWS[command]]), model=bare)
    assert_one_line(lambda: command.main(argv), f"--model {bare}: It has no tokenizer: neither tokenizer.json", capsys)


@pytest.mark.parametrize(
    ("command", "row", "changed", "message"),
    [
        (finetune_classification, {}, {"max_length": 2}, "--max_length is 2; expected at least 3: 2 special tokens"),
        (finetune_classification, {"sentence2": "bad"}, {"max_length": 4}, "--max_length is 4; expected at least 5: 3"),
        (
            finetune_seq2seq,
            {"target": "bad"},
            {"max_length": 1, "max_target_length": 8},
            "--max_length is 1; expected at least 3: 2 special",
        ),
        (finetune_seq2seq, {"target": "bad"}, {"max_target_length": 1}, "--max_target_length is 1; expected 2 or more"),
        (finetune_token_classification, {}, {"max_length": 2}, "max_length is 2; expected at least 3"),
    ],
)
def test_sequences_have_room_for_a_token_of_each_text(command, row, changed, message, flags, tmp_path, capsys):
    """A tokenizer truncates nothing if the maximum is less than its special tokens."""
    row = {**ROWS[command], **row}
    argv = flags(train_file=write_rows(tmp_path / "rows.jsonl", [row, {**row, "label": 2, "tags": ["B-X"]}]), **changed)
    assert_one_line(lambda: command.main(argv), message, capsys)


# ------------------------------------------------------------------------------------------------------ the precision


@pytest.mark.skipif(torch.accelerator.is_available(), reason="has a device for float16")
@pytest.mark.parametrize("configured", [False, True])
def test_float16_on_a_cpu_is_refused(configured, flags, monkeypatch, capsys):
    """Accelerate would train in float32."""
    if configured:
        monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp16")
    argv = flags(mixed_precision=None if configured else "fp16")
    message = "--mixed_precision is fp16 and the run is on a CPU; expected bf16 or no"
    assert_one_line(lambda: finetune_classification.main(argv), message, capsys)


# --------------------------------------------------------------------------------------------------------- the labels


@pytest.mark.parametrize("value", [float("nan"), float("inf"), {"name": "good"}, [["good"]]])
@pytest.mark.parametrize("problem", ["single_label", "multi_label"])
def test_a_label_is_a_text_or_a_finite_number(value, problem, flags, tmp_path, capsys):
    bad = value if problem == "single_label" or isinstance(value, list) else [value]
    argv = flags(train_file=write_labels(tmp_path / "train.jsonl", [1, 0, bad, *[1, 0, 1, 0, 1]]), problem=problem)
    shown = repr(value[0] if isinstance(value, list) else value)
    message = f"train.jsonl, row 3 (line 3): the label is {shown}; expected a text or a finite number"
    assert_one_line(lambda: finetune_classification.main(argv), message, capsys)


def test_labels_that_only_look_like_integers_are_texts():
    names = ["10", "①", "2", "--1", "-3", "²", "9" * 5000, "0", "00", "1" * 18]
    ordered = ["-3", "0", "00", "--1", "²", "①", "2", "10", "1" * 18, "9" * 5000]
    assert sorted(names, key=label_order) == ordered


# ------------------------------------------------------------------------------------------------------------- resume


@pytest.fixture
def stopped(flags, tmp_path, monkeypatch):
    """Makes a run that has stopped after two of its four updates, with a checkpoint. Returns its command line."""

    def make(main=finetune_classification.main, **changed) -> list[str]:
        update, made = Training.update, []

        def stop(self, group):
            made.append(group)
            if len(made) > 2:
                raise KeyboardInterrupt
            return update(self, group)

        argv = flags(save_steps=1, **changed)
        with monkeypatch.context() as patch:
            patch.setattr(Training, "update", stop)
            assert main(argv) == 130
        assert (tmp_path / "run" / "checkpoints" / "step-00000002").is_dir()
        return [*argv, "--resume"]

    return make


@pytest.mark.parametrize("labels", [[0, 1] * 4, [1, 0, 2, 0] * 2], ids=["flipped", "a new one"])
@pytest.mark.parametrize("split", ["train", "validation"])
def test_resume_refuses_changed_data(split, labels, stopped, tmp_path, capsys):
    held_out = write_labels(tmp_path / "validation.jsonl", [1, 0] * 4)
    argv = stopped(validation_file=held_out)
    changed = write_labels(tmp_path / f"{split}.jsonl", labels)
    capsys.readouterr()
    if split == "validation" and 2 in labels:
        message = "validation.jsonl, row 3 (line 3): the label is '2'; expected one of 0, 1"
    else:
        message = f"--resume: the {split} rows ({changed}) have changed since step-00000002 was saved; expected"
    before = (tmp_path / "run" / "recipe.yaml").read_bytes()
    changes = ["--log_steps=3", "--trackers=tensorboard"]
    assert_one_line(lambda: finetune_classification.main([*argv, *changes]), message, capsys)
    assert (tmp_path / "run" / "recipe.yaml").read_bytes() == before
    assert not (tmp_path / "run" / "logs").exists()


def test_resume_refuses_a_changed_stream(stopped, tmp_path, capsys):
    file = tmp_path / "train.txt"
    file.write_text("good film .\nbad film\n" * 30)
    argv = stopped(pretrain_mlm.main, train_file=file, streaming=True, max_steps=4)
    file.write_text("good film .\nbad film\n" * 29)
    capsys.readouterr()
    message = f"--resume: the train rows ({file}) have changed"
    assert_one_line(lambda: pretrain_mlm.main(argv), message, capsys)


def test_resume_accepts_what_changes_no_weight(stopped, model, tmp_path, monkeypatch):
    """The same file by another path, and flags for files and evaluations only."""
    argv = stopped(validation_file=write_labels(tmp_path / "validation.jsonl", [1, 0] * 4))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "link.jsonl").symlink_to(tmp_path / "validation.jsonl")
    changes = ["--train_file=./train.jsonl", "--validation_file=link.jsonl", "--save_steps=3", "--eval_batch_size=3"]
    kept = [each for each in argv if not each.startswith(("--train_file", "--validation_file"))]
    assert finetune_classification.main([*kept, *changes]) == 0


def test_fingerprints_are_of_the_values():
    rows = [{"text": "a", "ids": [1, 2], "place": "x"}, {"text": "b", "ids": [], "place": "y"}]
    known = fingerprint(Dataset.from_list(rows))
    assert fingerprint(Dataset.from_list([{**row, "place": "z"} for row in rows])) == known
    assert fingerprint(Dataset.from_list([rows[1], *rows]).select([1, 2])) == known
    others = (
        rows[::-1],
        rows[:1],
        [{**rows[0], "ids": [1]}, {**rows[1], "ids": [2]}],
        [{**row, "n": 1} for row in rows],
    )
    assert known not in [fingerprint(Dataset.from_list(other)) for other in others]


@pytest.mark.parametrize(
    "wrong", [{"label_column": "none"}, {"freeze": 9}, {"text_column": "none"}, {"max_length": 65}], ids=str
)
def test_a_failed_start_writes_nothing(wrong, flags, tmp_path):
    """The corrected command runs."""
    assert finetune_classification.main(flags(max_steps=1, **wrong)) == 2
    assert not (tmp_path / "run").exists()


def test_flags_are_free_until_there_is_a_checkpoint(flags, tmp_path, monkeypatch, capsys):
    def interrupt(self):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Training, "train", interrupt)
        assert finetune_classification.main(flags(max_steps=1)) == 130
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["recipe.yaml"]
    assert finetune_classification.main([*flags(max_steps=1, learning_rate=1e-3), "--resume"]) == 0
    assert "learning_rate: 0.001" in (tmp_path / "run" / "recipe.yaml").read_text()
    capsys.readouterr()
    argv = [*flags(max_steps=1, learning_rate=1e-2), "--resume"]
    message = "has other flags; expected the same: --learning_rate was 0.001 and is 0.01"
    assert_one_line(lambda: finetune_classification.main(argv), message, capsys)


@pytest.mark.parametrize("resume", [True, False])
def test_one_run_at_a_time_has_the_output(resume, flags, tmp_path, capsys):
    argv = [*flags(max_steps=1), "--resume"] if resume else flags(max_steps=1)
    if resume:
        assert finetune_classification.main(argv) == 0
        (tmp_path / "run" / "model.safetensors").unlink()
    else:
        (tmp_path / "run").mkdir()
    capsys.readouterr()
    before = set(tmp_path.rglob("*"))
    with FileLock(tmp_path / "run" / LOCK):
        assert_one_line(lambda: finetune_classification.main(argv), "run is in use by another run;", capsys)
    assert set(tmp_path.rglob("*")) - {tmp_path / "run" / LOCK} == before
    assert finetune_classification.main(argv) == 0
    with FileLock(tmp_path / "run" / LOCK, timeout=0):
        pass  # it is free after the run


# ------------------------------------------------------------------------------------------------------------- output


@pytest.mark.parametrize("closed", ["stdout", "stderr"])
def test_training_continues_when_the_reader_of_its_output_has_gone(closed, flags, tmp_path):
    reading, writing = os.pipe()
    os.close(reading)
    argv = flags(max_steps=2, eval_steps=1, validation_file=write_labels(tmp_path / "other.jsonl", [1, 0] * 4))
    with os.fdopen(writing, "w") as pipe:
        done = subprocess.run(
            [sys.executable, finetune_classification.__file__, *argv],
            **{"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, closed: pipe},
            check=False,
        )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "run" / "model.safetensors").exists()


# ---------------------------------------------------------------------------------------------------- validation data


def test_training_on_the_validation_file_is_reported(flags, tmp_path, capsys):
    train = write_labels(tmp_path / "train.jsonl", [1, 0] * 4)
    (tmp_path / "link.jsonl").symlink_to(train)
    argv = flags(max_steps=1, validation_file=tmp_path / "link.jsonl", test_file=train)
    assert finetune_classification.main(argv) == 0
    said = capsys.readouterr().err
    assert f"{tmp_path / 'link.jsonl'} is in the train rows and in the validation rows; expected other rows." in said
    assert f"{train} is in the train rows and in the test rows" in said
    other = write_labels(tmp_path / "other.jsonl", [1, 0] * 4)
    assert finetune_classification.main(flags(output="other", max_steps=1, validation_file=other)) == 0
    assert "is in the train rows" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "given", "message"),
    [
        (finetune_classification, {"dataset_config": "plain"}, "--dataset_config is plain without --dataset;"),
        (finetune_classification, {"train_split": "all"}, "--train_split is all without --dataset;"),
        (finetune_classification, {"validation_split": "dev"}, "--validation_split is dev without --dataset;"),
        (finetune_classification, {"test_split": "test"}, "--test_split is test without --dataset;"),
        (
            finetune_classification,
            {"early_stopping": 3},
            "--early_stopping is 3 without --validation_file or --validation_fraction;",
        ),
        (
            finetune_classification,
            {"metric": "f1"},
            "--metric is f1 without --validation_file or --validation_fraction;",
        ),
        (
            finetune_token_classification,
            {"metric": "accuracy"},
            "--metric is accuracy without --validation_file or --validation_fraction;",
        ),
        (
            finetune_question_answering,
            {"metric": "exact_match"},
            "--metric is exact_match without --validation_file or --validation_fraction;",
        ),
        (
            finetune_seq2seq,
            {"metric": "rouge1"},
            "--metric is rouge1 without --validation_file or --validation_fraction;",
        ),
        (
            finetune_classification,
            {"early_stopping": 3, "train_file": "none", "dataset": "a/b", "validation_split": "none"},
            "--early_stopping is 3 without --validation_split or --validation_fraction;",
        ),
        (
            pretrain_mlm,
            {"max_eval_samples": 5},
            "--max_eval_samples is 5 without --validation_file or --validation_fraction or --test_file;",
        ),
        (
            pretrain_mlm,
            {"eval_batch_size": 5},
            "--eval_batch_size is 5 without --validation_file or --validation_fraction or --test_file;",
        ),
        (finetune_classification, {"split_seed": 3}, "--split_seed is 3 without --validation_fraction;"),
        (finetune_classification, {"lora_alpha": 8}, "--lora_alpha is 8.0 without --lora_rank;"),
        (finetune_classification, {"lora_dropout": 0.5}, "--lora_dropout is 0.5 without --lora_rank;"),
        (finetune_classification, {"hub_private": True}, "--hub_private is given without --push_to_hub;"),
        (finetune_classification, {"trust_checkpoints": True}, "--trust_checkpoints is given without --resume;"),
        (
            finetune_classification,
            {"padding_free_collation": True, "implementation": "bert"},
            "--padding_free_collation is given without --implementation scratchbert;",
        ),
        (finetune_classification, {"label_separator": ","}, "--label_separator is , without --problem multi_label;"),
        (
            finetune_classification,
            {"label_smoothing": 0.1, "problem": "regression"},
            "--label_smoothing is 0.1 without --problem single_label;",
        ),
        (
            finetune_classification,
            {"class_weights": "balanced", "problem": "regression"},
            "--class_weights is balanced without --problem single_label or --problem multi_label;",
        ),
        (finetune_seq2seq, {"length_penalty": 2}, "--length_penalty is 2.0 without --num_beams;"),
        (finetune_seq2seq, {"config_file": "x.json", "model": None}, "--config_file is x.json without --tokenizer;"),
        (pretrain_mlm, {"shuffle_buffer": 9}, "--shuffle_buffer is 9 without --streaming;"),
        (pretrain_mlm, {"streaming": True}, "--streaming is given without --max_steps;"),
        (
            finetune_classification,
            {"warmup_ratio": 0.2, "schedule": "constant"},
            "--warmup_ratio is 0.2 with --schedule constant;",
        ),
        (finetune_classification, {"lora_rank": 2, "freeze": "encoder"}, "--lora_rank and --freeze are both given;"),
        (finetune_classification, {"dataset": "a/b"}, "--dataset and --train_file are both given;"),
        (
            finetune_classification,
            {"train_file": "none", "dataset": "a/b", "test_file": "x.csv"},
            "--test_file and --dataset are both given;",
        ),
        (pretrain_mlm, {"next_sentence": 1, "line_by_line": 1}, "--next_sentence and --line_by_line are both given;"),
        (pretrain_mlm, {"config_file": "x.json", "tokenizer": "a/b"}, "--config_file and --model are both given;"),
    ],
)
def test_flags_that_would_do_nothing_are_refused(command, given, message, flags, capsys):
    argv = [each for each in flags(**given) if each != "--train_file=none"]
    assert_one_line(lambda: command.main(argv), message, capsys)


@pytest.mark.parametrize(
    ("settings_class", "given"),
    [
        (ClassificationSettings, {"dataset": "a/b", "metric": "f1", "early_stopping": 1, "max_eval_samples": 5}),
        (ClassificationSettings, {"train_file": ["x"], "test_file": ["y"], "max_eval_samples": 5}),
        (ClassificationSettings, {"train_file": ["x"], "label_separator": ",", "problem": "multi_label"}),
        (TokenClassificationSettings, {"train_file": ["x"], "label_smoothing": 0.1, "class_weights": ["balanced"]}),
        (ClassificationSettings, {"train_file": ["x"], "warmup_ratio": 0, "schedule": "constant"}),
        (Seq2SeqSettings, {"train_file": ["x"], "num_beams": 2, "length_penalty": 2.0}),
        (PretrainingSettings, {"train_file": ["x"], "streaming": True, "max_steps": 1, "shuffle_buffer": 5}),
    ],
    ids=str,
)
def test_flags_with_what_they_require(settings_class, given):
    settings = settings_class(model="a/b", output="out", **given)
    assert {name: getattr(settings, name) for name in given} == given


# --------------------------------------------------------------------------------------------------------- divergence


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize(
    ("learning_rate", "message"),
    [(1e38, "of the model are not finite after step 1"), (1e30, "is not finite for ")],
)
def test_a_run_that_diverges_in_its_last_update_saves_nothing(task, learning_rate, message, flags, tmp_path, capsys):
    main, given = main_of(task, tmp_path)
    wrong = {"learning_rate": learning_rate, "max_steps": 1, "warmup_ratio": 0, "weight_decay": 0}
    assert main(flags(**given, **wrong)) == 1
    said = capsys.readouterr().err.splitlines()[-1]
    assert message in said
    assert said.endswith(
        "The last checkpoint has the weights from before; a lower --learning_rate or --mixed_precision no may help."
    )
    saved = [path.name for path in (tmp_path / "run" / "checkpoints").glob("*")]
    assert saved == (["step-00000000-epoch-0"] if task == "masked words" else [])  # from before the first update
    assert not (tmp_path / "run" / "model.safetensors").exists()


def test_weights_are_checked_before_a_checkpoint(flags, tmp_path, capsys):
    """Without a validation set, and before the end of the epoch."""
    assert finetune_classification.main(flags(learning_rate=1e38, save_steps=1, warmup_ratio=0)) == 1
    assert "of the model are not finite after step 1" in capsys.readouterr().err
    assert list((tmp_path / "run").glob("checkpoints/*")) == []


@pytest.mark.parametrize("name", ["learning_rate", "weight_decay", "max_grad_norm", "lora_alpha", "label_smoothing"])
@pytest.mark.parametrize("value", ["nan", "inf"])
def test_values_of_flags_are_finite(name, value, flags, capsys):
    assert_one_line(
        lambda: finetune_classification.main(flags(**{name: value})), f"--{name} is {value}; expected", capsys
    )


# ------------------------------------------------------------------------------------------------ texts without words


@pytest.mark.parametrize("given", [{}, {"line_by_line": True}, {"streaming": True, "max_steps": 2}], ids=str)
@pytest.mark.parametrize("text", ["\u200b", "unknown words"])
def test_texts_without_a_word_to_mask_are_refused(text, given, flags, tmp_path, capsys):
    """The separators between them would make sequences, on which the loss is 0."""
    (tmp_path / "empty.txt").write_text(f"{text}\n" * 50)
    argv = flags(train_file=tmp_path / "empty.txt", **given)
    message = "the train set is too small; expected at least a word of the vocabulary"
    assert_one_line(lambda: pretrain_mlm.main(argv), message, capsys)
    assert not (tmp_path / "run").exists()


def test_texts_without_tokens_leave_no_separators(flags, tmp_path):
    (tmp_path / "some.txt").write_text("good film\n" + "\u200b\n" * 50 + "bad film\n")
    argv = flags(train_file=tmp_path / "some.txt")
    task = Pretraining(read_settings(PretrainingSettings, argv), Accelerator())
    assert task.tokenizer.convert_ids_to_tokens(task.train_set[0]["input_ids"]) == [
        "[CLS]",
        "good",
        "film",
        "[SEP]",
        "bad",
        "film",
        "[SEP]",
    ]
    assert [len(task.train_set), len(task.train_set[0]["input_ids"])] == [1, 7]


# ------------------------------------------------------------------------------------------------------------ recipes


def read(argv: list[str]) -> ClassificationSettings:
    return read_settings(ClassificationSettings, argv)


NEEDED = "model: a\noutput: b\ntrain_file: c.csv\n"


def test_values_of_a_recipe_are_as_they_are_written(tmp_path):
    recipe = tmp_path / "recipe.yaml"
    labels = ["yes", "no", "-1", "-b", "--c", "01", "1e3", "2020-01-01", "null", "off"]
    recipe.write_text(
        f"{NEEDED}labels: [yes, no, -1, -b, --c, 01, 1e3, 2020-01-01, 'null', off]\nmixed_precision: no\n"
        "hub_private: on\npush_to_hub: a/b\npadding_free_collation: false\nmax_steps: null\neval_steps:\nepochs: 4\n"
        "learning_rate: 1e-4\n"
    )
    settings = read([str(recipe)])
    assert (settings.labels, settings.mixed_precision) == (labels, "no")
    assert (settings.hub_private, settings.padding_free_collation) == (True, False)
    assert (settings.max_steps, settings.eval_steps, settings.epochs) == (None, None, 4)
    assert settings.learning_rate == 1e-4
    # The recipe that a run saves has the same values, and the command line replaces them.
    recipe.write_text(recipe_of(settings))
    assert read([str(recipe)]).labels == labels
    assert changed_flags(read([str(recipe)]), recipe) == {}
    assert read([str(recipe), "--labels", "x", "-y"]).labels == ["x", "-y"]


def test_labels_on_the_command_line_may_begin_with_a_hyphen(flags, capsys):
    assert read([*flags(), "--labels", "-bad", "good", "-1", "--seed", "3"]).labels == ["-bad", "good", "-1"]
    assert read([*flags(), "--class-weights", "1", "2", "--labels", "-a", "-b"]).labels == ["-a", "-b"]
    for wrong in (["--labels", "a", "--sed", "3"], ["--labels"], ["--text_column", "-x"]):
        with pytest.raises(SystemExit):
            read([*flags(), *wrong])
    assert "\0" not in capsys.readouterr().err


def test_a_saved_recipe_starts_a_run_from_its_beginning(flags, tmp_path):
    assert finetune_classification.main([*flags(max_steps=1), "--resume"]) == 0
    recipe = tmp_path / "run" / "recipe.yaml"
    assert "resume" not in recipe.read_text()
    assert not read([str(recipe)]).resume
    assert finetune_classification.main([str(recipe), "--resume"]) == 0


# ------------------------------------------------------------------------------------------ columns, labels and numbers


def texts_of(argv: list[str]) -> list[str]:
    """What the model reads of the training set."""
    task = Classification(read_settings(ClassificationSettings, argv), Accelerator())
    return [task.tokenizer.decode(ids, skip_special_tokens=False) for ids in task.train_set["input_ids"]]


PAIRS = [{"premise": "good", "hypothesis": "bad", "label": 1}, {"premise": "film", "hypothesis": "fun", "label": 0}] * 2


@pytest.mark.parametrize(
    ("given", "first"),
    [
        ({}, "[CLS] good [SEP] bad [SEP]"),
        ({"text_column": "hypothesis"}, "[CLS] bad [SEP]"),
        ({"text_column": "premise"}, "[CLS] good [SEP]"),
        ({"text_column": "premise", "text_pair_column": "hypothesis"}, "[CLS] good [SEP] bad [SEP]"),
        ({"text_pair_column": "premise", "text_column": "hypothesis"}, "[CLS] bad [SEP] good [SEP]"),
    ],
    ids=str,
)
def test_the_columns_of_pairs(given, first, flags, tmp_path):
    assert texts_of(flags(write_rows(tmp_path / "pairs.jsonl", PAIRS), **given))[0] == first


def test_pairs_are_pairs_in_every_split_and_row(flags, tmp_path, capsys):
    train = write_rows(tmp_path / "pairs.jsonl", PAIRS)
    single = write_rows(tmp_path / "single.jsonl", [{"premise": "good", "label": 1}])
    argv = flags(train, validation_file=single)
    assert_one_line(lambda: finetune_classification.main(argv), "there is no column 'hypothesis'", capsys)
    rows = [{"sentence1": "good", "label": i % 2} for i in range(101)]
    argv = flags(write_rows(tmp_path / "late.jsonl", [*rows[:100], {**rows[100], "sentence2": "a"}]))
    assert_one_line(lambda: finetune_classification.main(argv), "row 101 (line 101): there is a second text", capsys)


def test_a_column_of_labels_that_a_file_lacks(flags, tmp_path, capsys):
    files = [
        write_rows(tmp_path / "labels.jsonl", [{"text": "good", "labels": "a|b"}, {"text": "bad", "labels": ""}]),
        write_rows(tmp_path / "tags.jsonl", [{"text": "good", "tags": "a"}]),
    ]
    argv = [*flags(None, problem="multi_label"), "--train_file", *files]
    argv = [each for each in argv if not each.startswith("--train_file=")]
    assert_one_line(
        lambda: finetune_classification.main(argv), "tags.jsonl, row 1 (line 1): 'labels' is missing", capsys
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_in_half_precision_are_trained_in_float32(dtype, model, flags, tmp_path):
    """At this learning rate an update is less than a bfloat16 resolves."""
    half = tmp_path / "half"
    shutil.copytree(model, half)
    BertModel.from_pretrained(model).to(dtype).save_pretrained(half)
    assert finetune_classification.main(flags(model=half, epochs=2)) == 0
    before, after = (load_file(folder / "model.safetensors") for folder in (half, tmp_path / "run"))
    assert {value.dtype for value in after.values()} == {torch.float32}
    name = "embeddings.token_type_embeddings.weight"
    assert not torch.equal(before[name][0].float(), after[f"model.{name}"][0])
    assert json.loads((tmp_path / "run" / "config.json").read_text())["dtype"] == "float32"


def test_metrics_of_several_numbers_are_means_over_the_columns(flags, tmp_path):
    rows = [{"text": text, "label": [i, 100 - i * i]} for i, text in enumerate(TEXTS)]
    file = write_rows(tmp_path / "numbers.jsonl", rows)
    assert finetune_classification.main(flags(file, validation_file=file, problem="regression")) == 0
    metrics = json.loads((tmp_path / "run" / "metrics.json").read_text())["validation"]
    predictions = (tmp_path / "run" / "predictions_validation.jsonl").read_text().splitlines()
    found, labels = (torch.tensor([json.loads(each)[name] for each in predictions]) for name in ("prediction", "label"))
    pearson = [pearsonr(found[:, i], labels[:, i]).statistic for i in range(2)]
    assert metrics["pearson"] == pytest.approx(sum(pearson) / 2, rel=1e-4)
    assert metrics["mean_squared_error"] == pytest.approx(((found - labels) ** 2).mean().item(), rel=1e-5)


@pytest.mark.parametrize(
    ("row", "given", "message"),
    [
        ({"label": [1, 2]}, {"labels": "x"}, "the label is [1, 2]; expected 1 numbers"),
        ({"label": 1}, {"labels": ["x", "y"]}, "the label is 1; expected 2 numbers"),
    ],
    ids=str,
)
def test_rows_have_as_many_numbers_as_labels(row, given, message, flags, tmp_path, capsys):
    argv = flags(write_rows(tmp_path / "rows.jsonl", [{"text": "good", **row}]), problem="regression")
    labels = given["labels"] if isinstance(given["labels"], list) else [given["labels"]]
    assert_one_line(lambda: finetune_classification.main([*argv, "--labels", *labels]), message, capsys)


def test_held_out_rows_have_as_many_numbers_as_the_training_set(flags, tmp_path, capsys):
    train, other = (write_rows(tmp_path / f"{n}.jsonl", [{"text": "good", "label": [1] * n}]) for n in (1, 2))
    argv = flags(train, validation_file=other, problem="regression")
    assert_one_line(lambda: finetune_classification.main(argv), "2.jsonl, row 1 (line 1): the label is [1, 1]", capsys)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--labels", "a"], "--labels is a; expected two labels or more"),
        (["--label_separator", "", "--problem", "multi_label"], "--label_separator is empty;"),
        (["--seed", str(2**32)], f"--seed is {2**32}; expected"),
        (["--freeze", "²"], "--freeze is ²; expected"),
        (["--train_file", "a.csv"], "--train_file is given twice"),
    ],
)
def test_flags_that_are_refused(argv, message, flags, capsys):
    assert_one_line(lambda: finetune_classification.main([*flags(), *argv]), message, capsys)


def test_labels_as_zeros_and_ones_are_refused(flags, tmp_path, capsys):
    file = write_rows(tmp_path / "rows.jsonl", [{"text": "good", "labels": [1, 0, 1]}])
    argv = flags(file, problem="multi_label")
    assert_one_line(lambda: finetune_classification.main(argv), "the label is [1, 0, 1]; expected the name of", capsys)


def test_numbers_as_labels_are_sorted_by_value():
    names = ["10.5", "2.5", "1", "-0.5", "0.5", "text", "nan", "1_0"]
    assert sorted(names, key=label_order) == ["-0.5", "1_0", "nan", "text", "0.5", "1", "2.5", "10.5"]
    assert [label_name(Decimal(text)) for text in ("1.0", "2.50", "-3")] == ["1", "2.50", "-3"]


def test_a_classifier_of_other_labels_gets_a_new_head(model, flags, tmp_path, capsys):
    old = tmp_path / "old"
    shutil.copytree(model, old)
    classifier = BertForSequenceClassification.from_pretrained(model, num_labels=3)
    classifier.save_pretrained(old)
    assert finetune_classification.main(flags(model=old, freeze="encoder")) == 0
    assert f"{old} has no weights of classifier; they are random" in capsys.readouterr().out
    after = load_file(tmp_path / "run" / "model.safetensors")
    assert after["classifier.weight"].shape == (2, 32)
    assert torch.equal(after["model.pooler.dense.weight"], classifier.bert.pooler.dense.weight)


def test_weights_of_other_shapes_than_the_configuration(model, flags, tmp_path, capsys):
    wrong = tmp_path / "wrong"
    shutil.copytree(model, wrong)
    config = json.loads((wrong / "config.json").read_text())
    (wrong / "config.json").write_text(json.dumps(config | {"intermediate_size": 40}))
    argv = flags(model=wrong)
    assert_one_line(lambda: finetune_classification.main(argv), "as its configuration says", capsys)
