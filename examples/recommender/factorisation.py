"""The model of both tasks of this example."""

from torch import nn


class FactorisationMachine(nn.Module):
    """Rendle, "Factorization machines", ICDM 2010, with two fields: their biases, and the product of their factors."""

    def __init__(self, users, items, width):
        super().__init__()
        # The last column of each table is the bias.
        self.users = nn.Embedding(users, width + 1, sparse=True)
        self.items = nn.Embedding(items, width + 1, sparse=True)
        for table in (self.users, self.items):
            nn.init.normal_(table.weight, std=0.1)

    def forward(self, users, items):
        user, item = self.users(users), self.items(items)
        return (user[:, :-1] * item[:, :-1]).sum(1) + user[:, -1] + item[:, -1]
