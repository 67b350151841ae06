#!/usr/bin/env python
"""How long a step of decoding takes, beside transformers' EncoderDecoderModel with the same weights.

    benchmark_decoding.py
    benchmark_decoding.py --batch-sizes 1 --layers 2 --json decoding.json

Two BERTs of base shape, random weights, float32. Both models decode the same batch, in turns, in one process; a step is
the time between two tokens, and the table has its median. The floor is the time in which this machine reads, at the
bandwidth measured in the same run, the weights that a step cannot do without: the decoder's, but for the keys and
values of the encoder's output, which are computed once, and the vocabulary's matrix.

Exit code: 0, or 1 if the two models do not give the same tokens.
"""

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
import transformers
from transformers import BertConfig, EncoderDecoderConfig, EncoderDecoderModel, StoppingCriteria

from modeling_scratchbert import ScratchBertForConditionalGeneration

WAYS = {"greedy": {"num_beams": 1}, "beam 4": {"num_beams": 4}}


class Clock(StoppingCriteria):
    """Is asked after each token whether to stop; notes the time and never says yes."""

    def __init__(self):
        self.times = []

    def __call__(self, input_ids, scores, **kwargs):
        self.times.append(time.perf_counter())
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)


def make_models(layers: int, seed: int) -> dict[str, torch.nn.Module]:
    """Ours and the twin, with the same weights."""
    torch.manual_seed(seed)
    config = EncoderDecoderConfig.from_encoder_decoder_configs(
        BertConfig(num_hidden_layers=layers),
        BertConfig(num_hidden_layers=layers, is_decoder=True, add_cross_attention=True),
        decoder_start_token_id=101,
        eos_token_id=102,
        pad_token_id=0,
    )
    with tempfile.TemporaryDirectory() as folder:
        EncoderDecoderModel(config).save_pretrained(folder)
        # Both from the file: how weights came into memory makes a difference of a few per cent.
        ours = ScratchBertForConditionalGeneration.from_pretrained(folder)
        twin = EncoderDecoderModel.from_pretrained(folder)
    return {"ours": ours.eval(), "twin": twin.eval()}


def steps(model, inputs: dict, tokens: int, options: dict) -> tuple[list[float], torch.Tensor]:
    """The seconds that each token after the first took, and the tokens."""
    clock = Clock()
    ids = model.generate(
        **inputs, min_new_tokens=tokens, max_new_tokens=tokens, do_sample=False, stopping_criteria=[clock], **options
    )
    return [later - earlier for earlier, later in zip(clock.times, clock.times[1:], strict=False)], ids


def bandwidth(size: int = 2**28, repetitions: int = 7) -> float:
    """Bytes a second at which this machine reads float32 numbers, `size` of them, far more than any cache holds."""
    numbers = torch.ones(size)
    numbers.sum()
    seconds = []
    for _ in range(repetitions):
        started = time.perf_counter()
        numbers.sum()
        seconds.append(time.perf_counter() - started)
    return 4 * size / statistics.median(seconds)


def weights_of_a_step(model) -> int:
    """The bytes of weights that decoding one token cannot do without."""
    once = ("cross_attention.key.", "cross_attention.value.")
    blocks = [
        weight
        for name, weight in model.get_decoder().encoder.named_parameters()
        if not any(part in name for part in once)
    ]
    return sum(weight.numel() * weight.element_size() for weight in [*blocks, *model.lm_head.parameters()])


def compare(models: dict, args: argparse.Namespace, floor: float) -> tuple[list[dict], bool]:
    """A row for each batch size and way of decoding, and whether the tokens were the same throughout."""
    rows, same = [], True
    print(f"{'batch':>5}  {'decoding':8}  {'ours':>9}  {'twin':>9}  {'twin / ours':>11}  {'floor':>9}")
    for batch in args.batch_sizes:
        inputs = {"input_ids": torch.randint(999, 30522, (batch, args.source)), "attention_mask": None}
        inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
        inputs["attention_mask"][0, args.source * 3 // 4 :] = batch == 1  # a ragged batch, as batches of text are
        for way, options in WAYS.items():
            seconds = {name: [] for name in models}
            for repetition in range(args.repetitions + 1):
                ids = {}
                for name in sorted(models, reverse=repetition % 2):
                    took, ids[name] = steps(models[name], inputs, args.tokens, options)
                    seconds[name] += took if repetition else []  # the first one warms up
                same = same and torch.equal(ids["ours"], ids["twin"])
            ours, twin = (1000 * statistics.median(seconds[name]) for name in ("ours", "twin"))
            rows.append({"batch": batch, "decoding": way, "ours_ms": ours, "twin_ms": twin, "ratio": twin / ours})
            print(
                f"{batch:5}  {way:8}  {ours:6.1f} ms  {twin:6.1f} ms  {twin / ours:11.3f}  {floor:6.1f} ms", flush=True
            )
    return rows, same


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--layers", type=int, default=12, help="of the encoder, and of the decoder (default: 12)")
    parser.add_argument("--source", type=int, default=64, help="tokens of the source (default: 64)")
    parser.add_argument("--tokens", type=int, default=24, help="tokens to decode (default: 24)")
    parser.add_argument("--repetitions", type=int, default=3, help="of each run, after one to warm up (default: 3)")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="default: as many as there are cores")
    parser.add_argument("--json", type=Path, help="write the numbers to this file as well")
    args = parser.parse_args(argv)
    torch.set_num_threads(args.threads)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()

    models = make_models(args.layers, seed=0)
    speed, size = bandwidth(), weights_of_a_step(models["ours"])
    floor = 1000 * size / speed
    print(f"{args.threads} threads, torch {torch.__version__}, transformers {transformers.__version__}, float32")
    print(f"floor: {size / 1e6:.0f} MB of weights a step at {speed / 1e9:.1f} GB/s = {floor:.1f} ms\n")
    rows, same = compare(models, args, floor)
    print(f"\nThe tokens were {'the same' if same else 'NOT the same'} throughout.")
    if args.json is not None:
        machine = {"processor": platform.processor() or platform.machine(), "threads": args.threads}
        numbers = {**machine, "bandwidth": speed, "bytes_a_step": size, "floor_ms": floor, "rows": rows}
        args.json.write_text(json.dumps(numbers, indent=2) + "\n", encoding="utf-8")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
