"""What each precision changes in a user's texts, and what it saves."""

import tempfile
import time
from functools import partial
from pathlib import Path

import torch

from toolkit.batching import batches_by_length
from toolkit.benchmark.timing import interleave
from toolkit.benchmark.variants import Run, missing, peak_memory
from toolkit.benchmark.workloads import Batch, pad
from toolkit.checkpoint import class_name, covering_classes, load, open_class, read_checkpoint
from toolkit.cli import about, one_line, shortened, table
from toolkit.hub import check_vocabulary, open_tokenizer
from toolkit.inputs import Source, open_files, read_texts
from toolkit.machine import identity, lines
from toolkit.pictures import new_figure

# The precisions, and the variant of the benchmark that requires the same instructions of the CPU as each.
PRECISIONS = {"float32": "ours", "bfloat16": "bert-bf16", "int8": "ours-int8", "int8 calibrated": "ours-int8"}
LABELLED = ("ForSequenceClassification", "ForTokenClassification")
MAX_ROWS = 500  # with all-MiniLM-L6-v2, they take about a minute
REPETITIONS, TOKENS_PER_BATCH = 3, 2048


def open_precision(folder: Path, threads: int, name: str, precision: str, calibration: Path | None) -> Run:
    """The model, or with `is_bare` its base model, as a function of a batch. int8 is made of float32."""
    is_int8 = precision.startswith("int8")
    loaded = torch.bfloat16 if precision == "bfloat16" else torch.float32
    model = open_class(read_checkpoint(str(folder)), "scratchbert", name, False, loaded)
    model.optimize_for_inference("int8" if is_int8 else loaded, calibration if precision == "int8 calibrated" else None)
    return torch.inference_mode()(lambda inputs, is_bare=False: (model.base_model if is_bare else model)(**inputs))


def results(run: Run, batches: list[Batch], special: torch.Tensor, name: str, has_several: bool) -> tuple:
    """The mean-pooled embeddings, `(texts, C)`, and the labels of texts, or of tokens that are not special, `(labels,
    1)`; with `has_several`, whether a text has each label. A bare model has no labels."""
    embeddings, labels = [], [torch.empty(0, 1)] if name == "Model" else []
    for batch in batches:
        mask = batch.attention_mask[..., None]
        # Not the hidden states of the run below: a batch whose hidden states are requested stays padded.
        states = run(batch.inputs, is_bare=True).last_hidden_state
        embeddings.append((states.double() * mask).sum(dim=1) / mask.sum(dim=1))
        if name != "Model":
            logits = run(batch.inputs).logits
            found = logits > 0 if has_several else logits.argmax(dim=-1, keepdim=True)
            is_text = mask[..., 0].bool() & ~torch.isin(batch.input_ids, special)
            labels.append(found[is_text] if name == "ForTokenClassification" else found)
    return torch.cat(embeddings), torch.cat(labels)


def check(args) -> dict:
    """Compares the precisions on the texts, and prints the slow steps. Returns the report, as it is written into the
    JSON file. Raises CommandError, OSError or ValueError if the checkpoint or another file cannot be used."""
    texts = read_texts(args.data, args.column, args.delimiter, args.rows or MAX_ROWS)
    total = sum(1 for _ in Source(open_files([args.data], delimiter=args.delimiter)).rows())
    checkpoint, threads = read_checkpoint(args.model), torch.get_num_threads()
    if (config := checkpoint.config).is_decoder or config.is_encoder_decoder:
        raise ValueError(f"{args.model} generates text; expected an encoder for --data. Omit --data.")
    [name, *_] = covering_classes(checkpoint.classes, checkpoint.parts, checkpoint.architectures)
    if name not in LABELLED or config.num_labels == 1 or config.problem_type == "regression":
        name = "Model"
    has_several = config.problem_type == "multi_label_classification"
    with about(args.model):
        tokenizer = open_tokenizer(args.model)
        check_vocabulary(len(tokenizer), config)
    longest = config.max_position_embeddings
    ids = tokenizer([row["text"] for row in texts], truncation=True, max_length=longest).input_ids
    numbers = list(batches_by_length(list(map(len, ids)), TOKENS_PER_BATCH))
    batches = [pad([torch.tensor(ids[number]) for number in batch]) for batch in numbers]
    special = torch.tensor([number for number in tokenizer.all_special_ids if number != tokenizer.unk_token_id])
    skipped = {each: reason for each, variant in PRECISIONS.items() if (reason := missing(variant)) is not None}
    if args.calibration is None:
        skipped.setdefault("int8 calibrated", "--calibration is not given")
    builds = {
        each: partial(open_precision, name=name, precision=each, calibration=args.calibration)
        for each in PRECISIONS
        if each not in skipped
    }
    with tempfile.TemporaryDirectory() as folder:
        load(checkpoint, "scratchbert", name, False).save_pretrained(folder)
        runs = {each: timed(f"opening in {each}", build, folder, threads) for each, build in builds.items()}
        found = {
            each: timed(f"computing in {each}", results, run, batches, special, name, has_several)
            for each, run in runs.items()
        }
        seconds = timed("timing", interleave, runs, [batch.inputs for batch in batches], REPETITIONS)
        largest = max(batches, key=lambda batch: batch.tokens)
        peaks = {
            each: timed(f"measuring the memory in {each}", peak_memory, build, folder, threads, largest)
            for each, build in builds.items()
        }
    texts = [texts[number] for batch in numbers for number in batch]  # in the order of the results
    rows = [row_of(each, texts, found, seconds, *peaks[each]) for each in runs]
    return {
        "model": f"{class_name(name, 'scratchbert')} from {args.model}",
        "data": str(args.data),
        "texts": len(texts),
        "total_texts": total,
        "tokens": sorted(map(len, ids)),
        "batches": len(batches),
        "tokens_of_largest_batch": largest.tokens,
        "threads": threads,
        "repetitions": REPETITIONS,
        "machine": identity(),
        "skipped": skipped,
        "rows": rows,
    }


def timed(what: str, function, *args):
    print(f"{what} … ", end="", flush=True)
    start = time.perf_counter()
    result = function(*args)
    print(f"{time.perf_counter() - start:.1f} s", flush=True)
    return result


def row_of(precision: str, texts: list[dict], found: dict, seconds: dict, resident: float, anonymous: float) -> dict:
    """The numbers of a precision, from the results and the seconds of all, and its peaks of memory."""
    (reference, expected), (embeddings, labels) = found["float32"], found[precision]
    took = sum(seconds[precision])
    cosines = torch.cosine_similarity(embeddings, reference).clamp(max=1)
    return {
        "precision": precision,
        "lowest_cosine": cosines.min(),
        "mean_cosine": cosines.mean(),
        "lowest": texts[cosines.argmin()],
        "labels": len(labels) or None,
        "changed_labels": (labels != expected).any(dim=-1).sum() if len(labels) else None,
        "peak_resident_mib": resident,
        "peak_anonymous_mib": anonymous,
        "texts_per_second": len(texts) / took,
        "vs_float32": sum(seconds["float32"]) / took,
        "cosines": {row["place"]: cosine for row, cosine in zip(texts, cosines.tolist(), strict=True)},
    }


def as_text(report: dict) -> str:
    """The report as text."""
    cells = [("precision", "lowest cosine", "mean cosine", "changed labels", "peak MiB", "texts/s", "× float32")]
    for row in report["rows"]:
        changed = f"{row['changed_labels']} of {row['labels']}" if row["labels"] else "–"
        cells.append(
            (
                row["precision"],
                f"{row['lowest_cosine']:.5f}",
                f"{row['mean_cosine']:.5f}",
                changed,
                f"{row['peak_anonymous_mib']:.0f}",
                f"{row['texts_per_second']:.1f}",
                f"{row['vs_float32']:.2f}",
            )
        )
    tokens = f"{report['tokens'][0]} to {report['tokens'][-1]} tokens, batches: {report['batches']}"
    return "\n".join(
        [
            f"model  {report['model']}",
            f"texts  {report['texts']:,} of {report['total_texts']:,} rows of {report['data']}; {tokens}",
            "",
            table(cells),
            *(f"skipped {name}: {reason}" for name, reason in report["skipped"].items()),
            "",
            "cosine: of the mean-pooled embedding of a text, to that in float32",
            "peak MiB: anonymous memory to open the "
            f"model and to compute {report['tokens_of_largest_batch']:,} tokens, in a new process",
            *(
                f"lowest in {row['precision']}: {row['lowest']['place']}: {one_line(row['lowest']['text'])[:80]}"
                for row in report["rows"][1:]
            ),
            "",
            *lines(report["machine"]),
            f"threads: {report['threads']}",
        ]
    )


def plot(report: dict, path: Path) -> None:
    """Draws the cosines of each precision, the lowest first."""
    with new_figure(path, 8, 5) as figure:
        axes = figure.subplots()
        for row in report["rows"]:
            axes.plot(sorted(row["cosines"].values()), label=row["precision"])
        axes.set(xlabel="texts, the lowest cosine first", ylabel="cosine to float32")
        axes.set_title(shortened(report["model"], 70))
        axes.legend()
