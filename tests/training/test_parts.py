"""The parts of a run: batches, optimizer, schedule, masks and metrics."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from support.models import random_scratchbert
from support.tiny import save_tiny
from toolkit.tasks import ARGUMENTS, task_class
from toolkit.tasks.classification import regression_metrics
from toolkit.tasks.seq2seq import ErrorRate, Rouge, Sacrebleu
from toolkit.tasks.tagging import Entities, check_iob2, to_iob2
from toolkit.tasks.task import compute
from toolkit.training import epoch_batches, evaluation_batches, freeze, make_optimizer, make_schedule

LENGTHS = np.random.default_rng(0).integers(1, 100, 1003).tolist()


@pytest.mark.parametrize("by_length", [True, False])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_batches_of_an_epoch(world, by_length):
    """Each row is in one batch of one process, all processes have as many batches, and epochs differ."""
    epochs = [
        [epoch_batches(LENGTHS, 8, 1, epoch, rank, world, by_length) for rank in range(world)] for epoch in (0, 1)
    ]
    for processes in epochs:
        assert sorted(row for own in processes for batch in own for row in batch) == list(range(1003))
        assert len({len(own) for own in processes}) == 1
        assert all(len(batch) == 8 for own in processes for batch in own[:-1])
    assert epochs[0] != epochs[1]
    assert epochs[0][0] == epoch_batches(LENGTHS, 8, 1, 0, 0, world, by_length)
    assert epochs[0][0] != epoch_batches(LENGTHS, 8, 2, 0, 0, world, by_length)
    padded = sum(max(LENGTHS[row] for row in batch) * len(batch) for batch in epochs[0][0] if batch)
    fill = sum(LENGTHS[row] for batch in epochs[0][0] for row in batch) / padded
    assert (fill > 0.9) == by_length
    evaluated = [evaluation_batches(LENGTHS, 8, rank, world) for rank in range(world)]
    assert sorted(row for own in evaluated for batch in own for row in batch) == list(range(1003))
    assert len({len(own) for own in evaluated}) == 1


def arguments(**changed) -> SimpleNamespace:
    given = {"weight_decay": 0.1, "learning_rate": 1.0, "optim": "adamw_torch_fused", "freeze": None}
    schedule = {"warmup_steps": 0.2, "lr_scheduler_type": "linear", "lr_scheduler_kwargs": None}
    return SimpleNamespace(**{**given, **schedule, **changed})


def test_decay_and_schedule():
    """Biases and norms do not decay. A warm-up below 1 is a share of the updates."""
    model = random_scratchbert("ForSequenceClassification")
    decays = {
        id(p): group["weight_decay"]
        for group in make_optimizer(model, arguments()).param_groups
        for p in group["params"]
    }
    for name, parameter in model.named_parameters():
        assert decays[id(parameter)] == (0.0 if "norm" in name.lower() or name.endswith("bias") else 0.1), name
    rates = []
    for given in ({}, {"warmup_steps": 4}, {"lr_scheduler_type": "constant", "warmup_steps": 0}):
        optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], 1.0)
        schedule = make_schedule(optimizer, arguments(**given), 20)
        rates.append([])
        for _ in range(20):
            rates[-1].append(schedule.get_last_lr()[0])
            optimizer.step()
            schedule.step()
    expected = [*(i / 4 for i in range(4)), *(1 - i / 16 for i in range(16))]
    assert rates[0] == rates[1] == pytest.approx(expected)
    assert set(rates[2]) == {1.0}


@pytest.mark.parametrize(("what", "trained"), [("embeddings", (0, 1)), ("1", (1,)), ("encoder", ())])
def test_freeze(what, trained):
    model = random_scratchbert("ForSequenceClassification")
    new = {"model.pooler.dense.weight"} & {name for name, _ in model.named_parameters()}
    freeze(model, what, new)
    free = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert new | {"classifier.weight"} <= free
    assert not {name for name in free if "embeddings" in name}
    blocks = {int(name.split("blocks.")[1].split(".")[0]) for name in free if "blocks." in name}
    assert blocks == {i for i in range(model.config.num_hidden_layers) if trained and i >= trained[0]}


def test_masks(tmp_path):
    """15 % of the words are chosen, of these 80 % masked and 10 % replaced, by seed, epoch and number."""
    task = task_class("masked-lm")(ARGUMENTS["masked-lm"](model=save_tiny(tmp_path), max_length=64))
    task.find_columns(["text"])
    rows = [{"text": "good bad film fun a very saw Paris"} for _ in range(4000)]
    examples = task.encode(rows)
    batch = task.collate(examples, (1, 0))
    ids, labels = batch["input_ids"], batch["labels"]
    chosen = labels != -100
    plain = torch.tensor(np.concatenate([example["input_ids"] for example in examples]))
    assert labels[chosen].equal(plain[chosen[batch["attention_mask"].bool()]])
    special = set(task.tokenizer.all_special_ids)
    assert not special & set(labels[chosen].tolist())
    words = sum(each not in special for each in plain.tolist())
    assert chosen.sum().item() / words == pytest.approx(0.15, abs=0.01)
    masked = ids[chosen] == task.tokenizer.mask_token_id
    assert masked.float().mean().item() == pytest.approx(0.8, abs=0.02)
    assert ((ids[chosen] != labels[chosen]) & ~masked).float().mean().item() == pytest.approx(0.1, abs=0.03)
    again = task.collate(examples[7:9], (1, 0))
    width = again["labels"].shape[1]
    assert again["labels"].equal(labels[7:9, :width])
    assert not task.collate(examples, (1, 1))["labels"].equal(labels)
    assert task.collate(examples)["labels"].equal(task.collate(examples)["labels"])


METRICS = [
    (Rouge, ["a b", "c"], [["a b"], ["d", "c"]], {"rouge1": 1.0, "rouge2": 0.5, "rougeL": 1.0}),
    (Sacrebleu, ["the cat sat on the mat"], [["the cat sat on the mat"]], {"bleu": 100.0, "chrf": 100.0}),
    (ErrorRate, ["a b c", "d"], [["a x c", "a b c e"], ["d"]], {"token_error_rate": 1 / 4, "item_error_rate": 1 / 2}),
    (
        Entities,
        [["B-P", "I-P", "O"], ["B-L"]],
        [["B-P", "I-P", "O"], ["B-P"]],
        {"entity_f1": 0.5, "tag_accuracy": 0.75, "P/recall": 0.5, "L/precision": 0.0, "P/entities": 2},
    ),
]


@pytest.mark.parametrize(("metric", "predictions", "references", "expected"), METRICS)
def test_metrics(metric, predictions, references, expected):
    values = compute(metric, predictions, references)
    assert {name: values[name] for name in expected} == pytest.approx(expected)


def test_metrics_of_numbers():
    references, predictions = (
        np.array([[1.0, 1.0], [2.0, 1.0], [3.0, 1.0]]),
        np.array([[2.0, 0.0], [4.0, 1.0], [6.0, 2.0]]),
    )
    expected = {"pearson": 0.5, "spearman": 0.5, "mean_squared_error": (1 + 4 + 9 + 1 + 0 + 1) / 6}
    assert regression_metrics(references, predictions) == pytest.approx(expected)


def test_tags():
    assert to_iob2(["I-P", "I-P", "B-P", "O", "I-L"]) == ["B-P", "I-P", "B-P", "O", "B-L"]
    for tags in (["I-P"], ["B-P", "I-L"], ["P"], ["B-"]):
        with pytest.raises(ValueError, match="tag"):
            check_iob2(tags)
    check_iob2(["O", "B-P", "I-P"])


ROWS = {
    "classification": {"text": "good film", "label": "x"},
    "tagging": {"tokens": ["good", "film"], "tags": ["B-X", "O"]},
    "question-answering": {
        "question": "it",
        "context": "a good film",
        "answers": [{"text": "good", "answer_start": 2}],
    },
    "seq2seq": {"source": "good film", "target": "bad film ."},
    "masked-lm": {"text": "good bad film fun a very saw Paris good bad film fun a very saw Paris"},
}
FLAGS = {
    "tagging": {"stride": 0},
    "question-answering": {"stride": 2},
    "masked-lm": {"line_by_line": True},
    "seq2seq": {"max_target_length": 9},
}


@pytest.mark.parametrize("name", ROWS)
def test_losses_are_those_of_the_models(name, tmp_path):
    """Without padding, the loss divided by the number of labels is the mean that the model itself computes."""
    flags = {"model": save_tiny(tmp_path), "max_length": 20, **FLAGS.get(name, {})}
    task = task_class(name)(ARGUMENTS[name](**flags))
    task.find_columns(list(ROWS[name]))
    rows = [{**task.read(content), "place": "row"} for content in (ROWS[name], ROWS[name])]
    if name == "classification":
        rows[1]["label"] = "y"
    list(task.prepare(rows))
    batch = task.collate(task.encode(rows))
    model = task.open_model().eval()
    targets = {name: value for name, value in batch.items() if name != "decoder_input_ids"}
    with torch.no_grad():
        loss = task.loss(model, batch) / task.count(batch)
        outputs, again = task.predict(model, batch)
        expected = model(**targets).loss
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(again / task.count(batch), expected)
    assert len(outputs) == 2
