"""The steps that the benchmark times beside whole batches: of training and of decoding."""

import statistics
import time
from collections.abc import Iterable
from functools import partial
from pathlib import Path

import torch
from transformers import BertForSequenceClassification, EncoderDecoderModel, StoppingCriteria

from modeling_scratchbert import ScratchBertForConditionalGeneration, ScratchBertForSequenceClassification
from toolkit.benchmark.timing import decoding_step_bytes, decoding_step_seconds, interleave
from toolkit.benchmark.variants import VARIANTS, missing
from toolkit.benchmark.workloads import Batch, pad, random_rows
from toolkit.compare.parity import gradient_rows, gradients

BEAMS = {"greedy": 1, "beam 4": 4}
# Our variants that are timed decoding, and the argument of optimize_for_inference().
GENERATORS = {"ours": None, "ours-optimised": None, "ours-bf16": torch.bfloat16, "ours-int8": "int8"}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def models_to_train(folder: Path) -> dict[str, torch.nn.Module]:
    """The reference and our model with the same weights, the new classifier's included."""
    classifier = folder / "classifier"
    BertForSequenceClassification.from_pretrained(folder, num_labels=2, **NO_DROPOUT).save_pretrained(classifier)
    models = {
        "bert": BertForSequenceClassification.from_pretrained(classifier),
        "ours": ScratchBertForSequenceClassification.from_pretrained(classifier, padding_free=True),
    }
    return {name: model.train() for name, model in models.items()}


def gradient_difference(models: dict[str, torch.nn.Module]) -> float:
    """The largest ‖difference‖ / ‖gradient‖ over all tensors."""
    theirs, ours = gradients(models["bert"]), gradients(models["ours"])
    return max(row.difference for row in gradient_rows(ours, theirs, theirs))


def train(folder: Path, batches: list[Batch], repetitions: int) -> dict:
    """The median seconds of a step of each model, and the differences of the losses and of the first gradients."""
    models, losses = models_to_train(folder), {"bert": [], "ours": []}
    optimizers = {name: torch.optim.AdamW(model.parameters(), lr=1e-5) for name, model in models.items()}

    def step(name: str, batch: Batch) -> None:
        """The gradients stay in the model."""
        optimizers[name].zero_grad()
        loss = models[name](**batch.inputs, labels=batch.labels).loss
        loss.backward()
        optimizers[name].step()
        losses[name].append(loss.item())

    runs = {name: partial(step, name) for name in models}
    for warm_up in runs.values():
        warm_up(batches[0])
    difference = gradient_difference(models)
    seconds = interleave(runs, [batches[i % len(batches)] for i in range(1, repetitions + 1)], 1)
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    return {
        "seconds": medians,
        "vs_bert": medians["bert"] / medians["ours"],
        "loss_difference": max(abs(theirs - ours) for theirs, ours in zip(*losses.values(), strict=True)),
        "gradient_difference": difference,
    }


class Clock(StoppingCriteria):
    """Records the time after each token and never stops the generation."""

    def __init__(self):
        self.times = []

    def __call__(self, input_ids, scores, **kwargs):
        self.times.append(time.perf_counter())
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)


def generators(folder: Path, variants: Iterable[str], seed: int) -> dict[str, torch.nn.Module]:
    """The reference and those of our variants that generate, with the same weights."""
    torch.manual_seed(seed)
    pair = folder / "encoder-decoder"
    model = EncoderDecoderModel.from_encoder_decoder_pretrained(folder, folder)
    special = {"decoder_start_token_id": 101, "eos_token_id": 102, "pad_token_id": 0}
    model.config.update(special)
    model.generation_config.update(**special)
    model.save_pretrained(pair)
    # All are opened from the file: how weights got into memory changes times by a few per cent.
    models = {"bert": EncoderDecoderModel.from_pretrained(pair).eval()}
    for name in GENERATORS:
        if name in variants and missing(name) is None:
            models[name] = ScratchBertForConditionalGeneration.from_pretrained(pair, padding_free=True).eval()
            if name != "ours":
                models[name].optimize_for_inference(GENERATORS[name])
    return models


def steps(model, batch: Batch, tokens: int, beams: int) -> tuple[list[float], torch.Tensor]:
    """The seconds that each token after the first takes, and the tokens, `(B, T)`."""
    clock = Clock()
    ids = model.generate(
        **batch.inputs,
        min_new_tokens=tokens,
        max_new_tokens=tokens,
        do_sample=False,
        num_beams=beams,
        stopping_criteria=[clock],
    )
    return [later - earlier for earlier, later in zip(clock.times, clock.times[1:], strict=False)], ids


def share_of_equal(tokens: torch.Tensor, reference: torch.Tensor) -> float:
    """The share of generated tokens, `(B, T)` after the start token, that are those of the reference."""
    return (tokens[:, 1:] == reference[:, 1:]).float().mean().item()


def decode(folder: Path, variants, cases: list[tuple[int, str]], tokens: int, repetitions: int, bandwidth, seed: int):
    """Yields a row for each case, a batch size and a way of decoding, with the seconds of one step.

    The tokens of variants in float32 are compared exactly; of the others, the share of equal ones is reported.
    """
    models = generators(folder, variants, seed)
    config = models["bert"].config.decoder
    rounded = [name for name in models if VARIANTS[name].precision != "float32"]
    reading = decoding_step_bytes(models["bert"]) / bandwidth
    generator = torch.Generator().manual_seed(seed)
    for batch_size, way in cases:
        batch = pad(random_rows(config, [48, *[64] * (batch_size - 1)], generator))  # the first is shorter
        seconds, same = {name: [] for name in models}, True
        for repetition in range(repetitions + 1):
            ids = {}
            for name in sorted(models, reverse=bool(repetition % 2)):
                took, ids[name] = steps(models[name], batch, tokens, BEAMS[way])
                seconds[name] += took if repetition else []  # the first one warms up
            same = same and all(torch.equal(ids[name], ids["bert"]) for name in ids.keys() - rounded)
        medians = {name: statistics.median(times) for name, times in seconds.items()}
        yield {
            "batch": batch_size,
            "decoding": way,
            "seconds": medians,
            "vs_bert": {name: medians["bert"] / value for name, value in medians.items()},
            "memory_lower_bound": reading,
            "gemm_lower_bound": decoding_step_seconds(config, batch_size * BEAMS[way]),
            "same_tokens": same,
            "equal_tokens": {name: share_of_equal(ids[name], ids["bert"]) for name in rounded},
        }
