"""Arguments with one fault each, on a GPU or on none."""

from __future__ import annotations

from typing import Any

import torch


def faulty(fault: str, tensor: torch.Tensor, elsewhere: str) -> Any:
    """An argument like a tensor, with one fault; ``elsewhere`` is another device."""
    if fault == "type":
        return [1.0]
    if fault == "a class":
        return torch.Tensor
    if fault == "dtype":
        return tensor.double()
    if fault == "shape":
        return torch.cat([tensor, tensor], dim=-1)
    if fault == "rank":
        return tensor.unsqueeze(0)
    if fault == "device":
        return tensor.to(elsewhere)
    if fault == "strides":
        return torch.cat([tensor, tensor], dim=-1)[..., ::2]
    if fault == "negated":
        return torch._neg_view(tensor)
    if fault == "freed":
        freed = tensor.clone()
        freed.untyped_storage().resize_(0)
        return freed
    if fault == "freed with others":
        behind = tensor.new_zeros(32 + tensor.numel())[32:].view(tensor.shape)
        behind.untyped_storage().resize_(0)
        return behind
    assert fault == "alignment"
    return tensor.new_zeros(tensor.numel() + 1)[1:].view(tensor.shape)
