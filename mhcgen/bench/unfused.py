"""The unfused path: a boundary in plain PyTorch, for torch.compile."""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor
from torch.nn import functional


def boundary(
    constants: ModuleType,
    y: Tensor,
    residual: Tensor,
    post: Tensor,
    comb: Tensor,
    fn: Tensor,
    scale: Tensor,
    base: Tensor,
    norm_weight: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Takes an all-reduced row through steps 2 to 7, as an engine would write them.

    The projection is the fastest that PyTorch has: in the dtype of fn, so that with
    BF16 the mixes are less exact than the kernels'. Shapes are those of a package's
    call.

    Args:
        constants: The package's ``constants`` module.
        y: [M, H], the sum over the ranks.
        residual: [M, HC, H].
        post: [M, HC, 1].
        comb: [M, HC, HC], [source, target].
        fn: [MIX, HC * H].
        scale: [3].
        base: [MIX].
        norm_weight: [H].

    Returns:
        The new residual, post, comb and the layer input.
    """
    c = constants
    m, hc = residual.shape[:2]
    streams = post * y.float().unsqueeze(1)
    for source in range(hc):
        weights = comb[:, source, :, None]
        streams = streams + weights * residual[:, source, None, :].float()
    new = streams.to(residual.dtype)

    row = new.flatten(1)
    dot = functional.linear(row.to(fn.dtype), fn).float()
    squares = row.float().square().mean(-1, keepdim=True)
    mix = dot * torch.rsqrt(squares + c.RMS_EPS)

    pre = torch.sigmoid(mix[:, :hc] * scale[0] + base[:hc]) + c.HC_EPS
    collapsed = (pre.unsqueeze(-1) * new.float()).sum(1).to(new.dtype).float()
    rstd = torch.rsqrt(collapsed.square().mean(-1, keepdim=True) + c.NORM_EPS)
    layer_input = (collapsed * rstd * norm_weight.float()).to(new.dtype)

    post_logits = mix[:, hc : 2 * hc] * scale[1] + base[hc : 2 * hc]
    new_post = (c.POST_MULT * torch.sigmoid(post_logits)).unsqueeze(-1)
    logits = (mix[:, 2 * hc :] * scale[2] + base[2 * hc :]).view(m, hc, hc)
    rows = torch.softmax(logits, -1) + c.HC_EPS
    rows = rows / (rows.sum(-2, keepdim=True) + c.HC_EPS)
    for _ in range(c.SINKHORN_ITERS - 1):
        rows = rows / (rows.sum(-1, keepdim=True) + c.HC_EPS)
        rows = rows / (rows.sum(-2, keepdim=True) + c.HC_EPS)
    return new, new_post, rows, layer_input
