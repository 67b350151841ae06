"""FSDP2 for models in which an encoder and a decoder share tensors.

Every module that uses a tensor must be in the same FSDP group. Accelerate makes a group of each block, and one of the
embeddings that `get_input_embeddings` and `get_output_embeddings` return.
"""

from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch.distributed.fsdp import register_fsdp_forward_method


def prepare(accelerator: Accelerator, model, optimizer) -> tuple:
    """As `Accelerator.prepare`, also for an encoder and a decoder that share tensors.

    With FSDP their embeddings are in the root group, and with `tie_encoder_decoder` the blocks are as well: then each
    process holds all weights during a forward and backward pass, but only its part of the gradients and of Adam's
    numbers.
    """
    if accelerator.distributed_type != DistributedType.FSDP or not model.config.is_encoder_decoder:
        return accelerator.prepare(model, optimizer)
    if model.config.tie_encoder_decoder:
        accelerator.state.fsdp_plugin.auto_wrap_policy = None
    model.get_input_embeddings = model.get_output_embeddings = lambda: None
    prepared = accelerator.prepare(model, optimizer)
    del model.get_input_embeddings, model.get_output_embeddings
    # It calls the encoder by itself, which needs the weights of the root group.
    register_fsdp_forward_method(prepared[0], "generate")
    return prepared
