#!/usr/bin/env python
"""Trains a generator on pairs of texts, from a BERT, a generator, or random weights.

The weights of a BERT go into the encoder and the decoder (Rothe et al. 2020).

    finetune_seq2seq.py --model google-bert/bert-base-uncased --tie_encoder_decoder true --train_file train.jsonl
                        --validation_file val.jsonl --max_length 512 --num_beams 4 --output my-summariser
    accelerate launch --config_file configuration/two_process.yaml scripts/finetune_seq2seq.py …

From random weights, to pronounce English words:

    cmudict_pairs.py cmudict
    train_tokenizer.py --train_file cmudict/train.jsonl --column source target --pre_split whitespace
                       --min_frequency 100 --output cmudict-tokenizer
    finetune_seq2seq.py configuration/recipes/cmudict.yaml --output g2p-model
    generate.py g2p-model hello            HH AH L OW

Files have a column of sources (source, text, article, document, en) and one of targets (target, summary, highlights,
translation, de). Flags name other columns.

Evaluations generate texts, as the finished model does, with --num_beams beams, and compare them with the targets. Rows
with the same source are one item with several correct targets, of which the closest counts. `loss` and `perplexity` are
per target token, for each row, without label smoothing. With --metrics error_rate, token_error_rate is the phoneme
error rate if targets are phonemes separated by spaces, and the word error rate if they are sentences; item_error_rate
is the share of sources with an error.

Metrics of text compare with the targets as they are written. A tokenizer that lower-cases or changes spaces, or a
--max_target_length that cuts targets, makes them differ from their decoded tokens, so that even a perfect model has
errors. The start of the run prints the number of these validation targets.

The folder --output then has the model, its code and tokenizer, a model card, metrics.json, curves.png, recipe.yaml and
the checkpoints.

Exit code: 0 trained; 1 the training failed; 2 bad usage or data; 130 or 143 stopped by Ctrl-C or SIGTERM, after a
checkpoint was saved: --resume continues.
"""

import sys
from functools import partial

from toolkit.finetuning.command_line import train
from toolkit.finetuning.task_settings import Seq2SeqSettings

main = partial(train, __file__, __doc__, Seq2SeqSettings)  # of the arguments; returns the exit code

if __name__ == "__main__":
    sys.exit(main())
