"""`Trainer` and `Seq2SeqTrainer` from end to end: they train, evaluate, and resume where they stopped."""

import copy
import re
import shutil

import datasets
import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import (
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


def assert_learns_and_resumes(make, folder, metric, factor) -> None:
    """The losses fall by more than this factor. From the checkpoint in the middle, a new trainer comes to the same
    weights."""
    trainer = make()
    before = trainer.evaluate()
    trainer.train()
    after = trainer.evaluate()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses[-1] < losses[0] / factor
    assert after["eval_loss"] < before["eval_loss"] / factor
    assert after[metric] > 0.9 > before[metric]
    resumed = make()
    resumed.train(resume_from_checkpoint=str(folder / f"checkpoint-{trainer.state.global_step // 2}"))
    for name, tensor in resumed.model.state_dict().items():
        assert torch.equal(tensor, trainer.model.state_dict()[name]), name


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


def test_trainer_from_end_to_end(tokenizer, tmp_path):
    """The rows have a text, which no model takes."""
    torch.manual_seed(0)
    start = ScratchBertForSequenceClassification(tiny_config(num_labels=2))
    rows = sentences()

    def make():
        return Trainer(
            copy.deepcopy(start),
            TrainingArguments(str(tmp_path), max_steps=40, save_steps=20, learning_rate=5e-3, **SETTINGS),
            train_dataset=rows,
            eval_dataset=rows,
            data_collator=DataCollatorWithPadding(tokenizer),
            compute_metrics=lambda p: {"accuracy": (p.predictions.argmax(-1) == p.label_ids).mean()},
        )

    assert_learns_and_resumes(make, tmp_path, "eval_accuracy", factor=2)


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

    assert_learns_and_resumes(make, tmp_path, "eval_right", factor=4)


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
