"""The configuration of every ScratchBert model: BERT's fields under BERT's names, and a few of our own."""

import copy
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from huggingface_hub.dataclasses import strict
from huggingface_hub.errors import HTTPError, LocalEntryNotFoundError
from transformers import PreTrainedConfig
from transformers.activations import ACT2FN
from transformers.dynamic_module_utils import get_relative_import_files

# Which class of this package each Auto class opens: written into every saved config.json (`auto_map`), and read by
# `__init__` for the registration.
AUTO_MAP = {
    "AutoConfig": "configuration_scratchbert.ScratchBertConfig",
    "AutoModel": "modeling_scratchbert.ScratchBertModel",
    "AutoModelForTextEncoding": "modeling_scratchbert.ScratchBertModel",
    "AutoModelForPreTraining": "modeling_scratchbert.ScratchBertForPreTraining",
    "AutoModelForMaskedLM": "modeling_scratchbert.ScratchBertForMaskedLM",
    "AutoModelForCausalLM": "modeling_scratchbert.ScratchBertForCausalLM",
    "AutoModelForSeq2SeqLM": "modeling_scratchbert.ScratchBertForConditionalGeneration",
    "AutoModelForNextSentencePrediction": "modeling_scratchbert.ScratchBertForNextSentencePrediction",
    "AutoModelForSequenceClassification": "modeling_scratchbert.ScratchBertForSequenceClassification",
    "AutoModelForTokenClassification": "modeling_scratchbert.ScratchBertForTokenClassification",
    "AutoModelForQuestionAnswering": "modeling_scratchbert.ScratchBertForQuestionAnswering",
    "AutoModelForMultipleChoice": "modeling_scratchbert.ScratchBertForMultipleChoice",
}

# The fields of the `bert_config.json` that Google's own release wrote, which names no model type.
GOOGLE_BERT_FIELDS = {
    "attention_probs_dropout_prob", "directionality", "hidden_act", "hidden_dropout_prob", "hidden_size",
    "initializer_range", "intermediate_size", "max_position_embeddings", "num_attention_heads", "num_hidden_layers",
    "pooler_fc_size", "pooler_num_attention_heads", "pooler_num_fc_layers", "pooler_size_per_head", "pooler_type",
    "type_vocab_size", "vocab_size",
}  # fmt: skip

POSITION_EMBEDDING_TYPES = ("absolute", "sinusoidal")

# What an `EncoderDecoderModel` says for both halves at once, whatever its halves say.
OF_THE_WHOLE = ("return_dict", "output_hidden_states", "output_attentions")

# What the two BERTs of an `EncoderDecoderModel` must agree in.
SAME_IN_BOTH_HALVES = (
    "vocab_size", "hidden_size", "num_attention_heads", "intermediate_size", "hidden_act", "hidden_dropout_prob",
    "attention_probs_dropout_prob", "max_position_embeddings", "type_vocab_size", "layer_norm_eps",
)  # fmt: skip

# [CLS] and [SEP] in every vocabulary that Google released a BERT with.
CLS_TOKEN_ID, SEP_TOKEN_ID = 101, 102


@strict
class ScratchBertConfig(PreTrainedConfig):
    """Everything that defines a ScratchBert model. Fields, names and defaults are those of `BertConfig`
    (Devlin et al. 2018, section 3), plus:

    Args:
        norm_first (`bool`, defaults to `False`): where the layer norms stand in a block. `False` is BERT's post-norm,
            after each residual sum; `True` is pre-norm, before each sub-layer, with one more norm after the last
            block (Xiong et al. 2020, "On Layer Normalization in the Transformer Architecture", figure 1).
        position_embedding_type (`str`, defaults to `"absolute"`): `"absolute"` is BERT's learned table,
            `"sinusoidal"` the fixed one of Vaswani et al. 2017, section 3.5.
        padding_free (`bool`, defaults to `True`): an encoder's blocks see the real tokens of a batch alone, end to end,
            `(1, N, C)`. `False`: they see padded tokens, `(B, T, C)`, and their mask, as in BERT; for forward hooks.
        sparse_prediction (`bool`, defaults to `False`): with labels, `ScratchBertForMaskedLM` and
            `ScratchBertForPreTraining` score the vocabulary for the labelled tokens alone, and their logits are
            `(labelled tokens, V)`, as ModernBERT's. The loss is the same.
        is_encoder_decoder (`bool`, defaults to `False`): an encoder and a decoder, for `ScratchBertSeq2SeqModel` and
            `ScratchBertForConditionalGeneration`. The fields below count only then.
        num_decoder_layers (`int`, *optional*): the decoder's blocks; as many as `num_hidden_layers`, the encoder's,
            if left out.
        tie_encoder_decoder (`bool`, defaults to `False`): the decoder's self-attention and feed-forward are the
            encoder's own tensors (BERTSHARE in Rothe et al. 2020, "Leveraging Pre-trained Checkpoints for Sequence
            Generation Tasks", section 3).
        share_embeddings (`bool`, defaults to `True`): encoder and decoder look words, positions and token types up in
            the same tables.
        decoder_start_token_id (`int`, *optional*): what every output starts with; `bos_token_id` if left out, or else
            the id of [CLS] in Google's vocabularies, 101. `eos_token_id`, what it ends with, is that of [SEP], 102, if
            left out. A vocabulary too small to have these ids gets neither.

    Raises:
        ValueError: a field has a value that no model can be built from; the message names the field, what it got and
            what it wants.
        StrictDataclassFieldValidationError: a field has a value of the wrong type.
    """

    model_type = "scratchbert"

    vocab_size: int = 30522
    hidden_size: int = 768
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    intermediate_size: int = 3072
    hidden_act: str = "gelu"
    hidden_dropout_prob: float | int = 0.1
    attention_probs_dropout_prob: float | int = 0.1
    max_position_embeddings: int = 512
    type_vocab_size: int = 2
    initializer_range: float = 0.02
    layer_norm_eps: float = 1e-12
    pad_token_id: int | None = 0
    use_cache: bool = True
    classifier_dropout: float | int | None = None
    is_decoder: bool = False
    add_cross_attention: bool = False
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    tie_word_embeddings: bool = True

    norm_first: bool = False
    position_embedding_type: str = "absolute"
    padding_free: bool = True
    sparse_prediction: bool = False
    is_encoder_decoder: bool = False
    num_decoder_layers: int | None = None
    tie_encoder_decoder: bool = False
    share_embeddings: bool = True
    decoder_start_token_id: int | None = None

    if TYPE_CHECKING:  # a property of `PreTrainedConfig`, and yet an argument
        num_labels: int = 2

    def __post_init__(self, **kwargs):
        kwargs.pop("model_type", None)  # the class's own; another's comes with `ScratchBertConfig(**bert.to_dict())`
        super().__post_init__(**kwargs)
        self._fill_in_special_tokens()
        self.check()

    def _fill_in_special_tokens(self) -> None:
        if not self.is_encoder_decoder:
            return
        start, end = (CLS_TOKEN_ID, SEP_TOKEN_ID) if self.vocab_size > SEP_TOKEN_ID else (None, None)
        if self.decoder_start_token_id is None:
            self.decoder_start_token_id = start if self.bos_token_id is None else self.bos_token_id
        if self.eos_token_id is None:
            self.eos_token_id = end

    def check(self) -> None:
        """Raises ValueError if no model can be made of the fields as they stand. A model checks them as well when it
        is made, since they may have been set one by one."""
        self._check_sizes()
        if self.hidden_act not in ACT2FN:
            close = get_close_matches(self.hidden_act.lower(), ACT2FN, n=1) or ["gelu"]
            raise ValueError(
                f"hidden_act is {self.hidden_act!r}, which is not an activation of transformers. Did you mean "
                f"{close[0]!r}? Known: {', '.join(sorted(ACT2FN))}."
            )
        for name in ("hidden_dropout_prob", "attention_probs_dropout_prob", "classifier_dropout"):
            probability = getattr(self, name)
            if probability is not None and not 0 <= probability <= 1:
                raise ValueError(f"{name} is {probability}; it must be a probability, from 0 to 1.")
        if not self.layer_norm_eps > 0:
            raise ValueError(f"layer_norm_eps is {self.layer_norm_eps}; it must be above 0.")
        if not self.initializer_range >= 0:
            raise ValueError(f"initializer_range is {self.initializer_range}; it must not be negative.")
        if self.position_embedding_type not in POSITION_EMBEDDING_TYPES:
            raise ValueError(
                f"position_embedding_type is {self.position_embedding_type!r}; ScratchBert knows "
                f"{' and '.join(map(repr, POSITION_EMBEDDING_TYPES))}, not relative positions."
            )
        if self.add_cross_attention and not self.is_decoder:
            raise ValueError(
                "add_cross_attention is True; it needs is_decoder=True: an encoder has no cross-attention."
            )
        if self.is_encoder_decoder:
            self._check_halves()

    def _check_halves(self) -> None:
        if self.is_decoder:
            raise ValueError(
                "is_decoder and is_encoder_decoder are both True; a model is a decoder (is_decoder) or has both halves."
            )
        if self.num_decoder_layers is not None and self.num_decoder_layers < 1:
            raise ValueError(f"num_decoder_layers is {self.num_decoder_layers}; it must be at least 1.")
        if self.tie_encoder_decoder and self.num_decoder_layers not in (None, self.num_hidden_layers):
            raise ValueError(
                f"tie_encoder_decoder is True, num_hidden_layers is {self.num_hidden_layers} and num_decoder_layers is "
                f"{self.num_decoder_layers}: blocks that are the same tensors must be as many on either side."
            )
        start = self.decoder_start_token_id
        if start is not None and not 0 <= start < self.vocab_size:
            raise ValueError(
                f"decoder_start_token_id is {start}; it must be an id of the vocabulary, 0 to {self.vocab_size - 1}."
            )

    @property  # transformers declares an attribute of the class, and reads it of the configuration
    def base_model_tp_plan(self) -> dict[str, str] | None:  # type: ignore[override]
        """Which way the matrices are cut where several processes share a model (Shoeybi et al. 2019, "Megatron-LM",
        section 3): each has some of the heads, of the feed-forward's width and of the words. The number of processes
        must divide that of the heads. Of a seq2seq model each half has a plan, and the whole none."""
        if self.is_encoder_decoder:
            return None
        cuts = {"query": "colwise", "key": "colwise", "value": "colwise", "output": "rowwise"}
        plan = {f"encoder.blocks.*.attention.{name}": cut for name, cut in cuts.items()}
        if self.add_cross_attention:
            plan |= {f"encoder.blocks.*.cross_attention.{name}": cut for name, cut in cuts.items()}
        plan |= {"encoder.blocks.*.feed_forward.intermediate": "colwise"}
        plan |= {"encoder.blocks.*.feed_forward.output": "rowwise"}
        return plan | {"embeddings.word_embeddings": "embedding_rowwise"}

    def encoder_config(self) -> Self:
        """Of a seq2seq model, the configuration of its encoder alone."""
        return self._half()

    def decoder_config(self) -> Self:
        """Of a seq2seq model, the configuration of its decoder alone."""
        depth = self.num_hidden_layers if self.num_decoder_layers is None else self.num_decoder_layers
        return self._half(num_hidden_layers=depth, is_decoder=True, add_cross_attention=True)

    def _half(self, **fields) -> Self:
        half = copy.deepcopy(self)
        fields |= {"is_encoder_decoder": False, "num_decoder_layers": None, "tie_encoder_decoder": False}
        for name, value in fields.items():
            setattr(half, name, value)
        half.architectures = None
        return half

    def get_text_config(self, decoder: bool | None = None, encoder: bool | None = None) -> Self:
        """The configuration of one half, by which `generate` makes its caches, or the whole if none or both are asked
        for."""
        if not self.is_encoder_decoder or decoder == encoder:
            return self
        return self.decoder_config() if decoder else self.encoder_config()

    def _check_sizes(self) -> None:
        for name in ("vocab_size", "hidden_size", "num_attention_heads", "intermediate_size",
                     "max_position_embeddings", "type_vocab_size"):  # fmt: skip
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1.")
        if self.num_hidden_layers < 0:
            raise ValueError(f"num_hidden_layers is {self.num_hidden_layers}; it must not be negative.")
        if self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"hidden_size is {self.hidden_size} and num_attention_heads is {self.num_attention_heads}: the number "
                "of heads must divide the width."
            )
        if self.position_embedding_type == "sinusoidal" and self.hidden_size % 2:
            raise ValueError(
                f"hidden_size is {self.hidden_size}; sinusoidal positions pair a sine with a cosine, so the width must "
                "be even."
            )
        # Below zero it counts from the vocabulary's end, as in `nn.Embedding`; transformers warns of it.
        if self.pad_token_id is not None and not -self.vocab_size <= self.pad_token_id < self.vocab_size:
            raise ValueError(
                f"pad_token_id is {self.pad_token_id}; it must be None or an id of the vocabulary, "
                f"0 to {self.vocab_size - 1}."
            )

    # Any attention implementation may be asked for its maps: that call then runs the eager formula. So the base
    # class's refusals of `output_attentions=True` beside "sdpa" do not apply.
    @property
    def output_attentions(self) -> bool | None:
        """Whether every forward pass returns its attention maps."""
        return self._output_attentions

    @output_attentions.setter
    def output_attentions(self, value: bool | None):
        self._output_attentions = value

    def validate_output_attentions(self):
        """Accepts any pairing with an attention implementation; see `output_attentions`."""

    @classmethod
    def get_config_dict(cls, pretrained_model_name_or_path: str | os.PathLike, **kwargs) -> tuple[dict, dict]:
        """Reads a `config.json`, of a ScratchBert or of a BERT checkpoint, as the fields of a `ScratchBertConfig`.

        Raises:
            ValueError: the checkpoint is neither.
            OSError: there is no config.json, or it cannot be read.
        """
        fields, kwargs = raw_config(pretrained_model_name_or_path, **kwargs)
        return scratchbert_fields(fields, pretrained_model_name_or_path, cls.model_type), kwargs

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs) -> Self:
        """As `PreTrainedConfig.from_dict`, which sets `kwargs` one by one on a configuration that is made already."""
        made = super().from_dict(config_dict, **kwargs)
        config = made[0] if isinstance(made, tuple) else made
        config._fill_in_special_tokens()
        config.check()
        return made

    @classmethod
    def from_bert(cls, config: PreTrainedConfig) -> Self:
        """The ScratchBert configuration that computes what a `BertConfig` does.

        Raises:
            ValueError: `config` is of another kind of model, or wants relative positions.
        """
        fields = scratchbert_fields(config.to_dict(), f"config={type(config).__name__}(…)")
        fields |= {"attn_implementation": config._attn_implementation, "name_or_path": config.name_or_path}
        return cls(**fields)

    def save_pretrained(self, save_directory: str | os.PathLike, push_to_hub: bool = False, **kwargs) -> None:
        """Writes `config.json`, and all the code, to which its `auto_map` leads the Auto classes."""
        if getattr(self, "auto_map", None) is None:
            self.auto_map = dict(AUTO_MAP)
        if type(self).__module__ != __name__:  # a derived class, which only its own `register_for_auto_class` can name
            self.auto_map.pop("AutoConfig", None)
        copy_code(save_directory)
        super().save_pretrained(save_directory, push_to_hub=push_to_hub, **kwargs)


def copy_code(folder) -> None:
    """Copies this package's files, but for `__init__`, which the remote-code loader does not read, into `folder`."""
    models = Path(__file__).with_name("modeling_scratchbert.py")
    code = [Path(__file__)]
    if models.exists():  # beside a copy of this file that AutoConfig fetched there may be no others
        code += [models, *map(Path, get_relative_import_files(models))]
    Path(folder).mkdir(parents=True, exist_ok=True)
    for path in code:
        shutil.copyfile(path, Path(folder) / path.name)


@contextmanager
def hub_in_one_line(source, revision: str | None = None) -> Iterator[None]:
    """Turns what transformers says where the Hub cannot be reached into one line, with what to do about it."""
    try:
        yield
    except (OSError, HTTPError) as error:  # an HTTPError that is no OSError is a proxy's
        if isinstance(error, OSError) and not isinstance(error.__cause__, LocalEntryNotFoundError):
            raise
        named = getattr(revision, "initial", revision)  # what the caller said, where that has been resolved
        command = f"hf download {source}" + (f" --revision {named}" if named else "")
        raise OSError(
            f"{source} is no folder, it is not in the cache, or not all of it, and the Hub cannot be reached or may "
            f"not be asked. Give the path of a folder, or fetch it while there is a network ({command}): it then "
            "opens from the cache, at once with HF_HUB_OFFLINE=1."
        ) from error


def raw_config(source, **kwargs) -> tuple[dict, dict]:
    """The fields of the `config.json` of `source` as they stand, and the arguments that were of no use in finding it.

    Raises:
        OSError: there is none, or it cannot be read; the message names `source`.
    """
    try:
        with hub_in_one_line(source, kwargs.get("revision")):
            fields, kwargs = PreTrainedConfig.get_config_dict(source, **kwargs)
    except (AttributeError, TypeError) as error:  # a list, a number, …
        raise OSError(f"{source}/config.json does not hold a JSON object.") from error
    if not isinstance(fields, dict):
        raise OSError(f"{source}/config.json does not hold a JSON object.")
    if not fields:
        raise OSError(f"{source} has no config.json, so nothing says what model its weights are of.")
    return fields, kwargs


def scratchbert_fields(fields: dict, source, own_type: str = ScratchBertConfig.model_type) -> dict:
    """The fields of a `ScratchBertConfig` from the raw fields of `source`, a ScratchBert or a BERT checkpoint, or one
    whose configuration class derives from ours and has the model type `own_type`.

    The raw fields alone decide what a checkpoint is: a RoBERTa's tensors bear BERT's names and would load without a
    murmur, and give other numbers.

    Raises:
        ValueError: `source` is of another kind, or is a BERT with relative positions.
    """
    if fields.get("model_type") in (ScratchBertConfig.model_type, own_type):
        return fields
    if fields.get("model_type") == "encoder-decoder":
        return _fields_of_two_berts(fields, source)
    _refuse_unless_bert(fields, source)
    positions = fields.get("position_embedding_type") or "absolute"
    if positions != "absolute":
        raise ValueError(
            f"{source} is a BERT with position_embedding_type={positions!r}. ScratchBert loads BERT checkpoints with "
            "absolute positions only: relative positions add a term to the attention scores that it does not have."
        )
    dropped = ("model_type", "architectures", "auto_map", "position_embedding_type")
    return {name: value for name, value in fields.items() if name not in dropped}


def _fields_of_two_berts(fields: dict, source) -> dict:
    """The fields for the checkpoint of an `EncoderDecoderModel`, whose halves must be alike in all but their depth."""
    halves = {}
    for half in ("encoder", "decoder"):
        own = fields.get(half) or {}
        try:
            _refuse_unless_bert(own, half)
            halves[half] = ScratchBertConfig(**scratchbert_fields(own, half))
        except ValueError as error:
            raise ValueError(
                f"{source} is an EncoderDecoderModel; ScratchBert loads those of two BERTs of the same width. {error}"
            ) from error
    encoder, decoder = halves["encoder"], halves["decoder"]
    for name in SAME_IN_BOTH_HALVES:
        if getattr(encoder, name) != getattr(decoder, name):
            raise ValueError(
                f"{source} is an EncoderDecoderModel whose halves differ: {name} is {getattr(encoder, name)} in the "
                f"encoder and {getattr(decoder, name)} in the decoder. One ScratchBertConfig describes both halves, "
                "and lets them differ in depth alone."
            )
    if not decoder.add_cross_attention:
        raise ValueError(f"{source} is an EncoderDecoderModel whose decoder has no cross-attention.")
    tied = bool(fields.get("tie_encoder_decoder"))  # of transformers 4; 5 gives each half its own tensors
    special = {
        name: next((half[name] for half in (fields, fields["decoder"]) if half.get(name) is not None), None)
        for name in ("decoder_start_token_id", "bos_token_id", "eos_token_id", "pad_token_id")
    }
    dropped = {"is_decoder", "add_cross_attention", "architectures", "model_type", "transformers_version"}
    own = {name: value for name, value in encoder.to_diff_dict().items() if name not in dropped.union(OF_THE_WHOLE)}
    return {
        **own,
        **{name: fields[name] for name in OF_THE_WHOLE if name in fields},
        **{name: value for name, value in special.items() if value is not None},
        "is_encoder_decoder": True,
        "num_decoder_layers": decoder.num_hidden_layers,
        "tie_encoder_decoder": tied,
        "share_embeddings": tied,
        "tie_word_embeddings": decoder.tie_word_embeddings,
        "use_cache": decoder.use_cache,
    }


def _refuse_unless_bert(fields: dict, source) -> None:
    model_type, architectures = fields.get("model_type"), fields.get("architectures") or []
    supported = "ScratchBert loads BERT checkpoints (model_type 'bert') and its own (model_type 'scratchbert')"
    if model_type is not None:
        if model_type != "bert":
            raise ValueError(f"{source} has model_type {model_type!r}. {supported}.")
    elif architectures:
        foreign = [name for name in architectures if not re.fullmatch(r"Bert(Model|LMHeadModel|For\w+)", name)]
        if foreign:
            raise ValueError(f"{source} names no model_type, and its architectures are {foreign}. {supported}.")
    elif not {"hidden_size", "num_attention_heads"} <= set(fields) <= GOOGLE_BERT_FIELDS:
        raise ValueError(
            f"The configuration of {source} names neither model_type nor architectures, and is not in the form of "
            f"Google's original release either, so nothing tells BERT from its look-alikes. {supported}. If it is a "
            'BERT, add "model_type": "bert" to its config.json, or to that of a copy in a folder.'
        )
