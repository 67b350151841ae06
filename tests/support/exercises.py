"""Solutions of the exercises of the course, as the texts that fill the gaps and replace the bugs."""

import re
import sys
from pathlib import Path

import course
from course import EXERCISES

# A gap is one line. A bug is all lines from its comment to the end of the function.
GAP = re.compile(r"( +)(?:raise NotImplementedError  # your code|# Your (?:code|check): .*|# Fix .*(?:\n\1.+)+)\n")

SOLUTIONS = {
    "attention.py": [
        """
scores = query.transpose(-2, -1) @ key / query.shape[-2] ** 0.5
weights = scores.softmax(dim=-1)
return value @ weights.transpose(-2, -1), weights
""",
        """
linear = nn.Linear(*matrix.shape, bias=False)
linear.weight = nn.Parameter(matrix.T)
return linear
""",
    ],
    "masks.py": [
        """
allowed = torch.ones(length, length).tril().bool() & torch.ones(length, length).triu(1 - window).bool()
return torch.zeros(length, length).masked_fill(~allowed, LOWEST)
""",
        """
hidden = torch.arange(width) < width - lengths[:, None, None, None]
return torch.zeros(hidden.shape).masked_fill(hidden, LOWEST)
""",
        """
scores = query @ key.transpose(-2, -1) / query.shape[-1] ** 0.5
weights = (scores + mask).softmax(dim=-1)
return weights @ value, weights
""",
    ],
    "heads.py": [
        """
if config.hidden_size % config.num_attention_heads:
    raise ValueError("the heads do not divide the width")
""",
        """
B, _, C = x.shape
memory = x if memory is None else memory
query, key, value = (
    layer(states).view(B, -1, self.num_heads, C // self.num_heads).transpose(1, 2)
    for layer, states in ((self.query, x), (self.key, memory), (self.value, memory))
)
scores = query @ key.transpose(-2, -1) / query.shape[-1] ** 0.5
if mask is not None:
    scores = scores + mask
weights = scores.softmax(dim=-1)
context = (weights @ value).transpose(1, 2).reshape(x.shape)
return self.output(context), weights
""",
    ],
    "blocks.py": [
        """
a, b = x.chunk(2, dim=-1)
return a * (1 + torch.erf(a / 2**0.5)) / 2 * b
""",
        """
x = x.transpose(self.dim, -1)
mean, variance = x.mean(dim=-1, keepdim=True), x.var(dim=-1, correction=0, keepdim=True)
x = (x - mean) / (variance + self.eps).sqrt() * self.weight + self.bias
return x.transpose(self.dim, -1)
""",
        """
pieces = x.split(chunk_size or x.shape[1], dim=1)
return torch.cat([self.output(nn.functional.gelu(self.intermediate(piece))) for piece in pieces], dim=1)
""",
        """
if self.order == "parallel":
    attended = self.dropout(self.attention(self.attention_norm(x), mask)[0])
    return x + attended + self.dropout(self.feed_forward(self.feed_forward_norm(x)))
x = self.attention_norm(x + self.dropout(self.attention(x, mask)[0]))
return self.feed_forward_norm(x + self.dropout(self.feed_forward(x)))
""",
    ],
    "embeddings.py": [
        """
position = torch.arange(length)[:, None]
angle = position / 10_000 ** (torch.arange(0, width, 2) / width)
return torch.cat([angle.sin(), angle.cos()], dim=1)
""",
        """
if token_type_ids is None:
    token_type_ids = torch.zeros_like(input_ids)
positions = (attention_mask.cumsum(dim=1) - 1).clamp(min=0)
x = self.word_embeddings(input_ids)
x = x + self.position_embeddings(positions)
x = x + self.token_type_embeddings(token_type_ids)
return self.dropout(self.norm(x))
""",
    ],
    "bert.py": [
        """
"embeddings.position_embeddings": "embeddings.position_embeddings",
"embeddings.token_type_embeddings": "embeddings.token_type_embeddings",
"embeddings.LayerNorm": "embeddings.norm",
"encoder.layer.{}.attention.self.key": "blocks.{}.attention.key",
"encoder.layer.{}.attention.self.value": "blocks.{}.attention.value",
"encoder.layer.{}.attention.output.dense": "blocks.{}.attention.output",
"encoder.layer.{}.attention.output.LayerNorm": "blocks.{}.attention_norm",
"encoder.layer.{}.output.LayerNorm": "blocks.{}.feed_forward_norm",
"encoder.layer.{}.intermediate.dense": "blocks.{}.feed_forward.intermediate",
"encoder.layer.{}.output.dense": "blocks.{}.feed_forward.output",
"pooler.dense": "pooler",
""",
        """
mask = torch.zeros(attention_mask.shape).masked_fill(attention_mask == 0, torch.finfo(torch.float32).min)
states = [self.embeddings(input_ids, attention_mask, token_type_ids)]
for block in self.blocks:
    states.append(block(states[-1], mask[:, None, None]))
return torch.stack(states), self.pooler(states[-1][:, 0]).tanh()
""",
        """
words = 1 - special_tokens_mask[:, :, None]
return (states * words).sum(dim=1) / words.sum(dim=1)
""",
    ],
    "pretraining.py": [
        """
inputs, labels = input_ids.clone(), torch.full_like(input_ids, -100)
for row in range(len(input_ids)):
    places = (~special[row]).nonzero().flatten()
    places = places[torch.randperm(len(places))][: round(0.15 * len(places))]
    labels[row, places] = input_ids[row, places]
    lottery = torch.rand(len(places))
    inputs[row, places[lottery < 0.8]] = mask_id
    replaced = places[lottery >= 0.9]
    inputs[row, replaced] = torch.randint(vocab_size, (len(replaced),))
return inputs, labels
""",
        """
self.decoder.weight = word_embeddings.weight
""",
        """
return self.decoder(self.norm(nn.functional.gelu(self.dense(states[labels != -100]))))
""",
        """
return nn.functional.cross_entropy(logits.transpose(0, 1).flatten(0, 1), labels.flatten())
""",
    ],
    "finetuning.py": [
        """
model.requires_grad_(False)
blocks = model.model.encoder.blocks
for part in (model.model.pooler, model.classifier, *blocks[len(blocks) - num_trained :]):
    part.requires_grad_(True)
""",
        """
tables = set(model.model.embeddings.parameters())
trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
matrices = [each for each in trained if each.ndim == 2 and each not in tables]
others = [each for each in trained if each.ndim < 2 or each in tables]
return [{"params": matrices, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]
""",
        """
right, total = [0, 0], [0, 0]
was_training = model.training
model.eval()
with torch.no_grad():
    for batch in batches:
        predictions = model(**batch).logits.argmax(dim=-1)
        for label, prediction in zip(batch["labels"], predictions):
            right[label] += int(label == prediction)
            total[label] += 1
model.train(was_training)
return (right[0] / total[0] + right[1] / total[1]) / 2
""",
    ],
    "seq2seq.py": [
        """
start = torch.full_like(labels[:, :1], start_id)
shifted = torch.cat([start, labels[:, :-1]], dim=1)
return shifted.masked_fill(shifted == -100, pad_id), (shifted != -100).long()
""",
        """
losses = nn.functional.cross_entropy(logits.transpose(1, 2), labels, reduction="none")
return losses.sum(dim=1) / (labels != -100).sum(dim=1)
""",
        """
ids = torch.full((len(input_ids), 1), model.config.decoder_start_token_id)
ended = torch.zeros(len(ids), dtype=torch.bool)
for _ in range(max_new_tokens):
    logits = model(input_ids=input_ids, attention_mask=attention_mask, decoder_input_ids=ids).logits
    token = logits[:, -1].argmax(dim=-1)
    token[ended] = model.config.pad_token_id
    ids = torch.cat([ids, token[:, None]], dim=1)
    ended = ended | (token == model.config.eos_token_id)
    if ended.all():
        break
return ids
""",
    ],
    "speed.py": [
        """
lengths, tokens = attention_mask.sum(dim=1), attention_mask.bool()
cu_seqlens = torch.cat([torch.zeros(1, dtype=torch.long), lengths.cumsum(dim=0)])
return x[tokens][None], cu_seqlens, torch.arange(x.shape[1]).expand(tokens.shape)[tokens][None]
""",
        """
lengths = cu_seqlens.diff()
padded = x.new_zeros(len(lengths), int(lengths.max()), x.shape[-1])
for row, length in enumerate(lengths):
    padded[row, :length] = x[0, cu_seqlens[row] : cu_seqlens[row + 1]]
return padded
""",
        """
s = x.abs().amax(dim=-1, keepdim=True) / 127
q = (x / s).round().int()
m = linear.weight.amin(dim=1)
t = (linear.weight.amax(dim=1) - m) / 255
v = ((linear.weight - m[:, None]) / t[:, None]).round().int()
return s * (q @ v.T) * t + s * q.sum(dim=-1, keepdim=True) * m + linear.bias
""",
    ],
}


def solve(folder: Path, old: str = "", new: str = "") -> None:
    """Writes the solutions into `folder`, in which `course start` has written the exercises.

    Args:
        old, new: a text that is in one solution at least, and what to write in its place, to plant a mistake.
    """
    replaced = 0
    for name, bodies in SOLUTIONS.items():
        text, rest = (EXERCISES / name).read_text(encoding="utf-8"), list(bodies)
        replaced += sum(body.count(old) for body in bodies if old)

        def filled(match: re.Match, rest=rest) -> str:
            body = rest.pop(0).strip("\n")
            return "".join(f"{match[1]}{line}\n" for line in (body.replace(old, new) if old else body).split("\n"))

        (folder / name).write_text(GAP.sub(filled, text), encoding="utf-8")
        assert not rest, f"{name} has fewer gaps than solutions"
    assert replaced or not old, f"no solution contains {old!r}"


def run_tests(folder: Path, chapter: int, source: str) -> int:
    """Runs `course check` on the files in `folder`, in this process. Returns the exit code."""
    for path in EXERCISES.rglob("*.py"):
        sys.modules.pop(path.stem, None)  # of another folder
    return course.main(["check", str(chapter), "--folder", str(folder), "--model", source])
