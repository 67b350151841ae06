"""What vLLM's Transformers backend asks of a custom model. vLLM requires a GPU, so a stand-in makes the same calls, as
vLLM 0.33 does, with an attention in place of the model's own that has the lengths from outside."""

import ast
import inspect
import textwrap

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AutoConfig, AutoModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from modeling_scratchbert.attention import MultiHeadAttention
from support.models import random_scratchbert

LENGTHS = [5, 1, 17, 9, 20]
NAME = "served by another"


def test_the_kernel_is_found_in_the_source():
    """vLLM reads the source of `forward` for the one call of a kernel out of the interface, and for its `scaling`,
    which must be an attribute."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(MultiHeadAttention.forward)))
    assigned = [node for node in ast.walk(tree) if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call)]
    kernels = [
        node.targets[0].id
        for node in assigned
        if ast.unparse(node.value.func) == "ALL_ATTENTION_FUNCTIONS.get_interface"
    ]
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and ast.unparse(node.func) in kernels]
    assert len(calls) == 1
    [scaling] = [ast.unparse(keyword.value) for keyword in calls[0].keywords if keyword.arg == "scaling"]
    attention = random_scratchbert("Model").encoder.blocks[1].attention
    assert scaling.startswith("self.")
    assert getattr(attention, scaling.removeprefix("self.")) == attention.head_width**-0.5
    assert attention.layer_idx == 1
    assert attention.is_causal is False


def attention_of_vllm(attention: MultiHeadAttention, heads: int):
    """The attention that vLLM puts into each of a model's: tokens of all requests in one row, `(N, C)`, no mask."""

    def attend(*projections: torch.Tensor) -> torch.Tensor:
        parts = [each.unflatten(-1, (heads, -1)).transpose(0, 1).split(LENGTHS, dim=1) for each in projections]
        options = {"scale": attention.scaling, "is_causal": attention.is_causal}
        results = [scaled_dot_product_attention(*part, **options) for part in zip(*parts, strict=True)]
        return torch.cat(results, dim=1).transpose(0, 1).flatten(1)

    return attend


def served_attention(module, query, key, value, attention_mask, **kwargs):
    assert attention_mask is None
    rows = [each.transpose(1, 2).flatten(2)[0] for each in (query, key, value)]
    return module.attn(*rows), None


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"norm_first": True, "position_embedding_type": "sinusoidal"},
        {"is_decoder": True},
        {"architectures": ["ScratchBertForMaskedLM"]},
    ],
    ids=str,
)
def test_requests_of_all_lengths_in_one_row(monkeypatch, tmp_path, fields):
    """Without padding, masks, or a limit to how many tokens all requests have together."""
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, NAME, served_attention)
    reference = random_scratchbert("Model", **fields)
    reference.save_pretrained(tmp_path)
    config = AutoConfig.from_pretrained(tmp_path, trust_remote_code=True)
    config._attn_implementation = NAME
    model = AutoModel.from_config(config, trust_remote_code=True).eval()
    assert type(model).is_backend_compatible()
    model.load_state_dict(reference.state_dict())
    for block in model.encoder.blocks:
        block.attention.attn = attention_of_vllm(block.attention, config.num_attention_heads)

    ids = torch.randint(config.vocab_size, (sum(LENGTHS),))
    positions = torch.cat([torch.arange(length) for length in LENGTHS])[None]
    assert sum(LENGTHS) > config.max_position_embeddings
    with torch.no_grad():
        expected = torch.cat([reference(part[None]).last_hidden_state[0] for part in ids.split(LENGTHS)])
        embeddings = model.get_input_embeddings()(ids)[None]
        for inputs in ({"input_ids": ids[None]}, {"inputs_embeds": embeddings}):
            states = model(**inputs, use_cache=False, position_ids=positions, return_dict=False)[0][0]
            torch.testing.assert_close(states, expected, rtol=0, atol=1e-5)


def test_the_plan_divides_every_matrix_of_a_block_in_a_way_that_vllm_knows():
    model = random_scratchbert("Model")
    start = "encoder.blocks.*."
    styles = {name.removeprefix(start): style for name, style in model.tp_plan.items() if name.startswith(start)}
    modules = model.encoder.blocks[0].named_modules()
    assert styles.keys() == {name for name, module in modules if isinstance(module, torch.nn.Linear)}
    assert set(styles.values()) == {"colwise", "rowwise"}
