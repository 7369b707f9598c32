"""A stand-in for `cann_ops_transformer`, a package beside CANN whose operators DeepSeek-V4 uses. An installed one is left alone.

Its sources are public (https://gitcode.com/cann/ops-transformer: torch_extension/cann_ops_transformer/ops and
mhc/*/torch_extension). What counts here is what they allocate: outputs, what is saved for the backward pass, and temporary
tensors. Each operator says which file it follows; an operator that is not here stops the rank. Workspace is not known, and
listed as not counted.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import torch

from mindspeed_dryrun.rank import installed
from mindspeed_dryrun.rank.torch_npu.compiled import launched

PACKAGE = "cann_ops_transformer"
_METADATA = 1024  # SMLA_METADATA_SIZE; a plan of which core computes what, in int32
_KL_METADATA = 64
_ALIGNED = 8  # sinkhornAlign of mhc_pre_sinkhorn_backward.cpp


def install() -> None:
    """`cann_ops_transformer` and its `ops` among the modules, where the package is not installed."""
    if PACKAGE in sys.modules or installed.has_package(PACKAGE):
        return
    package, operators = ModuleType(PACKAGE), ModuleType(f"{PACKAGE}.ops")
    operators.__dict__.update({function.__name__: function for function in _OPERATORS})
    package.__dict__.update(ops=operators, __path__=[])
    sys.modules.update({PACKAGE: package, f"{PACKAGE}.ops": operators})


# -- hyper-connections (mhc) -------------------------------------------------------------------------------------------


class _PreSinkhorn(torch.autograd.Function):  # type: ignore[misc]
    """mhc_pre_sinkhorn.py and .cpp, mhc_pre_sinkhorn_backward.cpp."""

    @staticmethod
    def forward(ctx: Any, x: Any, phi: Any, alpha: Any, bias: Any, iterations: int) -> Any:
        outputs, kept = _pre_sinkhorn(x, phi, iterations, saving=True)
        ctx.save_for_backward(x, phi, alpha, bias, *kept)
        return outputs

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        x, phi, alpha, bias, _, before, scale, sums, _ = ctx.saved_tensors
        results = [torch.empty_like(tensor) for tensor in (x, phi, alpha, bias)]
        n = x.size(-2)
        mix = before * scale
        post = mix[..., n : 2 * n] * alpha[1] + bias[n : 2 * n]
        gate = torch.sigmoid(post) * 2.0
        logits = mix[..., 2 * n :] * alpha[2] + bias[2 * n :]
        matrix = torch.empty_like(logits)
        rows = sums.size(0) * (logits.numel() // (n * n)) * _ALIGNED
        steps = [logits.new_empty(rows * n), logits.new_empty(rows)]
        launched("aclnnMhcSinkhorn", x)
        before_sinkhorn = torch.empty_like(logits)
        launched("aclnnMhcSinkhornBackward", x)
        launched("aclnnMhcPreBackward", x)
        del gate, matrix, steps, before_sinkhorn  # all of them live until here
        return (*results, None)


def _pre_sinkhorn(x: Any, phi: Any, iterations: int, saving: bool) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    batch, length, n, hidden = x.shape
    outputs = (x.new_empty(batch, length, hidden), phi.new_empty(batch, length, n), phi.new_empty(batch, length, n * n))
    shapes: tuple[tuple[int, ...], ...] = (
        (batch, length, n),
        (batch, length, n * n + 2 * n),
        (batch, length, 1),
        (2 * iterations, batch, length, n),
        (2 * iterations, batch, length, n, n),
    )
    kept = tuple(phi.new_empty(shape) for shape in shapes) if saving else ()
    launched("aclnnMhcPreSinkhorn", x)
    return outputs, kept


def mhc_pre_sinkhorn(
    x: Any, phi: Any, alpha: Any, bias: Any, hc_mult: int, num_iters: int, hc_eps: float = 1e-6, norm_eps: float = 1e-6
) -> Any:
    """The mixed hidden states, and the weights of the way back."""
    if any(tensor.requires_grad for tensor in (x, phi, alpha, bias)):
        return _PreSinkhorn.apply(x, phi, alpha, bias, num_iters)
    return _pre_sinkhorn(x, phi, num_iters, saving=False)[0]


class _Post(torch.autograd.Function):  # type: ignore[misc]
    """mhc_post.py, mhc_post_backward.py."""

    @staticmethod
    def forward(ctx: Any, *tensors: Any) -> Any:
        ctx.save_for_backward(*tensors)
        launched("aclnnMhcPost", tensors[0])
        return torch.empty_like(tensors[0])

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        results = tuple(torch.empty_like(tensor) for tensor in ctx.saved_tensors)
        launched("aclnnMhcPostBackward", gradient)
        return results


def mhc_post(x: Any, h_res: Any, h_out: Any, h_post: Any) -> Any:
    """The residual streams after a layer."""
    return _Post.apply(x, h_res, h_out, h_post)


# -- sparse attention and its indexer, whose gradients upstream's own autograd functions ask for ----------------------


def sparse_flash_mla_metadata(*sizes: int, **options: Any) -> Any:
    """sparse_flash_mla.cpp, `SparseFlashMlaMetadata`."""
    return torch.empty(_METADATA, dtype=torch.int32, device="npu")


def sparse_flash_mla_grad_metadata(*sizes: int, **options: Any) -> None:
    """sparse_flash_mla_grad.py: none but on Ascend 950."""


def sparse_flash_mla(
    q: Any, *, ori_kv: Any, layout_q: str = "BSND", layout_kv: str = "BSND", return_softmax_lse: bool = False, **options: Any
) -> tuple[Any, Any]:
    """sparse_flash_mla.cpp, `MakeSparseFlashMlaOutputs`."""
    heads = _heads(ori_kv, layout_kv)
    shape = (q.size(0), heads, q.size(1), q.size(2) // heads) if layout_q == "BSND" else (heads, q.size(0), q.size(1) // heads)
    results = torch.empty_like(q), q.new_empty(shape if return_softmax_lse else (), dtype=torch.float32)
    launched("aclnnSparseFlashMla", q)
    return results


def sparse_flash_mla_grad(
    q: Any,
    dout: Any,
    attn_out: Any,
    softmax_lse: Any,
    ori_kv: Any = None,
    cmp_kv: Any = None,
    ori_sparse_indices: Any = None,
    cmp_sparse_indices: Any = None,
    *,
    sinks: Any = None,
    **options: Any,
) -> tuple[Any, ...]:
    """sparse_flash_mla_grad.py: gradients of what is given, and sums of the softmax for each chosen key."""
    gradients = [None if tensor is None else torch.empty_like(tensor) for tensor in (q, ori_kv, cmp_kv, sinks)]
    sums = [None if chosen is None else _in_float32(chosen) for chosen in (ori_sparse_indices, cmp_sparse_indices)]
    launched("aclnnSparseFlashMlaGrad", q)
    return (*gradients, *sums)


def lightning_indexer_metadata(*sizes: int, **options: Any) -> Any:
    """lightning_indexer.py, `lightning_indexer_metadata`."""
    return torch.empty(_METADATA, dtype=torch.int32, device="npu")


def lightning_indexer(
    q: Any, k: Any, w: Any, topk: int, *, layout_q: str = "BSND", layout_k: str = "BSND", return_value: int = 0, **options: Any
) -> tuple[Any, Any]:
    """lightning_indexer.py: the chosen keys of each query, and their values where they are asked for."""
    queries = q.shape[:2] if layout_q == "BSND" else q.shape[:1]
    chosen = q.new_empty((*queries, _heads(k, layout_k), topk), dtype=torch.int32)
    values = q.new_empty(chosen.shape if return_value else (0,), dtype=torch.float32)
    launched("aclnnLightningIndexer", q)
    return chosen, values


def sparse_lightning_indexer_kl_loss_grad_metadata(*sizes: int, **options: Any) -> Any:
    """sparse_lightning_indexer_kl_loss_grad.py."""
    return torch.empty(_KL_METADATA, dtype=torch.int32, device="npu")


def sparse_lightning_indexer_kl_loss_grad(
    q: Any, k: Any, w: Any, sparse_indices: Any, attn_softmax_l1_norm: Any, **options: Any
) -> tuple[Any, ...]:
    """sparse_lightning_indexer_kl_loss_grad.py: three gradients and the softmax."""
    results = (*(torch.empty_like(tensor) for tensor in (q, k, w)), _in_float32(attn_softmax_l1_norm))
    launched("aclnnSparseLightningIndexerKLLossGrad", q)
    return results


def _heads(keys: Any, layout: str) -> int:
    return int(keys.size(1) if layout == "TND" else keys.size(2))


def _in_float32(tensor: Any) -> Any:
    return tensor.new_empty(tensor.shape, dtype=torch.float32)


_OPERATORS = (
    mhc_pre_sinkhorn,
    mhc_post,
    sparse_flash_mla,
    sparse_flash_mla_metadata,
    sparse_flash_mla_grad,
    sparse_flash_mla_grad_metadata,
    lightning_indexer,
    lightning_indexer_metadata,
    sparse_lightning_indexer_kl_loss_grad,
    sparse_lightning_indexer_kl_loss_grad_metadata,
)
