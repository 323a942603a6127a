#!/bin/bash
# sbatch examples/launch/slurm.sh examples/flux_fsdp2.py --steps 1000
#SBATCH --job-name=knapformer
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
set -euo pipefail

# Read all of it: a pipe into head would end scontrol with SIGPIPE, and with pipefail the script.
hostnames=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
MASTER_ADDR=${hostnames%%$'\n'*}
export MASTER_ADDR MASTER_PORT=${MASTER_PORT:-29500} OMP_NUM_THREADS=${OMP_NUM_THREADS:-8}

# One agent per node; SLURM_NODEID is known only inside srun.
srun bash -c 'exec torchrun \
  --nnodes "$SLURM_NNODES" --node-rank "$SLURM_NODEID" --nproc-per-node "${SLURM_GPUS_ON_NODE:-1}" \
  --master-addr "$MASTER_ADDR" --master-port "$MASTER_PORT" "$@"' torchrun "$@"
