#!/usr/bin/env python
"""Fine-tunes a BERT to classify texts or pairs of texts: one label, several labels, or a number.

    finetune_classification.py --model google-bert/bert-base-uncased --train_file train.csv --validation_file val.csv
                               --output my-classifier
    finetune_classification.py configuration/recipes/movie_reviews.yaml --seed 1 --output reviews-1
    accelerate launch --config_file configuration/two_process.yaml scripts/finetune_classification.py …

Files have a column of texts (text, sentence, sentence1, premise, question1), for pairs a second one (sentence2,
hypothesis, question2), and one of labels (label, labels, score). Flags name other columns.

The model head of --model is kept if it has the same labels, in their order there. It is new if it has other labels, or
if --labels gives another order.

The folder --output then has the model, its code and tokenizer, a model card, metrics.json, predictions_SPLIT.jsonl,
curves.png, confusion_matrix.png, recipe.yaml and the checkpoints.

Exit code: 0 trained; 1 the training failed; 2 bad usage or data; 130 or 143 stopped by Ctrl-C or SIGTERM, after a
checkpoint was saved: --resume continues.
"""

import sys
from functools import partial

from toolkit.finetuning.command_line import train
from toolkit.finetuning.task_settings import ClassificationSettings

main = partial(train, __file__, __doc__, ClassificationSettings)  # of the arguments; returns the exit code

if __name__ == "__main__":
    sys.exit(main())
