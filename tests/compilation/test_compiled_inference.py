"""`torch.compile` and export of models with prepacked weights."""

import pytest
import torch
from torch import nn

from support.comparison import assert_same_tensors
from support.models import inputs_for
from support.prepacked import compute, every_model, make, prepack


@every_model
@pytest.mark.parametrize("dynamic", [False, True])
def test_it_compiles_whole(head, fields, dynamic):
    model = make(head, **fields, use_cache=False, num_hidden_layers=1).optimize_for_inference()
    compiled, inputs = torch.compile(model, fullgraph=True, backend="eager", dynamic=dynamic), inputs_for(head)
    assert_same_tensors(compute(compiled, inputs), compute(model, inputs))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_compiler_traces_and_the_operator_is_sound(dtype):
    layer = prepack(nn.Linear(36, 5, dtype=dtype))
    inputs = [torch.randn(2, 3, 36, dtype=dtype)]
    torch.library.opcheck(torch.ops.scratchbert_cpu.compute, (layer.key, [torch.empty(2, 3, 5)], inputs, []))
    x = torch.randn(3, 2, 36).transpose(0, 1)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        actual = torch.compile(layer, fullgraph=True, backend="aot_eager")(x)
        assert actual.dtype == dtype
        assert torch.equal(actual, layer(x))


@pytest.mark.parametrize("fields", [{}, {"is_decoder": True}], ids=str)
def test_the_operator_of_the_stack_is_sound(fields):
    stack = make("Model", **fields).optimize_for_inference().encoder
    starts = torch.tensor([0, 3, 6], dtype=torch.int32)
    for last, width in ((0, 3 * stack.attention_width), (2, 0)):
        results = [torch.randn(2, 3, stack.width), torch.empty(2, 3, width)]
        inputs = stack.key, results, [None, starts, *[None] * 8], [0, last]
        torch.library.opcheck(torch.ops.scratchbert_cpu.compute, inputs)


def test_a_compiled_model_s_copy_computes_with_its_own_weights():
    compiled = {}
    for seed in (1, 2):
        torch.manual_seed(seed)
        layer = prepack(nn.Linear(4, 3))
        compiled[layer] = torch.compile(layer, fullgraph=True, backend="eager")
    x = torch.randn(2, 4)
    for layer, graph in compiled.items():
        assert torch.equal(graph(x), layer(x))


def test_export_and_tracing_are_refused():
    model, ids = make("Model", return_dict=False).optimize_for_inference(), inputs_for()["input_ids"]
    for export in (lambda: torch.export.export(model, (ids,), strict=False), lambda: torch.jit.trace(model, (ids,))):
        with pytest.raises(RuntimeError, match=r"[Ee]xport.* before optimize_for_inference\(\)"):
            export()
