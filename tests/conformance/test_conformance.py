"""transformers' own tests of a model, `ModelTesterMixin` and `ConfigTester`, on the classes of one family.

Run it through `run.py`, which fetches those tests as the package `transformers_tests` and names the family.
"""

import importlib
import os
import unittest

import torch
from transformers import set_seed
from transformers.models.auto import modeling_auto
from transformers.testing_utils import torch_device
from transformers_tests.test_configuration_common import ConfigTester
from transformers_tests.test_modeling_common import ModelTesterMixin, global_rng, ids_tensor, random_attention_mask

# Family: where its classes are, and how their names begin. `bert` is the yardstick.
FAMILIES = {"scratchbert": ("modeling_scratchbert", "ScratchBert"), "bert": ("transformers", "Bert")}
MODULE, PREFIX = FAMILIES[os.environ["CONFORMANCE_FAMILY"]]


def family_class(name: str) -> type:
    """The family's class for a name without its prefix."""
    return getattr(importlib.import_module(MODULE), PREFIX + name)


CONFIG_CLASS = family_class("Config")
MODEL_CLASSES = tuple(
    family_class(name)
    for name in (
        "Model",
        "ForPreTraining",
        "ForMaskedLM",
        "ForNextSentencePrediction",
        "ForSequenceClassification",
        "ForTokenClassification",
        "ForQuestionAnswering",
        "ForMultipleChoice",
    )
)


def enter_into_name_tables() -> None:
    """Put the family beside BERT in transformers' tables `MODEL_…_MAPPING_NAMES`, model type -> class name.

    The mixin asks these tables, by class name, what a class is, and passes over one that it does not find:

    - MODEL: `test_model_forward_default_config_values`, `test_inputs_embeds_matches_input_ids` and
      `test_base_model_prefix_loads_base_weights` (this one by model type) would check no class at all; the training
      tests would take the base model for a head, and ask it for a loss.
    - FOR_SEQUENCE_CLASSIFICATION: `test_problem_types`, `test_load_with_mismatched_shapes` and
      `test_can_load_ignoring_mismatched_shapes` would check no class at all.
    - FOR_MULTIPLE_CHOICE: the inputs would have no dimension of choices, in any test.
    - These two, FOR_MASKED_LM, FOR_NEXT_SENTENCE_PREDICTION, FOR_TOKEN_CLASSIFICATION and FOR_QUESTION_ANSWERING: the
      inputs would have no labels. `test_model_outputs_equivalence` would compare no loss,
      `test_enable_input_require_grads_with_gradient_checkpointing` take the first output for the loss, and the other
      training tests fail.
    - FOR_PRETRAINING: the mixin does not look there for BERT's kind; `ConformanceTest` adds those labels.

    Only the names of the classes under test are entered, so not the causal one. CONFIG_MAPPING_NAMES must not have the
    family: transformers would then look for the classes in its own `models` folder instead of where
    `AutoConfig.register` and `AutoModel.register` noted them.
    """
    names = {model_class.__name__ for model_class in MODEL_CLASSES}
    entered = set()
    for table, classes in vars(modeling_auto).items():
        if table.startswith("MODEL_") and table.endswith("MAPPING_NAMES") and "bert" in classes:
            name = PREFIX + classes["bert"].removeprefix("Bert")
            if name in names:
                classes[CONFIG_CLASS.model_type] = name
                entered.add(name)
    if entered != names:
        raise RuntimeError(f"transformers has no table for {sorted(names - entered)}; its tests would pass them over")


enter_into_name_tables()


class ModelTester:
    """The sizes, configuration and inputs that the mixin asks for; it knows the attributes by these names."""

    is_training = True  # else the mixin skips its training tests
    batch_size = 13
    seq_length = 7
    num_choices = 4
    vocab_size = 99
    type_vocab_size = 2
    hidden_size = 32
    num_hidden_layers = 2
    num_attention_heads = 4

    def get_config(self):
        return CONFIG_CLASS(
            vocab_size=self.vocab_size,
            type_vocab_size=self.type_vocab_size,
            hidden_size=self.hidden_size,
            num_hidden_layers=self.num_hidden_layers,
            num_attention_heads=self.num_attention_heads,
            intermediate_size=37,
            max_position_embeddings=64,
        )

    def prepare_config_and_inputs_for_common(self):
        shape = (self.batch_size, self.seq_length)
        inputs = {
            "input_ids": ids_tensor(shape, self.vocab_size),
            "token_type_ids": ids_tensor(shape, self.type_vocab_size),
            "attention_mask": random_attention_mask(shape),
        }
        return self.get_config(), inputs


class ConformanceTest(ModelTesterMixin, unittest.TestCase):
    """Every test of the mixin, and those that a model's own test file adds to them in transformers."""

    all_model_classes = MODEL_CLASSES
    # else the mixin spares a model whose configuration file has no copyright line of 2023 or later
    test_can_init_all_missing_weights_before_2023 = True

    def setUp(self):
        set_seed(0)
        global_rng.seed(0)  # the mixin's inputs come from here
        self.model_tester = ModelTester()
        self.config_tester = ConfigTester(self, config_class=CONFIG_CLASS, hidden_size=32, num_attention_heads=4)

    def _prepare_for_class(self, inputs_dict, model_class, return_labels=False):
        inputs = super()._prepare_for_class(inputs_dict, model_class, return_labels=return_labels)
        if return_labels and model_class is family_class("ForPreTraining"):
            batch_size, seq_length = self.model_tester.batch_size, self.model_tester.seq_length
            inputs["labels"] = torch.zeros((batch_size, seq_length), dtype=torch.long, device=torch_device)
            inputs["next_sentence_label"] = torch.zeros(batch_size, dtype=torch.long, device=torch_device)
        return inputs

    def test_config(self):
        self.config_tester.run_common_tests()

    def test_output_shapes(self):
        """Each class gives its outputs, and no others, in the right shapes, whichever inputs it is given."""
        tester = self.model_tester
        config, inputs = tester.prepare_config_and_inputs_for_common()
        batch, tokens, labels = tester.batch_size, (tester.batch_size, tester.seq_length), 3
        hidden, vocabulary = (*tokens, tester.hidden_size), (*tokens, tester.vocab_size)
        expected = {
            "Model": {"last_hidden_state": hidden, "pooler_output": (batch, tester.hidden_size)},
            "ForPreTraining": {"prediction_logits": vocabulary, "seq_relationship_logits": (batch, 2)},
            "ForMaskedLM": {"logits": vocabulary},
            "ForNextSentencePrediction": {"logits": (batch, 2)},
            "ForSequenceClassification": {"logits": (batch, labels)},
            "ForTokenClassification": {"logits": (*tokens, labels)},
            "ForQuestionAnswering": {"start_logits": tokens, "end_logits": tokens},
            "ForMultipleChoice": {"logits": (batch, tester.num_choices)},
        }
        for name, shapes in expected.items():
            # BERT's question answering has no use for more than its two labels, start and end
            config.num_labels = 2 if name == "ForQuestionAnswering" else labels
            model_class = family_class(name)
            model = model_class(config).to(torch_device).eval()
            prepared = self._prepare_for_class(inputs, model_class)
            for given in (["input_ids"], ["input_ids", "token_type_ids"], list(prepared)):
                with self.subTest(model_class.__name__, given=given), torch.no_grad():
                    outputs = model(**{key: prepared[key] for key in given})
                    assert {key: tuple(value.shape) for key, value in outputs.items()} == shapes
