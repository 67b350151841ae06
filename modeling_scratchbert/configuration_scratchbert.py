"""The configuration of every ScratchBert model: BERT's fields under BERT's names, and a few of our own."""

from .versions import CACHE  # noqa: F401  # first: it refuses older transformers

# isort: split
import contextlib
import copy
import os
import sys
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, Self

from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig
from transformers.activations import ACT2FN
from transformers.utils import logging

from .checkpoints import copy_code, raw_config
from .installed import installed

if TYPE_CHECKING:  # the remote-code loader copies the files named here, too; before 5.9, no others
    from .attention import MultiHeadAttention  # noqa: F401
    from .embeddings import Embeddings  # noqa: F401
    from .feed_forward import FeedForward  # noqa: F401
    from .generation import ScratchBertGenerationMixin  # noqa: F401
    from .inference import InferenceMixin  # noqa: F401
    from .input_checks import check_options  # noqa: F401
    from .modeling_scratchbert import ScratchBertModel  # noqa: F401
    from .pretrained import ScratchBertPreTrainedModel  # noqa: F401
    from .transformer import TransformerStack  # noqa: F401
    from .unpadding import choose_batch  # noqa: F401

logger = logging.get_logger(__name__)

TASKS = (
    "PreTraining",
    "MaskedLM",
    "CausalLM",
    "NextSentencePrediction",
    "SequenceClassification",
    "TokenClassification",
    "QuestionAnswering",
    "MultipleChoice",
)
MODELS = {
    "": "Model",
    "ForTextEncoding": "Model",
    "ForSeq2SeqLM": "ForConditionalGeneration",
    **{f"For{task}": f"For{task}" for task in TASKS},
}
# The class that each Auto class opens: the `auto_map` of every saved config.json, and what `__init__` registers.
AUTO_MAP = {
    "AutoConfig": "configuration_scratchbert.ScratchBertConfig",
    **{f"AutoModel{task}": f"modeling_scratchbert.ScratchBert{name}" for task, name in MODELS.items()},
}


@strict
class ScratchBertConfig(PreTrainedConfig):
    """Everything that defines a ScratchBert model. Fields, names and defaults are those of `BertConfig` (Devlin et al.
    2018, section 3), plus:

    Args:
        norm_first (`bool`, defaults to `False`): pre-norm blocks and a layer norm after the last one (Xiong et al.
            2020, "On Layer Normalization in the Transformer Architecture", figure 1), in place of BERT's post-norm.
        position_embedding_type (`str`, defaults to `"absolute"`): `"absolute"` for BERT's learned table,
            `"sinusoidal"` for the fixed one of Vaswani et al. 2017, section 3.5.
        padding_free (`bool`, defaults to `False`): remove padding before the blocks of an encoder, which receive the
            non-padding tokens of the batch, `(1, N, C)`. `False`: they receive `(B, T, C)` and a mask, as in BERT. The
            program decides: the field is neither saved in `config.json` nor read from there.
        sparse_prediction (`bool`, defaults to `False`): with labels, `ScratchBertForMaskedLM` and
            `ScratchBertForPreTraining` compute the logits of labelled tokens only, `(labelled tokens, V)`, as
            ModernBERT does. The loss is the same.
        is_encoder_decoder (`bool`, defaults to `False`): an encoder and a decoder, for `ScratchBertSeq2SeqModel` and
            `ScratchBertForConditionalGeneration`. Only they use the fields below.
        num_decoder_layers (`int`, *optional*): the number of blocks of the decoder; by default `num_hidden_layers`.
        tie_encoder_decoder (`bool`, defaults to `False`): share the weights of self-attention and feed-forward between
            encoder and decoder (BERTSHARE in Rothe et al. 2020, "Leveraging Pre-trained Checkpoints for Sequence
            Generation Tasks", section 3).
        share_embeddings (`bool`, defaults to `True`): share all embeddings between encoder and decoder.
        decoder_start_token_id (`int`, *optional*): the first token of every output; by default `bos_token_id`, or else
            101, [CLS] in Google's vocabularies. `eos_token_id` is 102, [SEP], by default.

    Raises:
        ValueError: a field has a value from which no model can be built.
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
    padding_free: bool = False
    sparse_prediction: bool = False
    is_encoder_decoder: bool = False
    num_decoder_layers: int | None = None
    tie_encoder_decoder: bool = False
    share_embeddings: bool = True
    decoder_start_token_id: int | None = None

    if TYPE_CHECKING:  # an argument that is a property of `PreTrainedConfig`
        num_labels: int = 2

    def __post_init__(self, **kwargs):
        kwargs.pop("model_type", None)  # BERT's, in `ScratchBertConfig(**bert_config.to_dict())`
        super().__post_init__(**kwargs)
        self._complete()

    def _complete(self) -> None:
        """Set the special tokens of a seq2seq model that were not given, and check the fields."""
        # [CLS] and [SEP] in Google's vocabularies; a smaller vocabulary gets no default.
        start, end = (101, 102) if self.vocab_size > 102 else (None, None)
        if self.is_encoder_decoder and self.decoder_start_token_id is None:
            self.decoder_start_token_id = start if self.bos_token_id is None else self.bos_token_id
        if self.is_encoder_decoder and self.eos_token_id is None:
            self.eos_token_id = end
        self.check()

    def check(self) -> None:
        """Raise ValueError if no model can be built from the fields. Models call it, since fields can be set later."""
        minima = {
            "vocab_size": 1,
            "hidden_size": 1,
            "num_attention_heads": 1,
            "intermediate_size": 1,
            "max_position_embeddings": 1,
            "type_vocab_size": 1,
            "num_hidden_layers": 0,
            "initializer_range": 0,
        }
        for name, minimum in minima.items():
            self._expect(name, getattr(self, name) >= minimum, f"at least {minimum}")
        heads, size, positions = self.num_attention_heads, self.hidden_size, self.position_embedding_type
        self._expect("hidden_size", size % heads == 0, f"a multiple of num_attention_heads ({heads})")
        self._expect("position_embedding_type", positions in ("absolute", "sinusoidal"), "'absolute' or 'sinusoidal'")
        self._expect("hidden_size", positions == "absolute" or size % 2 == 0, "an even number for sinusoidal positions")
        vocab_size, depth, decoder_depth = self.vocab_size, self.num_hidden_layers, self.num_decoder_layers
        known_id = f"an id of the vocabulary, 0 to {vocab_size - 1}"
        # An id below 0 counts from the end of the vocabulary, as in `nn.Embedding`; transformers warns of it.
        self._expect("pad_token_id", -vocab_size <= (self.pad_token_id or 0) < vocab_size, f"None or {known_id}")
        close = get_close_matches(self.hidden_act.lower(), ACT2FN, n=1) or ["gelu"]
        known = f"an activation, perhaps {close[0]!r}. Known are {', '.join(sorted(ACT2FN))}"
        self._expect("hidden_act", self.hidden_act in ACT2FN, known)
        for name in ("hidden_dropout_prob", "attention_probs_dropout_prob", "classifier_dropout"):
            self._expect(name, 0 <= (getattr(self, name) or 0) <= 1, "a probability, from 0 to 1")
        self._expect("layer_norm_eps", self.layer_norm_eps > 0, "a number above 0")
        self._expect("add_cross_attention", self.is_decoder or not self.add_cross_attention, "False without is_decoder")
        if not self.is_encoder_decoder:
            return
        self._expect("is_decoder", not self.is_decoder, "False, because is_encoder_decoder is True")
        self._expect("num_decoder_layers", decoder_depth is None or decoder_depth >= 1, "None or at least 1")
        fits = not self.tie_encoder_decoder or decoder_depth in (None, depth)
        self._expect("num_decoder_layers", fits, f"num_hidden_layers ({depth}), because tie_encoder_decoder is True")
        self._expect("decoder_start_token_id", 0 <= (self.decoder_start_token_id or 0) < vocab_size, known_id)

    def _expect(self, name: str, is_valid: bool, expected: str) -> None:
        if not is_valid:
            raise ValueError(f"{name} is {getattr(self, name)!r}; expected {expected}.")

    @property  # transformers declares an attribute of the class, and reads it from the configuration
    def base_model_tp_plan(self) -> dict[str, str] | None:
        """How the matrices are split between processes in tensor parallelism (Shoeybi et al. 2019, "Megatron-LM",
        section 3): by attention head, feed-forward width and vocabulary. The number of processes must divide the number
        of heads. Encoder and decoder of a seq2seq model have a plan each; the model itself has none."""
        splits = {"query": "colwise", "key": "colwise", "value": "colwise", "output": "rowwise"}
        attentions = ("attention", "cross_attention") if self.add_cross_attention else ("attention",)
        plan = {f"encoder.blocks.*.{part}.{name}": split for part in attentions for name, split in splits.items()}
        plan["encoder.blocks.*.feed_forward.intermediate"] = "colwise"
        plan["encoder.blocks.*.feed_forward.output"] = "rowwise"
        return None if self.is_encoder_decoder else plan | {"embeddings.word_embeddings": "embedding_rowwise"}

    @base_model_tp_plan.setter
    def base_model_tp_plan(self, value):
        """Ignored: transformers 5.18 to 5.20 assign a plan that adds the word embeddings."""

    def encoder_config(self) -> Self:
        """Return the configuration of the encoder of a seq2seq model."""
        config = copy.deepcopy(self)
        config.is_encoder_decoder = config.tie_encoder_decoder = False
        config.num_decoder_layers = config.architectures = None
        return config

    def decoder_config(self) -> Self:
        """Return the configuration of the decoder of a seq2seq model."""
        config = self.encoder_config()
        config.is_decoder = config.add_cross_attention = True
        config.num_hidden_layers = self.num_decoder_layers or self.num_hidden_layers
        return config

    def get_text_config(self, decoder: bool | None = None, encoder: bool | None = None) -> Self:
        """Return the configuration of the decoder or the encoder, from which `generate` creates its caches."""
        if not self.is_encoder_decoder or decoder == encoder:
            return self
        return self.decoder_config() if decoder else self.encoder_config()

    # The base class raises for `output_attentions=True` beside "sdpa". Here the call runs the eager path.
    @PreTrainedConfig.output_attentions.setter  # type: ignore[attr-defined]
    def output_attentions(self, value: bool | None):
        self._output_attentions = value

    def validate_output_attentions(self):
        """Accept every attention implementation; see `output_attentions`."""

    @classmethod
    def get_config_dict(cls, pretrained_model_name_or_path: str | os.PathLike, **kwargs) -> tuple[dict, dict]:
        """Read the `config.json` of a ScratchBert or BERT checkpoint as the fields of a `ScratchBertConfig`. Raise
        ValueError if it is another model's."""
        fields, kwargs = raw_config(pretrained_model_name_or_path, **kwargs)
        if not cls.is_own(fields):
            fields = installed("bert.fields").scratchbert_fields(fields, pretrained_model_name_or_path)
        return fields, kwargs

    @classmethod
    def is_own(cls, fields: dict[str, Any]) -> bool:
        """Return whether the fields of a `config.json` are those of a ScratchBert, or of a class derived from it."""
        return fields.get("model_type") in (ScratchBertConfig.model_type, cls.model_type)

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs) -> Self:
        """As `PreTrainedConfig.from_dict`, which sets `kwargs` one by one after the configuration was checked. A
        `padding_free` in the dictionary, which earlier versions saved, is ignored."""
        fields = dict(config_dict)
        if fields.pop("padding_free", False):
            logger.info("padding_free in config.json is ignored; pass it to from_pretrained to remove padding.")
        result = super().from_dict(fields, **kwargs)
        config = result[0] if isinstance(result, tuple) else result
        config._complete()
        return result

    def to_dict(self) -> dict[str, Any]:
        """As `PreTrainedConfig.to_dict`, without `padding_free`. PEFT reads from it the `model_type` whose target
        modules it looks up."""
        if "peft" in sys.modules:
            with contextlib.suppress(Exception):  # if the package is absent or broken, PEFT asks for `target_modules`
                installed("bert.peft").add_default_target_modules(self.model_type)
        fields = super().to_dict()
        fields.pop("padding_free", None)
        return fields

    @classmethod
    def from_bert(cls, config: PreTrainedConfig) -> Self:
        """Return the ScratchBert configuration of the model that `config`, a `BertConfig`, describes. Raise ValueError
        if it describes another model, or one with relative positions."""
        fields = installed("bert.fields").scratchbert_fields(config.to_dict(), f"config={type(config).__name__}(…)")
        return cls(**fields | {"attn_implementation": config._attn_implementation, "name_or_path": config.name_or_path})

    def save_pretrained(self, save_directory: str | os.PathLike, push_to_hub: bool = False, **kwargs) -> None:
        """Write `config.json`, and the code that its `auto_map` names."""
        if getattr(self, "auto_map", None) is None:
            self.auto_map = dict(AUTO_MAP)
        if type(self).__module__ != __name__:  # a derived class, which only its own `register_for_auto_class` can name
            self.auto_map.pop("AutoConfig", None)
        copy_code(save_directory)
        super().save_pretrained(save_directory, push_to_hub=push_to_hub, **kwargs)
