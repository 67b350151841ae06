"""`Trainer` and `Seq2SeqTrainer` from end to end: they train, evaluate, save, and resume where they stopped."""

import copy
import re
import shutil

import datasets
import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import (
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    DataCollatorForSeq2Seq,
    DataCollatorWithPadding,
    PreTrainedTokenizerFast,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    Trainer,
    TrainingArguments,
)

from modeling_scratchbert import ScratchBertForConditionalGeneration, ScratchBertForSequenceClassification
from support.folders import ROOT
from support.models import NO_DROPOUT, tiny_config
from support.tiny import save_tiny

PAD, START, END = 0, 1, 2

SETTINGS = {
    "optim": "adamw_torch",
    "lr_scheduler_type": "linear",
    "use_cpu": True,
    "report_to": [],
    "disable_tqdm": True,
    "logging_steps": 4,
    "save_strategy": "steps",
    "dataloader_pin_memory": False,
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 2,
    "per_device_eval_batch_size": 5,
    "save_total_limit": None,
}


@pytest.fixture(scope="module")
def tokenizer():
    """A tokenizer of a hundred words, of which only the padding is asked for."""
    words = {"[PAD]": PAD, "[START]": START, "[END]": END} | {f"w{i}": i for i in range(3, 99)}
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="[PAD]")), pad_token="[PAD]", eos_token="[END]"
    )


def losses(trainer) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def assert_resumes(make, model, folder, steps):
    """From a checkpoint in the middle a new trainer comes to the same weights as the one that `model` went through."""
    again = make()
    result = again.train(resume_from_checkpoint=str(folder / f"checkpoint-{steps // 2}"))
    assert result.global_step == steps
    for name, tensor in again.model.state_dict().items():
        assert torch.equal(tensor, model.state_dict()[name]), name


def assert_opens_again(auto_class, trainer, folder, inputs):
    trainer.save_model(str(folder))
    opened = auto_class.from_pretrained(folder)
    assert type(opened) is type(trainer.model)
    with torch.no_grad():
        torch.testing.assert_close(opened(**inputs).logits, trainer.model.eval()(**inputs).logits, rtol=0, atol=0)


# ---------------------------------------------------------------------------------------------------------------------
# Classification


def sentences(count=40):
    """Rows of 2 to 9 words; their class is whether the first is one of the lower half."""
    generator = torch.Generator().manual_seed(1)
    rows = []
    for number in range(count):
        ids = torch.randint(3, 99, (2 + number % 8,), generator=generator).tolist()
        rows.append({"input_ids": ids, "label": int(ids[0] < 50), "text": f"sentence {number}"})
    return rows


@pytest.mark.parametrize("strategy", ["random", "group_by_length"])
def test_trainer_from_end_to_end(strategy, tokenizer, tmp_path):
    torch.manual_seed(0)
    start = ScratchBertForSequenceClassification(tiny_config(num_labels=2))
    rows, seen = sentences(), []
    pad = DataCollatorWithPadding(tokenizer)

    def collate(batch):
        seen.extend(row.keys() for row in batch)
        return pad([{"attention_mask": [1] * len(row["input_ids"]), **row} for row in batch])

    def make():
        arguments = TrainingArguments(
            str(tmp_path),
            **{
                **SETTINGS,
                "max_steps": 40,
                "save_steps": 20,
                "learning_rate": 5e-3,
                "train_sampling_strategy": strategy,
            },
        )
        return Trainer(
            copy.deepcopy(start),
            arguments,
            train_dataset=rows,
            eval_dataset=rows,
            data_collator=collate,
            compute_metrics=lambda p: {"accuracy": (p.predictions.argmax(-1) == p.label_ids).mean()},
        )

    trainer = make()
    before = trainer.evaluate()
    trainer.train()
    after = trainer.evaluate()
    assert losses(trainer)[-1] < losses(trainer)[0] / 2
    assert after["eval_loss"] < before["eval_loss"] / 2
    assert after["eval_accuracy"] > 0.9 > before["eval_accuracy"]
    assert trainer.label_names == ["labels"]
    assert all(set(names) == {"input_ids", "label"} for names in seen)  # no model takes a text
    inputs = pad([{"input_ids": row["input_ids"]} for row in rows[:5]])
    assert_opens_again(AutoModelForSequenceClassification, trainer, tmp_path / "saved", inputs)
    if strategy == "random":
        assert_resumes(make, trainer.model, tmp_path, 40)


def test_evaluation_reports_the_mean_loss(tokenizer, tmp_path):
    """Over all rows, whatever the batches: of 4 rows at a time the last has 2."""
    model = ScratchBertForSequenceClassification(tiny_config(num_labels=2)).eval()
    rows = sentences(10)
    collate = DataCollatorWithPadding(tokenizer)
    settings = {**SETTINGS, "per_device_eval_batch_size": 4}
    trainer = Trainer(model, TrainingArguments(str(tmp_path), **settings), data_collator=collate)
    batch = collate([{name: row[name] for name in ("input_ids", "label")} for row in rows])
    with torch.no_grad():
        expected = model(**batch).loss.item()
    assert trainer.evaluate(rows)["eval_loss"] == pytest.approx(expected, rel=1e-5)


# ---------------------------------------------------------------------------------------------------------------------
# Text to text


def pairs(count=32):
    """A source of one to three words of four, and as its target the first of them, twice where it is odd."""
    generator = torch.Generator().manual_seed(1)
    rows = []
    for number in range(count):
        source = torch.randint(3, 7, (1 + number % 3,), generator=generator).tolist()
        rows.append(
            {"input_ids": source, "labels": source[:1] * (1 + source[0] % 2) + [END], "note": "not for a model"}
        )
    return rows


def exactly_right(prediction) -> dict[str, float]:
    """The share of the generated targets that are as they are to be, but for the padding."""
    right = 0
    for generated, wanted in zip(prediction.predictions, prediction.label_ids, strict=True):
        wanted = [word for word in wanted.tolist() if word not in (-100, PAD)]
        right += [word for word in generated.tolist() if word not in (START, PAD, -100)] == wanted
    return {"right": right / len(prediction.predictions)}


def test_seq2seq_trainer_from_end_to_end(tokenizer, tmp_path):
    torch.manual_seed(0)
    special = {"decoder_start_token_id": START, "eos_token_id": END, "pad_token_id": PAD}
    fields = {**NO_DROPOUT, **special, "intermediate_size": 64}
    start = ScratchBertForConditionalGeneration(tiny_config(is_encoder_decoder=True, **fields))
    rows = pairs()

    def make():
        arguments = Seq2SeqTrainingArguments(
            str(tmp_path),
            max_steps=60,
            save_steps=30,
            learning_rate=5e-3,
            predict_with_generate=True,
            generation_max_length=6,
            **SETTINGS,
        )
        model = copy.deepcopy(start)
        return Seq2SeqTrainer(
            model,
            arguments,
            train_dataset=rows,
            eval_dataset=rows,
            compute_metrics=exactly_right,
            data_collator=DataCollatorForSeq2Seq(tokenizer, model),
            processing_class=tokenizer,
        )

    trainer = make()
    before = trainer.evaluate()
    trainer.train()
    after = trainer.evaluate()
    assert losses(trainer)[-1] < losses(trainer)[0] / 4
    assert after["eval_loss"] < before["eval_loss"] / 4
    assert after["eval_right"] > 0.9 > before["eval_right"]
    batch = DataCollatorForSeq2Seq(tokenizer)([{k: row[k] for k in ("input_ids", "labels")} for row in rows[:5]])
    assert_opens_again(AutoModelForSeq2SeqLM, trainer, tmp_path / "saved", batch)
    assert_resumes(make, trainer.model, tmp_path, 60)


def test_the_trainer_that_docs_benchmarks_compares_with(tmp_path, monkeypatch):
    """Its code, on the few reviews of the tests."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    reviews = tmp_path / "scripts" / "data" / "movie_reviews"
    reviews.mkdir(parents=True)
    for name in ("train", "validation", "test"):
        shutil.copy(ROOT / "tests" / "data" / "movie_reviews.csv", reviews / f"{name}.csv")
    save_tiny("model", [])
    (code,) = re.findall(r"^```python slow\n(.*?)^```", (ROOT / "docs" / "benchmarks.md").read_text(), re.M | re.S)
    code = code.replace("sentence-transformers/all-MiniLM-L6-v2", "model").replace("max_length=128", "max_length=64")
    namespace = {"__name__": "__main__"}
    exec(code, namespace)
    assert namespace["trainer"].state.epoch == 2
    assert 0 < namespace["result"]["eval_accuracy"] < 1
