"""Prints the cosine similarity of sentences, by a saved model that opens without the package: `similarity.py FOLDER`.

`make demo` runs it. Of a model with other code than that of this package, read the code first (docs/trust.md).
"""

import sys

import torch
from transformers import AutoModel, AutoTokenizer, logging

SENTENCES = [
    "A man is playing a guitar.",
    "Someone is strumming a guitar.",
    "How do I reset my password?",
    "I forgot my password, how can I change it?",
]

sys.modules["modeling_scratchbert"] = None  # an import raises ModuleNotFoundError, as if it were not installed
logging.disable_progress_bar()
folder = sys.argv[1]
tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
model = AutoModel.from_pretrained(folder, trust_remote_code=True).eval()
print(f"{type(model).__name__} is defined in {type(model).__module__}")

inputs = tokenizer(SENTENCES, padding=True, return_tensors="pt")
with torch.inference_mode():
    states = model(**inputs).last_hidden_state  # (sentences, tokens, width)
mask = inputs["attention_mask"][..., None]
embeddings = torch.nn.functional.normalize((states * mask).sum(dim=1) / mask.sum(dim=1))  # means over the tokens
for sentence, similarities in zip(SENTENCES, (embeddings @ embeddings.T).tolist(), strict=True):
    print(f"{sentence:44}", *(f"{similarity:5.2f}" for similarity in similarities))
