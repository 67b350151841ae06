#!/usr/bin/env python
"""Fine-tunes a BERT to tag the words of texts, such as named entities or parts of speech.

    finetune_token_classification.py --model google-bert/bert-base-cased --train_file train.jsonl
                                     --validation_file val.jsonl --output my-tagger
    finetune_token_classification.py configuration/recipes/entities.yaml --model MODEL --output entities-0
    accelerate launch --config_file configuration/two_process.yaml scripts/finetune_token_classification.py …

A row has a list of words (column tokens or words) and a list of as many tags (tags, ner_tags or labels); in CSV and
TSV, two texts whose words and tags are separated by spaces. In .conll and .txt, a line has a word in the first column
and its tag in the last, and blank lines are between sentences. Tags are IOB2: B-PER for the first word of a person,
I-PER for the words that follow, O outside; or any, with --scheme plain. IOB1 in CoNLL files is converted.

A row of more than --max_length tokens is read in overlapping windows. Each word is trained on, and tagged, in one of
them. The tag of a word is that of its first piece. A word without tokens, such as a zero-width space, is tagged O (with
--scheme plain: with the most frequent tag), and counts in the metrics.

The model head of --model is kept if it has the same tags, in their order there. It is new if it has other tags, or if
--labels gives another order.

The folder --output then has the model, its code and tokenizer, a model card, metrics.json, predictions_SPLIT.jsonl,
curves.png, recipe.yaml and the checkpoints.

Exit code: 0 trained; 1 the training failed; 2 bad usage or data; 130 or 143 stopped by Ctrl-C or SIGTERM, after a
checkpoint was saved: --resume continues.
"""

import sys
from functools import partial

from toolkit.finetuning.command_line import train
from toolkit.finetuning.task_settings import TokenClassificationSettings

main = partial(train, __file__, __doc__, TokenClassificationSettings)  # of the arguments; returns the exit code

if __name__ == "__main__":
    sys.exit(main())
