#!/usr/bin/env bash
# Four nodes of 8 GPUs each under SLURM; RUN is a run's folder that all nodes share.
# Not run here: there is no SLURM where this is tested.
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=16
#SBATCH --signal=TERM@120
set -euo pipefail
RUN=${RUN:?name the folder of a run that was made with processes = 32}
HEAD=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
exec srun torchrun \
    --nnodes 4 \
    --nproc-per-node 8 \
    --rdzv-id "$SLURM_JOB_ID" \
    --rdzv-backend c10d \
    --rdzv-endpoint "$HEAD:29400" \
    --max-restarts 3 \
    -m esper resume "$RUN" --quiet
