"""The exercises of the course, docs/course: the files with gaps, and what checks them."""

# The files of the chapters, from 1 on. scripts/data/course has them with gaps.
FILES = (
    "attention.py",
    "masks.py",
    "heads.py",
    "blocks.py",
    "embeddings.py",
    "bert.py",
    "pretraining.py",
    "finetuning.py",
    "seq2seq.py",
    "speed.py",
)
