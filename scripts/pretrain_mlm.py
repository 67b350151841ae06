#!/usr/bin/env python
"""Pre-trains a BERT on texts: masked words and, with --next_sentence, next sentences.

    train_tokenizer.py --train_file books.txt --output my-tokenizer
    pretrain_mlm.py --config_file configuration/mini.json --tokenizer my-tokenizer --train_file books.txt
                    --validation_file others.txt --output my-bert
    pretrain_mlm.py --model google-bert/bert-base-uncased --train_file reports.jsonl --output bert-of-reports
    pretrain_mlm.py configuration/recipes/pretrain_reviews.yaml --tokenizer my-tokenizer --output reviews

The weights are random with --config_file, or those of a checkpoint with --model. A document is a row: the text in its
column, or a line of a .txt file. Documents are concatenated, with [SEP] between them, and cut into sequences of
--max_length; with --line_by_line each becomes one sequence; with --next_sentence its sentences become pairs, so that a
document of one sentence is not used.

15 % of the words are masked, different ones in each epoch. The masks of the validation and test sets are the same in
all evaluations and for all seeds; loss and perplexity are those of the masked words, from before the first update on.

With --streaming the training set may be larger than memory: each process reads all of it in each epoch, keeps
--shuffle_buffer sequences, and trains on its share. It is also read once before the training, so that --resume finds
out whether it has changed. The validation and test sets are in memory.

Exit code: 0 trained; 1 the training failed; 2 bad usage or data; 130 or 143 stopped by Ctrl-C or SIGTERM, after a
checkpoint was saved: --resume continues.
"""

import sys
from functools import partial

from toolkit.finetuning.command_line import train
from toolkit.finetuning.task_settings import PretrainingSettings

main = partial(train, __file__, __doc__, PretrainingSettings)  # of the arguments; returns the exit code

if __name__ == "__main__":
    sys.exit(main())
