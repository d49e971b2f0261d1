#!/bin/bash
# Start it on each host, now or later: from one to four hosts, one trainer each (mode: ddp). Change the next three lines.
# The folder runs/ must be on a file system that all hosts share.
endpoint=node0:29400
config=config.yaml
# The run is found again by this name, which no other job may have.
export PARAMSERVER_JOB_ID=digits-1
# In torch 2.13 a host that joins later does not learn the address of rank 0 without this.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
# When a host joins or is lost, all ranks start again, and the run continues from its checkpoint with that many trainers.
torchrun --nnodes 1:4 --nproc-per-node 1 --max-restarts 100 \
    --rdzv-backend c10d --rdzv-endpoint $endpoint --rdzv-id "$PARAMSERVER_JOB_ID" \
    -m paramserver.launch --config $config
