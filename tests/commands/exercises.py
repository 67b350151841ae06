"""Solutions of the exercises of the course, as the texts that fill the gaps."""

import re
from pathlib import Path

from support.folders import SCRIPTS

WITH_GAPS = SCRIPTS / "data" / "course"
GAP = re.compile(r"( +)(?:\.\.\.  # your code|# Your (?:code|check): .*)\n")

SOLUTIONS = {
    "attention.py": [
        """
scores = query @ key.transpose(-2, -1) / query.shape[-1] ** 0.5
weights = scores.softmax(dim=-1)
return weights @ value, weights
""",
        """
linear = nn.Linear(*matrix.shape, bias=False)
linear.weight = nn.Parameter(matrix.T)
return linear
""",
    ],
    "masks.py": [
        """
allowed = torch.ones(length, length).tril().bool()
return torch.zeros(length, length).masked_fill(~allowed, LOWEST)
""",
        """
hidden = attention_mask[:, None, None, :] == 0
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
B, T, C = x.shape
layers = self.query, self.key, self.value
query, key, value = (layer(x).view(B, T, self.num_heads, -1).transpose(1, 2) for layer in layers)
scores = query @ key.transpose(-2, -1) / query.shape[-1] ** 0.5
if mask is not None:
    scores = scores + mask
weights = scores.softmax(dim=-1)
context = (weights @ value).transpose(1, 2).reshape(B, T, C)
return self.output(context), weights
""",
    ],
    "blocks.py": [
        """
return x * (1 + torch.erf(x / 2**0.5)) / 2
""",
        """
mean, variance = x.mean(dim=-1, keepdim=True), x.var(dim=-1, correction=0, keepdim=True)
return (x - mean) / (variance + self.eps).sqrt() * self.weight + self.bias
""",
        """
return self.output(gelu(self.intermediate(x)))
""",
        """
if self.norm_first:
    x = x + self.dropout(self.attention(self.attention_norm(x), mask)[0])
    return x + self.dropout(self.feed_forward(self.feed_forward_norm(x)))
x = self.attention_norm(x + self.dropout(self.attention(x, mask)[0]))
return self.feed_forward_norm(x + self.dropout(self.feed_forward(x)))
""",
    ],
    "embeddings.py": [
        """
position = torch.arange(length)[:, None]
angle = position / 10_000 ** (torch.arange(0, width, 2) / width)
table = torch.empty(length, width)
table[:, 0::2], table[:, 1::2] = angle.sin(), angle.cos()
return table
""",
        """
if token_type_ids is None:
    token_type_ids = torch.zeros_like(input_ids)
positions = torch.arange(input_ids.shape[1])
x = self.word_embeddings(input_ids)
x = x + self.position_embeddings(positions)
x = x + self.token_type_embeddings(token_type_ids)
return self.dropout(self.norm(x))
""",
    ],
    "bert.py": [
        """
for part, source in (
    (block.attention.query, layer.attention.self.query),
    (block.attention.key, layer.attention.self.key),
    (block.attention.value, layer.attention.self.value),
    (block.attention.output, layer.attention.output.dense),
    (block.attention_norm, layer.attention.output.LayerNorm),
    (block.feed_forward.intermediate, layer.intermediate.dense),
    (block.feed_forward.output, layer.output.dense),
    (block.feed_forward_norm, layer.output.LayerNorm),
):
    part.load_state_dict(source.state_dict())
""",
        """
mask = attention_mask[:, :, None]
return (states * mask).sum(dim=1) / mask.sum(dim=1)
""",
    ],
    "pretraining.py": [
        """
inputs, labels = input_ids.clone(), input_ids.clone()
chosen = (torch.rand(input_ids.shape) < 0.15) & ~special
labels[~chosen] = -100
lottery = torch.rand(input_ids.shape)
inputs[chosen & (lottery < 0.8)] = mask_id
replaced = chosen & (lottery >= 0.9)
inputs[replaced] = torch.randint(vocab_size, (int(replaced.sum()),))
return inputs, labels
""",
        """
self.decoder.weight = word_embeddings.weight
""",
        """
return self.decoder(self.norm(nn.functional.gelu(self.dense(states))))
""",
        """
return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
""",
    ],
    "finetuning.py": [
        """
for part in (model.model.embeddings, *model.model.encoder.blocks[:num_blocks]):
    part.requires_grad_(False)
""",
        """
trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
return [
    {"params": [each for each in trained if each.ndim == 2], "weight_decay": weight_decay},
    {"params": [each for each in trained if each.ndim < 2], "weight_decay": 0.0},
]
""",
        """
right, total = 0, 0
was_training = model.training
model.eval()
with torch.no_grad():
    for batch in batches:
        right += (model(**batch).logits.argmax(dim=-1) == batch["labels"]).sum().item()
        total += len(batch["labels"])
model.train(was_training)
return right / total
""",
    ],
    "seq2seq.py": [
        """
start = torch.full_like(labels[:, :1], start_id)
shifted = torch.cat([start, labels[:, :-1]], dim=1)
return shifted.masked_fill(shifted == -100, pad_id)
""",
        """
return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
""",
        """
ids = torch.tensor([[model.config.decoder_start_token_id]])
for _ in range(max_new_tokens):
    logits = model(input_ids=input_ids, attention_mask=attention_mask, decoder_input_ids=ids).logits
    ids = torch.cat([ids, logits[:, -1:].argmax(dim=-1)], dim=1)
    if ids[0, -1] == model.config.eos_token_id:
        break
return ids
""",
    ],
    "speed.py": [
        """
lengths = attention_mask.sum(dim=1)
return x[attention_mask.bool()][None], torch.cat([torch.zeros(1, dtype=torch.long), lengths.cumsum(dim=0)])
""",
        """
padded = x.new_zeros(*attention_mask.shape, x.shape[-1])
padded[attention_mask.bool()] = x[0]
return padded
""",
        """
m = x.amin(dim=-1, keepdim=True)
s = (x.amax(dim=-1, keepdim=True) - m) / 255
q = ((x - m) / s).round().int()
t = linear.weight.abs().amax(dim=1) / 127
v = (linear.weight / t[:, None]).round().int()
return s * (q @ v.T) * t + m * (v.sum(dim=1) * t) + linear.bias
""",
    ],
}


def solve(folder: Path, old: str = "", new: str = "", chapters: int = len(SOLUTIONS)) -> None:
    """Writes the solved files of the first chapters into `folder`.

    Args:
        old, new: a text that is in one solution at least, and what to write in its place, to plant a mistake.
    """
    replaced = 0
    for name, bodies in list(SOLUTIONS.items())[:chapters]:
        text, rest = (WITH_GAPS / name).read_text(encoding="utf-8"), list(bodies)
        replaced += sum(body.count(old) for body in bodies if old)

        def filled(match: re.Match, rest=rest) -> str:
            body = rest.pop(0).strip("\n")
            return "".join(f"{match[1]}{line}\n" for line in (body.replace(old, new) if old else body).split("\n"))

        (folder / name).write_text(GAP.sub(filled, text), encoding="utf-8")
        assert not rest, f"{name} has fewer gaps than solutions"
    assert replaced or not old, f"no solution contains {old!r}"
