#!/bin/bash
# A model of 7B parameters in the shape of Llama-2.
#   GPUS=4 GPU_GB=80 DATA=my_text_document TOKENIZER=folder SAVE=checkpoints/run examples/llama2_7b.sh [more flags]
# GPUS: of one node, 1, 2, 4 or 8; GPU_GB: 40, 80 or 141. Without DATA it trains on mock data. Under SLURM:
#   sbatch --gpus-per-node=4 --export=ALL,GPU_GB=80 examples/slurm/torchrun.sbatch examples/llama2_7b.sh
# Tests shrink the sizes; a plan below holds for the sizes as they are.
set -euo pipefail
REPOSITORY=$(cd "$(dirname "$0")/.." && pwd)
NAME=llama2-7b
GPUS=${GPUS:-${SLURM_GPUS_ON_NODE:-1}}
GPU_GB=${GPU_GB:-80}
SEQ_LENGTH=${SEQ_LENGTH:-4096}
VOCAB_SIZE=${VOCAB_SIZE:-32000}

MODEL=(
    --num-layers "${NUM_LAYERS:-32}" --hidden-size "${HIDDEN_SIZE:-4096}" --ffn-hidden-size "${FFN_HIDDEN_SIZE:-11008}"
    --num-attention-heads "${NUM_HEADS:-32}"
    --position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear
    --untie-embeddings-and-output-weights
)

# A plan of one's own: give TENSOR, RECOMPUTE (full or none), GRADIENTS (bf16 or fp32) and BUDGET_GIB (GiB or none).
if [ -z "${BUDGET_GIB:-}" ]; then
# begin plans (written by examples/plan_cells.py)
case "$GPUS x $GPU_GB GB" in
"1 x 40 GB")
    # GPU: 35.0 of 37.0 usable GiB = weights 12.6, gradients 12.6 (bf16), activations
    # 1.6, logits or a layer's largest tensors 0.4, optimizer state 4.6, slots and upcast 3.4.
    # Full recomputation: activations would take 18.2 GiB otherwise.
    # bf16 gradients: fp32 ones would take 25.1 GiB.
    # Host: 66.7 GiB of the node, pinned: 7 % of the state stay on the GPU; of the rest the
    # planner expects the GPU to update 75 % (bound by h2d).
    TENSOR=1 RECOMPUTE=full GRADIENTS=bf16 BUDGET_GIB=8
    ;;
"2 x 40 GB")
    # GPU: 34.6 of 37.0 usable GiB = weights 12.6, gradients 12.6 (bf16), activations
    # 1.6, logits or a layer's largest tensors 0.4, optimizer state 5.1, slots and upcast 2.4.
    # Full recomputation: activations would take 18.2 GiB otherwise.
    # bf16 gradients: fp32 ones would take 25.1 GiB.
    # Host: 61.2 GiB of the node, pinned: 15 % of the state stay on the GPU; of the rest the
    # planner expects the GPU to update 67 % (bound by dram).
    TENSOR=1 RECOMPUTE=full GRADIENTS=bf16 BUDGET_GIB=8
    ;;
"4 x 40 GB")
    # GPU: 34.9 of 37.0 usable GiB = weights 12.6, gradients 12.6 (bf16), activations
    # 1.6, logits or a layer's largest tensors 0.4, optimizer state 6.6, slots and upcast 1.2.
    # Full recomputation: activations would take 18.2 GiB otherwise.
    # bf16 gradients: fp32 ones would take 25.1 GiB.
    # Host: 38.4 GiB of the node, pinned: 42 % of the state stay on the GPU; of the rest the
    # planner expects the GPU to update 100 % (bound by d2h).
    TENSOR=1 RECOMPUTE=full GRADIENTS=bf16 BUDGET_GIB=8
    ;;
"8 x 40 GB")
    # GPU: 34.9 of 37.0 usable GiB = weights 12.6, gradients 12.6 (bf16), activations
    # 1.6, logits or a layer's largest tensors 0.4, optimizer state 7.8, slots and upcast 0.0.
    # Full recomputation: activations would take 18.2 GiB otherwise.
    # bf16 gradients: fp32 ones would take 25.1 GiB.
    # All state fits beside them: offload is not needed and would gain nothing.
    TENSOR=1 RECOMPUTE=full GRADIENTS=bf16 BUDGET_GIB=none
    ;;
"1 x 80 GB")
    # GPU: 72.8 of 75.0 usable GiB = weights 12.6, gradients 12.6 (bf16), activations
    # 18.2, logits or a layer's largest tensors 0.8, optimizer state 25.3, slots and upcast 3.4.
    # bf16 gradients: fp32 ones would take 25.1 GiB.
    # Host: 43.0 GiB of the node, pinned: 40 % of the state stay on the GPU; of the rest the
    # planner expects the GPU to update 75 % (bound by cpu).
    TENSOR=1 RECOMPUTE=none GRADIENTS=bf16 BUDGET_GIB=29
    ;;
"2 x 80 GB")
    # GPU: 72.7 of 75.0 usable GiB = weights 12.6, gradients 12.6 (bf16), activations
    # 18.2, logits or a layer's largest tensors 0.8, optimizer state 26.1, slots and upcast 2.4.
    # bf16 gradients: fp32 ones would take 25.1 GiB.
    # Host: 11.3 GiB of the node, pinned: 84 % of the state stay on the GPU; of the rest the
    # planner expects the GPU to update 100 % (bound by d2h).
    TENSOR=1 RECOMPUTE=none GRADIENTS=bf16 BUDGET_GIB=29
    ;;
"4 x 80 GB")
    # GPU: 72.3 of 75.0 usable GiB = weights 12.6, gradients 25.1 (fp32), activations
    # 18.2, logits or a layer's largest tensors 0.8, optimizer state 15.7, slots and upcast 0.0.
    # All state fits beside them: offload is not needed and would gain nothing.
    TENSOR=1 RECOMPUTE=none GRADIENTS=fp32 BUDGET_GIB=none
    ;;
"8 x 80 GB")
    # GPU: 64.5 of 75.0 usable GiB = weights 12.6, gradients 25.1 (fp32), activations
    # 18.2, logits or a layer's largest tensors 0.8, optimizer state 7.8, slots and upcast 0.0.
    # All state fits beside them: offload is not needed and would gain nothing.
    TENSOR=1 RECOMPUTE=none GRADIENTS=fp32 BUDGET_GIB=none
    ;;
"1 x 141 GB")
    # GPU: 119.4 of 132.0 usable GiB = weights 12.6, gradients 25.1 (fp32), activations
    # 18.2, logits or a layer's largest tensors 0.8, optimizer state 62.8, slots and upcast 0.0.
    # All state fits beside them: offload is not needed and would gain nothing.
    TENSOR=1 RECOMPUTE=none GRADIENTS=fp32 BUDGET_GIB=none
    ;;
"2 x 141 GB")
    # GPU: 88.0 of 132.0 usable GiB = weights 12.6, gradients 25.1 (fp32), activations
    # 18.2, logits or a layer's largest tensors 0.8, optimizer state 31.4, slots and upcast 0.0.
    # All state fits beside them: offload is not needed and would gain nothing.
    TENSOR=1 RECOMPUTE=none GRADIENTS=fp32 BUDGET_GIB=none
    ;;
"4 x 141 GB")
    # GPU: 72.3 of 132.0 usable GiB = weights 12.6, gradients 25.1 (fp32), activations
    # 18.2, logits or a layer's largest tensors 0.8, optimizer state 15.7, slots and upcast 0.0.
    # All state fits beside them: offload is not needed and would gain nothing.
    TENSOR=1 RECOMPUTE=none GRADIENTS=fp32 BUDGET_GIB=none
    ;;
"8 x 141 GB")
    # GPU: 64.5 of 132.0 usable GiB = weights 12.6, gradients 25.1 (fp32), activations
    # 18.2, logits or a layer's largest tensors 0.8, optimizer state 7.8, slots and upcast 0.0.
    # All state fits beside them: offload is not needed and would gain nothing.
    TENSOR=1 RECOMPUTE=none GRADIENTS=fp32 BUDGET_GIB=none
    ;;
*)
    IMPOSSIBLE="there is no plan for it; GPUS is 1, 2, 4 or 8 (of one node) and GPU_GB is 40, 80 or 141"
    ;;
esac
# end plans (written by examples/plan_cells.py)
fi

source "$(dirname "$0")/launch.sh"
