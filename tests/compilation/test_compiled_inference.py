"""`torch.compile` and export of models with prepacked weights."""

import pytest
import torch
from torch import nn

from support.comparison import assert_same_tensors
from support.models import inputs_for
from support.prepacked import compute, every_model, make, prepack, record_row_counts


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_row_counts_that_onednn_computes_are_bounded(dtype, compiled):
    layer = nn.Linear(36, 5).to(dtype)
    prepacked = prepack(layer)
    recorded = record_row_counts(prepacked.matrix)
    run = torch.compile(prepacked, backend="eager", dynamic=True) if compiled else prepacked
    x = torch.randn(1, 1024, 36, dtype=dtype)
    for rows in range(1, 1025):
        tokens = x[:, :rows].clone() if rows % 2 else x[:, 1024 - rows :]
        with torch.no_grad():
            actual, expected = run(tokens), layer(tokens)
        assert actual.stride() == expected.stride()
        torch.testing.assert_close(actual, expected)
    # 48 exact ones, which include all from 4 to 16; 8 for each power of two up to 128; 16 for each up to 1,024
    computed = set(recorded)
    assert set(range(4, 17)) <= computed
    assert min(computed) == 4  # one to three rows are computed as four
    assert len(computed) <= 48 + 3 * 8 + 3 * 16


@every_model
@pytest.mark.parametrize("dynamic", [False, True])
def test_it_compiles_whole(head, fields, dynamic):
    model = make(head, **fields, use_cache=False, num_hidden_layers=1).optimize_for_inference()
    compiled, inputs = torch.compile(model, fullgraph=True, backend="eager", dynamic=dynamic), inputs_for(head)
    assert_same_tensors(compute(compiled, inputs), compute(model, inputs))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_compiler_traces_and_the_operator_is_sound(dtype):
    layer = prepack(nn.Linear(36, 5, dtype=dtype))
    inputs = (torch.randn(2, 3, 36, dtype=dtype), layer.matrix.key, "none")
    torch.library.opcheck(torch.ops.scratchbert_cpu.linear, inputs)
    x = torch.randn(3, 2, 36).transpose(0, 1)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        actual = torch.compile(layer, fullgraph=True, backend="aot_eager")(x)
        assert actual.dtype == dtype
        assert torch.equal(actual, layer(x))


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
