"""The comparison of two models: every output within 1e-5, every gradient within 1e-5 of its norm."""

import torch
from transformers.cache_utils import Cache, EncoderDecoderCache

from toolkit.compare.parity import TOLERANCE, ZERO_GRADIENT, largest


def flat(outputs) -> dict[str, torch.Tensor]:
    """Every tensor of a model's outputs by its name, `hidden_states.2` for one in a tuple, caches included."""
    tensors = {}
    for name, value in outputs.items():
        if isinstance(value, torch.Tensor):
            tensors[name] = value
        elif isinstance(value, Cache):
            tensors |= {f"{name}.{part}": tensor for part, tensor in flat_cache(value).items()}
        else:
            tensors |= {f"{name}.{i}": tensor for i, tensor in enumerate(value)}
            tensors[f"len({name})"] = torch.tensor(len(value))
    return {name: tensor.detach() for name, tensor in tensors.items()}


def flat_cache(cache) -> dict[str, torch.Tensor]:
    if isinstance(cache, EncoderDecoderCache):
        parts = {"own": flat_cache(cache.self_attention_cache), "encoder": flat_cache(cache.cross_attention_cache)}
        return {f"{part}.{name}": tensor for part, tensors in parts.items() for name, tensor in tensors.items()}
    return {f"{i}.{kind}": getattr(layer, kind) for i, layer in enumerate(cache.layers) for kind in ("keys", "values")}


def at_tokens(tensor, real):
    """The parts of `(…, T, …)` at non-padding tokens; outputs at padding have no meaning. Tensors without a dimension
    `T` are returned whole."""
    if real is None or tensor.ndim < 2:
        return tensor
    if tensor.shape[:2] == real.shape:
        return tensor[real]
    if tensor.ndim == 4 and tensor.shape[2] == real.shape[1]:  # attention weights, keys and values: (B, H, T, …)
        return tensor.transpose(1, 2)[real]
    return tensor


def as_doubles(inputs):
    return {
        name: value.double() if isinstance(value, torch.Tensor) and value.is_floating_point() else value
        for name, value in inputs.items()
    }


def assert_same_tensors(actual, expected, real=None, exact=None):
    """Each of `actual` is within 1e-5 of the tensor of the same name in `expected`, the reference's; or within the
    reference's own error if that is larger. `exact()` returns what the reference computes in float64."""
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert actual[name].shape == tensor.shape, name
        assert actual[name].dtype == tensor.dtype, name
        mine, theirs = at_tokens(actual[name], real), at_tokens(tensor, real)
        difference = largest(mine.double() - theirs.double())
        tolerance = TOLERANCE
        if exact is not None and difference > tolerance:
            tolerance = max(tolerance, largest(theirs.double() - at_tokens(exact()[name], real)))
        assert difference <= tolerance, f"{name} differs by {difference:.1e}, and may by {tolerance:.1e}"


def assert_same_gradients(actual, expected):
    """‖Δg‖ ≤ 1e-5 ‖g‖ for each tensor, with a floor: the gradient of a key's bias is zero but for rounding."""
    assert actual.keys() == expected.keys()
    floor = ZERO_GRADIENT * sum(g.norm() ** 2 for g in expected.values() if g is not None).sqrt().item()
    for name, gradient in expected.items():
        assert (actual[name] is None) == (gradient is None), name
        if gradient is not None:
            difference, norm = (actual[name] - gradient).norm().item(), gradient.norm().item()
            assert difference <= max(TOLERANCE * norm, floor), f"{name}: {difference:.1e} of {norm:.1e}"
