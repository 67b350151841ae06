"""Accumulated losses: the parts of a batch, each called with `num_items_in_batch`, add up to the loss and the gradient
of the whole batch; in direct calls, and under `Trainer`."""

import copy
from dataclasses import dataclass, field

import pytest
import torch
from torch.nn.functional import cross_entropy
from transformers import Trainer, TrainerCallback

from support.comparison import assert_same_gradients
from support.models import NEEDS, NO_DROPOUT, OURS, randomise, tiny_config
from support.training import sgd_settings
from support.versions import since

ROWS, T, L = 8, 9, 3
LENGTHS = torch.tensor([9, 3, 8, 4, 7, 9, 4, 5])[:, None]
REAL = torch.arange(T) < LENGTHS
# How many tokens of each row have labels: in batches of two 2, 9, 2 and 7, or 5 each.
UNEQUAL, EQUAL = ([1, 1, 7, 2, 0, 2, 3, 4], [3, 2, 4, 1, 0, 5, 2, 3])


def word_labels(counts, classes):
    """`(8, 9)`, -100 but for the first so many tokens after the first one, which a decoder does not predict."""
    position = torch.arange(T)
    labelled = (position >= 1) & (position <= torch.tensor(counts)[:, None])
    return torch.randint(0, classes, (ROWS, T)).masked_fill(~labelled, -100)


@dataclass
class Task:
    """A head, how to draw the labels of its 8 rows, the argument whose labels are counted, and fields of its
    configuration."""

    head: str
    labels: object
    counted: str = "labels"
    fields: dict = field(default_factory=dict)

    def model(self, **fields):
        config = tiny_config(**{"num_labels": L, **NO_DROPOUT, **NEEDS.get(self.head, {}), **self.fields, **fields})
        config.decoder_start_token_id = 1
        return randomise(OURS[self.head](config)).train()

    def batch(self) -> dict:
        shape = (ROWS, 2, T) if self.head == "ForMultipleChoice" else (ROWS, T)
        real = (REAL[:, None] if len(shape) == 3 else REAL).expand(shape)
        ids = torch.randint(1, 99, shape).masked_fill(~real, 0)
        return {"input_ids": ids, "attention_mask": real.long(), **self.labels()}

    def items(self, batch) -> int:
        labels = batch[self.counted]
        labels = labels[:, 1:] if self.head == "ForCausalLM" else labels
        return int(labels.ne(-100).sum())


CLASSIFICATION = "ForSequenceClassification"
TASKS = {
    "pre-training": Task(
        "ForPreTraining",
        lambda: {"labels": word_labels(EQUAL, 99), "next_sentence_label": torch.randint(0, 2, (ROWS,))},
    ),
    "masked LM": Task("ForMaskedLM", lambda: {"labels": word_labels(UNEQUAL, 99)}),
    "next sentence": Task("ForNextSentencePrediction", lambda: {"labels": torch.tensor([0, 1, -100, 1, 0, 0, 1, 1])}),
    "single label": Task(CLASSIFICATION, lambda: {"labels": torch.tensor([0, 2, -100, 1, -100, -100, 1, 0])}),
    "regression, 1 number": Task(CLASSIFICATION, lambda: {"labels": torch.randn(ROWS)}, fields={"num_labels": 1}),
    "regression, 3 numbers": Task(
        CLASSIFICATION, lambda: {"labels": torch.randn(ROWS, L)}, fields={"problem_type": "regression"}
    ),
    "multi label": Task(CLASSIFICATION, lambda: {"labels": torch.randint(0, 2, (ROWS, L)).float()}),
    "token labels": Task("ForTokenClassification", lambda: {"labels": word_labels(UNEQUAL, L)}),
    "question answering": Task(
        "ForQuestionAnswering",
        lambda: {"start_positions": torch.randint(0, 5, (ROWS,)), "end_positions": torch.randint(5, T, (ROWS,))},
        counted="start_positions",
        fields={"num_labels": 2},
    ),
    "multiple choice": Task("ForMultipleChoice", lambda: {"labels": torch.tensor([0, 1, -100, 1, 0, 1, 0, 0])}),
    # The label of a row's first token, which is never predicted, counts for nothing.
    "next word": Task("ForCausalLM", lambda: {"labels": word_labels(UNEQUAL, 99).index_fill(1, torch.tensor([0]), 7)}),
    "target": Task("ForConditionalGeneration", lambda: {"labels": word_labels(UNEQUAL, 99)}),
}
tasks = pytest.mark.parametrize("task", TASKS.values(), ids=TASKS)


def in_twos(batch) -> list[dict]:
    parts = {name: tensor.split(2) for name, tensor in batch.items()}
    return [{name: part[i] for name, part in parts.items()} for i in range(ROWS // 2)]


def gradients(model) -> dict:
    # Copies: `zero_grad` or the next pass may write into them.
    return {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}


def loss_and_gradients(model, batches, **arguments):
    """The sum of the batches' losses, and that of their gradients."""
    model.zero_grad()
    losses = [model(**batch, **arguments).loss for batch in batches]
    sum(losses).backward()
    return sum(losses).item(), gradients(model)


# ---------------------------------------------------------------------------------------------------------------------
# Direct calls


@tasks
def test_four_batches_of_two_add_up_to_one_of_eight(task):
    model, batch = task.model(), task.batch()
    expected_loss, expected = loss_and_gradients(model, [batch])
    items = task.items(batch)
    # With several GPUs and one process, each replica is given a tensor of shape (1, 1).
    for batches, number in ((in_twos(batch), items), ([batch], torch.tensor([[float(items)]]))):
        loss, gradient = loss_and_gradients(model, batches, num_items_in_batch=number)
        assert loss == pytest.approx(expected_loss, rel=1e-5)
        assert_same_gradients(gradient, expected)
    twice = model(**batch, num_items_in_batch=2 * items).loss.item()
    assert twice == pytest.approx(expected_loss / 2, rel=1e-5)


def test_next_sentences_count_for_the_share_of_masked_words_in_their_batch():
    """Batches of 2, 9, 2 and 7 masked words."""
    task = TASKS["pre-training"]
    model, batch = task.model(), task.batch() | {"labels": word_labels(UNEQUAL, 99)}
    expected = 0
    for words, part in zip([2, 9, 2, 7], in_twos(batch), strict=True):
        expected += words / 20 * model(**part).loss.item()
    loss, _ = loss_and_gradients(model, in_twos(batch), num_items_in_batch=20)
    assert loss == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("name", ["pre-training", "masked LM", "token labels", "single label", "next word"])
def test_a_batch_without_labels_adds_nothing(name):
    """Its mean is 0 / 0."""
    model, batch = TASKS[name].model(), TASKS[name].batch()
    batch["labels"] = torch.full_like(batch["labels"], -100)
    assert model(**batch).loss.isnan()
    loss, gradient = loss_and_gradients(model, [batch], num_items_in_batch=torch.tensor(20))
    assert loss == 0
    assert all(g is None or not g.any() for g in gradient.values())


@pytest.mark.parametrize("field", ["sparse_prediction", "padding_free"])
@pytest.mark.parametrize("name", ["pre-training", "masked LM"])
def test_batches_add_up_if_less_is_computed(name, field):
    task = TASKS[name]
    batch = task.batch()
    expected_loss, expected = loss_and_gradients(task.model(), [batch])
    model = task.model(**{field: True})
    loss, gradient = loss_and_gradients(model, in_twos(batch), num_items_in_batch=torch.tensor(20))
    assert loss == pytest.approx(expected_loss, rel=1e-5)
    assert_same_gradients(gradient, expected)


def test_compiled_once_for_all_numbers():
    model, batch = TASKS["masked LM"].model(), TASKS["masked LM"].batch()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    for stance, number in (("default", 20), ("fail_on_recompile", 31)):
        with torch.compiler.set_stance(stance):
            loss = compiled(**batch, num_items_in_batch=torch.tensor(number)).loss
        assert loss.item() == pytest.approx(model(**batch).loss.item() * 20 / number, rel=1e-5)


def test_the_sum_of_many_half_precision_losses_is_finite():
    """20,000 losses of 10 are 200,000, and float16 ends at 65,504."""
    model = Task("ForTokenClassification", None, fields={"num_labels": 2, "num_hidden_layers": 0}).model().half()
    with torch.no_grad():
        model.classifier.weight.zero_()
        model.classifier.bias.copy_(torch.tensor([0.0, 10.0]))
    ids = torch.ones(2_000, 10, dtype=torch.long)
    loss = model(ids, labels=torch.zeros_like(ids), num_items_in_batch=20_000).loss
    assert loss.item() == pytest.approx(10, abs=0.01)


# ---------------------------------------------------------------------------------------------------------------------
# Under Trainer


class KeepGradients(TrainerCallback):
    def on_pre_optimizer_step(self, args, state, control, model, **kwargs):
        self.gradients = gradients(model)


def one_step(model, batch, folder, **arguments):
    """The loss that `Trainer` reports of one step over the rows of `batch`, in twos, and the gradient of the step."""
    arguments |= {"train_sampling_strategy": "sequential", "per_device_train_batch_size": 2}
    settings = sgd_settings(folder, gradient_accumulation_steps=4, dataloader_pin_memory=False, **arguments)
    rows = [{name: tensor[i] for name, tensor in batch.items()} for i in range(ROWS)]
    kept = KeepGradients()
    result = Trainer(copy.deepcopy(model), settings, train_dataset=rows, callbacks=[kept]).train()
    return result.training_loss, kept.gradients


@since("5.10", "Trainer does not divide a loss that num_items_in_batch has divided")
@tasks
def test_trainer_accumulates_the_gradient_of_the_large_batch(task, tmp_path):
    """Question answering has no `labels`, of which alone `Trainer` takes the number: it divides the batches' means by
    the number of batches, which comes to the same where each has as many answers."""
    model, batch = task.model(), task.batch()
    expected_loss, expected = loss_and_gradients(model, [batch])
    loss, gradient = one_step(model, batch, tmp_path)
    assert loss == pytest.approx(expected_loss, rel=1e-5)
    assert_same_gradients(gradient, expected)


@since("5.17", "Trainer divides smoothed losses by the number of accumulated batches")
@pytest.mark.parametrize("name", ["single label", "masked LM", "token labels", "next word", "target"])
def test_trainer_smooths_labels(name, tmp_path):
    """It computes that loss itself, of the logits; torch has the same one."""
    task = TASKS[name]
    model, batch = task.model(), task.batch()
    if name == "target":  # `DataCollatorForSeq2Seq` does so
        batch["decoder_input_ids"] = model.prepare_decoder_input_ids_from_labels(batch["labels"])
    labels, logits = batch["labels"], model(**batch).logits
    if name == "next word":
        labels, logits = labels[:, 1:], logits[:, :-1]
    expected = cross_entropy(logits.flatten(0, -2), labels.flatten(), label_smoothing=0.1)
    model.zero_grad()
    expected.backward()
    loss, gradient = one_step(model, batch, tmp_path, label_smoothing_factor=0.1)
    assert loss == pytest.approx(expected.item(), rel=1e-5)
    assert_same_gradients(gradient, gradients(model))
