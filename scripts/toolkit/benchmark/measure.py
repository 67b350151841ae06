"""Times the variants in turns, and compares them with BertModel."""

import gc
import math
import mmap
import multiprocessing
import statistics
import threading
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import chain
from pathlib import Path

import torch
from torch.nn.functional import cosine_similarity
from torch.utils.benchmark import Timer

from toolkit.benchmark import SENTENCES, VARIANTS
from toolkit.benchmark.variants import Encode, open_variant, open_variants, surviving
from toolkit.benchmark.workloads import Workload
from toolkit.common import silence_libraries

# Ours may differ from BertModel by this share of its largest number or, in lower precision, have this cosine.
TOLERANCE, LOWEST_COSINE = 1e-5, 0.9
SENTENCE_REPETITIONS = 3  # of each sentence, in each process


# ---------------------------------------------------------------------------------------------------------------- time


def interleave(runs: dict[str, Callable], inputs: list, repetitions: int) -> dict[str, list[float]]:
    """The median seconds of each function for each of its inputs. The functions take turns. `timeit` warms up, so that
    what the function before left, such as threads that spin for a while, is not timed."""
    times = {name: [[] for _ in inputs] for name in runs}
    for repetition in range(repetitions):
        for i, each in enumerate(inputs):
            for name in list(runs) if (repetition + i) % 2 == 0 else reversed(runs):
                scope = {"run": runs[name], "each": each}
                timer = Timer("run(each)", globals=scope, num_threads=torch.get_num_threads())
                times[name][i] += timer.timeit(1).times
    return {name: list(map(statistics.median, of_inputs)) for name, of_inputs in times.items()}


def allocated_mib() -> float:
    """The memory of this process without the files that are mapped into it; NaN if the system is not Linux."""
    pages = Path("/proc/self/statm")
    if not pages.exists():
        return math.nan
    _, resident, shared, *_ = pages.read_text().split()
    return (int(resident) - int(shared)) * mmap.PAGESIZE / 2**20


def measure_alone(folder: Path, threads: int, sentences: dict, largest: dict, name: str) -> dict[str, float]:
    """What a new process measures of a variant: the memory by which opening it and computing the largest batch raise
    the peak; and by workload, the seconds for a sentence."""
    torch.set_num_threads(threads)
    samples, done = [allocated_mib()], threading.Event()

    def sample() -> None:
        while not done.wait(0.001):  # Linux does not record this peak
            samples.append(allocated_mib())

    sampler = threading.Thread(target=sample, daemon=True)
    sampler.start()
    run = open_variant(name, folder, threads)
    run(largest)
    done.set()
    sampler.join()
    seconds = {
        workload: statistics.fmean(interleave({name: run}, inputs, SENTENCE_REPETITIONS)[name])
        for workload, inputs in sentences.items()
    }
    return {"peak_anonymous_mib": max(samples) - samples[0], **seconds}


def in_new_process(function: Callable, *arguments):
    """What the function returns in a new process."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), silence_libraries) as pool:
        return pool.submit(function, *arguments).result()


# ------------------------------------------------------------------------------------------------------------- results


def outputs_of(run: Encode, batches: list[dict]) -> tuple[list, list]:
    """The hidden states of each batch, zero at padding, and the labels, if the variant has a model head for them."""
    states = [run(batch).double().masked_fill(batch["attention_mask"][..., None] == 0, 0) for batch in batches]
    return states, [run.labels(batch) for batch in batches] if getattr(run, "has_labels", False) else []


def compare(name: str, outputs: tuple[list, list], reference: tuple[list, list], places: list[str]) -> dict:
    """How hidden states, mean-pooled embeddings and labels differ from BertModel's.

    Args:
        places: of the texts, if they are texts.
    """
    pairs = list(zip(outputs[0], reference[0], strict=True))
    max_abs = torch.stack([(hidden - expected).abs().max() for hidden, expected in pairs]).max()
    # Of sums, as of means.
    cosine = torch.cat([cosine_similarity(hidden.sum(dim=1), expected.sum(dim=1)) for hidden, expected in pairs])
    cosine = cosine.clamp(max=1)  # which keeps NaN
    changed = [(labels != expected).any(dim=-1) for labels, expected in zip(outputs[1], reference[1], strict=False)]
    precision = VARIANTS[name].precision
    tolerance = TOLERANCE * max(1, *(float(expected.abs().max()) for _, expected in pairs))
    agrees = max_abs <= tolerance if precision == "float32" else cosine.min() >= LOWEST_COSINE  # NaN does not
    return {
        "precision": precision,
        "max_abs": max_abs.item(),
        "cosine_lowest": cosine.min().item(),
        "cosine_mean": cosine.mean().item(),
        "lowest": places[cosine.argmin()] if places and precision != "float32" else None,
        "labels": sum(map(len, changed)),
        "changed_labels": int(sum(map(sum, changed))),
        "is_wrong": name.startswith("ours") and not agrees,
    }


def run_workload(
    workload: Workload, runs: dict[str, Encode], unavailable: dict[str, str], repetitions: int
) -> list[dict]:
    """A row for each variant that does not fail."""
    batches, places = workload
    reference = outputs_of(runs["bert"], batches)
    results = dict(
        surviving(runs, unavailable, lambda name: compare(name, outputs_of(runs[name], batches), reference, places))
    )
    seconds = interleave({name: runs[name] for name in results}, batches, repetitions)
    shape = {
        "batches": len(batches),
        "sequences": sum(map(len, reference[0])),
        "fill_rate": torch.cat([batch["attention_mask"].flatten() for batch in batches]).double().mean().item(),
    }
    return [
        {"variant": name, **shape, **result, "seconds_per_batch": statistics.fmean(seconds[name])}
        for name, result in results.items()
    ]


def run_workloads(names: list[str], workloads: dict[str, Workload], folder: Path, args) -> tuple[list, dict]:
    """The rows of all workloads, and the reason for each variant that is unavailable or fails.

    Raises:
        RuntimeError: BertModel, the reference, fails.
    """
    runs, unavailable = open_variants(names, folder, args.threads)
    rows = []
    for workload in workloads:
        print(f"comparing and timing {workload}", flush=True)
        repetitions = 1 if workload in SENTENCES else args.repetitions
        found = run_workload(workloads[workload], runs, unavailable, repetitions)
        rows += [{"workload": workload, **row} for row in found]
    names = list(runs)
    runs.clear()  # closes them: threads and caches of one variant would disturb another
    gc.collect()
    print("timing single sentences, and measuring memory, in new processes", flush=True)
    sentences = {name: workload.batches for name, workload in workloads.items() if name in SENTENCES}
    batches = chain(*(workload.batches for workload in workloads.values()))
    largest = max(batches, key=lambda batch: batch["input_ids"].numel())
    start = partial(in_new_process, measure_alone, folder, args.threads, sentences, largest)
    alone: dict[str, list[dict]] = {name: [] for name in names}
    for i in range(args.repetitions if sentences else 1):
        for name, found in surviving(names if i % 2 == 0 else names[::-1], unavailable, start):
            alone[name].append(found)
    rows = [row for row in rows if row["variant"] not in unavailable]
    for row in rows:
        measured, workload = alone[row["variant"]], row["workload"]
        row["peak_anonymous_mib"] = measured[0]["peak_anonymous_mib"]
        if workload in sentences:
            row["seconds_per_batch"] = statistics.median(each[workload] for each in measured)
    bert = {row["workload"]: row["seconds_per_batch"] for row in rows if row["variant"] == "bert"}
    for row in rows:
        row["sequences_per_second"] = row["sequences"] / row["batches"] / row["seconds_per_batch"]
        row["vs_bert"] = bert[row["workload"]] / row["seconds_per_batch"]
    return rows, unavailable
