"""A Ray cluster of two nodes on this machine: ``python ray_cluster.py`` prints its address and ends with its input."""

import sys

from ray.cluster_utils import Cluster

if __name__ == "__main__":
    options = {"num_cpus": 2, "object_store_memory": 80 * 2**20}
    cluster = Cluster(initialize_head=True, head_node_args={**options, "include_dashboard": False})
    cluster.add_node(**options)
    print(f"address {cluster.address}", flush=True)
    sys.stdin.read()
    cluster.shutdown()
