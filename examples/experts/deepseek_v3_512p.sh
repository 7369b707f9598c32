#!/bin/bash
# DeepSeek-V3 (671B) on 64 nodes: 256 experts and a shared one, 3 dense layers in front, multi-latent attention, one layer of
# multi-token prediction. Hyper-parameters as published with the model.
TP=2
PP=16
EP=8
SEQ_LEN=4096
MBS=1
GBS=3840
MTP_ARGS="--mtp-num-layers 1 --mtp-loss-scaling-factor 0.3"

MODEL_ARGS="
    --use-mcore-models --spec mindspeed_llm.tasks.models.spec.deepseek_spec layer_spec
    --num-layers 64 --noop-layers 61,62,63 --hidden-size 7168 --ffn-hidden-size 18432 --num-attention-heads 128
    --multi-latent-attention --q-lora-rank 1536 --kv-lora-rank 512 --qk-head-dim 128 --qk-pos-emb-head-dim 64
    --v-head-dim 128 --qk-layernorm --padded-vocab-size 129280 --make-vocab-size-divisible-by 1
    --seq-length $SEQ_LEN --max-position-embeddings 163840 --position-embedding-type rope --use-rotary-position-embeddings
    --rope-scaling-type yarn --rope-scaling-factor 40 --rope-scaling-original-max-position-embeddings 4096
    --rope-scaling-mscale 1.0 --rope-scaling-mscale-all-dim 1.0 --beta-fast 32 --beta-slow 1
    --normalization RMSNorm --swiglu --untie-embeddings-and-output-weights --disable-bias-linear
    --attention-dropout 0.0 --hidden-dropout 0.0 $MTP_ARGS
"
EXPERT_ARGS="
    --num-experts 256 --moe-router-topk 8 --moe-ffn-hidden-size 2048 --n-shared-experts 1 --first-k-dense-replace 3
    --moe-layer-freq 1 --moe-grouped-gemm --moe-router-load-balancing-type none --moe-router-num-groups 8
    --moe-router-group-topk 4 --moe-router-topk-scaling-factor 2.5 --moe-router-score-function sigmoid
    --moe-router-enable-expert-bias --moe-router-dtype fp32 --norm-topk-prob --moe-permutation-async-comm
    --moe-token-dispatcher-type alltoall_seq
"
LAYOUT_ARGS="
    --tensor-model-parallel-size $TP --pipeline-model-parallel-size $PP --expert-model-parallel-size $EP
    --sequence-parallel --use-distributed-optimizer
    --recompute-granularity full --recompute-method uniform --recompute-num-layers 1
"
TRAIN_ARGS="
    --micro-batch-size $MBS --global-batch-size $GBS --bf16 --lr 1.0e-5 --train-iters 2000 --clip-grad 1.0
    --use-flash-attn --use-fused-rotary-pos-emb --use-fused-swiglu --use-fused-rmsnorm --no-masked-softmax-fusion
    --attention-softmax-in-fp32 --no-gradient-accumulation-fusion
    --tokenizer-type PretrainedFromHF --tokenizer-name-or-path ./tokenizer --data-path ./data/pretrain --split 100,0,0
    --no-load-optim --no-load-rng --distributed-backend nccl --ai-framework mindspore
"

msrun --worker_num 512 --local_worker_num 8 --master_port 8118 --log_dir msrun_log --join True \
    pretrain_gpt.py $MODEL_ARGS $EXPERT_ARGS $LAYOUT_ARGS $TRAIN_ARGS
