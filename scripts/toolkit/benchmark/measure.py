"""Timing of the variants in turns, in one process, and the report of the results."""

import tempfile
from pathlib import Path

import torch
from transformers import BertConfig, BertModel

from modeling_scratchbert import ScratchBertModel
from toolkit.benchmark import ENCODER_WORKLOADS
from toolkit.benchmark.cuda import run_on_gpu
from toolkit.benchmark.lower_bound import encoder_seconds
from toolkit.benchmark.steps import decode, train
from toolkit.benchmark.timing import interleave, timed_rows
from toolkit.benchmark.variants import VARIANTS, Run, missing, open_variants, peak_memory
from toolkit.benchmark.workloads import Batch, linearity_batches, make_batches
from toolkit.machine import describe, lines, measure_again

LINEARITY_SIZES = [2**i for i in range(9)]
LINEARITY_FILL_RATES = [i / 10 for i in range(1, 11)]

HEADER = "variant                  seq/s  tokens/s  ms/batch  vs bert  × fill     bound  max abs"


# ----------------------------------------------------------------------------------------------------------------- rows


def rows_of(workload: str, runs: dict[str, Run], batches: list[Batch], config, machine: dict, repetitions: int) -> list:
    """A row for each variant."""
    lengths = [length for batch in batches for length in batch.lengths]
    rows = timed_rows(workload, runs, batches, repetitions)
    for row in rows:
        variant = VARIANTS[row["variant"]]
        row["precision"] = variant.precision
        if row["error"] is None:
            total = row["seconds_per_batch"] * len(batches)
            row |= {
                "vs_bert_times_fill_rate": row["vs_bert"] * row["fill_rate"],
                "gemm_gflops": machine["gflops"][variant.dtype],
                "lower_bound_share": encoder_seconds(config, lengths, machine, variant.dtype) / total,
                "peak_mib": None,
            }
    return rows


def linearity_rows(run: Run, config, machine: dict, repetitions: int, seed: int) -> list[dict]:
    """Time against non-padding tokens: a row for each batch."""
    batches = linearity_batches(config, LINEARITY_SIZES, LINEARITY_FILL_RATES, seed)
    for _, batch in batches:
        run(batch.inputs)
    seconds = interleave({"run": run}, [batch for _, batch in batches], repetitions)["run"]
    return [
        {
            "series": series,
            "sequences": len(batch.lengths),
            "fill_rate": batch.fill_rate,
            "tokens": batch.tokens,
            "seconds": took,
            "lower_bound": encoder_seconds(config, batch.lengths, machine, "float32"),
        }
        for (series, batch), took in zip(batches, seconds, strict=True)
    ]


# --------------------------------------------------------------------------------------------------------------- report


def failed(row: dict) -> bool:
    """Whether a row of our variants has an error or differs from BertModel."""
    tolerance = VARIANTS[row["variant"]].tolerance
    if row["error"] is not None:
        return row["variant"].startswith("ours")
    return tolerance is not None and (row["max_abs"] is None or row["max_abs"] > tolerance)


def failures(report: dict) -> list[str]:
    """The reasons for exit code 1, in words."""
    found = [
        f"{name}: {reason}"
        for name, reason in report["unavailable"].items()
        if name.startswith("ours") and missing(name) is None
    ]
    found += [
        f"{row['variant']} on {row['workload']}: {row['error'] or 'differs from BertModel'}"
        for row in report["rows"]
        if failed(row)
    ]
    found += [
        f"decoding, batch {row['batch']}, {row['decoding']}: tokens differ from EncoderDecoderModel"
        for row in report["decoding"]
        if not row["same_tokens"]
    ]
    if report["cuda"] is not None:
        found += [f"ours on the GPU: {reason}" for reason in ours_on_gpu(report["cuda"])]
    return found


def ours_on_gpu(report: dict) -> list[str]:
    """Why our variant failed on the GPU. In bfloat16, differences to BertModel are reported only."""
    found = [report["unavailable"].get("ours")]
    found += [row["error"] for row in report["rows"] if row["variant"] == "ours"]
    return [reason for reason in found if reason is not None]


def line(row: dict) -> str:
    if row["error"] is not None:
        return f"{row['variant']:21} {row['error']}"
    wrong = "  WRONG" if failed(row) else ""
    difference = "nan" if row["max_abs"] is None else f"{row['max_abs']:.1e}"
    memory = "" if row["peak_mib"] is None else f"  peak {row['peak_mib']:.0f} MiB"
    return (
        f"{row['variant']:21} {row['sequences_per_second']:8.1f} {row['tokens_per_second']:9.0f} "
        f"{1000 * row['seconds_per_batch']:9.1f} {row['vs_bert']:8.2f} {row['vs_bert_times_fill_rate']:7.2f} "
        f"{row['lower_bound_share']:9.0%} {difference:>8}{memory}{wrong}"
    )


def linearity_line(row: dict) -> str:
    return (
        f"{row['series']:9} {row['sequences']:4} sequences, fill rate {row['fill_rate']:4.0%}, "
        f"{row['tokens']:6} tokens {1000 * row['seconds']:8.1f} ms, lower bound {1000 * row['lower_bound']:8.1f} ms"
    )


def print_lines(*lines: str) -> None:
    print("\n".join(lines), flush=True)


def print_machine(machine: dict) -> None:
    rates = ", ".join(f"{rate:.0f} GFLOP/s {dtype}" for dtype, rate in machine["gflops"].items())
    print_lines(
        *lines(machine),
        f"threads: {machine['threads']}; matrix multiplication: {rates}; memory: {machine['bandwidth_gb']:.1f} GB/s",
    )


def print_training(row: dict) -> None:
    took = ", ".join(f"{name} {1000 * value:.0f} ms" for name, value in row["seconds"].items())
    print_lines(
        "\ntraining: a step (forward, backward, AdamW) on 32 reviews",
        f"{took}: speed-up {row['vs_bert']:.2f}; losses differ by at most {row['loss_difference']:.1e}, "
        f"the gradients of the first step by {row['gradient_difference']:.1e} of their norm",
    )


def print_decoding(row: dict) -> None:
    took = "  ".join(
        f"{name} {1000 * value:.1f} ms (×{row['vs_bert'][name]:.2f})" for name, value in row["seconds"].items()
    )
    equal = ", ".join(f"{name} {share:.1%}" for name, share in row["equal_tokens"].items())
    print_lines(
        f"batch {row['batch']:2} {row['decoding']:7} {took}  lower bounds in float32: "
        f"memory {1000 * row['memory_lower_bound']:.1f} ms, GEMM {1000 * row['gemm_lower_bound']:.1f} ms"
        f"{f'  equal tokens: {equal}' if equal else ''}{'' if row['same_tokens'] else '  TOKENS DIFFER'}"
    )


def print_cuda(report: dict | None) -> None:
    if report is None:
        print_lines("\nskipped cuda: this machine has no CUDA GPU that torch can use")
        return
    print_lines(f"\ncuda: {report['gpu']}, bfloat16")
    for name, reason in report["unavailable"].items():
        print_lines(f"skipped {name}: {reason}")
    for row in report["rows"]:
        print_lines(f"{row['workload']:9} (fill rate {row['fill_rate']:4.0%}) {cuda_line(row)}")


def cuda_line(row: dict) -> str:
    if row["error"] is not None:
        return f"{row['variant']:10} {row['error']}"
    difference = "nan" if row["max_abs"] is None else f"{row['max_abs']:.1e}"
    return (
        f"{row['variant']:10} {row['sequences_per_second']:9.1f} seq/s {row['tokens_per_second']:10.0f} tokens/s "
        f"{1000 * row['seconds_per_batch']:8.2f} ms/batch  ×{row['vs_bert']:.2f}  max abs {difference}"
    )


# ----------------------------------------------------------------------------------------------------------------- runs


def save_model(source: str | None, folder: Path, seed: int):
    """Writes the weights that all variants open, as a BERT folder. Returns the model's configuration."""
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
        shape = f"{len(batches)} × {len(batches[0].lengths)} sequences, fill rate {rows[0]['fill_rate']:.0%}"
        print_lines(f"\n{workload}: {shape}", HEADER)
        for row in rows:
            if args.memory and row["error"] is None:
                largest_batch = max(batches, key=lambda batch: batch.input_ids.numel())
                row["peak_mib"] = peak_memory(row["variant"], folder, args.threads, largest_batch)
            print_lines(line(row))
        report["rows"] += rows


def run_steps(report: dict, runs: dict[str, Run], config, folder: Path, args) -> None:
    if "linearity" in args.workloads and "ours-optimised" in runs:
        report["linearity"] = linearity_rows(
            runs["ours-optimised"], config, report["machine"], args.repetitions, args.seed
        )
        print_lines("\nlinearity: ours-optimised", *map(linearity_line, report["linearity"]))
    runs.clear()  # the steps below open their own models
    if "training" in args.workloads:
        batches = make_batches("training", config, args.model, args.batches, args.seed)
        report["training"] = train(folder, batches, args.repetitions)
        print_training(report["training"])
    if "decoding" in args.workloads:
        print_lines(f"\ndecoding: a step of {args.tokens}, from sources of 64 tokens")
        measure_again(report["machine"], config)
        bandwidth = report["machine"]["bandwidth_gb"] * 1e9
        for row in decode(folder, args.variants, args.cases, args.tokens, args.repetitions, bandwidth, args.seed):
            report["decoding"].append(row)
            print_decoding(row)
    if "cuda" in args.workloads:
        report["cuda"] = run_on_gpu(folder, config, args.model, args.batches, args.repetitions, args.seed)
        print_cuda(report["cuda"])


def benchmark(args) -> dict:
    """Runs the workloads, prints each result, and returns the report, as it is written into the JSON file.

    Args:
        args: as the command `benchmark` parses them.

    Raises:
        RuntimeError: BertModel cannot be opened.
    """
    torch.set_num_threads(args.threads)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        config = save_model(args.model, folder, args.seed)
        machine = describe(config, args.threads)
        print_machine(machine)
        runs, unavailable = open_variants(list(dict.fromkeys(["bert", *args.variants])), folder, args.threads)
        if "bert" in unavailable:
            raise RuntimeError(f"BertModel, the reference, cannot be opened: {unavailable['bert']}")
        for name, reason in unavailable.items():
            print_lines(f"skipped {name}: {reason}")
        report = {"machine": machine, "model": args.model or "BERT-base, random weights", "config": config.to_dict(),
                  "repetitions": args.repetitions, "seed": args.seed, "unavailable": unavailable,
                  "rows": [], "linearity": [], "training": None, "decoding": [], "cuda": None}  # fmt: skip
        run_encoder(report, runs, config, folder, args)
        run_steps(report, runs, config, folder, args)
    report["failures"] = failures(report)
    return report
