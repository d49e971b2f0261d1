"""Node embeddings of a graph with hidden communities, trained on its edges without waiting for each other.

What it shows:

- A table of an ``nn.Embedding`` with ``sparse=True`` has a row for each node. Both ends of an edge, and the nodes with
  which it is contrasted, are rows of the same table.
- ``server.consistency: async``: a trainer looks up the newest rows of its batch, and its gradients are applied at once.
  Two batches share about one node in seven, so few rows have changed when a stale gradient is applied.
- ``RowWiseAdagrad`` keeps one number for each node.
- The graph is generated, so the best AUC that any model can reach is known: it is that of the communities themselves.

The same file runs with ``--mode rpc``, ``--mode ddp`` and ``--mode local``.
"""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from paramserver import Task
from paramserver.optim import RowWiseAdagrad


class NodeEmbeddings(nn.Module):
    """Scores a pair of nodes by the product of their embeddings.

    Tang et al., "LINE: Large-scale information network embedding", WWW 2015, first-order proximity.
    """

    def __init__(self, nodes, width):
        super().__init__()
        self.nodes = nn.Embedding(nodes, width, sparse=True)
        nn.init.normal_(self.nodes.weight, std=width**-0.5)

    def forward(self, sources, targets):
        return (self.nodes(sources) * self.nodes(targets)).sum(-1)


class Auc:
    """The probability that an edge has a higher score than a pair that is none; equal scores count one half."""

    def __init__(self):
        self.reset()

    def reset(self):
        self.scores, self.are_edges = [], []

    def update(self, scores, are_edges):
        self.scores.append(scores.detach().cpu().double())
        self.are_edges.append(are_edges.cpu() > 0)

    def merge_state(self, other):
        self.scores += other.scores
        self.are_edges += other.are_edges

    def compute(self):
        scores, are_edges = torch.cat(self.scores), torch.cat(self.are_edges)
        others = scores[~are_edges].sort().values
        below = torch.searchsorted(others, scores[are_edges])
        not_above = torch.searchsorted(others, scores[are_edges], right=True)
        return float((below + not_above).double().mean()) / (2 * len(others))


class Communities(Task):
    """Predicts edges of a graph whose nodes are in communities of equal size.

    Args:
        nodes, communities: of the graph; a node's community is its number modulo ``communities``.
        edges: of the training data.
        inside: share of the edges between two nodes of one community; the others are between any two.
        width: of the embeddings.
        contrasts: random nodes with which each edge is contrasted.
        lr: of RowWiseAdagrad.
    """

    def __init__(
        self,
        nodes: int = 10_000,
        communities: int = 20,
        edges: int = 200_000,
        inside: float = 0.8,
        width: int = 16,
        contrasts: int = 4,
        lr: float = 0.3,
    ) -> None:
        self.nodes, self.communities, self.edges, self.inside = nodes, communities, edges, inside
        self.width, self.contrasts, self.lr = width, contrasts, lr
        self.auc, self.best_auc = Auc(), Auc()

    def build_model(self):
        return NodeEmbeddings(self.nodes, self.width)

    def build_optimizer(self, model):
        return RowWiseAdagrad(model.parameters(), self.lr)

    def _edges(self, count, seed):
        generator = torch.Generator().manual_seed(seed)
        sources, targets = torch.randint(0, self.nodes, (2, count), generator=generator)
        is_inside = torch.rand(count, generator=generator) < self.inside
        neighbours = targets - (targets - sources) % self.communities
        return sources, torch.where(is_inside, neighbours.clamp_(min=0), targets)

    def train_source(self, partition):
        return TensorDataset(*self._edges(self.edges, 1))

    def validation_source(self, partition):
        sources, targets = self._edges(10_000, 2)
        others = torch.randint(0, self.nodes, targets.shape, generator=torch.Generator().manual_seed(3))
        are_edges = torch.arange(2 * len(sources)) < len(sources)
        return TensorDataset(torch.cat([sources, sources]), torch.cat([targets, others]), are_edges.float())

    def training_step(self, model, batch, batch_idx):
        sources, targets = batch
        others = torch.randint(0, self.nodes, (len(sources), self.contrasts), device=sources.device)
        scores = model(sources[:, None], torch.cat([targets[:, None], others], 1))
        is_edge = torch.zeros_like(scores)
        is_edge[:, 0] = 1.0
        return F.binary_cross_entropy_with_logits(scores, is_edge)

    def validation_step(self, model, batch, valid_batch_idx, batch_idx):
        sources, targets, are_edges = batch
        scores = model(sources, targets)
        self.auc.update(scores, are_edges)
        self.best_auc.update(((sources - targets) % self.communities == 0).float(), are_edges)
        loss = F.binary_cross_entropy_with_logits(scores, are_edges)
        return {"loss": loss, "auc": self.auc, "best_possible_auc": self.best_auc}
