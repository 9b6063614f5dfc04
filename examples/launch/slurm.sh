#!/bin/bash
#SBATCH --nodes=4 --ntasks-per-node=1 --gpus-per-node=8 --time=04:00:00 --job-name=run7
export GLOO_SOCKET_IFNAME=eth1 NCCL_SOCKET_IFNAME=eth1 TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
HEAD=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
srun torchrun --nnodes 4 --nproc-per-node 8 --rdzv-backend c10d --rdzv-id "$SLURM_JOB_ID" --rdzv-endpoint "$HEAD:29400" \
    -m fsharding train --preset llama3_8b --mesh replica=4 --strategy hsdp --steps 100000 --save-every 500 --keep 3 \
    --out /shared/run7 --resume auto --deadline slurm
