"""Timing of the variants in turns, in one process, and the report of the results."""

import math
import tempfile
from pathlib import Path

import torch
from transformers import BertConfig, BertModel

from modeling_scratchbert import ScratchBertModel
from toolkit.benchmark import ENCODER_WORKLOADS
from toolkit.benchmark.steps import decode, train
from toolkit.benchmark.timing import describe, encoder_seconds, interleave, measure_again
from toolkit.benchmark.variants import ON_GPU, VARIANTS, Run, missing, open_variants, peak_memory
from toolkit.benchmark.workloads import Batch, linearity_batches, make_batches
from toolkit.cli import about, described, table
from toolkit.comparison import largest
from toolkit.hub import check_source
from toolkit.machine import lines

LINEARITY_SIZES = [2**i for i in range(9)]
LINEARITY_FILL_RATES = [i / 10 for i in range(1, 11)]


# ----------------------------------------------------------------------------------------------------------------- rows


def deviation(hidden: torch.Tensor, reference: torch.Tensor, batch: Batch) -> float:
    """The largest difference at a non-padding token; infinite if a value there is NaN."""
    return largest((hidden.float().cpu() - reference.float())[batch.attention_mask.bool()])


def warm_up(runs: dict[str, Run], batches: list[Batch]) -> tuple[dict[str, float], dict[str, str]]:
    """Runs each variant once on each batch: its difference to BertModel, or why it fails."""
    deviations, reasons = dict.fromkeys(runs, 0.0), {}
    for batch in batches:
        reference = runs["bert"](batch.inputs)
        for name in runs.keys() - {"bert"} - reasons.keys():
            try:
                deviations[name] = max(deviations[name], deviation(runs[name](batch.inputs), reference, batch))
            except Exception as error:  # a runtime can raise any exception
                reasons[name] = described(error)
    return deviations, reasons


def rows_of(workload: str, runs: dict[str, Run], batches: list[Batch], config, machine: dict, repetitions: int) -> list:
    """A row for each variant: its speed, and its difference to BertModel, or the error."""
    deviations, reasons = warm_up(runs, batches)
    working = {name: run for name, run in runs.items() if name not in reasons}
    seconds = interleave(working, [batch.inputs for batch in batches], repetitions)
    lengths = [length for batch in batches for length in batch.lengths]
    fill_rate = sum(lengths) / sum(batch.input_ids.numel() for batch in batches)
    rows = []
    for name in runs:
        variant = VARIANTS[name]
        rows.append({"workload": workload, "batches": len(batches), "sequences": len(lengths), "tokens": sum(lengths),
                     "fill_rate": fill_rate, "variant": name, "precision": variant.precision,
                     "error": reasons.get(name)})  # fmt: skip
        if name in reasons:
            continue
        total, speed_up = sum(seconds[name]), sum(seconds["bert"]) / sum(seconds[name])
        rows[-1] |= {"seconds_per_batch": total / len(batches), "sequences_per_second": len(lengths) / total,
                     "tokens_per_second": sum(lengths) / total, "vs_bert": speed_up,
                     "vs_bert_times_fill_rate": speed_up * fill_rate,
                     "max_abs": deviations[name] if math.isfinite(deviations[name]) else None,
                     "gemm_gflops": None, "lower_bound_share": None, "peak_mib": None}  # fmt: skip
        if variant.precision != ON_GPU:
            rows[-1]["gemm_gflops"] = machine["gflops"][variant.dtype]
            rows[-1]["lower_bound_share"] = encoder_seconds(config, lengths, machine, variant.dtype) / total
    return rows


def linearity_rows(run: Run, config, machine: dict, repetitions: int, seed: int) -> list[dict]:
    """Time against non-padding tokens: a row for each batch."""
    batches = linearity_batches(config, LINEARITY_SIZES, LINEARITY_FILL_RATES, seed)
    for _, batch in batches:
        run(batch.inputs)
    seconds = interleave({"run": run}, [batch.inputs for _, batch in batches], repetitions)["run"]
    return [{"series": series, "sequences": len(batch.lengths), "fill_rate": batch.fill_rate, "tokens": batch.tokens,
             "seconds": took, "lower_bound": encoder_seconds(config, batch.lengths, machine, "float32")}
            for (series, batch), took in zip(batches, seconds, strict=True)]  # fmt: skip


# --------------------------------------------------------------------------------------------------------------- report


def failed(row: dict) -> bool:
    """Whether a row of our variants has an error or differs from BertModel."""
    tolerance = VARIANTS[row["variant"]].tolerance
    if row["error"] is not None:
        return row["variant"].startswith("ours")
    return tolerance is not None and (row["max_abs"] is None or row["max_abs"] > tolerance)


def failures(report: dict) -> list[str]:
    """The reasons for exit code 1, in words."""
    found = [f"{name}: {reason}" for name, reason in report["unavailable"].items()
             if name.startswith("ours") and missing(name) is None]  # fmt: skip
    found += [f"{row['variant']} on {row['workload']}: {row['error'] or 'differs from BertModel'}"
              for row in report["rows"] if failed(row)]  # fmt: skip
    found += [f"decoding, batch {row['batch']}, {row['decoding']}: tokens differ from EncoderDecoderModel"
              for row in report["decoding"] if not row["same_tokens"]]  # fmt: skip
    return found


def print_rows(rows: list[dict]) -> None:
    """Prints the rows of a workload."""
    header = ("variant", "seq/s", "tokens/s", "ms/batch", "vs bert", "× fill", "bound", "max abs")
    shape = f"{rows[0]['batches']} × {rows[0]['sequences'] // rows[0]['batches']} sequences"
    print_lines(f"\n{rows[0]['workload']}: {shape}, fill rate {rows[0]['fill_rate']:.0%}",
                table([header, *(cells(row) for row in rows if row["error"] is None)]),
                *(f"{row['variant']}: {row['error']}" for row in rows if row["error"] is not None))  # fmt: skip


def cells(row: dict) -> tuple[str, ...]:
    share, peak, difference = (row[name] for name in ("lower_bound_share", "peak_mib", "max_abs"))
    max_abs = "nan" if difference is None else f"{difference:.1e}"
    return (row["variant"] + ("  WRONG" if failed(row) else ""), f"{row['sequences_per_second']:.1f}",
            f"{row['tokens_per_second']:.0f}", f"{1000 * row['seconds_per_batch']:.1f}", f"{row['vs_bert']:.2f}",
            f"{row['vs_bert_times_fill_rate']:.2f}", "" if share is None else f"{share:.0%}",
            max_abs + ("" if peak is None else f"  peak {peak:.0f} MiB"))  # fmt: skip


def print_linearity(rows: list[dict]) -> None:
    lines = [("varied", "sequences", "fill rate", "tokens", "ms", "bound, ms")]
    for row in rows:
        numbers = (f"{1000 * row[name]:.1f}" for name in ("seconds", "lower_bound"))
        lines.append((row["series"], str(row["sequences"]), f"{row['fill_rate']:.0%}", str(row["tokens"]), *numbers))
    print_lines("\nlinearity: ours-optimised", table(lines))


def print_lines(*lines: str) -> None:
    for line in lines:
        print(line, flush=True)


def print_machine(machine: dict) -> None:
    rates = ", ".join(f"{rate:.0f} GFLOP/s {dtype}" for dtype, rate in machine["gflops"].items())
    rates += f"; memory: {machine['bandwidth_gb']:.1f} GB/s"
    print_lines(*lines(machine), f"threads: {machine['threads']}; matrix multiplication: {rates}")


def print_training(row: dict) -> None:
    took = ", ".join(f"{name} {1000 * value:.0f} ms" for name, value in row["seconds"].items())
    print_lines(f"\ntraining: a step (forward, backward, AdamW) on 32 reviews\n{took}: speed-up {row['vs_bert']:.2f}; "
                f"losses differ by at most {row['loss_difference']:.1e}, the gradients of the first step by "
                f"{row['gradient_difference']:.1e} of their norm")  # fmt: skip


def print_decoding(row: dict) -> None:
    took = "  ".join(f"{name} {1000 * value:.1f} ms (×{row['vs_bert'][name]:.2f})"
                     for name, value in row["seconds"].items())  # fmt: skip
    equal = ", ".join(f"{name} {share:.1%}" for name, share in row["equal_tokens"].items())
    print_lines(f"batch {row['batch']:2} {row['decoding']:7} {took}  lower bounds in float32: "
                f"memory {1000 * row['memory_lower_bound']:.1f} ms, GEMM {1000 * row['gemm_lower_bound']:.1f} ms"
                f"{f'  equal tokens: {equal}' if equal else ''}"
                f"{'' if row['same_tokens'] else '  TOKENS DIFFER'}")  # fmt: skip


# ----------------------------------------------------------------------------------------------------------------- runs


def save_model(source: str | None, folder: Path, seed: int):
    """Writes the weights that all variants open, as a BERT folder. Returns the model's configuration."""
    if source is None:
        torch.manual_seed(seed)
        BertModel(BertConfig()).save_pretrained(folder)
    else:
        with about(source):
            check_source(source)
            ScratchBertModel.from_pretrained(source, dtype=torch.float32).save_as_bert(folder)
    return BertConfig.from_pretrained(folder)


def run_encoder(report: dict, runs: dict[str, Run], config, folder: Path, args) -> None:
    for workload in (name for name in ENCODER_WORKLOADS if name in args.workloads):
        batches = make_batches(workload, config, args.model, args.batches, args.seed)
        measure_again(report["machine"], config)
        rows = rows_of(workload, runs, batches, config, report["machine"], args.repetitions)
        if args.memory:
            largest_batch = max(batches, key=lambda batch: batch.input_ids.numel())
            for row in (row for row in rows if row["error"] is None):
                row["peak_mib"] = peak_memory(row["variant"], folder, args.threads, largest_batch)
        print_rows(rows)
        report["rows"] += rows


def run_steps(report: dict, runs: dict[str, Run], config, folder: Path, args) -> None:
    if "linearity" in args.workloads and "ours-optimised" in runs:
        report["linearity"] = linearity_rows(runs["ours-optimised"], config, report["machine"], args.repetitions,
                                             args.seed)  # fmt: skip
        print_linearity(report["linearity"])
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
        print_lines(*(f"skipped {name}: {reason}" for name, reason in unavailable.items()))
        report = {"machine": machine, "model": args.model or "BERT-base, random weights", "config": config.to_dict(),
                  "repetitions": args.repetitions, "seed": args.seed, "unavailable": unavailable,
                  "rows": [], "linearity": [], "training": None, "decoding": []}  # fmt: skip
        run_encoder(report, runs, config, folder, args)
        run_steps(report, runs, config, folder, args)
    report["failures"] = failures(report)
    return report
