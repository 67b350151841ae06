"""Models that are compiled whole: padded batches and packed sequences."""

import importlib
import shutil
from pathlib import Path

import pytest
import torch
import transformers

import modeling_scratchbert
from modeling_scratchbert import ScratchBertModel, unpadding
from support.comparison import assert_same_gradients, assert_same_tensors, flat
from support.models import VOCABULARY
from support.unpadded import FLASH, draw, flattened, make

optimised = pytest.mark.parametrize("optimised", [False, True], ids=["plain", "optimised"])


@optimised
def test_compiled_with_a_mask(optimised, compiled):
    ours, graphs = make(), []
    ours = ours.optimize_for_inference() if optimised else ours
    run = compiled(ours)
    for width in (9, 7, 8):
        batch = {name: tensor[:, :width].clone() for name, tensor in draw().items()}
        real = batch["attention_mask"].bool()
        assert_same_tensors(flat(run(**batch)), flat(ours(**batch)), real)
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert graphs[0] == graphs[2]


@optimised
def test_compiled_packed(optimised, compiled):
    ours, graphs = make(ScratchBertModel, False), []
    ours = ours.optimize_for_inference() if optimised else ours
    run = compiled(ours)
    for batch in (draw(), draw("scattered"), draw("scattered", batch=3)):
        packed = flattened(batch, **FLASH)
        expected = ours(**packed).last_hidden_state
        outputs = run(**packed).last_hidden_state
        assert_same_tensors({"": outputs}, {"": expected})
        if not optimised:
            gradients = (
                torch.autograd.grad(states.square().sum(), ours.get_input_embeddings().weight)[0]
                for states in (outputs, expected)
            )
            assert_same_gradients(*({"": gradient} for gradient in gradients))
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert graphs[1] == graphs[2]


def test_compiled_packed_training_drops_attention(compiled):
    packed = flattened(draw(), **FLASH)
    for dropout, same in ((1e-9, True), (0.5, False)):
        ours = make(ScratchBertModel, False, attention_probs_dropout_prob=dropout)
        expected = ours(**packed).last_hidden_state
        torch._dynamo.reset()
        outputs = compiled(ours.train())(**packed).last_hidden_state
        assert torch.allclose(outputs, expected, atol=1e-5) == same


def test_compiled_much_at_once(compiled, monkeypatch):
    monkeypatch.setattr(unpadding, "MAX_TENSOR_BYTES", 0)
    ours, packed = make(ScratchBertModel, False), flattened(draw(), **FLASH)
    with torch.no_grad():
        assert_same_tensors(flat(compiled(ours)(**packed)), flat(ours(**packed)))


@pytest.mark.parametrize("positions", [[0, 1, 2, 0, 1, 2], [0, 1, 2, 0, 5, 6], [0, 0, 0, 0, 0, 0], [0]])
def test_compiled_positions_mark_no_sequences(positions, compiled):
    """They cannot be read while tracing: with `padding_free`, packed sequences are marked by their lengths."""
    ours = make(ScratchBertModel, False)
    batch = {"input_ids": torch.randint(1, VOCABULARY, (1, len(positions))), "position_ids": torch.tensor([positions])}
    with pytest.raises(torch._dynamo.exc.Unsupported, match="cu_seq_lens_q"):
        compiled(ours)(**batch)
    whole = {**batch, "padding_free": False}
    assert_same_tensors(flat(compiled(ours)(**whole)), flat(ours(**whole)))


def test_a_second_copy_of_the_package_compiles_too(compiled, tmp_path, monkeypatch):
    """As remote code comes with a checkpoint, beside the package itself."""
    shutil.copytree(Path(unpadding.__file__).parent, tmp_path / "second_copy")
    monkeypatch.syspath_prepend(tmp_path)
    second = importlib.import_module("second_copy")
    importlib.reload(modeling_scratchbert)  # whose classes are again the ones that the Auto classes open
    first = make()
    other = second.ScratchBertModel(second.ScratchBertConfig(**first.config.to_diff_dict())).eval()
    other.load_state_dict(first.state_dict())
    packed = flattened(draw(), **FLASH)
    expected = first(**packed).last_hidden_state
    for model in (other, first):
        assert_same_tensors({"": compiled(model)(**packed).last_hidden_state}, {"": expected})
    assert transformers.AutoConfig.for_model("scratchbert").__class__ is modeling_scratchbert.ScratchBertConfig
