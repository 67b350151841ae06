"""The check that a text gets the same bits alone and in any batch."""

import itertools
import random
from collections.abc import Callable

import torch
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence

from modeling_scratchbert.cpu.library import find_library
from modeling_scratchbert.probe.recording import to_bits
from toolkit.checkpoint import Checkpoint, open_class, read_checkpoint
from toolkit.common import identity, in_one_line
from toolkit.compare.parity import largest
from toolkit.texts import encode

LONGEST_PIECE = 16  # tokens
LARGEST_BATCH = 64  # texts
LARGEST_PADDING = 8  # columns


def with_pieces(texts: list[torch.Tensor], longest: int) -> list[torch.Tensor]:
    """The token ids of the texts; pieces of them, one of each length up to 16 tokens; and joined texts, of up to
    `longest` tokens."""
    joined = torch.cat(texts * longest)[:longest]
    return texts + [joined[:length] for length in (*range(1, 1 + LONGEST_PIECE), longest // 2, longest)]


def random_batching(
    texts: list[torch.Tensor], longest: int, generator: random.Random, largest_batch: int, largest_padding: int
) -> list[tuple[list[int], torch.Tensor, torch.Tensor]]:
    """The texts, shuffled, in batches of random sizes, with random extra padding up to `longest` tokens. A batch is the
    numbers of its texts, their ids and their mask."""
    order = generator.sample(range(len(texts)), len(texts))
    batches = []
    while order:
        size = generator.randint(1, largest_batch)
        numbers, order = order[:size], order[size:]
        lengths = torch.tensor([len(texts[number]) for number in numbers])
        width = min(int(lengths.max()) + generator.randint(0, largest_padding), longest)
        ids = pad_sequence([texts[number] for number in numbers], batch_first=True)
        ids = pad(ids, (0, width - ids.shape[1]))
        batches.append((numbers, ids, (torch.arange(width) < lengths[:, None]).long()))
    return batches


def open_variant(checkpoint: Checkpoint, name: str) -> Callable[..., torch.Tensor]:
    """The model as a function from ids and mask to the last hidden states."""
    dtype = torch.bfloat16 if name == "bfloat16" else torch.float32  # int8 weights are made of float32
    model = open_class(checkpoint, "scratchbert", "Model", False, dtype)
    if name == "optimised-eager":
        model.set_attn_implementation("eager")
    if name == "int8":
        model.optimize_for_inference("int8")
    elif name != "loaded":  # which may change texts
        model.optimize_for_inference()
    return torch.inference_mode()(lambda ids, mask: model(ids, attention_mask=mask).last_hidden_state)


def examine(run: Callable[..., torch.Tensor], texts: list[torch.Tensor], batchings: list, threads: list[int]) -> dict:
    """How many texts have other bits in a later batching than in the first, and by how much they differ.

    Args:
        threads: the numbers of threads of torch, which the batchings take in turns.
    """
    first: dict[int, torch.Tensor] = {}
    differences: dict[int, float] = {}
    for batching, count in zip(batchings, itertools.cycle(threads)):
        torch.set_num_threads(count)
        for numbers, ids, mask in batching:
            for number, hidden in zip(numbers, run(ids, mask), strict=True):
                states = hidden[: len(texts[number])].clone()
                before = first.setdefault(number, states)
                if not torch.equal(to_bits(states), to_bits(before)):  # 0 and -0 differ, NaN equals itself
                    differences[number] = max(largest(states - before), differences.get(number, 0.0))
    return {"changed_texts": len(differences), "max_abs": max(differences.values(), default=0.0)}


def compare_batches(args, texts: list[str]) -> dict:
    """Runs the variants, prints a line for each, and returns the report, as it is written into the JSON file.

    Args:
        args: as `check.py` parses them.

    Raises:
        CommandError, OSError, ValueError: the model cannot be opened.
    """
    checkpoint = read_checkpoint(args.model)
    if checkpoint.config.is_encoder_decoder:
        raise ValueError(f"{args.model} is a seq2seq model; expected an encoder or a decoder for --determinism.")
    longest = checkpoint.config.max_position_embeddings
    ids = encode(args.model, checkpoint.config, texts, longest)
    sequences = with_pieces([torch.tensor(row) for row in ids], longest)
    generator = random.Random(args.seed)
    sizes = [(1, 0), *[(LARGEST_BATCH, LARGEST_PADDING)] * args.batchings, (1, 0)]
    batchings = [random_batching(sequences, longest, generator, *size) for size in sizes]
    print(
        in_one_line(identity()), f"{len(sequences)} texts, alone and in {args.batchings} random batchings", "", sep="\n"
    )
    rows = {}
    for name in args.variants:
        if name == "int8" and not find_library():
            print("int8 is skipped, because it requires the library in C++")
            continue
        row = rows[name] = examine(open_variant(checkpoint, name), sequences, batchings, args.threads)
        print(f"{name:15} texts that change: {row['changed_texts']:4}, by up to {row['max_abs']:.1e}", flush=True)
    is_equal = not any(row["changed_texts"] for name, row in rows.items() if name != "loaded")
    print("equal: no optimised variant changes a text" if is_equal else "DIFFERENT: a text has other bits")
    return {"texts": len(sequences), "rows": rows, "equal": is_equal}
