"""The steps that the benchmark times beside whole batches: of training and of decoding."""

from functools import partial
from itertools import product
from pathlib import Path
from statistics import fmean

import torch
from transformers import BertForSequenceClassification, EncoderDecoderModel

from modeling_scratchbert import ScratchBertForConditionalGeneration, ScratchBertForSequenceClassification
from toolkit.benchmark.measure import interleave
from toolkit.benchmark.variants import missing
from toolkit.benchmark.workloads import random_batch

# The variants that generate, and the argument of optimize_for_inference().
GENERATORS = {"ours": None, "ours-optimised": torch.float32, "ours-bf16": torch.bfloat16, "ours-int8": "int8"}
TOKENS = 16  # that are generated


def train(folder: Path, batches: list[dict[str, torch.Tensor]], repetitions: int) -> dict:
    """The mean seconds of a step of each model on a batch with two labels: forward, backward and AdamW."""

    def step(model, optimizer, inputs) -> None:
        optimizer.zero_grad()
        model(**inputs).loss.backward()
        optimizer.step()

    options = {"num_labels": 2, "ignore_mismatched_sizes": True}  # the model may have a classifier
    models = {
        "bert": BertForSequenceClassification.from_pretrained(folder, **options),
        "ours": ScratchBertForSequenceClassification.from_pretrained(folder, padding_free=True, **options),
    }
    steps = {
        name: partial(step, model.train(), torch.optim.AdamW(model.parameters())) for name, model in models.items()
    }
    inputs = [{**batch, "labels": torch.arange(len(batch["input_ids"])) % 2} for batch in batches]
    seconds = {name: fmean(medians) for name, medians in interleave(steps, inputs, repetitions).items()}
    return {"seconds": seconds, "vs_bert": seconds["bert"] / seconds["ours"]}


def open_generators(folder: Path, variants: list[str]) -> dict[str, torch.nn.Module]:
    """EncoderDecoderModel and those of the variants that generate, with the same weights."""
    pair = folder / "encoder-decoder"
    model = EncoderDecoderModel.from_encoder_decoder_pretrained(folder, folder)
    special = {"decoder_start_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    model.config.update(special)
    model.generation_config.update(**special)
    model.save_pretrained(pair)
    # All are opened from the file: how weights got into memory changes times by a few per cent.
    models = {"bert": EncoderDecoderModel.from_pretrained(pair)}
    for name, dtype in GENERATORS.items():
        if name in variants and missing(name) is None:
            models[name] = ScratchBertForConditionalGeneration.from_pretrained(pair, padding_free=True)
            if dtype is not None:
                models[name].optimize_for_inference(dtype)
    return models


def generate(model, inputs: dict[str, torch.Tensor], beams: int, tokens: int) -> torch.Tensor:
    return model.generate(**inputs, min_new_tokens=tokens, max_new_tokens=tokens, num_beams=beams, do_sample=False)


def decode(folder: Path, config, args):
    """Yields a row for each batch size and way of decoding, with the median seconds of a step: what one more token
    takes, on average."""
    torch.manual_seed(0)
    models = open_generators(folder, args.variants)
    for batch_size, beams in [(8, 1)] if args.quick else product((1, 8, 32), (1, 4)):
        inputs = random_batch(config, [64] * batch_size, torch.Generator().manual_seed(0))
        runs = {name: partial(generate, model, inputs, beams) for name, model in models.items()}
        medians = interleave(runs, [1, TOKENS], args.repetitions)
        seconds = {name: (total - first) / (TOKENS - 1) for name, (first, total) in medians.items()}
        yield {
            "batch": batch_size,
            "decoding": "greedy" if beams == 1 else f"beam {beams}",
            "seconds": seconds,
            "vs_bert": {name: seconds["bert"] / each for name, each in seconds.items()},
        }
