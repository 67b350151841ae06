"""The models on a CUDA GPU, in bfloat16: ours and BertModel, on padded batches and on packed sequences."""

import gc
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from transformers import BertModel

from modeling_scratchbert import ScratchBertModel
from toolkit.benchmark.timing import timed_rows
from toolkit.benchmark.variants import Run, first_line
from toolkit.benchmark.workloads import Batch, make_batches

DEVICE, DTYPE = "cuda", torch.bfloat16
WORKLOADS = ("reviews", "full-128")
REPETITIONS = 10  # for each of the CPU: a batch takes milliseconds


def load(model_class: type, folder: Path, attention: str = "sdpa") -> torch.nn.Module:
    model = model_class.from_pretrained(folder, attn_implementation=attention, dtype=DTYPE)
    return model.eval().to(DEVICE)


def padded(model_class: type, folder: Path) -> Run:
    model = load(model_class, folder)
    return lambda inputs: model(**inputs).last_hidden_state


def packed(folder: Path, attention: str = "flash_attention_2") -> Run:
    """BertModel on the non-padding tokens alone, packed into one row, as transformers' flash attention accepts them."""
    model = load(BertModel, folder, attention)

    def run(inputs):
        mask = inputs["attention_mask"].bool()
        cu_seq_lens = torch.nn.functional.pad(mask.sum(dim=1).cumsum(dim=0, dtype=torch.int32), (1, 0))
        longest = int(cu_seq_lens.diff().max())
        hidden = model(
            input_ids=inputs["input_ids"][mask][None],
            position_ids=(mask.cumsum(dim=1) - 1)[mask][None],
            cu_seq_lens_q=cu_seq_lens,
            cu_seq_lens_k=cu_seq_lens,
            max_length_q=longest,
            max_length_k=longest,
        ).last_hidden_state
        restored = hidden.new_zeros(*mask.shape, hidden.shape[-1])
        restored[mask] = hidden[0]
        return restored

    return run


VARIANTS: dict[str, Callable[[Path], Run]] = {
    "bert": partial(padded, BertModel),
    "bert-flash": packed,
    "ours": partial(padded, ScratchBertModel),
}


def synchronized(run: Run) -> Run:
    """`run` that returns when the GPU has finished."""

    @torch.inference_mode()
    def wait(inputs):
        hidden = run(inputs)
        torch.cuda.synchronize()
        return hidden

    return wait


def open_variants(folder: Path) -> tuple[dict[str, Run], dict[str, str]]:
    """The variants that run here, and the reason why each of the others does not."""
    runs, reasons = {}, {}
    for name, build in VARIANTS.items():
        try:
            runs[name] = synchronized(build(folder))
        except Exception as error:  # a kernel can raise any exception
            reasons[name] = first_line(error)
    return runs, reasons


def rows_of(workload: str, runs: dict[str, Run], batches: list[Batch], repetitions: int) -> list[dict]:
    """A row for each variant."""
    batches = [Batch(batch.input_ids.to(DEVICE), batch.attention_mask.to(DEVICE)) for batch in batches]
    return timed_rows(workload, runs, batches, repetitions)


def run_on_gpu(folder: Path, config, model: str | None, count: int, repetitions: int, seed: int) -> dict | None:
    """The rows of each workload and the reasons why variants are missing; None if there is no CUDA GPU.

    Args:
        model: whose tokenizer the reviews are encoded with.
        count: batches of each workload.

    Raises:
        RuntimeError: BertModel cannot be opened.
    """
    if not torch.cuda.is_available():
        return None
    runs, unavailable = open_variants(folder)
    if "bert" in unavailable:
        raise RuntimeError(f"BertModel, the reference, cannot be opened on the GPU: {unavailable['bert']}")
    rows = []
    for workload in WORKLOADS:
        batches = make_batches(workload, config, model, count, seed)
        rows += rows_of(workload, runs, batches, REPETITIONS * repetitions)
    runs.clear()
    gc.collect()
    return {"gpu": torch.cuda.get_device_name(), "unavailable": unavailable, "rows": rows}
