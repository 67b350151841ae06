"""transformers' own tests of a model, `ModelTesterMixin` and `ConfigTester`, on the classes of one family.

Run it through `run.py`, which fetches those tests as the package `transformers_tests` and names the family.
"""

import importlib
import os
import unittest
from unittest import mock

import torch
from transformers import set_seed
from transformers.models.auto import modeling_auto
from transformers.testing_utils import torch_device
from transformers_tests.test_configuration_common import ConfigTester
from transformers_tests.test_modeling_common import ModelTesterMixin, global_rng, ids_tensor, random_attention_mask

from modeling_scratchbert.versions import CACHE

# Family: where its classes are, how their names begin, and which names have something else after that than ours. The
# yardsticks are `bert`, and `bart` for a model with an encoder and a decoder, which BERT has no class for.
FAMILIES = {
    "scratchbert": ("modeling_scratchbert", "ScratchBert", {}),
    "bert": ("transformers", "Bert", {"ForCausalLM": "LMHeadModel"}),
    "bart": ("transformers", "Bart", {"Seq2SeqModel": "Model"}),
}
FAMILY = os.environ["CONFORMANCE_FAMILY"]

HEADS = (
    "Model",
    "ForPreTraining",
    "ForMaskedLM",
    "ForNextSentencePrediction",
    "ForSequenceClassification",
    "ForTokenClassification",
    "ForQuestionAnswering",
    "ForMultipleChoice",
)
DECODERS = ("Model", "ForCausalLM")
TWO_HALVES = ("Seq2SeqModel", "ForConditionalGeneration")


def family_name(name: str, family: str = FAMILY) -> str:
    """A family's name for the class that is `ScratchBert` + `name` among ours."""
    _, prefix, others = FAMILIES[family]
    return prefix + others.get(name, name)


def family_classes(*names: str) -> tuple[type, ...]:
    module = importlib.import_module(FAMILIES[FAMILY][0])
    return tuple(getattr(module, family_name(name)) for name in names)


(CONFIG_CLASS,) = family_classes("Config")


def enter_into_name_tables() -> None:
    """Put our family beside BERT and BART in transformers' tables `MODEL_…_MAPPING_NAMES`, model type -> class names.

    The mixin asks these tables, by class name, what a class is, and passes over one that it does not find:

    - MODEL: `test_model_forward_default_config_values`, `test_inputs_embeds_matches_input_ids` and
      `test_base_model_prefix_loads_base_weights` (this one by model type) would check no class at all; the training
      tests would take the base model for a head, and ask it for a loss.
    - FOR_SEQUENCE_CLASSIFICATION: `test_problem_types`, `test_load_with_mismatched_shapes` and
      `test_can_load_ignoring_mismatched_shapes` would check no class at all.
    - FOR_SEQ_TO_SEQ_CAUSAL_LM: the test that the loss does not shift the labels twice would check no class at all.
    - FOR_MULTIPLE_CHOICE: the inputs would have no dimension of choices, in any test.
    - These three, FOR_MASKED_LM, FOR_CAUSAL_LM, FOR_NEXT_SENTENCE_PREDICTION, FOR_TOKEN_CLASSIFICATION and
      FOR_QUESTION_ANSWERING: the inputs would have no labels. `test_model_outputs_equivalence` would compare no loss,
      `test_enable_input_require_grads_with_gradient_checkpointing` take the first output for the loss, and the other
      training tests fail.
    - FOR_PRETRAINING: the mixin does not look there for BERT's kind; `EncoderConformanceTest` adds those labels.

    Only the names of the classes under test are entered. CONFIG_MAPPING_NAMES must not have the family: transformers
    would then look for the classes in its own `models` folder instead of where `AutoConfig.register` and
    `AutoModel.register` noted them.
    """
    missing = {*HEADS, *DECODERS, *TWO_HALVES}
    for table, classes in vars(modeling_auto).items():
        if not (table.startswith("MODEL_") and table.endswith("MAPPING_NAMES")):
            continue
        names = [
            name
            for yardstick, among in (("bert", {*HEADS, *DECODERS}), ("bart", TWO_HALVES))
            for name in among
            if family_name(name, yardstick) == classes.get(yardstick)
        ]
        if names:
            classes[CONFIG_CLASS.model_type] = tuple(map(family_name, names))
            missing -= set(names)
    if missing:
        raise RuntimeError(f"transformers has no table for {sorted(missing)}; its tests would pass them over")


if FAMILY == "scratchbert":
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
    num_labels = 3

    def fields(self):
        return {
            "vocab_size": self.vocab_size,
            "type_vocab_size": self.type_vocab_size,
            "hidden_size": self.hidden_size,
            "num_hidden_layers": self.num_hidden_layers,
            "num_attention_heads": self.num_attention_heads,
            "intermediate_size": 37,
            "max_position_embeddings": 64,
        }

    def get_config(self):
        return CONFIG_CLASS(**self.fields())

    def prepare_config_and_inputs_for_common(self):
        shape = (self.batch_size, self.seq_length)
        inputs = {
            "input_ids": ids_tensor(shape, self.vocab_size),
            "token_type_ids": ids_tensor(shape, self.type_vocab_size),
            "attention_mask": random_attention_mask(shape),
        }
        return self.get_config(), inputs

    def output_shapes(self):
        """What each class returns, by its name, and in which shapes."""
        batch, tokens = self.batch_size, (self.batch_size, self.seq_length)
        hidden, vocabulary = (*tokens, self.hidden_size), (*tokens, self.vocab_size)
        return {
            "Model": {"last_hidden_state": hidden, "pooler_output": (batch, self.hidden_size)},
            "ForPreTraining": {"prediction_logits": vocabulary, "seq_relationship_logits": (batch, 2)},
            "ForMaskedLM": {"logits": vocabulary},
            "ForNextSentencePrediction": {"logits": (batch, 2)},
            "ForSequenceClassification": {"logits": (batch, self.num_labels)},
            "ForTokenClassification": {"logits": (*tokens, self.num_labels)},
            "ForQuestionAnswering": {"start_logits": tokens, "end_logits": tokens},
            "ForMultipleChoice": {"logits": (batch, self.num_choices)},
        }


class DecoderTester(ModelTester):
    def fields(self):
        return super().fields() | {"is_decoder": True}

    def output_shapes(self):
        shapes, cache = super().output_shapes(), {CACHE: self.seq_length}
        return {"Model": shapes["Model"] | cache, "ForCausalLM": shapes["ForMaskedLM"] | cache}


class Seq2SeqTester(ModelTester):
    def fields(self):
        if FAMILY != "bart":
            return super().fields() | {"is_encoder_decoder": True, "decoder_start_token_id": 2, "eos_token_id": 3}
        sizes = {"vocab_size": self.vocab_size, "d_model": self.hidden_size, "max_position_embeddings": 64}
        for half in ("encoder", "decoder"):
            sizes |= {
                f"{half}_layers": self.num_hidden_layers,
                f"{half}_attention_heads": self.num_attention_heads,
                f"{half}_ffn_dim": 37,
            }
        return sizes

    def prepare_config_and_inputs_for_common(self):
        config, inputs = super().prepare_config_and_inputs_for_common()
        if FAMILY == "bart":
            del inputs["token_type_ids"]
        shape = (self.batch_size, self.seq_length)
        inputs["decoder_input_ids"] = ids_tensor(shape, self.vocab_size)
        inputs["decoder_attention_mask"] = random_attention_mask(shape)
        return config, inputs

    def output_shapes(self):
        tokens = (self.batch_size, self.seq_length)
        hidden = (*tokens, self.hidden_size)
        others = {CACHE: self.seq_length, "encoder_last_hidden_state": hidden}
        return {
            "Seq2SeqModel": {"last_hidden_state": hidden} | others,
            "ForConditionalGeneration": {"logits": (*tokens, self.vocab_size)} | others,
        }


def shape(value):
    """Of a tensor, or the length of a cache."""
    return tuple(value.shape) if isinstance(value, torch.Tensor) else value.get_seq_length()


class Conformance(ModelTesterMixin):
    """Every test of the mixin, and those that a model's own test file adds to them in transformers."""

    if FAMILY == "scratchbert":

        @unittest.skip("both names of a cache are supported, without a warning")
        def test_bc_cache_name_forward(self):
            """See tests/model/test_versions.py."""

    # else the mixin spares a model whose configuration file has no copyright line of 2023 or later
    test_can_init_all_missing_weights_before_2023 = True
    required_inputs = ["input_ids"]

    def setUp(self):
        set_seed(0)
        global_rng.seed(0)  # the mixin's inputs come from here
        self.model_tester = self.make_tester()
        self.config_tester = ConfigTester(self, config_class=CONFIG_CLASS, **self.model_tester.fields())

    def test_config(self):
        self.config_tester.run_common_tests()

    def test_output_shapes(self):
        """Each class gives its outputs, and no others, in the right shapes, whichever inputs it is given."""
        config, inputs = self.model_tester.prepare_config_and_inputs_for_common()
        for name, shapes in self.model_tester.output_shapes().items():
            # BERT's question answering has no use for more than its two labels, start and end
            config.num_labels = 2 if name == "ForQuestionAnswering" else self.model_tester.num_labels
            (model_class,) = family_classes(name)
            model = model_class(config).to(torch_device).eval()
            prepared = self._prepare_for_class(inputs, model_class)
            others = [[key] for key in prepared if key not in self.required_inputs]
            for given in ([], *others, list(prepared)):
                given = dict.fromkeys([*self.required_inputs, *given])
                with self.subTest(model_class.__name__, given=list(given)), torch.no_grad():
                    outputs = model(**{key: prepared[key] for key in given})
                    assert {key: shape(value) for key, value in outputs.items()} == shapes


class EncoderConformanceTest(Conformance, unittest.TestCase):
    __test__ = FAMILY != "bart"
    all_model_classes = family_classes(*HEADS) if __test__ else ()
    make_tester = ModelTester

    def _prepare_for_class(self, inputs_dict, model_class, return_labels=False):
        inputs = super()._prepare_for_class(inputs_dict, model_class, return_labels=return_labels)
        if return_labels and model_class.__name__ == family_name("ForPreTraining"):
            batch_size, seq_length = self.model_tester.batch_size, self.model_tester.seq_length
            inputs["labels"] = torch.zeros((batch_size, seq_length), dtype=torch.long, device=torch_device)
            inputs["next_sentence_label"] = torch.zeros(batch_size, dtype=torch.long, device=torch_device)
        return inputs


class GeneratingConformance(Conformance):
    def test_generation_tester_mixin_inheritance(self):
        self.skipTest("the source distribution of transformers leaves out its tests of `generate`")


class DecoderConformanceTest(GeneratingConformance, unittest.TestCase):
    __test__ = FAMILY != "bart"
    all_model_classes = family_classes(*DECODERS) if __test__ else ()
    make_tester = DecoderTester


class Seq2SeqConformanceTest(GeneratingConformance, unittest.TestCase):
    __test__ = FAMILY != "bert"
    all_model_classes = family_classes(*TWO_HALVES) if __test__ else ()
    make_tester = Seq2SeqTester
    is_encoder_decoder = True
    required_inputs = ["input_ids", "decoder_input_ids"]

    def test_base_model_prefix_loads_base_weights(self):
        # It takes every child of a class in this table for the base model; ours has two such children, its halves.
        base_model = {CONFIG_CLASS.model_type: family_name("Seq2SeqModel")}
        with mock.patch.dict(modeling_auto.MODEL_MAPPING_NAMES, base_model):
            super().test_base_model_prefix_loads_base_weights()
