"""A solution of the final project of the course: the file project.py of a learner, and the trainings."""

import csv
import itertools
import random
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import nn
from transformers import AutoTokenizer, BertConfig, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput, Seq2SeqLMOutput, SequenceClassifierOutput

LOWEST = torch.finfo(torch.float32).min


class MyBertConfig(PreTrainedConfig):
    model_type = "my-bert"

    def __init__(
        self,
        vocab_size=30522,
        hidden_size=384,
        num_hidden_layers=6,
        num_attention_heads=12,
        intermediate_size=1536,
        max_position_embeddings=512,
        layer_norm_eps=1e-12,
        dropout=0.1,
        **options,
    ):
        self.vocab_size, self.hidden_size, self.num_hidden_layers = vocab_size, hidden_size, num_hidden_layers
        self.num_attention_heads, self.intermediate_size = num_attention_heads, intermediate_size
        self.max_position_embeddings, self.layer_norm_eps, self.dropout = (
            max_position_embeddings,
            layer_norm_eps,
            dropout,
        )
        super().__init__(**options)


class Attention(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.heads = config.num_attention_heads
        self.query, self.key, self.value, self.output = (
            nn.Linear(config.hidden_size, config.hidden_size) for _ in range(4)
        )

    def forward(self, x, mask, memory=None):
        memory = x if memory is None else memory
        projected = self.query(x), self.key(memory), self.value(memory)
        query, key, value = (each.unflatten(-1, (self.heads, -1)).transpose(1, 2) for each in projected)
        weights = (query @ key.mT / query.shape[-1] ** 0.5 + mask).softmax(dim=-1)
        return self.output((weights @ value).transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, config, is_decoder=False):
        super().__init__()
        width, eps = config.hidden_size, config.layer_norm_eps
        self.attention, self.attention_norm = Attention(config), nn.LayerNorm(width, eps=eps)
        if is_decoder:
            self.cross_attention, self.cross_attention_norm = Attention(config), nn.LayerNorm(width, eps=eps)
        self.intermediate, self.output = (
            nn.Linear(width, config.intermediate_size),
            nn.Linear(config.intermediate_size, width),
        )
        self.output_norm, self.dropout = nn.LayerNorm(width, eps=eps), nn.Dropout(config.dropout)

    def forward(self, x, mask, memory=None, memory_mask=None):
        x = self.attention_norm(x + self.dropout(self.attention(x, mask)))
        if memory is not None:
            x = self.cross_attention_norm(x + self.dropout(self.cross_attention(x, memory_mask, memory)))
        wide = nn.functional.gelu(self.intermediate(x))
        return self.output_norm(x + self.dropout(self.output(wide)))


class Stack(nn.Module):
    """Embeddings and blocks."""

    def __init__(self, config, is_decoder=False):
        super().__init__()
        width = config.hidden_size
        self.words, self.positions = (
            nn.Embedding(config.vocab_size, width),
            nn.Embedding(config.max_position_embeddings, width),
        )
        self.types, self.norm = nn.Embedding(2, width), nn.LayerNorm(width, eps=config.layer_norm_eps)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config, is_decoder) for _ in range(config.num_hidden_layers))

    def forward(self, input_ids, mask, *memory):
        positions = torch.arange(input_ids.shape[1])
        x = self.words(input_ids) + self.positions(positions) + self.types(torch.zeros_like(input_ids))
        x = self.dropout(self.norm(x))
        for block in self.blocks:
            x = block(x, mask, *memory)
        return x


def additive(attention_mask):
    return torch.where(attention_mask == 0, LOWEST, 0.0)[:, None, None]


class MyBertPreTrainedModel(PreTrainedModel):
    config_class = MyBertConfig


class MyBertModel(MyBertPreTrainedModel):
    def __init__(self, config):
        super().__init__(config)
        self.stack = Stack(config)
        self.post_init()

    def forward(self, input_ids, attention_mask, **unused):
        return BaseModelOutput(last_hidden_state=self.stack(input_ids, additive(attention_mask)))


class MyBertForSequenceClassification(MyBertPreTrainedModel):
    def __init__(self, config):
        super().__init__(config)
        self.bert = MyBertModel(config)
        self.classifier = nn.Linear(config.hidden_size, 2)
        self.post_init()

    def forward(self, input_ids, attention_mask, labels=None, **unused):
        states, tokens = self.bert(input_ids, attention_mask).last_hidden_state, attention_mask[:, :, None]
        logits = self.classifier((states * tokens).sum(dim=1) / tokens.sum(dim=1))
        loss = None if labels is None else nn.functional.cross_entropy(logits, labels)
        return SequenceClassifierOutput(loss=loss, logits=logits)


class MyBertForConditionalGeneration(MyBertPreTrainedModel):
    def __init__(self, config):
        super().__init__(config)
        self.encoder, self.decoder = Stack(config), Stack(config, is_decoder=True)
        self.output = nn.Linear(config.hidden_size, config.vocab_size)
        self.post_init()

    def forward(self, input_ids, attention_mask, decoder_input_ids=None, labels=None):
        if decoder_input_ids is None:
            shifted = torch.cat([torch.full_like(labels[:, :1], self.config.decoder_start_token_id), labels[:, :-1]], 1)
            decoder_input_ids = shifted.masked_fill(shifted == -100, self.config.pad_token_id)
        length, source_mask = decoder_input_ids.shape[1], additive(attention_mask)
        causal = torch.full((length, length), LOWEST).triu(1)
        memory = self.encoder(input_ids, source_mask)
        logits = self.output(self.decoder(decoder_input_ids, causal, memory, source_mask))
        loss = None if labels is None else nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return Seq2SeqLMOutput(loss=loss, logits=logits)

    @torch.no_grad()
    def generate(self, input_ids, attention_mask, max_new_tokens):
        ids = torch.full((len(input_ids), 1), self.config.decoder_start_token_id)
        ended = torch.zeros(len(ids), dtype=torch.bool)
        for _ in range(max_new_tokens):
            token = self(input_ids, attention_mask, decoder_input_ids=ids).logits[:, -1].argmax(dim=-1)
            token = token.masked_fill(ended, self.config.pad_token_id)
            ids, ended = torch.cat([ids, token[:, None]], dim=1), ended | (token == self.config.eos_token_id)
            if ended.all():
                break
        return ids


MyBertConfig.register_for_auto_class()
MyBertForSequenceClassification.register_for_auto_class("AutoModelForSequenceClassification")
MyBertForConditionalGeneration.register_for_auto_class("AutoModelForSeq2SeqLM")

NAMES = {
    "stack.words": "embeddings.word_embeddings",
    "stack.positions": "embeddings.position_embeddings",
    "stack.types": "embeddings.token_type_embeddings",
    "stack.norm": "embeddings.LayerNorm",
    "stack.blocks": "encoder.layer",
    "attention.query": "attention.self.query",
    "attention.key": "attention.self.key",
    "attention.value": "attention.self.value",
    "attention.output": "attention.output.dense",
    "attention_norm": "attention.output.LayerNorm",
    ".intermediate": ".intermediate.dense",
    ".output_norm": ".output.LayerNorm",
}


def load_bert(source):
    """A MyBertModel with the weights of a BERT in a folder."""
    bert, weights = BertConfig.from_pretrained(source), load_file(Path(source) / "model.safetensors")
    fields = MyBertConfig().to_dict().keys() & bert.to_dict().keys() - {"model_type", "architectures"}
    model = MyBertModel(MyBertConfig(**{name: getattr(bert, name) for name in fields}))

    def translated(name):
        name = name.replace(".output.w", ".output.dense.w").replace(".output.b", ".output.dense.b")
        for ours, theirs in NAMES.items():
            name = name.replace(ours.replace("attention.output", "attention.output.dense"), theirs)
        return name

    model.load_state_dict({name: weights[translated(name)] for name in model.state_dict()})
    return model


# --------------------------------------------------------------------------------------------------------- trainings

ALPHABET = "_><abcdefghijklmnopqrstuvwxyz"


def encode(words):
    rows = [torch.tensor([ALPHABET.index(letter) for letter in word]) for word in words]
    return nn.utils.rnn.pad_sequence(rows, batch_first=True)


def train(model, batches, steps, learning_rate):
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, learning_rate, total_steps=steps, pct_start=0.1)
    model.train()
    for batch in itertools.islice(batches, steps):
        model(**batch).loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return model.eval()


def train_reviews(source, path, num_reviews=2048, epochs=2):
    """Writes the classifier of film reviews into the folder reviews."""
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(source)
    with open(path, encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    bert = load_bert(source)
    model = MyBertForSequenceClassification(bert.config)
    model.bert.load_state_dict(bert.state_dict())

    def batches():
        for epoch in range(epochs):
            chosen = random.Random(epoch).sample(rows, num_reviews)
            for start in range(0, num_reviews, 32):
                part = chosen[start : start + 32]
                texts = [row["text"] for row in part]
                batch = tokenizer(texts, padding=True, truncation=True, max_length=128, return_tensors="pt")
                yield {**batch, "labels": torch.tensor([int(row["label"]) for row in part])}

    train(model, batches(), epochs * num_reviews // 32, 1e-4)
    model.save_pretrained("reviews")
    tokenizer.save_pretrained("reviews")


def train_doubler(steps=600):
    """Writes the model that doubles letters into the folder doubler."""
    torch.manual_seed(0)
    config = MyBertConfig(
        vocab_size=len(ALPHABET),
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=128,
        max_position_embeddings=32,
        dropout=0.0,
        pad_token_id=0,
        decoder_start_token_id=1,
        eos_token_id=2,
        is_encoder_decoder=True,
        initializer_range=0.1,
    )
    generator, model = random.Random(1), MyBertForConditionalGeneration(config)

    def batches():
        while True:
            words = ["".join(generator.choices(ALPHABET[3:], k=generator.randint(3, 7))) for _ in range(128)]
            ids, labels = encode(words), encode(["".join(2 * letter for letter in word) + "<" for word in words])
            yield {"input_ids": ids, "attention_mask": (ids != 0).long(), "labels": labels.where(labels != 0, -100)}

    train(model, batches(), steps, 3e-3)
    model.save_pretrained("doubler")


if __name__ == "__main__":
    train_doubler()
    train_reviews(*sys.argv[1:])
