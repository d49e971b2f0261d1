#!/bin/bash
# Start it on each of two hosts: "bash node.sh 0" and "bash node.sh 1". Change the next three lines.
host_of_node_0=node0 port=29500
config=config.yaml
nodes=2 processes_per_node=2
# Rank 0, on node 0, is the server; the others are trainers (mode: rpc). With mode: ddp all ranks are trainers.
# After any loss torchrun starts all ranks again, and they continue from the last checkpoint.
torchrun --nnodes $nodes --node-rank "$1" --master-addr $host_of_node_0 --master-port $port \
    --nproc-per-node $processes_per_node --max-restarts 3 \
    -m paramserver.launch --config $config
