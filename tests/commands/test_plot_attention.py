"""`scripts/plot_attention.py`: what it draws are the model's attentions, with labels that can be read."""

import base64
import importlib.util
import itertools
import json
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
import torch
from matplotlib.figure import Figure
from matplotlib.transforms import Bbox
from transformers import BertConfig, BertForMaskedLM, BertModel

import plot_attention
from modeling_scratchbert import (
    ScratchBertForCausalLM,
    ScratchBertForConditionalGeneration,
    ScratchBertModel,
    ScratchBertSeq2SeqModel,
)
from support.command_tokenizer import CLS, PAD, SEP, make_tokenizer
from support.models import randomise, tiny_config
from toolkit import attention_plot
from toolkit.attention_plot import Attention, attention, draw, save
from toolkit.attention_plot import open_for_attention as open_model

SENTENCE = "the dog sees a cat walking ."
TOKENS = ["[CLS]", "the", "dog", "sees", "a", "cat", "walk", "##ing", ".", "[SEP]"]
TARGET = "it sleeps"
PNG = b"\x89PNG\r\n\x1a\n"

pytestmark = pytest.mark.usefixtures("quiet_only_here")


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, str]:
    """A checkpoint of each kind, with its tokenizer: 2 layers of 4 heads, 40 positions."""
    tokenizer = make_tokenizer()
    fields = {"vocab_size": len(tokenizer), "num_decoder_layers": 1}
    one = {"vocab_size": len(tokenizer)}
    both = {"is_encoder_decoder": True, "decoder_start_token_id": CLS, "eos_token_id": SEP, "pad_token_id": PAD}
    models = {
        "bert": BertModel(tiny_config(BertConfig, **one)),
        "masked": BertForMaskedLM(tiny_config(BertConfig, **one)),  # has no pooler
        "encoder": ScratchBertModel(tiny_config(**one)),
        "causal": ScratchBertForCausalLM(tiny_config(is_decoder=True, **one)),
        "seq2seq": ScratchBertForConditionalGeneration(tiny_config(**both, **fields)),
        "headless": ScratchBertSeq2SeqModel(tiny_config(**both, **fields)),
    }
    found = {}
    for name, model in models.items():
        found[name] = str(tmp_path_factory.mktemp(name))
        randomise(model, seed=5).save_pretrained(found[name])
        tokenizer.save_pretrained(found[name])
    return found


@pytest.fixture
def made_up():
    """Makes the weights of so many layers and heads between tokens."""

    def make(layers, heads, queries, keys=None, kind="self-attention") -> Attention:
        keys = queries if keys is None else keys
        weights = torch.randn(layers, heads, len(queries), len(keys)).softmax(-1)
        return Attention(weights, queries, keys, kind, "a text")

    return make


def found_in(folders, name, kind=None, target=None, sentence=SENTENCE, **options) -> Attention:
    tokenizer, model, kind = open_model(folders[name], kind, target)
    return attention(model, tokenizer, sentence, kind, target, **options)


def maps_of(figure) -> list:
    """The axes of the maps, without that of the colour bar."""
    return figure.axes[:-1]


def drawn(figure) -> torch.Tensor:
    """The weights in the images, `(maps, queries, keys)`."""
    assert all(len(axes.images) == 1 for axes in maps_of(figure))
    return torch.stack([torch.tensor(axes.images[0].get_array().filled()) for axes in maps_of(figure)])


def labels(axis) -> list[str]:
    return [label.get_text() for label in axis.get_ticklabels()]


def refused(capsys, *argv) -> str:
    """The one line on stderr of a script that refuses."""
    try:
        code = plot_attention.main(list(map(str, argv)))
    except SystemExit as error:  # from argparse
        code = error.code
    out, err = capsys.readouterr()
    assert (code, out, err.count("\n")) == (2, "", 1), err
    assert err.startswith("plot_attention.py: ")
    return err.removeprefix("plot_attention.py: ").rstrip("\n")


# ------------------------------------------------------------------------------------------------------ the attention


@pytest.mark.parametrize("name", ["bert", "masked", "encoder"])
def test_what_is_drawn_are_berts_attentions(folders, tmp_path, name):
    folder = folders[name]
    if name == "encoder":
        folder = tmp_path
        ScratchBertModel.from_pretrained(folders[name]).save_as_bert(folder)
    bert = BertModel.from_pretrained(folder, attn_implementation="eager").eval()
    with torch.no_grad():
        expected = bert(**make_tokenizer()(SENTENCE, return_tensors="pt"), output_attentions=True).attentions
    found = found_in(folders, name)
    weights = drawn(draw(found))
    torch.testing.assert_close(weights, torch.cat(expected).flatten(0, 1), atol=1e-6, rtol=0)
    torch.testing.assert_close(weights.sum(-1), torch.ones(8, len(TOKENS)), atol=1e-5, rtol=0)
    assert (found.queries, found.keys, found.kind, found.text) == (TOKENS, TOKENS, "self-attention", SENTENCE)


def test_the_chosen_layers_and_heads_are_drawn_in_their_order(made_up):
    found = made_up(4, 6, ["a", "b", "c"])
    figure = draw(found, [3, 1, 3], [5, 0])
    assert torch.equal(drawn(figure), found.weights[[3, 3, 1, 1], [5, 0, 5, 0]])
    assert [axes.get_title() for axes in maps_of(figure)] == ["head 5", "head 0", "", ""]
    assert [axes.get_ylabel() for axes in maps_of(figure)] == ["layer 3", "", "layer 1", ""]


def by_hand(folders, target_ids) -> dict:
    model = ScratchBertForConditionalGeneration.from_pretrained(folders["seq2seq"]).eval()
    source = make_tokenizer()(SENTENCE, return_tensors="pt").input_ids
    with torch.no_grad():
        return model(source, decoder_input_ids=torch.tensor([target_ids]), output_attentions=True)


@pytest.mark.parametrize("name", ["seq2seq", "headless"])
@pytest.mark.parametrize("kind", [None, "cross", "decoder"])
def test_a_given_target_is_read_from_the_start_token_to_the_end(folders, name, kind):
    tokenizer = make_tokenizer()
    tokens = ["[CLS]", "it", "sleeps", "[SEP]"]
    expected = by_hand(folders, tokenizer.convert_tokens_to_ids(tokens))
    found = found_in(folders, name, kind, TARGET)
    is_cross = kind != "decoder"
    maps = expected.cross_attentions if is_cross else expected.decoder_attentions
    assert (found.queries, found.keys) == (tokens, TOKENS if is_cross else tokens)
    assert found.kind == ("cross-attention" if is_cross else "the decoder's self-attention")
    assert found.text == f"{SENTENCE} → {TARGET}"
    assert found.weights.shape == (1, 4, 4, len(found.keys))
    assert torch.equal(drawn(draw(found)), torch.cat(maps)[0])
    assert is_cross != torch.equal(found.weights, found.weights.tril())


def test_the_start_token_need_not_be_that_of_the_tokenizer(folders, tmp_path):
    model = ScratchBertModel.from_pretrained(folders["seq2seq"])
    model.config.decoder_start_token_id = PAD
    model.save_pretrained(tmp_path)
    make_tokenizer().save_pretrained(tmp_path)
    assert found_in({"": str(tmp_path)}, "", None, TARGET).queries == ["[PAD]", "it", "sleeps", "[SEP]"]


@pytest.mark.parametrize("most", [48, 4])
def test_a_target_that_is_not_given_is_what_the_model_writes(folders, most):
    model = ScratchBertForConditionalGeneration.from_pretrained(folders["seq2seq"]).eval()
    tokenizer = make_tokenizer()
    ids = tokenizer("the cat", return_tensors="pt").input_ids
    written = model.generate(ids, do_sample=False, max_new_tokens=min(most, 40) - 1)[0].tolist()
    found = found_in(folders, "seq2seq", sentence="the cat", max_tokens=most)
    assert found.queries == tokenizer.convert_ids_to_tokens(written)
    assert len(found.queries) == most or most == 48
    with torch.no_grad():
        expected = model(ids, decoder_input_ids=torch.tensor([written]), output_attentions=True).cross_attentions
    assert torch.equal(found.weights, torch.cat(expected))


def test_self_attention_of_two_halves_is_the_encoders(folders):
    found = found_in(folders, "seq2seq", "self")
    assert torch.equal(found.weights, torch.cat(by_hand(folders, [CLS]).encoder_attentions))
    assert (found.queries, found.keys, found.kind) == (TOKENS, TOKENS, "the encoder's self-attention")


def test_a_decoder_alone_looks_back(folders):
    weights = found_in(folders, "causal").weights
    assert weights.shape == (2, 4, len(TOKENS), len(TOKENS))
    assert torch.equal(weights, weights.tril())


# -------------------------------------------------------------------------------------------------------- the picture


def test_labels_are_the_tokens_on_the_outer_axes(made_up):
    queries, keys = ["a", "##b", "$x$"], ["c", "_d^2", "##é", "中"]
    figure = draw(made_up(2, 3, queries, keys, kind="cross-attention"), title="costs $5 or $6\nin all")
    for i, axes in enumerate(maps_of(figure)):
        assert labels(axes.yaxis) == (queries if i % 3 == 0 else [])
        assert labels(axes.xaxis) == (keys if i >= 3 else [])
        assert not any(label.get_parse_math() for label in [*axes.get_xticklabels(), *axes.get_yticklabels()])
    assert {text.get_text(): text.get_parse_math() for text in figure.texts} == {
        "query (target)": True,
        "key (source)": True,
        "costs $5 or $6\nin all": False,
    }


def test_all_maps_share_one_scale_from_0_to_1(made_up):
    figure = draw(made_up(2, 2, ["a", "b"]))
    bar = figure.axes[-1]
    assert {axes.images[0].get_clim() for axes in maps_of(figure)} == {bar.get_ylim()} == {(0, 1)}
    assert {axes.images[0].cmap.name for axes in maps_of(figure)} == {bar._colorbar.cmap.name}
    assert bar.get_ylabel() == "attention weight"


LONG, WORDY, WIDE = [f"[token {i:02d}]" for i in range(40)], "a title of many words " * 20, "W" * 150 + "\nand more"


@pytest.mark.parametrize(
    ("layers", "heads", "queries", "keys", "title"),
    [
        (1, 1, TOKENS, TOKENS, "short"),
        (1, 1, ["a", "b"], ["c", "d"], WORDY),
        (1, 1, ["a", "b"], ["c", "d"], WIDE),
        (1, 1, LONG, LONG, WORDY),
        (2, 12, TOKENS, TOKENS, WIDE),
        (12, 2, ["a"], TOKENS, WORDY),
        (3, 2, LONG, ["[CLS]", "a", "[SEP]"], WIDE),
        (2, 4, ["unimaginably-long-token-that-no-word-piece-is"] * 2, LONG, "short"),
    ],
)
def test_nothing_is_cut_off_and_no_label_runs_into_another(made_up, layers, heads, queries, keys, title):
    figure = draw(made_up(layers, heads, queries, keys), title=title)
    figure.draw_without_rendering()
    tokens = [label for axes in maps_of(figure) for label in (*axes.get_xticklabels(), *axes.get_yticklabels())]
    assert len(tokens) == layers * len(queries) + heads * len(keys)
    assert all(label.get_fontsize() >= 6 for label in tokens)  # 12 pixels
    bar = figure.axes[-1]
    texts = [*tokens, *figure.texts, *bar.get_yticklabels(), bar.yaxis.label]
    texts += [text for axes in maps_of(figure) for text in (axes.title, axes.yaxis.label) if text.get_text()]
    boxes = [text.get_window_extent() for text in texts]
    for box in boxes:
        assert min(box.x0, box.y0) >= 0
        assert box.x1 <= figure.bbox.x1
        assert box.y1 <= figure.bbox.y1
    for one, other in itertools.combinations(boxes, 2):
        common = Bbox.intersection(one, other)
        assert common is None or min(common.size) <= 1  # a pixel is half a point


def test_letters_that_no_font_has_are_remarked_on_in_a_png_alone(folders, tmp_path, capsys, monkeypatch):
    real = attention_plot.draw
    monkeypatch.setattr(attention_plot, "draw", lambda *args: real(*args[:-1], title="\u4e2d"))
    for name, remark in (("a.svg", ""), ("a.png", "plot_attention.py: no font here has some of the letters")):
        assert plot_attention.main([folders["bert"], SENTENCE, "--output", str(tmp_path / name)]) == 0
        out, err = capsys.readouterr()
        assert (out, err.count("\n")) == (f"{tmp_path / name}\n", bool(remark))
        assert err.startswith(remark)


# ----------------------------------------------------------------------------------------------------------- the file


def test_a_png_is_written(folders, tmp_path, capsys):
    path = tmp_path / "a.PNG"
    assert (
        plot_attention.main([folders["bert"], SENTENCE, "--output", str(path), "--layers", "1", "--heads", "0,2-3"])
        == 0
    )
    assert capsys.readouterr() == (f"{path}\n", "")
    content = path.read_bytes()
    assert content.startswith(PNG)
    size = [int.from_bytes(content[at : at + 4], "big") for at in (16, 20)]  # in its first chunk
    title = f"self-attention of {Path(folders['bert']).name}\n{SENTENCE}"
    figure = draw(found_in(folders, "bert"), [1], [0, 2, 3], title)
    assert size == [int(side * 144) for side in figure.get_size_inches()]
    assert list(tmp_path.iterdir()) == [path]


def test_an_svg_is_written_whose_labels_are_text(folders, tmp_path, capsys):
    path = tmp_path / "a.svg"
    argv = [folders["seq2seq"], SENTENCE, "--output", str(path), "--decoder-text", TARGET, "--kind", "cross"]
    assert plot_attention.main(argv) == 0
    assert capsys.readouterr() == (f"{path}\n", "")
    first = path.read_bytes()
    root = ElementTree.fromstring(first)
    assert root.tag.endswith("}svg")
    texts = [element.text for element in root.iter("{http://www.w3.org/2000/svg}text")]
    title = {f"cross-attention of {Path(folders['seq2seq']).name}", f"{SENTENCE} → {TARGET}"}
    assert title | {*TOKENS, "it", "sleeps", "head 3", "layer 0"} <= set(texts)
    assert texts.count("walk") == 4  # heads
    *maps, _ = root.iter("{http://www.w3.org/2000/svg}image")  # and the colour bar
    assert len(maps) == 4
    for image in maps:  # of many pixels a cell, for a viewer would blur one
        content = base64.b64decode(image.get("{http://www.w3.org/1999/xlink}href").partition(",")[2])
        assert int.from_bytes(content[16:20], "big") > 10 * len(TOKENS)
    assert plot_attention.main(argv) == 0
    assert path.read_bytes() == first


def test_title_has_no_local_path(tmp_path, monkeypatch):
    (tmp_path / "my-bert").mkdir()
    (tmp_path / "linked").symlink_to(tmp_path / "my-bert")
    monkeypatch.chdir(tmp_path / "my-bert")
    given = [
        tmp_path / "my-bert",
        f"{tmp_path}/my-bert/",
        ".",
        "../my-bert",
        "../linked",
        "google-bert/bert-base-uncased",
    ]
    titles = [plot_attention.title_of(str(model)) for model in given]
    assert titles == [*["my-bert"] * 4, "linked", "google-bert/bert-base-uncased"]


@pytest.mark.parametrize("before", [None, b"an older picture"])
def test_a_picture_is_written_whole_or_not_at_all(folders, tmp_path, capsys, monkeypatch, before):
    path = tmp_path / "a.png"
    if before is not None:
        path.write_bytes(before)

    def breaks(figure, target, **options):
        Path(target).write_bytes(PNG)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Figure, "savefig", breaks)
    assert refused(capsys, folders["bert"], SENTENCE, "--output", path).startswith(f"{path}: ")
    assert [(one.name, one.read_bytes()) for one in tmp_path.iterdir()] == ([("a.png", before)] if before else [])


def test_a_png_that_would_be_too_large_is_refused_and_an_svg_is_not(made_up, tmp_path, monkeypatch):
    figure = draw(made_up(2, 2, TOKENS))
    width, height = (round(144 * side) for side in figure.get_size_inches())
    monkeypatch.setattr(attention_plot, "MAX_PIXELS", width * height - 1)
    with pytest.raises(
        ValueError, match=f"The picture has {width:,} × {height:,} pixels; expected at most .*--layers"
    ) as refusal:
        save(figure, tmp_path / "a.png")
    assert "\n" not in str(refusal.value)
    assert not list(tmp_path.iterdir())
    save(figure, tmp_path / "a.svg")
    monkeypatch.setattr(attention_plot, "MAX_PIXELS", width * height)
    save(figure, tmp_path / "a.png")
    assert len(list(tmp_path.iterdir())) == 2


def test_the_largest_picture_has_the_heads_of_bert_base_and_the_most_tokens(made_up):
    width, height = 144 * draw(made_up(12, 12, ["##ation"] * 48), title="a title").get_size_inches()
    assert 0.9 * attention_plot.MAX_PIXELS < width * height < attention_plot.MAX_PIXELS


# ----------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("bert", ["--layers", "0,2"], "--layers has 2; expected 0 to 1."),
        ("bert", ["--heads", "0-9"], "--heads has 4; expected 0 to 3."),
        ("bert", ["--layers", "1-0"], "'1-0' is invalid; expected numbers"),
        ("bert", ["--heads", "0,"], "'0,' is invalid; expected numbers"),
        (
            "bert",
            ["--kind", "cross"],
            "--kind is cross, and it has self-attention only",
        ),
        ("bert", ["--kind", "all"], "invalid choice: 'all'"),
        ("bert", ["--decoder-text", "it"], "--decoder_text is given with self-attention"),
        ("seq2seq", ["--decoder-text", "it", "--kind", "self"], "--decoder_text is given with self-attention"),
        ("seq2seq", ["--decoder-text", " "], "The target is empty."),
        (
            "seq2seq",
            ["--decoder-text", "a " * 50],
            "The target has 52 tokens; expected at most 48. Shorten it, or give",
        ),
        ("headless", [], "It lacks "),
        ("headless", [], "--decoder_text requires no model head."),
        (
            "bert",
            ["--max-tokens", "9"],
            "The sentence has 10 tokens; expected at most 9. Shorten it, or give --max_tok",
        ),
        ("bert", ["--max-tokens", "1"], "'1' is invalid; expected an integer of at least 2"),
        ("bert", ["--output", "a.jpg"], "'a.jpg' is invalid; expected a name that ends in .png or .svg"),
        ("bert", ["--output", "nowhere/a.png"], "'nowhere/a.png' cannot be written: there is no folder"),
    ],
)
def test_what_it_refuses(folders, tmp_path, capsys, monkeypatch, name, arguments, message):
    monkeypatch.chdir(tmp_path)
    assert message in refused(capsys, folders[name], SENTENCE, "--output", "a.png", *arguments)
    assert not list(tmp_path.iterdir())


def test_an_empty_sentence_and_one_for_which_there_are_no_positions(folders, tmp_path, capsys):
    output = ["--output", tmp_path / "a.png"]
    assert refused(capsys, folders["bert"], " ", *output).endswith("The sentence is empty.")
    assert "40" in refused(capsys, folders["bert"], "a " * 50, *output, "--max-tokens", "60")


def test_folders_that_are_of_no_use(folders, tmp_path, capsys):
    output = ["--output", tmp_path / "a.png"]
    missing = tmp_path / "missing"
    assert refused(capsys, missing, SENTENCE, *output) == f"{missing}: There is no such folder."
    bare = tmp_path / "bare"
    ScratchBertModel.from_pretrained(folders["encoder"]).save_pretrained(bare)
    assert "It has no tokenizer" in refused(capsys, bare, SENTENCE, *output)
    fields = json.loads((bare / "config.json").read_text())
    (bare / "config.json").write_text(json.dumps({**fields, "model_type": "roberta"}))
    assert "roberta" in refused(capsys, bare, SENTENCE, *output)


def test_weights_that_are_missing_are_not_made_up(folders, tmp_path, capsys):
    ScratchBertModel.from_pretrained(folders["encoder"]).save_pretrained(tmp_path / "short")
    make_tokenizer().save_pretrained(tmp_path / "short")
    path = tmp_path / "short" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "num_hidden_layers": 3}))
    line = refused(capsys, tmp_path / "short", SENTENCE, "--output", tmp_path / "a.png")
    assert re.search(r"It lacks 16 weights, such as encoder\.blocks\.2\.", line)
    assert "--decoder_text" not in line


def test_a_target_wants_a_start_token(folders, tmp_path, capsys):
    model = ScratchBertModel.from_pretrained(folders["seq2seq"])
    model.config.decoder_start_token_id = None
    model.save_pretrained(tmp_path / "model")
    make_tokenizer().save_pretrained(tmp_path / "model")
    argv = [tmp_path / "model", SENTENCE, "--output", tmp_path / "a.png", "--decoder-text", TARGET]
    assert "no decoder_start_token_id" in refused(capsys, *argv)


def test_without_matplotlib_it_says_what_to_install(folders, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    line = refused(capsys, folders["bert"], SENTENCE, "--output", tmp_path / "a.png")
    assert line == 'matplotlib is not installed; pip install "scratchbert[plot]"'


def test_help(capsys):
    with pytest.raises(SystemExit) as left:
        plot_attention.main(["--help"])
    assert left.value.code == 0
    out = capsys.readouterr().out
    assert "--max_tokens N" in out
    assert "0,2,5-7" in out
