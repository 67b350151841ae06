"""The parts of a run: batches, optimizer, schedule and frozen weights."""

import json
import math
import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from huggingface_hub import ModelCard
from torch import nn
from transformers import get_scheduler

import train
from support.models import SPECIAL, random_scratchbert
from toolkit.tasks import ARGUMENTS
from toolkit.training import epoch_batches, evaluation_batches, freeze, make_optimizer, make_schedule, write_card

LENGTHS = np.random.default_rng(0).integers(1, 100, 1003).tolist()
EXAMPLES = [{"length": length} for length in LENGTHS]


@pytest.mark.parametrize("by_length", [True, False])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_batches_of_an_epoch(world, by_length):
    """Each row is in one batch of one process, all processes have as many batches, and epochs differ."""

    def settings(seed=1) -> SimpleNamespace:
        sizes = {"per_device_train_batch_size": 8, "per_device_eval_batch_size": 8}
        strategy = "group_by_length" if by_length else "random"
        return SimpleNamespace(**sizes, seed=seed, train_sampling_strategy=strategy)

    def process(rank: int) -> SimpleNamespace:
        return SimpleNamespace(process_index=rank, num_processes=world)

    epochs = [[epoch_batches(EXAMPLES, settings(), process(rank), epoch) for rank in range(world)] for epoch in (0, 1)]
    for processes in epochs:
        assert sorted(row for own in processes for batch in own for row in batch) == list(range(1003))
        assert len({len(own) for own in processes}) == 1
        assert all(len(batch) == 8 for own in processes for batch in own[:-1])
    assert epochs[0] != epochs[1]
    assert epochs[0][0] == epoch_batches(EXAMPLES, settings(), process(0), 0)
    assert epochs[0][0] != epoch_batches(EXAMPLES, settings(seed=2), process(0), 0)
    padded = sum(max(LENGTHS[row] for row in batch) * len(batch) for batch in epochs[0][0] if batch)
    fill = sum(LENGTHS[row] for batch in epochs[0][0] for row in batch) / padded
    assert (fill > 0.9) == by_length
    evaluated = [evaluation_batches(EXAMPLES, settings(), process(rank)) for rank in range(world)]
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


@pytest.mark.parametrize(
    ("what", "frozen"),
    [
        ("embeddings", "model.embeddings."),
        ("1", ("model.embeddings.", "model.encoder.blocks.0.")),
        ("encoder", "model."),
    ],
)
def test_freeze(what, frozen):
    """New weights stay trained."""
    model = random_scratchbert("ForSequenceClassification")
    freeze(model, what, {"model.pooler.dense.weight"})
    for name, parameter in model.named_parameters():
        is_trained = name == "model.pooler.dense.weight" or not name.startswith(frozen)
        assert parameter.requires_grad == is_trained, name


@pytest.mark.parametrize("what", ["encoder", "embeddings", "1"])
@pytest.mark.parametrize("sharing", ["embeddings", "nothing", "all"])
def test_freezing_concerns_the_encoder_and_what_the_decoder_shares(what, sharing):
    fields = {"share_embeddings": sharing != "nothing", "tie_encoder_decoder": sharing == "all", **SPECIAL}
    model = random_scratchbert("ForConditionalGeneration", is_encoder_decoder=True, **fields)
    freeze(model, what, set())
    frozen = {name for name, each in model.named_parameters(remove_duplicate=False) if not each.requires_grad}
    names = {name for name, _ in model.named_parameters() if name.startswith("model.encoder.")}
    embeddings = {name for name in names if ".embeddings." in name}
    encoder = {"encoder": names, "embeddings": embeddings, "1": {name for name in names if ".blocks.0." in name}}[what]
    encoder |= embeddings
    shared = {name.replace("model.encoder.", "model.decoder.", 1) for name in encoder}
    if sharing != "all":
        shared = {name for name in shared if ".embeddings." in name} if sharing == "embeddings" else set()
    head = {"lm_head.decoder.weight"} if sharing != "nothing" else set()
    assert frozen == encoder | shared | head


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("cosine_with_restarts", {"num_cycles": 2}),
        ("cosine_with_min_lr", {"min_lr_rate": 0.5}),
        ("polynomial", {"power": 2, "lr_end": 1e-6}),
        ("inverse_sqrt", {}),
    ],
)
def test_schedules_are_continued(name, given, tmp_path):
    """With the rates of transformers' own schedule, and without code in their file."""

    def make():
        optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], 1.0)
        settings = {"lr_scheduler_type": name, "lr_scheduler_kwargs": json.dumps(given), "warmup_steps": 3}
        return make_schedule(optimizer, arguments(**settings), 10)

    def rates(schedule, steps: int) -> list[float]:
        found = []
        for _ in range(steps):
            schedule.optimizer.step()
            schedule.step()
            found += schedule.get_last_lr()
        return found

    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], 1.0)
    theirs = get_scheduler(name, optimizer, 3, 10, scheduler_specific_kwargs=given)
    first, second, expected = make(), make(), rates(theirs, 10)
    assert rates(first, 4) == expected[:4]
    torch.save(first.state_dict(), tmp_path / "scheduler.bin")
    second.load_state_dict(torch.load(tmp_path / "scheduler.bin", weights_only=True))
    assert rates(second, 6) == expected[4:]


def test_the_metadata_of_a_card(tmp_path):
    """Values that are not finite are in the table only."""
    metrics = {"validation": {"accuracy": 0.75, "pearson": math.nan}, "test": {"accuracy": 0.5}}
    given = {"model": "user/bert", "dataset": "user/data", "labels": ["a", "b"]}
    arguments = train.TrainingArguments(hub_model_id="ada/reviews", output_dir=str(tmp_path), seed=3)
    task = SimpleNamespace(name="text-classification", labels=["a", "b"], metric_names=["accuracy"])
    rows = {"train": range(1000), "validation": range(5)}
    this = train.TrainingRun(task, ARGUMENTS["classification"](**given), arguments, None, rows, {})
    this.progress, this.saved_step = SimpleNamespace(best_step=7), 7
    write_card(this, metrics, "ScratchBertForSequenceClassification")
    card = ModelCard.load(tmp_path / "README.md")
    assert (card.data.base_model, card.data.datasets, card.data.pipeline_tag) == (
        "user/bert",
        ["user/data"],
        "text-classification",
    )
    results = {(each.dataset_split, each.metric_type): each.metric_value for each in card.data.eval_results}
    assert results == {("validation", "accuracy"): 0.75, ("test", "accuracy"): 0.5}
    assert "| pearson | nan |" in card.text
    assert "1,000 train, 5 validation" in card.text
    assert "- seed: 3" in card.text
    (code,) = re.findall(r"```python\n(.*?)```", card.text, re.DOTALL)
    compile(code, "card", "exec")
    assert 'AutoModelForSequenceClassification.from_pretrained("ada/reviews", trust_remote_code=True)' in code
