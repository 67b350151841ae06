"""The work of course.py: writes the files with gaps, and checks those of a learner."""

import shutil
import textwrap
from collections.abc import Iterator
from pathlib import Path

from toolkit.common import CommandError, atomic_file
from toolkit.course import FILES, model_chapters, task_chapters
from toolkit.course.grading import Weights, explained, open_exercise, verdict

WITH_GAPS = Path(__file__).parents[2] / "data" / "course"

# Of each chapter, from 1 on: the parts of the file, and what checks them.
CHECKS = (
    {"attention": model_chapters.check_attention, "to_linear": model_chapters.check_to_linear},
    {
        "causal_mask": model_chapters.check_causal_mask,
        "padding_mask": model_chapters.check_padding_mask,
        "masked_attention": model_chapters.check_masked_attention,
    },
    {
        "MultiHeadAttention.__init__": model_chapters.check_divisibility,
        "MultiHeadAttention.forward": model_chapters.check_heads,
    },
    {
        "gelu": model_chapters.check_gelu,
        "LayerNorm": model_chapters.check_layer_norm,
        "FeedForward": model_chapters.check_feed_forward,
        "Block": model_chapters.check_block,
    },
    {"sinusoidal_table": model_chapters.check_sinusoidal_table, "Embeddings": model_chapters.check_embeddings},
    {
        "copy_layer": model_chapters.check_copy_layer,
        "mean_pooling": model_chapters.check_mean_pooling,
        "MyBert": model_chapters.check_my_bert,
    },
    {
        "mask_tokens": task_chapters.check_mask_tokens,
        "MaskedLMHead": task_chapters.check_head,
        "masked_lm_loss": task_chapters.check_masked_lm_loss,
    },
    {
        "freeze": task_chapters.check_freeze,
        "parameter_groups": task_chapters.check_parameter_groups,
        "accuracy": task_chapters.check_accuracy,
    },
    {
        "shift_right": task_chapters.check_shift_right,
        "seq2seq_loss": task_chapters.check_seq2seq_loss,
        "greedy": task_chapters.check_greedy,
    },
    {
        "unpad": task_chapters.check_unpad,
        "pad": task_chapters.check_pad,
        "int8_linear": task_chapters.check_int8_linear,
    },
)


def start(folder: Path) -> int:
    """Writes the files with gaps into `folder`, apart from those that are there. Returns the exit code."""
    if folder.exists() and not folder.is_dir():
        raise CommandError(f"{folder} is a file; expected a folder. Pass another --folder.")
    folder.mkdir(parents=True, exist_ok=True)
    for chapter, name in enumerate(FILES, start=1):
        path = folder / name
        if path.exists():
            print(f"{path} is there, and stays as it is")
            continue
        with atomic_file(path) as temporary:
            shutil.copyfile(WITH_GAPS / name, temporary)
        print(f"{path}: chapter {chapter}")
    return 0


def check(folder: Path, chapters: list[int], source: str) -> int:
    """Checks the learner's files of these chapters, and prints a line for each part. Returns the exit code."""
    weights, results = Weights(source), []
    for chapter in chapters:
        print(f"chapter {chapter}, {folder / FILES[chapter - 1]}")
        for part, status, text in verdicts(folder, chapter, weights):
            results.append(status == "right")
            print(f"  {status:7}{part}", flush=True)
            if text:
                print(textwrap.fill(text, 100, initial_indent=" " * 9, subsequent_indent=" " * 9), flush=True)
    print(f"{sum(results)} of {len(results)} parts are right")
    return int(not all(results))


def verdicts(folder: Path, chapter: int, weights: Weights) -> Iterator[tuple[str, str, str]]:
    """Each part of the learner's file, with the result of `verdict`; the file itself if it does not run."""
    try:
        module = open_exercise(folder, chapter)
    except CommandError:
        raise
    except (Exception, SystemExit) as error:
        yield FILES[chapter - 1], "WRONG", explained(error, folder)
        return
    for part, check_part in CHECKS[chapter - 1].items():
        yield part, *verdict(part, check_part, module, weights, folder)
