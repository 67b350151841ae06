"""Final project, step 4: your folders contain their code, so that other people can open them."""

import json
import os
import subprocess
import sys

import pytest
import torch

import project
from grading import expect, saved_folder

# What another person runs, in a folder without your files.
PROGRAM = """
import sys, torch, transformers
model = getattr(transformers, sys.argv[1]).from_pretrained(sys.argv[2], trust_remote_code=True).eval()
ids = torch.arange(3, 9)[None]
inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
if "Seq2Seq" in sys.argv[1]:
    inputs["decoder_input_ids"] = ids
print(model(**inputs).logits.flatten()[:20].tolist())
"""


@pytest.mark.parametrize(
    ("name", "opened_with", "own_class"),
    [
        ("reviews", "AutoModelForSequenceClassification", "MyBertForSequenceClassification"),
        ("doubler", "AutoModelForSeq2SeqLM", "MyBertForConditionalGeneration"),
    ],
)
def test_folder(name, opened_with, own_class, tmp_path):
    folder = saved_folder(name)
    saved = json.loads((folder / "config.json").read_text(encoding="utf-8")).get("auto_map", {})
    for auto_class in ("AutoConfig", opened_with):
        expect(
            auto_class in saved,
            f"config.json has no {auto_class} in auto_map; call register_for_auto_class of your class before "
            "save_pretrained.",
        )
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_MODULES_CACHE": str(tmp_path), "PYTHONPATH": ""}
    command = [sys.executable, "-c", PROGRAM, opened_with, folder]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    expect(done.returncode == 0, f"A new process cannot open {name}: {done.stderr.strip()[-2000:]}")
    ids = torch.arange(3, 9)[None]
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if "Seq2Seq" in opened_with:
        inputs["decoder_input_ids"] = ids
    logits = getattr(project, own_class).from_pretrained(folder)(**inputs).logits.flatten()[:20]
    expect(
        torch.allclose(logits, torch.tensor(json.loads(done.stdout.splitlines()[-1])), atol=1e-4),
        f"A new process computes other logits; {name} has an older project.py. Save the model again.",
    )
