"""One rank's job as the embedded trainer sees it: every modelled flag, typed, with what follows from them. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mindspeed_dryrun.errors import UsageError
from mindspeed_dryrun.megatron import flags, sizes
from mindspeed_dryrun.megatron.arguments import Arguments
from mindspeed_dryrun.megatron.checks import read_checked
from mindspeed_dryrun.megatron.layout import Batch, Layout
from mindspeed_dryrun.megatron.modelled import TrainerFlags


@dataclass(frozen=True, kw_only=True, eq=False)
class Settings(TrainerFlags):
    """The flags as Megatron and MindSpeed-LLM leave them after validation, the layout and the derived sizes."""

    rank: int
    world_size: int
    layout: Layout
    batch: Batch
    padded_vocab: int
    ffn_size: int
    kv_size: int
    query_groups: int

    @property
    def virtual_stages(self) -> int | None:
        """Chunks of each stage under the interleaved schedule."""
        return self.layout.parallel.vpp

    @property
    def rope(self) -> bool:
        """Whether positions are rotated into queries and keys."""
        return self.use_rotary_position_embeddings or self.position_embedding_type == "rope"

    @property
    def latent_attention(self) -> bool:
        """Queries, keys and values are made from compressed ones: the layer spec decides, not the flag."""
        return self._layers_of("deepseek_spec")

    @property
    def rotary_size(self) -> int:
        """Dimensions of a head that are rotated. Only YaRN's frequencies are made for latent attention
        (MindSpeed-LLM, core/models/common/embeddings/rotary_pos_embedding.py, `apply_yarn_scaling`)."""
        # `apply_yarn_scaling`: https://gitcode.com/Ascend/MindSpeed-LLM/blob/v2.2.0/mindspeed_llm/core/models/common/embeddings/rotary_pos_embedding.py#L39
        return self.qk_pos_emb_head_dim if self.multi_latent_attention and self.rope_scaling_type == "yarn" else self.kv_size

    @property
    def lora_modules(self) -> tuple[str, ...]:
        """Names of the layers with an adapter; none without LoRA."""
        return tuple((self.lora_target_modules or "").split())

    @property
    def packed(self) -> bool:
        """A sample holds several documents, which do not look at each other; one flag says so up to 2.2.0, the other after it."""
        return self.reset_position_ids or self.reset_attention_mask

    @property
    def masked_by_documents(self) -> bool:
        """A ring of whole blocks, each pair of which gets a mask of its own."""
        return self.attention_mask_type == "general"

    @property
    def any_length(self) -> bool:
        """Samples are not padded to the sequence length; a dry run takes the longest."""
        return self.variable_seq_lengths or self.no_pad_to_seq_lengths

    @property
    def expert_ffn_size(self) -> int:
        """The width of one expert."""
        # `moe_ffn_hidden_size`: https://github.com/NVIDIA/Megatron-LM/blob/core_v0.12.1/megatron/training/arguments.py#L843
        return self.moe_ffn_hidden_size or self.ffn_size

    @property
    def capacity_factor(self) -> float | None:
        """Times the even share that an expert takes before tokens are dropped; below 0 none is dropped."""
        factor = self.moe_expert_capacity_factor
        return factor if factor is not None and factor >= 0 else None

    @property
    def expert_tensor_size(self) -> int:
        """Ranks that share one expert."""
        return self.expert_tensor_parallel_size or self.tensor_model_parallel_size

    @property
    def shared_expert_size(self) -> int | None:
        """The width of the experts that see every token, None without any."""
        if self.moe_shared_expert_intermediate_size is not None:
            return self.moe_shared_expert_intermediate_size
        return self.n_shared_experts * self.expert_ffn_size if self.n_shared_experts else None

    def has_experts(self, layer: int) -> bool:
        """Whether a layer (from 0) holds experts in place of an MLP; -1 for both flags is every layer."""
        if not (self.num_experts and self.first_k_dense_replace and self.moe_layer_freq):
            return bool(self.num_experts)
        return layer >= self.first_k_dense_replace and layer % self.moe_layer_freq == 0

    @property
    def post_norms(self) -> bool:
        """Gemma2's and Grok's layers, with norms after attention and after the MLP."""
        return self._layers_of("gemma2_spec", "grok_spec")

    @property
    def query_key_norms(self) -> bool:
        """Norms of queries and keys: MindSpeed-LLM hands the flag to layer specs only (pretrain_gpt.py, `model_provider`)."""
        # `get_gpt_layer_local_spec`: https://gitcode.com/Ascend/MindSpeed-LLM/blob/v2.2.0/pretrain_gpt.py#L72
        return self.qk_layernorm and self.spec is not None

    @property
    def gated_shared_experts(self) -> bool:
        """Qwen2-MoE's gate; layers that are chosen one by one are built without it."""
        return self.shared_expert_gate and self._layers_of("qwen2_moe_spec") and not self.mixes_layers

    @property
    def mixes_layers(self) -> bool:
        """Dense layers between layers with experts: only if both flags are there and not 0
        (MindSpeed-LLM, core/transformer/transformer_block.py, `_transformer_block_build_layers`)."""
        # `_transformer_block_build_layers`: https://gitcode.com/Ascend/MindSpeed-LLM/blob/v2.2.0/mindspeed_llm/core/transformer/transformer_block.py#L104
        return bool(self.first_k_dense_replace and self.moe_layer_freq)

    @property
    def folds_norms(self) -> bool:
        """Layers whose linear layers start with a norm: Transformer Engine's, from 26.0.0 on, and those of qwen3_spec."""
        return self.transformer_impl == "transformer_engine" and (self.spec is None or self._layers_of("qwen3_spec"))

    def _layers_of(self, *specs: str) -> bool:
        return bool(self.spec and self.spec.rpartition(".")[2] in specs)


def read(args: Sequence[str], rank: int, world_size: int) -> Settings:
    """Settings of one rank, or a UsageError that names the flag Megatron would refuse."""
    given = flags.parse(args)
    arguments = Arguments(tuple(args))
    layout, batch = read_checked(arguments, world_size)
    _refuse_unmodelled(given)
    vocabulary = sizes.read_padded_vocabulary(arguments, layout.parallel.tp)
    if vocabulary is None:
        raise UsageError(
            "The script leaves the size of the vocabulary to its tokenizer: give --vocab-size or --padded-vocab-size."
        )
    return Settings(
        **{item.name: getattr(given, item.name) for item in dataclasses.fields(given)} | _implied(given),
        rank=rank,
        world_size=world_size,
        layout=layout,
        batch=batch,
        padded_vocab=vocabulary,
        ffn_size=sizes.ffn_size(arguments),
        kv_size=sizes.head_size(arguments),
        query_groups=sizes.query_groups(arguments),
    )


def problem(args: Sequence[str]) -> str:
    """Why the embedded trainer cannot run these arguments, known before a rank starts; empty where it can."""
    found = flags.check(args).problem()
    if found:
        return found
    try:
        _refuse_unmodelled(flags.parse(args))
    except UsageError as error:
        return str(error)
    return ""


def _implied(given: TrainerFlags) -> dict[str, Any]:
    """What Megatron and MindSpeed-LLM set from other flags."""
    # `accumulate_allreduce_grads_in_fp32`: https://github.com/NVIDIA/Megatron-LM/blob/core_v0.12.1/megatron/training/arguments.py#L594
    return {
        "recompute_granularity": "selective" if given.recompute_activations else given.recompute_granularity,
        "sequence_parallel": given.sequence_parallel and given.tensor_model_parallel_size > 1,
        "position_embedding_type": "none" if given.no_position_embedding else given.position_embedding_type,
        "accumulate_allreduce_grads_in_fp32": given.accumulate_allreduce_grads_in_fp32
        or (given.bf16 and not given.grad_reduce_in_bf16),
        "use_flash_attn": given.use_flash_attn or given.context_parallel_size > 1,
    }


def _refuse_unmodelled(given: TrainerFlags) -> None:
    """Combinations that Megatron accepts and the embedded trainer does not allocate for."""
    if not given.use_flash_attn and given.context_parallel_size == 1:
        _refuse_plain_attention(given)
    elif given.attention_dropout:
        raise UsageError(
            f"--attention-dropout {given.attention_dropout:g} with fused attention fails in MSAdapter's operator, which gets no "
            "drop mask: set --attention-dropout 0."
        )
    _refuse_packed(given)
    if given.sliding_window is not None and (given.stage or given.context_parallel_size > 1 or not given.use_flash_attn):
        raise UsageError(
            "--sliding-window is modelled in pretraining with --use-flash-attn and without context parallelism only."
        )
    _refuse_sliced_logits(given)
    _refuse_swapping(given)
    _refuse_experts(given)
    _refuse_prediction(given)
    _refuse_latent_attention(given)
    _refuse_adapters(given)
    _refuse_preference(given)
    if given.use_ascend_coc and not given.coc_fused_kernel:
        raise UsageError("--use-ascend-coc is modelled with --coc-fused-kernel only.")


def _refuse_packed(given: TrainerFlags) -> None:
    """Several documents in a sample, and the masks that keep them apart."""
    packed = given.reset_position_ids or given.reset_attention_mask
    ring = given.context_parallel_size > 1 and given.context_parallel_algo == "megatron_cp_algo"
    general = given.attention_mask_type == "general"
    if general and not (ring and packed and given.stage == "sft"):
        raise UsageError(
            "--attention-mask-type general is modelled for fine-tuning with packed samples, --context-parallel-size above 1 "
            "and --context-parallel-algo megatron_cp_algo only: run it with the script's own trainer."
        )
    if packed and given.context_parallel_size > 1 and given.context_parallel_algo != "ulysses_cp_algo" and not general:
        raise UsageError(
            "Packed samples (--reset-position-ids, --reset-attention-mask) with context parallelism are modelled with "
            "--context-parallel-algo ulysses_cp_algo or --attention-mask-type general only: run it with the script's own trainer."
        )
    if given.neat_pack and not packed:
        raise UsageError("--neat-pack needs --reset-attention-mask (--reset-position-ids up to 2.2.0).")


def _refuse_sliced_logits(given: TrainerFlags) -> None:
    slices, vocabulary = given.output_layer_slice_num, given.padded_vocab_size or given.vocab_size
    if slices > 1 and given.tensor_model_parallel_size > 1:
        raise UsageError("MindSpeed-LLM takes --output-layer-slice-num without tensor parallelism only.")
    if slices < 1 or (vocabulary and vocabulary % slices):
        raise UsageError(f"--output-layer-slice-num {slices} does not divide a vocabulary of {vocabulary}.")


def _refuse_swapping(given: TrainerFlags) -> None:
    if not given.swap_attention:
        return
    for unmodelled, name in (
        (given.mtp_num_layers and given.recompute_num_layers, "recomputed layers and multi-token prediction"),
        (given.recompute_norm or given.recompute_activation_function, "recomputed norms or activation functions"),
    ):
        if unmodelled:
            raise UsageError(f"--swap-attention with {name} is not modelled: run it with the script's own trainer.")
    if given.lora_target_modules:
        raise UsageError("MindSpeed does not take LoRA with --swap-attention.")


def _refuse_experts(given: TrainerFlags) -> None:
    if given.num_experts and given.moe_token_dispatcher_type == "alltoall" and given.tensor_model_parallel_size > 1:
        raise UsageError(
            "--moe-token-dispatcher-type alltoall with tensor parallelism fails in MSAdapter (distributed.reduce_scatter): "
            "use alltoall_seq."
        )
    if given.num_experts and given.moe_expert_capacity_factor is not None and given.moe_token_dispatcher_type == "allgather":
        # `moe_expert_capacity_factor`: https://gitcode.com/Ascend/MindSpeed-LLM/blob/v2.2.0/mindspeed_llm/features_manager/moe/moe_router.py#L51
        raise UsageError("MindSpeed-LLM does not take --moe-expert-capacity-factor with --moe-token-dispatcher-type allgather.")
    in_groups = given.moe_token_dispatcher_type == "alltoall_seq" and given.moe_grouped_gemm
    if given.moe_tp_extend_ep and not in_groups:
        raise UsageError("--moe-tp-extend-ep works with --moe-grouped-gemm and --moe-token-dispatcher-type alltoall_seq only.")
    if given.moe_alltoall_overlap_comm:
        _refuse_overlap(given)
    if given.moe_zero_memory != "disable":
        _refuse_zero_memory(given)


def _refuse_overlap(given: TrainerFlags) -> None:
    split = given.tensor_model_parallel_size > 1
    exchanged = given.moe_token_dispatcher_type in ("alltoall", "alltoall_seq")
    token_wise = given.moe_token_dispatcher_type == "alltoall"
    for unmodelled, name in (
        (not (exchanged and given.moe_grouped_gemm), "a dispatcher that gathers, or without --moe-grouped-gemm,"),
        (token_wise and given.moe_expert_capacity_factor is not None, "the alltoall dispatcher and a capacity"),
        (token_wise and given.recompute_activation_function, "the alltoall dispatcher and recomputed activation functions"),
        (token_wise and given.num_experts == given.expert_model_parallel_size, "the alltoall dispatcher and one expert a rank"),
        (given.expert_model_parallel_size == 1, "--expert-model-parallel-size 1"),
        (split and not given.moe_tp_extend_ep, "tensor parallelism and without --moe-tp-extend-ep"),
        (
            split and (given.n_shared_experts or given.moe_shared_expert_intermediate_size),
            "tensor parallelism and shared experts",
        ),
        (given.moe_router_load_balancing_type == "group_limited_greedy", "group_limited_greedy"),
    ):
        if unmodelled:
            raise UsageError(
                f"--moe-alltoall-overlap-comm with {name} is not modelled: leave it out, or use the script's own trainer."
            )


def _refuse_zero_memory(given: TrainerFlags) -> None:
    if not given.moe_alltoall_overlap_comm:
        raise UsageError("--moe-zero-memory needs --moe-alltoall-overlap-comm.")
    for unmodelled, name in (
        (given.moe_token_dispatcher_type != "alltoall_seq", "another dispatcher than alltoall_seq"),
        (given.num_experts == given.expert_model_parallel_size, "one expert a rank"),
        (given.mtp_num_layers, "multi-token prediction"),
    ):
        if unmodelled:
            raise UsageError(f"--moe-zero-memory with {name} is not modelled: run it with the script's own trainer.")


def _refuse_prediction(given: TrainerFlags) -> None:
    if not given.mtp_num_layers:
        return
    for unmodelled, name in (
        (given.recompute_norm or given.recompute_activation_function, "recomputed norms or activation functions"),
        (given.stage == "dpo", "DPO"),
    ):
        if unmodelled:
            raise UsageError(f"--mtp-num-layers with {name} is not modelled: run it with the script's own trainer.")


def _refuse_latent_attention(given: TrainerFlags) -> None:
    latent = bool(given.spec and given.spec.endswith("deepseek_spec"))
    if latent != given.multi_latent_attention:
        raise UsageError("--multi-latent-attention is modelled with --spec mindspeed_llm.tasks.models.spec.deepseek_spec only.")


def _refuse_plain_attention(given: TrainerFlags) -> None:
    """Attention without `--use-flash-attn` is Megatron's own, with scores of [heads, sequence, sequence]."""
    if not given.no_masked_softmax_fusion:
        raise UsageError("Attention without --use-flash-attn is modelled with --no-masked-softmax-fusion only.")
    if given.multi_latent_attention or given.reset_position_ids or given.reset_attention_mask or given.stage == "dpo":
        raise UsageError(
            "Without --use-flash-attn, multi-latent attention, packed samples and DPO are not modelled: add --use-flash-attn."
        )


def _refuse_preference(given: TrainerFlags) -> None:
    if (given.stage == "dpo") != given.is_pairwise_dataset:
        raise UsageError("--stage dpo and --is-pairwise-dataset are modelled together only.")
    if given.stage != "dpo":
        return
    for unmodelled, name in (
        (given.context_parallel_size > 1, "context parallelism"),
        (given.reset_position_ids or given.reset_attention_mask, "packed samples"),
    ):
        if unmodelled:
            raise UsageError(f"DPO with {name} is not modelled: run it with the script's own trainer.")


def _refuse_adapters(given: TrainerFlags) -> None:
    if not given.lora_target_modules:
        return
    if given.num_experts and given.moe_token_dispatcher_type != "alltoall_seq":
        raise UsageError("MindSpeed-LLM takes LoRA with experts with --moe-token-dispatcher-type alltoall_seq only.")
    if given.moe_tp_extend_ep:
        raise UsageError("MindSpeed-LLM does not take LoRA with --moe-tp-extend-ep.")
    for unmodelled, name in (
        (given.moe_grouped_gemm and given.gemm_gradient_accumulation_fusion, "--gemm-gradient-accumulation-fusion"),
        (given.moe_alltoall_overlap_comm, "--moe-alltoall-overlap-comm"),
        (given.use_ascend_coc, "--use-ascend-coc"),
    ):
        if unmodelled:
            raise UsageError(f"LoRA with {name} is not modelled: run it with the script's own trainer.")
