"""The mistakes in the exercises that the tests recognise. Each is an edit of a solution: a text, what is written in its
place, and what is wrong, and what to do."""

MISTAKES = {
    "attention": [
        (
            " / query.shape[-2] ** 0.5",
            "",
            "The scores are not divided by √d; divide them by the square root of the width of a query.",
        ),
        (
            "query.shape[-2] ** 0.5",
            "query.shape[-2]",
            "The scores are divided by d; divide them by √d, the square root of the width of a query.",
        ),
        (
            "query.shape[-2] ** 0.5",
            "query.shape[-1] ** 0.5",
            "The scores are divided by √T; divide them by √D. The width D of a query is query.shape[-2] here, where words are columns.",
        ),
        (
            "scores.softmax(dim=-1)",
            "scores / scores.sum(dim=-1, keepdim=True)",
            "The scores are divided by their sum; use the softmax, whose weights are never negative.",
        ),
        (
            "scores.softmax(dim=-1)",
            "scores.softmax(dim=-2)",
            "The softmax is over the queries; compute it over the keys, the last dimension (dim=-1).",
        ),
        (
            "scores.softmax(dim=-1)",
            "scores.softmax(dim=1)",
            "The softmax is over the wrong dimension; compute it over the keys, the last dimension (dim=-1).",
        ),
        (
            "value @ weights.transpose(-2, -1)",
            "weights @ value.transpose(-2, -1)",
            "The words of the result are rows; expected columns, (..., E, T).",
        ),
        ("bias=False", "bias=True", "The layer has a bias; pass bias=False."),
        (
            "nn.Parameter(matrix.T)",
            "nn.Parameter(matrix)",
            "The matrix is not transposed; nn.Linear stores the transpose, `(D, C)`, and computes x @ weight.T.",
        ),
    ],
    "masks": [
        (
            "positions[:, None] - positions",
            "positions - positions[:, None]",
            "The mask is transposed: earlier positions attend to later ones. A row is a query.",
        ),
        (
            "(distance >= 0) & (distance < window)",
            "(distance < 0) | (distance >= window)",
            "The mask is inverted; True is where a query may attend to a key.",
        ),
        ("distance >= 0", "distance > 0", "A position does not attend to itself; it may."),
        (
            "(distance >= 0) & (distance < window)",
            "torch.where((distance >= 0) & (distance < window), 0.0, torch.finfo(torch.float32).min)",
            "The mask is additive; expected booleans, True where a query may attend to a key.",
        ),
        (
            "distance < window",
            "distance <= window",
            "The window is too large by one; the position itself is one of its positions.",
        ),
        (" & (distance < window)", "", "The window is not used; hide the keys that are further back."),
        (
            ">= width - lengths",
            "> width - lengths",
            "The first token of each sequence is hidden; it is at width - length, so compare with >=.",
        ),
        (">= width - lengths", "< width - lengths", "The mask is inverted; True is where a query may attend to a key."),
        (
            "torch.arange(width) >= width - lengths",
            "torch.arange(width) < lengths",
            "The mask hides padding on the right; the tokens are the last ones of each row.",
        ),
        (
            "torch.arange(width) >= width - lengths[:, None, None, None]",
            "(torch.arange(width) >= width - lengths[:, None, None, None]).mT",
            "The mask hides queries; padding must be hidden as keys, in the last dimension.",
        ),
        (
            "torch.arange(width) >= width - lengths[:, None, None, None]",
            "torch.where(torch.arange(width) >= width - lengths[:, None, None, None], 0.0, torch.finfo(torch.float32).min)",
            "The mask is additive; expected booleans, True where a query may attend to a key.",
        ),
        (
            "scores.masked_fill(~mask, torch.finfo(scores.dtype).min)",
            "(scores * mask)",
            "The scores of hidden keys are 0, whose exponential is 1; replace them by the lowest number.",
        ),
        (
            "scores.masked_fill(~mask, torch.finfo(scores.dtype).min)",
            "(scores + mask)",
            "The mask is added as 1 and 0, which hides nothing; replace the scores of hidden keys by the lowest number.",
        ),
        (
            "scores.masked_fill(~mask, torch.finfo(scores.dtype).min).softmax(dim=-1)",
            "scores.softmax(dim=-1) * mask",
            "The weights of hidden keys are set to zero after the softmax, so the others no longer sum to 1; mask the scores.",
        ),
        ("masked_fill(~mask", "masked_fill(mask", "The mask is inverted; True is where a query may attend to a key."),
        (
            "scores.masked_fill(~mask, torch.finfo(scores.dtype).min)",
            "scores",
            "The mask is not used; hide keys in the scores, before the softmax.",
        ),
        (
            "torch.finfo(scores.dtype).min).softmax(dim=-1)",
            "torch.finfo(scores.dtype).min).softmax(dim=-2)",
            "The softmax is over the queries; compute it over the keys, the last dimension (dim=-1).",
        ),
        (
            "torch.finfo(scores.dtype).min",
            "-torch.inf",
            "Hidden keys have minus infinity, so that a query without keys gets NaN; use the lowest number.",
        ),
        (
            "torch.finfo(scores.dtype).min).softmax(dim=-1)",
            "torch.finfo(scores.dtype).min).softmax(dim=-1) * mask.any(dim=-1, keepdim=True)",
            "A query without keys has weights of zero; expected equal weights, which sum to 1.",
        ),
        (
            "query.shape[-1] ** 0.5",
            "1",
            "The scores are not divided by √d; divide them by the square root of the width of a query.",
        ),
    ],
    "heads": [
        (
            "view(B, -1, self.num_heads, C // self.num_heads).transpose(1, 2)",
            "view(B, self.num_heads, -1, C // self.num_heads)",
            "The heads are split without a transpose, which mixes the tokens; view as (B, T, H, D), and then transpose(1, 2).",
        ),
        (
            "view(B, -1, self.num_heads, C // self.num_heads).transpose(1, 2)",
            "view(B, states.shape[1], -1, self.num_heads).permute(0, 3, 1, 2)",
            "The width is viewed as (D, H), so that the numbers of a head are not next to each other; view it as (H, D).",
        ),
        (
            "(weights @ value).transpose(1, 2)",
            "(weights @ value)",
            "The heads are joined without a transpose, which mixes the tokens; transpose(1, 2), and then reshape to (B, T, C).",
        ),
        (
            "query.shape[-1] ** 0.5",
            "C**0.5",
            "The scores are divided by √C; divide them by √D, where D is the width of one head.",
        ),
        (
            "query.shape[-1] ** 0.5",
            "1",
            "The scores are not divided by √d; divide them by the square root of the width of a query.",
        ),
        (
            "query.shape[-1] ** 0.5",
            "query.shape[-1]",
            "The scores are divided by d; divide them by √d, the square root of the width of a query.",
        ),
        (
            "self.output(context)",
            "context",
            "The output matrix is not applied; return self.output(...) of the joined heads.",
        ),
        (
            "memory = x if memory is None else memory",
            "memory = x",
            "Keys and values are made of x; expected those of memory.",
        ),
        (
            "scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)",
            "pass",
            "The mask is not used; hide keys in the scores, before the softmax.",
        ),
        (
            "masked_fill(~mask",
            "masked_fill(mask",
            "The mask is inverted; True is where a query may attend to a key.",
        ),
        (
            "scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)",
            "scores = scores + mask",
            "The mask is added as 1 and 0, which hides nothing; replace the scores of hidden keys by the lowest number.",
        ),
        (
            "scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)",
            "scores = scores * mask",
            "The scores of hidden keys are 0, whose exponential is 1; replace them by the lowest number.",
        ),
        (
            "scores.softmax(dim=-1)",
            "scores.softmax(dim=-2)",
            "The softmax is over the queries; compute it over the keys, the last dimension (dim=-1).",
        ),
        (
            "scores.softmax(dim=-1)",
            "scores.softmax(dim=1)",
            "The softmax is over the wrong dimension; compute it over the keys, the last dimension (dim=-1).",
        ),
        (
            "scores.softmax(dim=-1)",
            "scores / scores.sum(dim=-1, keepdim=True)",
            "The scores are divided by their sum; use the softmax, whose weights are never negative.",
        ),
    ],
    "blocks": [
        ("self.dropout(", "(", "There is no dropout in training; apply self.dropout to the result of each part."),
        (
            "x + self.dropout(self.feed_forward(x))",
            "self.dropout(x + self.feed_forward(x))",
            "Dropout is in the wrong place; apply self.dropout to the result of each part, before the residual sum.",
        ),
        (
            "self.dropout(self.feed_forward(self.feed_forward_norm(x)))",
            "self.feed_forward(self.feed_forward_norm(x))",
            "Dropout is in the wrong place; apply self.dropout to the result of each part, before the residual sum.",
        ),
        (
            "a * (1 + torch.erf(a / 2**0.5)) / 2",
            "nn.functional.gelu(a, approximate='tanh')",
            "This is the tanh approximation of GELU; BertModel computes it with erf.",
        ),
        (
            "a * (1 + torch.erf(a / 2**0.5)) / 2",
            "a * (1.702 * a).sigmoid()",
            "This is x · sigmoid(1.702 x), an approximation; BERT computes GELU with erf.",
        ),
        ("a / 2**0.5", "a", "The argument of erf is x; expected x / √2."),
        ("return a * (1", "return (1", "This is Φ(x); expected x · Φ(x)."),
        ("a * (1 + torch.erf(a / 2**0.5)) / 2", "a.relu()", "This is ReLU."),
        ("a, b = ", "b, a = ", "The halves are swapped; GELU is applied to the first one."),
        (" / 2 * b", " / 2", "The second half is not used; multiply by it."),
        ("correction=0", "correction=1", "The variance is divided by n - 1; divide by n (var(..., correction=0))."),
        (
            "(variance + self.eps).sqrt()",
            "(variance + self.eps)",
            "The numbers are divided by the variance; divide by its square root.",
        ),
        ("(variance + self.eps)", "variance", "eps is not used; add it to the variance."),
        (
            "(variance + self.eps).sqrt()",
            "(variance.sqrt() + self.eps)",
            "eps is added to the standard deviation; add it to the variance, before the square root.",
        ),
        (" * self.weight + self.bias", "", "weight and bias are not applied."),
        ("(x - mean)", "x", "The mean is not subtracted."),
        (
            "x.mean(dim=-1, keepdim=True), x.var(dim=-1,",
            "x.mean(dim=-2, keepdim=True), x.var(dim=-2,",
            "The mean and the variance are over the tokens; compute them over the dimension dim.",
        ),
        (
            "nn.functional.gelu(self.intermediate(piece))",
            "self.intermediate(piece)",
            "GELU is missing between the two linear layers.",
        ),
        (
            "nn.functional.gelu(self.intermediate(piece))",
            "self.intermediate(piece).relu()",
            "The activation is ReLU; expected GELU.",
        ),
        (
            "self.output(nn.functional.gelu(self.intermediate(piece)))",
            "nn.functional.gelu(self.output(nn.functional.gelu(self.intermediate(piece))))",
            "GELU is applied after the second linear layer as well.",
        ),
        (
            "self.output(nn.functional.gelu(self.intermediate(piece)))",
            "piece + self.output(nn.functional.gelu(self.intermediate(piece)))",
            "The input is added to the result; the residual sum is part of the block.",
        ),
        (
            'self.order == "parallel"',
            "False",
            "The order is post, where order is parallel; there, each norm comes before its part.",
        ),
        (
            'self.order == "parallel"',
            "True",
            "The order is parallel, where order is post; there, each norm comes after a residual sum.",
        ),
        (
            "return x + attended + self.dropout(",
            "x = x + attended\n            return x + self.dropout(",
            "The parts run one after the other; where order is parallel, both of them get x.",
        ),
        (
            "self.attention_norm(x + self.dropout(self.attention(x, mask)[0]))\n        return self.feed_forward_norm(x + self.dropout(self.feed_forward(x)))",
            "x + self.dropout(self.attention(self.attention_norm(x), mask)[0])\n        return x + self.dropout(self.feed_forward(self.feed_forward_norm(x)))",
            "The norms come before the parts (pre-norm), where order is post; see the formulas.",
        ),
        (
            "self.attention_norm(x + self.dropout(self.attention(x, mask)[0]))\n        return self.feed_forward_norm(x + self.dropout(self.feed_forward(x)))",
            "x + self.attention_norm(self.dropout(self.attention(x, mask)[0]))\n        return x + self.feed_forward_norm(self.dropout(self.feed_forward(x)))",
            "The norm is applied to the result of each part, before the residual sum; see the formulas.",
        ),
        ("x = self.attention_norm(x + ", "x = self.attention_norm(", "The residual sum of attention is missing."),
        (
            "return self.feed_forward_norm(x + ",
            "return self.feed_forward_norm(",
            "The residual sum of feed_forward is missing.",
        ),
        ("x + attended", "attended", "The residual sum is missing, where order is parallel; add x."),
        ("x = self.attention_norm(x + self", "x = (x + self", "attention_norm is missing."),
        ("return self.feed_forward_norm(x + self", "return (x + self", "feed_forward_norm is missing."),
        (
            "self.attention(self.attention_norm(x), mask)",
            "self.attention(x, mask)",
            "attention_norm is missing, where order is parallel.",
        ),
        (
            "self.feed_forward(self.feed_forward_norm(x))",
            "self.feed_forward(x)",
            "feed_forward_norm is missing, where order is parallel.",
        ),
        (
            "(x + self.dropout(self.attention(x, mask)[0]))\n        return self.feed_forward_norm",
            "(x + self.dropout(self.attention(x, mask)[0])) if False else self.feed_forward_norm(x + self.dropout(self.attention(x, mask)[0]))\n        return self.attention_norm",
            "The two norms are swapped.",
        ),
        ("self.attention(x, mask)", "self.attention(x)", "The mask is not passed to the attention."),
        (
            "self.attention(self.attention_norm(x), mask)",
            "self.attention(self.attention_norm(x))",
            "The mask is not passed to the attention.",
        ),
    ],
    "embeddings": [
        (
            "torch.cat([angle.sin(), angle.cos()], dim=1)",
            "torch.stack([angle.sin(), angle.cos()], dim=-1).flatten(1)",
            "Sines and cosines alternate; expected them side by side, all sines in the left half.",
        ),
        (
            "angle.sin(), angle.cos()",
            "angle.cos(), angle.sin()",
            "Sines and cosines are swapped; the left half has the sines.",
        ),
        ("torch.arange(0, width, 2)", "torch.arange(width // 2)", "The exponent is i / width; expected 2i / width."),
        ("torch.arange(length)", "torch.arange(1, length + 1)", "The first position is 1; expected 0."),
        (
            "(attention_mask.cumsum(dim=1) - 1).clamp(min=0)",
            "torch.arange(input_ids.shape[1])",
            "The positions count padding on the left; the first token of each row has position 0.",
        ),
        (
            "(attention_mask.cumsum(dim=1) - 1).clamp(min=0)",
            "attention_mask.cumsum(dim=1)",
            "The first position is 1; expected 0.",
        ),
        (
            "x = x + self.position_embeddings(positions)",
            "pass",
            "The positions are forgotten: add position_embeddings of 0, 1, 2, …",
        ),
        (
            "torch.zeros_like(input_ids)",
            "torch.ones_like(input_ids)",
            "The token type is 1 where token_type_ids is None; expected 0.",
        ),
        (
            "x = x + self.token_type_embeddings(token_type_ids)",
            "pass",
            "The token types are forgotten: add token_type_embeddings, also of type 0.",
        ),
        ("self.norm(x)", "x", "The layer norm is forgotten."),
        ("self.dropout(", "(", "There is no dropout in training; apply self.dropout to the result."),
    ],
    "bert": [
        ("attention_mask, token_type_ids)]", "attention_mask)]", "token_type_ids is not passed to the embeddings."),
        (
            "mask[:, None, None]",
            "None",
            "attention_mask is not passed to the blocks, so that tokens attend to padding.",
        ),
        (
            "attention_mask == 1",
            "attention_mask == 0",
            "The mask of the blocks is inverted; True is for a token, and False for padding.",
        ),
        (
            "block(states[-1]",
            "block(states[0]",
            "All blocks get the embeddings; each one gets the result of the one before.",
        ),
        (
            "torch.stack(states)",
            "torch.stack(states[1:])",
            "The embeddings are missing; they are the first of the hidden states.",
        ),
        ("states[-1][:, 0]", "states[-1][:, -1]", "The pooler gets the last token; expected the first one."),
        (".tanh()", "", "The tanh of the pooler is missing."),
        (
            "(states * words).sum(dim=1) / words.sum(dim=1)",
            "states.mean(dim=1)",
            "Padding is averaged in; leave out all special tokens.",
        ),
        (
            "words.sum(dim=1)",
            "words.shape[1]",
            "The sum is divided by the length of the batch; divide by the number of words.",
        ),
        (" / words.sum(dim=1)", "", "The sum is not divided by the number of words."),
        (
            "1 - special_tokens_mask",
            "special_tokens_mask",
            "The mean is over the special tokens; special_tokens_mask is 0 for words.",
        ),
        (
            "(states * words).sum(dim=1) / words.sum(dim=1)",
            "states[:, 0]",
            "This is the vector of [CLS]; expected the mean over all words.",
        ),
    ],
    "pretraining": [
        ("self.dense(states[labels != -100])", "states[labels != -100]", "The first linear layer is missing."),
        (
            "nn.functional.gelu(self.dense(states[labels != -100]))",
            "self.dense(states[labels != -100])",
            "GELU is missing.",
        ),
        (
            "self.norm(nn.functional.gelu(self.dense(states[labels != -100])))",
            "nn.functional.gelu(self.dense(states[labels != -100]))",
            "The layer norm is missing.",
        ),
        (
            "states[labels != -100]",
            "states",
            "The logits of all tokens are computed; expected (N, vocab_size), those of the labelled tokens.",
        ),
        (
            "labels[labels != -100]\n",
            "labels[labels != -100].roll(-1)\n",
            "The labels are shifted; each row of logits belongs to the label at the same position.",
        ),
        (
            ', reduction="sum") / max(1, len(labels))',
            ")",
            "Without labels, the loss is nan; expected 0.",
        ),
        (
            " / max(1, len(labels))",
            "",
            "The loss is summed; expected the mean over the labels that are not -100.",
        ),
    ],
    "finetuning": [
        (
            "(right[0] / total[0] + right[1] / total[1]) / 2",
            "sum(right) / sum(total)",
            "This is the plain accuracy; expected the mean over the two classes.",
        ),
        (
            '            for label, prediction in zip(batch["labels"], predictions, strict=True):\n                right[label] += int(label == prediction)\n                total[label] += 1\n    model.train(was_training)\n    return (right[0] / total[0] + right[1] / total[1]) / 2',
            '            right[0] += (predictions == batch["labels"]).float().mean().item()\n            total[0] += 1\n    model.train(was_training)\n    return right[0] / total[0]',
            "The accuracies of the batches are averaged; count the right texts of all batches.",
        ),
        (
            'label, prediction in zip(batch["labels"], predictions, strict=True):\n                right[label] += int(label == prediction)',
            'label in set(batch["labels"].tolist()):\n                right[label] += (predictions == label)[batch["labels"] == label].float().mean()',
            "The accuracies of the batches are averaged for each class; count the texts of each class in all batches.",
        ),
        (
            "(right[0] / total[0] + right[1] / total[1]) / 2",
            "sum(right)",
            "The number of right texts is not divided by the number of texts.",
        ),
        ("label == prediction", "label != prediction", "This is the share of wrong texts."),
    ],
    "seq2seq": [
        (
            "shifted.masked_fill(shifted == -100, pad_id), ",
            "shifted, ",
            "-100 is left in the inputs of the decoder, which is no id; replace it by pad_id.",
        ),
        (
            "torch.cat([start, labels[:, :-1]], dim=1)",
            "labels",
            "The labels are not shifted, so that each position sees its own label.",
        ),
        (
            "torch.cat([start, labels[:, :-1]], dim=1)",
            "torch.cat([labels[:, 1:], 0 * start], dim=1)",
            "The labels are shifted to the left; put the start token before them.",
        ),
        (
            "torch.cat([start, labels[:, :-1]], dim=1)",
            "torch.cat([start, labels], dim=1)",
            "The last label is not removed; the inputs are as long as the labels.",
        ),
        (
            "torch.full_like(labels[:, :1], start_id)",
            "torch.full_like(labels[:, :1], pad_id)",
            "The inputs begin with pad_id; expected start_id.",
        ),
        (
            "(shifted != -100)",
            "(labels != -100)",
            "The attention mask is that of the labels; expected that of the inputs.",
        ),
        (
            "logits.transpose(1, 2), labels,",
            "logits[:, :-1].transpose(1, 2), labels[:, 1:],",
            "The labels are shifted a second time; the logits at position t are for label t.",
        ),
        (
            "labels, reduction",
            "labels.clamp(min=0), reduction",
            "Labels of -100 count as the token 0; leave them out (ignore_index=-100).",
        ),
        (
            "losses.sum(dim=1) / (labels != -100).sum(dim=1)",
            "losses.sum() / (labels != -100).sum()",
            "This is the mean over all labels; expected one number for each sequence.",
        ),
        (
            "losses.sum(dim=1) / (labels != -100).sum(dim=1)",
            "losses.mean(dim=1)",
            "The losses are divided by T; divide those of a sequence by the number of its labels.",
        ),
        (
            "losses.sum(dim=1) / (labels != -100).sum(dim=1)",
            "losses.sum(dim=1)",
            "The loss is summed; expected the mean over the labels that are not -100.",
        ),
        ("return ids", "return ids[:, 1:]", "The start token is missing in the result; `generate` returns it."),
        (
            "return ids",
            "return ids[:, :-1]",
            "The last token is missing; the end token, or the last of max_new_tokens, is part of the result.",
        ),
        (
            "token[ended] = model.config.pad_token_id",
            "pass",
            "A row goes on after the end token; append pad_token_id to a row that has its end token.",
        ),
        (
            "logits[:, -1]",
            "logits[:, 0]",
            "The logits of the first position are used; those of the last one are for the next token.",
        ),
        (
            "decoder_input_ids=ids)",
            "decoder_input_ids=ids[:, -1:])",
            "The decoder gets the last token only; without a cache, it needs all tokens so far.",
        ),
        (
            "attention_mask=attention_mask, ",
            "",
            "attention_mask is not passed to the model, so that it attends to padding.",
        ),
    ],
    "speed": [
        (
            "x[tokens][None]",
            "x.reshape(1, -1, x.shape[-1])",
            "The padding is kept; select the tokens with attention_mask 1.",
        ),
        (
            "torch.cat([torch.zeros(1, dtype=torch.long), lengths.cumsum(dim=0)])",
            "lengths",
            "cu_seqlens has the lengths; expected where each sequence begins, and N: the cumulative sums, from 0 on.",
        ),
        (
            "torch.cat([torch.zeros(1, dtype=torch.long), lengths.cumsum(dim=0)])",
            "lengths.cumsum(dim=0)",
            "cu_seqlens does not begin with 0.",
        ),
        (
            "lengths.cumsum(dim=0)])",
            "lengths.cumsum(dim=0)[:-1]])",
            "cu_seqlens does not end with the number of tokens.",
        ),
        (
            "torch.arange(x.shape[1]).expand(tokens.shape)[tokens]",
            "torch.arange(int(tokens.sum()))",
            "The positions go on from one sequence to the next; they restart at 0.",
        ),
        (
            "padded[row, :length]",
            "padded[row, padded.shape[1] - length :]",
            "The padding is on the wrong side; the tokens of a sequence come first.",
        ),
        (
            "return s * (q @ v.T) * t + s * q.sum(dim=-1, keepdim=True) * m + linear.bias",
            "return linear(x)",
            "Nothing is rounded: this is the result of the layer itself.",
        ),
        (
            "x.abs().amax(dim=-1, keepdim=True)",
            "x.abs().max()",
            "There is one s for all of x; compute it for each token, over the last dimension.",
        ),
        (
            "m = linear.weight.amin(dim=1)",
            "m = linear.weight.min().expand(len(linear.weight))",
            "There is one m for the whole weight; compute it for each output.",
        ),
        (
            "(linear.weight.amax(dim=1) - m) / 255",
            "(linear.weight.max() - linear.weight.min()).expand(len(m)) / 255",
            "There is one scale for the whole weight; compute t for each output.",
        ),
        (
            "(q @ v.T)",
            "(q.to(torch.int8) @ v.to(torch.int8).T)",
            "The product overflows: multiply int32 or float64 numbers, not int8.",
        ),
        (
            "t[:, None]).round().int()",
            "t[:, None]).round().to(torch.int8).int()",
            "v overflows: it has values up to 255, and int8 ends at 127; convert v to int32 instead.",
        ),
        (".round().int()", ".int()", "The numbers are truncated; round them."),
        (
            " + s * q.sum(dim=-1, keepdim=True) * m",
            "",
            "m is forgotten: w ≈ t · v + m, so s times the sum of q times m is part of the product.",
        ),
        (" + linear.bias", "", "The bias is forgotten."),
    ],
}
