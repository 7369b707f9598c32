"""The rotary position embedding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch_npu

from mindspeed_dryrun.megatron.settings import Settings
from mindspeed_dryrun.rank.trainer import releases


class Rotary(torch.nn.Module):  # type: ignore[misc]
    """The angles of the rotary embedding, made anew in every forward pass."""

    # `rotary_embedding_forward`: https://gitcode.com/Ascend/MindSpeed-LLM/blob/v2.2.0/mindspeed_llm/core/models/common/embeddings/rotary_pos_embedding.py#L87

    def __init__(self, settings: Settings, seq_slice: Callable[[Any], Any]) -> None:
        super().__init__()
        self.settings = settings
        self.seq_slice = seq_slice
        size = settings.rotary_size
        if settings.partial_rotary_factor:
            size = int(size * settings.partial_rotary_factor)
        size = int(size * settings.rotary_percent)
        steps = torch.arange(0, size, 2, dtype=torch.float32, device=torch.cuda.current_device())
        self.inv_freq = 1.0 / (settings.rotary_base ** (steps / size))

    def forward(self, length: int) -> Any:
        positions = torch.arange(length, device=self.inv_freq.device, dtype=self.inv_freq.dtype) + 0
        if self.settings.rope_scaling_type == "longrope":
            self._stretch(positions)
        angles = torch.outer(positions, self.inv_freq)
        if self.settings.use_glm_rope:
            table = torch.stack([torch.cos(angles), torch.sin(angles)], dim=-1)
        elif self.settings.rotary_interleaved:
            table = torch.stack((angles.view(-1, 1), angles.view(-1, 1)), dim=-1).view(angles.shape[0], -1)
        else:
            table = torch.cat((angles, angles), dim=-1)
        return self.seq_slice(table[:, None, None, :])

    def _stretch(self, positions: Any) -> None:
        """LongRoPE: each frequency has a factor; with `mul` upstream makes angles from them that nothing uses."""
        factors = torch.ones(self.inv_freq.shape[0], dtype=torch.float32, device=self.inv_freq.device)
        if self.settings.longrope_freqs_type == "outer":
            self.inv_freq = 1.0 / (factors * self.inv_freq)
        else:
            torch.mul(torch.outer(positions, 1.0 / factors), self.inv_freq)


def rotate_half(x: Any) -> Any:
    first, second = torch.chunk(x, 2, dim=-1)
    return torch.cat((-second, first), dim=-1)


def rotary_function(settings: Settings) -> Callable[..., Any]:
    """`apply_rotary_pos_emb` as the attention of megatron-core calls it."""
    # `apply_rotary_pos_emb_bshd`: https://gitcode.com/Ascend/MindSpeed-LLM/blob/v2.2.0/mindspeed_llm/core/models/common/embeddings/rotary_pos_embedding.py#L206

    def apply(t: Any, freqs: Any, config: Any, cu_seqlens: Any = None, mscale: float = 1.0) -> Any:
        if settings.use_glm_rope:
            return _glm_rotary(t, freqs)
        rotated = freqs.shape[-1]
        t, rest = t[..., :rotated], t[..., rotated:]
        if settings.multi_latent_attention and releases.since("26.0.0"):
            *shape, size = t.shape
            t = t.reshape(*shape, size // 2, 2).transpose(-2, -1).reshape(*shape, size)
        cos = (torch.cos(freqs) * mscale).to(t.dtype)
        sin = (torch.sin(freqs) * mscale).to(t.dtype)
        if settings.use_fused_rotary_pos_emb:
            mode = 1 if config.rotary_interleaved else 0
            t = torch_npu.npu_rotary_position_embedding(t.contiguous(), cos, sin, mode).to(t.dtype)
        else:
            if settings.multi_latent_attention and not releases.since("26.0.0"):
                t = torch.cat((t[..., 0::2], t[..., 1::2]), dim=-1)
            t = (t * cos) + (rotate_half(t) * sin)
        return torch.cat((t, rest), dim=-1)

    return apply


def _glm_rotary(t: Any, freqs: Any) -> Any:
    """ChatGLM's: pairs of neighbours rotate, in the first part of a head only."""
    length, _, heads, _ = t.shape
    rotated = freqs.shape[-2] * 2
    t, rest = t[..., :rotated], t[..., rotated:]
    freqs = freqs[:length].to(t.dtype)
    pairs = t.reshape(length, -1, heads, rotated // 2, 2).contiguous()
    freqs = freqs.view(length, -1, 1, pairs.size(3), 2).contiguous()
    even, odd = torch.chunk(pairs, 2, dim=-1)
    cos, sin = torch.chunk(freqs, 2, dim=-1)
    t = torch.stack([even * cos - odd * sin, odd * cos + even * sin], -1).flatten(3)
    return torch.cat((t, rest), dim=-1)
