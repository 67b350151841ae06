"""Models of which a part is compiled."""

import shutil

import pytest
import torch

from support.comparison import assert_same_gradients, assert_same_tensors
from support.unpadded import draw


def compile_blocks(model):
    for block in model.base_model.encoder.blocks:
        block.compile(backend="eager")


PARTS = {
    "blocks": compile_blocks,
    "encoder": lambda model: model.base_model.encoder.compile(backend="eager"),
    "base model": lambda model: model.base_model.compile(backend="eager"),
}


@pytest.mark.parametrize("compile_part", PARTS.values(), ids=PARTS)
@pytest.mark.parametrize("head", ["ForSequenceClassification", "ForMaskedLM"])
def test_attention_dropout_is_on_in_compiled_parts(head, compile_part, pair):
    ours, _ = pair(head, attention_probs_dropout_prob=0.5)
    inputs = draw()
    expected = ours(**inputs).logits
    compile_part(ours)
    with torch.no_grad():
        assert_same_tensors({"": ours(**inputs).logits}, {"": expected}, inputs["attention_mask"].bool())
        ours.train()
        one, other = ours(**inputs).logits, ours(**inputs).logits
    assert not torch.allclose(one, other)


@pytest.mark.parametrize("width", [1, 9])
@pytest.mark.parametrize("compile_part", PARTS.values(), ids=PARTS)
def test_compiled_parts_train_on_padded_batches(compile_part, width, pair):
    """Dropout that is as good as none: the gradients are those of the reference."""
    ours, reference = pair("ForTokenClassification", attention_probs_dropout_prob=1e-9)
    inputs = {name: tensor[:, :width].clone() for name, tensor in draw().items()}
    inputs["attention_mask"][2] = 0
    labels = torch.randint(0, 2, inputs["input_ids"].shape).masked_fill(inputs["attention_mask"] == 0, -100)
    compile_part(ours.train())
    losses = [model(**inputs, labels=labels).loss for model in (ours, reference)]
    assert_same_tensors({"": losses[0]}, {"": losses[1]})
    for loss in losses:
        loss.backward()
    grads = [model.get_input_embeddings().weight.grad for model in (ours, reference)]
    assert_same_gradients({"": grads[0]}, {"": grads[1]})


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_unpadded_tensors_in_compiled_blocks_by_request(dropout, pair, kernel_shapes):
    ours, _ = pair(attention_probs_dropout_prob=dropout)
    inputs = draw()
    expected = ours(**inputs).last_hidden_state
    compile_blocks(ours)
    outputs = ours(**inputs, padding_free=True).last_hidden_state
    assert_same_tensors({"": outputs}, {"": expected}, inputs["attention_mask"].bool())
    if dropout:
        ours.train()
        assert not torch.equal(*(ours(**inputs, padding_free=True).last_hidden_state for _ in range(2)))


@pytest.mark.parametrize("path", ["encoder", "encoder.blocks.0", "encoder.blocks.1.attention.query"])
def test_a_module_replaced_by_torch_compile_gets_padded_tensors(path, pair, kernel_shapes):
    ours, reference = pair()
    inputs = draw()
    expected = reference(**inputs)
    ours.set_submodule(path, torch.compile(ours.get_submodule(path), backend="eager"))
    real = inputs["attention_mask"].bool()
    outputs = ours(**inputs)
    assert set(kernel_shapes) <= {(5, 9, 32)}
    assert_same_tensors({"": outputs.last_hidden_state}, {"": expected.last_hidden_state}, real)


@pytest.mark.skipif(shutil.which("g++") is None, reason="flex attention is compiled, and there is no compiler")
def test_flex_attention_agrees(pair):
    ours, reference = pair()
    inputs = draw()
    ours.set_attn_implementation("flex_attention")
    with torch.no_grad():  # on the CPU it has no backward pass
        outputs, expected = ours(**inputs).last_hidden_state, reference(**inputs).last_hidden_state
        assert_same_tensors({"": outputs}, {"": expected}, inputs["attention_mask"].bool())
        assert ours(**inputs, output_attentions=True).attentions[0].shape == (5, 4, 9, 9)
