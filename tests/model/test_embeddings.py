"""Sinusoidal positions against the paper's formula. `test_parity` compares the other embeddings with BERT's."""

import math

import pytest
import torch

from modeling_scratchbert import ScratchBertModel
from modeling_scratchbert.embeddings import sinusoidal_table
from support.models import randomise, tiny_config

IDS = torch.tensor([[5, 7, 9, 0], [98, 1, 1, 2]])
POSITIONS = torch.tensor([[0, 0, 1, 2], [39, 3, 3, 20]])


def paper(length: int, width: int) -> torch.Tensor:
    """Vaswani et al. 2017, section 3.5, number by number."""
    table = torch.empty(length, width, dtype=torch.float64)
    for pos in range(length):
        for i in range(width // 2):
            table[pos, 2 * i] = math.sin(pos / 10000 ** (2 * i / width))
            table[pos, 2 * i + 1] = math.cos(pos / 10000 ** (2 * i / width))
    return table


def sinusoidal_model():
    return randomise(ScratchBertModel(tiny_config(position_embedding_type="sinusoidal"))).eval()


@pytest.mark.parametrize(("length", "width"), [(7, 6), (512, 64)])
def test_sinusoidal_table_of_the_paper(length, width):
    table = sinusoidal_table(length, width)
    assert table.dtype == torch.float32
    half_a_unit = torch.finfo(torch.float32).eps / 4  # of numbers from 1/2 to 1
    torch.testing.assert_close(table.double(), paper(length, width), rtol=0, atol=1.01 * half_a_unit)


@pytest.mark.parametrize("pad_token_id", [0, 1, None])
def test_gradient_of_the_padding_row_is_zero(pad_token_id):
    model = ScratchBertModel(tiny_config(pad_token_id=pad_token_id)).eval()
    model(IDS).last_hidden_state[..., 0].sum().backward()
    changed = model.get_input_embeddings().weight.grad.any(dim=-1).nonzero().flatten().tolist()
    assert changed == [i for i in IDS.unique().tolist() if i != pad_token_id]


def test_sinusoidal_model_is_bert_with_the_table_of_the_paper():
    sinusoidal, learned = sinusoidal_model(), ScratchBertModel(tiny_config()).eval()
    missing, unexpected = learned.load_state_dict(sinusoidal.state_dict(), strict=False)
    assert (missing, unexpected) == (["embeddings.position_embeddings.weight"], [])
    with torch.no_grad():
        learned.embeddings.position_embeddings.weight.copy_(paper(40, 32))
    for options in ({}, {"position_ids": POSITIONS}):
        torch.testing.assert_close(sinusoidal(IDS, **options)[0], learned(IDS, **options)[0], rtol=0, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_sinusoidal_table_is_not_saved_and_is_made_again(dtype, tmp_path):
    model = sinusoidal_model()
    model.save_pretrained(tmp_path)
    # `from_pretrained` builds the model without memory and fills in what the file holds: not the table.
    loaded, info = ScratchBertModel.from_pretrained(tmp_path, dtype=dtype, output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    table = loaded.embeddings.position_embeddings.table
    assert table.dtype == dtype
    # Half a unit in the last place of numbers from 1/2 to 1, and as much again for a stop at float32 on the way.
    tolerance = torch.finfo(dtype).eps / 4 + torch.finfo(torch.float32).eps / 4
    torch.testing.assert_close(table.double(), paper(40, 32), rtol=0, atol=tolerance)


def test_sinusoidal_table_after_the_meta_device():
    with torch.device("meta"):
        model = ScratchBertModel(tiny_config(position_embedding_type="sinusoidal"))
    model.to_empty(device="cpu")
    table = model.embeddings.position_embeddings.table
    table.fill_(math.nan)  # what stands in fresh memory is anything
    model.init_weights()
    torch.testing.assert_close(table.double(), paper(40, 32), rtol=0, atol=1e-7)
