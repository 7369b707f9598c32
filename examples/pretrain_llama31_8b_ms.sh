#!/bin/bash
# Llama 3.1 8B pretraining on 8 cards, all of them tensor-parallel.
#
#   mindspeed-dryrun launch examples/pretrain_llama31_8b_ms.sh --set SEQ_LEN=16384

export CUDA_DEVICE_MAX_CONNECTIONS=1
TP=8
PP=1
SEQ_LEN=8192
MBS=1
GBS=32
EXTRA=${1:-}
mkdir -p logs

msrun --worker_num 8 --local_worker_num 8 --node_rank 0 --master_addr localhost --master_port 6000 --join False pretrain_gpt.py \
    --use-mcore-models --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 \
    --group-query-attention --num-query-groups 8 --padded-vocab-size 128256 --make-vocab-size-divisible-by 1 \
    --untie-embeddings-and-output-weights --disable-bias-linear --swiglu --normalization RMSNorm --norm-epsilon 1e-5 \
    --position-embedding-type rope --rotary-base 500000 --max-position-embeddings 131072 --seq-length $SEQ_LEN \
    --attention-dropout 0.0 --hidden-dropout 0.0 --tensor-model-parallel-size $TP --pipeline-model-parallel-size $PP \
    --sequence-parallel --micro-batch-size $MBS --global-batch-size $GBS --train-iters 2000 --lr 1.25e-6 --min-lr 1.25e-7 \
    --lr-decay-style cosine --lr-warmup-fraction 0.01 --weight-decay 1e-1 --clip-grad 1.0 --adam-beta1 0.9 --adam-beta2 0.95 \
    --bf16 --use-flash-attn --use-fused-rmsnorm --use-fused-swiglu --use-fused-rotary-pos-emb --no-masked-softmax-fusion \
    --attention-softmax-in-fp32 --no-gradient-accumulation-fusion --data-path ./dataset/llama31_text_document --split 100,0,0 \
    --tokenizer-type PretrainedFromHF --tokenizer-name-or-path ./llama31_8b_hf --save ./output-model/llama31_8b \
    --log-interval 1 --save-interval 2000 --eval-interval 2000 --eval-iters 0 \
    --distributed-backend nccl --ai-framework mindspore $EXTRA > logs/pretrain_llama31_8b.log 2>&1
