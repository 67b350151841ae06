"""Final project, step 2: your classifier of film reviews, which you have saved in the folder reviews."""

import csv

import torch
from scratchbert_commands.scripts.__main__ import SCRIPTS
from transformers import AutoTokenizer

import project
from grading import difference, expect, saved_folder

EXPECTED = 0.78  # the share of the test reviews that are classified correctly


def test_accuracy():
    folder = saved_folder("reviews")
    model = project.MyBertForSequenceClassification.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    with open(SCRIPTS / "data" / "movie_reviews" / "test.csv", encoding="utf-8", newline="") as file:
        rows = sorted(csv.DictReader(file), key=lambda row: len(row["text"]))

    @torch.no_grad()
    def outputs(rows):
        texts, labels = [row["text"] for row in rows], torch.tensor([int(row["label"]) for row in rows])
        batch = tokenizer(texts, padding=True, truncation=True, max_length=128, return_tensors="pt")
        return model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], labels=labels), labels

    some, labels = outputs(rows[::300])
    again, _ = outputs(rows[::300])
    expect(torch.equal(some.logits, again.logits), "Dropout is active at evaluation; use nn.Dropout in the model.")
    alone, _ = outputs(rows[:1])
    expect(
        not difference(alone.logits, some.logits[:1]),
        "A text has other logits in a batch with longer texts; hide padding from the attention and from the pooling.",
    )
    loss = torch.nn.functional.cross_entropy(some.logits, labels)
    expect(not difference(some.loss, loss), "The loss is not the mean cross-entropy of the logits and the labels.")
    correct = []
    for start in range(0, len(rows), 50):
        output, labels = outputs(rows[start : start + 50])
        correct += (output.logits.argmax(dim=-1) == labels).tolist()
    accuracy = sum(correct) / len(rows)
    expect(accuracy > 0.4, f"The accuracy is {accuracy:.3f}; the classes are swapped. Logit 1 is for positive reviews.")
    expect(
        accuracy > 0.6,
        f"The accuracy is {accuracy:.3f}: the model has learned nothing. Begin with the weights of load_bert, and save "
        "after the training.",
    )
    expect(
        accuracy >= EXPECTED, f"The accuracy is {accuracy:.3f}; expected at least {EXPECTED}. Train on more reviews."
    )
