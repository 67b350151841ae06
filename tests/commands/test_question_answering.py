"""`scripts/question_answering.py`: windows that cover a context, gold positions, the best span of all windows, and the
files of questions and entities in `scripts/data`."""

import io
import itertools
import json
import math
import re
import sys
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer, BertConfig, BertForQuestionAnswering, BertTokenizerLegacy

import question_answering
from modeling_scratchbert import ScratchBertForQuestionAnswering
from support.folders import SCRIPTS
from support.models import randomise, tiny_config
from toolkit.spans import (
    NO_ANSWER,
    Answer,
    Feature,
    answer,
    best_spans,
    context_windows,
    positions,
    saved_lengths,
    with_marks,
    with_no_answer,
)

DATA = SCRIPTS / "data"

QUESTION = "Who founded the mill?"  # 5 tokens
SENTENCES = [
    "The mill on the Arle was founded by Ottilie Brandt in 1843.",
    "It ground rye,\nbarley and,\r\nin bad years, acorns.",
    "Crème brûlée, cafe\u0301s and a 🎉 came later; 中文 as well!",
    "Nobody knows who closed it (the books were lost).",
]
LONG = " ".join(f"{sentence} Page {number}." for number, sentence in enumerate(SENTENCES * 4))


@pytest.fixture(scope="module")
def tokenizer(minilm):
    return AutoTokenizer.from_pretrained(minilm)


def tokens_of(tokenizer, context: str) -> list[tuple[int, tuple[int, int]]]:
    """Ids and offsets of a context by itself."""
    encoded = tokenizer(context, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    return list(zip(encoded["input_ids"], encoded["offset_mapping"], strict=True))


# ------------------------------------------------------------------------------------------------ windows


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize(("max_length", "stride"), [(24, 0), (24, 15), (40, 7), (384, 128)])
def test_windows_cover_every_token_and_overlap_by_the_stride(minilm, max_length, stride, side):
    tokenizer = AutoTokenizer.from_pretrained(minilm, truncation_side=side, padding_side=side)
    question = tokenizer(QUESTION)["input_ids"]
    found = context_windows(tokenizer, ["When?", QUESTION], ["In 1843.", LONG], max_length, stride)
    assert [feature.example for feature in found] == [0] + [1] * (len(found) - 1)
    tokens = tokens_of(tokenizer, LONG)
    seen = []
    for feature in found[1:]:
        size = len(feature.offsets)
        assert len(feature.input_ids) == len(feature.token_type_ids) == len(question) + size + 1 <= max_length
        assert feature.input_ids[: feature.first] == question
        assert feature.input_ids[-1] == tokenizer.sep_token_id
        assert feature.token_type_ids == [0] * feature.first + [1] * (size + 1)
        # Found by their place alone: no two tokens of this context have one in common.
        begin = [offsets[0] for _, offsets in tokens].index(feature.offsets[0][0])
        assert feature.input_ids[feature.first : -1] == [number for number, _ in tokens[begin : begin + size]]
        assert [start for start, _ in feature.offsets] == [start for _, (start, _) in tokens[begin : begin + size]]
        seen.append((begin, begin + size))
    assert (seen[0][0], seen[-1][1]) == (0, len(tokens))
    assert all(before[1] - after[0] == stride for before, after in itertools.pairwise(seen))
    room = max_length - 3 - 5
    assert all(end - begin == room for begin, end in seen[:-1])


def test_a_token_has_the_accents_behind_it(tokenizer):
    context = "Les cafe\u0301s, e\u0301te\u0301"
    [feature] = context_windows(tokenizer, ["Quoi?"], [context])
    parts = [context[start:end] for start, end in feature.offsets]
    assert "".join(parts) == context.replace(" ", "")
    assert parts[-1].endswith("\u0301")


def test_an_accent_that_is_a_token_stays_one():
    """As a cased tokenizer has it, which drops none."""
    assert with_marks([(0, 4), (4, 5), (6, 7)], "cafe\u0301 e\u0301") == [(0, 4), (4, 5), (6, 8)]


def test_no_questions(tokenizer):
    assert context_windows(tokenizer, [], []) == []


@pytest.mark.parametrize(
    ("questions", "contexts", "options", "message"),
    [
        (["Who?"], [""], {}, "context 0 is empty"),
        (["Who?", "Who?"], ["It.", " \n"], {}, "context 1 is empty"),
        (["Who?"], ["\u200b"], {}, r"context 0 has no tokens: '\\u200b'"),
        (["Who?", " "], ["It.", "It."], {}, "question 1 is empty"),
        (["Who?"], [], {}, "1 questions and 0 contexts"),
        ("Who?", ["It."], {}, "questions is a string, 'Who\\?'; expected a list"),
        (["Who?"], "It.", {}, "contexts is a string"),
        (["Who?"], ["It."], {"stride": -1}, "stride is -1"),
        # [CLS] who ? [SEP] … [SEP] has 5 tokens beside the context's.
        (
            ["Who?"],
            ["It."],
            {"max_length": 20, "stride": 15},
            r"question 0: max_length is 20; expected at least "
            r"21: 5 tokens around the text \+ stride 15 \+ 1",
        ),
        (["Who?", "who " * 400], ["It.", "It."], {}, "question 1: max_length is 384; expected at least 532: 403"),
    ],
)
def test_windows_refuses(tokenizer, questions, contexts, options, message):
    with pytest.raises(ValueError, match=message):
        context_windows(tokenizer, questions, contexts, **options)


def test_the_narrowest_window_is_enough(tokenizer):
    found = context_windows(tokenizer, ["Who?"], ["Ada and Bo."], max_length=6, stride=0)
    assert [len(feature.offsets) for feature in found] == [1, 1, 1, 1]


def test_a_slow_tokenizer_is_refused(tmp_path):
    (tmp_path / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "it"]))
    slow = BertTokenizerLegacy(str(tmp_path / "vocab.txt"))
    with pytest.raises(ValueError, match=r"BertTokenizerLegacy is a slow tokenizer; expected a fast one"):
        context_windows(slow, ["it"], ["it"])


# ------------------------------------------------------------------------------------------------ gold positions


def decoded(feature: Feature, context: str, first: int, last: int) -> str:
    return context[feature.offsets[first - feature.first][0] : feature.offsets[last - feature.first][1]]


@pytest.mark.parametrize(("max_length", "stride"), [(20, 0), (24, 10), (48, 16), (384, 128)])
def test_positions_give_the_answer_back_in_every_window_that_has_it_all(tokenizer, max_length, stride):
    tokens = tokens_of(tokenizer, LONG)
    words = [offsets for _, offsets in tokens]
    found = context_windows(tokenizer, [QUESTION], [LONG], max_length, stride)
    room = max_length - 8
    begins = range(0, max(1, len(tokens) - room + room - stride), room - stride)
    assert len(begins) >= len(found)
    for first, length in itertools.product(range(0, len(words), 3), (1, 2, 5, 11)):
        last = min(first + length, len(words)) - 1
        start, end = words[first][0], words[last][1]
        while end < len(LONG) and LONG[end] == "\u0301":
            end += 1
        marked = positions(found, [LONG], [(LONG[start:end], start)])
        for k, (feature, (a, b)) in enumerate(zip(found, marked, strict=True)):
            begin = k * (room - stride)
            if begin <= first and last < begin + room:
                assert (a, b) == (5 + 2 + first - begin, 5 + 2 + last - begin)
                assert decoded(feature, LONG, a, b) == LONG[start:end]
            else:
                assert (a, b) == (0, 0)


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("café", "café"),
        ("cafe\u0301", "cafe\u0301"),
        ("👩‍🚀", "👩‍🚀"),
        ("❤️", "❤️"),
        ("中文", "中文"),
        ("한국", "한국"),  # each character is several tokens without accents
        ("two\nlines", "two\nlines"),
        (" spaced ", "spaced"),
        ("\u200bhidden", "hidden"),  # the character of no width is in no token
        ("840", "1840s"),  # within a token
    ],
)
def test_positions_of_unusual_text(tokenizer, answer, expected):
    for before, after in (("", ""), ("Before it ", " after it."), ("🎉 ", "\n")):
        context = f"{before}{answer}{after}".replace("840", "1840s")
        start = context.index(answer)
        [feature] = context_windows(tokenizer, ["What?"], [context])
        [(first, last)] = positions([feature], [context], [(answer, start)])
        assert (first, last) != (0, 0)
        assert decoded(feature, context, first, last) == expected


def test_positions_without_an_answer(tokenizer):
    contexts = [SENTENCES[3], SENTENCES[0]]
    found = context_windows(tokenizer, [QUESTION] * 2, contexts)
    [none, (first, last)] = positions(found, contexts, [None, ("Ottilie Brandt", contexts[1].index("Ottilie"))])
    assert none == (0, 0)
    assert tokenizer.decode(found[1].input_ids[first : last + 1]) == "ottilie brandt"


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (("rye", 3), "answer 1 is 'rye' at character 3 of its context; found 'gro' there"),
        (("acorns", -7), "at character -7"),
        (("acorns. ", 41), "at character 41"),
        (("", 0), "answer 1 is empty; expected a text, or None"),
        (("\n", 14), r"answer 1, '\\n', has no token"),
    ],
)
def test_positions_refuses(tokenizer, answer, message):
    contexts = [SENTENCES[0], SENTENCES[1]]
    found = context_windows(tokenizer, [QUESTION] * 2, contexts)
    with pytest.raises(ValueError, match=message):
        positions(found, contexts, [None, answer])
    with pytest.raises(ValueError, match="1 answers and 2 contexts"):
        positions(found, contexts, [None])


# ------------------------------------------------------------------------------------------------ the best span


def made_up(example: int, offsets: list[tuple[int, int]], question: int) -> Feature:
    """A feature of which only the shape matters."""
    first = question + 2
    length = first + len(offsets) + 1
    return Feature(example, [0] * length, [0] * first + [1] * (length - first), first, offsets)


@st.composite
def cases(draw):
    """Contexts of made-up tokens, some several to a character, in windows that overlap, with logits of few values, so
    that many scores are equal."""
    contexts, features, logits = [], [], ([], [])
    for example in range(draw(st.integers(1, 3))):
        offsets, at = [], draw(st.integers(0, 2))
        for size in draw(st.lists(st.integers(1, 3), min_size=1, max_size=9)):
            offsets += [(at, at + size)] * draw(st.sampled_from([1, 1, 1, 2]))
            at += size + draw(st.integers(0, 1))
        contexts.append("".join(chr(ord("a") + k) for k in range(at)))
        room = draw(st.integers(1, 10))
        step = draw(st.integers(1, room))
        for begin in range(0, max(1, len(offsets) - room + step), step):
            features.append(made_up(example, offsets[begin : begin + room], draw(st.integers(1, 3))))
    for rows in logits:
        for feature in features:
            length = len(feature.input_ids) + draw(st.integers(0, 2))
            rows.append(draw(st.lists(st.integers(-4, 4).map(lambda k: k / 2), min_size=length, max_size=length)))
    return contexts, features, logits


def every_span(contexts, features, start_logits, end_logits, max_answer_length) -> list[list[Answer]]:
    """All there are, by looking at each pair of tokens of each window."""
    result = []
    for example, context in enumerate(contexts):
        best, null = {}, []
        for feature, start, end in zip(features, start_logits, end_logits, strict=True):
            if feature.example != example:
                continue
            null.append(start[0] + end[0])
            for i, (a, _) in enumerate(feature.offsets):
                for j, (_, b) in enumerate(feature.offsets):
                    if i <= j < i + max_answer_length:
                        score = start[feature.first + i] + end[feature.first + j]
                        if (a, b) not in best or score > best[a, b]:
                            best[a, b] = score
        spans = [Answer(context[a:b], a, b, score - min(null)) for (a, b), score in best.items()]
        result.append(sorted(spans, key=lambda span: (-span.score, span.start, span.end)))
    return result


@settings(max_examples=80)
@given(cases(), st.integers(1, 11), st.integers(1, 40))
def test_best_spans_are_those_of_all_windows_and_pairs(case, max_answer_length, n_best):
    contexts, features, (start_logits, end_logits) = case
    expected = every_span(contexts, features, start_logits, end_logits, max_answer_length)
    found = best_spans(start_logits, end_logits, features, contexts, max_answer_length=max_answer_length, n_best=n_best)
    assert found == [spans[:n_best] for spans in expected]


def test_scores_by_hand():
    """Two windows of "Ada met Bo", the second without "Ada"."""
    context, words = "Ada met Bo", [(0, 3), (4, 7), (8, 10)]
    features = [made_up(0, words[:2], 1), made_up(0, words[1:], 1)]
    # [CLS] question [SEP] word word [SEP]; beyond it, padding that would win if it counted.
    start = torch.tensor([[1.0, 90, 90, 2.0, 0.5, 90, 90], [3.0, 90, 90, 0.75, 1.5, 90, 90]])
    end = torch.tensor([[0.5, 90, 90, 1.0, 0.25, 90, 90], [4.0, 90, 90, 0.0, 4.0, 90, 90]])
    start[:, 6] = float("nan")
    # s_null: min(1.5, 7) = 1.5. "Ada" 3, "Ada met" 2.25, "met" 0.75 of both windows, "met Bo" 4.75, "Bo" 5.5.
    [spans] = best_spans(start, end, features, [context], n_best=9)
    assert [(span.text, span.score) for span in spans] == [
        ("Bo", 4.0),
        ("met Bo", 3.25),
        ("Ada", 1.5),
        ("Ada met", 0.75),
        ("met", -0.75),
    ]
    assert (spans[1].start, spans[1].end) == (4, 10)
    [spans] = best_spans(start.numpy(), end.bfloat16(), features, [context], max_answer_length=1, n_best=9)
    assert [span.text for span in spans] == ["Bo", "Ada", "met"]


def test_no_answer_stands_where_the_threshold_puts_it():
    spans = [Answer("a", 0, 1, 2.0), Answer("b", 1, 2, 1.0), Answer("c", 2, 3, -1.0)]
    ranked = {threshold: [span.text for span in with_no_answer(spans, threshold)] for threshold in (3, 2, 1.5, 1, -2)}
    assert ranked == {
        3: ["", "a", "b", "c"],
        2: ["", "a", "b", "c"],
        1.5: ["a", "", "b", "c"],
        1: ["a", "", "b", "c"],
        -2: ["a", "b", "c", ""],
    }
    assert with_no_answer(spans, None) == spans
    assert with_no_answer(spans, 3)[0] is NO_ANSWER


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"start": [[0.0] * 5]}, "1 rows of start_logits, 2 of end_logits, and 2 windows; expected as many"),
        ({"end": [[0.0] * 5, [0.0] * 4]}, "row 1 of end_logits has 4 numbers; expected at least 5"),
        ({"start": [[0.0] * 5, [0.0] * 4 + [float("nan")]]}, "row 1 of start_logits has nan; expected finite"),
        ({"end": [[float("-inf")] + [0.0] * 4, [0.0] * 5]}, "row 0 of end_logits has -inf; expected finite"),
        ({"max_answer_length": 0}, "max_answer_length is 0; expected 1 or more"),
        ({"n_best": 0}, "n_best is 0"),
    ],
)
def test_best_spans_refuses(change, message):
    features = [made_up(example, [(0, 1)], 1) for example in (0, 1)]
    rows = {"start": [[0.0] * 5] * 2, "end": [[0.0] * 5] * 2} | change
    with pytest.raises(ValueError, match=message):
        best_spans(rows.pop("start"), rows.pop("end"), features, ["a", "b"], **rows)


# ------------------------------------------------------------------------------------------------ answer


class WordReader(torch.nn.Module):
    """Its logits at a token are a number of that token's word, whatever stands around it."""

    def __init__(self, tokenizer, starts: dict[str, float], ends: dict[str, float], null: dict[str, float]):
        super().__init__()
        self.config = SimpleNamespace(max_position_embeddings=512)
        self.device = torch.device("cpu")
        self.starts, self.ends = (self.table(tokenizer, scores) for scores in (starts, ends))
        self.null = self.table(tokenizer, null, 0.0)
        self.shapes = []

    @staticmethod
    def table(tokenizer, scores, otherwise=-9.0):
        table = torch.full((len(tokenizer),), otherwise)
        for word, score in scores.items():
            table[tokenizer.convert_tokens_to_ids(word)] = score
        return table

    def forward(self, input_ids, token_type_ids, attention_mask):
        assert not self.training
        self.shapes.append(tuple(input_ids.shape))
        start_logits, end_logits = self.starts[input_ids], self.ends[input_ids]
        start_logits[:, 0] = end_logits[:, 0] = self.null[input_ids].sum(dim=1) / 2  # in every window its own
        return SimpleNamespace(start_logits=start_logits, end_logits=end_logits)


def test_answer_looks_in_every_window(tokenizer):
    """The best span stands in one window alone, far back; the question's own words and [PAD] do not count."""
    filler = "the rain fell on the hills all day . " * 12
    context = f"{filler}It was the otter of\nLake Brno. {filler}then a mouse came. {filler}"
    model = WordReader(
        tokenizer,
        starts={"otter": 5, "mouse": 3, "[PAD]": 50, "who": 50},
        ends={"lake": 4, "mouse": 2, "[PAD]": 50},
        null={"otter": -20},
    ).train()
    questions = ["Who?", "Who was the mouse?", "And who?"]
    contexts = [context, filler, "A mouse and a mouse."]
    for batch_size in (1, 3, 50):
        found = answer(model, tokenizer, questions, contexts, max_length=40, stride=10, batch_size=batch_size)
        [[first], [none], [third]] = found
        start = context.index("otter")
        # s_null is -20 where the otter is in the window, and 0 elsewhere.
        assert first == Answer("otter of\nLake", start, start + 13, 9 + 20)
        assert none == NO_ANSWER  # the question has a mouse, the context none
        assert (third.start, third.text, third.score) == (2, "mouse", 5.0)
    assert model.training
    assert max(width for _, width in model.shapes) == 40


def test_answer_is_that_of_the_windows_one_by_one(tokenizer):
    model = ScratchBertForQuestionAnswering(tiny_config(vocab_size=len(tokenizer), max_position_embeddings=64))
    randomise(model).eval()
    questions, contexts = [QUESTION, "Why?", "Where did it come from, and when?"], [LONG, SENTENCES[1], LONG[:300]]
    features = context_windows(tokenizer, questions, contexts, 48, 16)
    with torch.no_grad():
        outputs = [
            model(torch.tensor([feature.input_ids]), token_type_ids=torch.tensor([feature.token_type_ids]))
            for feature in features
        ]
    logits = ([one.start_logits[0].tolist() for one in outputs], [one.end_logits[0].tolist() for one in outputs])
    expected = [spans[:4] for spans in every_span(contexts, features, *logits, 10)]
    for batch_size in (1, 4, 100):
        found = answer(
            model,
            tokenizer,
            questions,
            contexts,
            max_length=48,
            stride=16,
            max_answer_length=10,
            n_best=4,
            threshold=None,
            batch_size=batch_size,
        )
        for spans, own in zip(found, expected, strict=True):
            assert [(span.text, span.start, span.end) for span in spans] == [
                (span.text, span.start, span.end) for span in own
            ]
            assert [span.score for span in spans] == pytest.approx([span.score for span in own], abs=1e-4)


@pytest.mark.parametrize(
    ("saved", "threshold"),
    [("never", None), (1.5, 1.5), (-2, -2.0), (None, 0.0), ("best", ValueError), (math.nan, ValueError)],
)
def test_the_threshold_of_the_training_is_that_of_the_answers(tokenizer, tmp_path, saved, threshold):
    model = ScratchBertForQuestionAnswering(tiny_config(vocab_size=len(tokenizer), max_position_embeddings=64))
    model.config.null_threshold = saved
    model.save_pretrained(tmp_path)
    model = randomise(ScratchBertForQuestionAnswering.from_pretrained(tmp_path))
    asked, options = (model, tokenizer, [QUESTION], [LONG]), {"max_length": 48, "stride": 16, "n_best": 3}
    if threshold is ValueError:
        with pytest.raises(ValueError, match=f"null_threshold in config.json is {saved!r}; expected a number"):
            answer(*asked, **options)
    else:
        assert answer(*asked, **options) == answer(*asked, threshold=threshold, **options)


def test_the_lengths_of_the_training_are_those_of_the_answers(tokenizer):
    model = ScratchBertForQuestionAnswering(tiny_config(vocab_size=len(tokenizer), max_position_embeddings=64))
    asked, saved = (randomise(model), tokenizer, [QUESTION], [LONG]), {"max_length": 40, "stride": 9}
    saved["max_answer_length"] = 3
    of_small = {"max_length": 64, "stride": 21, "max_answer_length": 30}
    assert answer(*asked, n_best=5, threshold=None) == answer(*asked, n_best=5, threshold=None, **of_small)
    model.config.question_answering = saved
    found = answer(*asked, n_best=5, threshold=None)
    assert found == answer(*asked, n_best=5, threshold=None, **saved)
    saved["max_answer_length"] = 30
    assert answer(*asked, n_best=5, threshold=None, max_answer_length=3) == found
    model.config.question_answering = {"max_length": "40"}
    with pytest.raises(ValueError, match=r"question_answering in config.json is {'max_length': '40'}; expected"):
        answer(*asked)
    model.config.question_answering, model.config.max_position_embeddings = None, 512
    assert saved_lengths(model.config) == {"max_length": 384, "stride": 128, "max_answer_length": 30}


def test_answer_refuses(tokenizer):
    model = ScratchBertForQuestionAnswering(tiny_config(vocab_size=len(tokenizer)))
    with pytest.raises(ValueError, match="max_length is 384; expected at most 40"):
        answer(model, tokenizer, ["Who?"], ["It."], max_length=384)
    with pytest.raises(ValueError, match="batch_size is 0"):
        answer(model, tokenizer, ["Who?"], ["It."], batch_size=0)
    with pytest.raises(ValueError, match="threshold is nan"):
        answer(model, tokenizer, ["Who?"], ["It."], threshold=math.nan)
    assert answer(model, tokenizer, [], [], max_length=40, stride=8) == []


# ------------------------------------------------------------------------------------------------ the command line


@pytest.fixture(scope="module")
def folders(tokenizer, tmp_path_factory):
    fields = {"vocab_size": len(tokenizer), "max_position_embeddings": 400}
    models = {
        "ours": ScratchBertForQuestionAnswering(tiny_config(**fields)),
        "bert": BertForQuestionAnswering(tiny_config(BertConfig, **fields)),
    }
    found = {}
    for name, model in models.items():
        found[name] = tmp_path_factory.mktemp(name)
        randomise(model, seed=5).save_pretrained(found[name])
        tokenizer.save_pretrained(found[name])
    return found


def run(capsys, *argv) -> tuple[int, str, str]:
    try:
        code = question_answering.main(list(map(str, argv)))
    except SystemExit as error:  # from argparse
        code = error.code
    return code, *capsys.readouterr()


@pytest.mark.usefixtures("quiet_only_here")
@pytest.mark.parametrize("kind", ["ours", "bert"])
def test_prints_the_answers(folders, tokenizer, kind, tmp_path, capsys, monkeypatch):
    model = ScratchBertForQuestionAnswering.from_pretrained(folders[kind])
    path = tmp_path / "mill.txt"
    path.write_bytes(LONG.encode())
    questions = [QUESTION, "Where?"]
    asked = [folders[kind], "--question", questions[0], "--question", questions[1], "--batch-size", 2]
    sizes = {"max_length": 60, "stride": 20, "max_answer_length": 12}
    flags = [text for name, value in sizes.items() for text in (f"--{name.replace('_', '-')}", value)]
    expected = answer(model, tokenizer, questions, [LONG] * 2, n_best=3, threshold=None, **sizes)
    lines = [one.text.replace("\n", " ").replace("\r", " ") for answers in expected for one in answers]
    argv = [*asked, *flags, "--n-best", 3, "--always-answer"]
    assert run(capsys, *argv, "--context-file", path) == (0, "".join(f"{line}\n" for line in lines), "")
    code, out, err = run(capsys, *argv, "--context", LONG, "--json")
    assert (code, err) == (0, "")
    records = [json.loads(line) for line in out.splitlines()]
    assert [record["question"] for record in records] == questions
    assert [[Answer(**one) for one in record["answers"]] for record in records] == expected
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(LONG.encode())))
    path.write_bytes(LONG.encode("utf-8-sig"))
    assert run(capsys, *argv, "--context-file", path, "--json") == (0, out, "")
    high = max(answers[0].score for answers in expected) + 1
    assert run(capsys, *asked, *flags, "--context-file", "-", "--threshold", high) == (0, "\n\n", "")
    code, out, _ = run(capsys, *asked, *flags, "--context", LONG, "--threshold", high, "--json")
    assert json.loads(out.splitlines()[1])["answers"] == [{"text": "", "start": None, "end": None, "score": 0.0}]


@pytest.mark.usefixtures("quiet_only_here")
@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["MODEL", "--context", "It."], "required: --question"),
        (["MODEL", "--question", "Who?"], "--context --context_file is required"),
        (["MODEL", "--question", "Who?", "--context", "It.", "--colour", "red"], "unrecognized arguments: --colour"),
        (
            ["MODEL", "--question", "Who?", "--context", "It.", "--n-best", "0"],
            "'0' is invalid; expected an integer of at least 1",
        ),
        (["MODEL", "--question", "Who?", "--context", " "], "context 0 is empty"),
        (["MODEL", "--question", "Who?", "--context", "It.", "--threshold", "nan"], "threshold is nan"),
        (["MODEL", "--question", "Who?", "--context", "It.", "--threshold", "low"], "--threshold: .*'low'"),
        (
            ["MODEL", "--question", "Who?", "--context", "It.", "--max-length", "999"],
            "expected at most 400, the positions",
        ),
        (
            ["MODEL", "--question", "Who?", "--context", "It.", "--max-length", "64"],
            "expected at least 134: 5 tokens around the text",
        ),
        (["MODEL", "--question", "Who?", "--context-file", "gone.txt"], "gone.txt: .*No such file"),
        (["MODEL", "--question", "Who?", "--context-file", "LATIN"], "latin.txt: .*can't decode byte 0xe9"),
        (["./gone", "--question", "Who?", "--context", "It."], "./gone: There is no such folder"),
        (
            ["MINILM", "--question", "Who?", "--context", "It."],
            "It lacks 2 weights, such as qa_out",
        ),
        (["BARE", "--question", "Who?", "--context", "It."], "It has no tokenizer"),
    ],
)
def test_refuses_in_one_line(folders, minilm, tmp_path, capsys, argv, message):
    (tmp_path / "latin.txt").write_bytes("café".encode("latin-1"))
    bare = tmp_path / "bare"
    bare.mkdir()
    for name in ("config.json", "model.safetensors"):
        (bare / name).symlink_to(folders["ours"] / name)
    places = {"MODEL": folders["ours"], "MINILM": minilm, "LATIN": tmp_path / "latin.txt", "BARE": bare}
    code, out, err = run(capsys, *(places.get(text, text) for text in argv))
    assert (code, out, err.count("\n")) == (2, "", 1), err
    assert err.startswith("question_answering.py: ")
    assert re.search(message, err), err


# ------------------------------------------------------------------------------------------------ the files


def rows_of(name: str) -> list[dict]:
    return [json.loads(line) for line in (DATA / name).read_text(encoding="utf-8").splitlines()]


def counts_in_readme(folder: str, file: str) -> list[int]:
    [row] = [line for line in (DATA / folder / "README.md").read_text().splitlines() if line.startswith(f"| `{file}`")]
    return [int(cell) for cell in row.strip("|").split("|")[1:]]


@pytest.mark.parametrize("file", ["train.jsonl", "validation.jsonl"])
def test_every_answer_stands_where_it_should(tokenizer, file):
    rows = rows_of(f"questions/{file}")
    assert len({row["id"] for row in rows}) == len({(row["question"], row["context"]) for row in rows}) == len(rows)
    assert all(set(row) == {"id", "question", "context", "answers"} for row in rows)
    gold = [list(zip(row["answers"]["text"], row["answers"]["answer_start"], strict=True)) for row in rows]
    for row, answers in zip(rows, gold, strict=True):
        assert len(answers) <= 1
        assert all(row["context"][start : start + len(text)] == text for text, start in answers)
    contexts = [row["context"] for row in rows]
    answers = [one[0] if one else None for one in gold]
    features = context_windows(tokenizer, [row["question"] for row in rows], contexts, max_length=256, stride=64)
    found = {}
    for feature, (first, last) in zip(features, positions(features, contexts, answers), strict=True):
        if first:
            found[feature.example] = decoded(feature, contexts[feature.example], first, last)
    assert found == {i: one[0] for i, one in enumerate(answers) if one}
    long = sum(len(tokens_of(tokenizer, context)) > 384 for context in contexts)
    assert counts_in_readme("questions", file) == [len(rows), answers.count(None), long]
    assert 0.2 < answers.count(None) / len(rows) < 0.3


def entities_of(row: dict) -> list[tuple[str, str]]:
    """Kind and text of each entity, of tags that are valid IOB2."""
    found, before = [], "O"
    for token, tag in zip(row["tokens"], row["tags"], strict=True):
        mark, _, kind = tag.partition("-")
        assert token.strip() == token != ""
        assert (mark, kind) == ("O", "") or kind in ("PER", "ORG", "LOC", "DATE"), tag
        if mark == "B":
            found.append((kind, [token]))
        elif mark == "I":
            assert before in (f"B-{kind}", f"I-{kind}"), row["tags"]
            found[-1][1].append(token)
        before = tag
    return [(kind, " ".join(tokens)) for kind, tokens in found]


def test_tags_are_iob2_and_names_are_new_in_validation():
    rows = {name: rows_of(f"entities/{name}.jsonl") for name in ("train", "validation")}
    found = {name: [entity for row in rows[name] for entity in entities_of(row)] for name in rows}
    for name in rows:
        kinds = Counter(kind for kind, _ in found[name])
        tokens = sum(len(row["tokens"]) for row in rows[name])
        sizes = [len(rows[name]), tokens, len(found[name]), *(kinds[kind] for kind in ("PER", "ORG", "LOC", "DATE"))]
        assert counts_in_readme("entities", f"{name}.jsonl") == sizes
    both = set(found["train"]) & set(found["validation"])
    assert {kind for kind, _ in both} <= {"DATE"}
    assert len({tuple(row["tokens"]) for name in rows for row in rows[name]}) == 260
