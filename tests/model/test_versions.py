"""What differs between versions of transformers: the name of a cache, and which files loaders copy."""

import ast
from pathlib import Path

import pytest
import torch
from transformers.cache_utils import DynamicCache

import modeling_scratchbert
from modeling_scratchbert import ScratchBertForCausalLM
from modeling_scratchbert.versions import CACHE
from support.models import NEEDS, OURS, tiny_config

PACKAGE = Path(modeling_scratchbert.__file__).parent
names = pytest.mark.parametrize("name", ["cache", "past_key_values"])


@pytest.mark.parametrize("file", ["configuration_scratchbert.py", "modeling_scratchbert.py"])
def test_files_that_loaders_open_name_every_copied_file(file):
    """Loaders before 5.9 copy from a local folder only what the file that they open names."""
    copied = {path.stem for path in PACKAGE.glob("*.py")} - {"__init__", Path(file).stem}
    source = (PACKAGE / file).read_text("utf-8")
    named = {node.module for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ImportFrom) and node.level}
    assert copied <= named


@pytest.mark.parametrize("head", ["Model", "ForCausalLM", "Seq2SeqModel", "ForConditionalGeneration"])
@names
def test_cache_of_either_name(head, name):
    fields = NEEDS.get(head, {"is_decoder": True})
    model, ids = OURS[head](tiny_config(**fields)).eval(), torch.arange(3, 9)[None]
    source, ids_name = (
        ({"input_ids": ids}, "decoder_input_ids") if "is_encoder_decoder" in fields else ({}, "input_ids")
    )
    whole = model(**source, **{ids_name: ids})
    cache = getattr(model(**source, **{ids_name: ids[:, :4]}, use_cache=True), CACHE)
    rest = model(**source, **{ids_name: ids[:, 4:], name: cache}, use_cache=True)
    torch.testing.assert_close(rest[0], whole[0][:, 4:], rtol=0, atol=1e-5)
    assert getattr(rest, CACHE) is cache
    with pytest.raises(ValueError, match="cache and past_key_values"):
        model(**source, **{ids_name: ids[:, 4:]}, cache=cache, past_key_values=cache)


@names
def test_generate_continues_a_cache_of_either_name(name):
    model, ids = ScratchBertForCausalLM(tiny_config(is_decoder=True)).eval(), torch.arange(3, 9)[None]
    expected, cache = model.generate(ids, max_new_tokens=5), DynamicCache(config=model.config)
    model(ids[:, :4], past_key_values=cache, use_cache=True)
    assert torch.equal(model.generate(ids, max_new_tokens=5, **{name: cache}), expected)
    assert cache.get_seq_length() == ids.shape[1] + 4
    with pytest.raises(ValueError, match="cache and past_key_values"):
        model.generate(ids, max_new_tokens=5, cache=cache, past_key_values=cache)
