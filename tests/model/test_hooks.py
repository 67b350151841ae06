"""What a hook, a patch or a compiled part of other code sees: the tensors that `BertModel` shows."""

import functools

import pytest
import torch
from accelerate.hooks import AlignDevicesHook, add_hook_to_module
from torch import nn
from transformers import Trainer, TrainingArguments
from transformers.integrations.neftune import neftune_post_forward_hook

from modeling_scratchbert import unpadding
from modeling_scratchbert.attention import MultiHeadAttention
from support.comparison import assert_same_gradients, assert_same_tensors
from support.models import NO_DROPOUT, OURS, REFERENCES, VOCABULARY, randomise, tiny_config

LENGTHS = [4, 9, 1, 4, 6]


@pytest.fixture
def pair(tmp_path):
    """Makes a model and its reference, of the same large random weights."""

    def make(head="Model", **fields):
        ours = randomise(OURS[head](tiny_config(**{**NO_DROPOUT, **fields}))).eval()
        ours.save_as_bert(tmp_path)
        return ours, REFERENCES[head].from_pretrained(tmp_path).eval()

    return make


@pytest.fixture
def kernel_shapes(monkeypatch):
    """The shapes of the queries that the attention kernels are given."""
    seen = []
    split = MultiHeadAttention._split_heads

    def spy(self, projected):
        seen.append(tuple(projected.shape))
        return split(self, projected)

    monkeypatch.setattr(MultiHeadAttention, "_split_heads", spy)
    return seen


def batch():
    mask = (torch.arange(9) < torch.tensor(LENGTHS)[:, None]).long()
    return {"input_ids": torch.randint(1, VOCABULARY, (5, 9)), "attention_mask": mask}


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
    inputs, results = batch(), []
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
        ours(**batch())
    finally:
        handle.remove()
    assert set(kernel_shapes) == {(5, 9, 32)}
    kernel_shapes.clear()
    ours(**batch())
    assert set(kernel_shapes) == {(1, sum(LENGTHS), 32)}


def test_a_replaced_forward_sees_padded_tensors(pair, kernel_shapes):
    ours, reference = pair()
    inputs, shapes = batch(), []
    for module in (ours.encoder.blocks[1].feed_forward.intermediate, reference.encoder.layer[1].intermediate.dense):
        original = module.forward
        module.forward = lambda x, original=original: shapes.append(tuple(x.shape)) or original(x)
    for model in (ours, reference):
        model(**inputs)
    assert shapes == [(5, 9, 32), (5, 9, 32)]
    assert set(kernel_shapes) == {(5, 9, 32)}


def test_hooks_change_no_output(pair):
    ours, _ = pair()
    inputs = batch()
    plain = ours(**inputs)
    ours.encoder.blocks[0].register_forward_hook(lambda *_: None)
    observed = ours(**inputs)
    for name in ("last_hidden_state", "pooler_output"):
        assert_same_tensors({"": observed[name]}, {"": plain[name]})  # zeros at padding, too


def test_padding_free_in_the_call_overrides_a_hook(pair, kernel_shapes):
    ours, _ = pair()
    ours.encoder.blocks[0].register_forward_hook(lambda *_: None)
    ours(**batch(), padding_free=True)
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


@pytest.mark.parametrize("hook", FOREIGN.values(), ids=FOREIGN)
def test_any_callable_is_a_hook(hook, pair):
    ours, _ = pair()
    assert not unpadding.is_observed(ours.embeddings, ours.encoder)
    ours.encoder.blocks[1].feed_forward.output.register_forward_hook(hook)
    assert unpadding.is_observed(ours.embeddings, ours.encoder)


def test_the_hooks_of_the_libraries_around_it_do_not_count(pair, kernel_shapes):
    ours, _ = pair()
    ours.enable_input_require_grads()
    ours(**batch(), output_hidden_states=True, output_attentions=True)  # installs the hooks that record
    assert any(block._forward_hooks for block in ours.encoder.blocks)
    add_hook_to_module(ours.encoder.blocks[0], AlignDevicesHook())
    assert "forward" in vars(ours.encoder.blocks[0])
    ours.encoder.blocks[1].register_forward_pre_hook(functools.partial(torch.is_tensor))
    kernel_shapes.clear()
    assert not unpadding.is_observed(ours.embeddings, ours.encoder)
    ours.encoder.blocks[1]._forward_pre_hooks.clear()
    ours(**batch())
    assert set(kernel_shapes) == {(1, sum(LENGTHS), 32)}


@pytest.mark.parametrize("head", ["ForSequenceClassification"])
def test_neftune_noise_is_that_of_bert(head, pair, tmp_path):
    """NEFTune scales its noise by alpha / sqrt(T · C) of what its hook sees (Jain et al. 2023, section 2)."""
    columns = zip(*batch().values(), strict=True)
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
        ours(**batch(), padding_free=True)
    assert shapes == [(sum(LENGTHS),)]


@pytest.mark.parametrize("part", ["lm_head", "lm_head.decoder", "lm_head.norm"])
@pytest.mark.parametrize("head", ["ForMaskedLM", "ForPreTraining"])
def test_a_hook_on_a_head_sees_one_whole_tensor(head, part, pair):
    ours, _ = pair(head)
    inputs = {name: tensor.repeat(70, 1) for name, tensor in batch().items()}  # more than 256 tokens
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
    inputs, shapes = batch(), []
    labels = inputs["input_ids"].masked_fill((inputs["attention_mask"] == 0) | (inputs["input_ids"] % 2 == 0), -100)
    expected = ours(**inputs, labels=labels)
    ours.lm_head.register_forward_hook(lambda _, args, output: shapes.append(tuple(output.shape[:2])))
    outputs = ours(**inputs, labels=labels)
    assert shapes == [(5, 9)]
    assert outputs.logits.shape == expected.logits.shape == ((labels != -100).sum(), VOCABULARY)
    assert_same_tensors({"": outputs.logits, "loss": outputs.loss}, {"": expected.logits, "loss": expected.loss})


# ---------------------------------------------------------------------------------------------------------------------
# Compiled parts


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


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
    inputs = batch()
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
    inputs = {name: tensor[:, :width].clone() for name, tensor in batch().items()}
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
    inputs = batch()
    expected = ours(**inputs).last_hidden_state
    compile_blocks(ours)
    outputs = ours(**inputs, padding_free=True).last_hidden_state
    assert_same_tensors({"": outputs}, {"": expected})
    if dropout:
        ours.train()
        assert not torch.equal(*(ours(**inputs, padding_free=True).last_hidden_state for _ in range(2)))


@pytest.mark.parametrize("path", ["encoder", "encoder.blocks.0", "encoder.blocks.1.attention.query"])
def test_a_module_replaced_by_torch_compile_gets_padded_tensors(path, pair, kernel_shapes):
    ours, reference = pair()
    inputs = batch()
    expected = reference(**inputs)
    ours.set_submodule(path, torch.compile(ours.get_submodule(path), backend="eager"))
    real = inputs["attention_mask"].bool()
    outputs = ours(**inputs)
    assert set(kernel_shapes) <= {(5, 9, 32)}
    assert_same_tensors({"": outputs.last_hidden_state}, {"": expected.last_hidden_state}, real)
