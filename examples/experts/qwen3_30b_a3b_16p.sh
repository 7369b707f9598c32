#!/bin/bash
# Qwen3-30B-A3B on two nodes: 128 experts, 8 of them for each token. Hyper-parameters as published with the model.
TP=1
PP=2
EP=8
SEQ_LEN=4096
MBS=1
GBS=256

MODEL_ARGS="
    --use-mcore-models --spec mindspeed_llm.tasks.models.spec.qwen3_spec layer_spec
    --num-layers 48 --hidden-size 2048 --ffn-hidden-size 6144 --num-attention-heads 32 --kv-channels 128
    --group-query-attention --num-query-groups 4 --qk-layernorm --padded-vocab-size 151936 --make-vocab-size-divisible-by 1
    --seq-length $SEQ_LEN --max-position-embeddings $SEQ_LEN --position-embedding-type rope --rotary-base 1000000
    --use-rotary-position-embeddings --normalization RMSNorm --swiglu --untie-embeddings-and-output-weights
    --disable-bias-linear --attention-dropout 0.0 --hidden-dropout 0.0
"
EXPERT_ARGS="
    --num-experts 128 --moe-router-topk 8 --moe-ffn-hidden-size 768 --norm-topk-prob --moe-grouped-gemm
    --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 0.001 --moe-permutation-async-comm
    --moe-token-dispatcher-type alltoall_seq --moe-layer-freq -1 --first-k-dense-replace -1
"
LAYOUT_ARGS="
    --tensor-model-parallel-size $TP --pipeline-model-parallel-size $PP --expert-model-parallel-size $EP
    --sequence-parallel --use-distributed-optimizer
    --recompute-granularity full --recompute-method uniform --recompute-num-layers 1
"
TRAIN_ARGS="
    --micro-batch-size $MBS --global-batch-size $GBS --bf16 --lr 1.25e-6 --train-iters 2000 --clip-grad 1.0
    --use-flash-attn --use-fused-rotary-pos-emb --use-fused-swiglu --use-fused-rmsnorm --no-masked-softmax-fusion
    --attention-softmax-in-fp32 --no-gradient-accumulation-fusion --gemm-gradient-accumulation-fusion
    --tokenizer-type PretrainedFromHF --tokenizer-name-or-path ./tokenizer --data-path ./data/alpaca --split 100,0,0
    --no-load-optim --no-load-rng --distributed-backend nccl --ai-framework mindspore
"

msrun --worker_num 16 --local_worker_num 8 --master_port 8118 --log_dir msrun_log --join True \
    pretrain_gpt.py $MODEL_ARGS $EXPERT_ARGS $LAYOUT_ARGS $TRAIN_ARGS
