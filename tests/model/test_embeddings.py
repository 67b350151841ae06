"""Embeddings against BERT's own, and the sinusoidal table against the paper's formula."""

import math

import pytest
import torch
from transformers import BertConfig, BertModel
from transformers.models.bert.modeling_bert import BertEmbeddings

from modeling_scratchbert import ScratchBertForMaskedLM, ScratchBertModel
from modeling_scratchbert.embeddings import Embeddings, SinusoidalPositions, sinusoidal_table
from modeling_scratchbert.versions import CACHE
from support.models import randomise, tiny_config

# BERT's argument for the number of cached tokens.
LENGTH_NAME = "cache_length" if CACHE == "cache" else "past_key_values_length"


def paper(length: int, width: int) -> torch.Tensor:
    """Vaswani et al. 2017, section 3.5, number by number."""
    table = torch.empty(length, width, dtype=torch.float64)
    for pos in range(length):
        for i in range(width // 2):
            table[pos, 2 * i] = math.sin(pos / 10000 ** (2 * i / width))
            table[pos, 2 * i + 1] = math.cos(pos / 10000 ** (2 * i / width))
    return table


@pytest.mark.parametrize(("length", "width"), [(1, 2), (7, 6), (40, 120), (512, 64)])
def test_sinusoidal_table_is_the_papers(length, width):
    table = sinusoidal_table(length, width)
    assert table.dtype == torch.float32
    half_a_unit = torch.finfo(torch.float32).eps / 4  # of numbers from 1/2 to 1
    torch.testing.assert_close(table.double(), paper(length, width), rtol=0, atol=1.01 * half_a_unit)


def test_sinusoidal_positions_look_the_table_up():
    positions = SinusoidalPositions(40, 6)
    ids = torch.tensor([[3, 39, 0], [1, 1, 2]])
    torch.testing.assert_close(positions(ids), paper(40, 6)[ids].float(), rtol=0, atol=1e-7)
    assert not list(positions.parameters())


@pytest.fixture
def references():
    """Our embeddings and BERT's, with the same weights."""

    def make(**fields):
        theirs = randomise(BertEmbeddings(tiny_config(BertConfig, **fields))).eval()
        ours = Embeddings(tiny_config(**fields)).eval()
        ours.load_state_dict(
            {name.replace("LayerNorm", "norm"): tensor for name, tensor in theirs.state_dict().items()}
        )
        return ours, theirs

    return make


IDS = torch.tensor([[5, 7, 9, 0], [98, 1, 1, 2]])
TYPES = torch.tensor([[0, 0, 1, 1], [1, 0, 1, 0]])
POSITIONS = torch.tensor([[0, 0, 1, 2], [39, 3, 3, 20]])


@pytest.mark.parametrize(
    "arguments",
    [
        {"input_ids": IDS},
        {"input_ids": IDS, "token_type_ids": TYPES},
        {"input_ids": IDS, "position_ids": POSITIONS},
        {"input_ids": IDS, "position_ids": POSITIONS[1:]},
        {"input_ids": IDS, "token_type_ids": TYPES, "position_ids": POSITIONS},
        {"input_ids": IDS[:, :1]},
        {"inputs_embeds": torch.linspace(-1, 1, 2 * 4 * 32).view(2, 4, 32), "token_type_ids": TYPES},
    ],
    ids=lambda arguments: ", ".join(f"{name} {tuple(tensor.shape)}" for name, tensor in arguments.items()),
)
@pytest.mark.parametrize("past_length", [0, 30])
def test_equal_berts(arguments, past_length, references):
    ours, theirs = references()
    expected = theirs(**arguments, **{LENGTH_NAME: past_length})
    torch.testing.assert_close(ours(**arguments, past_length=past_length), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("pad_token_id", [0, 1, None])
def test_the_padding_row_learns_nothing(pad_token_id, references):
    ours, theirs = references(pad_token_id=pad_token_id)
    for module in (ours, theirs):
        module(input_ids=IDS).square().sum().backward()
    gradient, expected = ours.word_embeddings.weight.grad, theirs.word_embeddings.weight.grad
    torch.testing.assert_close(gradient, expected)
    used = [i for i in IDS.unique().tolist() if i != pad_token_id]
    assert gradient.any(dim=-1).nonzero().flatten().tolist() == used


@pytest.mark.parametrize("head", [ScratchBertModel, ScratchBertForMaskedLM])
def test_sinusoidal_model_is_bert_with_the_papers_table(head):
    """A learned table that holds the paper's numbers is the same model, all else equal."""
    sinusoidal = randomise(head(tiny_config(position_embedding_type="sinusoidal"))).eval()
    learned = head(tiny_config()).eval()
    missing, unexpected = learned.load_state_dict(sinusoidal.state_dict(), strict=False)
    assert ([name.rpartition("embeddings.")[-1] for name in missing], unexpected) == (["weight"], [])
    assert "position_embeddings" in missing[0]
    with torch.no_grad():
        learned.base_model.embeddings.position_embeddings.weight.copy_(paper(40, 32))
    position_ids = POSITIONS
    torch.testing.assert_close(sinusoidal(IDS)[0], learned(IDS)[0], rtol=0, atol=1e-6)
    torch.testing.assert_close(
        sinusoidal(IDS, position_ids=position_ids)[0], learned(IDS, position_ids=position_ids)[0], rtol=0, atol=1e-6
    )
    assert (sinusoidal(IDS)[0] - sinusoidal(IDS, position_ids=position_ids)[0]).abs().max() > 0.1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_sinusoidal_table_is_not_saved_and_comes_back(dtype, tmp_path):
    model = randomise(ScratchBertModel(tiny_config(position_embedding_type="sinusoidal"))).eval()
    assert not [name for name in model.state_dict() if "position" in name]
    model.save_pretrained(tmp_path)
    # `from_pretrained` builds the model without memory and fills in what the file holds: not the table.
    loaded, info = ScratchBertModel.from_pretrained(tmp_path, dtype=dtype, output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    table = loaded.embeddings.position_embeddings.table
    assert table.dtype == dtype
    # Half a unit in the last place of numbers from 1/2 to 1, and as much again for a stop at float32 on the way.
    tolerance = torch.finfo(dtype).eps / 4 + torch.finfo(torch.float32).eps / 4
    torch.testing.assert_close(table.double(), paper(40, 32), rtol=0, atol=tolerance)
    if dtype == torch.float32:
        torch.testing.assert_close(loaded(IDS)[0], model(IDS)[0], rtol=0, atol=0)


def test_sinusoidal_table_after_the_meta_device():
    config = tiny_config(position_embedding_type="sinusoidal")
    with torch.device("meta"):
        model = ScratchBertModel(config)
    assert model.embeddings.position_embeddings.table.is_meta
    model.to_empty(device="cpu")
    model.embeddings.position_embeddings.table.fill_(math.nan)  # what stands in fresh memory is anything
    model.init_weights()
    table = model.embeddings.position_embeddings.table
    torch.testing.assert_close(table.double(), paper(40, 32), rtol=0, atol=1e-7)


def test_learned_positions_are_saved(tmp_path):
    assert "embeddings.position_embeddings.weight" in ScratchBertModel(tiny_config()).state_dict()
    assert "embeddings.position_embeddings.weight" in BertModel(tiny_config(BertConfig)).state_dict()
