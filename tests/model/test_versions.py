"""The names that differ between versions of transformers, and what the loaders of older versions copy."""

import ast
import inspect
import re
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedConfig, PreTrainedModel, generation
from transformers.cache_utils import DynamicCache, EncoderDecoderCache
from transformers.generation import GenerationMixin

import modeling_scratchbert
from modeling_scratchbert import ScratchBertForCausalLM, ScratchBertForConditionalGeneration, ScratchBertModel
from modeling_scratchbert.versions import CACHE
from support.models import tiny_config

PACKAGE = Path(modeling_scratchbert.__file__).parent
# Each was found in 5.5.4, 5.10.4, 5.17.0, 5.20.2, 5.21.1, 5.23.0 and 5.24.0. Before a name is added here, look for it
# there, or run `make test-versions`; what is missing in one of them belongs into versions.py.
KNOWN = {
    "transformers": {
        *("AutoTokenizer", "BertConfig", "PreTrainedConfig", "PreTrainedModel", "initialization"),
        "modeling_outputs",
    },
    "transformers.activations": {
        "ACT2FN",
        "FastGELUActivation",
        "GELUActivation",
        "GELUTanh",
        "NewGELUActivation",
        "QuickGELUActivation",
        "SiLUActivation",
    },
    "transformers.cache_utils": {"Cache", "DynamicCache", "EncoderDecoderCache"},
    "transformers.core_model_loading": {"WeightRenaming"},
    "transformers.generation": {"GenerationMixin"},
    "transformers.integrations.flash_attention": {"flash_attention_forward"},
    "transformers.masking_utils": {
        "create_bidirectional_mask",
        "create_causal_mask",
        "create_masks_for_generate",
    },
    "transformers.modeling_layers": {"GradientCheckpointingLayer"},
    "transformers.modeling_outputs": {
        *("BaseModelOutput", "BaseModelOutputWithPoolingAndCrossAttentions", "CausalLMOutputWithCrossAttentions"),
        *("MaskedLMOutput", "MultipleChoiceModelOutput", "NextSentencePredictorOutput", "QuestionAnsweringModelOutput"),
        *("Seq2SeqLMOutput", "Seq2SeqModelOutput", "SequenceClassifierOutput", "TokenClassifierOutput"),
    },
    "transformers.modeling_utils": {"ALL_ATTENTION_FUNCTIONS", "load_state_dict"},
    "transformers.models.auto.modeling_auto": {"MODEL_FOR_CAUSAL_LM_MAPPING_NAMES"},
    "transformers.pytorch_utils": {"apply_chunking_to_forward"},
    "transformers.utils": {
        *("ModelOutput", "cached_file", "logging", "SAFE_WEIGHTS_INDEX_NAME", "SAFE_WEIGHTS_NAME"),
        *("WEIGHTS_INDEX_NAME", "WEIGHTS_NAME", "hub"),
    },
    "transformers.utils.generic": {"can_return_tuple", "merge_with_config_defaults"},
    "transformers.utils.hub": {"get_checkpoint_shard_files"},
    "transformers.utils.import_utils": {"is_tracing"},
    "transformers.utils.output_capturing": {"OutputRecorder", "_active_collector", "capture_outputs"},
}


def imports_of(path: Path) -> list[tuple[str, str]]:
    nodes = [node for node in ast.walk(ast.parse(path.read_text("utf-8"))) if isinstance(node, ast.ImportFrom)]
    return [("." * node.level + (node.module or ""), alias.name) for node in nodes for alias in node.names]


def test_names_of_transformers_are_in_every_supported_version():
    found = {pair for path in PACKAGE.rglob("*.py") for pair in imports_of(path) if pair[0].startswith("transformers")}
    unknown = {(module, name) for module, name in found if name not in KNOWN.get(module, ())}
    assert not unknown


# The methods and attributes of transformers that the package calls on caches, or overrides in configurations and
# models; in the same versions. A method that is overridden and no longer called would change what happens without an
# error.
OF_CACHES = {
    *("update", "get_seq_length", "reorder_cache", "is_compileable", "is_updated", "layers"),
    *("self_attention_cache", "cross_attention_cache"),
}
OVERRIDDEN = {
    PreTrainedConfig: {
        *("__post_init__", "from_dict", "get_config_dict", "get_text_config", "output_attentions", "save_pretrained"),
        *("to_dict", "validate_output_attentions"),
    },
    PreTrainedModel: {
        *("__init__", "_apply", "_from_config", "_get_files_timestamps", "_init_weights", "from_pretrained"),
        *("get_expanded_tied_weights_keys", "get_input_embeddings", "get_output_embeddings", "load_state_dict"),
        *("push_to_hub", "resize_token_embeddings", "save_pretrained", "set_input_embeddings"),
        *("set_output_embeddings", "train"),
    },
    GenerationMixin: {
        *("_prepare_decoder_input_ids_for_generation", "_prepare_model_inputs", "_prepare_special_tokens"),
        *("_validate_generated_length", "generate"),
    },
}


def test_methods_of_transformers_are_in_every_supported_version():
    bases = {name: cls for cls in OVERRIDDEN for name in OVERRIDDEN[cls]}
    for cls in (modeling_scratchbert.ScratchBertConfig, ScratchBertForConditionalGeneration):
        own = {name for each in cls.__mro__ if "scratchbert" in each.__module__ for name in vars(each)}
        inherited = {name for each in cls.__mro__ if each.__module__.startswith("transformers.") for name in vars(each)}
        overridden = {name for name in own & inherited if callable(getattr(cls, name, None))}
        # The last are made by decorators of configurations.
        assert overridden - {"forward", "config_class", "__eq__", "__setattr__", "validate", "__repr__"} <= bases.keys()
    for name, cls in bases.items():
        assert hasattr(cls, name), name
    assert '"create_masks_for_generate"' in inspect.getsource(generation.utils)  # it asks the model for one


def test_members_of_caches_are_in_every_supported_version():
    def is_cache(node):
        name = getattr(node, "id", getattr(node, "attr", ""))
        return name in ("cache", "past_key_values") or name.endswith("_cache")

    nodes = [node for path in PACKAGE.rglob("*.py") for node in ast.walk(ast.parse(path.read_text("utf-8")))]
    found = {node.attr for node in nodes if isinstance(node, ast.Attribute) and is_cache(node.value)}
    assert found <= OF_CACHES
    cache = EncoderDecoderCache(DynamicCache(), DynamicCache())
    for name in OF_CACHES:
        assert hasattr(cache if hasattr(cache, name) else cache.self_attention_cache, name), name


@pytest.mark.parametrize("file", ["configuration_scratchbert.py", "modeling_scratchbert.py"])
def test_files_that_loaders_open_name_every_copied_file(file):
    """Loaders before 5.9 copy from a local folder only what the file that they open names."""
    copied = {f".{path.stem}" for path in PACKAGE.glob("*.py")} - {".__init__", f".{Path(file).stem}"}
    assert copied <= {module for module, _ in imports_of(PACKAGE / file)}
    first, *_ = re.findall(r"^(?:from|import) .*", (PACKAGE / file).read_text("utf-8"), re.MULTILINE)
    assert first.startswith("from .versions import")


CACHED = {
    "model": (ScratchBertModel, {"is_decoder": True}, "input_ids"),
    "causal": (ScratchBertForCausalLM, {"is_decoder": True}, "input_ids"),
    "seq2seq": (ScratchBertForConditionalGeneration, {"is_encoder_decoder": True}, "decoder_input_ids"),
    "seq2seq model": (
        modeling_scratchbert.ScratchBertSeq2SeqModel,
        {"is_encoder_decoder": True},
        "decoder_input_ids",
    ),
}


@pytest.mark.parametrize("kind", CACHED)
@pytest.mark.parametrize("name", ["cache", "past_key_values"])
def test_a_cache_has_either_name(kind, name):
    cls, fields, ids_name = CACHED[kind]
    model, ids = cls(tiny_config(**fields)).eval(), torch.arange(3, 9)[None]
    source = {"input_ids": ids} if "seq2seq" in kind else {}
    with torch.no_grad():
        whole = model(**source, **{ids_name: ids})
        cache = getattr(model(**source, **{ids_name: ids[:, :4]}, use_cache=True), CACHE)
        rest = model(**source, **{ids_name: ids[:, 4:], name: cache}, use_cache=True)
        with pytest.raises(ValueError, match="cache and past_key_values"):
            model(**source, **{ids_name: ids[:, 4:]}, cache=cache, past_key_values=cache)
    states = "logits" if "logits" in whole else "last_hidden_state"
    torch.testing.assert_close(rest[states], whole[states][:, 4:], rtol=0, atol=1e-5)
    assert getattr(rest, CACHE) is cache
    assert CACHE in rest


@pytest.mark.parametrize("name", ["cache", "past_key_values"])
def test_generate_continues_a_cache_of_either_name(name):
    model, ids = ScratchBertForCausalLM(tiny_config(is_decoder=True)).eval(), torch.arange(3, 9)[None]
    expected, cache = model.generate(ids, max_new_tokens=5), DynamicCache(config=model.config)
    with torch.no_grad():
        model(ids[:, :4], past_key_values=cache, use_cache=True)
    assert torch.equal(model.generate(ids, max_new_tokens=5, **{name: cache}), expected)
    assert cache.get_seq_length() == ids.shape[1] + 4
    with pytest.raises(ValueError, match="cache and past_key_values"):
        model.generate(ids, max_new_tokens=5, cache=cache, past_key_values=cache)
