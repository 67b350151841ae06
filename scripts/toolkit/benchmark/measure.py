"""Timing of the variants in turns, in one process or each in its own, and the report of the results."""

import gc
import math
import os
import statistics
import tempfile
from itertools import chain
from pathlib import Path

import torch
from torch.nn.functional import cosine_similarity
from transformers import BertConfig, BertModel

from modeling_scratchbert import ScratchBertModel
from toolkit.benchmark import ENCODER_WORKLOADS, SENTENCES
from toolkit.benchmark.steps import decode, train
from toolkit.benchmark.timing import describe, encoder_seconds, interleave, measure_again
from toolkit.benchmark.variants import ON_GPU, VARIANTS, Run, in_new_process, missing, open_variants, peak_memory
from toolkit.benchmark.workloads import Batch, make_batches
from toolkit.cli import about, described, table
from toolkit.compare.parity import largest
from toolkit.hub import check_source
from toolkit.machine import lines

TOLERANCE = 1e-5  # of our variants in float32
SENTENCE_REPETITIONS = 3  # of each sentence, in each process


# ----------------------------------------------------------------------------------------------------------------- rows


def differences(run: Run, batches: list[Batch]) -> dict[str, float]:
    """How the hidden states at non-padding tokens differ from BertModel's: the largest difference, infinite if any is
    NaN; and the lowest and the mean cosine between mean-pooled embeddings of a sequence."""
    max_abs, cosines = [], []
    for batch in batches:
        padding = batch.attention_mask[..., None] == 0
        pair = [states.cpu().double().masked_fill(padding, 0) for states in (run(batch.inputs), batch.reference)]
        max_abs.append(largest(pair[0] - pair[1]))
        cosines.append(cosine_similarity(*(states.sum(dim=1) for states in pair)))  # of sums, as of means
    return {
        "max_abs": max(max_abs),
        "cosine_lowest": torch.cat(cosines).min().item(),
        "cosine_mean": torch.cat(cosines).mean().item(),
    }


def measure(runs: dict[str, Run], batches: list[Batch], repetitions: int) -> dict[str, dict]:
    """What this process measures of each variant: its differences, and its seconds for all batches; or the error."""
    measured: dict[str, dict] = {name: {"process": os.getpid(), "error": None} for name in runs}
    for name, run in runs.items():
        try:
            measured[name]["differences"] = differences(run, batches)  # which warms up, too
        except Exception as error:  # a runtime can raise any exception
            measured[name]["error"] = described(error)
    working = {name: run for name, run in runs.items() if measured[name]["error"] is None}
    for name, seconds in interleave(working, [batch.inputs for batch in batches], repetitions).items():
        measured[name]["seconds"] = sum(seconds)
    return measured


def measure_alone(build, folder: Path, threads: int, workloads: dict[str, list[Batch]]) -> dict[str, dict]:
    """What this process measures of one variant, by workload."""
    torch.set_num_threads(threads)
    run = build(folder, threads)
    return {name: measure({"": run}, batches, SENTENCE_REPETITIONS)[""] for name, batches in workloads.items()}


def measurements(runs: dict[str, Run], workloads: dict[str, list[Batch]], folder: Path, args):
    """Yields each workload, with what each process measures of each variant. Single sentences have a new process for
    each variant, and no other variant is open then: in one process, variants would disturb one another, by threads that
    spin for a while after a call, and in the caches."""
    for name in (name for name in workloads if name not in SENTENCES):
        yield name, {variant: [each] for variant, each in measure(runs, workloads[name], args.repetitions).items()}
    names, sentences = list(runs), {name: batches for name, batches in workloads.items() if name in SENTENCES}
    measured: dict[str, dict] = {workload: {name: [] for name in names} for workload in sentences}
    runs.clear()
    gc.collect()
    for i in range(args.processes if sentences else 0):
        for name in names if i % 2 == 0 else reversed(names):
            try:
                found = in_new_process(measure_alone, VARIANTS[name].build, folder, args.threads, sentences)
            except Exception as error:  # also if the process crashes
                found = {workload: {"process": None, "error": described(error)} for workload in sentences}
            for workload in sentences:
                measured[workload][name].append(found[workload])
    yield from measured.items()


def rows_of(workload: str, measured: dict[str, list[dict]], batches: list[Batch], config, machine: dict) -> list[dict]:
    """A row for each variant: its speed, by the median over its processes, and its differences, or the error."""
    lengths = [length for batch in batches for length in batch.lengths]
    rows: list[dict] = []
    for name, processes in measured.items():
        precision, first = VARIANTS[name].precision, max(processes, key=lambda each: each["error"] is not None)
        rows.append(
            {
                "workload": workload,
                "batches": len(batches),
                "sequences": len(lengths),
                "tokens": sum(lengths),
                "fill_rate": sum(lengths) / sum(batch.input_ids.numel() for batch in batches),
                "variant": name,
                "precision": precision,
                "error": first["error"],
                "processes": processes,
            }
        )
        if first["error"] is not None and name == "bert":
            raise RuntimeError(f"BertModel, the reference, fails on {workload}: {first['error']}")
        if first["error"] is not None:
            continue
        total, bert = (statistics.median(each["seconds"] for each in own) for own in (processes, measured["bert"]))
        bound = math.nan if precision == ON_GPU else encoder_seconds(config, lengths, machine, precision)
        rows[-1] |= {
            "seconds_per_batch": total / len(batches),
            "sequences_per_second": len(lengths) / total,
            "tokens_per_second": sum(lengths) / total,
            "vs_bert": bert / total,
            "peak_mib": None,
            "lower_bound_share": bound / total,
            **first["differences"],
        }
    return rows


# --------------------------------------------------------------------------------------------------------------- report


def failed(row: dict) -> bool:
    """Whether a row of our variants has an error or differs from BertModel."""
    is_wrong = row["error"] is not None or (row["precision"] == "float32" and row["max_abs"] > TOLERANCE)
    return row["variant"].startswith("ours") and is_wrong


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
    return found


def print_rows(rows: list[dict]) -> None:
    """Prints the rows of a workload."""
    header = ("variant", "seq/s", "tokens/s", "ms/batch", "vs bert", "bound", "max abs", "cosine: low", "mean")
    shape = f"{rows[0]['batches']} × {rows[0]['sequences'] // rows[0]['batches']} sequences"
    print_lines(
        f"\n{rows[0]['workload']}: {shape}, fill rate {rows[0]['fill_rate']:.0%}",
        table([header, *(cells(row) for row in rows if row["error"] is None)]),
        *(f"{row['variant']}: {row['error']}" for row in rows if row["error"] is not None),
    )


def cells(row: dict) -> tuple[str, ...]:
    share, peak = row["lower_bound_share"], row["peak_mib"]
    cosines = [row[name] for name in ("cosine_lowest", "cosine_mean") if row["precision"] != "float32"]
    return (
        row["variant"] + ("  WRONG" if failed(row) else ""),
        f"{row['sequences_per_second']:.1f}",
        f"{row['tokens_per_second']:.0f}",
        f"{1000 * row['seconds_per_batch']:.1f}",
        f"{row['vs_bert']:.2f}",
        "" if math.isnan(share) else f"{share:.0%}",
        f"{row['max_abs']:.1e}" + ("" if peak is None else f"  peak {peak:.0f} MiB"),
        *([f"{cosine:.5f}" for cosine in cosines] or ("", "")),
    )


def print_lines(*lines: str) -> None:
    for line in lines:
        print(line, flush=True)


def print_machine(machine: dict) -> None:
    rates = ", ".join(f"{rate:.0f} GFLOP/s {dtype}" for dtype, rate in machine["gflops"].items())
    rates += f"; memory: {machine['bandwidth_gb']:.1f} GB/s"
    print_lines(*lines(machine), f"threads: {machine['threads']}; matrix multiplication: {rates}")


def print_training(row: dict) -> None:
    took = ", ".join(f"{name} {1000 * value:.0f} ms" for name, value in row["seconds"].items())
    print_lines(
        f"\ntraining: a step (forward, backward, AdamW) on 32 reviews\n{took}: speed-up {row['vs_bert']:.2f}; "
        f"losses differ by at most {row['loss_difference']:.1e}, the gradients of the first step by "
        f"{row['gradient_difference']:.1e} of their norm"
    )


def print_decoding(row: dict) -> None:
    took = "  ".join(
        f"{name} {1000 * value:.1f} ms (×{row['vs_bert'][name]:.2f})" for name, value in row["seconds"].items()
    )
    equal = ", ".join(f"{name} {share:.1%}" for name, share in row["equal_tokens"].items())
    print_lines(
        f"batch {row['batch']:2} {row['decoding']:7} {took}  lower bounds in float32: "
        f"memory {1000 * row['memory_lower_bound']:.1f} ms, GEMM {1000 * row['gemm_lower_bound']:.1f} ms"
        f"{f'  equal tokens: {equal}' if equal else ''}"
        f"{'' if row['same_tokens'] else '  TOKENS DIFFER'}"
    )


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
    """Adds the rows of each workload, and closes the variants."""
    workloads = {
        name: make_batches(name, config, args.model, args.batches, args.seed)
        for name in ENCODER_WORKLOADS
        if name in args.workloads
    }
    for batch in chain(*workloads.values()):
        batch.reference = runs["bert"](batch.inputs)
    for workload, measured in measurements(runs, workloads, folder, args):
        measure_again(report["machine"], config)
        rows = rows_of(workload, measured, workloads[workload], config, report["machine"])
        if args.memory:
            largest_batch = max(workloads[workload], key=lambda batch: batch.input_ids.numel())
            for row in (row for row in rows if row["error"] is None):
                build = VARIANTS[row["variant"]].build
                row["peak_mib"], _ = peak_memory(build, folder, args.threads, largest_batch)
        print_rows(rows)
        report["rows"] += rows


def run_steps(report: dict, config, folder: Path, args) -> None:
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
        RuntimeError: BertModel cannot be opened, or fails.
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
        report = {
            "machine": machine,
            "model": args.model or "BERT-base, random weights",
            "config": config.to_dict(),
            "command": args.command,
            "repetitions": args.repetitions,
            "seed": args.seed,
            "rows": [],
            "unavailable": unavailable,
            "training": None,
            "decoding": [],
        }
        run_encoder(report, runs, config, folder, args)
        run_steps(report, config, folder, args)
    report["failures"] = failures(report)
    return report
