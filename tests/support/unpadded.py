"""Batches with padding, and the same sequences packed."""

import contextlib
import inspect
import sys

import torch
from transformers import DataCollatorWithFlattening

from modeling_scratchbert import ScratchBertModel
from support.models import NO_DROPOUT, VOCABULARY, randomise, tiny_config

LENGTHS = [4, 9, 1, 4, 6]


def make(cls=ScratchBertModel, *args, attention="sdpa", **fields):
    """A model of large random weights, for inference, that removes padding unless `fields` say otherwise."""
    fields = {"attn_implementation": attention, "padding_free": True, **NO_DROPOUT, **fields}
    return randomise(cls(tiny_config(**fields), *args)).eval()


def draw(kind="right", batch=5, width=9) -> dict:
    """A batch and its mask."""
    mask = torch.arange(width) < torch.tensor(LENGTHS[:batch])[:, None]
    if kind == "left":
        mask = mask.flip(1)
    elif kind == "scattered":
        mask = torch.rand(batch, width) < 0.5
        mask[:, 0] = True
    return {"input_ids": torch.randint(1, VOCABULARY, (batch, width)), "attention_mask": mask.long()}


def flattened(batch: dict, **options) -> dict:
    """The same sequences as transformers' padding-free collator packs them."""
    rows = [ids[mask.bool()].tolist() for ids, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True)]
    packed = DataCollatorWithFlattening(return_tensors="pt", **options)([{"input_ids": row} for row in rows])
    packed.pop("labels")
    return packed


FLASH = {"return_flash_attn_kwargs": True}


@contextlib.contextmanager
def observed_shapes(method, module: torch.nn.Module | None = None, modules: list | None = None):
    """The shapes of the `hidden_states` that a method, or that of one module, is called with; the modules are added to
    `modules`. Nothing is patched or hooked, because the batch would then stay padded."""
    seen: list[tuple] = []
    code = inspect.unwrap(method).__code__

    def record(frame, event, _):
        is_call = event == "call" and frame.f_code is code
        if is_call and (module is None or frame.f_locals["self"] is module):
            seen.append(tuple(frame.f_locals["hidden_states"].shape))
            if modules is not None:
                modules.append(frame.f_locals["self"])

    before = sys.getprofile()
    sys.setprofile(record)
    try:
        yield seen
    finally:
        sys.setprofile(before)
