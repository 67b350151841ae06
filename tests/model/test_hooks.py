"""What a hook, a patch or a compiled part of other code sees: the tensors that `BertModel` shows."""

import functools

import pytest
import torch
from accelerate.hooks import AlignDevicesHook, add_hook_to_module
from torch import nn
from transformers import Trainer, TrainingArguments
from transformers.integrations.neftune import neftune_post_forward_hook

from support.comparison import assert_same_gradients, assert_same_tensors
from support.models import VOCABULARY
from support.unpadded import draw

LENGTHS = [4, 9, 1, 4, 6]


# Where the same tensor is in the reference and in ours.
PLACES = {
    "embeddings": ("embeddings", "embeddings"),
    "word embeddings": ("embeddings.word_embeddings", "embeddings.word_embeddings"),
    "block": ("encoder.layer.1", "encoder.blocks.1"),
    "query": ("encoder.layer.0.attention.self.query", "encoder.blocks.0.attention.query"),
    "intermediate": ("encoder.layer.1.intermediate.dense", "encoder.blocks.1.feed_forward.intermediate"),
}
KINDS = ("forward", "pre", "backward", "backward pre")
# BERT passes the arguments of its embeddings by keyword.
SEEN = [(place, kind) for place in PLACES for kind in KINDS if (place, kind) != ("embeddings", "pre")]


def first(value):
    return value[0] if isinstance(value, tuple) else value


def register(kind, module, seen):
    """Registers a hook that adds the first tensor that it sees to `seen`."""
    if kind == "forward":
        module.register_forward_hook(lambda _, args, output: seen.append(first(output)))
    elif kind == "pre":
        module.register_forward_pre_hook(lambda _, args: seen.append(first(args)))
    elif kind == "backward":
        module.register_full_backward_hook(lambda _, into, out: seen.append(first(out)))
    else:
        module.register_full_backward_pre_hook(lambda _, out: seen.append(first(out)))


@pytest.mark.parametrize(("place", "kind"), SEEN)
def test_a_hook_sees_what_it_sees_in_bert(kind, place, pair):
    ours, reference = pair()
    inputs, results = draw(), []
    real = inputs["attention_mask"].bool()
    for model, path in zip((reference, ours), PLACES[place], strict=True):
        seen: list = []
        register(kind, model.get_submodule(path), seen)
        states = model(**inputs).last_hidden_state
        (states[real] ** 2).sum().backward()
        results.append([tensor.detach() for tensor in seen if tensor is not None])
    assert len(results[0]) == len(results[1]) == 1
    expected, actual = results[0][0], results[1][0]
    assert actual.shape == expected.shape
    assert actual.shape[:2] == (5, 9)
    if actual.is_floating_point() and "backward" in kind:
        assert_same_gradients({"": actual}, {"": expected})
    else:
        assert_same_tensors({"": actual}, {"": expected})


@pytest.mark.parametrize("register", ["forward_hook", "forward_pre_hook", "full_backward_hook"])
def test_global_hooks_see_padded_tensors(register, pair, kernel_shapes):
    ours, _ = pair()
    register = getattr(nn.modules.module, f"register_module_{register}")
    handle = register(lambda *_: None)
    try:
        ours(**draw())
    finally:
        handle.remove()
    assert set(kernel_shapes) == {(5, 9, 32)}
    kernel_shapes.clear()
    ours(**draw())
    assert set(kernel_shapes) == {(1, sum(LENGTHS), 32)}


def test_a_replaced_forward_sees_padded_tensors(pair, kernel_shapes):
    ours, reference = pair()
    inputs, shapes = draw(), []
    for module in (ours.encoder.blocks[1].feed_forward.intermediate, reference.encoder.layer[1].intermediate.dense):
        original = module.forward
        module.forward = lambda x, original=original: shapes.append(tuple(x.shape)) or original(x)
    for model in (ours, reference):
        model(**inputs)
    assert shapes == [(5, 9, 32), (5, 9, 32)]
    assert set(kernel_shapes) == {(5, 9, 32)}


def test_hooks_change_no_output(pair):
    ours, _ = pair()
    inputs = draw()
    plain = ours(**inputs)
    ours.encoder.blocks[0].register_forward_hook(lambda *_: None)
    observed = ours(**inputs)
    for name in ("last_hidden_state", "pooler_output"):
        assert_same_tensors({"": observed[name]}, {"": plain[name]})  # zeros at padding, too


def test_padding_free_in_the_call_overrides_a_hook(pair, kernel_shapes):
    ours, _ = pair()
    ours.encoder.blocks[0].register_forward_hook(lambda *_: None)
    ours(**draw(), padding_free=True)
    assert set(kernel_shapes) == {(1, sum(LENGTHS), 32)}


class Reader:
    """A hook that is an object, and one that is a method."""

    def __call__(self, *_):
        return None

    read = __call__


FOREIGN = {
    "function": lambda *_: None,
    "partials": functools.partial(functools.partial(lambda *_: None), None),
    "object": Reader(),
    "method": Reader().read,
    "builtin": [].append,
    "NEFTune": neftune_post_forward_hook,
}


def inspect(model) -> tuple[bool, bool]:
    """Whether the modules, and the hooks, allow an unpadded batch."""
    return model.inspection(model.embeddings, model.encoder)


@pytest.mark.parametrize("hook", FOREIGN.values(), ids=FOREIGN)
def test_any_callable_is_a_hook(hook, pair):
    ours, _ = pair()
    assert inspect(ours) == (True, True)
    ours.encoder.blocks[1].feed_forward.output.register_forward_hook(hook)
    assert inspect(ours) == (True, False)


def test_the_hooks_of_the_libraries_around_it_do_not_count(pair, kernel_shapes):
    ours, _ = pair()
    ours.enable_input_require_grads()
    ours(**draw(), output_hidden_states=True, output_attentions=True)  # installs the hooks that record
    assert any(block._forward_hooks for block in ours.encoder.blocks)
    add_hook_to_module(ours.encoder.blocks[0], AlignDevicesHook())
    assert "forward" in vars(ours.encoder.blocks[0])
    ours.encoder.blocks[1].register_forward_pre_hook(functools.partial(torch.distributed.is_available))
    kernel_shapes.clear()
    assert inspect(ours) == (True, True)
    ours.encoder.blocks[1]._forward_pre_hooks.clear()
    ours(**draw())
    assert set(kernel_shapes) == {(1, sum(LENGTHS), 32)}


@pytest.mark.parametrize("head", ["ForSequenceClassification"])
def test_neftune_noise_is_that_of_bert(head, pair, tmp_path):
    """NEFTune scales its noise by alpha / sqrt(T · C) of what its hook sees (Jain et al. 2023, section 2)."""
    columns = zip(*draw().values(), strict=True)
    rows = [{"input_ids": ids, "attention_mask": mask, "labels": torch.tensor(0)} for ids, mask in columns]
    losses = []
    for model in pair(head):
        arguments = TrainingArguments(
            str(tmp_path / "run"),
            per_device_train_batch_size=len(rows),
            max_steps=2,
            neftune_noise_alpha=5,
            report_to=[],
            save_strategy="no",
            logging_steps=1,
            use_cpu=True,
            disable_tqdm=True,
        )
        trainer = Trainer(model, arguments, train_dataset=rows)
        trainer.train()
        losses.append([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
    ours, reference = losses
    assert len(ours) == 2
    assert ours == pytest.approx(reference, abs=1e-5)


def test_padding_free_in_the_call_overrides_a_hook_on_a_head(pair):
    ours, _ = pair("ForMaskedLM")
    shapes = []
    ours.lm_head.register_forward_hook(lambda _, args, output: shapes.append(tuple(output.shape[:-1])))
    with torch.no_grad():
        ours(**draw(), padding_free=True)
    assert shapes == [(sum(LENGTHS),)]


@pytest.mark.parametrize("part", ["lm_head", "lm_head.decoder", "lm_head.norm"])
@pytest.mark.parametrize("head", ["ForMaskedLM", "ForPreTraining"])
def test_a_hook_on_a_head_sees_one_whole_tensor(head, part, pair):
    ours, _ = pair(head)
    inputs = {name: tensor.repeat(70, 1) for name, tensor in draw().items()}  # more than 256 tokens
    real = inputs["attention_mask"].bool()
    with torch.no_grad():
        expected, shapes = ours(**inputs), []
        ours.get_submodule(part).register_forward_hook(lambda _, args, output: shapes.append(tuple(output.shape[:2])))
        outputs = ours(**inputs)
    assert shapes == [(350, 9)]
    field = "logits" if head == "ForMaskedLM" else "prediction_logits"
    assert_same_tensors({"": outputs[field]}, {"": expected[field]}, real)


def test_a_hook_on_a_head_sees_one_whole_tensor_with_sparse_prediction_too(pair):
    ours, _ = pair("ForMaskedLM", sparse_prediction=True)
    inputs, shapes = draw(), []
    labels = inputs["input_ids"].masked_fill((inputs["attention_mask"] == 0) | (inputs["input_ids"] % 2 == 0), -100)
    expected = ours(**inputs, labels=labels)
    ours.lm_head.register_forward_hook(lambda _, args, output: shapes.append(tuple(output.shape[:2])))
    outputs = ours(**inputs, labels=labels)
    assert shapes == [(5, 9)]
    assert outputs.logits.shape == expected.logits.shape == ((labels != -100).sum(), VOCABULARY)
    assert_same_tensors({"": outputs.logits, "loss": outputs.loss}, {"": expected.logits, "loss": expected.loss})


# ---------------------------------------------------------------------------------------------------------------------
# Compiled parts
