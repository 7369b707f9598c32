"""Multi-latent attention as MindSpeed-LLM computes it (tasks/models/transformer/multi_latent_attention.py)."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear, gather_from_sequence_parallel_region
from megatron.core.transformer import attention as megatron_attention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec, build_module

from mindspeed_dryrun.megatron.settings import Settings
from mindspeed_dryrun.rank.trainer import releases


class WholeLinear(torch.nn.Module):  # type: ignore[misc]
    """A product that every tensor-parallel rank computes in full."""

    # `LinearNoTP`: https://gitcode.com/Ascend/MindSpeed-LLM/blob/v2.2.0/mindspeed_llm/tasks/models/transformer/multi_latent_attention.py#L481

    def __init__(self, input_size: int, output_size: int, config: Any, bias: bool) -> None:
        super().__init__()
        device = torch.cuda.current_device()
        self.weight = torch.nn.Parameter(torch.empty(output_size, input_size, dtype=config.params_dtype, device=device))
        self.weight.sequence_parallel = config.sequence_parallel
        # Made and never added: upstream multiplies by the weight only.
        self.bias = torch.nn.Parameter(torch.empty(output_size, dtype=config.params_dtype, device=device)) if bias else None

    def forward(self, x: Any) -> Any:
        return torch.matmul(x, self.weight.t())


class LatentAttention(MegatronModule):  # type: ignore[misc]
    """Queries, keys and values from compressed ones, with positions in a few dimensions of their own."""

    # `CustomMLASelfAttention`: https://gitcode.com/Ascend/MindSpeed-LLM/blob/v2.2.0/mindspeed_llm/tasks/models/transformer/multi_latent_attention.py#L55

    def __init__(
        self, config: Any, layer_number: int, settings: Settings, norm: ModuleSpec, core_attention: ModuleSpec, **_: Any
    ) -> None:
        super().__init__(config=config)
        self.settings = settings
        self.heads = settings.num_attention_heads // settings.tensor_model_parallel_size
        self.head_size = settings.qk_head_dim + settings.qk_pos_emb_head_dim
        self.query_rank = settings.q_lora_rank or settings.num_attention_heads * self.head_size
        bias = config.add_bias_linear or config.add_qkv_bias
        compressed = self.query_rank + settings.kv_lora_rank + settings.qk_pos_emb_head_dim
        self.linear_qkv = WholeLinear(config.hidden_size, compressed, config, bias)
        self.kv_layernorm = self._norm(norm, settings.kv_lora_rank)
        self.q_layernorm = self._norm(norm, settings.q_lora_rank) if settings.q_lora_rank else None
        query_sizes, kv_sizes = [settings.qk_head_dim, settings.qk_pos_emb_head_dim], [settings.qk_head_dim, settings.v_head_dim]
        self.query_up = torch.nn.ModuleList(self._up(settings.q_lora_rank, query_sizes) if settings.q_lora_rank else [])
        self.kv_up = torch.nn.ModuleList(self._up(settings.kv_lora_rank, kv_sizes))
        self.core_attention = build_module(
            core_attention,
            config=config,
            layer_number=layer_number,
            attn_mask_type=AttnMaskType.causal,
            attention_type="self",
        )
        self.linear_proj = RowParallelLinear(
            settings.num_attention_heads * settings.v_head_dim,
            config.hidden_size,
            config=config,
            init_method=config.output_layer_init_method,
            bias=config.add_bias_linear,
            input_is_parallel=True,
            skip_bias_add=True,
        )

    def _norm(self, norm: ModuleSpec, size: int) -> Any:
        if not self.settings.query_key_norms:
            return torch.nn.Identity()
        return build_module(norm, hidden_size=size, config=self.config)

    def _up(self, rank: int, sizes: list[int]) -> list[Any]:
        """One product for both parts, or one for each (`--mla-mm-split`)."""
        widths = sizes if self.settings.mla_mm_split else [sum(sizes)]
        return [
            ColumnParallelLinear(
                rank,
                self.settings.num_attention_heads * width,
                config=self.config,
                init_method=self.config.init_method,
                gather_output=False,
                bias=self.config.add_bias_linear or self.config.add_qkv_bias,
                skip_bias_add=False,
            )
            for width in widths
        ]

    def forward(self, hidden_states: Any, attention_mask: Any, rotary_pos_emb: Any = None, **_: Any) -> tuple[Any, Any]:
        return self.linear_proj(self._attended(hidden_states, attention_mask, rotary_pos_emb))  # type: ignore[no-any-return]

    def _attended(self, hidden_states: Any, attention_mask: Any, rotary_pos_emb: Any) -> Any:
        """One function, as upstream's: what it has a name for stays until attention is done."""
        settings = self.settings
        batch = hidden_states.shape[1]
        length = hidden_states.shape[0] * (settings.tensor_model_parallel_size if settings.sequence_parallel else 1)
        heads = (length, batch, self.heads)
        together = self.linear_qkv(hidden_states)
        sizes = [self.query_rank, settings.kv_lora_rank, settings.qk_pos_emb_head_dim]
        compressed_query, compressed, key_positions = torch.split(together, sizes, dim=-1)
        parts = [settings.qk_head_dim, settings.qk_pos_emb_head_dim]
        if self.q_layernorm is None:
            plain_query, query_positions = torch.split(compressed_query.view(*heads, -1), parts, dim=-1)
        else:
            compressed_query = self.q_layernorm(compressed_query)
            plain_query, query_positions = self._raised(self.query_up, compressed_query, heads, parts)
        if settings.sequence_parallel:
            key_positions = gather_from_sequence_parallel_region(key_positions)
        key_positions = key_positions.view(length, batch, 1, settings.qk_pos_emb_head_dim)
        normed = self.kv_layernorm(compressed)
        plain_key, value = self._raised(self.kv_up, normed, heads, [settings.qk_head_dim, settings.v_head_dim])
        if rotary_pos_emb is not None:
            query_positions = self._in_halves(query_positions)
            key_positions = self._in_halves(key_positions)
            query_positions = self._rotated(query_positions, rotary_pos_emb)
            key_positions = self._rotated(key_positions, rotary_pos_emb)
        key_positions = key_positions.expand(*key_positions.shape[:2], self.heads, key_positions.shape[3])
        query = torch.cat([plain_query, query_positions], dim=-1)
        key = torch.cat([plain_key, key_positions], dim=-1)
        if self.head_size != settings.v_head_dim and not settings.mla_fa_without_pad:
            # The operator takes heads of one size; its padding is cut off again afterwards.
            width = self.head_size
            if settings.shape_order != "BNSD":
                widest = max(width, settings.v_head_dim)
                width = math.ceil(widest / settings.padded_base_length) * settings.padded_base_length
                query = F.pad(query, [0, width - self.head_size])
                key = F.pad(key, [0, width - self.head_size])
            value = F.pad(value, [0, width - settings.v_head_dim])
        output = self.core_attention(query, key, value, attention_mask, attn_mask_type=AttnMaskType.causal)
        if not settings.mla_fa_without_pad:
            output = output.view(*heads, -1)[:, :, :, : settings.v_head_dim]
            output = output.reshape(length, batch, self.heads * settings.v_head_dim)
        return output

    def _raised(self, products: Any, x: Any, heads: tuple[int, int, int], parts: list[int]) -> tuple[Any, Any]:
        outputs = [product(x)[0] for product in products]
        if len(outputs) == 1:
            first, second = torch.split(outputs[0].view(*heads, -1), parts, dim=-1)
            return first, second
        return outputs[0].view(*heads, -1), outputs[1].view(*heads, -1)

    def _in_halves(self, x: Any) -> Any:
        """From 26.0.0 on the rotary embedding itself does so."""
        if self.settings.rope_scaling_type != "yarn" or releases.since("26.0.0"):
            return x
        *shape, size = x.shape
        return x.view(*shape, size // 2, 2).transpose(4, 3).reshape(*shape, size)

    def _rotated(self, x: Any, rotary_pos_emb: Any) -> Any:
        # The function that `layers.install` puts there.
        return megatron_attention.apply_rotary_pos_emb(x, rotary_pos_emb, config=self.config)
