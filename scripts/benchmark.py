#!/usr/bin/env python
"""How fast the model runs, beside transformers' BertModel and other people's runtimes, with the same weights.

    benchmark.py --json speed.json --plot speed.png
    benchmark.py --quick
    benchmark.py --workloads reviews single --variants openvino ours-optimised --memory

Everything runs in one process, in turns: for each repetition and batch, each variant once. Everyone is given the same
padded batch with its mask. The time of a batch is the median over the repetitions; a row has the mean over its batches.

Columns: sequences and real tokens a second, the time of a batch, how many times as fast as BertModel (the variant
"bert": sdpa, float32; always timed), the same multiplied by the batches' fill, which is what would be left of it had
nothing been padded, the share of the time that the blocks' matrix products on real tokens would take at the best rate
measured here, and the largest absolute difference to BertModel on real tokens.

Exit code: 0; 1 if ours gives other numbers than BertModel (float32, more than 1e-5), other tokens, or fails; 2 if the
benchmark cannot run. A variant of other people's that fails is reported with the reason.
"""

import argparse
import importlib.util
import json
import math
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import BertConfig, BertModel

from modeling_scratchbert import ScratchBertModel

from benchmark_machine import describe, floor, measure_again
from benchmark_plot import plot
from benchmark_steps import WAYS, decode, train
from benchmark_variants import VARIANTS, Run, first_line, open_variants, peak_memory, quiet
from benchmark_workloads import Batch, line_batches, make_batches
from check_parity import largest
from output import written

ENCODER_WORKLOADS = ("reviews", "mix", "full-128", "full-512", "single")
WORKLOADS = (*ENCODER_WORKLOADS, "training", "decoding", "linearity")
FULL = {
    "workloads": list(WORKLOADS),
    "variants": list(VARIANTS),
    "repetitions": 5,
    "batches": 4,
    "cases": [(batch, way) for batch in (1, 8, 32) for way in WAYS],
    "tokens": 24,
}
QUICK = {
    "workloads": ["reviews", "mix", "full-128", "single", "decoding"],
    "variants": ["bert", "openvino", "ours", "ours-optimised"],
    "repetitions": 2,
    "batches": 1,
    "cases": [(8, "greedy")],
    "tokens": 8,
}
LINE_SIZES = [2**i for i in range(9)]
LINE_FILLS = [i / 10 for i in range(1, 11)]
# Threads of the runtime that was timed last turn a little longer before they sleep; meanwhile nobody is timed.
PAUSE = 0.01
HEAD = "variant            seq/s  tokens/s  ms/batch  vs bert  × fill  of floor  max abs"


# --------------------------------------------------------------------------------------------------------------- timing


def deviation(hidden: torch.Tensor, reference: torch.Tensor, batch: Batch) -> float:
    """The largest difference on a real token; infinite if anything there is not a number."""
    return largest((hidden.float() - reference.float())[batch.attention_mask.bool()])


def warm_up(runs: dict[str, Run], batches: list[Batch]) -> tuple[dict[str, float], dict[str, str]]:
    """Each variant on each batch once: how far it is from BertModel, or why it fails."""
    deviations, reasons = dict.fromkeys(runs, 0.0), {}
    for batch in batches:
        reference = runs["bert"](batch.inputs)
        for name in runs.keys() - {"bert"} - reasons.keys():
            try:
                found = deviation(runs[name](batch.inputs), reference, batch)
                deviations[name] = max(deviations[name], found)
            except Exception as error:  # other people's libraries raise whatever they like
                reasons[name] = first_line(error)
    return deviations, reasons


def interleave(runs: dict[str, Run], batches: list[Batch], repetitions: int) -> dict[str, list[float]]:
    """The seconds that each variant takes for each batch: the median over the repetitions."""
    times = {name: [[] for _ in batches] for name in runs}
    for repetition in range(repetitions):
        order = list(runs) if repetition % 2 == 0 else list(reversed(runs))
        for i, batch in enumerate(batches):
            for name in order:
                time.sleep(PAUSE)
                started = time.perf_counter()
                runs[name](batch.inputs)
                times[name][i].append(time.perf_counter() - started)
    return {name: [statistics.median(each) for each in of_batches] for name, of_batches in times.items()}


def rows_of(workload: str, runs: dict[str, Run], batches: list[Batch], config, machine: dict, repetitions: int) -> list:
    """A row for each variant."""
    deviations, reasons = warm_up(runs, batches)
    seconds = interleave({name: run for name, run in runs.items() if name not in reasons}, batches, repetitions)
    lengths = [length for batch in batches for length in batch.lengths]
    fill = sum(lengths) / sum(batch.input_ids.numel() for batch in batches)
    common = {"workload": workload, "batches": len(batches), "sequences": len(lengths), "real_tokens": sum(lengths)}
    rows = []
    for name in runs:
        row = {**common, "fill": fill, "variant": name, "error": reasons.get(name)}
        if name not in reasons:
            total, faster = sum(seconds[name]), sum(seconds["bert"]) / sum(seconds[name])
            row |= {
                "seconds_per_batch": total / len(batches),
                "sequences_per_second": len(lengths) / total,
                "tokens_per_second": sum(lengths) / total,
                "vs_bert": faster,
                "vs_bert_times_fill": faster * fill,
                "floor_gflops": machine["gflops"][VARIANTS[name].dtype],
                "of_floor": floor(config, lengths, machine, VARIANTS[name].dtype) / total,
                "max_abs": deviations[name] if math.isfinite(deviations[name]) else None,
                "peak_mib": None,
            }
        rows.append(row)
    return rows


def line_of(run: Run, config, machine: dict, repetitions: int, seed: int) -> list[dict]:
    """Time against real tokens: a row for each batch."""
    batches = line_batches(config, LINE_SIZES, LINE_FILLS, seed)
    for _, batch in batches:
        run(batch.inputs)
    seconds = interleave({"it": run}, [batch for _, batch in batches], repetitions)["it"]
    return [
        {
            "series": series,
            "sequences": len(batch.lengths),
            "fill": batch.fill,
            "real_tokens": batch.tokens,
            "seconds": took,
            "floor": floor(config, batch.lengths, machine, "float32"),
        }
        for (series, batch), took in zip(batches, seconds, strict=True)
    ]


# --------------------------------------------------------------------------------------------------------------- report


def failed(row: dict) -> bool:
    """Whether a row is of ours and has an error or other numbers than BertModel."""
    tolerance = VARIANTS[row["variant"]].tolerance
    if row["error"] is not None:
        return row["variant"].startswith("ours")
    return tolerance is not None and (row["max_abs"] is None or row["max_abs"] > tolerance)


def failures(report: dict) -> list[str]:
    """What makes the exit code 1."""
    found = [f"{name}: {reason}" for name, reason in report["unavailable"].items() if name.startswith("ours")]
    found += [
        f"{row['variant']} on {row['workload']}: {row['error'] or 'other numbers than BertModel'}"
        for row in report["rows"]
        if failed(row)
    ]
    found += [
        f"decoding, batch {row['batch']}, {row['decoding']}: other tokens than EncoderDecoderModel"
        for row in report["decoding"]
        if not row["same_tokens"]
    ]
    return found


def line(row: dict) -> str:
    if row["error"] is not None:
        return f"{row['variant']:15} {row['error']}"
    wrong = "  WRONG" if failed(row) else ""
    difference = "nan" if row["max_abs"] is None else f"{row['max_abs']:.1e}"
    memory = "" if row["peak_mib"] is None else f"  peak {row['peak_mib']:.0f} MiB"
    return (
        f"{row['variant']:15} {row['sequences_per_second']:8.1f} {row['tokens_per_second']:9.0f} "
        f"{1000 * row['seconds_per_batch']:9.1f} {row['vs_bert']:8.2f} {row['vs_bert_times_fill']:7.2f} "
        f"{row['of_floor']:9.0%} {difference:>8}{memory}{wrong}"
    )


def say(*lines: str) -> None:
    print("\n".join(lines), flush=True)


def say_machine(machine: dict) -> None:
    libraries = ", ".join(f"{name} {version}" for name, version in machine["versions"].items() if version)
    rates = ", ".join(f"{rate:.0f} GFLOP/s {dtype}" for dtype, rate in machine["gflops"].items())
    say(
        f"{machine['processor']} ({', '.join(machine['flags'])}), {machine['cores']} cores, "
        f"{machine['threads']} threads",
        f"best products: {rates}; memory: {machine['bandwidth_gb']:.1f} GB/s",
        f"Python {machine['python']}, {libraries}",
    )


def say_training(row: dict) -> None:
    took = ", ".join(f"{name} {1000 * value:.0f} ms" for name, value in row["seconds"].items())
    say(
        "\ntraining: a step (forward, backward, AdamW) on 32 reviews",
        f"{took}: {row['vs_bert']:.2f} times as fast; losses differ by {row['loss_difference']:.1e} at most, "
        f"the first step's gradients by {row['gradient_difference']:.1e} of their norm",
    )


def say_decoding(row: dict) -> None:
    took = "  ".join(
        f"{name} {1000 * value:.1f} ms (×{row['vs_bert'][name]:.2f})" for name, value in row["seconds"].items()
    )
    say(
        f"batch {row['batch']:2} {row['decoding']:7} {took}  floors: reading {1000 * row['reading_floor']:.1f} ms, "
        f"products {1000 * row['products_floor']:.1f} ms{'' if row['same_tokens'] else '  OTHER TOKENS'}"
    )


def write_json(report: dict, path: Path) -> None:
    text = json.dumps(report, indent=2, allow_nan=False, ensure_ascii=False) + "\n"
    with written(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


# ----------------------------------------------------------------------------------------------------------------- main


def save_model(source: str | None, folder: Path, seed: int):
    """The weights that all variants open, as a BERT folder; the model's configuration."""
    if source is None:
        torch.manual_seed(seed)
        BertModel(BertConfig()).save_pretrained(folder)
    else:
        ScratchBertModel.from_pretrained(source, dtype=torch.float32).save_as_bert(folder)
    return BertConfig.from_pretrained(folder)


def run_encoder(report: dict, runs: dict[str, Run], config, folder: Path, args) -> None:
    for workload in (name for name in ENCODER_WORKLOADS if name in args.workloads):
        batches = make_batches(workload, config, args.model, args.batches, args.seed)
        measure_again(report["machine"], config)
        rows = rows_of(workload, runs, batches, config, report["machine"], args.repetitions)
        shape = f"{len(batches)} × {len(batches[0].lengths)} sequences, {rows[0]['fill']:.0%} real tokens"
        say(f"\n{workload}: {shape}", HEAD)
        for row in rows:
            if args.memory and row["error"] is None:
                largest_batch = max(batches, key=lambda batch: batch.input_ids.numel())
                row["peak_mib"] = peak_memory(row["variant"], folder, args.threads, largest_batch)
            say(line(row))
        report["rows"] += rows


def run_steps(report: dict, runs: dict[str, Run], config, folder: Path, args) -> None:
    if "linearity" in args.workloads and "ours-optimised" in runs:
        rows = line_of(runs["ours-optimised"], config, report["machine"], args.repetitions, args.seed)
        report["linearity"] = rows
        say("\nlinearity: ours-optimised", *(
            f"{row['series']:9} {row['sequences']:4} sequences, {row['fill']:4.0%} full, {row['real_tokens']:6} tokens "
            f"{1000 * row['seconds']:8.1f} ms, floor {1000 * row['floor']:8.1f} ms" for row in rows))  # fmt: skip
    runs.clear()  # what comes now has models of its own
    if "training" in args.workloads:
        batches = make_batches("training", config, args.model, args.batches, args.seed)
        report["training"] = train(folder, batches, args.repetitions)
        say_training(report["training"])
    if "decoding" in args.workloads:
        say(f"\ndecoding: a step of {args.tokens}, from sources of 64 tokens")
        measure_again(report["machine"], config)
        bandwidth = report["machine"]["bandwidth_gb"] * 1e9
        for row in decode(folder, args.cases, args.tokens, args.repetitions, bandwidth, args.seed):
            report["decoding"].append(row)
            say_decoding(row)


def benchmark(args) -> dict:
    """Everything that was asked for, as it goes into the JSON file; printed as it comes."""
    torch.set_num_threads(args.threads)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        config = save_model(args.model, folder, args.seed)
        machine = describe(config, args.threads)
        say_machine(machine)
        runs, unavailable = open_variants(list(dict.fromkeys(["bert", *args.variants])), folder, args.threads)
        if "bert" in unavailable:
            raise RuntimeError(f"BertModel, which all are measured against, does not open: {unavailable['bert']}")
        for name, reason in unavailable.items():
            say(f"without {name}: {reason}")
        report = {"machine": machine, "model": args.model or "BERT-base, random weights", "config": config.to_dict(),
                  "repetitions": args.repetitions, "seed": args.seed, "unavailable": unavailable,
                  "rows": [], "linearity": [], "training": None, "decoding": []}  # fmt: skip
        run_encoder(report, runs, config, folder, args)
        run_steps(report, runs, config, folder, args)
    report["failures"] = failures(report)
    return report


def parse(argv: list[str] | None) -> argparse.Namespace:
    def positive(text: str) -> int:
        if (number := int(text)) < 1:
            raise argparse.ArgumentTypeError(f"{text} given; it wants 1 or more")
        return number

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a BERT or ScratchBert: a folder or hub id (default: BERT-base, random)")
    parser.add_argument("--quick", action="store_true", help="the short version: fewer of everything")
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, metavar="NAME", help=f"of {', '.join(WORKLOADS)}")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, metavar="NAME", help=f"of {', '.join(VARIANTS)}")
    parser.add_argument("--repetitions", type=positive, help="of each measurement (default: 5; quick: 2)")
    parser.add_argument("--batches", type=positive, help="of each workload (default: 4; quick: 1)")
    parser.add_argument("--threads", type=positive, default=os.cpu_count(), help="default: as many as there are cores")
    parser.add_argument("--memory", action="store_true", help="also the peak memory of each variant, in a new process")
    parser.add_argument("--seed", type=int, default=0, help="of weights, ids and lengths (default: 0)")
    parser.add_argument("--json", metavar="FILE", type=Path, help="write all numbers to this file")
    parser.add_argument("--plot", metavar="FILE.png", type=Path, help="draw tokens a second, and time against tokens")
    args = parser.parse_args(argv)
    for name, value in (QUICK if args.quick else FULL).items():
        if getattr(args, name, None) is None:
            setattr(args, name, value)
    return args


def check_files(args) -> None:
    """Whatever would keep the results from being written is said before any work."""
    for path in (args.json, args.plot):
        if path is not None and not path.parent.is_dir():
            raise OSError(f"{path} cannot be written: there is no folder {path.parent}.")
    if args.plot is None:
        return
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError("--plot needs matplotlib, which is not installed: pip install matplotlib")
    if set(args.workloads) <= {"training", "decoding"}:
        raise ValueError(f"--plot draws none of {' and '.join(args.workloads)}: leave it out, or name more --workloads")


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code."""
    args = parse(argv)
    quiet()
    try:
        check_files(args)
        report = benchmark(args)
        if args.json is not None:
            write_json(report, args.json)
        if args.plot is not None:
            plot(report, args.plot)
    except (OSError, ValueError, RuntimeError, StrictDataclassError) as error:
        print(f"benchmark: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    say("", *(report["failures"] or ["Ours agrees with BertModel throughout."]))
    return 1 if report["failures"] else 0


if __name__ == "__main__":
    sys.exit(main())
