#!/usr/bin/env python
"""Fine-tunes a BERT for question answering: the answer is a span of a text, or there is none.

    finetune_question_answering.py --model google-bert/bert-base-uncased --train_file train-v2.0.json
                                   --validation_file dev-v2.0.json --output my-reader
    finetune_question_answering.py configuration/recipes/questions.yaml --model MODEL --output questions-0
    accelerate launch --config_file configuration/two_process.yaml scripts/finetune_question_answering.py …

A row is one of SQuAD: id, question, context, and answers, {"text": [...], "answer_start": [...]}, in characters; both
lists are empty if the context has no answer. SQuAD's nested .json files are supported as well. The first of several
answers is trained on; in evaluations, any counts as correct.

A text of more than --max_length tokens, including the question, is read in overlapping windows. The target of a window
without the whole answer is [CLS], no answer (Devlin et al. 2018, section 4.3).

The folder --output then has the model, its code and tokenizer, a model card, metrics.json, the answers to each split
(predictions_SPLIT.jsonl; predictions_SPLIT.json, from id to text, as SQuAD's evaluation script expects), curves.png,
recipe.yaml and the checkpoints. question_answering.py answers questions with it, by default with the lengths and the
threshold of the training, which are in config.json.

Exit code: 0 trained; 1 the training failed; 2 bad usage or data; 130 or 143 stopped by Ctrl-C or SIGTERM, after a
checkpoint was saved: --resume continues.
"""

import sys
from functools import partial

from toolkit.finetuning.command_line import train
from toolkit.finetuning.task_settings import QuestionAnsweringSettings

main = partial(train, __file__, __doc__, QuestionAnsweringSettings)  # of the arguments; returns the exit code

if __name__ == "__main__":
    sys.exit(main())
