#!/bin/bash
# Llama 3 70B pretraining on 4 nodes of 8 cards: TP 8 inside a node, four pipeline stages of 19 to 21 layers.
# On a cluster each node runs `bash pretrain_llama3_70b_4nodes_ms.sh NODE_RANK MASTER_ADDR`; a dry run needs no node at all:
#
#   mindspeed-dryrun launch examples/pretrain_llama3_70b_4nodes_ms.sh

export CUDA_DEVICE_MAX_CONNECTIONS=1
NODE_RANK=${1:-0}
MASTER_ADDR=${2:-localhost}
NPUS_PER_NODE=8
NNODES=4
TP=8
PP=4
LAYERS=19,20,20,21
SEQ_LEN=8192
MBS=1
GBS=512

run_training() {
    nohup msrun --worker_num $((NPUS_PER_NODE * NNODES)) --local_worker_num $NPUS_PER_NODE --node_rank "$1" \
        --master_addr "$MASTER_ADDR" --master_port 6001 --log_dir msrun_log --join False pretrain_gpt.py \
        --use-mcore-models --num-layers 80 --num-layer-list $LAYERS --hidden-size 8192 --ffn-hidden-size 28672 \
        --num-attention-heads 64 --group-query-attention --num-query-groups 8 --padded-vocab-size 128256 \
        --make-vocab-size-divisible-by 1 --untie-embeddings-and-output-weights --disable-bias-linear --swiglu \
        --normalization RMSNorm --norm-epsilon 1e-5 --position-embedding-type rope --rotary-base 500000 \
        --max-position-embeddings 8192 --seq-length $SEQ_LEN --attention-dropout 0.0 --hidden-dropout 0.0 \
        --tensor-model-parallel-size $TP --pipeline-model-parallel-size $PP --sequence-parallel \
        --use-distributed-optimizer --overlap-grad-reduce --micro-batch-size $MBS --global-batch-size $GBS \
        --train-iters 5000 --lr 1e-6 --min-lr 1e-7 --lr-decay-style cosine --lr-warmup-iters 500 --weight-decay 1e-1 \
        --clip-grad 1.0 --adam-beta1 0.9 --adam-beta2 0.95 --bf16 --use-flash-attn --use-fused-rmsnorm --use-fused-swiglu \
        --use-fused-rotary-pos-emb --no-masked-softmax-fusion --attention-softmax-in-fp32 --no-gradient-accumulation-fusion \
        --recompute-granularity full --recompute-method block --recompute-num-layers 2 \
        --data-path ./dataset/llama3_text_document --split 100,0,0 --tokenizer-type PretrainedFromHF \
        --tokenizer-name-or-path ./llama3_70b_hf --save ./output-model/llama3_70b --log-interval 1 --save-interval 1000 \
        --eval-interval 5000 --eval-iters 0 --distributed-backend nccl --ai-framework mindspore \
        > "logs/llama3_70b_node$1.log" 2>&1 &
    wait $!
}

mkdir -p logs
run_training "$NODE_RANK"
