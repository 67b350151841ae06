"""The time and the numbers of variants that take turns, in one process."""

import math
import statistics
import time

import torch

from toolkit.benchmark.variants import Run, first_line
from toolkit.benchmark.workloads import Batch
from toolkit.parity import largest

# Seconds before each measurement: threads of the runtime that was timed last spin for a while before they sleep.
PAUSE = 0.01


def deviation(hidden: torch.Tensor, reference: torch.Tensor, batch: Batch) -> float:
    """The largest difference at a non-padding token; infinite if a value there is NaN."""
    return largest((hidden.float() - reference.float())[batch.attention_mask.bool()])


def warm_up(runs: dict[str, Run], batches: list[Batch]) -> tuple[dict[str, float], dict[str, str]]:
    """Runs each variant once on each batch: its difference to BertModel, or why it fails."""
    deviations, reasons = dict.fromkeys(runs, 0.0), {}
    for batch in batches:
        reference = runs["bert"](batch.inputs)
        for name in runs.keys() - {"bert"} - reasons.keys():
            try:
                found = deviation(runs[name](batch.inputs), reference, batch)
                deviations[name] = max(deviations[name], found)
            except Exception as error:  # a runtime can raise any exception
                reasons[name] = first_line(error)
    return deviations, reasons


def interleave(runs: dict[str, Run], batches: list[Batch], repetitions: int) -> dict[str, list[float]]:
    """The median seconds of each variant for each batch. The variants take turns."""
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


def timed_rows(workload: str, runs: dict[str, Run], batches: list[Batch], repetitions: int) -> list[dict]:
    """A row for each variant: its speed, and its difference to BertModel, or the error."""
    deviations, reasons = warm_up(runs, batches)
    seconds = interleave({name: run for name, run in runs.items() if name not in reasons}, batches, repetitions)
    sequences, tokens = sum(len(batch.input_ids) for batch in batches), sum(batch.tokens for batch in batches)
    common = {
        "workload": workload,
        "batches": len(batches),
        "sequences": sequences,
        "tokens": tokens,
        "fill_rate": tokens / sum(batch.input_ids.numel() for batch in batches),
    }
    rows = []
    for name in runs:
        row = {**common, "variant": name, "error": reasons.get(name)}
        if name not in reasons:
            total = sum(seconds[name])
            row |= {
                "seconds_per_batch": total / len(batches),
                "sequences_per_second": sequences / total,
                "tokens_per_second": tokens / total,
                "vs_bert": sum(seconds["bert"]) / total,
                "max_abs": deviations[name] if math.isfinite(deviations[name]) else None,
            }
        rows.append(row)
    return rows
