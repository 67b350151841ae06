"""--dry_run: what a run would do, without writing anything."""

import time
from datetime import timedelta
from itertools import islice

import numpy as np
import pyarrow.compute
from datasets import Dataset

from toolkit.cli import shortened

SHOWN = 3  # examples
COUNTED = 1_000  # examples of a streamed training set
TIMED = 6  # updates. The first one, of the longest sequences, is slower and not counted.
WIDTH = 300  # of an example, in characters


def rehearse(training) -> None:
    """Prints the sizes of the splits, some tokenised examples, their lengths, and an estimate of the time.

    Args:
        training: a `Training` that has not begun. Some updates change its weights.
    """
    task, say = training.task, training.accelerator.print
    first = list(islice(iter(task.train_set), COUNTED if task.batches_per_epoch() is None else SHOWN))
    for split, examples in {"train": task.train_set, **task.splits}.items():
        counted = examples if isinstance(examples, Dataset) else Dataset.from_list(first)
        remark = "" if counted is examples else f", of which the first {len(counted):,} are counted"
        say(f"{split}: {describe_lengths(counted, training.settings.max_length)}{remark}")
    for example in first[:SHOWN]:
        say(f"{example['place']}: {shortened(task.shown(example), WIDTH)}")
    seconds = time_updates(training)
    duration = f"{timedelta(seconds=round(training.steps * seconds))} (hours:minutes:seconds)"
    duration += ", without evaluations" if task.splits else ""
    say(f"{training.steps:,} updates of about {seconds:.2f} s: {duration}. Nothing was written.")


def describe_lengths(examples: Dataset, maximum: int) -> str:
    """The number of examples, and the quantiles of their lengths."""
    lengths = pyarrow.compute.list_value_length(examples.with_format("arrow")[:]["input_ids"]).to_numpy()
    low, median, high, longest = np.quantile(lengths, [0, 0.5, 0.95, 1], method="nearest")
    full = int((lengths >= maximum).sum())
    cut = f"; {full:,} fill --max_length {maximum} and may be cut or split" if full else ""
    return (
        f"{len(lengths):,} examples, {lengths.sum():,} tokens; "
        f"lengths {low} (minimum), {median} (median), {high} (95 %), {longest} (maximum){cut}"
    )


def time_updates(training) -> float:
    """The mean seconds of an update, over a few of them."""
    training.model.train()
    seconds, began = [], time.monotonic()
    for group in islice(training.groups(), TIMED):
        training.update(group)
        seconds.append(time.monotonic() - began)
        began = time.monotonic()
    return float(np.mean(seconds[1:] or seconds))
