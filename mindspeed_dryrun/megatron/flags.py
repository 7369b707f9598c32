"""The flags of Megatron, MindSpeed and MindSpeed-LLM, as data: what each does to memory and how this trainer handles it.

`modelled`: changes memory, and the embedded trainer allocates accordingly.
`ignored`: cannot change the memory of a training step; taken and listed.
`refused`: changes memory and is not modelled; the run stops and names the flag.
A flag that is not in the table is unknown, and stops the run too: nobody can say what it would have allocated.

Pure and standard library only: the command line calls `check` before any rank starts, the worker calls `parse`.
`python -m mindspeed_dryrun.megatron.flags` prints the table as Markdown.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from mindspeed_dryrun.errors import UsageError


@dataclass(frozen=True)
class Flag:
    """One flag. `takes` is 0 (a switch), 1, or -1 (any number of values)."""

    name: str
    takes: int
    handled: str
    effect: str
    convert: Callable[[str], Any] = str
    default: Any = None
    allowed: tuple[Any, ...] = ()
    """Modelled with these values only; empty means any."""
    harmless: tuple[str, ...] = ()
    """Values of a refused flag that ask for nothing (`--expert-model-parallel-size 1`)."""

    @property
    def key(self) -> str:
        return self.name[2:].replace("-", "_")


def _modelled(effect: str, *flags: tuple[Any, ...]) -> list[Flag]:
    """Each flag is `(name, type, default[, allowed values])`; a `bool` type is a switch."""
    rows = []
    for name, convert, default, *rest in flags:
        takes = 0 if convert is bool else 1
        rows.append(Flag(f"--{name}", takes, "modelled", effect, convert, default, rest[0] if rest else ()))
    return rows


def _named(handled: str, effect: str, names: str) -> list[Flag]:
    """`name` is a switch, `name=` takes one value, `name=*` any number, `name=1|none` one, harmless if 1 or none."""
    rows = []
    for word in names.split():
        name, equals, values = word.partition("=")
        takes = 0 if not equals else -1 if values == "*" else 1
        harmless = tuple(values.split("|")) if values not in ("", "*") else ()
        rows.append(Flag(f"--{name}", takes, handled, effect, harmless=harmless))
    return rows


_TABLE: tuple[Flag, ...] = (
    *_modelled(
        "size of the model",
        ("num-layers", int, None), ("hidden-size", int, None), ("ffn-hidden-size", int, None),
        ("num-attention-heads", int, None), ("kv-channels", int, None), ("group-query-attention", bool, False),
        ("num-query-groups", int, None), ("max-position-embeddings", int, None), ("padded-vocab-size", int, None),
        ("vocab-size", int, None), ("make-vocab-size-divisible-by", int, 128), ("qk-layernorm", bool, False),
        ("untie-embeddings-and-output-weights", bool, False), ("disable-bias-linear", bool, False),
        ("add-qkv-bias", bool, False), ("normalization", str, "LayerNorm", ("LayerNorm", "RMSNorm")),
        ("post-norm", bool, False),
        ("position-embedding-type", str, "learned_absolute", ("rope", "learned_absolute", "none")),
        ("no-position-embedding", bool, False), ("use-rotary-position-embeddings", bool, False),
    ),
    *_modelled(
        "how the layers compute, and so what they save for the backward pass",
        ("swiglu", bool, False), ("geglu", bool, False), ("gelu-tanh", bool, False),
        ("no-bias-swiglu-fusion", bool, False), ("no-bias-gelu-fusion", bool, False),
        ("no-bias-dropout-fusion", bool, False), ("use-fused-rmsnorm", bool, False),
        ("use-fused-rotary-pos-emb", bool, False), ("use-glm-rope", bool, False), ("rotary-percent", float, 1.0),
        ("rotary-interleaved", bool, False), ("partial-rotary-factor", float, None),
        ("use-flash-attn", bool, False), ("attention-dropout", float, 0.1), ("hidden-dropout", float, 0.1),
        ("add-rmsnorm-offset", bool, False), ("rmsnorm-weight-in-fp32", bool, False),
        ("input-embeds-norm", bool, False), ("scale-emb", float, None), ("scale-depth", float, None),
        ("dim-model-base", float, None), ("embedding-multiplier-scale", float, 1.0),
        ("output-multiplier-scale", float, None), ("output-logit-softcapping", float, None),
        ("interleave-sliding-window", int, None), ("query-pre-attn-scalar", int, None),
        ("fp32-residual-connection", bool, False), ("no-post-layer-norm", bool, False),
        ("attention-mask-type", str, "causal", ("causal",)), ("shape-order", str, "SBH", ("SBH", "BNSD")),
        ("fp16-lm-cross-entropy", bool, False), ("cross-entropy-loss-fusion", bool, False),
        ("cross-entropy-fusion-impl", str, "native", ("native",)),
        ("no-check-for-nan-in-loss-and-grad", bool, False), ("reset-position-ids", bool, False),
        ("spec", str, None),
    ),
    *_modelled(
        "rotary frequencies: a table of [sequence, head] kept for the step",
        ("rotary-base", float, 10000.0), ("rope-scaling-type", str, None, ("llama3", "yarn")),
    ),
    *_modelled(
        "tokens of one microbatch and how many are in flight",
        ("seq-length", int, None), ("micro-batch-size", int, None), ("global-batch-size", int, None),
        ("train-iters", int, None),
    ),
    *_modelled(
        "what a rank holds of the model",
        ("tensor-model-parallel-size", int, 1), ("pipeline-model-parallel-size", int, 1),
        ("num-layers-per-virtual-pipeline-stage", int, None), ("num-virtual-stages-per-pipeline-rank", int, None),
        ("sequence-parallel", bool, False), ("num-layer-list", str, None), ("noop-layers", str, None),
        ("no-overlap-p2p-communication", bool, False),
        ("microbatch-group-size-per-virtual-pipeline-stage", int, None),
    ),
    *_modelled(
        "linear layers in one kernel with their collective, whose own buffers (NNAL) no engine counts",
        ("use-ascend-coc", bool, False), ("coc-fused-kernel", bool, False),
    ),
    *_modelled(
        "what a rank holds of the sequence",
        ("context-parallel-size", int, 1),
        ("context-parallel-algo", str, "megatron_cp_algo", ("megatron_cp_algo", "ulysses_cp_algo", "hybrid_cp_algo")),
        ("ulysses-degree-in-cp", int, None), ("cp-window-size", int, 1), ("use-cp-send-recv-overlap", bool, False),
        ("use-fused-ring-attention-update", bool, False),
    ),
    *_modelled(
        "activations kept or recomputed",
        ("recompute-granularity", str, None, ("full", "selective")), ("recompute-activations", bool, False),
        ("recompute-method", str, None, ("uniform", "block")), ("recompute-num-layers", int, None),
        ("distribute-saved-activations", bool, False), ("enable-recompute-layers-per-pp-rank", bool, False),
        ("recompute-activation-function", bool, False), ("recompute-activation-function-num-layers", int, None),
        ("recompute-norm", bool, False), ("recompute-norm-num-layers", int, None),
        ("reduce-recompute-for-last-chunk", bool, False),
    ),
    *_modelled(
        "parameter, gradient and optimizer buffers",
        ("bf16", bool, False), ("fp16", bool, False), ("use-distributed-optimizer", bool, False),
        ("overlap-grad-reduce", bool, False), ("overlap-param-gather", bool, False),
        ("accumulate-allreduce-grads-in-fp32", bool, False), ("grad-reduce-in-bf16", bool, False),
        ("ddp-bucket-size", int, None), ("ddp-num-buckets", int, None), ("reuse-fp32-param", bool, False),
        ("no-gradient-accumulation-fusion", bool, False), ("optimizer", str, "adam", ("adam",)),
        ("optimizer-selection", str, "fused_adamw", ("fused_adamw", "fused_torch_adamw")), ("clip-grad", float, 1.0),
        ("loss-scale", float, None), ("initial-loss-scale", float, 2.0**32), ("weight-decay", float, 0.01),
        ("empty-unused-memory-level", int, 0), ("num-distributed-optimizer-instances", int, 1, (1,)),
    ),
    *_named("ignored", "learning rate, seed and other numbers that are not sizes", """
        lr= min-lr= lr-decay-style= lr-decay-iters= lr-decay-samples= lr-warmup-fraction= lr-warmup-iters=
        lr-warmup-samples= lr-warmup-init= lr-wsd-decay-style= lr-wsd-decay-iters= lr-wsd-decay-samples=
        decoupled-lr= decoupled-min-lr= adam-beta1= adam-beta2= adam-eps= start-weight-decay= end-weight-decay=
        weight-decay-incr-style= sgd-momentum= head-lr-mult= seed= init-method-std= init-method-xavier-uniform
        norm-epsilon= min-loss-scale= loss-scale-window= hysteresis= override-opt_param-scheduler
        use-checkpoint-opt_param-scheduler attention-softmax-in-fp32 apply-query-key-layer-scaling
        no-initialization use-cpu-initialization data-parallel-random-init no-persist-layer-norm ema-decay=
        pre-tockens= next-tockens= sparse-mode= original-max-position-embeddings= low-freq-factor=
        high-freq-factor= rope-scaling-factor= rotary-scaling-factor= rotary-seq-len-interpolation-factor=
        beta-fast= beta-slow= rope-scaling-mscale= rope-scaling-mscale-all-dim=
        rope-scaling-original-max-position-embeddings= dynamic-factor= ddp-average-in-collective
        no-gradient-reduce-div-fusion yarn-scaling-factor= rope-scaling-beta-fast= rope-scaling-beta-slow="""),
    *_named("ignored", "data set and tokenizer: replaced by mock data of the same shape", """
        data-path=* train-data-path=* valid-data-path=* test-data-path=* data-args-path= per-split-data-args-path=
        data-cache-path= split= mock-data dataloader-type= num-workers= num-dataset-builder-threads= no-mmap-bin-files
        eod-mask-loss no-shuffle full-shuffle-instruction-dataset no-create-attention-mask-in-dataloader
        tokenizer-type= tokenizer-name-or-path= tokenizer-model= tokenizer-kwargs=* tokenizer-not-use-fast
        vocab-file= merge-file= vocab-extra-ids= tiktoken-pattern= tiktoken-num-special-tokens=
        tiktoken-special-tokens=* tokenizer-padding-side= add-eos-token=* encoder-seq-length= decoder-seq-length=
        sample-rate= mask-prob= short-seq-prob= retriever-seq-length= no-data-sharding s3-cache-path= iterations-to-skip=*
        enable-share-memory return-document-ids train-samples= rampup-batch-size=* decrease-batch-size-if-needed"""),
    *_named("ignored", "checkpoints: a dry run loads and saves nothing", """
        load= save= save-interval= no-load-optim no-load-rng no-save-optim no-save-rng finetune pretrained-checkpoint=
        ckpt-step= ckpt-format= dist-ckpt-format= dist-ckpt-strictness= use-dist-ckpt async-save
        use-persistent-ckpt-worker auto-detect-ckpt-format ckpt-fully-parallel-save ckpt-fully-parallel-load
        no-ckpt-fully-parallel-save ckpt-assume-constant-structure ckpt-convert-format= ckpt-convert-save=
        exit-on-missing-checkpoint use-checkpoint-args use-mp-args-from-checkpoint-args load-checkpoint-loosely
        no-use-tokenizer-model-from-checkpoint-args no-shared-storage persistent-save-interval=
        non-persistent-save-interval= non-persistent-ckpt-type= non-persistent-global-ckpt-dir=
        non-persistent-local-ckpt-dir= non-persistent-local-ckpt-algo="""),
    *_named("ignored", "logging, evaluation, profiling and process control", """
        log-interval= log-throughput log-params-norm log-num-zeros-in-grad log-progress log-timers-to-tensorboard
        log-memory-to-tensorboard log-world-size-to-tensorboard log-validation-ppl-to-tensorboard
        no-log-loss-scale-to-tensorboard log-straggler tensorboard-dir= tensorboard-log-interval=
        tensorboard-queue-size= wandb-project= wandb-exp-name= wandb-save-dir= use-wandb logging-level=
        timing-log-level= timing-log-option= no-barrier-with-level-1-timing no-one-logger one-logger-project=
        one-logger-run-name= one-logger-async app-tag-run-name= app-tag-run-version= config-logger-dir=
        eval-interval= eval-iters= skip-train test-mode exit-interval= exit-duration-in-mins= exit-signal-handler
        profile profile-step-start= profile-step-end= profile-ranks=* profile-level= profile-with-cpu
        profile-with-stack profile-with-memory profile-record-shapes profile-save-path= profile-export-type=
        profile-data-simplification use-pytorch-profiler record-memory-history memory-snapshot-path=
        manual-gc manual-gc-interval= no-manual-gc-eval check-for-spiky-loss check-for-large-grads
        check-weight-hash-across-dp-replicas-interval= rerun-mode= error-injection-rate= error-injection-type=
        result-rejected-tracker-filename= enable-high-availability enable-hbmfault-repair enable-worker-reboot
        train-sync-interval= disable-straggler-on-startup straggler-ctrlr-port= straggler-minmax-count=
        adlr-autoresume adlr-autoresume-interval= run-workload-inspector-server enable-ft-package calc-ft-timeouts"""),
    *_named("ignored", "how the processes talk; HCCL's own buffers are outside the pool and never counted", """
        distributed-backend= distributed-timeout-minutes= local-rank= lazy-mpu-init= nccl-communicator-config-path=
        use-tp-pp-dp-mapping disable-gloo-group disable-gloo-process-groups hccl-group-buffer=
        hccl-group-buffer-adaptive hccl-ep-group-buffer-adaptive-factor= hccl-slice-size=
        pipeline-model-parallel-comm-backend= no-scatter-gather-tensors-in-pipeline no-align-grad-reduce
        no-align-param-gather no-async-tensor-model-parallel-allreduce cp-comm-type=* use-ring-exchange-p2p
        async-log-allreduce optimize-send-recv-comm tp-comm-bootstrap-backend="""),
    *_named("ignored", "names of what is done here anyway", """
        use-mcore-models transformer-impl= use-fused-swiglu no-rope-fusion no-masked-softmax-fusion ai-framework=
        jit-compile use-deter-comp npu-deterministic deterministic-mode attention-backend=
        kv-head-repeat-before-uly-alltoall optimization-level= te-rng-tracker inference-rng-tracker
        no-use-rts disable-bf16-reduced-precision-matmul norm-topk-prob prompt-type= prompt-type-path=
        bert-no-binary-head op-cal-tflops"""),
    *_named("refused", "mixture of experts: run it with the script's own trainer", """
        num-experts= expert-model-parallel-size=1 expert-tensor-parallel-size=1 moe-router-topk=
        moe-router-load-balancing-type= moe-grouped-gemm moe-token-dispatcher-type= moe-ffn-hidden-size=
        moe-intermediate-size= moe-layer-freq= moe-shared-expert-intermediate-size= moe-aux-loss-coeff=
        moe-z-loss-coeff= moe-expert-capacity-factor= moe-pad-expert-input-to-capacity moe-token-drop-policy=
        moe-permutation-async-comm moe-permute-fusion moe-router-pre-softmax moe-router-score-function=
        moe-router-topk-scaling-factor= moe-router-enable-expert-bias moe-router-bias-update-rate=
        moe-router-num-groups= moe-router-group-topk= moe-router-dtype= moe-input-jitter-eps= moe-extended-tp
        moe-alltoall-overlap-comm moe-allgather-overlap-comm moe-fb-overlap moe-tp-extend-ep moe-zero-memory=
        moe-zero-memory-num-layers= moe-adaptive-recompute-activation moe-adaptive-recompute-activation-scale=
        moe-layer-recompute moe-model-type= moe-bmm-mc2 moe-comm-aux-loss-coeff= moe-device-level-aux-loss-coeff=
        moe-dynamic-padding moe-enable-deepep moe-no-drop moe-per-layer-logging moe-revert-type-after-topk
        moe-shared-expert-overlap moe-train-capacity-factor= moe-unperm2-mem-optim moe-unperm2-mem-optim-swap
        moe-use-legacy-grouped-gemm moe-use-sinkhorn moe-use-upcycling moe-zerc n-shared-experts= n-group=
        topk-group= routed-scaling-factor= seq-aux first-k-dense-replace= shared-expert-gate
        shared-expert-gate-output-dimension= use-fused-moe-token-permute-and-unpermute
        gemm-gradient-accumulation-fusion router-gating-in-fp32 expert-interval= balanced-moe-experts
        balanced-moe-hot-expert-num= trans-hot-expert-group-num= use-pipe-experts pipe-experts-multi-data=
        pipe-experts-multi-stream ampipe-degree= ampipe-tp-sp-comm-overlap enable-token-rearrange-opt fix-router
        noisy-gate-policy= topk-softmax-in-fp32 enable-a2avc=0 input-jitter"""),
    *_named("refused", "multi-latent attention: run it with the script's own trainer", """
        multi-latent-attention multi-head-latent-attention q-lora-rank= kv-lora-rank= qk-head-dim=
        qk-nope-head-dim= qk-pos-emb-head-dim= qk-rope-head-dim= v-head-dim= mla-fa-divide-qk mla-fa-without-pad
        mla-mm-split mla-swap-core-attn-out mla-up-proj-tp-overlap mla-zero-memory recompute-mla-up-proj mscale=
        mscale-all-dim="""),
    *_named("refused", "LoRA: run it with the script's own trainer", """
        lora-r= lora-alpha= lora-target-modules=* lora-load= lora-fusion lora-modules-to-save=*
        lora-register-forward-hook=* lora-ckpt-filter qlora qlora-nf4 qlora-save-dequantize save-lora-to-hf
        lu-lora-final-layer-index= lu-lora-lr= lu-lora-lr-ratio="""),
    *_named("refused", "post-training (SFT, DPO, reward models, RL): run it with the script's own trainer", """
        stage= is-instruction-dataset is-pairwise-dataset variable-seq-lengths padded-samples neat-pack
        dpo-loss-type= dpo-beta= dpo-label-smoothing= simpo-loss-type= simpo-beta= simpo-label-smoothing= pref-ftx=
        ref-model= refer-model-iter= reward-model= reward-tokens=* placeholder-token= gamma-beta-ratio= orm
        max-prompt-length= rollout-batch-size= n-samples-per-prompt= ppo-mini-batch-size= ppo-epochs= kl-coef=
        clip-ratio= entropy-coeff= critic-mini-batch-size= critic-update-epochs= cut-max-seqlen pad-to-multiple-of=
        dataset-additional-keys=* num-gpus-for-train= num-gpus-for-infer= hf-chat-template no-chat-template
        instruction-template= enable-thinking="""),
    *_named("refused", "other model kinds: run them with the script's own trainer", """
        use-legacy-models mtp-num-layers= mtp-loss-scaling-factor= mtp-after-norm mtp-mem-efficient-logits
        is-hybrid-model hybrid-attention-ratio= hybrid-mlp-ratio= hybrid-override-pattern= mamba-chunk-size=
        mamba-d-conv= mamba-d-ssm= mamba-expand= mamba-head-dim= mamba-num-groups= mamba-state-dim=
        full-attention-interval= linear-key-head-dim= linear-num-key-heads= linear-num-value-heads=
        linear-value-head-dim= share-kvstates cla-share-factor=1 no-enable-linear-qkv use-moba-attn moba-chunk-size=
        moba-topk= moba-calc-method= heterogeneous-layers-config-path= heterogeneous-layers-config-encoded-json=
        retro-add-retriever retro-project-dir= encoder-num-layers= decoder-num-layers= encoder-tensor-model-parallel-size=0
        encoder-pipeline-model-parallel-size=0 pipeline-model-parallel-split-rank= vision-pretraining
        mrope-section=* yaml-cfg="""),
    *_named("refused", "inference and evaluation: not a training run", """
        max-new-tokens= do-sample temperature= top-k= top-p= greedy task=* task-data-path=* evaluation-batch-size=
        eval-language= max-eval-samples= broadcast chain-of-thought history-turns= max-length=
        inference-max-requests= inference-max-seq-length= inference-dynamic-batching
        inference-batch-times-seqlen-threshold= max-tokens-to-oom= origin-postprocess alternative-prompt"""),
    *_named("refused", "changes what the layers allocate and is not modelled", """
        use-fused-mlp output-layer-slice-num=1 input-layernorm-in-fp32 add-output-layer-bias add-dense-bias
        skip-bias-add embed-layernorm apply-layernorm-1p apply-residual-connection-post-layernorm squared-relu
        openai-gelu onnx-safe= attn-logit-softcapping= sliding-window= reset-attention-mask
        attention-mask-on-cpu use-fusion-attn-v2 use-kv-cache cp-attention-mask-type=causal square-alibi-mask
        fill-neg-inf alibi-fusion-attn-type= alibi-diagonal-opposite long-factor= short-factor= long-mscale=
        short-mscale= longrope-freqs-type= use-rope-scaling unaligned-linear compress-dense=
        calculate-per-token-loss no-clone-scatter-output-in-embedding defer-embedding-wgrad-compute
        wgrad-deferral-limit= flash-decode"""),
    *_named("refused", "changes how the model is split or scheduled and is not modelled", """
        schedules-method= tp-2d tp-x=1 tp-y=1 enable-overlap-ag-with-matmul enable-overlap-matmul-with-rs
        enable-backward-overlap-ag-with-matmul use-nd-matmul nd1-dim1-size= nd2-dim1-size= use-ascend-mc2 use-mc2
        coc-mode= coc-parallel-num=1 tp-comm-overlap tp-comm-overlap-cfg= tp-comm-overlap-rs-dgrad
        disable-tp-comm-overlap-ag disable-tp-comm-overlap-rs disable-tp-comm-bulk-dgrad disable-tp-comm-bulk-wgrad
        disable-tp-comm-split-ag disable-tp-comm-split-rs account-for-embedding-in-pipeline-split
        account-for-loss-in-pipeline-split decoder-first-pipeline-num-layers= decoder-last-pipeline-num-layers=
        pipeline-num-transformer-layers= use-nanopipe use-nanopipe-swap recompute-in-bubble recompute-in-advance
        automated-pipeline automated-pipeline-perf pp-schedule-list= optimized-mbs-list= optimized-mbs-mode mbs-idx=
        optimize-vpp-send-recv-comm overlap-p2p-communication-warmup-flush overlap-param-gather-with-optimizer-step
        use-multiparameter-pipeline-model-parallel dist-train dualpipev-dw-detach
        context-parallel-kv-cache-policy= context-parallel-cache-interval=0 use-ulysses-allgather-kv
        megatron-cp-in-bnsd hierarchical-context-parallel-sizes=* adaptive-cp-dynamic-attn-mask
        adaptive-cp-manually-set-mask-list adaptive-cp-only-reschedule adaptive-cp-without-coarse"""),
    *_named("refused", "moves or shrinks memory in a way that is not modelled", """
        swap-attention swap-modules= smart-swap swap-optimizer swap-optimizer-times= virtual-optimizer=*
        optimizer-cpu-offload optimizer-offload-fraction= use-torch-optimizer-for-cpu-offload
        overlap-cpu-optimizer-d2h-h2d no-pin-cpu-grads no-pin-cpu-params use-precision-aware-optimizer
        main-grads-dtype= main-params-dtype= exp-avg-dtype= exp-avg-sq-dtype= o2-gradient o2-optimizer use-ema
        use-torch-fsdp2 use-custom-fsdp fsdp2-config-path= init-model-with-meta-device data-parallel-sharding-strategy=
        keep-fp8-transpose-cache-when-using-custom-fsdp suggested-communication-unit-size= layerzero layerzero-config=
        enable-zero3 param-and-grad-buffer-pad= ddp-pad-buckets-for-high-nccl-busbw distributed-optimizer-no-replica
        adaptive-memory-optimization adaptive-recompute-device-swap adaptive-recompute-device-size=
        adaptive-recompute-profiling-step= recompute-modules=* recompute-module-list= recompute-type=
        fp8-format= fp8-recipe= fp8-margin= fp8-interval= fp8-amax-history-len= fp8-amax-compute-algo=
        fp8-param-gather no-fp8-wgrad first-last-layers-bf16 num-layers-at-start-in-bf16= num-layers-at-end-in-bf16=
        enable-cuda-graph external-cuda-graph cuda-graph-scope= cuda-graph-warmup-steps= auto-settings
        auto-settings-type= auto-settings-ranks= auto-settings-work-dir= auto-settings-log-level= prof-file=
        checkpoint-activations enable-elastic-training replication replication-factor= replication-jump=
        save-memory-ratio="""),
)  # fmt: skip

FLAGS: dict[str, Flag] = {flag.name: flag for flag in _TABLE}


@dataclass(frozen=True)
class FlagReport:
    """What the table says about one argument list. `refused` and `unknown` stop a run; `ignored` is only listed."""

    refused: list[str] = field(default_factory=list)
    """Sentences that begin with the flag."""
    ignored: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return not self.refused and not self.unknown

    def problem(self) -> str:
        """One sentence for the person at the keyboard; empty when the arguments can be run."""
        reasons: dict[str, list[str]] = {}
        for sentence in self.refused:
            name, _, why = sentence.partition(": ")
            reasons.setdefault(why, []).append(name)
        if self.unknown:
            reasons["not a flag the embedded trainer knows"] = self.unknown
        parts = [f"{', '.join(names)}: {why}" for why, names in reasons.items()]
        if not parts:
            return ""
        return "The embedded trainer cannot run this job. " + "; ".join(parts) + "."


def split(args: Sequence[str]) -> list[tuple[str, list[str]]]:
    """`--a 1 2 --b=3` → `[("--a", ["1", "2"]), ("--b", ["3"])]`; words before the first flag come with an empty name."""
    pairs: list[tuple[str, list[str]]] = []
    for word in args:
        if word.startswith("--") and len(word) > 2:
            name, equals, value = word.partition("=")
            pairs.append((name, [value] if equals else []))
        elif pairs:
            pairs[-1][1].append(word)
        else:
            pairs.append(("", [word]))
    return pairs


def check(args: Iterable[str]) -> FlagReport:
    """Looks every flag up. Costs no rank: the command line calls it when the embedded trainer is chosen."""
    report = FlagReport()
    for name, values in split(list(args)):
        flag = FLAGS.get(name)
        if flag is None:
            report.unknown.append(name or values[0])
        elif flag.handled == "ignored":
            report.ignored.append(name)
        elif flag.handled == "refused":
            if not (values and values[0] in flag.harmless):
                report.refused.append(f"{name}: {flag.effect}")
        else:
            problem = _value_problem(flag, values)
            if problem:
                report.refused.append(f"{name}: {problem}")
    return report


def _value_problem(flag: Flag, values: list[str]) -> str:
    if flag.takes == 0:
        return f"a switch, but '{values[0]}' follows it" if values else ""
    if flag.name == "--spec":
        return "" if _known_spec(values) else f"the layer spec '{' '.join(values)}' is not modelled"
    if len(values) != 1:
        return f"takes one value, got '{' '.join(values)}'"
    try:
        value = flag.convert(values[0])
    except ValueError:
        return f"'{values[0]}' is not a value for it"
    if flag.allowed and value not in flag.allowed:
        return f"'{values[0]}' is not modelled (only {', '.join(map(str, flag.allowed))})"
    return ""


def _known_spec(values: list[str]) -> bool:
    """Specs whose layers are those built here: Qwen3 (the plain one, with query and key norms) and Gemma2 (post-norms)."""
    return bool(values) and values[0].rpartition(".")[2] in ("qwen3_spec", "gemma2_spec")


def parse(args: Sequence[str]) -> dict[str, Any]:
    """Every modelled flag's value by key (`num_layers`), defaults included; UsageError where `check` is not content."""
    report = check(args)
    if not report.ok:
        raise UsageError(report.problem())
    values: dict[str, Any] = {flag.key: flag.default for flag in _TABLE if flag.handled == "modelled"}
    for name, words in split(args):
        flag = FLAGS[name]
        if flag.handled == "modelled":
            values[flag.key] = True if flag.takes == 0 else flag.convert(words[0])
    return values


def markdown() -> str:
    """The support table of the README, made from the table above: one row per effect."""
    rows: dict[tuple[str, str], list[str]] = {}
    for flag in _TABLE:
        name = f"`{flag.name}`"
        if flag.allowed:
            name += " (" + ", ".join(map(str, flag.allowed)) + ")"
        rows.setdefault((flag.handled, flag.effect), []).append(name)
    lines = ["| handled | what it changes | flags |", "|---|---|---|"]
    lines += [f"| {handled} | {effect} | {' '.join(names)} |" for (handled, effect), names in rows.items()]
    return "\n".join(lines)


if __name__ == "__main__":
    print(markdown())
