"""`torch.compile`, `torch.export`, `torch.jit.trace` and `torch.func` on every head: one graph for all batches and
lengths, and the numbers of the model as it stands."""

import shutil
import warnings
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
import transformers
from torch.export import Dim
from torch.func import functional_call, grad, vmap
from torch.testing import assert_close

import modeling_scratchbert
from support.models import ENCODER_DECODERS, HEADS, NEEDS, NO_DROPOUT, OURS, inputs_for, tiny_config
from support.versions import checkpoint_activations

FIELDS = {
    **NO_DROPOUT,
    "num_hidden_layers": 1,  # compiling takes a second for each block
    "use_cache": False,
    # A compiled or exported model computes the padding, and is compared with a model that does.
    "padding_free": False,
    "bos_token_id": 1,  # the first token of a decoder
}
SHAPES = ((3, 7), (2, 5), (5, 12), (4, 40))  # batch, length; the last at the length's limit
PACKAGE = Path(modeling_scratchbert.__file__).parent


def make(head="Model", **fields):
    return OURS[head](tiny_config(**{**FIELDS, **NEEDS.get(head, {}), **fields})).eval()


def make_reference(model):
    """The `Bert…` class with the model's weights."""
    with TemporaryDirectory() as folder:
        model.save_as_bert(folder)
        reference = getattr(transformers, type(model).__name__.removeprefix("Scratch"))
        return reference.from_pretrained(folder).eval()


def assert_same(output, expected, atol=1e-6):
    assert list(output) == list(expected)
    for name in expected:
        assert_close(output[name], expected[name], rtol=0, atol=atol)


def graphs():
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


# torch.compile


@pytest.mark.parametrize("head", OURS)
def test_every_head_compiles_whole_and_once_for_all_shapes(head):
    model = make(head)
    compiled = torch.compile(model, fullgraph=True, backend="eager", dynamic=True)
    for batch, length in SHAPES:
        inputs = inputs_for(head, batch, length)
        assert_same(compiled(**inputs), model(**inputs))
    assert graphs() == 1


@pytest.mark.parametrize("head", [head for head in OURS if head not in ("Model", "Seq2SeqModel")])
def test_every_head_compiles_with_its_loss(head):
    # One that finds its problem type in the first labels would be compiled again once it is known, as the reference is.
    fields = {"problem_type": "single_label_classification"} if head == "ForSequenceClassification" else {}
    model = make(head, **fields)
    compiled = torch.compile(model, fullgraph=True, backend="eager", dynamic=True)
    for batch, length in SHAPES[:2]:
        inputs = inputs_for(head, batch, length, labels=True)
        assert_same(compiled(**inputs), model(**inputs))
    assert graphs() == 1


def test_a_compiled_model_learns_the_same():
    model = make("ForTokenClassification").train()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager", dynamic=True)
    for batch, length in SHAPES[:2]:
        inputs = inputs_for("ForTokenClassification", batch, length, labels=True)
        gradients = []
        for either in (compiled, model):
            model.zero_grad()
            either(**inputs).loss.backward()
            gradients.append({name: parameter.grad.clone() for name, parameter in model.named_parameters()})
        assert_close(gradients[0], gradients[1], rtol=1e-5, atol=1e-6)
    assert graphs() == 1


@pytest.mark.parametrize("problem", ["regression", "multi_label_classification", None])
def test_sequence_classification_compiles_for_every_problem(problem):
    model = make("ForSequenceClassification", num_labels=3, problem_type=problem)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    inputs = inputs_for() | {"labels": torch.rand(3, 3) if problem else torch.tensor([0, 2, 1])}
    assert_close(compiled(**inputs).loss, model(**inputs).loss)
    assert model.config.problem_type == (problem or "single_label_classification")


def test_marking_dimensions_as_dynamic_gives_one_graph():
    model = make(num_hidden_layers=2)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    for batch, length in SHAPES:
        inputs = inputs_for("Model", batch, length)
        for tensor in inputs.values():
            torch._dynamo.mark_dynamic(tensor, 0)
            torch._dynamo.mark_dynamic(tensor, 1)
        assert_same(compiled(**inputs), model(**inputs))
    assert graphs() == 1


@pytest.mark.parametrize(
    ("attention", "norm_first", "positions"),
    [("eager", False, "absolute"), ("eager", True, "sinusoidal"), ("sdpa", True, "sinusoidal")],
)
def test_every_kind_of_block_compiles(attention, norm_first, positions):
    model = make(norm_first=norm_first, position_embedding_type=positions, attn_implementation=attention)
    compiled = torch.compile(model, fullgraph=True, backend="eager", dynamic=True)
    for batch, length in SHAPES[:2]:
        inputs = inputs_for("Model", batch, length)
        assert_same(compiled(**inputs), model(**inputs))
    assert graphs() == 1


@pytest.mark.parametrize("given", ["ids alone", "positions", "embeddings", "full mask", "tuple"])
def test_every_kind_of_input_compiles(given):
    model = make()
    ids = inputs_for()["input_ids"]
    inputs = {
        "ids alone": {"input_ids": ids},
        "positions": {"input_ids": ids, "position_ids": torch.arange(7)[None] + 3},
        "embeddings": {"inputs_embeds": torch.randn(3, 7, 32)},
        "full mask": {"input_ids": ids, "attention_mask": torch.ones(7, 7, dtype=torch.bool).tril()[None, None]},
        "tuple": {"input_ids": ids, "return_dict": False},
    }[given]
    output, expected = torch.compile(model, fullgraph=True, backend="eager")(**inputs), model(**inputs)
    assert type(output) is type(expected)
    parts = (output, expected) if given == "tuple" else (output.to_tuple(), expected.to_tuple())
    assert_close(*parts, rtol=0, atol=1e-6)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_hidden_states_and_attentions_compile_once_they_have_been_asked_for(attention):
    """transformers sets its recording hooks at the first such call, under a lock that cannot be compiled whole; so too
    for the reference."""
    model = make(attn_implementation=attention, num_hidden_layers=2)
    inputs = inputs_for() | {"output_hidden_states": True, "output_attentions": True}
    expected = model(**inputs)
    compiled = torch.compile(model, fullgraph=True, backend="eager", dynamic=True)
    assert_same(compiled(**inputs), expected)
    assert len(compiled(**inputs).attentions) == 2


def test_a_decoder_compiles_with_an_encoders_output():
    model = make(is_decoder=True, add_cross_attention=True)
    inputs = inputs_for() | {"encoder_hidden_states": torch.randn(3, 5, 32), "use_cache": False}
    inputs["encoder_attention_mask"] = torch.tensor([[1, 1, 1, 0, 0], [1] * 5, [1] * 5])
    assert_same(torch.compile(model, fullgraph=True, backend="eager")(**inputs), model(**inputs))


def test_gradient_checkpointing_compiles():
    model = make(num_hidden_layers=2).train()
    inputs = inputs_for()

    def gradients(either):
        model.zero_grad()
        either(**inputs).last_hidden_state.pow(2).mean().backward()
        return {name: value.grad.clone() for name, value in model.encoder.named_parameters()}

    expected = gradients(model)
    checkpoint_activations(model, {"use_reentrant": False})
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert_close(gradients(compiled), expected, rtol=1e-5, atol=1e-7)


def test_a_compiled_model_still_says_what_is_wrong_with_shapes():
    compiled = torch.compile(make(), fullgraph=True, backend="eager")
    for arguments, words in (
        ((torch.ones(1, 41, dtype=torch.long),), "max_position_embeddings is 40"),
        ((torch.ones(2, 5, dtype=torch.long), torch.ones(2, 3)), "attention_mask has shape"),
    ):
        torch._dynamo.reset()
        with pytest.raises(Exception, match=words):
            compiled(*arguments)


@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor compiles C++, and there is no compiler")
def test_inductor_compiles_the_base_model_for_all_shapes():
    model = make()
    compiled = torch.compile(model, fullgraph=True, dynamic=True)
    with torch.no_grad():
        for batch, length in SHAPES:
            inputs = inputs_for("Model", batch, length)
            assert_same(compiled(**inputs), model(**inputs), atol=1e-5)
    assert graphs() == 1


# torch.export


def dynamic_shapes(head, inputs, batch, length):
    last = 2 if head == "ForMultipleChoice" else 1
    shapes = {name: {0: batch, last: length} for name in inputs}
    if head in ENCODER_DECODERS and length is not Dim.AUTO:
        shapes["decoder_input_ids"] = {0: batch, 1: Dim("target", max=40)}
    return shapes


@pytest.mark.parametrize("dimensions", ["automatic", "named"])
@pytest.mark.parametrize("head", OURS)
def test_every_head_exports_with_any_batch_and_length(head, dimensions):
    model = make(head)
    inputs = inputs_for(head)
    batch, length = (Dim.AUTO, Dim.AUTO)
    if dimensions == "named":
        batch, length = Dim("batch", max=1024), Dim("length", max=model.config.max_position_embeddings)
    shapes = dynamic_shapes(head, inputs, batch, length)
    exported = torch.export.export(model, (), inputs, dynamic_shapes=shapes, strict=False).module()
    for shape in SHAPES:
        inputs = inputs_for(head, *shape)
        assert_same(exported(**inputs), model(**inputs))


def test_export_can_be_strict():
    head = "ForSequenceClassification"
    model = make(head)
    inputs = inputs_for(head)
    shapes = dynamic_shapes(head, inputs, Dim("batch"), Dim("length", max=40))
    exported = torch.export.export(model, (), inputs, dynamic_shapes=shapes, strict=True).module()
    for shape in SHAPES:
        inputs = inputs_for(head, *shape)
        assert_same(exported(**inputs), model(**inputs))


@pytest.mark.parametrize(("attention", "norm_first"), [("sdpa", True), ("eager", False)])
def test_every_kind_of_block_exports(attention, norm_first):
    model = make(attn_implementation=attention, norm_first=norm_first, position_embedding_type="sinusoidal")
    inputs = inputs_for()
    shapes = dynamic_shapes("Model", inputs, Dim.DYNAMIC, Dim.DYNAMIC)
    exported = torch.export.export(model, (), inputs, dynamic_shapes=shapes, strict=False).module()
    for shape in SHAPES:
        inputs = inputs_for("Model", *shape)
        assert_same(exported(**inputs), model(**inputs))


def test_export_takes_a_full_mask_and_embeddings():
    model = make()
    batch, length = Dim("batch"), Dim("length", max=40)

    def inputs_of(rows, columns):
        return {
            "inputs_embeds": torch.randn(rows, columns, 32),
            "attention_mask": torch.ones(rows, 1, columns, columns, dtype=torch.bool).tril(),
            "position_ids": torch.arange(columns).flip(0).expand(rows, columns),
        }

    shapes = {
        "inputs_embeds": {0: batch, 1: length},
        "attention_mask": {0: batch, 2: length, 3: length},
        "position_ids": {0: batch, 1: length},
    }
    exported = torch.export.export(model, (), inputs_of(3, 7), dynamic_shapes=shapes, strict=False).module()
    for shape in SHAPES:
        inputs = inputs_of(*shape)
        assert_same(exported(**inputs), model(**inputs))


def test_an_exported_program_saves_and_loads(tmp_path):
    model = make("ForMaskedLM")
    inputs = inputs_for()
    shapes = dynamic_shapes("ForMaskedLM", inputs, Dim.AUTO, Dim.AUTO)
    program = torch.export.export(model, (), inputs, dynamic_shapes=shapes, strict=False)
    torch.export.save(program, tmp_path / "model.pt2")
    loaded = torch.export.load(tmp_path / "model.pt2").module()
    inputs = inputs_for("ForMaskedLM", 2, 11)
    assert_same(loaded(**inputs), model(**inputs))


def test_an_exported_program_holds_no_check_of_values():
    inputs = inputs_for()
    shapes = dynamic_shapes("Model", inputs, Dim.AUTO, Dim.AUTO)
    program = torch.export.export(make(), (), inputs, dynamic_shapes=shapes, strict=False)
    names = {str(node.target) for node in program.graph.nodes}
    assert not [name for name in names if "item" in name or "aminmax" in name or "local_scalar" in name]
    with pytest.raises(Exception, match="<= 40"):
        program.module()(**inputs_for("Model", 2, 41))


# torch.jit.trace


@pytest.mark.parametrize("head", HEADS)
def test_every_head_traces_and_runs_in_other_shapes(head):
    model = make(head)
    inputs = inputs_for(head)
    names = ("input_ids", "attention_mask", "token_type_ids")
    traced = torch.jit.trace(model, tuple(inputs[name] for name in names), strict=False)
    for shape in SHAPES:
        inputs = inputs_for(head, *shape)
        output, expected = traced(*(inputs[name] for name in names)), model(**inputs)
        assert list(output) == list(expected)
        for name in expected:
            assert_close(output[name], expected[name], rtol=0, atol=1e-5)


def test_tracing_raises_no_alarm_over_our_code():
    """A check decides nothing about the result; "the trace might not generalize" would be said without a cause. The
    reference's own code draws no such warning either."""
    arguments = tuple(inputs_for().values())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.jit.trace(make(), arguments, strict=False)
    alarms = [f"{warning.filename}:{warning.lineno}" for warning in caught if str(PACKAGE) in warning.filename]
    assert alarms == []


# torch.func


def per_example_loss(model):
    def loss(parameters, ids):
        return functional_call(model, parameters, (ids[None],)).last_hidden_state.pow(2).sum()

    return loss


def test_functional_calls_take_other_parameters():
    model, other = make(), make()
    inputs = inputs_for()
    output = functional_call(model, dict(other.named_parameters()), (), inputs)
    assert_same(output, other(**inputs))


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_gradients_of_each_example_come_out_of_vmap_as_from_the_reference():
    """As differential privacy and influence functions take them. Ids under `vmap` have no values to be checked."""
    model = make(attn_implementation="eager")
    ids = inputs_for()["input_ids"]
    reference = make_reference(model)
    reference.set_attn_implementation("eager")
    gradients = []
    for either, name in ((reference, "bert"), (model, "ours")):
        parameters = dict(either.named_parameters())
        together = vmap(grad(per_example_loss(either)), (None, 0))(parameters, ids)
        for row in range(len(ids)):
            alone = grad(per_example_loss(either))(parameters, ids[row])
            for key, value in alone.items():
                assert_close(together[key][row], value, rtol=1e-4, atol=1e-5, msg=lambda text, name=name: name + text)
        gradients.append(together["embeddings.word_embeddings.weight"])
    assert_close(gradients[1], gradients[0], rtol=1e-4, atol=1e-4)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_an_ensemble_runs_under_vmap():
    models = [make() for _ in range(2)]
    stacked, _ = torch.func.stack_module_state(models)
    inputs = inputs_for()

    def run(parameters):
        return functional_call(models[0], parameters, (), inputs).last_hidden_state

    together = vmap(run)(stacked)
    for output, model in zip(together, models, strict=True):
        assert_close(output, model(**inputs).last_hidden_state, rtol=0, atol=1e-5)


def test_inference_mode_runs_and_leaves_training_intact():
    model = make()
    inputs = inputs_for()
    with torch.inference_mode():
        output = model(**inputs).last_hidden_state
    assert output.is_inference()
    trained = model(**inputs).last_hidden_state
    assert_close(output, trained.detach(), rtol=0, atol=1e-6)
    trained.sum().backward()
