"""`scripts/generate.py`: it prints what `generate` writes, whatever way the texts come and in whatever batches."""

import errno
import io
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tokenizers import processors
from transformers import (
    BertConfig,
    BertLMHeadModel,
    EncoderDecoderConfig,
    EncoderDecoderModel,
    GenerationConfig,
    GenerationMixin,
)

import generate
from modeling_scratchbert import (
    ScratchBertForCausalLM,
    ScratchBertForConditionalGeneration,
    ScratchBertModel,
    ScratchBertSeq2SeqModel,
)
from support.command_tokenizer import CLS, PAD, SEP, WORDS, make_tokenizer
from support.folders import SCRIPTS
from support.generation import answers, generate_text
from support.models import randomise, tiny_config
from toolkit import generation

POSITIONS = 24
TEXTS = ["the dog sees a cat", "it walks", "a red bird and a blue bird sleeps under the tree", "the house", "cats"]
# With these seeds, otherwise 22, a model writes something else for each text.
SEEDS = {"seq2seq": 141}

pytestmark = pytest.mark.usefixtures("quiet_only_here")


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    """A checkpoint of each kind, with its tokenizer."""
    tokenizer = make_tokenizer()
    fields = {"vocab_size": len(tokenizer), "max_position_embeddings": POSITIONS}
    both = {"is_encoder_decoder": True, "decoder_start_token_id": CLS, "eos_token_id": SEP}
    encoder = tiny_config(BertConfig, **fields)
    decoder = tiny_config(BertConfig, is_decoder=True, add_cross_attention=True, **fields)
    ends = {"decoder_start_token_id": CLS, "eos_token_id": SEP, "pad_token_id": PAD}
    models = {
        "seq2seq": ScratchBertForConditionalGeneration(tiny_config(**both, **fields)),
        "causal": ScratchBertForCausalLM(tiny_config(is_decoder=True, **fields)),
        "encoder": ScratchBertModel(tiny_config(**fields)),
        "headless": ScratchBertSeq2SeqModel(tiny_config(**both, **fields)),
        "bert decoder": BertLMHeadModel(decoder.__class__(**{**decoder.to_dict(), "add_cross_attention": False})),
        "two berts": EncoderDecoderModel(EncoderDecoderConfig.from_encoder_decoder_configs(encoder, decoder, **ends)),
    }
    found = {}
    for name, model in models.items():
        found[name] = tmp_path_factory.mktemp(name.replace(" ", "-"))
        randomise(model, SEEDS.get(name, 22)).save_pretrained(found[name])
        tokenizer.save_pretrained(found[name])
    return found


@pytest.fixture(scope="module")
def opened(folders):
    """`opened[name]`: the tokenizer and the model."""
    return {name: generation.open_generator(str(folders[name]), "auto", "cpu") for name in ("seq2seq", "causal")}


@pytest.fixture(params=["seq2seq", "causal"])
def kind(request) -> str:
    return request.param


@pytest.fixture
def calls(monkeypatch) -> list[dict]:
    """The arguments of every call of `generate`."""
    seen, real = [], GenerationMixin.generate

    def spy(model, *args, **kwargs):
        seen.append(kwargs)
        return real(model, *args, **kwargs)

    monkeypatch.setattr(GenerationMixin, "generate", spy)
    return seen


def by_hand(tokenizer, model, text, **options) -> list[str]:
    """What `generate` writes for one text. The texts here are such that decoding gives them back."""
    ids = tokenizer(text, return_tensors="pt").input_ids
    if not model.config.is_encoder_decoder:
        ids = ids[:, :-1]
        options = {"eos_token_id": SEP, **options}
    written = model.generate(ids, attention_mask=torch.ones_like(ids), tokenizer=tokenizer, **options)
    return [tokenizer.decode(row, skip_special_tokens=True) for row in written]


def printed(capsys, *argv) -> str:
    """What the script prints, which has to go well."""
    code = generate.main(list(map(str, argv)))
    out, err = capsys.readouterr()
    assert (code, err) == (0, "")
    return out


def refused(capsys, *argv) -> str:
    """The one line on stderr of a script that refuses."""
    try:
        code = generate.main(list(map(str, argv)))
    except SystemExit as error:  # from argparse
        code = error.code
    out, err = capsys.readouterr()
    assert (code, out, err.count("\n")) == (2, "", 1), err
    assert err.startswith("generate.py: ")
    return err.removeprefix("generate.py: ").rstrip("\n")


def feed(monkeypatch, content: bytes, is_terminal: bool = False) -> None:
    stdin = io.TextIOWrapper(io.BytesIO(content))
    monkeypatch.setattr(stdin, "isatty", lambda: is_terminal)
    monkeypatch.setattr(sys, "stdin", stdin)


# ------------------------------------------------------------------------------------------------ generate_text


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_beams": 3, "num_return_sequences": 2},
        {"min_new_tokens": 5, "no_repeat_ngram_size": 2},
        {"stop_strings": ["tree", "."]},
    ],
)
def test_outputs_are_those_of_generate_text_by_text(opened, kind, options):
    tokenizer, model = opened[kind]
    options = {"max_new_tokens": 8, **options}
    expected = [by_hand(tokenizer, model, text, **options) for text in TEXTS]
    assert len({outputs[0] for outputs in expected}) == len(TEXTS)  # or the order would not show
    for batch_size in (1, 2, 8):
        assert generate_text(model, tokenizer, TEXTS, batch_size, **options) == expected


@pytest.mark.parametrize("options", [{"max_length": 14}, {"max_new_tokens": 9, "min_length": 11}])
def test_padding_counts_for_nothing_where_the_prompt_does(opened, options):
    tokenizer, model = opened["causal"]
    texts = TEXTS[:2] + TEXTS[3:]
    expected = [by_hand(tokenizer, model, text, **options) for text in texts]
    assert generate_text(model, tokenizer, texts, **options) == expected


def test_texts_of_like_length_are_batched_and_padded_on_the_right_side(opened, kind, calls):
    tokenizer, model = opened[kind]
    generate_text(model, tokenizer, TEXTS, batch_size=2, max_new_tokens=2)
    lengths = [call["attention_mask"].sum(dim=1).tolist() for call in calls]
    longest_first = sorted((len(tokenizer(text).input_ids) - (kind == "causal") for text in TEXTS), reverse=True)
    assert lengths == [longest_first[:2], longest_first[2:4], longest_first[4:]]
    first, last = calls[0]["input_ids"][1, [0, -1]].tolist()
    assert (first, last) == ((CLS, PAD) if kind == "seq2seq" else (PAD, tokenizer("cat").input_ids[1]))


def test_leaves_tokenizer_and_model_as_they_are(opened, kind):
    tokenizer, model = opened[kind]
    before = (tokenizer.padding_side, tokenizer.truncation_side, tokenizer.backend_tokenizer.to_str())
    settings = model.generation_config.to_dict()
    generate_text(model, tokenizer, TEXTS, num_beams=2, max_new_tokens=3)
    assert (tokenizer.padding_side, tokenizer.truncation_side, tokenizer.backend_tokenizer.to_str()) == before
    assert model.generation_config.to_dict() == settings


def test_no_texts_give_no_outputs(opened, kind):
    tokenizer, model = opened[kind]
    assert generate_text(model, tokenizer, []) == []


def test_a_text_may_be_empty(opened, kind):
    tokenizer, model = opened[kind]
    assert generate_text(model, tokenizer, [""], max_new_tokens=4) == [by_hand(tokenizer, model, "", max_new_tokens=4)]


def test_nothing_to_continue(opened):
    _, model = opened["causal"]
    tokenizer = make_tokenizer()
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(single="$A")
    assert generate_text(model, tokenizer, ["the dog"], max_new_tokens=1)[0][0].startswith("the dog")
    with pytest.raises(ValueError, match="nothing to continue"):
        generate_text(model, tokenizer, ["the dog", ""])


def test_what_the_user_typed_like_an_end_token_stays(opened, calls):
    tokenizer, model = opened["causal"]
    generate_text(model, tokenizer, ["the dog [SEP]"], max_new_tokens=1)
    assert calls[0]["input_ids"].tolist() == [tokenizer("the dog [SEP]").input_ids[:-1]]


def test_a_continuation_may_start_within_a_word():
    tokenizer = make_tokenizer()
    ids = tokenizer("The  WALK").input_ids[:-1]
    more = tokenizer.convert_tokens_to_ids(["##ing", ".", "[SEP]", "[PAD]"])
    assert generation.decode_continued(tokenizer, "The  WALK", ids, more) == "The  WALKing."
    assert generation.decode_continued(tokenizer, "The WALK", ids, more[1:]) == "The WALK."


def test_a_continuation_adds_no_second_space():
    tokenizer = make_tokenizer()
    ids, more = tokenizer("the ").input_ids[:-1], tokenizer.convert_tokens_to_ids(["dog", "runs"])
    assert generation.decode_continued(tokenizer, "the ", ids, more) == "the dog runs"
    assert generation.decode_continued(tokenizer, "the", ids, more) == "the dog runs"


# ------------------------------------------------------------------------------------------------ lengths and ends


def test_a_long_source_loses_its_end(opened, calls):
    tokenizer, model = opened["seq2seq"]
    text = " ".join(WORDS[i % 9] for i in range(30))
    ids = tokenizer(text).input_ids
    found = answers(model, tokenizer, ["the dog", text], batch_size=1, max_new_tokens=2)
    assert [one.dropped for one in found] == [0, len(ids) - POSITIONS]
    assert calls[0]["input_ids"].tolist() == [[*ids[: POSITIONS - 1], SEP]]


def test_a_source_is_cut_where_the_training_cut_it(opened, calls):
    _, model = opened["seq2seq"]
    tokenizer = make_tokenizer(model_max_length=5)
    ids = tokenizer("the dog sees a cat").input_ids
    [found] = answers(model, tokenizer, ["the dog sees a cat"], max_new_tokens=8)
    assert found.dropped == len(ids) - 5
    assert calls[0]["input_ids"].tolist() == [[*ids[:4], SEP]]


def test_a_long_prompt_loses_its_beginning(opened, calls):
    tokenizer, model = opened["causal"]
    text = " ".join(WORDS[i % 9] for i in range(30))
    ids = tokenizer(text).input_ids[:-1]
    [found] = answers(model, tokenizer, [text], max_new_tokens=5, min_new_tokens=5)
    assert found.dropped == len(ids) - 1 - (POSITIONS - 5)
    assert calls[0]["input_ids"].tolist() == [[CLS, *ids[-(POSITIONS - 5) :]]]  # with the last token not fed back
    assert found.outputs[0].startswith(text + " ")


def test_the_longest_output_there_is_room_for(opened, kind):
    tokenizer, model = opened[kind]
    most = POSITIONS if kind == "seq2seq" else POSITIONS - 1
    [[output]] = generate_text(model, tokenizer, ["dog"], max_new_tokens=most, min_new_tokens=most)
    assert output
    with pytest.raises(
        ValueError, match=f"max_new_tokens is {most + 1}; expected at most {most}, with {POSITIONS} positions"
    ):
        generate_text(model, tokenizer, ["dog"], max_new_tokens=most + 1)


def test_default_length(opened, kind, calls):
    tokenizer, model = opened[kind]
    generate_text(model, tokenizer, ["the dog"])
    assert calls[0]["max_new_tokens"] == (POSITIONS if kind == "seq2seq" else (POSITIONS - 1) // 2)


@pytest.mark.parametrize(
    ("own", "given", "passed"),
    [
        ({"max_new_tokens": 3}, {}, {}),
        ({"max_length": 7}, {}, {}),
        ({"max_length": 7}, {"max_new_tokens": 2}, {"max_new_tokens": 2}),
        # `generate` by itself would go by the model's own.
        ({"max_new_tokens": 3}, {"max_length": 7}, {"max_new_tokens": None, "max_length": 7}),
    ],
)
def test_lengths_of_the_model_and_of_the_user(folders, kind, calls, own, given, passed):
    tokenizer, model = generation.open_generator(str(folders[kind]), "auto", "cpu")
    model.generation_config.update(**own)
    [[output]] = generate_text(model, tokenizer, ["the dog"], **given, eos_token_id=None)
    lengths = {name: value for name, value in calls[0].items() if name.startswith("max_")}
    assert lengths == passed
    expected = {**own, **passed, "max_length": passed.get("max_length", own.get("max_length"))}
    assert [output] == by_hand(tokenizer, model, "the dog", **expected, eos_token_id=None)


def test_the_tokenizer_says_what_ends_an_output_if_nobody_else_does(opened, calls):
    tokenizer, model = opened["causal"]
    generate_text(model, tokenizer, ["the dog"], max_new_tokens=1)
    generate_text(model, tokenizer, ["the dog"], max_new_tokens=1, eos_token_id=None)
    tokenizer, model = opened["seq2seq"]
    generate_text(model, tokenizer, ["the dog"], max_new_tokens=1)
    assert [call.get("eos_token_id", "left out") for call in calls] == [SEP, None, "left out"]
    assert "pad_token_id" not in calls[0]


def test_the_models_own_settings_hold_until_others_are_given(folders, kind):
    tokenizer, model = generation.open_generator(str(folders[kind]), "auto", "cpu")
    options = {"max_new_tokens": 6, "no_repeat_ngram_size": 1}
    expected = by_hand(tokenizer, model, TEXTS[0], **options)
    plain = by_hand(tokenizer, model, TEXTS[0], max_new_tokens=6, no_repeat_ngram_size=0)
    assert expected != plain
    model.generation_config.update(**options)
    assert generate_text(model, tokenizer, TEXTS[:1]) == [expected]
    assert generate_text(model, tokenizer, TEXTS[:1], no_repeat_ngram_size=0) == [plain]


def test_an_option_of_the_models_own_without_effect_is_no_error(folders, kind):
    tokenizer, model = generation.open_generator(str(folders[kind]), "auto", "cpu")
    model.generation_config.update(temperature=0.5, length_penalty=2.0)
    assert generate_text(model, tokenizer, ["dog"], max_new_tokens=2)
    with pytest.raises(ValueError, match="top_p"):
        generate_text(model, tokenizer, ["dog"], max_new_tokens=2, top_p=0.5)


# ------------------------------------------------------------------------------------------------ the command line

FLAGS = {
    "--min-new-tokens 7": {"min_new_tokens": 7},
    "--max-new-tokens 3": {"max_new_tokens": 3},
    "--num-beams 3": {"num_beams": 3},
    "--num-beams 3 --length-penalty -2.5": {"num_beams": 3, "length_penalty": -2.5},
    "--num-beams 3 --early-stopping true": {"num_beams": 3, "early_stopping": True},
    "--num-beams 3 --early-stopping false": {"num_beams": 3, "early_stopping": False},
    "--num-beams 3 --early-stopping never": {"num_beams": 3, "early_stopping": "never"},
    "--num-beams 3 --num-return-sequences 2": {"num_beams": 3, "num_return_sequences": 2},
    "--do-sample": {"do_sample": True},
    "--no-do-sample": {"do_sample": False},
    "--do-sample --num-return-sequences 3": {"do_sample": True, "num_return_sequences": 3},
    "--do-sample --temperature 0.5 --top-k 7 --top-p 0.9": {
        "do_sample": True,
        "temperature": 0.5,
        "top_k": 7,
        "top_p": 0.9,
    },
    "--do-sample --top-k 0": {"do_sample": True, "top_k": 0},
    "--repetition-penalty 1.7": {"repetition_penalty": 1.7},
    "--no-repeat-ngram-size 1": {"no_repeat_ngram_size": 1},
    "--stop-strings tree --stop-strings s.": {"stop_strings": ["tree", "s."]},
    "--option cache_implementation=dynamic": {"cache_implementation": "dynamic"},
    "--option use_cache=false": {"use_cache": False},
    "--option do_sample=true --option min-p=0.2": {"do_sample": True, "min_p": 0.2},
    "--option suppress_tokens=[4,5,6,7,8,9,20]": {"suppress_tokens": [4, 5, 6, 7, 8, 9, 20]},
    "--option stop_strings=tree": {"stop_strings": "tree"},
    '--option watermarking_config={"bias":9.0}': {"watermarking_config": {"bias": 9.0}},
}


@pytest.mark.parametrize("flags", FLAGS)
def test_flags_reach_generate(folders, opened, calls, capsys, flags):
    tokenizer, model = opened["seq2seq"]
    options = {"max_new_tokens": 9, **FLAGS[flags]}
    argv = flags.split() if "max" in flags else [*flags.split(), "--max-new-tokens", 9]
    out = printed(capsys, folders["seq2seq"], *argv, "--seed", 3, TEXTS[0])
    given = {name: value for name, value in calls[0].items() if name in vars(GenerationConfig())}
    assert given == {**options, "return_dict_in_generate": True, "output_scores": False}
    torch.manual_seed(3)
    assert out.splitlines() == by_hand(tokenizer, model, TEXTS[0], **options)


def test_every_flag_is_tested():
    tested = {name for options in FLAGS.values() for name in options}
    assert set(generate.DECODING_FLAGS) <= tested


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("min_p=0.5", ("min_p", 0.5)),
        ("stop-strings=a=b", ("stop_strings", "a=b")),
        ("bad_words_ids=[[1, 2], [3]]", ("bad_words_ids", [[1, 2], [3]])),
        ("eos_token_id=null", ("eos_token_id", None)),
    ],
)
def test_values_of_options(text, value):
    assert generate.make_parser().parse_args(["model", "--option", text]).option == [value]


def test_texts_from_arguments_from_a_file_and_from_standard_input(folders, opened, kind, tmp_path, monkeypatch, capsys):
    tokenizer, model = opened[kind]
    lines = [by_hand(tokenizer, model, text, max_new_tokens=6)[0] for text in TEXTS]
    expected = "".join(f"{line}\n" for line in lines)
    argv = [folders[kind], "--max-new-tokens", 6]
    # An option between the model and the texts, too.
    assert printed(capsys, *argv, *TEXTS) == expected
    path = tmp_path / "texts"
    path.write_text("\r\n".join(TEXTS), newline="")
    assert printed(capsys, *argv, "--file", path) == expected
    feed(monkeypatch, "".join(f"{text}\n" for text in TEXTS).encode())
    assert printed(capsys, *argv) == expected


def test_many_texts_come_out_in_order(folders, opened, monkeypatch, capsys):
    monkeypatch.setattr(generate, "BATCHES_AHEAD", 2)
    tokenizer, model = opened["seq2seq"]
    texts = [" ".join(WORDS[(i * j) % 9] for j in range(1 + i % 5)) for i in range(23)]
    feed(monkeypatch, "\n".join(texts).encode())
    out = printed(capsys, folders["seq2seq"], "--max-new-tokens", 4, "--batch-size", 3)
    assert out.splitlines() == [by_hand(tokenizer, model, text, max_new_tokens=4)[0] for text in texts]


@pytest.mark.parametrize("flags", [[], ["--stream"], ["--batch-size", 1]])
def test_empty_lines_keep_their_place(folders, opened, kind, monkeypatch, capsys, flags):
    tokenizer, model = opened[kind]
    feed(monkeypatch, b"\nthe dog\n  \n\nit walks\n")
    out = printed(capsys, folders[kind], "--max-new-tokens", 4, *flags)
    [dog], [walks] = (by_hand(tokenizer, model, text, max_new_tokens=4) for text in ("the dog", "it walks"))
    assert out == f"\n{dog}\n\n\n{walks}\n"


def test_an_empty_line_stands_for_all_of_its_sequences(folders, opened, monkeypatch, capsys):
    tokenizer, model = opened["seq2seq"]
    options = {"max_new_tokens": 4, "num_beams": 2, "num_return_sequences": 2}
    feed(monkeypatch, b"the dog\n\nit walks\n")
    argv = [folders["seq2seq"], "--max-new-tokens", 4, "--num-beams", 2, "--num-return-sequences", 2]
    dog, walks = (by_hand(tokenizer, model, text, **options) for text in ("the dog", "it walks"))
    assert printed(capsys, *argv).splitlines() == [*dog, "", "", *walks]


def test_only_empty_lines(folders, kind, monkeypatch, capsys):
    feed(monkeypatch, b"\n\n")
    assert printed(capsys, folders[kind]) == "\n\n"


def test_an_empty_argument_is_a_text(folders, opened, kind, capsys):
    tokenizer, model = opened[kind]
    [expected] = by_hand(tokenizer, model, "", max_new_tokens=4)
    assert printed(capsys, folders[kind], "", "--max-new-tokens", 4) == f"{expected}\n"


@pytest.mark.parametrize("flags", [[], ["--stream"]])
def test_an_output_is_one_line(folders, capsys, flags):
    out = printed(capsys, folders["causal"], "the\ndog\r\nruns", "--max-new-tokens", 3, *flags)
    assert out.count("\n") == 1
    assert out.startswith("the dog  runs")


def test_json_lines(folders, opened, kind, capsys):
    tokenizer, model = opened[kind]
    argv = [folders[kind], "--jsonl", "--max-new-tokens", 5, "dög\n", *TEXTS]
    out = printed(capsys, *argv)
    assert '"input": "dög\\n"' in out
    records = [json.loads(line) for line in out.splitlines()]
    assert [record["input"] for record in records] == ["dög\n", *TEXTS]
    assert [record["outputs"] for record in records[1:]] == [
        by_hand(tokenizer, model, text, max_new_tokens=5) for text in TEXTS
    ]
    assert {tuple(record) for record in records} == {("input", "outputs")}


def test_the_end_of_a_line_is_not_part_of_the_text(folders, tmp_path, capsys):
    (tmp_path / "texts").write_bytes("the dog\r\na\u2028cat\n\r\n".encode())
    out = printed(capsys, folders["seq2seq"], "--jsonl", "--max-new-tokens", 2, "--file", tmp_path / "texts")
    assert [json.loads(line)["input"] for line in out.split("\n")[:-1]] == ["the dog", "a\u2028cat", ""]


def test_json_lines_have_the_scores_of_beam_search(folders, opened, kind, capsys):
    tokenizer, model = opened[kind]
    options = {"max_new_tokens": 5, "num_beams": 3, "num_return_sequences": 2}
    argv = [folders[kind], "--jsonl", "--max-new-tokens", 5, "--num-beams", 3, "--num-return-sequences", 2]
    records = [json.loads(line) for line in printed(capsys, *argv, *TEXTS).splitlines()]
    for text, record in zip(TEXTS, records, strict=True):
        ids = tokenizer(text, return_tensors="pt").input_ids
        if kind == "causal":
            ids, options["eos_token_id"] = ids[:, :-1], SEP
        expected = model.generate(ids, **options, return_dict_in_generate=True, output_scores=True).sequences_scores
        torch.testing.assert_close(torch.tensor(record["scores"]), expected, atol=1e-5, rtol=0)
        assert len(record["outputs"]) == 2


# ------------------------------------------------------------------------------------------------ as it is written


@pytest.mark.parametrize("flags", [[], ["--no-repeat-ngram-size", 2], ["--stop-strings", "tree"]])
def test_a_stream_adds_up_to_the_same(folders, kind, capsys, flags):
    argv = [folders[kind], "--max-new-tokens", 9, *flags, *TEXTS]
    assert printed(capsys, *argv, "--stream") == printed(capsys, *argv)


def test_a_stream_comes_in_pieces(folders, kind, capsys, monkeypatch):
    pieces = []
    monkeypatch.setattr(sys.stdout, "write", pieces.append)
    assert (
        generate.main([str(folders[kind]), "--stream", "--max-new-tokens", "9", "--min-new-tokens", "9", "cats"]) == 0
    )
    assert len([piece for piece in pieces if piece.strip()]) > 3


def test_a_stream_waits_for_what_the_next_words_change():
    tokenizer = make_tokenizer(clean_up_tokenization_spaces=True)
    pieces = []
    streamer = generation.WordStreamer(lambda ids: generation.decode(tokenizer, ids), pieces.append)
    streamer.put(torch.tensor([[CLS]]))
    words = ["it", "'", "s", "a", "dog", ",", "don", "'", "t", "walk", "##ing", "##s", "the", "dog", "[SEP]"]
    for number in tokenizer.convert_tokens_to_ids(words):
        streamer.put(torch.tensor([number]))
    assert "".join(pieces) == "it's a dog, don't walkings"
    streamer.end()
    assert "".join(pieces) == "it's a dog, don't walkings the dog"
    assert len(pieces) > 4


@pytest.mark.parametrize("flags", [["--num-beams", 2], ["--do-sample", "--num-return-sequences", 2]])
def test_a_stream_is_of_one_output(folders, capsys, flags):
    assert refused(capsys, folders["seq2seq"], "dog", "--stream", *flags) == (
        "--stream prints one output while it grows; expected --num_beams 1 and --num_return_sequences 1"
    )


def test_at_a_terminal(folders, opened, kind, capsys, monkeypatch):
    tokenizer, model = opened[kind]
    feed(monkeypatch, b"the dog\n\nit walks\n", is_terminal=True)
    assert generate.main([str(folders[kind]), "--max-new-tokens", "4"]) == 0
    out, err = capsys.readouterr()
    assert out.splitlines() == [
        by_hand(tokenizer, model, text, max_new_tokens=4)[0] for text in ("the dog", "it walks")
    ]
    assert err == "> > > > \n"


@pytest.mark.parametrize("is_terminal", [True, False])
def test_with_one_text_at_a_time_each_is_answered_before_the_next_is_read(folders, monkeypatch, capsys, is_terminal):
    class Source(io.BytesIO):
        def read1(self, size=-1):
            """As a pipe, into which one line after another is written."""
            line = self.readline()
            seen.append(line.strip() or sum(text == "answer" for text in seen))
            return line

    seen = []
    stdin = io.TextIOWrapper(Source(b"dog\ncat\n"))
    monkeypatch.setattr(stdin, "isatty", lambda: is_terminal)
    monkeypatch.setattr(sys, "stdin", stdin)
    monkeypatch.setattr(generate, "write", lambda *_: seen.append("answer"))
    argv = [] if is_terminal else ["--batch-size", "1"]
    assert generate.main([str(folders["seq2seq"]), "--max-new-tokens", "2", *argv]) == 0
    assert seen == [b"dog", "answer", b"cat", "answer", 2]


def test_prompt_lookup_takes_one_text_at_a_time(folders, kind, capsys):
    argv = [folders[kind], "--max-new-tokens", 8, *TEXTS[:2]]
    assert printed(capsys, *argv, "--option", "prompt_lookup_num_tokens=2") == printed(capsys, *argv)


# ------------------------------------------------------------------------------------------------ checkpoints


@pytest.mark.parametrize(
    ("name", "bert_class"), [("two berts", EncoderDecoderModel), ("bert decoder", BertLMHeadModel)]
)
def test_opens_what_transformers_makes_of_berts(folders, capsys, name, bert_class):
    model = bert_class.from_pretrained(folders[name]).eval()
    out = printed(capsys, folders[name], "--max-new-tokens", 6, *TEXTS)
    expected = [by_hand(make_tokenizer(), model, text, max_new_tokens=6)[0] for text in TEXTS]
    assert out.splitlines() == expected
    assert len(set(expected)) > 1


def test_opens_weights_without_code_beside_them(folders, kind, tmp_path, capsys):
    shutil.copytree(folders[kind], tmp_path, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.py"))
    config = json.loads((tmp_path / "config.json").read_text())
    del config["auto_map"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    argv = ["--max-new-tokens", 3, *TEXTS]
    assert printed(capsys, tmp_path, *argv) == printed(capsys, folders[kind], *argv)


@pytest.mark.parametrize("name", ["two berts", "bert decoder"])
def test_names_the_package_where_it_takes_it(folders, capsys, monkeypatch, name):
    monkeypatch.setitem(sys.modules, "modeling_scratchbert", None)
    err = refused(capsys, folders[name], "dog")
    assert err.startswith(f"{folders[name]}: modeling_scratchbert, which opens it, is not installed")


def test_the_dtype(folders, opened, calls, capsys):
    models = []
    for dtype, expected in {"auto": torch.float32, "bfloat16": torch.bfloat16}.items():
        models.append(generation.open_generator(str(folders["seq2seq"]), dtype, "cpu")[1])
        assert models[-1].dtype == expected
        assert not models[-1].training
    assert printed(capsys, folders["seq2seq"], "--dtype", "bfloat16", "--max-new-tokens", 2, "dog")


def broken(folders, tmp_path, name: str, **fields) -> Path:
    """A copy of a checkpoint with other fields in its config.json, and without those that are None."""
    shutil.copytree(folders[name], tmp_path / "broken")
    config = json.loads((tmp_path / "broken" / "config.json").read_text()) | fields
    config = {name: value for name, value in config.items() if value is not None}
    (tmp_path / "broken" / "config.json").write_text(json.dumps(config))
    return tmp_path / "broken"


def test_refuses_an_encoder(folders, minilm, capsys):
    for source in (folders["encoder"], minilm):
        assert refused(capsys, source, "dog") == (
            f"{source}: It is an encoder, which generates nothing; expected a generator. Make one of its weights with "
            "ScratchBertForConditionalGeneration.from_bert(…), train it, and save it."
        )


def test_refuses_a_generator_without_all_weights(folders, capsys):
    err = refused(capsys, folders["headless"], "dog")
    assert "It lacks 5 weights, such as lm_head.decoder.bias, which would be random. Train it" in err


def test_refuses_other_kinds_of_model(folders, tmp_path, capsys):
    folder = broken(folders, tmp_path, "causal", model_type="gpt2", auto_map=None)
    assert refused(capsys, folder, "dog") == (
        f"{folder}: Its config.json is missing or has model_type 'gpt2'; expected a ScratchBert or a BERT."
    )


def test_refuses_a_folder_without_a_tokenizer(folders, kind, tmp_path, capsys):
    shutil.copytree(folders[kind], tmp_path, dirs_exist_ok=True, ignore=shutil.ignore_patterns("tokenizer*"))
    assert refused(capsys, tmp_path, "dog").startswith(f"{tmp_path}: It has no tokenizer: neither")


def test_refuses_what_is_no_checkpoint(tmp_path, capsys):
    assert refused(capsys, tmp_path / "none", "dog") == f"{tmp_path / 'none'}: There is no such folder."
    assert "config.json" in refused(capsys, tmp_path, "dog")
    (tmp_path / "config.json").write_text("[]")
    assert "config.json is not a JSON object" in refused(capsys, tmp_path, "dog")


def test_refuses_a_device_that_is_not_there(folders, capsys):
    for device in ("nowhere", "cuda:77"):
        assert f"{folders['seq2seq']}: --device {device}: " in refused(
            capsys, folders["seq2seq"], "dog", "--device", device
        )


# ------------------------------------------------------------------------------------------------ what it refuses

REFUSALS = {
    "--num-beams 0": "argument --num_beams: '0' is invalid; expected an integer of at least 1",
    "--max-new-tokens many": "argument --max_new_tokens: 'many' is invalid; expected an integer of at least 1",
    "--top-k -1": "argument --top_k: '-1' is invalid; expected an integer of at least 0",
    "--batch-size 0": "argument --batch_size: '0' is invalid; expected an integer of at least 1",
    "--early-stopping maybe": "argument --early_stopping: invalid choice: 'maybe'",
    "--option top_j=3": "MODEL: GenerationConfig has no field top_j",
    "--option num_beam_groups=2 --num-beams 2": "MODEL: Group Beam Search requires",
    "--option top_k": "argument --option: 'top_k' is invalid; expected NAME=VALUE",
    '--option watermarking_config={"bios":1}': "the value of an --option is invalid: ",
    "--option watermarking_config=3": "the value of an --option is invalid: ",
    "--option cache_implementation=paged": "MODEL: cache_implementation is 'paged', which is for serving",
    "--stream --jsonl": "--stream and --jsonl are both given; expected one of the two",
    "--num-return-sequences 2": "MODEL: Greedy methods (do_sample != True) without beam search do not support",
    "--num-return-sequences 3 --num-beams 2": "MODEL: `num_return_sequences` (3) has to be smaller or equal to",
    "--temperature 0.5": "MODEL: GenerationConfig is invalid: - `temperature`: `do_sample` is not set to `True`.",
    "--length-penalty 2": "MODEL: GenerationConfig is invalid: - `length_penalty`: `num_beams` is set to None.",
    "--do-sample --temperature 0": "MODEL: `temperature` (=0.0) has to be a strictly positive float",
    "--max-new-tokens 25": "MODEL: max_new_tokens is 25; expected at most 24, with 24 positions.",
    "--max-new-tokens 3 --min-new-tokens 4": "MODEL: min_new_tokens is 4; expected at most max_new_tokens, 3.",
    "--option max_length=99": "MODEL: max_length is 99, 1 tokens of which are the prompt; expected at most 25",
    "--nothing": "unrecognized arguments: --nothing",
}


@pytest.mark.parametrize("flags", REFUSALS)
def test_refuses_in_one_line(folders, capsys, flags):
    err = refused(capsys, folders["seq2seq"], "dog", *flags.split())
    assert err.replace(str(folders["seq2seq"]), "MODEL").startswith(REFUSALS[flags])


def test_usage(tmp_path, capsys):
    assert refused(capsys) == "the following arguments are required: MODEL"
    assert refused(capsys, tmp_path, "dog", "--file", "x").startswith("texts are given both as arguments and in --file")


def test_the_help_is_the_docstring(capsys):
    with pytest.raises(SystemExit) as stopped:
        generate.main(["--help"])
    out = capsys.readouterr().out
    assert stopped.value.code == 0
    assert generate.__doc__.strip() in out
    assert all(f"--{name}" in out for name in generate.DECODING_FLAGS)


def test_files_that_cannot_be_read_are_told_before_the_model_is_opened(tmp_path, capsys):
    argv = [tmp_path / "no-model", "--file"]
    for path in (tmp_path / "none", tmp_path):
        assert refused(capsys, *argv, path).startswith(f"{path}: [Errno ")
    (tmp_path / "latin").write_bytes("the dog\ndög\n".encode("latin-1"))
    assert refused(capsys, *argv, tmp_path / "latin") == f"{tmp_path / 'latin'}, line 2 is not UTF-8"
    assert refused(capsys, tmp_path, "dog", "d\udcf6g") == "text 2 is not UTF-8"


def test_standard_input_that_is_not_utf8(folders, monkeypatch, capsys):
    feed(monkeypatch, b"dog\ncat\n\xff\n")
    assert generate.main([str(folders["seq2seq"]), "--batch-size", "1", "--max-new-tokens", "2"]) == 2
    out, err = capsys.readouterr()
    assert out.count("\n") == 2
    assert err == "generate.py: standard input, line 3 is not UTF-8\n"


def test_standard_input_that_is_closed(folders, monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", None)
    assert refused(capsys, folders["seq2seq"]).startswith("there is no text; expected some as arguments")


def test_remarks_on_texts_that_are_cut(folders, capsys, monkeypatch):
    long = " ".join(WORDS[i % 9] for i in range(30))
    for kind, remark in {
        "seq2seq": f"its last {32 - POSITIONS} tokens are left out",
        "causal": f"its first {31 - (POSITIONS - 3)} tokens are left out",
    }.items():
        feed(monkeypatch, f"dog\n\n{long}\n".encode())
        assert generate.main([str(folders[kind]), "--max-new-tokens", "4"]) == 0
        out, err = capsys.readouterr()
        assert out.count("\n") == 3
        assert err == f"generate.py: text 3 is too long: {remark}\n"


@pytest.mark.parametrize("flags", [[], ["--stream"]])
def test_a_reader_that_goes_away(folders, monkeypatch, capsys, flags):
    def gone(*_):
        raise BrokenPipeError

    monkeypatch.setattr(sys.stdout, "write", gone)
    assert generate.main([str(folders["seq2seq"]), "dog", *flags]) == 141
    assert capsys.readouterr().err == ""


def test_a_full_disk(folders, monkeypatch, capsys):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(generate, "write", full)
    assert refused(capsys, folders["seq2seq"], "dog") == "the output cannot be written: No space left on device"


def test_interrupted(folders, monkeypatch, capsys):
    def interrupt(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(ScratchBertForConditionalGeneration, "generate", interrupt)
    assert generate.main([str(folders["seq2seq"]), "dog"]) == 130
    assert capsys.readouterr().err == "generate.py: interrupted\n"


def test_an_error_of_our_own_is_not_laid_on_the_user(folders, monkeypatch):
    def fail(*_, **__):
        raise TypeError("a bug")

    monkeypatch.setattr(ScratchBertForConditionalGeneration, "generate", fail)
    with pytest.raises(TypeError, match="a bug"):
        generate.main([str(folders["seq2seq"]), "dog"])


# ------------------------------------------------------------------------------------------------ as a process


def test_a_process_without_the_package_whose_reader_goes_away(folders, opened, tmp_path):
    """Code beside the weights is enough, and `… | head -1` ends it without a word."""
    # What is None there cannot be imported.
    program = (
        "import runpy, sys; sys.modules['modeling_scratchbert'] = None; "
        f"runpy.run_path({str(SCRIPTS / 'generate.py')!r}, run_name='__main__')"
    )
    environment = {
        **os.environ,
        "PYTHONPATH": str(SCRIPTS),
        "HF_MODULES_CACHE": str(tmp_path),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }
    texts = tmp_path / "texts"
    texts.write_text("the dog\n" * 500)
    command = [
        sys.executable,
        "-c",
        program,
        folders["seq2seq"],
        "--max-new-tokens",
        "4",
        "--file",
        texts,
        "--trust-remote-code",
    ]
    process = subprocess.Popen(
        [*map(str, command), "--batch-size", "1"], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    first = process.stdout.readline().decode()
    process.stdout.close()
    err = process.stderr.read().decode()
    assert (process.wait(), err) == (141, "")
    tokenizer, model = opened["seq2seq"]
    assert [first.rstrip("\n")] == by_hand(tokenizer, model, "the dog", max_new_tokens=4)
